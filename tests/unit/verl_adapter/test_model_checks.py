"""`opsd doctor --model`: a good model and server pass, and each fault is found by its own check."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest
import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_opsd.cli.main import main
from verl_opsd.contract import EvalContract
from verl_opsd.models.tiny import ensure_tiny
from verl_opsd.paths import cache_dir
from verl_opsd.verl_adapter import model_checks
from verl_opsd.verl_adapter.model_checks import endpoint_checks, lora_checks, tokenizer_checks

CONTRACT = EvalContract(max_tokens=64, context_length=4096)


@pytest.fixture(scope="module")
def tiny() -> str:
    return str(ensure_tiny(cache_dir() / "models"))


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory) -> str:
    """An adapter with effect."""
    torch.manual_seed(0)
    net = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), LoraConfig(r=4, target_modules="all-linear"))
    for name, p in net.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    folder = tmp_path_factory.mktemp("adapter")
    net.save_pretrained(folder)
    return str(folder)


def by_name(findings) -> dict:
    return {name: (ok, detail) for name, ok, detail in findings}


def changed(tiny: str, folder, change) -> str:
    """A copy of the tiny student whose tokenizer was changed."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    change(tokenizer)
    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_good_model_passes(tiny):
    found = by_name([*tokenizer_checks(tiny, CONTRACT), *lora_checks(tiny, "all-linear")])
    assert {name: ok for name, (ok, _) in found.items()} == dict.fromkeys(
        ("chat template and reasoning", "tool parser round trip", "end tokens", "exact ids", "LoRA targets"), True
    )
    assert "14 of 15 linear modules" in found["LoRA targets"][1]  # two layers of seven, and the head


def test_a_template_that_drops_reasoning(tiny, tmp_path):
    def drop(tokenizer):
        text = tokenizer.chat_template
        tokenizer.chat_template = text.replace("(m.content or '')", "(m.content or '').split('</think>')[-1]")

    ok, detail = by_name(tokenizer_checks(changed(tiny, tmp_path, drop), CONTRACT))["chat template and reasoning"]
    assert ok is False and "way out" in detail


def test_a_parser_of_another_template(tiny):
    found = by_name(tokenizer_checks(tiny, EvalContract(tool_parser="qwen3_coder")))
    ok, detail = found["tool parser round trip"]
    assert ok is False and "contract.tool_parser" in detail and "came back as []" in detail
    ok, detail = by_name(tokenizer_checks(tiny, EvalContract(tool_parser="nothing")))["tool parser"]
    assert ok is False and "hermes" in detail


def test_a_turn_end_that_does_not_end_generation(tiny, tmp_path):
    def other(tokenizer):
        tokenizer.eos_token = "<|endoftext|>"

    folder = changed(tiny, tmp_path, other)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    ok, detail = by_name(tokenizer_checks(folder, CONTRACT))["end tokens"]
    assert ok is False and "generation_config.json" in detail


@pytest.mark.parametrize(
    ("targets", "ok", "words"),
    [
        (["q_proj", "v_proj"], True, "without an adapter: down_proj, gate_proj, k_proj, o_proj, up_proj"),
        (["q_proj", "in_proj_qkvz"], False, "no module is named in_proj_qkvz"),
        (["nothing"], False, "target_modules"),
        (["q_proj", "lm_head"], False, "lm_head would be adapted"),
    ],
)
def test_lora_targets(tiny, targets, ok, words):
    found = by_name(lora_checks(tiny, targets))["LoRA targets"]
    assert found[0] is ok and words in found[1]


