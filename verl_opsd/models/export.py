"""From a training checkpoint of verl's to a model in Hugging Face's layout, with guards that measure what was written.

Shards are joined and adapters merged in float32: verl's own merger rounds to bfloat16 first, which loses most of a small update.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from verl_opsd.errors import OpsdError
from verl_opsd.rundir import write_json

Dtype = Literal["float32", "bfloat16", "float16"]
#: Largest mean divergence KL(trained || exported) in nats a token, by the precision that is written.
PARITY = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}
#: Share of the prompts whose greedy reply holds a tool call, at least.
COHERENT = 0.5
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.default\.weight")
_PEFT = "base_model.model."
_WRAPPED = "model.language_model."
#: A multimodal checkpoint's files beside weights, configuration and tokenizer.
GENERATION = "generation_config.json"
PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
#: Texts on which trained and exported model are compared.
TEXTS = (
    "def words(text):\n    return text.lower().split()\n",
    "<|im_start|>system\nYou are agent1.<|im_end|>\n<|im_start|>user\nRun the tests and fix what fails.<|im_end|>\n"
    '<|im_start|>assistant\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l && git status"}}\n</tool_call><|im_end|>\n',
    "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n-a = 1\n+a = 2\n",
)


@dataclass(frozen=True)
class Guard:
    """One guard's verdict."""

    name: str
    value: float
    threshold: float
    passed: bool
    detail: str = ""


def of_model(checkpoint: Path) -> Path:
    """The folder of the model in a checkpoint: verl's main_ppo keeps it below ``actor``."""
    return checkpoint / "actor" if (checkpoint / "actor").is_dir() else checkpoint


def tokenizer_and_config(checkpoint: Path) -> tuple[Any, Any]:
    """What a checkpoint keeps beside its weights.

    Raises:
        OpsdError: a file is gone or can't be read.
    """
    from transformers import AutoConfig, AutoTokenizer

    folder = of_model(checkpoint) / "huggingface"
    if missing := [n for n in ("config.json", "tokenizer_config.json") if not (folder / n).is_file()]:
        raise OpsdError(f"{folder} lacks {', '.join(missing)}", "a checkpoint has its model's files", "use another checkpoint")
    try:
        return AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    except Exception as error:  # tokenizers raises plain exceptions
        raise OpsdError(
            f"{folder}: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            "a checkpoint has its model's files, as they were written",
            "use another checkpoint",
        ) from error


def whole_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, joined from the shards of all ranks, in the precision that was trained.

    Raises:
        OpsdError: no checkpoint of verl's FSDP engine, a rank's file is missing or broken, or weights that are no floating-point numbers.
    """
    (ranks,) = _stated(checkpoint / "fsdp_config.json", "world_size")
    if ranks < 1:
        raise OpsdError(
            f"{checkpoint / 'fsdp_config.json'}: world_size {ranks}", "one rank saves at least", "use another checkpoint"
        )
    paths = [checkpoint / f"model_world_size_{ranks}_rank_{r}.pt" for r in range(ranks)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise OpsdError(f"{checkpoint} lacks {missing}", "every rank has saved its shard", "use another checkpoint")
    try:
        shards = [torch.load(p, map_location="cpu", weights_only=False) for p in paths]
        if strange := [p.name for p, s in zip(paths, shards, strict=True) if not _are_tensors(s)]:
            raise TypeError(f"{strange} are no tensors by name")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ImportError, AttributeError, TypeError, OSError) as error:
        raise OpsdError(f"{checkpoint}: {error}", "every rank's shard can be read", "use another checkpoint") from error
    if other := [p.name for p, s in zip(paths, shards, strict=True) if s.keys() != shards[0].keys()]:
        raise OpsdError(
            f"{checkpoint}: {other} of other keys than rank 0", "ranks hold shards of one model", "use another checkpoint"
        )
    weights = {key: _join(key, [s[key] for s in shards]) for key in shards[0]}
    if odd := [f"{k} ({v.dtype})" for k, v in weights.items() if not v.is_floating_point()]:
        raise OpsdError(f"{checkpoint}: {odd[:3]}", "weights are floating-point numbers", "use another checkpoint")
    return weights


def _are_tensors(shard: Any) -> bool:
    return isinstance(shard, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in shard.items())


def _stated(path: Path, *names: str) -> list[int]:
    """Numbers of a JSON file of a checkpoint's."""
    try:
        entry = json.loads(path.read_text())
        return [int(entry[name]) for name in names]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OpsdError(
            f"{path}: {type(error).__name__}: {error}",
            f"a checkpoint is a folder global_step_N of verl's, with {path.name} that states {', '.join(names)}",
            "name such a folder",
        ) from error


