"""The base class of all rules, with the types of their texts and thresholds."""

from __future__ import annotations

import copy
import inspect
from string import Formatter
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    TypeVar,
    cast,
    overload,
)

from msgspec import Struct
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from advisor.core.auxiliary_inputs import AuxiliaryInput
    from advisor.core.finding import Category, Finding, Outcomes, Validation
    from advisor.measure import Analysis
    from advisor.replay.ranks.rank_comparison import RankComparison
    from advisor.testing import Examples


T = TypeVar("T")
R = TypeVar("R", bound="Rule")


Per = Literal["step", "repetition", "inference", "recording", "window", "run"]
"""Unit that an amount of time, or a number of things, refers to."""
VerdictRole = Literal[
    "", "memory growth", "memory state", "out of memory", "time between steps", "shared GPU"
]
"""Role of an unranked finding in the verdict: it says that memory grows, what explains the memory
in a snapshot, why a request failed, how much of the run is outside steps, or who else uses the
GPU."""
HostCheck = Literal[
    "", "loading data", "the loop's own code", "Python inside forward", "saving",
    "garbage collection", "debug settings", "threads", "CPU limits", "page faults",
    "slow steps",
]  # fmt: skip
"""Checks that the verdict lists for steps computed by the host, in its order."""


class Evidence(Struct, frozen=True):
    """A measured fact behind a finding."""

    label: str
    """Name of the measured quantity."""
    value: float | int | str | None
    """Measured value, or ``None`` if not measured."""
    unit: str = ""
    """``ns``, ``bytes``, ``share`` (0 to 1), ``count``, ``GB/s``, ``FLOP/s``, or empty for text."""
    threshold: float | int | None = None
    """Limit that the value is compared with, in the same unit."""
    source: str = ""
    """Source of the threshold."""
    per: Per | None = None
    """Unit of time or work that the value refers to, or ``null`` if the label says it."""


class Citation(NamedTuple):
    """Source of a number."""

    name: str
    """Title of the cited source, in a few words."""
    address: str = ""
    """Public address, or the file of this repository in which the number is measured or chosen."""


class FrameworkAdvice(NamedTuple):
    """Advice of a rule for a program that is not written with PyTorch."""

    fix: str
    code: str = ""
    verify: str = ""
    """Way to check that the fix worked. ``""`` here, in title or falsified_by keeps the rule's
    text."""
    title: str = ""
    falsified_by: str = ""
    terms: Mapping[str, str] = {}
    """Entries of ``Rule.terms`` with other words for the program."""
    amd: FrameworkAdvice | None = None
    """HIP version of the advice, with HIP's names, or ``None`` if no name differs."""


class Program(NamedTuple):
    """Facts about a program that determine a rule's texts."""

    framework: str | None = None
    """Framework, as in ``TraceMeta.framework``."""
    vendor: str | None = None
    """Vendor of its GPU, as in ``TraceMeta.vendor``."""
    foreign: bool = False
    """Whether the program is not, or not known to be, written with PyTorch."""
    trains: bool = True
    """Whether it has a loss and an optimizer, as far as known."""
    engine: str | None = None
    """Inference engine: ``vllm``, ``sglang``, ``tensorrt-llm`` …, or ``None`` if there is none."""


URL_PARTS_OF_VENDOR = {"nvidia": "nvidia.com", "amd": "amd.com"}
"""URL part of references for users of a vendor's GPUs only."""
PYTORCH_URL_PART = "pytorch"
"""URL part of references for users of PyTorch only."""
ANY_FRAMEWORK = "any"
"""Key of ``Rule.framework_advice`` for an unknown framework, or one without its own advice."""


class Threshold(Generic[T]):
    """A number that a rule compares a measurement with, and its sources.

    It is a class attribute ``min_…`` or ``max_…``. ``self.min_share`` is its value, or the user's
    value from ``[tool.advisor.rules.<id>]``. ``Class.min_share`` is the Threshold itself."""

    def __init__(self, value: T, meaning: str, *sources: Citation) -> None:
        self.value = value
        self.meaning = meaning
        """Description of the number, with its unit."""
        self.sources = sources

    @overload
    def __get__(self, rule: None, owner: type) -> Threshold[T]: ...
    @overload
    def __get__(self, rule: object, owner: type) -> T: ...
    def __get__(self, rule: object | None, owner: type) -> Threshold[T] | T:
        return self if rule is None else self.value

    @property
    def source_names(self) -> str:
        """Names of the sources, joined by commas, as evidence cites them."""
        return ", ".join(source.name for source in self.sources)


