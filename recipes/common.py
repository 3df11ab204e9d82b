"""What the recipes share: reading the configuration, starting processes, settling what was left open, training."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.console import Console
from timm.optim import create_optimizer_v2
from torch import nn

from mpp.data.loader import Images, Loader, default_workers, usable_cores
from mpp.data.plan import Plan
from mpp.data.sources import Data, load_data
from mpp.encoder import Encoder
from mpp.errors import UserError
from mpp.eval.results import Row, write_results
from mpp.randomness import fold
from mpp.recipes.configuration import Config, call, near
from mpp.recipes.display import Display, banner, make_console, results_table, warn
from mpp.train import Run, fit, learning_rate
from mpp.train.run import flatten, load_config, on_main
from mpp.weights import describe


@dataclass(frozen=True)
class Training:
    """The group `train`: how long, how large, how to compute, what to keep.

    Attributes:
        steps, epochs: length in optimizer steps, or in passes over the data; both null: a default (see `settle`).
        batch_size: images of a step over all processes; null: a default.
        accumulation: micro-batches that a process takes for one step; null: as few as `max_batch_per_device` allows.
        max_batch_per_device: images that a process can take at a time; null: no limit.
        precision: "no", "bf16" or "fp16"; null: what `accelerate launch` says.
        clip: largest norm of the gradient, or null.
        ema: decay of a running average of the weights, which is what is exported and evaluated; null: no average.
        log_every, save_every: steps between reports and between checkpoints.
        keep, keep_every: checkpoints to keep: the last so many, and those of every so many-th step.
        spike, max_rollbacks: when a loss counts as exploded (`mpp.train.pulse.Pulse`), and how often to go back to a
            checkpoint and leave out the steps that did it.
        max_bad: largest share of images that may be unreadable.
        trace: whether to write checksums of every step's samples, crops and masks to trace.jsonl.
        workers: decoding processes for each training process; null: from the cores there are.
        tracker: one of accelerate's (tensorboard, wandb, ...), or null.
        seed: everything random follows from it.
    """

    steps: int | None = None
    epochs: float | None = None
    batch_size: int | None = None
    accumulation: int | None = None
    max_batch_per_device: int | None = None
    precision: str | None = None
    clip: float | None = None
    ema: float | None = None
    log_every: int = 50
    save_every: int | None = None
    keep: int = 2
    keep_every: int | None = None
    spike: float | None = 10.0
    max_rollbacks: int = 3
    max_bad: float = 0.01
    trace: bool = False
    workers: int | None = None
    tracker: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise UserError(f"give train.steps or train.epochs, not both (got {self.steps} and {self.epochs})")
        positive = "steps epochs batch_size accumulation max_batch_per_device clip log_every save_every keep keep_every"
        for name in (*positive.split(), "spike"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"train.{name} must be positive, got {value}")
        for name in ("workers", "max_rollbacks"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserError(f"train.{name} must not be negative, got {value}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise UserError(f"train.ema is a decay between 0 and 1, such as 0.999; got {self.ema}")
        if not 0 <= self.max_bad <= 1:
            raise UserError(f"train.max_bad is a share between 0 and 1, got {self.max_bad}")
        if self.keep < 2:
            raise UserError(f"train.keep={self.keep}: keep at least 2, so that there is one to fall back to")
        if self.precision not in (None, "no", "bf16", "fp16"):
            raise UserError(f"train.precision must be no, bf16 or fp16, got {self.precision}")


# ---------------------------------------------------------------------------------------------------- processes


def start(training: Training, out: Path | None = None, config: Config | None = None) -> Accelerator:
    """Devices, processes, precision and, for a run with a folder and a configuration, its tracker.

    Raises:
        UserError: the launcher started several processes that do not see each other, or the tracker is not there.
    """
    if training.tracker is not None:
        _check_tracker(training.tracker)
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        mixed_precision=training.precision,
        log_with=training.tracker if out is not None else None,
        project_dir=str(out) if out is not None else None,
    )
    on_cpu, world = accelerator.device.type == "cpu", int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.distributed_type.value not in ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU"):
        raise UserError(
            f"the launcher asks for {accelerator.distributed_type.value}, which checkpoints here cannot hold; "
            "choose plain data parallelism in `accelerate config`"
        )
    if on_cpu and accelerator.mixed_precision == "fp16":
        raise UserError("fp16 needs an accelerator; use train.precision=bf16 or no on the CPU")
    if on_cpu and os.environ.get("OMP_NUM_THREADS") == "1" and "ACCELERATE_MIXED_PRECISION" in os.environ:
        # `accelerate launch` gives a process one thread unless told otherwise, which leaves the other cores idle.
        torch.set_num_threads(max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if world != accelerator.num_processes:
        raise UserError(
            f"the launcher started {world} processes, but accelerate sees {accelerator.num_processes}; "
            "check `accelerate config`, or set ACCELERATE_USE_CPU=true for processes on the CPU"
        )
    if training.tracker is not None and out is not None:
        accelerator.init_trackers(out.name, config={key: str(value) for key, value in flatten(config or {}).items()})
    return accelerator


def _check_tracker(name: str) -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = [str(getattr(tracker, "value", tracker)) for tracker in LOGGER_TYPE_TO_CLASS]
    if name not in known:
        raise UserError(f"train.tracker={name} is unknown{near(name, known)}")
    if name not in [str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()]:
        raise UserError(f"train.tracker={name} needs its package: pip install {name}")


def open_run(
    accelerator: Accelerator,
    out: str | Path,
    config: Config,
    training: Training,
    data: Data,
    *,
    after: tuple[str, ...] = (),
) -> Run:
    """The run folder on every process, held by the main one; refused on all of them if it is refused there."""
    main = accelerator.is_main_process
    opened: list[Run] = []

    def open_it() -> None:
        keep, keep_every = training.keep, training.keep_every
        opened.append(Run(out, config, main=main, after=after, keep=keep, keep_every=keep_every, data=data.fingerprint))

    on_main(accelerator, open_it)
    if not main:
        open_it()
    return opened[0]


# ---------------------------------------------------------------------------------------------------- settling


def small(data: Data) -> bool:
    """Whether this is a set of images of one small size, such as the embedded ones."""
    return data.size is not None and max(data.size) <= 64


def default_encoder(data: Data) -> str:
    """An encoder that suits the images: micro models for small ones, ViT-S/16 for photographs."""
    if not small(data):
        return "vit_small_patch16_224"
    return "vit_micro_patch2_8" if max(data.size or ()) <= 16 else "vit_micro_patch4_32"


def settle(training: Training, num_samples: int, *, is_small: bool) -> tuple[int, int]:
    """Steps and batch size, the defaults filled in.

    Defaults: a batch of 32 for small images and 256 for others (never more than the data); 3,500 steps for small
    images, and for others 100 epochs, yet at least 2,000 and at most 100,000 steps (beyond which the paper saw
    diminishing returns, B.1.2).
    """
    batch = training.batch_size or min(32 if is_small else 256, max(2, num_samples // 2 * 2))
    per_epoch = max(1, num_samples // batch)
    if training.steps is not None:
        return training.steps, batch
    if training.epochs is not None:
        return max(1, math.ceil(training.epochs * per_epoch)), batch
    return 3500 if is_small else min(max(100 * per_epoch, 2000), 100_000), batch


def split_batch(training: Training, batch_size: int, world: int) -> int:
    """Micro-batches that each of `world` processes takes for one step.

    Raises:
        UserError: no number of them is both even and small enough.
    """
    if training.max_batch_per_device is None:
        return training.accumulation or 1
    largest = training.max_batch_per_device
    if training.accumulation is not None:
        if batch_size > training.accumulation * world * largest:
            raise UserError(
                f"train.accumulation={training.accumulation} gives batches of "
                f"{batch_size / world / training.accumulation:g}, above train.max_batch_per_device={largest}; give one "
                "of the two"
            )
        return training.accumulation
    fits = [
        count for count in range(1, batch_size // (2 * world) + 1)
        if batch_size % (2 * world * count) == 0 and batch_size // (world * count) <= largest
    ]  # fmt: skip
    if not fits:
        raise UserError(
            f"train.batch_size={batch_size} on {world} process(es) cannot be cut into even pieces of at most "
            f"train.max_batch_per_device={largest}; use a multiple of {2 * world} and a limit of at least 2"
        )
    return fits[0]


def open_data(config: Config, run: str | Path | None = None) -> tuple[Data, Config]:
    """The data of a configuration group and the group itself; `source: same` stands for the data of a run."""
    if config.get("source") == "same":
        if run is None or not (Path(run) / "config.yaml").is_file():
            raise UserError(
                "data=same means the data of the run that from= names, and that is no run folder; give data="
            )
        config = load_config(run)["data"]
    return call("data", load_data, config), config


def data_line(data: Data) -> str:
    """One line for the banner."""
    count = f"{len(data.train):,} training" + (f" and {len(data.test):,} test" if data.test is not None else "")
    classes = f", {len(data.classes)} classes" if data.classes is not None else ""
    return f"{data.name}: {count} images{classes}" + (f" ({data.note})" if data.note else "")


def check_channels(encoder: Encoder, data: Data) -> None:
    """Raises UserError unless the encoder takes the data's channels."""
    if encoder.channels != data.channels:
        raise UserError(
            f"the encoder takes {encoder.channels} channel(s), the data has {data.channels}; "
            f"set data.channels={encoder.channels}"
        )


