"""What users and our own tests call to check that a sharded model equals the unsharded one."""
