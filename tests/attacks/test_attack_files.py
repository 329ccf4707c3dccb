"""Attack files: every attack comes back as it was written, and bad files are one line."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from torch import Tensor

import toys
from gradveil.attacks import PRESETS, GradientMatching, find, raced
from gradveil.attacks.attack_files import FORMAT, attack_table, image_digest, read_attack
from gradveil.attacks.priors import PriorState, Sum, TotalVariation, Weighted
from gradveil.attacks.starts import Given
from gradveil.core.toml import toml_value

DIGEST = "0" * 64  # of the picture that `toys.attack_file` was tuned on


def written(folder: Path, content: str) -> Path:
    path = folder / "attack.toml"
    path.write_text(content)
    return path


@dataclass(frozen=True)
class Bright(Weighted):
    """A prior of a user's."""

    def penalty(self, images: Tensor, state: PriorState) -> Tensor:
        return -images.flatten(1).mean(1)


MATCHING = [name for name, attack in PRESETS.items() if isinstance(attack, GradientMatching)]


@pytest.mark.parametrize("name", MATCHING)
def test_every_preset_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    attack = PRESETS[name]
    assert isinstance(attack, GradientMatching)
    found = read_attack(written(tmp_path, toys.attack_file(attack)))
    assert found == attack and found.tuned_on == (DIGEST,)


def test_a_part_of_a_user_comes_back_where_its_class_has_been_imported(tmp_path: Path) -> None:
    prior = Sum((TotalVariation(0.1), Bright(0.2)))
    path = written(tmp_path, toys.attack_file(replace(raced, prior=prior)))
    found = find(str(path))
    assert isinstance(found, GradientMatching) and found.prior == prior
    path.write_text(path.read_text().replace(":Bright", ":Dull"))
    said = toys.refused(find, str(path))
    assert ":Dull, which has not been imported: import it before the file is read" in said


def test_a_file_can_be_combined_with_a_preset(tmp_path: Path) -> None:
    path = written(tmp_path, toys.attack_file(raced))
    found = find(f"{path}+masked")
    assert isinstance(found, GradientMatching)
    assert found.race == raced.race and found.distance == find("masked").distance  # type: ignore[attr-defined]
    assert found.tuned_on == (DIGEST,)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (FORMAT, "gradveil attack 2", "its format is 'gradveil attack 2', expected"),
        ("steps = 2400", "steps = -1", "attack: steps -1: an attack needs at least 1"),
        ("steps = 2400", 'steps = "many"', "attack: steps 'many': expected a whole number"),
        ("steps = 2400", "speed = 1", "attack: speed: GradientMatching has no such setting"),
        ('kind = "Cosine"', 'kind = "Adam"', "attack.distance: weights: Adam has no such setting"),
        ('kind = "Cosine"', 'kind = "os.system"', "attack.distance: there is no os.system"),
        ("weight = 0.05", "weight = inf", "attack.prior.weight: inf is no setting"),
        (", weight = 0.05", "", "attack.prior.weight: missing"),
        ("[4, 0.3", "[40, 0.3", "rows can only become fewer"),
        (f'["{DIGEST}"]', "[]", "images.tuned_on"),
        (f'["{DIGEST}"]', '["none"]', "images.tuned_on"),
        ("[images]", "[pictures]", "unknown field"),
        ("[attack]", "[attack", "attack.toml: "),
    ],
)
def test_a_file_that_is_damaged_or_of_another_version_is_one_line(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    content = toys.attack_file(raced)
    assert old in content
    path = written(tmp_path, content.replace(old, new))
    assert said in toys.refused(find, str(path))


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    content = toys.attack_file(raced)
    for end in range(0, len(content) - len("held_out = []\n"), 97):
        toys.refused(find, str(written(tmp_path, content[:end])))


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    assert "attack.toml" in toys.refused(find, str(tmp_path / "attack.toml"))


def test_an_attack_with_pictures_cannot_be_written() -> None:
    said = toys.refused(attack_table, replace(raced, start=Given(toys.pictures(1)[0])))
    assert said == "attack.start.images: a Tensor cannot be written into an attack file"


def test_a_digest_tells_pictures_apart_by_shape_and_pixels() -> None:
    one, other = toys.pixels(2)
    assert image_digest(one) == image_digest(one.clone()) != image_digest(other)
    assert image_digest(one) != image_digest(one.reshape(3, 4, 16))


def test_values_are_written_as_toml_reads_them() -> None:
    value = {"a b": [1, 2.5, True, 'x"\x7f'], "none": None, "inner": {"t": "é"}}
    read = tomllib.loads(f"value = {toml_value(value)}")["value"]
    assert read == {"a b": [1, 2.5, True, 'x"\x7f'], "inner": {"t": "é"}}
