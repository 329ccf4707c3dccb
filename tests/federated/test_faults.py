"""Real processes: some end in the middle of a training, and strangers are refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.core.tensor_files import read_safetensors
from gradveil.search.ray import ORPHANED

pytestmark = pytest.mark.slow
ROUNDS = 20


class Running:
    """A `gradveil federate` in a process, and the processes that it started, by their ids."""

    def __init__(self, out: Path) -> None:
        self.out, self.started = out, set[int]()
        words = "federate --data fashion-mnist-mini --model lenet --clients 3 --lr 0.05"
        words += f" --rounds {ROUNDS} --batch-size 1 --defense prune:0.5 --spy-rounds 1"
        words += f" --json --out {out}"
        self.log = out.parent / f"{out.name}-{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "gradveil", *words.split()],
                env=os.environ | {"PYTHONWARNINGS": "ignore"},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def wait_for(self, done: Callable[[], Any]) -> Any:
        """Wait until a function gives something, and remember all processes until then."""
        end = time.monotonic() + 240
        while time.monotonic() < end and self.process.poll() is None:
            self.started |= descendants(self.process.pid)
            if found := done():
                return found
            time.sleep(0.2)
        raise AssertionError(f"it ended with {self.process.poll()}: {self.said()}")

    def rounds(self) -> int:
        """Count the rounds that can be gone on from."""
        try:
            _, metadata = read_safetensors(self.out / "resume.safetensors")
        except Exception:
            return 0
        return len(json.loads(metadata["gradveil"]))

    def end(self) -> dict[str, Any]:
        """Wait for the end, and return what it wrote."""
        self.wait_for(lambda: (self.out / "model.safetensors").is_file())
        text, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, self.said()
        found: dict[str, Any] = json.loads(text)
        return found

    def said(self) -> str:
        return self.log.read_text()[-2_000:]

    def assert_gone(self) -> None:
        """Check that no process which it started is left: Ray's agents search for its server."""
        end = time.monotonic() + 2 * (ORPHANED + 5)  # 10 to 17 s were measured after a kill
        while (left := self.started & alive()) and time.monotonic() < end:
            time.sleep(0.5)
        assert not left, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]


def table() -> list[tuple[int, int, str, str]]:
    lines = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    rows = [line.split(None, 3) for line in lines]
    return [(int(pid), int(parent), state, args) for pid, parent, state, args in rows]


def alive() -> set[int]:
    return {pid for pid, _, state, _ in table() if not state.startswith("Z")}


