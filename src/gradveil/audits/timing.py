"""How long an audit takes, from timed iterations on this machine; and one fitted to a budget.

The cost of an attack is measured once, on the first case that has it: seconds for an iteration of
an image. Where the iterations of all attacks would take longer than the budget, each attack makes
the same share of its own.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from gradveil.attacks import Attack, GradientMatching
from gradveil.audits.job import AuditJob, shortened, shorter
from gradveil.audits.stage import Stage, run_attack
from gradveil.core.errors import GradveilError
from gradveil.core.progress import LONG, Bar
from gradveil.core.seeds import generator

VICTIMS = 4  # timed on a CPU where one is slow, so that others beside it cost as much again
SLOW = 1.0  # seconds of a trial, an iteration of one victim, from which on it is slow
RUNS = 2  # of each length, the shorter of which counts: a busy machine makes them longer only
FEWER = (1_000, 500, 200, 100, 50)  # iterations that a shorter audit is suggested with
BUDGETS = (240, 60, 20, 5)  # minutes, likewise
MUCH = 3  # times shorter that a suggestion must be
LONGEST = 4_800  # iterations of the longest attack of `auto`
LEAST_STEPS, MOST_STEPS = 2, 20  # timed, after one that does not count
AGAIN = 0.5  # an update that is made again beside an iteration, which differentiates it too
LEAST_SHARE = 0.25  # of a budget that attacks have, however long the ceilings take
SURE = 3  # iterations of an attack, after the first, from which on they tell what the rest takes
OFTEN = 0.2  # seconds after which the time left is reckoned anew
ENOUGH = 0.5  # seconds that they shall take, so that the clock and other programs matter little


class TooFewMinutesError(GradveilError):
    """A budget in which not every attack can make one iteration; `least` is one that is enough."""

    def __init__(self, minutes: float, least: float) -> None:
        super().__init__(
            f"budget {minutes:g}: these minutes are too few for one iteration of every attack; "
            f"give at least {_rounded_up(least)}, fewer images or fewer attacks"
        )
        self.least = least


def work(attack: Attack, images: int) -> float:
    """Return iterations times images, heats and restarts included."""
    restarts, steps = getattr(attack, "restarts", 1), getattr(attack, "steps", 1)
    if isinstance(attack, GradientMatching):
        return float(attack.race.work(restarts, steps) * images)
    return float(restarts * steps * images)


@dataclass
class Costs:
    """Seconds for an iteration of an image, by the kind of the stage and the attack's name.

    An attack without iterations is taken to cost nothing.
    """

    seconds: dict[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def of(cls, stages: Iterable[Stage], known: Mapping[tuple[str, str], float]) -> "Costs":
        """Take the costs from the trials, or measure them where the audit is long.

        Those that are `known` are neither taken nor measured again.
        """
        stages, found = list(stages), cls(dict(known))
        if all(_tried(stage) for stage in stages):
            for stage in stages:
                found._take_trials(stage)
            if found.total(stages) < LONG:
                return found
        found = cls(dict(known))
        for stage in stages:
            for name, attack in stage.attacks.items():
                if (stage.kind, name) not in found.seconds:
                    found.seconds[stage.kind, name] = time_iteration(stage, name, attack)
        return found

    def _take_trials(self, stage: Stage) -> None:
        """Take a trial's time, which is too long: it has what is done but once."""
        for name, attack in stage.attacks.items():
            once = work(shortened(attack), stage.batch_size)
            self.seconds.setdefault((stage.kind, name), stage.trials.get(name, 0.0) / once)

    def learn(self, kind: str, name: str, attack: Attack, images: int, seconds: float) -> None:
        """Take over what an attack on so many images took."""
        if isinstance(attack, GradientMatching):
            self.seconds[kind, name] = seconds / work(attack, images)

    def __call__(self, kind: str, name: str, attack: Attack, images: int) -> float:
        """Return the seconds of an attack on so many images."""
        return self.seconds.get((kind, name), 0.0) * work(attack, images)

    def total(self, stages: Iterable[Stage]) -> float:
        """Return the seconds of all attacks, shams and ceilings."""
        return sum(
            sum(self._each(stage)) + self.sham(stage) + self.ceiling(stage) for stage in stages
        )

    def ceiling(self, stage: Stage) -> float:
        """Return the seconds of the gradient line-up where a candidate takes a whole update.

        So it is after local steps and in train mode: each image of an update is replaced by each
        candidate, and the update made again. Elsewhere a candidate is one gradient, which is
        nothing beside an attack.
        """
        protocol, lineups = stage.client.protocol, stage.victims.lineups
        whole = protocol.moves(stage.batch_size) or protocol.train_mode
        known = [self.seconds.get((stage.kind, name), 0.0) for name in stage.attacks]
        if not whole or lineups is None or not stage.closing or not any(known):
            return 0.0
        first = sum(len(victim) for victim in stage.first_victims)
        each = AGAIN * min(cost for cost in known if cost)
        return each * first * lineups.candidates.shape[1] * stage.batch_size

    def sham(self, stage: Stage) -> float:
        """Return the seconds of the sham, were it that of the longest attack."""
        if not stage.sham or not stage.closing:
            return 0.0
        first = sum(len(victim) for victim in stage.first_victims)
        return max(self._each(stage), default=0.0) * first / _images(stage)

    def _each(self, stage: Stage) -> list[float]:
        images = _images(stage)
        return [self(stage.kind, name, attack, images) for name, attack in stage.attacks.items()]

    def cheaper(self, job: AuditJob, total: float) -> dict[str, float]:
        """Return options that shorten an audit of so many seconds, with what they shorten it to."""
        found = {}
        steps = {attack.steps for attack in job.attacks.values() if hasattr(attack, "steps")}
        longest = job.steps or max(steps, default=LONGEST if job.auto else 0)
        fewer = next((s for s in FEWER if s * MUCH <= longest), None)
        if fewer is not None and job.budget is None:
            found[f"--steps {fewer}"] = total * fewer / longest
        minutes = next((m for m in BUDGETS if 60 * m * MUCH <= total), None)
        if minutes is not None and job.budget is None:
            found[f"--budget {minutes}"] = 60.0 * minutes
        return found

    def fit(self, stages: Iterable[Stage], minutes: float) -> float:
        """Return the share of their iterations that all attacks can make in the budget.

        Each makes one iteration at least. What that takes beyond the share of those with the
        fewest, the others go without.
        """
        stages = list(stages)
        fixed, given = sum(map(self.ceiling, stages)), 60 * minutes
        given = max(given - fixed, LEAST_SHARE * given)
        searches = sorted(search for stage in stages for search in self._searches(stage))
        whole, once = sum(each.whole for each in searches), sum(each.once for each in searches)
        if whole <= given:
            return 1.0
        if once > given:
            raise TooFewMinutesError(minutes, self.least(stages))
        share = given / whole
        for each in searches:
            if share * each.steps >= 1:
                break
            given, whole = given - each.once, whole - each.whole
            share = min(share, given / whole) if whole > 0 else share
        return share

    def least(self, stages: Iterable[Stage]) -> float:
        """Return the minutes of the smallest budget in which each attack makes an iteration."""
        stages = list(stages)
        fixed = sum(map(self.ceiling, stages))
        once = sum(search.once for stage in stages for search in self._searches(stage))
        return min(once + fixed, once / LEAST_SHARE) / 60

    def _searches(self, stage: Stage) -> list["_Search"]:
        """Return what each attack takes, those that take no time left out, and the sham."""
        images, found = _images(stage), list[_Search]()
        for name, attack in stage.attacks.items():
            least = shorter({name: attack}, 0.0)[name]
            whole, once = (self(stage.kind, name, some, images) for some in (attack, least))
            steps = attack.steps if isinstance(attack, GradientMatching) else 1
            found += [_Search(steps, whole, once)] if whole else []
        longest = max(found, key=lambda each: each.whole, default=None)
        if longest is not None and (sham := self.sham(stage)):
            found.append(_Search(longest.steps, sham, sham * longest.once / longest.whole))
        return found


