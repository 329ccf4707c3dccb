"""Batches of a small network with batch norm, in both modes and after local steps."""

from typing import NamedTuple

from gradveil.audits.attackers import MATCHED, STANDARD
from gradveil.audits.results import CaseResult
from gradveil.papers.tables import rank_one
from gradveil.stats import holm, signed_rank
from results.records import (
    audit,
    chance,
    guess,
    mean,
    p_value,
    percent,
    ranked_first,
    row,
    spread,
    table,
)

TITLE = "Batches behind batch norm and dense layers"
SENT = "sent-statistics"
LEVEL = 0.05


class Kind(NamedTuple):
    """What the clients of an audit do, and the folder of its records."""

    folder: str
    trained: bool
    mode: str
    images: int  # of an update
    steps: int


KINDS = tuple(
    Kind(f"{mode}-mode-{stage}{ending}", stage == "trained", mode, images, steps)
    for mode, images, steps, ending in (
        ("eval", 8, 1, ""),
        ("train", 8, 1, ""),
        ("train", 8, 4, "-4-steps"),
        ("eval", 32, 1, "-32"),
        ("train", 32, 1, "-32"),
    )
    for stage in ("untrained", "trained")
)


def section() -> str:
    body = []
    for kind in KINDS:
        case = _case(kind)
        for attack in sorted({each.attack for each in case.rows if each.kind == "attack"}):
            found = row(case, attack)
            shammed = attack == case.strongest.attack
            body.append(
                [
                    _stage(kind),
                    kind.mode,
                    str(kind.images),
                    str(kind.steps),
                    f"`{attack}`",
                    rank_one(found),
                    guess(case).lineup,
                    row(case, "sham", "sham").lineup if shammed else "-",
                    p_value(found.verdict.p_identified),
                    spread(found.psnr),
                    mean(found.ssim, 2),
                ]
            )
    head = ["training", "mode", "images", "steps", "attack", "rank 1 (95%)", "guess", "sham"]
    head += ["p", "PSNR dB", "SSIM"]
    first = _case(KINDS[0])
    return (
        f"## {TITLE}\n"
        "The network of Flower's quickstart with batch norm behind its two convolutions, then "
        "three dense layers; CIFAR-100, labels known, victims drawn from the training images, "
        f"{first.rows[0].updates} updates a row, seed 0, two threads of a CPU. A search has "
        f"{iterations()} iterations; `raced` starts 32 searches and ends 2. Local steps have a "
        f"rate of {_rate()}. Chance is {luck()}.\n\n"
        f"{table(head, body)}\n\n"
        "- Intervals and p are over updates, p not corrected. A candidate counts by the "
        "reconstruction of its update that resembles it most. The guess is "
        f"the {_guess()} of the training images, the victims among them. The sham is the strongest "
        "attack of the row's audit on updates of other images with the same labels: 4 of 8 images, "
        "or 1 of 32.\n"
        f"- {_compared()}\n"
        f"- {_statistics()}\n"
        f"- The images are recognized, not restored: {_over_guess()} rows have no higher PSNR than "
        "the guess. The settings of `features` and `dense-matching` were chosen on test images; "
        "the trained network has seen the victims.\n"
        "- One network, one training of it. What its dense layers tell, a network that ends in one "
        "dense layer behind a mean over positions, such as resnet20-4, need not.\n\n"
        "`gradveil train --data cifar100 --model gradveil.papers.networks:cnn_with_norm --epochs 5 "
        "--lr 0.05`; `gradveil audit --data cifar100 --model "
        "gradveil.papers.networks:cnn_with_norm --split train --batch-size 8 --images 64 --steps "
        "800 --attack adam-cosine --attack dense-matching --attack features --attack raced`, with "
        "the `--checkpoint` and `--train-mode` where the row has them, the first two attacks alone "
        "with `--local-steps 4` or `--batch-size 32 --images 256`, and the first with "
        f"`--attack {SENT}`; records `grids/train-mode-*`, `grids/eval-mode-*`."
    )


