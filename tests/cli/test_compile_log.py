"""Logs of torch.compile: the causes planted in ``compile_programs.py``, and damaged logs."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from advisor.advise.engine import analyze
from advisor.core.auxiliary_inputs import CompileLog, FusedKernel, GraphBreak
from advisor.core.errors import AdvisorError
from advisor.core.finding import Finding, Location
from advisor.core.report import Report
from advisor.read.formats.compile_log import MAX_TEXT, merge_logs, read_logs
from advisor.testing import TraceBuilder

LOGS: dict[str, list[str]] = json.loads(
    gzip.decompress((Path(__file__).parent / "compile_logs.json.gz").read_bytes())
)
LINES = (Path(__file__).parent / "compile_programs.py").read_text().splitlines()
BREAKS = {
    "break_print": "Failed to trace builtin operator",
    "break_item": "Unsupported Tensor.item() call",
    "break_branch": "Data-dependent branching",
    "break_asked": "Call to `torch._dynamo.graph_break()`",
    "break_sleep": "Attempted to call function marked as skipped",
    "break_logging": "logging.Logger method not supported",
    "break_disabled": "Skip calling `torch.compiler.disable()`d function",
    "break_nonzero": "Dynamic shape operator",
    "break_open": "Failed to trace builtin operator",
    "break_backward": "Unsupported Tensor.backward() call",
    "break_in_a_loop": "Failed to trace builtin operator",
    "break_inlined": "Attempted to call function marked as skipped",
}
GUARDS = {
    "recompile_shape": "size mismatch at index 0. expected 3, actual 4",
    "recompile_dtype": "dtype mismatch. expected Float, actual Double",
    "recompile_rank": "rank mismatch. expected 1, actual 2",
    "recompile_number": "n == 2",
    "recompile_text": "how == 'sin'",
    "recompile_gradient": "requires_grad mismatch. expected requires_grad=0",
    "recompile_grad_mode": "GLOBAL_STATE changed: grad_mode",
    "recompile_training": "training == True",
    "recompile_global": "G['SCALE'] == 2.0",
    "recompile_list": "len(xs) == 1",
}


def write_log(folder: Path, *programs: str, name: str = "x") -> Path:
    path = folder / f"dedicated_log_torch_trace_{name}.log"
    path.write_text("\n".join(line for program in programs for line in LOGS[program]) + "\n")
    return path


def read(folder: Path, *programs: str) -> CompileLog:
    return read_logs(write_log(folder, *programs))


@pytest.mark.parametrize("program", BREAKS)
def test_a_planted_graph_break_is_named_with_its_line(program: str, tmp_path: Path) -> None:
    log = read(tmp_path, program)
    for each in log.breaks:
        assert LINES[each.line - 1].split("  # ")[1].split()[0] == program
    match = next(each for each in log.breaks if each.reason.startswith(BREAKS[program]))
    assert match.file == "/home/me/compile_programs.py"
    assert match.explanation and log.ns > 0
    assert match.eager == (program == "break_in_a_loop")
    assert match.function == ("inner" if program == "break_inlined" else "f")
    assert not log.recompilations and not log.damaged


@pytest.mark.parametrize("program", GUARDS)
def test_a_planted_recompilation_is_named_with_its_guard(program: str, tmp_path: Path) -> None:
    log = read(tmp_path, program)
    (recompilation,) = log.recompilations
    assert GUARDS[program] in recompilation.reason and "  #" not in recompilation.reason
    assert (
        recompilation.count == 1 and recompilation.ns is not None and 0 < recompilation.ns < log.ns
    )
    assert recompilation.file is not None and recompilation.line is not None
    assert not log.breaks and not log.not_compiled


def test_the_limit_of_recompilations_ends_compiling(tmp_path: Path) -> None:
    log = read(tmp_path, "recompile_limit")
    assert [each.reason for each in log.not_compiled] == ["Dynamo recompile limit exceeded"]
    assert (
        log.not_compiled[0].line is not None and "len(how)" in LINES[log.not_compiled[0].line - 1]
    )
    assert len(log.recompilations) == 7 and log.compilations == 9


@pytest.mark.parametrize("program", ["nothing_wrong", "inductor_on_cpu"])
def test_program_without_a_cause_has_no_findings(program: str, tmp_path: Path) -> None:
    log = read(tmp_path, program)
    assert not (log.breaks or log.recompilations or log.not_compiled or log.without_cuda_graphs)
    assert log.compilations == 1 and (log.inductor_ns is not None) == (program[0] == "i")


def test_a_reason_against_cuda_graphs_is_read_from_the_metrics(tmp_path: Path) -> None:
    """The line is written by
    ``torch._inductor.cudagraph_utils.log_cudagraph_skip_and_bump_counter``, which needs a GPU."""
    path = write_log(tmp_path, "inductor_on_cpu")
    reason = '"skipping cudagraphs due to mutated inputs (1 instances). Found from"'
    path.write_text(
        path.read_text().replace(
            '"cudagraph_skip_reason": null', f'"cudagraph_skip_reason": {reason}'
        )
        if '"cudagraph_skip_reason"' in path.read_text()
        else path.read_text().replace(
            '"co_name"', f'"cudagraph_skip_reason": {reason}, "co_name"', 1
        )
    )
    (skipped_graph,) = read_logs(path).without_cuda_graphs
    assert (
        skipped_graph.reason == "mutated inputs (1 instances). Found from"
        and skipped_graph.function == "f"
    )


def test_ranks_that_compile_the_same_are_counted_once(tmp_path: Path) -> None:
    one = read(tmp_path, "break_print", "recompile_dtype")
    for rank in range(3):
        write_log(tmp_path, "break_print", "recompile_dtype", name=f"rank_{rank}_ab")
    log = read_logs(tmp_path)
    assert log.logs == 4 and log.compilations == one.compilations and log.ns == one.ns
    assert log.breaks == one.breaks and log.recompilations == one.recompilations


def test_damaged_records_are_counted_and_text_is_bounded(tmp_path: Path) -> None:
    path = write_log(tmp_path, "break_print", "recompile_dtype")
    content = path.read_text()
    prefix = "V1123 20:55:19.489000 8996 torch/_dynamo/utils.py:2009] "
    bad = [
        '{"compilation_metrics": ', '{"compilation_metrics": 3}', "[" * 10_000,
        '{"artifact": {"name": "dynamo_graph_break_reason"}}\n\tno place at all',
        '{"compilation_metrics": {"co_name": 5, "duration_us": "x", "co_firstlineno": -1}}',
    ]  # fmt: skip
    long = json.dumps({"compilation_metrics": {"fail_reason": "x" * 9_999, "co_name": "y" * 9_999}})
    path.write_text(content + "".join(f"{prefix}{line}\n" for line in [*bad, long]))
    log = read_logs(path)
    assert len(log.breaks) == len(log.recompilations) == 1
    assert log.damaged == 3
    assert len(log.not_compiled[0].reason) == MAX_TEXT == len(log.not_compiled[0].function or "")
    path.write_bytes(content.encode()[: len(content) // 2] + b"\xff\xfe")
    assert read_logs(path).breaks


def test_file_that_is_no_log_is_refused_in_one_line(tmp_path: Path) -> None:
    other = tmp_path / "train.log"
    other.write_text("step 1\n")
    with pytest.raises(AdvisorError, match="TORCH_TRACE=FOLDER"):
        read_logs(other)


# -- findings -------------------------------------------------------------------------------------

FIXES = {
    "recompile_shape": "mark_dynamic",
    "recompile_dtype": "one dtype",
    "recompile_rank": "mark_dynamic",
    "recompile_number": "number as a tensor",
    "recompile_text": "Select the branch",
    "recompile_gradient": "under no_grad",
    "recompile_grad_mode": "under no_grad",
    "recompile_training": "train() and eval()",
    "recompile_global": "global from changing",
    "recompile_list": "number of items",
}


def findings(report: Report) -> dict[str, Finding]:
    return {each.rule: each for each in (*report.findings, *report.risks, *report.notes)}


@pytest.mark.parametrize("program", [*BREAKS, *GUARDS, "recompile_limit"])
def test_planted_cause_is_found(program: str, tmp_path: Path) -> None:
    log = read(tmp_path, program)
    result = findings(analyze(tmp_path))
    if program in BREAKS:
        assert set(result) == {"graph-breaks"}
        finding = result["graph-breaks"]
        assert BREAKS[program] in finding.summary and "not measured" in finding.summary
        assert {each.line for each in finding.where} == {each.line for each in log.breaks}
        assert finding.impact is not None and finding.impact.currency == "unknown"
        return
    assert set(result) == {"recompilation"}
    finding = result["recompilation"]
    assert finding.impact is not None and finding.impact.currency == "run_time"
    assert finding.impact.gain_ns == round(sum(each.ns or 0 for each in log.recompilations))
    assert finding.where[0].line == log.recompilations[0].line
    guards = " ".join(fact.label for fact in finding.evidence)
    assert GUARDS.get(program, "how == 'nnnnnnn'") in guards
    assert FIXES.get(program, "Select the branch") in finding.fix
    assert ("dynamic" in finding.code) == ("dynamic" in finding.fix)
    assert ("compiled too often" in finding.summary) == (program == "recompile_limit")


@pytest.mark.parametrize("program", ["nothing_wrong", "inductor_on_cpu"])
def test_without_a_cause_there_is_no_finding(program: str, tmp_path: Path) -> None:
    write_log(tmp_path, program)
    report = analyze(tmp_path)
    assert not findings(report) and "no graph break, no recompilation" in report.verdict


def test_each_break_has_the_idle_time_around_it(tmp_path: Path) -> None:
    """The trace has three regions. 1/0 follows the break of the log and idles 300 us per step;
    5/0 follows a break that the log does not have, 100 us. The launch of a kernel is no break."""
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.op("Torch-Compiled Region: 0/0"):
            with b.op("CompiledFunction"):
                b.run("aten::mm", "gemm", 400)
                b.sync()
            b.host(300)
            with b.op("Torch-Compiled Region: 1/0"):
                with b.op("CompiledFunction"):
                    b.run("aten::mm", "gemm", 400)
                    b.sync()
                b.host(100)
                with b.op("Torch-Compiled Region: 5/0"), b.op("CompiledFunction"):
                    b.run("aten::mm", "gemm", 400)
    b.write(tmp_path / "trace.json")
    write_log(tmp_path, "break_print")
    report = analyze(tmp_path)
    assert report.compilation is not None
    (graph_break,) = report.compilation.breaks
    assert (
        graph_break.frames == ["1"]
        and graph_break.idle_ns is not None
        and graph_break.gain_ns is not None
    )
    assert 300e3 <= graph_break.idle_ns < 330e3
    assert 0.9 * graph_break.idle_ns < graph_break.gain_ns <= graph_break.idle_ns
    finding = findings(report)["graph-breaks"]
    assert finding.where[0].line == graph_break.line == 44 and finding.impact is not None
    assert (
        finding.impact.gain_ns is not None and finding.impact.gain_ns > graph_break.gain_ns + 80e3
    )
    assert "Failed to trace builtin operator" in finding.summary


def test_a_recompilation_in_the_steps_has_its_guard(tmp_path: Path) -> None:
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            with b.op("_compile.compile_inner (dynamo_timed)", host_us=2_000):
                pass
            b.run("aten::mm", "gemm", 400)
            b.sync()
    b.write(tmp_path / "trace.json")
    write_log(tmp_path, "recompile_shape")
    finding = findings(analyze(tmp_path))["recompilation"]
    assert finding.impact is not None and finding.impact.currency == "step_time"
    assert GUARDS["recompile_shape"] in finding.summary and finding.where[0].line == 168


TRITON = """\
V1123 20:55:19.489000 8996 torch/_dynamo/output_graph.py:2841] {"dynamo_output_graph": {"sizes": {"l_x_": [8, 16]}}, "frame_id": 0, "frame_compile_id": 0, "attempt": 0, "has_payload": "1"}
| class GraphModule(torch.nn.Module):
|     def forward(self, L_x_: "f32[8, 16][16, 1]cuda:0", L_w_: "f32[16, 16][16, 1]cuda:0"):
|         l_x_ = L_x_
|         # File: /home/me/model.py:6 in forward, code: y = torch.relu(x @ w + 1)
|         matmul: "f32[8, 16][16, 1]cuda:0" = l_x_ @ l_w_;  l_x_ = l_w_ = None
|         add: "f32[8, 16][16, 1]cuda:0" = matmul + 1;  matmul = None
|         y: "f32[8, 16][16, 1]cuda:0" = torch.relu(add);  add = None

