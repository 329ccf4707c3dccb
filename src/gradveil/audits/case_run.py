"""A case of an audit is attacked, chunk by chunk, and its controls are made."""

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from gradveil.attacks import Attack
from gradveil.audits.gradient_lineup import GradientLineup
from gradveil.audits.model import describe_model, facts_hold, save_facts
from gradveil.audits.outcomes import (
    Outcome,
    blind_guesses,
    lost,
    make_pictures,
    make_records,
    outcomes,
    ranked,
)
from gradveil.audits.prepare import Prepared, PreparedCase, count_candidates
from gradveil.audits.records import (
    RECORDS,
    Key,
    Record,
    append,
    images_path,
    recover,
    release,
    save_images,
    whole_chunks,
)
from gradveil.audits.results import CASE, CaseResult
from gradveil.audits.stage import (
    GRADIENTS,
    NOISY,
    Stage,
    Victim,
    run_attack,
)
from gradveil.audits.timing import Clock, Costs, Pace
from gradveil.core.errors import GradveilError
from gradveil.core.files import digest
from gradveil.core.importing import RAISED
from gradveil.core.job_folder import claim
from gradveil.core.locks import alone, held
from gradveil.core.seeds import generator
from gradveil.core.types import Observation, Reconstruction

AUDITING = "auditing into"  # for who finds the folder held
MOST_REMEMBERED = 8  # positive controls that a process keeps
SHOWN = 24  # letters of a defense at the end of the bar, which needs the rest of the line


