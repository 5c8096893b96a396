"""Texts for people: what fits is whole."""

from __future__ import annotations

from advisor.core import text as t


def test_sentences_beyond_the_room_are_left_whole_for_the_rest() -> None:
    text = (
        "GPU busy 70% of a 155 ms step. First: nn.Linear is slow. A fix saves about 36.4 ms (24%)."
    )
    assert t.split_sentences(text, 200) == (text, "")
    assert t.split_sentences(text, 60) == (
        "GPU busy 70% of a 155 ms step. First: nn.Linear is slow.",
        "A fix saves about 36.4 ms (24%).",
    )
    assert t.split_sentences(text, 5)[0] == "GPU busy 70% of a 155 ms step."
