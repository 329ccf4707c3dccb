"""What the doctor finds in that which a Flower deployment is started with."""

import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from gradveil.checks import deployment
from gradveil.checks.flower import check_app, check_running

SAFE_LINK = "flower-superlink --ssl-ca-certfile a --ssl-certfile b --ssl-keyfile c"
SAFE_LINK += " --enable-supernode-auth"
SAFE_NODE = "flower-supernode --root-certificates a --auth-supernode-private-key k"
COMPOSE = """
services:
  link:
    image: flwr/superlink:1.41.0
    command:
      - --isolation
      - process{}
  node:
    image: my/registry/flwr/supernode:1.41.0
    command: --insecure --superlink link:9092
"""


def found(folder: Path, name: str, text: str) -> dict[str, list[str]]:
    """Write a file into a folder, and return what is found there, by name."""
    (folder / name).write_text(text)
    said: dict[str, list[str]] = {}
    for each in check_app(folder).findings:
        said.setdefault(each.name, []).append(f"{each.level}: {each.means}; {each.do}")
    return said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("start.sh", "flower-superlink --insecure"),
        ("start.sh", "set -e\nexec nohup /usr/bin/flower-superlink \\\n  --insecure &"),
        ("start.sh", "bash -c 'cd /app && flower-superlink --insecure'"),
        ("start.sh", "docker run --rm -p 9092:9092 flwr/superlink:1.41.0 --insecure"),
        ("start.sh", 'OPTIONS="--insecure"\nflower-superlink $OPTIONS'),
        ("link.service", "[Service]\nExecStart=/opt/bin/flower-superlink --insecure"),
        ("Procfile", "link: flower-superlink --insecure"),
        ("Makefile", "serve:\n\tflower-superlink --insecure"),
        ("Dockerfile", 'FROM python\nENTRYPOINT ["flower-superlink"]\nCMD ["--insecure"]'),
        ("link.Dockerfile", "FROM flwr/superlink:1.41.0\nCMD --insecure"),
        ("pods.yaml", "a: 1\n---\ncontainers: [{image: flwr/superlink, args: [--insecure]}]"),
        ("ci.yml", "steps:\n  - run: |\n      pip install x\n      flower-superlink --insecure"),
        ("start.py", 'import subprocess\nsubprocess.run(["flower-superlink", "--insecure"])'),
        ("start.py", 'import os\nos.system("flower-superlink --insecure")'),
        ("start.py", 'run("flower-superlink --insecure".split())'),
        ("start.sh", "flower-superlink \\\r\n  --isolation process \\\r\n  --insecure\r\n"),
    ],
)
def test_an_open_superlink_is_found_wherever_it_is_started(
    name: str, text: str, tmp_path: Path
) -> None:
    said = found(tmp_path, name, text)
    assert [*map(len, said.values())] == [1, 1]
    assert "starts with --insecure: models and updates travel in the clear" in said["TLS"][0]
    (authentication,) = said["node authentication"]
    assert authentication.startswith(f"warning: {name}")
    assert "starts without node authentication, so anybody" in authentication
    assert "without TLS without" not in str(said)


@pytest.mark.parametrize(
    "text",
    [
        SAFE_LINK,
        SAFE_LINK + " $MORE",
        SAFE_NODE,
        "# flower-superlink --insecure",
        'echo "start flower-superlink --insecure"',
        "flower-superlink --simulation --ssl-ca-certfile a --ssl-certfile b --ssl-keyfile c",
    ],
)
def test_sound_commands_are_well(text: str, tmp_path: Path) -> None:
    assert not found(tmp_path, "start.sh", text)


def test_a_compose_file_is_read_service_by_service(tmp_path: Path) -> None:
    said = found(tmp_path, "compose.yaml", COMPOSE.format("\n      - --enable-supernode-auth"))
    assert [*map(len, said.values())] == [1, 1]
    assert "the SuperNode starts with --insecure" in said["TLS"][0]
    assert "the SuperNode has no key of its own" in said["node authentication"][0]
    said = found(tmp_path, "compose.yaml", COMPOSE.format(""))
    assert "the SuperLink starts without node authentication" in said["node authentication"][0]


@pytest.mark.parametrize(
    "text",
    [
        "flower-superlink $OPTIONS",
        'flower-superlink "${options[@]}"',
        "OPTIONS=--insecure\nOPTIONS=--simulation\nflower-superlink $OPTIONS",
        "flower-superlink --ssl-certfile c `cat options`",
        "flower-supernode --root-certificates c $OPTIONS",
    ],
)
def test_options_that_the_file_does_not_settle_could_not_be_judged(
    text: str, tmp_path: Path
) -> None:
    said = found(tmp_path, "start.sh", text)
    assert set(said) == {"TLS", "node authentication"}
    assert all("could not be judged" in each for every in said.values() for each in every)


