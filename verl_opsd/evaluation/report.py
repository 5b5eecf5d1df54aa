"""The table at the end of a run: ``report.json``, and the same on the terminal.

Rates carry 95% Wilson intervals; the denominator is the episodes that were scored, and infrastructure faults stand beside it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from verl_opsd.config import LossConfig, OpsdConfig
from verl_opsd.distill.telemetry import DEPTHS, TURN_POSITIONS, TURNS, Ledger, Telemetry, bucket, parts
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.shapes import Standing
from verl_opsd.evaluation.spent import spent, spent_rows
from verl_opsd.evaluation.standings import Checked, model_info, rows_of_run, standing
from verl_opsd.evidence.predictions import JUDGED
from verl_opsd.metering import device_rows, devices_of, tokens_a_second
from verl_opsd.rundir import RunDir
from verl_opsd.tokens.branches import build_trajectories, statistics
from verl_opsd.tokens.records import TOKEN_CLASSES, Episode
from verl_opsd.tokens.store import EpisodeStore


def telemetry(folder: Path, epochs: int = 1) -> dict[str, Any]:
    """Statistics of every use of a position in the run's updates, in training order (``distill.telemetry``), within an optimizer step by
    row and place; nats a token.

    ``infinite``: values that no statistic holds, counted by name and round; they are left out like unknown ones.
    ``summary``: of the whole window, and by token class, turn, position in the turn, tokens before the position (these three by the
    lower bound of a bucket), quarter and third of the run, epoch, and round. The other keys repeat the most asked-for of them.

    Args:
        folder: one file a round.
        epochs: passes over a round's rows.
    """
    files = sorted(folder.glob("*.npz"))
    if not files:
        return {}
    sizes = [np.load(f)["divergence"].size for f in files]
    window, start, total = Telemetry(), 0, sum(sizes)
    infinite: list[str] = []
    for f, size in zip(files, sizes, strict=True):
        values = {k: v for k, v in np.load(f).items() if v.ndim and v.dtype.kind == "f"}
        for name, value in values.items():
            if count := int(np.isinf(value).sum()):
                infinite.append(f"{count} of {size} values of {name} in round {int(f.stem)}")
                values[name] = np.where(np.isinf(value), np.nan, value)
        # Ranks and micro-batches leave a step's positions in any order. Files of versions before 'row' are ordered without it.
        order = np.lexsort([values[k] for k in ("position", "row", "step") if k in values])
        values = {name: value[order] for name, value in values.items()}
        labels = {
            "class": values["class"].astype(np.int64),
            "turn": bucket(values["turn"], TURNS),
            "turn_position": bucket(values["turn_position"], TURN_POSITIONS),
            "depth": bucket(values["position"] + 1, DEPTHS),
            "quarter": parts(start, size, total, 4),
            "third": parts(start, size, total, 3),
            "epoch": epoch_of(values["step"], epochs),
            "round": np.full(size, int(f.stem)),
        }
        window.add(values, labels)
        start += size
    summary = window.summary()
    by = summary["by"]
    by["class"] = {TOKEN_CLASSES[int(k)]: v for k, v in by["class"].items()}
    kl = summary["all"]["divergence"]

    def means(label: str, name: str) -> list[Any]:
        cells = [c[name] for c in by[label].values() if name in c]
        return [c.get("mean") if isinstance(c, dict) else c for c in cells]

    result: dict[str, Any] = {
        "window": {"rounds": [int(files[0].stem), int(files[-1].stem)], "positions": total},
        "loss_positions": summary["all"]["loss_positions"],
        "kl_mean": kl.get("mean"),
        "kl_median": kl.get("median"),
        "kl_p99": kl.get("p99"),
        "kl_max_over_mean": kl.get("max_over_mean"),
        "kl_by_quarter": means("quarter", "divergence"),
        "agreement_by_quarter": means("quarter", "agree"),
        "kl_by_round": means("round", "divergence"),
        "infinite": infinite,
        "summary": summary,
    }
    if "drift" in summary["all"]:
        result["drift_by_quarter"] = means("quarter", "drift")
    return result


def epoch_of(step_N: NDArray[Any], epochs: int) -> NDArray[np.int64]:
    """The epoch, from 0, of each optimizer step of one round; all of its epochs have the same number of steps."""
    steps, rank_N = np.unique(step_N, return_inverse=True)
    return rank_N * epochs // len(steps) if len(steps) else rank_N


def ledger(episodes: Iterable[Episode], run: RunDir, loss: LossConfig) -> Ledger:
    """Where the states and policy tokens went that rounds were trained on; tokens count once, in their first epoch.

    Args:
        episodes: that the rounds of ``run`` collected or took from a corpus.

    Raises:
        OpsdError: the positions of the updates are not the policy tokens of the branches that became rows.
    """
    states = usable = reply_tokens = 0
    dropped: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for e in episodes:
        no_row = run.left_out(e.episode_id) if e.scored else {}
        for turn in e.turns:
            states += 1
            why = e.outcome if not e.scored else no_row.get(f"{turn.agent_id}/{turn.branch}")
            if why is None and turn.kind == "summarizer":
                why = "kind summarizer"
            if why is None:
                reply_tokens += len(turn.response_ids)
                if turn.kind not in loss.turn_kinds:
                    why = f"kind {turn.kind}"
                elif loss.turns is not None and not any(a <= turn.turn < b for a, b in loss.turns):
                    why = "outside turns"
                if why is None:
                    usable += 1
                    continue
                left_out[why] += len(turn.response_ids)
            dropped[why] += 1
    by_turn = sum(left_out.values())
    by_class: Counter[str] = Counter()
    masked = 0
    for f in sorted((run.path / "telemetry").glob("*.npz")):
        v = dict(np.load(f))
        first = epoch_of(v["step"], loss.epochs) == 0
        coef, weight, code = v["coef"][first], v["weight"][first], v["class"][first]
        inside = (coef != 0) & (weight != 0)
        codes, counts = np.unique(code[inside], return_counts=True)
        by_class.update({TOKEN_CLASSES[int(c)]: int(n) for c, n in zip(codes, counts, strict=True)})
        carried = int(v["carried"])
        masked += coef.size - carried
        left_out["shut by the gate" if loss.threshold is None else "below the threshold"] += carried - int(inside.sum())
    left_out["weight 0"] += masked - by_turn
    return Ledger(states, usable, dict(dropped), reply_tokens, dict(by_class), {k: n for k, n in left_out.items() if n})


def ledger_or_cause(run: RunDir, opsd: OpsdConfig, episodes: Iterable[Episode]) -> dict[str, Any]:
    """The ledger as plain values; where it does not sum, ``refused`` says why, and the rest of the report stands."""
    folder = run.path / "telemetry"
    if not any(folder.glob("*.npz")):
        return {}
    try:
        return dataclasses.asdict(ledger(trained_episodes(run, opsd, episodes), run, opsd.loss))
    except OpsdError as error:
        return {"refused": str(error)}


def trained_episodes(run: RunDir, opsd: OpsdConfig, episodes: Iterable[Episode]) -> list[Episode]:
    """Those that the run's updates used: of the rounds that were trained, or of the corpus."""
    if opsd.corpus is not None:
        corpus = EpisodeStore(RunDir(Path(opsd.corpus).expanduser()).episodes)
        return [e for e in corpus.episodes() if e.split == "train" and e.scored]
    rounds = {int(f.stem) for f in (run.path / "telemetry").glob("*.npz")}
    return [e for e in episodes if e.split == "train" and int(e.episode_id.split("-")[1]) in rounds]


