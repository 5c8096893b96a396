"""Files of others: no name in a folder makes a command wait, or fills the memory."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path

import pytest

from advisor import cli
from advisor.advise.rule_loading import load_rules, read_config
from advisor.core import files
from advisor.core.errors import AdvisorError
from advisor.core.files import open_regular, read_lines, read_regular
from advisor.core.run_directory import (
    EVENTS,
    MANIFEST,
    RANK,
    STEPS,
    TELEMETRY,
    memory_weight,
    read_recording,
)
from advisor.export import rewrite
from advisor.read import read_trace
from advisor.read.formats.scalene import read_scalene


@pytest.fixture(params=["pipe", "zero", "folder", "loop", "dangling"])
def irregular_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Something that is no regular file."""
    path = tmp_path / "file"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "folder":
        path.mkdir()
    else:
        path.symlink_to({"zero": "/dev/zero", "loop": "file", "dangling": "gone"}[request.param])
    return path


def run_directory(folder: Path) -> Path:
    """Ten steps of 10 ms, as little as a run can be."""
    rank = folder / "rank0"
    rank.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    (rank / RANK).write_text('{"rank":0}')
    lines = [f'{{"n":{n},"t":{n * 10_000_000},"dur":10000000}}' for n in range(10)]
    (rank / STEPS).write_text("\n".join(lines) + "\n")
    (rank / TELEMETRY).write_text('{"t":1}\n')
    (rank / EVENTS).write_text('{"t":1,"kind":"end","data":{}}\n')
    return folder


def test_only_regular_files_are_opened(irregular_file: Path) -> None:
    with pytest.raises(OSError):
        open_regular(irregular_file)


def test_every_reader_names_the_file_it_cannot_read(irregular_file: Path, tmp_path: Path) -> None:
    for read in (lambda: read_trace(str(irregular_file)), lambda: read_scalene(irregular_file)):
        with pytest.raises(AdvisorError) as caught:
            read()
        assert "\n" not in str(caught.value)
    (tmp_path / "pyproject.toml").symlink_to(irregular_file)
    assert read_config(tmp_path) == {}  # is_file() says no, without a look inside
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / "mine.py").symlink_to(irregular_file)
    with pytest.raises(AdvisorError, match=r"mine.py: cannot be read"):
        load_rules(rules)
    assert cli.run(["report", str(irregular_file), "--html", str(tmp_path / "x.html")]) == 2


@pytest.mark.parametrize("name", [RANK, STEPS, TELEMETRY, EVENTS])
def test_run_is_read_without_irregular_files(
    irregular_file: Path, tmp_path: Path, name: str
) -> None:
    folder = run_directory(tmp_path / "run")
    place = folder / "rank0" / name
    place.unlink()
    if irregular_file.is_symlink():
        target = irregular_file.readlink()
        place.symlink_to(name if target.name == irregular_file.name else target)
    else:
        irregular_file.rename(place)
    record = read_recording(folder).ranks[0]
    assert len(record.steps) == (0 if name == STEPS else 10)


@pytest.mark.parametrize(
    "damage",
    [
        b'{"a":' * 20_000,
        b"[" * 100_000,
        b'{"kind":"\xff","run_id":"\xff"}',
        b"\xff" * 1000,
        b'{"n":' + b"9" * 10_000,
        b"x" * (2 << 20),
        b'"' * 500,
        b"",
    ],
)
def test_a_damaged_line_is_reported_and_skipped(tmp_path: Path, damage: bytes) -> None:
    folder = run_directory(tmp_path / "run")
    for name in (STEPS, TELEMETRY, EVENTS):
        file = folder / "rank0" / name
        file.write_bytes(damage + b"\n" + file.read_bytes())
    (folder / "rank0" / RANK).write_bytes(damage)
    recording = read_recording(folder)
    record = recording.ranks[0]
    assert (len(record.steps), len(record.samples), len(record.events)) == (10, 1, 1)
    assert sum("1 damaged line" in line for line in recording.problems) == (3 if damage else 0)
    (folder / MANIFEST).write_bytes(damage)
    with pytest.raises(AdvisorError, match="not a manifest"):
        read_recording(folder)


