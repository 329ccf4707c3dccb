"""The model of a case: its weights, the facts of its training, and its accuracy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradveil.attacks import find
from gradveil.audits import AuditJob, Case, make_cases, run_audit
from gradveil.audits.model import (
    ModelFacts,
    describe_model,
    facts_hold,
    read_facts,
    save_facts,
)
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import following, generator
from gradveil.data import load
from gradveil.defenses import parse
from gradveil.defenses.weights import trained_under
from gradveil.models import build
from gradveil.models.accuracy import measure_accuracy
from gradveil.models.checkpoints import save_checkpoint
from gradveil.training.job import TrainingJob


def describe(case: Case, model: str = "lenet") -> ModelFacts | None:
    """What an audit knows of the model of this case."""
    job = AuditJob(model, "fashion-mnist-mini", auto=True, cases=(case,))
    test, victims = load("fashion-mnist-mini", "test"), torch.arange(1)
    return describe_model(job, case, test, victims, torch.device("cpu"))


def told(folder: Path, **settings: Any) -> ModelFacts:
    """What an audit reads in a checkpoint of such a training."""
    job = TrainingJob("fashion-mnist-mini", "mlp", **settings)
    settings = job.settings() | {
        "image_size": 28,
        "test_accuracy": 0.5,
        "step": 1,
    }
    save_checkpoint(
        folder / "model.safetensors", build("mlp", channels=1, size=28, classes=10), settings
    )
    case = Case(parse("3-1-7"), folder / "model.safetensors")
    found = describe(case, "mlp")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("defense", "without"),
    [
        ("3-1-7", "policy:3-1-7,augment=no"),
        ("3-1-7+43-18-18", "policy:3-1-7+43-18-18,augment=no"),
        ("random", "random:augment=no"),
        ("random:4,seed=2", "random:4,seed=2,augment=no"),
        ("3-1-7,then,prune:0.9", "policy:3-1-7,augment=no,then,prune:0.9"),
        ("prune:0.9", "prune:0.9"),
        ("none", "none"),
    ],
)
def test_a_training_without_crop_and_flip_was_under_the_policy_without_them(
    tmp_path: Path, defense: str, without: str
) -> None:
    assert told(tmp_path, defense=parse(defense)).under == defense
    assert told(tmp_path, defense=parse(defense), augment=False).under == without
    assert str(parse(without)) == without  # as an audit of that defense calls it


def test_a_policy_that_early_versions_wrote_beside_the_defense_is_read() -> None:
    facts = {"policy": "3-1-7", "defense": "none"}
    assert trained_under(facts) == "3-1-7"
    assert trained_under(facts | {"augment": False}) == "policy:3-1-7,augment=no"


def test_the_accuracy_of_a_model_that_draws_follows_from_the_seed_alone() -> None:
    test = load("fashion-mnist-mini", "test")
    plain = build("lenet", channels=1, size=28, classes=10, mean=test.mean, std=test.std, seed=5)
    model = parse("precode:k=8").protect_model(plain, (1, 28, 28))
    found = []
    for number, seed in enumerate((3, 3, 4)):
        torch.manual_seed(number)
        state = torch.random.get_rng_state()
        found.append(measure_accuracy(model, test, 500, seed))
        assert torch.equal(torch.random.get_rng_state(), state)
    assert found[0] == found[1] != found[2]
    with torch.no_grad(), following(generator(3, "test")):
        right = model.eval()(test.images.float() / 255)[:, :10].argmax(1) == test.labels
    assert found[0] == (float(right.double().mean()), 500)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain lenet, the same as PRECODE protects it, and a file without facts of its training."""
    folder = tmp_path_factory.mktemp("weights")
    plain = build("lenet", channels=1, size=28, classes=10, seed=5)
    facts = {"data": "fashion-mnist-mini", "model": "lenet", "image_size": 28, "policy": "none"}
    protected = parse("precode:k=8,seed=7").protect_model(plain, (1, 28, 28))
    save_checkpoint(
        folder / "plain.safetensors",
        plain,
        facts | {"defense": "none", "test_accuracy": 0.8, "step": 40},
    )
    save_checkpoint(
        folder / "precode.safetensors",
        protected,
        facts | {"defense": "precode:k=8", "test_accuracy": 0.7},
    )
    save_checkpoint(folder / "silent.safetensors", plain, {})
    return {name: folder / f"{name}.safetensors" for name in ("plain", "precode", "silent")}


def small(*cases: Case) -> AuditJob:
    attacks = {"adam-cosine": find("adam-cosine")}
    return AuditJob("lenet", "fashion-mnist-mini", attacks, cases=cases, images=1, steps=1)


