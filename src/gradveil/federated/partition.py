"""How images are shared out among clients, and who exchanges gradients with whom."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradveil.core.boundary import check_fields
from gradveil.core.errors import GradveilError, unknown
from gradveil.core.seeds import derived, generator
from gradveil.core.text import read_number

TRIES = 100  # draws of a Dirichlet distribution, until every client has an image


class Partition(ABC):
    """A way to share images out: every image goes to one client at most."""

    @abstractmethod
    def divide(self, labels: Tensor, clients: int, seed: int) -> list[Tensor]:
        """Return the numbers of each client's images, in random order."""

    def shares(self, labels: Tensor, clients: int, seed: int) -> list[Tensor]:
        """Divide, and refuse a division that leaves a client without images."""
        if clients > len(labels):
            raise GradveilError(f"{clients} clients and {len(labels)} images: each needs one")
        found = self.divide(labels, clients, seed)
        empty = next((number for number, share in enumerate(found) if not len(share)), None)
        if empty is not None:
            raise GradveilError(
                f"split {self}: client {empty} of {clients} has no images; take fewer clients or "
                "another split"
            )
        return found


@dataclass(frozen=True)
class Equal(Partition):
    """Equal shares of one distribution: each client has as many images of a class as the next."""

    def divide(self, labels: Tensor, clients: int, seed: int) -> list[Tensor]:
        order = torch.randperm(len(labels), generator=generator(seed, "partition"))
        order = order[labels[order].sort(stable=True).indices]
        count = len(labels) // clients
        shares = [order[number::clients][:count] for number in range(clients)]
        return _shuffled(shares, seed)

    def __str__(self) -> str:
        return "equal"


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Uneven classes: the clients' parts of each class are drawn from Dirichlet(`alpha`)."""

    alpha: float = 0.3

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.alpha <= 1e6:
            raise GradveilError(f"split dirichlet:{self.alpha:g}: it must be above 0, at most 1e6")

    def divide(self, labels: Tensor, clients: int, seed: int) -> list[Tensor]:
        rng = np.random.default_rng(derived(seed, "dirichlet"))
        for _ in range(TRIES):
            shares: list[list[Tensor]] = [[] for _ in range(clients)]
            for label in labels.unique().tolist():
                members = (labels == label).nonzero().flatten()
                members = members[torch.from_numpy(rng.permutation(len(members)))]
                parts = rng.dirichlet([self.alpha] * clients)
                ends = np.round(np.cumsum(parts)[:-1] * len(members)).astype(int).tolist()
                for share, part in zip(shares, members.tensor_split(ends), strict=True):
                    share.append(part)
            found = [torch.cat(share) for share in shares]
            if min(map(len, found)) > 0:
                break
        return _shuffled(found, seed)

    def __str__(self) -> str:
        return f"dirichlet:{self.alpha:g}"


@dataclass(frozen=True)
class ByClass(Partition):
    """Each client has images of `count` classes alone, shared with the others that have them."""

    count: int = 2

    def __post_init__(self) -> None:
        check_fields(self)
        if self.count < 1:
            raise GradveilError(f"split classes:{self.count}: there must be at least 1")

    def divide(self, labels: Tensor, clients: int, seed: int) -> list[Tensor]:
        rng = generator(seed, "partition")
        classes = labels.unique()
        classes = classes[torch.randperm(len(classes), generator=rng)].tolist()
        count = min(self.count, len(classes))
        wanted = [
            {classes[(number * count + turn) % len(classes)] for turn in range(count)}
            for number in range(clients)
        ]
        shares: list[list[Tensor]] = [[] for _ in range(clients)]
        for label in classes:
            owners = [number for number in range(clients) if label in wanted[number]]
            members = (labels == label).nonzero().flatten()
            members = members[torch.randperm(len(members), generator=rng)]
            for turn, owner in enumerate(owners):
                shares[owner].append(members[turn :: len(owners)])
        return _shuffled([torch.cat(share) for share in shares], seed)

    def __str__(self) -> str:
        return f"classes:{self.count}"


def _shuffled(shares: list[Tensor], seed: int) -> list[Tensor]:
    return [
        share[torch.randperm(len(share), generator=generator(seed, "share", number))]
        for number, share in enumerate(shares)
    ]


def parse_partition(text: str) -> Partition:
    """Read `equal`, `dirichlet:0.3` or `classes:2`."""
    name, _, value = text.strip().partition(":")
    try:
        if name == "equal" and not value:
            return Equal()
        if name == "dirichlet":
            return Dirichlet(read_number(value, float)) if value else Dirichlet()
        if name == "classes":
            return ByClass(read_number(value, int)) if value else ByClass()
    except GradveilError:
        raise
    except ValueError:
        raise GradveilError(f"split {text!r}: {value!r} is no number") from None
    raise unknown("split", text, ("equal", "dirichlet:0.3", "classes:2"))


@dataclass(frozen=True)
class Graph:
    """Participants without a server: who exchanges gradients with whom, by pairs of numbers."""

    name: str
    edges: tuple[tuple[int, int], ...]

    def neighbors(self, participant: int) -> tuple[int, ...]:
        """Return those that it exchanges gradients with, in order, itself left out."""
        found = {b for a, b in self.edges if a == participant}
        found |= {a for a, b in self.edges if b == participant}
        return tuple(sorted(found - {participant}))

    def __str__(self) -> str:
        return self.name


def parse_graph(text: str, clients: int) -> Graph:
    """Read `ring`, `full`, or edges such as `0-1,1-2,2-0`."""
    if text == "ring":
        return Graph(text, tuple((number, (number + 1) % clients) for number in range(clients)))
    if text == "full":
        pairs = ((a, b) for a in range(clients) for b in range(a + 1, clients))
        return Graph(text, tuple(pairs))
    edges = []
    for part in text.split(","):
        try:
            first, second = (read_number(end, int) for end in part.split("-"))
        except ValueError:
            raise GradveilError(
                f"graph {text!r}: choose ring, full, or pairs of participants such as 0-1,1-2"
            ) from None
        for end in (first, second):
            if not 0 <= end < clients:
                raise GradveilError(
                    f"graph {text!r}: there is no participant {end}; choose from 0 to {clients - 1}"
                )
        edges.append((first, second))
    found = Graph(text, tuple(edges))
    alone = next((number for number in range(clients) if not found.neighbors(number)), None)
    if alone is not None:
        raise GradveilError(f"graph {text!r}: participant {alone} has no neighbor")
    return found
