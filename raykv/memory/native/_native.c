/* The loops that profiling found: probing the chunk table for many keys, copying many chunks out of the arena, receiving
   many from a socket, and going through the whole table at a start.

   What they do, and every rule they keep, is told in table.py, recovery.py, slots.py, room.py, copying.py,
   transport/shm.py and transport/stream.py, which also do the same without this file (but for Reader.publish: without it the node makes chunks
   visible). Nothing here keeps state, and nothing is trusted: rows and places that lie outside the buffers are misses.

   A reader races with the writer on purpose (see table.py: seqlocks). Loads of a generation are acquiring, and a fence
   stands between the copy and the second look, so that it holds on machines that reorder loads. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FIRST 2 /* index entries: 0 empty, 1 removed, row + 2 */
#define REMOVED 1
#define WINDOW 8 /* entries of the side index that may name the rows of one key: Table.SIDE_WINDOW */
#define PAGE_SHIFT 12
#define APART 8                         /* keys between the fetch of a line of memory and its use */
#define UNDER_WAY (4 * APART)           /* keys of one call that are looked up at a time */
#define BEHIND 3                        /* rows of one key fetched ahead where the first is another's */
#define WITHOUT_GIL_NBYTES (32 << 10)   /* copies from this size on let other threads run */
#define WITHOUT_GIL_ONE_NBYTES (256 << 10)
#define WITHOUT_GIL_KEYS 4096

typedef struct {
    uint32_t generation, expires, page, nbytes;
    uint64_t key_hi, key_lo;
} record_t;

static int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* -- the quickest way -------------------------------------------------------------------------------------------- */

/* Which way of copying is the quickest depends on the processor: what gains a third on one costs a third on another. So
   a process tries all ways in turn, each timed, with some of its copies: with the first ones, after 64, 128, 256 and 512,
   and once in TRIED_EACH. Of each way the last tries are kept, and the way with the lowest median is taken; a way in use
   stays until another is better by a twentieth. (The first tries may say little: they also wait for pages that nobody
   has touched yet.) Small copies, which find part of their bytes in a cache, say nothing about large ones: where 16 KiB
   chose for 1 MiB as well, every tenth measurement of puts took twice as long. */
#if defined(__x86_64__)
#define WAYS 3
#define TRIES (5 * WAYS)
#define TRIED_EACH 1024
#define KEPT 15
#define TRIED_NBYTES (16 << 10) /* smaller copies say too little */
#define LARGE_NBYTES (128 << 10) /* from here on a copy counts as large */

typedef struct {
    uint32_t begun, ended; /* copies, tries */
    int best;              /* a way; -1: none was tried yet */
    uint32_t seen[WAYS], cost[WAYS][KEPT]; /* tries of each way; of the last ones, ps per byte */
} choice_t;

typedef struct {
    int way, timed;
    int64_t began_ns;
} trial_t;

static trial_t trial_begin(choice_t *choice, size_t nbytes) {
    trial_t trial = {__atomic_load_n(&choice->best, __ATOMIC_RELAXED), 0, 0};
    if (trial.way < 0)
        trial.way = 0;
    if (nbytes < TRIED_NBYTES)
        return trial;
    uint32_t number = __atomic_fetch_add(&choice->begun, 1, __ATOMIC_RELAXED), since = number % TRIED_EACH;
    if (number < TRIED_EACH && number >= 64)
        since = number - (UINT32_C(1) << (31 - __builtin_clz(number)));
    if (since < TRIES) {
        trial.timed = 1;
        trial.way = (int)((since + since / WAYS) % WAYS); /* each round begins with another: chunks may take turns too */
        trial.began_ns = monotonic_ns();
    }
    return trial;
}

static int compare_costs(const void *one, const void *other) {
    uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;
    return (a > b) - (a < b);
}

/* The median of the tries of a way that are kept; UINT32_MAX if there are none. */
static uint32_t usual_cost(choice_t *choice, int way) {
    uint32_t sorted[KEPT], count = __atomic_load_n(&choice->seen[way], __ATOMIC_RELAXED);
    count = count < KEPT ? count : KEPT;
    for (uint32_t at = 0; at < count; at++)
        sorted[at] = __atomic_load_n(&choice->cost[way][at], __ATOMIC_RELAXED);
    qsort(sorted, count, sizeof *sorted, compare_costs);
    return count ? sorted[count / 2] : UINT32_MAX;
}

static void trial_end(choice_t *choice, trial_t trial, size_t nbytes) {
    if (!trial.timed)
        return;
    double cost = 1e3 * (double)(monotonic_ns() - trial.began_ns) / (double)nbytes;
    uint32_t at = __atomic_fetch_add(&choice->seen[trial.way], 1, __ATOMIC_RELAXED) % KEPT;
    __atomic_store_n(&choice->cost[trial.way][at], cost < 1e9 ? (uint32_t)cost : 1000000000, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&choice->ended, 1, __ATOMIC_RELAXED) % TRIES)
        return;
    int best = __atomic_load_n(&choice->best, __ATOMIC_RELAXED);
    uint64_t bound = best < 0 ? UINT64_MAX : usual_cost(choice, best) * UINT64_C(19) / 20;
    for (int way = 0; way < WAYS; way++) {
        uint32_t usual = usual_cost(choice, way);
        if (usual < bound)
            best = way, bound = usual;
    }
    __atomic_store_n(&choice->best, best, __ATOMIC_RELAXED);
}
#endif

/* -- copying ----------------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)
enum { FETCHED, PAGES, PLAIN }; /* ways of a large copy; which comes first is taken where nothing is known */
static choice_t copying[2] = {{.best = -1}, {.best = -1}}, storing[2] = {{.best = -1}, {.best = -1}}; /* small, large */
static int has_avx2;
static int has_avx512; /* and is not slowed down by using it, as processors before Ice Lake are */

#define PAGE 4096
#define GROUP (4 * PAGE)

__attribute__((target("avx2"))) static inline void stream_128(char *to, const char *from) {
    __m256i a = _mm256_loadu_si256((const __m256i *)from);
    __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));
    __m256i c = _mm256_loadu_si256((const __m256i *)(from + 64));
    __m256i d = _mm256_loadu_si256((const __m256i *)(from + 96));
    _mm256_stream_si256((__m256i *)to, a);
    _mm256_stream_si256((__m256i *)(to + 32), b);
    _mm256_stream_si256((__m256i *)(to + 64), c);
    _mm256_stream_si256((__m256i *)(to + 96), d);
}

/* Four pages at the same time: the processor fetches ahead within each, and never beyond its end. */
__attribute__((target("avx2"))) static inline void stream_group(char *to, const char *from) {
    for (size_t at = 0; at < PAGE; at += 128)
        for (size_t page = 0; page < GROUP; page += PAGE)
            stream_128(to + page + at, from + page + at);
}

/* Stores that do not pass through the cache: the target's old lines need not be read first, which saves a third of the
   memory traffic of a plain copy. FETCHED: the source is fetched past the outer caches too (NTA): after a large copy the
   code and the tables of this process and of its node are still there. */
__attribute__((target("avx2"))) static void stream_avx2(char *to, const char *from, size_t n, int way) {
    size_t head = (size_t)(-(intptr_t)to) & 63;
    if (head > n)
        head = n;
    memcpy(to, from, head);
    to += head, from += head, n -= head;
    if (way == PAGES) {
        for (; n >= GROUP; to += GROUP, from += GROUP, n -= GROUP)
            stream_group(to, from);
        for (; n >= 128; to += 128, from += 128, n -= 128)
            stream_128(to, from);
    } else {
        for (; n >= 256; to += 256, from += 256, n -= 256) {
            for (int line = 0; line < 256; line += 64)
                _mm_prefetch(from + 2048 + line, _MM_HINT_NTA);
            stream_128(to, from), stream_128(to + 128, from + 128);
        }
    }
    memcpy(to, from, n);
    _mm_sfence(); /* streamed stores are weakly ordered: what is published after them must come after them */
}
#endif

static void copy_bytes(char *to, const char *from, size_t n, int stream) {
#if defined(__x86_64__)
    if (stream && has_avx2 && n >= 4096) {
        choice_t *choice = &copying[n >= LARGE_NBYTES];
        trial_t trial = trial_begin(choice, n);
        if (trial.way == PLAIN)
            memcpy(to, from, n);
        else
            stream_avx2(to, from, n, trial.way);
        trial_end(choice, trial, n);
        return;
    }
#endif
    memcpy(to, from, n);
}

/* -- checksums --------------------------------------------------------------------------------------------------- */

/* xxh3-64 (seed 0) of more than HASH_LEAST bytes, in steps, so that bytes are hashed while the copy has them in the
   cache, and without the interpreter's lock. The same as the xxhash package, which the tests compare it to. */

#define HASH_LEAST 240
#define STRIPE 64
#define STRIPES_A_BLOCK 16
#define HASH_BLOCK (STRIPE * STRIPES_A_BLOCK)
#define PRIME32_1 UINT32_C(0x9E3779B1)
#define PRIME32_2 UINT32_C(0x85EBCA77)
#define PRIME32_3 UINT32_C(0xC2B2AE3D)
#define PRIME64_1 UINT64_C(0x9E3779B185EBCA87)
#define PRIME64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define PRIME64_3 UINT64_C(0x165667B19E3779F9)
#define PRIME64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define PRIME64_5 UINT64_C(0x27D4EB2F165667C5)

static const uint8_t secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t read64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static void stripes_plain(uint64_t *lanes, const uint8_t *from, const uint8_t *key, size_t count) {
    for (size_t stripe = 0; stripe < count; stripe++, from += STRIPE, key += 8) {
        for (int lane = 0; lane < 8; lane++) {
            uint64_t value = read64(from + 8 * lane), mixed = value ^ read64(key + 8 * lane);
            lanes[lane ^ 1] += value;
            lanes[lane] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
        }
    }
}

static void scramble(uint64_t *lanes) {
    for (int lane = 0; lane < 8; lane++)
        lanes[lane] = (lanes[lane] ^ lanes[lane] >> 47 ^ read64(secret + 128 + 8 * lane)) * PRIME32_1;
}

static void blocks_plain(uint64_t *lanes, const uint8_t *from, size_t count) {
    for (size_t block = 0; block < count; block++, from += HASH_BLOCK) {
        stripes_plain(lanes, from, secret, STRIPES_A_BLOCK);
        scramble(lanes);
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static inline __m256i stripe_half(__m256i lanes, const uint8_t *from, const uint8_t *key) {
    __m256i value = _mm256_loadu_si256((const __m256i *)from);
    __m256i mixed = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)key));
    __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    return _mm256_add_epi64(product, _mm256_add_epi64(lanes, _mm256_shuffle_epi32(value, 0x4E)));
}

__attribute__((target("avx2"))) static inline __m256i scramble_half(__m256i lanes, const uint8_t *key) {
    const __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47)),
                                     _mm256_loadu_si256((const __m256i *)key));
    __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime), 32);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), high);
}

/* With `to`, which begins at a multiple of 32, the bytes are also streamed there: one pass for both. */
__attribute__((target("avx2"))) static inline void blocks_avx2(uint64_t *lanes, const uint8_t *from, size_t count,
                                                               uint8_t *to) {
    __m256i low = _mm256_loadu_si256((__m256i *)lanes), high = _mm256_loadu_si256((__m256i *)(lanes + 4));
    for (size_t block = 0; block < count; block++) {
        for (int stripe = 0; stripe < STRIPES_A_BLOCK; stripe++, from += STRIPE) {
            if (to)
                _mm_prefetch((const char *)from + 2048, _MM_HINT_NTA);
            else
                _mm_prefetch((const char *)from + 1024, _MM_HINT_T0);
            low = stripe_half(low, from, secret + 8 * stripe);
            high = stripe_half(high, from + 32, secret + 8 * stripe + 32);
            if (to) {
                _mm256_stream_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
                _mm256_stream_si256((__m256i *)(to + 32), _mm256_loadu_si256((const __m256i *)(from + 32)));
                to += STRIPE;
            }
        }
        low = scramble_half(low, secret + 128), high = scramble_half(high, secret + 160);
    }
    _mm256_storeu_si256((__m256i *)lanes, low), _mm256_storeu_si256((__m256i *)(lanes + 4), high);
}

