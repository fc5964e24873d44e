// ds.h - the containers of stb_ds, for programs that may end where memory runs out: with one line
// on stderr, which begins with DS_PROGRAM, and exit status 1.
//
// Debian's libstb-dev puts stb/stb_ds.h where compilers look. Where there is no such package, -I
// names a folder that holds it; a MinGW compiler on Debian needs -idirafter /usr/include.

#ifndef DS_H
#define DS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifndef DS_PROGRAM
#define DS_PROGRAM "stb_ds"
#endif

static int64_t ds_n_allocs; // so far

static void *ds_realloc(void *block, size_t size) {
    void *moved = realloc(block, size);
    ds_n_allocs++;
    if (!moved) {
        fprintf(stderr, DS_PROGRAM ": no memory for %.0f bytes\n", (double)size);
        exit(1);
    }
    return moved;
}

#define STBDS_REALLOC(context, block, size) ds_realloc(block, size)
#define STBDS_FREE(context, block) free(block)
#define STB_DS_IMPLEMENTATION
#include <stb/stb_ds.h>

#endif // DS_H
