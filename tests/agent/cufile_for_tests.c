/*
 * A cuFile for tests: what NIXL's GDS_MT and GDS plugins import from libcufile.so.0, over pread and pwrite
 * on host memory. It is not NVIDIA's library, knows no GPU, and is compiled by the tests alone. What it is
 * stricter about than it has to be: a handle that was deregistered is refused, and so is all I/O while the
 * driver is not open, so that a plugin or a caller that lives on borrowed luck is caught.
 *
 * Faults are ordered by the test's own process through the cufile_for_tests_* functions at the end, and by
 * CUFILE_FOR_TESTS_OPEN_ERROR=<number> in the environment, which every cuFileDriverOpen answers with.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* The public ABI of cuFile 1.x, as far as it is used. */
typedef struct { int err; int cu_err; } Status;
typedef struct { int type; union { int fd; void *handle; } handle; const void *ops; } Descriptor;
typedef struct {
    int mode;
    union { struct { void *base; off_t file_offset; off_t offset; size_t size; } batch; } u;
    void *file;
    int opcode;
    void *cookie;
} Entry;
typedef struct { void *cookie; int status; size_t ret; } Event;

enum { NOT_OPEN = 5001, INVALID = 5022, MEMORY_TWICE = 5023, HANDLE_TWICE = 5028, NO_SUBMIT = 5035 };
enum { CANCELED = 8, COMPLETE = 16, FAILED = 64 };
enum { READ, WRITE, SUBMIT, HANDLE, BUFFER, STATUS, CALLS };
enum { NO_FAULT, FAIL, SHORT, HANG };

typedef struct { int kind; long from, to; int value; } Fault;
typedef struct File { int fd; struct File *next; } File;
typedef struct Buffer { const void *base; struct Buffer *next; } Buffer;
typedef struct {
    unsigned room, count, done, told;
    int cancelled, running;
    Entry *entries;
    Event *events;
    pthread_t thread;
} Batch;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Fault faults[CALLS];
static long calls[CALLS], hanging, opened, live_files, live_buffers, live_batches;
static File *files;
static Buffer *buffers;

static Status answer(int err) { return (Status){err, 0}; }

/* The fault for this call, if it is in the range of one. A hanging call waits here until it is let go. */
static Fault next_call(int what) {
    pthread_mutex_lock(&lock);
    long number = ++calls[what];
    Fault fault = faults[what];
    if (fault.kind == NO_FAULT || number < fault.from || number >= fault.to)
        fault.kind = NO_FAULT;
    if (fault.kind == HANG) {
        hanging++;
        pthread_cond_broadcast(&changed);
        while (faults[what].kind == HANG)
            pthread_cond_wait(&changed, &lock);
        hanging--;
        fault.kind = NO_FAULT;
    }
    pthread_mutex_unlock(&lock);
    return fault;
}

static int is_file(const File *file) {
    for (File *each = files; each; each = each->next)
        if (each == file)
            return 1;
    return 0;
}

static ssize_t move(int what, void *handle, void *memory, size_t size, off_t at) {
    Fault fault = next_call(what);
    if (fault.kind == FAIL) {
        errno = fault.value;
        return -1;
    }
    if (fault.kind == SHORT)
        size /= 2;
    pthread_mutex_lock(&lock);
    int fd = opened > 0 && is_file(handle) ? ((File *)handle)->fd : -1;
    pthread_mutex_unlock(&lock);
    size_t moved = 0;
    while (moved < size) {
        char *here = (char *)memory + moved;
        ssize_t n = what == READ ? pread(fd, here, size - moved, at + (off_t)moved)
                                 : pwrite(fd, here, size - moved, at + (off_t)moved);
        if (n < 0)
            return moved ? (ssize_t)moved : -1;
        if (n == 0)
            break;
        moved += (size_t)n;
    }
    return (ssize_t)moved;
}

Status cuFileDriverOpen(void) {
    const char *error = getenv("CUFILE_FOR_TESTS_OPEN_ERROR");
    if (error && *error)
        return answer(atoi(error));
    pthread_mutex_lock(&lock);
    if (opened++ == 0)
        fprintf(stderr, "cufile_for_tests: host memory and pread/pwrite, NOT NVIDIA's cuFile\n");
    pthread_mutex_unlock(&lock);
    return answer(0);
}

Status cuFileDriverClose(void) {
    pthread_mutex_lock(&lock);
    int err = opened > 0 ? 0 : NOT_OPEN;
    opened -= opened > 0;
    pthread_mutex_unlock(&lock);
    return answer(err);
}

Status cuFileDriverClose_v2(void) { return cuFileDriverClose(); }

Status cuFileHandleRegister(void **handle, Descriptor *descriptor) {
    struct stat status;
    Fault fault = next_call(HANDLE);
    if (fault.kind == FAIL)
        return answer(fault.value);
    if (fstat(descriptor->handle.fd, &status) != 0 || !S_ISREG(status.st_mode))
        return answer(INVALID);
    pthread_mutex_lock(&lock);
    int err = opened > 0 ? 0 : NOT_OPEN;
    for (File *each = files; each; each = each->next)
        if (each->fd == descriptor->handle.fd)
            err = HANDLE_TWICE;
    if (!err) {
        File *file = malloc(sizeof *file);
        *file = (File){descriptor->handle.fd, files};
        *handle = files = file;
        live_files++;
    }
    pthread_mutex_unlock(&lock);
    return answer(err);
}

void cuFileHandleDeregister(void *handle) {
    pthread_mutex_lock(&lock);
    for (File **link = &files; *link; link = &(*link)->next)
        if (*link == handle) {
            *link = (*link)->next;
            free(handle);
            live_files--;
            break;
        }
    pthread_mutex_unlock(&lock);
}

