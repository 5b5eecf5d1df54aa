"""``opsd export``: a training checkpoint becomes a model folder, guarded."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from verl_opsd.cli.tables import Table
from verl_opsd.errors import OpsdError

if TYPE_CHECKING:
    from verl_opsd.models.export import Guard


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``export``."""
    p = subparsers.add_parser("export", help="write a training checkpoint in Hugging Face's layout")
    p.add_argument("checkpoint", type=Path, help="folder global_step_N of verl's")
    p.add_argument("--out", type=Path, required=True, help="folder of the model; must not exist")
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="precision that is written")
    p.add_argument("--wrapper", help="multimodal checkpoint (Qwen3.5) in whose architecture a text model is written, for vLLM")
    p.add_argument("--corpus", type=Path, help="take prompts out of this corpus and ask for tool calls (guard coherence)")
    p.add_argument("--prompts", type=int, default=4, help="prompts of the coherence guard")
    p.add_argument("--max-new", type=int, default=1024, help="tokens of one of its replies, at most")
    p.add_argument("--parser", default="hermes", help="verl's tool parser")
    p.set_defaults(func=export_model)


def export_model(args: argparse.Namespace, console: Console | None = None) -> int:
    """Exports and prints the guards."""
    from verl_opsd.models.export import export, tokenizer_and_config
    from verl_opsd.verl_adapter.chat import VerlReplyParser
    from verl_opsd.verl_adapter.place import require_writable

    require_writable(args.out.parent, "--out")
    coherent = None
    if args.corpus is not None:
        if args.max_new < 1:
            raise OpsdError(f"--max-new {args.max_new}", "a reply has a token at least", "raise it")
        require_tokenizer(args.checkpoint, args.corpus)
        prompts = first_prompts(args.corpus, args.prompts)
        VerlReplyParser(tokenizer_and_config(args.checkpoint)[0], args.parser)  # a name that verl lacks is refused first

        def coherent(model: Any, tokenizer: Any) -> Guard:
            from verl_opsd.models.export import coherence

            parser = VerlReplyParser(tokenizer, args.parser)

            def calls(ids: list[int]) -> int:
                return len(asyncio.run(parser.parse(ids, None))[1]) if ids else 0

            return coherence(model, prompts, calls, args.max_new, tokenizer.pad_token_id)

    guards = export(args.checkpoint, args.out, args.dtype, args.wrapper, coherent)
    table = Table("guard", "value", "threshold", "what", title=str(args.out))
    for g in guards:
        table.add_row(g.name, f"{g.value:.3g}", f"{g.threshold:.3g}", g.detail)
    (console or Console()).print(table)
    return 0


def require_tokenizer(checkpoint: Path, corpus: Path) -> None:
    """
    Raises:
        OpsdError: the corpus' prompts are in ids of another tokenizer than the checkpoint's.
    """
    from verl_opsd.corpus.records import read_manifest
    from verl_opsd.models.export import tokenizer_and_config
    from verl_opsd.teachers.cache import tokenizer_hash

    stated, own = read_manifest(corpus)["tokenizer"], tokenizer_hash(tokenizer_and_config(checkpoint)[0])
    if stated != own:
        raise OpsdError(
            f"--corpus {corpus} of tokenizer {stated[:12]}, {checkpoint} of {own[:12]}",
            "prompts are given in the ids that were recorded, so the model reads them with the tokenizer that made them",
            "name the corpus that the checkpoint was trained on, or one of its tokenizer",
        )


def first_prompts(corpus: Path, count: int) -> list[list[int]]:
    """Prompts before the first trained reply of a corpus' rows, of different tasks and features first.

    Raises:
        OpsdError: the corpus has fewer rows, or was changed.
    """
    from verl_opsd.corpus.records import read_manifest, read_split, require_files

    manifest = read_manifest(corpus)
    require_files(corpus, manifest)
    rows = [r for e in manifest["files"].values() for r in read_split(corpus, e)]
    seen: dict[tuple[str, int], int] = {}
    order = []
    for r in rows:
        key = (r.task, r.feature_id)
        seen[key] = seen.get(key, 0) + 1
        order.append((seen[key], r.name, r))
    if len(order) < count or count < 1:
        raise OpsdError(f"--prompts {count} of a corpus of {len(order)} rows", "a prompt is a row's", "ask for fewer")
    return [r.input_ids[: int(r.loss_mask.argmax())].tolist() for _, _, r in sorted(order, key=lambda x: x[:2])[:count]]
