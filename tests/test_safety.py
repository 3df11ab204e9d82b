"""Nothing that the project loads may run code: no pickle, no foreign paths, no callables from a configuration."""

import ast
import builtins
import inspect
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
import timm
import torch
import yaml
from timm.models._builder import build_model_with_cfg

import mpp
import mpp.eval
import mpp.recipes
from mpp import Encoder, UserError
from mpp.data import load_data
from mpp.encoder import NOT_TAKEN
from mpp.recipes import common
from mpp.recipes.configuration import call
from mpp.train.run import load_config
from mpp.weights import build_encoder, export_encoder, find_export, load_encoder

# ---------------------------------------------------------------------------------------------------- what is written

UNPICKLING = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {  # by their full names, however they were imported
    "hydra.utils.instantiate", "hydra.utils.call", "hydra.utils.get_method", "hydra.utils.get_class",
    "hydra.utils.get_object", "hydra.utils.get_static_method",
    "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "pandas.read_pickle", "torch.hub.load", "pydoc.locate", "pkgutil.resolve_name",
}  # fmt: skip


def full_name(node: ast.expr, known: dict[str, str]) -> str:
    """The dotted name of an expression, with what each first part was imported as."""
    if isinstance(node, ast.Attribute):
        return f"{full_name(node.value, known)}.{node.attr}"
    return known.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def dangers(source: str) -> Iterator[str]:
    """What in a module could run code that it was given, as "line: what"."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
            known |= {name.asname: name.name for name in node.names if name.asname}
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""] + [f"{node.module}.{name.name}" for name in node.names]
            known |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        for module in modules:
            if UNPICKLING & set(module.split(".")):
                yield f"{node.lineno}: import {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value == "trust_remote_code":
            yield f"{node.lineno}: trust_remote_code"
        if isinstance(node, ast.Attribute | ast.Name) and full_name(node, known) in CALLS:
            yield f"{node.lineno}: {full_name(node, known)}"
        if isinstance(node, ast.Name) and node.id in BUILTINS and node.id not in known:
            yield f"{node.lineno}: {node.id}"
        if not isinstance(node, ast.Call):
            continue
        name, given = full_name(node.func, known), {word.arg: word.value for word in node.keywords}
        if "trust_remote_code" in given:
            yield f"{node.lineno}: trust_remote_code"
        if name == "torch.load" and not is_constant(given.get("weights_only"), True):
            yield f"{node.lineno}: torch.load without weights_only=True"
        if "allow_pickle" in given and not is_constant(given["allow_pickle"], False):
            yield f"{node.lineno}: allow_pickle"
        if "shell" in given and not is_constant(given["shell"], False):
            yield f"{node.lineno}: shell"
        if name == "importlib.import_module" and not all(isinstance(value, ast.Constant) for value in node.args):
            yield f"{node.lineno}: importlib.import_module of a value"
        if None in given and name in ("torch.load", "numpy.load", "np.load"):
            yield f"{node.lineno}: {name} with arguments that are not written out"


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def modules() -> list[Path]:
    """Every module of the project; the folders of `mpp.eval` and `mpp.recipes` may lie beside that of `mpp`."""
    roots = {Path(package.__path__[0]).resolve() for package in (mpp, mpp.eval, mpp.recipes)}
    return sorted({file for root in roots for file in root.rglob("*.py")})


def test_every_module_is_looked_at():
    names = {file.name for file in modules()}
    assert {"encoder.py", "checkpoint.py", "features.py", "pretrain.py", "sources.py"} <= names
    assert len(names) > 25


@pytest.mark.parametrize("file", modules(), ids=lambda file: f"{file.parent.name}/{file.name}")
def test_no_module_can_run_what_it_loads(file: Path):
    assert list(dangers(file.read_text())) == []


@pytest.mark.parametrize(
    "snippet",
    [
        "import pickle", "import pickle as p", "from pickle import loads", "import dill", "import marshal",
        "import shelve", "import joblib", "from sklearn.externals import joblib", "import cloudpickle",
        "import torch; torch.load(x)", "from torch import load; load(x)", "import torch as t; t.load(x)",
        "import torch; torch.load(x, weights_only=False)", "import torch; torch.load(x, weights_only=flag)",
        "import torch; torch.load(x, **options)", "import torch; torch.hub.load(x)",
        "eval(x)", "exec(x)", "compile(x, '', 'exec')", "__import__(x)", "run = eval",
        "import hydra; hydra.utils.instantiate(x)", "from hydra.utils import instantiate; instantiate(x)",
        "from hydra.utils import call as c; c(x)", "from hydra import utils; utils.get_method(x)",
        "from hydra.utils import get_class; get_class(x)",
        "import importlib; importlib.import_module(x)", "from importlib import import_module; import_module(f'{x}')",
        "import yaml; yaml.load(x, yaml.Loader)", "import yaml; yaml.unsafe_load(x)", "import yaml; yaml.full_load(x)",
        "import numpy as np; np.load(x, allow_pickle=True)", "import numpy; numpy.load(x, allow_pickle=flag)",
        "import numpy as np; np.load(x, **options)",
        "load_dataset(x, trust_remote_code=True)", "options = {'trust_remote_code': True}",
        "import subprocess; subprocess.run(x, shell=True)", "import subprocess; subprocess.getoutput(x)",
        "import os; os.system(x)", "from os import system; system(x)", "import os; os.popen(x)",
        "import pandas as pd; pd.read_pickle(x)",
        "def f():\n    if x:\n        import pickle",
    ],
)  # fmt: skip
def test_the_check_catches(snippet: str):
    assert list(dangers(snippet))


@pytest.mark.parametrize(
    "snippet",
    [
        "import torch; torch.load(x, weights_only=True)", "import re; re.compile(x)", "import torch; torch.compile(x)",
        "model.eval()", "import importlib; importlib.import_module('mpp.encoder')", "import yaml; yaml.safe_load(x)",
        "import numpy as np; np.load(x)", "np.load(x, allow_pickle=False)", "import subprocess; subprocess.run([x])",
        "from mpp.recipes.configuration import call; call(x)", "import json; json.load(x)",
    ],
)  # fmt: skip
def test_the_check_lets_pass(snippet: str):
    assert list(dangers(snippet)) == []


# ---------------------------------------------------------------------------------------------------- weights


class Touch:
    """What touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that only an unpickled `Touch` makes; it is absent after the test."""
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Touch(marker)))
    assert marker.exists()  # it would work
    marker.unlink()
    yield marker
    assert not marker.exists()


@pytest.fixture
def exported(tmp_path: Path, encoder: Encoder) -> Path:
    return export_encoder(encoder, tmp_path / "run" / "encoder", objective="mpp", data="x")


def change(exported: Path, **arguments: object) -> None:
    """As a stranger might: other arguments in config.json."""
    config = json.loads((exported / "config.json").read_text())
    config["mpp"] |= arguments
    (exported / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_checkpoint_that_a_description_names_is_not_read(exported: Path, marker: Path, how: str):
    evil = exported / "evil.pth"
    evil.write_bytes(pickle.dumps(Touch(marker)))
    if how == "torch":
        torch.save({"state_dict": Touch(marker)}, evil)
    change(exported, checkpoint_path=str(evil))
    for read in (load_encoder, build_encoder):
        with pytest.raises(UserError, match=r"^from=.*: encoder\.checkpoint_path cannot be used"):
            read(exported)


def test_weights_that_are_a_pickle_are_not_read(exported: Path, marker: Path):
    for write in (
        lambda path: path.write_bytes(pickle.dumps(Touch(marker))),
        lambda path: torch.save(Touch(marker), path),
    ):
        write(exported / "model.safetensors")
        with pytest.raises(UserError, match="is not a readable safetensors file"):
            load_encoder(exported)


@pytest.mark.parametrize("name", ["weights.pth", "model.pt", "pytorch_model.bin", "last.ckpt", "x.pkl", "x.pickle"])
def test_files_that_need_pickle_are_refused_by_name(tmp_path: Path, marker: Path, name: str):
    folder = tmp_path / "downloaded"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Touch(marker)))
    (folder / "config.json").write_text("{}")
    for given in (folder, folder / name):
        with pytest.raises(
            UserError, match=rf"{name} is not read, since .* pickles, which can run code .*; give the ou"
        ):
            find_export(given)


def test_a_pickle_beside_an_export_is_nobodys_business(exported: Path, marker: Path):
    (exported / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(marker)))
    assert load_encoder(exported).name == "vit_micro_patch4_32"


@pytest.mark.parametrize(
    "arguments",
    [{"pretrained": True}, {"pretrained": False}, {"name": "hf-hub:someone/model"}, {"name": "local-dir:/tmp/model"},
     {"name": "../model"}, {"name": None}, {"name": 3}, {"mean": "abc"}, {"size": "32"}, {"size": {"a": 1}},
     {"depth": {"_target_": "os.system"}}, {"_target_": "os.system"}, {"block_fn": "os.system"},
     {"norm_layer": "os.system"}, {"act_layer": "os.system"}, {"attn_layer": "os.system"}, {"embed_layer": "os.system"},
     {"pretrained_cfg": {"file": "/etc/passwd"}}, {"pretrained_cfg_overlay": {"file": "/etc/passwd"}}],
)  # fmt: skip
def test_a_strangers_description_is_one_line_at_worst(exported: Path, arguments: dict[str, object]):
    change(exported, **arguments)
    with pytest.raises(UserError, match=r"^from=.*: ") as met:
        build_encoder(exported)
    assert "\n" not in str(met.value)


# ---------------------------------------------------------------------------------------------------- timm's arguments


def test_every_argument_with_which_timm_reads_or_fetches_is_refused():
    """So that a new version of timm does not open a door unseen: whatever it takes beside the model's own arguments."""
    for function in (timm.create_model, build_model_with_cfg):
        assert set(inspect.signature(function).parameters) - NOT_TAKEN == {"pretrained", "kwargs"}
    for name in NOT_TAKEN - {"in_chans", "model_name"}:
        with pytest.raises(UserError, match=rf"encoder\.{name} cannot be used"):
            Encoder("vit_micro_patch4_32", **{name: "x"})


