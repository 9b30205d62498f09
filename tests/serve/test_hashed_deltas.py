"""Servers of hashed tables follow a training: new, changed and evicted IDs, and a run that went back."""

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

from meshrec import distributed as md
from meshrec.checkpoint import DeltaPublisher, load, save, verify_deltas
from meshrec.checkpoint.delta_files import read_delta
from meshrec.comms.mesh import default_env
from meshrec.export import Predictor, export
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import RowWiseAdagrad
from meshrec.serve.fresh import Deltas, apply_deltas
from meshrec.tables import LRU

# By its file: ranks that load this one do not find the tests by name.
_spec = importlib.util.spec_from_file_location(
    "hashed_models", Path(__file__).parents[1] / "export" / "hashed_models.py"
)
made = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)

BUILDERS = {
    "rows": (md.row_wise, md.row_wise),
    "columns": (lambda: md.column_wise(ranks=[0, 1]), lambda: md.table_wise(rank=1)),
    "everywhere": (md.data_parallel, md.row_wise),
}
NUM_DELTAS = 5


def fresh(seed):
    return made.drawn_model(seed, max_rows=30, evict=LRU())


def sharded(model, kind, update):
    size = default_env().shard.size
    plan = {}
    for name, module in (("bags", model.bags), ("sequences", model.sequences)):
        tables = [config.name for config, _ in module.tables().values()]
        builders = {table: BUILDERS[kind][i % 2]() for i, table in enumerate(tables)}
        if size == 1:
            builders = dict.fromkeys(tables, md.table_wise(rank=0))
        plan[name] = md.construct_module_sharding_plan(module, builders, world_size=size, local_size=1)
    spec = RowWiseAdagrad(lr=0.1)
    sharders = [
        md.EmbeddingBagCollectionSharder(spec, update=update),
        md.EmbeddingCollectionSharder(spec, update=update),
    ]
    return DistributedModelParallel(
        model, default_env(), plan=md.ShardingPlan(plan), sharders=sharders, init_data_parallel=False
    )


def train(model, step, update):
    """Ten IDs that are met for the first time, ten that were met in the steps before."""
    seed = 100 * step + default_env().world.rank
    for turn in range(2):
        ids = torch.arange(10 * step - 10, 10 * step + 10) * 0x5851F42D4C957F2D
        dense, values, lengths = made.drawn_batch(seed + turn, torch.cat([ids, torch.tensor(made.EDGES)]), 6)
        model(dense, made.as_sparse(values, lengths)).square().sum().backward()
        if update == "on_step":
            model.fused_optimizer.step()
            model.fused_optimizer.zero_grad()


def published(kind, seed, update, folder):
    """Five deltas, and a checkpoint of the weights at each; the fourth goes on from the second one."""
    model = sharded(fresh(seed), kind, update)
    kept = {"model": model, "tables": model.fused_optimizer}
    train(model, 1, update)
    save(folder / "0", kept)
    publisher = DeltaPublisher(model, folder / "deltas", run="r", step=1)
    last = {}
    for delta, step in ((1, 2), (2, 3), (3, 5), (4, 4), (5, 7)):
        if delta == 4:
            load(folder / "2", kept)
            publisher = DeltaPublisher(model, folder / "deltas", run="r", step=3, after=last[2])
        train(model, step, update)
        publisher.publish(step)
        last[delta] = publisher.last
        save(folder / str(delta), kept)


def loaded(seed, folder):
    model = fresh(seed)
    load(folder, {"model": model})
    return model.eval()


def follow(seed, folder, numbers=range(NUM_DELTAS + 1), **options):
    """Compare a model that follows the deltas to each number with the checkpoint at it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own code
        options = {"features": made.FEATURES, "num_dense": made.NUM_DENSE, "compile": False, **options}
        about = {"run": "r", "step": 1}
        package = export(loaded(seed, folder / "0"), folder / "package", scores=None, about=about, **options)
    predictor = Predictor(package)
    ids = torch.cat([torch.arange(80) * 0x5851F42D4C957F2D, torch.tensor(made.EDGES)])
    for number in numbers:
        if number:
            predictor = Predictor(package)
            deltas = Deltas(
                folder / "deltas", predictor.about, predictor.weights, number, hashed=predictor.hashed
            )
            apply_deltas(deltas)
            assert deltas.freshness.reason == ""
            assert deltas.freshness.delta == number
        model = loaded(seed, folder / str(number))
        for size in (1, 150):
            batch = made.drawn_batch(number, ids, size)
            assert torch.equal(predictor(*batch), made.evaluated(model, *batch)), number
    return predictor


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of one process, and a server's model that followed it to its last delta."""
    folder = tmp_path_factory.mktemp("run")
    published("rows", 1, "in_backward", folder)
    return folder, follow(1, folder)


def test_a_server_follows_a_run_that_updates_on_step(tmp_path):
    published("rows", 2, "on_step", tmp_path)
    follow(2, tmp_path, [NUM_DELTAS])


@pytest.mark.parametrize("kind", list(BUILDERS))
def test_a_server_follows_a_run_of_two_ranks(ranks, kind, tmp_path):
    seed = len(kind)
    ranks(2).run(published, kind, seed, "in_backward", tmp_path)
    records = verify_deltas(tmp_path / "deltas")
    assert all(set(each.evicted) == {f"{at}.weight" for at in PATHS} for each in records)
    assert sum(sum(each.evicted.values()) for each in records) > 0
    for record in records:
        delta = read_delta(tmp_path / "deltas", record)
        for name, ids in delta.evicted.items():
            assert not torch.isin(ids, delta.rows[name][0]).any()
    follow(seed, tmp_path, [2, NUM_DELTAS])  # to the last one, the run goes back


PATHS = ["bags.embedding_bags.h0", "bags.embedding_bags.h1", "sequences.embeddings.h2"]


def test_deltas_go_on_one_after_the_other(run):
    """Rows that were added change, are evicted, and come back; free rows are used again."""
    folder, whole = run
    step_by_step = Predictor(folder / "package")
    deltas = Deltas(folder / "deltas", step_by_step.about, step_by_step.weights, hashed=step_by_step.hashed)
    apply_deltas(deltas)
    assert deltas.freshness.delta == NUM_DELTAS
    ids = torch.cat([torch.arange(80) * 0x5851F42D4C957F2D, torch.tensor(made.EDGES)])
    batch = made.drawn_batch(3, ids, 100)
    assert torch.equal(step_by_step(*batch), whole(*batch))
    for name, formula in step_by_step.hashed.items():
        added = step_by_step.weights[name.removesuffix("weight") + "added"]
        assert added.shape[1] <= formula["max_rows"]
        assert bool((added[0].diff() > 0).all())
        assert len(added[1].unique()) == added.shape[1]
    fresh_one = Predictor(folder / "package")  # the file is as it was
    assert all(
        fresh_one.weights[name.removesuffix("weight") + "added"].shape[1] == 0 for name in whole.hashed
    )


def test_deltas_of_other_tables_are_refused(run):
    folder, _ = run
    predictor = Predictor(folder / "package")
    for hashed, words in (
        ({}, "other weights than the package"),
        (dict(list(predictor.hashed.items())[1:]), "other weights than the package"),
        ({n: {**f, "max_rows": 3} for n, f in predictor.hashed.items()}, "which has at most 3"),
    ):
        deltas = Deltas(folder / "deltas", predictor.about, predictor.weights, hashed=hashed)
        apply_deltas(deltas)
        assert words in deltas.freshness.reason