class CaseRun:
    """A case that is attacked chunk by chunk into its folder.

    Another process that holds the folder is waited for where `waits`, else this one is refused: a
    cluster that lost a machine does its case again elsewhere, perhaps before it has ended there.
    """

    def __init__(
        self, prepared: Prepared, case: PreparedCase, out: Path, clock: Clock, waits: bool
    ) -> None:
        self.prepared, self.case, self.out, self.waits = prepared, case, out, waits
        self.clock = clock
        self.experiment = experiment_id(case.settings)
        easy = prepared.positives if case is prepared.cases[0] else []
        self.stages = [*easy, case.stage]
        self.sizes = {key: size for stage in self.stages for key, size in stage.sizes().items()}
        if easy:
            self.sizes = _any_positive(prepared, easy[0]) | self.sizes
        records = whole_chunks(out / RECORDS, self.sizes)
        self.done = {record.key for record in records}
        self.costs = Costs()
        attacks = {
            key: a for s in self.stages for n in range(len(s.chunks)) for key, a in s.rows(n)
        }
        for record in records:
            if record.kind != "blind" and record.key in attacks:
                kind, name, _ = record.key
                self.costs.learn(kind, name, attacks[record.key], 1, record.seconds)

    @property
    def unfinished(self) -> list[Stage]:
        """The stages of which an attack is missing."""
        return [
            stage
            for stage in self.stages
            if any(
                key not in self.done
                for number in range(len(stage.chunks))
                for key, _ in stage.rows(number)
            )
        ]

    @property
    def left(self) -> float:
        """The seconds of what is missing, of the sham and of the ceilings, as far as known."""
        missing = sum(
            self._seconds(key, attack)
            for stage in self.stages
            for number in range(len(stage.chunks))
            for key, attack in stage.rows(number)
            if key not in self.done
        )
        closing = set(self.case.stage.closing) - self.done
        return missing + sum(map(self._closing_seconds, closing))

    def _closing_seconds(self, key: Key) -> float:
        """Return about how long the sham or a ceiling takes."""
        kind, name, _ = key
        if kind == "sham":
            return self.costs.sham(self.case.stage)
        return self.costs.ceiling(self.case.stage) if name == GRADIENTS else 0.0

    def _seconds(self, key: Key, attack: Attack) -> float:
        """Return about how long an attack on a chunk takes."""
        kind, name, _ = key
        return self.costs(kind, name, attack, self.sizes[key])

    def go(self) -> None:
        """Attack the chunks that are left; a failure gives back a folder without records."""
        with held(self.out, lambda _: None) if self.waits else alone(self.out, AUDITING):
            CASE.refuse_other(self.out, self.case.settings)
            # From here on no other process writes: the torn end that a killed run left can be cut
            # off, and chunks that another process did meanwhile are not done again.
            claim(self.out, self.case.settings)
            self.done = {record.key for record in recover(self.out / RECORDS, self.sizes)}
            try:
                self._describe()
                for stage in self.stages:
                    for number in range(len(stage.chunks)):
                        keys = {*(key for key, _ in stage.rows(number)), *stage.bars(number)}
                        if keys - self.done:
                            self.chunk(stage, number)
                self.close(self.case.stage)
            except RAISED:
                release(self.out)
                raise

    def _describe(self) -> None:
        """Write the facts of the model, before any record."""
        prepared, case = self.prepared, self.case.case
        if not facts_hold(self.out, self.case.settings.get("weights_sha256", "")):
            victims = self.case.stage.victims.numbers
            facts = describe_model(prepared.job, case, prepared.test, victims, prepared.device)
            save_facts(self.out, facts)

    def chunk(self, stage: Stage, number: int) -> None:
        """Share, guess blindly and attack; write the records and pictures of each attack.

        The controls are cheap, and every attack is measured by them, so they are made again where
        only an attack is missing.
        """
        victims = stage.lined_up(stage.share(stage.chunks[number]))
        controls = self._guesses(stage, victims, number)
        guesses = _chosen(stage, victims, controls)
        for key, attack in stage.rows(number):
            if key in self.done:
                continue
            kind, name, _ = key
            if kind == "blind":
                found, seconds = controls[name]
            else:
                seen = stage.seen_by(attack, victims)
                rng = generator(stage.seed, *key)
                plain = kind == "positive" and not stage.client.acting.parts()
                run = remembered if plain else _timed
                found, seconds = run(attack, seen, rng, self._step(key, attack))
                self.costs.learn(kind, name, attack, self.sizes[key], seconds)
            lot = generator(stage.seed, "lot", *key)
            made = ranked(outcomes(victims, found), lot, far=kind == "attack")
            self._write(stage, key, made, guesses, seconds)
            self.clock.show()
        for key in stage.bars(number):
            if key not in self.done:
                made = outcomes(victims, [_under_draws(stage, v) for v in victims if v.seen])
                made = ranked(made, generator(stage.seed, "lot", *key))
                self._write(stage, key, made, guesses, 0.0)

    def close(self, stage: Stage) -> None:
        """Make the sham and the ceilings, which follow the strongest attack so far."""
        left = [key for key in stage.closing if key not in self.done]
        if not left:
            return
        result = CaseResult.read(self.out)
        strongest = result.strongest
        victims = stage.lined_up(stage.share(stage.first_victims))
        guesses = _chosen(stage, victims, self._guesses(stage, victims, 0))
        for key in left:
            kind, name, _ = key
            started = time.perf_counter()
            lot = generator(stage.seed, "lot", *key)
            if kind == "sham":
                self.clock.bar.update(title=f"sham of {strongest.attack}")
                attack = stage.attacks[strongest.attack]
                shams = stage.shams(victims)
                seen = stage.seen_by(attack, shams)
                found = run_attack(attack, seen, generator(stage.seed, *key))
                made = ranked(outcomes(shams, found), lot, far=True)
            elif name == NOISY:
                records = result.of("attack", strongest.attack)
                view = getattr(stage.attacks[strongest.attack], "view", None)
                truth = "used" if view is None else view.aims_at
                made = ranked(_noisy(stage, victims, records, truth), lot, far=True)
            else:
                assert name == GRADIENTS
                self.clock.bar.update(title=name)
                lineup = GradientLineup(stage)
                made = [_nearest(lineup, victim, lot) for victim in victims]
            self._write(stage, key, made, guesses, time.perf_counter() - started)
            self.clock.show()

    def _guesses(
        self, stage: Stage, victims: Sequence[Victim], number: int
    ) -> dict[str, tuple[list[Reconstruction], float]]:
        """Return what each control guesses of these victims, and the seconds that it took."""
        told = [victim.told() for victim in victims if victim.seen is not None]
        return {
            name: _timed(blind, told, generator(stage.seed, "blind", name, number))
            for name, blind in stage.controls.attacks.items()
        }

    def _write(
        self,
        stage: Stage,
        key: Key,
        made: Sequence[Outcome],
        guesses: Mapping[str, Tensor],
        seconds: float,
    ) -> None:
        """Write the pictures, then the records, which make them count."""
        tensors, facts = make_pictures(made, with_frames=key[2] == 0)
        save_images(images_path(self.out, *key), tensors, facts)
        size = count_candidates(stage.victims)
        append(self.out / RECORDS, make_records(made, guesses, size, self.experiment, key, seconds))
        self.done.add(key)

    def _step(self, key: Key, attack: Attack) -> Any:
        kind, name, chunk = key
        said = f"positive control {name}" if kind == "positive" else f"{name}, chunk {chunk + 1}"
        defense = str(self.case.case.defense)
        news = defense if len(defense) <= SHOWN else f"{defense[:SHOWN]}…"
        self.clock.bar.update(title=said, news=news)
        pace = Pace()

        def step(done: int, of: int) -> None:
            whole = pace.whole(done, of)
            if whole is not None:
                self.costs.learn(kind, name, attack, self.sizes[key], whole)
            self.clock.step(min(pace.over, self._seconds(key, attack)))

        return step


