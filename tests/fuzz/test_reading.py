"""Files of every format, changed in any way, give a value or one line that names the file.

A change swaps a value for one of another type, drops or doubles parts, cuts, flips bytes, nests
brackets 100,000 deep, or writes numbers of 5,000 digits. Nothing but a `GradveilError` may come of
it, in two seconds of processor time.
"""

import copy
import gzip
import io
import json
import struct
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save
from torch import nn

import toys
from fuzz.changes import Choose, broken, json_text, swapped, toml_text
from gradveil.attacks import raced
from gradveil.attacks.attack_files import read_attack
from gradveil.audits.results import CASE
from gradveil.core.cell_files import read_cell
from gradveil.core.errors import GradveilError
from gradveil.core.formats import RecordLine, TrainedModel
from gradveil.core.reading import read_json, read_lines
from gradveil.data import load
from gradveil.models.checkpoints import load_checkpoint, read_resume, read_settings
from gradveil.models.weight_files import read_weights
from gradveil.papers.records import read_case
from gradveil.report.search import policies_table
from gradveil.report.verdict import read_thresholds
from gradveil.search.results import SearchResult, policies_text, trials_text
from gradveil.search.space import POLICIES
from gradveil.search.study import Study
from gradveil.transforms import Policy

QUICK, LONG = 40, 1_000  # files of each format
SECONDS = 2.0  # of processor time for one file
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def safetensors(
    choose: Choose, facts: Any, tensors: dict[str, torch.Tensor] | None = None
) -> bytes:
    tensors = tensors or model().state_dict()
    if choose(2):
        return save(tensors, {"gradveil": json_text(facts, choose).decode("latin1")})
    data = save(tensors, {"gradveil": json.dumps(facts)})
    if choose(2):
        return broken(data, choose)
    (length,) = struct.unpack("<Q", data[:8])
    head = json_text(json.loads(data[8 : 8 + length]), choose)
    return struct.pack("<Q", len(head)) + head + data[8 + length :]


def npz(choose: Choose) -> bytes:
    file = io.BytesIO()
    arrays = {name: value.numpy() for name, value in model().state_dict().items()}
    np.savez_compressed(file, allow_pickle=False, **arrays)
    data = file.getvalue()
    if choose(2):
        return broken(data, choose)
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(changed, "w") as target:
        names = source.namelist()
        spot = choose(len(names))
        for number, name in enumerate(names):
            member = source.read(name)
            if number == spot:
                shapes = (b"(99999999999,), }", b"(-1,), }", b"'x', }", b"((((((", b"(2**99,), }")
                member = (
                    broken(member, choose)
                    if choose(2)
                    else member.replace(b"(4,), }", shapes[choose(len(shapes))])
                )
            target.writestr(name, member)
    return changed.getvalue()


def pickled(choose: Choose, value: Any) -> bytes:
    """With odd values in place of tensors, tensors without values, or damaged bytes."""
    tensors = (
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2).to(torch.complex64),
        torch.ones(1).expand(10**9),
        torch.ones(2).to(torch.float8_e5m2),
    )
    kind = choose(3)
    tree = swapped(value, choose) if kind else value
    if kind == 2 and isinstance(tree, dict):
        tree = {**tree, "0.weight": tensors[choose(len(tensors))]}
    file = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        torch.save(tree, file, _use_new_zipfile_serialization=choose(4) > 0)
    return file.getvalue() if kind else broken(file.getvalue(), choose)


