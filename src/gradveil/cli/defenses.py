"""gradveil defenses: what there is, with the paper of each."""

import typer

from gradveil.cli.options import Json, examples, say, table

app = typer.Typer(no_args_is_help=True, help="Look at the defences.")

CHAINING = "Several are joined by ,then, as in 3-1-7,then,clip:1,then,gaussian:1e-2: model and images first, gradients last."


@app.callback()
def group() -> None:
    """Look at the defences."""


@app.command("list", epilog=examples("gradveil defenses list", "gradveil defenses list --json"))
def list_defenses(as_json: Json = False) -> None:
    """Every defence as it is written, what it does in one line, and the paper it is from."""
    from gradveil.defenses import REGISTRY  # torch takes seconds to import

    found = [
        {
            "name": name,
            "example": kind.example,
            "acts_on": kind.acts_on,
            "line": kind.line,
            "paper": kind.paper,
        }
        for name, kind in REGISTRY.items()
    ]
    rows = [(one["example"], one["line"], one["paper"]) for one in found]
    say(
        {"defenses": found, "chaining": CHAINING},
        as_json,
        table("Defences", ("such as", "what it does", "paper"), rows),
        CHAINING,
    )
