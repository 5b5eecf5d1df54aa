"""``opsd eval``: a full-set evaluation of any OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from verl_opsd.config import OpsdConfig
from verl_opsd.contract import EvalContract
from verl_opsd.cooperbench.types import PairTask
from verl_opsd.errors import OpsdError
from verl_opsd.evaluation.manifest import Manifest


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``eval``."""
    p = subparsers.add_parser("eval", help="evaluate a model that an OpenAI-compatible endpoint serves")
    p.add_argument("out", type=Path, metavar="RUN_DIR", help="run directory; one that is there is gone on with")
    p.add_argument("--endpoint", required=True, metavar="URL", help="base address, with /v1")
    p.add_argument("--model", required=True, help="name that the endpoint serves it under")
    p.add_argument(
        "--manifest", type=Path, metavar="FILE", help="YAML: what serves it; without one it is printed as unverified"
    )
    p.add_argument("--contract", default="local", metavar="NAME", help="contract group; default local")
    p.add_argument("--dataset", default="pocket", help="`pocket` or a folder of prepared and qualified tasks")
    p.add_argument("--subset", default="pocket_eval", help="subset of the dataset; default pocket_eval")
    p.add_argument("--seeds", type=int, default=1, help="runs of each pair; default 1")
    p.add_argument("--retries", type=int, default=2, help="further runs of an episode that a fault ended; default 2")
    p.add_argument("--no-alone", dest="alone", action="store_false", help="do not grade each patch alone")
    p.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the contract, e.g. step_limit=100")
    p.set_defaults(func=evaluate)


def evaluate(args: argparse.Namespace, console: Console | None = None) -> int:
    """Runs what is missing, prints the standings and writes the report; 1 when an episode stayed void. The key is read from
    ``OPENAI_API_KEY``."""
    import httpx

    from verl_opsd.cli.standings import table
    from verl_opsd.cooperbench.sandbox import require_sandbox
    from verl_opsd.evaluation.alone import grade_alone
    from verl_opsd.evaluation.endpoint import EndpointSession, run_plan, warm_up
    from verl_opsd.evaluation.page.gather import read_meta
    from verl_opsd.evaluation.plan import running, set_aside_faults, write_plan
    from verl_opsd.evaluation.standings import UNVERIFIED, model_info, standing
    from verl_opsd.evaluation.write import write_report
    from verl_opsd.rundir import RunDir, write_json
    from verl_opsd.tokens.store import EpisodeStore

    console = console or Console()
    started, run = time.time(), RunDir(args.out)
    if args.seeds < 1 or args.retries < 0:
        raise OpsdError(f"--seeds {args.seeds} --retries {args.retries}", "seeds >= 1 and retries >= 0", "correct the value")
    given = named_contract(args.contract, args.set)
    require_sandbox(given.sandbox, allow_unsafe=False)
    manifest = None
    if args.manifest is not None:
        from verl_opsd.evaluation.manifest import read_manifest

        manifest = read_manifest(args.manifest, given)
    pairs = load_pairs(args.dataset, args.subset, given)
    serving = UNVERIFIED if manifest is None else manifest.serving()
    contract = found(given, pairs, args.model, serving)
    if (run.path / "contract.json").is_file():
        contract.require_same(run.contract(), f"what is in {run.path}", mine="this evaluation")
    if manifest is None:
        console.print(f"{args.endpoint}: unverified: no serving manifest says what decides its replies", soft_wrap=True)
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def run_all() -> None:
        base = args.endpoint.rstrip("/") + "/"
        async with httpx.AsyncClient(base_url=base, headers=headers, trust_env=False) as client:
            await warm_up(client, args.model, contract)
            write_json(run.path / "contract.json", contract.as_dict())
            console.print(write_plan(run, pairs, args.seeds, described(args.model, manifest), dict(serving)), soft_wrap=True)
            write_json(run.path / "meta.json", meta(args, started, section(args, given)))
            if run.episodes.is_dir():
                set_aside_faults(run)
            with tempfile.TemporaryDirectory(prefix="opsd-eval-") as folder:
                await run_plan(
                    run,
                    pairs,
                    args.seeds,
                    contract,
                    lambda: EndpointSession(client, args.model, contract),
                    retries=args.retries,
                    allow_unsafe=False,
                    work_dir=Path(folder),
                )

    asyncio.run(run_all())
    episodes = list(EpisodeStore(run.episodes).episodes())
    if args.alone:
        grade_alone(
            run,
            episodes,
            pairs[0].dataset_dir,
            backend=contract.sandbox,
            allow_unsafe=False,
            timeout_s=contract.grade_timeout_s,
            workers=contract.concurrency,
        )
    console.print(running(episodes, len(pairs) * args.seeds), soft_wrap=True, highlight=False)
    console.print(table([standing(args.model, episodes, model_info(run.path, episodes, "eval"))]))
    write_report(run, read_meta(run)[1])
    console.print(str(run.path / "report.html"), soft_wrap=True, highlight=False)
    return int(any(not e.scored for e in episodes))


