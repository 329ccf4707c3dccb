"""The example app: sound by the doctor's checks, and run as real processes with TLS."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradveil.checks.flower import check_app

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"


def test_the_example_app_is_sound() -> None:
    assert not check_app(EXAMPLE).findings


@pytest.mark.slow
def test_the_example_runs_with_tls_and_node_authentication() -> None:
    if shutil.which("openssl") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("openssl and ssh-keygen are needed for the certificates and keys")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [EXAMPLE / "deploy.sh"],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("client-") == 2 and "global.safetensors" in done.stdout
    left = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True).stdout
    alive = [line for line in left.splitlines() if not line.startswith("Z")]
    assert not any("flower-super" in line for line in alive)
