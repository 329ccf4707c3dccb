"""The audit of a user's tensors, module, defense and attack, which no registry knows."""

import copy
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradveil.attacks import Attack, adam_cosine, find
from gradveil.attacks.base import Progress
from gradveil.audits import AuditResult, audit
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.types import Gradients, Observation, Reconstruction
from gradveil.data import load
from gradveil.defenses import Defense, Moment, Pruning, State


@dataclass(frozen=True)
class Rounding(Defense):
    """Rounds gradients to multiples of `step`; its note is hostile to a page and a terminal."""

    acts_on = "gradients"

    step: float = 0.01
    note: str = ""

    def protect_gradients(
        self, gradients: Gradients, moment: Moment, state: State, rng: Generator
    ) -> tuple[Gradients, State]:
        rounded = {name: (g / self.step).round() * self.step for name, g in gradients.items()}
        return rounded, state


@dataclass(frozen=True)
class Checkered(Attack):
    """Always the same picture."""

    def reconstruct(
        self, seen: Sequence[Observation], rng: Generator, progress: Progress
    ) -> list[Reconstruction]:
        rows, columns = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
        image = ((rows + columns) % 2).float()
        images = [image.expand(one.size, *one.image_shape) for one in seen]
        return [Reconstruction(found, None, 0.5, "ok") for found in images]


@dataclass(frozen=True)
class Narrow(Attack):
    """Takes less than an attack is given."""

    def reconstruct(self, seen: Sequence[Observation]) -> list[Reconstruction]:  # type: ignore[override]
        return []


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(6, 1, 8, 8, generator=Generator().manual_seed(1))


@pytest.fixture(scope="module")
def labels() -> Tensor:
    return torch.tensor([0, 1, 2, 0, 1, 2])


