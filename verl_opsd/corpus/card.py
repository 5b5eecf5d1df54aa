"""What a corpus says of itself: composition, yield, the dataset card, and the sample that a person judges."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from verl_opsd.corpus.records import CorpusRow
from verl_opsd.corpus.select import draw
from verl_opsd.tokens.records import TOKEN_CLASSES

#: Ratio of the most to the least often solved task from which on the yield is called uneven.
UNEVEN = 10.0
JUDGED = (
    "exemplary (yes/no)",
    "divides the work (yes/no)",
    "answers the peer (yes/no)",
    "checks the merge (yes/no)",
    "what is wrong with it",
)


def composition(rows: Sequence[CorpusRow]) -> dict[str, Any]:
    """Tokens by source, task and class; ``context`` is what carries no loss."""
    by: dict[str, Counter[str]] = defaultdict(Counter)
    total: Counter[str] = Counter()
    for row in rows:
        counts = Counter({"context": int((row.loss_mask == 0).sum())})
        for code, name in enumerate(TOKEN_CLASSES):
            counts[name] = int(((row.token_class == code) & (row.loss_mask == 1)).sum())
        by[f"{row.source}\t{row.task or '-'}"].update(counts)
        total.update(counts)
    table = [
        {"source": key.split("\t")[0], "task": key.split("\t")[1], **{k: by[key][k] for k in ("context", *TOKEN_CLASSES)}}
        for key in sorted(by)
    ]
    return {
        "rows": len(rows),
        "episodes": len({(r.source, r.episode_id) for r in rows}),
        "sequence_tokens": sum(len(r.input_ids) for r in rows),
        "loss_tokens": sum(int(r.loss_mask.sum()) for r in rows),
        "longest": max((len(r.input_ids) for r in rows), default=0),
        "by_class": {k: total[k] for k in ("context", *TOKEN_CLASSES)},
        "by_source_and_task": table,
    }


def spread(attempts: dict[str, int], successes: dict[str, int]) -> dict[str, Any]:
    """How unevenly tasks are solved.

    Returns:
        yield (successes over attempts), tasks (successes and attempts of each), ratio of the best to the worst solved task's rate (None:
        none was solved), tasks that were never solved, and a warning, empty while each was solved and the ratio is at most :data:`UNEVEN`.
    """
    tasks = {task: [successes.get(task, 0), n] for task, n in sorted(attempts.items())}
    rates = {task: successes.get(task, 0) / n for task, n in attempts.items() if n}
    if not rates:
        return {"yield": None, "tasks": tasks, "ratio": None, "never_solved": [], "warning": "no run was scored"}
    never = sorted(task for task, rate in rates.items() if rate == 0)
    solved = [rate for rate in rates.values() if rate > 0]
    ratio = max(solved) / min(solved) if solved else None
    warning = ""
    if never:
        warning = f"{len(never)} of {len(rates)} tasks were never solved"
    if ratio is not None and ratio > UNEVEN:
        warning += f"{'; ' if warning else ''}the best task is solved {ratio:.1f} times as often as the worst"
    return {
        "yield": sum(successes.values()) / sum(attempts.values()),
        "tasks": tasks,
        "ratio": ratio,
        "never_solved": never,
        "warning": warning,
    }


def spread_lines(spread: dict[str, Any]) -> list[str]:
    """The same for a terminal: yield, each task, ratio and warning."""
    share, ratio = spread["yield"], spread["ratio"]
    return [
        f"yield: {'none' if share is None else f'{share:.1%}'} of the agents' runs",
        *(f"  {task} {passed} of {runs}" for task, (passed, runs) in spread["tasks"].items()),
        f"spread: {'none' if ratio is None else f'{ratio:.1f}'} (best over worst solved task; a warning above {UNEVEN:g})",
        f"warning: {spread['warning'] or 'none'}",
    ]


def sample_sheet(rows: Sequence[CorpusRow], decode: Callable[[list[int]], str], size: int, seed: int) -> str:
    """CSV of rows drawn at random, with empty columns for a person's verdict."""
    drawn = sorted(rows, key=lambda r: draw(seed, "judge", r.name))[:size]
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["row", "task", "feature", "turns", "loss tokens", "first words", *JUDGED])
    for row in drawn:
        loss = np.flatnonzero(row.loss_mask)
        turns = len(set(row.turn_index[loss].tolist()))
        first = decode(row.input_ids[loss[:60]].tolist())
        writer.writerow([row.name, row.task, row.feature_id, turns, len(loss), first, *[""] * len(JUDGED)])
    return out.getvalue()


