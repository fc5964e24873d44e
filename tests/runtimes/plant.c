// plant.c - a library that has HIP's functions, for tests/runtimes/check to put where rocq.h looks
// for a runtime. It has no GPU, and the name of its errors tells that it was taken.
//
//     -DPLANT_LABEL='"..."'    the name of every error
//     -DPLANT_VERSION=N        what hipRuntimeGetVersion tells; 60443484
//     -DPLANT_INIT=N           what hipInit returns; 0
//     -DhipMemsetAsync=other   lacks that function

#define ROCQ_DEVICE
#include "../../rocq.h"

#ifndef PLANT_LABEL
#define PLANT_LABEL "hipErrorPlanted"
#endif
#ifndef PLANT_VERSION
#define PLANT_VERSION 60443484
#endif
#ifndef PLANT_INIT
#define PLANT_INIT 0
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#if defined(PLANT_NEEDS) // a function of another library
int PLANT_NEEDS(void);
EXPORT int plant_needs(void);
int plant_needs(void) { return PLANT_NEEDS(); }
#endif

#define ROCQ_X(need, field, symbol, parameters) \
    EXPORT int hip##symbol parameters;          \
    int hip##symbol parameters { return 100; }
ROCQ_HIP_FUNCTIONS(ROCQ_X)
#undef ROCQ_X

EXPORT int hipInit(unsigned flags);
int hipInit(unsigned flags) { return flags ? 1 : PLANT_INIT; }
EXPORT int hipRuntimeGetVersion(int *version);
int hipRuntimeGetVersion(int *version) {
    *version = PLANT_VERSION;
    return 0;
}
EXPORT const char *hipGetErrorName(int error);
const char *hipGetErrorName(int error) { return error ? PLANT_LABEL : "hipSuccess"; }
