"""Code that nodes and clients share: namespaces, keys, placement and messages. It does no I/O and reads no clock."""