__attribute__((target("avx512f"))) static void blocks_avx512(uint64_t *lanes, const uint8_t *from, size_t count) {
    const __m512i prime = _mm512_set1_epi32((int)PRIME32_1), key = _mm512_loadu_si512(secret + 128);
    __m512i all = _mm512_loadu_si512(lanes);
    for (size_t block = 0; block < count; block++) {
        for (int stripe = 0; stripe < STRIPES_A_BLOCK; stripe++, from += STRIPE) {
            __m512i value = _mm512_loadu_si512(from);
            __m512i mixed = _mm512_xor_si512(value, _mm512_loadu_si512(secret + 8 * stripe));
            __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
            all = _mm512_add_epi64(product, _mm512_add_epi64(all, _mm512_shuffle_epi32(value, (_MM_PERM_ENUM)0x4E)));
        }
        __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(all, _mm512_srli_epi64(all, 47)), key);
        __m512i high = _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime), 32);
        all = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), high);
    }
    _mm512_storeu_si512(lanes, all);
}
#endif

static void hash_begin(uint64_t *lanes) {
    const uint64_t start[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(lanes, start, sizeof start);
}

static void hash_blocks(uint64_t *lanes, const uint8_t *from, size_t count) {
#if defined(__x86_64__)
    if (has_avx512) {
        blocks_avx512(lanes, from, count);
        return;
    }
    if (has_avx2) {
        blocks_avx2(lanes, from, count, NULL);
        return;
    }
#endif
    blocks_plain(lanes, from, count);
}

/* The last `left` bytes, 1 to HASH_BLOCK of them, and the sum of it all: `nbytes`, and at least a stripe is in memory
   before `tail + left`. */
static uint64_t hash_tail(uint64_t *lanes, const uint8_t *tail, size_t left, size_t nbytes) {
    stripes_plain(lanes, tail, secret, (left - 1) / STRIPE);
    stripes_plain(lanes, tail + left - STRIPE, secret + 121, 1);
    uint64_t sum = nbytes * PRIME64_1;
    for (int pair = 0; pair < 4; pair++) {
        unsigned __int128 product = (unsigned __int128)(lanes[2 * pair] ^ read64(secret + 11 + 16 * pair)) *
                                    (lanes[2 * pair + 1] ^ read64(secret + 19 + 16 * pair));
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum ^= sum >> 37;
    sum *= UINT64_C(0x165667919E3779F9);
    return sum ^ sum >> 32;
}

/* The rest after `done` bytes (whole blocks, and less than all), and the sum of it all. */
static uint64_t hash_end(uint64_t *lanes, const uint8_t *all, size_t done, size_t nbytes) {
    return hash_tail(lanes, all + done, nbytes - done, nbytes);
}

/* The same for bytes that come in parts. What is not yet known to be followed by more is kept back, behind the last
   stripe that was not. */
typedef struct {
    uint64_t lanes[8];
    size_t nbytes, kept;
    uint8_t tail[STRIPE + HASH_BLOCK];
} hasher_t;

static void hasher_begin(hasher_t *hasher) {
    hash_begin(hasher->lanes);
    hasher->nbytes = hasher->kept = 0;
}

static void hasher_feed(hasher_t *hasher, const uint8_t *from, size_t n) {
    uint8_t *kept = hasher->tail + STRIPE;
    hasher->nbytes += n;
    if (hasher->kept + n > HASH_BLOCK) {
        if (hasher->kept) {
            size_t more = HASH_BLOCK - hasher->kept;
            memcpy(kept + hasher->kept, from, more);
            hash_blocks(hasher->lanes, kept, 1);
            memcpy(hasher->tail, kept + HASH_BLOCK - STRIPE, STRIPE);
            from += more, n -= more, hasher->kept = 0;
        }
        size_t whole = (n - 1) / HASH_BLOCK * HASH_BLOCK;
        if (whole) {
            hash_blocks(hasher->lanes, from, whole / HASH_BLOCK);
            memcpy(hasher->tail, from + whole - STRIPE, STRIPE);
            from += whole, n -= whole;
        }
    }
    memcpy(kept + hasher->kept, from, n);
    hasher->kept += n;
}

/* Of more than HASH_LEAST bytes. */
static uint64_t hasher_end(hasher_t *hasher) {
    return hash_tail(hasher->lanes, hasher->tail + STRIPE, hasher->kept, hasher->nbytes);
}

/* -- buffers ----------------------------------------------------------------------------------------------------- */

static int sized(const Py_buffer *buffer, Py_ssize_t nbytes, const char *name) {
    if (buffer->len == nbytes)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s: %zd bytes where %zd were due", name, buffer->len, nbytes);
    return 0;
}

/* Buffers of one call, released together. */
typedef struct {
    Py_buffer *held;
    Py_ssize_t count, room;
} buffers_t;

static Py_buffer *hold(buffers_t *buffers, PyObject *object, int flags) {
    if (buffers->count == buffers->room) {
        Py_ssize_t room = buffers->room ? 2 * buffers->room : 64;
        Py_buffer *held = PyMem_Realloc(buffers->held, (size_t)room * sizeof *held);
        if (!held) {
            PyErr_NoMemory();
            return NULL;
        }
        buffers->held = held, buffers->room = room;
    }
    Py_buffer *buffer = &buffers->held[buffers->count];
    if (PyObject_GetBuffer(object, buffer, flags) < 0)
        return NULL;
    buffers->count++;
    return buffer;
}

static void let_go(buffers_t *buffers) {
    while (buffers->count)
        PyBuffer_Release(&buffers->held[--buffers->count]);
    PyMem_Free(buffers->held);
}

/* -- find -------------------------------------------------------------------------------------------------------- */

/* Where the search for a key begins: see Table._home. */
static inline size_t home_of(uint64_t hi, uint64_t lo, size_t size) {
    return (size_t)((((hi ^ lo) * UINT64_C(0x9E3779B97F4A7C15)) >> 32) * (uint64_t)size >> 32);
}

static inline int is_row(int32_t entry, size_t rows) { return entry >= FIRST && (size_t)(entry - FIRST) < rows; }

/* Whether a record is this key's. Takes the generation first, which holds for the rest as long as it stays. */
static inline int is_of(const record_t *record, uint64_t hi, uint64_t lo, uint32_t *generation) {
    uint32_t seen = __atomic_load_n(&record->generation, __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&record->key_lo, __ATOMIC_RELAXED) != lo ||
        __atomic_load_n(&record->key_hi, __ATOMIC_RELAXED) != hi)
        return 0;
    *generation = seen;
    return 1;
}

/* Whether a row is ready and not expired at tick `now`. now < 0: in any state. */
static inline int is_usable(const record_t *record, uint32_t generation, int64_t now) {
    uint32_t expires = __atomic_load_n(&record->expires, __ATOMIC_RELAXED);
    return now < 0 || (generation && !(generation & 1) && (!expires || (int64_t)expires > now));
}

static int32_t probe(const record_t *records, size_t rows, const int32_t *index, size_t size, uint64_t hi, uint64_t lo,
                     int64_t now, uint32_t *generation) {
    size_t position = home_of(hi, lo, size);
    for (size_t step = 0; step < size; step++) {
        int32_t entry = __atomic_load_n(&index[position], __ATOMIC_ACQUIRE);
        if (is_row(entry, rows)) {
            const record_t *record = &records[entry - FIRST];
            if (is_of(record, hi, lo, generation))
                return is_usable(record, *generation, now) ? entry - FIRST : -1;
        } else if (entry == 0) {
            break;
        }
        if (++position == size)
            position = 0;
    }
    *generation = 0;
    return -1;
}

/* Fetches each key's lines of memory ahead of their use, in stages, while those of other keys are on their way: its
   place in the index; the record of the first row there, which is its own for two keys of three; only for the others
   the records behind it. Lines are what it costs: fetching all of these at once is slower. */
static void find_all(const record_t *records, size_t rows, const int32_t *index, size_t size, const uint64_t *keys,
                     size_t count, int64_t now, int32_t *found, uint32_t *generations) {
    size_t homes[UNDER_WAY], others[UNDER_WAY], waiting = 0, probed = 0;
    int32_t firsts[UNDER_WAY];
    if (!rows)
        size = 0;
    for (size_t turn = 0; turn < count + 3 * APART; turn++) {
        size_t at = turn;
        if (at < count) {
            size_t home = homes[at % UNDER_WAY] = home_of(keys[2 * at], keys[2 * at + 1], size);
            __builtin_prefetch(&index[home]);
            if (home + BEHIND < size)
                __builtin_prefetch(&index[home + BEHIND]); /* mostly the same line */
        }
        at = turn - APART;
        if (turn >= APART && at < count) {
            size_t home = homes[at % UNDER_WAY];
            int32_t entry = home < size ? __atomic_load_n(&index[home], __ATOMIC_ACQUIRE) : 0;
            firsts[at % UNDER_WAY] = entry;
            __builtin_prefetch(&records[is_row(entry, rows) ? entry - FIRST : 0]);
        }
        at = turn - 2 * APART;
        if (turn >= 2 * APART && at < count) {
            int32_t entry = firsts[at % UNDER_WAY];
            uint64_t hi = keys[2 * at], lo = keys[2 * at + 1];
            found[at] = -1, generations[at] = 0;
            if (is_row(entry, rows) && is_of(&records[entry - FIRST], hi, lo, &generations[at])) {
                if (is_usable(&records[entry - FIRST], generations[at], now))
                    found[at] = entry - FIRST;
            } else if (entry) {
                size_t position = homes[at % UNDER_WAY] + 1, end = position + BEHIND;
                for (; position < end && position < size; position++) {
                    entry = __atomic_load_n(&index[position], __ATOMIC_RELAXED);
                    if (is_row(entry, rows))
                        __builtin_prefetch(&records[entry - FIRST]);
                    else if (!entry)
                        break;
                }
                others[waiting++ % UNDER_WAY] = at;
            }
        }
        if (probed < waiting && others[probed % UNDER_WAY] + 3 * APART <= turn) {
            at = others[probed++ % UNDER_WAY];
            found[at] = probe(records, rows, index, size, keys[2 * at], keys[2 * at + 1], now, &generations[at]);
        }
    }
}

PyDoc_STRVAR(find_doc, "find(records, index, keys, rows, generations, now)\n\n"
                       "Write the row of each key (or -1) and its generation. now < 0: rows in any state.");

static PyObject *find(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer records, index, keys, rows, generations;
    long long now;
    if (!PyArg_ParseTuple(arguments, "y*y*y*w*w*L", &records, &index, &keys, &rows, &generations, &now))
        return NULL;
    PyObject *result = NULL;
    size_t count = (size_t)keys.len / 16;
    if (sized(&keys, (Py_ssize_t)count * 16, "keys") && sized(&rows, (Py_ssize_t)count * 4, "rows") &&
        sized(&generations, (Py_ssize_t)count * 4, "generations")) {
        PyThreadState *state = count >= WITHOUT_GIL_KEYS ? PyEval_SaveThread() : NULL;
        find_all(records.buf, (size_t)records.len / sizeof(record_t), index.buf, (size_t)index.len / 4, keys.buf, count,
                 now, rows.buf, generations.buf);
        if (state)
            PyEval_RestoreThread(state);
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&records), PyBuffer_Release(&index), PyBuffer_Release(&keys);
    PyBuffer_Release(&rows), PyBuffer_Release(&generations);
    return result;
}

/* -- enter ------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(enter_doc, "enter(records, index, rows) -> int\n\n"
                        "Put rows at the first free entries from their keys' homes on. Returns how many of these were\n"
                        "entries of removed rows.");

static PyObject *enter(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer records, index, rows;
    if (!PyArg_ParseTuple(arguments, "y*w*y*", &records, &index, &rows))
        return NULL;
    const record_t *record = records.buf;
    const int32_t *row = rows.buf;
    int32_t *entries = index.buf;
    size_t size = (size_t)index.len / 4, count = (size_t)rows.len / 4, known = (size_t)records.len / sizeof *record;
    size_t reused = 0, done = 0;
    for (; done < count && row[done] >= 0 && (size_t)row[done] < known; done++) {
        size_t position = home_of(record[row[done]].key_hi, record[row[done]].key_lo, size), step = 0;
        while (entries[position] >= FIRST && step++ < size)
            position = position + 1 < size ? position + 1 : 0;
        if (step > size)
            break;
        reused += entries[position] == REMOVED;
        __atomic_store_n(&entries[position], row[done] + FIRST, __ATOMIC_RELEASE);
    }
    PyBuffer_Release(&records), PyBuffer_Release(&index), PyBuffer_Release(&rows);
    if (done < count)
        return PyErr_Format(PyExc_ValueError, "rows: entry %zu is no row, or the index is full", done);
    return PyLong_FromSize_t(reused);
}

/* -- taking over a table ------------------------------------------------------------------------------------------ */

#define LENT (-2) /* memory/rows.py */

/* What is wrong with a row, the first of these that holds: recovery.COMPLAINTS. */
enum { OUTSIDE, OFF_SLOT, TOO_LARGE, NO_PARENT, NO_NAMESPACE, NO_BYTES, SOUND };

static int is_ready(uint32_t generation) { return generation && !(generation & 1); }

PyDoc_STRVAR(check_doc, "check(records, parent, namespace, slots, known, taken, rows, extent_nbytes) -> int\n\n"
                        "Look at the rows that hold or may hold a chunk, and mark the first page of each in `taken`.\n"
                        "slots: size by extent; known: a byte a namespace; rows: of the table. Returns how many rows\n"
                        "there are; or -1, -2 .. for the first complaint that one of them gives cause to.");

static PyObject *check(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer records, parent, namespace, slots, known, taken;
    long long rows, extent_nbytes;
    if (!PyArg_ParseTuple(arguments, "y*y*y*y*y*w*LL", &records, &parent, &namespace, &slots, &known, &taken, &rows,
                          &extent_nbytes))
        return NULL;
    PyObject *result = NULL;
    Py_ssize_t count = records.len / (Py_ssize_t)sizeof(record_t), found = 0;
    uint64_t extents = (uint64_t)slots.len / 4, pages = extent_nbytes > 0 ? (uint64_t)extent_nbytes >> PAGE_SHIFT : 0;
    if (sized(&parent, 4 * count, "parent") && sized(&namespace, 2 * count, "namespace") &&
        sized(&taken, (Py_ssize_t)(extents * pages), "taken")) {
        const record_t *record = records.buf;
        uint64_t start = 0, end = 0; /* pages of the extent that the row before was in: mostly the same */
        uint64_t slot_pages = 0, slot_nbytes = 0;
        int worst = SOUND;
        for (Py_ssize_t row = 0; row < count; row++, record++) {
            uint32_t generation = __atomic_load_n(&record->generation, __ATOMIC_RELAXED);
            uint64_t page = record->page, nbytes = record->nbytes;
            if (!generation)
                continue;
            if (!nbytes) {
                worst = is_ready(generation) && NO_BYTES < worst ? NO_BYTES : worst;
                continue;
            }
            found++;
            int wrong = SOUND;
            if (page < start || page >= end) {
                uint64_t extent = pages ? page / pages : extents;
                if (extent >= extents) {
                    worst = OUTSIDE;
                    break;
                }
                start = extent * pages, end = start + pages;
                slot_nbytes = ((const uint32_t *)slots.buf)[extent], slot_pages = slot_nbytes >> PAGE_SHIFT;
            }
            int32_t above = ((const int32_t *)parent.buf)[row];
            uint16_t account = ((const uint16_t *)namespace.buf)[row];
            if (!slot_pages)
                wrong = OUTSIDE;
            else if ((slot_pages > 1 && (page - start) % slot_pages) || page + slot_pages > end)
                wrong = OFF_SLOT;
            else if (nbytes > slot_nbytes)
                wrong = TOO_LARGE;
            else if (above < LENT || above >= rows)
                wrong = NO_PARENT;
            else if (account >= known.len || !((const char *)known.buf)[account])
                wrong = NO_NAMESPACE;
            worst = wrong < worst ? wrong : worst;
            ((char *)taken.buf)[page] = 1;
        }
        result = PyLong_FromSsize_t(worst == SOUND ? found : -1 - worst);
    }
    PyBuffer_Release(&records), PyBuffer_Release(&parent), PyBuffer_Release(&namespace);
    PyBuffer_Release(&slots), PyBuffer_Release(&known), PyBuffer_Release(&taken);
    return result;
}

PyDoc_STRVAR(sort_out_doc, "sort_out(records, parent, ready, unfinished, published) -> (int, int, int)\n\n"
                           "Write the rows that are ready, those that have a slot and are not, and those of the ready\n"
                           "ones that are lent. Returns how many of each.");

static PyObject *sort_out(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer records, parent, out[3];
    if (!PyArg_ParseTuple(arguments, "y*y*w*w*w*", &records, &parent, &out[0], &out[1], &out[2]))
        return NULL;
    PyObject *result = NULL;
    Py_ssize_t count = records.len / (Py_ssize_t)sizeof(record_t), ready = 0, unfinished = 0, published = 0;
    if (sized(&parent, 4 * count, "parent") && sized(&out[0], 4 * count, "ready") &&
        sized(&out[1], 4 * count, "unfinished") && sized(&out[2], 4 * count, "published")) {
        const record_t *record = records.buf;
        for (Py_ssize_t row = 0; row < count; row++, record++) {
            uint32_t generation = __atomic_load_n(&record->generation, __ATOMIC_ACQUIRE);
            if (is_ready(generation)) {
                ((int32_t *)out[0].buf)[ready++] = (int32_t)row;
                if (((const int32_t *)parent.buf)[row] == LENT)
                    ((int32_t *)out[2].buf)[published++] = (int32_t)row;
            } else if (generation && record->nbytes) {
                ((int32_t *)out[1].buf)[unfinished++] = (int32_t)row;
            }
        }
        result = Py_BuildValue("nnn", ready, unfinished, published);
    }
    PyBuffer_Release(&records), PyBuffer_Release(&parent);
    PyBuffer_Release(&out[0]), PyBuffer_Release(&out[1]), PyBuffer_Release(&out[2]);
    return result;
}

PyDoc_STRVAR(survey_doc, "survey(index, rows, ready) -> int\n\n"
                         "How many entries are of removed rows; -1 if one names none of so many rows, or not each ready\n"
                         "row is named once.");

static PyObject *survey(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer index, ready;
    Py_ssize_t rows;
    if (!PyArg_ParseTuple(arguments, "y*ny*", &index, &rows, &ready))
        return NULL;
    Py_ssize_t size = index.len / 4, count = ready.len / 4, removed = 0;
    int wrong = rows < 0 || rows > INT32_MAX;
    /* How often each row is named: 0, 1, or more bits set. Entries that name none go to cells behind the rows, several
       of them, since each must wait for the one before in the same cell. No branches: no telling which entry is what. */
    uint8_t *named = wrong ? NULL : PyMem_Calloc((size_t)rows + 64, 1);
    if (named) {
        const int32_t *entries = index.buf, *row = ready.buf;
        for (Py_ssize_t at = 0; at < size; at++) {
            uint32_t number = (uint32_t)entries[at] - FIRST;
            int is_one = number < (uint32_t)rows;
            size_t cell = is_one ? number : (size_t)rows + ((size_t)at & 63);
            named[cell] = (uint8_t)(named[cell] << 1 | 1);
            removed += entries[at] == REMOVED;
            wrong |= !is_one & (number < (uint32_t)-FIRST);
        }
        for (Py_ssize_t at = 0; at < count && !wrong; at++)
            wrong = row[at] < 0 || row[at] >= rows || named[row[at]] != 1;
        PyMem_Free(named);
    }
    PyBuffer_Release(&index), PyBuffer_Release(&ready);
    return named || wrong ? PyLong_FromSsize_t(wrong ? -1 : removed) : PyErr_NoMemory();
}

PyDoc_STRVAR(chain_doc, "chain(parent, children, ready)\n\n"
                        "Make every parent of a ready row that is no ready row -1, and count children anew.");

static PyObject *chain(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer parent, children, ready;
    if (!PyArg_ParseTuple(arguments, "w*w*y*", &parent, &children, &ready))
        return NULL;
    PyObject *result = NULL;
    Py_ssize_t rows = parent.len / 4, count = ready.len / 4, done = 0;
    uint8_t *here = NULL;
    if (sized(&children, 4 * rows, "children") && !(here = PyMem_Calloc((size_t)rows + 1, 1)))
        PyErr_NoMemory();
    if (here) {
        const int32_t *row = ready.buf;
        int32_t *above = parent.buf, *below = children.buf;
        while (done < count && row[done] >= 0 && row[done] < rows)
            here[row[done++]] = 1;
        if (done == count) {
            memset(below, 0, (size_t)children.len);
            for (Py_ssize_t at = 0; at < count; at++) {
                int32_t one = above[row[at]];
                if (one >= 0 && one < rows && here[one])
                    below[one]++;
                else if (one != -1)
                    above[row[at]] = -1;
            }
            result = Py_NewRef(Py_None);
        } else {
            PyErr_Format(PyExc_ValueError, "ready: entry %zd is no row", done);
        }
        PyMem_Free(here);
    }
    PyBuffer_Release(&parent), PyBuffer_Release(&children), PyBuffer_Release(&ready);
    return result;
}

PyDoc_STRVAR(note_slots_doc, "note_slots(row_at, slots, pages, rows, used, fresh)\n\n"
                               "Note in `row_at` which row has which slot: row + 1, by extent and slot. slots: size by\n"
                               "extent; pages: a column, one entry a row; used, fresh: how many slots of each extent\n"
                               "are in use, and the first from which on none is.");

static PyObject *note_slots(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *column;
    Py_buffer row_at, slots, pages, rows, used, fresh;
    if (!PyArg_ParseTuple(arguments, "w*y*Oy*w*w*", &row_at, &slots, &column, &rows, &used, &fresh))
        return NULL;
    PyObject *result = NULL;
    Py_ssize_t extents = slots.len / 4, count = rows.len / 4, done = 0;
    if (PyObject_GetBuffer(column, &pages, PyBUF_STRIDES) < 0)
        goto done;
    if (pages.ndim == 1 && pages.itemsize == 4 && extents && sized(&used, 8 * extents, "used") &&
        sized(&fresh, 8 * extents, "fresh")) {
        uint64_t extent_pages = (uint64_t)row_at.len / 4 / (uint64_t)extents, start = 0, end = 0, step = 0, extent = 0;
        const int32_t *row = rows.buf;
        int64_t *in_use = used.buf, *first_free = fresh.buf;
        for (; done < count && row[done] >= 0 && row[done] < pages.shape[0]; done++) {
            uint64_t page = *(const uint32_t *)((const char *)pages.buf + row[done] * pages.strides[0]);
            if (page < start || page >= end) {
                extent = extent_pages ? page / extent_pages : (uint64_t)extents;
                if (extent >= (uint64_t)extents)
                    break;
                step = ((const uint32_t *)slots.buf)[extent] >> PAGE_SHIFT;
                start = extent * extent_pages, end = start + extent_pages;
            }
            if (!step)
                break;
            uint64_t slot = step > 1 ? (page - start) / step : page - start;
            ((int32_t *)row_at.buf)[start + slot] = row[done] + 1;
            in_use[extent]++;
            if (first_free[extent] <= (int64_t)slot)
                first_free[extent] = (int64_t)slot + 1;
        }
    }
    if (!PyErr_Occurred() && done < count)
        PyErr_Format(PyExc_ValueError, "rows: entry %zd is no row, or has no slot", done);
    else if (!PyErr_Occurred())
        result = Py_NewRef(Py_None);
    PyBuffer_Release(&pages);
done:
    PyBuffer_Release(&row_at), PyBuffer_Release(&slots), PyBuffer_Release(&rows);
    PyBuffer_Release(&used), PyBuffer_Release(&fresh);
    return result;
}

PyDoc_STRVAR(add_up_doc, "add_up(records, namespace, rows, used_nbytes) -> bool\n\n"
                         "Add the bytes of each row's slot to those of its namespace. Whether any of the rows expires.");

static PyObject *add_up(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer records, namespace, rows, used;
    if (!PyArg_ParseTuple(arguments, "y*y*y*w*", &records, &namespace, &rows, &used))
        return NULL;
    PyObject *result = NULL;
    Py_ssize_t count = rows.len / 4, known = records.len / (Py_ssize_t)sizeof(record_t), done = 0;
    if (sized(&namespace, 2 * known, "namespace")) {
        const record_t *record = records.buf;
        const int32_t *row = rows.buf;
        uint32_t expires = 0;
        for (; done < count && row[done] >= 0 && row[done] < known; done++) {
            uint16_t account = ((const uint16_t *)namespace.buf)[row[done]];
            if (account >= used.len / 8)
                break;
            uint64_t slot_pages = ((uint64_t)record[row[done]].nbytes + (1 << PAGE_SHIFT) - 1) >> PAGE_SHIFT;
            ((int64_t *)used.buf)[account] += (int64_t)(slot_pages << PAGE_SHIFT);
            expires |= record[row[done]].expires;
        }
        if (done < count)
            PyErr_Format(PyExc_ValueError, "rows: entry %zd is no row, or of no namespace", done);
        else
            result = PyBool_FromLong(expires != 0);
    }
    PyBuffer_Release(&records), PyBuffer_Release(&namespace), PyBuffer_Release(&rows), PyBuffer_Release(&used);
    return result;
}

/* Racy on purpose: a lost update costs nothing. */
static void note_read(const Py_buffer *accessed, const Py_buffer *frequency, int32_t row, uint32_t tick) {
    __atomic_store_n((uint32_t *)accessed->buf + row, tick, __ATOMIC_RELAXED);
    uint32_t *reads = (uint32_t *)frequency->buf + row;
    __atomic_store_n(reads, __atomic_load_n(reads, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);
}

/* -- targets ----------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *from; /* NULL: a miss */
    Py_ssize_t first, end;  /* its target's pieces */
} chunk_t;

/* Pieces of the targets first .. end - 1, and where each chunk's begin. */
static int hold_targets(buffers_t *pieces, PyObject *targets, Py_ssize_t first, Py_ssize_t end, chunk_t *chunks) {
    for (Py_ssize_t at = first; at < end; at++) {
        PyObject *target = PySequence_Fast_GET_ITEM(targets, at);
        chunks[at - first].first = pieces->count;
        if (PyList_Check(target) || PyTuple_Check(target)) {
            for (Py_ssize_t place = 0; place < PySequence_Fast_GET_SIZE(target); place++)
                if (!hold(pieces, PySequence_Fast_GET_ITEM(target, place), PyBUF_WRITABLE))
                    return 0;
        } else if (!hold(pieces, target, PyBUF_WRITABLE)) {
            return 0;
        }
        chunks[at - first].end = pieces->count;
    }
    return 1;
}

/* -- jobs -------------------------------------------------------------------------------------------------------- */

/* The chunks of one batch, which several threads copy without the interpreter's lock: whoever is free takes the next.
   The caller's thread holds the buffers, and does what nobody else does; helpers may come late, or never. */
typedef struct job {
    void (*copy)(const void *batch, Py_ssize_t at);
    const void *batch; /* of the caller's thread: only for who has begun a chunk, which the caller waits for */
    Py_ssize_t count, step, begun, ended; /* chunks; `step` of them are taken at once */
} job_t;

#define JOB "raykv.job"
#define SPIN_NS 300000 /* to be woken takes as long on a virtual machine */
#define NAP_NS 50000
#define STEPS_A_JOB 64

static void work(job_t *job) {
    for (Py_ssize_t first; (first = __atomic_fetch_add(&job->begun, job->step, __ATOMIC_RELAXED)) < job->count;) {
        Py_ssize_t end = job->count - first < job->step ? job->count : first + job->step;
        for (Py_ssize_t at = first; at < end; at++)
            job->copy(job->batch, at);
        __atomic_fetch_add(&job->ended, end - first, __ATOMIC_RELEASE);
    }
}

/* Let nobody begin another chunk, and wait for those that were begun. */
static void end_job(job_t *job) {
    Py_ssize_t begun = __atomic_exchange_n(&job->begun, job->count, __ATOMIC_RELAXED);
    begun = begun < job->count ? begun : job->count;
    int64_t since_ns = monotonic_ns();
    while (__atomic_load_n(&job->ended, __ATOMIC_ACQUIRE) < begun) {
        if (monotonic_ns() - since_ns < SPIN_NS)
            sched_yield();
        else
            nanosleep(&(struct timespec){0, NAP_NS}, NULL);
    }
}

static void free_job(PyObject *capsule) {
    PyMem_Free(PyCapsule_GetPointer(capsule, JOB));
}

/* Copy all chunks of a batch. `call`: told of the job, to call helpers to it; None: nobody helps. On an error, which
   only `call` makes, nobody copies any more either. */
static int run_job(void (*copy)(const void *, Py_ssize_t), const void *batch, Py_ssize_t count, PyObject *call,
                   int keep_lock) {
    job_t alone = {copy, batch, count, count / STEPS_A_JOB + 1, 0, 0}, *job = &alone;
    PyObject *capsule = NULL, *called = NULL;
    if (call != Py_None) {
        if (!(job = PyMem_Malloc(sizeof *job))) {
            PyErr_NoMemory();
            return 0;
        }
        *job = alone;
        if (!(capsule = PyCapsule_New(job, JOB, free_job))) {
            PyMem_Free(job);
            return 0;
        }
        called = PyObject_CallOneArg(call, capsule);
    }
    PyThreadState *state = keep_lock ? NULL : PyEval_SaveThread();
    if (!capsule || called)
        work(job);
    if (capsule)
        end_job(job);
    if (state)
        PyEval_RestoreThread(state);
    int done = !capsule || called;
    Py_XDECREF(called), Py_XDECREF(capsule);
    return done;
}

static PyObject *share(PyObject *module, PyObject *capsule) {
    (void)module;
    job_t *job = PyCapsule_GetPointer(capsule, JOB);
    if (!job)
        return NULL;
    PyThreadState *state = PyEval_SaveThread();
    work(job);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

/* -- read -------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(read_doc,
             "read(records, arena, rows, generations, targets, hits, accessed, frequency, tick, stream, call)\n\n"
             "Copy the chunks of the rows into their targets (each a writable buffer, or a list or tuple of them), and\n"
             "set hits where the row was the same before and after. Notes the reads. call: is called with a job that\n"
             "`share` takes part in; None: nobody helps.");

typedef struct {
    const record_t *records;
    const int32_t *rows;
    const uint32_t *generations;
    const chunk_t *chunks;
    const Py_buffer *pieces;
    char *hits;
    const Py_buffer *accessed, *frequency;
    uint32_t tick;
    int stream;
} reading_t;

static void read_one(const void *batch, Py_ssize_t at) {
    const reading_t *reading = batch;
    const chunk_t *chunk = &reading->chunks[at];
    const char *from = chunk->from;
    if (!from)
        return;
    for (Py_ssize_t place = chunk->first; place < chunk->end; place++) {
        const Py_buffer *piece = &reading->pieces[place];
        copy_bytes(piece->buf, from, (size_t)piece->len, reading->stream);
        from += piece->len;
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    int32_t row = reading->rows[at];
    if (__atomic_load_n(&reading->records[row].generation, __ATOMIC_RELAXED) == reading->generations[at]) {
        reading->hits[at] = 1;
        note_read(reading->accessed, reading->frequency, row, reading->tick);
    }
}

static PyObject *read_chunks(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer records, arena, rows, generations, hits, accessed, frequency;
    PyObject *given, *call;
    unsigned int tick;
    int stream;
    if (!PyArg_ParseTuple(arguments, "y*y*y*y*Ow*w*w*IpO", &records, &arena, &rows, &generations, &given, &hits,
                          &accessed, &frequency, &tick, &stream, &call))
        return NULL;
    PyObject *result = NULL, *targets = PySequence_Fast(given, "targets: not a sequence");
    buffers_t pieces = {NULL, 0, 0};
    chunk_t *chunks = NULL;
    Py_ssize_t count = rows.len / 4, known = records.len / (Py_ssize_t)sizeof(record_t);
    if (!targets)
        goto done;
    if (PySequence_Fast_GET_SIZE(targets) != count || generations.len != 4 * count || hits.len != count ||
        accessed.len < 4 * known || frequency.len < 4 * known) {
        PyErr_SetString(PyExc_ValueError, "rows, generations, targets and hits differ in length");
        goto done;
    }
    chunks = PyMem_Calloc((size_t)count + 1, sizeof *chunks);
    if (!chunks) {
        PyErr_NoMemory();
        goto done;
    }
    if (!hold_targets(&pieces, targets, 0, count, chunks))
        goto done;

    const record_t *record = records.buf;
    const int32_t *row = rows.buf;
    size_t total = 0;
    for (Py_ssize_t at = 0; at < count; at++) {
        chunk_t *chunk = &chunks[at];
        if (row[at] < 0 || row[at] >= known)
            continue;
        uint64_t from = (uint64_t)__atomic_load_n(&record[row[at]].page, __ATOMIC_RELAXED) << PAGE_SHIFT;
        uint64_t nbytes = __atomic_load_n(&record[row[at]].nbytes, __ATOMIC_RELAXED), wanted = 0;
        for (Py_ssize_t place = chunk->first; place < chunk->end; place++)
            wanted += (uint64_t)pieces.held[place].len;
        if (nbytes == wanted && from + nbytes <= (uint64_t)arena.len) {
            chunk->from = (const char *)arena.buf + from;
            total += nbytes;
        }
    }
    reading_t reading = {record,   row,       generations.buf, chunks, pieces.held,
                         hits.buf, &accessed, &frequency,      tick,   stream};
    if (run_job(read_one, &reading, count, call, call == Py_None && total < WITHOUT_GIL_NBYTES))
        result = Py_NewRef(Py_None);
done:
    let_go(&pieces);
    PyMem_Free(chunks);
    Py_XDECREF(targets);
    PyBuffer_Release(&records), PyBuffer_Release(&arena), PyBuffer_Release(&rows), PyBuffer_Release(&generations);
    PyBuffer_Release(&hits), PyBuffer_Release(&accessed), PyBuffer_Release(&frequency);
    return result;
}

/* -- hold -------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(hold_doc, "hold(records, index, keys, now, most, pins, checksum, accessed, frequency, arena)\n"
                       "    -> (list, list, bytes, bytes) or None\n\n"
                       "Pin the rows of these keys and note the reads, if all of them are ready and have fewer than\n"
                       "`most` pins; else None. Returns the rows, the views of the arena (a memoryview) where the chunks\n"
                       "lie, and as raw integers their lengths (u32) and checksums (u64).");

static int add_part(PyObject *parts, PyObject *view, uint64_t start, uint64_t end) {
    PyObject *from = PyLong_FromUnsignedLongLong(start), *to = PyLong_FromUnsignedLongLong(end);
    PyObject *slice = from && to ? PySlice_New(from, to, NULL) : NULL;
    PyObject *part = slice ? PyObject_GetItem(view, slice) : NULL;
    int problem = part ? PyList_Append(parts, part) : -1;
    Py_XDECREF(part), Py_XDECREF(slice), Py_XDECREF(from), Py_XDECREF(to);
    return problem;
}

static PyObject *hold_rows(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer records, index, keys, pins, checksum, accessed, frequency;
    unsigned int now, most;
    PyObject *arena;
    if (!PyArg_ParseTuple(arguments, "y*y*y*IIw*y*w*w*O!", &records, &index, &keys, &now, &most, &pins, &checksum,
                          &accessed, &frequency, &PyMemoryView_Type, &arena))
        return NULL;
    PyObject *result = NULL, *rows = NULL, *parts = NULL, *lengths = NULL, *checksums = NULL;
    Py_ssize_t count = keys.len / 16, known = records.len / (Py_ssize_t)sizeof(record_t);
    const record_t *record = records.buf;
    uint16_t *held = pins.buf;
    int32_t *found = PyMem_New(int32_t, count + 1);
    if (!found) {
        PyErr_NoMemory();
        goto done;
    }
    if (!sized(&keys, 16 * count, "keys") || !sized(&pins, 2 * known, "pins") ||
        !sized(&checksum, 8 * known, "checksum") || !sized(&accessed, 4 * known, "accessed") ||
        !sized(&frequency, 4 * known, "frequency"))
        goto done;
    rows = PyList_New(count), parts = PyList_New(0);
    lengths = PyBytes_FromStringAndSize(NULL, 4 * count), checksums = PyBytes_FromStringAndSize(NULL, 8 * count);
    if (!rows || !parts || !lengths || !checksums)
        goto done;
    uint32_t *nbytes = (uint32_t *)PyBytes_AS_STRING(lengths); /* first the generations: here is who changes them */
    find_all(record, (size_t)known, index.buf, (size_t)index.len / 4, keys.buf, (size_t)count, now, found, nbytes);
    const uint64_t *sums = checksum.buf;
    for (Py_ssize_t at = 0; at < count; at++) { /* lines of memory are what it costs: all are fetched at once */
        size_t row = found[at] < 0 ? 0 : (size_t)found[at];
        __builtin_prefetch(&held[row], 1), __builtin_prefetch(&sums[row]);
        __builtin_prefetch((uint32_t *)accessed.buf + row, 1), __builtin_prefetch((uint32_t *)frequency.buf + row, 1);
    }
    uint64_t first = 0, end = 0; /* of the part so far; neighbours become one */
    for (Py_ssize_t at = 0; at < count; at++) {
        if (found[at] < 0 || held[found[at]] >= most) {
            result = Py_NewRef(Py_None);
            goto done;
        }
        PyObject *row = PyLong_FromLong(found[at]);
        if (!row)
            goto done;
        PyList_SET_ITEM(rows, at, row);
        uint64_t start = (uint64_t)record[found[at]].page << PAGE_SHIFT;
        nbytes[at] = record[found[at]].nbytes;
        memcpy(PyBytes_AS_STRING(checksums) + 8 * at, &sums[found[at]], 8);
        if (start != end || !at) {
            if (at && add_part(parts, arena, first, end) < 0)
                goto done;
            first = start;
        }
        end = start + nbytes[at];
    }
    if (count && add_part(parts, arena, first, end) < 0)
        goto done;
    Py_ssize_t pinned = 0; /* a key may be asked for more often than it has pins left */
    for (; pinned < count && held[found[pinned]] < most; pinned++)
        held[found[pinned]]++;
    if (pinned < count) {
        while (pinned)
            held[found[--pinned]]--;
        result = Py_NewRef(Py_None);
        goto done;
    }
    for (Py_ssize_t at = 0; at < count; at++)
        note_read(&accessed, &frequency, found[at], now);
    result = PyTuple_Pack(4, rows, parts, lengths, checksums);
    if (!result)
        for (Py_ssize_t at = 0; at < count; at++)
            held[found[at]]--;
done:
    PyMem_Free(found);
    Py_XDECREF(rows), Py_XDECREF(parts), Py_XDECREF(lengths), Py_XDECREF(checksums);
    PyBuffer_Release(&records), PyBuffer_Release(&index), PyBuffer_Release(&keys), PyBuffer_Release(&pins);
    PyBuffer_Release(&checksum), PyBuffer_Release(&accessed), PyBuffer_Release(&frequency);
    return result;
}

/* -- wrap -------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(wrap_doc, "wrap(many, writable) -> (list, list) or None\n\n"
                       "If all of a sequence are memoryviews of bytes, in one piece, one-dimensional and not empty, and\n"
                       "writable if asked: a list with a list of each, and their lengths. Else None.");

static PyObject *wrap(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    (void)module;
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "wrap(many, writable)");
        return NULL;
    }
    int writable = PyObject_IsTrue(arguments[1]);
    PyObject *many = writable < 0 ? NULL : PySequence_Fast(arguments[0], "many: not a sequence");
    if (!many)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(many);
    PyObject *result = NULL, *lists = PyList_New(count), *lengths = PyList_New(count);
    if (!lists || !lengths)
        goto done;
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *each = PySequence_Fast_GET_ITEM(many, at);
        const Py_buffer *view = PyMemoryView_Check(each) ? PyMemoryView_GET_BUFFER(each) : NULL;
        if (!view || ((PyMemoryViewObject *)each)->flags & _Py_MEMORYVIEW_RELEASED || view->ndim != 1 || !view->len || (view->format && strcmp(view->format, "B")) ||
            !PyBuffer_IsContiguous(view, 'C') || (writable && view->readonly)) {
            result = Py_NewRef(Py_None);
            goto done;
        }
        PyObject *list = PyList_New(1), *length = PyLong_FromSsize_t(view->len);
        if (list)
            PyList_SET_ITEM(list, 0, Py_NewRef(each));
        PyList_SET_ITEM(lists, at, list), PyList_SET_ITEM(lengths, at, length);
        if (!list || !length)
            goto done;
    }
    result = PyTuple_Pack(2, lists, lengths);
done:
    Py_XDECREF(lists), Py_XDECREF(lengths);
    Py_DECREF(many);
    return result;
}

/* -- fill -------------------------------------------------------------------------------------------------------- */

#define TURN (16 * HASH_BLOCK) /* bytes hashed and copied in turns: they stay in the innermost cache in between */

#if defined(__x86_64__)
/* The same by streamed stores, up to the last block. Returns how many bytes that were. */
__attribute__((target("avx2"))) static size_t store_streamed(uint64_t *lanes, char *to, const char *from, size_t blocks,
                                                             int way) {
    size_t done = 0;
    if (way == PAGES) {
        for (; done + GROUP <= blocks * HASH_BLOCK; done += GROUP) {
            stream_group(to + done, from + done);
            blocks_avx2(lanes, (const uint8_t *)from + done, GROUP / HASH_BLOCK, NULL); /* from the innermost cache */
        }
    }
    blocks_avx2(lanes, (const uint8_t *)from + done, blocks - done / HASH_BLOCK, (uint8_t *)to + done);
    _mm_sfence();
    return blocks * HASH_BLOCK;
}
#endif

/* Copy one run of bytes and hash it, the source being read from memory once. */
static uint64_t store_run(char *to, const char *from, size_t nbytes, int stream) {
    uint64_t lanes[8];
    hash_begin(lanes);
    size_t blocks = (nbytes - 1) / HASH_BLOCK, done = 0;
#if defined(__x86_64__)
    choice_t *choice = &storing[nbytes >= LARGE_NBYTES];
    trial_t trial = {PLAIN, 0, 0};
    if (stream && has_avx2 && ((uintptr_t)to & 31) == 0) {
        trial = trial_begin(choice, nbytes);
        if (trial.way != PLAIN)
            done = store_streamed(lanes, to, from, blocks, trial.way);
    }
#endif
    for (size_t turn; done < blocks * HASH_BLOCK; done += turn) {
        turn = blocks * HASH_BLOCK - done < TURN ? blocks * HASH_BLOCK - done : TURN;
        hash_blocks(lanes, (const uint8_t *)from + done, turn / HASH_BLOCK);
        memcpy(to + done, from + done, turn);
    }
    memcpy(to + done, from + done, nbytes - done);
#if defined(__x86_64__)
    trial_end(choice, trial, nbytes);
#endif
    return hash_end(lanes, (const uint8_t *)from, done, nbytes);
}

/* Copy several runs behind each other; the target is hashed as it fills, while the cache has it. */
static uint64_t store_runs(char *to, const Py_buffer *pieces, Py_ssize_t count, size_t nbytes) {
    uint64_t lanes[8];
    hash_begin(lanes);
    size_t filled = 0, hashed = 0;
    for (Py_ssize_t at = 0; at < count; at++) {
        memcpy(to + filled, pieces[at].buf, (size_t)pieces[at].len);
        filled += (size_t)pieces[at].len;
        size_t blocks = filled == nbytes ? (nbytes - hashed - 1) / HASH_BLOCK : (filled - hashed) / HASH_BLOCK;
        hash_blocks(lanes, (const uint8_t *)to + hashed, blocks);
        hashed += blocks * HASH_BLOCK;
    }
    return hash_end(lanes, (const uint8_t *)to, hashed, nbytes);
}

PyDoc_STRVAR(fill_doc, "fill(slots, values, checksums, stream, call)\n\n"
                       "Copy values, each a list or tuple of buffers, into slots of more than 240 bytes, and write their\n"
                       "checksums. call: as for `read`.");

typedef struct {
    const Py_buffer *slots, *pieces;
    const chunk_t *chunks;
    uint64_t *checksums;
    int stream;
} stores_t;

static void fill_one(const void *batch, Py_ssize_t at) {
    const stores_t *stores = batch;
    const Py_buffer *slot = &stores->slots[at], *piece = &stores->pieces[stores->chunks[at].first];
    Py_ssize_t count = stores->chunks[at].end - stores->chunks[at].first;
    stores->checksums[at] = count == 1 ? store_run(slot->buf, piece->buf, (size_t)slot->len, stores->stream)
                                        : store_runs(slot->buf, piece, count, (size_t)slot->len);
}

static PyObject *fill(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *slots, *values, *call;
    Py_buffer checksums;
    int stream;
    if (!PyArg_ParseTuple(arguments, "OOw*pO", &slots, &values, &checksums, &stream, &call))
        return NULL;
    PyObject *result = NULL;
    buffers_t targets = {NULL, 0, 0}, pieces = {NULL, 0, 0};
    chunk_t *chunks = NULL;
    Py_ssize_t count = PyList_Check(slots) ? PyList_GET_SIZE(slots) : -1;
    if (count < 0 || !PyList_Check(values) || PyList_GET_SIZE(values) != count || checksums.len != 8 * count) {
        PyErr_SetString(PyExc_ValueError, "slots and values are to be lists, as long as checksums");
        goto done;
    }
    chunks = PyMem_Calloc((size_t)count + 1, sizeof *chunks);
    if (!chunks) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *value = PyList_GET_ITEM(values, at);
        Py_buffer *slot = hold(&targets, PyList_GET_ITEM(slots, at), PyBUF_WRITABLE);
        if (!slot)
            goto done;
        if (slot->len <= HASH_LEAST || !(PyList_Check(value) || PyTuple_Check(value))) {
            PyErr_SetString(PyExc_ValueError, "slots of more than 240 bytes, and lists of buffers, are due");
            goto done;
        }
        chunks[at].first = pieces.count;
        Py_ssize_t nbytes = 0;
        for (Py_ssize_t place = 0; place < PySequence_Fast_GET_SIZE(value); place++) {
            Py_buffer *piece = hold(&pieces, PySequence_Fast_GET_ITEM(value, place), PyBUF_SIMPLE);
            if (!piece)
                goto done;
            nbytes += piece->len;
        }
        chunks[at].end = pieces.count;
        if (!sized(slot, nbytes, "slot"))
            goto done;
    }
    stores_t stores = {targets.held, pieces.held, chunks, checksums.buf, stream};
    if (run_job(fill_one, &stores, count, call, 0))
        result = Py_NewRef(Py_None);
done:
    let_go(&targets), let_go(&pieces);
    PyMem_Free(chunks);
    PyBuffer_Release(&checksums);
    return result;
}

