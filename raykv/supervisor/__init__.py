"""The supervisor, a process that forks a node and restarts it, and `NodeHandle`, which starts the supervisor."""
