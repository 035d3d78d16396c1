// Runs the kernels of raykv/gpu/kernels.cu on a CPU: the threads of a launch run one after another. KERNELS names the file.
#define __global__
#define __device__

struct Dim3 {
    unsigned int x;
};
static Dim3 gridDim, blockDim, blockIdx, threadIdx;

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

#include KERNELS

extern "C" void launch(int is_gather, unsigned int blocks, unsigned int threads, const Tile *tiles,
                       unsigned int tile_count, const Place *places, unsigned int place_count, unsigned int base)
{
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            (is_gather ? gather : scatter)(tiles, tile_count, places, place_count, base);
}
