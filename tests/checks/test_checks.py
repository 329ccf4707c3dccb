"""Each check speaks where something is wrong, and is silent where nothing is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import toys
from gradveil.attacks import GradientMatching, dlg, find
from gradveil.attacks.labels import SingleLabel
from gradveil.attacks.optimizers import Adam
from gradveil.checks import CHECKS, Finding, Subject
from gradveil.checks import attack as attack_checks
from gradveil.checks import inputs as input_checks
from gradveil.checks import model as model_checks
from gradveil.checks.attack import ScaledCrossEntropy
from gradveil.clients import Client
from gradveil.core.seeds import generator
from gradveil.core.types import Batch, Protocol
from gradveil.defenses import Defense, parse
from gradveil.engine.gradients import cross_entropy
from gradveil.models.base import Normalize

CLASSES, SIZE = 4, 8


def net(name: str = "lenet") -> nn.Module:
    return toys.built(name, 1, SIZE, CLASSES, mean=[0.4], std=[0.3]).float()


def small(*layers: nn.Module) -> nn.Sequential:
    return toys.mlp(*layers, channels=1, classes=CLASSES).float()


def private(victims: int = 8, batch: int = 1) -> list[Batch]:
    return toys.private(victims, batch, 1, SIZE, CLASSES)


def others(count: int = 120) -> Batch:
    return toys.batch(count, 1, SIZE, CLASSES, seed=1)


def subject(
    model: nn.Module | None = None, batches: list[Batch] | None = None, **facts: Any
) -> Subject:
    around = {key: facts.pop(key) for key in ("loss", "protocol", "defense") if key in facts}
    return Subject(
        Client(net() if model is None else model, CLASSES, **around),
        private() if batches is None else batches,
        **facts,
    )


def fired(check: Callable[[Subject], Finding | None], one: Subject, level: str) -> Finding:
    found = check(one)
    assert (
        found is not None
        and found.level == level
        and found.means
        and found.do
        and "\n" not in str(found)
    )
    return found


def filled(model: nn.Module, value: float, name: str) -> nn.Module:
    with torch.no_grad():
        model.get_parameter(name).fill_(value)
    return model


TRAINING = Protocol(train_mode=True)


def test_a_sound_subject_is_silent_in_every_check_but_says_that_it_is_untrained() -> None:
    spare = others()
    sound = subject(labels="inferred", test=spare, public=spare, attacker_loss=cross_entropy)
    found = {name: check(sound) for name, check in CHECKS.items()}
    assert [name for name, one in found.items() if one is not None] == ["weights trained"]
    assert found["weights trained"] is not None and found["weights trained"].level == "note"


def test_dropout_is_noticed_in_train_mode_alone() -> None:
    assert model_checks.dropout_on(subject(small(nn.Dropout(0.5)))) is None
    assert model_checks.dropout_on(subject(small(nn.Dropout(0.0)), protocol=TRAINING)) is None
    assert (
        "2 (Dropout)"
        in fired(
            model_checks.dropout_on, subject(small(nn.Dropout(0.5)), protocol=TRAINING), "warning"
        ).means
    )


def test_dropout_that_is_the_defense_is_a_note() -> None:
    assert (
        "joint-masks"
        in fired(
            model_checks.dropout_on, subject(net("mlp"), defense=parse("dropout:0.3")), "note"
        ).do
    )


def test_batch_norm_is_noted_in_train_mode_or_without_statistics_and_never_advised_against() -> (
    None
):
    assert model_checks.batch_statistics(subject(small(nn.BatchNorm1d(16)))) is None
    pair = private(4, batch=2)
    training = subject(small(nn.BatchNorm1d(16)), pair, protocol=TRAINING)
    said = fired(model_checks.batch_statistics, training, "note")
    assert "2 images" in said.means and "keep it" in said.do
    assert "slow" not in str(said) and "leave" not in str(said)
    assert model_checks.not_batchable(training) is None  # which alone speaks of speed
    bare = small(nn.BatchNorm1d(16, track_running_stats=False))
    said = fired(model_checks.batch_statistics, subject(bare, pair), "note")
    assert "track_running_stats" in said.do and said.do.startswith("keep it")


def test_a_scaled_loss_is_told_by_its_factor() -> None:
    assert attack_checks.losses_differ(subject(loss=ScaledCrossEntropy(0.5))) is None
    assert (
        attack_checks.losses_differ(
            subject(loss=ScaledCrossEntropy(1.0), attacker_loss=cross_entropy)
        )
        is None
    )
    assert (
        "0.5 times"
        in fired(
            attack_checks.losses_differ,
            subject(loss=ScaledCrossEntropy(0.5), attacker_loss=cross_entropy),
            "warning",
        ).means
    )


def test_a_loss_of_another_form_is_told_by_its_angle() -> None:
    def smooth(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=0.5)

    assert (
        "cosine"
        in fired(
            attack_checks.losses_differ,
            subject(loss=smooth, attacker_loss=cross_entropy),
            "warning",
        ).means
    )


def test_images_that_are_no_pixels_are_an_error_that_says_what_they_are() -> None:
    normal = [replace(batch, images=(batch.images - 0.4) / 0.3) for batch in private()]
    bytes_ = [replace(batch, images=(batch.images * 255).round()) for batch in private()]
    assert input_checks.outside_pixels(subject()) is None
    assert "twice" in fired(input_checks.outside_pixels, subject(batches=normal), "error").means
    assert (
        "twice"
        not in fired(input_checks.outside_pixels, subject(small(nn.ReLU()), normal), "error").means
    )
    dark = [replace(batch, images=(batch.images * 20).byte()) for batch in private()]
    assert "255" in fired(input_checks.outside_pixels, subject(batches=bytes_), "error").do
    assert "255" in fired(input_checks.outside_pixels, subject(batches=dark), "error").do
    assert (
        "not finite"
        in fired(
            input_checks.outside_pixels,
            subject(
                batches=[replace(private(1)[0], images=torch.full((1, 1, SIZE, SIZE), torch.nan))]
            ),
            "error",
        ).means
    )


def test_two_normalizations_in_a_row_are_noticed_and_one_or_an_idle_one_is_not() -> None:
    assert input_checks.normalized_twice(subject()) is None
    assert input_checks.normalized_twice(subject(nn.Sequential(Normalize(1), net()))) is None
    twice = nn.Sequential(Normalize(1, [0.4], [0.3]), net())
    assert "1.normalize" in fired(input_checks.normalized_twice, subject(twice), "warning").means
    assert not any(module._forward_pre_hooks for module in twice.modules())


def test_few_candidates_and_few_images_are_noticed() -> None:
    assert input_checks.few_candidates(subject()) is None
    assert input_checks.few_candidates(subject(test=others(100))) is None
    assert (
        "has 5 test images"
        in fired(
            input_checks.few_candidates,
            subject(test=others(20)),
            "warning",
        ).means
    )
    assert (
        input_checks.few_images(subject(batches=private(6))) is None
        and input_checks.few_images(subject(batches=private(2, batch=3))) is None
    )
    assert fired(input_checks.few_images, subject(batches=private(5)), "note")


def test_weights_that_are_not_finite_are_an_error_that_names_them() -> None:
    assert model_checks.weights_not_finite(subject()) is None
    assert (
        "head.bias"
        in fired(
            model_checks.weights_not_finite, subject(filled(net(), torch.nan, "head.bias")), "error"
        ).means
    )


def test_gradients_that_are_not_finite_are_an_error() -> None:
    def root(logits: Tensor, labels: Tensor) -> Tensor:
        return (cross_entropy(logits, labels) * 0).sqrt()

    assert model_checks.gradients_not_finite(subject()) is None
    assert "victim 0" in fired(model_checks.gradients_not_finite, subject(loss=root), "error").means


def test_zero_gradients_are_an_error() -> None:
    assert model_checks.gradients_zero(subject()) is None
    assert (
        "8 of 8"
        in fired(model_checks.gradients_zero, subject(loss=ScaledCrossEntropy(0.0)), "error").means
    )


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Sigmoid(), nn.Tanh(), nn.ReLU6()])
def test_saturated_units_are_noticed(activation: nn.Module) -> None:
    assert model_checks.saturated(subject(small(activation))) is None
    found = fired(
        model_checks.saturated, subject(filled(small(activation), -60.0, "1.bias")), "warning"
    )
    assert "100.0%" in found.means and type(activation).__name__ in found.means


def test_gradients_that_vanish_on_the_way_to_the_first_layer_are_noticed() -> None:
    model = net()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            with torch.no_grad():
                module.weight.mul_(0.05)
    assert model_checks.faded(subject()) is None
    assert "first layer" in fired(model_checks.faded, subject(model), "warning").means


def test_gradients_of_images_that_the_model_is_certain_of_are_noticed() -> None:
    model = small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.get_parameter("1.bias").fill_(-4.0)
        model.get_parameter("1.weight").fill_(0.125)  # all pixels 1: 8 - 4
        model.get_parameter("2.weight")[0] = 0.2  # a logit of 12.8, and about 0 for noise
    white = [Batch(torch.ones(1, 1, SIZE, SIZE), torch.tensor([0]))] * 6
    assert model_checks.faded(subject(small(), white)) is None
    assert "certain" in fired(model_checks.faded, subject(model, white), "warning").means


def test_labels_that_cannot_be_inferred_are_an_error_and_wrong_ones_a_warning() -> None:
    assert attack_checks.labels_not_inferred(subject(labels="inferred")) is None
    frozen = small()
    frozen[2].requires_grad_(False)
    assert attack_checks.labels_not_inferred(subject(frozen)) is None
    assert (
        "frozen"
        in fired(
            attack_checks.labels_not_inferred, subject(frozen, labels="inferred"), "error"
        ).means
    )
    unlinear = nn.Sequential(nn.Conv2d(1, CLASSES, SIZE), nn.Flatten())
    assert (
        "linear"
        in fired(
            attack_checks.labels_not_inferred, subject(unlinear, labels="inferred"), "error"
        ).means
    )
    single = replace(dlg, labels=SingleLabel())
    assert (
        "batch of 2"
        in fired(
            attack_checks.labels_not_inferred,
            subject(batches=private(4, batch=2), attack=single),
            "error",
        ).means
    )
    noisy = subject(labels="inferred", defense=parse("gaussian:100"))
    assert "gaussian" in fired(attack_checks.labels_not_inferred, noisy, "warning").means


def test_a_batch_larger_than_the_classes_is_named_where_labels_were_wrong() -> None:
    rng = generator(0, "uneven")
    uneven = [
        Batch(
            torch.rand(12, 1, SIZE, SIZE, generator=rng),
            torch.randint(CLASSES, (12,), generator=rng),
        )
        for _ in range(4)
    ]
    crowd = subject(batches=uneven, labels="inferred", defense=parse("gaussian:1"))
    assert (
        "more than the 4 classes"
        in fired(attack_checks.labels_not_inferred, crowd, "warning").means
    )


def test_a_model_that_cannot_be_batched_is_told_with_its_slowdown() -> None:
    assert model_checks.not_batchable(subject()) is None
    assert model_checks.not_batchable(subject(net("mlp"), defense=parse("precode:k=8"))) is None
    odd = small(nn.PReLU(16))
    assert "times as long" in fired(model_checks.not_batchable, subject(odd), "warning").means


def test_random_shares_are_a_note_for_a_random_defense_and_a_warning_without() -> None:
    class Noisy(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return values + torch.randn_like(values)

    assert (
        model_checks.shares_differ(subject()) is None
        and model_checks.shares_differ(subject(defense=parse("prune:0.5"))) is None
    )
    assert (
        "gaussian"
        in fired(model_checks.shares_differ, subject(defense=parse("gaussian:0.1")), "note").means
    )
    assert (
        "the model does"
        in fired(
            model_checks.shares_differ, subject(small(nn.Dropout()), protocol=TRAINING), "warning"
        ).means
    )
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        model_checks.shares_differ(subject(small(Noisy())))
        assert torch.equal(torch.get_rng_state(), before)


def test_accuracy_at_chance_is_a_note_for_an_untrained_model_and_a_warning_for_a_checkpoint() -> (
    None
):
    images = torch.zeros(100, 1, SIZE, SIZE)
    truth = torch.arange(100) % CLASSES
    images.flatten(1)[torch.arange(100), truth] = 1
    knowing = nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, CLASSES))
    with torch.no_grad():
        knowing.get_parameter("1.weight").copy_(torch.eye(CLASSES, SIZE * SIZE))
    test = Batch(images, truth)
    assert (
        input_checks.at_chance(subject()) is None
        and input_checks.at_chance(subject(knowing, test=test, trained=True)) is None
    )
    assert (
        "25.0%"
        in fired(
            input_checks.at_chance,
            subject(filled(knowing, 0.0, "1.weight"), test=test, trained=True),
            "warning",
        ).means
    )
    assert fired(input_checks.at_chance, subject(knowing, test=test), "note")


def test_an_attack_is_compared_with_blind_guesses() -> None:
    exact, still = find("closed-form"), GradientMatching(optimizer=Adam(1e-9), steps=1)
    assert attack_checks.no_better_than_blind(subject(small(nn.ReLU()))) is None
    assert attack_checks.no_better_than_blind(subject(small(nn.ReLU()), attack=exact)) is None
    alone = fired(attack_checks.no_better_than_blind, subject(attack=still), "warning")
    assert "dB over the best blind guess" in alone.means and "line-ups" not in alone.means
    assert "no line-up: there are no test images" in alone.means
    many = fired(
        attack_checks.no_better_than_blind,
        subject(attack=still, labels="inferred", test=others(), public=others()),
        "warning",
    )
    assert "of 4 line-ups of 20" in many.means


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("defense", ["policy:none", "2-13", "policy:2,augment=no,then,prune:0.5"])
def test_under_a_policy_the_line_up_has_every_candidate_under_the_victim_s_draws(
    defense: str, batch: int
) -> None:
    """Policies that leave something of images of 8 x 8 pixels."""
    still = GradientMatching(optimizer=Adam(1e-9), steps=1)
    around = {"test": others(), "public": others()}
    one = subject(None, private(8 // batch, batch), attack=still, defense=parse(defense), **around)
    found = fired(attack_checks.no_better_than_blind, one, "warning")
    assert "of 4 line-ups of 20" in found.means
    used = [shared.batch for shared in one.shared[: 4 // batch]]
    truths = [each.images.cpu().float() for each in used]
    exact = attack_checks._line_up(one, used, truths, truths, ["used"] * len(used))
    assert not isinstance(exact, str) and exact[0].hits == 4


@dataclass(frozen=True)
class Silent(Defense):
    """Flip images, and does not tell."""

    def protect_batch(self, batch: Batch, rng: torch.Generator) -> Batch:
        return replace(batch, images=batch.images.flip(-1))


def test_a_defense_that_does_not_tell_what_it_did_has_no_line_up_and_that_is_said() -> None:
    still = GradientMatching(optimizer=Adam(1e-9), steps=1)
    one = subject(attack=still, defense=Silent(), test=others())
    found = fired(attack_checks.no_better_than_blind, one, "warning")
    assert "no line-up: the defense does not tell what it did to the images" in found.means


def test_a_batch_is_attacked_as_one_victim_and_scored_in_its_own_order() -> None:
    still = GradientMatching(optimizer=Adam(1e-9), steps=1)
    used, truths, founds, aims = attack_checks.short_attack(
        subject(batches=private(3, batch=4), attack=still)
    )
    assert (
        aims == ["used"]
        and len(used) == len(truths) == len(founds) == 1
        and torch.equal(truths[0], private(1, batch=4)[0].images)
    )
    own, swapped = (
        (founds[0][order] - truths[0]).square().sum() for order in ([0, 1, 2, 3], [1, 0, 2, 3])
    )
    assert own < swapped


def test_an_attack_that_lacks_what_it_needs_is_an_error() -> None:
    assert (
        "needs to know"
        in fired(
            attack_checks.no_better_than_blind, subject(attack=find("transform-known")), "error"
        ).means
    )


def test_what_does_not_fit_or_cannot_be_shared_is_an_error() -> None:
    assert input_checks.unfit(subject()) is None and input_checks.unshared(subject()) is None
    assert (
        "16"
        in fired(
            input_checks.unfit,
            subject(nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES))),
            "error",
        ).means
    )
    assert (
        "label 9"
        in fired(
            input_checks.unfit,
            subject(batches=[Batch(private(1)[0].images, torch.tensor([9]))]),
            "error",
        ).means
    )
    assert (
        "BatchNorm"
        in fired(
            input_checks.unshared,
            subject(small(nn.BatchNorm1d(16)), defense=parse("dp:norm=1,multiplier=1.1")),
            "error",
        ).means
    )


@pytest.mark.parametrize("training", [False, True])
def test_checks_leave_the_model_as_it_was(training: bool) -> None:
    model = small(nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5)).train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = subject(
        model,
        private(8, batch=2),
        protocol=TRAINING,
        test=others(20),
        public=others(20),
        labels="inferred",
        attacker_loss=cross_entropy,
    )
    for check in CHECKS.values():
        check(one)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training == training for module in model.modules())
