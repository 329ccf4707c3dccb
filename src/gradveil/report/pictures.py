"""Pictures: reconstructions beside the truth, leakage over training, and policies at work."""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Generator, Tensor

from gradveil.audits import AuditResult, CaseResult, Record, Row
from gradveil.audits.job import slug
from gradveil.audits.records import RECORDS, images_path, load_images
from gradveil.core.errors import GradveilError
from gradveil.core.files import MissingFileError, check_writable, replacing, shown
from gradveil.core.text import on_one_line, shortened
from gradveil.data.decode import BROKEN, FORMATS, sized
from gradveil.stats import mean_interval
from gradveil.transforms import Policy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = "pictures"
OPENED = (*FORMATS, "GIF", "TIFF", "PPM")  # of a user's picture: for others Pillow runs programs
ROWS = 100  # members of a policy that are drawn
SHOWN = 8  # images of a grid
CELL = 1.35  # inches
LETTERS = 14  # of a title, to the inch
TITLE = 18  # letters of a class above a picture
TIMELINE = "training-time.png"
LINES = ("-", "--", "-.", ":")
MARKS = "osD^vPX*<>"
UNKNOWN_STEP = 10**6  # of the end of a training whose file does not say it: far to the right


def draw_case(case: CaseResult) -> list[Path]:
    """Draw a grid for each attack, and its frames where it kept some, into the case's folder.

    Pictures that are newer than the records are left as they are.
    """
    drawn = []
    for attack in dict.fromkeys(record.attack for record in case.of("attack")):
        grid = case.out / PICTURES / f"grid-{slug(attack)}.png"
        if not _is_current(grid, case):
            draw_grid(case, attack, grid)
        drawn.append(grid)
        frames = case.out / PICTURES / f"frames-{slug(attack)}.png"
        if _is_current(frames, case) or draw_frames(case, attack, frames):
            drawn.append(frames)
    return drawn


def _is_current(picture: Path, case: CaseResult) -> bool:
    """Return whether the picture was drawn after the last record of the case."""
    return picture.is_file() and picture.stat().st_mtime > (case.out / RECORDS).stat().st_mtime


def draw_grid(case: CaseResult, attack: str, path: Path) -> None:
    """Draw the first images: original, used where the defense changes it, and reconstruction.

    Below each reconstruction stand its PSNR to the image used, and whether it is identified.
    """
    records = case.of("attack", attack)[:SHOWN]
    tensors = _first_images(case, attack, records)
    names = ["original", "found"] if len(case.truths) == 1 else ["original", "used", "found"]
    figure = _figure(len(records), len(names), *_titles(case, attack, "first images"))
    grid = figure.subplots(len(names), len(records), squeeze=False)
    for axes, name in zip(grid, names, strict=True):
        for axis, image in zip(axes, tensors[name], strict=True):
            _show(axis, image)
        axes[0].set_ylabel("reconstruction" if name == "found" else name, fontsize=9)
    for top, bottom, record in zip(grid[0], grid[-1], records, strict=True):
        name = shortened(on_one_line(case.class_of(record.label)), TITLE)
        top.set_title(f"image {record.image}\n{name}", fontsize=8, parse_math=False)
        text, color = caption(record)
        bottom.set_xlabel(text, fontsize=8, color=color)
    save_figure(figure, path)


def draw_frames(case: CaseResult, attack: str, path: Path) -> bool:
    """Draw a search: a row for each image, a column for each moment, and the image used last.

    Return False where the attack kept no frames.
    """
    tensors, facts = load_images(images_path(case.out, "attack", attack, 0))
    if "frames" not in tensors:
        return False
    frames: Tensor = tensors["frames"]
    steps: Sequence[int] = facts["frame_steps"]
    titles = _titles(case, attack, "the search, by iteration")
    figure = _figure(len(steps) + 1, len(frames), *titles)
    grid = figure.subplots(len(frames), len(steps) + 1, squeeze=False)
    for axes, row, image in zip(grid, frames, facts["frame_images"], strict=True):
        used = tensors["used"][facts["images"].index(image)]
        for axis, frame in zip(axes, (*row, used), strict=True):
            _show(axis, frame)
        axes[0].set_ylabel(f"image {image}", fontsize=8)
    for axis, title in zip(grid[0], (*map(str, steps), "used"), strict=True):
        axis.set_title(title, fontsize=8)
    save_figure(figure, path)
    return True


def _first_images(case: CaseResult, attack: str, records: Sequence[Record]) -> dict[str, Tensor]:
    """Load the images of these records, uint8, in the same order."""
    files = [
        load_images(images_path(case.out, "attack", attack, chunk))[0]
        for chunk in sorted({record.chunk for record in records})
    ]
    return {
        name: torch.cat([tensors[name] for tensors in files])[: len(records)]
        for name in ("original", "used", "found")
    }


