"""Members of archives that lie elsewhere, and archives that are made to do harm."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from advisor.advise.ranks.job import locate_traces
from advisor.core.errors import AdvisorError
from advisor.read import open_run
from advisor.read.remote import archives, fetch
from advisor.read.remote.fetch import open_locally
from advisor.read.remote.places import find_files
from advisor.read.remote.urls import RemoteFile
from tests.read.remote.faulty import Fault, Server

Made = Callable[[int], bytes]


def zipped(files: dict[str, bytes], packing: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", packing) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def tarred(files: dict[str, bytes], mode: str = "w", links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
        for name, target in (links or {}).items():
            for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                header = tarfile.TarInfo(name)
                header.type, header.linkname = kind, target
                archive.addfile(header)
    return buffer.getvalue()


def refusal(url: str) -> str:
    """The line of the error that opening raises."""
    with pytest.raises(AdvisorError) as caught:
        open_run(url)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("packing", ["zip", "stored zip", "tar", "tar.gz", "tar.bz2", "tar.xz"])
def test_a_run_is_read_from_an_archive(web: Server, trace_bytes: Made, packing: str) -> None:
    files = {f"job/rank{rank}/trace.json": trace_bytes(rank) for rank in (0, 2)}
    files["job/readme.txt"] = b"no trace"
    kind = "zip" if "zip" in packing else "tar"
    if kind == "zip":
        plain = "stored" in packing
        archive = zipped(files, zipfile.ZIP_STORED if plain else zipfile.ZIP_DEFLATED)
    else:
        archive = tarred(files, f"w:{packing.removeprefix('tar').strip('.')}")
    web.state.files["/a"] = archive
    run = open_run(f"{kind}://job::{web.url}/a")
    assert run.ranks == [0, 2]
    member_url = f"{kind}://job/rank2/trace.json::{web.url}/a"
    assert run.traces[2, 0].meta.path == member_url
    (one,) = locate_traces([f"{kind}://**/*.json::{web.url}/a"], "2")
    assert (one.url, one.rank, one.size) == (member_url, 2, len(trace_bytes(2)))
    with open_locally(one) as path:
        assert path.read_bytes() == trace_bytes(2)


@pytest.mark.parametrize("name", ["run.zip", "run.tar", "run.tar.gz", "run.tgz"])
def test_the_only_trace_of_a_local_archive_is_read(
    tmp_path: Path, trace_bytes: Made, name: str
) -> None:
    pack = zipped if name.endswith("zip") else tarred
    mode = {} if name.endswith(("zip", "tar")) else {"mode": "w:gz"}
    path = tmp_path / name
    path.write_bytes(pack({"run/rank3.json": trace_bytes(3), "run/notes.txt": b"x"}, **mode))  # type: ignore[operator]
    assert open_run(path).ranks == [3]
    path.write_bytes(pack({f"rank{n}.json": trace_bytes(n) for n in (0, 1)}, **mode))  # type: ignore[operator]
    kind = "zip" if name.endswith("zip") else "tar"
    every = f"{kind}://::{path}"
    assert refusal(str(path)).endswith(f"such as {kind}://rank0.json::{path}, or all: {every}")
    assert open_run(every).ranks == [0, 1]
    path.write_bytes(pack({"notes.txt": b"x", "more.txt": b"y"}, **mode))  # type: ignore[operator]
    assert "of 2 files, none named like a trace" in refusal(str(path))


def test_suggested_archive_member_is_readable(shared_file: Callable[[str], str]) -> None:
    """Layers without times come first in this archive, and its engines are seven runs."""
    path = shared_file("tensorrt/resnet50_engine_profiles_A100_RTX3090.tar.gz")
    line = refusal(path)
    assert "or all:" not in line
    assert len(open_run(line.rpartition("such as ")[2]).traces) == 1


def test_pages_of_tensorboards_plugin_are_named(shared_file: Callable[[str], str]) -> None:
    """Five of them, as xprof's demo has them: input_pipeline, overview_page, tensorflow_stats."""
    path = shared_file("xla/tfprof_demo_GPU_input_vs_compute_bound.tar.gz")
    assert "a tar archive of 5 files; each is a page of TensorBoard's profile" in refusal(path)


def test_archive_of_triton_cache_is_explained(
    shared_file: Callable[[str], str],
) -> None:
    line = refusal(path := shared_file("triton/cache.tar.gz"))
    assert line.startswith(f"{path}: a tar archive of Triton's cache (11 compiled kernels)")
    assert f"tar xf {path}" in line
    assert line.endswith("advisor analyze TRACE --kernel-profile cache")
    assert "://" not in line


