import subprocess
import sys

import pytest

pytest.importorskip("lightgbm")
CODE = """
import sys
import numpy as np
from meshrec.lazy import declare_command
declare_command()
from meshrec.train.lightgbm_import import import_lightgbm
private = import_lightgbm()
assert not {"sklearn", "pandas", "lightgbm"} & sys.modules.keys()
inputs = np.random.default_rng(0).random((200, 2))
labels = (inputs[:, 0] > 0.5).astype(float)
options = {"objective": "binary", "verbosity": -1, "deterministic": True, "num_threads": 1}
def scores(module):
    return module.train(options, module.Dataset(inputs, labels), 5).predict(inputs)
import lightgbm
assert lightgbm is not private and import_lightgbm() is private
assert lightgbm.LGBMClassifier is not None
assert (scores(private) == scores(lightgbm)).all()
"""


def test_the_command_imports_trees_without_their_wrapper_and_others_get_all():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)


def test_other_programs_get_lightgbm_as_it_is():
    import lightgbm

    from meshrec.train.lightgbm_import import import_lightgbm

    assert import_lightgbm() is lightgbm
