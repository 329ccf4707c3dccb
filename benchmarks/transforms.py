"""Images per second of the 50 transformations: batched tensors against Pillow, in one run.

    python benchmarks/transforms.py [--images 4096] [--json FILE]

Both start from the same uint8 arrays and end in uint8 arrays. Pillow does one image after the other
in one thread, as a `DataLoader` worker does; "Pillow alone" leaves out the way from array to
picture and back. The images are real: the embedded Fashion-MNIST, three to a colored image, at
32 x 32.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import PIL
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from gradveil.data import load
from gradveil.transforms import LIBRARY, Policy, Transform

AFFINE = Image.Transform.AFFINE


def pillow(transform: Transform, sign: int, picture: Image.Image) -> Image.Image:
    """The published code's way."""
    value, (width, height) = transform.value, picture.size
    match transform.name:
        case "shear_y":
            return picture.transform(
                picture.size,
                AFFINE,
                (1, 0, 0, value * sign, 1, 0),
                Image.Resampling.BICUBIC,
                fillcolor=(0, 0, 0),
            )
        case "translate_x":
            return picture.transform(
                picture.size, AFFINE, (1, 0, value * width * sign, 0, 1, 0), fillcolor=(0, 0, 0)
            )
        case "translate_y":
            return picture.transform(
                picture.size, AFFINE, (1, 0, 0, 0, 1, value * height * sign), fillcolor=(0, 0, 0)
            )
        case "rotate":
            turned = picture.convert("RGBA").rotate(value)
            return Image.composite(
                turned, Image.new("RGBA", turned.size, (128,) * 4), turned
            ).convert(picture.mode)
        case "color" | "contrast" | "sharpness" | "brightness":
            enhanced: Image.Image = getattr(ImageEnhance, transform.name.capitalize())(
                picture
            ).enhance(1 + value * sign)
            return enhanced
        case "posterize":
            return ImageOps.posterize(picture, int(value))
        case "solarize":
            return ImageOps.solarize(picture, round(value))
        case "invert":
            return ImageOps.invert(picture)
        case "autocontrast":
            return ImageOps.autocontrast(picture)
        case _:
            return ImageOps.equalize(picture)


def seconds(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    """The median of several runs, after one that does not count."""
    work()
    taken = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def real_images(count: int) -> Tensor:
    gray = load("fashion-mnist-mini", "train").images
    sheet = (
        torch.nn.functional.interpolate(gray.float(), size=(32, 32), mode="bilinear")
        .round()
        .to(torch.uint8)
    )
    picked = torch.arange(3 * count) * 7919 % len(sheet)
    return sheet[picked].reshape(count, 3, 32, 32)


def measure(count: int, few: int) -> dict[str, dict[str, float]]:
    """Return images per second for each distinct function of the library."""
    images = real_images(count)
    pictures = [
        Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()) for image in images[:few]
    ]
    arrays = [np.asarray(picture) for picture in pictures]
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    rates: dict[str, dict[str, float]] = {}
    for name, magnitude in sorted(set(LIBRARY)):
        transform = Transform(name, magnitude)
        policy = Policy(((transform,),))

        def alone(t: Transform = transform) -> None:
            for picture in pictures:
                pillow(t, 1, picture)

        def from_arrays(t: Transform = transform) -> None:
            for array in arrays:
                np.asarray(pillow(t, 1, Image.fromarray(array)))

        row = {
            "pillow alone": few / seconds(alone, "cpu"),
            "pillow": few / seconds(from_arrays, "cpu"),
        }
        for device in devices:
            many = images.to(device) if device == "cpu" else images.to(device).repeat(16, 1, 1, 1)
            rng = torch.Generator().manual_seed(0)
            row[device] = len(many) / seconds(partial(policy, many, rng), device)
        rates[f"{name}({magnitude})"] = row
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates = measure(options.images, few=500)
    kinds = list(next(iter(rates.values())))
    # One pass over the whole library: the time of all 50 functions, each as often as it occurs.
    library = [f"{name}({magnitude})" for name, magnitude in LIBRARY]
    total = {kind: len(library) / sum(1 / rates[name][kind] for name in library) for kind in kinds}
    print(f"{'images per second':24}" + "".join(f"{kind:>16}" for kind in kinds))
    for name, row in [*rates.items(), ("the library of 50", total)]:
        print(f"{name:24}" + "".join(f"{row[kind]:16,.0f}" for kind in kinds))
    for kind in kinds[2:]:
        ratios = {other: total[kind] / total[other] for other in ("pillow", "pillow alone")}
        print(f"{kind}: {ratios['pillow']:.1f}x Pillow, {ratios['pillow alone']:.1f}x Pillow alone")
    on_gpu = torch.cuda.is_available()
    facts = {
        "images": options.images,
        "threads": torch.get_num_threads(),
        "machine": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "versions": {
            "torch": torch.__version__,
            "pillow": PIL.__version__,
            "python": platform.python_version(),
        },
    }
    if options.json:
        options.json.write_text(
            json.dumps({"facts": facts, "library": total, "functions": rates}, indent=1) + "\n"
        )
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
