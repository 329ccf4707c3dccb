"""Modules put into models: where they go, what they are told of, and their batched gradients."""

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks.labels import SingleLabel, last_layer
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Knowledge
from gradveil.defenses import Defense, DropoutDefense, Precode, parse
from gradveil.engine.batched import BatchedGradients
from gradveil.engine.draws import draw_shapes, drawing, given
from gradveil.engine.gradients import cross_entropy, loop_gradients
from gradveil.models.bottleneck import Bottleneck, bottlenecks, penalties
from toys import built

SHAPE = (3, 8, 8)


def victims(count: int = 3, batch: int = 2) -> tuple[Tensor, Tensor]:
    rng = generator(0, "victims")
    return torch.rand(count, batch, *SHAPE, generator=rng).double(), torch.randint(
        10, (count, batch), generator=rng
    )


@pytest.mark.parametrize(
    "text",
    [
        "precode:k=6",
        "precode:k=6,position=features.1|features",
        "precode:k=6,then,dropout:0.3",
        "dropout:0.5",
    ],
)
@pytest.mark.parametrize("name", ["lenet", "mlp", "vit"])
def test_gradients_of_the_batched_engine_equal_the_loop_s_with_given_draws(
    text: str, name: str
) -> None:
    defense = parse(text)
    model, loss = defense.protect_model(built(name), SHAPE), defense.protect_loss(cross_entropy)
    images, labels = victims()
    shapes = draw_shapes(model, images[0], list(drawing(model)))
    draws = {
        key: torch.rand(3, 2, *shape, generator=generator(1)).double().round()
        for key, shape in shapes.items()
    }
    found = BatchedGradients(model, loss, told=draws)(images, labels, draws=draws)
    for key, value in loop_gradients(model, loss, images, labels, draws=draws).items():
        torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-10)


def test_the_loss_is_the_task_s_and_the_mean_penalty() -> None:
    defense = Precode(k=4, beta=0.1, position="features.1|features")
    model, loss = defense.protect_model(built(), SHAPE), defense.protect_loss(cross_entropy)
    images, labels = victims(1, 5)
    answers = model(images[0])
    assert answers.shape == (5, 12) and penalties(model) == 2
    torch.testing.assert_close(
        loss(answers, labels[0]),
        cross_entropy(answers[:, :10], labels[0]) + answers[:, 10] + answers[:, 11],
    )


def test_chained_bottlenecks_add_their_penalties_to_one_loss() -> None:
    defense = parse(
        "precode:k=4,beta=0.1,position=features.1,then,dropout:0.1,then,precode:k=4,beta=0.2"
    )
    model, loss = defense.protect_model(built(), SHAPE), defense.protect_loss(cross_entropy)
    images, labels = victims(1, 5)
    answers = model(images[0])
    assert answers.shape == (5, 12)
    torch.testing.assert_close(
        loss(answers, labels[0]),
        cross_entropy(answers[:, :10], labels[0]) + answers[:, 10] + answers[:, 11],
    )


@pytest.mark.parametrize(
    ("position", "place"),
    [
        ("features", "inner.head.added"),
        ("features.3", "inner.features.3.added"),
        ("normalize", "inner.normalize.added"),
        ("head", "inner.head.added"),
        ("2", "inner.features.1.added"),
        ("-1", "inner.head.added"),
    ],
)
def test_a_bottleneck_goes_where_it_is_told(position: str, place: str) -> None:
    model = Precode(k=4, position=position).protect_model(built(), SHAPE)
    assert [name for name, module in model.named_modules() if isinstance(module, Bottleneck)] == [
        place
    ]
    assert model(victims()[0][0]).shape == (2, 11)


def test_a_position_before_the_head_needs_no_image_shape_and_others_say_that_they_do() -> None:
    alike = [Precode(k=4).protect_model(built(), shape).state_dict() for shape in (None, SHAPE)]
    assert alike[0].keys() == alike[1].keys() and all(
        torch.equal(value, alike[1][name]) for name, value in alike[0].items()
    )
    with pytest.raises(
        GradveilError,
        match=r"position 'features\.1': how many values a Sigmoid gives depends on the image",
    ):
        Precode(k=4, position="features.1").protect_model(built())


def test_several_modules_are_spread_over_the_layers_before_the_position() -> None:
    model = Precode(k=4, modules=3).protect_model(built("mlp"), SHAPE)
    places = [name for name, module in model.named_modules() if isinstance(module, Bottleneck)]
    assert places == ["inner.features.3.added", "inner.features.5.added", "inner.head.added"]
    weights = [one.encoder.weight for one in bottlenecks(model)]
    assert not torch.equal(weights[1], weights[2]), "each has weights of its own"
    with pytest.raises(GradveilError, match="modules 9; the model has 4 layer"):
        Precode(k=4, modules=9).protect_model(built("mlp"), SHAPE)


