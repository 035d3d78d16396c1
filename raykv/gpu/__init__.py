"""Copies between the KV cache of an engine in GPU memory and chunks in the arena of this host's node.

| module | content |
|---|---|
| `tiles` | where the bytes of a page lie, as a table that the kernels read |
| `kernels.cu` | gather: pages to chunks; scatter: chunks to pages |
| `device` | the few calls of CUDA that the rest needs; the only module that imports cupy |
| `pinning` | the arena's extents, registered with CUDA in the background |
| `copies` | chunks between pages and host memory: three ways, and the choice between them |
| `driver` | calls of CUDA's driver that cupy lacks: batched copies, and dma-bufs of GPU memory for RDMA |

raykv works without CUDA and cupy. `docs/gpu.md` describes the design.
"""
