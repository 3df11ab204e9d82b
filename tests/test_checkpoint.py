"""Checkpoints: bit for bit there and back, atomic, checked, rotated; written in the background."""

import errno
import json
import multiprocessing
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import fill, largest_file, read_only, small_disk, until
from torch import nn
from training import build, digits, equal, moments, train

from mpp import UserError
from mpp.data.loader import Images
from mpp.recipes.common import make_optimizer
from mpp.train.checkpoint import (
    Snapshot,
    Writer,
    checkpoints,
    clean,
    load_checkpoint,
    put_aside,
    verify,
    write_checkpoint,
)


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: int = 2, **state: Any
) -> Path:
    snapshot = Snapshot()
    snapshot.take(model, optimizer)
    return write_checkpoint(folder, step, snapshot, state, keep=keep)


@pytest.fixture(scope="module")
def images() -> Images:
    return digits()


@pytest.mark.parametrize("opt", ["adamw", "momentum", "lamb", "laprop"])
def test_a_checkpoint_restores_model_and_optimizer_bit_for_bit(tmp_path: Path, images: Images, opt: str):
    """What is restored also goes on as if it had never stopped."""
    objective = build()
    optimizer = train(objective, images, 3, opt=opt)
    path = save(tmp_path, 3, objective, optimizer, note="hello")
    again = build(seed=1)
    optimizer_again = make_optimizer(again, opt=opt, lr=1.0, weight_decay=0.1)
    assert not equal(again.state_dict(), objective.state_dict())
    state = load_checkpoint(path, again, optimizer_again)
    assert (state["step"], state["note"]) == (3, "hello")
    assert equal(again.state_dict(), objective.state_dict())
    assert moments(optimizer)
    assert equal(moments(optimizer_again), moments(optimizer))
    batch = images[0, torch.arange(8)]
    for one, its_optimizer in ((objective, optimizer), (again, optimizer_again)):
        for group in its_optimizer.param_groups:
            group["lr"] = 1e-3
        its_optimizer.zero_grad()
        one(batch)["loss"].backward()
        its_optimizer.step()
    assert equal(again.state_dict(), objective.state_dict())


def test_the_last_two_are_kept_and_unfinished_ones_ignored(tmp_path: Path):
    objective = build()
    optimizer = make_optimizer(objective, opt="adamw", lr=1e-3)
    assert checkpoints(tmp_path / "none") == []
    (tmp_path / ".writing-00000009").mkdir()
    for step in (2, 10, 100):
        save(tmp_path, step, objective, optimizer)
    assert checkpoints(tmp_path) == [(step, tmp_path / f"step-{step:08d}") for step in (10, 100)]
    save(tmp_path, 100, objective, optimizer, keep=1)  # the same step again
    assert [step for step, _ in checkpoints(tmp_path)] == [100]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writing-00000009", "step-00000100"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, file: str, damage: str, images: Images):
    objective = build()
    path = save(tmp_path, 1, objective, train(objective, images, 1))
    target = path / file
    if damage == "gone":
        target.unlink()
    else:
        target.write_bytes(target.read_bytes()[: target.stat().st_size // 2])
    with pytest.raises(UserError, match=f"cannot resume from .*{path.name} "):
        load_checkpoint(path, objective, make_optimizer(objective, opt="adamw", lr=1e-3))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    objective = build()
    path = save(tmp_path, 1, objective, make_optimizer(objective, opt="adamw", lr=1e-3))
    with pytest.raises(UserError, match="cannot resume from"):
        load_checkpoint(path, build(patch_size=4))


def test_a_failed_write_leaves_the_checkpoint_before(tmp_path: Path, images: Images):
    objective = build()
    optimizer = train(objective, images, 1)
    save(tmp_path, 1, objective, optimizer)
    with pytest.raises(TypeError):
        save(tmp_path, 2, objective, optimizer, not_json=object())
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load_checkpoint(tmp_path / "step-00000001", objective, optimizer)["step"] == 1


# ---------------------------------------------------------------------------------------------------- there and back


class Numbers(nn.Module):
    """Parameters all of one value; with their momentum and running average some bytes to write."""

    def __init__(self, size: int = 1000, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), float(value)))


