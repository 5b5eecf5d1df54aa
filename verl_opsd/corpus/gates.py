"""Everything that a finished corpus is checked against, each gate by its name.

``manifest``, ``file_hash``, ``row_hash``, ``mask``, ``contract``, ``tokenizer``, ``brief_kind``, ``contamination``, ``near_duplicate``,
``composition`` and ``card`` need the corpus alone; ``recorded``, ``success``, ``observation`` and ``rendered_again`` compare it with the
episodes that it was made of.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np

from verl_opsd.contract import EvalContract
from verl_opsd.corpus import contamination
from verl_opsd.corpus.card import card, composition
from verl_opsd.corpus.contamination import Evaluated, contamination_of_row
from verl_opsd.corpus.duplicates import near_duplicates
from verl_opsd.corpus.records import CorpusRow, digest_of, read_manifest, read_rows
from verl_opsd.corpus.rerender import Rendering, rerender
from verl_opsd.corpus.select import Source, Spec, longest_observation, passes, rows_of_episode, unlike
from verl_opsd.errors import OpsdError
from verl_opsd.rundir import file_hash
from verl_opsd.tokens.records import Episode

#: Version of each gate; a change of what a gate accepts changes it.
VERSIONS = {
    "manifest": "1",
    "file_hash": "1",
    "row_hash": "1",
    "mask": "1",
    "contract": "1",
    "tokenizer": "1",
    "brief_kind": "1",
    "contamination": contamination.VERSION,
    "near_duplicate": "1",
    "composition": "2",
    "card": "1",
    "recorded": "2",
    "success": "1",
    "observation": "1",
    "rendered_again": "2",
}


@dataclass(frozen=True)
class Verdict:
    """One gate's. ``failures`` names everything that broke it."""

    gate: str
    verdict: Literal["pass", "fail", "not run"]
    detail: str
    failures: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values with the gate's version, without the list of failures."""
        return {"gate": self.gate, "version": VERSIONS[self.gate], "verdict": self.verdict, "detail": self.detail}


def verdict(gate: str, failures: Iterable[str], passed: str) -> Verdict:
    """A verdict from what broke the gate; ``passed`` says what was looked at."""
    found = tuple(failures)
    shown = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
    return Verdict(gate, "fail" if found else "pass", shown or passed, found)


def check_rows(
    rows: Sequence[CorpusRow], spec: Spec, contract_hashes: Sequence[str], target: Evaluated, rendering: Rendering
) -> list[Verdict]:
    """The gates that need nothing but the rows."""
    n = f"{len(rows)} rows"
    allowed = ("none", "scope", "guidance", "answer") if spec.allow_answer else ("none", "scope", "guidance")
    texts = [(r, rendering.decode(r.input_ids.tolist())) for r in rows]
    dirty = [(r, why) for r, text in texts if (why := contamination_of_row(r, text, target))]
    even = [r for r in rows if not uneven(r)]  # the others break the gate of masks
    same = {} if spec.near_duplicate is None else near_duplicates(even, spec.near_duplicate)
    near = [f"{even[i].name}: {share:.0%} of {even[j].name}" for i, (j, share) in same.items()]
    return [
        verdict("row_hash", (f"{r.name}: its fields have another hash" for r in rows if r.computed_hash() != r.row_hash), n),
        verdict("mask", (f"{r.name}: {why}" for r in rows if (why := mask_problem(r))), n),
        verdict(
            "contract",
            (
                f"{r.name}: contract {r.contract_hash[:12] or 'none'}"
                for r in rows
                if (r.contract_hash not in contract_hashes if r.origin == "recorded" else bool(r.contract_hash))
            ),
            f"{n} of {len(contract_hashes)} contracts",
        ),
        verdict(
            "brief_kind",
            (f"{r.name}: {r.actor_brief_kind}" for r in rows if r.actor_brief_kind not in allowed),
            ", ".join(allowed),
        ),
        verdict("contamination", (f"{r.name}: {why}" for r, why in dirty), f"{n} against {len(target.texts)} texts"),
        verdict("near_duplicate", near, n if spec.near_duplicate is not None else "switched off in the specification"),
    ]


def uneven(row: CorpusRow) -> bool:
    """Whether a row's arrays are of several lengths."""
    return len({len(a) for a in (row.input_ids, row.loss_mask, row.turn_index, row.token_class, row.logprobs)}) != 1


def mask_problem(row: CorpusRow) -> str:
    """What is wrong with a row's mask, turns and classes by themselves; empty when nothing is."""
    mask, turn, kind, length = row.loss_mask, row.turn_index, row.token_class, len(row.input_ids)
    if uneven(row) or not length:
        return f"arrays of other lengths than its {length} ids"
    if not set(np.unique(mask).tolist()) <= {0, 1} or not mask.any():
        return "a mask is 0 or 1, and 1 somewhere"
    if mask[0]:
        return "its first token has loss, and nothing predicts it"
    if ((mask == 1) & (turn < 0)).any():
        return f"loss on a token that no turn wrote (position {int(np.flatnonzero((mask == 1) & (turn < 0))[0])})"
    if ((turn < 0) != (kind < 0)).any():
        return "a token has a class exactly when a turn wrote it"
    starts = np.flatnonzero(np.diff(turn, prepend=-2))
    for a, b in zip(starts.tolist(), [*starts[1:].tolist(), length], strict=True):
        if mask[a:b].min() != mask[a:b].max():
            return f"turn {int(turn[a])} has loss on a part of its tokens (positions {a} to {b - 1})"
    return ""


