"""Library functions behind the loading, the loop and the forward pass have their own cures."""

from __future__ import annotations

import ast
import collections
import copy
import csv
import gzip
import io
import json
import os
import pickle
import queue
import random
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from advisor.core.finding import Finding
from advisor.measure.host.stacks import SampledStack
from advisor.recorder.built_in_calls import called_function
from advisor.recorder.stack_samples import without_search_path
from advisor.rules.host.forward_code import ForwardCode
from advisor.rules.host.loop_code import LoopCode
from advisor.rules.host.loop_phases import LoopPhases
from advisor.rules.host.python_hot_spot import PythonHotSpot
from advisor.rules.host.sampled_hot_spot import SampledHotSpot
from advisor.rules.input.dataloader_wait import SingleProcessLoader
from advisor.rules.input.loader_cores import LoaderWorkers
from advisor.rules.support.library_functions import LIBRARY_FIXES, find_library_use
from advisor.rules.support.loader_waits import SINGLE_PROCESS, find_waits, library_of_loading
from advisor.testing import TraceBuilder

torch = pytest.importorskip("torch")

NPZ = "Reading an .npz archive again at each access"
MADE = "Making windows, filters or modules again"
TEXT, PICKLE, ARRAY = "Parsing text", "Reading the samples with pickle", "Loading an array file"
HDF5, QUERY = "Reading rows of an HDF5 or Zarr file", "Querying a database"
NETWORK, PROGRAMS = "Reading from the network", "Starting other programs"
INFLATE, IMAGES = "Decompressing data", "Decoding and transforming images"
AUDIO, TABLE = "Decoding and resampling audio", "Reading single rows of a table"
ROWS, SKLEARN = (
    "Converting rows of a dataset",
    "Fitting or applying a scikit-learn transform",
)
WORDS, COPIES = "Tokenizing and searching text", "Copying objects with copy.deepcopy"
RANDOM, PICKS = "Drawing random numbers", "Picking random items from a sequence"
TENSORS = "Calling torch.tensor or np.array"
RECORDS, FILES = "Writing logs and records", "Looking for files and opening them"
SEARCHES, MESSAGES = "Searching in lists", "Passing tensors between processes one by one"
WAITS, JOINS = "Waiting (a sleep, a lock, a queue)", "Joining samples to a batch"


