"""The base class of every rule, and the texts and thresholds that rules are made of."""

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
    from advisor.replay.ranks.study import Study
    from advisor.testing import Examples


T = TypeVar("T")
R = TypeVar("R", bound="Rule")


Per = Literal["step", "repetition", "inference", "recording", "window", "run"]
"""Unit that an amount of time, or a number of things, is of."""
VerdictRole = Literal[
    "", "memory growth", "memory state", "out of memory", "time between steps", "shared GPU"
]
"""Part of a finding at the top of a report though no gain ranks it: that memory grows, what
explains the memory in a snapshot, why a request failed, how much of the run no step takes, who else
uses the GPU."""
HostCheck = Literal[
    "", "loading data", "the loop's own code", "Python inside forward", "saving",
    "garbage collection", "debug settings", "threads", "CPU limits", "slow steps",
]  # fmt: skip
"""Checks that the verdict lists on steps that the host computes, in its order."""


class Evidence(Struct, frozen=True):
    """A measured fact behind a finding."""

    label: str
    """Name of what was measured."""
    value: float | int | str | None
    """Measured value; ``None``: not measured."""
    unit: str = ""
    """``ns``, ``bytes``, ``share`` (0 to 1), ``count``, ``GB/s``, ``FLOP/s``, or empty for text."""
    threshold: float | int | None = None
    """Limit that the value was compared with, in the same unit."""
    source: str = ""
    """Source of the threshold."""
    per: Per | None = None
    """Unit of time or work that the value is of; ``null``: as the label says."""


class Citation(NamedTuple):
    """Source of a number."""

    name: str
    """Title of what is cited, in a few words."""
    address: str = ""
    """Public address, or the file of this repository in which the number is measured or chosen."""


class FrameworkAdvice(NamedTuple):
    """Advice of a rule for a program that is not written with PyTorch."""

    fix: str
    code: str = ""
    verify: str = ""
    """Way to see that the fix worked. This, title and falsified_by: ``""`` for the rule's text."""
    title: str = ""
    falsified_by: str = ""
    terms: Mapping[str, str] = {}
    """Entries of ``Rule.terms`` that have other words in such a program."""
    amd: FrameworkAdvice | None = None
    """HIP version of the advice, with its names; ``None``: no name differs."""


class Program(NamedTuple):
    """Facts on a program that decide which words of a rule fit it."""

    framework: str | None = None
    """Framework, as in ``TraceMeta.framework``."""
    vendor: str | None = None
    """Vendor of its GPU, as in ``TraceMeta.vendor``."""
    foreign: bool = False
    """Whether it is surely not written with PyTorch, or not known to be."""
    trains: bool = True
    """Whether it has a loss and an optimizer, as far as is known."""
    engine: str | None = None
    """Inference engine: ``vllm``, ``sglang``, ``tensorrt-llm`` …; ``None``: none."""


URL_PARTS_OF_VENDOR = {"nvidia": "nvidia.com", "amd": "amd.com"}
"""Part of the address of references that only users of a vendor's GPUs need."""
PYTORCH_URL_PART = "pytorch"
"""Part of the address of references that only users of PyTorch need."""
ANY_FRAMEWORK = "any"
"""Key of ``Rule.framework_advice`` for a framework that is unknown, or has no advice of its own
there."""


class Threshold(Generic[T]):
    """A number that a rule compares a measurement with, and its sources.

    A class attribute ``min_…`` or ``max_…``; ``self.min_share`` is its value, or the user's own
    from ``[tool.advisor.rules.<id>]``, and ``Class.min_share`` the Threshold with its sources."""

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
    """A number of an estimate, and its sources: it changes how much a fix saves, not whether the
    rule fires. No user sets it. The ends of its range are ``best_<name>`` and ``worst_<name>``."""


