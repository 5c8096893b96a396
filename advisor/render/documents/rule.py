"""Documentation of a rule: its docstring, its thresholds with their sources, and how it was tested.
For ``advisor rules`` and the generator of docs/rules."""

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from advisor.core.rule import ANY_FRAMEWORK, Citation, Rule, Threshold
from advisor.core.text import count_noun
from advisor.core.trace import CUDA, JAX, TENSORFLOW
from advisor.render import document as d

CATEGORIES = {
    "input": "Input pipeline", "host": "Host and launches", "sync": "Synchronisation",
    "transfer": "Transfers", "kernel": "Kernels", "memory": "Memory", "optimizer": "Optimizer",
    "compile": "Compilation and CUDA graphs", "distributed": "Distributed", "hardware": "Hardware",
    "inference": "Inference",
}  # fmt: skip
FRAMEWORKS = {
    ANY_FRAMEWORK: ("In any language", "text"),
    CUDA: ("C++ with CUDA", "cpp"),
    TENSORFLOW: ("TensorFlow", "python"),
    JAX: ("JAX", "python"),
}
"""Keys of ``Rule.framework_advice`` with their name for readers, and the language of their
snippets."""
VALIDATION = {
    "real traces": "right on public real traces",
    "recordings": "right on recordings of programs that are slow on purpose",
    "synthetic": "only on synthetic examples: its findings say so, with less confidence",
}


NOT_PROVEN = " *"
"""Mark in the list of rules."""


class Option(NamedTuple):
    """Option of a rule: its name, built-in value, meaning and sources."""

    name: str
    value: Any
    meaning: str
    """Meaning of the value. For a plain attribute, the comment next to it."""
    sources: tuple[Citation, ...]


class OtherFrameworkAdvice(NamedTuple):
    """Advice of a rule for programs without PyTorch."""

    program: str
    """Name of the kind of program for a reader."""
    language: str
    """Language of the snippet, as Markdown names it."""
    words: str
    """The fix, and how to check that it worked, without texts common to all programs."""
    code: str


class RulePage(NamedTuple):
    """A rule's documentation by parts."""

    rule: type[Rule]
    file: str
    """Path of the rule's source in the repository."""
    paragraphs: list[str]
    """Paragraphs of the class docstring."""
    fix: str
    code: str
    verify: str
    falsified_by: str
    assumptions: list[str]
    cases: dict[str, dict[str, Any]]
    """Texts that differ by case: case -> attribute -> text."""
    inference: dict[str, Any]
    """Texts that differ for programs that do not train: attribute -> text."""
    elsewhere: list[OtherFrameworkAdvice]
    thresholds: list[Option]
    factors: list[Option]
    """Numbers of the estimate, which users cannot set."""
    fires_on: list[str]
    """Names of the examples that must produce a finding."""
    silent_on: list[str]
    """Names of the traps in which the rule must stay silent."""


def describe(rule: Rule) -> RulePage:
    """Return a rule's documentation, from its class."""
    cls = type(rule)
    examples = cls.examples()
    return RulePage(
        rule=cls,
        file=f"{cls.__module__.removeprefix('advisor.').replace('.', '/')}.py",
        paragraphs=[*cls.paragraphs(), *_explain_placeholders(cls)],
        fix=_show_placeholders(cls.fix),
        code=_show_placeholders(cls.code),
        verify=_show_placeholders(cls.verify),
        falsified_by=_show_placeholders(cls.falsified_by),
        assumptions=_show_placeholders(rule.fill_thresholds(cls.assumptions)),
        cases=_show_placeholders(_fill_cases(rule, cls.cases)),
        inference=_show_placeholders(_fill_inference_texts(rule, cls.inference)),
        elsewhere=list(_list_other_advice(cls)),
        thresholds=_list_options(cls, cls.options()),
        factors=_list_options(cls, cls.factors()),
        fires_on=[name for name, b in examples.items() if not isinstance(b, tuple)],
        silent_on=[name for name, b in examples.items() if isinstance(b, tuple)],
    )


def _fill_texts(rule: Rule, texts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: rule.fill_thresholds(text) if key == "assumptions" else text
        for key, text in texts.items()
    }


def _fill_cases(rule: Rule, cases: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: _fill_texts(rule, case) for name, case in cases.items()}


def _fill_inference_texts(rule: Rule, texts: Mapping[str, Any]) -> dict[str, Any]:
    filled = _fill_texts(rule, texts)
    if "cases" in texts:
        filled["cases"] = _fill_cases(rule, texts["cases"])
    return filled


MAX_DIGITS = 10
"""Maximum length of a chosen number, characters. Computed ones are longer."""
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_OPTIONAL = re.compile(r"(?<=\w)\{[a-z_]+\}|(?<= )\{[a-z_]+\}(?=\w)")


