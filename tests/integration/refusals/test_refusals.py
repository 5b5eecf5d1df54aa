"""Bad input stops before anything starts: its own error (input, rule, way out), exit code 2, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException

ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
SHARED = ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["+opsd.foo=3"], ["opsd.foo", "unknown key"]),
        (["+opsd.loss.anchr=1.0"], ["opsd.loss.anchr"]),
        (["+opsd.contract.steps=3"], ["opsd.contract.steps"]),
        (["+trainer.total_trainin_steps=3"], ["trainer.total_trainin_steps", "did you mean total_training_steps?"]),
        (["+data.train_batchsize=3"], ["data.train_batchsize", "did you mean train_batch_size?"]),
        (["+actor_rollout_ref.actor.optim.learning_rate=1"], ["actor_rollout_ref.actor.optim.learning_rate"]),
        (["+actor_rollout_ref.rollout.val_kwarg.n=2"], ["actor_rollout_ref.rollout.val_kwarg", "val_kwargs"]),
        (["+foo=1"], ["unknown key foo"]),
        (["+rollout.temperature=0.5"], ["unknown key rollout"]),
        (["++algorithm.kl_ctl.kl_coef=1"], ["algorithm.kl_ctl", "kl_ctrl"]),
    ],
)
def test_unknown_key_is_named(refused, overrides, words):
    text = refused(*overrides)
    assert all(w in text for w in words), text


@pytest.mark.parametrize(
    "override",
    ["opsd.loss.anchr=1", "opsd.lossy.anchor=1", "trainer.total_trainin_steps=3", "actor_rollout_ref.actr.strategy=x"],
)
def test_misspelt_key_without_plus_is_refused_by_hydra(compose, override):
    with pytest.raises(ConfigCompositionException, match=override.split("=")[0]):
        compose("+recipe=opd", override)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["opsd.teacher.path=/models/other"], ["opsd.teacher.kind=self", "/models/other"]),
        (["teacher=device", "opsd.teacher.path=null"], ["opsd.teacher.path", "device teacher"]),
        (["opsd.sandbox.backend=process"], ["opsd.sandbox.backend=process", "allow_unsafe"]),
        (["opsd.sandbox.backend=process", "opsd.sandbox.allow_unsafe=true"], ["opsd.contract.sandbox=bubblewrap"]),
        (["opsd.contract.max_tokens=99999"], ["contract.max_tokens=99999"]),
        (["opsd.contract.step_limit=0"], ["contract.step_limit=0"]),
        (["opsd.loss.epochs=0"], ["epochs=0"]),
        (["opsd.loss.anchor=-1.0"], ["anchor=-1.0"]),
        (["opsd.loss.divergence=jsd"], ["beta"]),
        (["opsd.loss.support=union_topk"], ["top_k"]),
        (["opsd.loss.divergence=kl"], ["opsd.loss.divergence='kl'"]),
        (["opsd.loss.epochs=two"], ["opsd.loss.epochs='two'", "int"]),
        (["actor_rollout_ref.rollout.temperature=0.5"], ["0.5", "contract"]),
        (["actor_rollout_ref.rollout.val_kwargs.top_p=0.9"], ["val_kwargs", "0.9"]),
        (["actor_rollout_ref.actor.strategy=fsdp"], ["actor.strategy=fsdp"]),
        (["opsd.activations.keep=none"], ["opsd.activations.keep=none", "enable_gradient_checkpointing=False"]),
        (
            [
                "opsd.activations.keep=none",
                "actor_rollout_ref.model.enable_gradient_checkpointing=true",
                "actor_rollout_ref.model.enable_activation_offload=true",
            ],
            ["enable_activation_offload=True", "opsd.activations.offload"],
        ),
        (["actor_rollout_ref.model.lora.merge=true"], ["model.lora.merge=true"]),
        (["actor_rollout_ref.model.lora.rank=8"], ["model.lora.rank=8", "set lora_rank"]),
        (["actor_rollout_ref.actor.grad_clip=0.5"], ["actor.grad_clip=0.5", "actor.optim.clip_grad"]),
        (["actor_rollout_ref.actor.optim.optimizer=Foo"], ["actor.optim.optimizer=Foo", "torch.optim", "AdamW"]),
        (["actor_rollout_ref.actor.optim.optimizer_impl=foo.bar"], ["optimizer_impl=foo.bar", "foo"]),
        (
            ["actor_rollout_ref.actor.pad_to_length=true", "actor_rollout_ref.model.use_remove_padding=false"],
            ["pad_to_length=True", "use_remove_padding=false"],
        ),
        (["trainer.v1.trainer_mode=sync"], ["trainer_mode=sync"]),
        (["distillation.enabled=true"], ["distillation.enabled=true"]),
        (["actor_rollout_ref.actor.use_kl_loss=true"], ["opsd.loss.anchor"]),
        (["trainer.use_v1=false"], ["trainer.use_v1=false", "PPO"]),
        (["data.val_files=/elsewhere/val.parquet"], ["/elsewhere/val.parquet", "opsd.tasks"]),
        (["actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent"], ["single_turn_agent", "opsd_pair"]),
        (["actor_rollout_ref.rollout.n=2"], ["rollout.n"]),
        (["opsd.corpus=/some/run"], ["opsd.corpus=/some/run"]),
        (["opsd.contract.tool_parser=hermse"], ["tool parser 'hermse'", "hermes"]),
        (["opsd.contract.compaction_trigger=-1"], ["compaction_trigger=-1"]),
        (["opsd.teacher.devices=3"], ["opsd.teacher.devices=3", "kind=self"]),
        (["opsd.loss.class_weights.think=-0.5"], ["class_weights", "-0.5"]),
        (["actor_rollout_ref.rollout.name=hf"], ["rollout.name=hf", "opsd_embedded"]),
        (["critic.enable=true"], ["critic.enable=True"]),
        (["reward.reward_model.enable=true"], ["reward_model.enable=True"]),
        (["scale=gpu8"], ["scale=gpu8", "0 accelerators"]),
        (["trainer.n_gpus_per_node=3"], ["3 ranks", "data.train_batch_size=2"]),
        (["trainer.n_gpus_per_node=two"], ["trainer.n_gpus_per_node=two", "whole number"]),
        (["data.train_batch_size=2.5"], ["data.train_batch_size=2.5", "whole number"]),
        (["trainer.total_training_steps=0"], ["trainer.total_training_steps=0", "at least 1"]),
        (["trainer.total_training_steps=20", "trainer.total_epochs=1"], ["trainer.total_epochs=1", "rounds"]),
        (["trainer.test_freq=weekly"], ["trainer.test_freq=weekly"]),
        (["opsd.contract.command_timeout_s=600"], ["command_timeout_s=600", "dead"]),
        (["+actor_rollout_ref.rollout.engine_kwargs.opsd.thread=1"], ["engine_kwargs.opsd", "thread"]),
        (["+actor_rollout_ref.rollout.engine_kwargs.opsd.threads=0"], ["engine_kwargs.opsd.threads=0"]),
        (["+actor_rollout_ref.rollout.engine_kwargs.opsdd.threads=1"], ["engine_kwargs.{opsdd}", "opsd"]),
        (["+actor_rollout_ref.rollout.engine_kwargs.opsd.script=/a.json"], ["script=/a.json", "opsd_scripted"]),
        (["actor_rollout_ref.rollout.name=opsd_scripted"], ["script None", "JSON file"]),
        (
            ["actor_rollout_ref.rollout.name=opsd_scripted", "+actor_rollout_ref.rollout.engine_kwargs.opsd.script=/no/s.json"],
            ["script '/no/s.json'"],
        ),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=2"], ["parallel sizes (2, 1, 1)"]),
        (["actor_rollout_ref.rollout.dtype=float8"], ["rollout.dtype=float8"]),
        (["teacher=device", "opsd.teacher.path=models/nope"], ["opsd.teacher.path=models/nope", "hub name"]),
        (["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null"], ["ppo_micro_batch_size"]),
        (["actor_rollout_ref.actor.optim.lr=fast"], ["optim.lr=fast", "number"]),
        (["data.max_prompt_length=10"], ["data.max_prompt_length=10", "context_length"]),
        (["opsd.loss.episodes_per_update=100"], ["episodes_per_update=100", "train_batch_size=2"]),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/such"], ["resume_from_path=/no/such"]),
        (["actor_rollout_ref.model.lora_adapter_path=/no/such"], ["lora_adapter_path=/no/such"]),
        (["opsd=null"], ["config group"]),
        (["~opsd.contract"], ["opsd.contract"]),
        (["actor_rollout_ref.actor.optim.lr=-1"], ["optim.lr=-1"]),
        (["actor_rollout_ref.actor.optim.lr=nan"], ["optim.lr=nan"]),
        (["actor_rollout_ref.model.lora_rank=-3"], ["lora_rank=-3"]),
        (["actor_rollout_ref.model.lora_rank=abc"], ["lora_rank=abc"]),
        (["trainer.logger=[nosuch]"], ["nosuch", "console"]),
        (["trainer.device=cuda"], ["trainer.device=cuda", "scale=local"]),
        (["trainer.resume_mode=bogus"], ["resume_mode=bogus"]),
        (["opsd.loss.clip=-1"], ["opsd.loss.clip=-1"]),
        (["opsd.loss.task_reward_coef=0.1", "data.train_batch_size=1"], ["task_reward_coef=0.1", "train_batch_size=1"]),
        (["opsd.loss.task_reward_coef=0.1", "actor_rollout_ref.actor.clip_ratio_low=1.5"], ["low=1.5", "clip_ratio_low"]),
        (["opsd.loss.task_reward_coef=0.1", "actor_rollout_ref.actor.clip_ratio_c=1"], ["dual=1", "_c"]),
        (["actor_rollout_ref.actor.clip_ratio_high=0.3"], ["0.2, 0.3, 3.0", "opsd.loss.task_reward_coef"]),
        (["actor_rollout_ref.actor.clip_ratio_high=much"], ["clip_ratio_high=much", "number"]),
        (["actor_rollout_ref.model.use_fused_kernels=true"], ["use_fused_kernels=True", "vocabulary head"]),
        (["actor_rollout_ref.actor.use_fused_kernels=true"], ["use_fused_kernels=True", "vocabulary head"]),
        ([*SHARED, f"{ATTENTION}=sdpa"], ["sequence_parallel_size=2", "attn_implementation=sdpa", "ulysses_sdpa"]),
        ([*SHARED, f"{ATTENTION}=eager"], ["sequence_parallel_size=2", "attn_implementation=eager", "ulysses_sdpa"]),
        ([*SHARED, f"{ATTENTION}=null"], ["sequence_parallel_size=2", "attn_implementation=None", "ulysses_sdpa"]),
        (
            [*SHARED, f"{ATTENTION}=ulysses_sdpa", "actor_rollout_ref.model.use_remove_padding=false"],
            ["use_remove_padding=false", "sequence_parallel_size=2"],
        ),
        (
            [f"{ATTENTION}=ulysses_sdpa", "actor_rollout_ref.model.use_remove_padding=false"],
            ["use_remove_padding=false", "attn_implementation=ulysses_sdpa"],
        ),
        (
            ["actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"],
            ["fsdp_config.ulysses_sequence_parallel_size=2", "actor.ulysses_sequence_parallel_size=1"],
        ),
        (
            [f"{ATTENTION}=ulysses_sdpa", "data.train_batch_size=3", "trainer.n_gpus_per_node=3", f"{SHARED[0][:-1]}3"],
            ["sequence_parallel_size=3", "attention heads"],
        ),
        (
            ["actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10"],
            ["actor.ppo_max_token_len_per_gpu=10", "context_length=12288"],
        ),
        (
            ["actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=10"],
            ["rollout.log_prob_max_token_len_per_gpu=10", "context_length=12288"],
        ),
        (
            ["actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false"],
            ["use_dynamic_bsz=True", "log_prob_use_dynamic_bsz=False"],
        ),
        (["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=0"], ["log_prob_micro_batch_size_per_gpu=0"]),
        (["loss=gated", "opsd.loss.gate.kappa=-1"], ["opsd.loss: gate kappa=-1.0"]),
        (["opsd.brief.max_view_tokens=10"], ["10 fit (opsd.brief.max_view_tokens)", "raise opsd.brief.max_view_tokens to"]),
        (["actor_rollout_ref.actor.fsdp_config.model_dtype=banana"], ["model_dtype=banana", "bf16"]),
        (["actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=int8"], ["reduce_dtype=int8"]),
        (["actor_rollout_ref.actor.fsdp_config.fsdp_size=7"], ["fsdp_size=7", "1 ranks"]),
        (["actor_rollout_ref.actor.optim.lr_scheduler_type=banana"], ["lr_scheduler_type=banana", "cosine"]),
        (["actor_rollout_ref.actor.optim.weight_decay=-1"], ["weight_decay=-1"]),
        (["actor_rollout_ref.actor.optim.betas=[2,3]"], ["optim.betas=[2, 3]"]),
        (["actor_rollout_ref.rollout.gpu_memory_utilization=7"], ["gpu_memory_utilization=7"]),
        (["actor_rollout_ref.rollout.max_model_len=10"], ["max_model_len=10", "context_length"]),
        (["actor_rollout_ref.actor.checkpoint.save_contents=[banana]"], ["save_contents=['banana']", "hf_model"]),
        (["data.seed=banana"], ["data.seed=banana"]),
        (
            ["actor_rollout_ref.model.override_config.attn_implementation=banana"],
            ["attn_implementation=banana", "ulysses_sdpa"],
        ),
        (["trainer.esi_redundant_time=60"], ["trainer.esi_redundant_time=60", "trainer.save_freq"]),
        (["trainer.esi_redundant_time=x"], ["trainer.esi_redundant_time=x", "trainer.save_freq"]),
        (["trainer.save_freq=x"], ["trainer.save_freq=x"]),
        (["actor_rollout_ref.actor.optim.weight_decay=x"], ["weight_decay=x", "a number"]),
        (["trainer.balance_batch=maybe"], ["trainer.balance_batch=maybe", "true or false"]),
        (["trainer.max_actor_ckpt_to_keep=-4"], ["max_actor_ckpt_to_keep=-4"]),
        (["trainer.project_name=null"], ["trainer.project_name=None"]),
        (["actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp16"], ["param_dtype=fp16", "loss scaler"]),
        (
            ["actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"],
            ["model_dtype=bf16", "lora_rank=0"],
        ),
    ],
)
def test_contradiction_is_refused(refused, overrides, words):
    if overrides == ["scale=gpu8"] and _accelerators():
        pytest.skip("this machine has accelerators")
    text = refused(*overrides)
    assert all(w in text for w in words), text


@pytest.mark.parametrize(
    ("override", "group"),
    [("opsd.scale=gpu1", "scale="), ("opsd.recipe=mine", "+recipe="), ("opsd.mode=offline", "opd_offline")],
)
def test_label_that_no_group_set(compose, override, group):
    """Alone such a key would call the run something that it is not."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    from verl_opsd.errors import OpsdError
    from verl_opsd.verl_adapter.launch import parse

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra_compose("ppo_trainer", ["+recipe=opd", override], return_hydra_config=True)
    with pytest.raises(OpsdError, match=override) as error:
        parse(config)
    assert group in error.value.way_out


