"""What a brief gives away: how much of it the student could have found out itself, and what of the answer it holds.

Public text is exempt from the search for leaks: a section that is a peer's task text word for word was given to that peer. Everything
else is searched for code, line numbers, test text, and knowledge of the collision (files, regions, signatures that both sides
touch). Words and patterns first, then the gold and test patches where they are at hand, also for what says the same in plain words
(``paraphrase``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from verl_opsd.errors import OpsdError
from verl_opsd.privilege.briefs import Brief, Section
from verl_opsd.privilege.hunks import added_lines, edits
from verl_opsd.privilege.paraphrase import DEFINED, paraphrased

#: Code tokens in a row that count as text of a patch; words in a row that count as a leak to the student.
PATCH_TOKENS, LEAK_WORDS = 8, 8
#: Characters from which on a quoted string of a patch counts by itself.
LITERAL = 10
#: What every agent is told by the harness, so that a brief may say it.
HARNESS = """git add commit push fetch pull merge --no-commit --no-ff --abort rebase checkout diff log status origin branch PR gh pr create
send_message --wait agent1 agent2 CLAIM SHA HEAD main"""

_SUFFIX = r"py|pyi|rs|go|js|jsx|ts|tsx|c|cc|cpp|h|hpp|java|rb|php|kt|swift|scala|sh|toml|cfg|ini|json|ya?ml|md|rst|txt|html|css"
_PATH = re.compile(
    rf"(?<![\w/])(?:[\w.\-]+/)*[\w.\-]*\w\.(?:{_SUFFIX})\b(?!\()"
    r"|(?<![\w/:.])(?:(?:src|lib|tests?|docs?|pkg|internal|cmd|app|crates|packages|include)/[\w./\-]*\w|(?:[A-Za-z_][\w.\-]*/){2,}(?![\w.\-]))"
    r"|\b[a-z_]\w+(?:\.[a-z_]\w+){2,}\b(?<!\.org)(?<!\.com)(?<!\.io)"  # folders; a dotted module, but no host
)
_GIT = r"(?:git|gh|send_message|CLAIM)\b"
_ARGUMENTS = r"(?:[^=;|]|(?<=\w)=(?=\w))*"
_SHELL = re.compile(rf"\s*(?:\$ )?(?:[A-Z_]+=\w+ )?{_GIT}{_ARGUMENTS}(?:(?:&&|;) {_GIT}{_ARGUMENTS})*$")
_SPAN = re.compile(r"(?:```|~~~)[^\n]*\n(.*?)(?:```|~~~)|`([^`\n]+)`", re.DOTALL)
_CODE_IN_SPAN = re.compile(
    r"=|->|::|[{}\[\];]|\b(?:def|fn|func|class|struct|impl|return|raise|import|lambda)\b|\w\(.*\)|\w+\.\w+\(|^\s*[@&*]"
)
_CODE_ANYWHERE = re.compile(
    r"^diff --git .*|^@@ -\d.*|^[+-]{3} [ab]/.*"
    r"|\b[A-Za-z_][\w.]*\(\s*[rbfu]{0,2}[\"'][^\n]*"  # a call with a literal: Regex(r"...")
    r"|\b[A-Za-z_]\w*\((?!(?:s|es|ies|d|ed|n|ing)\))[^()\n]*\)"  # any other call, but no plural: file(s)
    r"|(?<![\w\-])(?<!-c )(?![A-Z_]+=)[A-Za-z_][\w.]*(?: ?\[[^\]\n]*\])? ?(?::|[-+*/|&])?= ?"
    r"(?:[rbfu]{0,2}[\"']|[\d\[{(&*]|\w[\w.]*(?: ?[(\[{;+*/]|\.\w|[ `]*$))[^\n]*"  # an assignment of code, but no VARIABLE=value
    r"|\[[^\]\s]*\w-\w[^\]\s]*\](?:\{\d+(?:,\d*)?\}|[*+?])[^\n]*|\\[dDwWsSb][+*?{][^\n]*"  # a regular expression
    r"|\b[A-Z]\w*<[A-Z&][^<>\n]*>"  # a generic type
    r"|\b(?:pub fn|def|fn|func)\s+\w+\s*[(<:{][^\n]*|\b(?:class|struct|impl|interface|enum)\s+[A-Z]\w*\s*[(<:{][^\n]*"
    r"|\bfrom\s+[\w.]+\s+import\s+\w[^\n]*|\blambda\b[\w\s,*]*:[^\n]*|\b(?:self|this)\.\w[^\n]*|\)\s*(?:->|=>|\{)[^\n]*|\w\s*=>\s*[\w{(]+[.({][^\n]*"
    r"|^(?: {4}|\t)\s*(?:return|raise|yield)(?: \S+)?$|^(?: {4}|\t)\s*(?:if|elif|for|while|with|except)\b[^\n.]*:$\n\s+\S[^\n]*"  # an indented block
    r"|\b(?:if|else|except)\b[^\n]*:\s*(?:return|raise|yield|pass|continue|break)\b[^\n]*|\bfor \w+ in [\w.]+:[^\n]*"
    r"|\b(?:sed|perl)\s(?:-\S+\s+)*(?:-\w*i\w*|--in-place)\b[^\n`]*|\bawk\s+['\"][^\n`]*|\bgit apply\b[^\n`]*|\bpatch\s+-p\d[^\n`]*"
    r"|\b(?:cat|tee|python3?)\s*(?:>|<<|-c\b)[^\n`]*|\btee\s+[^\n`]*<<[^\n`]*|\becho\b[^\n`]*>[^\n`]*",
    re.MULTILINE,
)
#: A signature in words.
_IN_WORDS = re.compile(
    r"\b(?:add|give|introduce|insert|append|takes?|gets?)\b[^.\n]{0,60}\b(?:parameter|argument|kwarg|option|flag|field|attribute|method|function|helper|"
    r"class)\s+(?:named|called)\s+[\"'`]?\w+"
    r"|\b(?:chang|extend|alter|modify|widen)\w*\s+the\s+signature\s+of\s+(?!(?:an?|any|the|each|every|your|its|their|shared|some|what)\b)\S+"
    r"|\bdefault(?:s|ing)?(?:\s+value)?\s+(?:(?:of|to|is)\s+)?(?:\d+(?:\.\d+)?(?!\s+(?:step|message|minute|line|item|word|commit)s?\b)|None|True|False)\b",
)
_TENS = r"(?:twent|thirt|fort|fift|sixt|sevent|eight|ninet)"
_ONES = r"(?:one|two|three|four|five|six|seven|eight|nine)"
_NUMBER = (
    rf"(?:{_TENS}y(?:[- ]{_ONES})?|{_ONES}(?: hundred)?|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|a hundred)"
)
_ORDINAL = rf"(?:\d+(?:st|nd|rd|th)|{_TENS}(?:ieth|y[- ](?:first|second|third|fourth|fifth|sixth|seventh|eighth|ninth))|\w+teenth|tenth|eleventh|twelfth)"
_LINES = re.compile(
    rf"\b(?:lines?|ln)\b[.:]?\s*(?:(?:no\.?|number)\s*)?#?(?:\d+|{_NUMBER}\b)(?:\s*(?:-|\u2013|to|and|through)\s*(?:\d+|{_NUMBER}\b))?"
    rf"|\b{_ORDINAL}\s+line\b|\b(?:first|last|next)\s+\d+\s+lines\b|\b\d+\s+lines?\s+(?:down|into)\b"
    r"|\blines?\s+between\s+\d+|\b(?:head|tail)\s+-n\s*\+?\d+|\bL\d+\b|\.\w{1,5}:\d+|\bsed\s[^\n]*?['\"]?\d+(?:,\d+)?[acdips]\b|\bNR\s*==\s*\d+|^@@ -\d+.*",
    re.MULTILINE | re.IGNORECASE,
)
_TESTS = re.compile(
    r"\b(?:hidden|grading|grader'?s?|evaluator'?s?|evaluation|reference|benchmark'?s?)\s+(?:unit\s+|test\s+)?(?:tests?|suites?|outcomes?|diffs?|"
    r"solutions?|implementations?|patch(?:es)?)\b[^.\n]*|\btests?\s+(?:that\s+\w+\s+|kept\s+)?hidden\b[^.\n]*"
    r"|\btests?\s+(?:assert|expect|check that|require|must not)[^.\n]*"
    r"|\b(?:grader|evaluator|(?:an?|the|its|their|these|those|all|unit|feature'?s?)\s+(?:\w+\s+)?tests?)\s+(?:(?:will|would|should|also|only|then)\s+)*"
    r"(?:assert|expect|check|verif|requir|compar|look|want|insist)[^.\n]*|\bgold(?:en)? patch\b"
    r"|\bassert\s+\w[^\n]*(?:==| in | is )[^\n]*",
    re.IGNORECASE,
)
_STRING = re.compile(rf"\"([^\"\n]{{{LITERAL},}})\"|(?<!\w)'([^'\n]{{{LITERAL},}})'(?!\w)|`([^`\n]{{{LITERAL},}})`")

#: Typographic quotes, as an editor puts them in place of code's.
_STRAIGHT = str.maketrans("\u201c\u201d\u201e\u2018\u2019\u201a", "\"\"\"'''")
#: Kinds of findings, in the order of reports.
FINDINGS = ("answer", "code", "line_number", "test_text", "gold_text", "collision")


@dataclass(frozen=True)
class Material:
    """What a brief is compared with.

    Attributes:
        public: task texts of all agents.
        own: what this agent has been told or can read: its task text, the base tree, its observations.
        gold, tests: gold patches and hidden tests' patches of all agents.
        elsewhere: task texts of another task, which the control brief ``wrong_task`` holds: their code and paths are that task's, and only
            text of this task's patches counts in them.
    """

    public: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    gold: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One leak. ``text`` is what was found, never more than 80 characters of it."""

    kind: str
    section: str
    text: str


