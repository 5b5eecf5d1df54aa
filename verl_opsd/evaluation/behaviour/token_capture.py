"""Token ids that the harness recorded itself (``capture_token_ids`` of its mini-swe agent), as turn records.

``extra.token_capture`` of an assistant message holds ``prompt_token_ids`` and ``output_token_ids`` of its call: no log-probabilities,
no sampling parameters, and nothing of the calls that made a summary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_opsd.errors import OpsdError
from verl_opsd.tokens.records import Ids, Sampling, TurnRecord, common_prefix

_UNKNOWN = Sampling(temperature=float("nan"), top_p=float("nan"), top_k=-1, max_tokens=-1)


def captured_turns(
    episode_id: str, agent_id: str, messages: Sequence[Mapping[str, Any]], compactions: int
) -> tuple[TurnRecord, ...]:
    """Records of an agent's calls, with NaN for log-probabilities; none where no call has ids.

    Args:
        messages: the whole history, each message once.
        compactions: how often the harness cut the history: as many prompts may begin a branch.

    Raises:
        OpsdError: calls with ids beside calls without, ids that are none, or a prompt that does not continue the call before it.
    """
    replies = [m for m in messages if m.get("role") == "assistant"]
    captures = [(m.get("extra") or {}).get("token_capture") for m in replies]
    if not any(captures):
        return ()
    turns: list[TurnRecord] = []
    known: Ids = np.zeros(0, np.int32)
    branch = 0
    for n, (message, capture) in enumerate(zip(replies, captures, strict=True)):
        here = f"call {n} of {episode_id}/{agent_id}"
        if not capture:
            raise _refusal(f"{here} has no token ids, others have")
        prompt, reply = (_ids(capture.get(f"{part}_token_ids"), f"{here}, {part}") for part in ("prompt", "output"))
        common = common_prefix(known, prompt)
        fork: dict[str, Any] = {}
        if common < len(known):
            if branch == compactions:
                raise _refusal(
                    f"{here}: of the {len(known)} tokens before it, its prompt of {len(prompt)} repeats {common}; "
                    f"the history was cut {compactions} times"
                )
            fork = {"parent_branch": branch, "fork_position": common, "fork_reason": "compaction"}
            branch += 1
        elif turns and branch:
            fork = {k: getattr(turns[-1], k) for k in ("parent_branch", "fork_position", "fork_reason")}
        extra = message["extra"]
        choice = ((extra.get("response") or {}).get("choices") or [{}])[0]
        t = float(extra.get("timestamp") or 0.0)
        turns.append(
            TurnRecord(
                episode_id=episode_id,
                agent_id=agent_id,
                turn=n,
                branch=branch,
                start=common,
                new_ids=prompt[common:],
                response_ids=reply,
                response_logprobs=np.full(len(reply), np.nan, np.float32),
                stop_reason=str(choice.get("finish_reason") or ""),
                kind="policy",
                sampling=_UNKNOWN,
                model_version=-1,
                contract_hash="",
                t_start=t,
                t_end=t,
                **fork,
            )
        )
        known = np.concatenate([prompt, reply])
    return tuple(turns)


def _ids(value: Any, what: str) -> Ids:
    good = isinstance(value, list) and value and all(type(i) is int and 0 <= i < 1 << 31 for i in value)
    if not good:
        raise _refusal(f"{what}: {str(value)[:80]} is no list of token ids")
    return np.asarray(value, np.int32)


def _refusal(what: str) -> OpsdError:
    return OpsdError(
        what,
        "each call's prompt repeats the ids of the call before it and continues them, unless the harness cut the history",
        "import without ids: opsd episodes import --without-ids",
    )