# The state that a stopped training leaves, but for its loops.
STATE: dict[str, Any] = {
    "epoch": 0,
    "global_step": 0,
    "pytorch-lightning_version": "2.6.6",
    "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 1}}}},
    "callbacks": {},
    "optimizer_states": [{"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
    "lr_schedulers": [],
    "history": [{"epoch": 1, "train_loss": 0.5, "test_accuracy": 0.1}],
}
QUANTITY = {"mean": 1.5, "error": 0.25, "n": 3}
SEARCH: dict[str, Any] = {
    "format": "gradveil search 1",
    "settings": {
        "data": "x",
        "model": "lenet",
        "trials": 2,
        "keep": 1,
        "threshold": -85.0,
        "score": "probe",
        "rule": "code",
        "sampler": "random",
        "seed": 0,
    },
    "trials": [
        {"number": 0, "policy": "3-1-7", "state": "scored", "quantities": {"ssim": QUANTITY}},
        {"number": 1, "policy": "none", "state": "dropped", "quantities": {"ssim": QUANTITY}},
    ],
    "kept": [0],
    "front": [],
    "best": "3-1-7",
    "hybrid": "3-1-7+43-18-18",
    "no_hybrid": "",
    "saving": {"dropped": 1, "scored": 2, "all": 3, "unjudged": 0, "share": 0.5},
    "notes": ["a note"],
    "study": "gradveil",
    "storage": "study.journal",
    "confirmed": {"untrained": {"none": "none", "random": "3+4", "single": "3-1-7"}},
    "words": [],
    "scored": ["0123456789abcdef"],
}
FACTS: dict[str, Any] = {
    "model": "lenet",
    "data": "fashion-mnist-mini",
    "step": 3,
    "epochs": 1,
    "test_accuracy": 0.5,
    "history": [{"epoch": 1, "train_loss": 0.5}],
    "defense": "none",
    "policy": "none",
    "augment": True,
    "versions": {"gradveil": "0.1.0"},
}


@cache
def kept(pattern: str) -> bytes:
    """The first of the files kept with the benchmarks."""
    return min(RESULTS.glob(pattern)).read_bytes()


def records(choose: Choose) -> bytes:
    lines = kept("grids/*/*/records.jsonl").splitlines()[:4]
    spot = choose(len(lines))
    lines[spot] = json_text(json.loads(lines[spot]), choose)
    data = b"\n".join(lines) + b"\n"
    return broken(data, choose) if choose(4) == 0 else data


def use_settings(found: dict[str, Any]) -> None:
    """As the tables and pictures of an audit do."""
    assert f"{found['model']} on {found['data']}, {found['labels']}, seed {found['seed']:d}"
    assert found["images"] + 1 > 1 and all(isinstance(name, str) for name in found["attacks"])
    assert isinstance(found["defense"], str)


def use_record(record: Any) -> None:
    assert record.image + record.chunk >= 0 and f"{record.seconds:.3f}{record.attack:>20}"


def use_facts(found: dict[str, Any]) -> None:
    assert f"{found.get('test_accuracy', 0.0):.1%}{found.get('step', 0):06d}"
    assert all(f"{row.get('train_loss', 0):.3f}" for row in found.get("history", ()))


def read_audit(path: Path) -> None:
    use_settings(CASE.read(path.parent))


def read_records(path: Path) -> None:
    for record, end in read_lines(path, RecordLine):
        use_record(record)
        assert 0 < end <= path.stat().st_size


def read_search(path: Path) -> None:
    (path.parent / "settings.json").write_text(json.dumps(SEARCH["settings"]))
    found = SearchResult.read(path.parent)
    assert repr(found).isprintable() or "\n" in repr(found)
    assert found._repr_html_() and policies_table("kept", found.kept).rows
    assert (
        policies_text(found)
        and trials_text(found)
        and found.best in [trial.policy for trial in found.trials]
    )


@cache
def journal_lines() -> tuple[bytes, ...]:
    """The journal of a study with a finished, an abandoned and a claimed trial."""
    with tempfile.TemporaryDirectory() as folder:
        study = join(Path(folder) / "study.journal")
        first, _ = study.claim(2, 3)
        study.finish(first, "scored", {"ssim": [0.5, 0.25]})
        study.close()
        other = join(Path(folder) / "study.journal")
        other.claim(1, 3)
        other.close()
        return tuple((Path(folder) / "study.journal").read_bytes().splitlines())


def join(path: Path) -> Study[Policy]:
    return Study.open(path, "toy", {"images": 2}, "random", 0, ("ssim",), POLICIES)


def journal(choose: Choose) -> bytes:
    lines = [*journal_lines()]
    spot = choose(len(lines))
    match choose(4):
        case 0:
            del lines[spot]
        case 1:
            lines.insert(spot, lines[choose(len(lines))])
        case _:
            lines[spot] = json_text(json.loads(lines[spot]), choose)
    data = b"\n".join(lines) + b"\n"
    return broken(data, choose) if choose(8) == 0 else data


def read_journal(path: Path) -> None:
    study = join(path)
    try:
        for trial in study.finished(3):
            assert trial.state and trial.mean("ssim") <= 2**70
        assert study.busy(3) >= 0 and len(study.claim(1, 3)) <= 1
    finally:
        study.close()


def read_trained(path: Path) -> None:
    found = read_json(path, TrainedModel | None)
    assert found is None or 0 <= round(found.accuracy * found.tested) <= found.tested


def read_policies(path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        for which in ("hybrid", "best", "2"):
            Policy.load(path, which)


def read_checkpoint(path: Path) -> None:
    use_facts(read_settings(path))
    load_checkpoint(path, copy.deepcopy(model()))


def read_any_weights(path: Path) -> None:
    for value in read_weights(path).values():
        assert value.device.type == "cpu" and value.numel() >= 0


def read_state(path: Path) -> None:
    assert read_resume(path)["epoch"] >= 0


def read_cached(path: Path) -> None:
    """The manifest of a cache entry, of four pictures in a folder beside it."""
    found = load(str(path.parents[1] / "photos"))
    assert len(found) == 4 and int(found.labels.max()) < len(found.classes)
    assert len(found.mean) == 3 and "".join(found.classes)


@dataclass(frozen=True)
class Format:
    """The name of a file, how it is made and changed, and how it is read and used."""

    name: str
    make: Callable[[Choose], bytes]
    read: Callable[[Path], object]


def state(choose: Choose) -> bytes:
    return pickled(choose, STATE | {"state_dict": dict(model().state_dict())})


def audit_settings(choose: Choose) -> bytes:
    return json_text(json.loads(kept("grids/*/*/settings.json")), choose)


def manifest(choose: Choose) -> bytes:
    facts = {"classes": ["a", "b"], "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    return json_text(facts, choose)


def policies(choose: Choose) -> bytes:
    found = kept("searches/*/policies.toml").decode()
    return toml_text(f'{found}\n[images]\nscored = ["0123456789abcdef"]\n', choose)


def trained(choose: Choose) -> bytes:
    return json_text({"accuracy": 0.5, "tested": 10, "under": "none", "step": 3}, choose)


THRESHOLDS = """
defenses = ["prune:0.99"]
positive_control = true
[most]
identified = 0.05
psnr = 15.0
[least]
accuracy = 0.9
images = 32
"""
UPDATE: dict[str, Any] = {
    "client": "1",
    "round": 1,
    "gradients": False,
    "examples": 4.0,
    "members": [],
}


def read_spied(path: Path) -> None:
    """Read the file as what a spy kept of a client."""
    from gradveil.federated.spied import SENT, read_round, round_folder

    folder = round_folder(path.parent, 1)
    folder.mkdir(exist_ok=True)
    (folder / SENT).write_bytes(save(model().state_dict()))
    (folder / path.name).write_bytes(path.read_bytes())
    for update in read_round(path.parent, 1):
        update.as_gradients(0.1)


def cell(choose: Choose) -> bytes:
    return json_text(json.loads(kept("reproduce/audit-*/cell.json")), choose)


FEDERATION: dict[str, Any] = {
    "data": "fashion-mnist-mini",
    "model": "lenet",
    "defense": "none",
    "partition": "equal",
    "clients": 2,
    "rounds": 3,
    "batch_size": 8,
    "lr": 0.1,
    "momentum": 0.9,
    "audited": 32,
    "weight_decay": 5e-4,
    "fraction": 1.0,
    "train_mode": True,
    "spy_rounds": [1],
    "spy": 0,
    "attackers": ["dlg"],
    "seed": 0,
    "graph": None,
    "local_epochs": None,
    "steps": 3,
}
ROUNDS = [
    {"round": number, "test_accuracy": 0.5, "clients": 2, "seconds": 0.25} for number in (1, 2)
]


def read_federation(path: Path) -> None:
    """As `gradveil federate` and `gradveil report` do."""
    from gradveil.federated.job import FEDERATION as KIND

    with suppress(GradveilError):
        KIND.refuse_other(path.parent, FEDERATION)
    found = KIND.read(path.parent)
    assert f"{found['model']} {found['rounds']:d} {found['lr']:.3f}" and found["clients"] >= 1
    assert sorted(found["spy_rounds"])[:1] >= [0] or not found["spy_rounds"]


def new_learner() -> Any:
    from gradveil.federated.server import Learner
    from gradveil.training import Recipe

    return Learner(copy.deepcopy(model()), Recipe(3, 0.1))


def read_federated(path: Path) -> None:
    """Read the file as the point that a federated training goes on from."""
    from gradveil.federated.run import restore

    learner = new_learner()
    history = restore(path, [learner], 3)
    for parameter, state in learner.optimizer.state.items():
        assert state["momentum_buffer"].add(parameter).shape == parameter.shape
    assert all(f"{row['test_accuracy']:.1%}{row['round']:04d}" for row in history)


def federated(choose: Choose) -> bytes:
    weights = {f"0.model.{name}": value for name, value in model().state_dict().items()}
    momentum = {
        f"0.momentum.{name}": torch.ones_like(value) for name, value in model().named_parameters()
    }
    return safetensors(choose, ROUNDS, weights | momentum)


def read_kept_state(path: Path) -> None:
    """Read the file as what a client's defense kept."""
    from gradveil.defenses import parse
    from gradveil.federated.run import check_states

    check_states(path.parent, parse("prune-feedback:0.9"))


def kept_state(choose: Choose) -> bytes:
    """Damaged without, or within: a file in a file."""
    left: Any = {name: torch.ones_like(value) for name, value in model().named_parameters()}
    found = {"defense": "prune-feedback:0.9", "rounds": 1}
    if choose(2):
        return pickled(choose, found | {"state": saved(left)})
    return saved(found | {"state": pickled(choose, left)})


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def packed(choose: Choose) -> bytes:
    """The records of a kept audit."""
    data = gzip.compress(records(choose), mtime=0)
    return broken(data, choose) if choose(2) else data


def read_packed(path: Path) -> None:
    """As tables of the papers' experiments do."""
    for name in ("settings.json", "model.json"):
        (path.parent / name).write_bytes(kept(f"reproduce/audit-*/*/{name}"))
    read_case.cache_clear()
    case = read_case(path.parent)
    for record in case.records:
        use_record(record)
    for row in case.rows:
        assert row.n >= 0 and f"{row.seconds:.3f}"


WITH_FLOWER = (read_federation, read_federated, read_kept_state, read_spied)
FORMATS = {
    "federation": Format(
        "settings.json", lambda choose: json_text(FEDERATION, choose), read_federation
    ),
    "federated": Format("resume.safetensors", federated, read_federated),
    "kept state": Format("0-000001.state", kept_state, read_kept_state),
    "packed": Format("records.jsonl.gz", packed, read_packed),
    "cell": Format("cell.json", cell, read_cell),
    "thresholds": Format(
        "thresholds.toml",
        lambda choose: toml_text(THRESHOLDS, choose),
        read_thresholds,
    ),
    "attack": Format(
        "attack.toml", lambda choose: toml_text(toys.attack_file(raced), choose), read_attack
    ),
    "spied": Format("client-1.safetensors", lambda choose: safetensors(choose, UPDATE), read_spied),
    "settings": Format("settings.json", audit_settings, read_audit),
    "records": Format("records.jsonl", records, read_records),
    "journal": Format("study.journal", journal, read_journal),
    "search": Format("search.json", lambda choose: json_text(SEARCH, choose), read_search),
    "model": Format("model.json", trained, read_trained),
    "policies": Format("policies.toml", policies, read_policies),
    "checkpoint": Format(
        "model.safetensors", lambda choose: safetensors(choose, FACTS), read_checkpoint
    ),
    "weights": Format(
        "weights.safetensors", lambda choose: safetensors(choose, FACTS), read_any_weights
    ),
    "npz": Format("weights.npz", npz, read_any_weights),
    "pt": Format(
        "weights.pt",
        lambda choose: pickled(choose, dict(model().state_dict())),
        read_any_weights,
    ),
    "resume": Format("resume.ckpt", state, read_state),
    "cache": Format("manifest.json", manifest, read_cached),
}


def failure(read: Callable[[Path], object], path: Path, name: str) -> str | None:
    """What is wrong with how the file was read; None where it was read, or refused in one line."""
    began = time.process_time()
    try:
        read(path)
    except GradveilError as error:
        text = str(error)
        if "\n" in text or not text.isprintable() or len(text) > 2_000:
            return f"no line to print: {text[:200]!r}"
        if name not in text:
            return f"the file is not named: {text[:200]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    took = time.process_time() - began
    return f"{took:.1f} s" if took > SECONDS else None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For the files; beside it pictures, whose cache entry lies in it."""
    (tmp_path / "files").mkdir()
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "files"))
    for place in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / "photos" / place).mkdir(parents=True)
        for number in range(2):
            shade = 40 * number + len(place)
            Image.new("RGB", (4, 4), (shade, 0, 255 - shade)).save(
                tmp_path / "photos" / place / f"{number}.png"
            )
    return tmp_path / "files"


def path_of(form: Format, folder: Path) -> Path:
    """The file to be changed; that of the cache has a name of its own."""
    if form.read in WITH_FLOWER:
        pytest.importorskip("flwr.supercore")
        import gradveil.federated.run  # noqa: F401  # it takes longer than any file may

        new_learner()  # and so does torch's first optimizer
    if form.read is not read_cached:
        return folder / form.name
    if not [*folder.glob("*.json")]:
        load(str(folder.parent / "photos"))
    return min(folder.glob("*.json"))


@pytest.mark.parametrize(
    "examples", [QUICK, pytest.param(LONG, marks=pytest.mark.slow)], ids=["quick", "long"]
)
@pytest.mark.parametrize("name", FORMATS)
def test_a_changed_file_is_read_or_refused_in_one_line(
    name: str, examples: int, folder: Path
) -> None:
    form = FORMATS[name]
    path = path_of(form, folder)

    @settings(
        max_examples=examples,
        derandomize=examples == QUICK,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(st.data())
    def explore(data: st.DataObject) -> None:
        path.write_bytes(form.make(lambda below: data.draw(st.integers(0, below - 1))))
        assert failure(form.read, path, path.name) is None

    explore()


@pytest.mark.parametrize("name", FORMATS)
def test_some_changed_files_are_still_read(name: str, folder: Path) -> None:
    """A few changes change nothing that is read: the readers above do not refuse everything."""
    form = FORMATS[name]
    path = path_of(form, folder)
    for seed in range(200):
        path.write_bytes(form.make(Random(seed).randrange))
        with suppress(GradveilError):
            form.read(path)
            return
    pytest.fail("every file was refused")
