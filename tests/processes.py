"""What the tests of processes share: small disks, disks that are full, and children that start in no time."""

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Importing `mpp` imports all that training needs, which takes seconds; these children need one module of it.
LIGHT = f"""
import sys, types
for name, folder in (("mpp", "mpp"), ("mpp.train", "mpp/train")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [{str(ROOT)!r} + "/" + folder]
"""


def child(code: str, *arguments: object, **how: object) -> "subprocess.Popen[str]":
    """A Python process that runs `code` with light imports; its output comes through pipes."""
    command = [sys.executable, "-c", LIGHT + code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, **how)


def until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Wait for a condition; whether it came."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """In this process no file grows beyond so many bytes: what a write meets is EFBIG, as on a full disk ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A real file system of so many bytes at `folder`; skips where one may not be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root on Linux can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def read_only(disk: Path) -> None:
    """Make a `small_disk` take nothing any more."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def fill(disk: Path, *, leave: int) -> Path:
    """A file that leaves so many bytes of a `small_disk` free."""
    status = os.statvfs(disk)
    rubbish = disk / "rubbish"
    rubbish.write_bytes(b"x" * (status.f_bavail * status.f_frsize - leave))
    return rubbish


def rest(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What a child writes until it ends. After `readline`, `communicate` would lose what was read ahead."""
    assert process.stdout is not None
    assert process.stderr is not None
    said = process.stdout.read(), process.stderr.read()
    process.communicate()
    return said
