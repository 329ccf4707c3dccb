"""gradveil beside `breaching` (the package on PyPI): seconds and PSNR of one attack on the same victims, in one run on the CPU.

    python benchmarks/peers.py [--models lenet small-convnet] [--data cifar100 --data-root DIR] [--steps 300] [--json FILE]

The attack is Inverting Gradients: `adam-cosine` here, `invertinggradients` there. Weights, images, labels, starting images, steps,
learning rate, its decay, signs, box and weight of total variation are the same, and so are the threads and the version of torch.
breaching attacks one victim after the other; gradveil all of them at once. Both warm up for a few steps that are not timed.

breaching runs in a process and a virtual environment of its own, made on the first run below --env. Only what the attack uses is
installed there. Importing breaching also asks for torchvision, which has no build for every torch: the child puts an empty
stand-in in its place (`stand_in`). The attack never calls it, and breaching's own code is neither changed nor replaced.
The child builds the models again in plain torch, and stops unless the gradient of the first image is gradveil's.

What is not the same: breaching counts the border in its total variation (it pads with zeros), rounds the steps of the decay down,
and returns the image after the step with the smallest loss instead of the last one. Its total variation takes three channels only,
so gray images are repeated.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

# gradveil is imported inside the functions of the parent: the environment of the child does not have it.

BREACHING = "0.1.2"
NEEDED = (
    "hydra-core>=1.3,<1.4",
    "scipy",
    "numpy",
    "safetensors",
)  # by breaching's imports, and to pass tensors
MODELS = ("lenet", "small-convnet")
WARM_UP = 5
SAME = 1e-4  # relative distance of the two gradients of the first image
Tensors = dict[str, Tensor]
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Settings:
    """What both sides are told."""

    model: str
    data: str
    victims: int
    steps: int
    lr: float
    tv: float
    threads: int
    seed: int
    channels: int
    size: int
    classes: int
    mean: Sequence[float]
    std: Sequence[float]


class Plain(nn.Module):
    """Either architecture in plain torch, for normalized images."""

    def __init__(self, model: str, channels: int, size: int, classes: int) -> None:
        super().__init__()
        layers = lenet_layers(channels) if model == "lenet" else small_convnet_layers(channels)
        self.features = nn.Sequential(*layers, nn.Flatten())
        with torch.no_grad():
            width = self.features.eval()(torch.zeros(1, channels, size, size)).shape[1]
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits


def frame(settings: Settings) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (settings.mean, settings.std))
    return mean, std


def normalized(pixels: Tensor, settings: Settings) -> Tensor:
    mean, std = frame(settings)
    return (pixels - mean) / std


def to_pixels(images: Tensor, settings: Settings) -> Tensor:
    mean, std = frame(settings)
    return images * std + mean


def lenet_layers(channels: int) -> list[nn.Module]:
    widths = ((channels, 2), (12, 2), (12, 1), (12, 1))
    return [
        layer
        for width, stride in widths
        for layer in (nn.Conv2d(width, 12, 5, stride, padding=2), nn.Sigmoid())
    ]


def small_convnet_layers(channels: int) -> list[nn.Module]:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]

    return [*block(channels, 32), *block(32, 32), nn.AvgPool2d(2), *block(32, 64)]


# ---- the parent: gradveil


def main() -> None:
    options = parser().parse_args()
    if options.child:
        child(options.child)
    else:
        parent(options)


def parent(options: argparse.Namespace) -> None:
    from gradveil.core.errors import GradveilError

    try:
        check(options)
        compare(options)
    except GradveilError as error:
        sys.exit(f"error: {error}")


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--models",
        nargs="+",
        default=list(MODELS),
        help="of lenet and small-convnet (batch norm in eval mode)",
    )
    options.add_argument(
        "--data",
        help="its first test images; cifar100 where --data-root is given, else fashion-mnist-mini",
    )
    options.add_argument("--data-root", type=Path)
    options.add_argument("--victims", type=int, default=16, help="each of one image")
    options.add_argument("--steps", type=int, default=300)
    # With the published 1e-4 a few hundred steps stay near a blind guess on both sides, and their PSNR would say nothing.
    options.add_argument(
        "--tv", type=float, default=1e-2, help="weight of total variation, on both sides"
    )
    options.add_argument(
        "--repeats", type=int, default=1, help="both sides in turn; the median time counts"
    )
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument(
        "--env",
        type=Path,
        help="where breaching's environment lies; $GRADVEIL_CACHE/peers, else ~/.cache/gradveil/peers",
    )
    options.add_argument("--json", type=Path)
    options.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return options


def check(options: argparse.Namespace) -> None:
    from gradveil.core.errors import GradveilError, unknown

    for name in options.models:
        if name not in MODELS:
            raise unknown("model", name, MODELS)
    for name in ("victims", "steps", "repeats", "threads"):
        if getattr(options, name) < 1:
            raise GradveilError(f"{name} {getattr(options, name)}: it must be at least 1")
    if not 0 <= options.tv < float("inf"):
        raise GradveilError(f"tv {options.tv}: it must be 0 or above, and finite")


def compare(options: argparse.Namespace) -> None:
    from gradveil.core.files import write_text
    from gradveil.data.cache import cache_folder

    torch.set_num_threads(options.threads)
    load = load_average()
    python = environment((options.env or cache_folder() / "peers").expanduser())
    results = [measure(name, options, python) for name in options.models]
    print(
        f"{options.victims} victims of one image, {options.steps} steps, {options.threads} thread(s), torch {torch.__version__}"
    )
    if load is not None:
        print(f"load average when it began: {load:.2f} on {os.cpu_count()} cores")
    print(
        f"{'model':<14} {'engine':<10} {'seconds':>8} {'mean PSNR':>10} {'median':>7} {'ratio':>6}"
    )
    for result in results:
        for engine in ("breaching", "gradveil"):
            row = result[engine]
            scores = f"{row['psnr_mean']:10.2f} {row['psnr_median']:7.2f}"
            print(
                f"{result['settings']['model']:<14} {engine:<10} {row['seconds']:8.1f} {scores} {row['ratio']:6.2f}"
            )
    if options.json:
        write_text(
            options.json,
            json.dumps(
                {"machine": machine(), "load_average_before": load, "results": results}, indent=1
            )
            + "\n",
        )


def measure(name: str, options: argparse.Namespace, python: Path) -> dict[str, Any]:
    """Both sides on one model, in turn where repeated."""
    settings, case = victims(name, options)
    model = victim_model(settings)
    times: dict[str, list[float]] = {"breaching": [], "gradveil": []}
    found: Tensors = {}
    answer: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        write_case(Path(place), settings, model, case)
        for _ in range(options.repeats):
            answer = run_child(python, Path(place))
            times["breaching"].append(sum(answer["seconds"]))
            found["breaching"] = load_file(Path(place) / "found.safetensors")["images"]
            seconds, found["gradveil"] = run_gradveil(settings, model, case)
            times["gradveil"].append(seconds)
    versions = {"gradveil": importlib.metadata.version("gradveil"), **answer["versions"]}
    shared = {
        "settings": asdict(settings),
        "versions": versions,
        "gradient_error": answer["gradient_error"],
        "n": len(case["images"]),
    }
    slow = statistics.median(times["breaching"])
    return shared | {
        engine: summary(found[engine], case["images"], times[engine], slow) for engine in times
    }


def summary(found: Tensor, truth: Tensor, times: list[float], slow: float) -> dict[str, Any]:
    """`ratio`: how many times faster than breaching."""
    from gradveil.scores import psnr

    scores = psnr(found, truth).tolist()
    seconds = statistics.median(times)
    means = {
        "psnr_mean": statistics.mean(scores),
        "psnr_median": statistics.median(scores),
        "psnr": scores,
    }
    return {"seconds": seconds, "all_seconds": times, "ratio": slow / seconds, **means}


def victims(name: str, options: argparse.Namespace) -> tuple[Settings, Tensors]:
    """The first test images with three channels, their labels, and where both searches start: N(0, 1) in normalized space."""
    from gradveil.core.errors import GradveilError
    from gradveil.core.seeds import generator
    from gradveil.data import load

    data = options.data or ("cifar100" if options.data_root else "fashion-mnist-mini")
    split = load(data, "test", root=options.data_root)
    if options.victims > len(split):
        raise GradveilError(f"{options.victims} victims: {data} has {len(split)} test images")
    chosen = split.select(range(options.victims))
    images = chosen.images.float().div(255).expand(-1, 3, -1, -1).contiguous()
    told = Settings(
        model=name,
        data=data,
        victims=options.victims,
        steps=options.steps,
        lr=0.1,
        tv=options.tv,
        threads=options.threads,
        seed=options.seed,
        channels=images.shape[1],
        size=split.size,
        classes=len(split.classes),
        mean=split.mean * (3 // split.channels),
        std=split.std * (3 // split.channels),
    )
    start = torch.randn(
        (len(images), 1, *images.shape[1:]), generator=generator(options.seed, "start")
    )
    return told, {
        "images": images,
        "labels": chosen.labels.contiguous(),
        "start": to_pixels(start, told),
    }


def victim_model(settings: Settings) -> nn.Module:
    """gradveil's own lenet; the small ConvNet inside gradveil's frame, with running statistics that are not 0 and 1."""
    from gradveil.core.seeds import generator
    from gradveil.models import Classifier, Normalize, build

    shape = {"channels": settings.channels, "size": settings.size, "classes": settings.classes}
    if settings.model == "lenet":
        return build(
            "lenet", **shape, mean=settings.mean, std=settings.std, seed=settings.seed
        ).eval()
    plain = Plain(settings.model, **shape)
    rng = generator(settings.seed, "weights")
    for module in plain.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu", generator=rng)
            nn.init.uniform_(module.get_parameter("bias"), -0.1, 0.1, generator=rng)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.get_buffer("running_mean"), std=0.1, generator=rng)
            nn.init.uniform_(module.get_buffer("running_var"), 0.5, 1.5, generator=rng)
    return Classifier(
        Normalize(settings.channels, settings.mean, settings.std), plain.features, plain.head
    ).eval()


def write_case(place: Path, settings: Settings, model: nn.Module, case: Tensors) -> None:
    """What the child needs: settings, weights, victims, and one gradient to check against."""
    from gradveil.engine.gradients import cross_entropy, gradient

    weights = {
        name: value
        for name, value in model.state_dict().items()
        if not name.startswith("normalize.")
    }
    (place / "settings.json").write_text(json.dumps(asdict(settings)))
    save_file(weights, place / "weights.safetensors")
    save_file(case, place / "victims.safetensors")
    save_file(
        gradient(model, cross_entropy, case["images"][:1], case["labels"][:1]),
        place / "gradient.safetensors",
    )


def run_gradveil(settings: Settings, model: nn.Module, case: Tensors) -> tuple[float, Tensor]:
    """Seconds for all victims at once, and their pictures."""
    from gradveil.attacks.matching import GradientMatching
    from gradveil.attacks.optimizers import Adam
    from gradveil.attacks.presets import find
    from gradveil.attacks.priors import TotalVariation
    from gradveil.attacks.starts import Given
    from gradveil.clients import Client
    from gradveil.core.seeds import generator
    from gradveil.core.types import Batch

    preset = find("adam-cosine")
    assert isinstance(preset, GradientMatching)
    prior, start = TotalVariation(settings.tv), Given(case["start"])
    attack = replace(
        preset,
        optimizer=Adam(settings.lr),
        prior=prior,
        start=start,
        steps=settings.steps,
        frames=0,
    )
    batches = [
        Batch(image, label)
        for image, label in zip(case["images"].split(1), case["labels"].split(1), strict=True)
    ]
    rng = generator(settings.seed, "attack")
    seen = [
        observation
        for observation, _ in Client(model, settings.classes).share_batches(batches, rng)
    ]
    replace(attack, steps=WARM_UP)(seen, rng)
    seconds, found = timed(lambda: attack(seen, rng))
    return seconds, torch.cat([one.images for one in found])


def environment(folder: Path) -> Path:
    """The Python of breaching's environment. It is ready once its last file is there; a first try that was cut short goes on."""
    from gradveil.core.errors import GradveilError
    from gradveil.core.files import write_text

    version = torch.__version__.partition("+")[0]
    place = folder / f"breaching-{BREACHING}-torch-{version}"
    python = place / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if (place / "ready").is_file() and python.exists():
        return python
    print(f"making an environment for breaching {BREACHING} in {place}")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # torch first and alone: breaching would ask for torchvision and lpips, and those for another torch.
    stages = (
        [*pip, f"torch=={version}"],
        [*pip, *NEEDED],
        [*pip, "--no-deps", f"breaching=={BREACHING}"],
    )
    for command in ([sys.executable, "-m", "venv", str(place)], *stages):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            why = last_line(done.stderr or done.stdout)
            raise GradveilError(
                f"`{' '.join(command[1:])}` failed: {why}; mend that and run again, or name another folder with --env"
            )
    write_text(place / "ready", "")
    return python


