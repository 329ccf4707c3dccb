"""The command line: every command, and how errors reach the user, as one line and a status."""

import copy
import os
import re
import sys
import traceback
import warnings
from functools import cache, partial
from typing import Annotated, Any

import typer

from gradveil import __version__
from gradveil.cli import (
    assess,
    audit,
    data,
    doctor,
    federate,
    listings,
    policy,
    reconstruct,
    report,
    reproduce,
    search,
    train,
    tune,
)
from gradveil.core.errors import GradveilError, GradveilWarning, one_line
from gradveil.core.importing import RAISED
from gradveil.core.stopping import exit_status, signaled, stop_on_signals, tell
from gradveil.core.streams import OutputLostError, print_line
from gradveil.core.text import printable, read_number, shortened

BAD_INPUT = 2
UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h: an error in the program itself
READER_GONE = 1  # nobody reads the standard output any more, as after `| head`
INTERRUPTED = 128 + 2  # as typer reports Ctrl-C

# Commands that list what an option takes.
LISTS = {"data": "gradveil data list", "attack": "gradveil attacks list"}

LONGEST = 2_000  # letters of an error's line: it may quote an argument

DEBUG = "--debug"
COMPLETES = "_GRADVEIL_COMPLETE"  # set by a shell that asks how a command line may go on

REPEATED = re.compile(r"( Did you mean '[^']*'\?)\1+")  # where typer and click both suggest it

STATUS = (
    "Status: 0 done; 1 done, and something was found wrong; 2 bad input; 70 unexpected error; "
    "128 + n stopped by signal n, such as 130 by Ctrl-C."
)

app = typer.Typer(
    name="gradveil",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="What shared gradients give away in collaborative learning, and the defenses against it.",
    epilog=STATUS,
)
app.add_typer(data.app, name="data")
app.add_typer(policy.app, name="policy")
app.add_typer(listings.policies, name="policies")
app.add_typer(listings.defenses, name="defenses")
app.add_typer(listings.attacks, name="attacks")
app.command("assess", epilog=assess.EXAMPLES)(assess.assess_command)
app.command("train", epilog=train.EXAMPLES)(train.train_command)
app.command("audit", epilog=audit.EXAMPLES)(audit.audit_command)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor_command)
app.command("search", epilog=search.EXAMPLES)(search.search_command)
app.command("tune", epilog=tune.EXAMPLES)(tune.tune_command)
app.command("reproduce", epilog=reproduce.EXAMPLES)(reproduce.reproduce_command)
app.command("report", epilog=report.EXAMPLES)(report.report_command)
app.command("federate", epilog=federate.EXAMPLES)(federate.federate_command)
app.command("reconstruct", epilog=reconstruct.EXAMPLES)(reconstruct.reconstruct_command)


def _version(asked: bool) -> None:
    if asked:
        print_line(f"gradveil {__version__}")
        raise typer.Exit


START = f"""\
gradveil {__version__}: what shared gradients give away, and the defenses against it

  gradveil assess --data folder:PHOTOS --model my_module:make --checkpoint weights.pt
                     all in one: what leaks now, which defense helps, what it costs, a page

  gradveil doctor    what would make an audit of a model and images misleading
  gradveil audit     attack what clients share, under one defense or several
  gradveil search    find a policy that protects your images
  gradveil train     train a model, under a defense
  gradveil attacks list, defenses list, policies list, data list

  try it now:        gradveil assess --data fashion-mnist-mini --model lenet --budget 5
  every command:     gradveil --help, gradveil COMMAND --help
  shell completion:  gradveil --install-completion"""


