"""Tiny random models, rows and an eager reference for the engine's tests. Nothing here uses the code under test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from verl.utils import tensordict_utils as tu

V, H = 384, 48
_COMMON: dict[str, Any] = dict(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
)
_HYBRID: dict[str, Any] = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=12
)


def make_models(root: Path) -> None:
    """untied and tied Qwen3, a wider one (a teacher), a Qwen3.5 text hybrid, a multimodal
    checkpoint around it, and Granite, which scales its logits after the head."""
    configs = {
        "untied": Qwen3Config(**_COMMON, num_hidden_layers=3, tie_word_embeddings=False),
        "tied": Qwen3Config(**_COMMON, num_hidden_layers=3, tie_word_embeddings=True),
        "wide": Qwen3Config(**_COMMON | {"hidden_size": 80}, num_hidden_layers=2, tie_word_embeddings=False),
        "hybrid": Qwen3_5TextConfig(**_COMMON, **_HYBRID, num_hidden_layers=4, tie_word_embeddings=False),
        "granite": GraniteConfig(
            **{k: v for k, v in _COMMON.items() if k != "head_dim"}, num_hidden_layers=1, logits_scaling=3.0
        ),
    }
    words = {f"t{i}": i for i in range(V)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t2")), eos_token="t1", pad_token="t0", unk_token="t2"
    )
    for name, config in configs.items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        for p in model.parameters():
            if p.dim() > 1:
                p.data.mul_(4)  # so that distributions are far from uniform and from each other
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        if name == "hybrid":
            _around(model).save_pretrained(root / "multimodal")
            tokenizer.save_pretrained(root / "multimodal")


def _around(text: Any) -> Any:
    """A multimodal model that holds a text model's weights, as published Qwen3.5 checkpoints do."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": H}
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision))
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    return whole


def make_row(seed: int, loss_tokens: bool = True, per_turn: bool = False, brief: int = 6, coef: float | None = None) -> dict:
    """A trajectory of 2 or 3 turns with a brief after the second token of the teacher's view.

    Args:
        per_turn: one pass for each turn (up to its reply), otherwise one pass.
        brief: tokens of the brief; 0 for none.
        coef: the coefficient everywhere; None: random, a quarter of them exactly 0.
    """
    g = torch.Generator().manual_seed(seed)

    def ids(n: int) -> Tensor:
        return torch.randint(5, V, (n,), generator=g)

    def size(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    tokens, position, turn, ends = ids(size(4, 12)), [], [], []
    for t in range(size(2, 4)):
        tokens = torch.cat([tokens, ids(size(1, 5))])
        reply = ids(size(2, 6))
        position += range(len(tokens) - 1, len(tokens) - 1 + len(reply))
        turn += [t] * len(reply)
        tokens = torch.cat([tokens, reply])
        ends.append(len(tokens))
    privileged = torch.cat(
        [tokens[:2], torch.randint(5, V, (brief,), generator=torch.Generator().manual_seed(seed + 9000)), tokens[2:]]
    )
    if not loss_tokens:
        position, turn = [], []
    pos, turns = torch.tensor(position, dtype=torch.int64), torch.tensor(turn, dtype=torch.int64)
    if per_turn:
        passes = [privileged[: e + brief] for e in ends]
        starts = torch.tensor([0, *[len(p) for p in passes[:-1]]]).cumsum(0)
        view_pos = pos + brief + starts[turns]
    else:
        passes, view_pos = [privileged], pos + brief
    n = len(pos)
    weights = torch.rand(n, generator=g) * (torch.rand(n, generator=g) > 0.25) / 20
    return {
        "input_ids": tokens,
        "position_ids": torch.arange(len(tokens)),
        "loss_mask": torch.ones_like(tokens),
        "opsd_position": pos,
        "opsd_coef": weights if coef is None else torch.full((n,), coef),
        "opsd_anchor": torch.zeros(n),
        "opsd_behaviour": -4.0 - 4 * torch.rand(n, generator=torch.Generator().manual_seed(seed)),
        "opsd_reward": torch.zeros(n),
        "opsd_class": torch.zeros(n, dtype=torch.int64),
        "opsd_turn": turns,
        "opsd_view_ids": torch.cat(passes),
        "opsd_view_len": torch.tensor([len(p) for p in passes]),
        "opsd_view_pos": view_pos,
    }


def batch(rows: list[dict], packed: bool = True, micro: int = 2, dynamic: bool = False, **extra: Any) -> TensorDict:
    """Rows as the batch that a rank of verl gets; with the temperature of a rollout, at which nothing is measured."""
    data = TensorDict(
        {k: torch.nested.as_nested_tensor([r[k] for r in rows], layout=torch.jagged) for k in rows[0]}, batch_size=len(rows)
    )
    tu.assign_non_tensor(
        data,
        use_remove_padding=packed,
        use_dynamic_bsz=dynamic,
        micro_batch_size_per_gpu=micro,
        max_token_len_per_gpu=90,
        pad_token_id=0,
        **{"temperature": 0.5, **extra},
    )
    return data


def full(t: Tensor) -> Tensor:
    """A sharded tensor, whole."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def reference_model(path: str, lora: bool) -> Any:
    """The unsharded model with eager code of transformers and PEFT."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    if lora:
        model = get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear", bias="none")
        )
    return model


