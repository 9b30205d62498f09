"""Write an exported program as TorchScript, which torch has deprecated."""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

# Size checks, which are removed because the operators check sizes themselves.
_REMOVED = {
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}


def write_torchscript(
    exported: "torch.export.ExportedProgram", weights: Mapping[str, Tensor], path: Path
) -> None:
    """Write an exported `Program` and the weights as a TorchScript file.

    ``forward`` takes dense values [B, num_dense], then the IDs per feature, then the lengths per
    feature, in the order of the package. A program that loads the file must load ``libmeshrec.so`` first.

    Args:
        exported: the exported program.
        weights: weights by name, in the program's argument order.
        path: output file.

    Raises:
        ValueError: TorchScript does not support a program operation.
    """
    module = exported.module(check_guards=False)
    graph = module.graph
    graph.set_codegen(torch.fx.graph.CodeGen())  # flat arguments
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
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
            node.args = (node.args[0][0],)
        elif node.target is torch.ops.aten.sym_size.int:
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_method("size", node.args))
            graph.erase_node(node)
        elif isinstance(node.target, torch._ops.OpOverload):
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
