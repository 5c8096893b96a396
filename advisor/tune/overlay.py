"""Redirection of a tried program's writes to a scratch folder, from which they are read back: its
checkpoints and logs stay as they are.

Python's own calls to open, create, rename and list files are redirected to ``scratch/files/<the
path>``; a file that is changed is copied there first. The native writers of ``NATIVE`` get the path
in the scratch folder. Deleting existing files is refused. The kernel confines other native code
(``trial_process.py``). Where it cannot, an audit hook sees Python's calls only. This module needs
no torch, because it is active before the program begins."""

import builtins
import errno
import functools
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_MAX_COPIED = 1 << 30
"""Maximum size of a file that may be changed in place, bytes."""
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


NATIVE: dict[str, tuple[tuple[str, int, str], ...]] = {
    "sqlite3": (("connect", 0, "database"),),
    "sqlite3.dbapi2": (("connect", 0, "database"),),
    "safetensors": (("serialize_file", 1, "filename"), ("safe_open", 0, "filename")),
    "tokenizers": (("Tokenizer.save", 1, "path"), ("Tokenizer.from_file", 0, "path")),
    "h5py": (("File.__init__", 1, "name"),),
    "torch.jit": (("save", 1, "f"), ("load", 0, "f")),
    "pyarrow.parquet": (("write_table", 1, "where"), ("ParquetWriter.__init__", 1, "where")),
    "cv2": (("imwrite", 0, "filename"), ("imread", 0, "filename")),
    "torchaudio": (("save", 0, "uri"), ("load", 0, "uri")),
}
"""Native functions that open a file by its name: module, function, and the argument with the name,
by position and by keyword."""
_READERS = frozenset(("safe_open", "from_file", "load", "imread"))


