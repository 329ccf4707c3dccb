"""Training under defenses: policies, PRECODE, DP-SGD beside Opacus, and what a run says of them."""

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

from gradveil import models
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import derived, generator
from gradveil.data import Images, load
from gradveil.data.images import Batches
from gradveil.defenses import Chain, FeedbackPruning, PolicyDefense, Pruning, parse
from gradveil.defenses.pruning import Residuals
from gradveil.models.checkpoints import load_checkpoint, read_settings
from gradveil.training import Recipe, TrainingJob, train
from gradveil.transforms import Policy, Preparation


@pytest.fixture
def quick(nets: str) -> TrainingJob:
    """Two epochs of four steps; the last batch of an epoch is smaller."""
    return TrainingJob(
        "fashion-mnist-mini",
        f"{nets}:small",
        Recipe(epochs=2, lr=0.02, batch_size=30),
        fraction=0.05,
        seed=1,
    )


def whole_batch(job: TrainingJob, **changes: Any) -> TrainingJob:
    """One plain step of all images, each as it is."""
    return replace(
        job,
        recipe=Recipe(epochs=1, lr=1.0, momentum=0, weight_decay=0, batch_size=1_000),
        augment=False,
        **changes,
    )


def weights(job: TrainingJob, out: Path) -> dict[str, Tensor]:
    return load_file(train(job, out, progress=False).checkpoint)


def split_of(job: TrainingJob, name: str = "train") -> Images:
    assert isinstance(job.data, str)
    return (
        load(job.data, name, fraction=job.fraction, seed=job.seed)
        if name == "train"
        else load(job.data, name)
    )


def fresh(job: TrainingJob) -> nn.Module:
    """The protected model, as the run starts with it."""
    split = split_of(job)
    classes = len(split.classes)
    made = models.build(
        str(job.model),
        channels=split.channels,
        size=split.size,
        classes=classes,
        mean=split.mean,
        std=split.std,
        seed=job.seed,
    )
    return job.defense.protect_model(made, (split.channels, split.size, split.size))


def test_without_augment_a_policy_is_trained_as_the_one_without_crop_and_flip(
    quick: TrainingJob, tmp_path: Path
) -> None:
    policy = Policy.parse("3-1-7+43-18-18")
    plain = PolicyDefense(policy, augment=False)
    found = weights(replace(quick, defense=PolicyDefense(policy), augment=False), tmp_path / "a")
    other = weights(replace(quick, defense=plain), tmp_path / "b")
    assert all(torch.equal(found[key], other[key]) for key in found)
    for folder in ("a", "b"):
        facts = read_settings(tmp_path / folder / "model.safetensors")
        assert facts["trained_under"] == "policy:3-1-7+43-18-18,augment=no"


def test_in_a_chain_policies_change_the_images_in_turn(quick: TrainingJob) -> None:
    images, policies = split_of(quick).images, [Policy.parse("3+43"), Policy.parse("1-7")]
    chain = replace(quick, defense=parse("policy:3+43,augment=no,then,1-7,then,prune:0.5"))
    rng = generator(8)
    for padding, policy in zip((0, 4), policies, strict=True):
        images = Preparation(padding, flip=padding > 0, policy=policy)(images, rng)
    whole, plain = chain.preparation(), replace(chain, augment=False).preparation()
    assert whole is not None and plain is not None
    assert torch.equal(whole(split_of(quick).images, generator(8)), images)
    assert not torch.equal(plain(split_of(quick).images, generator(8)), images)


def test_precode_is_trained_with_task_loss_plus_beta_divergence(
    quick: TrainingJob, tmp_path: Path
) -> None:
    """The plain loop sees mu and sigma by a hook; torch's distributions give the divergence."""
    job = replace(quick, defense=parse("precode:k=8,beta=0.05"))
    trained = train(job, tmp_path, progress=False)
    model, split, recipe, seen = fresh(job).train(), split_of(job), job.recipe, list[Tensor]()
    next(m for n, m in model.named_modules() if n.endswith("encoder")).register_forward_hook(
        lambda _, __, out: seen.append(out)
    )
    optimizer = torch.optim.SGD(
        model.parameters(),
        recipe.lr,
        recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=True,
    )
    losses = []
    with torch.random.fork_rng(devices=[]):
        for epoch in range(recipe.epochs):
            torch.manual_seed(derived(job.seed, "forward", epoch))
            optimizer.param_groups[0]["lr"] = recipe.rate(epoch)
            total = 0.0
            for batch in Batches(
                split.images,
                split.labels,
                recipe.batch_size,
                generator(job.seed, "train", epoch),
                job.preparation(),
            ):
                optimizer.zero_grad()
                logits = model(batch.images)[:, :10]
                mu, raw = seen[-1].chunk(2, dim=1)
                normal = torch.distributions.Normal
                divergence = (
                    torch.distributions.kl_divergence(normal(mu, softplus(raw)), normal(0.0, 1.0))
                    .sum(1)
                    .mean()
                )
                loss = cross_entropy(logits, batch.labels) + 0.05 * divergence
                loss.backward()
                optimizer.step()
                total += loss.item() * len(batch)
            losses.append(total / len(split))
    found = load_checkpoint(trained.checkpoint, fresh(job)).state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
    assert [row["train_loss"] for row in trained.history] == pytest.approx(losses, rel=1e-4)