/* -- receive ----------------------------------------------------------------------------------------------------- */

#define STEP_NBYTES (256 << 10) /* most bytes of one system call: they are hashed before they leave the cache */
#define STEP_PIECES 256

enum { FULL, LATE, GONE, LOST }; /* how a call ended: stream.py */

/* What is being filled, and how far it is. */
typedef struct {
    const chunk_t *chunks;
    const Py_buffer *pieces;
    uint64_t *checksums; /* NULL: not wanted */
    Py_ssize_t count, chunk, piece;
    size_t filled; /* of the piece */
    hasher_t hasher;
} filling_t;

/* Note that n more bytes are in place: hash them, and go on to where the next one belongs. */
static void advance(filling_t *filling, size_t n) {
    while (filling->chunk < filling->count) {
        const chunk_t *chunk = &filling->chunks[filling->chunk];
        for (; filling->piece < chunk->end; filling->piece++, filling->filled = 0) {
            const Py_buffer *piece = &filling->pieces[filling->piece];
            size_t step = (size_t)piece->len - filling->filled;
            if (step > n)
                step = n;
            if (filling->checksums && step)
                hasher_feed(&filling->hasher, (const uint8_t *)piece->buf + filling->filled, step);
            filling->filled += step, n -= step;
            if (filling->filled < (size_t)piece->len)
                return;
        }
        if (filling->checksums) {
            filling->checksums[filling->chunk] = hasher_end(&filling->hasher);
            hasher_begin(&filling->hasher);
        }
        if (++filling->chunk < filling->count)
            filling->piece = filling->chunks[filling->chunk].first;
    }
}

