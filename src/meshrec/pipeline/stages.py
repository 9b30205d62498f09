"""The old name of `meshrec.stages`, for one release."""

from meshrec.stages import *  # noqa: F403
