"""Being stopped, as it happens: real signals to real recipes below real launchers, and to small children."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, child, rest, until
from test_launch import BIN, TINY

from mpp.stopping import EXIT_CODE
from mpp.train.checkpoint import checkpoints, verify

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

ENDLESS = [*TINY, "train.steps=100000", "train.save_every=1000"]
Process = subprocess.Popen[str]


# ---------------------------------------------------------------------------------------------------- recipes


def running(*words: str) -> dict[int, int]:
    """Processes whose command line has all these arguments, and their parents."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if {*words} <= {*(folder / "cmdline").read_bytes().decode(errors="replace").split("\0")}:
                status = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                if status[0] != "Z":
                    found[int(folder.name)] = int(status[1])
        except OSError:
            continue
    return found


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """What a test has started; nothing of it outlives the test."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        for pid in running(f"out={process.out}"):  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate()


def start(started: list[Process], out: Path, *command: str, **environment: str) -> Process:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "NO_COLOR": "1", **environment}
    errors = out.with_name(f"{out.name}-{len(started)}.txt")  # pipes would be full some day
    with errors.open("w") as file:
        process = subprocess.Popen(
            [*command, f"out={out}"],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=file,
            text=True,
            start_new_session=True,
        )
    process.out, process.said = out, errors.read_text  # type: ignore[attr-defined]
    started.append(process)
    return process


def trains(process: Process, rows: int = 2) -> bool:
    """Wait until the run has written some lines of metrics."""
    file = process.out / "metrics.jsonl"  # type: ignore[attr-defined]
    before = len(file.read_text().splitlines()) if file.is_file() else 0

    def more() -> bool:
        return file.is_file() and len(file.read_text().splitlines()) >= before + rows

    assert until(lambda: more() or process.poll() is not None, 150), "it does not begin"
    assert process.poll() is None, process.said()  # type: ignore[attr-defined]
    return True


def stopped(out: Path, number: signal.Signals = signal.SIGTERM) -> int:
    """The step at which a run has stopped, once all of it has ended and all that it left agrees."""
    assert until(lambda: not running(f"out={out}"), 20), f"still there: {running(f'out={out}')}"
    status = json.loads((out / "status.json").read_text())
    step, path = checkpoints(out / "checkpoints")[-1]
    assert (status["state"], status["exit_code"], status["signal"]) == ("preempted", EXIT_CODE, number.name)
    assert status["step"] == step > 0
    assert verify(path) == ""
    assert not list((out / "checkpoints").glob(".*"))
    return int(step)


def test_the_end_of_accelerate_launch_stops_the_training(tmp_path: Path, started: list[Process]):
    """With one process it dies of a signal without passing it on. Meanwhile a second run is kept out."""
    out = tmp_path / "run"
    launch = [str(BIN / "accelerate"), "launch", "--num_processes", "1", "--cpu", "recipes/pretrain.py"]
    launcher = start(started, out, *launch, *ENDLESS)
    assert trains(launcher)
    (training,) = [pid for pid, parent in running(f"out={out}").items() if parent == launcher.pid]
    second = start(started, out, sys.executable, "recipes/pretrain.py", *ENDLESS)
    assert second.wait(120) == 2
    (line,) = second.said().splitlines()  # type: ignore[attr-defined]
    assert line.startswith(f"error: {out} is in use by process {training} on {os.uname().nodename} since ")
    assert json.loads((out / "status.json").read_text())["state"] == "running", "the second run has touched it"
    assert launcher.poll() is None

    os.kill(launcher.pid, signal.SIGTERM)
    began = time.monotonic()
    step = stopped(out)
    assert time.monotonic() - began < 15
    assert f"stopped by SIGTERM: step {step:,} is saved" in launcher.said()  # type: ignore[attr-defined]


def test_a_whole_group_is_stopped_and_workers_never_outlive_the_training(tmp_path: Path, started: list[Process]):
    out = tmp_path / "run"
    command = [sys.executable, "recipes/pretrain.py", *ENDLESS, "train.workers=2"]
    process = start(started, out, *command)
    assert trains(process)
    assert len(running(f"out={out}")) == 3
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == EXIT_CODE, process.said()  # type: ignore[attr-defined]
    step = stopped(out)
    said = process.said()  # type: ignore[attr-defined]
    assert f"stopped by SIGTERM: step {step:,} is saved and the same command continues from it" in said
    assert "Traceback" not in said

    process = start(started, out, *command)
    assert trains(process)
    assert len(running(f"out={out}")) == 3
    assert f"continued from step {step}" in process.said()  # type: ignore[attr-defined]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert until(lambda: not running(f"out={out}"), 3), "workers live on"
    assert json.loads((out / "status.json").read_text())["state"] == "running"  # nobody could write more
    assert checkpoints(out / "checkpoints")[-1][0] >= step


def test_a_stopped_run_continues_from_that_step_and_finishes(tmp_path: Path, started: list[Process]):
    out = tmp_path / "run"
    command = [sys.executable, "recipes/pretrain.py", *ENDLESS]
    process = start(started, out, *command)
    assert trains(process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == EXIT_CODE, process.said()  # type: ignore[attr-defined]
    step = stopped(out, signal.SIGUSR1)
    said = process.said().splitlines()  # type: ignore[attr-defined]
    assert said[-1] == f"stopped by SIGUSR1: step {step:,} is saved and the same command continues from it"

    last = (step // 5 + 2) * 5
    process = start(started, out, *command, f"train.steps={last}")
    assert process.wait(120) == 0, process.said()  # type: ignore[attr-defined]
    assert f"continued from step {step}\n" in process.said()  # type: ignore[attr-defined]
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("finished", last, 0)
    assert checkpoints(out / "checkpoints")[-1][0] == last
    rows = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(5, last + 1, 5)), "a line is missing or there twice"
    assert (out / "encoder" / "model.safetensors").is_file()


def test_a_signal_to_one_of_two_processes_stops_both_at_one_step(tmp_path: Path, started: list[Process]):
    out = tmp_path / "run"
    two = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", "recipes/pretrain.py"]
    launcher = start(started, out, *two, *ENDLESS)
    assert trains(launcher)
    workers = [pid for pid, parent in running(f"out={out}").items() if parent == launcher.pid]
    ranks = {
        pid: next(word for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if word.startswith("RANK="))
        for pid in workers
    }
    assert sorted(ranks.values()) == ["RANK=0", "RANK=1"]
    (other,) = [pid for pid, rank in ranks.items() if rank == "RANK=1"]  # the one that does not save
    os.kill(other, signal.SIGTERM)
    launcher.wait(60)
    step = stopped(out)
    assert json.loads((checkpoints(out / "checkpoints")[-1][1] / "state.json").read_text())["world"] == 2
    said = launcher.said()  # type: ignore[attr-defined]
    assert f"stopped by SIGTERM: step {step:,} is saved" in said
    assert "exitcode  : 75" in said
    assert "SignalException" not in said


# ---------------------------------------------------------------------------------------------------- SLURM

STEP = '''
"""Stand-in for srun: the command in a session of its own. When the file TERM_WHEN is there, SIGTERM to every process of
the step; when the command has ended, SIGKILL to whatever is left."""

import os, signal, subprocess, sys, time
from pathlib import Path


def step(number):
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rsplit(")", 1)[1].split()[3]) == process.pid:
                os.kill(int(folder.name), number)
        except OSError:
            continue


process = subprocess.Popen(sys.argv[1:], start_new_session=True)
file = Path(os.environ.get("TERM_WHEN", "/nowhere"))
while process.poll() is None and not (file.is_file() and file.stat().st_size):
    time.sleep(0.05)
if process.poll() is None:
    step(signal.SIGTERM)
process.wait()
step(signal.SIGKILL)
sys.exit(process.returncode % 256)
'''


def submit(tmp_path: Path, started: list[Process], out: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run recipes/slurm.sh as a job would; its exit code and what scontrol was told."""
    stubs, told = tmp_path / "stubs", tmp_path / "told"
    stubs.mkdir(exist_ok=True)
    told.write_text("")
    (stubs / "srun").write_text(f"#!{sys.executable}\n" + STEP)
    (stubs / "scontrol").write_text(f'#!/bin/bash\necho "$@" >>{told}\n')
    for stub in stubs.iterdir():
        stub.chmod(0o755)
    path = f"{stubs}:{BIN}:{os.environ['PATH']}"
    job = start(started, out, "bash", "recipes/slurm.sh", *arguments, PATH=path, SLURM_JOB_ID="4711", **environment)
    return job.wait(200), told.read_text().strip()


