"""The contract of an attack, run over every preset and every blind guess.

A new preset is tested by existing. Each runs two steps on a model that it does not refuse.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gradveil import attacks
from gradveil.attacks import Attack, GradientMatching, find, names
from gradveil.attacks.blind import find_means, make_blind_attacks
from gradveil.attacks.lbfgs import LBFGS
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Knowledge, Observation, Protocol, Reconstruction
from gradveil.data import load
from gradveil.engine.draws import Draw
from gradveil.models import build

CLASSES, SIZE, COUNT, STEPS, SEED = 10, 8, 2, 2, 5


def shortened(attack: Attack) -> Attack:
    """The attack with few steps and restarts, if it has such settings."""
    assert is_dataclass(attack)
    if isinstance(attack, GradientMatching) and isinstance(attack.optimizer, LBFGS):
        attack = replace(attack, optimizer=replace(attack.optimizer, inner=3))
    there = {setting.name for setting in fields(attack)} & {"steps", "restarts"}
    fewer: dict[str, Any] = {name: min(STEPS, getattr(attack, name)) for name in there}
    return replace(attack, **fewer)


def pictures(first: int = 0, count: int = COUNT) -> Batch:
    """Pictures of different classes."""
    split = load("fashion-mnist-mini", "test")
    chosen = torch.stack([(split.labels == label).nonzero()[0, 0] for label in range(CLASSES)])
    chosen = chosen[first : first + count]
    small = F.interpolate(split.images[chosen].float() / 255, size=(SIZE, SIZE), mode="area")
    return Batch((small.double() * 255).round() / 255, split.labels[chosen])


class Blurred(nn.Module):
    """Add noise to its input, as PRECODE does."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = Draw()

    def forward(self, logits: Tensor) -> Tensor:
        blurred: Tensor = logits + self.draw(logits)
        return blurred


def made(name: str) -> nn.Module:
    return build(name, channels=1, size=SIZE, classes=CLASSES, mean=(0.2,), std=(0.4,)).double()


CLIENTS: dict[str, Callable[[], Client]] = {
    "lenet": lambda: Client(made("lenet"), CLASSES),
    "mlp": lambda: Client(made("mlp"), CLASSES),
    "a model that draws": lambda: Client(
        nn.Sequential(made("lenet"), Blurred(), nn.Dropout(0.2)),
        CLASSES,
        protocol=Protocol(train_mode=True),
    ),
    "a model that keeps statistics": lambda: Client(
        nn.Sequential(nn.BatchNorm2d(1), made("lenet")).double(),
        CLASSES,
        protocol=Protocol(train_mode=True),
    ),
}
"""The models on which an attack is tried, until one suits it."""


def flip(images: Tensor) -> Tensor:
    return images.flip(-1)


def roll(images: Tensor, rng: Generator) -> Tensor:
    return images.roll(int(torch.randint(3, (), generator=rng)), -1)


def everything(victim: Observation) -> Observation:
    """The observation of an attacker who knows all that an attack may need."""
    knowledge = Knowledge(
        labels=victim.knowledge.labels,
        transform=flip,
        policy=roll,
        means=torch.full((CLASSES, 1, SIZE, SIZE), 0.5),
        random_layers=("*head*",),
        defended_layers=("*head.weight",),
        pruned=True,
        noise=("gaussian", 0.1),
        train_masks=True,
        earlier=(victim.gradients,),
        momentum=0.0,
        statistics=victim.knowledge.statistics,
    )
    return replace(victim, knowledge=knowledge)


def observe(client: Client, batch: Batch, size: int = 1) -> list[Observation]:
    """Every `size` images are a victim."""
    pieces = zip(batch.images.split(size), batch.labels.split(size), strict=True)
    shared = client.share_batches([Batch(*piece) for piece in pieces], generator(0))
    return [everything(one.seen) for one in shared]


def blind_attacks() -> dict[str, Attack]:
    public = pictures(count=CLASSES)
    return {**make_blind_attacks(find_means(public.images, public.labels, CLASSES))}


PRESETS = {name: shortened(find(name)) for name in names()}
ATTACKS: dict[str, Attack] = {**PRESETS, **blind_attacks()}
every_attack = pytest.mark.parametrize("name", ATTACKS)


