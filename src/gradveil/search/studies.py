"""The study of a search: which policies are tried, by whom, and what came of it; shared by any number of processes, and resumed at will."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradveil.core.errors import GradveilError, unknown
from gradveil.search.entries import OWNER, POLICY, RESULT, read_back, settle, waits
from gradveil.search.owners import Heart, lives, this_process
from gradveil.search.samplers import CHOICES, SAMPLERS, SLOTS, policy_of
from gradveil.search.storages import Place, open_place
from gradveil.search.trials import STATES, Finished, Trial
from gradveil.transforms import Policy

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

__all__ = ["Finished", "Study", "Trial"]

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
        cls, storage: str | Path, name: str, settings: Mapping[str, Any], sampler: str, seed: int, objectives: tuple[str, ...]
    ) -> "Study":
        """Make the study or join it. The first objective's mean is to be low; a second one's, which only nsga2 takes, high."""
        if sampler not in SAMPLERS:
            raise unknown("sampler", sampler, SAMPLERS)
        if len(objectives) != (2 if sampler == "nsga2" else 1):
            raise GradveilError(f"objectives {', '.join(objectives)}: nsga2 takes two, {' and '.join(SAMPLERS[:2])} take one")
        place = open_place(storage)

        import optuna

        from gradveil.search.suggestions import make_sampler

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
        result = {"state": state, "values": {name: [float(value) for value in found] for name, found in values.items()}}
        told = self._told(Finished(trial.number, trial.policy, state, {name: tuple(found) for name, found in values.items()}))
        with self._place.explained(), suppress(UpdateFinishedTrialError):
            known = self._storage.get_trial_id_from_study_id_trial_number(self._study._study_id, trial.number)
            self._storage.set_trial_user_attr(known, RESULT, result)
            outcome = TrialState.PRUNED if told is None else TrialState.COMPLETE
            self._study.tell(trial.number, told, state=outcome, skip_if_finished=True)

    def finished(self, target: int) -> list[Finished]:
        """In the order of their numbers, those below `target`."""
        with self._place.explained():
            for trial in self._trials()[:target]:
                if trial.number not in self._read and trial.state.is_finished() and RESULT in trial.user_attrs:
                    self._read[trial.number] = read_back(trial)
        return [self._read[number] for number in sorted(self._read) if number < target]

    def busy(self, target: int) -> int:
        """How many trials below `target` are in other hands; also those whose holder died since the last claim, for the next to take."""
        with self._place.explained():
            return sum(not trial.state.is_finished() and trial.user_attrs.get(OWNER) != self._me.id for trial in self._trials()[:target])

    def close(self) -> None:
        """Stop the heartbeat; what is still claimed can be taken by others."""
        self._heart.stop()
        with suppress(GradveilError), self._place.explained():  # a storage that is away: silence tells them the same
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
        owners = {key.removeprefix(f"{OWNER}:"): entry for key, entry in known.items() if key.startswith(f"{OWNER}:")}
        return {owner for owner, entry in owners.items() if owner == self._me.id or lives(entry)}

    def _tell_of_me(self, beat: float | None) -> None:
        self._storage.set_study_user_attr(self._study._study_id, f"{OWNER}:{self._me.id}", self._me.entry(beat))

    def _create(self, number: int) -> Trial:
        """Where the sampler allows it, whole in one operation: that is quick, and leaves nothing half done."""
        from optuna.trial import TrialState, create_trial

        from gradveil.search.suggestions import SPACE, PolicySampler, slots_of

        sampler = self._study.sampler
        assert isinstance(sampler, PolicySampler)
        template = create_trial(state=TrialState.RUNNING, user_attrs={OWNER: self._me.id})
        if not sampler.at_once:
            return Trial(number, self._suggest(self._storage.create_new_trial(self._study._study_id, template)))
        slots = slots_of(self._study, number)
        policy = policy_of(slots)
        template.params, template.distributions, template.user_attrs[POLICY] = slots, dict(SPACE), str(policy)
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
