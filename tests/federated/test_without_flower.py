"""The package without Flower: one line says what to install."""

import subprocess
import sys

import pytest

from gradveil import federated
from gradveil.core.errors import GradveilError


@pytest.mark.parametrize("name", federated.__all__)
def test_every_name_asks_for_flower_in_a_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federated, "find_spec", lambda _: None)
    with pytest.raises(GradveilError, match=r"needs Flower: pip install gradveil\[flower\]"):
        getattr(federated, name)


def test_nothing_imports_flower_before_it_is_asked_for() -> None:
    code = "import sys, gradveil.cli, gradveil.federated; sys.exit('flwr' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code]).returncode == 0


def test_every_public_name_can_be_imported() -> None:
    for name in federated.__all__:
        assert callable(getattr(federated, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = federated.nothing
