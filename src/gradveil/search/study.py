"""The study of a search: which policies are tried, by whom, and what came of it; shared by any number of processes, and resumed at will."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from optuna import Study as OptunaStudy
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, NSGAIISampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from gradveil.core.errors import GradveilError, unknown
from gradveil.core.job_folder import differences
from gradveil.core.seeds import derived
from gradveil.search.space import CHOICES, SAMPLERS, SLOTS, STATES, Finished, Trial, draw, policy_of
from gradveil.search.storage import Heart, Place, lives, open_place, this_process
from gradveil.transforms import Policy

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial


SETTINGS = "settings"  # of the search, with the study
OWNER = "owner"  # of a trial; `owner:<id>` of the study is that owner's heartbeat
POLICY = "policy"
RESULT = "result"


def settle(study: "optuna.Study", wanted: Mapping[str, Any], place: str) -> None:
    """Keep the settings with a new study; an error if it was made with others."""
    there = study.user_attrs.get(SETTINGS)
    if there is None and study.trials:
        raise GradveilError(
            f"study {study.study_name!r} in {place!r} is no search of gradveil: choose another name or storage"
        )
    if there is None:
        study.set_user_attr(SETTINGS, dict(wanted))
    elif changes := differences(there, wanted):
        raise GradveilError(
            f"study {study.study_name!r} in {place!r} is a search with other settings ({changes}): use those, or another storage"
        )


def waits(trial: "FrozenTrial", living: set[str]) -> bool:
    """Unfinished, and nobody is at it."""
    return not trial.state.is_finished() and trial.user_attrs.get(OWNER) not in living


def read_back(trial: "FrozenTrial") -> Finished:
    result = trial.user_attrs[RESULT]
    values = {name: tuple(found) for name, found in result["values"].items()}
    return Finished(trial.number, Policy.parse(trial.user_attrs[POLICY]), result["state"], values)


SPACE: dict[str, BaseDistribution] = {slot: CategoricalDistribution(CHOICES) for slot in SLOTS}


class PolicySampler(BaseSampler):
    """Fills each slot by itself. `at_once` tells whether that takes no more than the trial's number, and leaves no trace."""

    at_once = True

    def infer_relative_search_space(
        self, study: OptunaStudy, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: OptunaStudy, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}


