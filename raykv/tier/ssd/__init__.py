"""The SSD tier: a log of segments on each drive."""
