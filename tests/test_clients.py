"""The client: what is seen fits what was used, and victims do not depend on each other."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn

import toys
from gradveil import clients as rounds
from gradveil.clients import Client
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Protocol
from gradveil.defenses import Defense, PolicyDefense, parse
from gradveil.engine.gradients import cross_entropy, loop_gradients
from gradveil.models import build
from gradveil.transforms.policy import Policy
from gradveil.transforms.preparation import Preparation
from toys import CLASSES, SIZE, lenet, private

POLICY = Policy.parse("3-1-7")


def refused(client: Client, batches: list[Batch]) -> str:
    return toys.refused(client.share_batches, batches, generator(0))


@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_seen_is_the_gradient_of_the_batch_used(steps: int) -> None:
    client = Client(lenet(), CLASSES, protocol=Protocol(local_steps=steps))
    shared = client.share_batches(private(3, 2), generator(0))
    for (seen, used), given in zip(shared, private(3, 2), strict=True):
        assert torch.equal(used.images, given.images.double()) and torch.equal(
            used.labels, given.labels
        )
        assert seen.image_shape == (3, SIZE, SIZE) and seen.size == 2 and seen.classes == CLASSES
        assert (
            seen.model is client.model
            and seen.loss is cross_entropy
            and seen.protocol == client.protocol
        )
        assert seen.knowledge.labels is not None and torch.equal(seen.knowledge.labels, used.labels)
        assert not any(value.requires_grad for value in seen.gradients.values())
        if steps == 1:
            expected = loop_gradients(
                client.model, cross_entropy, used.images[None], used.labels[None]
            )
            for name, value in expected.items():
                torch.testing.assert_close(seen.gradients[name], value[0], rtol=1e-10, atol=1e-12)


def test_labels_are_told_only_where_asked() -> None:
    ((seen, _),) = Client(lenet(), CLASSES).share_batches(
        private(1), generator(0), tell_labels=False
    )
    assert seen.knowledge.labels is None


def test_no_victims_share_nothing() -> None:
    assert Client(lenet(), CLASSES).share_batches([], generator(0)) == []


def test_preparation_changes_the_batch_used_and_what_is_seen() -> None:
    plain, prepared = (
        Client(lenet(), CLASSES),
        Client(lenet(), CLASSES, defense=PolicyDefense(POLICY)),
    )
    ((seen, used),) = prepared.share_batches(private(1, 3), generator(1))
    given = private(1, 3)[0]
    assert not torch.equal(used.images, given.images.double())
    expected = Preparation(policy=POLICY)((given.images * 255).round().byte(), generator(1))
    assert torch.equal(used.images, expected.double() / 255)
    ((again, _),) = plain.share_batches([used], generator(0))
    for name, value in again.gradients.items():
        torch.testing.assert_close(seen.gradients[name], value, rtol=1e-12, atol=1e-12)


def test_preparation_that_does_nothing_gives_back_the_same_pixels() -> None:
    ((_, used),) = Client(
        lenet().float(), CLASSES, defense=PolicyDefense(Policy(), augment=False)
    ).share_batches(private(1), generator(0))
    assert torch.equal(used.images, private(1)[0].images)


def test_sharing_many_victims_is_sharing_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client(lenet(), CLASSES, defense=PolicyDefense(Policy()))
    together = client.share_batches(private(5, 2), generator(3))
    rng = generator(3)
    alone = [client.share_batches([batch], rng)[0] for batch in private(5, 2)]
    monkeypatch.setattr(rounds, "MOST_IMAGES", 4)
    chunked = client.share_batches(private(5, 2), generator(3))
    for (seen, used), *others in zip(together, alone, chunked, strict=True):
        for other, other_used in others:
            assert torch.equal(used.images, other_used.images)
            for name, value in seen.gradients.items():
                torch.testing.assert_close(other.gradients[name], value, rtol=1e-10, atol=1e-12)


def test_a_batch_larger_than_a_pass_is_still_one_victim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MOST_IMAGES", 2)
    shared = Client(lenet(), CLASSES).share_batches(private(2, 3), generator(0))
    assert [len(used) for _, used in shared] == [3, 3]


def test_a_client_leaves_the_model_in_its_mode_with_its_weights() -> None:
    model = build("convnet", channels=3, size=9, classes=CLASSES).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [Batch(torch.rand(1, 3, 9, 9, generator=generator(0)), torch.tensor([1]))]
    Client(model, CLASSES).share_batches(batches, generator(0))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def changed(change: Callable[[Tensor], Tensor]) -> list[Batch]:
    first, second = private(2)
    return [first, replace(second, images=change(second.images))]


def labeled(*labels: float | bool) -> list[Batch]:
    return [replace(private(1, len(labels))[0], labels=torch.tensor(labels))]


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        (changed(lambda x: x * 255), "victim 1: images with values from"),
        (changed(lambda x: x - 0.5), "expected [0, 1], the model normalizes"),
        (changed(lambda x: x * float("nan")), "victim 1: images with values from nan to nan"),
        (
            changed(lambda x: (x * 255).byte()),
            "victim 1: images of type torch.uint8; expected floating point in [0, 1]",
        ),
        (
            changed(lambda x: x[0]),
            "victim 1: images of shape (3, 8, 8) and labels of shape (1,); expected images (N, C",
        ),
        (
            changed(lambda x: x.expand(2, -1, -1, -1)),
            "victim 1: images of shape (2, 3, 8, 8) and labels of shape (1,)",
        ),
        (
            changed(lambda x: x[..., :7]),
            "victim 0 has images of shape (1, 3, 8, 8), victim 1 (1, 3, 8, 7)",
        ),
        (
            [*private(1), *private(1, 2)],
            "victim 0 has images of shape (1, 3, 8, 8), victim 1 (2, 3, 8, 8): share victims of",
        ),
        (labeled(3, 10), "victim 0: label 10; there are 10 classes, 0 to 9"),
        (labeled(-1), "victim 0: label -1"),
        (labeled(1.0), "victim 0: labels of type torch.float32; expected class indices"),
        (labeled(True), "victim 0: labels of type torch.bool"),
        (
            [Batch(torch.rand(1, 2, SIZE, SIZE), torch.tensor([0]))],
            "Classifier and images of shape (1, 2, 8, 8) do not fit: Runtime",
        ),
    ],
)
def test_bad_batches_are_refused(batches: list[Batch], says: str) -> None:
    assert says in refused(Client(lenet().requires_grad_(), CLASSES), batches)


def test_a_wrong_number_of_classes_is_refused() -> None:
    assert "gave shape (1, 10); expected (1, 7)" in refused(Client(lenet(), 7), labeled(0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value: float) -> None:
    model = lenet()
    with torch.no_grad():
        model.get_parameter("head.bias")[2] = value
    assert "'head.bias' has values that are not finite" in refused(
        Client(model, CLASSES), private(1)
    )


def test_a_model_without_trainable_parameters_is_refused() -> None:
    assert "nothing to share" in refused(Client(lenet().requires_grad_(False), CLASSES), private(1))


def test_a_zero_gradient_is_refused_and_the_victim_named() -> None:
    """The image times 1e6 saturates softmax where its label is already certain."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE**2, CLASSES, bias=False)).double()
    with torch.no_grad():
        model.get_parameter("1.weight").zero_()[4] = 1e6
    batches = [replace(private(1)[0], labels=torch.tensor([label])) for label in (3, 4)]
    assert refused(Client(model, CLASSES), batches).startswith(
        "victim 1: the model's gradient is zero: dead or saturated"
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_a_gradient_that_is_not_finite_is_refused_and_named(steps: int) -> None:
    client = Client(
        lenet(),
        CLASSES,
        loss=lambda logits, labels: cross_entropy(logits, labels) * 1e308 * 10,
        protocol=Protocol(steps),
    )
    with warnings.catch_warnings(action="ignore", category=GradveilWarning):
        message = refused(client, private(2))
    assert message.startswith("victim 0: the gradient of 'features.0.weight' is not finite")


def test_batch_norm_of_a_single_value_in_train_mode_is_told_in_one_line() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE**2, CLASSES), nn.BatchNorm1d(CLASSES))
    assert "more than 1 value per channel" in refused(
        Client(model, CLASSES, protocol=Protocol(train_mode=True)), private(1)
    )


