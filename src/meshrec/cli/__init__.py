"""The command line: ``meshrec plan``, ``meshrec calibrate``."""
