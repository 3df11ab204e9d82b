"""Linear-probe a frozen encoder, beside the same network untrained, raw-pixel k-NN and a colour histogram.

accelerate launch recipes/linear_probe.py from=runs/a data=folder data.path=DIR
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from mpp.eval.baselines import colour_histogram, nearest_neighbours, raw_pixels
from mpp.eval.features import compute, extract
from mpp.eval.linear_probe import linear_probe
from mpp.eval.results import Row, make_row, write_results
from mpp.eval.subsets import draw_labels
from mpp.recipes import common
from mpp.recipes.common import Config, call
from mpp.recipes.display import banner, make_console, results_table
from torch import nn

from mpp.data.loader import Images, default_workers
from mpp.data.sources import Data
from mpp.encoder import Encoder
from mpp.train import Run
from mpp.weights import build_encoder, describe, load_encoder


def recipe(config: Config) -> list[Row]:
    """Run the recipe; returns the rows of results.json."""
    training = call("train", common.Training, config["train"])
    source = config["from"]
    description = describe(source)
    data, config["data"] = common.open_data(config["data"], run=source)
    config["out"] = config["out"] or common.default_out("linear_probe", Path(source).name, data.name)
    accelerator = common.start(training)
    run = Run(config["out"], config, main=accelerator.is_main_process)
    console = make_console(accelerator.is_main_process)
    banner(
        console,
        "Linear probe",
        **{"from": f"{source} ({description.get('objective', '?')} on {description.get('data', '?')})"},
        data=common.data_line(data),
        out=run.out,
    )
    rows = call(
        "probe",
        probe,
        config["probe"],
        source,
        data,
        accelerator=accelerator,
        seed=training.seed,
        workers=training.workers,
        say=console.print,
    )
    if accelerator.is_main_process:
        write_results(run.out, rows)
        console.print(results_table(rows, num_test=len(data.labels("test"))))
        console.print(f"written to {run.out / 'results.json'}")
    return rows


def probe(
    source: str | Path,
    data: Data,
    *,
    accelerator: Accelerator,
    labels: list[int | None],
    seeds: int = 3,
    pool: str | None = None,
    size: int | list[int] | None = None,
    controls: bool = True,
    batch_size: int = 256,
    seed: int = 0,
    workers: int | None = None,
    say: Callable[[str], Any] | None = None,
) -> list[Row]:
    """Rows of the linear probe and its controls.

    The encoder runs once over the training and the test images, without augmentation; all numbers of labels and all
    seeds use the cached features. A seed draws the labelled images and the held-out fifth of them on which the
    regularisation is chosen, and the initial weights of the untrained control.

    Args:
        source: run folder or exported encoder.
        data: with labels and a test split.
        accelerator: processes share the feature pass.
        labels: labelled images a class, None for all; one row each.
        seeds: draws, from `seed` on.
        pool: "cls" or "mean"; None: `common.pool_of`.
        size: image size, None for the encoder's own.
        controls: also the same network untrained, raw-pixel k-NN and a colour histogram with logistic regression.
        batch_size, workers: of the feature pass.
        say: prints a line about what is being done.

    Raises:
        UserError: no labels or no test split, or fewer labelled images than asked for.
    """
    say = say or (lambda _: None)
    train_labels, test_labels = data.labels("train"), data.labels("test")
    for per_class in labels:
        draw_labels(train_labels, per_class, seed)  # fails before the work, not after
    pool = common.pool_of(source, pool)
    encoder = load_encoder(source, size=common.pair(size))
    common.check_channels(encoder, data)
    if workers is None:
        workers = default_workers(on_cpu=accelerator.device.type == "cpu")
    transform = data.transform(encoder.size).evaluation()
    splits = [Images(part, transform, channels=encoder.channels) for part in (data.train, data.test)]
    how = {"accelerator": accelerator, "batch_size": batch_size, "workers": workers}

    def features(network: Encoder) -> tuple[np.ndarray, np.ndarray]:
        train, test = (extract(network, part, pool=pool, **how).numpy() for part in splits)
        return train, test

    def plain(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
        train, test = (compute(function, nn.Identity(), part, **how).numpy() for part in splits)
        return train, test

    say(f"features: {pool} of {encoder.name}, {len(train_labels):,} + {len(test_labels):,} images")
    init = common.init_name(source)
    sets: list[tuple[str, str, Callable[[int], tuple[np.ndarray, np.ndarray]], Callable[..., dict[str, float]]]] = []
    cached = features(encoder)
    sets.append(("linear_probe", init, lambda _: cached, linear_probe))
    if controls:
        untrained = []
        for s in range(seed, seed + seeds):
            common.seed_weights(s, "untrained")
            network = build_encoder(source, size=encoder.size)
            untrained.append(features(network))
        pixels, histogram = plain(raw_pixels), plain(colour_histogram)
        sets.append(("linear_probe", "untrained", lambda s: untrained[s - seed], linear_probe))
        sets.append(("baseline", "raw_knn", lambda _: pixels, nearest_neighbours))
        sets.append(("baseline", "histogram", lambda _: histogram, linear_probe))

    rows: list[Row] = []
    for per_class in labels:
        for protocol, name, feature, classify in sets:
            values, choices = [], []
            for s in range(seed, seed + seeds):
                train, test = feature(s)
                drawn = draw_labels(train_labels, per_class, s)
                result = classify(train[drawn], train_labels[drawn], test, test_labels, seed=s)
                values.append(result.pop("accuracy"))
                (what, value), *_ = result.items()
                choices.append(f"{value:g}")
            chosen = f"{what} {', '.join(dict.fromkeys(choices))}"
            rows.append(make_row(protocol, name, values, labels=per_class, chosen=chosen))
            say(f"{protocol}, {name}, {common.labels_words(per_class)}: {rows[-1]['mean']:.3f}")
    return rows


if __name__ == "__main__":
    common.main("linear_probe", recipe)
