"""Files of other profilers, damaged in every way: read, or refused in a line; soon, in little room.

``ADVISOR_MUTATIONS=2000`` takes so many mutants of each format through the whole analysis; a few
otherwise, most of them only through the reader.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import shutil
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from advisor.core.trace import KINETO
from advisor.read import open_run, read_trace
from advisor.read.registry import bundled_readers, reader_of
from advisor.read.source import ByteSource
from advisor.testing.allocator import MIB, FakeAllocator, Training
from tests.read import profiler_files as files
from tests.read import test_mutations as mutations
from tests.read import xspace_writer as xspace
from tests.robustness import test_every_reader as every

MUTANTS = int(os.environ.get("ADVISOR_MUTATIONS", "0"))
SAMPLE = 12
CHUNK = 250
CORPUS = Path(__file__).parents[1] / "corpus"
LARGEST = 1 << 24
"""Bytes from which on a mutant is not made any longer: the bounds are those of small files."""


Chance = random.Random
UNUSUAL_VALUES = [
       None, -1, 0, 1, 59, 60, 2**31, 2**32, 2**62, -(2**63), 2**63 - 1, 0.5, 1e308, float("inf"),
       "", "x", "7", "aten::mm, seq = 99999999999999999999, sizes = [[1]]", b"\0\xff", b"x" * 5000,
       "\ud7ff\U0010ffff", "<script>alert(1)</script>", "a" * 100_000]  # fmt: skip


def _write_file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _snapshot() -> bytes:
    """A snapshot that the allocator would write after three steps that leak."""
    m = FakeAllocator()
    training = Training(m, leak=MIB)
    for _ in range(3):
        training.step()
    return m.pickled()


def _timeline() -> bytes:
    """A timeline of a device and a host, as XLA's profiler derives it from its XPlane file."""
    names = [("/device:GPU:0", "Stream #13(Compute)"), ("/host:CPU", "python")]
    events: list[dict[str, object]] = []
    for pid, (process, thread) in enumerate(names, 1):
        for what, name in (("process_name", process), ("thread_name", thread)):
            events.append({"ph": "M", "pid": pid, "tid": 3, "name": what, "args": {"name": name}})
    for step in range(6):
        at = step * 1000.0
        link = {"correlation_id": str(step + 1)}
        host: dict[str, object] = {"ph": "X", "pid": 2, "tid": 3}
        events += [
            {**host, "ts": at, "dur": 990, "name": "train", "args": {"step_num": str(step)}},
            {**host, "ts": at + 10, "dur": 5, "name": "cuLaunchKernel", "args": link},
            {"ph": "X", "pid": 1, "tid": 3, "ts": at + 20, "dur": 500.25, "name": "gemm",
             "args": {**link, "kernel_details": "regs:8 grid:4,1,1 block:32,1,1"}},
        ]  # fmt: skip
    return json.dumps({"traceEvents": events}).encode()


_OUT_OF_MEMORY = (
    b"step 7\n"
    * 100
    + b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU "
    b"0 has a total capacity of 79.25 GiB of which 1.25 GiB is free. Process 5 has 0.50 GiB memory "
    b"in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 6.00 GiB is reserved "
    b"by PyTorch but unallocated.\n"
)


def _rows(path: Path, name: str, most: int | None) -> Path:
    """The first lines of a file of the corpus."""
    text = gzip.decompress((CORPUS / name).read_bytes())
    return _write_file(path, text if most is None else b"".join(text.splitlines(True)[:most]))


def _engine(path: Path, name: str) -> Path:
    with tarfile.open(next((CORPUS / "tensorrt").glob("*.tar.gz"))) as archive:
        member = archive.extractfile(name)
        assert member is not None
        return _write_file(path, member.read())


def _compile_log() -> bytes:
    """A log of a graph break and a recompilation."""
    place = Path(__file__).parents[1] / "cli" / "compile_logs.json.gz"
    logs = json.loads(gzip.decompress(place.read_bytes()))
    return "\n".join([*logs["break_print"], *logs["recompile_shape"], ""]).encode()