def check_sources(
    rows: Sequence[CorpusRow],
    sources: Mapping[str, Source],
    episodes: Mapping[tuple[str, str], Episode],
    spec: Spec,
    rendering: Rendering,
) -> list[Verdict]:
    """The gates that compare recorded rows with the episodes that they are of."""
    recorded, failed, long, different = [], [], [], []
    recorded_rows = [r for r in rows if r.origin == "recorded"]
    for name in sorted({(r.source, r.episode_id, r.agent_id) for r in recorded_rows}):
        mine = [r for r in recorded_rows if (r.source, r.episode_id, r.agent_id) == name]
        episode = episodes.get(name[:2])
        if episode is None:
            recorded.append(f"{'/'.join(name)}: no such episode")
            continue
        if why := sources[name[0]].invalidated(episode):
            recorded.append(f"{'/'.join(name)}: {why}")
        hint = sources[name[0]].hints(episode).get(name[2])
        stored = {r.branch: r for r in rows_of_episode(name[0], episode, name[2], rendering, hint)[0]}
        recorded += [f"{r.name}: {why}" for r in mine if (why := difference(r, stored.get(r.branch)))]
        if not passes(episode, name[2], spec.level):
            failed.append("/".join(name))
        messages = episode.messages.get(name[2], [])
        if (longest := longest_observation(messages)) > spec.max_observation:
            long.append(f"{'/'.join(name)}: {longest} characters")
        found = rerender([t for t in episode.turns if t.agent_id == name[2]], messages, rendering, hint or ())
        different += [f"{r.name}: {wrong}" for r in mine if (wrong := unlike(r, found))]
    n = f"{len(recorded_rows)} recorded rows"
    return [
        verdict("recorded", recorded, n),
        verdict("success", failed, f"{n}, level {spec.level}"),
        verdict("observation", long, f"at most {spec.max_observation} characters"),
        verdict("rendered_again", different, n),
    ]


def difference(row: CorpusRow, stored: CorpusRow | None) -> str:
    """The first field in which a row differs from what was recorded, with the first position of an array."""
    if stored is None:
        return "no such row in its source"
    for f in dataclasses.fields(row):
        a, b = getattr(row, f.name), getattr(stored, f.name)
        if isinstance(a, np.ndarray):
            if len(a) != len(b):
                return f"{f.name} of {len(a)} entries, recorded {len(b)}"
            if a.tobytes() != b.tobytes():
                at = int(np.flatnonzero(a.view(f"i{a.itemsize}") != b.view(f"i{b.itemsize}"))[0])
                return f"{f.name}[{at}] is {a[at]}, recorded {b[at]}"
        elif a != b and f.name != "row_hash":
            return f"{f.name} is {a!r}, recorded {b!r}"
    return ""


