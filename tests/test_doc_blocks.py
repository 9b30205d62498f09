"""Every Python block of the documentation runs, in order, in what its page takes for granted."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec.checkpoint import save
from meshrec.distributed import EmbeddingBagCollectionSharder
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import RowWiseAdagrad
from meshrec.runs.export import export_run
from meshrec.runs.job import Job
from meshrec.runs.worker import run_rank
from meshrec.train import find_run, resolve

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ELSEWHERE = {
    "docs/guides/more-than-one-machine.md",  # needs a cluster of Ray; tests/hosts/test_ray.py
    "docs/from-torchrec.md",  # changes what `import torchrec` means; tests/compat
    "docs/rooms/serve.md",  # asks a server; tests/serve/test_server.py
}
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/[!_]*/*.md")), *ROOT.glob("docs/*.md")]
    if BLOCK.search(path.read_text())
]


class Clicks(torch.nn.Module):
    """Two tables and a linear layer."""

    def __init__(self, device=None):
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=name, num_embeddings=40, embedding_dim=8, feature_names=[name])
                for name in ("users", "movies")
            ],
            device=device,
        )
        self.dense = torch.nn.Linear(16, 1)

    def forward(self, batch):
        scores = self.dense(self.ebc(batch).values()).squeeze(1)
        return scores.square().mean(), scores.detach()


def sharded():
    sharders = [EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1))]
    return DistributedModelParallel(Clicks(), sharders=sharders)


def training():
    model = sharded()
    optimizer = torch.optim.Adam(model.module.dense.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    ids, lengths = torch.arange(16), torch.ones(16, dtype=torch.int64)
    batches = [KeyedJaggedTensor(["users", "movies"], ids, lengths=lengths)] * 3
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "device": torch.device("cpu"),
        "loader": batches,
    }


def whole_tables(_):
    return {"model": sharded(), "other": sharded()}


def quantised(tmp_path):
    model = Clicks()
    save(tmp_path / "runs/mine/checkpoints/step-1", {"model": model}, step=1)
    return {"model": model, "model_on_meta": Clicks()}


def tables(num=200):
    numbers = np.arange(num)
    columns = {"user": [f"u{n % 9}" for n in numbers], "item": [f"i{n % 7}" for n in numbers]}
    return pa.table(columns | {"clicked": numbers % 2, "price": numbers / 7.0, "city": ["Oslo"] * num})


RECIPE = """
from meshrec.data.features import Features, Label, Number, Vocabulary
from meshrec.optim import RowWiseAdagrad
from meshrec.train import DLRMConfig, Parquet, Recipe, Training


def clicks():
    features = Features(
        labels=(Label(column="clicked"),),
        features=(Number(name="price", missing=0.0), Vocabulary(name="user"), Vocabulary(name="item")),
    )
    return Recipe(
        name="clicks",
        data=Parquet(train=("all.parquet",), features=features),
        model=DLRMConfig(embedding_dim=8, bottom=(8,), top=(8,)),
        tables=RowWiseAdagrad(lr=0.1),
        training=Training(batch_size=20, max_steps=3),
    )
"""


def trained(tmp_path):
    """A run called clicks in ``runs``."""
    pq.write_table(tables(), tmp_path / "all.parquet")
    (tmp_path / "recipe.py").write_text(RECIPE)
    source = f"{tmp_path / 'recipe.py'}:clicks"
    job = Job(recipe=resolve(source), source=source, name="clicks", runs=tmp_path / "runs", device="cpu")
    run_rank(job, lambda _: lambda _: None)
    return find_run("clicks", tmp_path / "runs")


def clicks_run(tmp_path):
    trained(tmp_path)
    return {}


def package(tmp_path):
    run = trained(tmp_path)
    export_run(run, tmp_path / "model", shared=["user"], compile=False)
    vectors = np.random.default_rng(0).random((20, 8), np.float32)
    pq.write_table(pa.table({"item": range(20), "vector": list(vectors)}), tmp_path / "items.parquet")
    ids, ones = torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    one_user = {name: torch.ones(num, dtype=torch.int64) for name, num in (("user", 1), ("item", 500))}
    return {
        "torch": torch,
        "dense": torch.rand(2, 1),
        "user_ids": ids,
        "item_ids": ids,
        "user_lengths": ones,
        "item_lengths": ones,
        "table": tables(4),
        "many": torch.rand(500, 1),
        "values": one_user,
        "lengths": one_user,
        "users": vectors[:3],
    }


def published(tmp_path):
    criteo = "\t".join(["1", *["2"] * 13, *["a0"] * 26])
    (tmp_path / "train.txt").write_text(f"{criteo}\n{criteo}\n")
    (tmp_path / "train.csv").write_text("id,click,hour,C1\n1,0,14102100,1005\n")
    return {}


SETTINGS = {
    "docs/guides/in-python.md": lambda _: {"table": tables(), "test": tables(60), "new": tables(3), "pa": pa},
    "docs/guides/recipes.md": published,
    "docs/rooms/export.md": package,
    "docs/rooms/runs.md": clicks_run,
    "docs/guides/whole-tables.md": whole_tables,
    "docs/rooms/checkpoint.md": lambda _: training(),
    "docs/rooms/data.md": lambda _: {"tables": [tables()]},
    "docs/rooms/pipeline.md": lambda _: training(),
    "docs/rooms/quant.md": quantised,
}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page", **SETTINGS.get(page, lambda _: {})(tmp_path)}
    text = (ROOT / page).read_text()
    for block in BLOCK.finditer(text):
        for library in re.findall(r"^(?:import|from) (faiss|usearch)\b", block[1], re.MULTILINE):
            pytest.importorskip(library)
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], ROOT / page, "exec"), names)
