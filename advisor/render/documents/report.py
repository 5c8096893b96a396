"""Document of a report: where the time goes, what to change, and other results."""

from collections.abc import Iterator, Sequence
from typing import Final, get_args

from advisor.advise import finding_text, gain_reasons, report_charts, report_text
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import Finding, MissingData
from advisor.core.report import Report
from advisor.core.rule import Evidence
from advisor.render import document as d
from advisor.render.documents import auxiliary_sections, inference, memory, ranks
from advisor.render.figures import Bar, FixSequenceFigure, StepTimeline

_MAX_RANKS: Final = 8
"""Maximum number of ranks in a terminal: those that the others wait for longest."""
MIN_POSSIBLE_SHARE: Final = 0.05
"""Minimum share of the step at which a possible gain is named although notes are only counted."""
MAX_NOTES: Final = 100
MISSING_DATA: Final = get_args(MissingData)
_STYLE: Final = {
    "bottlenecks": "bold yellow",
    "healthy": "bold green",
    "limited": "bold",
    "critical": "bold red",
}
_SHORT_FIGURES: Final = ("GPU", "ops", "ranges", "idle", "path", "no fix")
"""Figures next to the bar that are shown if space is short."""
_SPARE: Final = {"host": 1, "energy": 1, "no fix": 2, "path": 1, "idle": 5, "ranges": 4, "ops": 4}
"""Levels at which a terminal starts to leave lines out to fit a screen."""
_MIN_PARTS: Final = {
    "trace": 4, "steps": 3, "host": 2, "path": 1, "window": 4, "GPU": 3, "ops": 2, "idle": 2,
}  # fmt: skip
"""Minimum number of parts of a line then, or one less on the fullest page."""
_LISTS: Final = ("host", "path", "ops")
"""Lines whose parts are shares of one whole."""


def build(report: Report, options: d.RenderOptions = d.DEFAULT) -> d.Document:
    """Build the document. ``options`` may contain the measurements for a timeline. Folded sections
    come after the fixes."""
    context = [
        *inference.sections(report),
        *_build_ranks(report),
        *ranks.build_mesh_sections(report),
        *memory.sections(report),
        *auxiliary_sections.build_kernel_sections(report),
        *auxiliary_sections.build_compilation(report.compilation, report),
        *auxiliary_sections.build_flight_record(report.flight),
        *auxiliary_sections.build_network_path(report.network),
    ]
    ranked = finding_text.ranked_findings(report)
    on_demand = [block for block in context if isinstance(block, d.Section) and block.folded]
    return d.Document(
        report.verdict,
        [
            d.FieldList(
                [
                    d.TextField(
                        label,
                        parts,
                        spare=_SPARE.get(label, 0),
                        min_parts=_count_kept(label, parts, report),
                        is_list=label in _LISTS,
                        quoted=label == "host" and report_text.quotes_phase(report),
                    )
                    for label, parts in report_text.describe_scope(report)
                ],
                indent=0,
            ),
            *_build_tiles(report),
            *_build_time(report, options),
            *_build_findings(report, options.width),
            *(block for block in context if block not in on_demand),
            *ranks.build_what_if(report),
            *_build_remaining(report, on_demand),
        ],
        name="report",
        status=report_text.status_class(report),
        style=_STYLE[report_text.status_class(report)],
        action=t.first_sentence(labels.clean(ranked[0].fix)) if ranked else "",
        badge=report_text.describe_status(report),
        footer=f"advisor {report.version} · {report.schema}",
    )


# -- where the time goes ------------------------------------------------------------------------


def _count_kept(label: str, parts: Sequence[str], report: Report) -> int | None:
    """Return the number of parts of a line to keep, as in ``TextField.min_parts``. A full page
    leaves out what the verdict says too, and the fullest one a run's samples per second."""
    if label != "run":
        return _MIN_PARTS.get(label)
    kept = len(parts) - len(report_text.list_repeated_parts(report))
    if parts[kept - 1].endswith(report_text.SAMPLE_RATE):
        return kept
    return kept + 1 if kept < len(parts) else None


def _build_tiles(report: Report) -> Iterator[d.Block]:
    """Build the figures of merit, for a page."""
    if report.scope.has_no_step_time:
        return
    yield d.Tiles(report_text.figures_of_merit(report))


