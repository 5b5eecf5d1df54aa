"""The rows of a warm start for verl's SFT trainer: stored ids and masks, in the order of a schedule.

verl's sampler shuffles with a fixed seed; the data set undoes that, so that batches are those of the schedule. Nothing is rendered,
cut or padded; an entry of padding is two tokens without loss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.utils.data import Dataset

from verl_opsd.errors import OpsdError
from verl_opsd.rundir import file_hash
from verl_opsd.teachers.cache import tokenizer_hash


class CorpusDataset(Dataset):
    """verl's ``data.custom_cls``.

    Args:
        parquet_files: a schedule: ``{"tokenizer": SHA-256, "files": {bucket: Parquet file}, "sha256": {bucket: its hash}, "entries": [[bucket, row], ...],
            "shuffled": whether verl shuffles it}``. Row -1 is padding.

    Raises:
        OpsdError: the ids are of another tokenizer, or a file is not the one that was checked.
    """

    def __init__(self, parquet_files: str, tokenizer: Any, config: Any = None, processor: Any = None, max_samples: int = -1):
        stated = json.loads(Path(parquet_files).read_text())
        if (found := tokenizer_hash(tokenizer)) != stated["tokenizer"]:
            raise OpsdError(
                f"rows of tokenizer {stated['tokenizer'][:12]} for a model of tokenizer {found[:12]}",
                "ids are trained on as they were recorded, so the model reads them with the tokenizer that made them",
                "train the model that the corpus was recorded with, or one of its family",
            )
        if max_samples != -1:
            raise OpsdError(
                f"max_samples={max_samples}",
                "the schedule says what is trained on",
                "leave train_max_samples and val_max_samples out",
            )
        for bucket, path in stated["files"].items():
            if (have := file_hash(Path(path))) != stated["sha256"][bucket]:
                raise OpsdError(
                    f"{path} has SHA-256 {have[:12]}, the schedule {parquet_files} says {stated['sha256'][bucket][:12]}",
                    "every rank reads the rows that rank 0 has checked",
                    "give all hosts the same corpus, as it was built",
                )
        self._end = int(tokenizer.eos_token_id)
        self._tables = {k: pq.read_table(v, columns=["input_ids", "loss_mask"]) for k, v in stated["files"].items()}
        self.entries: list[tuple[str, int]] = [(bucket, row) for bucket, row in stated["entries"]]
        n = len(self.entries)
        self._place = np.arange(n)
        if stated["shuffled"]:
            self._place[sampler_order(n)] = np.arange(n)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """input_ids, loss_mask, position_ids: int64[T]."""
        bucket, row = self.entries[int(self._place[index])]
        if row == -1:
            ids, mask = np.full(2, self._end), np.zeros(2, np.int64)
        else:
            ids, mask = (_values(self._tables[bucket][name], row) for name in ("input_ids", "loss_mask"))
        return {
            "input_ids": torch.from_numpy(ids.astype(np.int64)),
            "loss_mask": torch.from_numpy(mask.astype(np.int64)),
            "position_ids": torch.arange(len(ids)),
        }


def sampler_order(n: int) -> np.ndarray:
    """Indices in the order in which verl's sampler asks for them in its first epoch, int64[n]."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0)).numpy()


def _values(column: pa.ChunkedArray, row: int) -> np.ndarray:
    return column[row].values.to_numpy(zero_copy_only=False)
