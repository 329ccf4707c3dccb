"""Whether the weights know anything: an untrained model is the easiest to attack, and its figures are not those of a trained one."""

from gradveil.checks.cases import Case
from gradveil.checks.findings import Finding
from gradveil.core.shares import in_mode
from gradveil.models.bottleneck import at_rest

MOST_IMAGES = 1_000
AT_ONCE = 250
CERTAIN = 0.01  # p-value above which an accuracy may be luck


def at_chance(case: Case) -> Finding | None:
    """The accuracy on up to 1,000 images, against the most frequent class of them."""
    from scipy.stats import binomtest

    if case.test is None or not len(case.test):
        return None
    labels = case.test.labels[:MOST_IMAGES]
    hits, n = correct(case), len(labels)
    chance = max(float(labels.bincount().max()) / n, 1 / case.client.classes)
    bar = min(2 * chance, (1 + chance) / 2)  # random weights alone may do somewhat better than chance
    if hits / n > bar and binomtest(hits, n, chance, alternative="greater").pvalue < CERTAIN:
        return None
    means = f"the model is right on {hits / n:.1%} of {n} test images, hardly better than chance ({chance:.1%})"
    if case.trained:
        do = "check that checkpoint, model, data set and its normalization belong together; the figures will be those of an untrained model"
        return Finding("warning", "accuracy", means, do)
    do = "give a checkpoint for figures of a trained model: untrained ones leak most"
    return Finding("note", "accuracy", f"{means}, as untrained ones are", do)


def correct(case: Case) -> int:
    """How many of the test images it is right on, in eval mode and without a defense's dropout."""
    assert case.test is not None
    images, labels = case.placed(case.test)
    images, labels = images[:MOST_IMAGES], labels[:MOST_IMAGES]
    hits = 0
    with case.passes(), in_mode(case.model, False), at_rest(case.model):
        for some, true in zip(images.split(AT_ONCE), labels.split(AT_ONCE), strict=True):
            logits = case.answers(some)[:, : case.client.classes]
            hits += int((logits.argmax(1) == true).sum())
    return hits
