"""What holds for every registered defence, and so for the next one."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from gradveil.clients import Client
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Gradients, Protocol
from gradveil.defenses import REGISTRY, Defense, parse
from gradveil.models import build

CHAIN = (
    "3-1-7,then,precode:k=4,then,dropout:0.3,then,clip:1,then,laplacian:0.1,then,prune-feedback:0.5"
)
DEFENSES = [
    *(kind.example for kind in REGISTRY.values()),
    "precode:k=4,position=features.1|features",
    "precode:k=4,then,dp:norm=1,multiplier=1",
    "dropout:0.3,then,soteria:0.5",
    CHAIN,
]
CLASSES, SIZE = 5, 8


def lenet() -> nn.Module:
    return build("lenet", channels=3, size=SIZE, classes=CLASSES).eval()


def private(count: int, batch: int = 2) -> list[Batch]:
    rng = generator(0, "private")
    images = torch.randint(0, 256, (count, batch, 3, SIZE, SIZE), generator=rng).float() / 255
    return [
        Batch(x, y)
        for x, y in zip(images, torch.randint(CLASSES, (count, batch), generator=rng), strict=True)
    ]


def shared(
    text: str, seed: int = 0, rounds: int = 1, count: int = 3
) -> list[tuple[Gradients, Tensor]]:
    found = Client(lenet(), CLASSES, defense=parse(text)).share_batches(
        private(count), generator(seed), rounds=rounds
    )
    return [(seen.gradients, used.images) for seen, used in found]


def alike(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(value, other[name], rtol=1e-4, atol=1e-6) for name, value in one.items()
    )


@pytest.mark.parametrize("text", DEFENSES)
def test_a_defence_reads_back_pickles_and_copies_as_itself(text: str) -> None:
    defense = parse(text)
    assert (
        parse(str(defense))
        == defense
        == pickle.loads(pickle.dumps(defense))
        == copy.deepcopy(defense)
    )
    assert hash(defense) == hash(parse(text))


@pytest.mark.parametrize("text", DEFENSES)
def test_the_model_given_is_left_untouched(text: str) -> None:
    model = lenet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_modules()]
    protected = parse(text).protect_model(model, (3, SIZE, SIZE))
    if protected is not model:
        with torch.no_grad():
            for parameter in protected.parameters():
                parameter.zero_()
    assert [name for name, _ in model.named_modules()] == names and not any(
        module.training for module in model.modules()
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("text", DEFENSES)
def test_a_protected_model_pickles_and_keeps_its_mode_and_type(text: str) -> None:
    model = parse(text).protect_model(lenet().double(), (3, SIZE, SIZE))
    again = pickle.loads(pickle.dumps(model))
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items()
    )
    assert all(value.dtype == torch.float64 for value in model.parameters())
    assert not model.training and not any(
        module.training for module in model.modules() if list(module.parameters(recurse=False))
    )


@pytest.mark.parametrize("text", DEFENSES)
def test_images_stay_in_range_of_their_type_and_the_batch_given_is_left_alone(text: str) -> None:
    (batch,) = private(1, 6)
    before = batch.images.clone()
    for dtype in (torch.float32, torch.float64):
        found = parse(text).protect_batch(Batch(batch.images.to(dtype), batch.labels), generator(0))
        assert (
            found.images.dtype == dtype
            and found.images.shape == before.shape
            and torch.equal(found.labels, batch.labels)
        )
        assert float(found.images.min()) >= 0 and float(found.images.max()) <= 1
    assert torch.equal(batch.images, before)


@pytest.mark.parametrize("text", DEFENSES)
def test_the_same_generator_gives_the_same_share_and_only_random_ones_differ_otherwise(
    text: str,
) -> None:
    first, again, other = shared(text), shared(text), shared(text, seed=1)
    assert all(
        torch.equal(a[name], b[name])
        for (a, _), (b, _) in zip(first, again, strict=True)
        for name in a
    )
    assert (
        any(not alike(a, b) for (a, _), (b, _) in zip(first, other, strict=True))
        == parse(text).random
    )


@pytest.mark.parametrize("text", DEFENSES)
def test_torch_s_own_generator_is_neither_used_nor_moved(text: str) -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = shared(text, rounds=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert all(
        torch.equal(a[name], b[name])
        for (a, _), (b, _) in zip(first, shared(text, rounds=2), strict=True)
        for name in a
    )


@pytest.mark.parametrize("text", DEFENSES)
def test_sharing_many_victims_is_sharing_one_after_the_other(text: str) -> None:
    client, rng = Client(lenet().double(), CLASSES, defense=parse(text)), generator(3)
    alone = [client.share_batches([batch], rng, rounds=2)[0] for batch in private(3)]
    for (seen, used), (other, other_used) in zip(
        client.share_batches(private(3), generator(3), rounds=2), alone, strict=True
    ):
        assert torch.equal(used.images, other_used.images)
        for name, value in seen.gradients.items():
            torch.testing.assert_close(other.gradients[name], value, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("text", DEFENSES)
def test_gradients_given_are_left_alone_and_answered_name_by_name(text: str) -> None:
    defense = parse(text)
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


@pytest.mark.parametrize("text", DEFENSES)
def test_knowledge_of_a_defence_names_gradients_that_are_shared(text: str) -> None:
    ((seen, used),) = Client(lenet(), CLASSES, defense=parse(text)).share_batches(
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
@pytest.mark.parametrize("text", [text for text in DEFENSES if "dp:" not in text])
def test_every_defence_but_dp_works_with_several_local_steps_in_training_mode(text: str) -> None:
    client = Client(
        lenet(), CLASSES, defense=parse(text), protocol=Protocol(local_steps=2, train_mode=True)
    )
    first, again = (client.share_batches(private(2), generator(0)) for _ in range(2))
    for (seen, _), (other, _) in zip(first, again, strict=True):
        assert all(
            torch.equal(value, other.gradients[name]) and bool(value.isfinite().all())
            for name, value in seen.gradients.items()
        )
