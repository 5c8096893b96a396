"""Begins the recording in a process that ``advisor record`` started, and runs the user's own
sitecustomize. On PYTHONPATH in front of everything else; nothing may leave this file."""

# Not a module of the package: the interpreter imports it by its bare name.


def _chain() -> None:
    """Import the sitecustomize that this file hides."""
    import importlib.machinery
    import importlib.util
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    ours = sys.modules.get("sitecustomize")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if ours is not None:
            sys.modules["sitecustomize"] = ours
        raise


def _record() -> None:
    import os

    if not os.environ.get("ADVISOR_RUN_DIR"):
        return
    try:
        from advisor.recording.injection import watch
    except ImportError:  # another Python than the one advisor is installed in
        return
    watch()


_record()
_chain()
