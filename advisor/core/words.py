"""Lists of words as text: a long table of names reads better in lines than in a column."""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    """The words of a text, in its order: ``words("a b")`` is ``("a", "b")``."""
    return tuple(text.split())
