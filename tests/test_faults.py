"""What goes wrong in a run, done for real: unsound losses, full disks, signals, damaged files, bad images."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from processes import largest_file
from torch import Tensor, nn
from training import CONFIG, build, digits, equal, moments, train

from mpp import UserError
from mpp.data import Loader, Plan, Transform, load_data
from mpp.data.loader import Images
from mpp.objectives.mpp import MaskedPatchPrediction
from mpp.recipes.common import Training, make_optimizer, split_batch
from mpp.stopping import Preempted
from mpp.train import Run, fit
from mpp.train.checkpoint import checkpoints, verify
from mpp.train.pulse import PAST, RECENT, Pulse
from mpp.train.run import read_metrics


@pytest.fixture(scope="module")
def images() -> Images:
    return digits()


class Poisoned(nn.Module):
    """An objective that goes wrong on certain samples.

    Args:
        objective: the sound one.
        poison: sample ids.
        how: "loss" or "gradient" is not finite; anything else does no harm.
    """

    def __init__(self, objective: MaskedPatchPrediction, poison: set[int], how: str) -> None:
        super().__init__()
        self.objective, self.poison, self.how = objective, poison, how

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs = self.objective(batch)
        if self.poison & set(batch["id"].tolist()):
            bias = self.objective.head.bias
            if self.how == "loss":
                outputs["loss"] = outputs["loss"] * torch.nan
            elif self.how == "gradient":  # of a square root at zero
                outputs["loss"] = outputs["loss"] + (bias - bias.detach()).abs().sqrt().sum()
        return outputs


def metrics_of(run: Run) -> list[dict[str, Any]]:
    timings = ("images_per_second", "seconds_left", "data_wait")
    return [{name: value for name, value in row.items() if name not in timings} for row in read_metrics(run.out)]


# ---------------------------------------------------------------------------------------------------- unsound steps


@pytest.mark.parametrize("how", ["loss", "gradient", "weights"])
def test_an_unsound_step_is_left_out_and_nothing_else_changes(tmp_path: Path, images: Images, how: str):
    """The run ends with the weights of one that never trained the step."""
    plan = Plan(len(images), 16, seed=1)
    bad = plan.batch(6)[1]
    said: list[str] = []
    objective, run = Poisoned(build(), {int(bad[3])}, how), Run(tmp_path / "poisoned", CONFIG)
    # A rate that no weight survives, although loss and gradient are finite.
    options = dict(opt="momentum", log_every=4, save_every=5)
    options["rate"] = lambda step: 1e30 if how == "weights" and step == 6 else 0.1
    optimizer = train(objective, images, 12, run=run, say=said.append, **options)
    assert len(said) == 1
    assert (
        f"step 7: going back to step 5 and leaving out step 7; to see the batch: python -m mpp.replay {run.out}"
        in said[0]
    )
    assert ("weights" in said[0]) == (how == "weights")
    (row,) = run.skipped()
    assert (row["first"], row["last"], row["checkpoint"]) == (6, 6, 5)
    assert row["ids"] == {"6": bad.tolist()}
    assert verify(run.out / "faults" / "step-00000006" / "checkpoints" / "step-00000005") == ""

    clean, clean_run = Poisoned(build(), set(), how), Run(tmp_path / "clean", CONFIG)
    other = train(clean, images, 12, run=clean_run, leave_out={6}, **options)
    assert equal(objective.state_dict(), clean.state_dict())
    assert equal(moments(optimizer), moments(other))
    assert metrics_of(run) == metrics_of(clean_run)
    assert [row["step"] for row in metrics_of(run)] == [4, 8, 12]


def test_a_run_that_left_a_step_out_is_resumed_bit_for_bit(tmp_path: Path, images: Images):
    poison = {int(Plan(len(images), 16, seed=1).batch(6)[1][0])}

    def go(out: Path, stop_at: int | None = None) -> dict[str, Tensor]:
        def report(row: dict[str, float]) -> None:
            if row["step"] == stop_at:
                raise KeyboardInterrupt

        objective = Poisoned(build(), poison, "loss")
        train(
            objective, images, 12, run=Run(out, CONFIG), log_every=1, save_every=3, report=report, say=lambda line: None
        )
        return objective.state_dict()

    straight = go(tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "stopped", stop_at=8)
    assert equal(go(tmp_path / "stopped"), straight)
    assert len(Run(tmp_path / "stopped", CONFIG).skipped()) == 1, "it was not met again"


def test_a_run_that_keeps_going_wrong_stops_with_an_explanation(tmp_path: Path, images: Images):
    plan = Plan(len(images), 16, seed=1)
    poison = {int(plan.batch(step)[1][0]) for step in (3, 4, 5)}
    run = Run(tmp_path, CONFIG)
    with pytest.raises(UserError, match=r"not finite at step 6, after 2 rollback.*mpp\.replay.*lower optim\.lr"):
        train(Poisoned(build(), poison, "loss"), images, 12, run=run, save_every=2, max_rollbacks=2)
    assert [row["first"] for row in run.skipped()] == [3, 4]
    with pytest.raises(UserError, match="nothing was saved"):
        train(Poisoned(build(), poison, "loss"), images, 12)


def test_one_process_with_an_unsound_loss_takes_all_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two real processes; only the second one ever sees the poisoned sample."""
    from accelerate import debug_launcher

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    debug_launcher(_poison_on_two, (str(tmp_path),), num_processes=2)
    rows = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert rows[0] == rows[1], "both end with the same weights"
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()]
    assert (row["first"], row["last"], len(row["ids"]["6"])) == (6, 6, 16)


