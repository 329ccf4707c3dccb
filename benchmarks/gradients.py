"""Milliseconds for one step of a gradient-matching attack (gradients, cosine distance, slope at the images), batched and by the loop.

    python benchmarks/gradients.py --models lenet convnet --victims 16 --threads 2

Both ways run in turn in the same process; the median of the repeats is printed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Generator, Tensor, nn

from gradveil.core.batched import BatchedGradients
from gradveil.core.gradients import Gradients, cross_entropy, loop_gradients
from gradveil.core.taps import collect, forward
from gradveil.models import build

Engine = Callable[..., Gradients]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", nargs="+", default=["lenet", "convnet"])
    options.add_argument("--victims", type=int, default=16)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--repeats", type=int, default=5)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    print(f"{chosen.victims} victims of one 3 x 32 x 32 image, {chosen.threads} thread(s), torch {torch.__version__}, float32")
    for name in chosen.models:
        compare(name, chosen.victims, chosen.repeats)


def compare(name: str, victims: int, repeats: int) -> None:
    model = build(name, channels=3, size=32, classes=100).eval()
    rng = Generator().manual_seed(0)
    images, labels = torch.rand(victims, 1, 3, 32, 32, generator=rng), torch.randint(100, (victims, 1), generator=rng)
    batched = BatchedGradients(model, cross_entropy)
    target = batched(images, labels)
    guess = torch.rand(images.shape, generator=rng).requires_grad_()
    ways: dict[str, Engine] = {"batched": batched, "loop": partial(loop_gradients, model, cross_entropy)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats + 1):
        for way, engine in ways.items():
            times[way].append(timed(partial(step, engine, guess, labels, target)))
    fast, slow = (statistics.median(times[way][1:]) for way in ways)
    print(f"{name}: batched {fast:.1f} ms, loop {slow:.1f} ms, ratio {slow / fast:.2f}")
    shares = [parts(model, guess, labels, target) for _ in range(repeats + 1)][1:]
    print("  of batched: " + ", ".join(f"{part} {statistics.median(s[part] for s in shares):.1f} ms" for part in shares[0]))


def step(engine: Engine, guess: Tensor, labels: Tensor, target: Gradients) -> Tensor:
    return torch.autograd.grad(distance(engine(guess, labels, differentiable=True), target), guess)[0]


def distance(found: Gradients, target: Gradients) -> Tensor:
    """Cosine distances, summed over the victims."""

    def dot(one: Gradients, other: Gradients) -> Tensor:
        return torch.stack([(one[name] * other[name]).sum(tuple(range(1, one[name].dim()))) for name in one]).sum(0)

    return (1 - dot(found, target) * (dot(found, found) * dot(target, target)).rsqrt()).sum()


def parts(model: nn.Module, guess: Tensor, labels: Tensor, target: Gradients) -> dict[str, float]:
    """Where a batched step spends its time."""
    marks = [time.perf_counter()]
    done = forward(model, cross_entropy, guess, labels, {name: p.detach() for name, p in model.named_parameters()})
    marks.append(time.perf_counter())
    torch.autograd.grad(done.losses.sum(), [tap.edge for tap in done.taps], create_graph=True)
    marks.append(time.perf_counter())
    found = collect(model, done, len(guess), differentiable=True)
    marks.append(time.perf_counter())
    total = distance(found, target)
    marks.append(time.perf_counter())
    torch.autograd.grad(total, guess)
    marks.append(time.perf_counter())
    forward_, first, both, cosine, second = ((b - a) * 1e3 for a, b in pairwise(marks))
    return {"forward": forward_, "first backward": first, "weight products": both - first, "distance": cosine, "second backward": second}


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