/* The places of the next bytes. Chunks lie behind each other among the pieces. */
static size_t next_places(const filling_t *filling, struct iovec *places) {
    size_t count = 0, nbytes = 0, skip = filling->filled;
    Py_ssize_t end = filling->chunks[filling->count - 1].end;
    for (Py_ssize_t at = filling->piece; at < end && count < STEP_PIECES && nbytes < STEP_NBYTES; at++, skip = 0) {
        size_t step = (size_t)filling->pieces[at].len - skip;
        if (!step)
            continue;
        if (step > STEP_NBYTES - nbytes)
            step = STEP_NBYTES - nbytes;
        places[count].iov_base = (char *)filling->pieces[at].buf + skip, places[count++].iov_len = step;
        nbytes += step;
    }
    return count;
}

/* Fill it all from a socket. Watches for bytes as long as they come within `watch_ns`; then sleeps until they come. Runs
   without the interpreter's lock, and comes back with EINTR when a signal has to be seen to. */
static int receive_all(int fd, filling_t *filling, int64_t deadline_ns, int64_t watch_ns, int *slept) {
    struct iovec places[STEP_PIECES];
    int64_t came_ns = monotonic_ns();
    while (filling->chunk < filling->count) {
        struct msghdr message = {.msg_iov = places, .msg_iovlen = next_places(filling, places)};
        ssize_t got = recvmsg(fd, &message, *slept ? MSG_WAITALL : MSG_DONTWAIT);
        if (got == 0)
            return GONE;
        if (got > 0) {
            advance(filling, (size_t)got);
            if (filling->chunk == filling->count)
                break;
        } else if (errno != EAGAIN && errno != EWOULDBLOCK) {
            return LOST;
        }
        int64_t now_ns = monotonic_ns();
        if (now_ns >= deadline_ns)
            return LATE;
        if (got > 0)
            came_ns = now_ns;
        else if (now_ns - came_ns < watch_ns)
            sched_yield();
        else
            *slept = 1; /* the socket's own time limit ends each wait */
    }
    return FULL;
}

