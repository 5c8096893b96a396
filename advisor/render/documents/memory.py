"""Document of a memory snapshot, one section per device."""

from collections.abc import Sequence
from pathlib import PurePath
from statistics import median
from typing import Final, NamedTuple

from advisor.advise.memory import RECORD_HISTORY, large_savings
from advisor.core import labels
from advisor.core import text as t
from advisor.core.memory_changes import advise_change
from advisor.core.report import Report
from advisor.core.report_memory import MemoryHolder, MemorySample, MemoryView, ModuleMemory
from advisor.render import document as d
from advisor.render.figures import Sizes

_MAX_ROWS: Final = 25
"""Maximum number of rows of a table."""
_MAX_SHORT: Final = 8
"""Maximum number of rows of a table if space is short."""
MIN_SHORT, MIN_SAVINGS = 3, 4
"""Minimum number of rows on a page longer than a screen, and of the cheapest savings."""
NO_LINE: Final = "line not recorded"
"""Place of memory with an unknown stack."""
_MAX_SAVINGS: Final = 8
_MAX_DEVICES: Final = 8
MAX_SAME_DIFFERENCE: Final = 0.01
"""Maximum relative difference of two devices' memory at which they are shown once."""


class DeviceMemory(NamedTuple):
    """Memory of a device as text: title, lines and tables."""

    title: str
    aside: str
    lines: list[tuple[str, list[str]]]
    """Lines: labels with their parts."""
    tables: list[d.Grid]
    """Tables, the most important ones first."""


def sections(report: Report) -> list[d.Block]:
    """Build the sections on what held each device's memory, and on the allocator's layout."""
    blocks: list[d.Block] = [*_compare_ranks(report.memory_ranks)]
    similar = [view for view in report.memory[1:] if _is_similar(view, report.memory[0])]
    for device, view in zip(describe_devices(report), report.memory, strict=False):
        if view in similar or (view.source == "trace" and _is_useless(view, report)):
            continue
        fields = d.FieldList(
            [
                d.TextField(
                    label,
                    parts,
                    detail=label == _BASIS or (label == "steps" and not view.step_source),
                    spare=_SPARE.get(label, 0),
                    min_parts=3 if label == "held" else None,
                )
                for label, parts in device.lines
            ]
        )
        first: list[d.Block] = [_build_sizes(view)]
        tables = [each for each in device.tables if not _is_folded(each)]
        first += tables
        listed = [
            row for each in tables for row in (each.rows if each.short is None else each.short)
        ]
        if any(str(row[0]).startswith(NO_LINE) for row in listed):
            why = "made before the history began, or by autograd's own thread"
            if not view.events or view.at == "snapshot":
                why = "the snapshot has no history of allocations"
            first.insert(2, d.Paragraph(f"'{NO_LINE}': {why}.", "soft", spare=1))
        rest: list[d.Block] = [each for each in device.tables if _is_folded(each)]
        if view.savings:
            first += _advised_savings(view, report)
            rest.append(d.Items(assumptions(view), title="What these savings assume"))
        if view is report.memory[0] and similar:
            which = t.count_noun(len(similar), "more GPU")
            first.append(d.Paragraph(f"{which} held as much of the same, within 1%.", "soft"))
        if view.source == "trace":
            counted = "" if view is not report.memory[0] else "what held the memory at its peak"
            body: list[d.Block] = [fields, *first, *rest]
            blocks.append(d.Section(device.title, body, device.aside, folded=True, summary=counted))
            continue
        blocks.append(d.Section(device.title, [fields, *first], device.aside))
        if rest:
            more = "modules, " if view.modules else ""
            counted = f"{more}allocations per step, segments and what savings assume"
            title = f"{device.title}: details"
            blocks.append(d.Section(title, rest, folded=True, summary=counted))
    return blocks


def _build_sizes(view: MemoryView) -> Sizes:
    """Draw the memory held by category, and if known also the memory held and free at the end."""
    bins = [(each.category, each.bytes) for each in _list_categories(view)]
    if view.at == "peak" and view.end_free:
        bins.append(("in the end: in tensors", view.end_allocated or 0))
        bins.append(("in the end: reserved but free", view.end_free))
    return Sizes("memory", bins)