@pytest.mark.parametrize(
    "name", ["hf-hub:a/b", "hf_hub:a/b", "local-dir:x", "a/b", "x\\y", "vit_micro_patch4_32.a:b", ""]
)
def test_names_with_a_scheme_or_a_path_are_refused(name: str):
    with pytest.raises(UserError, match="is not the name of a timm model, without scheme or path"):
        Encoder(name)


@pytest.mark.parametrize("value", [torch.nn.LayerNorm, print, {"a": 1}, [print], Path("x"), np.float32(1)])
def test_arguments_are_plain_values(value: object):
    with pytest.raises(UserError, match=r"encoder\.norm_layer must be a number, text, true, false, null or a list"):
        Encoder("vit_micro_patch4_32", norm_layer=value)


def test_plain_values_still_shape_an_encoder():
    encoder = Encoder(
        "vit_micro_patch4_32", depth=1, act_layer="relu", init_values=None, qk_norm=True, patch_size=[8, 8]
    )
    assert encoder.grid == (4, 4)
    assert isinstance(encoder.vit.blocks[0].mlp.act, torch.nn.ReLU)


# ---------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("key", ["_target_", "_partial_", "_args_", "_recursive_"])
def test_hydras_keys_for_callables_are_unknown(key: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("run"))
    groups: list[tuple[str, Callable[..., object], tuple[object, ...]]] = [
        ("train", common.Training, ()),
        ("data", load_data, ()),
        ("optim", common.make_optimizer, (torch.nn.Linear(1, 1),)),
        ("schedule", common.make_rate, ()),
    ]
    for group, function, given in groups:
        with pytest.raises(UserError, match=f"unknown key {group}.{key}"):
            call(group, function, {key: "os.system"}, *given)
    with pytest.raises(UserError, match=key):  # takes what timm takes, which this is not
        call("encoder", Encoder, {"name": "vit_micro_patch4_32", key: "os.system"})


