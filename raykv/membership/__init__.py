"""The members of a cluster, its list of namespaces, and a proxy for nodes without Ray."""
