"""What a node does for each request: one class for each group of messages."""