def _list_categories(view: MemoryView) -> list[MemoryHolder]:
    return [
        each for each in view.categories if each.bytes >= _MIN_LISTED_SHARE * max(view.allocated, 1)
    ]


MIN_CAPACITY_SHARE: Final = 0.1
"""Minimum share of the GPU's memory at the peak at which a trace's table is shown."""
MIN_ATTRIBUTED_SHARE: Final = 0.05
"""Minimum share of memory with a known category at which a trace's table is shown."""
_MIN_LISTED_SHARE: Final = 0.001
"""Minimum share of the memory held at which a category is listed."""
_MIN_LINE_SHARE: Final = 0.02
"""Minimum share of the memory held at which a terminal lists a line."""
MIN_HELD_BYTES: Final = 1 << 30
"""Minimum bytes at the peak at which a trace's table is shown if the capacity is unknown."""


def _is_useless(view: MemoryView, report: Report) -> bool:
    """Return whether a table would be useless: little memory is held, or its categories are
    unknown."""
    capacity = report.memory_capacity_bytes
    least = MIN_HELD_BYTES if capacity is None else MIN_CAPACITY_SHARE * capacity
    attributed = sum(
        each.bytes for each in view.categories if each.category not in ("none", "not attributed")
    )
    unknown = attributed < MIN_ATTRIBUTED_SHARE * view.allocated
    return unknown or max(view.allocated, report.memory_peak_bytes or 0) < least


def _is_folded(table: d.Grid) -> bool:
    return table.title.startswith(_FOLDED)


def _advised_savings(view: MemoryView, report: Report) -> list[d.Block]:
    """Explain the cheapest change, or the cheapest sufficient one for a failed request. If memory
    is not short yet, also explain the one that frees most. If each step leaves tensors behind,
    explain the change to that line, as memory would run out otherwise. Code of a finding is not
    repeated."""
    growing = {(each.file, each.line) for each in view.growth}
    leaks = [each for each in view.savings if (each.file, each.line) in growing]
    needed = (view.request or 0) - (view.driver_free or 0)
    enough = [each for each in view.savings if each.bytes >= needed]
    advised = [("first", (leaks or enough or view.savings)[0])]
    if view.request is None and not leaks and (large := large_savings(view)):
        advised += [("larger", large[1])] if large[1] is not advised[0][1] else []
    blocks: list[d.Block] = []
    for label, saving in advised:
        text, code = advise_change(saving.change, view.trains)
        if leaks and saving.change == "references":
            text, code = "Release what the line leaves behind in each step", ""
        if saving.file is not None:
            text += f": {shorten(saving.file)}:{saving.line}"
        if not code or not any(code.strip() in risk.code for risk in report.risks):
            blocks.append(d.FieldList([d.TextField(label, [text], "strong")]))
            blocks += [d.Code(code, indent=2)] if code else []
    if view.source == "timeline":
        blocks.append(d.FieldList([d.TextField("record", [_SNAPSHOT], "strong")]))
        blocks.append(d.Code(_SNAPSHOT_CODE, indent=2))
    return blocks


_SNAPSHOT: Final = "A snapshot, for lines and for what other changes free"
_SNAPSHOT_CODE: Final = (
    f"# at the program's start\n{RECORD_HISTORY}\n"
    '# after the peak\ntorch.cuda.memory._dump_snapshot("memory.pickle")'
)


def _is_similar(view: MemoryView, first: MemoryView) -> bool:
    """Return whether both hold the same categories, and the same bytes to within 1%."""
    return (
        abs(view.allocated - first.allocated) <= MAX_SAME_DIFFERENCE * first.allocated
        and [each.category for each in view.categories]
        == [each.category for each in first.categories]
        and (view.at, view.source) == (first.at, first.source)
    )


def _compare_ranks(samples: list[MemorySample]) -> list[d.Block]:
    """Compare the ranks: which hold more than most, and in which category."""
    if not samples:
        return []
    typical = median(each.allocated for each in samples)
    rows = []
    for each in sorted(samples, key=lambda each: -each.allocated)[:_MAX_ROWS]:
        more = each.allocated - typical
        far = more if abs(more) >= 0.01 * typical else 0
        rows.append(
            [each.name, t.format_bytes(each.allocated), t.format_bytes(each.reserved),
             t.format_bytes_change(far) if far else "",
             _find_difference(each, samples) if far else ""]
        )  # fmt: skip
    head = ["rank", "in tensors", "reserved", "over the median", "most of it"]
    return [d.Section("Memory by rank", [d.Grid(head, rows, align="<>>><")], "each at its peak")]


