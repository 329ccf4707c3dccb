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
    return "\n\n".join(
        (
            "## Speed\nThe plain way is measured in the same run.",
            _attacks(),
            _others(),
            _busy(),
            _second_order(),
            _peers(),
            _training(),
        )
    )


def _attacks() -> str:
    """An iteration of an attack on a GPU and on a CPU; a ratio has float32 on both sides."""
    body = []
    for name in ("attack-h200.json", "attack-clients-h200.json"):
        for found in facts(name)["rows"]:
            goal = MILLISECONDS[found["batch"], found["local_steps"], found["train_mode"]]
            precise = found.get("float32_ms")
            body.append(
                [
                    *_clients(found),
                    "GPU, TF32 and bf16",
                    f"{found['batched_ms']:.1f}",
                    f"{found['peak_gib']:.1f}",
                    f"{found['loop_ms']:,.0f}",
                    f"{found['loop_victims']} of {found['victims']}",
                    f"{found['loop_ms'] / precise:.0f}x, {precise:.1f} ms in float32"
                    if precise
                    else "float32 not timed",
                    f"{goal} ms" + (": missed" if found["batched_ms"] > goal else ""),
                ]
            )
    for name in ("attack-cpu.json", "attack-clients-cpu.json"):
        body += [
            [
                *_clients(found),
                "CPU",
                f"{found['batched_ms']:.1f}",
                "-",
                f"{found['loop_ms']:.0f}",
                "-",
                f"{found['ratio']:.1f}x",
                f"{CPU_GOAL}x" + (": missed" if found["ratio"] < CPU_GOAL else ""),
            ]
            for found in facts(name)["rows"]
        ]
    head = ["model", "victims", "images of each", "local steps", "train mode", "on", "batched, ms"]
    head += ["GiB", "float32 loop, ms", "loop timed on victims", "ratio", "goal"]
    return (
        "### An iteration of an attack\n*Batched* on a GPU is what an attack uses, TF32 and bf16; "
        "a ratio has float32 on both sides. A loop timed on some victims is scaled to all.\n\n"
        f"{table(head, body)}\n\n"
        "`benchmarks/attack.py --models MODEL --victims N --batch IMAGES --local-steps STEPS "
        "--train-mode`; records `attack-h200.json`, `attack-clients-h200.json`, `attack-cpu.json`, "
        "`attack-clients-cpu.json`."
    )


def _clients(found: dict[str, Any]) -> list[str]:
    """Return the model and what clients share."""
    numbers = (str(found[name]) for name in ("victims", "batch", "local_steps"))
    return [found["model"], *numbers, "yes" if found["train_mode"] else "no"]


def _others() -> str:
    fast, slow = facts("search-h200.json"), facts("search-cpu.json")
    what = f"S_pri of a policy ({fast['images']} images, {fast['points']} points), {fast['model']}"
    command = f"`benchmarks/search.py --model resnet20-4 --policies {fast['policies']}`"
    loop = f"{fast['loop_s_per_policy']:.1f} s (float32 loop, timed on {fast['loop_images_timed']}"
    body = [
        [
            f"{what}, GPU, {precision}",
            command,
            f"{fast[f'{key}_s_per_policy']:.3f} s",
            f"{loop} of the images)",
            f"{fast[f'{key}_ratio']:.0f}x" + " that float32 loop" * (key == "fast"),
            goal,
        ]
        for key, precision, goal in (("float32", "float32", "-"), ("fast", "bf16", "0.10 s"))
    ]
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
    epoch = f"training epoch, {train['data']}, {train['model']}, GPU, bf16"
    command = "`benchmarks/training.py --data cifar100 --model resnet20-4`"
    plain = f"{train['plain_seconds']:.2f} s (eager, bf16)"
    ratio = f"{train['plain_seconds'] / each['none']:.1f}x"
    body += [
        [epoch, command, f"{each['none']:.2f} s", plain, ratio, "1.5 s"],
        [
            f"the same, with policy {train['policy']}",
            command,
            f"{each['policy']:.2f} s",
            f"{each['none']:.2f} s (without the policy)",
            f"{percent(train['policy_overhead'])} more",
            "at most 5% more",
        ],
    ]
    head = ["what", "how", "ours", "plain way", "ratio", "goal"]
    return f"### Scores, transformations, training\n{table(head, body)}"


def _busy() -> str:
    """Say what small attacks on a busy machine cost, beside the better way to run them."""
    rows = [each for each in facts("busy-cpu.json")["rows"] if each["setting"] == "default"]
    body = [
        [
            each["job"],
            each["situation"],
            f"{each['of_best']:.2f}",
            f"{BUSY_GOAL}" + (": missed" if each["of_best"] > BUSY_GOAL else ""),
        ]
        for each in rows
    ]
    head = ["model", "situation", "times the better", "goal"]
    return (
        "### Busy machines\nTwo cores, means of two runs: seconds of an attack, beside the better "
        f"of two threads and one in the same situation.\n\n{table(head, body)}\n\n"
        "`benchmarks/busy.py`; records `busy-cpu.json`."
    )


def _second_order() -> str:
    gpu, cpu = facts("lbfgs-h200.json"), facts("lbfgs-cpu.json")
    body = [
        [
            name,
            f"{each['seconds']:,.1f}",
            goal,
            f"{each['psnr_mean']:.1f}",
            f"{each['found']}/{each['n']}",
        ]
        for name, each, goal in ((gpu["device"], gpu, "90"), ("CPU, busy otherwise", cpu, "-"))
    ]
    head = ["on", "seconds", "goal, s", "mean PSNR dB", "images from 30 dB on"]
    return (
        f"### L-BFGS\n`dlg`, untrained lenet, the first {gpu['n']} test images of CIFAR-100, "
        f"{gpu['steps']} steps.\n\n{table(head, body)}\n\n"
        "`benchmarks/lbfgs.py`; records `lbfgs-h200.json`, `lbfgs-cpu.json`."
    )


def _peers() -> str:
    found = facts("peers-cpu.json")
    body = []
    for each in found["results"]:
        ours, theirs = each["gradveil"], each["breaching"]
        body.append(
            [
                each["settings"]["model"],
                f"{theirs['seconds']:.1f}",
                f"{ours['seconds']:.1f}",
                f"{theirs['seconds'] / ours['seconds']:.1f}x",
                f"{theirs['psnr_mean']:.2f}",
                f"{ours['psnr_mean']:.2f}",
            ]
        )
    first = found["results"][0]
    settings, versions = first["settings"], first["versions"]
    head = ["model", "breaching, s", "gradveil, s", "ratio", "mean PSNR dB, breaching"]
    head.append("mean PSNR dB, gradveil")
    return (
        f"### Against breaching\nThe installed package `breaching` {versions['breaching']}, in its "
        "own environment, with the same weights, images, starts and settings: CIFAR-100 test "
        f"images, {settings['victims']} victims, {settings['steps']} steps, total variation "
        f"{settings['tv']}, {settings['threads']} threads, seed {settings['seed']}. The goal is "
        f"5x.\n\n{table(head, body)}\n\n`benchmarks/peers.py`; records `peers-cpu.json`."
    )


def _training() -> str:
    found = facts("fashion-convnet-h200.json")
    runs = ", ".join(f"{percent(run['accuracy'], 2)} (seed {run['seed']})" for run in found["runs"])
    return (
        "### Training Fashion-MNIST\n"
        f"Test accuracy of the nine-layer convnet, {found['runs'][0]['epochs']} epochs, "
        f"GPU: {runs}. `{found['command']}` when `convnet` had nine layers, now `convnet-9`; "
        "records `fashion-convnet-h200.json`."
    )
