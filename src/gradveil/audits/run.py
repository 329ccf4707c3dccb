"""The audit: prepare and try out every case once, then attack it chunk by chunk."""

import tempfile
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradveil.attacks import Attack
from gradveil.audits.case_run import AUDITING, CaseRun
from gradveil.audits.job import AuditJob, controls_in_words, make_cases, name_attacks, with_controls
from gradveil.audits.prepare import (
    Prepared,
    PreparedCase,
    fitted_to,
    naming,
    prepare,
    refuse_other,
)
from gradveil.audits.records import (
    RECORDS,
)
from gradveil.audits.results import AUDIT, AuditResult
from gradveil.audits.timing import Clock, Costs
from gradveil.audits.victims import count_public, passed_over_words
from gradveil.checks.doctor import before_audit
from gradveil.checks.weights import look_at_weights
from gradveil.clients import Client
from gradveil.core.boundary import public
from gradveil.core.errors import GradveilError, GradveilWarning, kind_of
from gradveil.core.importing import RAISED
from gradveil.core.job_folder import SETTINGS, claim, remove_empty
from gradveil.core.locks import alone, refuse_held
from gradveil.core.progress import LONG, Bar, foretold
from gradveil.core.types import Protocol
from gradveil.data import Images, load
from gradveil.data.images import as_images
from gradveil.defenses import Defense, as_defense
from gradveil.engine.device import find_device, sharing_cores
from gradveil.models import NormalizedName
from gradveil.transforms import Policy

LOOKED_AT = 4  # victims, for what should be known before an audit


@public
def audit(
    model: nn.Module | str | NormalizedName,
    images: Any,
    labels: Any = None,
    *,
    public: Any = None,
    defenses: Sequence[Defense | Policy | str] = ("none",),
    attacks: Sequence[str | Attack | tuple[str, Attack]] = ("auto",),
    checkpoint: str | Path | None = None,
    victims: int | None = None,
    first: int | None = None,
    batch_size: int = 1,
    steps: int | None = None,
    restarts: int | None = None,
    know_labels: bool = True,
    train_mode: bool = False,
    local_steps: int = 1,
    local_lr: float = 0.01,
    local_epochs: int = 1,
    local_batch_size: int | None = None,
    client_momentum: float = 0.0,
    client_weight_decay: float = 0.0,
    clean: str = "no",
    classes: int | None = None,
    sham: bool = True,
    control: bool = True,
    budget: float | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    data_root: str | Path | None = None,
    device: str = "auto",
    progress: bool = True,
) -> AuditResult:
    """Attack what clients with these images would share, under every defense, beside controls.

    `model` is any module on images in [0, 1], or a name such as lenet. `images` are a tensor
    (N, C, H, W) or a NumPy array, with their `labels`, a DataLoader or data set of such pairs,
    `Images`, or the name of a data set, whose test split is meant. `public` are images of the same
    kind that anyone may have, as a pair of tensors or in any of those forms: without them a blind
    guess is noise or gray. `victims` says how many images are attacked, drawn over all classes: all
    that are given, or 8 of a named data set; `first` takes them from that image on. With `control`
    what a policy comes with, crop and flip, is audited alone beside it. The result lies in `out`, a
    new temporary folder by default; a folder with the same audit is gone on with. `gradveil audit
    --help` explains the rest.
    """
    given = _several(defenses, "defenses", "prune:0.95")
    found = [as_defense(defense, "defenses") for defense in given]
    auto, named = name_attacks(_several(attacks, "attacks", "dlg"))
    root = None if data_root is None else Path(data_root)
    data = _victims(images, labels, model, classes)
    others = _public(public, root)
    cases = make_cases(
        found, checkpoints={} if checkpoint is None else {"": Path(checkpoint)}, clean=clean
    )
    if control:
        cases = with_controls(cases)
        if said := controls_in_words(cases, "control=False"):
            Bar(progress).say(said)
    job = AuditJob(
        model,
        data,
        named,
        auto,
        cases,
        _count(data, first, batch_size) if victims is None else victims,
        others,
        batch_size=batch_size,
        steps=steps,
        restarts=restarts,
        labels="known" if know_labels else "inferred",
        protocol=Protocol(
            local_steps,
            local_lr,
            train_mode,
            local_epochs,
            local_batch_size,
            client_momentum,
            client_weight_decay,
        ),
        first=first,
        sham=sham,
        budget=budget,
        seed=seed,
    )
    if out is not None:
        return run_audit(job, Path(out), root=root, device=device, progress=progress)
    folder = Path(tempfile.mkdtemp(prefix="gradveil-audit-"))
    try:
        return run_audit(job, folder, root=root, device=device, progress=progress)
    finally:
        remove_empty(folder)  # where nothing could be audited


