"""The storage of one node: stores, evicts and deletes chunks, and is the only writer of the node's chunk table."""
