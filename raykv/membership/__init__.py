"""The members of a cluster, and its list of namespaces. Logic, and a proxy for nodes without Ray."""
