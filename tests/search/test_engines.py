"""An engine splits policies into the scorer's units and joins the parts again."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradveil.audits import AuditJob
from gradveil.audits.results import AuditResult
from gradveil.core import GradveilError
from gradveil.scores.scorer import Scorer
from gradveil.search.engine import LocalEngine
from gradveil.transforms import Policy

POLICIES = [Policy.parse(text) for text in ("none", "3", "3-1-7", "43-18-18", "2-2")]


class Lengths(Scorer):
    """The length of the policy beside the index of the value; remembers how it was asked."""

    names = ("length", "twice")
    unit = 2
    blocks = (3, 4)

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def score(self, policies: Sequence[Policy], block: int) -> Mapping[str, Tensor]:
        self.asked.append((len(policies), block))
        lengths = torch.tensor(
            [
                [len(policy.members[0]) + index / 10 for index in range(self.blocks[block])]
                for policy in policies
            ]
        )
        return {"length": lengths.double(), "twice": 2 * lengths.double()}


def test_units_are_scored_one_by_one_and_joined_in_order() -> None:
    scorer = Lengths()
    with LocalEngine({"leak": scorer}) as engine:
        found = engine.score("leak", POLICIES, 1)
        assert engine.workers == 1
    assert scorer.asked == [(2, 1), (2, 1), (1, 1)]
    assert found["length"][:, 0].tolist() == [0, 1, 3, 3, 2]
    assert found["length"].shape == (5, 4) and found["twice"].equal(2 * found["length"])


def test_no_policies_give_no_rows() -> None:
    found = LocalEngine({"leak": Lengths()}).score("leak", [], 0)
    assert {name: tuple(table.shape) for name, table in found.items()} == {
        "length": (0, 3),
        "twice": (0, 3),
    }


def test_an_unknown_scorer_is_named_beside_the_choices() -> None:
    with pytest.raises(GradveilError, match="unknown scorer 'speed': choose from leak"):
        LocalEngine({"leak": Lengths()}).score("speed", POLICIES, 0)


def test_audits_go_to_their_folders(tmp_path: Path) -> None:
    job = AuditJob("fashion-mnist-mini", "mlp", ("closed-form",), 2)
    LocalEngine({}).audits([(job, tmp_path / "a"), (job, tmp_path / "b")], None, "cpu")
    assert (
        AuditResult.read(tmp_path / "a").records[0].key
        == AuditResult.read(tmp_path / "b").records[0].key
    )
