/* te_os_limits.c - cores and memory that this process may use, read from /proc and /sys.
 *
 * A cgroup's limit binds all groups below it, so the group of the process and each of its parents are read, up to the
 * root of the mount. In a container the path in /proc/self/cgroup may be the host's and not exist here; the walk then
 * still ends at the root, which is the container's.
 *
 * cgroup v2: /sys/fs/cgroup/GROUP/{cpu.max, memory.max, memory.high}
 * cgroup v1: /sys/fs/cgroup/cpu/GROUP/cpu.cfs_{quota,period}_us, /sys/fs/cgroup/memory/GROUP/memory.limit_in_bytes
 */
#define _GNU_SOURCE
#include "te_os_limits.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH_BYTES 4096

/* Reads the first line of root + path without its newline. */
static bool read_line(const char *root, const char *path, char *out, int n_out) {
    char full[PATH_BYTES + 256];
    const int n = snprintf(full, sizeof full, "%s%s", root, path);
    if (n < 0 || (size_t)n >= sizeof full) return false;
    FILE *f = fopen(full, "re");
    if (f == NULL) return false;
    const bool ok = fgets(out, n_out, f) != NULL;
    fclose(f);
    if (ok) out[strcspn(out, "\n")] = '\0';
    return ok;
}

int32_t te_os_cores_of(const char *root, const int32_t *cpus, int32_t n) {
    int32_t *first = n > 0 ? malloc((size_t)n * sizeof *first) : NULL;
    if (first == NULL) return n > 1 ? n : 1;
    int32_t n_cores = 0;
    for (int32_t i = 0; i < n; i++) {
        char path[128], line[256];
        int32_t core = cpus[i];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%" PRId32 "/topology/thread_siblings_list", cpus[i]);
        if (read_line(root, path, line, sizeof line)) { /* "3,7" or "3-4": the first number names the core */
            char *end;
            const long sibling = strtol(line, &end, 10);
            if (end != line && sibling >= 0 && sibling <= INT32_MAX) core = (int32_t)sibling;
        }
        int32_t k = 0;
        while (k < n_cores && first[k] != core) k++;
        if (k == n_cores) first[n_cores++] = core;
    }
    free(first);
    return n_cores;
}

bool te_os_busy_ticks(const char *root, const int32_t *cpus, int32_t n, bool with_nice, int64_t *ticks) {
    char path[PATH_BYTES], line[512];
    const int length = snprintf(path, sizeof path, "%s/proc/stat", root);
    if (length < 0 || (size_t)length >= sizeof path) return false;
    FILE *f = fopen(path, "re");
    if (f == NULL) return false;
    *ticks = 0;
    int32_t found = 0;
    /* "cpu3 USER NICE SYSTEM IDLE IOWAIT IRQ SOFTIRQ ...", first of all, in rising order, as the CPUs are. */
    while (found < n && fgets(line, sizeof line, f) != NULL && strncmp(line, "cpu", 3) == 0) {
        int32_t cpu;
        int64_t user, nice, system, irq, soft;
        if (sscanf(line, "cpu%" SCNd32 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %*d %*d %" SCNd64 " %" SCNd64, &cpu, &user,
                   &nice, &system, &irq, &soft) != 6 || /* the sum of all has no number */
            cpu != cpus[found])
            continue;
        *ticks += user + system + irq + soft + (with_nice ? nice : 0);
        found++;
    }
    fclose(f);
    return n > 0 && found == n;
}

/* Whether the comma-separated list of v1 controllers holds name. */
static bool has_controller(const char *list, size_t n, const char *name) {
    const size_t n_name = strlen(name);
    for (size_t i = 0; i + n_name <= n; i++)
        if ((i == 0 || list[i - 1] == ',') && memcmp(list + i, name, n_name) == 0 &&
            (i + n_name == n || list[i + n_name] == ','))
            return true;
    return false;
}

/* The process's group for a v1 controller, or with controller "" for the v2 hierarchy. Lines are
 * "ID:CONTROLLERS:GROUP". */
static bool find_group(const char *root, const char *controller, char *out) {
    char path[PATH_BYTES];
    const int n = snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    if (n < 0 || (size_t)n >= sizeof path) return false;
    FILE *f = fopen(path, "re");
    if (f == NULL) return false;
    bool found = false;
    char line[PATH_BYTES];
    while (!found && fgets(line, sizeof line, f) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        const char *list = strchr(line, ':');
        const char *group = list != NULL ? strchr(list + 1, ':') : NULL;
        if (group == NULL) continue;
        const size_t n_list = (size_t)(group - (list + 1));
        if (controller[0] == '\0' ? n_list == 0 : has_controller(list + 1, n_list, controller)) {
            snprintf(out, PATH_BYTES, "%s", strcmp(group + 1, "/") == 0 ? "" : group + 1);
            found = true;
        }
    }
    fclose(f);
    return found;
}

typedef uint64_t read_limit(const char *root, const char *dir); /* UINT64_MAX: none */

/* The smallest limit from the process's group up to the mount's root. */
static uint64_t walk(const char *root, const char *controller, const char *mount, read_limit *read) {
    char group[PATH_BYTES], dir[PATH_BYTES + 64];
    if (!find_group(root, controller, group)) return UINT64_MAX;
    uint64_t limit = UINT64_MAX;
    for (;;) {
        snprintf(dir, sizeof dir, "%s%s", mount, group);
        const uint64_t here = read(root, dir);
        if (here < limit) limit = here;
        char *slash = strrchr(group, '/');
        if (slash == NULL) return limit;
        *slash = '\0';
    }
}