def init_name(source: str | Path) -> str:
    """What results call an encoder: "mpp", or "supervised" after training with labels."""
    return str(describe(source).get("objective", "mpp"))


def pool_of(source: str | Path, pool: str | None) -> str:
    """The pooling to use: the given one, else what the encoder was trained with, else the mean of the patches.

    After masked pre-training the class token's output is untrained (paper.md 3.3, rows 17 and 18).
    """
    return pool or str(describe(source).get("pool", "mean"))


def pair(size: int | list[int] | tuple[int, ...] | None) -> tuple[int, int] | None:
    """An image size as (height, width).

    Raises:
        UserError: neither one side nor two.
    """
    if size is None:
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or min(sides) < 1:
        raise UserError(f"size must be one side or [height, width] in pixels, got {size}")
    return sides[0], sides[1]


def check_counts(group: str, **counts: Sequence[float | None]) -> None:
    """Raises UserError unless each list has entries and each entry is positive or None."""
    for key, values in counts.items():
        if not values or any(value is not None and value <= 0 for value in values):
            raise UserError(f"{group}.{key} must be positive, got {values[0] if len(values) == 1 else list(values)}")


def labels_words(per_class: int | None) -> str:
    """A number of labels, for people."""
    return "all labels" if per_class is None else f"{per_class} labels a class"


