"""Which labelled images an evaluation may use: class-balanced draws and held-out parts, functions of the seed."""

import numpy as np
import torch

from mpp.errors import UserError
from mpp.randomness import fold, fold_each


def shuffled(labels: np.ndarray, seed: int, purpose: str) -> list[np.ndarray]:
    """For each class, the indices of its images in an order drawn from the seed."""
    order = fold_each(fold(seed, purpose), torch.arange(len(labels))).argsort(stable=True).numpy()
    return [order[labels[order] == label] for label in np.unique(labels)]


def draw_labels(labels: np.ndarray, per_class: int | None, seed: int) -> np.ndarray:
    """Indices of `per_class` images of each class (None: all images), in increasing order.

    Raises:
        UserError: a class has fewer.
    """
    if per_class is None:
        return np.arange(len(labels))
    classes = shuffled(labels, seed, "labels")
    if (fewest := min(map(len, classes))) < per_class:
        raise UserError(f"labels={per_class} a class, but the smallest class has {fewest} training images")
    return np.sort(np.concatenate([members[:per_class] for members in classes]))


def hold_out(labels: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split indices into the part to fit and the part to choose on: `share` of each class, at least one image of any
    class that has two; a class of one image is only fitted."""
    fitted, held = [], []
    for members in shuffled(labels, seed, "hold out"):
        count = min(len(members) - 1, max(1, round(share * len(members))))
        held.append(members[:count])
        fitted.append(members[count:])
    return np.sort(np.concatenate(fitted)), np.sort(np.concatenate(held))
