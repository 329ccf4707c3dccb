"""Collaborative learning on Flower: defenses in the client, a curious server, whole simulations.

`defend` is a mod for a client's training, `policy` changes images inside a training function, and
`Spy` is a server that keeps what each client sent. Flower itself (`pip install gradveil[flower]`)
is imported when a name here is first asked for.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gradveil.core.errors import GradveilError

if TYPE_CHECKING:
    from gradveil.federated.guards import guard
    from gradveil.federated.inversion import Inverted, invert
    from gradveil.federated.job import FederationJob
    from gradveil.federated.mods import defend, policy
    from gradveil.federated.run import FederationResult, federate
    from gradveil.federated.screen import Screen
    from gradveil.federated.spy import Spy

__all__ = [
    "FederationJob",
    "FederationResult",
    "Inverted",
    "Screen",
    "Spy",
    "defend",
    "federate",
    "guard",
    "invert",
    "policy",
]

_HOMES = {
    "gradveil.federated.guards": ("guard",),
    "gradveil.federated.inversion": ("Inverted", "invert"),
    "gradveil.federated.job": ("FederationJob",),
    "gradveil.federated.run": ("FederationResult", "federate"),
    "gradveil.federated.mods": ("defend", "policy"),
    "gradveil.federated.screen": ("Screen",),
    "gradveil.federated.spy": ("Spy",),
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'gradveil.federated' has no attribute {name!r}")
    need_flower()
    return getattr(import_module(home), name)


def need_flower() -> None:
    """Refuse to go on without Flower."""
    if find_spec("flwr") is None:
        raise GradveilError("gradveil.federated needs Flower: pip install gradveil[flower]")


def __dir__() -> list[str]:
    return list(__all__)