def test_a_variable_as_the_value_of_an_option_hides_nothing(tmp_path: Path) -> None:
    said = found(tmp_path, "start.sh", 'flower-superlink --database "$DB" --insecure')
    assert "could not be judged" not in str(said) and len(said) == 2


def test_commands_that_flower_refuses_are_errors(tmp_path: Path) -> None:
    both = found(tmp_path, "start.sh", "flower-superlink --insecure --enable-supernode-auth")
    assert both["node authentication"][0].startswith("error") and "refuses" in str(both)
    old = found(tmp_path, "start.sh", "flower-superlink --auth-list-public-keys keys.csv")
    assert "Flower 1.41 has no --auth-list-public-keys" in old["node authentication"][0]


def test_the_options_are_those_of_the_installed_flower() -> None:
    with warnings.catch_warnings():
        # typer 0.20 imports names that click 8.5 means to remove
        warnings.simplefilter("ignore", DeprecationWarning)
        from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
        from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    link, node = (
        {name: action.nargs for action in parser()._actions for name in action.option_strings}
        for parser in (_parse_args_run_superlink, _parse_args_run_supernode)
    )
    assert {"--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile", "--host"} <= link.keys()
    assert {"--auth-list-public-keys", "--enable-supernode-auth", "--simulation"} <= link.keys()
    assert {"--root-certificates", "--auth-supernode-private-key", "--superlink"} <= node.keys()
    flags = {name for name, number in {**link, **node}.items() if number == 0}
    plain = {each for each in flags if each.startswith("--")} - {"--help", "--version"}
    assert {each for each in plain if not each.startswith(("--disable", "--allow"))} <= set(
        deployment.FLAGS
    )


@pytest.mark.parametrize(
    ("name", "head"),
    [("pyproject.toml", "tool.flwr.federations.far"), ("config.toml", "superlink.far")],
)
def test_connections_are_judged_in_either_file(name: str, head: str, tmp_path: Path) -> None:
    def said(*lines: str) -> str:
        text = "\n".join([f"[{head.removesuffix('.far')}]", 'default = "far"', f"[{head}]", *lines])
        return str(found(tmp_path, name, text).get("TLS", ""))

    far, near = 'address = "fl.example.org:8000"', 'address = "127.0.0.1:8000"'
    assert f"warning: {name}, [{head}]: insecure = true" in said(far, "insecure = true")
    assert "note" in said(near, "insecure = true")
    assert "note" in said(far) and "without root-certificates" in said(far)
    assert not said(far, 'root-certificates = "/etc/ca.pem"')
    both = said(far, "insecure = true", 'root-certificates = "/etc/ca.pem"')
    assert "error" in both and "which Flower refuses" in both
    assert not said("options.num-supernodes = 10")  # a simulation
    assert not said('address = ":local:"')


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("start.sh", "\n" * 300_000),
        (
            "compose.yml",
            "a0: &a0 {x: 1}\n"
            + "".join(
                f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}]\n  k{n}: 1\n" for n in range(1, 60)
            ),
        ),
    ],
)
def test_a_file_made_to_take_for_ever_does_not(name: str, text: str, tmp_path: Path) -> None:
    assert not found(tmp_path, name, text)
    assert "TLS" not in check_app(tmp_path).silent


def test_a_broken_toml_file_is_skipped_by_name(tmp_path: Path) -> None:
    assert not found(tmp_path, "pyproject.toml", "[tool")
    assert "pyproject.toml, which cannot be read" in check_app(tmp_path).skipped


@pytest.mark.skipif(sys.platform != "linux", reason="processes are read on Linux alone")
def test_a_superlink_that_runs_is_found_by_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    program = tmp_path / "flower-superlink"
    program.write_text("import time\ntime.sleep(60)")
    with subprocess.Popen([sys.executable, str(program), "--insecure"]) as process:
        try:
            line = Path(f"/proc/{process.pid}/cmdline")
            for _ in range(100):
                if b"--insecure" in line.read_bytes():
                    break  # the system writes it a moment after the start
                time.sleep(0.1)
            said = [each for each in check_running().findings if f" {process.pid}:" in each.means]
        finally:
            process.kill()
    assert [each.name for each in said] == ["TLS", "node authentication"]


def test_a_machine_where_nothing_runs_is_not_called_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(deployment, "PROCESSES", tmp_path)
    diagnosis = check_running()
    assert not diagnosis.silent and not diagnosis.findings
    assert "processes, which can be looked at on Linux alone" in diagnosis.skipped
    (tmp_path / "config.toml").write_text('[superlink.far]\naddress = "a.org:1"\ninsecure = true\n')
    assert [each.name for each in check_running().findings] == ["TLS"]
    (tmp_path / "config.toml").write_text('[superlink.far]\naddress = "fleet.flower.ai:1"\n')
    diagnosis = check_running()
    assert diagnosis.silent == ("TLS",)  # of who may join a connection tells nothing
    assert any(each.startswith("node authentication: no flower") for each in diagnosis.skipped)