Status cuFileBufRegister(const void *base, size_t size, int flags) {
    (void)size, (void)flags;
    Fault fault = next_call(BUFFER);
    if (fault.kind == FAIL)
        return answer(fault.value);
    pthread_mutex_lock(&lock);
    int err = 0;
    for (Buffer *each = buffers; each; each = each->next)
        if (each->base == base)
            err = MEMORY_TWICE;
    if (!err) {
        Buffer *buffer = malloc(sizeof *buffer);
        *buffer = (Buffer){base, buffers};
        buffers = buffer;
        live_buffers++;
    }
    pthread_mutex_unlock(&lock);
    return answer(err);
}

Status cuFileBufDeregister(const void *base) {
    pthread_mutex_lock(&lock);
    int err = INVALID;
    for (Buffer **link = &buffers; *link; link = &(*link)->next)
        if ((*link)->base == base) {
            Buffer *gone = *link;
            *link = gone->next;
            free(gone);
            live_buffers--;
            err = 0;
            break;
        }
    pthread_mutex_unlock(&lock);
    return answer(err);
}

ssize_t cuFileRead(void *handle, void *base, size_t size, off_t file_offset, off_t offset) {
    return move(READ, handle, (char *)base + offset, size, file_offset);
}

ssize_t cuFileWrite(void *handle, const void *base, size_t size, off_t file_offset, off_t offset) {
    return move(WRITE, handle, (char *)base + offset, size, file_offset);
}

/* --- batches: a thread each, one entry after the other --- */

static void *run_batch(void *argument) {
    Batch *batch = argument;
    for (unsigned i = 0; i < batch->count; i++) {
        Entry *entry = &batch->entries[i];
        char *memory = (char *)entry->u.batch.base + entry->u.batch.offset;
        pthread_mutex_lock(&lock);
        int cancelled = batch->cancelled;
        pthread_mutex_unlock(&lock);
        ssize_t n = cancelled ? 0 : move(entry->opcode == 0 ? READ : WRITE, entry->file, memory,
                                         entry->u.batch.size, entry->u.batch.file_offset);
        pthread_mutex_lock(&lock);
        int status = cancelled ? CANCELED : n < 0 ? FAILED : COMPLETE;
        batch->events[i] = (Event){entry->cookie, status, n < 0 ? (size_t)-errno : (size_t)n};
        batch->done = i + 1;
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static void join(Batch *batch) {
    if (batch->running)
        pthread_join(batch->thread, NULL);
    batch->running = 0;
}

Status cuFileBatchIOSetUp(void **handle, unsigned room) {
    Batch *batch = calloc(1, sizeof *batch);
    batch->room = room;
    batch->entries = calloc(room, sizeof *batch->entries);
    batch->events = calloc(room, sizeof *batch->events);
    *handle = batch;
    pthread_mutex_lock(&lock);
    live_batches++;
    pthread_mutex_unlock(&lock);
    return answer(0);
}

Status cuFileBatchIOSubmit(void *handle, unsigned count, Entry *entries, unsigned flags) {
    (void)flags;
    Batch *batch = handle;
    Fault fault = next_call(SUBMIT);
    if (fault.kind == FAIL)
        return answer(fault.value);
    if (count > batch->room)
        return answer(INVALID);
    join(batch);
    for (unsigned i = 0; i < count; i++)
        batch->entries[i] = entries[i];
    batch->count = count;
    batch->done = batch->told = 0;
    batch->cancelled = 0;
    batch->running = pthread_create(&batch->thread, NULL, run_batch, batch) == 0;
    return answer(batch->running ? 0 : NO_SUBMIT);
}

Status cuFileBatchIOGetStatus(void *handle, unsigned least, unsigned *most, Event *events,
                              struct timespec *timeout) {
    (void)least, (void)timeout;
    Batch *batch = handle;
    Fault fault = next_call(STATUS);
    if (fault.kind == FAIL)
        return answer(fault.value);
    unsigned told = 0;
    pthread_mutex_lock(&lock);
    while (batch->told < batch->done && told < *most)
        events[told++] = batch->events[batch->told++];
    pthread_mutex_unlock(&lock);
    *most = told;
    return answer(0);
}

Status cuFileBatchIOCancel(void *handle) {
    pthread_mutex_lock(&lock);
    ((Batch *)handle)->cancelled = 1;
    pthread_mutex_unlock(&lock);
    return answer(0);
}

void cuFileBatchIODestroy(void *handle) {
    Batch *batch = handle;
    join(batch);
    free(batch->entries);
    free(batch->events);
    free(batch);
    pthread_mutex_lock(&lock);
    live_batches--;
    pthread_mutex_unlock(&lock);
}

/* --- what the tests order and ask --- */

/* Calls `from` to `to` - 1 of that kind, counted from now and from 1, have this fault. */
void cufile_for_tests_fault(int what, int kind, long from, long to, int value) {
    pthread_mutex_lock(&lock);
    calls[what] = 0;
    faults[what] = (Fault){kind, from, to, value};
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

long cufile_for_tests_calls(int what) {
    pthread_mutex_lock(&lock);
    long number = calls[what];
    pthread_mutex_unlock(&lock);
    return number;
}

/* 0: calls that hang now; 1: driver opens; 2: handles; 3: buffers; 4: batches. */
long cufile_for_tests_live(int what) {
    pthread_mutex_lock(&lock);
    long numbers[] = {hanging, opened, live_files, live_buffers, live_batches};
    long number = numbers[what];
    pthread_mutex_unlock(&lock);
    return number;
}
