"""Convert audits that gradveil 0.1.0 wrote as a grid into the layout that this version reads.

    python tools/convert_results.py benchmarks/results/grids/*

Only settings.json of the audit and of its cases are written anew; records stay as they are. A
folder that has been converted is left alone. Defenses are told by looking their names up in the
registry: no text of a file is parsed, and nothing that it names is imported.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from gradveil.audits.job import slug
from gradveil.core.files import write_text
from gradveil.core.job_folder import SETTINGS
from gradveil.defenses import REGISTRY
from gradveil.defenses.chain import THEN

FORMAT = "gradveil audit 2"
DROPPED = ("policy", "fitting", "positive")
"""Settings of a case that are now told by its defense, or by the audit."""


def convert(folder: Path) -> bool:
    """Convert one audit; False where it needs no conversion."""
    settings = read(folder)
    if settings.get("format") == FORMAT:
        return False
    cases = [case | {"folder": find_folder(folder, case).name} for case in settings["cases"]]
    for case in cases:
        convert_case(folder / case["folder"], case)
    write(folder, settings | {"format": FORMAT, "cases": cases, "public_sha256": None})
    return True


def convert_case(folder: Path, case: dict[str, Any]) -> None:
    """Write the settings of one case as this version does."""
    kept = {name: value for name, value in read(folder).items() if name not in DROPPED}
    named = {name: case[name] for name in ("defense", "checkpoint", "clean", "step")}
    changes = changes_images(case["defense"])
    write(folder, kept | named | {"format": FORMAT, "changes_images": changes})


def changes_images(defense: str) -> bool:
    """Whether a part of the defense changes images: what no registry knows was a policy."""
    kinds = (REGISTRY.get(part.partition(":")[0]) for part in defense.split(THEN))
    return any(kind is None or kind.acts_on == "batch" for kind in kinds)


def find_folder(folder: Path, case: dict[str, Any]) -> Path:
    """The folder of a case. Long names were cut and end in a digest, so the start must do."""
    clean = "-clean" if case["clean"] else ""
    step = f"-at-{case['step']}" if case["step"] else ""
    name = f"{slug(case['defense'])}{clean}{step}"
    found = [folder / name] if (folder / name).is_dir() else [*folder.glob(f"{name[:80]}-????????")]
    if len(found) != 1:
        raise SystemExit(f"error: {folder} holds {len(found)} folders for {name}; expected one")
    return found[0]


def read(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / SETTINGS).read_text()))


def write(folder: Path, settings: dict[str, Any]) -> None:
    write_text(folder / SETTINGS, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    for folder in parser.parse_args().folders:
        if (folder / SETTINGS).is_file():
            print(f"{folder}: {'converted' if convert(folder) else 'is converted already'}")


if __name__ == "__main__":
    main()
