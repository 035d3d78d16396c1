/* Receives chunks from a socket into their buffers, and computes their checksums; see transport/stream.py. */

#include "native.h"
#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* One system call receives at most STEP_NBYTES bytes, in at most STEP_PIECES buffers. The limits are small so that the
   bytes are still in the CPU cache when they are hashed. */
#define STEP_NBYTES (256 << 10)
#define STEP_PIECES 256

enum { FULL, LATE, CLOSED, FAILED }; /* how a call ends */

/* The chunks to fill, and the position of the next byte. */
typedef struct {
    const chunks_t *chunks;
    uint64_t *checksums; /* NULL if the caller wants none */
    Py_ssize_t chunk, piece;
    size_t filled; /* bytes of the piece that are filled */
    hasher_t hasher;
} filling_t;

/* Hash the n bytes that were received last, and move the position behind them. */
static void advance(filling_t *filling, size_t n) {
    const chunks_t *chunks = filling->chunks;
    while (filling->chunk < chunks->count) {
        for (; filling->piece < chunks->all[filling->chunk].end; filling->piece++, filling->filled = 0) {
            const Py_buffer *piece = &chunks->pieces[filling->piece];
            size_t step = (size_t)piece->len - filling->filled;
            step = step > n ? n : step;
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
        filling->chunk++;
    }
}

/* Set `places` to the parts of buffers that the next bytes will fill, in order. Returns the number of these parts. */
static size_t next_places(const filling_t *filling, struct iovec *places) {
    size_t count = 0, nbytes = 0, skip = filling->filled;
    const chunks_t *chunks = filling->chunks;
    for (Py_ssize_t at = filling->piece; at < chunks->held && count < STEP_PIECES && nbytes < STEP_NBYTES; at++, skip = 0) {
        size_t step = (size_t)chunks->pieces[at].len - skip;
        if (!step)
            continue;
        if (step > STEP_NBYTES - nbytes)
            step = STEP_NBYTES - nbytes;
        places[count].iov_base = (char *)chunks->pieces[at].buf + skip, places[count++].iov_len = step;
        nbytes += step;
    }
    return count;
}

/* Fill the first chunks with bytes that the caller received before. */
static void fill_from(filling_t *filling, const char *from, size_t left) {
    struct iovec places[STEP_PIECES];
    while (left && filling->chunk < filling->chunks->count) {
        size_t count = next_places(filling, places), moved = 0;
        for (size_t at = 0; at < count && left; at++) {
            size_t step = places[at].iov_len < left ? places[at].iov_len : left;
            memcpy(places[at].iov_base, from, step);
            from += step, left -= step, moved += step;
        }
        advance(filling, moved);
    }
}

/* Fill the remaining chunks from a socket. The deadline is checked after each wait for bytes, which lasts at most
   SO_RCVTIMEO. The caller must not hold the GIL. Returns FULL, LATE, CLOSED, or FAILED with `errno` set. If `errno` is
   EINTR, Python has to handle a signal, and the caller may call again. */
static int fill_from_socket(filling_t *filling, int fd, int64_t deadline_ns) {
    struct iovec places[STEP_PIECES];
    while (filling->chunk < filling->chunks->count) {
        struct msghdr message = {.msg_iov = places, .msg_iovlen = next_places(filling, places)};
        ssize_t got = recvmsg(fd, &message, MSG_WAITALL);
        if (got == 0)
            return CLOSED;
        if (got > 0) {
            advance(filling, (size_t)got);
            if (filling->chunk == filling->chunks->count)
                break;
        } else if (errno != EAGAIN && errno != EWOULDBLOCK) {
            return FAILED;
        }
        if (monotonic_ns() >= deadline_ns)
            return LATE;
    }
    return FULL;
}

PyObject *receive(PyObject *Py_UNUSED(module), PyObject *arguments) {
    int fd;
    Py_buffer ahead, sums = {.obj = NULL, .buf = NULL};
    PyObject *list, *checksums, *result = NULL;
    double deadline_s;
    if (!PyArg_ParseTuple(arguments, "iy*OOd", &fd, &ahead, &list, &checksums, &deadline_s))
        return NULL;
    chunks_t chunks = {0};
    if (!hold_chunks(&chunks, list, PyBUF_WRITABLE, HASH_LEAST + 1))
        goto done;
    if (checksums != Py_None && (PyObject_GetBuffer(checksums, &sums, PyBUF_WRITABLE) < 0 ||
                                 !sized(&sums, 8 * chunks.count, "checksums")))
        goto done;
    filling_t filling = {&chunks, sums.buf, 0, 0, 0, {{0}, 0, 0, {0}}};
    hasher_begin(&filling.hasher);
    fill_from(&filling, ahead.buf, (size_t)ahead.len);
    int64_t deadline_ns = deadline_s < 9e9 ? (int64_t)(deadline_s * 1e9) : INT64_MAX;
    int end = FULL, problem = 0;
    while (filling.chunk < chunks.count) {
        PyThreadState *state = PyEval_SaveThread();
        end = fill_from_socket(&filling, fd, deadline_ns);
        problem = errno;
        PyEval_RestoreThread(state);
        if (end != FAILED || problem != EINTR)
            break;
        if (PyErr_CheckSignals() < 0)
            goto done;
    }
    result = Py_BuildValue("(in)", end == FAILED ? -problem : end, filling.chunk);
done:
    let_go(&chunks);
    PyBuffer_Release(&sums), PyBuffer_Release(&ahead);
    return result;
}
