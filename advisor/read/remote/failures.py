"""Why a file elsewhere could not be read: one line for whatever its library raises, and whether to
try again.

Libraries are known by the names of their errors and by the status that a server answered: none is
imported for this. What they say themselves holds URLs with their signatures, and is not repeated.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import NamedTuple

from advisor.core.errors import AdvisorError
from advisor.read.remote.urls import scheme

PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "adl": "adlfs",
    "hdfs": "pyarrow",
    "webhdfs": "requests",
    "http": "aiohttp",
    "https": "aiohttp",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "oci": "ocifs",
    "oss": "ossfs",
    "hf": "huggingface_hub",
    "smb": "smbprotocol",
    "webdav": "webdav4",
}
"""What fsspec needs for a scheme."""
_PASSING = frozenset(
    {
        "TimeoutError",
        "ConnectionError",
        "FSTimeoutError",
        # aiohttp
        "ClientConnectionError",
        "ClientPayloadError",
        # botocore
        "EndpointConnectionError",
        "HTTPClientError",
        "IncompleteReadError",
        "ResponseStreamingError",
        # http.client, urllib3, requests
        "IncompleteRead",
        "ProtocolError",
        "ChunkedEncodingError",
        # azure
        "ServiceRequestError",
        "ServiceResponseError",
    }
)
_SLOW = frozenset({"TimeoutError", "ConnectTimeoutError", "ReadTimeoutError", "FSTimeoutError"})
_NOBODY = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "ProfileNotFound",
        "TokenRetrievalError",
        "DefaultCredentialsError",
        "RefreshError",
        "ClientAuthenticationError",
    }
)
_FAR = 10
"""Errors that led to an error, looked at."""


class CutOffError(Exception):
    """Fewer bytes came than were promised."""


class Trouble(NamedTuple):
    """What is wrong with a file elsewhere."""

    said: str
    passing: bool
    """Another attempt may succeed."""


def trouble(error: BaseException, place: str) -> Trouble:
    """What an error means. ``place``: the URL, of which only the scheme counts."""
    chain = list(_chain(error))
    names = {cls.__name__ for one in chain for cls in type(one).__mro__}
    status = next((found for one in chain if (found := _status(one)) is not None), None)
    # the status first: fsspec says that what it could not ask for is not there
    if status in (401, 403):
        return Trouble(f"access denied ({status}); {_check(place)}", passing=False)
    if status == 412:
        return Trouble("changed while it was read; try again", passing=False)
    if status is not None and (status >= 500 or status in (408, 425, 429)):
        return Trouble(f"the server answers {status}; try again later", passing=True)
    if names & _NOBODY:
        return Trouble(f"no credentials; {_check(place)}", passing=False)
    if any(isinstance(one, PermissionError) for one in chain):
        return Trouble(f"access denied; {_check(place)}", passing=False)
    if any("bucket does not exist" in str(one) or "NoSuchBucket" in str(one) for one in chain):
        return Trouble("no such bucket; check its name", passing=False)
    if status in (404, 410) or "NoSuchKey" in names:
        return Trouble("no such file; check the URL", passing=False)
    if names & _SLOW:
        return Trouble("no answer in time; try again later", passing=True)
    if isinstance(error, CutOffError):
        return Trouble(f"cut off ({error}); try again later", passing=True)
    if names & _PASSING:
        return Trouble("the connection fails or breaks off; try again later", passing=True)
    if any(isinstance(one, FileNotFoundError) for one in chain):
        return Trouble("no such file; check the URL", passing=False)
    if isinstance(error, IsADirectoryError):
        return Trouble("a folder, not a file; give a trace in it", passing=False)
    if status is not None:
        return Trouble(f"the server answers {status}; check the URL", passing=False)
    broken = isinstance(error, OSError) and error.errno in (errno.EIO, None)
    return Trouble(f"cannot be read ({type(error).__name__})", passing=broken)


def not_installed(name: str) -> AdvisorError:
    """What to install for a scheme that cannot be read yet."""
    package = PACKAGES.get(name)
    if package is None:
        return AdvisorError(f"{name}://: the package that reads it is not installed")
    return AdvisorError(f"{name}:// needs {package}: pip install {package}")


def _check(place: str) -> str:
    tools = {"s3": "aws sts get-caller-identity", "gs": "gcloud auth list", "az": "az account show"}
    name = scheme(place.rpartition("::")[2])
    aliases = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az"}
    tool = tools.get(aliases.get(name, name))
    return f"{tool} says who you are" if tool else "check who you are logged in as"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    now: BaseException | None = error
    for _ in range(_FAR):
        if now is None:
            return
        yield now
        now = now.__cause__ or now.__context__


def _status(error: BaseException) -> int | None:
    """What a server answered, as aiohttp, botocore, requests, gcsfs and azure say it."""
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):  # botocore
        meta = answer.get("ResponseMetadata")
        found = meta.get("HTTPStatusCode") if isinstance(meta, dict) else None
    else:
        found = getattr(answer, "status_code", None)
    for name in ("status", "status_code", "code"):
        found = getattr(error, name, None) if found is None else found
    text = str(found) if isinstance(found, int | str) else ""
    return int(text) if len(text) == 3 and text.isdecimal() and text.isascii() else None
