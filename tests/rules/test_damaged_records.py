"""Whatever a damaged record holds, every rule says something or nothing, and none fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from advisor.advise.report_fields import build_recorded_view, measure_fields
from advisor.advise.rule_loading import load_rules
from advisor.advise.rule_runner import RULE_FAILED, run_rules
from advisor.core import run_directory as rundir
from advisor.core.run_directory import (
    Event,
    GpuSample,
    HostSample,
    RankInfo,
    RankRecord,
    RecordedDevice,
    Sample,
    StepRow,
)
from advisor.core.trace import blank_trace
from advisor.measure import Analysis
from advisor.rules.memory.eval_without_no_grad import EvalWithoutNoGrad

RULES = [rule for rule in load_rules(config={}) if rule.reads_record]
WHOLE = st.integers(-3, 1 << 66) | st.integers(0, 10**9)
MAYBE = st.none() | WHOLE
PLAIN: Any = st.recursive(
    st.none() | st.booleans() | WHOLE | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
STEPS = st.builds(
    StepRow,
    n=WHOLE,
    t=WHOLE,
    dur=WHOLE,
    phases=st.dictionaries(st.sampled_from(["data", "forward", "other", "x"]), WHOLE),
    gc=WHOLE,
    window=st.none() | st.integers(0, 2),
    samples=MAYBE,
    bytes=MAYBE,
    shapes=MAYBE,
    padding=st.none() | st.floats(-1, 2),
    allocated=MAYBE,
    reserved=MAYBE,
    peak=MAYBE,
    retries=MAYBE,
    rss=MAYBE,
    evaluation=WHOLE,
)
KEYS = st.sampled_from(
    [
        "id",
        "workers",
        "persistent_workers",
        "prefetch_factor",
        "window",
        "steps",
        "state",
        "why",
        "evaluation",
        "workers_started_ns",
        "allocated",
        "reserved",
        "message",
        "snapshot",
        "reason",
        "fault_steps",
        "minor_faults",
        "memory_growth",
        "fault_ns",
    ]
)
EVENTS = st.builds(
    Event,
    t=WHOLE,
    kind=st.sampled_from(["loader", "loader_iter", "window", "oom", "end"]),
    data=st.dictionaries(KEYS, PLAIN, max_size=6),
)
GPUS = st.builds(
    GpuSample,
    uuid=st.sampled_from([None, "GPU-a"]),
    utilisation=MAYBE,
    throttle=MAYBE,
    sm_clock=MAYBE,
    sm_clock_max=MAYBE,
    processes=MAYBE,
    processes_bytes=MAYBE,
    memory_total=MAYBE,
    pcie_gen=MAYBE,
    pcie_width=MAYBE,
    pcie_gen_max=MAYBE,
    pcie_width_max=MAYBE,
    power=MAYBE,
    power_limit=MAYBE,
    power_limit_default=MAYBE,
    ecc_uncorrected=MAYBE,
    xid=st.lists(WHOLE, max_size=2),
    gpm=st.none() | st.dictionaries(st.sampled_from(["sm_util", "dram"]), st.floats(-1, 1e9)),
)
HOSTS = st.builds(
    HostSample,
    cpu=st.none() | st.floats(-1, 1e6),
    process_cpu=st.none() | st.floats(-1, 1e6),
    children_cpu=st.none() | st.floats(-1, 1e6),
    run_delay=MAYBE,
    minor_faults=MAYBE,
    rss=MAYBE,
    disk_read=MAYBE,
    throttled=MAYBE,
    throttled_periods=MAYBE,
)
RECORDS = st.builds(
    RankRecord,
    rank=st.builds(
        RankInfo,
        cpus=st.none() | st.integers(0, 512),
        cpus_total=MAYBE,
        memory_bytes=MAYBE,
        devices=st.lists(st.builds(RecordedDevice, total_bytes=MAYBE, uuid=st.none()), max_size=1),
        flags=st.dictionaries(
            st.sampled_from(
                [
                    "num_threads",
                    "numa_node_gpu",
                    "numa_node_cpus",
                    "anomaly_mode",
                    "sync_debug_mode",
                    "gc_frozen",
                    "cudnn.benchmark",
                ]
            ),
            PLAIN,
        ),
        env=st.dictionaries(
            st.sampled_from(["LOCAL_WORLD_SIZE", "NCCL_DEBUG"]), st.text(max_size=4)
        ),
    ),
    steps=st.lists(STEPS, max_size=20).flatmap(
        lambda some: st.sampled_from([1, 10]).map(lambda times: some * times)
    ),
    samples=st.lists(
        st.builds(Sample, t=WHOLE, gpus=st.lists(GPUS, max_size=1), host=st.none() | HOSTS),
        max_size=8,
    ),
    events=st.lists(EVENTS, max_size=8),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(RECORDS)
def test_no_rule_fails_on_a_damaged_record(record: RankRecord) -> None:
    a = Analysis(blank_trace("<record>", 0), None, record)
    result = run_rules(0, a, RULES)
    assert [item for item in result.skipped if item.why.startswith(RULE_FAILED)] == []
    measure_fields(a)
    msgspec.json.encode(build_recorded_view(a))
    for finding in result.findings:
        msgspec.json.encode(finding)


def test_a_line_with_numbers_beyond_all_bounds_costs_only_itself(tmp_path: Path) -> None:
    folder = tmp_path / "rank0"
    folder.mkdir()
    (tmp_path / rundir.MANIFEST).write_text("{}")
    lines = ['{"n":0,"t":1,"dur":1000}', '{"n":1,"t":1,"dur":1' + "0" * 40 + "}"]
    (folder / rundir.STEPS).write_text("\n".join(lines))
    record = rundir.read_recording(tmp_path).ranks[0]
    run_steps = Analysis(blank_trace("<record>", 0), None, record).run_steps
    assert run_steps is not None and run_steps.dur.tolist() == [1000]


def test_truncated_file_gives_no_finding_on_backward_passes() -> None:
    rule = EvalWithoutNoGrad()
    trace = EvalWithoutNoGrad.examples()["validation"].trace()  # type: ignore[union-attr]
    cut = replace(trace, meta=replace(trace.meta, truncated=True))
    assert list(rule.check(Analysis(trace))) and not list(rule.check(Analysis(cut)))
