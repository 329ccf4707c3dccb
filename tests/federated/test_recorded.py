"""What a spy kept, attacked by the ordinary audit; and the command that does it all on Flower."""

import json
import os
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flower
import toys
from gradveil.attacks import find
from gradveil.audits import run_audit
from gradveil.clients import Client
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.tensor_files import read_safetensors
from gradveil.core.types import Batch, Protocol
from gradveil.data import Images
from gradveil.data.images import as_images
from gradveil.defenses import parse
from gradveil.federated import spied
from gradveil.federated.client_app import Plan, Workshop, make_client_app
from gradveil.federated.job import SPY, FederationJob, make_model
from gradveil.federated.partition import Partition, parse_graph
from gradveil.federated.recorded import as_recorded, batch_digest, choose_victims, make_audit
from gradveil.federated.run import FederationResult, federate
from gradveil.models import build

pytestmark = pytest.mark.filterwarnings(
    "ignore:the spy's files:gradveil.core.errors.GradveilWarning",
    "ignore:.*dead or saturated:gradveil.core.errors.GradveilWarning",
)


def images(first: int, count: int) -> Images:
    batch = toys.fashion(first + count, 12)
    some = batch.images[first:], batch.labels[first:]
    return as_images(*some, name="small", classes=10, mean=[0.2], std=[0.4])


def make_job(**more: Any) -> FederationJob:
    given: dict[str, Any] = {
        "test": images(160, 60),
        "batch_size": 1,
        "lr": 0.05,
        "clients": 3,
        "rounds": 2,
        "train_mode": False,
        "spy_rounds": (2,),
        "attacks": {"dlg": find("dlg")},
        "steps": 2,
        "audited": 3,
    }
    return FederationJob(images(0, 160), toys.leaky().float(), **(given | more))


def here(plan: Plan, serve: Any) -> None:
    workshop = Workshop.of(plan.job, plan.root)
    app = make_client_app(plan, lambda: workshop)
    serve(flower.HereGrid(app, plan.job.clients), lambda: False)


def run(job: FederationJob, out: Path) -> FederationResult:
    return federate(job, out, engine=here, progress=False)


FEDAVG: dict[str, Any] = {
    "clients": 40,
    "rounds": 1,
    "spy_rounds": (1,),
    "local_epochs": 1,
    "batch_size": 2,
    "momentum": 0.5,
    "weight_decay": 1e-3,
    "train_mode": True,
    "audited": 4,
}  # clients of 4 images, who make two steps each


class AsDouble(nn.Module):
    """Takes images of any type in float64."""

    def forward(self, images: Tensor) -> Tensor:
        return images.double()


def normed() -> nn.Module:
    return nn.Sequential(AsDouble(), toys.conv_with_norm(1, 12))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[FederationJob, Path]:
    """A round of FedAvg that was spied on, and its folder."""
    job = replace(make_job(**(FEDAVG | {"attacks": {}})), model=normed())
    out = tmp_path_factory.mktemp("trained")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradveilWarning)
        run(job, out)
    return job, out


def assert_same_as_outside(job: FederationJob, number: int, out: Path, folder: Path) -> None:
    """Audit what was spied, and the same batches outside of Flower."""
    spied_on = make_audit(job, number, out, job.splits(None))
    found = run_audit(spied_on, folder / "spied", progress=False)
    outside = run_audit(replace(spied_on, recorded=None), folder / "outside", progress=False)
    (one,), (other,) = found.cases, outside.cases
    assert len(one.records) == len(other.records) > 10
    for record, wanted in zip(one.records, other.records, strict=True):
        assert (record.key, record.image) == (wanted.key, wanted.image)
        for truth, scores in record.scores.items():
            assert scores == pytest.approx(dict(wanted.scores[truth]), rel=1e-3)


