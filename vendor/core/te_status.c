/* te_status.c - the thread's last error sentence. A failure inside vsnprintf itself leaves the format string as the
 * sentence. */
#include "te_status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[1024];

te_status(te_fail)(te_status status, const char *format, ...) {
    /* Formatted aside first: an argument may point into the last sentence ("%s: %s", name, te_last_error()). */
    char sentence[sizeof last_error] = {0};
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    if (n < 0) strncpy(sentence, format, sizeof sentence - 1);
    memcpy(last_error, sentence, sizeof last_error);
    return status;
}

const char *te_last_error(void) { return last_error; }