def default_out(recipe: str, *parts: str) -> str:
    """A readable folder below runs/."""
    words = [recipe, *parts]
    return "runs/" + "-".join("".join(c if c.isalnum() or c in "._" else "_" for c in word) for word in words if word)


# ---------------------------------------------------------------------------------------------------- evaluations


@dataclass(frozen=True)
class Evaluation:
    """What a recipe that evaluates an encoder works with."""

    source: str
    data: Data
    training: Training
    accelerator: Accelerator
    run: Run
    console: Console


def evaluate(recipe: str, title: str, config: Config, evaluation: Callable[[Evaluation], list[Row]]) -> list[Row]:
    """Open what a configuration names, run the evaluation, write results.json and show it; returns the rows."""
    training = call("train", Training, config["train"])
    source = config["from"]
    description = describe(source)
    data, config["data"] = open_data(config["data"], run=source)
    config["out"] = config["out"] or default_out(recipe, Path(source).name, data.name)
    accelerator = start(training, Path(config["out"]), config)
    with open_run(accelerator, config["out"], config, training, data) as run:
        console = make_console(accelerator.is_main_process)
        banner(
            console,
            title,
            **{"from": f"{source} ({description.get('objective', '?')} on {description.get('data', '?')})"},
            data=data_line(data),
            out=run.out,
        )
        rows = evaluation(Evaluation(source, data, training, accelerator, run, console))
        for tracker in accelerator.trackers:
            tracker.finish()
        if accelerator.is_main_process:
            write_results(run.out, rows)
            console.print(results_table(rows, num_test=len(data.labels("test"))))
            console.print(f"written to {run.out / 'results.json'}")
    return rows


