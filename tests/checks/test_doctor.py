"""The doctor takes a user's values: module, tensors, defense, attack; bad ones are one line."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

import toys
from gradveil.attacks import Attack, Progress, dlg, find
from gradveil.checks import CHECKS, Diagnosis, Finding, Subject
from gradveil.checks.doctor import TRIAL, doctor
from gradveil.core.types import Observation, Reconstruction
from gradveil.defenses import Pruning
from gradveil.defenses.precode import Precode
from gradveil.models.checkpoints import save_checkpoint

IMAGES, LABELS = toys.pictures(40), torch.arange(40) % 5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the self-check, which is tested elsewhere and takes seconds."""
    found = Finding("note", "self-check", "left out", "nothing")
    monkeypatch.setattr("gradveil.checks.doctor.self_check", lambda _: found)


def names(found: Diagnosis) -> list[str]:
    return [one.name for one in found.findings]


def test_a_module_and_tensors_are_looked_at_and_stay_as_they_are() -> None:
    model = toys.lenet().float().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = doctor(model, IMAGES, LABELS, attack=None, device="cpu")
    assert names(found) == ["accuracy", "candidates"] and found.skipped == (TRIAL,)
    assert set(found.silent) | {"weights trained", "enough candidates", TRIAL} == set(CHECKS)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_pairs_loaders_and_images_give_the_same() -> None:
    def found(*images: Any, **more: Any) -> str:
        return str(doctor(toys.mlp(nn.ReLU()).float(), *images, attack=None, device="cpu", **more))

    pair = torch.utils.data.TensorDataset(IMAGES, LABELS)
    loader = torch.utils.data.DataLoader(pair, batch_size=7)
    split = replace(toys.split(40), labels=LABELS)
    assert found(IMAGES, LABELS) == found((IMAGES, LABELS)) == found(loader) == found(split)


def test_a_defense_and_an_attack_are_values() -> None:
    model = toys.mlp(nn.ReLU()).float()
    spare = toys.batch(120)
    more: dict[str, Any] = {
        "test": (spare.images, spare.labels),
        "public": (spare.images, spare.labels),
    }
    found = doctor(model, IMAGES, LABELS, attack=find("closed-form"), device="cpu", **more)
    assert TRIAL in found.silent and set(names(found)) == {"accuracy", "candidates"}
    pruned = doctor(
        model, IMAGES, LABELS, defense=Precode(k=4), attack="closed-form", device="cpu", **more
    )
    assert "random shares" in names(pruned)
    assert (
        doctor(model, IMAGES, LABELS, defense=Pruning(0.5), attack=None, device="cpu").errors == 0
    )


def test_an_attack_by_name_is_short_and_one_by_value_as_it_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Any] = []

    def diagnose(subject: Subject, _: object) -> Diagnosis:
        tried.append(subject.attack)
        return Diagnosis((), (), ())

    monkeypatch.setattr("gradveil.checks.doctor.diagnose", diagnose)
    model = toys.lenet().float()
    for attack, steps in (("dlg", None), (replace(dlg, steps=7), None), ("dlg", 3)):
        doctor(model, IMAGES, LABELS, attack=attack, steps=steps, device="cpu")
    doctor(model, IMAGES, LABELS, attack="dlg", steps=0, device="cpu")
    assert [attack and attack.steps for attack in tried] == [100, 7, 3, None]


def test_a_checkpoint_of_the_protected_or_the_plain_model_is_loaded(tmp_path: Path) -> None:
    path, plain, defense = tmp_path / "m.safetensors", toys.lenet().float(), Precode(k=4)
    for saved, settings in (
        (plain, {}),
        (defense.protect_model(plain), {"defense": "precode:k=4"}),
    ):
        save_checkpoint(path, saved, settings)
        found = doctor(
            plain, IMAGES, LABELS, defense=defense, checkpoint=str(path), attack=None, device="cpu"
        )
        assert found.errors == 0 and "accuracy" in names(found)
    said = toys.refused(doctor, plain, IMAGES, LABELS, checkpoint=path, device="cpu")
    assert "was trained under precode:k=4, a part of the model: take that defense, not none" in said


