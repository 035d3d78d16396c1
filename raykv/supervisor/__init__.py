"""A supervisor process forks a node, and restarts the node when it dies. `NodeHandle` starts the supervisor."""
