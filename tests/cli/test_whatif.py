"""``advisor whatif``: one baseline, clear errors, and figures that can be checked by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from advisor.replay.edit_language import TARGETS, VERBS, parse_edit
from advisor.testing import TraceBuilder

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of 10 ms of matrix products and 5 ms of softmax, launched far ahead."""
    b = TraceBuilder()
    for _ in range(6):
        with b.step():
            with b.op("aten::mm"):
                b.launch("ampere_sgemm_128x64_nn", 10_000)
            with b.op("aten::softmax"):
                b.launch("softmax_warp_forward", 5_000)
            b.sync()
    return b.write(tmp_path_factory.mktemp("whatif") / "trace.json")


def test_edited_step_is_the_measured_step_minus_gains(advisor: Run, trace: Path) -> None:
    edits = ("--edit", "scale kernel:gemm 0.5", "--edit", "scale kernel:softmax 0.2")
    result = advisor("whatif", str(trace), "--format", "json", *edits)
    assert result.code == 0
    output = json.loads(result.out)
    first, second = output["edits"]
    # By hand: half of 10 ms, then four fifths of 5 ms, with nothing else in the way.
    assert first["gain_ns"] == pytest.approx(5e6, rel=0.01)
    assert second["gain_ns"] == pytest.approx(4e6, rel=0.01)
    measured = output["measured_step_ns"]
    assert first["step_then_ns"] == pytest.approx(measured - first["gain_ns"])
    assert output["edited_step_ns"] == pytest.approx(measured - 9e6, rel=0.01)


def test_steps_lengthened_by_the_profiler_are_called_profiled(
    advisor: Run, trace: Path, shared_file: Callable[[str], str]
) -> None:
    """The run's own steps take 8.7 ms, those of the window 17.2."""
    result = advisor("whatif", shared_file("h100/latent_sampler"), "--edit", "scale kernel:.* 0.9")
    assert "per profiled step (" in result.out
    assert "8.7 ms per step without the profiler, median" in " ".join(result.out.split())
    plain = advisor("whatif", str(trace), "--edit", "scale kernel:gemm 0.5")
    assert "profile" not in plain.out


def test_the_result_leads_and_the_diagnostics_follow(advisor: Run, trace: Path) -> None:
    """Edits given in both ways add up in their order: first those beside the trace."""
    edit, other = "scale kernel:softmax 0.2", "scale kernel:gemm 0.5"
    lines = advisor("whatif", str(trace), edit, "--edit", other).out.splitlines()
    # By hand: 4 of the step's 15 ms and 5 of them are 60%.
    assert re.search(r"→ .* per step \(60% less time\)\.$", lines[0])
    table = [n for n, line in enumerate(lines) if line.lstrip().startswith((edit, other))]
    line_of_accuracy = next(
        n for n, line in enumerate(lines) if line.startswith("How exact the replay is")
    )
    assert lines[table[0]].lstrip().startswith(edit) and max(table) < line_of_accuracy
    assert any("GPU work explained" in line for line in lines[line_of_accuracy:])


def test_the_help_has_an_example_of_each_verb(advisor: Run) -> None:
    output = advisor("whatif", "--help").out
    examples = re.findall(r"^ {4}(\w+ \w.*?) {2,}\w", output, re.MULTILINE)
    assert {parse_edit(example).op for example in examples} == {*VERBS.values()}
    assert all(target in output.split("Targets", 1)[1] for target in TARGETS)


def test_the_selection_of_an_edit_is_counted_and_timed(advisor: Run, trace: Path) -> None:
    result = advisor("whatif", str(trace), "--edit", "scale kernel:softmax 0.2")
    assert "scale kernel:softmax 0.2: 1 kernel per step, 5 ms" in result.out
    assert "next to nothing" not in result.out
    document = json.loads(
        advisor("whatif", str(trace), "--edit", "remove op:aten", "--format", "json").out
    )
    assert document["edits"][0]["selected_per_step"] == 2


