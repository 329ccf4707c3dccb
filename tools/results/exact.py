"""Exact inversion of batches."""

from results.records import facts, percent, table

FILES = ("fashion-mnist-trained", "fashion-mnist-untrained", "cifar100-untrained")


def recovered(name: str, defense: str, batch: int) -> str:
    """Write how many images of batches came out exactly."""
    rows = facts(f"peeling/{name}.json")["rows"]
    (row,) = (each for each in rows if (each["defense"], each["batch"]) == (defense, batch))
    return f"{sum(row['exact']):,} of {row['batch'] * row['batches']:,}"


def section() -> str:
    body, false, right, sure = [], 0, 0, 0
    for name in FILES:
        found = facts(f"peeling/{name}.json")
        state = f"trained to {percent(found['accuracy'])}" if found["trained"] else "untrained"
        for row in found["rows"]:
            images = row["batch"] * row["batches"]
            body.append(
                [
                    f"{found['data']}, {state}",
                    f"`{row['defense']}`",
                    str(row["batch"]),
                    f"{sum(row['exact']):,}/{images:,}",
                    f"{100 * sum(row['exact']) / images:.1f}",
                    f"{min(row['exact'])} to {max(row['exact'])}",
                    f"{row['seconds_a_batch']:.2f}",
                ]
            )
            false, right = false + row["false"], right + row["labels_right"]
            sure += sum(row["exact"]) + row["false"]
    first = facts(f"peeling/{FILES[0]}.json")
    head = ["mlp (four layers of 1,024)", "defense", "images a batch", "recovered exactly", "%"]
    head += ["least to most in a batch", "seconds a batch"]
    return (
        "## Exact inversion of batches\n"
        "`peeling` on networks that begin with a linear layer and ReLU: labels unknown, float32 "
        f"gradients, batches drawn from the test split, {first['rows'][0]['batches']} batches a "
        f"row, seed {first['seed']}, {first['machine']}.\n\n{table(head, body)}\n\n"
        "- Exact means every pixel. The attack knows without the truth which images are exact: of "
        f"{sure:,} that it called exact {false} were not, and {right:,} had the right label.\n"
        "- Pruning and noise end it as they are: pruning takes an entry out of every unit's row, "
        "noise moves every pixel off the grid. That says nothing about other attacks.\n\n"
        "`python benchmarks/peeling.py`; records `peeling/`."
    )
