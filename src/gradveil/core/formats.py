"""The files that jobs of version 0.1.0 leave, as types. Settings carry no `format` there.

A field without a default must be there. Fields that a type does not name are let through in
settings, which are compared whole before a job goes on, and refused in records and results.
"""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

Count = Annotated[int, Meta(ge=0, le=2**62)]
Positive = Annotated[int, Meta(ge=1, le=2**62)]
Share = Annotated[float, Meta(ge=0, le=1)]


class AuditSettings(Struct, frozen=True):
    """settings.json of an audit."""

    data: str
    model: str
    policy: str
    images: Positive
    labels: str
    seed: int
    attacks: dict[str, str]  # the settings of each, by name
    defense: str | UnsetType = UNSET  # absent where a policy alone could be named
    clean: bool = False
    checkpoint: str | None = None
    batch_size: Positive = 1
    steps: Positive | None = None
    restarts: Positive | None = None
    local_lr: float | UnsetType = UNSET
    local_steps: Positive | UnsetType = UNSET
    train_mode: bool = False
    split: str = "test"
    first: Count = 0
    victims_at_once: Positive | None = None
    image_size: Positive | None = None
    fitting: bool = False
    positive: bool = False
    protected: bool = False
    candidates: Count | UnsetType = UNSET
    knows: dict[str, str] | UnsetType = UNSET
    left_out: dict[str, str] | UnsetType = UNSET
    weights_sha256: str | UnsetType = UNSET
    images_sha256: str | UnsetType = UNSET
    versions: dict[str, str] | UnsetType = UNSET
    device: str | UnsetType = UNSET


class GridCase(Struct, frozen=True, forbid_unknown_fields=True):
    """A case of a grid of audits."""

    defense: str
    clean: bool
    step: str | None
    checkpoint: str | None


class GridSettings(Struct, frozen=True):
    """settings.json of a grid of audits."""

    data: str
    model: str
    images: Positive
    labels: str
    seed: int
    attacks: list[str]
    cases: list[GridCase]
    batch_size: Positive = 1
    steps: Positive | None = None
    restarts: Positive | None = None
    local_lr: float | UnsetType = UNSET
    local_steps: Positive | UnsetType = UNSET
    train_mode: bool = False
    split: str = "test"
    first: Count = 0
    victims_at_once: Positive | None = None
    image_size: Positive | None = None


class TrainingSettings(Struct, frozen=True):
    """settings.json of a training."""

    data: str
    model: str
    epochs: Count
    lr: float
    momentum: float
    weight_decay: float
    batch_size: Positive
    loss_scale: float
    policy: str
    augment: bool
    fraction: float
    image_size: Positive | None
    save_at: list[Count]
    precision: str
    seed: int
    defense: str | UnsetType = UNSET
    delta: Share | None = None


class SearchSettings(Struct, frozen=True):
    """settings.json of a search, and the `settings` within its search.json."""

    data: str
    model: str
    trials: Positive
    keep: Positive
    threshold: float
    score: str
    rule: str
    sampler: str
    seed: int
    checkpoint: str | None = None
    rank_by: str | UnsetType = UNSET
    race: bool = False
    race_confidence: Share | UnsetType = UNSET
    images: Positive | None = None
    attack: str | UnsetType = UNSET
    probe_steps: Positive | UnsetType = UNSET
    hybrid: Positive | UnsetType = UNSET
    at_once: Positive | None = None
    audit_images: Positive | UnsetType = UNSET
    audit_steps: Positive | None = None
    augment: bool = True
    image_size: Positive | None = None


class ImageScores(Struct, frozen=True, forbid_unknown_fields=True):
    """The scores of one image against one truth."""

    mse: float
    psnr: float
    ssim: float
    psnr_affine: float
    over_blind: float
    identified: float


class Truths(Struct, frozen=True, forbid_unknown_fields=True):
    """Scores against the images used and the original ones; none of an attack that failed."""

    used: ImageScores | UnsetType = UNSET
    original: ImageScores | UnsetType = UNSET


class Chances(Struct, frozen=True, forbid_unknown_fields=True):
    """The chance of identification by luck or by the label alone, for each truth."""

    used: Share
    original: Share