class Rule:
    """A check that looks at an :class:`~advisor.measure.Analysis` and yields what it found.

    One rule a file, or a family that shares its check. The class docstring is the rule's
    documentation. Its first paragraph says what it looks for and why that costs time. The rest
    gives definitions, sources and traps. What is the same for every trace stands as class
    attributes; ``check`` measures and yields evidence, places and edits. A rule never computes its
    own gain and knows no other rule. When a signal it needs is missing it yields
    :class:`SkippedCheck`."""

    # -- what it is, and its texts
    id: ClassVar[str] = ""
    """Stable identifier: lower case words joined by ``-``."""
    title: ClassVar[str] = ""
    category: ClassVar[Category]
    """Category of the findings; by default that of the rule's folder."""
    fix: ClassVar[str] = ""
    """Advice: what to do. ``{name}`` in any of these texts is something of the trace, filled in by
    the finding that quotes it (``self.fix.format(name=…)``)."""
    code: ClassVar[str] = ""
    """The fix as a snippet the user can paste."""
    verify: ClassVar[str] = ""
    """Way to see that the fix worked."""
    falsified_by: ClassVar[str] = ""
    """Observation that would prove a finding wrong."""
    assumptions: ClassVar[tuple[str, ...]] = ()
    """Assumptions that the gain rests on; ``{name}`` is the value of a threshold."""
    confidence: ClassVar[float] = 0.8
    """Confidence in the cause of a finding, 0 to 1."""
    references: ClassVar[tuple[str, ...]] = ()

    # -- texts for some programs; the last two are set when it runs
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Texts for kinds of trace that need other words than those above: name of the case ->
    attribute -> its value then. See :meth:`case`."""
    inference: ClassVar[Mapping[str, Any]] = {}
    """Values of these attributes where nothing is trained; of ``cases`` only those that differ. See
    :meth:`for_program`."""
    terms: Mapping[str, str] = {}
    """Words of the summaries that differ between programs: ``self.terms["loader"]``."""
    framework_advice: ClassVar[Mapping[str, FrameworkAdvice]] = {}
    """Advice in place of the texts above, by framework (``trace.meta.framework``, or
    :data:`ANY_FRAMEWORK`). A rule without it is not run on programs that are surely not
    PyTorch's."""
    engine_advice: ClassVar[Mapping[str, FrameworkAdvice]] = {}
    """Advice in place of the texts above, by inference engine: its own switches."""
    program: Program = Program()
    """Program that the texts are chosen for; set by :meth:`for_program`."""
    advice: FrameworkAdvice | None = None
    """Entry of ``framework_advice`` for that program; ``None``: it is PyTorch's, or unknown."""

    # -- proof: where it was right, and where its numbers come from (thresholds stand beside them)
    found_in: ClassVar[tuple[str, ...]] = ()
    """Inputs in which the rule found a real case: ``traces/…``, a public trace; ``recorded/…``, a
    recording in tests/data; ``workloads/…``, a bundled program that the tests record."""
    silent_in: ClassVar[tuple[str, ...]] = ()
    """Inputs in which nothing of the kind is and the rule stayed silent; named likewise. A
    workload's is its cured variant."""
    validation: ClassVar[Validation] = "synthetic"
    """Validation level of the rule, from ``found_in``; ``synthetic``: reported as not proven."""
    validation_note: ClassVar[str] = ""
    """Note on what the rule found in those inputs."""
    sources: ClassVar[tuple[Citation, ...]] = ()
    """Sources of the numbers in the docstring that are no thresholds."""

    # -- when it runs
    training_only: ClassVar[bool] = False
    """Whether what it looks for is only there where something is trained: it is not run elsewhere,
    and its texts may speak of training."""
    across_ranks: ClassVar[bool] = False
    """Whether the rule looks at the whole run (``check_run``), not at one rank's window."""
    reads_record: ClassVar[bool] = False
    """Whether the rule reads what the recorder wrote (``Analysis.recorded``). It is not run on a
    trace alone: one line says so of all such rules. It is run when there is no trace at all."""
    auxiliary_inputs: ClassVar[tuple[AuxiliaryInput, ...]] = ()
    """Sources without a trace that the rule reads: it is run where there is one of them, with or
    without a trace or a record."""
    bundled: ClassVar[bool] = False
    """Whether it comes with the package, not from a user."""

    # -- what its finding is compared with, and where it appears
    alternatives: ClassVar[str] = ""
    """Name of the group of findings of which one fix replaces the others."""
    subject: ClassVar[str] = ""
    """Work that findings of several rules are about: a fix of one may leave another."""
    looks_at: ClassVar[Mapping[str, str]] = {}
    """Parts of the step's bar that it looks at, and from when it has a fix for each. A part is a
    class of device time, a direction of copies, or a cause of idle time; ``{name}`` is the value of
    a threshold."""
    only_without_findings: ClassVar[bool] = False
    """Whether its findings say nothing beside those that are ranked."""
    verdict_role: ClassVar[VerdictRole] = ""
    """Part of its finding in the verdict, beside the gains; empty: none."""
    host_check: ClassVar[HostCheck] = ""
    """Check that it does on steps that the host computes; empty: none that the verdict lists."""
    sampled_part: ClassVar[str] = ""
    """Part of the step (``data``, ``forward``) whose sampled Python stacks name its line, where the
    trace has no stacks; empty: none does."""
    is_python_time: ClassVar[bool] = False
    """Whether its time is spent by Python in the loop: hot lines of a Scalene pass explain it."""
    knobs: ClassVar[tuple[str, ...]] = ()
    """Knobs that ``advisor try`` may change to cure it (``advisor/tune/knobs``), best first."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "found_in" in vars(cls):
            public = any(name.startswith("traces/") for name in cls.found_in)
            cls.validation = "real traces" if public else "recordings"
        package = cls.__module__.split(".")
        cls.bundled = package[:2] == ["advisor", "rules"]
        if cls.bundled and "category" not in vars(cls):
            cls.category = cast("Category", package[2])

    def check(self, a: Analysis) -> Outcomes:
        """Yield findings, skipped checks and passed checks for one rank's window."""
        raise NotImplementedError

    def check_run(self, study: Study) -> Outcomes:
        """Yield findings for a job of several ranks, from the outliers that the shared search
        found; called only when ``across_ranks`` is set."""
        raise NotImplementedError

    def cite_ranks(self, finding: Finding, study: Study) -> Finding:
        """Return a finding of this rule with what the job's ranks show; unless overridden, as it
        is."""
        del study
        return finding

    @staticmethod
    def examples() -> Examples:
        """Return small traces by name: one alone must produce a finding of this rule. One with a
        text is a trap, in which the rule must stay silent. The text is the guard that must hold it.

        It is the name of a threshold, without which the rule would fire, or the text of the
        condition that ends the search. Or it is ``no gain``: the rule fires, without a gain."""
        raise NotImplementedError

    def for_program(self: R, program: Program) -> R:
        """Return a copy of the rule with the words that fit the program, before ``check`` makes
        texts of them: ``inference`` where nothing is trained, ``framework_advice`` where PyTorch is
        not used."""
        other = {} if program.trains else dict(self.inference)
        advice = self.advice_for(program.framework, program.vendor) if program.foreign else None
        advice = self.engine_advice.get(program.engine or "", advice)
        twin = copy.copy(self)
        if advice is not None:
            other["terms"] = {**self.terms, **advice.terms}
        if "cases" in other:
            changed = {
                name: {**self.cases.get(name, {}), **texts}
                for name, texts in other["cases"].items()
            }
            other["cases"] = {**self.cases, **changed}
        vars(twin).update(other, program=program, advice=advice)
        return twin

    def advice_for(
        self, framework: str | None, vendor: str | None = None
    ) -> FrameworkAdvice | None:
        """Return the advice for a framework that is not PyTorch; ``None``: there is none."""
        advice = self.framework_advice.get(
            framework or ANY_FRAMEWORK, self.framework_advice.get(ANY_FRAMEWORK)
        )
        return advice.amd if advice is not None and vendor == "amd" and advice.amd else advice

    def _is_of_vendor(self, link: str) -> bool:
        """Return whether a reference is not of the other vendor of GPUs."""
        vendor = self.program.vendor
        return not any(
            part in link for name, part in URL_PARTS_OF_VENDOR.items() if vendor and name != vendor
        )

    def complete(self, finding: Finding) -> Finding:
        """Return a finding with the fields that it leaves empty filled in from the rule."""
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
        """Return the fields of a finding of one of the ``cases``; ``values``: of its ``{…}``."""
        result: dict[str, Any] = {}
        for key, text in self.cases[name].items():
            if key == "assumptions":
                result[key] = self.fill_thresholds(text)
            else:
                result[key] = text.format(**values) if values and isinstance(text, str) else text
        return result

    def fill_thresholds(self, assumptions: tuple[str, ...]) -> list[str]:
        """Return assumptions with their thresholds filled in; ``{workers}`` is filled in later."""
        names = {name for each in assumptions for _, name, *_ in Formatter().parse(each) if name}
        values = {name: getattr(self, name) for name in names - {"workers"}}
        return [text.format_map(values | {"workers": "{workers}"}) for text in assumptions]

    def compare(
        self,
        label: str,
        value: float | str | None,
        limit: str,
        unit: str = "share",
        *,
        times: float = 1,
        per: Per | None = None,
    ) -> Evidence:
        """Return a measured value with the threshold that it is compared with. ``times`` converts
        the threshold's unit to ``unit``."""
        own: Threshold[Any] = getattr(type(self), limit)
        allowed = getattr(self, limit)
        if times != 1:
            allowed *= times
        return Evidence(label, value, unit, allowed, own.source_names, per)

    @classmethod
    def paragraphs(cls) -> list[str]:
        """Return the paragraphs of the class docstring, which is the rule's documentation."""
        doc = inspect.cleandoc(cls.__doc__ or "").replace("``", "`")
        return [part for part in doc.split("\n\n") if part.strip()]

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return the thresholds a user may override, with their built-in values; a plain number,
        flag or string of the class is one too."""
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
        found = cls._attributes().items()
        return {name: value.value for name, value in found if isinstance(value, Factor)}

    @classmethod
    def _attributes(cls) -> dict[str, Any]:
        """Return public attributes of the class and those above it, the highest first."""
        found: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            found |= {name: each for name, each in vars(base).items() if name[:1] != "_"}
        return found