|         # File: /home/me/model.py:7 in torch_dynamo_resume_in_forward_at_5, code: return y.sum()
|         sum_1: "f32[][]cuda:0" = y.sum();  y = None
|         return (sum_1,)

V1123 20:55:20.489000 8996 torch/_inductor/graph.py:2745] {"inductor_output_code": {"filename": "/tmp/t.py"}, "frame_id": 0, "frame_compile_id": 0, "attempt": 0, "has_payload": "2"}
| # AOT ID: ['0_forward']
| # kernel path: /tmp/torchinductor_me/ab/cab.py
| # Topologically Sorted Source Nodes: [add, y], Original ATen: [aten.add, aten.relu]
| # Source node to ATen node mapping:
| #   add => add
| #   y => relu
| # Graph fragment:
| #   %relu : [num_users=1] = call_function[target=torch.ops.aten.relu.default](args = (%add,), kwargs = {})
| triton_poi_fused_add_relu_0 = async_compile.triton('triton_poi_fused_add_relu_0', '''
| import triton
| def triton_poi_fused_add_relu_0(in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
| ''', device_str='cuda')
| def call(args):
|         # Topologically Sorted Source Nodes: [matmul], Original ATen: [aten.mm]
|         extern_kernels.mm(arg0_1, arg1_1, out=buf0)
|         # Topologically Sorted Source Nodes: [add, y], Original ATen: [aten.add, aten.relu]
|         stream0 = get_raw_stream(0)
|         triton_poi_fused_add_relu_0.run(buf1, 128, stream=stream0)
|         # Unsorted Source Nodes: [y, sum_1], Original ATen: [aten.relu, aten.sum]
|         triton_per_fused_relu_sum_1.run(buf1, buf2, 1, 128, stream=stream0)
""".replace("\n| ", "\n\t")  # noqa: E501
"""A line of inductor's log (``torch/_inductor/utils.py``, ``get_kernel_metadata``)."""


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_generated_kernel_has_its_operators_and_lines(trimmed: bool, tmp_path: Path) -> None:
    from advisor.recorder.framework_logs import _LINES_TO_KEEP

    text = TRITON
    if trimmed:  # as the recorder keeps it
        records = re.split(r"^(?=V1123)", text, flags=re.MULTILINE)[1:]
        kept = []
        for record, pattern in zip(records, _LINES_TO_KEEP.values(), strict=True):
            head, _, payload = record.partition("\n")
            payload = payload.replace("\n\t", "\n").removeprefix("\t")
            kept.append("\n\t".join([head, *(m[1] for m in pattern.finditer(payload))]))
        text = "\n".join(kept) + "\n"
        assert "torch.relu(" not in text
    (tmp_path / "dedicated_log_torch_trace_x.log").write_text(text)
    first, second = read_logs(tmp_path).kernels
    assert (first.name, first.operators) == (
        "triton_poi_fused_add_relu_0", ["aten.add", "aten.relu"]
    )  # fmt: skip
    assert [(at.file, at.line, at.function) for at in first.lines] == [
        ("/home/me/model.py", 6, "forward")
    ]
    assert second.name == "triton_per_fused_relu_sum_1"
    assert [(at.line, at.function) for at in second.lines] == [(6, "forward"), (7, "forward")]


