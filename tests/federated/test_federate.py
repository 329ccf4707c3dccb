"""Federated training: equal to a plain loop, spied on, decentralized, and after a kill."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from flwr.app import Error, Message
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import flower
import toys
from gradveil.attacks import GradientMatching, find
from gradveil.attacks.attack_files import image_digest
from gradveil.clients import Client
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.seeds import generator
from gradveil.core.stopping import Stopped
from gradveil.core.tensor_files import read_safetensors
from gradveil.core.types import Batch, Protocol
from gradveil.data import Images
from gradveil.data.images import as_images
from gradveil.defenses import parse
from gradveil.defenses.base import Moment
from gradveil.federated import recorded, spied
from gradveil.federated import run as federated_run
from gradveil.federated.client_app import Plan, Workshop
from gradveil.federated.job import SPY, FederationJob, make_model, make_shares
from gradveil.federated.messages import LOG, as_record, as_tensors
from gradveil.federated.partition import ByClass, Dirichlet, parse_graph, parse_partition
from gradveil.federated.run import FederationResult, federate
from gradveil.models.checkpoints import read_settings

pytestmark = pytest.mark.filterwarnings(
    "ignore:the spy's files:gradveil.core.errors.GradveilWarning"
)
CLIENTS, ROUNDS = 4, 3
PARTICIPANTS = 10  # as in the papers


def images(count: int = 96) -> Images:
    batch = toys.fashion(count, 12)
    return as_images(batch.images, batch.labels, name="small", classes=10, mean=[0.2], std=[0.4])


def make_job(**more: Any) -> FederationJob:
    given: dict[str, Any] = {
        "test": images(40),
        "batch_size": 4,
        "lr": 0.05,
        "clients": CLIENTS,
        "rounds": ROUNDS,
    }
    return FederationJob(images(), toys.leaky().float(), **(given | more))


def run(job: FederationJob, out: Path, change: Any = None) -> FederationResult:
    return federate(job, out, engine=partial(flower.here, change=change), progress=False)


def plain_loop(job: FederationJob) -> nn.Module:
    """The same training without clients and messages: averaged gradients, one SGD."""
    train, _ = job.splits(None)
    model = make_model(job, train)
    shares = make_shares(job, train)
    optimizer = job.recipe.optimizer(model)
    states = [job.on_update.start() for _ in shares]
    for number in range(1, job.rounds + 1):
        model.train(job.train_mode)
        sums = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
        buffers = {name: torch.zeros_like(value) for name, value in model.named_buffers()}
        before = {name: value.clone() for name, value in model.named_buffers()}
        for client, share in enumerate(shares):
            numbers = job.batch_of(share, client, number)
            batch = Batch(train.images[numbers].float() / 255, train.labels[numbers])
            batch = job.inside.protect_batch(batch, job.draws(client, number))
            for name, value in model.named_buffers():
                value.copy_(before[name])
            model.zero_grad()
            cross_entropy(model(batch.images), batch.labels).backward()
            found = {name: value.grad for name, value in model.named_parameters()}
            shared, states[client] = job.on_update.protect_gradients(
                {name: value for name, value in found.items() if value is not None},
                Moment(model, batch, cross_entropy),
                states[client],
                generator(job.seed, "defend", client, number),
            )
            for name, value in shared.items():
                sums[name] += value / len(shares)
            for name, value in model.named_buffers():
                buffers[name] += (value / len(shares)).to(value.dtype)
        for name, value in model.named_parameters():
            value.grad = sums[name]
        for name, value in model.named_buffers():
            value.copy_(buffers[name])
        for group in optimizer.param_groups:
            group["lr"] = job.recipe.rate(number - 1)
        optimizer.step()
    return model


def assert_same(found: nn.Module, wanted: nn.Module, tolerance: float = 1e-5) -> None:
    weights = wanted.state_dict()
    for name, value in found.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "defense", ["none", "prune:0.8", "clip:0.5,then,gaussian:0.01", "3-1-7", "prune-feedback:0.9"]
)
def test_one_gradient_a_round_equals_a_plain_loop_with_averaged_gradients(
    defense: str, tmp_path: Path
) -> None:
    job = make_job(defense=parse(defense), clients=PARTICIPANTS)
    found = run(job, tmp_path / "run").model
    assert_same(found, plain_loop(job))
    before = make_model(job, images()).state_dict()
    moved = max(
        float((value - before[name]).abs().max()) for name, value in found.state_dict().items()
    )
    assert moved > 1e-3  # the equality is of something


def test_batch_norm_is_averaged_as_in_a_plain_loop(tmp_path: Path) -> None:
    model = toys.conv_with_norm(1, 12).float()
    job = replace(make_job(), model=model)
    assert_same(run(job, tmp_path).model, plain_loop(job))


def test_several_local_steps_equal_a_plain_loop_of_each_client(tmp_path: Path) -> None:
    job = make_job(local_epochs=2, momentum=0.5, weight_decay=1e-3, rounds=2)
    train, _ = job.splits(None)
    shares = make_shares(job, train)
    model = make_model(job, train)
    for number in (1, 2):
        sums = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        start = {name: value.clone() for name, value in model.state_dict().items()}
        for client, share in enumerate(shares):
            model.load_state_dict(start)
            rate = job.recipe.rate(number - 1)
            optimizer = torch.optim.SGD(model.parameters(), rate, 0.5, weight_decay=1e-3)
            for numbers in job.local_batches(share, client, number):
                optimizer.zero_grad()
                answers = model(train.images[numbers].float() / 255)
                cross_entropy(answers, train.labels[numbers]).backward()
                optimizer.step()
            for name, value in model.state_dict().items():
                sums[name] += value / len(shares)
        model.load_state_dict(sums)
    assert_same(run(job, tmp_path).model, model)


def test_local_epochs_go_through_a_share_and_steps_may_end_before() -> None:
    job = make_job(local_epochs=2)
    share = torch.arange(100, 110)
    batches = job.local_batches(share, 0, 1)
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    assert torch.cat(batches[:3]).sort().values.equal(share)
    few = make_job(local_steps=4).local_batches(share, 0, 1)
    assert [len(batch) for batch in few] == [4, 4, 2, 4]


def test_batches_of_one_gradient_go_through_a_share_before_any_comes_again() -> None:
    job, share = make_job(), torch.arange(20, 32)
    drawn = torch.cat([job.batch_of(share, 1, number) for number in (1, 2, 3)])
    assert drawn.sort().values.equal(share)


@pytest.mark.parametrize("defense", ["none", "prune:0.9", "3-1-7,then,gaussian:0.01"])
def test_the_spy_has_what_a_client_outside_of_flower_shares(defense: str, tmp_path: Path) -> None:
    job = make_job(defense=parse(defense), spy_rounds=(2,), train_mode=False)
    run(job, tmp_path)
    train, _ = job.splits(None)
    shares = make_shares(job, train)
    updates = spied.read_round(tmp_path / SPY, 2)
    assert [update.client for update in updates] == list("0123")
    for client, update in enumerate(updates):
        model = make_model(job, train)
        model.load_state_dict(dict(update.before))
        numbers = job.batch_of(shares[client], client, 2)
        batch = Batch(train.images[numbers].float() / 255, train.labels[numbers])
        (shared,) = Client(model, 10, protocol=Protocol(), defense=job.inside).share_batches(
            [batch], job.draws(client, 2)
        )
        wanted, _ = job.on_update.protect_gradients(
            shared.seen.gradients,
            Moment(model, batch, cross_entropy),
            job.on_update.start(),
            generator(job.seed, "defend", client, 2),
        )
        found = update.as_gradients(1.0)
        for name, value in wanted.items():
            assert torch.equal(value, found[name])


def test_the_audits_of_several_rounds_say_beforehand_how_long_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job = make_job(spy_rounds=(1, 3), attacks={"closed-form": find("closed-form")})
    run(replace(job, attacks={}), tmp_path)
    monkeypatch.setattr(recorded, "foreseen_seconds", lambda *_: 45.0)
    for rounds, text in (((1, 3), "the audits of rounds 1, 3: about 2 min"), ((3,), "")):
        few = replace(job, spy_rounds=rounds)
        federated_run._audit(few, tmp_path, job.splits(None), "cpu", True)
        said = capfd.readouterr().err
        assert text in said and ("audits" in said) is bool(text)


def test_a_killed_training_goes_on_to_the_same_result(tmp_path: Path) -> None:
    job = make_job(defense=parse("prune-feedback:0.9"), momentum=0.9, rounds=4)
    whole = run(job, tmp_path / "whole")

    class Kill(BaseException):
        pass

    def killing(app: Any) -> Callable[..., Any]:
        def call(message: Any, context: Any) -> Any:
            reply = app(message, context)
            number = message.content.config_records.get("config", {}).get("server-round")
            if number == 3 and context.node_config["partition-id"] == 2:
                raise Kill
            return reply

        return call

    with pytest.raises(Kill):
        run(job, tmp_path / "killed", killing)
    again = run(job, tmp_path / "killed")
    assert_same(again.model, whole.model, 0)
    assert [str(row["round"]) for row in again.history] == ["1", "2", "3", "4"]
    names = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert names == ["model.json", "model.safetensors", "settings.json"]
    assert run(job, tmp_path / "killed").accuracy == again.accuracy  # read back


def stopped(job: FederationJob, out: Path) -> None:
    """Train until the second round is under way."""

    class Kill(BaseException):
        pass

    def killing(app: Any) -> Callable[..., Any]:
        def call(message: Any, context: Any) -> Any:
            if message.content.config_records.get("config", {}).get("server-round") == 2:
                raise Kill
            return app(message, context)

        return call

    with pytest.raises(Kill):
        run(job, out, killing)


def test_damaged_files_to_go_on_from_are_refused_in_a_line_and_left_alone(tmp_path: Path) -> None:
    job = make_job(defense=parse("prune-feedback:0.9"), rounds=2)
    stopped(job, tmp_path)
    resume, state = tmp_path / "resume.safetensors", tmp_path / "clients" / "2-000001.state"
    tensors, facts = read_safetensors(resume)
    history = json.loads(facts["gradveil"])
    bent = {name: value[:1] if "momentum" in name else value for name, value in tensors.items()}
    kept = torch.load(state, weights_only=True)
    for path, data, said in (
        (resume, save(tensors, {"gradveil": json.dumps(history * 2)}), r"rounds \[1, 1\]"),
        (resume, save(tensors, {"gradveil": json.dumps([{"round": 1}])}), "test_accuracy: missing"),
        (resume, save(bent, facts), "not as in the model"),
        (resume, save(dict([*tensors.items()][:1]), facts), ": missing"),
        (state, b"no state", "no torch file"),
        (state, saved(kept | {"rounds": "1"}), "rounds: expected int"),
        (state, saved(kept | {"state": saved({"momentum": 3})}), "TypeError"),
    ):
        whole = path.read_bytes()
        path.write_bytes(data)
        with pytest.raises(GradveilError, match=said) as error:
            run(job, tmp_path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
        assert path.read_bytes() == data
        path.write_bytes(whole)
    assert len(run(job, tmp_path).history) == 2


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_an_accuracy_that_the_final_weights_do_not_have_is_refused(tmp_path: Path) -> None:
    job = make_job(rounds=1)
    right = run(job, tmp_path).accuracy
    path = tmp_path / "model.safetensors"
    tensors, facts = read_safetensors(path)
    said = json.loads(facts["gradveil"]) | {"test_accuracy": 1.0}
    assert right < 0.5
    path.write_bytes(save(tensors, {"gradveil": json.dumps(said)}))
    with pytest.raises(GradveilError, match=r"test_accuracy: 100\.0%, but its weights have"):
        run(job, tmp_path)


def test_a_folder_with_another_training_is_refused(tmp_path: Path) -> None:
    run(make_job(rounds=1), tmp_path)
    with pytest.raises(GradveilError, match="rounds 1 there, 2 here"):
        run(make_job(rounds=2), tmp_path)


def test_rounds_go_on_without_a_client_that_dies_or_sends_nan(tmp_path: Path, log: Any) -> None:
    def faulty(app: Any) -> Callable[..., Any]:
        def call(message: Any, context: Any) -> Any:
            reply = app(message, context)
            if message.metadata.message_type == "train":
                if context.node_config["partition-id"] == 0:
                    raise flower.DiesError("out of memory")
                if context.node_config["partition-id"] == 1:
                    arrays = as_tensors(reply.content.array_records["gradients"])
                    bad = {name: value * float("nan") for name, value in arrays.items()}
                    reply.content["gradients"] = as_record(bad)
            return reply

        return call

    found = run(make_job(rounds=1), tmp_path, faulty)
    assert all(bool(value.isfinite().all()) for value in found.model.state_dict().values())
    assert "values that are not finite" in log.text and str(flower.NODE + 1) in log.text


def test_processes_of_clients_that_ended_are_started_again_after_their_round(
    tmp_path: Path,
) -> None:
    starts = []

    def engine(plan: Plan, serve: Any) -> None:
        starts.append(plan)

        def losing(app: Any) -> Callable[..., Any]:
            def call(message: Any, context: Any) -> Any:
                number = message.content.config_records.get("config", {}).get("server-round")
                if len(starts) == 1 and number == 2 and context.node_config["partition-id"] == 0:
                    return Message(Error(0, "the actor died"), reply_to=message)
                return app(message, context)

            return call

        flower.here(plan, serve, losing)

    found = federate(make_job(), tmp_path, engine=engine, progress=False)
    assert len(starts) == 2
    assert [row["clients"] for row in found.history] == [CLIENTS, CLIENTS - 1, CLIENTS]


def test_a_signal_that_a_bar_meets_prints_no_traceback_of_the_servers_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = []

    def serve(*_: Any) -> None:
        met.append(True)
        raise Stopped("SIGTERM")

    def run_simulation(server: Any, *_: Any, **__: Any) -> None:
        thread = Thread(target=server, args=(None, None))  # Pytest minds errors in threads
        thread.start()
        thread.join()

    monkeypatch.setattr(federated_run, "connect", lambda _: False)
    monkeypatch.setattr(federated_run, "run_simulation", run_simulation)
    federated_run.simulate(Plan(make_job(), None, tmp_path, ()), serve)
    assert met


def test_what_flower_logs_of_workers_that_a_signal_ended_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    came = []

    def run_simulation(*_: Any, **__: Any) -> None:
        LOG.error("Traceback: before")
        came.append(True)
        LOG.error("Traceback: after")

    monkeypatch.setattr(federated_run, "connect", lambda _: False)
    monkeypatch.setattr(federated_run, "run_simulation", run_simulation)
    monkeypatch.setattr(federated_run, "signaled", lambda: bool(came))
    federated_run.simulate(Plan(make_job(), None, tmp_path, ()), lambda *_: None)
    assert "before" in log.text and "after" not in log.text


@pytest.mark.parametrize("defense", ["none", "precode:k=4"])
def test_a_training_starts_from_the_weights_of_a_file(defense: str, tmp_path: Path) -> None:
    given = {
        name: value + 0.01 for name, value in make_model(make_job(), images()).state_dict().items()
    }
    torch.save(given, tmp_path / "given.pt")
    job = make_job(rounds=1, start=tmp_path / "given.pt", spy_rounds=(1,), defense=parse(defense))
    found = run(job, tmp_path / "run")
    sent = spied.read_round(tmp_path / "run" / SPY, 1)[0].before
    inner = "" if defense == "none" else "inner."  # PRECODE puts its layers before the head
    for name in given.keys() - ({"head.weight", "head.bias"} if inner else set()):
        assert torch.equal(sent[f"{inner}{name}"], given[name]), name
    assert read_settings(found.checkpoint)["start"] == str(tmp_path / "given.pt")
    with pytest.raises(GradveilError, match="start"):
        run(replace(job, start=None), tmp_path / "run")


def test_a_part_of_the_clients_takes_part_in_each_round() -> None:
    job = make_job(fraction=0.5, rounds=20)
    drawn = [job.participants(number) for number in range(1, 21)]
    assert all(len(clients) == 2 for clients in drawn)
    assert {client for clients in drawn for client in clients} == set(range(CLIENTS))


def test_a_full_graph_without_a_server_equals_a_server(tmp_path: Path) -> None:
    job = make_job()
    wanted = run(job, tmp_path / "server").model
    full = replace(job, graph=parse_graph("full", CLIENTS))
    assert_same(run(full, tmp_path / "full").model, wanted)


def test_participants_of_a_ring_step_by_their_neighbors_alone(tmp_path: Path) -> None:
    job = make_job(graph=parse_graph("ring", CLIENTS), rounds=1, spy=1, spy_rounds=(1,))
    found = run(job, tmp_path).model
    kept = spied.read_round(tmp_path / SPY, 1)
    assert [update.client for update in kept] == ["0", "2"]
    train, _ = job.splits(None)
    start = make_model(job, train)
    shares = make_shares(job, train)
    workshop = Workshop(job, make_model(job, train), train, tuple(shares))
    mean = None
    for client in (3, 0, 1):
        gradient, _ = workshop.share_gradient(client, 1)
        part = {name: value / 3 for name, value in gradient.items()}
        mean = part if mean is None else {name: mean[name] + part[name] for name in mean}
    assert mean is not None
    optimizer = job.recipe.optimizer(start)
    for name, value in start.named_parameters():
        value.grad = mean[name]
    optimizer.step()
    assert_same(found, start)  # the model of participant 0


@pytest.mark.parametrize("clients", [3, 10])
@pytest.mark.parametrize("text", ["equal", "dirichlet:0.3", "classes:2"])
def test_every_image_goes_to_one_client_at_most(text: str, clients: int) -> None:
    labels = torch.arange(600) % 10
    shares = parse_partition(text).shares(labels, clients, 3)
    every = torch.cat(shares)
    assert len(every.unique()) == len(every)
    assert len(shares) == clients and min(map(len, shares)) > 0
    if text == "classes:2":
        assert all(len(labels[share].unique()) == 2 for share in shares)
    else:
        assert len(every) == 600
    if text == "equal":
        assert {len(share) for share in shares} == {600 // clients}
        counts = torch.bincount(labels[shares[0]], minlength=10)
        assert int(counts.max() - counts.min()) <= 1


def test_a_small_alpha_makes_shares_less_alike() -> None:
    labels = torch.arange(2000) % 10

    def spread(alpha: float) -> Tensor:
        shares = Dirichlet(alpha).shares(labels, 5, 0)
        return torch.stack([torch.bincount(labels[s], minlength=10).float() for s in shares]).std()

    assert spread(0.1) > spread(1.0) > spread(100.0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: parse_partition("iid"), "unknown split 'iid': choose from equal, dirichlet:0.3"),
        (lambda: parse_partition("dirichlet:x"), "'x' is no number"),
        (lambda: Dirichlet(0.0), "dirichlet:0: it must be above 0"),
        (lambda: ByClass(0), "there must be at least 1"),
        (lambda: parse_graph("star", 3), "graph 'star': choose ring, full, or pairs"),
        (lambda: parse_graph("0-7", 3), "there is no participant 7; choose from 0 to 2"),
        (lambda: parse_graph("0-1", 3), "participant 2 has no neighbor"),
        (lambda: make_job(clients=0), "clients 0: it must be at least 1"),
        (lambda: make_job(fraction=0.0), "fraction 0: choose above 0"),
        (lambda: make_job(spy_rounds=(9,)), "spy rounds 9: choose from 1 to 3"),
        (lambda: make_job(auto=True), "attacks without spy rounds"),
        (lambda: make_job(local_epochs=1, local_steps=1), "give one of them"),
        (
            lambda: make_job(local_epochs=1, defense=parse("dp:norm=1,multiplier=1")),
            "it protects a single gradient, and the clients train by themselves",
        ),
        (lambda: make_job(local_epochs=1, graph=parse_graph("ring", 4)), "leave local epochs"),
        (lambda: make_job(graph=parse_graph("ring", 4), spy=4), "spy 4: choose a participant"),
        (lambda: make_job(graph=parse_graph("ring", 4), spy=2), "spy 2 without spy rounds"),
        (lambda: make_job(spy=7, spy_rounds=(1,)), "spy 7: without a graph it is the server"),
        (lambda: make_job(average_of=2), "average of 2 without spy rounds"),
        (lambda: make_job(average_of=1, spy_rounds=(1,)), "average of 1: there must be at least 2"),
        (
            lambda: make_job(average_of=9, spy_rounds=(1,)),
            "average of 9: 4 of 4 clients take part in a round",
        ),
        (
            lambda: make_job(average_of=3, fraction=0.5, spy_rounds=(1,)),
            "average of 3: 2 of 4 clients take part in a round",
        ),
        (
            lambda: make_job(average_of=2, graph=parse_graph("ring", 4), spy_rounds=(1,)),
            "average of 2: in a graph the spy has what each neighbor sent by itself",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_line(
    make: Callable[[], object], said: str
) -> None:
    with pytest.raises(GradveilError) as error:
        make()
    assert said in str(error.value) and "\n" not in str(error.value)


def test_too_many_clients_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match="200 clients and 96 images: each needs one"):
        run(make_job(clients=200), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_files_of_a_spying_participant_are_warned_of_as_those_of_a_server(tmp_path: Path) -> None:
    job = make_job(rounds=1, spy_rounds=(1,))
    for name, made in (("server", job), ("ring", replace(job, graph=parse_graph("ring", CLIENTS)))):
        with pytest.warns(GradveilWarning, match="can be inverted into the clients' images"):
            run(made, tmp_path / name)


@pytest.mark.parametrize(
    "more",
    [{}, {"local_epochs": 2}, {"average_of": 2}, {"graph": parse_graph("ring", CLIENTS), "spy": 1}],
)
def test_the_victims_of_an_audit_are_known_before_the_training(
    more: dict[str, Any], tmp_path: Path
) -> None:
    job = make_job(spy_rounds=(2,), audited=16, **more)
    run(job, tmp_path)
    train, _ = job.splits(None)
    victims = recorded.choose_victims(job, 2, tmp_path, train)
    foreseen = recorded.foresee_victims(job, 2, make_shares(job, train), train)
    assert torch.equal(torch.cat(foreseen.numbers), torch.cat(victims.numbers))
    assert [each.client for each in foreseen.updates] == [each.client for each in victims.updates]
    assert (foreseen.protocol, foreseen.note) == (victims.protocol, victims.note)


def test_an_attack_tuned_on_a_clients_image_is_refused_before_the_training(tmp_path: Path) -> None:
    attack = find("adam-cosine")
    assert isinstance(attack, GradientMatching)
    job = make_job(spy_rounds=(2, 3), attacks={"attack.toml": attack}, audited=8)
    train, _ = job.splits(None)
    foreseen = recorded.foresee_victims(job, 3, make_shares(job, train), train)
    victim = int(torch.cat(foreseen.numbers)[5])
    tuned = replace(attack)
    object.__setattr__(tuned, "tuned_on", (image_digest(train.images[victim]),))
    with pytest.raises(GradveilError) as error:
        run(replace(job, attacks={"attack.toml": tuned}), tmp_path / "run")
    assert f"attack attack.toml: image {victim} of small" in str(error.value)
    assert "has it in round 3: tune on images that no client has" in str(error.value)
    assert not (tmp_path / "run").exists()