def stacks_of(call: Callable[[], object]) -> list[SampledStack]:
    """The stacks in which a call calls functions of C, as the recorder writes them."""
    seen: dict[tuple[tuple[str, ...], str], int] = {}
    own_frame = sys._getframe()

    def record_call(frame: FrameType, event: str, _: Any) -> None:
        if event != "c_call" or frame is own_frame:
            return
        names, at = [], frame
        while at is not None and at is not own_frame:
            file = without_search_path(at.f_code.co_filename)
            names.append(f"{file}({at.f_lineno}): {at.f_code.co_qualname}")
            at = at.f_back  # type: ignore[assignment]
        names.append("train.py(12): Rows.__getitem__")
        # the test's own frame stands for the program's
        frames = [name for name in reversed(names) if "test_library_functions" not in name]
        key = tuple(frames), called_function(frame)
        seen[key] = seen.get(key, 0) + 1

    call()  # once before: caches are filled
    sys.setprofile(record_call)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [SampledStack(20 * count, *key) for key, count in seen.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    np.savez_compressed(root / "x.npz", images=np.zeros((50, 100)))
    np.save(root / "x.npy", np.zeros(50))
    np.savetxt(root / "x.csv", np.zeros((20, 4)), delimiter=",")
    torch.save({"x": torch.zeros(5)}, root / "x.pt")
    (root / "x.gz").write_bytes(gzip.compress(bytes(100_000)))
    return root


LISTS = [list(range(50)) for _ in range(50)]
DATABASE = sqlite3.connect(":memory:")
EVENTS: queue.Queue[int] = queue.Queue()
MEMORY = collections.deque(range(500))


def make_npz_reader(root: Path) -> Callable[[], object]:
    archive = np.load(root / "x.npz")
    return lambda: archive["images"][3]


MET: dict[str, tuple[str, Callable[[Path], Callable[[], object]]]] = {
    "np.load of .npz": (NPZ, make_npz_reader),
    "np.kaiser": (MADE, lambda _: lambda: np.kaiser(64, 8.0)),
    "torch.hann_window": (MADE, lambda _: lambda: torch.hann_window(64)),
    "np.mgrid": (MADE, lambda _: lambda: np.mgrid[0:8, 0:8]),
    "nn.Linear": (MADE, lambda _: lambda: torch.nn.Linear(4, 4)),
    "genfromtxt": (TEXT, lambda root: lambda: np.genfromtxt(root / "x.csv", delimiter=",")),
    "loadtxt": (TEXT, lambda root: lambda: np.loadtxt(root / "x.csv", delimiter=",")),
    "json.loads": (TEXT, lambda _: lambda: json.loads(json.dumps(LISTS[0]), parse_int=float)),
    "csv": (TEXT, lambda _: lambda: csv.reader(io.StringIO("1,2"))),
    "torch.load": (PICKLE, lambda root: lambda: torch.load(root / "x.pt")),
    "pickle.loads": (PICKLE, lambda _: lambda: pickle.loads(b"\x80\x04K\x05.")),
    "np.load": (ARRAY, lambda root: lambda: np.load(root / "x.npy")),
    "sqlite3": (QUERY, lambda _: lambda: DATABASE.execute("SELECT 1")),
    "subprocess": (PROGRAMS, lambda _: lambda: subprocess.run(["true"], check=True)),
    "gzip": (INFLATE, lambda root: lambda: gzip.GzipFile(root / "x.gz").read()),
    "re": (WORDS, lambda _: lambda: re.findall(r"\w", "some words")),
    "deepcopy": (COPIES, lambda _: lambda: copy.deepcopy(LISTS)),
    "random.choice": (PICKS, lambda _: lambda: [random.choice(LISTS) for _ in range(30)]),
    "random.sample": (PICKS, lambda _: lambda: random.sample(MEMORY, 30)),
    "random.gauss": (RANDOM, lambda _: lambda: [random.gauss() for _ in range(30)]),
    "torch.tensor": (TENSORS, lambda _: lambda: torch.tensor(LISTS)),
    "np.array": (TENSORS, lambda _: lambda: np.array(LISTS)),
    "json.dumps": (RECORDS, lambda _: lambda: json.dumps(LISTS, indent=1)),
    "glob": (FILES, lambda root: lambda: list(root.glob("*.csv"))),
    "os.stat": (FILES, lambda root: lambda: [os.stat(root) for _ in range(9)]),  # noqa: PTH116
    "list.index": (SEARCHES, lambda _: lambda: [LISTS[0].index(49) for _ in range(9)]),
    "sleep": (WAITS, lambda _: lambda: time.sleep(0.001)),
    "queue": (WAITS, lambda _: lambda: EVENTS.put(1) or EVENTS.get()),  # type: ignore[func-returns-value]
    "collate": (
        JOINS,
        lambda _: lambda: torch.utils.data.default_collate([(torch.zeros(3), 1)] * 9),
    ),
}


@pytest.mark.parametrize("name", MET)
def test_library_functions_are_recognized_by_their_frames(name: str, folder: Path) -> None:
    work, make = MET[name]
    use = find_library_use(stacks_of(make(folder)))
    assert use is not None and use.cure is not None, use
    assert use.cure.work == work
    assert use.time.location is not None and use.time.location.line == 12


WRITTEN = {
    HDF5: "h5py/_hl/dataset.py(840): Dataset.__getitem__",
    NETWORK: "requests/sessions.py(589): Session.request",
    IMAGES: "/opt/env/lib/python3.12/site-packages/PIL/Image.py(2260): Image.resize",
    "Transforming images": "torchvision/transforms/transforms.py(137): ToTensor.__call__",
    AUDIO: "librosa/core/audio.py(200): load",
    TABLE: "pandas/core/indexing.py(1190): _LocationIndexer.__getitem__",
    ROWS: "datasets/arrow_dataset.py(2840): Dataset._getitem",
    MESSAGES: "multiprocessing/resource_sharer.py(58): DupFd.detach",
    SKLEARN: "sklearn/preprocessing/_data.py(1060): StandardScaler.transform",
}
"""Frames of libraries that are not installed here."""


@pytest.mark.parametrize("work", WRITTEN)
def test_functions_of_other_libraries_are_known_too(work: str) -> None:
    stack = SampledStack(20, ("train.py(9): main", WRITTEN[work]))
    use = find_library_use([stack])
    assert use is not None and use.cure is not None and use.cure.work == work
    assert "/opt" not in use.time.text


def test_array_sampling_is_not_python_sequence_sampling() -> None:
    """A Generator's methods have no frames: only the call shows them."""
    use = find_library_use([SampledStack(20, ("sampler.py(57): Sampler.sample",), ".choice")])
    assert use is not None and use.cure is not None and use.cure.work == RANDOM


def test_each_kind_is_met_by_a_test() -> None:
    assert {cure.work for cure in LIBRARY_FIXES} == {work for work, _ in MET.values()} | set(
        WRITTEN
    )


OTHERS = {
    "a model": lambda: torch.nn.functional.linear(torch.zeros(2, 2), torch.zeros(2, 2)),
    "tensors": lambda: torch.zeros(4).flip(0).add(1).sum(),
    "arrays": lambda: np.zeros(5).astype(np.float32).sum(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_work_on_tensors_and_arrays_has_no_cure(name: str) -> None:
    use = find_library_use(stacks_of(OTHERS[name]))
    assert use is None or use.cure is None


def test_half_of_the_samples_must_share_a_kind() -> None:
    deep = ("train.py(9): main", "copy.py(128): deepcopy")
    frames = ("train.py(9): main", "train.py(20): augment")
    few = [SampledStack(9, deep), SampledStack(11, frames)]
    assert find_library_use(few) is None
    use = find_library_use([SampledStack(6, deep), SampledStack(5, (*deep, "copy.py(9): x")), *few])
    assert use is not None and use.time.share == pytest.approx(20 / 31)
    assert find_library_use([SampledStack(7, deep)]) is None  # too few


def test_an_unknown_library_function_is_named_without_a_cure() -> None:
    frames = ("train.py(9): main", "scipy/ndimage/_interpolation.py(700): zoom")
    use = find_library_use([SampledStack(20, frames)])
    assert use is not None and use.cure is None
    assert use.time.text == "zoom (scipy/ndimage/_interpolation.py), called by main (train.py:9)"


@pytest.mark.parametrize("cure", LIBRARY_FIXES, ids=lambda cure: cure.work)
def test_cures_are_short_sentences_and_code_that_parses(cure: Any) -> None:
    for sentence in re.split(r"(?<=[.:?]) ", f"{cure.fix} {cure.workers}"):
        assert len(sentence.split()) <= 25
    for line in cure.code.splitlines():
        body, mark, _ = line.rpartition("  # ")
        assert len(body if mark else line) <= 74
    code = cure.code
    if code.rstrip().endswith(":"):
        code += "\n    pass"
    ast.parse(code)
    assert cure.work[0].isupper() and not cure.work.endswith(".")


# -- findings ----------------------------------------------------------------------------------

FETCH = "torch/utils/data/_utils/fetch.py(54): _MapDatasetFetcher.fetch"
ITEM = "data.py(30): Parts.__getitem__"
NPZ_FRAME = "numpy/lib/_npyio_impl.py(257): NpzFile.__getitem__"
ZIP = "zipfile.py(955): ZipExtFile.read"
SLEEP = "<built-in function time.sleep>"


def add_samples(b: TraceBuilder, inside: list[str], *, of: int = 80) -> TraceBuilder:
    """``of`` in 100 samples end in these frames, the others in those without the last one."""
    run = b.record_of_run()
    stacks = [[of, list(range(len(inside)))], [100 - of, list(range(len(inside) - 1))]]
    run.event("stacks", frames=inside, stacks=stacks)
    return b


def loading(*below: str, workers: int = 0) -> TraceBuilder:
    """Steps of 5 ms of loading and 4 ms of training."""
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        b.loader_wait(5000, workers=workers)
        b.on_host("aten::mm", 4000)
    b.record_of_run().steps(60, 9, data=5, forward=4)
    return add_samples(b, ["train.py(70): main", FETCH, ITEM, *below])


def finding_of(rule: Any, b: TraceBuilder) -> Finding:
    (finding,) = (f for f in rule.check(b.analysis()) if isinstance(f, Finding))
    return rule.complete(finding)  # type: ignore[no-any-return]


def test_exact_loading_fix_precedes_more_workers() -> None:
    finding = finding_of(SingleProcessLoader(), loading(NPZ_FRAME))
    assert finding.title == f"{NPZ} takes much of the loading"
    assert finding.fix.index("np.load keeps none") < finding.fix.index("Workers come second")
    assert "may return garbage" in finding.fix and "np.load" in finding.code
    assert (finding.where[0].file, finding.where[0].line) == ("data.py", 30)
    assert "80% of the sampled stacks of the loading are in NpzFile.__getitem__" in finding.summary
    # 80% of it goes but a tenth; at best half of the rest too; at worst 0.4 of it stay
    (edit,) = finding.edits
    assert edit.factor == pytest.approx(1 - 0.8 * 0.9)
    assert edit.best_factor == pytest.approx(1 - 0.9)
    assert edit.worst_factor == pytest.approx(1 - 0.8 * 0.6)


def test_workers_come_first_where_the_loading_only_waits() -> None:
    finding = finding_of(SingleProcessLoader(), loading(SLEEP))
    assert finding.title == SingleProcessLoader.title
    assert finding.fix.index("num_workers=") < finding.fix.index("Remove the wait")
    assert [edit.op for edit in finding.edits] == ["parallelize"]


def test_loading_in_user_code_still_advises_workers() -> None:
    finding = finding_of(SingleProcessLoader(), loading("data.py(40): Parts.augment"))
    assert finding.title == SingleProcessLoader.title and "Workers come second" not in finding.fix


def test_window_stacks_name_functions_without_samples() -> None:
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        with (
            b.python("train.py(70): main"),
            b.range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
        ):
            with (
                b.python("data.py(30): __getitem__"),
                b.python("numpy/lib/_npyio_impl.py(257): __getitem__"),
                b.python(ZIP.replace("ZipExtFile.", "")),
            ):
                b.host(4000)
            with b.python("data.py(31): __getitem__"):
                b.host(1000)
        b.on_host("aten::mm", 4000)
    finding = finding_of(SingleProcessLoader(), b)
    assert finding.title == f"{NPZ} takes much of the loading"
    assert "80% of the loading is in __getitem__ (numpy/lib/_npyio_impl.py)" in finding.summary


def test_call_in_many_rows_counts_with_its_total_time() -> None:
    """Three thousand short calls, each a row of its own, beside 2 ms in one row."""
    b = TraceBuilder(gpu=None)
    with (
        b.step(),
        b.python("train.py(70): main"),
        b.range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
        b.python("data.py(30): __getitem__"),
        b.python("data.py(30): <listcomp>"),
    ):
        for _ in range(3000):
            with b.python("copy.py(128): deepcopy"):
                b.host(1)
        with b.python("data.py(40): augment"):
            b.host(2000)
    a = b.analysis()
    waits = find_waits(a, SINGLE_PROCESS)
    assert waits is not None
    use = library_of_loading(a, waits)
    assert use is not None and use.cure is not None and use.cure.work == COPIES
    cpu = a.trace.cpu
    copies = cpu["dur"].filter(cpu["name"].cast(str) == "copy.py(128): deepcopy").sum()
    assert use.time.share == pytest.approx(copies / waits.total, abs=0.01)
    assert use.time.text == "deepcopy (copy.py), called by __getitem__ (data.py:30)"


def test_times_of_a_window_go_before_samples() -> None:
    """Samples miss short Python; the window has it."""
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        with (
            b.python("train.py(70): main"),
            b.range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
            b.python("data.py(30): __getitem__"),
        ):
            with b.python("copy.py(128): deepcopy"):
                b.host(4000)
            b.host(1000)
        b.on_host("aten::mm", 4000)
    b.record_of_run().steps(60, 9, data=5, forward=4)
    finding = finding_of(
        SingleProcessLoader(), add_samples(b, [FETCH, ITEM, "random.py(3): choice"])
    )
    assert finding.title == f"{COPIES} takes much of the loading"


def test_the_rule_about_cores_names_the_function_too() -> None:
    """The run uses eight cores, without a profiled window."""
    b = TraceBuilder()
    r = b.record_of_run(cpus=8)
    r.event("loader", id=1, workers=0)
    r.event("loader_iter", id=1)
    r.steps(60, 10, data=6, forward=2)
    finding = finding_of(
        LoaderWorkers(), add_samples(b, ["train.py(7): main", FETCH, ITEM, NPZ_FRAME])
    )
    assert finding.title == f"{NPZ} takes much of the loading"


def test_the_loops_own_code_is_named_by_its_library_function() -> None:
    b = TraceBuilder(gpu=None)
    b.record_of_run().steps(60, 10, forward=2, backward=2)
    b = add_samples(b, ["train.py(50): main", "train.py(12): log", "json/__init__.py(231): dumps"])
    finding = finding_of(LoopPhases(), b)
    assert finding.title == f"{RECORDS} takes much of the step"
    assert finding.impact is not None and finding.impact.gain_ns is not None
    assert finding.impact.gain_ns == pytest.approx(0.9 * 0.8 * 6e6, rel=0.02)


def test_a_library_function_in_a_window_with_stacks_is_named_too() -> None:
    b = TraceBuilder(gpu=None)
    for _ in range(4):
        with b.step(), b.python("train.py(30): main"):
            b.on_host("aten::mm", 4000)
            with b.python("train.py(12): ask_server"), b.python("<built-in function sleep>"):
                b.host(3000)
    assert finding_of(LoopCode(), b).title == f"{WAITS} takes much of the step"


def test_table_built_in_forward_names_its_library_function() -> None:
    example = ForwardCode.examples()["without samples"]
    assert isinstance(example, TraceBuilder)
    call = "torch/nn/modules/module.py(1789): Module._call_impl"
    place = ["train.py(3): main", call, "model.py(9): Net.forward"]
    kaiser = "numpy/lib/_function_base_impl.py(3660): kaiser"
    finding = finding_of(ForwardCode(), add_samples(example, [*place, kaiser]))
    assert finding.title == f"{MADE} takes much of the forward pass"


@pytest.mark.parametrize(("after", "line"), [(56, 55), (58, 57), (50, None)])
def test_unsampled_python_is_located_between_its_neighbours(after: int, line: int | None) -> None:
    """NumPy in short calls keeps the interpreter, so that no sample falls in it."""
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        with b.range("advisor::forward"):
            b.on_host("aten::sum", 900)
            b.host(2_000)
            b.on_host("aten::to", 10)
            b.on_host("aten::matmul", 4_000)
    run = b.record_of_run()
    run.steps(60, 7, forward=7)
    call = "torch/nn/modules/module.py(1789): Module._call_impl"
    frames = [
        *(call, "mel.py(54): LogMel.forward", "<built-in function .sum>"),
        *(f"mel.py({after}): LogMel.forward", "<built-in function torch.matmul>"),
    ]
    run.event("stacks", frames=frames, stacks=[[20, [0, 1, 2]], [90, [0, 3, 4]]])
    where = finding_of(ForwardCode(), b).where
    assert [(place.file, place.line) for place in where] == ([("mel.py", line)] if line else [])


def test_fix_of_code_idling_the_gpu_comes_first() -> None:
    example = SampledHotSpot.examples()["operators on the CPU"]
    assert isinstance(example, TraceBuilder)
    frames = ["serve.py(9): main", "serve.py(12): prepare", "copy.py(128): deepcopy"]
    example.record_of_run().event("stacks", frames=frames, stacks=[[900, [0, 1, 2]]])
    assert finding_of(SampledHotSpot(), example).fix.startswith("Copy only what changes")


def test_a_library_function_in_a_window_with_a_gpu_is_named_too() -> None:
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.python("train.py(30): train_step"):
            with b.python("text.py(12): words"), b.python("re/__init__.py(214): findall"):
                b.host(3000)
            b.product(4000, wait=True)
    finding = finding_of(PythonHotSpot(), b)
    assert finding.fix.startswith("Tokenize the texts once")
    assert "100% of this time is in findall (re/__init__.py), called by words" in finding.summary


@pytest.mark.parametrize(("name", "private"), [("_set_context", True), ("compile_plan", False)])
def test_inner_functions_of_a_library_are_named_by_the_library(name: str, private: bool) -> None:
    b = TraceBuilder()
    for _ in b.steps():
        with b.python("/venv/site-packages/diffusers/hooks.py(5): " + name):
            b.host(3000)
        b.product(9000, wait=True)
    (finding,) = (each for each in PythonHotSpot().check(b.analysis()) if isinstance(each, Finding))
    assert finding.title == (
        "Python code of diffusers leaves the GPU idle"
        if private
        else f"The function {name} leaves the GPU idle"
    )
    assert f"the call around {name}" in finding.fix
