"""Models trained by the published recipe: accuracies, and what two attackers find in them."""

from gradveil.audits.results import CaseResult, Row
from gradveil.papers.catalog import EXPERIMENTS
from gradveil.papers.cells import Trained
from gradveil.papers.experiments import Size
from gradveil.papers.published import figure
from gradveil.papers.records import Records
from gradveil.papers.switches import AS_PUBLISHED
from results.records import (
    RECORDS,
    audit,
    facts,
    hits,
    lines,
    mcnemar,
    mean,
    percent,
    published,
    ranked_first,
    row,
    share,
    spread,
    table,
)

HYBRID = "3-1-7+43-18-18"
POLICIES = ("none", HYBRID, "43-18-18", "3-1-7")
TRAININGS = "trainings/cifar100-resnet20-4-h200.jsonl"
LINEUPS = "lineup-trained-60-epochs.json"
SHIFTS = "lineup-shifts-trained-60-epochs.json"
FAR = [f"{pixels} pixels" for pixels in (2, 4, 6, 8)]
ATTACKS = ("adam-cosine", "raced")
TRIED = 31  # the last of the test images on which the settings of `raced` were chosen


def section() -> str:
    return "\n\n".join(
        (
            "## Trained models: CIFAR-100, resnet20-4, 60 epochs, H200",
            _accuracies(),
            _two_attackers(),
            _published_attack(),
            _moved(),
        )
    )


def _accuracies() -> str:
    found = {
        (run["settings"]["defense"], run["settings"]["seed"]): run["test_accuracy"]
        for run in lines(TRAININGS)
    }
    seeds = sorted({seed for _, seed in found})
    body = []
    for policy in POLICIES:
        ours = [found.get((policy, seed)) for seed in seeds]
        theirs = published("policies", policy, 1, "%")
        cells = ["" if accuracy is None else percent(accuracy, 2) for accuracy in ours]
        body.append([policy, *cells, theirs])
    head = ["defense", *(f"seed {seed}" for seed in seeds), "paper / replication"]
    return (
        "Test accuracy by training seed (`gradveil train --data cifar100 --model resnet20-4 "
        f"--defense D --seed S`; records `{TRAININGS}`):\n\n{table(head, body)}\n\n{_beside()}"
    )


def _beside() -> str:
    """Say how far other trainings by the same recipe are from the replication's."""
    records = Records((RECORDS / "reproduce",))
    experiment = EXPERIMENTS["table-defenses"]
    ours: dict[str, float] = {}
    for name, cell in experiment.entries(AS_PUBLISHED, Size()):
        result = records.result(cell) if isinstance(cell, Trained) else None
        if result is not None:
            ours[name] = 100 * result["accuracy"]
    assert experiment.table is not None
    apart = {}
    for name, value in ours.items():
        theirs = figure(experiment.table, name, "replication", "acc")
        assert theirs is not None
        apart[name] = value - theirs
    hybrid = apart.pop(HYBRID)
    low, high = min(apart.values()), max(apart.values())
    return (
        "These have the whole loss and CIFAR-100's constants. Why they are lower than published is "
        "not known. With the loss halved and CIFAR-10's constants, as published, the "
        f"{len(apart)} gradient defenses are {low:+.1f} to {high:+.1f} points from the "
        f"replication's (*table-defenses* below), and the hybrid is {hybrid:+.1f}; none is not "
        "trained so yet. The paper trains for 200 epochs, which is not measured yet either."
    )


