"""The server's side of a federated training, or that of participants without a server."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy
from torch import Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.federated.client_app import CLIENT
from gradveil.federated.job import FederationJob
from gradveil.federated.messages import LOG, ROUND, as_record, as_tensors
from gradveil.federated.screen import Screen
from gradveil.federated.spied import Update, save_update, warn_of_files
from gradveil.federated.spy import Spy
from gradveil.training.job import Recipe

TIMEOUT = 3_600.0  # seconds that a round waits for its clients
PAUSE = 0.05  # seconds between two looks for replies
MODEL, MOMENTUM = "model.", "momentum."


class Learner:
    """A model and the optimizer that steps by what clients share."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        self.optimizer = recipe.optimizer(model)

    def step(self, shared: Mapping[str, Tensor], number: int) -> None:
        """Step by gradients, and take over the other tensors, statistics of batch norm."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(number - 1)
        state = self.model.state_dict()
        parameters = dict(self.model.named_parameters())
        for name, value in shared.items():
            if name in parameters:
                parameters[name].grad = value.to(parameters[name])
            else:
                state[name].copy_(value)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def record(self) -> ArrayRecord:
        """Return the weights for a message."""
        return as_record(self.model.state_dict())

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and momentum, by names that `restore` knows."""
        found = {f"{MODEL}{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            momentum = self.optimizer.state[parameter].get("momentum_buffer")
            if momentum is not None:
                found[f"{MOMENTUM}{name}"] = momentum
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave; an error where the model is not like that."""
        weights, momentum = _part(tensors, MODEL), _part(tensors, MOMENTUM)
        parameters, state = dict(self.model.named_parameters()), self.model.state_dict()
        for found, wanted in ((weights, state), (momentum, parameters)):
            for name, value in found.items():
                like = wanted.get(name)
                if like is None or (value.shape, value.dtype) != (like.shape, like.dtype):
                    raise GradveilError(f"{name}: not as in the model")
        if absent := state.keys() - weights.keys():
            raise GradveilError(f"{min(absent)}: missing")
        self.model.load_state_dict(weights)
        for name, value in momentum.items():
            self.optimizer.state[parameters[name]]["momentum_buffer"] = value.clone()


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


class Average(FedAvg):
    """FedAvg over the clients that the job draws for a round, in an order that can be repeated."""

    def __init__(self, job: FederationJob, nodes: Mapping[int, int]) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.job, self.nodes = job, nodes

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        clients = self.job.participants(server_round)
        return [ask(self.nodes[client], arrays, server_round) for client in clients]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        order = {node: client for client, node in self.nodes.items()}
        return super().aggregate_train(
            server_round, sorted(replies, key=lambda reply: order[reply.metadata.src_node_id])
        )


class NumberedSpy(Spy):
    """A spy whose files have the numbers of clients, which ids of nodes do not tell."""

    def __init__(self, strategy: Strategy, nodes: Mapping[int, int], **more: Any) -> None:
        super().__init__(strategy, **more)
        self.numbers = {node: client for client, node in nodes.items()}

    def name_of(self, reply: Message) -> str:
        return str(self.numbers[reply.metadata.src_node_id])


def ask(node: int, arrays: ArrayRecord, number: int) -> Message:
    """Return the message that asks a client to train in this round."""
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({ROUND: number})})
    return Message(content, dst_node_id=node, message_type="train")


def _never() -> bool:
    return False


def ask_all(
    grid: Grid, questions: Iterable[Message], stopped: Callable[[], bool] = _never
) -> list[Message]:
    """Send messages and wait for their replies, an hour at most, or until `stopped`.

    Flower's own function would go on waiting for clients that have ended.
    """
    waiting, replies = set(grid.push_messages(list(questions))), list[Message]()
    end = time.monotonic() + TIMEOUT
    while waiting and time.monotonic() < end:
        for reply in grid.pull_messages(list(waiting)):
            replies.append(reply)
            waiting.discard(reply.metadata.reply_to_message_id)
        if waiting:
            if stopped():
                raise GradveilError("the clients have ended")
            time.sleep(PAUSE)
    return replies


def find_nodes(grid: Grid, clients: int, stopped: Callable[[], bool] = _never) -> dict[int, int]:
    """Ask every node which client it is, and return the nodes by the numbers of clients."""
    while len(nodes := list(grid.get_node_ids())) < clients and not stopped():
        time.sleep(PAUSE)  # the simulation has not registered all of them yet
    questions = [
        Message(RecordDict(), dst_node_id=node, message_type="query") for node in nodes[:clients]
    ]
    found: dict[int, int] = {}
    for reply in ask_all(grid, questions, stopped):
        if reply.has_error():
            raise GradveilError(f"a client does not answer: {reply.error.reason}")
        (metrics,) = reply.content.metric_records.values()
        number = metrics[CLIENT]
        assert isinstance(number, int)
        found[number] = reply.metadata.src_node_id
    return found


class Round:
    """One round after the other: ask clients, and let the learners step by their replies.

    `lost_process` tells whether a process of clients ended in the last round. Flower's engine goes
    on handing messages to such a process, and each of them fails.
    """

    def __init__(
        self,
        job: FederationJob,
        learners: Sequence[Learner],
        grid: Grid,
        spied: Path,
        stopped: Callable[[], bool] = _never,
    ) -> None:
        self.job, self.learners, self.grid, self.out = job, learners, grid, spied
        self.stopped, self.lost_process = stopped, False
        self.nodes = find_nodes(grid, job.clients, stopped)
        self.screen = Screen(Average(job, self.nodes))
        self.strategy: Strategy = self.screen
        if job.spy_rounds and job.graph is not None:
            warn_of_files(spied)
        elif job.spy_rounds:
            self.strategy = NumberedSpy(
                self.strategy,
                self.nodes,
                rounds=job.spy_rounds,
                out=spied,
                average_of=job.average_of,
            )

    def go(self, number: int) -> int:
        """Make a round, and return how many clients took part with success."""
        return self._exchange(number) if self.job.graph else self._serve(number)

    def _ask(self, questions: Iterable[Message]) -> list[Message]:
        replies = ask_all(self.grid, questions, self.stopped)
        errors = [reply.error.code for reply in replies if reply.has_error()]
        self.lost_process = ErrorCode.UNKNOWN in errors  # an app's error has another code
        return replies

    def _serve(self, number: int) -> int:
        (learner,) = self.learners
        sent, config = learner.record(), ConfigRecord()
        questions = self.strategy.configure_train(number, sent, config, self.grid)
        replies = self._ask(questions)
        arrays, _ = self.strategy.aggregate_train(number, replies)
        if arrays is None:
            LOG.warning("gradveil: round %d: no client sent anything that can be used", number)
            return 0
        if self.job.one_gradient:
            learner.step(as_tensors(arrays), number)
        else:
            learner.model.load_state_dict(as_tensors(arrays))
        return sum(not reply.has_error() for reply in replies)

    def _exchange(self, number: int) -> int:
        """Let every participant step by the mean of its gradient and its neighbors'."""
        job, graph = self.job, self.job.graph
        assert graph is not None
        questions = [
            ask(self.nodes[client], learner.record(), number)
            for client, learner in enumerate(self.learners)
        ]
        clients = {node: client for client, node in self.nodes.items()}
        got: dict[int, dict[str, Tensor]] = {}
        replies = self._ask(questions)
        self.screen.expect(self.learners[0].record())
        for reply in self.screen.usable(number, replies):
            client = clients[reply.metadata.src_node_id]
            if reply.has_error():
                LOG.warning(
                    "gradveil: round %d goes on without participant %d: %s",
                    number,
                    client,
                    reply.error.reason,
                )
                continue
            (record,) = reply.content.array_records.values()
            got[client] = as_tensors(record)
        if number in job.spy_rounds:
            self._spy(number, got)
        for client, learner in enumerate(self.learners):
            near = [each for each in sorted((client, *graph.neighbors(client))) if each in got]
            if near:
                learner.step(_mean([got[each] for each in near]), number)
        return len(got)

    def _spy(self, number: int, got: Mapping[int, dict[str, Tensor]]) -> None:
        """Keep what the neighbors of the spy sent to it, beside the spy's own weights."""
        job = self.job
        assert job.graph is not None
        before = {
            name: value.clone() for name, value in self.learners[job.spy].model.state_dict().items()
        }
        for client in job.graph.neighbors(job.spy):
            if client in got:
                update = Update(
                    str(client), number, before, got[client], True, float(job.batch_size)
                )
                try:
                    save_update(self.out, update)
                except GradveilError as error:
                    LOG.warning("gradveil: the spy keeps nothing more: %s", error)


def _mean(several: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.stack([each[name].double() for each in several]).mean(0).to(value.dtype)
        for name, value in several[0].items()
    }