PyDoc_STRVAR(receive_doc, "receive(fd, ahead, chunks, checksums, deadline_s, watch_s) -> (int, int, bool)\n\n"
                          "Fill chunks of more than 240 bytes, each a list or tuple of writable buffers: from `ahead`\n"
                          "first, then from a socket. Writes their checksums, unless that is None. watch_s: watch so long\n"
                          "for bytes before sleeping. Returns 0 (full), 1 (late), 2 (the peer is gone) or the negative\n"
                          "error number; how many chunks are full; and whether it slept.");

static PyObject *receive(PyObject *module, PyObject *arguments) {
    (void)module;
    int fd;
    Py_buffer ahead, sums = {.obj = NULL, .buf = NULL};
    PyObject *chunks, *checksums;
    double deadline_s, watch_s;
    if (!PyArg_ParseTuple(arguments, "iy*O!Odd", &fd, &ahead, &PyList_Type, &chunks, &checksums, &deadline_s, &watch_s))
        return NULL;
    PyObject *result = NULL;
    buffers_t pieces = {NULL, 0, 0};
    Py_ssize_t count = PyList_GET_SIZE(chunks);
    chunk_t *places = PyMem_Calloc((size_t)count + 1, sizeof *places);
    if (!places) {
        PyErr_NoMemory();
        goto done;
    }
    if (checksums != Py_None && (PyObject_GetBuffer(checksums, &sums, PyBUF_WRITABLE) < 0 ||
                                 !sized(&sums, 8 * count, "checksums")))
        goto done;
    if (!hold_targets(&pieces, chunks, 0, count, places))
        goto done;
    size_t total = 0;
    for (Py_ssize_t at = 0; at < count; at++) {
        size_t nbytes = 0;
        for (Py_ssize_t place = places[at].first; place < places[at].end; place++)
            nbytes += (size_t)pieces.held[place].len;
        if (nbytes <= HASH_LEAST) {
            PyErr_SetString(PyExc_ValueError, "chunks: each is to be of more than 240 bytes");
            goto done;
        }
        total += nbytes;
    }
    filling_t filling = {places, pieces.held, sums.buf, count, 0, 0, 0, {{0}, 0, 0, {0}}};
    hasher_begin(&filling.hasher);
    struct iovec next[STEP_PIECES];
    const char *from = ahead.buf;
    for (size_t left = (size_t)ahead.len < total ? (size_t)ahead.len : total; left;) {
        size_t pieces_now = next_places(&filling, next), moved = 0;
        for (size_t at = 0; at < pieces_now && left; at++) {
            size_t step = next[at].iov_len < left ? next[at].iov_len : left;
            memcpy(next[at].iov_base, from, step);
            from += step, left -= step, moved += step;
        }
        advance(&filling, moved);
    }
    int64_t deadline_ns = deadline_s < 9e9 ? (int64_t)(deadline_s * 1e9) : INT64_MAX;
    int end = FULL, slept = 0, problem = 0;
    while (filling.chunk < count) {
        PyThreadState *state = PyEval_SaveThread();
        end = receive_all(fd, &filling, deadline_ns, (int64_t)(watch_s * 1e9), &slept);
        problem = errno;
        PyEval_RestoreThread(state);
        if (end != LOST || problem != EINTR)
            break;
        if (PyErr_CheckSignals() < 0)
            goto done;
    }
    result = Py_BuildValue("(inO)", end == LOST ? -problem : end, filling.chunk, slept ? Py_True : Py_False);
done:
    let_go(&pieces);
    PyMem_Free(places);
    PyBuffer_Release(&sums), PyBuffer_Release(&ahead);
    return result;
}

