"""The optimizer attack: equal to a plain loop, honest about restarts, deaf to the truth."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.attacks import PRESETS, GradientMatching, find, names
from gradveil.attacks.distances import cosine, l2
from gradveil.attacks.labels import Counted, Joint, SingleLabel
from gradveil.attacks.optimizers import LBFGS, Adam
from gradveil.attacks.priors import TotalVariation
from gradveil.attacks.starts import Given, Normal
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Knowledge, Observation, Protocol
from gradveil.data import load
from gradveil.engine.draws import Draw
from gradveil.models import build
from gradveil.scores import assign, psnr

CLASSES = 10


def pictures(count: int, size: int = 12) -> Batch:
    split = load("fashion-mnist-mini", "test")
    small = F.interpolate(split.images[:count].float() / 255, size=(size, size), mode="area")
    return Batch(small.double(), split.labels[:count])


def leaky(size: int = 12) -> nn.Module:
    """Small, smooth and wide enough to tell an image from its gradient."""
    return build("lenet", channels=1, size=size, classes=CLASSES, mean=(0.2,), std=(0.4,)).double()


def observe(
    batch: Batch, per_victim: int = 1, model: nn.Module | None = None, **more: object
) -> list[Observation]:
    pieces = zip(batch.images.split(per_victim), batch.labels.split(per_victim), strict=True)
    client = Client(model or leaky(), classes=CLASSES, **more)  # type: ignore[arg-type]
    return [
        seen for seen, _ in client.share_batches([Batch(x, y) for x, y in pieces], generator(0))
    ]


def test_every_row_does_what_a_plain_loop_does_alone() -> None:
    batch, model = pictures(3), leaky()
    starts = torch.rand(3, 1, 1, 12, 12, generator=generator(3), dtype=torch.double)
    attack = GradientMatching(
        cosine, Adam(0.05), TotalVariation(1e-2), Given(starts), steps=7, decay=False, frames=0
    )
    found = attack(observe(batch, model=model), generator(1))
    for victim, one in enumerate(found):
        torch.testing.assert_close(
            one.images,
            plain(model, batch.images[victim], batch.labels[victim : victim + 1], starts[victim]),
        )


def plain(model: nn.Module, image: Tensor, label: Tensor, start: Tensor) -> Tensor:
    """The same attack on one victim, written out with torch's optimizer."""
    model.eval()
    parameters = list(model.parameters())
    target = torch.autograd.grad(F.cross_entropy(model(image[None]), label), parameters)
    z = ((start - 0.2) / 0.4).requires_grad_()
    optimizer = torch.optim.Adam([z], 0.05)
    for _ in range(7):
        found = torch.autograd.grad(
            F.cross_entropy(model(z * 0.4 + 0.2), label), parameters, create_graph=True
        )
        dot = sum((f * t).sum() for f, t in zip(found, target, strict=True))
        norms = [sum(part.square().sum() for part in parts) for parts in (found, target)]
        loss = (
            1
            - dot / (norms[0] * norms[1]) ** 0.5
            + 1e-2 * (z.diff(dim=-1).abs().mean() + z.diff(dim=-2).abs().mean())
        )
        (z.grad,) = torch.autograd.grad(loss, z)
        optimizer.step()
        with torch.no_grad():
            z.clamp_(-0.2 / 0.4, 0.8 / 0.4)
    return (z.detach() * 0.4 + 0.2).clamp(0, 1)


def test_dlg_finds_the_images() -> None:
    batch = pictures(4)
    found = replace(find("dlg"), steps=40)(observe(batch), generator(1))  # type: ignore[type-var]
    quality = psnr(torch.cat([one.images for one in found]), batch.images)
    assert float(quality.median()) > 30
    assert all(one.distance < 1e-2 for one in found)


def test_labels_can_be_inferred_or_optimized_along() -> None:
    batch = pictures(3)
    for labels in (SingleLabel(), Counted()):
        attack = replace(find("dlg"), steps=2, labels=labels)  # type: ignore[type-var]
        found = attack(observe(batch), generator(1))
        assert torch.equal(
            torch.cat([one.labels for one in found if one.labels is not None]), batch.labels
        )
    joint = GradientMatching(l2, LBFGS(1.0), labels=Joint(), steps=40, boxed=False, frames=0)
    found = joint(observe(batch), generator(1))
    best = torch.cat([one.labels for one in found if one.labels is not None])
    assert int((best == batch.labels).sum()) >= 2
    assert float(psnr(torch.cat([one.images for one in found]), batch.images).median()) > 20


def test_a_batch_is_recovered_in_part() -> None:
    batch = pictures(4)
    (found,) = replace(find("dlg"), steps=60)(observe(batch, 4), generator(1))  # type: ignore[type-var]
    ordered = found.images[assign(found.images, batch.images)]
    noise = torch.rand(batch.images.shape, generator=generator(9), dtype=torch.double)
    assert float((psnr(ordered, batch.images) - psnr(noise, batch.images)).median()) > 3


