"""Make RESULTS.md from the records under `benchmarks/results/`: `make results`.

    python tools/make_results.py [--check]

With --check nothing is written: the status is 1 where RESULTS.md or README.md is not current.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from results import audits, exact, reading, scores, searches, speed, trained
from results.records import ROOT

SECTIONS = (reading, trained, exact, scores, audits, searches, speed)
TARGET = ROOT / "RESULTS.md"


def made() -> str:
    """Return the text of RESULTS.md."""
    return "\n\n".join(part.section().strip() for part in SECTIONS) + "\n"


def main() -> None:
    text = made()
    if "--check" in sys.argv[1:]:
        if TARGET.read_text() != text:
            raise SystemExit("RESULTS.md is not what the records say: run `make results`")
        return
    TARGET.write_text(text)


if __name__ == "__main__":
    main()
