"""What torch's profiler would write on the user's terminal because of our windows.

Kineto logs each start and stop to stderr (``USDT:…``, ``STAGE:…``). How much is decided by the C
environment when a process first profiles, once and for all; nothing is redirected, for the
program's own threads write to stderr meanwhile.
"""

from __future__ import annotations

import os
from typing import Final

LEVEL: Final = "KINETO_LOG_LEVEL"
SILENT: Final = "6"
"""Above all of Kineto's levels (VERBOSE 0 … ERROR 4, USDT 5)."""


def hush() -> None:
    """From the first window on. A level that the user has chosen stays. ``os.environ``, which
    programs look at, does not show it."""
    if LEVEL not in os.environ:
        os.putenv(LEVEL, SILENT)


def unhush() -> None:
    """Recording has ended: processes that are started from here on are as they would be."""
    if LEVEL not in os.environ:
        os.unsetenv(LEVEL)
