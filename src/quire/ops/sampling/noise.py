"""The noise of sampling: a pure function of (seed, position, token id).

It is made in 32-bit integer arithmetic. There is no generator and no state: a token's noise is the
same alone and in a batch, after preemption and after a restart, and whichever other tokens are
looked at. Every provider must give these bits; test vectors are in tests/sampling.

All arithmetic is modulo 2**32, `>>` is logical:

    mix(x):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
    low, high = the halves of the 64-bit seed
    a = mix(mix(mix(position + 0x9e3779b9) ^ low) ^ high)
    b = mix(mix(mix(position + 0x85ebca6b) ^ high) ^ low) | 1
    bits(token) = ((y ^ (y >> 15)) * b) & 0x7fffffff   with y = (mix(token) ^ a) * 0x7feb352d

`mix` is the finaliser "lowbias32" of C. Wellons' hash-prospector. From the bits follows the token's
waiting time, which is exponentially distributed with mean 1: with v = (bits + 0.5) / 2**31 in fp32,
at most 1 - 2**-24, it is -log1p(-v). Small times decide a race, and this form keeps their relative
precision.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B
_POSITION_A = 0x9E3779B9
_POSITION_B = 0x85EBCA6B
_LARGEST = 1.0 - 2.0**-24

Uint32 = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]


def token_hashes(vocab_size: int, device: torch.device | None = None) -> Tensor:
    """mix(token) of every token id -> [V] int32; made once, because it depends on nothing else."""
    hashes = _mix(np.arange(vocab_size, dtype=np.uint32))
    return torch.from_numpy(hashes.view(np.int32)).to(device or "cpu")


def noise_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The two key words (a, b) of each row -> [R, 2] int32.

    seeds [R] uint64; positions [R]: the indices, in prompt and output, of the tokens to draw.
    """
    seeds = np.asarray(seeds, dtype=np.uint64)
    low = seeds.astype(np.uint32)
    high = (seeds >> np.uint64(32)).astype(np.uint32)
    position = np.asarray(positions).astype(np.uint32)
    a = _mix(_mix(_mix(position + np.uint32(_POSITION_A)) ^ low) ^ high)
    # odd: a product with it loses no bit
    b = _mix(_mix(_mix(position + np.uint32(_POSITION_B)) ^ high) ^ low) | np.uint32(1)
    return np.stack([a, b], axis=1).view(np.int32)


def noise_bits(hashes: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """31 noise bits per token, given hashes [n] int32 and key words -> the broadcast shape, int32.

    a, b int32: [1] of one row, or [R, 1] of many.
    """
    x = torch.bitwise_xor(hashes, a).mul_(_FIRST)
    # torch's shift copies the sign, and the noise is defined on unsigned numbers
    x.bitwise_xor_(torch.bitwise_right_shift(x, 15).bitwise_and_(0x1FFFF))
    return x.mul_(b).bitwise_and_(0x7FFFFFFF)


def negative_waiting_times(bits: Tensor) -> Tensor:
    """log1p(-v) of noise bits [n] -> [n] fp32 in [-16.64, -2**-32]."""
    v = bits.to(torch.float32).add_(0.5).mul_(-(2.0**-31))
    # the largest bits are rounded to 1 in float32, of which the logarithm would be infinite
    return v.clamp_min_(-_LARGEST).log1p_()


def _mix(x: Uint32) -> Uint32:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(_FIRST)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(_SECOND)
    return x ^ (x >> np.uint32(16))