def _two_attackers() -> str:
    """The published attack and the raced one on the same images, without and with the hybrid."""
    whole = audit("raced-60-epochs")
    body, notes = [], []
    for case in whole.cases:
        controls = [
            ("blind", _guess(case), "guess that knows the defense"),
            ("bar", "class mean, draws known", "bar: it knows the draws too"),
            ("sham", "sham", "sham: raced on updates of other images of the same labels"),
            ("ceiling", "true picture with noise", "ceiling: true picture with noise of that size"),
            ("ceiling", "gradient line-up", "ceiling: candidates ranked by their gradients"),
        ]
        found = [_attacked(row(case, name)) for name in ATTACKS]
        found += [_attacked(row(case, name, kind), words) for kind, name, words in controls]
        assert case.model is not None
        accuracy = percent(case.model.accuracy or 0)
        body += [[f"`{case.defense}`, {accuracy}", *cells] for cells in found]
        weak, strong = (ranked_first(case, name) for name in ATTACKS)
        assert min(weak) > TRIED, "the settings of `raced` came from some of these images"
        notes.append((case.defense, _differ(weak, strong)))
    plain, hybrid = whole.cases
    guessed, strongest = (
        " and ".join(f"{each.psnr.mean:.1f}" for each in rows)
        for rows in (
            [row(case, _guess(case), "blind") for case in whole.cases],
            [row(case, "raced") for case in whole.cases],
        )
    )
    seconds = [row(plain, name).seconds for name in ATTACKS]
    positives = ", ".join(
        f"{name} {found.identified}/{found.n}"
        for name in ATTACKS
        for found in [row(plain, name, "positive")]
    )
    pairs = ", ".join(f"{p} under `{name}`" for name, p in notes)
    by_weak, by_strong = (
        _differ(ranked_first(hybrid, name), ranked_first(plain, name)) for name in ATTACKS
    )
    candidates = plain.settings["candidates"]
    (before,) = audit("raced-60-epochs-tf32").cases
    repeated = ", ".join(
        f"`{name}` {row(before, name).identified} and {row(plain, name).identified} of "
        f"{row(plain, name).n} "
        f"({_differ(ranked_first(before, name), ranked_first(plain, name))})"
        for name in ATTACKS
    )
    head = ["defense, accuracy", "row", "line-up", "top 5", "PSNR dB", "SSIM"]
    return (
        "**What an attacker finds in trained models** (`policy:none` is crop and flip alone, as in "
        f"training; accuracy on the device of the audit). {whole.settings['images']} test images "
        f"drawn over the classes, {plain.classes}, batch 1, labels known, seed "
        f"{whole.settings['seed']}. `raced` starts 32 searches for each image, keeps the best 8, "
        "then 2, by their gradient distance; its settings came from test images 0 to "
        f"{TRIED} of an earlier trial, none of which is among these. The line-up asks whether "
        f"the reconstruction resembles the true picture more than {candidates - 1} others of its "
        f"class; by chance {percent(1 / candidates, 0)} do. Exact 95% intervals.\n\n"
        f"{table(head, body)}\n\n"
        "Exact McNemar tests, images that only the first and only the second has at rank 1: "
        f"`adam-cosine` and `raced` {pairs}; under the hybrid and without it {by_weak} for "
        f"`adam-cosine`, {by_strong} for `raced`: {len(notes) + len(ATTACKS)} comparisons. "
        f"Attack seconds, H200: {seconds[0]:.0f} and {seconds[1]:.0f} for "
        f"{whole.settings['images']} images. Positive "
        f"controls (untrained lenet): {positives}. PSNR shows little of this: the guess that "
        f"knows the defense is at {guessed} dB, `raced` at {strongest} dB. Not tried: attacks that "
        "look through the policy (`raced+transform-guessed`), which know more; so the hybrid's "
        "rate is that of these two attacks.\n\n"
        "**Run twice**: without a policy the same images and settings were attacked before in "
        "TF32 and now in bf16 between the layers; rank 1 then and now: "
        f"{repeated}. Records `grids/raced-60-epochs-tf32`.\n\n"
        "![originals, images used, and what raced makes of their gradients]"
        "(docs/raced.png)\n\n"
        "In the first picture above, of the earlier run, a person sees the squirrel, and its rank "
        f"is {before.of('attack', 'raced')[0].scores['used']['rank']} of {candidates}: the line-up "
        "is strict, see below. One model a defense, one training seed, one attacker seed. "
        "`gradveil audit --data cifar100 --model resnet20-4 --checkpoint W --defense D "
        "--attack adam-cosine --attack raced --images 64`; records `grids/raced-60-epochs`."
    )


def _differ(left: dict[int, bool], right: dict[int, bool]) -> str:
    """Write how many images only each has at rank 1, and the exact McNemar p."""
    ours, theirs, p = mcnemar([left[i] for i in left], [right[i] for i in left])
    return f"{ours} : {theirs}, p = {p:.2g}"


def _guess(case: CaseResult) -> str:
    return str(case.settings["guess"]["used"])


