"""The distillation loss as a library: pure torch, no trainer.

In reading order: ``divergence`` (what is measured), ``support`` (over which tokens), ``weights`` and ``reduction`` (how
much each position counts), ``loss`` (the choice among these), ``head`` and ``chunk`` (how it is computed without logits
of the whole batch), ``dense`` (the full vocabulary, by hand), ``telemetry`` (what is reported).
"""
