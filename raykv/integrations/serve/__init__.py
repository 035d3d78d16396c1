"""Support for Ray Serve: connects each replica to its raykv node, and resumes broken streams."""
