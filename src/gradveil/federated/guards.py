"""A client that attacks its own update before it sends it, and looks at the model it was given."""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable
from torch import Generator, Tensor, nn

from gradveil.attacks import Attack, GradientMatching
from gradveil.attacks.presets import find, find_attack
from gradveil.audits.attackers import AUTO, RACED, STANDARD, automatic, granted
from gradveil.clients import Client, check_batch
from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError, GradveilWarning, one_line
from gradveil.core.importing import contained, user_code
from gradveil.core.seeds import as_generator, drawn_seed, generator
from gradveil.core.types import Batch, Loss, Observation, Protocol
from gradveil.defenses import Defense, as_defense
from gradveil.engine.gradients import cross_entropy
from gradveil.federated.messages import (
    LOG,
    as_tensors,
    client_of,
    is_training,
    refusal,
    round_of,
)
from gradveil.federated.received import suspicion
from gradveil.scores.identification import rank_among, signatures
from gradveil.stats import upper_bound
from gradveil.transforms import Policy

LOSSES = "gradveil.guard"  # in the client's state, the losses of the models it received
FIRST = 8  # canaries that are tried before all others
LUCK = 0.1  # chance of a hit in a round that is no reason to say anything
PATIENCE = 10  # rounds that a loss has, to fall below that of the first of them
LOOKED_AT = 64  # canaries that the layers of a received model are looked at with
TIMED = 20  # iterations that tell how long one takes
LEAST = 50  # iterations: with 15 and fewer it missed images that 150 identify

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
    client trains, each of `count` canaries takes the place of an image in a copy of that batch. The
    update of the copy, under the `defense` and the client's protocol, is attacked, and the canary
    is looked for in a line-up of all canaries; each round plants others. With 95% confidence the
    share of images that this attack identifies must be at most `max_identified`: 5% needs 0 of 59.
    Else the reply is an error with the reason, and the round goes on without this client.

    The attack `auto` is the exact one for such batches, and after it the search that an audit with
    `auto` has for the defense, with as many iterations as `seconds` allow: of the processor, so
    that other programs change nothing, or of the clock on a GPU. A canary that either identifies
    counts. Where neither can run, nothing is sent.

    That is an exact bound for these attacks and canaries like the client's images, and no proof:
    another attack, or a longer one, may do better. Withholding by what the data show tells
    something of the data, so it voids a guarantee of differential privacy.

    The model that was received is looked at too. Weights that no honest training gives are refused:
    layers of copied or dead units, trap weights, values that are not finite, a loss that does not
    fall.
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
    classes = Client(model, loss=loss).count_classes(images[:1])
    check_batch(Batch(images, labels), classes, "canaries")
    if len(images) < max(count, 2):
        raise GradveilError(f"canaries: {len(images)} images; give at least {max(count, 2)}")
    luck = 1 - (1 - 1 / len(images)) ** count
    if luck > LUCK:
        warnings.warn(
            f"canaries: {len(images)} images make so short a line-up that one is picked out by "
            f"luck in {luck:.0%} of rounds; give {math.ceil(count / LUCK):,} or more",
            GradveilWarning,
            stacklevel=3,
        )
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
            as_defense(defense),
        ),
        Batch(images, labels),
        batch,
        max_identified,
        count,
        None if attack == AUTO else _named(attack),
        seconds,
        drawn_seed(as_generator(seed, "guard")),
    )


def _named(attack: Attack | str) -> "Attempt":
    if isinstance(attack, str):
        return Attempt(attack, find(attack, (AUTO,)))
    return Attempt(type(attack).__name__, find_attack(attack))


