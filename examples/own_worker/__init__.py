"""A worker and a trainer of your own: counts the tokens that are trained on, and records them beside the gates.

    PYTHONPATH=$PWD/examples VERL_USE_EXTERNAL_MODULES=own_worker \\
        python -m verl.trainer.main_ppo +recipe=opd trainer.v1.trainer_mode=counting

This file is imported while verl is being imported, so the classes, which derive from verl's, wait until it is complete.
"""

from types import ModuleType

from verl_opsd.plugin import after_import


def register(trainer: ModuleType) -> None:
    """Called when ``verl_opsd.verl_adapter.trainer`` has been imported; registers the mode ``counting``."""
    import own_worker.counting  # noqa: F401


after_import("verl_opsd.verl_adapter.trainer", register)
