"""Every kind of file that is read, damaged in every way, through every command that reads it.

Whatever a file holds, a command ends with an exit code and a line, not with a traceback; soon; in
bounded memory. ``ADVISOR_MUTATIONS=2000`` tries so many mutants of each kind (a few otherwise);
``tests/read/test_mutations.py`` does the same to the reader of traces alone, in more ways.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import zstandard

from advisor import cli
from advisor.advise.rule_loading import read_config
from advisor.advise.rule_runner import RULE_FAILED
from advisor.compare import Comparison
from advisor.core.errors import AdvisorError
from advisor.core.run_directory import EVENTS, MANIFEST, RANK, SCALENE, STEPS, TELEMETRY
from advisor.read.formats.scalene import read_scalene
from tests.dashboard import run_by_hand as recorded
from tests.read import test_mutations as mutations
from tests.read.nccl import logs as nccl_logs

MUTANTS = int(os.environ.get("ADVISOR_MUTATIONS", "0"))
SAMPLE = 8
CHUNK = 100
SECONDS = 20.0
ROOM, FACTOR = 500 << 20, 10
"""Memory that a command may take: so much, or so many times its input."""


Chance = random.Random


# -- what is mutated ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Build a sound file of each kind, and a run directory."""
    folder = tmp_path_factory.mktemp("seeds")
    run = recorded.write_run(folder / "run", steps=90)
    trace = run / "rank0" / "trace_w0.json.gz"
    text = trace.read_bytes()
    text = gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text
    (folder / "after.json").write_bytes(text.replace(b"900", b"700"))
    assert cli.run(["analyze", str(run), "-o", str(folder / "report.json")]) == 0
    arguments = ["compare", str(run), str(folder / "after.json"), "--format", "json"]
    assert cli.run([*arguments, "-o", str(folder / "comparison.json")]) == 0
    config = b"""[project]\nname = "x"\n[tool.advisor.rules.loader-stall]\nenabled = true
[tool.advisor.rules.small-kernels]\nenabled = false\nmin_share = 0.1\n"""
    timeline = [[i * 1000, i % 3, 512 * i, i % 8] for i in range(50)]
    return {
        "folder": folder,
        "run": run,
        "trace": text,
        "report": (folder / "report.json").read_bytes(),
        "comparison": (folder / "comparison.json").read_bytes(),
        "scalene": (run / "rank0" / SCALENE).read_bytes(),
        "config": config,
        "memory timeline": json.dumps(timeline).encode(),
    }


# -- how ----------------------------------------------------------------------------------------

TEXTS = [
    mutations.cut_off,
    mutations.lose_the_start,
    mutations.flip_bytes,
    mutations.flip_structure,
    mutations.lose_a_stretch,
    mutations.repeat_a_stretch,
    mutations.insert_garbage,
    mutations.swap_quotes,
    mutations.other_encoding,
    mutations.concatenate,
]
NESTED = [
    b"[" * 5000,
    b'{"a":' * 5000,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
]
DEPTH = 40


def change_any_value(text: bytes, chance: Chance) -> bytes:
    """Values of other types, absurd figures and hostile texts, anywhere in a JSON document."""
    document = json.loads(text)
    for _ in range(chance.choice([1, 1, 3, 20])):
        at = document
        for _ in range(DEPTH):
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(at[key], dict | list) and chance.random() < 0.85:
                at = at[key]
                continue
            if chance.random() < 0.15 and isinstance(at, dict):
                del at[key]
            else:
                at[key] = chance.choice(
                    [*mutations.VALUES, *mutations.NUMBERS, *mutations.HOSTILE_NAMES]
                )
            break
    return bytes(mutations.to_json(document))


def nest_a_value(text: bytes, chance: Chance) -> bytes:
    """A value as deep as a reader's stack, in the place of another."""
    parts = text.split(b":")
    at = chance.randrange(len(parts))
    return b":".join([*parts[:at], chance.choice(NESTED), *parts[at + 1 :]])


def stretch_a_list(text: bytes, chance: Chance) -> bytes:
    """A list of very many trifles, in the place of a value."""
    parts = text.split(b":")
    at = chance.randrange(len(parts))
    many = b"[" + b",".join([chance.choice([b"{}", b"[]", b"0", b'""'])] * 200_000) + b"]"
    return b":".join([*parts[:at], many, *parts[at + 1 :]])


def change_a_line(text: bytes, chance: Chance) -> bytes:
    """Mutate single lines of JSON lines in the same way."""
    lines = text.split(b"\n")
    for _ in range(chance.choice([1, 3, 30])):
        at = chance.randrange(len(lines))
        try:
            lines[at] = chance.choice([change_any_value, nest_a_value])(lines[at], chance)
        except mutations.NOT_FOR_THIS_TEXT:
            lines[at] = chance.randbytes(30)
    return b"\n".join(lines)


