"""Peeling: images of a batch come out exactly, and it knows which without the truth."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks import peeling
from gradveil.attacks.peeling import CHANGED, CUT, MIXED, OFF_THE_GRID, SCALED, WHOLE
from gradveil.clients import Client
from gradveil.core.types import Knowledge, Observation, Protocol
from gradveil.defenses import parse
from toys import fashion, leaky, refused, seeded

SIZE = 12


def network(width: int = 256) -> nn.Module:
    layers = nn.Flatten(), nn.Linear(SIZE**2, width), nn.ReLU(), nn.Linear(width, 10)
    return seeded(lambda: nn.Sequential(*layers))


def on_grid(count: int) -> tuple[Tensor, Tensor]:
    batch = fashion(count, SIZE, dtype=torch.float32)
    return (batch.images * 255).round() / 255, batch.labels


def observe(images: Tensor, labels: Tensor, defense: str = "none") -> Observation:
    client = Client(network(), classes=10, defense=parse(defense))
    seen = client.share(images, labels, seed=0).seen
    return replace(seen, knowledge=Knowledge())


@pytest.mark.parametrize("size", [1, 4, 12])
def test_batches_come_out_to_the_last_pixel_with_their_labels(size: int) -> None:
    images, labels = on_grid(size)
    found = peeling(observe(images, labels), 0)
    assert found.certain is not None and bool(found.certain.all()) and found.labels is not None
    levels = {
        (tuple((image * 255).round().int().flatten().tolist()), int(label))
        for image, label in zip(found.images, found.labels, strict=True)
    }
    assert levels == {
        (tuple((image * 255).round().int().flatten().tolist()), int(label))
        for image, label in zip(images, labels, strict=True)
    }
    assert found.distance < 1e-3 and found.status == "ok"


def test_what_it_is_certain_of_is_right_where_not_all_comes_out() -> None:
    images, labels = on_grid(90)
    found = peeling(observe(images, labels), 0)
    assert found.certain is not None and 0 < int(found.certain.sum()) < 90
    assert found.labels is not None and bool((found.labels[~found.certain] == -1).all())
    true = {tuple((image * 255).round().int().flatten().tolist()) for image in images}
    for image in found.images[found.certain]:
        assert tuple((image * 255).round().int().flatten().tolist()) in true
    assert bool(((found.images >= 0) & (found.images <= 1)).all())


def why_not(images: Tensor, labels: Tensor, defense: str = "none") -> str:
    found = peeling(observe(images, labels, defense), 0)
    assert found.certain is None
    return found.status.removeprefix("failed: ")


def test_noise_on_a_batch_looks_like_a_batch_too_large_and_it_says_so() -> None:
    images, labels = on_grid(8)
    assert why_not(images, labels, "gaussian:0.0001") == MIXED
    assert why_not(images[:1].expand(8, -1, -1, -1), labels, "gaussian:0.0001") == MIXED
    assert "noise" in MIXED and "look alike" in MIXED


def test_noise_on_a_single_image_is_told_from_a_large_batch() -> None:
    images, labels = on_grid(1)
    assert why_not(images, labels, "gaussian:0.0001") == CHANGED


def test_images_off_the_grid_are_told_from_noise() -> None:
    images, labels = on_grid(4)
    moved = (images * 0.9 + 0.31 / 255).clamp(0, 1)
    assert why_not(moved, labels) == OFF_THE_GRID


def test_pruned_gradients_are_told_by_their_zeros() -> None:
    images, labels = on_grid(8)
    assert why_not(images, labels, "prune:0.9") in (CUT, WHOLE)
    assert why_not(images, labels, "prune:0.99") == CUT


def test_a_scaled_gradient_is_told_by_slopes_that_no_label_explains() -> None:
    images, labels = on_grid(4)
    assert why_not(images, labels, "clip:0.01") == SCALED


def test_units_that_pruning_left_whole_are_enough() -> None:
    images, labels = on_grid(2)
    found = peeling(observe(images, labels, "prune:0.3"), 0)
    assert found.certain is not None and int(found.certain.sum()) >= 1


def test_what_it_cannot_work_on_is_refused_in_one_line() -> None:
    images, labels = on_grid(2)
    seen = Client(leaky().float(), classes=10).share(images, labels, seed=0).seen
    assert "peeling needs nn.Linear with 144 inputs" in refused(peeling, seen, 0)
    several = replace(observe(images, labels), protocol=Protocol(local_steps=2))
    assert "2 local steps" in refused(peeling, several, 0)
