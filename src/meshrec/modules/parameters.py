"""Parameter lists and dicts with ``reset_parameters``, which modules created on the ``meta`` device need."""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

Init = Callable[[Tensor], object]
"""Function that fills a tensor in place, such as ``torch.nn.init.zeros_``."""


class InitializedList(nn.ParameterList):
    """A ParameterList which initializes each parameter with ``init``, also again in ``reset_parameters``.

    Args:
        tensors: Tensors to make parameters of; their values are overwritten.
        init: Fills a tensor in place.
    """

    def __init__(self, tensors: Iterable[Tensor], init: Init) -> None:
        super().__init__(nn.Parameter(tensor) for tensor in tensors)
        # Kept for reset_parameters, after to_empty.
        self._init = init
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize all tensors, in order."""
        for parameter in self:
            self._init(parameter)


class InitializedDict(nn.ParameterDict):
    """A ParameterDict which initializes each parameter with ``init``, also again in ``reset_parameters``.

    Args:
        tensors: Tensors to make parameters of, by name; their values are overwritten.
        init: Fills a tensor in place.
    """

    def __init__(self, tensors: Mapping[str, Tensor], init: Init) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self[name] = nn.Parameter(
                tensor
            )  # not super().__init__, which sorts the names and changes initialization order
        # Kept for reset_parameters, after to_empty.
        self._init = init
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize all tensors, in order."""
        for parameter in self.values():
            self._init(parameter)
