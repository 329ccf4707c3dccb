"""Streams of random numbers: a function of seed and path, and of nothing else."""

import itertools

import pytest
import torch

from gradveil.core.seeds import derived, generator, signs

PATHS: list[tuple[int | str, ...]] = [
    (),
    ("train",),
    ("train", 0),
    ("train", 1),
    ("train", "1"),
    ("train1",),
    (1, "train"),
    ("test", 0),
]


def test_every_seed_and_path_has_a_stream_of_its_own() -> None:
    drawn = [
        tuple(torch.rand(4, generator=generator(seed, *path)).tolist())
        for seed, path in itertools.product((0, 1), PATHS)
    ]
    assert len(set(drawn)) == len(drawn)


def test_a_stream_does_not_depend_on_what_was_drawn_before() -> None:
    first = torch.rand(5, generator=generator(3, "a"))
    torch.rand(7)
    torch.rand(7, generator=generator(3, "b"))
    assert torch.equal(first, torch.rand(5, generator=generator(3, "a")))


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    torch.rand(5, generator=generator(3, "a"))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63, 10**30])
def test_a_derived_seed_fits_a_generator(seed: int) -> None:
    assert 0 <= derived(seed, "x") < 2**63
    generator(seed, "x")


def test_a_derived_seed_is_the_same_on_every_machine() -> None:
    assert (
        derived(7, "train", 3) == 3_148_392_589_650_361_772
    )  # the first 63 bits of sha256("(7, 'train', 3)")


def test_signs_are_one_or_minus_one_in_equal_shares() -> None:
    drawn = signs(10_000, generator(0, "signs"))
    assert set(drawn.tolist()) == {-1, 1}
    assert abs(float(drawn.float().mean())) < 0.05  # five standard deviations


def test_signs_without_a_generator_come_from_the_default_one() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        first = signs(50, None)
        torch.manual_seed(5)
        assert torch.equal(first, signs(50, None))
