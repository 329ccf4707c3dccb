"""The program: `gradveil`, or `python -m gradveil`."""

from gradveil.core.stopping import end, finish, take_signals
from gradveil.core.streams import prepare_streams


def main() -> None:
    """Run the command line; a signal ends it in one line from the first moment to the last."""
    take_signals()
    try:
        prepare_streams()
        from gradveil.cli import main as run  # typer takes a fifth of a second to import
    except KeyboardInterrupt:
        end()  # nothing has begun that would have to be ended in good order
    try:
        run()
    finally:
        finish()  # Python may take a second to end, with threads and processes to be waited for


if __name__ == "__main__":
    main()
