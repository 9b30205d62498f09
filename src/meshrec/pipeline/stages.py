"""The old name for `meshrec.stages`, for one release."""

from meshrec.stages import *  # noqa: F403
