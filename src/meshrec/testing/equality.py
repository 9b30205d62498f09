"""Check that a sharded model trains like the same model without sharding."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshrec.comms.mesh import ShardingEnv, default_env
from meshrec.model_parallel import DistributedModelParallel, Sharder
from meshrec.optim.in_backward import in_backward_spec
from meshrec.optim.optimizers import OptimizerSpec
from meshrec.plan.sharding_plan import ShardingPlan
from meshrec.sparse import KeyedJaggedTensor
from meshrec.tables.module import TableModule
from meshrec.tables.updates import update_rows

# Shape legend: U touched rows.

# Function from the dense parameters to a torch optimizer for them.
DenseOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def assert_equal_to_unsharded(
    make_model: Callable[[], nn.Module],
    plan: ShardingPlan,
    batches: Sequence[Sequence[tuple[Any, ...]]],
    *,
    loss: Callable[[Any], Tensor],
    sharders: Sequence[Sharder],
    env: ShardingEnv | None = None,
    dense: Literal["ddp", "fsdp2"] | None = "ddp",
    dense_optimizer: DenseOptimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Train a sharded and an unsharded copy of a model on the same batches, and check that they stay equal.

    Call this function on every rank. A rank trains the sharded copy on its batches, and the unsharded copy on
    the batches from all ranks. Losses are compared in every step, tables and dense parameters after the last
    step.

    Args:
        make_model: Returns a new model, with the same weights in every call. Optimizers attached with
            ``apply_optimizer_in_backward`` are used.
        plan: Sharding plan to check.
        batches: ``batches[step][rank]`` is the argument tuple for the model's forward.
        loss: Returns the loss on a rank, given the model output. The global loss is the mean over ranks.
        sharders: As for DistributedModelParallel. Tables without an attached optimizer use the sharder's.
            Tables with ``update="on_step"`` are updated after every backward pass.
        env, dense: As for DistributedModelParallel.
        dense_optimizer: Builds the optimizer for dense parameters and tables without a fused optimizer.
        rtol: Relative tolerance, as for `torch.isclose`.
        atol: Absolute tolerance.

    Raises:
        AssertionError: A loss, table or dense parameter differs. The message names the first that differs,
            with the number of different values and the largest difference.
    """
    env = default_env() if env is None else env
    reference = _Reference(make_model(), sharders, dense_optimizer)
    model = DistributedModelParallel(make_model(), env, plan=plan, sharders=sharders, dense=dense)
    # The backward pass updates fused tables; all other parameters need a dense optimizer.
    fused = set(model.fused_optimizer.params)
    dense_parameters = [parameter for name, parameter in model.named_parameters() if name not in fused]
    optimizer = dense_optimizer(dense_parameters) if dense_parameters else None
    for step, ranks in enumerate(batches):
        if optimizer is not None:
            optimizer.zero_grad()
        output = model(*ranks[env.world.rank])
        expected = reference.step(ranks, loss)[env.world.rank]
        value = loss(output)
        compare(value.detach(), expected, f"the loss of step {step}", rtol, atol)
        value.backward()
        if optimizer is not None:
            optimizer.step()
        # Does nothing for tables that the backward pass has updated.
        model.fused_optimizer.step()
        model.fused_optimizer.zero_grad()
    _compare_parameters(model.module, reference.module, rtol, atol)


