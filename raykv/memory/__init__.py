"""The shared memory of one node: the chunk table, and the arena, whose slots hold the bytes of chunks."""
