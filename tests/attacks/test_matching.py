"""The optimizer attack: equal to a plain loop, honest about restarts, deaf to the truth."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.attacks import GradientMatching, dlg
from gradveil.attacks.distances import cosine, l2
from gradveil.attacks.labels import Counted, Joint, SingleLabel
from gradveil.attacks.lbfgs import LBFGS
from gradveil.attacks.optimizers import Adam
from gradveil.attacks.priors import TotalVariation
from gradveil.attacks.starts import Given, Normal
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Protocol
from gradveil.scores import assign, psnr
from toys import Brittle, batch, fashion, fused_attention, leaky, mlp, observe, observe_each


def test_every_row_does_what_a_plain_loop_does_alone() -> None:
    batch, model = fashion(3), leaky()
    starts = torch.rand(3, 1, 1, 12, 12, generator=generator(3), dtype=torch.double)
    attack = GradientMatching(
        cosine, Adam(0.05), TotalVariation(1e-2), Given(starts), steps=7, decay=False, frames=0
    )
    found = attack(observe_each(model, batch), generator(1))
    for victim, one in enumerate(found):
        torch.testing.assert_close(
            one.images,
            plain(model, batch.images[victim], batch.labels[victim : victim + 1], starts[victim]),
        )


def test_fused_attention_which_has_no_second_derivative_is_attacked_as_plain_products() -> None:
    seen = observe(fused_attention(), batch(1, dtype=torch.double))
    short, longer = (replace(dlg, steps=steps)(seen, 0) for steps in (1, 20))
    assert longer.distance < 0.5 * short.distance


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
    batch = fashion(2)
    found = replace(dlg, steps=5)(observe_each(leaky(), batch), generator(1))
    quality = psnr(torch.cat([one.images for one in found]), batch.images)
    assert float(quality.min()) > 50  # measured: 75 dB and more
    assert all(one.distance < 1e-4 for one in found)


def test_labels_can_be_inferred_or_optimized_along() -> None:
    batch = fashion(3)
    for labels in (SingleLabel(), Counted()):
        attack = replace(dlg, steps=2, labels=labels)
        found = attack(observe_each(leaky(), batch), generator(1))
        assert torch.equal(
            torch.cat([one.labels for one in found if one.labels is not None]), batch.labels
        )
    joint = GradientMatching(l2, LBFGS(1.0), labels=Joint(), steps=8, boxed=False, frames=0)
    found = joint(observe_each(leaky(), batch), generator(1))
    best = torch.cat([one.labels for one in found if one.labels is not None])
    assert int((best == batch.labels).sum()) >= 2
    assert float(psnr(torch.cat([one.images for one in found]), batch.images).median()) > 20


def test_a_batch_is_recovered_in_part() -> None:
    batch = fashion(4)
    (found,) = replace(dlg, steps=10)([observe(leaky(), batch)], generator(1))
    ordered = found.images[assign(found.images, batch.images)]
    noise = torch.rand(batch.images.shape, generator=generator(9), dtype=torch.double)
    assert float((psnr(ordered, batch.images) - psnr(noise, batch.images)).median()) > 3


def test_several_local_steps_are_attacked_through_the_update() -> None:
    batch = fashion(2)
    seen = observe_each(leaky(), batch, protocol=Protocol(local_steps=2, local_lr=0.01))
    found = replace(dlg, steps=4)(seen, generator(1))
    assert float(psnr(torch.cat([one.images for one in found]), batch.images).median()) > 25


def test_of_the_restarts_the_one_nearest_in_gradient_is_kept_and_a_diverged_one_never() -> None:
    batch = fashion(2)
    seen = observe_each(leaky(), batch)
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


def test_a_search_that_starts_where_the_model_overflows_goes_toward_gray_at_first() -> None:
    batch = fashion(3)
    smooth = torch.full_like(batch.images, 0.4) + 0.1 * batch.images
    model = nn.Sequential(Brittle(), leaky())
    seen = observe_each(model, replace(batch, images=smooth))
    noise = torch.randn(3, 1, 1, 12, 12, generator=generator(3), dtype=torch.double)
    starts = torch.stack([noise[0], smooth[:1].flip(-1), noise[2]])
    attack = GradientMatching(cosine, Adam(0.01), start=Given(starts), boxed=False, frames=0)
    at_once = replace(attack, steps=1)(seen, generator(1))
    assert [one.distance < 1 for one in at_once] == [False, True, False]
    later = replace(attack, steps=80)(seen, generator(1))
    assert all(one.status == "ok" and one.distance < 0.5 for one in later)
    alone = replace(attack, steps=80, start=Given(starts[1:2]))(seen[1:2], generator(1))
    torch.testing.assert_close(later[1].images, alone[0].images)


class Dark(nn.Module):
    """Hands bright images on, and infinity in place of dark ones."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.where(x.mean((1, 2, 3), keepdim=True) < 0.2, torch.inf, 1.0)


def test_gray_is_no_black_where_the_model_does_not_normalize() -> None:
    batch = fashion(2)
    smooth = replace(batch, images=torch.full_like(batch.images, 0.4) + 0.1 * batch.images)
    seen = observe_each(nn.Sequential(Brittle(), Dark(), mlp(channels=1, size=12)), smooth)
    attack = GradientMatching(cosine, Adam(0.01), frames=0, steps=80)
    assert all(one.status == "ok" and one.distance < 0.1 for one in attack(seen, generator(1)))


def test_a_victim_does_not_depend_on_those_beside_it() -> None:
    batch = fashion(3)
    attack = GradientMatching(cosine, Adam(0.1), steps=5, signed=True, frames=0)
    together = attack(observe_each(leaky(), batch), generator(1))
    alone = attack(observe_each(leaky(), batch)[:1], generator(1))
    torch.testing.assert_close(together[0].images, alone[0].images)


def test_frames_show_the_way_from_the_start_to_the_end() -> None:
    batch = fashion(1)
    attack = GradientMatching(cosine, Adam(0.1), start=Normal(), steps=8, frames=4)
    (found,) = attack(observe_each(leaky(), batch), generator(1))
    assert found.frame_steps == (0, 2, 4, 6, 8)
    assert found.frames is not None
    torch.testing.assert_close(found.frames[-1], found.images)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(GradveilError, match="steps"):
        GradientMatching(steps=0)
    with pytest.raises(GradveilError, match="restarts"):
        GradientMatching(restarts=0)
