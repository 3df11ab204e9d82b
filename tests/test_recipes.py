"""Recipes in this process: what they write, the errors a user will make, and what the README promises."""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
import numpy as np
import PIL.Image
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mpp.encoder import Encoder
from mpp.errors import UserError
from mpp.recipes import common, configuration, finetune, linear_probe, pretrain, quickstart
from mpp.weights import export_encoder

ROOT = Path(__file__).parent.parent
RECIPES = {
    "pretrain": pretrain.pretrain,
    "linear_probe": linear_probe.recipe,
    "finetune": finetune.recipe,
    "quickstart": quickstart.quickstart,
}
TINY = ["data.per_class=20", "data.test_per_class=5", "+encoder.depth=1", "train.batch_size=16", "train.steps=2"]


def call(name: str, *overrides: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Start a recipe as `python recipes/NAME.py ...` would, in this process; returns its exit code."""
    AcceleratorState._reset_state(reset_partial_state=True)  # a process of its own would have a fresh one
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *overrides])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    try:
        configuration.main(name, RECIPES[name])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Leave no precision behind for other tests."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small folder of real files: two classes, JPEG and PNG, not square, train/ and test/."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for label, colour in (("red", (200, 40, 40)), ("blue", (40, 40, 200))):
            (root / split / label).mkdir(parents=True)
            for i in range(count):
                noise = rng.integers(-40, 40, (40, 56, 3))
                image = PIL.Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8))
                image.save(root / split / label / f"{i}.{'jpg' if i % 2 else 'png'}")
    return root


SMALL = [
    "encoder.name=vit_tiny_patch16_224",
    "encoder.size=32",
    "+encoder.depth=1",
    "train.batch_size=8",
    "train.steps=2",
]


def test_pretrain_probe_and_finetune_on_a_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of the README on a folder, from pre-training to both evaluations, at another resolution too."""
    run, data = tmp_path / "a", ["data=folder", f"data.path={folder}"]
    assert call("pretrain", *data, *SMALL, f"out={run}", monkeypatch=monkeypatch) == 0
    assert set(load_file(run / "encoder" / "model.safetensors")) == set(
        Encoder("vit_tiny_patch16_224", size=32, depth=1).vit.state_dict()
    )
    probe = ["probe.seeds=2", "probe.labels=[3,null]", f"out={tmp_path / 'probe'}"]
    assert call("linear_probe", f"from={run}", *data, *probe, monkeypatch=monkeypatch) == 0
    rows = json.loads((tmp_path / "probe" / "results.json").read_text())
    assert [(row["protocol"], row["labels"], row["init"]) for row in rows] == [
        (protocol, labels, init)
        for labels in (3, None)
        for protocol, init in (
            ("linear_probe", "mpp"),
            ("linear_probe", "untrained"),
            ("baseline", "raw_knn"),
            ("baseline", "histogram"),
        )
    ]
    assert rows[-1]["mean"] == 1.0, "a colour histogram tells red from blue"
    # results are not written over by another evaluation
    assert call("linear_probe", f"from={run}", *data, *probe, "probe.seeds=1", monkeypatch=monkeypatch) == 2
    assert "probe.seeds: 2 -> 1" in capsys.readouterr().err
    assert json.loads((tmp_path / "probe" / "results.json").read_text()) == rows
    tune = ["train.steps=2", "train.batch_size=8", "finetune.size=48", f"out={tmp_path / 'tuned'}"]
    assert call("finetune", f"from={run}", *tune, monkeypatch=monkeypatch) == 0  # data=same finds the folder again
    (row,) = json.loads((tmp_path / "tuned" / "results.json").read_text())
    assert (row["protocol"], row["init"], row["labels"], row["seeds"], row["std"]) == ("finetune", "mpp", None, 1, None)
    assert load_file(tmp_path / "tuned" / "encoder" / "model.safetensors")["pos_embed"].shape == (1, 10, 192)
    # the fine-tuned encoder is itself something to start from
    again = [f"from={tmp_path / 'tuned'}", "probe.seeds=1", "probe.controls=false", f"out={tmp_path / 'again'}"]
    assert call("linear_probe", *again, monkeypatch=monkeypatch) == 0
    assert json.loads((tmp_path / "again" / "results.json").read_text())[0]["init"] == "supervised"
    assert "error" not in capsys.readouterr().err


def test_supervised_pretraining(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["objective=supervised", "data=folder", f"data.path={folder}", *SMALL, f"out={tmp_path}"]
    assert call("pretrain", *overrides, monkeypatch=monkeypatch) == 0
    description = json.loads((tmp_path / "encoder" / "config.json").read_text())
    assert (description["objective"], description["pool"]) == ("supervised", "cls")


def test_digits_are_grey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["data=digits", "+encoder.depth=1", "train.steps=2", f"out={tmp_path}"]
    assert call("pretrain", *overrides, monkeypatch=monkeypatch) == 0
    assert load_file(tmp_path / "encoder" / "model.safetensors")["patch_embed.proj.weight"].shape == (96, 1, 2, 2)


def test_accumulation_and_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulation gives the same step; bfloat16 runs, with finite losses of its own."""
    losses = {}
    for name, extra in {"plain": [], "accumulated": ["train.accumulation=2"], "bf16": ["train.precision=bf16"]}.items():
        out = tmp_path / name
        overrides = [*TINY, "train.steps=6", "train.log_every=1", *extra, f"out={out}"]
        assert call("pretrain", *overrides, monkeypatch=monkeypatch) == 0
        losses[name] = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert losses["accumulated"] == pytest.approx(losses["plain"], abs=1e-5)
    assert losses["bf16"] == pytest.approx(losses["plain"], rel=0.05)
    assert losses["bf16"] != losses["plain"]


def test_tracker_gets_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("pretrain", *TINY, "train.tracker=tensorboard", f"out={tmp_path}", monkeypatch=monkeypatch) == 0
    files = [EventAccumulator(str(path)).Reload() for path in tmp_path.rglob("events.out.tfevents.*")]
    (events,) = [file for file in files if "loss" in file.Tags()["scalars"]]  # another holds the configuration
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(2, pytest.approx(row["loss"]))]


def test_the_same_command_again_has_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert call("pretrain", *TINY, f"out={tmp_path}", monkeypatch=monkeypatch) == 0
    assert "continued from step 2" in capsys.readouterr().out
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert call("pretrain", *TINY, "objective.ratio=0.15", f"out={tmp_path}", monkeypatch=monkeypatch) == 2
    assert "objective.ratio: 0.5 -> 0.15" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("pretrain", ["train.stps=5"], "unknown key train.stps; did you mean train.steps"),
        ("pretrain", ["+train.stps=5"], "unknown key train.stps; did you mean steps"),
        ("pretrain", ["train.steps=many"], "train.steps=many must be a whole number or null"),
        ("pretrain", ["train.steps=1.5"], "train.steps=1.5 must be a whole number or null"),
        ("pretrain", ["train.steps=-1"], "train.steps must be positive"),
        ("pretrain", ["train.steps=5", "train.epochs=5"], "train.steps or train.epochs, not both"),
        ("pretrain", ["train.precision=fp8"], "train.precision must be no, bf16 or fp16"),
        ("pretrain", ["train.tracker=tensorbord"], "train.tracker=tensorbord is unknown; did you mean tensorboard"),
        ("pretrain", ["objective=mp"], "objective"),
        ("pretrain", ["objective.name=mae"], "objective.name must be mpp or supervised"),
        ("pretrain", ["objective.ratio=0"], "ratio must lie in (0, 1]"),
        ("pretrain", ["objective.donor=other"], "donor must be partner or same"),
        ("pretrain", ["optim.opt=adamm"], "optim.opt=adamm"),
        ("pretrain", ["schedule.decay=cos"], "schedule.decay must be cosine, linear or constant"),
        ("pretrain", ["train.steps=5", "schedule.warmup_steps=5"], "warmup_steps=5 must be shorter than the run of 5"),
        ("pretrain", ["encoder.name=vit_smal_patch16_224"], "is not a timm model; near: vit_small_patch16_224"),
        ("pretrain", ["encoder.name=resnet18"], "not timm's VisionTransformer"),
        ("pretrain", ["+encoder.dept=1"], "does not take"),
        ("pretrain", ["encoder.size=30"], "not divisible by the patch 4 x 4"),
        ("pretrain", ["train.batch_size=33"], "each needs an even number, so use a multiple of 2: 32 or 34"),
        ("pretrain", ["train.batch_size=100"], "larger than the data set of 80 images; use at most 80"),
        ("pretrain", ["data=folder"], "needs data.path="),
        ("pretrain", ["data=folder", "data.path=/no/such/folder"], "data.path=/no/such/folder: no such folder"),
        ("pretrain", ["data=folder", "data.path={tmp}/empty"], "no images found in"),
        ("pretrain", ["data=folder", "data.path={tmp}/broken", "train.batch_size=2"], "cannot read {tmp}/broken/a.png"),
        ("pretrain", ["data=hub", "data.path={tmp}/missing.parquet"], "could not read it"),
        ("pretrain", ["data=same"], "data=same means the data of the run"),
        ("pretrain", ["objective=supervised", "data=folder", "data.path={tmp}/flat"], "has no labels"),
        ("linear_probe", [], "from must be given"),
        ("linear_probe", ["from={tmp}/nothing"], "no such run folder or file"),
        ("linear_probe", ["from={tmp}/empty"], "is not a run"),
        ("linear_probe", ["from={tmp}/unfinished"], "this run has not finished"),
        ("linear_probe", ["from={tmp}/misfit", "data=photos"], "1 missing (norm.bias); 1 left over (decoder.weight)"),
        ("linear_probe", ["from={tmp}/misfit", "data=folder", "data.path={tmp}/flat"], "has no labels"),
        ("linear_probe", ["from={tmp}/fine", "data=digits"], "the encoder takes 3 channel(s), the data has 1"),
        ("linear_probe", ["from={tmp}/fine", "data=photos", "probe.labels=[5000]"], "labels=5000 a class"),
        ("linear_probe", ["from={tmp}/fine", "data=photos", "probe.pool=max"], "pool must be cls or mean"),
        ("finetune", ["from={tmp}/fine", "data=folder", "data.path={tmp}/flat"], "has no labels"),
        ("finetune", ["from={tmp}/fine", "data=photos", "finetune.size=30"], "not divisible by the patch"),
        ("finetune", ["from={tmp}/fine", "data=photos", "finetune.rates=[1.0,2.0]"], "held_out=25"),
        ("pretrain", ["data.per_class=0"], "must be positive"),
        ("pretrain", ["+schedule.steps=9"], "unknown key schedule.steps"),
        ("pretrain", ["train.precision=fp16"], "fp16 needs an accelerator"),
        ("linear_probe", ["from={tmp}/fine", "data=photos", "probe.seeds=0"], "probe.seeds must be positive, got 0"),
        ("linear_probe", ["from={tmp}/fine", "data=photos", "probe.labels=[]"], "probe.labels must be positive"),
        ("quickstart", ["+few.clip=1.0"], "unknown key few.clip"),
        ("quickstart", ["objective=supervised"], "the quickstart shows masked patch prediction"),
    ],
)  # fmt: skip
def test_errors_are_one_line(
    name: str,
    overrides: list[str],
    says: str,
    wrong_things: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = [override.replace("{tmp}", str(wrong_things)) for override in overrides]
    if not any(override.startswith("data") for override in overrides) and name in ("pretrain", "quickstart"):
        overrides = ["data.per_class=10", "data.test_per_class=2", *overrides]
    elif "data=photos" in overrides:
        overrides = [*overrides, "data.per_class=10", "data.test_per_class=2"]
    assert call(name, f"out={tmp_path / 'out'}", *overrides, monkeypatch=monkeypatch) == 2
    err = capsys.readouterr().err
    assert says.replace("{tmp}", str(wrong_things)) in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, f"one line, not\n{err}"


@pytest.fixture(scope="module")
def wrong_things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and folders that are not what a recipe wants."""
    root = tmp_path_factory.mktemp("wrong")
    for name in ("empty", "flat", "broken", "unfinished", "misfit"):
        (root / name).mkdir()
    for i in range(4):
        PIL.Image.fromarray(np.full((32, 32, 3), 60 * i, np.uint8)).save(root / "flat" / f"{i}.png")
    for name in ("a.png", "b.png"):  # one alone would be replaced by the other
        (root / "broken" / name).write_bytes((root / "flat" / "1.png").read_bytes()[:40])
    (root / "unfinished" / "config.yaml").write_text("data: {source: photos}\n")
    encoder = Encoder("vit_micro_patch4_32", depth=1)
    export_encoder(encoder, root / "fine" / "encoder", objective="mpp")
    export_encoder(encoder, root / "misfit", objective="mpp")
    tensors = load_file(root / "misfit" / "model.safetensors")
    del tensors["norm.bias"]
    save_file({**tensors, "decoder.weight": torch.zeros(2)}, root / "misfit" / "model.safetensors")
    return root


def test_processes_that_do_not_see_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's state says one process, the launcher two: both would write to the same folder."""
    assert common.start(common.Training()).num_processes == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="the launcher started 2 processes, but accelerate sees 1"):
        common.start(common.Training())


def commands(*files: str) -> list[tuple[str, list[str]]]:
    """Every `recipes/NAME.py key=value ...` that a fenced block of these files tells people to run."""
    found = []
    for file in files:
        for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", (ROOT / file).read_text(), flags=re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if match := re.search(r"recipes[/.](\w+?)(?:\.py)?(?:\s|$)(.*)", line.split("#")[0]):
                    found.append((match[1], shlex.split(match[2])))
    return found


def test_commands_of_the_readme_compose() -> None:
    listed = commands("README.md")
    assert {name for name, _ in listed} >= {"pretrain", "linear_probe", "finetune"}
    with hydra.initialize_config_module(version_base="1.3", config_module="mpp.recipes.conf"):
        for name, overrides in listed:
            hydra.compose(name, overrides)


def test_every_experiment_composes() -> None:
    """Each names its own command in its first lines."""
    files = sorted((ROOT / "recipes" / "conf" / "experiment").glob("*.yaml"))
    assert files
    for file in files:
        match = re.search(r"recipes/(\w+)\.py .*\+?experiment=(\w+)", file.read_text())
        assert match, file
        assert match[2] == file.stem
        with hydra.initialize_config_module(version_base="1.3", config_module="mpp.recipes.conf"):
            hydra.compose(match[1], [f"experiment={file.stem}"])


def test_constraints_hold_versions_and_nothing_else() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!_-]+( ; [^/]+)?", line), line
    assert not (ROOT / "uv.lock").exists()


