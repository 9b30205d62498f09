import numpy as np
import pytest

pytest.importorskip("lightgbm")
CODE = """
import sys
import numpy as np
from meshrec.lazy import declare_command
declare_command()
from meshrec.train.lightgbm_import import early_stopping, import_lightgbm
private = import_lightgbm()
assert not {"sklearn", "pandas", "lightgbm"} & sys.modules.keys()
inputs = np.random.default_rng(0).random((200, 2))
labels = (inputs[:, 0] > 0.5).astype(float)
options = {"objective": "binary", "metric": "auc", "verbosity": -1, "deterministic": True, "num_threads": 1}
def scores(module, stop):
    held_out = module.Dataset(inputs[::2], labels[::2])
    model = module.train(
        options, module.Dataset(inputs, labels), 5, valid_sets=[held_out], callbacks=[stop]
    )
    return model.predict(inputs)
private_scores = scores(private, early_stopping(3))
assert not {"sklearn", "pandas", "lightgbm"} & sys.modules.keys()
import lightgbm
assert lightgbm is not private and import_lightgbm() is private
assert lightgbm.LGBMClassifier is not None
assert (scores(lightgbm, lightgbm.early_stopping(3, verbose=False)) == private_scores).all()
"""


def test_the_command_imports_trees_without_their_wrapper_and_others_get_all(run_code):
    run_code(CODE)


def test_other_programs_get_lightgbm_as_it_is():
    import lightgbm

    from meshrec.train.lightgbm_import import import_lightgbm

    assert import_lightgbm() is lightgbm


@pytest.mark.parametrize("patience", [1, 3, 10, 100])
@pytest.mark.parametrize("seed", range(4))
def test_early_stopping_keeps_the_trees_that_lightgbm_keeps(patience, seed):
    import lightgbm

    from meshrec.train.lightgbm_import import early_stopping

    generator = np.random.default_rng(seed)
    inputs = generator.random((300, 3))
    labels = (inputs[:, 0] + generator.random(300) > 1).astype(float)
    options = {"objective": "binary", "metric": "auc", "verbosity": -1, "num_threads": 1}

    def fitted(stop):
        train = lightgbm.Dataset(inputs[:150], labels[:150])
        held_out = lightgbm.Dataset(inputs[150:], labels[150:], reference=train)
        return lightgbm.train(options, train, 40, valid_sets=[held_out], callbacks=[stop])

    ours, expected = (
        fitted(early_stopping(patience)),
        fitted(lightgbm.early_stopping(patience, verbose=False)),
    )
    assert ours.best_iteration == expected.best_iteration
    assert ours.best_score == expected.best_score
    assert ours.num_trees() == expected.num_trees()
