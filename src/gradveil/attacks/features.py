"""The features of each image of a batch at the first dense layer, from gradients of dense layers.

It begins with the last layer. With logits z = W h + c the gradient is dW = mean_b s_b h_b^T and
dc = mean_b s_b, where s_b is the slope of image b's loss by its logits. So every h_b lies in the
row space of dW, which has as many dimensions as the batch has images: h_b = R a_b. Which
combinations a_b they are follows from the slopes, since s_b is a known function of h_b and the
label: fewer unknowns than equations as long as the batch has fewer images than the layer has units.
Kariyappa et al. 2023 (cocktail party attack) separate them by independent components; here the
equations are solved. The inputs of the dense layers before follow from those of the last
(`dense_layers`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.dense_layers import (
    ROUNDED,
    Found,
    exact,
    exact_loss,
    find_inputs,
    gradients_of,
    rounding,
    trailing,
)
from gradveil.attacks.distances import Cosine, Measure
from gradveil.attacks.labels import last_layer
from gradveil.core.errors import GradveilError
from gradveil.core.types import Gradients, Loss, Observation
from gradveil.engine.draws import Draws, drawing
from gradveil.engine.gradients import in_mode, per_sample, with_slope
from gradveil.engine.local import check_equal
from gradveil.engine.shares import Shares

STARTS, FEWEST = 128, 2  # of the equations, at most and at least
NUMBERS, MOST = 2**21, 2**23  # of the equations' slopes: of all starts together, of one at most
SUREST = 8.0  # logits by which a label leads at most
ITERATIONS = 100  # of all starts; the best go on for as many as it takes, up to
REFINED = 300
PATIENCE = 20  # iterations in which the error must halve; once it is `SOLVED`, sink by `GAIN`,
GAIN, SOON = 0.05, 12  # and once it is `NEAR` in so many
SOLVED = 1e-3  # relative error at most of the gradient that features explain
NEAR, KEPT = 1e-5, 16  # relative error from which the best starts alone go on, and how many do
TOLD = 3e-3  # how far features may be off, over their size, to be matched


@dataclass(frozen=True, eq=False)
class Equations:
    """The equations of a victim: gradients in the basis of their row space, (units, images)."""

    basis: Tensor  # (features, images), orthonormal
    target: Tensor  # (units, images + 1): the gradient by the weights in that basis, by the bias
    weight: Tensor  # (units, images): the layer's weights in that basis
    bias: Tensor
    labels: Tensor
    loss: Loss
    rounding: float  # relative error of a number in the gradient as it was shared

    def errors(self, a: Tensor) -> Tensor:
        """Return what a guess (starts, images, images) leaves unexplained, over its size."""
        left = self._made(a, self._slopes(a)) - self.target
        errors: Tensor = left.flatten(1).norm(dim=1) / self.target.norm()
        return errors

    def _made(self, a: Tensor, slopes: Tensor) -> Tensor:
        ones = torch.ones_like(a[..., :1])
        return slopes.transpose(1, 2) @ torch.cat([a, ones], 2) / a.shape[1]

    def _slopes(self, a: Tensor) -> Tensor:
        """Return the slopes by the logits, (starts, images, units)."""
        return self._at_logits(a)[1].detach().view(*a.shape[:2], -1)

    def _at_logits(self, a: Tensor, curved: bool = False) -> tuple[Tensor, Tensor]:
        """Return logits (starts x images, units) and slopes, in a graph where `curved`."""
        labels = self.labels.repeat(len(a))
        with torch.enable_grad():
            logits = (a @ self.weight.T + self.bias).flatten(0, 1).requires_grad_()
            losses = with_slope(per_sample(self.loss, logits, labels))
            (slopes,) = torch.autograd.grad(losses.sum(), logits, create_graph=curved)
        return logits, slopes

    def _curves(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slopes, and their slopes by a_b in turn: (starts, images, units, images)."""
        logits, slopes = self._at_logits(a, curved=True)
        with torch.enable_grad():
            along = (slopes + 0 * logits) @ self.weight  # a loss of straight pieces has no curves
        # Slopes of slopes are symmetric: those of s_b W by the logits are those of s_b by a_b.
        each = [
            torch.autograd.grad(column.sum(), logits, retain_graph=True)[0]
            for column in along.unbind(1)
        ]
        shape = *a.shape[:2], -1
        return slopes.detach().view(shape), torch.stack(each, -1).view(*shape, len(each))

    def _linear(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return how the equations move with a, (starts, equations, unknowns), and what is left."""
        slopes, moved = self._curves(a)
        left = (self._made(a, slopes) - self.target).transpose(1, 2).flatten(1)
        longer = torch.cat([a, torch.ones_like(a[..., :1])], 2)
        jacobian = torch.einsum("sbk,sbui->skubi", longer, moved)
        for number in range(a.shape[1]):
            jacobian[:, number, :, :, number] += slopes.transpose(1, 2)
        return jacobian.flatten(1, 2).flatten(2) / a.shape[1], left

    def step(self, a: Tensor, damping: Tensor) -> Tensor:
        """Return the guesses after a step of Levenberg and Marquardt, damped for each start.

        The equations are not squared: that would lose images of one class in rounding.
        """
        jacobian, left = self._linear(a)
        scale = jacobian.norm(dim=1).clamp(min=1e-15)
        damped = torch.diag_embed(damping.sqrt()[:, None] * scale)
        wanted = torch.cat([left, torch.zeros_like(scale)], 1)[..., None]
        system = torch.cat([jacobian, damped], 1)
        after: Tensor = a - torch.linalg.lstsq(system, wanted, driver="gels").solution.view_as(a)
        return after

    def spreads(self, a: Tensor) -> Tensor:
        """Return how far each image of a solution (images, images) may be off, over its size.

        That is by an error like what it leaves unexplained, or like the gradient's rounding, since
        images of one class whose slopes are nearly alike can be mixed with little effect. Where
        more than rounding is left, the solution lies farther away than that.
        """
        jacobian = self._linear(a[None])[0][0]
        equations, unknowns = jacobian.shape
        error = float(self.errors(a[None]))
        size = max(error, self.rounding) * float(self.target.norm())
        size *= error / self.rounding if error > ROUNDED * self.rounding else 1
        _, values, vectors = torch.linalg.svd(jacobian, full_matrices=False)
        moves = vectors.T / values.clamp(min=1e-30)
        each = moves.view(len(a), -1).norm(dim=1) * size / math.sqrt(equations - unknowns)
        found: Tensor = each / a.norm(dim=1).clamp(min=1e-30)
        return found

    def start(self, rng: Generator, count: int) -> Tensor:
        """Draw guesses: random slopes of images with these labels give features by division."""
        units, images = self.target.shape[0], len(self.labels)
        spread = 10 ** torch.linspace(-1, 0.7, count, dtype=torch.float64)
        logits = torch.randn(count, images, units, generator=rng, dtype=torch.float64)
        true = torch.nn.functional.one_hot(self.labels, units)
        # A trained model knows many images already: in every second start their labels lead.
        lead = SUREST * torch.rand(count, images, 1, generator=rng, dtype=torch.float64)
        lead[::2] = 0
        chance = (logits * spread[:, None, None] + self.bias + lead * true).softmax(2)
        slopes = chance - true
        found: Tensor = torch.linalg.pinv(slopes.transpose(1, 2)) @ self.target[:, :-1] * images
        return found

    def solve(self, rng: Generator) -> tuple[Tensor, float]:
        """Return the solution that explains most, (images, images), and what it leaves of all."""
        units, images = self.target.shape[0], len(self.labels)
        size = units * (images + 1) * images**2
        a = self.start(rng, max(FEWEST, min(STARTS, NUMBERS // size)))
        damping = torch.full((len(a),), 1e-2, dtype=torch.float64)
        errors = self.errors(a)
        before, since = math.inf, 0
        for number in range(REFINED):
            least = float(errors.min())
            if least < before * (1 / 2 if least > SOLVED else 1 - GAIN):
                before, since = least, number
            if number - since >= (PATIENCE if least > NEAR else SOON):
                break  # nothing more will come of it
            if least < NEAR or number >= ITERATIONS:
                kept = errors.argsort()[:KEPT]
                a, damping, errors = a[kept], damping[kept], errors[kept]
            tried = self.step(a, damping)
            after = self.errors(tried).nan_to_num(math.inf)
            better = after < errors
            a = torch.where(better[:, None, None], tried, a)
            errors = torch.where(better, after, errors)
            damping = torch.where(better, damping / 3, damping * 4).clamp(1e-15, 1e12)
        best = int(errors.argmin())
        return a[best], float(errors[best])

    def slopes(self, a: Tensor) -> Tensor:
        """Return the slope of each image's loss by the logits, (images, units)."""
        return self._slopes(a[None])[0]


def find_features(victim: Observation, rng: Generator) -> list[Found]:
    """Return the inputs of dense layers for each image, those of the first layer first.

    The dense layers are those at the model's end, with nothing but a ReLU, a sigmoid, a tanh or
    dropout that is off between them. Images are in the order of the labels that the attacker knows.
    Refuse a gradient that no such features explain, as under noise. Explained is not always right:
    where images of one class have nearly the same slopes at the last layer, their features there
    may be mixtures, and an image that leaves next to no gradient may have any; `spreads` tell.
    Columns of which zeros, as pruning makes them, left only a part are completed from those that
    are whole; columns with fewer entries left than images count as zero.
    """
    equations, cut = _equations(victim)
    a, error = equations.solve(rng)
    if not error <= SOLVED:
        raise GradveilError(
            f"no features of {victim.size} images were found with the gradient of the last dense "
            f"layer{cut} (relative error {error:.1g}): a defense may have added noise to it, the "
            "labels may be wrong, or a trained model may be too sure of some images"
        )
    features, slopes = a @ equations.basis.T, equations.slopes(a)
    return find_inputs(victim, trailing(victim), features, slopes, equations.spreads(a))


def _most_told(victim: Observation, rng: Generator) -> Found:
    """Return the features at the layer that tells most images' for sure, of such the first one."""
    found = max(find_features(victim, rng), key=lambda each: float(told(each).sum()))
    if not bool(told(found).any()):
        raise GradveilError(
            f"no features of {victim.size} images are told for sure by the gradient of the last "
            "dense layer: images of one class are too much alike there"
        )
    return found


def _equations(victim: Observation) -> tuple[Equations, str]:
    """Return the equations of the last dense layer, and what zeros left of it, in words."""
    layer = last_layer(victim, "features need", "choose a matching attack")
    weight, bias = gradients_of(victim, layer)
    if weight is None or bias is None:
        raise GradveilError("features need the gradients of the last dense layer's weight and bias")
    if not bool(weight.isfinite().all() and bias.isfinite().all()):
        raise GradveilError("the gradient of the last dense layer is not finite")
    units, size = len(bias), victim.size
    if size >= units:
        raise GradveilError(
            f"batch of {size}: features are found of fewer images than the last dense layer's "
            f"{units} units; choose a matching attack"
        )
    if size > weight.shape[1]:
        raise GradveilError(
            f"batch of {size}: features are found of at most as many images as the last dense "
            f"layer has inputs, {weight.shape[1]}; choose a matching attack"
        )
    if victim.knowledge.labels is None:
        raise GradveilError("features need the labels; give them, or infer them")
    if units * (size + 1) * size**2 > MOST:
        raise GradveilError(
            f"batch of {size} in a layer of {units} units: the equations of features would be too "
            "large; choose a matching attack"
        )
    completed, kept = _completed(exact(torch.cat([weight, bias[:, None]], 1)), size)
    whole, bias = completed[:, :-1], completed[:, -1]
    _, _, rows = torch.linalg.svd(whole, full_matrices=False)
    basis = rows[:size].T
    equations = Equations(
        basis,
        torch.cat([whole @ basis, bias[:, None]], 1),
        exact(layer.weight) @ basis,
        exact(layer.bias),
        victim.knowledge.labels.cpu().long(),
        exact_loss(victim.loss),
        rounding(weight),
    )
    cut = f", of which zeros left {kept} of {completed.shape[1]} columns" if kept else ""
    return equations, cut


def _completed(weight: Tensor, size: int) -> tuple[Tensor, int]:
    """Return the gradient with its pruned entries, and how many columns can be used; 0 for all.

    The last column is the gradient by the bias.

    The columns of a batch lie in a space of `size` dimensions, which the whole columns span: any
    column with that many entries left is known.
    """
    there = weight != 0
    counts = there.sum(0)
    full = counts == len(weight)
    if bool((full | (counts == 0)).all()):
        return weight, 0  # a column of zeros is that of a feature that no image has
    if int(full.sum()) < size:
        raise GradveilError(
            f"zeros left {int(full.sum())} of {weight.shape[1]} columns of the last dense layer's "
            f"gradient whole; features of a batch of {size} need as many"
        )
    space = torch.linalg.svd(weight[:, full], full_matrices=False)[0][:, :size]
    made = torch.zeros_like(weight)
    usable = (counts >= size).nonzero().flatten().tolist()
    for column in usable:
        rows = there[:, column]
        known = torch.linalg.lstsq(space[rows], weight[rows, column, None]).solution
        made[:, column] = (space @ known)[:, 0]
    return made, len(usable)


@dataclass(frozen=True)
class FeatureCosine(Cosine):
    """The cosine distance, plus that of each image's features, which pulls `pull` times as much.

    The features are those at the first dense layer, found from gradients (`find_features`). Their
    distance is |f' - f|^2, over all images of a row whose features the gradient tells for sure, by
    a factor that makes its slope on images of noise `pull` times as long as the cosine's: how far
    features move with pixels differs by a hundred between models. Where the gradient tells no
    features of a victim, the cosine alone is left; of no victim, that is an error.
    """

    pull: float = 3.0
    seed: int = field(default=0, kw_only=True)

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, "labels")

    def bind(self, seen: Sequence[Observation], restarts: int = 1) -> Measure:
        check_model(seen[0])
        found: list[Found | None] = []
        problem = GradveilError("features: no victim")
        for victim in seen:
            try:
                found.append(_most_told(victim, self._rng()))
            except GradveilError as error:
                found.append(None)
                problem = error
        layers = {each.layer: None for each in found if each is not None}
        if not layers:
            raise problem
        like = next(iter(seen[0].gradients.values()))
        aims = [_aim(layer, found, seen[0].size, like) for layer in layers]
        plain = super().bind(seen)
        factors = self.pull * FeatureMeasure(plain, aims).ratios(seen, self._rng())
        rows = [aim.rows(factors, restarts) for aim in aims]
        return FeatureMeasure(super().bind(seen, restarts), rows)

    def _rng(self) -> Generator:
        return Generator().manual_seed(self.seed)


