"""Where chunks lie beside memory: tiers below it, and what goes there."""
