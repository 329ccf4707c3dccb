"""Microseconds of the products behind weight gradients of convolutions, for each way to make them.

    python benchmarks/kernels.py [--rows 64 100 512] [--seconds 60] [--json FILE]

It needs a GPU with Triton. "Grouped" is torch's convolution with a group for each victim, and its
derivatives; the others are the kernels of `engine/convolution_kernels.py`, which read the maps
where they lie, one line for each tile. The layers are those of resnet20-4 in bf16, with one image a
victim. Each time is that of a call in a CUDA graph, over several copies of the data, so that these
do not lie in the cache. Every result is compared with that of grouped convolutions in float32. A
tile that fails is reported, and the others go on; those that are left when the seconds are over are
not measured. All layers are measured with the chosen tiles first.

Before that, pruning's masks of all gradients of resnet20-4 (`defenses/pruning.py`): each tensor
sorted, and all selected together; as launched one by one, as in training, and on the GPU alone.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.defenses.pruning import kept, kept_each
from gradveil.engine.fused import load_convolution_kernels, load_kernels
from gradveil.engine.patches import PatchLayout
from gradveil.models import build

DEVICE = "cuda"
PRODUCTS = ("weight_products", "blame_slope", "input_slope")
CACHE = 128 * 2**20  # bytes that hold more than the GPU keeps at hand
CALLS, REPLAYS = 8, 5
SHARE = 0.95  # pruned
ERROR = 1e-2  # of a result in bf16, relative
Work = Callable[[int], Tensor]
_backward = torch.ops.aten.convolution_backward


@dataclass(frozen=True)
class Layer:
    """A convolution of resnet20-4, `count` times there; every tile is tried if it is `main`."""

    channels: int
    outputs: int
    size: int
    stride: int
    kernel: int
    count: int
    main: bool = True

    @property
    def out(self) -> int:
        return self.size // self.stride

    def __str__(self) -> str:
        return (
            f"{self.channels} to {self.outputs}, {self.kernel}x{self.kernel}, "
            f"{self.size}x{self.size}" + (f", stride {self.stride}" if self.stride > 1 else "")
        )


LAYERS = (
    Layer(64, 64, 32, 1, 3, 6),
    Layer(128, 128, 16, 1, 3, 5),
    Layer(256, 256, 8, 1, 3, 5),
    Layer(3, 64, 32, 1, 3, 1),
    Layer(64, 128, 32, 2, 3, 1),
    Layer(128, 256, 16, 2, 3, 1, main=False),
    Layer(64, 128, 32, 2, 1, 1, main=False),
    Layer(128, 256, 16, 2, 1, 1, main=False),
)


class Case:
    """The data of a layer for so many victims, and each product in either way."""

    def __init__(self, layer: Layer, rows: int) -> None:
        self.layer, self.rows = layer, rows
        pad = layer.kernel // 2
        pair = (layer.kernel,) * 2, (layer.stride,) * 2, (1, 1)
        self.layout = PatchLayout(*pair, ((pad, pad), (pad, pad)), 1, rows)
        self.size, self.out = (layer.size,) * 2, (layer.out,) * 2
        area = layer.kernel**2
        numbers = rows * (layer.channels * layer.size**2 + layer.outputs * layer.out**2)
        self.copies = max(2, min(CALLS, CACHE // (2 * numbers)))
        self.inputs, self.blame = (
            _draw(self.copies, rows, side, side, wide).permute(0, 1, 4, 2, 3)
            for side, wide in ((layer.size, layer.channels), (layer.out, layer.outputs))
        )
        self.slope = _draw(rows, layer.outputs, area, layer.channels)

    def grouped(self, product: str, dtype: torch.dtype = torch.bfloat16) -> Work:
        """Return the work of torch's convolution with a group for each victim."""
        layer, rows = self.layer, self.rows
        moves = (layer.stride,) * 2, (layer.kernel // 2,) * 2, (1, 1), False, (0, 0), rows
        weight = self.slope.unflatten(2, self.layout.kernel).permute(0, 1, 4, 2, 3)
        weight = weight.flatten(0, 1).to(dtype).contiguous()
        inputs, blame = (
            maps.to(dtype).contiguous().view(self.copies, 1, -1, *maps.shape[3:])
            for maps in (self.inputs, self.blame)
        )

        def weight_products(copy: int) -> Tensor:
            wanted = (False, True, False)  # of the slopes at input, weight and bias
            found: Tensor = _backward(blame[copy], inputs[copy], weight, None, *moves, wanted)[1]
            return found.view(rows, layer.outputs, layer.channels, -1).transpose(2, 3)

        def blame_slope(copy: int) -> Tensor:
            stride, padding = moves[:2]
            found = F.conv2d(inputs[copy], weight, None, stride, padding, groups=rows)
            return found.view(rows, layer.outputs, *self.out)

        def input_slope(copy: int) -> Tensor:
            wanted = (True, False, False)
            found: Tensor = _backward(blame[copy], inputs[copy], weight, None, *moves, wanted)[0]
            return found.view(rows, layer.channels, *self.size)

        return {f.__name__: f for f in (weight_products, blame_slope, input_slope)}[product]

    def in_place(self, product: str, tile: Any) -> Work:
        """Return the work of a kernel with this tile."""
        kernels = load_convolution_kernels()
        if product == "weight_products":
            return lambda copy: kernels.weight_products(
                self.inputs[copy], self.blame[copy], self.layout, tile
            )
        if product == "blame_slope":
            return lambda copy: kernels.blame_slope(
                self.inputs[copy], self.slope, self.out, self.layout, tile
            )
        return lambda copy: kernels.input_slope(
            self.blame[copy], self.slope, self.size, self.layout, tile
        )


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def microseconds(work: Work, copies: int) -> float:
    """Return the time of a call, the median of some replays of a graph with several."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and allocates for the libraries
        for copy in range(2):
            work(copy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(CALLS):
            work(call % copies)
    graph.replay()
    taken = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / CALLS * 1e3)
    return float(statistics.median(taken))


def compare_pruning() -> dict[str, Any]:
    """Print and return microseconds of the masks of all gradients, sorted and selected."""
    model = build("resnet20-4", channels=3, size=32, classes=100)
    gradients = {
        name: torch.randn(parameter.shape, device=DEVICE)
        for name, parameter in model.named_parameters()
    }
    lines: dict[str, Any] = {}
    wanted = None

    def sort_each() -> dict[str, Tensor]:
        return {name: kept(value, SHARE) for name, value in gradients.items()}

    def select() -> dict[str, Tensor]:
        return dict(kept_each(gradients, SHARE))

    ways: dict[str, Callable[[], dict[str, Tensor]]] = {
        "sorted": sort_each,
        "selected together": select,
    }
    for name, make in ways.items():
        try:
            masks = make()
            wanted = wanted or masks
            if not all(torch.equal(masks[key], wanted[key]) for key in gradients):
                raise ArithmeticError("another mask than by sorting")
            lines[name] = {
                "launched_us": launched(make),
                "gpu_us": microseconds(_first_of(make), 1),
            }
            print(
                f"masks {name}: {lines[name]['launched_us']:.0f} us launched one by one, "
                f"{lines[name]['gpu_us']:.0f} us on the GPU"
            )
        except Exception as error:  # the kernels are still to come
            lines[name] = {"failed": _first_line(error)}
            print(f"masks {name}: {lines[name]['failed']}")
    return lines


def _first_of(make: Callable[[], dict[str, Tensor]]) -> Work:
    return lambda _: next(iter(make().values()))


def launched(work: Callable[[], object]) -> float:
    """Return microseconds of a call as seen from outside, the GPU's work included."""
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS * 1e6


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def tiles(layer: Layer, product: str) -> list[Any]:
    """Return the tile that is chosen for the layer, then others worth a try."""
    choose = load_convolution_kernels().choose_tile
    area, few = layer.kernel**2, layer.channels < load_convolution_kernels().LEAST
    entries = area * layer.channels if few else layer.channels
    if product == "weight_products":
        taps = 1 if few else min(load_convolution_kernels().TAPS, layer.kernel)
        chosen = choose(layer.outputs, entries, layer.out**2, taps)
        others = [
            chosen._replace(stages=1),  # plain loads, which go through the nearest cache
            chosen._replace(stages=4),
            chosen._replace(warps=12 - chosen.warps),
            choose(layer.outputs, entries, layer.out**2)._replace(warps=8),
        ]
    else:
        if product == "blame_slope":
            chosen = choose(layer.out**2, layer.outputs, entries)
        else:
            chosen = choose(layer.out**2, layer.channels, layer.outputs)
        others = [
            chosen._replace(stages=1),
            chosen._replace(stages=4),
            chosen._replace(warps=8),
            chosen._replace(rows=64, columns=min(64, chosen.columns), stages=4),
        ]
    found = [chosen]
    found += [tile for k, tile in enumerate(others) if tile not in (chosen, *others[:k])]
    return found if layer.main else found[:1]


def measure(layer: Layer, product: str, tile: Any | None, rows: list[int]) -> dict[str, Any]:
    """Return a line of the table; with no tile, that of grouped convolutions."""
    line: dict[str, Any] = {"layer": asdict(layer), "name": str(layer), "product": product}
    line |= {"tile": tile and tile._asdict(), "us": {}, "failed": None}
    try:
        for count in rows:
            case = Case(layer, count)
            work = case.grouped(product) if tile is None else case.in_place(product, tile)
            wanted = case.grouped(product, torch.float32)(0)
            error = float((work(0).float() - wanted).norm() / wanted.norm())
            line["error"] = max(error, line.get("error", 0.0))
            if not error < ERROR:
                raise ArithmeticError(f"relative error {error:.1e}")
            line["us"][count] = microseconds(work, case.copies)
    except Exception as error:  # whatever a compiler or driver raises: the other tiles go on
        line["failed"] = _first_line(error)
    return line


def measure_all(rows: list[int], seconds: float) -> list[dict[str, Any]]:
    start, lines = time.perf_counter(), []
    turns: list[tuple[int, Layer, str, Any | None]] = []
    for layer in LAYERS:
        for product in PRODUCTS:
            turns.append((0, layer, product, None))
            turns += [(k, layer, product, t) for k, t in enumerate(tiles(layer, product), 1)]
    for _, layer, product, tile in sorted(turns, key=lambda turn: turn[0]):
        if time.perf_counter() - start < seconds:
            lines.append(measure(layer, product, tile, rows))
        else:
            late = {"layer": asdict(layer), "name": str(layer), "product": product, "us": {}}
            lines.append(late | {"tile": tile and tile._asdict(), "failed": "out of time"})
    return lines


def show(lines: list[dict[str, Any]], rows: list[int]) -> dict[str, Any]:
    """Print the table, the best tile of each and the sums over the network; return the sums."""
    sums = {way: dict.fromkeys(rows, 0.0) for way in ("grouped", "chosen tiles", "best tiles")}
    heads = "".join(f"{count:>9}" for count in rows)
    for layer in LAYERS:
        print(f"\n{layer} (times {layer.count}): microseconds for this many rows{heads}")
        for product in PRODUCTS:
            mine = [e for e in lines if e["name"] == str(layer) and e["product"] == product]
            for line in mine:
                cells = "".join(
                    f"{line['us'][count]:>9.1f}" if count in line["us"] else f"{'-':>9}"
                    for count in rows
                )
                failed = f"  {line['failed']}" if line["failed"] else ""
                print(f"  {product:<16} {_tile_text(line['tile']):<44}{cells}{failed}")
            for count in rows:
                done = [line for line in mine if count in line["us"]]
                ours = [line["us"][count] for line in done if line["tile"]]
                plain = [line["us"][count] for line in done if not line["tile"]]
                for way, times in zip(sums, (plain, ours[:1], ours), strict=True):
                    sums[way][count] += layer.count * min(times, default=math.nan)
            good = [line for line in mine if line["tile"] and rows[-1] in line["us"]]
            if good:
                best = min(good, key=lambda line: sum(line["us"].values()))
                print(f"  {product:<16} best: {_tile_text(best['tile'])}")
    print(f"\nall convolutions of resnet20-4, microseconds{heads}")
    for way, total in sums.items():
        print(f"  {way:<16}" + "".join(f"{value:>9.0f}" for value in total.values()))
    return {
        way: {count: None if math.isnan(value) else value for count, value in total.items()}
        for way, total in sums.items()
    }


def _tile_text(tile: dict[str, int] | None) -> str:
    if tile is None:
        return "grouped"
    return (
        f"{tile['rows']}x{tile['columns']}x{tile['depth']}, {tile['warps']} warps, "
        f"{tile['stages']} stages, {tile['taps']} taps"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 100, 512])
    parser.add_argument("--seconds", type=float, default=50, help="begin no tile after these")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/kernels.py needs a GPU: this torch sees none")
    start = time.perf_counter()
    torch.manual_seed(0)
    masks = compare_pruning()
    lines = measure_all(options.rows, options.seconds)
    sums = show(lines, options.rows)
    taken = time.perf_counter() - start
    facts = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": load_kernels().triton.__version__,
        "seconds": round(taken, 1),
    }
    if options.json:
        found = {"facts": facts, "pruning": masks, "sums": sums, "rows": lines}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
