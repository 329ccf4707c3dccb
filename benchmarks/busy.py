"""Seconds of small attacks on a quiet and on a busy machine, by how threads wait for each other.

    python benchmarks/busy.py [--repeats 3] [--json FILE]

Three situations: alone, beside one process that computes all the time, and two attacks at once.
Each is timed with torch's default, with shorter and no spinning of idle threads (GOMP_SPINCOUNT,
OMP_WAIT_POLICY, read when libgomp is loaded), and with one thread. Settings take turns, so that a
load from outside meets all of them. Only the attack is timed, not the imports.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "spin 3,000": {"GOMP_SPINCOUNT": "3000"},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "spin 300": {"GOMP_SPINCOUNT": "300"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
SITUATIONS = ("alone", "beside a busy process", "two at once")
JOBS = {"lenet": (12, 400), "small-convnet": (8, 200)}  # victims and iterations

WORK = """
import sys, time
from dataclasses import replace
import torch
from gradveil.attacks import find
from gradveil.clients import Client
from gradveil.core.seeds import generator
from gradveil.models import build
sys.path.insert(0, sys.argv[4])
from attack import small_convnet
torch.manual_seed(0)
name, victims, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
made = small_convnet() if name == "small-convnet" else build(name, channels=3, size=32, classes=100)
model = made.eval()
images, labels = torch.rand(victims, 3, 32, 32), torch.arange(victims)
seen = [each.seen for each in Client(model, 100).share_each(images, labels, 0)]
attack = replace(find("adam-cosine"), steps=5, restarts=1)
attack(seen, generator(0))
sys.stdin.readline()
began = time.perf_counter()
replace(attack, steps=steps)(seen, generator(0))
print(time.perf_counter() - began)
"""
SPIN = "while True: pass"


def start(job: str, setting: dict[str, str]) -> "subprocess.Popen[str]":
    victims, steps = JOBS[job]
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-c", WORK, job, str(victims), str(steps), folder]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "MKL_"))}
    return subprocess.Popen(
        command, env=kept | setting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def seconds(job: str, setting: dict[str, str], situation: str) -> float:
    """Return the seconds of the attack; of two at once, those of the slower."""
    busy = subprocess.Popen([sys.executable, "-c", SPIN]) if situation == SITUATIONS[1] else None
    try:
        jobs = [start(job, setting) for _ in range(2 if situation == SITUATIONS[2] else 1)]
        return max(float(out) for out, _ in _released(jobs))
    finally:
        if busy:
            busy.kill()


def _released(jobs: "list[subprocess.Popen[str]]") -> list[tuple[str, str]]:
    """Start the attacks together, when all have warmed up: each waits for a line."""
    for each in jobs:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    return [each.communicate() for each in jobs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", nargs="+", default=[*JOBS], choices=[*JOBS])
    parser.add_argument("--settings", nargs="+", default=[*SETTINGS], choices=[*SETTINGS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load before: {load:.2f}" + ("; others are at work" if load > 0.5 else ""))
    rows = []
    for job in options.jobs:
        for situation in SITUATIONS:
            taken: dict[str, list[float]] = {name: [] for name in options.settings}
            for _ in range(options.repeats):
                for name in options.settings:
                    taken[name].append(seconds(job, SETTINGS[name], situation))
            middle = {name: statistics.median(each) for name, each in taken.items()}
            best = min(middle.values())
            for name, value in middle.items():
                row = {"job": job, "situation": situation, "setting": name, "seconds": taken[name]}
                rows.append({**row, "of_best": value / best})
                print(f"{job:14} {situation:22} {name:13} {value:7.2f} s  {value / best:5.2f} x")
    if options.json:
        facts = {
            "load_before": load,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "jobs": {name: {"victims": v, "steps": s} for name, (v, s) in JOBS.items()},
            "rows": rows,
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
