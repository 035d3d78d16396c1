// Runs the kernels of raykv/gpu/kernels.cu on the CPU: the CUDA words that they use, and a loop over all threads.

#define __global__
#define __device__
#define __forceinline__ inline

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

#include "kernels.cu"

extern "C" void run(int to_places, unsigned blocks, unsigned threads, const Run *runs, unsigned run_count,
                    const Place *places, unsigned place_count, unsigned slices, u64 origin, u64 staging, u64 pitch) {
    auto kernel = to_places ? gather : scatter;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            kernel(runs, run_count, places, place_count, slices, origin, staging, pitch);
}
