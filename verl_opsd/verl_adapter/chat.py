"""verl's continuous-token builder and tool parsers behind the gateway's protocols, for ChatML tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.tokenizer.continuous_token import QwenContinuousTokenBuilder
from verl.utils.tokenizer.continuous_token_wiring import (
    ContinuousTokenModelFamily,
    create_continuous_token_builder,
    get_continuous_token_builder_class,
    infer_continuous_token_model_family,
)

from verl_opsd.errors import OpsdError
from verl_opsd.tokens.gateway import ToolCall
from verl_opsd.tokens.thinking import reasoning_end

Tools = Sequence[Mapping[str, Any]] | None

_PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Execute a bash command",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
# Reasoning in an early turn, a tool result, and a user message after it: what templates rewrite when more follows.
_PROBE_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are agent1."},
    {"role": "user", "content": "Find the file."},
    {
        "role": "assistant",
        "content": "<think>\nI list the files.\n</think>\n\nListing.",
        "tool_calls": [{"id": "c0", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls -l"}}}],
    },
    {"role": "tool", "tool_call_id": "c0", "content": "setup.py\ntests"},
    {"role": "user", "content": "[Message from agent2]: hello"},
]


def _token(tokenizer: Any, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise OpsdError(
            f"a tokenizer that encodes {text!r} as {ids}",
            "conversations are ChatML: <|im_start|>, <|im_end|> and the line break are one token each",
            "use a tokenizer of the ChatML family (Qwen, SmolLM2), or add the tokens and train with them",
        )
    return int(ids[0])


class VerlTokenBuilder:
    """:class:`verl_opsd.tokens.gateway.TokenBuilder` over verl's builder.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template, e.g. ``verl_opsd/models/chatml.jinja``.
        model_type: ``config.json``'s. Types that verl does not know (it warns) or maps to Qwen get its Qwen builder,
            which knows the line break after <|im_end|>.

    Raises:
        OpsdError: the tokenizer or the model type is not ChatML, or the template is not append-only: rendered
            message by message a small conversation gives other ids than rendered whole.
    """

    def __init__(self, tokenizer: Any, model_type: str):
        self.tokenizer = tokenizer
        _, _, self._im_end = (_token(tokenizer, text) for text in ("\n", "<|im_start|>", "<|im_end|>"))
        known = infer_continuous_token_model_family(hf_model_type=model_type)
        qwen = issubclass(get_continuous_token_builder_class(known), QwenContinuousTokenBuilder)
        if not qwen and known is not ContinuousTokenModelFamily.DEFAULT:
            raise OpsdError(
                f"model_type {model_type!r}, for which verl has a builder of family {known} that is not ChatML",
                "conversations are ChatML",
                "use a model of the ChatML family (Qwen, SmolLM2)",
            )
        self._builder = create_continuous_token_builder(tokenizer, model_family=ContinuousTokenModelFamily.QWEN)
        self._assert_append_only()

    def initial(self, messages: list[dict[str, Any]], tools: Tools) -> list[int]:
        """Ids of a whole prompt, generation prompt included."""
        return list(self._builder.build_initial_tokens(messages, tools=_list(tools)))

    def extend(self, previous: list[dict[str, Any]], updated: list[dict[str, Any]], ids: list[int], tools: Tools) -> list[int]:
        """Ids to append after a reply: its turn end where it was cut off, the line break, then the new messages."""
        cut_off = [] if ids[-1] == self._im_end else [self._im_end]
        merged = self._builder.merge_context_tokens(previous, updated, [self._im_end], tools=_list(tools))
        if merged.removed_prefix_token_count or merged.token_ids[0] != self._im_end:
            raise OpsdError(
                f"verl's {type(self._builder).__name__} changes the ids of earlier turns",
                "ids are only ever appended",
                "use a model type that verl maps to its Qwen builder",
            )
        return cut_off + list(merged.token_ids[1:])

    def without_reasoning(self, ids: list[int]) -> list[int]:
        """A reply's ids from the first token on that lies behind its reasoning and the line breaks after it. A token that holds the
        end of the reasoning and more is replaced by the tokens of the rest of its text."""
        text = self.tokenizer.decode(ids)
        end = reasoning_end(text)
        if not end:
            return ids
        low, high = 0, len(ids)  # the fewest tokens whose text reaches the end; their text only grows
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(self.tokenizer.decode(ids[:middle])) >= end else (middle + 1, high)
        rest = self.tokenizer.decode(ids[:low])[end:]
        return (self.tokenizer.encode(rest, add_special_tokens=False) if rest else []) + ids[low:]

    def _assert_append_only(self) -> None:
        messages, tools = _PROBE_MESSAGES, _PROBE_TOOLS
        prompt, whole = self.initial(messages[:2], tools), self.initial(messages, tools)
        replied = list(self.tokenizer.apply_chat_template(messages[:3], tools=tools, tokenize=True, return_dict=False))
        if replied[: len(prompt)] != prompt:
            self._refuse(replied[: len(prompt)], prompt, "the reply's prompt")
        # The reply as the template writes it after its prompt, without the line break behind <|im_end|>.
        reply = replied[len(prompt) :]
        reply = reply[: reply.index(self._im_end) + 1] if self._im_end in reply else reply
        if messages[2]["content"] not in self.tokenizer.decode(reply):
            raise OpsdError(
                f"the chat template writes the reply {messages[2]['content']!r} as {self.tokenizer.decode(reply)!r}",
                "reasoning stays in the prompt, as the model wrote it",
                "set the tokenizer's chat_template to verl_opsd/models/chatml.jinja or another that keeps reasoning",
            )
        ids = prompt + reply
        ids += self.extend(messages[:3], messages, ids, tools)
        if ids != whole:
            self._refuse(ids, whole, "the conversation")

    def _refuse(self, stepwise: list[int], whole: list[int], what: str) -> None:
        same = min(len(stepwise), len(whole))
        at = next((i for i in range(same) if stepwise[i] != whole[i]), same)
        text = [self.tokenizer.decode(ids[max(0, at - 12) : at + 12]) for ids in (whole, stepwise)]
        names = [self.tokenizer.decode(ids[at : at + 1]) for ids in (whole, stepwise)]
        raise OpsdError(
            f"the chat template is not append-only: {what} differs first at token {at}: whole {names[0]!r}, message by "
            f"message {names[1]!r}\n    whole:              ...{text[0]!r}\n    message by message: ...{text[1]!r}",
            "a message renders the same whatever follows it, reasoning of earlier turns included",
            "set the tokenizer's chat_template to verl_opsd/models/chatml.jinja or another append-only template",
        )


class VerlReplyParser:
    """:class:`verl_opsd.tokens.gateway.ReplyParser` over verl's tool parsers.

    Args:
        name: verl's name of the parser; ``hermes`` reads the calls of ``chatml.jinja``.

    Raises:
        OpsdError: verl has no parser of this name.
    """

    def __init__(self, tokenizer: Any, name: str):
        if name not in ToolParser._registry:
            raise OpsdError(
                f"tool parser {name!r}",
                f"verl's parsers are {sorted(ToolParser._registry)}",
                "set contract.tool_parser to one of them",
            )
        self._ends = {_token(tokenizer, "<|im_end|>"), tokenizer.eos_token_id}
        self._parser = ToolParser.get_tool_parser(name, tokenizer)

    async def parse(self, ids: list[int], tools: Tools) -> tuple[str, list[ToolCall]]:
        """Content (reasoning kept, turn end and line breaks before calls taken off) and the well-formed calls."""
        body = ids[:-1] if ids[-1] in self._ends else ids
        schemas = [OpenAIFunctionToolSchema.model_validate(tool) for tool in tools or ()]
        content, calls = await self._parser.extract_tool_calls(body, schemas)
        if calls:
            content = content.rstrip("\n")
        return content, [ToolCall(_text(call.name), _text(call.arguments), call.tool_call_id or "") for call in calls]


def _text(written: str) -> str:
    """Half a character that a call's JSON wrote as an escape (``\\ud800``) stays that escape: no tokenizer reads it otherwise."""
    return written.encode("utf-8", "backslashreplace").decode()


def _list(tools: Tools) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in tools] if tools else None


def model_type_of(path: str) -> str:
    """The root ``model_type`` of a model folder or hub name."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path).model_type
