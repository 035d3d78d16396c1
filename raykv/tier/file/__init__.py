"""The file tier: a shared directory of packs."""