def heats(attack: Attack) -> int:
    """The iterations that the heats of a race add, counted as progress counts them."""
    if not isinstance(attack, GradientMatching):
        return 0
    return attack.race.work(attack.restarts, attack.steps) // attack.restarts


def attacked(
    name: str, seen: list[Observation], seed: int | Generator = SEED
) -> list[Reconstruction]:
    """What the attack finds; it must not iterate longer than it was asked to."""

    def count(done: int, total: int) -> None:
        assert done <= total <= max(STEPS, len(seen), heats(ATTACKS[name])), (
            f"{name} takes {total} iterations: let its field `steps` say how many"
        )

    return ATTACKS[name](seen, seed, count)


@cache
def suited(name: str) -> Client:
    """A client of the first model that the attack does not refuse."""
    refused = []
    for make in CLIENTS.values():
        torch.manual_seed(0)
        client = make()
        try:
            attacked(name, observe(client, pictures(count=1)))
        except GradveilError as error:
            refused.append(str(error))
        else:
            return client
    raise AssertionError(f"{name} refuses every model: {refused}")


@cache
def victims(name: str) -> list[Observation]:
    """What the attack sees of the first pictures."""
    return observe(suited(name), pictures())


@cache
def baseline(name: str) -> list[Reconstruction]:
    """What the attack finds of the first pictures."""
    return attacked(name, victims(name))


def same(first: list[Reconstruction], second: list[Reconstruction]) -> bool:
    return all(
        torch.equal(one.images, other.images)
        and one.distance == other.distance
        and one.status == other.status
        for one, other in zip(first, second, strict=True)
    )


@every_attack
def test_each_victim_gets_images_in_range_in_the_order_of_the_victims(name: str) -> None:
    found = baseline(name)
    assert [one.status for one in found] == ["ok"] * COUNT
    assert [None if one.labels is None else one.labels.tolist() for one in found] == [
        [label] for label in pictures().labels.tolist()
    ]
    for one in found:
        assert one.images.shape == (1, 1, SIZE, SIZE) and one.images.device.type == "cpu"
        assert 0 <= float(one.images.min()) <= float(one.images.max()) <= 1
        assert one.aims_at in ("used", "original") and one.distance > -1e-9


@dataclass(frozen=True)
class Again:
    """A second run of an attack on the same victims, and what it did to what was handed in."""

    found: list[Reconstruction]
    calls: list[tuple[int, int]]  # of progress
    changed: list[str]


@cache
def again(name: str) -> Again:
    seen, calls = victims(name), list[tuple[int, int]]()
    model = seen[0].model
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = [{key: value.clone() for key, value in one.gradients.items()} for one in seen]
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    rng = generator(SEED, "attack")
    found = ATTACKS[name](seen, rng, lambda done, total: calls.append((done, total)))
    kept = {
        "torch's generator": torch.equal(torch.get_rng_state(), state),
        "modes": [module.training for module in model.modules()] == modes,
        "weights": all(
            torch.equal(value, weights[key]) for key, value in model.state_dict().items()
        ),
        "slopes": all(parameter.grad is None for parameter in model.parameters()),
        "gradients": all(
            torch.equal(value, before[key])
            for one, before in zip(seen, gradients, strict=True)
            for key, value in one.gradients.items()
        ),
    }
    return Again(found, calls, [what for what, same in kept.items() if not same])


@every_attack
def test_the_same_seed_finds_the_same_and_an_int_stands_for_a_generator(name: str) -> None:
    assert same(baseline(name), again(name).found)


@every_attack
def test_one_observation_gives_what_a_list_of_one_does(name: str) -> None:
    seen = victims(name)[0]
    assert same([ATTACKS[name](seen, seed=SEED)], attacked(name, [seen]))
    assert ATTACKS[name]([], seed=SEED) == []


@every_attack
def test_a_victim_does_not_depend_on_those_beside_it(name: str) -> None:
    (other,) = observe(suited(name), pictures(first=4, count=1))
    found, _ = attacked(name, [victims(name)[0], other])
    torch.testing.assert_close(found.images, baseline(name)[0].images)
    assert found.distance == pytest.approx(baseline(name)[0].distance)


