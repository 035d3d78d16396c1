"""Code that nodes and clients share: names, keys, placement and messages. It does no I/O and reads no clock."""