def one_field_of_all_lines(text: bytes, chance: Chance) -> bytes:
    """A value of every line replaced by the same one."""
    rows = [json.loads(line) for line in text.split(b"\n") if line]
    key = chance.choice(sorted({key for row in rows for key in row}))
    value = chance.choice([*mutations.VALUES, *mutations.NUMBERS, *mutations.HOSTILE_NAMES])
    return b"\n".join(bytes(mutations.to_json({**row, key: value})) for row in rows)


JSON = [*TEXTS, change_any_value, change_any_value, change_any_value, nest_a_value, stretch_a_list]
LINES = [*JSON, change_a_line, change_a_line, one_field_of_all_lines, one_field_of_all_lines]
RUN_FILES = {
    MANIFEST: JSON,
    f"rank0/{RANK}": JSON,
    f"rank0/{STEPS}": LINES,
    f"rank0/{TELEMETRY}": LINES,
    f"rank0/{EVENTS}": LINES,
    f"rank0/{SCALENE}": JSON,
}


def mutate_text(text: bytes, how: list[Any], chance: Chance) -> bytes:
    """Change a text once or twice."""
    for _ in range(chance.choice([1, 1, 2])):
        try:
            text = chance.choice(how)(text, chance) if text else text
        except mutations.NOT_FOR_THIS_TEXT:
            continue
    return text


def replace_file(file: Path, chance: Chance) -> None:
    """Something that is no regular file, in a file's place."""
    if file.is_dir():
        file.rmdir()
    file.unlink(missing_ok=True)
    kind = chance.choice(["pipe", "folder", "loop", "zero", "nothing", "dangling"])
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "zero":
        file.symlink_to("/dev/zero")
    elif kind == "dangling":
        file.symlink_to("not-there")


def pack(text: bytes, chance: Chance) -> bytes:
    """Packed in one way or another, and damaged there too."""
    kind = chance.choice(["gz", "gz members", "zst", "zst frames", "both"])
    size = chance.choice([7, 100, 5000])
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    if kind == "gz":
        data = gzip.compress(text)
    elif kind == "gz members":
        data = b"".join(gzip.compress(part, 1) for part in parts[:3000])
    elif kind == "zst":
        data = zstandard.compress(text)
    elif kind == "zst frames":
        data = b"".join(zstandard.compress(part) for part in parts[:3000])
    else:
        data = gzip.compress(zstandard.compress(text))
    if chance.random() < 0.7:
        data = chance.choice(TEXTS)(data, chance)
    return data


# -- through what -------------------------------------------------------------------------------

FORMATS = ("terminal", "json", "markdown", "html", "sarif", "github")


def command_line(path: Path, out: Path, seeds: dict[str, Any], chance: Chance) -> list[str]:
    """Build a command line that reads the path."""
    redacted = ["--redact"] if chance.random() < 0.3 else []
    other = str(seeds["folder"] / "after.json")
    return chance.choice(
        [
            ["analyze", str(path), "--format", chance.choice(FORMATS), *redacted],
            ["analyze", str(path), "--format", chance.choice(FORMATS), *redacted],
            ["whatif", str(path), "-e", "scale kernel:gemm 0.5", "-e", "remove gap:data"],
            ["compare", str(path), other, "--format", chance.choice(FORMATS[:3]), *redacted],
            ["compare", other, str(path), *redacted],
            ["report", str(path), "--html", str(out / "report.html"), *redacted],
            ["export", str(path), "--perfetto", str(out / "out.json"), *redacted],
        ]
    )


@cache
def application() -> Any:
    """The dashboard, once: dash keeps one registry of pages a process."""
    pytest.importorskip("dash", reason="the dashboard's packages are not installed")
    from advisor.dashboard.app import create_app
    from advisor.dashboard.loaded_runs import DashboardSession

    return create_app(DashboardSession([]))


def dashboard(path: Path) -> None:
    """Reads the path, then makes all that is shown of it, without a browser."""
    import dash

    from advisor.dashboard.live_run import Follower
    from advisor.dashboard.loaded_runs import DashboardSession
    from advisor.dashboard.page_view import SESSION_KEY
    from advisor.dashboard.timeline.index_builder import build_index

    app = application()
    session = DashboardSession([str(path)])
    session.precompute_callbacks += app.server.config[SESSION_KEY].precompute_callbacks
    session.load()
    app.server.config[SESSION_KEY].entries = session.entries
    entry = session.entries[0]
    if entry.loaded is None:
        assert entry.failure_reason and "\n" not in entry.failure_reason
        return
    with app.server.test_request_context():
        for page in dash.page_registry.values():
            page["layout"]()
    build_index(entry.loaded.main)
    follower = Follower(str(path))
    for rank in follower.ranks():
        follower.read(rank)