def test_a_trace_beside_tritons_cache_is_read(tmp_path: Path, trace_bytes: Made) -> None:
    path = tmp_path / "run.tar"
    kernel = {"cache/AB/k.json": b"{}", "cache/AB/k.cubin": b"x"}
    path.write_bytes(tarred({"rank3.json": trace_bytes(3), **kernel}))
    assert open_run(path).ranks == [3]


def test_a_member_of_a_plain_tar_is_fetched_without_the_rest(web: Server) -> None:
    files = {f"rank{rank}.json": bytes([rank]) * 5_000_000 for rank in range(8)}
    web.state.files["/a.tar"] = tarred(files)
    (one,) = locate_traces([f"tar://::{web.url}/a.tar"], "6")
    web.state.requests.clear()
    with open_locally(one) as path:
        assert path.read_bytes() == files["rank6.json"]
    assert web.state.requests["GET /a.tar"] == 2  # blocks of 4 MiB


def test_a_tar_that_changes_meanwhile_is_not_believed(
    web: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.state.files["/a.tar"] = tarred({"rank0.json": bytes(10_000_000)})
    (one,) = locate_traces([f"tar://::{web.url}/a.tar"])
    write = fetch._Transfer._write_block

    def write_changed(self: fetch._Transfer, out: BinaryIO, block: bytes) -> None:
        web.state.etags["/a.tar"] = '"2"'
        write(self, out, block)

    monkeypatch.setattr(fetch._Transfer, "_write_block", write_changed)
    with pytest.raises(AdvisorError, match="changed while it was read"), open_locally(one):
        pass


def test_a_trace_in_a_local_archive_is_read(tmp_path: Path, trace_bytes: Made) -> None:
    (tmp_path / "a.zip").write_bytes(zipped({"rank5.json": trace_bytes(5)}))
    assert open_run(f"zip://rank5.json::file://{tmp_path}/a.zip").ranks == [5]
    assert open_run(f"zip://*::{tmp_path}/a.zip").ranks == [5]


@pytest.mark.parametrize("name", ["../../evil.json", "/etc/evil.json", "a/../../../evil.json"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_name_leads_out_of_nothing(
    web: Server, trace_bytes: Made, tmp_path: Path, kind: str, name: str
) -> None:
    files = {name: trace_bytes(0), "good.json": trace_bytes(1)}
    web.state.files["/a"] = zipped(files) if kind == "zip" else tarred(files)
    source = RemoteFile(url="shown", at=f"{kind}://{name}::{web.url}/a")
    inside = tmp_path / "a" / "b" / "c"
    inside.mkdir(parents=True)
    with open_locally(source, folder=inside) as path:
        assert path.name == "evil.json"
        assert path.resolve().is_relative_to(inside)
        assert path.read_bytes() == trace_bytes(0)
        written = [one for one in tmp_path.rglob("[!.]*") if one.is_file()]
        assert written == [path]
    assert "good.json" in [
        one.at.partition("::")[0][6:] for one in locate_traces([f"{kind}://::{web.url}/a"])
    ]


def test_links_in_a_tar_are_not_there(web: Server, trace_bytes: Made) -> None:
    archive = tarred({"rank0.json": trace_bytes(0)}, links={"rank1.json": "/etc/passwd"})
    web.state.files["/a.tar"] = archive
    assert [one.rank for one in locate_traces([f"tar://::{web.url}/a.tar"])] == [0]
    (one,) = find_files(f"tar://rank0.json::{web.url}/a.tar", lambda names: names)
    assert one.offset is not None
    with (
        pytest.raises(AdvisorError, match="no such file"),
        open_locally(RemoteFile(url="u", at=f"tar://rank1.json::{web.url}/a.tar")),
    ):
        pass


def test_archive_member_above_the_bound_is_refused(web: Server) -> None:
    web.state.files["/a.zip"] = zipped({"bomb.json": bytes(50_000_000)})
    (one,) = locate_traces([f"zip://::{web.url}/a.zip"])
    assert len(web.state.files["/a.zip"]) < 100_000
    with pytest.raises(AdvisorError, match="larger than 10 MB"), open_locally(one, max_bytes=10**7):
        pass


def test_archive_member_with_a_false_size_is_refused(web: Server) -> None:
    honest = zipped({"bomb.json": bytes(50_000_000)})
    size = struct.pack("<I", 50_000_000)
    assert honest.count(size) == 2  # before the member, and in the table of contents
    web.state.files["/a.zip"] = honest.replace(size, struct.pack("<I", 1000))
    with pytest.raises(AdvisorError, match=r"a\.zip: not an archive that can be read"):
        for one in locate_traces([f"zip://::{web.url}/a.zip"]):
            with open_locally(one):
                pass


def test_an_archive_of_too_many_files_is_refused(
    web: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_ARCHIVE_MEMBERS", 10)
    many = {f"rank{rank}.json": b"{}" for rank in range(12)}
    web.state.files |= {"/a.zip": zipped(many), "/a.tgz": tarred(many, "w:gz")}
    assert "more than 10 files" in refusal(f"zip://::{web.url}/a.zip")
    assert "more than 10 files" in refusal(f"tar://::{web.url}/a.tgz")


def test_a_table_of_contents_is_not_read_at_any_length(
    web: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_REQUEST_BYTES", 100_000)
    web.state.files["/a.zip"] = zipped({f"{'x' * 1000}{n}": b"" for n in range(200)})
    assert "table of contents is too long" in refusal(f"zip://::{web.url}/a.zip")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        header = tarfile.TarInfo("rank0.json")
        header.pax_headers = {"comment": "x" * 1_000_000}
        archive.addfile(header)
    web.state.files["/a.tgz"] = buffer.getvalue()
    assert "table of contents is too long" in refusal(f"tar://::{web.url}/a.tgz")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_file_that_is_no_archive_is_reported(web: Server, kind: str) -> None:
    web.state.files["/a"] = b"<html>log in</html>" * 100
    assert f"{web.url}/a: not an archive that can be read" in refusal(f"{kind}://::{web.url}/a")
    good = (
        zipped({"rank0.json": b"{}" * 5000}) if kind == "zip" else tarred({"a.json": b"{}"}, "w:gz")
    )
    web.state.files["/b"] = good[: len(good) // 2]
    assert "not an archive that can be read" in refusal(f"{kind}://::{web.url}/b")
    assert "no such file" in refusal(f"{kind}://::{web.url}/none")


def test_an_archive_on_a_server_that_fails_now_and_then(web: Server, trace_bytes: Made) -> None:
    web.state.files["/a.zip"] = zipped({"rank0.json": trace_bytes(0), "rank1.json": trace_bytes(1)})
    web.state.faults["a.zip"] = Fault(status=503, times=2)
    assert open_run(f"zip://::{web.url}/a.zip").ranks == [0, 1]


def test_an_archive_without_ranges_is_reported(web: Server, trace_bytes: Made) -> None:
    web.state.files["/a.zip"] = zipped({"rank0.json": trace_bytes(0)})
    web.state.ranges = False
    assert "cannot be read in parts; download it first" in refusal(f"zip://::{web.url}/a.zip")


def test_a_locked_member_is_reported(web: Server) -> None:
    archive = bytearray(zipped({"rank0.json": b"{}"}))
    archive[6] |= 1
    archive[archive.index(b"PK\x01\x02") + 8] |= 1  # encrypted, both say
    web.state.files["/a.zip"] = bytes(archive)
    assert "needs a password" in refusal(f"zip://::{web.url}/a.zip")


@pytest.mark.parametrize("packing", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_archive_member_of_bzip2_or_lzma_is_refused(web: Server, packing: int) -> None:
    web.state.files["/a.zip"] = zipped({"rank0.json": bytes(1 << 26)}, packing)
    name = {zipfile.ZIP_BZIP2: "bzip2", zipfile.ZIP_LZMA: "lzma"}[packing]
    assert f"packed with {name}; pack it with deflate" in refusal(f"zip://::{web.url}/a.zip")


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_the_table_of_contents_is_read_once_for_all_members(
    web: Server, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"rank{rank}.json": f"{rank}".encode() for rank in range(200)}
    web.state.files["/a"] = zipped(files) if kind == "zip" else tarred(files, "w:gz")
    tables = 0
    make = archives._Archive.__init__

    def make_counted(self: archives._Archive, *args: str) -> None:
        nonlocal tables
        tables += 1
        make(self, *args)

    monkeypatch.setattr(archives._Archive, "__init__", make_counted)
    traces = locate_traces([f"{kind[:3]}://::{web.url}/a"])
    for source in reversed(traces):
        with open_locally(source) as path:
            assert path.read_bytes() == f"{source.rank}".encode()
    assert tables == 1
    web.state.files["/a"] = (
        zipped({"rank7.json": b"new"}) if kind == "zip" else tarred({"rank7.json": b"new"}, "w:gz")
    )
    with open_locally(traces[7]) as path:
        assert path.read_bytes() == b"new"
    assert tables == 2


def test_member_format_is_checked_before_a_full_download(web: Server) -> None:
    noise = bytes(range(1, 128)) * 400_000
    web.state.files["/a.tar"] = tarred({"rank0.json": noise})
    web.state.files["/rank0.json"] = noise
    for url in (f"tar://rank0.json::{web.url}/a.tar", f"{web.url}/rank0.json"):
        web.state.requests.clear()
        assert "unknown format" in refusal(url)
        assert web.state.requests["GET /a.tar"] + web.state.requests["GET /rank0.json"] <= 3
