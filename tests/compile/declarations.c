// A file that only calls rocq.
#include "rocq.h"