def test_what_is_seen_is_the_defended_gradient_of_the_protected_model() -> None:
    client = Client(lenet(), CLASSES, defense=parse("precode:k=4,then,prune:0.9"))
    ((seen, _), (other, _)) = client.share_batches(private(2), generator(0))
    assert seen.model is other.model is not client.model and seen.classes == CLASSES
    for value in seen.gradients.values():
        assert int((value == 0).sum()) >= int(0.9 * value.numel())
    again = client.share_batches(private(1), generator(1))[0][0]
    assert again.model is seen.model, "it is made once"
    answers = seen.model(private(1)[0].images.double())
    assert seen.loss(answers, torch.tensor([0])).shape == (1,) and answers.shape == (1, CLASSES + 1)


def test_a_clean_client_shares_the_gradient_before_the_defence() -> None:
    text = "3-1-7,then,precode:k=4,then,gaussian:1"
    clean = Client(lenet(), CLASSES, defense=parse(text), clean=True).share_batches(
        private(2), generator(0), tell_defense=True
    )
    without = Client(lenet(), CLASSES, defense=parse("3-1-7,then,precode:k=4")).share_batches(
        private(2), generator(0)
    )
    for (seen, used), (other, other_used) in zip(clean, without, strict=True):
        assert torch.equal(used.images, other_used.images) and seen.knowledge.noise is None
        assert all(
            torch.equal(value, other.gradients[name]) for name, value in seen.gradients.items()
        )