def test_interpolations_of_a_strangers_run_stay_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET", "s3cret")
    (tmp_path / "config.yaml").write_text("data: {source: folder, path: '${oc.env:SECRET}'}\n")
    assert load_config(tmp_path)["data"]["path"] == "${oc.env:SECRET}"
    with pytest.raises(UserError) as met:
        common.open_data({"source": "same"}, run=tmp_path)
    assert "s3cret" not in str(met.value)


def test_objects_in_a_strangers_yaml_are_not_made(tmp_path: Path):
    marker = tmp_path / "marker"
    text = f"a: !!python/object/apply:os.system ['touch {marker}']\n"
    yaml.unsafe_load(text)
    assert marker.exists()  # it would work
    marker.unlink()
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises((UserError, yaml.YAMLError)):
        load_config(tmp_path)
    assert not marker.exists()


# ---------------------------------------------------------------------------------------------------- paths


def write_table(path: Path, images: list[dict[str, Any]]) -> Path:
    """A parquet file of images; written row by row, since `datasets` would embed the files that it finds."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"image": pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()}))})
    features = datasets.Features({"image": datasets.Image()})
    pq.write_table(table.cast(features.arrow_schema), path)
    return path


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """An image that is none of the data set's business."""
    path = tmp_path / "private" / "secret.png"
    path.parent.mkdir()
    PIL.Image.new("RGB", (4, 4)).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path, secret: Path) -> Path:
    """A data set's folder with three images of its own, and links out of it."""
    folder = tmp_path / "set"
    (folder / "sub").mkdir(parents=True)
    for name in ("1.png", "sub/2.png", "..3.png"):
        PIL.Image.new("RGB", (4, 4)).save(folder / name)
    (folder / "link").symlink_to(secret.parent)
    (tmp_path / "set-2").mkdir()
    PIL.Image.new("RGB", (4, 4)).save(tmp_path / "set-2" / "4.png")
    return folder