class RandomSampler(PolicySampler):
    """The policy of trial k is a function of the seed and k."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def sample_independent(
        self,
        study: OptunaStudy,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> str:
        return draw(self._seed, trial.number)[param_name]


class Reseeded(PolicySampler):
    """Another sampler, made anew for each trial with a seed of the trial's own: so one that starts again asks for the same."""

    def __init__(self, make: Callable[[int], BaseSampler], seed: int) -> None:
        self._make = make
        self._seed = seed

    def _fresh(self, trial: FrozenTrial, *path: str) -> BaseSampler:
        return self._make(derived(self._seed, "sampler", trial.number, *path) % 2**32)

    def sample_independent(
        self,
        study: OptunaStudy,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        return self._fresh(trial, param_name).sample_independent(
            study, trial, param_name, param_distribution
        )


class Breeding(Reseeded):
    """One that fills all slots together, and keeps notes on the trial while it does."""

    at_once = False

    def infer_relative_search_space(
        self, study: OptunaStudy, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return dict(SPACE)

    def sample_relative(
        self, study: OptunaStudy, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._fresh(trial).sample_relative(study, trial, search_space)


def make_sampler(name: str, seed: int) -> PolicySampler:
    if name == "random":
        return RandomSampler(seed)
    if name == "tpe":
        return Reseeded(_tpe, seed)
    if name == "nsga2":
        return Breeding(lambda own: NSGAIISampler(seed=own), seed)
    raise unknown("sampler", name, SAMPLERS)


def _tpe(seed: int) -> TPESampler:
    with (
        warnings.catch_warnings()
    ):  # Optuna 4 calls the constant liar, which keeps trials that run at once apart, an experiment
        warnings.simplefilter("ignore")
        return TPESampler(seed=seed, multivariate=False, constant_liar=True)


def slots_of(study: OptunaStudy, number: int) -> dict[str, str]:
    """The slots of a trial that is not in the study yet."""
    trial = create_trial(state=TrialState.RUNNING)
    trial.number = number
    return {
        slot: study.sampler.sample_independent(study, trial, slot, SPACE[slot]) for slot in SLOTS
    }


DIRECTIONS: tuple[Literal["minimize", "maximize"], ...] = ("minimize", "maximize")


class Study:
    """Every number below the target is tried once. What a process has claimed is its own while it lives.

    Claims are made one process at a time, under a lock that goes with its holder: the kernel's on a file beside the journal or the
    SQLite file, a row's in any other database. So no two processes claim the same trial. One that was silent for a minute, yet
    lives, may find its trials taken: then a policy is scored twice, and the first result stays.
    """

    def __init__(self, study: "optuna.Study", place: Place, objectives: tuple[str, ...]) -> None:
        self._study = study
        self._storage = place.storage
        self._place = place
        self._objectives = objectives
        self._read: dict[int, Finished] = {}
        self._me = this_process()
        with place.explained():
            self._tell_of_me(time.time())
        self._heart = Heart(lambda: self._tell_of_me(time.time()))

    @classmethod
    def open(
        cls,
        storage: str | Path,
        name: str,
        settings: Mapping[str, Any],
        sampler: str,
        seed: int,
        objectives: tuple[str, ...],
    ) -> "Study":
        """Make the study or join it. The first objective's mean is to be low; a second one's, which only nsga2 takes, high."""
        if sampler not in SAMPLERS:
            raise unknown("sampler", sampler, SAMPLERS)
        if len(objectives) != (2 if sampler == "nsga2" else 1):
            raise GradveilError(
                f"objectives {', '.join(objectives)}: nsga2 takes two, {' and '.join(SAMPLERS[:2])} take one"
            )
        place = open_place(storage)

        import optuna

        wanted = {**settings, "sampler": sampler, "seed": seed, "objectives": list(objectives)}
        with place.explained(), place.alone():
            study = optuna.create_study(
                storage=place.storage,
                sampler=make_sampler(sampler, seed),
                study_name=name,
                directions=DIRECTIONS[: len(objectives)],
                load_if_exists=True,
            )
            settle(study, wanted, place.name)
        return cls(study, place, objectives)

    def claim(self, count: int, target: int) -> list[Trial]:
        """Up to `count` trials with numbers below `target`: those that nobody holds any more, else new ones.

        A group ends at a multiple of `count`, so that a search that was stopped goes on with the groups it would have had.
        """
        if count < 1:
            raise GradveilError(f"{count} trials at once: claim at least 1")
        with self._place.explained(), self._place.alone():
            trials = self._trials()
            living = self._living()
            free = [trial for trial in trials[:target] if waits(trial, living)]
            first = free[0].number if free else len(trials)
            end = min(target, (first // count + 1) * count)
            taken = [self._take(trial) for trial in free if trial.number < end]
            return taken + [self._create(number) for number in range(len(trials), end)]

    def finish(self, trial: Trial, state: str, values: Mapping[str, Sequence[float]]) -> None:
        """Once. A trial that somebody else finished in the meantime is left as it is."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        if state not in STATES:
            raise unknown("state", state, STATES)
        result = {
            "state": state,
            "values": {name: [float(value) for value in found] for name, found in values.items()},
        }
        told = self._told(
            Finished(
                trial.number,
                trial.policy,
                state,
                {name: tuple(found) for name, found in values.items()},
            )
        )
        with self._place.explained(), suppress(UpdateFinishedTrialError):
            known = self._storage.get_trial_id_from_study_id_trial_number(
                self._study._study_id, trial.number
            )
            self._storage.set_trial_user_attr(known, RESULT, result)
            outcome = TrialState.PRUNED if told is None else TrialState.COMPLETE
            self._study.tell(trial.number, told, state=outcome, skip_if_finished=True)

    def finished(self, target: int) -> list[Finished]:
        """In the order of their numbers, those below `target`."""
        with self._place.explained():
            for trial in self._trials()[:target]:
                if (
                    trial.number not in self._read
                    and trial.state.is_finished()
                    and RESULT in trial.user_attrs
                ):
                    self._read[trial.number] = read_back(trial)
        return [self._read[number] for number in sorted(self._read) if number < target]

    def busy(self, target: int) -> int:
        """How many trials below `target` are in other hands; also those whose holder died since the last claim, for the next to take."""
        with self._place.explained():
            return sum(
                not trial.state.is_finished() and trial.user_attrs.get(OWNER) != self._me.id
                for trial in self._trials()[:target]
            )

    def close(self) -> None:
        """Stop the heartbeat; what is still claimed can be taken by others."""
        self._heart.stop()
        with (
            suppress(GradveilError),
            self._place.explained(),
        ):  # a storage that is away: silence tells them the same
            self._tell_of_me(None)
        self._place.leave()

    @property
    def url(self) -> str:
        """What `optuna-dashboard` opens: the journal file, or the URL without its password."""
        return self._place.name

    def _trials(self) -> "list[FrozenTrial]":
        """In the order of their numbers. The storage remembers what is finished, and reads only what is new."""
        return self._storage.get_all_trials(self._study._study_id, deepcopy=False)

    def _living(self) -> set[str]:
        known = self._storage.get_study_user_attrs(self._study._study_id)
        owners = {
            key.removeprefix(f"{OWNER}:"): entry
            for key, entry in known.items()
            if key.startswith(f"{OWNER}:")
        }
        return {owner for owner, entry in owners.items() if owner == self._me.id or lives(entry)}

    def _tell_of_me(self, beat: float | None) -> None:
        self._storage.set_study_user_attr(
            self._study._study_id, f"{OWNER}:{self._me.id}", self._me.entry(beat)
        )

    def _create(self, number: int) -> Trial:
        """Where the sampler allows it, whole in one operation: that is quick, and leaves nothing half done."""
        from optuna.trial import TrialState, create_trial

        sampler = self._study.sampler
        assert isinstance(sampler, PolicySampler)
        template = create_trial(state=TrialState.RUNNING, user_attrs={OWNER: self._me.id})
        if not sampler.at_once:
            return Trial(
                number,
                self._suggest(self._storage.create_new_trial(self._study._study_id, template)),
            )
        slots = slots_of(self._study, number)
        policy = policy_of(slots)
        template.params, template.distributions, template.user_attrs[POLICY] = (
            slots,
            dict(SPACE),
            str(policy),
        )
        self._storage.create_new_trial(self._study._study_id, template)
        return Trial(number, policy)

    def _take(self, trial: "FrozenTrial") -> Trial:
        from optuna.trial import TrialState

        self._storage.set_trial_user_attr(trial._trial_id, OWNER, self._me.id)
        if trial.state == TrialState.WAITING:
            self._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
        text = trial.user_attrs.get(POLICY)
        return Trial(trial.number, Policy.parse(text) if text else self._suggest(trial._trial_id))

    def _suggest(self, known: int) -> Policy:
        """Fill the slots that are not filled yet: what is stored already stays."""
        import optuna

        trial = optuna.trial.Trial(self._study, known)
        policy = policy_of({slot: trial.suggest_categorical(slot, CHOICES) for slot in SLOTS})
        trial.set_user_attr(POLICY, str(policy))
        return policy

    def _told(self, trial: Finished) -> list[float] | None:
        """The means Optuna is told; None where it is told that the trial was pruned.

        Two objectives are both known whatever the state, and a population needs every trial.
        """
        if trial.state != "scored" and len(self._objectives) == 1:
            return None
        means = [trial.mean(name) for name in self._objectives]
        return means if all(map(math.isfinite, means)) else None
