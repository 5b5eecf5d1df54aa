"""What each choice of kernels and checkpointing gains, on layers of the 9B and a 4-layer cut of it.

    python benchmarks/layers.py [--context 32768] [--agree 16384 32768 65536]

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
from workload import Student, Table, as_batch, configs, free, timed, trajectory

from verl_opsd.models import checkpointing, kernels
from verl_opsd.models.gated_delta import FlaKernels, TorchKernels, torch_conv
from verl_opsd.planning.shape import ModelShape
from verl_opsd.verl_adapter.passes import jagged


class Operations:
    """Forward and backward of single operations."""

    def __init__(self, table: Table, device: torch.device):
        self.table, self.device = table, device

    def row(self, label: str, work: Callable[..., Tensor], leaves: Sequence[Tensor]) -> None:
        """Prints seconds of both, and bytes kept between them."""
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
            both, _ = timed(lambda: work(*inputs).backward(grad), [self.device], 1)
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

        ops.row("norm, Liger", lambda a, w: LigerRMSNormFunction.apply(a, w, 1e-6, 1.0, "gemma", False), [x, weight])
        ops.row("SiLU(gate) * up, Liger", lambda a, b: LigerSiLUMulFunction.apply(a, b), [up, other])
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

        ops.row(f"causal attention, {backend.name.lower()}", attend, [q, k, v])
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
        ops.row(f"{kind} layer, {label} ({counted:.2f} GB counted)", work, [x])


def agreement(
    table: Table, config: Any, choice: kernels.Choice, device: torch.device, context: int, turns: int, reply: int
) -> None:
    """Loss and gradient direction of one step in bf16 against torch in float32, on the same weights."""
    student = Student.of(config, device)
    generator = torch.Generator(device).manual_seed(3)
    for k, p in student.model.named_parameters():
        if "lora_B" in k:
            p.data.normal_(0.0, 0.01, generator=generator)
    reference = copy.deepcopy(student)
    reference.model.float()
    student.fuse(choice)
    kernels.install(reference.model, kernels.choose(kernels.Facts(False, False, None, None, None, False)), TorchKernels())
    batch = as_batch([trajectory(context, turns, reply, 0, config.vocab_size)])
    n, seed = turns * reply, torch.Generator(device).manual_seed(4)
    signal = 2 * torch.randn(n, config.hidden_size, generator=seed, device=device).bfloat16()
    head_VH = student.head.weight.detach().roll(1, 0)
    results = []
    for one, dtype in ((student, torch.bfloat16), (reference, torch.float32)):
        checkpointing.apply(one.model, checkpointing.everything(config.num_hidden_layers))
        free()
        loss = one.backward(batch | {"opsd_signal": jagged([signal.to(dtype)])}, head_VH.to(dtype), dtype)
        results.append((loss, torch.cat([p.grad.flatten().cpu() for p in one.model.parameters() if p.grad is not None])))
        one.optimizer.zero_grad()
    (loss, grad), (want, want_grad) = results
    cosine = float(torch.cosine_similarity(grad.double(), want_grad.double(), dim=0))
    table.say(
        f"{context:8} loss {loss:.6f} against {want:.6f}: {abs(loss / want - 1):.1e} relative; gradient cosine {cosine:.6f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--agree", type=int, nargs="*", default=[16384, 32768, 65536])
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
    operations(table, device, config, args.context)
    student = Student.of(config, device)
    layers(table, student, args.context, "transformers")
    student.fuse(choice)
    layers(table, student, args.context, "fused")
    del student
    for context in args.agree:
        free()
        turns, reply = (4, 5) if args.tiny else (60, 30)
        try:
            agreement(table, config, choice, device, context, turns, reply)
        except torch.OutOfMemoryError as error:
            table.say(f"{context:8} float32 reference out of memory: {str(error)[:90]}")


if __name__ == "__main__":
    main()
