"""What a spy kept, attacked by the ordinary audit; and the command that does it all on Flower."""

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flower
import toys
from gradveil.attacks import find
from gradveil.audits import run_audit
from gradveil.clients import Client
from gradveil.core.errors import GradveilError
from gradveil.core.tensor_files import read_safetensors
from gradveil.core.types import Batch
from gradveil.data import Images
from gradveil.data.images import as_images
from gradveil.defenses import parse
from gradveil.federated import spy
from gradveil.federated.client_app import Plan, Workshop, make_client_app, make_model
from gradveil.federated.job import SPY, FederationJob
from gradveil.federated.partition import parse_graph
from gradveil.federated.recorded import as_recorded, batch_digest, choose_victims, make_audit
from gradveil.federated.run import FederationResult, federate

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


@pytest.mark.filterwarnings("ignore::gradveil.core.errors.GradveilWarning")
def test_the_audit_of_a_spied_round_equals_an_audit_outside_of_flower(tmp_path: Path) -> None:
    # In float64: attacks amplify what rounding makes of a pass of one victim or of several.
    job = replace(make_job(), model=toys.leaky())
    found = run(job, tmp_path / "run")
    spied, _ = make_audit(job, 2, tmp_path / "run", job.splits(None))
    outside = run_audit(replace(spied, recorded=None), tmp_path / "outside", progress=False)
    (one,), (other,) = found.audits[2].cases, outside.cases
    assert len(one.records) == len(other.records) > 10
    for record, wanted in zip(one.records, other.records, strict=True):
        assert (record.key, record.image) == (wanted.key, wanted.image)
        for truth, scores in record.scores.items():
            assert scores == pytest.approx(dict(wanted.scores[truth]), rel=1e-3)


def shared(job: FederationJob, out: Path) -> list[Any]:
    """What the audit's client shares of the victims' batches."""
    splits = job.splits(None)
    audit, _ = make_audit(replace(job, attacks={"dlg": find("dlg")}), 2, out, splits)
    assert audit.recorded is not None and isinstance(audit.data, Images)
    model = make_model(job, splits[0])
    model.load_state_dict(dict(spy.read_round(out / SPY, 2)[0].before))
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
    updates = spy.read_round(tmp_path / SPY, 2)
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


@pytest.mark.parametrize(
    ("settings", "note", "size"),
    [
        ({"local_epochs": 2, "batch_size": 4, "clients": 20}, "4 local steps are taken as one", 8),
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


def test_what_cannot_be_attacked_is_said_and_not_called_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradveil.federated.recorded.MOST", 4)
    found = run(make_job(batch_size=8), tmp_path)
    assert found.audits == {}
    assert (
        "8 images is not attacked, at most 4 are; that does not make it safe"
        in found.not_attacked[2]
    )


def test_averages_of_clients_that_draw_are_not_attacked(tmp_path: Path) -> None:
    job = make_job(average_of=3, defense=parse("3-1-7"), attacks={})
    run(job, tmp_path)
    with pytest.raises(GradveilError, match="each client drew by itself"):
        choose_victims(job, 2, tmp_path, job.splits(None)[0])


def test_the_command_trains_and_audits_on_flowers_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from gradveil.cli import run as command

        monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # in the processes of clients
        words = "federate --data fashion-mnist-mini --model lenet --clients 2 --rounds 2 --lr 0.05"
        words += " --batch-size 1 --defense prune:0.5 --spy-rounds 1,2 --attack dlg --steps 1"
        words += f" --audited 2 --json --out {tmp_path / 'run'}"
        assert command(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rounds"] == 2 and [row["clients"] for row in found["history"]] == [2, 2]
    assert [row["round"] for row in found["audits"]] == [1, 2]
    assert all(row["attack"] == "dlg" and row["n"] == 2 for row in found["audits"])
    job = FederationJob(
        "fashion-mnist-mini", "lenet", 2, 2, parse("prune:0.5"), batch_size=1, lr=0.05
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same = federate(job, tmp_path / "here", engine=here, progress=False)
        both = {"one": read_safetensors(tmp_path / "run" / "model.safetensors")[0]}
    for name, value in same.model.state_dict().items():
        torch.testing.assert_close(both["one"][name], value, atol=1e-6, rtol=0)
    assert os.environ.get("FLWR_TELEMETRY_ENABLED") == "0"
