"""Training against a plain loop: same batches, same weights; other batches, like accuracies."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from gradveil import models
from gradveil.core.seeds import generator
from gradveil.data import Images, load
from gradveil.data.images import Batches
from gradveil.defenses import parse
from gradveil.models.checkpoints import load_checkpoint
from gradveil.training import Recipe, TrainingJob, train
from gradveil.training.job import step_path


def splits(job: TrainingJob) -> tuple[Images, Images]:
    assert isinstance(job.data, str)
    return load(job.data, "train", fraction=job.fraction, seed=job.seed), load(job.data, "test")


def fresh(job: TrainingJob, split: Images) -> nn.Module:
    return models.build(
        str(job.model),
        channels=split.channels,
        size=split.size,
        classes=len(split.classes),
        mean=split.mean,
        std=split.std,
        seed=job.seed,
    )


def descend(
    parameters: list[nn.Parameter], speeds: dict[int, Tensor], rate: float, recipe: Recipe
) -> None:
    """Nesterov: v = m v + g, then w = w - rate (g + m v), with weight decay in g."""
    for number, weight in enumerate(parameters):
        assert weight.grad is not None
        gradient = weight.grad + recipe.weight_decay * weight.detach()
        speeds[number] = (
            recipe.momentum * speeds[number] + gradient if number in speeds else gradient.clone()
        )
        with torch.no_grad():
            weight.sub_(rate * (gradient + recipe.momentum * speeds[number]))
        weight.grad = None


Change = Callable[[int, Tensor, Generator], Tensor]
"""(number of the parameter, its gradient, the generator of the step) -> what the optimizer gets."""


def plain(
    job: TrainingJob, change: Change = lambda _, gradient, __: gradient
) -> tuple[nn.Module, list[tuple[float, float]]]:
    """The model after every step of the recipe, and mean loss and test accuracy of each epoch."""
    (images, test), recipe = splits(job), job.recipe
    model = fresh(job, images)
    parameters, speeds, history, step = list(model.parameters()), dict[int, Tensor](), [], 0
    for epoch in range(recipe.epochs):
        rate = recipe.lr / 10 ** sum(8 * epoch >= part * recipe.epochs for part in (3, 5, 7))
        total = 0.0
        for batch in Batches(
            images.images,
            images.labels,
            recipe.batch_size,
            generator(job.seed, "train", epoch),
            job.preparation(),
        ):
            loss = recipe.loss_scale * cross_entropy(model.train()(batch.images), batch.labels)
            loss.backward()
            rng, step = generator(job.seed, "defense", step), step + 1
            for number, weight in enumerate(parameters):
                assert weight.grad is not None
                weight.grad = change(number, weight.grad, rng)
            descend(parameters, speeds, rate, recipe)
            total += loss.item() * len(batch)
        history.append((total / len(images), accuracy(model, test)))
    return model, history


def accuracy(model: nn.Module, test: Images) -> float:
    with torch.no_grad():
        return float((model.eval()(test.images / 255).argmax(1) == test.labels).float().mean())


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("lenet", {}),
        ("lenet", {"defense": parse("3-1-7+43-18-18"), "augment": False}),
        (
            "norm",
            {"recipe": Recipe(epochs=8, lr=0.05, batch_size=64, loss_scale=0.5, weight_decay=0.01)},
        ),
        ("norm", {"recipe": Recipe(epochs=2, lr=0.05, batch_size=1_000, momentum=0), "seed": 11}),
    ],
)
def test_the_weights_are_those_of_a_plain_loop(
    nets: str, tmp_path: Path, model: str, changes: dict[str, object]
) -> None:
    name = model if model == "lenet" else f"{nets}:{model}"
    job = replace(
        TrainingJob(
            "fashion-mnist-mini", name, Recipe(epochs=3, lr=0.05, batch_size=32), fraction=0.05
        ),
        **changes,  # type: ignore[arg-type]
    )
    trained = train(job, tmp_path / "run", progress=False)
    expected, history = plain(job)
    found = load_checkpoint(trained.checkpoint, fresh(job, splits(job)[0]))
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[key], value, rtol=1e-5, atol=1e-6)
    assert [row["train_loss"] for row in trained.history] == pytest.approx(
        [loss for loss, _ in history], rel=1e-5
    )
    assert [row["test_accuracy"] for row in trained.history] == pytest.approx(
        [found for _, found in history], abs=1e-7
    )
    assert trained.accuracy == pytest.approx(history[-1][1], abs=1e-7)


def pruned(share: float) -> Change:
    def change(_: int, gradient: Tensor, __: Generator) -> Tensor:
        left = gradient.flatten().clone()
        left[
            gradient.flatten()
            .abs()
            .argsort(stable=True)[: math.floor(share * gradient.numel() + 1e-6)]
        ] = 0
        return left.view_as(gradient)

    return change


def noisy(scale: float) -> Change:
    return lambda _, gradient, rng: gradient + scale * torch.randn(gradient.shape, generator=rng)


def fed_back(share: float, momentum: float) -> Change:
    """Deep gradient compression: u = m u + g, v = v + u; the largest of v leave both."""
    speeds, waiting = dict[int, Tensor](), dict[int, Tensor]()

    def change(number: int, gradient: Tensor, rng: Generator) -> Tensor:
        speeds[number] = momentum * speeds.get(number, torch.zeros_like(gradient)) + gradient
        waiting[number] = waiting.get(number, torch.zeros_like(gradient)) + speeds[number]
        sent = pruned(share)(number, waiting[number], rng)
        speeds[number], waiting[number] = (
            torch.where(sent == 0, speeds[number], 0),
            waiting[number] - sent,
        )
        return sent

    return change


@pytest.mark.parametrize(
    ("defense", "change"),
    [
        ("prune:0.9", lambda: pruned(0.9)),
        ("gaussian:0.05", lambda: noisy(0.05)),
        ("prune-feedback:0.9,momentum=0.5", lambda: fed_back(0.9, 0.5)),
        (
            "prune:0.9,then,gaussian:0.05",
            lambda: lambda *given: noisy(0.05)(given[0], pruned(0.9)(*given), given[2]),
        ),
        ("soteria:0", lambda: lambda _, gradient, __: gradient),
        ("clip:1e9", lambda: lambda _, gradient, __: gradient),
    ],
)
@pytest.mark.parametrize("model", ["small", "norm"])
def test_defended_training_is_a_plain_loop_whose_gradients_are_changed_before_each_update(
    nets: str, tmp_path: Path, model: str, defense: str, change: Callable[[], Change]
) -> None:
    """Running statistics too: Soteria's second pass of a batch does not count in them."""
    recipe = Recipe(epochs=3, lr=0.02, batch_size=32, loss_scale=0.5)
    job = TrainingJob(
        "fashion-mnist-mini",
        f"{nets}:{model}",
        recipe,
        fraction=0.03,
        defense=parse(defense),
        seed=2,
    )
    trained = train(job, tmp_path / "run", progress=False)
    expected, history = plain(job, change())
    found = load_checkpoint(trained.checkpoint, fresh(job, splits(job)[0]))
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    assert [row["train_loss"] for row in trained.history] == pytest.approx(
        [loss for loss, _ in history], rel=1e-4
    )
    assert trained.accuracy == pytest.approx(history[-1][1], abs=2.5e-3)


