"""The experiments: complete, with published figures, and made of cells that they share."""

import json
import statistics
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.core.cell_files import FORMAT
from gradveil.core.errors import GradveilError
from gradveil.core.importing import import_named
from gradveil.core.types import Protocol
from gradveil.data.cifar import CIFAR10
from gradveil.defenses import parse
from gradveil.models import build
from gradveil.papers.catalog import ALIASES, EXPERIMENTS, find_experiments
from gradveil.papers.cells import Audited, Trained, Workspace, keep_file
from gradveil.papers.costs import iteration_seconds
from gradveil.papers.experiments import HYBRID, NONE, Entry, Experiment, Size
from gradveil.papers.networks import with_constants
from gradveil.papers.plan import make_parts
from gradveil.papers.precode import GRID
from gradveil.papers.published import SOURCES, figure, published, table_rows
from gradveil.papers.records import Records
from gradveil.papers.searched import Searched
from gradveil.papers.switches import AS_PUBLISHED, CHOICES, OURS, VARIANTS, Switches, switched
from gradveil.papers.tables import compare
from gradveil.papers.tuned import WORK, TunedAttack
from gradveil.search.services import JOURNAL
from gradveil.search.space import POLICIES
from gradveil.search.study import Study

WHOLE = Size()
SECTION_8 = [*(f"exp{number}" for number in range(1, 11)), "ext1", "ext2"]


def entries(experiment: Experiment, switches: Switches = OURS) -> tuple[Entry, ...]:
    return experiment.entries(switches, WHOLE)


def cell(experiment: str, row: str, switches: Switches = OURS, attack: str = "adam-cosine") -> Any:
    """The audit of a row by an attack."""
    (found,) = [
        entry.cell
        for entry in entries(EXPERIMENTS[experiment], switches)
        if entry.row == row and isinstance(entry.cell, Audited) and entry.cell.attack == attack
    ]
    return found


def test_every_experiment_of_the_documents_has_a_name() -> None:
    assert {*SECTION_8} <= {*EXPERIMENTS, *ALIASES}
    assert {"precode-acc", "precode-rec", "precode-grid"} <= {*EXPERIMENTS}
    found = find_experiments(["exp6", "table4a"])
    assert [each.id for each in found] == ["table4a", "table4b"]
    with pytest.raises(GradveilError, match=r"unknown experiment 'table9': choose from exp1"):
        find_experiments(["table9"])


def test_every_published_row_is_measured_in_both_ways() -> None:
    tables = [each for each in EXPERIMENTS.values() if each.table is not None]
    assert {each.table for each in tables} == {*published()["tables"]}
    for experiment in tables:
        assert experiment.table is not None
        rows = table_rows(experiment.table)
        measured = {entry.row for entry in entries(experiment, AS_PUBLISHED)}
        assert {*rows} <= measured <= {*rows, NONE}
        assert {entry.row for entry in entries(experiment)} <= {*rows, NONE}
        for row, sources in rows.items():
            assert {*sources} <= {*SOURCES}
            assert figure(experiment.table, row, "replication", "psnr") is not None


def test_experiments_share_the_cells_that_are_the_same() -> None:
    for switches in (OURS, AS_PUBLISHED):
        hybrid = cell("table1a", "3-1-7+43-18-18", switches)
        assert cell("table-defenses", "3-1-7+43-18-18", switches) == hybrid
        assert cell("table1c", "none", switches) == cell("table4a", "none", switches)
        pictures = {entry.cell for entry in entries(EXPERIMENTS["exp2"], switches)}
        assert hybrid in pictures
    assert cell("table2", "adam-cosine, none") == cell("table1a", "none")
    trained = {entry.cell.key for entry in entries(EXPERIMENTS["table1a"])}
    assert {entry.cell.key for entry in entries(EXPERIMENTS["exp7"])} <= trained


