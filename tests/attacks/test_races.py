"""Raced restarts: each stage goes on where the last stopped, judged by the gradient alone."""

from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor

from gradveil.attacks import GradientMatching, Race, find
from gradveil.attacks import matching as module
from gradveil.attacks.distances import cosine
from gradveil.attacks.optimizers import Adam
from gradveil.attacks.policy_views import GuessedTransform
from gradveil.attacks.priors import TotalVariation
from gradveil.attacks.starts import Given
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Observation, Reconstruction
from toys import fashion, leaky, observe_each, refused

VICTIMS = 2
STEPS = 8
RACE = Race(((4, 0.5), (2, 0.25)))  # 8 x 4, 4 x 2, 2 x 8

PLAIN = GradientMatching(
    cosine, Adam(0.05), TotalVariation(1e-3), steps=STEPS, restarts=2, frames=2
)


def victims() -> list[Observation]:
    return observe_each(leaky(), fashion(VICTIMS))


def starts(rows: int) -> Tensor:
    return torch.rand(VICTIMS * rows, 1, 1, 12, 12, generator=generator(3), dtype=torch.double)


def by_hand(attack: GradientMatching, seen: Observation, begin: Tensor) -> Reconstruction:
    """The race of one victim, each row of each stage an attack of its own."""
    rows = [*begin]
    for steps, kept in ((4, 4), (2, 2)):
        short = replace(attack, steps=steps, restarts=1, decay=False, race=Race())
        tried = [replace(short, start=Given(row))(seen, 0) for row in rows]
        best = sorted(range(len(rows)), key=lambda row: tried[row].distance)[:kept]
        rows = [tried[row].images for row in best]
    weaker = TotalVariation(attack.race.fade * 1e-3)
    last = replace(attack, restarts=1, race=Race(), prior=weaker)
    return min(
        (replace(last, start=Given(row))(seen, 0) for row in rows), key=lambda one: one.distance
    )


@pytest.mark.parametrize("fade", [1.0, 0.1, 0.0])
def test_a_race_is_what_its_stages_are_one_row_at_a_time(fade: float) -> None:
    begin = starts(8)
    attack = replace(PLAIN, race=replace(RACE, fade=fade), start=Given(begin))
    found = attack(victims(), 0)
    for seen, own, rows in zip(victims(), found, begin.split(8), strict=True):
        expected = by_hand(attack, seen, rows)
        torch.testing.assert_close(own.images, expected.images, rtol=1e-6, atol=1e-8)
        assert own.distance == pytest.approx(expected.distance)


def test_rows_in_one_pass_do_not_change_what_a_race_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    attack = replace(PLAIN, race=RACE)
    whole = attack(victims(), 5)
    for most in (1, 5, 9):
        monkeypatch.setitem(module.RACING, "cpu", most)
        for one, other in zip(attack(victims(), 5), whole, strict=True):
            torch.testing.assert_close(one.images, other.images)


def test_a_part_too_large_for_the_memory_is_made_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    attack, search = replace(PLAIN, race=RACE), module.Problem.search
    whole = attack(victims(), 5)
    refusals: list[int] = []

    def small(self: module.Problem, *arguments: object) -> object:
        if len(self.seen) > 1:
            refusals.append(len(self.seen))
            raise torch.OutOfMemoryError("too large")
        return search(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module.Problem, "search", small)
    for one, other in zip(attack(victims(), 5), whole, strict=True):
        torch.testing.assert_close(one.images, other.images)
    assert refusals


def test_a_raced_row_keeps_the_transform_that_it_guessed() -> None:
    """With the right guess among many the distance can vanish; mixed-up rows could not."""

    def darker(images: Tensor, rng: Generator) -> Tensor:
        return images * (0.1 + 0.9 * torch.rand(1, generator=rng, dtype=images.dtype))

    told = [replace(seen, knowledge=replace(seen.knowledge, policy=darker)) for seen in victims()]
    attack = replace(PLAIN, race=RACE, view=GuessedTransform(), frames=0)
    problem = module.Problem.draw(attack, told, generator(2), 8)
    kept = problem.after_heat(4, 2, module._Count(lambda _done, _total: None, 1, 1, lambda: None))
    assert kept.restarts == 2 and len(kept.images) == 2 * VICTIMS
    every = problem.judge().view(VICTIMS, 8).sort(dim=1).values
    torch.testing.assert_close(kept.judge().view(VICTIMS, 2).sort(dim=1).values, every[:, :2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_race_on_a_gpu_finds_what_one_on_the_cpu_finds() -> None:
    def on(device: str) -> list[Reconstruction]:
        batch = fashion(VICTIMS)
        seen = observe_each(
            leaky().to(device), Batch(batch.images.to(device), batch.labels.to(device))
        )
        return replace(PLAIN, race=RACE, start=Given(starts(8)), fast=False)(seen, 0)

    for one, other in zip(on("cuda"), on("cpu"), strict=True):
        torch.testing.assert_close(one.images, other.images, rtol=1e-4, atol=1e-5)


def test_frames_and_progress_count_the_heats_too() -> None:
    told: list[tuple[int, int]] = []
    found = replace(PLAIN, race=RACE)(victims(), 1, lambda done, total: told.append((done, total)))
    assert found[0].frame_steps == (6, 10, 14) and found[0].frames is not None
    assert told[-1] == (28, 28) and told == sorted(told)  # (8 x 4 + 4 x 2 + 2 x 8) / 2


def test_fewer_steps_and_restarts_make_a_smaller_race_of_the_same_shape() -> None:
    raced = find("raced")
    assert isinstance(raced, GradientMatching)
    assert raced.race.stages(raced.restarts, raced.steps) == [(32, 200), (8, 800), (2, 2_400)]
    assert raced.race.stages(1, 24) == [(16, 2), (4, 8), (1, 24)]
    assert raced.race.stages(1, 1) == [(16, 1), (4, 1), (1, 1)]


def test_a_race_that_cannot_be_run_is_refused_in_one_line() -> None:
    more = refused(Race, ((4, 0.5), (8, 0.5)))
    assert "8 times the restarts follows one of 4" in more
    assert "keeps more rows than it has" in refused(Race, ((0, 0.5),))
    for share in (0.0, -1.0, float("inf"), float("nan")):
        assert "share must be above 0" in refused(Race, ((2, share),))
    assert "heats" in refused(Race, 3)
    for fade in (-1.0, float("inf"), float("nan")):
        assert "it must be at least 0" in refused(Race, ((2, 0.5),), fade)
    assert "without a heat" in refused(Race, (), 0.5)


def test_a_race_takes_every_breaker_along() -> None:
    raced = find("raced")
    assert isinstance(raced, GradientMatching)
    for name in ("masked", "transform-guessed", "joint-noise", "without-random-layers"):
        other, both = find(name), find(f"raced+{name}")
        assert isinstance(other, GradientMatching) and isinstance(both, GradientMatching)
        assert (both.race, both.steps, both.restarts) == (raced.race, raced.steps, raced.restarts)
        assert (both.view, both.hidden, both.distance) == (other.view, other.hidden, other.distance)
