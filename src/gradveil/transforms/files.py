"""policies.toml, which a search writes: one of its policies by name or by rank."""

import tomllib
import warnings
from pathlib import Path
from typing import Any

from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.transforms.policy import Policy

FORMAT = "gradveil policies 1"


def load_policy(path: Path, which: str = "hybrid") -> Policy:
    """`hybrid`, `best`, or a rank from 1 on. A search without a hybrid gives its best policy, and a warning says so."""
    found = read_policies(path)
    if which == "hybrid" and "hybrid" not in found:
        why = found.get("no_hybrid", "the search found none")
        warnings.warn(f"{path} holds no hybrid ({why}): the best policy, {found['best']}, is used", GradveilWarning, stacklevel=3)
        which = "best"
    if which in ("hybrid", "best"):
        return _parsed(path, found[which])
    ranked: list[dict[str, Any]] = found["policy"]
    if not which.isdecimal() or not 1 <= int(which) <= len(ranked):
        raise GradveilError(f"no policy {which!r} in {path}: choose hybrid, best, or a rank from 1 to {len(ranked)}")
    return _parsed(path, ranked[int(which) - 1]["policy"])


def read_policies(path: Path) -> dict[str, Any]:
    """The whole file, after a look at what every reader needs."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise GradveilError(f"no file of policies at {path}: `gradveil search` writes one") from None
    except OSError as error:
        raise GradveilError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:  # not TOML, or not text
        raise GradveilError(f"{path} is damaged, or no TOML: {' '.join(str(error).split())}") from None
    if found.get("format") != FORMAT:
        raise GradveilError(f"{path} is no file of `gradveil search`: its format is {found.get('format')!r}, expected {FORMAT!r}")
    ranked = found.get("policy")
    whole = isinstance(ranked, list) and ranked and all(isinstance(one, dict) and isinstance(one.get("policy"), str) for one in ranked)
    if not whole or not isinstance(found.get("best"), str) or not isinstance(found.get("hybrid", ""), str):
        raise GradveilError(f"{path} is damaged: it needs `best` and at least one [[policy]] with a `policy`, as text")
    return found


def _parsed(path: Path, text: str) -> Policy:
    try:
        return Policy.parse(text)
    except GradveilError as error:
        raise GradveilError(f"{path} is damaged: {error}") from None
