"""The files that jobs leave, as types. Settings of trainings and searches carry no `format`.

A field without a default must be there. Fields that a type does not name are let through in
settings, which are compared whole before a job goes on, and refused in records and results.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Count = Annotated[int, Meta(ge=0, le=2**62)]
Positive = Annotated[int, Meta(ge=1, le=2**62)]
Share = Annotated[float, Meta(ge=0, le=1)]
Level = Annotated[float, Meta(ge=-1e100, le=1e100)]  # its square is a number too
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
ShortSha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")]  # its first letters


class AuditCase(Struct, frozen=True, forbid_unknown_fields=True):
    """A case within the settings of an audit; `folder` lies beside them."""

    defense: str
    clean: bool
    step: str | None
    checkpoint: str | None
    folder: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,99}$")]
    control: str = ""  # the defense that it is the control of


class Asked(Struct, frozen=True):
    """What an audit and each of its cases are asked for."""

    format: str
    data: str
    model: str
    images: Positive
    labels: str
    seed: int
    batch_size: Positive = 1
    steps: Positive | None = None
    restarts: Positive | None = None
    local_lr: float | UnsetType = UNSET
    local_steps: Positive | UnsetType = UNSET
    local_epochs: Positive = 1
    local_batch_size: Positive | None = None
    client_momentum: Share = 0.0
    client_weight_decay: float = 0.0
    averaged_clients: Positive = 1
    train_mode: bool = False
    split: str = "test"
    first: Count | None = None
    sham: bool = True
    budget: float | None = None
    share: Share | None = None
    victims_at_once: Positive | None = None
    image_size: Positive | None = None
    scored: Count = 0  # images that searches scored the defenses on


class AuditSettings(Asked, frozen=True, kw_only=True):
    """settings.json of an audit."""

    attacks: list[str]
    cases: Annotated[list[AuditCase], Meta(min_length=1)]


class CaseSettings(Asked, frozen=True, kw_only=True):
    """settings.json of a case of an audit."""

    attacks: dict[str, str]  # the settings of each, by name
    defense: str
    clean: bool
    step: str | None
    checkpoint: str | None
    changes_images: bool
    knows: dict[str, str]
    left_out: dict[str, str]
    control: str = ""  # the defense that it is the control of
    comes_with: str | None = None  # the control of its defense, audited or not
    searches: dict[str, str] | None = None  # restarts x steps of each attack that has them
    protected: bool = False
    candidates: Count | UnsetType = UNSET
    no_lineup: str = ""
    passed_over: dict[str, Count] | None = None  # classes too small to draw from, and their images
    note: str | None = None  # how recorded updates are taken, and which are not attacked
    guess: dict[str, str] | UnsetType = UNSET
    class_names: dict[str, str] | None = None  # of the images attacked, by label
    victims_scored: Count = 0  # of the images attacked, those that searches scored defenses on
    weights_sha256: str | UnsetType = UNSET
    images_sha256: str | UnsetType = UNSET
    versions: dict[str, str] | UnsetType = UNSET
    device: str | UnsetType = UNSET


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
    augment: bool
    fraction: float
    image_size: Positive | None
    save_at: list[Count]
    precision: str
    seed: int
    policy: str | UnsetType = UNSET  # only in files of older versions: a policy is a defense now
    defense: str | UnsetType = UNSET
    delta: Share | None = None
    test: str | UnsetType = UNSET


class FederationSettings(Struct, frozen=True):
    """settings.json of a federated training."""

    data: str
    model: str
    clients: Positive
    rounds: Positive
    batch_size: Positive
    lr: float
    momentum: float
    weight_decay: float
    fraction: Share
    train_mode: bool
    defense: str
    partition: str
    spy_rounds: list[Positive]
    attackers: list[str]
    seed: int
    spy: Count
    audited: Positive
    graph: str | None = None
    local_epochs: Positive | None = None
    local_steps: Positive | None = None
    average_of: Positive | None = None
    steps: Positive | None = None
    image_size: Positive | None = None
    test: str | UnsetType = UNSET


class FederatedRound(Struct, frozen=True, forbid_unknown_fields=True):
    """A round within the history of a federated training."""

    round: Positive
    test_accuracy: Share
    clients: Count
    seconds: float


class KeptState(Struct, frozen=True, forbid_unknown_fields=True):
    """What a client's defense keeps between rounds; `state` is what `torch.save` makes of it."""

    defense: str
    rounds: Count
    state: bytes


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

    mse: Level
    psnr: Level
    ssim: Level
    psnr_affine: Level
    over_blind: Level
    identified: Level | UnsetType = UNSET  # format 2
    rank: Positive | UnsetType = UNSET  # where there is a line-up
    rank_4: Positive | UnsetType = UNSET  # with up to 4 pixels of room; in some older records
    rank_6: Positive | UnsetType = UNSET
    rank_8: Positive | UnsetType = UNSET  # with up to 8, of attacks and shams


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
    distance: Level | None
    candidates: Count
    scores: Truths
    seconds: Level
    update: Count | None = None
    chance: Chances | None = None  # format 2
    certain: bool | None = None

    def __post_init__(self) -> None:
        whole = self.scores.used is not UNSET and self.scores.original is not UNSET
        if self.status == "ok" and not whole:
            raise ValueError("scores: used and original are needed where the status is ok")