def named_contract(name: str, fields: list[str]) -> EvalContract:
    """A contract group of the configuration, with fields set.

    Raises:
        OpsdError: an unknown group or field, or a value that nothing would follow.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from verl_opsd.config import build_section
    from verl_opsd.config.contradictions import check_given
    from verl_opsd.paths import conf_dir

    try:
        with initialize_config_dir(str(conf_dir()), version_base=None):
            config = compose(overrides=[f"+contract={name}", *(f"opsd.contract.{f}" for f in fields)])
    except (HydraException, OmegaConfBaseException) as e:
        raise OpsdError(
            f"--contract {name} {' '.join(fields)}: {e}", "a contract group, and its fields as FIELD=VALUE", "correct it"
        ) from e
    values = OmegaConf.to_container(config.opsd.contract, resolve=True)
    contract: EvalContract = build_section(EvalContract, values, "opsd.contract")
    check_given(contract)
    return contract


def load_pairs(dataset: str, subset: str, contract: EvalContract) -> list[PairTask]:
    """The subset's pairs, qualified; pocket tasks are prepared where they are not."""
    from verl_opsd.config import SandboxConfig
    from verl_opsd.cooperbench.dataset import dataset_folder, load_subset
    from verl_opsd.cooperbench.qualification import require_qualified
    from verl_opsd.paths import cache_dir
    from verl_opsd.verl_adapter.launch import prepare_missing

    pairs = load_subset(subset, dataset_folder(dataset), split="eval")
    if dataset == "pocket":
        prepare_missing(SandboxConfig(backend=contract.sandbox), pairs)  # type: ignore[arg-type]
    require_qualified(pairs, cache_dir())
    return pairs


def found(contract: EvalContract, pairs: list[PairTask], model: str, serving: dict[str, str]) -> EvalContract:
    """The contract with what was found. The tokenizer is the endpoint's own and not seen."""
    from verl_opsd.cooperbench.dataset import subset_hash, tree_hash
    from verl_opsd.cooperbench.harness import check_contract
    from verl_opsd.cooperbench.identity import harness_identity, identity_string
    from verl_opsd.cooperbench.sandbox import traits

    check_contract(contract)
    return dataclasses.replace(
        contract,
        harness=identity_string(),
        templates_hash=harness_identity()["templates_hash"],
        dataset_hash=tree_hash(sorted({p.task_dir for p in pairs})),
        subset_hash=subset_hash(pairs),
        serving="endpoint " + " ".join(f"{k}={v}" for k, v in serving.items()),
        sandbox_traits=traits(contract.sandbox),
    )


def described(model: str, manifest: Manifest | None) -> dict[str, object]:
    """What the plan says of the model."""
    values: dict[str, object] = {"path": model}
    if manifest is not None:
        values |= {k: getattr(manifest, k) for k in ("parameters", "active_parameters", "prices")}
    return values


def section(args: argparse.Namespace, contract: EvalContract) -> OpsdConfig:
    """The configuration that a report reads: what was asked for, as the recipe ``full_eval`` would have it."""
    from verl_opsd.config import BriefConfig, EvaluationConfig, LossConfig, SandboxConfig, TasksConfig, TeacherConfig

    return OpsdConfig(
        recipe="eval",
        scale="local",
        mode="evaluate",
        tasks=TasksConfig(dataset=args.dataset, train=None, eval=args.subset),
        brief=BriefConfig(name="none"),
        teacher=TeacherConfig(),
        loss=LossConfig(),
        contract=contract,
        sandbox=SandboxConfig(backend=contract.sandbox),  # type: ignore[arg-type]
        evaluation=EvaluationConfig(args.seeds, args.retries, args.alone),
    )


def meta(args: argparse.Namespace, started: float, opsd: OpsdConfig) -> dict[str, object]:
    """What this run used."""
    from verl_opsd.cooperbench.identity import harness_identity

    return {
        "argv": sys.argv,
        "started": started,
        "python": platform.python_version(),
        "versions": {
            "verl-opsd": importlib.metadata.version("verl-opsd"),
            "cooperbench": importlib.metadata.version("cooperbench"),
        },
        "harness": harness_identity(),
        "endpoint": args.endpoint,
        "student": args.model,
        "manifest": None if args.manifest is None else args.manifest.read_text(),
        "opsd": dataclasses.asdict(opsd),
    }
