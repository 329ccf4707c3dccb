"""The experiments of the papers, as frozen values: claim, what counts as agreeing, and rows."""

from collections.abc import Sequence

from gradveil.core.errors import unknown
from gradveil.papers.beyond import (
    Breakers,
    LargerPictures,
    OverTraining,
    RacedPolicies,
    RealClients,
    Searches,
    Tuning,
)
from gradveil.papers.experiments import (
    BEYOND,
    HYBRID,
    LONG,
    NONE,
    PAPER,
    PRECODE,
    RANDOM,
    REPLICATION,
    AttackTable,
    Curves,
    DefenseTable,
    Experiment,
    LayerSimilarities,
    Pictures,
    PolicyTable,
    ScoreAgainstAttack,
    Setting,
    Similarities,
    SingleScores,
)
from gradveil.papers.networks import RESNET18
from gradveil.papers.precode import PrecodeAccuracy, PrecodeGrid, PrecodeReconstructions
from gradveil.papers.published import claim

CIFAR_RESNET = Setting("cifar100", "resnet20-4")
CIFAR_CONVNET = Setting("cifar100", "convnet")
FASHION_RESNET = Setting("fashion-mnist", "resnet20-4")
FASHION_CONVNET = Setting("fashion-mnist", "convnet")
TINY = Setting("tiny-imagenet", "resnet20-4")
BOTH = (PAPER, REPLICATION)

LOWER = (
    "Attacked by the strongest attack, at most 10% of images can have rank 1 in the line-up under "
    "the hybrid; PSNR, as published, falls below that without a policy."
)

TABLE_1A = PolicyTable(
    "table1a",
    BOTH,
    claim(1),
    LOWER,
    CIFAR_RESNET,
    (NONE, RANDOM, "3-1-7", "43-18-18", HYBRID),
    repeated=True,
)
TABLE_1B = PolicyTable(
    "table1b",
    BOTH,
    claim(1),
    LOWER,
    CIFAR_CONVNET,
    (NONE, RANDOM, "21-13-3", "7-4-15", "7-4-15+21-13-3"),
)
TABLE_1C = PolicyTable(
    "table1c",
    BOTH,
    claim(1),
    LOWER,
    FASHION_RESNET,
    (NONE, RANDOM, "19-15-45", "2-43-21", "2-43-21+19-15-45"),
)
TABLE_1D = PolicyTable(
    "table1d",
    BOTH,
    claim(1),
    LOWER,
    FASHION_CONVNET,
    (NONE, RANDOM, "42-28-42", "14-48-48", "14-48-48+42-28-42"),
)

