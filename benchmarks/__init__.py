"""Side by side with the peers, in one process: every bench first verifies the results, then times."""
