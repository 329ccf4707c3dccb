"""Whether two shares of one batch differ."""

import math

from gradveil.checks.cases import Case, Shared
from gradveil.checks.findings import Finding

SAME = 1e-4  # relative, above what the order of sums on a GPU makes


def shares_differ(case: Case) -> Finding | None:
    """A note where the defense is meant to draw, a warning where nothing should."""
    change = relative_change(case.shared, case.share(1))
    if change <= SAME:
        return None
    acting = case.client.acting
    if acting.random or case.client.prepare is not None:
        who = str(acting) if acting.random else "the client's preparation"
        means = f"two shares of one batch differ by {change:.0%} of their size, since {who} draws anew each time"
        do = "audit many images, with --attack auto, which adds the attacks that undo it: one lucky draw proves nothing"
        return Finding("note", "random shares", means, do)
    means = f"two shares of one batch differ by {change:.0%} of their size, though the defense ({acting}) draws nothing: the model does"
    return Finding("warning", "random shares", means, "turn off what is random in the model (dropout, noise), or name it as a defense")


def relative_change(one: Shared, other: Shared) -> float:
    """|g - g'| / |g| over all victims together."""
    difference = total = 0.0
    for (first, _), (second, _) in zip(one, other, strict=True):
        for name, value in first.gradients.items():
            difference += float((second.gradients[name] - value).double().square().sum())
            total += float(value.double().square().sum())
    return math.sqrt(difference / total) if total else 0.0
