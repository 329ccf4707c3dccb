"""What the doctor finds in a Flower app's folder."""

from pathlib import Path

import pytest

from gradveil.checks.flower import NAMES, check_app
from gradveil.core.errors import GradveilError

GOOD = """
from flwr.clientapp import ClientApp
from gradveil.federated import defend
app = ClientApp()
@app.train(mods=[defend("prune:0.95")])
def train(message, context): ...
"""


def found(folder: Path, name: str, text: str) -> dict[str, str]:
    """Write a file beside a sound app, and return what is found: means by name."""
    (folder / "client_app.py").write_text(GOOD)
    (folder / name).write_text(text)
    return {each.name: f"{each.level}: {each.means}" for each in check_app(folder).findings}


def test_a_sound_app_is_well(tmp_path: Path) -> None:
    (tmp_path / "client_app.py").write_text(GOOD)
    diagnosis = check_app(tmp_path)
    assert not diagnosis.findings and diagnosis.silent == NAMES and not diagnosis.skipped


def test_noise_for_a_small_sensitivity_is_an_error_with_both_deviations(tmp_path: Path) -> None:
    said = found(
        tmp_path, "dp.py", "mod = LocalDpMod(1.0, sensitivity=1e-4, epsilon=10, delta=1e-5)"
    )
    assert said == {
        "local DP's sensitivity": "error: dp.py, line 1: updates are clipped to a norm of 1, and "
        "the noise is made for a sensitivity of 0.0001: the noise has a deviation of 4.8e-05, and "
        "epsilon 10 needs 0.48 or more"
    }
    assert not found(tmp_path, "dp.py", "mod = LocalDpMod(1.0, 2.0, 10, 1e-5)")
    assert not found(tmp_path, "dp.py", "mod = LocalDpMod(clip, small, 10, 1e-5)")


def test_central_dp_is_no_protection_from_the_server(tmp_path: Path) -> None:
    text = "s = strategy.DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 10)"
    said = found(tmp_path, "server_app.py", text)
    assert "not from the server" in said["central DP"]


def test_mods_of_the_whole_app_are_noted(tmp_path: Path) -> None:
    said = found(tmp_path, "other.py", "app = ClientApp(mods=[LocalDpMod(a, b, c, d), adapt])")
    assert said["mods of the whole app"].startswith(
        "note: other.py, line 1: messages of evaluation"
    )
    assert "pass through LocalDpMod, adapt too" in said["mods of the whole app"]


def test_a_defense_that_no_list_of_mods_holds_is_an_error(tmp_path: Path) -> None:
    said = found(tmp_path, "other.py", 'mod = defend("clip:1")\n@app.train()\ndef train(): ...')
    assert "no list of mods in the app holds it" in said["defense never reached"]
    text = 'mod = defend("clip:1")\n@app.train(mods=[mod])\ndef train(): ...'
    assert not found(tmp_path, "other.py", text)


@pytest.mark.parametrize(
    ("text", "open_to"),
    [
        ("flower-superlink --insecure", "starts without TLS without node authentication"),
        ("flower-superlink \\\n --ssl-certfile c.pem", "starts without node authentication"),
        ("flower-superlink --ssl-certfile c.pem --enable-supernode-auth", None),
        ("# flower-superlink --insecure", None),
    ],
)
def test_a_superlink_that_anybody_may_join_is_warned_of(
    tmp_path: Path, text: str, open_to: str | None
) -> None:
    said = found(tmp_path, "start.sh", text)
    assert (open_to is None and not said) or (open_to or "") in said["node authentication"]


def test_a_file_that_is_no_python_is_skipped_by_name(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (:")
    assert check_app(tmp_path).skipped == ("broken.py, which cannot be read",)


def test_an_app_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    check_app(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(GradveilError, match="flower app nowhere: there is no such folder"):
        check_app("nowhere")
