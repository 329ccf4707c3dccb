"""The probe against a plain twin, image by image, and where it could break."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil.attacks import Attack, GradientMatching, find
from gradveil.attacks.base import Progress
from gradveil.attacks.distances import cosine
from gradveil.attacks.labels import Joint
from gradveil.attacks.optimizers import Adam
from gradveil.attacks.starts import Given
from gradveil.clients import Client
from gradveil.controls import Controls
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Observation, Reconstruction
from gradveil.data import Images, load
from gradveil.defenses import PolicyDefense
from gradveil.scores import over_blind, psnr, ssim
from gradveil.scores.lineup import rank
from gradveil.scores.scorer import prepared
from gradveil.search.probe import ProbeScorer, make_probe, short_attack
from gradveil.transforms import Policy
from gradveil.transforms.preparation import crop_and_flip
from toys import lenet

POLICIES = tuple(map(Policy.parse, ("none", "3-1-7", "3-1-7+43-18-18")))
FEW = GradientMatching(cosine, Adam(0.1), steps=3, frames=0)
NAMES = {"over_blind", "ssim", "lineup"}


@pytest.fixture(scope="module")
def data() -> tuple[Images, Images]:
    return load("fashion-mnist-mini", "train"), load("fashion-mnist-mini", "test")


@pytest.fixture(scope="module")
def probe(data: tuple[Images, Images]) -> ProbeScorer:
    """In float64, where rounding shows nowhere; two blocks."""
    return make_probe(*data, small(data[1]), range(200, 216), attack=FEW, seed=5, sizes=(10, 6))


def small(split: Images) -> nn.Module:
    return lenet(1, 28, mean=split.mean, std=split.std, seed=1)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_the_first_blocks_of_a_race_are_small(probe: ProbeScorer) -> None:
    assert probe.blocks == (10, 6) and replace(probe, sizes=None).blocks == (5, 5, 6)


def test_the_victims_at_once_change_no_value(probe: ProbeScorer) -> None:
    together = probe.score(POLICIES[1:], 1)
    for at_once in (1, 100):
        split = replace(probe, victims_at_once=at_once).score(POLICIES[1:], 1)
        for name in NAMES:
            close(split[name], together[name])


@pytest.mark.parametrize("augment", [True, False])
def test_the_probe_agrees_with_a_plain_twin(probe: ProbeScorer, augment: bool) -> None:
    probe = replace(probe, augment=augment)
    values = probe.score(POLICIES[1:], 1)
    for place, policy in enumerate(POLICIES[1:]):
        for image in (10, 15):
            expected = twin(probe, policy, 1, image)
            close(torch.stack([values[name][place, image - 10] for name in probe.names]), expected)


def twin(probe: ProbeScorer, policy: Policy, block: int, image: int) -> Tensor:
    """One policy and one image through the client, the attack and the scores."""
    start = sum(probe.blocks[:block])

    def changed(there: Tensor) -> Tensor:
        """What this image of the block becomes, or another one in its place."""
        whole = probe.images[start : start + probe.blocks[block]].clone()
        whole[image - start] = there
        if probe.augment:
            whole = crop_and_flip(whole, 4, True, generator(5, "crop", block))
        made = policy(whole, generator(5, "policy", str(policy), block))
        return made[image - start][None].double() / 255

    own = changed(probe.images[image])
    ((seen, used),) = Client(probe.model, 10).share_batches(
        [Batch(own, probe.labels[image][None])], generator(0)
    )
    normalize = probe.model.get_submodule("normalize")
    mean, std = normalize.get_buffer("mean"), normalize.get_buffer("std")
    z = torch.randn(1, 1, 28, 28, generator=generator(5, "start", image), dtype=torch.float64)
    (found,) = replace(FEW, start=Given(z * std + mean))([seen], generator(0))
    candidates = torch.cat([changed(there) for there in probe.candidates[image]])
    true = int(probe.true[image])
    assert torch.equal(candidates[true], own[0])
    controls = Controls.of(probe.public, PolicyDefense(policy, probe.augment), 1, 5)
    guess = controls.attacks[controls.chosen["used"]]
    label, shape = probe.labels[image][None], (1, 28, 28)
    guesses = guess.guess(1, shape, label, generator(5, "noise", image)).expand(1, *shape)
    return torch.cat(
        [
            over_blind(found.images, used.images, guesses.double()),
            ssim(found.images, used.images),
            torch.tensor([float(rank(found.images, candidates, true, generator(0)) == 1)]),
        ]
    )


def test_all_policies_share_crop_and_start_but_not_their_own_draws(probe: ProbeScorer) -> None:
    same = probe.score([Policy.parse("none"), Policy.parse("none+none")], 0)
    close(same["ssim"][0], same["ssim"][1])
    ours, theirs = (replace(probe, seed=seed).score(POLICIES[1:2], 0)["ssim"] for seed in (5, 6))
    assert not torch.equal(ours, theirs)


def test_an_attack_that_works_is_above_blind_and_a_first_step_is_not(
    data: tuple[Images, Images],
) -> None:
    working = replace(find("dlg"), steps=10, frames=0)  # type: ignore[type-var]
    model = small(data[1]).float()
    found = make_probe(*data, model, range(200, 202), attack=working).score([Policy()], 0)
    assert (
        found["over_blind"].min() > 3
        and found["ssim"].mean() > 0.5
        and found["lineup"].mean() > 0.5
    )
    still_noise = make_probe(*data, model, range(200, 202), attack=short_attack(steps=1)).score(
        [Policy()], 0
    )
    assert still_noise["over_blind"].max() < 0 and still_noise["ssim"].mean() < 0.2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_values_of_the_processor(
    data: tuple[Images, Images], probe: ProbeScorer
) -> None:
    exact = replace(probe, attack=replace(FEW, fast=False))
    there = replace(exact, model=small(data[1]).cuda(), victims_at_once=7)
    for name, value in there.score(POLICIES, 1).items():
        torch.testing.assert_close(value, exact.score(POLICIES, 1)[name], rtol=1e-4, atol=1e-4)


@dataclass(frozen=True)
class Breaks(Attack):
    """Gray for all, but every other victim fails, by its status or with values not finite."""

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        gray = torch.full((1, *seen[0].image_shape), 0.5)
        made = [
            (gray, "ok"),
            (gray, "failed: every restart diverged"),
            (gray, "ok"),
            (gray * torch.nan, "ok"),
        ]
        return [
            Reconstruction(image, None, 0.0, status)
            for image, status in (made * len(seen))[: len(seen)]
        ]


def test_a_diverged_attack_scores_as_noise_and_is_told_of(probe: ProbeScorer) -> None:
    broken = replace(probe, attack=Breaks(), augment=False)
    with pytest.warns(
        GradveilWarning, match="3 of 6 images under none gave an attack nothing to find"
    ):
        values = broken.score([Policy()], 1)
    rows = torch.arange(10, 16)
    noise = torch.stack(
        [torch.rand(1, 28, 28, generator=generator(5, "noise", row)) for row in rows.tolist()]
    ).double()
    used = probe.images[10:].double() / 255
    guess = broken._guess(Policy(), rows).double()[:, None]
    close(values["over_blind"][0, 1::2], over_blind(noise, used, guess)[1::2])
    close(values["over_blind"][0, ::2], over_blind(torch.full_like(used, 0.5), used, guess)[::2])


class Sometimes(nn.Module):
    """Its gradient is zero for dark images."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(28 * 28, 10)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        logits: Tensor = self.layer(flat) * (flat.mean(1, keepdim=True) > 0.3)
        return logits


