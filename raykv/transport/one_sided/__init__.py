"""What data paths share that read a holder's memory without its CPU: RDMA and NIXL."""
