"""Name columns: each distinct name is looked at once."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.measure.host import names as under_test
from advisor.measure.host.names import cache_by_name, distinct_names, map_names, name_matches


@pytest.mark.parametrize("dtype", [pl.Categorical, pl.String])
def test_few_names_and_many_are_matched_the_same(
    dtype: type[pl.DataType], monkeypatch: pytest.MonkeyPatch
) -> None:
    column = pl.Series("name", ["aten::mm", None, "mm", "aten::bmm", "aten::mm", ""], dtype=dtype)
    for pattern, expected in (
        ("^aten::b?mm$", [True, False, False, True, True, False]),
        ("nothing", [False] * 6),
        ("^$", [False] * 5 + [True]),
    ):
        monkeypatch.setattr(under_test, "MIN_NAMES_TO_DEDUPLICATE", len(column) + 1)
        few = name_matches(column, pattern)
        monkeypatch.setattr(under_test, "MIN_NAMES_TO_DEDUPLICATE", 0)
        if dtype == pl.Categorical:  # as name columns are
            assert name_matches(column, pattern).to_list() == expected
        assert few.to_list() == expected
        assert few.name == "matches"
    assert name_matches(column.clear(), "x").to_list() == []


def test_the_answer_for_a_name_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "MAX_REMEMBERED_NAMES", 4)
    requests: list[list[str | None]] = []

    @cache_by_name
    def lengths(names: pl.Series) -> pl.DataFrame:
        requests.append(names.to_list())
        return pl.DataFrame({"length": names.str.len_chars()})

    def lengths_of(*names: str | None) -> list[int | None]:
        return lengths(pl.Series(names, dtype=pl.String))["length"].to_list()

    assert lengths_of() == []
    assert lengths_of("a", "bbb", "a") == [1, 3, 1]
    assert lengths_of("cc", "bbb", None) == [2, 3, None]
    assert lengths_of("bbb", "cc", "a", None) == [3, 2, 1, None]
    assert requests[-2:] == [["a", "bbb"], ["cc", None]]
    assert lengths_of("a", "dddd") == [1, 4]  # no room for a fifth: all over again
    assert requests[-1] == ["a", "dddd"]
    assert lengths_of("bbb", "a") == [3, 1]
    many = [n * "x" for n in range(9)]
    assert lengths_of(*many) == list(range(9))  # never kept
    assert lengths_of("a") == [1]
    assert requests[-2:] == [["bbb"], many]


@given(st.lists(st.one_of(st.none(), st.sampled_from(["aten::mm", "mm", "", "b"])), max_size=30))
def test_mapping_names_equals_mapping_rows(given_names: list[str | None]) -> None:
    others = pl.Series([f"{n} other" for n in range(40)], dtype=pl.Categorical)
    column = pl.Series("name", given_names, dtype=pl.Categorical)
    for names in (column, pl.concat([others, column])[len(others) :]):  # codes not from 0 on
        texts, which = distinct_names(names)
        assert len(set(texts)) == len(texts)
        assert [None if at < 0 else texts[int(at)] for at in which] == given_names
        lengths = [None if name is None else len(name) for name in given_names]
        assert map_names(names, len, pl.Int64).to_list() == lengths
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(under_test, "MIN_NAMES_TO_DEDUPLICATE", 0)
            matches = name_matches(names, "m$").to_list()
        assert matches == [name is not None and name.endswith("m") for name in given_names]
