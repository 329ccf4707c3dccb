"""What holds for every registered defense and for a user's own, and so for the next one."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

import toys
from gradveil.attacks import find
from gradveil.audits import AuditJob, Case
from gradveil.audits.attackers import (
    PUBLIC,
    ROUNDS,
    automatic,
    check_told,
    granted,
    mildly_defended,
)
from gradveil.audits.outcomes import outcomes, ranked
from gradveil.audits.prepare import prepare
from gradveil.audits.stage import positive_model
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Gradients, Protocol
from gradveil.defenses import REGISTRY, Defense, Moment, State, chain, parse
from gradveil.models import build
from gradveil.stats import EACH, above_chance
from toys import SIZE


@dataclass(frozen=True)
class Quantized(Defense):
    """A user's own: each gradient in 2^bits levels between its extremes."""

    bits: int

    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: Generator
    ) -> tuple[Gradients, State]:
        return {name: self.rounded(value) for name, value in gradients.items()}, state

    def rounded(self, value: Tensor) -> Tensor:
        scale: Tensor = value.abs().max().clamp_min(1e-12) / 2 ** (self.bits - 1)
        levels: Tensor = (value / scale).round()
        return levels * scale


@dataclass(frozen=True)
class QuantizedWithFeedback(Quantized):
    """With state: what rounding left out is added in the next round."""

    def start(self) -> State:
        return {"rounds": 0, "left": None}

    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: Generator
    ) -> tuple[Gradients, State]:
        assert isinstance(state, dict)
        left = state["left"] or {name: torch.zeros_like(v) for name, v in gradients.items()}
        whole = {name: value + left[name] for name, value in gradients.items()}
        shared = {name: self.rounded(value) for name, value in whole.items()}
        after = {name: whole[name] - value for name, value in shared.items()}
        return shared, {"rounds": state["rounds"] + 1, "left": after}


@dataclass
class Kept:
    count: int


@dataclass(frozen=True)
class Counting(Quantized):
    """With a state that it packs itself: it rounds to one bit more in each round."""

    def start(self) -> State:
        return Kept(0)

    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: Generator
    ) -> tuple[Gradients, State]:
        assert isinstance(state, Kept)
        finer = Quantized(self.bits + state.count % 8)
        return finer.protect_gradients(gradients, moment, None, rng)[0], Kept(state.count + 1)

    def pack_state(self, state: State) -> object:
        assert isinstance(state, Kept)
        return state.count

    def unpack_state(self, packed: Any, device: torch.device) -> State:
        return Kept(packed)


@dataclass(frozen=True)
class Dimmed(Defense):
    """On the batch, with no function that tells what it drew."""

    most: float = 0.5

    @property
    def random(self) -> bool:
        return True

    def protect_batch(self, batch: Batch, rng: Generator) -> Batch:
        drawn = torch.rand(len(batch), 1, 1, 1, generator=rng).to(batch.images)
        return Batch(batch.images * (1 - self.most * drawn), batch.labels)


OWN = [Quantized(4), QuantizedWithFeedback(4), Counting(3), Dimmed(0.25)]

CHAIN = (
    "3-1-7,then,precode:k=4,then,dropout:0.3,then,clip:1,then,laplacian:0.1,then,prune-feedback:0.5"
)
TEXTS = [
    *(kind.example for kind in REGISTRY.values()),
    "precode:k=4,position=features.1|features",
    "precode:k=4,then,dp:norm=1,multiplier=1",
    "dropout:0.3,then,soteria:0.5",
    CHAIN,
]
DEFENSES: list[Defense] = [
    *map(parse, TEXTS),
    *OWN,
    chain(
        [Dimmed(), parse("3-1-7"), parse("precode:k=4"), QuantizedWithFeedback(6), parse("clip:1")]
    ),
]
CLASSES = 5


def lenet() -> nn.Module:
    return toys.lenet(classes=CLASSES).float()


def private(victims: int, images: int = 2) -> list[Batch]:
    return toys.private(victims, images, classes=CLASSES)


