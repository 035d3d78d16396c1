"""Benchmarks. The machines are shared, so a figure is only compared with other figures of the same run."""