SEEDS: dict[str, Callable[[Path], Path]] = {
    "nsys": lambda folder: files.nsys(folder / "seed.sqlite", processes=2),
    "rpd": lambda folder: files.rpd(folder / "seed.rpd"),
    "rocpd": lambda folder: files.rocpd(folder / "seed.db"),
    "rocpd 4": lambda folder: files.rocpd(folder / "seed4.db", 4),
    "rpd bare": lambda folder: files.rpd(folder / "bare.rpd", keyed=False),
    "rocpd bare": lambda folder: files.rocpd(folder / "bare.db", 4, keyed=False),
    "rocprofv3": lambda folder: files.rocprof_json(folder / "seed_results.json"),
    "xplane": lambda folder: _write_file(folder / "seed.xplane.pb", xspace.jax_training()),
    "xplane unmarked": lambda folder: _write_file(
        folder / "unmarked.xplane.pb", xspace.jax_training(marks=False)
    ),
    "xla timeline": lambda folder: _write_file(folder / "seed.trace.json", _timeline()),
    "snapshot": lambda folder: _write_file(folder / "seed.pickle", _snapshot()),
    "ncu csv": lambda folder: _rows(folder / "n.csv", "ncu/deepseek_ocr_rtx5090.csv.gz", 60),
    "ncu report": lambda folder: _rows(folder / "n", "ncu/cutlass_a100_s8.ncu-rep.gz", None),
    "rocprof csv": lambda folder: _rows(
        folder / "r.csv", "rocprof/laplacian/kernel1_results.csv.gz", 40
    ),
    "rocprof compute": lambda folder: _write_file(
        folder / "compute.db",
        gzip.decompress((CORPUS / "rocprof/rocprof_compute_sample.db.gz").read_bytes()),
    ),
    "tensorrt": lambda folder: _engine(folder / "t.json", "resnet_A100_fp16.profile.json"),
    "tensorrt graph": lambda folder: _engine(folder / "g.json", "resnet_A100_fp16.graph.json"),
    "compile log": lambda folder: _write_file(folder / "c.log", _compile_log()),
    "out of memory": lambda folder: _write_file(folder / "o.log", _OUT_OF_MEMORY),
}
BESIDE = {"tensorrt graph": "tensorrt"}
"""A file that is read with another: its mutants lie beside that one, sound."""
LOGDIR = "logdir"
"""The folder that TensorFlow's and JAX's profilers write: files of several hosts."""
SUFFIXES = {"rocprofv3": ".json", "xla timeline": ".trace.json", "snapshot": ".pickle",
            "xplane": ".xplane.pb", "xplane unmarked": ".xplane.pb", "ncu csv": ".csv",
            "ncu report": ".ncu-rep", "rocprof csv": ".csv", "tensorrt": ".profile.json",
            "tensorrt graph": ".graph.json", "compile log": ".log",
            "out of memory": ".log"}  # fmt: skip


# -- how ------------------------------------------------------------------------------------------


