"""Tiers below memory, and the traffic between them and memory."""
