"""Write an exported program as TorchScript, a format that torch has deprecated."""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

# Size checks which torch.export inserts, and TorchScript lacks. The operators check sizes themselves.
_REMOVED = {
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}


def write_torchscript(
    exported: "torch.export.ExportedProgram", weights: Mapping[str, Tensor], path: Path
) -> None:
    """Write an exported `Program` and its weights as a TorchScript file.

    ``forward`` of the TorchScript module takes dense values [B, num_dense], then the IDs of every feature,
    then the lengths of every feature, in the package's feature order. A process must load ``libmeshrec.so``
    before this file.

    Args:
        exported: program without shared features.
        weights: weights by name, in the program's argument order.
        path: file to write.

    Raises:
        ValueError: TorchScript does not support a program operation.
    """
    module = exported.module(check_guards=False)
    graph = module.graph
    graph.set_codegen(torch.fx.graph.CodeGen())  # flat arguments
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    # The first placeholders are the weights. The remaining placeholders stay inputs.
    # Numbered, because weight names contain dots, which buffers do not allow.
    for number, (node, weight) in enumerate(zip(placeholders, weights.values(), strict=False)):
        module.register_buffer(f"weight_{number}", weight.detach())
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.get_attr(f"weight_{number}"))
        graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op == "call_module" or node.target in _REMOVED:
            graph.erase_node(node)
        elif node.op == "output":
            # The program returns a tuple with a single tensor.
            node.args = (node.args[0][0],)
        elif node.target is torch.ops.aten.sym_size.int:
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_method("size", node.args))
            graph.erase_node(node)
        elif isinstance(node.target, torch._ops.OpOverload):
            # TorchScript resolves overloads itself.
            node.target = node.target.overloadpacket
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    plain = torch.fx.GraphModule(module, graph)
    with warnings.catch_warnings():
        # DeprecationWarning up to torch 2.14, then FutureWarning; logged below instead.
        warnings.filterwarnings("ignore", message=".*torch.jit.*")
        try:
            torch.jit.script(plain).save(path)
        except (RuntimeError, torch.jit.frontend.NotSupportedError) as error:
            raise ValueError(
                f"the program cannot be written as TorchScript: {error}. Use torchscript=False."
            ) from error
    _log.info("wrote %s: torch calls TorchScript deprecated", path)