def test_a_key_tells_cells_apart_by_every_setting() -> None:
    one = cell("table1a", "none")
    assert replace(one).key == one.key
    assert one.key.startswith("audit-cifar100-resnet20-4-policy-none-adam-cosine-")
    for name, value in {"images": 7, "first": True, "clean": True, "steps": 3, "seed": 1}.items():
        assert replace(one, **{name: value}).key != one.key
    training = one.training
    others = (
        replace(training, epochs=200),
        replace(training, loss_scale=0.5),
        replace(training, augment=False),
        replace(training, seed=1),
    )
    assert all(replace(one, training=other).key != one.key for other in others)


@pytest.mark.parametrize(
    ("name", "value"), [(name, some) for name, values in CHOICES.items() for some in values[1:]]
)
def test_each_switch_changes_cells(name: str, value: str) -> None:
    changed = switched(OURS, [f"{name}={value}"])
    assert changed.changed == {name: value}
    ours, others = (
        {entry.cell.key for each in EXPERIMENTS.values() for entry in entries(each, switches)}
        for switches in (OURS, changed)
    )
    assert others - ours


def test_as_published_a_model_of_cifar100_has_the_papers_defects() -> None:
    found = cell("table-defenses", "prune:0.95", AS_PUBLISHED)
    assert found.training.loss_scale == 0.5 and found.training.constants == "cifar10"
    assert found.clean and found.first and str(found.defense) == "prune:0.95"
    ours = cell("table-defenses", "prune:0.95")
    assert not ours.clean and not ours.first
    assert str(ours.defense) == "policy:none,then,prune:0.95"
    assert str(cell("table1a", "none").defense) == "policy:none"
    assert str(cell("table1a", "none", AS_PUBLISHED).defense) == "none"
    assert str(cell("table1a", "random", AS_PUBLISHED).defense) == "19-1-18"
    assert cell("table1c", "none", AS_PUBLISHED).training.image_size == 32


def test_the_mean_over_random_policies_trains_ten_models() -> None:
    found = [
        entry.cell.training
        for entry in entries(EXPERIMENTS["table1a"], switched(OURS, ["random=mean"]))
        if entry.row == "random" and isinstance(entry.cell, Trained)
    ]
    assert len({training.key for training in found}) == 10


def test_a_switch_that_is_none_is_refused_with_the_choices() -> None:
    with pytest.raises(GradveilError, match="unknown switch 'lose': choose from loss"):
        switched(OURS, ["lose=halved"])
    with pytest.raises(GradveilError, match="'third': choose from whole, halved"):
        switched(OURS, ["loss=third"])
    with pytest.raises(GradveilError, match="write NAME=VALUE"):
        switched(OURS, ["loss"])
    assert {name.replace("-", "_") for name in CHOICES} == {each.name for each in fields(Switches)}
    assert switched(AS_PUBLISHED, []) == VARIANTS["published"]


@pytest.mark.parametrize("model", ["resnet20-4", "convnet", "convnet-9", "lenet"])
def test_a_network_with_other_constants_starts_from_the_same_weights(model: str) -> None:
    make = partial(build, channels=3, size=32, classes=4)
    plain = make(model, mean=(0.5,) * 3, std=(0.2,) * 3).state_dict()
    other = make(with_constants(model, "cifar10")).state_dict()
    assert other["normalize.mean"].flatten().tolist() == pytest.approx(CIFAR10.mean)
    assert other["normalize.std"].flatten().tolist() == pytest.approx(CIFAR10.std)
    weights = [name for name in plain if not name.startswith("normalize")]
    assert weights and all(torch.equal(plain[name], other[name]) for name in weights)


def test_every_position_of_precodes_grid_exists() -> None:
    model = build("mlp", channels=3, size=8, classes=4)
    for defense in GRID.values():
        assert defense.protect_model(model, (3, 8, 8)) is not model


def test_a_quick_cell_is_small_and_on_the_data_there_is(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, tmp_path / "no-data")
    found = cell("table1a", "none").quick(workspace)
    assert found.training.data == "fashion-mnist-mini" and found.training.model == "lenet"
    assert found.images == 4 and found.steps == 5 and found.training.epochs == 1
    assert found.key != cell("table1a", "none").key


