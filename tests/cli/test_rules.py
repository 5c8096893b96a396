"""``advisor rules``: what there is, and what each is about."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.advise.rule_loading import load_rules

Run = Callable[..., tuple[int, str, str]]

RULE = '''
from advisor.core.finding import PassedCheck
from advisor.core.rule import Rule


class Mine(Rule):
    """Looks at nothing at all, which costs nothing.

    A second paragraph.
    """

    id = "mine"
    title = "A rule of my own"
    category = "host"

    # on top: from a book
    first = 3
    second = 0.5  # share of the step; from a paper

    def check(self, a):
        yield PassedCheck(text="my rule ran")

    @staticmethod
    def examples():
        return {"this": None, "that": (None, "first")}
'''


def test_the_list_has_every_rule_and_fits(advisor: Run) -> None:
    code, out, err = advisor("rules", "list")
    assert (code, err) == (0, "")
    ids = [rule.id for rule in load_rules(config={})]
    assert "exposed-communication" in ids
    assert [name for name in ids if f"  {name} " not in out] == []
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("not proven") == 1  # the mark's meaning
    unproven = [rule for rule in load_rules(config={}) if rule.validation == "synthetic"]
    assert len(re.findall(r" \*$", out, re.MULTILINE)) == len(unproven)
    assert advisor("rules") == (code, out, err)


def first_words(text: str) -> str:
    """The words of a text up to its first comma or full stop, which say which text it is."""
    return re.split(r"[.,:;]", " ".join(text.split()))[0]


def test_every_rule_can_be_shown(advisor: Run) -> None:
    for rule in load_rules(config={}):
        code, out, err = advisor("rules", "show", rule.id)
        assert (code, err) == (0, "")
        assert rule.title in " ".join(out.split())
        assert "Why it matters" in out
        assert f"[tool.advisor.rules.{rule.id}]" in out
        assert ("Where nothing is trained" in out) == bool(rule.inference)
        for text in (
            rule.inference.get("fix"),
            *(advice.fix for advice in rule.framework_advice.values()),
        ):
            assert text is None or first_words(text) in " ".join(out.split())
        assert max(len(line) for line in out.splitlines() if "://" not in line) <= 80


def test_rule_is_shown_with_sources_of_its_thresholds(advisor: Run, tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "mine.py").write_text(RULE)
    code, out, _ = advisor("rules", "show", "mine", "--rules", tmp_path / "rules")
    assert code == 0
    for part in (
        "Looks at nothing at all",
        "A second paragraph.",
        "first = 3\n      on top: from a book",
        "second = 0.5\n      share of the step; from a paper",
        "only on synthetic examples",
        "fires    this",
        "silent   that",
    ):
        assert part in out, part


def test_a_rule_of_the_users_own_is_run(advisor: Run, tmp_path: Path, slow_trace: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "mine.py").write_text(RULE)
    code, out, _ = advisor("analyze", slow_trace, "--details", "--rules", tmp_path / "rules")
    assert code == 0
    assert "my rule ran" in out


def test_disabled_rule_is_marked(advisor: Run, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[tool.advisor.rules.exposed-communication]\nenabled = false\n"
    )
    _, out, _ = advisor("rules")
    assert "switched off" in out


def test_a_computed_threshold_has_three_digits(advisor: Run) -> None:
    assert "max_efficiency = 0.333\n" in advisor("rules", "show", "low-bandwidth")[1]


def test_placeholders_of_a_rule_are_explained(advisor: Run) -> None:
    output = " ".join(advisor("rules", "show", "straggler-rank")[1].split())
    assert "A report fills in words such as <ranks> from your trace." in output
    assert "A report fills in" not in advisor("rules", "show", "recompilation")[1]


def test_every_page_of_a_rule_stands_by_itself() -> None:
    rules = load_rules(config={})
    titles = [rule.title for rule in rules]
    assert sorted(set(titles)) == sorted(titles)
    begins = {rule.id: type(rule).paragraphs()[0] for rule in rules}
    assert [name for name, text in begins.items() if text.startswith("The same ")] == []


def test_misspelled_rule_gets_a_suggestion(advisor: Run) -> None:
    code, out, err = advisor("rules", "show", "exposed-comunication")
    assert (code, out) == (2, "")
    assert "did you mean exposed-communication" in err
    assert (
        advisor("rules", "show", "zzz")[2] == "advisor: no rule 'zzz'; see 'advisor rules list'\n"
    )


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("rules", "show", "lanch"), "launch-bound?"),
        (("rules", "show", "loader"), "loader-workers"),
        (("workloads", "run", "simpl_cnn"), "simple_cnn?"),
        (("try", "--only", "loder", "train.py"), "loader-"),
        (("whatif", "t.json", "--edit", "scle kernel:x 2"), "scale?"),
        (("whatif", "t.json", "--edit", "scale kernl:x 2"), "kernel?"),
        (("whatif", "t.json", "--edit", "remove work kind:kernl"), "kernel?"),
        (("project", "t.json", "--gpu", "h10"), "NVIDIA H100"),
        (("analyse", "t.json"), "analyze"),
        (("rules", "lst"), "list"),
    ],
)
def test_every_mistyped_name_gets_the_nearest(
    advisor: Run, slow_trace: Path, typed: tuple[str, ...], meant: str
) -> None:
    Path("t.json").write_bytes(slow_trace.read_bytes())
    code, out, err = advisor(*typed)
    assert (code, out) == (2, "")
    assert err.lower().count("did you mean") == err.count("\n") == 1
    assert meant in err


def test_a_name_like_no_other_gets_no_suggestion(advisor: Run) -> None:
    for typed in (
        ("project", "t.json", "--gpu", "zzzz"),
        ("rules", "show", "---"),
        ("rules", "show", "nope"),
    ):
        assert "did you mean" not in advisor(*typed)[2]


def test_values_from_a_trace_are_placeholders_and_no_code(advisor: Run) -> None:
    output = advisor("rules", "show", "single-process-loader")[1]
    assert "Set num_workers=<workers> to load in worker processes" in output
    assert (
        "num_workers=<workers>,\n" in output
        and "make a batch cheaper too: it takes <batch>" in output
    )
    assert not re.search(r"\{[a-z_]+\}", output)
