"""``python -m advisor``: the command line, where the ``advisor`` script is not on the path."""

import sys
from pathlib import Path

if not sys.flags.safe_path and Path(__file__).resolve().parents[1] != Path(sys.path[0]).resolve():
    del sys.path[0]  # the current folder: a typer.py in it is no module of ours

from advisor.cli import main

main()
