"""Makes a corpus: select, hold out, check, write."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_opsd.corpus.card import card, composition, sample_sheet, spread
from verl_opsd.corpus.contamination import Evaluated, contamination_of_row
from verl_opsd.corpus.duplicates import near_duplicates
from verl_opsd.corpus.gates import Verdict, check_rows, check_sources
from verl_opsd.corpus.records import CORPUS_SCHEMA, SPLITS, CorpusRow, write_manifest, write_rows
from verl_opsd.corpus.rendered import VERSION
from verl_opsd.corpus.rerender import Rendering
from verl_opsd.corpus.select import Selection, Source, Spec, draw, select
from verl_opsd.errors import OpsdError
from verl_opsd.rundir import file_hash

#: Rows of the sample that a person judges.
JUDGED_ROWS = 20


def build(
    sources: Sequence[Source], spec: Spec, rendering: Rendering, target: Evaluated, out: Path, model: str, dataset: str
) -> dict[str, Any]:
    """Builds a corpus from recorded runs.

    Args:
        out: folder that must not exist; it appears whole, or not at all.
        model: whose tokenizer the ids are of.
        dataset: where the evaluated tasks lie.

    Returns:
        The manifest.

    Raises:
        OpsdError: nothing passes, or a gate fails.
    """
    chosen = select(sources, spec, rendering, target)
    episodes = {(r.source, r.episode_id) for r in chosen.rows}
    by_source = {s.name: s for s in sources}
    read = {(s, e): by_source[s].store.read(e) for s, e in sorted(episodes)}
    hashes = sorted({s.contract.hash for s in sources})
    described = [
        {
            "name": s.name,
            "origin": "recorded",
            "path": s.path,
            "contract_hash": s.contract.hash,
            "episodes": len(s.store.ids()),
        }
        for s in sources
    ]
    verdicts = check_rows(chosen.rows, spec, hashes, target, rendering)
    verdicts += check_sources(chosen.rows, by_source, read, spec, rendering)
    return write_corpus(
        out, chosen, verdicts, spec, rendering, target, described, hashes, sources[0].contract.as_dict(), model, dataset
    )


def build_rendered(
    path: Path,
    rows: Sequence[CorpusRow],
    spec: Spec,
    rendering: Rendering,
    target: Evaluated,
    out: Path,
    model: str,
    dataset: str,
) -> dict[str, Any]:
    """Builds a corpus from the rows of a chat file (``corpus.rendered``); arguments and errors as for :func:`build`."""
    chosen = Selection()
    for row in rows:
        why = contamination_of_row(row, rendering.decode(row.input_ids.tolist()), target)
        if why:
            chosen.excluded["contaminated"].append(f"{row.name}: {why}")
        else:
            chosen.rows.append(row)
    if spec.near_duplicate is not None:
        same = near_duplicates(chosen.rows, spec.near_duplicate)
        chosen.excluded["near_duplicate"] = [chosen.rows[i].name for i in same]
        chosen.rows = [r for i, r in enumerate(chosen.rows) if i not in same]
    described = [
        {"name": path.stem, "origin": "rendered", "path": str(path.resolve()), "contract_hash": "", "episodes": len(rows)}
        | {"sha256": file_hash(path), "step": VERSION}
    ]
    verdicts = check_rows(chosen.rows, spec, [], target, rendering)
    return write_corpus(out, chosen, verdicts, spec, rendering, target, described, [], {}, model, dataset)


def write_corpus(
    out: Path,
    chosen: Selection,
    verdicts: Sequence[Verdict],
    spec: Spec,
    rendering: Rendering,
    target: Evaluated,
    sources: list[dict[str, Any]],
    contract_hashes: list[str],
    contract: dict[str, Any],
    model: str,
    dataset: str,
) -> dict[str, Any]:
    """Writes rows, manifest, card and sample sheet.

    Raises:
        OpsdError: the folder exists, there is no row, or a verdict is not a pass.
    """
    if out.exists():
        raise OpsdError(f"{out} exists", "a corpus is written once", "name another folder, or remove it by hand")
    left_out = ", ".join(f"{k} {len(v)}" for k, v in sorted(chosen.excluded.items()) if v) or "nothing"
    splits = {name: rows for name, rows in held_out(chosen.rows, spec).items() if rows}
    if chosen.rows and "train" not in splits:
        raise OpsdError(
            f"validation={spec.validation} holds out all {len({(r.source, r.episode_id) for r in chosen.rows})} episodes",
            "something is trained on",
            "lower --validation, or collect more",
        )
    if "train" not in splits:
        first = next((v[0] for v in chosen.excluded.values() if v), "")
        raise OpsdError(
            f"no training row (left out: {left_out}; e.g. {first})",
            "a corpus holds trajectories that passed every gate",
            "collect more, or take what was left out in with the options of `opsd corpus build`",
        )
    broken = [v for v in verdicts if v.verdict != "pass"]
    if broken:
        raise OpsdError(
            "; ".join(f"gate {v.gate}: {v.detail}" for v in broken),
            "a corpus passes all of its gates before it is written",
            "see the rows that are named",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        files = {}
        for split, rows in splits.items():
            path = temporary / f"{split}.parquet"
            write_rows(path, rows)
            files[split] = {"name": path.name, "rows": len(rows), "sha256": file_hash(path)}
        manifest = {
            "schema": CORPUS_SCHEMA,
            "name": out.name,
            "model": model,
            "tokenizer": rendering.tokenizer,
            "files": files,
            "sources": sources,
            "contract": contract,
            "contract_hashes": contract_hashes,
            "spec": dataclasses.asdict(spec),
            "composition": composition([r for rows in splits.values() for r in rows]),
            "spread": spread(chosen.attempts, chosen.successes),
            "brief_kinds": dict(Counter(r.actor_brief_kind for r in chosen.rows)),
            "excluded": {k: v for k, v in sorted(chosen.excluded.items()) if v},
            "evaluation": {
                "dataset": dataset,
                "level": target.level,
                "subsets": {k: list(v) for k, v in target.subsets.items()},
                "digest": target.digest,
            },
            "gates": [v.as_dict() for v in verdicts],
        }
        manifest = write_manifest(temporary, manifest)
        (temporary / "README.md").write_text(card(manifest), encoding="utf-8")
        sheet = sample_sheet(chosen.rows, rendering.decode, JUDGED_ROWS, spec.seed)
        (temporary / "exemplarity.csv").write_text(sheet, encoding="utf-8", newline="")
        temporary.chmod(0o755)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def held_out(rows: Sequence[CorpusRow], spec: Spec) -> dict[str, list[CorpusRow]]:
    """Rows by split: whole episodes are held out, drawn by the seed, ``spec.validation`` of them (rounded up)."""
    episodes = sorted({(r.source, r.episode_id) for r in rows}, key=lambda e: draw(spec.seed, "validation", *e))
    count = -(-len(episodes) * spec.validation // 1)
    chosen = set(episodes[: int(count)])
    out: dict[str, list[CorpusRow]] = {split: [] for split in SPLITS}
    for r in rows:
        out["validation" if (r.source, r.episode_id) in chosen else "train"].append(r)
    return out