class RecordLine(Struct, frozen=True, forbid_unknown_fields=True):
    """A line of records.jsonl: what one attack made of one image."""

    experiment: str
    kind: str
    attack: str
    chunk: Count
    image: Count
    status: str
    label: int
    label_found: int | None
    distance: float | None
    candidates: Count
    chance: Chances
    scores: Truths
    seconds: float

    def __post_init__(self) -> None:
        whole = self.scores.used is not UNSET and self.scores.original is not UNSET
        if self.status == "ok" and not whole:
            raise ValueError("scores: used and original are needed where the status is ok")


class TrainedModel(Struct, frozen=True, forbid_unknown_fields=True):
    """model.json beside an audit of a grid; null for an untrained model."""

    accuracy: Share
    tested: Positive
    under: str | None
    step: Count | None


class Quantity(Struct, frozen=True, forbid_unknown_fields=True):
    """A measured mean with its standard error and the number of images."""

    mean: float
    error: float | None
    n: Count


class FoundPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """A trial within search.json."""

    number: Count
    policy: str
    state: str
    quantities: dict[str, Quantity]


class Savings(Struct, frozen=True):
    """What a race saved, within search.json."""

    dropped: Count
    scored: Count
    all: Count
    unjudged: Count


class SearchFile(Struct, frozen=True, forbid_unknown_fields=True):
    """search.json; `kept` and `front` are numbers of trials."""

    format: str
    settings: dict[str, Any]
    trials: list[FoundPolicy]
    kept: list[Count]
    front: list[Count]
    best: str
    hybrid: str | None
    no_hybrid: str
    saving: Savings | None
    notes: list[str]
    study: str
    storage: str
    confirmed: dict[str, dict[str, str]]
    words: list[str]


class OwnerEntry(Struct, frozen=True):
    """`owner:<id>` of a study: the process that holds trials; `beat` is None once it has left."""

    host: str
    pid: Positive
    start: str | None
    beat: float | None


class TrialResult(Struct, frozen=True):
    """`result` of a trial: its figures, image by image."""

    state: str
    values: dict[str, list[float]]


class TrialAttributes(Struct, frozen=True):
    """The user attributes of a trial; a sampler may add its own."""

    owner: str | UnsetType = UNSET
    policy: str | UnsetType = UNSET
    result: TrialResult | UnsetType = UNSET


class CheckpointFacts(Struct, frozen=True):
    """The settings inside a checkpoint. They are hints: a file may have been made by hand."""

    model: str | UnsetType = UNSET
    data: str | UnsetType = UNSET
    policy: str | UnsetType = UNSET
    defense: str | UnsetType = UNSET
    augment: bool = True
    seed: int = 0
    epochs: Count | UnsetType = UNSET
    step: Count | UnsetType = UNSET
    images: Count | UnsetType = UNSET
    channels: Positive | UnsetType = UNSET
    classes: Positive | UnsetType = UNSET
    image_size: Positive | None = None
    test_accuracy: Share | UnsetType = UNSET
    history: list[dict[str, float]] | UnsetType = UNSET
    epsilon: float | None = None
    delta: Share | None = None
    versions: dict[str, str] | UnsetType = UNSET


class RankedPolicy(Struct, frozen=True):
    """A [[policy]] of policies.toml; its figures stand beside these fields."""

    policy: str
    rank: Positive | UnsetType = UNSET
    trial: Count | UnsetType = UNSET


class PoliciesFile(Struct, frozen=True):
    """policies.toml."""

    best: str
    policy: Annotated[list[RankedPolicy], Meta(min_length=1)]
    hybrid: str | None = None
    no_hybrid: str = "the search found none"
    search: dict[str, Any] = {}


class CacheFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest of a cache entry."""

    classes: Annotated[list[str], Meta(min_length=1)]
    mean: list[float]
    std: list[float]


LANDED: dict[str, tuple[str, type[Struct]]] = {
    "cases": ("a grid of audits", GridSettings),
    "trials": ("a search", SearchSettings),
    "epochs": ("a training", TrainingSettings),
    "attacks": ("an audit", AuditSettings),
}
"""The kind and the type of settings, by a setting that the kinds after it have not."""
