"""The run folder: everything a run leaves behind, and what the same command finds when it is started again.

out/config.yaml        the resolved configuration
    environment.json   versions, commit, machine, processes
    metrics.jsonl      one line for each logging interval
    checkpoints/       see checkpoint.py
    encoder/           the exported encoder (weights.py)
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpp.errors import LocalError, UserError
from mpp.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint

# What may differ between the run that was and the one that continues it: nothing here changes what is learned.
MAY_CHANGE = (
    "out",
    "train.workers",
    "train.log_every",
    "train.save_every",
    "train.keep",
    "train.tracker",
)
PACKAGES = ("torch", "timm", "accelerate", "datasets", "hydra-core", "einops", "numpy", "pillow", "safetensors")


class Run:
    """One run's folder. Only the main process writes.

    Args:
        out: the folder; made if it is not there.
        config: the resolved configuration, JSON-like.
        main: whether this is the main process.
        after: groups of the configuration that come after training and may differ when a run is continued.

    Raises:
        UserError: the folder holds a run with another configuration, names the keys; or it cannot be written.
    """

    def __init__(
        self, out: str | Path, config: dict[str, Any], *, main: bool = True, after: tuple[str, ...] = ()
    ) -> None:
        self.out, self.config, self.main = Path(out), config, main
        self.checkpoints = self.out / "checkpoints"
        self._metrics = self.out / "metrics.jsonl"
        self._check((*MAY_CHANGE, *(f"{group}." for group in after)))
        if main:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
                replace_text(self.out / "config.yaml", to_yaml(config))
            except OSError as error:
                raise UserError(f"out={self.out}: cannot write there ({error.strerror})") from error
            write_json(self.out / "environment.json", environment())

    def _check(self, may_change: tuple[str, ...]) -> None:
        used = checkpoints(self.checkpoints) or (self.out / "results.json").is_file()
        before = load_config(self.out) if used and (self.out / "config.yaml").is_file() else None
        if before is None:
            return
        old, new = flatten(before), flatten(self.config)
        changed = [
            f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
            for key in sorted(old.keys() | new.keys())
            if not key.startswith(may_change) and old.get(key) != new.get(key)
        ]
        if changed:
            raise UserError(
                f"{self.out} holds a run with another configuration ({'; '.join(changed[:5])}); "
                "continue it with its own, or choose another out="
            )

    def step(self) -> int:
        """Steps done at the last checkpoint, 0 without one."""
        found = checkpoints(self.checkpoints)
        return found[-1][0] if found else 0

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Continue from the last checkpoint, if there is one: restores in place and returns the step to do next."""
        found = checkpoints(self.checkpoints)
        step = int(load_checkpoint(found[-1][1], model, optimizer)["step"]) if found else 0
        if self.main and self._metrics.is_file():
            # Lines after the checkpoint belong to steps that will be done again.
            lines = [line for line in self._metrics.read_text().splitlines() if _step_of(line) <= step]
            replace_text(self._metrics, "".join(line + "\n" for line in lines))
        return step

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: int = 2) -> None:
        """Write a checkpoint (main process)."""
        if self.main:
            world = os.environ.get("WORLD_SIZE", "1")
            with self._writing():
                save_checkpoint(self.checkpoints, step, model, optimizer, keep=keep, world=world)

    def log(self, row: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl (main process)."""
        if self.main:
            with self._writing(), self._metrics.open("a") as file:
                file.write(json.dumps(row) + "\n")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk, say, as one line."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise LocalError(f"out={self.out}: cannot write ({reason}); what was saved before is whole") from error


def read_metrics(out: str | Path) -> list[dict[str, Any]]:
    """All lines of a run folder's metrics.jsonl, none without it."""
    file = Path(out) / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")  # a line that a crash cut short


def load_config(out: str | Path) -> dict[str, Any]:
    """The configuration of a run folder."""
    from omegaconf import OmegaConf

    loaded = OmegaConf.to_container(OmegaConf.load(Path(out) / "config.yaml"))
    if not isinstance(loaded, dict):
        raise UserError(f"{out}/config.yaml is not a configuration")
    return {str(key): value for key, value in loaded.items()}


def to_yaml(config: dict[str, Any]) -> str:
    """YAML text of a JSON-like configuration."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(config))


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


def write_json(path: Path, content: Any) -> None:
    """Write JSON for people, replacing the file in one step."""
    replace_text(path, json.dumps(content, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file in one step: another process reads the old text or the new one, never a part."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(text)
    beside.replace(path)


def environment() -> dict[str, Any]:
    """What a reader needs to place a run's numbers: versions, machine, processes and the commit."""
    return {
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": _git("status", "--porcelain", "--untracked-files=no"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Output of git in the folder of this package, None where that is no checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
