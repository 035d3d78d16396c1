"""What nodes and clients both know: names, keys, placement and messages. Pure: no input, no output, no clock."""