@dataclass(frozen=True)
class Audit:
    """What was found in one brief.

    Attributes:
        derivable: share of the brief's specifics (names, paths, numbers, literals, code) that the agent has been told or can read; 1.0
            without any specifics.
        specifics: how many there are. findings: leaks, each text once a section.
    """

    name: str
    kind: str
    hash: str
    characters: int
    derivable: float
    specifics: int
    findings: tuple[Finding, ...] = field(default=())

    @property
    def answer_free(self) -> bool:
        """Nothing of the answer was found and none is declared."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """``answer-free``, or which kinds of findings there are."""
        kinds = {f.kind for f in self.findings}
        return "answer-free" if not kinds else "leaks " + ", ".join(k for k in FINDINGS if k in kinds)


def audit(brief: Brief, material: Material) -> Audit:
    """Audits one agent's brief.

    Declared answers are findings of kind ``answer`` and are searched too. See :class:`Audit`.
    """
    findings: dict[Finding, None] = {}
    public, foreign = ({t.strip() for t in texts} for texts in (material.public, material.elsewhere))
    searched = [s for s in brief.sections if s.text.strip() not in public]
    for s in searched:
        if s.kind == "answer":
            findings[Finding("answer", s.name, str(s.answer))] = None
        looks = (
            []
            if s.text.strip() in foreign
            else [*_patterns(s.text), *_collisions(s.text, material), *_in_words(s.text, material)]
        )
        for kind, text in [*looks, *_patch_text(s.text, material)]:
            findings[Finding(kind, s.name, " ".join(text.split())[:80])] = None
    wanted = sorted({x for s in brief.sections for x in _specifics(s.text)})
    told = f"{HARNESS}\n" + "\n".join(material.own)
    derivable = sum(x in told for x in wanted) / len(wanted) if wanted else 1.0
    ordered = sorted(findings, key=lambda f: FINDINGS.index(f.kind))
    return Audit(brief.name, brief.kind, brief.hash, len(brief.text), derivable, len(wanted), tuple(ordered))


def require_answer_free(brief: Brief, found: Audit, whose: str) -> None:
    """Refuses a brief that holds more than its declared kind says, unless answers are allowed.

    Raises:
        OpsdError: findings without ``allow_answer``.
    """
    if found.findings and not brief.allow_answer:
        counted = {k: sum(f.kind == k for f in found.findings) for k in FINDINGS}
        raise OpsdError(
            f"brief {brief.name!r} of {whose}, declared {brief.kind}: {found.verdict} "
            f"({', '.join(f'{n} {k}' for k, n in counted.items() if n)})",
            "a brief without allow_answer holds nothing of the answer: no code, lines, test text or knowledge of the collision",
            "`opsd briefs audit --reveal` names the text; rewrite it, or set opsd.brief.allow_answer=true to distil from answers",
        )


def distinct_texts(briefs: Iterable[Brief]) -> int:
    """Different texts among briefs of many tasks: 2 for a general procedure with two sides, one an agent for answers."""
    return len({b.text for b in briefs})


def _patterns(text: str) -> list[tuple[str, str]]:
    text = text.translate(_STRAIGHT)
    found = [("line_number", m[0]) for m in _LINES.finditer(text)]
    found += [("test_text", m[0]) for m in _TESTS.finditer(text)]
    found += [("code", m[0]) for look in (_CODE_ANYWHERE, _IN_WORDS) for m in look.finditer(text)]
    for span in _SPAN.finditer(text):
        for line in (span[1] if span[1] is not None else span[2]).splitlines():
            if line.strip() and not _SHELL.match(line) and _CODE_IN_SPAN.search(line):
                found.append(("code", line))
    return found


def _collisions(text: str, material: Material) -> list[tuple[str, str]]:
    """Files that the agent's own texts don't name; symbols that several gold patches change or add."""
    own_task = "\n".join(t for t in material.public if t in material.own)
    found = [("collision", m[0]) for m in _PATH.finditer(text) if m[0] not in own_task]
    for path in {f for patch in (*material.gold, *material.tests) for f in edits(patch)}:
        stem, _, suffix = path.rpartition("/")[2].partition(".")
        word = re.escape(stem)
        said = re.search(
            rf"(?<![\w/]){word}\s+(?:dot\s+{re.escape(suffix)}|module|file|source|script)\b|\b(?:module|file|script)\s+(?:(?:named|called)\s+)?{word}\b",
            text,
        )
        found += [("collision", said[0])] if stem and said and not re.search(rf"\b{word}\b", own_task) else []
    if len(material.gold) > 1:
        files = [edits(patch).keys() for patch in material.gold]
        shared = {f for i, names in enumerate(files) for f in names if any(f in other for other in files[:i] + files[i + 1 :])}
        symbols = [_symbols(patch) for patch in material.gold]
        touched = {
            n for i, names in enumerate(symbols) for n in names if any(n in other for other in symbols[:i] + symbols[i + 1 :])
        }
        names = shared | {n for n in touched if len(n) > 3 and not re.search(rf"\b{re.escape(n)}\b", own_task)}
        found += [
            ("collision", n) for n in sorted(names) if re.search(rf"(?<![\w/]){re.escape(n)}\b", text) and n not in own_task
        ]
    return found


def _symbols(patch: str) -> frozenset[str]:
    """Functions and classes whose definition a patch touches, hunk headers included."""
    lines = [line.split("@@", 2)[-1] if line.startswith("@@") else line[1:] for line in patch.split("\n") if line[:1] in "+-@"]
    return frozenset(m[1] for line in lines if (m := DEFINED.match(line)))


def _patch_text(text: str, material: Material) -> list[tuple[str, str]]:
    """Runs of tokens, quoted strings and names that patches add, and that neither a task text nor the agent's own text holds."""
    mine, words = _grams(text), set(re.findall(r"\w+", text))
    quoted = _literals(text)
    found: list[tuple[str, str]] = []
    for kind, patches in (("test_text", material.tests), ("gold_text", material.gold)):
        hits = {g for patch in patches for g in _patch_grams(patch) & mine}
        strings = {s for patch in patches for s in _literals("\n".join(added_lines(patch))) if s in text or s in quoted}
        strings |= {n for patch in patches for n in _new_names(patch) & words}
        if hits or strings:
            known = (*material.public, *material.own)
            hits = {g for g in hits if not any(g in _grams(t) for t in known)}
            strings = {s for s in strings if not any(s in t for t in known)}
        found += [(kind, " ".join(g)) for g in sorted(hits)] + [(kind, s) for s in sorted(strings)]
    return found


