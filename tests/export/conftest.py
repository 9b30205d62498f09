import contextlib
import warnings

import pytest
import torch

import meshrec
from meshrec import DataType
from meshrec.export import compile_anew, export
from meshrec.export.package import why_not_compiled
from meshrec.models.dlrm import DLRM
from meshrec.quant import quantize

FEATURES = ["f0", "f 1", "f2"]
NUM_ROWS, NUM_DENSE = 50, 4


@pytest.fixture(scope="session")
def model():
    torch.manual_seed(0)
    tables = [
        meshrec.EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=8, num_embeddings=NUM_ROWS, feature_names=[feature]
        )
        for i, feature in enumerate(FEATURES)
    ]
    return DLRM(meshrec.EmbeddingBagCollection(tables), NUM_DENSE, [16, 8], [16, 1])


@contextlib.contextmanager
def torchs_own_warnings():
    """torch warns of its own code while it exports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="session")
def needs_compiled():
    """Skip the test where no programs are compiled, with the reason."""
    if (reason := why_not_compiled()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def uncompiled(model, made_once):
    options = {"features": FEATURES, "num_dense": NUM_DENSE, "about": {"step": 7}}

    def make(folder):
        with torchs_own_warnings():
            export(model, folder, **options, compile=False)

    return made_once("uncompiled", make)


@pytest.fixture(scope="session")
def package(uncompiled, made_once, needs_compiled):
    """Compiled anew, where ``small_package`` is compiled as it is exported."""

    def make(folder):
        with torchs_own_warnings():
            compile_anew(uncompiled, folder)

    return made_once("compiled", make)


@pytest.fixture(scope="session")
def small(model):
    """The model with quantised tables."""
    return quantize(model, DataType.INT8, per_table={"t1": DataType.INT4, "t2": DataType.INT2})


SHARED = ["f0", "f2", "dense"]


@pytest.fixture(scope="session")
def small_package(small, made_once):
    """Compiled, quantised, and with shared features."""
    options = {"features": FEATURES, "num_dense": NUM_DENSE, "shared": SHARED, "rounding": "minmax"}

    def make(folder):
        with torchs_own_warnings():
            export(small, folder, **options)

    return made_once("small", make)


@pytest.fixture
def requests():
    """``requests(batch)``: dense, values and lengths; some bags are empty."""

    def make(batch):
        generator = torch.Generator().manual_seed(batch)
        dense = torch.randn(batch, NUM_DENSE, generator=generator)
        lengths = {f: torch.randint(0, 3, (batch,), generator=generator) for f in FEATURES}
        values = {
            f: torch.randint(0, NUM_ROWS, (int(own.sum()),), generator=generator)
            for f, own in lengths.items()
        }
        return dense, values, lengths

    return make
