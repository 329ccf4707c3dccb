"""gradveil audit --flower: what a spy kept, of `gradveil federate` and of a user's own app."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor

import flower
from cli.conftest import gradveil as gradveil  # the command line, called in this process
from cli.conftest import undrawn as undrawn
from gradveil.attacks import find
from gradveil.audits import AuditJob, AuditResult
from gradveil.clients import Client
from gradveil.core.errors import GradveilError, GradveilWarning
from gradveil.core.tensor_files import read_safetensors
from gradveil.core.types import Batch, Protocol
from gradveil.data import Images, load
from gradveil.defenses import parse
from gradveil.engine.gradients import cross_entropy
from gradveil.federated.job import FederationJob
from gradveil.federated.run import federate
from gradveil.federated.spied import Update, average, read_round, save_update
from gradveil.federated.spied_audits import make_app_audit
from gradveil.models import build

pytestmark = [
    pytest.mark.filterwarnings("ignore::gradveil.core.errors.GradveilWarning"),
    pytest.mark.usefixtures("undrawn"),
]
MINI = "--data fashion-mnist-mini --model lenet --attack dlg --steps 2 --images 2 --device cpu"
EXACT = "--data fashion-mnist-mini --model mlp --attack closed-form --images 2 --device cpu"
RATE = 0.05


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two spied rounds of clients that prune, each audited."""
    out = tmp_path_factory.mktemp("run") / "run"
    job = FederationJob(
        "fashion-mnist-mini",
        "lenet",
        2,
        2,
        parse("prune:0.5"),
        batch_size=1,
        lr=RATE,
        spy_rounds=(1, 2),
        attacks={"dlg": find("dlg")},
        steps=2,
        audited=2,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradveilWarning)
        federate(job, out, engine=flower.here, progress=False)
    return out


