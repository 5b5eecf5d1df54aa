"""A stand-in for vLLM's OpenAI-like server: a real HTTP server on loopback in front of a small model, with faults to order.

    python logprob_server.py PORT MODEL [FAULT]

FAULT: ``none`` gives no prompt_logprobs; ``extra`` puts a token in front; ``few`` gives 2 tokens a position at most; ``later`` lets
what follows change a position; ``flaky`` fails every first request of a kind with 503; ``short`` takes 64 tokens; ``large`` sums above 1.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from transformers import AutoModelForCausalLM


def make(model_path: str, fault: str = "", limit: int = 4096) -> FastAPI:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager").eval()
    app, seen = FastAPI(), Counter[str]()
    limit = 64 if fault == "short" else limit

    def flaky(what: str) -> None:
        seen[what] += 1
        if fault == "flaky" and seen[what] % 2 == 1:
            raise HTTPException(503, "busy")

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        flaky("models")
        return {"data": [{"id": model_path, "max_model_len": limit}]}

    @app.post("/v1/completions")
    def completions(asked: dict[str, Any]) -> dict[str, Any]:
        flaky("completions")
        ids, k = list(asked["prompt"]), asked["prompt_logprobs"]
        if len(ids) + asked["max_tokens"] > limit:
            raise HTTPException(400, f"at most {limit} tokens")
        if fault == "none":
            return {"choices": [{"text": "x", "prompt_logprobs": None}]}
        if fault == "extra":
            ids = [0, *ids]
        with torch.no_grad():
            logp_TV = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        if fault == "later":
            logp_TV = (logp_TV * len(ids) / 10).log_softmax(-1)
        if fault == "large":
            logp_TV = logp_TV + 8.0
        entries: list[Any] = [None]
        for t in range(1, len(ids)):
            values, top = logp_TV[t - 1].topk(2 if fault == "few" else k) if k else ([], [])
            entry = {
                str(int(i)): {"logprob": float(v), "rank": n + 1} for n, (v, i) in enumerate(zip(values, top, strict=True))
            }
            entry[str(ids[t])] = {"logprob": float(logp_TV[t - 1, ids[t]]), "rank": 0}
            entries.append(entry)
        return {"choices": [{"text": "x", "prompt_logprobs": entries}]}

    return app


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvicorn.run(make(sys.argv[2], *sys.argv[3:]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
