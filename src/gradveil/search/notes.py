"""What a search's result leaves open, a line each: a weak model, settings that prove little, policies and hybrids to take with care."""

from collections.abc import Sequence
from pathlib import Path

from gradveil.models.checkpoints import read_settings
from gradveil.search.comparisons import FEWEST
from gradveil.search.hybrids import functions
from gradveil.search.jobs import SearchJob
from gradveil.search.setups import Setup
from gradveil.search.trials import Finished
from gradveil.transforms import Policy

SURE = 0.999  # a race that keeps the same ten, as `race` has measured


def notes(
    setup: Setup, checkpoint: Path, done: Sequence[Finished], ranked: Sequence[Policy], kept: int, hybrid: Policy | None
) -> tuple[str, ...]:
    """All of them. The first `kept` of those ranked are kept."""
    job, test = setup.job, setup.test
    return (
        *accuracy_note(checkpoint, len(test.classes)),
        *setup.chosen.notes,
        *threshold_note(job, done),
        *job_notes(job, kept),
        *idle_note(ranked[:kept], test.channels),
        *hybrid_note(ranked, kept, hybrid, job.race),
    )


def accuracy_note(checkpoint: Path, classes: int) -> tuple[str, ...]:
    """What the semi-trained model has learned, where its file says so: one that learned nothing makes all scores doubtful."""
    accuracy = read_settings(checkpoint).get("test_accuracy")
    if not isinstance(accuracy, float):
        return ()
    said = f"the semi-trained model has a test accuracy of {accuracy:.1%}"
    doubt = f", chance is {1 / classes:.1%}: its scores say little; train another way and give it as the checkpoint"
    return (said + (doubt if accuracy < 2 / classes else ""),)


def threshold_note(job: SearchJob, done: Sequence[Finished]) -> tuple[str, ...]:
    """Where the threshold filtered nothing: scores depend on the number of classes, and -85 was chosen for a hundred."""
    seen = [one.mean("accuracy") for one in done if "accuracy" in one.values]
    if not seen or min(seen) < job.threshold:
        return ()
    return (f"the accuracy threshold {job.threshold:g} dropped no policy: their scores were {min(seen):.1f} to {max(seen):.1f}",)


def job_notes(job: SearchJob, kept: int) -> tuple[str, ...]:
    """What these settings leave open."""
    notes = []
    if kept < job.keep:
        notes.append(f"the front holds {kept} policies that qualify, {job.keep} were wanted")
    if job.race and job.race_confidence < SURE:
        notes.append(f"raced at a confidence of {job.race_confidence:g}: a search without a race may keep others")
    if job.audit_images < FEWEST:
        notes.append(f"{job.audit_images} audit images: no test can tell two policies apart on fewer than {FEWEST}")
    return tuple(notes)


def idle_note(kept: Sequence[Policy], channels: int = 3) -> tuple[str, ...]:
    """Images as they are may leak least; nobody should take such a policy for a defence."""
    idle = [str(policy) for policy in kept if not any(functions(policy, channels))]
    return (f"kept, but no defence, since it changes no image: {', '.join(idle)}",) if idle else ()


def hybrid_note(ranked: Sequence[Policy], kept: int, hybrid: Policy | None, race: bool = False) -> tuple[str, ...]:
    """Where a member stands that is not among the policies kept, and why; after a race it might have been another."""
    members = [Policy((member,)) for member in (hybrid.members if hybrid else ())]
    notes = []
    for member in members:
        place = ranked.index(member)
        if place < kept:
            continue
        others = [policy for policy in ranked[:place] if policy not in members]
        why = ": others before it share a function with a member or change nothing" if others else ""
        doubt = "; one that the race dropped might have stood before it" if race else ""
        notes.append(f"member {member} of the hybrid ranks {place + 1} of {len(ranked)}{why}{doubt}")
    return tuple(notes)