def test_precode_learns(quick: TrainingJob, tmp_path: Path) -> None:
    job = replace(
        quick,
        recipe=Recipe(epochs=8, lr=0.02, batch_size=20),
        fraction=0.2,
        augment=False,
        defense=parse("precode:k=16"),
    )
    trained = train(job, tmp_path, progress=False)
    losses = [row["train_loss"] for row in trained.history]
    assert losses[-1] < 0.6 * losses[0] and trained.accuracy > 0.5


def test_the_loss_scale_multiplies_the_penalty_too(quick: TrainingJob, tmp_path: Path) -> None:
    job = whole_batch(quick, defense=parse("precode:k=4,beta=0.01"))
    start = fresh(job).state_dict()
    half = replace(job, recipe=replace(job.recipe, loss_scale=0.5))
    moved = [weights(one, tmp_path / str(one.recipe.loss_scale)) for one in (job, half)]
    for key, value in start.items():
        torch.testing.assert_close(
            moved[1][key] - value, (moved[0][key] - value) / 2, rtol=1e-3, atol=1e-6
        )


def test_the_accuracies_of_a_precode_model_count_logits_alone(
    quick: TrainingJob, tmp_path: Path
) -> None:
    """The penalty, the eleventh column, is the largest answer: counting it would leave no hit."""
    job = replace(quick, defense=parse("precode:k=8,beta=1e3"), recipe=Recipe(epochs=0))
    trained, test, model = (
        train(job, tmp_path / "none", progress=False),
        split_of(job, "test"),
        fresh(job).eval(),
    )
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived(job.seed, "test", 0))
        answers = model(test.images / 255)
    assert bool((answers.argmax(1) == 10).all())
    assert trained.accuracy == pytest.approx(
        float((answers[:, :10].argmax(1) == test.labels).float().mean()), abs=1e-7
    )
    still = train(replace(job, recipe=Recipe(epochs=1, lr=1e-20)), tmp_path / "one", progress=False)
    assert still.history[0]["train_accuracy"] > 0


def test_accuracy_is_measured_without_the_dropout_of_the_defense(
    quick: TrainingJob, tmp_path: Path
) -> None:
    job = replace(quick, recipe=Recipe(epochs=0))
    plain, dropped = (
        train(replace(job, defense=parse(d)), tmp_path / d, progress=False).accuracy
        for d in ("none", "dropout:0.9")
    )
    assert plain == dropped


def test_the_second_pass_of_a_defense_meets_the_draws_of_the_first(
    quick: TrainingJob, tmp_path: Path
) -> None:
    """With nothing cut or clipped, both leave PRECODE's gradient, if it is of the same draws."""
    for after in ("soteria:0", "dp:norm=1e9,multiplier=1e-18"):
        job = whole_batch(quick, defense=parse("precode:k=8"))
        expected = weights(job, tmp_path / f"{after}-alone")
        found = weights(replace(job, defense=parse(f"precode:k=8,then,{after}")), tmp_path / after)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


def test_a_step_of_dp_sgd_is_that_of_opacus(quick: TrainingJob, tmp_path: Path) -> None:
    """With noise below rounding there, and none in Opacus; the bound clips some samples."""
    job = whole_batch(quick, defense=parse("dp:norm=4,multiplier=1e-15"))
    found, split, model = weights(job, tmp_path), split_of(job), fresh(job)
    with warnings.catch_warnings(action="ignore"):
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        wrapped = GradSampleModule(model)
        plain = torch.optim.SGD(wrapped.parameters(), lr=1.0)
        optimizer = DPOptimizer(
            plain, noise_multiplier=0.0, max_grad_norm=4.0, expected_batch_size=len(split)
        )
        cross_entropy(wrapped(split.images / 255), split.labels).backward()
        samples: list[Tensor] = [vars(parameter)["grad_sample"] for parameter in model.parameters()]
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in samples]).norm(dim=0)
        optimizer.step()
    assert 0 < int((norms > 4).sum()) < len(split)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("delta", [None, 1e-5])
def test_epsilon_is_that_of_opacus_for_the_steps_taken(
    quick: TrainingJob, tmp_path: Path, delta: float | None
) -> None:
    job = replace(quick, defense=parse("dp:norm=1,multiplier=0.9"), delta=delta, save_at=(0, 3))
    trained = train(job, tmp_path, progress=False)
    with warnings.catch_warnings(action="ignore"):
        from opacus.accountants import RDPAccountant

        expected = []
        for steps in (3, 8):
            accountant = RDPAccountant()
            for _ in range(steps):
                accountant.step(noise_multiplier=0.9, sample_rate=30 / 100)
            expected.append(accountant.get_epsilon(delta or 1 / 100))
    assert trained.epsilon == pytest.approx(expected[1]) and trained.delta == (delta or 1 / 100)
    early = read_settings(tmp_path / "steps" / "step-000003.safetensors")
    assert early["epsilon"] == pytest.approx(expected[0]) and early["delta"] == (delta or 1 / 100)
    assert read_settings(tmp_path / "steps" / "step-000000.safetensors")["epsilon"] == 0
    assert train(job, tmp_path, progress=False) == trained


