"""The directory: a cluster's members and its list of namespaces. A proxy lets nodes call the directory without Ray."""
