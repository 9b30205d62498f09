"""One way to draw a batch of lookups, for every test that compares the kernels with naive.py."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from meshrec.ops.tbe.layout import MEAN, SUM, make_layout

# Key 1 is read by nobody, key 2 by two tables, table 1 by two keys.
ROWS, DIMS = (50, 9, 700), (4, 17, 64)
KEYS, TABLES, POOLING = (2, 0, 2, 3), (0, 1, 1, 2), (SUM, MEAN, SUM, MEAN)
NAMES = torch.tensor(list(b"t0\ta\nt1\tb\nt1\tc\nt2\td\n"), dtype=torch.uint8)


class Case(NamedTuple):
    weights: list[Tensor]
    values: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    segments: Tensor | None
    num_keys: int
    keys: list[int]
    tables: list[int]
    pooling: list[int]
    flat: bool
    dims: list[int]

    @property
    def lookups(self):
        """From values to flat, as most ops take them."""
        return self[1:10]

    @property
    def out_size(self):
        layout = make_layout(
            self.offsets,
            self.segments,
            self.num_keys,
            self.keys,
            self.dims,
            pooling=self.pooling,
            flat=self.flat,
        )
        return layout.out_size

    def gradient(self, *, seed=1, exact=True):
        """Shaped like the output; ``exact``: sums of some thousands are the same in every order."""
        shape = [self.out_size] if self.flat else [self.out_size, sum(self.dims)]
        generator = torch.Generator().manual_seed(seed)
        if exact:
            return torch.randint(-16, 17, shape, generator=generator) / 8
        return torch.randn(shape, generator=generator)

    def forward(self, ops, *, out_dtype=torch.float32, check_ids=True, names=NAMES, out_size=None):
        out_size = self.out_size if out_size is None else out_size
        return ops.tbe_forward(self.weights, *self.lookups, out_size, out_dtype, check_ids, names)

    def update(self, ops, grad, state, optimizer, hyper, row_stats=None, origins=(), **runs):
        own = (self.weights, state, optimizer, hyper, row_stats, list(origins))
        ops.tbe_update(grad, *self.lookups, self.dims, *own, **runs)

    def sparse_grad(self, ops, grad):
        return ops.tbe_sparse_grad(grad, *self.lookups, self.dims, [len(weight) for weight in self.weights])

    def row_squares(self, ops, grad):
        return ops.tbe_row_squares(grad, *self.lookups, self.dims, [len(weight) for weight in self.weights])

    def dense_grad(self, ops, grad):
        return ops.tbe_dense_grad(grad, self.weights, *self.lookups, self.dims)

    def sample_weight_grad(self, ops, grad):
        values, offsets, _, *rest = self.lookups
        return ops.tbe_sample_weight_grad(grad, self.weights, values, offsets, *rest, self.dims)

    def clamp_ids(self, ops):
        num_rows = [len(weight) for weight in self.weights]
        layout = (self.segments, self.num_keys, self.keys, self.tables)
        return ops.clamp_ids(self.values, self.offsets, *layout, num_rows)

    def copied(self):
        return self._replace(weights=[weight.clone() for weight in self.weights])


def _ids_of(key, count, generator, *, rows, keys, tables):
    """Within all tables that read the key; ids of a key that nobody reads fit no table."""
    bounds = [rows[table] for at, table in zip(keys, tables, strict=True) if at == key]
    if not bounds:
        return torch.full([count], 10**6)
    return torch.randint(0, min(bounds), [count], generator=generator)


def _make_case(
    *,
    num_bags=((3, 3, 3, 3),),
    rows=ROWS,
    dims=DIMS,
    keys=KEYS,
    tables=TABLES,
    pooling=POOLING,
    flat=False,
    longest=4,
    weighted=False,
    id_dtype=torch.int64,
    offset_dtype=None,
    dtype=torch.float32,
    seed=0,
):
    """``num_bags``: blocks by keys. ``longest``: bags hold 0 to that many ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths, ids = [], []
    for block in num_bags:
        for key, bags in enumerate(block):
            lengths.append(torch.randint(0, longest + 1, [bags], generator=generator))
            count = int(lengths[-1].sum())
            ids.append(_ids_of(key, count, generator, rows=rows, keys=keys, tables=tables))
    values = torch.cat(ids).to(id_dtype)
    bounds = torch.tensor([0] + [bags for block in num_bags for bags in block]).cumsum(0)
    one_size = len(num_bags) == 1 and len(set(num_bags[0])) == 1
    sample_weights = torch.randint(-8, 9, values.shape, generator=generator) / 4
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,) * len(rows)
    return Case(
        weights=[
            torch.randn(e, d, generator=generator).to(each)
            for e, d, each in zip(rows, dims, dtypes, strict=True)
        ],
        values=values,
        offsets=torch.cat([torch.zeros(1), *lengths]).cumsum(0).to(offset_dtype or id_dtype),
        sample_weights=sample_weights if weighted else None,
        segments=None if one_size else bounds,
        num_keys=len(num_bags[0]),
        keys=list(keys),
        tables=list(tables),
        pooling=list(pooling),
        flat=flat,
        dims=[dims[table] for table in tables],
    )


@pytest.fixture
def set_threads():
    """One thread, unless the test asks for more: on tiny tensors threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_case():
    return _make_case


@pytest.fixture(scope="session")
def one_table():
    """Bags given as lists of ids, of one key, in one table."""

    def make(bags, num_rows, dim, *, pooling=SUM, **kwargs):
        flat = kwargs.pop("flat", False)
        num_bags = ((len(bags),),)
        case = _make_case(
            rows=(num_rows,),
            dims=(dim,),
            keys=(0,),
            tables=(0,),
            pooling=(pooling,),
            num_bags=num_bags,
            longest=0,
            **kwargs,
        )
        values = torch.tensor([i for bag in bags for i in bag], dtype=case.values.dtype)
        offsets = torch.tensor([0, *map(len, bags)], dtype=case.offsets.dtype).cumsum(0)
        weighted = case.sample_weights is not None
        return case._replace(
            values=values,
            offsets=offsets.to(case.offsets.dtype),
            sample_weights=torch.arange(len(values)).remainder(5).sub(2.0) / 2 if weighted else None,
            flat=flat,
        )

    return make