def _several(values: object, name: str, example: str) -> Sequence[Any]:
    """Return the values of an argument that takes a list, or refuse it."""
    if isinstance(values, list | tuple):
        return values
    raise GradveilError(f"{name}: {kind_of(values)}; expected a list, such as [{example!r}]")


def _victims(
    images: Any, labels: Any, model: nn.Module | str | NormalizedName, classes: int | None
) -> Images | str:
    """Return the images to attack, with as many classes as the model has logits, or their name."""
    if isinstance(images, str):
        if labels is not None or classes is not None:
            given = "classes" if labels is None else "labels"
            raise GradveilError(f"{given}: the data set {images[:100]} has its own; leave them out")
        return images
    found = as_images(images, labels, name="images", classes=classes)
    if classes is None and isinstance(model, nn.Module) and not isinstance(images, Images):
        count = Client(model).count_classes(found.images[:1].float() / 255)
        found = as_images(found, name="images", classes=count)
    return found


def _public(public: Any, root: Path | None) -> Images | None:
    """Return the public images; the name of a data set stands for its training split."""
    if isinstance(public, str):
        return load(public, "train", root=root)
    return None if public is None else as_images(public, name="public")


def _count(data: Images | str, first: int | None, batch_size: int) -> int:
    """Count the images to attack by default: 8 of a named data set, else all that are given."""
    most = 8 if isinstance(data, str) else len(data) - (first or 0)
    size = max(batch_size, 1)  # the job refuses less
    return max(most // size, 1) * size


@public
def run_audit(
    job: AuditJob,
    out: Path,
    *,
    root: Path | None = None,
    device: str = "auto",
    progress: bool = True,
    only: int | None = None,
) -> AuditResult:
    """Run the job into `out`, or go on where it stopped there; a finished audit is read back.

    Before anything is written every case is prepared. `only` runs one case, by its number, as
    machines do that share the cases of an audit; the result has the cases that are there. Whoever
    shares them out says how long they take and how accurate the weights are.
    """
    where = find_device(device)
    with sharing_cores(where):
        return _run(job, out, root, where, progress, only)


def _run(
    job: AuditJob,
    out: Path,
    root: Path | None,
    device: torch.device,
    progress: bool,
    only: int | None,
) -> AuditResult:
    if only is None:
        refuse_held(out, AUDITING)
    if job.budget is not None and job.share is None:
        job = replace(job, share=_share_kept(out))
    prepared = prepare(job, out, root, device, only)
    if job.budget is not None and job.share is None:
        prepared = fitted_to(prepared, job.budget)
    _look_first(prepared, out, Bar(progress), weights=only is None)
    # Machines that share the cases hold only the folder of theirs.
    with alone(out, AUDITING) if only is None else nullcontext():
        refuse_other(out, prepared.settings)  # another process may have been faster
        begun = (out / SETTINGS).is_file()
        claim(out, prepared.settings, parts=(".*.part",))  # cases belong to their processes
        bar = Bar(progress)
        try:
            waits = only is not None
            runs: list[CaseRun] = []
            clock = Clock(bar, lambda: sum(run.left for run in runs))
            runs += [
                CaseRun(prepared, p, out / p.case.folder, clock, waits) for p in prepared.cases
            ]
            costs = Costs(dict(prepared.costs.seconds))
            for run in runs:
                costs.seconds |= run.costs.seconds
            if progress:  # the bar alone needs to know them, and to measure them takes a while
                left = [stage for run in runs for stage in run.unfinished]
                costs = Costs.of(left, costs.seconds)
            for run in runs:
                run.costs = costs
            total = sum(run.left for run in runs)
            if total > LONG and only is None:
                # The settings of an audit that goes on are what they were.
                bar.say(foretold(total, {} if begun else costs.cheaper(job, total)))
            clock.start()
            for run in runs:
                with naming(run.case.case, len(job.cases)):
                    run.go()
        except RAISED:
            if not any((out / case.folder).exists() for case in job.cases):
                (out / SETTINGS).unlink(missing_ok=True)
                remove_empty(out)
            raise
        finally:
            bar.stop()
    return AuditResult.read(out)


def _share_kept(out: Path) -> float | None:
    """Return the share of iterations that an audit in this folder was begun with."""
    if not (out / SETTINGS).is_file():
        return None
    share = AUDIT.read(out).get("share")
    return None if share is None else float(share)


def _look_first(prepared: Prepared, out: Path, bar: Bar, *, weights: bool) -> None:
    """Warn of faults that would make the figures of a case misleading; look at `weights` too.

    A case that has records already is left out, and so are weights that another case has.
    """
    if weights and (advice := _missing_control([case.acting for case in prepared.job.cases])):
        bar.say(advice)
    new = [each for each in prepared.cases if not (out / each.case.folder / RECORDS).is_file()]
    if new and (scored := new[0].stage.victims.scored):
        warnings.warn(
            f"{scored} of the {prepared.job.images} images attacked were used by the search that "
            "chose a defense, which may look better on them; without `first` others are drawn",
            GradveilWarning,
            stacklevel=3,
        )
    given = prepared.job.public
    if new and given is not None:
        stage = new[0].stage
        if known := count_public(stage.split, stage.victims, given):
            warnings.warn(
                f"public: {known} of the {prepared.job.images} images attacked are among them, and "
                "others of their line-ups are not: a guess made of public images can win without "
                "an update; leave out those attacked",
                GradveilWarning,
                stacklevel=3,
            )
    seen: set[str] = set()
    passed_over = prepared.cases[0].stage.victims.passed_over
    if passed_over and weights and len(new) == len(prepared.cases):
        warnings.warn(passed_over_words(passed_over), GradveilWarning, stacklevel=3)
    for prepared_case in new:
        stage = prepared_case.stage
        digest = str(prepared_case.settings["weights_sha256"])
        if weights and _is_trained(prepared, prepared_case) and digest not in seen:
            seen.add(digest)
            _look_at_weights(prepared, prepared_case, bar)
        few = stage.batches(stage.chunks[0][:LOOKED_AT])
        before_audit(stage.client, few, labels=prepared.job.known, seed=prepared.job.seed)


def _missing_control(defenses: Sequence[Defense]) -> str | None:
    """Say that crop and flip alone should stand beside a policy which comes with them."""
    for each in defenses if Defense() in defenses else ():
        if each.control is not None and each.control not in defenses:
            return (
                f"{each} comes with crop and flip, none without: --defense {each.control} beside "
                "them shows what crop and flip do alone"
            )
    return None


def _is_trained(prepared: Prepared, prepared_case: PreparedCase) -> bool:
    """Tell whether weights were given, and the defense has put no untrained layers into them."""
    case, client = prepared_case.case, prepared_case.stage.client
    given = case.weights is not None or isinstance(prepared.job.model, nn.Module)
    return given and (client.protected or not case.acting.changes("model"))


def _look_at_weights(prepared: Prepared, prepared_case: PreparedCase, bar: Bar) -> None:
    """Say how accurate the weights are, and warn where they seem to be made for other images."""
    case, client = prepared_case.case, prepared_case.stage.client
    test, seed = prepared.test, prepared.job.seed
    found = look_at_weights(client.model, test.images, test.labels, len(test.classes), seed)
    bar.say(f"{case.weights or 'the model'}: {found}")
    if found.finding is not None:
        warnings.warn(str(found.finding), GradveilWarning, stacklevel=3)
