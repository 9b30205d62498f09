"""Random models, optimizers and plans, and what ranks do with them; ranks import it by its file."""

import contextlib
import copy
import functools
import importlib.util
import itertools
import logging
import random
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshrec import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    checkpoint,
    fuse,
    optim,
)
from meshrec import distributed as md
from meshrec.comms.mesh import ShardingEnv, default_env
from meshrec.compat.bridge import sharders as bridge
from meshrec.compat.bridge.optimizers import EmbOptimType
from meshrec.model_parallel import DistributedModelParallel

_spec = importlib.util.spec_from_file_location("checkpoint_reference", Path(__file__).parent / "reference.py")
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)

MESHES = {
    "one": (1, 1),
    "two": (2, 2),
    "four": (4, 4),
    "replicate": (4, 2),
    "node": (4, 4),
}
"""The number of processes, and of those that share one copy of the tables."""
OPTIMIZERS = [
    "SGD",
    "Adagrad",
    "RowWiseAdagrad",
    "Adam",
    "PartialRowWiseAdam",
    "LAMB",
    "PartialRowWiseLAMB",
    "LARS",
    "FTRL",
]
BRIDGE = ((bridge.EmbeddingBagCollectionSharder, "ebc"), (bridge.EmbeddingCollectionSharder, "ec"))
DATA_TYPES = {"float32": DataType.FP32, "float16": DataType.FP16, "bfloat16": DataType.BF16}
OF_TORCH = ["SGD", "Adagrad", "Adam"]
ORIGINS = ["sharder", "parameters", "torch", "fuse"]
"""Where tables get their optimizers from."""


def draw_case(rng):
    """A case as plain values. ``rng``: a random.Random."""
    origin = rng.choice(ORIGINS)
    weighted = rng.random() < 0.5
    case = {
        "seed": rng.randrange(1 << 20),
        "weighted": weighted,
        "origin": origin,
        "bridge": origin != "sharder" and rng.random() < 0.5,
        "was_sharded": rng.random() < 0.5,
        "on_step": origin != "fuse" and rng.random() < 0.3,
        "int32": rng.random() < 0.5,
        "longest": rng.choice([3, 3, 40]),
        "even": rng.random() < 0.5,
        "own_batches": rng.random() < 0.3,
        "schedule": rng.random() < 0.5,
        "clip": rng.choice([None, 0.5, 5.0]),
        "steps": (rng.randint(1, 3), rng.randint(1, 3)),
        "meshes": (rng.choice(sorted(MESHES)), rng.choice(sorted(MESHES))),
    }
    case["on_step"] &= not case["bridge"]
    if not case["on_step"]:
        case["clip"] = None
    common = _draw_optimizer(rng, OPTIMIZERS)
    names = OF_TORCH if origin == "torch" else OPTIMIZERS
    case["tables"] = [
        {
            "number": number,
            "name": f"t{number}",
            "collection": "ec" if number == 3 else "ebc",
            "rows": rng.randint(1, 24),
            "dim": rng.choice([1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 33, 64]),
            "dtype": rng.choice(["float32"] * 4 + ["float16", "bfloat16"]),
            "mean": rng.random() < 0.5,
            "features": [f"f{number}_{i}" for i in range(rng.randint(1, 2))],
            "optimizer": common if origin == "sharder" else _draw_optimizer(rng, names, origin == "torch"),
        }
        for number in range(4)
    ]
    if rng.random() < 0.5:
        for table in case["tables"][:2]:
            table["features"].append("shared")
    sizes = [MESHES[case["meshes"][i]][1] for i in (0, 0, 1)]
    case["plans"] = [
        {table["name"]: _draw_rectangles(rng, table, size) for table in case["tables"]} for size in sizes
    ]
    """Where it begins, where it is moved to, and where the checkpoint is loaded."""
    return case


def _draw_optimizer(rng, names, of_torch=False):
    name, decay = rng.choice(names), rng.choice([0.0, 0.05])
    return {
        "name": name,
        "lr": rng.choice([0.01, 0.1]),
        "weight_decay": decay,
        "decoupled": not of_torch and name != "FTRL" and bool(decay) and rng.random() < 0.5,
        "betas": rng.choice([(0.9, 0.999), (0.5, 0.8)]),
        "momentum": rng.choice([0.9, 0.3]),
        "initial": rng.choice([0.0, 0.25]),
        "ftrl": {"beta": rng.choice([1.0, 0.5]), "l1": rng.choice([0.0, 0.01]), "l2": rng.choice([0.0, 0.1])},
    }


