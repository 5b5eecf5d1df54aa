"""A tiny real student made in seconds, so that the default run downloads nothing.

Qwen3 architecture with random weights, and a byte-level BPE tokenizer trained on the corpus shipped beside this file.
Same inputs give the same bytes: weights come from numpy's generator, because torch's kernels differ between processors.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_opsd.errors import OpsdError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

VOCAB = 2048
HASH_FILE = "CONTENT_SHA256"
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
#: Tokens of the chat format that stay visible in decoded text, as in Qwen3's tokenizer.
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_HERE = Path(__file__).parent
#: The tiny student after a warm start, ready to load; how it was made stands in its README.md.
WARM = _HERE / "warm"
_FORMAT = "1"


def chat_template() -> str:
    """The project's chat template (ChatML with tools, append-only)."""
    return (_HERE / "chatml.jinja").read_text(encoding="utf-8")


def make_tokenizer(
    texts: Sequence[str] | None = None, vocab: int = VOCAB, phrase: int | None = None
) -> PreTrainedTokenizerFast:
    """Trains a tokenizer: exactly ``vocab`` ids, special tokens first, markup tokens last.

    Args:
        texts: what it is trained on; None: the corpus beside this file and the chat template.
        phrase: the longest token in bytes, which may then hold several words, but nothing of a
            turn's header; None: no token crosses a word.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=phrase is None)
    # A phrase never reaches into a turn's header: the role's name and its line break are tokens of their own.
    roles = r"\A(?:system|user|assistant)"
    header = [pre_tokenizers.Split(Regex(roles + end), "isolated") for end in (r"\n", r"(?=\n\z)")]
    bpe.pre_tokenizer = in_bytes if phrase is None else pre_tokenizers.Sequence([*header, in_bytes])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(MARKUP),
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        max_token_length=phrase,
    )
    if texts is None:
        texts = [(_HERE / "corpus.txt").read_text(encoding="utf-8"), chat_template()]
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        model_max_length=16384,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template()
    if len(tokenizer) != vocab:
        raise OpsdError(
            f"the tokenizer has {len(tokenizer)} tokens",
            f"it has exactly {vocab}",
            "restore models/corpus.txt, or give more texts",
        )
    return tokenizer


def make_tiny(
    path: Path | str,
    seed: int = 0,
    hidden_size: int = 64,
    layers: int = 2,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Writes a tiny Qwen3 model (fp32, tied embeddings, 16384 positions) with its tokenizer.

    Args:
        path: folder that must not exist yet; it appears complete or not at all.
        seed: of the weights.
        hidden_size, layers: size of the model.
        tokenizer: None: that of :func:`make_tokenizer`.

    Returns:
        The folder.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tokenizer or make_tokenizer()
    config = Qwen3Config(
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        **_common(tokenizer),
    )
    return _write(Path(path), Qwen3ForCausalLM, config, tokenizer, seed)


def make_tiny_hybrid(path: Path | str, seed: int = 0) -> Path:
    """The same with Qwen3.5's text architecture: three layers of gated linear attention, one of full attention."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen3_5TextConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        **_common(tokenizer),
    )
    return _write(Path(path), Qwen3_5ForCausalLM, config, tokenizer, seed)


def tiny_path(cache_dir: Path | str, seed: int = 0) -> Path:
    """Where the tiny student of this recipe is kept; the name holds a hash of everything that makes it."""
    recipe = "|".join(
        [
            _FORMAT,
            str(seed),
            chat_template(),
            (_HERE / "corpus.txt").read_text(encoding="utf-8"),
            version("transformers"),
        ]
    )
    return Path(cache_dir) / f"tiny-qwen3-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def ensure_tiny(cache_dir: Path | str, seed: int = 0) -> Path:
    """The tiny student in ``cache_dir``, made if it is not there; safe under concurrent callers.

    Raises:
        OpsdError: the folder exists and its contents are not what was written.
    """
    path = tiny_path(cache_dir, seed)
    if not path.exists():
        make_tiny(path, seed)
    check_content(path)
    return path


def content_hash(path: Path) -> str:
    """SHA-256 over the names and bytes of a folder's files (the hash file itself left out)."""
    total = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file() and p.name != HASH_FILE):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{file.relative_to(path).as_posix()} {digest}\n".encode())
    return total.hexdigest()


def check_content(path: Path) -> None:
    """Refuses a model folder that was changed, or not written to its end.

    Raises:
        OpsdError: the hash file is missing or does not match.
    """
    file = path / HASH_FILE
    stated = file.read_text().strip() if file.exists() else "no hash"
    if stated != (found := content_hash(path)):
        raise OpsdError(
            f"{path} holds {found}, its {HASH_FILE} says {stated}",
            "a cached model is exactly what was written",
            f"delete {path}; it is made again",
        )


def publish_folder(build: Path, path: Path) -> Path:
    """Gives a finished folder its hash file and its name; where a concurrent caller was first, theirs stays.

    Raises:
        OpsdError: the target exists and was written by something else.
    """
    (build / HASH_FILE).write_text(content_hash(build) + "\n")
    build.chmod(0o755)  # mkdtemp's folders are private
    try:
        os.rename(build, path)
    except OSError as e:
        if not (path / HASH_FILE).exists():
            raise OpsdError(
                f"cannot write {path}: {e}", "the folder of a new model must not exist", f"remove {path} or its parent"
            ) from e
    return path


def _common(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 16384,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _write(
    path: Path, model_class: type[nn.Module], config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    build = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        model = model_class(config)
        _fill(model, seed)
        model.save_pretrained(build)  # type: ignore[operator]
        tokenizer.save_pretrained(build)
        return publish_folder(build, path)
    finally:
        shutil.rmtree(build, ignore_errors=True)


def _fill(model: nn.Module, seed: int) -> None:
    """Random weights with unit gain, so that the context moves the logits; vectors keep neutral values.

    Embeddings have standard deviation 0.1, matrices 1/sqrt(fan in). Vectors: norms neutral, everything else zero.
    """
    import torch

    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if p.dim() >= 2:
                std = 0.1 if "embed_tokens" in name else p[0].numel() ** -0.5
                p.copy_(torch.from_numpy(rng.standard_normal(tuple(p.shape)) * std))
            elif "norm" not in name:
                p.zero_()
