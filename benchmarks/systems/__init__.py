"""One module per store: it starts the store and calls it in the fastest way. It runs in the store's environment."""