def test_a_job_of_slurm_goes_back_into_the_queue_until_it_has_finished(tmp_path: Path, started: list[Process]):
    out = tmp_path / "run"
    metrics = out / "metrics.jsonl"
    code, told = submit(tmp_path, started, out, *ENDLESS, TERM_WHEN=str(metrics))
    said = started[-1].said()  # type: ignore[attr-defined]
    assert (code, told) == (EXIT_CODE, "requeue 4711"), said
    step = stopped(out)
    assert f"the run in {out}: preempted" in said

    # A run that fails before it begins must not be taken for the preempted one before it, and be queued for ever.
    code, told = submit(tmp_path, started, out, *ENDLESS, RECIPE="recipes/none.py")
    assert (code, told) == (1, ""), started[-1].said()  # type: ignore[attr-defined]

    code, told = submit(tmp_path, started, out, *ENDLESS, f"train.steps={step + 5}")
    said = started[-1].said()  # type: ignore[attr-defined]
    assert (code, told) == (0, ""), said
    assert f"continued from step {step}\n" in said
    assert f"the run in {out}: finished" in said


# ---------------------------------------------------------------------------------------------------- signals

LISTEN = """
import signal, time
from mpp import stopping
stopping.SAME_WISH = 0.5
with stopping.listen() as wish:
    print("ready", flush=True)
    time.sleep(float(sys.argv[1]))  # a long step
print(wish.signal, flush=True)
"""


