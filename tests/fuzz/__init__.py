"""Fuzz targets: one function for each parser of bytes or text that somebody else may have written.

`python -m tests.fuzz.run` feeds them with a coverage-guided fuzzer, `tests/test_fuzz.py` with mutated seeds.
"""