@app.callback()
def group(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[  # `run` takes it out before: it may stand anywhere
        bool,
        typer.Option(DEBUG, help="Show the traceback of an error. It may stand anywhere."),
    ] = False,
) -> None:
    """What shared gradients give away in collaborative learning, and the defenses against it."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line as a program: take signals and warnings over, and exit."""
    plain = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *origin: Any, **more: Any) -> None:
        text = printable(shortened(" ".join(str(message).split()), LONGEST))
        if issubclass(category, GradveilWarning):
            print_line(f"warning: {text}", error=True)
        else:
            plain(text, category, *origin, **more)

    warnings.showwarning = show
    with stop_on_signals():
        sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run one command and return the status to exit with."""
    given = sys.argv[1:] if arguments is None else arguments
    debug = DEBUG in given
    try:
        if not given and COMPLETES not in os.environ:
            print_line(START)
            return 0
        words = [word for word in given if word != DEBUG]
        status = _command()(words, prog_name=app.info.name, standalone_mode=False)
        if status == INTERRUPTED:  # what typer makes of KeyboardInterrupt
            raise KeyboardInterrupt
        if sys.stdout is not None:
            sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _stopped()
    except RAISED as error:
        if signaled():
            return _stopped()
        if isinstance(error, SystemExit) and COMPLETES in os.environ:  # a shell has its answer
            return error.code if isinstance(error.code, int) else 0
        if isinstance(error, OutputLostError) and error.gone:
            return READER_GONE
        message, status = _explained(error)
        if debug:
            print_line(printable(traceback.format_exc()).rstrip(), error=True)
        else:
            line = shortened(" ".join(message.split()), LONGEST)
            print_line(f"error: {printable(line)}", error=True)
        return status


@cache
def _command() -> Any:
    """Return all commands; to make them takes longer than most of them take to refuse a value."""
    return _strict(typer.main.get_command(app))


def _strict(command: Any) -> Any:
    """Let every option of the command that takes a number read it by `read_number`."""
    for parameter in command.params:
        kind = {"integer": int, "float": float}.get(parameter.type.name.split()[0])
        if kind is not None:
            parameter.type = copy.copy(parameter.type)  # click shares one for all programs
            parameter.type.convert = partial(_number, parameter.type, kind)
    for part in getattr(command, "commands", {}).values():
        _strict(part)
    return command


def _number(plain: Any, kind: type[int] | type[float], value: Any, *where: Any) -> Any:
    """Convert as click does, after a look at the text."""
    if isinstance(value, str):
        try:
            read_number(value, kind)
        except ValueError:
            return type(plain).fail(
                plain, f"{value!r} is not a valid {plain.name.split()[0]}.", *where
            )
    return type(plain).convert(plain, value, *where)


def _stopped() -> int:
    tell()
    return exit_status()


def _explained(error: BaseException) -> tuple[str, int]:
    """Return the words for an error, and the status to exit with."""
    if isinstance(error, GradveilError | OSError):
        return str(error), BAD_INPUT
    # Of click's errors about usage, wherever this typer keeps click.
    usage = getattr(error, "format_message", None)
    if usage is not None:
        said = _missing(error) or _unknown_command(error) or REPEATED.sub(r"\1", usage())
        asked = getattr(getattr(error, "ctx", None), "command_path", app.info.name)
        return said or f"no command given: see {asked} --help", BAD_INPUT
    said = one_line(error, 200)
    return f"unexpected {said}; run again with {DEBUG} for the traceback", UNEXPECTED


def _missing(error: Any) -> str:
    """Name all required options and arguments that were not given, where that is the error.

    Click reads what was given first and stops at the first parameter that is missing.
    """
    if type(error).__name__ != "MissingParameter" or error.ctx is None:
        return ""
    absent = [
        each
        for each in error.ctx.command.params
        if each.required and each.name not in error.ctx.params
    ]
    if not absent:
        return ""
    kinds = {each.param_type_name for each in absent}
    kind = f"{kinds.pop()}{'s' * (len(absent) > 1)} " if len(kinds) == 1 else ""
    *names, last = (each.get_error_hint(error.ctx) for each in absent)
    named = f"{', '.join(names)} and {last}" if names else last
    lists = [LISTS[each.name] for each in absent if each.name in LISTS]
    see = ", ".join(f"`{line}`" for line in (*lists, f"{error.ctx.command_path} --help"))
    return f"Missing {kind}{named}. See {see}."


def _unknown_command(error: Any) -> str:
    """Name the commands there are, where the one given is none of them and none is near it."""
    groups = getattr(getattr(error.ctx, "command", None), "commands", None)
    said = str(error.format_message())
    if not groups or not said.startswith("No such command") or "Did you mean" in said:
        return ""
    return f"{said.rstrip('.')}: choose from {', '.join(groups)}"
