/* The hash index: see index.py.

   A reader races with the writer on purpose (table.py: seqlocks). Some processors reorder loads. So the first load of a
   generation is an acquire load, and a fence separates the copy from the second load of the generation. */

#include "native.h"

#define FIRST 2 /* index entries: 0 empty, 1 removed, row + 2 */
#define REMOVED 1
#define APART 8               /* each stage of `find_all` is this many keys behind the stage before it */
#define UNDER_WAY (4 * APART) /* the lookups of at most this many keys overlap */
#define BEHIND 3              /* if the first record has another key, prefetch the records of this many more entries */
#define NO_END (-2)           /* result of `probe`: the index has no empty entry */

/* The entry at which the search for a key begins; see HashIndex._home. */
static inline size_t home_of(uint64_t hi, uint64_t lo, size_t size) {
    return (size_t)((((hi ^ lo) * UINT64_C(0x9E3779B97F4A7C15)) >> 32) * (uint64_t)size >> 32);
}

static inline int is_row(int32_t entry, size_t rows) { return entry >= FIRST && (size_t)(entry - FIRST) < rows; }

/* Whether a record has this key. Loads the generation before the key: if the generation is still the same later, the
   record still has the key. */
static inline int has_key(const record_t *record, const uint64_t *key, uint32_t *generation) {
    uint32_t seen = __atomic_load_n(&record->generation, __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&record->key_lo, __ATOMIC_RELAXED) != key[1] ||
        __atomic_load_n(&record->key_hi, __ATOMIC_RELAXED) != key[0])
        return 0;
    *generation = seen;
    return 1;
}

/* Whether a row is ready and not expired at tick `now`. If now < 0, all rows are usable. */
static inline int is_usable(const record_t *record, uint32_t generation, int64_t now) {
    uint32_t expires = __atomic_load_n(&record->expires, __ATOMIC_RELAXED);
    return now < 0 || (generation && !(generation & 1) && (!expires || (int64_t)expires > now));
}

/* Return the row of a key; -1 if the key is missing or its row is not usable; NO_END if the key is missing and the
   index has no empty entry. */
int32_t probe(const record_t *records, size_t rows, const int32_t *index, size_t size, const uint64_t *key, int64_t now,
              uint32_t *generation) {
    size_t position = home_of(key[0], key[1], size);
    *generation = 0;
    for (size_t step = 0; step < size; step++) {
        int32_t entry = __atomic_load_n(&index[position], __ATOMIC_ACQUIRE);
        if (is_row(entry, rows)) {
            const record_t *record = &records[entry - FIRST];
            if (has_key(record, key, generation))
                return is_usable(record, *generation, now) ? entry - FIRST : -1;
        } else if (entry == 0) {
            return -1;
        }
        if (++position == size)
            position = 0;
    }
    return size ? NO_END : -1;
}

/* Look up many keys. The memory for a key is prefetched in three stages, which overlap with the stages of other keys.
   Stage 1 fetches the home entry in the index. Stage 2 fetches the record of that entry. Two thirds of the keys are
   found in that record. For the other keys, stage 3 fetches the records of the next entries. Returns 1; or 0 if a key
   is missing and the index has no empty entry. */
static int find_all(const record_t *records, size_t rows, const int32_t *index, size_t size, const uint64_t *keys,
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
                __builtin_prefetch(&index[home + BEHIND]); /* usually in the same cache line */
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
            found[at] = -1, generations[at] = 0;
            if (is_row(entry, rows) && has_key(&records[entry - FIRST], &keys[2 * at], &generations[at])) {
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
            found[at] = probe(records, rows, index, size, &keys[2 * at], now, &generations[at]);
            if (found[at] == NO_END)
                return 0;
        }
    }
    return 1;
}

PyObject *find(PyObject *Py_UNUSED(module), PyObject *arguments) {
    Py_buffer records, index, keys, rows, generations;
    long long now;
    if (!PyArg_ParseTuple(arguments, "y*y*y*w*w*L", &records, &index, &keys, &rows, &generations, &now))
        return NULL;
    PyObject *result = NULL;
    size_t count = (size_t)keys.len / 16;
    if (sized(&keys, (Py_ssize_t)count * 16, "keys") && sized(&rows, (Py_ssize_t)count * 4, "rows") &&
        sized(&generations, (Py_ssize_t)count * 4, "generations")) {
        PyThreadState *state = count >= WITHOUT_GIL_KEYS ? PyEval_SaveThread() : NULL;
        int whole = find_all(records.buf, (size_t)records.len / sizeof(record_t), index.buf, (size_t)index.len / 4,
                             keys.buf, count, now, rows.buf, generations.buf);
        if (state)
            PyEval_RestoreThread(state);
        result = PyBool_FromLong(whole);
    }
    PyBuffer_Release(&records), PyBuffer_Release(&index), PyBuffer_Release(&keys);
    PyBuffer_Release(&rows), PyBuffer_Release(&generations);
    return result;
}

PyObject *enter(PyObject *Py_UNUSED(module), PyObject *arguments) {
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
        for (; step < size && entries[position] >= FIRST; step++)
            position = position + 1 < size ? position + 1 : 0;
        if (step == size)
            break;
        reused += entries[position] == REMOVED;
        __atomic_store_n(&entries[position], row[done] + FIRST, __ATOMIC_RELEASE);
    }
    PyBuffer_Release(&records), PyBuffer_Release(&index), PyBuffer_Release(&rows);
    return PyLong_FromSsize_t(done < count ? -1 : (Py_ssize_t)reused);
}
