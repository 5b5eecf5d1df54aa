"""verl-opsd: on-policy distillation of language-model agents, as a plugin for verl."""

__version__ = "0.1.0"

#: The version of verl whose seams this version hangs on.
SUPPORTED_VERL = "0.9.1"