@pytest.mark.filterwarnings("ignore::gradveil.core.errors.GradveilWarning")
def test_the_audit_of_a_spied_round_equals_an_audit_outside_of_flower(tmp_path: Path) -> None:
    # In float64: attacks amplify what rounding makes of a pass of one victim or of several.
    job = replace(make_job(), model=toys.leaky())
    run(replace(job, attacks={}), tmp_path / "run")
    assert_same_as_outside(job, 2, tmp_path / "run", tmp_path)


@pytest.mark.filterwarnings("ignore::gradveil.core.errors.GradveilWarning")
def test_the_same_is_true_of_local_epochs_in_mini_batches(
    trained: tuple[FederationJob, Path], tmp_path: Path
) -> None:
    job, out = trained
    assert_same_as_outside(replace(job, attacks={"dlg": find("dlg")}), 1, out, tmp_path)


def shared(job: FederationJob, out: Path, number: int = 2) -> list[Any]:
    """What the audit's client shares of the victims' batches."""
    splits = job.splits(None)
    audit = make_audit(replace(job, attacks={"dlg": find("dlg")}), number, out, splits)
    assert audit.recorded is not None and isinstance(audit.data, Images)
    model = make_model(job, splits[0])
    model.load_state_dict(dict(spied.read_round(out / SPY, number)[0].before))
    client = audit.recorded(Client(model, 10, protocol=audit.protocol, defense=job.defense))
    size = audit.batch_size
    batches = [
        Batch(
            audit.data.images[first : first + size].float() / 255,
            audit.data.labels[first : first + size],
        )
        for first in range(0, audit.images, size)
    ]
    return client.share_batches(batches, torch.Generator(), tell_defense=True, tell_draws=True)


def test_an_audit_attacks_the_record_and_knows_the_draws_of_the_client(tmp_path: Path) -> None:
    job = make_job(defense=parse("3-1-7,then,gaussian:0.01"), attacks={})
    run(job, tmp_path)
    updates = spied.read_round(tmp_path / SPY, 2)
    for update, given in zip(updates, shared(job, tmp_path), strict=True):
        for name, value in given.seen.gradients.items():
            assert torch.equal(value, update.shared[name])
        numbers = job.batch_of(
            Workshop.of(job, None).shares[int(update.client)], int(update.client), 2
        )
        batch = Workshop.of(job, None).batch(numbers)
        used = job.inside.protect_batch(batch, job.draws(int(update.client), 2)).images
        assert torch.equal(given.used, used)
        known = given.seen.knowledge.transform(batch.images)
        torch.testing.assert_close(known, used, atol=1 / 254, rtol=0)


def test_a_batch_that_was_not_recorded_is_shared_as_ever() -> None:
    batch, client = toys.fashion(2), Client(toys.leaky())
    recorded = as_recorded({}, client)
    (one,) = recorded.share_batches([batch], torch.Generator())
    (other,) = client.share_batches([batch], torch.Generator())
    for name, value in one.seen.gradients.items():
        assert torch.equal(value, other.seen.gradients[name])
    assert batch_digest(batch) != batch_digest(toys.fashion(1))


def test_local_training_over_whole_shares_is_attacked_with_its_steps(tmp_path: Path) -> None:
    job = make_job(
        clients=40,
        local_steps=3,
        batch_size=4,
        momentum=0.0,
        weight_decay=0.0,
        attacks={},
        audited=8,
    )
    run(job, tmp_path)
    chosen = choose_victims(job, 2, tmp_path, job.splits(None)[0])
    assert chosen.protocol.local_steps == 3 and not chosen.note and len(chosen.updates) == 2
    plain = Client(Workshop.of(job, None).model, 10, protocol=chosen.protocol)
    plain.model.load_state_dict(dict(chosen.updates[0].before))
    batch = Workshop.of(job, None).batch(chosen.numbers[0])
    (wanted,) = plain.share_batches([batch], torch.Generator())
    for name, value in shared(job, tmp_path)[0].seen.gradients.items():
        torch.testing.assert_close(value, wanted.seen.gradients[name], atol=2e-5, rtol=1e-3)


