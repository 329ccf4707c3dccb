"""The queue: what is done first, what fits into the time, and what happens after a failure."""

import tarfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from typing import Any, ClassVar

import pytest
import torch

from gradveil.core.cell_files import CELL
from gradveil.core.errors import GradveilError
from gradveil.core.locks import held
from gradveil.papers.cells import Audited, Cell, Trained, Training, Workspace
from gradveil.papers.experiments import Entry, Experiment, Size
from gradveil.papers.plan import Plan, estimate, make_parts, make_plan, whole
from gradveil.papers.queue import Clock, Outcome, Worker, run_queue, work_through
from gradveil.papers.records import Records
from gradveil.papers.switches import OURS, Switches
from gradveil.papers.tables import Table, attack_row, compare

UNTRAINED = Training("fashion-mnist-mini", "mlp", epochs=0)


@dataclass(frozen=True)
class Noted(Cell):
    """A cell that notes in a file that it was measured."""

    kind: ClassVar[str] = "noted"

    number: int = 0
    cost: float = 1.0
    fails: bool = False

    @property
    def seconds(self) -> float:
        return self.cost

    def measure(self, workspace: Workspace) -> dict[str, Any]:
        if self.fails:
            raise GradveilError(f"number {self.number} fails")
        workspace.work.mkdir(parents=True, exist_ok=True)
        with (workspace.work / "order").open("a") as file:
            file.write(f"{self.number}\n")
        return {"number": self.number}


@dataclass(frozen=True)
class Given(Experiment):
    """An experiment of given cells."""

    cells: tuple[Cell, ...] = ()

    def entries(self, switches: Switches, size: Size) -> tuple[Entry, ...]:
        return tuple(Entry("row", cell) for cell in self.cells)


def given(name: str, *cells: Cell) -> Given:
    return Given(name, ("paper",), "a claim", "it agrees", cells)


def seeded(seed: int, number: int, cost: float = 1.0, **more: Any) -> Noted:
    """A cell of an untrained model with this seed: another seed is another group."""
    return Noted(replace(UNTRAINED, seed=seed), number, cost, **more)


@dataclass
class Queue:
    """Experiments with their folders."""

    folder: Path

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.folder / "work", self.folder / "no-data", "cpu")

    @property
    def records(self) -> Records:
        return Records((self.folder / "records",))

    def plan(self, *experiments: Experiment) -> Plan:
        parts = make_parts(experiments, {"ours": OURS}, Size(), self.workspace)
        return make_plan(parts, self.records, self.workspace)

    def run(self, plan: Plan, **more: Any) -> Outcome:
        said: list[str] = []
        return run_queue(plan, self.records, self.workspace, say=said.append, **more)

    @property
    def order(self) -> list[int]:
        path = self.workspace.work / "order"
        return [int(line) for line in path.read_text().split()] if path.is_file() else []


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue(tmp_path)


def test_the_cheapest_experiment_is_first_with_all_cells_of_its_models(queue: Queue) -> None:
    shared = seeded(1, 1, 5)
    plan = queue.plan(
        given("dear", seeded(2, 2, 50), seeded(1, 3, 60)), given("cheap", shared, seeded(3, 4, 2))
    )
    assert len(plan.groups) == 3
    outcome = queue.run(plan)
    assert queue.order == [1, 3, 4, 2] or queue.order == [4, 1, 3, 2]
    assert len(outcome.done) == 4 and not outcome.left


def test_what_is_done_is_not_done_again_and_is_found_in_every_folder(queue: Queue) -> None:
    experiment = given("one", seeded(1, 1), seeded(1, 2))
    queue.run(queue.plan(experiment))
    assert queue.order == [1, 2]
    plan = queue.plan(experiment)
    assert not plan.groups and len(plan.done) == 2
    elsewhere = Records((queue.folder / "new", *queue.records.folders))
    assert elsewhere.result(seeded(1, 2)) == {"number": 2}
    assert not Records((queue.folder / "new",)).done(seeded(1, 2))


