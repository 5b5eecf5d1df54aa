"""Every regular expression that a behaviour metric rests on, under one version. A change of any of them is a new version.

Patterns of :data:`LABELS` are matched by Arrow (RE2) on one segment of a shell command (``actions.segments``); the others by ``re``.
"""

from __future__ import annotations

import re
from typing import Final

VERSION: Final = "2"

#: Words that may stand before a command's own name: assignments, wrappers, shell keywords.
_BEFORE: Final = r"^\s*(?:(?:\w+=\S*|sudo|time|command|env|exec|nohup|then|do|else|if|while|timeout(?:\s+-\S+)*\s+\S+|xargs(?:\s+-\S+)*)\s+|[({!]\s*)*"
_PATH: Final = r"(?:\S*/)?"
_GIT: Final = _BEFORE + _PATH + r"git(?:\s+(?:-[cC]\s+\S+|--no-pager))*\s+"

#: Label -> what a segment with this label looks like; a command may have several labels.
LABELS: Final = {
    "coordinate": _BEFORE + r"send_message\b",
    "git_publish": f"(?:{_GIT}(?:push|tag)\\b)|(?:{_BEFORE}{_PATH}gh\\s+pr\\s+create\\b)",
    "git_inspect": f"(?:{_GIT}(?:(?:status|diff|log|show|fetch|branch|merge|merge-tree|ls-remote|rev-parse|blame)\\b|stash\\s+list\\b))"
    f"|(?:{_BEFORE}{_PATH}gh\\s+pr\\s+(?:list|view|diff)\\b)",
    "test": _BEFORE
    + r"(?:(?:npx|uv\s+run|poetry\s+run|bash|sh)\s+)?"
    + _PATH
    + r"(?:(?:pytest|py\.test|tox|npm|pnpm|jest|vitest)\b|runner\.sh|python[\d.]*\s+(?:-\w+\s+)*-m\s+(?:pytest|unittest)\b"
    r"|go\s+test\b|cargo\s+(?:test|check|build)\b)",
    "write": f"(?:{_BEFORE}{_PATH}(?:sed\\s+(?:-\\w+\\s+)*-\\w*i|tee\\b|patch\\b|apply_patch\\b|ed\\b|perl\\s+(?:-\\w+\\s+)*-\\w*i"
    r"|python[\d.]*\s.*<<OPENS_FILES))"
    f"|(?:{_GIT}apply\\b)"
    r"|(?:[^-=<>&\d]>{1,2}\s*[^\s>&])|(?:^>{1,2}\s*\S)",
    "explore": _BEFORE + _PATH + r"(?:(?:cat|head|tail|nl|grep|rg|find|ls|tree|wc|awk)\b|sed\s+(?:-\w+\s+)*-\w*n)",
}

#: Order of the labels in tables; ``other`` is a command without any.
ACTIONS: Final = (*LABELS, "other")

#: A program that opens files for writing, as the body of a heredoc.
OPENS_FILES: Final = re.compile(r"open\([^)]*['\"][wax]b?\+?['\"]|\.write_(?:text|bytes)\(|fileinput\b|shutil\.(?:copy|move)")

INBOX: Final = re.compile(r"\[Message from (\w+)(?: — .*?)?\]: ", re.DOTALL)
REPLY: Final = re.compile(r"\[Reply from (\w+)\]: ")

#: The harness' refusal of a command whose sends it can't read; nothing of it is sent.
UNPARSED: Final = "could not parse that call"
#: What the harness says of each send, in the order of the calls.
STATUS: Final = re.compile(
    r"(?P<delivered>Message sent to \w+)|(?P<peer_gone>NOT delivered)|(?P<rejected>could not parse that call|there is no colleague)"
)

DIVISION: Final = re.compile(
    r"\b(I('ll| will| am|'m)|I take|my (part|feature|side)|you (take|handle|own|keep)|leave .{0,40} to (me|you)"
    r"|own(er|s|ing)?|claim(ing)?|split|divide|responsible)\b",
    re.IGNORECASE,
)
#: The peer's half of a division: a sentence with this claims for the one who reads it.
YOURS: Final = re.compile(r"\byou (take|handle|own|keep)|leave .{0,40} to you\b", re.IGNORECASE)
PROTOCOL: Final = re.compile(r"^\W*(intent|approach)\s*:", re.IGNORECASE | re.MULTILINE)
CLAIM: Final = re.compile(r"\bCLAIM\b")
ITEM: Final = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+\S", re.MULTILINE)

#: A path of a repository: something with a folder or a file's extension.
FILE: Final = re.compile(
    r"(?<![\w/.:-])(?:[\w.-]+/)*[\w-]+\.(?:py|pyi|rs|go|js|jsx|ts|tsx|toml|cfg|ini|md|rst|txt|yaml|yml|json|c|h|cpp|java|sh)\b"
)
#: A symbol: in backticks, called, in snake case or in camel case.
SYMBOL: Final = re.compile(r"`[^`\s]+`|\b\w+\(\)|\b[a-z0-9]+_[a-z0-9_]+\b|\b[A-Z][a-z0-9]+[A-Z]\w*\b")

#: Parts of a message in which a question mark asks nothing.
NOT_PROSE: Final = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|\bhttps?://\S+", re.DOTALL)

DRY_RUN: Final = re.compile(r"git\b[^\n]*\bmerge\b.*--no-commit|git\b[^\n]*\bmerge-tree\b")
CONFLICT: Final = "CONFLICT ("
SHIM_WARNING: Final = "WARNING: your branch conflicts with"
PR_CREATE: Final = re.compile(r"\bgh\s+pr\s+create\b")
REVERT: Final = re.compile(
    r"\bgit\s+(?:checkout\s+(?:\S+\s+)?--\s|restore\s|reset\s+--hard|stash(?:\s+(?:push|save)\b|\s*(?:$|[;&|\n])))"
)

#: The peer is spoken of; and spoken of as someone to write to next.
PEER: Final = re.compile(r"\bagent[12]\b|\b(?:my |the )?(?:colleague|peer|teammate|partner|other agent)\b", re.IGNORECASE)
INTENTION: Final = re.compile(
    r"\b(?:let me|let's|I('ll| will| should| need to| must| can| want to|'m going to)|first,? I)\b[^.\n]{0,60}?"
    r"\b(?:messag|send|tell|ask|notif|inform|contact|coordinat|reply|respond|communicat|let \w+ know|reach out)",
    re.IGNORECASE,
)
SUBMIT: Final = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
