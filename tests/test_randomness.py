"""Stateless randomness: published and pinned values, a numpy reference, bijections, and the usual statistics."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mpp.randomness import Permutation, bits, fold, fold_each, integers, mix, purpose_key, uniform

GOLDEN = 0x9E3779B97F4A7C15
# The outputs of SplitMix64 seeded with 1234567, as published with its reference implementation.
PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
INT64 = st.integers(-(2**63), 2**63 - 1)


def signed(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array([value % 2**64 for value in values], dtype=np.uint64).view(np.int64))


def reference_mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser in numpy's uint64, from the paper."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def reference_bits(key: int, purpose: str, count: int) -> np.ndarray:
    start = reference_mix(np.array([(key ^ purpose_key(purpose)) % 2**64], dtype=np.uint64))
    return reference_mix(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN))


def test_mix_reproduces_the_published_splitmix64_sequence():
    states = signed([1234567 + (i + 1) * GOLDEN for i in range(5)])
    assert mix(states).numpy().view(np.uint64).tolist() == PUBLISHED


@given(st.lists(INT64, min_size=1, max_size=50))
def test_mix_equals_numpy_uint64(values: list[int]):
    x = torch.tensor(values)
    assert np.array_equal(mix(x).numpy().view(np.uint64), reference_mix(x.numpy().view(np.uint64)))


@given(INT64, st.sampled_from(["mask", "kind", "donor", "crop"]), st.integers(1, 70))
def test_bits_equal_the_reference(key: int, purpose: str, count: int):
    got = bits(torch.tensor([key]), purpose, count)[0].numpy().view(np.uint64)
    want = reference_bits(key, purpose, count)
    assert np.array_equal(got, want)
    assert np.array_equal(
        uniform(torch.tensor([key]), purpose, count)[0].double().numpy(), (want >> np.uint64(40)) / 2**24
    )


def test_golden_values():
    """Pinned: a change of any of these changes every run that was ever made."""
    assert purpose_key("mask") == 7463349060561501561
    assert fold(0, "order", 1) == 8738808791662154773
    assert fold(-1, 2**70) == 6755974106381971767
    assert bits(torch.tensor([1, -1]), "mask", 2).tolist() == [
        [1991255944268031897, -3256630704199822342],
        [7363239024818501843, 1515198651373762808],
    ]
    assert uniform(torch.tensor([7]), "kind", 3)[0].tolist() == [
        0.656039834022522,
        0.7683168053627014,
        0.19143688678741455,
    ]
    assert integers(torch.tensor([7]), "donor", 5, 196)[0].tolist() == [184, 24, 89, 57, 47]
    assert Permutation(10, fold(3, "order", 0))(torch.arange(10)).tolist() == [7, 1, 5, 8, 0, 4, 6, 3, 2, 9]


def test_fold_depends_on_the_order_and_on_every_part():
    keys = [
        fold(),
        fold(0),
        fold(0, 0),
        fold(1, 2),
        fold(2, 1),
        fold("a", 1),
        fold(1, "a"),
        fold("1"),
        fold(1),
        fold(-1),
    ]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)


@given(st.lists(st.one_of(INT64, st.text(max_size=5)), max_size=3), st.lists(INT64, min_size=1, max_size=5))
def test_fold_each_is_fold_of_each(parts: list[int | str], ids: list[int]):
    assert fold_each(fold(*parts), torch.tensor(ids)).tolist() == [fold(*parts, i) for i in ids]


def test_sample_keys_do_not_collide():
    ids = torch.arange(500)
    keys = torch.cat([fold_each(fold(seed, "sample", epoch), ids) for seed in range(20) for epoch in range(20)])
    assert len(keys.unique()) == 20 * 20 * 500


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 1023, 1024, 1025, 4097])
def test_permutation_is_a_bijection_at_the_edges(n: int):
    assert torch.equal(Permutation(n, fold("edge", n))(torch.arange(n)).sort().values, torch.arange(n))


@given(st.integers(1, 5000), INT64)
def test_permutation_is_a_bijection(n: int, key: int):
    out = Permutation(n, key)(torch.arange(n))
    assert torch.equal(out.sort().values, torch.arange(n))


def test_permutation_of_nothing_is_refused():
    with pytest.raises(ValueError, match="n=0"):
        Permutation(0, 1)


def test_permutation_sends_every_position_everywhere():
    """Over keys, position -> value is uniform: a chi-square test of the 12 x 12 table (11 * 11 degrees of freedom)."""
    n, num_keys = 12, 1500
    table = torch.zeros(n, n)
    for key in range(num_keys):
        table[torch.arange(n), Permutation(n, fold("table", key))(torch.arange(n))] += 1
    expected = num_keys / n
    # The margins are fixed, which makes the statistic n / (n - 1) times larger than that of a free table.
    chi2 = float(((table - expected) ** 2 / expected).sum()) * (n - 1) / n
    assert 1e-4 < stats.chi2.sf(chi2, (n - 1) ** 2) < 1 - 1e-4


def test_permutation_separates_neighbours_and_keys():
    n = 4096
    first, second = (Permutation(n, fold("order", key))(torch.arange(n)) for key in range(2))
    assert int(((first[1:] - first[:-1]).abs() == 1).sum()) < 12  # about 2 by chance
    assert int((first == second).sum()) < 10  # about 1 by chance
    rank_correlation = np.corrcoef(np.arange(n), first.numpy())[0, 1]
    assert abs(rank_correlation) < 4 / np.sqrt(n)


def test_permutation_of_a_hundred_million_is_evaluated_at_some_positions_at_once():
    n = 10**8
    began = time.perf_counter()
    positions = torch.cat([torch.arange(1000), torch.arange(n - 1000, n)])
    out = Permutation(n, 5)(positions)
    assert time.perf_counter() - began < 2  # a table of 10^8 would take longer, and 800 MB
    assert len(out.unique()) == 2000
    assert int(out.min()) >= 0
    assert n // 2 < int(out.max()) < n


def test_uniform_is_uniform():
    x = uniform(torch.arange(4000), "kind", 64)
    assert x.dtype == torch.float32
    assert float(x.min()) >= 0
    assert float(x.max()) < 1
    flat = x.double().flatten().numpy()
    assert abs(flat.mean() - 0.5) < 4 * np.sqrt(1 / 12 / flat.size)
    assert abs(flat.var() - 1 / 12) < 4 * np.sqrt(1 / 180 / flat.size)
    assert stats.kstest(flat, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("which", ["purposes", "positions", "keys"])
def test_draws_are_independent(which: str):
    """Purposes, neighbouring positions and neighbouring keys: a chi-square test of 16 x 16 joint bins."""
    keys = torch.arange(2001)
    x = uniform(keys, "mask", 65)
    pair = {
        "purposes": (x[:-1, :-1], uniform(keys, "kind", 65)[:-1, :-1]),
        "positions": (x[:-1, :-1], x[:-1, 1:]),
        "keys": (x[:-1, :-1], x[1:, :-1]),
    }[which]
    table = torch.bincount((pair[0] * 16).long().flatten() * 16 + (pair[1] * 16).long().flatten(), minlength=256)
    assert stats.chisquare(table.numpy()).pvalue > 1e-3


@given(INT64, st.integers(1, 10**6))
def test_integers_lie_in_range(key: int, high: int):
    x = integers(torch.tensor([key, key ^ 1]), "donor", 50, high)
    assert int(x.min()) >= 0
    assert int(x.max()) < high


@pytest.mark.parametrize("high", [7, 196])
def test_integers_are_uniform(high: int):
    counts = torch.bincount(integers(torch.arange(1000), "donor", 196, high).flatten(), minlength=high)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_count_extends_a_draw_without_changing_it():
    keys = torch.arange(5)
    assert torch.equal(bits(keys, "crop", 9)[:, :4], bits(keys, "crop", 4))