def run_child(python: Path, place: Path) -> dict[str, Any]:
    from gradveil.core.errors import GradveilError

    # -I: neither this folder nor PYTHONPATH may lend the child a module.
    command = [str(python), "-I", str(Path(__file__).resolve()), "--child", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise GradveilError(f"breaching did not run: {last_line(done.stderr)}")
    answer: dict[str, Any] = json.loads((place / "found.json").read_text())
    return answer


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def machine() -> dict[str, Any]:
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def load_average() -> float | None:
    """Of the last minute: above the number of threads asked for, something else runs and the times are no good."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def timed(work: Callable[[], Answer]) -> tuple[float, Answer]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


# ---- the child: breaching


def child(place: Path) -> None:
    """Attack the victims that lie in `place`, one after the other, and leave the pictures and the times there."""
    settings = Settings(**json.loads((place / "settings.json").read_text()))
    torch.set_num_threads(settings.threads)
    model = Plain(settings.model, settings.channels, settings.size, settings.classes).eval()
    model.load_state_dict(load_file(place / "weights.safetensors"))
    case = load_file(place / "victims.safetensors")
    case |= {name: normalized(case[name], settings) for name in ("images", "start")}
    error = gradient_error(model, case, load_file(place / "gradient.safetensors"))
    if not error <= SAME:
        sys.exit(
            f"the gradient of image 0 in plain torch is not gradveil's: relative distance {error:.1e}"
        )
    breaching = import_breaching()
    run = victim_runner(breaching, model, settings, case)
    run(0, WARM_UP)
    results = [timed(partial(run, victim, settings.steps)) for victim in range(settings.victims)]
    found = to_pixels(torch.cat([pictures for _, pictures in results]), settings).clamp(0, 1)
    save_file({"images": found}, place / "found.safetensors")
    versions = {
        name: importlib.metadata.version(name) for name in ("breaching", "torch", "hydra-core")
    }
    answer = {
        "seconds": [seconds for seconds, _ in results],
        "gradient_error": error,
        "versions": versions,
    }
    (place / "found.json").write_text(json.dumps(answer))


def import_breaching() -> Any:
    stand_in()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("breaching")


def stand_in() -> None:
    """What `import breaching` touches of torchvision: three names, and a class that one of its DenseNets derives from."""
    names = (
        "torchvision",
        "torchvision.transforms",
        "torchvision.models",
        "torchvision.models.densenet",
    )
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        before, _, last = name.rpartition(".")
        if before:
            setattr(sys.modules[before], last, sys.modules[name])
    vars(sys.modules[names[-1]])["_DenseLayer"] = nn.Module


def victim_runner(
    breaching: Any, model: nn.Module, settings: Settings, case: Tensors
) -> Callable[[int, int], Tensor]:
    """(victim, steps) -> what breaching makes of its gradient. The attack is made anew for each victim, as its users do."""
    loss = nn.CrossEntropyLoss()
    shape = tuple(case["images"].shape[1:])
    metadata = types.SimpleNamespace(
        shape=shape, modality="vision", mean=settings.mean, std=settings.std
    )
    payload = {
        "parameters": list(model.parameters()),
        "buffers": list(model.buffers()),
        "metadata": metadata,
    }
    configs = {
        steps: attack_config(breaching, settings, steps) for steps in (WARM_UP, settings.steps)
    }
    shares = []
    for image, label in zip(case["images"].split(1), case["labels"].split(1), strict=True):
        known = {"labels": label, "num_data_points": 1, "local_hyperparams": None}
        shares.append(
            {"gradients": gradients(model, image, label), "buffers": None, "metadata": known}
        )

    def run(victim: int, steps: int) -> Tensor:
        attack = breaching.attacks.prepare_attack(model, loss, configs[steps])
        found, _ = attack.reconstruct(
            [payload], [shares[victim]], {}, initial_data=case["start"][victim]
        )
        pictures: Tensor = found["data"]
        return pictures

    return run


def attack_config(breaching: Any, settings: Settings, steps: int) -> Any:
    """Its own `invertinggradients`: cosine, Adam, hard signs, box, step-wise decay, one trial from N(0, 1)."""
    overrides = [
        f"optim.max_iterations={steps}",
        f"optim.step_size={settings.lr}",
        f"optim.callback={steps + 1}",
        f"regularization.total_variation.scale={settings.tv}",
    ]
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return breaching.get_attack_config("invertinggradients", overrides=overrides)


def gradients(model: nn.Module, image: Tensor, label: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(
        nn.functional.cross_entropy(model(image), label), list(model.parameters())
    )


def gradient_error(model: nn.Module, case: Tensors, expected: Tensors) -> float:
    """|g - g'| / |g'| over all parameters together; infinite where the two do not have the same parameters."""
    own = dict(
        zip(
            (name for name, _ in model.named_parameters()),
            gradients(model, case["images"][:1], case["labels"][:1]),
            strict=True,
        )
    )
    if own.keys() != expected.keys():
        return float("inf")
    whole, wanted = (
        torch.cat([part[name].flatten().double() for name in own]) for part in (own, expected)
    )
    return float((whole - wanted).norm() / wanted.norm())


if __name__ == "__main__":
    main()
