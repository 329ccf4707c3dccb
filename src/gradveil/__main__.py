"""The program: `gradveil`, or `python -m gradveil`."""

import os
import sys

from gradveil.core.stopping import STOPPED, exit_status, stop_on_signals
from gradveil.core.streams import prepare_streams


def main() -> None:
    """Run the command line; a signal ends it in one line from the first moment on."""
    with stop_on_signals():
        try:
            prepare_streams()
            from gradveil.cli import main as run  # typer takes a fifth of a second to import
        except KeyboardInterrupt:
            sys.stderr.write(f"{STOPPED}\n")
            sys.stderr.flush()
            os._exit(exit_status())  # nothing has begun that would have to be ended in good order
        run()


if __name__ == "__main__":
    main()
