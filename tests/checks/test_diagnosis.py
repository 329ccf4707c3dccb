"""All checks together: what diagnose and before_audit give, and the self-check."""

import warnings

import pytest
import torch
from torch import nn

import toys
from gradveil.checks import CHECKS, Finding, Subject, before_audit, diagnose, self_check
from gradveil.checks.doctor import examine
from gradveil.clients import Client
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.types import Protocol

TRAINING = Protocol(train_mode=True)


def client(protocol: Protocol | None = None) -> Client:
    model = nn.Sequential(toys.lenet().float(), nn.Dropout(0.5))
    return Client(model, toys.CLASSES, protocol=protocol or Protocol())


def findings(client: Client, victims: int = 6) -> tuple[Finding, ...]:
    return diagnose(Subject(client, toys.private(victims))).findings


def test_a_sound_client_gives_no_finding() -> None:
    assert findings(client()) == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert before_audit(client(), toys.private(6), labels="inferred") == []


def test_findings_come_in_the_order_of_the_checks() -> None:
    assert [found.name for found in findings(client(TRAINING), 2)] == [
        "dropout",
        "random shares",
        "images",
    ]


def test_an_error_among_the_first_checks_ends_the_diagnosis() -> None:
    broken = client()
    with torch.no_grad():
        next(broken.model.parameters()).fill_(torch.inf)
    assert [found.level for found in findings(broken)] == ["error"]


def test_before_an_audit_each_warning_is_warned_of_and_notes_are_only_returned() -> None:
    with pytest.warns(GradveilWarning) as caught:
        found = before_audit(client(TRAINING), toys.private(2))
    assert {one.level for one in found} == {"warning", "note"}
    assert [str(one.message) for one in caught] == [
        str(one) for one in found if one.level == "warning"
    ]


def test_no_batches_and_other_words_for_labels_are_refused() -> None:
    with pytest.raises(GradveilError, match="no batches"):
        Subject(client(), [])
    with pytest.raises(GradveilError, match=r"guessed.*known, inferred"):
        Subject(client(), toys.private(1), labels="guessed")  # type: ignore[arg-type]


def test_a_finding_is_one_line_and_its_level_one_of_three() -> None:
    assert str(Finding("note", "name", "it\n means", "do\tthis")) == "name: it means; do this"
    with pytest.raises(GradveilError, match=r"hint.*note, warning, error"):
        Finding("hint", "name", "means", "do")  # type: ignore[arg-type]


def test_every_check_has_a_name_that_says_what_is_well() -> None:
    assert len(set(CHECKS.values())) == len(CHECKS) >= 15


def test_the_self_check_reconstructs_an_image_here_and_fails_without_steps_to_do_so() -> None:
    threads = torch.get_num_threads()
    found = self_check("cpu")
    assert found.level == "note" and "dB" in found.means
    assert self_check("cpu", steps=1).level == "error"
    assert torch.get_num_threads() == threads


def test_findings_on_a_model_that_draws_do_not_depend_on_torchs_own_generators() -> None:
    found = []
    for number in range(12):
        torch.manual_seed(number)
        state = torch.random.get_rng_state()
        found.append([(one.name, one.level) for one in findings(client(TRAINING), 2)])
        assert torch.equal(torch.random.get_rng_state(), state)
    assert all(one == found[0] for one in found)


def test_each_check_has_as_many_threads_as_cores_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(_: Subject) -> None:
        seen.append(torch.get_num_threads())

    seen: list[int] = []
    with toys.two_cores(monkeypatch, [1.0, 0.0]):
        for _ in examine(Subject(client(), toys.private(1)), {"first": check, "second": check}):
            pass
        assert seen == [1, 2] and torch.get_num_threads() == 2
