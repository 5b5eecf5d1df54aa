"""Answers said in plain words: names, values and strings of a patch that a brief mentions and no public text does.

A patch leaves traces that survive a paraphrase: what it calls things, the numbers and strings it sets, the functions that it changes. A
name that no sentence holds by chance (``read_timeout``, also as "read timeout of a request") counts by itself. A word that one might
(``timeout``, ``30``) counts where the text says what it is: "a parameter named timeout", "default 30".

Known is what the agent is told or can read: task texts, the base tree, and the patches' own context and removed lines, which stand for it
where it is not at hand. What stays unseen is in docs/briefs.md.
"""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Iterable
from dataclasses import dataclass

from verl_opsd.privilege.hunks import added_lines

#: Parts from which on a name said in separate words counts by itself; words in a row that count as a string of a patch.
PARTS, STRING_WORDS = 3, 4

_STRING = re.compile(r"\"\"\"|'''|\"([^\"\n\\]{2,})\"|'([^'\n\\]{2,})'|`([^`\n]{2,})`")
_COMMENT = re.compile(r"(?:^|\s)(?:#|//|/\*|\*(?=\s)).*")
_NAME = re.compile(r"\b[A-Za-z_]\w{2,}\b")
_VALUE = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.]*\w)")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
#: A function or class that a line defines.
DEFINED = re.compile(
    r"^\s*(?:pub(?:\([^)]*\))?\s+)?(?:async\s+)?(?:def|fn|func|class|struct|interface|function)\s+(?:\([^)]*\)\s*)?(\w+)"
)
#: Words of languages; as names they say nothing.
_LANGUAGE = {
    *(k.lower() for k in keyword.kwlist),
    *keyword.softkwlist,
    "self",
    "cls",
    "this",
    "args",
    "kwargs",
    "func",
    "let",
    "mut",
}

#: Words that stand beside such things in any text about work.
_GENERAL = re.compile(
    r"first|second|third|last|next|new|old|same|other|own|its|their|each|every|all|any|both|one|names?|values?|types?|options?|parameters?|arguments?|"
    r"flag|field|keys?|class|function|method|module|files?|results?|defaults?|returns?|errors?|messages?|tests?|agent|peer|path|lines?|text|items?|"
    r"note|shared|public"
)

