"""verl-opsd: on-policy distillation of language-model agents, as a plugin for verl."""

__version__ = "0.1.0"
