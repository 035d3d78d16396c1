/* Checksums, and copying with the checksum in the same pass.

   The checksum is xxh3-64 (seed 0) of more than HASH_LEAST bytes, as in the xxhash package. A small part of the bytes
   is hashed and copied, then the next part. So each part is in the CPU cache when it is used for the second time. */

#include "native.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define STRIPES_A_BLOCK 16
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

/* Load a 64-bit number. The processor must be little-endian, as for the chunk table. */
static inline uint64_t read64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
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

/* Hash blocks. If `to` is not NULL, also copy the bytes there with streaming stores; `to` must be a multiple of 32. */
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
#endif

static void hash_begin(uint64_t *lanes) {
    const uint64_t start[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(lanes, start, sizeof start);
}

static void hash_blocks(uint64_t *lanes, const uint8_t *from, size_t count) {
#if defined(__x86_64__)
    if (has_avx2) {
        blocks_avx2(lanes, from, count, NULL);
        return;
    }
#endif
    blocks_plain(lanes, from, count);
}

/* Hash the last `left` bytes (1 to HASH_BLOCK) of a value of `nbytes` bytes. `tail` points to these bytes. Returns the
   checksum of the value. The STRIPE bytes before `tail + left` must be readable. */
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

/* -- bytes that arrive in parts ----------------------------------------------------------------------------------- */

/* The last bytes of a part stay in `hasher_t.tail`, because `hash_tail` must hash them if no part follows. In
   `hasher_t.tail` they come after the STRIPE bytes that were hashed last. */

void hasher_begin(hasher_t *hasher) {
    hash_begin(hasher->lanes);
    hasher->nbytes = hasher->pending = 0;
}

void hasher_feed(hasher_t *hasher, const uint8_t *from, size_t n) {
    uint8_t *pending = hasher->tail + STRIPE;
    hasher->nbytes += n;
    if (hasher->pending + n > HASH_BLOCK) {
        if (hasher->pending) {
            size_t more = HASH_BLOCK - hasher->pending;
            memcpy(pending + hasher->pending, from, more);
            hash_blocks(hasher->lanes, pending, 1);
            memcpy(hasher->tail, pending + HASH_BLOCK - STRIPE, STRIPE);
            from += more, n -= more, hasher->pending = 0;
        }
        size_t whole = (n - 1) / HASH_BLOCK * HASH_BLOCK;
        if (whole) {
            hash_blocks(hasher->lanes, from, whole / HASH_BLOCK);
            memcpy(hasher->tail, from + whole - STRIPE, STRIPE);
            from += whole, n -= whole;
        }
    }
    memcpy(pending + hasher->pending, from, n);
    hasher->pending += n;
}

uint64_t hasher_end(hasher_t *hasher) {
    return hash_tail(hasher->lanes, hasher->tail + STRIPE, hasher->pending, hasher->nbytes);
}

/* -- copying with the checksum ------------------------------------------------------------------------------------ */

#define TURN (16 * HASH_BLOCK) /* number of bytes to hash before they are copied: few enough for the L1 cache */

#if defined(__x86_64__)
/* Do the work of `store_blocks` with streaming stores. Returns the number of bytes copied. */
__attribute__((target("avx2"))) static size_t store_streamed(uint64_t *lanes, char *to, const char *from, size_t blocks,
                                                             int way) {
    size_t done = 0;
    if (way == PAGES) {
        for (; done + GROUP <= blocks * HASH_BLOCK; done += GROUP) {
            stream_group(to + done, from + done);
            blocks_avx2(lanes, (const uint8_t *)from + done, GROUP / HASH_BLOCK, NULL); /* `from` is cached now */
        }
    }
    blocks_avx2(lanes, (const uint8_t *)from + done, blocks - done / HASH_BLOCK, (uint8_t *)to + done);
    _mm_sfence();
    return blocks * HASH_BLOCK;
}
#endif

/* Copy whole blocks and hash them in the same pass. The source is read from memory only once. */
static void store_blocks(uint64_t *lanes, char *to, const char *from, size_t blocks, int stream) {
    size_t nbytes = blocks * HASH_BLOCK, done = 0;
    trial_t trial = {NULL, PLAIN, nbytes, 0};
#if defined(__x86_64__)
    if (stream && has_avx2 && ((uintptr_t)to & 31) == 0) {
        trial = begin_trial(1, nbytes);
        if (trial.way != PLAIN)
            done = store_streamed(lanes, to, from, blocks, trial.way);
    }
#else
    (void)stream;
#endif
    for (size_t turn; done < nbytes; done += turn) {
        turn = nbytes - done < TURN ? nbytes - done : TURN;
        hash_blocks(lanes, (const uint8_t *)from + done, turn / HASH_BLOCK);
        memcpy(to + done, from + done, turn);
    }
    end_trial(trial);
}

/* Copy pieces one after another into `to`. Returns the checksum of all bytes. If all bytes before a piece are hashed,
   the whole blocks of the piece are hashed during the copy. Other bytes are hashed in the target after their copy. */
static uint64_t store_pieces(char *to, const Py_buffer *pieces, Py_ssize_t count, size_t nbytes, int stream) {
    uint64_t lanes[8];
    hash_begin(lanes);
    size_t filled = 0, hashed = 0;
    for (Py_ssize_t at = 0; at < count; at++) {
        const char *from = pieces[at].buf;
        size_t left = (size_t)pieces[at].len, end = filled + left;
        if (hashed == filled && left) { /* leave the last 1 to HASH_BLOCK bytes of the value for `hash_tail` */
            size_t whole = (end == nbytes ? left - 1 : left) / HASH_BLOCK;
            store_blocks(lanes, to + filled, from, whole, stream);
            from += whole * HASH_BLOCK, left -= whole * HASH_BLOCK;
            hashed = filled += whole * HASH_BLOCK;
        }
        memcpy(to + filled, from, left);
        filled = end;
        size_t blocks = (filled == nbytes ? filled - hashed - (filled > hashed) : filled - hashed) / HASH_BLOCK;
        hash_blocks(lanes, (const uint8_t *)to + hashed, blocks);
        hashed += blocks * HASH_BLOCK;
    }
    return hash_tail(lanes, (const uint8_t *)to + hashed, nbytes - hashed, nbytes);
}

typedef struct {
    const chunks_t *slots, *values;
    uint64_t *checksums;
    int stream;
} stores_t;

static void fill_one(const void *batch, Py_ssize_t at) {
    const stores_t *stores = batch;
    const chunk_t *value = &stores->values->all[at];
    const Py_buffer *slot = &stores->slots->pieces[at], *pieces = &stores->values->pieces[value->first];
    stores->checksums[at] = store_pieces(slot->buf, pieces, value->end - value->first, value->nbytes, stores->stream);
}

PyObject *fill(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *slot_list, *value_list, *call, *result = NULL;
    Py_buffer checksums;
    int stream;
    if (!PyArg_ParseTuple(arguments, "OOw*pO", &slot_list, &value_list, &checksums, &stream, &call))
        return NULL;
    chunks_t slots = {0}, values = {0};
    if (!hold_chunks(&slots, slot_list, PyBUF_WRITABLE, HASH_LEAST + 1) ||
        !hold_chunks(&values, value_list, PyBUF_SIMPLE, HASH_LEAST + 1))
        goto done;
    if (values.count != slots.count || slots.held != slots.count || checksums.len != 8 * slots.count) {
        PyErr_SetString(PyExc_ValueError, "slots, values and checksums differ in length");
        goto done;
    }
    for (Py_ssize_t at = 0; at < slots.count; at++)
        if (!sized(&slots.pieces[at], (Py_ssize_t)values.all[at].nbytes, "slot"))
            goto done;
    stores_t stores = {&slots, &values, checksums.buf, stream};
    if (run_job(fill_one, &stores, slots.count, call, 0))
        result = Py_NewRef(Py_None);
done:
    let_go(&slots), let_go(&values);
    PyBuffer_Release(&checksums);
    return result;
}
