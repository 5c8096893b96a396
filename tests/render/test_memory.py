"""A memory snapshot in the formats that people read elsewhere than in a terminal."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from markdown_it import MarkdownIt

import advisor
from advisor.core import text as t
from advisor.core.report import Report
from advisor.render.formats import REPORTS
from advisor.testing.allocator import MIB, FakeAllocator, Training

SCHEMA = Path(__file__).parents[1] / "data" / "sarif" / "sarif-2.1.0.json"
HOSTILE = "/src/a|b`c<img src=x>\n::error::@team/train.py"


@pytest.fixture
def report(tmp_path: Path) -> Report:
    """Eight steps, and 7 MiB that a line with an evil name holds."""
    m = FakeAllocator()
    training = Training(m, logits=96 * MIB)
    with m.at((HOSTILE, 3, "main")):
        m.alloc(700 * MIB)
    for _ in range(8):
        training.step()
    return advisor.analyze(str(m.write(tmp_path / "memory.pickle")))


CORPUS = Path(__file__).parents[1] / "corpus" / "memory"


@pytest.mark.parametrize("name", ["opt13b_weights", "stable_diffusion_no_history"])
def test_unused_memory_shows_the_gain_of_emptying_the_cache(name: str) -> None:
    """The returned memory is the segments whose blocks are all inactive, added up from the file
    itself."""
    file = CORPUS / f"{name}.pickle.gz"
    segments = pickle.loads(gzip.decompress(file.read_bytes()))["segments"]
    unused_sizes = [
        each["total_size"]
        for each in segments
        if all(block["state"] == "inactive" for block in each["blocks"])
    ]
    report = advisor.analyze(file)
    assert report.memory[0].returnable == sum(unused_sizes) > 0
    returned = f"torch.cuda.empty_cache() returns {t.format_bytes(sum(unused_sizes))} of it"
    assert returned in report.verdict


def test_unused_memory_at_a_peak_is_not_reported_as_returnable() -> None:
    report = advisor.analyze(CORPUS / "windows_training.pickle.gz")
    assert report.memory[0].at == "peak" and "empty_cache" not in report.verdict


def test_the_cheapest_saving_of_a_snapshot_has_its_code() -> None:
    report = advisor.analyze(CORPUS / "windows_training.pickle.gz")
    text = REPORTS.render("terminal", report, width=80)
    assert (
        "If memory is short, first 'fused attention': 2.25 GiB (17%); it adds no work"
        in report.verdict
    )
    assert "Most is freed by 'offload activations': 11.1 GiB (85%)" in report.verdict
    assert report.verdict.endswith("; usually faster is 'checkpointing': 10.3 GiB (80%).")
    assert re.search(r"checkpointing +10.3 GiB +2nd forward pass +\S*model.py:253", text)
    assert "scaled_dot_product_attention(q, k, v, attn_mask=mask)" in text


def test_memory_page_draws_categories(report: Report) -> None:
    bars = REPORTS.render("html", report).split('class="stairs"')[1].split("</table>")[0]
    listed = {each.category: each.bytes for each in report.memory[0].categories}
    largest = max(listed, key=lambda name: listed[name])
    assert f">{largest}</th><td>{t.format_bytes(listed[largest])}</td>" in bars
    assert 'width="100.00"' in bars


def test_markdown_has_the_tables(report: Report) -> None:
    source = REPORTS.render("markdown", report)
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(source)
    rows: list[list[str]] = []
    for token in tokens:
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline" and rows and token.level > 2:
            parts = [child.content for child in token.children or [] if child.type != "html_inline"]
            rows[-1].append("".join(parts))
        assert token.type != "html_block" or "img" not in token.content
    row_by_name = {row[0]: row for row in rows}
    (view,) = report.memory
    for each in view.held[:8]:
        line = next(row for name, row in row_by_name.items() if name.endswith(each.category)
                    and (each.file is None or f":{each.line} " in name)
                    and row[1] == t.format_bytes(each.bytes))  # fmt: skip
        assert len(line) == 4
        assert line[2:] == [
            t.format_share(each.bytes / view.allocated),
            t.format_count(each.blocks),
        ]
    assert "Segments" in source and "What a change frees" in source


def test_github_has_one_memory_notice(report: Report) -> None:
    lines = REPORTS.render("github", report).splitlines()
    (notice,) = [line for line in lines if "What held the memory" in line]
    assert notice.startswith("::notice title=What held the memory at its peak::")
    largest = report.memory[0].held[0]
    assert f"bytes {t.format_bytes(largest.bytes)}" in notice
    assert all(line.startswith("::") for line in lines)
    assert not [line for line in lines if line.startswith("::error")]


def test_sarif_has_the_memory_peak_among_its_notifications(report: Report) -> None:
    log = json.loads(REPORTS.render("sarif", report))
    validator = Draft202012Validator(json.loads(SCHEMA.read_bytes()))
    assert [error.message for error in validator.iter_errors(log)] == []
    messages = [one["message"]["text"]
            for one in log["runs"][0]["invocations"][0]["toolExecutionNotifications"]]  # fmt: skip
    largest = report.memory[0].held[0]
    assert any(
        t.format_bytes(largest.bytes) in text and f":{largest.line} " in text for text in messages
    )
    assert any(text.startswith("What held the memory at its peak: held:") for text in messages)


@pytest.mark.parametrize("form", ["markdown", "github", "sarif"])
def test_trace_without_snapshot_has_no_memory_section(form: str, report: Report) -> None:
    report.memory = []
    assert "What held the memory" not in REPORTS.render(form, report)


def test_out_of_memory_is_critical_and_shows_code_once() -> None:
    report = advisor.analyze(CORPUS / "h100_full.pickle.gz")
    (risk,) = report.risks
    text = REPORTS.render("html", report)
    assert risk.severity == "critical" and '<span class="badge critical">' in text
    for form in ("html", "terminal"):
        assert (
            REPORTS.render(form, report, details=True).count("LigerFusedLinearCrossEntropyLoss()")
            == 1
        )