def make_model() -> nn.Module:
    """Four logits, three of which have images."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


@pytest.fixture
def model() -> nn.Module:
    return make_model()


QUICK: dict[str, Any] = {"progress": False, "device": "cpu"}


@pytest.fixture(scope="module")
def plain(images: Tensor, labels: Tensor, tmp_path_factory: pytest.TempPathFactory) -> AuditResult:
    """The audit of these tensors."""
    out = tmp_path_factory.mktemp("plain") / "run"
    return audit(make_model(), images, labels, attacks=["closed-form"], out=out, **QUICK)


def test_values_that_no_registry_knows_give_a_table(
    model: nn.Module, images: Tensor, labels: Tensor, tmp_path: Path
) -> None:
    public = torch.rand(9, 1, 8, 8, generator=Generator().manual_seed(2))
    result = audit(
        model,
        images,
        labels,
        public=(public, torch.arange(9) % 4),
        defenses=["none", Pruning(0.5), Rounding(0.25, "<b>[/x]&")],
        attacks=["auto", Checkered(), ("short", replace(adam_cosine, steps=2))],
        steps=2,
        victims=2,
        first=0,
        out=str(tmp_path / "run"),
        **QUICK,
    )
    mine = f"{Rounding.__module__}:Rounding(step=0.25, note='<b>[/x]&')"
    assert [case.defense for case in result.cases] == ["none", "prune:0.5", mine]
    for case in result.cases:
        names = dict.fromkeys(record.attack for record in case.of("attack"))
        assert {"adam-cosine", "closed-form", "checkered", "short"} <= set(names)
    assert {r.attack for r in result.cases[0].of("blind")} == {
        "blind: noise",
        "blind: gray",
        "blind: mean color",
        "blind: class mean",
    }
    text = str(result)
    assert "Sequential on images, seed 0" in text and "<b>[/x]&" in text.replace("\n", "")
    assert repr(result) == text and max(map(len, text.splitlines())) <= 110
    page = result._repr_html_()
    assert "&lt;b&gt;[/x]&amp;" in page and "<b>" not in page
    assert page.count("<tr>") == 1 + sum(
        row.truth == "used" for case in result.cases for row in case.rows
    )
    found = result.images("checkered")
    assert set(found) == {"original", "used", "found"} and found["found"].shape == (2, 1, 8, 8)
    assert torch.equal(found["original"], found["used"])
    assert float((found["original"] - images[:2]).abs().max()) <= 0.5 / 255 + 1e-6
    assert torch.equal(result.images("short", Pruning(0.5))["original"], found["original"])
    again = audit(  # in the same folder nothing is attacked again
        model,
        images,
        labels,
        public=(public, torch.arange(9) % 4),
        defenses=["none", Pruning(0.5), Rounding(0.25, "<b>[/x]&")],
        attacks=["auto", Checkered(), ("short", replace(adam_cosine, steps=2))],
        steps=2,
        victims=2,
        first=0,
        out=tmp_path / "run",
        **QUICK,
    )
    assert again == result


def test_without_public_images_only_noise_and_gray_are_guesses(plain: AuditResult) -> None:
    (case,) = plain.cases
    blind = [row.attack for row in case.rows if (row.kind, row.truth) == ("blind", "used")]
    assert blind == ["blind: noise", "blind: gray"] and case.rows[0].n == 6
    assert case.records[0].candidates == 0 and "rank" not in case.records[0].scores["used"]
    assert case.settings["no_lineup"] == ("class '0' has 2 distinct images, and a line-up needs 20")
    assert case.rows[0].lineup == "-" and case.rows[0].verdict.p_identified == 1.0


def test_a_model_in_float64_is_audited_to_its_ceilings_and_the_table_names_each_row_once(
    tmp_path: Path,
) -> None:
    images = torch.rand(24, 1, 8, 8, generator=Generator().manual_seed(1))
    labels = torch.zeros(24, dtype=torch.long)
    model, weights = make_model().double(), tmp_path / "weights.pt"
    torch.save(model.state_dict(), weights)
    result = audit(
        *(model, images, labels), attacks=["closed-form"], checkpoint=weights, victims=2, **QUICK
    )
    facts = result.cases[0].model
    assert facts is not None and facts.tested == 22  # all but the victims
    rows = {row.title: row for row in result.cases[0].rows}
    assert rows["ceiling: gradient line-up"].identified == rows["closed-form"].identified == 2
    assert {"sham", "blind: gray", "positive: closed-form"} <= {*rows}
    assert "sham: sham" not in str(result) and "ceiling: gradient line-up" in str(result)


@pytest.mark.parametrize("form", ["loader", "pairs", "generator", "named"])
def test_images_come_in_any_form(
    form: str,
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    tmp_path: Path,
    nets: str,
    plain: AuditResult,
) -> None:
    pairs = TensorDataset(images, labels)
    brought = {
        "loader": DataLoader(pairs, batch_size=4),
        "pairs": pairs,
        "generator": (pairs[number] for number in range(len(pairs))),
        "named": "fashion-mnist-mini",
    }[form]
    named = form == "named"
    result = audit(
        f"{nets}:linear" if named else model,
        brought,
        attacks=["closed-form"],
        out=tmp_path / "run",
        **QUICK,
    )
    assert result.cases[0].rows[0].n == (8 if named else 6)
    if not named:
        ours, theirs = (one.cases[0].of("attack") for one in (result, plain))
        assert [r.scores for r in ours] == [r.scores for r in theirs]


def test_public_images_may_stand_beside_a_named_data_set_or_be_one(
    tmp_path: Path, nets: str
) -> None:
    def blind(public: Any, name: str) -> list[float | None]:
        result = audit(
            f"{nets}:linear",
            "fashion-mnist-mini",
            public=public,
            attacks=["closed-form"],
            victims=1,
            out=tmp_path / name,
            **QUICK,
        )
        rows = result.cases[0].rows
        return [row.psnr.mean for row in rows if row.attack == "blind: class mean"]

    train = load("fashion-mnist-mini")
    few = train.select(range(20))
    assert blind(None, "usual") == blind("fashion-mnist-mini", "named") == blind(train, "given")
    assert blind((few.images, few.labels), "few") != blind(None, "usual")


def test_victims_among_the_public_images_are_told_unless_their_whole_line_ups_are_there() -> None:
    split = load("fashion-mnist-mini", "test")
    more: dict[str, Any] = {"attacks": ["closed-form"], "victims": 3, "sham": False, **QUICK}
    victims = [r.image for r in audit("mlp", split, **more).cases[0].of("attack")]
    others = [number for number in range(len(split)) if number not in victims]
    for known, says in (victims, "3 of the 3"), ([*victims[:1], *others[:9]], "1 of the 3"):
        some = split.images[known], split.labels[known]
        with pytest.warns(GradveilWarning, match=f"^public: {says} images attacked are among them"):
            audit("mlp", split, public=some, **more)
    for apart in (split, (split.images[others], split.labels[others])):
        audit("mlp", split, public=apart, **more)  # a warning would be an error


def test_other_public_images_are_another_audit(
    model: nn.Module, images: Tensor, labels: Tensor, tmp_path: Path
) -> None:
    def run(public: Any) -> AuditResult:
        asked: dict[str, Any] = QUICK | {"attacks": ["closed-form"], "out": tmp_path / "run"}
        return audit(model, images, labels, public=public, **asked)

    first = run((images, labels))
    with pytest.raises(GradveilError, match="other public_sha256"):
        run((images.flip(0), labels))
    assert run((images, labels)) == first


def test_a_module_that_is_handed_in_is_never_changed(
    model: nn.Module, images: Tensor, labels: Tensor, tmp_path: Path
) -> None:
    model.train()
    model[2].eval()  # type: ignore[index]  # each module keeps its mode
    calls: list[int] = []
    hook = model[1].register_forward_hook(lambda *_: calls.append(1))  # type: ignore[index]
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    hooks = dict(model[1]._forward_hooks)  # type: ignore[index]
    generator_before = torch.random.get_rng_state()
    with pytest.warns(GradveilWarning, match="hooks of its own"):  # a copy has them too
        audit(
            model,
            images,
            labels,
            defenses=["precode:k=4", "dropout:0.5", "soteria:0.5"],
            attacks=["auto"],
            steps=1,
            victims=1,
            out=tmp_path / "run",
            **QUICK,
        )
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert modes == [module.training for module in model.modules()]
    assert dict(model[1]._forward_hooks) == hooks  # type: ignore[index]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), generator_before)
    hook.remove()


class Uncopyable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)
        self.made = self.layer.weight * 2  # no leaf: torch refuses to copy it

    def forward(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.layer(pixels.flatten(1))
        return found


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made; a test that ends well leaves it empty."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield tmp_path
    assert not (tmp_path / "run").exists() and not [*(tmp_path / "temporary").iterdir()]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": 3}, "model: a whole number; expected a torch.nn.Module or its name"),
    ({"model": nn.Linear}, "model: the class Linear; expected a torch.nn.Module"),
    ({"model": "nope"}, "unknown model 'nope'"),
    ({"model": nn.Sequential(nn.Flatten(), nn.Linear(3, 4))}, "do not fit"),
    ({"model": nn.Identity()}, "no parameter"),
    ({"model": nn.Conv2d(1, 4, 3)}, "expected (1, classes)"),
    ({"model": Uncopyable()}, "Uncopyable cannot be copied"),
    ({"model": nn.DataParallel(make_model())}, "DataParallel: give the module that it wraps"),
    ({"images": [1, 2]}, "images: a list; expected a tensor (N, C, H, W)"),
    ({"images": None}, "images: None; expected a tensor (N, C, H, W)"),
    ({"images": torch.rand(6, 8, 8)}, "images: images of shape (6, 8, 8)"),
    ({"images": torch.rand(6, 1, 8, 7)}, "8 x 7 pixels; expected square"),
    ({"images": torch.rand(0, 1, 8, 8)}, "N at least 1"),
    ({"images": torch.rand(6, 1, 8, 8) * 255}, "expected [0, 1], or uint8"),
    ({"images": torch.rand(6, 1, 8, 8) - 0.5}, "expected [0, 1], or uint8"),
    ({"images": torch.full((6, 1, 8, 8), float("nan"))}, "values from nan to nan"),
    ({"images": torch.ones(6, 1, 8, 8, dtype=torch.long)}, "images of type torch.int64"),
    ({"labels": None}, "images: a tensor of images without labels; give labels too"),
    ({"labels": torch.zeros(5, dtype=torch.long)}, "6 images and labels of shape (5,)"),
    ({"labels": torch.zeros(6)}, "labels of type torch.float32"),
    ({"labels": torch.tensor([0, 1, 2, 0, 1, 4])}, "label 4; there are 4 classes, 0 to 3"),
    ({"labels": torch.tensor([0, 1, 2, 0, 1, -1])}, "label -1; class indices start at 0"),
    ({"labels": "abc"}, "images: labels are a text"),
    ({"classes": 2}, "label 2; there are 2 classes, 0 to 1"),
    ({"classes": 9}, "one logit for each of 9 classes"),
    ({"attacks": "dlg"}, "attacks: a text; expected a list, such as ['dlg']"),
    (
        {"attacks": [3]},
        "attacks: a whole number; expected an Attack, such as gradveil.attacks.dlg, or its name",
    ),
    ({"attacks": find("dlg")}, "attacks: a GradientMatching; expected a list"),
    ({"attacks": ["nope"]}, "unknown attack 'nope'"),
    ({"attacks": []}, "no attack was named"),
    ({"attacks": [Narrow()]}, "attack Narrow: reconstruct cannot be called with seen, rng and"),
    ({"attacks": ["class-mean"]}, "attack class-mean needs class means: give public images"),
    ({"defenses": "none"}, "defenses: a text; expected a list, such as ['prune:0.95']"),
    ({"defenses": Pruning(0.5)}, "defenses: a Pruning; expected a list"),
    (
        {"defenses": [0.95]},
        "defenses: a number; expected a Defense, such as Pruning(0.95), or its text",
    ),
    (
        {"defenses": [Pruning]},
        "defenses: the class Pruning; expected a Defense, such as Pruning(...)",
    ),
    ({"defenses": ["nope"]}, "unknown defense 'nope'"),
    ({"defenses": []}, "no defense was named"),
    ({"public": torch.rand(2, 1, 8, 8)}, "public: a tensor of images without labels"),
    ({"public": (torch.rand(2, 3, 8, 8), torch.zeros(2).long())}, "public: images of shape (3, 8"),
    ({"public": (torch.rand(1, 1, 8, 8), torch.tensor([7]))}, "public: label 7; there are 4"),
    ({"public": "nope"}, "unknown dataset 'nope'"),
    ({"victims": 7}, "images 0 to 6: images train has 6, from 0"),
    ({"victims": 0}, "images 0: it must be at least 1"),
    ({"victims": "3"}, "victims '3': expected a whole number"),
    ({"first": 6}, "images 6 to 6: images train has 6, from 0"),
    ({"batch_size": 0}, "batch size 0: it must be at least 1"),
    ({"batch_size": 4, "victims": 6}, "6 images in batches of 4: choose a multiple"),
    ({"steps": 0}, "steps 0: it must be at least 1"),
    ({"local_steps": 0}, "local steps 0"),
    ({"clean": "maybe"}, "unknown clean 'maybe': choose from no, yes, both"),
    ({"checkpoint": "none.safetensors"}, "no checkpoint at none.safetensors"),
    ({"device": "tpu"}, "unknown device 'tpu'"),
    ({"images": "fashion-mnist-mini"}, "labels: the data set fashion-mnist-mini has its own"),
    (
        {"images": "fashion-mnist-mini", "labels": None, "classes": 3},
        "classes: the data set fashion-mnist-mini has its own",
    ),
    ({"images": "nope", "labels": None}, "unknown dataset 'nope'"),
]


@pytest.mark.parametrize(("changes", "says"), WRONG)
def test_wrong_input_is_one_line_and_writes_nothing(
    folders: Path,
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    changes: dict[str, Any],
    says: str,
) -> None:
    asked = {"model": model, "images": images, "labels": labels, "attacks": ["adam-cosine"]}
    for out in (None, folders / "run"):
        with pytest.raises(GradveilError) as caught:
            audit(**({"out": out, "steps": 1} | QUICK | asked | changes))
        assert says in str(caught.value) and "\n" not in str(caught.value)


def test_crop_and_flip_alone_are_audited_beside_a_policy_unless_they_are_not_wanted(
    model: nn.Module, images: Tensor, labels: Tensor, tmp_path: Path
) -> None:
    for control, expected in (True, ["3-1-7", "policy:none"]), (False, ["3-1-7"]):
        result = audit(
            model,
            images,
            labels,
            defenses=["3-1-7"],
            attacks=["closed-form"],
            sham=False,
            control=control,
            out=tmp_path / f"{control}",
            **QUICK,
        )
        assert [case.defense for case in result.cases] == expected
    with_it = AuditResult.read(tmp_path / "True")
    assert [case.name for case in with_it.cases] == ["3-1-7", "policy:none, control of 3-1-7"]
    digests = {case.settings["weights_sha256"] for case in with_it.cases}
    assert len(digests) == 1
    for control, says in (
        (False, r"(only there: policy-none): go on without --no-control (control=True), or choose"),
        (True, r"(only here: policy-none): go on with --no-control (control=False), or choose"),
    ):
        with pytest.raises(GradveilError) as caught:
            audit(
                model,
                images,
                labels,
                defenses=["3-1-7"],
                attacks=["closed-form"],
                sham=False,
                control=control,
                out=tmp_path / f"{not control}",
                **QUICK,
            )
        assert says in str(caught.value)


def test_a_table_for_pandas_has_a_line_for_each_case_attack_and_truth(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = audit(
        model,
        images,
        labels,
        defenses=["none", "3-1-7"],
        attacks=["closed-form"],
        out=tmp_path / "run",
        **QUICK,
    )
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(GradveilError, match="to_pandas needs pandas: pip install pandas"):
        result.to_pandas()
    stand_in = ModuleType("pandas")
    stand_in.DataFrame = list  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", stand_in)
    lines = result.to_pandas()
    keys = [(line["defense"], line["kind"], line["truth"]) for line in lines]
    assert keys.count(("none", "blind", "used")) == 2 and ("none", "attack", "original") not in keys
    assert keys.count(("3-1-7", "attack", "used")) == keys.count(("3-1-7", "attack", "original"))
    first = next(line for line in lines if line["kind"] == "attack")
    row = next(row for row in result.cases[0].rows if row.kind == "attack")
    assert (first["n"], first["psnr"], first["identified"]) == (6, row.psnr.mean, row.identified)
    assert (
        first["psnr_std"] == row.psnr.std and first["identified_high"] == row.identified_bounds[1]
    )


def test_a_data_frame_has_a_column_for_each_value(plain: AuditResult) -> None:
    pandas = pytest.importorskip("pandas")
    frame = plain.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    (case,) = plain.cases
    assert list(frame["attack"]) == [row.attack for row in case.rows if row.truth == "used"]
    assert list(frame["psnr"]) == [row.psnr.mean for row in case.rows if row.truth == "used"]
    for name in ("psnr", "ssim_std", "identified_low"):
        assert frame[name].dtype == float
    for name in ("n", "failed", "identified", "candidates"):
        assert frame[name].dtype == int
    assert frame["better_than_blind"].dtype == bool
    means = frame[frame["kind"] == "blind"].groupby("attack")["over_blind"].mean()
    assert set(means.index) == {"blind: noise", "blind: gray"} and means.notna().all()


def test_the_result_lies_in_a_temporary_folder_unless_one_is_named(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = audit(model, images, labels, attacks=["closed-form"], **QUICK)
    assert result.out.parent == tmp_path and AuditResult.read(result.out) == result


def test_a_misspelled_argument_is_named_with_the_function() -> None:
    with pytest.raises(TypeError, match=r"^audit\(\) got an unexpected keyword argument 'atacks'$"):
        audit("lenet", "fashion-mnist-mini", atacks=["dlg"])  # type: ignore[call-arg]