def _attacked(found: Row, words: str | None = None) -> list[str]:
    top = "-" if found.top5 is None else f"{found.top5}/{found.n}"
    name = f"`{found.attack}`" if words is None else words
    return [name, hits(found), top, spread(found.psnr, 2), mean(found.ssim)]


def _moved() -> str:
    """How many more pictures a line-up finds that looks further for them."""
    found = facts(SHIFTS)
    body = []
    for defense, rows in found["cases"].items():
        body.append(
            [
                "none, images as they are" if defense == "none" else f"`{defense}`",
                *(share(rows[f"adam-cosine, {far}"]["rank_1"], 100) for far in FAR),
                ", ".join(
                    str(rows[f"adam-cosine of another victim, {far}"]["rank_1"]) for far in FAR
                ),
            ]
        )
    plain, wide = (
        [r == 1 for r in found["cases"]["policy:none"][f"adam-cosine, {far}"]["ranks"]]
        for far in (FAR[0], FAR[-1])
    )
    left, right, p = mcnemar(plain, wide)
    head = ["defense", *(f"up to {far}" for far in FAR), "of another victim"]
    return (
        "**The line-up is strict.** It finds a reconstruction that is moved by up to 2 pixels. A "
        "trained network cares little where things are, and its reconstructions may lie further "
        "off. "
        "The reconstructions of the last table, ranked with more room; the control is another "
        f"victim's reconstruction in the same line-up (by chance {100 / found['candidates']:.0f} "
        f"of 100):\n\n{table(head, body)}\n\n"
        f"With crop and flip alone, {right} pictures are found only with 8 pixels of room and "
        f"{left} only with 2 (exact McNemar p = {p:.2g}). So **rates of trained models here are "
        f"lower bounds**, by {sum(wide) - sum(plain)} points there, and some of what looks like a "
        "fall of leakage with training may be displacement: untrained ones were not looked at so. "
        "More room is not always better: an edge as wide is left out, so that with 8 pixels the "
        "inner 16 x 16 are compared, and less of a picture that lies where it should is seen (see "
        "`laplacian:0.01` in *table-defenses*). The four distances were looked at after the "
        f"attack, so none is chosen here. Records `{SHIFTS}` (`benchmarks/lineup.py --shifts`)."
    )


def _published_attack() -> str:
    """The published attack by policy, on consecutive test images."""
    whole, ranks = audit("trained-60-epochs"), facts(LINEUPS)
    body = []
    for case in whole.cases:
        found, lineup = row(case, "adam-cosine"), ranks["cases"][case.defense]
        ours, class_mean = lineup["adam-cosine"], lineup["blind: class mean"]
        noisy = lineup["true picture with the noise of adam-cosine"]
        body.append(
            [
                "none, images as they are" if case.defense == "none" else f"`{case.defense}`",
                spread(found.psnr, 2),
                published("policies", case.defense, 0, " dB"),
                mean(found.ssim),
                share(ours["rank_1"], ours["n"]),
                str(ours["top_5"]),
                f"{class_mean['rank_1']}/{class_mean['n']}",
                f"{noisy['rank_1']}/{noisy['n']}",
            ]
        )
    head = ["defense", "PSNR dB", "paper / replication", "SSIM", "rank 1", "top 5"]
    head += ["class mean: rank 1", "true picture with noise of that size"]
    plain, hybrid = (
        [rank == 1 for rank in ranks["cases"][name]["adam-cosine"]["ranks"]]
        for name in ("policy:none", HYBRID)
    )
    left, right, p = mcnemar(plain, hybrid)
    return (
        f"**`adam-cosine` as published** (4,800 iterations), test images 0 to "
        f"{whole.settings['images'] - 1}, each model attacked under the defense it was trained "
        "under (`policy:none` is crop and flip alone, on the model without a defense), against the "
        f"images used; line-up of {ranks['candidates']}:\n\n{table(head, body)}\n\n"
        f"Against *this* attack the hybrid gives away fewer pictures than crop and flip alone "
        f"({left} only without it, {right} only with it, exact McNemar p = {p:.2g}, one of four "
        "comparisons looked at). That is a weak attack, as the table above shows. Records "
        "`grids/trained-60-epochs` and "
        f"`{LINEUPS}` (`benchmarks/lineup.py`)."
    )
