"""The client: what is seen fits what was used, victims do not depend on company, and bad input is told in one line."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil import clients
from gradveil.clients import Client
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.gradients import cross_entropy, loop_gradients
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Protocol
from gradveil.models import build
from gradveil.transforms.policy import Policy
from gradveil.transforms.preparation import Preparation

CLASSES = 10
SIZE = 8
POLICY = Policy.parse("3-1-7")


def lenet() -> nn.Module:
    return build("lenet", channels=3, size=SIZE, classes=CLASSES).double()


def private(count: int, batch: int = 1) -> list[Batch]:
    rng = generator(0, "private")
    images = torch.randint(0, 256, (count, batch, 3, SIZE, SIZE), generator=rng).float() / 255
    labels = torch.randint(CLASSES, (count, batch), generator=rng)
    return [Batch(x, y) for x, y in zip(images, labels, strict=True)]


def refused(client: Client, batches: list[Batch]) -> str:
    with pytest.raises(GradveilError) as caught:
        client.share(batches, generator(0))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_seen_is_the_gradient_of_the_batch_used(steps: int) -> None:
    client = Client(lenet(), CLASSES, protocol=Protocol(local_steps=steps))
    shared = client.share(private(3, batch=2), generator(0))
    for (seen, used), given in zip(shared, private(3, batch=2), strict=True):
        assert torch.equal(used.images, given.images.double()) and torch.equal(used.labels, given.labels)
        assert seen.image_shape == (3, SIZE, SIZE) and seen.size == 2 and seen.classes == CLASSES
        assert seen.model is client.model and seen.loss is cross_entropy and seen.protocol == client.protocol
        assert seen.knowledge.labels is not None and torch.equal(seen.knowledge.labels, used.labels)
        assert not any(value.requires_grad for value in seen.gradients.values())
        if steps == 1:
            expected = loop_gradients(client.model, cross_entropy, used.images[None], used.labels[None])
            for name, value in expected.items():
                torch.testing.assert_close(seen.gradients[name], value[0], rtol=1e-10, atol=1e-12)


def test_labels_are_told_only_where_asked() -> None:
    ((seen, _),) = Client(lenet(), CLASSES).share(private(1), generator(0), tell_labels=False)
    assert seen.knowledge.labels is None


def test_no_victims_share_nothing() -> None:
    assert Client(lenet(), CLASSES).share([], generator(0)) == []


def test_preparation_changes_the_batch_used_and_what_is_seen() -> None:
    plain, prepared = Client(lenet(), CLASSES), Client(lenet(), CLASSES, prepare=Preparation(policy=POLICY))
    ((seen, used),) = prepared.share(private(1, batch=3), generator(1))
    given = private(1, batch=3)[0]
    assert not torch.equal(used.images, given.images.double())
    expected = Preparation(policy=POLICY)((given.images * 255).round().byte(), generator(1))
    assert torch.equal(used.images, expected.double() / 255)
    ((again, _),) = plain.share([used], generator(0))
    for name, value in again.gradients.items():
        torch.testing.assert_close(seen.gradients[name], value, rtol=1e-12, atol=1e-12)


def test_preparation_that_does_nothing_gives_back_the_same_pixels() -> None:
    ((_, used),) = Client(lenet().float(), CLASSES, prepare=Preparation(padding=0, flip=False)).share(private(1), generator(0))
    assert torch.equal(used.images, private(1)[0].images)


def test_sharing_many_victims_is_sharing_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(lenet(), CLASSES, prepare=Preparation())
    together = client.share(private(5, batch=2), generator(3))
    rng = generator(3)
    alone = [client.share([batch], rng)[0] for batch in private(5, batch=2)]
    monkeypatch.setattr(clients, "MOST_IMAGES", 4)
    chunked = client.share(private(5, batch=2), generator(3))
    for (seen, used), *others in zip(together, alone, chunked, strict=True):
        for other, other_used in others:
            assert torch.equal(used.images, other_used.images)
            for name, value in seen.gradients.items():
                torch.testing.assert_close(other.gradients[name], value, rtol=1e-10, atol=1e-12)


def test_a_batch_larger_than_a_pass_is_still_one_victim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MOST_IMAGES", 2)
    shared = Client(lenet(), CLASSES).share(private(2, batch=3), generator(0))
    assert [len(used) for _, used in shared] == [3, 3]


def test_a_client_leaves_the_model_in_its_mode_with_its_weights() -> None:
    model = build("convnet", channels=3, size=9, classes=CLASSES).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [Batch(torch.rand(1, 3, 9, 9, generator=generator(0)), torch.tensor([1]))]
    Client(model, CLASSES).share(batches, generator(0))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def changed(change: Callable[[Tensor], Tensor]) -> list[Batch]:
    first, second = private(2)
    return [first, replace(second, images=change(second.images))]


def labeled(*labels: float | bool) -> list[Batch]:
    return [replace(private(1, batch=len(labels))[0], labels=torch.tensor(labels))]


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        (changed(lambda x: x * 255), "victim 1: images with values from"),
        (changed(lambda x: x - 0.5), "expected [0, 1], the model normalizes"),
        (changed(lambda x: x * float("nan")), "victim 1: images with values from nan to nan"),
        (changed(lambda x: (x * 255).byte()), "victim 1: images of type torch.uint8; expected floating point in [0, 1]"),
        (changed(lambda x: x[0]), "victim 1: images of shape (3, 8, 8) and labels of shape (1,); expected images (N, C, H, W)"),
        (changed(lambda x: x.expand(2, -1, -1, -1)), "victim 1: images of shape (2, 3, 8, 8) and labels of shape (1,)"),
        (changed(lambda x: x[..., :7]), "victim 0 has images of shape (1, 3, 8, 8), victim 1 (1, 3, 8, 7)"),
        (
            [*private(1), *private(1, batch=2)],
            "victim 0 has images of shape (1, 3, 8, 8), victim 1 (2, 3, 8, 8): share victims of one batch",
        ),
        (labeled(3, 10), "victim 0: label 10; there are 10 classes, 0 to 9"),
        (labeled(-1), "victim 0: label -1"),
        (labeled(1.0), "victim 0: labels of type torch.float32; expected class indices"),
        (labeled(True), "victim 0: labels of type torch.bool"),
        ([Batch(torch.rand(1, 2, SIZE, SIZE), torch.tensor([0]))], "Classifier and images of shape (1, 2, 8, 8) do not fit: Runtime"),
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
    assert "'head.bias' has values that are not finite" in refused(Client(model, CLASSES), private(1))


def test_a_model_without_trainable_parameters_is_refused() -> None:
    assert "nothing to share" in refused(Client(lenet().requires_grad_(False), CLASSES), private(1))


def test_a_zero_gradient_is_refused_and_the_victim_named() -> None:
    """The image times 1e6 saturates softmax where its label is already certain."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE**2, CLASSES, bias=False)).double()
    with torch.no_grad():
        model.get_parameter("1.weight").zero_()[4] = 1e6
    batches = [replace(private(1)[0], labels=torch.tensor([label])) for label in (3, 4)]
    assert refused(Client(model, CLASSES), batches).startswith("victim 1: the model's gradient is zero: dead or saturated")


@pytest.mark.parametrize("steps", [1, 2])
def test_a_gradient_that_is_not_finite_is_refused_and_named(steps: int) -> None:
    client = Client(lenet(), CLASSES, loss=lambda logits, labels: cross_entropy(logits, labels) * 1e308 * 10, protocol=Protocol(steps))
    with warnings.catch_warnings(action="ignore", category=GradveilWarning):
        message = refused(client, private(2))
    assert message.startswith("victim 0: the gradient of 'features.0.weight' is not finite")


@pytest.mark.parametrize("prepare", [lambda images, _: images.float(), lambda images, _: images[:1]])
def test_a_preparation_that_loses_images_or_type_is_refused(prepare: Callable[[Tensor, Generator], Tensor]) -> None:
    assert "prepare gave" in refused(Client(lenet(), CLASSES, prepare=prepare), private(1, batch=2))


def test_batch_norm_of_a_single_value_in_train_mode_is_told_in_one_line() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE**2, CLASSES), nn.BatchNorm1d(CLASSES))
    assert "more than 1 value per channel" in refused(Client(model, CLASSES, protocol=Protocol(train_mode=True)), private(1))
