// The implementation that suites share, and what they look at inside of it.
#define ROCQ_IMPLEMENTATION
#define INSIDE_SHARED
#include "../inside.h"
