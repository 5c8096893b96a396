"""Loading of the rules, bundled or from entry points or a folder, with their options."""

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from advisor.core.discovery import classes_in, loading
from advisor.core.errors import AdvisorError, suggest
from advisor.core.files import open_regular, tool_section
from advisor.core.finding import Category
from advisor.core.rule import Rule

ENTRY_POINTS = "advisor.rules"
MAX_RULE_BYTES = 4 << 20
"""Maximum size of a file of rules, bytes."""


def load_rules(
    folder: Path | None = None, config: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Rule]:
    """Return an instance of every enabled rule, by id, with the user's thresholds set.

    ``folder``: additional rules, in every ``*.py`` file. ``config``: rule id -> options, as in
    ``[tool.advisor.rules.<id>]``. ``enabled = false`` switches a rule off. Raises AdvisorError for
    a rule that cannot be imported, a repeated id, or an unknown rule or option."""
    classes: dict[str, type[Rule]] = {}
    for module in _iterate_modules(folder):
        for cls in (each for each in classes_in(module, Rule) if each.id):
            if not cls.bundled:
                _check_rule_class(cls)
            other = classes.get(cls.id)
            if other is not None and other is not cls:
                raise AdvisorError(
                    f"two rules have the id {cls.id!r}: {other.__module__} and {cls.__module__}"
                )
            classes[cls.id] = cls
    config = config or {}
    for rule_id in config:
        if rule_id not in classes:
            raise AdvisorError(
                f"pyproject.toml: [tool.advisor.rules.{rule_id}]: no such rule; "
                + suggest(rule_id, classes, "see 'advisor rules list'")
            )
    return [
        _configure(classes[rule_id], config.get(rule_id, {}))
        for rule_id in sorted(classes)
        if config.get(rule_id, {}).get("enabled", True)
    ]


@cache
def _import_bundled() -> tuple[ModuleType, ...]:
    import advisor.rules

    result = pkgutil.walk_packages(advisor.rules.__path__, "advisor.rules.")
    return tuple(importlib.import_module(item.name) for item in result if not item.ispkg)


def _iterate_modules(folder: Path | None) -> Iterator[ModuleType]:
    yield from _import_bundled()
    for point in entry_points(group=ENTRY_POINTS):
        with loading(point, "rule"):
            loaded = point.load()
        module = loaded if isinstance(loaded, ModuleType) else inspect.getmodule(loaded)
        if module is not None:
            yield module
    if folder is not None:
        yield from _import_folder(folder)


def _import_folder(folder: Path) -> Iterator[ModuleType]:
    if not folder.is_dir():
        raise AdvisorError(f"{folder}: not a folder of rules")
    files = sorted(folder.glob("*.py"))
    if not files:
        raise AdvisorError(f"{folder}: no rules in it (*.py)")
    for file in files:
        _check_rule_file(file)
        name = f"advisor_user_rules_{abs(hash(file.resolve()))}_{file.stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise AdvisorError(f"{file}: cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # the user's own code may raise anything
            raise AdvisorError(f"{file}: {type(error).__name__}: {error}") from None
        yield module


def _check_rule_file(file: Path) -> None:
    """Raise AdvisorError for a file that would block the import, or is too large for a rule."""
    try:
        with open_regular(file) as opened:
            is_too_long = os.fstat(opened.fileno()).st_size > MAX_RULE_BYTES
    except OSError as error:
        raise AdvisorError(f"{file}: cannot be read ({error.strerror or error})") from None
    if is_too_long:
        raise AdvisorError(f"{file}: larger than {MAX_RULE_BYTES >> 20} MiB, so not a rule")


def _check_rule_class(cls: type[Rule]) -> None:
    """Raise AdvisorError if the id, category or attribute types of a third-party rule are wrong.
    They are read long after the rule is loaded."""
    prefix = f"{inspect.getfile(cls)}: rule {cls.__name__}"
    if not re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", str(cls.id)) or str(cls.id).isdecimal():
        raise AdvisorError(f"{prefix}: its id must be lower-case words, such as 'slow-loader'")
    if getattr(cls, "category", None) not in get_args(Category):
        raise AdvisorError(f"{prefix}: its category must be one of {', '.join(get_args(Category))}")
    for name, example in vars(Rule).items():
        kind = next((k for k in (bool, str, float, tuple, dict) if isinstance(example, k)), None)
        if name.startswith("_") or kind is None:
            continue
        value = getattr(cls, name)
        if not isinstance(value, int | float if kind is float else kind):
            raise AdvisorError(f"{prefix}: {name} is {type(value).__name__}, not {kind.__name__}")


def _configure(cls: type[Rule], options: Mapping[str, Any]) -> Rule:
    rule = cls()
    allowed = cls.options()
    for name, value in options.items():
        if name == "enabled":
            continue
        if name in cls.factors():
            raise AdvisorError(
                f"pyproject.toml: [tool.advisor.rules.{cls.id}]: {name} belongs to the estimate of "
                "the gain and cannot be set"
            )
        if name not in allowed:
            hint = suggest(name, allowed, f"have: {', '.join(sorted(allowed)) or 'none'}")
            raise AdvisorError(
                f"pyproject.toml: [tool.advisor.rules.{cls.id}]: no option {name!r} ({hint})"
            )
        default = allowed[name]
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        is_valid = (
            isinstance(value, int | float) and not isinstance(value, bool)
            if is_number
            else isinstance(value, type(default))
        )
        if not is_valid:
            raise AdvisorError(
                f"pyproject.toml: [tool.advisor.rules.{cls.id}]: {name} must be a "
                f"{'number' if is_number else type(default).__name__}"
            )
        setattr(rule, name, value)
    return rule


def read_config(start: Path | None = None) -> dict[str, dict[str, Any]]:
    """Read ``[tool.advisor.rules]`` of the nearest ``pyproject.toml`` at or above ``start``."""
    file, rules = tool_section("rules", start)
    if not isinstance(rules, dict) or not all(isinstance(v, dict) for v in rules.values()):
        raise AdvisorError(f"{file}: [tool.advisor.rules.<id>] must be tables")
    return rules