EXPERIMENTS: dict[str, Experiment] = {
    experiment.id: experiment
    for experiment in (
        Similarities(
            "exp1",
            BOTH,
            "With a policy, GradSim rises later from noise to the image than without.",
            "The mean GradSim with the policy lies below that without, at the middle of the line.",
        ),
        Pictures(
            "exp2",
            BOTH,
            "Under the hybrid, reconstructions cannot be recognized.",
            "To be looked at: the grids of the hybrid show less of the image than those of none.",
            (TABLE_1A, TABLE_1B, TABLE_1C, TABLE_1D),
        ),
        TABLE_1A,
        TABLE_1B,
        TABLE_1C,
        TABLE_1D,
        Curves(
            "table1a-200",
            (PAPER,),
            claim(4),
            "200 epochs give the accuracy of 60 within 2 points.",
            CIFAR_RESNET,
            (NONE, HYBRID),
            epochs=LONG,
        ),
        AttackTable(
            "table2",
            BOTH,
            claim(2),
            "Under the hybrid at most 10% of images can have rank 1 in the line-up, by each attack "
            "that works without it; as published, its PSNR falls.",
            CIFAR_RESNET,
            ("lbfgs-l2", "adam-cosine", "lbfgs-cosine", "adam-l1", "adam-l2", "sgd-cosine"),
            slow=("lbfgs-l2", "lbfgs-cosine"),
        ),
        PolicyTable(
            "table3-defaults",
            (REPLICATION,),
            "The policies defeat the further attack ig-default too.",
            "The mean PSNR with each policy is below that without.",
            CIFAR_RESNET,
            (NONE, "3-1-7", "43-18-18", HYBRID),
            attack="ig-default",
            strongest=None,
        ),
        DefenseTable(
            "table-defenses",
            BOTH,
            "Policies protect better than pruning and noise, at a smaller cost of accuracy.",
            "Under the stronger of two attacks the hybrid has fewer images with rank 1 than every "
            "other defense, and a higher accuracy.",
            CIFAR_RESNET,
            (
                NONE,
                "prune:0.7",
                "prune:0.95",
                "prune:0.99",
                "laplacian:0.001",
                "laplacian:0.01",
                "gaussian:0.001",
                "gaussian:0.01",
                HYBRID,
            ),
        ),
        PolicyTable(
            "table4a",
            BOTH,
            claim(3),
            LOWER,
            FASHION_RESNET,
            (NONE, "3-1-7", "43-18-18", HYBRID),
        ),
        PolicyTable(
            "table4b",
            BOTH,
            claim(3),
            LOWER,
            FASHION_CONVNET,
            (NONE, "21-13-3", "7-4-15", "7-4-15+21-13-3"),
        ),
        PolicyTable(
            "table5",
            (REPLICATION,),
            "CIFAR-100's policies protect Tiny ImageNet too.",
            LOWER,
            TINY,
            (NONE, HYBRID),
            most=32,  # each has four times the pixels of the others
        ),
        Curves(
            "exp7",
            BOTH,
            claim(4),
            "With the hybrid the accuracy is at most 1 point lower than without.",
            CIFAR_RESNET,
            (NONE, "3-1-7", "43-18-18", HYBRID),
        ),
        LayerSimilarities(
            "exp8",
            BOTH,
            claim(5),
            "At the end of the attack the hybrid lowers the likeness in both shallow layers, and "
            "in both deep layers by less.",
            CIFAR_RESNET,
            (NONE, RANDOM, HYBRID),
        ),
        SingleScores(
            "exp9", BOTH, claim(6), "All five are among our five lowest; four in the replication."
        ),
        ScoreAgainstAttack(
            "exp10",
            BOTH,
            claim(7),
            "Pearson's r of S_pri and PSNR is above 0, and 0.697 lies in its 95% interval.",
        ),
        SingleScores(
            "ext2",
            (REPLICATION,),
            "The best transformations of CIFAR-100 are the best of Tiny ImageNet too.",
            "Three or more of the paper's five are among the five lowest.",
            "tiny-imagenet",
            1.0,  # the part that is at hand has 10,000 training images, a tenth of the whole
        ),
        PrecodeAccuracy(
            "precode-acc",
            (PRECODE,),
            "PRECODE does not lower the accuracy.",
            "Its accuracy is at most 1 point below that without a defense.",
        ),
        PrecodeReconstructions(
            "precode-rec",
            (PRECODE,),
            "PRECODE prevents recognizable reconstructions.",
            "At most 10% of images can have rank 1 in the line-up; ours adds PRECODE's breakers.",
        ),
        PrecodeGrid(
            "precode-grid",
            (PRECODE,),
            "k does not matter; beta = 0.1 and more than one module cost accuracy.",
            "Accuracies differ by at most 1 point over k, and fall at beta = 0.1 and with modules.",
        ),
        Searches(
            "searches",
            (BEYOND,),
            "A search finds policies that leak less than none and than random policies.",
            "On the semi-trained model the policy found has fewer images with rank 1 than both.",
        ),
        OverTraining(
            "over-training",
            (BEYOND,),
            "Trained models leak less than untrained ones, also to the strongest attack.",
            "At the end of training the strongest attack has fewer images with rank 1 than before.",
            CIFAR_RESNET,
        ),
        RealClients(
            "clients",
            (BEYOND,),
            "Batches, batch norm in train mode and local steps hide images.",
            "At most 10% of images can have rank 1, and fewer than of single ones, by any attack.",
            CIFAR_RESNET,
        ),
        RacedPolicies(
            "raced-policies",
            (BEYOND,),
            "S_pri foretells what the strongest attack finds under a policy.",
            "Over the policies, rank 1 of the strongest attack falls as S_pri falls.",
        ),
        Tuning(
            "tuning",
            (BEYOND,),
            "Tuning on public images makes the attack stronger than the raced one.",
            "On the same images the tuned attack has more with rank 1, before training and after.",
            CIFAR_RESNET,
        ),
        LargerPictures(
            "larger",
            (BEYOND,),
            "Images of 64 pixels and a ResNet-18 resist the attacks.",
            "At most 10% of images can have rank 1 in the line-up, also by the strongest attack.",
            Setting("tiny-imagenet", RESNET18),
        ),
        Breakers(
            "breakers",
            (BEYOND,),
            "Defenses that stop the standard attack stop those that know them too.",
            "At most 10% of images can have rank 1 in the line-up, by the best of its breakers.",
        ),
    )
}
"""All experiments by their id."""

ALIASES: dict[str, tuple[str, ...]] = {
    "exp3": ("table1a", "table1b", "table1c", "table1d"),
    "exp4": ("table-defenses",),
    "exp5": ("table2",),
    "exp6": ("table4a", "table4b"),
    "ext1": ("table5",),
    "table1": ("table1a", "table1b", "table1c", "table1d"),
    "table3": ("table-defenses",),
    "table4": ("table4a", "table4b"),
    "precode": ("precode-acc", "precode-rec", "precode-grid"),
}
"""Other names, as the documents number their experiments."""


def find_experiments(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of these ids or aliases, each once."""
    found: dict[str, Experiment] = {}
    for name in names:
        if name not in EXPERIMENTS and name not in ALIASES:
            raise unknown("experiment", name, (*EXPERIMENTS, *ALIASES))
        for each in ALIASES.get(name, (name,)):
            found[each] = EXPERIMENTS[each]
    return [*found.values()]
