"""Evidence of a run: a log that shows edits, hashes of what was graded, predictions written before, claims, invalidations.

It imports nothing but the run's files, so that a log can be checked on any machine.
"""

from verl_opsd.evidence.chain import LOG, Finding, append, lines, verify

__all__ = ["LOG", "Finding", "append", "lines", "verify"]
