"""gradveil defenses: what there is, with the paper of each and the attacks that break it."""

import typer

from gradveil.cli.options import Json, examples, listing, say

app = typer.Typer(no_args_is_help=True, help="Look at the defenses.")

CHAINING = (
    "Several are joined by ,then, as in 3-1-7,then,clip:1,then,gaussian:1e-2: model and images "
    "first, gradients last."
)
OWN = "A class of yours is written package.module:Class(4), with literals as arguments."


@app.callback()
def group() -> None:
    """Look at the defenses."""


@app.command("list", epilog=examples("gradveil defenses list", "gradveil defenses list --json"))
def list_defenses(as_json: Json = False) -> None:
    """Show every defense as it is written: its use, its cost, what breaks it, and its paper."""
    from gradveil.defenses import REGISTRY  # torch takes seconds to import

    found = [
        {
            "name": name,
            "example": kind.example,
            "acts_on": kind.acts_on,
            "line": kind.line,
            "use": kind.use,
            "cost": kind.cost,
            "breakers": list(kind.breakers),
            "paper": kind.paper,
        }
        for name, kind in REGISTRY.items()
    ]
    rows = [
        (
            kind.example,
            kind.line,
            kind.use,
            kind.cost,
            ", ".join(kind.breakers) or "none known",
            kind.paper,
        )
        for kind in REGISTRY.values()
    ]
    columns = ("such as", "what it does", "use when", "cost", "broken by", "paper")
    say(
        {"defenses": found, "chaining": CHAINING, "own": OWN},
        as_json,
        listing("Defenses", columns, rows),
        f"{CHAINING}\n{OWN}",
    )
