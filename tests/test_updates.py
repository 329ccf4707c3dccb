"""Two files of weights give back the update and its images; code in a file is never run."""

import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gradveil as gv
import toys
from gradveil.attacks import adam_cosine
from gradveil.audits.attackers import automatic
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.types import Knowledge, Observation, Protocol
from gradveil.defenses import parse
from gradveil.defenses.applied import protected_model
from gradveil.engine.gradients import cross_entropy
from gradveil.engine.shares import Shares
from gradveil.models import build
from gradveil.models.weight_files import fit_weights, read_weights
from gradveil.scores import psnr
from gradveil.updates import observe_update, reconstruct

CLASSES = 4
SIZE = 8
PROTOCOL = Protocol(local_steps=3, local_lr=0.05)
Weights = dict[str, Tensor]


def net(seed: int = 0) -> nn.Module:
    return toys.conv_with_norm(1, SIZE, CLASSES, seed=seed).float()


def save(path: Path, weights: Weights) -> Path:
    match path.suffix:
        case ".safetensors":
            save_file(weights, path)
        case ".npz":
            arrays: dict[str, Any] = {name: value.numpy() for name, value in weights.items()}
            np.savez(path, **arrays)
        case _:
            torch.save(weights, path)
    return path


def batch() -> tuple[Tensor, Tensor]:
    return toys.pictures(2, 1), torch.tensor([1, 3])


def trained(model: nn.Module) -> Weights:
    """After the local steps of a real client, by torch's own optimizer."""
    images, labels = batch()
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=PROTOCOL.local_lr)
    for _ in range(PROTOCOL.local_steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def observe(
    before: Path, after: Path, model: nn.Module | None = None, **changed: Any
) -> Observation:
    settings: dict[str, Any] = {
        "loss": cross_entropy,
        "image_shape": (1, SIZE, SIZE),
        "classes": CLASSES,
        "size": 2,
        "protocol": PROTOCOL,
    }
    return observe_update(
        before, after, net(7) if model is None else model, **{**settings, **changed}
    )


def refused(*args: Any, **more: Any) -> str:
    return toys.refused(observe, *args, **more)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return save(tmp_path / "before.pt", net().state_dict()), save(
        tmp_path / "after.pt", trained(net())
    )


@pytest.mark.parametrize("kind", [".safetensors", ".npz", ".pt", ".pth", ".ckpt"])
def test_two_files_of_a_client_give_what_it_would_have_shared(kind: str, tmp_path: Path) -> None:
    before, after = (
        save(tmp_path / f"before{kind}", net().state_dict()),
        save(tmp_path / f"after{kind}", trained(net())),
    )
    seen = observe(before, after, knowledge=Knowledge(labels=batch()[1]))
    expected = Shares(net(), cross_entropy, PROTOCOL)(*(part[None] for part in batch()))
    assert list(seen.gradients) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(seen.gradients[name], value[0], rtol=1e-3, atol=1e-5)
    assert (seen.image_shape, seen.size, seen.classes, seen.protocol) == (
        (1, SIZE, SIZE),
        2,
        CLASSES,
        PROTOCOL,
    )
    assert seen.knowledge.labels is not None


def test_the_model_gets_the_weights_and_running_statistics_from_before(tmp_path: Path) -> None:
    old, new, model = net(), net(1), net(7)
    old.get_buffer("1.running_mean").fill_(3.0)
    seen = observe(
        save(tmp_path / "a.pt", old.state_dict()), save(tmp_path / "b.pt", new.state_dict()), model
    )
    assert seen.model is model
    for name, value in old.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert "1.running_mean" not in seen.gradients


def test_in_train_mode_the_running_statistics_from_after_are_known(tmp_path: Path) -> None:
    old, new = net(), net(1)
    new.get_buffer("1.running_mean").fill_(3.0)
    files = save(tmp_path / "a.pt", old.state_dict()), save(tmp_path / "b.pt", new.state_dict())
    sent = observe(*files, protocol=Protocol(train_mode=True)).knowledge.statistics
    assert sent is not None and list(sent) == ["1.running_mean", "1.running_var"]
    assert all(torch.equal(value, new.state_dict()[name]) for name, value in sent.items())
    assert observe(*files, protocol=Protocol()).knowledge.statistics is None


def test_gradients_are_the_differences_divided_by_the_rate(tmp_path: Path) -> None:
    old = {
        name: value.double() if value.is_floating_point() else value
        for name, value in net().state_dict().items()
    }
    new = {name: value + 1 if value.is_floating_point() else value for name, value in old.items()}
    seen = observe(
        save(tmp_path / "a.pt", old),
        save(tmp_path / "b.npz", new),
        protocol=Protocol(local_lr=0.25),
    )
    for value in seen.gradients.values():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, torch.full_like(value, -4))


