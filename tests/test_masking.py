"""Masks: exact counts, uniform over positions and subsets, and gathering equal to boolean indexing."""

from math import comb

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mpp import UserError
from mpp.masking import indices, num_masked, random_mask, take
from mpp.randomness import fold, fold_each


def keys(count: int, seed: int = 0) -> torch.Tensor:
    return fold_each(fold(seed, "test"), torch.arange(count))


@pytest.mark.parametrize(
    ("n", "ratio", "count"),
    [
        (196, 0.5, 98),
        (196, 0.15, 29),
        (64, 0.5, 32),
        (5, 0.5, 3),
        (7, 0.5, 4),
        (1, 0.01, 1),
        (9, 1.0, 9),
        (10, 0.04, 1),
    ],
)
def test_num_masked(n: int, ratio: float, count: int):
    assert num_masked(n, ratio) == count


@pytest.mark.parametrize("ratio", [0, -0.1, 1.01, float("nan")])
def test_ratio_outside_of_the_unit_interval_is_refused(ratio: float):
    with pytest.raises(UserError, match=r"\(0, 1\]"):
        num_masked(196, ratio)


def test_98_of_196_in_every_image():
    masked = random_mask(keys(1000), 196, num_masked(196, 0.5))
    assert masked.dtype == torch.bool
    assert masked.shape == (1000, 196)
    assert (masked.sum(1) == 98).all()
    assert len(masked.unique(dim=0)) == 1000


@given(st.integers(1, 300), st.data())
def test_counts_are_exact_and_images_do_not_depend_on_each_other(n: int, data: st.DataObject):
    count = data.draw(st.integers(1, n))
    some = keys(5, seed=n)
    masked = random_mask(some, n, count)
    assert (masked.sum(1) == count).all()
    assert torch.equal(torch.cat([random_mask(key[None], n, count) for key in some.flip(0)]).flip(0), masked)


def test_every_position_is_masked_equally_often():
    draws, n, count = 8000, 196, 98
    often = random_mask(keys(draws), n, count).double().sum(0)
    share = count / n
    # Drawn without replacement: the statistic of n dependent counts is a chi-square with n - 1 degrees of freedom.
    chi2 = float(((often - draws * share) ** 2).sum()) / (draws * share * (1 - share)) * (n - 1) / n
    assert 1e-4 < stats.chi2.sf(chi2, n - 1) < 1 - 1e-4
    grid = often.view(14, 14)
    assert all(
        abs(float(corner) / draws - 0.5) < 0.03 for corner in (grid[0, 0], grid[0, -1], grid[-1, 0], grid[-1, -1])
    )


def test_every_subset_is_equally_likely():
    masked = random_mask(keys(6000), 6, 3)
    counts = torch.bincount((masked * 2 ** torch.arange(6)).sum(1))
    counts = counts[counts > 0]
    assert len(counts) == comb(6, 3)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


@given(st.integers(1, 60), st.data())
def test_indices_and_take_equal_boolean_indexing(n: int, data: st.DataObject):
    count = data.draw(st.integers(1, n))
    tail = data.draw(st.sampled_from([(), (3,), (2, 3)]))
    masked = random_mask(keys(4, seed=n), n, count)
    where = indices(masked, count)
    x = torch.arange(4 * n * torch.tensor(tail).prod().long().clamp(min=1)).view(4, n, *tail)
    assert torch.equal(where, masked.nonzero()[:, 1].view(4, count))
    assert torch.equal(take(x, where), x[masked].view(4, count, *tail))
