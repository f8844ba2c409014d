/* stress.h - what *_stress.c programs check with: the first thing that does not hold is printed, and ends the program. */
#ifndef STRESS_H
#define STRESS_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                            \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fprintf(stderr, " (%s does not hold)\n", #condition);                                                      \
            _Exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

#endif
