"""Document of a comparison or of a gate's decision: two runs side by side."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from advisor.compare import comparison_text
from advisor.compare.comparison import Comparison, Decision
from advisor.core import charts
from advisor.core import text as t
from advisor.core.charts import Segment
from advisor.core.text import count_noun, format_value
from advisor.render import document as d
from advisor.render.figures import ComparedBars

_MAX_LINES: Final = 12
"""Maximum number of source lines in the table of memory, and of layers."""
_STYLE: Final = {"slower": "bold red", "faster": "bold green"}


def build(comparison: Comparison, options: d.RenderOptions = d.DEFAULT) -> d.Document:
    """Build the document of a comparison, or of a gate if it has a decision."""
    c = comparison
    if c.decision is not None:
        return _build_gate(c, c.decision)
    verdict = "not measured" if comparison_text.is_unjudged(c) else c.steps.verdict
    # step times of recorded runs include all steps, but their parts come from the window
    window = "of the profiled window" if c.steps.source == "recorder" else ""
    notes = [d.Paragraph(note, "soft") for note in comparison_text.step_notes(c.steps)]
    layer_figures = comparison_text.figures_of(c, ["memory by layer"])
    breakdown, work = comparison_text.breakdown_lines(c), comparison_text.work_lines(c)
    noise = [line for line in (*breakdown, *work) if line.is_noise]
    noise = [] if comparison_text.is_unjudged(c) else noise
    return d.Document(
        c.verdict,
        [
            d.FieldList(
                [d.TextField(label, parts) for label, parts in comparison_text.describe_sides(c)],
                indent=0,
            ),
            *_list_limits(c),
            *_build_table(*_name_durations(c), comparison_text.step_lines(c), notes, short=True),
            *_build_table(
                "Inference by phase", "", comparison_text.figures_of(c, ["phases"]), short=True
            ),
            *_build_table("Parts of a layer", "", comparison_text.figures_of(c, ["parts"])),
            *_build_table(
                "Breakdown",
                "",
                [line for line in breakdown if line not in noise],
                aside=window,
                above=_build_bars(c),
            ),
            *_build_table(
                "Layers",
                "own time, most changed",
                comparison_text.figures_of(c, ["layers"])[:_MAX_LINES],
            ),
            *_build_table("Memory by layer", "kept by its calls", layer_figures[:_MAX_LINES]),
            *_build_table("Memory at the peak", "", comparison_text.figures_of(c, ["memory"])),
            *_build_table(
                "Memory by line", "", comparison_text.figures_of(c, ["memory by line"])[:_MAX_LINES]
            ),
            *_build_findings(c),
            *predicted_gain(c),
            *_build_table(
                "Device work",
                f"device work{comparison_text.per_suffix(c)}",
                [line for line in work if line not in noise],
                aside=window,
            ),
            *_build_next_step(c),
            *_build_folded(c, noise, window),
        ],
        name="comparison",
        status={"slower": "critical", "faster": "healthy"}.get(verdict, "limited"),
        style=_STYLE.get(verdict, "bold"),
        badge=comparison_text.write_badge(c),
    )


def _name_durations(c: Comparison) -> tuple[str, str]:
    """Return the title of the table of durations, and the heading of their names."""
    if comparison_text.has_guessed_steps(c):
        return "Repetition times", "repetition"
    return "Step times", "step time"


def _list_limits(c: Comparison) -> Iterator[d.Block]:
    if c.limits:
        yield d.Items([d.Span(limit, "warn") for limit in c.limits], "!")


def _build_table(
    title: str,
    first: str,
    lines: list[comparison_text.ComparedFigure],
    notes: Sequence[d.Paragraph] = (),
    *,
    above: Sequence[d.Block] = (),
    short: bool = False,
    aside: str = "",
) -> Iterator[d.Section]:
    """Build a table of figures side by side. ``first``: the heading of their names."""
    looks: dict[str, d.Style] = {"better": "good", "worse": "bad"}
    rows: list[list[d.Inline]] = [
        [line.label, *line.texts, d.Span(line.change, looks.get(line.verdict, ""))]
        for line in lines
    ]
    if rows:
        head = [first, "before", "after", "difference"]
        yield d.Section(title, [*above, d.Grid(head, rows), *notes], aside, short=short)


def _build_folded(
    c: Comparison, noise: list[comparison_text.ComparedFigure], window: str
) -> Iterator[d.Section]:
    """Build the figures with negligible changes, and the method of the interval."""
    aside = ": ".join(filter(None, [window, comparison_text.NOISE]))
    for section in _build_table("Within noise", "", noise, aside=aside):
        count = count_noun(len(noise), "figure")
        yield replace(section, folded=True, summary=f"{count} within noise")
    for method in comparison_text.interval_method(c.steps):
        yield d.Section("Statistics", [d.Paragraph(method)], folded=True, summary="statistics")


_KINDS: Final[dict[str, charts.Kind]] = {"time": "work", "idle": "idle", "host": "host"}


def _build_bars(c: Comparison) -> list[ComparedBars]:
    """Return the step's bar before and after. Empty if a side has no breakdown."""
    lines = [line for line in comparison_text.breakdown_lines(c) if line.group in _KINDS]
    if any(line.group == "idle" for line in lines):
        lines = [line for line in lines if (line.group, line.name) != ("time", "idle")]
    sides = [
        (
            name,
            step_ns,
            [
                Segment(
                    "idle" if line.name == "idle" else _KINDS[line.group],
                    line.name,
                    line.label.removeprefix("– "),
                    charts.OTHER_LOOK,  # a page colours by kind and key
                    ns,
                    ns / step_ns,
                )
                for line in lines
                if (ns := getattr(line, name))
            ],
        )
        for name, step_ns in (("before", c.before.step_ns), ("after", c.after.step_ns))
        if step_ns
    ]
    both = len(sides) == 2 and all(parts for _, _, parts in sides)
    return [ComparedBars(sides)] if both else []