@pytest.mark.parametrize("nest", [None, "state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "model.", "module.", "model.module."])
def test_nested_and_prefixed_state_dicts_are_read(
    nest: str | None, prefix: str, tmp_path: Path
) -> None:
    weights = {prefix + name: value for name, value in net().state_dict().items()}
    torch.save(weights if nest is None else {nest: weights, "epoch": 3}, tmp_path / "x.pt")
    found = read_weights(tmp_path / "x.pt")
    assert list(found) == list(net().state_dict())
    assert all(torch.equal(value, net().state_dict()[name]) for name, value in found.items())


def test_a_model_whose_own_names_have_the_prefix_is_matched_by_name(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.model = net(seed)
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.model(images)
            return logits

    for drop in ((), ("mean",)):
        before, after = (
            save(
                tmp_path / f"{seed}.safetensors",
                {
                    name: value
                    for name, value in Wrapped(seed).state_dict().items()
                    if name not in drop
                },
            )
            for seed in (0, 1)
        )
        with warnings.catch_warnings(record=True, action="always") as told:
            seen = observe(before, after, Wrapped(7))
        assert [str(one.message).partition("has no ")[2][:6] for one in told] == [
            repr(name) for name in drop
        ]
        assert next(iter(seen.gradients)) == "model.0.weight"


@pytest.mark.parametrize("parameters_alone", [False, True])
def test_unnamed_arrays_are_matched_by_order_with_a_warning(
    parameters_alone: bool, tmp_path: Path
) -> None:
    for name, model in (("a.npz", net()), ("b.npz", net(1))):
        tensors = model.parameters() if parameters_alone else model.state_dict().values()
        np.savez(tmp_path / name, *[value.detach().numpy() for value in tensors])
    with pytest.warns(GradveilWarning) as told:
        seen = observe(tmp_path / "a.npz", tmp_path / "b.npz")
    messages = " ".join(str(one.message) for one in told)
    assert "matched by order, 'arr_0' taken for '0.weight'" in messages
    assert ("keeps its own for 3 buffer(s)" in messages) == parameters_alone
    expected = (
        net().get_parameter("4.bias") - net(1).get_parameter("4.bias")
    ).detach() / PROTOCOL.local_lr
    torch.testing.assert_close(seen.gradients["4.bias"], expected)


def test_safetensors_keep_no_order_so_other_names_are_refused(tmp_path: Path) -> None:
    renamed = {f"x{i}": value for i, value in enumerate(net().state_dict().values())}
    path = save(tmp_path / "a.safetensors", renamed)
    assert "does not fit the model: it has no '0.weight'" in refused(path, path)


def test_a_frozen_parameter_that_changed_is_told(pair: tuple[Path, Path]) -> None:
    model = net(7)
    model.get_parameter("0.weight").requires_grad_(False)
    with pytest.warns(GradveilWarning, match=r"'0.weight' changed, but the model holds it frozen"):
        seen = observe(*pair, model)
    assert "0.weight" not in seen.gradients


def altered(change: Callable[[Weights], object]) -> Weights:
    weights = {name: value.clone() for name, value in net(1).state_dict().items()}
    change(weights)
    return weights


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda w: w.update({"4.weight": torch.zeros(5, 72)}),
            "'4.weight' has shape (5, 72), the model (4, 72)",
        ),
        (lambda w: w.pop("4.bias"), "does not fit the model: it has no '4.bias'"),
        (
            lambda w: w.update(extra=torch.zeros(1)),
            "does not fit the model: the model has no 'extra'",
        ),
        (lambda w: w["4.bias"].fill_(float("nan")), "'4.bias' has values that are not finite"),
        (lambda w: w.update({"4.bias": torch.zeros(4).int()}), "'4.bias' is of type torch.int32"),
        (lambda w: w.clear(), "holds no weights"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_model_kept(
    change: Callable[[Weights], object], says: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    bad, model = save(tmp_path / "bad.pt", altered(change)), net(7)
    for paths in ((bad, pair[1]), (pair[0], bad)):
        message = refused(*paths, model)
        assert says in message and "bad.pt" in message
    assert all(
        torch.equal(value, net(7).state_dict()[name]) for name, value in model.state_dict().items()
    )


def test_identical_weights_share_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    statistics_only = altered(lambda w: w["1.running_mean"].add_(1))
    assert "nothing was shared" in refused(pair[0], pair[0])
    other = save(tmp_path / "c.pt", net(1).state_dict())
    assert "nothing was shared" in refused(other, save(tmp_path / "d.pt", statistics_only))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"classes": 9}, "gave shape (2, 4); expected (2, 9)"),
        ({"image_shape": (3, SIZE, SIZE)}, "do not fit"),
        ({"image_shape": (SIZE, SIZE)}, "expected (C, H, W)"),
        ({"size": 0}, "size 0"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(
    changed: dict[str, Any], says: str, pair: tuple[Path, Path]
) -> None:
    assert says in refused(*pair, **changed)


class Payload:
    """Its pickle makes a folder when it is loaded the unsafe way."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.marker,)


def test_the_payload_would_run_if_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").is_dir()


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.ckpt", "x.npz", "x.safetensors"])
@pytest.mark.parametrize("way", ["pickle", "torch", "numpy"])
def test_a_file_with_code_inside_is_refused_and_the_code_does_not_run(
    way: str, name: str, tmp_path: Path
) -> None:
    path, payload = tmp_path / name, Payload(tmp_path / "ran")
    with path.open("wb") as file:
        if way == "pickle":
            pickle.dump({"weight": payload}, file)
        elif way == "torch":
            torch.save({"state_dict": {"weight": torch.ones(1)}, "extra": payload}, file)
        else:
            np.savez(file, weight=np.array([payload], dtype=object))
    with (
        pytest.raises(GradveilError) as caught,
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):
        read_weights(path)
    assert (
        "\n" not in str(caught.value)
        and name in str(caught.value)
        and "weights_only" not in str(caught.value)
    )
    assert not (tmp_path / "ran").exists()


def test_a_whole_pickled_model_is_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.save(net(), tmp_path / "model.pt")
    with pytest.raises(
        GradveilError,
        match=r"it asks for torch\.nn\.\S+Sequential; save plain weights: torch\.save\(model\.",
    ):
        read_weights(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.h5", b"", "unknown kind '.h5'; choose from .safetensors, .npz, .pt, .pth, .ckpt"),
        ("x", b"", "unknown kind ''"),
        ("x.pt", b"", "damaged or no torch file"),
        ("x.pt", b"not a checkpoint", "damaged or no torch file"),
        ("x.npz", b"PK\x03\x04 broken", "cannot be read as .npz"),
        ("x.npz", b"", "cannot be read as .npz"),
        ("x.safetensors", b"\xff" * 20, "cannot be read as .safetensors"),
        ("missing.pt", None, "no weights file at"),
    ],
)
def test_other_and_damaged_files_are_refused(
    name: str, content: bytes | None, says: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert says in toys.refused(read_weights, tmp_path / name)


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_a_file_far_larger_than_the_model_is_refused(tmp_path: Path, suffix: str) -> None:
    state = net().state_dict() | {"surplus": torch.zeros(20 << 20)}
    large = save(tmp_path / f"large{suffix}", state)
    if suffix == ".npz":
        np.savez_compressed(large, **{name: value.numpy() for name, value in state.items()})
        assert large.stat().st_size < 1 << 20
    assert len(read_weights(large)) == len(state)
    before = save(tmp_path / f"before{suffix}", net().state_dict())
    with pytest.raises(GradveilError, match=rf"large{suffix} is refused: it .*at most 67,108,864"):
        observe(before, large)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2).to(torch.complex64),
        torch.ones(2).to(torch.float8_e5m2),
    ],
)
def test_a_tensor_that_weights_cannot_be_is_refused(tmp_path: Path, value: Tensor) -> None:
    torch.save({"a": value}, tmp_path / "x.pt")
    with pytest.raises(GradveilError, match=r"x\.pt: 'a' is no dense tensor of numbers"):
        read_weights(tmp_path / "x.pt")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    for suffix in (".pt", ".npz", ".safetensors"):
        whole = save(tmp_path / f"w{suffix}", net().state_dict()).read_bytes()
        (tmp_path / f"cut{suffix}").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(GradveilError, match="cut"):
            read_weights(tmp_path / f"cut{suffix}")


@pytest.mark.parametrize("content", [[torch.ones(1)], {"a": 1}, {1: torch.ones(1)}])
def test_a_torch_file_that_is_no_state_dict_is_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(GradveilError, match="expected a state dict"):
        read_weights(tmp_path / "x.pt")


def test_arrays_of_the_other_byte_order_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", weight=np.array([1.0, 2.5], dtype=">f4"))
    assert read_weights(tmp_path / "x.npz")["weight"].tolist() == [1.0, 2.5]


@pytest.mark.parametrize("name", ["resnet20-4", "vit"])
def test_a_built_in_model_goes_through_files_and_back(name: str, tmp_path: Path) -> None:
    def built(seed: int) -> nn.Module:
        return build(name, channels=1, size=SIZE, classes=CLASSES, seed=seed)

    before, after = (
        save(tmp_path / f"{seed}.safetensors", built(seed).state_dict()) for seed in (0, 1)
    )
    seen = observe(before, after, built(7))
    assert list(seen.gradients) == [key for key, _ in built(0).named_parameters()]


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What a client with one picture got and sent back, by plain SGD."""
    folder, model, mine = tmp_path_factory.mktemp("sent"), toys.leaky().float(), toys.fashion(1)
    before = save(folder / "before.pt", model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    nn.functional.cross_entropy(model(mine.images.float()), mine.labels).backward()
    optimizer.step()
    return str(before), str(save(folder / "after.pt", model.state_dict()))


def test_a_module_and_two_files_give_the_picture_back(sent: tuple[str, str]) -> None:
    model, mine = toys.leaky().float(), toys.fashion(1)
    with torch.no_grad():
        model.get_parameter("head.bias").fill_(9.0)  # other weights, which stay as they are
    found = reconstruct(*sent, model, image_shape=(1, 12, 12), steps=5, device="cpu")
    assert float(psnr(found.images, mine.images.float())) > 25
    assert found.labels is not None and torch.equal(found.labels, mine.labels)
    assert bool((model.get_parameter("head.bias") == 9).all())


def test_an_attack_is_a_value_or_a_name(sent: tuple[str, str]) -> None:
    more: dict[str, Any] = {"image_shape": (1, 12, 12), "device": "cpu"}
    attack = replace(adam_cosine, steps=2)
    value = reconstruct(*sent, toys.leaky().float(), attack=attack, **more)
    name = reconstruct(*sent, toys.leaky().float(), attack="adam-cosine", steps=2, **more)
    assert torch.equal(value.images, name.images)


def test_auto_runs_the_attacks_that_an_audit_means_and_compares_those_that_measure_alike(
    sent: tuple[str, str],
) -> None:
    model, pruned = toys.leaky().float(), parse("prune:0.5")
    more: dict[str, Any] = {"image_shape": (1, 12, 12), "device": "cpu", "steps": 1}
    tried = gv.reconstruct(*sent, model, attack="auto", defense=pruned, **more)
    assert isinstance(tried, gv.Tried)
    assert {*tried.found, *tried.left_out} == {*automatic(pruned, model)}
    assert "masked" in tried.found and "first layer" in tried.left_out["closed-form"]
    one = reconstruct(*sent, model, attack="masked", defense=pruned, **more)
    assert torch.equal(tried.found["masked"].images, one.images)
    for best, among in tried.nearest.values():
        assert tried.found[best].distance == min(tried.found[name].distance for name in among)
    of_two = reconstruct(*sent, model, attack="auto", size=2, **more)
    assert {*of_two.found, *of_two.left_out} == {*automatic(parse("none"), model, batch_size=2)}


def test_an_attack_of_auto_that_fails_is_left_out_with_the_reason() -> None:
    """Pictures off the grid of whole levels: peeling finds none of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = torch.rand(2, 1, 12, 12)
    nn.functional.cross_entropy(model(images), torch.tensor([3, 4])).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    more: dict[str, Any] = {"image_shape": (1, 12, 12), "device": "cpu", "size": 2}
    sent = before, model.state_dict(), model
    single = gv.reconstruct(*sent, attack="peeling", **more)
    assert single.status.startswith("failed: ")
    tried = gv.reconstruct(*sent, attack="auto", steps=1, **more)
    assert {*tried.found} == {"adam-cosine", "raced"}
    labeled = {name for name, reason in tried.left_out.items() if "know the labels" in reason}
    assert labeled == {"dense-matching", "features", "raced+features", "dense-inversion"}
    assert tried.left_out["peeling"] == single.status and len(tried.left_out) == 5


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        ("class-mean", "needs to know the means (class means of public data): give images of the"),
        ("transform-known", "draws included): a single update does not show it; an audit, which"),
        ("masked", "pruned (whether zeros were cut off), which is known only under prune or "),
    ],
)
def test_what_an_attack_misses_is_said_with_where_it_is_known(
    sent: tuple[str, str], attack: str, says: str
) -> None:
    more = {"image_shape": (1, 12, 12), "device": "cpu", "defense": "3-1-7"}
    assert says in toys.refused(reconstruct, *sent, toys.leaky().float(), attack=attack, **more)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attack": "auto", "steps": 0}, "steps 0: there must be at least 1"),
        ({"attack": "auto", "size": 0}, "size 0"),
        ({"attack": "auto", "before": "nowhere.pt"}, "no weights file at nowhere.pt"),
        ({"attack": "aut"}, "did you mean auto?"),
        ({"model": "lenet"}, "the image shape is not known"),
        ({"image_shape": None}, "the image shape is not known"),
        ({"model": 3}, "model: a whole number; expected a torch.nn.Module"),
        ({"image_shape": (3, 12, 12)}, "model Classifier fails on images of shape (1, 3, 12, 12)"),
        ({"attack": 3}, "attack: a whole number; expected an Attack or its name"),
        ({"attack": "magic"}, "unknown attack 'magic'"),
        ({"attack": "closed-form", "steps": 3}, "has no iterations: leave the steps out"),
        ({"steps": 0}, "steps 0: there must be at least 1"),
        ({"size": 0}, "size 0"),
        ({"local_lr": 0.0}, "local learning rate 0.0"),
        ({"before": "nowhere.pt"}, "no weights file at nowhere.pt"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
    ],
)
def test_bad_values_for_a_reconstruction_are_one_line(
    sent: tuple[str, str], changes: dict[str, Any], says: str
) -> None:
    given = {"before": sent[0], "after": sent[1], "model": toys.leaky().float()}
    more = {"image_shape": (1, 12, 12), "device": "cpu"}
    assert says in toys.refused(reconstruct, **(given | more | changes))


def flower_record(weights: Weights) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what Flower imports
        from flwr.app import ArrayRecord
    return ArrayRecord(weights)


@pytest.mark.parametrize("form", [flower_record, dict], ids=["ArrayRecord", "state dict"])
def test_arrays_in_memory_give_what_files_do(
    form: Callable[[Weights], Any], pair: tuple[Path, Path]
) -> None:
    arrays = form(net().state_dict()), form(trained(net()))
    seen, wanted = observe(*arrays), observe(*pair)
    assert list(seen.gradients) == list(wanted.gradients)
    for name, value in wanted.gradients.items():
        assert torch.equal(seen.gradients[name], value)
    found = reconstruct(
        *arrays, net(7), image_shape=(1, SIZE, SIZE), size=2, steps=1, local_steps=3, local_lr=0.05
    )
    assert found.images.shape == (2, 1, SIZE, SIZE)


def test_what_a_flower_user_saves_can_be_read(tmp_path: Path) -> None:
    record = flower_record(net().state_dict())
    torch.save(record.to_torch_state_dict(), tmp_path / "before.pt")
    arrays: dict[str, Any] = {name: array.numpy() for name, array in record.items()}
    np.savez(tmp_path / "named.npz", **arrays)
    np.savez(tmp_path / "ordered.npz", *record.to_numpy_ndarrays())
    wanted = net().state_dict()
    for name in ("before.pt", "named.npz", "ordered.npz"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GradveilWarning)  # of names that are not the model's
            found = fit_weights(tmp_path / name, net(7))
        assert all(torch.equal(value, wanted[key]) for key, value in found.items())


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (SimpleNamespace(stype="pickle", data=pickle.dumps(1)), "an array of kind 'pickle'"),
        (SimpleNamespace(stype="numpy.ndarray", data=b"cos"), "'0.weight': "),
        ("text", "of type str; expected a tensor, a NumPy or a Flower array"),
        (np.array([None]), "of type object"),
    ],
)
def test_an_array_that_is_no_array_of_numbers_is_refused(array: Any, words: str) -> None:
    assert words in refused(net().state_dict() | {"0.weight": array}, trained(net()))


def test_an_array_of_python_objects_is_never_unpickled() -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([print], dtype=object), allow_pickle=True)
    array = SimpleNamespace(stype="numpy.ndarray", data=stream.getvalue())
    words = "an array of Python objects, which would have to be unpickled"
    assert words in refused(net().state_dict() | {"0.weight": array}, trained(net()))


def test_an_attacker_is_told_the_defense(pair: tuple[Path, Path]) -> None:
    assert observe(*pair).knowledge.pruned is None
    assert observe(*pair, defense=parse("prune:0.5")).knowledge.pruned is True


def test_the_layers_of_a_defense_are_in_the_weights() -> None:
    defense = parse("precode:k=4")
    model = protected_model(defense, net(), (1, SIZE, SIZE))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = {
        name: value + 0.01 if value.is_floating_point() else value for name, value in before.items()
    }
    found = reconstruct(
        before,
        after,
        net(7),
        image_shape=(1, SIZE, SIZE),
        defense=defense,
        attack="without-random-layers",
        steps=1,
    )
    assert found.images.shape == (1, 1, SIZE, SIZE)
    with pytest.raises(GradveilError, match="does not fit the model"):
        reconstruct(before, after, net(7), image_shape=(1, SIZE, SIZE), steps=1)
