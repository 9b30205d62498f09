"""The command line: ``meshrec train``, ``meshrec runs``, ``meshrec plan`` and others."""
