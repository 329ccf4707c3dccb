"""A client that attacks its own update before it sends it, and looks at the model it was given."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable
from torch import Generator, Tensor, nn

from gradveil.attacks import Attack
from gradveil.attacks.presets import find_attack
from gradveil.clients import Client, check_batch, check_weights
from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError, GradveilWarning, one_line
from gradveil.core.importing import contained, user_code
from gradveil.core.seeds import as_generator, drawn_seed, generator
from gradveil.core.types import Batch, Loss, Protocol
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
from gradveil.scores.identification import rank_among, signatures
from gradveil.stats import upper_bound
from gradveil.transforms import Policy

LOSSES = "gradveil.guard"  # in the client's state, the losses of the models it received
ALIKE = 0.9999  # cosine of the weights of two units that are copies of each other
COPIES = 0.25  # share of a layer's units that may be copies, or dead
FIRST = 8  # canaries that are tried before all others
FEW = 8  # units of a layer that is too small to judge
LUCK = 0.1  # chance of a hit in a round that is no reason to say anything
PATIENCE = 10  # rounds that a loss has, to fall below that of the first of them

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
    attack: Attack | str = "closed-form",
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

    That is an exact bound for this attack and canaries like the client's images, and no proof:
    another attack may do better. Withholding by what the data show tells something of the data, so
    it voids a guarantee of differential privacy.

    The model that was received is looked at too. Weights that no honest training gives are refused:
    layers of copied or dead units, values that are not finite, a loss that does not fall.
    """
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
        find_attack(attack),
        drawn_seed(as_generator(seed, "guard")),
    )


@dataclass(frozen=True, eq=False)
class Guard:
    """A mod made by `guard`."""

    client: Client
    canaries: Batch
    batch: GetBatch
    max_identified: float
    count: int
    attack: Attack
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
        if (found := suspicion(self.client.model)) is not None:
            return f"no honest training gives such a model: {found}"
        if (found := self._loss_stands(Batch(images, labels), context)) is not None:
            return found
        rng = generator(self.seed, "round", client_of(context), round_of(message) or 0)
        hits, tried = self.identified(Batch(images, labels), rng)
        bound = upper_bound(hits, tried)
        if bound <= self.max_identified:
            return None
        return (
            f"{hits} of {tried} planted images were picked out of a line-up of "
            f"{len(self.canaries)}; with 95% confidence up to {bound:.1%} are identified, at most "
            f"{self.max_identified:g} may be"
        )

    def identified(self, batch: Batch, rng: Generator) -> tuple[int, int]:
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
        hits, tried, known = 0, 0, signatures(self.canaries.images.double())
        for some in (planted[:FIRST], planted[FIRST:]):
            shared = client.share_batches(some, rng, tell_defense=True)
            for found in self.attack([each.seen for each in shared], rng) if shared else ():
                images = found.images.detach().cpu().double().clamp(0, 1)
                index = torch.full((len(images),), int(chosen[tried]))
                hits += bool((rank_among(images, known, index) == 1).any())
                tried += 1
            if upper_bound(hits, self.count) > self.max_identified:
                break
        return hits, tried

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


def suspicion(model: nn.Module) -> str | None:
    """Say what of a model's weights no honest training gives; None where nothing is found.

    Attacks of a dishonest server need layers whose units are copies with different biases, or
    units that are dead for all images but one.
    """
    try:
        check_weights(model)
    except GradveilError as error:
        return str(error)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            continue
        rows = module.weight.detach().flatten(1).double()
        if len(rows) < FEW:
            continue
        norms = rows.norm(dim=1)
        dead = norms <= 1e-6 * norms.max()
        if int(dead.sum()) > COPIES * len(rows):
            return f"{int(dead.sum())} of {len(rows)} units of layer {name!r} are dead"
        if rows.shape[1] < 2:
            continue  # units of one weight all point the same way
        unit = rows[~dead] / norms[~dead, None]
        likeness = (unit @ unit.T).fill_diagonal_(0).amax(1)
        copies = int((likeness > ALIKE).sum())
        if copies > COPIES * len(rows):
            return f"{copies} of {len(rows)} units of layer {name!r} are copies of others"
    return None