def test_several_local_steps_are_attacked_through_the_update() -> None:
    batch = pictures(2)
    seen = observe(batch, protocol=Protocol(local_steps=2, local_lr=0.01))
    found = replace(find("dlg"), steps=15)(seen, generator(1))  # type: ignore[type-var]
    assert float(psnr(torch.cat([one.images for one in found]), batch.images).median()) > 25


def test_of_the_restarts_the_one_nearest_in_gradient_is_kept_and_a_diverged_one_never() -> None:
    batch = pictures(2)
    seen = observe(batch)
    good = batch.images + 0.01
    broken = torch.full_like(good, torch.nan)
    starts = torch.stack([broken[0], good[0], good[1], broken[1]])[:, None]
    attack = GradientMatching(
        l2, Adam(1e-6), start=Given(starts), steps=1, restarts=2, boxed=False, frames=0
    )
    found = attack(seen, generator(1))
    assert [one.status for one in found] == ["ok", "ok"]
    torch.testing.assert_close(
        torch.cat([one.images for one in found]), good.clamp(0, 1), atol=1e-4, rtol=0
    )
    (lost,) = replace(attack, start=Given(broken[:1, None].expand(2, 1, 1, 12, 12)), restarts=2)(
        seen[:1], generator(1)
    )
    assert lost.status.startswith("failed")
    assert lost.distance == float("inf")
    assert bool(lost.images.isfinite().all())


def test_a_victim_does_not_depend_on_those_beside_it() -> None:
    batch = pictures(3)
    attack = GradientMatching(cosine, Adam(0.1), steps=5, signed=True, frames=0)
    together = attack(observe(batch), generator(1))
    alone = attack(observe(batch)[:1], generator(1))
    torch.testing.assert_close(together[0].images, alone[0].images)


def test_frames_show_the_way_from_the_start_to_the_end() -> None:
    batch = pictures(1)
    attack = GradientMatching(cosine, Adam(0.1), start=Normal(), steps=8, frames=4)
    (found,) = attack(observe(batch), generator(1))
    assert found.frame_steps == (0, 2, 4, 6, 8)
    assert found.frames is not None
    torch.testing.assert_close(found.frames[-1], found.images)


def test_unknown_labels_are_an_error_that_says_so() -> None:
    split = pictures(1)
    client = Client(leaky(), classes=CLASSES)
    seen = [one for one, _ in client.share_batches([split], generator(0), tell_labels=False)]
    with pytest.raises(GradveilError, match="labels"):
        find("adam-cosine")(seen, generator(0))


def test_victims_of_two_models_are_not_attacked_together() -> None:
    with pytest.raises(GradveilError, match="one model"):
        find("dlg")(observe(pictures(1)) + observe(pictures(1)), generator(0))


class Blurred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draw = Draw()

    def forward(self, logits: Tensor) -> Tensor:
        blurred: Tensor = logits + self.draw(logits)
        return blurred


def everything(one: Observation) -> Knowledge:
    """What all attacks together may need to know."""
    return Knowledge(
        labels=one.knowledge.labels,
        transform=lambda images: images.flip(-1),
        policy=lambda images, rng: images.roll(int(torch.randint(3, (), generator=rng)), -1),
        means=torch.full((CLASSES, 1, 12, 12), 0.5),
        random_layers=("*head*",),
        defended_layers=("*head.weight",),
        pruned=True,
        noise=("gaussian", 0.1),
        train_masks=True,
        earlier=(one.gradients,),
    )


@pytest.mark.parametrize("name", names())
def test_every_preset_runs_and_gives_images_in_range(name: str) -> None:
    batch = pictures(2)
    model = (
        build("mlp", channels=1, size=12, classes=CLASSES).double()
        if name == "closed-form"
        else leaky()
    )
    attack = PRESETS[name]
    attack = replace(attack, steps=2) if isinstance(attack, GradientMatching) else attack
    if name in ("joint-noise", "joint-masks"):
        model = nn.Sequential(model, Blurred() if name == "joint-noise" else nn.Dropout(0.2))
    seen = observe(batch, model=model, protocol=Protocol(train_mode=name == "joint-masks"))
    found = attack([replace(one, knowledge=everything(one)) for one in seen], generator(0))
    assert [one.status for one in found] == ["ok", "ok"]
    for one in found:
        assert one.images.shape == (1, 1, 12, 12)
        assert 0 <= float(one.images.min()) <= float(one.images.max()) <= 1


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(GradveilError, match="steps"):
        GradientMatching(steps=0)
    with pytest.raises(GradveilError, match="restarts"):
        GradientMatching(restarts=0)


def test_an_unknown_attack_names_the_choices() -> None:
    with pytest.raises(GradveilError, match="adam-cosine"):
        find("magic")
