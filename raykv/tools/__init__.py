"""The command line of raykv, and `raykv doctor`."""
