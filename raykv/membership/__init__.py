"""Who is a member, and what the cluster knows of namespaces. Logic only."""
