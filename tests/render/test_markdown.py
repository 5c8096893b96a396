"""The Markdown: the same content, and names that stay names."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from advisor.core import text as t
from advisor.core.finding import Location
from advisor.core.ranks import Ranks
from advisor.core.report import Report
from advisor.render.document import Document, FieldList, Span, TextField
from advisor.render.formats import REPORTS, markdown
from advisor.render.formats.markdown import Markdown

Make = Callable[..., Report]
PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
OURS = {"<details><summary>Details</summary>", "</details>", "<!-- -->"}


def rendered_text(source: str) -> str:
    """The text that a reader of the rendered page sees of one paragraph."""
    result = []
    for token in PARSER.parse(source):
        for child in token.children or []:
            assert child.type in {"text", "html_inline", "text_special"}, (child.type, source)
            if child.type == "html_inline":
                assert child.content == "<!-- -->"
            else:
                result.append(child.content)
    return "".join(result)


@given(st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), min_size=1))
def test_an_escaped_name_reads_as_it_was_and_does_nothing(name: str) -> None:
    assert rendered_text(f"x {markdown.escape(name)}") == f"x {name}"
    assert rendered_text(markdown.escape(name)) == name


@given(st.text(alphabet="`|<>a \\*", min_size=1).filter(str.strip))
def test_a_code_span_holds_any_name(name: str) -> None:
    if "|" in name:  # escaped for table cells, where the parser takes the backslash away
        return
    (token,) = [t for t in PARSER.parse(f"x {markdown.code_span(name)}") if t.type == "inline"]
    spans = [child.content for child in token.children or [] if child.type == "code_inline"]
    assert [span.strip() for span in spans] == [name.strip()]


def test_a_code_block_cannot_be_ended_by_its_content() -> None:
    (token,) = PARSER.parse(markdown.fenced_block("a\n```\n````\n# not a heading"))
    assert token.type == "fence"
    assert token.content == "a\n```\n````\n# not a heading\n"


def test_hostile_names_make_no_html_no_links_and_no_images(report: Make, hostile_name: str) -> None:
    for token in PARSER.parse(REPORTS.render("markdown", report(2, hostile_name))):
        if token.type == "html_block":
            parts = re.findall(r"<[^>]*>", token.content)
            assert "".join(parts) in "<details><summary></summary></details>"
        for child in token.children or []:
            assert child.type not in {"image", "link_open"}
            if child.type == "html_inline":
                assert child.content in OURS


def test_hostile_names_do_not_change_the_headings_or_the_table(
    report: Make, hostile_name: str
) -> None:
    def outline(source: str) -> list[str]:
        structure = {"heading_open", "tr_open", "td_open", "th_open", "list_item_open", "fence"}
        return [token.type for token in PARSER.parse(source) if token.type in structure]

    assert outline(REPORTS.render("markdown", report(2, hostile_name))) == outline(
        REPORTS.render("markdown", report(2, "harmless"))
    )


def test_markdown_mentions_no_users_or_issues(report: Make) -> None:
    source = REPORTS.render("markdown", report(1, "@everyone see #1"))
    outside_code = re.sub(r"```.*?```|`[^`]*`", "", source, flags=re.DOTALL)
    assert "@everyone" not in outside_code
    assert not re.search(r"#\d", outside_code)


def test_markdown_matches_the_terminal(report: Make, ranks: Callable[..., Ranks]) -> None:
    source = REPORTS.render("markdown", report(3, ranks=ranks(2)))
    for part in (
        "GPU busy 82%",
        "| compute | 300 ms | 75% |",
        "#### 1. Finding number 1 of the step",
        "up to 40 ms (20–40 ms), 10%",
        "advisor is 80% sure of the cause",
        "`/home/me/project/train.py:42 in train_step`",
        "```python\nstep(quick=True)\n```",
        "share of the step 10%, limit 5% (XProf)",
        "### Ranks",
        "<details><summary>Passed checks</summary>",
        "<details><summary>Skipped checks</summary>",
        "<details><summary>Limits of this trace</summary>",
    ):
        assert part in source, part


@pytest.mark.parametrize("top", [0, 1, 2])
def test_top_limits_the_findings_and_says_so(report: Make, top: int) -> None:
    source = REPORTS.render("markdown", report(3), top=top)
    assert source.count("\n- fix: ") == top
    assert f"{3 - top} more: `--top 3`" in source


def test_a_place_shows_names_as_code_and_figures_as_text() -> None:
    place = Location(op="aten::item", count=12, dur_ns=3_000_000)
    names = [Span(name, "code") for name in t.location_names(place)]
    fields = FieldList([TextField("where", [*names, *t.location_figures(place)])])
    text = Markdown().draw(Document("", [fields], name="report"))
    assert "where: `aten::item` · 12× · worst 3 ms\n" in text
