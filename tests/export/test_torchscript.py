import pytest
import torch

from meshrec.export import Predictor, export
from tests.export.conftest import FEATURES, NUM_DENSE, torchs_own_warnings


@pytest.mark.parametrize("which", ["model", "small"])
def test_a_torchscript_file_gives_the_scores_of_the_package(which, requests, tmp_path, request):
    model = request.getfixturevalue(which)
    with torchs_own_warnings():
        options = {"features": FEATURES, "num_dense": NUM_DENSE, "compile": False}
        folder = export(model, tmp_path / "p", torchscript=True, **options)
        predictor = Predictor(folder, verify=True)
        loaded = torch.jit.load(folder / "torchscript.pt")
    for batch in (0, 1, 2, 300):
        dense, values, lengths = requests(batch)
        jagged = [each[feature] for each in (values, lengths) for feature in FEATURES]
        assert torch.equal(loaded(dense, *jagged), predictor(dense, values, lengths))
