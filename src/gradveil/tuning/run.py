"""A whole tuning: into a folder, alone or with others at one study, or on from where it stopped."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from gradveil.attacks import Attack, GradientMatching, adam_cosine
from gradveil.audits.timing import work
from gradveil.core.boundary import public
from gradveil.core.formats import ImagesUsed, TunedTrial, TuningCost, TuningGain
from gradveil.core.job_folder import SETTINGS
from gradveil.core.locks import clear_lock, held
from gradveil.core.progress import LONG, Bar, foretold
from gradveil.core.types import Protocol
from gradveil.data import Images, load
from gradveil.defenses import Defense, as_defense
from gradveil.engine.device import find_device
from gradveil.models import NormalizedName
from gradveil.search.engine import Engine
from gradveil.search.services import (
    CALM,
    JOURNAL,
    check_engine,
    check_optuna,
    check_services,
    claimed,
    make_engine,
)
from gradveil.search.space import Drawn, FinishedTrial, Trial
from gradveil.search.trials import TrialLoop, Values
from gradveil.transforms import Policy
from gradveil.tuning.job import ATTACK, FOLDER, TuningJob
from gradveil.tuning.results import TuningResult, compare, make_file
from gradveil.tuning.setup import Setup
from gradveil.tuning.space import AttackSpace

if TYPE_CHECKING:  # it imports Optuna
    from gradveil.search.study import Study

OBJECTIVE = "missed"
NOT_TOLD = ("space", "budget")  # settings that attack.toml does not repeat


@public
def tune(
    model: nn.Module | str | NormalizedName,
    data: Images | str,
    *,
    out: str | Path,
    images: int = 16,
    trials: int = 40,
    public: Images | str | None = None,
    checkpoint: str | Path | None = None,
    defense: Defense | Policy | str = "none",
    space: AttackSpace | None = None,
    held_out: int = 32,
    batch_size: int = 1,
    know_labels: bool = True,
    protocol: Protocol | None = None,
    work: int = adam_cosine.steps,
    budget: float | None = None,
    image_size: int | None = None,
    channels: int | None = None,
    seed: int = 0,
    data_root: str | Path | None = None,
    device: str = "auto",
    progress: bool = True,
) -> TuningResult:
    """Find settings of gradient matching on public images, as a server could; write attack.toml.

    `data` is the name of a data set, whose training split is meant, or images of the clients' kind;
    `public` are other images to tune on. `TuningJob` describes the other settings. The result's
    `attack` is one like any other, and `out`/attack.toml can be named where an attack is. Run the
    same call again after a stop, and it goes on.
    """
    root = None if data_root is None else Path(data_root)
    if isinstance(public, str):
        public = load(public, "train", root=root, image_size=image_size, channels=channels)
    job = TuningJob(
        model=model,
        data=data,
        images=images,
        trials=trials,
        public=public,
        checkpoint=None if checkpoint is None else Path(checkpoint),
        defense=as_defense(defense, "defense"),
        space=space,
        held_out=held_out,
        batch_size=batch_size,
        labels="known" if know_labels else "inferred",
        protocol=protocol or Protocol(),
        work=work,
        budget=budget,
        image_size=image_size,
        channels=channels,
        seed=seed,
    )
    return run_tuning(job, out, root=root, device=device, progress=progress)


@public
def run_tuning(
    job: TuningJob,
    out: str | Path,
    *,
    root: str | Path | None = None,
    device: str = "auto",
    storage: str | None = None,
    study: str = "gradveil",
    engine: str = "local",
    ray_address: str | None = None,
    progress: bool = True,
) -> TuningResult:
    """Tune into `out`. A tuning that was stopped goes on; one that has ended is read back.

    The study is a journal file in the folder, or lies in an Optuna storage (`storage`, a URL),
    where tunings on several machines join it by its name.
    """
    out, root = Path(out), None if root is None else Path(root)
    where = find_device(device)
    check_engine(engine, ray_address)
    job = _as_begun(job, out)
    FOLDER.refuse_other(out, job.settings())
    if (out / ATTACK).is_file():
        clear_lock(out)  # of a process that was killed after its last write
        return TuningResult.read(out)
    check_optuna("tuning")
    from gradveil.search.study import Study

    setup = Setup.of(job, root, where)
    check_services(storage, engine, ray_address)
    if job.budget is not None and not (out / SETTINGS).is_file():
        job = replace(job, work=setup.work_within(job.budget))
        setup = replace(setup, job=job)
    settings = job.settings()
    new = not (out / SETTINGS).is_file()
    with claimed(FOLDER, out, settings):
        bar = Bar(progress, counted=True, calm=CALM)
        facts = settings | setup.facts() | {"space": setup.space.plain()}
        del facts["checkpoint"], facts["budget"]
        kept = out / JOURNAL if storage is None else storage
        opened = Study.open(kept, study, facts, "tpe", job.seed, (OBJECTIVE,), setup.space)
        with closing(opened), make_engine(engine, setup.scorers(), ray_address) as made:
            if progress and (job.budget is None or not new):
                _foretell(setup, job.trials - len(opened.finished(job.trials)), bar, new)
            try:
                done = Loop(job, setup.space, opened, made, bar).run()
            finally:
                bar.stop()
            busy = "tests the tuned attack: waiting for it"
            with held(out, lambda holder: bar.say(f"{holder} {busy}")):
                if not (out / ATTACK).is_file():
                    _result(setup, out, done, made, (study, opened.url)).write()
        return TuningResult.read(out)


class Loop(TrialLoop[Drawn]):
    """The part of one process in a tuning: it tries attacks, and drops those clearly worse."""

    def __init__(
        self, job: TuningJob, space: AttackSpace, study: "Study[Drawn]", engine: Engine, bar: Bar
    ) -> None:
        super().__init__(study, engine, bar, job.at_once, OBJECTIVE)
        self.job, self.space = job, space

    def run(self) -> list[FinishedTrial[Drawn]]:
        """Try all attacks; return the finished trials."""
        self.work("tune", self.job.trials)
        return self.study.finished(self.job.trials)

    def scored(self, value: Drawn) -> object:
        return self.space.attack(value, self.job.work)

    def score(
        self,
        trials: Sequence[Trial[Drawn]],
        done: Sequence[FinishedTrial[Drawn]],
        target: int,
    ) -> None:
        values: dict[int, Values] = {trial.number: {} for trial in trials}
        # Trials of the same group are no rivals, so that a tuning that was stopped in a group goes
        # on as an unbroken one.
        first = trials[0].number - trials[0].number % self.size
        before = [trial for trial in done if trial.number < first]
        alive, blocks = list(trials), range(len(self.engine.scorers["trial"].blocks))
        for block in blocks:
            self.measure("trial", alive, values, block)
            if before and block != blocks[-1]:
                rival = torch.tensor(best_of(before).values[OBJECTIVE], dtype=torch.float64)
                alive = self.race(alive, values, rival, self.job.confidence)
        for trial in alive:
            self.finish(trial, "scored", values)

    def news(self, done: Sequence[FinishedTrial[Drawn]]) -> str:
        if not done:
            return ""
        best, dropped = best_of(done), sum(trial.state == "dropped" for trial in done)
        said = f"best: line-up {best.mean('lineup'):.0%}, SSIM {best.mean('ssim'):.2f}"
        return f"{said}, {dropped} dropped" if dropped else said


def best_of(done: Sequence[FinishedTrial[Drawn]]) -> FinishedTrial[Drawn]:
    """Return the trial that missed least of those that were scored on all images."""
    scored = [trial for trial in done if trial.state == "scored"]
    return min(scored, key=lambda trial: (trial.mean(OBJECTIVE), trial.number))


def _foretell(setup: Setup, trials: int, bar: Bar, new: bool) -> None:
    """Say how long so many trials take, were none dropped, where that is more than a minute.

    The work of each is settled where the tuning is not `new`.
    """
    work, iteration = setup.job.work, setup.iteration(trials)
    if iteration * work > LONG:
        fewer = max(work // 10, 1)
        shorter = {f"--work {fewer}": iteration * fewer} if new else {}
        bar.say(foretold(iteration * work, shorter))


def _as_begun(job: TuningJob, out: Path) -> TuningJob:
    """Return the job with the work that a tuning with a budget was begun with in this folder."""
    if job.budget is None or not (out / SETTINGS).is_file():
        return job
    return replace(job, work=int(FOLDER.read(out)["work"]))


def _result(
    setup: Setup,
    out: Path,
    done: Sequence[FinishedTrial[Drawn]],
    engine: Engine,
    study: tuple[str, str],
) -> TuningResult:
    """Test the best attack on the images held out, beside the standard attack."""
    job, best = setup.job, best_of(done)
    tuned = setup.space.attack(best.tried, job.work)
    standard = replace(adam_cosine, steps=job.work, frames=0)
    tables = engine.score("held out", [tuned, standard], 0)
    ours, theirs = ({name: tables[name][row].tolist() for name in tables} for row in (0, 1))
    lineups = setup.victims.lineups
    assert lineups is not None
    gain = TuningGain(
        n=job.held_out,
        updates=job.held_out // job.batch_size,
        candidates=lineups.size,
        **compare(ours, theirs),
    )
    cost = TuningCost(_work(tuned), _work(standard))
    used = ImagesUsed(setup.digests(setup.tuned_on), setup.digests(setup.held_out))
    settings = job.settings() | setup.facts()
    told = {name: value for name, value in settings.items() if name not in NOT_TOLD}
    file = make_file(tuned, told, cost, gain, used)
    return TuningResult(
        out,
        settings,
        tuned,
        file,
        tuple(map(_trial, done)),
        best.number,
        {"tuned": ours["seconds"][0], "standard": theirs["seconds"][0]},
        setup.notes,
        *study,
    )


def _work(attack: Attack) -> int:
    assert isinstance(attack, GradientMatching)
    return int(work(attack, 1))


def _trial(trial: FinishedTrial[Drawn]) -> TunedTrial:
    return TunedTrial(
        trial.number,
        "dropped" if trial.state == "dropped" else "scored",
        dict(trial.tried),
        len(trial.values[OBJECTIVE]),
        *(trial.mean(name) for name in (OBJECTIVE, "lineup", "ssim")),
    )
