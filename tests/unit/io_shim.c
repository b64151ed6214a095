// A drive that misbehaves, for tests: preloaded, it comes between a program and the kernel for files whose directory
// has "spill" in its name. A file without a name of its own is called "/directory/#12345 (deleted)" by the kernel.
//
//   SHIM_FAULT  what goes wrong: one of the names below
//   SHIM_AFTER  how many requests of that direction go well before
//   SHIM_EVERY  then every how many go wrong
//   SHIM_SECONDS  how long a slow request takes
//
// CPython calls preadv2 and pwritev2 where there are such, and the C library has each under two names.

#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 4096

static long reads, writes;

// For a program that has several faults injected one after the other, through its environment.
void shim_reset(void) { reads = writes = 0; }

static long setting(const char *name, long otherwise) {
  const char *value = getenv(name);
  return value ? atol(value) : otherwise;
}

static int spilled(int fd) {
  char link[64], target[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, target, sizeof target - 1);
  if (length <= 0) return 0;
  target[length] = 0;
  return strstr(target, "spill") != NULL;
}

// The fault that this request meets, or "".
static const char *fault(int fd, long *count) {
  if (!spilled(fd)) return "";
  long number = __sync_fetch_and_add(count, 1) - setting("SHIM_AFTER", 0);
  const char *name = getenv("SHIM_FAULT");
  return name && number >= 0 && number % setting("SHIM_EVERY", 1) == 0 ? name : "";
}

static ssize_t failed(int code) {
  errno = code;
  return -1;
}

static void never(void) {
  for (;;) pause();
}

static void slow(void) {
  struct timespec left = {setting("SHIM_SECONDS", 1), 0};
  while (nanosleep(&left, &left)) continue;
}

static ssize_t transfer(long call, int fd, const struct iovec *parts, int count, off_t offset, int flags) {
  return syscall(call, fd, parts, count, offset, 0, flags);
}

static ssize_t one_block(long call, int fd, const struct iovec *parts, off_t offset, int flags) {
  struct iovec first = {parts->iov_base, parts->iov_len < BLOCK ? parts->iov_len : BLOCK};
  return transfer(call, fd, &first, 1, offset, flags);
}

static ssize_t write_parts(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
  const char *name = fault(fd, &writes);
  if (!strcmp(name, "failed write")) return failed(EIO);
  if (!strcmp(name, "full")) return failed(ENOSPC);
  if (!strcmp(name, "again")) return failed(EAGAIN);
  if (!strcmp(name, "interrupted")) return failed(EINTR);
  if (!strcmp(name, "lost write")) return parts->iov_len;
  if (!strcmp(name, "hanging write")) never();
  if (!strcmp(name, "slow write")) slow();
  if (!strcmp(name, "short")) return one_block(SYS_pwritev2, fd, parts, offset, flags);
  if (!strcmp(name, "misdirected write") && offset >= BLOCK) offset -= BLOCK;
  return transfer(SYS_pwritev2, fd, parts, count, offset, flags);
}

static ssize_t read_parts(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
  const char *name = fault(fd, &reads);
  if (!strcmp(name, "failed read")) return failed(EIO);
  if (!strcmp(name, "again")) return failed(EAGAIN);
  if (!strcmp(name, "interrupted")) return failed(EINTR);
  if (!strcmp(name, "empty read")) return 0;
  if (!strcmp(name, "hanging read")) never();
  if (!strcmp(name, "slow read")) slow();
  if (!strcmp(name, "short")) return one_block(SYS_preadv2, fd, parts, offset, flags);
  ssize_t got = transfer(SYS_preadv2, fd, parts, count, offset, flags);
  if (!strcmp(name, "flipped read") && got > 0) ((char *)parts->iov_base)[got / 2] ^= 4;
  return got;
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
  return write_parts(fd, parts, count, offset, 0);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
  return write_parts(fd, parts, count, offset, 0);
}

ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
  return write_parts(fd, parts, count, offset, flags);
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
  return write_parts(fd, parts, count, offset, flags);
}

ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset) {
  return read_parts(fd, parts, count, offset, 0);
}

ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t offset) {
  return read_parts(fd, parts, count, offset, 0);
}

ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
  return read_parts(fd, parts, count, offset, flags);
}

ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
  return read_parts(fd, parts, count, offset, flags);
}
