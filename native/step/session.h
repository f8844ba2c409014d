/* session.h - checks of a session's options. */
#ifndef PI_SESSION_H
#define PI_SESSION_H

#include "state.h"

/* Checks what sessions and plans alike are asked for, all but n_threads, and puts numbers where zeros, and a mode where
 * AUTO, stand for defaults. The model need not be loaded. Errors: ARGUMENT. */
pi_status pi_session_check(const pi_model *m, pi_session_options *o);

#endif
