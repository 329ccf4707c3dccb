"""The study of a search: which values are tried, by which process, and with what result.

Any number of processes share it, and it can be resumed at any time. This module imports Optuna, so
others import it only where a study is opened.
"""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import optuna
from msgspec import to_builtins
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.samplers import BaseSampler, NSGAIISampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from gradveil.core.errors import GradveilError, OtherSettingsError, unknown
from gradveil.core.files import shown
from gradveil.core.formats import TrialAttributes
from gradveil.core.job_folder import differences
from gradveil.core.reading import convert
from gradveil.core.seeds import derived
from gradveil.search.owners import Heartbeat, OwnerEntry, lives, this_process
from gradveil.search.space import SAMPLERS, STATES, Dimension, FinishedTrial, Scale, Space, Trial
from gradveil.search.storage import OpenStorage, open_storage

SETTINGS = "settings"  # of the search: an attribute of the study
OWNER = "owner"  # of a trial; the study's attribute `owner:<id>` is that owner's heartbeat
RESULT = "result"
DIRECTIONS: tuple[Literal["minimize", "maximize"], ...] = ("minimize", "maximize")


T = TypeVar("T")


def distributions(space: Space[Any]) -> dict[str, BaseDistribution]:
    """Return the dimensions of a space as Optuna has them."""

    def distribution(dimension: Dimension) -> BaseDistribution:
        if isinstance(dimension, Scale):
            return FloatDistribution(dimension.low, dimension.high, log=True)
        return CategoricalDistribution(dimension)

    return {name: distribution(dimension) for name, dimension in space.dimensions.items()}


class TrialSampler(BaseSampler):
    """Draw each dimension independently of the others.

    `at_once` tells whether that needs no more than the trial's number, and leaves no trace.
    """

    at_once = True

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}


class RandomSampler(TrialSampler):
    """Draw trial k from the seed and k alone."""

    def __init__(self, seed: int, space: Space[Any]) -> None:
        self._seed, self._space = seed, space

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> str:
        return self._space.draw(self._seed, trial.number)[param_name]


class ReseededSampler(TrialSampler):
    """Make another sampler anew for each trial, with a seed of the trial's own.

    So a study that is resumed asks for the same trials.
    """

    def __init__(self, make: Callable[[int], BaseSampler], seed: int) -> None:
        self._make = make
        self._seed = seed

    def _fresh(self, trial: FrozenTrial, *path: str) -> BaseSampler:
        return self._make(derived(self._seed, "sampler", trial.number, *path) % 2**32)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        return self._fresh(trial, param_name).sample_independent(
            study, trial, param_name, param_distribution
        )


