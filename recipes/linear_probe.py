"""Linear-probe a frozen encoder, beside the same network untrained, raw-pixel k-NN and a colour histogram.

accelerate launch recipes/linear_probe.py from=runs/a data=folder data.path=DIR
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch import Tensor, nn

from mpp.data.loader import Images, default_workers
from mpp.data.sources import Data
from mpp.encoder import Encoder
from mpp.eval.baselines import colour_histogram, nearest_neighbours, raw_pixels
from mpp.eval.features import compute
from mpp.eval.linear_probe import linear_probe
from mpp.eval.results import Row, make_row
from mpp.eval.subsets import draw_labels
from mpp.objectives.mpp import to_pixels
from mpp.recipes import common
from mpp.recipes.configuration import Config, call, main
from mpp.weights import build_encoder, load_encoder

Function = Callable[[Tensor], Tensor]
Features = tuple[Callable[[np.ndarray], np.ndarray], np.ndarray]  # of drawn training images, and of all test images
Classifier = Callable[..., dict[str, float]]


def recipe(config: Config) -> list[Row]:
    """Run the recipe; returns the rows of results.json."""

    def run_it(job: common.Evaluation) -> list[Row]:
        return call(
            "probe",
            probe,
            config["probe"],
            job.source,
            job.data,
            accelerator=job.accelerator,
            seed=job.training.seed,
            workers=job.training.workers,
            say=job.console.print,
        )

    return common.evaluate("linear_probe", "Linear probe", config, run_it)


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

    The encoder runs once over the images that are needed, without augmentation; all numbers of labels and all seeds use
    the cached features. A seed draws the labelled images and the held-out fifth of them on which the
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
    common.check_counts("probe", seeds=[seeds], labels=labels, batch_size=[batch_size])
    train_labels, test_labels = data.labels("train"), data.labels("test")
    range_of_seeds = range(seed, seed + seeds)
    draws = {(per_class, s): draw_labels(train_labels, per_class, s) for per_class in labels for s in range_of_seeds}
    pool = common.pool_of(source, pool)
    encoder = load_encoder(source, size=common.pair(size))
    common.check_channels(encoder, data)
    transform = data.transform(encoder.size).evaluation()
    how = {
        "accelerator": accelerator,
        "batch_size": batch_size,
        "workers": default_workers(on_cpu=accelerator.device.type == "cpu") if workers is None else workers,
    }

    def cache(function: Function, module: nn.Module, of_seeds: Iterable[int]) -> Features:
        """One pass over the test images and over all training images that some draw of these seeds holds."""
        used = np.unique(np.concatenate([draws[per_class, s] for per_class in labels for s in of_seeds]))
        train = data.train if len(used) == len(train_labels) else data.train.select(used)
        parts = (Images(part, transform, channels=encoder.channels) for part in (train, data.test))
        train_features, test_features = (compute(function, module, part, **how).numpy() for part in parts)
        return lambda drawn: train_features[np.searchsorted(used, drawn)], test_features

    def frozen(network: Encoder, of_seeds: Iterable[int]) -> Features:
        return cache(lambda images: network(to_pixels(images)).pool(pool), network, of_seeds)

    def untrained(s: int) -> Features:
        common.seed_weights(s, "untrained")
        return frozen(build_encoder(source, size=encoder.size), [s])

    say(f"features: {pool} of {encoder.name}, {len(test_labels):,} test images")
    cached = frozen(encoder, range_of_seeds)
    kinds: list[tuple[str, str, Classifier, list[Features]]] = [
        ("linear_probe", common.init_name(source), linear_probe, [cached] * seeds)
    ]
    if controls:
        pixels = cache(raw_pixels, nn.Identity(), range_of_seeds)
        histogram = cache(colour_histogram, nn.Identity(), range_of_seeds)
        kinds += [
            ("linear_probe", "untrained", linear_probe, [untrained(s) for s in range_of_seeds]),
            ("baseline", "raw_knn", nearest_neighbours, [pixels] * seeds),
            ("baseline", "histogram", linear_probe, [histogram] * seeds),
        ]

    rows: list[Row] = []
    for per_class in labels:
        for protocol, name, classify, features in kinds:
            results = []
            for s, (train_features, test_features) in zip(range_of_seeds, features, strict=True):
                drawn = draws[per_class, s]
                results.append(classify(train_features(drawn), train_labels[drawn], test_features, test_labels, seed=s))
            what = next(key for key in results[0] if key != "accuracy")
            chosen = f"{what} {', '.join(dict.fromkeys(f'{result[what]:g}' for result in results))}"
            values = [result["accuracy"] for result in results]
            rows.append(make_row(protocol, name, values, labels=per_class, chosen=chosen))
            say(f"{protocol}, {name}, {common.labels_words(per_class)}: {rows[-1]['mean']:.3f}")
    return rows


if __name__ == "__main__":
    main("linear_probe", recipe)
