"""The privacy and the accuracy score against plain twins, and where they could break."""

import copy
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import toys
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.data import load
from gradveil.models import build
from gradveil.scores import accuracy_score, privacy_score
from gradveil.scores.accuracy import AccuracyScorer, correlation_scores, jacobians
from gradveil.scores.privacy import PrivacyScorer
from gradveil.scores.scorer import Estimate, image_blocks, prepared
from gradveil.transforms import Policy

SHIFT = Policy.parse("3-1-7")


def plain_gradients(
    model: nn.Module, image: Tensor, label: Tensor, noise: Tensor, points: int
) -> list[list[Tensor]]:
    """Return the gradient at each point of the line by plain autograd, one at a time."""
    gradients = []
    for k in range(points + 1):
        x = (1 - k / points) * noise + k / points * image
        loss = F.cross_entropy(model(x[None]), label[None])
        found = torch.autograd.grad(loss, list(model.parameters()))
        # In double: a cosine over millions of floats would lose digits.
        gradients.append([part.flatten().double() for part in found])
    return gradients


def plain_privacy(
    model: nn.Module, image: Tensor, label: Tensor, noise: Tensor, points: int
) -> dict[str, float]:
    """Return the score by each rule."""
    gradients = plain_gradients(model, image, label, noise, points)
    tensors, whole = [], []
    for parts in gradients:
        pairs = zip(parts, gradients[-1], strict=True)
        cosines = [F.cosine_similarity(part, last, dim=0) for part, last in pairs]
        tensors.append(float(torch.stack(cosines).mean()))
        together = F.cosine_similarity(torch.cat(parts), torch.cat(gradients[-1]), dim=0)
        whole.append(float(together))
    code = float(np.trapezoid(tensors, dx=1 / points))
    return {"code": code, "paper": sum(whole[:-1]) / points}


def plain_accuracy(model: nn.Module, images: Tensor, labels: Tensor, std: Tensor) -> float:
    """Return S_acc image by image, of the first of each class, by numpy's eigenvalues."""
    seen: list[int] = []
    rows = []
    for image, label in zip(images, labels.tolist(), strict=True):
        if label in seen:
            continue
        seen.append(label)
        x = image[None].clone().requires_grad_()
        rows.append((torch.autograd.grad(model(x).sum(), x)[0] * std).flatten().double().numpy())
    values = np.linalg.eigvalsh(np.corrcoef(np.stack(rows)))
    return float(-np.sum(np.log(values + 1e-5) + 1 / (values + 1e-5)))


def untrained(name: str, size: int = 32, channels: int = 3) -> nn.Module:
    make = partial(
        build,
        name,
        channels=channels,
        size=size,
        classes=10,
        mean=(0.4,) * channels,
        std=(0.2, 0.3, 0.25)[:channels],
        seed=0,
    )
    return toys.narrow(make).eval()


def pixels(count: int, size: int = 32, channels: int = 3) -> tuple[Tensor, Tensor]:
    rng = generator(3)
    images = torch.randint(256, (count, channels, size, size), generator=rng, dtype=torch.uint8)
    return images, torch.randint(10, (count,), generator=rng)


@pytest.mark.parametrize("model", ["resnet20-4", "convnet", "mlp"])
def test_the_privacy_score_is_the_plain_loops_in_float64(model: str) -> None:
    images, labels = pixels(1, size=16)
    net = untrained(model, size=16).double()
    used = prepared(images, [SHIFT], 5, 0, True)[0].double() / 255
    noise = torch.rand(used.shape, generator=generator(5, "noise", 0)).double()
    for rule, wanted in plain_privacy(net, used[0], labels[0], noise[0], 3).items():
        scorer = PrivacyScorer(net, images, labels, rule=rule, points=3, seed=5)
        assert float(scorer.lines(used, labels, noise)) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("model", ["resnet20-4", "convnet"])
