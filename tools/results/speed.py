"""Speed, as ratios to a plain way in the same run, and accuracies of a fast training."""

from typing import Any

from results.records import facts, percent, table

MILLISECONDS = {
    (1, 1, False): 12,
    (8, 1, True): 16,
    (8, 4, False): 60,
    (8, 4, True): 120,
}
"""Goals of an iteration on the H200, by (images of a victim, local steps, train mode)."""

BUSY_GOAL = 1.3
CPU_GOAL = 3  # times as fast as the loop


def section() -> str:
    return "\n\n".join((_table(), _busy(), _second_order(), _peers(), _training()))


def _table() -> str:
    body = []
    for name in ("attack-h200.json", "attack-clients-h200.json"):
        body += [_on_gpu(found) for found in facts(name)["rows"]]
    for name in ("attack-cpu.json", "attack-clients-cpu.json"):
        body += [_on_cpu(found) for found in facts(name)["rows"]]
    fast, slow = facts("search-h200.json"), facts("search-cpu.json")
    body.append(
        [
            f"S_pri of a policy ({fast['images']} images, {fast['points']} points), "
            f"{fast['model']}, GPU",
            f"`benchmarks/search.py --model resnet20-4 --policies {fast['policies']}`",
            f"{fast['float32_s_per_policy']:.3f} s in float32; {fast['fast_s_per_policy']:.3f} s "
            "in bf16",
            f"{fast['loop_s_per_policy']:.1f} s (float32 loop, timed on "
            f"{fast['loop_images_timed']} of the images)",
            f"{fast['float32_ratio']:.0f}x in float32; bf16 is {fast['fast_ratio']:.0f}x that loop",
            "0.10 s",
        ]
    )
    body.append(
        [
            f"S_pri of a policy, {slow['model']}, CPU",
            "`benchmarks/search.py`",
            f"{slow['float32_s_per_policy']:.2f} s",
            f"{slow['loop_s_per_policy']:.2f} s (loop, timed on {slow['loop_images_timed']} of the "
            "images)",
            f"{slow['float32_ratio']:.1f}x",
            "3x",
        ]
    )
    for name, device, goal in (("h200", "cuda", "100x"), ("cpu", "cpu", "3x")):
        found = facts(f"transforms-{name}.json")["library"]
        body.append(
            [
                f"50 transformations, {'GPU' if device == 'cuda' else 'CPU'}",
                "`benchmarks/transforms.py`",
                f"{found[device]:,.0f} images/s",
                f"{found['pillow']:,.0f} images/s (Pillow)",
                f"{found[device] / found['pillow']:,.0f}x",
                goal,
            ]
        )
    train = facts("training-h200.json")
    each = train["seconds_per_epoch"]
    body.append(
        [
            f"training epoch, {train['data']}, {train['model']}, GPU, bf16",
            "`benchmarks/training.py --data cifar100 --model resnet20-4`",
            f"{each['none']:.2f} s; with policy {train['policy']} {each['policy']:.2f} s "
            f"({percent(train['policy_overhead'])} more)",
            f"{train['plain_seconds']:.2f} s (eager, bf16)",
            f"{train['plain_seconds'] / each['none']:.1f}x",
            "1.5 s; at most 5% more",
        ]
    )
    head = ["what", "how", "batched", "plain way", "ratio", "goal"]
    return f"## Speed\n{table(head, body)}"


def _on_cpu(found: dict[str, Any]) -> list[str]:
    """Return the row of an attack on two cores, both sides in float32."""
    missed = "" if found["ratio"] >= CPU_GOAL else ": missed"
    return [
        f"attack iteration, {_clients(found)}, CPU",
        _command(found),
        f"{found['batched_ms']:.1f} ms",
        f"{found['loop_ms']:.0f} ms (loop)",
        f"{found['ratio']:.1f}x",
        f"{CPU_GOAL}x{missed}",
    ]


def _clients(found: dict[str, Any]) -> str:
    """Return the model and what clients share, in words."""
    batch, steps = found["batch"], found["local_steps"]
    words = f"{found['model']}, {found['victims']} victims"
    words += f" of {batch} images" * (batch > 1) + f", {steps} local steps" * (steps > 1)
    return f"{words}{', train mode' * found['train_mode']}"


def _command(found: dict[str, Any]) -> str:
    batch, steps = found["batch"], found["local_steps"]
    options = f" --batch {batch}" * (batch > 1) + f" --local-steps {steps}" * (steps > 1)
    return (
        f"`benchmarks/attack.py --models {found['model']} --victims {found['victims']}{options}"
        f"{' --train-mode' * found['train_mode']}`"
    )


