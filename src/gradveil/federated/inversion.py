"""A user's own Flower app: images from what a spy kept, with the user's model and loss."""

import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from gradveil.audits.fits import Tried
from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError, GradveilWarning, unknown
from gradveil.core.files import replacing
from gradveil.core.types import Protocol, Reconstruction
from gradveil.federated.spied import PRIVATE, SENT, Update, client_path, read_round, round_folder
from gradveil.models import NormalizedName
from gradveil.updates import reconstruct, score


@dataclass(frozen=True, eq=False)
class Inverted:
    """What came out of one update; `scores` are by image where the client's images are known.

    With auto it is that of one `attack`, and `left_out` says why others do not suit the update.
    """

    client: str
    found: Reconstruction
    scores: Mapping[str, list[float]] = field(default_factory=dict)
    attack: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)


@public
def invert(
    spied: Path | str,
    number: int,
    model: nn.Module | str | NormalizedName,
    *,
    clients: tuple[str, ...] | None = None,
    size: int | None = None,
    truth: Mapping[str, Tensor] | None = None,
    local_lr: float = 0.01,
    **more: Any,
) -> list[Inverted]:
    """Reconstruct the images behind the updates that a spy kept of a round.

    `clients` are some of them by name, by default all. `size` is the number of images of each, by
    default what the client said that it trained on. `truth` has the images of clients, (N, C, H, W)
    in [0, 1], where they are known: reconstructions are put in their order and scored. `local_lr`
    and `more` (local_steps, loss, defense, images, image_shape, attack, steps, seed, ...) are those
    of `gradveil.reconstruct`; with the attack auto there is one `Inverted` for each attack that
    suits.
    """
    folder = Path(spied)
    known = {update.client: update for update in read_round(folder, number)}
    for name in clients or ():
        if name not in known:
            raise unknown(f"client of round {number}", name, known)
    found = []
    for name in clients or tuple(known):
        made = reconstruct_spied(folder, known[name], model, size=size, local_lr=local_lr, **more)
        images = (truth or {}).get(name)
        tried = made if isinstance(made, Tried) else Tried({"": made}, {}, {})
        for attack, each in tried.found.items():
            scored = (each, {}) if images is None else score(each, images, f"client {name}")
            found.append(Inverted(name, *scored, attack, tried.left_out))
    return found


def reconstruct_spied(
    spied: Path,
    update: Update,
    model: nn.Module | str | NormalizedName,
    *,
    size: int | None = None,
    local_lr: float = 0.01,
    **more: Any,
) -> Reconstruction | Tried:
    """Reconstruct the images behind one update of a spy's folder; `invert` says what is given.

    The clients of an average are taken to have as many images each.
    """
    count = size or round(update.examples * max(1, len(update.members)))
    if count < 1:
        raise GradveilError(
            f"client {update.client}: it did not say how many images it has; give size"
        )
    clients = _equal_parts(update, count, local_lr, more)
    before, after = round_folder(spied, update.round) / SENT, client_path(spied, update)
    with tempfile.TemporaryDirectory(prefix="gradveil-invert-") as scratch:
        if update.gradients:
            after = Path(scratch) / "after.safetensors"
            _write_after(after, update, local_lr)
        found: Reconstruction | Tried = reconstruct(
            before,
            after,
            model,
            size=count,
            local_lr=local_lr,
            averaged_clients=clients,
            **more,
        )
    return found


def _equal_parts(update: Update, count: int, local_lr: float, more: Mapping[str, Any]) -> int:
    """Return how many clients are averaged; 1 where they cannot have equal parts of the images.

    Warn of what is assumed where it matters.
    """
    clients = max(1, len(update.members))
    told = {each.name: more[each.name] for each in fields(Protocol) if each.name in more}
    protocol = Protocol(local_lr=local_lr, **told)
    even = count % clients == 0
    if clients > 1 and (protocol.moves(count // clients) or protocol.train_mode):
        said = f"as of {count // clients} images each"
        if not even:
            said = (
                "as one client's, an approximation: what it does not find is not shown to be safe"
            )
        warnings.warn(
            f"client {update.client}: how many images each of its {clients} clients has is not "
            f"known; the mean of their updates, of {count} images, is taken {said}",
            GradveilWarning,
            stacklevel=4,
        )
    return clients if even else 1


def _write_after(path: Path, update: Update, local_lr: float) -> None:
    """Write the weights that a step by the gradients would give; float64 keeps them exact."""
    gradients = update.as_gradients(local_lr)
    tensors = {
        name: before.double() - local_lr * gradients[name].double()
        if name in gradients
        else before.clone()
        for name, before in update.before.items()
    }
    with replacing(path, PRIVATE) as temporary:
        temporary.write_bytes(save(tensors))