def caption(record: Record) -> tuple[str, str]:
    """Return the text below a reconstruction, and its color."""
    if not record.ok:
        return "failed", "tab:red"
    scores = record.scores["used"]
    level = f"{scores['psnr']:.1f} dB"
    if not record.candidates:
        return level, "black"
    if "rank" not in scores:  # records of format 2
        hit = bool(scores["identified"])
        return f"{level}\n{'✓ ' if hit else 'not '}identified", "tab:red" if hit else "black"
    mark, color = ("✓ ", "tab:red") if scores["rank"] == 1 else ("", "black")
    return f"{level}\n{mark}rank {scores['rank']:.0f} of {record.candidates}", color


def draw_timeline(result: AuditResult) -> Path:
    """Draw how leakage changes over training, into the audit's folder.

    The share of rank 1 and the dB over blind, against the images used, stand over the step.
    """
    from matplotlib.figure import Figure  # slow to import, and only needed here

    figure = Figure(figsize=(9.5, 7.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    attacks = list(dict.fromkeys(row.attack for case in result.cases for row in _attacked(case)))
    for color, (label, cases) in enumerate(_by_defense(result.cases).items()):
        for style, attack in enumerate(attacks):
            points = [
                (_step(case), row)
                for case in cases
                for row in _attacked(case)
                if row.attack == attack
            ]
            if points:
                points.sort(key=lambda point: point[0])
                name = on_one_line(f"{label}: {attack}").replace("$", r"\$")  # no formula
                _draw_line(top, bottom, points, name, color, style)
    chance = max(row.verdict.chance for case in result.cases for row in _attacked(case))
    level = {"color": "black", "linewidth": 0.8, "linestyle": ":"}
    top.axhline(100 * chance, label=f"chance: {chance:.1%}", **level)
    bottom.axhline(0, label="blind guess", **level)
    top.set_ylabel("rank 1 in the line-up, %")
    top.set_ylim(-3, 103)
    bottom.set_ylabel("dB over the blind guess")
    _mark_steps(bottom, sorted({_step(case) for case in result.cases}))
    settings = result.settings
    title = (
        f"{settings['model']} on {settings['data']}: leakage over training, "
        f"n = {max(row.n for case in result.cases for row in _attacked(case))} images, "
        "intervals of 95%"
    )
    figure.suptitle(on_one_line(title), fontsize=10, parse_math=False)
    figure.legend(*top.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7)
    path = result.out / PICTURES / TIMELINE
    save_figure(figure, path)
    return path


def _draw_line(
    top: "Axes",
    bottom: "Axes",
    points: Sequence[tuple[int, Row]],
    label: str,
    color: int,
    style: int,
) -> None:
    """Draw points with their 95% intervals, a little aside so that lines do not cover others."""
    aside = (color + style / 3) * 0.03
    steps = [step + aside * max(3 * step, 1) for step, _ in points]
    shares = [(row.identified / row.n, *row.identified_bounds) for _, row in points]
    heights = [
        (row.over_blind.mean, *(mean_interval(row.over_blind) or (None, None))) for _, row in points
    ]
    for axis, factor, intervals in ((top, 100, shares), (bottom, 1, heights)):
        middle, low, high = (
            [float("nan") if value is None else factor * value for value in side]
            for side in zip(*intervals, strict=True)
        )
        spread = [
            [m - below for m, below in zip(middle, low, strict=True)],
            [above - m for m, above in zip(middle, high, strict=True)],
        ]
        drawn = axis.errorbar(
            steps, middle, spread, label=label, color=f"C{color}", elinewidth=0.6, capsize=2
        )
        drawn.lines[0].set(
            linestyle=LINES[style % len(LINES)], marker=MARKS[style % len(MARKS)], markersize=4
        )


def _mark_steps(axis: "Axes", steps: Sequence[int]) -> None:
    """Scale the axis by powers of 10; between the steps 0 and 1, where there is 0, evenly."""
    # Many lines stand further aside than the last step.
    last = max(1.4 * max(1, steps[-1]), 1.1 * float(axis.dataLim.x1))
    if steps[0] == 0:
        axis.set_xscale("symlog", linthresh=1, base=10)
        axis.set_xlim(-0.25, last)
    else:
        axis.set_xscale("log")
        axis.set_xlim(steps[0] / 1.4, last)
    axis.set_xticks(steps, [str(step) for step in steps], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("training step")


def _by_defense(cases: Sequence[CaseResult]) -> dict[str, list[CaseResult]]:
    found: dict[str, list[CaseResult]] = {}
    for case in cases:
        label = case.defense + (f", control of {case.control}" if case.control else "")
        label += ", clean gradient" if case.clean else ""
        found.setdefault(label, []).append(case)
    return found


def _attacked(case: CaseResult) -> list[Row]:
    """Return the rows of attacks against the images used."""
    return [row for row in case.rows if (row.kind, row.truth) == ("attack", "used")]


def _step(case: CaseResult) -> int:
    return UNKNOWN_STEP if case.step is None else case.step


def draw_policy(policy: Policy, picture: Image.Image, rng: Generator, path: Path) -> None:
    """Draw the picture after each transformation, a row for each member of the policy.

    The signs of magnitudes are drawn from `rng`, so another seed looks different.
    """
    from matplotlib.figure import Figure  # slow to import, and only needed here

    if len(policy.members) > ROWS:
        raise GradveilError(
            f"a policy of {len(policy.members):,} members: at most {ROWS} can be drawn"
        )
    columns = 1 + max(len(member) for member in policy.members)
    figure = Figure(figsize=(2.3 * columns, 2.6 * len(policy.members) + 0.4), layout="constrained")
    grid = figure.subplots(len(policy.members), columns, squeeze=False)
    for axes, member in zip(grid, policy.members, strict=True):
        drawn, title = picture, "original"
        for axis, transform in zip(axes, (None, *member), strict=False):
            if transform is not None:
                drawn = Policy(((transform,),))(drawn, rng)
                number = "" if transform.index is None else f"{transform.index}: "
                title = f"{number}{transform.name}({transform.magnitude})"
            axis.imshow(drawn, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axis.set_title(title, fontsize=9)
        for axis in axes:
            axis.axis("off")
    figure.suptitle(f"policy {shortened(str(policy), 100)}", fontsize=11)
    save_figure(figure, path)


def open_picture(path: Path) -> Image.Image:
    """Open a user's picture as RGB, or as gray where it is gray."""
    try:
        with sized(path, OPENED) as picture:
            return picture.convert("L" if picture.mode in ("1", "L", "LA", "I;16") else "RGB")
    except MissingFileError:
        raise GradveilError(f"no picture at {shown(path)}") from None
    except GradveilError:
        raise
    except BROKEN as error:
        raise GradveilError(
            f"{shown(path)} is no picture that can be read: {shown(error)}"
        ) from None


def as_picture(image: Tensor) -> Image.Image:
    """Return a uint8 image (C, H, W) as a picture, gray if it has a single channel."""
    if len(image) == 1:
        return Image.fromarray(image[0].numpy())
    return Image.fromarray(image.permute(1, 2, 0).to(torch.uint8).contiguous().numpy())


def save_picture(path: Path, picture: Image.Image) -> None:
    """Write a PNG, whole or not at all."""
    with replacing(path) as temporary:
        picture.save(temporary, format="PNG")


def _titles(case: CaseResult, attack: str, says: str) -> list[str]:
    """Return two lines above a picture: what was attacked and how, and what the picture shows."""
    settings = case.settings
    found = re.search(r"\bsteps=(\d+)", str(settings.get("attacks", {}).get(attack, "")))
    steps = f", {int(found[1]):,} steps" if found else ""
    return [
        f"{attack}{steps}, on {settings['model']}, {settings['data']}",
        f"defense {case.defense}: {says}",
    ]


def _figure(columns: int, rows: int, *titles: str) -> "Figure":
    from matplotlib.figure import Figure  # slow to import, and only needed here

    size = CELL * columns + 0.6, (CELL + 0.15) * rows + 0.9
    figure = Figure(figsize=size, layout="constrained")
    width = max(20, round(size[0] * LETTERS))
    text = "\n".join(shortened(on_one_line(title), width) for title in titles)
    figure.suptitle(text, fontsize=9, parse_math=False)
    return figure


def _show(axis: "Axes", image: Tensor) -> None:
    pixels = image.permute(1, 2, 0).numpy().astype(np.uint8)
    pixels = pixels.squeeze(2) if pixels.shape[2] == 1 else pixels
    axis.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axis.set_xticks([])
    axis.set_yticks([])
    for side in axis.spines.values():
        side.set_visible(False)


SUFFIXES = (".png", ".pdf", ".svg")


def save_figure(figure: "Figure", path: Path, dpi: int = 120) -> None:
    """Write a PNG, PDF or SVG, as the suffix says, whole or not at all."""
    check_writable(path)
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise GradveilError(
            f"{shown(path)}: its suffix names no picture; choose from {', '.join(SUFFIXES)}"
        )
    import matplotlib

    # Without the time and with fixed names of its parts the same figure is the same file.
    facts = {".png": {}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}[kind]
    with (
        replacing(path) as temporary,
        warnings.catch_warnings(),
        matplotlib.rc_context({"svg.hashsalt": "gradveil"}),
    ):
        # Of names in scripts that the font does not have.
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from")
        figure.savefig(temporary, format=kind[1:], dpi=dpi, metadata=facts)
