"""Checks of the attacker's side: labels, losses, and whether a short attack beats blind guesses."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from gradveil.attacks import GradientMatching
from gradveil.attacks.blind import Blind, stack_guesses
from gradveil.attacks.labels import Counted, Known, LabelFinder, SingleLabel, last_layer
from gradveil.checks.subject import Finding, Subject, quiet
from gradveil.controls import Controls
from gradveil.core.errors import GradveilError
from gradveil.core.importing import user_code
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Loss, Observation, Reconstruction
from gradveil.data import Images
from gradveil.engine.gradients import cross_entropy, per_sample
from gradveil.scores import assign, over_blind
from gradveil.scores.lineup import (
    SHIFT,
    SMALL_SIZES,
    Shown,
    choose,
    distinct,
    is_replayed,
    replay,
)
from gradveil.stats import EACH, Share, share_of_updates, signed_rank


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
    if subject.client.protocol.moves(len(batch)):
        return f" (the weights move in {subject.client.protocol.in_words(len(batch))})"
    if last_layer(seen).bias is None:
        return " (the last layer has no bias, so the sums of its rows stand in for it)"
    if subject.client.acting.changes("gradients"):
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
    """Find an attack that is no better than blind, by dB over a guess and by a line-up.

    The guess is the best on public images. Where the defense changes images, the candidates of the
    line-up go through the victim's own draws, as in an audit.
    """
    if subject.attack is None:
        return None
    try:
        attacked, truths, founds, aims = short_attack(subject)
    except GradveilError as error:
        return Finding(
            "error",
            "attack",
            str(error),
            "choose an attack that suits this model and what is known",
        )
    acting, size = subject.client.acting, len(subject.few[0])
    controls = Controls.of(_public(subject), acting, size, subject.seed)
    over: list[float] = []
    for found, truth, aim, batch in zip(founds, truths, aims, attacked, strict=True):
        guess = controls.attacks[controls.chosen[aim]]
        guesses = _guess(guess, truth, batch.labels.cpu(), subject.seed)
        over += over_blind(found, truth, guesses).tolist()
    if median(over) > 0 or signed_rank(over) < EACH:
        return None
    figures = f"median {median(over):+.1f} dB over the best blind guess on public images"
    lined_up = _line_up(subject, attacked, truths, founds, aims)
    if isinstance(lined_up, str):
        figures += f"; no line-up: {lined_up}"
    else:
        share, among = lined_up
        if share.p < EACH:
            return None
        figures += f", rank 1 in {share.hits} of {share.n} line-ups of {among}"
    figures = f"({figures})"
    means = f"a short attack finds no more than a blind guess {figures}"
    do = (
        "before calling that privacy, try more steps, another attack, "
        "and earlier or untrained weights"
    )
    return Finding("warning", "blind", means, do)


def short_attack(
    subject: Subject,
) -> tuple[list[Batch], list[Tensor], list[Tensor], list[str]]:
    """Attack the first victims; return them, the images aimed at, and those found, in order.

    Last comes whether these images are the ones used or the original ones.
    """
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
    return used, truths, ordered, [each.aims_at for each in found]


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


def _public(subject: Subject) -> Images | None:
    """Return the public images as bytes; None where there are none."""
    if subject.public is None:
        return None
    classes = tuple(map(str, range(subject.classes)))
    pixels = (subject.public.images.cpu() * 255).round().to(torch.uint8)
    level = (0.5,) * pixels.shape[1]
    return Images("public", "train", pixels, subject.public.labels.cpu(), classes, level, level)


def _guess(attack: Blind, truth: Tensor, labels: Tensor, seed: int) -> Tensor:
    """Return the attack's guess of each image, (images, 1, C, H, W); noise is the same."""
    shape = truth.shape[1], truth.shape[2], truth.shape[3]
    rngs = [generator(seed, "checks", "guess") for _ in truth]
    return stack_guesses([attack], shape, labels, rngs)


def _line_up(
    subject: Subject,
    batches: Sequence[Batch],
    truths: Sequence[Tensor],
    founds: Sequence[Tensor],
    aims: Sequence[str],
) -> tuple[Share, int] | str:
    """Rank the true images among test images of their classes, or say why there is no line-up.

    Also returns the number of candidates of each line-up.
    """
    if subject.test is None:
        return "there are no test images"
    if min(truths[0].shape[2:]) <= 2 * SHIFT:
        return "the images are too small"
    originals = [batch.images.cpu().float() for batch in subject.few[: len(truths)]]
    images = torch.cat([*originals, subject.test.images.cpu().float()])
    labels = torch.cat([*(batch.labels.cpu() for batch in batches), subject.test.labels.cpu()])
    victims = torch.arange(sum(map(len, truths))).split([len(truth) for truth in truths])
    allowed = distinct((images * 255).round().to(torch.uint8), labels)
    allowed[: sum(map(len, truths))] = True
    lineups = choose(labels, victims, allowed, subject.seed, sizes=SMALL_SIZES, spare=0)
    if lineups is None:
        return "the test images of a class are too few"
    lot, hits = generator(subject.seed, "checks", "lot"), []
    for number, (numbers, found) in enumerate(zip(victims, founds, strict=True)):
        candidates, true = images[lineups.candidates[numbers]], lineups.true[numbers]
        if aims[number] == "used" and subject.client.acting.changes("batch"):
            candidates = _replayed(subject, number, originals[number], candidates)
            ours = candidates[torch.arange(len(numbers)), true]
            if not is_replayed(ours, truths[number]):
                return "the defense does not tell what it did to the images"
        ranks = Shown.of(candidates, true).ranks(found, lot)
        hits.append([rank == 1 for rank in ranks])
    return share_of_updates(hits, 1 / lineups.size), lineups.size


def _replayed(subject: Subject, number: int, batch: Tensor, candidates: Tensor) -> Tensor:
    """Return the candidates (B, N, C, H, W) of a victim's images, put through its own draws."""
    change, example = subject.changes[number], subject.example
    rows = [
        replay(change, batch.to(example), row, some.to(example)).detach().cpu().float()
        for row, some in enumerate(candidates)
    ]
    return torch.stack(rows)