def compare(actual: Tensor, expected: Tensor, name: str, rtol: float, atol: float) -> None:
    """Check whether two tensors have equal shapes and close values.

    Args:
        actual: Result of the sharded model.
        expected: Result of the unsharded model.
        name: Name of the tensor in messages.
        rtol: Relative tolerance.
        atol: Absolute tolerance.

    Raises:
        AssertionError: The shapes or values differ.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name} has shape {list(actual.shape)}, unsharded {list(expected.shape)}.")
    close = torch.isclose(actual, expected, rtol=rtol, atol=atol)
    if not bool(close.all()):
        max_error = (actual - expected).abs().max().item()
        raise AssertionError(
            f"{name} differs from the unsharded model's: {int((~close).sum())} of {close.numel()} values, by "
            f"up to {max_error:g}."
        )


class _Reference:
    """The unsharded model, trained on the batches from all ranks without fused kernels.

    Autograd computes dense gradients of the tables. Where the sharded model has a fused optimizer, the same
    formula is applied to the rows looked up by the step.
    """

    def __init__(
        self, module: nn.Module, sharders: Sequence[Sharder], dense_optimizer: DenseOptimizer
    ) -> None:
        self.module = module
        self._steps = 0
        # IDs looked up in this step, by parameter; cleared by step().
        self._rows: dict[str, list[Tensor]] = {}
        self._specs: dict[str, OptimizerSpec] = {}  # fused optimizer, by parameter
        for path, child in module.named_modules():
            for sharder in sharders:
                if isinstance(child, sharder.module_type):
                    self._watch(path, child, sharder)
        parameters = dict(module.named_parameters())
        # Fused optimizer state tensors, by parameter; updated in place by step().
        self._state = {
            name: [
                torch.full(slot.shape(*parameters[name].shape), slot.initial_value)
                for slot in spec.state_slots()
            ]
            for name, spec in self._specs.items()
        }
        dense_parameters = [parameter for name, parameter in parameters.items() if name not in self._specs]
        self._optimizer = dense_optimizer(dense_parameters) if dense_parameters else None

    def step(self, ranks: Sequence[tuple[Any, ...]], loss: Callable[[Any], Tensor]) -> list[Tensor]:
        """Run a training step on the batches from all ranks."""
        self.module.zero_grad()
        losses = [loss(self.module(*batch)) for batch in ranks]
        # Take the mean over ranks, because the sharded model averages gradients over ranks.
        (sum(losses, torch.zeros(())) / len(losses)).backward()
        self._steps += 1
        parameters = dict(self.module.named_parameters())
        for name, spec in self._specs.items():
            self._update(name, parameters[name], spec)
        for rows in self._rows.values():
            rows.clear()
        if self._optimizer is not None:
            self._optimizer.step()
        return [value.detach() for value in losses]

    def _update(self, name: str, weight: nn.Parameter, spec: OptimizerSpec) -> None:
        """Apply a fused optimizer to the table rows looked up by this step."""
        # Remove the gradient from the parameter, so the dense optimizer does not see it.
        gradient, weight.grad = weight.grad, None
        if gradient is None:
            return
        rows_U = torch.cat(self._rows[name]).long().unique()
        hyper = spec.hyper(lr=spec.lr, step=self._steps)
        grad = gradient[rows_U].float()
        update_rows(weight.detach(), self._state[name], rows_U, grad, optimizer=spec.code, hyper=hyper)

    def _watch(self, path: str, module: nn.Module, sharder: Sharder) -> None:
        """Register a hook on an embedding collection to record the IDs looked up in fused tables."""
        tables: dict[str, tuple[str, list[str]]] = {}
        children = dict(module.named_parameters())
        configs = getattr(module, "embedding_bag_configs", None) or module.embedding_configs
        for config in configs():  # type: ignore[operator]
            # Parameters are named ``embedding_bags.TABLE.weight`` or ``embeddings.TABLE.weight``.
            inner = next(name for name in children if name.split(".")[-2] == config.name)
            full = f"{path}.{inner}" if path else inner
            spec = in_backward_spec(children[inner]) or sharder.optimizer
            if spec is not None:
                self._specs[full] = spec
                self._rows[full] = []
                tables[config.name] = (full, list(config.feature_names))

        def record(_: nn.Module, arguments: tuple[KeyedJaggedTensor, ...]) -> None:
            for full, features in tables.values():
                self._rows[full] += [arguments[0][feature].values() for feature in features]

        module.register_forward_pre_hook(record)


def _compare_parameters(model: nn.Module, reference: nn.Module, rtol: float, atol: float) -> None:
    """Check whether tables and dense parameters in both models are close."""
    expected: Mapping[str, Tensor] = dict(reference.named_parameters())
    tables: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, TableModule) and module.is_sharded:
            name = f"{path}.weight"
            # Every rank compares local shards; together they cover the whole table.
            full = expected[name].detach()
            for rectangle, shard in zip(module.rectangles, module.shards(), strict=True):
                part = full[rectangle.r0 : rectangle.r1, rectangle.c0 : rectangle.c1]
                compare(shard.detach(), part, f"table {name}", rtol, atol)
            tables |= {f"{path}.{child}" for child, _ in module.named_parameters()}
    for name, parameter in model.named_parameters():
        if name not in tables:
            value = parameter.detach()
            if hasattr(value, "full_tensor"):
                value = value.full_tensor()
            compare(value, expected[name].detach(), f"parameter {name}", rtol, atol)
