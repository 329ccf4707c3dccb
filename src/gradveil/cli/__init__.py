"""The command line: every command, and how errors reach the user, as one line and a status of 2."""

import os
import sys
import warnings
from typing import Annotated, Any

import typer

from gradveil import __version__
from gradveil.cli import audit, data, defenses, doctor, policy, reconstruct, search, train
from gradveil.core.errors import GradveilError, GradveilWarning

INTERRUPTED = 128 + 2  # as shells report a program that SIGINT ended

app = typer.Typer(
    name="gradveil",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="What shared gradients give away in collaborative learning, and the defences that stop it.",
)
app.add_typer(data.app, name="data")
app.add_typer(policy.app, name="policy")
app.add_typer(defenses.app, name="defenses")
app.command("train", epilog=train.EXAMPLES)(train.train_command)
app.command("audit", epilog=audit.EXAMPLES)(audit.audit_command)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor_command)
app.command("search", epilog=search.EXAMPLES)(search.search_command)
app.command("reconstruct", epilog=reconstruct.EXAMPLES)(reconstruct.reconstruct_command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gradveil {__version__}")
        raise typer.Exit


@app.callback()
def group(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What shared gradients give away in collaborative learning, and the defences that stop it."""


def main(arguments: list[str] | None = None) -> None:
    plain = warnings.showwarning

    def one_line(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, GradveilWarning):
            typer.echo(f"warning: {message}", err=True)
        else:
            plain(message, category, *place, **more)

    warnings.showwarning = one_line
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """The status to exit with."""
    try:
        status = app(arguments, standalone_mode=False)
        if status == INTERRUPTED:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        return status if isinstance(status, int) else 0
    except GradveilError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _fail("stopped; run the same command again to go on", INTERRUPTED)
    except BrokenPipeError:  # the reader went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(str(error))
    except Exception as error:
        message = getattr(
            error, "format_message", None
        )  # click's errors about usage, wherever this typer keeps click
        if message is None:
            raise
        return _fail(message() or "no command given: see gradveil --help")


def _fail(message: str, status: int = 2) -> int:
    typer.echo("error: " + " ".join(message.split()), err=True)
    return status
