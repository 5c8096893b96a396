"""Comparisons report work that began before a recording, and its interval."""

from __future__ import annotations

from pathlib import Path

import advisor
from advisor.compare.compare import compare
from advisor.render.formats import COMPARISONS

CORPUS = Path(__file__).parents[1] / "corpus"


def test_work_launched_before_a_recording_is_reported_omitted() -> None:
    """463 kernels of one trace were launched before it; the other has none of them."""
    files = [
        CORPUS / f"{name}.json.gz" for name in ("h100_qwen_inference", "h100_bert_small_inference")
    ]
    before, after = map(advisor.analyze, files)
    assert before.scope.launched_before_ns > 13_000_000 and after.scope.launched_before_ns == 0
    (limit,) = (each for each in compare(*files).limits if "launched before" in each)
    assert limit.endswith("is excluded: 13.7 ms before, none after.")


def test_the_interval_of_a_difference_is_a_sentence() -> None:
    pair = [CORPUS / "pairs" / f"loader_autograd_workers{n}.json.gz" for n in (0, 4)]
    text = " ".join(COMPARISONS.render("terminal", compare(*pair)).split())
    assert (
        "The mean step became 44.4 ms shorter. With 95% confidence it is between 18.2 ms and "
        "70.7 ms shorter." in text  # in time: the verdict has the shares
    )
