"""Pictures of an audit: what each attack found beside the truth, and how its pictures came to be."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Generator, Tensor

from gradveil.audits import AuditResult, CaseResult, Record, Row
from gradveil.audits.job import slug
from gradveil.audits.records import images_path, load_images
from gradveil.core.errors import GradveilError
from gradveil.core.files import replacing
from gradveil.stats import mean_interval
from gradveil.transforms import Policy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PICTURES = "pictures"
SHOWN = 8
CELL = 1.35  # inches


def draw_case(result: CaseResult) -> list[Path]:
    """A grid for each attack, and frames where it kept some, in the audit's folder."""
    made = []
    for name in dict.fromkeys(record.attack for record in result.of("attack")):
        grid, frames = (
            result.out / PICTURES / f"{part}-{slug(name)}.png" for part in ("grid", "frames")
        )
        draw_grid(result, name, grid)
        made.append(grid)
        if draw_frames(result, name, frames):
            made.append(frames)
    return made


def draw_grid(result: CaseResult, attack: str, path: Path) -> None:
    """Original, used (where a defence changed it) and reconstruction of the first images, with PSNR to the used one."""
    records = result.of("attack", attack)[:SHOWN]
    tensors = _first_images(result, attack, records)
    names = ["original", "found"] if len(result.truths) == 1 else ["original", "used", "found"]
    figure = _figure(
        len(records), len(names), f"{attack} on {result.settings['model']}: first images"
    )
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


def draw_frames(result: CaseResult, attack: str, path: Path) -> bool:
    """One row for each image, one column for each moment; the last is the image used. False where the attack kept no frames."""
    tensors, facts = load_images(images_path(result.out, "attack", attack, 0))
    if "frames" not in tensors:
        return False
    frames: Tensor = tensors["frames"]
    steps: Sequence[int] = facts["frame_steps"]
    figure = _figure(
        len(steps) + 1,
        len(frames),
        f"{attack} on {result.settings['model']}: the search, by iteration",
    )
    grid = figure.subplots(len(frames), len(steps) + 1, squeeze=False)
    for axes, row, image in zip(grid, frames, facts["frame_images"], strict=True):
        for axis, frame in zip(
            axes, (*row, tensors["used"][facts["images"].index(image)]), strict=True
        ):
            _show(axis, frame)
        axes[0].set_ylabel(f"image {image}", fontsize=8)
    for axis, title in zip(grid[0], (*map(str, steps), "used"), strict=True):
        axis.set_title(title, fontsize=8)
    save_figure(figure, path)
    return True


def _first_images(result: CaseResult, attack: str, records: Sequence[Record]) -> dict[str, Tensor]:
    """From as many chunks as the records are from; they are in the same order."""
    files = [
        load_images(images_path(result.out, "attack", attack, chunk))[0]
        for chunk in sorted({record.chunk for record in records})
    ]
    return {
        name: torch.cat([tensors[name] for tensors in files])[: len(records)]
        for name in ("original", "used", "found")
    }


def _caption(record: Record) -> tuple[str, str]:
    if not record.ok:
        return "failed", "tab:red"
    scores = record.scores["used"]
    mark, color = (
        ("✓ identified", "tab:red") if scores["identified"] else ("not identified", "black")
    )
    return f"{scores['psnr']:.1f} dB\n{mark}", color


def _figure(columns: int, rows: int, title: str) -> "Figure":
    from matplotlib.figure import Figure  # slow to import, and only needed here

    figure = Figure(
        figsize=(CELL * columns + 0.6, (CELL + 0.15) * rows + 0.9), layout="constrained"
    )
    figure.suptitle(title, fontsize=10)
    return figure


def _show(axis: "Axes", image: Tensor) -> None:
    pixels = image.permute(1, 2, 0).numpy().astype(np.uint8)
    axis.imshow(
        pixels.squeeze(2) if pixels.shape[2] == 1 else pixels,
        cmap="gray",
        vmin=0,
        vmax=255,
        interpolation="nearest",
    )
    axis.set_xticks([])
    axis.set_yticks([])
    for side in axis.spines.values():
        side.set_visible(False)


