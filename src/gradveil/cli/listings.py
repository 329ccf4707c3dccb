"""gradveil attacks, defenses and policies: lists of what there is, each with its cost and paper."""

import typer

from gradveil.cli.options import Json, examples, listing, say


def _group(about: str) -> typer.Typer:
    """Return a group of commands, which stays one though it has a single command."""
    made = typer.Typer(no_args_is_help=True, help=about)
    made.callback()(lambda: None)  # without it typer drops the command's name
    return made


attacks = _group("Look at the attacks.")
defenses = _group("Look at the defenses.")
policies = _group("Look at published policies.")

AUTO = (
    "--attack auto runs those that suit the defense, all with equal restarts and steps: the most "
    "that any has, at most 4 restarts; raced ones have one race. A+B is one search with "
    "the settings of both. An attack of yours is written package.module:NAME."
)

CHAINING = (
    "Several are joined by ,then, as in 3-1-7,then,clip:1,then,gaussian:1e-2: model and images "
    "first, gradients last."
)
OWN_CLASS = "A class of yours is written package.module:Class(4), with literals as arguments."

JOINED = (
    "A policy is a defense: --defense 3-1-7+43-18-18, where each image gets one of those joined by "
    "+. `gradveil policy show 3-1-7` draws what it does, `gradveil search` finds one for images of "
    "yours."
)


@attacks.command("list", epilog=examples("gradveil attacks list", "gradveil attacks list --json"))
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


@defenses.command(
    "list", epilog=examples("gradveil defenses list", "gradveil defenses list --json")
)
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
        {"defenses": found, "chaining": CHAINING, "own": OWN_CLASS},
        as_json,
        listing("Defenses", columns, rows),
        f"{CHAINING}\n{OWN_CLASS}",
    )


@policies.command(
    "list", epilog=examples("gradveil policies list", "gradveil policies list --json")
)
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
    say({"policies": found, "more": JOINED}, as_json, listing("Policies", columns, rows), JOINED)