def build_report(run: RunDir, opsd: OpsdConfig, episodes: Sequence[Episode], checked: Checked) -> dict[str, Any]:
    """The report as plain values; see the module's docstring.

    Args:
        episodes: of the run's store.
        checked: the run's evidence, and the state of each episode.
    """
    contract = run.contract()
    stages = run.stages()
    seconds: Counter[str] = Counter()
    for s in stages:
        seconds[s["stage"]] += s["seconds"]
    trained = [s for s in stages if s["stage"] == "train"]
    branches = [
        t for e in episodes for a in ("agent1", "agent2") for t in build_trajectories([r for r in e.turns if r.agent_id == a])
    ]
    gates = [x for x in checked[0] if not x["gate"].startswith(JUDGED)]
    return {
        "recipe": opsd.recipe,
        "scale": opsd.scale,
        "brief": {"name": opsd.brief.name, "placement": opsd.brief.placement},
        "teacher": opsd.teacher.kind,
        "loss_spec": {"divergence": opsd.loss.divergence, "anchor": opsd.loss.anchor, "reduction": opsd.loss.reduction},
        "contract": contract.hash,
        "standings": {k: dataclasses.asdict(s) for k, s in _standings(run, checked, episodes).items()},
        "distillation": telemetry(run.path / "telemetry", opsd.loss.epochs),
        "ledger": ledger_or_cause(run, opsd, episodes),
        "loss_by_round": [s["outputs"]["loss"] for s in trained],
        "kept_share_by_round": [s["outputs"]["opsd/kept_share"] for s in trained if "opsd/kept_share" in s["outputs"]],
        "tokens_per_loss_token": (
            sum(s["outputs"]["sequence_tokens"] for s in trained) / max(1, sum(s["outputs"]["loss_tokens"] for s in trained))
            if trained
            else None
        ),
        "branches": statistics(branches) if branches else {},
        "seconds": dict(seconds),
        "tokens_a_second": tokens_a_second(stages, opsd.loss.epochs),
        "devices": devices_of(stages),
        "spent": spent(run, episodes, opsd.budget.sandbox_usd_per_hour, collects=opsd.mode != "offline"),
        "gates": {
            "passed": sum(g["verdict"] == "pass" for g in gates),
            "failed": [g for g in gates if g["verdict"] == "fail"],
        },
    }


