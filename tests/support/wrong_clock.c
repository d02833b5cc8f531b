/* Preloaded into a process, it puts the process's wall clock CLOCK_OFF_S seconds off. Monotonic clocks stay right.

   libfaketime does that too, but a JVM with it starts ten times slower. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static int (*real_clock_gettime)(clockid_t, struct timespec *);
static time_t off_s;

__attribute__((constructor)) static void prepare(void) {
    const char *off = getenv("CLOCK_OFF_S");
    real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    off_s = off ? atol(off) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_clock_gettime) prepare();
    int result = real_clock_gettime(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += off_s;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *stored) {
    struct timespec precise;
    if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
    if (stored) *stored = precise.tv_sec;
    return precise.tv_sec;
}
