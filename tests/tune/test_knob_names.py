"""Knobs and the rules that name them fit each other."""

from __future__ import annotations

import pytest

from advisor.advise.rule_loading import load_rules
from advisor.core.errors import AdvisorError
from advisor.tune.knob import KnobSetting, Machine, all_knobs, find_knob


def test_each_knob_that_a_rule_names_exists() -> None:
    named = {name for rule in load_rules() for name in rule.knobs}
    assert named <= set(all_knobs())
    assert len(named) >= 15


@pytest.mark.parametrize("name", sorted(all_knobs()))
def test_each_knob_has_settings_lines_and_words(name: str) -> None:
    one = find_knob(name)
    assert one.title
    for machine in (Machine(1, False), Machine(16, True)):
        values = one.values(3, machine)
        assert len(values) == len(set(values)) > 0
        for value in values:
            assert one.lines(value)
            assert str(KnobSetting(name, value)).startswith(name)


def test_predicted_worker_count_is_tried_before_the_search() -> None:
    assert list(find_knob("workers").values(6, Machine(8, False))) == [6, 1, 2, 4, 8]


def test_an_unknown_knob_is_one_line_error() -> None:
    with pytest.raises(AdvisorError, match="no knob 'fast'"):
        find_knob("fast")
