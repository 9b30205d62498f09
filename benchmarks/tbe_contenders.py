"""The libraries that look up and train several tables of one shape, each used in its fastest way.

Every contender makes one ``[batch, num_tables * dim]`` tensor of sums, and updates its tables in ``step``.
"""

import abc
import importlib.util
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import configs

LR, EPS = 0.02, 1e-8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """``num_tables`` tables of ``num_rows`` x ``dim``, and ``batch`` samples with ``bag`` IDs in each
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
    """One batch, table by table: ids_N (N = num_tables * batch * bag), offsets and an output gradient.

    Args:
        shape: the tables and the batch.
        seed: seed of the IDs.
        device: device of the batch and of the tables.
        sgd: whether the tables are trained with SGD; else with row-wise Adagrad.
    """

    def __init__(self, shape: Shape, seed: int = 0, device: str = "cpu", *, sgd: bool = False) -> None:
        self.shape, self.device, self.sgd = shape, torch.device(device), sgd
        num_ids = shape.num_tables * shape.batch * shape.bag
        generator = torch.Generator().manual_seed(seed)
        if shape.zipf:
            import numpy

            drawn = numpy.random.default_rng(seed).zipf(shape.zipf, size=num_ids) % shape.num_rows
            self.ids = torch.from_numpy(drawn).to(torch.int64)
        else:
            self.ids = torch.randint(0, shape.num_rows, (num_ids,), generator=generator)
        self.ids = self.ids.to(device)
        self.offsets = torch.arange(shape.num_tables * shape.batch + 1, device=device) * shape.bag
        self.grad = torch.randn(shape.batch, shape.num_tables * shape.dim, generator=generator).to(device)

    @cached_property
    def ids_per_table(self) -> list[Tensor]:
        return list(self.ids.chunk(self.shape.num_tables))

    @torch.no_grad()
    def fill(self, weights: list[Tensor]) -> None:
        """Write the initial values, the same for every contender."""
        generator = torch.Generator(self.device).manual_seed(1)
        for weight in weights:
            weight.uniform_(-0.1, 0.1, generator=generator)

    def features(self) -> Any:
        """Return the IDs as a new KeyedJaggedTensor."""
        import meshrec

        keys = [f"f{t}" for t in range(self.shape.num_tables)]
        return meshrec.KeyedJaggedTensor(keys, self.ids, offsets=self.offsets)


class Contender(abc.ABC):
    """A library with its tables. ``weights[t]`` is the memory that ``forward`` reads and ``step`` updates."""

    name: str
    weights: list[Tensor]
    rowwise = True  # whether ``step`` is RowWiseAdagrad; else Adagrad, where the library has no other

    def __init__(self, lookups: Lookups) -> None:
        self.lookups = lookups

    @abc.abstractmethod
    def forward(self) -> Tensor: ...

    def step(self) -> None:
        self.forward().backward(self.lookups.grad)


class MeshRec(Contender):
    """Our public modules, with a new KeyedJaggedTensor in every call as in training."""

    name = "meshrec"

    def __init__(self, lookups: Lookups) -> None:
        super().__init__(lookups)
        import meshrec
        from meshrec.optim import SGD, RowWiseAdagrad

        shape = lookups.shape
        tables = configs(shape.num_tables, shape.num_rows, shape.dim)
        collection = meshrec.EmbeddingBagCollection(tables=tables, device=lookups.device)
        rule = SGD(lr=LR) if lookups.sgd else RowWiseAdagrad(lr=LR, eps=EPS)
        self._module = meshrec.fuse(collection, optimizer=rule)
        parameters = dict(self._module.named_parameters())
        self.weights = [parameters[f"embedding_bags.t{t}.weight"].data for t in range(shape.num_tables)]
        lookups.fill(self.weights)

    def forward(self) -> Tensor:
        return self._module(self.lookups.features()).values()


class Op(Contender):
    """Our operations called directly. The difference is the cost of the modules."""

    name = "meshrec, ops alone"

    def __init__(self, lookups: Lookups) -> None:
        super().__init__(lookups)
        from meshrec.ops.memory import empty_pages
        from meshrec.optim import RowWiseAdagrad

        shape = lookups.shape
        tables = list(range(shape.num_tables))
        # As the modules: in huge pages.
        self.weights = [empty_pages((shape.num_rows, shape.dim), torch.float32, None) for _ in tables]
        lookups.fill(self.weights)
        state = [empty_pages((shape.num_rows,), torch.float32, None).zero_() for _ in tables]
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
        super().__init__(lookups)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation

        shape, on_gpu = lookups.shape, lookups.device.type == "cuda"
        location = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
        compute = training.ComputeDevice.CUDA if on_gpu else training.ComputeDevice.CPU
        self._module = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(shape.num_rows, shape.dim, location, compute)] * shape.num_tables,
            optimizer=EmbOptimType.EXACT_SGD if lookups.sgd else EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LR,
            eps=EPS,
            device=lookups.device,
        )
        self.weights = self._module.split_embedding_weights()
        lookups.fill(self.weights)

    def forward(self) -> Tensor:
        return self._module(self.lookups.ids, self.lookups.offsets)


class Torch(Contender):
    """Plain torch: nn.EmbeddingBag(sparse=True) per table, ``cat``, and Adagrad (torch has no row-wise
    one).
    """

    name = "torch"
    rowwise = False

    def __init__(self, lookups: Lookups) -> None:
        super().__init__(lookups)
        shape = lookups.shape
        self._offsets = lookups.offsets[: shape.batch + 1]
        self.weights = [
            torch.empty(shape.num_rows, shape.dim, device=lookups.device) for _ in range(shape.num_tables)
        ]
        lookups.fill(self.weights)
        self._bags = [
            torch.nn.EmbeddingBag(*w.shape, mode="sum", sparse=True, include_last_offset=True, _weight=w)
            for w in self.weights
        ]
        torch.sparse.check_sparse_tensor_invariants.disable()  # the default; left unsaid, torch warns
        weights = [bag.weight for bag in self._bags]
        self._optimizer = (
            torch.optim.SGD(weights, lr=LR) if lookups.sgd else torch.optim.Adagrad(weights, lr=LR, eps=EPS)
        )

    def forward(self) -> Tensor:
        ids = self.lookups.ids_per_table
        return torch.cat([bag(each, self._offsets) for bag, each in zip(self._bags, ids, strict=True)], dim=1)

    def step(self) -> None:
        self._optimizer.zero_grad()
        super().step()
        self._optimizer.step()


def classes() -> list[type[Contender]]:
    """Return every installed contender."""
    fbgemm = [Fbgemm] if importlib.util.find_spec("fbgemm_gpu") is not None else []
    return [MeshRec, Op, *fbgemm, Torch]
