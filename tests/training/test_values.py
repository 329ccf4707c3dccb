"""Training by values: a user's own module, tensors and defenses, in Python and by name."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import toys
from gradveil.core.errors import GradveilError
from gradveil.core.locks import alone
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Gradients
from gradveil.data import load
from gradveil.data.images import as_images, divided
from gradveil.defenses import Defense, Moment, State, chain, parse
from gradveil.models.checkpoints import read_settings
from gradveil.training import Recipe, TrainingJob, TrainingResult, train, train_model
from gradveil.training.job import refuse_other


def pictures(count: int = 60) -> tuple[Tensor, Tensor]:
    """Images whose class shows in the brightness of a corner."""
    rng = generator(0, "pictures")
    labels = torch.arange(count) % 3
    images = torch.randint(0, 100, (count, 1, 8, 8), generator=rng)
    images[:, :, :4, :4] += 70 * labels[:, None, None, None]
    return images.to(torch.uint8), labels


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))


def quick(out: Path, *given: Any, **changes: Any) -> TrainingResult:
    settings = {"epochs": 2, "lr": 0.05, "batch_size": 16, "augment": False, "progress": False}
    return train_model(*(given or (net(), *pictures())), out=out, **(settings | changes))


@dataclass(frozen=True)
class Quantized(Defense):
    bits: int
    feedback: bool = False

    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: Generator
    ) -> tuple[Gradients, State]:
        before: Any = state or {}
        whole = {name: value + before.get(name, 0) for name, value in gradients.items()}
        shared = {name: self.rounded(value) for name, value in whole.items()}
        left = {name: whole[name] - value for name, value in shared.items()}
        return shared, left if self.feedback else None

    def rounded(self, value: Tensor) -> Tensor:
        scale: Tensor = value.abs().max().clamp_min(1e-12) / 2 ** (self.bits - 1)
        levels: Tensor = (value / scale).round()
        return levels * scale


@dataclass(frozen=True)
class Dimmed(Defense):
    def protect_batch(self, batch: Batch, rng: Generator) -> Batch:
        drawn = torch.rand(len(batch), 1, 1, 1, generator=rng).to(batch.images)
        return Batch(batch.images * drawn, batch.labels)


@dataclass(frozen=True)
class Blinding(Defense):
    def protect_batch(self, batch: Batch, rng: Generator) -> Batch:
        return Batch(batch.images - 1, batch.labels)


@dataclass(frozen=True)
class Keeping(Quantized):
    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: Generator
    ) -> tuple[Gradients, State]:
        return gradients, object()


def test_a_module_is_trained_as_a_copy_and_comes_back_with_its_accuracy(tmp_path: Path) -> None:
    model, test = net().eval(), pictures(30)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = quick(tmp_path / "run", model, *pictures(), test=test, epochs=30, lr=0.1)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    right = (found.model.eval()(test[0] / 255).argmax(1) == test[1]).float().mean()
    assert found.accuracy == pytest.approx(float(right)) and found.accuracy > 0.6
    weights = load_file(found.checkpoint)
    assert all(torch.equal(value, weights[k]) for k, value in found.model.state_dict().items())


def test_every_form_of_images_gives_the_same_weights(tmp_path: Path) -> None:
    images, labels = pictures()
    forms: dict[str, tuple[Any, ...]] = {
        "tensors": (images, labels),
        "floats": (images / 255, labels),
        "pair": ((images, labels),),
        "loader": (DataLoader(TensorDataset(images, labels), batch_size=7),),
        "images": (as_images(images, labels),),
    }
    found = [load_file(quick(tmp_path / n, net(), *f).checkpoint) for n, f in forms.items()]
    for other in found[1:]:
        assert all(torch.equal(value, other[name]) for name, value in found[0].items())


def test_without_test_images_about_a_fifth_is_set_apart(tmp_path: Path) -> None:
    whole = as_images(*pictures())
    rest, test = divided(whole)
    assert len(rest) + len(test) == 60 and 4 <= len(test) <= 20
    assert (rest.split, test.split) == ("train", "test")
    facts = read_settings(quick(tmp_path / "run").checkpoint)
    assert facts["images"] == len(rest)
    with pytest.raises(GradveilError, match="images: 1 images, too few to set some apart"):
        divided(as_images(*pictures(1)))


def test_settings_say_what_identifies_a_user_s_own_model_and_images() -> None:
    job = TrainingJob(as_images(*pictures()), net())
    settings = job.settings()
    assert settings["data"].startswith("images: 60 images, sha256 ")
    assert settings["model"].startswith("Sequential: 1091 parameters, sha256 ")
    assert TrainingJob(as_images(*pictures()), net()).settings() == settings
    other = net()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    assert replace(job, model=other).settings()["model"] != settings["model"]
    assert replace(job, data=as_images(*pictures(59))).settings()["data"] != settings["data"]
    assert "test" not in settings
    assert replace(job, test="fashion-mnist-mini").settings()["test"] == "fashion-mnist-mini"


def test_names_and_values_of_a_data_set_give_the_same_weights(tmp_path: Path) -> None:
    train_split, test = load("fashion-mnist-mini", "train"), load("fashion-mnist-mini", "test")
    options: dict[str, Any] = {"fraction": 0.05, "defense": "3-1-7", "augment": True}
    named = quick(tmp_path / "named", "lenet", "fashion-mnist-mini", **options)
    given = quick(tmp_path / "given", "lenet", train_split, test=test, **options)
    assert named.accuracy == given.accuracy
    weights, same = load_file(named.checkpoint), load_file(given.checkpoint)
    assert all(torch.equal(value, same[name]) for name, value in weights.items())


def test_a_second_call_reads_the_run_back(tmp_path: Path) -> None:
    first, again = quick(tmp_path / "run"), quick(str(tmp_path / "run"))  # type: ignore[arg-type]
    assert first == again and first.model is not again.model
    with pytest.raises(
        GradveilError, match=r"holds a training with other settings \(model Sequential: 1091 "
    ):
        quick(tmp_path / "run", nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), *pictures())


@pytest.mark.parametrize(
    ("given", "changes", "says"),
    [
        ((net(), pictures()[0]), {}, "images: a tensor of images without labels"),
        ((net(), "fashion-mnist-mini", pictures()[1]), {}, "labels: the data set 'fashion-"),
        ((net, *pictures()), {}, "model: a function; expected a torch.nn.Module or its name"),
        ((nn.Linear(5, 3), *pictures()), {}, "model Linear fails on images of shape (2, 1, 8, 8)"),
        ((net(), *pictures()), {"classes": 5}, "model Sequential gives (2, 3) for images"),
        ((net(), *pictures()), {"classes": 2}, "images: label 2; there are 2 classes, 0 to 1"),
        ((net(), *pictures()), {"test": pictures()[0]}, "test: a tensor of images without labels"),
        (
            (net(), *pictures()),
            {"test": (torch.zeros(2, 3, 8, 8), [0, 1])},
            "test: images of shape (3, 8, 8); those to train on have (1, 8, 8)",
        ),
        (
            (net(), *pictures()),
            {"test": (pictures()[0], pictures()[1] + 1)},
            "test: label 3; there are 3 classes",
        ),
        ((net(), *pictures()), {"defense": 4}, "defense: a whole number; expected a Defense"),
        ((net(), *pictures()), {"fraction": 0.0}, "fraction 0.0 is out of range"),
        ((net(), *pictures()), {"image_size": 9}, "image size 9: the images given are 8 x 8"),
        ((net(), *pictures()), {"defense": Blinding()}, "gave images with values from -0.99"),
        ((net(), *pictures()), {"defense": Keeping(4)}, "keeps an object between rounds"),
        ((net(), *pictures()), {"lr": 0.0}, "lr 0.0: it must be above 0"),
        ((net().double(), *pictures()), {}, "and training is in torch.float32: give model.float()"),
    ],
)
def test_what_cannot_be_trained_is_one_line_and_writes_nothing(
    tmp_path: Path, given: tuple[Any, ...], changes: dict[str, Any], says: str
) -> None:
    assert says in toys.refused(quick, tmp_path / "run", *given, **changes)
    assert not list(tmp_path.iterdir())


def test_an_own_defense_changes_what_the_optimizer_gets(tmp_path: Path) -> None:
    plain, fine, coarse = (
        load_file(quick(tmp_path / name, defense=defense).checkpoint)
        for name, defense in (
            ("plain", Defense()),
            ("fine", Quantized(22)),
            ("coarse", Quantized(2)),
        )
    )
    for name, value in plain.items():
        torch.testing.assert_close(fine[name], value, rtol=1e-3, atol=1e-4)
    assert any(not torch.allclose(coarse[name], value, atol=1e-3) for name, value in plain.items())


@pytest.mark.parametrize("text", ["3-1-7", "policy:3+43,augment=no,then,1-7"])
def test_a_policy_after_an_own_defense_of_images_sees_what_it_left(
    tmp_path: Path, text: str
) -> None:
    """Where a part has to see each batch, all parts do, in the order of the chain."""
    parts = chain([Dimmed(), parse(text)])
    job = TrainingJob(as_images(*pictures()), net(), Recipe(epochs=2), defense=parts)
    assert job.preparation() is None and job.on_batch == job.defense
    first, again = (
        load_file(train(job, tmp_path / str(number), progress=False).checkpoint)
        for number in range(2)
    )
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    other = replace(job, defense=parse(text))
    assert other.preparation() is not None and other.on_batch is None


class Stopping(nn.Module):
    left = 10**9  # passes in training mode

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            Stopping.left -= 1
            if Stopping.left < 0:
                raise KeyboardInterrupt
        answers: Tensor = self.inner(images)
        return answers


@pytest.mark.parametrize(
    "defense",
    [
        Quantized(3, feedback=True),
        chain([Dimmed(), parse("3-1-7"), Quantized(3, feedback=True), parse("prune-feedback:0.5")]),
    ],
    ids=str,
)
def test_a_stopped_run_goes_on_with_what_an_own_defense_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defense: Defense
) -> None:
    recipe = Recipe(epochs=3, lr=0.05, batch_size=16)
    job = TrainingJob(as_images(*pictures()), Stopping(), recipe, defense)
    whole = train(job, tmp_path / "whole", progress=False)
    monkeypatch.setattr(Stopping, "left", 8)  # past the trial step and the first epoch
    with pytest.raises(KeyboardInterrupt):
        train(job, tmp_path / "run", progress=False)
    assert (tmp_path / "run" / "resume.ckpt").exists()
    monkeypatch.setattr(Stopping, "left", 10**9)
    again = train(job, tmp_path / "run", progress=False)
    weights, same = load_file(whole.checkpoint), load_file(again.checkpoint)
    assert all(torch.equal(value, same[name]) for name, value in weights.items())


def test_a_folder_that_another_process_trains_into_is_refused(tmp_path: Path) -> None:
    job = TrainingJob(as_images(*pictures()), net(), Recipe(epochs=1, lr=0.05))
    done = train(job, tmp_path / "run", progress=False)
    done.checkpoint.unlink()
    part = tmp_path / "run" / ".model.safetensors.x.part"  # which the other is writing
    part.touch()

    with (
        alone(tmp_path / "run", "training into"),
        pytest.raises(
            GradveilError, match=rf"^process {os.getpid()} on .* is training into .*run: wait for"
        ),
    ):
        train(job, tmp_path / "run", progress=False)
    assert part.exists()
    assert train(job, tmp_path / "run", progress=False).accuracy == done.accuracy
    assert not part.exists()


@pytest.mark.parametrize(
    ("policy", "defense", "wanted"),
    [("none", "none", "none"), ("3-1-7", "none", "3-1-7"), ("none", "prune:0.9", "prune:0.9")],
)
def test_a_folder_of_an_earlier_version_is_the_same_run_where_it_means_the_same(
    tmp_path: Path, policy: str, defense: str, wanted: str
) -> None:
    job = TrainingJob("fashion-mnist-mini", "mlp", defense=parse(wanted))
    old = job.settings() | {"policy": policy, "defense": defense}
    (tmp_path / "settings.json").write_text(json.dumps(old))
    refuse_other(tmp_path, job.settings())
    other = replace(job, defense=parse("clip:1"))
    with pytest.raises(GradveilError, match=r"other settings \(defense \S+ there, clip:1 here"):
        refuse_other(tmp_path, other.settings())


def test_names_of_training_are_there_without_lightning() -> None:
    code = (
        "import sys, gradveil.training, gradveil.training.job, gradveil.training.run;"
        "sys.exit('lightning' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_training_starts_from_the_weights_of_another_program(tmp_path: Path) -> None:
    given = toys.mlp(seed=5).float()
    torch.save({"state_dict": given.state_dict()}, tmp_path / "given.pt")
    model, images = toys.mlp().float(), toys.split(20, part="train")
    settings: dict[str, Any] = {
        "test": toys.split(20),
        "epochs": 0,
        "out": tmp_path / "run",
        "progress": False,
    }
    found = train_model(model, images, checkpoint=tmp_path / "given.pt", **settings)
    assert all(map(torch.equal, found.model.parameters(), given.parameters()))
    assert read_settings(found.checkpoint)["start"] == str(tmp_path / "given.pt")
    with pytest.raises(GradveilError, match="with other settings"):
        train_model(model, images, **settings)
