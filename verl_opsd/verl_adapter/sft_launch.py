"""Before and after a warm start (``+recipe=warm_start``): what is checked and written before verl loads a model.

Under torchrun every rank comes here; rank 0 writes, the others wait for what it has written.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from verl_opsd import resume
from verl_opsd.corpus.curriculum import Entry, Phase, schedule
from verl_opsd.corpus.records import read_manifest, read_split, require_files
from verl_opsd.errors import OpsdError
from verl_opsd.rundir import RunDir, file_hash, read_json, write_json
from verl_opsd.verl_adapter.callback import refusing
from verl_opsd.verl_adapter.choices import require_command
from verl_opsd.verl_adapter.place import Found, require_writable
from verl_opsd.verl_adapter.sft_config import parse
from verl_opsd.verl_adapter.targets import check_adapter
from verl_opsd.verl_adapter.values import check_shards

#: Seconds that ranks wait for rank 0's files.
WAIT_S = 300.0
#: Seconds that rank 0 waits for the others before it gives the directory of a refused run back.
GATHER_S = 30.0
#: Keys that may change when a run is continued: how often it saves and validates, and where its numbers go.
MAY_CHANGE = (
    "trainer.save_freq", "trainer.test_freq", "trainer.logger", "trainer.project_name", "trainer.experiment_name",
    "trainer.max_ckpt_to_keep", "trainer.profile_interval", "global_profiler", "profiler",
)  # fmt: skip


def prepare(config: DictConfig, run: RunDir, ranks: int) -> dict[str, Any]:
    """Checks corpora against the model, and writes the schedules. Returns what is trained on, in numbers.

    Raises:
        OpsdError: a corpus that fails a gate or has changed, corpora of two tokenizers or contracts, rows longer than a pass, or a batch
            that the ranks can't share.
    """
    from verl_opsd.verl_adapter.requirements import check_heads, check_model_path, ensure_embedded

    opsd = parse(config)
    ensure_embedded(opsd.student)
    check_model_path(str(config.model.path), "model.path")
    check_adapter(config.model, "model", str(config.model.path))
    check_heads(config.engine.ulysses_sequence_parallel_size, "engine", str(config.model.path))
    check_shards(config.engine.fsdp_size, "engine.fsdp_size", ranks)
    folders = {name: Path(path).expanduser().resolve() for name, path in opsd.corpora.items()}
    manifests = {name: read_manifest(path) for name, path in folders.items()}
    tokenizer = _same_corpora(folders, manifests, str(config.model.path))
    batch, sp = config.data.train_batch_size, config.engine.ulysses_sequence_parallel_size
    if batch < 1 or batch * sp % ranks:
        raise OpsdError(
            f"data.train_batch_size={batch} on {ranks} ranks, {sp} of which share a sequence",
            "a batch is shared out evenly",
            "choose a multiple of the ranks",
        )
    phases = [Phase(dict(p.buckets), p.epochs) for p in opsd.phases.values()]
    entries = schedule({n: m["files"]["train"]["rows"] for n, m in manifests.items()}, phases, batch, opsd.seed)
    held: list[Entry] = [
        (n, i) for n, m in manifests.items() if "validation" in m["files"] for i in range(m["files"]["validation"]["rows"])
    ]
    held += [("", -1)] * (-len(held) % batch)
    if config.trainer.test_freq > 0 and not held:
        raise OpsdError(
            f"trainer.test_freq={config.trainer.test_freq} without validation rows",
            "a validation loss needs rows that are held out",
            "build the corpus with --validation, or set trainer.test_freq=-1",
        )
    longest = _lengths(config, folders, manifests, entries, held)
    for split, chosen in (("train", entries), ("validation", held)):
        files = {n: str(folders[n] / m["files"][split]["name"]) for n, m in manifests.items() if split in m["files"]}
        write_json(
            run.path / "data" / f"{split}.json",
            {
                "tokenizer": tokenizer,
                "files": files,
                "sha256": {n: manifests[n]["files"][split]["sha256"] for n in files},
                "entries": [list(e) for e in chosen],
                "shuffled": split == "train",
            },
        )
    return {
        "rows": sum(e[1] >= 0 for e in entries),
        "padding_rows": sum(e[1] < 0 for e in entries),
        "steps": len(entries) // batch,
        "validation_rows": sum(e[1] >= 0 for e in held),
        "longest": longest,
        "corpora": {n: {"path": str(p), "manifest": file_hash(p / "corpus.json")} for n, p in folders.items()},
    }


def _same_corpora(folders: dict[str, Path], manifests: dict[str, dict[str, Any]], model: str) -> str:
    """The SHA-256 of the tokenizer that all corpora and the model share."""
    from transformers import AutoTokenizer

    from verl_opsd.contract import EvalContract
    from verl_opsd.corpus.select import TOUCHED
    from verl_opsd.teachers.cache import tokenizer_hash

    own = tokenizer_hash(AutoTokenizer.from_pretrained(model))
    first: EvalContract | None = None
    for name, m in manifests.items():
        where = f"corpus {name} ({folders[name]})"
        require_files(folders[name], m)
        broken = [g["gate"] for g in m["gates"] if g["verdict"] != "pass"]
        if broken:
            raise OpsdError(f"{where}: gates {', '.join(broken)} did not pass", "gates fail closed", "build it again")
        if m["tokenizer"] != own:
            raise OpsdError(
                f"{where} of tokenizer {m['tokenizer'][:12]}, model.path={model} of {own[:12]}",
                "ids are trained on as they were recorded, so the model reads them with the tokenizer that made them",
                "train the model that the corpus was recorded with, or one of its family",
            )
        if m["contract_hashes"]:
            contract = EvalContract.from_dict(m["contract"])
            first = first or contract
            first.require_same(contract, where, without=TOUCHED, mine="the corpora before it")
    return own


def _lengths(
    config: DictConfig,
    folders: dict[str, Path],
    manifests: dict[str, dict[str, Any]],
    entries: list[Entry],
    held: list[Entry],
) -> int:
    """The longest row; every one that is used fits into the model and into a micro-batch."""
    from transformers import AutoConfig

    used = {(split, e) for split, some in (("train", entries), ("validation", held)) for e in some if e[1] >= 0}
    lengths = {
        (split, (name, i)): len(row.input_ids)
        for name, m in manifests.items()
        for split, entry in m["files"].items()
        for i, row in enumerate(read_split(folders[name], entry))
    }
    longest = max(lengths[k] for k in used)
    places = getattr(AutoConfig.from_pretrained(str(config.model.path)).get_text_config(), "max_position_embeddings", longest)
    limit = (
        config.data.max_token_len_per_gpu * config.engine.ulysses_sequence_parallel_size
        if config.data.use_dynamic_bsz
        else longest
    )
    if longest > min(places, limit):
        raise OpsdError(
            f"a row of {longest} tokens; the model has {places} positions, a micro-batch data.max_token_len_per_gpu={limit}",
            "a row is trained on whole",
            "raise data.max_token_len_per_gpu, or build the corpus of shorter runs",
        )
    return longest


class WarmStartCallback(Callback):
    """Hydra's callback of the recipe; refusals leave as ``SystemExit(2)``, and the run directory as it was."""

    def __init__(self) -> None:
        self._found: Found | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuses a wrong entry point, or a run directory that can't be, before Hydra writes into it.

        Raises:
            SystemExit: 2, after the error was printed.
        """
        self._require_start(config, "hydra.run.dir")
        # ranks of one torchrun write into the same directory; what the others have written already is of this start too
        started = psutil.Process(os.getppid()).create_time() if "RANK" in os.environ else None
        self._found = Found.of(Path(config.hydra.run.dir), str(config.hydra.job.name), started=started)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuses a wrong entry point, or a directory that can't be.

        Raises:
            SystemExit: 2, after the error was printed.
        """
        self._require_start(config, "hydra.sweep.dir")

    @staticmethod
    def _require_start(config: DictConfig, folder: str) -> None:
        with refusing():
            require_command(config, "sft_trainer_engine")
            require_writable(OmegaConf.select(config, folder), folder)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Prepares the run on rank 0; the others wait for it.

        Raises:
            SystemExit: 2, after the error was printed.
        """
        run, rank, ranks = RunDir.from_env(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        found, self._found = self._found, None
        if found is None:  # a job of a sweep: Hydra's own files are there already
            found = Found.of(run.path, "sft_trainer", fresh=True)
        try:
            with refusing():
                if rank == 0:
                    self._start(config, run, ranks)
                else:
                    _wait(run, rank, os.environ["OPSD_START"])
        except SystemExit:
            if rank == 0:
                _gather(run, ranks)
                found.restore(run.path)
            raise

    def _start(self, config: DictConfig, run: RunDir, ranks: int) -> None:
        from verl_opsd.verl_adapter.requirements import require_plugin

        require_plugin()
        before, composed = _trained_on(run) or {}, _plain(config)
        continued = any(run.path.glob("checkpoints/global_step_*"))
        if continued:
            _require_same(run, composed, ranks)
            _require_checkpoint(run)
        print(f"verl-opsd: recipe=warm_start run directory {run.path}", flush=True)
        found = prepare(config, run, ranks)
        if continued and before != (after := _trained_on(run)):
            changed = [k for k in ("train", "validation") if before.get(k) != (after or {}).get(k)]
            for split in changed:  # as it was
                file = run.path / "data" / f"{split}.json"
                file.write_text(before[split]) if split in before else file.unlink()
            raise OpsdError(
                f"{run.path} holds checkpoints of another schedule ({changed})",
                "a run is continued on the rows that it was started with",
                "start in another hydra.run.dir, or restore the corpus and the phases",
            )
        write_json(
            run.path / "meta.json",
            {
                "argv": sys.argv,
                "started": time.time(),
                "student": str(config.model.path),
                "ranks": ranks,
                "trained_on": found,
                "config": composed,
            },
        )
        print(
            f"verl-opsd: {found['rows']} rows in {found['steps']} steps, {found['validation_rows']} rows held out, "
            f"the longest row has {found['longest']} tokens",
            flush=True,
        )
        if continued:
            _join_losses(run, aside=True)
        else:  # it starts at step 1; losses of a start that left no checkpoint are no part of it
            for name in ("metrics.jsonl", "metrics.earlier.jsonl"):
                (run.path / name).unlink(missing_ok=True)
        write_json(run.path / "data" / "start.json", {"start": os.environ["OPSD_START"]})

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Names the cause of a failure, and where things are."""
        run = RunDir.from_env() if "OPSD_RUN_DIR" in os.environ else RunDir(config.hydra.runtime.output_dir)
        if os.environ.get("RANK", "0") == "0":
            _join_losses(run)
        if job_return.status == JobStatus.FAILED:
            print(f"error: {job_return._return_value}\nverl-opsd: run directory {run.path}", file=sys.stderr, flush=True)
        elif os.environ.get("RANK", "0") == "0":
            print(f"verl-opsd: losses in {run.path}/metrics.jsonl, checkpoints in {run.path}/checkpoints", flush=True)


