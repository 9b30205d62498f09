import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig, FileRows
from meshrec import distributed as md
from meshrec.comms.mesh import Axis, ShardingEnv
from meshrec.export import Predictor, export
from meshrec.export.whole_tables import with_whole_tables
from meshrec.model_parallel import DistributedModelParallel
from meshrec.models.dlrm import DLRM
from meshrec.optim import SGD
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


def served(folder, given):
    """Return the scores of a worker that expects to miss pages, the kB of weights that only it has, and the
    number of their mappings.
    """
    predictor = Predictor(folder, larger_than_memory=True)
    scores = predictor(*given)
    areas = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    own = [area for area in areas if str(predictor.folder) in area.partition("\n")[0]]
    return scores, sum(int(kb) for area in own for kb in re.findall(r"Private_Dirty: +(\d+)", area)), len(own)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell who has pages")
def test_workers_share_the_weights_of_a_table_in_a_file(ranks, requests, tmp_path):
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(
            name=f"t{i}",
            embedding_dim=8,
            num_embeddings=5_000,
            feature_names=[feature],
            storage=FileRows(path=tmp_path / "rows", cache_rows=200),
        )
        for i, feature in enumerate(FEATURES)
    ]
    model = DistributedModelParallel(
        DLRM(EmbeddingBagCollection(configs, device="meta"), NUM_DENSE, [16, 8], [16, 1]),
        ShardingEnv.single_process(),
        sharders=[md.EmbeddingBagCollectionSharder(SGD(lr=0.1))],
    )
    with torchs_own_warnings():
        folder = export(model, tmp_path / "package", features=FEATURES, num_dense=NUM_DENSE, compile=False)
    dense, values, lengths = requests(20)
    given = (dense, {feature: 97 * ids for feature, ids in values.items()}, lengths)
    expected = Predictor(folder, copy_weights=True)(*given)
    for scores, private_kb, areas in ranks(2).run(served, str(folder), given):
        assert torch.equal(scores, expected)
        assert areas > 0
        assert private_kb == 0


def test_other_models_are_taken_as_they_are(model):
    assert with_whole_tables(model) is model


def test_tables_of_several_processes_are_refused(model):
    _, dmp = sharded(model, md.row_wise())
    module = next(iter(dmp.sharded_modules.values()))
    world = Axis(size=2, group=object())
    module.built = replace(module.built, env=replace(module.built.env, world=world))
    with pytest.raises(ValueError, match="over 2"):
        with_whole_tables(dmp)