def _poison_on_two(folder: str) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # that of the process which forked this one
    accelerator, images = Accelerator(cpu=True), digits()
    plan = Plan(len(images), 16, seed=1, rank=accelerator.process_index, world=accelerator.num_processes)
    assert plan.world == 2
    objective = Poisoned(build(), {int(plan.batch(6)[1][12])}, "loss")
    optimizer = make_optimizer(objective, opt="adamw", lr=1.0)
    run = Run(Path(folder) / "run", CONFIG, main=accelerator.is_main_process)
    fit(objective, Loader(images, plan), optimizer, steps=12, rate=lambda step: 1e-3, accelerator=accelerator,
        save_every=4, run=run, say=lambda line: None)  # fmt: skip
    total = sum(float(tensor.double().sum()) for tensor in objective.state_dict().values())
    (Path(folder) / f"{plan.rank}.json").write_text(json.dumps(total))


def pulse(losses: list[float], spike: float | None = 10.0) -> list[tuple[int, int]]:
    """First and last step of each trouble found in a series of losses."""
    pulse, found = Pulse(Accelerator(cpu=True), spike=spike), []
    for step, loss in enumerate(losses):
        yes = torch.tensor(True)
        pulse.send(step, torch.tensor(loss), yes, yes, None)
        if trouble := pulse.read():
            found.append((trouble.first, trouble.last))
    return found


