"""Ray Serve: which node a replica uses, and an ingress that resumes broken streams."""
