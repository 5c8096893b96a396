"""Short labels for names: safe to show, short enough, and distinct for distinct names.

Names of kernels have hundreds of characters, most of them return types, namespaces, default
template arguments and parameter lists that a whole table shares. A label keeps the function's own
name and the words that tell it from the other names *of the same table*; what is shown nowhere else
is left out in the middle."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Final

ELLIPSIS: Final = "…"
MIN_DISTINCT_WIDTH: Final = 8
"""Minimum width at which labels of distinct names are always distinct."""
_MAX_WORDS, MAX_LETTERS = 400, 2_000
"""Maximum number of words and letters read of a name: the first three quarters and the last one."""
_MAX_COMPARED = 512
"""Maximum number of names with the same head that are compared. Others may get a number."""
MAX_TABLE_WORDS = 500_000
"""Maximum number of words in a table. Beyond it, names that are still equal get a number."""
MAX_PICKED_WORDS = 3
"""Maximum number of words picked to tell names apart. More would leave fragments of a name."""

_SAFE_TEXT = re.compile(r"[\x20-\x7e]*")
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Control characters, invisible and direction-changing ones, halves of surrogate pairs, line and
paragraph separators. They can move the cursor, or recolour, reorder or break the text."""


def clean(text: object, *, lines: bool = False) -> str:
    """Return text that is safe to show: hidden characters are written as escapes (``\\x1b``).

    ``lines`` keeps line feeds (and turns tabs into blanks): for code, not for names."""
    value = str(text)
    if _SAFE_TEXT.fullmatch(value):
        return value
    if lines:
        value = value.expandtabs(4).replace("\r\n", "\n")
        return "\n".join(clean(line) for line in value.split("\n"))
    return "".join(
        _escape(char) if unicodedata.category(char) in _HIDDEN_CATEGORIES else char
        for char in value
    )


def _escape(char: str) -> str:
    if char in "\n\t\r":
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}[char]
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


