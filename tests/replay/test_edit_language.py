"""The edit language: what is written is read back as it was."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor import AdvisorError
from advisor.core.event_kinds import CPU_KINDS, GPU_KINDS
from advisor.core.finding import Edit, Instants, Select
from advisor.core.text import cause_label
from advisor.core.trace import CALLS, COPIES
from advisor.measure.host.gaps import CAUSES
from advisor.replay.edit_language import LOADER, parse_edit, write_edit

PATTERN = st.sampled_from(
    [
        "",
        "gemm",
        r"^aten::(bmm|baddbmm_?)$",
        "two words",
        'it\'s "quoted"',
        "under:x",
        "0.5",
        r"a\\:b",
    ]
)
NOT_EMPTY = PATTERN.filter(bool)
FACTOR = st.floats(0, 1000).map(lambda f: round(f, 6))
BAND = st.fixed_dictionaries(
    {}, optional={"best_factor": FACTOR, "worst_factor": FACTOR}
)  # each may be missing


def lists_of(values: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(values), max_size=3, unique=True).map(tuple)


NUMBERS = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
LIMIT = st.none() | st.integers(1, 10**9)
GPU = st.builds(
    Select,
    on=st.just("gpu"),
    kind=lists_of(GPU_KINDS),
    name=PATTERN,
    under=PATTERN,
    layer=st.sampled_from(["", "blocks", "layers.1?", "Model_0.*.Linear_3", "[a-c]"]),
    family=lists_of(("gemm", "communication", "softmax")),
    copy=lists_of(COPIES),
    memory=st.sampled_from(["", "pageable", "pinned"]),
    stream=NUMBERS,
    correlation=NUMBERS,
    max_ns=LIMIT,
)
HOST = st.builds(
    Select,
    on=st.just("host"),
    kind=lists_of(CPU_KINDS),
    name=NOT_EMPTY,
    under=PATTERN,
    call=lists_of(CALLS),
    at=st.sampled_from(["", "loop"]),
    correlation=NUMBERS,
    max_ns=LIMIT,
)
GAP = st.builds(
    Select,
    on=st.just("gap"),
    name=PATTERN,
    under=PATTERN,
    cause=lists_of(("dispatch", "launch", "python")),
    at=st.sampled_from([name for name in get_args(Instants) if name != "loop"]),
    max_ns=LIMIT,
)
RANK = st.none() | st.integers(0, 9999)
EDITS = st.one_of(
    st.builds(
        lambda s, f, b, r: Edit(op="scale", select=s, factor=f, rank=r, **b),
        st.one_of(GPU, HOST, GAP),
        FACTOR,
        BAND,
        RANK,
    ),
    st.builds(lambda s, f, b: Edit(op="merge", select=s, factor=f, **b), GPU, FACTOR, BAND),
    st.builds(lambda s, r: Edit(op="remove", select=s, rank=r), st.one_of(GPU, HOST, GAP), RANK),
    st.builds(
        lambda s, a, kept: Edit(op="overlap", select=s, ahead=a, worst_factor=kept),
        GPU,
        st.booleans(),
        st.none() | st.floats(0, 1),
    ),
    st.builds(lambda s: Edit(op="make_async", select=s), HOST),
    st.builds(
        lambda s, n: Edit(op="drop_launch", select=s, host_ns=n),
        st.one_of(GPU, GAP),
        st.none() | st.integers(0, 10**6),
    ),
    st.builds(
        lambda n, w: Edit(op="parallelize", select=Select(on="host", name=n), workers=w),
        st.just(LOADER) | NOT_EMPTY,
        st.integers(1, 4096),
    ),
    st.builds(
        lambda n, f: Edit(
            op="remove_skew",
            select=Select(on="gpu", family=("communication",), name=n),
            factor=f,
            rank=3,
        ),
        PATTERN,
        st.none() | FACTOR,
    ),
)


@given(EDITS)
def test_any_edit_that_can_be_written_is_read_back(edit: Edit) -> None:
    assert parse_edit(write_edit(edit)) == edit


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("scale work kind:kernels 0.5", "kind:kernels"),
        ("scale work max:soon 0.5", "whole numbers"),
        ("scale work max:1,2 0.5", "one value"),
        ("scale work stream:7 stream:8 0.5", "twice"),
        ("remove work 0.1..0.5..0.9", "no number"),
        ("roofline work 0.1..0.5..0.9", "no range"),
        ("remove work ahead", "ahead"),
        ("remove host", "needs a pattern"),
        ("remove gap at:loop", "for host events"),
        ("remove work at:loop", "for host events"),
    ],
)
def test_meaningless_word_is_refused(line: str, words: str) -> None:
    with pytest.raises(AdvisorError, match=words):
        parse_edit(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("scale work nan", "nan is not a finite number"),
        ("scale family:gemm abc", "'abc' is not a number"),
        ("scale kernel sync", "give one target"),
        ("scale kernel -Infinity", "-Infinity is not a finite number"),
        ("graph work 1e999", "1e999 is not a finite number"),
        ("scale kernel 0..1e999", "1e999 is not a finite number"),
        ("graph loader", "graph takes what is launched, or launches: kernel, family"),
        ("graph sync", "not sync"),
    ],
)
def test_invalid_numbers_and_launches_are_reported(line: str, message: str) -> None:
    with pytest.raises(AdvisorError) as caught:
        parse_edit(line)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_idle_causes_have_their_names_in_reports_and_the_docs_list_them() -> None:
    assert parse_edit("remove gap:cpu-operators,host-in-a-sync") == parse_edit(
        "remove gap:dispatch,sync"
    )
    assert parse_edit("remove gap:outside-operators").select.cause == ("unknown",)
    page = (Path(__file__).parents[2] / "docs" / "whatif.md").read_text()
    table = page[page.index("| `gap:` | in reports |") :].partition("\n\n")[0]
    for cause in CAUSES:
        assert f"`{cause}`" in table
        assert cause_label(cause) in table
