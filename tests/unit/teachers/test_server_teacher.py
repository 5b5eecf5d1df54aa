"""The server teacher against a stand-in server on loopback: its numbers against full logits, the probe's refusals, retries, limits."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from logprob_server import make
from transformers import AutoModelForCausalLM

from verl_opsd.distill import divergence, support
from verl_opsd.errors import InfraFault, OpsdError
from verl_opsd.models.tiny import make_tiny
from verl_opsd.teachers import server
from verl_opsd.teachers.base import Pass, Voice, common, on_the_wire
from verl_opsd.teachers.server import ServerTeacher

V = 2048


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "teacher", seed=5, hidden_size=32)


@pytest.fixture(scope="module")
def served(path: Path) -> Iterator[Callable[[str], str]]:
    """``served(fault)``: url of a running server with that fault; one a fault."""
    running: dict[str, tuple[uvicorn.Server, threading.Thread, str]] = {}

    def get(fault: str = "") -> str:
        if fault not in running:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
            one = uvicorn.Server(uvicorn.Config(make(str(path), fault), host="127.0.0.1", port=port, log_level="error"))
            thread = threading.Thread(target=one.run, daemon=True)
            thread.start()
            while not one.started:
                time.sleep(0.01)
            running[fault] = (one, thread, f"http://127.0.0.1:{port}")
        return running[fault][2]

    yield get
    for one, thread, _ in running.values():
        one.should_exit = True
        thread.join(timeout=10)


def ids_of(length: int, seed: int) -> torch.Tensor:
    return torch.randint(V, (length,), generator=torch.Generator().manual_seed(seed))


def a_row() -> list[Pass]:
    """Two passes, slots in a mixed order."""
    return [
        Pass(0, torch.tensor([2, 0]), ids_of(20, 1), torch.tensor([3, 17])),
        Pass(0, torch.tensor([1, 3]), ids_of(31, 2), torch.tensor([0, 28])),
    ]


def scored(url: str, path: Path, top_k: int, row: list[Pass], **options: Any) -> Any:
    async def run() -> Any:
        teacher = ServerTeacher(url, str(path), "t", top_k, V, **options)
        await teacher.probe()
        return await teacher.score(row), teacher

    return asyncio.run(run())


def full_logprobs(path: Path, row: list[Pass]) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, V] by slot, and the sampled tokens, from a plain forward."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    out, labels = torch.zeros(4, V), torch.zeros(4, dtype=torch.int64)
    for p in row:
        with torch.no_grad():
            out[p.slots_N] = model(input_ids=p.ids_T[None]).logits[0, p.index_N].log_softmax(-1)
        labels[p.slots_N] = p.ids_T[p.index_N + 1]
    return out, labels


@pytest.mark.parametrize("top_k", [0, 1, 20])
def test_signal_is_the_top_k_of_full_logits(served: Callable[[str], str], path: Path, top_k: int) -> None:
    row = a_row()
    signal, teacher = scored(served(""), path, top_k, row)
    logq_NV, labels_N = full_logprobs(path, row)
    assert signal.form == "support" and tuple(signal.ids_NK.shape) == (4, top_k + 1) and teacher.found.max_length == 4096
    support.check_ids(signal.ids_NK, labels_N, V)
    for n in range(4):
        kept = [i for i in signal.ids_NK[n].tolist() if i >= 0]
        assert set(kept) == {int(labels_N[n]), *logq_NV[n].topk(top_k).indices.tolist()}
        assert torch.allclose(signal.logprobs_NK[n, : len(kept)], logq_NV[n, kept], atol=1e-5)
        rest = [i for i in range(V) if i not in kept]
        assert float(signal.tail_N[n]) == pytest.approx(float(logq_NV[n, rest].logsumexp(-1)), abs=1e-4)
    if top_k:  # the very loss that an exact teacher has on its top k
        logp_NV = torch.randn(4, V, generator=torch.Generator().manual_seed(9)).log_softmax(-1)
        ids = support.support_ids("teacher_topk", logp_NV, logq_NV, labels_N, top_k)
        want = divergence.reverse_kl(support.with_tail(logp_NV, ids), support.with_tail(logq_NV, ids))
        given = torch.cat([signal.logprobs_NK, signal.tail_N[:, None]], -1)
        got = divergence.reverse_kl(support.with_tail(logp_NV, signal.ids_NK), given)
        assert torch.allclose(got, want, atol=1e-4)


def test_a_signal_goes_through_one_tensor(served: Callable[[str], str], path: Path) -> None:
    signal, teacher = scored(served(""), path, 3, a_row())
    exact = Voice("d", "exact", 4, torch.bfloat16)
    width, dtype = common([teacher.voice, exact])
    assert (width, dtype) == (9, torch.float32) and common([exact]) == (4, torch.bfloat16)
    back = teacher.voice.unpack(on_the_wire(teacher.voice.pack(signal), width + 2, dtype))
    assert torch.equal(back.ids_NK, signal.ids_NK) and torch.equal(back.logprobs_NK, signal.logprobs_NK)
    assert torch.equal(back.tail_N, signal.tail_N)
    hidden = torch.randn(5, 4).bfloat16()
    again = exact.unpack(on_the_wire(hidden, width, dtype))
    assert torch.equal(again.hidden_NH, hidden) and again.hidden_NH.dtype == torch.bfloat16 and again.head_id == "d"


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("none", "returns no prompt_logprobs"),
        ("extra", "answers 29 ids with 30 entries"),
        ("few", "where 5 and the given one were asked for"),
        ("later", "differ by .* nats with what follows"),
        ("large", "sum to"),
    ],
)
def test_a_server_that_can_not_is_refused_by_the_probe(
    served: Callable[[str], str], path: Path, fault: str, named: str
) -> None:
    with pytest.raises(OpsdError, match=named):
        scored(served(fault), path, 5, a_row())


@pytest.mark.parametrize(
    ("models", "completion", "named"),
    [
        ("<html>", None, "no JSON object"),
        ("[]", None, "no JSON object"),
        ("{}", None, "lists no models"),
        ('{"data": [{"name": "m"}]}', None, "lists no models"),
        ('{"data": []}', None, "serves \\[\\]"),
        (None, "3", "no JSON object"),
        (None, '{"choices": {"0": 1}}', "returns no prompt_logprobs"),
        (None, '{"choices": [7]}', "returns no prompt_logprobs"),
        (None, '{"choices": [{"prompt_logprobs": ["x", "y"]}]}', "answers 29 ids with 2 entries"),
        (None, lambda ids: [None, *([str(i)] for i in ids[1:])], "lack the given id"),
        (None, lambda ids: [None, *({str(i): {"logprob": None}, "5": {"logprob": -1}} for i in ids[1:])], "a number"),
        (None, lambda ids: [None, *({str(i): -1.0} for i in ids[1:])], "a number"),
        (None, lambda ids: [None, *({str(i): {"logprob": float("nan")}} for i in ids[1:])], "sum to"),
    ],
)
def test_replies_of_another_form_are_refused(models: str | None, completion: Any, named: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, text=models or '{"data": [{"id": "m"}]}')
        if isinstance(completion, str):
            return httpx.Response(200, text=completion)
        entries = completion(json.loads(request.content)["prompt"])
        return httpx.Response(200, text=json.dumps({"choices": [{"prompt_logprobs": entries}]}))

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    with pytest.raises(OpsdError, match=named):
        asyncio.run(ServerTeacher("http://x", "m", "t", 1, V, client=client).probe())


def test_failed_requests_are_sent_again(served: Callable[[str], str], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "wait_exponential", lambda *a, **k: lambda state: 0.0)
    row = a_row()
    signal, _ = scored(served("flaky"), path, 2, row, requests=1)
    want, _ = scored(served(""), path, 2, row)
    assert torch.equal(signal.ids_NK, want.ids_NK) and torch.equal(signal.logprobs_NK, want.logprobs_NK)


@pytest.mark.parametrize(("requests", "deaths"), [(1, 0), (3, 0), (3, 3), (3, 4)])
def test_a_server_short_of_memory(requests: int, deaths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of prompts are in no server's memory profile. No more requests are under way than were allowed, none is longer than
    what is scored; an engine that died and came back scores the same row, one that stays dead is a fault that holds its own words."""
    monkeypatch.setattr(server, "wait_exponential", lambda *a, **k: lambda state: 0.0)
    now, most, lengths, died = 0, 0, [], 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal now, most, died
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        ids = json.loads(request.content)["prompt"]
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.002)
        now -= 1
        if len(ids) == 12 and died < deaths:
            died += 1
            return httpx.Response(500, text="EngineDeadError: CUDA out of memory")
        lengths.append(len(ids))
        entries = [{str(i): {"logprob": -1 - i % 7 / 10}, str((i + 1) % V): {"logprob": -3.0}} for i in ids[1:]]
        return httpx.Response(200, json={"choices": [{"prompt_logprobs": [None, *entries]}]})

    row = [Pass(0, torch.tensor([n]), ids_of(40, n), torch.tensor([10 + n])) for n in range(6)]
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    if deaths == server.ATTEMPTS:
        with pytest.raises(InfraFault, match="EngineDeadError") as caught:
            scored("http://x", Path("m"), 1, row, requests=requests, client=client)
        assert caught.value.kind == "teacher_died"
        return
    signal, _ = scored("http://x", Path("m"), 1, row, requests=requests, client=client)
    assert most == requests and died == deaths
    assert sorted(lengths[2:]) == [12, 13, 14, 15, 16, 17]  # after the probe's two
    labels = torch.stack([p.ids_T[p.index_N + 1][0] for p in row])
    assert torch.equal(signal.ids_NK[:, 0], labels) and torch.allclose(signal.logprobs_NK[:, 0], -1 - labels % 7 / 10)


