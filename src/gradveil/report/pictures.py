"""Pictures of an audit: what each attack found beside the truth, and how its pictures came to be."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gradveil.audits import AuditResult, Record
from gradveil.audits.folders import PICTURES, images_path, load_images, slug
from gradveil.core.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 8
CELL = 1.35  # inches


def draw_audit(result: AuditResult) -> list[Path]:
    """A grid for each attack, and frames where it kept some, in the audit's folder."""
    made = []
    for name in dict.fromkeys(record.attack for record in result.of("attack")):
        grid, frames = (result.out / PICTURES / f"{part}-{slug(name)}.png" for part in ("grid", "frames"))
        draw_grid(result, name, grid)
        made.append(grid)
        if draw_frames(result, name, frames):
            made.append(frames)
    return made


def draw_grid(result: AuditResult, attack: str, path: Path) -> None:
    """Original, used (where a defence changed it) and reconstruction of the first images, with PSNR to the used one."""
    records = result.of("attack", attack)[:SHOWN]
    tensors = _first_images(result, attack, records)
    names = ["original", "found"] if len(result.truths) == 1 else ["original", "used", "found"]
    figure = _figure(len(records), len(names), f"{attack} on {result.settings['model']}: first images")
    grid = figure.subplots(len(names), len(records), squeeze=False)
    for axes, name in zip(grid, names, strict=True):
        for axis, image in zip(axes, tensors[name], strict=True):
            _show(axis, image)
        axes[0].set_ylabel("reconstruction" if name == "found" else name, fontsize=9)
    for top, bottom, record in zip(grid[0], grid[-1], records, strict=True):
        top.set_title(f"image {record.image}", fontsize=8)
        text, color = _caption(record)
        bottom.set_xlabel(text, fontsize=8, color=color)
    save_figure(figure, path)


def draw_frames(result: AuditResult, attack: str, path: Path) -> bool:
    """One row for each image, one column for each moment; the last is the image used. False where the attack kept no frames."""
    tensors, facts = load_images(images_path(result.out, "attack", attack, 0))
    if "frames" not in tensors:
        return False
    frames: Tensor = tensors["frames"]
    steps: Sequence[int] = facts["frame_steps"]
    figure = _figure(len(steps) + 1, len(frames), f"{attack} on {result.settings['model']}: the search, by iteration")
    grid = figure.subplots(len(frames), len(steps) + 1, squeeze=False)
    for axes, row, image in zip(grid, frames, facts["frame_images"], strict=True):
        for axis, frame in zip(axes, (*row, tensors["used"][facts["images"].index(image)]), strict=True):
            _show(axis, frame)
        axes[0].set_ylabel(f"image {image}", fontsize=8)
    for axis, title in zip(grid[0], (*map(str, steps), "used"), strict=True):
        axis.set_title(title, fontsize=8)
    save_figure(figure, path)
    return True


def _first_images(result: AuditResult, attack: str, records: Sequence[Record]) -> dict[str, Tensor]:
    """From as many chunks as the records are from; they are in the same order."""
    files = [load_images(images_path(result.out, "attack", attack, chunk))[0] for chunk in sorted({record.chunk for record in records})]
    return {name: torch.cat([tensors[name] for tensors in files])[: len(records)] for name in ("original", "used", "found")}


def _caption(record: Record) -> tuple[str, str]:
    if not record.ok:
        return "failed", "tab:red"
    scores = record.scores["used"]
    mark, color = ("✓ identified", "tab:red") if scores["identified"] else ("not identified", "black")
    return f"{scores['psnr']:.1f} dB\n{mark}", color


def _figure(columns: int, rows: int, title: str) -> "Figure":
    from matplotlib.figure import Figure  # slow to import, and only needed here

    figure = Figure(figsize=(CELL * columns + 0.6, (CELL + 0.15) * rows + 0.9), layout="constrained")
    figure.suptitle(title, fontsize=10)
    return figure


def _show(axis: "Axes", image: Tensor) -> None:
    pixels = image.permute(1, 2, 0).numpy().astype(np.uint8)
    axis.imshow(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axis.set_xticks([])
    axis.set_yticks([])
    for side in axis.spines.values():
        side.set_visible(False)


def save_figure(figure: "Figure", path: Path) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