def listener(code: str, *arguments: Any, before: tuple[str, ...] = ()) -> Process:
    process = child(code, *arguments)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", rest(process)[1]
    return process


def ended(process: Process) -> tuple[int, str]:
    out, errors = rest(process)
    assert "Traceback" not in errors, errors
    return process.returncode, out.strip()


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_a_signal_is_a_wish(number: str):
    process = listener(LISTEN, 0.5)
    process.send_signal(signal.Signals[number])
    assert ended(process) == (0, str(int(signal.Signals[number])))


@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGTERM"), ("SIGTERM", "SIGUSR1"), ("SIGINT", "SIGINT")])
def test_a_second_signal_ends_the_process_at_once(first: str, second: str):
    process = listener(LISTEN, 30)
    process.send_signal(signal.Signals[first])
    time.sleep(0.7)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.Signals[second])
    assert ended(process) == (-signal.Signals[second], "")
    assert time.monotonic() - began < 2


def test_two_signals_in_short_succession_are_one_wish():
    process = listener(LISTEN, 1)
    for _ in range(5):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    assert ended(process) == (0, str(int(signal.SIGTERM)))


def test_ignored_signals_stay_ignored():
    """nohup ignores SIGHUP, and a shell ignores SIGINT for what it starts in the background."""
    ignore = "import signal\nfor number in (signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)\n"
    process = listener(ignore + LISTEN, 1.5)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
        time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (0, str(int(signal.SIGTERM)))


THREAD = """
import signal, threading, time
from mpp import stopping
handlers = lambda: [signal.getsignal(number) for number in stopping.SIGNALS]
before = handlers()
def listen():
    with stopping.listen() as wish:
        assert handlers() == before
        assert wish.signal is None
        print("ready", flush=True)
        time.sleep(float(sys.argv[1]))
thread = threading.Thread(target=listen)
thread.start()
thread.join()
assert handlers() == before
print("over")
"""


