"""The old name of `meshrec.cluster`, for one release."""

from meshrec.cluster import *  # noqa: F403
