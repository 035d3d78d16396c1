"""Ways to run raykv: the demo and what it serves."""
