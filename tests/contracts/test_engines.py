"""Every engine gives what one process gives; a Ray worker that is killed loses no work."""

import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.seeds import generator
from gradveil.scores.scorer import Scorer
from gradveil.search.engine import Engine, LocalEngine
from gradveil.search.ray import RayEngine, check_cluster, disconnect
from gradveil.transforms import Policy

# Ray leaves files open; the warning comes whenever they are collected, in whichever test.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

PATIENCE = 60.0  # seconds
POLICIES = [Policy.parse(str(index)) for index in range(11)]


@dataclass(frozen=True)
class Toy(Scorer):
    """Noise that depends on the policy and the block. It writes down each call, and may be slow."""

    calls: Path
    seconds: float = 0.0
    names = ("noise", "twice")
    unit = 2
    blocks = (7, 3)

    def score(self, policies: Sequence[Policy], block: int) -> Mapping[str, Tensor]:
        (self.calls / f"{os.getpid()}.{len(policies)}.{policies[0]}").touch()
        time.sleep(self.seconds)
        rows = [
            torch.rand(self.blocks[block], generator=generator(block, str(policy))).double()
            for policy in policies
        ]
        return {"noise": torch.stack(rows), "twice": 2 * torch.stack(rows)}


@dataclass(frozen=True)
class Broken(Scorer):
    names = ("nothing",)
    blocks = (1,)

    def score(self, policies: Sequence[Policy], block: int) -> Mapping[str, Tensor]:
        raise GradveilError("the toy is broken: mend it")


def write(name: str, text: str, progress: bool) -> None:
    """A task with a relative path."""
    Path(name).write_text(f"{text} {progress} {os.getpid()}")


def fail(progress: bool) -> None:  # noqa: ARG001
    raise GradveilError("the task cannot be done: do another")


def calls(folder: Path) -> list[tuple[int, int, str]]:
    """The process, the number of policies, and the first policy of each call."""
    parts = [path.name.split(".") for path in folder.iterdir() if path.is_file()]
    return [(int(pid), int(count), first) for pid, count, first in parts]


def ray_processes() -> set[int]:
    """The processes of Ray on this machine."""
    found = set()
    for path in Path("/proc").iterdir():
        try:
            words = path.joinpath("cmdline").read_bytes() if path.name.isdigit() else b""
        except OSError:
            continue
        if b"raylet" in words or b"gcs_server" in words or words.startswith(b"ray::"):
            found.add(int(path.name))
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two workers; classes of this module are sent by value, since workers cannot import tests."""
    ray = pytest.importorskip("ray")
    before, handler = ray_processes(), signal.getsignal(signal.SIGTERM)
    patch = pytest.MonkeyPatch()
    patch.delenv("RAY_ADDRESS", raising=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with warnings.catch_warnings():  # of what later versions will do
        warnings.simplefilter("ignore")
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
        )
        gc.collect()  # Ray leaves files open, which would be warned of whenever they are collected
    yield
    assert ray.is_initialized()  # it was there before the engine
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    disconnect()
    signal.signal(signal.SIGTERM, handler)  # it was not the engine that connected
    patch.undo()
    until = time.monotonic() + 20
    while ray_processes() - before and time.monotonic() < until:
        time.sleep(0.1)
    assert ray_processes() <= before


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the toy of each engine writes its calls: to be used by all tests of that engine."""
    return {name: tmp_path_factory.mktemp(name) for name in ("local", "ray")}


def scorers(folder: Path, seconds: float = 0.0) -> dict[str, Scorer]:
    return {"leak": Toy(folder, seconds), "broken": Broken()}


@pytest.fixture(scope="module")
def ray_engine(cluster: None, folders: dict[str, Path]) -> Iterator[Engine]:  # noqa: ARG001
    """One for all tests: each start of a worker takes seconds."""
    with RayEngine(scorers(folders["ray"], 0.2)) as engine:
        yield engine


