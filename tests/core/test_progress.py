"""How long a job takes, said before it does."""

import time

import pytest

from gradveil.core.progress import Bar, Iterations, foretold, spoken


@pytest.mark.parametrize(
    ("seconds", "words"), [(40, "40 s"), (720, "12 min"), (13_200, "3 h 40"), (36_000, "10 h 00")]
)
def test_a_time_is_written_as_people_say_it(seconds: float, words: str) -> None:
    assert spoken(seconds) == words


def test_only_what_is_shorter_is_offered_instead() -> None:
    said = foretold(13_200, {"--steps 500": 1_500, "--steps 9000": 20_000})
    assert said == "about 3 h 40 on this machine; --steps 500: 25 min"


class Said(Bar):
    """A bar that keeps what it is told to say."""

    def __init__(self) -> None:
        super().__init__(shown=False)
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(("pace", "lines"), [(1.0, 1), (0.001, 0)])
def test_an_attack_that_takes_minutes_says_so_once(
    pace: float, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bar = Said()
    watch = Iterations(bar, "reconstructing", "--steps")
    for _ in range(2):  # two clients in turn
        for done in range(1, 301):
            monkeypatch.setattr(time, "perf_counter", lambda now=done * pace: now)
            watch(done, 300)
    assert bar.lines == ["about 5 min on this machine; --steps 30: 30 s"] * lines


def test_the_time_left_is_what_the_job_says_whatever_the_bar_s_speed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = Bar(shown=True)
    bar.start("audit", 100.0)
    bar.update(1.0, left=3_723.4)
    bar.stop()
    assert "left 1:02:03" in capsys.readouterr().err
