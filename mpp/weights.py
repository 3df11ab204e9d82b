"""Weights of an encoder on disk, and back: refuses what does not fit, never loads a part in silence.

An exported encoder is a folder:

    model.safetensors   timm's parameter names, no head
    config.json         `architecture` and `model_args` for timm, and under `mpp` the arguments of `Encoder`
"""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mpp.encoder import Encoder
from mpp.errors import UserError

EXPORT = "encoder"
PICKLES = (".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth", ".pyth", ".tar")


def export_encoder(encoder: Encoder, folder: Path, **about: Any) -> Path:
    """Write an encoder to `folder`, with `about` (where it comes from) beside its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in encoder.vit.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = encoder.config()
    description = {"architecture": encoder.name, "num_classes": 0, "num_features": encoder.dim, "mpp": config, **about}
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n")
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors' own is for the owner alone
    return folder


def find_export(path: str | Path) -> Path:
    """The folder of an exported encoder for what a user gives as `from=`: a run folder, the export or its weight file.

    Raises:
        UserError: it is none of them.
    """
    given = Path(path).expanduser()
    if not given.exists():
        raise UserError(f"from={path}: no such run folder or file")
    if given.is_file() and given.suffix in PICKLES:
        raise UserError(_no_pickles(path, given))
    folder = given.parent if given.suffix == ".safetensors" else given
    for candidate in (folder / EXPORT, folder):
        if (candidate / "model.safetensors").is_file() and (candidate / "config.json").is_file():
            return candidate
    if (folder / "config.yaml").is_file():
        raise UserError(
            f"from={path}: this run has not finished, it has no {EXPORT}/ yet; run its command again to continue it"
        )
    if folder.is_dir() and (pickles := sorted(file for file in folder.iterdir() if file.suffix in PICKLES)):
        raise UserError(_no_pickles(path, pickles[0]))
    raise UserError(
        f"from={path} is not a run: it holds no {EXPORT}/model.safetensors with its config.json; "
        "give the out= of a recipes/pretrain.py run"
    )


def _no_pickles(path: str | Path, file: Path) -> str:
    return (
        f"from={path}: {file.name} is not read, since such files are pickles, which can run code of whoever made them; "
        "give the out= of a recipes/pretrain.py run, or a model.safetensors with its config.json"
    )


def describe(path: str | Path) -> dict[str, Any]:
    """config.json of an exported encoder (see `find_export`).

    Raises:
        UserError: not an export, or damaged.
    """
    folder = find_export(path)
    try:
        description = json.loads((folder / "config.json").read_text())
        arguments = dict(description["mpp"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"from={path}: {folder / 'config.json'} is not the description of an exported encoder"
        ) from error
    return {**description, "mpp": arguments}


def build_encoder(path: str | Path, *, size: tuple[int, int] | None = None) -> Encoder:
    """The architecture of an exported encoder with fresh weights, at another image size if asked.

    Raises:
        UserError: not an export, or its description, which may be a stranger's, holds what `Encoder` does not take.
    """
    config = describe(path)["mpp"]
    config["size"] = size or config.get("size")
    arguments: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in config.items()}
    try:
        if "pretrained" in arguments:  # no export has it, and timm would fetch what nobody asked for
            raise UserError("encoder.pretrained cannot be used here: the weights are beside the description")
        return Encoder(**arguments)
    except UserError as error:
        raise UserError(f"from={path}: {error}") from error
    except (TypeError, ValueError) as error:
        raise UserError(
            f"from={path}: {find_export(path) / 'config.json'} does not describe an encoder ({error})"
        ) from error


def load_encoder(path: str | Path, *, size: tuple[int, int] | None = None) -> Encoder:
    """An exported encoder with its weights; another `size` resamples the positions (`Encoder.resize`).

    Raises:
        UserError: not an export, or the weights do not fit; names what is missing and what is left over.
    """
    encoder = build_encoder(path)
    load_weights(encoder.vit, find_export(path) / "model.safetensors")
    return encoder if size is None else encoder.resize(size)


def load_weights(module: nn.Module, file: Path) -> None:
    """Load a safetensors file whose names and shapes must be exactly the module's.

    Raises:
        UserError: the file is damaged, or something is missing, left over or of another shape; names them.
    """
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is not a readable safetensors file ({error})") from error
    if problem := mismatch(module.state_dict(), tensors):
        raise UserError(f"the weights in {file} do not fit: {problem}")
    module.load_state_dict(tensors)


def mismatch(wanted: dict[str, Tensor], given: dict[str, Tensor]) -> str:
    """What keeps `given` from being loaded as `wanted`, in words, or ""."""
    shapes = [
        f"{name} is {tuple(given[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & given.keys())
        if given[name].shape != wanted[name].shape
    ]
    parts = [
        ("missing", sorted(wanted.keys() - given.keys())),
        ("left over", sorted(given.keys() - wanted.keys())),
        ("of another shape", shapes),
    ]
    return "; ".join(
        f"{len(names)} {what} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
        for what, names in parts
        if names
    )
