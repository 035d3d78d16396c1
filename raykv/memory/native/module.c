/* The Python module, and the buffers that its functions hold during a call. */

#include "native.h"

int sized(const Py_buffer *buffer, Py_ssize_t nbytes, const char *name) {
    if (buffer->len == nbytes)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s: %zd bytes where %zd are needed", name, buffer->len, nbytes);
    return 0;
}

static Py_buffer *hold(chunks_t *chunks, PyObject *object, int flags) {
    if (chunks->held == chunks->room) {
        Py_ssize_t room = chunks->room ? 2 * chunks->room : 64;
        Py_buffer *pieces = PyMem_Realloc(chunks->pieces, (size_t)room * sizeof *pieces);
        if (!pieces) {
            PyErr_NoMemory();
            return NULL;
        }
        chunks->pieces = pieces, chunks->room = room;
    }
    Py_buffer *piece = &chunks->pieces[chunks->held];
    if (PyObject_GetBuffer(object, piece, flags) < 0)
        return NULL;
    chunks->held++;
    return piece;
}

/* Hold the buffers of a list of chunks. Each chunk is a buffer, or a list or tuple of buffers. Returns 0 with an
   exception if a chunk has another type, or is shorter than `least`. The caller must call `let_go` in any case. */
int hold_chunks(chunks_t *chunks, PyObject *list, int flags, size_t least) {
    if (!(chunks->list = PySequence_Fast(list, "chunks: not a sequence")))
        return 0;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(chunks->list);
    if (!(chunks->all = PyMem_Calloc((size_t)count + 1, sizeof *chunks->all))) {
        PyErr_NoMemory();
        return 0;
    }
    for (; chunks->count < count; chunks->count++) {
        chunk_t *chunk = &chunks->all[chunks->count];
        PyObject *object = PySequence_Fast_GET_ITEM(chunks->list, chunks->count);
        int many = PyList_Check(object) || PyTuple_Check(object);
        Py_ssize_t parts = many ? PySequence_Fast_GET_SIZE(object) : 1;
        chunk->first = chunks->held;
        for (Py_ssize_t at = 0; at < parts; at++) {
            Py_buffer *piece = hold(chunks, many ? PySequence_Fast_GET_ITEM(object, at) : object, flags);
            if (!piece)
                return 0;
            chunk->nbytes += (size_t)piece->len;
        }
        chunk->end = chunks->held;
        if (chunk->nbytes < least) {
            PyErr_Format(PyExc_ValueError, "chunks: each must have at least %zu bytes", least);
            return 0;
        }
    }
    return 1;
}

void let_go(chunks_t *chunks) {
    while (chunks->held)
        PyBuffer_Release(&chunks->pieces[--chunks->held]);
    PyMem_Free(chunks->pieces);
    PyMem_Free(chunks->all);
    Py_XDECREF(chunks->list);
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
    {"fill", fill, METH_VARARGS,
     "fill(slots, values, checksums, stream, call)\n\n"
     "Copy values, each a buffer or a list of buffers, into slots of more than 240 bytes, and write their checksums.\n"
     "call: called with a job for `share`; None: no other thread helps."},
    {"receive", receive, METH_VARARGS,
     "receive(fd, ahead, chunks, checksums, deadline_s) -> (int, int)\n\n"
     "Fill chunks of more than 240 bytes, each a list or tuple of writable buffers: from `ahead` first, then from a\n"
     "socket. Writes their checksums, unless that is None. Returns 0 (full), 1 (late), 2 (closed by the peer) or the\n"
     "negative error number; and how many chunks are full."},
    {"share", share, METH_O, "share(job): copy chunks of a batch until none is left to begin."},
    {"avx2", avx2, METH_O, "avx2(wanted) -> bool: use AVX2 from now on, or do not. Returns whether it is in use."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Compiled loops; see raykv/memory/native.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    use_avx2(1);
    PyObject *module = PyModule_Create(&definition), *reader = PyType_FromSpec(&reader_spec);
    if (!module || !reader || PyModule_AddObjectRef(module, "Reader", reader) < 0)
        Py_CLEAR(module);
    Py_XDECREF(reader);
    return module;
}
