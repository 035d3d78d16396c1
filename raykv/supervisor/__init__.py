"""A process that starts nodes by fork, and the handle of the process that owns it."""
