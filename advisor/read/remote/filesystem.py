"""File systems of URLs, by fsspec, with timeouts, retries of failures that may pass, and one line
for whatever a storage's library raises.

Kept beside what fsspec does, because each was seen to be needed (``tests/read/remote``): fsspec has
no end to a call that hangs, does not try again what its libraries give up, and calls missing what
it could not ask for. Libraries are known by the names of their errors and by the status that a
server answered: none is imported for this. What they say themselves holds URLs with their
signatures, and is not repeated."""

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from advisor.core.errors import AdvisorError, install_command
from advisor.read.remote.urls import LONGEST_URL, WEB, is_url, redact_url, scheme

SCHEMES = frozenset(
    """
        http https ftp sftp ssh smb webdav
        s3 s3a gs gcs az abfs abfss adl oci oss tos tosfs hf dbfs lakefs
        hdfs arrow_hdfs webhdfs file local memory
        zip tar simplecache
    """.split()
)
"""Schemes that are read: storage, archives, local copies. fsspec knows others that run commands,
follow what a file says, or ask a notebook's server."""
CONNECT, ANSWER = 10.0, 60.0
"""Timeouts, s: for a connection; between two pieces of an answer."""
ROOM_LEFT = 256 << 20
"""Bytes of the disk that are left free."""
_SAME = ("ETag", "etag", "md5Hash", "generation", "LastModified", "Last-Modified", "mtime")
"""Fields that change with a file, as several stores name them."""


def version_of(info: dict[str, Any]) -> tuple[object, ...]:
    """Return facts of a file system's entry that change when the file is written again."""
    return info.get("size"), *(info.get(name) for name in _SAME)


def file_system(url: str) -> tuple[Any, str]:
    """Return an fsspec file system and the path in it. Credentials are found as by that storage's
    own tools: in the environment, their configuration, or the machine's role.

    Raises AdvisorError: a URL that nobody reads, a package that is not installed."""
    if len(url) > LONGEST_URL:
        raise AdvisorError(f"a URL of more than {LONGEST_URL:,} characters")
    try:
        from fsspec import get_filesystem_class
        from fsspec.core import url_to_fs
    except ModuleNotFoundError:
        raise AdvisorError(f"{scheme(url)}:// needs fsspec: {install_command('remote')}") from None
    parts = url.split("::")
    names = [scheme(part) if is_url(part) or "/" not in part else "file" for part in parts]
    for name in names:
        if name not in SCHEMES:
            raise AdvisorError(
                f"{redact_url(url)[:200]}: {name}:// is not read; give http, s3, gs, az, hdfs, "
                "sftp, file, zip or tar, or download it"
            )
        try:
            get_filesystem_class(name)
        except ImportError as error:
            raise _not_installed(name, error) from None
        except ValueError:  # of an older fsspec
            raise AdvisorError(
                f"{name}:// needs a newer fsspec: {install_command('remote')}"
            ) from None
    # fsspec takes them by scheme where there are several, by name where there is one
    ours = {name: _web() for name in names if name in WEB}
    options = ours if len(names) > 1 else ours.get(names[0], {})
    try:
        system, path = url_to_fs(url, **options)
    except AdvisorError:
        raise
    except Exception as error:  # whatever the library raises for a URL that it cannot make out
        raise AdvisorError(
            f"{redact_url(url)[:200]}: not understood ({type(error).__name__})"
        ) from None
    return system, str(path)


def _web() -> dict[str, Any]:
    """Return options for HTTP: bytes come as stored and stay packed, or ranges and sizes would not
    match. Proxies and ``.netrc`` apply as in other programs."""
    from aiohttp import ClientTimeout

    return {
        "client_kwargs": {
            "auto_decompress": False,
            "headers": {"Accept-Encoding": "identity"},
            "timeout": ClientTimeout(total=None, sock_connect=CONNECT, sock_read=ANSWER),
            "trust_env": True,
        }
    }


_PASSING = frozenset(
    """TimeoutError ConnectionError FSTimeoutError
    ClientConnectionError ClientPayloadError
    EndpointConnectionError HTTPClientError IncompleteReadError ResponseStreamingError
    IncompleteRead ProtocolError ChunkedEncodingError
    ServiceRequestError ServiceResponseError""".split()
)
"""Errors of Python and fsspec, aiohttp, botocore, http.client with urllib3 and requests, azure."""
_SLOW = frozenset({"TimeoutError", "ConnectTimeoutError", "ReadTimeoutError", "FSTimeoutError"})
_NOBODY = frozenset(
    """NoCredentialsError PartialCredentialsError CredentialRetrievalError ProfileNotFound
    TokenRetrievalError DefaultCredentialsError RefreshError ClientAuthenticationError""".split()
)
MAX_CAUSES = 10
"""Most causes looked at in an error's chain."""


class CutOffError(Exception):
    """Error for fewer bytes than were promised."""


class ReadFailure(NamedTuple):
    """Failure to read a remote file."""

    message: str
    retryable: bool
    """True if another attempt may succeed."""


