"""Input exchange: send every ID of a batch to the ranks which have the ID's row.

The exchange has two steps. First the ranks exchange the sizes of their messages, then the messages, which
contain packed IDs. The size message also says whether a rank's input is invalid. In that case every rank
raises the same error, and no rank waits for IDs that are never sent.

A use is a feature looked up in a table. A route is the part of a use's IDs which goes to one rank together.
See [Note: how a plan becomes routes] in ``routing.py``.

[Note: why sizes are read once per forward pass]

The host must know message sizes before it can allocate buffers and start the ID exchange. On a GPU, sizes are
computed on the device, and reading a value from the device waits for all work queued so far. Therefore all
values which the host needs (sizes on all ranks, ID counts per route, status, and invalid ID counts) are
collected on the device first, and ``send_ids`` copies them to the host in a single read. Any additional
``.item()`` or ``.tolist()`` in the forward pass costs another wait in every step. With a pipeline, the single
read happens during the backward pass of the previous batch and costs nothing.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshrec.comms.agreement import raise_as_one
from meshrec.comms.collectives import Splits, all_to_all
from meshrec.comms.mesh import ShardingEnv
from meshrec.distributed.lookup_batch import LookupBatch, LookupIds, PackedIds, SourceIds
from meshrec.distributed.routing import Routing
from meshrec.modules import BoundsCheckMode
from meshrec.modules.input_checks import (
    check_device,
    check_features,
    inverse_rows,
    key_bounds,
    mix_ids,
    positions_of,
    sample_weights,
    with_copied_keys,
)
from meshrec.ops import operators
from meshrec.ops.device_copies import copy_to_host
from meshrec.ops.dist import naive
from meshrec.ops.operators import translate_error
from meshrec.ops.tbe.reporting import report_clamped
from meshrec.ops.versions import versions_of
from meshrec.sparse import KeyedJaggedTensor

# U: uses, Q: routes, R: ranks, K: keys, N: IDs

# A header describes the message to one rank. Its int64 columns are: status bits, int32 words in the message,
# IDs, bags per route (-1 if routes have different bag counts).
_HEADER = 4
_STATUS, _WORDS = 0, 1
_words_of, _elements_of = operator.itemgetter(_WORDS), operator.itemgetter(_HEADER)
# Status bits: the input is invalid, this rank trains tables, this rank needs gradients for per-sample
# weights. ``send_ids`` combines them over all ranks with OR, so all ranks take the same decisions.
_BAD_INPUT, _TRAINS, _WANTS_WEIGHT_GRADS = 1, 2, 4


class InputDist:
    """ID exchange of a module: every ID is sent to the rank which has the row, and unpacked there.

    For a batch, call ``send_sizes``, then ``send_ids``, then ``unpack`` once the IDs have arrived.

    Args:
        routing: the compiled plan.
        env: the ranks.
        device: device on which IDs arrive from the caller.
        weighted: whether IDs have per-sample weights.
        sequence: whether the module returns a row per ID instead of a pooled row per bag.
        bounds_check: what to do with IDs outside the table. ERROR raises an error on every rank. WARN and OFF
            replace such IDs by row 0, so no rank reads memory out of bounds.
    """

    def __init__(
        self,
        routing: Routing,
        env: ShardingEnv,
        device: torch.device,
        *,
        weighted: bool,
        sequence: bool,
        bounds_check: BoundsCheckMode,
    ) -> None:
        # All fields follow from the plan and the options, except ``_num_clamped`` and ``_keys``.
        self._routing, self._env, self.device = routing, env, device
        self._weighted, self._sequence, self._bounds_check = weighted, sequence, bounds_check
        # On the CPU, because ``report_clamped`` adds to it after the sizes are on the host.
        self._num_clamped = torch.zeros((), dtype=torch.int64)
        self.words_per_id = (2 if routing.wide else 1) + weighted
        """int32 words per ID in a message, including the per-sample weight."""
        self._router = routing.router
        self._features = [use.feature for use in routing.uses]
        # Table of every use, for error messages.
        self._readers = [routing.tables[use.table].name for use in routing.uses]
        # Keys of the last batch, and the position of every use's feature among them. Replaced when a batch
        # has other keys; most runs have the same keys in every step.
        self._keys: tuple[Sequence[str], list[int]] | None = None
        # Hash seeds of uses which read hashed tables.
        seeds = {u: routing.tables[use.table].mix_seed for u, use in enumerate(routing.uses)}
        self._seeds = {u: seed for u, seed in seeds.items() if seed is not None}
        # Hashed tables mix IDs with different seeds, so a feature read by several tables is copied for each.
        self._shared_uses = [use for use in self._seeds if self._features.count(self._features[use]) > 1]
        # First world rank in this replica group.
        self._first = env.replicate.rank * env.shard.size
        fields = _HEADER + sequence
        # Every rank sends a header to every other rank.
        sizes = [fields] * env.world.size
        self._size_splits = Splits(sizes, sizes)
        # Sequence output has a row per ID, so its size differs by message. The header then has a fifth
        # column: the number of embedding values requested by the message.
        ranks, widths = (torch.tensor(column) for column in routing.route_elements)
        self._route_ranks, self._route_widths = ranks.to(device), widths.to(device)

    @property
    def num_clamped_ids(self) -> int:
        """Number of invalid IDs which ``BoundsCheckMode.WARN`` has replaced on this rank so far."""
        return int(self._num_clamped)

    def send_sizes(self, features: KeyedJaggedTensor, *, trains: bool) -> LookupBatch:
        """Sort the IDs of a batch by destination rank, and start the size exchange. Collective.

        This method does not raise input errors, because other ranks would wait for this rank. It stores the
        error in the batch, and ``send_ids`` raises it on every rank.

        Args:
            features: this rank's input.
            trains: whether grad mode is on and this rank has tables to train.

        Returns:
            A new batch in stage ``ROUTED``.
        """
        # Also after an error, because ``send_ids`` reads these fields on every rank.
        batch = LookupBatch()
        batch.sample_weights, batch.arguments, batch.error = None, (), None
        try:
            batch.source, batch.sample_weights, batch.arguments = self._prepare(features)
            # One kernel call finds the routes of all IDs, and packs the messages.
            payload, header, counts, num_bad = operators.route_ids(*batch.arguments)
            if self._sequence:
                elements = torch.zeros_like(header[:, 0])
                elements.index_add_(0, self._route_ranks, counts * self._route_widths)
                header = torch.cat([header, elements[:, None]], 1)
            status = _TRAINS if trains else 0
            status |= _WANTS_WEIGHT_GRADS if batch.sample_weights is not None else 0
        except Exception as caught:  # see [Note: how errors reach every rank] in comms/agreement.py
            batch.error, status = caught, _BAD_INPUT
            # An empty message to every rank, which only says that the input is invalid.
            header = torch.zeros(
                self._env.shard.size + 1, _HEADER + self._sequence, dtype=torch.int64, device=self.device
            )
            payload, counts, num_bad = header.new_empty(0, dtype=torch.int32), header[:0, 0], header[:0, 0]
        # The op on a GPU sets the bit for bad input in the header itself, because raising would need a wait.
        header.select(1, _STATUS).bitwise_or_(status)
        batch.routed = payload, header, counts, num_bad
        # The last header is for the data-parallel tables, whose IDs stay here.
        rows = header[:-1].reshape(-1) if self._env.replicate.size == 1 else self._world_rows(header)
        batch.in_flight = all_to_all(rows, self._size_splits, self._env.world, "sizes of ids")
        return batch

    def send_ids(self, batch: LookupBatch) -> None:
        """Wait for the sizes, and start the ID exchange. Collective.

        Raises:
            ValueError: the input on some rank is invalid. All ranks raise it.
        """
        assert batch.in_flight is not None
        assert batch.routed is not None
        payload, header, counts, num_bad = batch.routed
        # The only read from the device, see [Note: why sizes are read once per forward pass].
        sizes = copy_to_host((batch.in_flight.wait(), header.view(-1), counts, num_bad))
        fields = header.shape[1]
        rows, local_row = sizes[0].view(-1, fields), sizes[1].view(-1, fields)
        # Lists, because indexing tensors element by element takes longer than this whole method.
        received, requested = rows.tolist(), local_row.tolist()
        status = 0
        for rank_header in received:
            status |= rank_header[_STATUS]
        # Raise before any state changes. All ranks see the same status, so all stop here.
        if status & _BAD_INPUT:
            self._raise(batch, requested[0][_STATUS])
        if self._bounds_check is BoundsCheckMode.WARN:
            report_clamped(self._num_clamped, sizes[3], self._routing.names)
        batch.needs_weight_grads = bool(status & _WANTS_WEIGHT_GRADS)
        batch.trains = batch.needs_weight_grads or bool(status & _TRAINS)
        if self._env.replicate.size > 1:
            # The status was needed from all ranks, but IDs are exchanged only inside the replica group.
            peers = slice(self._first, self._first + self._env.shard.size)
            rows, received = rows[peers], received[peers]
        header, local_header = (
            (rows[:, :_HEADER], local_row[:, :_HEADER]) if self._sequence else (rows, local_row)
        )
        # The last message is for the data-parallel tables, which are looked up on this rank.
        *sent, local_words = map(_words_of, requested)
        words, local = payload[: sum(sent)], payload[sum(sent) : sum(sent) + local_words]
        splits = Splits(sent, list(map(_words_of, received)))
        # ``words`` must not change until all ranks have read them, see `all_to_all`.
        batch.in_flight = all_to_all(words, splits, self._env.shard, "ids")
        elements: tuple[int, ...] = ()
        local_elements: tuple[int, ...] = ()
        if self._sequence:
            elements, local_elements = tuple(map(_elements_of, received)), (requested[-1][_HEADER],)
        batch.source = batch.source._replace(counts=sizes[2])
        # The words arrive later, see ``ShardedTables.advance``; only the header is known now.
        batch.message = PackedIds(words[:0], header, elements)
        batch.local_message = PackedIds(local, local_header[-1:], local_elements)
        # Needed only until here: the arguments to find an input error, the result to send the IDs.
        batch.arguments, batch.routed = (), None

    def unpack(self, message: PackedIds, blocks: list[int], num_routes: int) -> LookupIds:
        """Unpack messages with IDs from several ranks.

        Args:
            message: messages from all source ranks, one after the other.
            blocks: source ranks, in the order in which the result lists their IDs.
            num_routes: routes in every message.

        Returns:
            The IDs to look up. They are ordered by source rank (a block of the result), then by route.
        """
        values, offsets, weights, segments = operators.unpack_ids(
            message.words, message.header, blocks, num_routes, self._weighted, self._routing.wide
        )
        # Column 3 of a header: bags per route.
        # As a list: reading such tensors one by one took a tenth of a small step.
        batches = list(map(message.header[:, 3].tolist().__getitem__, blocks))
        elements = tuple(map(message.elements.__getitem__, blocks)) if message.elements else ()
        return LookupIds(
            values,
            offsets,
            weights if self._weighted else None,
            segments,
            batches,
            -1 in batches,
            elements,
        )

    def _prepare(self, features: KeyedJaggedTensor) -> tuple[SourceIds, Tensor | None, tuple[Any, ...]]:
        """Check the input, and prepare the arguments for the op ``route_ids``.

        Returns:
            This rank's IDs, the per-sample weights if they require a gradient (else None), and the arguments.
        """
        if not isinstance(features, KeyedJaggedTensor):  # checked here to save the call in every step
            check_features(features)
        keys = features.keys()
        if self._keys is None or self._keys[0] != keys:
            # A copy, because the caller may change the list.
            self._keys = list(keys), positions_of(keys, self._features, self._readers)
        positions = self._keys[1]
        # A pooled result is a single [B, D] matrix, so every key needs a bag per sample.
        if not self._sequence and features.variable_stride_per_key():
            features = _expand_bags(features)
        if self._shared_uses:
            features, positions = with_copied_keys(features, positions, self._shared_uses)
            keys = features.keys()
        weights = sample_weights(features, is_weighted=True) if self._weighted else None
        values, offsets = features.values(), features.offsets()
        num_keys = len(keys)
        if self._seeds:
            seeds = {positions[use]: seed for use, seed in self._seeds.items()}
            values = mix_ids(values, key_bounds(offsets, features.segments_or_none(), num_keys), seeds)
        if values.device != self.device:
            check_device(values, self._routing.tables[0].name, self.device)
        strides, segments = features.stride_per_key(), features.segments_or_none()
        arguments = (
            values,
            offsets,
            None if weights is None else weights.detach(),
            segments,
            num_keys,
            positions,
            self._router,
            # The last message is for the data-parallel tables, and stays on this rank.
            self._env.shard.size + 1,
            self._routing.wide,
            self._bounds_check is BoundsCheckMode.ERROR,
            self._routing.names,
        )
        batches = list(map(strides.__getitem__, positions))
        # The backward pass reads these tensors again, and raises if they were written to in between.
        versions = versions_of((values, offsets) if weights is None else (values, offsets, weights))
        source = SourceIds(
            values, offsets, segments, num_keys, positions, torch.empty(0), batches, weights, versions
        )
        weights_with_grad = (
            weights if weights is not None and weights.requires_grad and torch.is_grad_enabled() else None
        )
        return source, weights_with_grad, arguments

    def _world_rows(self, header: Tensor) -> Tensor:
        """Return the size message, flat int64, with a header for every rank in the world.

        Headers for ranks in other replica groups contain only the status; their sizes are 0.

        Args:
            header: headers for the ranks in this replica group, and a last header for the data-parallel
                tables, which is not sent.
        """
        rows = header.new_zeros(self._env.world.size, header.shape[1])
        # The status is the same in all headers.
        rows[:, _STATUS] = header[0, _STATUS]
        rows[self._first : self._first + self._env.shard.size] = header[:-1]
        return rows.view(-1)

    def _raise(self, batch: LookupBatch, status: int) -> None:
        """Raise the input errors of all ranks together, on every rank. Collective."""
        error, batch.error = batch.error, None
        if error is None and status & _BAD_INPUT:
            error = _find_error(batch.arguments)
        try:
            raise_as_one(error, self._env.world, "input errors")
        finally:
            del error  # a cycle through the traceback and this frame would keep the batch alive


def _find_error(arguments: tuple[Any, ...]) -> Exception | None:
    """Return the error which the op ``route_ids`` raises on the CPU for these arguments, or None.

    On a GPU, the op only reports that an ID is invalid, but not which ID.
    """
    try:
        # The reference op on the CPU repeats the work, and raises with the offending ID.
        naive.route_ids(*arguments)
    except Exception as error:
        return translate_error(error)
    return None


def _expand_bags(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Expand deduplicated features to one bag per sample and key.

    A deduplicated KeyedJaggedTensor stores equal bags once, and has inverse indices which map samples to
    bags.

    Raises:
        ValueError: the inverse indices are missing.
    """
    keys, firsts = features.keys(), features.lengths_offset_per_key()
    bags = torch.cat(
        [row + first for row, first in zip(inverse_rows(features, keys), firsts[:-1], strict=True)]
    )
    lengths, starts = features.lengths()[bags], features.offsets()[bags].long()
    ends = lengths.long().cumsum(0)
    ids = torch.arange(int(lengths.sum()), device=bags.device)
    # Position of every ID in the original values: the start of its bag plus the position in the bag.
    ids += torch.repeat_interleave(starts - (ends - lengths), lengths.long())
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys, features.values()[ids], None if weights is None else weights[ids], lengths=lengths
    )
