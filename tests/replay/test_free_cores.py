"""Loading that moves to worker processes needs cores that are free."""

from __future__ import annotations

import pytest

from advisor.core.finding import Finding
from advisor.core.run_directory import HostSample
from advisor.replay.edit_language import parse_edit
from advisor.replay.window_replayer import WindowReplayer
from advisor.rules.input.dataloader_wait import SingleProcessLoader
from advisor.rules.support.common import estimate_contended_loading
from advisor.testing import TraceBuilder

LOADING, STEP = 6_000.0, 10_000.0
"""Time in each step, µs: the loader 6 ms, then 4 ms of the model on the host."""


def replayer(*, computed: bool, used: float | None, cpus: int = 2) -> WindowReplayer:
    """``used``: cores that the process keeps busy, as sampled; ``None``: not recorded."""
    b = TraceBuilder()
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    for _ in range(8):
        with b.step():
            with b.range(name):
                if computed:
                    with b.op("aten::stack", host_us=LOADING):
                        pass
                else:
                    b.host(LOADING)
            for _ in range(4):
                with b.op("aten::mm", host_us=1000):
                    pass
    if used is not None:
        r = b.record_of_run(cpus=cpus, cpus_total=cpus)
        r.steps(60, 10)
        r.watch(host=lambda share: HostSample(process_cpu=100 * used, cpu=100 * used / cpus))
    return WindowReplayer(b.analysis())


def gain(replayer: WindowReplayer, workers: int = 4) -> float:
    """The gain per step."""
    return replayer.gain([parse_edit(f"parallelize loader {workers}")]) / replayer.a.step_ns


def test_cores_are_assumed_free_without_samples() -> None:
    """Loading takes 6 of 10 ms. 1.5 ms of it remain to transfer a batch; the rest slows by 10%."""
    assert gain(replayer(computed=True, used=None)) == pytest.approx(0.39, abs=0.02)


def test_idle_cores_do_the_work() -> None:
    assert gain(replayer(computed=True, used=1.0, cpus=8)) == pytest.approx(0.39, abs=0.02)


def test_workers_on_busy_cores_compete_with_the_main_thread() -> None:
    """Both cores are busy. A worker only gets the 0.6 of a core that the main thread frees by not
    loading. A batch then takes 7.5 / 0.6 = 12.5 ms, with 1.5 ms for its transfer."""
    assert gain(replayer(computed=True, used=2.0)) == pytest.approx(-0.25, abs=0.02)


def test_on_busy_cores_loading_that_waits_needs_none() -> None:
    result = replayer(computed=False, used=2.0)
    assert gain(result) == pytest.approx(0.39, abs=0.02)
    low = result.gain_range([parse_edit("parallelize loader 4")]).low
    assert low <= 0.02 * result.a.step_ns  # if it computes something that is not recorded


def test_workers_gain_nothing_if_the_step_uses_all_cores() -> None:
    """1.4 cores busy over 10 ms are 14 ms of CPU time, by hand. 6 of them load, so that the
    other 4 ms keep 2 cores busy. Loading goes on to take 6 ms of the step, and 1.5 ms for a
    batch to be handed over; optimistically both cores share the 6 ms: 4 + 3 + 0.2 ms are left."""
    result = replayer(computed=True, used=1.4)
    edit = [parse_edit("parallelize loader 1")]
    assert gain(result, 1) == pytest.approx(-0.15, abs=0.02)
    bounds = result.gain_range(edit)
    assert bounds.low / result.a.step_ns == pytest.approx(-0.4, abs=0.05)
    assert 0.26 <= bounds.high / result.a.step_ns <= 0.35


def test_step_on_one_of_two_cores_leaves_one_to_a_worker() -> None:
    """10 ms of CPU time in 10 ms: the second core has 4 ms for the 6 of loading while the step
    computes; the other 2 ms are taken from it."""
    assert gain(replayer(computed=True, used=1.0), 1) == pytest.approx(0.4 - 0.15, abs=0.03)


@pytest.mark.parametrize(("workers", "remaining_ms"), [(1, 7.5), (2, 6.1), (4, 6.1)])
def test_one_worker_takes_the_whole_cost_of_each_batch(workers: int, remaining_ms: float) -> None:
    """A batch takes one worker 6 ms and 1.5 ms to pass on; the step needs 4 ms, 1.5 ms to take it
    over and a tenth of 6 ms more than without workers, and waits for the slower of the two."""
    result = replayer(computed=True, used=1.0, cpus=8)
    assert gain(result, workers) == pytest.approx(1 - remaining_ms / 10, abs=0.02)


@pytest.mark.parametrize("ready_us", [100, 400])
def test_batch_transfer_cost_comes_from_the_trace(ready_us: float) -> None:
    """A loader for images without workers, and one for texts whose workers have a batch ready."""
    b = TraceBuilder()
    for _ in range(8):
        with b.step():
            b.loader_wait(ready_us, workers=2)
            b.loader_wait(6000, workers=0)
            b.run("aten::mm", "ampere_sgemm_128x64_nn", 3000)
            b.sync()
    replayer = WindowReplayer(b.analysis())
    edit = [parse_edit("parallelize loader 4")]
    assert replayer.gain(edit) / 1000 == pytest.approx(6000 - ready_us - 600, abs=50)


