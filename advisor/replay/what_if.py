"""Results of edits on the measured steps: replayed, or bounded if the replay is not usable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

import polars as pl

from advisor.core.errors import AdvisorError
from advisor.core.report_steps import StepTime
from advisor.measure import Analysis
from advisor.measure.steps.steps import require_used_steps, require_window
from advisor.replay.edit_language import parse_edit
from advisor.replay.estimators import GainEstimator, ReplayEstimator, estimator_for
from advisor.replay.ranks.estimator import estimate_ranks
from advisor.replay.replay_quality import ReplayQuality
from advisor.replay.window_replayer import WindowReplayer

if TYPE_CHECKING:
    from advisor.core.finding import Edit
    from advisor.core.trace import Run
    from advisor.replay.project.mesh import MeshResult


class EditResult(NamedTuple):
    """Result of one edit after the previous edits. All times are ns per step."""

    edit: Edit
    selected: int
    """Number of events of the replayed steps that it selects."""
    selected_per_step: float
    selected_ns: float
    """Duration of the selected events, summed over streams or threads."""
    alone_ns: float
    """Gain of the edit alone."""
    gain_ns: float
    """Gain after the previous edits."""
    low_ns: float
    high_ns: float
    step_then_ns: float


class WhatIfResult(NamedTuple):
    """Measured and replayed steps, and the steps with edits applied one after the other."""

    measured_step_ns: float
    """Mean of the used steps."""
    replayed_step_ns: float
    """Measured step with the relative error of the replayed steps."""
    edited_step_ns: float
    """Measured step minus the gain of all edits."""
    edits: tuple[EditResult, ...]
    critical_path: dict[str, float]
    """Parts of the critical path with all edits, ns per step."""
    replay: ReplayQuality
    reason: str
    """Reason why the steps are not replayed; gains are then upper bounds by exposed time. Empty if
    they are replayed."""
    ranks: tuple[int, ...]
    """Ranks that were replayed together, the rank of these figures first; gains are then gains of
    the job's step. Empty if one rank was replayed alone."""
    marked: bool
    """Whether steps are marked in the trace. If not, all figures are of the whole recording."""
    unseen_loader: bool
    """Whether loader workers keep up: their limit is then not in the trace, and a faster step may
    have to wait for them."""
    families: tuple[str, ...]
    """Kernel families of the replayed window, most time first, which ``kernel:`` can name."""
    notes: tuple[str, ...] = ()
    """Remarks on questions that the edits leave open."""
    framework: str | None = None
    """Framework that the program is written with, as in ``TraceMeta``."""
    step: StepTime | None = None
    """Step time of the run without profiling, or ``None`` if not recorded. The other figures are of
    the profiled steps."""
    low_ns: float = 0.0
    high_ns: float = 0.0
    """Range of the gain of all edits together."""
    ranks_error: float | None = None
    """Replayed over measured step of the ranks together, minus 1, or ``None`` for one rank."""


MEASURE_ACCURACY = (
    "fewer or smaller layers are another model: how accurate it is must be measured, after it is "
    "trained or distilled again"
)


