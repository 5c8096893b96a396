"""PyTorch's out-of-memory exception as text: the figures of each version's wording."""

from __future__ import annotations

from pathlib import Path

import pytest

import advisor
from advisor.cli import run

GIB = 1 << 30
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total "
    "capacity of 79.25 GiB of which 1.25 GiB is free. Including non-PyTorch memory, this process "
    "has 77.50 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and "
    "6.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
    "try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 15.75 GiB total "
    "capacity; 13.25 GiB already allocated; 1.00 GiB free; 14.25 GiB reserved in total by PyTorch)"
)
SHARED = (
    "HIP out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 64.00 GiB of "
    "which 1.00 GiB is free. Process 77 has 33.00 GiB memory in use. Including non-PyTorch memory, "
    "this process has 30.00 GiB memory in use. Of the allocated memory 28.00 GiB is allocated by "
    "PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NEW, {"request": 2, "GPU memory": 79.25, "in tensors": 70, "free at the driver": 1.25,
               "reserved by PyTorch, not in tensors": 6, "other processes": 0.5,
               "this process, outside of PyTorch": 1.5}),
        (OLD, {"request": 0.5, "GPU memory": 15.75, "in tensors": 13.25, "free at the driver": 1,
               "reserved by PyTorch, not in tensors": 1, "other processes": None,
               "this process, outside of PyTorch": None}),
        (SHARED, {"request": 4, "GPU memory": 64, "in tensors": 28, "free at the driver": 1,
                  "reserved by PyTorch, not in tensors": 0.5, "other processes": 33,
                  "this process, outside of PyTorch": 1.5}),
    ],
)  # fmt: skip
def test_error_text_gives_the_memory_of_each_holder(
    text: str, expected: dict[str, float | None], tmp_path: Path
) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 1\n" * 50_000 + "Traceback (most recent call last):\n" + text + "\n")
    report = advisor.analyze(str(log))
    (risk,) = report.risks
    assert risk.rule == "out-of-memory"
    evidence = {item.label: item.value for item in risk.evidence}
    for name, size in expected.items():
        assert evidence[name] == (None if size is None else size * GIB), name
    # what no history shows is not advised
    assert "expandable" not in risk.fix
    assert ("other processes" in risk.fix.lower()) == (text is SHARED)


def test_a_log_without_the_exception_is_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train.log"
    log.write_text("all is well\n" * 100)
    assert run(["analyze", str(log)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
