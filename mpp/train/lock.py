"""One writer for one run folder: a lock that dies with its process, and says who holds it.

The lock is the operating system's (POSIX record lock on the file `.lock`): it vanishes with its process however that
ends, and unlike `flock` it is not inherited by data workers, which may outlive a killed run by seconds. File systems
that do not share such locks between machines are covered by a heartbeat: the holder touches the file every few seconds.
"""

import json
import os
import platform
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpp.errors import UserError

if sys.platform != "win32":
    import fcntl

HEARTBEAT = 5.0  # seconds
_held: dict[Path, "_Holding"] = {}  # of this process, to which record locks belong as a whole


class Lock:
    """Hold a folder until `release`. The same process may hold a folder several times.

    Args:
        folder: made if it is not there.

    Raises:
        UserError: another process holds it; says which, where and since when.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve()
        if self.folder not in _held:
            _held[self.folder] = _Holding(self.folder)
        _held[self.folder].count += 1

    def release(self) -> None:
        """Let go, once."""
        _held[self.folder].count -= 1
        if _held[self.folder].count == 0:
            _held.pop(self.folder).close()


class _Holding:
    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self._file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        self._over = threading.Event()
        if not self._take():
            holder = self._read()
            os.close(self._file)
            raise UserError(_refusal(folder, holder))
        holder = self._read()
        if holder.get("host", platform.node()) != platform.node() and self._beats():
            os.close(self._file)
            raise UserError(_refusal(folder, holder))
        # What a process of this machine that is gone wrote here needs no more thought: its lock went with it.
        me = {
            "process": os.getpid(),
            "host": platform.node(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": " ".join(sys.argv)[:200],
        }
        try:
            self._write(json.dumps(me) + "\n")
        except OSError:  # a full disk
            os.close(self._file)
            raise
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()

    def _take(self) -> bool:
        if sys.platform == "win32":
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # a file system without locks: the heartbeat alone must do
            return not (self._read() and self._beats())
        return True

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(os.pread(self._file, 10_000, 0))
        except (ValueError, RecursionError):  # empty, cut short, or garbage
            return {}
        return content if isinstance(content, dict) else {}

    def _write(self, text: str) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text.encode(), 0)

    def _beats(self) -> bool:
        """Whether someone touches the file: watched for three beats, since the clocks of machines differ."""
        before, deadline = os.fstat(self._file).st_mtime_ns, time.monotonic() + 3 * HEARTBEAT
        while time.monotonic() < deadline:
            time.sleep(HEARTBEAT / 10)
            # Not opened anew: to close it again would give up the lock. Network file systems look again after 3 s.
            if (self.folder / ".lock").stat().st_mtime_ns != before:
                return True
        return False

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT):
            with suppress(OSError):
                os.utime(self._file)
                # A record lock is lost when its process opens the file again and closes it, as to copy the folder does.
                if sys.platform != "win32":
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        self._over.set()
        self._heart.join()  # or it might touch another file that gets the same number
        with suppress(OSError):
            self._write("")
        os.close(self._file)


def _refusal(folder: Path, holder: dict[str, Any]) -> str:
    who = (
        f"process {holder.get('process')} on {holder.get('host')} since {holder.get('since')} ({holder.get('command')})"
        if holder
        else "another process"
    )
    return f"{folder} is in use by {who}; wait for it, stop it, or choose another out="
