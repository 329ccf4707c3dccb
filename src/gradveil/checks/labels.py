"""Whether the labels of these batches can be read off what is shared: tried, and compared with the true ones."""

from collections import Counter

from gradveil.attacks import GradientMatching
from gradveil.attacks.labels import Counted, Known, LabelFinder, SingleLabel, last_layer
from gradveil.checks.cases import Case, quiet
from gradveil.checks.findings import Finding
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator


def labels_not_inferred(case: Case) -> Finding | None:
    """Silent where labels are known, and where all are found."""
    finder = chosen(case)
    if finder is None:
        return None
    seen, used = [one for one, _ in case.shared], [batch.labels.tolist() for _, batch in case.shared]
    try:
        with quiet():
            found = finder.infer(seen, generator(case.seed, "checks", "labels")).tolist()
    except GradveilError as error:
        return Finding("error", "labels", str(error), "until then no attack that infers labels can run")
    right = sum((Counter(own) & Counter(guess)).total() for own, guess in zip(used, found, strict=True))
    total = sum(map(len, used))
    if right == total:
        return None
    means = f"{right} of {total} labels were found from what is shared{_reason(case)}: an attack then looks for images of wrong classes"
    return Finding("warning", "labels", means, "give the labels (--labels known), or read the figures as an attacker's without them")


def chosen(case: Case) -> LabelFinder | None:
    """Who infers labels in this case, as an audit would choose."""
    if (
        isinstance(case.attack, GradientMatching)
        and isinstance(case.attack.labels, LabelFinder)
        and not isinstance(case.attack.labels, Known)
    ):
        return case.attack.labels
    if case.labels == "known":
        return None
    return SingleLabel() if len(case.few[0]) == 1 else Counted()


def _reason(case: Case) -> str:
    """The first known one."""
    one, batch = case.shared[0]
    classes = case.client.classes
    if len(batch) > classes:
        return f" (batches of {len(batch)} images, more than the {classes} classes: every class may repeat)"
    if case.client.protocol.local_steps > 1:
        return f" (the weights move in {case.client.protocol.local_steps} local steps)"
    if last_layer(one).bias is None:
        return " (the last layer has no bias, so the sums of its rows stand in for it)"
    if any(part.acts_on == "gradients" for part in case.client.acting.parts()):
        return f" ({case.client.acting} changes the last layer's gradient)"
    if any(len(set(own.labels.tolist())) < len(own) for _, own in case.shared):
        return " (batches with several images of one class)"
    return ""
