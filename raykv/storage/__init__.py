"""The chunk table's one writer: what is stored, where, and what goes when room is needed."""