def numbered(step: float, size: int = 1000) -> tuple[Numbers, torch.optim.Optimizer, Numbers]:
    """Model, optimizer and running average that hold a step, its double and its triple."""
    model, average = Numbers(size, step), Numbers(size, 3 * step)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.full((size,), 2.0 * step)
    return model, optimizer, average


def write(folder: Path, step: int, size: int = 1000, **how: Any) -> Path:
    snapshot = Snapshot()
    snapshot.take(*numbered(step, size))
    return write_checkpoint(folder, step, snapshot, **how)


def holds(path: Path, step: int, size: int = 1000) -> bool:
    """Whether a checkpoint is whole and all of it is of this step."""
    model, optimizer, average = numbered(-1, size)
    state = load_checkpoint(path, model, optimizer, average)
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    wanted = ((model.weight, step), (momentum, 2 * step), (average.weight, 3 * step))
    return state["step"] == step and all(bool((tensor == value).all()) for tensor, value in wanted) and not verify(path)


def test_the_running_average_comes_back_bit_for_bit(tmp_path: Path):
    objective, average = build(), build(seed=1)
    snapshot = Snapshot()
    snapshot.take(objective, make_optimizer(objective, opt="adamw", lr=1e-3), average)
    path = write_checkpoint(tmp_path, 1, snapshot)
    assert "ema.safetensors" in json.loads((path / "manifest.json").read_text())
    again, average_again = build(seed=2), build(seed=3)
    load_checkpoint(path, again, None, average_again)
    assert equal(again.state_dict(), objective.state_dict())
    assert equal(average_again.state_dict(), average.state_dict())
    assert not equal(again.state_dict(), average_again.state_dict())
    without = save(tmp_path, 2, objective, make_optimizer(objective, opt="adamw", lr=1e-3))
    with pytest.raises(UserError, match=r"cannot resume from .*ema\.safetensors"):
        load_checkpoint(without, again, None, average_again)


@given(
    numbers=st.dictionaries(
        st.text("abc_", min_size=1),
        st.floats(allow_nan=False) | st.integers(-(2**70), 2**70) | st.booleans() | st.none(),
        max_size=5,
    )
)
def test_moments_that_are_python_numbers_come_back_exactly(tmp_path: Path, numbers: dict[str, Any]):
    """As float32 tensors 0.1 and 2**24 + 1 would be other numbers."""
    model, optimizer, average = numbered(1)
    optimizer.state[model.weight].update(numbers)
    snapshot = Snapshot()
    snapshot.take(model, optimizer, average)
    path = write_checkpoint(tmp_path, 1, snapshot)
    again, its_optimizer, _ = numbered(2)
    load_checkpoint(path, again, its_optimizer)
    found = its_optimizer.state[again.weight]
    assert {name: (type(found[name]), found[name]) for name in numbers} == {
        name: (type(value), value) for name, value in numbers.items()
    }
    assert torch.equal(found["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"])


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4),
    shape=st.lists(st.integers(0, 4), max_size=3),
    transposed=st.booleans(),
)
def test_buffers_of_every_type_and_shape_come_back_bit_for_bit(
    tmp_path: Path, dtypes: list[torch.dtype], shape: list[int], transposed: bool
):
    def module(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = Numbers(3, float(seed))
        for i, dtype in enumerate(dtypes):
            bits = torch.randint(-(2**62), 2**62, shape)  # more than float32 can hold, in the types that hold more
            value = bits / 3 / 2**60 if dtype.is_floating_point else bits > 0 if dtype == torch.bool else bits
            model.register_buffer(f"b{i}", (value.T if transposed and len(shape) == 2 else value).to(dtype))
        return model

    model, again = module(1), module(2)
    path = save(tmp_path, 1, model, torch.optim.SGD(model.parameters(), lr=1.0))
    load_checkpoint(path, again)
    for name, value in model.state_dict().items():
        assert again.state_dict()[name].dtype == value.dtype
        assert torch.equal(again.state_dict()[name], value)


# ---------------------------------------------------------------------------------------------------- rotation


@example(steps=[0, 10, 20, 30, 35], keep=1, keep_every=10)  # weights that nothing was learned in are not worth it
@given(
    steps=st.sets(st.integers(0, 60), min_size=1, max_size=9).map(sorted),
    keep=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 20),
)
def test_what_is_kept_is_the_last_ones_and_every_so_manyth(steps: list[int], keep: int, keep_every: int | None):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i, step in enumerate(steps):
            write(folder, step, 3, keep=keep, keep_every=keep_every)
            kept = {*steps[: i + 1][-keep:]}
            kept |= {old for old in steps[: i + 1] if keep_every and old > 0 and old % keep_every == 0}
            assert [found for found, _ in checkpoints(folder)] == sorted(kept)
        assert all(path.name.startswith("step-") for path in folder.iterdir())
        assert all(holds(path, step, 3) for step, path in checkpoints(folder))


