"""The storage of one node: stores, evicts and deletes chunks. Only this package writes the node's chunk table."""
