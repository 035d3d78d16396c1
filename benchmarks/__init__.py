"""Benchmarks. Other users share the machines, so a figure is compared with other figures of the same run."""
