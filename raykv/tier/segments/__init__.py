"""Segments: the on-disk format that the SSD tier and the file tier share."""
