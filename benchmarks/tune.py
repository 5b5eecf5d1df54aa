"""Measures the block sizes of the delta rule's kernels at a real length, for verl_opsd/models/fla_configs.

    python benchmarks/tune.py --out verl_opsd/models/fla_configs/hopper [--tokens 32768]

Triton tunes each kernel for the first length that it meets and keys the result by shapes without the length. The convolution's files
are taken as they are: its kernels are compiled anew for every length's divisibility, which makes a search of them slow.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path

import torch
from transformers.models.qwen3_5 import modeling_qwen3_5
from workload import configs

from verl_opsd.models import gated_delta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    shipped = Path(gated_delta.__file__).parent / "fla_configs/hopper"
    for file in shipped.glob("causal_conv1d*.json"):
        (args.out / file.name).write_text(file.read_text())
    os.environ |= {"FLA_CONFIG_DIR": str(args.out), "FLA_CACHE_MODE": "full"}
    from fla.ops.utils import cache
    from fla.ops.utils.cache import AutotuneKey, CachedAutotuner

    cache.FLA_CACHE_MODE = cache.FlaCacheMode.FULL
    layer = modeling_qwen3_5.Qwen3_5GatedDeltaNet(configs(False)[0], 0).to("cuda", torch.bfloat16).requires_grad_(False)
    layer.__class__, layer.kernels = gated_delta.GatedDeltaNet, gated_delta.FlaKernels()
    x = torch.randn(1, args.tokens, layer.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    started = time.perf_counter()
    layer(x, cu_seq_lens_q=torch.tensor([0, args.tokens], device="cuda")).sum().backward()
    layer(x).sum().backward()
    with torch.no_grad():
        state = gated_delta.CarriedState()
        for part in x.split(args.tokens // 2, dim=1):
            layer(part, cache_params=state)
    torch.cuda.synchronize()
    print(f"tuned in {time.perf_counter() - started:.0f} s", flush=True)
    for tuner in (o for o in gc.get_objects() if isinstance(o, CachedAutotuner) and o.cache):
        name, entries = tuner.base_fn.__name__, {}
        for key, best in tuner.cache.items():
            config = {k: getattr(best, k) for k in ("kwargs", "num_warps", "num_stages", "num_ctas")}
            entries[AutotuneKey.key_hash(key)] = {"autotune_key": list(key), "config": config}
            print(f"{name} {key}: {config}", flush=True)
        text = json.dumps({"kernel_name": name, "autotune_entries": entries}, indent=1)
        (args.out / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
