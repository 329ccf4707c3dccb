"""A strategy around another: Flower's accounting and averaging stay those of the inner one."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from gradveil.core.errors import one_line
from gradveil.federated.messages import EXAMPLES, GRADIENTS, LOG

LONGEST = 200  # letters of an error in the log


class Wrapper(Strategy):
    """Do what the inner strategy does; its attributes can be asked for here."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":  # not there yet, as while a copy is made
            raise AttributeError(name)
        return getattr(self.strategy, name)


class Screen(Wrapper):
    """Leave broken replies out, so that a round goes on with the others and stays finite.

    Broken is a reply without one record of arrays and a number of examples, with arrays of other
    names or shapes than were sent or than most clients replied with, or with values that are not
    finite. The log names the client and the reason. Flower itself would end the run, or average
    what is not finite into the global model.
    """

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self._shapes: dict[str, tuple[int, ...]] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.expect(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return super().aggregate_train(server_round, self.usable(server_round, replies))

    def expect(self, arrays: ArrayRecord) -> None:
        """Compare replies with these arrays, which are sent out, from now on."""
        self._shapes = shapes_of(arrays)

    def usable(self, server_round: int, replies: Iterable[Message]) -> list[Message]:
        """Return the replies that are not broken, errors among them, and log the others."""
        every, kept = list(replies), []
        forms = Counter(map(_form, every))
        usual = max(forms, key=lambda form: (form is not None, forms[form]), default=None)
        for reply in every:
            problem = None if reply.has_error() else self._problem(reply, usual)
            if problem is None:
                kept.append(reply)
            else:
                LOG.warning(
                    "gradveil: round %d goes on without node %d: %s",
                    server_round,
                    reply.metadata.src_node_id,
                    problem,
                )
        return kept

    def _problem(self, reply: Message, usual: "Form | None") -> str | None:
        """Say why a reply cannot be averaged; None where it can."""
        if (problem := problem_of_arrays(reply, self._shapes)) is not None:
            return problem
        if examples_of(reply) is None:
            return f"it sent no {EXAMPLES} above 0"
        if _form(reply) != usual:
            return "its arrays are not those that most clients sent"
        return None


def problem_of_arrays(reply: Message, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Say why the arrays of a reply do not answer arrays of these shapes; None where they do."""
    records = reply.content.array_records
    if len(records) != 1:
        return f"it sent {len(records)} records of arrays, 1 was expected"
    (key, record), *_ = records.items()
    if key != GRADIENTS and (absent := shapes.keys() - record.keys()):
        return f"it sent no {min(absent)!r}"
    for name, array in record.items():
        if shapes and name not in shapes:
            return f"it sent {name[:100]!r}, which the model has not"
        if shapes and tuple(array.shape) != shapes[name]:
            return f"{name!r} has shape {tuple(array.shape)}, expected {shapes[name]}"
        try:
            values = array.numpy()
        except Exception as error:  # a client may send any bytes
            return f"{name!r} cannot be read: {one_line(error, LONGEST)}"
        if values.dtype.kind not in "fiub":
            return f"{name!r} is of type {values.dtype}, expected numbers"
        if not np.isfinite(values).all():
            return f"{name!r} has values that are not finite"
    return None


def shapes_of(arrays: ArrayRecord) -> dict[str, tuple[int, ...]]:
    """Return the shapes of arrays by name."""
    return {name: tuple(array.shape) for name, array in arrays.items()}


Form = tuple[str, frozenset[str]]


def _form(reply: Message) -> Form | None:
    """Return the key and the names of the arrays of a reply; None where it has not one record."""
    if reply.has_error() or len(reply.content.array_records) != 1:
        return None
    (key, record), *_ = reply.content.array_records.items()
    return key, frozenset(record.keys())


def examples_of(reply: Message) -> float | None:
    """Return the number of examples that a client trained on; None where it is no such number."""
    for record in reply.content.metric_records.values():
        value = record.get(EXAMPLES)
        if isinstance(value, int | float) and 0 < value < float("inf"):
            return float(value)
    return None