# ---------------------------------------------------------------------------------------------------- damage

FILES = ["model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write(tmp_path_factory.mktemp("whole"), 7)
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    assert verify(path) == ""
    return path


@settings(max_examples=150)
@given(
    file=st.sampled_from(FILES),
    damage=st.sampled_from(["flip", "truncate", "delete", "extend", "zeros", "folder"]),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    more=st.binary(min_size=1, max_size=9),
)
def test_any_damage_to_any_file_is_named(whole: Path, file: str, damage: str, where: float, bit: int, more: bytes):
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / whole.name
        shutil.copytree(whole, path)
        target = path / file
        content = bytearray(target.read_bytes())
        place = int(where * (len(content) - 1))  # without its last newline a manifest says the same
        if damage == "flip":
            content[place] ^= 1 << bit
        elif damage == "truncate":
            del content[place:]
        elif damage == "extend":
            content += b"x" + more  # a manifest with more spaces says the same
        elif damage == "zeros":  # what a file system may leave after a loss of power
            content[place:] = bytes(len(content) - place)
        target.unlink()
        if damage == "folder":
            target.mkdir()
        elif damage != "delete":
            target.write_bytes(content)
        assert file in verify(path)
        with pytest.raises(UserError, match="cannot resume from"):
            load_checkpoint(path, *numbered(0))


def test_every_byte_of_the_manifest_counts(whole: Path, tmp_path: Path):
    path = tmp_path / whole.name
    shutil.copytree(whole, path)
    content = (path / "manifest.json").read_bytes()
    for place in range(len(content)):
        for bit in (place % 8, (place + 3) % 8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            (path / "manifest.json").write_bytes(damaged)
            assert verify(path), (place, bit, damaged)
    (path / "manifest.json").write_bytes(content)
    assert verify(path) == ""


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"7",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"state.json": null}',
        b'{"state.json": {"bytes": "9", "sha256": ""}}',
        b'{"a\\u0000b": {"bytes": 1, "sha256": ""}}',
        b'{"model.safetensors": ' + b"9" * 5000 + b"}",
        b'{"' + b"x" * 5000 + b'": {"bytes": 1, "sha256": ""}}',
    ],
)
def test_a_manifest_of_anything_is_named(whole: Path, tmp_path: Path, content: bytes):
    path = tmp_path / whole.name
    shutil.copytree(whole, path)
    (path / "manifest.json").write_bytes(content)
    assert verify(path)
    with pytest.raises(UserError, match="cannot resume from"):
        load_checkpoint(path, *numbered(0))


def test_what_is_no_checkpoint_folder_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("file", "empty", "none"):
        assert "manifest.json cannot be read" in verify(tmp_path / name)