@every_attack
def test_nothing_that_was_handed_in_is_changed(name: str) -> None:
    assert again(name).changed == []


@every_attack
def test_progress_is_told_until_all_is_done(name: str) -> None:
    calls = again(name).calls
    total = calls[0][1]
    assert calls == [(done, total) for done in range(1, total + 1)]


@every_attack
def test_a_batch_is_attacked_whole_or_refused_in_one_line(name: str) -> None:
    seen = observe(suited(name), pictures(count=2), size=2)
    try:
        (found,) = attacked(name, seen)
    except GradveilError as error:
        assert "batch of 2" in str(error) and "\n" not in str(error)
    else:
        assert found.images.shape == (2, 1, SIZE, SIZE)


@pytest.mark.parametrize(
    ("name", "need"), [(name, need) for name in ATTACKS for need in ATTACKS[name].needs]
)
def test_missing_knowledge_is_one_line_that_names_it(name: str, need: str) -> None:
    unknown: dict[str, Any] = {need: None}
    seen = [
        replace(victim, knowledge=replace(victim.knowledge, **unknown)) for victim in victims(name)
    ]
    with pytest.raises(GradveilError, match=f"needs to know the {need}") as caught:
        attacked(name, seen)
    assert "\n" not in str(caught.value)


@every_attack
def test_no_knowledge_but_the_declared_is_used(name: str) -> None:
    needs = {"labels", *ATTACKS[name].needs}
    bare = [
        replace(victim, knowledge=Knowledge(**{n: getattr(victim.knowledge, n) for n in needs}))
        for victim in victims(name)
    ]
    assert same(baseline(name), attacked(name, bare))


@pytest.mark.parametrize("name", PRESETS)
def test_the_repr_of_a_preset_evaluates_to_its_settings(name: str) -> None:
    spoken: dict[str, Any] = {}
    for module in pkgutil.iter_modules(attacks.__path__, "gradveil.attacks."):
        spoken |= vars(importlib.import_module(module.name))
    whole = find(name)
    assert eval(repr(whole), spoken) == whole
    with pytest.raises((FrozenInstanceError, AttributeError)):
        whole.anything = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (nn.Linear(1, 1), "got a value of type Linear"),
        ("dlg", "got a value of type str"),
        (None, "got a value of type NoneType"),
        ([torch.zeros(1)], "got a value of type Tensor"),
    ],
)
def test_anything_but_observations_is_refused_in_one_line(seen: Any, says: str) -> None:
    with pytest.raises(GradveilError, match=says) as caught:
        attacks.dlg(seen, seed=0)
    assert "expected an Observation" in str(caught.value) and "\n" not in str(caught.value)


def test_what_a_client_shares_is_refused_with_a_hint_at_what_is_seen() -> None:
    shared = CLIENTS["lenet"]().share(pictures(count=1).images, pictures(count=1).labels, seed=0)
    unseen: Any = shared
    with pytest.raises(GradveilError, match=r"type Batch: .* `\.seen` of what a client shares"):
        attacks.dlg(unseen, seed=0)
    with pytest.raises(GradveilError, match=r"type Shared: .* `\.seen`"):
        attacks.dlg([unseen], seed=0)
    found = replace(attacks.dlg, steps=1)(shared.seen, seed=1)
    assert found.images.shape == (1, 1, SIZE, SIZE)


@pytest.mark.parametrize("seed", [1.5, "1", None, True])
def test_a_seed_is_an_int_or_a_generator(seed: Any) -> None:
    seen = observe(CLIENTS["lenet"](), pictures(count=1))
    with pytest.raises(
        GradveilError, match=r"^seed: .*; expected a whole number or a torch.Generator$"
    ):
        attacks.dlg(seen, seed)


def test_victims_of_two_models_are_not_attacked_together() -> None:
    first, second = (observe(CLIENTS["lenet"](), pictures(count=1)) for _ in range(2))
    with pytest.raises(GradveilError, match="one model"):
        attacks.dlg(first + second, 0)