class PictureFacts(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The facts inside a file of pictures: images by their numbers, and iterations of frames."""

    images: list[Count]
    frame_images: list[Count] = []
    frame_steps: list[Count] = []


class TrainedModel(Struct, frozen=True, forbid_unknown_fields=True):
    """model.json of a case; null for an untrained model."""

    accuracy: Share
    tested: Positive
    under: str | None
    step: Count | None
    measured_on: Literal["test", "others", "victims"] | None = None
    weights_sha256: str | None = None


class Quantity(Struct, frozen=True, forbid_unknown_fields=True):
    """A mean over n images or batches, and its standard error, which a single value has not."""

    mean: float
    error: float | None
    n: Count

    def text(self, share: bool = False) -> str:
        """Return the mean and its error, such as `1.5 ± 0.2`; a share in percent."""
        error = "" if self.error is None else f" ± {self.error:{'.1%' if share else '.2g'}}"
        return f"{self.mean:{'.1%' if share else '.4g'}}{error}"


class FoundPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """A trial within search.json."""

    number: Count
    policy: str
    state: Literal["scored", "inaccurate", "dropped"]
    quantities: dict[str, Quantity]


class Savings(Struct, frozen=True):
    """The work that a race left undone, within search.json.

    Leakage was measured on `scored` of `all` images, and the accuracy of `unjudged` policies never.
    """

    dropped: Count
    scored: Count
    all: Count
    unjudged: Count

    @property
    def share(self) -> float:
        """The share of all images that no policy was scored on."""
        return 1 - self.scored / self.all if self.all else 0.0


class SearchFile(Struct, frozen=True, forbid_unknown_fields=True):
    """search.json; `kept` and `front` are numbers of trials."""

    format: str
    settings: dict[str, Any]
    trials: list[FoundPolicy]
    kept: Annotated[list[Count], Meta(min_length=1)]
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
    scored: list[ShortSha256] = []  # none in files of older versions


class TrialResult(Struct, frozen=True):
    """`result` of a trial: its figures, image by image."""

    state: Literal["scored", "inaccurate", "dropped"]
    values: dict[str, list[float]]


class TrialAttributes(Struct, frozen=True):
    """The user attributes of a trial; a sampler may add its own."""

    owner: str | UnsetType = UNSET
    policy: str | UnsetType = UNSET
    settings: str | UnsetType = UNSET  # of an attack
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
    loss_scale: Annotated[float, Meta(gt=0, le=1e30)] = 1.0
    history: list[dict[str, float]] | UnsetType = UNSET
    epsilon: float | None = None
    delta: Share | None = None
    versions: dict[str, str] | UnsetType = UNSET


class RankedPolicy(Struct, frozen=True):
    """A [[policy]] of policies.toml; its figures stand beside these fields."""

    policy: str
    rank: Positive | UnsetType = UNSET
    trial: Count | UnsetType = UNSET


class ScoredImages(Struct, frozen=True):
    """[images] of policies.toml: digests of the pictures that policies were scored on."""

    scored: list[ShortSha256]


class PoliciesFile(Struct, frozen=True):
    """policies.toml; in files of older versions there are no `images`."""

    best: str
    policy: Annotated[list[RankedPolicy], Meta(min_length=1)]
    hybrid: str | None = None
    no_hybrid: str = "the search found none"
    search: dict[str, Any] = {}
    images: ScoredImages | None = None


class Highest(Struct, frozen=True, forbid_unknown_fields=True):
    """[most] of a file of thresholds: what no attack of a case may exceed."""

    identified: Share | None = None  # share of the images with rank 1 in their line-up
    identified_high: Share | None = None  # upper end of the 95% interval of that share
    over_blind: float | None = None  # mean dB over the blind guess
    psnr: float | None = None  # mean, dB
    ssim: float | None = None  # mean
    failed: Share | None = None  # share of the images on which an attack failed


class Lowest(Struct, frozen=True, forbid_unknown_fields=True):
    """[least] of a file of thresholds: what a case has to reach."""

    accuracy: Share | None = None
    images: Positive | None = None  # attacked


class ThresholdsFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of thresholds, which `gradveil report` and `gradveil audit` decide a run by.

    `defenses` are those that are judged; without any, all are. With `positive_control` an attack
    must have worked where it is known to work.
    """

    most: Highest = Highest()
    least: Lowest = Lowest()
    defenses: list[str] | None = None
    positive_control: bool = False


class AssessmentFile(Struct, frozen=True):
    """assessment.json, of which the advice is read back."""

    advice: list[str]


class ImagesUsed(Struct, frozen=True, forbid_unknown_fields=True):
    """[images] of attack.toml: digests of the pictures that settings were chosen and tested on."""

    tuned_on: Annotated[list[Sha256], Meta(min_length=1)]
    held_out: list[Sha256]


class Compared(Struct, frozen=True, forbid_unknown_fields=True):
    """A mean of the tuned and of the standard attack, and p of the one-sided paired test."""

    tuned: float
    standard: float
    p: Share


class TuningGain(Struct, frozen=True, forbid_unknown_fields=True):
    """[gain] of attack.toml: on `n` images that the attack was not tuned on."""

    n: Positive
    updates: Positive
    candidates: Positive  # of each line-up
    lineup: Compared
    ssim: Compared


class TuningCost(Struct, frozen=True, forbid_unknown_fields=True):
    """[cost] of attack.toml: iterations of an image, over all its restarts and heats."""

    tuned: Positive
    standard: Positive


class AttackFile(Struct, frozen=True, forbid_unknown_fields=True):
    """attack.toml: an attack that was tuned."""

    format: str
    gradveil: str
    attack: dict[str, Any]
    tuning: dict[str, Any]
    cost: TuningCost
    gain: TuningGain
    images: ImagesUsed


class TuningSettings(Struct, frozen=True):
    """settings.json of a tuning."""

    data: str
    model: str
    trials: Positive
    images: Positive
    held_out: Positive
    work: Positive
    defense: str
    labels: str
    seed: int
    space: dict[str, Any] | Literal["usual"]
    batch_size: Positive = 1
    checkpoint: str | None = None
    public: str | None = None
    budget: float | None = None
    image_size: Positive | None = None
    train_mode: bool = False


class TunedTrial(Struct, frozen=True, forbid_unknown_fields=True):
    """A trial within tuning.json: what was drawn, and the means over the updates."""

    number: Count
    state: Literal["scored", "dropped"]
    drawn: dict[str, str | float]
    updates: Positive
    missed: float
    lineup: Share
    ssim: float


class TuningFile(Struct, frozen=True, forbid_unknown_fields=True):
    """tuning.json; `best` is the number of a trial, `seconds` are those of an image."""

    format: str
    settings: dict[str, Any]
    trials: Annotated[list[TunedTrial], Meta(min_length=1)]
    best: Count
    seconds: dict[str, float]
    notes: list[str]
    study: str
    storage: str


class CacheFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest of a cache entry."""

    classes: Annotated[list[str], Meta(min_length=1)]
    mean: list[float]
    std: list[float]


KINDS: dict[str, tuple[str, type[Struct]]] = {
    "clients": ("a federated training", FederationSettings),
    "space": ("a tuning", TuningSettings),
    "trials": ("a search", SearchSettings),
    "epochs": ("a training", TrainingSettings),
    "cases": ("an audit", AuditSettings),
    "attacks": ("a case of an audit", CaseSettings),
}
"""The kind and the type of settings, by a setting that the kinds after it have not."""
