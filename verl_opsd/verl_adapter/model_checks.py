"""What a model, its adapter and its server must give before money is spent on them: for ``opsd doctor --model``.

Every check gives findings: name, whether it holds (None: it was not made, and why), and what was found or what to do.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx

from verl_opsd.contract import EvalContract
from verl_opsd.errors import OpsdError
from verl_opsd.tokens.endpoint import EndpointEngine
from verl_opsd.tokens.gateway import Gateway, Generation
from verl_opsd.verl_adapter.targets import lora_targets

Finding = tuple[str, bool | None, str]

#: Arguments that survive a tool call: quotes, line breaks, other scripts, JSON and markup inside of text.
COMMANDS = (
    "ls -l",
    "echo 'it''s' \"quoted\" \\n `date`",
    "cat > f.py <<'EOF'\nprint(\"{'a': 1}\")\nEOF\n",
    "echo 'größer — 日本 🙂'",
    'echo {"name": "bash", "arguments": {}} <b>',
)
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
MESSAGES = [{"role": "system", "content": "You are agent1."}, {"role": "user", "content": "List the files with the tool bash."}]
#: Mean difference in nats of log-probabilities of the same weights in two engines, bf16 included; above it they are not the same.
PARITY_NATS = 0.05
#: Share of the adapter's effect that must show in what is served.
FOLLOW = 0.5


def tokenizer_checks(model: str, contract: EvalContract) -> Iterator[Finding]:
    """Chat template, reasoning, tool parser, end tokens."""
    from transformers import AutoTokenizer

    from verl_opsd.verl_adapter.chat import VerlReplyParser, VerlTokenBuilder, model_type_of

    tokenizer = AutoTokenizer.from_pretrained(model)
    try:
        builder = VerlTokenBuilder(tokenizer, model_type_of(model))
        yield (
            "chat template and reasoning",
            True,
            "append-only: a message renders the same whatever follows it, reasoning stays",
        )
    except OpsdError as error:
        yield "chat template and reasoning", False, str(error)
        return
    try:
        parser = VerlReplyParser(tokenizer, contract.tool_parser)
    except OpsdError as error:
        yield "tool parser", False, str(error)
        return
    lost = []
    for command in COMMANDS:
        call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": {"command": command}}}
        whole = tokenizer.apply_chat_template(
            [*MESSAGES, {"role": "assistant", "content": "Now.", "tool_calls": [call]}], tools=[TOOL], return_dict=False
        )
        prompt = builder.initial([dict(m) for m in MESSAGES], [TOOL])
        if list(whole[: len(prompt)]) != prompt:
            lost.append(f"{command!r}: the reply does not follow its prompt")
            continue
        _, calls = asyncio.run(parser.parse(list(whole[len(prompt) :]), [TOOL]))
        got = [(c.name, json.loads(c.arguments).get("command")) for c in calls]
        if got != [("bash", command)]:
            lost.append(f"{command!r} came back as {got}")
    what = (
        "; ".join(lost) + f"\n  way out: set contract.tool_parser to the parser of this template (it is {contract.tool_parser})"
    )
    yield "tool parser round trip", not lost, what if lost else f"{len(COMMANDS)} calls, parser {contract.tool_parser}"
    yield from _end_tokens(model, tokenizer)
    yield _exact_ids(tokenizer, Gateway(_Speller(tokenizer), builder, parser, contract))


class _Speller:
    """Replies letter by letter: ids that no tokenizer would give for the text. Keeps the prompts."""

    def __init__(self, tokenizer: Any):
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.reply = [i for letter in "hello there" for i in tokenizer.encode(letter, add_special_tokens=False)] + [end]
        self.canonical = tokenizer.encode("hello there", add_special_tokens=False)
        self.prompts: list[list[int]] = []

    async def generate(self, prompt_ids: list[int], **_: Any) -> Generation:
        self.prompts.append(prompt_ids)
        return Generation(self.reply, [-1.0] * len(self.reply), "stop", 0)


def _exact_ids(tokenizer: Any, gateway: Gateway) -> Finding:
    """A reply that is sampled in unusual tokens stays in the next prompt as it was sampled."""
    session, engine = gateway.session("doctor", "agent1"), gateway.engine
    assert isinstance(engine, _Speller)

    async def talk() -> None:
        first = await session.chat(MESSAGES, [TOOL])
        await session.chat([*MESSAGES, first.message, {"role": "user", "content": "Go on."}], [TOOL])

    asyncio.run(talk())
    one, two = engine.prompts
    kept = two[: len(one) + len(engine.reply)] == [*one, *engine.reply]
    unusual = engine.reply[:-1] != engine.canonical
    what = f"{len(engine.reply)} sampled ids stay, where the tokenizer would write {len(engine.canonical)}"
    return (
        "exact ids",
        kept if unusual else None,
        what if kept else "a reply was tokenized again\n  way out: report this model's family",
    )


def _end_tokens(model: str, tokenizer: Any) -> Iterator[Finding]:
    from transformers import GenerationConfig

    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    try:
        given = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        given = None
    ends = {tokenizer.eos_token_id, *(given if isinstance(given, list) else [given])} - {None}
    yield (
        "end tokens",
        turn_end in ends,
        f"a reply ends at {sorted(ends)}"
        if turn_end in ends
        else f"the turn ends with id {turn_end}, and generation at {sorted(ends)}\n"
        "  way out: add it to eos_token_id in the model's generation_config.json",
    )


def lora_checks(model: str, target_modules: list[str] | str) -> Iterator[Finding]:
    """Each LoRA target binds a module; what is left without an adapter is named. Weights are not loaded."""
    targets = lora_targets(model, target_modules)
    last = {name.rsplit(".", 1)[-1] for name in targets.bound}
    left = sorted({name.rsplit(".", 1)[-1] for name in targets.linear} - last - {"lm_head"})
    found = f"{len(targets.bound)} of {len(targets.linear)} linear modules" + (
        f"; without an adapter: {', '.join(left)}" if left else ""
    )
    if targets.problems:
        found += f": {'; '.join(targets.problems)}\n  way out: correct actor_rollout_ref.model.target_modules"
    yield "LoRA targets", not targets.problems and bool(targets.bound), found


def pair_check(backend: str) -> Iterator[Finding]:
    """Grades the gold patches of one pocket pair: both features must pass, on this machine, in its sandbox."""
    from verl_opsd.cooperbench.dataset import load_subset
    from verl_opsd.cooperbench.grading import grade_pair
    from verl_opsd.cooperbench.prepare import prepare
    from verl_opsd.paths import cache_dir

    pair = load_subset("pocket_train", split="train")[0]
    try:
        prepared = prepare(pair.task_dir, None, cache_dir())
        patches = [(pair.task_dir / f"feature{f}" / "feature.patch").read_text() for f in pair.features]
        grade = grade_pair(pair, prepared, *patches, backend=backend, allow_unsafe=True)
    except OpsdError as error:
        yield "grades one pair", False, str(error)
        return
    passed = [f.passed for f in grade.features]
    what = f"{pair.key}: merge {grade.merge}, gold passes {passed}, {grade.seconds:.1f} s"
    yield (
        "grades one pair",
        all(passed),
        what if all(passed) else f"{what}\n  way out: opsd tasks qualify shows the test output",
    )


def endpoint_checks(
    model: str, contract: EvalContract, url: str, served: str, api_key: str, adapter: str | None
) -> list[Finding]:
    """What the server gives, against the contract and the trainer's own forward."""

    async def collect() -> list[Finding]:
        engine = EndpointEngine(url, served, api_key=api_key, timeout_s=300.0)
        try:
            return [finding async for finding in _endpoint(engine, model, contract, adapter)]
        finally:
            await engine.close()

    return asyncio.run(collect())


