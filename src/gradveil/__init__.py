"""What shared gradients give away in collaborative learning, and the defenses that stop it.

`import gradveil as gv`: the jobs are functions (`gv.audit`, `gv.train`, `gv.search_policies`,
`gv.tune`, `gv.doctor`, `gv.reconstruct`), the parts are values (`gv.Client`, `gv.Pruning(0.95)`,
`gv.attacks.dlg`, `gv.Policy.parse("3-1-7")`). Nothing heavy is loaded before it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradveil import attacks, data, defenses, federated, models, scores, transforms, tuning
    from gradveil.assessment import AssessJob, Assessment, assess, run_assessment
    from gradveil.attacks import Attack, GradientMatching, Progress
    from gradveil.audits import AuditJob, AuditResult, Case, CaseResult, audit, run_audit
    from gradveil.audits.fits import Tried
    from gradveil.checks.doctor import doctor
    from gradveil.clients import Client, Shared
    from gradveil.core.errors import GradveilError, GradveilWarning
    from gradveil.core.types import (
        Batch,
        Gradients,
        Knowledge,
        Loss,
        Observation,
        Protocol,
        Reconstruction,
    )
    from gradveil.data.images import Images, as_images
    from gradveil.defenses import (
        DPSGD,
        Clipping,
        Defense,
        DropoutDefense,
        FeedbackPruning,
        GaussianNoise,
        LaplacianNoise,
        Moment,
        PolicyDefense,
        Precode,
        Pruning,
        RandomPolicies,
        Seam,
        Soteria,
        State,
    )
    from gradveil.models.normalized import normalized
    from gradveil.report.write import Report, write_report
    from gradveil.scores import identify, mse, psnr, psnr_affine, ssim
    from gradveil.search.job import SearchJob
    from gradveil.search.results import SearchResult
    from gradveil.search.run import run_search, search_policies
    from gradveil.training.job import Recipe, TrainingJob, TrainingResult
    from gradveil.training.run import train_model as train
    from gradveil.transforms import Policy
    from gradveil.tuning import TuningJob, TuningResult, run_tuning, tune
    from gradveil.updates import reconstruct

__all__ = [
    "DPSGD",
    "AssessJob",
    "Assessment",
    "Attack",
    "AuditJob",
    "AuditResult",
    "Batch",
    "Case",
    "CaseResult",
    "Client",
    "Clipping",
    "Defense",
    "DropoutDefense",
    "FeedbackPruning",
    "GaussianNoise",
    "GradientMatching",
    "Gradients",
    "GradveilError",
    "GradveilWarning",
    "Images",
    "Knowledge",
    "LaplacianNoise",
    "Loss",
    "Moment",
    "Observation",
    "Policy",
    "PolicyDefense",
    "Precode",
    "Progress",
    "Protocol",
    "Pruning",
    "RandomPolicies",
    "Recipe",
    "Reconstruction",
    "Report",
    "Seam",
    "SearchJob",
    "SearchResult",
    "Shared",
    "Soteria",
    "State",
    "TrainingJob",
    "TrainingResult",
    "Tried",
    "TuningJob",
    "TuningResult",
    "__version__",
    "as_images",
    "assess",
    "attacks",
    "audit",
    "data",
    "defenses",
    "doctor",
    "federated",
    "identify",
    "models",
    "mse",
    "normalized",
    "psnr",
    "psnr_affine",
    "reconstruct",
    "run_assessment",
    "run_audit",
    "run_search",
    "run_tuning",
    "scores",
    "search_policies",
    "ssim",
    "train",
    "transforms",
    "tune",
    "tuning",
    "write_report",
]

_PACKAGES = ("attacks", "data", "defenses", "federated", "models", "scores", "transforms", "tuning")
_HOMES = {
    "gradveil.assessment": ("AssessJob", "Assessment", "assess", "run_assessment"),
    "gradveil.attacks": ("Attack", "GradientMatching", "Progress"),
    "gradveil.audits": ("AuditJob", "AuditResult", "Case", "CaseResult", "audit", "run_audit"),
    "gradveil.audits.fits": ("Tried",),
    "gradveil.checks.doctor": ("doctor",),
    "gradveil.clients": ("Client", "Shared"),
    "gradveil.core.errors": ("GradveilError", "GradveilWarning"),
    "gradveil.core.types": (
        "Batch",
        "Gradients",
        "Knowledge",
        "Loss",
        "Observation",
        "Protocol",
        "Reconstruction",
    ),
    "gradveil.data.images": ("Images", "as_images"),
    "gradveil.defenses": (
        "DPSGD",
        "Clipping",
        "Defense",
        "DropoutDefense",
        "FeedbackPruning",
        "GaussianNoise",
        "LaplacianNoise",
        "Moment",
        "PolicyDefense",
        "Precode",
        "Pruning",
        "RandomPolicies",
        "Seam",
        "Soteria",
        "State",
    ),
    "gradveil.models.normalized": ("normalized",),
    "gradveil.report.write": ("Report", "write_report"),
    "gradveil.scores": ("identify", "mse", "psnr", "psnr_affine", "ssim"),
    "gradveil.search.job": ("SearchJob",),
    "gradveil.search.results": ("SearchResult",),
    "gradveil.search.run": ("run_search", "search_policies"),
    "gradveil.training.job": ("Recipe", "TrainingJob", "TrainingResult"),
    "gradveil.transforms": ("Policy",),
    "gradveil.tuning": ("TuningJob", "TuningResult", "run_tuning", "tune"),
    "gradveil.updates": ("reconstruct",),
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name in _PACKAGES:
        return import_module(f"gradveil.{name}")
    if name == "train":
        return import_module("gradveil.training.run").train_model
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'gradveil' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return list(__all__)