def _find_difference(own: MemorySample, samples: list[MemorySample]) -> str:
    """Return the category by which a rank differs most from the median."""

    def held(of: MemorySample) -> dict[str, int]:
        return {each.category: each.bytes for each in of.categories}

    names = {name for each in samples for name in held(each)}
    more = {n: held(own).get(n, 0) - median(held(s).get(n, 0) for s in samples) for n in names}
    name = max(sorted(more), key=lambda n: abs(more[n]))
    return f"{name} {t.format_bytes_change(more[name])}"


def describe_devices(report: Report, rows: int = _MAX_ROWS) -> list[DeviceMemory]:
    """Describe each device of the snapshot, at most ``_MAX_DEVICES``."""
    devices = report.memory[:_MAX_DEVICES]
    return [describe_device(view, rows, named=len(report.memory) > 1) for view in devices]


_CHURN = "Allocated and freed within a step"
POOLS: Final = "Segments, when the snapshot was taken"
_MODULES = "By module, those inside it included"
_FOLDED = (_MODULES, _CHURN, POOLS)
_BASIS = "known by"
_SPARE: Final = {"failed": 1, "steps": 2, "end": 2, "by": 4}
"""Levels at which a terminal starts to leave lines out to fit a screen."""


def describe_device(
    view: MemoryView, rows: int = _MAX_ROWS, *, named: bool = False
) -> DeviceMemory:
    """Describe one device. ``named``: include its number."""
    title = f"What held GPU {view.device}'s memory" if named else "What held the memory"
    if view.device < 0:
        title = "What held the host's memory"
    moments = {"out of memory": "when it ran out", "peak": "at its peak"}
    moment = moments.get(view.at, "in the snapshot")
    when = moments.get(view.at, f"{moment}, without a history")
    peak = f"peak {t.format_bytes(view.peak)}" if view.peak != view.allocated else ""
    total = max(view.allocated, 1)
    by = [
        f"{each.category} {t.format_bytes(each.bytes)} {t.format_share(each.bytes / total)}"
        for each in _list_categories(view)
    ]
    if [each.category for each in _list_categories(view)] == ["not attributed"]:
        by = ["nothing in the snapshot shows what these tensors are for"]
    amounts = [
        f"{t.format_bytes(view.allocated)} in tensors",
        f"{t.format_bytes(view.reserved)} reserved" if view.reserved else "",
        peak,
        f"from {t.shorten_path(view.file, 40)}" if view.file else "",
    ]
    lines = [("held", amounts), ("by", by), (_BASIS, _list_bases(view)),
             ("failed", [view.placement]), ("end", _describe_end(view)),
             ("steps", _describe_steps(view))]  # fmt: skip
    fields = [(label, [part for part in parts if part]) for label, parts in lines]
    return DeviceMemory(
        title,
        when,
        [(label, parts) for label, parts in fields if parts],
        [table for table in _build_tables(view, rows, moment) if table.rows],
    )


def _build_tables(view: MemoryView, rows: int, moment: str) -> list[d.Grid]:
    """Return a device's tables, most important first."""
    freed = "of the peak (cheapest in step time first; savings overlap)"
    if view.at == "out of memory":
        lack = (view.request or 0) - (view.driver_free or 0)
        freed = f"where memory ran out (the request lacked {t.format_bytes(lack)})"
    return [
        _build_table(
            f"By line, {moment}",
            ["line · category", "bytes", "share", "blocks"],
            _build_held(view),
            rows,
            terminal_rows=_list_lines(view),
        ),
        modules(view, rows, moment),
        _build_table(
            "Left behind by each step and held to the end",
            ["line", "per step", "steps"],
            _build_lines(view.growth),
            rows,
        ),
        _build_table(
            "Over the run",
            ["snapshot", "in tensors", "reserved"],
            [
                [
                    labels.clean(each.name),
                    t.format_bytes(each.allocated),
                    t.format_bytes(each.reserved),
                ]
                for each in view.series
            ],
            rows,
        ),
        _build_table(
            f"More in each snapshot, per {view.grows_per}",
            ["line · category", "bytes", "blocks"],
            _build_lines(view.grows, categories=True),
            rows,
        ),
        _build_table(
            f"What a change frees {freed}",
            ["change", "frees", "cost"] + ["line"] * _has_lines(view),
            _build_savings(view),
            rows,
            "lrrl"[: 3 + _has_lines(view)],
            terminal_rows=_list_named(view),
            least=None,
        ),
        _build_table(_CHURN, ["line", "per step", "times"], _build_churn(view), rows),
        _build_table(
            POOLS,
            ["pool", "number", "reserved", "in tensors", "free", "largest piece"],
            _build_segments(view),
            rows,
        ),
    ]


