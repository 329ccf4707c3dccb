"""gradveil policy: show a policy in words and as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.cli.options import Device, Json, Seed, examples, say, table
from gradveil.core.errors import GradveilError

if TYPE_CHECKING:
    from gradveil.transforms import Transform

app = typer.Typer(no_args_is_help=True, help="Look at transformation policies.")


@app.callback()
def group() -> None:
    """Look at transformation policies."""


@app.command(
    "show",
    epilog=examples(
        "gradveil policy show 3-1-7+43-18-18",
        "gradveil policy show 'translate_x(9)-contrast(6)' --json",
        "gradveil policy show 3-1-7 --image photo.jpg --out policy.png",
    ),
)
def show(
    policy: Annotated[
        str,
        typer.Argument(
            help="Such as 3-1-7+43-18-18: library numbers 0 to 49, or names like translate_x(9)."
        ),
    ],
    image: Annotated[
        Path | None,
        typer.Option("--image", help="A picture to draw it on; an embedded one without this."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Draw what the policy does, step by step: .png, .pdf or .svg."),
    ] = None,
    as_json: Json = False,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Say what a policy does; with --out, draw it.

    Each image gets one of the members joined by +, and random signs.
    """
    from gradveil.core.seeds import generator  # torch and matplotlib take seconds to import
    from gradveil.data import load
    from gradveil.engine.device import find_device
    from gradveil.report.pictures import as_picture, draw_policy, open_picture
    from gradveil.transforms import Policy

    find_device(device)
    parsed = Policy.parse(policy)
    if image and not out:
        raise GradveilError("--image needs --out, the file to draw into")
    if out:
        if image:
            picture = open_picture(image)
        else:
            picture = as_picture(load("fashion-mnist-mini", "test").images[0])
        draw_policy(parsed, picture, generator(seed, "policy"), out)
    members = [[_facts(transform) for transform in member] for member in parsed.members]
    rows = [
        (
            number,
            "" if t.index is None else t.index,
            t.describe(),
            "drawn for each image" if t.signed else "",
        )
        for number, member in enumerate(parsed.members, start=1)
        for t in member
    ]
    shown = table(f"Policy {parsed}", ("member", "library", "transformation", "sign"), rows)
    result: dict[str, Any] = {"policy": str(parsed), "policies": members, "picture": out}
    say(result, as_json, shown, f"drawn in {out}" if out else "")


def _facts(transform: "Transform") -> dict[str, Any]:
    return {
        "index": transform.index,
        "name": transform.name,
        "magnitude": transform.magnitude,
        "value": transform.value,
        "random_sign": transform.signed,
        "means": transform.describe(),
    }
