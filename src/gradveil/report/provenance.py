"""Where the figures come from: settings, digests, versions, and the command to run again.

`settings_section` is the last section of the page.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradveil import attacks, models
from gradveil.audits import AuditResult, CaseResult
from gradveil.audits.attackers import AUTO
from gradveil.data import catalog
from gradveil.federated.spied import SENT
from gradveil.report.markup import Html, element, joined
from gradveil.search import SearchResult
from gradveil.search.job import FOLDER as SEARCH

FOLDER = "NEW-FOLDER"
"""Stands for the folder of the run in the command: a page does not name it, so it can be moved."""

HIDDEN = ("cases", "attacks", "format", "public_sha256")
OPTIONS = {
    "batch_size": 1,
    "steps": None,
    "restarts": None,
    "labels": "known",
    "local_steps": 1,
    "local_lr": 0.01,
    "local_epochs": 1,
    "local_batch_size": None,
    "client_momentum": 0.0,
    "client_weight_decay": 0.0,
    "budget": None,
    "split": "test",
    "first": None,
    "victims_at_once": None,
    "image_size": None,
    "channels": None,
    "normalize": None,
    "seed": 0,
}
"""Settings that are options of the command line, with their defaults."""

FACTS = ("weights_sha256", "images_sha256", "gradveil")
"""What a search found, among its settings: no options of the command line."""


def published(data: str) -> bool:
    """Tell whether the images are of a data set that everyone can have, by the registry.

    A folder, or images given in Python, are a user's own.
    """
    return data in {dataset.name for dataset in catalog()}


def images_words(settings: Mapping[str, Any], count: int) -> str:
    """Write how many images were attacked, and of which split where the data set has splits."""
    data, split = str(settings["data"]), settings.get("split", "test")
    has_splits = published(data) or data.startswith("folder:")
    return f"{count} of {data} {split}" if has_splits else f"{count}"


def settings_section(
    runs: Mapping[str, AuditResult],
    search: SearchResult | None,
    name_of: Callable[[CaseResult], str],
) -> Html:
    """Return the settings of all runs and cases, each with the command that makes it again."""
    parts: list[Html | None] = []
    if search is not None:
        parts += [_again(search_command(search)), _pairs(settings_lines(search.settings))]
    for name, run in runs.items():
        parts.append(element("h3", name) if len(runs) > 1 else None)
        if search is None:
            parts += [
                _again(command(run), is_spied(run)),
                _scored(run),
                _pairs(settings_lines(run.settings)),
            ]
        for case in run.cases:
            inner = _pairs(case_lines(case))
            parts.append(element("details", element("summary", name_of(case)), inner))
    return joined(parts)


def _again(command: str | None, spied: bool = False) -> Html:
    """Show the command that makes a run again, or say why there is none."""
    if command is None:
        words = "It was made of Python objects: make the same call again with these settings."
        if spied:
            words = (
                "It attacked updates that a spy kept: train with the same settings again, or "
                "attack what the spy kept by gradveil audit --flower."
            )
        return element("p", words)
    copy = element("button", "Copy", type="button", class_="copy")
    return element("div", element("pre", command, tabindex="0"), copy, class_="command")


def _scored(run: AuditResult) -> Html | None:
    """Say what a command with policies as text leaves out."""
    if not run.settings.get("scored"):
        return None
    words = (
        "Policies stand here as text. Name the policies.toml of their search in their place: it "
        "tells which images the search has used, and without it other images are drawn."
    )
    return element("p", words)


def _pairs(lines: Sequence[tuple[str, str]]) -> Html:
    """Show names with their values as a table."""
    rows = [
        element("tr", element("th", name, scope="row"), element("td", value))
        for name, value in lines
    ]
    return element("div", element("table", *rows, class_="pairs"), class_="scroll")


def settings_lines(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the settings of an audit or a search, in order."""
    plain = {key: value for key, value in settings.items() if key not in HIDDEN}
    return [(key.replace("_", " "), _shown(plain[key])) for key in sorted(plain)]


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "not set"}[value]
    return str(value)


