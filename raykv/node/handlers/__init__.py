"""The handlers of a node's requests: one class for each group of messages."""
