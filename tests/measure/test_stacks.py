"""Call stacks: ancestors, whose code a frame is, and the user's line behind an event."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.measure import Analysis
from advisor.measure.host.stacks import (
    CodeOwner,
    climb_stack,
    code_owner,
    forward_ops,
    innermost_ancestor,
    outermost_ancestor,
    parse_frame,
)
from advisor.read import read_trace
from advisor.testing import TraceBuilder

# -- ancestors ---------------------------------------------------------------------------------


@st.composite
def forests(draw):
    count = draw(st.integers(0, 30))
    parent = [draw(st.integers(-1, row - 1)) for row in range(count)]
    wanted = [draw(st.booleans()) for _ in range(count)]
    return np.array(parent, dtype=np.int32), np.array(wanted, dtype=bool)


def walk(parent, wanted, row):
    """All wanted rows from a row upwards."""
    result = []
    while row >= 0:
        if wanted[row]:
            result.append(row)
        row = parent[row]
    return result


@given(forests())
def test_nearest_and_outermost_equal_a_walk_up_the_tree(forest):
    parent, wanted = forest
    walks = [walk(parent, wanted, row) for row in range(len(parent))]
    inner = [walked[0] if walked else -1 for walked in walks]
    outer = [walked[-1] if walked else -1 for walked in walks]
    rows = np.arange(len(parent))
    assert innermost_ancestor(parent, wanted).tolist() == inner
    assert outermost_ancestor(parent, wanted).tolist() == outer
    assert climb_stack(parent, wanted, rows).tolist() == inner
    assert climb_stack(parent, wanted, rows, top=True).tolist() == outer


def test_a_stack_of_a_thousand_frames_settles():
    parent = np.arange(-1, 999, dtype=np.int32)
    wanted = np.zeros(1000, dtype=bool)
    wanted[0] = True
    assert (innermost_ancestor(parent, wanted) == 0).all()


# -- whose code --------------------------------------------------------------------------------


def test_a_frame_has_file_line_and_function():
    assert parse_frame("train.py(12): forward") == ("train.py", 12, "forward")
    assert parse_frame("a (1)/b.py(7): <lambda>") == ("a (1)/b.py", 7, "<lambda>")
    assert parse_frame("nn.Module: Linear_0") is None
    assert parse_frame("<built-in method item of Tensor object at 0x7f>") is None


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("train.py(12): forward", CodeOwner.USER),
        ("moca/library/profiling/profile.py(53): profile_function", CodeOwner.USER),
        ("vllm/v1/worker/gpu_model_runner.py(2907): execute_model", CodeOwner.USER),
        ("/home/me/job/train.py(12): main", CodeOwner.USER),
        ("/workspace/project/lib/data.py(3): load", CodeOwner.USER),
        ("C:\\Users\\me\\train.py(4): main", CodeOwner.USER),
        ("<ipython-input-3-1a2b>(4): train", CodeOwner.USER),
        ("/tmp/ipykernel_12/345.py(3): train", CodeOwner.USER),
        ("transformers/models/bert/modeling_bert.py(250): forward", CodeOwner.LIBRARY),
        ("/opt/env/lib/python3.10/site-packages/timm/models/vit.py(7): forward", CodeOwner.LIBRARY),
        ("C:\\Python\\Lib\\site-packages\\timm\\vit.py(7): forward", CodeOwner.LIBRARY),
        ("torch/nn/modules/linear.py(114): forward", CodeOwner.PYTORCH),
        ("/usr/lib/python3/dist-packages/torch/nn/functional.py(9): linear", CodeOwner.PYTORCH),
        ("/opt/env/lib/python3.10/threading.py(655): wait", CodeOwner.PYTORCH),
        ("threading.py(655): wait", CodeOwner.PYTORCH),
        ("contextlib.py(132): __enter__", CodeOwner.PYTORCH),
        ("multiprocessing/process.py(108): run", CodeOwner.PYTORCH),
        ("logging/__init__.py(1517): debug", CodeOwner.PYTORCH),
        ("<frozen importlib._bootstrap>(1390): _handle_fromlist", CodeOwner.PYTORCH),
        ("<string>(1): <lambda>", CodeOwner.PYTORCH),
        ("<eval_with_key>.3(5): forward", CodeOwner.PYTORCH),
        ("/tmp/torchinductor_me/ab/cab.py(40): call", CodeOwner.PYTORCH),
        ("<built-in function linear>", CodeOwner.PYTORCH),
        ("nn.Module: Linear_0", CodeOwner.PYTORCH),
        ("", CodeOwner.PYTORCH),
    ],
)
def test_the_owner_of_a_frames_code_is_found(name, owner):
    assert code_owner(name) == owner


def test_the_line_is_the_innermost_frame_of_the_users_own_code():
    b = TraceBuilder()
    with (
        b.python("train.py(40): main"),
        b.python("torch/nn/modules/module.py(1743): _call_impl"),
        b.python("net.py(12): forward"),
        b.python("transformers/activations.py(77): forward"),
        b.python("<built-in function linear>"),
        b.op("aten::linear"),
    ):
        b.launch("gemm", 10)
    a = b.analysis()
    launch = int(a.trace.gpu["launch"][0])
    assert a.location(launch) == ("net.py", 12, "forward")
    assert a.location(0) == ("train.py", 40, "main")
    assert a.location(None) == (None, None, None)


def test_library_line_is_named_only_without_user_code():
    b = TraceBuilder()
    with b.python("transformers/trainer.py(9): train"), b.python("runpy.py(86): _run_code"):
        b.host(5)
    a = b.analysis()
    assert a.location(1) == ("transformers/trainer.py", 9, "train")


def test_without_stacks_there_is_no_line():
    b = TraceBuilder()
    with b.op("aten::mm"):
        b.launch("gemm", 10)
    a = b.analysis()
    assert a.user_frame.tolist() == [-1] * a.trace.cpu.height
    assert a.location(0) == (None, None, None)


def test_the_value_read_in_bert_is_found_in_the_calling_code(shared_trace):
    a = Analysis(read_trace(shared_trace("h100_bert_small_inference")))
    rows = np.flatnonzero((a.trace.cpu["name"] == "aten::is_nonzero").to_numpy())
    file, line, function = a.location(int(rows[0]))
    # the chain above it in the file: run_on_input calls transformers, which calls is_nonzero
    assert file == "moca/library/model_hub/huggingface/model/adapters/text_base_model.py"
    assert (line, function) == (28, "run_on_input")


# -- the backward pass -------------------------------------------------------------------------


def forward_and_backward(forward_threads: int = 1) -> TraceBuilder:
    b = TraceBuilder()
    for thread in range(forward_threads):
        with b.thread(1000 + thread), b.python("net.py(5): forward"):
            with b.python("net.py(9): norm"), b.op("aten::size", sequence=3):
                pass  # creates no node: carries the number of the next one that does
            with b.op("aten::linear", sequence=3), b.op("aten::addmm", sequence=3):
                b.launch("gemm", 10)
    with (
        b.thread(2000),
        b.op("autograd::engine::evaluate_function: AddmmBackward0", sequence=3),
        b.op("AddmmBackward0", sequence=3),
        b.op("aten::mm"),
    ):
        b.launch("gemm_backward", 10)
    return b


def test_backward_work_has_the_line_of_its_forward_operator():
    a = forward_and_backward().analysis()
    gpu = a.trace.gpu
    launch = int(gpu["launch"][int((gpu["name"] == "gemm_backward").arg_max())])
    assert a.user_frame[launch] == -1
    owner = int(forward_ops(a.trace)[launch])
    assert a.trace.cpu["name"][owner] == "aten::addmm"
    assert a.location(launch) == ("net.py", 5, "forward")


def test_sequence_number_of_two_forward_threads_is_ambiguous():
    a = forward_and_backward(forward_threads=2).analysis()
    assert (forward_ops(a.trace) == -1).all()


def test_forward_operators_match_autograd_names(tmp_path):
    """Autograd calls a node after the function that made it, so the names are the oracle."""
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4), torch.nn.Softmax(-1)
    )
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True
    ) as recorded:
        for _ in range(2):
            out = net(torch.randn(3, 8))
            with torch.no_grad():
                out.sum()
            (out * 2).log().pow(2).mean().backward()
    path = tmp_path / "cpu.json"
    recorded.export_chrome_trace(str(path))
    assert json.loads(path.read_text())["traceEvents"]
    trace = read_trace(str(path))
    owner, names = forward_ops(trace), trace.cpu["name"].cast(str).to_list()
    expected = {
        "MeanBackward0": "mean",
        "PowBackward0": "pow",
        "LogBackward0": "log",
        "MulBackward0": "mul",
        "SoftmaxBackward0": "_softmax",
        "ReluBackward0": "relu",
        "AddmmBackward0": "addmm",
    }
    seen = [
        (expected[name], names[owner[row]])
        for row, name in enumerate(names)
        if name in expected and owner[row] >= 0
    ]
    assert len(seen) == 2 * (len(expected) + 1)  # two linear layers
    assert all(created == f"aten::{function}" for function, created in seen)
