"""Messages between stages on several ranks: values of splits, their gradients, and failures."""

import copyreg
import io
import pickle
from collections import ChainMap
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from meshrec.pipeline.stages.programs import StageFlow
from meshrec.pipeline.stages.values import Exchange, Gradients

_HEADER_BYTES = 2048
"""Size of a message header. It holds the shapes and dtypes of about twenty tensors; longer ones need a second
message.
"""


class Message(NamedTuple):
    """A value of one split, or its gradients. ``source`` made the value, ``destination`` uses it."""

    kind: Literal["value", "gradient"]
    name: str
    k: int
    source: int
    destination: int


class _Header(NamedTuple):
    """Header of a message.

    ``error`` is the sender's failure, in place of a value. ``leaves`` has shape, dtype and requires_grad of
    each tensor, and other leaves as they are.
    """

    error: str | None
    spec: Any
    leaves: list[Any]


class _TensorForm(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_gradient: bool


def _reduced_leaf(spec: pytree.TreeSpec) -> Any:
    return (pytree.tree_structure, (0,)) if spec.type is None else spec.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


# As torch pickles the spec of a leaf, loading it warns that its class is deprecated.
_REDUCERS = ChainMap[type, Any]({type(pytree.tree_structure(0)): _reduced_leaf}, copyreg.dispatch_table)


class ElsewhereError(RuntimeError):
    """Failure of another stage. The message says which stage, and why."""


class RankExchange(Exchange):
    """Point-to-point messages on a process group whose ranks are the stages.

    Every message of the schedule is sent, whatever happens: after a failure it says why there is no value.
    Therefore no rank waits in vain, and the next batch finds no old message.
    """

    def __init__(self, group: dist.ProcessGroup, names: Iterable[str]) -> None:
        self._group = group
        self._tags = {name: index for index, name in enumerate(sorted(names))}
        self._sends: list[tuple[dist.Work | None, Tensor]] = []
        self._done: set[Message] = set()
        self.error: str | None = None

    def begin(self) -> None:
        """Start a new batch."""
        self._done.clear()
        self.error = None

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        self._sends.clear()

    def put(self, name: str, k: int, value: Any, source: int, destination: int) -> None:
        self._put(Message("value", name, k, source, destination), value)

    def get(self, name: str, k: int, source: int, destination: int) -> Any:
        return self._get(Message("value", name, k, source, destination))

    def put_gradients(self, name: str, k: int, gradients: Gradients, source: int, destination: int) -> None:
        self._put(Message("gradient", name, k, source, destination), gradients)

    def get_gradients(self, name: str, k: int, source: int, destination: int) -> Gradients:
        found: Gradients = self._get(Message("gradient", name, k, source, destination))
        return found

    def settle(self, messages: Iterable[tuple[Message, bool]]) -> None:
        """Send and receive the rest of the schedule's messages after a failure.

        Send ``error`` in place of every message still to send, and receive every message still to come. Each
        entry of ``messages`` says whether this rank sends it.
        """
        for message, is_own in messages:
            if message in self._done:
                continue
            if is_own:
                self._put(message, None)
            else:
                try:
                    self._get(message)
                except ElsewhereError as error:
                    self.error = self.error or str(error)

    def _put(self, message: Message, value: Any) -> None:
        self._done.add(message)
        peer = message.destination if message.kind == "value" else message.source
        if self.error is not None:
            self._send_header(_Header(self.error, None, []), peer, message)
            return
        flat, spec = pytree.tree_flatten(value)
        tensors = [leaf.detach().contiguous() for leaf in flat if isinstance(leaf, Tensor)]
        forms = [
            _TensorForm(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in flat
        ]
        self._send_header(_Header(None, spec, forms), peer, message)
        for tensor in tensors:
            if tensor.numel():
                self._send(tensor, peer, message)

    def _get(self, message: Message) -> Any:
        self._done.add(message)
        peer = message.source if message.kind == "value" else message.destination
        header = self._receive_header(peer, message)
        if header.error is not None:
            raise ElsewhereError(header.error)
        flat = []
        for leaf in header.leaves:
            if isinstance(leaf, _TensorForm):
                tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
                if tensor.numel():
                    self._receive(tensor, peer, message)
                flat.append(tensor.requires_grad_(leaf.wants_gradient))
            else:
                flat.append(leaf)
        return pytree.tree_unflatten(flat, header.spec)

    def _send_header(self, header: _Header, peer: int, message: Message) -> None:
        file = io.BytesIO()
        pickler = pickle.Pickler(file)
        pickler.dispatch_table = _REDUCERS
        pickler.dump(tuple(header))
        data = file.getvalue()
        first = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        fits = len(data) <= _HEADER_BYTES - 8
        first[:8] = torch.tensor([len(data)]).view(torch.uint8)
        if fits:
            first[8 : 8 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._send(first, peer, message)
        if not fits:
            self._send(torch.frombuffer(bytearray(data), dtype=torch.uint8), peer, message)

    def _receive_header(self, peer: int, message: Message) -> _Header:
        first = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        self._receive(first, peer, message)
        length = int(first[:8].view(torch.int64))
        if length <= _HEADER_BYTES - 8:
            return _Header(*pickle.loads(bytes(first[8 : 8 + length].tolist())))
        rest = torch.empty(length, dtype=torch.uint8)
        self._receive(rest, peer, message)
        return _Header(*pickle.loads(bytes(rest.tolist())))

    def _send(self, tensor: Tensor, peer: int, message: Message) -> None:
        destination = dist.get_global_rank(self._group, peer)
        work = dist.isend(tensor, destination, group=self._group, tag=self._tag(message))
        self._sends.append((work, tensor))

    def _receive(self, tensor: Tensor, peer: int, message: Message) -> None:
        dist.recv(tensor, dist.get_global_rank(self._group, peer), group=self._group, tag=self._tag(message))

    def _tag(self, message: Message) -> int:
        return 2 * (message.k * len(self._tags) + self._tags[message.name]) + (message.kind == "gradient")


def messages_of(flow: StageFlow, action: str, k: int, *, generator: str | None) -> list[tuple[Message, bool]]:
    """Return all messages of one action of a stage, each with whether this stage sends it.

    ``action`` is "tables", "forward", "backward" or "collect". ``k`` is the split, or the number of splits
    for actions on the whole batch.
    """
    stage, makers, users, own = flow.stage, flow.makers, flow.users, flow.stage.index
    if action in ("tables", "collect"):
        kind: Literal["value", "gradient"] = "value" if action == "tables" else "gradient"
        whole = stage.whole.gives if stage.whole is not None else []
        return [
            (Message(kind, n, i, own, u), action == "tables")
            for n in whole
            for i in range(k)
            for u in users.get(n, ())
        ]
    kind = "value" if action == "forward" else "gradient"
    takes = [name for name in flow.takes if makers.get(name, own) != own]
    found = [(Message(kind, n, k, makers[n], own), action == "backward") for n in takes]
    found += [
        (Message(kind, n, k, own, u), action == "forward")
        for n in stage.split.gives
        for u in users.get(n, ())
    ]
    if generator is not None and action == "forward":
        if own > 0:
            found.append((Message("value", generator, k, own - 1, own), False))
        if not flow.is_last:
            found.append((Message("value", generator, k, own, own + 1), True))
    # First what comes, as in the action itself.
    return sorted(found, key=lambda each: each[1])
