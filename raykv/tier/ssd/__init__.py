"""The SSD tier."""
