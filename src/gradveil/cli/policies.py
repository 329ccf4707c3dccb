"""gradveil policies: those that were published, for which images, and what they cost."""

import typer

from gradveil.cli.options import Json, examples, listing, say

app = typer.Typer(no_args_is_help=True, help="Look at published policies.")

MORE = (
    "A policy is a defense: --defense 3-1-7+43-18-18, where each image gets one of those joined by "
    "+. `gradveil policy show 3-1-7` draws what it does, `gradveil search` finds one for images of "
    "yours."
)


@app.callback()
def group() -> None:
    """Look at published policies."""


@app.command("list", epilog=examples("gradveil policies list", "gradveil policies list --json"))
def list_policies(as_json: Json = False) -> None:
    """Show every published policy: what it does, for which images, its cost, its paper."""
    from gradveil.transforms import Policy  # torch takes seconds to import
    from gradveil.transforms.published import PUBLISHED

    said = [
        " or ".join(
            ", ".join(part.describe() for part in member)
            for member in Policy.parse(each.policy).members
        )
        for each in PUBLISHED
    ]
    found = [each._asdict() | {"line": line} for each, line in zip(PUBLISHED, said, strict=True)]
    rows = [
        (each.policy, line, each.use, each.cost, each.paper)
        for each, line in zip(PUBLISHED, said, strict=True)
    ]
    columns = ("policy", "what it does", "use when", "cost", "paper")
    say({"policies": found, "more": MORE}, as_json, listing("Policies", columns, rows), MORE)
