"""`opsd doctor`: checks the installation, versions, verl's seams, the sandbox and devices, and says what is missing."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console

from verl_opsd import SUPPORTED_VERL
from verl_opsd.cli.tables import Table
from verl_opsd.cooperbench.sandbox import BACKENDS
from verl_opsd.errors import OpsdError
from verl_opsd.paths import conf_dir

#: Symbols of verl that this project hangs on. One that has moved is named here before a run finds out.
SEAMS = (
    "verl.plugin.platform:PlatformRegistry.register",
    "verl.trainer.main_ppo:TaskRunnerV1",
    "verl.trainer.ppo.padding_utils:upsample_batch_to_divisible_size",
    "verl.trainer.ppo.v1.trainer_base:register_trainer",
    "verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync._step_once",
    "verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync._balance_batch",
    "verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync._compute_advantage",
    "verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync._update_actor",
    "verl.workers.engine.base:EngineRegistry.register",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.prepare_model_inputs",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead._build_lora_module",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.optimizer_step",
    "verl.workers.engine_workers:ActorRolloutRefWorker.actor_worker_cls",
    "verl.workers.engine_workers:TrainingWorker.train_mini_batch",
    "verl.workers.rollout.replica:RolloutReplicaRegistry.register",
    "verl.workers.rollout.base:_ROLLOUT_REGISTRY",
    "verl.utils.model:get_hf_auto_model_class",
    "verl.utils.tokenizer.continuous_token_wiring:create_continuous_token_builder",
    "verl.experimental.agent_loop.tool_parser:ToolParser.get_tool_parser",
    "verl.experimental.agent_loop.agent_loop:register",
)
Finding = tuple[str, bool, str]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds `opsd doctor`."""
    p = subparsers.add_parser("doctor", help="check this installation; exit code 1 when something is missing")
    p.add_argument("--sandbox", choices=sorted(BACKENDS), help="run the contract suite of this backend, and nothing else")
    p.add_argument("--model", help="check this model (folder, hub name, `tiny`, `warm` or `smollm`), and nothing else")
    p.add_argument(
        "--scale", help="whose contract and LoRA targets it is checked against; chosen from the hardware when left out"
    )
    p.add_argument("--endpoint", help="address of a server of it, without /v1; a key is read from OPSD_ENDPOINT_KEY")
    p.add_argument("--served", default="", help="its name there; the first one that is served when left out")
    p.add_argument("--adapter", help="folder of the trained adapter that is served under that name")
    p.set_defaults(func=run)


def installation() -> Iterator[Finding]:
    """Package versions, the entry point, Hydra's search path, git."""
    verl = importlib.metadata.version("verl")
    right = verl == SUPPORTED_VERL
    yield "verl", right, verl if right else f"{verl}, supported {SUPPORTED_VERL}: pip install verl=={SUPPORTED_VERL}"
    for name in ("torch", "transformers", "peft", "ray", "TransferQueue", "hydra-core", "fakeredis"):
        try:
            yield name, True, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, False, f"missing: pip install {name}"
    points = [e for e in importlib.metadata.entry_points(group="verl.plugins") if e.value == "verl_opsd.plugin"]
    once = len(points) == 1
    yield "entry point verl.plugins", once, "1 found" if once else f"{len(points)} found; reinstall with pip install ."
    recipes = sorted(p.stem for p in (conf_dir() / "recipe").glob("*.yaml") if not p.stem.startswith("_"))
    yield "recipes", bool(recipes), ", ".join(recipes)
    yield "git", shutil.which("git") is not None, shutil.which("git") or "missing: install git 2.38 or newer"


def seams() -> Iterator[Finding]:
    """Every symbol of verl that is relied on."""
    for seam in SEAMS:
        module, _, path = seam.partition(":")
        try:
            target = importlib.import_module(module)
            for part in path.split("."):
                target = getattr(target, part)
            yield f"seam {seam}", True, ""
        except (ImportError, AttributeError) as e:
            yield f"seam {seam}", False, f"moved ({e}): use verl {SUPPORTED_VERL}"


def harness() -> Iterator[Finding]:
    """The cooperbench package and the capabilities that scores depend on."""
    from verl_opsd.cooperbench.identity import harness_identity

    try:
        found = harness_identity()
        yield "cooperbench", True, f"{found['version']} at {found['file']}, tree {found['tree_hash'][:12]}"
    except OpsdError as e:
        yield "cooperbench", False, str(e)