_RAW_HIDDEN = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""Hidden characters that JSON strings may contain unescaped. Some terminals execute C1 controls.
The others reorder or break the line."""


def escape_terminal_controls(text: bytes) -> str:
    """Return JSON text with escapes for characters that a terminal would interpret."""
    return _RAW_HIDDEN.sub(lambda result: f"\\u{ord(result[0]):04x}", text.decode())


def shorten(text: str, width: int) -> str:
    """Return at most ``width`` characters. ``…`` replaces the middle, and most of the head is
    kept."""
    if len(text) <= width:
        return text
    if width <= 1:
        return ELLIPSIS[:width]
    tail = (width - 1) // 3
    return f"{text[: width - 1 - tail]}{ELLIPSIS}{text[len(text) - tail :] if tail else ''}"


# -- without what says nothing ------------------------------------------------------------------

FRAME = re.compile(r"^(.+?)\((\d{1,9})\): (.*)$", re.DOTALL)
"""A Python frame, ``file(line): function``."""
_PREFIXES = (("autograd::engine::evaluate_function: ", "evaluate: "), ("nn.Module: ", ""))
_LEADING = re.compile(r"^(?:void|static|inline|__global__)\s+")
RETURN_TYPE = re.compile(r"^(?:std::)?enable_if<.{0,300}?>::type\s+")
"""Return type at the beginning of a C++ name that is a template."""
_NAMESPACES = re.compile(r"(?:\b[A-Za-z_]\w{0,60}::)+(?=[A-Za-z_~{])")
_CAST = re.compile(r"\((?:bool|char|short|int|long|unsigned(?: \w+)?|[\w:]{1,60})\)(?=-?\w)")
_CALLED = re.compile(r"::operator\(\)\s?\([^()]{0,400}\)(?: const)?")
_LAMBDA = re.compile(r"\{lambda\(([^(){}]{0,400})\)#(\d{1,6})\}")
_PARAMETERS = re.compile(r"(?<=\w)\([^(){}<>]{0,400}\)(?: const)?(?=::)")
_WRAPPER = re.compile(r"^(?:Kernel\d?|device_kernel)<([A-Za-z_]\w{7,})>$")
_MAX_TIDIED = 20_000


def tidy_name(name: str) -> str:
    """Return a name without its uninformative parts: a Python frame as ``function · file.py:12``, a
    C++ name without return type, namespaces, casts, parameters, a wrapper named ``Kernel``."""
    name = clean(name[:_MAX_TIDIED])
    for prefix, short in _PREFIXES:
        if name.startswith(prefix) and len(name) > len(prefix):
            return short + name.removeprefix(prefix)
    frame = FRAME.match(name)
    if frame is not None:
        file = re.split(r"[/\\]", frame[1])[-1]
        return f"{frame[3]} · {file}:{frame[2]}"
    text = RETURN_TYPE.sub("", _LEADING.sub("", name)).removesuffix(" [clone .kd]")
    text = text.removesuffix(".kd").replace("(anonymous namespace)::", "")
    # The parameter list of a demangled C++ name says nothing that the template arguments do not.
    if text.endswith(")") and (start := _find_parenthesis(text)) > 0 and text[start - 1] != " ":
        text = text[:start]
    if "<" in text or len(text) < len(name):
        text = _LAMBDA.sub(lambda m: f"λ{m[2]}" + (f"({m[1]})" if m[1] else ""), text)
        text = _PARAMETERS.sub("", _CALLED.sub("", _CAST.sub("", text)))
        text = _NAMESPACES.sub("", text).replace("> >", ">>").replace("> >", ">>")
        inside = _WRAPPER.match(text)
        text = inside[1] if inside is not None and inside[1] else text
    return text or name


def _find_parenthesis(name: str) -> int:
    """Return the index of the parenthesis that the last character closes, or -1."""
    depth = 0
    for index in range(len(name) - 1, -1, -1):
        depth += (name[index] == ")") - (name[index] == "(")
        if depth == 0:
            return index
    return -1


# -- labels of a set of names -------------------------------------------------------------------


def kernel_label(name: str, width: int) -> str:
    """Return the label of a single name."""
    return distinct_labels([name], width)[0]


def labels_by_name(names: Iterable[str | None], width: int) -> dict[str, str]:
    """Return the labels of :func:`distinct_labels` by name."""
    wanted = list(dict.fromkeys(name for name in names if name is not None))
    return dict(zip(wanted, distinct_labels(wanted, width), strict=True))


_ATTEMPTS = (
    (tidy_name, 1.0), (tidy_name, 0.75), (tidy_name, 0.5), (tidy_name, 0.33), (tidy_name, 0.16),
    (clean, 0.33), (clean, 0.12),
)  # fmt: skip
"""Functions that tidy a name, with the share of the width that its head may take, in order."""
_MIN_WHOLE_SHARE = 0.5
"""Minimum share of the width above which a head only counts if the distinct words fit too."""


def distinct_labels(
    names: Iterable[str | None], width: int, *, always_tidy: bool = False
) -> list[str]:
    """Return a label of at most ``width`` characters for each name of one table, in its order.

    A name that fits stays as it is (hidden characters escaped). Equal names have equal labels;
    distinct names have distinct ones, from ``MIN_DISTINCT_WIDTH`` up. ``None`` has an empty label.
    ``always_tidy``: also tidy names that fit (:func:`tidy_name`), if only their beginning may be
    visible."""
    listed = list(names)
    wanted = list(dict.fromkeys(name for name in listed if name is not None))
    labels: dict[str, str] = {}
    taken: set[str] = set()
    long: list[str] = []
    for name in wanted:
        label = tidy_name(name) if always_tidy else clean(name) if len(name) <= width else None
        if label is not None and len(label) <= width and label not in taken:
            labels[name] = label
            taken.add(label)
        else:
            long.append(name)
    unlabeled = long
    last_look: Callable[[str], str] | None = None
    texts, words = list[str](), dict[int, list[str]]()
    # first the whole head, then less of it, to make room for the differences; names that are equal
    # without namespaces or parameters differ in these
    for look, share in _ATTEMPTS:
        # a hostile table gets no second attempt
        if not unlabeled or (words and sum(map(len, words.values())) > MAX_TABLE_WORDS):
            break
        if look is not last_look:
            texts, last_look = [look(name) for name in long], look
            words = {i: _split_words(text) for i, text in enumerate(texts) if len(text) > width}
        cut_texts = dict(zip(long, _cut_texts(texts, words, width, share), strict=True))
        unlabeled = _assign_unique(unlabeled, cut_texts, labels, taken)
    number = 2
    for name in unlabeled:
        labels[name], number = _number_label(tidy_name(name), width, number, taken)
    return ["" if name is None else labels[name] for name in listed]


def _assign_unique(
    names: list[str], cut_texts: dict[str, str], labels: dict[str, str], taken: set[str]
) -> list[str]:
    """Assign labels to names whose label is unique, and return the other names."""
    count = Counter(cut_texts[name] for name in names)
    left = []
    for name in names:
        label = cut_texts[name]
        if label and count[label] == 1 and label not in taken:
            labels[name] = label
        else:
            left.append(name)
    taken.update(labels.values())
    return left


def _number_label(text: str, width: int, number: int, taken: set[str]) -> tuple[str, int]:
    """Return a label with the text's beginning and a number, and the next number. This is the last
    resort for names whose differences do not fit."""
    while True:
        mark = f"{ELLIPSIS}#{number}"
        label = (shorten(text, width - len(mark)).rstrip(ELLIPSIS) + mark)[: max(width, 0)]
        number += 1
        if label not in taken or len(mark) > width:
            taken.add(label)
            return label, number


# -- cutting ------------------------------------------------------------------------------------

_WORD = re.compile(r"[^\W_]+|_+|\s+|.", re.DOTALL)
_PART = re.compile(
    r"\d{1,6}(?:x\d{1,6})+|[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]{1,16}|[A-Z]{1,16}|\d{1,16}|.", re.DOTALL
)
MAX_WORD_LENGTH = 14
_COMMON_WORDS = frozenset(
    """at auto bool char class const detail double float half impl int internal kernel lambda long
    native short signed std struct type typename uint unsigned void false true ul device
    operator""".split()
)
_INFORMATIVE = re.compile(r"(?i)(functor|_?op|ops|policy|kernel|gemm|copy|norm|softmax|loss)$")


def _cut_texts(
    texts: list[str], words: dict[int, list[str]], width: int, share: float
) -> list[str]:
    """Cut each text to the width: its head, up to a ``share`` of the width, and words that the
    others lack. ``words``: words of the texts that are too long."""
    heads: dict[int, int] = {
        i: _count_head_words(result, int(width * share)) for i, result in words.items()
    }
    same_names: defaultdict[str, list[int]] = defaultdict(list)
    for i, result in words.items():
        same_names["".join(result[: heads[i]])].append(i)
    # a text that fits is never confused with a cut one: it has no gap
    shortened = list(texts)
    groups = (
        all_[at : at + _MAX_COMPARED]
        for all_ in same_names.values()
        for at in range(0, len(all_), _MAX_COMPARED)
    )
    for group in groups:
        picked = _pick_words([words[i][heads[i] :] for i in group], [heads[i] for i in group])
        for i, places in zip(group, picked, strict=True):
            shortened[i] = _join_label(
                words[i], heads[i], places, width, partly=share <= _MIN_WHOLE_SHARE
            )
    return shortened


def _split_words(text: str) -> list[str]:
    if len(text) > MAX_LETTERS:
        text = f"{text[: MAX_LETTERS * 3 // 4]}{ELLIPSIS}{text[-MAX_LETTERS // 4 :]}"
    result = []
    for word in _WORD.findall(text):
        # split UpperCamelCase names and digests into parts
        result += _PART.findall(word) if len(word) > MAX_WORD_LENGTH else [word]
    if len(result) <= _MAX_WORDS:
        return result
    tail = _MAX_WORDS // 4
    return [*result[: _MAX_WORDS - tail], ELLIPSIS, *result[-tail:]]


def _count_head_words(words: list[str], room: int) -> int:
    """Count the words of the head: up to the template arguments, or as many as fit."""
    size = 0
    for count, word in enumerate(words):
        size += len(word)
        if size > room or word in "<(":
            return max(count, 1)
    return len(words)


def _pick_words(rests: list[list[str]], offset: list[int]) -> list[list[int]]:
    """Find the positions of words that tell a name from others with the same head, or else of its
    most informative word. Return one list per name."""
    # the second "float" of a name is a different word from the first
    keys = []
    names_with: defaultdict[tuple[str, int], int] = defaultdict(int)
    for number, rest in enumerate(rests):
        counts: defaultdict[str, int] = defaultdict(int)
        own = []
        for word in rest:
            own.append((word, counts[word]))
            names_with[word, counts[word]] |= 1 << number
            counts[word] += 1
        keys.append(own)
    everyone = (1 << len(rests)) - 1
    result = []
    for number, own in enumerate(keys):
        others = everyone & ~(1 << number)
        places: list[int] = []
        while others and len(places) < MAX_PICKED_WORDS:
            best, best_score = -1, (0, 0)
            for at, key in enumerate(own):
                removed = (others & ~names_with[key]).bit_count()
                score = (removed, _rate_word(key[0]))
                if removed and key[0][0].isalnum() and score > best_score:
                    best, best_score = at, score
            if best < 0:
                break
            places.append(best)
            others &= names_with[own[best]]
        if not places and own:
            weights = [(_rate_word(word), -at) for at, (word, _) in enumerate(own)]
            heaviest = max(weights)
            if heaviest[0] > 1:
                places.append(-heaviest[1])
        result.append([offset[number] + at for at in places])
    return result


def _rate_word(word: str) -> int:
    """Return how informative a word is by itself, 0 to 3."""
    if not word[0].isalnum() or word.lower() in _COMMON_WORDS:
        return 0
    if word.isdigit() or len(word) < 3:
        return 1
    return 3 if _INFORMATIVE.search(word) else 2


def _join_label(
    words: list[str], head: int, places: list[int], width: int, *, partly: bool = True
) -> str:
    """Join head and picked words, and as many words around them as fit. Empty if not all picked
    words fit, unless ``partly``."""
    indices = set(range(head))
    if len(_join_words(words, indices)) > width:
        return shorten("".join(words), width)
    for place in places:
        if len(_join_words(words, indices | {place})) <= width:
            indices.add(place)
        elif not partly:
            return ""
    # then words around the picked words, at the end, and after the head
    starts = [place for place in places if place in indices]
    for index, step in [
        *((place, way) for place in starts for way in (-1, 1)),
        (len(words), -1),
        (head - 1, 1),
    ]:
        index += step
        while 0 <= index < len(words) and index not in indices:
            if len(_join_words(words, indices | {index})) > width:
                break
            indices.add(index)
            index += step
            if words[index - step] in "<>(), " and index - step not in (head,):
                break
    for index in range(head, len(words)):  # then the words after the head that fit
        if index not in indices and len(_join_words(words, indices | {index})) > width:
            break
        indices.add(index)
    if places and all(_rate_word(words[at]) < 2 for at in indices if at >= head):  # only numbers
        best = max(range(head, len(words)), key=lambda at: (_rate_word(words[at]), -at))
        indices |= {best} if len(_join_words(words, indices | {best})) <= width else set()
    return _join_words(words, indices)


def _join_words(words: list[str], indices: set[int]) -> str:
    """Join the kept words in order, with a gap in place of words that are left out."""
    parts = [""]
    before = -1
    for index in sorted(indices):
        if index != before + 1:
            parts[-1] = parts[-1].rstrip("<(, _:#")
            parts.append("")
        if parts[-1] or len(parts) == 1 or words[index] not in ">), _:":
            parts[-1] += words[index]
        before = index
    if before != len(words) - 1:
        parts[-1] = parts[-1].rstrip("<(, _:#")
        parts.append("")
    text = ELLIPSIS.join(parts)
    return re.sub(f"{ELLIPSIS}(?:{ELLIPSIS})+", ELLIPSIS, text)