def check(
    folder: Path,
    rendering: Rendering,
    target: Evaluated,
    sources: Mapping[str, Source] | None,
    rendered: Sequence[CorpusRow] = (),
) -> list[Verdict]:
    """Every gate of a corpus on disk.

    Args:
        sources: the corpus' sources by their names; None leaves out the gates that need them.
        rendered: what rendering the corpus' chat files again gives.
    """
    manifest = read_manifest(folder, changed=True)
    found, stated = digest_of(manifest), str(manifest["digest"])
    signed = verdict(
        "manifest", [f"it has digest {found[:12]}, and states {stated[:12]}"] if found != stated else [], stated[:12]
    )
    files = _files(folder, manifest)
    try:
        rows = {split: read_rows(folder / entry["name"]) for split, entry in manifest["files"].items()}
    except OpsdError as error:
        rest = (Verdict(g, "not run", "the rows can't be read") for g in VERSIONS if g not in ("manifest", "file_hash"))
        return [signed, verdict("file_hash", [*files.failures, error.what], ""), *rest]
    every = [row for some in rows.values() for row in some]
    if (fields := set(manifest["spec"])) != (known := {f.name for f in dataclasses.fields(Spec)}):
        raise OpsdError(
            f"{folder}: specification with {sorted(fields ^ known)}", f"it states {sorted(known)}", "build the corpus again"
        )
    spec = Spec(**manifest["spec"])
    verdicts = [signed, files, *check_rows(every, spec, manifest["contract_hashes"], target, rendering)]
    try:
        verdicts += [
            _manifest_contract(manifest),
            _evaluation(manifest, target),
            _tokenizer(manifest, rendering),
            _counts(manifest, rows),
            _card(folder, manifest),
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise OpsdError(
            f"{folder}: manifest, {type(error).__name__}: {error}", "a manifest is whole", "build the corpus again"
        ) from error
    if sources is None:
        names = ("recorded", "success", "observation", "rendered_again")
        return [*merged(verdicts), *(Verdict(g, "not run", "the sources were left out") for g in names)]
    again = {r.name: r for r in rendered}
    changed = [f"{r.name}: {why}" for r in every if r.origin == "rendered" and (why := difference(r, again.get(r.name)))]
    verdicts.append(verdict("rendered_again", changed, f"{len(rendered)} rendered rows"))
    return merged(verdicts + check_sources(every, sources, _episodes(every, sources), spec, rendering))


def merged(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Verdicts of one gate as one, in the order of :data:`VERSIONS`."""
    out = []
    for gate in VERSIONS:
        mine = [v for v in verdicts if v.gate == gate]
        if mine:
            out.append(verdict(gate, (f for v in mine for f in v.failures), "; ".join(v.detail for v in mine)))
    return out


def _files(folder: Path, manifest: dict[str, Any]) -> Verdict:
    paths = {entry["name"]: folder / entry["name"] for entry in manifest["files"].values()}
    found = {name: file_hash(path) if path.is_file() else "none" for name, path in paths.items()}
    broken = [
        f"{e['name']} has SHA-256 {found[e['name']][:12]}, the manifest says {e['sha256'][:12]}"
        for e in manifest["files"].values()
        if found[e["name"]] != e["sha256"]
    ]
    return verdict("file_hash", broken, f"{len(found)} files")


def _manifest_contract(manifest: dict[str, Any]) -> Verdict:
    """The manifest's contract has one of the hashes that it names."""
    hashes = manifest["contract_hashes"]
    found = EvalContract.from_dict(manifest["contract"]).hash if hashes else ""
    wrong = [f"the manifest's contract has hash {found[:12]}"] if hashes and found not in hashes else []
    return verdict("contract", wrong, found[:12])


def _evaluation(manifest: dict[str, Any], target: Evaluated) -> Verdict:
    stated = manifest["evaluation"]["digest"]
    wrong = [f"audited against {stated[:12]}, these subsets are {target.digest[:12]}"] if target.digest != stated else []
    return verdict("contamination", wrong, ", ".join(target.subsets))


def _tokenizer(manifest: dict[str, Any], rendering: Rendering) -> Verdict:
    mine, stated = rendering.tokenizer, manifest["tokenizer"]
    return verdict("tokenizer", [f"{mine[:12]}, built with {stated[:12]}"] if mine != stated else [], mine[:12])


def _counts(manifest: dict[str, Any], rows: Mapping[str, Sequence[CorpusRow]]) -> Verdict:
    counted = composition([row for some in rows.values() for row in some if not uneven(row)])
    stated = manifest["composition"]
    wrong = [f"{k}: counted {counted[k]!r}, manifest {stated.get(k)!r}" for k in counted if counted[k] != stated.get(k)]
    wrong += [
        f"{split}: {len(some)} rows, manifest {manifest['files'][split]['rows']}"
        for split, some in rows.items()
        if len(some) != manifest["files"][split]["rows"]
    ]
    kinds = dict(Counter(row.actor_brief_kind for some in rows.values() for row in some))
    if kinds != manifest["brief_kinds"]:
        wrong.append(f"brief kinds: counted {kinds}, manifest {manifest['brief_kinds']}")
    episodes = [{(row.source, row.episode_id) for row in some} for some in rows.values()]
    wrong += [f"{'/'.join(e)} is in {' and '.join(rows)}" for e in sorted(set.intersection(*episodes)) if len(rows) > 1]
    return verdict("composition", wrong, f"{counted['loss_tokens']} loss tokens")


def _card(folder: Path, manifest: dict[str, Any]) -> Verdict:
    """The card says what the manifest says, and was told of no gate that had failed."""
    path = folder / "README.md"
    told, made = path.read_text(encoding="utf-8").splitlines() if path.is_file() else [], card(manifest).splitlines()
    lines = zip_longest(told, made, fillvalue="no line")
    wrong = [f"line {n}: {a!r}, the manifest gives {b!r}" for n, (a, b) in enumerate(lines, 1) if a != b]
    wrong += [f"built although {g['gate']} was {g['verdict']}" for g in manifest["gates"] if g["verdict"] != "pass"]
    return verdict("card", wrong, f"{len(made)} lines")


def _episodes(rows: Sequence[CorpusRow], sources: Mapping[str, Source]) -> dict[tuple[str, str], Episode]:
    wanted = {(r.source, r.episode_id) for r in rows if r.origin == "recorded"}
    missing = sorted({s for s, _ in wanted} - set(sources))
    if missing:
        raise OpsdError(
            f"no source {', '.join(missing)}",
            "a corpus is checked against the episodes that it was made of",
            "name their run directories with --source, or leave these gates out with --without-sources",
        )
    known = {name: set(source.store.ids()) for name, source in sources.items()}
    return {(s, e): sources[s].store.read(e) for s, e in sorted(wanted) if e in known[s]}
