"""The table at the end of a run: ``report.json``, and the same on the terminal.

Rates carry 95% Wilson intervals; the denominator is the episodes that were scored, and infrastructure faults stand beside it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest

from verl_opsd.config import OpsdConfig
from verl_opsd.rundir import RunDir, write_json
from verl_opsd.tokens.branches import build_trajectories, statistics
from verl_opsd.tokens.records import Episode
from verl_opsd.tokens.store import EpisodeStore


def rate(passed: int, total: int) -> dict[str, Any]:
    """A count with its 95% Wilson interval; no interval without a denominator."""
    if total == 0:
        return {"passed": 0, "total": 0, "rate": None, "ci95": None}
    interval = binomtest(passed, total).proportion_ci(0.95, method="wilson")
    return {"passed": passed, "total": total, "rate": passed / total, "ci95": [interval.low, interval.high]}


def standings(episodes: Iterable[Episode]) -> dict[str, Any]:
    """Outcomes, merges and passes of a set of episodes."""
    episodes = list(episodes)
    scored = [e for e in episodes if e.scored]
    merges: Counter[str] = Counter()
    features = pairs = 0
    for e in scored:
        assert e.grade is not None
        skipped = "skipped" in e.grade.apply_status.values()
        merges[f"{e.grade.merge}{' (a patch was empty)' if e.grade.merge == 'clean' and skipped else ''}"] += 1
        features += sum(f.passed for f in e.grade.features)
        pairs += all(f.passed for f in e.grade.features)
    agents = [a for e in scored for a in e.agents]
    return {
        "episodes": {"ran": len(episodes), "scored": len(scored), "outcomes": dict(Counter(e.outcome for e in episodes))},
        "merges": dict(merges),
        "features": rate(features, 2 * len(scored)),
        "pairs": rate(pairs, len(scored)),
        "agents": {
            "statuses": dict(Counter(a.status for a in agents)),
            "non_empty_patches": rate(sum(bool(a.patch.strip()) for a in agents), len(agents)),
            "messages_sent": sum(a.sent_messages for a in agents),
            "turns": sum(len(e.turns) for e in scored),
        },
        "near_benchmark": sorted({e.near_benchmark for e in episodes if e.near_benchmark}),
    }


def telemetry(folder: Path) -> dict[str, Any]:
    """Divergence and agreement over the run's loss positions, in training order, by quarter. Nats a token."""
    files = sorted(folder.glob("*.npz"))
    if not files:
        return {}
    parts = [dict(np.load(f)) for f in files]
    whole = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
    kl, agree = whole["divergence"], whole["agree"]
    result: dict[str, Any] = {
        "loss_positions": int(kl.size),
        "kl_mean": float(kl.mean()),
        "kl_median": float(np.median(kl)),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "kl_max_over_mean": float(kl.max() / kl.mean()) if kl.mean() > 0 else None,
        "kl_by_quarter": [float(q.mean()) for q in np.array_split(kl, 4) if q.size],
        "agreement_by_quarter": [float(q.mean()) for q in np.array_split(agree, 4) if q.size],
        "kl_by_round": [float(p["divergence"].mean()) for p in parts],
    }
    if "anchor" in whole and np.isfinite(whole["anchor"]).all():
        result["drift_by_quarter"] = [float(q.mean()) for q in np.array_split(whole["anchor"], 4) if q.size]
    return result


