"""Labels of shell commands: what kind of action each is. A command may be several (``pytest && git push``)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from verl_opsd.evaluation.behaviour.patterns import LABELS, OPENS_FILES

_HEREDOC = re.compile(r"(?<!<)<<(?!<)-?\s*(['\"]?)(\w+)\1([^\n]*)\n(.*?)(?:\n[ \t]*\2(?=[\s)]|$)|\Z)", re.DOTALL)
_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'", re.DOTALL)
_SHELL = re.compile(r"\b(?:ba|z)?sh\s+-\w*c\s+(\"(?:[^\"\\]|\\.)*\"|'[^']*')", re.DOTALL)
_NO_FILE = re.compile(r"2>{1,2}\s*[^\s;|&]+|&?>{1,2}\s*/dev/(?:null|stderr|stdout)|>&\s*\d|\d>&\d")
_SPLIT = re.compile(r"&&|[;|\n]")


def segments(command: str) -> list[str]:
    """The simple commands of a command line.

    Heredoc bodies and quoted text are taken out (a message that says ``git push`` pushes nothing); what ``bash -c`` is given is
    read as commands. Redirections that write no file of the tree (to a descriptor, ``/dev/null``, of standard error) are taken out.
    """
    if "<<" in command:
        command = _HEREDOC.sub(lambda m: f"<<{'OPENS_FILES' if OPENS_FILES.search(m[4]) else 'TEXT'}{m[3]}\n", command)
    if '"' in command or "'" in command:
        if "sh -" in command:
            command = _SHELL.sub(lambda m: f"; {m[1][1:-1]} ;", command)
        command = _QUOTED.sub('""', command)
    if ">" in command:
        command = _NO_FILE.sub(" ", command)
    return [s for s in _SPLIT.split(command) if s and not s.isspace()]


def label(commands: Sequence[str]) -> dict[str, NDArray[np.bool_]]:
    """Label -> bool[commands] for every label of ``patterns.LABELS`` and ``other``. ``explore`` needs a segment that writes nothing."""
    parts = [segments(c) for c in commands]
    of = np.repeat(np.arange(len(commands)), [len(p) for p in parts])
    text = pa.array([s for p in parts for s in p], pa.string())
    out: dict[str, NDArray[np.bool_]] = {}
    matched = {
        name: pc.match_substring_regex(text, pattern).to_numpy(zero_copy_only=False).astype(bool)
        for name, pattern in LABELS.items()
    }
    matched["explore"] &= ~matched["write"]
    for name, found in matched.items():
        out[name] = np.zeros(len(commands), bool)
        out[name][of[found]] = True
    out["other"] = ~np.logical_or.reduce(list(out.values()))
    return out
