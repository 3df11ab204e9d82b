"""One writer for one run folder, with real processes: refused, released, recovered."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import child, fill, read_only, rest, small_disk, until

from mpp import UserError
from mpp.train import lock as module
from mpp.train.lock import Lock

HOLD = """
import os, time
from pathlib import Path
from mpp.train import lock
lock.HEARTBEAT = 0.1
held = lock.Lock(Path(sys.argv[1]))
if "fork" in sys.argv:  # as a data worker is one
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
    print(worker, flush=True)
print("held", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
TRY = """
from pathlib import Path
from mpp.errors import UserError
from mpp.train import lock
lock.HEARTBEAT = 0.1
try:
    lock.Lock(Path(sys.argv[1])).release()
    print("free")
except UserError as error:
    print(error)
"""


def holder(folder: Path, *more: str) -> "subprocess.Popen[str]":
    process = child(HOLD, folder, *more, stdin=subprocess.PIPE)
    assert process.stdout is not None
    if more:
        process.worker = int(process.stdout.readline())  # type: ignore[attr-defined]
    assert process.stdout.readline() == "held\n", rest(process)[1]
    return process


def tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def attempt(folder: Path) -> str:
    """What another process is told that wants the folder."""
    process = child(TRY, folder)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return out.strip()


def test_a_second_process_is_told_who_holds_the_folder(tmp_path: Path):
    process = holder(tmp_path / "run")
    try:
        refusal = attempt(tmp_path / "run")
        for part in (
            f"{tmp_path / 'run'} is in use by process {process.pid} on {os.uname().nodename} since 20",
            "choose another out=",
        ):
            assert part in refusal
        assert "\n" not in refusal
        with pytest.raises(UserError, match=f"process {process.pid} on "):
            Lock(tmp_path / "run")
        (tmp_path / "other name").symlink_to(tmp_path / "run")
        assert f"process {process.pid} on " in attempt(tmp_path / "other name")
        tell(process, "held.release()")
        assert attempt(tmp_path / "run") == "free"
        tell(process, "held = lock.Lock(Path(sys.argv[1]))")
        assert f"process {process.pid} on " in attempt(tmp_path / "run")
    finally:
        end(process)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_is_free_at_once_when_its_holder_is_killed(tmp_path: Path, number: int):
    """Although a forked child of it lives on, with the same open file."""
    process = holder(tmp_path, "fork")
    worker = process.worker  # type: ignore[attr-defined]
    try:
        assert "is in use" in attempt(tmp_path)
        process.send_signal(number)
        process.wait()
        assert (tmp_path / ".lock").read_text() != "", "it died without a word"
        os.kill(worker, 0)  # it lives
        began = time.monotonic()
        ours = Lock(tmp_path)
        assert time.monotonic() - began < 0.5
        os.kill(worker, 0)
        ours.release()
    finally:
        os.kill(worker, signal.SIGKILL)
        end(process)


def test_a_forked_child_that_ends_takes_no_lock_away(tmp_path: Path):
    process = holder(tmp_path, "fork")
    try:
        os.kill(process.worker, signal.SIGKILL)  # type: ignore[attr-defined]
        tell(process, "os.waitpid(worker, 0)")
        assert "is in use" in attempt(tmp_path)
    finally:
        end(process)


def test_the_same_process_releases_as_often_as_it_took(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "run")
    before = threading.active_count()
    first, second = Lock(tmp_path / "run"), Lock(tmp_path / "alias")
    assert threading.active_count() == before + 1
    assert f"process {os.getpid()} on" in attempt(tmp_path / "run")
    first.release()
    assert f"process {os.getpid()} on" in attempt(tmp_path / "run")
    second.release()
    assert attempt(tmp_path / "run") == "free"
    assert threading.active_count() == before, "a heart beats on"


def test_of_many_that_start_at_once_one_gets_the_folder(tmp_path: Path):
    code = TRY.replace(".release()", "").replace('print("free")', 'print("free", flush=True); sys.stdin.read()')
    children = [child(code, tmp_path / "run", stdin=subprocess.PIPE) for _ in range(8)]
    lines = [process.stdout.readline() for process in children if process.stdout is not None]
    for process in children:
        end(process)
    assert lines.count("free\n") == 1, lines
    assert all("is in use by " in line for line in lines if line != "free\n")


def test_a_copy_of_the_folder_does_not_give_it_away(tmp_path: Path):
    """POSIX takes a record lock from a process that closes any descriptor of the file: it is taken again."""
    process = holder(tmp_path)
    try:
        tell(process, 'open(sys.argv[1] + "/.lock").close()')
        time.sleep(0.5)
        assert f"process {process.pid} on " in attempt(tmp_path)
    finally:
        end(process)


# ---------------------------------------------------------------------------------------------------- other machines


def elsewhere(folder: Path) -> Path:
    file = folder / ".lock"
    row = {"process": 7, "host": "elsewhere", "since": "2026-01-01 00:00:00", "command": "pretrain.py"}
    file.write_text(json.dumps(row))
    return file


def test_a_machine_whose_heart_beats_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a file system that does not share locks between machines nothing but the file's time tells."""
    monkeypatch.setattr(module, "HEARTBEAT", 0.3)
    file, over = elsewhere(tmp_path), threading.Event()
    before = file.read_text()

    def beat() -> None:
        while not over.wait(module.HEARTBEAT):
            os.utime(file)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(UserError, match=r"process 7 on elsewhere since 2026-01-01 00:00:00 \(pretrain.py\)"):
            Lock(tmp_path)
    finally:
        over.set()
        thread.join()
    assert file.read_text() == before
    began = time.monotonic()
    Lock(tmp_path).release()  # it is silent now
    assert 3 * module.HEARTBEAT <= time.monotonic() - began < 3 * module.HEARTBEAT + 2


def test_the_heart_beats_while_the_folder_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HEARTBEAT", 0.1)
    held = Lock(tmp_path)
    for _ in range(3):
        before = (tmp_path / ".lock").stat().st_mtime_ns
        assert until(lambda before=before: (tmp_path / ".lock").stat().st_mtime_ns != before, 2)
    held.release()
    before = (tmp_path / ".lock").stat().st_mtime_ns
    time.sleep(0.3)
    assert (tmp_path / ".lock").stat().st_mtime_ns == before


# ---------------------------------------------------------------------------------------------------- odd files


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\0" * 4096,
        b"{",
        b"[" * 100_000,
        b"null",
        b'"text"',
        b"\xff\xfe\xfd",
        b"{}",
        b'{"host": null}',
        b'{"host": ["a"]}',
        b"9" * 9_000,
        b'{"process": 7, "host": "else',
    ],
)
def test_garbage_in_the_lock_file_is_harmless(tmp_path: Path, garbage: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HEARTBEAT", 0.05)
    (tmp_path / ".lock").write_bytes(garbage)
    held = Lock(tmp_path)
    # Not read by this process: to close the file would give up the lock until the next beat.
    assert f"process {os.getpid()} on " in attempt(tmp_path)
    os.truncate(tmp_path / ".lock", 0)
    assert "is in use by another process;" in attempt(tmp_path)
    held.release()


def test_a_folder_that_cannot_be_written_is_an_oserror(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Lock(tmp_path / "file")
    with pytest.raises(OSError, match="Not a directory"):
        Lock(tmp_path / "file" / "run")
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        Lock(tmp_path / "run")
    with small_disk(tmp_path / "disk", 100_000) as disk:
        read_only(disk)
        with pytest.raises(OSError, match="Read-only file system"):
            Lock(disk)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_full_disk_is_an_oserror_and_leaves_no_lock_behind(tmp_path: Path):
    with small_disk(tmp_path / "disk", 100_000) as disk:
        rubbish = fill(disk, leave=0)
        with pytest.raises(OSError, match="No space left"):
            Lock(disk)
        rubbish.unlink()
        assert attempt(disk) == "free"
        Lock(disk).release()