def test_in_a_thread_nothing_changes():
    assert ended(listener(THREAD, 0)) == (0, "over")
    process = listener(THREAD, 30)
    process.terminate()
    assert ended(process) == (-signal.SIGTERM, "")


NESTED = """
import os, signal, time
from mpp import stopping
stopping.raise_on_signal()
outer = signal.getsignal(signal.SIGTERM)
with stopping.listen() as one:
    with stopping.listen() as two:
        os.kill(os.getpid(), signal.SIGTERM)
    assert (one.signal, two.signal) == (None, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert one.signal == signal.SIGUSR2
try:
    with stopping.listen():
        raise ValueError
except ValueError:
    pass
assert signal.getsignal(signal.SIGTERM) is outer
os.kill(os.getpid(), signal.SIGTERM)  # repeats what was heard: on the way out it changes nothing
time.sleep(stopping.SAME_WISH + 0.1)
print("ready", flush=True)
try:
    os.kill(os.getpid(), signal.SIGTERM)
except Exception:
    print("taken for a failure")
except stopping.Preempted as stop:
    print(stop.signal, stop.step, stop.exit_code, flush=True)
os.kill(os.getpid(), signal.SIGTERM)  # a second one, while the first is dealt with
print("not reached", flush=True)
"""


def test_handlers_come_back_and_outside_of_a_loop_signals_raise():
    assert ended(listener(NESTED)) == (-signal.SIGTERM, f"SIGTERM None {EXIT_CODE}")


# ---------------------------------------------------------------------------------------------------- parents

FAMILY = """
import os, signal, subprocess, time
from mpp import stopping
role, how = sys.argv[1:]
if role == "parent":
    code = open(f"/proc/{os.getpid()}/cmdline").read().split("\\0")[2]
    os.environ["PARENT"] = str(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", code, "child", how])
    print(child.pid, flush=True)
    if how != "orphan":
        child.wait()
    os._exit(0)
if how == "worker":
    stopping.leave_to_parent()
    print("ready", flush=True)
    time.sleep(60)
while how == "orphan" and os.getppid() == int(os.environ["PARENT"]):
    time.sleep(0.01)
stopping.end_with_launcher()
with stopping.listen() as wish:
    print("ready", flush=True)
    deadline = time.monotonic() + 3
    while wish.signal is None and time.monotonic() < deadline:
        time.sleep(0.01)
print(wish.signal, flush=True)
"""


def family(how: str, **environment: str) -> tuple[Process, int]:
    """A parent and its child, which writes to the same pipe."""
    process = child(FAMILY, "parent", how, env={**os.environ, **environment})
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize("variable", ["ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID", "NOTHING"])
def test_training_hears_of_the_end_of_its_launcher_but_not_of_a_shell(variable: str):
    process, _ = family("training", **{variable: "no"})
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    wanted = "None" if variable == "NOTHING" else str(int(signal.SIGTERM))
    assert rest(process)[0] == wanted + "\n"


def test_training_whose_launcher_has_ended_before_it_began_ends():
    name = Path("/proc/1/comm").read_text()
    if name.startswith(("python", "accelerate", "torchrun")):
        pytest.skip(f"{name} is what orphans are given to, and might be a launcher")
    process, _ = family("orphan", ACCELERATE_MIXED_PRECISION="no")
    assert rest(process)[0] == "", "it trains on"


def test_a_data_worker_ignores_signals_and_ends_with_its_parent():
    process, worker = family("worker")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for number in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        os.kill(worker, signal.Signals[number])
    time.sleep(0.2)
    os.kill(worker, 0)  # it lives
    began = time.monotonic()
    process.kill()
    rest(process)  # until the last one has let go of the pipe
    assert time.monotonic() - began < 3
