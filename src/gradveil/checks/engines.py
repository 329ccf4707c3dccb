"""Whether victims can share a batched pass, and what it costs where they cannot."""

import time
from collections.abc import Callable

import torch

from gradveil.checks.cases import Case, quiet
from gradveil.checks.findings import Finding
from gradveil.core.gradients import gradient
from gradveil.core.seeds import forked, generator
from gradveil.defenses import Defense
from gradveil.defenses.rounds import Rounds


def not_batchable(case: Case) -> Finding | None:
    """The slowdown is that of a few victims one by one, against one plain pass of all their images."""
    used = [batch for _, batch in case.shared]
    streams = [generator(case.seed, "checks", "engine", number) for number in range(len(used))]
    shared = Rounds(case.model, case.loss, case.client.protocol, Defense(), used, streams)
    with quiet(), forked():
        shared.next()
    reason = shared.shares.why_not
    if reason is None:
        return None
    images, labels = torch.cat([batch.images for batch in used]), torch.cat([batch.labels for batch in used])

    def together() -> None:
        for _ in range(case.client.protocol.local_steps):
            gradient(case.model, case.loss, images, labels)

    with quiet(), case.passes():
        slowly = seconds(lambda: Rounds(case.model, case.loss, case.client.protocol, Defense(), used, streams).next())
        times = slowly / seconds(together)
    means = f"victims are taken one at a time, as {reason}: {len(used)} of them take {times:.1f} times as long as one pass of their images"
    return Finding("warning", "engine", means, "use layers that the batched engine has rules for, or fewer images and more patience")


def seconds(work: Callable[[], object]) -> float:
    """The shorter of two runs."""
    found = []
    for _ in range(2):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found)