def _standings(run: RunDir, checked: Checked, episodes: Sequence[Episode]) -> dict[str, Standing]:
    rows = rows_of_run(episodes, checked[0])
    return {k: standing(k, own, model_info(run.path, own, k.partition("@")[0], v, checked)) for k, v, own in rows}


#: Lines that the terminal shows of where two verdicts differ; the others are in ``report.json``.
_SHOWN_DIFFERENCES = 5


def standing_rows(s: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and text of what the table at a run's end says of one row of the standings, as ``report.json`` holds it."""

    def counts(values: Mapping[str, int]) -> str:
        return ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in values.items())

    def shown(x: Mapping[str, Any]) -> str:
        if not x["total"]:
            return "none scored"
        return f"{x['passed']} of {x['total']}  (95% {x['low']:.0%} to {x['high']:.0%})"

    for said in (*s["invalidated"], *s["doubts"]):
        yield "evidence", said
    yield "episodes", f"{s['scored']} scored of {s['ran']}" + (f", void: {counts(s['void'])}" if s["void"] else "")
    yield "merges", counts(s["merges"]) or "none scored"
    yield "features passed", shown(s["features"])
    yield "pairs passed", shown(s["pairs"])
    if s["differences"]:
        more = len(s["differences"]) - _SHOWN_DIFFERENCES
        yield "features passed, strictly", shown(s["features_strict"])
        lines = [*s["differences"][:_SHOWN_DIFFERENCES], *([f"and {more} more, in report.json"] if more > 0 else [])]
        yield "where the grades differ", "\n".join(lines)
    yield "agents", counts(s["exits"]) or "none ended a run"
    for reason in s["stamps"]:
        yield "stamp", reason