static uint64_t milli(uint64_t quota, uint64_t period) {
    if (period == 0 || quota > UINT64_MAX / 1000) return UINT64_MAX;
    return quota * 1000 / period;
}

static uint64_t cpu_v2(const char *root, const char *dir) {
    char path[PATH_BYTES + 128], line[128];
    uint64_t quota, period;
    snprintf(path, sizeof path, "%s/cpu.max", dir); /* "max 100000" or "150000 100000" */
    if (!read_line(root, path, line, sizeof line)) return UINT64_MAX;
    if (sscanf(line, "%" SCNu64 " %" SCNu64, &quota, &period) != 2) return UINT64_MAX;
    return milli(quota, period);
}

static uint64_t cpu_v1(const char *root, const char *dir) {
    char path[PATH_BYTES + 128], line[128];
    int64_t quota, period;
    snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", dir); /* -1: none */
    if (!read_line(root, path, line, sizeof line) || sscanf(line, "%" SCNd64, &quota) != 1) return UINT64_MAX;
    snprintf(path, sizeof path, "%s/cpu.cfs_period_us", dir);
    if (!read_line(root, path, line, sizeof line) || sscanf(line, "%" SCNd64, &period) != 1) return UINT64_MAX;
    if (quota < 0 || period <= 0) return UINT64_MAX;
    return milli((uint64_t)quota, (uint64_t)period);
}

static uint64_t number_in(const char *root, const char *dir, const char *file) {
    char path[PATH_BYTES + 128], line[128];
    uint64_t value;
    snprintf(path, sizeof path, "%s/%s", dir, file);
    if (!read_line(root, path, line, sizeof line) || sscanf(line, "%" SCNu64, &value) != 1) return UINT64_MAX;
    return value;
}

/* Beyond "high" a group is not killed, but held up until hardly anything runs. */
static uint64_t memory_v2(const char *root, const char *dir) {
    const uint64_t max = number_in(root, dir, "memory.max"), high = number_in(root, dir, "memory.high");
    return high < max ? high : max;
}

static uint64_t memory_v1(const char *root, const char *dir) { return number_in(root, dir, "memory.limit_in_bytes"); }

int64_t te_os_quota_milli(const char *root) {
    const uint64_t v2 = walk(root, "", "/sys/fs/cgroup", cpu_v2);
    const uint64_t v1 = walk(root, "cpu", "/sys/fs/cgroup/cpu", cpu_v1);
    const uint64_t limit = v1 < v2 ? v1 : v2;
    return limit > INT64_MAX ? INT64_MAX : (int64_t)limit;
}

int32_t te_os_under_quota(const char *root, int32_t n) {
    const int64_t quota = te_os_quota_milli(root), nearest = quota / 1000 + (quota % 1000 >= 500);
    if (n > nearest) n = (int32_t)nearest;
    return n < 1 ? 1 : n;
}

uint64_t te_os_memory_limit(const char *root) {
    const uint64_t v2 = walk(root, "", "/sys/fs/cgroup", memory_v2);
    const uint64_t v1 = walk(root, "memory", "/sys/fs/cgroup/memory", memory_v1);
    return v1 < v2 ? v1 : v2;
}

/* Sum of the numbers of the lines "NAME NUMBER" or "NAME: NUMBER kB" of a file whose name is one of two. */
static uint64_t sum_of(const char *root, const char *path, const char *a, const char *b) {
    char full[PATH_BYTES + 256], line[256], name[128];
    uint64_t value, sum = 0;
    const int n = snprintf(full, sizeof full, "%s%s", root, path);
    if (n < 0 || (size_t)n >= sizeof full) return 0;
    FILE *f = fopen(full, "re");
    if (f == NULL) return 0;
    while (fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "%127s %" SCNu64, name, &value) == 2 && (strcmp(name, a) == 0 || strcmp(name, b) == 0) &&
            value <= UINT64_MAX - sum)
            sum += value;
    fclose(f);
    return sum;
}

/* What a group has left: its limit, less what it uses that is not the cache of files. */
static uint64_t left_of(const char *root, const char *dir, uint64_t limit, const char *usage, const char *a,
                        const char *b) {
    const uint64_t used = number_in(root, dir, usage);
    if (limit == UINT64_MAX || used == UINT64_MAX) return limit;
    char path[PATH_BYTES + 128];
    snprintf(path, sizeof path, "%s/memory.stat", dir);
    const uint64_t cache = sum_of(root, path, a, b), held = used > cache ? used - cache : 0;
    return limit > held ? limit - held : 0;
}

static uint64_t left_v2(const char *root, const char *dir) {
    return left_of(root, dir, memory_v2(root, dir), "memory.current", "active_file", "inactive_file");
}

static uint64_t left_v1(const char *root, const char *dir) {
    return left_of(root, dir, memory_v1(root, dir), "memory.usage_in_bytes", "total_active_file",
                   "total_inactive_file");
}

uint64_t te_os_memory_left(const char *root) {
    uint64_t left = walk(root, "", "/sys/fs/cgroup", left_v2);
    const uint64_t v1 = walk(root, "memory", "/sys/fs/cgroup/memory", left_v1),
                   kib = sum_of(root, "/proc/meminfo", "MemAvailable:", "");
    if (v1 < left) left = v1;
    if (kib && kib <= UINT64_MAX / 1024 && kib * 1024 < left) left = kib * 1024;
    return left;
}