def test_edit_of_hidden_work_explains_its_missing_gain(advisor: Run, tmp_path: Path) -> None:
    b = TraceBuilder()
    for _ in range(6):
        with b.step(), b.op("aten::mm"):
            b.launch("gemm", 10_000)
            b.launch("hidden", 2_000, stream=9)
        b.sync()
    path = b.write(tmp_path / "hidden.json")
    result = advisor("whatif", str(path), "--edit", "remove kernel:hidden")
    output = " ".join(result.out.split())
    assert "remove kernel:hidden: 1 kernel per step, 2 ms" in output
    assert "'remove kernel:hidden' gains next to nothing: this time is not on the step's" in output


SOFTMAX, SGEMM = "softmax_warp_forward", "ampere_sgemm_128x64_nn"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("scale kernel:sotfmax 0.5", f"kernels here, nearest first: {SOFTMAX} and {SGEMM}"),
        ("scale kernel:segmm_64 0.5", f"kernels here, nearest first: {SGEMM} and {SOFTMAX}"),
        ("scale family:matmul 0.5", "kernel families here, nearest first: gemm and softmax"),
        ("scale kernel:softmax under:aten::sofmax 0.5", "around it here, nearest first: aten::so"),
        ("remove op:aten::soft_max", "operators here, nearest first: aten::softmax and aten::mm"),
        ("remove python:train.py", "there are no Python frames"),
        ("remove sync:item", "around it here, nearest first:"),
        ("scale comm 0", "kernel families here, nearest first: "),
        ("scale copy:HtoD 0", "there are no copy directions"),
        ("remove loader", "host events here"),
        ("remove gap:loader", "idle causes here, nearest first:"),
    ],
)
@pytest.mark.parametrize("form", ["terminal", "json"])
def test_edit_without_matches_lists_candidates(
    advisor: Run, trace: Path, edit: str, message: str, form: str
) -> None:
    result = advisor("whatif", str(trace), "--edit", edit, "--format", form)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert f"edit {edit!r} selects nothing in these steps" in result.err
    assert message in result.err


def test_every_edit_without_matches_is_reported(advisor: Run, trace: Path) -> None:
    edits = ("scale kernel:gemm 0.5", "scale kernel:nonesuch 0.5", "scale comm 0")
    result = advisor("whatif", str(trace), *(word for e in edits for word in ("--edit", e)))
    assert result.code == 2
    assert "nonesuch" in result.err and "comm 0" in result.err and edits[0] not in result.err


def test_the_list_of_selectable_names_is_bounded(
    advisor: Run, shared_trace: Callable[[str], str]
) -> None:
    trace = shared_trace("a100_train_6steps")
    for edit in ("scale kernel:flash_atention 0.5", "remove op:aten::conv", "remove host:xyz"):
        result = advisor("whatif", trace, "--edit", edit)
        if result.code:
            assert (result.code, result.err.count("\n")) == (2, 1)
            assert "more" in result.err and len(result.err) < 1000


def test_invalid_edit_is_one_line_error_with_exit_code_2(advisor: Run, trace: Path) -> None:
    result = advisor("whatif", str(trace), "--edit", "frobnicate kernel:gemm")
    assert result.code == 2
    assert "frobnicate" in result.err and "Traceback" not in result.err


@pytest.mark.parametrize(
    "name", ["h100_bert_small_inference", "no_gpu_rank", "alexnet", "a100_train_6steps"]
)
def test_the_table_fits_80_columns(
    advisor: Run, shared_trace: Callable[[str], str], name: str
) -> None:
    edits = (
        "remove op:aten::an_operator_with_a_long_name|aten under:the_forward_of_the_model|.",
        "scale host:. 0.123456",
    )
    result = advisor("whatif", shared_trace(name), *(word for e in edits for word in ("--edit", e)))
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80
    words = " ".join(result.out.split())  # a long edit takes two lines
    for edit in edits:
        assert edit in words


def test_whatif_without_marked_steps_is_about_the_recording(
    advisor: Run, shared_trace: Callable[[str], str]
) -> None:
    out = advisor("whatif", shared_trace("alexnet"), "--edit", "async sync").out
    assert "of the recording" in out.splitlines()[0] and "no steps are marked" in out


def test_loader_limit_is_named_when_steps_become_shorter(
    advisor: Run, shared_trace: Callable[[str], str]
) -> None:
    a100 = shared_trace("a100_train_6steps")
    note = "how fast they could be"
    assert note in advisor("whatif", a100, "--edit", "overlap comm").out
    assert note not in advisor("whatif", a100, "--edit", "scale family:gemm 0.9").out
