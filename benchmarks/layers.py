"""What each choice of kernels and checkpointing gains, on layers of the 9B and a 4-layer cut of it.

    python benchmarks/layers.py [--context 32768] [--agree 16384 32768 65536] [--parts operations layers agree]

Tables: the gradient check of the delta rule; single operations (seconds forward and backward) in torch, compiled, and fused; attention
backends; whole layers in transformers' code and in this project's, with the bytes they keep beside those that planning/shape.py counts;
loss and gradient of a 4-layer cut in bf16 against torch in float32. ``--tiny`` runs the same code with small shapes anywhere.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from workload import Student, Table, as_batch, configs, free, timed, trajectory

from verl_opsd.models import checkpointing, kernels
from verl_opsd.models.attention import causal
from verl_opsd.models.gated_delta import FlaKernels, TorchKernels, torch_conv
from verl_opsd.planning.shape import ModelShape
from verl_opsd.verl_adapter.passes import jagged


class Operations:
    """Forward and backward of single operations."""

    def __init__(self, table: Table, device: torch.device):
        self.table, self.device = table, device

    def row(self, label: str, work: Callable[..., Tensor], leaves: Sequence[Tensor], trained: Sequence[Tensor] = ()) -> None:
        """Prints seconds of both, and bytes kept between them. Gradients are those of ``leaves`` and of ``trained``, weights in ``work``."""
        free()
        try:
            inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in leaves]
            grad = torch.randn_like(work(*inputs))
            forward, _ = timed(lambda: work(*inputs), [self.device], 1)
            cuda = self.device.type == "cuda"
            before = torch.cuda.memory_allocated() if cuda else 0
            out = work(*inputs)
            kept = (torch.cuda.memory_allocated() - before if cuda else 0) - out.numel() * out.element_size()
            del out
            # Not backward(): from the second run on it would add to the first one's gradients, which takes as long as some operations.
            asked = [x for x in inputs if x.requires_grad] + list(trained)
            both, _ = timed(lambda: torch.autograd.grad(work(*inputs), asked, grad), [self.device], 1)
            self.table.say(f"{label:44} {1e3 * forward:9.2f} {1e3 * (both - forward):9.2f} {kept / 1e9:8.2f}")
        except Exception as error:
            self.table.say(f"{label:44} failed: {type(error).__name__}: {str(error)[:120]}")


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm with weight 1 + w, as transformers writes it."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight.float())).type_as(x)


def gate(a: Tensor, b: Tensor) -> Tensor:
    """SiLU(a) * b."""
    return F.silu(a) * b


def operations(table: Table, device: torch.device, config: Any, context: int) -> None:
    """Each operation alone, at ``context`` tokens."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    ops, cuda = Operations(table, device), device.type == "cuda"
    shape = ModelShape.of(config)
    table.say(f"{'operation':44} {'fwd ms':>9} {'bwd ms':>9} {'kept GB':>8}")
    x, weight = random(1, context, shape.hidden), random(shape.hidden)
    up, other = random(1, context, shape.intermediate), random(1, context, shape.intermediate)
    mixed = 2 * shape.linear_keys + shape.linear_values
    conv_x, conv_w = random(1, context, mixed), random(mixed, shape.conv_width)
    ops.row("norm, torch", norm, [x, weight])
    ops.row("SiLU(gate) * up, torch", gate, [up, other])
    ops.row("convolution, torch", lambda a: torch_conv(a, conv_w, None, None), [conv_x])
    if cuda:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        from verl_opsd.models.gates_triton import GatedNorm, SiluProduct

        ops.row("norm, Liger", lambda a, w: LigerRMSNormFunction.apply(a, w, 1e-6, 1.0, "gemma", False), [x, weight])
        ops.row("SiLU(gate) * up, Liger", lambda a, b: LigerSiLUMulFunction.apply(a, b), [up, other])
        ops.row("SiLU(gate) * up, ours", lambda a, b: SiluProduct.apply(a, b), [up, other])
        rows, scale = random(context * shape.linear_value_heads, shape.linear_value_dim), random(shape.linear_value_dim)
        ops.row("gated norm, ours", lambda a, b: GatedNorm.apply(a, b, scale, 1e-6), [rows, rows.clone()])
        ops.row("convolution, fla", lambda a: FlaKernels().conv(a, conv_w, None, None), [conv_x])
    q = random(1, shape.heads, context, shape.head_dim)
    k, v = (random(1, shape.kv_heads, context, shape.head_dim) for _ in range(2))
    backends = (
        (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION) if cuda else (SDPBackend.MATH,)
    )
    for backend in backends:

        def attend(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel([backend]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def repeated(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel([backend]):
                k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        ops.row(f"causal attention, {backend.name.lower()}", attend, [q, k, v])
        ops.row("the same, keys repeated", repeated, [q, k, v])
    late = q[:, :, context // 2 :]
    ops.row("causal attention of the second half", lambda q, k, v: causal(q, k, v, [0, q.shape[2]], None, 0.0), [late, k, v])
    ops.row("causal attention, as it is chosen", lambda q, k, v: causal(q, k, v, [0, context], None, 0.0), [q, k, v])
    rule = FlaKernels() if cuda else TorchKernels()
    heads = [random(1, context, shape.linear_key_heads, shape.linear_key_dim) for _ in range(2)]
    values = random(1, context, shape.linear_value_heads, shape.linear_value_dim)
    decay = -F.softplus(torch.randn(1, context, shape.linear_value_heads, device=device))
    beta = torch.rand(1, context, shape.linear_value_heads, device=device).bfloat16()
    ops.row(
        f"delta rule, {rule.name}",
        lambda q, k, v, d, b: rule.delta(q, k, v, d, b, None, None, False)[0],
        [*heads, values, decay, beta],
    )
    if cuda:
        ops.row("norm, compiled", torch.compile(norm), [x, weight])
        ops.row("SiLU(gate) * up, compiled", torch.compile(gate), [up, other])


def layers(table: Table, student: Student, context: int, label: str) -> None:
    """One layer of each kind, not checkpointed."""
    base = student.model.get_base_model().model
    ops = Operations(table, student.device)
    places = torch.arange(context, device=student.device)[None]
    x = torch.randn(1, context, base.config.hidden_size, device=student.device).bfloat16()
    rotary = base.rotary_emb(x, places.expand(3, 1, -1))
    for kind in ("linear_attention", "full_attention"):
        layer = base.layers[base.config.layer_types.index(kind)]
        layer.gradient_checkpointing = False

        def work(a: Tensor, layer: Any = layer) -> Tensor:
            with torch.autocast(student.device.type, dtype=torch.bfloat16):
                out = layer(a, position_embeddings=rotary, position_ids=places)
            return out[0] if isinstance(out, tuple) else out

        counted = context * (student.shape.kept_bytes(kind) - student.shape.boundary_bytes()) / 1e9
        trained = [p for p in layer.parameters() if p.requires_grad]
        ops.row(f"{kind} layer, {label} ({counted:.2f} GB counted)", work, [x], trained)


def by_definition(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention as transformers' interface, in plain products; a block of queries at a time, made again in backward."""
    groups, block = query.shape[1] // key.shape[1], 1024
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))

    def part(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        scores = scaling * q @ k.transpose(2, 3)
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1 + start)
        return scores.masked_fill(later, -torch.inf).softmax(-1) @ v

    out = []
    for start in range(0, query.shape[2], block):
        end = min(start + block, query.shape[2])
        out.append(checkpoint(part, query[:, :, start:end], key[:, :, :end], value[:, :, :end], start, use_reentrant=False))
    return torch.cat(out, dim=2).transpose(1, 2), None


def agreement(
    table: Table, config: Any, choice: kernels.Choice, device: torch.device, context: int, turns: int, reply: int
) -> None:
    """Loss and gradient direction of one step in bf16 against torch in float32, on the same weights."""
    student = Student.of(config, device)
    generator = torch.Generator(device).manual_seed(3)
    for k, p in student.model.named_parameters():
        if "lora_B" in k:
            p.data.normal_(0.0, 0.01, generator=generator)
    plain, reference = copy.deepcopy(student), copy.deepcopy(student)
    reference.model.float()
    student.fuse(choice)
    kernels.install(reference.model, kernels.choose(kernels.Facts(False, False, None, None, None, False)), TorchKernels())
    ALL_ATTENTION_FUNCTIONS.register("by_definition", by_definition)
    ALL_MASK_ATTENTION_FUNCTIONS.register("by_definition", lambda *args, **kwargs: None)
    reference.model.get_base_model().set_attn_implementation("by_definition")
    batch = as_batch([trajectory(context, turns, reply, 0, config.vocab_size)])
    n, seed = turns * reply, torch.Generator(device).manual_seed(4)
    signal = 2 * torch.randn(n, config.hidden_size, generator=seed, device=device).bfloat16()
    head_VH = student.head.weight.detach().roll(1, 0)
    results = []
    for one, dtype in ((student, torch.bfloat16), (plain, torch.bfloat16), (reference, torch.float32)):
        checkpointing.apply(one.model, checkpointing.everything(config.num_hidden_layers))
        free()
        loss = one.backward(batch | {"opsd_signal": jagged([signal.to(dtype)])}, head_VH.to(dtype), dtype)
        results.append((loss, torch.cat([p.grad.flatten().cpu() for p in one.model.parameters() if p.grad is not None])))
        one.optimizer.zero_grad()
    (loss, grad), (_, plain_grad), (want, want_grad) = results
    cosine, plainly = (float(torch.cosine_similarity(g.double(), want_grad.double(), dim=0)) for g in (grad, plain_grad))
    table.say(
        f"{context:8} loss {loss:.6f} against {want:.6f}: {abs(loss / want - 1):.1e} relative; gradient cosine of plain "
        f"transformers in bf16 {plainly:.6f}, ours: gradient cosine {cosine:.6f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--agree", type=int, nargs="*", default=[16384, 32768, 65536])
    parser.add_argument("--parts", nargs="+", default=["operations", "layers", "agree"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    table, cuda = Table(args.out), torch.cuda.is_available() and not args.tiny
    if args.tiny:
        args.context, args.agree = 130, [96, 130]
    device = torch.device("cuda" if cuda else "cpu")
    facts = kernels.Facts.of_this_process() if cuda else kernels.Facts(False, False, None, None, None, False)
    choice = kernels.choose(facts)
    table.say(
        f"# {torch.cuda.get_device_name() if cuda else 'CPU'}, torch {torch.__version__}, transformers {transformers.__version__}; {facts}"
    )
    table.say(f"# {choice}")
    config = configs(args.tiny)[0]
    config.num_hidden_layers = 4
    config.layer_types = config.layer_types[:4]
    rule = FlaKernels() if choice.delta == "fla" else TorchKernels()
    errors = kernels.check(config, device, torch.bfloat16, rule)
    table.say("gradient check: " + ", ".join(f"{k} {v:.1e}" for k, v in errors.items()))
    if "operations" in args.parts:
        operations(table, device, config, args.context)
    if "layers" in args.parts:
        student = Student.of(config, device)
        layers(table, student, args.context, "transformers")
        student.fuse(choice)
        layers(table, student, args.context, "fused")
        del student
    for context in args.agree if "agree" in args.parts else []:
        free()
        turns, reply = (4, 5) if args.tiny else (60, 30)
        try:
            agreement(table, config, choice, device, context, turns, reply)
        except torch.OutOfMemoryError as error:
            table.say(f"{context:8} float32 reference out of memory: {str(error)[:90]}")


if __name__ == "__main__":
    main()