async def _endpoint(engine: EndpointEngine, model: str, contract: EvalContract, adapter: str | None) -> AsyncIterator[Finding]:
    from transformers import AutoTokenizer

    from verl_opsd.verl_adapter.chat import VerlReplyParser, VerlTokenBuilder, model_type_of

    try:
        cards = {card["id"]: card for card in (await engine.get("/models"))["data"]}
    except (httpx.HTTPError, KeyError, ValueError) as error:
        yield "endpoint answers", False, f"{type(error).__name__}: {error}\n  way out: give the server's address without /v1"
        return
    engine.model = engine.model or next(iter(cards), "")
    if engine.model not in cards:
        yield "endpoint serves the model", False, f"{engine.model!r} is not among {sorted(cards)}\n  way out: --served NAME"
        return
    limit = cards[engine.model].get("max_model_len")
    enough = limit is None or limit >= contract.context_length
    what = f"max_model_len {limit}, contract.context_length {contract.context_length}"
    yield (
        "served context",
        None if limit is None else enough,
        what if enough else f"{what}\n  way out: serve with --max-model-len",
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = VerlTokenBuilder(tokenizer, model_type_of(model)).initial([dict(m) for m in MESSAGES], [TOOL])
    try:
        choice = await engine.complete(prompt, max_tokens=min(64, contract.max_tokens), temperature=0.0)
    except (OpsdError, httpx.HTTPError) as error:
        yield "served exact ids", False, f"{error}\n  way out: vLLM 0.10.2 or later, started with this model"
        return
    yield "served exact ids", True, f"{len(prompt)} prompt ids echoed, {len(choice['token_ids'])} reply ids"
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    exact = len(logprobs) == len(choice["token_ids"]) and all(isinstance(x, float) and x <= 1e-6 for x in logprobs)
    what = f"{len(logprobs)} for {len(choice['token_ids'])} ids"
    yield "log-probabilities", exact, what if exact else f"{what}, or above 0\n  way out: serve with logprobs_mode=raw_logprobs"
    yield await _served_parser(engine, VerlReplyParser(tokenizer, contract.tool_parser), contract)
    yield await _parity(engine, model, adapter, prompt)


async def _served_parser(engine: EndpointEngine, parser: Any, contract: EvalContract) -> Finding:
    """The server's own reading of a reply against ours of the same ids: whoever calls its chat route gets other turns where they differ."""
    name, body = "served tool parser", {"model": engine.model, "messages": MESSAGES, "tools": [TOOL], "return_token_ids": True}
    try:
        answer = await engine.post(
            "/chat/completions", {**body, "max_tokens": min(256, contract.max_tokens), "temperature": 0.0}
        )
    except httpx.HTTPError as error:
        return (
            name,
            None,
            f"not compared: its chat route does not answer ({error}); the gateway uses the completions route only",
        )
    choice = answer["choices"][0]
    if not choice.get("token_ids"):
        return name, None, "not compared: its chat route gives no token ids; the gateway uses the completions route only"
    _, ours = await parser.parse(choice["token_ids"], [TOOL])
    theirs = [c["function"] for c in choice["message"].get("tool_calls") or ()]
    same = [(c.name, json.loads(c.arguments)) for c in ours] == [(c["name"], json.loads(c["arguments"])) for c in theirs]
    if same and not ours:
        return name, None, "not compared: the model wrote no tool call"
    what = f"{len(ours)} calls by ours ({contract.tool_parser}), {len(theirs)} by the server's"
    return (
        name,
        same,
        what if same else f"{what}\n  way out: serve with --tool-call-parser of this model, or change contract.tool_parser",
    )


async def _parity(engine: EndpointEngine, model: str, adapter: str | None, prompt: list[int]) -> Finding:
    name = "adapter parity"
    if adapter is None:
        return name, None, "not checked: give --adapter FOLDER, and --served the name that the server has it under"
    try:
        choice = await engine.complete(prompt, max_tokens=1, temperature=0.0, prompt_logprobs=0)
    except (OpsdError, httpx.HTTPError) as error:
        return name, False, f"{error}\n  way out: the server must give prompt_logprobs"
    entries = choice.get("prompt_logprobs") or []
    if len(entries) != len(prompt):
        return (
            name,
            False,
            f"{len(entries)} prompt_logprobs for {len(prompt)} ids\n  way out: the server must give prompt_logprobs",
        )
    served = [float(e[str(i)]["logprob"]) for e, i in zip(entries[1:], prompt[1:], strict=True)]
    base, trained = await asyncio.to_thread(_trainer_logprobs, model, adapter, prompt)
    off = statistics.mean(abs(a - b) for a, b in zip(served, trained, strict=True))
    effect = statistics.mean(abs(a - b) for a, b in zip(base, trained, strict=True))
    follow = 1.0 - off / effect if effect else 0.0
    what = f"{off:.4f} nats between server and trainer; the adapter moves {effect:.4f}"
    if effect < 1e-6:
        return name, None, f"{what}: an adapter without effect shows nothing; give a trained one"
    holds = off <= PARITY_NATS and follow >= FOLLOW
    return name, holds, what if holds else f"{what}\n  way out: serve this adapter under this name, in the trainer's dtype"


def _trainer_logprobs(model: str, adapter: str, ids: list[int]) -> tuple[list[float], list[float]]:
    """Log-probabilities of each id after the first, without and with the adapter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_opsd.models import multimodal
    from verl_opsd.models.adapter import put_on
    from verl_opsd.models.kernels import on_host

    config = multimodal.text_config(AutoConfig.from_pretrained(model))
    text, info = AutoModelForCausalLM.from_pretrained(model, config=config, dtype="auto", output_loading_info=True)
    multimodal.require_complete("--model", model, info)
    on_host(text)
    net = put_on(text, adapter).eval()
    ids_BT = torch.tensor([ids])

    @torch.no_grad()
    def score() -> list[float]:
        logp_TV = net(ids_BT).logits[0, :-1].float().log_softmax(-1)
        return logp_TV.gather(-1, ids_BT[0, 1:, None])[:, 0].tolist()

    with net.disable_adapter():
        base = score()
    return base, score()


def model_checks(
    model: str,
    contract: EvalContract,
    target_modules: list[str] | str,
    *,
    endpoint: str | None,
    served: str,
    api_key: str,
    adapter: str | None,
) -> Iterator[Finding]:
    """All checks of a model, in the order in which a fault of one makes the next pointless."""
    broken = False
    for check in (lambda: tokenizer_checks(model, contract), lambda: lora_checks(model, target_modules)):
        for finding in _guarded(check):
            broken = broken or finding[1] is False
            yield finding
    if endpoint is None:
        yield "endpoint", None, "not checked: give --endpoint URL"
    elif broken:
        yield "endpoint", None, "not checked: the model's own checks come first"
    else:
        address = endpoint
        yield from _guarded(lambda: iter(endpoint_checks(model, contract, address, served, api_key, adapter)))
    yield from pair_check(contract.sandbox)


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except (OpsdError, OSError, ValueError, KeyError) as error:
        yield "model can be read", False, f"{type(error).__name__}: {error}"
