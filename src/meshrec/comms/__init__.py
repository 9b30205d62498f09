"""What ranks say to each other: collectives, the link between processes of a host, and the phases' clock."""