def test_a_checkpoint_of_the_protected_model_is_audited_as_it_is(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    by_defense = {"": checkpoints["plain"], "precode:k=8": checkpoints["precode"]}
    defenses = [parse(text) for text in ("none", "precode:k=8", "prune:0.5", "precode:k=4")]
    cases = make_cases(defenses, checkpoints=by_defense)
    result = run_audit(small(*cases), tmp_path / "run", progress=False)
    none, protected, pruned, added = result.cases
    assert [case.settings["protected"] for case in result.cases] == [False, True, False, False]
    assert none.trained_so is not None and protected.trained_so is not None
    assert (none.trained_so.under, none.trained_so.step) == ("none", 40)
    assert result.baselines == {None: none.model}
    assert (protected.trained_so.under, protected.trained_so.step) == ("precode:k=8", None)
    for case in (none.trained_so, protected.trained_so):  # whatever their files say
        assert case.accuracy < 0.3 and (case.tested, case.measured_on) == (500, "test")
    assert pruned.model == none.model and pruned.trained_so is None  # not trained under pruning
    assert added.model is None  # the bottleneck is untrained
    trained = json.loads(json.dumps(result.plain()))[1]["trained"]
    assert trained["accuracy"] == protected.trained_so.accuracy


def test_a_model_with_a_defense_in_it_is_not_taken_for_a_plain_one(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    job = small(Case(parse("prune:0.5"), checkpoints["precode"]))
    with pytest.raises(
        GradveilError,
        match="was trained under precode:k=8, a part of the model: take that defense",
    ):
        run_audit(job, tmp_path / "run", progress=False)
    other = small(Case(parse("precode:k=9"), checkpoints["precode"]))
    with pytest.raises(GradveilError, match="does not fit the model"):
        run_audit(other, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_the_same_weights_have_the_same_accuracy_whatever_their_file_says(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    honest = describe(Case(weights=checkpoints["plain"]))
    assert honest is not None
    plain = build("lenet", channels=1, size=28, classes=10, seed=5)
    facts = {"data": "fashion-mnist-mini", "defense": "none", "step": 40}
    for said in (0.0, 0.99, 1.0):
        save_checkpoint(tmp_path / "w.safetensors", plain, facts | {"test_accuracy": said})
        assert describe(Case(weights=tmp_path / "w.safetensors")) == honest
    other = describe(Case(weights=checkpoints["silent"]))
    assert other is not None and other.weights_sha256 == honest.weights_sha256
    assert (other.accuracy, other.under) == (honest.accuracy, None)


@pytest.mark.parametrize(
    ("images", "tested", "measured_on"), [(4, 26, "others"), (30, 30, "victims")]
)
def test_own_images_without_a_test_split_are_measured_on_those_that_are_no_victims(
    checkpoints: dict[str, Path], images: int, tested: int, measured_on: str
) -> None:
    own = load("fashion-mnist-mini", "test").select(torch.arange(30))
    case = Case(weights=checkpoints["plain"])
    job = AuditJob("lenet", own, auto=True, cases=(case,), images=images)
    found = describe_model(job, case, own, torch.arange(images), torch.device("cpu"))
    assert found is not None and (found.tested, found.measured_on) == (tested, measured_on)
    rest = own.select(torch.arange(images if measured_on == "others" else 0, 30))
    model = build("lenet", channels=1, size=28, classes=10, seed=5)
    assert found.accuracy == measure_accuracy(model, rest)[0]


def test_facts_of_other_weights_or_of_an_early_version_do_not_hold(tmp_path: Path) -> None:
    assert not facts_hold(tmp_path, "a")
    for facts, holds in (
        (None, True),
        (ModelFacts(0.5, 10, "none", 4, "test", "a"), True),
        (ModelFacts(0.5, 10, "none", 4, "test", "b"), False),
        (ModelFacts(0.9, 10, "none", 4), False),
    ):
        save_facts(tmp_path, facts)
        assert facts_hold(tmp_path, "a") == holds


def test_an_accuracy_that_no_file_tells_is_measured(checkpoints: dict[str, Path]) -> None:
    test = load("fashion-mnist-mini", "test")
    model = build("lenet", channels=1, size=28, classes=10, seed=5, mean=test.mean, std=test.std)
    found = describe(Case(weights=checkpoints["silent"]))
    with torch.no_grad():
        right = (
            (
                build("lenet", channels=1, size=28, classes=10, seed=5)
                .eval()(test.images.float() / 255)
                .argmax(1)
                == test.labels
            )
            .float()
            .mean()
        )
    assert (
        found is not None
        and found.accuracy == pytest.approx(float(right))
        and (found.tested, found.under) == (500, None)
    )
    assert measure_accuracy(model, test, 100)[1] == 100 and model.training


def test_accuracy_is_measured_without_dropout_and_counts_logits_alone() -> None:
    test = load("fashion-mnist-mini", "test")

    class Knows(nn.Module):
        """Answer with the hidden label of each image; the last column is largest, and no logit."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            places = [
                int((test.images.float() / 255 == image).flatten(1).all(1).nonzero()[0, 0])
                for image in images
            ]
            return (
                torch.cat(
                    [
                        nn.functional.one_hot(test.labels[places], 10).float(),
                        torch.full((len(images), 1), 9.0),
                    ],
                    1,
                )
                * self.weight
            )

    assert measure_accuracy(Knows(), test, 20) == (1.0, 20)


def test_a_model_as_it_is_has_no_training_to_tell_of() -> None:
    assert describe(Case()) is None


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"accuracy": 0.5}', "3"])
def test_facts_that_are_damaged_are_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(GradveilError, match=r"model\.json"):
        read_facts(tmp_path)


def test_facts_are_read_back(tmp_path: Path) -> None:
    for facts in (None, ModelFacts(0.5, 10, "none", 4), ModelFacts(0.5, 10, None, None)):
        save_facts(tmp_path, facts)
        assert read_facts(tmp_path) == facts
    assert ModelFacts(1 / 3, 30, None, None).hits == 10