def _show_placeholders(texts: Any) -> Any:
    """Show placeholders in texts as values from a trace: ``<workers>``. A placeholder that touches
    a word is an optional part of the sentence and is left out."""
    if isinstance(texts, str):
        texts = _OPTIONAL.sub("", texts)
        return _PLACEHOLDER.sub(lambda match: f"<{match[1].replace('_', ' ')}>", texts)
    if isinstance(texts, Mapping):
        return {name: _show_placeholders(text) for name, text in texts.items()}
    return (
        [_show_placeholders(text) for text in texts] if isinstance(texts, list | tuple) else texts
    )


def _explain_placeholders(cls: type[Rule]) -> Iterator[str]:
    """Yield a sentence on the placeholders in a rule's texts, if there are any."""
    texts = (cls.fix, cls.code, cls.verify, cls.falsified_by, cls.cases, cls.inference)
    if match := _PLACEHOLDER.search(_OPTIONAL.sub("", repr(texts))):
        yield f"A report fills in words such as {_show_placeholders(match[0])} from your trace."


def _list_other_advice(cls: type[Rule]) -> Iterator[OtherFrameworkAdvice]:
    common = cls.framework_advice.get(ANY_FRAMEWORK)
    for framework, advice in cls.framework_advice.items():
        words = " ".join(filter(None, (advice.fix, advice.verify)))
        if common is not None and advice is not common:
            if (advice.fix, advice.code) == (common.fix, common.code):
                continue
            words = advice.fix.removeprefix(common.fix).strip()  # what is called there, alone
        yield OtherFrameworkAdvice(
            *FRAMEWORKS[framework], _show_placeholders(words), _show_placeholders(advice.code)
        )


def _list_options(cls: type[Rule], numbers: Mapping[str, Any]) -> list[Option]:
    """Return numbers of a rule with their meaning and sources, or the comment of a plain number."""
    comments, thresholds = _read_comments(cls), []
    for name, value in numbers.items():
        own = getattr(cls, name)
        is_plain = not isinstance(own, Threshold)
        meaning = comments.get(name, "") if is_plain else own.meaning
        thresholds.append(Option(name, value, meaning, () if is_plain else own.sources))
    return thresholds


def _read_comments(cls: type[Rule]) -> dict[str, str]:
    """Return the comment of each class attribute: on its line, or on the lines just above it."""
    result: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not issubclass(base, Rule) or base is Rule:
            continue
        try:
            source = textwrap.dedent(inspect.getsource(base))
            tree = ast.parse(source)
        except (OSError, TypeError, SyntaxError):  # defined where no source is kept
            continue
        remarks = _read_remarks(source)
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for node in body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else ([node.target] if isinstance(node, ast.AnnAssign) else [])
            )
            for target in targets:
                if isinstance(target, ast.Name):
                    result[target.id] = _find_remark(
                        remarks, node.lineno, node.end_lineno or node.lineno
                    )
    return result


def _read_remarks(source: str) -> dict[int, tuple[str, bool]]:
    """Return the comment of each line, and whether the line has nothing else."""
    result = {}
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row = token.start[0]
            text = token.string.lstrip("# ").rstrip()
            alone = lines[row - 1].lstrip().startswith("#")
            if not text.startswith(("fmt:", "type:", "noqa")):
                result[row] = (text, alone)
    return result


def _find_remark(remarks: dict[int, tuple[str, bool]], first: int, last: int) -> str:
    inside = [remarks[row][0] for row in range(first, last + 1) if row in remarks]
    above = []
    row = first - 1
    while row in remarks and remarks[row][1]:
        above.append(remarks[row][0])
        row -= 1
    return " ".join([*reversed(above), *inside])


def format_source(source: Citation) -> str:
    """Write a source on one line."""
    return f"{source.name} <{source.address}>" if source.address else source.name


def override_lines(page: RulePage) -> str:
    """Write the lines of pyproject.toml that change a threshold, or switch the rule off."""
    lines = [f"[tool.advisor.rules.{page.rule.id}]"]
    lines += [f"{item.name} = {to_toml(item.value)}" for item in page.thresholds[:1]]
    return "\n".join([*lines, "enabled = false  # to switch it off"])


def to_toml(value: Any) -> str:
    """Write a value in TOML. A fraction such as a third has three digits."""
    if isinstance(value, float) and len(str(value)) > MAX_DIGITS:
        value = float(f"{value:.3g}")
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else f'"{value}"'


