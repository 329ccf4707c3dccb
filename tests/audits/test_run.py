"""A whole audit: its truths, the traces of a failure, and when the controls speak up."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from gradveil.attacks import find
from gradveil.attacks.linear import LinearInversion
from gradveil.audits import AuditJob, AuditResult, Case, CaseResult, Row, run_audit
from gradveil.audits.records import images_path, load_images
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.types import Observation, Protocol
from gradveil.data import load
from gradveil.scores import psnr

BLIND = {"blind: noise", "blind: gray", "blind: mean color", "blind: class mean"}


def row(result: CaseResult, name: str, kind: str = "attack", truth: str = "used") -> Row:
    (found,) = (
        row for row in result.rows if (row.attack, row.kind, row.truth) == (name, kind, truth)
    )
    return found


def only_case(job: AuditJob, out: Path, **more: Any) -> CaseResult:
    (found,) = run_audit(job, out, progress=False, **more).cases
    return found


def test_every_image_has_a_record_of_every_attack_and_control(result: CaseResult) -> None:
    for name in ("guess", "closed-form", *BLIND):
        assert [
            record.image
            for record in result.records
            if record.attack == name and record.kind in ("attack", "blind")
        ] == [0, 1, 2, 3, 4]
    assert {record.attack for record in result.of("positive")} == {"guess", "closed-form"} and len(
        result.of("positive")
    ) == 8
    assert len({record.experiment for record in result.records}) == 1 and all(
        record.candidates == 20 for record in result.records
    )
    for kind in ("bar", "ceiling", "sham"):
        assert [record.image for record in result.of(kind)][:5] == [0, 1, 2, 3, 4]


def test_an_exact_attack_finds_the_used_images_and_noise_finds_nothing(result: CaseResult) -> None:
    exact, noise = row(result, "closed-form"), row(result, "guess")
    assert (
        exact.identified == 5
        and exact.psnr.low is not None
        and exact.psnr.low > 60
        and exact.verdict.better
        and not exact.flags
    )
    assert noise.identified == 0 and noise.flags == ("no better than blind",)
    hidden = row(result, "closed-form", truth="original")
    assert (
        hidden.psnr.high is not None and hidden.psnr.high < 30
    )  # the policy changed what was used


def test_positive_controls_tell_attacks_that_work_from_those_that_do_not(
    result: CaseResult,
) -> None:
    assert (
        row(result, "closed-form", "positive").verdict.better
        and not row(result, "guess", "positive").verdict.better
    )


def test_gains_are_over_the_one_guess_that_the_settings_name(result: CaseResult) -> None:
    chosen = result.settings["guess"]
    assert chosen == {
        "used": "blind: class mean, after the defense",
        "original": "blind: class mean",
    }
    for truth, name in chosen.items():
        level = {r.image: r.scores[truth]["psnr"] for r in result.of("blind", name)}
        for record in (*result.of("attack"), *result.of("blind"), *result.of("sham")):
            scores = record.scores[truth]
            expected = max(-200.0, min(200.0, scores["psnr"] - level[record.image]))
            assert scores["over_blind"] == pytest.approx(expected, abs=1e-4)


def test_a_sham_and_what_knows_the_draws_alone_win_no_line_up_and_ceilings_win_them_all(
    result: CaseResult,
) -> None:
    rows = {(r.kind, r.attack): r for r in result.rows if r.truth == "used"}
    assert rows["sham", "sham"].identified <= 1 and not rows["sham", "sham"].verdict.better
    assert rows["bar", "class mean, draws known"].identified <= 1
    for name in ("true picture with noise", "gradient line-up"):
        assert rows["ceiling", name].identified == 5
    sham = result.of("sham")[0]
    exact = result.of("attack", "closed-form")[0]
    assert sham.image == exact.image and sham.scores["used"]["psnr"] < 30


def test_the_saved_pictures_are_the_ones_that_were_scored(result: CaseResult) -> None:
    truth = load("fashion-mnist-mini", "test").images
    for chunk, images in enumerate(([0, 1], [2, 3], [4])):
        tensors, facts = load_images(images_path(result.out, "attack", "guess", chunk))
        assert facts["images"] == images and torch.equal(tensors["original"], truth[images])
        scores = psnr(tensors["found"].float() / 255, tensors["used"].float() / 255)
        saved = [
            record.scores["used"]["psnr"]
            for record in result.of("attack", "guess")
            if record.chunk == chunk
        ]
        assert saved == pytest.approx(scores.tolist(), abs=0.02)  # rounded to 8 bits


def test_what_an_image_was_made_into_depends_on_neither_chunks_nor_attacks(
    job: AuditJob, result: CaseResult, tmp_path: Path, guess: Any
) -> None:
    other = only_case(
        replace(job, attacks={"other": guess()}, victims_at_once=5, first=1, images=4),
        tmp_path / "other",
    )
    theirs = load_images(images_path(other.out, "attack", "other", 0))[0]["used"]
    ours = torch.cat(
        [
            load_images(images_path(result.out, "attack", "guess", chunk))[0]["used"]
            for chunk in range(3)
        ]
    )
    assert torch.equal(ours[1:], theirs)


def test_a_run_that_is_done_is_read_back(
    job: AuditJob, result: CaseResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LinearInversion, "reconstruct", lambda *_: pytest.fail("attacked again"))
    assert only_case(job, result.out.parent) == result


def test_the_seed_decides_everything(
    job: AuditJob, result: CaseResult, tmp_path: Path, without_times: Callable[[Any], list[Any]]
) -> None:
    again = only_case(job, tmp_path / "again")
    assert without_times(again.records) == without_times(result.records)
    attacks = {"guess": job.attacks["guess"]}
    other = only_case(replace(job, attacks=attacks, images=2, seed=4), tmp_path / "other")
    assert other.records[0].experiment != result.records[0].experiment
    pairs = zip(other.of("attack", "guess"), result.of("attack", "guess"), strict=False)
    assert all(one.scores != another.scores for one, another in pairs)


@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_an_audit_cut_off_anywhere_goes_on_to_the_same_records(
    part: float, job: AuditJob, result: CaseResult, without_times: Callable[[Any], list[Any]]
) -> None:
    path = result.out / "records.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    (result.out / "images" / ".guess-0000.safetensors.x.part").write_bytes(b"half")
    again = only_case(job, result.out.parent)
    assert without_times(again.records) == without_times(result.records) and not [
        *result.out.rglob("*.part")
    ]


def test_a_failed_image_is_counted_and_has_no_scores(
    job: AuditJob, tmp_path: Path, guess: Any
) -> None:
    attacks = {"guess": guess(fails=(1,), breaks=(0,))}
    result = only_case(replace(job, attacks=attacks, victims_at_once=5), tmp_path / "run")
    found = row(result, "guess")
    assert (found.n, found.failed, found.psnr.n) == (5, 2, 3) and "2 failed" in found.flags
    lines = [json.loads(line) for line in (result.out / "records.jsonl").read_text().splitlines()]
    failed = [line for line in lines if line["kind"] == "attack" and line["status"] != "ok"]
    assert [line["status"] for line in failed] == [
        "failed: the reconstruction holds values that are not finite",
        "failed: every restart diverged",
    ]
    assert all(line["scores"] == {} and line["distance"] is None for line in failed)


def test_a_victim_whose_gradient_is_zero_fails_alone(
    job: AuditJob, nets: str, tmp_path: Path, guess: Any
) -> None:
    dark = (
        load("fashion-mnist-mini", "test").images[:10].float().div(255).mean(dim=(1, 2, 3)) <= 0.2
    )
    assert 0 < dark.sum() < 10
    attacks = {"guess": guess()}
    result = only_case(
        replace(
            job,
            model=f"{nets}:sometimes",
            attacks=attacks,
            images=10,
            cases=(Case(),),
            victims_at_once=3,
        ),
        tmp_path / "run",
    )
    for kind in ("attack", "blind"):
        statuses = {record.image: record.status for record in result.of(kind)}
        assert [statuses[image] != "ok" for image in range(10)] == dark.tolist()
    assert {record.status for record in result.of("attack") if not record.ok} == {
        "failed: the model's gradient is zero: dead or saturated; nothing can be matched"
    }


def test_batches_are_lined_up_with_their_images(job: AuditJob, tmp_path: Path, guess: Any) -> None:
    attacks = {"guess": guess(), "adam-cosine": find("adam-cosine")}
    settings = replace(
        job, attacks=attacks, images=8, batch_size=4, labels="inferred", steps=60, cases=(Case(),)
    )
    result = only_case(settings, tmp_path / "run")
    found = row(result, "adam-cosine")
    assert found.n == 8 and found.labels_right is not None and found.identified >= 4
    assert found.verdict.chance == pytest.approx(1 / found.candidates)
    assert {record.update for record in result.of("attack")} == {0, 4}
    assert found.verdict.p_identified >= found.verdict.chance**2  # of two updates, not eight


def test_inferred_labels_are_not_the_told_ones(
    job: AuditJob, tmp_path: Path, guess: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradveil.attacks.labels import SingleLabel

    def always_nine(_: SingleLabel, seen: Sequence[Observation], __: Generator) -> Tensor:
        return torch.full((len(seen), 1), 9)

    monkeypatch.setattr(SingleLabel, "bind", always_nine)
    with pytest.warns(GradveilWarning, match="labels"):  # as the doctor does before an audit
        result = only_case(
            replace(job, attacks={"guess": guess()}, labels="inferred"),
            tmp_path / "run",
        )
    assert {record.label_found for record in result.of("attack")} == {9} and row(
        result, "guess"
    ).labels_right == 0
    assert all(record.label_found == record.label for record in result.of("blind"))


def test_several_local_steps_are_audited_too(job: AuditJob, tmp_path: Path) -> None:
    settings = replace(
        job,
        attacks={"adam-cosine": find("adam-cosine")},
        steps=3,
        images=2,
        protocol=Protocol(local_steps=2),
    )
    assert row(only_case(settings, tmp_path / "run"), "adam-cosine").n == 2


def test_epochs_of_mini_batches_are_audited_and_gone_on_with_by_the_same_settings_alone(
    job: AuditJob, tmp_path: Path
) -> None:
    protocol = Protocol(
        local_epochs=2, local_batch_size=1, client_momentum=0.5, client_weight_decay=0.01
    )
    settings = replace(
        job,
        attacks={"adam-cosine": find("adam-cosine")},
        steps=3,
        images=2,
        batch_size=2,
        protocol=protocol,
    )
    result = only_case(settings, tmp_path / "run")
    assert row(result, "adam-cosine").n == 2
    assert {name: result.settings[name] for name in protocol.settings()} == protocol.settings()
    assert only_case(settings, tmp_path / "run").settings == result.settings
    other = replace(settings, protocol=replace(protocol, client_momentum=0.0))
    with pytest.raises(GradveilError, match="other settings"):
        only_case(other, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "own_audit_nets:dead"}, "the model's gradient is zero"),
        ({"model": "own_audit_nets:diverged"}, "'1.weight' has values that are not finite"),
        ({"model": "own_audit_nets:wide"}, "one logit for each of 10 classes"),
        (
            {
                "model": "own_audit_nets:headless",
                "labels": "inferred",
                "attacks": {"adam-cosine": find("adam-cosine")},
            },
            "label inference needs a last linear layer",
        ),
        ({"model": "lenet"}, "linear inversion needs nn.Linear"),
        ({"model": "nope"}, "unknown model 'nope'"),
        ({"images": 501}, "images 0 to 500: fashion-mnist-mini test has 500"),
        ({"first": 497}, "images 497 to 501"),
        ({"cases": (Case(weights=Path("none.safetensors")),)}, "no checkpoint at none.safetensors"),
    ],
)
def test_what_cannot_be_audited_leaves_nothing_behind(
    job: AuditJob, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(GradveilError, match=says.replace("(", r"\(")) as caught:
        only_case(replace(job, **changes), tmp_path / "run")
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_a_folder_with_another_audit_is_refused_with_the_differences(
    job: AuditJob, done: AuditResult, guess: Any
) -> None:
    files = {path: path.read_bytes() for path in done.out.rglob("*") if path.is_file()}
    others = {
        "images 5 there, 4 here, seed 3 there, 9 here": replace(job, images=4, seed=9),
        r"attacks \['guess', 'closed-form'\] there, \['guess'\] here": replace(
            job, attacks={"guess": guess()}
        ),
    }
    for says, other in others.items():
        with pytest.raises(GradveilError, match=rf"other settings \({says}\): choose"):
            run_audit(other, done.out, progress=False)
    with pytest.raises(
        GradveilError, match=r"other cases \(only there: .*; only here: none\): choose"
    ):
        run_audit(replace(job, cases=(Case(),)), done.out, progress=False)
    assert files == {path: path.read_bytes() for path in done.out.rglob("*") if path.is_file()}


def test_the_same_names_for_other_images_weights_or_attacks_are_another_audit(
    job: AuditJob, guess: Any, tmp_path: Path
) -> None:
    images = load("fashion-mnist-mini", "test")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    other_model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    brought = replace(job, model=model, data=images, attacks={"guess": guess()}, images=2)
    first = run_audit(brought, tmp_path / "run", progress=False)
    others = {
        "other images_sha256": replace(
            brought, data=replace(images, images=images.images.roll(1, 0))
        ),
        "other weights_sha256": replace(brought, model=other_model),
        r"attacks .*fails=\(\).* there, .*fails=\(1,\).* here": replace(
            brought, attacks={"guess": guess(fails=(1,))}
        ),
    }
    for says, other in others.items():
        with pytest.raises(GradveilError, match=rf"other settings \({says}\): choose"):
            run_audit(other, first.out, progress=False)
    assert run_audit(brought, first.out, progress=False) == first


def test_a_folder_of_something_else_is_refused(job: AuditJob, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(GradveilError, match="is not empty and holds no audit"):
        run_audit(job, tmp_path, progress=False)
    with pytest.raises(GradveilError, match="is a file"):
        run_audit(job, tmp_path / "notes.txt", progress=False)


def test_color_images_stand_among_fifty_of_their_class(data_root: Path, tmp_path: Path) -> None:
    job = AuditJob(
        "lenet", "cifar100", {"adam-cosine": find("adam-cosine")}, images=2, steps=2, first=7
    )
    result = only_case(job, tmp_path / "run", root=data_root)
    assert [record.image for record in result.of("attack")] == [7, 8] and all(
        record.candidates == 50 for record in result.records
    )
    assert load_images(images_path(result.out, "attack", "adam-cosine", 0))[0]["found"].shape == (
        2,
        3,
        32,
        32,
    )


def test_an_audit_warns_of_classes_that_it_draws_no_image_of_and_keeps_them(
    tmp_path: Path,
) -> None:
    split = load("fashion-mnist-mini", "test")
    few = (split.labels == 4).nonzero().flatten()[:12].tolist()
    two = (split.labels < 2).nonzero().flatten().tolist()
    images = split.select([*two, *few])
    attacks = {"dlg": find("dlg")}
    job = AuditJob("lenet", images, attacks, images=4, steps=1, positive=False, sham=False)
    words = "no image was drawn of class 'Coat' with 12 distinct images: a line-up needs 20"
    with pytest.warns(GradveilWarning, match=words):
        found = only_case(job, tmp_path / "run")
    assert found.passed_over == words and found.settings["passed_over"] == {"Coat": 12}
    again = only_case(job, tmp_path / "run")  # it is not warned of twice
    assert again.settings == found.settings
    kept = json.loads((found.out / "settings.json").read_text())
    del kept["passed_over"]  # as older versions wrote it
    (found.out / "settings.json").write_text(json.dumps(kept))
    assert only_case(job, tmp_path / "run").passed_over == ""