def test_a_diagnosis_shows_itself_as_text_and_as_json() -> None:
    findings = Finding("note", "a", "means", "do"), Finding("error", "b", "means", "do")
    skipped = "d", "f, g: no file says it", "e"
    found = Diagnosis(findings, ("c",), skipped, Finding("note", "self", "well", "none"))
    assert str(found).splitlines() == [
        "error   b: means",
        "        do",
        "note    a: means",
        "        do",
        "well    1 check: c",
        "skipped 2 checks: d, e",
        "skipped f, g: no file says it",
        "note    self: well",
        "        none",
    ]
    assert repr(found) == str(found) and found.errors == 1
    assert json.loads(json.dumps(found.plain())) == found.plain()
    assert [one["name"] for one in found.plain()["findings"]] == ["a", "b", "self"]


def test_a_diagnosis_sends_no_codes_to_a_terminal() -> None:
    odd = Finding("note", "a\x1b[2J\nerror", "layer \x1b]0;title\x07\n\u202e", "rename \x9b it")
    said = r"a\x1b[2J\nerror: layer \x1b]0;title\x07 \u202e"
    assert str(odd) == said + r"; rename \x9b it"
    found = Diagnosis((odd,), ("b\x1b",), (), odd)
    lines = ["note    " + said, r"        rename \x9b it"]
    assert str(found).splitlines() == [*lines, r"well    1 check: b\x1b", *lines]


class Failing(nn.Module):
    """A model whose pass raises or ends the program."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(3, 3), act

    def forward(self, images: Tensor) -> object:
        return self.act()


def broken() -> None:
    raise RuntimeError("it is\nbroken")


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (broken, "RuntimeError: it is broken"),
        (lambda: sys.exit("bye"), "SystemExit: bye"),
        (lambda: torch.zeros(1, 10, dtype=torch.complex64), "complex64"),
        (lambda: torch.zeros(1, 10, dtype=torch.int64), "int64"),
        (lambda: None, "gives None"),
    ],
)
def test_a_model_whose_pass_fails_is_an_error_among_the_findings(
    act: Callable[[], object], says: str
) -> None:
    found = doctor(Failing(act), toys.split(40), attack=None, device="cpu")
    assert found.errors == 1 and names(found) == ["model and images"]
    assert says in found.findings[0].means
    assert says in toys.refused(doctor, Failing(act), IMAGES, LABELS, attack=None, device="cpu")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": 3}, "model: a whole number; expected a torch.nn.Module"),
        ({"model": "nonet"}, "unknown model 'nonet'"),
        ({"images": 3}, "images: a whole number; expected a tensor"),
        ({"images": "cats"}, "unknown dataset 'cats'"),
        ({"images": IMAGES * 255}, "expected [0, 1]"),
        ({"labels": None}, "a tensor of images without labels"),
        ({"labels": LABELS.float()}, "labels of type torch.float32"),
        ({"public": 3}, "public: a whole number"),
        ({"test": (IMAGES, LABELS[:3])}, "test: 40 images and labels of shape (3,)"),
        ({"defense": "shield"}, "unknown defense 'shield'"),
        ({"defense": 3}, "defense: a whole number"),
        ({"attack": "magic"}, "unknown attack 'magic'"),
        ({"attack": 3}, "attack: a whole number; expected an Attack or its name"),
        ({"steps": -1}, "steps -1"),
        ({"batch_size": 0}, "batch size 0: it must be at least 1"),
        ({"batch_size": 41}, "batch size 41: images test has 40 images"),
        ({"local_steps": 0}, "local steps 0"),
        ({"checkpoint": "none.safetensors"}, "no checkpoint at none.safetensors"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
    ],
)
def test_bad_values_are_one_line(changes: dict[str, Any], says: str) -> None:
    given = {"model": toys.lenet().float(), "images": IMAGES, "labels": LABELS, "device": "cpu"}
    if isinstance(changes.get("images"), str):
        given["labels"] = None
    assert says in toys.refused(doctor, **(given | changes))


class Gray(Attack):
    """The same gray picture for every victim, or an error."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        if self.fails:
            raise ZeroDivisionError("gray")
        shape = seen[0].size, *seen[0].image_shape
        return [Reconstruction(torch.full(shape, 0.5), None, 1.0) for _ in seen]


def test_an_attack_of_ones_own_is_tried() -> None:
    model = toys.lenet().float()
    found = doctor(model, IMAGES, LABELS, attack=Gray(), device="cpu")
    assert names(found)[-1] == "blind"
    failed = doctor(model, IMAGES, LABELS, attack=Gray(fails=True), device="cpu").findings[-1]
    assert failed.level == "error" and "ZeroDivisionError: gray (test_doctor.py" in failed.means
