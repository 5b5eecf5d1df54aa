"""Trainer and rollout server at the end of a long sequence: frequencies that one of them rounds are nothing at early positions."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.workers.rollout.replica import TokenOutput

from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import make_tiny
from verl_opsd.rundir import RunDir
from verl_opsd.verl_adapter import guards


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    path = make_tiny(tmp_path_factory.mktemp("models") / "student")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


def distributions(model: Any, sequences: list[list[int]], positions: list[list[int]]) -> list[np.ndarray]:
    with torch.no_grad():
        hidden = [
            model.model(torch.tensor([ids])).last_hidden_state[0, places]
            for ids, places in zip(sequences, positions, strict=True)
        ]
        return [model.lm_head(h).log_softmax(-1).numpy() for h in hidden]


def token_logprobs(model: Any, sequences: list[list[int]], positions: list[list[int]]) -> list[np.ndarray]:
    found = distributions(model, sequences, positions)
    return [
        np.asarray([row[ids[p + 1]] for row, p in zip(rows, places, strict=True)], np.float64)
        for rows, ids, places in zip(found, sequences, positions, strict=True)
    ]


class Server:
    """Of our own by ``score_logprobs``, or as verl's by ``generate``; a Ray handle's form."""

    def __init__(self, model: Any, drawn: int | None = None):
        self._model, self._drawn, self.prompts = model, drawn, []
        self.score_logprobs = SimpleNamespace(remote=lambda s, p: distributions(model, s, p))
        self.adapter_report = SimpleNamespace(
            remote=lambda: {"kind": "full", "missing": [], "unexpected": [], "bound": 9, "changed": 0}
        )
        self.generate = SimpleNamespace(remote=self._generate)

    def _generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> TokenOutput:
        """Given tokens are scored, or the most probable ones drawn; only what it is asked for."""
        if "prompt_logprobs" in sampling_params:
            ours = token_logprobs(self._model, [prompt_ids], [list(range(len(prompt_ids) - 1))])[0]
            rows = {"prompt_ids": [[i] for i in prompt_ids[1:]] + [[0]], "prompt_logprobs": [[x] for x in ours] + [[0.0]]}
            return TokenOutput(token_ids=[0], log_probs=None, extra_fields=rows)
        assert sampling_params["ignore_eos"] and sampling_params["logprobs"]
        self.prompts.append(prompt_ids)
        ids, logprobs = torch.tensor([prompt_ids]), []
        cache, drawn = None, []
        for _ in range(sampling_params["max_tokens"] if self._drawn is None else self._drawn):
            with torch.no_grad():
                out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            row, cache = out.logits[0, -1].log_softmax(-1), out.past_key_values
            drawn.append(int(row.argmax()))
            logprobs.append(float(row.max()))
            ids = torch.tensor([drawn[-1:]])
        return TokenOutput(token_ids=drawn, log_probs=logprobs)


def run_of(
    path: Path, monkeypatch: pytest.MonkeyPatch, student: tuple[Any, Any], rounded: bool, backend: str, **server: Any
) -> Any:
    """A trainer of the student, whose frequencies were ``rounded`` to bfloat16, beside a server of the exact one."""
    model, tokenizer = student
    trained = copy.deepcopy(model)
    if rounded:
        trained.model.rotary_emb.inv_freq = trained.model.rotary_emb.inv_freq.bfloat16().float()
    handle = Server(model, **server)
    monkeypatch.setattr(guards.ray, "get", lambda x, timeout: x)
    awake = {"server"}  # beside which a long forward may not fit
    manager = SimpleNamespace(sleep_replicas=awake.clear, update_weights=lambda version: awake.add("server"))
    gates = SimpleNamespace(publish_kl_max=1e-5, publish_late_max=2e-5, publish_late_tokens=2048, publish_follow_min=0.5)
    group = SimpleNamespace(
        opsd_adapter_stats=lambda: [{"tensors": 0, "parameters": 9, "compute": "float32"}],
        opsd_logprobs=lambda s, p: [distributions(trained, s, p)],
        opsd_token_logprobs=lambda s, p: [token_logprobs(trained, s, p)] if len(s[0]) < 300 or not awake else [],
    )
    return SimpleNamespace(
        run_dir=RunDir(path),
        opsd=SimpleNamespace(gates=gates, contract=SimpleNamespace(context_length=4096)),
        config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name=backend))),
        actor_rollout_wg=group,
        checkpoint_manager=manager,
        awake=awake,
        llm_server_manager=SimpleNamespace(get_replicas=lambda: [SimpleNamespace(_server_handle=handle)]),
        tokenizer=tokenizer,
        global_steps=0,
        followed=None,
        handle=handle,
    )


@pytest.mark.parametrize("backend", ["opsd_embedded", "vllm"])
def test_rounded_frequencies_pass_early_positions_and_fail_late_ones(tmp_path, monkeypatch, student, backend):
    run = run_of(tmp_path, monkeypatch, student, True, backend)
    with pytest.raises(OpsdError, match="publish_late"):
        guards.after_publish(run, None)
    *_, early, line = map(json.loads, (tmp_path / "evidence.jsonl").read_text().splitlines())
    assert (early["gate"], early["verdict"], line["verdict"]) == ("publish_kl", "pass", "fail")
    assert early["value"] <= 1e-5 and line["value"] > 1e-4 and line["threshold"] == 2e-5
    assert line["detail"] == "server 0, version 0, the last 64 positions of 2048"


@pytest.mark.parametrize("backend", ["opsd_embedded", "vllm"])
def test_the_same_frequencies_pass_to_the_end_of_the_context(tmp_path, monkeypatch, student, backend):
    run = run_of(tmp_path, monkeypatch, student, False, backend)
    run.opsd.contract.context_length = 301
    guards.after_publish(run, None)
    found = map(json.loads, (tmp_path / "evidence.jsonl").read_text().splitlines())
    (line,) = [v for v in found if v["gate"] == "publish_late"]
    assert line["verdict"] == "pass" and line["value"] < 1e-9 and line["detail"].endswith("64 positions of 301")
    assert run.awake
    special = set(run.tokenizer.all_special_ids)
    for (
        prompt
    ) in run.handle.prompts:  # room for the reply within the context; the second half repeats the first; nothing but text
        assert len(prompt) == 301 - 64 and prompt[151:] == prompt[: 301 - 64 - 151] and not special & set(prompt)
        assert len(set(prompt[:151])) > 100


@pytest.mark.parametrize("drawn", [0, 63])
def test_a_server_that_ends_its_reply_early_is_refused(tmp_path, monkeypatch, student, drawn):
    run = run_of(tmp_path, monkeypatch, student, False, "vllm", drawn=drawn)
    run.opsd.contract.context_length = 100
    with pytest.raises(OpsdError, match=f"drew {drawn} tokens"):
        guards.after_publish(run, None)
