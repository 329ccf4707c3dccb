"""Flower without its processes: messages, contexts and a grid that calls the client app at once."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

with warnings.catch_warnings():
    # Flower imports typer 0.20, which imports names that click 8.5 means to remove
    warnings.simplefilter("ignore", DeprecationWarning)
    from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity

    from gradveil.federated.client_app import Plan, Workshop, make_client_app
    from gradveil.federated.messages import as_record, as_tensors

TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # as in a server's process
Train = Callable[[dict[str, Tensor]], dict[str, Tensor]]
NODE = 71  # the first node's id: ids are no partitions


def context(partition: int = 0) -> Context:
    config: dict[str, bool | float | int | str] = {"partition-id": partition, "num-partitions": 10}
    return Context(1, NODE + partition, config, RecordDict(), {})


def question(weights: dict[str, Tensor], kind: str = "train", number: int = 1) -> Message:
    """A message of the server with these weights."""
    content = RecordDict(
        {"arrays": as_record(weights), "config": ConfigRecord({"server-round": number})}
    )
    return sent(Message(content, dst_node_id=NODE, message_type=kind))


def sent(message: Message) -> Message:
    """The message as it arrives: with an id."""
    message.metadata.__dict__["_message_id"] = "id"
    return message


def answer(
    question: Message, arrays: dict[str, Tensor], key: str = "arrays", examples: float = 8
) -> Message:
    """A client's reply with these arrays."""
    content = RecordDict(
        {key: as_record(arrays), "metrics": MetricRecord({"num-examples": examples})}
    )
    return Message(content, reply_to=question)


def trained(app: Any, weights: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
    """The arrays that a client app replies with when it is asked to train."""
    reply = app(question(weights, **more), context())
    assert not reply.has_error(), reply.error.reason
    (record,) = reply.content.array_records.values()
    return as_tensors(record)


def app_with(mods: Sequence[Any], train: Train, key: str = "arrays") -> ClientApp:
    """A client app whose training is this function of the weights."""
    made = ClientApp()

    @made.train(mods=list(mods))
    def _(message: Message, _: Context) -> Message:
        return answer(message, train(as_tensors(message.content.array_records["arrays"])), key)

    return made


class DiesError(Exception):
    """A client's process ends, and Flower replies with an error."""


class HereGrid(Grid):
    """A grid of `clients` nodes in this process. Any error but `DiesError` is one of the test."""

    def __init__(self, app: Any, clients: int) -> None:
        self.app = app
        self.replies: list[Message] = []
        self.contexts = {NODE + number: context(number) for number in range(clients)}

    def set_run(self, run: Run) -> None: ...

    @property
    def run(self) -> Run:
        return Run.create_empty(1)

    def create_message(self, *given: Any, **more: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self.replies = list(self.send_and_receive(messages))
        return ["id"] if self.replies else []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        replies = []
        for message in messages:
            sent(message)
            node = message.metadata.dst_node_id
            try:
                replies.append(self.app(message, self.contexts[node]))
            except DiesError as error:
                replies.append(Message(Error(2, str(error)), reply_to=message))
        return replies[::-1]  # in no order that anybody may rely on


def here(plan: Plan, serve: Any, change: Any = None) -> None:
    """Run the clients of a plan in this process; `change` may stand around their app."""
    workshop = Workshop.of(plan.job, plan.root)
    app = make_client_app(plan, lambda: workshop)
    serve(HereGrid(app if change is None else change(app), plan.job.clients), lambda: False)


def arrays(seed: int = 0) -> dict[str, Tensor]:
    """Weights of a small model with batch norm."""
    rng = torch.Generator().manual_seed(seed)
    return {
        "conv.weight": torch.randn(4, 3, 3, 3, generator=rng),
        "norm.running_mean": torch.rand(4, generator=rng),
        "norm.num_batches_tracked": torch.tensor(3 + seed),
        "head.weight": torch.randn(10, 4, generator=rng),
    }
