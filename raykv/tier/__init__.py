"""Where chunks lie below memory: tiers, and the traffic between them and memory."""
