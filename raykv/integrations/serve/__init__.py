"""Ray Serve: the node of a replica, and an ingress that resumes broken streams."""
