"""Numbers have units, missing is not zero, names are harmless."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import Finding, Impact


@pytest.mark.parametrize(
    ("ns", "expected"),
    [
        (None, "not measured"),
        (0, "0 ms"),
        (7, "7 ns"),
        (1_234, "1.23 µs"),
        (12_340, "12.3 µs"),
        (999_600, "1 ms"),
        (87_900_000, "87.9 ms"),
        (999_400_000, "999 ms"),
        (999_940_000, "1 s"),
        (1_223_000_000, "1.22 s"),
        (12_300_000_000, "12.3 s"),
        (4_000_000_000_000, "4,000 s"),
        (-87_900_000, "−87.9 ms"),
    ],
)
def test_duration_has_its_most_readable_unit(ns: float | None, expected: str) -> None:
    assert t.format_duration(ns) == expected


@given(st.floats(min_value=1e3, max_value=1e13, allow_nan=False))
def test_a_duration_reads_back_to_within_its_last_digit(ns: float) -> None:
    number, unit = t.format_duration(ns).replace(",", "").split(" ")
    scale = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit]
    assert float(number) * scale == pytest.approx(ns, rel=0.0051)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (None, "not measured"),
        (0, "0 B"),
        (900, "900 B"),
        (1536, "1.5 KiB"),
        (1000 << 20, "1,000 MiB"),
        ((1 << 30) - 1, "1 GiB"),
        (12.34 * (1 << 30), "12.3 GiB"),
        (1234 * (1 << 30), "1,234 GiB"),
        (-(5 << 20), "−5 MiB"),
    ],
)
def test_size_has_three_digits_and_a_readable_unit(size: float | None, expected: str) -> None:
    assert t.format_bytes(size) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (t.format_change(-3e6), "−3 ms"),
        (t.format_change(0), "0 ms"),
        (t.format_bytes_change(-3 << 30), "−3 GiB"),
        (t.format_bytes_change(3 << 30), "+3 GiB"),
        (t.format_share_change(-0.021), "−2.1%"),
        (t.format_share_change(0.0001), "0.0%"),
        (t.format_share_change(12.34), "+1,234%"),
        (t.format_share_change(None), "not measured"),
    ],
)
def test_a_difference_has_one_kind_of_sign(text: str, expected: str) -> None:
    assert text == expected


def test_names_are_listed_in_one_way() -> None:
    assert t.list_names(iter("abc")) == "a, b and c"
    assert t.list_names("abc", 3) == "a, b and c"
    assert t.list_names("abcde", 3) == "a, b, c and 2 more"
    assert (t.list_names("a"), t.list_names([])) == ("a", "")


def test_a_range_says_its_unit_once() -> None:
    assert t.format_range(390e6, 412e6) == "390 to 412 ms"
    assert t.format_range(0, 412e6) == "0 to 412 ms"
    assert t.format_range(900e3, 1.2e6) == "900 µs to 1.2 ms"
    assert t.format_range(-3e6, 2e6) == "−3 to 2 ms"


@pytest.mark.parametrize(
    ("number", "noun", "plural", "expected"),
    [
        (1, "kernel", "", "1 kernel"),
        (0, "kernel", "", "0 kernels"),
        (2.5, "copy", "", "2.5 copies"),
        (1_234, "step", "", "1,234 steps"),
        (3, "key", "", "3 keys"),
        (2, "batch", "", "2 batches"),
        (2, "kernel or copy", "kernels and copies", "2 kernels and copies"),
    ],
)
def test_a_noun_agrees_with_its_number(
    number: float, noun: str, plural: str, expected: str
) -> None:
    assert t.count_noun(number, noun, plural) == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [(None, "not measured"), (0.0, "0%"), (0.0004, "<1%"), (0.19, "19%"), (1.0, "100%")],
)
def test_tiny_share_is_not_shown_as_zero(share: float | None, expected: str) -> None:
    assert t.format_share(share) == expected


def test_evidence_shows_its_value_with_its_unit() -> None:
    assert t.format_value(0.19, "share") == "19%"
    assert t.format_value(None, "ns") == "not measured"
    assert t.format_value(12.34, "GB/s") == "12.3 GB/s"
    assert t.format_value(3 << 30, "bytes") == "3 GiB"
    assert t.format_value(2.5e13, "FLOP/s") == "25 TFLOP/s"
    assert t.format_value(2.5e9, "B/s") == "2.5 GB/s"
    assert t.format_value(1234, "count") == "1,234"
    assert t.format_value("a; b", "") == "a; b"


def test_gain_shows_its_currency() -> None:
    def format_impact(**impact: object) -> str:
        gain = Impact(**impact)  # type: ignore[arg-type]
        return t.format_gain(Finding(rule="r", title="t", summary="s", fix="f", impact=gain))

    bound = "upper bound (exposed time)"
    assert format_impact(currency="step_time", gain_ns=4_000_000, share=0.1, method=bound) == (
        "up to 4 ms per step, 10%"
    )
    # a range that ends above the gain is no bound
    wide = {"gain_ns": 4_000_000, "low_ns": 2_000_000, "high_ns": 6_000_000, "method": bound}
    assert format_impact(currency="step_time", **wide) == "4 ms per step"
    assert (
        format_impact(currency="step_time", **wide | {"high_ns": 4_000_000})
        == "up to 4 ms per step"
    )
    assert (
        format_impact(currency="step_time", gain_ns=4_000_000, method="replay") == "4 ms per step"
    )
    least = {"gain_ns": 4_000_000, "method": "lower bound (replay)"}
    assert format_impact(currency="step_time", **least) == "at least 4 ms per step"
    assert format_impact(currency="step_time", **least | {"kind": "replay"}) == "4 ms per step"
    assert format_impact(currency="run_time", gain_ns=20_000_000_000) == "20 s over the run"
    assert format_impact(currency="memory", freed_bytes=2 << 30) == "frees 2 GiB"
    assert (
        format_impact(currency="risk", reason="may run out of memory")
        == "risk: may run out of memory"
    )
    assert format_impact(currency="unknown", reason="no edit") == "no estimated gain: no edit"


@given(st.text())
def test_clean_text_has_no_control_characters(text: str) -> None:
    for clean in (labels.clean(text), labels.clean(text, lines=True).replace("\n", "")):
        assert not any(unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for c in clean)
        clean.encode()


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126)))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert labels.clean(text) == text


@given(st.text(), st.integers(min_value=0, max_value=80))
def test_shortened_text_fits(text: str, width: int) -> None:
    assert len(labels.shorten(text, width)) <= width
    assert len(labels.kernel_label(text, width)) <= width
    assert len(t.shorten_path(text, max(1, width))) <= max(1, width)


def test_a_long_path_keeps_its_end() -> None:
    assert t.shorten_path("/home/somebody/a/long/way/project/train.py", 20) == "…/project/train.py"


def test_a_path_below_the_working_folder_starts_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert t.shorten_path(str(tmp_path / "src" / "train.py"), 60) == str(Path("src", "train.py"))
    assert t.shorten_path(f"{tmp_path}2/train.py", 200) == f"{tmp_path}2/train.py"
