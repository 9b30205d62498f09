"""Recipes with published settings, on made-up files of the published forms."""

from dataclasses import replace

import numpy as np
import pytest

from meshrec.train import Placement, Trainer, join, resolve
from meshrec.train.published import CRITEO_COLUMNS, csv_to_parquet
from tests.train.movies import write_movies

NUM = 400
AVAZU = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,"
    "device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)


def trained(name, **data):
    recipe = resolve(name)
    small = {"embedding_dim": 4, "bottom": (4,)}
    layers = {"deep": (8,)} if hasattr(recipe.model, "deep") else {"top": (8,)}
    recipe = replace(
        recipe,
        data=replace(recipe.data, **data),
        model=replace(recipe.model, **small, **layers),
        training=replace(recipe.training, batch_size=100, max_steps=2, evaluate_every=None, patience=None),
        placement=Placement(sharded=False),
    )
    trainer = Trainer(recipe, recipe.data.load(), join("cpu"))
    trainer.run()
    return trainer


def test_criteo_kaggle(tmp_path):
    rng = np.random.default_rng(0)
    lines = []
    for row in range(NUM):
        counts = ["" if rng.random() < 0.2 else str(rng.integers(-2, 500)) for _ in range(13)]
        names = ["" if rng.random() < 0.1 else f"{rng.integers(0, 9):08x}" for _ in range(26)]
        lines.append("\t".join([str((row % 4 == 0 and 1) or 0), *counts, *names]))
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    out = tmp_path / "train.parquet"
    texts = [f"C{number}" for number in range(1, 27)]
    rows = csv_to_parquet(tmp_path / "train.txt", out, columns=CRITEO_COLUMNS, delimiter="\t", texts=texts)
    assert rows == NUM
    trainer = trained("criteo_kaggle", train=(str(out),))
    assert len(trainer.dataset.features) == 39
    assert trainer.dataset.num_dense == 1
    assert 0 < trainer.test["auc"] < 1


def test_avazu(tmp_path):
    rng = np.random.default_rng(0)
    lines = [AVAZU]
    for row in range(NUM):
        others = [f"{rng.integers(0, 5):08x}" for _ in range(8)]
        fields = [f"1000{row}", (row % 5 == 0 and 1) or 0, f"1410{21 + row % 9}{row % 24:02}", 1005, row % 2]
        numbers = rng.integers(0, 9, 10)
        lines.append(",".join(map(str, [*fields, *others, *rng.integers(0, 9, 1), *numbers])))
    (tmp_path / "train.csv").write_text("\n".join(lines) + "\n")
    out = tmp_path / "train.parquet"
    texts = [
        name for name in AVAZU.split(",") if name.endswith(("_id", "_domain", "_category", "_ip", "_model"))
    ]
    assert csv_to_parquet(tmp_path / "train.csv", out, texts=texts, times={"hour": "%y%m%d%H"}) == NUM
    trainer = trained("avazu", train=(str(out),))
    sizes = {each.name: each.num_embeddings for each in trainer.dataset.features}
    assert sizes["hour_of_day"] == 25
    assert sizes["weekday"] == 8
    assert 0 < trainer.test["auc"] < 1


def test_movielens_20m(tmp_path):
    trainer = trained("movielens_20m", path=write_movies(tmp_path / "ml-20m"))
    assert 0 < trainer.test["auc"] < 1


@pytest.mark.parametrize("name", ["criteo_kaggle", "avazu"])
def test_files_that_are_not_there_are_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"{name}.*train.parquet"):
        resolve(name).data.load()