/* -- copy -------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(copy_doc, "copy(target, source, stream)\n\nCopy bytes; stream: past the cache.");

static PyObject *copy(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "copy(target, source, stream)");
        return NULL;
    }
    int stream = PyObject_IsTrue(arguments[2]);
    Py_buffer target, source;
    if (stream < 0 || PyObject_GetBuffer(arguments[0], &target, PyBUF_WRITABLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(arguments[1], &source, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&target);
        return NULL;
    }
    PyObject *result = NULL;
    if (sized(&target, source.len, "target")) {
        PyThreadState *state = source.len >= WITHOUT_GIL_NBYTES ? PyEval_SaveThread() : NULL;
        copy_bytes(target.buf, source.buf, (size_t)source.len, stream);
        if (state)
            PyEval_RestoreThread(state);
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&target), PyBuffer_Release(&source);
    return result;
}

/* -- quickest ----------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(quickest_doc, "quickest(nbytes) -> (str | None, str | None)\n\n"
                           "By which way so many bytes are copied past the cache, and copied and hashed: 'fetched', 'pages' or\n"
                           "'plain', whichever was the quickest of late; None: not known yet, or there is only one.");

static PyObject *quickest(PyObject *module, PyObject *argument) {
    (void)module;
    size_t nbytes = PyLong_AsSize_t(argument);
    if (nbytes == (size_t)-1 && PyErr_Occurred())
        return NULL;
#if defined(__x86_64__)
    static const char *const names[WAYS] = {"fetched", "pages", "plain"};
    int large = nbytes >= LARGE_NBYTES;
    int copy_way = __atomic_load_n(&copying[large].best, __ATOMIC_RELAXED);
    int way = __atomic_load_n(&storing[large].best, __ATOMIC_RELAXED);
    return Py_BuildValue("(zz)", copy_way < 0 ? NULL : names[copy_way], way < 0 ? NULL : names[way]);
#else
    return Py_BuildValue("(zz)", NULL, NULL);
#endif
}

PyDoc_STRVAR(vectors_doc, "vectors(most) -> int\n\n"
                          "Use vectors of at most so many bits from now on: 512, 256, or 0 for none. Returns the widest in\n"
                          "use, which is less where the processor has less.");

static void use_vectors(long most) {
    (void)most;
#if defined(__x86_64__)
    has_avx2 = most >= 256 && __builtin_cpu_supports("avx2");
    has_avx512 = most >= 512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vbmi2");
#endif
}

static PyObject *vectors(PyObject *module, PyObject *most) {
    (void)module;
    long bits = PyLong_AsLong(most);
    if (bits == -1 && PyErr_Occurred())
        return NULL;
    use_vectors(bits);
#if defined(__x86_64__)
    return PyLong_FromLong(has_avx512 ? 512 : has_avx2 ? 256 : 0);
#else
    return PyLong_FromLong(0);
#endif
}

/* -- one chunk --------------------------------------------------------------------------------------------------- */

/* The mapped memory of one node, for lookups and reads of one chunk: they cost less than passing it as arguments. */
enum {
    RECORDS, INDEX, OTHER_INDEX, ACTIVE, ARENA, ACCESSED, FREQUENCY, INSERTED, CHECKSUM, DEPTH, PARENT, CHILDREN,
    NAMESPACE, SIDE, COUNTS, BUFFERS
};
enum { PUBLISHED, TAKEN }; /* COUNTS: rows that were published, ever, and those of them that are in the index by now */

typedef struct {
    PyObject_HEAD
    Py_buffer held[BUFFERS];
    double made_at_s, ticks_per_s;
} reader_t;

static void reader_free(reader_t *reader) {
    for (int at = 0; at < BUFFERS; at++)
        if (reader->held[at].obj)
            PyBuffer_Release(&reader->held[at]);
    PyTypeObject *type = Py_TYPE(reader);
    type->tp_free(reader);
    Py_DECREF(type);
}

static size_t reader_rows(const reader_t *reader) { return (size_t)reader->held[RECORDS].len / sizeof(record_t); }

static PyObject *reader_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    (void)names;
    PyObject *given[BUFFERS];
    double made_at_s, ticks_per_s;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOOOOOOOdd", &given[RECORDS], &given[INDEX], &given[OTHER_INDEX],
                          &given[ACTIVE], &given[ARENA], &given[ACCESSED], &given[FREQUENCY], &given[INSERTED],
                          &given[CHECKSUM], &given[DEPTH], &given[PARENT], &given[CHILDREN], &given[NAMESPACE],
                          &given[SIDE], &given[COUNTS], &made_at_s, &ticks_per_s))
        return NULL;
    reader_t *reader = (reader_t *)type->tp_alloc(type, 0);
    if (!reader)
        return NULL;
    reader->made_at_s = made_at_s, reader->ticks_per_s = ticks_per_s;
    for (int at = 0; at < BUFFERS; at++) {
        int flags = at <= OTHER_INDEX || at >= ACCESSED ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (PyObject_GetBuffer(given[at], &reader->held[at], flags) < 0) {
            Py_DECREF(reader);
            return NULL;
        }
    }
    const Py_buffer *held = reader->held;
    Py_ssize_t rows = (Py_ssize_t)reader_rows(reader);
    if (held[ACTIVE].len != 8 || held[INDEX].len != held[OTHER_INDEX].len || held[ACCESSED].len != 4 * rows ||
        held[FREQUENCY].len != 4 * rows || held[INSERTED].len != 4 * rows || held[CHECKSUM].len != 8 * rows ||
        held[DEPTH].len != 4 * rows || held[PARENT].len != 4 * rows || held[CHILDREN].len != 4 * rows ||
        held[NAMESPACE].len != 2 * rows ||
        held[SIDE].len == 0 || held[SIDE].len % (4 * WINDOW) || held[COUNTS].len != 16) {
        PyErr_SetString(PyExc_ValueError, "columns differ in length");
        Py_DECREF(reader);
        return NULL;
    }
    return (PyObject *)reader;
}

