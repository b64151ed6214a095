// A double of libcufile for tests: host memory plays HBM, and requests are preads and pwrites. What it exports is what
// kvikio calls for blocking requests, with the types of cufile.h.
//
// It counts what a caller must not do, in the children of a fork, too: a request off the grid of 4 KiB, memory that is
// not registered or was deregistered, a registration or a close too many, any call in a child of who opened it.
//
// double_inject says what goes wrong: with which calls, how many go well before, and then every how many go wrong.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define GRID 4096
#define MOST 256

enum {
  SUCCESS = 0,
  IO_NOT_SUPPORTED = 5008,
  BAD_FLAGS = 5019,
  NO_DESCRIPTOR = 5031,
  ALREADY_REGISTERED = 5023,
  NOT_REGISTERED = 5024,
  UNKNOWN_HANDLE = 5027
};

typedef struct {
  int err;
  int cu_err;
} CUfileError_t;

typedef void *CUfileHandle_t;

typedef struct {
  int type;
  union {
    int fd;
    void *handle;
  } handle;
  const void *operations;
} CUfileDescr_t;

typedef struct {
  struct {
    unsigned int major_version, minor_version;
    size_t poll_thresh_size, max_direct_io_size;
    unsigned int status_flags, control_flags;
  } nvfs;
  unsigned int feature_flags, max_device_cache_size, per_buffer_cache_size, max_device_pinned_mem_size;
  unsigned int max_batch_io_size, max_batch_io_timeout_msecs;
} CUfileDrvProps_t;

typedef struct {
  const char *base;
  size_t size;
} Range;

typedef struct {
  int fd;
  int open;
} Handle;

// Shared with children, so that what they must not do is seen here.
typedef struct {
  long violations;
  char first[160];
} Shared;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Shared *shared;
static pid_t owner;
static Range buffers[MOST];
static Handle *handles[MOST];
static long drivers, counts[4];
static struct {
  char calls[16], fault[32];
  long after, every, seen;
} injected;

enum Call { READ, WRITE, HANDLE, BUFFER };
static const char *const names[] = {"read", "write", "handle", "buffer"};

static void violation(const char *format, ...) {
  if (__sync_fetch_and_add(&shared->violations, 1)) return;
  va_list values;
  va_start(values, format);
  vsnprintf(shared->first, sizeof shared->first, format, values);
  va_end(values);
}

// Locks, too; in a child, where another thread of the parent may have held the lock, nothing else is done.
static int entered(const char *call) {
  if (getpid() != owner) {
    violation("%s in the child of a fork", call);
    return 0;
  }
  pthread_mutex_lock(&lock);
  return 1;
}

static CUfileError_t left(int error) {
  pthread_mutex_unlock(&lock);
  return (CUfileError_t){error, 0};
}

static CUfileError_t refused(void) { return (CUfileError_t){IO_NOT_SUPPORTED, 0}; }

// The fault that this call meets, or "". The lock is held.
static const char *fault(enum Call call) {
  ++counts[call];
  if (strcmp(injected.calls, names[call])) return "";
  long number = injected.seen++ - injected.after;
  return number >= 0 && number % injected.every == 0 ? injected.fault : "";
}

// ---------------------------------------------------------------------------------------------------- for the test

__attribute__((constructor)) void double_reset(void) {
  if (!shared) shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  owner = getpid();
  memset(shared, 0, sizeof *shared);
  memset(buffers, 0, sizeof buffers);
  memset(handles, 0, sizeof handles);
  memset(counts, 0, sizeof counts);
  memset(&injected, 0, sizeof injected);
  drivers = 0;
}

void double_inject(const char *calls, const char *name, long after, long every) {
  pthread_mutex_lock(&lock);
  snprintf(injected.calls, sizeof injected.calls, "%s", calls);
  snprintf(injected.fault, sizeof injected.fault, "%s", name);
  injected.after = after;
  injected.every = every;
  injected.seen = 0;
  pthread_mutex_unlock(&lock);
}

long double_violations(void) { return shared->violations; }
const char *double_first_violation(void) { return shared->first; }
long double_calls(int call) { return counts[call]; }

long double_left_open(void) {
  long open = drivers;
  for (int k = 0; k < MOST; ++k) open += (buffers[k].base != NULL) + (handles[k] && handles[k]->open);
  return open;
}

// --------------------------------------------------------------------------------------------------- as in cufile.h

CUfileError_t cuFileDriverOpen(void) {
  if (!entered("cuFileDriverOpen")) return refused();
  ++drivers;
  return left(SUCCESS);
}

CUfileError_t cuFileDriverClose(void) {
  if (!entered("cuFileDriverClose")) return refused();
  if (--drivers < 0) violation("the driver was closed too often");
  return left(SUCCESS);
}

CUfileError_t cuFileGetVersion(int *version) {
  *version = 1150;
  return (CUfileError_t){SUCCESS, 0};
}

CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t *properties) {
  if (!entered("cuFileDriverGetProperties")) return refused();
  memset(properties, 0, sizeof *properties);
  properties->nvfs.major_version = 2;
  properties->nvfs.minor_version = 30;
  properties->nvfs.max_direct_io_size = 16384;
  properties->max_device_cache_size = 131072;
  properties->per_buffer_cache_size = 1024;
  return left(SUCCESS);
}

