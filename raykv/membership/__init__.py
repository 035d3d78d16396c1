"""The members of a cluster, its list of namespaces, and a proxy through which nodes without Ray use both."""
