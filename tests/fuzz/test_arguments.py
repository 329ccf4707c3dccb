"""Every public function refuses wrong arguments in one line that names them, and writes nothing.

Each argument in turn is replaced by a value of a wrong type or range. A call may also do its work,
where the value makes sense.
"""

import inspect
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import gradveil as gv
import toys
from gradveil.core.errors import GradveilError

TRAIN, TEST, BATCH = toys.split(30, part="train"), toys.split(230, seed=1), toys.batch(2)
MODEL = toys.mlp().float()
SEEN = gv.Client(MODEL).share(BATCH.images, BATCH.labels).seen
FOUND, TRUTH = toys.pictures(2, size=16), toys.pictures(2, size=16, seed=1)

WRONG: tuple[Any, ...] = (
    *(None, "", "a", "\0", "x" * 5_000, b"a", -1, 0, 10**5_000, -(2**70), 0.5, True),
    *(math.nan, math.inf, -math.inf, 1e308, [], ["a"], [None], {}, (), (1, 2, 3), object()),
    *(int, nn.Linear, gv.Pruning, gv.Pruning(0.5), np.int64(3), np.float32(0.5), np.zeros(3)),
    *(torch.zeros(()), torch.full((2, 3, 8, 8), math.nan), torch.zeros(2, dtype=torch.bool)),
    *(lambda *_: None, toys.lenet(), gv.attacks.dlg, Path("nowhere"), "nowhere:nothing", "none"),
)


@dataclass(frozen=True)
class Call:
    """A function, arguments for it, and the names of all it takes.

    Of a job two arguments are wrong, so that it is refused at the latest when the others are right.
    """

    function: Callable[..., Any]
    right: dict[str, Any]
    names: tuple[str, ...]


def call(function: Callable[..., Any], *left_out: str, **right: Any) -> Call:
    names = [name for name in inspect.signature(function).parameters if name not in left_out]
    return Call(function, right, tuple(names))


