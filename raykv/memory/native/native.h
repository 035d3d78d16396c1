/* Declarations for all C files. The C files contain the loops that take the most time: to look up many keys, to copy
   many chunks out of the arena and into the arena, to receive many chunks from a socket. The Python modules contain the
   same loops in Python, and document them.

   The loops check what they read from shared memory. A row or an offset outside the buffers is a miss. */

#ifndef RAYKV_NATIVE_H
#define RAYKV_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define PAGE_SHIFT 12
#define HASH_LEAST 240                /* up to this number of bytes, xxh3 uses an algorithm that is missing here */
#define WITHOUT_GIL_NBYTES (32 << 10) /* a read of at least this size in total releases the GIL */
#define WITHOUT_GIL_ONE_NBYTES (256 << 10) /* a `read_one` of at least this size releases the GIL */
#define WITHOUT_GIL_KEYS 4096 /* a lookup of at least this many keys releases the GIL */

typedef struct {
    uint32_t generation, expires, page, nbytes;
    uint64_t key_hi, key_lo;
} record_t; /* layout.py: RECORD */

static inline int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#pragma GCC visibility push(hidden) /* other libraries must not see the names declared here */

/* -- module.c: the buffers of a call ------------------------------------------------------------------------------ */

typedef struct {
    const char *from;      /* where a read copies from; NULL means a miss */
    Py_ssize_t first, end; /* range of the chunk's buffers in `chunks_t.pieces` */
    size_t nbytes;
} chunk_t;

typedef struct {
    PyObject *list;
    chunk_t *all;
    Py_buffer *pieces;
    Py_ssize_t count, held, room; /* number of chunks; number of used `pieces`; number of allocated `pieces` */
} chunks_t;

int sized(const Py_buffer *buffer, Py_ssize_t nbytes, const char *name);
int hold_chunks(chunks_t *chunks, PyObject *list, int flags, size_t least);
void let_go(chunks_t *chunks);

/* -- copy.c ------------------------------------------------------------------------------------------------------- */

enum { FETCHED, PAGES, PLAIN, WAYS }; /* ways of a large copy; see stream_avx2 */

typedef struct {
    uint32_t begun, cost[WAYS]; /* number of tries; lowest cost of each way in picoseconds per byte, 0: not tried */
} choice_t;

typedef struct {
    choice_t *choice; /* NULL: this copy is not timed */
    int way;
    size_t nbytes;
    int64_t began_ns;
} trial_t;

#define GROUP (4 * 4096) /* bytes that `stream_group` copies */

extern int has_avx2;
int use_avx2(int wanted);
void copy_bytes(char *to, const char *from, size_t n, int stream);
void stream_group(char *to, const char *from);
trial_t begin_trial(int hashed, size_t nbytes);
void end_trial(trial_t trial);
int run_job(void (*copy)(const void *, Py_ssize_t), const void *batch, Py_ssize_t count, PyObject *call, int keep_lock);
PyObject *avx2(PyObject *module, PyObject *wanted);
PyObject *share(PyObject *module, PyObject *job);

/* -- hash.c ------------------------------------------------------------------------------------------------------- */

#define STRIPE 64
#define HASH_BLOCK (16 * STRIPE)

typedef struct {
    uint64_t lanes[8];
    size_t nbytes, pending;
    uint8_t tail[STRIPE + HASH_BLOCK];
} hasher_t; /* the state of a checksum over bytes that arrive in parts */

void hasher_begin(hasher_t *hasher);
void hasher_feed(hasher_t *hasher, const uint8_t *from, size_t n);
uint64_t hasher_end(hasher_t *hasher);
PyObject *fill(PyObject *module, PyObject *arguments);

/* -- probe.c ------------------------------------------------------------------------------------------------------ */

int32_t probe(const record_t *records, size_t rows, const int32_t *index, size_t size, const uint64_t *key, int64_t now,
              uint32_t *generation);
PyObject *find(PyObject *module, PyObject *arguments);
PyObject *enter(PyObject *module, PyObject *arguments);

/* -- reader.c, receive.c ------------------------------------------------------------------------------------------ */

extern PyType_Spec reader_spec;
PyObject *receive(PyObject *module, PyObject *arguments);

#pragma GCC visibility pop
#endif
