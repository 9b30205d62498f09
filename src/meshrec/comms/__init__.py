"""Communication: collectives, the link between processes of a host, and the clock of phases."""
