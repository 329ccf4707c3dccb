"""The settings of a federated training, and what follows from them without any network."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks import Attack
from gradveil.core.boundary import check_fields, check_least, check_shown
from gradveil.core.errors import GradveilError
from gradveil.core.formats import FederationSettings
from gradveil.core.job_folder import Kind
from gradveil.core.seeds import generator
from gradveil.data import Images
from gradveil.defenses import Defense, chain
from gradveil.defenses.applied import check_defense, protected_model
from gradveil.defenses.weights import first_model
from gradveil.federated.partition import Equal, Graph, Partition
from gradveil.models import NormalizedName
from gradveil.training.job import Recipe, TrainingJob
from gradveil.training.run import candidate

FEDERATION = Kind("a federated training", "federated training", schema=FederationSettings)
FINAL = "model.safetensors"
RESUME = "resume.safetensors"
SPY = "spy"
AUDITS = "audits"
PLAIN = (
    *("clients", "rounds", "batch_size", "local_epochs", "local_steps", "lr", "momentum"),
    *("weight_decay", "fraction", "train_mode", "spy", "average_of", "steps", "audited"),
    *("image_size", "seed"),
)
"""Settings that are written as they are."""

LATER = ("test", "channels", "normalize", "start")
"""Settings of the training that are written only where they are set."""


@dataclass(frozen=True, eq=False)
class FederationJob:
    """`clients` participants train `model` on their shares of `data` for some rounds.

    With neither `local_epochs` nor `local_steps` each client sends the gradient of one batch
    (FedSGD) and the server makes a step of SGD with the mean of them: momentum, weight decay and
    the decay of the rate, as in `gradveil train`, are the server's. Otherwise each client trains by
    itself with plain SGD, its momentum from zero and not Nesterov's, and the server averages the
    weights (FedAvg). With a `graph` there is no server: each participant makes its step with the
    mean of its gradient and its neighbors'.

    `fraction` of the clients, at least one, take part in a round. `train_mode`: batch norm uses
    the batch's statistics and dropout is on. In `spy_rounds` the server, or with a graph the
    participant `spy`, keeps what it gets. These updates are attacked when the training is done: by
    `attacks`, and with `auto` by the strongest known for the defense, with `steps` iterations
    where they have such a setting, on at most `audited` images a round. With `average_of` the spy
    has the averages of so many clients alone. `start` is a file of weights that the training starts
    from.
    """

    data: Images | str
    model: nn.Module | str | NormalizedName
    clients: int = 10
    rounds: int = 10
    defense: Defense = field(default_factory=Defense)
    split: Partition = field(default_factory=Equal)
    batch_size: int = 8
    local_epochs: int | None = None
    local_steps: int | None = None
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    fraction: float = 1.0
    train_mode: bool = True
    graph: Graph | None = None
    spy: int = 0
    spy_rounds: tuple[int, ...] = ()
    average_of: int | None = None
    attacks: Mapping[str, Attack] = field(default_factory=dict)
    auto: bool = False
    steps: int | None = None
    audited: int = 32
    image_size: int | None = None
    channels: int | None = None
    test: Images | str | None = None
    seed: int = 0
    start: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_defense(self.defense)
        check_shown(self.defense, "__str__", "defense")
        check_least(self, dict.fromkeys(("clients", "rounds", "batch_size", "audited"), 1))
        if not 0 < self.fraction <= 1:
            raise GradveilError(f"fraction {self.fraction:g}: choose above 0 and at most 1")
        outside = [number for number in self.spy_rounds if not 1 <= number <= self.rounds]
        if outside:
            raise GradveilError(f"spy rounds {outside[0]}: choose from 1 to {self.rounds}")
        if (self.attacks or self.auto) and not self.spy_rounds:
            raise GradveilError("attacks without spy rounds: say which rounds are attacked")
        self._check_local()
        self._check_graph()
        self._check_spy()
        _ = self.training  # it checks the rest

    def _check_local(self) -> None:
        if self.local_epochs is not None and self.local_steps is not None:
            raise GradveilError("local epochs and local steps: give one of them")
        check_least(self, {"local_epochs": 1, "local_steps": 1})
        for part in self.defense.parts():
            if part.repasses and not self.one_gradient:
                raise GradveilError(
                    f"defense {part}: it protects a single gradient, and the clients train by "
                    "themselves; leave local epochs and steps out"
                )

    def _check_graph(self) -> None:
        if self.graph is None:
            return
        if not self.one_gradient:
            raise GradveilError(
                "graph: participants without a server exchange gradients; leave local epochs and "
                "steps out"
            )
        if self.fraction < 1:
            raise GradveilError(
                f"graph: all participants take part, not a fraction {self.fraction:g}"
            )
        if not 0 <= self.spy < self.clients:
            raise GradveilError(f"spy {self.spy}: choose a participant, 0 to {self.clients - 1}")

    def _check_spy(self) -> None:
        if self.spy and self.graph is None:
            raise GradveilError(
                f"spy {self.spy}: without a graph it is the server that spies; leave it out, or "
                "give a graph"
            )
        if self.spy and not self.spy_rounds:
            raise GradveilError(f"spy {self.spy} without spy rounds: say which rounds it keeps")
        if self.average_of is None:
            return
        said = f"average of {self.average_of}"
        if self.average_of < 2:
            raise GradveilError(f"{said}: there must be at least 2 clients")
        if not self.spy_rounds:
            raise GradveilError(f"{said} without spy rounds: say which rounds are kept")
        if self.graph is not None:
            raise GradveilError(
                f"{said}: in a graph the spy has what each neighbor sent by itself; leave one of "
                "them out"
            )
        if self.average_of > self.count:
            raise GradveilError(
                f"{said}: {self.count} of {self.clients} clients take part in a round; choose at "
                "most that many"
            )

    @property
    def count(self) -> int:
        """How many clients take part in a round."""
        return max(1, round(self.fraction * self.clients))

    @property
    def one_gradient(self) -> bool:
        """Whether a client sends one gradient a round (FedSGD), and not the weights it trained."""
        return self.local_epochs is None and self.local_steps is None

    @cached_property
    def recipe(self) -> Recipe:
        """SGD of the server, or of each client, whose rate decays over the rounds."""
        return Recipe(self.rounds, self.lr, self.momentum, self.weight_decay, self.batch_size)

    @cached_property
    def training(self) -> TrainingJob:
        """A training at one site of the same model, images and defense."""
        return TrainingJob(
            self.data,
            self.model,
            self.recipe,
            self.defense,
            image_size=self.image_size,
            channels=self.channels,
            seed=self.seed,
            test=self.test,
            start=self.start,
        )

    @property
    def inside(self) -> Defense:
        """What of the defense acts in the client's training: on the model, its images, a pass."""
        return chain([part for part in self.defense.parts() if not _by_mod(part)])

    @property
    def on_update(self) -> Defense:
        """What of the defense acts on the update that leaves, as a mod does."""
        return chain([part for part in self.defense.parts() if _by_mod(part)])

    def participants(self, number: int) -> list[int]:
        """Return the clients of a round, in order."""
        drawn = torch.randperm(self.clients, generator=generator(self.seed, "sample", number))
        return sorted(drawn[: self.count].tolist())

    def batch_of(self, share: Tensor, client: int, number: int) -> Tensor:
        """Return the images of a client's one gradient in this round, by their numbers.

        Batches go through the client's share, which is shuffled anew after each pass.
        """
        size = min(self.batch_size, len(share))
        passes, turn = divmod(number - 1, len(share) // size)
        order = torch.randperm(len(share), generator=generator(self.seed, "order", client, passes))
        return share[order[turn * size : (turn + 1) * size]]

    def local_batches(self, share: Tensor, client: int, number: int) -> list[Tensor]:
        """Return the batches of a client's own training in this round, by the images' numbers."""
        size = min(self.batch_size, len(share))
        each = -(-len(share) // size)
        steps = each * self.local_epochs if self.local_epochs else self.local_steps or 0
        found: list[Tensor] = []
        while len(found) < steps:
            order = torch.randperm(
                len(share), generator=generator(self.seed, "order", client, number, len(found))
            )
            found += share[order].split(size)
        return found[:steps]

    def images_of(self, share: Tensor, client: int, number: int) -> Tensor:
        """Return the images behind a client's update of this round, by their numbers."""
        if self.one_gradient:
            return self.batch_of(share, client, number)
        each = -(-len(share) // min(self.batch_size, len(share)))  # batches of an epoch
        return torch.cat(self.local_batches(share, client, number)[:each])

    def draws(self, client: int, number: int) -> Generator:
        """Return the generator of a client's draws in a round."""
        return generator(self.seed, "client", client, number)

    def settings(self) -> dict[str, Any]:
        """Return plain values for settings.json."""
        training = self.training.settings()
        return {name: getattr(self, name) for name in PLAIN} | {
            "data": training["data"],
            "model": training["model"],
            "defense": str(self.defense),
            "partition": str(self.split),
            "graph": None if self.graph is None else str(self.graph),
            "spy_rounds": sorted(self.spy_rounds),
            "attackers": [*(["auto"] if self.auto else []), *self.attacks],
            **{name: training[name] for name in LATER if name in training},
        }

    def splits(self, root: Path | None) -> tuple[Images, Images]:
        """Return the images to share out among the clients, and those to measure accuracy on."""
        return self.training.splits(root)


def make_model(job: FederationJob, train: Images) -> nn.Module:
    """Return the untrained model, with the layers that the defense puts into it."""
    shape = train.channels, train.size, train.size
    return protected_model(job.inside, candidate(job.model, train, job.seed), shape)


def make_first_model(job: FederationJob, train: Images) -> nn.Module:
    """Return the model before the first round: untrained, or with the weights to start from."""
    shape = train.channels, train.size, train.size
    return first_model(job.start, candidate(job.model, train, job.seed), job.inside, shape)


def make_shares(job: FederationJob, train: Images) -> list[Tensor]:
    """Return the numbers of each client's images."""
    return job.split.shares(train.labels, job.clients, job.seed)


def _by_mod(part: Defense) -> bool:
    return part.acts_on == "gradients" and not part.repasses