static uint32_t tick_of(const reader_t *reader) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double ticks = ((double)now.tv_sec + 1e-9 * (double)now.tv_nsec - reader->made_at_s) * reader->ticks_per_s;
    return ticks < 1 ? 1 : (uint32_t)ticks;
}

static uint64_t count_of(const reader_t *reader, int which) {
    return __atomic_load_n((const uint64_t *)reader->held[COUNTS].buf + which, __ATOMIC_ACQUIRE);
}

static int32_t probe_index(const reader_t *reader, const uint64_t *key, int64_t now, uint32_t *generation) {
    uint64_t active = __atomic_load_n((const uint64_t *)reader->held[ACTIVE].buf, __ATOMIC_ACQUIRE) & 1;
    const Py_buffer *index = &reader->held[active ? OTHER_INDEX : INDEX];
    return probe(reader->held[RECORDS].buf, reader_rows(reader), index->buf, (size_t)index->len / 4, key[0], key[1],
                 now, generation);
}

static int32_t *window_of(const reader_t *reader, const uint64_t *key) {
    return (int32_t *)reader->held[SIDE].buf +
           WINDOW * home_of(key[0], key[1], (size_t)reader->held[SIDE].len / (4 * WINDOW));
}

/* A row other than `own` that the side index names for this key, with its generation; -1 if there is none. */
static int32_t probe_side(const reader_t *reader, const uint64_t *key, int32_t own, uint32_t *generation) {
    const int32_t *window = window_of(reader, key);
    for (int at = 0; at < WINDOW; at++) {
        int32_t row = __atomic_load_n(&window[at], __ATOMIC_ACQUIRE) - FIRST;
        if (row < 0 || (size_t)row >= reader_rows(reader) || row == own)
            continue;
        const record_t *record = (const record_t *)reader->held[RECORDS].buf + row;
        *generation = __atomic_load_n(&record->generation, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(&record->key_lo, __ATOMIC_RELAXED) == key[1] &&
            __atomic_load_n(&record->key_hi, __ATOMIC_RELAXED) == key[0])
            return row;
    }
    return -1;
}

/* A ready row that the side index names for this key, not expired at tick `now` (now < 0: or expired), with its
   generation; -1 if there is none. Another row beside it may be one that somebody is about to take back. */
static int32_t probe_published(const reader_t *reader, const uint64_t *key, int64_t now, uint32_t *generation) {
    const int32_t *window = window_of(reader, key);
    for (int at = 0; at < WINDOW; at++) {
        int32_t entry = __atomic_load_n(&window[at], __ATOMIC_ACQUIRE);
        if (!is_row(entry, reader_rows(reader)))
            continue;
        const record_t *record = (const record_t *)reader->held[RECORDS].buf + (entry - FIRST);
        if (is_of(record, key[0], key[1], generation) && is_ready(*generation) && is_usable(record, *generation, now))
            return entry - FIRST;
    }
    return -1;
}

/* Row of a 16-byte key that is ready, or -1; -2 with an exception when it is no key. See Table.look_one. */
static int32_t row_of(reader_t *reader, PyObject *key, uint32_t tick, uint32_t *generation) {
    uint64_t halves[2];
    if (!PyBytes_Check(key) || PyBytes_GET_SIZE(key) != sizeof halves) {
        PyErr_SetString(PyExc_ValueError, "key: 16 bytes are due");
        return -2;
    }
    memcpy(halves, PyBytes_AS_STRING(key), sizeof halves);
    uint64_t taken = count_of(reader, TAKEN);
    int32_t row = probe_index(reader, halves, tick, generation);
    if (row >= 0 || count_of(reader, PUBLISHED) == taken)
        return row;
    row = probe_published(reader, halves, tick, generation);
    if (row >= 0)
        return row;
    return probe_index(reader, halves, tick, generation); /* it may have been taken in meanwhile */
}

static PyObject *reader_ready(PyObject *self, PyObject *key) {
    uint32_t generation;
    int32_t row = row_of((reader_t *)self, key, tick_of((reader_t *)self), &generation);
    return row == -2 ? NULL : PyBool_FromLong(row >= 0);
}

/* As reader_ready, and true also while somebody writes it. */
static PyObject *reader_known(PyObject *self, PyObject *key) {
    reader_t *reader = (reader_t *)self;
    uint32_t generation, tick = tick_of(reader);
    int32_t row = row_of(reader, key, tick, &generation);
    if (row == -2)
        return NULL;
    if (row < 0) {
        uint64_t halves[2];
        memcpy(halves, PyBytes_AS_STRING(key), sizeof halves);
        row = probe_index(reader, halves, -1, &generation);
        if (row >= 0) {
            const record_t *record = (const record_t *)reader->held[RECORDS].buf + row;
            uint32_t expires = __atomic_load_n(&record->expires, __ATOMIC_RELAXED);
            row = expires && expires <= tick ? -1 : row;
        }
    }
    return PyBool_FromLong(row >= 0);
}

static PyObject *reader_read(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    reader_t *reader = (reader_t *)self;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "read(key, target, stream_nbytes)");
        return NULL;
    }
    Py_ssize_t stream_nbytes = PyLong_AsSsize_t(arguments[2]);
    if (stream_nbytes == -1 && PyErr_Occurred())
        return NULL;
    uint32_t generation, tick = tick_of(reader);
    int32_t row = row_of(reader, arguments[0], tick, &generation);
    Py_buffer target;
    if (row == -2 || PyObject_GetBuffer(arguments[1], &target, PyBUF_WRITABLE) < 0)
        return NULL;
    int hit = 0;
    if (row >= 0) {
        const record_t *record = (const record_t *)reader->held[RECORDS].buf + row;
        uint64_t from = (uint64_t)__atomic_load_n(&record->page, __ATOMIC_RELAXED) << PAGE_SHIFT;
        uint64_t nbytes = __atomic_load_n(&record->nbytes, __ATOMIC_RELAXED);
        if (nbytes == (uint64_t)target.len && from + nbytes <= (uint64_t)reader->held[ARENA].len) {
            PyThreadState *state = target.len >= WITHOUT_GIL_ONE_NBYTES ? PyEval_SaveThread() : NULL;
            copy_bytes(target.buf, (const char *)reader->held[ARENA].buf + from, (size_t)nbytes,
                       target.len >= stream_nbytes);
            __atomic_thread_fence(__ATOMIC_ACQUIRE);
            hit = __atomic_load_n(&record->generation, __ATOMIC_RELAXED) == generation;
            if (state)
                PyEval_RestoreThread(state);
        }
        if (hit)
            note_read(&reader->held[ACCESSED], &reader->held[FREQUENCY], row, tick);
    }
    PyBuffer_Release(&target);
    return PyBool_FromLong(hit);
}

/* -- publish ----------------------------------------------------------------------------------------------------- */

enum { NOT_PUBLISHED, VISIBLE, EXISTS };

/* Make a row that is lent to us visible under its key.

   The key is written and the entry set before anything else, then others are looked for: of two that publish the same
   key at the same time at least one sees the other, and steps back. The generation becomes even last. Whoever is killed
   in between leaves an entry that names a row with an odd one, which the node clears away. */
static int publish_row(reader_t *reader, int32_t row, uint32_t generation, const uint64_t *key, uint64_t checksum,
                       uint32_t nbytes, uint32_t tick) {
    if (row < 0 || (size_t)row >= reader_rows(reader))
        return NOT_PUBLISHED;
    record_t *record = (record_t *)reader->held[RECORDS].buf + row;
    uint32_t other;
    if (!(generation & 1) || __atomic_load_n(&record->generation, __ATOMIC_ACQUIRE) != generation)
        return NOT_PUBLISHED; /* the loan has ended */
    __atomic_store_n(&record->key_hi, key[0], __ATOMIC_RELAXED);
    __atomic_store_n(&record->key_lo, key[1], __ATOMIC_RELAXED);
    int32_t *window = window_of(reader, key), at = 0;
    for (int32_t empty = 0; at < WINDOW; at++, empty = 0)
        if (__atomic_compare_exchange_n(&window[at], &empty, row + FIRST, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
            break;
    if (at == WINDOW)
        return NOT_PUBLISHED;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    int verdict = VISIBLE;
    int32_t rival = probe_side(reader, key, row, &other);
    if (rival >= 0)
        verdict = (other & 1) || !other ? NOT_PUBLISHED : EXISTS;
    else if ((rival = probe_index(reader, key, -1, &other)) >= 0) {
        const record_t *theirs = (const record_t *)reader->held[RECORDS].buf + rival;
        uint32_t expires = __atomic_load_n(&theirs->expires, __ATOMIC_RELAXED);
        verdict = expires && expires <= tick ? NOT_PUBLISHED : EXISTS;
    }
    if (verdict != VISIBLE) {
        __atomic_store_n(&window[at], 0, __ATOMIC_RELEASE);
        return verdict;
    }
    __atomic_store_n(&record->expires, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&record->nbytes, nbytes, __ATOMIC_RELAXED);
    __atomic_store_n((uint64_t *)reader->held[CHECKSUM].buf + row, checksum, __ATOMIC_RELAXED);
    __atomic_store_n((uint32_t *)reader->held[INSERTED].buf + row, tick, __ATOMIC_RELAXED);
    __atomic_store_n((uint32_t *)reader->held[ACCESSED].buf + row, tick, __ATOMIC_RELAXED);
    __atomic_store_n((uint32_t *)reader->held[FREQUENCY].buf + row, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&record->generation, generation + 1 ? generation + 1 : 2, __ATOMIC_RELEASE);
    __atomic_fetch_add((uint64_t *)reader->held[COUNTS].buf + PUBLISHED, 1, __ATOMIC_SEQ_CST);
    return VISIBLE;
}

static PyObject *reader_publish(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    reader_t *reader = (reader_t *)self;
    if (count != 5 || !PyList_Check(arguments[0]) || !PyList_Check(arguments[1]) ||
        PyList_GET_SIZE(arguments[0]) != PyList_GET_SIZE(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "publish(rows, generations, keys, checksums, nbytes)");
        return NULL;
    }
    unsigned long nbytes = PyLong_AsUnsignedLong(arguments[4]);
    if (nbytes == (unsigned long)-1 && PyErr_Occurred())
        return NULL;
    Py_buffer keys, checksums;
    if (PyObject_GetBuffer(arguments[2], &keys, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(arguments[3], &checksums, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&keys);
        return NULL;
    }
    Py_ssize_t rows = PyList_GET_SIZE(arguments[0]);
    PyObject *result = NULL;
    if (sized(&keys, 16 * rows, "keys") && sized(&checksums, 8 * rows, "checksums"))
        result = PyBytes_FromStringAndSize(NULL, rows);
    uint32_t tick = tick_of(reader);
    for (Py_ssize_t at = 0; result && at < rows; at++) {
        long row = PyLong_AsLong(PyList_GET_ITEM(arguments[0], at));
        unsigned long generation = PyLong_AsUnsignedLong(PyList_GET_ITEM(arguments[1], at));
        if (PyErr_Occurred()) {
            Py_CLEAR(result);
            break;
        }
        uint64_t key[2], checksum;
        memcpy(key, (const char *)keys.buf + 16 * at, sizeof key);
        memcpy(&checksum, (const char *)checksums.buf + 8 * at, sizeof checksum);
        int fits = row >= 0 && row <= INT32_MAX && generation <= UINT32_MAX && nbytes && nbytes <= UINT32_MAX;
        PyBytes_AS_STRING(result)[at] = (char)(fits ? publish_row(reader, (int32_t)row, (uint32_t)generation, key,
                                                                  checksum, (uint32_t)nbytes, tick)
                                                    : NOT_PUBLISHED);
    }
    PyBuffer_Release(&keys), PyBuffer_Release(&checksums);
    return result;
}

static PyObject *reader_store(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    reader_t *reader = (reader_t *)self;
    if (count != 6 || !PyBytes_Check(arguments[3]) || PyBytes_GET_SIZE(arguments[3]) != 16 ||
        !(PyList_Check(arguments[4]) || PyTuple_Check(arguments[4]))) {
        PyErr_SetString(PyExc_TypeError, "store(row, generation, start, key of 16 bytes, list of buffers, stream_nbytes)");
        return NULL;
    }
    long row = PyLong_AsLong(arguments[0]);
    unsigned long generation = PyLong_AsUnsignedLong(arguments[1]);
    size_t start = PyLong_AsSize_t(arguments[2]), nbytes = 0;
    Py_ssize_t stream_nbytes = PyLong_AsSsize_t(arguments[5]);
    if (PyErr_Occurred())
        return NULL;
    const Py_buffer *arena = &reader->held[ARENA];
    buffers_t pieces = {NULL, 0, 0};
    PyObject *result = NULL;
    for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(arguments[4]); at++) {
        Py_buffer *piece = hold(&pieces, PySequence_Fast_GET_ITEM(arguments[4], at), PyBUF_SIMPLE);
        if (!piece)
            goto done;
        nbytes += (size_t)piece->len;
    }
    if (arena->readonly || nbytes <= HASH_LEAST || nbytes > UINT32_MAX || start > (size_t)arena->len ||
        nbytes > (size_t)arena->len - start || row < 0 || row > INT32_MAX || generation > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "more than 240 bytes for a place in a writable arena are due");
        goto done;
    }
    uint64_t key[2];
    memcpy(key, PyBytes_AS_STRING(arguments[3]), sizeof key);
    char *to = (char *)arena->buf + start;
    PyThreadState *state = nbytes >= WITHOUT_GIL_ONE_NBYTES ? PyEval_SaveThread() : NULL;
    uint64_t checksum = pieces.count == 1 ? store_run(to, pieces.held->buf, nbytes, (Py_ssize_t)nbytes >= stream_nbytes)
                                          : store_runs(to, pieces.held, pieces.count, nbytes);
    if (state)
        PyEval_RestoreThread(state);
    int verdict = publish_row(reader, (int32_t)row, (uint32_t)generation, key, checksum, (uint32_t)nbytes,
                              tick_of(reader));
    result = Py_BuildValue("Ny#", PyBool_FromLong(verdict == VISIBLE), &checksum, (Py_ssize_t)sizeof checksum);
done:
    let_go(&pieces);
    return result;
}

/* -- look -------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(look_doc, "look(records, index, other_index, active, side, counts, keys, rows, generations, now)\n\n"
                       "As find, in the index that is in use; and what is not there among the ready rows that were\n"
                       "published since.");

static PyObject *look(PyObject *module, PyObject *arguments) {
    (void)module;
    reader_t reader = {.made_at_s = 0};
    Py_buffer *held = reader.held, keys, rows, generations;
    long long now;
    if (!PyArg_ParseTuple(arguments, "y*y*y*y*y*y*y*w*w*L", &held[RECORDS], &held[INDEX], &held[OTHER_INDEX],
                          &held[ACTIVE], &held[SIDE], &held[COUNTS], &keys, &rows, &generations, &now))
        return NULL;
    PyObject *result = NULL;
    size_t count = (size_t)keys.len / 16;
    if (sized(&keys, (Py_ssize_t)count * 16, "keys") && sized(&rows, (Py_ssize_t)count * 4, "rows") &&
        sized(&generations, (Py_ssize_t)count * 4, "generations") && sized(&held[ACTIVE], 8, "active") &&
        sized(&held[COUNTS], 16, "counts") && sized(&held[OTHER_INDEX], held[INDEX].len, "other_index")) {
        PyThreadState *state = count >= WITHOUT_GIL_KEYS ? PyEval_SaveThread() : NULL;
        const uint64_t *key = keys.buf;
        int32_t *found = rows.buf;
        uint32_t *seen = generations.buf;
        uint64_t taken = count_of(&reader, TAKEN);
        uint64_t active = __atomic_load_n((const uint64_t *)held[ACTIVE].buf, __ATOMIC_ACQUIRE) & 1;
        const Py_buffer *index = &held[active ? OTHER_INDEX : INDEX];
        find_all(held[RECORDS].buf, reader_rows(&reader), index->buf, (size_t)index->len / 4, key, count, now, found,
                 seen);
        if (count_of(&reader, PUBLISHED) != taken && (size_t)held[SIDE].len >= 4 * WINDOW) {
            for (size_t at = 0; at < count; at++) {
                if (found[at] >= 0)
                    continue;
                /* in this order: what is taken in meanwhile is in the index before it leaves the side index */
                found[at] = probe_published(&reader, &key[2 * at], now, &seen[at]);
                if (found[at] < 0)
                    found[at] = probe_index(&reader, &key[2 * at], now, &seen[at]);
            }
        }
        if (state)
            PyEval_RestoreThread(state);
        result = Py_NewRef(Py_None);
    }
    for (int at = 0; at < BUFFERS; at++)
        if (held[at].obj)
            PyBuffer_Release(&held[at]);
    PyBuffer_Release(&keys), PyBuffer_Release(&rows), PyBuffer_Release(&generations);
    return result;
}