def test_an_image_that_shares_nothing_counts_as_noise(probe: ProbeScorer) -> None:
    attack = find("closed-form")
    mixed = replace(probe, model=Sometimes(), attack=attack, augment=False)
    dark = (probe.images[:10].float() / 255).mean((1, 2, 3)) <= 0.3
    assert 0 < int(dark.sum()) < 10
    with pytest.warns(GradveilWarning, match=f"{int(dark.sum())} of 10 images"):
        values = mixed.score([Policy()], 0)
    assert bool((values["over_blind"][0][~dark] > 20).all()) and bool(
        (values["over_blind"][0][dark] < 0).all()
    )


def test_candidates_are_of_the_class_the_true_one_among_them_and_none_of_those_apart(
    data: tuple[Images, Images],
) -> None:
    train, test = data
    numbered = replace(test, images=test.images.clone())
    numbered.images[:, 0, 0, 0], numbered.images[:, 0, 0, 1] = (
        torch.arange(500) // 256,
        torch.arange(500) % 256,
    )
    apart = range(100)
    probe = make_probe(train, numbered, small(test), range(150, 160), attack=FEW, apart=apart)
    numbers = probe.candidates[:, :, 0, 0, 0].long() * 256 + probe.candidates[:, :, 0, 0, 1].long()
    assert numbers.shape == (10, 20) and not set(numbers.flatten().tolist()) & set(apart)
    for row, image in enumerate(range(150, 160)):
        assert int(numbers[row, probe.true[row]]) == image and len(numbers[row].unique()) == 20
        assert bool((test.labels[numbers[row]] == test.labels[image]).all())


