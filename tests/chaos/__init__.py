"""Real processes in network namespaces, under load, while nodes, the directory and the network fail."""
