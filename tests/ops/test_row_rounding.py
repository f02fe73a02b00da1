"""Activations as a checkpoint's format rounds them: the nearest numbers of a type."""

import pytest
import torch

from quire.ops.formats.row_rounding import RowRounding

SMALL_FLOATS = sorted(
    {0.0}
    | {n * 2.0**-9 for n in range(1, 8)}
    | {(8 + n) * 2.0 ** (e - 10) for e in range(1, 16) for n in range(8) if (e, n) != (15, 7)}
)
"""The numbers of e4m3 that are not negative."""


def nearest(values, numbers):
    """The nearest of `numbers`, of two the one at an even place."""
    distance = (values.abs().double().unsqueeze(-1) - torch.tensor(numbers).double()).abs()
    least = distance == distance.amin(-1, keepdim=True)
    even = torch.arange(len(numbers)) % 2 == 0
    best = torch.where(least, 1 + even.double(), 0.0).argmax(-1)
    return torch.tensor(numbers)[best] * values.sign()


@pytest.mark.parametrize(
    ("to", "numbers", "step"),
    [("e4m3", SMALL_FLOATS, 2.0**-11), ("int8", list(range(128)), 2.0**-2)],
)
def test_numbers_are_the_nearest_ones(to, numbers, step):
    x = torch.arange(-(2**11), 2**11).float() * step
    ties = torch.tensor([(a + b) / 2 for a, b in zip(numbers, numbers[1:], strict=False)])
    x = torch.cat((x, ties, -ties, torch.tensor([1e6, -1e6]))).unsqueeze(0)
    found = RowRounding(to, scale=1.0).rounded(x)
    assert torch.equal(found, nearest(x, [float(n) for n in numbers]))


@pytest.mark.parametrize(("to", "most"), [("e4m3", 448), ("int8", 127)])
def test_the_largest_of_what_shares_a_scale_becomes_the_largest_number(to, most):
    x = torch.tensor([[3.0, -0.5, 0.1, 12.0, 0.0, 0.0, 7.0]])
    by_row, by_group = RowRounding(to).rounded(x), RowRounding(to, 3).rounded(x)
    assert (by_row - x).abs().max() <= 12 / (32 if to == "e4m3" else 254)
    assert by_row[0, 3] == by_group[0, 3] == 12
    assert (by_group[0, 0], by_group[0, 6]) == (3, 7)
    assert torch.equal(RowRounding(to).rounded(x, torch.tensor([most / 1.0])), nearest_of(to, x))


def nearest_of(to, x):
    return RowRounding(to, scale=1.0).rounded(x)


def test_two_weights_with_the_same_rows_take_the_larger_scale():
    one, other = RowRounding("e4m3", scale=0.5), RowRounding("e4m3", scale=2.0)
    assert one.joined(other) == other.joined(one) == other
    assert one.joined(RowRounding("e4m3")) is None
    assert one.joined(RowRounding("int8", scale=0.5)) is None
    assert RowRounding("e4m3", 128).joined(RowRounding("e4m3", 64)) is None
    assert RowRounding("e4m3", 128).joined(RowRounding("e4m3", 128)) == RowRounding("e4m3", 128)