def counts(attack: str, mode: str, images: int = 8, steps: int = 1) -> list[tuple[int, int]]:
    """Return rank 1 of an attack, of how many images: before training, and after it."""
    some = [k for k in KINDS if (k.mode, k.images, k.steps) == (mode, images, steps)]
    found = [row(_case(kind), attack) for kind in sorted(some, key=lambda kind: kind.trained)]
    return [(each.identified, each.n) for each in found]


def both(attack: str, mode: str, images: int = 8) -> str:
    """Write rank 1 of an attack on batches, before and after training, of how many."""
    (before, n), (after, _) = counts(attack, mode, images)
    return f"{before} and {after} of {n}"


def luck() -> str:
    """Write the chance of rank 1 in a line-up."""
    (size,) = {_case(kind).strongest.candidates for kind in KINDS}
    return chance(size)


def iterations() -> int:
    """Return the iterations of a search."""
    (steps,) = {int(_case(kind).settings["steps"]) for kind in KINDS}
    return steps


def _rate() -> float:
    (rate,) = {float(_case(kind).settings["local_lr"]) for kind in KINDS}
    return rate


def _guess() -> str:
    (used,) = {guess(_case(kind)).attack for kind in KINDS}
    return used.removeprefix("blind: ")


def _over_guess() -> str:
    """Count the rows whose mean PSNR is no higher than the guess's, of how many."""
    above = []
    for kind in KINDS:
        case = _case(kind)
        beside = guess(case).psnr.mean
        rows = [each for each in case.rows if (each.kind, each.truth) == ("attack", "used")]
        above += [(each.psnr.mean or 0.0) > (beside or 0.0) for each in rows]
    return f"{len(above) - sum(above)} of {len(above)}"


def _case(kind: Kind) -> CaseResult:
    (case,) = audit(kind.folder).cases
    return case


def _stage(kind: Kind) -> str:
    case = _case(kind)
    right = case.model.accuracy if case.model is not None else 0.0
    return f"5 epochs, {percent(right)}" if kind.trained else "none"


def _compared() -> str:
    """Say what the attacks find in train mode beside eval mode."""
    return (
        f"Of batches of 8 `{MATCHED}` finds {both(MATCHED, 'train')} images in train mode, before "
        f"and after training, and {both(MATCHED, 'eval')} in eval mode; `{STANDARD}` "
        f"{both(STANDARD, 'train')}, and {both(STANDARD, 'eval')}. Of batches of 32 `{MATCHED}` "
        f"finds {both(MATCHED, 'train', 32)}, and {both(MATCHED, 'eval', 32)}. Train mode does not "
        "hide these images."
    )


def _statistics() -> str:
    """Say what an attack finds that matches the running statistics sent along, too."""
    cases = [audit(f"train-mode-{stage}-statistics").cases[0] for stage in ("untrained", "trained")]
    (before, n), (after, _) = counts(STANDARD, "train")
    plain, told = (
        " and ".join(f"{each.identified}" for each in (row(case, attack) for case in cases))
        for attack in (STANDARD, SENT)
    )
    shams = " and ".join(row(case, "sham", "sham").lineup for case in cases)
    corrected = holm([_gain(case) for case in cases])
    count = sum(p < LEVEL for p in corrected)
    shown = ("no gain is shown", "a gain is shown in one", "a gain is shown in both")[count]
    return (
        "A client in train mode also sends the running statistics of its batch norm. "
        f"`{SENT}`, which matches them too, finds {told} of {n}, before and after training, "
        f"`{STANDARD}` in the same audits {plain}; by signed ranks over updates, with Holm's "
        f"correction, p is {' and '.join(map(p_value, corrected))}, so {shown}; shams {shams}. "
        f"Rounding alone moves such counts: with other threads `{STANDARD}` has {before} and "
        f"{after} in the table. Its weight was chosen on other images, with these networks."
    )


def _gain(case: CaseResult) -> float:
    """Return p of how many more images of each update have rank 1 by `SENT`."""
    firsts = [ranked_first(case, attack) for attack in (STANDARD, SENT)]
    gained: dict[int, int] = {}
    for record in case.of("attack", SENT):
        more = firsts[1].get(record.image, False) - firsts[0].get(record.image, False)
        gained[record.shared_in] = gained.get(record.shared_in, 0) + more
    return signed_rank([*gained.values()])
