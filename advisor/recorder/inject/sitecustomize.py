"""Start-up file that begins the recording in a process of ``advisor record`` once torch is
imported, and runs the user's own sitecustomize. It is the first entry of PYTHONPATH.

It is not a module of the package: the interpreter imports it by its bare name in every Python that
the program starts, of any version, with or without advisor. So it only imports loaded modules, and
advisor itself only after torch. No errors except the user's own may leave it."""

from __future__ import annotations

import os
import sys

MYPY = False
if MYPY:  # so that ``typing`` is not loaded at run time
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

TORCH = "torch"
HERE = os.path.dirname(__file__)  # noqa: PTH120
"""Path of this folder, as in PYTHONPATH."""
RECORDING = "advisor.recorder.injection"
BEGIN = "ADVISOR_BEGIN"
"""Variable with the module that replaces the recording. Its ``before_program()`` is called at once,
and its ``begin(note)`` after the import of torch."""
NOTES = "ADVISOR_NOTES"
"""Variable with the folder where each process notes its progress for ``advisor record``."""


def note(text: str) -> None:
    """Append a line for ``advisor record``, which explains why if nothing was recorded."""
    folder = os.environ.get(NOTES)
    if not folder:
        return
    try:
        name = os.path.join(folder, str(os.getpid()))  # noqa: PTH118
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, (text.replace("\n", " ") + "\n").encode("utf-8", "replace"))
        finally:
            os.close(file)
    except OSError:  # another machine, or the command has ended
        return


class TorchImportHook:
    """Finder that notices any import of torch, and leaves the import unchanged.

    A search for torch is not an import (``importlib.util.find_spec`` only searches), an import can
    fail and be tried again, and other finders may come before this one, after it, or in its place.
    So the recording only begins when the loader has run torch's code. The loader is found in two
    places, because either can be bypassed: among the finders (editable installs have their own),
    and in ``PathFinder``, which most of them use."""

    def __init__(self) -> None:
        self._searching: set[int] = set()  # threads in which the other finders are searching
        self._path_finder: Any = None
        self._original_find_spec: Any = None
        self._own_find_spec: Any = None
        self._running = 0
        self._begun = False

    def install(self) -> None:
        """Begin at once if torch is loaded, else wait for its import."""
        if self._is_loaded():
            self.begin()
            return
        sys.meta_path.insert(0, self)
        for finder in sys.meta_path:
            if getattr(finder, "__name__", "") == "PathFinder":
                self._wrap_path_finder(finder)
                break

    def _wrap_path_finder(self, finder: Any) -> None:
        self._original_find_spec = finder.__dict__["find_spec"]
        original = self._original_find_spec.__func__

        def find_spec(cls: Any, fullname: str, path: Any = None, target: Any = None) -> Any:
            """Find a module in ``sys.path`` or in ``path``."""
            spec = original(cls, fullname, path, target)
            return self._watch_loader(spec) if fullname == TORCH else spec

        self._path_finder, self._own_find_spec = finder, classmethod(find_spec)
        finder.find_spec = self._own_find_spec

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torch with the other finders, and watch its loader. Ignore other modules."""
        if fullname != TORCH:
            if TORCH in sys.modules and not self._running and self._is_loaded():
                self.begin()  # torch was imported in another way
            return None
        thread = _thread_id()
        if thread in self._searching:  # another finder calls all finders
            return None
        self._searching.add(thread)
        try:
            for finder in list(sys.meta_path):
                find = None if finder is self else getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
                if spec is not None:
                    return self._watch_loader(spec)
            return None
        finally:
            self._searching.discard(thread)

    def _watch_loader(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        loader: Any = getattr(spec, "loader", None)
        run: Any = getattr(loader, "exec_module", None)
        if self._begun or run is None or getattr(run, "advisor", False):
            return spec

        def exec_module(module: ModuleType) -> None:
            if getattr(module, "__name__", None) != TORCH:  # another module in the same zip file
                run(module)
                return
            self._running += 1
            try:
                run(module)
            finally:
                self._running -= 1
            vars(loader).pop("exec_module", None)
            self.begin()

        # a failed import shows no frame of ours: the interpreter hides frames with this file name
        exec_module.__code__ = exec_module.__code__.replace(
            co_filename="<frozen importlib._bootstrap_external>"
        )
        exec_module.advisor = True  # type: ignore[attr-defined]
        # on this loader only: its type, which programs examine, stays unchanged. If that is not
        # possible, ``find_spec`` will notice that torch is loaded.
        if hasattr(loader, "__dict__"):
            loader.exec_module = exec_module
        return spec

    @staticmethod
    def _is_loaded() -> bool:
        """Return whether torch itself has been imported completely."""
        module = sys.modules.get(TORCH)
        if type(module) is not type(sys):  # a lazy module that is not loaded yet, or a stand-in
            return False
        names = vars(module)
        spec = names.get("__spec__")
        return "Tensor" in names and not getattr(spec, "_initializing", False)

    def begin(self) -> None:
        """Remove the finders and begin to record, because torch is imported."""
        if self._begun:
            return
        self._begun = True
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        finder = self._path_finder
        if finder is not None and finder.__dict__.get("find_spec") is self._own_find_spec:
            finder.find_spec = self._original_find_spec
        note("torch")
        try:
            if not _is_advisor():
                note("without " + sys.executable)
                return
            import importlib

            begin = importlib.import_module(os.environ.get(BEGIN) or RECORDING).begin
        except Exception as error:
            note("without %s (%s: %s)" % (sys.executable, type(error).__name__, error))  # noqa: UP031
            return
        begin(note)


def _thread_id() -> int:
    import _thread

    return _thread.get_ident()


def _is_advisor() -> bool:
    """Return whether the module named advisor is this package. A program may have its own module of
    that name, which must not run."""
    if "advisor" in sys.modules:
        file = getattr(sys.modules["advisor"], "__file__", None)
    else:
        import importlib.util

        spec = importlib.util.find_spec("advisor")
        file = None if spec is None else spec.origin
    parts = os.path.dirname(file or ""), "recorder", "injection.py"  # noqa: PTH120
    return bool(file) and os.path.isfile(os.path.join(*parts))  # noqa: PTH113, PTH118


def _run_user_sitecustomize() -> None:
    """Import the sitecustomize that this file hides, if there is one."""
    import importlib.machinery
    import importlib.util

    others = [path for path in sys.path if path != HERE]
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


def _leave_path() -> None:
    """Remove this folder from ``sys.path``. Child processes get it from PYTHONPATH."""
    sys.path[:] = [path for path in sys.path if path != HERE]


def _begin_if_wanted() -> None:
    other = os.environ.get(BEGIN)
    if not (os.environ.get("ADVISOR_RUN_DIR") or other):
        return
    if os.environ.get("ADVISOR", "").strip().lower() in ("0", "false", "no", "off"):
        return
    note("python " + sys.executable)
    if other:
        if not _is_advisor():
            note("without " + sys.executable)
            return
        import importlib

        importlib.import_module(other).before_program()
    TorchImportHook().install()


try:
    _leave_path()
    _begin_if_wanted()
except Exception as error:
    note("without %s (%s: %s)" % (sys.executable, type(error).__name__, error))  # noqa: UP031
_run_user_sitecustomize()