def _draw_rectangles(rng, table, num_ranks):
    """Bands of rows cut into columns, or bands of columns cut into rows; None: data-parallel."""
    if rng.random() < 0.15:
        return None
    rows, dim = table["rows"], table["dim"]
    by_rows = rng.random() < 0.5
    outer, inner = (rows, dim) if by_rows else (dim, rows)
    owners = rng.choice([range(num_ranks), [rng.randrange(num_ranks)] * 2 + [rng.randrange(num_ranks)]])
    rectangles = []
    same = _draw_cuts(rng, inner) if rng.random() < 0.4 else None
    for a0, a1 in _draw_cuts(rng, outer):
        for b0, b1 in same or _draw_cuts(rng, inner):
            rank = rng.choice(list(owners))
            rectangles.append((rank, a0, a1, b0, b1) if by_rows else (rank, b0, b1, a0, a1))
    return rectangles


def _draw_cuts(rng, size):
    cuts = sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, 3)))})
    return list(itertools.pairwise(cuts))


@functools.cache
def env_of(mesh):
    names = {"replicate": ("replicate", "shard"), "node": ("node", "local")}
    if mesh not in names:
        return default_env()
    return ShardingEnv.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=names[mesh]))


def plan_of(case, number, collection):
    plan = {}
    for table in case["tables"]:
        rectangles = case["plans"][number][table["name"]]
        if table["collection"] != collection:
            continue
        if rectangles is None:
            plan[table["name"]] = md.ParameterSharding(sharding_type=md.ShardingType.DATA_PARALLEL)
            continue
        shards = tuple(
            md.ShardMetadata(
                shard_offsets=(r0, c0), shard_sizes=(r1 - r0, c1 - c0), placement=md.RemoteDevice(rank=rank)
            )
            for rank, r0, r1, c0, c1 in rectangles
        )
        plan[table["name"]] = md.ParameterSharding(
            sharding_type=md.ShardingType.GRID_SHARD, sharding_spec=md.EnumerableShardingSpec(shards=shards)
        )
    return md.EmbeddingModuleShardingPlan(plan)


def whole_plan(case, number):
    return md.ShardingPlan({name: plan_of(case, number, name) for name in ("ebc", "ec")})


class Model(nn.Module):
    def __init__(self, case):
        super().__init__()
        configs = {"ebc": [], "ec": []}
        for table in case["tables"]:
            common = {
                "name": table["name"],
                "num_embeddings": table["rows"],
                "embedding_dim": table["dim"],
                "feature_names": table["features"],
                "data_type": DATA_TYPES[table["dtype"]],
            }
            if table["collection"] == "ec":
                configs["ec"].append(EmbeddingConfig(**common))
            else:
                pooling = PoolingType.MEAN if table["mean"] else PoolingType.SUM
                configs["ebc"].append(EmbeddingBagConfig(**common, pooling=pooling))
        self.ebc = EmbeddingBagCollection(configs["ebc"], is_weighted=case["weighted"])
        self.ec = EmbeddingCollection(configs["ec"])

    def forward(self, pooled, sequences):
        return self.ebc(pooled), self.ec(sequences)


def weight_name(table):
    return {"ebc": "ebc.embedding_bags.{}.weight", "ec": "ec.embeddings.{}.weight"}[
        table["collection"]
    ].format(table["name"])


def spec_of(optimizer):
    """A spec of ours, and its arguments."""
    kind = getattr(optim, optimizer["name"])
    numbers = {
        "lr": optimizer["lr"],
        "weight_decay": optimizer["weight_decay"],
        "decoupled_weight_decay": optimizer["decoupled"],
    }
    name = optimizer["name"]
    if name not in ("SGD", "FTRL"):
        numbers["eps"] = reference.EPS
    if name == "LARS":
        numbers |= {"trust_coefficient": reference.TRUST, "momentum": optimizer["momentum"]}
    if "Adam" in name or "LAMB" in name:
        numbers["betas"] = optimizer["betas"]
    if "Adagrad" in name or name == "FTRL":
        numbers["initial_accumulator_value"] = optimizer["initial"]
    if name == "FTRL":
        numbers |= optimizer["ftrl"]
    return kind, numbers


