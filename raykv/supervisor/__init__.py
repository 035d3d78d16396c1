"""A process that starts a node by fork and restarts it, and the handle of the process that owns it."""
