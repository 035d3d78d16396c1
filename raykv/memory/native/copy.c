/* Copying bytes. Large copies bypass the CPU cache and use several threads. */

#include "native.h"
#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* -- the quickest way --------------------------------------------------------------------------------------------- */

/* Which way to copy is quickest depends on the processor: a way that takes a third less time on one processor takes a
   third more on another. So the first copies of a process try all ways in turn. Later copies use the way that was
   quickest. The choice is separate for small and large copies, because a part of a small copy's bytes is in a cache. */
#define TRIES (5 * WAYS)
#define LARGE_NBYTES (128 << 10)
#define TRIED_NBYTES (16 << 10) /* smaller copies are not timed */

trial_t begin_trial(int hashed, size_t nbytes) {
    static choice_t choices[2][2]; /* first index: copy alone, or copy with hash; second: small, or large */
    choice_t *choice = &choices[hashed][nbytes >= LARGE_NBYTES];
    if (nbytes >= TRIED_NBYTES && __atomic_load_n(&choice->begun, __ATOMIC_RELAXED) < TRIES) {
        int way = (int)(__atomic_fetch_add(&choice->begun, 1, __ATOMIC_RELAXED) % WAYS);
        return (trial_t){choice, way, nbytes, monotonic_ns()};
    }
    int best = 0;
    for (int way = 1; way < WAYS; way++)
        if (__atomic_load_n(&choice->cost[way], __ATOMIC_RELAXED) < __atomic_load_n(&choice->cost[best], __ATOMIC_RELAXED))
            best = way;
    return (trial_t){NULL, best, nbytes, 0};
}

void end_trial(trial_t trial) {
    if (!trial.choice)
        return;
    double cost = 1e3 * (double)(monotonic_ns() - trial.began_ns) / (double)trial.nbytes;
    uint32_t now = cost < 1 ? 1 : cost < 1e9 ? (uint32_t)cost : 1000000000, *best = &trial.choice->cost[trial.way];
    uint32_t before = __atomic_load_n(best, __ATOMIC_RELAXED);
    if (!before || now < before)
        __atomic_store_n(best, now, __ATOMIC_RELAXED);
}

/* -- vectors ------------------------------------------------------------------------------------------------------ */

int has_avx2;

int use_avx2(int wanted) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    has_avx2 = wanted && __builtin_cpu_supports("avx2");
#else
    (void)wanted;
#endif
    return has_avx2;
}

PyObject *avx2(PyObject *Py_UNUSED(module), PyObject *wanted) { return PyBool_FromLong(use_avx2(PyObject_IsTrue(wanted))); }

/* -- one copy ----------------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)
__attribute__((target("avx2"))) static inline void stream_128(char *to, const char *from) {
    __m256i a = _mm256_loadu_si256((const __m256i *)from);
    __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));
    __m256i c = _mm256_loadu_si256((const __m256i *)(from + 64));
    __m256i d = _mm256_loadu_si256((const __m256i *)(from + 96));
    _mm256_stream_si256((__m256i *)to, a);
    _mm256_stream_si256((__m256i *)(to + 32), b);
    _mm256_stream_si256((__m256i *)(to + 64), c);
    _mm256_stream_si256((__m256i *)(to + 96), d);
}

/* Copy four pages together: 128 bytes of each page in turn. The processor prefetches only within a page, so this way it
   prefetches from four pages at the same time. */
__attribute__((target("avx2"))) void stream_group(char *to, const char *from) {
    for (size_t at = 0; at < GROUP / 4; at += 128)
        for (size_t page = 0; page < GROUP; page += GROUP / 4)
            stream_128(to + page + at, from + page + at);
}

/* Copy with stores that bypass the cache. Ordinary stores would first read the target's old cache lines, which is a
   third of the memory traffic. With FETCHED, loads bypass the outer caches too, so that a large copy does not evict
   other data from these caches. */
