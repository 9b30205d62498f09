"""A custom MLServer model that serves a package. `serve_mlserver` runs it in MLServer's environment."""

import torch
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from meshrec.export import Predictor


class Package(MLModel):
    async def load(self) -> bool:
        torch.set_num_threads(1)
        self._predictor = Predictor(self.settings.parameters.uri)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = {each.name: torch.from_numpy(NumpyCodec.decode_input(each)) for each in payload.inputs}
        features = self._predictor.features
        scores = self._predictor(
            given["dense"],
            {f: given[f"{f}.values"].reshape(-1) for f in features},
            {f: given[f"{f}.lengths"].reshape(-1).long() for f in features},
        )
        return InferenceResponse(
            model_name=self.name, outputs=[NumpyCodec.encode_output("scores", scores.numpy())]
        )
