"""Being stopped: a signal is a wish that the loop grants at the end of a step, with a checkpoint.

SIGTERM, SIGUSR1, SIGUSR2 and SIGHUP are what schedulers and launchers send before they take a machine away; SIGINT is
Ctrl-C. The first one asks, one that comes more than `SAME_WISH` seconds later ends the process as soon as Python runs
again: after the present call of a kernel or a collective.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP") if name in dir(signal)
)
# Launchers forward a signal that the scheduler has sent to everyone, so one wish may arrive twice.
SAME_WISH = 2.0  # seconds


class Preempted(BaseException):
    """Training was asked to stop and did, or something else was stopped where it stood.

    Like KeyboardInterrupt it is no Exception, so that nothing takes it for a failure on the way up.

    Args:
        number: of the signal.
        step: steps done and saved, or None outside of the loop.
    """

    def __init__(self, number: int, step: int | None = None) -> None:
        super().__init__(number, step)
        self.signal, self.step = signal.Signals(number).name, step
        self.exit_code = 130 if number == signal.SIGINT else EXIT_CODE


class Wish:
    """What `listen` yields.

    Attributes:
        signal: number of the signal that has come, or None.
    """

    last = -1e9
    """When any wish of this process was made."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler: note the first, end at the second."""
        if self.signal is None:
            self.signal, Wish.last = number, time.monotonic()
        elif time.monotonic() - Wish.last > SAME_WISH:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def listen() -> Iterator[Wish]:
    """Note signals instead of dying of them. Signals that are ignored (nohup) stay ignored; so do all in a thread."""
    wish = Wish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, wish.handle)
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def raise_on_signal() -> None:
    """From now on, and outside of `listen`, signals raise `Preempted`, so that the run's status is written; one that
    repeats what `listen` has heard is left alone."""

    def handle(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - Wish.last > SAME_WISH:
            signal.signal(number, signal.SIG_DFL)  # a second one ends at once
            raise Preempted(number)

    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, handle)


@contextmanager
def for_children() -> Iterator[None]:
    """Data workers that are started in here leave signals to this process from their first moment on: schedulers send
    them to everyone, and a worker that died of one would take the last checkpoint with it."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # what came meanwhile arrives now


def ignore_from_now() -> None:
    """For the way out: a signal that is repeated while the process ends must not change its exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def leave_to_parent() -> None:
    """For data workers: leave signals to the training process, and end with it however it ends, or when it says so."""
    if sys.platform == "win32":
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # not every way to start a process hands `for_children` down
    threading.Thread(target=_obey_parent, name="obey parent", daemon=True).start()
    end_with_parent(signal.SIGKILL)


def _obey_parent() -> None:
    """multiprocessing ends leftover workers with SIGTERM and then waits for them."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def end_with_launcher() -> None:
    """On Linux, receive SIGTERM when the launcher that started this process ends.

    `accelerate launch` with one process dies of a SIGTERM without passing it on, and any launcher may be killed: their
    processes would train on, unseen. Processes that no launcher has started are left alone: a shell may end before.
    """
    if "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)


def end_with_parent(number: signal.Signals) -> None:
    """On Linux, receive a signal when the process that started this one ends, or at once if it has ended."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG
    if os.getppid() != parent or _is_init(parent):  # it ended before
        os.kill(os.getpid(), number)


def _is_init(process: int) -> bool:
    """Whether this is what orphans are given to, rather than a launcher."""
    try:
        name = Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return False
    return name in ("systemd", "init", "tini", "dumb-init", "docker-init", "catatonit") or (
        process == 1 and not name.startswith(("python", "accelerate", "torchrun"))
    )
