"""The curious server, and the one that leaves broken replies out."""

import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from torch import Tensor

import flower
from flower import HereGrid, app_with, arrays
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.federated import Screen, Spy, spied
from gradveil.federated.messages import as_record, as_tensors

pytestmark = pytest.mark.filterwarnings(
    "ignore:the spy's files:gradveil.core.errors.GradveilWarning"
)


class Clients:
    """Client apps that add their number to every weight, and reply with as many examples."""

    def __init__(self, broken: Any = None) -> None:
        self.broken = broken

    def __call__(self, message: Any, context: Any) -> Any:
        number = context.node_config["partition-id"]
        found = as_tensors(message.content.array_records["arrays"])
        made = {name: value + number for name, value in found.items()}
        if number == 0 and self.broken is not None:
            return self.broken(message, made)
        return flower.answer(message, made, examples=number + 1)


def dies(*_: Any) -> Any:
    raise flower.DiesError("its process ended")


def start(strategy: Any, clients: Any, count: int = 5, rounds: int = 2) -> dict[str, Tensor]:
    result = strategy.start(HereGrid(clients, count), as_record(arrays()), num_rounds=rounds)
    return as_tensors(result.arrays)


def plain(**more: Any) -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, min_available_nodes=5, min_train_nodes=5, **more)


def test_a_spy_changes_nothing_and_keeps_what_each_client_sent(tmp_path: Path) -> None:
    found = start(Spy(plain(), rounds=[2], out=tmp_path), Clients())
    wanted = start(plain(), Clients())
    torch.testing.assert_close(found, wanted)
    assert spied.kept_rounds(tmp_path) == [2]
    updates = spied.read_round(tmp_path, 2)
    assert [update.client for update in updates] == [str(flower.NODE + n) for n in range(5)]
    for number, update in enumerate(updates):
        assert update.examples == number + 1 and update.round == 2 and not update.gradients
        for name, before in update.before.items():  # statistics of batch norm too
            torch.testing.assert_close(
                update.shared[name], (before + number).to(update.shared[name])
            )
        gradient = update.as_gradients(0.5)
        assert gradient.keys() == {"conv.weight", "head.weight"}
        torch.testing.assert_close(gradient["head.weight"], torch.full((10, 4), -2.0 * number))


def test_the_files_of_a_spy_are_for_their_owner_alone_and_it_warns(tmp_path: Path) -> None:
    with pytest.warns(GradveilWarning, match="can be inverted into the clients' images"):
        strategy = Spy(plain(), out=tmp_path / "spy")
    start(strategy, Clients(), rounds=1)
    files = list((tmp_path / "spy").rglob("*.safetensors"))
    assert len(files) == 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "spy").stat().st_mode) == 0o700


def test_a_spy_behind_secure_aggregation_has_averages_alone(tmp_path: Path) -> None:
    start(Spy(plain(), out=tmp_path, average_of=2), Clients(), rounds=1)
    first, second = spied.read_round(tmp_path, 1)
    assert first.members == (str(flower.NODE), str(flower.NODE + 1))
    assert len(second.members) == 3
    assert first.client == "average-0"
    wanted = arrays()["head.weight"] + (0 * 1 + 1 * 2) / 3
    torch.testing.assert_close(first.shared["head.weight"], wanted)


def test_a_spy_goes_around_a_strategy_of_differential_privacy(tmp_path: Path) -> None:
    private = DifferentialPrivacyServerSideFixedClipping(plain(), 0.0, 1e6, 5)
    app = app_with([], lambda w: {name: value + 1 for name, value in w.items()})
    start(Spy(private, out=tmp_path), app, rounds=1)
    assert len(spied.read_round(tmp_path, 1)) == 5


def test_a_full_disk_ends_the_keeping_and_not_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    def full(*_: Any) -> None:
        raise GradveilError("no space left on the disk")

    monkeypatch.setattr(spied, "_write", full)
    found = start(Spy(plain(), out=tmp_path), Clients())
    torch.testing.assert_close(found, start(plain(), Clients()))
    assert "the spy keeps nothing more of round 2: no space left on the disk" in log.text


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            lambda asked, made: flower.answer(
                asked, made | {"head.weight": torch.full((10, 4), float("nan"))}
            ),
            "'head.weight' has values that are not finite",
        ),
        (
            lambda asked, made: flower.answer(asked, made | {"head.weight": torch.zeros(2, 2)}),
            "'head.weight' has shape (2, 2), expected (10, 4)",
        ),
        (
            lambda asked, made: flower.answer(asked, {"conv.weight": made["conv.weight"]}),
            "it sent no 'head.weight'",
        ),
        (
            lambda asked, made: flower.answer(asked, made | {"more": torch.zeros(1)}),
            "it sent 'more', which the model has not",
        ),
        (
            lambda asked, _: Message(RecordDict(), reply_to=asked),
            "it sent 0 records of arrays",
        ),
        (lambda asked, made: flower.answer(asked, made, examples=0), "it sent no num-examples"),
        (dies, "its process ended"),
    ],
)
def test_a_round_goes_on_without_a_client_whose_reply_is_broken(
    broken: Any,
    said: str,
    tmp_path: Path,
    log: Any,
) -> None:
    found = start(Spy(Screen(plain()), out=tmp_path), Clients(broken), rounds=1)
    mean = sum(number * (number + 1) for number in range(1, 5)) / (2 + 3 + 4 + 5)
    torch.testing.assert_close(found["head.weight"], arrays()["head.weight"] + mean)
    assert said in log.text and str(flower.NODE) in log.text
    kept = {update.client for update in spied.read_round(tmp_path, 1)}  # it can be read
    assert {str(flower.NODE + number) for number in range(1, 5)} <= kept
    assert (str(flower.NODE) in kept) == ("examples" in said)


def test_a_reply_that_differs_from_most_is_left_out_of_gradients_too() -> None:
    def few(asked: Any, made: dict[str, Tensor]) -> Any:
        return flower.answer(asked, {"conv.weight": made["conv.weight"]}, "gradients")

    class Gradients(Clients):
        def __call__(self, message: Any, context: Any) -> Any:
            reply = super().__call__(message, context)
            if "arrays" in reply.content:
                reply.content["gradients"] = reply.content.pop("arrays")
            return reply

    found = start(Screen(plain()), Gradients(few), rounds=1)
    assert found.keys() == arrays().keys()


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"rounds": [0]}, "rounds 0: they are counted from 1"), ({"average_of": 1}, "at least 2")],
)
def test_a_spy_refuses_rounds_and_groups_that_cannot_be(settings: Any, said: str) -> None:
    with pytest.raises(GradveilError, match=said):
        Spy(plain(), **settings)


def test_a_round_that_was_not_kept_is_named(tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match=r"holds no round 3: it has none"):
        spied.read_round(tmp_path, 3)


def test_mods_and_spy_work_together(tmp_path: Path) -> None:
    from gradveil.federated import defend

    app = app_with([defend("prune:0.9")], lambda w: {k: v * 1.1 for k, v in w.items()})
    start(Spy(plain(), out=tmp_path), app, rounds=1)
    for update in spied.read_round(tmp_path, 1):
        zeros = (update.as_gradients(1.0)["conv.weight"] == 0).float().mean()
        assert 0.85 < zeros < 0.95
