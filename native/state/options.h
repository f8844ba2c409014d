/* options.h - checks of a session's options. */
#ifndef PI_OPTIONS_H
#define PI_OPTIONS_H

#include "../model/model.h"

/* Checks what sessions and plans alike are asked for, all but n_threads, and puts numbers where zeros, and a mode where
 * AUTO, stand for defaults. The model need not be loaded. Errors: ARGUMENT. */
pi_status pi_session_check(const pi_model *m, pi_session_options *o);
/* The mode that is meant, where the model can have it. Errors: ARGUMENT. */
pi_status pi_check_sparsity(const pi_model *m, int32_t asked, int32_t *out);
/* That lo <= v <= hi, by name. Errors: ARGUMENT. */
pi_status pi_in_range(const char *name, int32_t v, int32_t lo, int32_t hi);

#endif