def build_report(run: RunDir, opsd: OpsdConfig) -> dict[str, Any]:
    """The report as plain values; see the module's docstring."""
    contract = run.contract()
    episodes = list(EpisodeStore(run.episodes).episodes()) if run.episodes.is_dir() else []
    stages = run.stages()
    seconds: Counter[str] = Counter()
    for s in stages:
        seconds[s["stage"]] += s["seconds"]
    trained = [s for s in stages if s["stage"] == "train"]
    branches = [
        t for e in episodes for a in ("agent1", "agent2") for t in build_trajectories([r for r in e.turns if r.agent_id == a])
    ]
    evidence = run.path / "evidence.jsonl"
    gates = [json.loads(line) for line in evidence.read_text().splitlines()] if evidence.is_file() else []
    return {
        "recipe": opsd.recipe,
        "scale": opsd.scale,
        "brief": {"name": opsd.brief.name, "placement": opsd.brief.placement},
        "teacher": opsd.teacher.kind,
        "loss_spec": {"divergence": opsd.loss.divergence, "anchor": opsd.loss.anchor, "reduction": opsd.loss.reduction},
        "contract": contract.hash,
        "train": standings(e for e in episodes if e.split == "train"),
        "eval": standings(e for e in episodes if e.split == "eval"),
        "eval_by_version": {
            str(v): standings(e for e in episodes if e.split == "eval" and e.model_version == v)
            for v in sorted({e.model_version for e in episodes if e.split == "eval"})
        },
        "distillation": telemetry(run.path / "telemetry"),
        "loss_by_round": [s["outputs"]["loss"] for s in trained],
        "kept_share_by_round": [s["outputs"]["opsd/kept_share"] for s in trained if "opsd/kept_share" in s["outputs"]],
        "tokens_per_loss_token": (
            sum(s["outputs"]["sequence_tokens"] for s in trained) / max(1, sum(s["outputs"]["loss_tokens"] for s in trained))
            if trained
            else None
        ),
        "branches": statistics(branches) if branches else {},
        "seconds": dict(seconds),
        "gates": {
            "passed": sum(g["verdict"] == "pass" for g in gates),
            "failed": [g for g in gates if g["verdict"] == "fail"],
        },
    }


def write_report(run: RunDir, opsd: OpsdConfig) -> dict[str, Any]:
    """Builds the report and writes ``report.json``."""
    report = build_report(run, opsd)
    write_json(run.report, report)
    return report


def print_table(path: Path) -> None:
    """Shows ``report.json`` on the terminal."""
    r = json.loads(path.read_text())
    table = Table(title=f"{r['recipe']} (scale {r['scale']}, contract {r['contract'][:12]})", show_header=False)
    table.add_column("what")
    table.add_column("value", overflow="fold")

    def shown(x: dict[str, Any]) -> str:
        if not x["total"]:
            return "none scored"
        return f"{x['passed']} of {x['total']}  (95% {x['ci95'][0]:.0%} to {x['ci95'][1]:.0%})"

    for split in ("train", "eval"):
        s = r[split]
        if not s["episodes"]["ran"]:
            continue
        table.add_row(
            f"{split} episodes", f"{s['episodes']['scored']} scored of {s['episodes']['ran']}  {s['episodes']['outcomes']}"
        )
        table.add_row(f"{split} merges", str(s["merges"]))
        table.add_row(f"{split} features passed", shown(s["features"]))
        table.add_row(f"{split} pairs passed", shown(s["pairs"]))
        table.add_row(f"{split} agents", str(s["agents"]["statuses"]))
        for reason in s["near_benchmark"]:
            table.add_row(f"{split} stamp", f"not a CooperBench score: {reason}")
    d = r["distillation"]
    if d:
        table.add_row("KL by quarter (nats a token)", "  ".join(f"{x:.2e}" for x in d["kl_by_quarter"]))
        table.add_row("top-1 agreement by quarter", "  ".join(f"{x:.3f}" for x in d["agreement_by_quarter"]))
        table.add_row("KL max/mean", "-" if d["kl_max_over_mean"] is None else f"{d['kl_max_over_mean']:.1f}")
        table.add_row("loss by round", "  ".join(f"{x:.3e}" for x in r["loss_by_round"]))
        table.add_row("loss positions", str(d["loss_positions"]))
        if r["kept_share_by_round"]:
            table.add_row("kept by the threshold, by round", "  ".join(f"{x:.1%}" for x in r["kept_share_by_round"]))
        table.add_row("tokens a loss token", f"{r['tokens_per_loss_token']:.1f}")
    table.add_row("seconds by stage", "  ".join(f"{k} {v:.1f}" for k, v in r["seconds"].items()))
    table.add_row("gates", f"{r['gates']['passed']} passed, {len(r['gates']['failed'])} failed")
    Console(width=120).print(table)
