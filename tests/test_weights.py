"""Weights on disk: exact round trips, other sizes, and messages that name what does not fit."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from mpp import Encoder, UserError
from mpp.weights import build_encoder, describe, export_encoder, find_export, load_encoder, load_weights


@pytest.fixture
def exported(tmp_path: Path, encoder: Encoder) -> Path:
    """A run folder with an exported encoder."""
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    export_encoder(encoder, tmp_path / "run" / "encoder", run="runs/x", steps=5)
    return tmp_path / "run"


def pixels(*size: int) -> torch.Tensor:
    return torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))


def test_an_encoder_comes_back_bit_for_bit(exported: Path, encoder: Encoder):
    with torch.no_grad():
        want = encoder.eval()(pixels(32, 32))
        for path in (exported, exported / "encoder", exported / "encoder" / "model.safetensors"):
            loaded = load_encoder(str(path)).eval()
            got = loaded(pixels(32, 32))
            assert torch.equal(got.patches, want.patches)
            assert torch.equal(got.cls, want.cls)
            assert loaded.config() == encoder.config()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vit_micro_patch2_8", dict(channels=1, mean=(0.3,), std=(0.2,), size=(8, 12))),
        ("vit_tiny_r_s16_p8_224", dict(size=64)),
        ("vit_small_patch14_reg4_dinov2", dict(size=28, drop_path_rate=0.1)),
    ],
)
def test_every_kind_of_encoder_comes_back(tmp_path: Path, name: str, arguments: dict[str, object]):
    encoder = Encoder(name, depth=1, **arguments).eval()
    loaded = load_encoder(export_encoder(encoder, tmp_path / "x")).eval()
    x = torch.rand(1, encoder.channels, *encoder.size)
    with torch.no_grad():
        assert torch.equal(loaded(x).patches, encoder(x).patches)
    assert loaded.config() == encoder.config()


def test_the_file_is_timms_and_describes_itself(exported: Path, encoder: Encoder):
    tensors = load_file(exported / "encoder" / "model.safetensors")
    theirs = timm.create_model("vit_micro_patch4_32", depth=2, num_classes=0)
    theirs.load_state_dict(tensors)
    about = describe(exported)
    assert (about["architecture"], about["num_features"], about["steps"]) == ("vit_micro_patch4_32", encoder.dim, 5)
    assert about["mpp"] == encoder.config()


def test_another_size_resamples_as_resize_does(exported: Path, encoder: Encoder):
    with torch.no_grad():
        loaded = load_encoder(exported, size=(48, 16)).eval()
        want = encoder.eval().resize((48, 16))(pixels(48, 16))
        assert torch.equal(loaded(pixels(48, 16)).patches, want.patches)
    fresh = build_encoder(exported, size=(48, 16))
    assert fresh.size == (48, 16)
    assert not torch.equal(fresh.vit.pos_embed, loaded.vit.pos_embed)
    assert load_encoder(exported, size=(32, 32)).size == (32, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": None}, r"1 missing \(norm\.weight\)"),
        ({"head.bias": torch.zeros(3)}, r"1 left over \(head\.bias\)"),
        ({"norm.bias": torch.zeros(3)}, r"1 of another shape \(norm\.bias is \(3,\), not \(\d+,\)\)"),
        (
            {"norm.weight": None, "norm.gamma": torch.zeros(3)},
            r"1 missing \(norm\.weight\); 1 left over \(norm\.gamma\)",
        ),
        ({f"more.{i}": torch.zeros(1) for i in range(9)}, r"9 left over \(more\.0, more\.1, .*more\.4, \.\.\.\)"),
    ],
)
def test_what_does_not_fit_is_named(exported: Path, change: dict[str, torch.Tensor | None], message: str):
    file = exported / "encoder" / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name not in change}
    save_file(tensors | {name: tensor for name, tensor in change.items() if tensor is not None}, file)
    with pytest.raises(UserError, match=message):
        load_encoder(exported)


def test_a_refused_file_changes_nothing(exported: Path, encoder: Encoder):
    file = exported / "encoder" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items() if name != "norm.weight"}, file)
    before = {name: tensor.clone() for name, tensor in encoder.vit.state_dict().items()}
    with pytest.raises(UserError, match="do not fit"):
        load_weights(encoder.vit, file)
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.vit.state_dict().items())


def test_damaged_files_are_named(exported: Path):
    file = exported / "encoder" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model\.safetensors is not a readable safetensors file"):
        load_encoder(exported)
    config = exported / "encoder" / "config.json"
    for text in ("{", "[]", json.dumps({"architecture": "vit"}), json.dumps({"mpp": 3})):
        config.write_text(text)
        with pytest.raises(UserError, match=r"config\.json is not the description of an exported encoder"):
            load_encoder(exported)


def test_what_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no such run folder or file"):
        find_export(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"is not a run: .*give the out= of a recipes/pretrain\.py run"):
        find_export(tmp_path)
    (tmp_path / "config.yaml").write_text("a: 1")
    with pytest.raises(UserError, match="has not finished"):
        find_export(tmp_path)
