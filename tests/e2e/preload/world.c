/* The world around one process, for tests: what time it is, and whether its disk is full. Loaded with LD_PRELOAD.
 *
 * $PENSTOCK_WORLD names a file of two 64-bit integers that the test changes while the process runs: seconds by which the wall clock is
 * off, and whether files below $PENSTOCK_WORLD_FOLDER can be written (not 0: they cannot, ENOSPC). The clocks that never jump stay as
 * they are, as on a machine whose time is set.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *world;
static const char *folder;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("PENSTOCK_WORLD");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void *at = mmap(NULL, 2 * sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  folder = getenv("PENSTOCK_WORLD_FOLDER");
  if (at != MAP_FAILED) world = at;
}

static int64_t off(void) { return world ? world[0] : 0; }

static int full(int fd) {
  struct stat stat;
  char link[64], path[PATH_MAX];
  if (!world || !world[1] || !folder || fstat(fd, &stat) || !S_ISREG(stat.st_mode)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return 0;
  path[length] = 0;
  if (strncmp(path, folder, strlen(folder))) return 0;
  errno = ENOSPC;
  return 1;
}

int clock_gettime(clockid_t id, struct timespec *ts) {
  int done = (int)syscall(SYS_clock_gettime, id, ts);
  if (!done && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) ts->tv_sec += off();
  return done;
}

int gettimeofday(struct timeval *restrict tv, void *restrict tz) {
  int done = (int)syscall(SYS_gettimeofday, tv, tz);
  if (!done && tv) tv->tv_sec += off();
  return done;
}

time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}

ssize_t write(int fd, const void *data, size_t size) { return full(fd) ? -1 : syscall(SYS_write, fd, data, size); }
ssize_t writev(int fd, const struct iovec *parts, int count) { return full(fd) ? -1 : syscall(SYS_writev, fd, parts, count); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return full(fd) ? -1 : syscall(SYS_pwrite64, fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { return full(fd) ? -1 : syscall(SYS_pwrite64, fd, data, size, at); }
int fallocate(int fd, int mode, off_t at, off_t size) { return full(fd) ? -1 : (int)syscall(SYS_fallocate, fd, mode, at, size); }
int posix_fallocate(int fd, off_t at, off_t size) { return full(fd) ? ENOSPC : syscall(SYS_fallocate, fd, 0, at, size) ? errno : 0; }