@pytest.fixture(scope="module")
def spied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What a server of a user's own app kept of two clients, and the clients' images."""
    out, images = tmp_path_factory.mktemp("spy"), tmp_path_factory.mktemp("images")
    split = load("fashion-mnist-mini", "train")
    model = build("mlp", channels=1, size=28, classes=10, mean=split.mean, std=split.std)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for client in range(2):
        model.load_state_dict(before)
        some = split.images[[client]]
        loss = cross_entropy(model(some.float() / 255), split.labels[[client]]).mean()
        model.zero_grad()
        loss.backward()
        after = {
            name: value - RATE * model.get_parameter(name).grad.detach()  # type: ignore[union-attr]
            if name in dict(model.named_parameters())
            else value
            for name, value in before.items()
        }
        save_update(out, Update(f"{client}7", 3, before, after, False, 1.0))
    folder = images / "07" / str(int(split.labels[0]))
    folder.mkdir(parents=True)
    Image.fromarray(split.images[0, 0].numpy()).save(folder / "0.png")
    labels = split.labels[1:2].numpy()
    np.savez(images / "client-17.npz", images=split.images[1:2].numpy(), labels=labels)
    return out, images


Command = Callable[..., Any]


def test_a_round_of_a_run_is_audited_as_the_run_itself_does(
    gradveil: Command, run: Path, tmp_path: Path
) -> None:
    line = f"audit --flower {run} --round 2 {MINI} --defense prune:0.5 --json"
    found = gradveil(f"{line} --out {tmp_path / 'a'}")
    assert found.status == 0 and Path(found.result["page"]).is_file()
    (case,) = AuditResult.read(tmp_path / "a").cases
    (wanted,) = AuditResult.read(run / "audits" / "round-0002").cases
    ours = [(record.key, record.image, record.scores) for record in case.records]
    assert ours == [(record.key, record.image, record.scores) for record in wanted.records]
    assert {kind for (kind, *_), _, _ in ours} >= {"attack", "blind", "positive", "sham"}


def test_a_breaker_that_auto_means_can_be_named(
    gradveil: Command, run: Path, tmp_path: Path
) -> None:
    line = f"audit --flower {run} --round 1 {MINI.replace('dlg', 'masked')} --no-sham"
    assert gradveil(f"{line} --defense prune:0.5 --out {tmp_path / 'a'}").status == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--defense prune:0.5", "no --round was given: "),
        ("--defense prune:0.5 --round 7", "holds 1, 2"),
        ("--round 1", "defense prune:0.5 there, none here"),
        ("--round 1 --defense none --defense prune:0.5", "2 defenses"),
        ("--round 1 --defense prune:0.5 --local-lr 1", "--local-lr is known of "),
        ("--round 1 --defense prune:0.5 --checkpoint x", "--checkpoint does not go with --flower"),
        ("--round 1 --defense prune:0.5 --seed 3", "--seed is known of "),
    ],
)
def test_what_does_not_fit_a_run_is_one_line(
    gradveil: Command, run: Path, tmp_path: Path, line: str, words: str
) -> None:
    out = tmp_path / "a"
    assert words in gradveil(f"audit --flower {run} {MINI} {line} --out {out}").error
    assert not out.exists()


def test_updates_of_an_own_app_are_audited_by_the_images_of_its_clients(
    gradveil: Command, spied: tuple[Path, Path], tmp_path: Path
) -> None:
    line = f"audit --flower {spied[0]} --client-images {spied[1]} --local-lr {RATE}"
    found = gradveil(f"{line} {EXACT} --json --out {tmp_path / 'a'}")
    assert found.status == 0, found.said
    (case,) = AuditResult.read(tmp_path / "a").cases
    assert case.settings["candidates"] >= 20
    scores = [record.scores["used"] for record in case.of("attack", "closed-form")]
    assert len(scores) == 2 and min(score["psnr"] for score in scores) > 30
    assert [score["rank"] for score in scores] == [1, 1]
    assert len(case.of("sham", "sham")) == 2


def app_audit(folder: Path, images: Path, **more: Any) -> AuditJob:
    given: dict[str, Any] = {
        "protocol": Protocol(local_lr=RATE),
        "attacks": {"dlg": find("dlg")},
        "auto": False,
        "steps": 2,
        "audited": 2,
    }
    splits = load("fashion-mnist-mini", "train"), load("fashion-mnist-mini", "test")
    return make_app_audit(folder, 3, images, splits, "mlp", parse("none"), **(given | more))


def test_the_loss_of_an_own_app_is_the_clients(spied: tuple[Path, Path]) -> None:
    def twice(logits: Tensor, labels: Tensor) -> Tensor:
        return 2 * cross_entropy(logits, labels)

    job = app_audit(*spied, loss=twice)
    assert job.recorded is not None and "twice" in job.cases[0].folder and not job.note
    made = build("mlp", channels=1, size=28, classes=10)
    assert job.recorded(Client(made)).loss is twice


def test_an_average_of_clients_is_the_gradient_of_all_their_images(
    spied: tuple[Path, Path], tmp_path: Path
) -> None:
    (mean,) = average(read_round(spied[0], 3), 2)
    save_update(tmp_path, mean)
    job = app_audit(tmp_path, spied[1])
    assert (job.images, job.batch_size, job.note) == (2, 2, "")
    assert isinstance(job.data, Images) and job.recorded is not None
    model = build("mlp", channels=1, size=28, classes=10, mean=job.data.mean, std=job.data.std)
    model.load_state_dict(dict(mean.before))
    batch = Batch(job.data.images[:2].float() / 255, job.data.labels[:2])
    client = Client(model, 10, protocol=job.protocol)
    (found,) = job.recorded(client).share_batches([batch], [torch.Generator()])
    (wanted,) = client.share_batches([batch], torch.Generator())
    for name, value in wanted.seen.gradients.items():
        torch.testing.assert_close(found.seen.gradients[name], value, atol=1e-5, rtol=1e-3)
    job = app_audit(tmp_path, spied[1], protocol=Protocol(3, RATE))
    assert job.protocol == Protocol(3, RATE, averaged_clients=2) and not job.note


def test_an_average_of_clients_with_other_numbers_of_images_is_said_to_be_approximated(
    spied: tuple[Path, Path], tmp_path: Path
) -> None:
    one, other = read_round(spied[0], 3)
    (mean,) = average([one, replace(other, examples=2.0)], 2)
    save_update(tmp_path, mean)
    split = load("fashion-mnist-mini", "train")
    for name, some in (("07", split.images[:1]), ("17", split.images[1:3])):
        np.savez(tmp_path / f"{name}.npz", images=some.numpy(), labels=np.arange(len(some)))
    assert not app_audit(
        tmp_path, tmp_path
    ).note  # one gradient each: the mean is that of all images
    job = app_audit(tmp_path, tmp_path, protocol=Protocol(3, RATE))
    assert job.protocol == Protocol(local_lr=RATE) and "which is an approximation" in job.note


def test_how_updates_are_taken_stays_in_the_record_the_words_the_page_and_the_certificate(
    gradveil: Command, spied: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "images").mkdir()
    shutil.copytree(spied[1] / "07", tmp_path / "images" / "07")
    line = f"audit --flower {spied[0]} --client-images images --local-lr {RATE} {EXACT}"
    found = gradveil(f"{line} --json --certify lineup --no-sham --out a")
    note = "no images were given of 17"
    assert found.result["cases"][0]["note"] == note
    (case,) = AuditResult.read(tmp_path / "a").cases
    assert case.note == note
    words = f"The attacker's view: {note}."
    assert found.result["notes"].count(words) == 2  # also of the certificate
    assert (tmp_path / "a" / "index.html").read_text().count(note) >= 2
    again = gradveil("report a --json --certify lineup")
    assert again.status == 0 and note in again.shown + (tmp_path / "a" / "index.html").read_text()


@pytest.mark.parametrize("count", ["0", "-3", str(2**70)])
def test_a_wrong_number_of_images_is_called_as_it_was_typed(
    gradveil: Command, run: Path, spied: tuple[Path, Path], tmp_path: Path, count: str
) -> None:
    """In a run of `gradveil federate` the same number is called audited."""
    out = tmp_path / "a"
    of_run = f"audit --flower {run} --round 1 {MINI} --defense prune:0.5"
    of_app = f"audit --flower {spied[0]} --client-images {spied[1]} --local-lr {RATE} {EXACT}"
    for line in (of_run, of_app):
        said = gradveil(f"{line} --images {count} --out {out}").error
        assert "images " in said and "audited" not in said, said
        assert not out.exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--flower {spy}", "use gradveil reconstruct --spy"),
        ("--flower {spy} --client-images {spy}", "has no images of round 3, which is of 07, 17"),
        (
            "--flower {images} --client-images {images}",
            "expected the folder of `gradveil federate`",
        ),
        ("--flower {spy} --client-images {images} --defense 3-1-7", "is known to your app alone"),
        ("--round 1", "--round is for --flower"),
        ("--loss a:b", "--loss is for --flower"),
    ],
)
def test_what_does_not_fit_an_own_app_is_one_line(
    gradveil: Command, spied: tuple[Path, Path], tmp_path: Path, line: str, words: str
) -> None:
    out = tmp_path / "a"
    given = line.format(spy=spied[0], images=spied[1])
    assert words in gradveil(f"audit {given} {EXACT} --out {out}").error
    assert not out.exists()


def test_a_client_with_other_images_than_it_said_is_refused(
    gradveil: Command, spied: tuple[Path, Path], tmp_path: Path
) -> None:
    some = torch.zeros(2, 1, 28, 28, dtype=torch.uint8).numpy()
    np.savez(tmp_path / "07.npz", images=some, labels=np.array([1, 2]))
    line = f"audit --flower {spied[0]} --client-images {tmp_path} {EXACT} --out {tmp_path / 'a'}"
    assert "trained on 1 image(s)" in gradveil(line).error
    np.savez(tmp_path / "07.npz", images=some[:1])
    assert "a line-up is of one class" in gradveil(line).error


def test_images_that_are_not_behind_the_updates_are_doubted(
    gradveil: Command, spied: tuple[Path, Path], tmp_path: Path
) -> None:
    """The two clients' images are given the wrong way around."""
    out, _ = spied
    split = load("fashion-mnist-mini", "train")
    for client, image in (("07", 1), ("17", 0)):
        images, labels = (some[[image]].numpy() for some in (split.images, split.labels))
        np.savez(tmp_path / f"{client}.npz", images=images, labels=labels)
    line = f"audit --flower {out} --round 3 {EXACT} --client-images {tmp_path}"
    with pytest.warns(GradveilWarning, match="2 of 2 recorded updates hardly resemble those of"):
        gradveil(f"{line} --local-lr {RATE} --no-sham --out {tmp_path / 'a'}")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"client": "../other/0"}, "names the client '../other/0'"),
        ({"client": "17"}, "is a second update of client 17"),
        ({"round": 4}, "is of round 4, in the folder of 3"),
        ({"members": ["1", "1"]}, "names a client twice"),
    ],
)
def test_a_file_of_an_update_that_contradicts_its_place_is_refused(
    spied: tuple[Path, Path], tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    shutil.copytree(spied[0], tmp_path / "spy")
    path = tmp_path / "spy" / "round-0003" / "client-17.safetensors"
    if changed.get("client") == "17":
        shutil.copy(path, path.with_name("client-18.safetensors"))
    else:
        tensors, metadata = read_safetensors(path)
        facts = json.loads(metadata["gradveil"]) | changed
        path.write_bytes(save(tensors, {**metadata, "gradveil": json.dumps(facts)}))
    with pytest.raises(GradveilError, match=re.escape(said)):
        read_round(tmp_path / "spy", 3)