def told(found: Found) -> Tensor:
    """Return 1 for each image whose features the gradient tells for sure, 0 for others."""
    return (found.spreads <= TOLD).double()


@dataclass(frozen=True, eq=False)
class FeatureAim:
    """The features to come near at a layer, and what each image's squared gap from them counts."""

    layer: nn.Linear
    target: Tensor  # (rows, images, features)
    factors: Tensor  # (rows, images)

    def rows(self, factors: Tensor, restarts: int) -> "FeatureAim":
        """Return the aim with each row's gap counted so often, and so many restarts of each."""
        counted = self.factors * factors[:, None]
        both = (part.repeat_interleave(restarts, 0) for part in (self.target, counted))
        return FeatureAim(self.layer, *both)


def _aim(layer: nn.Linear, found: Sequence[Found | None], size: int, like: Tensor) -> FeatureAim:
    """Return the aim of the victims whose features are those at this layer."""
    here = [each if each and each.layer is layer else None for each in found]
    none = torch.zeros(size, layer.in_features, dtype=torch.float64)
    target = torch.stack([none if each is None else each.features for each in here])
    factors = torch.stack([none[:, 0] if each is None else told(each) for each in here])
    return FeatureAim(layer, target.to(like), factors.to(like))


@dataclass(frozen=True, eq=False)
class FeatureMeasure(Measure):
    """The weighted squared distances of features from their aims, and another measure, if any."""

    inner: Measure | None
    aims: Sequence[FeatureAim]

    def __call__(self, found: Gradients) -> Tensor:
        return torch.zeros(()) if self.inner is None else self.inner(found)

    def from_shares(
        self, shares: Shares, images: Tensor, labels: Tensor, draws: Draws, differentiable: bool
    ) -> Tensor:
        distance = images.new_zeros(len(images))
        if self.inner is not None:
            distance = self.inner.from_shares(shares, images, labels, draws, differentiable)
        with torch.set_grad_enabled(differentiable):
            return distance + self._gaps(shares, images, labels, differentiable)

    def ratios(self, seen: Sequence[Observation], rng: Generator) -> Tensor:
        """Return how many times as long as the gaps' slope the other is, on images of noise."""
        first = seen[0]
        shape = len(seen), first.size, *first.image_shape
        like = self.aims[0].target
        images = torch.rand(shape, generator=rng).to(like).requires_grad_()
        known = [victim.knowledge.labels for victim in seen if victim.knowledge.labels is not None]
        labels = torch.stack(known).to(like.device)
        shares = Shares(first.model, first.loss, first.protocol)
        with torch.enable_grad():
            assert self.inner is not None
            distances = self.inner.from_shares(shares, images, labels, {}, True)
            both = distances.sum(), self._gaps(shares, images, labels, True).sum()
            lengths = [torch.autograd.grad(each, images)[0].flatten(1).norm(dim=1) for each in both]
        ratios: Tensor = lengths[0] / lengths[1]
        return ratios.nan_to_num(0, 0, 0)

    def _gaps(self, shares: Shares, images: Tensor, labels: Tensor, differentiable: bool) -> Tensor:
        """Return the weighted squared distances of features from their aims, of each row."""
        layers = [aim.layer for aim in self.aims]
        made = shares.inputs(images, labels, layers, differentiable=differentiable)
        found = images.new_zeros(len(images))
        for aim, features in zip(self.aims, made, strict=True):
            gaps = (features - aim.target).square().sum(2)
            found = found + (aim.factors * gaps).sum(1)
        return found


def check_model(victim: Observation, *, moves: bool = False) -> None:
    """Refuse a client whose features its dense layers do not tell, if it `moves` its weights."""
    protocol = victim.protocol
    if protocol.moves(victim.size) and not moves:
        raise GradveilError(
            f"{protocol.in_words(victim.size)}: features need the gradient of 1; "
            "choose a matching attack"
        )
    check_equal(victim.size, protocol.averaged_clients)
    with in_mode(victim.model, protocol.train_mode):
        if drawing(victim.model):
            raise GradveilError(
                "the model draws by itself, and features with it; choose an attack that looks for "
                "the draws too"
            )
