"""Whether a program fits, and what makes it: bytes by the history, time by the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from advisor.advise.memory_fit import (
    CUDA_CONTEXT_BYTES,
    DRIVER_SHARE,
    MARGIN_SHARE,
    find_fit,
    phase_times,
)
from advisor.cli import run
from advisor.core.gpus import find_gpu
from advisor.measure import Analysis
from advisor.measure.memory.memory_savings import count_needed_bytes
from advisor.measure.memory.peak_memory import PeakMemory
from advisor.read.formats.memory_snapshot.tables import read_snapshot
from advisor.render.documents.project import build_fit
from advisor.testing import TraceBuilder
from advisor.testing.allocator import GIB, MIB, FakeAllocator, Training

NODE = "autograd::engine::evaluate_function: MmBackward0"


def program(**how: Any) -> FakeAllocator:
    m = FakeAllocator()
    t = Training(m, **{"layers": 10, "activation": 96 * MIB, "weights": 32 * MIB} | how)
    for _ in range(4):
        t.step()
    return m


def measured(m: FakeAllocator) -> PeakMemory:
    return PeakMemory(read_snapshot([m.pickled()], "x"), 0)


def trace(device: str = "A100") -> TraceBuilder:
    """4 ms forward, 8 ms backward, 1 ms optimizer, in each of four steps."""
    b = TraceBuilder(device)
    for _ in range(4):
        with b.step():
            b.run("aten::mm", "gemm", 4000)
            with b.op(NODE):
                b.launch("gemm", 8000)
            with b.range("Optimizer.step#AdamW.step"):
                b.launch("adam", 1000)
            b.sync()
    return b


def capacity_for(reserved: int) -> int:
    """The capacity in which so many reserved bytes just leave the margin."""
    return round(reserved * (1 + MARGIN_SHARE)) + CUDA_CONTEXT_BYTES


CORPUS = Path(__file__).parents[1] / "corpus"


def fit_output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["fit", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_less_room_than_fragments_take_is_not_a_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """11.79 GiB reserved; with the 8-bit optimizer alone 0.7% of an RTX 3080 would be left."""
    peak = measured(program(activation=MIB, logits=MIB))
    fit = find_fit(peak, None, capacity_for(peak.reserved) - 2 * MIB)
    assert fit.chosen  # as it is, it fits barely
    without_analysis = find_fit(peak, None, capacity_for(fit.reserved_after) - 2 * MIB)
    assert without_analysis.reserved_after < fit.reserved_after
    text = fit_output(capsys, str(CORPUS / "memory/transformer_training_ctx512.pickle.gz"), "--gpu",
                "rtx 3080")  # fmt: skip
    assert "with 2 changes: 2.13 GiB left" in text and "0 ms" not in text


def test_narrow_memory_fit_warns_of_fragmentation(capsys: pytest.CaptureFixture[str]) -> None:
    """No change frees anything of these weights: 3% is less than fragments can take."""
    m = FakeAllocator()
    with m.at(("/home/ada/project/train.py", 12, "main")):
        for _ in range(20):
            m.alloc(100 * MIB)
    peak = measured(m)
    fit = find_fit(peak, None, round(peak.reserved * 1.03) + CUDA_CONTEXT_BYTES)
    assert fit.fits and fit.barely and fit.chosen == []
    headline = build_fit(fit, gpu="", batch="").headline
    assert headline.startswith("It fits") and ", but may run out of memory: " in headline
    assert "left (3%), and fragmentation can take" in headline


def test_the_drivers_part_of_a_named_gpu_is_taken_off() -> None:
    """The reported memory of NVIDIA GPUs lies within this part: 10.76 GiB of an 11 GB card."""
    assert pytest.approx(1 - DRIVER_SHARE, abs=0.001) == 11554586624 / (11 << 30)
    fit = find_fit(measured(program()), None, 80 * GIB, driver_share=DRIVER_SHARE)
    assert fit.available == round(80 * GIB * (1 - DRIVER_SHARE)) - CUDA_CONTEXT_BYTES


def test_half_the_batch_is_not_twice_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """80.6 GiB do not fit 80: only segments that grow, without free pieces, leave room."""
    text = fit_output(capsys, str(CORPUS / "memory/h100_full.pickle.gz"), "--gpu", "h100")
    assert "Up to 1.1 times the recorded batch fits" in text and "2.0 times" not in text
    assert "the request of 15.6 GiB that failed included" in text


def test_fit_without_trace_does_not_list_every_time_as_unknown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = str(CORPUS / "memory/transformer_training_ctx512.pickle.gz")
    text = fit_output(capsys, file, "--gpu", "rtx 3080")
    assert "Times that need a trace are unknown; others are by the GPU's rated bandwidths" in text
    assert "No trace was given, so times are unknown" not in text


def test_time_is_split_by_launching_operator() -> None:
    phases = phase_times(trace().analysis())
    assert phases is not None
    assert phases[:3] == (4e6, 8e6, 1e6)


def test_fitting_program_needs_no_change_and_shows_headroom() -> None:
    peak = measured(program())
    fit = find_fit(peak, None, 80 * GIB)
    assert fit.fits and fit.chosen == [] and fit.reserved_after == fit.reserved
    # activations grow with the batch, nothing else does
    room = fit.available / (1 + MARGIN_SHARE) * peak.allocated / peak.reserved
    assert count_needed_bytes(peak, scale=fit.largest_batch) <= room
    assert count_needed_bytes(peak, scale=fit.largest_batch * 1.01) > room


def test_cheapest_changes_checkpoint_as_few_calls_as_possible() -> None:
    peak, a = measured(program()), trace().analysis()
    reserved = find_fit(peak, a, 80 * GIB).reserved
    by_name = {way.change.name: way for way in find_fit(peak, a, 80 * GIB).candidates}
    # what costs no time is taken before what does
    less = reserved - by_name["8-bit optimizer"].bytes // 2
    fit = find_fit(peak, a, capacity_for(less))
    assert fit.fits and [way.ns for way in fit.chosen] == [0.0]
    fit = find_fit(peak, a, capacity_for(reserved - 2200 * MIB))
    (checkpointed,) = [way for way in fit.chosen if way.change.name == "checkpointing"]
    assert fit.fits and checkpointed.ns is not None and 0 < checkpointed.ns <= 4e6
    assert "calls keep their output alone" in checkpointed.change.assumes
    safe = fit.available / (1 + MARGIN_SHARE)
    assert fit.reserved_after <= safe
    # one call fewer would not do
    part = checkpointed.change.forward_call
    assert part is not None
    fewer = [
        way.change.for_calls(int(part.max())) if way is checkpointed else way.change
        for way in fit.chosen
    ]
    assert count_needed_bytes(peak, fewer) * peak.reserved / peak.allocated > safe


def test_offloading_costs_its_exposed_transfer_time() -> None:
    peak, a = measured(program()), trace().analysis()
    gpu = find_gpu("a100 pcie 80gb").gpu
    (way,) = [
        way for way in find_fit(peak, a, 80 * GIB, gpu=gpu).candidates
        if way.change.name == "offload activations"
    ]  # fmt: skip
    lives = peak.history.block_lifetimes
    offloaded_bytes = int(lives.size[[r for r in way.change.rows if lives.at(peak.event)[r]]].sum())
    assert gpu.pcie_bandwidth is not None
    each_way = offloaded_bytes / gpu.pcie_bandwidth * 1e9
    assert way.ns == pytest.approx(max(0, each_way - 4e6) + max(0, each_way - 8e6))


def test_sharding_divides_the_states_and_gathers_weights_for_stage_3() -> None:
    peak = measured(program(activation=MIB, logits=MIB))
    gpu = find_gpu("a100 sxm4 80gb").gpu
    fit = find_fit(peak, trace().analysis(), 80 * GIB, gpu=gpu, ranks=4)
    ways = {way.change.name: way for way in fit.candidates}
    weights = 10 * 32 * MIB
    assert ways["ZeRO 1"].bytes == pytest.approx(2 * weights * 3 / 4, rel=0.1)
    assert ways["ZeRO 1"].bytes <= ways["ZeRO 2"].bytes <= ways["ZeRO 3"].bytes
    assert ways["ZeRO 1"].ns == 0
    assert gpu.link_bandwidth is not None
    assert ways["ZeRO 3"].ns == pytest.approx(weights * 3 / 4 / gpu.link_bandwidth * 1e9)


def test_too_large_program_does_not_fit() -> None:
    fit = find_fit(measured(program()), None, GIB)
    assert not fit.fits and fit.chosen == [] and fit.reserved_after > fit.available


def test_fit_command_reports_fit_and_misfit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = str(program().write(tmp_path / "memory.pickle"))
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": trace().events}))
    arguments = ["fit", str(file), "--memory-snapshot", snapshot]
    assert run([*arguments, "--capacity", "80GiB", "--format", "json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["fits"] and plain["capacity"] == 80 * GIB and plain["chosen"] == []
    times = plain["largest_batch_scale"]
    larger = ["--batch-size", str(times * 8 + 1), "--recorded-batch-size", "8"]
    assert run([*arguments, "--capacity", "80GiB", "--format", "json", *larger]) == 0
    plain = json.loads(capsys.readouterr().out)
    needed = plain["reserved"] * (1 + MARGIN_SHARE)
    assert needed > plain["available"] and plain["chosen"] and not plain["barely"]
    assert run([*arguments, "--gpu", "rtx 4090"]) == 0
    assert "It fits NVIDIA GeForce RTX 4090" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    "arguments",
    [[], ["--capacity", "24GiB", "--gpu", "l4"], ["--capacity", "many"],
     ["--capacity", "24GiB", "--batch-size", "64"]],
)  # fmt: skip
def test_missing_memory_figures_are_one_line_error(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = str(program().write(tmp_path / "memory.pickle"))
    assert run(["fit", snapshot, *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_snapshot_without_history_cannot_be_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    m = FakeAllocator(history=False)
    Training(m).step()
    assert run(["fit", str(m.write(tmp_path / "x.pickle")), "--capacity", "24GiB"]) == 2
    assert "no history" in capsys.readouterr().err


def test_the_trace_of_an_analysis_alone_has_no_memory_to_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(trace().analysis(), Analysis)
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": trace().events}))
    assert run(["fit", str(file), "--capacity", "24GiB"]) == 2
    assert "--memory-snapshot" in capsys.readouterr().err


def test_impossible_figures_fit_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[1] / "corpus" / "memory"
    path = folder / "synthetic_allocated_over_reserved.pickle.gz"
    assert run(["fit", str(path), "--capacity", "4GiB"]) == 2
    assert "contradict" in capsys.readouterr().err


def test_checkpointing_has_the_bytes_and_the_time_of_each_layer() -> None:
    peak = measured(program())
    b = TraceBuilder("A100")
    for _ in range(2):
        with b.step(), b.python("nn.Module: Net_0"):
            with b.python("nn.Module: Linear_9"):
                b.launch("embed", 700)
            for layer in range(10):
                with b.python(f"nn.Module: Block_{layer}"), b.python("nn.Module: Linear_0"):
                    b.launch("gemm", 100 * (layer + 1))
            b.sync()
    (way,) = [w for w in find_fit(peak, b.analysis(), 80 * GIB).candidates if w.layers]
    assert [layer.ns for layer in way.layers] == pytest.approx(
        [1e5 * (n + 1) for n in range(len(way.layers))]
    )
    assert way.ns == pytest.approx(sum(1e5 * (n + 1) for n in range(len(way.layers))))
    # what a layer holds is what the model of the allocator made there, without its output
    assert len({layer.bytes for layer in way.layers}) == 1
    assert way.layers[0].bytes % (96 * MIB) == 0 < way.layers[0].bytes
    (unknown,) = [w for w in find_fit(peak, trace().analysis(), 80 * GIB).candidates if w.layers]
    assert {layer.ns for layer in unknown.layers} == {None}  # a trace without modules
