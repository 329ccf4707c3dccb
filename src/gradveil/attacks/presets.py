"""The named attacks, each a composition of parts with the settings of its paper or its code.

Each is a constant, such as `dlg`; every constant of type `Attack` here is in the table `PRESETS`,
where it is called by the same name with hyphens: `adam-cosine`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gradveil.attacks.attack_files import SUFFIX, read_attack
from gradveil.attacks.base import About, Attack, not_an_attack
from gradveil.attacks.dense_inversion import DenseInversion
from gradveil.attacks.dense_matching import MatchedFeatures
from gradveil.attacks.distances import Cosine, Distance, Likelihood, cosine, l1, l2
from gradveil.attacks.features import FeatureCosine
from gradveil.attacks.hidden_draws import JointMasks, JointNoise
from gradveil.attacks.lbfgs import LBFGS
from gradveil.attacks.linear import LinearInversion
from gradveil.attacks.matching import GradientMatching
from gradveil.attacks.optimizers import SGD, Adam
from gradveil.attacks.peeling import Peeling
from gradveil.attacks.policy_views import ExpectedTransform, GuessedTransform, KnownTransform
from gradveil.attacks.priors import LabelTerm, SentStatistics, Smoothness, Sum, TotalVariation
from gradveil.attacks.races import Race
from gradveil.attacks.starts import ClassMean, Patterned
from gradveil.core.errors import GradveilError, kind_of, unknown
from gradveil.core.importing import import_named

TV = TotalVariation(1e-4)
NATS = Smoothness(1.0)  # a likelihood counts in nats, not from 0 to 2

# Geiping et al. 2020 ("inversed") as Gao et al. 2021 use it, and with the defaults of their code.
adam_cosine = GradientMatching(cosine, Adam(0.1), TV, steps=4_800, signed=True)
ig_default = GradientMatching(cosine, Adam(0.1), TotalVariation(1e-1), steps=4_800)
# As published, at a learning rate that hardly moves ("zhu"): kept to show it.
lbfgs_l2 = GradientMatching(
    l2,
    LBFGS(1e-4, line_search=False),
    TotalVariation(1e-3),
    steps=50,
    restarts=2,
    boxed=False,
    decay=False,
)
lbfgs_cosine = GradientMatching(
    cosine, LBFGS(1e-4, line_search=False), TV, steps=300, restarts=16, signed=True, decay=False
)
# Deep Leakage from Gradients, Zhu et al. 2019, as in the paper, with a line search for each victim.
# That needs full precision: with a GPU's shorter formats it stopped at a median of 14 dB
# (32 images), in float32 on a CPU at 38.
dlg = GradientMatching(l2, LBFGS(1.0), steps=300, boxed=False, decay=False, fast=False)
adam_l1 = GradientMatching(l1, Adam(0.1), TV, steps=4_800, signed=True)
adam_l2 = GradientMatching(l2, Adam(0.1), TV, steps=4_800, signed=True)
sgd_cosine = GradientMatching(cosine, SGD(0.01, 0.9), TV, steps=4_800, signed=True)
# Wei et al. 2020: L2 and a label term, from a pattern.
cpl = replace(dlg, prior=LabelTerm(1e-3), start=Patterned())
# IGA: cosine and total variation.
iga = GradientMatching(cosine, Adam(0.1), TotalVariation(1e-2), steps=4_800, signed=True)
# Ours: many starts, raced by their gradient distance, 32 x 200, 8 x 800, 2 x 2,400 steps.
raced = replace(
    adam_cosine,
    prior=TotalVariation(5e-2),
    steps=2_400,
    restarts=2,
    race=Race(((16, 1 / 12), (4, 1 / 3))),
)
# Toward the features at the first dense layer, which gradients tell of each image of a batch.
# Pull and prior were chosen on public images of two data sets, batches of 8, with lenet and the CNN
# of Flower's quickstart, untrained; then tried on other images, and on that CNN after 500 steps.
features = replace(adam_cosine, distance=FeatureCosine(), prior=TotalVariation(5e-2))
# Toward such features alone, found by matching where gradients do not tell them exactly: of large
# batches, after several local steps. The prior was chosen on public images of two data sets, local
# epochs over 64 of them by that CNN, untrained.
dense_matching = replace(adam_cosine, distance=MatchedFeatures(), prior=TotalVariation(2.0))
# Toward the running statistics that a client in train mode sends along. The weight was chosen on
# public images, batches of 8, of 1e-2 to 10, with a small network, untrained and after five epochs.
sent_statistics = replace(adam_cosine, prior=Sum((TV, SentStatistics(1e-2))))
# Exact, for one image and a first layer that is linear with a bias.
closed_form = LinearInversion()
# Exact, for batches of known labels, in a network of dense layers.
dense_inversion = DenseInversion()
# Exact, for batches, where a ReLU follows that layer.
peeling = Peeling()

# Against policies. Balunovic et al. 2022 showed that policies fail early in training; the others
# know the policy, or what the classes look like.
early_step = GradientMatching(cosine, Adam(0.1), TotalVariation(1e-5), steps=2_000, signed=True)
transform_known = replace(adam_cosine, view=KnownTransform())
transform_drawn = replace(adam_cosine, view=ExpectedTransform(4))
transform_guessed = replace(adam_cosine, view=GuessedTransform(), restarts=8)
class_mean = replace(adam_cosine, start=ClassMean())
# Against PRECODE: leave out the random layers (Balunovic et al. 2022), or find the noise too.
# Against Soteria: leave out its layer.
without_random_layers = replace(adam_cosine, distance=Cosine(leave_out="random"))
without_defended_layers = replace(adam_cosine, distance=Cosine(leave_out="defended"))
joint_noise = replace(adam_cosine, hidden=JointNoise())
# Against dropout: Scheliga et al. 2023.
joint_masks = replace(adam_cosine, hidden=JointMasks())
# Against pruning: match the entries left of one round, or of all rounds where the client feeds back
# the rest (Lin et al. 2018).
masked = replace(adam_cosine, distance=Cosine(nonzero=True))
masked_rounds = replace(adam_cosine, distance=Cosine(rounds=True))
# Against noise: the most likely image, and the mean of eight such searches (Balunovic et al. 2022,
# a Bayesian view).
likelihood = replace(adam_cosine, distance=Likelihood(free=True), prior=NATS)
averaged = replace(likelihood, restarts=8, averaged=True)

PRESETS: Mapping[str, Attack] = {
    name.replace("_", "-"): value for name, value in globals().items() if isinstance(value, Attack)
}
"""All named attacks, in the order of this file."""


GEIPING = "Geiping et al. 2020, Inverting Gradients"
GAO = "Gao et al. 2021, Privacy-preserving Collaborative Learning"
ZHU = "Zhu et al. 2019, Deep Leakage from Gradients"
BALUNOVIC = "Balunovic et al. 2022, Bayesian Framework for Gradient Leakage"
SCHELIGA = "Scheliga et al. 2023, Dropout Is NOT All You Need to Prevent Gradient Leakage"
OURS = "this package"
ONE = "1: 4,800 iterations an image"

ABOUT: Mapping[str, About] = {
    "adam-cosine": About("matches the direction of gradients", "always, first", ONE, GEIPING),
    "ig-default": About(
        "the same with more smoothness, unsigned", "to compare with its code", ONE, GEIPING
    ),
    "lbfgs-l2": About("hardly leaves its start", "to repeat the paper's table", "0.1", GAO),
    "lbfgs-cosine": About("hardly leaves its start", "to repeat the paper's table", "2", GAO),
    "dlg": About("matches gradients by L-BFGS", "small smooth models, such as lenet", "0.3", ZHU),
    "adam-l1": About("matches gradients by absolute differences", "to compare", ONE, GAO),
    "adam-l2": About("matches gradients by squared differences", "to compare", ONE, GAO),
    "sgd-cosine": About("the first by SGD with momentum", "to compare", ONE, GAO),
    "cpl": About(
        "dlg from a pattern, with a label term",
        "small smooth models",
        "0.3",
        "Wei et al. 2020, A Framework for Evaluating Client Privacy Leakages",
    ),
    "iga": About("the first with more smoothness", "to compare", ONE, GEIPING),
    "raced": About("many starts, the best go on", "trained models: the strongest", "4", OURS),
    "features": About(
        "matches what dense layers tell of each image too",
        "batches with known labels, fewer images than classes",
        "1.5 to 3",
        OURS,
    ),
    "dense-matching": About(
        "finds what dense layers get of each image, then images that give it",
        "larger batches and local steps, known labels, several dense layers at the end",
        "0.1 and seconds",
        OURS,
    ),
    "sent-statistics": About(
        "matches the running statistics that clients send too",
        "train mode with batch norm, to compare",
        "1.3",
        "Yin et al. 2021, See through Gradients; here with those that were sent",
    ),
    "closed-form": About(
        "divides two gradients of a linear first layer",
        "one image, and a linear first layer with a bias",
        "a moment",
        "Phong et al. 2018, Privacy-Preserving Deep Learning",
    ),
    "dense-inversion": About(
        "solves for every image, layer by layer",
        "batches with known labels, a network of dense layers, fewer images than classes",
        "seconds",
        OURS,
    ),
    "peeling": About(
        "solves for every image of a batch",
        "batches, and a linear first layer before a ReLU",
        "seconds",
        "Dimitrov et al. 2024, SPEAR: Exact Gradient Inversion of Batches",
    ),
    "early-step": About(
        "the first with hardly any smoothness", "policies, early in training", "0.4", BALUNOVIC
    ),
    "transform-known": About(
        "looks through the policy and its draws", "policies; the worst case", ONE, OURS
    ),
    "transform-drawn": About(
        "averages over draws of the policy", "policies whose draws are secret", "4", OURS
    ),
    "transform-guessed": About(
        "looks for the draws too", "policies whose draws are secret", "8", OURS
    ),
    "class-mean": About("starts from public class means", "policies, public images", ONE, OURS),
    "without-random-layers": About("leaves random layers out", "PRECODE", ONE, BALUNOVIC),
    "without-defended-layers": About("leaves changed layers out", "Soteria", ONE, BALUNOVIC),
    "joint-noise": About("looks for the noise too", "PRECODE", ONE, BALUNOVIC),
    "joint-masks": About("looks for the masks too", "dropout", ONE, SCHELIGA),
    "masked": About("matches what is left of gradients", "pruning", ONE, OURS),
    "masked-rounds": About("matches several rounds at once", "pruning with feedback", ONE, OURS),
    "likelihood": About("looks for the most likely image", "noise", ONE, BALUNOVIC),
    "averaged": About("the mean of eight such searches", "noise", "8", BALUNOVIC),
}
"""What people are told of each preset; a cost is relative to that of the first."""


def names() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(PRESETS)


def find(name: str, also: Iterable[str] = ()) -> Attack:
    """Return the attack of this name.

    That is a preset, such as `dlg`; an attack of the caller's, `package.module:NAME`, which is
    imported; a file that a tuning wrote, `FOLDER/attack.toml`; or a combination of such, `A+B`,
    which is one search with the settings of both. `also` are further names that the caller
    understands, for the message about an unknown one.
    """
    parts = split_name(name)
    if not all(part in PRESETS or ":" in part or is_file(part) for part in parts):
        raise unknown("attack", name, (*PRESETS, *also))
    if len(set(parts)) < len(parts):
        raise GradveilError(f"attack {name!r} names a part twice: name each once")
    attacks = {part: _find_part(part) for part in parts}
    return attacks[name] if len(parts) == 1 else _combine(attacks, name)


def split_name(name: str) -> list[str]:
    """Return the parts of a name `A+B`; a path to one file may hold a plus."""
    return [name] if is_file(name) and Path(name).exists() else name.split("+")


def is_file(part: str) -> bool:
    """Tell whether a part of a name is the path of an attack file."""
    return part.endswith(SUFFIX)


def _find_part(part: str) -> Attack:
    if part in PRESETS:
        return PRESETS[part]
    return read_attack(Path(part)) if is_file(part) else _import(part)


def find_attack(given: Attack | str) -> Attack:
    """Return an attack itself, or the one of this name."""
    if isinstance(given, str):
        return find(given)
    if isinstance(given, Attack):
        return given
    raise not_an_attack(given, "attack")


def _import(reference: str) -> Attack:
    value = import_named(reference, "attack", lambda value: isinstance(value, Attack))
    if isinstance(value, Attack):
        return value
    if isinstance(value, type) and issubclass(value, Attack):
        kind = value.__name__
        raise GradveilError(
            f"attack {reference!r} is a class: name a value of it, such as NAME = {kind}(...)"
        )
    raise GradveilError(
        f"attack {reference!r} is {kind_of(value)}: expected a value of a subclass "
        "of gradveil.attacks.Attack"
    )


def _combine(attacks: Mapping[str, Attack], name: str) -> GradientMatching:
    """Return the standard attack with every setting in which one of the attacks differs from it.

    Steps and restarts are those of the attack that races, if one does: its heats have many more.
    Its prior gives way to that of another part, which belongs to that part's distance.
    """
    differing: dict[str, dict[str, Any]] = {}  # by setting, then by part
    for part, attack in attacks.items():
        if not isinstance(attack, GradientMatching):
            raise GradveilError(
                f"attack {name!r}: {part} matches no gradients, so nothing can be added to it; "
                "run it by itself"
            )
        for setting in fields(attack):
            value = getattr(attack, setting.name)
            if value != getattr(adam_cosine, setting.name):
                differing.setdefault(setting.name, {})[part] = value
    for part in differing.get("race", {}):
        for length in {"steps", "restarts"} & differing.keys():
            values = differing[length]
            differing[length] = {part: values[part]} if part in values else values
        if len(differing.get("prior", {})) > 1:
            differing["prior"].pop(part, None)
    distance = _combine_distances(differing.pop("distance", {}), name)
    others = {setting: _agree(setting, values, name) for setting, values in differing.items()}
    return replace(adam_cosine, distance=distance, **others)


def _combine_distances(distances: Mapping[str, Distance], name: str) -> Distance:
    kinds = {
        part: type(distance) for part, distance in distances.items() if type(distance) is not Cosine
    }
    kind: type[Distance] = _agree("distance", kinds, name) if kinds else Cosine
    differing: dict[str, dict[str, Any]] = {}
    for part, distance in distances.items():
        for setting in fields(distance):
            value = getattr(distance, setting.name)
            if value != setting.default:
                differing.setdefault(setting.name, {})[part] = value
    if {*differing.get("leave_out", {}).values()} == {"random", "defended"}:
        differing["leave_out"] = {name: "both"}
    return kind(**{setting: _agree(setting, values, name) for setting, values in differing.items()})


def _agree(setting: str, values: Mapping[str, Any], name: str) -> Any:
    """Return the value that all parts of a combination have for a setting."""
    (first, value), *others = values.items()
    for part, other in others:
        if other != value:
            raise GradveilError(
                f"attack {name!r}: {first} and {part} cannot be combined, "
                f"each has a {setting} of its own"
            )
    return value
