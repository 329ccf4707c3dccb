"""Write constraints.txt, the versions that pip resolves for gradveil[all].

python tools/make_constraints.py
"""

import json
import re
import subprocess
import sys
from pathlib import Path

HEAD = """\
# The versions every install of this repository uses (`pip install -c constraints.txt ...`):
# those that pip resolves for gradveil[all] on Python 3.11. Renew with `make constraints`.
"""


def main() -> None:
    resolve = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--ignore-installed",
        "--report",
        "-",
        ".[all]",
    ]
    report = json.loads(subprocess.run(resolve, check=True, capture_output=True, text=True).stdout)
    names = {}
    for item in report["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        # Without a local build such as +cpu, which other machines may lack.
        names[name] = item["metadata"]["version"].split("+")[0]
    del names["gradveil"]
    Path("constraints.txt").write_text(
        HEAD + "".join(f"{name}=={version}\n" for name, version in sorted(names.items()))
    )
    print(f"{len(names)} versions")


if __name__ == "__main__":
    main()
