// The one file of a program that holds the implementation.
#define ROCQ_IMPLEMENTATION
#include "rocq.h"