def _in_words(text: str, material: Material) -> list[tuple[str, str]]:
    """What patches add or change, said in plain words."""
    sources = (("test_text", material.tests), ("gold_text", material.gold))
    return [
        (kind, said)
        for kind, patches in sources
        for said in paraphrased(text, patches, material.public, (HARNESS, *material.own))
    ]


def _new_names(patch: str) -> set[str]:
    """Functions and classes that a patch defines, of those whose names can't be a word of a sentence."""
    names = (m[1] for line in added_lines(patch) if (m := DEFINED.match(line)))
    return {n for n in names if re.search(r"\w_\w|[a-z\d][A-Z]|\d", n) and not n.startswith("__")}


@functools.lru_cache(maxsize=4096)
def _grams(text: str) -> frozenset[tuple[str, ...]]:
    tokens = re.findall(r"\w+|[^\w\s]", text)
    return frozenset(tuple(tokens[i : i + PATCH_TOKENS]) for i in range(len(tokens) - PATCH_TOKENS + 1))


def _patch_grams(patch: str) -> frozenset[tuple[str, ...]]:
    """Of each run of added lines."""
    return _grams("\n".join(added_lines(patch)))


def _literals(text: str) -> frozenset[str]:
    return frozenset(next(g for g in m.groups() if g is not None) for m in _STRING.finditer(text))


