/* Loaded before libc (LD_PRELOAD): sees the file and socket calls of a process, writes them down, and at the
 * n-th that fits a pattern fails, kills or stops the process. Nothing happens before `crash_arm`.
 *
 * Calls go to the kernel by `syscall`, so the shim never meets itself. A call that changes a file is made and
 * written down under one lock: the trace has the order of the effects. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <regex.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* In the order of `faults.OPERATIONS`. */
enum op { CREATE, OPEN, WRITE, TRUNCATE, FSYNC, RENAME, UNLINK, RMDIR, MKDIR, LINK, READ, SEND };
enum action { WATCH, FAIL, KILL, STOP };

struct record {
    int32_t op, hit;
    int64_t offset, length;
    int32_t path_bytes, other_bytes, data_bytes, unused;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int armed, action, error_number, with_data, log_fd;
static uint32_t operations;
static long left;
static regex_t pattern;

int crash_arm(const char *expression, uint32_t which, long n, int act, int number, int fd, int data) {
    operations = which, left = n, action = act, error_number = number, log_fd = fd, with_data = data;
    int refused = regcomp(&pattern, expression, REG_EXTENDED | REG_NOSUB);
    armed = !refused;
    return refused;
}

void crash_disarm(void) { armed = 0; }

static void path_of(int fd, const char *name, char *path) {
    path[0] = 0;
    if ((name && name[0] == '/') || fd == AT_FDCWD) {
        strncpy(path, name, PATH_MAX - 1);
        return;
    }
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    if (name)
        strncat(path, "/", PATH_MAX - strlen(path) - 1), strncat(path, name, PATH_MAX - strlen(path) - 1);
}

static void note(enum op op, int hit, const char *path, const char *other, long offset, long length,
                 const void *data) {
    struct record head = {op, hit, offset, length, strlen(path), strlen(other), data ? length : 0, 0};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)path, head.path_bytes},
                            {(void *)other, head.other_bytes}, {(void *)data, head.data_bytes}};
    syscall(SYS_writev, log_fd, parts, 4);
}

/* Counts a call; returns whether it is to fail. `half` writes the first half of what the call would write. */
static int faulty(enum op op, const char *path, const char *other, void (*half)(void *), void *call) {
    if (!(operations & 1u << op) || --left != 0)
        return 0;
    note(op, 1, path, other, 0, 0, NULL);
    if (action == KILL) {
        if (half)
            half(call);
        syscall(SYS_kill, getpid(), SIGKILL);
        for (;;)
            pause();
    }
    if (action == STOP)
        syscall(SYS_kill, getpid(), SIGSTOP);
    return action == FAIL;
}

static int fits(const char *path, const char *other) {
    return !regexec(&pattern, path, 0, NULL, 0) || (other[0] && !regexec(&pattern, other, 0, NULL, 0));
}

/* Makes a call that changes names or bytes, between its count and its record. */
#define CHANGE(OP, PATH, OTHER, OFFSET, LENGTH, DATA, HALF, CALL, MADE)                                           \
    do {                                                                                                          \
        pthread_mutex_lock(&lock);                                                                                \
        int fail = faulty(OP, PATH, OTHER, HALF, CALL);                                                           \
        long done = fail ? -1 : (MADE);                                                                           \
        int number = fail ? error_number : errno;                                                                 \
        if (done >= 0)                                                                                            \
            note(OP, 0, PATH, OTHER, OFFSET, LENGTH, DATA);                                                       \
        pthread_mutex_unlock(&lock);                                                                              \
        errno = number;                                                                                           \
        return done;                                                                                              \
    } while (0)

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    if (!armed || (path_of(folder, name, path), !fits(path, "")))
        return syscall(SYS_openat, folder, name, flags, mode);
    int creates = flags & O_CREAT && syscall(SYS_faccessat, folder, name, F_OK) != 0;
    CHANGE(creates ? CREATE : flags & O_TRUNC ? TRUNCATE : OPEN, path, "", 0, 0, NULL, NULL, NULL,
           syscall(SYS_openat, folder, name, flags, mode));
}

#define MODE(flags)                                                                                               \
    mode_t mode = 0;                                                                                              \
    if (flags & (O_CREAT | __O_TMPFILE)) {                                                                        \
        va_list rest;                                                                                             \
        va_start(rest, flags), mode = va_arg(rest, int), va_end(rest);                                            \
    }