/* -- settle ------------------------------------------------------------------------------------------------------ */

/* Whether a row is what its writer says: lent, published under this key, and not in the index. */
static int is_published(const reader_t *reader, int32_t row, size_t limit, const uint64_t *key, uint32_t nbytes,
                        uint16_t account) {
    if (row < 0 || (size_t)row >= limit || (size_t)row >= reader_rows(reader))
        return 0;
    const record_t *record = (const record_t *)reader->held[RECORDS].buf + row;
    uint32_t generation = __atomic_load_n(&record->generation, __ATOMIC_ACQUIRE);
    return generation && !(generation & 1) && record->nbytes == nbytes && record->key_hi == key[0] &&
           record->key_lo == key[1] && ((const int32_t *)reader->held[PARENT].buf)[row] == LENT &&
           ((const uint16_t *)reader->held[NAMESPACE].buf)[row] == account &&
           probe_index(reader, key, -1, &generation) < 0;
}

/* Enter a published row into the index, hang it below another, and take it out of the side index. Whether it got the
   entry of a removed row. */
static int settle_row(reader_t *reader, int32_t row, const uint64_t *key, int32_t parent, uint32_t depth) {
    uint64_t active = __atomic_load_n((const uint64_t *)reader->held[ACTIVE].buf, __ATOMIC_ACQUIRE) & 1;
    int32_t *index = reader->held[active ? OTHER_INDEX : INDEX].buf;
    size_t size = (size_t)reader->held[INDEX].len / 4, position = home_of(key[0], key[1], size);
    ((uint32_t *)reader->held[DEPTH].buf)[row] = depth;
    ((int32_t *)reader->held[PARENT].buf)[row] = parent;
    if (parent >= 0)
        ((int32_t *)reader->held[CHILDREN].buf)[parent]++;
    while (index[position] >= FIRST) /* there are two entries a row */
        position = position + 1 < size ? position + 1 : 0;
    int reused = index[position] == REMOVED;
    __atomic_store_n(&index[position], row + FIRST, __ATOMIC_RELEASE);
    int32_t *window = window_of(reader, key);
    for (int at = 0; at < WINDOW; at++)
        if (__atomic_load_n(&window[at], __ATOMIC_RELAXED) == row + FIRST)
            __atomic_store_n(&window[at], 0, __ATOMIC_RELEASE);
    return reused;
}

static PyObject *reader_settle(PyObject *self, PyObject *arguments) {
    reader_t *reader = (reader_t *)self;
    Py_buffer rows, keys;
    Py_ssize_t limit;
    unsigned int nbytes, depth;
    unsigned short account;
    int chained, parent;
    if (!PyArg_ParseTuple(arguments, "y*y*nIHpiI", &rows, &keys, &limit, &nbytes, &account, &chained, &parent, &depth))
        return NULL;
    Py_ssize_t count = rows.len / 4;
    PyObject *result = NULL;
    if (sized(&keys, 16 * count, "keys")) {
        const int32_t *row = rows.buf;
        const char *raw = keys.buf;
        uint64_t key[2];
        int ours = limit >= 0 && parent < (int64_t)reader_rows(reader), reused = 0;
        for (Py_ssize_t at = 0; ours && at < count; at++) {
            memcpy(key, raw + 16 * at, sizeof key);
            ours = is_published(reader, row[at], (size_t)limit, key, nbytes, account);
        }
        for (Py_ssize_t at = 0; ours && at < count; at++) {
            memcpy(key, raw + 16 * at, sizeof key);
            int32_t above = !chained ? -1 : at ? row[at - 1] : parent;
            reused += settle_row(reader, row[at], key, above, chained ? depth + (uint32_t)at : 0);
        }
        result = PyLong_FromLong(ours ? reused : -1);
    }
    PyBuffer_Release(&rows), PyBuffer_Release(&keys);
    return result;
}

static PyMethodDef reader_methods[] = {
    {"ready", reader_ready, METH_O, "ready(key) -> bool: whether the chunk of a 16-byte key could be read now."},
    {"known", reader_known, METH_O, "known(key) -> bool: whether it is here, or somebody is writing it."},
    {"read", (PyCFunction)(void (*)(void))reader_read, METH_FASTCALL,
     "read(key, target, stream_nbytes) -> bool: copy the chunk; targets of stream_nbytes and more past the cache."},
    {"publish", (PyCFunction)(void (*)(void))reader_publish, METH_FASTCALL,
     "publish(rows, generations, keys, checksums, nbytes) -> bytes: make lent rows visible whose slots are written. For\n"
     "each 1 when it is, 2 when another row has that key, 0 when the node must do it."},
    {"store", (PyCFunction)(void (*)(void))reader_store, METH_FASTCALL,
     "store(row, generation, start, key, pieces, stream_nbytes) -> (bool, bytes): copy a chunk of more than 240 bytes into\n"
     "the slot of a lent row, and make it visible. Whether it is (else as `publish`), and its checksum."},
    {"settle", reader_settle, METH_VARARGS,
     "settle(rows, keys, limit, nbytes, account, chained, parent, depth) -> int: enter published rows into the index; of\n"
     "a chain, the first below `parent` and at `depth`. For the table's one writer. Returns how many got entries of removed\n"
     "rows; -1, and nothing is changed, when one of them is not what it should be."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_new, (void *)reader_new},
    {Py_tp_dealloc, (void *)reader_free},
    {Py_tp_methods, reader_methods},
    {Py_tp_doc, "Reader(records, index, other_index, active, arena, accessed, frequency, inserted, checksum, depth,\n"
                          "parent, children, namespace, side, counts, made_at_s, ticks_per_s)"},
    {0, NULL},
};

static PyType_Spec reader_spec = {"raykv.memory.native._native.Reader", sizeof(reader_t), 0, Py_TPFLAGS_DEFAULT, reader_slots};

/* -- module ------------------------------------------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"find", find, METH_VARARGS, find_doc},
    {"look", look, METH_VARARGS, look_doc},
    {"enter", enter, METH_VARARGS, enter_doc},
    {"check", check, METH_VARARGS, check_doc},
    {"sort_out", sort_out, METH_VARARGS, sort_out_doc},
    {"survey", survey, METH_VARARGS, survey_doc},
    {"chain", chain, METH_VARARGS, chain_doc},
    {"note_slots", note_slots, METH_VARARGS, note_slots_doc},
    {"add_up", add_up, METH_VARARGS, add_up_doc},
    {"read", read_chunks, METH_VARARGS, read_doc},
    {"hold", hold_rows, METH_VARARGS, hold_doc},
    {"wrap", (PyCFunction)(void (*)(void))wrap, METH_FASTCALL, wrap_doc},
    {"fill", fill, METH_VARARGS, fill_doc},
    {"receive", receive, METH_VARARGS, receive_doc},
    {"copy", (PyCFunction)(void (*)(void))copy, METH_FASTCALL, copy_doc},
    {"share", share, METH_O, "share(job): copy chunks of a batch of `read` or `fill` until none is left to begin."},
    {"quickest", quickest, METH_O, quickest_doc},
    {"vectors", vectors, METH_O, vectors_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Compiled loops; see raykv/memory/native.py.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    use_vectors(512);
    PyObject *module = PyModule_Create(&definition), *reader = PyType_FromSpec(&reader_spec);
    if (!module || !reader || PyModule_AddObjectRef(module, "Reader", reader) < 0)
        Py_CLEAR(module);
    Py_XDECREF(reader);
    return module;
}