def _specifics(text: str) -> set[str]:
    """What a text says in particular: paths, code spans but commands of Git and messages, numbers of three digits and more, names."""
    lines = (part.strip() for m in _SPAN.finditer(text) for part in (m[1] or m[2] or "").splitlines())
    spans = {line for line in lines if line and not _SHELL.match(line)}
    names = re.findall(r"\b(?:[a-z]+_\w+|\w+\.\w+\(|[a-z]+[A-Z]\w+|[A-Z][a-z]+[A-Z]\w+|\w+::\w+)\b", text)
    return (
        spans
        | set(_PATH.findall(text))
        | set(names) - set(HARNESS.split())
        | set(re.findall(r"(?<![\w.])\d{3,}(?![\w.])", text))
    )


def student_leak(
    brief: Brief, student_texts: Iterable[str], kinds: Iterable[str] = ("scope", "guidance", "answer")
) -> list[str]:
    """Private text of a brief that the student has seen.

    Returns:
        every run of 8 words (case and punctuation ignored) of a private section of these kinds that occurs in one of the texts, in the
        brief's order, each once. A section shorter than 8 words counts as one run.
    """
    kinds = set(kinds)
    sections = [s for s in brief.sections if s.private and s.kind in kinds]
    return _runs_seen(sections, student_texts)