def _trained_on(run: RunDir) -> dict[str, str] | None:
    files = {k: run.path / "data" / f"{k}.json" for k in ("train", "validation")}
    return {k: p.read_text() for k, p in files.items()} if all(p.is_file() for p in files.values()) else None


def _plain(config: DictConfig) -> dict[str, Any]:
    """The composed configuration without Hydra's section, references unresolved."""
    plain: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"]), resolve=False)
    return plain


def _require_same(run: RunDir, composed: dict[str, Any], ranks: int) -> None:
    """Checkpoints are continued under the configuration and by as many ranks as they were made with.

    Raises:
        OpsdError: naming what differs.
    """
    meta = read_json(run.path / "meta.json") if (run.path / "meta.json").is_file() else {}
    if not {"ranks", "config"} <= meta.keys():
        raise OpsdError(
            f"{run.path} holds checkpoints, and no meta.json that says what made them",
            "a run is continued under the configuration, on the rows and by as many ranks as it was started with",
            "restore meta.json, or start in another hydra.run.dir",
        )
    if meta["ranks"] != ranks:
        raise OpsdError(
            f"{run.path} holds checkpoints of {meta['ranks']} ranks, this start has {ranks}",
            "every rank reads the shard that it has saved",
            f"start {meta['ranks']} ranks, or start in another hydra.run.dir",
        )
    resume.require_same(run, meta["config"], composed, MAY_CHANGE)


