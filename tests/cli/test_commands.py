"""What holds for every command: help with examples, one line for bad input, and a quick start."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from gradveil import __version__, attacks, cli, models
from gradveil.cli import completion, main, run
from gradveil.cli.options import say, table
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.streams import HANDLER, Messages
from gradveil.data import catalog
from gradveil.defenses.registry import REGISTRY

COMMANDS = [
    "train",
    "audit",
    "federate",
    "reconstruct",
    "tune",
    "data list",
    "data verify",
    "data fetch",
    "policy show",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_and_the_shared_options(gradveil: Any, command: str) -> None:
    outcome = gradveil(f"{command} --help")
    assert outcome.status == 0 and not outcome.said
    after = outcome.shown.partition("Examples:")[2]
    assert f"gradveil {command} " in after
    for option in ("--json", "--seed", "--device"):
        assert option in outcome.shown


@pytest.mark.parametrize(
    ("group", "commands"),
    [
        ("", ("train", "data", "policy")),
        ("data ", ("list", "verify", "fetch")),
        ("policy ", ("show",)),
    ],
)
def test_help_of_a_group_lists_its_commands(
    gradveil: Any, group: str, commands: tuple[str, ...]
) -> None:
    outcome = gradveil(f"{group}--help")
    assert outcome.status == 0 and all(command in outcome.shown for command in commands)


def test_the_version_is_printed(gradveil: Any) -> None:
    assert gradveil("--version").shown == f"gradveil {__version__}\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("data nonsense", "No such command 'nonsense': choose from list, verify, fetch"),
        ("--nonsense", "No such option"),
        ("data list --nonsense", "No such option"),
        ("policy show", "Missing argument 'POLICY'"),
        ("data verify", "Missing argument 'NAME'"),
        ("train --model mlp", "Missing option '--data'. See `gradveil data list`, "),
        ("audit --data d --model m --images 2 --out o", "See `gradveil attacks list`, `gradveil a"),
        ("audit", "Missing options '--data', '--model', '--attack', '--images' and '--out'."),
        ("audit --model mlp --out x --data y", "Missing options '--attack' and '--images'."),
        ("search --seed 3", "Missing options '--data', '--model' and '--out'."),
        ("doctor", "Missing options '--data' and '--model', or '--flower'."),
        ("data list --seed -1", "Invalid value for '--seed'"),
        ("policy show 3 --seed x", "Invalid value for '--seed'"),
        ("data list --device gpu", "unknown device 'gpu': choose from auto, cpu, cuda"),
        ("policy show 3 --device gpu", "unknown device 'gpu': choose from auto, cpu, cuda"),
        ("data verify fashion-mnist-mini --device gpu", "unknown device 'gpu'"),
        ("data fetch fashion-mnist --device gpu", "unknown device 'gpu'"),
    ],
)
def test_bad_usage_is_one_line_and_status_two(gradveil: Any, line: str, says: str) -> None:
    assert says in gradveil(line).error


@pytest.mark.parametrize(
    "command",
    ["policy show 3", "data list", "data verify fashion-mnist-mini", "train --data x --model mlp"],
)
def test_cuda_without_a_gpu_is_one_line(
    gradveil: Any, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert (
        gradveil(f"{command} --device cuda").error
        == "device cuda: this torch sees no GPU; choose cpu or auto"
    )


def test_alone_it_shows_a_short_start_page(gradveil: Any) -> None:
    outcome = gradveil("")
    assert outcome.status == 0 and not outcome.said and len(outcome.shown.splitlines()) < 20
    assert "gradveil assess --data" in outcome.shown and "--install-completion" in outcome.shown
    assert all(len(line) <= 100 for line in outcome.shown.splitlines())


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("asess", "'assess'"),
        ("attacks lst", "'list'"),
        ("audit --modle lenet", "'--model'"),
        ("train --data fashion-mnist-mini --model lente", "lenet"),
        ("train --data fashion-mnist-min --model lenet", "fashion-mnist-mini"),
        ("train --data fashion-mnist-mini --model lenet --defense prun:0.9", "prune"),
        ("doctor --data fashion-mnist-mini --model lenet --attack adam-cosin", "adam-cosine"),
    ],
)
def test_the_nearest_name_is_suggested_once(gradveil: Any, line: str, meant: str) -> None:
    said = gradveil(line).error
    assert said.lower().count("did you mean") == 1
    assert meant in said[said.lower().index("did you mean") :]


def test_a_shell_can_complete_commands(gradveil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--install-completion" in gradveil("--help").shown
    monkeypatch.setenv("_GRADVEIL_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "gradveil as")
    outcome = gradveil("")
    assert outcome.status == 0 and "assess" in outcome.shown and not outcome.said


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("audit --attack mask", ["masked", "masked-rounds"]),
        ("assess --defense prune:", ["prune:0.95"]),
        ("tune --model convn", ["convnet", "convnet-9"]),
        ("search --data medi", ["medical-mnist"]),
        ("doctor --attack my_module:", []),
    ],
)
def test_a_shell_can_complete_names(
    gradveil: Any, monkeypatch: pytest.MonkeyPatch, typed: str, offered: list[str]
) -> None:
    monkeypatch.setenv("_GRADVEIL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"gradveil {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
    assert gradveil("").shown.split() == offered


def test_completion_offers_every_name_there_is() -> None:
    assert ["auto", *attacks.presets.names()] == completion.ATTACKS
    assert [kind.example for kind in REGISTRY.values()] == completion.DEFENSES
    assert [*models.names()] == completion.MODELS
    assert [dataset.name for dataset in catalog()] == completion.DATA_SETS


@pytest.mark.parametrize("width", ["80", "200"])
@pytest.mark.parametrize(
    ("what", "name"),
    [("attacks", "raced"), ("policies", "3-1-7+43-18-18"), ("defenses", "prune:0.95")],
)
def test_a_list_says_use_cost_and_paper_of_each_whatever_the_width(
    gradveil: Any, monkeypatch: pytest.MonkeyPatch, what: str, name: str, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    shown = gradveil(f"{what} list").shown
    assert name in shown and "cost" in shown and "paper" in shown
    assert ("┃" in shown) is (width == "200")  # a table only where there is room for it
    found = gradveil(f"{what} list --json").result[what]
    assert all(each["use"] and each["cost"] and each["line"] for each in found)


@pytest.mark.parametrize("group", ["data", "policy"])
def test_without_a_command_the_help_is_shown_and_the_status_is_two(
    gradveil: Any, group: str
) -> None:
    outcome = gradveil(group)
    assert (
        outcome.status == 2
        and "Usage:" in outcome.shown
        and outcome.said == f"error: no command given: see gradveil {group} --help\n"
    )


def test_main_exits_with_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["policy", "show", "3-99"])
    assert stop.value.code == 2 and capsys.readouterr().err.startswith("error: ")


def test_an_interrupt_is_one_line_and_status_130(
    gradveil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradveil.engine.device.find_device", interrupt)
    outcome = gradveil("policy show 3")
    assert (outcome.status, outcome.shown) == (130, "")
    assert outcome.said == "error: stopped; run the same command again to go on\n"


def test_a_disk_error_from_anywhere_is_one_line(
    gradveil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: str) -> None:
        raise OSError(5, "Input/output error", "some/file")

    monkeypatch.setattr("gradveil.engine.device.find_device", broken)
    assert gradveil("policy show 3").error == "[Errno 5] Input/output error: 'some/file'"


def test_a_fault_of_the_program_itself_is_one_line_and_status_70(
    gradveil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradveil.engine.device.find_device", lambda _: 1 / 0)
    outcome = gradveil("policy show 3")
    assert (outcome.status, outcome.shown) == (70, "")
    assert outcome.said == (
        "error: unexpected ZeroDivisionError: division by zero; "
        "run again with --debug for the traceback\n"
    )


def test_a_program_that_is_ended_from_inside_says_so(
    gradveil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradveil.engine.device.find_device", lambda _: sys.exit(0))
    assert gradveil("policy show 3").status == 70


@pytest.mark.parametrize("line", ["--debug policy show 3", "policy show 3 --debug"])
def test_debug_shows_the_traceback_wherever_it_stands(
    gradveil: Any, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr("gradveil.engine.device.find_device", lambda _: 1 / 0)
    outcome = gradveil(line)
    assert outcome.status == 70 and outcome.said.startswith("Traceback")
    assert outcome.said.endswith("ZeroDivisionError: division by zero\n")


def test_debug_shows_the_traceback_of_bad_input_too(gradveil: Any) -> None:
    outcome = gradveil("policy show 3-99 --debug")
    assert outcome.status == 2 and "Traceback" in outcome.said


@pytest.mark.parametrize("debug", ["", " --debug"])
def test_an_error_cannot_send_escape_sequences_to_the_terminal(
    gradveil: Any, monkeypatch: pytest.MonkeyPatch, debug: str
) -> None:
    def evil(_: str) -> None:
        raise GradveilError("\x1b]0;title\x07 a name with \udcff in it \u202e")

    monkeypatch.setattr("gradveil.engine.device.find_device", evil)
    said = gradveil(f"policy show 3{debug}").said
    assert r"\x1b]0;title\x07 a name with \udcff in it \u202e" in said
    assert said.replace("\n", "").isprintable()


def test_tables_and_words_cannot_send_escape_sequences_to_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    raw = Table("column")
    raw.add_row("\x1b[4m")
    say({}, False, table("\x1b[1m", ("column",), [("\x1b[2m",)]), "\x1b[3m", raw, "plain")
    shown = capsys.readouterr().out
    assert all(rf"\x1b[{number}m" in shown for number in (1, 2, 3)) and "\x1b" not in shown
    assert shown.endswith("plain\n")


def test_help_starts_without_the_slow_libraries() -> None:
    code = (
        "import sys; from gradveil.cli import run; run(['--help']); run(['audit', '--help']); "
        "slow = {'torch', 'numpy', 'lightning', 'scipy', 'matplotlib'}; "
        "print(*slow & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""


def start(folder: Path, *before: str) -> "subprocess.Popen[str]":
    """A command that is just about to import torch, for which a module stands in that waits."""
    (folder / "torch.py").write_text("import time\nprint('waiting', flush=True)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "gradveil", "policy", "show", "3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_first_second_is_one_line_and_its_own_status(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = start(tmp_path)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert said == "error: stopped; run the same command again to go on\n"
    assert process.returncode == 128 + number


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    process = start(tmp_path, "nohup")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m gradveil data list --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_a_warning_of_ours_is_one_line_on_the_error_stream(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warn(_: object) -> int:
        warnings.warn("taking \x07 them one\nat a time", GradveilWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(cli, "run", warn)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # put back afterwards
    with warnings.catch_warnings(), pytest.raises(SystemExit):
        warnings.simplefilter("always")
        cli.main([])
    assert capsys.readouterr().err == "warning: taking \\x07 them one at a time\n"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_an_error_that_cannot_be_printed_has_its_status(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        stream = Messages(full, encoding, HANDLER, line_buffering=True)
        monkeypatch.setattr(sys, "stderr", stream)
        assert run(["nonsense"]) == 2
