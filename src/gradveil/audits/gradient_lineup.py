"""The gradient line-up: candidates ranked by their own gradients, without any search.

It is a ceiling: what somebody tells from what was shared who holds the candidates, all other
images of the update, and the draws of the defense. Without noise the true image fits exactly.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.distances import cosine
from gradveil.attacks.hidden_draws import FreshDraws
from gradveil.audits.stage import Stage, Victim, first_round
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Knowledge, Observation
from gradveil.engine.device import images_at_once
from gradveil.engine.products import Aim
from gradveil.engine.shares import Shares
from gradveil.scores.lineup import rank_among

DRAWN = 64  # images in one pass of a model that draws


@dataclass(frozen=True)
class Updates:
    """What clients share, for many candidates at once.

    Make it once for a model: its first use tries the model out, which takes as long as some passes.
    """

    shares: Shares
    at_once: int  # images in one pass

    @classmethod
    def of(cls, target: Observation, images: Tensor, fresh: FreshDraws) -> "Updates":
        """Return the updates of clients like the one observed, with such images."""
        shares = Shares(target.model, target.loss, target.protocol, told=fresh.shapes)
        # Each pass draws for its rows: how many there are may not depend on free memory.
        return cls(shares, DRAWN if fresh.modules else images_at_once(target.model, images))


@dataclass(frozen=True)
class GradientLineup:
    """Ranks candidates in the place of a victim's images by the distance of the update.

    The distance is 1 - cosine. Each candidate stands in the batch that was used.
    """

    stage: Stage
    _updates: dict[nn.Module, Updates] = field(default_factory=dict, init=False, repr=False)

    def rank(self, victim: Victim, rng: Generator) -> tuple[list[int], Tensor]:
        """Return the rank of each true image, and the nearest candidates, (images, C, H, W)."""
        stage, seen = self.stage, victim.seen
        lineups = stage.victims.lineups
        assert lineups is not None and seen is not None
        target = replace(seen, gradients=first_round(seen), knowledge=Knowledge())
        weight = next(seen.model.parameters())
        ranks, nearest = [], []
        for number, image in enumerate(victim.indices.tolist()):
            row = stage.lineup_rows[image]
            made = stage.split.images[lineups.candidates[row]].to(weight.device).float() / 255
            if stage.changes_images:
                made = stage.under_draws(victim, number, made)
            fresh = FreshDraws(target, (), generator(stage.seed, "ceiling", image))
            made = made.to(weight.dtype)
            if seen.model not in self._updates:
                self._updates[seen.model] = Updates.of(target, made, fresh)
            batch = Batch(victim.used.to(made), victim.original.labels.to(weight.device))
            found = find_distances(self._updates[seen.model], target, batch, number, made, fresh)
            ranks.append(rank_among(-found, int(lineups.true[row]), rng))
            nearest.append(made[int(found.argmin())].cpu())
        return ranks, torch.stack(nearest)


def find_distances(
    updates: Updates,
    target: Observation,
    batch: Batch,
    place: int,
    candidates: Tensor,
    fresh: FreshDraws,
) -> Tensor:
    """Return the distance of the batch's gradient with each candidate in this place."""
    apart = not target.protocol.moves(target.size) and not target.protocol.train_mode
    if apart and not fresh.modules:
        return _apart(updates, target, batch, place, candidates)
    return _together(updates, target, batch, place, candidates, fresh)


def _together(
    updates: Updates,
    target: Observation,
    batch: Batch,
    place: int,
    candidates: Tensor,
    fresh: FreshDraws,
) -> Tensor:
    """Compute the gradient of every batch."""
    several = bool(fresh.modules) and target.protocol.moves(target.size)
    found = []
    for few in candidates.split(max(1, updates.at_once // target.size)):
        images = batch.images.repeat(len(few), 1, 1, 1, 1)
        images[:, place] = few
        labels = batch.labels.expand(len(few), -1)
        measure = cosine.bind([target], len(few))
        with fresh.seeded() if several else nullcontext():
            distances = measure.from_shares(updates.shares, images, labels, fresh(len(few)), False)
        found.append(distances)
    return torch.cat(found).double().cpu()


def _apart(
    updates: Updates, target: Observation, batch: Batch, place: int, candidates: Tensor
) -> Tensor:
    """Return the distance of each candidate, from sums: only one image of the batch changes.

    With r the mean gradient of the other images and g that of a candidate, the batch has
    G = ((B - 1) r + g) / B, so inner products with r and with the target are enough.
    """
    shares = updates.shares
    aim = {name: value[None].to(candidates) for name, value in target.gradients.items()}
    _, own = _pair(aim, aim)
    others = [row for row in range(target.size) if row != place]
    rest: dict[str, Tensor] = {}
    across, of_rest = own.new_zeros(1), own.new_zeros(1)
    if others:
        rest = shares(batch.images[None, others], batch.labels[None, others])
        across, of_rest = _pair(rest, aim)
    beside, found = len(others), []
    for few in candidates.split(updates.at_once):
        label = batch.labels[place].expand(len(few), 1)
        to_target, square = _compare(shares, few, label, aim)
        to_rest = _compare(shares, few, label, rest)[0] if others else 0.0
        dot = (beside * across + to_target) / target.size
        norm = (beside**2 * of_rest + 2 * beside * to_rest + square) / target.size**2
        found.append(1 - dot / (norm * own).sqrt())
    return torch.cat(found).cpu()


def _compare(
    shares: Shares, images: Tensor, labels: Tensor, aim: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return inner products of each image's gradient with the aim and with itself, in float64."""
    # A kernel wants the aim written out for every row; a CPU reads the same one again.
    rows = {name: value.expand(len(images), *value.shape[1:]) for name, value in aim.items()}
    if images.is_cuda:
        rows = {name: value.contiguous() for name, value in rows.items()}
    made = Aim(rows, dict.fromkeys(rows, 1.0))
    dot, square = shares.compare(images[:, None], labels, made, differentiable=False)
    return dot.double(), square.double()


def _pair(found: dict[str, Tensor], aim: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return inner products of a gradient with the aim and with itself, (1,), in float64."""
    dot, square = Aim(aim, dict.fromkeys(aim, 1.0)).pair(found)
    return dot.double(), square.double()