def rows(*paths: str | Path | None) -> list[dict[str, Any]]:
    return [{"bytes": None, "path": None if path is None else str(path)} for path in paths]


def test_files_of_the_data_set_itself_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    content = (folder / "1.png").read_bytes()
    held = [{"bytes": content, "path": "/etc/passwd"}, {"bytes": content, "path": None}]
    own = rows(folder / "1.png", folder / "sub" / "2.png", folder / "sub" / ".." / "1.png", folder / "..3.png", None)
    table = write_table(folder / "x.parquet", own + held)
    assert len(load_data("hub", path=str(table)).train) == 7
    monkeypatch.chdir(folder.parent)
    assert len(load_data("hub", path="set/x.parquet").train) == 7


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "{secret}", "{folder}/../private/secret.png", "{folder}/link/secret.png", "1.png", "../x.png",
     "{folder}/sub/..", "{folder}-2/4.png", "zip://1.png::{folder}/x.zip", "https://example.org/1.png", "file:///x.png",
     "~/x.png", "{folder}\n/../x.png"],
)  # fmt: skip
def test_a_path_out_of_the_data_set_is_refused(folder: Path, secret: Path, path: str):
    path = path.format(folder=folder, secret=secret)
    table = write_table(folder / "x.parquet", [*rows(folder / "1.png"), *rows(path, path), *rows(folder / "1.png")])
    with pytest.raises(UserError, match=r"names 2 file\(s\) outside of .*set, such as ") as met:
        load_data("hub", path=str(table))
    assert "\n" not in str(met.value)
    assert ascii(path)[1:-1] in str(met.value)


def test_a_relative_path_is_refused_wherever_it_would_lead(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Which file it names would depend on the folder that the command is started in."""
    table = write_table(folder / "x.parquet", rows("sub/2.png"))
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=r"names 1 file\(s\) outside"):
        load_data("hub", path=str(table))


def test_paths_in_columns_of_text_and_in_the_test_split_are_refused(folder: Path, secret: Path):
    (folder / "train.jsonl").write_text(json.dumps({"photo": str(secret)}) + "\n")
    with pytest.raises(UserError, match=r"names 1 file\(s\) outside"):
        load_data("hub", path=str(folder / "train.jsonl"), image_column="photo")
    (folder / "train.jsonl").unlink()
    both = folder.parent / "both"
    both.mkdir()
    PIL.Image.new("RGB", (4, 4)).save(both / "1.png")
    write_table(both / "train-0.parquet", rows(both / "1.png"))
    (both / "1.png").rename(folder / "moved.png")  # or `datasets` would take the folder for one of images
    write_table(both / "test-0.parquet", rows(secret))
    with pytest.raises(UserError, match=r"names 1 file\(s\) outside of .*both, such as .*secret\.png"):
        load_data("hub", path=str(both))


def test_a_cached_data_set_may_name_files_of_the_cache_alone(tmp_path: Path, secret: Path):
    """What a hub name loads lies in the caches of `datasets` and of the hub."""
    from mpp.data.sources import _check_paths

    features = datasets.Features({"image": datasets.Image(decode=False)})
    cached = Path(datasets.config.HF_DATASETS_CACHE) / "downloads" / "extracted" / "x" / "1.png"
    own = datasets.Dataset.from_dict({"image": rows(cached, cached)}, features=features)
    _check_paths(own, "someone/set", tmp_path / "someone" / "set")
    foreign = datasets.Dataset.from_dict({"image": rows(cached, secret)}, features=features)
    with pytest.raises(UserError, match=r"data\.path=someone/set names 1 file"):
        _check_paths(foreign, "someone/set", tmp_path / "someone" / "set")


def test_a_million_paths_ask_the_file_system_once_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from mpp.data.sources import _check_paths

    features = datasets.Features({"image": datasets.Image(decode=False)})
    some = datasets.Dataset.from_dict(
        {"image": rows(*(tmp_path / str(i % 100) / f"{i}.png" for i in range(1000)))}, features=features
    )
    many = datasets.concatenate_datasets([some] * 1000)
    asked, realpath = [], os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path: asked.append(path) or realpath(path))
    start = time.perf_counter()
    _check_paths(many, str(tmp_path), tmp_path)
    assert len(asked) == 101  # the folders and their parent
    assert time.perf_counter() - start < 10


def test_builtins_that_are_watched_exist():
    assert all(name in dir(builtins) for name in BUILTINS)
