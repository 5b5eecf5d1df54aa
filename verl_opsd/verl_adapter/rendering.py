"""How a model's conversations are rendered: verl's builder, the chat template and the tokenizer, for the gates of a corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl_opsd.cooperbench.dataset import dataset_folder
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.corpus.records import CorpusRow
from verl_opsd.corpus.rerender import Rendering
from verl_opsd.corpus.select import Hints, no_hints
from verl_opsd.errors import OpsdError
from verl_opsd.privilege import ChatMarkers
from verl_opsd.privilege.hints import without_hint
from verl_opsd.teachers.cache import tokenizer_hash
from verl_opsd.tokens.gateway import Tools
from verl_opsd.tokens.records import Episode, Trajectory
from verl_opsd.verl_adapter.actor_briefs import HintedBuilder, hints_of, read_by_actors

_ASKED = [{"role": "user", "content": "x"}]


def rendering_of(model: str, tools: Tools) -> Rendering:
    """The rendering of a model folder or hub name.

    Raises:
        OpsdError: its chat template is not append-only.
    """
    from transformers import AutoConfig, AutoTokenizer

    from verl_opsd.verl_adapter.chat import VerlTokenBuilder

    tokenizer = AutoTokenizer.from_pretrained(model)
    return make_rendering(tokenizer, VerlTokenBuilder(tokenizer, AutoConfig.from_pretrained(model).model_type), tools)


def make_rendering(tokenizer: Any, builder: Any, tools: Tools) -> Rendering:
    """The same from parts; see :func:`rendering_of`."""
    asked = tokenizer.apply_chat_template(_ASKED, tokenize=False, add_generation_prompt=True)

    def reply(message: dict[str, Any]) -> str:
        whole = tokenizer.apply_chat_template([*_ASKED, message], tokenize=False)
        if not whole.startswith(asked):
            raise OpsdError(
                f"an assistant message that is rendered as {whole!r} after the prompt {asked!r}",
                "a reply follows its prompt",
                "use an append-only chat template (verl_opsd/models/chatml.jinja)",
            )
        return str(whole[len(asked) :].removesuffix("\n"))

    def hinted(hint: list[int]) -> HintedBuilder:
        return HintedBuilder(builder, hint, ChatMarkers.from_tokenizer(tokenizer))

    def strip(trajectory: Trajectory, hint: list[int]) -> Trajectory:
        return without_hint(trajectory, hint, ChatMarkers.from_tokenizer(tokenizer))

    known = tokenizer.eos_token, tokenizer_hash(tokenizer)
    return Rendering(builder, reply, tokenizer.decode, tools, *known, hinted, strip)


def hints_of_run(run: Path, model: str) -> Hints:
    """Ids of the briefs that stood in the own prompts of a run's actors (``opsd.actor_brief``), under a model's tokenizer."""
    config = read_by_actors(run)
    if config.name == "none":
        return no_hints
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tasks = json.loads((run / "meta.json").read_text())["opsd"]["tasks"]
    root = dataset_folder(tasks["dataset"], "opsd.tasks.dataset")

    def hints(episode: Episode) -> dict[str, list[int]]:
        pair = PairTask(root, episode.repo, episode.task_id, episode.features, episode.split)
        return {agent: brief.ids(tokenizer) for agent, brief in hints_of(config, pair, episode).items()}

    return hints


def chat_rows(path: Path, model: str, rendering: Rendering) -> list[CorpusRow]:
    """Rows of a file of chat messages under a model's template (``corpus.rendered``)."""
    from transformers import AutoTokenizer

    from verl_opsd.corpus.rendered import rows_of_file

    tokenizer = AutoTokenizer.from_pretrained(model)
    return rows_of_file(
        path,
        rendering,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        lambda messages, tools: tokenizer.apply_chat_template(messages, tools=tools, tokenize=False),
    )


def harness_tools() -> Tools:
    """The tools that the harness offers in every policy call."""
    from verl_opsd.cooperbench.identity import load_harness

    load_harness()
    from cooperbench.agents.mini_swe_agent_v2.models.utils.actions_toolcall import BASH_TOOL

    return [BASH_TOOL]