def test_a_defence_is_told_only_where_asked() -> None:
    client = Client(lenet(), CLASSES, defense=parse("3-1-7,then,clip:1,then,gaussian:0.5"))
    silent, told, drawn = (
        client.share_batches(private(1), generator(0), tell_defense=defense, tell_draws=draws)[0][
            0
        ].knowledge
        for defense, draws in ((False, False), (True, False), (True, True))
    )
    assert silent.noise is None and silent.policy is None and silent.transform is None
    assert told.noise == ("gaussian", 0.5) and told.policy is not None and told.transform is None
    assert drawn.transform is not None


def test_the_noise_told_is_that_of_the_batch_also_where_labels_are_not() -> None:
    client = Client(lenet(), CLASSES, defense=parse("dp:norm=1,multiplier=1"))
    for labels in (True, False):
        ((seen, _),) = client.share_batches(
            private(1, 2), generator(0), tell_labels=labels, tell_defense=True
        )
        assert (
            seen.knowledge.noise == ("gaussian", 0.5)
            and (seen.knowledge.labels is not None) == labels
        )


@pytest.mark.parametrize("mode", [False, True])
def test_what_the_model_draws_by_itself_is_told(mode: bool) -> None:
    layers = nn.Linear(3 * SIZE**2, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)
    client = Client(
        nn.Sequential(nn.Flatten(), *layers).double(), CLASSES, protocol=Protocol(train_mode=mode)
    )
    told, silent = (
        client.share_batches(private(1), generator(0), tell_defense=defense)[0][0].knowledge
        for defense in (True, False)
    )
    assert (told.train_masks, told.random_layers) == (
        (True, ("3.weight", "3.bias")) if mode else (None, None)
    )
    assert silent.train_masks is None and silent.random_layers is None


def test_draws_that_are_told_are_those_of_the_batch_used() -> None:
    client = Client(lenet(), CLASSES, defense=parse("3-1-7+43-18-18"))
    shared = client.share_batches(private(4, 3), generator(2), tell_draws=True)
    for (seen, used), given in zip(shared, private(4, 3), strict=True):
        assert seen.knowledge.transform is not None
        assert torch.equal(seen.knowledge.transform(given.images.double()), used.images)


def test_rounds_keep_what_a_defence_keeps_and_the_earlier_ones_are_known() -> None:
    """Each of r rounds has the same gradient g, and without momentum their sum is r g."""
    plain = Client(lenet(), CLASSES).share_batches(private(2), generator(0))
    client = Client(lenet(), CLASSES, defense=parse("prune-feedback:0.8,momentum=0"))
    for (seen, _), (clean, _) in zip(
        client.share_batches(private(2), generator(0), rounds=6), plain, strict=True
    ):
        assert seen.knowledge.earlier is not None and len(seen.knowledge.earlier) == 5
        for name, gradient in clean.gradients.items():
            every = torch.stack([one[name] for one in (*seen.knowledge.earlier, seen.gradients)])
            assert all(
                int((one != 0).sum()) == one.numel() - int(0.8 * one.numel() + 1e-9)
                for one in every
            )
            often = (every.sum(0) / gradient)[gradient != 0]
            assert not bool(every[:, gradient == 0].any())
            torch.testing.assert_close(often, often.round(), rtol=1e-9, atol=1e-9)
            assert bool((often <= 6 + 1e-9).all()) and bool((often > 5.5).any())
            assert int(every.any(0).sum()) > int(every[0].count_nonzero()), (
                "what waited is shared later"
            )