def test_telemetry_of_many_trifles_takes_bounded_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_directory(tmp_path / "run")
    many = b'{"t":1,"gpus":[' + b",".join([b"{}"] * 100_000) + b"]}\n"
    full = b'{"t":2,"gpus":[' + b",".join([b"{}"] * 60) + b"]}\n"
    (folder / "rank0" / TELEMETRY).write_bytes(many * 4 + full * 3000)
    monkeypatch.setattr("advisor.core.run_directory.ROOM_BYTES", 8 << 20)
    begin = time.process_time()
    recording = read_recording(folder)
    samples = recording.ranks[0].samples
    assert time.process_time() - begin < 5
    assert len(samples) > 30 and all(len(sample.gpus) == 60 for sample in samples)
    assert sum(map(memory_weight, samples)) <= 8 << 20
    assert any("4 damaged lines left out" in line for line in recording.problems)


def test_long_telemetry_is_thinned_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("advisor.core.run_directory.ROOM_BYTES", 400 * 100)
    monkeypatch.setattr("advisor.core.run_directory.ROOM_FACTOR", 0)
    folder = run_directory(tmp_path / "run")
    lines = b"".join(b'{"t":%d}\n' % t for t in range(1000))
    (folder / "rank0" / TELEMETRY).write_bytes(lines)
    recording = read_recording(folder)
    times = [sample.t for sample in recording.ranks[0].samples]
    assert times == list(range(0, 1000, 16))  # evenly: 63 of at most 100
    assert any("one sample in 16 kept" in line for line in recording.problems)


@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
def test_lines_are_independent_of_block_size(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK", block)
    path = tmp_path / "x"
    path.write_bytes(b"ab\n\n  \ncdefghij\nk\nlmnopqrst")
    with path.open("rb") as file:
        assert list(read_lines(file, 100, 5)) == [b"ab", None, b"k", None]
    with path.open("rb") as file:
        assert list(read_lines(file, 9, 5)) == [b"ab", b"cd"]


def test_too_long_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(AdvisorError, match="larger than"):
        read_regular(path, 4)


def test_a_pipe_gets_advice_on_how_to_pass_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    os.mkfifo(path)
    assert cli.run(["analyze", str(path)]) == 2
    assert "a pipe, not a file" in capsys.readouterr().err


# -- work in proportion -------------------------------------------------------------------------


def test_half_a_million_gzip_members_are_read_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(b'{"a":"') + gzip.compress(b"x") * 480_000)
    begin = time.process_time()
    with pytest.raises(AdvisorError, match="cut off before its first event"):
        read_trace(str(path))
    assert time.process_time() - begin < 15


def test_file_expanding_beyond_its_size_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("advisor.read.formats.kineto.reader.MIN_CPU_SECONDS", 0.1)
    event = b'{"ph":"X","cat":"cpu_op","name":"aten::mm","ts":%d,"dur":1}'
    text = b",".join([*(event % n for n in range(20)), *([b"{}"] * 4_000_000)])
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents":[' + text + b"]}", 1))
    begin = time.process_time()
    trace = read_trace(str(path))
    assert time.process_time() - begin < 15
    assert trace.cpu.height == 20
    assert trace.meta.truncated
    assert "too much work for its size: read up to" in str(trace.meta.damage)


def test_memory_exhausting_configuration_is_refused(tmp_path: Path) -> None:
    for text in ("a" + ".a" * 30_000 + "=1\n", "a=" + "[" * 5000, "x='" + "y" * (1 << 20) + "'"):
        (tmp_path / "pyproject.toml").write_text(text)
        with pytest.raises(AdvisorError, match=r"pyproject.toml: "):
            read_config(tmp_path)


def test_steps_without_duration_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = (
        '{"ph":"X","cat":"user_annotation","name":"ProfilerStep#%d","ts":5,"dur":0,"pid":1,"tid":1}'
    )
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents":[' + ",".join(mark % n for n in range(3)) + "]}")
    for line in (["analyze", str(path)], ["whatif", str(path), "-e", "remove sync:item"]):
        assert cli.run(line) == 2
        message = capsys.readouterr().err
        assert "its 3 steps have no length" in message and "--steps" not in message


def test_an_export_is_valid_json_whatever_bytes_came_in(tmp_path: Path) -> None:
    event = b'{"ph":"X","cat":"cpu_op","name":"a\xff\xed\xa0","ts":1,"dur":1}'
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    source.write_bytes(b'{"traceEvents":[' + event + b"]}")
    for redacted in (False, True):
        assert rewrite(str(source), target, redacted=redacted).repaired
        assert json.loads(target.read_bytes().decode())["traceEvents"][0]["ts"] == 1
