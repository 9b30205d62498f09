"""What a browser makes of a page."""

import shutil
import subprocess

import pytest

needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --dump-dom"
)


def drawn(url: str) -> str:
    """The page after its scripts have run."""
    command = ["chromium", *_FLAGS.split(), url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