def _runs_seen(sections: Iterable[Section], texts: Iterable[str]) -> list[str]:
    wanted: dict[str, None] = {}
    for section in sections:
        words = _words(section.text)
        size = min(LEAK_WORDS, len(words))
        wanted |= dict.fromkeys(" ".join(words[i : i + size]) for i in range(len(words) - size + 1) if size)
    seen = [f" {' '.join(_words(text))} " for text in texts]
    return [run for run in wanted if any(f" {run} " in text for text in seen)]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def require_unseen(brief: Brief, prompt: str, whose: str, told: Iterable[str] = ()) -> None:
    """Refuses a trajectory whose first prompt already holds text of the brief's answer: there the student would train on it.

    Args:
        prompt: what the student read before its first reply.
        told: public texts that belong in it. A task text may quote lines of its own solution; what it says is no leak.

    Raises:
        OpsdError: a run of 8 words of an answer section stands in it.
    """
    public = set(student_leak(brief, told, kinds=("answer",)))
    runs = [run for run in student_leak(brief, [prompt], kinds=("answer",)) if run not in public]
    if runs:
        raise OpsdError(
            f"{whose}: {len(runs)} runs of {LEAK_WORDS} words of brief {brief.name!r}'s answer stand in the student's own prompt",
            "an answer is in the teacher's view only, never in student-visible tokens",
            "collect without the answer in the actor's prompt, or strip it by index (privilege.hints.strip_hint)",
        )


def gold_in_replies(patches: Mapping[str, str], replies: Iterable[str], known: Iterable[str] = ()) -> list[str]:
    """Runs of 8 code tokens that gold patches add and replies hold: what a reply copied from a hint.

    Args:
        known: texts whose runs don't count (task texts, the base tree).
    """
    gold = {g for p in patches.values() for g in _patch_grams(p)}
    gold -= {g for text in known for g in _grams(text)}
    return [" ".join(g) for g in sorted({g for text in replies for g in _grams(text)} & gold)]
