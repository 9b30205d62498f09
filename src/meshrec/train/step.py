"""Run a training step: forward and backward passes for its batches, and then the optimizers."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from meshrec.modules.precision import cast_weights_once
from meshrec.pipeline import Lookahead, Update
from meshrec.tables import set_event_time
from meshrec.train.building import BuiltModel
from meshrec.train.losses import Loss, ensemble_loss, squeeze_outputs
from meshrec.train.ranks import Ranks
from meshrec.train.watch import FiniteFlag, OutputWatch

if TYPE_CHECKING:
    from meshrec.data import Batch


class Outputs(NamedTuple):
    """Model outputs for a batch on this rank, detached from autograd.

    Attributes:
        loss_sum: loss summed over the samples, a 0-d tensor.
        logits: logits [B] or [B, T]; for an ensemble, the mean over members.
        labels: labels [B] or [B, T].
        weights: sample weights [B]; None: all weights are 1.
        times: event times [B] of a stream, in microseconds since 1970, on the CPU; None: unknown.
        batch: the samples; None after they are no longer needed.
    """

    loss_sum: Tensor
    logits: Tensor
    labels: Tensor
    weights: Tensor | None = None
    times: Tensor | None = None
    batch: "Batch | None" = None


class TrainStep:
    """Training step. Call it once per step.

    All samples of a step count as a single batch, across ranks and accumulated batches: the loss is the mean
    over all of them, even if ranks have different sample counts.

    Args:
        built: the model and the optimizers.
        ranks: the ranks, from `join`.
        loss: the loss.
        bf16: whether to compute the dense part in bf16.
        pipeline: whether to exchange the next batch between ranks while the current batch computes.
    """

    def __init__(
        self, built: BuiltModel, ranks: Ranks, loss: Loss, *, bf16: bool, pipeline: bool = False
    ) -> None:
        # Fixed for the lifetime of this object.
        self._built, self._ranks, self._loss, self._bf16 = built, ranks, loss, bf16
        # Its hooks live as long as the model. The recorded outputs are dropped at every batch.
        self._watch = OutputWatch(built.model)
        self._update = Update(built.model, built.optimizer)
        # Exchanges batches ahead of time; None without pipelining.
        self._lookahead: Lookahead | None = None
        if pipeline:
            self._lookahead = Lookahead(built.model, device=ranks.device, uneven="error", strict=False)
        self._unread: tuple[FiniteFlag, Batch, Tensor] | None = None
        """Last batch and loss, from the forward pass until `_read_flag` has read if the loss is finite."""
        self.failure: str | None = None
        """Message if a loss of the last step was NaN or infinite on this rank; None if all were finite."""

    def __call__(self, batches: "Iterator[Batch]", num_batches: int, num_samples: int) -> list[Outputs]:
        """Run a training step. Collective.

        Args:
            batches: this rank's batches, from which the next ``num_batches`` are taken.
            num_batches: number of batches whose gradients are accumulated.
            num_samples: samples in the step, over all ranks and batches.

        Returns:
            Outputs per batch.

        Raises:
            StopIteration: too few batches remain.
        """
        with cast_weights_once():
            return self._train(batches, num_batches, num_samples)

    def _train(self, batches: "Iterator[Batch]", num_batches: int, num_samples: int) -> list[Outputs]:
        """Run forward and backward for every batch, and then the optimizers.

        The arguments are those of `__call__`.
        """
        self._built.optimizer.zero_grad()
        # DistributedDataParallel and sharded tables average gradients over ranks. With this factor, the
        # result is the gradient of the mean loss over all samples.
        scale = self._ranks.size / num_samples
        outputs = []
        self.failure = self._unread = None
        lookahead = self._lookahead
        for number in range(num_batches):
            # Gradients are accumulated until the last batch, after which the optimizers step.
            steps = number == num_batches - 1
            batch = self._next_batch(batches)
            if batch.times is not None and len(batch.times):
                # Before the update, which evicts rows by this time.
                set_event_time(self._built.model, int(batch.times.max()) // 1_000_000)
            with self._update.backward(steps=steps, defer_reduction=lookahead is not None):
                # Before `forget`: the message about a failure in the previous batch needs the recorded
                # outputs.
                self._read_flag()
                self._watch.forget()
                with (
                    record_function("meshrec.forward"),
                    nullcontext() if lookahead is None else lookahead.forward(),
                ):
                    logits = forward(self._built.model, batch, self._ranks.device, bf16=self._bf16)
                    loss = ensemble_loss(self._loss, logits, batch.labels, batch.weights)
                # The flag is read later, because reading it here would wait for the forward pass on a GPU. A
                # failed rank must take part in the backward pass anyway, in which other ranks wait for it.
                self._unread = FiniteFlag(loss), batch, loss.detach()
                if lookahead is not None:
                    # Send the next batch's IDs now, so that the exchange overlaps with backward.
                    lookahead.exchange(batches)
                with record_function("meshrec.backward"):
                    (loss * scale).backward()
            logits = logits.detach()
            # Metrics are computed for the mean of an ensemble's members.
            whole = squeeze_outputs(logits.mean(2)) if logits.dim() == 3 else logits
            outputs.append(Outputs(loss.detach(), whole, batch.labels, batch.weights, batch.times, batch))
            if lookahead is not None and not steps:
                self._update.after_backward(lookahead, steps=False)
        with record_function("meshrec.optimizer"):
            if lookahead is None:
                self._built.optimizer.step()
            else:
                self._update.after_backward(lookahead, steps=True)
        self._read_flag()
        return outputs

    @property
    def is_pipelined(self) -> bool:
        """Whether exchanges between ranks overlap with computation."""
        return self._lookahead is not None

    def reset(self) -> None:
        """Drop batches that were read ahead. Call it before steps with batches from another iterator."""
        if self._lookahead is not None:
            self._lookahead.reset()

    def _next_batch(self, batches: "Iterator[Batch]") -> "Batch":
        """Return the next batch on this rank's device."""
        if self._lookahead is None:
            return next(batches).to(self._ranks.device, non_blocking=True)
        batch: Batch = self._lookahead.next(batches)
        return batch

    def _read_flag(self) -> None:
        """Read whether the last batch's loss is finite, and set ``failure`` if not.

        The first failure in a step is kept.
        """
        unread, self._unread = self._unread, None
        if unread is not None and self.failure is None:
            flag, batch, loss = unread
            if not flag.read():
                self.failure = self._describe_failure(batch, float(loss))

    def _describe_failure(self, batch: "Batch", loss: float) -> str:
        """Return a message that says where NaN or infinity first occurred: in the batch or in a module."""
        # The batch is checked first, because its values spread to the outputs of all modules.
        if not bool(torch.isfinite(batch.dense).all()):
            cause = "the batch already has dense values that are NaN or infinite"
        else:
            first = self._watch.first_nonfinite()
            cause = (
                f"the first module with NaN or infinity in its output is {first}"
                if first is not None
                else "the outputs of all modules are finite, so look at the labels"
            )
        return f"rank {self._ranks.rank}: the loss is {loss}; {cause}"


def forward(model: nn.Module, batch: "Batch", device: torch.device, *, bf16: bool = False) -> Tensor:
    """Run the forward pass, and return the logits in fp32.

    Args:
        model: a model called as ``model(dense, sparse)``.
        batch: the samples.
        device: device of the model.
        bf16: whether to compute the dense part in bf16; see [Note: bf16 dense part] in modules/precision.py.

    Returns:
        Logits [B]; for T labels, [B, T]; for an ensemble with M members in training, [B, T, M].
    """
    with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
        logits: Tensor = model(batch.dense, batch.sparse)
    return squeeze_outputs(logits.float())
