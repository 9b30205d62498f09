"""Old name of `meshrec.cluster`, which stays for a single release."""

from meshrec.cluster import *  # noqa: F403