__attribute__((target("avx2"))) static void stream_avx2(char *to, const char *from, size_t n, int way) {
    size_t head = (size_t)(-(intptr_t)to) & 63;
    head = head > n ? n : head;
    memcpy(to, from, head);
    to += head, from += head, n -= head;
    if (way == PAGES) {
        for (; n >= GROUP; to += GROUP, from += GROUP, n -= GROUP)
            stream_group(to, from);
        for (; n >= 128; to += 128, from += 128, n -= 128)
            stream_128(to, from);
    } else {
        for (; n >= 256; to += 256, from += 256, n -= 256) {
            for (int line = 0; line < 256; line += 64)
                _mm_prefetch(from + 2048 + line, _MM_HINT_NTA);
            stream_128(to, from), stream_128(to + 128, from + 128);
        }
    }
    memcpy(to, from, n);
    _mm_sfence(); /* without this fence, later stores could overtake the streamed stores */
}
#endif

void copy_bytes(char *to, const char *from, size_t n, int stream) {
#if defined(__x86_64__)
    if (stream && has_avx2 && n >= 4096) {
        trial_t trial = begin_trial(0, n);
        if (trial.way == PLAIN)
            memcpy(to, from, n);
        else
            stream_avx2(to, from, n, trial.way);
        end_trial(trial);
        return;
    }
#else
    (void)stream;
#endif
    memcpy(to, from, n);
}

/* -- jobs --------------------------------------------------------------------------------------------------------- */

/* The chunks of one batch. Several threads copy them without the GIL. Each free thread takes the next chunks. The
   caller's thread holds the buffers. It copies too, because the helper threads may start late or never. */
typedef struct {
    void (*copy)(const void *batch, Py_ssize_t at);
    const void *batch; /* only for copying begun chunks: the caller frees the batch when all begun chunks are copied */
    Py_ssize_t count, step, begun, ended; /* numbers of chunks; a thread begins `step` chunks at once */
} job_t;

#define JOB "raykv.job"
#define STEPS_A_JOB 64

static void work(job_t *job) {
    for (Py_ssize_t first; (first = __atomic_fetch_add(&job->begun, job->step, __ATOMIC_RELAXED)) < job->count;) {
        Py_ssize_t end = job->count - first < job->step ? job->count : first + job->step;
        for (Py_ssize_t at = first; at < end; at++)
            job->copy(job->batch, at);
        __atomic_fetch_add(&job->ended, end - first, __ATOMIC_RELEASE);
    }
}

/* Stop all threads from beginning another chunk, and wait until the begun chunks are copied. */
static void end_job(job_t *job) {
    Py_ssize_t begun = __atomic_exchange_n(&job->begun, job->count, __ATOMIC_RELAXED);
    begun = begun < job->count ? begun : job->count;
    while (__atomic_load_n(&job->ended, __ATOMIC_ACQUIRE) < begun)
        sched_yield(); /* this does not last long: each other thread ends its chunks within milliseconds */
}

static void free_job(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, JOB)); }

/* Copy all chunks of a batch. If `call` is not None, first call `call(job)`, which gives the job to helper threads.
   With `keep_lock`, this thread keeps the GIL during the copy. Returns 1; or 0, with a Python exception set, if `call`
   or an allocation fails. When this function returns, no thread copies for this batch any more. */
int run_job(void (*copy)(const void *, Py_ssize_t), const void *batch, Py_ssize_t count, PyObject *call, int keep_lock) {
    job_t alone = {copy, batch, count, count / STEPS_A_JOB + 1, 0, 0}, *job = &alone;
    PyObject *capsule = NULL, *called = NULL;
    if (call != Py_None) {
        if (!(job = PyMem_Malloc(sizeof *job))) {
            PyErr_NoMemory();
            return 0;
        }
        *job = alone;
        if (!(capsule = PyCapsule_New(job, JOB, free_job))) {
            PyMem_Free(job);
            return 0;
        }
        called = PyObject_CallOneArg(call, capsule);
    }
    PyThreadState *state = keep_lock ? NULL : PyEval_SaveThread();
    if (!capsule || called)
        work(job);
    if (capsule)
        end_job(job);
    if (state)
        PyEval_RestoreThread(state);
    int done = !capsule || called;
    Py_XDECREF(called), Py_XDECREF(capsule);
    return done;
}

PyObject *share(PyObject *Py_UNUSED(module), PyObject *capsule) {
    job_t *job = PyCapsule_GetPointer(capsule, JOB);
    if (!job)
        return NULL;
    PyThreadState *state = PyEval_SaveThread();
    work(job);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}