def sandbox() -> Iterator[Finding]:
    """What the host gives to sandboxes."""
    from verl_opsd.cooperbench.sandbox import sandbox_report

    for name, ok, detail in sandbox_report():
        yield f"sandbox {name}", ok, detail


def devices() -> Iterator[Finding]:
    """Accelerators, and the scale that would be chosen."""
    import torch

    from verl_opsd.plugin import _scale_from_hardware

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    yield "devices", True, f"{', '.join(names) or 'no accelerator'}; scale={_scale_from_hardware()}"


def show(title: str, findings: Iterable[tuple[str, bool | None, str]]) -> int:
    """Prints findings as they come (None: not checked); 1 when one failed."""
    console, failed = Console(width=140), 0
    console.print(title, style="bold")
    for name, ok, detail in findings:
        failed += ok is False
        mark = "ok " if ok else "-- " if ok is None else "NO "
        console.print(f"{mark} {name}: {detail}", markup=False, highlight=False)
    print(f"{failed} checks failed" if failed else "all checks passed", file=sys.stderr)
    return 1 if failed else 0


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (installation, harness, sandbox, devices, seams)


def suite(backend: str) -> Iterator[Finding]:
    """The contract suite of a sandbox backend on this machine, a minute or so."""
    from verl_opsd.cooperbench.sandbox import unavailable
    from verl_opsd.cooperbench.sandbox.suite import run_suite

    if reason := unavailable(backend):
        yield f"{backend} is here", False, reason
        return
    yield from run_suite(backend, allow_unsafe=True)


def model(args: argparse.Namespace) -> Iterator[tuple[str, bool | None, str]]:
    """A model, its adapter and its server against the contract and the LoRA targets of a scale."""
    import verl  # noqa: F401  registers the search path of the recipes
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    from verl_opsd.config import OpsdConfig
    from verl_opsd.plugin import _scale_from_hardware
    from verl_opsd.verl_adapter.model_checks import model_checks
    from verl_opsd.verl_adapter.requirements import check_model_path, ensure_embedded

    scale = args.scale or _scale_from_hardware()
    words = ["+recipe=opd", f"scale={scale}"]
    for name in ("OPSD_RUN_DIR", "OPSD_RAY_TMP"):  # a job's own environment names them; nothing is written there
        os.environ.setdefault(name, "opsd-not-yet")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", words)
    section: Any = OmegaConf.to_container(config.opsd, resolve=True)
    opsd = OpsdConfig.parse(section | {"student": args.model if args.model in ("tiny", "warm", "smollm") else ""})
    path = str(ensure_embedded(opsd.student) or args.model)
    if not opsd.student:
        check_model_path(path, "--model")
    targets = config.actor_rollout_ref.model.target_modules
    yield from model_checks(
        path,
        opsd.contract,
        targets if isinstance(targets, str) else list(targets),
        endpoint=args.endpoint,
        served=args.served,
        api_key=os.environ.get("OPSD_ENDPOINT_KEY", ""),
        adapter=args.adapter,
    )


def run(args: argparse.Namespace) -> int:
    """Prints every finding; 1 when one failed."""
    alone = [name for name in ("scale", "endpoint", "served", "adapter") if getattr(args, name)]
    if alone and not args.model:
        raise OpsdError(f"opsd doctor --{alone[0]} without --model", "it says how a model is checked", "add --model")
    if args.model:
        return show(f"opsd doctor --model {args.model}", model(args))
    if args.sandbox:
        return show(f"opsd doctor --sandbox {args.sandbox}", suite(args.sandbox))
    table = Table("check", "ok", "detail", title=f"opsd doctor (Python {sys.version.split()[0]})")
    failed = moved = 0
    for check in CHECKS:
        for name, ok, detail in check():
            failed += not ok
            moved += not ok and name.startswith("seam ")
            if not ok or not name.startswith("seam "):
                table.add_row(name, "yes" if ok else "NO", detail)
    table.add_row("seams of verl", "yes" if not moved else "NO", f"{len(SEAMS)} symbols looked up")
    Console(width=140).print(table)
    if failed:
        print(f"{failed} checks failed", file=sys.stderr)
    return 1 if failed else 0
