"""Audits of untrained models, by PSNR and SSIM."""

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
                spread(guess.psnr, 2),
                guess.attack.removeprefix("blind: "),
                spread(easy.psnr, 2),
                str(easy.n),
            ]
        )
    head = ["model and attack", "n", "PSNR dB", "median dB", "SSIM", "best blind guess, PSNR dB"]
    head += ["that guess", "positive control, PSNR dB", "its n"]
    return (
        "## Untrained models †\n"
        "CIFAR-100, batch 1 unless said, labels known unless said, test images from 0 on, seed 0, "
        "no defense. So every guess knows as much as the attacker but the gradient. The positive "
        f"control is the same attack on an untrained lenet.\n\n{table(head, body)}\n\n"
        "Commands and machines: `benchmarks/results/audits/README.md`."
    )
