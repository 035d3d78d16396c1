"""The file tier: a directory that nodes share. Its files are packs, each of many chunks."""
