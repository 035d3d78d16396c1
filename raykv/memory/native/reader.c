/* Reading chunks from the arena. */

#include "native.h"

#define STREAM_NBYTES (64 << 10) /* a `read_one` of at least this size bypasses the CPU cache */

/* The mapped memory of one node. A reader holds these buffers between calls, because passing them as arguments would
   cost more than a lookup. */
enum { RECORDS, INDEX, OTHER_INDEX, ACTIVE, ARENA, ACCESSED, FREQUENCY, BUFFERS };

typedef struct {
    PyObject_HEAD
    Py_buffer held[BUFFERS];
    double made_at_s, ticks_per_s;
} reader_t;

/* Count a read of a row. Other readers may do so at the same time, because a lost update does no harm. */
static void count_read(const reader_t *reader, int32_t row, uint32_t tick) {
    __atomic_store_n((uint32_t *)reader->held[ACCESSED].buf + row, tick, __ATOMIC_RELAXED);
    uint32_t *reads = (uint32_t *)reader->held[FREQUENCY].buf + row;
    __atomic_store_n(reads, __atomic_load_n(reads, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);
}

/* Return the address of a record's chunk, or NULL if it is outside the arena or its length is not `nbytes`. */
static const char *chunk_of(const reader_t *reader, const record_t *record, uint64_t nbytes) {
    uint64_t start = (uint64_t)__atomic_load_n(&record->page, __ATOMIC_RELAXED) << PAGE_SHIFT;
    int inside = __atomic_load_n(&record->nbytes, __ATOMIC_RELAXED) == nbytes &&
                 start + nbytes <= (uint64_t)reader->held[ARENA].len;
    return inside ? (const char *)reader->held[ARENA].buf + start : NULL;
}

/* Whether a record still has the generation of the lookup. Called after the copy of the chunk. */
static int is_unchanged(const record_t *record, uint32_t generation) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&record->generation, __ATOMIC_RELAXED) == generation;
}

/* -- many chunks -------------------------------------------------------------------------------------------------- */

typedef struct {
    const reader_t *reader;
    const int32_t *rows;
    const uint32_t *generations;
    const chunks_t *targets;
    char *hits;
    uint32_t tick;
    int stream;
} batch_t;

static void read_one_of(const void *given, Py_ssize_t at) {
    const batch_t *batch = given;
    const chunk_t *chunk = &batch->targets->all[at];
    const char *from = chunk->from;
    if (!from)
        return;
    for (Py_ssize_t place = chunk->first; place < chunk->end; place++) {
        const Py_buffer *piece = &batch->targets->pieces[place];
        copy_bytes(piece->buf, from, (size_t)piece->len, batch->stream);
        from += piece->len;
    }
    int32_t row = batch->rows[at];
    if (is_unchanged((const record_t *)batch->reader->held[RECORDS].buf + row, batch->generations[at])) {
        batch->hits[at] = 1;
        count_read(batch->reader, row, batch->tick);
    }
}

static PyObject *reader_read(PyObject *self, PyObject *arguments) {
    const reader_t *reader = (reader_t *)self;
    Py_buffer rows, generations, hits;
    PyObject *list, *call, *result = NULL;
    unsigned int tick;
    int stream;
    if (!PyArg_ParseTuple(arguments, "y*y*Ow*IpO", &rows, &generations, &list, &hits, &tick, &stream, &call))
        return NULL;
    chunks_t targets = {0};
    if (!hold_chunks(&targets, list, PyBUF_WRITABLE, 0))
        goto done;
    Py_ssize_t count = targets.count, known = reader->held[RECORDS].len / (Py_ssize_t)sizeof(record_t);
    if (rows.len != 4 * count || generations.len != 4 * count || hits.len != count) {
        PyErr_SetString(PyExc_ValueError, "rows, generations, targets and hits differ in length");
        goto done;
    }
    const record_t *records = reader->held[RECORDS].buf;
    const int32_t *row = rows.buf;
    size_t total = 0;
    for (Py_ssize_t at = 0; at < count; at++) {
        chunk_t *chunk = &targets.all[at];
        if (row[at] >= 0 && row[at] < known)
            chunk->from = chunk_of(reader, records + row[at], chunk->nbytes);
        total += chunk->from ? chunk->nbytes : 0;
    }
    batch_t batch = {reader, row, generations.buf, &targets, hits.buf, tick, stream};
    if (run_job(read_one_of, &batch, count, call, call == Py_None && total < WITHOUT_GIL_NBYTES))
        result = Py_NewRef(Py_None);
done:
    let_go(&targets);
    PyBuffer_Release(&rows), PyBuffer_Release(&generations), PyBuffer_Release(&hits);
    return result;
}

/* -- one chunk ---------------------------------------------------------------------------------------------------- */

static uint32_t tick_of(const reader_t *reader) {
    double ticks = (1e-9 * (double)monotonic_ns() - reader->made_at_s) * reader->ticks_per_s;
    return ticks < 1 ? 1 : (uint32_t)ticks;
}

/* Return the row of a 16-byte key; -1 if no chunk with this key is ready; -2, with a Python exception set, if `object`
   is not a key. */
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

static PyObject *reader_read_one(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    const reader_t *reader = (reader_t *)self;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "read_one(key, target)");
        return NULL;
    }
    uint32_t generation, tick = tick_of(reader);
    int32_t row = row_of(reader, arguments[0], tick, &generation);
    Py_buffer target;
    if (row == -2 || PyObject_GetBuffer(arguments[1], &target, PyBUF_WRITABLE) < 0)
        return NULL;
    const record_t *record = row < 0 ? NULL : (const record_t *)reader->held[RECORDS].buf + row;
    const char *from = record ? chunk_of(reader, record, (uint64_t)target.len) : NULL;
    int hit = 0;
    if (from) {
        PyThreadState *state = target.len >= WITHOUT_GIL_ONE_NBYTES ? PyEval_SaveThread() : NULL;
        copy_bytes(target.buf, from, (size_t)target.len, target.len >= STREAM_NBYTES);
        hit = is_unchanged(record, generation);
        if (state)
            PyEval_RestoreThread(state);
    }
    if (hit)
        count_read(reader, row, tick);
    PyBuffer_Release(&target);
    return PyBool_FromLong(hit);
}

/* -- the type ----------------------------------------------------------------------------------------------------- */

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

static PyMethodDef reader_methods[] = {
    {"ready", reader_ready, METH_O, "ready(key) -> bool: whether the chunk of a 16-byte key could be read now."},
    {"read_one", (PyCFunction)(void (*)(void))reader_read_one, METH_FASTCALL,
     "read_one(key, target) -> bool: copy the chunk of a 16-byte key into a writable buffer of the chunk's length.\n"
     "Returns whether the buffer holds the chunk now. If not, the buffer's content is undefined."},
    {"read", reader_read, METH_VARARGS,
     "read(rows, generations, targets, hits, tick, stream, call)\n\n"
     "Copy the chunks of the rows into their targets (each a writable buffer, or a list or tuple of them). Sets\n"
     "hits[i] to 1 and counts the read if rows[i] still has generations[i] after the copy. Skips rows of -1.\n"
     "call(job), unless None, is called first: it makes helper threads call share(job)."},
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
