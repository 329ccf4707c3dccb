"""A client that attacks its own update before it sends it, and looks at the model it was given."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable
from torch import Generator, Tensor, nn

from gradveil.attacks import Attack, GradientMatching
from gradveil.audits.attackers import AUTO, granted
from gradveil.clients import Client, check_batch
from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError, GradveilWarning, one_line
from gradveil.core.importing import contained, user_code
from gradveil.core.seeds import as_generator, drawn_seed, generator
from gradveil.core.types import Batch, Loss, Observation, Protocol
from gradveil.defenses import Defense, as_defense
from gradveil.engine.gradients import cross_entropy
from gradveil.federated.attempts import Attempt, choose_attempts, named
from gradveil.federated.canaries import Lineup, Planted, plant
from gradveil.federated.messages import (
    LOG,
    as_tensors,
    client_of,
    is_training,
    refusal,
    round_of,
)
from gradveil.federated.received import suspicion
from gradveil.stats import upper_bound
from gradveil.transforms import Policy

LOSSES = "gradveil.guard"  # in the client's state, the losses of the models it received
FIRST = 8  # canaries that are tried before all others
LUCK = 0.1  # chance of a hit in a round that is no reason to say anything
PATIENCE = 10  # rounds that a loss has, to fall below that of the first of them
LOOKED_AT = 256  # canaries that a received model is looked at with

GetBatch = Callable[[Context], tuple[Tensor, Tensor]]


@public
def guard(
    model: nn.Module,
    canaries: tuple[Tensor, Tensor],
    batch: GetBatch,
    *,
    max_identified: float = 0.05,
    count: int = 59,
    defense: Defense | Policy | str = "none",
    attack: Attack | str = AUTO,
    seconds: float = 30.0,
    loss: Loss = cross_entropy,
    local_steps: int = 1,
    local_lr: float = 0.01,
    train_mode: bool = False,
    local_epochs: int = 1,
    local_batch_size: int | None = None,
    client_momentum: float = 0.0,
    client_weight_decay: float = 0.0,
    seed: int | Generator = 0,
) -> "Guard":
    """Return a Flower mod that withholds a client's update where canary images come back from it.

    `canaries` are images (N, C, H, W) in [0, 1] and labels that nobody trains on, a thousand or
    more; `batch` gives the images and labels that this client is about to train on. Before the
    client trains, each of `count` canaries takes the place of an image in a copy of that batch, one
    of its class where there is any. The update of the copy, under the `defense` and the client's
    protocol, is attacked, and the canary is looked for in a line-up of all canaries, as in an
    audit; each round plants others. With 95% confidence the share of images that this attack
    identifies must be at most `max_identified`: 5% needs 0 of 59. Else the reply is an error with
    the reason, and the round goes on without this client. Errors of the check and losses, which
    could tell of the client's images, are for its log alone.

    The attack `auto` is the exact one for such batches, and after it the search that an audit with
    `auto` has for the defense, without races and what takes seconds before its first step, with as
    many iterations as `seconds` allow: of the processor, so that other programs change nothing, or
    of the clock on a GPU. Of several images `dense-matching` has half of these seconds. A canary
    that any of them identifies counts. Where the search cannot run, or diverges, nothing is sent.

    That is an exact bound for these attacks and canaries like the client's images, and no proof:
    another attack, or a longer one, may do better. It is as right as the `defense` and the protocol
    given here: the guard does not see the training that follows. Withholding by what the data show
    tells something of the data, so it voids a guarantee of differential privacy.

    The model that was received is looked at too, in a copy of `model`. Weights that no honest
    training gives are refused: layers of copied units, trap weights, values that are not finite,
    a loss on the canaries that neither falls nor is below that of answers which say nothing.
    """
    if not 0 < seconds < math.inf:
        raise GradveilError(f"seconds {seconds:g}: they must be above 0")
    if not 0 < max_identified < 1:
        raise GradveilError(f"max identified {max_identified:g}: choose between 0 and 1")
    least = math.ceil(math.log(0.05) / math.log(1 - max_identified))
    if count < least:
        raise GradveilError(
            f"count {count}: to show that at most {max_identified:g} is identified takes {least} "
            "canaries"
        )
    images, labels = canaries
    with user_code("guard: the model could not be copied"):
        model = copy.deepcopy(model)  # the guard loads weights, and changes the mode
    classes = Client(model, loss=loss).count_classes(images[:1])
    check_batch(Batch(images, labels), classes, "canaries")
    if len(images) < max(count, 2):
        raise GradveilError(f"canaries: {len(images)} images; give at least {max(count, 2)}")
    acting = as_defense(defense)
    for said in _doubts(len(images), count, acting):
        warnings.warn(said, GradveilWarning, stacklevel=3)
    return Guard(
        Client(
            model,
            classes,
            loss,
            Protocol(
                local_steps,
                local_lr,
                train_mode,
                local_epochs,
                local_batch_size,
                client_momentum,
                client_weight_decay,
            ),
            acting,
        ),
        Batch(images, labels),
        batch,
        max_identified,
        count,
        None if attack == AUTO else named(attack),
        seconds,
        drawn_seed(as_generator(seed, "guard")),
    )


def _doubts(canaries: int, count: int, defense: Defense) -> Iterator[str]:
    """Say what speaks against these settings: a line-up that luck wins, a void guarantee."""
    luck = 1 - (1 - 1 / canaries) ** count
    if luck > LUCK:
        yield (
            f"canaries: {canaries} images make so short a line-up that one is picked out by "
            f"luck in {luck:.0%} of rounds; give {math.ceil(count / LUCK):,} or more"
        )
    for part in defense.parts():
        if hasattr(part, "epsilon"):
            yield (
                f"defense {part}: withholding updates by what the data show voids its guarantee of "
                "differential privacy"
            )


class Reason(NamedTuple):
    """Why nothing is sent: what the server is told, and more of it for the client's log."""

    told: str
    more: str = ""