def test_the_number_of_images_and_seeds_can_be_chosen() -> None:
    assert cell("table1a", "none").images == 64
    assert cell("table1a", "none", AS_PUBLISHED).images == 32
    experiment = EXPERIMENTS["table1b"]
    found = [entry.cell for entry in experiment.entries(OURS, Size(images=7, seeds=2))]
    assert {each.images for each in found if isinstance(each, Audited)} == {7}
    assert {each.training.seed for each in found} == {0, 1}
    with pytest.raises(GradveilError, match="images 0: it must be from 1 to 10,000"):
        Size(images=0)


def test_the_stages_of_a_training_share_its_weights_and_the_end_is_the_table_of_policies() -> None:
    every = entries(EXPERIMENTS["over-training"], OURS)
    early = [entry.cell.training for entry in every if entry.cell.training.at is not None]
    assert {training.at for training in early} == {0, 1, 10, 50, 500}
    assert len({training.key for training in early}) == 4  # none and hybrid, two seeds
    assert all(training.job().save_at == (0, 1, 10, 50, 500) for training in early)
    ends = {entry.cell.key for entry in every if entry.row in ("none, end", f"{HYBRID}, end")}
    assert ends <= {entry.cell.key for entry in entries(EXPERIMENTS["table1a"], OURS)}
    assert len({entry.cell.key for entry in every}) == len(every)


def test_policies_of_the_strongest_attack_are_spread_over_the_scores_of_the_study() -> None:
    path = (
        Path(__file__).parents[2] / "benchmarks/results/scores/resnet20-4-semi-trained-h200.jsonl"
    )
    scores: dict[str, float] = {}
    for line in path.read_text().splitlines()[1:]:
        record = json.loads(line)
        if record["kind"] == "privacy":
            scores[record["policy"]] = statistics.mean(record["privacy"])
    order = sorted(scores, key=lambda policy: scores[policy])
    found = [entry.row for entry in entries(EXPERIMENTS["raced-policies"])]
    assert found == [order[number] for number in range(0, 50, 7)]


def test_larger_pictures_are_attacked_on_a_network_that_is_not_built_in() -> None:
    for row, each in entries(EXPERIMENTS["larger"]):
        assert isinstance(each, Audited)
        job = each.job(Workspace(Path("work")))
        assert (job.data, job.images, row == "trained") == (
            "tiny-imagenet",
            16,
            each.training.epochs == 60,
        )
        make: Any = import_named(str(job.model), "model")
        network = make(channels=3, classes=200)
        assert network(torch.zeros(2, 3, 64, 64)).shape == (2, 200)
        assert sum(p.numel() for p in network.parameters()) == 11_279_112


def test_every_breaker_that_a_defense_declares_attacks_it() -> None:
    attacks: dict[str, list[str]] = {}
    for row, each in entries(EXPERIMENTS["breakers"]):
        assert isinstance(each, Audited) and each.training.epochs == 0
        attacks.setdefault(row, []).append(each.attack)
        assert row == f"{each.training.model}, {each.defense}"
    for row, found in attacks.items():
        model, defense = row.split(", ")
        wanted = {"adam-cosine", *parse(defense).breakers, *(["closed-form"] * (model == "mlp"))}
        assert {*found} == wanted


def test_clients_are_attacked_with_their_batches_local_steps_and_mode() -> None:
    found = [
        (entry.row, entry.cell)
        for entry in entries(EXPERIMENTS["clients"], OURS)
        if isinstance(entry.cell, Audited)
    ]
    assert "untrained, batch 1, 1 step, train mode" not in dict(found)
    single = [cell.attack for row, cell in found if row == "trained, batch 1, 1 step, eval mode"]
    busy = [cell for row, cell in found if row == "trained, batch 8, 4 steps, train mode"]
    assert single == ["adam-cosine", "raced"]
    assert [cell.attack for cell in busy] == [*single, "dense-matching"]
    for cell in busy:
        assert (cell.batch_size, cell.images) == (8, 64)
        assert cell.protocol == Protocol(local_steps=4, train_mode=True)
    plain, raced, matched = (cell.seconds for cell in busy)
    assert matched < plain < raced  # no gradient of four steps is made


