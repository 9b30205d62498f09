"""Point-to-point messages between stages on different ranks: values, gradients, and errors.

A message is a header of fixed size with shapes and dtypes, followed by a transfer per tensor.
"""

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
from typing_extensions import override

from meshrec.comms.collectives import wait_for_message
from meshrec.stages.programs import StageFlow
from meshrec.stages.values import Exchange, Message

_HEADER_BYTES = 2048
"""Bytes in the first transfer of every message: enough for the shapes and dtypes of about twenty tensors.

Longer headers need a second transfer.
"""


class _Header(NamedTuple):
    """The part of a message that says which tensors follow.

    Attributes:
        error: error message of the sending rank, sent instead of a value; None if no stage has failed.
        spec: the value's pytree structure.
        leaves: the value's leaves, in which a `_TensorForm` replaces every tensor.
    """

    error: str | None
    spec: Any
    leaves: list[Any]


class _TensorForm(NamedTuple):
    """Shape and dtype of a tensor in a message, and whether the tensor requires a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_gradient: bool


def _reduced_leaf(spec: pytree.TreeSpec) -> Any:
    """Return how to pickle a pytree spec, as a ``(function, arguments)`` tuple for loading.

    A spec for a single leaf is stored as a call of ``tree_structure``. Other specs use pickle's default.
    """
    return (pytree.tree_structure, (0,)) if spec.type is None else spec.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


# Pickling torch's leaf spec triggers a deprecation warning when loaded.
_REDUCERS = ChainMap[type, Any]({type(pytree.tree_structure(0)): _reduced_leaf}, copyreg.dispatch_table)


class RemoteStageError(RuntimeError):
    """A stage on another rank failed. The message names the stage and the reason."""


class RankExchange(Exchange):
    """Exchange of values and gradients between the ranks of a lane, where every rank runs a stage.

    Every message in the schedule is sent, even after a failure. Messages sent after a failure contain the
    error instead of a value. Therefore no rank waits forever, and no message of a failed batch reaches the
    next batch.

    Args:
        names: names of all values that stages may exchange; the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, names: Iterable[str]) -> None:
        self._group = group
        # Sorted, so all ranks number the values alike.
        self._tags = {name: index for index, name in enumerate(sorted(names))}
        # Pending sends and the tensors they send, which must stay alive until `finish`.
        self._sends: list[tuple[dist.Work | None, Tensor]] = []
        # Messages in this batch already sent or received.
        self._finished: set[Message] = set()
        # First failure in this batch, on this rank or received. From then on, put() sends it instead of
        # values.
        self.error: str | None = None

    def start(self) -> None:
        """Forget the messages and the error of the previous batch."""
        self._finished.clear()
        self.error = None

    def finish(self) -> None:
        """Wait until all messages of the batch have been sent, and release the sent tensors."""
        for work, _ in self._sends:
            if work is not None:
                wait_for_message(work, self._group)
        self._sends.clear()

    def exchange_remaining(self, messages: Iterable[tuple[Message, bool]]) -> None:
        """After an error, exchange those messages in ``messages`` which this batch has not exchanged yet.

        Outgoing messages contain ``self.error``. Incoming messages are received and dropped.
        """
        for message, is_sender in messages:
            if message in self._finished:
                continue
            if is_sender:
                self.put(message, None)
            else:
                try:
                    self.get(message)
                # The first error wins, because later errors are often consequences.
                except RemoteStageError as error:
                    self.error = self.error or str(error)

    @override
    def put(self, message: Message, value: Any) -> None:
        """Start to send a value or its gradients. After an error, send the error message instead."""
        self._finished.add(message)
        # Gradients travel from a value's reader back to the source.
        peer = message.destination if message.kind == "value" else message.source
        if self.error is not None:
            self._send_header(_Header(self.error, None, []), peer, message)
            return
        flat, spec = pytree.tree_flatten(value)
        # gloo sends contiguous memory only.
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

    @override
    def get(self, message: Message) -> Any:
        """Wait for a value or its gradients, and return them.

        Raises:
            RemoteStageError: the sender reports that a stage has failed.
        """
        self._finished.add(message)
        peer = message.source if message.kind == "value" else message.destination
        header = self._receive_header(peer, message)
        if header.error is not None:
            raise RemoteStageError(header.error)
        flat = []
        for leaf in header.leaves:
            if isinstance(leaf, _TensorForm):
                tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
                # A tensor without elements is not sent.
                if tensor.numel():
                    self._receive(tensor, peer, message)
                flat.append(tensor.requires_grad_(leaf.wants_gradient))
            else:
                flat.append(leaf)
        return pytree.tree_unflatten(flat, header.spec)

    def _send_header(self, header: _Header, peer: int, message: Message) -> None:
        """Send a header to the stage ``peer``, as 8 bytes of length followed by a pickle."""
        file = io.BytesIO()
        pickler = pickle.Pickler(file)
        pickler.dispatch_table = _REDUCERS
        # A plain tuple, so the pickle does not name the class and stays short.
        pickler.dump(tuple(header))
        data = file.getvalue()
        # A fixed size, because the receiver must post a buffer before it knows the length.
        first = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        fits = len(data) <= _HEADER_BYTES - 8
        first[:8] = torch.tensor([len(data)]).view(torch.uint8)
        if fits:
            first[8 : 8 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._send(first, peer, message)
        # The second transfer contains the whole header again, which is simpler than the remaining part.
        if not fits:
            self._send(torch.frombuffer(bytearray(data), dtype=torch.uint8), peer, message)

    def _receive_header(self, peer: int, message: Message) -> _Header:
        """Receive a header which the stage ``peer`` has sent with `_send_header`."""
        first = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        self._receive(first, peer, message)
        length = int(first[:8].view(torch.int64))
        # Both ends know the size of the first message, so a short header needs no second one.
        if length <= _HEADER_BYTES - 8:
            return _Header(*pickle.loads(bytes(first[8 : 8 + length].tolist())))
        second = torch.empty(length, dtype=torch.uint8)
        self._receive(second, peer, message)
        return _Header(*pickle.loads(bytes(second.tolist())))

    def _send(self, tensor: Tensor, peer: int, message: Message) -> None:
        """Start to send a tensor to the stage ``peer``, as part of ``message``."""
        destination = dist.get_global_rank(self._group, peer)
        work = dist.isend(tensor, destination, group=self._group, tag=self._tag(message))
        # The buffer must outlive the send.
        self._sends.append((work, tensor))

    def _receive(self, tensor: Tensor, peer: int, message: Message) -> None:
        """Wait for the next part of ``message`` from the stage ``peer``, and write it into ``tensor``."""
        source = dist.get_global_rank(self._group, peer)
        work = dist.irecv(tensor, source, group=self._group, tag=self._tag(message))
        assert work is not None  # this rank is in the group
        wait_for_message(work, self._group)

    def _tag(self, message: Message) -> int:
        """Return the message's tag, which is unique among the messages of a batch between two ranks."""
        # Even tags for values, odd tags for gradients.
        return 2 * (message.k * len(self._tags) + self._tags[message.name]) + (message.kind == "gradient")


def messages_of(flow: StageFlow, action: str, k: int, *, generator: str | None) -> list[tuple[Message, bool]]:
    """Return the messages that a stage sends and receives in an action of the schedule.

    Args:
        k: split index; for "tables" and "collect", the number of splits.
        generator: name under which the state of the random generator is sent; None if it is not sent.

    Returns:
        Pairs (message, True if this stage sends the message and False if it receives it). Received
        messages come first.
    """
    stage, index = flow.stage, flow.stage.index
    producer_stage, consumer_stages = flow.producer_stage, flow.consumer_stages
    if action in ("tables", "collect"):
        kind: Literal["value", "gradient"] = "value" if action == "tables" else "gradient"
        # Only the stage with the tables sends lookups and receives their gradients.
        whole = stage.batch_program.output_names if stage.batch_program is not None else []
        return [
            (Message(kind, n, i, index, u), action == "tables")
            for n in whole
            for i in range(k)
            for u in consumer_stages.get(n, ())
        ]
    kind = "value" if action == "forward" else "gradient"
    # Values from other stages. Batch values and values computed here need no message.
    input_names = [name for name in flow.input_names if producer_stage.get(name, index) != index]
    messages = [(Message(kind, n, k, producer_stage[n], index), action == "backward") for n in input_names]
    messages += [
        (Message(kind, n, k, index, u), action == "forward")
        for n in stage.split_program.output_names
        for u in consumer_stages.get(n, ())
    ]
    if generator is not None and action == "forward":
        if index > 0:
            messages.append((Message("value", generator, k, index - 1, index), False))
        if not flow.is_last:
            messages.append((Message("value", generator, k, index, index + 1), True))
    # Receive first, as the action does.
    return sorted(messages, key=lambda entry: entry[1])