def case_lines(case: CaseResult) -> list[tuple[str, str]]:
    """Return the digests, versions and attacks of a case."""
    settings = case.settings
    versions = settings.get("versions", {})
    lines = [
        ("weights", str(settings.get("checkpoint") or "untrained")),
        ("weights, SHA-256", str(settings.get("weights_sha256", "not recorded"))),
        ("images, SHA-256", str(settings.get("images_sha256", "not recorded"))),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("device", str(settings.get("device", "not recorded"))),
    ]
    attacks_of = settings.get("attacks", {})
    if isinstance(attacks_of, Mapping):
        lines += [(f"attack {name}", str(value)) for name, value in attacks_of.items()]
    return lines


def is_spied(result: AuditResult) -> bool:
    """Tell whether the updates are those that a spy kept."""
    return any(Path(str(case["checkpoint"])).name == SENT for case in result.settings["cases"])


def _named(settings: Mapping[str, Any], listed: Sequence[str]) -> bool:
    """Tell whether data, model and attacks are named as the command line names them."""
    data, model = str(settings["data"]), str(settings["model"])
    known = (*attacks.names(), AUTO)
    parts = [part for name in listed for part in str(name).split("+")]
    given = published(data) or data.startswith("folder:")
    return given and (model in models.names() or ":" in model) and {*parts} <= {*known}


def search_command(search: SearchResult) -> str | None:
    """Write the command that makes this search again; None where it was made of Python objects."""
    settings = {**search.settings}
    of_python = {"data_sha256", "model_sha256", "attack_settings"} & {*settings}
    if of_python or not _named(settings, [settings.get("attack", "adam-cosine")]):
        return None
    # The result has a digest of the weights, and the folder their path.
    settings["checkpoint"] = SEARCH.read(search.out).get("checkpoint")
    words = ["gradveil", "search"]
    for key, value in settings.items():
        option = key.replace("_", "-")
        if key in FACTS:
            continue
        if value is True:
            words.append(f"--{option}")
        elif value is False:
            words += ["--no-augment"] if key == "augment" else []
        elif value is not None:
            words += [f"--{option}", str(value)]
    return shlex.join((*words, "--out", FOLDER))


def command(result: AuditResult) -> str | None:
    """Write the command that makes this audit again; None where it was made of Python objects.

    None also for updates that a spy kept: the settings do not say where the clients' images are.
    """
    settings = result.settings
    if is_spied(result) or not _named(settings, settings["attacks"]):
        return None
    words = ["gradveil", "audit", "--data", settings["data"], "--model", settings["model"]]
    for name in settings["attacks"]:
        words += ["--attack", name]
    asked = [case for case in settings["cases"] if not case.get("control")]
    words += ["--images", settings["images"], *_cases(asked)]
    for key, usual in OPTIONS.items():
        if settings.get(key, usual) != usual:
            words += [f"--{key.replace('_', '-')}", settings[key]]
    words += ["--train-mode"] if settings.get("train_mode") else []
    words += [] if settings.get("sham", True) else ["--no-sham"]
    if len(asked) == len(settings["cases"]) and any(len(case.truths) > 1 for case in result.cases):
        words.append("--no-control")
    return shlex.join(str(word) for word in (*words, "--out", FOLDER))


def _cases(cases: list[dict[str, Any]]) -> list[str]:
    words, runs, steps = [], dict[str, str](), list[str]()
    checkpoints: dict[str, str] = {}
    for case in cases:
        text, weights = str(case["defense"]), case["checkpoint"]
        if case["step"] is not None:
            steps.append(str(case["step"]))
            # The last weights of a training lie in its folder, the others one folder deeper.
            folder = Path(str(weights)).parent
            runs[text] = str(folder if case["step"] == "end" else folder.parent)
        elif weights is not None:
            checkpoints[text] = str(weights)
    defenses = list(dict.fromkeys(str(case["defense"]) for case in cases))
    for text in defenses:
        words += ["--defense", text]
    clean = {bool(case["clean"]) for case in cases}
    words += ["--clean", "both" if len(clean) > 1 else "yes"] if True in clean else []
    for option, paths in (("--checkpoint", checkpoints), ("--run", runs)):
        if len({*paths.values()}) == 1 and len(paths) == len(defenses):
            words += [option, next(iter(paths.values()))]
        else:
            for text, path in paths.items():
                words += [option, f"{text}={path}"]
    return words + (["--at", ",".join(dict.fromkeys(steps))] if steps else [])