def test_a_loss_explodes_when_it_stays_high_and_not_before():
    noise = np.random.default_rng(0)
    usual = list(1 + 0.05 * noise.standard_normal(PAST + 50))
    assert pulse(usual) == []
    assert pulse([*usual, *[9.0] * (RECENT - 1), *usual]) == []
    high = len(usual)
    assert pulse([*usual, *[9.0] * RECENT]) == [(high - RECENT, high + RECENT - 1)]
    assert pulse([*usual, *[9.0] * RECENT], spike=None) == []
    assert pulse([6.0] * (PAST // 2) + [9e3] * RECENT) == [], "too early to know what is usual"
    falling = list(np.geomspace(6, 0.001, 600) * (1 + 0.2 * noise.standard_normal(600)))
    assert pulse(falling) == []


class Kicked(nn.Module):
    """A bowl that one batch throws the weight out of, to where learning is slow. `poison` is that batch's first key."""

    def __init__(self, poison: int) -> None:
        super().__init__()
        self.weight, self.poison = nn.Parameter(torch.tensor([0.1])), poison

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if int(batch["key"][0]) == self.poison:
            return {"loss": 1 + (self.weight * -2000).mean()}
        noise = (batch["id"].double().mean() / 1e4).float()
        return {"loss": 1 + noise + self.weight.abs().mean()}


def test_an_exploding_loss_takes_the_run_back_to_before_it(tmp_path: Path, images: Images):
    at = PAST + 60
    poison = images[Plan(len(images), 16, seed=1).batch(at)]["key"][0]
    objective, run, said = Kicked(int(poison)), Run(tmp_path, CONFIG), list[str]()
    train(objective, images, at + 40, opt="momentum", rate=lambda step: 0.01, save_every=20, run=run, say=said.append,
          log_every=10, max_rollbacks=1)  # fmt: skip
    (row,) = run.skipped()
    assert row["reason"] == "the loss has exploded"
    assert row["first"] <= at <= row["last"]
    assert row["checkpoint"] <= row["first"]
    assert len(said) == 1
    assert "leaving out step" in said[0]
    assert float(objective.weight.detach().abs()) < 1
    assert max(row["loss"] for row in read_metrics(run.out)) < 3
    assert [step for step, _ in checkpoints(run.checkpoints)][-1] == at + 40


# ---------------------------------------------------------------------------------------------------- disks


def on_steps(first: int, last: int, room: int) -> Callable[[dict[str, float]], None]:
    """A report that fills the disk after step `first` and makes room again after step `last`."""
    disk: list[Any] = []

    def report(row: dict[str, float]) -> None:
        if row["step"] == first:
            disk.append(largest_file(room))
            disk[0].__enter__()
        elif row["step"] == last:
            disk[0].__exit__(None, None, None)

    return report


def test_a_disk_that_is_full_for_a_while_costs_nothing(tmp_path: Path, images: Images):
    straight, run, said = build(), Run(tmp_path / "straight", CONFIG), list[str]()
    train(straight, images, 12, run=run, log_every=1, save_every=2)
    objective, full = build(), Run(tmp_path / "full", CONFIG)
    # 500 bytes: neither a checkpoint nor a longer metrics.jsonl fits.
    train(objective, images, 12, run=full, log_every=1, save_every=2, report=on_steps(5, 9, 500), say=said.append)
    assert any("cannot write a checkpoint" in line and "too large" in line for line in said)
    assert any("metrics.jsonl" in line for line in said)
    assert equal(objective.state_dict(), straight.state_dict())
    assert metrics_of(full) == metrics_of(run)
    assert [step for step, _ in checkpoints(full.checkpoints)] == [10, 12]
    assert not list(full.checkpoints.glob(".*"))


def test_a_run_whose_last_save_fails_ends_with_an_error_and_continues_later(tmp_path: Path, images: Images):
    straight = build()
    train(straight, images, 8)
    run, said = Run(tmp_path, CONFIG), list[str]()
    with largest_file(10**9), pytest.raises(UserError, match=r"cannot write a checkpoint .*make room and run the same"):
        train(build(), images, 8, run=run, log_every=1, save_every=3, report=on_steps(4, 99, 500), say=said.append)
    assert [step for step, _ in checkpoints(run.checkpoints)] == [0, 3]
    again = build()
    train(again, images, 8, run=run, log_every=1, save_every=3)
    assert equal(again.state_dict(), straight.state_dict())
    assert [row["step"] for row in read_metrics(run.out)] == list(range(1, 9))


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, images: Images, file: str):
    straight = build()
    train(straight, images, 9)
    train(build(), images, 6, run=Run(tmp_path, CONFIG), save_every=3, log_every=1)
    target = tmp_path / "checkpoints" / "step-00000006" / file
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 4
    target.write_bytes(content)
    again, said = build(), list[str]()
    train(again, images, 9, run=Run(tmp_path, CONFIG), save_every=3, log_every=1, say=said.append)
    assert len(said) == 1
    assert "step-00000006 is damaged" in said[0]
    assert "using the one before" in said[0]
    assert equal(again.state_dict(), straight.state_dict())
    assert (tmp_path / "checkpoints" / "damaged-step-00000006" / file).read_bytes() == content
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 10))


def test_a_finished_run_cannot_become_shorter(tmp_path: Path, images: Images):
    train(build(), images, 4, run=Run(tmp_path, CONFIG))
    with pytest.raises(UserError, match=r"has done 4 steps already, more than train\.steps=3"):
        train(build(), images, 3, run=Run(tmp_path, CONFIG))


# ---------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_the_step_and_the_run_goes_on_bit_for_bit(
    tmp_path: Path, images: Images, number: signal.Signals
):
    straight, run = build(), Run(tmp_path / "straight", CONFIG)
    train(straight, images, 9, run=run, log_every=3, save_every=4)

    def rate(step: int) -> float:
        if step == 4 and not preempted:
            os.kill(os.getpid(), number)
        return 1e-3 * (1 + step)

    preempted: list[Preempted] = []
    before = signal.getsignal(number)
    stopped = Run(tmp_path / "stopped", CONFIG)
    with pytest.raises(Preempted) as caught, stopped:
        train(build(), images, 9, run=stopped, rate=rate, log_every=3, save_every=4)
    preempted.append(caught.value)
    assert (caught.value.signal, caught.value.step) == (number.name, 5)
    assert caught.value.exit_code == (130 if number == signal.SIGINT else 75)
    assert signal.getsignal(number) == before
    status = json.loads((stopped.out / "status.json").read_text())
    assert (status["state"], status["step"], status["signal"]) == ("preempted", 5, number.name)
    assert [step for step, _ in checkpoints(stopped.checkpoints)] == [4, 5]
    assert [row["step"] for row in read_metrics(stopped.out)] == [3], "a line is for an interval, not for a signal"
    again, run_again = build(), Run(tmp_path / "stopped", CONFIG)
    train(again, images, 9, run=run_again, rate=rate, log_every=3, save_every=4)
    assert equal(again.state_dict(), straight.state_dict())
    assert metrics_of(run_again) == metrics_of(run)


