"""Shared memory: the arena's bytes, the table that describes them, and the slots they are cut into."""
