"""Line-ups of canaries: what picks one out, and how often luck does."""

import torch

import toys
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Reconstruction
from gradveil.defenses import Defense, as_defense
from gradveil.federated.canaries import Lineup, Planted, plant

CANARIES = Batch(toys.pictures(100, 1, 12).float(), torch.arange(100) % 10)
MINE = Batch(toys.pictures(116, 1, 12)[100:].float(), torch.arange(16) % 10)
LINEUP = Lineup(CANARIES.images)


def picked_out(images: torch.Tensor, planted: Planted, defense: Defense) -> bool:
    return LINEUP.picks_out(Reconstruction(images, None, 0.0), planted, defense)


def test_luck_picks_out_a_canary_of_a_large_batch_no_more_often_than_of_a_small_one() -> None:
    rng, hits = generator(0), 0
    for planted in [*plant(MINE, CANARIES, 100, rng), *plant(MINE, CANARIES, 100, rng)]:
        hits += picked_out(torch.rand(16, 1, 12, 12, generator=rng), planted, Defense())
    assert hits < 10  # 1 in 100; were the nearest of any of 16 images enough, about 30


def test_a_canary_is_picked_out_by_itself_among_noise_and_not_by_a_flat_image() -> None:
    rng = generator(0)
    (planted,) = plant(MINE, CANARIES, 1, rng)
    noise = torch.rand(16, 1, 12, 12, generator=rng)
    noise[5] = CANARIES.images[planted.number]
    assert picked_out(noise, planted, Defense())
    assert not picked_out(torch.full((16, 1, 12, 12), 0.5), planted, Defense())


def test_a_canary_is_picked_out_as_the_policy_changed_it_in_its_batch() -> None:
    defense = as_defense("43-18-18")
    for planted in plant(MINE, CANARIES, 5, generator(0)):
        transform = planted.transform(defense)
        assert transform is not None
        assert picked_out(transform(planted.batch.images), planted, defense)
