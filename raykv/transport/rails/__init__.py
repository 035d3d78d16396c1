"""Several NICs of one host: which are near (`topology`), and how a batch is spread over them (`striping`)."""