def test_accelerator_under_a_scale_of_the_host_processor(refused, monkeypatch):
    monkeypatch.setattr("verl_opsd.verl_adapter.requirements.accelerator_present", lambda: True)
    assert "scale=local on a host with an accelerator" in refused("scale=local")


def _accelerators() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.mark.parametrize("path", ["/no/such/model", "./nothing", "nothing", "a/b/c"])
def test_student_that_does_not_exist(refused, path):
    assert f"actor_rollout_ref.model.path={path}" in refused(f"actor_rollout_ref.model.path={path}")


@pytest.mark.parametrize(("overrides", "named"), [([], "corpus not set"), (["corpus=/no/such/run"], "corpus=/no/such/run")])
def test_corpus_that_does_not_exist(refused, overrides, named):
    assert named in refused(*overrides, recipe="opd_offline")


def test_corpus_of_another_contract(refused, tmp_path):
    """Every field that differs is named, with both values."""
    from verl_opsd.contract import EvalContract
    from verl_opsd.rundir import RunDir, write_json

    corpus = RunDir(tmp_path / "corpus")
    corpus.episodes.mkdir(parents=True)
    write_json(corpus.path / "contract.json", EvalContract(step_limit=77, top_p=0.9).as_dict())
    text = refused(f"corpus={corpus.path}", recipe="opd_offline")
    assert str(corpus.path) in text and "was made under another contract than this run (" in text
    assert "step_limit: 77 there, 4 here" in text and "top_p: 0.9 there, 1.0 here" in text


