"""Randomness as a pure function: every draw is a hash of what it is for, never the state of a generator.

A *key* is a 64-bit integer. ``fold(seed, epoch, sample)`` gives the key of one sample in one epoch, and
``bits(key, purpose, count)`` gives that sample's numbers for one purpose. Nothing is consumed, so the order of calls,
the number of processes or workers and an interruption cannot change a draw, and resuming needs no saved state.

The hash is the finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"),
an integer bijection that passes the usual statistical batteries. It is computed on int64 tensors, whose arithmetic
wraps, so CPU and accelerators give the same bits; the tests pin golden values and compare with numpy's uint64.
"""

import hashlib

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int64 with the same 64 bits as the unsigned `value`."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_MUL1, _MUL2, _STEP = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB), _signed(_GOLDEN)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's `>>` on int64 copies the sign bit."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of the 64-bit integers, elementwise on int64."""
    x = (x ^ _shift(x, 30)) * _MUL1
    x = (x ^ _shift(x, 27)) * _MUL2
    return x ^ _shift(x, 31)


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@torch.compiler.assume_constant_result
def purpose_key(purpose: str) -> int:
    """A stable 64-bit number for the name of a purpose (blake2b), as a signed int64."""
    return _signed(int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little"))


def fold(*parts: int | str) -> int:
    """One signed 64-bit key from integers and purpose names, for example ``fold(seed, "order", epoch)``.

    The order of the parts matters; every part is mixed before the next is added.
    """
    key = 0
    for part in parts:
        number = purpose_key(part) if isinstance(part, str) else part
        key = _mix_int((key + _GOLDEN + (number & _MASK)) & _MASK)
    return _signed(key)


def fold_each(key: int, ids: Tensor) -> Tensor:
    """`fold(..., id)` for every id at once: int64 (B,) -> int64 (B,), where `key = fold(...)`."""
    return mix(ids + _signed(key + _GOLDEN))


def bits(keys: Tensor, purpose: str, count: int) -> Tensor:
    """64 random bits for each of `count` positions of each key: int64 (B,) -> int64 (B, count)."""
    start = mix(keys ^ purpose_key(purpose))
    counter = torch.arange(1, count + 1, device=keys.device, dtype=torch.int64)
    return mix(start[:, None] + counter * _STEP)


def uniform(keys: Tensor, purpose: str, count: int) -> Tensor:
    """Uniform numbers in [0, 1): int64 (B,) -> float32 (B, count), multiples of 2^-24."""
    return _shift(bits(keys, purpose, count), 40).to(torch.float32) * 2.0**-24


def integers(keys: Tensor, purpose: str, count: int, high: int) -> Tensor:
    """Uniform integers in [0, high): int64 (B,) -> int64 (B, count). The bias is below high / 2^63."""
    return _shift(bits(keys, purpose, count), 1) % high


class Permutation:
    """A keyed permutation of range(n) that is evaluated position by position, with nothing held in memory.

    A Feistel network of six rounds permutes the smallest power of four that holds n; positions that fall outside of
    range(n) walk along their cycle until they are inside (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains", section 3: cycle walking). On average fewer than four walks are needed.
    """

    def __init__(self, n: int, key: int, *, rounds: int = 6) -> None:
        if n < 1:
            raise ValueError(f"a permutation needs at least one element, got n={n}")
        self.n = n
        self._half = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
        self._keys = [fold(key, "feistel", r) for r in range(rounds)]

    def _encrypt(self, x: Tensor) -> Tensor:
        low = (1 << self._half) - 1
        left, right = x >> self._half, x & low
        for key in self._keys:
            left, right = right, left ^ (mix(right + key) & low)
        return (left << self._half) | right

    def __call__(self, positions: Tensor) -> Tensor:
        """The element at each position: int64 in [0, n) -> int64 in [0, n), elementwise."""
        out = self._encrypt(positions)
        while bool((outside := out >= self.n).any()):
            out = torch.where(outside, self._encrypt(out), out)
        return out
