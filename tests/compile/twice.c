// Both halves twice, declarations first: the guards make the second time harmless.
#include "rocq.h"
#include "rocq.h"
#define ROCQ_IMPLEMENTATION
#include "rocq.h"
#include "rocq.h"