@pytest.fixture(scope="session")
def student() -> Path:
    from verl_opsd.models.tiny import WARM

    return WARM


def edited_tokenizer(student: Path, target: Path, change) -> Path:
    shutil.copytree(student, target)
    path = target / "tokenizer.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return target


def swap_two(values):
    vocab = values["model"]["vocab"]
    a, b = sorted(vocab, key=vocab.get)[40:42]
    vocab[a], vocab[b] = vocab[b], vocab[a]


def test_teacher_with_two_ids_swapped(refused, student, tmp_path):
    other = edited_tokenizer(student, tmp_path / "teacher", swap_two)
    text = refused("teacher=device", f"opsd.teacher.path={other}")
    assert str(other) in text and "another tokenizer" in text and "2 entries" in text


def test_teacher_without_weights_folder(refused, tmp_path):
    assert "opsd.teacher.path" in refused("teacher=device", f"opsd.teacher.path={tmp_path}")


@pytest.mark.parametrize(
    ("overrides", "named"), [(["teacher=device"], "opsd.teacher.path"), (["tasks=cooperbench"], "opsd.tasks.dataset")]
)
def test_key_without_a_default(refused, overrides, named):
    text = refused(*overrides)
    assert named in text and ("not set" in text or f"without {named}" in text)


@pytest.fixture
def fresh_host():
    from verl_opsd.cooperbench.sandbox import host

    host.require_host.cache_clear()
    yield host
    host.require_host.cache_clear()


