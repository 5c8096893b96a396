"""A URL's file system, by fsspec, with its bounds on waiting."""

from __future__ import annotations

from typing import Any

from advisor.core.errors import AdvisorError, install
from advisor.read.remote.failures import not_installed
from advisor.read.remote.urls import LONGEST_URL, WEB, is_url, scheme, shown

CONNECT, ANSWER = 10.0, 60.0
"""Seconds: until a connection stands; between two pieces of an answer."""


def file_system(url: str) -> tuple[Any, str]:
    """An fsspec file system and the path in it. Who logs in is found as that storage's own tools
    do: from the environment, their configuration, or the machine's role.

    Raises AdvisorError: a URL that nobody reads, a package that is not installed.
    """
    if len(url) > LONGEST_URL:
        raise AdvisorError(f"a URL of more than {LONGEST_URL:,} characters")
    try:
        from fsspec import get_filesystem_class
        from fsspec.core import url_to_fs
    except ModuleNotFoundError:
        raise AdvisorError(f"{scheme(url)}:// needs fsspec: {install('remote')}") from None
    parts = url.split("::")
    names = [scheme(one) if is_url(one) or "/" not in one else "file" for one in parts]
    for name in names:
        try:
            get_filesystem_class(name)
        except ImportError:
            raise not_installed(name) from None
        except ValueError:
            raise AdvisorError(f"{shown(url)[:200]}: no scheme {name!r} is known") from None
    # fsspec takes them by scheme where there are several, by name where there is one
    ours = {name: _web() for name in names if name in WEB}
    options = ours if len(names) > 1 else ours.get(names[0], {})
    try:
        system, path = url_to_fs(url, **options)
    except AdvisorError:
        raise
    except Exception as error:  # whatever the library raises for a URL that it cannot make out
        raise AdvisorError(f"{shown(url)[:200]}: not understood ({type(error).__name__})") from None
    return system, str(path)


def _web() -> dict[str, Any]:
    """Bytes as they are stored: what a server says is packed stays so, or ranges and sizes would
    be of something else. Proxies and ``.netrc`` as other programs know them."""
    from aiohttp import ClientTimeout

    return {
        "client_kwargs": {
            "auto_decompress": False,
            "headers": {"Accept-Encoding": "identity"},
            "timeout": ClientTimeout(total=None, sock_connect=CONNECT, sock_read=ANSWER),
            "trust_env": True,
        }
    }