def _any_positive(prepared: Prepared, easy: Stage) -> dict[Key, int]:
    """Count the images of any positive control that a process may have made.

    One that prepared other cases of the audit may have found that other attacks suit them.
    """
    job, model = prepared.job, prepared.cases[0].stage.client.model
    names = {name for case in job.cases for name in job.attacks_on(case, model)}
    return {("positive", name, 0): sum(map(len, easy.chunks[0])) for name in sorted(names)}


def _chosen(
    stage: Stage,
    victims: Sequence[Victim],
    controls: Mapping[str, tuple[list[Reconstruction], float]],
) -> dict[str, Tensor]:
    """Return the guess that gains are measured from, by truth."""
    chosen = stage.controls.chosen
    return {truth: blind_guesses(victims, controls[name][0]) for truth, name in chosen.items()}


def _noisy(
    stage: Stage, victims: Sequence[Victim], records: Sequence[Record], truth: str
) -> list[Outcome]:
    """Return the true pictures with noise of the variance of an attack's error, then clipped."""
    errors = {record.image: record.scores[truth]["mse"] for record in records if record.ok}
    rng = generator(stage.seed, "ceiling", "noise")
    made = []
    for victim in victims:
        if victim.seen is None or any(int(i) not in errors for i in victim.indices):
            made.append(lost(victim, "the attack found nothing to take the noise from"))
            continue
        true = victim.used if truth == "used" else victim.original.images
        size = torch.tensor([errors[int(i)] ** 0.5 for i in victim.indices])
        noise = torch.randn(true.shape, generator=rng) * size[:, None, None, None]
        images = (true + noise).clamp(0, 1)
        made.append(Outcome(victim, "ok", images, [None] * len(images)))
    return made


def _under_draws(stage: Stage, victim: Victim) -> Reconstruction:
    """Return the class means of public images, put through the victim's draws."""
    means = stage.controls.means
    assert means is not None
    labels = victim.original.labels
    made = [
        stage.under_draws(victim, row, means[[label]].to(victim.used))
        for row, label in enumerate(labels.tolist())
    ]
    return Reconstruction(torch.cat(made), labels, math.inf)


def _nearest(lineup: GradientLineup, victim: Victim, rng: Generator) -> Outcome:
    """Return the candidates whose gradients are nearest to the one observed, with their ranks."""
    if victim.seen is None:
        return lost(victim, victim.status)
    try:
        ranks, images = lineup.rank(victim, rng)
    except GradveilError as error:
        return lost(victim, str(error))
    both = {"used": ranks, "original": ranks}
    return Outcome(victim, "ok", images, [None] * len(images), ranks=both)


def _timed(
    attack: Attack, seen: Any, rng: Any, step: Any = None
) -> tuple[list[Reconstruction], float]:
    """Return the reconstructions, and the seconds that they took."""
    started = time.perf_counter()
    found = run_attack(attack, seen, rng, step)
    return found, time.perf_counter() - started


_Found = tuple[list[Reconstruction], float]
_REMEMBERED: dict[str, tuple[Attack, _Found]] = {}


def remembered(
    attack: Attack, seen: Sequence[Observation], rng: Generator, step: Any = None
) -> _Found:
    """Return what `_timed` does, or what it returned for an equal attack that sees the same.

    It is for the positive control, which is the same in many audits of a process.
    """
    device = next(seen[0].model.parameters()).device
    held = {
        f"{number} {name}": value
        for number, each in enumerate(seen)
        for name, value in {
            **each.gradients,
            "its labels": each.knowledge.labels,
            "its means": each.knowledge.means,
        }.items()
        if value is not None
    }
    told = f"{device} {rng.initial_seed()} {digest(held)}"
    equal, found = _REMEMBERED.get(told, (None, None))
    if found is None or equal != attack:
        found = _timed(attack, seen, rng, step)
        while len(_REMEMBERED) >= MOST_REMEMBERED:
            del _REMEMBERED[next(iter(_REMEMBERED))]
        _REMEMBERED[told] = attack, found
    return found


def experiment_id(settings: Mapping[str, Any]) -> str:
    """Return readable names with a digest of all settings, which decide the result."""
    whole = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()
    return f"{settings['data']}/{settings['model']}/{settings['defense']}/{whole[:12]}"