@pytest.mark.parametrize(("missing", "package"), [("bwrap", "bubblewrap"), ("setpriv", "util-linux"), ("git", "git")])
def test_program_that_the_sandbox_needs_is_missing(refused, fresh_host, tmp_path, monkeypatch, missing, package):
    system = tmp_path / "bin"
    system.mkdir()
    for name in set(fresh_host.PROGRAMS) - {missing}:
        (system / name).symlink_to(fresh_host.program(name))
    monkeypatch.setattr(fresh_host, "SYSTEM_DIRECTORIES", (str(system),))
    text = refused()
    assert f"no `{missing}`" in text and f"apt-get install {package}" in text


def test_not_root(refused, fresh_host, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    text = refused()
    assert "user id 1234" in text and "run as root" in text


def test_host_that_cannot_switch_user_ids():
    """A real process without CAP_SETUID: the sandbox does not start, and says what is missing."""
    code = (
        "import sys\nfrom verl_opsd.cooperbench.sandbox import require_sandbox\nfrom verl_opsd.errors import OpsdError\n"
        "try:\n    require_sandbox('bubblewrap')\nexcept OpsdError as e:\n    print(e); sys.exit(2)\n"
    )
    command = ["setpriv", "--bounding-set=-setuid,-setgid", "--inh-caps=-all", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "rule:" in done.stdout and "way out:" in done.stdout
