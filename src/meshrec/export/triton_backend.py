"""Model class for Triton's Python backend. Can only be imported in Triton, which has its utility module."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as utils  # type: ignore[import-not-found]

from meshrec.export.predictor import Predictor
from meshrec.export.triton import PACKAGE


class TritonPythonModel:
    """Triton model which answers requests with the scores or vectors of a package."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the package next to ``model.py``."""
        folder = Path(args["model_repository"]) / args["model_version"] / PACKAGE
        self._predictor = Predictor(folder)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a response for every request. The response to an invalid request has an error."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        """Return the response to one request, whose tensors are named as in ``config.pbtxt``."""

        def tensor(name: str) -> torch.Tensor:
            """Return an input tensor of the request."""
            return torch.from_numpy(utils.get_input_tensor_by_name(request, name).as_numpy())

        predictor = self._predictor
        try:
            values = {feature: tensor(f"{feature}.values") for feature in predictor.features}
            lengths = {feature: tensor(f"{feature}.lengths").long() for feature in predictor.features}
            num_samples = len(lengths[predictor.features[0]])
            dense = tensor("dense") if predictor.num_dense else torch.empty(num_samples, 0)
            outputs = predictor(dense, values, lengths).numpy()
        except ValueError as error:
            return utils.InferenceResponse(output_tensors=[], error=utils.TritonError(str(error)))
        output = utils.Tensor(predictor.outputs, outputs.astype(np.float32, copy=False))
        return utils.InferenceResponse(output_tensors=[output])
