"""Refusals of the real command, in processes of their own: what happens before the callback, and how the plugin is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Done, Forks

ROOT = Path(__file__).resolve().parents[3]

Run = Callable[..., Done]


@pytest.fixture
def train(forks: Forks, tmp_path: Path) -> Run:
    """``train(*arguments, before=CODE, env={}, command=MODULE)`` runs verl's command after ``before``; checks that no run was started."""

    def run(*arguments: str, before: str = "", env: dict[str, str] | None = None, command: str = "main_ppo") -> Done:
        code = textwrap.dedent(before) + textwrap.dedent(
            """
            import runpy, sys
            import ray
            def init(*args, **kwargs):
                raise SystemExit("RAY WAS STARTED")
            ray.init = init
            runpy.run_module("verl.trainer.{COMMAND}", run_name="__main__", alter_sys=True)
            """
        ).replace("{COMMAND}", command)
        (done,) = forks.run(code, [*arguments, "hydra.run.dir=runs/opd/now"], cwd=tmp_path, env=env)
        assert done.returncode != 0 and "RAY WAS STARTED" not in done.stdout + done.stderr, done.stdout + done.stderr
        assert sorted(p.name for p in tmp_path.iterdir()) == []
        return done

    return run


def test_misspelt_key_through_the_real_command(train):
    done = train("+recipe=opd", "+opsd.foo=3")
    assert done.returncode == 2 and "error: unknown key opsd.foo" in done.stderr and "way out:" in done.stderr


def test_a_refused_warm_start_leaves_nothing(train):
    done = train("+recipe=warm_start", "corpus=/no/such", command="sft_trainer")
    assert done.returncode == 2 and "/no/such" in done.stderr and "way out:" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("key", ["recip", "recipes"])
def test_a_misspelt_group_of_recipes_is_not_a_key(train, key):
    done = train(f"+{key}=opd")
    assert done.returncode == 1 and f"error: +{key}=opd" in done.stderr and "way out: +recipe=opd" in done.stderr, done.stderr


def test_a_recipe_under_another_entry_point_names_its_own(train):
    done = train("+recipe=opd", command="sft_trainer_ray")
    assert done.returncode == 2 and "python -m verl.trainer.main_ppo +recipe=opd" in done.stderr, done.stderr


def test_sweep_whose_second_value_is_bad_does_not_start_the_first(train):
    done = train("-m", "+recipe=opd", "opsd.loss.anchor=0.0,-1.0")
    assert done.returncode == 2 and "job 1 of 2 (opsd.loss.anchor=-1.0): opsd.loss.anchor=-1.0" in done.stderr, done.stderr


def test_plugins_switched_off(train):
    done = train("+recipe=opd", env={"VERL_USE_EXTERNAL_PLUGINS": "none"})
    assert done.returncode == 2 and "VERL_USE_EXTERNAL_PLUGINS=none" in done.stderr and "way out: unset" in done.stderr


HIDDEN = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "hydra_plugins" or name.startswith("hydra_plugins."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def test_unknown_recipe_lists_the_known_ones_where_hydra_does_not_see_them(train):
    """As after a PEP 660 editable install: Hydra's discovery does not see `hydra_plugins`; the plugin registers them by itself."""
    done = train("+recipe=nope", before=HIDDEN)
    assert "recipe/nope" in done.stderr and "opd_offline" in done.stderr


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (
            # a library that has changed
            """
            import omegaconf
            def gone(*args, **kwargs):
                raise ImportError("cannot import name 'Gone'")
            omegaconf.OmegaConf.register_new_resolver = gone
            """,
            ["cannot import name 'Gone'", "loading the plugin failed"],
        ),
        (
            # a seam of verl that has moved, found when verl imports the module that it was in
            """
            import verl_opsd.verl_adapter.rollout as rollout
            def moved(module):
                raise AttributeError("verl.workers.rollout.base has no registry")
            rollout.register_rollout = moved
            """,
            ["has no registry", "registering with verl.workers.rollout.base failed"],
        ),
        (
            # another version of verl
            """
            import importlib.metadata
            real = importlib.metadata.version
            importlib.metadata.version = lambda name: "9.9.9" if name == "verl" else real(name)
            """,
            ["verl 9.9.9", "0.9.1", "loading the plugin failed"],
        ),
    ],
    ids=["import", "seam", "version"],
)
def test_broken_plugin_stops_the_process(train, before, words):
    """verl itself would log it at DEBUG level and train without it."""
    done = train("+recipe=opd", before=before)
    # 1 while verl is imported, 2 when a launch check imports the module whose registry has moved
    assert done.returncode in (1, 2) and all(w in done.stderr for w in [*words, "way out: run `opsd doctor`"]), done.stderr


def test_plugin_costs_little_of_import_verl():
    """Seconds in `import verl_opsd.plugin`, after what `import verl` imports anyway; the median of three forks."""
    code = """
        import os, time
        os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"
        import verl
        for _ in range(3):
            if pid := os.fork():
                os.waitpid(pid, 0)
                continue
            start = time.process_time()
            import verl_opsd.plugin
            print(time.process_time() - start, flush=True)
            os._exit(0)
        """
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    seconds = sorted(map(float, subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.split()))
    assert seconds[1] < 0.3, seconds
