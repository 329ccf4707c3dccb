"""Which policies are the same, and which can stand together in a hybrid."""

from collections.abc import Iterable, Sequence

from gradveil.transforms import Policy

Function = tuple[str, float]
"""An operation and what its magnitude stands for: the library repeats some under several numbers."""


def functions(policy: Policy) -> tuple[tuple[Function, ...], ...]:
    """What a policy does, whatever the numbers it was named by: `24` and `42` are the same shift."""
    return tuple(tuple((transform.name, transform.value) for transform in member) for member in policy.members)


def distinct(policies: Iterable[Policy]) -> list[int]:
    """The places of the policies that do something new, in order: of equal ones the first."""
    first: dict[object, int] = {}
    for place, policy in enumerate(policies):
        first.setdefault(functions(policy), place)
    return sorted(first.values())


def make_hybrid(ranked: Sequence[Policy], members: int) -> tuple[Policy | None, str]:
    """Best first of all that qualify, each that shares no function with those before it; None where there are not two, and why.

    A policy that changes nothing is left out: images that draw it would have no protection.
    """
    chosen: list[Policy] = []
    taken: set[Function] = set()
    for policy in ranked:
        own = {function for member in functions(policy) for function in member}
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


def hybrid_note(ranked: Sequence[Policy], kept: int, hybrid: Policy | None) -> tuple[str, ...]:
    """Where a member stands that is not among the policies kept."""
    places = [1 + ranked.index(Policy((member,))) for member in (hybrid.members if hybrid else ())]
    late = [place for place in places if place > kept]
    why = "all before it share a function with another member"
    return tuple(f"member {ranked[place - 1]} of the hybrid ranks {place} of {len(ranked)}: {why}" for place in late)