def choose_of_torch(weight, optimizer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's package uses what torch has deprecated
        from torch.distributed.optim import _apply_optimizer_in_backward
    numbers = {"lr": optimizer["lr"], "weight_decay": optimizer["weight_decay"]}
    if optimizer["name"] != "SGD":
        numbers["eps"] = reference.EPS
    if optimizer["name"] == "Adam":
        numbers["betas"] = optimizer["betas"]
    if optimizer["name"] == "Adagrad":
        numbers["initial_accumulator_value"] = optimizer["initial"]
    _apply_optimizer_in_backward(getattr(torch.optim, optimizer["name"]), [weight], numbers)


@contextlib.contextmanager
def no_warnings():
    """Silence the library's warnings inside. Later tests of the same ranks get the logger as it was."""
    logger = logging.getLogger("meshrec")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def make(case, number, *, fresh=False):
    """The model under the plan of that number, by the optimizers and on the way that were drawn."""
    env = env_of(case["meshes"][number // 2])
    model = Model(case)
    weights = {weight_name(t): reference.first_weights(case, t, fresh=fresh) for t in case["tables"]}
    model.load_state_dict(weights)
    if case["was_sharded"]:
        other = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02}
        with no_warnings():  # about the optimizer of data-parallel tables
            for kind, name in (
                (bridge.EmbeddingBagCollectionSharder, "ebc"),
                (bridge.EmbeddingCollectionSharder, "ec"),
            ):
                kind(other).shard(getattr(model, name), plan_of(case, number, name), env, torch.device("cpu"))
        model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    for table in case["tables"]:
        weight = parameters[weight_name(table)]
        if case["origin"] == "torch":
            choose_of_torch(weight, table["optimizer"])
        elif case["origin"] != "sharder":
            kind, numbers = spec_of(table["optimizer"])
            optim.apply_optimizer_in_backward(kind, [weight], numbers)
    if case["origin"] == "fuse":
        fuse(model.ebc)
        fuse(model.ec)
    if case["bridge"]:
        sharders = [kind() for kind, _ in BRIDGE]
    else:
        kind, numbers = spec_of(case["tables"][0]["optimizer"])
        spec = kind(**numbers) if case["origin"] == "sharder" else None
        update = "on_step" if case["on_step"] else None
        sharders = [
            md.EmbeddingBagCollectionSharder(spec, update=update),
            md.EmbeddingCollectionSharder(spec, update=update),
        ]
    return DistributedModelParallel(model, env, plan=whole_plan(case, number), sharders=sharders), env


def of_rank(case, env, step):
    """The samples of a step that are this rank's."""
    return slice(*reference.shares(case, step, env.world.size)[env.world.rank])


def set_rates(case, optimizer, step):
    """The learning rates of a step, as a scheduler sets them."""
    first = {weight_name(table): table["optimizer"]["lr"] for table in case["tables"]}
    names = {parameter: name for name, parameter in optimizer.params.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"][:1]:
            group["lr"] = first[names[parameter]] * reference.rate_factor(case, step)


def train(case, model, env, steps):
    """This rank's outputs of each step, by (table, feature), and gradients of weights of ids, by feature."""
    optimizer = model.fused_optimizer
    if case["clip"] is not None:
        optimizer = optim.GradientClippingOptimizer(optimizer, optim.GradientClipping.NORM, case["clip"])
    found = []
    for step in steps:
        mine = of_rank(case, env, step)
        set_rates(case, model.fused_optimizer, step)
        bags, gradients = reference.inputs(case, step)
        inputs = [features(case, bags, name, mine) for name in ("ebc", "ec")]
        if case["weighted"]:
            inputs[0].weights().requires_grad_()
        outputs = by_use(case, model(*inputs))
        loss = torch.zeros(())
        for table in case["tables"]:
            for feature in table["features"]:
                use = table["name"], feature
                if table["collection"] == "ebc":
                    own = gradients[use][mine]
                else:
                    own = torch.cat(
                        [torch.empty(0, table["dim"])]
                        + list(gradients[use].split([len(ids) for ids, _ in bags[feature]]))[mine]
                    )
                loss = loss + (outputs[use] * own).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({use: output.detach() for use, output in outputs.items()})
        if case["weighted"] and not case["own_batches"]:
            found[-1] |= gradients_of_weights(inputs[0])
    return found


def gradients_of_weights(kjt):
    return dict(zip(kjt.keys(), kjt.weights().grad.split(kjt.length_per_key()), strict=True))


def features(case, bags, collection, mine):
    names = sorted({f for t in case["tables"] if t["collection"] == collection for f in t["features"]})
    own = {name: bags[name][mine] for name in names}
    batches = {}
    if case["own_batches"] and collection == "ebc":
        own, inverse = rearranged(case, own)
        batches = {
            "stride_per_key_per_rank": [[len(own[name])] for name in names],
            "inverse_indices": (names, inverse),
        }
    all_bags = [bag for name in names for bag in own[name]]
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *(ids for ids, _ in all_bags)])
    is_weighted = case["weighted"] and collection == "ebc"
    return KeyedJaggedTensor(
        names,
        ids.int() if case["int32"] else ids,
        weights=torch.cat([torch.empty(0), *(weights for _, weights in all_bags)]) if is_weighted else None,
        lengths=torch.tensor([len(ids) for ids, _ in all_bags], dtype=torch.int64),
        **batches,
    )


def rearranged(case, bags):
    """The bags of each key in an order of its own, with empty ones among them, and where each sample's is."""
    rng, found, inverse = random.Random(case["seed"]), {}, []
    for name, own in bags.items():
        places = rng.sample(range(len(own) + rng.randint(0, 2)), len(own))
        found[name] = [(torch.empty(0, dtype=torch.int64), torch.empty(0))] * (max(places, default=-1) + 1)
        for place, bag in zip(places, own, strict=True):
            found[name][place] = bag
        inverse.append(places)
    return found, torch.tensor(inverse, dtype=torch.int64)


def by_use(case, results):
    pooled, sequences = results
    found = {}
    for table in case["tables"]:
        for feature in table["features"]:
            name = f"{feature}@{table['name']}" if feature == "shared" else feature
            is_bag = table["collection"] == "ebc"
            found[table["name"], feature] = pooled[name] if is_bag else sequences[name].values()
    return found


def whole(case, model):
    """By table its weights, its state by slot, and the number of its updates."""
    weights, states = model.state_dict(), model.fused_optimizer.state_dict()["state"]
    found = {}
    for table in case["tables"]:
        values = {"weight": weights[weight_name(table)], **states[weight_name(table)]}
        found[table["name"]] = {
            slot: value.full_tensor() if hasattr(value, "full_tensor") else copy.copy(value)
            for slot, value in values.items()
        }
    return copy.deepcopy(found)


def begin(case, folder):
    """Trains, saves, moves to the second plan, and trains on."""
    before, after = case["steps"]
    model, env = make(case, 0)
    outputs = train(case, model, env, range(before))
    checkpoint.save(folder, {"model": model, "tables": model.fused_optimizer})
    values = whole(case, model)
    model.reshard(whole_plan(case, 1))
    moved = whole(case, model)
    outputs += train(case, model, env, range(before, before + after))
    return values, moved, outputs, whole(case, model)


def go_on(case, folder):
    """Loads under the third plan, and trains on."""
    before, after = case["steps"]
    model, env = make(case, 2, fresh=True)
    checkpoint.load(folder, {"model": model, "tables": model.fused_optimizer})
    values = whole(case, model)
    outputs = train(case, model, env, range(before, before + after))
    return values, outputs, whole(case, model)


def publish(case, folder):
    """Deltas of training under the first plan, in two halves; the weights before and after."""
    before, after = case["steps"]
    model, env = make(case, 0)
    outputs = [whole(case, model)]
    publisher = checkpoint.DeltaPublisher(model, folder, run="r", step=0)
    for steps in (range(before), range(before, before + after)):
        train(case, model, env, steps)
        publisher.publish(steps.stop)
    return [*outputs, whole(case, model)]
