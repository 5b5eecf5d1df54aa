"""Time and peak memory of the loss-position head: exact divergences over the full vocabulary, forward and backward.

    python benchmarks/head.py [--one-pass 640 768] [--slice 11264 22528] [--kept 256 320 1024] [--repeat 5] [--no-others]
    python benchmarks/head.py --block 1024 512 --warps 1 2 4 --parts --kept --no-others

Reverse KL has two ways to the same numbers: one pass over logits that are made slice by slice (``distill.blocks_triton``; bf16 weights on
a GPU), and passes over a chunk's float32 logits, which are kept (everywhere else, and every other divergence), each in chunks of so many
loss positions; the slices of one pass are of so many tokens (of more in chunks of half the default's positions and fewer). ``--block``
and ``--warps`` are those of the statistics' kernel. ``--parts`` measures each part of one pass by itself.

Compared with the same loss in plain torch on full logits, and with the three matrix products that nothing can avoid:
student logits, teacher logits, gradient to the student's hidden states. Liger's fused JSD (``pip install liger-kernel``) is
compared with the head's JSD. Peak is above the inputs (hidden states and
both vocabulary weights). Without a GPU a small shape runs, whose numbers say nothing about the full one.

Shape suffixes: N loss positions, C of one chunk, S student and T teacher hidden size, V vocabulary.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import platform
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn

from verl_opsd.distill import dense
from verl_opsd.distill.chunk import ROWS, logits, one_pass
from verl_opsd.distill.head import HeadTask, LossPositionHead
from verl_opsd.distill.loss import LossSpec
from verl_opsd.distill.signal import Signal

GPU_SHAPE = {"n": 16384, "vocab": 248320, "student": 4096, "teacher": 5120}
CPU_SHAPE = {"n": 512, "vocab": 8192, "student": 256, "teacher": 320}


def measure(step: Callable[[], object], clear: Callable[[], object], device: torch.device, repeat: int) -> tuple[float, float]:
    """(median seconds, peak bytes above what was allocated before); one warm-up call. ``clear`` drops what a step leaves behind, its
    gradient, outside of what is timed. Bytes are NaN without a GPU."""
    step()
    clear()
    seconds: list[float] = []
    cuda = device.type == "cuda"
    peak = float("nan")
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeat):
        clear()
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if cuda:
        peak = torch.cuda.max_memory_allocated() - before
    return statistics.median(seconds), peak


def matmuls(hidden_NS: Tensor, teacher_NT: Tensor, weight_VS: Tensor, weight_VT: Tensor, chunk: int) -> None:
    """The three products alone, in the dtype of the inputs, chunk by chunk into one buffer."""
    logits_CV = hidden_NS.new_empty(chunk, weight_VS.shape[0])
    grad_NS = torch.empty_like(hidden_NS)
    for i in range(0, hidden_NS.shape[0], chunk):
        rows = slice(i, i + chunk)
        torch.mm(teacher_NT[rows], weight_VT.T, out=logits_CV)
        torch.mm(hidden_NS[rows], weight_VS.T, out=logits_CV)
        torch.mm(logits_CV, weight_VS, out=grad_NS[rows])


def eager(hidden_NS: Tensor, teacher_NT: Tensor, weight_VS: Tensor, weight_VT: Tensor, coef_N: Tensor) -> None:
    """The same loss as one would first write it: full logits, log_softmax, autograd."""
    hidden_NS = hidden_NS.detach().requires_grad_()
    with torch.no_grad():
        logq_NV = torch.log_softmax((teacher_NT @ weight_VT.T).float(), dim=-1)
    logp_NV = torch.log_softmax((hidden_NS @ weight_VS.T).float(), dim=-1)
    (coef_N * (logp_NV.exp() * (logp_NV - logq_NV)).sum(-1)).sum().backward()


def parts(
    hidden_NS: Tensor, teacher_NT: Tensor, weight_VS: Tensor, weight_VT: Tensor, chunk: int, width: int
) -> dict[str, Callable[[], object]]:
    """What one pass does, part by part: for the whole chunks, always with the first one's rows. In this order."""
    from verl_opsd.distill import blocks_triton

    (n, _), (vocab, _), device = hidden_NS.shape, weight_VS.shape, weight_VS.device
    slices = [slice(start, min(start + width, vocab)) for start in range(0, vocab, width)]
    blocks = blocks_triton.Blocks(chunk, vocab, device)
    pair = torch.zeros(2, chunk, width, device=device)
    one, index_N = torch.ones((), device=device), torch.arange(n, device=device)
    coef_C, grad_CS = one.repeat(chunk), torch.empty_like(hidden_NS[:chunk])

    def product(side: int, hidden_NH: Tensor, weight_VH: Tensor) -> None:
        for part in slices:
            logits(hidden_NH[:chunk], weight_VH[part], torch.float32, pair[side, :, : part.stop - part.start])

    def add() -> None:
        for part in slices:
            blocks.add(part.start, *pair[..., : part.stop - part.start])

    def often(step: Callable[[], object]) -> Callable[[], object]:
        return lambda: [step() for _ in range(n // chunk)]

    return {
        "student's logits": often(partial(product, 0, hidden_NS, weight_VS)),
        "teacher's logits": often(partial(product, 1, teacher_NT, weight_VT)),
        "statistics": often(add),
        "their combination": often(blocks.combine),
        "gradient": often(lambda: blocks.grad(coef_C, torch.bfloat16)),
        "gradient's product": often(lambda: torch.mm(blocks.prob_CV.view(torch.bfloat16), weight_VS, out=grad_CS)),
        "backward": lambda: torch.zeros_like(hidden_NS).index_add_(0, index_N, hidden_NS * one),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-pass", type=int, nargs="*", default=[640, 768])
    parser.add_argument("--slice", type=int, nargs="*", default=[11264, 22528])
    parser.add_argument("--block", type=int, nargs="*")
    parser.add_argument("--warps", type=int, nargs="*")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--kept", type=int, nargs="*", default=[256, 320, 1024])
    parser.add_argument("--others", action=argparse.BooleanOptionalAction, default=True, help="JSD, Liger, full logits too")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    shape = GPU_SHAPE if cuda else CPU_SHAPE
    if not cuda:
        print("no GPU here: a small shape on the CPU, to show that the script runs; no number below is a result")
    n, vocab = shape["n"], shape["vocab"]
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, columns: int, scale: float) -> Tensor:
        return (torch.randn(rows, columns, generator=generator, device=device) * scale).to(torch.bfloat16)

    weight_VS, weight_VT = random(vocab, shape["student"], 0.02), random(vocab, shape["teacher"], 0.02)
    hidden_NS, teacher_NT = random(n, shape["student"], 2.0), random(n, shape["teacher"], 2.0)
    coef_N = torch.full((n,), 1.0 / n, device=device)
    labels_N = torch.randint(vocab, (n,), generator=generator, device=device)
    head = LossPositionHead(shape["student"], vocab, bias=False, device="meta", dtype=torch.bfloat16)
    head.weight = nn.Parameter(weight_VS, requires_grad=False)
    hidden_1NS = hidden_NS[None].requires_grad_()

    def head_step(chunk: int, spec: LossSpec = LossSpec()) -> None:  # noqa: B008 (frozen)
        head.task = HeadTask(
            kind="loss",
            index_N=torch.arange(n, device=device),
            teacher=Signal(hidden_NH=teacher_NT, head_id="teacher"),
            teacher_weight_VH=weight_VT,
            coef_N=coef_N,
            loss=spec,
            chunk=chunk,
        )
        head(hidden_1NS).sum().backward()

    def clear() -> None:
        hidden_1NS.grad = None

    name = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    print(f"{name}, torch {torch.__version__}: N={n} V={vocab} Hs={shape['student']} Ht={shape['teacher']} bf16")
    print(f"{'':38} {'seconds':>9} {'x matmuls':>10} {'peak GB':>8}")
    floor = min(
        measure(partial(matmuls, hidden_NS, teacher_NT, weight_VS, weight_VT, min(c, n)), clear, device, args.repeat)[0]
        for c in (1024, 2048)
    )

    def row(label: str, step: Callable[[], object]) -> None:
        try:
            seconds, peak = measure(step, clear, device, args.repeat)
        except torch.OutOfMemoryError:
            print(f"{label:38} {'out of memory':>29}", flush=True)
            return
        print(f"{label:38} {seconds:9.4f} {seconds / floor:10.3f} {peak / 1e9:8.3f}", flush=True)

    print(f"{'three matmuls':38} {floor:9.4f} {1.0:10.3f}", flush=True)
    if one_pass(dense.REVERSE_KL, weight_VS, weight_VT):
        from verl_opsd.distill import blocks_triton

        ways = {
            "SLICE": args.slice,
            "BLOCK": args.block or [blocks_triton.BLOCK],
            "WARPS": args.warps or [blocks_triton.WARPS],
        }
        for chunk, *way in itertools.product(args.one_pass, *ways.values()):
            width, block, warps = way
            label = f"{chunk} x {width}, block {block}/{warps}"
            if width % block:
                print(f"{label:38} a slice is of whole blocks", flush=True)
                continue
            with mock.patch.multiple(blocks_triton, **dict(zip(ways, way, strict=True))):
                row(label, partial(head_step, chunk))
                for part, step in (
                    parts(hidden_NS, teacher_NT, weight_VS, weight_VT, chunk, width).items() if args.parts else ()
                ):
                    seconds = measure(step, clear, device, args.repeat)[0]
                    print(f"  {part:36} {seconds:9.4f} {seconds / floor:10.3f}", flush=True)
    else:
        print("one pass is not measured: it is taken with bf16 weights on a GPU")
    with mock.patch("verl_opsd.distill.chunk.one_pass", lambda *args: False):
        for chunk in args.kept:
            row(f"head, kept logits, chunk {chunk}", partial(head_step, chunk))
    if not args.others:
        return
    for chunk in args.kept:
        row(f"head, JSD(0.5), chunk {chunk}", partial(head_step, chunk, LossSpec(divergence="jsd", beta=0.5)))
    for spec in (LossSpec("forward_kl"), LossSpec("skewed_reverse_kl", skew=0.1), LossSpec("skewed_forward_kl", skew=0.1)):
        row(f"head, {spec.divergence}, chunk {ROWS}", partial(head_step, ROWS, spec))
    if cuda and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

        def liger_step() -> None:
            leaf_NS = hidden_NS.detach().requires_grad_()
            LigerFusedLinearJSD()(leaf_NS, weight_VS, teacher_NT, weight_VT, labels_N).backward()

        row("Liger, fused JSD(0.5)", liger_step)
    else:
        print(f"Liger's fused JSD is not measured: {'liger-kernel is not installed' if cuda else 'its kernels need a GPU'}")
    row("full logits, autograd", partial(eager, hidden_NS, teacher_NT, weight_VS, weight_VT, coef_N))
    if not cuda:
        print(f"process peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
