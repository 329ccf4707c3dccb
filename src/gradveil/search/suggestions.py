"""Optuna's samplers, made to answer alike whenever the same trial is asked for. Import it where Optuna is needed, not before."""

import warnings
from collections.abc import Callable
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, NSGAIISampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from gradveil.core.errors import unknown
from gradveil.core.seeds import derived
from gradveil.search.samplers import CHOICES, SAMPLERS, SLOTS, draw

SPACE: dict[str, BaseDistribution] = {slot: CategoricalDistribution(CHOICES) for slot in SLOTS}


class PolicySampler(BaseSampler):
    """Fills each slot by itself. `at_once` tells whether that takes no more than the trial's number, and leaves no trace."""

    at_once = True

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        return {}

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:  # noqa: ARG002
        return {}


class RandomPolicies(PolicySampler):
    """The policy of trial k is a function of the seed and k."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> str:  # noqa: ARG002
        return draw(self._seed, trial.number)[param_name]


class Reseeded(PolicySampler):
    """Another sampler, made anew for each trial with a seed of the trial's own: so one that starts again asks for the same."""

    def __init__(self, make: Callable[[int], BaseSampler], seed: int) -> None:
        self._make = make
        self._seed = seed

    def _fresh(self, trial: FrozenTrial, *path: str) -> BaseSampler:
        return self._make(derived(self._seed, "sampler", trial.number, *path) % 2**32)

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        return self._fresh(trial, param_name).sample_independent(study, trial, param_name, param_distribution)


class Breeding(Reseeded):
    """One that fills all slots together, and keeps notes on the trial while it does."""

    at_once = False

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        return dict(SPACE)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        return self._fresh(trial).sample_relative(study, trial, search_space)


def make_sampler(name: str, seed: int) -> PolicySampler:
    if name == "random":
        return RandomPolicies(seed)
    if name == "tpe":
        return Reseeded(_tpe, seed)
    if name == "nsga2":
        return Breeding(lambda own: NSGAIISampler(seed=own), seed)
    raise unknown("sampler", name, SAMPLERS)


def _tpe(seed: int) -> TPESampler:
    with warnings.catch_warnings():  # Optuna 4 calls the constant liar, which keeps trials that run at once apart, an experiment
        warnings.simplefilter("ignore")
        return TPESampler(seed=seed, multivariate=False, constant_liar=True)


def slots_of(study: Study, number: int) -> dict[str, str]:
    """The slots of a trial that is not in the study yet."""
    trial = create_trial(state=TrialState.RUNNING)
    trial.number = number
    return {slot: study.sampler.sample_independent(study, trial, slot, SPACE[slot]) for slot in SLOTS}