def test_names_in_docs_exist() -> None:
    """docs/paper.md names files and definitions; each is there."""
    named = re.findall(r"`((?:mpp|eval|recipes|tests)/[\w/.]+)(?:: (\w+))?`", (ROOT / "docs" / "paper.md").read_text())
    assert len(named) > 10
    for file, name in named:
        text = (ROOT / file).read_text()
        assert not name or re.search(rf"(def|class) {name}\b", text), f"{file}: {name}"


def test_an_experiment_wins_over_the_recipe_and_the_command_line_over_both() -> None:
    with hydra.initialize_config_module(version_base="1.3", config_module="mpp.recipes.conf"):
        config = hydra.compose("quickstart", ["experiment=digits", "few.batch_size=16"])
        momentum = hydra.compose("finetune", ["optim=momentum", "from=x"])
    assert (config.out, config.few.steps, config.few.batch_size) == ("runs/digits", 200, 16)
    assert list(config.finetune.labels) == [10, 100]
    assert (momentum.optim.lr, momentum.optim.weight_decay) == (0.03, 0.0)


def test_a_run_is_not_continued_on_other_data(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One image less gives all others other numbers. What is refused leaves the run as it was."""
    mine, out = tmp_path / "images", tmp_path / "run"
    shutil.copytree(folder, mine)
    os.mkfifo(mine / "train" / "red" / "pipe.png")  # nobody writes into it, and nothing waits for it
    command = [*SMALL, "data=folder", f"data.path={mine}", "train.max_bad=0.1", f"out={out}", "train.steps=7"]
    assert call("pretrain", *command, monkeypatch=monkeypatch) == 0
    assert "pipe.png (this is no regular file)" in (out / "bad_images.txt").read_text()
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    for change, message in (
        (["train.steps=1"], "holds a run of 7 steps, more than train.steps=1; give more, or choose another out="),
        (["train.accumulation=3", "train.steps=8"], "each needs an even number"),
    ):
        assert call("pretrain", *command, *change, monkeypatch=monkeypatch) == 2
        assert message in capsys.readouterr().err
        assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    (mine / "train" / "blue" / "3.jpg").unlink()
    assert call("pretrain", *command, "train.steps=8", monkeypatch=monkeypatch) == 2
    assert "25 training images then, 24 now" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    shutil.copy(folder / "train" / "blue" / "3.jpg", mine / "train" / "blue" / "3.jpg")
    (out / "skipped.jsonl").write_text('{"a')
    assert call("pretrain", *command, "train.steps=8", monkeypatch=monkeypatch) == 2
    assert re.search(r"skipped\.jsonl is damaged .*remove the file", capsys.readouterr().err)
    (out / "skipped.jsonl").unlink()
    assert call("pretrain", *command, "train.steps=8", monkeypatch=monkeypatch) == 0
