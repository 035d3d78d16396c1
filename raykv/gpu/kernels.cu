// Copies blocks of a paged KV cache into contiguous memory (gather), and back (scatter).
//
// cupy compiles this file when the first GPU is opened, with NVRTC, which has no headers. The tests compile the same file
// with g++ and a shim for the CUDA words, and run it on the CPU. There is no barrier and no shared memory, so the threads
// may run in any order.
//
// The unit of work of a warp is a slice: SLICE bytes of one run of one block. One instruction of a warp moves 512
// contiguous bytes, and each thread has 4 loads in flight, so that a few multiprocessors can use the whole PCIe link:
// 128 warps have 256 KiB in flight.

typedef unsigned long long u64;

const unsigned SLICE = 2048;
const unsigned WARP = 32;

// One contiguous byte range in each block, for example the keys of one layer.
struct Run {
    u64 address;  // of the run in block 0
    u64 distance; // from a block's run to the run of the next block, in bytes
    u64 nbytes;   // length
    u64 offset;   // of the run in a block's content
};

// A block, and the address at which its content begins in contiguous memory.
struct Place {
    u64 block;
    u64 address;
};

template <typename Word>
__device__ __forceinline__ void copy_words(Word *to, const Word *from, unsigned count, unsigned lane) {
    unsigned i = lane;
    for (; i + 3 * WARP < count; i += 4 * WARP) { // four loads before the first store
        Word a = from[i], b = from[i + WARP], c = from[i + 2 * WARP], d = from[i + 3 * WARP];
        to[i] = a;
        to[i + WARP] = b;
        to[i + 2 * WARP] = c;
        to[i + 3 * WARP] = d;
    }
    for (; i < count; i += WARP)
        to[i] = from[i];
}

// Both addresses must be equally far from a multiple of the word's size.
template <typename Word>
__device__ __forceinline__ void copy_as(char *to, const char *from, unsigned nbytes, unsigned lane) {
    unsigned head = (unsigned)(-(u64)to % sizeof(Word));
    if (head > nbytes)
        head = nbytes;
    unsigned words = (nbytes - head) / sizeof(Word);
    unsigned tail = head + words * (unsigned)sizeof(Word);
    if (lane < head) // head and tail have fewer bytes than a warp has threads
        to[lane] = from[lane];
    copy_words((Word *)(to + head), (const Word *)(from + head), words, lane);
    if (tail + lane < nbytes)
        to[tail + lane] = from[tail + lane];
}

__device__ __forceinline__ void copy_slice(char *to, const char *from, unsigned nbytes, unsigned lane) {
    u64 apart = (u64)to ^ (u64)from;
    if (apart % sizeof(uint4) == 0)
        copy_as<uint4>(to, from, nbytes, lane);
    else if (apart % sizeof(unsigned) == 0)
        copy_as<unsigned>(to, from, nbytes, lane);
    else
        copy_as<char>(to, from, nbytes, lane);
}

// `slices`: number of slices of the longest run. `origin`: offset in a block's content of the first run. Its bytes are at
// the place's address + `origin`, or, if `pitch` is not 0, at `staging` + `pitch` * the index of the place.
template <bool to_places>
__device__ __forceinline__ void copy(const Run *runs, unsigned run_count, const Place *places, unsigned place_count,
                                     unsigned slices, u64 origin, u64 staging, u64 pitch) {
    unsigned lane = threadIdx.x % WARP;
    unsigned warps_per_block = blockDim.x / WARP;
    unsigned items = place_count * run_count * slices; // fits: 2^32 slices are 8 TiB, and 64 bit divisions are slow
    for (unsigned item = blockIdx.x * warps_per_block + threadIdx.x / WARP; item < items;
         item += gridDim.x * warps_per_block) {
        u64 start = (u64)(item % slices) * SLICE;
        unsigned rest = item / slices;
        Run run = runs[rest % run_count];
        if (start >= run.nbytes)
            continue; // this run is shorter than the longest one
        unsigned index = rest / run_count;
        Place place = places[index];
        unsigned nbytes = run.nbytes - start < SLICE ? (unsigned)(run.nbytes - start) : SLICE;
        u64 base = pitch ? staging + pitch * index - origin : place.address;
        char *paged = (char *)(run.address + place.block * run.distance + start);
        char *contiguous = (char *)(base + run.offset + start);
        if (to_places)
            copy_slice(contiguous, paged, nbytes, lane);
        else
            copy_slice(paged, contiguous, nbytes, lane);
    }
}

extern "C" __global__ void gather(const Run *runs, unsigned run_count, const Place *places, unsigned place_count,
                                  unsigned slices, u64 origin, u64 staging, u64 pitch) {
    copy<true>(runs, run_count, places, place_count, slices, origin, staging, pitch);
}

extern "C" __global__ void scatter(const Run *runs, unsigned run_count, const Place *places, unsigned place_count,
                                   unsigned slices, u64 origin, u64 staging, u64 pitch) {
    copy<false>(runs, run_count, places, place_count, slices, origin, staging, pitch);
}
