"""A ChatML tokenizer for tests: byte-level BPE trained on the standard library, with the project's template."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import verl_opsd.models

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
# Line breaks are never merged with the text before them, as in Qwen's tokenizers.
SPLIT = r"""'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""


def template() -> str:
    """The project's chat template."""
    return (Path(verl_opsd.models.__path__[0]) / "chatml.jinja").read_text()


@functools.lru_cache(maxsize=4)
def chat_tokenizer(tags: bool = True, vocab_size: int = 1200) -> PreTrainedTokenizerFast:
    """The tokenizer; ``tags=False`` leaves think, tool_call and tool_response tags to be spelt in pieces."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [str(library / name) for name in ("argparse.py", "ast.py", "json/decoder.py", "textwrap.py", "shlex.py")]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL + (TAGS if tags else []),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(files, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = template()
    return fast