# ---------------------------------------------------------------------------------------------------- training


def train(
    objective: nn.Module,
    images: Images,
    *,
    training: Training,
    steps: int,
    batch_size: int,
    optim: Config,
    schedule: Config,
    accelerator: Accelerator,
    run: Run | None = None,
    display: Display | None = None,
    extra: Config | None = None,
) -> None:
    """Train an objective by the configuration; `extra` joins every row of metrics."""
    world = accelerator.num_processes
    plan = Plan(
        len(images),
        batch_size,
        seed=training.seed,
        rank=accelerator.process_index,
        world=world,
        accumulation=split_batch(training, batch_size, world),
    )
    on_cpu = accelerator.device.type == "cpu"
    workers = default_workers(on_cpu=on_cpu) if training.workers is None else training.workers
    optimizer = call("optim", make_optimizer, optim, objective)
    rate = call("schedule", make_rate, schedule, base=optim["lr"], steps=steps)
    fit(
        objective,
        Loader(images, plan, workers=workers, pin=accelerator.device.type == "cuda"),
        optimizer,
        steps=steps,
        rate=rate,
        accelerator=accelerator,
        seed=training.seed,
        clip=training.clip,
        ema=training.ema,
        log_every=training.log_every,
        save_every=training.save_every,
        spike=training.spike,
        max_rollbacks=training.max_rollbacks,
        max_bad=training.max_bad,
        trace=training.trace,
        run=run,
        report=display.report if display is not None else None,
        say=display.warn if display is not None else warn,
        extra=extra,
    )


def make_optimizer(
    objective: nn.Module, *, opt: str, lr: float, weight_decay: float = 0.0, betas: tuple[float, float] | None = None
) -> torch.optim.Optimizer:
    """timm's `create_optimizer_v2`: biases, norms, positions and tokens do not decay. `momentum` is plain SGD with
    momentum 0.9, as in the paper (timm's `sgd` is Nesterov's)."""
    if opt.startswith("lookahead"):
        raise UserError(f"optim.opt={opt}: lookahead keeps an optimizer of its own, which checkpoints cannot hold")
    also = {} if betas is None else {"betas": tuple(betas)}
    try:
        return create_optimizer_v2(objective, opt=opt, lr=lr, weight_decay=weight_decay, **also)
    except (ValueError, TypeError) as error:
        raise UserError(f"optim.opt={opt}: {error}") from error


def make_rate(
    *, base: float, steps: int, warmup_steps: int | None = None, decay: str = "cosine", end: float = 0.0
) -> Callable[[int], float]:
    """The learning rate as a function of the step (`mpp.train.learning_rate`), checked before the first one."""

    def rate(step: int) -> float:
        return learning_rate(step, base=base, steps=steps, warmup_steps=warmup_steps, decay=decay, end=end)

    rate(0)
    rate(steps)
    return rate


def seed_weights(seed: int, purpose: str = "init") -> None:
    """Seed what the initial weights are drawn from. They are drawn on the CPU, so every process has the same."""
    torch.manual_seed(fold(seed, purpose) & (2**63 - 1))


def describe_encoder(encoder: Encoder) -> str:
    """One line for the banner."""
    millions = sum(p.numel() for p in encoder.parameters()) / 1e6
    (height, width), (tall, wide) = encoder.size, encoder.patch
    return (
        f"{encoder.name}, {millions:.2f} M parameters, {height} x {width} px, "
        f"{encoder.num_patches} patches of {tall} x {wide}"
    )
