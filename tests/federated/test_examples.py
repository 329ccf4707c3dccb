"""The example app: sound by the doctor's checks, and run as real processes with TLS."""

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradveil.checks.flower import check_app

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
MARK = "GRADVEIL_TESTED_EXAMPLE"  # in the environment of all processes of a deployment


def test_the_example_app_is_sound() -> None:
    assert not check_app(EXAMPLE).findings


class Deployed:
    """The deployment of the example, in a process of its own."""

    def __init__(self, log: Path) -> None:
        self.mark, self.log = f"{MARK}={uuid.uuid4().hex}", log
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        name, _, value = self.mark.partition("=")
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [EXAMPLE / "deploy.sh"],
                env=os.environ | {"PATH": path, name: value},
                stdout=file,
                stderr=file,
            )

    def alive(self) -> dict[int, str]:
        """Return the processes of the deployment that have not ended, by their ids."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it has ended, or is somebody else's
                continue
        return found


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    if shutil.which("openssl") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("openssl and ssh-keygen are needed for the certificates and keys")
    made = Deployed(tmp_path / "log")
    yield made
    made.process.terminate()
    made.process.wait(60)


@pytest.mark.slow
def test_the_example_runs_with_tls_and_node_authentication(deployed: Deployed) -> None:
    status = deployed.process.wait(280)
    said = deployed.log.read_text()
    assert status == 0, said
    assert said.count(" client-") == 2 and "global.safetensors" in said
    assert not deployed.alive()


@pytest.mark.slow
def test_a_deployment_that_is_told_to_end_in_a_round_leaves_no_process(deployed: Deployed) -> None:
    end = time.monotonic() + 200
    while "ROUND 1/2" not in deployed.log.read_text():
        assert deployed.process.poll() is None and time.monotonic() < end, deployed.log.read_text()
        time.sleep(0.5)
    assert len(deployed.alive()) > 4
    deployed.process.terminate()
    assert deployed.process.wait(60) != 0
    assert not deployed.alive()
