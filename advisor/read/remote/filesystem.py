"""File systems of URLs through fsspec, with timeouts, retries of temporary failures, and one-line
messages for the errors of storage libraries.

This adds to fsspec what proved to be necessary (``tests/read/remote``). fsspec does not end a call
that hangs, does not retry failures of its libraries, and reports files as missing if it could not
query them. Libraries are not imported for this: their errors are recognised by name and by the
status of the server. Their messages contain URLs with signatures, so they are not repeated."""

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
"""Schemes that are read: storage, archives, local copies. fsspec has others that run commands,
follow references in a file, or query a notebook's server."""
CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 60.0
"""Timeouts in s for a connection, and between two parts of a response."""
ROOM_LEFT = 256 << 20
"""Number of bytes of the disk that stay free."""
_VERSION_FIELDS = (
    "ETag",
    "etag",
    "md5Hash",
    "generation",
    "LastModified",
    "Last-Modified",
    "mtime",
)
"""Fields that change with a file, as named by several stores."""


def version_of(info: dict[str, Any]) -> tuple[object, ...]:
    """Return the facts of a file system's entry that change when the file is written again."""
    return info.get("size"), *(info.get(name) for name in _VERSION_FIELDS)


def file_system(url: str) -> tuple[Any, str]:
    """Return an fsspec file system and the path in it. Credentials are found like by the storage's
    own tools: in the environment, their configuration, or the machine's role.

    Raises AdvisorError if a URL cannot be read or a package is not installed."""
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
        except ValueError:  # from an older fsspec
            raise AdvisorError(
                f"{name}:// needs a newer fsspec: {install_command('remote')}"
            ) from None
    # fsspec takes options by scheme if there are several schemes, else by name
    web_options = {name: _http_options() for name in names if name in WEB}
    options = web_options if len(names) > 1 else web_options.get(names[0], {})
    try:
        system, path = url_to_fs(url, **options)
    except AdvisorError:
        raise
    except Exception as error:  # a library may raise anything for a URL that it cannot parse
        raise AdvisorError(
            f"{redact_url(url)[:200]}: not understood ({type(error).__name__})"
        ) from None
    return system, str(path)


def _http_options() -> dict[str, Any]:
    """Return options for HTTP. Bytes arrive as stored and stay packed, or ranges and sizes would
    not match. Proxies and ``.netrc`` apply as in other programs."""
    from aiohttp import ClientTimeout

    return {
        "client_kwargs": {
            "auto_decompress": False,
            "headers": {"Accept-Encoding": "identity"},
            "timeout": ClientTimeout(
                total=None, sock_connect=CONNECT_TIMEOUT, sock_read=READ_TIMEOUT
            ),
            "trust_env": True,
        }
    }


_TEMPORARY_ERRORS = frozenset(
    """TimeoutError ConnectionError FSTimeoutError
    ClientConnectionError ClientPayloadError
    EndpointConnectionError HTTPClientError IncompleteReadError ResponseStreamingError
    IncompleteRead ProtocolError ChunkedEncodingError
    ServiceRequestError ServiceResponseError""".split()
)
"""Temporary errors of Python, fsspec, aiohttp, botocore, http.client, urllib3, requests, azure."""
_TIMEOUT_ERRORS = frozenset(
    {"TimeoutError", "ConnectTimeoutError", "ReadTimeoutError", "FSTimeoutError"}
)
_CREDENTIAL_ERRORS = frozenset(
    """NoCredentialsError PartialCredentialsError CredentialRetrievalError ProfileNotFound
    TokenRetrievalError DefaultCredentialsError RefreshError ClientAuthenticationError""".split()
)
_MAX_CAUSES = 10
"""Maximum number of causes examined in an error's chain."""


class CutOffError(Exception):
    """Error for fewer bytes than announced."""


class ReadFailure(NamedTuple):
    """Failure to read a remote file."""

    message: str
    retryable: bool
    """Whether another attempt may succeed."""


