"""Faults that come back: a pair that ended twice in the same way is not run a third time.

``RUN_DIR/quarantine.jsonl`` has one line a fault; every process of a run reads and appends to it. Delete the file to run such pairs
again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from verl_opsd.errors import InfraFault

#: Equal faults of one pair after which it is not run any more.
LIMIT = 2
#: Faults of the host or of a server, whichever pair meets them: no reason to give up a pair.
NOT_OF_A_PAIR = ("engine_died", "sandbox_unreachable", "message_store", "teacher_", "endpoint_", "quarantined")
#: What differs between two equal faults: numbers, hexadecimal names and paths.
_VARIES = re.compile(r"/\S+|\b[0-9a-f]{6,}\b|\d+")


def signature(fault: InfraFault) -> str:
    """Kind and text of a fault, without what differs each time."""
    return f"{fault.kind}: {_VARIES.sub('#', fault.what)}"


class Quarantine:
    """The list of one run."""

    def __init__(self, run: Path):
        self.path = run / "quarantine.jsonl"

    def note(self, pair: str, fault: InfraFault) -> None:
        """Records a fault; a line is written with a single call, so that concurrent writers don't interleave."""
        if not fault.kind.startswith(NOT_OF_A_PAIR):
            with self.path.open("a") as f:
                f.write(json.dumps({"pair": pair, "fault": signature(fault)}) + "\n")

    def fault(self, pair: str) -> InfraFault | None:
        """Kind ``quarantined`` where a fault of this pair has come back; None where it may run."""
        if not self.path.is_file():
            return None
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        count = Counter(line["fault"] for line in lines if line["pair"] == pair)
        back = [text for text, n in count.items() if n >= LIMIT]
        if not back:
            return None
        return InfraFault(
            "quarantined",
            f"{pair} ended {LIMIT} times in the same way: {back[0]}",
            "a fault that comes back unchanged is not run into again",
            f"remove its cause, then delete {self.path}",
        )