@pytest.mark.parametrize(
    ("used", "cpus", "remaining_ms"),
    [
        (1.0, 8, 0.5),  # the workers wait for storage: twice as many bring twice as much
        (4.0, 8, 0.5),  # three cores of theirs, four free: there is room for all
        (7.0, 8, 6 / 7),  # six of theirs, one free
        (8.0, 8, 1.0),
    ],
)
def test_more_workers_use_free_cores(used: float, cpus: int, remaining_ms: float) -> None:
    """The step takes as long as the loader, 10 ms per batch with the workers there are."""
    b = TraceBuilder()
    for _ in range(8):
        with b.step():
            b.loader_wait(8000, workers=2)
            b.run("aten::mm", "ampere_sgemm_128x64_nn", 1000)
            b.sync()
    r = b.record_of_run(cpus=cpus, cpus_total=cpus)
    r.steps(60, 9)
    r.watch(host=lambda share: HostSample(process_cpu=100 * used, cpu=100 * used / cpus))
    replayer = WindowReplayer(b.analysis())
    before = replayer.unedited.period
    after = before - replayer.gain([parse_edit("parallelize loader 2")])
    assert after / before == pytest.approx(remaining_ms, abs=0.02)


def test_pytorch_threads_are_assumed_busy_without_samples() -> None:
    b = TraceBuilder(gpu=None)
    r = b.record_of_run(cpus=4, flags={"num_threads": 3})
    r.steps(60, 10)
    run_steps = b.analysis().run_steps
    assert run_steps is not None
    assert run_steps.used_cores is None
    assert run_steps.computing_share(0.5, on_host=True) is None
    # a core is free for 5 of 10 ms, and the loading needs it for 5
    assert run_steps.remaining_loading_share(0.5, 1.0) == 0.0
    assert run_steps.remaining_loading_share(0.8, 1.0) == pytest.approx(0.75)


def test_cores_of_other_programs_are_not_the_trainings_own() -> None:
    """The process keeps 0.6 of two cores busy, and others the rest: it does not compute on all."""
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        b.loader_wait(8000, workers=0)
        b.on_host("aten::mm", 2000)
    r = b.record_of_run(cpus=2, cpus_total=2)
    r.steps(60, 10, data=8, forward=2)
    r.watch(host=lambda share: HostSample(process_cpu=60, cpu=100))
    a = b.analysis()
    with_others, alone = (
        estimate_contended_loading(a, 0.8, alone=alone) for alone in (False, True)
    )
    assert with_others == pytest.approx(0.5)
    assert alone == pytest.approx(0.25)
    (finding,) = [f for f in SingleProcessLoader().check(a) if isinstance(f, Finding)]
    assert "keeps 0.6 busy, other programs 1.4" in finding.assumptions[0]
    assert "computes on all cores" not in finding.fix
    assert "2.0 of 2 cores are busy: workers share them." in finding.summary


def _busy_loader(below: str, batch_size: int | None, beside: str = "train.py(12): crop") -> str:
    """Write title, fix and code for a training on both of two cores whose loading is in ``below``,
    called by ``encode`` of the Dataset, and a tenth of it in ``beside``."""
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        b.loader_wait(5000, workers=0)
        b.on_host("aten::mm", 5000)
    r = b.record_of_run(cpus=2, cpus_total=2)
    r.event("loader", id=0, workers=0, batch_size=batch_size, item="train.py(4): Rows.__getitem__")
    r.event("loader_iter", id=0)
    r.steps(60, 10, data=5, forward=5)
    frames = [
        "train.py(70): main",
        "torch/utils/data/dataloader.py(784): _SingleProcessDataLoaderIter._next_data",
        "train.py(5): Rows.__getitem__",
        "train.py(9): Rows.encode",
        below,
        beside,
    ]
    r.event("stacks", frames=frames, stacks=[[54, [0, 1, 2, 3, 4]], [6, [0, 1, 2, 3, 5]]])
    r.watch(host=lambda share: HostSample(process_cpu=200, cpu=100))
    a = b.analysis()
    (finding,) = (one for one in SingleProcessLoader().check(a) if isinstance(one, Finding))
    return f"{finding.title}\n{finding.fix}\n{finding.code}\n{finding.assumptions}"


def test_rows_of_a_table_in_memory_are_prepared_once() -> None:
    text = _busy_loader("polars/dataframe/frame.py(10): DataFrame.select", None)
    assert "__init__" in text and "Rows.encode repeats this" in text
    assert "num_workers" not in text and "core" not in text
    assert "num_workers" in _busy_loader("pandas/io/parsers/readers.py(9): read_csv", 32)


@pytest.mark.parametrize(
    ("beside", "batch_size", "images", "one_by_one"),
    [("PIL/Image.py(9): Image.resize", 32, True, True), ("train.py(12): crop", None, False, False)],
)
def test_cheaper_loading_names_the_loaded_data(
    beside: str, batch_size: int | None, *, images: bool, one_by_one: bool
) -> None:
    """A Dataset that makes whole batches (batch_size=None) has no __getitems__ that is called."""
    text = _busy_loader("train.py(12): crop", batch_size, beside)
    assert ("resized" in text) == images
    assert ("__getitems__" in text) == ("work on whole batches" in text) == one_by_one
    assert ("batch_size=None" in text) != one_by_one
    assert "GPU" not in text


def test_workers_come_before_another_way_to_join_samples() -> None:
    """Joining is needed for each batch, and samples need not fit into memory."""
    text = _busy_loader("torch/utils/data/_utils/collate.py(212): default_collate", 32)
    assert not text.startswith("Joining")
    assert text.index("num_workers") < text.index("can be one tensor")


def test_images_that_take_the_loading_are_its_title() -> None:
    text = _busy_loader("PIL/Image.py(9): Image.resize", 32)
    assert text.startswith("Decoding and transforming images takes much of the loading\n")
    assert "v2 transforms, once per batch" in text
