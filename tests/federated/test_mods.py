"""Defenses in a Flower client: the mod and the function for images."""

import pickle

import pytest
import torch
from flwr.app import Error, Message
from torch import Tensor

from flower import answer, app_with, arrays, context, question, trained
from gradveil.core.errors import GradveilError
from gradveil.core.seeds import generator
from gradveil.core.types import Batch
from gradveil.defenses import FeedbackPruning, Pruning, as_defense, parse
from gradveil.defenses.applied import protected_gradients
from gradveil.federated import defend, policy
from gradveil.federated.messages import as_tensors
from gradveil.federated.mods import HIDDEN

NAMES = "conv.weight", "head.weight"
CLIP, NOISE, PRUNE = "clip:0.5", "gaussian:0.1", "prune:0.5"


def step(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A training that changes every array."""
    return {
        name: value - 0.3 * value.cos() if value.is_floating_point() else value + 2
        for name, value in weights.items()
    }


def test_a_mod_changes_the_parameters_that_leave_and_nothing_else() -> None:
    before, after = arrays(), step(arrays())
    sent = trained(app_with([defend(PRUNE)], step), before)
    assert list(sent) == list(after)
    for name in NAMES:
        kept = sent[name] == after[name]
        assert (
            torch.equal(sent[name][~kept], before[name][~kept]) and 0.4 < kept.float().mean() < 0.6
        )
    for name in after.keys() - set(NAMES):
        assert torch.equal(sent[name], after[name]) and sent[name].dtype == after[name].dtype


@pytest.mark.parametrize("key", ["arrays", "gradients"])
def test_a_mod_applies_the_defense_to_the_update_with_the_draws_of_client_and_round(
    key: str,
) -> None:
    before, after, lr = arrays(), step(arrays()), 0.1
    sent = trained(app_with([defend(NOISE, seed=7, lr=lr)], step, key), before, number=4)
    update = {name: (before[name].double() - after[name].double()) / lr for name in NAMES}
    if key == "gradients":
        update = {name: after[name] for name in NAMES}
    rng = generator(7, "defend", 0, 4)
    shared, _ = protected_gradients(parse(NOISE), update, HIDDEN, None, rng)
    for name in NAMES:
        wanted = shared[name] if key == "gradients" else before[name] - lr * shared[name]
        torch.testing.assert_close(sent[name], wanted.float(), rtol=1e-6, atol=1e-7)


def test_draws_without_a_seed_differ_each_time_and_with_one_only_between_rounds() -> None:
    def made(seed: int | None, number: int) -> Tensor:
        return trained(app_with([defend(NOISE, seed=seed)], step), arrays(), number=number)[
            NAMES[0]
        ]

    assert not torch.equal(made(None, 1), made(None, 1))
    assert torch.equal(made(3, 1), made(3, 1)) and not torch.equal(made(3, 1), made(3, 2))


def test_several_mods_clip_first_and_add_noise_last_in_any_order() -> None:
    texts = CLIP, PRUNE, NOISE
    together = trained(
        app_with([defend(CLIP + ",then," + PRUNE + ",then," + NOISE, seed=1)], step), arrays()
    )
    for order in [(0, 1, 2), (2, 1, 0), (1, 2, 0)]:
        mods = [defend(texts[number], seed=1) for number in order]
        sent = trained(app_with(mods, step), arrays())
        for name in together:
            assert torch.equal(sent[name], together[name])


@pytest.mark.parametrize("kind", ["evaluate", "query"])
def test_evaluations_and_queries_pass_through_untouched(kind: str) -> None:
    asked = question(arrays(), kind)
    replied = answer(asked, step(arrays()))
    found = defend(PRUNE)(asked, context(), lambda *_: replied)
    assert found is replied
    assert torch.equal(
        as_tensors(found.content.array_records["arrays"])[NAMES[0]], step(arrays())[NAMES[0]]
    )


def test_a_client_keeps_the_state_of_its_defense_between_rounds() -> None:
    defense, here = FeedbackPruning(0.9), context()
    app = app_with([defend(defense, seed=0)], step, "gradients")
    state, gradients = defense.start(), {name: step(arrays())[name] for name in NAMES}
    for number in (1, 2, 3):
        reply = app(question(arrays(), number=number), here)
        sent = as_tensors(reply.content.array_records["gradients"])
        wanted, state = defense.protect_gradients(gradients, HIDDEN, state, generator(0))
        for name in NAMES:
            torch.testing.assert_close(sent[name], wanted[name])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("prunn:0.9", "unknown defense 'prunn': choose from none"),
        ("prune:2", "prune"),
        ("3-1-7", "defense 3-1-7 changes the images, and a mod sees the update alone: call"),
        ("precode", "changes the model, and a mod sees the update alone: train the model"),
        ("dp:norm=1,multiplier=1", "passes the batch through the model again"),
        ("gaussian:0.1,then,clip:1", "clip first"),
    ],
)
def test_a_defense_that_cannot_be_a_mod_is_refused_when_the_app_is_made(
    given: str, said: str
) -> None:
    with pytest.raises(GradveilError) as error:
        defend(given)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_nothing_is_sent_where_the_update_cannot_be_told() -> None:
    app = app_with([defend(PRUNE)], lambda _: {"other": torch.zeros(3)})
    reply = app(question(arrays()), context())
    assert reply.has_error() and "no update to protect" in str(reply.error.reason)


def test_nothing_is_sent_where_a_defense_fails() -> None:
    app = app_with([defend(NOISE)], lambda w: {k: v * float("nan") for k, v in w.items()})
    reply = app(question({"w": torch.ones(3)}), context())
    assert reply.has_error() and "not finite" in str(reply.error.reason)


def test_an_error_of_the_training_stays_as_it_is() -> None:
    asked = question(arrays())
    refused = Message(Error(2, "no data"), reply_to=asked)
    assert defend(PRUNE)(asked, context(), lambda *_: refused) is refused


def test_a_policy_changes_images_as_its_defense_does() -> None:
    images = torch.rand(5, 3, 16, 16)
    change = policy("3-1-7", seed=2)
    defense, rng = as_defense("3-1-7"), generator(2, "policy")
    for _ in range(2):
        wanted = defense.protect_batch(Batch(images, torch.zeros(5).long()), rng).images
        assert torch.equal(change(images), wanted)


def test_a_policy_in_another_process_draws_from_its_own_source() -> None:
    change = policy("43-18-18")
    images = torch.rand(8, 3, 16, 16)
    change(images)
    assert pickle.loads(pickle.dumps(change)).defense == change.defense
    assert "_rng" not in vars(pickle.loads(pickle.dumps(change)))


@pytest.mark.parametrize(
    ("given", "images", "said"),
    [
        (
            "3-1-7,then,prune:0.5",
            None,
            "prune:0.5 acts on the gradients, not on images; give it to",
        ),
        (Pruning(0.5), None, "acts on the gradients"),
        ("3-1-7", torch.zeros(2, 16, 16), "expected floats (N, C, H, W)"),
        ("3-1-7", torch.full((2, 3, 16, 16), 2.0), "values from 2 to 2; expected [0, 1], before"),
    ],
)
def test_a_policy_refuses_other_defenses_and_other_images(
    given: str, images: Tensor | None, said: str
) -> None:
    with pytest.raises(GradveilError, match="policy") as error:
        policy(given)(torch.zeros(1) if images is None else images)
    assert said in str(error.value)