# ---------------------------------------------------------------------------------------------------- bad images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty grey images; four of them cannot be read."""
    rng = np.random.default_rng(0)
    for i in range(40):
        path = tmp_path / "images" / f"{i:02d}.png"
        path.parent.mkdir(exist_ok=True)
        PIL.Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
        if i % 10 == 7:
            path.write_bytes(path.read_bytes()[: i + 20])
    return tmp_path / "images"


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_listed_once_and_too_many_stop_the_run(tmp_path: Path, folder: Path, workers: int):
    data = load_data("folder", path=str(folder))
    source = Images(data.train, Transform((8, 8)), channels=1, seed=1)
    plan = Plan(len(source), 10, seed=1)

    def go(run: Run, steps: int, said: list[str], **also: Any) -> None:
        objective = build()
        optimizer = make_optimizer(objective, opt="adamw", lr=1.0)
        fit(objective, Loader(source, plan, workers=workers), optimizer, steps=steps, rate=lambda step: 1e-3,
            accelerator=Accelerator(cpu=True), run=run, say=said.append, log_every=1, save_every=4, **also)  # fmt: skip

    run, said = Run(tmp_path / "run", CONFIG), list[str]()
    go(run, 8, said, max_bad=0.1)
    lines = run.bad_images.read_text().splitlines()
    assert sorted(int(line.split("\t")[0]) for line in lines) == [7, 17, 27, 37]
    assert all(f"{int(line.split()[0]):02d}.png" in line for line in lines)
    assert sum(line.count("cannot be read and are replaced") for line in said) == len(said)
    go(Run(tmp_path / "run", CONFIG), 12, said, max_bad=0.1)
    assert run.bad_images.read_text().splitlines() == lines, "listed once, also when it is continued"
    with pytest.raises(
        UserError, match=r"of 40 images cannot be read, more than train\.max_bad=0\.05 allows .*bad_images"
    ):
        go(Run(tmp_path / "strict", CONFIG), 8, said, max_bad=0.05)
    with pytest.raises(UserError, match=r"1 of 40 .*train\.max_bad=0 allows"):
        go(Run(tmp_path / "none", CONFIG), 8, said, max_bad=0)


# ---------------------------------------------------------------------------------------------------- O(1), elastic


class TenMillion:
    """A synthetic index of ten million images that notes what is read."""

    column_names = ("image",)

    def __init__(self) -> None:
        self.read: list[int] = []
        self.image = load_data("digits").train[0]["image"]

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, ids: list[int]) -> dict[str, list[Any]]:
        self.read += ids
        return {"image": [self.image] * len(ids)}


def test_continuing_at_step_a_million_reads_nothing_before_it():
    source = TenMillion()
    images = Images(source, Transform((8, 8)), channels=1, seed=1)  # type: ignore[arg-type]
    plan = Plan(len(source), 256, seed=1)
    first = next(iter(Loader(images, plan).batches(1_000_000, 2_000_000)))
    assert source.read == first["id"].tolist() == plan.batch(1_000_000)[1].tolist()
    assert plan.batch(1_000_000)[0] == 1_000_000 // (10_000_000 // 256)


@pytest.mark.parametrize(
    ("accumulation", "limit", "world", "wanted"),
    [
        (None, None, 2, 1),
        (4, None, 1, 4),
        (None, 16, 1, 4),
        (None, 16, 2, 2),
        (None, 20, 1, 4),
        (None, 64, 2, 1),
        (8, 8, 1, 8),
    ],
)
def test_accumulation_fills_in_for_small_devices(accumulation: int | None, limit: int | None, world: int, wanted: int):
    training = Training(accumulation=accumulation, max_batch_per_device=limit)
    assert split_batch(training, 64, world) == wanted


def test_a_batch_that_cannot_be_cut_small_enough_is_refused():
    with pytest.raises(UserError, match=r"cannot be cut into even pieces of at most train\.max_batch_per_device=1"):
        split_batch(Training(max_batch_per_device=1), 62, 1)
    with pytest.raises(UserError, match=r"train\.accumulation=2 gives batches of 32, above"):
        split_batch(Training(accumulation=2, max_batch_per_device=16), 64, 1)


def test_ema_is_timms_and_ends_in_the_objective(images: Images):
    """The mean that timm keeps, step by step, of the weights that plain training goes through."""
    seen: list[dict[str, Tensor]] = []
    plain = build()
    train(plain, images, 5, log_every=1,
          report=lambda row: seen.append({name: t.clone() for name, t in plain.state_dict().items()}))  # fmt: skip
    wanted = {name: tensor.clone() for name, tensor in build().state_dict().items()}
    for weights in seen:
        wanted = {name: tensor + (1 - 0.7) * (weights[name] - tensor) for name, tensor in wanted.items()}
    averaged = build()
    train(averaged, images, 5, ema=0.7)
    for name, tensor in averaged.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-6, atol=1e-7)
