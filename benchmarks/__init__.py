"""Benchmarks. The machines are shared, so figures are compared with others that were measured in the same run."""
