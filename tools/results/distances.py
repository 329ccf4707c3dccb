"""How far other images lie from an update, beside which a search's distance is read."""

from functools import cache
from typing import Any

from results.records import facts

RECORD = "distances-cpu.json"


def told() -> str:
    """Say what changed and other images have in both modes, after one step."""
    record = _record()
    kinds = record["rows"]
    batches = len(kinds[0]["distances"]["noise"])
    noise, others = (
        " and ".join(
            f"{_between(each['distances'][name])} in {each['mode']} mode" for each in kinds
        )
        for name in ("noise", "others")
    )
    return (
        f"of an untrained {record['model']} and {batches} batches of {record['images']}, one step, "
        f"a noise of {record['noise']:g} on the images gives {noise}, and other images of the same "
        f"classes {others} (`python benchmarks/distances.py`; record `{RECORD}`)"
    )


@cache
def _record() -> Any:
    return facts(RECORD)


def _between(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"