def test_log_adds_kernel_times_and_finding_lines_of_a_trace(
    tmp_path: Path, advisor: Callable[..., Any]
) -> None:
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            b.run("triton_per_fused_relu_sum_1", "triton_per_fused_relu_sum_1", 100)
            b.run("triton_poi_fused_add_relu_0", "triton_poi_fused_add_relu_0", 300, times=2)
            b.sync()
            b.host(2_000)
    b.write(tmp_path / "trace.json")
    (tmp_path / "dedicated_log_torch_trace_x.log").write_text(TRITON)
    report = analyze(tmp_path)
    assert report.compilation is not None
    assert [(each.calls, each.ns) for each in report.compilation.kernels] == [
        (2.0, 600e3), (1.0, 100e3)
    ]  # fmt: skip
    text = " ".join(advisor("analyze", str(tmp_path)).out.split())
    assert "triton_poi_fused_add_relu_0, 600 µs per step: add, relu" in text
    assert "/home/me/model.py:6, 7" in text


def test_a_place_without_a_line_takes_that_of_its_kernel() -> None:
    from advisor.advise.rule_runner import _with_line

    b = TraceBuilder()
    with b.step():
        b.run("triton_poi_fused_add_relu_0", "triton_poi_fused_add_relu_0", 300)
    b.compile_log()
    a = b.analysis()
    at = Location(file="model.py", line=6, function="forward")
    a.__dict__["fused_kernels"] = {"k": FusedKernel(name="k", operators=["aten.add"], lines=[at])}
    named = _with_line(Location(kernel="k"), a)
    assert (named.file, named.line, named.kernel) == ("model.py", 6, "k")
    location = Location(kernel="k", file="mine.py", line=1)
    assert _with_line(location, a) == location and _with_line(Location(op="x"), a) == Location(
        op="x"
    )