def tables(db: sqlite3.Connection) -> list[str]:
    return [n for (n,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]


def columns(db: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in db.execute(f'PRAGMA table_info("{table}")')]


def change_values_of_a_column(db: sqlite3.Connection, chance: Chance) -> None:
    """Change some rows of one column, or all."""
    for _ in range(chance.choice([1, 3, 10])):
        table = chance.choice(tables(db))
        column = chance.choice(columns(db, table))
        where = chance.choice(["", f" WHERE rowid % 7 = {chance.randrange(7)}"])
        try:
            db.execute(
                f'UPDATE "{table}" SET "{column}" = ?{where}', (chance.choice(UNUSUAL_VALUES),)
            )
        except sqlite3.IntegrityError:
            continue  # a primary key


def shifted_values(db: sqlite3.Connection, chance: Chance) -> None:
    """Multiply numbers, or add something to them."""
    table = chance.choice(tables(db))
    column = chance.choice(columns(db, table))
    change = chance.choice(["* -1", "* 1000000", "+ 1000000000000", "% 3", "/ 1000", "* 2"])
    with suppress(sqlite3.Error):
        db.execute(f'UPDATE OR IGNORE "{table}" SET "{column}" = "{column}" {change}')


def without_a_table(db: sqlite3.Connection, chance: Chance) -> None:
    db.execute(f'DROP TABLE "{chance.choice(tables(db))}"')


def without_a_column(db: sqlite3.Connection, chance: Chance) -> None:
    table = chance.choice(tables(db))
    with suppress(sqlite3.Error):
        db.execute(f'ALTER TABLE "{table}" DROP COLUMN "{chance.choice(columns(db, table))}"')


def other_columns(db: sqlite3.Connection, chance: Chance) -> None:
    """A table of the same name with columns of its own, or a view that never ends."""
    table = chance.choice(tables(db))
    db.execute(f'DROP TABLE "{table}"')
    if chance.random() < 0.5:
        db.execute(f'CREATE TABLE "{table}" (id, start TEXT, "end" BLOB, "unusual name", value)')
        db.execute(
            f'INSERT INTO "{table}" VALUES (?, ?, ?, ?, ?)', chance.choices(UNUSUAL_VALUES, k=5)
        )
    else:
        db.execute(
            f'CREATE VIEW "{table}" AS WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT '
            'start + 1 FROM n) SELECT start, start AS "end", start AS id FROM n'
        )


def rows_twice(db: sqlite3.Connection, chance: Chance) -> None:
    table = chance.choice(tables(db))
    for _ in range(chance.choice([1, 6])):
        (pages,), (page,) = (
            db.execute(f"PRAGMA {what}").fetchone() for what in ("page_count", "page_size")
        )
        if pages * page > LARGEST:
            return
        try:
            db.execute(f'INSERT INTO "{table}" SELECT * FROM "{table}"')
        except sqlite3.Error:
            return


CHANGES = [*[change_values_of_a_column] * 3, shifted_values, shifted_values, without_a_table,
           without_a_column, other_columns, rows_twice]  # fmt: skip
BYTES = [
    mutations.cut_off,
    mutations.flip_bytes,
    mutations.lose_a_stretch,
    mutations.repeat_a_stretch,
    mutations.insert_garbage,
    mutations.lose_the_start,
]


def write_mutant(number: int, seed: bytes, path: Path) -> str:
    """Write the mutant of a number; return its story."""
    chance = random.Random(number)
    story = []
    if seed.startswith((b"{", b"[")):
        path.write_bytes(every.mutate_text(seed, every.JSON_MUTATIONS, chance))
        return f"{number}: JSON"
    if not seed.startswith(b"SQLite"):
        path.write_bytes(_mutate_bytes(seed, chance))
        return f"{number}: bytes"
    path.write_bytes(seed)
    if chance.random() < 0.75:
        with sqlite3.connect(path) as db:
            for _ in range(chance.choice([1, 1, 2, 4])):
                change = chance.choice(CHANGES)
                if tables(db):
                    change(db, chance)
                story.append(change.__name__)
        db.close()
    if chance.random() < 0.4:
        harm = chance.choice(BYTES)
        path.write_bytes(harm(path.read_bytes(), chance))
        story.append(harm.__name__)
    return f"{number}: {' + '.join(story)}"


def _mutate_bytes(seed: bytes, chance: Chance) -> bytes:
    """A binary file, harmed once or a few times; a pickle's values changed as well."""
    if seed.startswith(b"\x80") and chance.random() < 0.5:
        return pickle.dumps(_replace_values(pickle.loads(seed), chance))
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        if seed:
            seed = chance.choice([*BYTES, _raise_length])(seed, chance)
    return seed


def _raise_length(data: bytes, chance: Chance) -> bytes:
    """Raise a byte that may be a length or a number."""
    at = chance.randrange(len(data))
    greater = chance.choice([b"\xff" * 9 + b"\x01", b"\xff" * 4 + b"\x7f", b"\xff\xff\x03", b"\0"])
    return data[:at] + greater + data[at + chance.choice([1, 2, len(greater)]) :]


def _replace_values(value: object, chance: Chance) -> object:
    """Values of other kinds in random places of lists and dictionaries."""
    unusual = [*mutations.VALUES, *mutations.NUMBERS, *mutations.HOSTILE_NAMES]
    for _ in range(chance.choice([1, 3, 30])):
        at: object = value
        while isinstance(at, dict | list) and at:
            key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if isinstance(at[key], dict | list) and at[key] and chance.random() < 0.9:
                at = at[key]
                continue
            at[key] = chance.choice(unusual)
            break
    return value


def damaged_logdir(number: int, seeds: dict[str, bytes], folder: Path) -> str:
    """Writes the number-th log directory of two hosts, some of its files mutants; its story."""
    chance = random.Random(number)
    shutil.rmtree(folder, ignore_errors=True)
    place = folder / "plugins" / "profile" / "2026_01_01"
    place.mkdir(parents=True)
    story = []
    for host in ("a", "b"):
        plane, timeline = place / f"{host}.xplane.pb", place / f"{host}.trace.json.gz"
        data = {plane: seeds["xplane"], timeline: gzip.compress(seeds["xla timeline"])}
        for file, sound in data.items():
            what = chance.choice(["sound", "sound", "bytes", "bytes", "inside", "none", "unusual"])
            story.append(what)
            if what == "unusual":
                every.replace_file(file, chance)
            elif what == "inside" and file is timeline:
                text = every.mutate_text(seeds["xla timeline"], every.JSON_MUTATIONS, chance)
                file.write_bytes(gzip.compress(text))
            elif what in ("bytes", "inside"):
                file.write_bytes(_mutate_bytes(sound, chance))
            elif what == "sound":
                file.write_bytes(sound)
    return f"{number}: {' '.join(story)}"


# -- what must hold -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("profilers")
    return {name: make(folder).read_bytes() for name, make in SEEDS.items()}


def mutant_chunks() -> list[tuple[str, int, int]]:
    """Formats, and numbers of mutants: a test each."""
    total = MUTANTS or SAMPLE
    firsts = range(0, total, CHUNK)
    return [(name, n, min(n + CHUNK, total)) for name in (*SEEDS, LOGDIR) for n in firsts]


@pytest.mark.parametrize(("name", "first", "last"), mutant_chunks())
def test_a_mutated_file_is_read_or_refused_in_a_line(
    name: str, first: int, last: int, seeds: dict[str, bytes], tmp_path: Path
) -> None:
    outcomes = []
    path, read = _mutant_paths(tmp_path / "mutant", name, seeds)
    for number in range(first, last):
        act = _analyze_fully if MUTANTS or number % 8 == 0 else _reading
        path.unlink(missing_ok=True)
        if name == LOGDIR:
            story = damaged_logdir(number, seeds, tmp_path / LOGDIR)
            outcomes.append(mutations.check_file(act, f"{name} {story}", tmp_path / LOGDIR))
        else:
            story = write_mutant(number, seeds[name], path)
            outcomes.append(mutations.check_file(act, f"{name} {story}", read))
    if len(outcomes) >= 40:  # else the mutations prove nothing
        assert outcomes.count("read") > len(outcomes) // 40


@pytest.mark.parametrize("name", SEEDS)
def test_every_sound_file_is_analyzed(name: str, seeds: dict[str, bytes], tmp_path: Path) -> None:
    """Else the mutants would prove nothing."""
    path, read = _mutant_paths(tmp_path / "sound", name, seeds)
    path.write_bytes(seeds[name])
    assert mutations.check_file(_analyze_fully, name, read) == "read"


ELSEWHERE = {KINETO, "flight-recorder", "nccl-log", "memory-timeline"}
"""Readers whose files ``test_every_reader.py`` damages."""


def test_no_reader_of_this_package_is_left_out(tmp_path: Path) -> None:
    seeds = [make(tmp_path) for make in SEEDS.values()]
    seeded = {reader_of(ByteSource(str(path))).name for path in seeds}
    assert seeded | ELSEWHERE == {reader.name for reader in bundled_readers()}


def _mutant_paths(stem: Path, name: str, seeds: dict[str, bytes]) -> tuple[Path, Path]:
    """Files to write a mutant to, and the path to read then."""
    path, read = (
        stem.with_suffix(SUFFIXES.get(n, ".sqlite")) for n in (name, BESIDE.get(name, name))
    )
    if path != read:
        read.write_bytes(seeds[BESIDE[name]])
    return path, read


def _analyze_fully(path: Path) -> None:
    """Analyze a file and render every form of report."""
    mutations.analyze_fully(path)


def _reading(path: Path) -> None:
    if path.is_dir() or path.suffix == ".pickle":
        open_run(str(path))
    else:
        read_trace(str(path))