def save_figure(figure: "Figure", path: Path) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def draw_policy(policy: Policy, picture: Image.Image, rng: Generator, path: Path) -> None:
    """A PNG. Other draws of the signs look different: change the generator's seed."""
    from matplotlib.figure import Figure  # slow to import, and only needed here

    columns = 1 + max(len(member) for member in policy.members)
    figure = Figure(figsize=(2.3 * columns, 2.6 * len(policy.members) + 0.4), layout="constrained")
    grid = figure.subplots(len(policy.members), columns, squeeze=False)
    for axes, member in zip(grid, policy.members, strict=True):
        shown, title = picture, "original"
        for axis, transform in zip(axes, (None, *member), strict=False):
            if transform is not None:
                shown = Policy(((transform,),))(shown, rng)
                number = "" if transform.index is None else f"{transform.index}: "
                title = f"{number}{transform.name}({transform.magnitude})"
            axis.imshow(shown, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axis.set_title(title, fontsize=9)
        for axis in axes:
            axis.axis("off")
    figure.suptitle(f"policy {policy}", fontsize=11)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def open_picture(path: Path) -> Image.Image:
    """A user's picture as RGB, or as grey where it is grey."""
    try:
        with Image.open(path) as picture:
            return picture.convert("L" if picture.mode in ("1", "L", "LA", "I;16") else "RGB")
    except FileNotFoundError:
        raise GradveilError(f"no picture at {path}") from None
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise GradveilError(f"{path} is no picture that can be read: {error}") from None


def as_picture(image: Tensor) -> Image.Image:
    """A uint8 CHW image as a picture."""
    return Image.fromarray(
        image[0].numpy()
        if image.shape[0] == 1
        else image.permute(1, 2, 0).to(torch.uint8).contiguous().numpy()
    )


def save_picture(path: Path, picture: Image.Image) -> None:
    with replacing(path) as temporary:
        picture.save(temporary, format="PNG")


NAME = "training-time.png"
LINES = ("-", "--", "-.", ":")
MARKS = "osD^vPX*<>"


def draw_timeline(result: AuditResult) -> Path:
    """Identified and dB over blind against the training step, into the grid's folder. Against the images that were used."""
    from matplotlib.figure import Figure  # slow to import, and only needed here

    figure = Figure(figsize=(9.5, 7.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    names = list(dict.fromkeys(attack for part in result.cases for attack in _attacks(part)))
    for color, (label, parts) in enumerate(_by_defense(result.cases).items()):
        for attack in names:
            found = [
                (_step(part), row) for part in parts if (row := _row(part, attack)) is not None
            ]
            if found:
                _line(
                    top,
                    bottom,
                    sorted(found, key=lambda pair: pair[0]),
                    f"{label}: {attack}",
                    color,
                    names.index(attack),
                )
    chance = max(
        row.verdict.chance
        for part in result.cases
        for row in part.rows
        if (row.kind, row.truth) == ("attack", "used")
    )
    top.axhline(
        100 * chance, color="black", linewidth=0.8, linestyle=":", label=f"blind: {chance:.1%}"
    )
    bottom.axhline(0, color="black", linewidth=0.8, linestyle=":", label="best blind guess")
    top.set_ylabel("identified, %")
    top.set_ylim(-3, 103)
    bottom.set_ylabel("dB over the best blind guess")
    _steps(bottom, sorted({_step(part) for part in result.cases}))
    settings = result.settings
    title = f"{settings['model']} on {settings['data']}: leakage over training, n = {settings['images']} images, intervals of 95%"
    figure.suptitle(title, fontsize=10)
    figure.legend(*top.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7)
    path = result.out / PICTURES / NAME
    save_figure(figure, path)
    return path


def _line(
    top: "Axes",
    bottom: "Axes",
    found: Sequence[tuple[int, Row]],
    label: str,
    color: int,
    attack: int,
) -> None:
    """With the 95% interval of each point, a little aside so that lines at one step do not cover each other."""
    aside = (color + attack / 3) * 0.03
    steps = [step + aside * max(3 * step, 1) for step, _ in found]
    shares = [(row.identified / row.n, *row.identified_bounds) for _, row in found]
    heights = [
        (row.over_blind.mean, *(mean_interval(row.over_blind) or (None, None))) for _, row in found
    ]
    for axis, factor, points in ((top, 100, shares), (bottom, 1, heights)):
        middle, low, high = (
            [float("nan") if value is None else factor * value for value in side]
            for side in zip(*points, strict=True)
        )
        spread = [
            [m - below for m, below in zip(middle, low, strict=True)],
            [above - m for m, above in zip(middle, high, strict=True)],
        ]
        drawn = axis.errorbar(
            steps, middle, spread, label=label, color=f"C{color}", elinewidth=0.6, capsize=2
        )
        drawn.lines[0].set(
            linestyle=LINES[attack % len(LINES)], marker=MARKS[attack % len(MARKS)], markersize=4
        )


def _steps(axis: "Axes", steps: Sequence[int]) -> None:
    """By powers, from the first step; where that is 0, even distances between 0 and 1."""
    last = max(
        1.4 * max(1, steps[-1]), 1.1 * float(axis.dataLim.x1)
    )  # many lines stand further aside
    if steps[0] == 0:
        axis.set_xscale("symlog", linthresh=1, base=10)
        axis.set_xlim(-0.25, last)
    else:
        axis.set_xscale("log")
        axis.set_xlim(steps[0] / 1.4, last)
    axis.set_xticks(steps, [str(step) for step in steps], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("training step")


def _by_defense(parts: Sequence[CaseResult]) -> dict[str, list[CaseResult]]:
    found: dict[str, list[CaseResult]] = {}
    for part in parts:
        found.setdefault(part.defense + (", clean gradient" if part.clean else ""), []).append(part)
    return found


def _attacks(part: CaseResult) -> list[str]:
    return [row.attack for row in part.rows if (row.kind, row.truth) == ("attack", "used")]


def _row(part: CaseResult, attack: str) -> Row | None:
    found = [
        row for row in part.rows if (row.kind, row.truth, row.attack) == ("attack", "used", attack)
    ]
    return found[0] if found else None


def _step(part: CaseResult) -> int:
    """The end of a training whose file does not say its steps stands far to the right."""
    return part.step if part.step is not None else 10**6
