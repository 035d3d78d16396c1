"""The shared memory of one node: the arena, which holds the bytes of chunks, and the chunk table."""
