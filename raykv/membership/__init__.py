"""The members of a cluster, its list of namespaces, and a proxy to both for nodes without Ray."""
