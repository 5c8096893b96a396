"""Labels of names: they fit, distinct names stay apart, and what tells them apart is what stays."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.core import labels
from advisor.read import open_run

WORDS = st.sampled_from(
    ["void ", "at::native::", "(anonymous namespace)::", "elementwise_kernel", "<", ">", ", ", "(",
     ")", "float", "AddFunctor", "MulFunctor", "128", "4", "{lambda()#1}", "::operator()() const",
     "_", "cutlass::Kernel2<", "train.py(12): ", "\x1b[31m", "é", "…", "#2", " "]
)  # fmt: skip
NAMES = st.lists(
    st.one_of(
        st.text(max_size=60),
        st.lists(WORDS, max_size=25).map("".join),
        st.sampled_from([4, 8]).flatmap(
            lambda n: st.integers(0, 300).map(
                lambda i: (
                    f"void at::native::vectorized_elementwise_kernel<{n}, Functor{i}<float>>()"
                )
            )
        ),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(NAMES, st.integers(min_value=labels.MIN_DISTINCT_WIDTH, max_value=70))
def test_distinct_names_get_distinct_labels_that_fit(names: list[str], width: int) -> None:
    fitted = labels.distinct_labels(names, width)
    assert len(set(fitted)) == len(set(names))
    assert dict(zip(names, fitted, strict=True)) == labels.labels_by_name(names, width)
    assert all(len(label) <= width for label in fitted)
    hidden = {unicodedata.category(char) for label in fitted for char in label}
    assert not hidden & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@settings(deadline=None)
@given(NAMES, st.integers(min_value=labels.MIN_DISTINCT_WIDTH, max_value=70))
def test_short_labels_stay_unchanged_and_all_labels_are_distinct(
    names: list[str], width: int
) -> None:
    fitted = labels.distinct_labels(names, width)
    assert labels.distinct_labels(fitted, width) == fitted
    cleaned = [labels.clean(name) for name in names]
    for name, label in zip(cleaned, fitted, strict=True):
        if len(name) <= width and cleaned.count(name) == names.count(name) and name in names:
            assert label == name


TRACES = """
    a100_train_6steps alexnet b200_eager h100_bert_small_inference h100_qwen_inference
    linear_2080ti_launch_bound mi210_gpu_only mi250_train mi300_timesformer_inference
    mi300_torch_compile nccl_collectives pairs/loader_profiler_workers0 pairs/particle_batch2
    pairs/sam_3_bf16_compiled_sdpa two_ranks_rank0 v100_train_copy_heavy
    """.split()


@pytest.mark.parametrize("trace", TRACES)
def test_on_real_traces_no_kernel_needs_a_number(
    trace: str, shared_trace: Callable[[str], str]
) -> None:
    run = open_run(Path(shared_trace(trace)))
    names = next(iter(run.traces.values())).gpu["name"].cast(pl.String).unique().to_list()
    for width in (30, 44, 66):
        fitted = labels.distinct_labels(names, width)
        assert len(set(fitted)) == len(set(names))
        assert max(map(len, fitted)) <= width
        assert not any(label.rpartition("#")[0].endswith(labels.ELLIPSIS) for label in fitted)


def functor(name: str, number: str = "4") -> str:
    return (
        f"void at::native::vectorized_elementwise_kernel<{number}, at::native::{name}<float>, "
        f"at::detail::Array<char*, 3> >(int, at::native::{name}<float>, at::detail::Array)"
    )


def test_distinguishing_part_of_kernel_names_is_kept() -> None:
    names = [functor(name) for name in ("AddFunctor", "MulFunctor", "FillFunctor")]
    for label, telling in zip(
        labels.distinct_labels(names, 32), ("Add", "Mul", "Fill"), strict=True
    ):
        assert label.startswith("vectorized")
        assert f"{telling}Functor" in label


def test_wrappers_and_namespaces_go_first() -> None:
    inside = "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8"
    name = f"void cutlass::Kernel2<{inside}>({inside}::Params)"
    assert labels.kernel_label(name, 70) == inside
    longer = f"void at::native::kernel<{'float, ' * 40}8>(int, float*)"
    assert labels.kernel_label(longer, 40).startswith("kernel<float")
    assert labels.tidy_name("void at::native::(anonymous namespace)::foo<int>(int)") == "foo<int>"


def test_tiles_of_one_gemm_are_distinguished() -> None:
    names = [
        f"sm80_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize{tile}_stage4_warpsize2x2x1_tensor16x8x8"
        for tile in ("128x128x16", "128x64x16", "64x64x32")
    ]
    fitted = labels.distinct_labels(names, 40)
    for label, tile in zip(fitted, ("128x128x16", "128x64x16", "64x64x32"), strict=True):
        assert tile in label


def test_the_function_of_a_frame_comes_before_its_file() -> None:
    frame = "/home/somebody/a/long/way/to/project/train.py(42): train_one_epoch"
    assert labels.kernel_label(frame, 40) == "train_one_epoch · train.py:42"
    short = "model.py(7): forward"
    assert labels.distinct_labels([short], 40) == [short]
    assert labels.distinct_labels([short], 40, always_tidy=True) == ["forward · model.py:7"]
    other = frame.replace("project", "another")
    assert len({*labels.distinct_labels([frame, other], 40)}) == 2


def test_backward_nodes_and_their_evaluation_stay_apart() -> None:
    names = ["autograd::engine::evaluate_function: AddmmBackward0", "AddmmBackward0"]
    assert labels.distinct_labels(names, 32) == ["evaluate: AddmmBackward0", "AddmmBackward0"]


def test_labels_equal_after_shortening_are_numbered() -> None:
    names = [f"{'<' * 60}{'>' * (60 + i)}" for i in range(3)]
    fitted = labels.distinct_labels(names, 12)
    assert len(set(fitted)) == 3
    assert max(map(len, fitted)) <= 12


def test_empty_names_stay_empty() -> None:
    assert labels.distinct_labels([None, "a", None], 10) == ["", "a", ""]
    assert labels.distinct_labels([], 10) == []


def test_name_differing_by_a_number_keeps_a_word() -> None:
    names = [
        f"kernel<int, int, __nv_bfloat16, float, 0, 1, {n}, cublasGemvParamsEx<int, X>>"
        for n in (6, 7)
    ]
    for label, number in zip(labels.distinct_labels(names, 34), "67", strict=True):
        assert "bfloat16" in label and number in label
