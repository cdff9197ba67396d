/* A machine that was paused and whose clocks stood still meanwhile: CLOCK_BOOTTIME less the nanoseconds in
   the file that STOPPED_CLOCK names. gcc -shared -fPIC -o stopped_clock.so stopped_clock.c */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static volatile long long *lost;

static void map_lost(void) {
    static long long none;
    const char *name = getenv("STOPPED_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(0, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    lost = mapped == MAP_FAILED ? &none : mapped;
    if (file >= 0) close(file);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int result = syscall(SYS_clock_gettime, clock, at);
    if (!lost) map_lost();
    if (result == 0 && *lost && clock == CLOCK_BOOTTIME) {
        long long now = at->tv_sec * SECOND + at->tv_nsec - *lost;
        at->tv_sec = now / SECOND;
        at->tv_nsec = now % SECOND;
    }
    return result;
}