def explain_error(error: BaseException, place: str) -> ReadFailure:
    """Return the meaning of an error. ``place``: the URL, of which only the scheme counts."""
    chain = list(_chain(error))
    names = {cls.__name__ for item in chain for cls in type(item).__mro__}
    status = next((found for item in chain if (found := _status(item)) is not None), None)
    # the status first: fsspec says that what it could not ask for is not there
    if status in (401, 403):
        return ReadFailure(f"access denied ({status}); {_check(place)}", retryable=False)
    if status == 412:
        return ReadFailure("changed while it was read; try again", retryable=False)
    if status is not None and (status >= 500 or status in (408, 425, 429)):
        return ReadFailure(f"the server answers {status}; try again later", retryable=True)
    if names & _NOBODY:
        return ReadFailure(f"no credentials; {_check(place)}", retryable=False)
    if any(isinstance(item, PermissionError) for item in chain):
        return ReadFailure(f"access denied; {_check(place)}", retryable=False)
    if any("bucket does not exist" in str(item) or "NoSuchBucket" in str(item) for item in chain):
        return ReadFailure("no such bucket; check its name", retryable=False)
    if status in (404, 410) or "NoSuchKey" in names:
        return ReadFailure("no such file; check the URL", retryable=False)
    if names & _SLOW:
        return ReadFailure("no answer in time; try again later", retryable=True)
    if isinstance(error, CutOffError):
        return ReadFailure(f"cut off ({error}); try again later", retryable=True)
    if names & _PASSING:
        return ReadFailure("the connection fails or breaks off; try again later", retryable=True)
    if any(isinstance(item, FileNotFoundError) for item in chain):
        return ReadFailure("no such file; check the URL", retryable=False)
    if isinstance(error, IsADirectoryError):
        return ReadFailure("a folder, not a file; give a trace in it", retryable=False)
    if status is not None:
        return ReadFailure(f"the server answers {status}; check the URL", retryable=False)
    broken = isinstance(error, OSError) and error.errno in (errno.EIO, None)
    return ReadFailure(f"cannot be read ({type(error).__name__})", retryable=broken)


def _not_installed(name: str, error: ImportError) -> AdvisorError:
    """Return an error with what to install for a scheme, named by fsspec or by the cause."""
    module = getattr(error.__cause__, "name", None) or ""
    if module and module in str(error):
        return AdvisorError(f"{name}:// needs {module}: pip install {module}")
    return AdvisorError(f"{name}:// cannot be read: {error}")


def _check(place: str) -> str:
    tools = {"s3": "aws sts get-caller-identity", "gs": "gcloud auth list", "az": "az account show"}
    name = scheme(place.rpartition("::")[2])
    aliases = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az"}
    tool = tools.get(aliases.get(name, name))
    return f"{tool} says who you are" if tool else "check who you are logged in as"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and the errors that led to it."""
    now: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if now is None:
            return
        yield now
        now = now.__cause__ or now.__context__


def _status(error: BaseException) -> int | None:
    """Return a server's status, as aiohttp, botocore, requests, gcsfs or azure report it."""
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):  # botocore
        meta = answer.get("ResponseMetadata")
        result = meta.get("HTTPStatusCode") if isinstance(meta, dict) else None
    else:
        result = getattr(answer, "status_code", None)
    for name in ("status", "status_code", "code"):
        result = getattr(error, name, None) if result is None else result
    text = str(result) if isinstance(result, int | str) else ""
    return int(text) if len(text) == 3 and text.isdecimal() and text.isascii() else None


_T = TypeVar("_T")

TIMEOUT = 60.0
"""Timeout of one answer, of at most a block, s."""
ATTEMPTS = 4
"""Most attempts in a row that bring nothing."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0
"""Wait before the second attempt, s, doubled before each later one, and its maximum."""


def can_seek(file: Any, place: int) -> bool:
    """Seek, and return whether it worked: tried, because a server's stream claims that it can."""
    try:
        file.seek(0, 2)
        file.seek(place)
    except (OSError, ValueError):
        return False
    return bool(file.seekable())


def call_within(seconds: float, call: Callable[[], _T]) -> _T:
    """Return what a call returns, or raise what it raises. Raises TimeoutError if it is late; it
    then goes on in a thread that nobody waits for. Ctrl-C works meanwhile."""
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="advisor-remote").start()
    return answer.result(seconds)


def retry(place: str, call: Callable[[], _T], timeout: float | None = None) -> _T:
    """Return what a call returns, retrying failures that may pass. Raises AdvisorError with one
    line."""
    failures = 0
    while True:
        try:
            return call_within(TIMEOUT if timeout is None else timeout, call)
        except AdvisorError:
            raise
        except Exception as error:  # a file system's library may raise anything
            failures += 1
            give_up_or_wait(error, place, failures)


def give_up_or_wait(error: Exception, place: str, failures: int) -> None:
    """Wait before the next attempt. Raises AdvisorError if retrying cannot help, or is used up."""
    what = explain_error(error, place)
    if not what.retryable:
        raise AdvisorError(f"{redact_url(place)}: {what.message}") from None
    if failures >= ATTEMPTS:
        often = f" ({failures} attempts)" if failures > 1 else ""
        raise AdvisorError(f"{redact_url(place)}: {what.message}{often}") from None
    wait = min(FIRST_WAIT * 2 ** (failures - 1), LONGEST_WAIT)
    time.sleep(wait * random.uniform(0.5, 1.0))  # not all of many processes at once