def test_in_a_chain_the_later_one_acts_later() -> None:
    texts = ("precode:k=4,then,dropout:0.5", "dropout:0.5,then,precode:k=4")
    for text, order in zip(
        texts, (["Bottleneck", "AlwaysDropout"], ["AlwaysDropout", "Bottleneck"]), strict=True
    ):
        for position in ("features", "features.3"):
            placed = text.replace("k=4", f"k=4,position={position}").replace(
                "0.5", f"0.5,position={position}"
            )
            model = parse(placed).protect_model(built(), SHAPE)
            used: list[str] = []
            kinds = {name: type(module).__name__ for name, module in model.named_modules()}
            for name, kind in kinds.items():
                if kind in order:
                    model.get_submodule(name).register_forward_hook(
                        lambda *_, kind=kind, used=used: used.append(kind)
                    )
            model(victims()[0][0])
            assert used == order
            assert penalties(model) == 1


def test_names_below_a_module_that_something_was_placed_at_still_work() -> None:
    first = DropoutDefense(0.5, position="features").protect_model(
        nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(192, 7), nn.Linear(7, 10)))
    )
    again = DropoutDefense(0.5, position="1").protect_model(first, SHAPE)
    twice = DropoutDefense(0.5, position="1.0").protect_model(again, SHAPE)
    assert len(drawing(twice)) == 3


def test_a_bare_layer_can_be_protected() -> None:
    model = Precode(k=2).protect_model(nn.Linear(6, 3))
    assert model(torch.rand(4, 6)).shape == (4, 4)


@pytest.mark.parametrize(
    "defense", [Precode(k=4, position="nowhere"), DropoutDefense(0.5, position="nowhere")]
)
def test_a_position_that_does_not_exist_is_told_with_those_there_are(defense: Defense) -> None:
    with pytest.raises(
        GradveilError,
        match=r"position of defense .*'nowhere': choose from features, normalize, features\.0, "
        r".*, head$",
    ):
        defense.protect_model(built(), SHAPE)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Conv2d(3, 5, 3), "has none; name a module"),
        (nn.Linear(5, 5), "do not fit: RuntimeError"),
    ],
)
def test_models_that_cannot_take_it_are_refused(model: nn.Module, says: str) -> None:
    with pytest.raises(GradveilError, match=says):
        Precode(k=2).protect_model(model, SHAPE)


def test_two_bottlenecks_at_one_position_are_refused_whatever_it_is_called() -> None:
    once = Precode(k=2, position="features.3").protect_model(built(), SHAPE)
    with pytest.raises(GradveilError, match="already"):
        Precode(k=2, position="4").protect_model(once, SHAPE)


def test_the_attacker_is_told_the_parameters_from_the_draw_on() -> None:
    model = Precode(k=2).protect_model(built())
    told = Precode(k=2).tell(Knowledge(), model).random_layers
    names = list(dict(model.named_parameters()))
    assert told == tuple(names[names.index("inner.head.added.encoder.weight") :])
    dropped = DropoutDefense(0.5, position="features.5").protect_model(built(), SHAPE)
    known = DropoutDefense(0.5, position="features.5").tell(Knowledge(), dropped)
    assert (
        known.random_layers == ("features.6.weight", "features.6.bias", "head.weight", "head.bias")
        and known.train_masks is True
    )


@pytest.mark.parametrize("text", ["precode:k=5", "precode:k=5,position=features.7", "dropout:0.2"])
def test_the_head_is_still_the_last_layer_and_tells_the_label(text: str) -> None:
    """With as many features as classes a decoder could be taken for it."""
    plain = nn.Sequential(
        nn.Flatten(),
        nn.Linear(192, 16),
        nn.Sigmoid(),
        nn.Linear(16, 10),
        nn.Sigmoid(),
        nn.Identity(),
        nn.Linear(10, 10),
    )
    client = Client(plain.double(), 10, defense=parse(text.replace("features.7", "5")))
    images, labels = victims(4, 1)
    seen = [
        one
        for one, _ in client.share_batches(
            [Batch(x, y) for x, y in zip(images, labels, strict=True)], generator(0)
        )
    ]
    head = last_layer(seen[0])
    assert (head.in_features, head.out_features) == (10, 10) and any(
        head.weight.equal(p) for p in plain[6].parameters()
    )
    assert torch.equal(SingleLabel().bind(seen, generator(0)), labels)


def test_a_given_draw_of_zero_makes_the_model_deterministic() -> None:
    model = Precode(k=3).protect_model(built())
    (name,) = drawing(model)
    with given(model, {name: torch.zeros(2, 3).double()}):
        assert torch.equal(model(victims()[0][0]), model(victims()[0][0]))
