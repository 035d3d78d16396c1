/* The loops that profiling found: probing the chunk table for many keys, and copying many chunks out of the arena.

   What they do, and every rule they keep, is told in table.py, copying.py and transport/shm.py, which also do the same
   without this file. Nothing here keeps state, and nothing is trusted: rows and places that lie outside the buffers
   are misses.

   A reader races with the writer on purpose (see table.py: seqlocks). Loads of a generation are acquiring, and a fence
   stands between the copy and the second look, so that it holds on machines that reorder loads. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FIRST 2 /* index entries: 0 empty, 1 removed, row + 2 */
#define REMOVED 1
#define PAGE_SHIFT 12
#define BLOCK 32                        /* keys looked up together, so that their cache misses overlap */
#define AHEAD 4                         /* rows of one key fetched ahead: where keys collide, the first is another's */
#define WITHOUT_GIL_NBYTES (32 << 10)   /* copies from this size on let other threads run */
#define WITHOUT_GIL_ONE_NBYTES (256 << 10)
#define WITHOUT_GIL_KEYS 4096

typedef struct {
    uint32_t generation, expires, page, nbytes;
    uint64_t key_hi, key_lo;
} record_t;

/* -- copying ----------------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)
/* Stores that do not pass through the cache: the target's old lines need not be read first, which saves a third of the
   memory traffic of a plain copy. */
__attribute__((target("avx2"))) static void stream_avx2(char *to, const char *from, size_t n) {
    size_t head = (size_t)(-(intptr_t)to) & 63;
    if (head > n)
        head = n;
    memcpy(to, from, head);
    to += head, from += head, n -= head;
    for (; n >= 256; to += 256, from += 256, n -= 256) {
        for (int line = 0; line < 256; line += 64)
            _mm_prefetch(from + 1024 + line, _MM_HINT_T0);
        for (int part = 0; part < 256; part += 128) {
            __m256i a = _mm256_loadu_si256((const __m256i *)(from + part));
            __m256i b = _mm256_loadu_si256((const __m256i *)(from + part + 32));
            __m256i c = _mm256_loadu_si256((const __m256i *)(from + part + 64));
            __m256i d = _mm256_loadu_si256((const __m256i *)(from + part + 96));
            _mm256_stream_si256((__m256i *)(to + part), a);
            _mm256_stream_si256((__m256i *)(to + part + 32), b);
            _mm256_stream_si256((__m256i *)(to + part + 64), c);
            _mm256_stream_si256((__m256i *)(to + part + 96), d);
        }
    }
    memcpy(to, from, n);
    _mm_sfence(); /* streamed stores are weakly ordered: what is published after them must come after them */
}
static int has_avx2;
#endif

