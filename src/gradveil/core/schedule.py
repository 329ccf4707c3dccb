"""The step schedule of learning rates that training and attacks have in common."""

DECAY_AT = (3 / 8, 5 / 8, 7 / 8)


def count_decays(step: int, steps: int) -> int:
    """Return how often the learning rate was divided by ten before this step, counted from 0.

    It is divided at 3/8, 5/8 and 7/8 of all steps (or epochs).
    """
    return sum(step >= part * steps for part in DECAY_AT)
