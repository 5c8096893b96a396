"""Texts for people: what fits is whole."""

from __future__ import annotations

import pytest

from advisor.core import text as t
from advisor.core.finding import Location


def test_sentences_beyond_the_room_are_left_whole_for_the_rest() -> None:
    text = (
        "GPU busy 70% of a 155 ms step. First: nn.Linear is slow. A fix saves about 36.4 ms "
        "(24%; range 29.2 to 45.4 ms)."
    )
    assert t.split_sentences(text, 200) == (text, "")
    assert t.split_sentences(text, 60) == (
        "GPU busy 70% of a 155 ms step. First: nn.Linear is slow.",
        "A fix saves about 36.4 ms (24%; range 29.2 to 45.4 ms).",
    )
    assert t.split_sentences(text, 5)[0] == "GPU busy 70% of a 155 ms step."
    counted = f"{text} 2 of 12 timed steps take 30% of the time."
    assert t.split_sentences(counted, 150) == (text, "2 of 12 timed steps take 30% of the time.")


def test_a_page_leads_with_the_problem_and_a_crash_with_itself() -> None:
    verdict = "GPU busy 70% of a 155 ms step. First: the loader is slow. A fix saves 30 ms."
    assert t.split_verdict(verdict, 30) == (
        "The loader is slow.",
        "A fix saves 30 ms. GPU busy 70% of a 155 ms step.",
    )
    assert t.split_verdict(f"It ended. {verdict}", 30) == t.split_sentences(
        f"It ended. {verdict}", 30
    )


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.324, "1.32× faster"),
        (1 / 1.2, "1.20× slower"),
        (1.0, "no faster"),
        (0.996, "no faster"),
        (2.45, "2.5× faster"),
        (250.0, "250× faster"),
    ],
)
def test_a_ratio_of_times_has_one_form(ratio: float, text: str) -> None:
    assert t.format_speedup(ratio) == text


def test_place_that_cannot_explain_its_finding_says_how_much_it_can() -> None:
    # 48 calls in 2 steps, of at most 50 µs each, take 1.2 ms per step
    place = Location(op="aten::linear", count=48, dur_ns=50_000, share=0.75)
    bounded = ["24× per step", "at most 1.2 ms of the 7 ms"]
    assert t.location_figures(place, 2, "step", 7_000_000) == bounded
    whole = ["24× per step", "75% of this finding's time", "worst 50 µs"]
    assert t.location_figures(place, 2, "step", 1_200_000) == whole
    assert t.location_figures(place, 2, "step") == whole