class Clock:
    """The bar of an audit: what is over by the clock, and what is left by what things cost.

    `left` returns the seconds of all that is not done yet; they change as costs are learned, which
    matters where iterations grow slower on the way, as those of L-BFGS do.
    """

    def __init__(self, bar: Bar, left: Callable[[], float]) -> None:
        self.bar, self._left = bar, left
        self._began = self._shown = 0.0
        self._total = 0.0

    def start(self) -> None:
        """Show the bar, where anything is left."""
        self._began, self._total = time.perf_counter(), self._left()
        self.bar.start("audit", self._total)
        self.bar.update(left=self._total)

    def step(self, within: float) -> None:
        """Move the bar now and then; of what is not done yet, so many seconds are over."""
        if self.bar.shown and time.perf_counter() - self._shown >= OFTEN:
            self.show(within)
        else:
            self.bar.update()  # it ends here after a signal

    def show(self, within: float = 0.0) -> None:
        """Move the bar at once."""
        self._shown = time.perf_counter()
        over, left = self._shown - self._began, max(self._left() - within, 0.0)
        self.bar.update(self._total * over / max(over + left, 1e-9), left=left)


class Pace:
    """The seconds of an attack that runs, as its progress tells them."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._times: list[float] = []

    @property
    def over(self) -> float:
        """The seconds since it began."""
        return time.perf_counter() - self._began

    def whole(self, done: int, of: int) -> float | None:
        """Return the seconds of all iterations, by the last quarter of those done; None so far."""
        self._times.append(self.over)
        few = max(SURE, len(self._times) // 4)
        if len(self._times) <= few:
            return None
        last = self._times[-1]
        return last + (of - done) * (last - self._times[-1 - few]) / few


class _Search(NamedTuple):
    """The iterations of an attack, the seconds of all of them, and those of a single one."""

    steps: int
    whole: float
    once: float


def _rounded_up(minutes: float) -> str:
    """Write minutes with two digits, none of which is too small."""
    digit = 10.0 ** (math.floor(math.log10(minutes)) - 1)
    return f"{math.ceil(minutes / digit) * digit:.2g}"


def _images(stage: Stage) -> int:
    return sum(len(victim) for chunk in stage.chunks for victim in chunk)


def _tried(stage: Stage) -> bool:
    """Whether there was a trial; an easy model costs so little that it needs none."""
    return stage.kind != "attack" or bool(stage.trials)


def time_iteration(stage: Stage, name: str, attack: Attack) -> float:
    """Return the seconds of an iteration of an image, by the difference of two short runs."""
    if not isinstance(attack, GradientMatching):
        return 0.0
    on_gpu = next(stage.client.model.parameters()).is_cuda
    # A call has a cost of its own: with a small model 4 victims take more than a quarter of 16's.
    slow = not on_gpu and stage.trials.get(name, 0.0) > SLOW
    few = stage.chunks[0][:VICTIMS] if slow else stage.chunks[0]
    seen = stage.seen_by(attack, stage.share(few))
    if not seen:
        return 0.0
    single = replace(attack, race=type(attack.race)(), frames=0)

    def seconds(steps: int) -> float:
        runs = []
        for _ in range(RUNS):
            began = time.perf_counter()
            run_attack(replace(single, steps=steps), seen, generator(stage.seed, "timing", name))
            if on_gpu:
                torch.cuda.synchronize()
            runs.append(time.perf_counter() - began)
        return min(runs)

    first = seconds(1)
    more = min(MOST_STEPS, max(LEAST_STEPS, math.ceil(ENOUGH / max(first, 1e-3))))
    longer = seconds(1 + more)
    each = (longer - first) / more if longer > first else longer / (1 + more)
    return each / (attack.restarts * sum(one.size for one in seen))
