/* Reading chunks from the arena: many at once (`read`), or one (`Reader`). */

#include "native.h"

/* Races with other readers on purpose, since a lost update does no harm. */
static void count_read(const Py_buffer *accessed, const Py_buffer *frequency, int32_t row, uint32_t tick) {
    __atomic_store_n((uint32_t *)accessed->buf + row, tick, __ATOMIC_RELAXED);
    uint32_t *reads = (uint32_t *)frequency->buf + row;
    __atomic_store_n(reads, __atomic_load_n(reads, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);
}

/* The address of a record's chunk in the arena; NULL if it is outside the arena or its length is not `nbytes`. */
static const char *chunk_of(const record_t *record, const Py_buffer *arena, uint64_t nbytes) {
    uint64_t start = (uint64_t)__atomic_load_n(&record->page, __ATOMIC_RELAXED) << PAGE_SHIFT;
    int inside = __atomic_load_n(&record->nbytes, __ATOMIC_RELAXED) == nbytes && start + nbytes <= (uint64_t)arena->len;
    return inside ? (const char *)arena->buf + start : NULL;
}

/* -- many --------------------------------------------------------------------------------------------------------- */

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
} batch_t;

static void read_one(const void *given, Py_ssize_t at) {
    const batch_t *batch = given;
    const chunk_t *chunk = &batch->chunks[at];
    const char *from = chunk->from;
    if (!from)
        return;
    for (Py_ssize_t place = chunk->first; place < chunk->end; place++) {
        const Py_buffer *piece = &batch->pieces[place];
        copy_bytes(piece->buf, from, (size_t)piece->len, batch->stream);
        from += piece->len;
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    int32_t row = batch->rows[at];
    if (__atomic_load_n(&batch->records[row].generation, __ATOMIC_RELAXED) == batch->generations[at]) {
        batch->hits[at] = 1;
        count_read(batch->accessed, batch->frequency, row, batch->tick);
    }
}

PyObject *read_chunks(PyObject *module, PyObject *arguments) {
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
    if (!(chunks = PyMem_Calloc((size_t)count + 1, sizeof *chunks))) {
        PyErr_NoMemory();
        goto done;
    }
    const int32_t *row = rows.buf;
    size_t total = 0;
    for (Py_ssize_t at = 0; at < count; at++) {
        size_t nbytes = 0;
        if (!hold_chunk(&pieces, PySequence_Fast_GET_ITEM(targets, at), PyBUF_WRITABLE, &chunks[at], &nbytes))
            goto done;
        if (row[at] >= 0 && row[at] < known)
            chunks[at].from = chunk_of((const record_t *)records.buf + row[at], &arena, nbytes);
        total += chunks[at].from ? nbytes : 0;
    }
    batch_t batch = {records.buf, row,       generations.buf, chunks, pieces.held,
                     hits.buf,    &accessed, &frequency,      tick,   stream};
    if (run_job(read_one, &batch, count, call, call == Py_None && total < WITHOUT_GIL_NBYTES))
        result = Py_NewRef(Py_None);
done:
    let_go(&pieces);
    PyMem_Free(chunks);
    Py_XDECREF(targets);
    PyBuffer_Release(&records), PyBuffer_Release(&arena), PyBuffer_Release(&rows), PyBuffer_Release(&generations);
    PyBuffer_Release(&hits), PyBuffer_Release(&accessed), PyBuffer_Release(&frequency);
    return result;
}

/* -- one ---------------------------------------------------------------------------------------------------------- */

/* The mapped memory of one node, held between calls, since passing it as arguments costs more than a lookup. */
enum { RECORDS, INDEX, OTHER_INDEX, ACTIVE, ARENA, ACCESSED, FREQUENCY, BUFFERS };

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

static PyObject *reader_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    (void)names;
    PyObject *given[BUFFERS];
    double made_at_s, ticks_per_s;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOdd", &given[RECORDS], &given[INDEX], &given[OTHER_INDEX], &given[ACTIVE],
                          &given[ARENA], &given[ACCESSED], &given[FREQUENCY], &made_at_s, &ticks_per_s))
        return NULL;
    reader_t *reader = (reader_t *)type->tp_alloc(type, 0);
    if (!reader)
        return NULL;
    reader->made_at_s = made_at_s, reader->ticks_per_s = ticks_per_s;
    for (int at = 0; at < BUFFERS; at++) {
        if (PyObject_GetBuffer(given[at], &reader->held[at], at >= ACCESSED ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) {
            Py_DECREF(reader);
            return NULL;
        }
    }
    const Py_buffer *held = reader->held;
    Py_ssize_t rows = held[RECORDS].len / (Py_ssize_t)sizeof(record_t);
    if (held[ACTIVE].len != 8 || held[INDEX].len != held[OTHER_INDEX].len || held[ACCESSED].len != 4 * rows ||
        held[FREQUENCY].len != 4 * rows) {
        PyErr_SetString(PyExc_ValueError, "columns differ in length");
        Py_DECREF(reader);
        return NULL;
    }
    return (PyObject *)reader;
}