def test_local_epochs_in_mini_batches_are_attacked_with_what_batch_norm_sent(
    trained: tuple[FederationJob, Path],
) -> None:
    job, out = trained
    chosen = choose_victims(job, 1, out, job.splits(None)[0])
    assert chosen.protocol == Protocol(1, 0.05, True, 1, 2, 0.5, 1e-3) and not chosen.note
    workshop = Workshop.of(job, None)
    batch = workshop.batch(chosen.numbers[0])
    plain = Client(workshop.model, 10, protocol=chosen.protocol)
    (wanted,) = plain.share_batches([batch], torch.Generator())
    seen = shared(job, out, 1)[0].seen
    for name, value in seen.gradients.items():
        torch.testing.assert_close(value, wanted.seen.gradients[name])
    sent = seen.knowledge.statistics
    assert sent is not None and wanted.seen.knowledge.statistics is not None
    for name, value in wanted.seen.knowledge.statistics.items():
        assert torch.equal(sent[name], chosen.updates[0].shared[name])
        torch.testing.assert_close(sent[name], value)


def test_local_steps_under_a_policy_are_said_not_to_be_attacked(tmp_path: Path) -> None:
    job = make_job(**(FEDAVG | {"attacks": {}, "defense": parse("3-1-7"), "fraction": 0.05}))
    run(job, tmp_path)
    with pytest.raises(GradveilError, match="2 local steps under 3-1-7 are not attacked"):
        choose_victims(job, 1, tmp_path, job.splits(None)[0])


@pytest.mark.parametrize(
    ("settings", "note", "size"),
    [
        ({"local_epochs": 2, "batch_size": 4, "clients": 20}, "the order of the first epoch", 8),
        ({"local_steps": 3, "batch_size": 4, "clients": 20}, "3 local steps are taken as one", 8),
        ({"local_steps": 1, "batch_size": 4, "clients": 20}, "", 4),
        ({"average_of": 3, "batch_size": 2}, "", 6),
        ({"graph": parse_graph("ring", 3), "spy": 1}, "participant 1 attacks with its own", 1),
    ],
)
def test_a_note_says_how_an_update_is_taken(
    settings: Any, note: str, size: int, tmp_path: Path
) -> None:
    job = make_job(**(settings | {"attacks": {}}))
    run(job, tmp_path)
    chosen = choose_victims(job, 2, tmp_path, job.splits(None)[0])
    assert note in chosen.note and bool(note) == bool(chosen.note)
    assert {len(numbers) for numbers in chosen.numbers} == {size}


def test_an_average_is_the_gradient_of_all_its_images(tmp_path: Path) -> None:
    job = make_job(average_of=3, batch_size=2, attacks={})
    run(job, tmp_path)
    chosen = choose_victims(job, 2, tmp_path, job.splits(None)[0])
    workshop = Workshop.of(job, None)
    workshop.model.load_state_dict(dict(chosen.updates[0].before))
    batch = workshop.batch(chosen.numbers[0])
    (wanted,) = Client(workshop.model, 10).share_batches([batch], torch.Generator())
    (found,) = shared(job, tmp_path)
    for name, value in found.seen.gradients.items():
        torch.testing.assert_close(value, wanted.seen.gradients[name], atol=1e-6, rtol=1e-4)


def test_the_note_says_that_the_sham_of_an_average_is_protected_once(tmp_path: Path) -> None:
    said = "prune:0.5 acts on the update of each client, and in the sham once on their average"
    for given, note in ((None, ""), (3, said)):
        job = make_job(average_of=given, defense=parse("prune:0.5"))
        out = tmp_path / str(given)
        run(replace(job, attacks={}), out)
        assert make_audit(job, 2, out, job.splits(None)).note == note


@dataclass(frozen=True)
class Uneven(Partition):
    """Two clients: one with 8 images, one with 4."""

    def divide(self, labels: Tensor, clients: int, seed: int) -> list[Tensor]:
        return [torch.arange(8), torch.arange(8, 12)]


class BegunError(GradveilError):
    """The training has begun."""


