"""Blind guesses know the defense, and the one to beat is chosen on public images."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradveil.controls import Controls
from gradveil.core.seeds import generator
from gradveil.core.types import Batch
from gradveil.data import Images, load
from gradveil.defenses import parse
from gradveil.scores import psnr

KNOWING = {"blind: mean image, after the defense", "blind: class mean, after the defense"}


@pytest.fixture(scope="module")
def public() -> Images:
    return load("fashion-mnist-mini", "train")


def guesses(controls: Controls, labels: Tensor) -> dict[str, Tensor]:
    """What each control guesses of images with these labels."""
    rng = generator(9)
    return {
        name: blind.guess(len(labels), (1, 28, 28), labels, rng).expand(len(labels), 1, 28, 28)
        for name, blind in controls.attacks.items()
    }


def test_only_a_defense_that_changes_images_brings_guesses_that_know_it(public: Images) -> None:
    for text, knowing in (("none", False), ("prune:0.9", False), ("3-1-7", True)):
        controls = Controls.of(public, parse(text), 1, 0)
        assert (controls.attacks.keys() >= KNOWING) is knowing
        assert controls.chosen["original"] == "blind: class mean"


def test_the_guess_that_is_chosen_is_the_best_on_other_images_too(public: Images) -> None:
    test, defense = load("fashion-mnist-mini", "test"), parse("3-1-7+43-18-18")
    controls = Controls.of(public, defense, 1, 0)
    batch = Batch(test.images.float() / 255, test.labels)
    used = defense.protect_batch(batch, generator(11)).images
    for truth, images in (("used", used), ("original", batch.images)):
        levels = {
            name: float(psnr(guess, images).mean())
            for name, guess in guesses(controls, test.labels).items()
        }
        assert max(levels, key=lambda name: levels[name]) == controls.chosen[truth]
    assert controls.chosen["used"] in KNOWING


def test_a_class_mean_is_not_chosen_for_holding_the_judge_itself(public: Images) -> None:
    """With one image of each class its class mean is the image: as a guess of others it is poor."""
    firsts = [int((public.labels == label).nonzero()[0]) for label in range(10)]
    single = public.select(firsts)
    assert Controls.of(single, parse("none"), 1, 0).chosen["used"] != "blind: class mean"


def test_without_public_images_the_guess_is_gray() -> None:
    controls = Controls.of(None, parse("3-1-7"), 1, 0)
    assert set(controls.chosen.values()) == {"blind: gray"} and controls.means is None
    assert list(controls.attacks) == ["blind: noise", "blind: gray"]


def test_an_attack_that_needs_means_gets_those_of_all_public_images(public: Images) -> None:
    controls = Controls.of(public, parse("3-1-7"), 1, 0)
    assert controls.means is not None
    expected = (public.images[public.labels == 2].double() / 255).mean(0)
    torch.testing.assert_close(controls.means[2].double(), expected, atol=1e-6, rtol=0)
    fewer = replace(public, images=public.images[:7], labels=public.labels[:7])
    assert Controls.of(fewer, parse("3-1-7"), 4, 0).chosen
