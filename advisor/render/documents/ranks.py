"""Sections on the ranks of a job: their steps, similar ranks, and gains of changes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from advisor.advise.ranks import rank_charts
from advisor.advise.report_text import format_longer
from advisor.core import labels
from advisor.core import text as t
from advisor.core.layers import MeshAxis
from advisor.core.ranks import FEW_RANKS, Ranks, format_ranks
from advisor.core.report import Report
from advisor.render import document as d
from advisor.render.figures import Histogram, RankMap

_MAX_GROUPS: Final = 6
"""Maximum number of groups of ranks in a terminal."""
MAX_AXIS_MEMBERS: Final = 16
"""Maximum length of a list of ranks, characters."""
_MAX_TEXT: Final = 400
"""Maximum length of a reason, characters."""


def build_mesh(report: Report, options: d.RenderOptions = d.DEFAULT) -> d.Document:
    """Build the document of ``advisor analyze --by mesh``."""
    del options
    blocks = list(build_mesh_sections(report, of_one=True))
    lead = "" if blocks else "No collectives of a GPU were recorded."
    return d.Document(lead, blocks, name="mesh", style="")


def build_mesh_sections(report: Report, *, of_one: bool = False) -> Iterator[d.Section]:
    """Yield communication by axis of the device mesh. ``of_one``: also for a single axis."""
    if len(report.mesh) <= (0 if of_one else 1):
        return
    table = [MESH_HEAD, *(_name_axis(axis) for axis in report.mesh)]
    columns = zip("lllrrrrr", *table, strict=True)
    known = [each for each in columns if {*each[2:]} != {t.EMPTY_CELL} or each[1] == "ranks"]
    align, head, *rows = zip(*known, strict=True)
    yield d.Section(
        "Communication by axis of the mesh",
        [
            d.Grid(head, [[*row] for row in rows], align="".join(align), optional=[2, 1]),
            d.Items([*_describe_pipelines(report), *_describe_links(report)]),
            d.Paragraph(" ".join(_list_mesh_notes(report)), "soft", indent=0, spare=1),
        ],
        t.format_per(report.per),
        spare=2,
    )


MESH_HEAD: Final = ("axis", "ranks", "collectives", "bytes", "time", "waiting", "exposed", "GB/s")


def _name_axis(axis: MeshAxis) -> list[d.Inline]:
    total = sum(axis.collectives.values()) or 1
    kinds = [
        f"{t.format_number(axis.calls * count / total)} {name.replace('_', '-')}"
        for name, count in axis.collectives.items()
    ]
    size = t.format_cell(axis.size, lambda size: t.count_noun(size, "rank"))
    members = format_ranks(axis.ranks) or size
    if axis.ranks and len(members) > MAX_AXIS_MEMBERS:
        stride = axis.ranks[1] - axis.ranks[0]
        members = f"{axis.size}: {axis.ranks[0]}, {axis.ranks[0] + stride} … {axis.ranks[-1]}"
    return [
        axis.axis if axis.named else f"{axis.axis}*", members, ", ".join(kinds),
        t.format_cell(axis.bytes, t.format_bytes), t.format_duration(axis.ns),
        _format_waiting(axis), t.format_duration(axis.exposed_ns), _format_rate(axis),
    ]  # fmt: skip


def _format_rate(axis: MeshAxis) -> str:
    """Format the bandwidth. If unknown waits slow other messages, it is that of the fastest ones,
    and does not follow from the mean time next to it."""
    if axis.bus_gb_per_s is None:
        return t.EMPTY_CELL
    return "best " * (axis.waiting_ns is None) + t.format_number(axis.bus_gb_per_s)


def _format_waiting(axis: MeshAxis) -> str:
    if axis.waiting_ns is not None:
        return t.format_duration(axis.waiting_ns)
    return t.format_cell(axis.waited_here_ns, lambda ns: f"≥ {t.format_duration(ns)}")


def _describe_pipelines(report: Report) -> Iterator[str]:
    """Compare the bubble from the formula with the measured one."""
    step = sum(share.ns for share in report.time)
    for axis in report.mesh:
        if axis.idle_ns is None or not step:
            continue
        text = f"Pipeline: {t.format_share(axis.idle_ns / step)} of the step waits in sends and "
        text += "receives beyond their shortest"
        if axis.bubble is not None and axis.micro_batches is not None:
            text += (
                f"; {axis.size} stages and {axis.micro_batches} micro-batches have a bubble of "
                f"{t.format_share(axis.bubble)} by formula"
            )
        yield f"{text}."


def _describe_links(report: Report) -> Iterator[str]:
    """Compare the bus bandwidth with the link, once for each kind of link."""
    for axis in report.mesh:
        if axis.link is None or axis.bus_gb_per_s is None:
            continue
        where = f"{axis.axis}: {'inside a node' if axis.link == 'node' else 'across nodes'}"
        reached = f"{_format_rate(axis)} GB/s"
        if axis.link_gb_per_s is None:
            missing = (
                "no link of this GPU is known" if axis.link == "node" else "needs --node-bandwidth"
            )
            yield f"{where}, {reached}; the rate of the link is unknown ({missing})."
            continue
        name = f" of {axis.link_name}" if axis.link_name else ""
        share = t.format_share(axis.bus_gb_per_s / axis.link_gb_per_s)
        text = f"{where}, {reached}: {share} of {t.format_number(axis.link_gb_per_s)} GB/s{name}."
        if (axis.link_name or "").startswith("NVLink") and axis.bus_gb_per_s < _MAX_PCIE_GB_PER_S:
            text += " It may run over PCIe: see nvidia-smi topo -m."
        yield text


_MAX_PCIE_GB_PER_S: Final = 26.0
"""Bus bandwidth that PCIe 4.0 x16 can reach, GB/s: about 80% of its 32 GB/s."""


def _list_mesh_notes(report: Report) -> Iterator[str]:
    if not all(axis.named for axis in report.mesh):
        yield "*: the process group has no name; its kind follows from what it sends."
    rated = [axis for axis in report.mesh if axis.bus_gb_per_s is not None]
    if rated:
        yield "GB/s: bus bandwidth of messages of 1 MiB and more (nccl-tests)."
    unknown = [axis for axis in report.mesh if axis.waiting_ns is None]
    if any(axis.waited_here_ns is not None for axis in unknown):
        yield "≥: only waits for ranks of this recording; whether the groups have more is unknown."
    if any(axis.waited_here_ns is None for axis in unknown):
        how_long = "Only the traces of all ranks show how long, for each axis"
        if len(report.inputs) > 1:
            how_long = "How long is unknown: whether all of their ranks are here is not recorded"
        yield f"Time includes waiting for other ranks. {how_long}."
    if any(axis.link is None for axis in rated):
        yield "Which ranks share a node is unknown (--node-size)."


MIN_SLOWDOWN = 0.25
"""Minimum slowdown of the window's steps at which a title says that its times are of these
steps."""


def sections(ranks: Ranks) -> Iterator[d.Block]:
    """Yield details beyond the table of ranks. For few ranks, only the map and lists."""
    many = len(ranks.lines) > FEW_RANKS
    if many and len(bins := rank_charts.build_histogram(ranks)) > 1:
        figure = Histogram(("mean step", "ranks"), [(each.label, each.ranks) for each in bins])
        yield d.Section("The ranks' steps", [figure])
    yield from _build_map(ranks)
    if many:
        yield from build_rank_groups(ranks)
    for title, lines in rank_charts.build_lists(ranks):
        yield _build_list(title, lines)


def build_what_if(report: Report) -> Iterator[d.Section]:
    """Yield changes of the job that are not the fix of a finding, with their gains."""
    step = report.step
    slowdown = 0.0 if step is None else step.window_excess or 0.0
    aside = ""
    if abs(slowdown) >= MIN_SLOWDOWN:
        aside = f"of profiled steps, {format_longer(slowdown)} the run's"
    if changes := rank_charts.other_changes(report):
        yield replace(_build_list("What if", changes, aside), spare=1)


def _build_list(title: str, lines: list[str], aside: str = "") -> d.Section:
    return d.Section(
        title, [d.Items([labels.shorten(line, _MAX_TEXT) for line in lines], "•")], aside
    )


def _build_map(ranks: Ranks) -> Iterator[d.Block]:
    heat_map = rank_charts.build_heat_map(ranks)
    if heat_map is None:
        return
    rows = [
        [
            rank_charts.describe_rank(line),
            t.format_duration(line.step_ns),
            *(t.format_duration(value) for value in line.time),
        ]
        for line in heat_map.lines
    ]
    names = [rank_charts.class_label(name) for name in heat_map.classes]
    figure = RankMap(
        "Time per step by rank and class",
        names,
        heat_map.columns(),
        lambda column, row: heat_map.tint(heat_map.lines[column], row),
        lambda column, row: heat_map.title(heat_map.lines[column], row),
        heat_map.is_effect,
        t.format_duration(heat_map.scale_ns),
        d.Grid(["rank", "step", *names], rows),
        heat_map.note,
    )
    yield d.Section("Ranks × classes of time", [figure], "compared with the median rank")


def build_rank_groups(ranks: Ranks) -> Iterator[d.Section]:
    """Yield groups of similar ranks, the largest first."""
    if not ranks.clusters:
        return
    total = dict.fromkeys(ranks.classes, 0.0)
    for group in ranks.clusters:
        for name, ns in group.time.items():
            total[name] = total.get(name, 0.0) + ns * group.count
    rows = [
        [
            labels.shorten(labels.clean(group.name), 48),
            rank_charts.shorten_numbers(group.ranks),
            t.format_count(group.count),
            t.format_duration(group.step_ns),
            *(t.format_duration(group.time.get(name)) for name in ranks.classes),
        ]
        for group in ranks.clusters
    ]
    head = ["group", "ranks", "how many", "step", *map(rank_charts.class_label, ranks.classes)]
    smallest = sorted(ranks.classes, key=lambda name: total[name])
    omitted = len(rows) - _MAX_GROUPS
    table = d.Grid(
        head,
        rows,
        align="ll" + "r" * (len(head) - 2),
        short=rows[:_MAX_GROUPS],
        omitted_note=f"{t.count_noun(omitted, 'more group')}: --format json has all",
        optional=[1, *(4 + ranks.classes.index(name) for name in smallest)],
    )
    yield d.Section("Groups of similar ranks", [table], "median per step")
