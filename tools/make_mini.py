"""Make the sheets of fashion-mnist-mini from the official files of Fashion-MNIST.

python tools/make_mini.py DATA_ROOT [FOLDER]
"""

import io
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from gradveil.core.files import write_bytes
from gradveil.core.seeds import generator
from gradveil.data import mini
from gradveil.data.decode import Pixels
from gradveil.data.fashion_mnist import FASHION_MNIST

PER_CLASS = {"train": 200, "test": 50}
SEED = 0


def chosen(root: Path, split: str) -> Pixels:
    """Choose real images (N, 28, 28); image i is of class i % 10."""
    FASHION_MNIST.sources(root, split)
    images, labels, classes = FASHION_MNIST.pixels(root, split)
    columns = []
    for label in range(len(classes)):
        members = np.flatnonzero(labels == label)
        rng = generator(SEED, "fashion-mnist-mini", split, label)
        order = torch.randperm(len(members), generator=rng).numpy()
        columns.append(images[np.sort(members[order[: PER_CLASS[split]]]), 0])
    return np.stack(columns, axis=1).reshape(-1, mini.SIDE, mini.SIDE)


def make(root: Path, folder: Path) -> None:
    """Write train.png and test.png into the folder."""
    for split in PER_CLASS:
        out = io.BytesIO()
        Image.fromarray(mini.sheet(chosen(root, split))).save(out, "PNG", optimize=True)
        write_bytes(folder / f"{split}.png", out.getvalue())


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    make(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else Path(mini.__file__).parent)
