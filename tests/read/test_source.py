"""Bytes of a trace: recognized by content, bounded, tolerant of damage, one line when there is
none."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import zstandard

from advisor.core.errors import AdvisorError
from advisor.read import source as source_module
from advisor.read.source import ByteSource

TEXT = b'{"traceEvents": [' + b",".join(b'{"ts": %d}' % i for i in range(40_000)) + b"]}"
MB = 1 << 20


def read(data: bytes, **options: Any) -> tuple[bytes, ByteSource]:
    source = ByteSource("x", data=data, **options)
    return b"".join(source.blocks()), source


def message(data: bytes, **options: Any) -> str:
    with pytest.raises(AdvisorError) as caught:
        read(data, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


PACKINGS = {
    "plain": TEXT,
    "gzip": gzip.compress(TEXT),
    "gzip in members": b"".join(
        gzip.compress(TEXT[i : i + 1000]) for i in range(0, len(TEXT), 1000)
    ),
    "gzip with an empty member": b"".join(map(gzip.compress, (TEXT[:99], b"", TEXT[99:]))),
    "gzip with a name and a comment in its header": (
        b"\x1f\x8b\x08\x18"
        + bytes(6)
        + b"t.json\0hello\0"
        + zlib.compress(TEXT, wbits=-15)
        + zlib.crc32(TEXT).to_bytes(4, "little")
        + len(TEXT).to_bytes(4, "little")
    ),
    "gzip padded with zeros": gzip.compress(TEXT) + bytes(5000),
    "gzip with garbage behind it": gzip.compress(TEXT) + b"garbage" * 1000,
    "zstd": zstandard.compress(TEXT),
    "zstd in frames": zstandard.compress(TEXT[:5000]) + zstandard.compress(TEXT[5000:]),
    "zstd after a skippable frame": (
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + zstandard.compress(TEXT)
    ),
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_packing_is_identified_by_content(packing: str) -> None:
    text, source = read(PACKINGS[packing])
    assert text == TEXT
    assert (source.truncated, source.damage, source.bytes_read) == (False, None, len(TEXT))


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_packing_is_not_identified_by_name(packing: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.pt"
    path.write_bytes(PACKINGS[packing])
    assert b"".join(ByteSource(str(path)).blocks()) == TEXT


@pytest.mark.parametrize("packing", PACKINGS)
def test_standard_input_is_unpacked_like_a_file(packing: str) -> None:
    code = (
        "import sys; from advisor.read.source import ByteSource; s = ByteSource('-');"
        "n = sum(map(len, s.blocks())); m = sum(map(len, s.reopen().blocks())); print(n, m)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], input=PACKINGS[packing], capture_output=True, check=True
    )
    assert result.stdout.split() == [b"%d" % len(TEXT)] * 2  # and a second time, from memory


def test_members_may_end_where_blocks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    text = TEXT[:2000]
    data = b"".join(gzip.compress(text[i : i + 100]) for i in range(0, len(text), 100))
    for size in (*range(6, 80), len(data) - 1, len(data)):
        monkeypatch.setattr(source_module, "PACKED_BLOCK", size)
        assert read(data)[0] == text, size


def test_blocks_stay_small_however_much_a_byte_unpacks_to() -> None:
    data = gzip.compress(bytes(50 * MB))
    assert max(map(len, ByteSource("x", data=data).blocks())) <= MB
    data = zstandard.compress(bytes(50 * MB))
    assert max(map(len, ByteSource("x", data=data).blocks())) <= MB


# -- damage -------------------------------------------------------------------------------------


def test_gzip_cut_anywhere_gives_a_reported_prefix() -> None:
    packed = gzip.compress(TEXT[:3000])
    for cut in range(10, len(packed)):
        text, source = read(packed[:cut])
        assert TEXT.startswith(text)
        assert source.truncated
        assert source.damage == "gzip that is cut off"


def test_gzip_with_a_flipped_byte_gives_the_data_before_it() -> None:
    packed = bytearray(PACKINGS["gzip"])
    packed[len(packed) // 2] ^= 0xFF
    text, source = read(bytes(packed))
    assert 0 < len(text) < len(TEXT) + MB
    assert text[:1000] == TEXT[:1000]
    assert source.truncated
    assert (source.damage or "").startswith("damaged gzip")


def test_a_zstd_cut_anywhere_gives_a_prefix() -> None:
    packed = zstandard.compress(TEXT[:3000])
    for cut in range(4, len(packed)):
        text, _ = read(packed[:cut])
        assert TEXT.startswith(text)


def test_a_damaged_zstd_is_not_an_exception() -> None:
    packed = bytearray(PACKINGS["zstd"])
    packed[5:9] = b"\xff" * 4
    _, source = read(bytes(packed))
    assert source.truncated
    assert (source.damage or "").startswith("damaged zstd")


def test_a_zstd_window_that_takes_gigabytes_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=30)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = compressor.compress(TEXT) + compressor.flush()  # size unknown: the window counts
    text, source = read(packed)
    assert text == b""
    assert "memory" in (source.damage or "")


def test_random_bytes_behind_a_magic_number_are_not_exception() -> None:
    chance = random.Random(7)
    for _ in range(2000):
        magic = chance.choice([b"\x1f\x8b", b"\x1f\x8b\x08\x00", b"\x28\xb5\x2f\xfd"])
        _, source = read(magic + chance.randbytes(chance.randrange(400)))
        assert source.bytes_read < MB


def test_a_million_empty_members_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "MAX_GZIP_MEMBERS", 5000)
    text, source = read(gzip.compress(b"") * 5001)
    assert text == b""
    assert "5000 members" in (source.damage or "")


# -- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress, bytes])
def test_a_bomb_stops_at_the_limit(pack: Any) -> None:
    text = message(pack(bytes(30 * MB)), limit=10 * MB)
    assert text == (
        "x: unpacks to more than 10.5 MB; if that is expected, raise the limit with --max-size"
    )


def test_the_limit_can_be_raised() -> None:
    assert len(read(gzip.compress(bytes(30 * MB)), limit=40 * MB)[0]) == 30 * MB


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read there")
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_bomb_takes_no_memory(pack: Any, tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(pack(bytes(512 * MB)))
    assert path.stat().st_size < MB
    code = (
        "import sys; from advisor.read.source import ByteSource\n"
        "for _ in ByteSource(sys.argv[1]).blocks(): pass\n"
        "print(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, check=True, text=True
    )
    assert int(result.stdout) * 1024 < 100 * MB


# -- no trace -----------------------------------------------------------------------------------


def packed_by(kind: str) -> bytes:
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("trace.json", TEXT)
    elif kind == "checkpoint":  # as torch.save writes it
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("weights/data.pkl", b"\x80\x02}.")
            archive.writestr("weights/data/0", bytes(16))
    elif kind == "empty zip":
        zipfile.ZipFile(buffer, "w").close()
    else:
        return {"xz": lzma.compress, "bzip2": bz2.compress}[kind](TEXT)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("zip", "a zip archive; unpack it and give the file or folder in it"),
        ("checkpoint", "a checkpoint (torch.save); give a PyTorch profiler trace"),
        ("empty zip", "an empty zip archive; give a PyTorch profiler trace"),
        ("xz", "packed with xz; unpack it first (xz -d)"),
        ("bzip2", "packed with bzip2; unpack it first (bzip2 -d)"),
    ],
)
def test_other_packings_are_named(kind: str, expected: str) -> None:
    assert message(packed_by(kind)) == f"x: {expected}"


def test_a_tar_is_not_mistaken_for_a_trace() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("trace.json"))
    assert (
        read(buffer.getvalue())[0] == buffer.getvalue()
    )  # the splitter names it: it may be in gzip


def test_empty_file_is_reported() -> None:
    assert message(b"") == "x: the file is empty; record the trace again"


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    with pytest.raises(AdvisorError) as caught:
        list(ByteSource(str(path)).blocks())
    assert str(caught.value) == f"{path}: no such file or directory; check the path"
    (tmp_path / "nine.json").touch()
    (tmp_path / "train_step.json.gz").touch()
    with pytest.raises(
        AdvisorError, match=r"no such file or directory; did you mean train_step\.json\.gz\?$"
    ):
        list(ByteSource(str(tmp_path / "train_stp.json.gz")).blocks())


def test_a_directory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AdvisorError, match=r"a directory, not a file; give a trace in it$"):
        list(ByteSource(str(tmp_path)).blocks())


def test_a_file_that_may_not_be_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret.json"
    path.write_bytes(TEXT)
    path.chmod(0)
    if os.geteuid() == 0:  # root may read everything: play the refusal

        def raise_permission_error(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(source_module, "open_regular", raise_permission_error)
    with pytest.raises(AdvisorError, match=r"permission denied; check its permissions$"):
        list(ByteSource(str(path)).blocks())


def test_a_name_with_nul_is_reported() -> None:
    with pytest.raises(AdvisorError, match="not a file name"):
        list(ByteSource("a\0b.json").blocks())


def test_a_name_that_is_too_long_is_reported() -> None:
    with pytest.raises(AdvisorError, match=r"cannot be opened \(File name too long\)"):
        list(ByteSource("a" * 5000).blocks())


def test_a_read_error_half_way_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailingFile(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 0:
                raise OSError(5, "Input/output error")
            return super().read(size)

    monkeypatch.setattr(source_module, "open_regular", lambda *_: FailingFile(TEXT))
    with pytest.raises(AdvisorError, match=r"cannot be read \(Input/output error\); copy it"):
        list(ByteSource("x").blocks())


def test_no_standard_input_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(AdvisorError, match="there is no standard input"):
        list(ByteSource("-").blocks())


# -- what is expected ---------------------------------------------------------------------------


def test_the_expected_size_is_about_right(tmp_path: Path) -> None:
    for packing, data in PACKINGS.items():
        path = tmp_path / "trace"
        path.write_bytes(data)
        expected = ByteSource(str(path)).expected_bytes()
        assert expected > 0
        if packing in ("plain", "gzip"):
            assert expected == len(TEXT)
    assert ByteSource(str(tmp_path / "none")).expected_bytes() == 0
    assert ByteSource("-").expected_bytes() == 0


def test_a_long_standard_input_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(random.Random(1).randbytes(3 * MB))

    monkeypatch.setattr(sys, "stdin", Stdin)
    monkeypatch.setattr(source_module, "REMEMBER", MB)
    source = ByteSource("-")
    assert sum(map(len, source.blocks())) == 3 * MB
    assert source.reopen() is None