class Attempt(NamedTuple):
    """An attack, and what it is called in reasons."""

    name: str
    attack: Attack


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
            reason = f"the check failed: {said}"
        if reason is None:
            return call_next(message, context)
        LOG.warning("gradveil: client %s withholds its update: %s", client_of(context), reason)
        return refusal(f"withheld: {reason}", message)

    def problem(self, message: Message, context: Context) -> str | None:
        """Say why nothing should be sent; None where it may be."""
        (record,) = message.content.array_records.values()
        self.client.model.load_state_dict(as_tensors(record))
        with user_code("the function that gives the client's batch failed"):
            images, labels = self.batch(context)
        looked_at = self.canaries.images[:LOOKED_AT]
        if (found := suspicion(self.client.model, looked_at)) is not None:
            return f"no honest training gives such a model: {found}"
        if (found := self._loss_stands(Batch(images, labels), context)) is not None:
            return found
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
        return (
            f"{said}; with 95% confidence up to {bound:.1%} are identified, at most "
            f"{self.max_identified:g} may be{but}"
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
        chosen = torch.randperm(len(self.canaries), generator=rng)[: self.count]
        planted = []
        for number in chosen.tolist():
            place = int(torch.randint(len(batch), (), generator=rng))
            images, labels = batch.images.clone(), batch.labels.clone()
            images[place] = self.canaries.images[number].to(images)
            labels[place] = self.canaries.labels[number]
            planted.append(Batch(images, labels))
        hits, tried, known = set[int](), 0, signatures(self.canaries.images.double())
        attempts = None if self.attack is None else [self.attack]
        left_out: list[str] = []
        ran: list[str] = []
        for some in filter(None, (planted[:FIRST], planted[FIRST:])):
            shared = client.share_batches(
                some, rng, tell_defense=True, tell_draws=self.attack is None
            )
            seen = [each.seen for each in shared]
            if attempts is None:
                attempts, left_out = self._automatic(seen, rng)
            for name, attack in attempts:
                ran += [name] if name not in ran else []
                told = seen if self.attack else [granted(each, attack, None) for each in seen]
                for row, found in enumerate(attack(told, rng), tried):
                    images = found.images.detach().cpu().double().clamp(0, 1)
                    index = torch.full((len(images),), int(chosen[row]))
                    if bool((rank_among(images, known, index) == 1).any()):
                        hits.add(row)
                if upper_bound(len(hits), self.count) > self.max_identified:
                    return Outcome(len(hits), tried + len(some), name, "; ".join(left_out))
            tried += len(some)
        return Outcome(len(hits), tried, " and ".join(ran), "; ".join(left_out))

    def _automatic(
        self, seen: Sequence[Observation], rng: Generator
    ) -> tuple[list[Attempt], list[str]]:
        """Return the attacks of `auto` that suit these updates, and why others could not run.

        The search comes last, with the iterations that all canaries have time for.
        """
        client, size = self.client, seen[0].size
        *names, exact = automatic(client.defense, seen[0].model, client.protocol.train_mode, size)
        strongest = {name for part in client.defense.parts() for name in part.strongest}
        searches = [name for name in names if RACED not in name.split("+")]
        searches.sort(key=lambda name: (name == STANDARD, "+" not in name, name not in strongest))
        found: list[Attempt] = []
        left_out: list[str] = []
        for name in (exact, *searches):
            attack = find(name)
            told = [granted(each, attack, None) for each in seen]
            try:
                if isinstance(attack, GradientMatching):
                    return [*found, self._fitted(name, attack, told, rng)], left_out
                attack(told[:1], rng)
            except GradveilError as error:
                left_out.append(f"{name} could not run: {error}")
            else:
                found.append(Attempt(name, attack))
        if not found:
            raise GradveilError("; ".join(left_out))
        return found, left_out

    def _fitted(
        self, name: str, attack: GradientMatching, seen: Sequence[Observation], rng: Generator
    ) -> Attempt:
        """Return a search with as many iterations as there is time for, from timed ones."""
        on_cpu = next(seen[0].model.parameters()).device.type == "cpu"
        now = time.process_time if on_cpu else time.perf_counter
        each = math.inf  # seconds; the first iteration warms up
        for steps in (1, TIMED):
            if steps * each * len(seen) > self.seconds and steps > 1:
                break
            began = now()
            replace(attack, steps=steps)(seen, rng)
            each = (now() - began) / steps / len(seen)
        steps = min(attack.steps, int(self.seconds / each / self.count))
        if steps < LEAST:
            raise GradveilError(
                f"{self.seconds:g} s are time for {steps} of its iterations on {self.count} "
                f"canaries, and fewer than {LEAST} find too little; give more seconds"
            )
        return Attempt(
            f"{name} ({steps} iterations, for {self.seconds:g} s)", replace(attack, steps=steps)
        )

    def _loss_stands(self, batch: Batch, context: Context) -> str | None:
        """Say that the model's loss on the client's images does not fall, after enough rounds."""
        model, example = self.client.model, next(self.client.model.parameters())
        with torch.no_grad():
            answers = model.eval()(batch.images.to(example))
            present = float(self.client.loss(answers, batch.labels.to(example.device)).mean())
        record = context.state.config_records.get(LOSSES)
        before = [] if record is None else record["losses"]
        assert isinstance(before, list)
        losses = [*map(float, before), present]
        context.state[LOSSES] = ConfigRecord({"losses": losses[-100:]})
        if not math.isfinite(present):
            return "the loss of the model that was received is not finite"
        if len(losses) < 2 * PATIENCE:
            return None
        first, last = sorted(losses[:PATIENCE]), sorted(losses[-PATIENCE:])
        if last[PATIENCE // 2] < first[PATIENCE // 2]:
            return None
        return (
            f"the loss of the models that were received does not fall: {first[PATIENCE // 2]:.3g} "
            f"at first, {last[PATIENCE // 2]:.3g} in the last {PATIENCE} rounds"
        )
