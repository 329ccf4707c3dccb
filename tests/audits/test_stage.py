"""A stage: victims share together as each alone; candidates are prepared alike; the chance."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks import find
from gradveil.attacks.blind import find_means
from gradveil.audits import AuditJob, Case
from gradveil.audits.stage import (
    Controls,
    Stage,
    Victim,
    make_candidates,
    make_stage,
    positive_stages,
    preparation,
)
from gradveil.clients import Client
from gradveil.core import GradveilError
from gradveil.core.types import Protocol
from gradveil.data import Images, load
from gradveil.defenses import parse
from gradveil.scores import identify
from gradveil.transforms import Policy, Preparation


@pytest.fixture(scope="module")
def split() -> Images:
    return load("fashion-mnist-mini", "test")


@pytest.fixture(scope="module")
def means() -> Tensor:
    train = load("fashion-mnist-mini")
    return find_means(train.images, train.labels, len(train.classes)).classes


def test_victims_come_first_and_nothing_comes_twice(split: Images, means: Tensor) -> None:
    victims = torch.arange(100, 108)
    candidates = make_candidates(split, victims, None, means, 1, seed=0)
    assert torch.equal(candidates.indices[:8], victims) and len(candidates) == len(split) == len(
        set(candidates.indices.tolist())
    )


def test_a_reconstruction_that_is_the_used_image_is_identified(
    split: Images, means: Tensor
) -> None:
    prepare = Preparation(policy=Policy.parse("3-1-7"))
    victims = torch.arange(20)
    candidates = make_candidates(split, victims, prepare, means, 1, seed=0)
    used = prepare(split.images[victims], torch.Generator().manual_seed(9)).float() / 255
    assert not torch.equal(used, candidates.images["used"][:20])
    assert candidates.identified("used", used, victims, used).sum() == 20
    noise = torch.rand(20, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    assert candidates.identified("used", noise, victims, used).sum() <= 1


def test_identification_by_kept_signatures_equals_that_among_the_images(
    split: Images, means: Tensor
) -> None:
    prepare = Preparation(policy=Policy.parse("3-1-7"))
    victims = torch.arange(40)
    candidates = make_candidates(split, victims, prepare, means, 1, seed=0)
    some = torch.tensor([31, 2, 17, 5, 39, 8])
    rng = torch.Generator().manual_seed(3)
    true = {
        "used": prepare(split.images[some], rng).float() / 255,
        "original": split.images[some].float() / 255,
    }
    for truth, images in true.items():
        found = images + 0.9 * torch.randn(images.shape, generator=rng)
        found[0] = 0.5
        among = candidates.images[truth].clone()
        among[some] = images
        expected = identify(found, among, some)
        assert torch.equal(candidates.identified(truth, found, some, images), expected)
        assert 0 < expected.sum() < len(some)


def test_without_a_policy_used_and_original_candidates_are_the_same(
    split: Images, means: Tensor
) -> None:
    candidates = make_candidates(split, torch.arange(4), None, means, 1, seed=0)
    assert (
        torch.equal(candidates.images["used"], candidates.images["original"])
        and candidates.chance["used"] == candidates.chance["original"]
    )


def test_the_chance_is_what_the_class_mean_reaches_and_grows_with_the_batch(
    split: Images, means: Tensor
) -> None:
    everything = torch.arange(len(split))
    reached = float(identify(means[split.labels], split.images.float() / 255, everything).mean())
    assert reached > 2 / len(split)  # so chance alone would be too low a bar
    assert make_candidates(split, torch.arange(4), None, means, 1, seed=0).chance[
        "original"
    ] == pytest.approx(reached)
    assert make_candidates(split, torch.arange(4), None, means, 4, seed=0).chance[
        "original"
    ] == pytest.approx(4 * reached)


def test_one_image_has_nothing_to_be_told_from(split: Images, means: Tensor) -> None:
    with pytest.raises(GradveilError, match="has 1 image: identification needs at least two"):
        make_candidates(split.select([0]), torch.arange(1), None, means, 1, seed=0)


# Sharing


class Sometimes(nn.Module):
    """Two layers whose gradient is zero for black images."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.layer = nn.Linear(784, 12), nn.Linear(12, 10)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        found: Tensor = self.layer(torch.sigmoid(self.hidden(flat)))
        return found * (flat.mean(1, keepdim=True) > 0)


