"""Communication between ranks: collectives, memory links within a host, wire formats, and error agreement."""