def test_putting_aside_never_overwrites(tmp_path: Path):
    for number in range(12):
        path = write(tmp_path, 7)
        (path / "number").write_text(str(number))
        aside = put_aside(path)
        assert not path.exists()
        assert checkpoints(tmp_path) == []
        assert (aside / "number").read_text() == str(number)
    names = [path.name for path in tmp_path.iterdir()]
    assert len(names) == 12
    assert all(name.startswith("damaged-step-00000007") for name in names)
    assert {(path / "number").read_text() for path in tmp_path.iterdir()} == {str(number) for number in range(12)}


# ---------------------------------------------------------------------------------------------------- in the background


def test_a_save_waits_for_the_copy_alone(tmp_path: Path):
    """200 MB. What training does to its weights right after `save` is not in the checkpoint."""
    size = 50_000_000 // 3
    model, optimizer, average = numbered(5, size)
    snapshot = Snapshot()
    snapshot.take(model, optimizer, average)
    assert snapshot.num_bytes == 3 * 4 * size
    began = time.perf_counter()
    snapshot.take(model, optimizer, average)
    write_checkpoint(tmp_path / "one", 5, snapshot)
    synchronous = time.perf_counter() - began
    del snapshot
    writer, seconds = Writer(), []
    for step in (5, 6, 7):
        for tensor, times in ((model.weight, 1), (optimizer.state[model.weight]["momentum_buffer"], 2)):
            tensor.data.fill_(times * step)
        average.weight.data.fill_(3 * step)
        began = time.perf_counter()
        writer.save(tmp_path / "two", step, model, optimizer, average)
        seconds.append(time.perf_counter() - began)
        assert writer.pending
        model.weight.data.zero_()
        optimizer.state[model.weight]["momentum_buffer"].zero_()
        average.weight.data.zero_()
        assert writer.wait() is None
        assert not writer.pending
    assert min(seconds[1:]) < 0.5 * synchronous, (seconds, synchronous)
    for step in (6, 7):
        assert holds(tmp_path / "two" / f"step-{step:08d}", step, size)


def test_without_block_wait_only_looks(tmp_path: Path):
    writer = Writer()
    assert writer.wait() is None
    assert writer.wait(block=False) is None
    writer.save(tmp_path, 1, *numbered(1, 3_000_000))
    began = time.perf_counter()
    assert writer.wait(block=False) is None
    assert time.perf_counter() - began < 0.05
    assert until(lambda: writer.wait(block=False) is None and not writer.pending)
    assert holds(tmp_path / "step-00000001", 1, 3_000_000)


@pytest.mark.parametrize("room", [0, 100, 4_000, 6_000])
def test_a_disk_that_fills_up_is_told_by_wait_and_leaves_the_rest(tmp_path: Path, room: int):
    """Every file of step 3 is longer than `room`, the manifest and state.json as well for the smallest."""
    writer = Writer()
    for step in (1, 2):
        writer.save(tmp_path, step, *numbered(step, 2_000))
        assert writer.wait() is None
    with largest_file(room):
        writer.save(tmp_path, 3, *numbered(3, 2_000))
        error = writer.wait()
    assert isinstance(error, OSError)
    assert not writer.pending
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert all(holds(path, step, 2_000) for step, path in checkpoints(tmp_path))
    writer.save(tmp_path, 4, *numbered(4, 2_000))  # there is room again
    assert writer.wait() is None
    assert [step for step, _ in checkpoints(tmp_path)] == [2, 4]


def test_an_error_of_another_kind_is_raised_once(tmp_path: Path):
    writer = Writer()
    writer.save(tmp_path, 1, *numbered(1), state={"not": object()})
    with pytest.raises(TypeError):
        writer.wait()
    assert list(tmp_path.iterdir()) == []
    assert writer.wait() is None
    writer.save(tmp_path, 1, *numbered(1))
    assert writer.wait() is None
    assert holds(tmp_path / "step-00000001", 1)


