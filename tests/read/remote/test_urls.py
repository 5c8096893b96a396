"""Recognize a URL, redact it for display, and know whose file it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.advise.ranks.job import locate_traces
from advisor.core.errors import AdvisorError
from advisor.read import ReadOptions, open_run
from advisor.read.remote.filesystem import explain_error
from advisor.read.remote.urls import RankFilter, file_name, is_url, rank_in, redact_url


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/a.json", True),
        ("zip://*.json::s3://bucket/a.zip", True),
        ("simplecache::gs://bucket/a.json", True),
        ("zip://a.json::/data/a.zip", True),
        ("trace.json", False),
        ("/data/a::b/trace.json", False),
        ("C://traces/a.json", False),
        (r"C:\traces\a.json", False),
        ("-", False),
        ("", False),
        ("host:/path", False),
    ],
)
def test_urls_are_distinguished_from_paths(text: str, expected: bool) -> None:
    assert is_url(text) is expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/run/a.json", "s3://bucket/run/a.json"),
        ("https://me:secret@host:80/a.json?X-Amz-Signature=1#part", "https://host:80/a.json"),
        ("sftp://me@host/a.json", "sftp://host/a.json"),
        ("abfs://box@account.dfs.core.windows.net/a", "abfs://box@account.dfs.core.windows.net/a"),
        ("abfs://me:key@account.dfs.core.windows.net/a", "abfs://account.dfs.core.windows.net/a"),
        ("s3://bucket/a?.json", "s3://bucket/a?.json"),
        ("s3://bucket/a.json?versionId=1", "s3://bucket/a.json"),
        ("zip://a.json::https://me:pw@host/a.zip?sig=1", "zip://a.json::https://host/a.zip"),
        ("s3://bucket/hf_abcdefghij/a.json", "s3://bucket/[redacted]/a.json"),
        ("a.json?x=1", "a.json?x=1"),
    ],
)
def test_shown_urls_have_no_credentials(url: str, expected: str) -> None:
    assert redact_url(url) == expected


@pytest.mark.parametrize(
    ("place", "rank"),
    [
        ("s3://bucket/run/rank_3/trace.json", 3),
        ("s3://bucket/rank7/rank12.json.gz", 12),
        ("https://host/trace.json?rank=4", None),
        ("zip://rank5.json::s3://bucket/rank1/a.zip", 5),
        ("zip://trace.json::s3://bucket/rank1/a.zip", 1),
        ("s3://crank9/trace.json", None),
        ("/data/Rank-2/a.json", 2),
    ],
)
def test_the_rank_is_of_the_nearest_name(place: str, rank: int | None) -> None:
    assert rank_in(place) == rank


@given(st.text(max_size=400))
def test_a_local_name_stays_in_its_folder(text: str) -> None:
    name = file_name(f"s3://bucket/{text}")
    assert Path("folder", name).parent == Path("folder")
    assert 0 < len(name) <= 120
    assert name.isprintable()


def test_a_local_name_keeps_its_suffixes() -> None:
    assert file_name("s3://b/rank%200/rank3.pt.trace.json.gz") == "rank3.pt.trace.json.gz"
    assert file_name(f"s3://b/{'x' * 500}.json.zst").endswith("xx.json.zst")
    assert file_name("zip://a/b.json::s3://b/c.zip") == "b.json"
    assert file_name("https://h/b.json?x=/c.txt") == "b.json"


def test_ranks_are_numbers_and_ranges() -> None:
    ranks = RankFilter("0-2, 7,100000000-999999999")
    assert [n for n in range(10) if n in ranks] == [0, 1, 2, 7]
    assert 500_000_000 in ranks
    assert None not in ranks


def test_ranks_above_all_present_are_refused_and_gaps_are_not() -> None:
    RankFilter("0-7").refuse_missing([0, 3, 7])
    RankFilter("0-99").refuse_missing([])  # no file says its rank
    with pytest.raises(AdvisorError, match=r"--ranks 0-99,200: no trace of rank 8-99, 200$"):
        RankFilter("0-99,200").refuse_missing(range(8))


@pytest.mark.parametrize(
    "text", ["a", "1-", "-1", "5-2", "1,,2", "1" * 20, "0x1", ",".join("1" * 5000)]
)
def test_an_invalid_list_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(AdvisorError, match="--ranks"):
        RankFilter(text)


@pytest.mark.parametrize(
    ("url", "missing", "message"),
    [
        ("s3://bucket/a.json", "s3fs", "s3:// needs s3fs: pip install s3fs"),
        ("gs://bucket/a.json", "gcsfs", "gs:// needs gcsfs: pip install gcsfs"),
        ("abfs://c@a/a.json", "adlfs", "abfs:// needs adlfs: pip install adlfs"),
        ("zip://a.json::gs://b/a.zip", "gcsfs", "gs:// needs gcsfs: pip install gcsfs"),
        ("s3://bucket/a.json", "fsspec", "s3:// needs fsspec: pip install"),
        ("nobody://a.json", "", "nobody:// is not read; give http"),
        ("reference://a.json", "", "reference:// is not read; give http"),
        ("git://repo:main@a.json", "", "git:// is not read; give http"),
        ("zip://a.json::dask://h/a.zip", "", "dask:// is not read; give http"),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str, missing: str, message: str
) -> None:
    if missing == "s3fs":  # the others are not there, or not here
        fsspec = pytest.importorskip("fsspec.registry")
        monkeypatch.delitem(fsspec._registry, "s3", raising=False)
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(AdvisorError) as caught:
        open_run(url)
    assert message in str(caught.value)


def test_places_here_are_sources_too(tmp_path: Path) -> None:
    for rank in (10, 9):
        (tmp_path / f"rank{rank}.json").write_bytes(b"{}")
    traces = locate_traces([str(tmp_path)])
    assert [(one.rank, one.size, one.url) for one in traces] == [
        (rank, 2, str(tmp_path / f"rank{rank}.json")) for rank in (9, 10)
    ]
    assert locate_traces([f"file://{tmp_path}"], "10") == traces[1:]


def test_a_path_like_a_url_is_a_path_where_urls_are_off(tmp_path: Path) -> None:
    with pytest.raises(AdvisorError, match="no such file"):
        open_run("memory://a.json", ReadOptions(urls=False))


class ClientError(Exception):
    """An error that looks like botocore's and aiohttp's."""

    def __init__(self, **has: object) -> None:
        super().__init__("https://host/a?X-Amz-Signature=abcdef")
        vars(self).update(has)


@pytest.mark.parametrize(
    ("error", "message", "passing"),
    [
        (ClientError(response={"ResponseMetadata": {"HTTPStatusCode": 503}}), "503", True),
        (ClientError(response={"ResponseMetadata": {"HTTPStatusCode": 403}}), "denied", False),
        (ClientError(status=412), "changed", False),
        (ClientError(status=418), "418", False),
        (ClientError(code="404"), "no such file", False),
        (ConnectionResetError(104, "reset"), "breaks off", True),
        (PermissionError("Forbidden"), "denied", False),
        (FileNotFoundError("The specified bucket does not exist"), "no such bucket", False),
        (ClientError(status="text", response=7), "ClientError", False),
    ],
)
def test_errors_of_libraries_are_reported_in_our_words(
    error: Exception, message: str, passing: bool
) -> None:
    what = explain_error(error, "s3://bucket/a")
    assert message in what.message
    assert what.retryable is passing
    assert "Signature" not in what.message


def test_file_not_found_after_a_server_error_is_retryable() -> None:
    error = FileNotFoundError("https://host/a")
    error.__cause__ = ClientError(status=503)
    assert explain_error(error, "https://host/a").retryable