class BreedingSampler(ReseededSampler):
    """Draw all dimensions together, with a sampler that keeps notes on the trial while it does."""

    at_once = False

    def __init__(self, make: Callable[[int], BaseSampler], seed: int, space: Space[Any]) -> None:
        super().__init__(make, seed)
        self._space = space

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return distributions(self._space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._fresh(trial).sample_relative(study, trial, search_space)


def make_sampler(name: str, seed: int, space: Space[Any]) -> TrialSampler:
    """Return the sampler of this name."""
    if name == "random":
        return RandomSampler(seed, space)
    if name == "tpe":
        return ReseededSampler(_tpe, seed)
    if name == "nsga2":
        return BreedingSampler(lambda fresh: NSGAIISampler(seed=fresh), seed, space)
    raise unknown("sampler", name, SAMPLERS)


def _tpe(seed: int) -> TPESampler:
    with warnings.catch_warnings():
        # Optuna calls the constant liar, which keeps trials that run at once apart, experimental
        warnings.simplefilter("ignore")
        return TPESampler(seed=seed, multivariate=False, constant_liar=True)


class Study(Generic[T]):
    """Try every number below a target once. A process holds the trials it claimed while it lives.

    Claims are made by one process at a time, under a lock that goes with its holder: the kernel's
    on a file beside the journal or the SQLite file, a row's in any other database. So no two
    processes claim the same trial. A process that was silent for a minute, yet lives, may find its
    trials taken: then a value is scored twice, and the first result stays.

    Trials and the study are read and written through the storage's public methods, by the study's
    id and the trials' numbers: Optuna's own study could neither claim a trial that another process
    left, nor read the trials without a copy of each.
    """

    def __init__(
        self,
        study: optuna.Study,
        opened: OpenStorage,
        objectives: tuple[str, ...],
        space: Space[T],
    ) -> None:
        self._study = study
        self.space = space
        self._distributions = distributions(space)
        self._opened = opened
        self._storage = opened.storage
        self._objectives = objectives
        self._read: dict[int, FinishedTrial[T]] = {}
        self._given: set[int] = set()  # the trials that this process was given
        self._me = this_process()
        with opened.explained():
            self._id = self._storage.get_study_id_from_name(study.study_name)
            self._tell_of_me(time.time())
        self._heartbeat = Heartbeat(lambda: self._tell_of_me(time.time()))

    @classmethod
    def open(
        cls,
        storage: str | Path,
        name: str,
        settings: Mapping[str, Any],
        sampler: str,
        seed: int,
        objectives: tuple[str, ...],
        space: Space[T],
    ) -> "Study[T]":
        """Make the study or join it.

        The mean of the first objective is to be low; that of a second, for nsga2 alone, high.
        """
        if sampler not in SAMPLERS:
            raise unknown("sampler", sampler, SAMPLERS)
        if len(objectives) != (2 if sampler == "nsga2" else 1):
            raise GradveilError(
                f"objectives {', '.join(objectives)}: nsga2 takes two, "
                f"{' and '.join(SAMPLERS[:2])} take one"
            )
        opened = open_storage(storage)
        wanted = {**settings, "sampler": sampler, "seed": seed, "objectives": list(objectives)}
        with opened.explained(), opened.lock():
            study = optuna.create_study(
                storage=opened.storage,
                sampler=make_sampler(sampler, seed, space),
                study_name=name,
                directions=DIRECTIONS[: len(objectives)],
                load_if_exists=True,
            )
            _settle(study, wanted, opened.name, space.job)
            for drawn in space.first[len(study.trials) :]:
                study.enqueue_trial(dict(drawn))
        return cls(study, opened, objectives, space)

    def claim(self, count: int, target: int) -> list[Trial[T]]:
        """Claim up to `count` trials with numbers below `target`: abandoned ones, else new ones.

        A group ends at a multiple of `count`, so that a search that was stopped goes on with the
        groups it would have had.
        """
        if count < 1:
            raise GradveilError(f"{count} trials at once: claim at least 1")
        with self._opened.explained():
            claimed = self._opened.patiently(lambda: self._claim(count, target))
        self._given |= {trial.number for trial in claimed}
        return claimed

    def _claim(self, count: int, target: int) -> list[Trial[T]]:
        with self._opened.lock():
            trials = self._trials()
            living = self._living()
            free = [trial for trial in trials[:target] if self._is_free(trial, living)]
            first = free[0].number if free else len(trials)
            end = min(target, (first // count + 1) * count)
            taken = [self._take(trial) for trial in free if trial.number < end]
            return taken + [self._create(number) for number in range(len(trials), end)]

    def _is_free(self, trial: FrozenTrial, living: Set[str]) -> bool:
        """Tell whether nobody works at it; a claim that a broken connection lost counts as none."""
        owner = self._attributes(trial).owner
        unanswered = owner == self._me.id and trial.number not in self._given
        return not trial.state.is_finished() and (owner not in living or unanswered)

    def finish(self, trial: Trial[T], state: str, values: Mapping[str, Sequence[float]]) -> None:
        """Keep the result of a trial; if another process finished it meanwhile, theirs stays."""
        if state not in STATES:
            raise unknown("state", state, STATES)
        plain = {name: [float(value) for value in found] for name, found in values.items()}
        exact = {name: tuple(found) for name, found in plain.items()}
        told = self._told(FinishedTrial(trial.number, trial.tried, state, exact))
        result = {"state": state, "values": plain}
        outcome = TrialState.PRUNED if told is None else TrialState.COMPLETE

        def keep() -> None:
            self._storage.set_trial_user_attr(self._trial_id(trial.number), RESULT, result)
            self._study.tell(trial.number, told, state=outcome, skip_if_finished=True)

        with self._opened.explained(), suppress(UpdateFinishedTrialError):
            self._opened.patiently(keep)

    def finished(self, target: int) -> list[FinishedTrial[T]]:
        """Return the finished trials with numbers below `target`, in order."""
        with self._opened.explained():
            for trial in self._opened.patiently(self._trials)[:target]:
                if (
                    trial.number not in self._read
                    and trial.state.is_finished()
                    and RESULT in trial.user_attrs
                ):
                    self._read[trial.number] = self._read_back(trial)
        return [self._read[number] for number in sorted(self._read) if number < target]

    def busy(self, target: int) -> int:
        """Count the unfinished trials below `target` that are not this process's.

        Some of their owners may have died since the last claim; the next claim takes those.
        """
        with self._opened.explained():
            return sum(
                not trial.state.is_finished() and self._attributes(trial).owner != self._me.id
                for trial in self._opened.patiently(self._trials)[:target]
            )

    def close(self) -> None:
        """Stop the heartbeat; other processes can take the trials that are still claimed."""
        self._heartbeat.stop()
        # where the storage is away, silence tells the others the same
        with suppress(GradveilError), self._opened.explained():
            self._tell_of_me(None)
        self._opened.close()

    @property
    def url(self) -> str:
        """What `optuna-dashboard` opens: the journal file, or the URL without its password."""
        return self._opened.name

    def _trials(self) -> list[FrozenTrial]:
        """Return all trials in order; the storage remembers the finished and reads what is new."""
        return self._storage.get_all_trials(self._id, deepcopy=False)

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)

    def _living(self) -> set[str]:
        known = self._storage.get_study_user_attrs(self._id)
        owners = {
            key.removeprefix(f"{OWNER}:"): convert(entry, OwnerEntry, f"{self.url}: {shown(key)}")
            for key, entry in known.items()
            if key.startswith(f"{OWNER}:")
        }
        return {owner for owner, entry in owners.items() if owner == self._me.id or lives(entry)}

    def _tell_of_me(self, beat: float | None) -> None:
        entry = to_builtins(self._me.entry(beat))
        self._storage.set_study_user_attr(self._id, f"{OWNER}:{self._me.id}", entry)

    def _create(self, number: int) -> Trial[T]:
        """Create a trial; whole in one quick write, never half done, where that is safe.

        The number must be certain before the value is drawn. On a server it is not: Optuna goes
        on trying to create the trial for seconds after the connection was lost, and the lock with
        it, so that another process may have created trials in between. Letting go of a lost lock
        fails, and the claim is made again: it takes the trials that this one created.
        """
        sampler = self._study.sampler
        assert isinstance(sampler, TrialSampler)
        template = create_trial(state=TrialState.RUNNING, user_attrs={OWNER: self._me.id})
        if self._opened.on_server or not sampler.at_once:
            return Trial(number, self._suggest(self._storage.create_new_trial(self._id, template)))
        template.number = number
        drawn = {
            name: sampler.sample_independent(self._study, template, name, distribution)
            for name, distribution in self._distributions.items()
        }
        value = self.space.make(drawn)
        template.params, template.distributions = drawn, dict(self._distributions)
        template.user_attrs[self.space.attribute] = self.space.text(value)
        self._storage.create_new_trial(self._id, template)
        return Trial(number, value)

    def _take(self, trial: FrozenTrial) -> Trial[T]:
        known = self._trial_id(trial.number)
        self._storage.set_trial_user_attr(known, OWNER, self._me.id)
        if trial.state == TrialState.WAITING:
            self._storage.set_trial_state_values(known, TrialState.RUNNING)
        text = self._text(trial)
        return Trial(trial.number, self.space.read(text) if text else self._suggest(known))

    def _text(self, trial: FrozenTrial) -> str:
        """Return the text that the trial keeps of its value; empty where there is none yet."""
        text: str = getattr(self._attributes(trial), self.space.attribute) or ""
        return text

    def _attributes(self, trial: FrozenTrial) -> TrialAttributes:
        return convert(trial.user_attrs, TrialAttributes, f"{self.url}: trial {trial.number}")

    def _read_back(self, trial: FrozenTrial) -> FinishedTrial[T]:
        """Return the trial as it was stored, if that is a whole result of such a search."""
        kept, where = self._attributes(trial), f"{self.url}: trial {trial.number}"
        text = self._text(trial)
        if not text or not kept.result:
            raise GradveilError(f"{where}: {self.space.attribute}: missing")
        values = {name: tuple(found) for name, found in kept.result.values.items() if found}
        if kept.result.state == "scored" or len(self._objectives) > 1:
            for name in self._objectives:
                if name not in values:
                    raise GradveilError(f"{where}: result.values.{name}: missing")
        try:
            value = self.space.read(text)
        except GradveilError as error:
            raise GradveilError(f"{where}: {error}") from None
        return FinishedTrial(trial.number, value, kept.result.state, values)

    def _suggest(self, known: int) -> T:
        """Draw the dimensions of the trial with this id; those that are stored already stay."""
        trial = optuna.trial.Trial(self._study, known)
        drawn = {
            name: trial.suggest_float(name, dimension.low, dimension.high, log=True)
            if isinstance(dimension, Scale)
            else trial.suggest_categorical(name, dimension)
            for name, dimension in self.space.dimensions.items()
        }
        value = self.space.make(drawn)
        trial.set_user_attr(self.space.attribute, self.space.text(value))
        return value

    def _told(self, trial: FinishedTrial[T]) -> list[float] | None:
        """Return the means that Optuna is told; None where it is told that the trial was pruned.

        Two objectives are both known whatever the state, and a population needs every trial.
        """
        if trial.state != "scored" and len(self._objectives) == 1:
            return None
        means = [trial.mean(name) for name in self._objectives]
        return means if all(map(math.isfinite, means)) else None


def _settle(study: optuna.Study, wanted: Mapping[str, Any], storage: str, job: str) -> None:
    """Keep the settings with a new study; refuse a study that was made with others."""
    kept = study.user_attrs.get(SETTINGS)
    if kept is not None:
        convert(kept, dict[str, Any], f"{storage}: {SETTINGS} of study {shown(study.study_name)}")
    if kept is None and study.trials:
        raise GradveilError(
            f"study {study.study_name!r} in {storage!r} is no {job} of gradveil: choose another "
            "name or storage"
        )
    if kept is None:
        study.set_user_attr(SETTINGS, dict(wanted))
    elif changes := differences(kept, wanted):
        raise OtherSettingsError(
            f"study {study.study_name!r} in {storage!r} is a {job} with other settings "
            f"({changes}): use those, or another storage"
        )