def test_a_server_that_is_not_there_is_a_fault(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "wait_exponential", lambda *a, **k: lambda state: 0.0)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}"
    with pytest.raises(InfraFault, match="4 requests to") as caught:
        scored(url, path, 2, a_row())
    assert caught.value.kind == "teacher_died"


def test_what_the_server_does_not_take_is_refused(served: Callable[[str], str], path: Path) -> None:
    long = [Pass(0, torch.tensor([0]), ids_of(64, 3), torch.tensor([62]))]
    with pytest.raises(OpsdError, match="a teacher view of 64 tokens for teacher t with a context of 63"):
        scored(served("short"), path, 1, long)
    with pytest.raises(OpsdError, match="same ids"):
        scored(served(""), path, 1, [Pass(0, torch.tensor([0]), torch.tensor([1, V, 2]), torch.tensor([0]))])


def test_tail_that_rounding_hides(path: Path) -> None:
    teacher = ServerTeacher("http://x", "m", "t", 1, V)
    assert teacher._tail(1.0000001, 2) == pytest.approx(math.log(2.0**-24))
    assert teacher._tail(0.75, 2) == pytest.approx(math.log(0.25)) and teacher._tail(0.9999999, V) == -math.inf


def test_hidden_tails_are_counted(path: Path) -> None:
    """Of three scored positions two, whose kept tokens have all the mass that float32 tells; what the probe saw does not count."""

    def entry(sampled: float, other: float) -> dict[str, Any]:
        return {"5": {"logprob": math.log(sampled)}, "7": {"logprob": math.log(other)}}

    class Told(ServerTeacher):
        async def _logprobs(self, model: str, ids: list[int]) -> list[Any]:
            return [None, entry(0.75, 0.25), entry(0.5, 0.25), entry(1e-30, 1.0)]

    teacher = Told("http://x", "m", "t", 1, V)
    p = Pass(0, torch.arange(3), torch.full((4,), 5), torch.arange(3))
    signal = asyncio.run(teacher._score_pass("m", p))
    assert signal.tail_N is not None
    assert signal.tail_N.tolist() == pytest.approx([math.log(2.0**-24), math.log(0.25), math.log(2.0**-24)])
    assert (teacher.positions, teacher.floored) == (3, 2)
