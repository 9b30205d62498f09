"""Tables larger than memory: rows in a file behind a cache."""
