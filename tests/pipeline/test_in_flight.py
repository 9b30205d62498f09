from collections import UserDict
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

from meshrec.pipeline.in_flight import find_tensors, object_at, path_text
from meshrec.sparse import KeyedJaggedTensor


def ids():
    return KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1]))


@dataclass
class Fields:
    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    name: str = "train"
    rows: torch.Tensor | None = None


@dataclass(slots=True)
class SlotFields:
    dense: torch.Tensor
    sparse: KeyedJaggedTensor


class Later(Fields):
    def __init__(self, dense, sparse):
        super().__init__(dense, None)
        self.own = sparse


@dataclass
class Computed:
    dense: torch.Tensor
    sparse: KeyedJaggedTensor | None = field(init=False, default=None)


class Pair(NamedTuple):
    dense: torch.Tensor
    sparse: KeyedJaggedTensor


class Plain:
    def __init__(self, dense, sparse):
        self.dense, self.sparse = dense, sparse


class Slots:
    __slots__ = ("dense", "sparse")

    def __init__(self, dense, sparse):
        self.dense, self.sparse = dense, sparse


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (Fields, "batch.sparse"),
        (SlotFields, "batch.sparse"),
        (Later, "batch.own"),
        (Pair, "batch[1]"),
        (Plain, "batch.sparse"),
        (Slots, "batch.sparse"),
        (lambda *parts: list(parts), "batch[1]"),
        (lambda dense, sparse: {"dense": dense, "sparse": sparse}, "batch['sparse']"),
        (lambda dense, sparse: UserDict(dense=dense, sparse=sparse), "batch['sparse']"),
        (lambda dense, sparse: {"inner": (dense, Plain(None, sparse))}, "batch['inner'][1].sparse"),
    ],
)
def test_tensors_of_a_batch_have_paths(kind, path):
    for _ in range(2):  # the second instance of a type is read as the first
        dense, sparse = torch.zeros(1), ids()
        batch = kind(dense, sparse)
        leaves = find_tensors(batch)
        assert [leaf for _, leaf in leaves] == [dense, sparse]
        assert all(object_at(batch, step) is leaf for step, leaf in leaves)
        assert path_text(leaves[1][0]) == path


def test_parts_may_be_missing_and_differ_between_batches_of_a_type():
    batch = Computed(torch.zeros(1))
    assert len(find_tensors(batch)) == 1
    batch.sparse = ids()
    assert len(find_tensors(batch)) == 2
    assert len(find_tensors({"a": torch.zeros(1)})) == 1
    assert len(find_tensors({"a": torch.zeros(1), "b": {"a": ids()}})) == 2


def test_a_tensor_in_two_places_appears_once():
    tensor = torch.zeros(1)
    assert [leaf for _, leaf in find_tensors([tensor, {"again": tensor}])] == [tensor]
