"""Cells that are no audits: S_pri, similarity along lines and layer by layer, and correlations."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from gradveil.attacks import adam_cosine
from gradveil.clients import Client
from gradveil.core.seeds import derived, generator
from gradveil.data import Images, load
from gradveil.defenses import Defense
from gradveil.engine.device import find_device, images_at_once
from gradveil.engine.gradients import cross_entropy, in_mode
from gradveil.engine.lines import LineProducts, Products
from gradveil.models import build_for
from gradveil.models.checkpoints import load_checkpoint
from gradveil.papers.cells import QUICK_STEPS, Cell, Workspace
from gradveil.papers.costs import ITERATION, ROW, STARTING, area, attack_seconds, score_seconds
from gradveil.scores import PrivacyScorer, Scorer, psnr
from gradveil.scores.lineup import distinct, draw_victims
from gradveil.scores.privacy import AREA_RULES, POINTS
from gradveil.scores.scorer import prepared
from gradveil.search.probe import ProbeScorer, make_probe, short_attack
from gradveil.search.setup import choose_images
from gradveil.search.space import draw, policy_of
from gradveil.transforms import LIBRARY, Policy

ROWS_AT_ONCE = 512  # victims of the correlation's attack in one run
FEW = 4  # policies and images of a quick run
DIGITS = 6  # after the point, of what is written


@dataclass(frozen=True)
class Measurement(Cell):
    """A cell that loads its model and test images by itself."""

    images: int = 100
    seed: int = 0

    def model(self, workspace: Workspace, split: Images) -> nn.Module:
        """Return the trained model in eval mode, on the device."""
        made = build_for(self.training.network, split, self.training.seed)
        path = self.training.checkpoint(workspace)
        if path is not None:
            load_checkpoint(path, made)
        return made.to(find_device(workspace.device)).eval()

    def split(self, workspace: Workspace, which: str) -> Images:
        """Return the training or test images, at the size of the training."""
        size = self.training.image_size
        return load(self.data, which, root=workspace.root, image_size=size)

    def quick(self, workspace: Workspace) -> Self:
        return replace(self, training=self.training.quick(workspace), images=FEW)


def scored_numbers(test: Images, images: int) -> list[int]:
    """Return the test images that scores are measured on: every fifth from 200 on."""
    return list(choose_images(len(test), images, images, f"{test.name} {test.split}").leak)


def random_policies(count: int, seed: int) -> list[Policy]:
    """Return so many different random policies, as a search draws them; none changes nothing."""
    found: dict[str, Policy] = {}
    number = 0
    while len(found) < count:
        policy = policy_of(draw(seed, number))
        number += 1
        if policy != Policy():
            found.setdefault(str(policy), policy)
    return [*found.values()]


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, DIGITS) for value in values]


def _scores(scorer: Scorer, policies: Sequence[Policy]) -> dict[str, dict[str, list[float]]]:
    """Return the values of each image by policy and quantity."""
    found: dict[str, dict[str, list[float]]] = {}
    for first in range(0, len(policies), scorer.unit):
        some = policies[first : first + scorer.unit]
        for policy, each in zip(some, scorer.estimates(some), strict=True):
            found[str(policy)] = {name: _rounded(score.values) for name, score in each.items()}
    return found


def _privacy(
    cell: Measurement,
    workspace: Workspace,
    policies: Sequence[Policy],
    rules: Sequence[str],
    images: int,
) -> dict[str, dict[str, list[float]]]:
    """Return S_pri of each image by rule and policy."""
    test = cell.split(workspace, "test")
    numbers, model = scored_numbers(test, images), cell.model(workspace, test)
    found = {}
    for rule in rules:
        scorer = PrivacyScorer(
            model, test.images[numbers], test.labels[numbers], rule, seed=cell.seed
        )
        values = _scores(scorer, policies)
        found[rule] = {policy: each["privacy"] for policy, each in values.items()}
    return found


@dataclass(frozen=True)
class Singles(Measurement):
    """S_pri of each of the 50 transformations by itself, and of none, by both rules."""

    kind: ClassVar[str] = "singles"

    transformations: int = len(LIBRARY)
    rules: tuple[str, ...] = ("code", "paper")

    @property
    def seconds(self) -> float:
        scale = area(self.data, self.training.image_size)
        return score_seconds(self.transformations + 1, self.images, len(self.rules), scale)

    def measure(self, workspace: Workspace) -> dict[str, Any]:
        policies = [Policy(), *(Policy.parse(str(i)) for i in range(self.transformations))]
        return {"values": _privacy(self, workspace, policies, self.rules, self.images)}

    def quick(self, workspace: Workspace) -> Self:
        return replace(super().quick(workspace), transformations=FEW)


@dataclass(frozen=True)
class Lines(Measurement):
    """GradSim along the line from noise to the image, by policy: mean and std at each point."""

    kind: ClassVar[str] = "lines"

    policies: tuple[str, ...] = ("none", "3-1-7+43-18-18")
    rule: str = "code"

    @property
    def seconds(self) -> float:
        return score_seconds(len(self.policies), self.images, 1)

    def measure(self, workspace: Workspace) -> dict[str, Any]:
        test = self.split(workspace, "test")
        numbers, model = scored_numbers(test, self.images), self.model(workspace, test)
        device = next(model.parameters()).device
        images, labels = test.images[numbers].to(device), test.labels[numbers].to(device)
        policies = [Policy.parse(text) for text in self.policies]
        noise = torch.rand(images.shape, generator=generator(self.seed, "noise")).to(device)
        products = LineProducts(model, cross_entropy, fast=True)
        way = torch.linspace(0, 1, POINTS + 1, device=device).view(-1, 1, 1, 1)
        found = {}
        for policy, used in zip(
            policies, prepared(images, policies, self.seed, 0, True).float() / 255, strict=True
        ):
            lines = torch.lerp(noise[:, None], used[:, None], way)
            alike = AREA_RULES[self.rule][0](_products(model, products, lines, labels)).cpu()
            found[str(policy)] = {
                "mean": _rounded(alike.mean(0).tolist()),
                "std": _rounded(alike.std(0).tolist()),
            }
        return {"points": POINTS + 1, "lines": found}


def _products(model: nn.Module, products: LineProducts, lines: Tensor, labels: Tensor) -> Products:
    """Return the products of many lines, as many at a time as the memory holds."""
    most = max(1, images_at_once(model, lines[0], short=lines.is_cuda) // lines.shape[1])
    with in_mode(model, False):
        parts = [
            products(lines[rows], labels[rows])
            for rows in torch.arange(len(lines), device=lines.device).split(most)
        ]
    dots, squares = (
        torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("dots", "squares")
    )
    return Products(dots, squares)


@dataclass(frozen=True)
class Layers(Measurement):
    """The likeness of gradients during an attack, in two shallow and two deep layers.

    It is the cosine between the gradient of the picture at hand and the observed gradient, as mean
    and std over images, at `frames` moments of the attack.
    """

    kind: ClassVar[str] = "layers"

    defense: Defense = field(default_factory=Defense)
    steps: int = 4_800
    frames: int = 16

    @property
    def seconds(self) -> float:
        model, scale = self.training.model, area(self.data, self.training.image_size)
        found = attack_seconds("adam-cosine", self.images, model, scale, self.steps)
        return STARTING + found + self.images * self.frames * ROW + self.frames * ITERATION

    def measure(self, workspace: Workspace) -> dict[str, Any]:
        test = self.split(workspace, "test")
        model = self.model(workspace, test)
        device = next(model.parameters()).device
        allowed = distinct(test.images, test.labels)
        numbers = draw_victims(test.labels, self.images, allowed, self.seed)
        images, labels = test.images[numbers].float() / 255, test.labels[numbers]
        client = Client(model, len(test.classes), defense=self.defense)
        shared = client.share_each(images.to(device), labels.to(device), self.seed)
        attack = replace(adam_cosine, steps=self.steps, frames=self.frames)
        found = attack([each.seen for each in shared], derived(self.seed, "layers"))
        lines = []
        for each, result in zip(shared, found, strict=True):
            assert result.frames is not None
            frames = result.frames[:, 0].to(device).nan_to_num(0.5).clamp(0, 1)
            lines.append(torch.cat([frames, each.used.to(frames)]))
        products = LineProducts(model, cross_entropy)
        made = _products(model, products, torch.stack(lines), labels.to(device))
        return {"steps": list(found[0].frame_steps), "layers": _by_layer(model, made)}

    def quick(self, workspace: Workspace) -> Self:
        return replace(super().quick(workspace), steps=QUICK_STEPS, frames=2)


def _by_layer(model: nn.Module, made: Products) -> dict[str, dict[str, list[float]]]:
    """Return mean and std over images at each moment, of the first and last two weight tensors."""
    named = [name for name, value in model.named_parameters() if value.dim() > 1]
    order = [name for name, _ in model.named_parameters()]
    norms = made.squares.sqrt().clamp_min(1e-12)
    cosines = (made.dots / (norms * norms[..., -1:]))[..., :-1].float().cpu()
    found = {}
    for name in dict.fromkeys((*named[:2], *named[-3:-1])):  # the last is the head
        alike = cosines[order.index(name)]
        found[name] = {
            "mean": _rounded(alike.mean(0).tolist()),
            "std": _rounded(alike.std(0).tolist()),
            "last": _rounded(alike[:, -1].tolist()),
        }
    return found


@dataclass(frozen=True, eq=False)
class MeasuredProbe(ProbeScorer):
    """A probe that tells PSNR too."""

    names: ClassVar[tuple[str, ...]] = (*ProbeScorer.names, "psnr")

    def measure(
        self, found: Tensor, truth: Tensor, guess: Tensor, ranks: Sequence[int]
    ) -> dict[str, Tensor]:
        return super().measure(found, truth, guess, ranks) | {"psnr": psnr(found, truth)}

    @classmethod
    def of(cls, probe: ProbeScorer) -> "MeasuredProbe":
        """Return a probe with all the settings of another."""
        return cls(**{each.name: getattr(probe, each.name) for each in fields(probe)})


@dataclass(frozen=True)
class Correlated(Measurement):
    """S_pri by both rules, and what an attack recovers, of `policies` random policies.

    S_pri is over `images` test images, every fifth from 200 on. `victims` are attacked: others,
    drawn over all classes, or with `first` the first of the test split.
    """

    kind: ClassVar[str] = "correlation"

    policies: int = 100
    victims: int = 8
    first: bool = False
    steps: int = 2_500
    rules: tuple[str, ...] = ("code", "paper")

    @property
    def n(self) -> int:
        return self.victims

    @property
    def seconds(self) -> float:
        model, scale = self.training.model, area(self.data, self.training.image_size)
        runs, rest = divmod(self.policies * self.victims, ROWS_AT_ONCE)
        whole = attack_seconds("adam-cosine", ROWS_AT_ONCE, model, scale, self.steps)
        part = attack_seconds("adam-cosine", rest, model, scale, self.steps) if rest else 0
        scores = score_seconds(self.policies, self.images, len(self.rules), scale)
        return scores + runs * whole + part

    def measure(self, workspace: Workspace) -> dict[str, Any]:
        policies = random_policies(self.policies, self.seed)
        privacy = _privacy(self, workspace, policies, self.rules, self.images)
        train, test = self.split(workspace, "train"), self.split(workspace, "test")
        apart = scored_numbers(test, self.images)
        if self.first:
            victims = torch.arange(self.victims)
        else:
            allowed = distinct(test.images, test.labels)
            allowed[apart] = False
            victims = draw_victims(test.labels, self.victims, allowed, self.seed)
        probe = make_probe(
            train,
            test,
            self.model(workspace, test),
            victims,
            attack=short_attack(steps=self.steps),
            seed=derived(self.seed, "correlation"),
            victims_at_once=ROWS_AT_ONCE,
            sizes=(self.victims,),
            apart=apart,
        )
        return {"privacy": privacy, "attack": _scores(MeasuredProbe.of(probe), policies)}

    def quick(self, workspace: Workspace) -> Self:
        return replace(super().quick(workspace), policies=FEW, victims=2, steps=QUICK_STEPS)
