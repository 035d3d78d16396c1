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

/* Hold the buffers of a list of chunks. Each chunk is a buffer, or a list or tuple of buffers. Returns 1 after success.
   Returns 0, with a Python exception set, if a buffer cannot be used with `flags`, if a chunk is shorter than `least`
   bytes, or if there is no memory. The caller must call `let_go` in both cases. */
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
     "Write each key's row (or -1) and the row's generation. If now >= 0, only rows that are ready and not expired at\n"
     "this tick are found. Returns False if a search met no empty entry: then the results must not be used."},
    {"enter", enter, METH_VARARGS,
     "enter(records, index, rows) -> int\n\n"
     "Write each row to the first empty or removed entry at or after its key's home. Returns how many removed entries\n"
     "were used; -1 if a number in `rows` is outside the table, or if the index is full."},
    {"fill", fill, METH_VARARGS,
     "fill(slots, values, checksums, stream, call)\n\n"
     "Copy values, each a buffer or a list of buffers, into slots of more than 240 bytes. Writes their checksums.\n"
     "call(job), unless None, is called first: it makes helper threads call share(job)."},
    {"receive", receive, METH_VARARGS,
     "receive(fd, ahead, chunks, checksums, deadline_s) -> (int, int)\n\n"
     "Fill chunks of more than 240 bytes, each a list or tuple of writable buffers: first with the bytes in `ahead`,\n"
     "then from the socket. Writes the checksum of each full chunk unless `checksums` is None. Returns two numbers: 0\n"
     "(all are full), 1 (the deadline passed), 2 (the peer closed) or a negative errno; and how many chunks are full."},
    {"share", share, METH_O, "share(job): copy chunks of the job's batch until all are begun. Helper threads call it."},
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