QUICK: dict[str, Any] = {"progress": False, "device": "cpu"}
CLIENT = gv.Client(MODEL)
JOB = gv.AuditJob(MODEL, TEST, {"closed-form": gv.attacks.closed_form}, first=999)
TUNING = gv.TuningJob(data=TRAIN, model=MODEL, images=999)
SEARCH = gv.SearchJob(data=(TRAIN, TEST), model=MODEL, trials=1, keep=1)
CALLS: dict[str, Call] = {
    "audit": call(
        gv.audit,
        model=MODEL,
        images=BATCH.images,
        labels=BATCH.labels,
        steps=0,
        first=99,
        out="run",
        **QUICK,
    ),
    "run_audit": call(gv.run_audit, job=JOB, out="run", **QUICK),
    "train": call(gv.train, model=MODEL, images=TRAIN, epochs=-1, lr=0, out="run", **QUICK),
    "doctor": call(
        gv.doctor,
        model=MODEL,
        images=BATCH.images,
        labels=BATCH.labels,
        batch_size=9,
        steps=-1,
        device="cpu",
    ),
    "search_policies": call(
        gv.search_policies, model=MODEL, data=(TRAIN, TEST), trials=0, hybrid=0, out="run", **QUICK
    ),
    "run_search": call(gv.run_search, job=SEARCH, engine="none", out="run", **QUICK),
    "tune": call(gv.tune, model=MODEL, data=TRAIN, images=999, trials=0, out="run", **QUICK),
    "run_tuning": call(gv.run_tuning, job=TUNING, out="run", **QUICK),
    "reconstruct": call(
        gv.reconstruct,
        before="before.pt",
        after="after.pt",
        model=MODEL,
        image_shape=(3, 8, 8),
        device="cpu",
    ),
    "as_images": call(gv.as_images, images=BATCH.images, labels=BATCH.labels),
    "psnr": call(gv.psnr, found=FOUND, truth=TRUTH),
    "mse": call(gv.mse, found=FOUND, truth=TRUTH),
    "ssim": call(gv.ssim, found=FOUND, truth=TRUTH),
    "psnr_affine": call(gv.psnr_affine, found=FOUND, truth=TRUTH),
    "identify": call(gv.identify, found=FOUND, candidates=TRUTH, index=torch.arange(2)),
    "Client": call(gv.Client, model=MODEL),
    "Client.share": call(CLIENT.share, images=BATCH.images, labels=BATCH.labels),
    "Client.share_each": call(CLIENT.share_each, images=BATCH.images, labels=BATCH.labels),
    "AuditJob": call(gv.AuditJob, model=MODEL, data=TEST, auto=True),
    "TrainingJob": call(gv.TrainingJob, data=TRAIN, model=MODEL),
    "TuningJob": call(gv.TuningJob, data=TRAIN, model=MODEL),
    "SearchJob": call(gv.SearchJob, data=(TRAIN, TEST), model=MODEL),
    "Recipe": call(gv.Recipe),
    "Protocol": call(gv.Protocol),
    "Case": call(gv.Case),
    "Pruning": call(gv.Pruning, share=0.5),
    "GaussianNoise": call(gv.GaussianNoise, scale=0.5),
    "Clipping": call(gv.Clipping, norm=0.5),
    "DPSGD": call(gv.DPSGD, norm=1.0, multiplier=1.0),
    "Precode": call(gv.Precode),
    "DropoutDefense": call(gv.DropoutDefense, p=0.5),
    "Soteria": call(gv.Soteria, share=0.5),
    "RandomPolicies": call(gv.RandomPolicies),
    "Policy.parse": call(gv.Policy.parse, text="3-1-7"),
    "Policy.load": call(gv.Policy.load, path="none.toml"),
    "attack": call(gv.attacks.closed_form, seen=SEEN, seed=0),
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """The current folder, and that of temporary files: both stay empty."""
    patch = pytest.MonkeyPatch()
    with tempfile.TemporaryDirectory() as made:
        here = Path(made, "here")
        here.mkdir()
        patch.chdir(here)
        patch.setattr(tempfile, "tempdir", str(here))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield here
        patch.undo()


def outcome(asked: Call, changes: dict[str, Any], folder: Path) -> str | None:
    """The line that refuses the call; None where it did its work."""
    try:
        asked.function(**(asked.right | changes))
    except GradveilError as error:
        text = str(error)
        assert text and "\n" not in text and len(text) < 2_000, text
        assert not [*folder.rglob("*")], text
        return text
    return None


@pytest.mark.parametrize("name", CALLS)
def test_each_argument_is_checked(name: str, folder: Path) -> None:
    asked = CALLS[name]
    for argument in asked.names:
        for value in WRONG:
            outcome(asked, {argument: value}, folder)


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_several_wrong_arguments_are_refused_too(folder: Path, data: st.DataObject) -> None:
    asked = CALLS[data.draw(st.sampled_from(sorted(CALLS)))]
    names = data.draw(st.lists(st.sampled_from(asked.names), min_size=1, max_size=4, unique=True))
    outcome(asked, {name: data.draw(st.sampled_from(WRONG)) for name in names}, folder)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("audit", {"seed": "a"}, "seed 'a': expected a whole number"),
        ("audit", {"seed": True}, "seed True: expected a whole number"),
        ("audit", {"out": ""}, "out '': expected a path"),
        ("audit", {"model": nn.Linear}, "model: the class Linear; expected a torch.nn.Module"),
        ("audit", {"attacks": [gv.GradientMatching]}, "such as GradientMatching(...), or its name"),
        ("train", {"lr": "a"}, "lr 'a': expected a number"),
        ("train", {"progress": 1}, "progress 1: expected True or False"),
        ("train", {"save_at": [1, "a"]}, "save at: a list; expected a list, each a whole number"),
        ("search_policies", {"race": "yes"}, "race 'yes': expected True or False"),
        ("reconstruct", {"image_shape": (3, 8)}, "image shape: a tuple; expected a list of 3"),
        ("doctor", {"attack": gv.attacks.closed_form.__class__}, "attack: the class Linear"),
        ("Client", {"loss": nn.CrossEntropyLoss}, "loss: the class CrossEntropyLoss; expected a"),
        ("Client", {"classes": 2.5}, "classes 2.5: expected a whole number"),
        (
            "Client.share",
            {"seed": "q"},
            "seed: a text; expected a whole number or a torch.Generator",
        ),
        ("psnr", {"found": [1]}, "found: a list; expected a torch.Tensor"),
    ],
)
def test_an_error_names_the_argument(
    name: str, changes: dict[str, Any], says: str, folder: Path
) -> None:
    assert says in str(outcome(CALLS[name], changes, folder))


def test_numbers_of_numpy_are_numbers() -> None:
    recipe = gv.Recipe(epochs=np.int64(3), lr=np.float32(0.5))  # type: ignore[arg-type]
    assert (recipe.epochs, recipe.lr) == (3, 0.5)
    assert {type(getattr(recipe, each.name)) for each in fields(recipe)} == {int, float}
