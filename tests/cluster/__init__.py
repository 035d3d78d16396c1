"""Tests of the cluster on Ray."""
