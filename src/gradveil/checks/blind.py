"""Whether an attack finds more than anyone could have drawn: a short one, beside blind guesses."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from gradveil.checks.cases import Case, quiet
from gradveil.checks.findings import Finding
from gradveil.checks.labels import chosen
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Observation, Reconstruction
from gradveil.scores import assign, gray, identify, mean_color, mean_image, noise, over_blind
from gradveil.statistics import better_than_blind

IMAGES = 4  # attacked, or one victim where a batch is larger


def no_better_than_blind(case: Case) -> Finding | None:
    """By dB over the best blind guess, or by identification."""
    if case.attack is None:
        return None
    try:
        attacked, truths, founds = short_attack(case)
    except GradveilError as error:
        return Finding("error", "attack", str(error), "choose an attack that suits this model and what is known")
    over = [value for pair in zip(founds, truths, attacked, strict=True) for value in _over(case, *pair)]
    hits, candidates = _identified(case, torch.cat(founds), torch.cat(truths))
    if median(over) > 0 or better_than_blind(over, hits, len(over), candidates).better:
        return None
    figures = f"median {median(over):+.1f} dB over the best blind guess, {hits} of {len(over)} identified among {candidates:,}"
    means = f"a short attack finds no more than a blind guess ({figures})"
    do = "before calling that privacy, try more steps, another attack, and earlier or untrained weights"
    return Finding("warning", "blind", means, do)


def short_attack(case: Case) -> tuple[list[Batch], list[Tensor], list[Tensor]]:
    """The victims attacked, the images their attack aims at, and what was found, in their order."""
    assert case.attack is not None
    count = max(1, IMAGES // len(case.few[0]))
    seen = [case.attacked(one) for one, _ in case.shared[:count]]
    with quiet():
        found = case.attack(_with_labels(case, seen), generator(case.seed, "checks", "attack"))
    used = [batch for _, batch in case.shared[:count]]
    truths = [_aim(one, own, batch) for one, own, batch in zip(found, used, case.few, strict=False)]
    images = [one.images.detach().cpu().float().clamp(0, 1) for one in found]
    return used, truths, [some[assign(some, truth)] for some, truth in zip(images, truths, strict=True)]


def _with_labels(case: Case, seen: Sequence[Observation]) -> list[Observation]:
    """Where they are inferred, an attack that needs them gets the inferred ones, as in an audit."""
    assert case.attack is not None
    finder = chosen(case)
    if finder is None or "labels" not in case.attack.needs:
        return list(seen)
    inferred = finder.infer(seen, generator(case.seed, "checks", "labels"))
    return [replace(one, knowledge=replace(one.knowledge, labels=own)) for one, own in zip(seen, inferred, strict=True)]


def _aim(one: Reconstruction, used: Batch, original: Batch) -> Tensor:
    return (used if one.aims_at == "used" else original).images.detach().cpu().float()


def _over(case: Case, found: Tensor, truth: Tensor, batch: Batch) -> list[float]:
    """dB over the best of noise, grey and, where there are public images, their mean color and the mean of the label's class."""
    shape = truth.shape[1], truth.shape[2], truth.shape[3]
    guesses = [noise(shape, 1, generator(case.seed, "checks", "guess")), gray(shape)]
    if case.public is not None:
        guesses += [mean_color(case.public.images.float()), mean_image(case.public.images.float())]
    everyone = torch.cat(guesses).expand(len(truth), -1, -1, -1, -1)
    own = torch.stack([torch.cat([many, _class_mean(case, int(label))]) for many, label in zip(everyone, batch.labels, strict=True)])
    values: list[float] = over_blind(found, truth, own).tolist()
    return values


def _class_mean(case: Case, label: int) -> Tensor:
    """Grey where nothing of the class is public: that guess is there already."""
    example = case.few[0].images
    shape = example.shape[1], example.shape[2], example.shape[3]
    if case.public is None or not bool((case.public.labels == label).any()):
        return gray(shape)
    return mean_image(case.public.images[case.public.labels == label].float())


def _identified(case: Case, found: Tensor, truth: Tensor) -> tuple[int, int]:
    """How many, and among how many: the true images and the test images, changed as the client changes its own."""
    others = _changed(case, case.test) if case.test is not None else truth[:0]
    others = others[~torch.stack([(others - one).abs().flatten(1).amax(1) < 1e-6 for one in truth]).any(0)] if len(others) else others
    candidates = torch.cat([truth, others])
    if len(candidates) < 2:
        return 0, 1
    return int(identify(found, candidates, torch.arange(len(found))).sum()), len(candidates)


def _changed(case: Case, batch: Batch) -> Tensor:
    rng = generator(case.seed, "checks", "candidates")
    images = batch.images.float()
    if case.client.prepare is not None:
        images = case.client.prepare((images * 255).round().to(torch.uint8), rng).float() / 255
    return case.client.acting.protect_batch(Batch(images, batch.labels), rng).images
