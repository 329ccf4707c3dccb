"""Which device a name means, with and without a GPU; how many threads a busy machine gets."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import toys
from gradveil.core.errors import GradveilError
from gradveil.engine.device import _OtherPrograms, find_device, sharing_cores


def gpu(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)


@pytest.mark.parametrize(
    ("name", "there", "kind"),
    [
        ("auto", False, "cpu"),
        ("auto", True, "cuda"),
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_auto_is_the_gpu_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, name: str, there: bool, kind: str
) -> None:
    gpu(monkeypatch, there)
    assert find_device(name).type == kind


def test_cuda_without_a_gpu_is_refused_with_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, False)
    with pytest.raises(GradveilError, match=r"^device cuda: .*choose cpu or auto$"):
        find_device("cuda")


@pytest.mark.parametrize("name", ["gpu", "", "CPU", "cuda:0", "mps"])
def test_an_unknown_device_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(
        GradveilError,
        match=f"^unknown device '{name}': choose from auto, cpu, cuda(; did you mean cuda\\?)?$",
    ):
        find_device(name)


@pytest.mark.parametrize(("share", "left"), [(0.99, 2), (0.6, 1)])
def test_beside_busy_programs_the_rest_goes_on_with_one_thread(
    share: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"wall": 0.0}
    monkeypatch.setattr(time, "perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(time, "process_time", lambda: 2 * share * clock["wall"])
    monkeypatch.setattr("gradveil.engine.device._OTHERS", lambda: 0.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    torch.set_num_threads(2)
    try:
        with sharing_cores(torch.device("cpu")) as look:
            clock["wall"] += 1.0
            look()
            assert torch.get_num_threads() == 2  # one look may be a chance
            clock["wall"] += 1.0
            look()
            assert torch.get_num_threads() == left
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("cores", "others", "threads"),
    [(2, 0.0, 2), (2, 0.2, 2), (2, 0.9, 1), (2, 2.0, 1), (16, 1.0, 2), (16, 15.1, 1)],
)
def test_an_attack_begins_with_as_many_threads_as_cores_are_free(
    cores: int, others: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradveil.engine.device._OTHERS", lambda: others)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    torch.set_num_threads(2)
    try:
        with sharing_cores(torch.device("cpu")):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_each_part_of_a_long_work_counts_the_free_cores_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, had = torch.device("cpu"), []
    with toys.two_cores(monkeypatch, [1.0, 0.0, 1.0]):
        with sharing_cores(cpu):
            had.append(torch.get_num_threads())
            for _ in range(2):
                with sharing_cores(cpu):
                    had.append(torch.get_num_threads())
            had.append(torch.get_num_threads())
        assert [*had, torch.get_num_threads()] == [1, 2, 1, 1, 2]


def test_what_other_programs_use_is_all_but_this_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(0.0, 5.0, 1.0), (0.1, 9.0, 1.0), (2.0, 9.0, 2.0), (4.0, 9.0, 4.0)])
    monkeypatch.setattr(_OtherPrograms, "_times", staticmethod(lambda: next(times)))
    others = _OtherPrograms()
    assert others() == 0.0  # too short a time to tell
    assert others() == pytest.approx(1.5)
    assert others() == 0.0


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="not on Linux")
def test_a_busy_child_counts_as_another_program() -> None:
    loop = [sys.executable, "-c", "while True: pass"]
    others = _OtherPrograms()
    with subprocess.Popen(loop) as child:
        time.sleep(1.0)
        used = others()
        child.kill()
    assert 0.3 < used <= (os.cpu_count() or 1) + 0.1