def _on_gpu(found: dict[str, Any]) -> list[str]:
    """Return the row of an attack on a GPU: its ratio is that of float32 on both sides."""
    goal = MILLISECONDS[found["batch"], found["local_steps"], found["train_mode"]]
    precise = found.get("float32_ms")
    return [
        f"attack iteration, {_clients(found)}, GPU",
        _command(found),
        f"{found['batched_ms']:.1f} ms in TF32 and bf16"
        + (f", {precise:.1f} ms in float32" if precise else "")
        + f"; {found['peak_gib']:.1f} GiB",
        f"{found['loop_ms']:,.0f} ms (float32 loop, timed on {found['loop_victims']} of the "
        f"{found['victims']} victims)",
        f"{found['loop_ms'] / precise:.0f}x in float32" if precise else "float32 not timed",
        f"{goal} ms" if found["batched_ms"] <= goal else f"{goal} ms: missed",
    ]


def _busy() -> str:
    """Say what small attacks on a busy machine cost, beside the better way to run them."""
    rows = [each for each in facts("busy-cpu.json")["rows"] if each["setting"] == "default"]
    jobs: dict[str, list[str]] = {}
    for each in rows:
        jobs.setdefault(each["job"], []).append(f"{each['situation']} {each['of_best']:.2f}")
    told = "; ".join(f"{job}: {', '.join(found)}" for job, found in jobs.items())
    missed = [f"{each['job']}, {each['situation']}" for each in rows if each["of_best"] > BUSY_GOAL]
    return (
        "**Busy machines** (two cores, means of two runs; `benchmarks/busy.py`): "
        "seconds of an attack beside the better of two threads and one, in the same situation: "
        f"{told}. The goal is {BUSY_GOAL}"
        + (f"; missed by {' and '.join(missed)}." if missed else ".")
        + " Records `busy-cpu.json`."
    )


def _second_order() -> str:
    gpu, cpu = facts("lbfgs-h200.json"), facts("lbfgs-cpu.json")
    return (
        f"`dlg` (L-BFGS), untrained lenet, the first {gpu['n']} test images of CIFAR-100, "
        f"{gpu['steps']} steps (`benchmarks/lbfgs.py`): {gpu['seconds']:.1f} s on {gpu['device']} "
        f"(goal 90 s), mean {gpu['psnr_mean']:.1f} dB and {gpu['found']} of {gpu['n']} from 30 dB "
        f"on; on a CPU {cpu['psnr_mean']:.1f} dB and {cpu['found']} of {cpu['n']}, in "
        f"{cpu['seconds'] / 60:.0f} minutes on a machine that was busy otherwise."
    )


def _peers() -> str:
    found = facts("peers-cpu.json")
    body = []
    for each in found["results"]:
        ours, theirs = each["gradveil"], each["breaching"]
        body.append(
            [
                each["settings"]["model"],
                f"{theirs['seconds']:.1f} s",
                f"{ours['seconds']:.1f} s",
                f"{theirs['seconds'] / ours['seconds']:.1f}x",
                f"{theirs['psnr_mean']:.2f} / {ours['psnr_mean']:.2f} dB",
            ]
        )
    first = found["results"][0]
    settings, versions = first["settings"], first["versions"]
    head = ["model", "breaching", "gradveil", "ratio", "mean PSNR, breaching / gradveil"]
    return (
        f"Against the installed package `breaching` {versions['breaching']} (`benchmarks/peers.py`,"
        " its own environment, same weights, images, starts and settings): CIFAR-100 test images, "
        f"{settings['victims']} victims, {settings['steps']} steps, total variation "
        f"{settings['tv']}, {settings['threads']} threads, seed {settings['seed']}. The goal is "
        "5x.\n\n"
        f"{table(head, body)}"
    )


def _training() -> str:
    found = facts("fashion-convnet-h200.json")
    runs = ", ".join(f"{percent(run['accuracy'], 2)} (seed {run['seed']})" for run in found["runs"])
    return (
        f"## Training\nFashion-MNIST, the nine-layer convnet, {found['runs'][0]['epochs']} epochs, "
        f"GPU: {runs}. `{found['command']}` when `convnet` had nine layers, now `convnet-9`; "
        "records `fashion-convnet-h200.json`."
    )