def test_on_real_images_in_float32_the_privacy_score_is_the_loops(
    model: str, data_root: Path
) -> None:
    """To 1e-5 for most images; a single one may be off by more.

    Where a unit's input is within rounding of zero, or two inputs of a maximum are equal up to
    rounding, a gradient jumps, and two ways to add up the same floats fall on two sides. In float64
    both ways agree (the test above).
    """
    count, points = 3, 2
    test = load("cifar100", "test", root=data_root)
    make = partial(
        build, model, channels=3, size=32, classes=100, mean=test.mean, std=test.std, seed=0
    )
    net = toys.narrow(make).eval()
    images, labels = test.images[200 : 200 + 5 * count : 5], test.labels[200 : 200 + 5 * count : 5]
    used = prepared(images, [SHIFT], 1, 0, True)[0].float() / 255
    noise = torch.rand(used.shape, generator=generator(1, "noise", 0))
    wanted = [plain_privacy(net, used[i], labels[i], noise[i], points) for i in range(count)]
    for rule in ("code", "paper"):
        scorer = PrivacyScorer(net, images, labels, rule=rule, points=points, seed=1)
        found = scorer.estimates([SHIFT])[0]["privacy"].values
        errors = sorted(abs(a / b[rule] - 1) for a, b in zip(found, wanted, strict=True))
        assert errors[count // 2] < 1e-5 and errors[-1] < 1e-3


def test_a_value_does_not_depend_on_the_pass_it_shares() -> None:
    images, labels = pixels(20, size=8)
    net = untrained("mlp", size=8)
    policies = [Policy.parse(text) for text in ("none", "3-1-7", "43-18-18+3", "9")]
    scorer = PrivacyScorer(net, images, labels, points=4)
    together = scorer.score(policies, 1)["privacy"]
    small = PrivacyScorer(net, images, labels, points=4)
    object.__setattr__(small, "_most", 5)
    assert torch.allclose(small.score(policies, 1)["privacy"], together, atol=1e-6)


def test_an_image_that_does_not_change_is_worth_one() -> None:
    """From the image to the image, every gradient is the target itself."""
    images, labels = pixels(3, size=8)
    scorer = PrivacyScorer(untrained("mlp", size=8), images, labels, points=4)
    x = images.float() / 255
    assert torch.allclose(scorer.lines(x, labels, x), torch.ones(3), atol=1e-5)


def test_a_gradient_of_zero_resembles_nothing() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.ReLU(), nn.Linear(4, 10))
    with torch.no_grad():
        hidden = model.get_submodule("1")
        hidden.get_parameter("weight").zero_()
        hidden.get_parameter("bias").fill_(-1.0)  # dead: only the last bias has a gradient
    images, labels = pixels(2, size=8)
    found = privacy_score(model, images, labels, Policy())
    assert found.mean == pytest.approx(0.25, abs=1e-5)


def test_modes_and_weights_of_the_model_stay() -> None:
    images, labels = pixels(20, size=32)
    net = untrained("lenet").train()
    before = copy.deepcopy(net.state_dict())
    privacy_score(net, images[:2], labels[:2], SHIFT)
    accuracy_score(net, images, labels, SHIFT, batches=2)
    assert net.training and all(
        torch.equal(before[name], value) for name, value in net.state_dict().items()
    )


@pytest.mark.parametrize("model", ["resnet20-4", "convnet"])
def test_the_accuracy_score_is_the_plain_loops_in_float64(model: str) -> None:
    images, labels = pixels(8)
    net = untrained(model).double()
    found = accuracy_score(net, images, labels, SHIFT, batches=2, seed=4)
    used = _drawn(images, labels, 2, seed=4)
    std = torch.tensor([0.2, 0.3, 0.25]).view(3, 1, 1)
    wanted = [plain_accuracy(net, x, y, std) for x, y in used]
    assert found.values == pytest.approx(wanted, rel=1e-8)
    in_float32 = accuracy_score(untrained(model), images, labels, SHIFT, batches=2, seed=4)
    assert in_float32.values == pytest.approx(wanted, rel=1e-3)