int open(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE(flags) return opened(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE(flags) return opened(folder, name, flags, mode); }

struct written { int fd; const void *data; size_t length; long offset; };

static void write_half(void *call) {
    struct written *all = call;
    size_t half = all->length / 2 & ~4095ul;
    if (half)
        syscall(SYS_pwrite64, all->fd, all->data, half, all->offset);
}

static ssize_t written(int fd, const void *data, size_t length, long offset) {
    char path[PATH_MAX];
    int at_position = offset < 0;
    if (!armed || (path_of(fd, NULL, path), !fits(path, "")))
        return at_position ? syscall(SYS_write, fd, data, length) : syscall(SYS_pwrite64, fd, data, length, offset);
    if (at_position)
        offset = syscall(SYS_lseek, fd, 0, syscall(SYS_fcntl, fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
    struct written call = {fd, data, length, offset};
    CHANGE(WRITE, path, "", offset, done, with_data && done > 0 ? data : NULL, write_half, &call,
           at_position ? syscall(SYS_write, fd, data, length) : syscall(SYS_pwrite64, fd, data, length, offset));
}

ssize_t write(int fd, const void *data, size_t length) { return written(fd, data, length, -1); }
ssize_t pwrite(int fd, const void *data, size_t length, off_t at) { return written(fd, data, length, at); }
ssize_t pwrite64(int fd, const void *data, size_t length, off_t at) { return written(fd, data, length, at); }

#define ON_FILE(RETURNS, NAME, PARAMETERS, OP, LENGTH, MADE)                                                      \
    RETURNS NAME PARAMETERS {                                                                                     \
        char path[PATH_MAX];                                                                                      \
        if (!armed || (path_of(fd, NULL, path), !fits(path, "")))                                                 \
            return MADE;                                                                                          \
        CHANGE(OP, path, "", 0, LENGTH, NULL, NULL, NULL, MADE);                                                  \
    }
ON_FILE(int, fsync, (int fd), FSYNC, 0, syscall(SYS_fsync, fd))
ON_FILE(int, fdatasync, (int fd), FSYNC, 0, syscall(SYS_fdatasync, fd))
ON_FILE(int, ftruncate, (int fd, off_t length), TRUNCATE, length, syscall(SYS_ftruncate, fd, length))
ON_FILE(int, ftruncate64, (int fd, off_t length), TRUNCATE, length, syscall(SYS_ftruncate, fd, length))

#define ON_NAME(NAME, PARAMETERS, FOLDER, OP, MADE)                                                               \
    int NAME PARAMETERS {                                                                                         \
        char path[PATH_MAX];                                                                                      \
        if (!armed || (path_of(FOLDER, name, path), !fits(path, "")))                                             \
            return MADE;                                                                                          \
        CHANGE(OP, path, "", 0, 0, NULL, NULL, NULL, MADE);                                                       \
    }
ON_NAME(unlink, (const char *name), AT_FDCWD, UNLINK, syscall(SYS_unlinkat, AT_FDCWD, name, 0))
ON_NAME(unlinkat, (int folder, const char *name, int flags), folder, flags & AT_REMOVEDIR ? RMDIR : UNLINK,
        syscall(SYS_unlinkat, folder, name, flags))
ON_NAME(rmdir, (const char *name), AT_FDCWD, RMDIR, syscall(SYS_unlinkat, AT_FDCWD, name, AT_REMOVEDIR))
ON_NAME(mkdir, (const char *name, mode_t mode), AT_FDCWD, MKDIR, syscall(SYS_mkdirat, AT_FDCWD, name, mode))
ON_NAME(mkdirat, (int folder, const char *name, mode_t mode), folder, MKDIR,
        syscall(SYS_mkdirat, folder, name, mode))

int renameat(int from, const char *old, int to, const char *name) {
    char path[PATH_MAX], other[PATH_MAX];
    if (!armed || (path_of(from, old, path), path_of(to, name, other), !fits(path, other)))
        return syscall(SYS_renameat2, from, old, to, name, 0);
    CHANGE(RENAME, path, other, 0, 0, NULL, NULL, NULL, syscall(SYS_renameat2, from, old, to, name, 0));
}
int rename(const char *old, const char *name) { return renameat(AT_FDCWD, old, AT_FDCWD, name); }

int linkat(int from, const char *old, int to, const char *name, int flags) {
    char path[PATH_MAX], other[PATH_MAX];
    if (!armed || (path_of(from, old, path), path_of(to, name, other), !fits(path, other)))
        return syscall(SYS_linkat, from, old, to, name, flags);
    CHANGE(LINK, path, other, 0, 0, NULL, NULL, NULL, syscall(SYS_linkat, from, old, to, name, flags));
}
int link(const char *old, const char *name) { return linkat(AT_FDCWD, old, AT_FDCWD, name, 0); }

/* Calls that change no file may wait for another thread: they are counted, and made outside of the lock. */
#define COUNTED(RETURNS, NAME, PARAMETERS, OP, MADE)                                                              \
    RETURNS NAME PARAMETERS {                                                                                     \
        char path[PATH_MAX];                                                                                      \
        if (armed && (path_of(fd, NULL, path), fits(path, ""))) {                                                 \
            pthread_mutex_lock(&lock);                                                                            \
            int fail = faulty(OP, path, "", NULL, NULL);                                                          \
            if (!fail)                                                                                            \
                note(OP, 0, path, "", 0, 0, NULL);                                                                \
            pthread_mutex_unlock(&lock);                                                                          \
            if (fail)                                                                                             \
                return errno = error_number, -1;                                                                  \
        }                                                                                                         \
        return MADE;                                                                                              \
    }
COUNTED(ssize_t, read, (int fd, void *data, size_t length), READ, syscall(SYS_read, fd, data, length))
COUNTED(ssize_t, pread, (int fd, void *data, size_t length, off_t at), READ,
        syscall(SYS_pread64, fd, data, length, at))
COUNTED(ssize_t, pread64, (int fd, void *data, size_t length, off_t at), READ,
        syscall(SYS_pread64, fd, data, length, at))
COUNTED(ssize_t, preadv, (int fd, const struct iovec *parts, int count, off_t at), READ,
        syscall(SYS_preadv, fd, parts, count, at, 0))
COUNTED(ssize_t, preadv64, (int fd, const struct iovec *parts, int count, off_t at), READ,
        syscall(SYS_preadv, fd, parts, count, at, 0))
COUNTED(ssize_t, send, (int fd, const void *data, size_t length, int flags), SEND,
        syscall(SYS_sendto, fd, data, length, flags, NULL, 0))
COUNTED(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), SEND,
        syscall(SYS_sendmsg, fd, message, flags))