def _build_time(report: Report, options: d.RenderOptions) -> Iterator[d.Block]:
    bar = report_charts.build_step_bar(report)
    if bar is None:
        return
    ranges_in_bar = tuple(f"{s.label} " for s in bar.segments if s.key.startswith("range "))
    rows = [
        d.TextField(
            label,
            [part for part in parts if label != "ranges" or not part.startswith(ranges_in_bar)],
            detail=label not in _SHORT_FIGURES,
            spare=_SPARE.get(label, 0),
            min_parts=_MIN_PARTS.get(label),
            is_list=label in _LISTS,
            quoted=label == "ops" and report_text.quotes_operator(report),
        )
        for label, parts in report_text.headline_numbers(report)
    ]
    drawn = Bar(bar, _build_timeline(report, options))
    yield d.Section(bar.title, [drawn, d.FieldList(rows)], bar.aside, short=True)


def _build_timeline(report: Report, options: d.RenderOptions) -> StepTimeline | None:
    """Return one step with one lane per stream, or ``None`` without ``options.analysis``."""
    if options.analysis is None:
        return None
    from advisor.measure.steps.step_lanes import build_step_lanes

    lanes = build_step_lanes(options.analysis)
    if lanes is None:
        return None
    title = "The recording"
    if report.per == "step":
        which = "A typical step" if report.scope.steps_used > 1 else "The step"
        title = f"{which}: {options.clean(lanes.step)}"
    title = f"{title}, {t.format_duration(lanes.dur_ns)}"
    outside = any(part.outside_operators for part in report.idle)
    return StepTimeline(title, lanes, report.scope.framework, t.format_of(report.per), outside)


def _build_ranks(report: Report) -> Iterator[d.Block]:
    differs = report.step is not None and report.step.window_differs
    table, short = (
        report_charts.build_rank_table(report),
        report_charts.build_rank_table(report, _MAX_RANKS),
    )
    if table is not None and short is not None:
        shown = d.Grid(
            table.head,
            [row.cells for row in table.rows],
            align="r" * len(table.head),
            short=[row.cells for row in short.rows],
            omitted_note=short.more,
        )
        notes = [d.Paragraph(table.more, "soft")] if table.more else []
        notes += [d.Paragraph(table.note, "soft", spare=1)] if table.note else []
        per = "per profiled step" if differs else t.format_per(report.per)
        aside = f"{table.total} recorded, times {per}"
        aside += "; arrives last: share of collectives" * ("arrives last" in table.head)
        yield d.Section("Ranks", [shown, *notes], aside)
    if report.ranks is not None:
        from advisor.render.documents.ranks import sections

        yield from sections(report.ranks)


# -- what to do ---------------------------------------------------------------------------------


def _build_findings(report: Report, width: int) -> Iterator[d.Block]:
    ranked = finding_text.ranked_findings(report)
    if ranked:
        outlook = report_text.describe_all_fixes(report)
        spare = 5 if report_text.format_speedup(report) in report.verdict else 0
        lead: list[d.Block] = [d.Paragraph(outlook, "soft", spare=spare)] if outlook else []
        shared = finding_text.shared_caveats(ranked)
        if shared:
            caveats = d.TextField(
                "caveats", [f"of several fixes: {'; '.join(shared)}"], detail=True
            )
            lead.append(d.FieldList([caveats]))
        largest = finding_text.largest_fix(report)
        result = [
            _build_card(report, finding, width, shared, main=finding is largest)
            for finding in ranked
        ]
        of_step = report.per == "step" and bool(finding_text.fixes_of_step(report))
        each = "gain per step" if of_step else "gain"
        each += ", of each fix alone" * report_text.gains_overlap(report)
        each += ", in the order to make them" * (not report_text.gains_fall(report))
        title = "What to change" if finding_text.has_large_gain(report) else "Small gains"
        yield d.Section(title, [*lead, *result], each)
    fix_sequence = report_charts.build_fix_sequence(report)
    if fix_sequence is not None and len(fix_sequence.fixes) > 1:
        title = "Step time after each fix"
        yield d.Section(
            title, [FixSequenceFigure(fix_sequence)], detail=True, summary=title.lower()
        )
    if report.risks:
        cards = [_build_card(report, finding, width, fix=not ranked) for finding in report.risks]
        lost = any(each.impact is not None and bool(each.impact.gain_ns) for each in report.risks)
        title = "Risks, and time lost over the run" if lost else "Memory and risks"
        counted = t.count_noun(len(cards), "risk")
        grave = not ranked or any(each.severity == "critical" for each in report.risks)
        yield d.Section(title, cards, summary=counted, spare=0 if grave else 4)