def descendants(pid: int, named: str = "") -> set[int]:
    rows, found = table(), {pid}
    while more := {row[0] for row in rows if row[1] in found} - found:
        found |= more
    return {row[0] for row in rows if row[0] in found - {pid} and named in row[3]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a training that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole") / "run"
    running = Running(out)
    found = running.end()
    assert [row["clients"] for row in found["history"]] == [3] * ROUNDS
    running.assert_gone()
    return read_safetensors(out / "model.safetensors")[0]


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"


def assert_same(out: Path, wanted: dict[str, torch.Tensor]) -> None:
    found, _ = read_safetensors(out / "model.safetensors")
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_a_training_that_was_told_to_end_in_a_round_goes_on_to_the_same_result(
    out: Path, whole: dict[str, torch.Tensor]
) -> None:
    running = Running(out)
    running.wait_for(lambda: running.rounds() >= 2)
    running.process.send_signal(signal.SIGTERM)
    running.process.communicate(timeout=120)
    assert running.process.returncode not in (0, None), running.said()
    assert "Traceback" not in running.said()
    running.assert_gone()
    assert (out / "resume.safetensors").is_file()
    again = Running(out)
    assert [row["round"] for row in again.end()["history"]] == [*range(1, ROUNDS + 1)]
    again.assert_gone()
    assert_same(out, whole)


def test_a_server_that_was_killed_leaves_no_process_and_goes_on_to_the_same_result(
    out: Path, whole: dict[str, torch.Tensor]
) -> None:
    running = Running(out)
    running.wait_for(lambda: running.rounds() >= 2)
    running.process.kill()
    running.process.communicate(timeout=120)
    running.assert_gone()
    again = Running(out)
    again.end()
    again.assert_gone()
    assert_same(out, whole)


def test_rounds_go_on_when_the_process_of_a_client_is_killed(out: Path) -> None:
    running = Running(out)
    running.wait_for(lambda: running.rounds() >= 1)
    victims = running.wait_for(lambda: descendants(running.process.pid, "ray::ClientAppActor"))
    os.kill(min(victims), signal.SIGKILL)
    found = running.end()
    assert [row["round"] for row in found["history"]] == [*range(1, ROUNDS + 1)]
    clients = [row["clients"] for row in found["history"]]
    assert clients[-1] == 3 and sum(count < 3 for count in clients) <= 1, clients
    assert "all processes are started again" in running.log.read_text() or min(clients) == 3
    weights, _ = read_safetensors(out / "model.safetensors")
    assert all(bool(value.isfinite().all()) for value in weights.values())
    running.assert_gone()


def make_certificates(work: Path) -> None:
    """Write an authority, its certificate for a server, another authority, and two nodes' keys."""

    def run(*words: str) -> None:
        subprocess.run(words, cwd=work, check=True, capture_output=True)

    new = ("openssl", "req", "-newkey", "rsa:2048", "-nodes")
    for name in ("ca", "other"):
        made = ("-x509", "-days", "1", "-subj", f"/CN={name}", "-out", f"{name}.pem")
        run(*new, *made, "-keyout", f"{name}.key")
    run(*new, "-subj", "/CN=127.0.0.1", "-keyout", "server.key", "-out", "server.csr")
    (work / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1")
    signing = ("openssl", "x509", "-req", "-in", "server.csr", *signed, "-extfile", "names")
    run(*signing, "-out", "server.pem")
    for name in ("known", "stranger"):
        run("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", name)


class Deployment:
    """A SuperLink with TLS and node authentication on loopback, and processes beside it."""

    def __init__(self, work: Path) -> None:
        self.work, self.processes = work, dict[str, subprocess.Popen[bytes]]()
        self.env = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONWARNINGS": "ignore",
            "FLWR_HOME": str(work / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }
        (work / "home").mkdir()
        (work / "home" / "config.toml").write_text(
            '[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "127.0.0.1:8000"\n'
            f'root-certificates = "{work / "ca.pem"}"\n'
        )

    def start(self, name: str, *words: str) -> None:
        with (self.work / f"{name}.log").open("w") as log:
            self.processes[name] = subprocess.Popen(
                words, cwd=self.work, env=self.env, stdout=log, stderr=log
            )

    def start_node(self, name: str, authority: str, key: str, port: int) -> None:
        words = ["flower-supernode", "--root-certificates", authority, "--port", str(port)]
        words += ["--superlink", "127.0.0.1:8000", "--auth-supernode-private-key", key]
        self.start(name, *words)

    def wait_for(self, name: str, text: str) -> None:
        """Wait until a process has said this."""
        end = time.monotonic() + 200
        while text not in (said := (self.work / f"{name}.log").read_text()):
            assert time.monotonic() < end, said
            time.sleep(0.5)

    def stop(self) -> set[int]:
        """End every process, and return the ids of those that were started and are left."""
        pids = {process.pid for process in self.processes.values()}
        started = pids.union(*map(descendants, pids))
        for pid in started & alive():
            os.kill(pid, signal.SIGTERM)
        for process in self.processes.values():
            process.wait(timeout=60)
        end = time.monotonic() + 30
        while (left := started & alive()) and time.monotonic() < end:
            time.sleep(0.5)
        return left


def test_a_node_with_a_wrong_authority_or_an_unknown_key_is_refused(tmp_path: Path) -> None:
    if shutil.which("openssl") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("openssl and ssh-keygen are needed for the certificates and keys")
    make_certificates(tmp_path)
    deployed = Deployment(tmp_path)
    try:
        words = ["flower-superlink", "--enable-supernode-auth", "--ssl-ca-certfile", "ca.pem"]
        words += ["--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
        deployed.start("superlink", *words)
        deployed.wait_for("superlink", "Uvicorn running")
        register = ["flwr", "supernode", "register", "known.pub", "local"]
        subprocess.run(
            register, cwd=tmp_path, env=deployed.env, check=True, capture_output=True, timeout=120
        )
        deployed.start_node("right", "ca.pem", "known", 9110)
        deployed.start_node("wrong-authority", "other.pem", "known", 9111)
        deployed.start_node("unknown-key", "ca.pem", "stranger", 9112)
        deployed.wait_for("right", "SuperNode ID")
        deployed.wait_for("wrong-authority", "CERTIFICATE_VERIFY_FAILED")
        deployed.wait_for("unknown-key", "Failed to activate SuperNode")
        for name in ("wrong-authority", "unknown-key"):
            assert deployed.processes[name].wait(timeout=120) != 0
            assert "SuperNode ID" not in (tmp_path / f"{name}.log").read_text()
        assert deployed.processes["right"].poll() is None
    finally:
        left = deployed.stop()
    assert not left
