"""Shared memory: the arena that holds chunk bytes, the chunk table, and the slots of the arena."""
