"""Without Optuna and Ray, as on a machine that only scores, all but a study itself works."""

import subprocess
import sys
from pathlib import Path

CODE = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        absent = name.partition(".")[0] in ("optuna", "ray", "sqlalchemy", "lightning", "pandas")
        return None if absent else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]

import gradveil.search.confirm, gradveil.search.engine, gradveil.search.job, gradveil.search.loop
import gradveil.search.probe, gradveil.search.ray, gradveil.search.results, gradveil.search.run
import gradveil.search.setup, gradveil.search.space, gradveil.report.search
from gradveil.core.errors import GradveilError
from gradveil.search import SearchJob, run_search
from gradveil.search.ray import RayEngine

def told(work):
    try:
        work()
    except GradveilError as error:
        print(error)

job = SearchJob(data="fashion-mnist-mini", model="lenet", trials=1, keep=1)
told(lambda: run_search(job, sys.argv[1], progress=False))
told(lambda: RayEngine({}))
"""


def test_a_machine_without_optuna_and_ray_imports_all_and_says_what_a_search_needs(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-W", "error", "-c", CODE, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == [
        "a search needs Optuna: pip install gradveil[search]",
        "engine ray needs Ray: pip install gradveil[cluster]",
    ], done.stderr
    assert not (tmp_path / "run").exists()
