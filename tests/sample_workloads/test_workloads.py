"""Every workload runs, its cure changes the speed and not the numbers, and what a CPU can show of
its finding appears in the slow variant and not in the cured one."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from advisor.advise.engine import analyze  # noqa: E402
from advisor.advise.rule_loading import load_rules  # noqa: E402
from advisor.core.errors import AdvisorError  # noqa: E402
from advisor.core.report import Report  # noqa: E402
from advisor.read import open_run  # noqa: E402
from advisor.sample_workloads import (  # noqa: E402
    HERE,
    Setup,
    Variant,
    catalogue,
    find,
    load,
    running,
)

pytestmark = pytest.mark.timed

ALL = catalogue()
RULES = {rule.id: rule for rule in load_rules(config={})}
ATTEMPTS = 3
"""Whether a loader keeps up depends on what else the machine does: one clean recording counts."""

ON_CPU = [name for name, workload in ALL.items() if workload.shown_on == "cpu" and workload.finds]
ON_GPU = [name for name, workload in ALL.items() if workload.shown_on == "cuda"]
CONTROLS = [name for name, workload in ALL.items() if not workload.finds]
TRUE_ON_CPU = {
    # two processes reduce gradients through gloo, in threads of the host: the wait is measured
    "ddp_accumulation": {"missing-no-sync", "exposed-communication"},
    "ddp_exposed": {"exposed-communication"},
    # a loop over parameters takes the host's time wherever the parameters are
    "single_tensor_optimizer": {"single-tensor-optimizer"},
}
"""Findings that are right without a GPU too. The wait for gloo remains in the cured variant; what
the cure removes does not."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order, and no contention with loader workers and tests beside this one."""
    gc.freeze()  # most workloads end with a collection, and torch has imported much since
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def setup(name: str, variant: Variant, folder: Path, shrink: float = 1.0) -> Setup:
    return Setup(variant=variant, scale=ALL[name].cpu_scale * shrink, folder=str(folder))


def report_of(name: str, variant: Variant, folder: Path) -> Report:
    """Recorded and analysed; a whole run where the rule reads what only the recorder knows."""
    run, out = setup(name, variant, folder), folder / f"{name}-{variant}"
    reads_records_only = all(RULES[rule].reads_record for rule in ALL[name].finds) and bool(
        ALL[name].finds
    )
    files = (running.record_run if reads_records_only else running.record)(name, run, out)
    assert len(files) == ALL[name].processes
    return analyze(open_run(str(out)))


def is_shown(report: Report, rules: set[str]) -> bool:
    """Whether one of the rules is at first or second place among findings or risks. A rule that
    still waits to be shown right on a recording has no place yet: a note of it counts."""
    places = sorted((f.priority, f.rule) for f in report.findings if f.priority is not None)
    top = {rule for _, rule in places[:2]} | {f.rule for f in report.risks[:2]}
    return bool(rules & top or rules & waiting(report))


def waiting(report: Report) -> set[str]:
    """Rules among the notes that would be ranked once they are validated."""
    return {f.rule for f in report.notes if RULES[f.rule].validation == "synthetic"}


def is_mentioned(report: Report, rules: set[str]) -> bool:
    """Whether one of the rules is anywhere in the report, except as a note without a gain."""
    return bool(rules & ({f.rule for f in (*report.findings, *report.risks)} | waiting(report)))


def total_gain_ns(report: Report, rules: set[str]) -> float:
    """Total gain of the findings of the rules, ns per step: the cured step is shorter, so the
    same wait is a larger share of it."""
    return sum(
        f.impact.gain_ns or 0.0
        for f in (*report.findings, *report.notes)
        if f.rule in rules and f.impact is not None
    )


# -- the catalogue ------------------------------------------------------------------------------


def test_every_program_is_a_workload() -> None:
    pattern = re.compile(r"^def (\w+)\(run: Setup\) -> Iterator\[Any\]:", re.MULTILINE)
    sources = [file.read_text("utf-8") for file in HERE.glob("*.py")]
    assert set(ALL) == {name for source in sources for name in pattern.findall(source)}
    assert len(ALL) >= 30


@pytest.mark.parametrize("name", ALL)
def test_workloads_of_source_and_module_are_equal(name: str) -> None:
    declared, program = ALL[name], load(name)
    for field in ("finds", "also", "shown_on", "processes", "cpu_scale", "steps", "samples"):
        assert getattr(program.workload, field) == getattr(declared, field)
    assert (program.__doc__ or "").startswith(declared.title)
    assert "The cure: " in declared.doc or not declared.finds


def test_findings_belong_to_existing_rules() -> None:
    named = {rule for workload in ALL.values() for rule in (*workload.finds, *workload.also)}
    assert named - set(RULES) == set()


