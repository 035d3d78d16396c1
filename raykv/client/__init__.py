"""The client: reads this host's memory directly, and asks other nodes for the rest."""
