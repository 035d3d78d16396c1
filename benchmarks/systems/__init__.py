"""One module per store. A module starts a store, calls it in the fastest way, and runs in the store's environment."""
