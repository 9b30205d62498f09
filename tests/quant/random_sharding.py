"""What ranks do with random quantised models under random rectangles; ranks import it by its file."""

import importlib.util
from pathlib import Path

from meshrec import DataType, checkpoint
from meshrec.model_parallel import DistributedModelParallel
from meshrec.quant import quantize

_path = Path(__file__).parents[1] / "checkpoint" / "random_plans.py"
_spec = importlib.util.spec_from_file_location("random_plans", _path)
plans = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plans)

TYPES = (DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16, DataType.BF16)


def draw_case(rng):
    """A case of random plans, a data type for each table, and of the results."""
    case = plans.draw_case(rng)
    for table in case["tables"]:
        table["dtype"] = "float32"
    case["types"] = {table["name"]: _draw_type(rng, case, table["name"]).name for table in case["tables"]}
    case["output"] = rng.choice([None, None, "FP16", "BF16"])
    return case


def _draw_type(rng, case, name):
    """One whose rows can be cut at the plans' columns, which are at the ends of bytes."""
    columns = [first for plan in case["plans"] for _, _, _, first, _ in plan[name] or () if first]
    return rng.choice([kind for kind in TYPES if all(kind.bits * first % 8 == 0 for first in columns)])


def floats(case, *, fresh=False):
    """The model before it is quantised."""
    model = plans.Model(case)
    first = plans.reference.first_weights
    model.load_state_dict({plans.weight_name(t): first(case, t, fresh=fresh) for t in case["tables"]})
    return model


def quantised(case, model):
    """With the types that were drawn."""
    types = {name: DataType[kind] for name, kind in case["types"].items()}
    output = case["output"] and DataType[case["output"]]
    return quantize(model, per_table=types, output_dtype=output)


def sharded(case, number, model):
    """The model under the plan of that number."""
    env = plans.env_of(case["meshes"][number // 2])
    return DistributedModelParallel(model, env, plan=plans.whole_plan(case, number), dense=None)


def looked_up(case, model):
    """The outputs of all samples, on every rank, by table and feature."""
    bags, _ = plans.reference.inputs(case, 0)
    everything = slice(0, plans.reference.BATCH)
    inputs = [plans.features(case, bags, name, everything) for name in ("ebc", "ec")]
    return plans.by_use(case, model(*inputs))


def whole(model):
    """Every value of a state dict, whole."""
    found = model.state_dict()
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()
    }


def move(case, folder):
    """Outputs and values of a model sharded and then quantised, quantised and then sharded, and moved."""
    made = quantised(case, sharded(case, 0, floats(case)))
    found = [(looked_up(case, made), whole(made))]
    other = sharded(case, 0, quantised(case, floats(case)))
    found.append((looked_up(case, other), whole(other)))
    checkpoint.save(folder, {"model": made})
    made.reshard(plans.whole_plan(case, 1))
    found.append((looked_up(case, made), whole(made)))
    return found


def load(case, folder):
    """Outputs and values of the saved model under the third plan."""
    made = sharded(case, 2, quantised(case, floats(case, fresh=True)))
    checkpoint.load(folder, {"model": made})
    return looked_up(case, made), whole(made)
