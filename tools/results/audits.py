"""Audits of untrained models, of defenses with their breakers, and over training time."""

from gradveil.audits.results import Row
from gradveil.report.audit import best_blind
from results.records import audit, mean, percent, row, rows_of, spread, table

UNTRAINED = {
    "resnet20-4, `adam-cosine`, 4,800 iterations": "cifar100-resnet20-4-untrained-adam-cosine",
    "lenet, `dlg`, 300 steps of 20 iterations": "cifar100-lenet-untrained-dlg",
    "lenet, `dlg`, 60 steps, batches of 4, labels inferred": "cifar100-lenet-untrained-dlg-batch4",
    "lenet, `dlg`, 40 steps, FedAvg with 2 local steps": "cifar100-lenet-untrained-fed2",
    "lenet, `dlg`, 40 steps, FedAvg with 5 local steps": "cifar100-lenet-untrained-fed5",
}
STANDARD = "adam-cosine"


def section() -> str:
    return "\n\n".join((_untrained(), _breakers(), _over_training()))


def _untrained() -> str:
    body = []
    for name, file in UNTRAINED.items():
        rows = rows_of(f"audits/{file}.jsonl")
        (attack,) = (found for (kind, _), found in rows.items() if kind == "attack")
        guess = best_blind([*rows.values()])
        easy = next(found for (kind, _), found in rows.items() if kind == "positive")
        body.append(
            [
                name,
                str(attack.n),
                spread(attack.psnr, 2),
                mean(attack.psnr, 1) if attack.psnr.median is None else f"{attack.psnr.median:.1f}",
                mean(attack.ssim),
                f"{guess.attack.removeprefix('blind: ')} {spread(guess.psnr, 2)}",
                f"{spread(easy.psnr, 2)} (n = {easy.n})",
            ]
        )
    head = ["model and attack", "n", "PSNR dB", "median", "SSIM", "best blind guess, PSNR"]
    head.append("positive control, PSNR")
    return (
        "## Untrained models, CIFAR-100 †\n"
        "Batch 1 unless said, labels known unless said, test images from 0 on, seed 0, no defense, "
        "so every guess knows as much as the attacker but the gradient. The positive control is "
        f"the same attack on an untrained lenet.\n\n{table(head, body)}\n\n"
        "Commands and machines: `benchmarks/results/audits/README.md`."
    )


def _figures(found: Row | None) -> list[str]:
    return ["", ""] if found is None else [spread(found.psnr), mean(found.ssim)]


def _breakers() -> str:
    body = []
    for name in ("breakers-lenet", "breakers-mlp"):
        whole = audit(name)
        for case in whole.cases:
            attacks = [f for f in case.rows if f.kind == "attack" and f.truth == "used"]
            for number, found in enumerate(attacks):
                first = [f"`{case.defense}`", whole.settings["model"]] if not number else ["", ""]
                body.append([*first, f"`{found.attack}`", *_figures(found), _nearest(found)])
    head = ["defense", "model", "attack", "PSNR dB", "SSIM", "nearest of 1,000"]
    lenet, mlp = audit("breakers-lenet").settings, audit("breakers-mlp").settings
    return (
        "## Defenses and their breakers, untrained models, Fashion-MNIST †\n"
        f"Test images 0 to {lenet['images'] - 1}, batch 1, labels known, seed 0, one CPU core; "
        f"{lenet['steps']} iterations on lenet, {mlp['steps']} on mlp. `adam-cosine` is the "
        "standard attack; the others know the defense and its settings, not its draws. These "
        "defenses leave the images alone, so *nearest of 1,000* is fair to them: a random picture "
        f"of the class is right in about 1%.\n\n{table(head, body)}\n\n"
        "`gradveil audit --data fashion-mnist --images 16 --attack auto --model lenet --defense "
        "none --defense prune:0.95 --defense soteria:0.8 --defense dropout:0.3 --steps 300`, and "
        "`--model mlp --defense none --defense precode:k=256,beta=1e-3 --steps 150`; records "
        "`grids/breakers-lenet`, `grids/breakers-mlp`."
    )


def _nearest(found: Row) -> str:
    return f"{found.identified}/{found.n}"


def _over_training() -> str:
    whole = audit("over-training")
    body = []
    for case in whole.cases:
        assert case.model is not None
        cells = [
            f"{spread(found.psnr)}, {mean(found.ssim)}"
            for found in (row(case, name) for name in (STANDARD, "early-step"))
        ]
        guess = best_blind([found for found in case.rows if found.truth == "used"])
        body.append(
            [
                f"`{case.defense}`",
                str(case.asked_step),
                percent(case.model.accuracy or 0),
                *cells,
                f"{guess.attack.removeprefix('blind: ')} {mean(guess.psnr, 1)}",
            ]
        )
    head = ["defense", "step", "accuracy", "`adam-cosine`: PSNR dB, SSIM"]
    head += ["`early-step`: PSNR dB, SSIM", "best guess that does not know the policy"]
    return (
        "## Leakage over training time, CIFAR-100, resnet20-4 †\n"
        "Two models, trained for 10 epochs without a defense and under the paper's hybrid, audited "
        f"after some steps. Test images 0 to {whole.settings['images'] - 1}, "
        f"{whole.settings['steps']:,} iterations, labels known, seed 0, H200, against the images "
        "used. *Early-step* is the attack of Balunovic et al. 2022 (total variation "
        f"1e-5).\n\n{table(head, body)}\n\n"
        "Both attacks find less after more training. That does not say that training protects: "
        "`raced` was not among them, and the first table above shows what it finds at the end. "
        "Whether a policy leaks more or less than none is not shown here. `gradveil train --data "
        "cifar100 --model resnet20-4 --epochs 10 --defense D --save-at 0,1,10,50,500 --out D`, "
        "then `gradveil audit ... --run none=A --run 3-1-7+43-18-18=B --at 0,1,10,50,500,end "
        "--attack adam-cosine --attack early-step --steps 2000 --images 32`; records "
        "`grids/over-training`."
    )
