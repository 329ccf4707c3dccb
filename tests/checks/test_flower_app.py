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


DP = """
from flwr.clientapp.mod import LocalDpMod
app = ClientApp()
@app.train(mods=[LocalDpMod({})])
def train(message, context): ...
"""


def found(folder: Path, name: str, text: str, beside: str = GOOD) -> dict[str, str]:
    """Write a file beside a sound app, and return what is found: means by name."""
    (folder / "client_app.py").write_text(beside)
    (folder / name).write_text(text)
    return {each.name: f"{each.level}: {each.means}" for each in check_app(folder).findings}


def test_a_sound_app_is_well_and_what_starts_it_is_not_judged_without_it(tmp_path: Path) -> None:
    (tmp_path / "client_app.py").write_text(GOOD)
    diagnosis = check_app(tmp_path)
    assert not diagnosis.findings and diagnosis.silent == NAMES[:4]
    assert "node authentication, TLS: no file here starts" in diagnosis.skipped[0]


def test_nothing_is_well_in_a_folder_without_an_app(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("print(1)")
    diagnosis = check_app(tmp_path)
    assert not diagnosis.silent and len(diagnosis.skipped) == 2


def test_noise_for_a_small_sensitivity_is_an_error_with_both_deviations(tmp_path: Path) -> None:
    text = DP.format("1.0, sensitivity=1e-4, epsilon=10, delta=1e-5")
    assert found(tmp_path, "dp.py", text) == {
        "local DP's sensitivity": "error: dp.py, line 4: updates are clipped to a norm of 1, and "
        "the noise is made for a sensitivity of 0.0001: the noise has a deviation of 4.8e-05, and "
        "epsilon 10 needs 0.48 or more"
    }
    assert not found(tmp_path, "dp.py", DP.format("1.0, 2.0, 10, 1e-5"))
    assert not found(tmp_path, "dp.py", DP.format("clip, clip, 10, 1e-5"))


@pytest.mark.parametrize(
    "before",
    [
        "CLIP = 1.0",
        "CLIP: float = 2 * 0.5",
        "from settings import CLIP",
        "from settings import NORM as CLIP",
        "import settings\nCLIP = settings.CLIP",
        "HALF = 0.5\nCLIP = HALF + HALF",
    ],
)
def test_constants_of_the_app_are_followed_to_their_numbers(before: str, tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("CLIP = 1.0\nNORM = 1.0")
    text = before + DP.format("CLIP, 1e-4, 10.0, 1e-5")
    assert "clipped to a norm of 1, and" in found(tmp_path, "dp.py", text)["local DP's sensitivity"]


@pytest.mark.parametrize(
    "before",
    [
        "",
        "CLIP = context.run_config['clip']",
        "CLIP = 1.0\nCLIP = 2.0",
        "if slow:\n    CLIP = 1.0",
        "CLIP = 1.0\ndef change():\n    global CLIP\n    CLIP = 9",
        "from elsewhere import CLIP",
        "CLIP = True",
    ],
)
def test_a_norm_that_the_files_do_not_settle_could_not_be_judged(
    before: str, tmp_path: Path
) -> None:
    text = before + DP.format("CLIP, 1e-4, 10.0, 1e-5")
    said = found(tmp_path, "dp.py", text)["local DP's sensitivity"]
    assert said.startswith("warning") and "could not be judged: its clipping norm cannot" in said
    assert NAMES[0] not in check_app(tmp_path).silent


def test_a_parameter_hides_a_constant_of_the_same_name(tmp_path: Path) -> None:
    text = "CLIP = 1.0\ndef make(CLIP):\n    return LocalDpMod(CLIP, 1e-4, 10.0, 1e-5)\n"
    said = found(tmp_path, "dp.py", text + "@app.train(mods=[make(3)])\ndef train(): ...")
    assert "could not be judged" in said["local DP's sensitivity"] and len(said) == 1


def test_starred_arguments_could_not_be_judged(tmp_path: Path) -> None:
    said = found(tmp_path, "dp.py", DP.format("*settings"))
    assert "its clipping norm and its sensitivity cannot be read" in said["local DP's sensitivity"]


def test_central_dp_is_no_protection_from_the_server(tmp_path: Path) -> None:
    text = "s = strategy.DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 10)"
    said = found(tmp_path, "server_app.py", text)
    assert "not from the server" in said["central DP"] and len(said) == 1


def test_central_dp_that_counts_on_clients_needs_its_mod_in_training(tmp_path: Path) -> None:
    text = "s = DifferentialPrivacyClientSideAdaptiveClipping(FedAvg(), 1.0, 10)\n"
    said = found(tmp_path, "server_app.py", text)["defense never reached"]
    assert said.startswith("error") and "pass through no adaptiveclipping_mod" in said
    other = (
        "from flwr.clientapp.mod import fixedclipping_mod as m\n@app.train(mods=[m])\ndef f(): 0"
    )
    assert "no adaptiveclipping_mod" in found(tmp_path, "m.py", other)["defense never reached"]
    right = other.replace("fixed", "adaptive")
    assert "defense never reached" not in found(tmp_path, "m.py", right)


def test_mods_of_the_whole_app_are_noted(tmp_path: Path) -> None:
    said = found(tmp_path, "other.py", "app = ClientApp(mods=[LocalDpMod(a, a, c, d), adapt])")
    assert said["mods of the whole app"].startswith(
        "note: other.py, line 1: messages of evaluation"
    )
    assert "pass through LocalDpMod, adapt too" in said["mods of the whole app"]


ON_TRAIN = "\n@app.train(mods={})\ndef train(message, context): ...\n"


@pytest.mark.parametrize(
    "text",
    [
        'mod = defend("clip:1")' + ON_TRAIN.format("[mod]"),
        'mod = defend("clip:1")\nmods = (mod,)' + ON_TRAIN.format("mods"),
        'mods = [defend("clip:1")]' + ON_TRAIN.format("[other, *mods]"),
        'mods = [defend("clip:1")]' + ON_TRAIN.format("mods + [other]"),
        "from mods_of_app import secure" + ON_TRAIN.format("[secure]"),
        "import mods_of_app as m" + ON_TRAIN.format("[m.secure]"),
        'def make(text):\n    return [defend("clip:1")]' + ON_TRAIN.format("make(1)"),
        'app = ClientApp(None, [defend("clip:1")])',
        "mod = LocalDpMod(1.0, 1.0, 1.0, 1e-5)" + ON_TRAIN.format("[mod]"),
        "from flwr.client.mod import fixedclipping_mod" + ON_TRAIN.format("[fixedclipping_mod]"),
        'def build():\n    mod = defend("clip:1")\n    app = ClientApp(mods=[mod])',
        "from gradveil.federated import policy\nchange = policy('3-1-7')\ndef f(x): change(x)",
    ],
)
def test_a_defense_that_training_passes_through_is_reached_by_any_name(
    text: str, tmp_path: Path
) -> None:
    if "mods_of_app" in text:
        (tmp_path / "mods_of_app.py").write_text('secure = defend("clip:1")')
    assert "defense never reached" not in found(tmp_path, "other.py", text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('mod = defend("clip:1")\n@app.train()\ndef train(): ...', "no list of mods in the app"),
        ('mod = defend("clip:1")\nother = guard()' + ON_TRAIN.format("[other]"), "no list of mods"),
        (
            '@app.evaluate(mods=[defend("clip:1")])\ndef evaluate(): ...',
            "made for evaluation or queries alone",
        ),
        ("mod = LocalDpMod(1.0, 1.0, 1.0, 1e-5)", "LocalDpMod(...) is made, and no list of mods"),
        ("from flwr.clientapp.mod import LocalDpMod", "LocalDpMod is imported, and no update"),
        ("from flwr.client.mod import secaggplus_mod", "secaggplus_mod is imported"),
        (
            "from flwr.client.mod import fixedclipping_mod\n"
            "@app.evaluate(mods=[fixedclipping_mod])\ndef evaluate(): ...",
            "fixedclipping_mod is imported",
        ),
        (
            "from gradveil.federated import policy\nchange = policy('3-1-7')",
            "policy change is made",
        ),
    ],
)
def test_a_defense_that_no_update_passes_through_is_found(
    text: str, said: str, tmp_path: Path
) -> None:
    assert said in found(tmp_path, "other.py", text)["defense never reached"]


@pytest.mark.parametrize(
    "mods",
    [
        "[unknown]",
        "[secure if fast else other]",
        "[wrap(secure)]",
        "mods",
        "[choose()]",
        "[handing]",
    ],
)
def test_whether_a_defense_is_reached_could_not_be_judged_where_names_do_not_settle_it(
    mods: str, tmp_path: Path
) -> None:
    text = 'secure = defend("clip:1")\nmods = []\nmods.append(secure)\n'
    text += "def choose():\n    if fast:\n        return secure\n    return other\n"
    text += "def handing(message, context, call_next):\n    return secure(message, context, 1)\n"
    said = found(tmp_path, "other.py", text + ON_TRAIN.format(mods))["defense never reached"]
    assert said.startswith("warning: other.py, line 1: whether updates pass through defend(...)")
    assert "could not be judged" in said
    assert NAMES[3] not in check_app(tmp_path).silent


def test_a_mod_of_the_apps_own_does_not_hide_a_defense_that_nothing_reaches(tmp_path: Path) -> None:
    text = 'secure = defend("clip:1")\ndef own(message, context, call_next): return call_next()\n'
    text += "import time\nfrom their import logging_mod"
    said = found(tmp_path, "other.py", text + ON_TRAIN.format("[own, logging_mod]"))
    assert said["defense never reached"].startswith("error")


def test_a_file_that_is_no_python_is_skipped_by_name(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "deep.py").write_text("x = " + "+".join(["1"] * 4_000))
    assert (
        {"broken.py, which cannot be read", "deep.py, which cannot be read"}
        >= {each for each in check_app(tmp_path).skipped if "cannot" in each}
        >= {"broken.py, which cannot be read"}
    )


def test_nothing_is_called_well_that_an_unread_file_may_decide(tmp_path: Path) -> None:
    text = "from mods import M\napp = ClientApp()\n" + ON_TRAIN.format("M")
    (tmp_path / "app.py").write_text(text)
    (tmp_path / "mods.py").write_text('M = [LocalDpMod(10.0, 0.001, 1.0, 1e-5)]\nprint "two"\n')
    diagnosis = check_app(tmp_path)
    assert not diagnosis.silent
    assert any(each.endswith("not all files could be read") for each in diagnosis.skipped)


def test_an_app_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    check_app(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(GradveilError, match="flower app nowhere: there is no such folder"):
        check_app("nowhere")