def stage(split: Images, defense: str, dtype: torch.dtype, **changes: Any) -> Stage:
    torch.manual_seed(5)
    settings: dict[str, Any] = {
        "cases": (Case(parse(defense)),),
        "images": 6,
        "victims_at_once": 3,
        "seed": 4,
    }
    changes = settings | changes
    job = AuditJob(Sometimes().to(dtype), split, {"dlg": find("dlg")}, **changes)
    return make_stage(job, job.cases[0], split, Controls.of(None), torch.device("cpu"))


@pytest.fixture(scope="module")
def bright(split: Images) -> Images:
    chosen = split.images.float().div(255).mean(dim=(1, 2, 3)) > 0.3
    return split.select(chosen.nonzero().flatten()[:20])


SHARED = [
    ("none", {}),
    ("3-1-7+43-18-18", {}),
    ("prune:0.9", {"batch_size": 2}),
    ("gaussian:0.001", {}),
    ("dp:norm=1,multiplier=1", {}),
    ("precode:k=8", {}),
    ("dropout:0.3", {}),
    ("3-1-7,then,gaussian:0.001", {"batch_size": 2}),
    ("3-1-7", {"protocol": Protocol(local_steps=2)}),
    ("dropout:0.3", {"protocol": Protocol(local_steps=2)}),
]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)], ids=str
)
@pytest.mark.parametrize(("defense", "changes"), SHARED)
def test_victims_that_share_together_share_what_each_shares_alone(
    bright: Images, defense: str, changes: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    made = stage(bright, defense, dtype, **changes)
    for chunk in made.chunks:
        together = made.share(chunk)
        for victim, indices in zip(together, chunk, strict=True):
            (alone,) = made.share([indices])
            assert torch.equal(victim.indices, alone.indices) and victim.status == "ok"
            assert torch.equal(victim.used, alone.used)
            assert victim.seen is not None and alone.seen is not None
            ours, theirs = (
                torch.cat([g.flatten() for g in v.seen.gradients.values()])
                for v in (victim, alone)
                if v.seen is not None
            )
            assert float((ours - theirs).norm() / theirs.norm()) < tolerance
            labels, expected = victim.seen.knowledge.labels, alone.seen.knowledge.labels
            assert labels is not None and expected is not None
            assert torch.equal(labels, expected)


def test_what_a_victim_shares_depends_on_its_first_image_and_the_seed_alone(bright: Images) -> None:
    first = stage(bright, "gaussian:0.1,then,prune:0.5", torch.float64)
    later = stage(bright, "gaussian:0.1,then,prune:0.5", torch.float64, first=2, images=3)
    other = stage(bright, "gaussian:0.1,then,prune:0.5", torch.float64, seed=5)
    ours, theirs = first.share(first.chunks[0])[2], later.share(later.chunks[0])[0]
    assert torch.equal(ours.indices, theirs.indices)
    for mine, same, changed in zip(
        _gradients(ours),
        _gradients(theirs),
        _gradients(other.share(other.chunks[0])[2]),
        strict=True,
    ):
        torch.testing.assert_close(mine, same, rtol=1e-9, atol=1e-12)
        assert not torch.allclose(mine, changed)


def _gradients(victim: Victim) -> list[Tensor]:
    assert victim.seen is not None
    return list(victim.seen.gradients.values())


def test_a_victim_that_can_share_nothing_does_not_take_the_others_with_it(
    bright: Images,
) -> None:
    pixels = bright.images.clone()
    pixels[1] = 0
    dark = replace(bright, images=pixels)
    made = stage(dark, "gaussian:0.001", torch.float64)
    lost, *others = made.share(made.chunks[0])[1::-1]
    assert lost.seen is None and not bool(lost.used.any())
    assert lost.status == (
        "failed: the model's gradient is zero: dead or saturated; nothing can be matched"
    )
    (alone,) = made.share([made.chunks[0][0]])
    for ours, theirs in zip(_gradients(others[0]), _gradients(alone), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-15)
    assert made.share(made.chunks[0])[2].status == "ok"


def test_the_victims_of_a_chunk_share_in_one_call(
    bright: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, plain = [], Client.share_batches

    def counted(self: Client, batches: Any, *rest: Any, **more: Any) -> Any:
        calls.append(len(batches))
        return plain(self, batches, *rest, **more)

    monkeypatch.setattr(Client, "share_batches", counted)
    made = stage(bright, "3-1-7", torch.float32)
    for chunk in made.chunks:
        made.share(chunk)
    assert calls == [3, 3]


def test_a_sample_is_a_victim_that_shares_something(bright: Images) -> None:
    pixels = bright.images.clone()
    pixels[0] = 0
    made = stage(replace(bright, images=pixels), "none", torch.float32)
    assert [int(victim.indices[0]) for victim in made.sample] == [1]
    pixels[:3] = 0
    dead = stage(replace(bright, images=pixels), "none", torch.float32)
    with pytest.raises(GradveilError, match=r"^the model's gradient is zero"):
        _ = dead.sample


@pytest.mark.parametrize("defense", ["3-1-7", "3-1-7,then,prune:0.5"])
def test_candidates_are_prepared_as_published_by_crop_flip_and_policy(
    split: Images, defense: str
) -> None:
    pixels = split.images[:50]
    expected = Preparation(policy=Policy.parse("3-1-7"))(pixels, torch.Generator().manual_seed(1))
    prepare = preparation(parse(defense))
    assert torch.equal(prepare(pixels, torch.Generator().manual_seed(1)), expected)


def test_candidates_are_prepared_only_where_the_defense_changes_images(split: Images) -> None:
    for defense, same in (("none", True), ("prune:0.9", True), ("3-1-7", False)):
        found = stage(split, defense, torch.float32).candidates.images
        assert torch.equal(found["used"], found["original"]) is same


def test_attacks_that_were_named_must_suit_a_single_case_and_may_be_left_out_of_several(
    split: Images,
) -> None:
    auto: dict[str, Any] = {"attacks": {"dlg": find("dlg")}, "auto": True, "images": 1}

    def optional(*defenses: str) -> frozenset[str]:
        cases = tuple(Case(parse(text)) for text in defenses)
        job = AuditJob("lenet", split, cases=cases, victims_at_once=1, **auto)
        controls, cpu = Controls.of(None), torch.device("cpu")
        return make_stage(job, job.cases[0], split, controls, cpu).optional

    assert optional("prune:0.9") == {"adam-cosine", "masked", "closed-form"}
    assert optional("prune:0.9", "none") == {"adam-cosine", "masked", "closed-form", "dlg"}


def test_positive_controls_are_of_attacks_that_need_no_defense(split: Images) -> None:
    names = ("dlg", "masked", "closed-form")
    job = AuditJob(
        "mlp",
        split,
        {name: find(name) for name in names},
        cases=(Case(parse("prune:0.9")),),
        images=6,
        victims_at_once=6,
    )
    proper = make_stage(job, job.cases[0], split, Controls.of(None), torch.device("cpu"))
    easy = positive_stages(job, proper)
    assert [list(one.attacks) for one in easy] == [["dlg"], ["closed-form"]]
    for one in easy:
        assert one.kind == "positive" and [len(chunk) for chunk in one.chunks] == [4]
        assert str(one.client.defense) == "none"
