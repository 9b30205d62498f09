"""Jagged tensors: made, read, cut, joined and printed."""

import json
import sys
from pathlib import Path

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

found = {}

jt = JaggedTensor(values=torch.tensor([5.0, 7.0, 1.0]), lengths=torch.tensor([1, 2]))
found["jagged"] = [
    str(jt),
    [row.tolist() for row in jt.to_dense()],
    jt.to_padded_dense(3, padding_value=-1.0).tolist(),
    jt.offsets().tolist(),
    str(JaggedTensor.from_dense([torch.tensor([1.0]), torch.tensor([7.0, 8.0])])),
    JaggedTensor.empty().values().tolist(),
]

kjt = KeyedJaggedTensor.from_lengths_sync(
    keys=["product", "user"],
    values=torch.tensor([101, 202, 303, 404, 505, 606]),
    lengths=torch.tensor([2, 0, 1, 1, 1, 1]),
    weights=torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5, 3.0]),
)
found["keyed"] = [
    str(kjt),
    kjt.keys(),
    kjt.stride(),
    kjt.stride_per_key(),
    kjt.length_per_key(),
    kjt.offset_per_key(),
    kjt.offsets().tolist(),
    {key: [bag.values().tolist(), bag.weights().tolist()] for key, bag in kjt.to_dict().items()},
    [str(part) for part in kjt.split([1, 1])],
    str(kjt.permute([1, 0])),
    str(kjt["user"]),
    str(KeyedJaggedTensor.concat([kjt, kjt]).keys()),
    kjt.to(torch.device("cpu")).values().tolist(),
    str(KeyedJaggedTensor.from_jt_dict(kjt.to_dict())),
]
by_offsets = KeyedJaggedTensor.from_offsets_sync(
    keys=["a", "b"], values=torch.arange(4), offsets=torch.tensor([0, 1, 1, 3, 4])
)
found["by offsets"] = [str(by_offsets), by_offsets.lengths().tolist()]

kt = KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3))
other = KeyedTensor.from_tensor_list(["c"], [torch.ones(2, 2)])
found["dense"] = [
    str(kt),
    kt.keys(),
    kt["b"].tolist(),
    kt.length_per_key(),
    kt.offset_per_key(),
    [group.tolist() for group in KeyedTensor.regroup([kt, other], [["c", "a"], ["b"]])],
    {k: v.tolist() for k, v in KeyedTensor.regroup_as_dict([kt, other], [["b", "c"]], ["x"]).items()},
]
Path(sys.argv[1]).write_text(json.dumps(found))
