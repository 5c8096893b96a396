"""The frame of nested module calls that stands for operators in the innermost one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from advisor.measure.host.module_calls import find_place

FRAMES = [
    "train.py(9): <module>",
    "train.py(30): Net.forward",
    "torch/nn/modules/linear.py(120): Linear.forward",
    "/venv/lib/python3.11/site-packages/transformers/gpt2.py(70): GPT2Attention.forward",
    "/venv/lib/python3.11/site-packages/transformers/gpt2.py(60): GPT2Attention.forward",
    "train.py(33): Net.forward",
    "torch/nn/modules/container.py(240): Sequential.forward",
]
LOOP, NET, LINEAR, IN_ATTENTION, ATTENTION, IN_NET, SEQUENTIAL = range(len(FRAMES))


@pytest.mark.parametrize(
    ("chain", "line", "layer", "is_definition"),
    [
        ((LOOP, NET), 30, None, True),
        ((LOOP, NET, IN_NET, LINEAR), 33, None, False),
        ((LOOP, NET, IN_NET, SEQUENTIAL, SEQUENTIAL, LINEAR), 33, None, False),
        ((LOOP, ATTENTION), 9, "GPT2Attention", False),
        ((LOOP, NET, IN_NET, ATTENTION, IN_ATTENTION, LINEAR), 33, "GPT2Attention", False),
        ((IN_ATTENTION, LINEAR), 70, None, False),
    ],
)
def test_the_innermost_frame_of_the_users_code_is_named(
    chain: tuple[int, ...], line: int, layer: str | None, is_definition: bool
) -> None:
    place = find_place(FRAMES, tuple(pairwise(chain))[::2])
    assert place is not None
    assert (place.frame.line, place.layer, place.is_definition) == (line, layer, is_definition)


def test_calls_in_torch_alone_have_no_place() -> None:
    assert find_place(FRAMES, ((SEQUENTIAL, LINEAR), (-1, -1))) is None
