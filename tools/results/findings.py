"""What holds: the main findings, each with its figure, n and the section that it comes from."""

from gradveil.audits.attackers import MATCHED
from gradveil.papers.experiments import HYBRID, NONE, STANDARD, STRONGEST
from gradveil.papers.figures import FINAL_STEP
from gradveil.papers.verdicts import FAILS, HOLDS, IN_PART, UNTOLD
from results import batches, exact, federated, guard, reproduce, scores
from results.records import audit, chance, hits, link, mcnemar, ranked_first, row


def section() -> str:
    findings = (
        _trained(),
        _hybrid(),
        _stages(),
        _defenses(),
        _precode(),
        _s_pri(),
        _scores(),
        _exact(),
        _flower(),
        _guard(),
    )
    return "\n".join(["## What holds", *(f"- {finding}" for finding in findings)])


def _figures(name: str, verdict: str) -> tuple[str, ...]:
    """Return the figures that decided on a claim, whose verdict must be as the finding says."""
    found = reproduce.decisions()[name]
    assert found.verdict.startswith(verdict), f"{name}: {found.verdict}; mend the findings"
    return found.figures


def _trained() -> str:
    plain = audit("raced-60-epochs").cases[0]
    weak, strong, sham = (
        row(plain, name, kind)
        for name, kind in ((STANDARD, "attack"), (STRONGEST, "attack"), ("sham", "sham"))
    )
    return (
        "**A trained model can give its pictures away**, an update of one picture with its label "
        f"known. resnet20-4 on CIFAR-100, crop and flip alone: `{STRONGEST}` has rank 1 for "
        f"{hits(strong)}, the published attack for {hits(weak)}; chance "
        f"{chance(plain.settings['candidates'])}, sham {sham.lineup}; lower bounds, one training. "
        f"{link('What two attackers find')}"
    )


def _hybrid() -> str:
    plain, hybrid = audit("raced-60-epochs").cases
    firsts = [ranked_first(case, STRONGEST) for case in (plain, hybrid)]
    only_plain, only_hybrid, p = mcnemar(*([each[i] for i in firsts[0]] for each in firsts))
    (cost,) = _figures("claim 4", UNTOLD)
    assert _figures("claim 1", FAILS) and p < reproduce.LEVEL
    return (
        f"**The paper's hybrid policy {HYBRID} lowers that, and does not end it**: `{STRONGEST}`, "
        f"which does not know it, has rank 1 for {hits(row(hybrid, STRONGEST))}; {only_plain} "
        f"only without it, {only_hybrid} only with it, p = {p:.2g}, not corrected. {cost}. "
        f"{link('What two attackers find')}, {link('Verdicts on the claims')}"
    )


def _stages() -> str:
    stages = reproduce.stages()
    assert _figures("training", HOLDS)

    def told(step: int, attack: str = STANDARD) -> str:
        found = (
            next((h, n) for at, h, n in stages[defense, attack] if at == step)
            for defense in (NONE, HYBRID)
        )
        return " and ".join(f"{h}/{n}" for h, n in found)

    return (
        "**The first updates give away the most** to the published attack, without and with the "
        f"hybrid: rank 1 for {told(0)} before training, {told(50)} after 50 steps, "
        f"{told(FINAL_STEP)} at the end. `{STRONGEST}` has {told(0, STRONGEST)} before training. "
        f"{link('over-training')}"
    )


def _defenses() -> str:
    found = reproduce.paired()
    apart = " and ".join(
        f"`{each.row}` ({each.hits}, accuracy {each.accuracy:.1%})" for each in found.apart
    )
    others = "neither from none nor" if found.hybrid.p >= reproduce.LEVEL else "from none, not"
    assert not found.apart_from_hybrid, "the hybrid differs from a gradient defense: say so"
    return (
        f"**Of {len(found.gradient)} gradient defenses {len(found.apart)} differ from none** on "
        f"the same {found.images} images, attacked by `{STRONGEST}` that knows them: {apart}, "
        f"against {found.none} at {found.none_accuracy:.1%}. The hybrid, which is not known, has "
        f"{found.hybrid.hits}, and differs {others} from any of them. {link('table-defenses')}"
    )


def _precode() -> str:
    weak, strong = (
        [figure.split(": ") for figure in _figures(f"PRECODE, {way}", verdict)[:-1]]
        for way, verdict in (("attacked as published", IN_PART), ("with breakers", FAILS))
    )
    told = "; ".join(
        f"{where} {plain} and {best}"
        for (where, plain), (_, best) in zip(weak, strong, strict=True)
    )
    return (
        "**PRECODE does not hold against attacks that know it**, on untrained models, without a "
        f"sham. Rank 1 as attacked in its paper, and by its strongest breaker: {told}. "
        f"{link('precode-rec')}"
    )


def _s_pri() -> str:
    (foretold,) = _figures("claim 7", FAILS)
    return f"**S_pri does not foretell PSNR as published**. {foretold}. {link('exp10')}"


def _scores() -> str:
    ours = " and ".join(f"{r:.2f}" for r in scores.foretold()[scores.DEFAULT])
    return (
        f"**Scores of policies foretell rank 1 weakly**: the best of {len(scores.foretold())} by "
        f"the smaller of its r has {ours}, on a semi-trained and an untrained model, over "
        f"{scores.policies()} policies. {link('What a search ranks by')}"
    )


def _exact() -> str:
    early = exact.recovered("fashion-mnist-untrained", "none", 32)
    late = exact.recovered("fashion-mnist-trained", "none", 64)
    pruned = exact.recovered("fashion-mnist-trained", "prune:0.7", 8)
    return (
        "**Batches do not hide pictures behind a first linear layer**: `peeling` recovers "
        f"{early} exactly from batches of 32 of an untrained mlp, {late} from batches of 64 of a "
        f"trained one, and {pruned} from batches of 8 under pruning "
        f"({link('Exact inversion of batches')}). Nor does batch norm in train mode before dense "
        f"layers: of a small network, labels known, `{MATCHED}` has rank 1 for "
        f"{batches.both(MATCHED, 'train')} in batches of 8 before and after training, "
        f"`{STANDARD}` for {batches.both(STANDARD, 'train')}, where chance is {batches.luck()}. "
        f"{link(batches.TITLE)}"
    )


def _flower() -> str:
    return (
        "**Clients of a Flower app give single pictures away**: rank 1 for "
        f"{federated.singles()}, of a network without batch norm; of pictures in batches of 8, "
        f"{federated.eights()} by the best attack, over {federated.updates(8)} updates each. Of 64 "
        "pictures behind one or three local epochs `dense-matching` has "
        f"{federated.matched('cifar100')} on CIFAR-100, where chance is 5%, and "
        f"{federated.matched('fashion-mnist')} on Fashion-MNIST, where it is 1%, "
        f"{federated.luck('fashion-mnist')}; it knows the labels and each picture's mini-batch. "
        f"{link('What clients of a Flower app give away')}"
    )


def _guard() -> str:
    found, spared, noisy = (
        "{} of {}".format(*guard.count_withheld(defense, identified=identified))
        for defense, identified in (("none", True), ("none", False), ("gaussian:1", False))
    )
    return (
        f"**A client can check itself**: its guard withheld {found} updates that an audit "
        f"identified, {spared} that it did not, and {noisy} under noise that it did not; a rule "
        "that withholds whatever has no noise would do as well there. "
        f"{link('A client that checks itself')}"
    )
