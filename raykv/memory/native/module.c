/* The module, and the buffers of its calls. The only state between calls is the choice of copy ways (copy.c). */

#include "native.h"

int sized(const Py_buffer *buffer, Py_ssize_t nbytes, const char *name) {
    if (buffer->len == nbytes)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s: %zd bytes where %zd are needed", name, buffer->len, nbytes);
    return 0;
}

Py_buffer *hold(buffers_t *buffers, PyObject *object, int flags) {
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

/* Hold the pieces of one chunk, a buffer or a list or tuple of buffers. Adds the chunk's length to `nbytes`. */
int hold_chunk(buffers_t *pieces, PyObject *chunk, int flags, chunk_t *place, size_t *nbytes) {
    int many = PyList_Check(chunk) || PyTuple_Check(chunk);
    Py_ssize_t count = many ? PySequence_Fast_GET_SIZE(chunk) : 1;
    place->first = pieces->count;
    for (Py_ssize_t at = 0; at < count; at++) {
        Py_buffer *piece = hold(pieces, many ? PySequence_Fast_GET_ITEM(chunk, at) : chunk, flags);
        if (!piece)
            return 0;
        *nbytes += (size_t)piece->len;
    }
    place->end = pieces->count;
    return 1;
}

void let_go(buffers_t *buffers) {
    while (buffers->count)
        PyBuffer_Release(&buffers->held[--buffers->count]);
    PyMem_Free(buffers->held);
}

static PyMethodDef methods[] = {
    {"find", find, METH_VARARGS,
     "find(records, index, keys, rows, generations, now) -> bool\n\n"
     "Write the row of each key (or -1) and its generation. now < 0: rows in any state. False: the index has no empty\n"
     "entry, and what was written is not to be used."},
    {"enter", enter, METH_VARARGS,
     "enter(records, index, rows) -> int\n\n"
     "Put rows at the first free entries from their keys' homes on. Returns the number of removed entries that were used\n"
     "again; -1 when one of them is not a row, or the index is full."},
    {"read", read_chunks, METH_VARARGS,
     "read(records, arena, rows, generations, targets, hits, accessed, frequency, tick, stream, call)\n\n"
     "Copy the chunks of the rows into their targets (each a writable buffer, or a list or tuple of them), and set hits\n"
     "where the row was the same before and after. Counts the reads. call: called with a job for `share`; None: no\n"
     "helpers."},
    {"fill", fill, METH_VARARGS,
     "fill(slots, values, checksums, stream, call)\n\n"
     "Copy values, each a list or tuple of buffers, into slots of more than 240 bytes, and write their checksums. call:\n"
     "as for `read`."},
    {"receive", receive, METH_VARARGS,
     "receive(fd, ahead, chunks, checksums, deadline_s) -> (int, int)\n\n"
     "Fill chunks of more than 240 bytes, each a list or tuple of writable buffers: from `ahead` first, then from a\n"
     "socket. Writes their checksums, unless that is None. Returns 0 (full), 1 (late), 2 (closed by the peer) or the\n"
     "negative error number; and how many chunks are full."},
    {"share", share, METH_O, "share(job): copy chunks of a batch of `read` or `fill` until none is left to begin."},
    {"quickest", quickest, METH_O,
     "quickest(nbytes) -> (str | None, str | None)\n\n"
     "The way to copy this many bytes past the cache, and to copy and hash them: 'fetched', 'pages' or 'plain'. None:\n"
     "not known yet."},
    {"vectors", vectors, METH_O,
     "vectors(most) -> int: use vectors of at most this many bits from now on, 256 or 0. Returns the bits in use."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Compiled loops; see raykv/memory/native.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    use_vectors(256);
    PyObject *module = PyModule_Create(&definition), *reader = PyType_FromSpec(&reader_spec);
    if (!module || !reader || PyModule_AddObjectRef(module, "Reader", reader) < 0)
        Py_CLEAR(module);
    Py_XDECREF(reader);
    return module;
}
