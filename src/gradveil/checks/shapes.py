"""Whether model, images and defense go together at all."""

from gradveil.checks.cases import Case, quiet
from gradveil.checks.findings import Finding
from gradveil.clients import check_batch
from gradveil.core.errors import GradveilError
from gradveil.core.shares import Shares
from gradveil.models.bottleneck import penalties


def unfit(case: Case) -> Finding | None:
    """The images and labels are no batch, or the model gives no logit for each class."""
    client = case.client
    try:
        for number, batch in enumerate(case.few):
            check_batch(batch, client.classes, f"victim {number}")
        images, _ = case.placed(case.few[0])
        with quiet():
            Shares(client.model, client.loss, client.protocol).check(images, client.classes + penalties(client.model))
    except GradveilError as error:
        return Finding("error", "model and images", str(error), "choose a model and images that go together")
    return None


def unshared(case: Case) -> Finding | None:
    """The client refuses for another reason: the defense does not suit the model, the local steps diverge."""
    try:
        assert case.shared
    except GradveilError as error:
        return Finding("error", "sharing", str(error), "nothing can be attacked until then")
    return None
