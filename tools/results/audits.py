"""Audits of untrained models, by PSNR and SSIM."""

from gradveil.audits.results import Row
from gradveil.report.audit import best_blind
from results.records import mean, rows_of, spread, table

UNTRAINED = {
    "resnet20-4, `adam-cosine`, 4,800 iterations": "cifar100-resnet20-4-untrained-adam-cosine",
    "lenet, `dlg`, 300 steps of 20 iterations": "cifar100-lenet-untrained-dlg",
    "lenet, `dlg`, 60 steps, batches of 4, labels inferred": "cifar100-lenet-untrained-dlg-batch4",
    "lenet, `dlg`, 40 steps, FedAvg with 2 local steps": "cifar100-lenet-untrained-fed2",
    "lenet, `dlg`, 40 steps, FedAvg with 5 local steps": "cifar100-lenet-untrained-fed5",
}
STANDARD = "adam-cosine"


def section() -> str:
    return _untrained()


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