def _require_checkpoint(run: RunDir) -> None:
    """The checkpoint that verl goes on from is the one that its tracker names; where it names none, verl would start at step 1.

    Raises:
        OpsdError: several checkpoints without a tracker, or one that names none of them.
    """
    tracker = run.path / "checkpoints" / "latest_checkpointed_iteration.txt"
    steps = sorted(p.name.removeprefix("global_step_") for p in tracker.parent.glob("global_step_*"))
    named = tracker.read_text(errors="replace").strip() if tracker.is_file() else None
    if named in steps or (named is None and len(steps) == 1):  # a kill while the first one was written
        return
    raise OpsdError(
        f"{tracker} {'is gone' if named is None else f'says {named[:40]!r}'}, and there are checkpoints of the steps {', '.join(steps)}",
        "a run goes on from the checkpoint that its tracker names; another one would start at step 1 and write over them",
        "write the number of one of them into it, or start in another hydra.run.dir",
    )


def _join_losses(run: RunDir, aside: bool = False) -> None:
    """One file of losses over all starts of a run: verl's logger empties it when it opens it.

    Args:
        aside: put the earlier lines where the logger doesn't reach; otherwise they and the later ones become one file again.
    """
    whole, earlier = run.path / "metrics.jsonl", run.path / "metrics.earlier.jsonl"
    parts = [p.read_bytes() for p in (earlier, whole) if p.is_file()]
    if not parts:
        return
    target, other = (earlier, whole) if aside else (whole, earlier)
    temporary = whole.with_name(".metrics")
    temporary.write_bytes(b"".join(part[: part.rfind(b"\n") + 1] for part in parts))  # a kill may have cut the last line
    temporary.replace(target)
    other.unlink(missing_ok=True)


def _waiting(run: RunDir, rank: int) -> Path:
    return run.path / "data" / f"rank-{rank}"


def _gather(run: RunDir, ranks: int) -> None:
    """Until every other rank waits: none writes into the directory any more. A rank that never comes is not waited for long."""
    until = time.monotonic() + GATHER_S
    while time.monotonic() < until and not all(_waiting(run, rank).is_file() for rank in range(1, ranks)):
        time.sleep(0.1)


def _wait(run: RunDir, rank: int, start: str) -> None:
    """Until rank 0 of this very start has prepared the run.

    Raises:
        OpsdError: it was refused there, or took too long.
    """
    path, here, until = run.path / "data" / "start.json", _waiting(run, rank), time.monotonic() + WAIT_S
    here.parent.mkdir(parents=True, exist_ok=True)
    here.touch()
    while time.monotonic() < until:
        if path.is_file() and json.loads(path.read_text())["start"] == start:
            here.unlink()
            return
        if not here.is_file():
            raise OpsdError("rank 0 has refused this run", "its error is above", "correct it")
        time.sleep(0.2)
    raise OpsdError(
        f"no {path} after {WAIT_S:.0f} s", "rank 0 prepares the run", "see its output; set hydra.run.dir on every node"
    )