static void copy_bytes(char *to, const char *from, size_t n, int stream) {
#if defined(__x86_64__)
    if (stream && has_avx2 && n >= 4096) {
        stream_avx2(to, from, n);
        return;
    }
#endif
    memcpy(to, from, n);
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

static Py_buffer *hold(buffers_t *buffers, PyObject *object) {
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
    if (PyObject_GetBuffer(object, buffer, PyBUF_WRITABLE) < 0)
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

static int32_t probe(const record_t *records, size_t rows, const int32_t *index, size_t size, uint64_t hi, uint64_t lo,
                     int64_t now, uint32_t *generation) {
    size_t position = home_of(hi, lo, size);
    for (size_t step = 0; step < size; step++) {
        int32_t entry = __atomic_load_n(&index[position], __ATOMIC_ACQUIRE);
        if (entry >= FIRST && (size_t)(entry - FIRST) < rows) {
            const record_t *record = &records[entry - FIRST];
            uint32_t seen = __atomic_load_n(&record->generation, __ATOMIC_ACQUIRE);
            if (__atomic_load_n(&record->key_lo, __ATOMIC_RELAXED) == lo &&
                __atomic_load_n(&record->key_hi, __ATOMIC_RELAXED) == hi) {
                uint32_t expires = __atomic_load_n(&record->expires, __ATOMIC_RELAXED);
                *generation = seen;
                if (now >= 0 && ((seen & 1) || !seen || (expires && (int64_t)expires <= now)))
                    return -1;
                return entry - FIRST;
            }
        } else if (entry == 0) {
            break;
        }
        if (++position == size)
            position = 0;
    }
    *generation = 0;
    return -1;
}

static void find_all(const record_t *records, size_t rows, const int32_t *index, size_t size, const uint64_t *keys,
                     size_t count, int64_t now, int32_t *found, uint32_t *generations) {
    size_t homes[2 * BLOCK]; /* of this block of keys and of the next one, whose entries are fetched meanwhile */
    for (size_t start = 0, next = 0; start < count; start += BLOCK) {
        for (; next < count && next < start + 2 * BLOCK; next++) {
            size_t home = homes[next % (2 * BLOCK)] = home_of(keys[2 * next], keys[2 * next + 1], size);
            __builtin_prefetch(&index[home]);
        }
        size_t end = start + BLOCK < count ? start + BLOCK : count;
        for (size_t at = start; at < end; at++) {
            size_t home = homes[at % (2 * BLOCK)];
            for (size_t position = home; position < home + AHEAD && position < size; position++) {
                int32_t entry = __atomic_load_n(&index[position], __ATOMIC_RELAXED);
                if (entry >= FIRST && (size_t)(entry - FIRST) < rows)
                    __builtin_prefetch(&records[entry - FIRST]);
                else if (entry == 0)
                    break;
            }
        }
        for (size_t at = start; at < end; at++)
            found[at] = probe(records, rows, index, size, keys[2 * at], keys[2 * at + 1], now, &generations[at]);
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

/* Racy on purpose: a lost update costs nothing. */
static void note_read(const Py_buffer *accessed, const Py_buffer *frequency, int32_t row, uint32_t tick) {
    __atomic_store_n((uint32_t *)accessed->buf + row, tick, __ATOMIC_RELAXED);
    uint32_t *reads = (uint32_t *)frequency->buf + row;
    __atomic_store_n(reads, __atomic_load_n(reads, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);
}

/* -- read -------------------------------------------------------------------------------------------------------- */

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
                if (!hold(pieces, PySequence_Fast_GET_ITEM(target, place)))
                    return 0;
        } else if (!hold(pieces, target)) {
            return 0;
        }
        chunks[at - first].end = pieces->count;
    }
    return 1;
}

PyDoc_STRVAR(read_doc,
             "read(records, arena, rows, generations, targets, first, end, hits, accessed, frequency, tick, stream)\n\n"
             "Copy the chunks of rows first .. end - 1 into their targets (each a writable buffer, or a list or tuple\n"
             "of them), and set hits where the row was the same before and after. Notes the reads.");

static PyObject *read_chunks(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer records, arena, rows, generations, hits, accessed, frequency;
    PyObject *given;
    Py_ssize_t first, end;
    unsigned int tick;
    int stream;
    if (!PyArg_ParseTuple(arguments, "y*y*y*y*Onnw*w*w*Ip", &records, &arena, &rows, &generations, &given, &first, &end,
                          &hits, &accessed, &frequency, &tick, &stream))
        return NULL;
    PyObject *result = NULL, *targets = PySequence_Fast(given, "targets: not a sequence");
    buffers_t pieces = {NULL, 0, 0};
    chunk_t *chunks = NULL;
    Py_ssize_t count = rows.len / 4, known = records.len / (Py_ssize_t)sizeof(record_t);
    if (!targets)
        goto done;
    if (PySequence_Fast_GET_SIZE(targets) != count || generations.len != 4 * count || hits.len != count || first < 0 ||
        first > end || end > count || accessed.len < 4 * known || frequency.len < 4 * known) {
        PyErr_SetString(PyExc_ValueError, "rows, generations, targets and hits differ in length");
        goto done;
    }
    chunks = PyMem_Calloc((size_t)(end - first) + 1, sizeof *chunks);
    if (!chunks) {
        PyErr_NoMemory();
        goto done;
    }
    if (!hold_targets(&pieces, targets, first, end, chunks))
        goto done;

    const record_t *record = records.buf;
    const int32_t *row = rows.buf;
    const uint32_t *generation = generations.buf;
    size_t total = 0;
    for (Py_ssize_t at = first; at < end; at++) {
        chunk_t *chunk = &chunks[at - first];
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
    PyThreadState *state = total >= WITHOUT_GIL_NBYTES ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t at = first; at < end; at++) {
        const chunk_t *chunk = &chunks[at - first];
        const char *from = chunk->from;
        if (!from)
            continue;
        for (Py_ssize_t place = chunk->first; place < chunk->end; place++) {
            const Py_buffer *piece = &pieces.held[place];
            copy_bytes(piece->buf, from, (size_t)piece->len, stream);
            from += piece->len;
        }
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (__atomic_load_n(&record[row[at]].generation, __ATOMIC_RELAXED) == generation[at]) {
            ((char *)hits.buf)[at] = 1;
            note_read(&accessed, &frequency, row[at], tick);
        }
    }
    if (state)
        PyEval_RestoreThread(state);
    result = Py_NewRef(Py_None);
done:
    let_go(&pieces);
    PyMem_Free(chunks);
    Py_XDECREF(targets);
    PyBuffer_Release(&records), PyBuffer_Release(&arena), PyBuffer_Release(&rows), PyBuffer_Release(&generations);
    PyBuffer_Release(&hits), PyBuffer_Release(&accessed), PyBuffer_Release(&frequency);
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

/* -- one chunk --------------------------------------------------------------------------------------------------- */

/* The mapped memory of one node, for lookups and reads of one chunk: they cost less than passing it as arguments. */
typedef struct {
    PyObject_HEAD
    Py_buffer records, index[2], active, arena, accessed, frequency;
    double made_at_s, ticks_per_s;
} reader_t;

static Py_buffer *reader_buffers(reader_t *reader, int at) {
    Py_buffer *all[] = {&reader->records, &reader->index[0], &reader->index[1], &reader->active,
                        &reader->arena,   &reader->accessed, &reader->frequency};
    return all[at];
}

static void reader_free(reader_t *reader) {
    for (int at = 0; at < 7; at++)
        if (reader_buffers(reader, at)->obj)
            PyBuffer_Release(reader_buffers(reader, at));
    PyTypeObject *type = Py_TYPE(reader);
    type->tp_free(reader);
    Py_DECREF(type);
}

static PyObject *reader_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    (void)names;
    PyObject *given[7];
    double made_at_s, ticks_per_s;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOdd", &given[0], &given[1], &given[2], &given[3], &given[4], &given[5],
                          &given[6], &made_at_s, &ticks_per_s))
        return NULL;
    reader_t *reader = (reader_t *)type->tp_alloc(type, 0);
    if (!reader)
        return NULL;
    reader->made_at_s = made_at_s, reader->ticks_per_s = ticks_per_s;
    for (int at = 0; at < 7; at++) {
        int flags = at >= 5 ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (PyObject_GetBuffer(given[at], reader_buffers(reader, at), flags) < 0) {
            Py_DECREF(reader);
            return NULL;
        }
    }
    Py_ssize_t rows = reader->records.len / (Py_ssize_t)sizeof(record_t);
    if (reader->active.len != 8 || reader->index[0].len != reader->index[1].len || reader->accessed.len != 4 * rows ||
        reader->frequency.len != 4 * rows) {
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

/* Row of a 16-byte key that is ready, or -1; -2 with an exception when it is no key. */
static int32_t row_of(reader_t *reader, PyObject *key, uint32_t tick, uint32_t *generation) {
    uint64_t halves[2];
    if (!PyBytes_Check(key) || PyBytes_GET_SIZE(key) != sizeof halves) {
        PyErr_SetString(PyExc_ValueError, "key: 16 bytes are due");
        return -2;
    }
    memcpy(halves, PyBytes_AS_STRING(key), sizeof halves);
    uint64_t active = __atomic_load_n((const uint64_t *)reader->active.buf, __ATOMIC_ACQUIRE) & 1;
    return probe(reader->records.buf, (size_t)reader->records.len / sizeof(record_t), reader->index[active].buf,
                 (size_t)reader->index[active].len / 4, halves[0], halves[1], tick, generation);
}

static PyObject *reader_ready(PyObject *self, PyObject *key) {
    uint32_t generation;
    int32_t row = row_of((reader_t *)self, key, tick_of((reader_t *)self), &generation);
    return row == -2 ? NULL : PyBool_FromLong(row >= 0);
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
        const record_t *record = (const record_t *)reader->records.buf + row;
        uint64_t from = (uint64_t)__atomic_load_n(&record->page, __ATOMIC_RELAXED) << PAGE_SHIFT;
        uint64_t nbytes = __atomic_load_n(&record->nbytes, __ATOMIC_RELAXED);
        if (nbytes == (uint64_t)target.len && from + nbytes <= (uint64_t)reader->arena.len) {
            PyThreadState *state = target.len >= WITHOUT_GIL_ONE_NBYTES ? PyEval_SaveThread() : NULL;
            copy_bytes(target.buf, (const char *)reader->arena.buf + from, (size_t)nbytes, target.len >= stream_nbytes);
            __atomic_thread_fence(__ATOMIC_ACQUIRE);
            hit = __atomic_load_n(&record->generation, __ATOMIC_RELAXED) == generation;
            if (state)
                PyEval_RestoreThread(state);
        }
        if (hit)
            note_read(&reader->accessed, &reader->frequency, row, tick);
    }
    PyBuffer_Release(&target);
    return PyBool_FromLong(hit);
}

static PyMethodDef reader_methods[] = {
    {"ready", reader_ready, METH_O, "ready(key) -> bool: whether the chunk of a 16-byte key could be read now."},
    {"read", (PyCFunction)(void (*)(void))reader_read, METH_FASTCALL,
     "read(key, target, stream_nbytes) -> bool: copy the chunk; targets of stream_nbytes and more past the cache."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_new, (void *)reader_new},
    {Py_tp_dealloc, (void *)reader_free},
    {Py_tp_methods, reader_methods},
    {Py_tp_doc, "Reader(records, index, other_index, active, arena, accessed, frequency, made_at_s, ticks_per_s)"},
    {0, NULL},
};

static PyType_Spec reader_spec = {"raykv.memory._native.Reader", sizeof(reader_t), 0, Py_TPFLAGS_DEFAULT, reader_slots};

/* -- module ------------------------------------------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"find", find, METH_VARARGS, find_doc},
    {"enter", enter, METH_VARARGS, enter_doc},
    {"read", read_chunks, METH_VARARGS, read_doc},
    {"copy", (PyCFunction)(void (*)(void))copy, METH_FASTCALL, copy_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Compiled loops; see raykv/memory/native.py.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    has_avx2 = __builtin_cpu_supports("avx2");
#endif
    PyObject *module = PyModule_Create(&definition), *reader = PyType_FromSpec(&reader_spec);
    if (!module || !reader || PyModule_AddObjectRef(module, "Reader", reader) < 0)
        Py_CLEAR(module);
    Py_XDECREF(reader);
    return module;
}
