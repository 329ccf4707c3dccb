"""Which images of a split each score looks at. The first hundred are for attacks, and no score sees them."""

from dataclasses import dataclass

from gradveil.core.errors import GradveilError

FIRST = 200  # where scoring images start
STEP = 5
BATCHES = 10
BATCH = 100
SMALLEST = 2  # images of an accuracy batch: one alone has no correlation


@dataclass(frozen=True)
class Chosen:
    """Places in the split: of the images whose leakage is scored, and of all batches of the accuracy score. Notes say what is less
    than usual."""

    leak: tuple[int, ...]
    accuracy: tuple[int, ...]
    notes: tuple[str, ...] = ()


def choose_images(size: int, wanted: int | None, usual: int, name: str) -> Chosen:
    """From a split of `size`: every fifth image from 200 on, and ten batches of a hundred from there.

    A smaller split has closer images (the largest step that fits) and smaller batches. `wanted` None asks for the usual number, or
    as many as there are; a number that does not fit is an error.
    """
    there = size - FIRST
    if there < BATCHES * SMALLEST:
        raise GradveilError(
            f"{name} has {size} images: scores start at image {FIRST} and need {BATCHES * SMALLEST} from there; search on a larger split"
        )
    if wanted is not None and wanted > there:
        raise GradveilError(f"images {wanted}: {name} has {there} from image {FIRST} on, where scores start; choose at most {there}")
    count = min(usual, there) if wanted is None else wanted
    step = min(STEP, (there - 1) // (count - 1)) if count > 1 else STEP
    batch = min(BATCH, there // BATCHES)
    notes = []
    if count < usual:
        notes.append(f"leakage was scored on {count} images instead of {usual}: the ranking is less sure")
    if batch < BATCH:
        notes.append(f"{name} has {size} images: accuracy was scored on {BATCHES} batches of {batch} images instead of {BATCH}")
    leak, accuracy = range(FIRST, FIRST + count * step, step), range(FIRST, FIRST + BATCHES * batch)
    return Chosen(tuple(leak), tuple(accuracy), tuple(notes))
