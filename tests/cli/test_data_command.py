"""gradveil data: the list, and files that are right, missing, truncated, changed or broken."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gradveil.data import catalog


@pytest.fixture
def cifar(data_root: Path, tmp_path: Path) -> Path:
    """A data root with the real CIFAR-100, whose test file may be changed."""
    source, copy = data_root / "cifar-100-python", tmp_path / "root" / "cifar-100-python"
    if not source.is_dir():
        pytest.skip("$GRADVEIL_DATA has no cifar-100-python")
    copy.mkdir(parents=True)
    for name in ("train", "meta"):
        (copy / name).symlink_to((source / name).resolve())
    (copy / "test").write_bytes((source / "test").read_bytes())
    return copy.parent


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of the user's own: two classes of twelve pictures."""
    for number in range(24):
        path = tmp_path / "photos" / ("cats", "dogs")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number * 9).save(path)
    return tmp_path / "photos"


def test_every_data_set_is_listed_with_its_facts(gradveil: Any) -> None:
    result = gradveil("data list --data-root nowhere --json").result
    assert result["root"] == "nowhere"
    assert [entry["name"] for entry in result["datasets"]] == [entry.name for entry in catalog()]
    assert [entry["name"] for entry in result["datasets"] if entry["here"]] == [
        "fashion-mnist-mini"
    ]
    assert all(
        entry["license"] and entry["layout"] and entry["classes"] > 1
        for entry in result["datasets"]
    )


def test_the_table_for_people_shows_whole_names_and_a_header_for_each_column(gradveil: Any) -> None:
    outcome = gradveil("data list --data-root [some]/where")
    assert outcome.status == 0 and "[some]/where" in outcome.shown and "license" in outcome.shown
    assert all(entry.name in outcome.shown for entry in catalog())


def test_the_embedded_set_is_right(gradveil: Any) -> None:
    outcome = gradveil("data verify fashion-mnist-mini --json")
    assert (
        outcome.status == 0
        and outcome.result["verified"] is True
        and len(outcome.result["files"]) == 2
    )


def test_the_real_cifar100_is_right_until_a_byte_is_changed(gradveil: Any, cifar: Path) -> None:
    line = f"data verify cifar100 --data-root {cifar} --json"
    outcome = gradveil(line)
    assert outcome.status == 0 and outcome.result["verified"] is True
    changed = cifar / "cifar-100-python" / "test"
    with changed.open("r+b") as file:
        file.seek(1_000_000)
        (byte,) = file.read(1)
        file.seek(1_000_000)
        file.write(bytes([byte ^ 1]))
    outcome = gradveil(line)
    assert outcome.status == 1 and outcome.result["verified"] is False and not outcome.said
    assert [check["path"] for check in outcome.result["files"] if not check["ok"]] == [str(changed)]
    for command in (
        line.replace(" --json", ""),
        f"train --data cifar100 --model mlp --data-root {cifar}",
    ):
        outcome = gradveil(command)
        assert (
            outcome.status
            and str(changed) in outcome.shown + outcome.said
            and "corrupted" in outcome.shown + outcome.said
        )
    assert not Path("runs").exists()


def test_a_folder_is_verified_by_its_images(gradveil: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for level in range(3):
            Image.new("L", (8, 6), 50 * level).save(tmp_path / name / f"{level}.png")
    line = f"data verify folder:{tmp_path}"
    outcome = gradveil(line)
    assert outcome.status == 0 and "all is right (6 images" in outcome.shown
    said = gradveil(f"train --data folder:{tmp_path} --model mlp --out run").error
    assert said.endswith("a/0.png is 8x6; give an image size, such as 6")
    (tmp_path / "a" / "0.png").write_bytes(b"no picture")
    outcome = gradveil(line)
    assert outcome.status == 1 and "1 wrong file (6 images" in outcome.shown
    assert "a/0.png: cannot identify image file" in outcome.shown


def test_a_truncated_file_is_told_by_verify_and_by_train(gradveil: Any, cifar: Path) -> None:
    with (cifar / "cifar-100-python" / "test").open("r+b") as file:
        file.truncate(5_000)
    outcome = gradveil(f"data verify cifar100 --data-root {cifar}")
    assert outcome.status == 1 and "truncated: 5000 of" in outcome.shown
    assert (
        "truncated: 5000 of"
        in gradveil(f"train --data cifar100 --model mlp --data-root {cifar} --out run").error
    )


@pytest.mark.parametrize(
    "name", [entry.name for entry in catalog() if entry.name != "fashion-mnist-mini"]
)
def test_missing_data_is_status_one_for_verify_and_a_hint_for_train(
    gradveil: Any, tmp_path: Path, name: str
) -> None:
    outcome = gradveil(f"data verify {name} --data-root nowhere --json")
    assert outcome.status == 1 and outcome.result["verified"] is False
    error = gradveil(f"train --data {name} --model mlp --data-root nowhere --out run").error
    assert f"{name} is not in nowhere" in error
    assert not list(tmp_path.iterdir())


def test_a_folder_of_pictures_is_right_until_one_is_broken(gradveil: Any, photos: Path) -> None:
    line = f"data verify folder:{photos}"
    assert gradveil(f"{line} --json").result["verified"] is True
    broken = photos / "dogs" / "5.png"
    broken.write_bytes(broken.read_bytes()[:50])
    outcome = gradveil(f"{line} --json")
    assert outcome.status == 1 and outcome.result["verified"] is False
    assert [check["path"] for check in outcome.result["files"]] == [str(broken)]
    assert str(broken) in gradveil(line).shown
    assert str(broken) in gradveil(f"train --data folder:{photos} --model mlp --out run").error
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("verify nonsense", "unknown dataset 'nonsense': choose from cifar10, "),
        ("verify folder:nowhere", "no folder nowhere"),
        ("verify folder:", "names no folder"),
        ("fetch nonsense", "unknown dataset 'nonsense': choose from cifar10, "),
        ("fetch folder:photos", "nothing to fetch"),
    ],
)
def test_a_set_that_is_none_is_told_in_one_line(gradveil: Any, line: str, says: str) -> None:
    assert says in gradveil(f"data {line}").error
    assert says in gradveil(f"data {line} --json").error


def test_fetching_the_embedded_set_needs_no_network(gradveil: Any) -> None:
    outcome = gradveil("data fetch fashion-mnist-mini --json")
    assert (outcome.status, outcome.said) == (0, "") and outcome.result["verified"] is True
