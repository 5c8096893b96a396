"""An extension point for other formats: a renderer that some package installs is found. All
formats and the dashboard draw the same: the same segments, stairs and ranks, in the same words."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from advisor.advise import report_charts
from advisor.cli import run
from advisor.core.errors import AdvisorError
from advisor.core.ranks import Ranks
from advisor.core.report import Report
from advisor.core.report_time import IdleCause
from advisor.dashboard import components
from advisor.render import formats
from advisor.render.formats import COMPARISONS, REPORTS

TOY = '''
from advisor.core.labels import clean
from advisor.advise.report_charts import build_step_bar
from advisor.render.renderer import DEFAULT, Renderer


class Toy(Renderer):
    """A line a part of the step."""

    suffixes = (".toy",)

    def render(self, subject, options=DEFAULT):
        bar = build_step_bar(subject)
        lines = [f"{part.label}={part.time}" for part in bar.segments]
        return "\\n".join([clean(subject.verdict), *lines]) + "\\n"
'''
Make = Callable[..., Report]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package of the renderer, installed as pip leaves it; yields its file."""
    info = tmp_path / "site" / "toy_format-1.0.dist-info"
    info.mkdir(parents=True)
    module = tmp_path / "site" / "toy_format.py"
    module.write_text(TOY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-format\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[advisor.renderers]\ntoy = toy_format:Toy\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    yield module
    sys.modules.pop("toy_format", None)


@pytest.fixture
def saved_report(report: Make, tmp_path: Path) -> Path:
    file = tmp_path / "report.json"
    file.write_bytes(report(2).to_json())
    return file


def test_format_is_chosen_by_name_or_suffix(
    toy: Path, saved_report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(saved_report), "--format", "toy"]) == 0
    output = capsys.readouterr().out
    assert "compute=300 ms\n" in output
    assert run(["report", str(saved_report), "-o", str(tmp_path / "out.toy")]) == 0
    assert (tmp_path / "out.toy").read_text() == output


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("Toy = int", "TypeError: int is no Renderer"),
        ("", "AttributeError"),
    ],
)
def test_unloadable_format_is_one_line_error(
    toy: Path, saved_report: Path, capsys: pytest.CaptureFixture[str], text: str, why: str
) -> None:
    toy.write_text(text)
    assert run(["report", str(saved_report), "--format", "toy"]) == 2
    error = capsys.readouterr().err
    assert "format package toy_format:Toy: cannot be loaded" in error
    assert why in error
    assert error.count("\n") == 1
    # ours do not depend on it
    assert run(["report", str(saved_report), "--format", "markdown"]) == 0


def test_unknown_format_error_lists_formats(
    saved_report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(saved_report), "--format", "pdf"]) == 2
    folder = Path(formats.__file__).parent
    files = sorted(file.stem for file in folder.glob("*.py") if file.stem != "__init__")
    assert set(files) >= {"html", "json", "terminal"}
    assert capsys.readouterr().err == (
        f"advisor: pdf: a report is written as one of {', '.join(files)}\n"
    )
    with pytest.raises(AdvisorError, match=r"^sarif: a comparison is written as one of "):
        COMPARISONS.renderer("sarif")


class PageWords(HTMLParser):
    """The words of a page, visible or read aloud."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.parts += [value or "" for name, value in attrs if name in ("title", "aria-label")]

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def text_by_format(report: Report) -> dict[str, str]:
    """The text of the step in each format and in the dashboard."""
    bar = report_charts.build_step_bar(report)
    assert bar is not None
    rendered = {form: REPORTS.render(form, report, width=120) for form in ("terminal", "markdown")}
    for form in ("html", "notebook"):
        rendered[form] = " ".join(PageWords(REPORTS.render(form, report)).parts)
    drawn = components.draw_bar(bar).to_plotly_json()
    rendered["dashboard"] = json.dumps(drawn, default=_to_json, ensure_ascii=False)
    return {form: re.sub(r"[\s|]+", " ", text) for form, text in rendered.items()}


def _to_json(part: object) -> object:
    return part.to_plotly_json()  # type: ignore[attr-defined]


@pytest.mark.parametrize("idle", ["few", "many", "unmeasured"])
@pytest.mark.parametrize("seconds", [1e-6, 1e-3, 1.223])
def test_every_view_draws_the_same_parts_in_the_same_words(
    report: Make, idle: str, seconds: float
) -> None:
    result = report()
    scale = seconds * 1e9 / result.scope.step_ns
    causes = {
        "few": list(result.idle),
        # by hand: the five largest keep their names, the others are one part
        "many": [IdleCause(f"cause_{n}", n * 70e6 / 36, n * 0.175 / 36) for n in range(1, 9)],
        "unmeasured": [],
    }[idle]
    result.time = [type(part)(part.name, part.ns * scale, part.share) for part in result.time]
    result.idle = [IdleCause(part.cause, part.ns * scale, part.share) for part in causes]
    bar = report_charts.build_step_bar(result)
    assert bar is not None
    assert sum(part.ns for part in bar.segments) == pytest.approx(seconds * 1e9)
    if idle == "many":
        assert [part.label for part in bar.idle] == [
            *(f"cause {n}" for n in (8, 7, 6, 5, 4)),
            "other causes",
        ]
    for form, text in text_by_format(result).items():
        for part in bar.segments:
            assert part.label in text, (form, part)
            assert part.time in text, (form, part)
            assert part.share_text in text, (form, part)


def test_every_view_has_the_same_stairs_and_the_same_ranks(
    report: Make, ranks: Callable[..., Ranks]
) -> None:
    result = report(3, ranks=ranks(3))
    stairs, table = report_charts.build_fix_sequence(result), report_charts.build_rank_table(result)
    assert stairs is not None
    assert table is not None
    texts = {
        form: REPORTS.render(form, result, width=120, details=True) for form in ("terminal", "html")
    }
    for form, text in texts.items():
        for stair in stairs.fixes:
            assert stair.left in text, form
            assert stair.saved in text, form
    texts["markdown"] = REPORTS.render("markdown", result)
    for form, text in texts.items():
        cells = re.sub(r"<[^>]*>|[|]", " ", text)
        for row in table.rows:
            assert re.search(r"\s+".join(map(re.escape, row.cells)), cells), (form, row.cells)


def test_ranks_without_a_device_have_no_column_of_it(
    report: Make, ranks: Callable[..., Ranks]
) -> None:
    result = report(3, ranks=ranks(3))
    with_device = report_charts.build_rank_table(result)
    assert result.ranks is not None and with_device is not None
    assert "GPU busy" in with_device.head
    for line in result.ranks.lines:
        line.busy_share = None
        line.idle_ns = None
    table = report_charts.build_rank_table(result)
    assert table is not None
    assert "GPU busy" not in table.head
    assert {len(row.cells) for row in table.rows} == {len(table.head)}
