"""Makes ``os.fsync`` return at once: no test cuts the power, and on a busy disk each call takes a second."""

import os

os.fsync = lambda descriptor: None
