"""Runs on every rank: builds engines and measures; rank 0 writes the numbers, and the tests judge them.

    python run.py RANK WORLD PORT MODELS OUT CASE...

A case is a function ``case_*`` of ``cases_*.py``. It is collective, and its return value (numbers, lists, strings) goes to
``OUT`` as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from typing import Any

import cases_activations
import cases_arms
import cases_composed
import cases_controls
import cases_copies
import cases_device
import cases_numbers
import cases_parity
import cases_recorded
import cases_scoring
import cases_sequence
import cases_workers
import torch
import torch.distributed as dist
from ranks import OUT, RANK, WORLD

from verl_opsd.verl_adapter.worker import select_engine


def main() -> None:
    os.environ.update(RANK=str(RANK), WORLD_SIZE=str(WORLD), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3])
    os.environ["WG_BACKEND"] = "ray"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD, timeout=timedelta(seconds=60))
    select_engine()
    modules = (
        cases_parity,
        cases_scoring,
        cases_arms,
        cases_composed,
        cases_activations,
        cases_controls,
        cases_copies,
        cases_numbers,
        cases_workers,
        cases_device,
        cases_sequence,
        cases_recorded,
    )
    cases = {k.removeprefix("case_"): v for m in modules for k, v in vars(m).items() if k.startswith("case_")}
    results: dict[str, Any] = {}
    for name in sys.argv[6:]:
        started = time.time()
        try:
            results[name] = cases[name]()
        except BaseException:
            results[name] = {"traceback": traceback.format_exc()}
            print(f"rank {RANK} case {name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        results[name]["seconds"] = round(time.time() - started, 2)
        if RANK == 0:
            with open(OUT, "w") as f:
                json.dump(results, f)
        if "traceback" in results[name]:
            os._exit(1)  # ranks may no longer agree about where they are
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