def run(arguments: list[str]) -> None:
    """A command line must end well or with one line, in this process."""
    assert cli.run(arguments) in (0, 2)


def check_command(
    act: Callable[[], None], story: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run it: no exception, one line of complaint at most, soon, in bounded memory."""
    capsys.readouterr()
    mutations.reset_peak_memory()
    memory, started = mutations.resident("VmRSS"), time.process_time()
    try:
        with mutations.time_limit():
            act()
    except Exception as error:
        raise AssertionError(f"{story}: {type(error).__name__}") from error
    output, messages = capsys.readouterr()
    assert RULE_FAILED not in output, story  # a rule broke
    complaints = [line for line in messages.splitlines() if line.startswith("advisor: ")]
    assert "Traceback" not in messages, story
    assert len(complaints) <= 1, story
    assert time.process_time() - started < SECONDS, story
    assert mutations.resident("VmHWM") - memory < max(ROOM, FACTOR * size), story


def tree_size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(f.lstat().st_size for f in files)


# -- the kinds ----------------------------------------------------------------------------------

Act = tuple[str, Path, Callable[[], None]]


def of_runs(number: int, seeds: dict[str, Any], place: Path) -> Act:
    """A run directory with one or two of its files damaged or replaced."""
    chance = random.Random(number)
    folder = place / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(seeds["run"], folder, symlinks=True)
    names = [chance.choice(list(RUN_FILES)) for _ in range(chance.choice([1, 1, 2]))]
    if chance.random() < 0.4:  # without its trace the record is all there is
        (folder / "rank0" / "trace_w0.json.gz").unlink(missing_ok=True)
    for name in names:
        file = folder / name
        if chance.random() < 0.15:
            replace_file(file, chance)
        elif file.is_file():
            file.write_bytes(mutate_text(file.read_bytes(), RUN_FILES[name], chance))
    story = f"run {number} {names}"
    if chance.random() < 0.15:
        return story, folder, lambda: dashboard(folder)
    line = command_line(folder, place, seeds, chance)
    return f"{story} {line}", folder, lambda: run(line)


def of_traces(number: int, seeds: dict[str, Any], place: Path) -> Act:
    """A trace, mutated as the reader's own suite does it."""
    chance = random.Random(number)
    file = place / "trace.json"
    how, data = mutations.make_mutant(
        50_000 + number, [seeds["trace"], *mutations.sound_traces()[:1]]
    )
    file.write_bytes(data)
    if chance.random() < 0.1:
        return f"trace {how}", file, lambda: dashboard(file)
    line = command_line(file, place, seeds, chance)
    return f"trace {how} {line}", file, lambda: run(line)


def of_packed_traces(number: int, seeds: dict[str, Any], place: Path) -> Act:
    """Pack a trace, and damage the packing."""
    chance = random.Random(number)
    file = place / "trace.json.gz"
    file.write_bytes(pack(seeds["trace"], chance))
    line = command_line(file, place, seeds, chance)
    return f"packed {number} {line}", file, lambda: run(line)


def of_reports(number: int, seeds: dict[str, Any], place: Path) -> Act:
    """Render a saved report again."""
    chance = random.Random(number)
    file = place / "report.json"
    file.write_bytes(mutate_text(seeds["report"], JSON, chance))
    line = ["report", str(file), "--format", chance.choice(FORMATS)]
    if chance.random() < 0.3:
        line = command_line(file, place, seeds, chance)
    if chance.random() < 0.4:
        line = [*line, "--redact"] if line[0] != "whatif" and "--redact" not in line else line
    return f"report {number} {line}", file, lambda: run(line)


def of_comparisons(number: int, seeds: dict[str, Any], place: Path) -> Act:
    """A saved comparison, read back; and given where a trace or a report is wanted."""
    chance = random.Random(number)
    file = place / "comparison.json"
    file.write_bytes(mutate_text(seeds["comparison"], JSON, chance))
    if chance.random() < 0.3:
        line = command_line(file, place, seeds, chance)
        return f"comparison {number} {line}", file, lambda: run(line)

    def read() -> None:
        from advisor.render.formats import COMPARISONS

        try:
            comparison = Comparison.from_json(file.read_bytes())
        except AdvisorError as error:
            assert "\n" not in str(error)
            return
        for form in COMPARISONS:
            COMPARISONS.render(form, comparison)

    return f"comparison {number}", file, read


def of_configs(number: int, seeds: dict[str, Any], place: Path) -> Act:
    """Write a pyproject.toml above the folder."""
    chance = random.Random(number)
    file = place / "pyproject.toml"
    if chance.random() < 0.05:
        replace_file(file, chance)
    else:
        text = mutate_text(seeds["config"], TEXTS, chance)
        deep = [
            b"a=" + b"[" * 5000,
            b"a=" + b"{a=" * 3000,
            b"a" + b".a" * 30_000 + b"=1\n",
            b"[a" + b".a" * 30_000 + b"]\n",
            b"x='" + b"y" * 3_000_000,
        ]
        if file.is_dir():
            file.rmdir()
        file.unlink(missing_ok=True)
        file.write_bytes(chance.choice(deep) + text if chance.random() < 0.1 else text)

    def read() -> None:
        try:
            read_config(place)
        except AdvisorError as error:
            assert "\n" not in str(error)

    return f"config {number}", file, read


def of_scalene(number: int, seeds: dict[str, Any], place: Path) -> Act:
    """Write a profile of Scalene."""
    chance = random.Random(number)
    file = place / "scalene.json"
    file.write_bytes(mutate_text(seeds["scalene"], JSON, chance))

    def read() -> None:
        try:
            read_scalene(file)
        except AdvisorError as error:
            assert "\n" not in str(error)

    return f"scalene {number}", file, read


def of_memory_timelines(number: int, seeds: dict[str, Any], place: Path) -> Act:
    """Files that export_memory_timeline writes, given as a trace."""
    chance = random.Random(number)
    file = place / "memory.json"
    file.write_bytes(mutate_text(seeds["memory timeline"], JSON, chance))
    line = command_line(file, place, seeds, chance)
    return f"memory timeline {number} {line}", file, lambda: run(line)


def of_flight_records(number: int, seeds: dict[str, Any], place: Path) -> Act:
    """A dump of the flight recorder, as a pickle or as JSON."""
    chance = random.Random(number)
    folder = Path(__file__).resolve().parents[1] / "read" / "flight"
    binary = chance.random() < 0.5
    name = "other_order/nccl_trace_rank_1" if binary else "json/nccl_trace_rank_0.json"
    file = place / Path(name).name
    file.write_bytes(mutate_text((folder / name).read_bytes(), TEXTS if binary else JSON, chance))
    line = command_line(file, place, seeds, chance)
    return f"flight recorder {number} {line}", file, lambda: run(line)


def of_nccl_logs(number: int, seeds: dict[str, Any], place: Path) -> Act:
    """Write a log of NCCL, or a topology."""
    chance = random.Random(number)
    texts = nccl_logs.job(), nccl_logs.matrix(8, "NV18", 4), nccl_logs.rocm(4, "XGMI")
    file = place / "nccl.log"
    file.write_bytes(mutate_text(chance.choice(texts).encode(), TEXTS, chance))
    line = command_line(file, place, seeds, chance)
    return f"NCCL log {number} {line}", file, lambda: run(line)


KINDS = [
    of_nccl_logs,
    of_flight_records,
    of_runs,
    of_traces,
    of_packed_traces,
    of_reports,
    of_comparisons,
    of_configs,
    of_scalene,
    of_memory_timelines,
]
SLOW = (of_runs, of_traces, of_packed_traces)


def kind_chunks() -> Iterator[Any]:
    """The kinds in chunks of a test each."""
    for kind in KINDS:
        total = MUTANTS or (SAMPLE * 2 if kind in SLOW else SAMPLE)
        for first in range(0, total, CHUNK):
            last = min(first + CHUNK, total)
            yield pytest.param(kind, first, last, id=f"{kind.__name__}-{first}")


@pytest.mark.parametrize(("kind", "first", "last"), list(kind_chunks()))
def test_a_damaged_file_costs_one_line_and_no_more(
    kind: Callable[[int, dict[str, Any], Path], Act],
    first: int,
    last: int,
    seeds: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(first, last):
        story, path, act = kind(number, seeds, tmp_path)
        check_command(act, story, tree_size(path) if path.exists() else 0, capsys)


def test_every_sound_file_is_read(
    seeds: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the mutants would prove nothing."""
    for name in ("terminal", "html", "sarif"):
        assert cli.run(["analyze", str(seeds["run"]), "--format", name]) == 0
    saved = seeds["folder"] / "report.json"
    assert cli.run(["report", str(saved), "--html", str(tmp_path / "r.html")]) == 0
    out = tmp_path / "out.json"
    assert cli.run(["export", str(seeds["run"]), "--perfetto", str(out)]) == 0
    assert json.loads(out.read_bytes())["traceEvents"]
    assert cli.run(["whatif", str(seeds["run"]), "-e", "scale kernel:gemm 0.5"]) == 0
    Comparison.from_json(seeds["comparison"])
    assert read_scalene(seeds["run"] / "rank0" / SCALENE)
    assert set(read_config(_config(seeds, tmp_path))) == {"loader-stall", "small-kernels"}
    dashboard(seeds["run"])
    assert "damaged" not in capsys.readouterr().err


def _config(seeds: dict[str, Any], folder: Path) -> Path:
    (folder / "pyproject.toml").write_bytes(seeds["config"])
    return folder
