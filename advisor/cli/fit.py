"""``advisor fit``: whether a program fits a GPU's memory, and what makes it fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from advisor.cli import options as o
from advisor.cli import output as out
from advisor.cli.analyze import RedactionNames
from advisor.core.auxiliary_inputs import SNAPSHOT
from advisor.core.errors import AdvisorError
from advisor.render.formats import PREDICTIONS

if TYPE_CHECKING:
    from advisor.advise.memory_fit import CostedChange, MemoryFit
    from advisor.core.run_directory import RankRecord
    from advisor.core.trace import Run
    from advisor.measure import Analysis
    from advisor.measure.memory.peak_memory import PeakMemory


@o.with_options("rank", "window", "steps", "memory_snapshot", "max_size")
def command(
    path: Annotated[
        str, typer.Argument(metavar="TRACE", help="A trace or run of the program, or its snapshot.")
    ],
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Target GPU, such as 'rtx 4090'.")
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the GPU, such as 24GiB or 24G.")
    ] = None,
    batch_size: Annotated[
        float | None, typer.Option(metavar="N", min=0, help="Target samples per step.")
    ] = None,
    recorded_batch_size: Annotated[
        float | None,
        typer.Option(metavar="N", min=0, help="Samples per step of the snapshot, if not recorded."),
    ] = None,
    gpus: Annotated[
        int, typer.Option(metavar="N", min=1, help="GPUs that can share the states (ZeRO, FSDP).")
    ] = 1,
    *,
    options: o.Options,
    format_name: Annotated[str | None, o.format_option(PREDICTIONS)] = None,
    output: o.Output = None,
    redact: o.Redact = False,
) -> None:
    """Check whether the program fits a GPU, and find the cheapest changes that make it fit."""
    if (gpu is None) == (capacity is None):
        raise AdvisorError("no GPU is given: add --gpu NAME, or its memory with --capacity SIZE")
    from advisor.advise.memory_fit import DRIVER_SHARE, find_fit
    from advisor.core.gpus import find_gpu, lookup

    target = None if gpu is None else find_gpu(gpu).gpu
    size = target.memory_bytes if target is not None else parse_bytes(str(capacity))
    redaction = RedactionNames(redact)
    options = o.with_read_options(options, peek=redaction.peek)
    run, peak, analysis, record = _read_history(path, options)
    scale = _compute_scale(batch_size, recorded_batch_size, record)
    device = None
    if analysis is not None and analysis.device_id is not None:
        device = analysis.trace.working_device(analysis.device_id)
    spec = target or lookup(None if device is None else device.name)
    driver_share = DRIVER_SHARE if target is not None and target.vendor == "nvidia" else 0.0
    result = find_fit(
        peak, analysis, size, gpu=spec, ranks=gpus, scale=scale, driver_share=driver_share
    )
    from advisor.render.documents.project import build_fit

    batch_text = "" if scale == 1 else f"batch {batch_size:g}, {scale:.3g} times the recorded one"
    document = build_fit(
        result,
        gpu="" if target is None else target.name,
        batch=batch_text,
        request=peak.request or 0,
    )
    renderer = out.choose_renderer(PREDICTIONS, format_name, output)
    document = replace(document, data=_to_plain(result, scale))
    document = out.redact_document(document, redaction.collect(run))
    out.deliver(renderer, document, output, [path], details=True)


def _read_history(
    path: str, options: o.Options
) -> tuple[Run, PeakMemory, Analysis | None, RankRecord | None]:
    """Return the run, the memory history, the trace that times changes (or ``None``), and the
    rank's record. Raises AdvisorError if there is no history, or its values contradict each
    other."""
    from advisor.advise.unrelated_inputs import open_windows
    from advisor.measure import Analysis
    from advisor.measure.memory.peak_memory import peak_memories

    run = open_windows(path, options.read, options.rank, options.window)
    number = (
        options.rank
        if options.rank is not None
        else (run.ranks or sorted(run.snapshots) or [-1])[0]
    )
    snapshot = run.snapshots.get(number)
    analysis = None
    if run.traces:
        full_analysis = Analysis(run.window(number), options.steps, snapshot=snapshot)
        analysis = None if full_analysis.only_input is SNAPSHOT else full_analysis
        snapshot = full_analysis.snapshot
    if analysis is not None:
        peaks = [peak for peak in analysis.gpu_and_host_peaks if peak.device >= 0]
    else:
        peaks = [] if snapshot is None else peak_memories(snapshot)
    if not peaks:
        raise AdvisorError(
            f"{path}: no memory snapshot and no memory events; give one with "
            "--memory-snapshot FILE, or record with profile_memory=True"
        )
    peak = peaks[0]
    if peak.is_contradictory:
        raise AdvisorError(
            f"{peak.snapshot.path}: more bytes in tensors than reserved: its values contradict "
            "each other"
        )
    if peak.history.is_too_short:
        raise AdvisorError(
            f"{peak.snapshot.path}: no history, so the peak is unknown; record one with "
            "torch.cuda.memory._record_memory_history"
        )
    record = None if run.recording is None else run.recording.ranks.get(number)
    return run, peak, analysis, record


def _compute_scale(batch: float | None, recorded: float | None, record: RankRecord | None) -> float:
    if batch is None:
        return 1.0
    if recorded is None and record is not None:
        sizes = sorted(step.samples for step in record.steps if step.samples)
        recorded = sizes[len(sizes) // 2] if sizes else None
    if not recorded:
        raise AdvisorError(
            "fit: the recorded batch is unknown; give it with --recorded-batch-size N"
        )
    return batch / recorded


def parse_bytes(text: str) -> int:
    """Parse ``24GiB`` (binary), ``24G`` or ``24GB`` (decimal) to bytes. Raises AdvisorError."""
    binary = text.strip().upper().removesuffix("IB")
    if binary == text.strip().upper():
        return o.parse_size(text) or 0
    decimal = o.parse_size(binary) or 0
    power = "KMGT".find(binary[-1]) + 1
    return round(decimal * (1024 / 1000) ** power)


def _to_plain(fit: MemoryFit, scale: float) -> dict[str, Any]:
    """Return the result as plain data for JSON. Null means unknown."""

    def describe(way: CostedChange) -> dict[str, Any]:
        where = way.change.where
        return {
            "change": way.change.name, "bytes": way.bytes, "ns_per_step": way.ns,
            "made_of": way.cost_reason, "assumes": way.change.assumes,
            "file": None if where is None else where.file,
            "line": None if where is None else where.line,
            "layers": way.layers,
        }  # fmt: skip

    return {
        "schema": 1, "fits": fit.fits, "barely": fit.barely, "peak": fit.peak,
        "reserved": fit.reserved,
        "capacity": fit.capacity, "available": fit.available, "after": fit.reserved_after,
        "batch_scale": scale, "largest_batch_scale": fit.largest_batch,
        "chosen": [describe(way) for way in fit.chosen],
        "ways": [describe(way) for way in fit.candidates],
    }  # fmt: skip
