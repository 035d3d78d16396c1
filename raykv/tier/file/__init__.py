"""The file tier: a directory of packs that nodes share."""
