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
MUTANTS_BY_DEFAULT = 8
CHUNK = 100
MAX_SECONDS = 20.0
MAX_MEMORY_BYTES, MAX_MEMORY_PER_INPUT_BYTE = 500 << 20, 10
"""Memory a command may use: the larger of a fixed number of bytes and a multiple of its input."""


# -- what is mutated ------------------------------------------------------------------------------


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
    config = b"""[project]\nname = "x"\n[tool.advisor.rules.dataloader-wait]\nenabled = true
[tool.advisor.rules.launch-bound]\nenabled = false\nmin_share = 0.1\n"""
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


# -- mutations of texts ---------------------------------------------------------------------------

TEXT_MUTATIONS = [
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
NESTED_VALUES = [
    b"[" * 5000,
    b'{"a":' * 5000,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
]
DEPTH = 40


def change_any_value(text: bytes, rng: random.Random) -> bytes:
    """Replace values of a JSON document by other types, absurd figures or hostile texts."""
    document = json.loads(text)
    for _ in range(rng.choice([1, 1, 3, 20])):
        at = document
        for _ in range(DEPTH):
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(at[key], dict | list) and rng.random() < 0.85:
                at = at[key]
                continue
            if rng.random() < 0.15 and isinstance(at, dict):
                del at[key]
            else:
                at[key] = rng.choice(
                    [*mutations.VALUES, *mutations.NUMBERS, *mutations.HOSTILE_NAMES]
                )
            break
    return bytes(mutations.to_json(document))


def nest_a_value(text: bytes, rng: random.Random) -> bytes:
    """Replace a value by one nested deeper than a reader's stack."""
    parts = text.split(b":")
    at = rng.randrange(len(parts))
    return b":".join([*parts[:at], rng.choice(NESTED_VALUES), *parts[at + 1 :]])


def stretch_a_list(text: bytes, rng: random.Random) -> bytes:
    """Replace a value by a list of 200,000 small values."""
    parts = text.split(b":")
    at = rng.randrange(len(parts))
    many = b"[" + b",".join([rng.choice([b"{}", b"[]", b"0", b'""'])] * 200_000) + b"]"
    return b":".join([*parts[:at], many, *parts[at + 1 :]])


def change_a_line(text: bytes, rng: random.Random) -> bytes:
    """Mutate single lines of JSON lines in the same way."""
    lines = text.split(b"\n")
    for _ in range(rng.choice([1, 3, 30])):
        at = rng.randrange(len(lines))
        try:
            lines[at] = rng.choice([change_any_value, nest_a_value])(lines[at], rng)
        except mutations.NOT_FOR_THIS_TEXT:
            lines[at] = rng.randbytes(30)
    return b"\n".join(lines)


def set_field_in_all_lines(text: bytes, rng: random.Random) -> bytes:
    """Replace one field of every line by the same value."""
    rows = [json.loads(line) for line in text.split(b"\n") if line]
    key = rng.choice(sorted({key for row in rows for key in row}))
    value = rng.choice([*mutations.VALUES, *mutations.NUMBERS, *mutations.HOSTILE_NAMES])
    return b"\n".join(bytes(mutations.to_json({**row, key: value})) for row in rows)


JSON_MUTATIONS = [
    *TEXT_MUTATIONS,
    change_any_value,
    change_any_value,
    change_any_value,
    nest_a_value,
    stretch_a_list,
]
JSON_LINES_MUTATIONS = [
    *JSON_MUTATIONS,
    change_a_line,
    change_a_line,
    set_field_in_all_lines,
    set_field_in_all_lines,
]
RUN_FILE_MUTATIONS = {
    MANIFEST: JSON_MUTATIONS,
    f"rank0/{RANK}": JSON_MUTATIONS,
    f"rank0/{STEPS}": JSON_LINES_MUTATIONS,
    f"rank0/{TELEMETRY}": JSON_LINES_MUTATIONS,
    f"rank0/{EVENTS}": JSON_LINES_MUTATIONS,
    f"rank0/{SCALENE}": JSON_MUTATIONS,
}


def mutate_text(text: bytes, how: list[Any], rng: random.Random) -> bytes:
    """Change a text once or twice."""
    for _ in range(rng.choice([1, 1, 2])):
        try:
            text = rng.choice(how)(text, rng) if text else text
        except mutations.NOT_FOR_THIS_TEXT:
            continue
    return text


def replace_file(file: Path, rng: random.Random) -> None:
    """Replace a file by something that is no regular file, or remove it."""
    if file.is_dir():
        file.rmdir()
    file.unlink(missing_ok=True)
    kind = rng.choice(["pipe", "folder", "loop", "zero", "nothing", "dangling"])
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


def pack(text: bytes, rng: random.Random) -> bytes:
    """Compress a text in one of several ways, and often damage the result."""
    kind = rng.choice(["gz", "gz members", "zst", "zst frames", "both"])
    size = rng.choice([7, 100, 5000])
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
    if rng.random() < 0.7:
        data = rng.choice(TEXT_MUTATIONS)(data, rng)
    return data


# -- commands -------------------------------------------------------------------------------------

FORMATS = ("terminal", "json", "markdown", "html", "sarif", "github")


def command_line(path: Path, out: Path, seeds: dict[str, Any], rng: random.Random) -> list[str]:
    """Build a command line that reads the path."""
    redacted = ["--redact"] if rng.random() < 0.3 else []
    other = str(seeds["folder"] / "after.json")
    return rng.choice(
        [
            ["analyze", str(path), "--format", rng.choice(FORMATS), *redacted],
            ["analyze", str(path), "--format", rng.choice(FORMATS), *redacted],
            ["whatif", str(path), "-e", "scale kernel:gemm 0.5", "-e", "remove gap:data"],
            ["compare", str(path), other, "--format", rng.choice(FORMATS[:3]), *redacted],
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
    """Run a command line in this process and assert that it exits with 0 or 2."""
    assert cli.run(arguments) in (0, 2)


def check_command(
    command: Callable[[], None], description: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Assert that a command raises nothing, prints one error line at most, and stays in bounds."""
    capsys.readouterr()
    mutations.reset_peak_memory()
    memory, started = mutations.resident("VmRSS"), time.process_time()
    try:
        with mutations.time_limit():
            command()
    except Exception as error:
        raise AssertionError(f"{description}: {type(error).__name__}") from error
    output, messages = capsys.readouterr()
    assert RULE_FAILED not in output, description  # a rule broke
    complaints = [line for line in messages.splitlines() if line.startswith("advisor: ")]
    assert "Traceback" not in messages, description
    assert len(complaints) <= 1, description
    assert time.process_time() - started < MAX_SECONDS, description
    assert mutations.resident("VmHWM") - memory < max(
        MAX_MEMORY_BYTES, MAX_MEMORY_PER_INPUT_BYTE * size
    ), description


def tree_size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(f.lstat().st_size for f in files)


# -- mutants of each kind -------------------------------------------------------------------------

Mutant = tuple[str, Path, Callable[[], None]]


def mutate_run(number: int, seeds: dict[str, Any], place: Path) -> Mutant:
    """Damage or replace one or two files of a run directory."""
    rng = random.Random(number)
    folder = place / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(seeds["run"], folder, symlinks=True)
    names = [rng.choice(list(RUN_FILE_MUTATIONS)) for _ in range(rng.choice([1, 1, 2]))]
    if rng.random() < 0.4:  # without its trace the record is all there is
        (folder / "rank0" / "trace_w0.json.gz").unlink(missing_ok=True)
    for name in names:
        file = folder / name
        if rng.random() < 0.15:
            replace_file(file, rng)
        elif file.is_file():
            file.write_bytes(mutate_text(file.read_bytes(), RUN_FILE_MUTATIONS[name], rng))
    description = f"run {number} {names}"
    if rng.random() < 0.15:
        return description, folder, lambda: dashboard(folder)
    line = command_line(folder, place, seeds, rng)
    return f"{description} {line}", folder, lambda: run(line)


def mutate_trace(number: int, seeds: dict[str, Any], place: Path) -> Mutant:
    """Mutate a trace with the mutations of the reader's own suite."""
    rng = random.Random(number)
    file = place / "trace.json"
    how, data = mutations.make_mutant(
        50_000 + number, [seeds["trace"], *mutations.sound_traces()[:1]]
    )
    file.write_bytes(data)
    if rng.random() < 0.1:
        return f"trace {how}", file, lambda: dashboard(file)
    line = command_line(file, place, seeds, rng)
    return f"trace {how} {line}", file, lambda: run(line)


def mutate_packed_trace(number: int, seeds: dict[str, Any], place: Path) -> Mutant:
    """Compress a trace, and often damage the archive."""
    rng = random.Random(number)
    file = place / "trace.json.gz"
    file.write_bytes(pack(seeds["trace"], rng))
    line = command_line(file, place, seeds, rng)
    return f"packed {number} {line}", file, lambda: run(line)


def mutate_report(number: int, seeds: dict[str, Any], place: Path) -> Mutant:
    """Damage a saved report, and render it again."""
    rng = random.Random(number)
    file = place / "report.json"
    file.write_bytes(mutate_text(seeds["report"], JSON_MUTATIONS, rng))
    line = ["report", str(file), "--format", rng.choice(FORMATS)]
    if rng.random() < 0.3:
        line = command_line(file, place, seeds, rng)
    if rng.random() < 0.4:
        line = [*line, "--redact"] if line[0] != "whatif" and "--redact" not in line else line
    return f"report {number} {line}", file, lambda: run(line)


def mutate_comparison(number: int, seeds: dict[str, Any], place: Path) -> Mutant:
    """Damage a saved comparison, and read it as a comparison, a trace or a report."""
    rng = random.Random(number)
    file = place / "comparison.json"
    file.write_bytes(mutate_text(seeds["comparison"], JSON_MUTATIONS, rng))
    if rng.random() < 0.3:
        line = command_line(file, place, seeds, rng)
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


def mutate_config(number: int, seeds: dict[str, Any], place: Path) -> Mutant:
    """Damage the pyproject.toml of a folder, or replace it."""
    rng = random.Random(number)
    file = place / "pyproject.toml"
    if rng.random() < 0.05:
        replace_file(file, rng)
    else:
        text = mutate_text(seeds["config"], TEXT_MUTATIONS, rng)
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
        file.write_bytes(rng.choice(deep) + text if rng.random() < 0.1 else text)

    def read() -> None:
        try:
            read_config(place)
        except AdvisorError as error:
            assert "\n" not in str(error)

    return f"config {number}", file, read


def mutate_scalene_profile(number: int, seeds: dict[str, Any], place: Path) -> Mutant:
    """Damage a profile of Scalene."""
    rng = random.Random(number)
    file = place / "scalene.json"
    file.write_bytes(mutate_text(seeds["scalene"], JSON_MUTATIONS, rng))

    def read() -> None:
        try:
            read_scalene(file)
        except AdvisorError as error:
            assert "\n" not in str(error)

    return f"scalene {number}", file, read


def mutate_memory_timeline(number: int, seeds: dict[str, Any], place: Path) -> Mutant:
    """Damage a file of export_memory_timeline, and read it as a trace."""
    rng = random.Random(number)
    file = place / "memory.json"
    file.write_bytes(mutate_text(seeds["memory timeline"], JSON_MUTATIONS, rng))
    line = command_line(file, place, seeds, rng)
    return f"memory timeline {number} {line}", file, lambda: run(line)


def mutate_flight_record(number: int, seeds: dict[str, Any], place: Path) -> Mutant:
    """Damage a dump of the flight recorder, a pickle or JSON."""
    rng = random.Random(number)
    folder = Path(__file__).resolve().parents[1] / "read" / "flight"
    binary = rng.random() < 0.5
    name = "other_order/nccl_trace_rank_1" if binary else "json/nccl_trace_rank_0.json"
    file = place / Path(name).name
    file.write_bytes(
        mutate_text((folder / name).read_bytes(), TEXT_MUTATIONS if binary else JSON_MUTATIONS, rng)
    )
    line = command_line(file, place, seeds, rng)
    return f"flight recorder {number} {line}", file, lambda: run(line)


def mutate_nccl_log(number: int, seeds: dict[str, Any], place: Path) -> Mutant:
    """Damage a log of NCCL, or a topology."""
    rng = random.Random(number)
    texts = nccl_logs.job(), nccl_logs.matrix(8, "NV18", 4), nccl_logs.rocm(4, "XGMI")
    file = place / "nccl.log"
    file.write_bytes(mutate_text(rng.choice(texts).encode(), TEXT_MUTATIONS, rng))
    line = command_line(file, place, seeds, rng)
    return f"NCCL log {number} {line}", file, lambda: run(line)


MUTATORS = [
    mutate_nccl_log,
    mutate_flight_record,
    mutate_run,
    mutate_trace,
    mutate_packed_trace,
    mutate_report,
    mutate_comparison,
    mutate_config,
    mutate_scalene_profile,
    mutate_memory_timeline,
]
SLOW_MUTATORS = (mutate_run, mutate_trace, mutate_packed_trace)


def mutator_chunks() -> Iterator[Any]:
    """Yield the parameters of one test for each chunk of a mutator's mutants."""
    for kind in MUTATORS:
        total = MUTANTS or (MUTANTS_BY_DEFAULT * 2 if kind in SLOW_MUTATORS else MUTANTS_BY_DEFAULT)
        for first in range(0, total, CHUNK):
            last = min(first + CHUNK, total)
            yield pytest.param(kind, first, last, id=f"{kind.__name__}-{first}")


@pytest.mark.parametrize(("kind", "first", "last"), list(mutator_chunks()))
def test_damaged_file_gives_one_line_error(
    kind: Callable[[int, dict[str, Any], Path], Mutant],
    first: int,
    last: int,
    seeds: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(first, last):
        description, path, command = kind(number, seeds, tmp_path)
        check_command(command, description, tree_size(path) if path.exists() else 0, capsys)


def test_every_sound_file_is_read(
    seeds: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutants of files that could not be read anyway would prove nothing."""
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
    assert set(read_config(_config(seeds, tmp_path))) == {"dataloader-wait", "launch-bound"}
    dashboard(seeds["run"])
    assert "damaged" not in capsys.readouterr().err


def _config(seeds: dict[str, Any], folder: Path) -> Path:
    (folder / "pyproject.toml").write_bytes(seeds["config"])
    return folder
