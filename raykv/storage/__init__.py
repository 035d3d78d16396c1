"""Storage of one node, the only writer of its chunk table: storing, eviction and deletion of chunks."""
