"""The cluster on Ray."""
