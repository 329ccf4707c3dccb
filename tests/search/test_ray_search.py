"""A whole search on a Ray cluster, of whose machines one dies, ends as one on this machine does.

Its confirming audits run on the workers too.
"""

import gc
import json
import logging
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from breaking import content
from gradveil.attacks import find
from gradveil.core.errors import GradveilWarning
from gradveil.models import build
from gradveil.models.checkpoints import save_checkpoint
from gradveil.search import SearchJob, run_search
from gradveil.search.ray import disconnect

# Ray leaves files open; the warning comes whenever they are collected, in whichever test.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without cores, and two machines with one each; this process is connected to it."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else a busy machine starves them
    handler = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings():  # of what later versions will do
        warnings.simplefilter("ignore")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0})
        nodes = [made.add_node(num_cpus=1, num_gpus=0) for _ in range(2)]
        ray.init(address=made.address, log_to_driver=False, logging_level=logging.CRITICAL)
        gc.collect()
    yield made, nodes
    disconnect()
    made.shutdown()  # type: ignore[no-untyped-call]
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def job(tmp_path: Path) -> SearchJob:
    weights = tmp_path / "weights.safetensors"
    model = build("mlp", channels=1, size=28, classes=10, seed=9)
    save_checkpoint(weights, model, {"test_accuracy": 0.125})
    return SearchJob(
        data="fashion-mnist-mini",
        model="mlp",
        checkpoint=weights,
        attack=find("closed-form"),
        attack_name="closed-form",
        trials=12,
        keep=2,
        images=4,
        audit_images=2,
        threshold=-1000.0,
        at_once=6,
    )


@pytest.mark.parametrize("moment", ["trials", "audits"])
def test_a_search_on_ray_ends_as_one_without_it_though_a_machine_dies(
    cluster: Any, job: SearchJob, tmp_path: Path, moment: str
) -> None:
    made, nodes = cluster
    here = run_search(job, tmp_path / "here", progress=False)
    out = tmp_path / "there"
    sign = out / ("study.journal" if moment == "trials" else "confirm/settings.json")
    seen = []

    def kill() -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until and not (out / "search.json").exists():
            began = sign.exists() and (moment == "audits" or b"result" in sign.read_bytes())
            if began:
                seen.append(True)
                made.remove_node(nodes[0], allow_graceful=False)
                return
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradveilWarning)  # a worker was lost
        there = run_search(job, out, engine="ray", progress=False)
    killer.join()
    assert seen and there.trials == here.trials and there.words == here.words
    ours, theirs = content(out), content(tmp_path / "here")
    assert ours.keys() == theirs.keys()
    assert [file for file in ours if ours[file] != theirs[file]] == []
    records = [*(out / "confirm").glob("*/records.jsonl")]
    assert len(records) == 8 and all(json.loads(r.read_text().splitlines()[0]) for r in records)
