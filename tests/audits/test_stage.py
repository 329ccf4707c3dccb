"""A stage: victims share together as each alone; candidates are prepared alike; the chance."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks import find
from gradveil.attacks.blind import find_means
from gradveil.audits import AuditJob, Case
from gradveil.audits.attackers import mildly_defended
from gradveil.audits.stage import Stage, Victim, make_stage, positive_stages
from gradveil.audits.victims import find_victims
from gradveil.clients import Client
from gradveil.controls import Controls
from gradveil.core.errors import GradveilError
from gradveil.core.types import Protocol
from gradveil.data import Images, load
from gradveil.defenses import Defense, parse


@pytest.fixture(scope="module")
def split() -> Images:
    return load("fashion-mnist-mini", "test")


@pytest.fixture(scope="module")
def means() -> Tensor:
    train = load("fashion-mnist-mini")
    return find_means(train.images, train.labels, len(train.classes)).classes


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
    return staged(job, split)


def staged(job: AuditJob, split: Images) -> Stage:
    """The stage of the job's first case, without public images."""
    victims = find_victims(split, job.images, job.batch_size, job.first or 0, job.seed)
    controls = Controls.of(None, job.cases[0].defense, job.batch_size, job.seed)
    return make_stage(job, job.cases[0], split, victims, controls, torch.device("cpu"))


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


def test_attacks_that_were_named_must_suit_a_single_case_and_may_be_left_out_of_several(
    split: Images,
) -> None:
    auto: dict[str, Any] = {"attacks": {"dlg": find("dlg")}, "auto": True, "images": 1}

    def optional(*defenses: str) -> frozenset[str]:
        cases = tuple(Case(parse(text)) for text in defenses)
        job = AuditJob("lenet", split, cases=cases, victims_at_once=1, **auto)
        return staged(job, split).optional

    drawn = {"adam-cosine", "raced", "masked", "raced+masked", "closed-form"}
    assert optional("prune:0.9") == drawn
    assert optional("prune:0.9", "none") == {*drawn, "dlg"}


def test_positive_controls_are_on_easy_models_under_what_each_attack_undoes_set_mildly(
    split: Images,
) -> None:
    names = ("dlg", "masked", "closed-form")
    job = AuditJob(
        "mlp",
        split,
        {name: find(name) for name in names},
        cases=(Case(parse("prune:0.9")),),
        images=6,
        victims_at_once=6,
    )
    proper = staged(job, split)
    acting, model = proper.client.acting, proper.client.model
    milds = {
        name: (attack, mildly_defended(attack, acting, model, train_mode=False) or Defense())
        for name, attack in proper.attacks.items()
    }
    easy = positive_stages(job, proper, lambda _: proper.controls, milds)
    assert [list(one.attacks) for one in easy] == [["dlg"], ["closed-form"], ["masked"]]
    assert [str(one.client.defense) for one in easy] == ["none", "none", "prune:0.5"]
    for one in easy:
        assert one.kind == "positive" and [len(chunk) for chunk in one.chunks] == [4]
    told_too_little = positive_stages(
        job, proper, lambda _: proper.controls, {"masked": (find("masked"), Defense())}
    )
    assert told_too_little == []
