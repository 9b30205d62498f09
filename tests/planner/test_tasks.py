import json

import numpy as np
import pytest

from meshrec.planner.tasks import load_task, random_task
from meshrec.planner.types import OptimizerKind


def test_a_task_file(tmp_path):
    table = {"name": "t", "num_embeddings": 10, "embedding_dim": 4, "pooling_factors": [1, 2]}
    task = {"task": "mine", "global_batch_size": 64, "dtype": "fp16", "world_sizes": [2], "tables": [table]}
    (tmp_path / "task.json").write_text(json.dumps(task))
    found = load_task(tmp_path / "task.json")
    assert (found.name, found.batch_size(16), found.world_sizes) == ("mine", 4, (2,))
    assert (found.tables[0].weight_bytes, found.tables[0].optimizer) == (2, OptimizerKind.ROW_WISE_ADAGRAD)
    (tmp_path / "task.json").write_text(json.dumps({**task, "dtype": "fp5"}))
    with pytest.raises(
        ValueError, match=r"is no task file: missing or unknown: 'fp5'. It needs task, global_batch_size"
    ):
        load_task(tmp_path / "task.json")


def test_random_tasks_repeat_and_fill_their_ranges():
    task = random_task(300)
    assert task == random_task(300) != random_task(300, seed=1)
    rows = np.array([table.num_embeddings for table in task.tables])
    assert 1000 <= rows.min() < 5000
    assert 10**7 < rows.max() <= 3 * 10**7
    assert {table.embedding_dim for table in task.tables} == {32, 64, 128, 256}
