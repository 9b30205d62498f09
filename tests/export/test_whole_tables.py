import copy
from dataclasses import replace

import pytest
import torch

from meshrec import DataType
from meshrec import distributed as md
from meshrec.comms.mesh import Axis, ShardingEnv
from meshrec.export import Predictor, export
from meshrec.export.whole_tables import with_whole_tables
from meshrec.model_parallel import DistributedModelParallel
from meshrec.quant import quantize
from tests.export.conftest import FEATURES, NUM_DENSE, torchs_own_warnings


def sharded(model, maker, devices=3):
    small = quantize(copy.deepcopy(model), DataType.INT8)
    path = "sparse_arch.embedding_bag_collection"
    collection = small.get_submodule(path)
    makers = {config.name: maker for config in collection.embedding_bag_configs()}
    plan = md.construct_module_sharding_plan(collection, makers, world_size=devices)
    env = ShardingEnv.from_local(["cpu"] * devices)
    return small, DistributedModelParallel(copy.deepcopy(small), env, plan=md.ShardingPlan({path: plan}))


@pytest.mark.parametrize("maker", [md.row_wise(), md.column_wise(ranks=[0, 2]), md.table_wise(rank=1)])
def test_a_sharded_quantised_model_is_exported(model, requests, maker, tmp_path):
    small, dmp = sharded(model, maker)
    options = {"features": FEATURES, "num_dense": NUM_DENSE, "compile": False}
    with torchs_own_warnings():
        expected = Predictor(export(small, tmp_path / "small", **options))
        for number, given in enumerate((dmp, dmp.module)):
            found = Predictor(export(given, tmp_path / str(number), **options))
            assert torch.equal(found(*requests(20)), expected(*requests(20)))


def test_a_sharded_quantised_model_runs_in_cpp(model, requests, run_in_cpp, tmp_path):
    _, dmp = sharded(model, md.row_wise())
    with torchs_own_warnings():
        options = {"features": FEATURES, "num_dense": NUM_DENSE, "compile": False, "torchscript": True}
        folder = export(dmp, tmp_path / "sharded", **options)
    dense, values, lengths = requests(20)
    inputs = [dense, *(each[feature] for each in (values, lengths) for feature in FEATURES)]
    found = run_in_cpp(folder / "torchscript.pt", inputs)
    assert torch.equal(found, Predictor(folder)(dense, values, lengths))


def test_other_models_are_taken_as_they_are(model):
    assert with_whole_tables(model) is model


def test_tables_of_several_processes_are_refused(model):
    _, dmp = sharded(model, md.row_wise())
    module = next(iter(dmp.sharded_modules.values()))
    world = Axis(size=2, group=object())
    module.built = replace(module.built, env=replace(module.built.env, world=world))
    with pytest.raises(ValueError, match="split over 2 processes, and one process writes a package"):
        with_whole_tables(dmp)