def _list_bases(view: MemoryView) -> list[str]:
    """List the share of memory by the evidence for its categories."""
    return [
        f"{each.category} {t.format_share(each.bytes / max(view.allocated, 1))}"
        for each in sorted(view.bases, key=lambda each: -each.bytes)
        if each.category != "none" and each.bytes >= _MIN_LISTED_SHARE * 5 * max(view.allocated, 1)
    ]


def _build_table(
    title: str,
    head: list[str],
    rows: list[list[str]],
    limit: int,
    align: str = "",
    terminal_rows: Sequence[int] | None = None,
    least: int | None = MIN_SHORT,
) -> d.Grid:
    """Return a table. ``terminal_rows``: the rows that a terminal shows; ``least``: the
    number of them that it keeps to fit a screen."""
    rows = rows[:limit]
    short = (
        rows[:_MAX_SHORT]
        if terminal_rows is None
        else [rows[n] for n in terminal_rows if n < len(rows)]
    )
    return d.Grid(head, rows, title, align=align, short=short, min_rows=least)


def _list_lines(view: MemoryView) -> list[int]:
    """Return the indices of the largest rows with a line, as the categories are shown above. Of
    figures that contradict each other, return none."""
    if view.reserved and view.allocated > view.reserved:
        return []
    least = _MIN_LINE_SHARE * max(view.allocated, 1)
    lines = [n for n, each in enumerate(view.held) if each.file or each.function]
    return [n for n in lines if view.held[n].bytes >= least][:_MAX_SHORT]


def _list_named(view: MemoryView) -> list[int]:
    """Return the indices of the cheapest savings, and of savings in the verdict."""
    listed = view.savings[:_MAX_SAVINGS]
    named = large_savings(view) or ()
    return [n for n, each in enumerate(listed) if n < MIN_SAVINGS or each in named]


def _build_held(view: MemoryView) -> list[list[str]]:
    if not any(each.file or each.function for each in view.held):
        return []  # categories without lines are shown above
    allocated_bytes = max(view.allocated, 1)
    rows = []
    for each, row in zip(view.held, _build_lines(view.held, categories=True), strict=True):
        label = f" · {labels.clean(each.label)}" if each.label else ""
        rows.append([row[0] + label, row[1], t.format_share(each.bytes / allocated_bytes), row[2]])
    return rows


def _build_churn(view: MemoryView) -> list[list[str]]:
    return (
        _build_lines(view.churn) if any(each.file or each.function for each in view.churn) else []
    )


def modules(view: MemoryView, limit: int = _MAX_ROWS, moment: str = "") -> d.Grid:
    """Build the ``limit`` largest modules as a tree, and memory allocated outside them."""
    depth: list[int] = []
    for each in view.modules:
        depth.append(0 if each.parent is None else depth[each.parent] + 1)
    largest = sorted(range(len(depth)), key=lambda place: (-view.modules[place].bytes, place))
    outermost = sum(each.bytes for each in view.modules if each.parent is None)
    total = max(view.allocated, 1)

    def row(name: str, size: int, own: int, blocks: str) -> list[str]:
        return [name, *map(t.format_bytes, (size, own)), t.format_share(size / total), blocks]

    rows = [
        row("  " * depth[place] + _module_name(each), each.bytes, each.own_bytes,
            t.format_count(each.blocks))
        for place in sorted(largest[:limit])
        for each in [view.modules[place]]
    ]  # fmt: skip
    if rows:
        rest = view.allocated - outermost
        rows.append(row("outside modules", rest, rest, t.EMPTY_CELL))
    head = ["module", "bytes", "own", "share", "blocks"]
    title = f"{_MODULES}, {moment}" if moment else _MODULES
    return d.Grid(head, rows, title, short=rows)