def test_unknown_workload_error_suggests_the_nearest_name() -> None:
    with pytest.raises(AdvisorError, match="did you mean simple_cnn"):
        find("simple_cn")
    with pytest.raises(AdvisorError, match="advisor workloads list"):
        load("../secrets")


@pytest.mark.parametrize("wrong", [{"variant": "fast"}, {"scale": 0.0}, {"scale": float("nan")}])
def test_nonsense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"unknown variant|nothing to run"):
        Setup(**wrong)  # type: ignore[arg-type]


# -- running ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_both_variants_of_a_neutral_cure_compute_the_same(name: str, tmp_path: Path) -> None:
    slow = running.drive(name, setup(name, "slow", tmp_path, 0.25), 3)
    cured = running.drive(name, setup(name, "cured", tmp_path, 0.25), 3)
    assert all(math.isfinite(value) for value in (*slow, *cured))
    if not ALL[name].differs:
        assert cured == pytest.approx(slow, rel=1e-4)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


@pytest.mark.parametrize("name", ["simple_cnn", "needless_checkpointing", "ddp_exposed"])
def test_a_seed_means_the_same_numbers_in_every_run(name: str, tmp_path: Path) -> None:
    run = setup(name, "slow", tmp_path, 0.5)
    first = running.drive(name, run, 3)
    torch.rand(3)  # the caller's random state plays no part
    assert running.drive(name, run, 3) == first
    assert running.drive(name, Setup(scale=run.scale, seed=1), 3) != first


def test_workloads_restore_global_state(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state(), torch.get_float32_matmul_precision(), gc.isenabled()
    for name in ("fp32_matmul", "gc_pauses"):
        running.drive(name, setup(name, "cured", tmp_path, 0.5), 1)
    after = torch.get_rng_state(), torch.get_float32_matmul_precision(), gc.isenabled()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_the_callback_is_called_after_every_step(tmp_path: Path) -> None:
    calls: list[int] = []
    values = running.drive(
        "leak", setup("leak", "slow", tmp_path), 5, lambda: calls.append(len(calls))
    )
    assert calls == [0, 1, 2, 3, 4]
    assert len(values) == 5


def test_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to run"):
        running.drive("simple_cnn", Setup(), 0)


def test_a_process_that_fails_ends_all_of_them() -> None:
    with pytest.raises(AdvisorError, match="one of its processes failed"):
        running.in_processes(fail_on_the_second, "ddp_exposed", Setup(), ())


def fail_on_the_second(name: str, run: Setup) -> None:
    """A task for processes; rank 0 waits for rank 1, which is gone."""
    if run.rank == 1:
        raise SystemExit(3)
    torch.distributed.barrier()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_missing_device_is_one_line_error() -> None:
    with pytest.raises(AdvisorError, match="no CUDA device"):
        running.drive("leak", Setup(device="cuda"), 1)


def test_blocks_are_timed_without_their_warm_up(tmp_path: Path) -> None:
    result = running.measure("leak", setup("leak", "cured", tmp_path), seconds=0.2, blocks=4)
    assert len(result) == 4
    assert all(0 < ms < 10_000 for ms in result)


# -- findings -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
def test_the_finding_appears_and_the_cured_twin_has_it_no_more(name: str, tmp_path: Path) -> None:
    finds = set(ALL[name].finds)
    for attempt in range(ATTEMPTS):
        before = report_of(name, "slow", tmp_path / f"slow{attempt}")
        if is_shown(before, finds):
            break
    assert is_shown(before, finds), before.verdict

    # on a busy machine even a loader that keeps up is waited for now and then
    for attempt in range(ATTEMPTS):
        after = report_of(name, "cured", tmp_path / f"cured{attempt}")
        if (
            not is_mentioned(after, finds)
            or total_gain_ns(after, finds) < total_gain_ns(before, finds) / 2
        ):
            break
    assert (
        not is_mentioned(after, finds)
        or total_gain_ns(after, finds) < total_gain_ns(before, finds) / 2
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(each if place % 3 == 0 else pytest.param(each, marks=pytest.mark.thorough)
          for place, each in enumerate(ON_GPU)),
        *CONTROLS,
    ],
)  # fmt: skip
def test_cpu_recordings_report_no_gpu_findings(name: str, tmp_path: Path) -> None:
    variants: tuple[Variant, ...] = ("slow",) if name in CONTROLS else ("slow", "cured")
    for variant in variants:
        run, out = setup(name, variant, tmp_path, 0.25), tmp_path / variant
        running.record(name, run, out, steps=4)
        report = analyze(open_run(str(out)))
        assert report.scope.steps_found == 4
        allowed = TRUE_ON_CPU.get(name, set())
        if variant == "cured":
            allowed = allowed & {"exposed-communication"}
        allowed = allowed | {"cpu-contention"}  # other tests may take the cores
        reported = [(f.rule, f.summary) for f in (*report.findings, *report.risks)]
        assert [finding for finding in reported if finding[0] not in allowed] == []