def test_processes_numbering_functions_differently_name_none() -> None:
    one, other = (
        CompileLog(
            logs=1, compilations=1, ns=1.0, inductor_ns=None, recompilations=[], not_compiled=[],
            without_cuda_graphs=[],
            breaks=[
                GraphBreak(file="a.py", line=line, function="f", reason="r", explanation="",
                           hint="", eager=False, count=1, frames=[str(line), "7"])
            ],
        )
        for line in (1, 2)
    )  # fmt: skip
    assert [each.frames for each in merge_logs([one, other]).breaks] == [["1"], ["2"]]


# -- on the command line ------------------------------------------------------------------------


def test_logs_alone_are_analyzed(advisor: Callable[..., Any], tmp_path: Path) -> None:
    write_log(tmp_path, "break_print", "recompile_dtype", "recompile_limit")
    result = advisor("analyze", str(tmp_path))
    text = " ".join(result.out.split())
    assert result.code == 0 and max(map(len, result.out.splitlines())) <= 80
    assert "Graph breaks (1)" in text and ":44 in f: Failed to trace builtin operator" in text
    assert "dtype mismatch. expected Float, actual Double" in text and "Not compiled (1)" in text
    assert "1 graph break, 8 recompilations, 1 uncompiled function" in text
    document = json.loads(advisor("analyze", str(tmp_path), "--format", "json").out)
    assert document["compilation"]["breaks"][0]["line"] == 44
    private = advisor("analyze", str(tmp_path), "--format", "json", "--redact").out
    assert "/home/me" not in private
    assert json.loads(private)["compilation"]["breaks"][0]["line"] == 44


