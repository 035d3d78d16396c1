// Copies between the pages of an engine's KV cache and contiguous chunks. Compiled at run time (raykv/gpu/device.py).
//
// A warp copies one tile at a time: a part of a page that is contiguous on both sides. Tiles follow one another in the
// order of the chunk's bytes, so that the warps of a block write neighbouring addresses, which a PCIe link needs.
// The chunk may be in GPU memory, or in host memory that is registered with CUDA.
// The code uses no warp intrinsics and no shared memory: tests run it on a CPU, one thread after another.

struct Tile {                    // as `TILE` in raykv/gpu/tiles.py
    unsigned long long address;  // of the tile in page 0
    long long stride;            // bytes from one page to the next
    unsigned int offset;         // of the tile in a block of the chunk
    unsigned int nbytes;
};

struct Place {                   // as `PLACE` in raykv/gpu/tiles.py
    long long page;
    unsigned long long address;  // of the first byte that is copied, in the chunk
};

static const unsigned int LANES = 32;
static const unsigned int IN_FLIGHT = 8;  // loads that a thread issues before it waits for the first one

template <typename Word>
__device__ static void copy_words(char *to, const char *from, unsigned int nbytes, unsigned int lane)
{
    Word *target = (Word *)to;
    const Word *source = (const Word *)from;
    const unsigned int count = nbytes / (unsigned int)sizeof(Word);
    unsigned int at = lane;
    for (; at + (IN_FLIGHT - 1) * LANES < count; at += IN_FLIGHT * LANES) {
        Word words[IN_FLIGHT];
#pragma unroll
        for (unsigned int each = 0; each < IN_FLIGHT; each++)
            words[each] = source[at + each * LANES];
#pragma unroll
        for (unsigned int each = 0; each < IN_FLIGHT; each++)
            target[at + each * LANES] = words[each];
    }
    for (; at < count; at += LANES)
        target[at] = source[at];
}

// Copy with the widest words that fit the length and both addresses.
__device__ static void copy_tile(char *to, const char *from, unsigned int nbytes, unsigned int lane)
{
    const unsigned long long all = (unsigned long long)to | (unsigned long long)from | nbytes;
    if (all % sizeof(uint4) == 0)
        copy_words<uint4>(to, from, nbytes, lane);
    else if (all % sizeof(unsigned int) == 0)
        copy_words<unsigned int>(to, from, nbytes, lane);
    else
        copy_words<unsigned char>(to, from, nbytes, lane);
}

// `base`: the offset in a block that lies at a place's address. It is 0 unless only some layers are copied.
template <bool IS_GATHER>
__device__ static void copy_pages(const Tile *tiles, unsigned int tile_count, const Place *places,
                                  unsigned int place_count, unsigned int base)
{
    const unsigned int lane = threadIdx.x % LANES;
    const unsigned long long warps = (unsigned long long)gridDim.x * (blockDim.x / LANES);
    const unsigned long long items = (unsigned long long)tile_count * place_count;
    unsigned long long item = (unsigned long long)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    for (; item < items; item += warps) {
        const Place place = places[item / tile_count];
        const Tile tile = tiles[item % tile_count];
        char *page = (char *)(tile.address + (unsigned long long)(place.page * tile.stride));
        char *chunk = (char *)(place.address + (tile.offset - base));
        if (IS_GATHER)
            copy_tile(chunk, page, tile.nbytes, lane);
        else
            copy_tile(page, chunk, tile.nbytes, lane);
    }
}

// Pages -> chunks.
extern "C" __global__ void gather(const Tile *tiles, unsigned int tile_count, const Place *places,
                                  unsigned int place_count, unsigned int base)
{
    copy_pages<true>(tiles, tile_count, places, place_count, base);
}

// Chunks -> pages.
extern "C" __global__ void scatter(const Tile *tiles, unsigned int tile_count, const Place *places,
                                   unsigned int place_count, unsigned int base)
{
    copy_pages<false>(tiles, tile_count, places, place_count, base);
}
