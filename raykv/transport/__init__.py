"""Ways to move messages and chunk bytes between two processes."""
