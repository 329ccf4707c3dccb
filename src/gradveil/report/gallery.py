"""Pictures of the page: films of the first images, and every image of every case, worst first."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradveil.audits import CaseResult, Record
from gradveil.audits.records import images_path, load_images
from gradveil.core.files import MissingFileError
from gradveil.report.answer import leakage
from gradveil.report.markup import Html, breakable, element, joined, scrolled
from gradveil.report.pictures import as_picture, caption

FILMS = 8  # images with a film
ROWS = 6  # cases in the table of films
EXACT = 48  # pixels a side: larger pictures are compressed with losses
LARGEST = 96  # pixels a side
FILM_BYTES = 5_000_000
ALL_BYTES = 11_000_000
"""Letters of all pictures in a page, which has to stay below 15 MB."""


@dataclass
class Budget:
    """Counts the letters of pictures that a page has spent."""

    left: int
    spent: int = 0

    def take(self, uri: Html) -> Html:
        """Count a picture."""
        self.spent += len(uri)
        return uri

    @property
    def over(self) -> bool:
        """Whether no more pictures should be added."""
        return self.spent > self.left


@dataclass(frozen=True)
class Shots:
    """The pictures of an attack on a case, by the number of the image."""

    rows: Mapping[int, tuple[Tensor, Tensor, Tensor]]  # original, used, found
    frames: Mapping[int, Tensor] = field(default_factory=dict)
    steps: tuple[int, ...] = ()

    @classmethod
    def load(cls, case: CaseResult, attack: str) -> "Shots | None":
        """Load them; None where a file was removed."""
        rows: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        frames: dict[int, Tensor] = {}
        steps: tuple[int, ...] = ()
        try:
            for chunk in sorted({record.chunk for record in case.of("attack", attack)}):
                tensors, facts = load_images(images_path(case.out, "attack", attack, chunk))
                parts = (tensors["original"], tensors["used"], tensors["found"])
                rows |= dict(zip(facts["images"], zip(*parts, strict=True), strict=True))
                if "frames" in tensors:
                    frames = dict(zip(facts["frame_images"], tensors["frames"], strict=True))
                    steps = tuple(facts["frame_steps"])
        except MissingFileError:
            return None
        return cls(rows, frames, steps)


def data_uri(image: Tensor) -> Html:
    """Return a uint8 image (C, H, W) as an address; that of a large one with small losses."""
    picture, file = as_picture(image), io.BytesIO()
    if image.shape[-2] <= EXACT:  # of a film its height: its frames stand side by side
        kind = "png"
        picture.save(file, format="PNG", compress_level=9)
    else:
        kind = "jpeg"
        picture.save(file, format="JPEG", quality=88)
    # It needs no escaping, which takes its time with so many letters.
    return Html(f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}")


def shrunk(images: Tensor) -> Tensor:
    """Return uint8 images (..., C, H, W) of at most `LARGEST` pixels a side."""
    side = max(images.shape[-2:])
    if side <= LARGEST:
        return images
    size = [max(1, round(n * LARGEST / side)) for n in images.shape[-2:]]
    flat = images.reshape(-1, *images.shape[-3:]).float()
    small = torch.nn.functional.interpolate(flat, size=size, mode="area")
    return small.round().to(torch.uint8).reshape(*images.shape[:-2], *size)


# Films


def films(cases: Sequence[tuple[str, CaseResult]], budget: Budget) -> Html | None:
    """Return a table: a column for each of the first images, a row for each case.

    A row shows the search of the case's strongest attack; a slider moves through it. The case that
    leaks most stands first, and so does the image that it gives away most.
    """
    ordered = sorted(cases, key=lambda pair: leakage(pair[1]), reverse=True)
    chosen = ordered if len(cases) <= ROWS else [*ordered[: ROWS - 1], ordered[-1]]
    loaded = [(name, case, Shots.load(case, case.strongest.attack)) for name, case in chosen]
    usable = [(name, case, shots) for name, case, shots in loaded if shots is not None]
    if not usable:
        return None
    _, first, shots = usable[0]
    records = [r for r in _worst_first(first, first.strongest.attack) if r.image in shots.rows]
    moving = [r for r in records if r.image in shots.frames] or records
    images = [record.image for record in moving[:FILMS]]
    kinds = {record.image: first.class_of(record.label) for record in records}
    heads = [
        element("th", f"image {image}", element("small", kinds[image]), scope="col")
        for image in images
    ]
    originals = [
        _still(shots.rows[image][0], f"original of image {image}, {kinds[image]}", budget)
        for image in images
    ]
    rows = [
        element("tr", element("th", "private picture", scope="row"), *map(_cell, originals)),
    ]
    for name, case, some in usable:
        if budget.spent > FILM_BYTES:
            break
        rows.append(_film_row(name, case, some, images, budget))
    table = element(
        "table",
        element("thead", element("tr", element("td"), *heads)),
        element("tbody", *rows),
        class_="films",
    )
    note = None
    if len(cases) > ROWS:
        words = (
            f"Of {len(cases)} cases the {ROWS - 1} that leak most and the one that leaks least are "
            "in this table; all are below it."
        )
        note = element("p", words, class_="note")
    return joined([scrolled(table, "films"), note])


def slider() -> Html:
    """Return the control that moves through the iterations of the films beside it."""
    control = element(
        "input", type="range", min="0", max="100", value="100", step="1", class_="time"
    )
    words = element("output", "the result", class_="moment")
    play = element("button", "Play", type="button", class_="play")
    return element("div", play, element("label", "Iterations ", control), words, class_="slider")


def _cell(inner: Html) -> Html:
    return element("td", inner)


def _film_row(
    name: str, case: CaseResult, shots: Shots, images: Sequence[int], budget: Budget
) -> Html:
    attack = case.strongest.attack
    records = {record.image: record for record in case.of("attack", attack)}
    cells = []
    for image in images:
        if image not in shots.rows or image not in records:
            cells.append(element("td", "-"))
            continue
        text, hit = caption_of(records[image])
        words = element("small", joined(text.split(" · "), "<br>"), class_="hit" if hit else None)
        if not records[image].ok:
            cells.append(element("td", element("div", class_="film lost"), words))
            continue
        said = f"reconstruction of image {image} under {name} by {attack}: {text}"
        parts = [shots.rows[image][2]]
        if image in shots.frames:
            parts = [*shots.frames[image], *parts]
        cells.append(element("td", _film(parts, said, budget), words))
    steps = " ".join(map(str, shots.steps))
    label = element("th", breakable(name), element("small", attack), scope="row")
    return element("tr", label, *cells, data_steps=steps, class_="film-row")


def _still(image: Tensor, said: str, budget: Budget) -> Html:
    return element("img", src=budget.take(data_uri(shrunk(image))), alt=said, class_="pixels")


def _film(frames: Sequence[Tensor], said: str, budget: Budget) -> Html:
    """Return the frames beside each other in one picture, of which the last is shown."""
    uri = budget.take(data_uri(torch.cat([*shrunk(torch.stack([*frames]))], dim=-1)))
    style = Html(f"background-image:url({uri});--frames:{len(frames)}")
    return element("div", class_="film pixels", role="img", aria_label=said, style=style)


def caption_of(record: Record) -> tuple[str, bool]:
    """Return the words below a reconstruction on one line, and whether it was recognized."""
    text, _ = caption(record)
    return text.replace("\n", " · "), "✓" in text


# All images


def gallery(
    cases: Sequence[tuple[str, CaseResult]], ids: Mapping[int, str], budget: Budget
) -> dict[str, Any]:
    """Return the pictures of all cases for the page's script, worst first, as many as fit.

    Cases take turns: each gets its next worst image while there is room.
    """
    originals: dict[str, str] = {}
    made, queues = [], []
    for name, case in cases:
        entry: dict[str, Any] = {"id": ids[id(case)], "name": name, "total": 0, "images": []}
        attacks = list(dict.fromkeys(record.attack for record in case.of("attack")))
        shots = {attack: found for attack in attacks if (found := Shots.load(case, attack))}
        order = _worst_first(case, case.strongest.attack)
        entry |= {"attacks": [*shots], "total": len(order), "strongest": case.strongest.attack}
        made.append(entry)
        queues.append((_Source(ids[id(case)].partition("/")[0], case, shots), order))
    longest = max((len(order) for _, order in queues), default=0)
    for turn in range(longest):
        for entry, (source, order) in zip(made, queues, strict=True):
            if turn < len(order) and source.shots and not budget.over:
                entry["images"].append(source.entry(order[turn], originals, budget))
    return {"originals": originals, "cases": made}


class _Source:
    """The pictures of a case and their records; `run` tells the images of several runs apart."""

    def __init__(self, run: str, case: CaseResult, shots: Mapping[str, Shots]) -> None:
        self.run, self.case, self.shots = run, case, shots
        self.records = {(r.attack, r.image): r for r in case.of("attack")}

    def entry(self, record: Record, originals: dict[str, str], budget: Budget) -> dict[str, Any]:
        rows = {attack: some.rows.get(record.image) for attack, some in self.shots.items()}
        pictures = next((row for row in rows.values() if row is not None), None)
        key, used, found = f"{self.run}:{record.image}", None, []
        if pictures is not None and key not in originals:
            originals[key] = budget.take(data_uri(shrunk(pictures[0])))
        if pictures is not None and len(self.case.truths) > 1:
            used = budget.take(data_uri(shrunk(pictures[1])))
        for attack, row in rows.items():
            scored = self.records.get((attack, record.image))
            if scored is None or row is None:
                found.append({"src": None, "text": "not attacked yet", "hit": False})
                continue
            text, hit = caption_of(scored)
            src = budget.take(data_uri(shrunk(row[2]))) if scored.ok else None
            found.append({"src": src, "text": text, "hit": hit})
        name = self.case.class_of(record.label)
        numbers = {"image": record.image, "class": name, "key": key}
        return numbers | {"used": used, "found": found}


def _worst_first(case: CaseResult, attack: str) -> list[Record]:
    """Return the records of an attack: best rank first, then most dB; failed ones last."""
    truth = case.strongest.truth

    def order(record: Record) -> tuple[float, float]:
        scores = record.scores.get(truth, {})
        return scores.get("rank", 1e9), -scores.get("psnr", -1e9)

    return sorted(case.of("attack", attack), key=order)
