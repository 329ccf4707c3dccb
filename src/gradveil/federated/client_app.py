"""The clients of a federated training, as a Flower app: any process can be any of them."""

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor, nn

from gradveil.clients import Client
from gradveil.core.errors import GradveilWarning
from gradveil.core.files import write_bytes
from gradveil.core.formats import KeptState
from gradveil.core.reading import convert
from gradveil.core.seeds import following
from gradveil.core.tensor_files import load_pickled
from gradveil.core.types import Batch, Protocol
from gradveil.data import Images
from gradveil.defenses.applied import protected_batch
from gradveil.federated.job import FederationJob, make_model, make_shares
from gradveil.federated.messages import (
    EXAMPLES,
    GRADIENTS,
    as_record,
    as_tensors,
    client_of,
    is_training,
    round_of,
)
from gradveil.federated.mods import KEPT, Defend, defend
from gradveil.training.job import Recipe
from gradveil.training.step import Objective, Step

CLIENT = "client"  # the number of the client, in its replies
STATE = re.compile(r"([0-9]{1,9})-([0-9]{6,9})\.state")  # a client's file, and the round


@dataclass(frozen=True, eq=False)
class Plan:
    """What clients are made from: the job, where data lies, and what they keep between rounds.

    `states` is the folder for what their defenses keep, so that a training that was killed goes on
    as if it had not been. `buffers` are the names of tensors that are no parameters.
    """

    job: FederationJob
    root: Path | None
    states: Path
    buffers: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Workshop:
    """What a process needs to be any client: the model, all images, and who has which of them."""

    job: FederationJob
    model: nn.Module
    train: Images
    shares: tuple[Tensor, ...]

    @classmethod
    def of(cls, job: FederationJob, root: Path | None) -> "Workshop":
        train, _ = job.splits(root)
        return cls(job, make_model(job, train), train, tuple(make_shares(job, train)))

    def batch(self, numbers: Tensor) -> Batch:
        """Return these images before any defense."""
        return Batch(self.train.images[numbers].float() / 255, self.train.labels[numbers])

    def share_gradient(self, client: int, number: int) -> tuple[dict[str, Tensor], int]:
        """Return the gradient of a client's batch and the statistics of batch norm after it."""
        job = self.job
        batch = self.batch(job.batch_of(self.shares[client], client, number))
        maker = Client(
            self.model,
            classes=len(self.train.classes),
            protocol=Protocol(train_mode=job.train_mode),
            defense=job.inside,
            protected=True,
        )
        rng = job.draws(client, number)
        with warnings.catch_warnings():
            # That victims cannot be batched is of no concern where there is one.
            warnings.simplefilter("ignore", GradveilWarning)
            (shared,) = maker.share_batches([batch], rng)
        found = dict(shared.seen.gradients)
        if job.train_mode:  # the gradient comes from a pass that leaves the model as it is
            with torch.no_grad(), following(rng):
                self.model.train()(shared.batch.images)
        return found | statistics(self.model), len(batch)

    def train_weights(self, client: int, number: int) -> tuple[dict[str, Tensor], int]:
        """Return the weights after a client's own training."""
        job, model = self.job, self.model.train(self.job.train_mode)
        optimizer = torch.optim.SGD(
            model.parameters(),
            job.recipe.rate(number - 1),
            job.momentum,
            weight_decay=job.weight_decay,
        )
        step = Step(model, Objective.of(job.inside, 1.0), optimizer, False)
        rng = job.draws(client, number)
        images: set[int] = set()
        for numbers in job.local_batches(self.shares[client], client, number):
            used = protected_batch(job.inside, self.batch(numbers), rng)
            with following(rng):
                step(used)
            images.update(numbers.tolist())
        return {name: value.clone() for name, value in model.state_dict().items()}, len(images)


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the model's buffers, such as the statistics of batch norm."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = model.state_dict()
    return {name: value.clone() for name, value in state.items() if name not in parameters}


def make_client_app(plan: Plan, find: Callable[[], Workshop]) -> ClientApp:
    """Return the app of all clients. `find` is called in the process where a client trains."""
    app, job = ClientApp(), plan.job
    mods: list[Any] = []
    if job.on_update.parts():
        protect = defend(job.on_update, seed=job.seed, untouched=plan.buffers)
        mods = [Memory(plan.states), AtRate(protect, job.recipe)]
    one_gradient = job.one_gradient

    @app.train(mods=mods)
    def train(message: Message, context: Context) -> Message:
        workshop, client, number = find(), client_of(context), round_of(message)
        assert number is not None
        (record,) = message.content.array_records.values()
        workshop.model.load_state_dict(as_tensors(record))
        trains = workshop.share_gradient if one_gradient else workshop.train_weights
        arrays, examples = trains(client, number)
        key = GRADIENTS if one_gradient else "arrays"
        return _reply(message, client, {key: as_record(arrays)}, examples)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return _reply(message, client_of(context), {}, 1)

    return app


def _reply(message: Message, client: int, arrays: dict[str, ArrayRecord], examples: int) -> Message:
    content = RecordDict({**arrays, "metrics": MetricRecord({EXAMPLES: examples, CLIENT: client})})
    return Message(content, reply_to=message)


def read_state(path: Path) -> dict[str, Any]:
    """Read what a client's defense kept, its types checked."""
    found: dict[str, Any] = load_pickled(path)
    convert(found, KeptState, path)
    return found


@dataclass(frozen=True)
class AtRate:
    """A mod that protects an update as a gradient: divided by the learning rate of the round."""

    protect: Defend
    recipe: Recipe

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        number = round_of(message)
        rate = self.recipe.rate((number or 1) - 1)
        return replace(self.protect, lr=rate)(message, context, call_next)


@dataclass(frozen=True)
class Memory:
    """A mod that keeps the state of a client's defense on disk, a file for each of two rounds.

    A round that was killed is done again from the state before it.
    """

    folder: Path

    def files(self) -> dict[tuple[int, int], Path]:
        """Return the files by client and round."""
        named = ((STATE.fullmatch(path.name), path) for path in self.folder.glob("*.state"))
        return {(int(found[1]), int(found[2])): path for found, path in named if found}

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        client, number = client_of(context), round_of(message)
        if not is_training(message) or number is None:
            return call_next(message, context)
        files = {round_: path for (who, round_), path in self.files().items() if who == client}
        earlier = [round_ for round_ in files if round_ < number]
        context.state.pop(KEPT, None)
        if earlier:
            context.state[KEPT] = ConfigRecord(read_state(files[max(earlier)]))
        reply = call_next(message, context)
        record = context.state.config_records.get(KEPT)
        if record is not None and "state" in record and not reply.has_error():
            file = io.BytesIO()
            torch.save(dict(record), file)
            write_bytes(self.folder / f"{client}-{number:06d}.state", file.getvalue())
            for old in sorted(earlier)[:-1]:
                files[old].unlink(missing_ok=True)
        return reply
