"""Checks of the attacker's side: labels, losses, and whether a short attack beats blind guesses."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from gradveil.attacks import GradientMatching
from gradveil.attacks.blind import (
    Blind,
    BlindImage,
    find_means,
    make_blind_attacks,
    stack_guesses,
)
from gradveil.attacks.labels import Counted, Known, LabelFinder, SingleLabel, last_layer
from gradveil.checks.subject import Finding, Subject, quiet
from gradveil.core.errors import GradveilError
from gradveil.core.importing import user_code
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Loss, Observation, Reconstruction
from gradveil.defenses.applied import protected_batch
from gradveil.engine.gradients import cross_entropy, per_sample
from gradveil.scores import assign, identify, over_blind
from gradveil.stats import better_than_blind


def labels_not_inferred(subject: Subject) -> Finding | None:
    """Find labels that the attacker has to infer and infers wrongly."""
    finder = chosen(subject)
    if finder is None:
        return None
    seen = [shared.seen for shared in subject.shared]
    used = [shared.batch.labels.tolist() for shared in subject.shared]
    try:
        with quiet():
            found = finder.bind(seen, generator(subject.seed, "checks", "labels")).tolist()
    except GradveilError as error:
        return Finding(
            "error", "labels", str(error), "until then no attack that infers labels can run"
        )
    right = sum(
        (Counter(true) & Counter(guess)).total() for true, guess in zip(used, found, strict=True)
    )
    total = sum(map(len, used))
    if right == total:
        return None
    means = (
        f"{right} of {total} labels were found from what is shared{_reason(subject)}: "
        "an attack then looks for images of wrong classes"
    )
    return Finding(
        "warning",
        "labels",
        means,
        "give the labels (--labels known), or read the figures as an attacker's without them",
    )


def chosen(subject: Subject) -> LabelFinder | None:
    """Return what infers the labels, as an audit would choose it; None where they are known."""
    if (
        isinstance(subject.attack, GradientMatching)
        and isinstance(subject.attack.labels, LabelFinder)
        and not isinstance(subject.attack.labels, Known)
    ):
        return subject.attack.labels
    if subject.labels == "known":
        return None
    return SingleLabel() if len(subject.few[0]) == 1 else Counted()


def _reason(subject: Subject) -> str:
    """Say why labels were inferred wrongly: the first reason that is known."""
    seen, batch = subject.shared[0]
    classes = subject.classes
    if len(batch) > classes:
        return (
            f" (batches of {len(batch)} images, more than the {classes} classes: "
            "every class may repeat)"
        )
    if subject.client.protocol.local_steps > 1:
        return f" (the weights move in {subject.client.protocol.local_steps} local steps)"
    if last_layer(seen).bias is None:
        return " (the last layer has no bias, so the sums of its rows stand in for it)"
    if any(part.acts_on == "gradients" for part in subject.client.acting.parts()):
        return f" ({subject.client.acting} changes the last layer's gradient)"
    if any(len(set(used.labels.tolist())) < len(used) for _, used in subject.shared):
        return " (batches with several images of one class)"
    return ""


SAME = 1e-4  # relative: above the rounding of float32, below any scale that matters


@dataclass(frozen=True)
class ScaledCrossEntropy:
    """Cross-entropy times `scale`, the loss of a client that was trained so."""

    scale: float = 1.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.scale * cross_entropy(logits, labels)


def losses_differ(subject: Subject) -> Finding | None:
    """Find losses of client and attacker whose slopes, logit by logit, differ."""
    if subject.attacker_loss is None:
        return None
    images, labels = subject.placed(subject.few[0])
    with subject.passes():
        answers = subject.answers(images)
    attacker = subject.client.acting.protect_loss(subject.attacker_loss)
    ours, theirs = (_slopes(loss, answers, labels) for loss in (subject.loss, attacker))
    if float((ours - theirs).norm()) <= SAME * max(float(ours.norm()), float(theirs.norm())):
        return None
    factor = float((ours * theirs).sum() / theirs.square().sum().clamp_min(1e-30))
    do = "give the attacker the client's own loss; Client.share puts it into the observation"
    if float((ours - factor * theirs).norm()) <= SAME * float(ours.norm()):
        means = (
            f"the client's loss is {factor:.4g} times the attacker's: a distance by angle (cosine) "
            "does not see it, L1 and L2 do and then look for images with the wrong gradient"
        )
        return Finding("warning", "loss", means, do)
    alike = float(torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0))
    means = (
        f"the losses of client and attacker differ (cosine of their slopes {alike:.3f}): "
        "even the true images do not match"
    )
    return Finding("warning", "loss", means, do)


def _slopes(loss: Loss, answers: Tensor, labels: Tensor) -> Tensor:
    leaf = answers.detach().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(
            per_sample(loss, leaf, labels).sum(), leaf, materialize_grads=True
        )
    return found


IMAGES = 4  # that are attacked, unless one victim has more


def no_better_than_blind(subject: Subject) -> Finding | None:
    """Find an attack that is no better than blind, by dB over the best guess and identification."""
    if subject.attack is None:
        return None
    try:
        attacked, truths, founds = short_attack(subject)
    except GradveilError as error:
        return Finding(
            "error",
            "attack",
            str(error),
            "choose an attack that suits this model and what is known",
        )
    guessing = _guessing(subject)
    over: list[float] = []
    for found, truth, batch in zip(founds, truths, attacked, strict=True):
        guesses = _guesses(guessing, truth, batch.labels.cpu(), subject.seed)
        over += over_blind(found, truth, guesses).tolist()
    hits, candidates = _identified(subject, torch.cat(founds), torch.cat(truths))
    if median(over) > 0 or better_than_blind(over, hits, len(over), candidates).better:
        return None
    figures = (
        f"median {median(over):+.1f} dB over the best blind guess, "
        f"{hits} of {len(over)} identified among {candidates:,}"
    )
    means = f"a short attack finds no more than a blind guess ({figures})"
    do = (
        "before calling that privacy, try more steps, another attack, "
        "and earlier or untrained weights"
    )
    return Finding("warning", "blind", means, do)


def short_attack(subject: Subject) -> tuple[list[Batch], list[Tensor], list[Tensor]]:
    """Attack the first victims; return them, the images aimed at, and those found, in order."""
    assert subject.attack is not None
    count = max(1, IMAGES // len(subject.few[0]))
    seen = [subject.attacked(shared.seen) for shared in subject.shared[:count]]
    with quiet(), user_code(f"attack {subject.attack.title} failed"):
        found = subject.attack(
            _with_labels(subject, seen), generator(subject.seed, "checks", "attack")
        )
    used = [shared.batch for shared in subject.shared[:count]]
    truths = [_aim(*each) for each in zip(found, used, subject.few, strict=False)]
    images = [each.images.detach().cpu().float().clamp(0, 1) for each in found]
    ordered = [some[assign(some, truth)] for some, truth in zip(images, truths, strict=True)]
    return used, truths, ordered


def _with_labels(subject: Subject, seen: Sequence[Observation]) -> list[Observation]:
    """Give inferred labels to an attack that needs some, as in an audit."""
    assert subject.attack is not None
    finder = chosen(subject)
    if finder is None or "labels" not in subject.attack.needs:
        return list(seen)
    inferred = finder.bind(seen, generator(subject.seed, "checks", "labels"))
    return [
        replace(each, knowledge=replace(each.knowledge, labels=labels))
        for each, labels in zip(seen, inferred, strict=True)
    ]


def _aim(found: Reconstruction, used: Batch, original: Batch) -> Tensor:
    return (used if found.aims_at == "used" else original).images.detach().cpu().float()


def _guessing(subject: Subject) -> list[Blind]:
    """Return the blind attacks: noise, gray, and what public images give.

    These give their mean color, the mean of the label's class and the mean of all.
    """
    if subject.public is None:
        return [*make_blind_attacks().values()]
    public = subject.public
    means = find_means(public.images.cpu().float(), public.labels.cpu(), subject.classes)
    return [*make_blind_attacks(means).values(), BlindImage("mean image", means.image)]


def _guesses(attacks: Sequence[Blind], truth: Tensor, labels: Tensor, seed: int) -> Tensor:
    """Return every attack's guess of each image, (images, attacks, C, H, W); noise is the same."""
    shape = truth.shape[1], truth.shape[2], truth.shape[3]
    rngs = [generator(seed, "checks", "guess") for _ in truth]
    return stack_guesses(attacks, shape, labels, rngs)


def _identified(subject: Subject, found: Tensor, truth: Tensor) -> tuple[int, int]:
    """Count the images identified, and the candidates: the true images and the test images, which
    the defense changes as it changes the client's.
    """
    others = _changed(subject, subject.test) if subject.test is not None else truth[:0]
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


def _changed(subject: Subject, batch: Batch) -> Tensor:
    rng = generator(subject.seed, "checks", "candidates")
    pixels = Batch(batch.images.float(), batch.labels)
    return protected_batch(subject.client.acting, pixels, rng).images