_THING = (
    r"(?:parameter|param|argument|arg|option|flag|keyword|kwarg|field|attribute|property|method|function|class|type|variable|constant|helper|"
    r"member|key|enum|exception|decorator|struct|trait|macro|module|setting|switch|hook|fixture)s?"
)
_QUOTE = r"[\"'`\u201c\u2018]"
_VERB = r"(?:accept|take|return|raise|rename|default|define|introduce)(?:s|d|ed|ing|es)?"
_EDIT = r"(?:chang|edit|modif|extend|patch|rewrit|alter|adapt|updat|wrapp?|overrid|refactor)(?:e|es|ed|ing|y|ies|s)?"
_TENS = dict(zip(re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety"), range(20, 100, 10), strict=True))
_ONES = {
    word: n
    for n, word in enumerate(
        re.findall(
            r"\w+",
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen",
        )
    )
}
_SPELT = re.compile(rf"\b(?:({'|'.join(_TENS)})(?:[- ]({'|'.join(list(_ONES)[1:10])}))?|({'|'.join(_ONES)}))\b", re.IGNORECASE)
#: What stands before a value, with at most three words between.
_BEFORE = (
    r"\b(?:default\w*|sets?|setting|values?|limit\w*|maximum|minimum|max|min|threshold|equals?|returns?|status|code|constant|initial\w*|starts? (?:at|with|from)|"
    r"timeout|width|size|length|capacity|factor)\b(?:[^\w.\n]+[A-Za-z]\w*){0,3}[^\w.\n]+"
)
#: Of a plan, not of code.
_PLAN = r"(?!\s+(?:steps?|messages?|minutes?|lines?|commits?|items?|turns?|words?|agents?|files?|times?|pairs?|people)\b)"


@dataclass(frozen=True)
class Traces:
    """What one patch adds: names of code, values and strings; functions and classes of the base tree that it touches."""

    names: frozenset[str]
    values: frozenset[str]
    strings: frozenset[str]
    touched: frozenset[str]


def paraphrased(text: str, patches: Iterable[str], told: Iterable[str], readable: Iterable[str]) -> list[str]:
    """Mentions of what patches add or change, as they stand in ``text``, each once.

    Args:
        patches: gold or test patches. told: task texts. readable: what else the agent has read or can read.
    """
    patches, told = tuple(patches), tuple(told)
    context = tuple(_context(p) for p in patches)
    known = _Known((*told, *readable, *context))
    asked = _Known(told)
    found: dict[str, None] = {}
    said = _digits(text)
    spoken, words = _spoken(text), _words_of(text)
    heard = set(spoken.split())

    def may(name: str) -> bool:
        return name in words or heard.issuperset(_telling(name))

    for traces in map(traces_of, patches):
        for name in sorted(filter(may, traces.names)):
            if not known.has(name):
                found |= dict.fromkeys(_name_in(name, said, spoken, known))
        for name in sorted(traces.touched & words):  # what is changed, no base tree says
            if not asked.has(name):
                found |= dict.fromkeys(_touched_in(name, said))
        for value in sorted(v for v in traces.values if v.lstrip("-") in words):
            if not asked.has(value):
                found |= dict.fromkeys(_value_in(value, said))
        for string in sorted(s for s in traces.strings if heard.intersection(_spoken(s).split())):
            found |= dict.fromkeys(_string_in(string, said, spoken, known))
    return list(found)


@functools.lru_cache(maxsize=256)
def traces_of(patch: str) -> Traces:
    """See :class:`Traces`."""
    added = added_lines(patch)
    strings = {s for line in added for m in _STRING.finditer(line) if (s := next((g for g in m.groups() if g), ""))}
    code = [_COMMENT.sub("", _STRING.sub(" ", line)) for line in _without_docs(added)]
    names = {m[0] for line in code for m in _NAME.finditer(line) if m[0].lower().strip("_") not in _LANGUAGE}
    values = {m[0] for line in code for m in _VALUE.finditer(line)}
    heads = [
        line.split("@@", 2)[-1] if line.startswith("@@") else line[1:] for line in patch.split("\n") if line[:1] in ("-", "@")
    ]
    touched = {m[1] for line in heads if (m := DEFINED.match(line))}
    return Traces(
        frozenset(n.strip("_") for n in names if not n.startswith("__")),
        frozenset(values),
        frozenset(strings),
        frozenset(n for n in touched if len(n) > 3 and not n.startswith("__")),
    )


def _without_docs(lines: Iterable[str]) -> list[str]:
    """Lines outside triple-quoted text."""
    out, inside = [], False
    for line in lines:
        marks = len(re.findall(r"\"\"\"|'''", line))
        if not inside and not marks:
            out.append(line)
        inside ^= marks % 2 == 1
    return out


def _context(patch: str) -> str:
    """Lines of the base tree that a patch shows."""
    return "\n".join(line[1:] for line in patch.split("\n") if line[:1] in (" ", "-") and not line.startswith("--- "))


class _Known:
    """Texts, searched by whole words; a name also in its separate words."""

    def __init__(self, texts: Iterable[str]):
        self._texts = tuple(texts)

    def has(self, name: str) -> bool:
        """Whether a text holds the name or number as it is."""
        return any(name in _words_of(t) for t in self._texts)

    def says(self, phrase: str) -> bool:
        """Whether a text holds these small words in a row."""
        return any(f" {phrase} " in _spoken(t) for t in self._texts)


@functools.lru_cache(maxsize=8192)
def _words_of(text: str) -> frozenset[str]:
    """Words and numbers of a text, as they are written, and spelt numbers in digits."""
    return frozenset(re.findall(r"\d+\.\d+|\w+", f"{text} {_digits(text)}"))


@functools.lru_cache(maxsize=8192)
def _spoken(text: str) -> str:
    """A text's words in small letters, one blank between and around them, numbers in digits."""
    return f" {' '.join(re.findall(r'[a-z]+|[0-9]+', _digits(text).lower()))} "


def parts_of(name: str) -> list[str]:
    """``read_timeout``, ``ReadTimeout`` -> read, timeout."""
    return [p.lower() for p in _PARTS.findall(name)]


def _telling(name: str) -> list[str]:
    """The words of a name that say something: a test's without ``test``."""
    parts = parts_of(name)
    return parts[1:] if parts[:1] == ["test"] else parts


def _name_in(name: str, text: str, spoken: str, known: _Known) -> list[str]:
    parts = _telling(name)
    written = rf"(?<![\w]){re.escape(name)}(?!\w)"
    if len(parts_of(name)) > 1 and (found := re.search(written, text)):
        return [found[0]]
    phrase = r"[\s_-]+".join(map(re.escape, parts))
    if len(phrase) < 3 or known.says(" ".join(parts)) or all(map(_GENERAL.fullmatch, parts)):
        return []
    if len(parts) >= PARTS and f" {' '.join(parts)} " in spoken:
        return [" ".join(parts)]
    as_name = rf"{_QUOTE}?(?:{phrase})(?![\w-])"
    cues = (
        rf"\b{_THING}\s+(?:(?:named|called|is|be)\s+)?{as_name}",
        rf"\b(?:named|called|name it|call it)\s+{as_name}",
        rf"(?<![\w-]){phrase}[\"'`\u201d\u2019]?\s+{_THING}\b",
        rf"\b{_VERB}\s+(?:an?\s+|the\s+|its\s+)?(?:new\s+|extra\s+|optional\s+|second\s+|third\s+)?{as_name}",
        rf"{_QUOTE}{phrase}[\"'`\u201d\u2019]",
    )
    return [m[0] for cue in cues if (m := re.search(cue, text, re.IGNORECASE))][:1]


def _touched_in(name: str, text: str) -> list[str]:
    if len(parts_of(name)) > 1:
        found = re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)
        return [found[0]] if found else []
    phrase = rf"{_QUOTE}?{re.escape(name)}(?!\w)"
    cues = (rf"\b{_EDIT}\s+(?:the\s+)?(?:{_THING}\s+){phrase}", rf"\bsignature\s+of\s+(?:the\s+)?(?:{_THING}\s+)?{phrase}")
    return [m[0] for cue in cues if (m := re.search(cue, text, re.IGNORECASE))][:1]


def _digits(text: str) -> str:
    """A text with its numbers up to 99 in digits."""

    def number(m: re.Match[str]) -> str:
        return str(_ONES[m[3].lower()] if m[3] else _TENS[m[1].lower()] + _ONES[(m[2] or "zero").lower()])

    return _SPELT.sub(number, text)


def _value_in(value: str, text: str) -> list[str]:
    before = _BEFORE if len(value.lstrip("-")) > 1 else r"\bdefault\w*\b(?:[^\w.\n]+[A-Za-z]\w*){0,2}[^\w.\n]+"
    found = re.search(rf"{before}[\"'`]?(?<![\w.]){re.escape(value)}(?![\w.]*\w){_PLAN}", text, re.IGNORECASE)
    return [found[0]] if found else []


def _string_in(string: str, text: str, spoken: str, known: _Known) -> list[str]:
    words = _spoken(string).split()
    runs = (" ".join(words[i : i + STRING_WORDS]) for i in range(len(words) - STRING_WORDS + 1))
    found = [run for run in runs if f" {run} " in spoken and not known.says(run)]
    if len(words) in (1, 2, 3) and re.search(r"[A-Za-z]", string) and not known.says(" ".join(words)):
        quoted = re.search(rf"(?<!\w){_QUOTE}{re.escape(string)}[\"'`\u201d\u2019](?!\w)", text)
        found += [quoted[0]] if quoted else []
    return found[:1]
