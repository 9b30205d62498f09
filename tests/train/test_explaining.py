import numpy as np
import pyarrow as pa
import pytest

from meshrec.cli.train import main as train
from meshrec.runs.explained import explain_run, names_of_rows
from meshrec.train import RunFolder, Trainer, join
from meshrec.train.explaining import explain

RECIPE = """
from meshrec.data.features import Features, Label, Number, Vocabulary
from meshrec.optim import Adam
from meshrec.train import DenseOptimizer, DLRMConfig, Parquet, Recipe, Training
def recipe():
    features = Features(
        labels=(Label(column="clicked"),),
        features=(
            Vocabulary(name="kind"), Vocabulary(name="noise"), Number(name="size"), Number(name="void"),
        ),
    )
    return Recipe(
        name="tiny",
        data=Parquet(train=("data.parquet",), split_by="random", features=features),
        model=DLRMConfig(embedding_dim=4, bottom=(8,), top=(16, 8)),
        tables=Adam(lr=0.02),
        dense=DenseOptimizer(lr=0.01),
        training=Training(batch_size=64, epochs=4),
    )
"""


def write(folder):
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    num = 3000
    kind, noise = rng.integers(0, 4, num), rng.integers(0, 5, num)
    size, void = rng.normal(size=num), rng.normal(size=num)
    chance = 1 / (1 + np.exp(-(1.5 * (kind - 1.5) + 1.5 * size)))
    table = {
        "kind": np.array(["a", "b", "c", "d"])[kind],
        "noise": noise,
        "size": size,
        "void": void,
        "clicked": (rng.random(num) < chance).astype(int),
    }
    pq.write_table(pa.table(table), folder / "data.parquet")
    (folder / "recipe.py").write_text(RECIPE)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explained")
    write(folder)
    arguments = [f"{folder / 'recipe.py'}:recipe", "--runs", str(folder), "--name", "r", "--quiet"]
    assert train(arguments) == 0
    return RunFolder(folder / "r")


def test_what_the_label_depends_on_is_important(run):
    found = run.read_json("summary.json")["explained"]
    assert set(list(found["importance"])[:2]) == {"kind", "size"}
    assert found["importance"]["kind"] > 0.05
    assert abs(found["importance"]["noise"]) < 0.03
    assert abs(found["importance"]["void"]) < 0.03
    assert set(found["slices"]["kind"]) == {"a", "b", "c", "d"}
    samples = sum(each["samples"] for each in found["slices"]["kind"].values())
    assert samples == found["samples"] > 200
    page = run.report.read_text()
    assert "What the model reads" in page


def test_rows_of_a_vocabulary_have_names(run):
    names = names_of_rows(run, {"noise": [0, 1, 2, 3]})["noise"]
    assert names[0] == "missing"
    assert names[1] == "unseen"
    assert set(names.values()) - {"missing", "unseen"} <= set("01234")


def check_ranks(folder):
    from meshrec.train import resolve

    recipe = resolve(f"{folder}/recipe.py:recipe")
    dataset = recipe.data.load()
    trainer = Trainer(recipe, dataset, join("cpu"))
    trainer.run()
    found = explain(trainer.built.model, dataset, dataset.validation, trainer.ranks)
    assert found is not None
    assert found.samples > 200
    assert set(list(found.importance)[:2]) == {"kind", "size"}
    assert explain_run(trainer, RunFolder(folder / "none"))["importance"] == found.importance


def test_all_ranks_take_part(tmp_path, ranks):
    write(tmp_path)
    ranks(2).run(check_ranks, tmp_path)