def test_the_settings_say_the_defense(quick: TrainingJob, tmp_path: Path) -> None:
    (tmp_path / "found.toml").write_text(
        'format = "gradveil policies 1"\nbest = "3-1-7"\nhybrid = "3-1-7+5"\n'
        '[[policy]]\npolicy = "3-1-7"\n'
    )
    trained = train(
        replace(quick, defense=parse(f"{tmp_path / 'found.toml'},then,prune:0.50")),
        tmp_path / "run",
        progress=False,
    )
    settings = read_settings(trained.checkpoint)
    assert (
        settings["defense"] == "3-1-7+5,then,prune:0.5"
        and "policy" not in settings
        and settings["cuda_graphs"] is False
    )
    assert (
        json.loads((tmp_path / "run" / "settings.json").read_text())["defense"]
        == settings["defense"]
    )
    assert "epsilon" not in settings and trained.epsilon is None


def test_the_weights_are_those_of_the_protected_model(quick: TrainingJob, tmp_path: Path) -> None:
    job = replace(quick, defense=parse("dropout:0.2,then,precode:k=4,position=1"))
    trained = train(job, tmp_path, progress=False)
    found = load_checkpoint(trained.checkpoint, fresh(job)).state_dict()
    assert any(key.endswith("encoder.weight") for key in found)
    assert all(not torch.equal(value, found[key]) for key, value in fresh(job).state_dict().items())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"defense": "precode:position=nowhere"},
            "unknown position of defense precode:position=nowhere",
        ),
        (
            {"defense": "dp:norm=1,multiplier=1", "model": "own_training_nets:norm"},
            "1 is a BatchNorm2d.*take a model with GroupNorm",
        ),
        (
            {"defense": "soteria:0.5,layer=nowhere"},
            "unknown layer of defense soteria:0.5,layer=nowhere",
        ),
        (
            {"defense": "dp:norm=1,multiplier=1,sample_rate=0.5"},
            "batches of 30 of 100 images have a sample_rate of 0.3",
        ),
        (
            {"defense": "dp:norm=1,multiplier=1e-170"},
            "with a multiplier below 1e-20 there is no epsilon",
        ),
        (
            {"defense": "soteria:0.5", "model": "own_training_nets:shared"},
            "'own_training_nets:shared' cannot be trained with defense soteria",
        ),
    ],
)
def test_a_defense_that_does_not_fit_is_refused_before_anything_is_written(
    quick: TrainingJob, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    changes = {**changes, "defense": parse(changes["defense"])}
    with pytest.raises(GradveilError, match=says) as error:
        train(replace(quick, save_at=(0,), **changes), tmp_path / "run", progress=False)
    assert not list(tmp_path.iterdir()) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"defense": "prune:0.5"}, "defense: a text; expected a Defense"),
        ({"data": 3}, "data: a whole number; expected an Images or its name"),
        ({"model": None}, "model: None; expected a torch.nn.Module or its name"),
        ({"test": b"x"}, "test: a bytes; expected an Images or its name"),
        (
            {"defense": parse("prune:0.5"), "delta": 1e-3},
            "delta 0.001: it is for DP-SGD's epsilon, and the defense is prune:0.5",
        ),
        (
            {"defense": parse("dp:norm=1,multiplier=1"), "delta": 1.0},
            "delta 1: it must be between 0 and 1",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_the_job_itself(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(GradveilError, match="^" + re.escape(says)):
        TrainingJob(**({"data": "fashion-mnist-mini", "model": "mlp"} | changes))


@pytest.mark.usefixtures("without_opacus")
def test_without_opacus_a_training_by_dp_sgd_does_not_start(
    quick: TrainingJob, tmp_path: Path
) -> None:
    with pytest.raises(GradveilError, match=r"pip install gradveil\[dp\]"):
        train(
            replace(quick, defense=parse("dp:norm=1,multiplier=1")),
            tmp_path / "run",
            progress=False,
        )
    assert not list(tmp_path.iterdir())


def test_what_a_chain_keeps_comes_back_from_a_checkpoint_as_it_was(tmp_path: Path) -> None:
    defense = Chain((FeedbackPruning(0.5), Pruning(0.5)))
    kept = Residuals({"a": torch.rand(3)}, {"a": torch.rand(3)})
    torch.save(defense.pack_state((kept, None)), tmp_path / "file")
    packed = torch.load(tmp_path / "file", weights_only=True)
    state = defense.unpack_state(packed, torch.device("cpu"))
    assert (
        isinstance(state, tuple)
        and len(state) == len(defense.members)
        and state[1] is None
        and isinstance(state[0], Residuals)
    )
    assert torch.equal(state[0].momentum["a"], kept.momentum["a"]) and torch.equal(
        state[0].unsent["a"], kept.unsent["a"]
    )
    with pytest.raises(GradveilError, match="keeps an object between rounds, which no checkpoint"):
        Pruning(0.5).pack_state(object())
