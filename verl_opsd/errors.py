"""The two kinds of error that this project raises, and how their text is built."""

from __future__ import annotations


class OpsdError(Exception):
    """Bad input or a broken invariant.

    The text always names three things: the input, the rule that it breaks, and the way out.
    """

    def __init__(self, what: str, rule: str, way_out: str):
        self.what, self.rule, self.way_out = what, rule, way_out
        super().__init__(what, rule, way_out)

    def __str__(self) -> str:
        return f"{self.what}\n  rule: {self.rule}\n  way out: {self.way_out}"


class InfraFault(OpsdError):
    """The infrastructure failed, not the policy: an outcome of its own, never a score of zero.

    Args:
        kind: stable identifier of the fault, e.g. ``engine_died``, ``sandbox_died``, ``grader_died``.
    """

    def __init__(self, kind: str, what: str, rule: str, way_out: str):
        self.kind = kind
        super().__init__(what, rule, way_out)
        self.args = (kind, what, rule, way_out)
