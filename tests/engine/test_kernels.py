"""The GPU kernels against plain torch, and the batched engine on a GPU against the loop.

These tests are skipped without a GPU.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from gradveil.core.types import Protocol
from gradveil.engine.batched import ALIKE, BatchedGradients
from gradveil.engine.device import tf32
from gradveil.engine.fused import load_kernels, suits
from gradveil.engine.gradients import cross_entropy, loop_gradients
from gradveil.engine.local import LocalUpdates, loop_updates
from gradveil.engine.products import Aim, dots, total
from gradveil.models import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    with tf32(False):
        yield


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "padding"),
    [
        ((3, 3), (1, 1), (1, 1), (1, 1)),
        ((5, 3), (2, 1), (1, 2), (2, 0)),
        ((1, 1), (2, 2), (1, 1), (0, 0)),
    ],
)
def test_patches_are_those_of_unfold(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int],
) -> None:
    maps = torch.randn(4, 5, 13, 17, device="cuda")
    out = tuple(
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, d, p in zip((13, 17), kernel, stride, dilation, padding, strict=True)
    )
    found = load_kernels().patches(maps, kernel, stride, dilation, padding, out, mirrored=False)
    assert torch.equal(found, F.unfold(maps, kernel, dilation, padding, stride))


@pytest.mark.parametrize("name", ["lenet", "convnet", "resnet20-4", "vit"])
@pytest.mark.parametrize("batch", [1, 3])
def test_short_formats_on_a_gpu_are_near_the_loop(name: str, batch: int) -> None:
    model = build(name, channels=3, size=32, classes=10).cuda().eval()
    images = torch.rand(4, batch, 3, 32, 32, device="cuda", requires_grad=True)
    labels = torch.arange(4 * batch, device="cuda").view(4, batch) % 10
    target = loop_gradients(model, cross_entropy, images.detach().flip(0), labels)
    aim = Aim(dict(target), dict.fromkeys(target, 1.0))
    norm = total([dots(part, part) for part in target.values()])
    slopes = []
    engine = BatchedGradients(model, cross_entropy, short=True)
    for dot, square in (
        engine.compare(images, labels, aim, differentiable=True),
        Aim(dict(target), aim.factors).pair(
            loop_gradients(model, cross_entropy, images, labels, differentiable=True)
        ),
    ):
        distance = 1 - dot * torch.rsqrt(square * norm)
        slopes.append(
            (distance.detach(), torch.autograd.grad(distance.sum(), images)[0].flatten(1))
        )
    (fast, fast_slope), (slow, slow_slope) = slopes
    torch.testing.assert_close(fast, slow, rtol=0, atol=5e-3)
    assert float(torch.cosine_similarity(fast_slope, slow_slope, dim=1).min()) > 0.95


@pytest.mark.parametrize("name", ["lenet", "convnet", "resnet20-4"])
@pytest.mark.parametrize("train_mode", [False, True])
def test_local_steps_in_short_formats_on_a_gpu_are_near_the_loop(
    name: str, train_mode: bool
) -> None:
    model = build(name, channels=3, size=32, classes=10).cuda().train(train_mode)
    images = torch.rand(3, 4, 3, 32, 32, device="cuda", requires_grad=True)
    labels = torch.arange(12, device="cuda").view(3, 4) % 10
    protocol = Protocol(local_steps=3, local_lr=0.01, train_mode=train_mode)
    updates = LocalUpdates(model, cross_entropy, protocol, short=True)
    both = []
    for found in (
        updates(images, labels, differentiable=True),
        loop_updates(model, cross_entropy, protocol, images, labels, differentiable=True),
    ):
        flat = torch.cat([part.flatten(1) for part in found.values()], dim=1)
        mixture = torch.randn(flat.shape, generator=torch.Generator().manual_seed(1)).cuda()
        (slope,) = torch.autograd.grad((flat * mixture).sum(), images)
        both.append((flat.detach(), slope.flatten(1)))
    assert updates.why_not is None
    for fast, slow in zip(*both, strict=True):
        assert float(torch.cosine_similarity(fast, slow, dim=1).min()) > ALIKE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_mixtures_are_the_sums_they_stand_for(dtype: torch.dtype) -> None:
    g, t = torch.randn(2, 7, 33, 41, device="cuda").to(dtype).unbind()
    assert suits(g)
    dot, square = load_kernels().products([g], [t], [1.0])
    torch.testing.assert_close(
        dot, (g.double() * t.double()).flatten(1).sum(1).float(), rtol=1e-4, atol=1e-2
    )
    torch.testing.assert_close(
        square, g.double().square().flatten(1).sum(1).float(), rtol=1e-4, atol=1e-2
    )
    a, b = torch.randn(2, 7, device="cuda").unbind()
    torch.testing.assert_close(
        load_kernels().mix(g, t, a, b, 0.5),
        (a[:, None, None] * g.float() + 0.5 * b[:, None, None] * t.float()).to(dtype),
    )


@pytest.mark.parametrize("name", ["lenet", "convnet", "resnet20-4"])
def test_the_engine_on_a_gpu_equals_the_loop(name: str) -> None:
    model = build(name, channels=3, size=32, classes=10).cuda().eval()
    images = torch.rand(3, 2, 3, 32, 32, device="cuda", requires_grad=True)
    labels = torch.tensor([[1, 2], [3, 3], [5, 0]], device="cuda")
    slopes = []
    for found in (
        BatchedGradients(model, cross_entropy)(images, labels, differentiable=True),
        loop_gradients(model, cross_entropy, images, labels, differentiable=True),
    ):
        mix = {
            key: torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).cuda()
            for key, value in found.items()
        }
        slopes.append(
            (
                found,
                torch.autograd.grad(
                    torch.stack([(found[k] * mix[k]).sum() for k in found]).sum(), images
                )[0],
            )
        )
    (fast, fast_slope), (slow, slow_slope) = slopes
    for key in slow:
        torch.testing.assert_close(fast[key], slow[key], rtol=1e-3, atol=1e-4)
    assert float((fast_slope - slow_slope).norm() / slow_slope.norm()) < 1e-3
