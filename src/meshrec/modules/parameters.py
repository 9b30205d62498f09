"""Lists and dictionaries of parameters that can be reinitialised, as modules built on ``meta`` need."""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

Init = Callable[[Tensor], object]
"""Function that fills a tensor in place, such as ``torch.nn.init.zeros_``."""


class InitializedList(nn.ParameterList):
    """A ParameterList whose tensors are initialised by ``init``, now and in ``reset_parameters``."""

    def __init__(self, tensors: Iterable[Tensor], init: Init) -> None:
        super().__init__(nn.Parameter(tensor) for tensor in tensors)
        self._init = init
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every tensor, in order."""
        for parameter in self:
            self._init(parameter)


class InitializedDict(nn.ParameterDict):
    """A ParameterDict whose tensors are initialised by ``init``, now and in ``reset_parameters``."""

    def __init__(self, tensors: Mapping[str, Tensor], init: Init) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self[name] = nn.Parameter(tensor)  # its own constructor sorts the names
        self._init = init
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every tensor, in order."""
        for parameter in self.values():
            self._init(parameter)
