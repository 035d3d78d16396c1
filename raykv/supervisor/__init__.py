"""A supervisor process forks a node and restarts it. `NodeHandle` starts the supervisor."""