static uint32_t tick_of(const reader_t *reader) {
    double ticks = (1e-9 * (double)monotonic_ns() - reader->made_at_s) * reader->ticks_per_s;
    return ticks < 1 ? 1 : (uint32_t)ticks;
}

/* Row of a 16-byte key; -1 if it is not ready; -2 with an exception if the object is not a 16-byte key. */
static int32_t row_of(const reader_t *reader, PyObject *object, uint32_t tick, uint32_t *generation) {
    uint64_t key[2];
    if (!PyBytes_Check(object) || PyBytes_GET_SIZE(object) != sizeof key) {
        PyErr_SetString(PyExc_ValueError, "key: must be 16 bytes");
        return -2;
    }
    memcpy(key, PyBytes_AS_STRING(object), sizeof key);
    uint64_t active = __atomic_load_n((const uint64_t *)reader->held[ACTIVE].buf, __ATOMIC_ACQUIRE) & 1;
    const Py_buffer *index = &reader->held[active ? OTHER_INDEX : INDEX], *records = &reader->held[RECORDS];
    int32_t row = probe(records->buf, (size_t)records->len / sizeof(record_t), index->buf, (size_t)index->len / 4, key,
                        tick, generation);
    return row < 0 ? -1 : row;
}

static PyObject *reader_ready(PyObject *self, PyObject *key) {
    uint32_t generation;
    int32_t row = row_of((reader_t *)self, key, tick_of((reader_t *)self), &generation);
    return row == -2 ? NULL : PyBool_FromLong(row >= 0);
}

static PyObject *reader_read(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    const reader_t *reader = (reader_t *)self;
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
    const record_t *record = row < 0 ? NULL : (const record_t *)reader->held[RECORDS].buf + row;
    const char *from = record ? chunk_of(record, &reader->held[ARENA], (uint64_t)target.len) : NULL;
    int hit = 0;
    if (from) {
        PyThreadState *state = target.len >= WITHOUT_GIL_ONE_NBYTES ? PyEval_SaveThread() : NULL;
        copy_bytes(target.buf, from, (size_t)target.len, target.len >= stream_nbytes);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        hit = __atomic_load_n(&record->generation, __ATOMIC_RELAXED) == generation;
        if (state)
            PyEval_RestoreThread(state);
    }
    if (hit)
        count_read(&reader->held[ACCESSED], &reader->held[FREQUENCY], row, tick);
    PyBuffer_Release(&target);
    return PyBool_FromLong(hit);
}

static PyMethodDef reader_methods[] = {
    {"ready", reader_ready, METH_O, "ready(key) -> bool: whether the chunk of a 16-byte key could be read now."},
    {"read", (PyCFunction)(void (*)(void))reader_read, METH_FASTCALL,
     "read(key, target, stream_nbytes) -> bool: copy the chunk; from stream_nbytes on past the cache."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_new, (void *)reader_new},
    {Py_tp_dealloc, (void *)reader_free},
    {Py_tp_methods, reader_methods},
    {Py_tp_doc, "Reader(records, index, other_index, active, arena, accessed, frequency, made_at_s, ticks_per_s)"},
    {0, NULL},
};

PyType_Spec reader_spec = {"raykv.memory.native._native.Reader", sizeof(reader_t), 0, Py_TPFLAGS_DEFAULT, reader_slots};
