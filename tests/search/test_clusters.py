"""A Ray cluster of two workers gives what one process gives, whatever happens to the workers."""

import gc
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradveil.audits import AuditJob
from gradveil.audits.results import AuditResult
from gradveil.core import GradveilError
from gradveil.core.errors import GradveilWarning
from gradveil.core.seeds import generator
from gradveil.scores.scorer import Scorer
from gradveil.search.engine import LocalEngine
from gradveil.search.ray import RayEngine, connect, disconnect
from gradveil.transforms import Policy

ray = pytest.importorskip("ray")
# Ray leaves files open; the warning comes whenever they are collected, in whichever test.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

PATIENCE = 60.0  # seconds
POLICIES = [Policy.parse(str(index)) for index in range(11)]


@dataclass(frozen=True)
class Toy(Scorer):
    """Noise that depends on the policy. Writes down the process it runs in, and may take its time or fail."""

    pids: Path
    seconds: float = 0.0
    fails: bool = False
    names = ("privacy",)
    unit = 2
    blocks = (7,)

    def score(self, policies: Sequence[Policy], block: int) -> Mapping[str, Tensor]:
        (self.pids / f"{os.getpid()}.{policies[0]}").touch()
        time.sleep(self.seconds)
        if self.fails:
            raise GradveilError("the toy is broken: mend it")
        rows = [
            torch.rand(self.blocks[block], generator=generator(0, str(policy)), dtype=torch.float64)
            for policy in policies
        ]
        return {"privacy": torch.stack(rows)}


def calls(folder: Path) -> list[tuple[int, str]]:
    """The process and the first policy of each."""
    return [(int(path.stem), path.suffix) for path in folder.iterdir() if path.is_file()]


def processes() -> set[int]:
    """Of Ray, on this machine."""
    lines = {
        path: path.joinpath("cmdline") for path in Path("/proc").iterdir() if path.name.isdigit()
    }
    found = set()
    for path, line in lines.items():
        try:
            words = line.read_bytes()
        except OSError:
            continue
        if b"raylet" in words or b"gcs_server" in words or words.startswith(b"ray::"):
            found.add(int(path.name))
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two workers, and the classes of this module sent by value: workers cannot import tests."""
    before, handler = processes(), signal.getsignal(signal.SIGTERM)
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
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    disconnect()
    signal.signal(signal.SIGTERM, handler)  # it was not the engine that connected
    patch.undo()
    until = time.monotonic() + 20
    while processes() - before and time.monotonic() < until:
        time.sleep(0.1)
    assert processes() <= before


@pytest.fixture
def expected(tmp_path: Path) -> Tensor:
    (tmp_path / "here").mkdir()
    return LocalEngine({"leak": Toy(tmp_path / "here")}).score("leak", POLICIES, 0)["privacy"]


@pytest.mark.usefixtures("cluster")
def test_two_workers_give_what_one_process_gives_and_are_let_go(
    tmp_path: Path, expected: Tensor
) -> None:
    with RayEngine({"leak": Toy(tmp_path, 0.1)}) as engine:
        assert engine.workers == 2
        found = engine.score("leak", POLICIES, 0)
        assert engine.score("leak", [], 0)["privacy"].shape == (0, 7)
        until = time.monotonic() + PATIENCE
        while (
            len({pid for pid, _ in calls(tmp_path)}) < 2 and time.monotonic() < until
        ):  # on a busy machine the second starts late
            assert engine.score("leak", POLICIES, 0)["privacy"].equal(expected)
    assert found["privacy"].equal(expected)
    assert len({pid for pid, _ in calls(tmp_path)}) == 2
    assert ray.is_initialized()  # it was there before the engine


@pytest.mark.usefixtures("cluster")
def test_work_of_a_killed_worker_is_done_again(tmp_path: Path, expected: Tensor) -> None:
    killed = []

    def kill() -> None:
        while not (begun := calls(tmp_path)):
            time.sleep(0.01)
        killed.extend(begun[:1])
        os.kill(killed[0][0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with (
        RayEngine({"leak": Toy(tmp_path, 0.3)}) as engine,
        pytest.warns(GradveilWarning, match="a worker of the Ray cluster was lost"),
    ):
        found = engine.score("leak", POLICIES, 0)
    killer.join()
    assert found["privacy"].equal(expected)
    pid, unit = killed[0]
    assert not Path(f"/proc/{pid}").exists()
    assert len({by for by, what in calls(tmp_path) if what == unit}) == 2


@pytest.mark.usefixtures("cluster")
def test_an_error_of_a_scorer_comes_through_as_itself_in_one_line(tmp_path: Path) -> None:
    with (
        RayEngine({"leak": Toy(tmp_path, fails=True)}) as engine,
        pytest.raises(GradveilError) as caught,
    ):
        engine.score("leak", POLICIES, 0)
    assert type(caught.value) is GradveilError and str(caught.value) == "the toy is broken: mend it"


@pytest.mark.usefixtures("cluster")
def test_audits_on_a_cluster_write_the_records_of_local_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = [
        AuditJob("fashion-mnist-mini", "mlp", ("closed-form",), 2, seed=seed) for seed in (1, 2)
    ]
    LocalEngine({}).audits([(job, tmp_path / f"local-{job.seed}") for job in jobs], None, "cpu")
    with RayEngine({}) as engine:
        engine.audits([(job, Path(f"ray-{job.seed}")) for job in jobs], None, "cpu")
        with pytest.raises(GradveilError, match=r"^[^\n]*unknown model[^\n]*$"):
            engine.audits(
                [(AuditJob("fashion-mnist-mini", "nonesuch", ("closed-form",), 2), Path("bad"))],
                None,
                "cpu",
            )
    for seed in (1, 2):
        local, far = (
            AuditResult.read(tmp_path / f"{where}-{seed}").records for where in ("local", "ray")
        )
        assert [record.scores for record in far] == [record.scores for record in local]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nonsense", "write host:6379"),
        ("127.0.0.1:{port}", "no cluster answers"),
        ("ray://127.0.0.1:{port}", "no cluster answers"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(address: str, words: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        began = time.monotonic()
        with pytest.raises(GradveilError, match=re.escape(words)) as caught:
            RayEngine({}, address.format(port=taken.getsockname()[1]))
    assert time.monotonic() - began < 6 and "\n" not in str(caught.value)


def test_what_ray_does_to_sigterm_is_undone_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: object) -> None:
        """In place of Ray's own."""

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, taken))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    assert connect(None) and signal.getsignal(signal.SIGTERM) is taken
    disconnect()
    assert signal.getsignal(signal.SIGTERM) is before
