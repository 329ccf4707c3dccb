"""What holds for every command: help with examples, one line for bad input, and a quick start."""

import subprocess
import sys
import warnings
from typing import Any

import pytest

from gradveil import __version__, cli
from gradveil.cli import main
from gradveil.core.errors import GradveilWarning

COMMANDS = [
    "train",
    "audit",
    "reconstruct",
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
        ("data nonsense", "No such command 'nonsense'"),
        ("--nonsense", "No such option"),
        ("data list --nonsense", "No such option"),
        ("policy show", "Missing argument 'POLICY'"),
        ("data verify", "Missing argument 'NAME'"),
        ("train --model mlp", "Missing option '--data'"),
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


@pytest.mark.parametrize("group", ["", "data", "policy"])
def test_without_a_command_the_help_is_shown_and_the_status_is_two(
    gradveil: Any, group: str
) -> None:
    outcome = gradveil(group)
    assert (
        outcome.status == 2
        and "Usage:" in outcome.shown
        and outcome.said == "error: no command given: see gradveil --help\n"
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

    monkeypatch.setattr("gradveil.cli.policy.find_device", interrupt)
    outcome = gradveil("policy show 3")
    assert (outcome.status, outcome.shown) == (130, "")
    assert outcome.said == "error: stopped; run the same command again to go on\n"


def test_a_disk_error_from_anywhere_is_one_line(
    gradveil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: str) -> None:
        raise OSError(5, "Input/output error", "some/file")

    monkeypatch.setattr("gradveil.cli.policy.find_device", broken)
    assert gradveil("policy show 3").error == "[Errno 5] Input/output error: 'some/file'"


def test_a_fault_of_the_program_itself_is_not_hidden(
    gradveil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradveil.cli.policy.find_device", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gradveil("policy show 3")


def test_help_starts_without_the_slow_libraries() -> None:
    code = (
        "import sys; from gradveil.cli import run; run(['--help']); slow = {'lightning', 'scipy', 'matplotlib', 'torchmetrics'}; "
        "print(*slow & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m gradveil data list --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_a_warning_of_ours_is_one_line_on_the_error_stream(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warn(_: object) -> int:
        warnings.warn("taking them one at a time", GradveilWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(cli, "run", warn)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # put back afterwards
    with warnings.catch_warnings(), pytest.raises(SystemExit):
        warnings.simplefilter("always")
        cli.main([])
    assert capsys.readouterr().err == "warning: taking them one at a time\n"
