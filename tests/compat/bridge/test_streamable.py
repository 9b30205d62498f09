import pytest

from meshrec.compat.bridge.streamable import Multistreamable, Pipelineable


class Batch(Pipelineable):
    def to(self, device, non_blocking):
        return self

    def record_stream(self, stream):
        pass


def test_batches_implement_both_methods():
    assert isinstance(Batch(), Multistreamable)
    with pytest.raises(TypeError, match="abstract"):
        Pipelineable()