def _build_card(
    report: Report,
    finding: Finding,
    width: int,
    shared: Sequence[str] = (),
    *,
    fix: bool = True,
    main: bool = False,
) -> d.Card:
    """Build a finding's card: what, gain, where, why, how, with evidence and caveats on demand.
    ``shared``: caveats shown above all cards. ``fix``, ``main``: as in ``Card``."""
    impact = finding.impact
    why = finding_text.describe_evidence(finding, report.verdict)
    is_quoted = impact is not None and bool(impact.reason) and impact.reason in report.verdict
    fields = [
        *_list_notes(report, finding),
        *_list_places(report, finding, width),
        d.TextField("why", [why], prose=True, quoted=is_quoted),
        d.TextField("fix", [finding.fix], "strong", prose=True, spare=0 if fix else 2),
    ]
    # a command that the verdict gives is not repeated
    has_code = bool(finding.code) and finding.code not in report.verdict
    code: list[d.Block] = [d.Code(finding.code)] if has_code else []
    share = t.format_share(finding.confidence)
    unsure = finding_text.is_unsure(finding)
    sure = (
        finding_text.POSSIBLE.format(share) if unsure else f"advisor is {share} sure of the cause"
    )
    confidence = [sure, finding.severity]
    if finding.validation == "synthetic":
        confidence.append("not proven on real traces")
    said = [*shared, *finding_text.gain_conditions(finding, report)]
    covered = [
        finding_text.covered_line(finding, other)
        for other in finding_text.folded_findings(report, finding)
    ]
    return d.Card(
        finding.title,
        [d.FieldList(fields, indent=4), *code],
        number="" if finding.priority is None else str(finding.priority),
        gain=finding_text.describe_gain(finding, report),
        place=" · ".join(t.location_names(finding.where[0])[:1]) if finding.where else "",
        tag=finding.severity,
        details=[
            d.EvidenceList([_build_fact(item) for item in finding.evidence]),
            d.FieldList(
                [
                    d.TextField("cause", [part for part in confidence if part]),
                    *(d.TextField(label, [text]) for label, text in covered),
                    d.TextField("verify", [finding.verify]),
                    d.TextField(
                        "caveats",
                        ["; ".join(finding_text.describe_caveats(finding, said))],
                        "soft",
                    ),
                    *(
                        d.TextField("" if number else "read", [reference], "soft")
                        for number, reference in enumerate(finding.references)
                    ),
                ],
                indent=4,
            ),
        ],
        fix=fix,
        main=main,
        brief=fix and finding_text.is_small(finding),
    )


def _list_notes(report: Report, finding: Finding) -> Iterator[d.TextField]:
    """Yield the conditions of a gain. A screen leaves minor ones out first, the first one last; it
    keeps that of a fix that may gain little."""
    may_gain_little = finding_text.may_gain_little(finding)
    minor = finding_text.minor_conditions(finding, report)
    optional = () if may_gain_little else gain_reasons.range_reasons(finding, report)
    for number, note in enumerate(finding_text.gain_conditions(finding, report)):
        last_level = 0 if may_gain_little else 6
        spare = 3 if note in minor else 4 if number or note in optional else last_level
        label = "" if number else "note"
        yield d.TextField(label, [note], "warn", spare=spare, is_note=True)


def _list_places(report: Report, finding: Finding, width: int) -> Iterator[d.TextField]:
    """List the places, worst first, one line each, and how to record a missing line. ``width``:
    columns of a page."""
    names_width, path_width = max(48, width - 32), max(60, width - 20)
    places = finding_text.named_places(finding, name_width=names_width, path_width=path_width)
    for number, (location, names) in enumerate(places):
        full_names = t.location_names(location, name_width=2000, path_width=2000)
        parts: list[d.Inline] = [
            d.Span(name, "code", full) for name, full in zip(names, full_names, strict=True)
        ]
        steps, time_ns = (
            finding_text.counted_steps(report),
            finding_text.host_operator_time(report, finding),
        )
        parts += t.location_figures(location, steps, report.per, time_ns)
        if parts:
            yield d.TextField("" if number else "where", parts, detail=number > 0, min_parts=2)
    if missing := finding_text.line_not_recorded(report, finding):
        yield d.TextField("" if places else "where", [missing], "soft")


def _build_fact(item: Evidence) -> d.EvidenceRow:
    limit = ""
    if item.threshold is not None:
        source = f" ({labels.clean(item.source)})" if item.source else ""
        limit = f"{t.format_value(item.threshold, item.unit)}{source}"
    return t.evidence_label(item), t.format_value(item.value, item.unit), limit


