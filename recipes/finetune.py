"""Fine-tune an encoder with labels, all or few of them, beside the same network from scratch if asked.

accelerate launch recipes/finetune.py from=runs/a data=folder data.path=DIR train.epochs=30
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from mpp.data.loader import Images, default_workers
from mpp.data.sources import Data
from mpp.errors import UserError
from mpp.eval.features import compute
from mpp.eval.results import Row, make_row
from mpp.eval.subsets import draw_labels, shuffled
from mpp.objectives.supervised import Supervised
from mpp.recipes import common
from mpp.recipes.common import Training
from mpp.recipes.configuration import Config, call, main
from mpp.recipes.display import Display
from mpp.train import Run
from mpp.weights import EXPORT, build_encoder, export_encoder, load_encoder


def recipe(config: Config) -> list[Row]:
    """Run the recipe; returns the rows of results.json."""

    def run_it(job: common.Evaluation) -> list[Row]:
        return call(
            "finetune",
            finetune,
            config["finetune"],
            job.source,
            job.data,
            training=job.training,
            optim=config["optim"],
            schedule=config["schedule"],
            accelerator=job.accelerator,
            run=job.run,
            show=True,
        )

    return common.evaluate("finetune", "Fine-tuning", config, run_it)


def finetune(
    source: str | Path,
    data: Data,
    *,
    training: Training,
    optim: Config,
    schedule: Config,
    accelerator: Accelerator,
    labels: list[int | None],
    seeds: int = 1,
    rates: list[float] | None = None,
    held_out: int = 25,
    controls: bool = False,
    pool: str | None = None,
    size: int | list[int] | None = None,
    run: Run | None = None,
    show: bool = False,
) -> list[Row]:
    """Rows of fine-tuning and, as its control, training from scratch.

    Everything is trained: the encoder and a zero-initialised linear layer on its pooled output (paper, section 3.2).
    Both arms have the same steps, data, augmentation and candidates of the learning rate, and each takes the rate that
    is best for it on held-out training images, chosen with the first seed. Test images are used once, at the end.

    Args:
        source: run folder or exported encoder.
        data: with labels and a test split.
        training: length, batch, precision; its seed is the first of the seeds.
        optim, schedule: configuration groups.
        accelerator: devices and processes.
        labels: labelled images a class, None for all; one row for each.
        seeds: draws of labelled images, data order and, from scratch, initial weights.
        rates: candidates of the learning rate; None: `optim.lr`, no choice.
        held_out: images a class, not among the labelled, on which the rate is chosen.
        controls: also train from scratch.
        pool: "cls" or "mean"; None: `common.pool_of`.
        size: image size, None for the encoder's own.
        run: where to keep metrics, checkpoints and the encoder if there is one single training; several, of some
            number of labels, seeds, rates or arms, leave their results alone.
        show: whether to show progress.

    Raises:
        UserError: no labels or no test split, or fewer labelled images than asked for.
    """
    common.check_counts("finetune", seeds=[seeds], labels=labels, held_out=[held_out], rates=rates or [1])
    train_labels = data.labels("train")
    data.labels("test")
    pool = common.pool_of(source, pool)
    candidates = rates or [optim["lr"]]
    choose = len(candidates) > 1
    arms = [common.init_name(source)] + ["scratch"] * controls
    single = len(arms) * len(labels) * seeds * len(candidates) == 1

    held = held_out_part(train_labels, held_out if choose else 0, training.seed)
    free = np.setdiff1d(np.arange(len(train_labels)), held)
    draws = {
        (per_class, seed): free[draw_labels(train_labels[free], per_class, seed)]
        for per_class in labels
        for seed in range(training.seed, training.seed + seeds)
    }

    def train_one(arm: str, per_class: int | None, seed: int, lr: float, display: Display) -> Supervised:
        """One training, on the labelled images and with the data order of a seed."""
        common.seed_weights(seed, "scratch")
        make = build_encoder if arm == "scratch" else load_encoder
        encoder = make(source, size=common.pair(size))
        common.check_channels(encoder, data)
        objective = Supervised(encoder, len(data.classes or ()), pool=pool, head="linear")
        drawn = draws[per_class, seed]
        source_rows = data.train if len(drawn) == len(data.train) else data.train.select(drawn)
        steps, batch_size = common.settle(training, len(drawn), is_small=common.small(data))
        if per_class is not None:  # few images: as many of them in a batch as there are
            pieces = 2 * accelerator.num_processes * (training.accumulation or 1)
            batch_size = min(batch_size, max(pieces, len(drawn) // pieces * pieces))
        common.train(
            objective,
            Images(source_rows, data.transform(encoder.size), channels=encoder.channels, seed=seed),
            training=replace(training, seed=seed),
            steps=steps,
            batch_size=batch_size,
            optim={**optim, "lr": lr},
            schedule=schedule,
            accelerator=accelerator,
            run=run if single else None,
            display=display if single else None,
        )
        return objective

    def accuracy(objective: Supervised, part: Any, index: np.ndarray | None = None) -> float:
        part = part if index is None else part.select(index)
        transform = data.transform(objective.encoder.size).evaluation()
        on_cpu = accelerator.device.type == "cpu"
        logits = compute(
            objective.logits,
            objective,
            Images(part, transform, channels=objective.encoder.channels),
            accelerator=accelerator,
            workers=default_workers(on_cpu=on_cpu) if training.workers is None else training.workers,
        )
        return float((logits.argmax(1).numpy() == np.asarray(part["label"])).mean())

    rows: list[Row] = []
    # One training is shown step by step, several one by one.
    total = len(arms) * len(labels) * (len(candidates) - 1 + seeds)
    if single:
        total = common.settle(training, len(free), is_small=common.small(data))[0]
    with Display("fine-tuning", total, main=accelerator.is_main_process and show) as display:
        for per_class in labels:
            for arm in arms:
                words = f"{arm}, {common.labels_words(per_class)}"
                best: tuple[float, float, Supervised] | None = None
                for lr in candidates:
                    objective = train_one(arm, per_class, training.seed, lr, display)
                    score = accuracy(objective, data.train, held) if choose else 0.0
                    if best is None or score > best[0]:
                        best = score, lr, objective
                    if not single:
                        chosen_on = f", {score:.3f} on held-out training images" if choose else ""
                        display.advance(f"{words}, learning rate {lr:g}{chosen_on}")
                assert best is not None
                _, lr, objective = best
                values = [accuracy(objective, data.test)]
                for seed in range(training.seed + 1, training.seed + seeds):
                    values.append(accuracy(train_one(arm, per_class, seed, lr, display), data.test))
                    display.advance(f"{words}, seed {seed}: {values[-1]:.3f}")
                rows.append(
                    make_row(
                        "finetune", arm, values, labels=per_class, chosen=f"learning rate {lr:g}" if choose else ""
                    )
                )
                if single and run is not None and accelerator.is_main_process:
                    export_encoder(
                        objective.encoder, run.out / EXPORT, objective="supervised", data=data.name, pool=pool
                    )
    return rows


def held_out_part(labels: np.ndarray, per_class: int, seed: int) -> np.ndarray:
    """Indices of `per_class` training images of each class that are kept for choosing the learning rate.

    Raises:
        UserError: a class would be left without training images.
    """
    if per_class == 0:
        return np.array([], dtype=np.int64)
    classes = shuffled(labels, seed, "held out")
    if (fewest := min(map(len, classes))) <= per_class:
        raise UserError(
            f"finetune.held_out={per_class} images a class leave none to train on of the smallest class, "
            f"which has {fewest}"
        )
    return np.sort(np.concatenate([members[:per_class] for members in classes]))


if __name__ == "__main__":
    main("finetune", recipe)
