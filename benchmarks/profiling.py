"""Where a device's time goes: kernels of one run, by what they are for."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

#: Kind of a kernel by its name; the first that fits.
KINDS = (
    ("vocabulary head", r"_block_kernel|_combine_kernel|_grad_kernel|_norms_kernel|_kl_grad_kernel"),
    (
        "attention, backward",
        r"(flash|fmha|attention|sdpa).*(bwd|bprop|backward)|(bwd|bprop|backward).*(flash|fmha|attention|sdpa)",
    ),
    ("attention, forward", r"flash|fmha|attention|sdpa"),
    ("convolution", r"causal_conv1d|conv1d"),
    ("delta rule, backward", r"(chunk|delta|prepare_wy|l2norm|kkt|w_u).*bwd"),
    ("delta rule, forward", r"chunk_|delta|recompute_w_u|l2norm|kkt|solve_tril|cumsum"),
    ("norms and gates", r"rms_norm|layer_norm|swiglu|silu|_rms|sigmoid_gate_kernel"),
    ("matrix products", r"gemm|nvjet|xmma|cutlass|cublas|splitk"),
    ("optimizer", r"multi_tensor|adam"),
    ("copies between host and device", r"memcpy (htod|dtoh)"),
    ("elementwise, copies, sums", r"elementwise|copy|memcpy|memset|cat|reduce|index|triton_|fill|gather|scatter|join_kernel"),
)


def kind_of(kernel: str) -> str:
    """What a kernel is for."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), "other")


def where(work: Callable[[], Any], kernels: int = 12) -> list[str]:
    """A table of one run of ``work``: milliseconds and calls by kind, then the ``kernels`` that take most, then what no kernel covers."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    rows = [(e.key, e.self_device_time_total / 1e3, e.count) for e in found.key_averages() if e.self_device_time_total > 0]
    busy = sum(ms for _, ms, _ in rows)
    total: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name, ms, count in rows:
        total[kind_of(name)] += ms  # type: ignore[assignment]
        calls[kind_of(name)] += count
    lines = [f"{kind:34} {ms:10.1f} ms {ms / busy:6.1%} {calls[kind]:8} calls" for kind, ms in total.most_common()]
    lines.append(f"{'all kernels':34} {busy:10.1f} ms of {1e3 * wall:.1f} ms")
    largest = sorted(rows, key=lambda row: -row[1])[:kernels]
    return lines + [f"  {ms:10.1f} ms {count:7} x {name[:110]}" for name, ms, count in largest]