def begin(_: Plan, __: Any) -> None:
    raise BegunError("the training has begun")


UNEVEN: dict[str, Any] = {
    "clients": 2,
    "split": Uneven(),
    "local_epochs": 1,
    "batch_size": 4,
    "audited": 8,
}


def test_what_cannot_be_attacked_is_told_before_the_training_and_not_called_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradveil.federated.recorded.MOST", 4)
    job = make_job(**UNEVEN, rounds=20, fraction=0.5)
    large, small = (
        next(number for number in range(1, 21) if job.participants(number) == [client])
        for client in (0, 1)
    )
    job = replace(job, rounds=max(large, small), spy_rounds=(large, small))
    said = "an update of 8 images is not attacked, at most 4 are; that does not make it safe"
    with pytest.warns(GradveilWarning, match=f"^round {large}: {said}"), pytest.raises(BegunError):
        federate(job, tmp_path / "begun", engine=begin, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradveilWarning)
        found = run(job, tmp_path / "run")
    assert list(found.audits) == [small] and found.not_attacked == {large: f"round {large}: {said}"}


@pytest.mark.parametrize(
    ("most", "said"),
    [(4, "1 of more than 4 images"), (256, "1 of other numbers of images than 4")],
)
def test_updates_of_other_sizes_are_told_before_the_training_and_in_the_note(
    most: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradveil.federated.recorded.MOST", most)
    job = make_job(**UNEVEN, rounds=1, spy_rounds=(1,))
    said = f"not attacked, of 2 updates: {said}; that does not make them safe"
    with pytest.warns(GradveilWarning, match=f"^round 1: {said}"), pytest.raises(BegunError):
        federate(job, tmp_path, engine=begin, progress=False)
    run(replace(job, attacks={}), tmp_path / "run")
    audit = make_audit(job, 1, tmp_path / "run", job.splits(None))
    assert audit.images == audit.batch_size == 4 and said in audit.note


@pytest.mark.filterwarnings("error:.*hardly resemble:gradveil.core.errors.GradveilWarning")
def test_what_a_neighbor_sent_from_its_own_weights_is_not_doubted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradveil.federated.recorded.LEAST_ALIKE", 2.0)  # no update is so alike
    graph = parse_graph("0-1,1-2,2-3", 4)
    job = make_job(clients=4, batch_size=2, graph=graph, spy=1)
    assert list(run(job, tmp_path).audits) == [2]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"batch_size": 8, "spy_rounds": (1, 2)}, "rounds 1, 2: an update of 8 images is not"),
        ({**UNEVEN, "batch_size": 2, "average_of": 2}, "round 2: an update of 12 images is not"),
        ({"steps": 0}, "steps 0: it must be at least 1"),
        ({"attacks": {"closed-form": find("closed-form")}}, "none of closed-form has such a"),
    ],
)
def test_a_training_whose_rounds_cannot_be_attacked_at_all_is_refused_before_it_begins(
    more: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradveil.federated.recorded.MOST", 4)
    with pytest.raises(GradveilError) as error:
        federate(make_job(**more), tmp_path / "run", engine=begin, progress=False)
    assert "nothing could be attacked after the training" in str(error.value)
    assert said in str(error.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("local", [True, False], ids=["local epochs", "gradients"])
def test_an_average_in_train_mode_is_the_mean_of_what_each_client_did(
    local: bool, tmp_path: Path
) -> None:
    more = FEDAVG if local else FEDAVG | {"local_epochs": None, "batch_size": 4}
    job = replace(make_job(**(more | {"attacks": {}, "average_of": 3})), model=normed())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradveilWarning)
        run(job, tmp_path)
    chosen = choose_victims(job, 1, tmp_path, job.splits(None)[0])
    each = Protocol(1, 0.05, True, 1, 2, 0.5, 1e-3) if local else Protocol(1, 0.05, True)
    assert chosen.protocol == replace(each, averaged_clients=3) and not chosen.note
    assert len(chosen.updates[0].members) == 3 and len(chosen.numbers[0]) == 12
    workshop = Workshop.of(job, None)
    batch = workshop.batch(chosen.numbers[0])
    plain = Client(workshop.model, 10, protocol=chosen.protocol)
    (wanted,) = plain.share_batches([batch], torch.Generator())
    for name, value in shared(job, tmp_path, 1)[0].seen.gradients.items():
        torch.testing.assert_close(value, wanted.seen.gradients[name])


def test_an_average_of_clients_with_other_numbers_of_images_is_said_to_be_approximated(
    tmp_path: Path,
) -> None:
    job = make_job(**UNEVEN, rounds=1, spy_rounds=(1,), average_of=2)
    run(replace(job, attacks={}), tmp_path)
    chosen = choose_victims(job, 1, tmp_path, job.splits(None)[0])
    assert "clients with different numbers of images are taken as one gradient" in chosen.note
    assert "an approximation: what it does not find is not shown to be safe" in chosen.note
    assert chosen.protocol == Protocol(local_lr=0.05)
    assert chosen.divided_by == pytest.approx(0.05 * (1 + 1.9))  # two steps with momentum 0.9


def test_averages_of_clients_that_draw_are_not_attacked(tmp_path: Path) -> None:
    job = make_job(average_of=3, defense=parse("3-1-7"), attacks={})
    run(job, tmp_path)
    with pytest.raises(GradveilError, match="each client drew by itself"):
        choose_victims(job, 2, tmp_path, job.splits(None)[0])


def test_the_command_trains_and_audits_on_flowers_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "w.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from gradveil.cli import run as command

        monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # in the processes of clients
        words = "federate --data fashion-mnist-mini --model lenet --clients 2 --rounds 2 --lr 0.05"
        words += " --batch-size 1 --defense prune:0.5 --spy-rounds 2 --attack dlg --steps 1"
        words += f" --audited 2 --json --out {tmp_path / 'run'} --checkpoint {start}"
        torch.save(build("lenet", channels=1, size=28, classes=10, seed=5).state_dict(), start)
        assert command(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rounds"] == 2 and [row["clients"] for row in found["history"]] == [2, 2]
    assert [row["round"] for row in found["audits"]] == [2]
    assert all(row["attack"] == "dlg" and row["n"] == 2 for row in found["audits"])
    assert Path(found["page"]) == tmp_path / "run" / "index.html"
    job = FederationJob(
        "fashion-mnist-mini", "lenet", 2, 2, parse("prune:0.5"), batch_size=1, lr=0.05, start=start
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same = federate(job, tmp_path / "here", engine=here, progress=False)
        both = {"one": read_safetensors(tmp_path / "run" / "model.safetensors")[0]}
    for name, value in same.model.state_dict().items():
        torch.testing.assert_close(both["one"][name], value, atol=1e-6, rtol=0)
    assert os.environ.get("FLWR_TELEMETRY_ENABLED") == "0"


@pytest.mark.filterwarnings("ignore::gradveil.core.errors.GradveilWarning")
def test_the_command_ends_with_a_table_its_notes_and_a_page_of_all_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradveil.cli import run as command

    engine = partial(federate, engine=here)
    monkeypatch.setattr("gradveil.federated.run.federate", engine)
    out = tmp_path / "run"
    words = f"federate --data fashion-mnist-mini --model lenet --rounds 2 --clients 3 --out {out}"
    words += " --batch-size 1 --graph ring --spy-rounds 1,2 --attack dlg --steps 1 --audited 2"
    assert command(words.split()) == 0
    said = capsys.readouterr().out
    assert all(
        name in said for name in ("line-up", "blind", "sham", f"page    {out / 'index.html'}")
    )
    assert "\nRounds 1, 2: participant 0 attacks with its own weights" in said
    page = (out / "index.html").read_text()
    assert all(name in page for name in ("round-0001", "round-0002", "participant 0 attacks"))
    (out / "index.html").unlink()
    assert command(["report", str(out)]) == 0  # the same page
    assert (out / "index.html").read_text() == page