@cache
def shared(defense: Defense, seed: int = 0, state: int = 1) -> list[Gradients]:
    """What two victims share in two rounds, with torch's own generator seeded by `state`.

    It must be in the same state afterwards.
    """
    torch.manual_seed(state)
    before = torch.random.get_rng_state()
    client = Client(lenet(), CLASSES, defense=defense)
    found = client.share_batches(private(2), generator(seed), rounds=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    return [seen.gradients for seen, _ in found]


def alike(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(value, other[name], rtol=1e-4, atol=1e-6) for name, value in one.items()
    )


@pytest.mark.parametrize("defense", DEFENSES, ids=str)
def test_a_defense_reads_back_pickles_and_copies_as_itself(defense: Defense) -> None:
    assert (
        parse(str(defense))
        == defense
        == pickle.loads(pickle.dumps(defense))
        == copy.deepcopy(defense)
    )
    assert hash(defense) == hash(copy.deepcopy(defense))


@pytest.mark.parametrize("defense", DEFENSES, ids=str)
def test_the_model_given_is_left_untouched(defense: Defense) -> None:
    model = lenet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_modules()]
    protected = defense.protect_model(model, (3, SIZE, SIZE))
    if protected is not model:
        with torch.no_grad():
            for parameter in protected.parameters():
                parameter.zero_()
    assert [name for name, _ in model.named_modules()] == names and not any(
        module.training for module in model.modules()
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("defense", DEFENSES, ids=str)
def test_a_protected_model_pickles_and_keeps_its_mode_and_type(defense: Defense) -> None:
    model = defense.protect_model(lenet().double(), (3, SIZE, SIZE))
    again = pickle.loads(pickle.dumps(model))
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items()
    )
    assert all(value.dtype == torch.float64 for value in model.parameters())
    assert not model.training and not any(
        module.training for module in model.modules() if list(module.parameters(recurse=False))
    )


@pytest.mark.parametrize("defense", DEFENSES, ids=str)
def test_images_stay_in_range_of_their_type_and_the_batch_given_is_left_alone(
    defense: Defense,
) -> None:
    (batch,) = private(1, 6)
    before = batch.images.clone()
    for dtype in (torch.float32, torch.float64):
        found = defense.protect_batch(Batch(batch.images.to(dtype), batch.labels), generator(0))
        assert (
            found.images.dtype == dtype
            and found.images.shape == before.shape
            and torch.equal(found.labels, batch.labels)
        )
        assert float(found.images.min()) >= 0 and float(found.images.max()) <= 1
    assert torch.equal(batch.images, before)


@pytest.mark.parametrize("defense", DEFENSES, ids=str)
def test_another_generator_gives_another_share_of_random_ones_alone(defense: Defense) -> None:
    pairs = zip(shared(defense), shared(defense, seed=1), strict=True)
    assert any(not alike(one, other) for one, other in pairs) == defense.random