@pytest.fixture(params=["local", "ray"])
def engine(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Engine:
    if request.param == "local":
        return LocalEngine(scorers(folders["local"]))
    made: Engine = request.getfixturevalue("ray_engine")
    return made


def expected(tmp_path: Path, block: int) -> Mapping[str, Tensor]:
    (tmp_path / "expected").mkdir(exist_ok=True)
    return Toy(tmp_path / "expected").score(POLICIES, block)


def test_units_are_joined_in_order(engine: Engine, tmp_path: Path) -> None:
    toy = engine.scorers["leak"]
    assert isinstance(toy, Toy)
    for block in (0, 1):
        found = engine.score("leak", POLICIES, block)
        assert tuple(found) == ("noise", "twice")
        for name, table in expected(tmp_path, block).items():
            assert found[name].equal(table)
    assert {(count, first) for _, count, first in calls(toy.calls)} == {
        (2, "0"), (2, "2"), (2, "4"), (2, "6"), (2, "8"), (1, "10")
    }  # fmt: skip
    pids = {pid for pid, _, _ in calls(toy.calls)}
    assert (pids == {os.getpid()}) == isinstance(engine, LocalEngine)


def test_all_workers_are_used(engine: Engine, tmp_path: Path) -> None:
    toy, table = engine.scorers["leak"], expected(tmp_path, 0)["noise"]
    assert isinstance(toy, Toy)
    assert engine.workers == (1 if isinstance(engine, LocalEngine) else 2)
    until = time.monotonic() + PATIENCE
    while len({pid for pid, _, _ in calls(toy.calls)}) < engine.workers:
        assert time.monotonic() < until  # on a busy machine the second starts late
        assert engine.score("leak", POLICIES, 0)["noise"].equal(table)


def test_no_policies_give_no_rows(engine: Engine) -> None:
    found = engine.score("leak", [], 1)
    assert {name: tuple(table.shape) for name, table in found.items()} == {
        "noise": (0, 3),
        "twice": (0, 3),
    }


def test_an_unknown_scorer_is_named_beside_the_choices(engine: Engine) -> None:
    with pytest.raises(GradveilError, match="unknown scorer 'speed': choose from leak, broken"):
        engine.score("speed", POLICIES, 0)


@pytest.mark.usefixtures("cluster")
def test_a_ray_that_answers_is_known_as_one() -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    assert check_cluster(address) == address


def test_the_work_of_a_killed_ray_worker_is_done_again(ray_engine: Engine, tmp_path: Path) -> None:
    toy = ray_engine.scorers["leak"]
    assert isinstance(toy, Toy)
    folder = toy.calls
    for path in folder.iterdir():
        path.unlink()
    killed: list[tuple[int, int, str]] = []

    def kill() -> None:
        while not (begun := calls(folder)):
            time.sleep(0.01)
        killed.extend(begun[:1])
        os.kill(killed[0][0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.warns(GradveilWarning, match="a worker of the Ray cluster was lost"):
        found = ray_engine.score("leak", POLICIES, 0)
    killer.join()
    assert found["noise"].equal(expected(tmp_path, 0)["noise"])
    pid, _, first = killed[0]
    assert not Path(f"/proc/{pid}").exists()
    assert len({by for by, _, what in calls(folder) if what == first}) == 2


def test_an_error_of_a_scorer_comes_through_as_itself_in_one_line(engine: Engine) -> None:
    with pytest.raises(GradveilError) as caught:
        engine.score("broken", POLICIES, 0)
    assert type(caught.value) is GradveilError and str(caught.value) == "the toy is broken: mend it"


def test_tasks_are_run_from_this_folder_and_their_errors_come_through(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine.run([partial(write, "first", "one"), partial(write, "second", "two")], "cpu", True)
    told = [(tmp_path / name).read_text().split() for name in ("first", "second")]
    shown = str(isinstance(engine, LocalEngine))  # many bars at once would be unreadable
    assert [words[:2] for words in told] == [["one", shown], ["two", shown]]
    assert all((words[2] == str(os.getpid())) == (shown == "True") for words in told)
    with pytest.raises(GradveilError, match=r"^the task cannot be done: do another$"):
        engine.run([fail], "cpu")