def build(rule: Rule) -> d.Document:
    """Build the document of a rule."""
    about = describe(rule)
    category = CATEGORIES.get(about.rule.category, about.rule.category)
    paragraphs: list[d.Block] = []
    for number, paragraph in enumerate(about.paragraphs):
        paragraphs += [d.Paragraph("")] * bool(number) + _wrap_paragraph(paragraph)
    tested = [
        d.TextField("on", [VALIDATION.get(about.rule.validation, about.rule.validation)]),
        d.TextField("seen", [about.rule.validation_note]),
        d.TextField("right", ["; ".join(about.rule.found_in)]),
        d.TextField("quiet", ["; ".join(about.rule.silent_in)]),
        d.TextField("fires", ["; ".join(about.fires_on)]),
        d.TextField("silent", ["; ".join(about.silent_on)]),
    ]
    sections = [
        d.Section("Why it matters", paragraphs),
        d.Section("What to do", _build_advice(about._asdict()) if about.fix else []),
        *_build_cases(about.cases),
        d.Section(
            "Where nothing is trained",
            [*_build_advice(about.inference), *_build_cases(about.inference.get("cases", {}))],
        ),
        *(_build_other_section(advice) for advice in about.elsewhere),
        d.Section(
            "Thresholds", [line for item in about.thresholds for line in _describe_threshold(item)]
        ),
        d.Section(
            "Numbers of the estimate",
            [x for item in about.factors for x in _describe_threshold(item)],
        ),
        d.Section("How it was tested", [d.FieldList(tested)]),
        d.Section("Change it", [d.Code(override_lines(about), "toml", "", 0)], "in pyproject.toml"),
        d.Section("References", [d.Paragraph(reference) for reference in about.rule.references]),
    ]
    lead = d.Paragraph(f"{about.rule.id} · {category}", "soft", indent=0)
    return d.Document(about.rule.title, [lead, *(s for s in sections if s.blocks)], name="rule")


def _build_other_section(advice: OtherFrameworkAdvice) -> d.Section:
    code = [d.Code(advice.code, advice.language, "", 2)] if advice.code else []
    return d.Section("Without PyTorch", [d.Paragraph(advice.words), *code], advice.program)


def _describe_threshold(item: Option) -> Iterator[d.Block]:
    yield d.Paragraph(f"{item.name} = {to_toml(item.value)}", "strong")
    for line in (item.meaning, *map(format_source, item.sources)):
        if line:
            yield d.Paragraph(line, "soft", indent=6)


def _build_advice(texts: Mapping[str, Any]) -> list[d.Block]:
    """Build the blocks of fix and code, and how far to trust them."""
    blocks: list[d.Block] = []
    if texts.get("fix"):
        blocks.append(d.Paragraph(texts["fix"]))
    if texts.get("code"):
        blocks.append(d.Code(texts["code"], label="", indent=2))
    fields = [
        d.TextField("verify", [texts.get("verify", "")]),
        d.TextField("unless", [texts.get("falsified_by", "")]),
        d.TextField("assumes", ["; ".join(texts.get("assumptions", ()))]),
    ]
    filled_fields = [field for field in fields if field.parts[0]]
    return [*blocks, d.FieldList(filled_fields)] if filled_fields else blocks


def _build_cases(cases: Mapping[str, Mapping[str, Any]]) -> Iterator[d.Section]:
    for name, case in cases.items():
        blocks: list[d.Block] = [d.Paragraph(case[key]) for key in ("title", "fix") if key in case]
        if "code" in case:
            blocks.append(d.Code(case["code"], label="", indent=2))
        yield d.Section("Case", blocks, name)


def _wrap_paragraph(paragraph: str) -> list[d.Block]:
    """Rewrap prose. Lists and indented lines keep their line breaks."""
    lines = paragraph.split("\n")
    if any(line.startswith((" ", "- ", "* ")) for line in lines):
        return [
            d.Paragraph(line.strip(), indent=2 + len(line) - len(line.lstrip())) for line in lines
        ]
    return [d.Paragraph(" ".join(lines))]


def build_list(rules: list[Rule], *, disabled: set[str]) -> d.Document:
    """Build the document of all rules, by category."""
    known = list(CATEGORIES)
    by_category: dict[str, list[Rule]] = {}
    for rule in rules:
        by_category.setdefault(str(rule.category), []).append(rule)
    order = sorted(by_category, key=lambda c: known.index(c) if c in known else len(known))
    longest = max((len(rule.id) for rule in rules), default=0)
    sections = []
    for category in order:
        lines: list[d.Block] = []
        for rule in sorted(by_category[category], key=lambda rule: rule.id):
            mark = NOT_PROVEN * (rule.validation == "synthetic")
            remark = " (switched off)" if rule.id in disabled else mark
            title: d.Inline = (rule.title, d.Span(remark, "soft"))
            lines.append(d.Paragraph(title, mark=f" {rule.id}", indent=longest + 4))
        sections.append(d.Section(CATEGORIES.get(category, category), lines))
    note = (
        f"{count_noun(len(rules), 'rule')}; 'advisor rules show ID' says what one looks for and "
        f"how to change its thresholds.{NOT_PROVEN}: not proven on real traces, so its findings "
        "have less confidence."
    )
    return d.Document("", sections, name="rules", notes=[note])
