"""Two controls that need no network, so that nobody is fooled: k-NN on raw pixels, and colour histograms."""

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from sklearn.neighbors import NearestNeighbors
from threadpoolctl import threadpool_limits
from torch import Tensor

from mpp.eval.linear_probe import threads_for
from mpp.eval.subsets import hold_out
from mpp.targets import MeanColour

NEIGHBOURS = (1, 3, 5, 10, 20)
LARGEST_SIDE = 32


def raw_pixels(images: Tensor) -> Tensor:
    """uint8 (B, C, H, W) -> float32 (B, C h w): the pixels themselves, area-averaged where a side exceeds 32."""
    pixels = images.float() / 255
    height, width = pixels.shape[-2:]
    if max(height, width) > LARGEST_SIDE:
        scale = LARGEST_SIDE / max(height, width)
        pixels = F.interpolate(pixels, size=(max(1, round(height * scale)), max(1, round(width * scale))), mode="area")
    return pixels.flatten(1)


def colour_histogram(images: Tensor, *, bits: int = 3) -> Tensor:
    """uint8 (B, C, H, W) -> float32 (B, bins): the share of pixels of each colour, quantised like the labels of masked
    patch prediction but pixel by pixel: 512 joint bins for RGB. It knows all colours and no shapes."""
    target = MeanColour(images.shape[1], bits=bits)
    labels = target.labels(images, (1, 1))  # (B, H W) if joint, else (B, H W, C)
    columns = labels[:, None] if target.joint else rearrange(labels, "b n c -> b c n")
    counts = torch.zeros(*columns.shape[:2], target.size // columns.shape[1], device=images.device)
    counts.scatter_add_(2, columns, torch.ones_like(columns, dtype=counts.dtype))
    return rearrange(counts / columns.shape[2], "b c k -> b (c k)")


def nearest_neighbours(
    train: np.ndarray,
    train_labels: np.ndarray,
    test: np.ndarray,
    test_labels: np.ndarray,
    *,
    seed: int = 0,
    neighbours: tuple[int, ...] = NEIGHBOURS,
    held_out: float = 0.2,
) -> dict[str, float]:
    """k-NN, Euclidean; k is chosen on a held-out fifth of the training images.

    Returns:
        "accuracy" on the test images and the chosen "k".
    """
    fitted, held = hold_out(train_labels, held_out, seed)
    k = 1  # where a single label a class leaves nothing to choose on
    if len(held):
        usable = [k for k in neighbours if k <= len(fitted)] or [1]
        votes = _neighbours(train[fitted], train_labels[fitted], train[held], max(usable))
        scores = [float((_majority(votes[:, :k]) == train_labels[held]).mean()) for k in usable]
        k = usable[int(np.argmax(scores))]
    predicted = _majority(_neighbours(train, train_labels, test, k))
    return {"accuracy": float((predicted == test_labels).mean()), "k": k}


def _neighbours(train: np.ndarray, labels: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    """Labels of the k nearest training images of each query, nearest first: int (m, k)."""
    with threadpool_limits(limits=threads_for(train)):
        index = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(train).kneighbors(queries, return_distance=False)
    return labels[index]


def _majority(votes: np.ndarray) -> np.ndarray:
    """The commonest label of each row, the smaller one at a tie (as in scikit-learn): int (m, k) -> (m,)."""
    counts = np.zeros((len(votes), votes.max() + 1), dtype=np.int64)
    np.add.at(counts, (np.arange(len(votes))[:, None], votes), 1)
    return counts.argmax(1)
