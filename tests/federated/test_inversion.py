"""Images from what a spy kept of a user's own app."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import toys
from gradveil.attacks import Attack
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.types import Observation, Reconstruction
from gradveil.engine.shares import Shares
from gradveil.federated import invert
from gradveil.federated.spied import Update, average, save_update

LR = 0.1


def leaky() -> nn.Module:
    """A network whose first layer gives an image away exactly."""
    return toys.mlp(nn.ReLU(), channels=1, size=12, width=64)


@pytest.fixture(scope="module", params=[True, False], ids=["gradients", "weights"])
def spied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clients with an image each, who send a gradient, or weights after a step."""
    out = tmp_path_factory.mktemp("spy")
    model, batch = leaky(), toys.fashion(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for client in range(2):
        model.zero_grad()
        cross_entropy(model(batch.images[[client]]), batch.labels[[client]]).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        shared = gradients
        if not request.param:
            shared = {
                name: value - LR * gradients[name] if name in gradients else value
                for name, value in before.items()
            }
        save_update(out, Update(str(client), 3, before, dict(shared), request.param, 1.0))
    return out


def test_images_come_back_from_what_a_spy_kept(spied: Path) -> None:
    truth = {str(number): toys.fashion(2).images[[number]] for number in range(2)}
    found = invert(
        spied, 3, leaky(), truth=truth, image_shape=(1, 12, 12), local_lr=LR, attack="closed-form"
    )
    assert [each.client for each in found] == ["0", "1"]
    assert all(each.scores["psnr"][0] > 30 for each in found)
    assert [int(each.found.labels[0]) for each in found if each.found.labels is not None] == (
        toys.fashion(2).labels.tolist()
    )


def test_some_clients_are_chosen_by_name(spied: Path) -> None:
    (found,) = invert(
        spied,
        3,
        leaky(),
        clients=("1",),
        image_shape=(1, 12, 12),
        local_lr=LR,
        attack="closed-form",
    )
    assert found.client == "1" and found.found.images.shape == (1, 1, 12, 12) and not found.scores


def test_an_average_is_inverted_as_the_mean_of_its_clients_own_steps(tmp_path: Path) -> None:
    steps, shape = 3, (1, 12, 12)
    batch, updates = toys.fashion(4), []
    for client in range(2):
        model, some = leaky(), slice(2 * client, 2 * client + 2)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), LR)
        for _ in range(steps):
            optimizer.zero_grad()
            cross_entropy(model(batch.images[some]), batch.labels[some]).backward()
            optimizer.step()
        updates.append(Update(str(client), 3, before, model.state_dict(), False, 2.0))
    (mean,) = average(updates, 2)
    save_update(tmp_path, mean)
    seen: list[Observation] = []

    class Look(Attack):
        def reconstruct(self, given: Any, rng: Any, progress: Any) -> list[Reconstruction]:
            seen.extend(given)
            return [Reconstruction(torch.zeros(each.size, *shape), None, 0.0) for each in given]

    given: Any = {"image_shape": shape, "local_lr": LR, "local_steps": steps, "attack": Look()}
    with pytest.warns(GradveilWarning, match="of 4 images, is taken as of 2 images each"):
        invert(tmp_path, 3, leaky(), **given)
    (one,) = seen
    shares = Shares(one.model, one.loss, one.protocol)
    made = shares(batch.images[None], batch.labels[None])
    for name, value in one.gradients.items():
        torch.testing.assert_close(made[name][0], value)
    with pytest.warns(GradveilWarning, match="as one client's, an approximation"):
        invert(tmp_path, 3, leaky(), size=3, **given)
    assert seen[1].protocol.averaged_clients == 1


def test_auto_inverts_each_client_by_every_attack_that_suits(spied: Path) -> None:
    truth = {str(number): toys.fashion(2).images[[number]] for number in range(2)}
    shape = (1, 12, 12)
    found = invert(
        spied, 3, leaky(), truth=truth, image_shape=shape, local_lr=LR, attack="auto", steps=1
    )
    names = [each.attack for each in found if each.client == "0"]
    assert {"adam-cosine", "raced", "closed-form"} == {*names}
    assert [each.attack for each in found if each.client == "1"] == names
    exact = [each for each in found if each.attack == "closed-form"]
    assert all(each.scores["psnr"][0] > 30 and not each.left_out for each in exact)


def test_what_is_not_there_is_named(spied: Path) -> None:
    with pytest.raises(GradveilError, match="unknown client of round 3 '7': choose from 0, 1"):
        invert(spied, 3, leaky(), clients=("7",), image_shape=(1, 12, 12))
    with pytest.raises(GradveilError, match="holds no round 1: it has 3"):
        invert(spied, 1, leaky(), image_shape=(1, 12, 12))
    with pytest.raises(GradveilError, match="truth of client 0: images of shape"):
        invert(
            spied,
            3,
            leaky(),
            truth={"0": torch.zeros(2, 1, 12, 12)},
            image_shape=(1, 12, 12),
            local_lr=LR,
            attack="closed-form",
        )
