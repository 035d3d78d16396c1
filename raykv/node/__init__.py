"""One storage node: a store with sockets, leases and background threads."""
