"""Draw before-and-after.png: what comes back from clients' updates without and with a defense.

    python before_and_after.py [--images 6] [--steps 300] [--out audit]

Each client sends one gradient of one image, at the weights that the app starts from. Rows: the
clients' images, then what the stronger of two attacks makes of their updates, without a defense and
with each of DEFENSES.
"""

import argparse
from pathlib import Path

import torch
from PIL import Image
from quickstart.task import load_share, make
from torch import Tensor

import gradveil as gv

DEFENSES = ("prune:0.95", "gaussian:0.01")
SHARE = 500  # images, of which the first are attacked and the others stand in line-ups
ZOOM, GAP = 2, 2


def drawn(rows: list[Tensor]) -> Image.Image:
    """Put images (N, 1, H, W) in [0, 1] into a grid, a row for each of the list."""
    padded = [torch.nn.functional.pad(row, (GAP, GAP, GAP, GAP), value=1.0) for row in rows]
    lines = [torch.cat(list(row[:, 0]), 1) for row in padded]
    grid = (torch.cat(lines) * 255).round().to(torch.uint8).numpy()
    picture = Image.fromarray(grid)
    return picture.resize((picture.width * ZOOM, picture.height * ZOOM), Image.Resampling.NEAREST)


def main() -> None:
    """Audit the updates, print the table and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=6)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("audit"), help="the audit's folder")
    asked = parser.parse_args()
    images, labels = load_share(0, SHARE)
    result = gv.audit(
        make(),
        images,
        labels,
        public=load_share(1, SHARE),
        defenses=["none", *DEFENSES],
        attacks=["iga", "masked"],  # masked knows that zeros were cut off
        steps=asked.steps,
        first=0,
        victims=asked.images,
        sham=False,
        out=asked.out,
    )
    print(result)  # noqa: T201
    rows = [images[: asked.images]]
    for case in result.cases:
        rows.append(case.images(case.strongest.attack)["found"])
        print(f"{case.defense}: the stronger attack is {case.strongest.attack}")  # noqa: T201
    drawn(rows).save(Path(__file__).with_name("before-and-after.png"), optimize=True)


if __name__ == "__main__":
    main()
