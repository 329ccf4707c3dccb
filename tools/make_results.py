"""Make RESULTS.md and the figures of the documentation: `make results`.

    python tools/make_results.py [--check]

They come from the records under `benchmarks/results/`. With --check nothing is written: the status
is 1 where one of the texts is not current.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from results import (
    audits,
    batches,
    docs,
    exact,
    federated,
    findings,
    guard,
    reading,
    reproduce,
    scores,
    searches,
    speed,
    trained,
)
from results.records import ROOT, contents

SECTIONS = (
    findings.section,
    reading.rules,
    trained.section,
    reproduce.verdicts,
    reproduce.section,
    reproduce.beyond,
    exact.section,
    exact.features,
    batches.section,
    federated.section,
    guard.section,
    scores.section,
    audits.section,
    searches.section,
    speed.section,
    reproduce.missing,
)
TARGET = ROOT / "RESULTS.md"


def made() -> str:
    """Return the text of RESULTS.md."""
    text = "\n\n".join(part().strip() for part in SECTIONS)
    return f"{reading.beginning()}\n\n{contents(text)}\n\n{text}\n"


def main() -> None:
    current = {TARGET: made(), **docs.with_figures(docs.pages())}
    for path, text in current.items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif path.read_text() != text:
            raise SystemExit(f"{path.name} is not what the records say: run `make results`")
    if "--check" not in sys.argv[1:]:
        reproduce.draw()


if __name__ == "__main__":
    main()
