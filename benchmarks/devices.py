"""`+recipe=opd scale=gpu2` as a whole on two accelerators: the student and its vLLM server on one, a device teacher on the other.

    python benchmarks/devices.py --student smollm
    python benchmarks/devices.py --student hybrid --run RUN_DIR [KEY=VALUE ...]

Pocket tasks, two rounds, an evaluation. ``smollm``: SmolLM2-135M-Instruct, its teacher the same model with the brief. ``hybrid``: a multimodal
checkpoint around a random text model of Qwen3.5's architecture (8 layers), its teacher one of another seed and width. Prints the seconds of every
stage, what each device did, the gates, and how far what the server serves is from what was trained, after each publish. ``--scale local`` runs
the same without accelerators. ``--serve`` then exports the last checkpoint into the student's multimodal architecture, serves it with vLLM, and
compares the log-probabilities of fixed tokens with those of transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl_opsd.models.smollm import ensure_smollm
from verl_opsd.models.tiny import make_tokenizer
from verl_opsd.paths import cache_dir

GPU = [
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.25",
    "actor_rollout_ref.rollout.enforce_eager=true",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.gdn_prefill_backend=triton",  # FlashInfer compiles its own for minutes
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.language_model_only=true",  # the folder has no processor of images
]
SHARED = [
    "trainer.total_training_steps=2",
    "data.train_batch_size=2",
    "opsd.tasks.max_eval=1",
    "teacher=device",
    "trainer.save_freq=2",
]


def make_hybrid(path: Path, hidden: int, layers: int, seed: int) -> Path:
    """A multimodal checkpoint around a random hybrid text model whose layers have the shapes that Qwen3.5's kernels are made for."""
    import torch
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    tokenizer = make_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "mamba_ssm_dtype": "float32",  # as published; vLLM keeps the state of the delta rule in it
        "max_position_embeddings": 16384,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": hidden}
    torch.manual_seed(seed)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    with torch.no_grad():
        model.lm_head.weight *= 5  # as initialised, distributions are so flat that a brief's effect is below bf16's noise
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def models(student: str, scale: str, folder: Path) -> list[str]:
    """Overrides that name student and teacher; what is not there is made."""
    if student == "smollm":
        path = ensure_smollm(cache_dir() / "models")
        words = [f"actor_rollout_ref.model.path={path}", f"opsd.teacher.path={path}", "contract=smollm"]
        words += ["opsd.contract.step_limit=6", "opsd.contract.max_tokens=128"] if scale != "local" else []
        return words
    size = (512, 8) if scale != "local" else (64, 4)
    path = make_hybrid(folder / "student", *size, seed=0)
    teacher = make_hybrid(folder / "teacher", 3 * size[0] // 2, size[1], seed=1)
    named = [f"actor_rollout_ref.model.path={path}", f"opsd.teacher.path={teacher}"]
    return [*named, "contract=local", "opsd.brief.placement=last_user"]


def describe(run: Path) -> str:
    """What a finished run says of itself."""
    report: dict[str, Any] = json.loads((run / "report.json").read_text())
    gates = [json.loads(line) for line in (run / "evidence.jsonl").read_text().splitlines()]
    lines = ["stage      seconds", *(f"{k:<10} {v:7.1f}" for k, v in report["seconds"].items())]
    lines += [f"peak {k}: {v / 1e9:.2f} GB" for k, v in report["devices"]["peak_bytes"].items()]
    lines += [f"{k}: {v:.0f} tokens/s" for k, v in report["tokens_a_second"].items()]
    lines += [
        f"{v['gate']}: {v['value']:.3g} against {v['threshold']:.3g} ({v['detail']})" for v in gates if v["gate"] in SHOWN
    ]
    counts = {k: sum(v["verdict"] == k for v in gates) for k in ("pass", "fail")}
    return "\n".join([*lines, f"gates: {counts['pass']} passed, {counts['fail']} failed"])


def serve(run: Path, wrapper: str, folder: Path) -> None:
    """Exports, serves and compares; vLLM in a process of its own, so that it gives the device back."""
    out = folder / "export"
    checkpoint = max(run.glob("checkpoints/global_step_*"), key=lambda p: int(p.name.rpartition("_")[2]))
    words = [str(checkpoint), "--out", str(out), *(("--wrapper", wrapper) if wrapper else ())]
    subprocess.run([sys.executable, "-m", "verl_opsd.cli.main", "export", *words], check=True)
    found = [
        json.loads(
            subprocess.run([sys.executable, __file__, side, str(out)], check=True, stdout=subprocess.PIPE).stdout.splitlines()[
                -1
            ]
        )
        for side in ("vllm", "transformers")
    ]
    apart = [abs(a - b) for a, b in zip(*found, strict=True)]
    print(f"export in vLLM against transformers, bf16: {len(apart)} log-probabilities, mean {sum(found[1]) / len(apart):.3f},")
    print(f"apart {sum(apart) / len(apart):.2g} nats on average, {max(apart):.2g} at most")


def log_probs(side: str, path: str) -> list[float]:
    """Of each of 256 fixed tokens after the first, nats."""
    ids = [5 + i * 7919 % 1500 for i in range(256)]
    if side == "vllm":
        from vllm import LLM, SamplingParams

        options: dict[str, Any] = {"language_model_only": True, "additional_config": {"gdn_prefill_backend": "triton"}}
        llm = LLM(path, dtype="bfloat16", enforce_eager=True, gpu_memory_utilization=0.25, max_model_len=1024, **options)
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
        got = llm.generate([{"prompt_token_ids": ids}], asked)[0].prompt_logprobs
        return [row[token].logprob for row, token in zip(got[1:], ids[1:], strict=True)]
    import torch
    from transformers import AutoConfig

    from verl_opsd.models.export import auto_class

    model = auto_class(AutoConfig.from_pretrained(path)).from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids], device="cuda")).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(-1, torch.tensor(ids[1:], device="cuda")[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


SHOWN = (
    *("publish_kl", "publish_late", "publish_rehearsal", "publish_follow", "device_identity", "identity", "brief_effect"),
    *("adapter_bound", "startup:layout"),
)


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] in ("vllm", "transformers"):
        print(json.dumps(log_probs(*sys.argv[1:])))
        return
    p = argparse.ArgumentParser(description="The online recipe as a whole on two accelerators.")
    p.add_argument("--student", choices=("smollm", "hybrid"), required=True)
    p.add_argument("--scale", choices=("gpu2", "local"), default="gpu2")
    p.add_argument("--run", type=Path, help="run directory; by default a temporary one")
    p.add_argument("--serve", action="store_true", help="export the last checkpoint and serve it")
    p.add_argument("overrides", nargs="*", help="further keys")
    args = p.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="opsd-devices-"))
    run = args.run or folder / "run"
    words = [
        *("+recipe=opd", f"scale={args.scale}", *models(args.student, args.scale, folder), *SHARED),
        *(GPU if args.scale == "gpu2" else []),
        "opsd.worth.override='a run that shows that every part works'",
        f"hydra.run.dir={run}",
        *args.overrides,
    ]
    print(" ".join(["python -m verl.trainer.main_ppo", *words]), flush=True)
    print(", ".join(map(_version, ("verl", "vllm", "torch", "transformers", "triton", "fla-core", "liger-kernel"))), flush=True)
    started = time.time()
    done = subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *words], env=os.environ | {"PYTHONUNBUFFERED": "1"})
    print(f"{args.student}: rc {done.returncode}, {time.time() - started:.0f} s, {time.strftime('%Y-%m-%d')}")
    if done.returncode == 0:
        print(describe(run), flush=True)
        if args.serve:
            serve(run, str(folder / "student") if args.student == "hybrid" else "", folder)
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
