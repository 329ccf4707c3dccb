"""An honest-but-curious server: it keeps what each client sent, as files that can be inverted."""

from collections.abc import Collection, Iterable
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from gradveil.core.errors import GradveilError
from gradveil.federated.messages import GRADIENTS, LOG, as_tensors
from gradveil.federated.screen import Wrapper, examples_of, problem_of_arrays, shapes_of
from gradveil.federated.spied import Update, average, save_update, warn_of_files


class Spy(Wrapper):
    """Keep what each client sends in some rounds, and let the inner strategy do its work.

    `rounds` are those to keep, from 1; None keeps every round. The files lie in `out`, a folder for
    each round, as safetensors that only their owner can read. **They can be inverted**: guard them
    as you would the clients' images. With `average_of` only averages of that many clients or more
    are kept, weighted by their examples, which is what secure aggregation leaves a server with.
    Replies that do not answer the weights sent out, or are not finite, are named in the log and not
    kept. A full disk ends the keeping and not the training.
    """

    def __init__(
        self,
        strategy: Strategy,
        rounds: Collection[int] | None = None,
        out: Path | str = "spy",
        average_of: int | None = None,
    ) -> None:
        super().__init__(strategy)
        if rounds is not None and any(number < 1 for number in rounds):
            raise GradveilError(f"rounds {min(rounds)}: they are counted from 1")
        if average_of is not None and average_of < 2:
            raise GradveilError(f"average of {average_of}: there must be at least 2 clients")
        self.rounds, self.out, self.average_of = rounds, Path(out), average_of
        self._sent: dict[int, ArrayRecord] = {}
        warn_of_files(self.out)

    def watches(self, server_round: int) -> bool:
        """Tell whether this round is kept."""
        return self.rounds is None or server_round in self.rounds

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._sent = {}
        if self.watches(server_round):
            for message in messages:
                record = next(iter(message.content.array_records.values()), arrays)
                self._sent[message.metadata.dst_node_id] = record
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        every = list(replies)
        if self.watches(server_round):
            try:
                self._keep(server_round, every)
            except GradveilError as error:
                LOG.warning(
                    "gradveil: the spy keeps nothing more of round %d: %s", server_round, error
                )
        return super().aggregate_train(server_round, every)

    def _keep(self, server_round: int, replies: Iterable[Message]) -> None:
        updates = []
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error() or node not in self._sent:
                LOG.warning("gradveil: the spy got nothing of node %d to keep", node)
                continue
            problem = problem_of_arrays(reply, shapes_of(self._sent[node]))
            if problem is not None:  # nothing can be told of it, and nobody could read the round
                LOG.warning("gradveil: the spy keeps nothing of node %d: %s", node, problem)
                continue
            updates.append(self._update(server_round, reply))
        updates.sort(key=lambda update: (len(update.client), update.client))
        if self.average_of is not None:
            updates = average(updates, self.average_of)
        for update in updates:
            save_update(self.out, update)

    def _update(self, server_round: int, reply: Message) -> Update:
        (key, record), *_ = reply.content.array_records.items()
        return Update(
            self.name_of(reply),
            server_round,
            as_tensors(self._sent[reply.metadata.src_node_id]),
            as_tensors(record),
            key == GRADIENTS,
            examples_of(reply) or 0.0,
        )

    def name_of(self, reply: Message) -> str:
        """Return the name of a client's file: by default the id of its node."""
        return str(reply.metadata.src_node_id)
