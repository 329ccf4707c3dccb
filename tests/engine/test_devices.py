"""Which device a name means, with and without a GPU; how many threads a busy machine gets."""

import time

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.engine.device import find_device, sharing_cores


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
