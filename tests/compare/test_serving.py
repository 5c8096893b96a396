"""Two runs of an engine compare by phase and by part of a layer, per token."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.compare.compare import compare
from advisor.testing import TraceBuilder


def _engine(path: Path, batch: int, gemm: str, *, eager: bool) -> str:
    """Five decode steps and a prompt; a layer is a product of 20 µs and attention of 10."""
    b = TraceBuilder("H100")
    layer = [(gemm, 20.0), ("flash_fwd_splitkv_kernel", 10.0)] * 10
    for step in range(6):
        mark = f"execute_context_0(0)_generation_{batch}({batch})"
        with b.range("execute_context_1(1000)_generation_0(0)" if step == 2 else mark):
            if eager:
                for name, us in layer:
                    with b.op("aten::mm" if us == 20 else "flash_attn::_flash_attn_forward"):
                        b.host(80)
                        b.launch(name, us)
            else:
                b.graph_launch(layer)
            b.sync("cudaStreamSynchronize")
    return str(b.write(path))


def test_graphs_off_and_on_with_another_batch_and_other_kernels(tmp_path: Path) -> None:
    before = _engine(tmp_path / "off.json", 8, "ampere_sgemm_128x64_nn", eager=True)
    after = _engine(tmp_path / "on.json", 16, "nvjet_hsh_64x8", eager=False)
    c = compare(before, after)
    amounts = {item.name: (item.before, item.after) for item in c.amounts}
    # per token: 300 µs of layers in a step, for 8 and for 16 requests
    step_before, step_after = amounts["decode, per step"]
    assert step_before is not None
    assert step_after is not None
    assert step_before > 2 * step_after
    assert amounts["decode, per token"] == (step_before / 8, step_after / 16)
    product = amounts["decode: dense gemm, per token"]
    assert product == pytest.approx((200e3 / 8, 200e3 / 16))
    assert amounts["decode: attention, per token"] == pytest.approx((100e3 / 8, 100e3 / 16))
    assert amounts["decode, GPU busy"][1] == pytest.approx(1, abs=0.1)
    assert c.verdict.startswith("Decode takes ")
    assert "less time per token" in c.verdict
    text = str(c)
    assert "Inference by phase" in text
    assert "decode: dense gemm, per token" in text