// cuFile opens a file once more, by its path.
static int has_name(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return access(path, R_OK | W_OK) == 0;
}

CUfileError_t cuFileHandleRegister(CUfileHandle_t *made, CUfileDescr_t *descriptor) {
  if (!entered("cuFileHandleRegister")) return refused();
  if (*fault(HANDLE)) return left(IO_NOT_SUPPORTED);
  if (fcntl(descriptor->handle.fd, F_GETFL) & (O_APPEND | (O_TMPFILE & ~O_DIRECTORY))) return left(BAD_FLAGS);
  if (!has_name(descriptor->handle.fd)) return left(NO_DESCRIPTOR);
  for (int k = 0; k < MOST; ++k) {
    if (handles[k]) continue;
    handles[k] = malloc(sizeof(Handle));
    *handles[k] = (Handle){descriptor->handle.fd, 1};
    *made = handles[k];
    return left(SUCCESS);
  }
  return left(IO_NOT_SUPPORTED);
}

void cuFileHandleDeregister(CUfileHandle_t handle) {
  if (!entered("cuFileHandleDeregister")) return;
  Handle *known = handle;
  if (!known->open) violation("a file was deregistered twice");
  known->open = 0;
  left(SUCCESS);
}

CUfileError_t cuFileBufRegister(const void *base, size_t size, int flags) {
  (void)flags;
  if (!entered("cuFileBufRegister")) return refused();
  if (*fault(BUFFER)) return left(IO_NOT_SUPPORTED);
  int free = -1;
  for (int k = 0; k < MOST; ++k) {
    if (!buffers[k].base) {
      free = k;
    } else if (buffers[k].base < (const char *)base + size && (const char *)base < buffers[k].base + buffers[k].size) {
      violation("memory was registered twice");
      return left(ALREADY_REGISTERED);
    }
  }
  if (free < 0) return left(IO_NOT_SUPPORTED);
  buffers[free] = (Range){base, size};
  return left(SUCCESS);
}

CUfileError_t cuFileBufDeregister(const void *base) {
  if (!entered("cuFileBufDeregister")) return refused();
  for (int k = 0; k < MOST; ++k) {
    if (buffers[k].base != base || !base) continue;
    volatile char there = *buffers[k].base;  // memory that was freed before may be gone
    (void)there;
    buffers[k].base = NULL;
    return left(SUCCESS);
  }
  violation("memory was deregistered that is not registered");
  return left(NOT_REGISTERED);
}

// Whether the memory is registered, and by that first byte. The lock is held.
static int known(const char *base, size_t end) {
  for (int k = 0; k < MOST; ++k)
    if (buffers[k].base == base && base) return end <= buffers[k].size;
  return 0;
}

// Silent corruption; the memory of who writes does not change.
static ssize_t flipped(enum Call call, int fd, char *data, size_t size, off_t at) {
  char *copy = aligned_alloc(GRID, size);
  ssize_t done = 0;
  if (call == READ) done = pread(fd, copy, size, at);
  if (call == WRITE) memcpy(copy, data, size);
  copy[size / 2] ^= 4;
  if (call == READ) memcpy(data, copy, size);
  if (call == WRITE) done = pwrite(fd, copy, size, at);
  free(copy);
  return done;
}

static ssize_t move(enum Call call, CUfileHandle_t handle, char *base, size_t size, off_t at, off_t start) {
  if (!entered(names[call])) return -IO_NOT_SUPPORTED;
  Handle *file = handle;
  const char *name = fault(call);
  char *data = base + start;
  if (!file->open) violation("a %s of a file that was deregistered", names[call]);
  if (!known(base, start + size)) violation("a %s of memory that is not registered", names[call]);
  if (at % GRID || size % GRID || (size_t)data % GRID || start % GRID)
    violation("a %s of %zu bytes at %lld of the file, at %p, off the grid", names[call], size, (long long)at, data);
  left(SUCCESS);

  if (!strcmp(name, "late")) nanosleep(&(struct timespec){0, 30 * 1000 * 1000}, NULL);  // after its successors
  if (!strcmp(name, "none")) return 0;
  if (!strcmp(name, "refused")) return -IO_NOT_SUPPORTED;
  if (!strcmp(name, "failed")) {
    errno = EIO;
    return -1;
  }
  if (!strcmp(name, "lost")) return size;
  size_t asked = size;
  if (!strcmp(name, "short") || !strcmp(name, "odd")) size = size < GRID ? size : GRID;
  if (!strcmp(name, "torn")) size = size / 2 / GRID * GRID;
  if (!strcmp(name, "shifted")) at = at >= GRID ? at - GRID : at;
  if (!strcmp(name, "flipped")) return flipped(call, file->fd, data, size, at);
  ssize_t done = call == READ ? pread(file->fd, data, size, at) : pwrite(file->fd, data, size, at);
  if (!strcmp(name, "odd")) return 100;
  if (!strcmp(name, "more")) return asked + GRID;
  if (!strcmp(name, "torn")) {
    errno = EIO;
    return -1;
  }
  return done;
}

ssize_t cuFileRead(CUfileHandle_t file, void *base, size_t size, off_t at, off_t start) {
  return move(READ, file, base, size, at, start);
}

ssize_t cuFileWrite(CUfileHandle_t file, const void *base, size_t size, off_t at, off_t start) {
  return move(WRITE, file, (char *)base, size, at, start);
}