def test_cells_of_clients_took_no_longer_than_sharing_a_gpu_explains() -> None:
    """Three processes shared it; what one began with is compiled, so it may take longer still."""
    kept = Records((Path(__file__).parents[2] / "benchmarks/results/reproduce",))
    ratios = {
        entry.row: facts["seconds"] / entry.cell.seconds
        for entry in entries(EXPERIMENTS["clients"], OURS)
        if (facts := kept.facts(entry.cell)) is not None and "8, 4 steps" in entry.row
    }
    assert ratios and all(0.5 < ratio < 3.5 for ratio in ratios.values()), ratios


def test_larger_images_take_longer_by_their_pixels_but_for_the_iteration_itself() -> None:
    small, large = (iteration_seconds(64, "resnet20-4", scale) for scale in (1, 4))
    assert small < large < 4 * small
    assert iteration_seconds(0, "resnet20-4", 4) == iteration_seconds(0, "resnet20-4")


def test_a_gradient_defense_meets_its_breaker_raced() -> None:
    found = [
        entry.cell.attack
        for entry in entries(EXPERIMENTS["table-defenses"], OURS)
        if entry.row == "prune:0.95" and isinstance(entry.cell, Audited)
    ]
    assert found == ["adam-cosine", "raced+masked"]


def test_a_search_is_confirmed_on_images_that_no_score_has_seen(tmp_path: Path) -> None:
    found = {entry.row: entry.cell for entry in entries(EXPERIMENTS["searches"], OURS)}
    workspace = Workspace(tmp_path)
    published = found["S_pri, as published"]
    assert isinstance(published, Searched)
    job = published.job(workspace)
    assert (job.score, job.race, job.images, job.trials, job.audit_images) == (
        *("privacy", False, 100, 1_500, 64),
    )
    ours = found["the probe"]
    assert isinstance(ours, Searched) and ours.job(workspace).race
    assert ours.training.key == published.training.key  # trained once


def test_what_is_left_of_a_search_are_the_trials_that_its_study_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(tmp_path)
    found = {entry.row: entry.cell for entry in entries(EXPERIMENTS["searches"], OURS)}
    chosen = found["the probe"]
    assert isinstance(chosen, Searched) and chosen.left(workspace) == chosen.seconds
    journal = workspace.folder(chosen) / JOURNAL
    journal.parent.mkdir(parents=True)
    study = Study.open(journal, "gradveil", {}, "random", 0, ("ssim",), POLICIES)
    for number, trial in enumerate(study.claim(3, chosen.trials)):
        if number < 2:
            study.finish(trial, ("scored", "dropped")[number], {"ssim": [0.5]})
    study.close()
    fewer = replace(chosen, trials=chosen.trials - 2)
    assert chosen.left(workspace) == fewer.seconds < chosen.seconds
    with monkeypatch.context() as patched:
        patched.setattr("gradveil.search.journal.count_ended", None)  # it is not read again
        assert chosen.left(workspace) == fewer.seconds
    journal.write_text("no journal\n")
    assert chosen.left(workspace) == chosen.seconds