class Factor(Threshold[T]):
    """A number in an estimate, with its sources. It changes how much a fix saves, not whether the
    rule fires. Users cannot set it. The ends of its range are ``best_<name>`` and
    ``worst_<name>``."""


class Rule:
    """A check that inspects an :class:`~advisor.measure.Analysis` and yields its outcomes.

    A file contains one rule, or a group that shares its check. The class docstring is the rule's
    documentation. Its first paragraph says what the rule looks for and why that costs time. The
    others give definitions, sources and traps. Texts that are the same for every trace are class
    attributes. ``check`` measures and yields evidence, places and edits. A rule never computes its
    own gain and does not know other rules. If a signal is missing, it yields
    :class:`SkippedCheck`."""

    # -- what it is, and its texts
    id: ClassVar[str] = ""
    """Stable identifier: lower-case words joined by ``-``."""
    title: ClassVar[str] = ""
    category: ClassVar[Category]
    """Category of the findings. Default: the name of the rule's folder."""
    fix: ClassVar[str] = ""
    """Advice: what to do. ``{name}`` in any of these texts stands for a value from the trace. The
    finding fills it in (``self.fix.format(name=…)``)."""
    code: ClassVar[str] = ""
    """The fix as a snippet the user can paste."""
    verify: ClassVar[str] = ""
    """Way to see that the fix worked."""
    falsified_by: ClassVar[str] = ""
    """Observation that would prove a finding wrong."""
    assumptions: ClassVar[tuple[str, ...]] = ()
    """Assumptions behind the gain. ``{name}`` is the value of a threshold."""
    confidence: ClassVar[float] = 0.8
    """Confidence in the cause of a finding, 0 to 1."""
    references: ClassVar[tuple[str, ...]] = ()

    # -- texts for some programs; the last two are set when it runs
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Texts for kinds of trace that need other words: name of the case -> attribute -> its value.
    See :meth:`case`."""
    inference: ClassVar[Mapping[str, Any]] = {}
    """Values of these attributes for programs that do not train, with only those ``cases`` that
    differ. See :meth:`for_program`."""
    terms: Mapping[str, str] = {}
    """Words in summaries that differ between programs: ``self.terms["loader"]``."""
    framework_advice: ClassVar[Mapping[str, FrameworkAdvice]] = {}
    """Advice in place of the texts above, by framework (``trace.meta.framework``, or
    :data:`ANY_FRAMEWORK`). A rule without it is not run on programs that certainly do not use
    PyTorch."""
    engine_advice: ClassVar[Mapping[str, FrameworkAdvice]] = {}
    """Advice in place of the texts above, by inference engine, with the engine's own switches."""
    program: Program = Program()
    """Program for which the texts are chosen. Set by :meth:`for_program`."""
    advice: FrameworkAdvice | None = None
    """Entry of ``framework_advice`` for the program, or ``None`` for PyTorch or an unknown one."""

    # -- proof: where it was right, and where its numbers come from (next to the thresholds)
    found_in: ClassVar[tuple[str, ...]] = ()
    """Inputs in which the rule found a real case: ``traces/…`` for public traces, ``recorded/…``
    for recordings in tests/data, ``workloads/…`` for bundled programs that the tests record."""
    silent_in: ClassVar[tuple[str, ...]] = ()
    """Inputs without the bottleneck, in which the rule stayed silent, named as in ``found_in``. For
    a workload, this is its cured variant. The ``.cured`` twins of recordings in ``found_in`` are
    added."""
    validation: ClassVar[Validation] = "synthetic"
    """Validation level of the rule, from ``found_in``. ``synthetic`` is reported as not proven."""
    validation_note: ClassVar[str] = ""
    """Note on what the rule found in the inputs of ``found_in``."""
    sources: ClassVar[tuple[Citation, ...]] = ()
    """Sources of numbers in the docstring that are not thresholds."""

    # -- when it runs
    training_only: ClassVar[bool] = False
    """Whether the bottleneck only occurs in training. The rule is then not run on other programs,
    and its texts may mention training."""
    across_ranks: ClassVar[bool] = False
    """Whether the rule looks at the whole run (``check_run``) instead of one rank's window."""
    reads_record: ClassVar[bool] = False
    """Whether the rule reads the recorder's data (``Analysis.run_steps``). It is then run without a
    trace, but not on a trace alone. One line lists the rules that were not run."""
    needs_shapes: ClassVar[bool] = False
    """Whether the rule compares the shapes of operators' inputs. It is then not run where none are
    recorded. One line lists the rules that were not run."""
    auxiliary_inputs: ClassVar[tuple[AuxiliaryInput, ...]] = ()
    """Auxiliary inputs that the rule reads. It is run if there is one of them, with or without a
    trace or a record."""
    bundled: ClassVar[bool] = False
    """Whether the rule is part of the package, not a user's."""

    # -- what its finding is compared with, and where it appears
    alternatives: ClassVar[str] = ""
    """Name of a group of findings in which one fix replaces the others."""
    subject: ClassVar[str] = ""
    """Work that findings of several rules are about. The fix of one may not fix another."""
    looks_at: ClassVar[Mapping[str, str]] = {}
    """Parts of the step's bar that the rule looks at, each with the condition for a fix. A part is
    a class of device time, a direction of copies, or a cause of idle time. ``{name}`` is the value
    of a threshold."""
    only_without_findings: ClassVar[bool] = False
    """Whether its findings are only useful without ranked findings."""
    verdict_role: ClassVar[VerdictRole] = ""
    """Role of its finding in the verdict, in addition to gains. Empty if there is none."""
    host_check: ClassVar[HostCheck] = ""
    """Name in the verdict of its check of steps computed by the host. Empty if not listed."""
    sampled_part: ClassVar[str] = ""
    """Part of the step (``data``, ``forward``) whose sampled Python stacks give its line, if the
    trace has no stacks. Empty if there is none."""
    is_python_time: ClassVar[bool] = False
    """Whether its time is Python in the loop, so that hot lines of a Scalene pass explain it."""
    knobs: ClassVar[tuple[str, ...]] = ()
    """Knobs that ``advisor try`` may change as a fix (``advisor/tune/knobs``), best first."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "found_in" in vars(cls):
            public = any(name.startswith("traces/") for name in cls.found_in)
            cls.validation = "real traces" if public else "recordings"
            cures = (f"{name[:-5]}.cured" for name in cls.found_in if name.endswith(".slow"))
            cures = (name for name in cures if name not in cls.found_in)
            cls.silent_in = tuple(dict.fromkeys((*cures, *cls.silent_in)))
        package = cls.__module__.split(".")
        cls.bundled = package[:2] == ["advisor", "rules"]
        if cls.bundled and "category" not in vars(cls):
            cls.category = cast("Category", package[2])

    def check(self, a: Analysis) -> Outcomes:
        """Yield findings, skipped checks and passed checks for one rank's window."""
        raise NotImplementedError

    def check_run(self, comparison: RankComparison) -> Outcomes:
        """Yield findings for a job of several ranks, from the outliers of the shared search. Only
        called if ``across_ranks`` is set."""
        raise NotImplementedError

    def cite_ranks(self, finding: Finding, comparison: RankComparison) -> Finding:
        """Return a finding of this rule, with evidence from the job's ranks if overridden."""
        del comparison
        return finding

    @staticmethod
    def examples() -> Examples:
        """Return small traces by name. A trace alone must produce a finding of this rule. A trace
        with a text is a trap, in which the rule must stay silent. The text is the guard that must
        stop it. It is the name of a threshold, without which the rule would fire, or the text of
        the condition that ends the search. ``no gain``: the rule fires, but without a gain."""
        raise NotImplementedError

    def for_program(self: R, program: Program) -> R:
        """Return a copy of the rule with texts for the program, before ``check`` uses them:
        ``inference`` for programs that do not train, ``framework_advice`` for programs without
        PyTorch."""
        changes = {} if program.trains else dict(self.inference)
        advice = self.advice_for(program.framework, program.vendor) if program.foreign else None
        advice = self.engine_advice.get(program.engine or "", advice)
        result = copy.copy(self)
        if advice is not None:
            changes["terms"] = {**self.terms, **advice.terms}
        if "cases" in changes:
            cases = {
                name: {**self.cases.get(name, {}), **texts}
                for name, texts in changes["cases"].items()
            }
            changes["cases"] = {**self.cases, **cases}
        vars(result).update(changes, program=program, advice=advice)
        return result

    def advice_for(
        self, framework: str | None, vendor: str | None = None
    ) -> FrameworkAdvice | None:
        """Return the advice for a framework other than PyTorch, or ``None`` if there is none."""
        advice = self.framework_advice.get(
            framework or ANY_FRAMEWORK, self.framework_advice.get(ANY_FRAMEWORK)
        )
        return advice.amd if advice is not None and vendor == "amd" and advice.amd else advice

    def _is_of_vendor(self, link: str) -> bool:
        """Return whether a reference is not for another vendor's GPUs."""
        vendor = self.program.vendor
        return not any(
            part in link for name, part in URL_PARTS_OF_VENDOR.items() if vendor and name != vendor
        )

    def complete(self, finding: Finding) -> Finding:
        """Return a finding with its empty fields filled in from the rule."""
        advice = self.advice
        if advice is not None:
            finding = replace(
                finding,
                fix=advice.fix,
                code=advice.code,
                verify=advice.verify or finding.verify,
                title=advice.title or finding.title,
                falsified_by=advice.falsified_by or finding.falsified_by,
            )
        return replace(
            finding,
            rule=self.id,
            category=self.category,
            validation=self.validation,
            references=[
                link
                for link in finding.references or self.references
                if (advice is None or PYTORCH_URL_PART not in link) and self._is_of_vendor(link)
            ],
            title=finding.title or self.title,
            fix=finding.fix or self.fix,
            code=finding.code or ("" if advice is not None else self.code),
            verify=finding.verify or self.verify,
            falsified_by=finding.falsified_by or self.falsified_by,
            assumptions=finding.assumptions or self.fill_thresholds(self.assumptions),
            confidence=finding.confidence or self.confidence,
            alternatives=finding.alternatives or self.alternatives,
            subject=self.subject,
        )

    def case(self, name: str, **values: object) -> dict[str, Any]:
        """Return the fields of a finding for one of the ``cases``. ``values`` fill in its
        ``{…}``."""
        result: dict[str, Any] = {}
        for key, text in self.cases[name].items():
            if key == "assumptions":
                result[key] = self.fill_thresholds(text)
            else:
                result[key] = text.format(**values) if values and isinstance(text, str) else text
        return result

    def fill_thresholds(self, assumptions: tuple[str, ...]) -> list[str]:
        """Return assumptions with their thresholds filled in. ``{workers}`` is filled in later."""
        names = {name for each in assumptions for _, name, *_ in Formatter().parse(each) if name}
        values = {name: getattr(self, name) for name in names - {"workers"}}
        return [text.format_map(values | {"workers": "{workers}"}) for text in assumptions]

    def compare(
        self,
        label: str,
        value: float | str | None,
        threshold: str,
        unit: str = "share",
        *,
        times: float = 1,
        per: Per | None = None,
    ) -> Evidence:
        """Return a measured value with its threshold. ``times`` converts the threshold's unit to
        ``unit``."""
        declared: Threshold[Any] = getattr(type(self), threshold)
        allowed = getattr(self, threshold)
        if times != 1:
            allowed *= times
        return Evidence(label, value, unit, allowed, declared.source_names, per)

    def range_of(self, factor: str) -> tuple[float, float, float]:
        """Return a factor's range: expected, at best, at worst."""
        return (
            getattr(self, factor),
            getattr(self, f"best_{factor}"),
            getattr(self, f"worst_{factor}"),
        )

    def compare_share(
        self, a: Analysis, label: str, ns: float, threshold: str = "min_share"
    ) -> Evidence:
        """Return the share of the analysed window that ``ns`` take, with its threshold."""
        return self.compare(f"{label}, share", ns / max(a.span_ns, 1), threshold, per=a.per)

    @classmethod
    def paragraphs(cls) -> list[str]:
        """Return the paragraphs of the class docstring, which is the rule's documentation."""
        doc = inspect.cleandoc(cls.__doc__ or "").replace("``", "`")
        return [part for part in doc.split("\n\n") if part.strip()]

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return the thresholds that a user may override, with their defaults. Plain numbers, flags
        and strings of the class count too."""
        reserved = {*Rule.__dict__, *Rule.__annotations__}
        result: dict[str, Any] = {}
        for name, value in cls._attributes().items():
            if isinstance(value, Threshold) and not isinstance(value, Factor):
                result[name] = value.value
            elif name not in reserved and isinstance(value, bool | int | float | str):
                result[name] = value
        return result

    @classmethod
    def factors(cls) -> dict[str, Any]:
        """Return the numbers of the rule's estimates, by name."""
        attributes = cls._attributes().items()
        return {name: value.value for name, value in attributes if isinstance(value, Factor)}

    @classmethod
    def _attributes(cls) -> dict[str, Any]:
        """Return public attributes of the class and its base classes, base classes first."""
        attributes: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            attributes |= {name: each for name, each in vars(base).items() if name[:1] != "_"}
        return attributes