def _join(key: str, parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    *groups, placement = first.placements
    # groups of ranks (engine.fsdp_size) hold the same: the first group is the first ranks
    local = [p._local_tensor for p in parts if isinstance(p, DTensor)][: first.device_mesh.shape[-1]]
    if all(g.is_replicate() for g in groups) and placement.is_replicate():
        return local[0]
    if not all(g.is_replicate() for g in groups) or not isinstance(placement, Shard):
        raise OpsdError(
            f"{key} placed as {first.placements}", "a tensor is sharded along one dimension or replicated", "use FSDP2"
        )
    return torch.cat(local, dim=placement.dim)


def merged(weights: dict[str, Tensor], rank: int, alpha: float) -> tuple[dict[str, Tensor], float]:
    """Weights with their adapters added in float32, under the base model's names.

    Returns:
        The weights, and the largest entry of any adapter's second matrix (0: the adapter does nothing).

    Raises:
        OpsdError: half an adapter, one without a base, or of another rank or shape.
    """
    sides: dict[str, dict[str, Tensor]] = {}
    for key, value in weights.items():
        if found := _LORA.fullmatch(key):
            sides.setdefault(found["module"], {})[found["side"]] = value.float()
    broken = [m for m, s in sides.items() if set(s) != {"A", "B"} or f"{m}.base_layer.weight" not in weights]
    if broken:
        raise OpsdError(
            f"adapters of {broken[:3]} without both sides and a base", "an adapter is whole", "use another checkpoint"
        )
    for m, s in sides.items():
        shapes = tuple(s["A"].shape), tuple(s["B"].shape), tuple(weights[f"{m}.base_layer.weight"].shape)
        if shapes != ((rank, shapes[2][1]), (shapes[2][0], rank), shapes[2]):
            raise OpsdError(
                f"adapter of {m}: A {shapes[0]}, B {shapes[1]} on a weight {shapes[2]}",
                f"lora_train_meta.json states rank {rank}",
                "use another checkpoint",
            )
    out: dict[str, Tensor] = {}
    for key, value in weights.items():
        if ".lora_" in key:
            continue
        name = key.removeprefix(_PEFT).replace(".base_layer.", ".")
        module = key.removesuffix(".base_layer.weight")
        update = sides[module]["B"] @ sides[module]["A"] * (alpha / rank) if key.endswith(".base_layer.weight") else 0.0
        out[name] = value.float() + update
    return out, max((float(s["B"].abs().max()) for s in sides.values()), default=0.0)


def auto_class(config: Any) -> Any:
    """transformers' class for a configuration's architecture."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    name = (config.architectures or [""])[0]
    return AutoModelForImageTextToText if name.endswith("ForConditionalGeneration") else AutoModelForCausalLM


def load_into(config: Any, weights: dict[str, Tensor], what: str) -> nn.Module:
    """A float32 model that holds exactly these weights.

    Raises:
        OpsdError: missing or unexpected keys, weights of another shape, or tied weights that differ.
    """
    model = auto_class(config).from_config(config, dtype=torch.float32)
    result = _load(model, weights, what)
    ties = dict(getattr(model, "_tied_weights_keys", None) or {}) if config.get_text_config().tie_word_embeddings else {}
    if apart := [
        k for k, other in ties.items() if k in weights and other in weights and not torch.equal(weights[k], weights[other])
    ]:
        raise OpsdError(f"{what}: {apart} tied to other weights", "guard keys: tied weights are one", "use another checkpoint")
    _require_keys([k for k in result.missing_keys if k not in ties], result.unexpected_keys, what)
    model.tie_weights()
    return model.eval()  # type: ignore[no-any-return]


def _load(model: nn.Module, weights: dict[str, Tensor], what: str) -> Any:
    try:
        return model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # shapes
        raise OpsdError(
            f"{what}: {error}", "guard keys: weights have their architecture's shapes", "use another checkpoint"
        ) from error


def _require_keys(missing: Sequence[str], unexpected: Sequence[str], what: str) -> None:
    if missing or unexpected:
        raise OpsdError(
            f"{what}: missing keys {list(missing)[:5]}, unexpected keys {list(unexpected)[:5]}",
            "guard keys: an export holds every weight of its architecture and no other",
            "export with the checkpoint's own configuration; for Qwen3.5 see --wrapper",
        )


def wrapped(weights: dict[str, Tensor], text_config: Any, wrapper: str) -> tuple[dict[str, Tensor], Any]:
    """Text weights inside a multimodal wrapper, whose other weights (vision) stay as they are.

    Args:
        text_config: of the trained text model.
        wrapper: folder or hub name of a multimodal checkpoint of the same text architecture.

    Returns:
        All weights under the wrapper's names, and its configuration.

    Raises:
        OpsdError: no wrapper, or one around another text model.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    try:
        config = AutoConfig.from_pretrained(wrapper)
    except (OSError, ValueError) as error:
        raise OpsdError(
            f"--wrapper {wrapper}: {str(error).splitlines()[0]}",
            "a wrapper is a folder or a hub name of a multimodal checkpoint",
            "correct it",
        ) from error
    theirs = getattr(config, "text_config", None)
    ignored = {"architectures", "dtype", "torch_dtype", "_name_or_path", "transformers_version", "model_type"}
    if theirs is None:
        raise OpsdError(
            f"--wrapper {wrapper}", "a wrapper is a multimodal checkpoint", "name one, e.g. the base that was published"
        )
    a, b = text_config.to_dict(), theirs.to_dict()
    different = sorted(k for k in a.keys() & b.keys() if k not in ignored and a[k] != b[k])
    if different:
        raise OpsdError(
            f"--wrapper {wrapper} around another text model ({', '.join(f'{k}: {a[k]!r} / {b[k]!r}' for k in different[:3])})",
            "the wrapper's text model is the one that was trained",
            "name the base of the trained model",
        )
    own = AutoModelForImageTextToText.from_pretrained(wrapper, dtype=torch.float32).state_dict()
    mine = {k.replace("model.", _WRAPPED, 1) if k.startswith("model.") else k: v for k, v in weights.items()}
    _require_keys([k for k in own if k.startswith(_WRAPPED) and k not in mine], [k for k in mine if k not in own], wrapper)
    return {**own, **mine}, config


@torch.no_grad()
def log_probs(model: nn.Module, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Log-probabilities [T, V] of each sequence's next tokens; float32, nats, on the CPU.

    The model moves to the accelerator if there is one: where flash-linear-attention is installed, a hybrid of transformers runs nowhere else.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    return [model(input_ids=torch.tensor([list(s)], device=device)).logits[0].float().log_softmax(-1).cpu() for s in sequences]


def divergence(trained: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Mean KL(trained || other) over all positions, nats a token."""
    p, q = torch.cat(list(trained)).double(), torch.cat(list(other)).double()
    d = p - q
    return float((p.exp() * (torch.expm1(-d) + d)).sum(-1).mean())  # every term at least 0: small values keep their digits


def coherence(
    model: nn.Module, prompts: Sequence[Sequence[int]], calls: Callable[[list[int]], int], max_new: int, pad: int
) -> Guard:
    """Whether greedy replies hold tool calls.

    Args:
        prompts: ids of whole prompts.
        calls: number of well-formed calls in a reply's ids.
        max_new: tokens of a reply, at most.
    """
    good = 0
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new, pad_token_id=pad
        )  # type: ignore[operator]
        good += calls(out[0, ids.shape[1] :].tolist()) > 0
    share = good / len(prompts)
    return Guard("coherence", share, COHERENT, share >= COHERENT, f"{good} of {len(prompts)} greedy replies hold a tool call")


def export(
    checkpoint: Path,
    out: Path,
    dtype: Dtype = "bfloat16",
    wrapper: str | None = None,
    coherent: Callable[[nn.Module, Any], Guard] | None = None,
) -> list[Guard]:
    """Writes a checkpoint as a model folder.

    Args:
        out: must not exist; it appears whole, with every guard passed, or not at all.
        wrapper: see :func:`wrapped`.
        coherent: the coherence guard on the exported model and its tokenizer; None: not run.

    Returns:
        The guards' verdicts, also in ``export.json`` of the folder.

    Raises:
        OpsdError: bad input, or a guard that did not pass.
    """
    checkpoint = of_model(checkpoint)
    if out.exists():
        raise OpsdError(f"{out} exists", "an export is written once", "name another folder, or remove it by hand")
    weights, guards = whole_weights(checkpoint), []
    tokenizer, config = tokenizer_and_config(checkpoint)
    adapted = any(".lora_" in k for k in weights)
    if adapted:
        rank, alpha = _stated(checkpoint / "lora_train_meta.json", "r", "lora_alpha")
        plain, largest = merged(weights, rank, alpha)
        guards.append(Guard("adapter_non_zero", largest, 0.0, largest > 0 and alpha > 0, "largest entry of lora_B"))
        trained = _adapted_model(config, weights, rank, alpha)
    else:
        plain = {k: v.float() for k, v in weights.items()}
        trained = load_into(config, plain, str(checkpoint))
    sequences = [tokenizer.encode(t, add_special_tokens=False) for t in TEXTS]
    before = log_probs(trained, sequences)
    del trained
    if wrapper is not None:
        plain, config = wrapped(plain, config, wrapper)
    model = load_into(config, plain, str(checkpoint)).to(getattr(torch, dtype))
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        model.save_pretrained(temporary)  # type: ignore[operator]
        tokenizer.save_pretrained(temporary)
        _files_of_the_base(temporary, checkpoint / "huggingface", wrapper)
        del model
        again, info = auto_class(config).from_pretrained(temporary, dtype=torch.float32, output_loading_info=True)
        _require_keys(sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), str(out))
        kl = divergence(before, log_probs(again.eval(), sequences))
        guards.append(
            Guard("parity", kl, PARITY[dtype], kl <= PARITY[dtype], f"KL(trained || exported), nats a token, {dtype}")
        )
        if coherent is not None:
            guards.append(coherent(again, tokenizer))
        write_json(
            temporary / "export.json", {"checkpoint": str(checkpoint), "dtype": dtype, "guards": [asdict(g) for g in guards]}
        )
        broken = [g for g in guards if not g.passed]
        if broken:
            raise OpsdError(
                "; ".join(f"guard {g.name}: {g.value:.3g} against {g.threshold:.3g} ({g.detail})" for g in broken),
                "an export that fails a guard is not written",
                "parity: write float32; adapter_non_zero: the adapter was never trained; coherence: the model does not act",
            )
        temporary.chmod(0o755)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return guards


def _files_of_the_base(out: Path, checkpoint: Path, wrapper: str | None) -> None:
    """What is no weight and no token, as it was: where replies end and how a base is sampled from, and a wrapper's processors, which its
    architecture is served with."""
    from transformers.utils import cached_file

    for source, names in ((str(checkpoint), (GENERATION,)), (wrapper, (GENERATION, *PROCESSORS))):
        for name in names if source is not None else ():
            found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
            if found is not None:
                shutil.copyfile(found, out / name)


def _adapted_model(config: Any, weights: dict[str, Tensor], rank: int, alpha: float) -> nn.Module:
    """The model with its adapters beside the base, as it was trained, by PEFT."""
    from peft import LoraConfig, get_peft_model

    modules = sorted({m["module"].removeprefix(_PEFT) for k in weights if (m := _LORA.fullmatch(k))})
    base = auto_class(config).from_config(config, dtype=torch.float32)
    lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, bias="none")
    model = get_peft_model(base, lora)
    result = _load(model, {k: v.float() for k, v in weights.items()}, "the adapted model")
    tied = config.get_text_config().tie_word_embeddings
    _require_keys(
        [k for k in result.missing_keys if not (tied and "lm_head" in k)], result.unexpected_keys, "the adapted model"
    )
    model.base_model.model.tie_weights()
    return model.eval()  # type: ignore[no-any-return]
