"""Real pairs: the prediction from the trace before a change, compared with the trace after it.

Both are measured by ``benchmarks/bench_pairs.py``, which reads the files itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import bench_pairs
import pytest
from bench_pairs import NARROW, PAIRS, Pair, Row

Find = Callable[[str], str]

CLOSE = 0.25
"""Allowed distance of a point from the measured change, as a share of it."""


@functools.lru_cache(maxsize=len(PAIRS))
def compare_pair(number: int, traces: Path) -> Row:
    return bench_pairs.row(PAIRS[number], traces)


@pytest.fixture(
    params=range(len(PAIRS)),
    ids=[f"{p.before.split('/')[-1]}-{p.after.split('/')[-1]}" for p in PAIRS],
)
def row(request: pytest.FixtureRequest, shared_trace: Find) -> Row:
    pair: Pair = PAIRS[request.param]
    path = Path(shared_trace(pair.before))
    if pair.after:
        shared_trace(pair.after)
    return compare_pair(request.param, path.parents[pair.before.count("/")])


def test_measured_changes_are_inside_the_range(row: Row) -> None:
    assert row.inside, row


def test_estimate_is_within_a_quarter_of_the_measurement(row: Row) -> None:
    assert row.error <= CLOSE, row


def test_the_range_is_narrow_enough_to_be_useful(row: Row) -> None:
    assert 0 < row.width <= NARROW, row


def test_fused_attention_is_estimated_by_flops_if_device_bound(
    shared_trace: Find,
) -> None:
    """95 of 119 ms of kernels are attention, and the host waits 94 ms for them. Twelve layers have
    96 heads of 64 over 3,137 tokens, in tiles of 64 3,200, and 37,632 over 8 frames, in tiles 64:
    3.5 TFLOP, 10 to 26 ms at 20 to 50% of the 668 TFLOP/s that others attained."""
    flops = 12 * 2 * (64 + 64) * (96 * 3200**2 + 37_632 * 64**2)
    slow, fast = (94.9 - flops / (share * 668e12) * 1e3 for share in (0.2, 0.5))
    findings = bench_pairs.findings(Path(shared_trace("mi300_timesformer_inference")))
    assert slow <= findings["unfused-attention"].point <= fast


# -- the yardstick itself, against the figures that came with the files -------------------------


@pytest.mark.parametrize(
    ("number", "before", "after"),
    [(0, (154.8, 155.0), (128.3, 121.2)), (1, (160.2, None), (115.7, None))],
)
def test_steps_match_their_published_measurements(
    shared_trace: Find,
    number: int,
    before: tuple[float, float | None],
    after: tuple[float, float | None],
) -> None:
    pair = PAIRS[number]
    measure = (bench_pairs.marked, bench_pairs.batch_to_batch)[number]
    for name, (mean, median) in ((pair.before, before), (pair.after, after)):
        result = measure(Path(shared_trace(name)))
        assert result.mean == pytest.approx(mean, rel=0.02)
        if median is not None:
            assert result.median == pytest.approx(median, rel=0.01)


@pytest.mark.parametrize(
    ("name", "span"),
    [
        ("pairs/sam_1_fp32_many_syncs", 2565),
        ("pairs/sam_2_fp32_few_syncs", 1400),
        ("pairs/sam_3_bf16_compiled_sdpa", 520),
        ("pairs/particle_batch128", 31.7),
        ("pairs/particle_batch64", 40.3),
    ],
)
def test_runs_without_steps_match_published_measurements(
    shared_trace: Find, name: str, span: float
) -> None:
    assert bench_pairs.whole_recording(Path(shared_trace(name))).mean == pytest.approx(
        span, rel=0.015
    )