# -- what else there is -------------------------------------------------------------------------


def _build_remaining(report: Report, on_demand: Sequence[d.Block]) -> Iterator[d.Block]:
    if report.notes:
        large = [note for note in report.notes if finding_text.is_large_note(note, report)]
        listed_notes = [
            n for n in report.notes if n in large or finding_text.is_notable_note(n, report)
        ]
        others = [note for note in report.notes if note not in listed_notes]
        notes = [_describe_note(note) for note in others[:MAX_NOTES]]
        counted = t.count_noun(len(others), "note")
        gains = [(n.impact.share or 0.0, n.title) for n in others if n.impact is not None]
        most, title = max(gains, default=(0.0, ""))
        if most >= MIN_POSSIBLE_SHARE:
            counted += f" with a possible gain of up to {t.format_share(most)} ('{title}')"
        if report.scope.has_no_step_time:  # without a step nothing is ranked
            items = [
                (f"{note.title}. ", d.Span(f"{note.summary} {note.fix}")) for note in report.notes
            ]
            counters = bool(report.kernel_counters)
            title = "What the counters show" if counters else "What to change"
            yield d.Section(title, [d.Items(items)], "the largest first" if len(items) > 1 else "")
        else:
            if listed_notes:
                cards = [
                    _describe_note(n, large=n in large, row=n not in large) for n in listed_notes
                ]
                yield d.Section("Large but unproven", cards)
            if notes:
                yield d.Section("Notes", notes, folded=True, summary=counted)
    yield from on_demand
    yield from auxiliary_sections.build_profiler_advice(report)
    if report.hot_lines:
        rows: list[Sequence[d.Inline]] = [
            [d.Span(place, "code"), share, d.Span(text, "code")]
            for share, place, text in finding_text.hot_lines(report)
        ]
        table = d.Grid(["line", "CPU time", ""], rows, align="lrl")
        counted = t.count_noun(len(rows), "hot Python line")
        aside = "from a separate run under Scalene"
        yield d.Section("Hot Python lines", [table], aside, folded=True, summary=counted)
    yield from checks(report)
    if report.limits:
        name = report.main_limit
        yield _build_counted_list("Limits of this trace", report.limits, "!", "limit", name)
    closing = report_text.define_gains(report)
    if closing:
        paragraphs = [d.Paragraph(line, "soft") for line in closing]
        yield d.Section(
            "How gains are estimated", paragraphs, folded=True, summary="how gains are estimated"
        )


def checks(report: Report) -> Iterator[d.Section]:
    """Build the passed checks, and the skipped checks with their reasons."""
    if report.passed:
        good = [item.text for item in report.passed]
        yield _build_counted_list("Passed checks", good, "✓", "passed check", spare=1)
    skipped: list[d.Inline] = [
        (f"{what}: ", d.Span(why, "soft"))
        for what, why in report_text.describe_skipped_checks(report)
    ]
    if skipped:
        missing = min((item.missing for item in report.not_checked), key=MISSING_DATA.index)
        name = "" if report.main_limit else missing
        yield _build_counted_list("Skipped checks", skipped, "?", "skipped check", name)


def _build_counted_list(
    title: str, items: Sequence[d.Inline], mark: str, noun: str, name: str = "", *, spare: int = 0
) -> d.Section:
    """Build a folded list. A terminal shows its length and the name of its most important item."""
    summary = t.count_noun(len(items), noun) + f" ({name})" * bool(name)
    return d.Section(title, [d.Items(items, mark)], folded=True, summary=summary, spare=spare)


def _describe_note(finding: Finding, *, large: bool = False, row: bool = False) -> d.Card:
    """Describe a possible finding: why it is not ranked, and what it could gain. In a ``row``, the
    gain is next to the title."""
    gain = finding_text.note_gain(finding)
    fields = [
        d.TextField("note", [finding_text.explain_note(finding)]),
        d.TextField("why", [finding.summary]),
        d.TextField("gain", ["" if row else gain]),
        d.TextField("fix", [finding.fix], prose=row, spare=4 if row else 0),
    ]
    field_list = d.FieldList([f for f in fields if f.parts[0]], indent=4)
    possible = gain.replace("if so,", "possibly") if row else ""
    return d.Card(finding.title, [field_list], gain=possible, fix=False, always_full=large)