def _module_name(each: ModuleMemory) -> str:
    """Write the file of a module's ``forward``, and its call."""
    name = labels.clean(PurePath(each.file.replace("\\", "/")).name)
    return name if each.line is None else f"{name}, called at line {each.line}"


def _build_lines(holders: list[MemoryHolder], *, categories: bool = False) -> list[list[str]]:
    return [
        [
            f"{_name_place(each)} · {each.category}" if categories else _name_place(each),
            t.format_bytes(each.bytes),
            t.format_count(each.blocks),
        ]
        for each in holders
    ]


def _build_segments(view: MemoryView) -> list[list[str]]:
    return [
        [
            pool.name,
            t.format_count(pool.segments),
            *map(t.format_bytes, (pool.reserved, pool.allocated, pool.free, pool.largest)),
        ]
        for pool in view.pools
    ]


def _has_lines(view: MemoryView) -> bool:
    return any(each.file is not None for each in view.savings[:_MAX_SAVINGS])


def _build_savings(view: MemoryView) -> list[list[str]]:
    rows = []
    for each in view.savings[:_MAX_SAVINGS]:
        place = "" if each.file is None else f"{shorten(each.file, 16)}:{each.line}"
        row = [_name_change(each.change), t.format_bytes(each.bytes), each.cost]
        rows.append([*row, place] if _has_lines(view) else row)
    return rows


def _name_change(change: str) -> str:
    names = {"references": "earlier steps' outputs"}
    names["smaller logits"] = "smaller logits (loss in parts)"
    names["expandable segments"] = "expandable segments (reserved)"  # not of tensors
    return names.get(change, change)


def _describe_end(view: MemoryView) -> list[str]:
    """List the memory held and free when the snapshot was taken, after the peak."""
    if view.at != "peak" or view.end_reserved is None or view.end_free is None:
        return []
    amounts = [f"{t.format_bytes(view.end_allocated or 0)} in tensors when the snapshot was taken"]
    amounts.append(f"{t.format_bytes(view.end_reserved)} reserved")
    if view.end_free:
        amounts.append(
            f"{t.format_bytes(view.end_free)} of it free, in pieces of at most "
            f"{t.format_bytes(view.end_largest or 0)}"
        )
    return amounts


def _describe_steps(view: MemoryView) -> list[str]:
    if not view.events:
        return []
    if not view.step_source:
        history = "fewer than two complete steps are in the history"
        history = "no history was recorded" if view.at == "snapshot" else history
        return [f"{history}, so growth per step is unknown"]
    churn = f"{t.format_bytes(view.churn_bytes)} allocated per step" if view.churn_bytes else ""
    complete_steps = t.count_noun(view.steps, "complete step")
    return [f"{complete_steps} in the history, from {view.step_source}", churn]


def _name_place(each: MemoryHolder) -> str:
    if each.file is None and each.function is not None:
        return labels.clean(each.function)
    if each.file is None:
        return NO_LINE
    return f"{shorten(each.file)}:{each.line}"


def shorten(file: str, width: int = 32) -> str:
    """Return the end of a path, with slashes."""
    return t.shorten_path(labels.clean(file).replace("\\", "/"), width)


def sentences(device: DeviceMemory) -> list[str]:
    """Return a device as lines of text: its figures, then its tables, one line per row."""
    result = [f"{label}: {' · '.join(parts)}" for label, parts in device.lines]
    for table in device.tables:
        result.append(f"{table.title}:")
        for row in table.rows:
            cells = zip(table.head[1:], map(d.plain_text, row[1:]), strict=True)
            result.append(
                f"- {d.plain_text(row[0])}: {', '.join(f'{head} {cell}' for head, cell in cells)}"
            )
    return result


def assumptions(view: MemoryView) -> list[str]:
    return [f"{_name_change(each.change)}: {each.assumes}." for each in view.savings[:_MAX_SAVINGS]]
