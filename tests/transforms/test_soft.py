"""Policies for attackers: the exact pixels and draws of the client's policy, with slopes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.data import load
from gradveil.transforms import OPERATIONS, Policy, Preparation
from gradveil.transforms.differentiable import SLOPES, Anew, Drawn, draw

SINGLES = [f"{name}({magnitude})" for name in OPERATIONS for magnitude in (0, 4, 9)]
HYBRIDS = [
    "none",
    "none+3",
    "3-1-7+43-18-18",
    "12-5-14+20-3-40+9-9-9+none",
    "translate_x(9)-contrast(6)-shear_y(5)+rotate(9)-solarize(4)",
]


def pictures(count: int = 12, channels: int = 3) -> Tensor:
    split = load("fashion-mnist-mini", "test").images[: 3 * count]
    tinted = split.view(count, 3, 28, 28)[:, :channels]
    return (tinted // 2 + 60).contiguous()


@pytest.mark.parametrize("text", SINGLES + HYBRIDS)
@pytest.mark.parametrize("channels", [1, 3])
def test_values_and_draws_are_those_of_the_policy(text: str, channels: int) -> None:
    policy, images = Policy.parse(text), pictures(channels=channels)
    ours, theirs = generator(7), generator(7)
    expected = policy(images, theirs)
    known = draw(policy, images, ours)
    assert torch.equal(ours.get_state(), theirs.get_state())
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(known(images.to(dtype) / 255), expected.to(dtype) / 255)


@pytest.mark.parametrize("text", HYBRIDS)
@pytest.mark.parametrize(("padding", "flip"), [(4, True), (0, True), (3, False), (0, False)])
def test_crop_and_flip_are_known_too(text: str, padding: int, flip: bool) -> None:
    prepare, images = Preparation(padding, flip, Policy.parse(text)), pictures()
    ours, theirs = generator(3), generator(3)
    expected = prepare(images, theirs)
    known = draw(prepare, images, ours)
    assert torch.equal(ours.get_state(), theirs.get_state())
    assert torch.equal(known(images.float() / 255), expected.float() / 255)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_slopes_of_stand_ins_are_their_finite_differences(name: str) -> None:
    exact = pictures(2)[:, :, 8:14, 8:13]
    soft = exact.double().requires_grad_()
    signs = torch.tensor([1, -1])
    assert torch.autograd.gradcheck(
        lambda values: SLOPES[name](values, exact, OPERATIONS[name].magnitudes[6], signs), soft
    )


SMOOTH = sorted(set(OPERATIONS) - {"posterize", "equalize"})


@pytest.mark.parametrize("name", SMOOTH)
def test_a_stand_in_is_the_operation_itself_up_to_rounding(name: str) -> None:
    exact = (pictures(4) // 2 + 40).contiguous()
    signs, magnitude = torch.tensor([1, -1, 1, -1]), OPERATIONS[name].magnitudes[4]
    found = SLOPES[name](exact.double(), exact, magnitude, signs).clamp(0, 255)
    assert float((found - OPERATIONS[name].apply(exact, magnitude, signs)).abs().max()) <= 1.6


def test_equalize_has_about_the_gain_of_its_lookup() -> None:
    """With a broad histogram the mean slope is the rise of the lookup over its run."""
    exact = (torch.rand(1, 1, 64, 64, generator=generator(1)) * 100 + 50).byte()
    soft = exact.double().requires_grad_()
    (gain,) = torch.autograd.grad(SLOPES["equalize"](soft, exact, 0.0, torch.ones(1)).sum(), soft)
    inner = gain[(exact > 70) & (exact < 130)]
    assert float((inner - 2.55).abs().max()) < 0.5


def test_slopes_pass_through_a_whole_policy_and_point_the_right_way() -> None:
    images = pictures(6)
    known = draw(Preparation(4, True, Policy.parse("3-1-7+43-18-18")), images, generator(2))
    guess = torch.full(images.shape, 0.5, dtype=torch.double)
    wanted = known(images.double() / 255)
    for _ in range(60):
        guess = guess.requires_grad_()
        loss = (known(guess) - wanted).square().sum()
        (slope,) = torch.autograd.grad(loss, guess)
        guess = (guess.detach() - 0.2 * slope).clamp(0, 1)
    start = (known(torch.full_like(guess, 0.5)) - wanted).square().sum()
    assert float((known(guess) - wanted).square().sum()) < 0.1 * float(start)


def test_transforms_of_several_victims_run_as_one() -> None:
    prepare, images = (
        Preparation(2, True, Policy.parse("3-1-7+43-18-18")),
        pictures(6).float() / 255,
    )
    parts = [draw(prepare, part, generator(number)) for number, part in enumerate(images.split(2))]
    together = parts[0].beside(parts[1:])
    assert torch.equal(
        together(images),
        torch.cat([known(part) for known, part in zip(parts, images.split(2), strict=True)]),
    )
    with pytest.raises(GradveilError, match="cannot be joined"):
        parts[0].beside([replace(parts[1], policy=Policy())])


def test_drawing_anew_gives_what_the_policy_would() -> None:
    policy, images = Policy.parse("3-1-7+43-18-18"), pictures()
    rng = generator(5)
    first, second = (Anew(policy)(images.float() / 255, rng) for _ in range(2))
    assert torch.equal(first, policy(images.float() / 255, generator(5)))
    assert not torch.equal(first, second)


def test_images_other_than_the_drawn_ones_are_refused() -> None:
    known: Drawn = draw(Policy.parse("3"), pictures(4), generator(0))
    with pytest.raises(GradveilError, match=r"shape \(5, 3, 28, 28\): the draws are those of 4"):
        known(torch.rand(5, 3, 28, 28))
