"""Arguments of operators, against arithmetic by hand and brute force."""

from __future__ import annotations

from bisect import bisect_left

import pytest

from advisor.measure.device import operator_arguments as arguments
from advisor.measure.device.operator_arguments import SORTS, SortedPart
from advisor.measure.device.shapes import OpInputs
from advisor.testing import TraceBuilder


def test_largest_prime_factor_equals_a_search_of_all_divisors() -> None:
    for length in range(2, 400):
        divisors = [d for d in range(2, length + 1) if length % d == 0]
        primes = [d for d in divisors if not any(d % k == 0 for k in range(2, d))]
        assert arguments.largest_factor(length) == max(primes)


@pytest.mark.parametrize("length", [0, 1, 1 << 62])
def test_invalid_fft_length_is_ignored(length: int) -> None:
    assert arguments.largest_factor(length) <= 1


def test_a_good_length_is_the_next_even_product_of_2_3_5_and_7() -> None:
    good = sorted(2**a * 3**b * 5**c * 7**d for a in range(1, 14) for b in range(9)
                  for c in range(6) for d in range(5))  # fmt: skip
    for length in (*range(2, 500), *range(500, 3000, 11)):
        assert arguments.next_fast_length(length) == good[bisect_left(good, length)]


def test_the_good_length_of_a_damaged_trace_takes_no_time() -> None:
    assert arguments.next_fast_length((1 << 32) - 5) == 1 << 32


def test_inverse_real_fft_has_its_requested_length() -> None:
    op_inputs = OpInputs("[[8, 16, 1500], [], [], []]", '["complex<float>", "", "", ""]', "", "")
    assert arguments.fft_lengths("aten::_fft_c2r", op_inputs) == []  # dimensions were not recorded
    concrete = '["", "[1, 2]", "2", "2999"]'
    op_inputs = OpInputs(
        "[[8, 16, 1500], [], [], []]", '["complex<float>", "", "", ""]', "", concrete
    )
    assert arguments.fft_lengths("aten::_fft_c2r", op_inputs) == [(16, False), (2999, True)]
    assert arguments.fft_lengths("aten::_fft_c2c", op_inputs) == [(16, False), (1500, False)]


def sorted_part(*after: tuple[str, list[str], str]) -> SortedPart | None:
    """The part taken of a sort of rows of 100 by what follows: operator, arguments, type."""
    b = TraceBuilder(None)
    shape, more = [8, 100], [[], []]
    with b.step():
        with b.op("aten::sort", [shape, *more], concrete=["", "1", "True"]):
            pass
        for name, given, kind in after:
            shapes = [shape, *[[]] * len(given)]
            with b.op(name, shapes, kind, concrete=["", *given]):
                pass
    a = b.analysis()
    ((name, x, rows),) = arguments.calls_by_inputs(a, "^aten::sort$")
    return arguments.find_sorted_part(a, SORTS[0], x, rows)


def test_used_part_of_a_sort_is_found() -> None:
    first = ("aten::slice", ["1", "0", "10", "1"], "float")
    ids = ("aten::narrow", ["1", "0", "12"], "long int")
    assert sorted_part(first) == SortedPart(100, 10, 1, True, True)
    assert sorted_part(first, ids) == SortedPart(100, 12, 1, True, True)
    assert sorted_part(("aten::select", ["1", "-1"], "float")) == SortedPart(
        100, 1, 1, False, False
    )
    last = ("aten::slice", ["1", "-5", str(2**63 - 1), "1"], "long int")
    assert sorted_part(last) == SortedPart(100, 5, 1, False, False)
    assert sorted_part(first, last) == SortedPart(100, 100, 1, True, True)  # both ends: no part


def test_sort_read_by_other_operators_has_no_used_part() -> None:
    first = ("aten::slice", ["1", "0", "10", "1"], "float")
    assert sorted_part(("aten::softmax", ["1", ""], "float"), first) is None
    assert sorted_part(("aten::slice", ["1", "10", "20", "1"], "float")) is None
    assert sorted_part(("aten::slice", ["0", "0", "4", "1"], "float")) is None
    assert sorted_part() is None


def test_elementwise_rate_is_per_byte_of_the_largest_tensor() -> None:
    b = TraceBuilder(None)
    with b.step():
        for _ in range(3):
            with b.op("aten::add", [[1000, 100], [100]], host_us=399.5):
                pass
        with b.op("aten::mul", [[100]], host_us=50):  # too small to count
            pass
    assert arguments.elementwise_rate(b.analysis()) == pytest.approx(1.0)  # 400 µs for 400 kB
