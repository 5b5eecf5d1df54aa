"""verl drops rows that do not fill a batch: every pair must stand in whole batches, equally often."""

from collections import Counter
from pathlib import Path

import pandas
import pytest

from verl_opsd.cooperbench.types import PairTask
from verl_opsd.rundir import RunDir
from verl_opsd.verl_adapter.launch import write_data


@pytest.mark.parametrize(("pairs", "batch", "rows"), [(7, 2, 14), (15, 8, 120), (4, 2, 4), (3, 1, 3), (1, 4, 4)])
def test_every_pair_is_used_equally_often(tmp_path, pairs, batch, rows):
    tasks = [PairTask(Path("data"), "repo", n, (1, 2)) for n in range(pairs)]
    write_data(RunDir(tmp_path), tasks, "train", batch=batch)
    table = pandas.read_parquet(tmp_path / "data" / "train.parquet")
    assert len(table) == rows and rows % batch == 0
    assert Counter(i["pair"]["task_id"] for i in table["extra_info"]) == dict.fromkeys(range(pairs), rows // pairs)
    assert [i["index"] for i in table["extra_info"]] == list(range(rows))