def test_what_is_left_of_a_tuning_are_the_trials_that_its_study_lacks(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    chosen = entries(EXPERIMENTS["tuning"], OURS)[-1].cell
    assert isinstance(chosen, TunedAttack) and not chosen.begun(workspace)
    folder = workspace.work / "tuning" / chosen.key
    folder.mkdir(parents=True)
    study = Study.open(folder / JOURNAL, "gradveil", {}, "random", 0, ("ssim",), POLICIES)
    (trial,) = study.claim(1, chosen.trials)
    study.finish(trial, "scored", {"ssim": [0.5]})
    study.close()
    assert chosen.left(workspace) == replace(chosen, trials=15).seconds < chosen.seconds
    assert chosen.begun(workspace)
    chosen.forget(workspace)
    assert chosen.left(workspace) == chosen.seconds and not folder.exists()


@pytest.mark.parametrize("row", ["../../elsewhere", "", "a" * 21])
def test_a_record_of_a_search_names_no_folder_elsewhere(tmp_path: Path, row: str) -> None:
    chosen = entries(EXPERIMENTS["searches"])[0].cell
    assert isinstance(chosen, Searched)
    result: dict[str, Any] = {"states": {}, "kept": ["3"], "best": "3", "hybrid": None}
    facts = {"format": FORMAT, "key": chosen.key, "kind": "search", "cell": {}, "n": 1}
    path = tmp_path / chosen.key / "cell.json"
    path.parent.mkdir()
    written = {**facts, "seconds": 1.0, "result": {**result, "cases": {"untrained": [row]}}}
    path.write_text(json.dumps(written))
    with pytest.raises(GradveilError, match=r"cell\.json"):
        Records((tmp_path,)).confirmed(chosen)


def test_a_tuned_attack_meets_the_victims_of_the_others_on_their_models(tmp_path: Path) -> None:
    found = entries(EXPERIMENTS["tuning"], OURS)
    stages = {entry.cell.key for entry in entries(EXPERIMENTS["over-training"], OURS)}
    others = {entry.cell.key for entry in found if not isinstance(entry.cell, TunedAttack)}
    assert len(found) == 6 and len(others) == 4 and others <= stages  # none is measured twice
    tuned = found[-1].cell
    assert isinstance(tuned, TunedAttack)
    job = tuned.tuning(Workspace(tmp_path))
    assert (job.data, job.images, job.work) == ("cifar100", 16, 4_800)
    assert WORK == 32 * 200 + 8 * 800 + 2 * 2_400
    usual = found[-2].cell
    assert isinstance(usual, Audited) and tuned.training.key == usual.training.key
    assert (tuned.defense, tuned.images) == (usual.defense, usual.images)


def test_a_quick_tuning_is_measured_kept_and_read_back(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work", tmp_path / "no-data", device="cpu")
    records = Records((tmp_path / "records",))
    parts = make_parts([EXPERIMENTS["tuning"]], {"ours": OURS}, Size(quick=True), workspace)
    row, chosen = parts[0].entries[-1]
    assert isinstance(chosen, TunedAttack)
    chosen.training.run(workspace)
    records.write(chosen, workspace, chosen.measure(workspace), 1.0)
    case = records.case(chosen)
    assert case is not None and len(case.of("attack", "tuned")) == chosen.images
    kept = tmp_path / "records" / chosen.key
    assert {"attack.toml", "tuning.json"} <= {path.name for path in kept.iterdir()}
    for path in kept.glob("*.*"):
        assert str(tmp_path) not in path.read_text()
    (table,) = compare({"ours": parts[0]}, records)
    assert table.body[-1][:2] == [row, "tuned"]


@pytest.mark.parametrize("whole", [False, True])
def test_a_kept_file_names_weights_below_the_folder_of_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    work = Path("runs/work")
    named = (work.absolute() if whole else work) / "weights" / "w.safetensors"
    source = tmp_path / "cell"
    source.mkdir()
    (source / "settings.json").write_text(json.dumps({"checkpoint": str(named)}))
    keep_file(source / "settings.json", source, Workspace(work), tmp_path / "kept")
    kept = json.loads((tmp_path / "kept" / "settings.json").read_text())
    assert kept == {"checkpoint": "weights/w.safetensors"}


@pytest.mark.slow
def test_a_quick_search_is_measured_kept_and_read_back(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work", tmp_path / "no-data")
    records = Records((tmp_path / "records",))
    parts = make_parts([EXPERIMENTS["searches"]], {"ours": OURS}, Size(quick=True), workspace)
    chosen = parts[0].entries[1].cell
    assert isinstance(chosen, Searched)
    chosen.training.run(workspace)
    records.write(chosen, workspace, chosen.measure(workspace), 1.0)
    found = records.confirmed(chosen)
    assert {*found} == {"semi-trained", "untrained"}
    assert {*found["untrained"]} >= {"none", "random", "single"}
    audits, tests = compare({"ours": parts[0]}, records)
    rows = [row for row in audits.body if row[0] == parts[0].entries[1].row]
    assert len(rows) == sum(map(len, found.values()))
    assert all(len(row) == len(each.head) for each in (audits, tests) for row in each.body)
    assert str(tmp_path) not in (tmp_path / "records").joinpath(chosen.key, "cell.json").read_text()
