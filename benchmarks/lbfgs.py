"""Seconds and accuracy of `dlg`, which is L-BFGS, on an untrained lenet.

    python benchmarks/lbfgs.py --data cifar100 --data-root DIR [--images 32] [--steps 300]
                               [--device auto] [--json FILE]

The same images, starts and steps on every device; an image counts as found from 30 dB on. Run it on
a CPU and on a GPU to compare them.
"""

import argparse
import json
import platform
import time
from dataclasses import replace
from pathlib import Path

import torch

import gradveil as gv
from gradveil.clients import Client
from gradveil.data import load
from gradveil.engine.device import find_device
from gradveil.models import build_for

FOUND = 30.0  # dB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="cifar100")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = find_device(options.device)
    split = load(options.data, "test", root=options.data_root)
    model = build_for("lenet", split, 0).to(device).eval()
    images = (split.images[: options.images].float() / 255).to(device)
    labels = split.labels[: options.images].to(device)
    client = Client(model, classes=len(split.classes))
    seen = [shared.seen for shared in client.share_each(images, labels, 0)]
    attack = replace(gv.attacks.dlg, steps=options.steps)
    replace(attack, steps=6)(seen, 0)  # compiles and captures what is kept
    start = time.perf_counter()
    found = attack(seen, 0)
    seconds = time.perf_counter() - start
    pictures = torch.cat([each.images for each in found])
    psnr = gv.psnr(pictures, images.cpu())
    facts = {
        "data": options.data,
        "n": len(images),
        "steps": options.steps,
        "seconds": seconds,
        "psnr_mean": float(psnr.mean()),
        "psnr_median": float(psnr.median()),
        "found": int((psnr >= FOUND).sum()),
        "psnr": psnr.tolist(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    print(
        f"{facts['device']}: {seconds:.1f} s, mean {facts['psnr_mean']:.1f} dB, "
        f"{facts['found']} of {facts['n']} from {FOUND:g} dB on"
    )
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