def test_a_disk_without_room_is_not_filled(tmp_path: Path):
    """A real disk of 4 MB: what would not fit is not begun, and others keep their room."""
    with small_disk(tmp_path / "disk", 4_000_000) as disk:
        write(disk, 1, 50_000)
        rubbish = fill(disk, leave=600_000)
        with pytest.raises(OSError, match="No space left on device") as full:
            write(disk, 2, 50_000)
        assert full.value.errno == errno.ENOSPC
        assert shutil.disk_usage(disk).free >= 590_000
        assert sorted(path.name for path in disk.iterdir()) == ["rubbish", "step-00000001"]
        rubbish.unlink()
        write(disk, 2, 50_000)
        assert holds(disk / "step-00000002", 2, 50_000)


@pytest.mark.parametrize("what", ["tensors", "state"])
def test_a_disk_that_is_full_after_all_leaves_the_checkpoint_before(tmp_path: Path, what: str):
    """The tensors would fit, but not what comes with them: the header of 4,000 names, or a long state.json."""
    with small_disk(tmp_path / "disk", 2_000_000) as disk:
        write(disk, 1)
        fill(disk, leave=150_000)
        model, writer = Numbers(10), Writer()
        if what == "tensors":
            for i in range(4_000):
                model.register_buffer(f"buffer{i}", torch.zeros(()))
        state = {"long": "x" * 300_000} if what == "state" else {}
        writer.save(disk, 2, model, torch.optim.SGD(model.parameters(), lr=1.0), state=state)
        error = writer.wait()
        assert error is not None
        assert "No space left" in str(error)
        assert sorted(path.name for path in disk.iterdir()) == ["rubbish", "step-00000001"]
        assert holds(disk / "step-00000001", 1)


def test_a_read_only_disk_is_an_oserror(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        write(tmp_path / "file" / "checkpoints", 1)
    with small_disk(tmp_path / "disk", 4_000_000) as disk:
        write(disk, 1)
        read_only(disk)
        with pytest.raises(OSError, match="Read-only file system"):
            write(disk, 2)
        assert [path.name for path in disk.iterdir()] == ["step-00000001"]
        assert holds(disk / "step-00000001", 1)


# ---------------------------------------------------------------------------------------------------- crashes

SIZE = 300_000  # of three files: 3.6 MB


def _save_for_ever(folder: Path, step: int) -> None:
    torch.set_num_threads(1)
    writer = Writer()
    while True:
        step += 1
        writer.save(folder, step, *numbered(step, SIZE))
        error = writer.wait()
        assert error is None, error


def kill_while_saving(folder: Path, kills: int) -> int:
    """Saves on in the same folder after each kill; returns in how many of them a checkpoint was half written."""
    draw, halves, last = random.Random(0), 0, 0
    fork = multiprocessing.get_context("fork")  # what is imported already need not be imported again
    for kill in range(kills):
        process = fork.Process(target=_save_for_ever, args=(folder, last), daemon=True)
        process.start()
        assert until(lambda last=last: (folder / f"step-{last + 2:08d}").exists()), "it does not save"
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.join()
        found = checkpoints(folder)
        # Two are there, or three where the kill fell between the newest name and the removal of the oldest.
        assert len(found) in (2, 3), found
        assert found[-1][0] >= last + 2
        assert [step for step, _ in found] == list(range(found[0][0], found[-1][0] + 1))
        for step, path in found:
            assert holds(path, step, SIZE), (kill, verify(path))
        left = [path.name for path in folder.iterdir() if not path.name.startswith("step-")]
        assert all(name.startswith((".writing-", ".trash-")) for name in left)
        halves += bool(left)
        last = found[-1][0]
        if kill % 2:  # as a run does when it is started again; without, what is left must not be in the way
            clean(folder)
            assert len(checkpoints(folder)) == len(list(folder.iterdir()))
    return halves


def test_a_kill_at_any_moment_leaves_whole_checkpoints(tmp_path: Path):
    assert kill_while_saving(tmp_path, 12) >= 4


@pytest.mark.full
def test_a_hundred_kills_leave_whole_checkpoints(tmp_path: Path):
    assert kill_while_saving(tmp_path, 100) >= 40
