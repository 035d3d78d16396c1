"""One module a store: how to start it, and how to call it at its best. Run in that store's own environment."""
