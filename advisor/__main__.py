"""``python -m advisor``: the command line, where the ``advisor`` script is not on the path."""

from __future__ import annotations

from advisor.cli import main

main()
