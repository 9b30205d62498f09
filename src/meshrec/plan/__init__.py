"""A sharding plan as data: rectangles of tables on ranks, how to write one, and the proof that it is one."""