def _drawn(images: Tensor, labels: Tensor, batches: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return the chosen images as the scorer draws them, as uint8 values / 255."""
    scorer = AccuracyScorer(untrained("mlp"), images, labels, batches=batches, seed=seed)
    indices = torch.cat(scorer.chosen)
    used = prepared(images[indices], [SHIFT], seed, 0, True)[0].double() / 255
    sizes = [len(part) for part in scorer.chosen]
    return list(zip(used.split(sizes), labels[indices].split(sizes), strict=True))


def test_one_image_of_each_class_counts_and_all_where_asked() -> None:
    images, labels = pixels(40, size=8)
    net = untrained("mlp", size=8)
    chosen = AccuracyScorer(net, images, labels, batches=2).chosen
    for number, part in enumerate(chosen):
        batch = labels[number * 20 : number * 20 + 20].tolist()
        assert [int(labels[index]) for index in part] == list(dict.fromkeys(batch))
    assert [
        len(part) for part in AccuracyScorer(net, images, labels, batches=2, distinct=False).chosen
    ] == [20, 20]


@pytest.mark.parametrize("kind", ["identical", "gray", "one repeated", "black"])
def test_the_accuracy_score_is_real_and_finite_for_degenerate_images(kind: str) -> None:
    images, _ = pixels(10)
    labels = torch.arange(10)
    if kind == "identical":
        images = images[:1].expand_as(images).clone()
    if kind == "gray":
        images = torch.full_like(images, 128)
    if kind == "one repeated":
        images[5:] = images[0]
    if kind == "black":
        images = torch.zeros_like(images)
    found = accuracy_score(untrained("resnet20-4"), images, labels, Policy(), batches=1)
    assert all(math.isfinite(value) for value in found.values)


def test_uncorrelated_rows_give_the_largest_score_and_equal_ones_the_smallest() -> None:
    rows = torch.eye(8, 64)
    rows = rows - rows.mean(1, keepdim=True)
    best = float(
        correlation_scores(torch.linalg.qr(torch.randn(64, 8, generator=generator(0)))[0].T[None])
    )
    same = float(correlation_scores(rows[:1].repeat(8, 1)[None]))
    assert -8.6 < best <= -8 and same == pytest.approx(
        -(math.log(8 + 1e-5) + 1 / (8 + 1e-5) + 7 * (math.log(1e-5) + 1e5)), rel=1e-6
    )


def test_a_row_of_zeros_resembles_no_other() -> None:
    rows = torch.randn(2, 5, 40, generator=generator(0))
    rows[:, 2] = 0
    assert bool(correlation_scores(rows).isfinite().all())


def test_jacobians_are_those_of_single_images_in_normalized_space() -> None:
    images, _ = pixels(3)
    net = untrained("lenet")
    found = jacobians(net, images.float() / 255)
    for row, image in zip(found, images, strict=True):
        z = ((image.float() / 255 - 0.4) / torch.tensor([0.2, 0.3, 0.25]).view(3, 1, 1))[
            None
        ].requires_grad_()
        plain = torch.autograd.grad(net.head(net.features(z)).sum(), z)[0]  # type: ignore[operator]
        assert torch.allclose(row, plain.flatten(), rtol=1e-4, atol=1e-7)


def test_blocks_add_up_and_start_small() -> None:
    for count in range(1, 260):
        sizes = image_blocks(count)
        assert sum(sizes) == count and min(sizes) >= min(count, 5)
    assert image_blocks(100) == (10, 10, 20, 30, 30)


def test_an_estimate_knows_its_error() -> None:
    values = (1.0, 2.0, 4.0)
    found = Estimate(values)
    assert found.mean == pytest.approx(7 / 3) and found.error == pytest.approx(
        float(np.std(values, ddof=1)) / math.sqrt(3)
    )
    assert Estimate((1.0,)).error is None
    with pytest.raises(GradveilError, match="at least one"):
        Estimate(())


def test_wrong_input_is_told_in_one_line() -> None:
    images, labels = pixels(4, size=8)
    net = untrained("mlp", size=8)
    with pytest.raises(GradveilError, match=r"rule 'article'.*code"):
        privacy_score(net, images, labels, SHIFT, rule="article")
    with pytest.raises(GradveilError, match="uint8"):
        privacy_score(net, images.float(), labels, SHIFT)
    with pytest.raises(GradveilError, match="class index"):
        privacy_score(net, images, labels[:2], SHIFT)
    with pytest.raises(GradveilError, match="points 0"):
        PrivacyScorer(net, images, labels, points=0)
    with pytest.raises(GradveilError, match="at least 2 in each"):
        accuracy_score(net, images, labels, SHIFT)