@pytest.mark.parametrize("defense", DEFENSES, ids=str)
def test_the_same_generator_gives_the_same_share_and_torch_s_own_is_neither_used_nor_moved(
    defense: Defense,
) -> None:
    for one, other in zip(shared(defense), shared(defense, state=2), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("defense", DEFENSES, ids=str)
def test_sharing_many_victims_is_sharing_one_after_the_other(defense: Defense) -> None:
    client, rng = Client(lenet().double(), CLASSES, defense=defense), generator(3)
    alone = [client.share_batches([batch], rng, rounds=2)[0] for batch in private(3)]
    for (seen, used), (other, other_used) in zip(
        client.share_batches(private(3), generator(3), rounds=2), alone, strict=True
    ):
        assert torch.equal(used.images, other_used.images)
        for name, value in seen.gradients.items():
            torch.testing.assert_close(other.gradients[name], value, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("defense", DEFENSES, ids=str)
def test_gradients_given_are_left_alone_and_answered_name_by_name(defense: Defense) -> None:
    client = Client(lenet(), CLASSES, defense=defense.without_gradients())
    ((seen, used),) = client.share_batches(private(1), generator(0))
    before = {name: value.clone() for name, value in seen.gradients.items()}
    ((again, _),) = Client(seen.model, CLASSES, defense=defense, protected=True).share_batches(
        [used], generator(0)
    )
    assert {name: value.shape for name, value in again.gradients.items()} == {
        name: value.shape for name, value in before.items()
    }
    assert all(torch.equal(value, before[name]) for name, value in seen.gradients.items())


@pytest.mark.parametrize("defense", DEFENSES, ids=str)
def test_knowledge_of_a_defense_names_gradients_that_are_shared(defense: Defense) -> None:
    ((seen, used),) = Client(lenet(), CLASSES, defense=defense).share_batches(
        private(1), generator(0), tell_defense=True
    )
    for names in (seen.knowledge.random_layers, seen.knowledge.defended_layers):
        assert names is None or (names and set(names) <= seen.gradients.keys())
    if seen.knowledge.policy is not None:
        assert seen.knowledge.policy(used.images, generator(0)).shape == used.images.shape


def test_the_identity_changes_nothing() -> None:
    model = lenet()
    plain = Client(model, CLASSES).share_batches(private(2), generator(0))
    for defense in (
        Defense(),
        parse("none"),
        parse("prune:0"),
        parse("clip:1e9"),
        parse("gaussian:0"),
        parse("soteria:0"),
    ):
        for (seen, used), (other, other_used) in zip(
            plain,
            Client(model, CLASSES, defense=defense).share_batches(private(2), generator(9)),
            strict=True,
        ):
            assert torch.equal(used.images, other_used.images) and other.model is model
            assert all(
                torch.equal(value, other.gradients[name]) for name, value in seen.gradients.items()
            )


@pytest.mark.filterwarnings("ignore::gradveil.core.errors.GradveilWarning")
@pytest.mark.parametrize("defense", [one for one in DEFENSES if "dp:" not in str(one)], ids=str)
def test_every_defense_but_dp_works_with_several_local_steps_in_training_mode(
    defense: Defense,
) -> None:
    client = Client(
        lenet(), CLASSES, defense=defense, protocol=Protocol(local_steps=2, train_mode=True)
    )
    first, again = (client.share_batches(private(2), generator(0)) for _ in range(2))
    for (seen, _), (other, _) in zip(first, again, strict=True):
        assert all(
            torch.equal(value, other.gradients[name]) and bool(value.isfinite().all())
            for name, value in seen.gradients.items()
        )


UNDONE = [
    (kind, breaker)
    for kind in REGISTRY.values()
    for breaker in kind.breakers
    if {*find(breaker).needs} - {*PUBLIC}
]
"""The breakers that need a defense to undo, with each defense that declares them."""


@pytest.mark.parametrize(("kind", "breaker"), UNDONE)
def test_every_breaker_has_a_positive_control_where_it_is_told_what_it_needs(
    kind: type[Defense], breaker: str
) -> None:
    mild = kind.mild()
    assert mild is not None and {*mild.parts()[0].breakers} >= {breaker}
    attack = find(breaker)
    found = mildly_defended(attack, chain([parse(kind.example)]), toys.mlp(), train_mode=False)
    assert found == mild
    model = build(positive_model(attack), channels=1, size=28, classes=10)
    client = Client(model, classes=10, defense=mild)
    batch = Batch(torch.rand(1, 1, 28, 28, generator=generator(0)), torch.tensor([3]))
    ((seen, _),) = client.share_batches(
        [batch], [generator(1)], tell_defense=True, tell_draws=True, rounds=ROUNDS
    )
    check_told(breaker, attack, [granted(seen, attack, None)])


CONTROLLED = [
    pytest.param(kind, breaker, marks=() if quick else pytest.mark.slow)
    for kind, breaker in UNDONE
    for quick in [(kind.name, breaker) in (("prune", "masked"), ("precode", "joint-noise"))]
]


@pytest.mark.parametrize(("kind", "breaker"), CONTROLLED)
def test_the_positive_control_of_every_breaker_clears_chance_by_rank_1(
    kind: type[Defense], breaker: str, tmp_path: Path
) -> None:
    job = AuditJob(
        positive_model(find(breaker)),
        "fashion-mnist-mini",
        {breaker: find(breaker)},
        cases=(Case(parse(kind.example)),),
        images=4,
        steps=300,
        sham=False,
    )
    (stage,) = prepare(job, tmp_path / "run", None, torch.device("cpu")).positives
    assert stage.client.defense == kind.mild()
    victims = stage.lined_up(stage.share(stage.chunks[0]))
    found = stage.attacks[breaker](stage.seen_by(stage.attacks[breaker], victims), generator(0))
    made = ranked(outcomes(victims, found), generator(1))
    first = sum(rank == 1 for each in made for rank in each.ranks["used"])
    assert stage.victims.lineups is not None
    assert above_chance(first, len(made), 1 / stage.victims.lineups.size) < EACH


@pytest.mark.parametrize("name", REGISTRY)
def test_every_registered_defense_describes_itself(name: str) -> None:
    kind = REGISTRY[name]
    assert type(parse(kind.example)) is kind and kind.name == name
    assert kind.line and (kind.paper or kind is Defense)
    assert kind.acts_on != "nothing" or kind is Defense


@pytest.mark.parametrize("defense", DEFENSES, ids=str)
def test_auto_names_attacks_that_exist_and_starts_with_the_standard_one(defense: Defense) -> None:
    names = automatic(defense)
    assert names[0] == "adam-cosine" and len(names) == len(set(names))
    for name in names:
        find(name)
    assert {name for part in defense.parts() for name in part.breakers} <= set(names)


@pytest.mark.parametrize("defense", DEFENSES, ids=str)
def test_what_is_kept_between_rounds_survives_a_checkpoint(
    defense: Defense, tmp_path: Path
) -> None:
    """Three rounds are the same with the state saved and read back after each of them."""
    client = Client(lenet(), CLASSES, defense=defense.without_gradients())
    ((seen, used),) = client.share_batches(private(1), generator(0))
    moment = Moment(seen.model, used, seen.loss)

    def play(through: bool) -> list[Gradients]:
        state, found = defense.start(), []
        for number in range(3):
            shared, state = defense.protect_gradients(
                seen.gradients, moment, state, generator(number)
            )
            found.append(shared)
            if through:
                torch.save(defense.pack_state(state), tmp_path / "state")
                packed = torch.load(tmp_path / "state", weights_only=True)
                state = defense.unpack_state(packed, torch.device("cpu"))
        return found

    torch.manual_seed(0)
    plain = play(False)
    torch.manual_seed(0)
    for expected, found in zip(plain, play(True), strict=True):
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.parametrize(
    "text",
    [
        f"{__name__}:Quantized(4)",
        f"{__name__}:Quantized(bits=4)",
        f"{__name__}:Dimmed",
        f"{__name__}:Dimmed()",
        f"3-1-7,then,{__name__}:Quantized(4),then,prune:0.5",
    ],
)
def test_a_user_s_own_class_is_read_and_written_back(text: str) -> None:
    defense = parse(text)
    assert parse(str(defense)) == defense
    spelled = text.replace("(4)", "(bits=4)").replace("()", "")
    assert str(defense) == spelled


def test_what_a_user_s_own_class_changes_is_seen_in_its_methods() -> None:
    assert [one.acts_on for one in OWN] == ["gradients", "gradients", "gradients", "batch"]
    methods = {"protect_batch": Dimmed.protect_batch, "protect_model": Defense.protect_model}
    with pytest.raises(GradveilError, match="class Both changes model and batch: say which in"):
        type("Both", (Defense,), methods)
    assert vars(type("Both", (Defense,), {**methods, "acts_on": "batch"}))["acts_on"] == "batch"


def each(gradients: Gradients, change: Callable[[Tensor], Any]) -> tuple[dict[str, Any], None]:
    return {name: change(value) for name, value in gradients.items()}, None


FIRST = "features.0.weight"
FORM = "shape (12, 3, 5, 5) and type float32"
WRONG: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "names": (
        "protect_gradients",
        lambda gradients: ({FIRST: gradients[FIRST]}, None),
        "gave no gradient of 'features.0.bias', 'features.2.weight', 'features.2.bias' and 6 more",
    ),
    "more": (
        "protect_gradients",
        lambda gradients: ({**gradients, "x": gradients[FIRST]}, None),
        "gave a gradient of 'x'; expected the names it was given, no others",
    ),
    "shapes": (
        "protect_gradients",
        lambda gradients: each(gradients, lambda value: value[None]),
        f"gave a gradient of {FIRST!r} of shape (1, 12, 3, 5, 5) and type float32; expected {FORM}",
    ),
    "types": (
        "protect_gradients",
        lambda gradients: each(gradients, Tensor.double),
        f"of shape (12, 3, 5, 5) and type float64; expected {FORM}",
    ),
    "numbers": (
        "protect_gradients",
        lambda gradients: each(gradients, lambda value: value / 0),
        f"gave a gradient of {FIRST!r} that is not finite; expected numbers",
    ),
    "no tensors": (
        "protect_gradients",
        lambda gradients: each(gradients, Tensor.numpy),
        f"gave a gradient of {FIRST!r} of a NumPy array; expected {FORM}",
    ),
    "no state": (
        "protect_gradients",
        lambda gradients: gradients,
        "gave a dict; expected a dict of gradients and what is kept for the next round",
    ),
    "nothing": ("protect_gradients", lambda _: None, "gave None; expected a dict"),
    "raises": (
        "protect_gradients",
        lambda gradients: gradients["absent"],
        "protect_gradients failed: KeyError: 'absent'",
    ),
    "batch": ("protect_batch", lambda batch: batch.images, "gave a Tensor; expected a Batch"),
    "images": (
        "protect_batch",
        lambda batch: Batch(batch.images[:1], batch.labels[:1]),
        "gave images of shape (1, 3, 8, 8) and type float32; expected shape (2, 3, 8, 8)",
    ),
    "labels": (
        "protect_batch",
        lambda batch: Batch(batch.images, batch.labels[:1]),
        "gave labels of shape (1,) and type int64; expected shape (2,) and type int64",
    ),
    "module": ("protect_model", str, "gave a text; expected a torch.nn.Module"),
}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("which", WRONG)
def test_a_mistake_in_a_user_s_own_class_is_one_line_that_names_it(which: str, alone: bool) -> None:
    method, answer, says = WRONG[which]

    def mistaken(*given: Any) -> object:
        return answer(given[1])  # after self

    made: Any = type("Mistaken", (Defense,), {method: mistaken})
    defense = made() if alone else chain([made(), Quantized(4)])
    client = Client(lenet(), CLASSES, defense=defense)
    said = toys.refused(client.share_batches, private(1), generator(0))
    assert ":Mistaken" in said and says in said