class Server:
    """What the checks ask of vLLM, with the tiny model behind it; ``faults`` names what is wrong with it."""

    def __init__(self, tiny: str, adapter: str | None, faults: set[str]):
        self.tokenizer = AutoTokenizer.from_pretrained(tiny)
        self.net = AutoModelForCausalLM.from_pretrained(tiny).eval()
        if adapter:
            from peft import PeftModel

            self.net = PeftModel.from_pretrained(self.net, adapter).eval()
        self.faults, self.app = faults, FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/completions")(self.completions)
        self.app.post("/v1/chat/completions")(self.chat)

    def models(self):
        return {"data": [{"id": "policy", "max_model_len": 1024 if "short" in self.faults else 8192}]}

    def completions(self, body: dict):
        ids = list(body["prompt"])
        out = ids[:3]
        with torch.no_grad():
            logp_TV = self.net(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        entries = [None, *({str(i): {"logprob": float(logp_TV[t, i])}} for t, i in enumerate(ids[1:]))]
        choice = {"text": "", "finish_reason": "length", "token_ids": out, "prompt_token_ids": ids}
        choice["logprobs"] = {"token_logprobs": [0.5 if "logprobs" in self.faults else -1.0] * len(out)}
        if "ids" in self.faults:
            choice["prompt_token_ids"] = [*ids[:-1], ids[-1] + 1]
        if "no ids" in self.faults:
            del choice["token_ids"], choice["prompt_token_ids"]
        if body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = entries
        return {"choices": [choice]}

    def chat(self, body: dict):
        if "no chat" in self.faults:
            raise HTTPException(404)
        ids = self.tokenizer.encode('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>')
        call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
        calls = [] if "parser" in self.faults else [call]
        return {"choices": [{"message": {"content": "", "tool_calls": calls}, "token_ids": ids}]}

    @contextlib.contextmanager
    def running(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = uvicorn.Server(uvicorn.Config(self.app, log_level="error", lifespan="off"))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            server.should_exit = True
            thread.join()


CASES = {
    "good": (set(), {"adapter parity": True}),
    "short": ({"short"}, {"served context": False}),
    "other ids": ({"ids"}, {"served exact ids": False}),
    "no ids": ({"no ids"}, {"served exact ids": False}),
    "log-probabilities": ({"logprobs"}, {"log-probabilities": False}),
    "parser": ({"parser"}, {"served tool parser": False}),
    "no chat route": ({"no chat"}, {"served tool parser": None}),
    "base is served": ({"base"}, {"adapter parity": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_server_and_each_of_its_faults(tiny, adapter, case):
    faults, expected = CASES[case]
    with Server(tiny, None if "base" in faults else adapter, faults).running() as url:
        found = by_name(endpoint_checks(tiny, CONTRACT, url, "", "", adapter))
    assert all(found[name][0] is ok for name, ok in expected.items()), found
    assert {name for name, (ok, _) in found.items() if ok is False} == {n for n, ok in expected.items() if ok is False}
    assert all("way out" in detail for ok, detail in found.values() if ok is False)


def test_a_server_that_is_not_there_or_serves_something_else(tiny, adapter):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (ok, detail) = by_name(endpoint_checks(tiny, CONTRACT, f"http://127.0.0.1:{port}", "", "", None))["endpoint answers"]
    assert ok is False and "way out" in detail
    with Server(tiny, adapter, set()).running() as url:
        found = by_name(endpoint_checks(tiny, CONTRACT, url, "other", "", None))
        assert found["endpoint serves the model"][0] is False and "--served" in found["endpoint serves the model"][1]
        assert by_name(endpoint_checks(tiny, CONTRACT, url, "policy", "", None))["adapter parity"][0] is None


def test_the_command_and_its_exit_codes(monkeypatch, capsys):
    monkeypatch.setattr(model_checks, "pair_check", lambda backend: iter([("grades one pair", True, "")]))
    assert main(["doctor", "--model", "tiny", "--scale", "local"]) == 0
    out = capsys.readouterr().out
    assert "ok  tool parser round trip: 5 calls, parser hermes" in out and "--  endpoint: not checked" in out
    monkeypatch.setattr(model_checks, "pair_check", lambda backend: iter([("grades one pair", False, "way out: x")]))
    assert main(["doctor", "--model", "tiny", "--scale", "local"]) == 1
    assert "NO  grades one pair: way out: x" in capsys.readouterr().out
    assert main(["doctor", "--model", "/no/such/folder", "--scale", "local"]) == 2
    assert "--model=/no/such/folder holds no config.json" in capsys.readouterr().err
    assert main(["doctor", "--endpoint", "http://127.0.0.1:1"]) == 2