@pytest.mark.parametrize("text", ["precode:k=4", "dropout:0.5", "gaussian:0.1"])
def test_each_round_draws_anew(text: str) -> None:
    ((seen, _),) = Client(lenet(), CLASSES, defense=parse(text)).share_batches(
        private(1), generator(0), rounds=3
    )
    assert seen.knowledge.earlier is not None
    every = [
        one["features.0.weight" if "precode" not in text else "inner.features.0.weight"]
        for one in (*seen.knowledge.earlier, seen.gradients)
    ]
    assert not any(torch.equal(every[one], every[other]) for one, other in ((0, 1), (0, 2), (1, 2)))


def test_dropout_drops_the_stated_share_of_features() -> None:
    """A dropped feature of a single image leaves a column of zeros in the head's gradient."""
    shared = Client(lenet(), CLASSES, defense=parse("dropout:0.2")).share_batches(
        private(40), generator(0)
    )
    dropped = torch.stack(
        [(seen.gradients["head.inner.weight"] == 0).all(0) for seen, _ in shared]
    ).double()
    assert float(dropped.mean()) == pytest.approx(0.2, abs=0.03)
    assert not torch.equal(dropped[0], dropped[1])


def test_one_round_knows_of_no_earlier_ones_and_none_is_refused() -> None:
    client = Client(lenet(), CLASSES, defense=parse("prune:0.5"))
    assert client.share_batches(private(1), generator(0))[0][0].knowledge.earlier is None
    with pytest.raises(GradveilError, match="rounds 0"):
        client.share_batches(private(1), generator(0), rounds=0)


def test_a_model_trained_under_its_defence_is_not_protected_again() -> None:
    defense = parse("precode:k=4")
    model = defense.protect_model(lenet())
    ((seen, _),) = Client(model, CLASSES, defense=defense, protected=True).share_batches(
        private(1), generator(0)
    )
    assert seen.model is model


@pytest.mark.parametrize("mode", [False, True])
def test_dropout_of_the_model_s_own_follows_the_generator(mode: bool) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * SIZE**2, CLASSES)).double()
    client = Client(model, CLASSES, protocol=Protocol(train_mode=mode))
    first, again, other = (
        client.share_batches(private(2), generator(seed))[1][0].gradients["2.weight"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and torch.equal(first, other) == (not mode)


@pytest.mark.parametrize(
    ("text", "protocol", "says"),
    [
        (
            "dp:norm=1,multiplier=1",
            Protocol(local_steps=3),
            "dp:norm=1,multiplier=1: it protects a single gradient, and the client takes 3",
        ),
        ("precode:position=nowhere", Protocol(), "'nowhere': choose from features, normalize"),
        ("soteria:0.5,layer=nowhere", Protocol(), "'nowhere': choose from head"),
    ],
)
def test_defences_that_do_not_fit_are_refused(text: str, protocol: Protocol, says: str) -> None:
    assert says in refused(
        Client(lenet(), CLASSES, protocol=protocol, defense=parse(text)), private(1)
    )


def test_a_wrong_number_of_classes_is_told_without_the_columns_of_penalties() -> None:
    assert "gave shape (1, 10); expected (1, 7)" in refused(
        Client(lenet(), 7, defense=parse("precode:k=4")), labeled(0)
    )


def test_a_defence_that_breaks_the_range_of_images_is_named() -> None:
    class Bright(Defense):
        def protect_batch(self, batch: Batch, rng: Generator) -> Batch:
            return replace(batch, images=batch.images + 1)

    assert "Bright: images with values from" in refused(
        Client(lenet(), CLASSES, defense=Bright()), private(1)
    )


def test_a_client_in_train_mode_sends_the_running_statistics_that_torch_leaves() -> None:
    model, batches = toys.conv_with_norm(), private(2, 3, dtype=torch.float64)
    before = {name: value.clone() for name, value in model.named_buffers()}
    protocol = Protocol(local_batch_size=2, train_mode=True)
    found = Client(model, CLASSES, protocol=protocol).share_batches(batches, generator(0))
    for shared, batch in zip(found, batches, strict=True):
        local = copy.deepcopy(model).train()
        optimizer = torch.optim.SGD(local.parameters(), protocol.local_lr)
        for part in (slice(0, 2), slice(2, 3)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(local(batch.images[part]), batch.labels[part]).backward()
            optimizer.step()
        sent = shared.seen.knowledge.statistics
        assert sent is not None and list(sent) == ["1.running_mean", "1.running_var"]
        for name, value in sent.items():
            torch.testing.assert_close(value, local.get_buffer(name), rtol=1e-10, atol=1e-12)
    assert all(torch.equal(before[name], value) for name, value in model.named_buffers())
    (eval_mode,) = Client(model, CLASSES).share_batches(batches[:1], generator(0))
    assert eval_mode.seen.knowledge.statistics is None