@pytest.mark.parametrize("is_beside", [True, False])
def test_logs_beside_a_trace_are_part_of_its_report(
    advisor: Callable[..., Any], tmp_path: Path, is_beside: bool
) -> None:
    b = TraceBuilder()
    for _ in range(3):
        with b.step():
            b.run("aten::mm", "gemm", 900)
            b.sync()
    folder = tmp_path / "run"
    folder.mkdir()
    trace = b.write(folder / "trace.json")
    log = write_log(folder if is_beside else tmp_path, "break_print")
    arguments = [str(folder)] if is_beside else [str(trace), "--compile-log", str(log)]
    text = " ".join(advisor("analyze", *arguments).out.split())
    assert "Failed to trace builtin operator" in text and "as long as" in text
    report = json.loads(advisor("analyze", *arguments, "--format", "json").out)
    assert report["compilation"]["breaks"][0]["reason"] == BREAKS["break_print"]


def test_a_wrong_path_of_logs_is_one_line_error(
    advisor: Callable[..., Any], tmp_path: Path
) -> None:
    result = advisor("analyze", "--compile-log", str(tmp_path))
    assert result.code == 2 and result.err.count("\n") == 1 and "TORCH_TRACE" in result.err


def test_agents_and_the_python_interface_read_logs_too(tmp_path: Path) -> None:
    import advisor as package
    from advisor.mcp.answers import AllowedFolders
    from advisor.mcp.tools import Tools

    write_log(tmp_path, "break_print", "recompile_dtype")
    assert "1 graph break, 1 recompilation" in package.analyze(tmp_path).verdict
    answer = str(Tools(AllowedFolders([tmp_path])).analyze(str(tmp_path)))
    assert (
        "graph-breaks" in answer
        and "compile_programs.py:44" in answer
        and "recompilation" in answer
    )