def print_table(path: Path) -> None:
    """Shows ``report.json`` on the terminal."""
    r = json.loads(path.read_text())
    table = Table(title=f"{r['recipe']} (scale {r['scale']}, contract {r['contract'][:12]})", show_header=False)
    table.add_column("what", overflow="fold")
    table.add_column("value", overflow="fold")

    for key in sorted(r["standings"], key=lambda k: (k != "train", int(k.partition("@")[2] or sys.maxsize))):
        for what, text in standing_rows(r["standings"][key]):
            table.add_row(f"{key} {what}", text)
    d = r["distillation"]
    if d:
        table.add_row("KL by quarter (nats a token)", "  ".join("-" if x is None else f"{x:.2e}" for x in d["kl_by_quarter"]))
        table.add_row("top-1 agreement by quarter", "  ".join(f"{x:.3f}" for x in d["agreement_by_quarter"]))
        whole = d["summary"]["all"]
        kl = whole["divergence"]
        if d["infinite"]:
            table.add_row("infinite, in no statistic", "; ".join(d["infinite"]))
        if kl:
            table.add_row("KL mean, median, p90, p99", "  ".join(f"{kl[k]:.2e}" for k in ("mean", "median", "p90", "p99")))
        if kl and kl["max_over_mean"] is not None:
            share = kl["top1pct_share"]
            table.add_row(
                "KL max/mean; share of the top 1%", f"{kl['max_over_mean']:.1f}; {'-' if share is None else f'{share:.0%}'}"
            )
        classes = {k: c["divergence"]["mean"] for k, c in d["summary"]["by"]["class"].items() if c["divergence"]}
        table.add_row("KL by token class", "  ".join(f"{k} {x:.2e}" for k, x in classes.items()))
        if "drift" in whole:
            sides = [(k, whole["drift"][k]) for k in ("inside", "outside") if whole["drift"][k] is not None]
            table.add_row("drift from the base, in and out of the mask", "  ".join(f"{k} {x:.2e}" for k, x in sides))
        table.add_row("loss by round", "  ".join(f"{x:.3e}" for x in r["loss_by_round"]))
        out = r["ledger"]
        if "refused" in out:
            table.add_row("ledger", out["refused"])
        else:
            why = "".join(f", {n} {reason}" for k in ("dropped", "left_out") for reason, n in out[k].items())
            table.add_row("states used, reply tokens", f"{out['usable']} of {out['states']}, {out['reply_tokens']}{why}")
        table.add_row("loss positions", str(d["loss_positions"]))
        if r["kept_share_by_round"]:
            table.add_row("kept by the threshold, by round", "  ".join(f"{x:.1%}" for x in r["kept_share_by_round"]))
        if r["tokens_per_loss_token"] is not None:
            table.add_row("tokens a loss token", f"{r['tokens_per_loss_token']:.1f}")
    table.add_row("seconds by stage", "  ".join(f"{k} {v:.1f}" for k, v in r["seconds"].items()))
    for name, value in device_rows(r):
        table.add_row(name, value)
    if costs := [f"{name}: {words}" for name, words in spent_rows(r.get("spent", {}))]:
        table.add_row("what episodes took", "\n".join(costs))
    table.add_row("gates", f"{r['gates']['passed']} passed, {len(r['gates']['failed'])} failed")
    for name, rows in r.get("predictions", {}).items():
        table.add_row(f"predictions {name}", ", ".join(f"{p['metric']} {p['verdict']}" for p in rows))
    out = r.get("evidence", {"episodes": {}, "invalidated": [], "findings": []})
    for m in out["invalidated"]:
        table.add_row(f"[bold]invalidated[/] {m['field']}={m['value']}", m["reason"])
    states = {k: n for k, n in out["episodes"].items() if k != "whole"}
    if states:
        words = {
            "gone": "unverifiable, as their files are gone",
            "altered": "not as graded",
            "unrecorded": "unknown to the evidence",
        }
        table.add_row("[bold]episodes[/]", ", ".join(f"{n} {words[k]}" for k, n in states.items()))
    if out["findings"]:
        table.add_row("[bold]evidence[/]", "; ".join(out["findings"]))
    Console(width=120).print(table)
