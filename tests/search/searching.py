"""A small search with a toy score and a log of every evaluation, for tests of shared studies."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from gradveil.core.seeds import derived
from gradveil.search.space import POLICIES, Trial
from gradveil.search.study import Study
from gradveil.transforms import Policy

SETTINGS = {"score": "toy", "images": 5}
SEED = 11


def place(storage: str) -> str | Path:
    return storage if "://" in storage else Path(storage)


def toy(policy: Policy) -> dict[str, list[float]]:
    """Numbers that depend on the policy alone."""
    base = derived(0, str(policy)) % 1000 / 7
    return {"privacy": [base + image / 3 for image in range(5)], "accuracy": [-base]}


def state(trial: Trial[Policy]) -> str:
    return "scored" if trial.number % 4 else "inaccurate"


def join(
    storage: str | Path,
    sampler: str = "random",
    settings: Mapping[str, object] = SETTINGS,
    seed: int = SEED,
) -> Study[Policy]:
    objectives = ("privacy", "accuracy") if sampler == "nsga2" else ("privacy",)
    return Study.open(storage, "toy", settings, sampler, seed, objectives, POLICIES)


def search(study: Study[Policy], at_once: int, target: int, log: Path, seconds: float) -> None:
    """Group by group, as a real search: all of a group are evaluated, then all are finished."""
    while True:
        trials = study.claim(at_once, target)
        for trial in trials:
            with log.open("ab") as file:
                file.write(f"{os.getpid()} {trial.number} {trial.tried}\n".encode())
            time.sleep(seconds)
        for trial in trials:
            study.finish(trial, state(trial), toy(trial.tried))
        if not trials:
            if not study.busy(target):
                return
            time.sleep(0.02)


def work(storage: str, sampler: str, at_once: int, target: int, log: Path, seconds: float) -> None:
    """Search as a process of its own."""
    study = join(place(storage), sampler)
    search(study, at_once, target, log, seconds)
    study.close()