class Overlay:
    """Overlay of a scratch folder over the file system."""

    def __init__(self, scratch: str, free: tuple[str, ...]) -> None:
        self.files = os.path.join(scratch, "files")  # noqa: PTH118
        self.free = tuple(_with_slash(path) for path in (scratch, *free, "/dev", "/proc"))
        self.moved: set[str] = set()
        self.refused: list[str] = []
        self._mkdir = os.mkdir
        self._os = {name: getattr(os, name) for name in ("stat", "lstat", "open")}

    def _protected_path(self, path: Any) -> str | None:
        """Return an absolute path if writing there is not allowed, else ``None``."""
        plain = _absolute_path(path)
        return None if plain is None or _with_slash(plain).startswith(self.free) else plain

    def _exists(self, path: str) -> bool:
        try:
            self._os["lstat"](path)
        except (OSError, ValueError):
            return False
        return True

    def read_path(self, path: Any) -> Any:
        plain = self._protected_path(path)
        return self.files + plain if plain and self._exists(self.files + plain) else path

    def write_path(self, path: Any, *, keep: bool = False) -> Any:
        """Return the path to write to. ``keep``: copy the file first, because it is changed."""
        plain = self._protected_path(path)
        if plain is None:
            return path
        redirected = self.files + plain
        self.moved.add(plain)
        folder, redirected_folder = os.path.dirname(plain), os.path.dirname(redirected)  # noqa: PTH120
        if not self._exists(redirected_folder) and self._exists(folder):
            self._make_folder(redirected_folder)
        if keep and not self._exists(redirected) and self._exists(plain):
            self._copy_file(plain, redirected)
        return redirected

    def _make_folder(self, folder: str) -> None:
        if not self._exists(folder):
            self._make_folder(os.path.dirname(folder))  # noqa: PTH120
            self._mkdir(folder, 0o700)

    def _copy_file(self, plain: str, redirected: str) -> None:
        if self._os["stat"](plain).st_size > _MAX_COPIED:
            self.refuse(plain, "change in place, but it is too large to copy")
        source, target = self._os["open"](plain, os.O_RDONLY), None
        try:
            target = self._os["open"](redirected, os.O_WRONLY | os.O_CREAT, 0o600)
            while block := os.read(source, 1 << 20):
                os.write(target, block)
        finally:
            os.close(source)
            if target is not None:
                os.close(target)

    def removing(self, path: Any) -> Any:
        """Return the path to remove: only what the program itself has written."""
        plain = self._protected_path(path)
        if plain is None:
            return path
        redirected = self.files + plain
        if not self._exists(redirected):
            if not self._exists(plain):
                return path  # the error that the program would get
            self.refuse(plain, "remove")
        return redirected

    def refuse(self, path: str, operation: str) -> None:
        """Note the refusal, and raise the error for a program that may not write there."""
        if len(self.refused) < 20:
            self.refused.append(f"{operation}: {path}")
        raise PermissionError(errno.EACCES, "not allowed during a trial (advisor try)", path)

    def merged_listing(self, listdir: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
        """Wrap ``os.listdir`` to list both folders."""

        @functools.wraps(listdir)
        def list_both(path: Any = ".") -> list[Any]:
            plain = self._protected_path(path)
            if plain is None or not self._exists(self.files + plain):
                return listdir(path)
            names = listdir(self.files + plain)
            if isinstance(path, bytes):
                names = [os.fsencode(name) for name in names]
            try:
                return list(dict.fromkeys([*listdir(path), *names]))
            except FileNotFoundError:
                return names

        return list_both

    def scanning(self, scandir: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap ``os.scandir`` to scan both folders."""

        @functools.wraps(scandir)
        def scan_both(path: Any = ".") -> Any:
            plain = self._protected_path(path)
            if plain is None or not self._exists(self.files + plain):
                return scandir(path)
            with scandir(self.files + plain) as result:
                entries = {entry.name: entry for entry in result}
            try:
                with scandir(path) as result:
                    entries = {**{entry.name: entry for entry in result}, **entries}
            except FileNotFoundError:
                pass
            return _Entries(list(entries.values()))

        return scan_both

    def install(self) -> None:
        """Redirect the file calls of this process and of the processes that it forks."""
        original = io.open

        @functools.wraps(original)
        def open_(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(mode, str) and isinstance(file, str | bytes | os.PathLike):
                if set(mode) & set("wax+"):
                    file = self.write_path(file, keep="a" in mode or "r" in mode)
                else:
                    file = self.read_path(file)
            return original(file, mode, *args, **kwargs)

        builtins.open = io.open = open_
        os_open = os.open

        @functools.wraps(os_open)
        def open_descriptor(path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None) -> int:
            if dir_fd is None:
                changes = flags & _CHANGES
                keep = not flags & os.O_TRUNC
                path = self.write_path(path, keep=keep) if changes else self.read_path(path)
            return os_open(path, flags, mode, dir_fd=dir_fd)

        os.open = open_descriptor
        for name in ("stat", "lstat", "access", "readlink"):
            self._redirect(name, self.read_path)
        for name in ("mkdir", "mkfifo"):
            self._redirect(name, self.write_path)
        for name in ("chmod", "utime", "truncate"):
            self._redirect(name, functools.partial(self.write_path, keep=True))
        for name in ("remove", "unlink", "rmdir"):
            self._redirect(name, self.removing)
        for name in ("rename", "replace"):
            self._redirect_both(name)
        for name, both in (("listdir", self.merged_listing), ("scandir", self.scanning)):
            setattr(os, name, both(getattr(os, name)))

    def _redirect(self, name: str, redirect: Callable[[Any], Any]) -> None:
        original = getattr(os, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def redirected(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is None:
                path = redirect(path)
            return original(path, *args, **kwargs)

        for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if original in supported:
                supported.add(redirected)
        if original in os.supports_effective_ids:
            os.supports_effective_ids.add(redirected)
        setattr(os, name, redirected)

    def _redirect_both(self, name: str) -> None:
        original = getattr(os, name)

        @functools.wraps(original)
        def redirected(src: Any, dst: Any, **kwargs: Any) -> Any:
            return original(self.removing(src), self.write_path(dst), **kwargs)

        setattr(os, name, redirected)

    def redirect_native(self) -> None:
        """Redirect the writers of ``NATIVE``, in modules imported now or later."""
        missing = {name for name in NATIVE if not self._redirect_module(name)}
        if not missing:
            return

        class Watch:
            """Import hook that finds no module itself, but reports when another loader runs one."""

            @staticmethod
            def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
                if fullname not in missing:
                    return None
                missing.discard(fullname)
                spec = importlib.util.find_spec(fullname)
                loader: Any = getattr(spec, "loader", None)
                run = getattr(loader, "exec_module", None)
                if run is None:
                    return spec

                def exec_module(module: Any) -> None:
                    run(module)
                    self._redirect_module(fullname)

                with suppress(AttributeError):
                    loader.exec_module = exec_module
                return spec

        sys.meta_path.insert(0, Watch)

    def _redirect_module(self, name: str) -> bool:
        """Redirect a module's native writers; return False if it is not imported."""
        module = sys.modules.get(name)
        if module is None:
            return False
        for function, position, keyword in NATIVE[name]:
            owner: Any = module
            *owners, leaf = function.split(".")
            for part in owners:
                owner = getattr(owner, part, None)
            original = getattr(owner, leaf, None)
            if original is not None:
                with suppress(AttributeError, TypeError):  # the type cannot be changed
                    setattr(owner, leaf, self._wrap_native(original, leaf, position, keyword))
        return True

    def _wrap_native(self, original: Any, name: str, position: int, keyword: str) -> Any:
        find = self.read_path if name in _READERS else functools.partial(self.write_path, keep=True)

        @functools.wraps(original)
        def redirected(*args: Any, **kwargs: Any) -> Any:
            target = args[position] if len(args) > position else kwargs.get(keyword)
            # a name such as ":memory:" or a URI is not a path
            if not isinstance(target, str | bytes | os.PathLike) or str(target).startswith(
                (":", "file:")
            ):
                return original(*args, **kwargs)
            mode = args[position + 1] if len(args) > position + 1 else kwargs.get("mode")
            plain = _absolute_path(target)
            is_large = plain is not None and self._exists(plain) and (
                self._os["stat"](plain).st_size > _MAX_COPIED
            )  # fmt: skip
            is_read = (name == "__init__" and mode in (None, "r")) or is_large
            path = str(self.read_path(target) if is_read else find(target))
            if len(args) > position:
                args = (*args[:position], path, *args[position + 1 :])
            else:
                kwargs[keyword] = path
            return original(*args, **kwargs)

        return redirected

    def redirect_torch_save(self) -> None:
        """Redirect ``torch.save`` to a file name, which is native."""
        import torch

        original = torch.save

        @functools.wraps(original)
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            return original(obj, self.write_path(f) if _absolute_path(f) else f, *args, **kwargs)

        torch.save = torch.serialization.save = save

    def watch(self) -> None:
        """Refuse remaining writes elsewhere, as far as Python's audit events show them."""
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes):
            mode, flags = args[1], args[2]
            changes = set(mode) & set("wax+") if isinstance(mode, str) else (flags or 0) & _CHANGES
            plain = self._protected_path(args[0])
            if changes and plain is not None:
                self.refuse(plain, "write")
        elif event in ("os.remove", "os.rmdir", "os.mkdir", "os.rename", "os.truncate"):
            for path in args[: 2 if event == "os.rename" else 1]:
                plain = self._protected_path(path)
                if plain is not None and -1 in args[1:]:
                    self.refuse(plain, event.removeprefix("os."))


class _Entries:
    """Iterator over the entries of a folder, as ``os.scandir`` gives them, from a list."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Any:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: no folder is open."""

    close = __exit__


def _absolute_path(path: Any) -> str | None:
    """Return an absolute path as text, or ``None`` for a descriptor or stream."""
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    try:
        return os.path.abspath(os.fsdecode(path))  # noqa: PTH100
    except (TypeError, ValueError):
        return None


def _with_slash(path: str) -> str:
    return path.rstrip("/") + "/"
