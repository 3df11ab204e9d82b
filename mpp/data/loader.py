"""From a source to batches of uint8 tensors, with workers or without: the same batches either way."""

import os
from collections.abc import Generator, Iterator, Set
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from mpp.data.decoding import BadImageError, decode
from mpp.data.plan import Plan
from mpp.data.transforms import Transform, to_tensor
from mpp.errors import LocalError
from mpp.randomness import fold, fold_each
from mpp.stopping import for_children, leave_to_parent

Batch = dict[str, Any]
ATTEMPTS = 8  # to find a readable image in place of one that is not


class BadImagesError(LocalError):
    """Images of a pass that must be whole cannot be read.

    Args:
        bad: what and why, by sample id.
        total: images of the data set.
    """

    def __init__(self, bad: dict[int, str], total: int) -> None:
        self.bad = bad
        first = [bad[i] for i in sorted(bad)[:5]]
        more = ", ..." * (len(bad) > len(first))
        super().__init__(
            f"{len(bad):,} of {total:,} images cannot be read: {', '.join(first)}{more}; repair or remove them"
        )


class Images(Dataset[Any]):
    """Whole micro-batches of a source, by (epoch, ids).

    Args:
        source: columns `image`, undecoded, and maybe `label`.
        transform: from decoded uint8 (C, H, W) to the encoder's size.
        channels: channels to decode to.
        seed: of the run; with the epoch and the sample's id it gives the sample's key.
        strict: whether an image that cannot be read is an error. Otherwise another one stands in for it, with its own
            label: a function of the sample's id alone, so that the order, crops and masks of all others stay what they
            are. None: strict for evaluation, where another image would be another question, and not for training.
    """

    def __init__(
        self,
        source: datasets.Dataset,
        transform: Transform,
        *,
        channels: int,
        seed: int = 0,
        strict: bool | None = None,
    ) -> None:
        self.source, self.transform, self.channels, self.seed = source, transform, channels, seed
        self.strict = not transform.train if strict is None else strict
        self.labelled = "label" in source.column_names

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, which: tuple[int, Tensor]) -> dict[str, Any]:
        """A batch: `image` uint8 (B, C, H, W), `key` and `id` int64 (B,), `label` int64 (B,) if there are labels.

        `bad` lists (id, what and why) of the images that others stand in for; it is absent where there are none.

        What a user can put right comes back as {"error": message}, and with `bad` if strict: an exception would lose
        its type on the way from a worker.
        """
        epoch, ids = which
        keys = fold_each(fold(self.seed, "sample", epoch), ids)
        rows = self.source[ids.tolist()]
        images, bad = [], []
        for place, (image, draws) in enumerate(zip(rows["image"], self.transform.draw(keys), strict=True)):
            try:
                array = decode(image, self.channels)
            except BadImageError as error:
                i = int(ids[place])
                bad.append((i, f"{error.name(f'sample {i}')} ({error.reason})"))
                if self.strict:
                    continue
                other = self._stand_in(i)
                if other is None:
                    return {"error": f"cannot read {bad[-1][1]}, nor any of {ATTEMPTS} other images; repair the data"}
                array = other[0]
                if self.labelled:
                    rows["label"][place] = other[1]
            images.append(self.transform(to_tensor(array), draws))
        if bad and self.strict:
            return {"error": str(BadImagesError(dict(bad), len(self))), "bad": bad}
        batch: dict[str, Any] = {"image": torch.stack(images), "key": keys, "id": ids}
        if self.labelled:
            batch["label"] = torch.as_tensor(rows["label"], dtype=torch.int64)
        return batch | ({"bad": bad} if bad else {})

    def _stand_in(self, i: int) -> tuple[np.ndarray, Any] | None:
        """Image and label in place of sample i, the first readable one of a few that its id names; None: none is."""
        for attempt in range(ATTEMPTS):
            row = self.source[fold("replace", i, attempt) % len(self)]
            try:
                return decode(row["image"], self.channels), row.get("label")
            except BadImageError:
                continue
        return None


class _MicroBatches(Sampler[tuple[int, Tensor]]):
    """This process's micro-batches from step `start` to step `stop`, without those of `skip`, as (epoch, ids)."""

    def __init__(self, plan: Plan, start: int, stop: int, skip: Set[int]) -> None:
        self.plan, self.start, self.stop, self.skip = plan, start, stop, skip

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for step in range(self.start, self.stop):
            if step not in self.skip:
                for micro in range(self.plan.accumulation):
                    yield self.plan.micro_batch(step, micro)


class Loader:
    """The micro-batches of a plan, from any step on, in O(1): nothing is read to be skipped.

    Args:
        images: the data.
        plan: which samples, when.
        workers: processes that decode; 0 decodes in this one.
        pin: whether to put batches in page-locked memory, for copies to a device.
    """

    def __init__(self, images: Images, plan: Plan, *, workers: int = 0, pin: bool = False) -> None:
        self.images, self.plan, self.workers, self.pin = images, plan, workers, pin

    def batches(self, start: int, stop: int, *, skip: Set[int] = frozenset()) -> Generator[Batch, None, None]:
        """The micro-batches of the steps start <= step < stop, `plan.accumulation` for each step, none for `skip`."""
        which = _MicroBatches(self.plan, start, stop, frozenset(skip))
        return _read(self.images, which, workers=self.workers, pin=self.pin)


def read_batches(images: Images, index: list[Tensor], *, workers: int = 0, pin: bool = False) -> Iterator[Batch]:
    """The samples of each tensor of ids int64 (B,) in turn, as batches of epoch 0.

    Raises:
        BadImagesError: after the last batch, if `images` are strict and some cannot be read; names them. Batches end
            with the first of them.
    """
    return _read(images, [(0, ids) for ids in index], workers=min(workers, len(index) // 2), pin=pin)


def _read(images: Images, which: Any, *, workers: int, pin: bool) -> Generator[Batch, None, None]:
    loader = DataLoader(
        images, batch_size=None, sampler=which, num_workers=workers, pin_memory=pin, worker_init_fn=_start_worker
    )
    found: dict[int, str] = {}
    with for_children():
        batches = iter(loader)
    for batch in batches:
        if "bad" in batch:
            batch["bad"] = [(i, message) for i, message in batch["bad"]]  # tuples became lists on their way
        if "error" in batch:
            if "bad" not in batch:
                raise LocalError(batch["error"])
            found |= dict(batch["bad"])  # and go on, to name them all
        elif not found:
            yield batch
    if found:
        raise BadImagesError(found, len(images))


def _start_worker(number: int) -> None:
    leave_to_parent()


def usable_cores() -> int:
    """Cores that this process may use: affinity and, on Linux, the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if "sched_getaffinity" in dir(os) else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def default_workers(*, on_cpu: bool) -> int:
    """Workers for one process: its share of the cores (16 at most) beside an accelerator, none where the CPU trains."""
    if on_cpu:
        return 0
    return max(1, min(16, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