def card(manifest: dict[str, Any]) -> str:
    """The dataset card (README.md) of a corpus, from its manifest alone."""
    files = manifest["files"]
    config = "\n".join(f"      - split: {split}\n        path: {entry['name']}" for split, entry in files.items())
    counts = manifest["composition"]
    lines = [
        "---",
        f"pretty_name: {manifest['name']}",
        "tags:",
        "  - verl-opsd",
        "  - agent-trajectories",
        "configs:",
        "  - config_name: default",
        f"    data_files:\n{config}",
        "---",
        "",
        f"# {manifest['name']}",
        "",
        "Trajectories of coding agents in exact token ids, with loss masks. A row is one branch of one agent's conversation; "
        "columns are described in `verl_opsd/corpus/records.py`.",
        "",
        f"- rows: {counts['rows']} of {counts['episodes']} episodes; {counts['sequence_tokens']} tokens, "
        f"{counts['loss_tokens']} with loss; the longest row has {counts['longest']}",
        f"- tokenizer: SHA-256 `{manifest['tokenizer']}`",
        f"- contract: `{manifest['contract_hashes']}`" if manifest["contract_hashes"] else "- contract: none (rendered text)",
        f"- success gate: {manifest['spec']['level']} on the merged tree; yield {_share(manifest['spread']['yield'])}"
        + (f" ({manifest['spread']['warning']})" if manifest["spread"]["warning"] else ""),
        f"- brief kinds of the actors: {_counts(manifest['brief_kinds'])}",
        "",
        "## Files",
        "",
        "| split | file | rows | SHA-256 |",
        "|---|---|---|---|",
        *(f"| {split} | {e['name']} | {e['rows']} | `{e['sha256']}` |" for split, e in files.items()),
        "",
        "## Sources",
        "",
        "| source | origin | episodes | contract |",
        "|---|---|---|---|",
        *(f"| {s['name']} | {s['origin']} | {s['episodes']} | `{s['contract_hash'][:12]}` |" for s in manifest["sources"]),
        "",
        "## Tokens by source, task and class",
        "",
        "| source | task | context | " + " | ".join(TOKEN_CLASSES) + " |",
        "|---|---|---|" + "---|" * len(TOKEN_CLASSES),
        *(
            f"| {r['source']} | {r['task']} | {r['context']} | " + " | ".join(str(r[c]) for c in TOKEN_CLASSES) + " |"
            for r in counts["by_source_and_task"]
        ),
        "",
        "## Left out",
        "",
        *(f"- {reason}: {len(names)}" for reason, names in sorted(manifest["excluded"].items())),
        "",
        "## Gates",
        "",
        *(f"- {g['gate']} ({g['version']}): {g['verdict']}. {g['detail']}" for g in manifest["gates"]),
        "",
        "Evaluation subsets that it was audited against: "
        + ", ".join(f"{name} ({len(keys)} pairs)" for name, keys in manifest["evaluation"]["subsets"].items())
        + f"; `{manifest['evaluation']['digest']}`.",
        "",
        "```json",
        json.dumps(manifest["contract"], indent=2, sort_keys=True),
        "```",
        "",
    ]
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"


def _counts(values: dict[str, int]) -> str:
    return ", ".join(f"{k} {n}" for k, n in sorted(values.items())) or "none"
