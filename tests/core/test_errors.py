"""How errors put into words what a value is."""

from typing import Any

import numpy as np
import pytest

from gradveil.core.errors import kind_of


class Observed:
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "a whole number"),
        (0.5, "a number"),
        ("dlg", "a text"),
        (True, "True"),
        (None, "None"),
        (np.zeros(2), "a NumPy array"),
        (object(), "an object"),
        (Observed(), "an Observed"),
        ([1], "a list"),
        (Observed, "the class Observed"),
    ],
)
def test_a_value_is_named_in_words_with_the_right_article(value: Any, said: str) -> None:
    assert kind_of(value) == said
