/* Preloaded into a daemon: shifts its wall clock by the nanoseconds in the file $WALLCLOCK (8 bytes, mapped).
 * CLOCK_MONOTONIC is not shifted, because a running machine never sets it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_ns;

__attribute__((constructor)) static void map_offset(void)
{
    const char *path = getenv("WALLCLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void *memory = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
        offset_ns = memory == MAP_FAILED ? NULL : memory;
        close(fd);
    }
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && clock == CLOCK_REALTIME && offset_ns) {
        int64_t total = now->tv_sec * 1000000000LL + now->tv_nsec + *offset_ns;
        now->tv_sec = total / 1000000000LL;
        now->tv_nsec = total % 1000000000LL;
    }
    return result;
}

time_t time(time_t *where)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where)
        *where = now.tv_sec;
    return now.tv_sec;
}
