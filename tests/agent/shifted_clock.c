/* CLOCK_BOOTTIME plus the nanoseconds in the file that SHIFTED_CLOCK names, read afresh at each call.
   gcc -shared -fPIC -o shifted_clock.so shifted_clock.c */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile long long *shift;

int clock_gettime(clockid_t id, struct timespec *at) {
    int done = syscall(SYS_clock_gettime, id, at);
    if (!shift) {
        static long long none;
        char *name = getenv("SHIFTED_CLOCK");
        int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
        void *page = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
        shift = page == MAP_FAILED ? &none : page;
        if (file >= 0) close(file);
    }
    if (done == 0 && *shift && id == CLOCK_BOOTTIME) {
        long long ns = at->tv_sec * 1000000000LL + at->tv_nsec + *shift;
        at->tv_sec = ns / 1000000000LL;
        at->tv_nsec = ns % 1000000000LL;
    }
    return done;
}