def test_saved_steps_are_the_states_of_the_plain_loop(nets: str, tmp_path: Path) -> None:
    recipe = Recipe(epochs=1, lr=0.05, batch_size=1_000)  # one step of all images
    job = TrainingJob("fashion-mnist-mini", f"{nets}:small", recipe, fraction=0.05, save_at=(0, 1))
    train(job, tmp_path, progress=False)
    start = fresh(job, splits(job)[0])
    for step, expected in ((0, start), (1, plain(job)[0])):
        found = load_checkpoint(
            step_path(tmp_path, step), fresh(replace(job, seed=9), splits(job)[0])
        )
        for key, value in expected.state_dict().items():
            torch.testing.assert_close(found.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def test_half_the_loss_gives_half_the_first_step(nets: str, tmp_path: Path) -> None:
    moves = []
    for scale in (1.0, 0.5):
        recipe = Recipe(epochs=1, batch_size=1_000, weight_decay=0, loss_scale=scale)
        job = TrainingJob("fashion-mnist-mini", f"{nets}:small", recipe, fraction=0.05)
        start = fresh(job, splits(job)[0]).state_dict()
        end = load_checkpoint(
            train(job, tmp_path / str(scale), progress=False).checkpoint, fresh(job, splits(job)[0])
        ).state_dict()
        moves.append(torch.cat([(end[key] - start[key]).flatten() for key in start]))
    assert float(moves[0].norm()) > 0.1
    torch.testing.assert_close(moves[1], moves[0] / 2, rtol=1e-3, atol=1e-6)


def shuffled_otherwise(job: TrainingJob) -> float:
    """A loop of its own: torch's optimizer, its own order, no crop."""
    images, test = splits(job)
    model, recipe, rng = fresh(job, images), job.recipe, torch.Generator().manual_seed(job.seed)
    optimizer = torch.optim.SGD(
        model.parameters(),
        recipe.lr,
        recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=True,
    )
    for epoch in range(recipe.epochs):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(epoch)
        for rows in torch.randperm(len(images), generator=rng).split(recipe.batch_size):
            optimizer.zero_grad()
            cross_entropy(model(images.images[rows] / 255), images.labels[rows]).backward()
            optimizer.step()
    return accuracy(model, test)


def test_with_other_batches_the_accuracies_of_three_seeds_overlap(
    nets: str, tmp_path: Path
) -> None:
    recipe = Recipe(epochs=8, lr=0.02, batch_size=64)
    jobs = [
        TrainingJob("fashion-mnist-mini", f"{nets}:small", recipe, augment=False, seed=seed)
        for seed in range(3)
    ]
    ours = [train(job, tmp_path / str(job.seed), progress=False).accuracy for job in jobs]
    theirs = [shuffled_otherwise(job) for job in jobs]
    assert min(ours) > 0.75 and max(min(ours), min(theirs)) <= min(max(ours), max(theirs)) + 0.01
