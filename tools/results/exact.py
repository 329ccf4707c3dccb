"""Exact inversion of batches, and what dense layers tell of them exactly."""

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


FEATURES = (
    "cifar100-mlp-untrained",
    "cifar100-mlp-trained",
    "cifar100-flower-untrained",
    "cifar100-flower-trained",
    "fashion-mnist-flower-untrained",
    "fashion-mnist-flower-trained",
)
NETWORKS = {"mlp": "mlp", "flower": "CNN of Flower's quickstart"}


def told(name: str, batch: int) -> str:
    """Write of how many images of batches the features came out exactly, without a defense."""
    rows = facts(f"features/{name}.json")["rows"]
    (row,) = (each for each in rows if (each["defense"], each["batch"]) == ("none", batch))
    return f"{sum(row['exact']):,} of {row['batch'] * row['batches']:,}"


def features() -> str:
    """Return the section on what dense layers tell of each image of a batch."""
    body = []
    for name in FEATURES:
        found = facts(f"features/{name}.json")
        state = "untrained"
        if found["train_steps"]:
            state = f"{found['train_steps']:,} steps, {percent(found['accuracy'])}"
        for row in found["rows"]:
            images = row["batch"] * row["batches"]
            body.append(
                [
                    found["data"],
                    NETWORKS[found["model"]],
                    state,
                    f"`{row['defense']}`",
                    str(row["batch"]),
                    f"{sum(row['exact']):,}/{images:,}",
                    f"{sum(count == row['batch'] for count in row['exact'])}/{row['batches']}",
                    f"{row['seconds_a_batch']:.1f}",
                ]
            )
    first = facts(f"features/{FEATURES[0]}.json")
    head = ["data", "network", "training, test accuracy", "defense", "images a batch"]
    head += ["exact images", "whole batches", "seconds a batch"]
    return (
        "## What dense layers tell of each image of a batch\n"
        "The inputs of the first dense layer for each image, found from the last dense layer's "
        "gradient and then layer by layer: labels known, fewer images than classes, float32 "
        f"gradients, batches drawn from the test split, {first['rows'][0]['batches']} batches a "
        f"row, seed {first['seed']}, {first['machine']} of a busy machine.\n\n"
        f"{table(head, body)}\n\n"
        "- Exact means a relative error below a thousandth; it is near float32's rounding where "
        "the equations are solved. Of `mlp`, five dense layers, the inputs are the images "
        "themselves (`dense-inversion`); of the CNN they are what its convolutions make of them, "
        "which `features` then match.\n"
        "- Images that a trained model is sure of have hardly a gradient, so the equations of "
        "their batch may not be solved. Noise and pruning end it as they are. A batch counts as "
        "none where the first layer was not reached.\n"
        "- That the gradient is explained does not always mean that every image is right: images "
        "of one class in heads without ReLU, or without any trace in a layer, may not be.\n\n"
        "`python benchmarks/features.py`; records `features/`."
    )
