"""The libraries that look up and train several tables of one shape, each used in its fastest way.

Every contender makes one ``[batch, num_tables * dim]`` tensor of sums, and updates its tables in ``step``.
"""

import abc
import importlib.util
import warnings
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LR, EPS = 0.02, 1e-8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape: ``num_tables`` tables of ``num_rows`` x ``dim``, and ``batch`` samples with ``bag`` IDs in each
    table.
    """

    num_tables: int
    num_rows: int
    dim: int
    batch: int
    bag: int
    zipf: float | None = None

    def __str__(self) -> str:
        tables = f"{self.num_tables} x {self.num_rows} x {self.dim}"
        ids = f"Zipf {self.zipf} ids" if self.zipf else "uniform ids"
        return f"{tables}, batch {self.batch}, {self.bag} ids per bag, {ids}"


class Lookups:
    """One batch, table by table: ids_N (N = num_tables * batch * bag), offsets and an output gradient."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        num_ids = shape.num_tables * shape.batch * shape.bag
        generator = torch.Generator().manual_seed(0)
        if shape.zipf:
            import numpy

            drawn = numpy.random.default_rng(0).zipf(shape.zipf, size=num_ids) % shape.num_rows
            self.ids = torch.from_numpy(drawn).to(torch.int64)
        else:
            self.ids = torch.randint(0, shape.num_rows, (num_ids,), generator=generator)
        self.offsets = torch.arange(shape.num_tables * shape.batch + 1) * shape.bag
        self.grad = torch.randn(shape.batch, shape.num_tables * shape.dim, generator=generator)

    @cached_property
    def ids_per_table(self) -> list[Tensor]:
        return list(self.ids.chunk(self.shape.num_tables))

    def fill(self, weights: list[Tensor]) -> None:
        """Return the initial values, the same for every contender."""
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in weights:
                weight.uniform_(-0.1, 0.1, generator=generator)


class Contender(abc.ABC):
    """A library with its tables. ``weights[t]`` is the memory that ``forward`` reads and ``step`` updates."""

    name: str
    weights: list[Tensor]
    rowwise = True  # whether ``step`` is RowWiseAdagrad; else Adagrad, where the library has no other

    @abc.abstractmethod
    def forward(self) -> Tensor: ...

    @abc.abstractmethod
    def step(self) -> None: ...


class MeshRec(Contender):
    """Our public modules, with a new KeyedJaggedTensor in every call as in training."""

    name = "meshrec"

    def __init__(self, lookups: Lookups) -> None:
        import meshrec
        from meshrec.optim import RowWiseAdagrad

        shape = lookups.shape
        self._lookups = lookups
        self._keys = [f"f{t}" for t in range(shape.num_tables)]
        tables = [
            meshrec.EmbeddingBagConfig(
                name=f"t{t}",
                embedding_dim=shape.dim,
                num_embeddings=shape.num_rows,
                feature_names=[f"f{t}"],
            )
            for t in range(shape.num_tables)
        ]
        collection = meshrec.EmbeddingBagCollection(tables=tables)
        self._module = meshrec.fuse(collection, optimizer=RowWiseAdagrad(lr=LR, eps=EPS))
        parameters = dict(self._module.named_parameters())
        self.weights = [parameters[f"embedding_bags.t{t}.weight"].data for t in range(shape.num_tables)]
        lookups.fill(self.weights)

    def forward(self) -> Tensor:
        import meshrec

        features = meshrec.KeyedJaggedTensor(self._keys, self._lookups.ids, offsets=self._lookups.offsets)
        return self._module(features).values()

    def step(self) -> None:
        self.forward().backward(self._lookups.grad)


class Op(Contender):
    """Our operations called directly. The difference is the cost of the modules."""

    name = "meshrec, ops alone"

    def __init__(self, lookups: Lookups) -> None:
        import meshrec  # noqa: F401 - registers the ops
        from meshrec.optim import RowWiseAdagrad

        shape = lookups.shape
        tables = list(range(shape.num_tables))
        self.weights = [torch.empty(shape.num_rows, shape.dim) for _ in tables]
        lookups.fill(self.weights)
        state = [torch.zeros(shape.num_rows) for _ in tables]
        names = torch.tensor(list("".join(f"t{t}\tf{t}\n" for t in tables).encode()), dtype=torch.uint8)
        routing = (len(tables), tables, tables, [0] * len(tables), False)
        batch = (lookups.ids, lookups.offsets, None, None, *routing)
        self._forward = (self.weights, *batch, shape.batch, torch.float32, True, names)
        rule = RowWiseAdagrad(lr=LR, eps=EPS)
        hyper = rule.hyper(lr=LR, step=1)
        update = ([shape.dim] * len(tables), self.weights, state, rule.code, hyper, None, [])
        self._update = (lookups.grad, *batch, *update)

    def forward(self) -> Tensor:
        return torch.ops.meshrec.tbe_forward(*self._forward)

    def step(self) -> None:
        self.forward()
        torch.ops.meshrec.tbe_update(*self._update)


class Fbgemm(Contender):
    name = "FBGEMM"

    def __init__(self, lookups: Lookups) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode

        shape = lookups.shape
        self._lookups = lookups
        table = (shape.num_rows, shape.dim, EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        self._module = training.SplitTableBatchedEmbeddingBagsCodegen(
            [table] * shape.num_tables,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LR,
            eps=EPS,
            pooling_mode=PoolingMode.SUM,
            device=torch.device("cpu"),
        )
        self.weights = self._module.split_embedding_weights()
        lookups.fill(self.weights)

    def forward(self) -> Tensor:
        return self._module(self._lookups.ids, self._lookups.offsets)

    def step(self) -> None:
        self.forward().backward(self._lookups.grad)


class Torch(Contender):
    """Plain torch: nn.EmbeddingBag(sparse=True) per table, ``cat``, and Adagrad (torch has no row-wise
    one).
    """

    name = "torch"
    rowwise = False

    def __init__(self, lookups: Lookups) -> None:
        shape = lookups.shape
        self._lookups = lookups
        self._offsets = lookups.offsets[: shape.batch + 1]
        weights = [torch.empty(shape.num_rows, shape.dim) for _ in range(shape.num_tables)]
        lookups.fill(weights)
        bags = [
            torch.nn.EmbeddingBag(*w.shape, mode="sum", sparse=True, include_last_offset=True, _weight=w)
            for w in weights
        ]
        self._bags = bags
        self.weights = [bag.weight.data for bag in bags]
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default; left unsaid, torch warns
        self._optimizer = torch.optim.Adagrad([bag.weight for bag in bags], lr=LR, eps=EPS)

    def forward(self) -> Tensor:
        ids = self._lookups.ids_per_table
        return torch.cat([bag(each, self._offsets) for bag, each in zip(self._bags, ids, strict=True)], dim=1)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self.forward().backward(self._lookups.grad)
        self._optimizer.step()


def contenders(lookups: Lookups) -> dict[str, Contender]:
    """Return every installed contender, each with its own tables."""
    classes: list[type[Contender]] = [MeshRec, Op, Torch]
    if importlib.util.find_spec("fbgemm_gpu") is not None:
        classes.insert(2, Fbgemm)
    return {each.name: each(lookups) for each in classes}
