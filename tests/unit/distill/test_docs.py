"""The examples in the docstrings run: each computes a divergence a second time by hand."""

from __future__ import annotations

import doctest

from verl_opsd.distill import divergence


def test_docstrings_of_divergence() -> None:
    outcome = doctest.testmod(divergence)
    assert outcome.attempted >= 6 and outcome.failed == 0