def test_a_cell_without_its_last_file_is_done_again(queue: Queue) -> None:
    experiment = given("one", seeded(1, 1))
    queue.run(queue.plan(experiment))
    (queue.records.folders[0] / seeded(1, 1).key / CELL).unlink()
    queue.run(queue.plan(experiment))
    assert queue.order == [1, 1]


def test_a_failure_is_told_of_and_the_others_go_on(queue: Queue) -> None:
    said: list[str] = []
    bad = seeded(1, 1, fails=True)
    plan = queue.plan(given("one", bad, seeded(1, 2), seeded(2, 3)))
    outcome = work_through(plan.groups, queue.records, queue.workspace, say=said.append)
    assert sorted(queue.order) == [2, 3]
    assert outcome.failed == {bad.key: "number 1 fails"} and not outcome.left
    assert any(line.startswith(f"failed {bad.key}: number 1") for line in said)
    assert not queue.records.done(bad)


def test_after_an_interrupt_the_same_queue_goes_on(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = given("one", seeded(1, 1), seeded(1, 2), seeded(2, 3))
    plain = Noted.measure

    def interrupted(cell: Noted, workspace: Workspace) -> dict[str, Any]:
        if cell.number == 2:
            raise KeyboardInterrupt
        return plain(cell, workspace)

    monkeypatch.setattr(Noted, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.run(queue.plan(experiment))
    assert not [*queue.workspace.work.rglob(".lock")]
    monkeypatch.setattr(Noted, "measure", plain)
    queue.run(queue.plan(experiment))
    assert sorted(queue.order) == [1, 2, 3]


def test_only_what_is_likely_to_end_in_time_is_started(queue: Queue) -> None:
    long, short = seeded(1, 1, 600), seeded(1, 2, 5)
    outcome = queue.run(queue.plan(given("one", long, short)), minutes=1)
    assert queue.order == [2] and outcome.left == [long.key]


def test_a_group_that_ends_in_time_comes_before_a_part_of_one_that_does_not(queue: Queue) -> None:
    plan = queue.plan(
        given("cheap", seeded(1, 1, 20)), given("dear", seeded(1, 2, 50), seeded(2, 3, 30))
    )
    queue.run(plan, minutes=1)
    assert queue.order == [3, 1, 2] or queue.order == [3, 1]


def test_the_clock_learns_that_a_machine_is_slower_than_the_estimates() -> None:
    clock = Clock(10)
    assert clock.fits(590) and not clock.fits(610)
    clock.learn(10, 30)
    assert clock.pace == 3 and clock.fits(190) and not clock.fits(210)
    clock.learn(1_000, 1)
    assert clock.pace == 1 and Clock(None).fits(1e9)


def test_beside_others_things_are_expected_to_take_longer_until_it_is_measured() -> None:
    clock = Clock(10, at_once=3)
    assert clock.pace == 2 and clock.fits(290) and not clock.fits(310)
    for _ in range(100):
        clock.learn(10, 12)
    assert clock.pace == pytest.approx(1.2, abs=0.1)


@dataclass
class Day:
    """A day of one process in seconds that nobody waits for: its trainings and cells take time."""

    now: float = 0.0
    slower: float = 1.0
    done: list[str] = field(default_factory=list)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def train(self, training: Training, workspace: Workspace) -> None:
        self.now += training.seconds * self.slower
        self.done.append(f"training {training.seed}")
        path = training.checkpoint(workspace)
        assert path is not None
        path.parent.mkdir(parents=True)
        path.touch()

    def measure(self, cell: Noted, workspace: Workspace) -> dict[str, Any]:
        self.now += cell.seconds * self.slower
        self.done.append(f"{cell.number}")
        return {"number": cell.number}


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Day:
    day = Day()
    monkeypatch.setattr("time.monotonic", lambda: day.now)
    monkeypatch.setattr("time.sleep", day.pass_by)
    monkeypatch.setattr(Training, "seconds", 100.0)
    monkeypatch.setattr(Training, "run", lambda training, workspace: day.train(training, workspace))
    monkeypatch.setattr(Noted, "measure", lambda cell, workspace: day.measure(cell, workspace))
    return day


def trained(seed: int, number: int, cost: float) -> Noted:
    """A cell of a model that takes 100 seconds to train: another seed is another model."""
    return Noted(replace(UNTRAINED, epochs=1, seed=seed), number, cost)


def test_cells_of_a_trained_model_come_before_another_training(queue: Queue, day: Day) -> None:
    """Another process trained the second model meanwhile, and these weights may be lost."""
    plan = queue.plan(given("cheap", trained(1, 1, 20)), given("dear", trained(2, 2, 50)))
    day.train(replace(UNTRAINED, epochs=1, seed=2), queue.workspace)
    queue.run(plan)
    assert day.done == ["training 2", "2", "training 1", "1"]


@pytest.mark.parametrize(("minutes", "order"), [(10, "0231"), (5, "01")])
def test_one_of_several_processes_begins_with_the_longest_cell_where_the_group_ends_in_time(
    queue: Queue, day: Day, minutes: float, order: str
) -> None:
    cells = [trained(1, number, cost) for number, cost in enumerate((0, 20, 60, 40))]
    groups = queue.plan(given("one", *cells)).groups
    day.slower = 2
    work_through(groups, queue.records, queue.workspace, minutes=minutes, at_once=3)
    assert day.done == ["training 1", *order]


def test_no_cell_is_begun_that_does_not_end_in_time(queue: Queue, day: Day) -> None:
    cells = [trained(1, number, cost) for number, cost in enumerate((90, 20, 60, 40))]
    queue.run(queue.plan(given("one", *cells)), minutes=4)
    assert day.done == ["training 1", "1", "3", "2"] and day.now == 220


def test_a_training_that_leaves_no_time_for_a_cell_is_not_begun(queue: Queue, day: Day) -> None:
    queue.run(queue.plan(given("one", trained(1, 1, 30))), minutes=2)
    assert not day.done
    queue.run(queue.plan(given("one", trained(1, 1, 20))), minutes=2)
    assert day.done == ["training 1", "1"]


def test_what_is_too_long_for_one_process_is_begun_by_three(queue: Queue, day: Day) -> None:
    one = given("one model", *(trained(1, number, 90) for number in range(20)))
    many = given("many models", *(seeded(number, number, 1000) for number in range(20, 23)))
    plan = queue.plan(one, many)
    for at_once in (1, 3):
        day.now, day.done = 0.0, []
        rmtree(queue.folder)
        work_through(plan.groups, queue.records, queue.workspace, minutes=25, at_once=at_once)
        assert (day.done[0] == "training 1") == (at_once == 3)


@dataclass(frozen=True)
class Begun(Noted):
    """A cell of which little is left, as an earlier run may have left it."""

    kind: ClassVar[str] = "begun"

    def left(self, workspace: Workspace) -> float:
        return 1.0


def test_what_is_left_of_a_cell_decides_whether_it_ends_in_time(queue: Queue) -> None:
    long, begun = seeded(1, 1, 600), Begun(replace(UNTRAINED, seed=2), 2, 600)
    plan = queue.plan(given("one", long, begun))
    assert plan.seconds(queue.workspace) == estimate([long, begun], queue.workspace) == 601
    outcome = queue.run(plan, minutes=1)
    assert queue.order == [2] and outcome.left == [long.key]


def test_the_clock_learns_nothing_from_a_cell_that_an_earlier_run_began(queue: Queue) -> None:
    begun, new = seeded(1, 1, 1e6), seeded(1, 2, 1e6)
    queue.workspace.folder(begun).mkdir(parents=True)
    said: list[str] = []
    work_through(
        queue.plan(given("one", begun, new)).groups, queue.records, queue.workspace, say=said.append
    )
    assert said == [
        f"done {begun.key} in 0 s more, begun by an earlier run",
        f"done {new.key} in 0 s, estimated 1000000 s",
    ]


def test_a_cell_that_another_process_does_is_left_to_it(queue: Queue) -> None:
    plan = queue.plan(given("one", seeded(1, 1), seeded(1, 2)))
    with held(queue.workspace.work / "held" / seeded(1, 1).key, lambda _: None):
        outcome = queue.run(plan)
    assert queue.order == [2] and outcome.left == [seeded(1, 1).key]


def test_a_model_that_another_process_trains_is_waited_for_at_the_end(queue: Queue) -> None:
    training = Training("fashion-mnist-mini", "mlp", epochs=1)
    plan = queue.plan(given("one", Noted(training, 1), seeded(2, 2, 100)))
    path = training.checkpoint(queue.workspace)
    assert path is not None
    begun = threading.Event()

    def train() -> None:
        with held(queue.workspace.work / "held" / training.key, lambda _: None):
            begun.set()
            while queue.order != [2]:
                time.sleep(0.01)
            path.parent.mkdir(parents=True)
            path.touch()

    other = threading.Thread(target=train, daemon=True)
    other.start()
    assert begun.wait(10)
    outcome = queue.run(plan)
    other.join()
    assert queue.order == [2, 1] and not outcome.left


def test_a_model_that_another_process_has_nearly_trained_is_waited_for(
    queue: Queue, day: Day, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its training would take longer than the time that is left."""
    cell = trained(1, 1, 20)
    plan = queue.plan(given("one", cell))
    other = ExitStack()
    other.enter_context(held(queue.workspace.work / "held" / cell.training.key, lambda _: None))

    def sleep(seconds: float) -> None:
        day.now += seconds
        if day.now == 20:
            day.train(cell.training, queue.workspace)
            other.close()

    monkeypatch.setattr("time.sleep", sleep)
    day.slower = 0.1  # and so the rest of the training takes 10 s
    outcome = queue.run(plan, minutes=1)
    assert day.done == ["training 1", "1"] and not outcome.left


def test_a_model_that_another_process_trains_is_not_waited_for_beyond_the_time(
    queue: Queue, day: Day
) -> None:
    cell = trained(1, 1, 20)
    with held(queue.workspace.work / "held" / cell.training.key, lambda _: None):
        outcome = queue.run(queue.plan(given("one", cell)), minutes=1)
    assert 40 <= day.now < 42 and outcome.left == [cell.key]


def test_a_training_that_ends_without_weights_fails(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a step may be lost where the last ones are not; nothing is trained then."""
    times: list[Training] = []

    def run(training: Training, _: Workspace) -> None:
        times.append(training)
        assert len(times) == 1

    monkeypatch.setattr(Training, "run", run)
    cell = trained(1, 1, 20)
    outcome = queue.run(queue.plan(given("one", cell, seeded(2, 2))))
    assert len(times) == 1 and outcome.done == [seeded(2, 2).key]
    assert "is not there although its training has ended" in outcome.failed[cell.key]


def test_several_processes_have_nothing_to_do_where_all_is_done(queue: Queue) -> None:
    outcome = queue.run(queue.plan(), at_once=2)
    assert not outcome.done and not outcome.left


def test_a_cell_that_failed_is_tried_again_by_the_next_run_alone(queue: Queue) -> None:
    bad = seeded(1, 1, fails=True)
    for _ in range(2):
        said: list[str] = []
        run_queue(queue.plan(given("one", bad)), queue.records, queue.workspace, say=said.append)
        assert len(said) == 1 and said[0].startswith(f"failed {bad.key}")


def test_the_archive_holds_all_records_after_each_cell(queue: Queue) -> None:
    path = queue.folder / "records.tar.gz"
    queue.run(queue.plan(given("one", seeded(1, 1), seeded(1, 2))), archive=path)
    with tarfile.open(path) as file:
        names = file.getnames()
    assert sorted(name for name in names if name.endswith(CELL)) == sorted(
        f"{seeded(1, number).key}/{CELL}" for number in (1, 2)
    )


def test_what_a_killed_run_left_behind_is_put_right(queue: Queue) -> None:
    """Killed just after the last record: locks, files half written, and an older archive."""
    path, experiment = queue.folder / "records.tar.gz", given("one", seeded(1, 1))
    queue.run(queue.plan(experiment))
    locked = [queue.workspace.work / "held" / name for name in ("a", "archive")]
    training = replace(UNTRAINED, epochs=1)
    weights = queue.workspace.weights(training)
    for folder in (*locked, weights):
        folder.mkdir(parents=True)
        (folder / ".lock").touch()
    for name in ("resume.ckpt", "model.safetensors"):
        (weights / name).touch()
    left = queue.folder / ".records.tar.gz.abc.part"
    left.touch()
    outcome = queue.run(queue.plan(experiment), archive=path)
    assert not outcome.done and path.is_file() and not left.exists()
    assert [each.name for each in weights.iterdir()] == ["model.safetensors"]
    assert not [*queue.folder.rglob(".lock")]


def test_a_cell_that_is_done_again_leaves_no_file_half_written(queue: Queue) -> None:
    cell = seeded(1, 1)
    left = queue.records.folders[0] / cell.key / ".cell.json.abc.part"
    left.parent.mkdir(parents=True)
    left.touch()
    queue.run(queue.plan(given("one", cell)))
    assert [path.name for path in left.parent.iterdir()] == [CELL]


@pytest.mark.parametrize("place", ["work/weights", "records"])
def test_a_link_out_of_the_folders_is_refused(queue: Queue, place: str) -> None:
    (queue.folder / "elsewhere").mkdir()
    (queue.folder / place).mkdir(parents=True)
    (queue.folder / place / "x").symlink_to(queue.folder / "elsewhere")
    with pytest.raises(GradveilError, match=r"x is a link to .*elsewhere"):
        queue.run(queue.plan(given("one", seeded(1, 1))))
    assert not queue.order


def test_cells_of_data_that_is_not_there_are_left_out(queue: Queue) -> None:
    absent = Noted(Training("cifar10", "mlp", epochs=0), 1)
    plan = queue.plan(given("one", absent, seeded(1, 2)))
    assert plan.absent == {absent.key}
    assert [cell.key for group in plan.groups for cell in group.cells] == [seeded(1, 2).key]


def test_a_training_counts_once_and_only_while_its_weights_are_absent(queue: Queue) -> None:
    training = Training("fashion-mnist-mini", "mlp", epochs=1)
    cells = [Noted(training, 1, 2), Noted(training, 2, 3)]
    assert estimate(cells, queue.workspace) == pytest.approx(5 + training.seconds)
    path = training.checkpoint(queue.workspace)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.touch()
    assert estimate(cells, queue.workspace) == 5
    assert whole(cells) == pytest.approx(5 + training.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"at_once": 2}, {"engine": "ray"}])
def test_processes_side_by_side_share_the_queue(queue: Queue, how: dict[str, Any]) -> None:
    training = replace(UNTRAINED, model="lenet")
    cells = [
        Audited(
            replace(training, seed=seed), attack="class-mean", images=1, steps=1, controls=False
        )
        for seed in (1, 2)
    ]
    bad = replace(cells[0], attack="closed-form")  # which takes no steps
    plan = queue.plan(given("one", *cells, bad))
    outcome = queue.run(plan, **how)
    assert sorted(outcome.done) == sorted(cell.key for cell in cells) and not outcome.left
    assert list(outcome.failed) == [bad.key] and "steps 1" in outcome.failed[bad.key]


def test_the_minutes_begin_before_the_process_that_works(queue: Queue) -> None:
    plan = queue.plan(given("one", seeded(1, 1, 20), seeded(1, 2, 5)))
    Worker(plan.groups, queue.records, queue.workspace, 1.0, None, began=time.time() - 50)()
    assert queue.order == [2]


def test_a_gpu_that_is_lost_ends_the_process_before_all_other_cells_fail(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    bad = seeded(1, 1, fails=True)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        queue.run(queue.plan(given("one", bad, seeded(1, 2))))
    notes = [path.stem for path in (queue.workspace.work / "failed").iterdir()]
    assert notes == [bad.key] and not queue.order


def test_processes_side_by_side_share_the_processors(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int | None] = []

    class Process:
        exitcode = 0

        def __init__(self, target: Worker, daemon: bool) -> None:
            threads.append(target.threads)

        def start(self) -> None: ...

        def join(self) -> None: ...

        def is_alive(self) -> bool:
            return False

    context = type("Context", (), {"Process": Process})
    monkeypatch.setattr("multiprocessing.get_context", lambda _: context)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    cells = [seeded(number, number) for number in range(1, 4)]
    queue.run(queue.plan(given("one", *cells)), at_once=3)
    assert threads == [5, 5, 5]


def test_no_process_at_all_is_refused(queue: Queue) -> None:
    with pytest.raises(GradveilError, match="at once 0"):
        queue.run(queue.plan(), at_once=0)


def test_a_training_and_an_audit_go_through_the_queue_into_a_table(queue: Queue) -> None:
    training = Training(
        "fashion-mnist-mini", "mlp", epochs=1, lr=0.01, fraction=0.05, augment=False
    )
    audited = Audited(training, attack="closed-form", images=4, controls=False, grid=True)
    cells = [Trained(training), audited]
    plan = queue.plan(given("one", *cells))
    outcome = queue.run(plan)
    assert len(outcome.done) == 2, outcome.failed
    target = queue.records.folders[0] / audited.key
    kept = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert kept == {
        *("cell.json", "grid.png", "settings.json"),
        *(f"none/{name}" for name in ("settings.json", "model.json", "records.jsonl.gz")),
    }
    assert str(queue.folder) not in (target / "settings.json").read_text()
    row = attack_row(plan.parts[0].entries, queue.records, "closed-form")
    assert row is not None and row.n == 4 and row.psnr.mean is not None and row.psnr.mean > 40
    facts = queue.records.facts(cells[0])
    assert facts is not None and facts["device"] == "cpu" and facts["seconds"] >= 0
    assert len(facts["result"]["history"]) == 1 and facts["result"]["test_images"] == 500
    _check_tables(compare({"ours": plan.parts[0]}, queue.records), facts["result"]["accuracy"])


def test_a_cell_that_was_begun_with_weights_that_were_lost_is_begun_anew(queue: Queue) -> None:
    training = Training(
        "fashion-mnist-mini", "mlp", epochs=1, lr=0.01, fraction=0.05, augment=False
    )
    cell = Audited(training, attack="closed-form", images=2, controls=False)
    plan = queue.plan(given("one", cell))
    assert queue.run(plan).done
    rmtree(queue.records.folders[0])
    rmtree(queue.workspace.weights(training))
    replace(training, seed=1).run(queue.workspace)
    queue.workspace.weights(replace(training, seed=1)).rename(queue.workspace.weights(training))
    said: list[str] = []
    outcome = run_queue(plan, queue.records, queue.workspace, say=said.append)
    assert outcome.done == [cell.key] and not outcome.failed
    assert said[0] == f"begun anew: {cell.key}, whose model was trained again"


def _check_tables(found: Sequence[Table], accuracy: float) -> None:
    right, lineups = found
    assert right.head == ["case", "accuracy %, ours as it should be"]
    assert right.body == [["row", f"{100 * accuracy:.1f}"]]
    (cells,) = (dict(zip(lineups.head, row, strict=True)) for row in lineups.body)
    assert (cells["case"], cells["attack"]) == ("row", "closed-form")
    assert "; chance " in lineups.title and not {"chance", "n"} & {*cells}  # the ranks have n
    assert cells["rank 1 (95%)"].startswith("4/4 (")
    assert not any("originals" in name or name == "way" for name in lineups.head)