def eager(student: Any, teacher: Any, rows: list[dict], lora: bool) -> dict:
    """Loss, per-token divergences and gradients from full logits, one sequence at a time.

    The teacher is ``student`` with its adapters disabled by PEFT when ``lora``, else the model ``teacher``.
    """
    student.zero_grad()
    loss, divergences = torch.zeros(()), []
    for row in rows:
        row_kl = torch.zeros(len(row["opsd_position"]))
        own = student(input_ids=row["input_ids"][None]).logits[0]
        with torch.no_grad():
            if lora:
                with student.disable_adapter():
                    other = [
                        student(input_ids=p[None]).logits[0] for p in row["opsd_view_ids"].split(row["opsd_view_len"].tolist())
                    ]
                    base = student(input_ids=row["input_ids"][None]).logits[0]
            else:
                other = [
                    teacher(input_ids=p[None]).logits[0] for p in row["opsd_view_ids"].split(row["opsd_view_len"].tolist())
                ]
                base = teacher(input_ids=row["input_ids"][None]).logits[0]
        s = own[row["opsd_position"]].log_softmax(-1)
        t = torch.cat(other)[row["opsd_view_pos"]].log_softmax(-1)
        b = base[row["opsd_position"]].log_softmax(-1).detach()
        row_kl = (s.exp() * (s - t)).sum(-1)
        loss = loss + (row["opsd_coef"] * row_kl).sum() + (row["opsd_anchor"] * (s.exp() * (s - b)).sum(-1)).sum()
        divergences.append(row_kl.detach())
    loss.backward()
    grads = {k: p.grad.clone() for k, p in student.named_parameters() if p.grad is not None}
    return {"loss": float(loss), "divergence": torch.cat(divergences), "grads": grads}


def eager_sampled(student: Any, rows: list[dict], name: str, trust: tuple[float, float] = (0.0, 1e30)) -> dict:
    """A sampled-token estimator by its formula, from full logits; the teacher is ``student`` with its adapters disabled."""
    student.zero_grad()
    loss, values = torch.zeros(()), []
    for row in rows:
        token = row["input_ids"][row["opsd_position"] + 1][:, None]
        own = student(input_ids=row["input_ids"][None]).logits[0]
        with torch.no_grad(), student.disable_adapter():
            other = [student(input_ids=p[None]).logits[0] for p in row["opsd_view_ids"].split(row["opsd_view_len"].tolist())]
        logp = own[row["opsd_position"]].log_softmax(-1).gather(-1, token)[:, 0]
        logq = torch.cat(other)[row["opsd_view_pos"]].log_softmax(-1).gather(-1, token)[:, 0]
        ratio = (logp - row["opsd_behaviour"]).exp()
        inside = ((ratio >= trust[0]) & (ratio <= trust[1])).detach()
        value = {
            "k1": logp - logq,
            "k2": (logp - logq) ** 2 / 2,
            "k3": (logq - logp).exp() - 1 - (logq - logp),
            "policy_gradient": torch.where(inside, -ratio * (logq - logp).detach(), 0.0),
        }[name]
        loss = loss + (row["opsd_coef"] * value).sum()
        values.append(value.detach())
    loss.backward()
    grads = {k: p.grad.clone() for k, p in student.named_parameters() if p.grad is not None}
    return {"loss": float(loss), "divergence": torch.cat(values), "grads": grads}
