"""From a source to batches of uint8 tensors, with workers or without: the same batches either way."""

import os
from collections.abc import Iterator
from typing import Any

import datasets
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from mpp.data.decoding import decode
from mpp.data.plan import Plan
from mpp.data.transforms import Transform, to_tensor
from mpp.errors import LocalError, UserError
from mpp.randomness import fold, fold_each

Batch = dict[str, Tensor]


class Images(Dataset[Any]):
    """Whole micro-batches of a source, by (epoch, ids).

    Args:
        source: columns `image`, undecoded, and maybe `label`.
        transform: from decoded uint8 (C, H, W) to the encoder's size.
        channels: channels to decode to.
        seed: of the run; with the epoch and the sample's id it gives the sample's key.
    """

    def __init__(self, source: datasets.Dataset, transform: Transform, *, channels: int, seed: int = 0) -> None:
        self.source, self.transform, self.channels, self.seed = source, transform, channels, seed
        self.labelled = "label" in source.column_names

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, which: tuple[int, Tensor]) -> dict[str, Any]:
        """A batch: `image` uint8 (B, C, H, W), `key` and `id` int64 (B,), `label` int64 (B,) if there are labels.

        What a user can put right comes back as {"error": message}: an exception would lose its type on the way from a
        worker.
        """
        epoch, ids = which
        keys = fold_each(fold(self.seed, "sample", epoch), ids)
        rows = self.source[ids.tolist()]
        try:
            images = [
                self.transform(to_tensor(decode(image, self.channels)), draws)
                for image, draws in zip(rows["image"], self.transform.draw(keys), strict=True)
            ]
        except UserError as error:
            return {"error": str(error)}
        batch = {"image": torch.stack(images), "key": keys, "id": ids}
        if self.labelled:
            batch["label"] = torch.as_tensor(rows["label"], dtype=torch.int64)
        return batch


class _MicroBatches(Sampler[tuple[int, Tensor]]):
    """This process's micro-batches from step `start` to step `stop`, as (epoch, ids)."""

    def __init__(self, plan: Plan, start: int, stop: int) -> None:
        self.plan, self.start, self.stop = plan, start, stop

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for step in range(self.start, self.stop):
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

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The micro-batches of the steps start <= step < stop, `plan.accumulation` for each step."""
        return _read(self.images, _MicroBatches(self.plan, start, stop), workers=self.workers, pin=self.pin)


def read_batches(images: Images, index: list[Tensor], *, workers: int = 0, pin: bool = False) -> Iterator[Batch]:
    """The samples of each tensor of ids int64 (B,) in turn, as batches of epoch 0."""
    return _read(images, [(0, ids) for ids in index], workers=min(workers, len(index) // 2), pin=pin)


def _read(images: Images, which: Any, *, workers: int, pin: bool) -> Iterator[Batch]:
    loader = DataLoader(images, batch_size=None, sampler=which, num_workers=workers, pin_memory=pin)
    for batch in loader:
        if "error" in batch:
            raise LocalError(batch["error"])
        yield batch


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