def explain_error(error: BaseException, place: str) -> ReadFailure:
    """Return the meaning of an error. ``place``: the URL, of which only the scheme is used."""
    chain = list(_iterate_causes(error))
    names = {cls.__name__ for item in chain for cls in type(item).__mro__}
    status = next(
        (item_status for item in chain if (item_status := _response_status(item)) is not None), None
    )
    # the status first, because fsspec reports files as missing if it could not query them
    if status in (401, 403):
        return ReadFailure(f"access denied ({status}); {_login_advice(place)}", retryable=False)
    if status == 412:
        return ReadFailure("changed while it was read; try again", retryable=False)
    if status is not None and (status >= 500 or status in (408, 425, 429)):
        return ReadFailure(f"the server answers {status}; try again later", retryable=True)
    if names & _CREDENTIAL_ERRORS:
        return ReadFailure(f"no credentials; {_login_advice(place)}", retryable=False)
    if any(isinstance(item, PermissionError) for item in chain):
        return ReadFailure(f"access denied; {_login_advice(place)}", retryable=False)
    if any("bucket does not exist" in str(item) or "NoSuchBucket" in str(item) for item in chain):
        return ReadFailure("no such bucket; check its name", retryable=False)
    if status in (404, 410) or "NoSuchKey" in names:
        return ReadFailure("no such file; check the URL", retryable=False)
    if names & _TIMEOUT_ERRORS:
        return ReadFailure("no answer in time; try again later", retryable=True)
    if isinstance(error, CutOffError):
        return ReadFailure(f"cut off ({error}); try again later", retryable=True)
    if names & _TEMPORARY_ERRORS:
        return ReadFailure("the connection fails or breaks off; try again later", retryable=True)
    if any(isinstance(item, FileNotFoundError) for item in chain):
        return ReadFailure("no such file; check the URL", retryable=False)
    if isinstance(error, IsADirectoryError):
        return ReadFailure("a folder, not a file; give a trace in it", retryable=False)
    if status is not None:
        return ReadFailure(f"the server answers {status}; check the URL", retryable=False)
    is_io_error = isinstance(error, OSError) and error.errno in (errno.EIO, None)
    return ReadFailure(f"cannot be read ({type(error).__name__})", retryable=is_io_error)


def _not_installed(name: str, error: ImportError) -> AdvisorError:
    """Return an error with the package to install for a scheme, named by fsspec or by the cause."""
    module = getattr(error.__cause__, "name", None) or ""
    if module and module in str(error):
        return AdvisorError(f"{name}:// needs {module}: pip install {module}")
    return AdvisorError(f"{name}:// cannot be read: {error}")


def _login_advice(place: str) -> str:
    tools = {"s3": "aws sts get-caller-identity", "gs": "gcloud auth list", "az": "az account show"}
    name = scheme(place.rpartition("::")[2])
    aliases = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az"}
    tool = tools.get(aliases.get(name, name))
    return f"{tool} says who you are" if tool else "check who you are logged in as"


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it."""
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _response_status(error: BaseException) -> int | None:
    """Return the status of a server, as reported by aiohttp, botocore, requests, gcsfs or azure."""
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
"""Timeout in s of one response of at most a block."""
ATTEMPTS = 4
"""Maximum number of consecutive attempts without progress."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0
"""Wait in s before the second attempt, doubled before each later one, and its maximum."""


def can_seek(file: Any, place: int) -> bool:
    """Seek, and return whether it worked. A server's stream may wrongly claim that it can seek."""
    try:
        file.seek(0, 2)
        file.seek(place)
    except (OSError, ValueError):
        return False
    return bool(file.seekable())


def call_within(seconds: float, call: Callable[[], _T]) -> _T:
    """Return the result of a call, or raise its error. Raises TimeoutError if it takes too long;
    the call then continues in a background thread. Ctrl-C works meanwhile."""
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="advisor-remote").start()
    return answer.result(seconds)


def retry(place: str, call: Callable[[], _T], timeout: float | None = None) -> _T:
    """Return the result of a call, retrying temporary failures. Raises AdvisorError with one
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
    """Wait before the next attempt. Raises AdvisorError if a retry cannot help or none is left."""
    failure = explain_error(error, place)
    if not failure.retryable:
        raise AdvisorError(f"{redact_url(place)}: {failure.message}") from None
    if failures >= ATTEMPTS:
        attempts_text = f" ({failures} attempts)" if failures > 1 else ""
        raise AdvisorError(f"{redact_url(place)}: {failure.message}{attempts_text}") from None
    wait = min(FIRST_WAIT * 2 ** (failures - 1), LONGEST_WAIT)
    time.sleep(wait * random.uniform(0.5, 1.0))  # so that processes do not retry all at once
