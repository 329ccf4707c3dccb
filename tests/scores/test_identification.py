"""Identification on smooth random images, and on real ones where $GRADVEIL_DATA has them."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gradveil import scores
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.scores.images import smooth


def drawn(count: int, *shape: int, name: str) -> Tensor:
    return torch.randn(count, *shape, generator=generator(0, name), dtype=torch.float64)


@pytest.fixture(scope="module")
def pictures() -> Tensor:
    """200 smooth color images in [0, 1]."""
    images = smooth(drawn(200, 3, 24, 24, name="pictures"), 2.0)
    low, high = images.amin(dim=(1, 2, 3), keepdim=True), images.amax(dim=(1, 2, 3), keepdim=True)
    return (images - low) / (high - low)


def share(found: Tensor, pictures: Tensor) -> float:
    return float(scores.identify(found, pictures, torch.arange(len(pictures))).mean())


def test_a_signature_has_length_one_and_ignores_brightness_and_contrast(pictures: Tensor) -> None:
    made = scores.signatures(pictures)
    torch.testing.assert_close(made.norm(dim=1), torch.ones(200, dtype=torch.float64))
    torch.testing.assert_close(scores.signatures(0.05 * pictures + 0.3), made)
    torch.testing.assert_close(scores.signatures(1 - pictures), -made)


@pytest.mark.parametrize("kind", ["equal", "noise", "blur", "contrast", "color", "shift"])
def test_degraded_copies_are_identified(pictures: Tensor, kind: str) -> None:
    gains = torch.rand(200, 3, 1, 1, generator=generator(0, "gains"), dtype=torch.float64)
    found = {
        "equal": pictures,
        "noise": pictures + 0.2 * drawn(*pictures.shape, name="noise"),
        "blur": smooth(pictures, 1.5),
        "contrast": 0.5 * pictures + 0.3,
        "color": pictures * (0.5 + gains) + 0.1,
        "shift": pictures.roll(1, dims=3),
    }[kind]
    assert share(found.float(), pictures.float()) > 0.98


def test_noise_is_identified_by_chance_alone(pictures: Tensor) -> None:
    trials = torch.rand(2000, 3, 24, 24, generator=generator(0, "chance"))
    index = torch.arange(2000) % 200
    assert (
        scores.identify(trials, pictures.float(), index).mean() < 0.0125
    )  # 0.005 by chance; 0.0125 is 4.8 sigma away
    assert scores.rank(trials, pictures.float(), index).mean().item() == pytest.approx(100.5, abs=6)


def test_rank_counts_the_candidates_that_are_nearer(pictures: Tensor) -> None:
    found = pictures[:5] + 0.8 * drawn(5, 3, 24, 24, name="rank")
    made, known = scores.signatures(found), scores.signatures(pictures)
    expected = [
        1 + sum(float(made[i] @ other) > float(made[i] @ known[7]) for other in known)
        for i in range(5)
    ]
    assert scores.rank(found, pictures, torch.full((5,), 7)).tolist() == expected


def test_ranks_from_signatures_are_those_from_images(pictures: Tensor) -> None:
    found = pictures + 0.8 * drawn(*pictures.shape, name="kept")
    found[3] = 0.5  # flat: last
    index = torch.arange(200).flip(0)
    kept = scores.signatures(pictures)
    ranks = scores.rank_among(found, kept, index)
    assert torch.equal(ranks, scores.rank(found, pictures, index))
    assert ranks[3] == 200 and ranks.unique().numel() > 10


def test_identify_is_rank_one(pictures: Tensor) -> None:
    found, index = pictures + 0.6 * drawn(*pictures.shape, name="hard"), torch.arange(200)
    place, hit = scores.rank(found, pictures, index), scores.identify(found, pictures, index)
    assert hit.equal((place == 1).double()) and 0 < hit.mean() < 1


def test_duplicates_of_the_true_image_do_not_count_against_it(pictures: Tensor) -> None:
    candidates = torch.cat([pictures, pictures]).float()
    assert scores.identify(pictures.float(), candidates, torch.arange(200) + 200).all()


def test_chunks_change_nothing(pictures: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    found, index = pictures + 0.6 * drawn(*pictures.shape, name="chunks"), torch.arange(200).flip(0)
    whole = scores.rank(found, pictures, index)
    monkeypatch.setattr("gradveil.scores.identification.IMAGES_AT_ONCE", 7)
    assert scores.rank(found, pictures, index).equal(whole)


@pytest.mark.parametrize("value", [0.0, 0.5, 0.1, torch.nan, torch.inf])
def test_a_flat_or_broken_reconstruction_identifies_nothing(pictures: Tensor, value: float) -> None:
    found = torch.full((2, 3, 24, 24), value)
    for candidates in (pictures[:4].float(), torch.zeros(4, 3, 24, 24)):
        assert scores.identify(found, candidates, torch.tensor([0, 3])).tolist() == [0, 0]
        assert scores.rank(found, candidates, torch.tensor([0, 3])).tolist() == [4, 4]


def test_one_broken_pixel_spoils_its_own_image_alone(pictures: Tensor) -> None:
    found = pictures.clone()
    found[3, 1, 2, 2] = torch.nan
    assert scores.identify(found, pictures, torch.arange(200)).sum() == 199


def test_places_that_are_not_candidates_are_refused(pictures: Tensor) -> None:
    with pytest.raises(GradveilError, match="index holds 200: expected a number from 0 to 199"):
        scores.rank(pictures[:1], pictures, torch.tensor([200]))
    with pytest.raises(GradveilError, match=r"index is float32 of shape \(1,\)"):
        scores.rank(pictures[:1], pictures, torch.tensor([0.0]))
    with pytest.raises(GradveilError, match="one int64 for each of 2"):
        scores.rank(pictures[:2], pictures, torch.tensor([0]))
    with pytest.raises(GradveilError, match=r"found has shape .* and candidates .*same shape"):
        scores.rank(pictures[:1, :, 1:], pictures, torch.tensor([0]))
    with pytest.raises(GradveilError, match="images are int64"):
        scores.signatures(pictures.long())


@pytest.mark.skipif(
    "GRADVEIL_DATA" not in os.environ,
    reason="set GRADVEIL_DATA to the folder with FashionMNIST/raw",
)
def test_noisy_and_repainted_clothes_are_identified_among_a_thousand() -> None:
    raw = gzip.decompress(
        (
            Path(os.environ["GRADVEIL_DATA"]) / "FashionMNIST/raw/t10k-images-idx3-ubyte.gz"
        ).read_bytes()
    )
    clothes = torch.from_numpy(
        np.frombuffer(raw, np.uint8, 1000 * 784, 16).reshape(1000, 1, 28, 28) / 255
    ).float()
    noise = drawn(*clothes.shape, name="clothes").float()
    assert share(clothes + 0.3 * noise, clothes) > 0.99
    assert share(0.5 * clothes + 0.3, clothes) > 0.99
    assert share(smooth(clothes.double(), 1.0), clothes) > 0.98
    assert share(noise, clothes) < 0.005
