"""The file tier: packs (files of many chunks) in a directory that nodes share."""
