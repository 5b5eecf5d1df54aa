"""What is chosen on the command line is what is run: entry points, files of groups, arms, models' parts, clusters, folders."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import WARM
from verl_opsd.paths import conf_dir

#: Of the student of scale=local.
VOCABULARY = json.loads((Path(WARM) / "config.json").read_text())["vocab_size"]
ARMS = sorted(p.stem for p in (conf_dir() / "arm").glob("[a-z]*.yaml"))
GROUPS = [
    p.parent.name for p in sorted(conf_dir().glob("*/_base.yaml")) if p.parent.name not in ("recipe", "scale", "sft_scale")
]


@pytest.fixture
def parsed(compose):
    """``parsed(...)`` parses a configuration that holds Hydra's own section, as a real command's does."""
    from verl_opsd.verl_adapter.launch import parse

    return lambda *overrides: parse(compose(*overrides, hydra_section=True))


def broken(call, *words: str) -> OpsdError:
    with pytest.raises(OpsdError) as error:
        call()
    assert all(w in str(error.value) for w in words), str(error.value)
    return error.value


# ---- arms and files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_that_is_taken_apart(parsed, arm):
    """With another brief as a group or as a key; with another teacher as a key where the arm names one. As it is, it parses."""
    own = parsed("+recipe=opd", f"+arm={arm}").brief.name
    other = "peer_spec" if own != "peer_spec" else "none"
    for override in (f"brief={other}", f"opsd.brief.name={other}"):
        broken(lambda o=override: parsed("+recipe=opd", f"+arm={arm}", o), f"+arm={arm}", override, own)
    if arm in ("identity", "sft"):
        key = "opsd.teacher.kind=frozen"
        broken(lambda: parsed("+recipe=opd", f"+arm={arm}", key), f"+arm={arm}", key, "self")
    parsed("+recipe=opd", f"+arm={arm}", "opsd.brief.placement=last_user")


def test_an_arm_whose_own_key_is_set_otherwise(parsed):
    broken(lambda: parsed("+recipe=opd", "+arm=sft", "opsd.loss.divergence=forward_kl"), "+arm=sft", "forward_kl", "nll")


def test_an_anchor_with_the_arm_that_has_none(refused):
    text = refused("+arm=sft", "loss=anchored")
    assert "opsd.loss.anchor=0.5" in text and "set opsd.loss.anchor=0.0" in text and "use +arm=sft" not in text


@pytest.mark.parametrize("group", GROUPS)
def test_a_file_that_others_are_built_on_is_no_choice(parsed, group):
    error = broken(lambda: parsed("+recipe=opd", f"{group}=_base"), f"{group}=_base")
    assert f"{group}=glob(*,exclude=_*)" in error.way_out and ", _" not in error.way_out


def test_what_recipes_are_built_on_is_none(compose, capsys):
    from verl_opsd.verl_adapter.callback import OpsdCallback

    with pytest.raises(SystemExit) as stop:
        OpsdCallback().on_run_start(compose("+recipe=_base", hydra_section=True))
    text = capsys.readouterr().err
    assert stop.value.code == 2 and "error: recipe=_base\n" in text and "choose one of collect, full_eval, opd" in text, text


@pytest.mark.parametrize(
    ("recipe", "given", "named"),
    [
        ("full_eval", "brief=peer_spec", "brief=peer_spec"),
        ("full_eval", "teacher=frozen", "teacher=frozen"),
        ("collect", "loss=anchored", "opsd.loss.anchor"),
        ("collect", "opsd.loss.epochs=2", "opsd.loss.epochs"),
    ],
)
def test_an_evaluation_distils_nothing(refused, recipe, given, named):
    assert f"{named} with {recipe}" in refused(given, recipe=recipe)


# ---- entry points -------------------------------------------------------------------------------------------------------

RECIPES = sorted(p.stem for p in (conf_dir() / "recipe").glob("[a-z]*.yaml"))
WANTED = {r: "verl.trainer.sft_trainer" if r == "warm_start" else "verl.trainer.main_ppo" for r in RECIPES}
CONFIGS = {"verl.trainer.main_ppo": "ppo_trainer", "verl.trainer.sft_trainer": "sft_trainer_engine"}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["ppo_trainer", "sft_trainer_engine", "evaluation"])
def test_every_recipe_under_every_entry_point(recipe, name, tmp_path, monkeypatch, capsys):
    """Where Hydra's own callback stands: before it makes a directory."""
    import verl  # noqa: F401
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.utils import instantiate

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPSD_RUN_DIR", "run")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra_compose(name, [f"+recipe={recipe}"], return_hydra_config=True)
    config.hydra.job.name = "job"
    callback = instantiate(config.hydra.callbacks.opsd)
    if CONFIGS[WANTED[recipe]] == name:
        callback.on_run_start(config)
        return
    for start in (callback.on_run_start, callback.on_multirun_start):
        with pytest.raises(SystemExit) as stop:
            start(config)
        assert stop.value.code == 2
        text = capsys.readouterr().err
        assert f"python -m {WANTED[recipe]} +recipe={recipe}" in text and "rule:" in text, text
    assert not list(tmp_path.iterdir())


