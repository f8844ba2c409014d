/* te_os_limits.h - how many cores and how much memory this process may use, read from /proc and /sys. Linux; part of
 * te_os.
 *
 * `root` is put before every path ("" for the real system), so that a test can lay out a machine of its own.
 */
#ifndef TE_OS_LIMITS_H
#define TE_OS_LIMITS_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Physical cores among the n CPUs: those that share their first SMT sibling count once. A CPU without topology files is
 * a core of its own. */
int32_t te_os_cores_of(const char *root, const int32_t *cpus, int32_t n);

/* How long in all the n CPUs ran programs or the system, in clock ticks; with_nice: those that give way, too. False if one
 * of the CPUs is not listed. */
bool te_os_busy_ticks(const char *root, const int32_t *cpus, int32_t n, bool with_nice, int64_t *ticks);

/* The smallest CPU quota of the process's cgroups (v1 or v2), in thousandths of a CPU; INT64_MAX if there is none. */
int64_t te_os_quota_milli(const char *root);

/* Of n CPUs those that the quota leaves, to the nearest whole, at least one: when a quota is spent all threads stop together,
 * so that two do more than one with 1.5 CPUs. */
int32_t te_os_under_quota(const char *root, int32_t n);

/* The smallest memory limit of the process's cgroups (v1 or v2), in bytes; UINT64_MAX if there is none. */
uint64_t te_os_memory_limit(const char *root);

/* What is left of the memory, and of every cgroup's limit, the cache of files counted as free, in bytes; UINT64_MAX if
 * nothing says so. */
uint64_t te_os_memory_left(const char *root);

#ifdef __cplusplus
}
#endif
#endif
