"""Measurements. Every figure is a ratio to something measured in the same run: these machines are shared."""
