"""What a study says of itself and of its trials: the attributes it keeps, and how they are read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradveil.core.errors import GradveilError
from gradveil.core.folders import differences
from gradveil.search.trials import Finished
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
        raise GradveilError(f"study {study.study_name!r} in {place!r} is no search of gradveil: choose another name or storage")
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
