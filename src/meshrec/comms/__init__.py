"""Communication between ranks: collectives, shared-memory links within a host, and step phase timing."""