def _build_findings(c: Comparison) -> Iterator[d.Block]:
    lists = []
    for title, items in comparison_text.group_findings(c):
        shown: list[d.Inline] = [
            (first, d.Span("".join(f" · {part}" for part in rest), "soft"))
            for first, *rest in (
                comparison_text.describe_finding(item, comparison_text.per_suffix(c))
                for item in items
            )
        ]
        lists.append(d.Items(shown, "∙", f"{title} ({len(items)})"))
    if lists:
        yield d.Section("Findings", lists, short=True)


def _build_next_step(c: Comparison) -> Iterator[d.Section]:
    if text := comparison_text.next_fix(c):
        yield d.Section("What to change next", [d.Paragraph(text)], short=True)


def predicted_gain(c: Comparison) -> Iterator[d.Section]:
    """Yield the predicted gain of the fixed findings, next to the measured one."""
    lines = comparison_text.describe_realised_gain(c)
    if lines:
        yield d.Section("Predicted and measured gain", [d.Paragraph(line) for line in lines])


# -- the decision of a gate ---------------------------------------------------------------------


def _build_gate(c: Comparison, decision: Decision) -> d.Document:
    """Build a gate's blocks: the answer first, then the reason."""
    passed = decision.answer == "passed"
    mark = "❌" if decision.failed else "✅" if passed else "⚠️"
    answer = comparison_text.HEADLINES[decision.answer]
    return d.Document(
        comparison_text.write_headline(c),
        [
            d.Items([*decision.reasons, comparison_text.gate_sensitivity(c)], "-"),
            *_list_limits(c),
            _build_gate_table(c),
            *_build_gate_findings(c),
            d.Section(
                "Statistics",
                [d.Items(comparison_text.gate_method(c.steps), "-")],
                folded=True,
                summary="statistics and caveats",
            ),
        ],
        name="decision",
        status="critical" if decision.failed else "healthy" if passed else "limited",
        style="bold red" if decision.failed else "bold green" if passed else "bold yellow",
        badge=f"{mark} {answer}",
        heading=f"{mark} advisor gate: {answer.lower()}",
        notes=[f"exit code {int(decision.failed)}"],
    )


def _build_gate_table(c: Comparison) -> d.Grid:
    steps = c.steps
    change = t.format_share_change(steps.share)
    rows = [[f"step ({steps.statistic})", *comparison_text.format_step_times(steps), change]]
    for item in comparison_text.gate_figures(c):
        share = None
        if item.before and item.after is not None:
            share = item.after / item.before - 1
        sides = format_value(item.before, item.unit), format_value(item.after, item.unit)
        rows.append([item.name, *sides, t.format_share_change(share)])
    return d.Grid(["", "baseline", "this run", "difference"], rows)


def _build_gate_findings(c: Comparison) -> Iterator[d.Block]:
    for what, items in comparison_text.gate_findings(c):
        shown: list[d.Inline] = [
            (item.title, f" ({item.place})" if item.place else "", " ", d.Span(item.rule, "code"))
            for item in items
        ]
        if shown:
            yield d.Items(shown, "∙", f"{what.capitalize()} findings:")