# ---- the student's parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("target_modules=[nosuch]", ["nosuch"]),
        ("target_modules=nosuch", ["nosuch"]),
        ("target_modules=[q_proj,nosuch]", ["no module is named nosuch"]),
        ("target_modules=[proj]", ["proj"]),
        ("target_modules=[embed_tokens]", ["embed_tokens", "no linear layer"]),
        ("target_modules=[lm_head]", ["lm_head"]),
        ("target_modules=[norm]", ["norm"]),
        ("target_modules='*x('", ["*x("]),
        ("target_modules=[]", ["no module"]),
        ("target_modules=null", ["no module"]),
        ("target_modules=[1]", ["no module"]),
        ("exclude_modules='.*'", ["excluded"]),
    ],
)
def test_adapter_that_binds_nothing(refused, given, words):
    text = refused(f"actor_rollout_ref.model.{given}")
    assert "actor_rollout_ref.model.target_modules" in text and all(w in text for w in words), text


def test_adapters_that_bind(compose):
    from verl_opsd.verl_adapter.launch import check_models, parse

    for given in ("target_modules=[q_proj,v_proj]", "target_modules='.*mlp.*_proj'", "lora_rank=0"):
        config = compose("+recipe=opd", f"actor_rollout_ref.model.{given}")
        check_models(config, parse(config))


@pytest.mark.parametrize("support", ["student_topk", "teacher_topk", "union_topk"])
def test_more_tokens_than_the_vocabulary_has(refused, support):
    text = refused(f"opsd.loss.support={support}", f"opsd.loss.top_k={VOCABULARY}")
    assert f"opsd.loss.top_k={VOCABULARY}" in text and f"vocabulary of {VOCABULARY}" in text


def test_sampling_from_more_tokens_than_there_are(refused):
    key = f"opsd.contract.top_k={VOCABULARY + 1}"
    assert key in refused(key)


# ---- clusters -----------------------------------------------------------------------------------------------------------


def closed_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_nodes_without_a_cluster(refused):
    text = refused("trainer.nnodes=2")
    assert "trainer.nnodes=2 without a Ray cluster" in text and "+ray=attached" in text


@pytest.mark.parametrize(
    "address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "no.such.host.invalid:6379", "nonsense", "h:70000"]
)
def test_a_cluster_that_does_not_answer(refused, address):
    address = address.format(port=closed_port())
    assert f"ray_kwargs.ray_init.address={address}" in refused(f"+ray_kwargs.ray_init.address='{address}'")


def test_a_cluster_is_not_asked_for_what_a_new_one_takes(refused, compose, monkeypatch):
    from verl_opsd.verl_adapter import cluster
    from verl_opsd.verl_adapter.cluster import OF_A_NEW_ONE, check_ray

    monkeypatch.setattr(cluster, "_greet", lambda address: None)
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        address = f"127.0.0.1:{head.getsockname()[1]}"
        given = f"+ray_kwargs.ray_init.address={address}"
        text = refused(given)
        assert "num_cpus, num_gpus, object_store_memory" in text and "+ray=attached" in text
        free = [f"++ray_kwargs.ray_init.{k}=null" for k in OF_A_NEW_ONE]
        assert "OPSD_RUN_DIR=None" in refused(given, *free)
        other = "+ray_kwargs.ray_init.runtime_env.env_vars.OPSD_RUN_DIR=/elsewhere"
        assert "OPSD_RUN_DIR=/elsewhere" in refused(given, *free, other)
        monkeypatch.setenv("RAY_ADDRESS", address)
        check_ray(compose("+recipe=opd", "+ray=attached", "trainer.nnodes=2"))


# ---- folders ------------------------------------------------------------------------------------------------------------


def bad_folders(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "file").write_text("")
    return {
        "a file": str(tmp_path / "file"),
        "under a file": str(tmp_path / "file" / "x"),
        "not writable": "/sys/x" if os.geteuid() == 0 else "/x",
        "too long": str(tmp_path / ("x" * 300)),
    }


@pytest.mark.parametrize("kind", ["a file", "under a file", "not writable", "too long"])
def test_checkpoints_that_can_not_be_written(refused, tmp_path, kind):
    folder = bad_folders(tmp_path)[kind]
    assert f"trainer.default_local_dir={folder}" in refused(f"trainer.default_local_dir={folder}")


@pytest.mark.parametrize("kind", ["a file", "under a file", "not writable", "too long"])
@pytest.mark.parametrize(("recipe", "key"), [("opd", "run.dir"), ("opd", "sweep.dir"), ("warm_start", "run.dir")])
def test_run_directories_that_can_not_be(tmp_path, capsys, kind, recipe, key):
    import verl  # noqa: F401
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.utils import instantiate

    folder = bad_folders(tmp_path)[kind]
    with initialize_config_module("verl.trainer.config", version_base=None):
        overrides = [f"+recipe={recipe}", f"hydra.{key}={folder}"]
        config = hydra_compose(CONFIGS[WANTED[recipe]], overrides, return_hydra_config=True)
    callback = instantiate(config.hydra.callbacks.opsd)
    with pytest.raises(SystemExit) as stop:
        (callback.on_run_start if key == "run.dir" else callback.on_multirun_start)(config)
    text = capsys.readouterr().err
    assert stop.value.code == 2 and f"hydra.{key}={folder}" in text and "way out:" in text and "Traceback" not in text