def test_the_guess_knows_the_policy(probe: ProbeScorer) -> None:
    """Under a policy that moves and inverts pictures the plain class mean is a poor guess."""
    moved = Policy.parse("3-1-7")
    rows = torch.arange(10)
    used = prepared(probe.images[rows], [moved], probe.seed, 0, probe.augment)[0].float() / 255
    knowing = psnr(probe._guess(moved, rows), used).mean()
    unknowing = psnr(probe._guess(Policy(), rows), used).mean()
    assert knowing > unknowing + 1


def test_bad_input_is_refused_in_one_line(data: tuple[Images, Images], probe: ProbeScorer) -> None:
    train, test = data
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: make_probe(train, test, small(test), []), "no images to probe"),
        (lambda: make_probe(train, test, small(test), [500]), "no image 500"),
        (
            lambda: make_probe(train, test, small(test), [1], apart=range(2, 500)),
            "none is left",
        ),
        (lambda: short_attack(steps=0), "steps 0"),
        (lambda: replace(probe, labels=torch.full((16,), 10)), "label 10; there are 10 classes"),
        (lambda: replace(probe, labels=probe.labels[:3]), "labels of shape"),
        (
            lambda: replace(probe, images=probe.images[:0]),
            r"images are uint8 of shape \(0, 1, 28, 28\)",
        ),
        (lambda: replace(probe, images=probe.images.float()), "images are float32"),
        (
            lambda: replace(probe, candidates=probe.candidates[..., :20]),
            r"candidates of shape .* expected \(16, N, 1, 28, 28\) and 16",
        ),
        (lambda: replace(probe, true=probe.true[:3]), "with 3 true ones"),
        (lambda: replace(probe, victims_at_once=0), "victims at once 0"),
        (lambda: replace(probe, sizes=(10, 5)), r"blocks of \(10, 5\)"),
        (lambda: replace(probe, attack=replace(FEW, labels=Joint())), "looks for labels too"),
        (lambda: replace(probe, model=nn.Linear(3, 10)), "do not fit"),
        (
            lambda: replace(
                probe, model=nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.Threshold(1e9, 0.0))
            ),
            "gradient is zero",
        ),
    ]
    for make, message in cases:
        with pytest.raises(GradveilError, match=message) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_a_short_attack_is_a_preset_with_fewer_steps() -> None:
    standard = find("adam-cosine")
    assert isinstance(standard, GradientMatching)
    assert short_attack(steps=100) == replace(standard, steps=100, frames=0)
    assert short_attack(find("closed-form"), 100) == find("closed-form")
