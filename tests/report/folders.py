"""Folders of audits made in a moment: settings, records and pictures, without any attack."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.audits import Record
from gradveil.audits.job import slug
from gradveil.audits.model import ModelFacts, save_facts
from gradveil.audits.records import append, images_path, save_images
from gradveil.audits.results import FORMAT
from gradveil.core.formats import Quantity
from gradveil.core.seeds import generator
from gradveil.search.results import SearchResult, TriedPolicy
from gradveil.transforms import Policy

CANDIDATES = 50
COMMON: dict[str, Any] = {
    "format": FORMAT,
    "data": "fashion-mnist-mini",
    "model": "lenet",
    "labels": "known",
    "seed": 0,
    "batch_size": 1,
    "steps": 60,
    "local_lr": 0.01,
    "local_steps": 1,
    "split": "test",
    "sham": True,
    "victims_at_once": 16,
}


def pictures(count: int, channels: int = 1, size: int = 12) -> Tensor:
    """Return uint8 pictures of soft blobs, all different."""
    rng = generator(0, "pictures")
    at = torch.rand(count, channels, 2, 1, 1, generator=rng) * size
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    far = (y - at[:, :, 0]).square() + (x - at[:, :, 1]).square()
    return (255 * torch.exp(-far / size**1.6)).to(torch.uint8)


def noisy(images: Tensor, amount: float, seed: object) -> Tensor:
    """Mix uint8 pictures with noise: an amount of 0 leaves them, 1 leaves nothing of them."""
    noise = torch.rand(images.shape, generator=generator(0, "noise", str(seed))) * 255
    return ((1 - amount) * images + amount * noise).round().to(torch.uint8)


def lines(
    kind: str, attack: str, hits: int, over: float, count: int, failed: int = 0, ranks: bool = True
) -> list[Record]:
    """Make records, of which the first have rank 1 and the last failed."""
    made, size = [], CANDIDATES if ranks else 0
    for image in range(count):
        scores = {
            "mse": 0.05,
            "psnr": 12.0 + over - image / 100,
            "ssim": 0.4,
            "psnr_affine": 13.0,
            "over_blind": over - image / 100 if over else 0.0,
        }
        if ranks:
            scores["rank"] = 1 if image < hits else 2 + image % (CANDIDATES - 1)
        ok = image < count - failed
        status = "ok" if ok else "failed: every restart diverged"
        both = {"used": scores, "original": scores} if ok else {}
        made.append(
            Record(
                "e", kind, attack, 0, image, status, image % 10, None, 0.1, size, both,
                0.1, image,
            )
        )  # fmt: skip
    return made


def make_case(
    folder: Path,
    defense: str,
    hits: Mapping[str, int],
    images: Tensor,
    *,
    settings: Mapping[str, Any],
    step: str | None = None,
    accuracy: float | None = None,
    failed: int = 0,
    frames: int = 8,
    ranks: bool = True,
    kinds: str = "",
) -> None:
    """Write the folder of a case; `hits` are the images with rank 1, by attack.

    `kinds` begins the name of each class; without it they have none.
    """
    folder.mkdir(parents=True)
    count = len(images)
    changes = defense[:1].isdecimal()
    weights = hashlib.sha256(defense.encode()).hexdigest() if defense != "none" else "0" * 64
    more = {
        "defense": defense,
        "clean": False,
        "step": step,
        "checkpoint": None if accuracy is None else "model.safetensors",
        "changes_images": changes,
        "attacks": dict.fromkeys(hits, "GradientMatching(steps=60)"),
        "knows": dict.fromkeys(hits, "labels"),
        "left_out": {"closed-form": "the first layer is of type Conv2d"},
        "class_names": {str(label): f"{kinds} {label}" for label in range(10)} if kinds else None,
        "weights_sha256": weights,
        "images_sha256": "1" * 64,
        "versions": {"gradveil": "0.1.0", "torch": "2.6"},
        "device": "cpu",
    }
    (folder / "settings.json").write_text(json.dumps({**settings, **more}))
    facts = None
    if accuracy is not None:
        number = None if step is None else int(step)
        facts = ModelFacts(accuracy, 500, defense, number, "test", weights)
    save_facts(folder, facts)
    used = images.flip(-1) if changes else images
    path = folder / "records.jsonl"
    append(path, lines("positive", next(iter(hits)), 4, 6.0, 4, ranks=ranks))
    append(path, lines("blind", "blind: class mean", 0, 0.0, count, ranks=ranks))
    append(path, lines("blind", "blind: gray", 0, -2.0, count, ranks=ranks))
    for attack, right in hits.items():
        share = right / count
        append(path, lines("attack", attack, right, 9 * share - 1, count, failed, ranks))
        found = noisy(used, 1 - share, (defense, attack))
        tensors = {"original": images, "used": used.clone(), "found": found}
        numbers: dict[str, Any] = {"images": list(range(count))}
        if frames:
            steps = [round(60 * k / frames) for k in range(frames + 1)]
            shown = min(8, count)
            way = [noisy(found[:shown], 1 - k / frames, k) for k in range(frames + 1)]
            tensors["frames"] = torch.stack(way, dim=1)
            numbers |= {"frame_images": list(range(shown)), "frame_steps": steps}
        save_images(images_path(folder, "attack", attack, 0), tensors, numbers)
    append(path, lines("sham", "sham", 0, -1.0, count, ranks=ranks))


def make_audit(
    out: Path,
    defenses: Mapping[str, Mapping[str, int]],
    count: int = 8,
    *,
    accuracies: Mapping[str, float] | None = None,
    steps: Sequence[str] = (),
    failed: int = 0,
    images: Tensor | None = None,
    ranks: bool = True,
    frames: int = 8,
    kinds: str = "",
    **settings: Any,
) -> Path:
    """Write the folder of an audit: `defenses` are the images with rank 1, by attack."""
    shown = pictures(count) if images is None else images
    common = {**COMMON, "images": count, **settings}
    cases = []
    for defense, hits in defenses.items():
        for step in steps or (None,):
            folder = slug(defense) + (f"-at-{step}" if step else "")
            known = None if accuracies is None else accuracies.get(defense)
            later = 0 if step is None else len(step)
            fewer = {attack: max(0, right - 2 * later) for attack, right in hits.items()}
            make_case(
                out / folder,
                defense,
                fewer,
                shown,
                settings=common,
                step=step,
                accuracy=known,
                failed=failed,
                ranks=ranks,
                frames=frames,
                kinds=kinds,
            )
            case = {"defense": defense, "clean": False, "step": step, "checkpoint": None}
            cases.append(case | {"folder": folder})
    attacks = list(dict.fromkeys(attack for hits in defenses.values() for attack in hits))
    whole = common | {"attacks": attacks, "cases": cases}
    (out / "settings.json").write_text(json.dumps(whole))
    return out


def make_search(out: Path, count: int = 30) -> Path:
    """Write the folder of a search: policies, and the audits that confirm two of them."""
    settings = {
        "data": "fashion-mnist-mini",
        "model": "lenet",
        "trials": count,
        "keep": 3,
        "threshold": -85.0,
        "score": "probe",
        "rank_by": "over_blind",
        "rule": "code",
        "sampler": "random",
        "seed": 0,
        "attack": "dlg",
    }
    out.mkdir(parents=True)
    (out / "settings.json").write_text(json.dumps(settings))
    tried = []
    for number in range(count):
        policy = Policy.parse(f"{number % 50}-{(number * 7) % 50}")
        leak, accurate = (number * 37 % 29) / 10 - 1, -120 + (number * 53 % 31) * 2.0
        figures = {"accuracy": Quantity(accurate, 1.5, 8), "over_blind": Quantity(leak, 0.2, 6)}
        state = "scored" if accurate >= -85 else "inaccurate"
        tried.append(TriedPolicy(number, policy, state, figures))
    good = [trial for trial in tried if trial.state == "scored"]
    kept = tuple(sorted(good, key=lambda trial: trial.quantities["over_blind"].mean)[:3])
    best = str(kept[0].policy)
    several = "+".join(f"{number}-{number + 1}-{number + 2}" for number in range(0, 40, 4))
    rows = {"none": "none", "random": several, "single": best}
    confirmed = dict.fromkeys(("semi-trained", "untrained"), rows)
    SearchResult(
        out, settings, tuple(tried), kept, (), None, "too few were kept", None, (), "gradveil",
        "study.journal", confirmed, ("the single policy leaks less than none.",),
    ).write()  # fmt: skip
    shown = pictures(8)
    common = {**COMMON, "images": 8}
    cases = []
    for model in confirmed:
        for row, policy_text in rows.items():
            folder = f"{model}-{row}"
            hits = {"dlg": {"none": 6, "random": 3, "single": 1}[row]}
            known = 0.7 if model == "semi-trained" else None
            to = out / "confirm" / folder
            make_case(to, policy_text, hits, shown, settings=common, accuracy=known)
            case = {"defense": policy_text, "clean": False, "step": None, "checkpoint": None}
            cases.append(case | {"folder": folder})
    whole = common | {"attacks": ["dlg"], "cases": cases}
    (out / "confirm" / "settings.json").write_text(json.dumps(whole))
    return out


def make_cell(out: Path, kind: str, result: Mapping[str, Any]) -> Path:
    """Write the folder of a cell of the papers' experiments."""
    out.mkdir(parents=True)
    facts = {
        "format": "gradveil cell 1",
        "key": out.name,
        "kind": kind,
        "cell": {"training": {"model": "resnet20-4", "data": "cifar100"}, "defense": "3-1-7"},
        "n": 100,
        "seconds": 1.0,
        "result": dict(result),
    }
    (out / "cell.json").write_text(json.dumps(facts))
    return out
