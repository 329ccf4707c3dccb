"""Which policies are the same, and which can stand together in a hybrid."""

from collections.abc import Iterable, Sequence

from gradveil.transforms import Policy, Transform

Function = tuple[str, float]
"""An operation and what its magnitude stands for: the library repeats some under several numbers."""


def functions(policy: Policy, channels: int = 3) -> tuple[tuple[Function, ...], ...]:
    """What a policy does, whatever the numbers it was named by: `24` and `42` are the same shift, and `28` does nothing."""
    return tuple(_acting(member, channels) for member in policy.members)


def _acting(member: Sequence[Transform], channels: int) -> tuple[Function, ...]:
    """Without what leaves images of so many channels as they are; two inversions in a row undo each other."""
    steps: list[Function] = []
    for transform in member:
        if transform.name == "invert" and steps and steps[-1][0] == "invert":
            steps.pop()
        elif not transform.idle(channels):
            steps.append((transform.name, transform.value))
    return tuple(steps)


def distinct(policies: Iterable[Policy]) -> list[int]:
    """The places of the policies that do something new, in order: of equal ones the first."""
    first: dict[object, int] = {}
    for place, policy in enumerate(policies):
        first.setdefault(functions(policy), place)
    return sorted(first.values())


def make_hybrid(ranked: Sequence[Policy], members: int, channels: int = 3) -> tuple[Policy | None, str]:
    """Best first of all that qualify, each that shares no function with those before it; None where there are not two, and why.

    A policy that changes nothing is left out: images that draw it would have no protection.
    """
    chosen: list[Policy] = []
    taken: set[Function] = set()
    for policy in ranked:
        own = {function for member in functions(policy, channels) for function in member}
        if own and not own & taken and len(chosen) < members:
            chosen.append(policy)
            taken |= own
    if len(chosen) > 1:
        return Policy(tuple(member for policy in chosen for member in policy.members)), ""
    if not chosen:
        return None, "the policies that qualify change nothing"
    if len(ranked) == 1:
        return None, "only one policy qualifies"
    return None, f"every other policy that qualifies shares a function with {chosen[0]}"
