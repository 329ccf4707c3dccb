"""Tuning: settings of gradient matching found on public images, as a real server could find them.

`tune` runs it; `AttackSpace`, `Choice`, `Amount` and `Searches` say what is tried.
"""

from gradveil.tuning.job import TuningJob
from gradveil.tuning.results import TuningResult
from gradveil.tuning.run import run_tuning, tune
from gradveil.tuning.space import Amount, AttackSpace, Choice, Searches, usual_space

__all__ = [
    "Amount",
    "AttackSpace",
    "Choice",
    "Searches",
    "TuningJob",
    "TuningResult",
    "run_tuning",
    "tune",
    "usual_space",
]
