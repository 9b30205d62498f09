import pytest


@pytest.fixture(autouse=True)
def _one_thread(set_threads):
    """Unless the test asks for more."""