def test_an_edit_can_select_the_breaks_of_one_function(tmp_path: Path) -> None:
    from advisor.replay.edit_language import parse_edit, write_edit

    edit = parse_edit("remove gap:dispatch at:graph_break region:1,5")
    assert edit.select.region == ("1", "5") and parse_edit(write_edit(edit)) == edit


@pytest.mark.parametrize("is_separate", [True, False])
def test_logs_beside_ranks_are_not_ranks(
    advisor: Callable[..., Any], tmp_path: Path, is_separate: bool
) -> None:
    b = TraceBuilder()
    for _ in range(3):
        with b.step():
            b.run("aten::mm", "gemm", 900)
            b.sync()
    for rank in range(2):
        b.write(tmp_path / f"trace_rank{rank}.json")
        write_log(tmp_path, "break_print", name=f"rank_{rank}_ab")
    options = ["--workers", "1"] if is_separate else []
    report = json.loads(advisor("analyze", str(tmp_path), *options, "--format", "json").out)
    assert [each["line"] for each in report["compilation"]["breaks"]] == [44]
    assert report["compilation"]["logs"] == 2
    text = advisor("analyze", str(tmp_path), *options).out
    assert "Ranks · 2 recorded" in text


def test_users_that_a_log_names_are_redacted_everywhere(
    advisor: Callable[..., Any], tmp_path: Path
) -> None:
    b = TraceBuilder()
    with b.step():
        b.run("aten::mm", "gemm_of_zaphodb", 900)
        b.sync()
    trace, logs = b.write(tmp_path / "trace.json"), tmp_path / "logs"
    logs.mkdir()
    log = write_log(logs, "break_print")
    log.write_text(log.read_text().replace("/home/me/", "/home/zaphodb/"))
    arguments = [str(trace), "--compile-log", str(logs), "--format", "json"]
    assert "zaphodb" in advisor("analyze", *arguments).out
    assert "zaphodb" not in advisor("analyze", *arguments, "--redact").out


def test_two_logs_are_not_the_same_recording(tmp_path: Path) -> None:
    from advisor.compare import compare

    sides = []
    for program in ("break_print", "break_item"):
        (tmp_path / program).mkdir()
        write_log(tmp_path / program, program)
        sides.append(tmp_path / program)
    same = "Both are the same recording."
    assert same not in compare(sides[0], sides[1]).limits
    assert same in compare(sides[0], sides[0]).limits
