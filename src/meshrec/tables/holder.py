"""The state-dict hooks that all modules with a table share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn


class TableHolder(nn.Module, ABC):
    """A module that holds the rows of one table, whole or in part, under the name of the whole table.

    Its state dict has the parts of the whole table's rows (``RowStorage.row_parts``: ``weight``, and scales
    and biases of quantised rows), whatever parameters the module has them in. Loading takes all parts or
    none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_put_whole)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_take_whole)  # type: ignore[no-untyped-call]

    @abstractmethod
    def part_names(self) -> list[str]:
        """Return the names of the parts of a row."""

    @abstractmethod
    def whole_parts(self) -> dict[str, Tensor]:
        """Return the parts of the whole table's rows by name."""

    @abstractmethod
    def load(self, values: Mapping[str, Tensor], prefix: str) -> None:
        """Copy the parts of a whole table to the rows that are here: all of it or nothing.

        Raises:
            ValueError: a part is missing, or its size or type differs. ``prefix`` begins its name.
        """


def _put_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    assert isinstance(module, TableHolder)
    for name in module._parameters:
        del state_dict[prefix + name]
    state_dict.update({prefix + name: part for name, part in module.whole_parts().items()})


def _take_whole(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    assert isinstance(module, TableHolder)
    found = {
        name: state_dict.pop(prefix + name) for name in module.part_names() if prefix + name in state_dict
    }
    # torch finds parameters and buffers as they are: what it would load is taken here.
    own = chain(module.named_parameters(), module.named_buffers())
    state_dict.update(
        {prefix + name: data.detach() for name, data in own if name not in module._non_persistent_buffers_set}
    )
    if "weight" not in found:
        if strict:
            missing_keys.append(prefix + "weight")
        return
    try:
        module.load(found, prefix)
    except ValueError as error:
        error_msgs.append(str(error))