class Outcome(NamedTuple):
    """How many canaries came back, of how many, from which attacks; and which could not run."""

    hits: int
    tried: int
    by: str = ""
    left_out: str = ""


@dataclass(frozen=True, eq=False)
class Guard:
    """A mod made by `guard`; without an `attack` it chooses one for the model and the defense."""

    client: Client
    canaries: Batch
    batch: GetBatch
    max_identified: float
    count: int
    attack: Attempt | None
    seconds: float
    seed: int

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Check the model and the update that would leave; train only where both are in order."""
        if not is_training(message):
            return call_next(message, context)
        try:
            with contained():
                reason = self.problem(message, context)
        except Exception as error:  # who cannot check does not send
            said = str(error) if isinstance(error, GradveilError) else one_line(error, 200)
            reason = Reason("the check failed, its log says why", f": {said}")
        if reason is None:
            return call_next(message, context)
        LOG.warning("gradveil: client %s withholds its update: %s%s", client_of(context), *reason)
        return refusal(f"withheld: {reason.told}", message)

    def problem(self, message: Message, context: Context) -> Reason | None:
        """Say why nothing should be sent; None where it may be."""
        records = [*message.content.array_records.values()]
        if len(records) != 1:
            raise GradveilError(f"the server sent {len(records)} array records; a guard expects 1")
        self.client.model.load_state_dict(as_tensors(records[0]))
        with user_code("the function that gives the client's batch failed"):
            images, labels = self.batch(context)
        assert self.client.classes is not None
        check_batch(Batch(images, labels), self.client.classes, "the client's batch")
        if (found := suspicion(self.client.model, self.canaries.images[:LOOKED_AT])) is not None:
            return Reason(f"no honest training gives such a model: {found}")
        if (stands := self._loss_stands(context)) is not None:
            return stands
        rng = generator(self.seed, "round", client_of(context), round_of(message) or 0)
        made = self.identified(Batch(images, labels), rng)
        bound = upper_bound(made.hits, made.tried)
        said = (
            f"{made.hits} of {made.tried} planted images were picked out of a line-up of "
            f"{len(self.canaries)} by {made.by}"
        )
        but = f" ({made.left_out})" if made.left_out else ""
        if bound <= self.max_identified:
            LOG.info("gradveil: client %s sends its update: %s%s", client_of(context), said, but)
            return None
        return Reason(
            f"{said}; with 95% confidence up to {bound:.1%} are identified, at most "
            f"{self.max_identified:g} may be",
            but,
        )

    def identified(self, batch: Batch, rng: Generator) -> Outcome:
        """Count the canaries that come back from updates of copies of the batch, and those tried.

        A few are tried first: where these are too many already, the others are left out.
        """
        client = Client(  # a new one: what a defense makes of a model is kept with the client
            self.client.model,
            self.client.classes,
            self.client.loss,
            self.client.protocol,
            self.client.defense,
        )
        planted = plant(batch, self.canaries, self.count, rng)
        lineup, hits, answered = Lineup(self.canaries.images), set[int](), set[int]()
        attempts = None if self.attack is None else [self.attack]
        left_out: list[str] = []
        ran: list[str] = []
        for some in filter(None, (planted[:FIRST], planted[FIRST:])):
            seen = shared_by(client, some)
            if attempts is None:
                attempts, left_out = choose_attempts(client, seen, self.count, self.seconds, rng)
            first = planted.index(some[0])
            for name, attack in attempts:
                ran += [name] if name not in ran else []
                told = [granted(each, attack, None) for each in seen]
                for row, found in enumerate(attack(told, rng), first):
                    diverged = isinstance(attack, GradientMatching) and found.status != "ok"
                    if diverged or not bool(found.images.isfinite().all()):
                        continue
                    answered.add(row)
                    if lineup.picks_out(found, planted[row], client.defense):
                        hits.add(row)
                if upper_bound(len(hits), self.count) > self.max_identified:
                    return Outcome(len(hits), len(answered), name, "; ".join(left_out))
        searched = any(isinstance(attack, GradientMatching) for _, attack in attempts or ())
        if self.attack is None and not searched:
            raise GradveilError("; ".join(left_out))
        if len(answered) < self.count:
            raise GradveilError(
                f"{' and '.join(ran)} diverged on {self.count - len(answered)} of {self.count} "
                "planted images"
            )
        return Outcome(len(hits), self.count, " and ".join(ran), "; ".join(left_out))

    def _loss_stands(self, context: Context) -> Reason | None:
        """Say that the received models' loss on canaries does not fall, after enough rounds.

        It may stand where it is below that of answers which say nothing, as after a training that
        has converged.
        """
        model, example = self.client.model, next(self.client.model.parameters())
        images, labels = self.canaries.images[:LOOKED_AT], self.canaries.labels[:LOOKED_AT]
        with torch.no_grad():
            answers = model.eval()(images.to(example))
            present, silent = (
                float(self.client.loss(given, labels.to(example.device)).mean())
                for given in (answers, torch.zeros_like(answers))
            )
        record = context.state.config_records.get(LOSSES)
        before = [] if record is None else record["losses"]
        assert isinstance(before, list)
        losses = [*map(float, before), present]
        context.state[LOSSES] = ConfigRecord({"losses": losses[-100:]})
        if not math.isfinite(present):
            return Reason("the loss of the model that was received is not finite")
        if len(losses) < 2 * PATIENCE:
            return None
        first, last = (
            sorted(some)[PATIENCE // 2] for some in (losses[:PATIENCE], losses[-PATIENCE:])
        )
        if last < max(first, silent):
            return None
        return Reason(
            "the loss of the models that were received does not fall",
            f": {first:.3g} at first, {last:.3g} in the last {PATIENCE} rounds",
        )


def shared_by(client: Client, planted: Sequence[Planted]) -> list[Observation]:
    """Return what a server sees of each planted batch, and all that an attacker may be told."""
    shared = client.share_batches(
        [each.batch for each in planted],
        [each.rng.clone_state() for each in planted],
        tell_defense=True,
        tell_draws=True,
    )
    return [each.seen for each in shared]
