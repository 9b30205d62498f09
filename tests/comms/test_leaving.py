"""The end of a process group, in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, os, sys, threading, time
from pathlib import Path

import torch
import torch.distributed as dist

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.model_parallel import DistributedModelParallel

rank, store, dense = int(sys.argv[1]), sys.argv[2], sys.argv[3]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(name="t", num_embeddings=12, embedding_dim=4, feature_names=["f"])]
        )
        self.over = torch.nn.Linear(4, 2)

    def forward(self, features):
        return self.over(self.ebc(features).values())


def linger(_):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.5)


def lingering(_, bucket):
    "Averages gradients; gloo's thread is still at it when the backward pass is over."
    time.sleep(0.3 * rank)
    summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    averaged = summed.then(lambda future: future.value()[0].div_(2))
    averaged.add_done_callback(linger)
    return averaged


def threads():
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]


def work():
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = DistributedModelParallel(Model(), dense=dense)
    if dense == "ddp":
        model.register_comm_hook(None, lingering)
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 5, 9]), lengths=torch.tensor([2, 1]))
    model(features).sum().backward()
    print("during:", len(threads()) > 0)
    md.leave_process_group()


atexit.register(lambda: print("at the end:", threads()))
work()
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are found in Linux's /proc")
@pytest.mark.parametrize("dense", ["ddp", "fsdp2"])
def test_no_thread_of_the_group_outlives_the_interpreter(tmp_path: Path, dense):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store"), dense],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in ranks]
    for process, (said, errors) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, errors
        assert said == "during: True\nat the end: []\n"