def counted_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 0 is`` or ``ranks 0, 1 are``."""
    names = ", ".join(str(n) for n in sorted(ranks))
    return f"ranks {names} are" if len(ranks) > 1 else f"rank {names} is"


@overload
def what_if(
    run: Run,
    edits: Sequence[Edit | str] = (),
    rank: int | None = None,
    *,
    steps: tuple[int | None, int | None] | None = None,
    mesh: None = None,
) -> WhatIfResult: ...


@overload
def what_if(
    run: Run,
    edits: Sequence[Edit | str] = (),
    rank: int | None = None,
    *,
    steps: tuple[int | None, int | None] | None = None,
    mesh: str,
    recorded_mesh: str | None = None,
    node_size: int | None = None,
    node_bandwidth: float | None = None,
    same_batch: bool = False,
    micro_batches: int | None = None,
) -> MeshResult: ...


def what_if(
    run: Run,
    edits: Sequence[Edit | str] = (),
    rank: int | None = None,
    *,
    steps: tuple[int | None, int | None] | None = None,
    mesh: str | None = None,
    recorded_mesh: str | None = None,
    node_size: int | None = None,
    node_bandwidth: float | None = None,
    same_batch: bool = False,
    micro_batches: int | None = None,
) -> WhatIfResult | MeshResult:
    """Replay one rank's steps with edits (Edit objects, or lines of the edit language); or with
    ``mesh`` (``dp=8,tp=4``) on another device mesh.

    ``rank`` defaults to the first; the other ranks of the run are replayed with it. ``steps`` is a
    half-open range of their indices, by default all. With ``mesh`` the default is the rank with
    most own work, together with the median rank: see ``MeshProjector``. ``recorded_mesh`` is the
    recorded mesh, ``node_size`` the number of GPUs in a node, ``node_bandwidth`` GB/s of a GPU
    across nodes. Raises AdvisorError for an invalid edit, a run or rank without a profiled window,
    missing steps, or a mesh that cannot be projected."""
    asked, rank = rank, _existing_rank(run, rank)
    if mesh is not None:
        if edits:
            raise AdvisorError("edits are replayed on the recorded mesh: give edits or a mesh")
        from advisor.replay.project.splits import project_ranks

        return project_ranks(
            run, asked, mesh, steps=steps, recorded_mesh=recorded_mesh, node_size=node_size,
            node_bandwidth=node_bandwidth, same_batch=same_batch, micro_batches=micro_batches,
        )  # fmt: skip
    parsed = [parse_edit(e) if isinstance(e, str) else e for e in edits]
    analyses = {number: Analysis(run.window(number), steps) for number in (rank, *run.ranks)}
    for number, a in analyses.items():
        require_used_steps(a.steps, a.trace.meta.path, number, selected=steps is not None)
    prunes = any(edit.select.layer and edit.op in ("scale", "remove") for edit in parsed)
    notes = [MEASURE_ACCURACY] if prunes else []
    single = estimator_for(analyses[rank], rank)
    joint, reason = estimate_ranks(analyses, rank, single) if len(analyses) > 1 else (None, "")
    if joint is not None:
        for number in range(len(parsed)):
            joint.add_change(parsed[number : number + 1], analyses[rank])
            joint.add_change(parsed[: number + 1], analyses[rank])
    elif len(analyses) > 1 and asked is None:
        from advisor.replay.project.splits import find_pacing_rank

        pace = find_pacing_rank(run, None, steps)
        rank, single = pace.slowest, estimator_for(analyses[pace.slowest], pace.slowest)
        notes.append(f"the ranks are not replayed together ({reason}): {pace.sentence}")
    estimator = single if joint is None else joint
    replayed = (rank, *(number for number in estimator.ranks if number != rank))
    _refuse_other_ranks(parsed, replayed)
    named_ranks = {rank, *(edit.rank for edit in parsed if edit.rank is not None)}
    replayers = {number: WindowReplayer(analyses[number], number) for number in named_ranks}
    if isinstance(single, ReplayEstimator):
        replayers[rank] = single.replayer  # with its finished replays
    replayer = replayers[rank]
    saved = estimator.gain_range(parsed).limited
    return WhatIfResult(
        measured_step_ns=replayer.a.step_ns,
        replayed_step_ns=replayer.a.step_ns * (1 + replayer.quality.total_error),
        edited_step_ns=max(0.0, replayer.a.step_ns - saved.gain),
        edits=tuple(_evaluate_edits(estimator, replayers, rank, parsed)),
        critical_path=replayer.critical_path_parts(parsed),
        replay=replayer.quality,
        reason=replayer.unusable_reason or single.reason,
        ranks=replayed if len(replayed) > 1 else (),
        marked=replayer.a.steps.source != "whole trace",
        unseen_loader=replayer.unseen_loader,
        families=tuple(replayer.a.families.sort("dur", descending=True)["family"].cast(pl.String))
        if replayer.a.device_id is not None
        else (),
        notes=tuple(notes),
        framework=replayer.a.trace.meta.framework,
        step=_find_run_step(run, rank, replayer.a),
        low_ns=saved.low,
        high_ns=saved.high,
        ranks_error=None if joint is None else joint.comparison.replay.error,
    )


def _existing_rank(run: Run, rank: int | None) -> int:
    """Return the rank, by default the first. Raises AdvisorError if no window, or none of this
    rank, is profiled."""
    require_window(run, "nothing to replay")
    if rank is None:
        return run.ranks[0]
    if rank not in run.ranks:
        names = ", ".join(map(str, run.ranks))
        raise AdvisorError(f"{run.path or 'run'}: no trace of rank {rank} (ranks present: {names})")
    return rank


def _refuse_other_ranks(edits: Sequence[Edit], replayed: Sequence[int]) -> None:
    """Raise AdvisorError if an edit names a rank that is not replayed."""
    for edit in edits:
        if edit.rank is not None and edit.rank not in replayed:
            raise AdvisorError(
                f"rank:{edit.rank}: only {counted_ranks(replayed)} replayed here; give a folder "
                "with the traces of all ranks"
            )


def _find_run_step(run: Run, rank: int, a: Analysis) -> StepTime | None:
    """Return the run's own step time together with the window's."""
    record = None if run.recording is None else run.recording.ranks.get(rank)
    run_steps = Analysis(a.trace, a.selection, record).run_steps
    step_time = None if run_steps is None else run_steps.step_time
    return step_time and StepTime(ns=step_time.ns, mean_ns=step_time.mean_ns, window_ns=a.step_ns)


def _evaluate_edits(
    estimator: GainEstimator,
    replayers: Mapping[int, WindowReplayer],
    rank: int,
    edits: Sequence[Edit],
) -> list[EditResult]:
    """Return the result of each edit, after the previous edits. Its events are counted on the shown
    ``rank``, or the rank that it names."""
    rows, step_ns = [], replayers[rank].a.step_ns
    for index, edit in enumerate(edits):
        applied, edits_so_far = edits[:index], edits[: index + 1]
        replayer = replayers[rank if edit.rank is None else edit.rank]
        saved = estimator.gain_range([edit], applied)
        rows.append(
            EditResult(
                edit=edit,
                selected=(count := replayer.count_selected(edit)),
                selected_per_step=count / replayer.step_count,
                selected_ns=replayer.time_selected(edit),
                alone_ns=estimator.marginal([edit], ()),
                gain_ns=saved.gain,
                low_ns=saved.limited.low,
                high_ns=saved.limited.high,
                step_then_ns=max(0.0, step_ns - estimator.marginal(edits_so_far, ())),
            )
        )
    return rows
