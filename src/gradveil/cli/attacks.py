"""gradveil attacks: the named attacks, when to use each, what it costs, and its paper."""

import typer

from gradveil.cli.options import Json, examples, listing, say

app = typer.Typer(no_args_is_help=True, help="Look at the attacks.")

AUTO = (
    "--attack auto runs those that suit the defense, all with equal restarts and steps: the most "
    "that any has, at most 4 restarts; raced ones have one race. A+B is one search with "
    "the settings of both. An attack of yours is written package.module:NAME."
)


@app.callback()
def group() -> None:
    """Look at the attacks."""


@app.command("list", epilog=examples("gradveil attacks list", "gradveil attacks list --json"))
def list_attacks(as_json: Json = False) -> None:
    """Show every attack: what it does, when to use it, its cost, what it must know, its paper."""
    from gradveil.attacks.presets import ABOUT, PRESETS  # torch takes seconds to import

    found = [
        {"name": name, **about._asdict(), "needs": list(PRESETS[name].needs)}
        for name, about in ABOUT.items()
    ]
    rows = [
        (name, about.line, about.use, about.cost, ", ".join(PRESETS[name].needs), about.paper)
        for name, about in ABOUT.items()
    ]
    columns = ("attack", "what it does", "use", "cost, adam-cosine 1", "must know", "paper")
    say({"attacks": found, "auto": AUTO}, as_json, listing("Attacks", columns, rows), AUTO)
