"""What Flower's messages hold, as tensors: weights, gradients, and the round they belong to."""

import logging
from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message
from flwr.common.constant import ErrorCode
from torch import Tensor

LOG = logging.getLogger("flwr")  # where Flower's users look
GRADIENTS = "gradients"
"""The key of a record that holds gradients; records under any other key hold weights."""

EXAMPLES = "num-examples"
ROUND = "server-round"


def as_tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """Return the arrays of a record by name, as tensors on the CPU that share no memory with it."""
    return {name: torch.from_numpy(np.array(array.numpy())) for name, array in record.items()}


def as_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return a record of these tensors, in their order."""
    return ArrayRecord(
        {name: Array(np.asarray(value.detach().cpu())) for name, value in tensors.items()}
    )


def is_training(message: Message) -> bool:
    """Tell whether a message asks for training, of whichever action."""
    return message.metadata.message_type.partition(".")[0] == "train"


def round_of(message: Message) -> int | None:
    """Return the round that the server says it is, from 1; None where it does not say."""
    for record in message.content.config_records.values():
        value = record.get(ROUND)
        if isinstance(value, int):
            return value
    return None


def client_of(context: Context) -> int:
    """Return the client's number: its partition in a simulation, else the id of its node."""
    partition = context.node_config.get("partition-id")
    return int(partition) if isinstance(partition, int) else context.node_id


def refusal(reason: str, message: Message) -> Message:
    """Return the reply that says why nothing is sent; the round goes on without this client."""
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, reason), reply_to=message)
