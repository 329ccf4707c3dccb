"""Whether an attack finds more than anyone could have drawn: a short one, beside blind guesses."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from gradveil.attacks import GradientMatching
from gradveil.attacks.labels import Counted, Known, LabelFinder, SingleLabel, last_layer
from gradveil.checks.subject import Finding, Subject, quiet
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Loss, Observation, Reconstruction
from gradveil.engine.gradients import cross_entropy, per_sample
from gradveil.scores import assign, gray, identify, mean_color, mean_image, noise, over_blind
from gradveil.stats import better_than_blind


def labels_not_inferred(case: Subject) -> Finding | None:
    """Silent where labels are known, and where all are found."""
    finder = chosen(case)
    if finder is None:
        return None
    seen, used = (
        [one for one, _ in case.shared],
        [batch.labels.tolist() for _, batch in case.shared],
    )
    try:
        with quiet():
            found = finder.bind(seen, generator(case.seed, "checks", "labels")).tolist()
    except GradveilError as error:
        return Finding(
            "error", "labels", str(error), "until then no attack that infers labels can run"
        )
    right = sum(
        (Counter(own) & Counter(guess)).total() for own, guess in zip(used, found, strict=True)
    )
    total = sum(map(len, used))
    if right == total:
        return None
    means = f"{right} of {total} labels were found from what is shared{_reason(case)}: an attack then looks for images of wrong classes"
    return Finding(
        "warning",
        "labels",
        means,
        "give the labels (--labels known), or read the figures as an attacker's without them",
    )


def chosen(case: Subject) -> LabelFinder | None:
    """Who infers labels in this case, as an audit would choose."""
    if (
        isinstance(case.attack, GradientMatching)
        and isinstance(case.attack.labels, LabelFinder)
        and not isinstance(case.attack.labels, Known)
    ):
        return case.attack.labels
    if case.labels == "known":
        return None
    return SingleLabel() if len(case.few[0]) == 1 else Counted()


def _reason(case: Subject) -> str:
    """The first known one."""
    one, batch = case.shared[0]
    classes = case.classes
    if len(batch) > classes:
        return f" (batches of {len(batch)} images, more than the {classes} classes: every class may repeat)"
    if case.client.protocol.local_steps > 1:
        return f" (the weights move in {case.client.protocol.local_steps} local steps)"
    if last_layer(one).bias is None:
        return " (the last layer has no bias, so the sums of its rows stand in for it)"
    if any(part.acts_on == "gradients" for part in case.client.acting.parts()):
        return f" ({case.client.acting} changes the last layer's gradient)"
    if any(len(set(own.labels.tolist())) < len(own) for _, own in case.shared):
        return " (batches with several images of one class)"
    return ""


SAME = 1e-4  # relative, above the rounding of float32 and below any scale that matters


@dataclass(frozen=True)
class ScaledCrossEntropy:
    """As a client shares that trains with a scaled loss."""

    scale: float = 1.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.scale * cross_entropy(logits, labels)


def losses_differ(case: Subject) -> Finding | None:
    """Compares what the two pull each logit by: constants do not matter, gradients do."""
    if case.attacker_loss is None:
        return None
    images, labels = case.placed(case.few[0])
    with case.passes():
        answers = case.answers(images)
    attacker = case.client.acting.protect_loss(case.attacker_loss)
    own, theirs = (_slopes(loss, answers, labels) for loss in (case.loss, attacker))
    if float((own - theirs).norm()) <= SAME * max(float(own.norm()), float(theirs.norm())):
        return None
    factor = float((own * theirs).sum() / theirs.square().sum().clamp_min(1e-30))
    do = "give the attacker the client's own loss; Client.share puts it into the observation"
    if float((own - factor * theirs).norm()) <= SAME * float(own.norm()):
        scaled = f"the client's loss is {factor:.4g} times the attacker's: a distance by angle (cosine) does not see it, L1 and L2 do"
        return Finding(
            "warning", "loss", f"{scaled} and then look for images with the wrong gradient", do
        )
    alike = float(torch.nn.functional.cosine_similarity(own.flatten(), theirs.flatten(), dim=0))
    means = f"the losses of client and attacker differ (cosine of their slopes {alike:.3f}): even the true images do not match"
    return Finding("warning", "loss", means, do)


def _slopes(loss: Loss, answers: Tensor, labels: Tensor) -> Tensor:
    leaf = answers.detach().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(
            per_sample(loss, leaf, labels).sum(), leaf, materialize_grads=True
        )
    return found


IMAGES = 4  # attacked, or one victim where a batch is larger


def no_better_than_blind(case: Subject) -> Finding | None:
    """By dB over the best blind guess, or by identification."""
    if case.attack is None:
        return None
    try:
        attacked, truths, founds = short_attack(case)
    except GradveilError as error:
        return Finding(
            "error",
            "attack",
            str(error),
            "choose an attack that suits this model and what is known",
        )
    over = [
        value for pair in zip(founds, truths, attacked, strict=True) for value in _over(case, *pair)
    ]
    hits, candidates = _identified(case, torch.cat(founds), torch.cat(truths))
    if median(over) > 0 or better_than_blind(over, hits, len(over), candidates).better:
        return None
    figures = f"median {median(over):+.1f} dB over the best blind guess, {hits} of {len(over)} identified among {candidates:,}"
    means = f"a short attack finds no more than a blind guess ({figures})"
    do = "before calling that privacy, try more steps, another attack, and earlier or untrained weights"
    return Finding("warning", "blind", means, do)


def short_attack(case: Subject) -> tuple[list[Batch], list[Tensor], list[Tensor]]:
    """The victims attacked, the images their attack aims at, and what was found, in their order."""
    assert case.attack is not None
    count = max(1, IMAGES // len(case.few[0]))
    seen = [case.attacked(one) for one, _ in case.shared[:count]]
    with quiet():
        found = case.attack(_with_labels(case, seen), generator(case.seed, "checks", "attack"))
    used = [batch for _, batch in case.shared[:count]]
    truths = [_aim(one, own, batch) for one, own, batch in zip(found, used, case.few, strict=False)]
    images = [one.images.detach().cpu().float().clamp(0, 1) for one in found]
    return (
        used,
        truths,
        [some[assign(some, truth)] for some, truth in zip(images, truths, strict=True)],
    )


def _with_labels(case: Subject, seen: Sequence[Observation]) -> list[Observation]:
    """Where they are inferred, an attack that needs them gets the inferred ones, as in an audit."""
    assert case.attack is not None
    finder = chosen(case)
    if finder is None or "labels" not in case.attack.needs:
        return list(seen)
    inferred = finder.bind(seen, generator(case.seed, "checks", "labels"))
    return [
        replace(one, knowledge=replace(one.knowledge, labels=own))
        for one, own in zip(seen, inferred, strict=True)
    ]


def _aim(one: Reconstruction, used: Batch, original: Batch) -> Tensor:
    return (used if one.aims_at == "used" else original).images.detach().cpu().float()


def _over(case: Subject, found: Tensor, truth: Tensor, batch: Batch) -> list[float]:
    """dB over the best of noise, grey and, where there are public images, their mean color and the mean of the label's class."""
    shape = truth.shape[1], truth.shape[2], truth.shape[3]
    guesses = [noise(shape, 1, generator(case.seed, "checks", "guess")), gray(shape)]
    if case.public is not None:
        guesses += [mean_color(case.public.images.float()), mean_image(case.public.images.float())]
    everyone = torch.cat(guesses).expand(len(truth), -1, -1, -1, -1)
    own = torch.stack(
        [
            torch.cat([many, _class_mean(case, int(label))])
            for many, label in zip(everyone, batch.labels, strict=True)
        ]
    )
    values: list[float] = over_blind(found, truth, own).tolist()
    return values


def _class_mean(case: Subject, label: int) -> Tensor:
    """Grey where nothing of the class is public: that guess is there already."""
    example = case.few[0].images
    shape = example.shape[1], example.shape[2], example.shape[3]
    if case.public is None or not bool((case.public.labels == label).any()):
        return gray(shape)
    return mean_image(case.public.images[case.public.labels == label].float())


def _identified(case: Subject, found: Tensor, truth: Tensor) -> tuple[int, int]:
    """How many, and among how many: the true images and the test images, changed as the client changes its own."""
    others = _changed(case, case.test) if case.test is not None else truth[:0]
    others = (
        others[
            ~torch.stack([(others - one).abs().flatten(1).amax(1) < 1e-6 for one in truth]).any(0)
        ]
        if len(others)
        else others
    )
    candidates = torch.cat([truth, others])
    if len(candidates) < 2:
        return 0, 1
    return int(identify(found, candidates, torch.arange(len(found))).sum()), len(candidates)


def _changed(case: Subject, batch: Batch) -> Tensor:
    rng = generator(case.seed, "checks", "candidates")
    pixels = Batch(batch.images.float(), batch.labels)
    return case.client.acting.protect_batch(pixels, rng).images
