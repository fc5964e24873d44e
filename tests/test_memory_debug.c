// tests/test_memory.c with guard bytes behind the pools' blocks.
#define ROCQ_DEBUG
#include "test_memory.c"
