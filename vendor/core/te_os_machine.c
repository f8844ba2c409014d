/* te_os_machine.c - what kind of machine this is, read from /proc, /sys and /etc, and libraries opened at run time.
 * Linux. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "te_os.h"
#include "te_os_limits.h"

/* ---- text files ---- */

/* The start of a file, at most n_out - 1 bytes, zero-terminated; false if it cannot be read. */
static bool read_file(const char *root, const char *path, char *out, size_t n_out) {
    char full[512];
    out[0] = '\0';
    const int n = snprintf(full, sizeof full, "%s%s", root, path);
    if (n < 0 || (size_t)n >= sizeof full) return false;
    FILE *f = fopen(full, "re");
    if (f == NULL) return false;
    out[fread(out, 1, n_out - 1, f)] = '\0';
    fclose(f);
    return true;
}

static bool exists(const char *root, const char *path) {
    char full[512];
    const int n = snprintf(full, sizeof full, "%s%s", root, path);
    return n > 0 && (size_t)n < sizeof full && access(full, F_OK) == 0;
}

/* Copies a piece of text on one line: to its end, its newline or a closing quote. */
static void copy_line(char *out, size_t n_out, const char *from) {
    from += strspn(from, " \t\"'");
    size_t n = strcspn(from, "\n\"'");
    while (n > 0 && (from[n - 1] == ' ' || from[n - 1] == '\t')) n--;
    if (n >= n_out) n = n_out - 1;
    memcpy(out, from, n);
    out[n] = '\0';
}

/* What follows "name" and separator on the line that begins with name, or NULL. */
static const char *value_of(const char *text, const char *name, char separator) {
    const size_t n = strlen(name);
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        if (*line == '\n') line++;
        if (strncmp(line, name, n) == 0) {
            const char *p = line + n + strspn(line + n, " \t");
            if (*p == separator) return p + 1;
        }
    }
    return NULL;
}

/* Entries of a list such as "0-3,8,10-11". */
static int32_t list_length(const char *text) {
    int64_t n = 0;
    while (*text != '\0' && *text != '\n') {
        char *end;
        const long lo = strtol(text, &end, 10);
        if (end == text) break;
        long hi = lo;
        if (*end == '-') {
            text = end + 1;
            hi = strtol(text, &end, 10);
            if (end == text) break;
        }
        if (lo < 0 || hi < lo || hi > 1 << 20) break;
        n += hi - lo + 1;
        text = *end == ',' ? end + 1 : end;
    }
    return n > INT32_MAX ? INT32_MAX : (int32_t)n;
}

/* ---- the machine ---- */

static void read_cpu(const char *root, te_machine *m) {
    char text[8192], line[256];
    if (read_file(root, "/proc/cpuinfo", text, sizeof text)) {
        const char *name = value_of(text, "model name", ':');
        if (name != NULL) copy_line(m->cpu, sizeof m->cpu, name);
    }
    if (read_file(root, "/sys/devices/system/cpu/online", line, sizeof line)) m->n_online = list_length(line);
    if (read_file(root, "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list", line, sizeof line))
        m->threads_per_core = list_length(line);
    if (read_file(root, "/sys/devices/system/node/online", line, sizeof line)) m->n_numa = list_length(line);
    const int64_t quota = te_os_quota_milli(root);
    m->cpu_quota = quota == INT64_MAX ? 0 : (double)quota / 1000;
}

static uint64_t kib_of(const char *text, const char *name) {
    const char *p = value_of(text, name, ':');
    uint64_t n = 0;
    if (p != NULL && sscanf(p, "%" SCNu64, &n) != 1) n = 0;
    return n > UINT64_MAX / 1024 ? 0 : n * 1024;
}

static void read_memory(const char *root, te_machine *m) {
    char text[4096];
    if (read_file(root, "/proc/meminfo", text, sizeof text)) {
        m->memory_bytes = kib_of(text, "MemTotal");
        m->memory_free_bytes = kib_of(text, "MemAvailable");
    }
    const uint64_t left = te_os_memory_left(root);
    if (left < m->memory_free_bytes) m->memory_free_bytes = left;
    const uint64_t limit = te_os_memory_limit(root);
    m->memory_limit_bytes = limit >= m->memory_bytes ? 0 : limit;
    /* "always [madvise] never": the chosen word stands in brackets. */
    if (read_file(root, "/sys/kernel/mm/transparent_hugepage/enabled", text, sizeof text)) {
        const char *open = strchr(text, '[');
        const size_t n = open != NULL ? strcspn(open + 1, "]\n") : 0;
        if (n > 0 && n < sizeof m->huge_pages) memcpy(m->huge_pages, open + 1, n);
    }
    struct rlimit lock;
    if (getrlimit(RLIMIT_MEMLOCK, &lock) == 0)
        m->memlock_bytes = lock.rlim_cur == RLIM_INFINITY ? UINT64_MAX : (uint64_t)lock.rlim_cur;
}

static void read_system(const char *root, te_machine *m) {
    char text[4096];
    struct utsname u;
    if (uname(&u) == 0) snprintf(m->os, sizeof m->os, "%.40s %.60s %.24s", u.sysname, u.release, u.machine);
    if (read_file(root, "/etc/os-release", text, sizeof text)) {
        const char *name = value_of(text, "PRETTY_NAME", '=');
        if (name != NULL) copy_line(m->distribution, sizeof m->distribution, name);
    }
    const size_t n = confstr(_CS_GNU_LIBC_VERSION, m->libc, sizeof m->libc);
    if (n == 0 || n > sizeof m->libc) m->libc[0] = '\0';

    const char *container = "";
    if (read_file(root, "/proc/1/cgroup", text, sizeof text)) {
        if (strstr(text, "kubepods") != NULL)
            container = "kubernetes";
        else if (strstr(text, "docker") != NULL)
            container = "docker";
        else if (strstr(text, "lxc") != NULL)
            container = "lxc";
    }
    if (exists(root, "/.dockerenv")) container = "docker";
    if (exists(root, "/run/.containerenv")) container = "podman";
    if (read_file(root, "/proc/version", text, sizeof text) && strstr(text, "icrosoft") != NULL) container = "WSL";
    snprintf(m->container, sizeof m->container, "%s", container);
}

void te_os_machine(const char *root, te_machine *out) {
    *out = (te_machine){0};
    read_cpu(root, out);
    read_memory(root, out);
    read_system(root, out);
}

/* ---- libraries ---- */

void *te_os_library(const char *name, char *why, size_t n_why) {
    if (n_why > 0) why[0] = '\0';
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    const char *error = library == NULL ? dlerror() : NULL;
    if (error != NULL && n_why > 0) snprintf(why, n_why, "%s", error);
    return library;
}

bool te_os_own_folder(char *folder, size_t n) {
    static const char here;
    Dl_info self;
    const char *end = dladdr(&here, &self) && self.dli_fname ? strrchr(self.dli_fname, '/') : NULL;
    const size_t length = end ? (size_t)(end + 1 - self.dli_fname) : 0;
    if (length == 0 || length >= n) return false;
    memcpy(folder, self.dli_fname, length);
    folder[length] = '\0';
    return true;
}

bool te_os_symbol(void *library, const char *name, void *function, size_t n_function) {
    void *p = dlsym(library, name);
    if (p == NULL || n_function != sizeof p) return false;
    memcpy(function, &p, sizeof p); /* ISO C has no conversion from void * to a function's pointer */
    return true;
}
