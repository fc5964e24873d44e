/* rocq.h - v0.2.0 - quantized transformers on AMD RDNA3 GPUs, and on any CPU

   A single-file C11 library (stb style): GGUF models, 18 weight formats, fused dequantize-matmul,
   flash attention and the small operations around them, on plain tensors; and for pictures and
   videos convolution with its norms (a VAE: examples/vae.h). Its partner rocq_kernels.hip holds the
   GPU kernels; without it, or without a GPU, the CPU backend in this file does the work behind the
   same calls.

   Do this in ONE C or C++ file, and include it plainly everywhere else:

       #define ROCQ_IMPLEMENTATION
       #include "rocq.h"

   Build with one of these lines (Windows needs no -l):

       cc -O2 app.c -o app -lm -ldl -lpthread                 CPU, and GPU with kernels in a file
       cc -O2 -DROCQ_NO_HIP app.c -o app -lm -lpthread        CPU only
       hipcc -O3 --offload-arch=gfx1100 -x hip app.c rocq_kernels.hip -o app  GPU, kernels linked

   The hipcc line needs ROCm 6.4 or newer. Kernels in a file are a code object for all RDNA3 and
   RDNA3.5 chips: examples/build-kernels makes it, rocq_desc.kernels_path names it, and where the
   program runs, HIP 5.7 or later loads it.

   Licence: MIT or public domain, at your choice; see the end of this file.


   CONTENTS (search for the mark)

       >>options         macros you can set
       >>steps           from a file to a matrix product: a whole program
       >>contexts        what a context is, where the HIP runtime is looked for, how a GPU is
                         chosen and shared with a renderer, order, fallback, loss
       >>memory          buffers, arenas, tensors, scratch, what is allocated when
       >>graphs          a step recorded once and replayed, and the check of the replay
       >>time            timers, profile, warm-up
       >>tuning          the fastest launch of an op, found and kept
       >>errors          codes, messages, what a failure leaves behind, faults of a GPU
       >>numbers         precision, sum order, what is bit-exact, -ffast-math
       >>files           GGUF; files that get their name when they are whole
       >>history

       >>version, >>decl
       >>formats         the format table and the block structs
       >>results         the table of result codes
       >>types           descs, tensors, params structs (shapes and formulas stand here)
       >>api             functions
       >>kernels         what passes between this file and rocq_kernels.hip: planar layout, args
                         structs, the list of kernels, the HIP functions

       >>implementation  >>config >>includes >>util >>context >>log >>alloc >>arena >>tensor
                         >>threads
       >>cpu_quant       decode and encode blocks
       >>gguf            reader, files written whole, writer
       >>precision       what an op computes in
       >>cpu_vector      eight floats at once, with AVX2 or NEON
       >>cpu_matmul      >>cpu_rows    >>cpu_attention    >>cpu_ops
       >>cpu_pictures    convolution and its norms, resize, pixels
       >>hip_api         finding and loading the HIP runtime; the kernels, the device
       >>hip_memory      device memory, scratch, copies
       >>hip_launch      from params to launches
       >>check           what each op demands of its params; overlap of operands; what an op costs
       >>dispatch        graphs; the one place that picks a backend
       >>pool            >>kv
       >>public          context, sharing with a renderer, introspection, bodies of the ops

       Not needed to run a model:
       >>timers          clock, statistics, stopwatches, what a launch costs
       >>profile         regions, the log of their calls, reports
       >>occupancy       how many waves of a kernel fit a chip
       >>tuner           trials of launches, and the file of their results
       >>warm            warm-up, and a replay compared with its ops

       >>licence


   ROCQ DOES NOT tokenize, keep a sampler's history, know any model's layers or train. Those are
   programs on top; examples/ has some to copy from: tokenizer.h, llama.h, generate.c. It does not
   print, exit, abort or throw, reads no environment variable, and keeps no global state. The HIP
   runtime may do all of these: >>errors says when it ends the process.


   >>options
   ---------
   Set before the include that defines ROCQ_IMPLEMENTATION. "All" means in every file that includes
   rocq.h, because the declarations change too.

       ROCQ_STATIC      all   every function is static: rocq is private to the one file
       ROCQ_DEF         all   what stands before public functions; default extern, or static
       ROCQ_MALLOC(n)         default allocator, with ROCQ_FREE(p), both or neither; default malloc,
                              free. rocq_desc.allocator goes before it, per context
       ROCQ_NO_THREADS        no threads: ops run on the calling one, or by rocq_desc.run_tasks
       ROCQ_NO_SIMD           portable C only, no code for AVX2, AVX-512 or NEON
       ROCQ_NO_STDIO          no file access: GGUF from memory or a callback only
       ROCQ_NO_MMAP           files are read, never mapped
       ROCQ_NO_HIP            no look for a GPU at run time, and no dlopen
       ROCQ_NO_PROFILE        no profile: its calls do nothing, and ops have no hooks for it
       ROCQ_NO_OCCUPANCY      no occupancy: E_UNSUPPORTED, and no recommended threads
       ROCQ_NO_TUNER          no tuner: its calls are E_UNSUPPORTED, and launches go by rule
       ROCQ_DEBUG             guard bytes behind the host blocks of pools, checked when freed
       ROCQ_KERNELS_PATH      file with the code object of the kernels, a string: taken where
                              rocq_desc names none and none are linked
       ROCQ_LINKED            the program is linked with rocq_kernels.hip. Only Windows, and a
                              program with the kernels in a static library, must say so

   SIMD needs no compiler flags: code for AVX2, AVX-VNNI and AVX-512 with VNNI is compiled beside
   portable code by gcc and clang and chosen when the context opens.


   >>steps
   -------
   This whole program, valid C11 and C++17, multiplies a weight of a model with a vector, on a GPU
   or on the CPU. README.md has it too.

       #define ROCQ_IMPLEMENTATION
       #include "rocq.h"
       #include <stdio.h>

       static float in[1 << 18], out[1 << 18];

       int main(void) {
           rocq_ctx *ctx;
           rocq_gguf *file;
           rocq_buffer memory, weights;
           rocq_arena arena;
           rocq_tensor w, x, y;
           const rocq_gguf_desc model = {.path = "model.gguf"};
           const rocq_matmul_params product = {.y = &y, .w = &w, .x = &x,
                                               .activation = ROCQ_ACT_SILU};
           in[0] = 1;

           // zero or NULL is a default, everywhere; a call that fails returns a code other than 0
           if (rocq_open(&ctx, NULL) || rocq_buffer_alloc(ctx, &memory, 1 << 20)) return 1;
           rocq_arena_init(&arena, &memory);
           rocq_result r = rocq_gguf_open(ctx, &file, &model);
           if (!r) r = rocq_gguf_upload(ctx, file, "blk.0.ffn_gate.weight", &w, &weights);
           if (!r) r = rocq_tensor_1d(&arena, &x, ROCQ_F32, w.ne[0]);
           if (!r) r = rocq_tensor_1d(&arena, &y, ROCQ_F32, w.ne[1]);
           if (!r) r = rocq_upload(ctx, &x, in, rocq_tensor_size(&x));
           if (!r) r = rocq_matmul(ctx, &product);
           if (!r) r = rocq_download(ctx, out, &y, rocq_tensor_size(&y));
           if (!r) printf("%g\n", out[0]);
           else printf("%s: %s\n", rocq_result_message(r), rocq_error(ctx));
           rocq_gguf_close(&file);
           rocq_close(&ctx);
           return r != ROCQ_OK;
       }

   1. rocq_open opens a context; rocq_desc chooses the device, threads, budget and allocator.
   2. An arena cuts tensors from one buffer. The same code, run first over a measuring arena, finds
      out how large the buffer must be. Here in and out are as large as the buffer, so x and y fit.
   3. rocq_gguf_upload brings a weight, [K, M], to where ops can use it. On the CPU it is a view of
      the mapped file: nothing is copied, and `weights` stays empty. rocq_gguf_load does this for a
      whole model, several times as fast.
   4. Each op takes one params struct; a field that is zero is off or has its default. On a GPU the
      op returns when it is submitted; rocq_download waits until y is computed.
   5. rocq_close frees what the context has handed out, buffers too.

   To allocate nothing while running, ask rocq_scratch_size for the largest ops and rocq_reserve
   that much once; rocq_stats.n_allocs then stays where it is. examples/llama.h does so.


   >>contexts
   ----------
   A context is one device, with threads and scratch memory of its own. Only one thread at a time
   may use it, but several contexts may run at once: they share nothing. Its threads start with the
   first op on the CPU that is large enough for them, or with the first read or upload of more than
   256 KiB. All of them share an op, or a whole recorded step (>>graphs), in pieces of microseconds;
   what one has not begun, another can take over. 50 microseconds after the last piece they sleep,
   until there is more, or rocq_close.

   In a program with a job system of its own, rocq_desc.run_tasks has that do the work; the context
   then starts no threads. An op or step that is worth it asks once for n_threads tasks, each of
   which takes pieces until all work is done. Tasks may start late, run one after the other, or
   never: those that run do it all. A task that waits for a piece that another one has spins and
   yields its thread, but never sleeps.

   A GPU needs a runtime and kernels. Either both are linked into the program, or rocq_open looks
   for the HIP runtime and the kernels are a code object; such a program also runs without a GPU. A
   code object that rocq_desc names is preferred to linked kernels, and those to ROCQ_KERNELS_PATH.

   The HIP runtime is looked for in these places, in this order:

       1. a runtime that the process has loaded already, as another library may have done
       2. the system's libraries, by name. On Windows those are the program's own folder and
          System32, where AMD's driver puts it, but never the working directory or PATH
       3. lib (on Windows bin) in rocq_desc.rocm_path, then in rocq_desc.hip_path. They are meant
          for ROCM_PATH and HIP_PATH of the environment: see examples/generate.c
       4. /opt/rocm/lib, where AMD's packages for Linux put it, but few systems look

   In each place the newest is tried first: libamdhip64.so.7, .6, .5 and the name without a version,
   on Windows amdhip64_7.dll, amdhip64_6.dll and amdhip64.dll. A library is passed over if it lacks
   a function, is older than HIP 5.7 or fails to initialize (hipInit, which also fails if there is
   no GPU). The log and rocq_info.runtimes_tried have the reasons, and if none is left, so has the
   error message. A library of which no function was called is closed again. One that was
   initialized, even if it is not used, stays loaded until the process ends, because its threads may
   run its code at any time.

   Of several GPUs, discrete ones are tried first, then larger ones; rocq_desc.device or pci names
   one. The first on which the kernels load and pass a self-test (sums over a wave, integer dot
   products, matrix products) is taken, and the rest are not touched. rocq_get_info has its name.

   Without a usable GPU, prefer = ROCQ_BACKEND_GPU fails unless allow_fallback is set; prefer = AUTO
   takes the CPU. rocq_get_info has the reason. allow_fallback also lets an op for which the GPU has
   no kernel run on the CPU; rocq_stats.n_fallbacks counts those ops.

   Work on the GPU runs on one queue, in the order of the calls. Ops, graphs and uploads return when
   they are submitted. These wait for the GPU: rocq_sync, rocq_download, rocq_kv_save,
   rocq_gguf_load, rocq_warm, the tuner, results of timers and profiles, an op that falls back,
   scratch memory that grows, and whatever gives memory back to the runtime (rocq_pool_free does
   not). Long launches are cut, so that by estimate none takes longer than dispatch_us and a
   renderer gets its turn. rocq_desc.sharing has presets for a GPU that also draws; rocq_get_info
   says which settings took effect and which the runtime ignored. rocq_cancel, from any thread,
   stops what has not been submitted, and an op or step on the CPU while it runs. Every call makes
   the context's device the current one of its thread.

   If the runtime returns an error other than a lack of memory, submitted work cannot be trusted:
   that call and all later ones return E_LOST, and rocq_close still frees everything. Some runtimes
   end the process instead: see >>errors.


   >>memory
   --------
   rocq_buffer is a block of memory, host or device, never both: device memory in a GPU context,
   host memory in a CPU context. rocq_tensor is a view: format, sizes and strides over a piece of a
   buffer, with no ownership. Dimensions are in GGUF order, innermost first. Host memory of your own
   works everywhere on the CPU (rocq_tensor_from_host).

   Only these allocate memory: rocq_open, rocq_buffer_alloc, rocq_reserve, an op that needs more
   scratch than is reserved, an op that falls back (host memory for its operands, while it runs), a
   pool when it is created, reserved, or has no free block, rocq_kv_create, rocq_file_open,
   rocq_gguf_open, _upload and _load, the GGUF writer, graphs while they are recorded or captured,
   the first copy of a GPU context, rocq_warm (which takes what the first copy and replay would),
   rocq_profile_start, rocq_measure_launch, and the tuner. Host memory comes from
   rocq_desc.allocator, device and pinned memory from the runtime. rocq.h does not use stb_ds, as
   the examples do, because that cannot report a failed allocation.

   rocq_desc.memory_budget limits the sum of buffers (a KV cache is one), pools, scratch, the
   staging memory that rocq_gguf_load has on a GPU while it runs, and the memory in which the check
   of a replay in rocq_warm puts tensors aside: twice their size, while it runs. The rings of
   pinned memory, host copies of operands for a fallback, and rocq's own records do not count.

   An arena is for memory whose size is known before a step: an inference program measures it once
   (examples/llama.h). rocq_pool is for memory whose size differs from step to step, as in training
   and in image decoders: freed blocks serve later requests, without a call of the runtime.

   Block formats on a GPU are planar (ROCQ_LAYOUT_PLANAR): the bits of all blocks are sorted into
   planes, so that kernels can read 16 bytes at a time. rocq_gguf_upload repacks weights that way,
   through up to 1 MiB of scratch. Ops also accept the GGUF layout, but repack it on every call.

   All copies go through a ring buffer of 4 MiB of pinned host memory, so the runtime never sees
   your pages, which may belong to a mapped file; rocq_gguf_load uses a larger ring and a second
   queue, to read, copy and repack at once. Counters and status take 257 KiB of the device.

   rocq_kv keeps the keys and values of sequences, each in one piece, or in pages that sequences
   share until one of them writes. A step is rocq_kv_append (which says where new rows go), then
   rocq_kv_flush, then rocq_rope_append and rocq_attention (they may be recorded) on what
   rocq_kv_layer gives.


   >>graphs
   --------
   Between rocq_graph_begin and _end, ops are recorded instead of run; rocq_graph_launch replays
   them. On a GPU that is one submission for the hundreds of launches of a token, which saves the
   host's time between them. On the CPU checks and plans are made once, and the threads go through
   all ops without an end and a beginning in between. Shapes, addresses and numbers in params are
   fixed; what changes from step to step must be in tensors: upload the token, its position and
   kv_len, then launch. So rocq_sample, which has the number of the step in its params, stays
   outside of the graph. rocq_warm does in advance what the first replay would have to do, and
   checks that a replay is right, since some releases of the HIP runtime are reported to replay with
   stale data. A graph whose replay differs is run op by op from then on, as rocq_stats,
   rocq_get_info and the log say. examples/llama.h records and warms its step.


   >>time
   ------
   rocq_timer is a stopwatch on the host's clock or the GPU's. Between rocq_profile_start and _stop
   every op, copy and graph is a region with its times, bytes and arithmetic, inside the regions
   that the program names with rocq_region_begin and _end; rocq_profile_report writes a table, JSON,
   or a trace that Perfetto opens. A graph is one region: to see its ops, set no_graphs. Begin and
   end only append to a log; results are made from it when they are asked for. So that measuring
   takes 0.5% of the time at most, short steps are measured now and then, each as a whole, and sums
   are scaled; for a trace without gaps set rocq_profile_desc.cost to 1.

   Loading kernels onto the GPU, and pages of a mapped file into memory, is done by what needs them
   first. rocq_warm does it before: record a step, warm it, and the first token takes about as long
   as those after it.


   >>tuning
   --------
   How an op is launched follows from its shapes and the chip by rule. rocq_tune times the other
   ways and keeps one that is faster, for the context's ops of that shape; rocq_tune_graph does so
   for a recorded step. rocq_tuning_save and _load carry the results to the next start, as data
   that is only accepted by the same chip, driver and version. Nothing is tried unless asked for.


   >>errors
   --------
   Every call that can fail returns a rocq_result: 0, or a negative code of the table at >>results.
   rocq_error(ctx) is the message: op, argument, value found, value expected; rocq_desc.log gets it
   too, as soon as it arises. Functions without a context (tensors, formats, arenas, occupancy,
   metadata) return only the code. A call that fails leaves its outputs untouched and leaks nothing,
   and the context stays usable, except after E_LOST. Shapes, strides, bounds, alignment, formats,
   overlap and overflow are checked in every build before anything runs. Values in device memory
   (ids, positions, lengths, pages) are checked by the kernels, and rocq_sync reports bad ones.

   A GPU fault is another matter: a kernel of the process, of rocq or not, that accesses memory
   which is not mapped or runs an invalid instruction, or a GPU that hangs and is reset. What
   happens then is up to the runtime, and rocq cannot change it:

       HIP up to 6.x   on Linux, a thread of the runtime prints a line and calls abort(). The
                       process ends; no call of rocq returns anything.
       HIP 7.0 and on  the runtime's calls return an error, and so rocq's return E_LOST. It still
                       calls abort() where the process may write core dumps (ulimit -c is not 0),
                       or where the environment sets HIP_SKIP_ABORT_ON_GPU_ERROR, which is 1 by
                       default, to 0.

   If the process survives a fault, all its calls of HIP fail until it ends: a new context on the
   GPU cannot be opened, but one on the CPU can. A program that must survive a fault on every
   runtime, or use the GPU again after one, runs rocq in a child process, and then starts another.


   >>numbers
   ---------
   Dequantization gives ggml's bits for every format that ggml has. The error of an op is bounded
   against a float64 reference over the dequantized operands (see rocq_precision). The precision is
   chosen by backend, format and shape, as listed at rocq_get_precision, which has an op's
   precision, bound and reason; rocq_desc.precision replaces that choice. A value over 65504 is
   infinite in an F16 operand.

   Sums run in a fixed order, without atomics: the same inputs give the same bits on every run on
   one device, replayed or not, and on the CPU for every number of threads. CPU and GPU, GPUs with
   different numbers of compute units, and tuned and untuned ops order sums differently.

   The compiler must not change the arithmetic. With -ffast-math it assumes that there are no
   infinities and NaNs, which masks and checks need, and it reorders sums. So the file with the
   implementation and rocq_kernels.hip refuse to compile with it, with -Ofast, and with any part of
   it that the compiler has a macro for: give those two -fno-fast-math; other files may have it.
   -fno-math-errno and -fno-trapping-math do no harm. A program that flushes subnormal numbers to
   zero, which linking with -ffast-math makes it do (gcc 12), has 0 in place of values below 2^-126,
   in F32 and in MXFP blocks with the smallest scales.


   >>files
   -------
   GGUF 2 and 3, little endian, is read from a path (memory-mapped), from memory or through a
   callback (for files inside others). Nothing in a file is trusted: counts, lengths, offsets,
   products and overlaps are checked at open, and a hostile file gives an error code, not a crash.
   Only a file that is cut short while it is mapped ends the program: where that can happen, set
   no_mmap or read the file into memory. A file that rocq writes gets its name only when it is
   whole: the GGUF writer uses rocq_file_open, and so can any call that takes a rocq_write_fn.


   >>history
   ---------
       0.2.0  names:

                  rocq_file_create            rocq_file_open
                  rocq_file_finish            rocq_file_close
                  rocq_gguf_create            rocq_gguf_writer_open
                  rocq_gguf_finish            rocq_gguf_writer_close
                  rocq_gguf_set               rocq_gguf_writer_set; so _set_u32, _set_f32,
                                              _set_bool, _set_str, _set_from
                  rocq_gguf_add_tensor        rocq_gguf_writer_add_tensor
                  rocq_gguf_write             rocq_gguf_writer_write
                  rocq_load_desc              rocq_gguf_load_desc
                  rocq_graph_free             rocq_graph_destroy
                  rocq_kv_free                rocq_kv_destroy
                  rocq_timer_create           rocq_timer_init
                  ROCQ_CPU, ROCQ_GPU          ROCQ_BACKEND_CPU, ROCQ_BACKEND_GPU
                  ROCQ_IDENTITY, ROCQ_SILU,   ROCQ_ACT_IDENTITY, ROCQ_ACT_SILU,
                  ROCQ_GELU, ROCQ_GELU_ERF,   ROCQ_ACT_GELU, ROCQ_ACT_GELU_ERF,
                  ROCQ_RELU, ROCQ_TANH        ROCQ_ACT_RELU, ROCQ_ACT_TANH

              rocq_gguf_upload gives the memory that it takes to the caller, as rocq_gguf_load does.
              New: rocq_tensor_slice, rocq_tensor_heads, rocq_tensor_1d to _3d, rocq_format_name,
              rocq_operand_format, rocq_str_equal; rocq_info.desc.device is the GPU that was taken.
              Gone: rocq_arena_init_growing and rocq_arena_free; rocq_pool serves what grows.
              Pictures: rocq_conv, rocq_conv_weights, rocq_norm_stats, rocq_resize, rocq_pixels.
              On the CPU a recorded graph is one parallel region; rocq_desc.run_tasks, cpu_tier.
              The tuner tries a grid or a list of points; other searches, evaluators and its model
              of times are gone. What it saves is binary.
       0.1.0  formats, GGUF, CPU backend; GPU backend, graphs; pool, KV cache, loading, profile,
              occupancy, tuner; search for the HIP runtime, check of replays, sharing with a
              renderer, files written whole
*/

// ---------------------------------------------------------------------------------------------
// >>version, >>decl
// ---------------------------------------------------------------------------------------------

#ifndef ROCQ_H
#define ROCQ_H

#define ROCQ_VERSION_MAJOR 0
#define ROCQ_VERSION_MINOR 2
#define ROCQ_VERSION_PATCH 0
#define ROCQ_VERSION (ROCQ_VERSION_MAJOR * 10000 + ROCQ_VERSION_MINOR * 100 + ROCQ_VERSION_PATCH)

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// ROCQ_DEF marks every public function. ROCQ_STATIC keeps them private to one file; a program that
// puts rocq in a shared library defines ROCQ_DEF itself (dllexport and the like).
#ifndef ROCQ_DEF
#ifdef ROCQ_STATIC
#if defined(__GNUC__) || defined(__clang__)
#define ROCQ_DEF __attribute__((unused)) static
#else
#define ROCQ_DEF static
#endif
#else
#define ROCQ_DEF extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---------------------------------------------------------------------------------------------
// >>formats: the one table of formats, then the block of each
// ---------------------------------------------------------------------------------------------

// X(NAME, name, id, block_elems, block_bytes): names and ids are GGUF's own (enum ggml_type), so
// they match other tools; the two MXFP6 formats have no GGUF id and take rocq's own, 1001 and up.
// A row of a tensor is a whole number of blocks.
#define ROCQ_FORMATS(X)                            \
    X(F32, f32, 0, 1, 4)                           \
    X(F16, f16, 1, 1, 2)                           \
    X(Q4_0, q4_0, 2, 32, 18)                       \
    X(Q4_1, q4_1, 3, 32, 20)                       \
    X(Q5_0, q5_0, 6, 32, 22)                       \
    X(Q5_1, q5_1, 7, 32, 24)                       \
    X(Q8_0, q8_0, 8, 32, 34)                       \
    X(Q2_K, q2_K, 10, 256, 84)                     \
    X(Q3_K, q3_K, 11, 256, 110)                    \
    X(Q4_K, q4_K, 12, 256, 144)                    \
    X(Q5_K, q5_K, 13, 256, 176)                    \
    X(Q6_K, q6_K, 14, 256, 210)                    \
    X(IQ4_NL, iq4_nl, 20, 32, 18)                  \
    X(IQ4_XS, iq4_xs, 23, 256, 136)                \
    X(BF16, bf16, 30, 1, 2)                        \
    X(MXFP4, mxfp4, 39, 32, 17)                    \
    X(MXFP6_E2M3, mxfp6_e2m3, 1001, 32, 25)        \
    X(MXFP6_E3M2, mxfp6_e3m2, 1002, 32, 25)

typedef enum rocq_format {
#define ROCQ_X(NAME, name, id, elems, bytes) ROCQ_##NAME = id,
    ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
    ROCQ_I8 = 24, // bytes of pixels, 0 to 255: written by rocq_pixels
    ROCQ_I32 = 26 // token ids, positions, page tables: an index, never an operand of arithmetic
} rocq_format;

// The block of each format, as it lies in the file: little endian, packed without padding, so a
// block needs the alignment of its F16 fields (2) or none (the MX formats). i counts the elements
// of the block, g = i / 16 (Q2_K Q3_K Q6_K) or i / 32 (all others) its groups, q[i] is the code as
// stored; bit 0 is a byte's lowest. A product d sc[g] q[i] is exact in F32: it has at most 11 bits
// from d and 12 from the rest. So a value has at most one rounding, that of the min, and is the
// same with and without fused multiply-add.

typedef float rocq_block_f32;
typedef uint16_t rocq_block_f16;  // IEEE 754 binary16
typedef uint16_t rocq_block_bf16; // the upper half of an F32

// x[i] = d (q[i] - 8), 4.5 bits per weight
//   bytes 0-1 d | 2-17 qs: qs[j] holds q[j] in bits 0-3, q[j + 16] in bits 4-7
typedef struct rocq_block_q4_0 {
    uint16_t d; // F16, here and wherever a field is called d, m or dmin
    uint8_t qs[16];
} rocq_block_q4_0;

// x[i] = d q[i] + m, 5 bits per weight
//   bytes 0-1 d | 2-3 m | 4-19 qs as Q4_0
typedef struct rocq_block_q4_1 {
    uint16_t d;
    uint16_t m;
    uint8_t qs[16];
} rocq_block_q4_1;

// x[i] = d (q[i] - 16), 5.5 bits per weight
//   bytes 0-1 d | 2-5 qh: bit i % 8 of qh[i / 8] is bit 4 of q[i] | 6-21 qs: bits 0-3 as Q4_0
typedef struct rocq_block_q5_0 {
    uint16_t d;
    uint8_t qh[4];
    uint8_t qs[16];
} rocq_block_q5_0;

// x[i] = d q[i] + m, 6 bits per weight
//   bytes 0-1 d | 2-3 m | 4-7 qh as Q5_0 | 8-23 qs as Q5_0
typedef struct rocq_block_q5_1 {
    uint16_t d;
    uint16_t m;
    uint8_t qh[4];
    uint8_t qs[16];
} rocq_block_q5_1;

// x[i] = d q[i], 8.5 bits per weight
//   bytes 0-1 d | 2-33 qs: qs[i] is q[i], two's complement
typedef struct rocq_block_q8_0 {
    uint16_t d;
    int8_t qs[32];
} rocq_block_q8_0;

// x[i] = d sc[g] q[i] - dmin mn[g], 2.625 bits per weight
//   bytes 0-15 scales: scales[g] holds sc[g] in bits 0-3, mn[g] in bits 4-7
//   | 16-79 qs: qs[32 h + l] holds q[128 h + 32 r + l] in bits 2 r, 2 r + 1 (h < 2, r < 4, l < 32)
//   | 80-81 d | 82-83 dmin
typedef struct rocq_block_q2_K {
    uint8_t scales[16];
    uint8_t qs[64];
    uint16_t d;
    uint16_t dmin;
} rocq_block_q2_K;

// x[i] = d (sc[g] - 32) (q[i] - 4), 3.4375 bits per weight
//   bytes 0-31 hmask: bit 4 h + r of hmask[l] is bit 2 of q[128 h + 32 r + l]
//   | 32-95 qs: bits 0-1 of q as Q2_K
//   | 96-107 scales: scales[j], j < 8, holds bits 0-3 of sc[j] in bits 0-3, those of sc[j + 8] in
//     bits 4-7; scales[8 + j], j < 4, holds bits 4-5 of sc[4 r + j] in bits 2 r and 2 r + 1
//   | 108-109 d
typedef struct rocq_block_q3_K {
    uint8_t hmask[32];
    uint8_t qs[64];
    uint8_t scales[12];
    uint16_t d;
} rocq_block_q3_K;

// x[i] = d sc[g] q[i] - dmin mn[g], 4.5 bits per weight
//   bytes 0-1 d | 2-3 dmin
//   | 4-15 scales, j < 4:  bits     0-3            4-5     6-7
//             scales[j]             sc[j] (6 bits)         bits 4-5 of sc[j + 4]
//             scales[4 + j]         mn[j] (6 bits)         bits 4-5 of mn[j + 4]
//             scales[8 + j]         bits 0-3 of sc[j + 4] in bits 0-3, of mn[j + 4] in bits 4-7
//   | 16-143 qs: qs[32 c + l] holds q[64 c + l] in bits 0-3, q[64 c + 32 + l] in bits 4-7 (c < 4)
typedef struct rocq_block_q4_K {
    uint16_t d;
    uint16_t dmin;
    uint8_t scales[12];
    uint8_t qs[128];
} rocq_block_q4_K;

// x[i] = d sc[g] q[i] - dmin mn[g], 5.5 bits per weight
//   bytes 0-1 d | 2-3 dmin | 4-15 scales as Q4_K
//   | 16-47 qh: bit g of qh[l] is bit 4 of q[32 g + l] | 48-175 qs: bits 0-3 as Q4_K
typedef struct rocq_block_q5_K {
    uint16_t d;
    uint16_t dmin;
    uint8_t scales[12];
    uint8_t qh[32];
    uint8_t qs[128];
} rocq_block_q5_K;

// x[i] = d sc[g] (q[i] - 32), 6.5625 bits per weight
//   bytes 0-127 ql: bits 4 u to 4 u + 3 of ql[64 h + 32 v + l] are bits 0-3 of
//     q[128 h + 64 u + 32 v + l] (h, u, v < 2, l < 32)
//   | 128-191 qh: bits 2 r and 2 r + 1 of qh[32 h + l] are bits 4-5 of q[128 h + 32 r + l] (r < 4)
//   | 192-207 scales: scales[g] is sc[g], two's complement | 208-209 d
typedef struct rocq_block_q6_K {
    uint8_t ql[128];
    uint8_t qh[64];
    int8_t scales[16];
    uint16_t d;
} rocq_block_q6_K;

// x[i] = d level[q[i]], 4.5 bits per weight; unevenly spaced levels, denser near 0
//   bytes 0-1 d | 2-17 qs as Q4_0
#define ROCQ_IQ4_LEVELS -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
typedef struct rocq_block_iq4_nl {
    uint16_t d;
    uint8_t qs[16];
} rocq_block_iq4_nl;

// x[i] = d (sc[g] - 32) level[q[i]], 4.25 bits per weight; the levels of IQ4_NL
//   bytes 0-1 d | 2-3 scales_h: bits 2 g and 2 g + 1 are bits 4-5 of sc[g]
//   | 4-7 scales_l: bits 0-3 of scales_l[g / 2] (g even) or bits 4-7 (g odd) are bits 0-3 of sc[g]
//   | 8-135 qs: qs[16 g + j] holds q[32 g + j] in bits 0-3, q[32 g + 16 + j] in bits 4-7
typedef struct rocq_block_iq4_xs {
    uint16_t d;
    uint16_t scales_h;
    uint8_t scales_l[4];
    uint8_t qs[128];
} rocq_block_iq4_xs;

// x[i] = 2^(e - 128) level[q[i]], 4.25 bits per weight; level is twice the E2M1 value
//   byte 0 e (E8M0) | 1-16 qs as Q4_0
// As in ggml, e = 255 is one more power of two here, where the OCP specification has a NaN.
#define ROCQ_MXFP4_LEVELS 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12
typedef struct rocq_block_mxfp4 {
    uint8_t e;
    uint8_t qs[16];
} rocq_block_mxfp4;

// x[i] = 2^(e - 127) element, 6.25 bits per weight; OCP MX v1.0, e = 255 makes all 32 values NaN
//   byte 0 e (E8M0) | 1-24 qs: q[i] is bits 6 i to 6 i + 5 of the little-endian bit string
//   element: bit 5 sign s, bits 3-4 exponent p, bits 0-2 mantissa f:
//     p > 0: (-1)^s 2^(p - 1) (1 + f / 8), p = 0: (-1)^s f / 8; largest 7.5. -0 decodes as +0
typedef struct rocq_block_mxfp6_e2m3 {
    uint8_t e;
    uint8_t qs[24];
} rocq_block_mxfp6_e2m3;

// x[i] = 2^(e - 127) element, 6.25 bits per weight; bytes and NaN as MXFP6_E2M3
//   element: bit 5 sign s, bits 2-4 exponent p, bits 0-1 mantissa f:
//     p > 0: (-1)^s 2^(p - 3) (1 + f / 4), p = 0: (-1)^s f / 16; largest 28. -0 decodes as +0
typedef struct rocq_block_mxfp6_e3m2 {
    uint8_t e;
    uint8_t qs[24];
} rocq_block_mxfp6_e3m2;

#ifdef __cplusplus
#define ROCQ_X(NAME, name, id, elems, bytes) \
    static_assert(sizeof(rocq_block_##name) == bytes, #NAME " block has the wrong size");
#else
#define ROCQ_X(NAME, name, id, elems, bytes) \
    _Static_assert(sizeof(rocq_block_##name) == bytes, #NAME " block has the wrong size");
#endif
ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X

// ---------------------------------------------------------------------------------------------
// >>results
// ---------------------------------------------------------------------------------------------

// X(NAME, code, message): 0 is success; codes are negative, grouped by kind, never renumbered.
// A call that fails leaves its outputs untouched and the context usable.
#define ROCQ_RESULTS(X)                                                            \
    X(OK, 0, "success")                                                            \
    X(E_ARGUMENT, -1, "null pointer or value out of range")                        \
    X(E_SHAPE, -2, "tensor shapes or strides do not fit together")                 \
    X(E_FORMAT, -3, "format is unknown or not accepted here")                      \
    X(E_ALIGNMENT, -4, "address or offset is not aligned for its format")          \
    X(E_OVERFLOW, -5, "size does not fit its integer type")                        \
    X(E_BOUNDS, -6, "tensor reaches outside its buffer, or an index is too large") \
    X(E_UNSUPPORTED, -7, "the backend cannot do this")                             \
    X(E_STATE, -8, "call is out of order")                                         \
    X(E_MEMORY, -20, "memory allocation failed, on the host or the GPU")           \
    X(E_BUDGET, -21, "memory budget would be exceeded")                            \
    X(E_ARENA, -22, "arena is full")                                               \
    X(E_IO, -40, "file cannot be opened, read or written")                         \
    X(E_MAGIC, -41, "not a file of the kind that is to be read")                   \
    X(E_VERSION, -42, "GGUF version is not 2 or 3")                                \
    X(E_TRUNCATED, -43, "file ends too early")                                     \
    X(E_CORRUPT, -44, "file contradicts itself")                                   \
    X(E_NOT_FOUND, -45, "no such key or tensor")                                   \
    X(E_TYPE, -46, "metadata value has another type or does not fit")              \
    X(E_FOREIGN, -47, "of another chip, driver or version of rocq")                \
    X(E_NO_RUNTIME, -60, "no HIP runtime on this machine")                         \
    X(E_NO_KERNELS, -61, "no GPU kernels for this device in this program")         \
    X(E_NO_DEVICE, -62, "no GPU, or none that passes its self-test")               \
    X(E_DEVICE, -63, "the HIP runtime reported an error")                          \
    X(E_LOST, -64, "the GPU is lost: close the context")                           \
    X(E_CANCELLED, -65, "cancelled by rocq_cancel")

typedef enum rocq_result {
#define ROCQ_X(NAME, code, message) ROCQ_##NAME = code,
    ROCQ_RESULTS(ROCQ_X)
#undef ROCQ_X
    ROCQ_RESULT_END = 1 // never returned
} rocq_result;

// ---------------------------------------------------------------------------------------------
// >>types
// ---------------------------------------------------------------------------------------------
// Letters used throughout: M rows out, N columns (tokens), K inner size; ne[] counts elements per
// dimension, innermost first, as GGUF does. Shapes in comments are written that way too: [K, M] is
// M rows of K contiguous elements. Every struct is valid all zero, and 0 means the default.

typedef struct rocq_ctx rocq_ctx;   // one device (or the CPU), its threads and its scratch memory
typedef struct rocq_gguf rocq_gguf; // one open GGUF file
typedef struct rocq_gguf_writer rocq_gguf_writer;
typedef struct rocq_graph rocq_graph; // ops recorded once, to be replayed

typedef enum rocq_backend {
    ROCQ_BACKEND_AUTO = 0, // a GPU that has kernels and passes its self-test, else the CPU
    ROCQ_BACKEND_CPU,
    ROCQ_BACKEND_GPU
} rocq_backend;

typedef enum rocq_log_level { ROCQ_LOG_ERROR = 1, ROCQ_LOG_WARN, ROCQ_LOG_INFO } rocq_log_level;

// Memory hooks: both functions or neither. free gets the size that alloc was asked for. They have
// to be thread-safe only if contexts that share them are used from several threads.
typedef struct rocq_allocator {
    void *(*alloc)(size_t size, void *user);          // at least 16-byte aligned, or NULL
    void (*free)(void *ptr, size_t size, void *user); // ptr is never NULL
    void *user;
} rocq_allocator;

// What an op computes in. NMSE is the sum of squared errors over the sum of squares, both against a
// float64 reference over the dequantized operands, before the rounding to the output's format.
// The precision asked for, by an op's params or rocq_desc.precision, is the least exact that may be
// used. An op that does not have it uses a more exact one: most ops have F32 alone, and a GPU
// multiplies up to 8 columns in INT8 or F32. E_UNSUPPORTED is for an op that has only less exact
// ones (attention and convolution in F32 on a GPU) and for a product in INT8 whose w has no integer
// codes.
typedef enum rocq_precision {
    ROCQ_PRECISION_AUTO = 0, // by op, backend, chip and shape: see rocq_get_precision
    ROCQ_PRECISION_F32,  // operands exact in F32, F32 sums:           NMSE <= 1e-6
    ROCQ_PRECISION_F16,  // operands rounded to F16, F32 sums:         NMSE <= 1e-5
    ROCQ_PRECISION_INT8  // activations in int8 blocks of 32, F32 sums: NMSE <= 5e-4
} rocq_precision;

// How a context shares the machine with a renderer. A preset gives these five fields of rocq_desc
// their values; a field that the program sets itself keeps its own.
//
//                    priority   max_units   max_waves   dispatch_us   n_threads
//   BALANCED         normal     all         any         1000          one per core
//   GRAPHICS_FIRST   low        all         8           500           one less, but at least 1
//   COMPUTE_FIRST    high       all         any         5000          one per core
//
// None of these limits the memory bandwidth that a context uses, and decode uses all there is, so a
// renderer can still be slowed down. Compare its frame times with the context at work and without.
typedef enum rocq_sharing {
    ROCQ_SHARING_BALANCED = 0,
    ROCQ_SHARING_GRAPHICS_FIRST,
    ROCQ_SHARING_COMPUTE_FIRST
} rocq_sharing;

typedef enum rocq_priority { // of the GPU's queue, among those of all programs
    ROCQ_PRIORITY_DEFAULT = 0, // the preset's
    ROCQ_PRIORITY_LOW,
    ROCQ_PRIORITY_NORMAL,
    ROCQ_PRIORITY_HIGH
} rocq_priority;

// Calls task(arg, 0) to task(arg, n - 1), each once, on any threads, at once or one after the
// other, and returns when all have returned. It may be called during any call that runs an op on
// the CPU, reads a file or warms up, on the thread of that call.
typedef void (*rocq_run_tasks_fn)(void (*task)(void *arg, int32_t i), void *arg, int32_t n,
                                  void *user);

typedef enum rocq_cpu_tier { // instructions that the CPU backend uses: a tier's, and those before
    ROCQ_CPU_BEST = 0, // the last of these that the processor has
    ROCQ_CPU_PLAIN,    // portable C
    ROCQ_CPU_SIMD,     // AVX2 with FMA and F16C; NEON
    ROCQ_CPU_AVX_VNNI, // the byte dot instruction, for products with one column
    ROCQ_CPU_AVX512    // F, BW, DQ, VL and VNNI; these processors need not have AVX-VNNI
} rocq_cpu_tier;

typedef struct rocq_desc {
    rocq_backend prefer;       // GPU: rocq_open fails without one, unless allow_fallback
    bool allow_fallback;       // the CPU does what the GPU cannot: an op, or the whole context
    int32_t n_threads;         // CPU threads, the caller's own included, at most 64; 0 = the
                               // preset's, by the cores that the process may use: a core counts
                               // once, whatever number of hyperthreads it has
    int64_t memory_budget;     // bytes, 0 = no limit; >>memory lists what counts
    int64_t scratch_bytes;     // reserved at open, see rocq_reserve
    rocq_allocator allocator;  // zero = ROCQ_MALLOC and ROCQ_FREE
    int32_t device;            // GPU: 0 = the best, else 1 + its number in HIP's order;
                               // rocq_info.desc.device is the one that was taken
    const char *pci;           // GPU by PCI address ("0000:03:00.0"), say the renderer's; or NULL
    const char *kernels_path;  // file with the code object of rocq_kernels.hip, or NULL
    const void *kernels_data;  // or the code object itself, not copied: must outlive the context.
                               // Both NULL = linked kernels, else the file ROCQ_KERNELS_PATH
    int64_t kernels_size;      // bytes of kernels_data
    int32_t dispatch_us;       // a launch estimated to take more microseconds is cut in pieces;
                               // 0 = the preset's, -1 = never. A frame at 144 Hz has 6900
    bool no_graphs;            // rocq_graph_launch runs the recorded ops one by one
    rocq_precision precision;  // what AUTO means in every op of the context
    void (*log)(rocq_log_level level, const char *message, void *user); // NULL = silent
    void *log_user;
    rocq_sharing sharing;      // a preset for n_threads, dispatch_us and the three below
    rocq_priority priority;
    int32_t max_units;         // most compute units that kernels run on, rounded down to pairs;
                               // 0 = the preset's, -1 = all. With a limit, priority is normal
    int32_t max_waves;         // for products with up to 8 columns, which take most of a token's
                               // time: most waves on a SIMD (it has room for 16), 4, 6 ... 14;
                               // 0 = the preset's, -1 = any. Fewer leave registers for a renderer
    const char *rocm_path;     // two more folders in which rocq_open looks for the HIP runtime
    const char *hip_path;      // (>>contexts): absolute paths, or NULL. Meant for the environment's
                               // ROCM_PATH and HIP_PATH, which rocq does not read. NULL in
                               // rocq_info.desc
    rocq_run_tasks_fn run_tasks; // a job system that does the work of the context's threads, see
    void *run_tasks_user;        // >>contexts; NULL = it has threads of its own
    rocq_cpu_tier cpu_tier;    // rocq_open fails where the processor or the build lacks it. For
                               // tests and comparisons: INT8 products have the same bits in all
} rocq_desc;

typedef struct rocq_info {
    rocq_backend backend;      // what was opened: ROCQ_BACKEND_CPU or ROCQ_BACKEND_GPU
    const char *device;        // for people: chip and instruction set in use
    rocq_result gpu_result;    // why there is no GPU (ROCQ_OK when there is one, or none was tried)
    const char *gpu_message;   // the same in a sentence, "" for ROCQ_OK
    const char *runtime;       // name or path by which the HIP runtime was found, "linked", or ""
    const char *kernels;       // file of the code object, "memory", "linked", or ""
    const char *pci;           // of the GPU, or ""
    int32_t target;            // that the kernels run on: 0x1100 for gfx1100; 0 = CPU, other GPUs
    bool target_unlisted;      // a gfx11 chip that rocq has no figures of: launches are sized by
                               // what the runtime says of it, and a profile knows no peaks
    int32_t n_units;           // compute units of the GPU
    int64_t device_bytes;      // memory of the GPU
    rocq_desc desc;            // with every default filled in; its strings are the context's
    const char *replay;        // a sentence on the last graph whose replay rocq_warm found to
                               // differ from its ops; "" if there was none
    rocq_priority priority;    // that the queue really has; DEFAULT on the CPU
    int32_t max_units;         // compute units that kernels run on: n_units if there is no limit
    int32_t max_waves;         // the limit in force, 16 = none; 0 on the CPU
    const char *ignored;       // which of desc.priority, max_units and max_waves had no effect, and
                               // why; or ""
    const char *runtimes_tried; // HIP runtimes that were passed over, and places that have none, in
                               // the order of the search: "NAME: why" or "PLACE: none", with "; "
                               // between them; "..." at the end if there were more
} rocq_info;

typedef struct rocq_stats {
    int64_t n_allocs;          // allocations since open, of the host and the device; constant while
                               // ops run in steady state
    int64_t live_bytes;        // allocated now, host and device together
    int64_t peak_bytes;        // largest live_bytes so far
    int64_t scratch_bytes;     // reserved for ops
    int64_t scratch_peak;      // most that one op has used
    int64_t n_fallbacks;       // ops that a GPU context ran on the CPU
    int64_t n_launches;        // kernels launched; each replay counts those of its graph
    int64_t n_replays_checked; // graphs whose replay rocq_warm has compared with their ops
    int64_t n_replays_refused; // of those, graphs whose replay differed: their ops run one by one
} rocq_stats;

// An address on the device: its own type, so that it cannot be mistaken for a host pointer.
typedef struct rocq_device_ptr {
    uint64_t address;
} rocq_device_ptr;

// A block of memory. Exactly one of host and device is set, or the buffer is empty.
typedef struct rocq_buffer {
    void *host;
    rocq_device_ptr device;
    int64_t size;    // bytes
    uint64_t ticket; // private: identifies a block of a pool; 0 for other memory
} rocq_buffer;

typedef enum rocq_layout {
    ROCQ_LAYOUT_GGUF = 0, // blocks as in the file; every op takes it
    ROCQ_LAYOUT_PLANAR    // block formats on a GPU: the same bits in planes, for wide loads
                          // (>>kernels). Same size, 16-byte aligned. Such a tensor can be reshaped,
                          // but not cut, and not downloaded
} rocq_layout;

// Up to four dimensions over a piece of a buffer. A tensor never owns memory, so it can be copied,
// cut (rocq_tensor_view) and thrown away freely. Strides count elements; stride[0] is 1, and for a
// block format the others are whole blocks. Unused dimensions are 1.
typedef struct rocq_tensor {
    rocq_buffer buffer;
    int64_t offset;     // bytes from the buffer's start to element 0
    rocq_format format;
    rocq_layout layout;
    int32_t n_dims;     // 1 to 4
    int64_t ne[4];
    int64_t stride[4];
} rocq_tensor;

// A bump allocator over one buffer. Without a buffer it only measures: run the same code once to
// find out the size (peak), then again over a buffer of that size.
typedef struct rocq_arena {
    rocq_buffer buffer; // not owned
    int64_t used;       // bytes from the start
    int64_t peak;       // largest used so far, or on overflow what would have been needed.
                        // Measuring: bytes that are enough at any address, see rocq_arena_init
    int64_t slack;      // private, measuring: the part of peak for alignment
    bool measuring;
} rocq_arena;

// Where memory is. DEFAULT: where the context's ops work, so device memory in a GPU context.
typedef enum rocq_memory {
    ROCQ_MEMORY_DEFAULT = 0,
    ROCQ_MEMORY_HOST,
    ROCQ_MEMORY_PINNED, // host memory that the GPU's copy engines reach; plain host memory on the
                        // CPU
    ROCQ_MEMORY_DEVICE
} rocq_memory;

typedef enum rocq_report { ROCQ_REPORT_TEXT = 0, ROCQ_REPORT_JSON, ROCQ_REPORT_TRACE } rocq_report;

// Gets the bytes of a report or file, in order; false = failed, which ends the call with E_IO.
typedef bool (*rocq_write_fn)(const void *src, int64_t size, void *user);

// A pool hands out blocks of a few sizes (size classes) and keeps freed blocks for later requests,
// so that memory whose size changes from step to step costs a few nanoseconds and no runtime call.
// Zeroed fields are defaults.
typedef struct rocq_pool_desc {
    rocq_memory memory;
    const int64_t *classes;  // block sizes, rising multiples of 256, copied; may be NULL. For
    int32_t n_classes;       // larger sizes there are eight default classes to each doubling: from
                             // 2 KiB up, less than 12.5% of a block of its own class is waste
    int64_t slab_size;       // most bytes taken at once, to be cut into blocks of a class;
                             // 0 = 8 MiB. The first slabs of a class are smaller. A block of more
                             // than a quarter of slab_size is taken by itself (a large block)
    int64_t budget;          // most bytes of slabs and large blocks; 0 = no limit but the
                             // context's, -1 = only rocq_pool_reserve takes memory
    bool exact;              // a request gets a block of its own class only. Else it may get a free
                             // block of up to twice the size before more memory is taken, so far
                             // less is reserved if sizes change from step to step
    bool thread_safe;        // several threads may call at once (see rocq_pool_alloc)
} rocq_pool_desc;

// Statistics of one class, or of all together. A request counts in the class of the block that it
// got. Rates are 0 where they would be 0 / 0.
typedef struct rocq_pool_stats {
    int64_t block_size;      // of the class; 0 for all together
    int64_t n_requests;      // rocq_pool_alloc calls that succeeded
    int64_t n_hits;          // of those, served from a free block
    int64_t n_frees;
    int64_t n_live;          // blocks handed out now
    int64_t n_free;          // blocks kept for later
    int64_t live_bytes;      // requested and not freed
    int64_t peak_bytes;      // largest live_bytes so far
    int64_t block_bytes;     // sizes of the live blocks: live_bytes and what rounding up wastes
    int64_t reserved_bytes;  // taken from the context
    int64_t reserved_peak;
    int64_t n_reserves;      // slabs and large blocks taken, ever
    int64_t n_trims;         // and given back
    double hit_rate;         // n_hits / n_requests
    double internal;         // fragmentation inside blocks: 1 - live_bytes / block_bytes
    double external;         // outside: 1 - block_bytes / reserved_bytes
} rocq_pool_stats;

typedef struct rocq_pool rocq_pool;

typedef enum rocq_activation {
    ROCQ_ACT_IDENTITY = 0,
    ROCQ_ACT_SILU,     // x / (1 + exp(-x))
    ROCQ_ACT_GELU,     // tanh form: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
    ROCQ_ACT_GELU_ERF, // exact form: x/2 (1 + erf(x / sqrt(2)))
    ROCQ_ACT_RELU,
    ROCQ_ACT_TANH
} rocq_activation;

typedef enum rocq_rope_pairing {
    ROCQ_ROPE_NORM = 0, // pairs (2i, 2i+1): llama, mistral
    ROCQ_ROPE_NEOX      // pairs (i, i + n_dims/2): qwen, gemma, gpt-neox
} rocq_rope_pairing;

// X(NAME, name, params): every operation, in the one order used by the CPU backend, the kernel file
// and the tests. Each is rocq_result rocq_<name>(rocq_ctx *, const params *), declared below.
#define ROCQ_OPS(X)                                     \
    X(MATMUL, matmul, rocq_matmul_params)               \
    X(ATTENTION, attention, rocq_attention_params)      \
    X(RMSNORM, rmsnorm, rocq_norm_params)               \
    X(LAYERNORM, layernorm, rocq_norm_params)           \
    X(ROPE, rope, rocq_rope_params)                     \
    X(ROPE_APPEND, rope_append, rocq_rope_append_params)\
    X(ACTIVATE, activate, rocq_activate_params)         \
    X(GLU, glu, rocq_glu_params)                        \
    X(ADD, add, rocq_binary_params)                     \
    X(MUL, mul, rocq_binary_params)                     \
    X(SCALE, scale, rocq_scale_params)                  \
    X(CAST, cast, rocq_cast_params)                     \
    X(SOFTMAX, softmax, rocq_softmax_params)            \
    X(GATHER, gather, rocq_gather_params)               \
    X(ARGMAX, argmax, rocq_argmax_params)               \
    X(SAMPLE, sample, rocq_sample_params)               \
    X(CONV, conv, rocq_conv_params)                     \
    X(NORM_STATS, norm_stats, rocq_norm_stats_params)   \
    X(RESIZE, resize, rocq_resize_params)               \
    X(PIXELS, pixels, rocq_pixels_params)

// An output may not share a byte with anything else that the op reads or writes; this is checked
// before the op runs (E_ARGUMENT). Where a comment below says "may be x", the output may be that
// very tensor (address, format, sizes and strides), but not a part of it. Rows may lie in the gaps
// between other rows: q, k and v may be columns of one tensor, and the planes of two caches may
// alternate. There are two limits to that. Tensors of integers that tell an op where to read or
// write (ids, pos, cell, kv_len, page_table, recent, allowed) must lie wholly before or behind each
// output, gaps included. And tensors with gaps and with strides that are not multiples of each
// other count as overlapping if a search of bounded length cannot rule it out.

typedef enum rocq_op {
#define ROCQ_X(NAME, name, params) ROCQ_OP_##NAME,
    ROCQ_OPS(ROCQ_X)
#undef ROCQ_X
    ROCQ_OP_COUNT
} rocq_op;

// y[m, n] = epilogue(sum over k of w[k, m] x[k, n]). The epilogue runs in this order, each step
// optional: + bias[m], activation, softcap, * gate[m, n], * sum over k of w2[k, m] x[k, n],
// + residual[m, n], cast to y's format.
// w and x may have a third and fourth dimension (batch); w's must divide x's, and each matrix of w
// then serves several consecutive ones of x. y may be residual or gate.
typedef struct rocq_matmul_params {
    const rocq_tensor *y;        // F32, F16 or Q8_0 [M, N, B2, B3]
    const rocq_tensor *w;        // any format [K, M, b2, b3]
    const rocq_tensor *x;        // F32, F16 or Q8_0 [K, N, B2, B3]
    const rocq_tensor *bias;     // F32 [M] or NULL
    const rocq_tensor *gate;     // F32 or F16, y's shape, or NULL
    const rocq_tensor *residual; // F32 or F16, y's shape, or NULL
    rocq_activation activation;
    float softcap;               // c > 0: t = c tanh(t / c)
    rocq_precision precision;
    const rocq_tensor *w2;       // w's shape, any format, for silu(gate x) * (up x) in one; or NULL
    const struct rocq_matmul_params *next; // another product of the same x, done in the same pass
                                           // (as for q, k and v), or NULL. At most 16 in all. All
                                           // are checked first, and none may use another's y
} rocq_matmul_params;

// out[d, h, i] = sum over j of softmax_j(score(i, j)) v[d, h_kv, j] for query i of head h, with
// score(i, j) = cap(scale q[., h, i] . k[., h_kv, j]) + mask[j, i, h], cap(s) = softcap tanh(s /
// softcap), h_kv = h n_kv_heads / n_heads. Query i stands at position p = kv_len - n_q + i.
// Visible are j < kv_len; with causal also j <= p; with a window W also j > p - W (causal only).
// A sink adds exp(sink[h]) to the softmax sum and no value. A query that sees nothing gets all 0.
// K and V may be any strided view ([D, n_ctx, n_kv_heads] storage with swapped strides too).
typedef struct rocq_attention_params {
    const rocq_tensor *out;        // F32, F16 or Q8_0 [D, n_heads, n_q, n_seqs]; may be q
    const rocq_tensor *q;          // F32 or F16 [D, n_heads, n_q, n_seqs]
    const rocq_tensor *k;          // F32 F16 BF16 Q8_0 Q4_0 [D, n_kv_heads, n_kv, n_seqs]
    const rocq_tensor *v;          // as k, its format may differ
    const rocq_tensor *mask;       // F32 or F16 [n_kv, n_q, 1 or n_heads, 1 or n_seqs], added to
                                   // the scores, -inf hides; or NULL. On a GPU k and v must be
                                   // finite where nothing but the mask hides them: 0 NaN is NaN
    const rocq_tensor *sinks;      // F32 [n_heads] or NULL
    const rocq_tensor *kv_len;     // I32 [n_seqs], 1 to n_kv each; NULL = n_kv for all
    const rocq_tensor *page_table; // I32 [n_pages, n_seqs] or NULL. Paged: k and v are pools
                                   // [D, n_kv_heads, n_rows, 1] shared by all sequences, position
                                   // j of sequence s is row page_table[j / page_size, s] page_size
                                   // + j % page_size, and n_kv above is n_pages page_size
    int32_t page_size;             // positions per page, with page_table
    float scale;                   // 0 = 1 / sqrt(D)
    float softcap;                 // 0 = none
    int32_t window;                // 0 = none
    bool causal;
} rocq_attention_params;

// Per row: rmsnorm y = x rstd weight, rstd = 1 / sqrt(mean(x^2) + eps); layernorm y = (x - mean)
// rstd weight + bias, rstd = 1 / sqrt(var(x) + eps). y in Q8_0 quantizes activations in the same
// pass: matmul takes it as x. y may be x if their formats are equal.
typedef struct rocq_norm_params {
    const rocq_tensor *y;      // F32, F16 or Q8_0, x's shape
    const rocq_tensor *x;      // F32 or F16 [K, rows...]
    const rocq_tensor *weight; // F32 [K] or NULL
    const rocq_tensor *bias;   // F32 [K] or NULL, layernorm only
    const rocq_tensor *mean;   // F32 [rows...] or NULL, written, layernorm only
    const rocq_tensor *rstd;   // F32 [rows...] or NULL, written
    float eps;                 // 0 = 1e-5
} rocq_norm_params;

// Rotary position: pair i of the first n_dims elements of a head turns by angle
// pos freq_base^(-2i / n_dims) freq_scale / freq_factors[i]. ext_factor > 0 is YaRN
// (arXiv 2309.00071): low frequencies are scaled, high ones kept, with a ramp between the pairs
// that turn beta_slow and beta_fast times in n_ctx_orig positions, and values grow by
// attn_factor (1 + 0.1 ln(1 / freq_scale)). Elements past n_dims are copied.
typedef struct rocq_rope_config {
    rocq_rope_pairing pairing;
    int32_t n_dims;                  // even, at most D; 0 = D
    float freq_base;                 // 0 = 10000
    float freq_scale;                // 0 = 1; linear scaling by s is 1 / s
    float ext_factor;                // 0 = no YaRN
    float attn_factor;               // 0 = 1
    float beta_fast;                 // 0 = 32
    float beta_slow;                 // 0 = 1
    int32_t n_ctx_orig;              // needed with ext_factor
    const rocq_tensor *freq_factors; // F32 [n_dims / 2] or NULL
} rocq_rope_config;

typedef struct rocq_rope_params {
    const rocq_tensor *y;   // F32 or F16 [D, n_heads, n_tokens]; may be x
    const rocq_tensor *x;   // F32 or F16, y's shape
    const rocq_tensor *pos; // I32 [n_tokens]
    rocq_rope_config rope;
} rocq_rope_params;

// One pass for a layer's new q, k and v: rotates q in place, rotates k and writes it to row cell[t]
// of k_cache, and writes v to row cell[t] of v_cache, both cast to the cache's format.
typedef struct rocq_rope_append_params {
    const rocq_tensor *q;       // F32 [D, n_heads, n_tokens] or NULL
    const rocq_tensor *k;       // F32 [D, n_kv_heads, n_tokens]
    const rocq_tensor *v;       // F32 [D, n_kv_heads, n_tokens]
    const rocq_tensor *k_cache; // F32 F16 BF16 Q8_0 Q4_0 [D, n_kv_heads, n_cells]
    const rocq_tensor *v_cache; // as k_cache, its format may differ
    const rocq_tensor *pos;     // I32 [n_tokens]
    const rocq_tensor *cell;    // I32 [n_tokens], distinct, each < n_cells; NULL = pos
    rocq_rope_config rope;
} rocq_rope_append_params;

typedef struct rocq_activate_params { // y = activation(x)
    const rocq_tensor *y;             // F32 or F16; may be x
    const rocq_tensor *x;             // F32 or F16, y's shape
    rocq_activation activation;
} rocq_activate_params;

typedef struct rocq_glu_params { // y = activation(gate) * up: swiglu with SILU, geglu with GELU
    const rocq_tensor *y;        // F32, F16 or Q8_0; may be gate or up when the formats are equal
    const rocq_tensor *gate;     // F32 or F16, y's shape
    const rocq_tensor *up;       // F32 or F16, y's shape
    rocq_activation activation;
} rocq_glu_params;

typedef struct rocq_binary_params { // y = a + b, or a * b
    const rocq_tensor *y;           // F32 or F16, a's shape; may be a or b
    const rocq_tensor *a;           // F32 or F16
    const rocq_tensor *b;           // F32 or F16; each ne is a's or 1 (repeated)
} rocq_binary_params;

typedef struct rocq_scale_params { // y = x * scale + bias
    const rocq_tensor *y;          // F32 or F16; may be x
    const rocq_tensor *x;          // F32 or F16, y's shape
    float scale;                   // 0 is 0 here: this factor alone has no default
    float bias;
} rocq_scale_params;

typedef struct rocq_cast_params { // y = x in y's format: dequantize, quantize, copy between strides
    const rocq_tensor *y;         // any format but I32; I32 when x is
    const rocq_tensor *x;         // any format, y's shape
} rocq_cast_params;

typedef struct rocq_softmax_params { // y = softmax over a row of x * scale + mask
    const rocq_tensor *y;            // F32; may be x
    const rocq_tensor *x;            // F32, y's shape
    const rocq_tensor *mask;         // F32 or F16, or NULL; ne[0] is x's, other ne x's or 1
    float scale;                     // 0 = 1
} rocq_softmax_params;

typedef struct rocq_gather_params { // y[., i] = table[., ids[i]] * scale: embedding look-up
    const rocq_tensor *y;           // F32 or F16 [K, n]
    const rocq_tensor *table;       // any format [K, rows]
    const rocq_tensor *ids;         // I32 [n], each < rows (E_BOUNDS otherwise)
    float scale;                    // 0 = 1
} rocq_gather_params;

typedef struct rocq_argmax_params { // index of each row's largest value, the first of equals
    const rocq_tensor *index;       // I32 [rows]
    const rocq_tensor *x;           // F32 [K, rows]
} rocq_argmax_params;

// Draws one token. In order: tokens outside `allowed` are dropped; penalties; then, unless
// temperature is 0 (argmax), top_k, top_p, min_p over the softmax of what is left, then temperature
// and the draw. The same logits, parameters, seed and step give the same token on every run.
typedef struct rocq_sample_params {
    const rocq_tensor *token;   // I32 [1], written
    const rocq_tensor *prob;    // F32 [1] or NULL, written: its probability in what was drawn from
    const rocq_tensor *logits;  // F32 [n_vocab]
    const rocq_tensor *recent;  // I32 [n] tokens the penalties look at, or NULL
    const rocq_tensor *allowed; // I32 [(n_vocab + 31) / 32] bit mask, token t at bit t % 32 of
                                // word t / 32; or NULL
    float temperature;
    int32_t top_k;              // 0 = all
    float top_p;                // 0 or >= 1 = off
    float min_p;                // 0 = off: drops p < min_p * max p
    float repeat_penalty;       // 0 = 1: logit / r when positive, logit * r when negative, once
                                // per token
    float frequency_penalty;    // logit - f * count in recent
    float presence_penalty;     // logit - f if in recent
    uint64_t seed;
    uint64_t step;              // number of this draw: use the position of the token
} rocq_sample_params;

// Pictures are channels-last: [C, W, H, N] is N pictures of H rows of W positions of C channels. A
// video is [C, W, H, T], its frames in order.

// Convolution of z, which is x after the steps below:
//   y[m, ox, oy, t] = activation(bias[m] + residual[m, ox, oy, t] + sum over c, i, j, s of
//       w[c + C (i + kw (j + kh s)), m] z[c, stride ox + i - pad_x, stride oy + j - pad_y, t'])
//   t' = t + s, counted so that the last tap of the last frame of y is the last frame of x: causal.
//   Where z has no such position or frame it is 0. So the size of y says how far it reaches past
//   the right and lower edge, and x may have the kt - 1 frames before y's first one, all that are
//   kept of a video's previous chunk, or some, or none.
// From x to z, each step optional: norm, x_activation, each position repeated `upsample` times in
// both directions (nearest). stats says which norm:
//   [2, G, 1 or N]  of G groups of C / G channels: (x - mean) rstd norm_weight[c] + norm_bias[c],
//                   with mean and rstd of x's group (GroupNorm)
//   [1, W, H, N]    of each position: x rstd norm_weight[c] + norm_bias[c] (channel RMS norm)
typedef struct rocq_conv_params {
    const rocq_tensor *y;           // F32, F16 or BF16 [M, OW, OH, N]
    const rocq_tensor *w;           // any format [C kw kh kt, M], see rocq_conv_weights
    const rocq_tensor *x;           // F32, F16 or BF16 [C, W, H, N]
    const rocq_tensor *bias;        // F32 [M] or NULL
    const rocq_tensor *residual;    // F32, F16 or BF16, y's shape, or NULL; may be y
    const rocq_tensor *stats;       // F32, from rocq_norm_stats, or NULL
    const rocq_tensor *norm_weight; // F32 [C] or NULL; only with stats
    const rocq_tensor *norm_bias;   // F32 [C] or NULL; only with stats
    int32_t kw, kh, kt;             // taps: kw and kh odd, up to 7, kt up to 7; 0 = 1
    int32_t stride;                 // 1 or 2, of columns and rows; 0 = 1
    int32_t upsample;               // 1 or 2; 0 = 1
    int32_t pad_x, pad_y;           // zeros left of and above z, less than kw and kh; 0 = (kw - 1)
                                    // / 2 and (kh - 1) / 2, -1 = none
    rocq_activation x_activation;
    rocq_activation activation;
    float x_scale;                  // power of two, 0 = 1: for z beyond F16's range. Where z is
                                    // rounded to F16, it is multiplied by x_scale before, and the
                                    // sums are divided by it. Results in F32 do not depend on it
    rocq_precision precision;       // F32 on the CPU, F16 on a GPU
} rocq_conv_params;

// Mean and rstd for the norms of rocq_conv. With moments a picture may come in tiles: each call
// merges the tile x into them (Chan, Golub, LeVeque 1979), and stats are those of all tiles so far.
// Per group: n elements, their mean, and the sum of squared differences from it;
// rstd = 1 / sqrt(sum / n + eps). Bits depend on the tiles and their order, not on threads.
typedef struct rocq_norm_stats_params {
    const rocq_tensor *stats;   // F32 [2, G, N]: mean and rstd of each group of C / G channels;
                                // or [1, W, H, N]: 1 / sqrt(mean over c of x^2 + eps), no moments.
                                // Written; NULL = none
    const rocq_tensor *moments; // F32 [3, G, N]: n, mean, sum; read unless first, then written.
                                // NULL = none; x's own are not kept
    const rocq_tensor *x;       // F32, F16 or BF16 [C, W, H, N]
    bool first;                 // x is the first tile
    float eps;                  // 0 = 1e-6
} rocq_norm_stats_params;

typedef enum rocq_resize_mode { ROCQ_RESIZE_NEAREST = 0, ROCQ_RESIZE_BILINEAR } rocq_resize_mode;

// y = x at another size. Position o of n_y lies at (o + 1/2) n_x / n_y - 1/2 of x: BILINEAR mixes
// the two neighbours there in each direction (the edge is repeated), NEAREST takes
// floor(o n_x / n_y). No low-pass filter: use a factor of at least 1/2.
typedef struct rocq_resize_params {
    const rocq_tensor *y; // F32, F16 or BF16 [C, OW, OH, N]
    const rocq_tensor *x; // F32, F16 or BF16 [C, W, H, N]
    rocq_resize_mode mode;
} rocq_resize_params;

// y = 255 s(x scale + bias), clamped to 0 to 255 and rounded (halves to even; NaN gives 0). s is
// the identity, or with srgb the sRGB curve for linear light (IEC 61966-2-1).
typedef struct rocq_pixels_params {
    const rocq_tensor *y; // I8 [3 or 4, W, H, N]: RGB or RGBA, bytes 0 to 255
    const rocq_tensor *x; // F32, F16 or BF16 [1, 3 or 4, W, H, N]: grey, RGB or RGBA. Alpha is not
                          // put through the curve; without it y's is 255
    float scale, bias;    // scale 0 = 1. Values of -1 to 1: 0.5 and 0.5
    bool srgb;
} rocq_pixels_params;

// ---------------------------------------------------------------------------------------------
// >>api
// ---------------------------------------------------------------------------------------------
// Ops are asynchronous on a GPU and ordered among themselves; rocq_sync waits. The CPU backend runs
// them before the call returns. Tensors of a CPU context are in host memory, of a GPU context in
// device memory. A context is for one thread at a time; different contexts are independent.
// Verbs in pairs: open and close a context or a file, create and destroy an object, init and free a
// value that the caller holds, alloc and free memory.

// -- results and errors --

// "ROCQ_E_SHAPE", and its one-line meaning. An unknown code gives "ROCQ_E_?".
ROCQ_DEF const char *rocq_result_name(rocq_result result);
ROCQ_DEF const char *rocq_result_message(rocq_result result);

// The message of the last call that failed on this context ("" before the first): which argument,
// which value, what was expected. Valid until the next failing call.
ROCQ_DEF const char *rocq_error(const rocq_ctx *ctx);

// -- context --

// Opens a context. desc NULL is all defaults. On failure *ctx is NULL and desc->log has the
// message.
ROCQ_DEF rocq_result rocq_open(rocq_ctx **ctx, const rocq_desc *desc);

// Waits for submitted work, frees every buffer and the context, and sets *ctx to NULL; does nothing
// if that is NULL. Files, pools, caches and timers of the context must be closed before.
ROCQ_DEF void rocq_close(rocq_ctx **ctx);

// What was opened, and counts since then. E_ARGUMENT for NULL. Strings live as long as the context.
ROCQ_DEF rocq_result rocq_get_info(const rocq_ctx *ctx, rocq_info *info);
ROCQ_DEF rocq_result rocq_get_stats(const rocq_ctx *ctx, rocq_stats *stats);

// Waits until all work submitted on the context is done. On a GPU it returns E_BOUNDS if an op
// since the last sync found an id, cell, length or page out of range in device memory (it has used
// another one instead, or none), or a mask that allows no token (the token is -1). On the CPU the
// op itself fails.
ROCQ_DEF rocq_result rocq_sync(rocq_ctx *ctx);

// Makes ops and graph launches from now on fail with E_CANCELLED, before they do anything, until
// rocq_sync has waited for the work submitted before. One that is running on the CPU stops soon and
// fails too, with outputs that are partly written, unless it was about to end. May be called from
// any thread and from a signal handler.
ROCQ_DEF void rocq_cancel(rocq_ctx *ctx);

// Between begin and end, ops are recorded in the order of their calls instead of run; each is
// checked as always, and one that fails is not recorded. The graph has copies of params and
// tensors, but not of memory: a replay uses what is in the buffers then, so they must live as long
// as the graph. Copies, sync and other graphs in between are E_STATE. On a GPU a replay is one
// submission, asynchronous like an op. With no_graphs, with an op that falls back, with a runtime
// that cannot capture, and on the CPU while a profile is on, the ops are run one by one. A launch
// that fails (E_BOUNDS, E_CANCELLED) has run the ops before that. end reserves scratch memory; a
// launch allocates only if that has grown since (the graph is then captured again). On failure end
// sets *graph to NULL and drops the recording. free waits for submitted replays. rocq_close frees
// graphs that are left.
ROCQ_DEF rocq_result rocq_graph_begin(rocq_ctx *ctx);
ROCQ_DEF rocq_result rocq_graph_end(rocq_ctx *ctx, rocq_graph **graph);
ROCQ_DEF rocq_result rocq_graph_launch(rocq_ctx *ctx, rocq_graph *graph);
ROCQ_DEF void rocq_graph_destroy(rocq_ctx *ctx, rocq_graph **graph); // twice is harmless

// Checks an op's params exactly as the op itself would, and runs nothing. params points to the
// struct that ROCQ_OPS names. why (may be NULL) receives the reason, valid until the next failure.
ROCQ_DEF rocq_result rocq_supports(rocq_ctx *ctx, rocq_op op, const void *params, const char **why);

// Bytes of scratch memory that the op would use with these params.
ROCQ_DEF rocq_result rocq_scratch_size(rocq_ctx *ctx, rocq_op op, const void *params,
                                       int64_t *bytes);

// Makes scratch memory at least this large, so that ops which need no more do not allocate. Other
// ops grow it themselves, which counts as an allocation in rocq_stats. The old memory is freed
// before the larger is taken, so that the budget is never exceeded: after E_MEMORY there is no
// scratch memory until the next op that needs some takes it. E_BUDGET changes nothing.
ROCQ_DEF rocq_result rocq_reserve(rocq_ctx *ctx, int64_t bytes);

// The precision in which an op computes with these params, which are checked first. For a product
// with w2 it is the less exact of both, for a chain that of the first product. AUTO means:
//     product, CPU with AVX2          INT8 for quantized w but MXFP6_E3M2, else F32
//     product, GPU, up to 8 columns   INT8 for quantized w but MXFP6, else F32
//     product, GPU, more columns      F32 for w in F32, else F16
//     attention, convolution, GPU     F16
//     everything else                 F32
typedef struct rocq_precision_info {
    rocq_precision precision; // F32, F16 or INT8
    rocq_precision asked;     // by the params, else by rocq_desc.precision; AUTO = by neither
    double nmse;              // bound, see rocq_precision; with w2 the sum of two
    const char *why;          // a sentence; the string is static
} rocq_precision_info;
ROCQ_DEF rocq_result rocq_get_precision(rocq_ctx *ctx, rocq_op op, const void *params,
                                        rocq_precision_info *info);

// The format of x that a product of n columns with weights of format w reads without converting it:
// F32, F16, or Q8_0 (planar on a GPU). So the op that computes x should write this one. precision
// is that of the product's params. F32 if ctx is NULL.
ROCQ_DEF rocq_format rocq_operand_format(const rocq_ctx *ctx, rocq_format w, int64_t n,
                                         rocq_precision precision);

// -- buffers --

// Memory that the context's ops can use, 256-byte aligned, not cleared. Counts against the budget.
ROCQ_DEF rocq_result rocq_buffer_alloc(rocq_ctx *ctx, rocq_buffer *buffer, int64_t size);

// Frees and empties the buffer, on a GPU after submitted work is done. An empty buffer is ignored.
// For anything but a whole buffer of this context (a piece of one, foreign memory, one that was
// freed before) it returns E_ARGUMENT and frees nothing. rocq_close frees buffers that are left.
ROCQ_DEF rocq_result rocq_buffer_free(rocq_ctx *ctx, rocq_buffer *buffer);

// Makes a buffer of the caller's own memory, on the host or on the context's GPU (hipMalloc, or
// imported). Writes of other queues must have finished before an op reads it.
ROCQ_DEF rocq_buffer rocq_buffer_from_host(void *data, int64_t size);
ROCQ_DEF rocq_buffer rocq_buffer_from_device(uint64_t address, int64_t size);

// -- arena --

// An arena over buffer. If buffer is NULL or empty the arena only measures: its tensors have no
// memory. Pieces are aligned by address, so up to align - 1 bytes before the first are lost,
// depending on where the memory starts. A measuring arena does not know that and adds the most that
// its largest alignment can cost (255 for the default): peak bytes are then enough at any address.
// Memory of rocq_buffer_alloc loses none for alignments up to 256.
ROCQ_DEF void rocq_arena_init(rocq_arena *arena, const rocq_buffer *buffer);

// Cuts size bytes at the next multiple of align (a power of two, 0 = 256). E_ARENA if they do not
// fit; arena->peak is then the size of memory that would have been enough.
ROCQ_DEF rocq_result rocq_arena_alloc(rocq_arena *arena, rocq_buffer *slice, int64_t size,
                                      int64_t align);

// A contiguous tensor cut from the arena.
ROCQ_DEF rocq_result rocq_arena_tensor(rocq_arena *arena, rocq_tensor *tensor, rocq_format format,
                                       int32_t n_dims, const int64_t *ne);

// The same with plain sizes: [ne0], [ne0, ne1] or [ne0, ne1, ne2].
ROCQ_DEF rocq_result rocq_tensor_1d(rocq_arena *arena, rocq_tensor *tensor, rocq_format format,
                                    int64_t ne0);
ROCQ_DEF rocq_result rocq_tensor_2d(rocq_arena *arena, rocq_tensor *tensor, rocq_format format,
                                    int64_t ne0, int64_t ne1);
ROCQ_DEF rocq_result rocq_tensor_3d(rocq_arena *arena, rocq_tensor *tensor, rocq_format format,
                                    int64_t ne0, int64_t ne1, int64_t ne2);

// reset frees everything that was cut since its mark was taken; reset to 0 frees all. A mark that
// is negative, or more than what is used, changes nothing.
ROCQ_DEF int64_t rocq_arena_mark(const rocq_arena *arena);
ROCQ_DEF void rocq_arena_reset(rocq_arena *arena, int64_t mark);

// -- pool --

// desc NULL is all defaults. On failure *pool is NULL. The pool must be destroyed before its
// context is closed; that makes blocks which were not freed invalid.
ROCQ_DEF rocq_result rocq_pool_create(rocq_ctx *ctx, rocq_pool **pool, const rocq_pool_desc *desc);
ROCQ_DEF void rocq_pool_destroy(rocq_pool **pool); // twice, or on NULL, is harmless

// Gets a block of at least size bytes, 256-byte aligned, not cleared; buffer->size is size. Before
// it fails with E_BUDGET or E_MEMORY it gives back free slabs, oldest first, if need be all. On a
// GPU a block may be freed, and handed out again, while submitted ops still use it: later work runs
// after them.
//     Threads: with thread_safe, rocq_pool_free, the statistics and a request for which there is a
// free block do not touch the context: any thread may call them, even while another uses the
// context. A request that has to take memory (with budget -1 there are none), reserve, trim, create
// and destroy use the context, so only calls on this pool may run beside them. Failures that do not
// concern the context go to rocq_desc.log, in the calling thread, and not to rocq_error.
ROCQ_DEF rocq_result rocq_pool_alloc(rocq_pool *pool, rocq_buffer *buffer, int64_t size);

// Takes the block back and empties *buffer. An empty buffer is ignored. E_ARGUMENT, and nothing is
// done, for anything but a live block of this pool: one that was freed before (also by a copy of
// the buffer), a piece of one, or foreign memory. With ROCQ_DEBUG, blocks in host memory have guard
// bytes behind them: E_CORRUPT for a block that was overrun, which is not used again.
ROCQ_DEF rocq_result rocq_pool_free(rocq_pool *pool, rocq_buffer *buffer);

// Takes memory until n blocks for requests of this size are free. E_OVERFLOW (more blocks or bytes
// than can be counted) and E_BUDGET change nothing; after E_MEMORY, what was taken so far stays.
ROCQ_DEF rocq_result rocq_pool_reserve(rocq_pool *pool, int64_t size, int64_t n);

// Gives back free slabs until at most keep bytes are reserved or no slab is free, on a GPU after
// submitted work is done.
ROCQ_DEF rocq_result rocq_pool_trim(rocq_pool *pool, int64_t keep);

// Statistics of one class (0 is the smallest), or with -1 of all. E_ARGUMENT past the last class.
ROCQ_DEF rocq_result rocq_pool_get_stats(rocq_pool *pool, int32_t size_class,
                                         rocq_pool_stats *stats);

// A table for people, or JSON: {"total": {...}, "classes": [{...}, ...]}, with the field names of
// rocq_pool_stats, for the classes that were used. TRACE is an E_ARGUMENT.
ROCQ_DEF rocq_result rocq_pool_report(rocq_pool *pool, rocq_report kind, rocq_write_fn write,
                                      void *user);

// -- tensors: pure functions on the struct, no memory is touched --

// A contiguous tensor at offset in buffer. ne holds n_dims entries. E_BOUNDS when it does not fit.
ROCQ_DEF rocq_result rocq_tensor_init(rocq_tensor *tensor, const rocq_buffer *buffer,
                                      int64_t offset, rocq_format format, int32_t n_dims,
                                      const int64_t *ne);

// The same over host memory that holds at least the tensor's size.
ROCQ_DEF rocq_result rocq_tensor_from_host(rocq_tensor *tensor, void *data, rocq_format format,
                                           int32_t n_dims, const int64_t *ne);

// The part of src that starts at element start and has ne elements per dimension. Strides stay.
ROCQ_DEF rocq_result rocq_tensor_view(rocq_tensor *view, const rocq_tensor *src,
                                      const int64_t start[4], const int64_t ne[4]);

// The two views that models need most, returned by value. If a view is not possible it is all zero,
// a tensor that every op refuses (E_SHAPE).
//     slice: elements first to first + n - 1 of dimension dim (0 to 3), and all of the others. For
// [K, N], slice(t, 1, first, n) is n columns, [K, n].
//     heads: [K, N, B] as [head_dim, K / head_dim, N, B]. Dimension 3 of src must have size 1.
ROCQ_DEF rocq_tensor rocq_tensor_slice(const rocq_tensor *src, int32_t dim, int64_t first,
                                       int64_t n);
ROCQ_DEF rocq_tensor rocq_tensor_heads(const rocq_tensor *src, int64_t head_dim);

// The same elements in other dimensions; src must be contiguous.
ROCQ_DEF rocq_result rocq_tensor_reshape(rocq_tensor *view, const rocq_tensor *src, int32_t n_dims,
                                         const int64_t *ne);

// Dimension i of view is dimension axes[i] of src; axes[0] must be 0.
ROCQ_DEF rocq_result rocq_tensor_permute(rocq_tensor *view, const rocq_tensor *src,
                                         const int32_t axes[4]);

// The number of elements, and the bytes that they take when contiguous. 0 for an invalid tensor.
ROCQ_DEF int64_t rocq_tensor_count(const rocq_tensor *tensor);
ROCQ_DEF int64_t rocq_tensor_size(const rocq_tensor *tensor);
ROCQ_DEF bool rocq_tensor_contiguous(const rocq_tensor *tensor);

// Host address of element 0, or NULL for device memory.
ROCQ_DEF void *rocq_tensor_data(const rocq_tensor *tensor);

// Copies between host memory and a contiguous tensor; size must be rocq_tensor_size. upload may
// return before the copy has finished but never reads src afterwards; download waits. If you have
// set dst's layout to planar, src is still in the GGUF layout and is repacked on the way.
ROCQ_DEF rocq_result rocq_upload(rocq_ctx *ctx, const rocq_tensor *dst, const void *src,
                                 int64_t size);
ROCQ_DEF rocq_result rocq_download(rocq_ctx *ctx, void *dst, const rocq_tensor *src, int64_t size);

// -- formats: host functions, no context --

typedef struct rocq_format_info {
    const char *name;       // as GGUF writes it: "Q4_K"
    int32_t block_elems;
    int32_t block_bytes;
    float bits_per_weight;
} rocq_format_info;

// NULL for an unknown format. I32 is known too.
ROCQ_DEF const rocq_format_info *rocq_get_format_info(rocq_format format);

// As GGUF writes it, "Q4_K"; "?" for an unknown format.
ROCQ_DEF const char *rocq_format_name(rocq_format format);

// By name, case ignored ("q4_k"). E_FORMAT when unknown.
ROCQ_DEF rocq_result rocq_format_from_name(rocq_format *format, const char *name);

// Bytes of n elements; n must be a whole number of blocks, 0 or more.
ROCQ_DEF rocq_result rocq_row_size(rocq_format format, int64_t n, int64_t *bytes);

// Encodes n_rows rows of n_per_row floats. dst has n_rows * rocq_row_size(format, n_per_row) bytes
// and may not overlap src or importance (E_ARGUMENT).
// importance is NULL or n_per_row weights >= 0, the same for all rows: the sum of importance *
// error^2 is made small. Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 MXFP4 without importance give ggml's reference
// bytes. A value that is not finite is an E_ARGUMENT.
ROCQ_DEF rocq_result rocq_quantize(rocq_format format, void *dst, const float *src, int64_t n_rows,
                                   int64_t n_per_row, const float *importance);

// Decodes n elements (whole blocks), bit for bit as ggml does. dst and src do not overlap.
ROCQ_DEF rocq_result rocq_dequantize(rocq_format format, float *dst, const void *src, int64_t n);

ROCQ_DEF float rocq_f16_to_f32(uint16_t half);
ROCQ_DEF uint16_t rocq_f32_to_f16(float value); // nearest even, as IEEE 754 says

// -- GGUF reader: github.com/ggml-org/ggml docs/gguf.md, versions 2 and 3, little endian --

// Values are GGUF's own numbers.
typedef enum rocq_gguf_type {
    ROCQ_GGUF_U8 = 0,
    ROCQ_GGUF_I8,
    ROCQ_GGUF_U16,
    ROCQ_GGUF_I16,
    ROCQ_GGUF_U32,
    ROCQ_GGUF_I32,
    ROCQ_GGUF_F32,
    ROCQ_GGUF_BOOL,
    ROCQ_GGUF_STRING,
    ROCQ_GGUF_ARRAY,
    ROCQ_GGUF_U64,
    ROCQ_GGUF_I64,
    ROCQ_GGUF_F64
} rocq_gguf_type;

// Text as the file holds it: length bytes, zeros allowed, no terminator.
typedef struct rocq_str {
    const char *data;
    int64_t length;
} rocq_str;

// Whether s has the same bytes as text, a C string; false if that is NULL.
ROCQ_DEF bool rocq_str_equal(rocq_str s, const char *text);

// Where the bytes come from: exactly one of path, data and read.
typedef struct rocq_gguf_desc {
    const char *path;  // UTF-8; memory-mapped where the system can
    const void *data;  // the whole file in memory; not copied: must outlive the rocq_gguf
    int64_t size;      // of the file, in bytes, with data or read
    bool (*read)(void *dst, int64_t offset, int64_t size, void *user); // false = failed
    void *user;
    bool no_mmap;      // read the file at path, do not map it. If a mapped file is cut short while
                       // in use the program ends (SIGBUS); one that is read gives E_IO
} rocq_gguf_desc;

// A metadata value: a scalar (count 1), or an array of count elements of type.
typedef struct rocq_gguf_value {
    rocq_str key;
    rocq_gguf_type type; // of the elements; never ARRAY
    bool is_array;
    int64_t count;
    const void *data, *end; // private: read it with rocq_gguf_value_*
} rocq_gguf_value;

typedef struct rocq_gguf_tensor {
    rocq_str name;
    uint32_t type_id;    // as in the file
    const char *type_name; // "Q4_K"; also for types that rocq cannot load; else "unknown"
    rocq_format format;  // if known
    bool known;          // rocq can load tensors of this type
    int32_t n_dims;
    int64_t ne[4];
    int64_t offset;      // bytes from the file's start
    int64_t size;        // bytes; 0 when not known
} rocq_gguf_tensor;

// Reads the header, metadata and tensor directory, and checks all of it: counts, lengths, offsets,
// products, duplicate names, overlaps, and that all data is inside the file. On failure *file is
// NULL.
ROCQ_DEF rocq_result rocq_gguf_open(rocq_ctx *ctx, rocq_gguf **file, const rocq_gguf_desc *desc);

// Frees the file and sets *file to NULL. Tensors that point into it are then invalid.
ROCQ_DEF void rocq_gguf_close(rocq_gguf **file);

ROCQ_DEF int32_t rocq_gguf_version(const rocq_gguf *file);
ROCQ_DEF int64_t rocq_gguf_value_count(const rocq_gguf *file);
ROCQ_DEF int64_t rocq_gguf_tensor_count(const rocq_gguf *file);

// By index in file order (E_ARGUMENT past the end), or by name. E_NOT_FOUND leaves no message in
// the context, because asking is the way to find out about optional things.
ROCQ_DEF rocq_result rocq_gguf_value_at(const rocq_gguf *file, int64_t index,
                                        rocq_gguf_value *value);
ROCQ_DEF rocq_result rocq_gguf_find_value(const rocq_gguf *file, const char *key,
                                          rocq_gguf_value *value);
ROCQ_DEF rocq_result rocq_gguf_tensor_at(const rocq_gguf *file, int64_t index,
                                         rocq_gguf_tensor *tensor);
ROCQ_DEF rocq_result rocq_gguf_find_tensor(const rocq_gguf *file, const char *name,
                                           rocq_gguf_tensor *tensor);

// Element i of a value. Numbers convert when nothing is lost (any integer type that holds the
// value, F32 to F64); otherwise E_TYPE. Past the end: E_ARGUMENT.
ROCQ_DEF rocq_result rocq_gguf_value_i64(const rocq_gguf_value *value, int64_t i, int64_t *out);
ROCQ_DEF rocq_result rocq_gguf_value_u64(const rocq_gguf_value *value, int64_t i, uint64_t *out);
ROCQ_DEF rocq_result rocq_gguf_value_f64(const rocq_gguf_value *value, int64_t i, double *out);
ROCQ_DEF rocq_result rocq_gguf_value_bool(const rocq_gguf_value *value, int64_t i, bool *out);
ROCQ_DEF rocq_result rocq_gguf_value_str(const rocq_gguf_value *value, int64_t i, rocq_str *out);

// Gives the next string of an array; *cursor is NULL at first. Takes constant time, while
// rocq_gguf_value_str has to walk from the first. E_NOT_FOUND after the last.
ROCQ_DEF rocq_result rocq_gguf_next_str(const rocq_gguf_value *value, const void **cursor,
                                        rocq_str *out);

// find_value and the getter of a scalar in one. E_TYPE for an array. On failure out is unchanged.
ROCQ_DEF rocq_result rocq_gguf_get_i64(const rocq_gguf *file, const char *key, int64_t *out);
ROCQ_DEF rocq_result rocq_gguf_get_u64(const rocq_gguf *file, const char *key, uint64_t *out);
ROCQ_DEF rocq_result rocq_gguf_get_f64(const rocq_gguf *file, const char *key, double *out);
ROCQ_DEF rocq_result rocq_gguf_get_bool(const rocq_gguf *file, const char *key, bool *out);
ROCQ_DEF rocq_result rocq_gguf_get_str(const rocq_gguf *file, const char *key, rocq_str *out);

// Copies a tensor's bytes to host memory of at least tensor->size.
ROCQ_DEF rocq_result rocq_gguf_read(rocq_ctx *ctx, const rocq_gguf *file,
                                    const rocq_gguf_tensor *tensor, void *dst);

// Makes a tensor that the context's ops can use. *buffer is the memory taken for it, which the
// caller gives to rocq_buffer_free. In a CPU context, if the file is mapped or in memory, the
// tensor is a view of it and *buffer is empty; the file must then stay open. On a GPU, block
// formats become planar.
ROCQ_DEF rocq_result rocq_gguf_upload(rocq_ctx *ctx, const rocq_gguf *file, const char *name,
                                      rocq_tensor *tensor, rocq_buffer *buffer);

// How rocq_gguf_load goes about it. Zeroed fields are defaults.
typedef struct rocq_gguf_load_desc {
    const char *const *names; // tensors to load, in this order; NULL = all, in the file's order
    int64_t n_names;
    int64_t piece_bytes;      // size of a piece, see below: 512 to 2^28; 0 = 4 MiB
    int32_t n_pieces;         // GPU: pieces of pinned memory, 3 to 64; 0 = 7
    bool copy;                // CPU: copy tensors that could be views of the file, too
    bool (*progress)(int64_t done, int64_t total, void *user); // bytes; from the calling thread, at
                              // the start and after every piece; false = stop: E_CANCELLED
    void *user;
} rocq_gguf_load_desc;

// Loads many tensors as rocq_gguf_upload loads one, but into one buffer. tensors[i] is names[i];
// a name that is listed twice gets memory once. Returns when all data is in place. The caller frees
// *buffer, which is empty if every tensor is a view of the file. After a failure or rocq_cancel
// nothing is kept. desc may be NULL.
//     On a GPU three stages overlap: threads read a piece into pinned memory while the piece before
// it is copied to the device and the one before that is repacked. During the call this takes
// n_pieces pieces of pinned memory and, for block formats, as much staging memory on the device,
// which counts against the budget. A path or memory is read by all threads of the context, a
// callback is called in this thread only.
ROCQ_DEF rocq_result rocq_gguf_load(rocq_ctx *ctx, const rocq_gguf *file,
                                    const rocq_gguf_load_desc *desc, rocq_tensor *tensors,
                                    rocq_buffer *buffer);

// -- files written whole: for whatever takes a rocq_write_fn --

typedef struct rocq_file rocq_file;

// Opens a file that gets its name only when it is whole. Until then it is a new file in the same
// folder: "PATH.part" or, if that exists, the first free of "PATH.part1" to "PATH.part99". A file
// that exists is never opened, so the program may read path meanwhile. The new file gets the
// permissions of the one that it replaces. If path is a symbolic link, the link is replaced; if it
// is not a regular file (a pipe, a terminal, /dev/null), it is written directly.
//     E_IO for a directory and for a file without write permission. On POSIX also if stdout or
// stderr is closed and the new file would get that descriptor, 1 or 2: what the program prints
// would go into the file. On failure *file is NULL.
ROCQ_DEF rocq_result rocq_file_open(rocq_ctx *ctx, rocq_file **file, const char *path);

// A rocq_write_fn to pass with the file as user.
ROCQ_DEF bool rocq_file_write(const void *src, int64_t size, void *file);

// Closes and frees the file, and sets *file to NULL. With keep, and if every write succeeded, the
// data is flushed to the disk and the file takes path's place in one step: at every moment path is
// either the old file or the new one. Windows refuses that while path is open or mapped, so close
// it first. Without keep, and on any failure, the new file is removed and path stays as it was.
// Only a program that is killed leaves a PATH.part. Must be called before the context is closed.
ROCQ_DEF rocq_result rocq_file_close(rocq_file **file, bool keep);

// -- GGUF writer: version 3. Values, then tensors, then each tensor's bytes in the order added --

typedef struct rocq_gguf_writer_desc {
    const char *path; // exactly one of path and write
    bool (*write)(const void *src, int64_t size, void *user); // bytes in file order; false = failed
    void *user;
    int32_t alignment; // of tensor data, a power of two from 8 up; 0 = 32
} rocq_gguf_writer_desc;

// A path is written as a rocq_file, so it gets its name only in rocq_gguf_writer_close. That call
// frees the writer; it must come before the context is closed. On failure *writer is NULL.
ROCQ_DEF rocq_result rocq_gguf_writer_open(rocq_ctx *ctx, rocq_gguf_writer **writer,
                                           const rocq_gguf_writer_desc *desc);

// Sets a scalar (is_array false, count 1) or an array; data points to elements in native form (bool
// as uint8_t, STRING as rocq_str). A key that is set again keeps its place and gets the new value.
ROCQ_DEF rocq_result rocq_gguf_writer_set(rocq_gguf_writer *writer, const char *key,
                                          rocq_gguf_type type, bool is_array, int64_t count,
                                          const void *data);
ROCQ_DEF rocq_result rocq_gguf_writer_set_u32(rocq_gguf_writer *writer, const char *key,
                                              uint32_t value);
ROCQ_DEF rocq_result rocq_gguf_writer_set_f32(rocq_gguf_writer *writer, const char *key,
                                              float value);
ROCQ_DEF rocq_result rocq_gguf_writer_set_bool(rocq_gguf_writer *writer, const char *key,
                                               bool value);
ROCQ_DEF rocq_result rocq_gguf_writer_set_str(rocq_gguf_writer *writer, const char *key,
                                              const char *value);

// Copies all metadata of an open file (general.alignment stays the writer's own).
ROCQ_DEF rocq_result rocq_gguf_writer_set_from(rocq_gguf_writer *writer, const rocq_gguf *file);

// name: up to 63 bytes, not used before (E_ARGUMENT). Rows must be whole blocks (E_SHAPE).
ROCQ_DEF rocq_result rocq_gguf_writer_add_tensor(rocq_gguf_writer *writer, const char *name,
                                                 rocq_format format, int32_t n_dims,
                                                 const int64_t *ne);

// Writes all bytes of the next tensor (size must be the tensor's). The first call also writes the
// header, after which nothing can be set or added (E_STATE).
ROCQ_DEF rocq_result rocq_gguf_writer_write(rocq_gguf_writer *writer, const void *data,
                                            int64_t size);

// Completes the file, frees the writer and sets *writer to NULL. E_STATE if tensors are missing
// and, for a path, if any set or add_tensor has failed: a program that gives up after such a
// failure need only call this. On failure path stays as it was; what a callback has received should
// be thrown away.
ROCQ_DEF rocq_result rocq_gguf_writer_close(rocq_gguf_writer **writer);

// -- KV cache: keys and values of many sequences and layers, bookkept on the host --

typedef struct rocq_kv rocq_kv;

typedef struct rocq_kv_desc {
    int32_t n_layers, n_kv_heads, head_dim;
    rocq_format k_format, v_format; // F32 (0), F16, BF16, Q8_0 or Q4_0
    int32_t n_seqs;       // sequences, numbered from 0; 0 = 1
    int32_t n_ctx;        // most positions of a sequence
    int32_t page_size;    // 0 = contiguous: every sequence has room for n_ctx positions. Else
                          // positions are kept in pages of so many, from a pool all sequences share
    int32_t n_pages;      // paged: of that pool; 0 = enough for n_seqs full sequences
    rocq_rope_config rope; // how the keys were turned, for rocq_kv_shift; memory of freq_factors
                           // must live as long as the cache
} rocq_kv_desc;

// The tensors that ops take, for one layer and n sequences from seq0 on. They stay the same from
// step to step, so a graph can be recorded; only the contents of kv_len and page_table change.
typedef struct rocq_kv_view {
    rocq_tensor k_cache, v_cache; // of rocq_rope_append: [D, n_kv_heads, n_cells], all sequences
    rocq_tensor k, v;             // of rocq_attention: [D, n_kv_heads, n_ctx, n], or the page pool
    rocq_tensor kv_len;           // I32 [n]; attention takes no sequence without positions
    rocq_tensor page_table;       // I32 [pages of a sequence, n]; n_dims 0 when contiguous
    int32_t page_size;
} rocq_kv_view;

typedef struct rocq_kv_stats {
    int64_t reserved_bytes; // of K and V
    int64_t used_bytes;     // of positions held; a page that sequences share counts once
    int64_t n_positions;    // held, over all sequences
    int32_t n_pages, n_free_pages, n_shared_pages; // paged
    int64_t n_page_copies;  // pages copied because a sequence wrote to one it shared
    double internal;        // unused share of what sequences that are not empty hold (their pages,
                            // or n_ctx positions each)
    double unused;          // 1 - used_bytes / reserved_bytes
} rocq_kv_stats;

// Bytes of the buffer that rocq_kv_create takes, without taking it: K, V, lengths, page tables, and
// up to 4 MiB (1/32 of a sequence in F16) through which shift, save and restore go. A desc that
// rocq_kv_create refuses is refused here with the same code, but for what only a context knows: its
// memory and budget, where rope.freq_factors must be, and what its kernels cannot do.
ROCQ_DEF rocq_result rocq_kv_size(const rocq_kv_desc *desc, int64_t *bytes);

// On failure *kv is NULL. Must be freed before its context is closed. All memory is taken here: the
// buffer, some bytes on the host for each page and sequence, and the context's scratch that shift
// needs. Of the calls below, those that may run ops (append, shift, fork, save, restore) are
// E_STATE while a graph is recorded, and E_CANCELLED only before they have begun.
ROCQ_DEF rocq_result rocq_kv_create(rocq_ctx *ctx, rocq_kv **kv, const rocq_kv_desc *desc);
ROCQ_DEF void rocq_kv_destroy(rocq_kv **kv); // twice, or on NULL, is harmless

// Fills view for a layer and n_seqs sequences from seq0 on; its tensors are the cache's memory.
ROCQ_DEF rocq_result rocq_kv_layer(rocq_kv *kv, int32_t layer, int32_t seq0, int32_t n_seqs,
                                   rocq_kv_view *view);

// Makes room for n more positions of a sequence: they begin at rocq_kv_length before the call.
// cells [n] (or NULL) receives where rocq_rope_append is to put them: contiguous, position j of
// sequence s is cell s n_ctx + j. A shared page that they fall into is copied first. E_BOUNDS past
// n_ctx, E_MEMORY when no page is free; the sequence is then as it was.
ROCQ_DEF rocq_result rocq_kv_append(rocq_kv *kv, int32_t seq, int32_t n, int32_t *cells);

// Uploads kv_len and page_table as the calls since the last flush have left them. Call it after the
// append of a step and before its ops. Ops and replays submitted before still use the old values.
ROCQ_DEF rocq_result rocq_kv_flush(rocq_kv *kv);

ROCQ_DEF int32_t rocq_kv_length(const rocq_kv *kv, int32_t seq); // in positions; -1 = no such seq

// Keeps the first length positions.
ROCQ_DEF rocq_result rocq_kv_truncate(rocq_kv *kv, int32_t seq, int32_t length);

// Drops the n positions from first on, and moves those behind them down by n: their keys are
// rotated back by n positions (rope) and rounded to the cache's format once more. If first and n
// are whole pages, values stay where they are. Shared pages are copied before they are written; if
// too few pages are free for that, the result is E_MEMORY and nothing is changed.
ROCQ_DEF rocq_result rocq_kv_shift(rocq_kv *kv, int32_t seq, int32_t first, int32_t n);

// Makes dst a copy of src (what dst held is dropped). Paged: the pages are shared until one of the
// two writes to them; contiguous: all is copied.
ROCQ_DEF rocq_result rocq_kv_fork(rocq_kv *kv, int32_t src, int32_t dst);

// A sequence to host memory and back, into a cache of the same layers, heads and formats, of either
// layout. dst NULL asks for the size, which needed (may be NULL otherwise) receives. save waits for
// the GPU; restore does not, nor reads src afterwards. It replaces what seq held, and changes
// nothing on E_TRUNCATED (cut short), E_CORRUPT (altered: there is a checksum), E_FOREIGN (of
// another version), E_SHAPE (of another cache), E_BOUNDS (over n_ctx positions) and E_MEMORY (too
// few pages).
ROCQ_DEF rocq_result rocq_kv_save(rocq_kv *kv, int32_t seq, void *dst, int64_t size,
                                  int64_t *needed);
ROCQ_DEF rocq_result rocq_kv_restore(rocq_kv *kv, int32_t seq, const void *src, int64_t size);

ROCQ_DEF rocq_result rocq_kv_get_stats(const rocq_kv *kv, rocq_kv_stats *stats);

// -- timers and profile: ROCQ_NO_PROFILE compiles the profile out --

// Statistics of samples, which are sorted in place and must be numbers. Percentiles are of the
// nearest rank; the median of an even count is the mean of the two in the middle. All 0 for n < 1.
typedef struct rocq_summary {
    int64_t count;
    double min, median, mean, p95, p99, max, deviation; // deviation: of the sample (n - 1)
} rocq_summary;
ROCQ_DEF void rocq_summarize(rocq_summary *summary, double *samples, int64_t n);

ROCQ_DEF int64_t rocq_time_ns(void); // host clock that never goes back

// A stopwatch on the host's clock, or on the GPU's own by events, which see only the time between
// reaching start and reaching stop in the queue. On the CPU, and where the runtime has no such
// events, both are the host's clock. It can be started again, and must be freed before its context
// is closed. E_STATE for a stop without a start, or a read without a stop.
typedef enum rocq_timer_kind { ROCQ_TIMER_HOST = 0, ROCQ_TIMER_GPU } rocq_timer_kind;
typedef struct rocq_timer {
    rocq_timer_kind kind;
    int64_t start_ns, stop_ns;
    void *start_event, *stop_event; // private
} rocq_timer;
ROCQ_DEF rocq_result rocq_timer_init(rocq_ctx *ctx, rocq_timer *timer, rocq_timer_kind kind);
ROCQ_DEF rocq_result rocq_timer_start(rocq_ctx *ctx, rocq_timer *timer);
ROCQ_DEF rocq_result rocq_timer_stop(rocq_ctx *ctx, rocq_timer *timer);
// Waits for stop.
ROCQ_DEF rocq_result rocq_timer_read(rocq_ctx *ctx, rocq_timer *timer, double *ns);
ROCQ_DEF void rocq_timer_free(rocq_ctx *ctx, rocq_timer *timer); // twice is harmless

// What launching costs, of a kernel that does nothing, n times: until the call returns, until the
// host sees it done, and per launch of a row of 32. On the CPU: a job handed to the threads, whose
// call returns when it is done. For the time being memory is taken.
typedef struct rocq_launch_cost {
    rocq_summary submit_ns, complete_ns, row_ns;
} rocq_launch_cost;
ROCQ_DEF rocq_result rocq_measure_launch(rocq_ctx *ctx, int32_t n, rocq_launch_cost *cost);

// How a region touches memory, and with it which share of its peak it can reach at best.
typedef enum rocq_access {
    ROCQ_ACCESS_STREAM = 0, // one after the other: 90%
    ROCQ_ACCESS_TILED,      // blocks read again from caches: bound by arithmetic, 85% of that
    ROCQ_ACCESS_GATHER,     // rows from anywhere: 60%
    ROCQ_ACCESS_LATENCY     // too little to fill the chip: no share is expected
} rocq_access;

// A profile collects times by name while it is on, in regions that lie in one another. The program
// opens its own; in them every op that runs ("matvec Q4_K", "rmsnorm"), graph launch ("graph"),
// rocq_upload, rocq_download, and rocq_sync on a GPU is one, but not what runs inside a graph that
// is replayed as one submission. On a GPU ops and graphs are timed there, by events; a region
// around them lasts there from its first to its last. A call that fails is no sample.
//
// Measuring stays within a share of the time (rocq_profile_desc.cost). Where measuring every call
// would take more, an outermost region is measured every k-th time on average, with all that is
// inside it, and counts for the calls since the last in every sum. A region that lasted longer than
// 50 ms, or is called for the first time, is measured, and the regions directly inside it are
// treated as outermost: that is how a program's main loop may be a region.
//
// Bytes and flops of ops are counted by operands: each is moved once, of a table the rows that are
// gathered, of a cache the rows that are written, or the positions that attention reads. What only
// device memory knows (kv_len on a GPU) is left out with its op. They add up in all regions around.
typedef struct rocq_profile_desc {
    int32_t max_regions;    // names, 0 = 256; each keeps
    int32_t max_samples;    // the latest so many times, 0 = 1024, for median and percentiles
    int32_t max_events;     // of the trace, 0 = 65536; later ones are counted, not kept
    bool host_only;         // GPU: host times alone, no events in the queue
    bool roctx;             // also mark ranges for AMD's profilers, where libroctx64 is found;
                            // every region is then measured
    double cost;            // most that measuring may take of the time, as a share: 0 = 0.005;
                            // 1 = every call is measured, whatever it takes (for a trace)
    double bytes_per_s;     // peak of the device, for shares; 0 = the chip's (GPU), none (CPU)
    double flops_per_s;     // the same in F32, or
    double matrix_per_s;    // on the matrix unit; 0 = none of other GPUs than AMD's
} rocq_profile_desc;

typedef struct rocq_region_stats {
    const char *name, *path; // path: names from the outermost region, with '/'; where that is more
                             // than 127 bytes, "..." and the last 124, or a few less, as it begins
                             // with a whole character
    int32_t depth;           // 0 = outermost
    int64_t calls;
    rocq_summary host_ns;    // over the latest samples, count: how many calls were measured. On a
                             // GPU: of submission
    rocq_summary gpu_ns;     // count 0: not timed on the GPU
    double total_ns;         // of ops and graphs on the GPU where they were timed there; of other
                             // regions on the host, or the GPU if longer: their end need not wait
    double bytes, flops; // sums of what was moved and computed, those of regions inside included
    double bytes_per_s, flops_per_s;
    double share;            // of the peak that bounds it, 0 when unknown
    rocq_access access;      // of ops by their shapes; LATENCY where at the peak it took under 2 us
    bool memory_bound;       // false when unknown
    const char *verdict;     // "memory-bound, 82% of 960 GB/s: excellent" (above 80%; good: above
                             // 60%; else what such access can reach); "" when unknown
} rocq_region_stats;         // its strings live until clear, or the next start

// All memory is taken by start; nothing is allocated while regions run, and what finds no room is
// counted (rocq_profile_report). E_STATE when it is on. Starting again begins anew, and drops the
// results of before; stop leaves them, clear forgets them and gives back what start took. Both are
// harmless when there is nothing to stop or clear. With ROCQ_NO_PROFILE all of it is ROCQ_OK and
// nothing.
ROCQ_DEF rocq_result rocq_profile_start(rocq_ctx *ctx, const rocq_profile_desc *desc);
ROCQ_DEF rocq_result rocq_profile_stop(rocq_ctx *ctx); // regions that are open are forgotten
ROCQ_DEF rocq_result rocq_profile_clear(rocq_ctx *ctx);

// Nested, 64 deep; name, UTF-8, must stay valid until clear (a literal). work adds what the
// innermost open region moves and computes; E_STATE without one, as for an end without a begin.
// Without a profile that is on they do nothing.
ROCQ_DEF rocq_result rocq_region_begin(rocq_ctx *ctx, const char *name);
ROCQ_DEF rocq_result rocq_region_work(rocq_ctx *ctx, double bytes, double flops,
                                      rocq_access access);
ROCQ_DEF rocq_result rocq_region_end(rocq_ctx *ctx);

// Results, waiting for the GPU first. Regions in the order of their first begin.
ROCQ_DEF int32_t rocq_profile_count(rocq_ctx *ctx);
ROCQ_DEF rocq_result rocq_profile_region(rocq_ctx *ctx, int32_t index, rocq_region_stats *stats);

// TEXT: a table, regions in one another. JSON: {"device", "peak_bytes_per_s", ..., "regions":
// [...], "dropped": n}, fields as in rocq_region_stats. TRACE: Chrome's trace event format, which
// ui.perfetto.dev and chrome://tracing open: host and GPU as two threads, on the host's clock. In
// all, dropped counts calls without room for their name or depth, dropped_gpu ops and graphs whose
// time on the GPU is lost, dropped_events those missing in the trace. E_STATE before the first
// start.
ROCQ_DEF rocq_result rocq_profile_report(rocq_ctx *ctx, rocq_report kind, rocq_write_fn write,
                                         void *user);

// -- occupancy: waves of a kernel that fit an RDNA3 chip; no GPU needed --

typedef struct rocq_occupancy_params {
    int32_t target;    // 0x1100 to 0x1103 or 0x1150 to 0x1153
    int32_t vgprs;     // of a lane, 1 to 256
    int32_t lds_bytes; // of a workgroup
    int32_t threads;   // of a workgroup, 1 to 1024
    int32_t wave;      // 32 or 64; 0 = 32
    bool cu_mode;      // -mcumode: a workgroup stays on one of the two CUs of a WGP
} rocq_occupancy_params;

typedef enum rocq_occupancy_limit {
    ROCQ_LIMIT_NONE = 0, // all 16 waves of a SIMD
    ROCQ_LIMIT_VGPRS,
    ROCQ_LIMIT_LDS,
    ROCQ_LIMIT_THREADS   // workgroups: their number, or that a whole one has to fit
} rocq_occupancy_limit;

typedef struct rocq_occupancy {
    int32_t compiler_waves;     // of a SIMD, as clang prints it ("; Occupancy"), which ignores the
                                // granule of LDS and that workgroups are whole
    double waves;               // of a SIMD, what the hardware can hold
    int32_t groups;             // workgroups of a WGP (of a CU with cu_mode); 0: will not launch
    int32_t max_waves;          // 16
    rocq_occupancy_limit
        limit; // of waves; of several limits that are equal, the one named last here
    int32_t next_vgprs;         // most VGPRs with which one more workgroup would fit, 0 = none
} rocq_occupancy;

// E_ARGUMENT for numbers out of the ranges above and other chips. More LDS than the 64 KiB that a
// workgroup may have is an answer: 0 groups.
ROCQ_DEF rocq_result rocq_get_occupancy(const rocq_occupancy_params *params,
                                        rocq_occupancy *result);

// Sizes of workgroups (multiples of a wave up to 1024) that reach more than half of all waves with
// these VGPRs, and lds_per_thread bytes besides lds_bytes; params->threads is ignored. Best first,
// of equals the smaller, which gives its place back sooner. Writes up to n, returns how many there
// are: 0 also for params that rocq_get_occupancy would refuse.
ROCQ_DEF int32_t rocq_recommend_threads(const rocq_occupancy_params *params, double lds_per_thread,
                                        int32_t *threads, int32_t n);

// -- tuner: finds the fastest launch of an op on this device, and remembers it --

// How an op is launched; 0 = by rule. Which fields count depends on the op.
typedef struct rocq_launch_config {
    int32_t k_waves;  // matmul with few columns: waves that share K: 1, 2, 4 or 8
    int32_t tile_n;   // matmul with many, in F16: columns of a tile: 32 or 128; attention: queries
                      // (those of all heads on a KV head) of a block: 16, or more for prompts
    int32_t n_splits; // matmul with many: blocks that share K; attention: the positions
} rocq_launch_config;

typedef struct rocq_tune_desc {
    const rocq_launch_config *configs; // [n_configs] to try; NULL = all that the op can take. Those
    int32_t n_configs;                 // that it cannot take are passed over
    int32_t max_ms;                    // for a shape class; 0 = 1000
    double min_gain; // a configuration must be so much faster than the default to replace it, in
                     // a second measurement against it, in turn; 0 = 0.03
} rocq_tune_desc;

typedef struct rocq_tune_result {
    rocq_launch_config config;  // chosen: all 0 where the default stays
    double default_ns, best_ns; // medians
    double speedup;             // default_ns / best_ns, at least 1
    double bytes_per_s, flops_per_s; // at best_ns; 0 where only the GPU knows lengths
    int32_t n_space;            // configurations there were to try, the default among them, and
    int32_t n_tried;            // tried before the time was over
    double spent_ms;
    bool cached;                // known already, or nothing to choose: nothing was tried
} rocq_tune_result;

// Tunes an op for the shapes and formats of these params, which run many times (their outputs are
// overwritten), and keeps the result in the context for all ops of that shape class. A CPU context
// has nothing to tune: E_UNSUPPORTED. desc NULL is all defaults; result may be NULL. Results keep
// their bounds of precision, but a tuned op may order its sums differently. An op of several
// launches has each tuned, and config is the first one's. A context keeps up to 4096 results: past
// that, E_STATE.
//     A time is the median of samples on the device's clock, each a row of runs, taken in turn with
// the default's. What takes over twice as long as the default is not sampled again. What fits the
// device's caches comes from there: see rocq_tune_graph.
//     A class is an exact shape, but for columns over 8 (rounded up to 32, past 1024 to a power of
// two) and positions that attention has room for (to a power of two). Attention is timed at the
// lengths that kv_len holds.
//     Graphs keep the launches they were captured with, as long as scratch memory does not grow. A
// result may want more of it: tune, or load, before rocq_scratch_size is asked.
ROCQ_DEF rocq_result rocq_tune(rocq_ctx *ctx, rocq_op op, const void *params,
                               const rocq_tune_desc *desc, rocq_tune_result *result);

// Tunes all ops of a recorded graph, a class at a time. Up to 64 ops of a class run in turn, so
// that a layer finds its weights where it does in a model, mostly not in caches. Ops alone are run
// and overwrite their outputs; appends to a KV cache are not. The graph is captured again, with
// what was found. Of result, times are sums over the ops that there was something to choose for,
// and config is the first one's.
ROCQ_DEF rocq_result rocq_tune_graph(rocq_ctx *ctx, rocq_graph *graph, const rocq_tune_desc *desc,
                                     rocq_tune_result *result);

// What a launch of these params uses now, by rule or tuned; of several launches, the first that has
// a choice. All 0 where there is none, as on the CPU.
ROCQ_DEF rocq_result rocq_get_launch_config(rocq_ctx *ctx, rocq_op op, const void *params,
                                            rocq_launch_config *config);

// The results as binary data, a header with sizes and a checksum and an entry for each shape class,
// written by save in two pieces (rocq_file_write takes them). load adds them to those that the
// context has; where both have a class, the loaded one counts. It refuses, changing nothing, what
// save has not written (E_MAGIC), what was cut short (E_TRUNCATED) or altered (E_CORRUPT), what is
// of another chip, driver or version (E_FOREIGN: one simply tunes again), and more results than a
// context keeps (E_STATE). clear forgets all results.
ROCQ_DEF rocq_result rocq_tuning_save(rocq_ctx *ctx, rocq_write_fn write, void *user);
ROCQ_DEF rocq_result rocq_tuning_load(rocq_ctx *ctx, const void *data, int64_t size);
ROCQ_DEF void rocq_tuning_clear(rocq_ctx *ctx);

// Does before the first token what would make it slow, and waits for it. GPU: every kernel that the
// graph needs, or all with graph NULL, is launched once without work, so that it is loaded; the
// graph becomes the submission that it is replayed as, and pinned memory for copies is taken. CPU:
// the threads are started, every page of the graph's operands is touched, so that a mapped file is
// in memory, and the ops are rehearsed: they run with the graph's weights, but over zeros and into
// memory of their own, up to 8 MiB, which is given back. That takes as long as a launch, and at
// least 2 ms, since a short step is faster when it runs again. Both: scratch memory for the graph.
// Nothing that ops see is changed once it returns.
//
// GPU, once each time that the graph has been captured: the graph is replayed with made-up inputs,
// replayed with other ones, and its ops are run one by one with these. Where the last two runs do
// not write the same bits, the graph is never replayed again: rocq_graph_launch then runs its ops.
// Inputs are what ops read that no earlier op has written, except weights, biases, tables and the
// cache that attention reads. Inputs, all that the ops write, and the first cells of the caches
// that rocq_rope_append writes to (one more than it has tokens) are saved before and restored bit
// for bit; no other stream may use them meanwhile. That takes the time of the three runs, and twice
// as much device memory as is saved. If there is too little, or the budget does not allow it, the
// replay stays unchecked, which is no failure: the log tells.
ROCQ_DEF rocq_result rocq_warm(rocq_ctx *ctx, rocq_graph *graph);

// -- operations: contracts stand at the params structs --

// Fills w, the weights of a rocq_conv, from memory of the host in the order of GGUF and safetensors
// files, [kw, kh, kt, C, M] (PyTorch's M, C, kt, kh, kw): reorders each row to c innermost, then
// kw, kh, kt, and encodes it in w's format. Synchronous, and for loading: it allocates a buffer of
// a row or more meanwhile. w is untouched if a check fails.
typedef struct rocq_conv_weights_params {
    const rocq_tensor *w; // any format [C kw kh kt, M], contiguous; planar on a GPU if it may be
    const void *src;      // F32, F16 or BF16, host
    rocq_format src_format;
    int64_t src_size;     // bytes, exactly those of the tensor
    int32_t kw, kh, kt;   // 0 = 1
} rocq_conv_weights_params;
ROCQ_DEF rocq_result rocq_conv_weights(rocq_ctx *ctx, const rocq_conv_weights_params *p);

#define ROCQ_X(NAME, name, params) \
    ROCQ_DEF rocq_result rocq_##name(rocq_ctx *ctx, const params *p);
ROCQ_OPS(ROCQ_X)
#undef ROCQ_X

#ifdef __cplusplus
}
#endif

#endif // ROCQ_H

// Stop here if you only want the API.

// ---------------------------------------------------------------------------------------------
// >>kernels: what passes between this file and rocq_kernels.hip
// ---------------------------------------------------------------------------------------------
// rocq_kernels.hip defines ROCQ_DEVICE and includes this file up to the end of this section. A
// kernel is extern "C" __global__ void rocq_k_NAME(ARGS), takes one args struct by value and is
// named once, in ROCQ_KERNELS. All sizes are checked against the buffers before a launch; indices
// in device memory (ids, positions, page tables) are checked by the kernel that reads them. With
// args that are all zero a kernel touches no memory and returns: rocq_warm launches it so.

#if (defined(ROCQ_IMPLEMENTATION) || defined(ROCQ_DEVICE)) && !defined(ROCQ_KERNELS_DECLARED)
#define ROCQ_KERNELS_DECLARED

// Masks and softmax need infinities, checks need NaN, and sums need their order (>>numbers). clang
// defines the first two macros, gcc the first four, MSVC the last.
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(_M_FP_FAST)
#error "rocq is wrong with -ffast-math: compile this file with -fno-fast-math behind it"
#endif

// The planar layout (ROCQ_LAYOUT_PLANAR). A tensor of n = R K / 32 units of 32 weights, R rows in
// all, is cut into planes, one after the other without gaps, each with all units in row order. A
// plane holds this many bytes per unit, or per 8 units (a superblock) where marked /8:
//   Q4_0 IQ4_NL  N 16, d 2                    Q2_K    C 8, scales 16/8, d dmin 4/8
//   Q4_1         N 16, d m 4                  Q3_K    C 8, B 4, sl 8/8, sh 4/8, d 2/8
//   Q5_0         N 16, B 4, d 2               Q4_K    N 16, head 16/8
//   Q5_1         N 16, B 4, d m 4             Q5_K    N 16, B 4, head 16/8
//   Q8_0         L 16, H 16, d 2              Q6_K    N 16, C 8, scales 16/8, d 2/8
//   MXFP4        N 16, e 1                    IQ4_XS  N 16, (d, scales_h, scales_l) 8/8
//   MXFP6        N 16, C 8, e 1
// That is the size of the GGUF layout, and every plane begins aligned for its widest load. Words
// are little endian; byte b of word w is elements as follows:
//   N  bits 0-3 of q: nibbles, word w byte b: element 4 w + b low, 16 + 4 w + b high
//   C  the next 2 bits of q (Q2_K Q3_K: bits 0-1): word w (0, 1) byte b, bits 2 r and 2 r + 1:
//      element 16 w + 4 r + b (r < 4)
//   B  the bit above those: byte b, bit r: element 4 r + b (r < 8)
//   L, H  codes 0-15 and 16-31 of a unit
//   head  d, dmin, lo[8], hi: lo[g] holds bits 0-3 of sc[g] (low) and mn[g] (high); bits 4 g and
//      4 g + 1 of hi are bits 4-5 of sc[g], bits 4 g + 2 and 4 g + 3 those of mn[g]
//   sl, sh  Q3_K: byte u of sl holds bits 0-3 of sc[2 u] (low) and sc[2 u + 1] (high); bits 4 u and
//      4 u + 1 of sh are bits 4-5 of sc[2 u], bits 4 u + 2 and 4 u + 3 those of sc[2 u + 1]
// d, dmin, m, e, scales are the fields of the GGUF block, in its order.
// x of an INT8 product is a planar Q8_0 tensor whose d is rounded up, so that no code is clipped.

enum {
    ROCQ_K_WAVE = 32,         // lanes
    ROCQ_K_MATVEC_ROWS = 4,   // rows of w that a wave works on at once
    ROCQ_K_MATVEC_WAVES = 8,  // of a block
    ROCQ_K_MATVEC_PRODUCTS = 4, // most products of the same x in one launch
    ROCQ_K_FEW = 8,           // columns up to which a product is a matvec
    ROCQ_K_MATMUL_M = 128,    // a block of a matmul: rows of w, and below, by precision, columns
    ROCQ_K_MATMUL_F16_N = 128,
    ROCQ_K_MATMUL_F16_N_FEW = 32, // of the kernels named _32
    ROCQ_K_MATMUL_INT8_N = 64,
    ROCQ_K_MATMUL_F32_N = 128,
    ROCQ_K_MERGE_M = 64,      // rows and columns of a block of matmul_merge
    ROCQ_K_MERGE_N = 8,
    ROCQ_K_ROW_THREADS = 256, // of a block of softmax, which computes one row
    ROCQ_K_NORM_THREADS = 512,// of a block of norm, which computes one row
    ROCQ_K_ATTEND_RUN = 128,  // fewest positions that a block of attention takes
    ROCQ_K_CONV_W = 8,        // a block of a conv: columns and rows of y
    ROCQ_K_CONV_H = 16,
    ROCQ_K_CONV_PATCH = 180,  // most positions of z in LDS: 3x3 taps of such a block
    ROCQ_K_STATS_RUN = 128,   // elements of a channel that a thread of norm_stats adds up
    ROCQ_K_DIMS = 4
};

// A tensor of any strides. If it is planar, it is contiguous and data is its first plane.
typedef struct rocq_k_tensor {
    void *data;         // element 0
    int64_t stride[3];  // bytes from one element to the next in dimensions 1 to 3
    int32_t ne[4];
    int32_t format;     // rocq_format
    int32_t layout;     // rocq_layout
} rocq_k_tensor;

// Bits of the status word that a kernel sets when device memory held an index out of range; the
// next rocq_sync turns it into E_BOUNDS.
enum {
    ROCQ_K_BAD_ID = 1, ROCQ_K_BAD_CELL = 2, ROCQ_K_BAD_LENGTH = 4, ROCQ_K_BAD_PAGE = 8,
    ROCQ_K_NO_TOKEN = 16
};

// A launch may be one piece of a grid that was cut because it would take too long (dispatch_us):
// block0 is the number of the piece's first block, which the kernel adds to blockIdx.x.
typedef struct rocq_k_common {
    uint32_t block0;
    uint32_t *status;
} rocq_k_common;

typedef struct rocq_k_selftest_args {
    uint32_t *out;      // [64]: 0 the target (0x1100, ... or 0 when not gfx), 1 lanes of a wave,
                        // 2 ROCQ_VERSION, 3 sizeof every args struct summed, 4 and up: a wave's sum
                        // of squares, a WMMA and a dot4, all with known results
} rocq_k_selftest_args;

// Planar copy of raw blocks. A block of 256 threads takes 256 units.
typedef struct rocq_k_repack_args {
    rocq_k_common common;
    rocq_k_tensor src;  // GGUF layout, any strides
    void *dst;          // planar, all of src
    int64_t unit0;      // where src begins in dst, which may be a larger tensor
    int64_t n_units;    // of all of dst
} rocq_k_repack_args;

// Ranges of memory, and copies of them that begin at multiples of 256 bytes of one block.
typedef struct rocq_k_range {
    uint64_t address;
    int64_t size, copy; // bytes, and where its copy begins in the block
    uint32_t filled;    // whether ROCQ_K_FILL fills it
    uint32_t fill;      // four bytes to fill it with, all the same
} rocq_k_range;

typedef struct rocq_k_difference { // written by ROCQ_K_COMPARE
    uint32_t n, unused; // words, or bytes where those are not aligned, that differ; 0 before
    int64_t copy;       // where one of them is in the block
} rocq_k_difference;

typedef struct rocq_k_ranges_args {
    rocq_k_common common;
    const rocq_k_range *ranges; // [n], sorted by copy
    unsigned char *copies;      // [size], aligned to 16 bytes
    int64_t size;
    rocq_k_difference *difference;
    int32_t n, task;
} rocq_k_ranges_args;

enum { ROCQ_K_SAVE, ROCQ_K_RESTORE, ROCQ_K_FILL, ROCQ_K_COMPARE }; // task

// y = op(a, b): activate, glu, add, mul, scale and cast of float formats, with y also in Q8_0 (raw
// or planar) and Q4_0. b is repeated along dimensions in which it has size 1.
typedef struct rocq_k_map_args {
    rocq_k_common common;
    rocq_k_tensor y, a, b; // b.data NULL: none
    int32_t op;            // rocq_op
    int32_t activation;
    float scale, bias;
} rocq_k_map_args;

// y[., r] = x[., ids ? ids[r] : r] * scale, decoded: gather, and cast from every format.
typedef struct rocq_k_decode_args {
    rocq_k_common common;
    rocq_k_tensor y, x;
    const int32_t *ids;    // [rows of y], x then has 2 dimensions; NULL: same shape
    float scale;
} rocq_k_decode_args;

// One block per row.
typedef struct rocq_k_norm_args {
    rocq_k_common common;
    rocq_k_tensor y, x, mean, rstd; // data NULL: absent; mean and rstd [ne1, ne2, ne3]
    const float *weight, *bias;     // or NULL
    float eps;
    int32_t center;                 // layernorm
} rocq_k_norm_args;

typedef struct rocq_k_rope_stream {
    rocq_k_tensor y, x; // [D, heads, tokens]; token t of x goes to row cell[t] of y's dimension 2
    int32_t plain;      // copied, not turned
    int32_t to_cell;
    uint32_t slices;    // blocks per token
} rocq_k_rope_stream;

typedef struct rocq_k_rope_args {
    rocq_k_common common;
    rocq_k_rope_stream stream[3];
    const int32_t *pos, *cell;
    const float *freq_factors; // or NULL
    int32_t n_streams, n_cells;
    uint32_t slices;           // of all streams
    int32_t heads;             // per block
    int32_t head_dim, n_dims;
    int32_t neox;
    float magnitude;           // of cos and sin
    // Turns of pair i per position, before freq_factors: own (scale + (1 - scale) keep), where own
    // is 1 / (2 pi) times power[b] of every bit b set in i, and keep = ext_factor (1 - (i - low)
    // per_pair), the factor in brackets held within 0 to 1.
    double power[8], scale, ext_factor, low, per_pair;
} rocq_k_rope_args;

typedef struct rocq_k_softmax_args {
    rocq_k_common common;
    rocq_k_tensor y, x, mask;
    float scale;
} rocq_k_softmax_args;

typedef struct rocq_k_argmax_args {
    rocq_k_common common;
    int32_t *index;
    rocq_k_tensor x;
} rocq_k_argmax_args;

typedef struct rocq_k_sample_args {
    rocq_k_common common;
    int32_t *token;
    float *prob;            // or NULL
    const float *logits;
    const int32_t *recent;  // or NULL
    const int32_t *allowed; // or NULL
    float *work;            // [n_vocab] logits after penalties
    int32_t n_vocab, n_recent;
    float temperature, top_p, min_p, repeat_penalty, frequency_penalty, presence_penalty;
    int32_t top_k;
    float uniform_hi, uniform_lo; // the draw in [0, 1), as a sum of two floats
} rocq_k_sample_args;

// What is done with a sum before it is stored in y, in the order of rocq_matmul_params.
typedef struct rocq_k_epilogue {
    rocq_k_tensor y, gate, residual; // data NULL: absent
    const float *bias;               // [M] or NULL
    int32_t activation;
    float softcap;
} rocq_k_epilogue;

// One product of a matvec launch: its weights, then what a matvec uses of rocq_k_epilogue. The
// kernel reads each half at once: at its start args are in no cache, so every read that depends on
// another one costs a further trip to memory.
typedef struct rocq_k_matvec_weights {
    const void *w, *w2; // planar, or plain for F32 F16 BF16; w2: y = epilogue(w x) * (w2 x)
    int64_t n_units;    // of the whole tensor (planar), which places its planes
    int64_t row0;       // first row, for batches
    int32_t m;          // rows
    int32_t format;
} rocq_k_matvec_weights;

typedef struct rocq_k_matvec_product {
    rocq_k_matvec_weights weights;
    void *y;             // column c of y, gate and residual is c strides, in bytes, further on
    const void *gate;    // or NULL
    const void *residual;
    const float *bias;
    int64_t y_stride;    // of a planar y instead: units of the whole tensor
    int64_t gate_stride, residual_stride;
    int32_t y_format, gate_format, residual_format;
    int32_t y_layout;
    float softcap;
    int32_t activation;
} rocq_k_matvec_product;

// y[m, c] for n <= ROCQ_K_FEW columns c. k_waves waves share a row group, each with its part of K.
//   kernel    the _n1 _n2 _n4 _n8 of the least size >= n; f32 with block formats has _n1 and _n8;
//             int8_mixed: n = 1
//   grid      blocks of ROCQ_K_MATVEC_WAVES waves. A block has R = 32 / k_waves rows of a product;
//             product i has (m + R - 1) / R blocks, the first of which is block_begin[i]
//   products  same x, k and n; one format but for int8_mixed; w2 has w's format, shape and place
//   int8      k a multiple of the block of w's format; w, w2 and x planar, aligned to 16 bytes
//   f32       x and x_stride * 4 aligned to 16 bytes. With plain w any alignment of whole elements
//             does, and any k; what is not 16-byte aligned is read by elements
//   epilogue  tensors begin at column 0 of this launch, dimension 1 is columns. y may be residual
//             or gate. y in Q8_0 needs k_waves = 1 and m % 32 = 0; planar, y is the whole tensor
//             and its columns are x_column0 and up
typedef struct rocq_k_matvec_args {
    rocq_k_common common;
    const void *x;      // INT8: planar Q8_0 [K, x_columns]; F32: floats [K, n] with x_stride
    int64_t x_units;    // of that whole planar tensor
    int64_t x_column0;  // first column
    int64_t x_stride;   // F32: floats from column to column
    int32_t k, n;
    int32_t k_shift;    // k_waves = 1 << k_shift: 1, 2, 4 or 8
    int32_t k_step;     // ROCQ_K_WAVE k_waves: a lane takes each k_step-th unit of a row (planar)
                        // or each k_step-th 16 bytes or element (plain)
    uint32_t block_begin[ROCQ_K_MATVEC_PRODUCTS]; // first block of each product, of the first one
                                                  // 0, and UINT32_MAX where there is none
    rocq_k_matvec_product product[ROCQ_K_MATVEC_PRODUCTS];
} rocq_k_matvec_args;

// y = epilogue(w x) over tiles; blockIdx.x counts tiles (see matmul_place), then splits of K,
// blockIdx.z batches. With n_splits over 1 the sums go to work, floats [M, n_splits, N of all
// batches], and matmul_merge follows, with tiles_m and tiles_n of ROCQ_K_MERGE_M rows by
// ROCQ_K_MERGE_N columns.
typedef struct rocq_k_matmul_args {
    rocq_k_common common;
    float *work;
    const void *w;         // planar, or plain for F32 F16 BF16: all of w's batches
    int64_t w_units;       // of the whole tensor
    const void *x;         // F16: F16 [K, N] rows x_stride apart; INT8: planar Q8_0; F32: floats
    int64_t x_units;       // of the whole planar x
    int64_t x_stride;      // elements from column to column
    rocq_k_epilogue epilogue;
    int64_t m, n, k;
    int32_t tiles_m, tiles_n;
    int32_t n_splits;
    int32_t format;
    int32_t batch2, run2, run3; // batch z of x: i2 = z % batch2, i3 = z / batch2. Its matrix of w
                                // is i2 / run2 + w_batch2 (i3 / run3)
    int32_t w_batch2;
} rocq_k_matmul_args;

// Columns of work: (query i, head h of a KV head's group), column i group + h. attention_decode
// takes ROCQ_K_DECODE_COLUMNS of them a block, attention_prefill ROCQ_K_PREFILL_COLUMNS(D), D being
// the kernel's head size, which is the least in ROCQ_K_HEAD_DIMS that is head_dim or more.
#define ROCQ_K_DECODE_COLUMNS 16
#define ROCQ_K_PREFILL_COLUMNS(D) ((D) <= 128 ? 64 : (D) == 256 ? 32 : 16)

// Blocks of 128 threads. blockIdx.x counts n_splits fastest, then KV heads, then sequences, then
// n_tiles from the last to the first, because the last queries see most positions:
//   n_tiles   columns of a KV head, group n_q, over the columns of a block, rounded up
//   n_splits  1 or more: so many blocks share the positions of a tile. A block takes no fewer than
//             ROCQ_K_ATTEND_RUN, so if kv_len is short the last ones have nothing to do. Sums, and
//             so the bits of the results, depend on n_splits
//   work      n_splits > 1: n_tiles n_kv_heads n_seqs n_splits (D + 2) columns-of-a-block floats
//   counter   n_splits > 1: n_tiles n_kv_heads n_seqs words, zero before and after. By it a block
//             knows that it is the last of its tile, and merges
// The launches of a cut grid must run one after the other, since they may share tiles.
typedef struct rocq_k_attention_args {
    rocq_k_common common;
    rocq_k_tensor out, q, k, v, mask; // as in rocq_attention_params; mask.data NULL: none. mask is
                                      // repeated where it has 1. k and v: stride[1] below 2^32
    const float *sinks;               // or NULL
    const int32_t *kv_len;            // or NULL: n_kv
    const int32_t *page_table;        // or NULL; n_pages a sequence
    int32_t n_kv;                     // most positions of a sequence: n_pages page_size if paged
    int32_t page_size, n_pages;
    int32_t head_dim, n_heads, n_kv_heads, n_q, n_seqs;
    int32_t group;                    // n_heads / n_kv_heads; group group n_q is below 2^32
    uint32_t group_inverse;           // UINT32_MAX / group: c / group = (c + 1) group_inverse >> 32
    float scale;                      // not 0
    float softcap;                    // 0: none
    int32_t window, causal;
    int32_t n_splits, n_tiles;
    float *work;
    uint32_t *counter;
} rocq_k_attention_args;

// y = activation(bias + residual + sums y_scale) over tiles of ROCQ_K_CONV_W columns and
// ROCQ_K_CONV_H rows of a frame; blockIdx.x counts tiles_m, tiles_x, tiles_y, n_splits, blockIdx.z
// frames of y. With n_splits over 1 the sums go to work, and conv_merge follows. conv_input makes
// y, F16 [C, W, H, N] without gaps, of x by norm and activation, for a conv to read. Kernels
// conv_f32_* are for x in F32, conv_f16_* for F16 and BF16.
typedef struct rocq_k_conv_args {
    rocq_k_common common;
    float *work;             // n_splits > 1: floats [M, n_splits, OW, OH, N]
    const void *w;           // F16 [C kw kh kt, M] without gaps
    rocq_k_tensor y, x, residual, stats; // as in rocq_conv_params; data NULL: absent
    const float *bias, *norm_weight, *norm_bias; // or NULL
    int32_t m, c, slices;    // slices of 64 channels of x
    int32_t group;           // channels of a group of stats
    int32_t kw, kh, kt, stride, pad_x, pad_y, past;
    int32_t upsample;        // z is x shifted up by so many bits in both directions
    int32_t z_w, z_h;
    int32_t halo;            // a patch has all kw kh taps' positions, not one tap's
    int32_t patch_w, patch_n;// its columns and positions
    int32_t patch_w_inverse; // 65536 / patch_w + 1
    int32_t x_wide, w_wide, y_wide; // read by 8 channels at once; y: residual and bias, too
    int32_t x_activation, activation;
    float x_scale, y_scale;  // y_scale = 1 / x_scale
    int32_t tiles_m, tiles_x, tiles_y, n_splits;
} rocq_k_conv_args;

// n_shares shares of the positions of each frame, by blocks of 256 channels; then a block a group.
typedef struct rocq_k_norm_stats_args {
    rocq_k_common common;
    float *work;                      // [2, C, n_shares, N]
    rocq_k_tensor x, stats, moments;  // data NULL: absent
    int32_t group, n_shares;
    int32_t first, packed, wide;      // packed: no gaps between rows; wide: 8 channels at once
    float eps;
} rocq_k_norm_stats_args;

typedef struct rocq_k_resize_args {
    rocq_k_common common;
    rocq_k_tensor y, x;
    int32_t bilinear;
} rocq_k_resize_args;

typedef struct rocq_k_pixels_args {
    rocq_k_common common;
    rocq_k_tensor y, x;
    float scale, bias;
    int32_t srgb;
} rocq_k_pixels_args;

// Formats whose codes fit int8 and for which the integer dot product pays: X(name), names as in
// ROCQ_FORMATS. The MXFP6 formats are decoded to floats.
#define ROCQ_K_INT8_FORMATS(F, X) \
    F(X, q4_0) F(X, q4_1) F(X, q5_0) F(X, q5_1) F(X, q8_0) F(X, q2_K) F(X, q3_K) F(X, q4_K) \
    F(X, q5_K) F(X, q6_K) F(X, iq4_nl) F(X, iq4_xs) F(X, mxfp4)
#define ROCQ_K_PLAIN_FORMATS(F, X) F(X, f32) F(X, f16) F(X, bf16)
#define ROCQ_K_ALL_FORMATS(F, X) \
    ROCQ_K_PLAIN_FORMATS(F, X) ROCQ_K_INT8_FORMATS(F, X) F(X, mxfp6_e2m3) F(X, mxfp6_e3m2)
#define ROCQ_K_HEAD_DIMS(F, X) F(X, 64) F(X, 80) F(X, 96) F(X, 112) F(X, 128) F(X, 256) F(X, 512)
#define ROCQ_K_CONV_TILES(F, X) F(X, 128) F(X, 64) F(X, 16) // channels of y

// First families of kernels, then the list of all: X(name, args, threads) is the kernel
// rocq_k_##name, whose blocks have at most so many threads.
#define ROCQ_K_MATVEC_INT8(X, f)                        \
    X(matvec_int8_##f##_n1, rocq_k_matvec_args, 256)    \
    X(matvec_int8_##f##_n2, rocq_k_matvec_args, 256)    \
    X(matvec_int8_##f##_n4, rocq_k_matvec_args, 256)    \
    X(matvec_int8_##f##_n8, rocq_k_matvec_args, 256)
#define ROCQ_K_MATVEC_F32(X, f)                         \
    X(matvec_f32_##f##_n1, rocq_k_matvec_args, 256)     \
    X(matvec_f32_##f##_n8, rocq_k_matvec_args, 256)
#define ROCQ_K_MATVEC_PLAIN(X, f)                       \
    X(matvec_f32_##f##_n2, rocq_k_matvec_args, 256)     \
    X(matvec_f32_##f##_n4, rocq_k_matvec_args, 256)
#define ROCQ_K_MATMUL_F16(X, f)                         \
    X(matmul_f16_##f##_128, rocq_k_matmul_args, 128)    \
    X(matmul_f16_##f##_32, rocq_k_matmul_args, 128)
#define ROCQ_K_MATMUL_INT8(X, f) X(matmul_int8_##f, rocq_k_matmul_args, 128)
#define ROCQ_K_ATTENTION(X, d)                          \
    X(attention_decode_##d, rocq_k_attention_args, 128) \
    X(attention_prefill_##d, rocq_k_attention_args, 128)

#define ROCQ_K_CONV(X, bm)                              \
    X(conv_f32_##bm, rocq_k_conv_args, 128)             \
    X(conv_f16_##bm, rocq_k_conv_args, 128)

#define ROCQ_K_MATVECS(X)                                    \
    ROCQ_K_INT8_FORMATS(ROCQ_K_MATVEC_INT8, X)               \
    X(matvec_int8_mixed_n1, rocq_k_matvec_args, 256)         \
    ROCQ_K_ALL_FORMATS(ROCQ_K_MATVEC_F32, X)                 \
    ROCQ_K_PLAIN_FORMATS(ROCQ_K_MATVEC_PLAIN, X)

#define ROCQ_KERNELS(X)                                      \
    X(selftest, rocq_k_selftest_args, 32)                    \
    X(repack, rocq_k_repack_args, 256)                       \
    ROCQ_K_MATVECS(X)                                        \
    ROCQ_K_ALL_FORMATS(ROCQ_K_MATMUL_F16, X)                 \
    ROCQ_K_INT8_FORMATS(ROCQ_K_MATMUL_INT8, X)               \
    X(matmul_f32, rocq_k_matmul_args, 256)                   \
    X(matmul_merge, rocq_k_matmul_args, 256)                 \
    ROCQ_K_HEAD_DIMS(ROCQ_K_ATTENTION, X)                    \
    X(norm, rocq_k_norm_args, 512)                           \
    X(rope, rocq_k_rope_args, 256)                           \
    X(map, rocq_k_map_args, 256)                             \
    X(softmax, rocq_k_softmax_args, 256)                     \
    X(decode, rocq_k_decode_args, 256)                       \
    X(argmax, rocq_k_argmax_args, 1024)                      \
    X(sample, rocq_k_sample_args, 1024)                      \
    X(ranges, rocq_k_ranges_args, 256)                       \
    ROCQ_K_CONV_TILES(ROCQ_K_CONV, X)                        \
    X(conv_input, rocq_k_conv_args, 256)                     \
    X(conv_merge, rocq_k_conv_args, 256)                     \
    X(norm_stats, rocq_k_norm_stats_args, 256)               \
    X(norm_stats_merge, rocq_k_norm_stats_args, 256)         \
    X(norm_stats_positions, rocq_k_norm_stats_args, 256)     \
    X(resize, rocq_k_resize_args, 256)                       \
    X(pixels, rocq_k_pixels_args, 256)

enum {
#define ROCQ_X(name, args, threads) ROCQ_K_##name,
    ROCQ_KERNELS(ROCQ_X)
#undef ROCQ_X
    ROCQ_K_COUNT
};

// HIP's functions that rocq.h uses, with types that need no header of HIP. Each returns HIP's error
// number, 0 for success. X(need, field, symbol, parameters) is the function hip##symbol. OPTIONAL
// ones may be NULL, and so may MODULE ones if the kernels are linked. The pointers come from the
// shared library, or from rocq_kernels.hip if the program is linked with it.
#define ROCQ_HIP_FUNCTIONS(X)                                                                     \
    X(REQUIRED, device_count, GetDeviceCount, (int *n))                                           \
    X(REQUIRED, set_device, SetDevice, (int device))                                              \
    X(REQUIRED, device_attribute, DeviceGetAttribute, (int *value, int attribute, int device))    \
    X(REQUIRED, device_name, DeviceGetName, (char *name, int size, int device))                   \
    X(REQUIRED, device_pci, DeviceGetPCIBusId, (char *pci, int size, int device))                 \
    X(REQUIRED, device_memory, DeviceTotalMem, (size_t *bytes, int device))                       \
    X(REQUIRED, mem_alloc, Malloc, (void **ptr, size_t size))                                     \
    X(REQUIRED, mem_free, Free, (void *ptr))                                                      \
    X(REQUIRED, host_alloc, HostMalloc, (void **ptr, size_t size, unsigned flags))                \
    X(REQUIRED, host_free, HostFree, (void *ptr))                                                 \
    X(OPTIONAL, host_register, HostRegister, (void *ptr, size_t size, unsigned flags))            \
    X(OPTIONAL, host_unregister, HostUnregister, (void *ptr))                                     \
    X(REQUIRED, copy, MemcpyAsync,                                                                \
      (void *dst, const void *src, size_t size, int kind, void *stream))                          \
    X(REQUIRED, fill, MemsetAsync, (void *dst, int byte, size_t size, void *stream))              \
    X(REQUIRED, stream_create, StreamCreateWithFlags, (void **stream, unsigned flags))            \
    X(REQUIRED, stream_destroy, StreamDestroy, (void *stream))                                    \
    X(REQUIRED, stream_wait, StreamSynchronize, (void *stream))                                   \
    X(REQUIRED, event_create, EventCreateWithFlags, (void **event, unsigned flags))               \
    X(REQUIRED, event_destroy, EventDestroy, (void *event))                                       \
    X(REQUIRED, event_record, EventRecord, (void *event, void *stream))                           \
    X(REQUIRED, event_wait, EventSynchronize, (void *event))                                      \
    X(OPTIONAL, event_elapsed, EventElapsedTime, (float *ms, void *start, void *stop))            \
    X(OPTIONAL, stream_wait_event, StreamWaitEvent,                                               \
      (void *stream, void *event, unsigned flags))                                                \
    X(OPTIONAL, priority_range, DeviceGetStreamPriorityRange, (int *least, int *greatest))        \
    X(OPTIONAL, stream_create_priority, StreamCreateWithPriority,                                 \
      (void **stream, unsigned flags, int priority))                                              \
    X(OPTIONAL, stream_create_units, ExtStreamCreateWithCUMask,                                   \
      (void **stream, uint32_t n_words, const uint32_t *mask))                                    \
    X(OPTIONAL, memory_info, MemGetInfo, (size_t *free_bytes, size_t *total_bytes))               \
    X(OPTIONAL, driver_version, DriverGetVersion, (int *version))                                 \
    X(OPTIONAL, capture_begin, StreamBeginCapture, (void *stream, int mode))                      \
    X(OPTIONAL, capture_end, StreamEndCapture, (void *stream, void **graph))                      \
    X(OPTIONAL, graph_instantiate, GraphInstantiate,                                              \
      (void **exec, void *graph, void **error_node, char *log, size_t log_size))                  \
    X(OPTIONAL, graph_destroy, GraphDestroy, (void *graph))                                       \
    X(OPTIONAL, graph_upload, GraphUpload, (void *exec, void *stream))                            \
    X(OPTIONAL, graph_launch, GraphLaunch, (void *exec, void *stream))                            \
    X(OPTIONAL, graph_exec_destroy, GraphExecDestroy, (void *exec))                               \
    X(MODULE, module_load, ModuleLoadData, (void **module, const void *image))                    \
    X(MODULE, module_unload, ModuleUnload, (void *module))                                        \
    X(MODULE, module_function, ModuleGetFunction,                                                 \
      (void **function, void *module, const char *name))                                          \
    X(MODULE, module_launch, ModuleLaunchKernel,                                                  \
      (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,       \
       unsigned block_y, unsigned block_z, unsigned lds, void *stream, void **args, void **extra))

typedef struct rocq_hip {
#define ROCQ_X(need, field, symbol, parameters) int (*field) parameters;
    ROCQ_HIP_FUNCTIONS(ROCQ_X)
#undef ROCQ_X
    const char *(*error_name)(int error);
    // Set only by a program that links the kernels. launch takes a kernel's host stub from stubs,
    // which are in the order of ROCQ_KERNELS.
    int (*launch)(const void *stub, unsigned grid_x, unsigned grid_z, unsigned threads,
                  unsigned lds, void *args, void *stream);
    const void *const *stubs;
    int n_stubs, version; // ROCQ_K_COUNT and ROCQ_VERSION of rocq_kernels.hip
} rocq_hip;

// HIP's attributes and constants, unchanged since HIP 5. rocq_kernels.hip maps those of CUDA.
enum {
    ROCQ_HIP_CLOCK_KHZ = 5, ROCQ_HIP_INTEGRATED = 16, ROCQ_HIP_MEMORY_BITS = 59,
    ROCQ_HIP_MEMORY_KHZ = 60, ROCQ_HIP_UNITS = 63,
    ROCQ_HIP_TO_DEVICE = 1, ROCQ_HIP_TO_HOST = 2, ROCQ_HIP_ON_DEVICE = 3, // copy
    ROCQ_HIP_NON_BLOCKING = 1, ROCQ_HIP_NO_TIMING = 2, ROCQ_HIP_THREAD_LOCAL = 1,
    ROCQ_HIP_OUT_OF_MEMORY = 2
};

// Defined by rocq_kernels.hip: the runtime and the kernels that the program is linked with.
#ifdef __cplusplus
extern "C"
#endif
const rocq_hip *rocq_hip_linked(void);

#endif // ROCQ_KERNELS_DECLARED

// ---------------------------------------------------------------------------------------------
// >>implementation
// ---------------------------------------------------------------------------------------------

#if defined(ROCQ_IMPLEMENTATION) && !defined(ROCQ_IMPLEMENTED)
#define ROCQ_IMPLEMENTED

// >>config: what the compiler and the system SUPPORT, minus what ROCQ_NO_x removes, gives HAS.

#if defined(ROCQ_MALLOC) != defined(ROCQ_FREE)
#error "define both ROCQ_MALLOC and ROCQ_FREE, or neither"
#endif

// A private function that nothing calls is a warning (-Wall), with ROCQ_STATIC too: there ROCQ_DEF
// says that a public function may be unused, and private ones are called by those.
#if defined(__GNUC__) || defined(__clang__)
#define ROCQ__ALWAYS_INLINE __attribute__((always_inline)) static inline
#else
#define ROCQ__ALWAYS_INLINE static inline
#endif
#ifdef __cplusplus
#define ROCQ__ALIGNAS(n) alignas(n)
#else
#define ROCQ__ALIGNAS(n) _Alignas(n)
#endif
#if (defined(__GNUC__) || defined(__clang__)) && !defined(_WIN32)
#define ROCQ__PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define ROCQ__PRINTF(fmt, args)
#endif

// gcc for Windows spills 32-byte vectors to a stack that is only 16-byte aligned (GCC bug 54412),
// so there AVX2 needs clang.
#if !defined(ROCQ_NO_SIMD) && defined(__x86_64__) && (defined(__clang__) || !defined(_WIN32))
#define ROCQ__HAS_AVX2 1
#define ROCQ__TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define ROCQ__TARGET_AVX512 \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#else
#define ROCQ__HAS_AVX2 0
#endif
// Whether the assembler knows AVX-VNNI: LLVM's since 12, GNU's since 2.36, which gcc 11 comes with.
#if ROCQ__HAS_AVX2 && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define ROCQ__HAS_AVX_VNNI 1
#else
#define ROCQ__HAS_AVX_VNNI 0
#endif
#if !defined(ROCQ_NO_SIMD) && defined(__aarch64__) && defined(__ARM_NEON)
#define ROCQ__HAS_NEON 1
#else
#define ROCQ__HAS_NEON 0
#endif
#if !defined(ROCQ_NO_THREADS)
#define ROCQ__HAS_THREADS 1
#else
#define ROCQ__HAS_THREADS 0
#endif
#if !defined(ROCQ_NO_STDIO)
#define ROCQ__HAS_STDIO 1
#else
#define ROCQ__HAS_STDIO 0
#endif
#if ROCQ__HAS_STDIO && !defined(ROCQ_NO_MMAP)
#define ROCQ__HAS_MMAP 1
#else
#define ROCQ__HAS_MMAP 0
#endif
#if !defined(ROCQ_NO_HIP)
#define ROCQ__HAS_HIP 1
#else
#define ROCQ__HAS_HIP 0
#endif
#if !defined(ROCQ_NO_PROFILE)
#define ROCQ__HAS_PROFILE 1
#else
#define ROCQ__HAS_PROFILE 0
#endif
#if !defined(ROCQ_NO_OCCUPANCY)
#define ROCQ__HAS_OCCUPANCY 1
#else
#define ROCQ__HAS_OCCUPANCY 0
#endif
#if !defined(ROCQ_NO_TUNER)
#define ROCQ__HAS_TUNER 1
#else
#define ROCQ__HAS_TUNER 0
#endif
#if defined(ROCQ_DEBUG)
enum { ROCQ__GUARD = 64 }; // bytes behind a pool's block in host memory
#else
enum { ROCQ__GUARD = 0 };
#endif

// >>includes

#include <errno.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(_WIN32)
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#if ROCQ__HAS_STDIO
#include <fcntl.h>
#include <io.h>
#include <sys/stat.h>
#endif
#else
#include <poll.h>
#include <sched.h>
#include <unistd.h>
#if ROCQ__HAS_THREADS
#include <pthread.h>
#endif
#if ROCQ__HAS_STDIO
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#endif
#if ROCQ__HAS_HIP
#include <dlfcn.h>
#endif
#endif
#if ROCQ__HAS_AVX2
#include <cpuid.h>
#include <immintrin.h>
#endif
#if ROCQ__HAS_NEON
#include <arm_neon.h>
#endif

#ifndef ROCQ_MALLOC
#define ROCQ_MALLOC(size) malloc(size)
#define ROCQ_FREE(ptr) free(ptr)
#endif

// ---------------------------------------------------------------------------------------------
// >>util: small arithmetic, bit casts, 16-bit floats
// ---------------------------------------------------------------------------------------------

#define ROCQ__MIN(a, b) ((a) < (b) ? (a) : (b))
#define ROCQ__MAX(a, b) ((a) > (b) ? (a) : (b))

// Checked arithmetic on sizes: false, with *out unchanged, on overflow or a negative operand.
static bool rocq__add(int64_t a, int64_t b, int64_t *out) {
    if (a < 0 || b < 0 || a > INT64_MAX - b) return false;
    *out = a + b;
    return true;
}

static bool rocq__mul(int64_t a, int64_t b, int64_t *out) {
    if (a < 0 || b < 0 || (b != 0 && a > INT64_MAX / b)) return false;
    *out = a * b;
    return true;
}

// Rounds a up to a multiple of align, which is a power of two.
static bool rocq__round_up(int64_t a, int64_t align, int64_t *out) {
    if (!rocq__add(a, align - 1, out)) return false;
    *out &= ~(align - 1);
    return true;
}

static inline float rocq__bits_f32(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t rocq__f32_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// These conversions never compute with a subnormal float, so they are right even in a program that
// flushes subnormals to zero, as games do.
static inline float rocq__f16_to_f32(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 0x1fu, mantissa = half & 0x3ffu;
    if (exponent == 0) return rocq__bits_f32(sign | rocq__f32_bits((float)mantissa * 0x1p-24f));
    if (exponent == 31) return rocq__bits_f32(sign | 0x7f800000u | mantissa << 13);
    return rocq__bits_f32(sign | (exponent + 112) << 23 | mantissa << 13);
}

static inline uint16_t rocq__f32_to_f16(float value) {
    uint32_t bits = rocq__f32_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);  // NaN
    if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); // 65520 and up round to infinity
    if (bits >= 0x38800000u) {                                  // normal
        bits += 0xfffu + ((bits >> 13) & 1u);
        return (uint16_t)(sign | (bits - 0x38000000u) >> 13);
    }
    if (bits < 0x33000000u) return (uint16_t)sign; // under half of the smallest subnormal
    const uint32_t shift = 126 - (bits >> 23), full = (bits & 0x7fffffu) | 0x800000u;
    const uint32_t rest = full & ((1u << shift) - 1u), tie = 1u << (shift - 1);
    const uint32_t half = full >> shift;
    return (uint16_t)(sign | (half + (rest > tie || (rest == tie && (half & 1u)) ? 1u : 0u)));
}

static inline float rocq__bf16_to_f32(uint16_t half) {
    return rocq__bits_f32((uint32_t)half << 16);
}

static inline uint16_t rocq__f32_to_bf16(float value) {
    const uint32_t bits = rocq__f32_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 64u); // quiet NaN
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// A bijection of the sum, and of the word: a change of one word always changes the checksum.
static inline uint64_t rocq__checksum_step(uint64_t sum, const void *bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    sum = (sum ^ word) * 0x9e3779b97f4a7c15u + 1;
    return sum ^ sum >> 32;
}

// A 64-bit checksum that continues from sum. Four chains are interleaved, because each step of a
// chain has to wait for the one before it.
static uint64_t rocq__checksum(uint64_t sum, const void *data, int64_t size) {
    const unsigned char *bytes = (const unsigned char *)data;
    const int64_t whole = size / 32 * 32;
    unsigned char rest[32] = {0};
    uint64_t a = sum, b = 1, c = 2, d = 3;
    memcpy(rest, bytes + whole, (size_t)(size - whole));
    for (int64_t i = 0; i <= whole; i += 32) {
        const unsigned char *p = i < whole ? bytes + i : rest;
        a = rocq__checksum_step(a, p);
        b = rocq__checksum_step(b, p + 8);
        c = rocq__checksum_step(c, p + 16);
        d = rocq__checksum_step(d, p + 24);
    }
    a = rocq__checksum_step(a, &b);
    a = rocq__checksum_step(a, &c);
    return rocq__checksum_step(a, &d);
}

static inline bool rocq__block_of(rocq_format format, int64_t *elems, int64_t *bytes) {
    switch (format) {
#define ROCQ_X(NAME, name, id, block_elems, block_bytes) \
    case ROCQ_##NAME: *elems = block_elems; *bytes = block_bytes; return true;
        ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
    case ROCQ_I8: *elems = 1; *bytes = 1; return true;
    case ROCQ_I32: *elems = 1; *bytes = 4; return true;
    default: *elems = 1; *bytes = 0; return false;
    }
}

static inline int64_t rocq__bytes(rocq_format format, int64_t n) {
    int64_t elems, bytes;
    rocq__block_of(format, &elems, &bytes);
    return (elems == 1 ? n : n / elems) * bytes; // a division takes longer than all else here
}

// The alignment in bytes that an element's address needs: that of the widest field of its block.
static int64_t rocq__alignment_of(rocq_format format) {
    switch (format) {
    case ROCQ_F32: case ROCQ_I32: return 4;
    case ROCQ_I8: case ROCQ_MXFP4: case ROCQ_MXFP6_E2M3: case ROCQ_MXFP6_E3M2: return 1;
    default: return 2;
    }
}

// Host address of element (0, i1, i2, i3).
static inline unsigned char *rocq__row(const rocq_tensor *t, int64_t i1, int64_t i2, int64_t i3) {
    const int64_t elems = i1 * t->stride[1] + i2 * t->stride[2] + i3 * t->stride[3];
    return (unsigned char *)t->buffer.host + t->offset + rocq__bytes(t->format, elems);
}

static void rocq__swap(char *a, char *b, int64_t size) {
    char held[64];
    for (int64_t n; size > 0; a += n, b += n, size -= n) {
        n = ROCQ__MIN(size, (int64_t)sizeof held);
        memcpy(held, a, (size_t)n);
        memcpy(a, b, (size_t)n);
        memcpy(b, held, (size_t)n);
    }
}

// Sorts n items of size bytes. A heapsort, because the C library's qsort may take memory: it takes
// none, does not recurse, and no input makes it slow. compare gets two items and user.
static void rocq__heapsort(void *items, int64_t n, int64_t size,
                           int (*compare)(const void *a, const void *b, const void *user),
                           const void *user) {
    char *v = (char *)items;
    for (int64_t end = n, start = n / 2; end > 1;) {
        if (start > 0) start--;
        else rocq__swap(v, v + --end * size, size);
        for (int64_t at = start, child; (child = 2 * at + 1) < end; at = child) {
            if (child + 1 < end && compare(v + child * size, v + (child + 1) * size, user) < 0) {
                child++;
            }
            if (compare(v + at * size, v + child * size, user) >= 0) break;
            rocq__swap(v + at * size, v + child * size, size);
        }
    }
}

// ---------------------------------------------------------------------------------------------
// >>context
// ---------------------------------------------------------------------------------------------
// The state of a context. What only a GPU context has is in rocq__gpu (>>hip_api).

// Header of a block of memory. It stands in front of host memory; for device and pinned memory,
// which come from the runtime, it is allocated by itself. The list of a context's blocks lets
// rocq_close free what the caller left.
typedef struct rocq__block {
    struct rocq__block *prev, *next;
    void *raw;          // what the allocator returned
    size_t raw_size;    // and was asked for
    void *address;      // of the memory behind the header, or of the runtime's
    int64_t size;       // of that memory
    rocq_memory memory; // HOST, PINNED or DEVICE
    bool buffer;        // made by rocq_buffer_alloc
} rocq__block;

// Does items begin to end of a stage. No two calls at once have the same thread, a number below
// rocq_desc.n_threads. An item must come out the same in any call.
typedef void (*rocq__task)(void *arg, int64_t begin, int64_t end, int32_t thread);

// A part of an op, or all of a small one (>>threads).
typedef struct rocq__stage {
    rocq__task fn;
    void *arg;
    int64_t n;     // items
    int64_t grain; // worth a thread: if there are no more, one thread takes all
    // Runs alone before the items, or NULL. It does what depends on the contents of tensors: it
    // checks them, and may change n (0: no items) and grain.
    rocq_result (*begin)(rocq_ctx *ctx, struct rocq__stage *stage);
} rocq__stage;

enum { ROCQ__MAX_THREADS = 64 };

#if ROCQ__HAS_THREADS
#if defined(_WIN32)
typedef HANDLE rocq__thread;
typedef CRITICAL_SECTION rocq__mutex;
typedef CONDITION_VARIABLE rocq__cond;
#else
typedef pthread_t rocq__thread;
typedef pthread_mutex_t rocq__mutex;
typedef pthread_cond_t rocq__cond;
#endif
#endif

// Cache lines, of up to 128 bytes, are kept apart by so much.
enum { ROCQ__APART = 128 };

// What is left of one thread's share of the open stage: the stage's number, and the first and the
// end of its chunks, in bits 32, 16 and 0 (atomic). A 32-bit ABI aligns int64_t to 4, but atomics
// across two cache lines lock out all other cores.
typedef struct rocq__team_share {
    ROCQ__ALIGNAS(8) int64_t left;
    char apart[ROCQ__APART];
} rocq__team_share;

// The threads of a context, and the stages that they run.
typedef struct rocq__team {
    rocq_ctx *ctx;
    rocq__stage *stages;
    int32_t n_stages, next;
    bool cancellable;
    rocq_result result;
    int32_t skipped;       // chunks were left out because of rocq_cancel (atomic)
    int32_t n_joined;      // threads of the team that run; each takes its number, 1 and up, from
                           // here (atomic)
#if ROCQ__HAS_THREADS
    rocq__thread threads[ROCQ__MAX_THREADS];
    int32_t n_started;     // threads; the calling thread works too, as thread 0
    bool started;
    rocq__mutex mutex;
    rocq__cond work;
    int32_t asleep;        // threads that wait for work, the calling one too (atomic)
    int32_t caller_asleep; // (atomic)
#endif
    char apart[ROCQ__APART];
    // The open stage, in one cache line. open: its number in bit 32 and up, and how many chunks it
    // has; negative to end the threads (atomic). The rest changes only when no chunk is left, so a
    // thread may read it while it has one.
    ROCQ__ALIGNAS(8) int64_t open;
    int64_t n, chunk;      // items, items of a chunk
    rocq__task fn;
    void *arg;
    int32_t running;       // 0 when all stages are done (atomic)
    char apart_2[ROCQ__APART];
    ROCQ__ALIGNAS(8) int64_t pending; // chunks not done (atomic)
    char apart_3[ROCQ__APART];
    rocq__team_share shares[ROCQ__MAX_THREADS];
} rocq__team;

struct rocq__gpu;
typedef struct rocq__profile rocq__profile;

// Only one thread at a time may use a context, except that any thread may set cancelled.
struct rocq_ctx {
    rocq_desc desc; // with the defaults filled in
    rocq_backend backend;
    struct rocq__gpu *gpu; // NULL on the CPU
    rocq_result gpu_result;
    int32_t cancelled;     // set by any thread (atomic)
#if ROCQ__HAS_PROFILE
    rocq__profile *profile;   // results, or NULL
    rocq__profile *profiling; // equal to profile while it is on, else NULL
#endif
    rocq_graph *recording; // the graph that ops are added to, or NULL
    rocq_graph *graphs;    // list of all graphs of the context
    bool has_simd;   // AVX2 with FMA and F16C, or NEON
    bool has_avx_vnni; // never without has_simd; nor is
    bool has_avx512; // F, BW, DQ, VL and VNNI
    bool quiet; // failures are not logged: in rocq_supports and in a rocq__attempt
    rocq_stats stats;
    int64_t budget_used;
    rocq__block blocks; // a circular list
    void *scratch;
    int64_t scratch_size;
    struct rocq__tuned *tuned; // [n_tuned of tuned_capacity] what rocq_tune found, sorted by class
    int32_t n_tuned, tuned_capacity;
    struct rocq__survey *survey; // collects the launches that a plan has to choose, or NULL
    char error[512];
    char gpu_message[512];
    char tried[2048]; // rocq_info.runtimes_tried: HIP runtimes that were passed over, and why
    bool tried_cut;   // more were passed over than fit
    char device[112];
    rocq__team team;
};

// ---------------------------------------------------------------------------------------------
// >>log
// ---------------------------------------------------------------------------------------------
// Error messages, lines for desc.log, and text for functions of the caller's, such as reports.

// Stores and logs the message of a failure and returns its code, so that failing is one statement.
ROCQ__PRINTF(3, 4)
static rocq_result rocq__fail(rocq_ctx *ctx, rocq_result result, const char *format, ...) {
    if (!ctx) return result;
    va_list args;
    va_start(args, format);
    vsnprintf(ctx->error, sizeof ctx->error, format, args);
    va_end(args);
    if (ctx->desc.log && !ctx->quiet) {
        ctx->desc.log(ROCQ_LOG_ERROR, ctx->error, ctx->desc.log_user);
    }
    return result;
}

// An attempt is work that may fail without failing the call, because there is another way. Its
// failures are not logged at once: at its end either rocq_error's message from before is restored,
// or the attempt's own message becomes that of the call and is logged. Attempts may be nested.
typedef struct rocq__attempt {
    bool quiet; // the context's, before the attempt
    char error[sizeof((rocq_ctx *)0)->error];
} rocq__attempt;

static void rocq__attempt_begin(rocq_ctx *ctx, rocq__attempt *attempt) {
    attempt->quiet = ctx->quiet;
    memcpy(attempt->error, ctx->error, sizeof attempt->error);
    ctx->quiet = true;
}

// forget: the attempt succeeded, or the call continues another way.
static void rocq__attempt_end(rocq_ctx *ctx, const rocq__attempt *attempt, bool forget) {
    ctx->quiet = attempt->quiet;
    if (forget) memcpy(ctx->error, attempt->error, sizeof attempt->error);
    else if (ctx->desc.log && !ctx->quiet) {
        ctx->desc.log(ROCQ_LOG_ERROR, ctx->error, ctx->desc.log_user);
    }
}

// Logs a message without making it rocq_error's.
ROCQ__PRINTF(3, 4)
static void rocq__log(rocq_ctx *ctx, rocq_log_level level, const char *format, ...) {
    char message[sizeof ctx->error];
    va_list args;
    if (!ctx->desc.log) return;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    ctx->desc.log(level, message, ctx->desc.log_user);
}

// Text that goes to a function of the caller's. After a failure nothing more is written. One call
// of rocq__print takes at most 511 bytes (more is a failure), and no %f, whose decimal point
// depends on the program's locale: rocq__print_number always writes a point.
typedef struct rocq__output {
    rocq_write_fn write;
    void *user;
    bool failed;
} rocq__output;

ROCQ__PRINTF(2, 3)
static void rocq__print(rocq__output *out, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (n < 0 || n >= (int)sizeof text) out->failed = true;
    if (!out->failed && n > 0) out->failed = !out->write(text, n, out->user);
}

// width as in printf, digits decimals. JSON has no infinity or NaN: they are written as 0.
static void rocq__print_number(rocq__output *out, double value, int width, int digits) {
    char text[400];
    int length = 0;
    snprintf(text, sizeof text, "%.*f", digits, value - value == 0.0 ? value : 0.0);
    for (const char *c = text; *c; c++) { // all bytes but digits and '-' are the locale's point
        const bool plain = *c == '-' || (*c >= '0' && *c <= '9');
        if (plain || text[length - 1] != '.') text[length++] = plain ? *c : '.';
    }
    rocq__print(out, "%*.*s", width, length, text);
}

#if ROCQ__HAS_PROFILE // which alone writes JSON

static void rocq__print_bytes(rocq__output *out, const char *text, int64_t size) {
    if (!out->failed && size > 0) out->failed = !out->write(text, size, out->user);
}

// Writes UTF-8 text of any length as a JSON string.
static void rocq__print_string(rocq__output *out, const char *text) {
    rocq__print(out, "\"");
    for (const char *plain = text;; text++) {
        const bool escaped = *text == '"' || *text == '\\', control = (unsigned char)*text < 0x20;
        if (!escaped && !control) continue;
        rocq__print_bytes(out, plain, text - plain);
        if (!*text) break;
        rocq__print(out, escaped ? "\\%c" : "\\u%04x", (unsigned char)*text);
        plain = text + 1;
    }
    rocq__print(out, "\"");
}

#endif

// A field of a struct that is written to JSON as a number.
typedef struct rocq__number {
    const char *name;
    size_t offset;
    int digits; // decimals of a double; -1: the field is an int64_t
} rocq__number;

static void rocq__print_fields(rocq__output *out, const rocq__number *fields, size_t n,
                               const void *of) {
    for (size_t i = 0; i < n; i++) {
        const char *at = (const char *)of + fields[i].offset;
        int64_t count;
        double value;
        memcpy(&count, at, sizeof count);
        memcpy(&value, at, sizeof value);
        rocq__print(out, "%s\"%s\": ", i > 0 ? ", " : "", fields[i].name);
        if (fields[i].digits < 0) rocq__print(out, "%lld", (long long)count);
        else rocq__print_number(out, value, 0, fields[i].digits);
    }
}
#define ROCQ__PRINT_FIELDS(out, fields, of) \
    rocq__print_fields(out, fields, sizeof(fields) / sizeof(fields)[0], of)

// Returns the call's code from the function that this stands in, unless it is ROCQ_OK.
#define ROCQ__TRY(call)                         \
    do {                                        \
        const rocq_result rocq__r = (call);     \
        if (rocq__r != ROCQ_OK) return rocq__r; \
    } while (0)

ROCQ_DEF const char *rocq_result_name(rocq_result result) {
    switch (result) {
#define ROCQ_X(NAME, code, message) case ROCQ_##NAME: return "ROCQ_" #NAME;
        ROCQ_RESULTS(ROCQ_X)
#undef ROCQ_X
    default: return "ROCQ_E_?";
    }
}

ROCQ_DEF const char *rocq_result_message(rocq_result result) {
    switch (result) {
#define ROCQ_X(NAME, code, message) case ROCQ_##NAME: return message;
        ROCQ_RESULTS(ROCQ_X)
#undef ROCQ_X
    default: return "unknown result code";
    }
}

ROCQ_DEF const char *rocq_error(const rocq_ctx *ctx) {
    return ctx ? ctx->error : "";
}

// ---------------------------------------------------------------------------------------------
// >>alloc: hooks, the list of blocks, buffers, scratch
// ---------------------------------------------------------------------------------------------
// Blocks of memory are listed in the context: rocq_close frees those that the caller left.

// Large blocks ask for pages of 2 MiB, where the system gives them (Linux; -std=c11 hides the
// call): the processor's prefetchers stop at the end of a page. One thread reads Q4_K weights for a
// single column 1.1 to 1.4 times as fast from these as from pages of 4 KiB (Zen 3).
static void *rocq__default_alloc(size_t size, void *user) {
    void *data = ROCQ_MALLOC(size);
    (void)user;
#if ROCQ__HAS_MMAP && defined(MADV_HUGEPAGE)
    const size_t page = (size_t)2 << 20, skip = (page - (uintptr_t)data % page) % page;
    if (data && size >= skip + page) {
        madvise((char *)data + skip, (size - skip) / page * page, MADV_HUGEPAGE); // only advice
    }
#endif
    return data;
}

static void rocq__default_free(void *ptr, size_t size, void *user) {
    (void)size;
    (void)user;
    ROCQ_FREE(ptr);
}

static void *rocq__alloc_aligned(rocq_ctx *ctx, int64_t size, size_t align) {
    if (size < 0 || (uint64_t)size > SIZE_MAX - align - sizeof(rocq__block)) return NULL;
    const size_t raw_size = (size_t)size + align + sizeof(rocq__block);
    void *raw = ctx->desc.allocator.alloc(raw_size, ctx->desc.allocator.user);
    if (!raw) return NULL;
    const uintptr_t first = (uintptr_t)raw + sizeof(rocq__block);
    const uintptr_t base = (first + align - 1) & ~(uintptr_t)(align - 1);
    // An offset from raw, not a cast of base: the pointer keeps its provenance.
    char *data = (char *)raw + (base - (uintptr_t)raw);
    rocq__block *block = (rocq__block *)(void *)(data - sizeof(rocq__block));
    block->raw = raw;
    block->raw_size = raw_size;
    block->address = data;
    block->size = size;
    block->memory = ROCQ_MEMORY_HOST;
    block->buffer = false;
    block->prev = &ctx->blocks;
    block->next = ctx->blocks.next;
    block->next->prev = block;
    ctx->blocks.next = block;
    ctx->stats.n_allocs++;
    ctx->stats.live_bytes += size;
    ctx->stats.peak_bytes = ROCQ__MAX(ctx->stats.peak_bytes, ctx->stats.live_bytes);
    return data;
}

static rocq__block *rocq__block_before(void *data) {
    return (rocq__block *)(void *)((char *)data - sizeof(rocq__block));
}

// 64-byte aligned and uninitialized; NULL when the allocator has no memory.
static void *rocq__alloc(rocq_ctx *ctx, int64_t size) {
    return rocq__alloc_aligned(ctx, size, 64);
}

static void rocq__free(rocq_ctx *ctx, void *data) {
    if (!data) return;
    rocq__block *block = rocq__block_before(data);
    block->prev->next = block->next;
    block->next->prev = block->prev;
    ctx->stats.live_bytes -= block->size;
    ctx->desc.allocator.free(block->raw, block->raw_size, ctx->desc.allocator.user);
}

// Returns array if it has room for n elements; else frees it and returns a larger one with the same
// contents. If there is no memory for that, returns NULL and leaves array as it is.
static void *rocq__array_grow(rocq_ctx *ctx, void *array, int32_t *capacity, int64_t n,
                              int64_t element) {
    if (n <= *capacity) return array;
    const int64_t more = ROCQ__MIN(ROCQ__MAX(n, 2 * (int64_t)*capacity), INT32_MAX);
    void *larger = n <= INT32_MAX ? rocq__alloc(ctx, more * element) : NULL;
    if (!larger) return NULL;
    if (array) memcpy(larger, array, (size_t)(*capacity * element));
    rocq__free(ctx, array);
    *capacity = (int32_t)more;
    return larger;
}

static rocq_result rocq__take_budget(rocq_ctx *ctx, int64_t size) {
    const int64_t budget = ctx->desc.memory_budget;
    if (budget > 0 && size > budget - ctx->budget_used) {
        return rocq__fail(ctx, ROCQ_E_BUDGET,
                          "%lld more bytes do not fit the budget: %lld of %lld used",
                          (long long)size, (long long)ctx->budget_used, (long long)budget);
    }
    if (size > INT64_MAX - ctx->budget_used) {
        return rocq__fail(ctx, ROCQ_E_MEMORY, "no memory for %lld bytes", (long long)size);
    }
    ctx->budget_used += size;
    return ROCQ_OK;
}

static inline bool rocq__on_gpu(const rocq_ctx *ctx) {
    return ROCQ__HAS_HIP && ctx->gpu != NULL;
}

// Of a GPU context, see >>hip_memory.
static rocq_result rocq__device_alloc(rocq_ctx *ctx, const char *what, int64_t size,
                                      rocq_memory memory, rocq__block **out);
static void rocq__device_free(rocq_ctx *ctx, rocq__block *block);
static rocq_result rocq__hip_idle(rocq_ctx *ctx, const char *op);
static rocq_result rocq__reserve_hip(rocq_ctx *ctx, int64_t bytes);
static rocq_result rocq__hip_enter(rocq_ctx *ctx, const char *op);

// Memory of any kind, 256-byte aligned; for device and pinned memory after rocq__hip_enter.
static rocq_result rocq__block_alloc(rocq_ctx *ctx, const char *what, int64_t size,
                                     rocq_memory memory, rocq__block **out) {
    if (memory != ROCQ_MEMORY_HOST) return rocq__device_alloc(ctx, what, size, memory, out);
    void *data = rocq__alloc_aligned(ctx, size, 256);
    if (!data) {
        return rocq__fail(ctx, ROCQ_E_MEMORY, "%s: no memory for %lld bytes", what,
                          (long long)size);
    }
    *out = rocq__block_before(data);
    return ROCQ_OK;
}

static void rocq__block_free(rocq_ctx *ctx, rocq__block *block) {
    if (block->memory == ROCQ_MEMORY_HOST) rocq__free(ctx, block->address);
    else rocq__device_free(ctx, block);
}

// The block of a buffer, or NULL. It is searched for, because a foreign, stale or inner pointer
// must not reach the allocator.
static rocq__block *rocq__block_at(rocq_ctx *ctx, const rocq_buffer *buffer) {
    const bool on_gpu = rocq__on_gpu(ctx);
    const rocq_memory memory = on_gpu ? ROCQ_MEMORY_DEVICE : ROCQ_MEMORY_HOST;
    const void *address = on_gpu ? (void *)(uintptr_t)buffer->device.address : buffer->host;
    rocq__block *block = ctx->blocks.next;
    while (block != &ctx->blocks && !(block->memory == memory && block->address == address)) {
        block = block->next;
    }
    return block != &ctx->blocks ? block : NULL;
}

ROCQ_DEF rocq_result rocq_buffer_alloc(rocq_ctx *ctx, rocq_buffer *buffer, int64_t size) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!buffer || size <= 0) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                          "buffer_alloc: buffer is NULL or size %lld is not positive",
                          (long long)size);
    }
    const bool on_gpu = rocq__on_gpu(ctx);
    rocq__block *block = NULL;
    if (on_gpu) ROCQ__TRY(rocq__hip_enter(ctx, "buffer_alloc"));
    ROCQ__TRY(rocq__take_budget(ctx, size));
    const rocq_result result = rocq__block_alloc(
        ctx, "buffer_alloc", size, on_gpu ? ROCQ_MEMORY_DEVICE : ROCQ_MEMORY_HOST, &block);
    if (result != ROCQ_OK) {
        ctx->budget_used -= size;
        return result;
    }
    block->buffer = true;
    *buffer = on_gpu ? rocq_buffer_from_device((uint64_t)(uintptr_t)block->address, size)
                     : rocq_buffer_from_host(block->address, size);
    return ROCQ_OK;
}

// Checks that buffer is no slice of a buffer. size is that of the context's buffer at the same
// address, 0 if there is none: a buffer and its first slice differ in size only.
static rocq_result rocq__check_whole(rocq_ctx *ctx, const rocq_buffer *buffer, int64_t size) {
    if (size == 0) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "buffer_free: not a buffer of this context");
    }
    if (buffer->size == size) return ROCQ_OK;
    return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                      "buffer_free: %lld bytes at the start of a buffer of %lld; only the whole "
                      "buffer can be freed",
                      (long long)buffer->size, (long long)size);
}

ROCQ_DEF rocq_result rocq_buffer_free(rocq_ctx *ctx, rocq_buffer *buffer) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!buffer) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "buffer_free: buffer is NULL");
    if (!buffer->host && !buffer->device.address) return ROCQ_OK;
    rocq__block *block = rocq__block_at(ctx, buffer);
    ROCQ__TRY(rocq__check_whole(ctx, buffer, block && block->buffer ? block->size : 0));
    if (rocq__on_gpu(ctx)) ROCQ__TRY(rocq__hip_idle(ctx, "buffer_free"));
    ctx->budget_used -= block->size;
    rocq__block_free(ctx, block);
    memset(buffer, 0, sizeof *buffer);
    return ROCQ_OK;
}

ROCQ_DEF rocq_buffer rocq_buffer_from_host(void *data, int64_t size) {
    rocq_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    buffer.host = data;
    buffer.size = size;
    return buffer;
}

ROCQ_DEF rocq_buffer rocq_buffer_from_device(uint64_t address, int64_t size) {
    rocq_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    buffer.device.address = address;
    buffer.size = size;
    return buffer;
}

// Makes scratch memory at least so large. Its contents matter only during an op, so the old block
// is freed first: both at once could be more than the budget allows, or than there is. If the
// larger one is then refused, there is no scratch memory until the next op that needs some.
static rocq_result rocq__reserve_cpu(rocq_ctx *ctx, int64_t bytes) {
    if (bytes <= ctx->scratch_size) return ROCQ_OK;
    ROCQ__TRY(rocq__take_budget(ctx, bytes - ctx->scratch_size));
    rocq__free(ctx, ctx->scratch);
    ctx->scratch = rocq__alloc(ctx, bytes);
    ctx->scratch_size = ctx->scratch ? bytes : 0;
    if (!rocq__on_gpu(ctx)) ctx->stats.scratch_bytes = ctx->scratch_size;
    if (ctx->scratch) return ROCQ_OK;
    ctx->budget_used -= bytes;
    return rocq__fail(ctx, ROCQ_E_MEMORY, "no memory for %lld bytes of scratch", (long long)bytes);
}

ROCQ_DEF rocq_result rocq_reserve(rocq_ctx *ctx, int64_t bytes) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (bytes < 0) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "reserve: %lld bytes", (long long)bytes);
    if (!rocq__on_gpu(ctx)) return rocq__reserve_cpu(ctx, bytes);
    ROCQ__TRY(rocq__hip_enter(ctx, "reserve"));
    return rocq__reserve_hip(ctx, bytes);
}

// The running op's scratch memory, 64-byte aligned. A second call in an op gives the same memory.
static rocq_result rocq__scratch(rocq_ctx *ctx, int64_t bytes, void **out) {
    ROCQ__TRY(rocq__reserve_cpu(ctx, bytes));
    if (!rocq__on_gpu(ctx)) ctx->stats.scratch_peak = ROCQ__MAX(ctx->stats.scratch_peak, bytes);
    *out = ctx->scratch;
    return ROCQ_OK;
}

// ---------------------------------------------------------------------------------------------
// >>arena
// ---------------------------------------------------------------------------------------------
// An arena cuts slices from a buffer, one after the other, or only measures what they would take.

ROCQ_DEF void rocq_arena_init(rocq_arena *arena, const rocq_buffer *buffer) {
    if (!arena) return;
    memset(arena, 0, sizeof *arena);
    arena->measuring = !buffer || buffer->size == 0;
    if (!arena->measuring) arena->buffer = *buffer;
}

// The size bytes at offset of a host or device buffer; no address if the buffer has none.
static rocq_buffer rocq__buffer_slice(const rocq_buffer *buffer, int64_t offset, int64_t size) {
    rocq_buffer slice = *buffer;
    if (slice.host) slice.host = (char *)slice.host + offset;
    if (slice.device.address) slice.device.address += (uint64_t)offset;
    slice.size = size;
    return slice;
}

ROCQ_DEF rocq_result rocq_arena_alloc(rocq_arena *arena, rocq_buffer *slice, int64_t size,
                                      int64_t align) {
    if (align == 0) align = 256;
    if (!arena || !slice || size < 0 || align < 1 || (align & (align - 1)) != 0) {
        return ROCQ_E_ARGUMENT;
    }
    // The address is aligned, not the offset: the caller's memory may start anywhere.
    const int64_t base = arena->buffer.host
                             ? (int64_t)((uintptr_t)arena->buffer.host & (uintptr_t)(align - 1))
                             : (int64_t)(arena->buffer.device.address & (uint64_t)(align - 1));
    int64_t begin, end;
    if (!rocq__add(arena->used, base, &begin) || !rocq__round_up(begin, align, &begin) ||
        !rocq__add(begin - base, size, &end)) {
        return ROCQ_E_OVERFLOW;
    }
    begin -= base;
    if (arena->measuring) {
        // Two cuts of 100 bytes, aligned to 256, as they are measured and as they lie in memory
        // that starts at address 1000:
        //
        //     measured              |100|......|100|         end = 356, peak = 356 + 255
        //     memory           |....|100|......|100|         end = 24 + 356
        //     address       1000    1024       1280
        //
        // Measured cuts begin at 0, a multiple of every alignment. Real memory has such an address
        // at most slack bytes after its start (slack is the largest alignment less 1), and peak
        // leaves room for all cuts from there. In real memory cuts begin at its very start instead,
        // and each takes the first aligned address that is free, so none ends later than that.
        const int64_t slack = ROCQ__MAX(arena->slack, align - 1);
        int64_t most;
        if (!rocq__add(ROCQ__MAX(arena->peak - arena->slack, end), slack, &most)) {
            return ROCQ_E_OVERFLOW;
        }
        arena->peak = most;
        arena->slack = slack;
    } else {
        arena->peak = ROCQ__MAX(arena->peak, end);
        if (end > arena->buffer.size) return ROCQ_E_ARENA;
    }
    arena->used = end;
    *slice = rocq__buffer_slice(&arena->buffer, begin, size);
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_arena_tensor(rocq_arena *arena, rocq_tensor *tensor, rocq_format format,
                                       int32_t n_dims, const int64_t *ne) {
    rocq_tensor shape;
    rocq_buffer slice;
    if (!arena || !tensor) return ROCQ_E_ARGUMENT;
    ROCQ__TRY(rocq_tensor_init(&shape, NULL, 0, format, n_dims, ne));
    ROCQ__TRY(rocq_arena_alloc(arena, &slice, rocq_tensor_size(&shape), 0));
    shape.buffer = slice;
    *tensor = shape;
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_tensor_1d(rocq_arena *arena, rocq_tensor *tensor, rocq_format format,
                                    int64_t ne0) {
    return rocq_arena_tensor(arena, tensor, format, 1, &ne0);
}

ROCQ_DEF rocq_result rocq_tensor_2d(rocq_arena *arena, rocq_tensor *tensor, rocq_format format,
                                    int64_t ne0, int64_t ne1) {
    const int64_t ne[2] = {ne0, ne1};
    return rocq_arena_tensor(arena, tensor, format, 2, ne);
}

ROCQ_DEF rocq_result rocq_tensor_3d(rocq_arena *arena, rocq_tensor *tensor, rocq_format format,
                                    int64_t ne0, int64_t ne1, int64_t ne2) {
    const int64_t ne[3] = {ne0, ne1, ne2};
    return rocq_arena_tensor(arena, tensor, format, 3, ne);
}

ROCQ_DEF int64_t rocq_arena_mark(const rocq_arena *arena) {
    return arena ? arena->used : 0;
}

ROCQ_DEF void rocq_arena_reset(rocq_arena *arena, int64_t mark) {
    if (arena && mark >= 0 && mark <= arena->used) arena->used = mark;
}

// ---------------------------------------------------------------------------------------------
// >>tensor
// ---------------------------------------------------------------------------------------------
// Tensors are values that point into a buffer: nothing here takes memory or reads elements.

// Sets *extent to the bytes from element 0 to the end of the last one; false on overflow.
static bool rocq__extent(const rocq_tensor *t, int64_t *extent) {
    int64_t elems, bytes, last = 0;
    if (!rocq__block_of(t->format, &elems, &bytes)) return false;
    for (int d = 1; d < 4; d++) {
        int64_t step;
        if (!rocq__mul(t->ne[d] - 1, t->stride[d], &step)) return false;
        if (!rocq__add(last, step, &last)) return false;
    }
    return rocq__add(last, t->ne[0], &last) && rocq__mul(last / elems, bytes, extent);
}

ROCQ_DEF rocq_result rocq_tensor_init(rocq_tensor *tensor, const rocq_buffer *buffer,
                                      int64_t offset, rocq_format format, int32_t n_dims,
                                      const int64_t *ne) {
    rocq_tensor t;
    int64_t elems, bytes, count = 1;
    if (!tensor || !ne || n_dims < 1 || n_dims > 4 || offset < 0) return ROCQ_E_ARGUMENT;
    if (!rocq__block_of(format, &elems, &bytes)) return ROCQ_E_FORMAT;
    memset(&t, 0, sizeof t);
    if (buffer) t.buffer = *buffer;
    t.offset = offset;
    t.format = format;
    t.n_dims = n_dims;
    for (int d = 0; d < 4; d++) {
        t.ne[d] = d < n_dims ? ne[d] : 1;
        t.stride[d] = count;
        if (t.ne[d] < 1) return ROCQ_E_SHAPE;
        if (!rocq__mul(count, t.ne[d], &count)) return ROCQ_E_OVERFLOW;
    }
    if (t.ne[0] % elems != 0) return ROCQ_E_SHAPE;
    if (!rocq__mul(count / elems, bytes, &bytes) || !rocq__add(bytes, offset, &bytes)) {
        return ROCQ_E_OVERFLOW;
    }
    if (buffer) {
        if (bytes > buffer->size) return ROCQ_E_BOUNDS;
        const uint64_t base =
            buffer->host ? (uint64_t)(uintptr_t)buffer->host : buffer->device.address;
        if ((base + (uint64_t)offset) % (uint64_t)rocq__alignment_of(format) != 0) {
            return ROCQ_E_ALIGNMENT;
        }
    }
    *tensor = t;
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_tensor_from_host(rocq_tensor *tensor, void *data, rocq_format format,
                                           int32_t n_dims, const int64_t *ne) {
    rocq_tensor shape;
    if (!data) return ROCQ_E_ARGUMENT;
    ROCQ__TRY(rocq_tensor_init(&shape, NULL, 0, format, n_dims, ne));
    const rocq_buffer buffer = rocq_buffer_from_host(data, rocq_tensor_size(&shape));
    return rocq_tensor_init(tensor, &buffer, 0, format, n_dims, ne);
}

ROCQ_DEF rocq_result rocq_tensor_view(rocq_tensor *view, const rocq_tensor *src,
                                      const int64_t start[4], const int64_t ne[4]) {
    int64_t elems, bytes, skip = 0;
    if (!view || !src || !start || !ne) return ROCQ_E_ARGUMENT;
    if (!rocq__block_of(src->format, &elems, &bytes)) return ROCQ_E_FORMAT;
    if (src->layout != ROCQ_LAYOUT_GGUF) return ROCQ_E_UNSUPPORTED;
    for (int d = 0; d < 4; d++) {
        int64_t step;
        if (start[d] < 0 || ne[d] < 1 || ne[d] > src->ne[d] || start[d] > src->ne[d] - ne[d]) {
            return ROCQ_E_SHAPE;
        }
        if (!rocq__mul(start[d], src->stride[d], &step) || !rocq__add(skip, step, &skip)) {
            return ROCQ_E_OVERFLOW;
        }
    }
    if (start[0] % elems != 0 || ne[0] % elems != 0) return ROCQ_E_SHAPE;
    if (!rocq__mul(skip / elems, bytes, &skip) || !rocq__add(skip, src->offset, &skip)) {
        return ROCQ_E_OVERFLOW;
    }
    *view = *src;
    view->offset = skip;
    memcpy(view->ne, ne, sizeof view->ne);
    return ROCQ_OK;
}

ROCQ_DEF rocq_tensor rocq_tensor_slice(const rocq_tensor *src, int32_t dim, int64_t first,
                                       int64_t n) {
    int64_t start[4] = {0, 0, 0, 0}, ne[4];
    rocq_tensor view;
    memset(&view, 0, sizeof view);
    if (!src || dim < 0 || dim > 3) return view;
    memcpy(ne, src->ne, sizeof ne);
    start[dim] = first;
    ne[dim] = n;
    rocq_tensor_view(&view, src, start, ne); // leaves view empty when it fails
    return view;
}

ROCQ_DEF rocq_tensor rocq_tensor_heads(const rocq_tensor *src, int64_t head_dim) {
    int64_t elems, bytes;
    rocq_tensor view;
    memset(&view, 0, sizeof view);
    if (!src || head_dim < 1 || src->ne[3] != 1 || src->ne[0] % head_dim != 0 ||
        !rocq__block_of(src->format, &elems, &bytes) || head_dim % elems != 0) {
        return view;
    }
    view = *src;
    view.n_dims = ROCQ__MIN(ROCQ__MAX(src->n_dims, 2) + 1, 4);
    memmove(view.ne + 1, src->ne, 3 * sizeof *view.ne);
    memmove(view.stride + 1, src->stride, 3 * sizeof *view.stride);
    view.ne[0] = head_dim;
    view.ne[1] = src->ne[0] / head_dim;
    view.stride[1] = head_dim;
    return view;
}

ROCQ_DEF bool rocq_tensor_contiguous(const rocq_tensor *tensor) {
    int64_t count = 1;
    if (!tensor) return false;
    for (int d = 0; d < 4; d++) {
        if (tensor->ne[d] != 1 && tensor->stride[d] != count) return false;
        if (!rocq__mul(count, tensor->ne[d], &count)) return false;
    }
    return true;
}

ROCQ_DEF int64_t rocq_tensor_count(const rocq_tensor *tensor) {
    int64_t count = 1;
    for (int d = 0; d < 4; d++) {
        if (!tensor || tensor->ne[d] < 1 || !rocq__mul(count, tensor->ne[d], &count)) return 0;
    }
    return count;
}

ROCQ_DEF int64_t rocq_tensor_size(const rocq_tensor *tensor) {
    int64_t elems, bytes;
    const int64_t count = rocq_tensor_count(tensor);
    if (count == 0 || !rocq__block_of(tensor->format, &elems, &bytes)) return 0;
    return rocq__mul(count / elems, bytes, &bytes) ? bytes : 0;
}

ROCQ_DEF rocq_result rocq_tensor_reshape(rocq_tensor *view, const rocq_tensor *src, int32_t n_dims,
                                         const int64_t *ne) {
    rocq_tensor t;
    if (!view || !src) return ROCQ_E_ARGUMENT;
    ROCQ__TRY(rocq_tensor_init(&t, NULL, 0, src->format, n_dims, ne));
    if (!rocq_tensor_contiguous(src) || rocq_tensor_count(&t) != rocq_tensor_count(src)) {
        return ROCQ_E_SHAPE;
    }
    t.buffer = src->buffer;
    t.offset = src->offset;
    t.layout = src->layout;
    *view = t;
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_tensor_permute(rocq_tensor *view, const rocq_tensor *src,
                                         const int32_t axes[4]) {
    int32_t seen = 0;
    if (!view || !src || !axes || axes[0] != 0) return ROCQ_E_ARGUMENT;
    if (src->layout != ROCQ_LAYOUT_GGUF) return ROCQ_E_UNSUPPORTED;
    rocq_tensor t = *src;
    t.n_dims = 1;
    for (int d = 0; d < 4; d++) {
        if (axes[d] < 0 || axes[d] > 3 || (seen & 1 << axes[d])) return ROCQ_E_ARGUMENT;
        seen |= 1 << axes[d];
        t.ne[d] = src->ne[axes[d]];
        t.stride[d] = src->stride[axes[d]];
        if (t.ne[d] > 1) t.n_dims = d + 1;
    }
    *view = t;
    return ROCQ_OK;
}

ROCQ_DEF void *rocq_tensor_data(const rocq_tensor *tensor) {
    if (!tensor || !tensor->buffer.host) return NULL;
    return (char *)tensor->buffer.host + tensor->offset;
}

// ---------------------------------------------------------------------------------------------
// >>threads: the stages of an op, or of a whole step, shared by the threads of a context
// ---------------------------------------------------------------------------------------------
// rocq__team_run runs a list of stages, one after the other. A stage that is worth it is opened:
// its items may run at once, in chunks, of which each thread has an equal share. A thread that is
// through with its own share takes half of what is left of another's; so one that is late, because
// another program has its core, finds nothing left to do. Whoever finishes the last chunk goes on:
// it runs the small stages that follow, and opens the next large one. No thread is in charge, and
// none waits for another, only for chunks that are being worked on. Where all tasks of a team run
// on one thread, one after the other, as a job system may choose to (rocq_desc.run_tasks), the
// first does all.
//
// What this costs is cache lines that go from core to core, at 50 to 250 ns each: for a stage, one
// with the stage, one to count chunks down, and one for each look at another thread's share.

// Atomics. All are sequentially consistent but rocq__store32, of which only release is needed.
// seq_cst: a sleeper sets `asleep`, then rechecks; a producer publishes, then reads `asleep`.
#if defined(__GNUC__) || defined(__clang__)
static inline int64_t rocq__fetch_add64(int64_t *p, int64_t v) {
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}
static inline int32_t rocq__fetch_add32(int32_t *p, int32_t v) {
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}
static inline int32_t rocq__exchange32(int32_t *p, int32_t v) {
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);
}
static inline bool rocq__replace64(int64_t *p, int64_t was, int64_t v) {
    return __atomic_compare_exchange_n(p, &was, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
static inline int32_t rocq__load32(int32_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static inline int64_t rocq__load64(int64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static inline void rocq__store32(int32_t *p, int32_t v) {
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
static inline void rocq__store64(int64_t *p, int64_t v) {
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);
}
#else
static inline int64_t rocq__fetch_add64(int64_t *p, int64_t v) {
    return InterlockedExchangeAdd64((volatile LONG64 *)p, v);
}
static inline int32_t rocq__fetch_add32(int32_t *p, int32_t v) {
    return (int32_t)InterlockedExchangeAdd((volatile LONG *)p, v);
}
static inline int32_t rocq__exchange32(int32_t *p, int32_t v) {
    return (int32_t)InterlockedExchange((volatile LONG *)p, v);
}
static inline bool rocq__replace64(int64_t *p, int64_t was, int64_t v) {
    return InterlockedCompareExchange64((volatile LONG64 *)p, v, was) == was;
}
static inline int32_t rocq__load32(int32_t *p) {
    return (int32_t)InterlockedOr((volatile LONG *)p, 0);
}
static inline int64_t rocq__load64(int64_t *p) {
    return InterlockedCompareExchange64((volatile LONG64 *)p, 0, 0);
}
static inline void rocq__store32(int32_t *p, int32_t v) {
    InterlockedExchange((volatile LONG *)p, v);
}
static inline void rocq__store64(int64_t *p, int64_t v) {
    InterlockedExchange64((volatile LONG64 *)p, v);
}
#endif

static inline void rocq__relax(void) {
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    __builtin_ia32_pause();
#elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
    __asm__ __volatile__("yield");
#endif
}

// A lock for a few dozen instructions, at half the cost of a mutex. A thread that finds it held for
// longer (by a preempted thread, say) sleeps, so that the holder runs whatever its priority is.
static inline void rocq__spin_lock(int32_t *lock) {
    for (int32_t spins = 0; rocq__exchange32(lock, 1) != 0; spins++) {
        if (spins < 200) rocq__relax();
#if defined(_WIN32)
        else Sleep(1);
#else
        else poll(NULL, 0, 1);
#endif
    }
}

static inline void rocq__spin_unlock(int32_t *lock) { rocq__store32(lock, 0); }

#if defined(_WIN32)
#define ROCQ__LOCK(m) EnterCriticalSection(m)
#define ROCQ__UNLOCK(m) LeaveCriticalSection(m)
#define ROCQ__WAIT(c, m) SleepConditionVariableCS(c, m, INFINITE)
#define ROCQ__WAKE(c) WakeConditionVariable(c)
#define ROCQ__WAKE_ALL(c) WakeAllConditionVariable(c)
#define ROCQ__YIELD() SwitchToThread()
#else
#define ROCQ__LOCK(m) pthread_mutex_lock(m)
#define ROCQ__UNLOCK(m) pthread_mutex_unlock(m)
#define ROCQ__WAIT(c, m) pthread_cond_wait(c, m)
#define ROCQ__WAKE(c) pthread_cond_signal(c)
#define ROCQ__WAKE_ALL(c) pthread_cond_broadcast(c)
#define ROCQ__YIELD() sched_yield()
#endif

// -- waiting --

// Whether a thread that has seen that stage still has to wait; inside: not if all stages are done.
static inline bool rocq__team_idle(rocq__team *team, int64_t seen, bool inside) {
    return rocq__load64(&team->open) == seen && !(inside && !rocq__load32(&team->running));
}

#if ROCQ__HAS_THREADS
static void rocq__team_start(rocq__team *team, int32_t n_threads);

// Whoever opens a stage wakes one thread, and each thread that wakes up wakes two more, so that no
// thread spends long on waking others.
static void rocq__team_wake(rocq__team *team) {
    if (rocq__load32(&team->asleep) == 0) return;
    ROCQ__LOCK(&team->mutex);
    ROCQ__WAKE(&team->work);
    ROCQ__UNLOCK(&team->mutex);
}

static void rocq__team_sleep(rocq__team *team, int64_t seen, bool inside) {
    ROCQ__LOCK(&team->mutex);
    rocq__fetch_add32(&team->asleep, 1);
    if (inside) rocq__exchange32(&team->caller_asleep, 1);
    while (rocq__team_idle(team, seen, inside)) ROCQ__WAIT(&team->work, &team->mutex);
    if (inside) rocq__exchange32(&team->caller_asleep, 0);
    for (int32_t i = 0, left = rocq__fetch_add32(&team->asleep, -1) - 1; i < 2 && i < left; i++) {
        ROCQ__WAKE(&team->work);
    }
    ROCQ__UNLOCK(&team->mutex);
}
#endif

// -- stages --

// Runs stages from `next` on, until one has more than a grain of items, and opens that. Called by
// one thread at a time, while no stage is open.
static void rocq__team_next(rocq__team *team, int32_t thread) {
    rocq_ctx *ctx = team->ctx;
    const int64_t n_threads = ctx->desc.n_threads;
    while (team->result == ROCQ_OK && team->next < team->n_stages) {
        if (team->cancellable && rocq__load32(&ctx->cancelled)) break;
        rocq__stage *stage = &team->stages[team->next++];
        if (stage->begin) team->result = stage->begin(ctx, stage);
        if (team->result != ROCQ_OK || stage->n <= 0) continue;
        if (stage->n <= stage->grain) {
            stage->fn(stage->arg, 0, stage->n, thread);
            continue;
        }
        // At the end a thread waits for one chunk at most: that is 1/64 of its share, or little.
        const int64_t small = ROCQ__MAX(stage->grain / 4, 1), most = 64 * n_threads;
        team->fn = stage->fn;
        team->arg = stage->arg;
        team->n = stage->n;
        team->chunk = ROCQ__MAX((stage->n + most - 1) / most, small);
        const int64_t n_chunks = (stage->n + team->chunk - 1) / team->chunk;
        const int64_t last = rocq__load64(&team->open) >> 32, number = (last + 1) & INT32_MAX;
        // A word 2^30 stages behind would count as ahead, and its share as gone. A thread may have
        // no share, and steal nothing, in all of them: so every 2^28 stages all words are renewed.
        for (int32_t i = 0; number % (1 << 28) == 0 && i < n_threads; i++) {
            rocq__store64(&team->shares[i].left, last << 32);
        }
        rocq__store64(&team->pending, n_chunks);
        rocq__store64(&team->open, number << 32 | n_chunks);
#if ROCQ__HAS_THREADS
        if (n_threads > 1 && !team->started && !ctx->desc.run_tasks) {
            rocq__team_start(team, ctx->desc.n_threads - 1);
        }
        rocq__team_wake(team);
#endif
        return;
    }
    const bool cancelled = rocq__load32(&team->skipped) || team->next < team->n_stages;
    if (team->result == ROCQ_OK && cancelled) team->result = ROCQ_E_CANCELLED;
    rocq__exchange32(&team->running, 0); // from here on the caller may return, and run other stages
#if ROCQ__HAS_THREADS
    if (rocq__load32(&team->caller_asleep)) {
        ROCQ__LOCK(&team->mutex);
        ROCQ__WAKE_ALL(&team->work);
        ROCQ__UNLOCK(&team->mutex);
    }
#endif
}

// What is left of a thread's share of the stage `open`, from its word. A word from an earlier stage
// stands for the whole share; one from a later stage says that this one is over.
static inline int64_t rocq__team_left(const rocq__team *team, int64_t word, int64_t open,
                                      int32_t thread) {
    const uint32_t later = (uint32_t)(word >> 32) - (uint32_t)(open >> 32);
    const int64_t n = open & 0xffff, n_threads = team->ctx->desc.n_threads;
    if (later == 0) return word;
    if ((later & 0x40000000u) == 0) return 0;
    return open >> 32 << 32 | n * thread / n_threads << 16 | n * (thread + 1) / n_threads;
}

// Takes the back half of what another thread has left, as this thread's own. The compare-and-swap
// fails unless that is still so: the stage cannot be over.
static bool rocq__team_steal(rocq__team *team, int64_t open, int32_t thread) {
    const int32_t n_threads = team->ctx->desc.n_threads;
    for (int32_t i = 1; i < n_threads;) {
        const int32_t other = (thread + i) % n_threads;
        const int64_t word = rocq__load64(&team->shares[other].left);
        const int64_t left = rocq__team_left(team, word, open, other);
        const int64_t begin = left >> 16 & 0xffff, end = left & 0xffff;
        const int64_t middle = begin + (end - begin) / 2, number = left >> 32 << 32;
        if (begin >= end) {
            i++;
        } else if (rocq__replace64(&team->shares[other].left, word,
                                   number | begin << 16 | middle)) {
            rocq__store64(&team->shares[thread].left, number | middle << 16 | end);
            return true;
        }
    }
    return false;
}

// Runs what there is to do for this thread, and returns the last stage that it has seen. At first
// it takes several chunks together, an eighth of a share, whose items are neighbours in memory.
static int64_t rocq__team_share_out(rocq__team *team, int32_t thread) {
    int64_t *own = &team->shares[thread].left, n_done = 0;
    for (;;) {
        const int64_t open = rocq__load64(&team->open), word = rocq__load64(own);
        if (open < 0) return open;
        const int64_t left = rocq__team_left(team, word, open, thread);
        const int64_t chunk = left >> 16 & 0xffff, end = left & 0xffff;
        if (chunk < end) {
            const int64_t most = (open & 0xffff) / (8 * team->ctx->desc.n_threads) + 1;
            const int64_t n_taken = ROCQ__MIN((end - chunk + 1) / 2, most);
            if (!rocq__replace64(own, word, left + (n_taken << 16))) continue;
            const int64_t first = chunk * team->chunk, past = first + n_taken * team->chunk;
            if (team->cancellable && rocq__load32(&team->ctx->cancelled)) {
                rocq__store32(&team->skipped, 1);
            } else {
                team->fn(team->arg, first, ROCQ__MIN(past, team->n), thread);
            }
            n_done += n_taken;
        } else if (n_done > 0) {
            if (rocq__fetch_add64(&team->pending, -n_done) == n_done) {
                rocq__team_next(team, thread);
            }
            n_done = 0;
        } else if (!rocq__team_steal(team, open, thread)) {
            return open;
        }
    }
}

// Small stages between large ones take some microseconds, for which a thread spins. Then it yields
// between spins, since a thread that it waits for may need its core. After SPIN_NS, which is longer
// than from one op to the next, or than a draw between two tokens, it sleeps: waking takes longer.
enum { ROCQ__SPINS = 250, ROCQ__SPIN_NS = 50000 };

// Takes part until all stages are done (inside), or until the team's threads are to end.
static void rocq__team_work(rocq__team *team, int32_t thread, bool inside) {
    int64_t until = 0;
    for (;;) {
        const int64_t seen = rocq__team_share_out(team, thread);
        int32_t spins = 0;
        if (seen < 0 || (inside && !rocq__load32(&team->running))) return;
        while (spins < ROCQ__SPINS && rocq__team_idle(team, seen, inside)) {
            rocq__relax();
            spins++;
        }
        if (spins < ROCQ__SPINS) {
            until = 0;
            continue;
        }
        const int64_t now = rocq_time_ns();
        if (until == 0) until = now + ROCQ__SPIN_NS;
        if (now < until || team->ctx->desc.run_tasks) {
            ROCQ__YIELD();
            continue;
        }
#if ROCQ__HAS_THREADS
        rocq__team_sleep(team, seen, inside);
#endif
        until = 0;
    }
}

static void rocq__team_task(void *arg, int32_t i) {
    rocq__team *team = (rocq__team *)arg;
    if (i >= 0 && i < team->ctx->desc.n_threads) rocq__team_work(team, i, true);
}

// Runs stages, and returns when all are done: after a `begin` that failed, or with E_CANCELLED if
// rocq_cancel is called and call is not NULL, no more is started. call: what an error message
// names.
static rocq_result rocq__team_run(rocq_ctx *ctx, const char *call, rocq__stage *stages,
                                  int32_t n_stages) {
    rocq__team *team = &ctx->team;
    const bool quiet = ctx->quiet;
    team->stages = stages;
    team->n_stages = n_stages;
    team->next = 0;
    team->cancellable = call != NULL;
    team->result = ROCQ_OK;
    team->skipped = 0;
    rocq__store32(&team->running, 1);
    ctx->quiet = true; // a failure on another thread is logged here
    rocq__team_next(team, 0);
    if (rocq__load32(&team->running) && ctx->desc.run_tasks && ctx->desc.n_threads > 1) {
        ctx->desc.run_tasks(rocq__team_task, team, ctx->desc.n_threads, ctx->desc.run_tasks_user);
    }
    rocq__team_work(team, 0, true);
    ctx->quiet = quiet;
    if (team->result == ROCQ_E_CANCELLED) {
        return rocq__fail(ctx, ROCQ_E_CANCELLED,
                          "%s: rocq_cancel was called; rocq_sync takes it back", call);
    }
    if (team->result != ROCQ_OK && ctx->desc.log && !quiet) {
        ctx->desc.log(ROCQ_LOG_ERROR, ctx->error, ctx->desc.log_user);
    }
    return team->result;
}

// Runs fn over 0 .. n, on all threads if n > grain, and returns when all is done. rocq_cancel does
// not stop it.
static void rocq__parallel(rocq_ctx *ctx, int64_t n, int64_t grain, rocq__task fn, void *arg) {
    rocq__stage stage = {fn, arg, n, grain, NULL};
    rocq__team_run(ctx, NULL, &stage, 1);
}

// -- the threads --

#if ROCQ__HAS_THREADS

static void rocq__team_thread(rocq__team *team) {
    rocq__team_work(team, rocq__fetch_add32(&team->n_joined, 1) + 1, false);
}

#if defined(_WIN32)
static DWORD WINAPI rocq__team_main(LPVOID arg) {
    rocq__team_thread((rocq__team *)arg);
    return 0;
}
#else
static void *rocq__team_main(void *arg) {
    rocq__team_thread((rocq__team *)arg);
    return NULL;
}
#endif

// It is no error if fewer threads start than asked for: those that do start share the work.
static void rocq__team_start(rocq__team *team, int32_t n_threads) {
    team->started = true;
#if defined(_WIN32)
    InitializeCriticalSection(&team->mutex);
    InitializeConditionVariable(&team->work);
#else
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->work, NULL);
#endif
    for (int32_t i = 0; i < n_threads; i++) {
#if defined(_WIN32)
        team->threads[i] = CreateThread(NULL, 0, rocq__team_main, team, 0, NULL);
        if (!team->threads[i]) return;
#else
        if (pthread_create(&team->threads[i], NULL, rocq__team_main, team) != 0) return;
#endif
        team->n_started++;
    }
}

static void rocq__team_stop(rocq__team *team) {
    if (!team->started) return;
    ROCQ__LOCK(&team->mutex);
    rocq__store64(&team->open, -1);
    ROCQ__WAKE_ALL(&team->work);
    ROCQ__UNLOCK(&team->mutex);
    for (int32_t i = 0; i < team->n_started; i++) {
#if defined(_WIN32)
        WaitForSingleObject(team->threads[i], INFINITE);
        CloseHandle(team->threads[i]);
#else
        pthread_join(team->threads[i], NULL);
#endif
    }
#if defined(_WIN32)
    DeleteCriticalSection(&team->mutex);
#else
    pthread_mutex_destroy(&team->mutex);
    pthread_cond_destroy(&team->work);
#endif
}

#endif

// -- plans --

// What an op does on the CPU, made from its params alone: a plan for one launch, or for every
// launch of a recorded step.
typedef struct rocq__plan {
    const rocq_ctx *ctx;
    char *scratch;       // the op's scratch memory
    int64_t worth;       // multiplications that are worth a thread: see rocq__plan_grain
    rocq__stage *stages; // [ROCQ__PLAN_STAGES]
    int32_t n_stages;
    char *memory;        // [ROCQ__PLAN_BYTES], 16-byte aligned, for what the stages' args point to
    int64_t used;
} rocq__plan;

enum {
    ROCQ__MOST_PRODUCTS = 16, // in a chain; the bound also ends a chain that is a cycle
    ROCQ__PLAN_STAGES = 2 + ROCQ__MOST_PRODUCTS, // of one op; the most such a chain has
    ROCQ__PLAN_BYTES = 24576, // of one op
    // Handing a chunk to a thread that spins costs 0.2 microseconds; to one that sleeps, 5 and
    // more.
    ROCQ__WORTH_STEP = 16384,
    ROCQ__WORTH_OP = 65536
};

static void *rocq__plan_take(rocq__plan *plan, size_t size) {
    void *taken = plan->memory + plan->used;
    plan->used += ((int64_t)size + 15) / 16 * 16;
    return memset(taken, 0, size);
}

// How many items are worth handing to a thread, at so much work per item.
static int64_t rocq__plan_grain(const rocq__plan *plan, int64_t work) {
    return 1 + plan->worth / ROCQ__MAX(work, 1);
}

static rocq__stage *rocq__plan_stage(rocq__plan *plan, rocq__task fn, void *arg, int64_t n,
                                     int64_t grain) {
    rocq__stage *stage = &plan->stages[plan->n_stages++];
    stage->fn = fn;
    stage->arg = arg;
    stage->n = n;
    stage->grain = grain;
    stage->begin = NULL;
    return stage;
}

// Pages are touched by all threads, so that the system maps them before they are needed.
enum { ROCQ__PAGE = 4096 };

typedef struct rocq__pages {
    volatile unsigned char *data;
    int64_t size;
    bool written; // write a byte of each page back: a page that is only read may get no memory yet
} rocq__pages;

static void rocq__touch_task(void *arg, int64_t page, int64_t end, int32_t thread) {
    const rocq__pages *a = (const rocq__pages *)arg;
    (void)thread;
    for (; page < end && page * ROCQ__PAGE < a->size; page++) {
        const unsigned char byte = a->data[page * ROCQ__PAGE];
        if (a->written) a->data[page * ROCQ__PAGE] = byte;
    }
}

// ---------------------------------------------------------------------------------------------
// >>cpu_quant: decode and encode blocks
// ---------------------------------------------------------------------------------------------
// unpack takes one block apart: value[i] = scale[g] code[i] - min[g]. It is the only decoder, for
// dequantization and for the integer dot products alike (MXFP6_E3M2 has codes too wide for int8 and
// is decoded on its own). pack is its inverse: it puts the codes, as stored, in place.

// A block's fields before packing. q and mn are codes as the pictures at the structs number them;
// sc is the signed number that its code stands for. Formats with one scale store no sc and no mn.
typedef struct rocq__fields {
    uint16_t d, dmin;
    int32_t sc[16], mn[16];
    uint8_t q[256];
} rocq__fields;

// The choices an encoder has: value = d sc level[q] - dmin mn, sc and mn in the ranges given.
typedef struct rocq__grid {
    int32_t n, group;      // elements of a block and of a group
    int32_t q_lo, q_hi;    // the levels are the integers of this range,
    const int8_t *table;   // or, if not NULL, these 16
    int32_t sc_lo, sc_hi;  // 1, 1: d is the only scale
    int32_t mn_lo, mn_hi;  // 0, 0: no min; -1, -1: dmin is an offset to add, of either sign
} rocq__grid;

typedef struct rocq__codec {
    rocq_format_info info;
    void (*unpack)(const void *block, int8_t *code, float *scale, float *min);
    void (*pack)(void *block, const rocq__fields *fields);
    int32_t group;   // elements per scale
    bool has_min;
    int32_t mx_bits; // mantissa bits of an MX element, else 0
    rocq__grid grid; // how the formats that are not MX are encoded
} rocq__codec;

static const int8_t rocq__iq4_levels[16] = {ROCQ_IQ4_LEVELS};
static const int8_t rocq__mxfp4_levels[16] = {ROCQ_MXFP4_LEVELS};

// Bits 0-3 of n bytes are codes 0 to n - 1, bits 4-7 codes n to 2 n - 1.
static inline void rocq__split4(int8_t *__restrict q, const uint8_t *__restrict qs,
                                int32_t n) {
    for (int32_t j = 0; j < n; j++) q[j] = (int8_t)(qs[j] & 15);
    for (int32_t j = 0; j < n; j++) q[n + j] = (int8_t)(qs[j] >> 4);
}

// Adds value to those of 32 codes whose byte of qh has the bit of mask: high bits stored apart.
static inline void rocq__add_bit(int8_t *__restrict q, const uint8_t *__restrict qh,
                                 uint8_t mask, int8_t value) {
    for (int32_t l = 0; l < 32; l++) q[l] = (int8_t)(q[l] + (qh[l] & mask ? value : 0));
}

static inline void rocq__join4(uint8_t *__restrict qs, const uint8_t *__restrict q,
                               int32_t n) {
    for (int32_t j = 0; j < n; j++) qs[j] = (uint8_t)((q[j] & 15) | (q[n + j] & 15) << 4);
}

static inline void rocq__shift_codes(int8_t *q, int32_t n, int32_t offset) {
    for (int32_t i = 0; i < n; i++) q[i] = (int8_t)(q[i] + offset);
}

static void rocq__unpack_q4_0(const void *block, int8_t *code, float *scale, float *min) {
    const rocq_block_q4_0 *b = (const rocq_block_q4_0 *)block;
    scale[0] = rocq__f16_to_f32(b->d);
    min[0] = 0;
    rocq__split4(code, b->qs, 16);
    rocq__shift_codes(code, 32, -8);
}

static void rocq__pack_q4_0(void *block, const rocq__fields *f) {
    rocq_block_q4_0 *b = (rocq_block_q4_0 *)block;
    b->d = f->d;
    rocq__join4(b->qs, f->q, 16);
}

static void rocq__unpack_q4_1(const void *block, int8_t *code, float *scale, float *min) {
    const rocq_block_q4_1 *b = (const rocq_block_q4_1 *)block;
    scale[0] = rocq__f16_to_f32(b->d);
    min[0] = -rocq__f16_to_f32(b->m);
    rocq__split4(code, b->qs, 16);
}

static void rocq__pack_q4_1(void *block, const rocq__fields *f) {
    rocq_block_q4_1 *b = (rocq_block_q4_1 *)block;
    b->d = f->d;
    b->m = f->dmin;
    rocq__join4(b->qs, f->q, 16);
}

// Bit k of qh[i] is bit 4 of code 8 i + k; the eight bits of a byte are spread at once.
static inline void rocq__split5(int8_t *q, const uint8_t *qh, const uint8_t *qs) {
    rocq__split4(q, qs, 16);
    for (int32_t i = 0; i < 4; i++) {
        const uint64_t one = UINT64_C(0x0101010101010101), bits = UINT64_C(0x8040201008040201);
        const uint64_t high = ((qh[i] * one & bits) + 0x7f * one) >> 3 & 0x10 * one;
        uint64_t codes;
        memcpy(&codes, q + 8 * i, 8);
        codes |= high;
        memcpy(q + 8 * i, &codes, 8);
    }
}

static inline void rocq__join5(uint8_t *qh, uint8_t *qs, const uint8_t *q) {
    rocq__join4(qs, q, 16);
    memset(qh, 0, 4);
    for (int32_t i = 0; i < 32; i++) qh[i / 8] = (uint8_t)(qh[i / 8] | (q[i] >> 4) << i % 8);
}

static void rocq__unpack_q5_0(const void *block, int8_t *code, float *scale, float *min) {
    const rocq_block_q5_0 *b = (const rocq_block_q5_0 *)block;
    scale[0] = rocq__f16_to_f32(b->d);
    min[0] = 0;
    rocq__split5(code, b->qh, b->qs);
    rocq__shift_codes(code, 32, -16);
}

static void rocq__pack_q5_0(void *block, const rocq__fields *f) {
    rocq_block_q5_0 *b = (rocq_block_q5_0 *)block;
    b->d = f->d;
    rocq__join5(b->qh, b->qs, f->q);
}

static void rocq__unpack_q5_1(const void *block, int8_t *code, float *scale, float *min) {
    const rocq_block_q5_1 *b = (const rocq_block_q5_1 *)block;
    scale[0] = rocq__f16_to_f32(b->d);
    min[0] = -rocq__f16_to_f32(b->m);
    rocq__split5(code, b->qh, b->qs);
}

static void rocq__pack_q5_1(void *block, const rocq__fields *f) {
    rocq_block_q5_1 *b = (rocq_block_q5_1 *)block;
    b->d = f->d;
    b->m = f->dmin;
    rocq__join5(b->qh, b->qs, f->q);
}

static void rocq__unpack_q8_0(const void *block, int8_t *code, float *scale, float *min) {
    const rocq_block_q8_0 *b = (const rocq_block_q8_0 *)block;
    scale[0] = rocq__f16_to_f32(b->d);
    min[0] = 0;
    memcpy(code, b->qs, 32);
}

// Q8_0 counts q from -128, as every other format counts from its lowest level.
static void rocq__pack_q8_0(void *block, const rocq__fields *f) {
    rocq_block_q8_0 *b = (rocq_block_q8_0 *)block;
    b->d = f->d;
    for (int32_t i = 0; i < 32; i++) b->qs[i] = (int8_t)(f->q[i] - 128);
}

// Bits 2 r and 2 r + 1 of 32 bytes are codes 32 r to 32 r + 31; 64 bytes make 256 codes.
static inline void rocq__split2(int8_t *__restrict q, const uint8_t *__restrict qs) {
    for (int32_t h = 0; h < 2; h++) {
        for (int32_t r = 0; r < 4; r++) {
            for (int32_t l = 0; l < 32; l++) {
                q[128 * h + 32 * r + l] = (int8_t)(qs[32 * h + l] >> 2 * r & 3);
            }
        }
    }
}

static inline void rocq__join2(uint8_t *__restrict qs, const uint8_t *__restrict q) {
    for (int32_t h = 0; h < 2; h++) {
        for (int32_t l = 0; l < 32; l++) {
            const uint8_t *p = q + 128 * h + l;
            qs[32 * h + l] = (uint8_t)((p[0] & 3) | (p[32] & 3) << 2 | (p[64] & 3) << 4 |
                                       (p[96] & 3) << 6);
        }
    }
}

static void rocq__unpack_q2_K(const void *block, int8_t *code, float *scale, float *min) {
    const rocq_block_q2_K *b = (const rocq_block_q2_K *)block;
    const float d = rocq__f16_to_f32(b->d), dmin = rocq__f16_to_f32(b->dmin);
    for (int32_t g = 0; g < 16; g++) {
        scale[g] = d * (float)(b->scales[g] & 15);
        min[g] = dmin * (float)(b->scales[g] >> 4);
    }
    rocq__split2(code, b->qs);
}

static void rocq__pack_q2_K(void *block, const rocq__fields *f) {
    rocq_block_q2_K *b = (rocq_block_q2_K *)block;
    b->d = f->d;
    b->dmin = f->dmin;
    for (int32_t g = 0; g < 16; g++) b->scales[g] = (uint8_t)(f->sc[g] | f->mn[g] << 4);
    rocq__join2(b->qs, f->q);
}

static void rocq__unpack_q3_K(const void *block, int8_t *code, float *scale, float *min) {
    const rocq_block_q3_K *b = (const rocq_block_q3_K *)block;
    const float d = rocq__f16_to_f32(b->d);
    for (int32_t g = 0; g < 16; g++) {
        const int32_t low = b->scales[g % 8] >> 4 * (g / 8) & 15;
        const int32_t high = b->scales[8 + g % 4] >> 2 * (g / 4) & 3;
        scale[g] = d * (float)((low | high << 4) - 32);
        min[g] = 0;
    }
    rocq__split2(code, b->qs);
    for (int32_t r = 0; r < 8; r++) rocq__add_bit(code + 32 * r, b->hmask, (uint8_t)(1 << r), 4);
    rocq__shift_codes(code, 256, -4);
}

static void rocq__pack_q3_K(void *block, const rocq__fields *f) {
    rocq_block_q3_K *b = (rocq_block_q3_K *)block;
    memset(b, 0, sizeof *b);
    b->d = f->d;
    for (int32_t g = 0; g < 16; g++) {
        const int32_t sc = f->sc[g] + 32;
        b->scales[g % 8] = (uint8_t)(b->scales[g % 8] | (sc & 15) << 4 * (g / 8));
        b->scales[8 + g % 4] = (uint8_t)(b->scales[8 + g % 4] | (sc >> 4) << 2 * (g / 4));
    }
    rocq__join2(b->qs, f->q);
    for (int32_t i = 0; i < 256; i++) {
        b->hmask[i % 32] = (uint8_t)(b->hmask[i % 32] | (f->q[i] >> 2) << i / 32);
    }
}

// The 12 bytes of Q4_K and Q5_K that hold 8 scales and 8 mins of 6 bits.
static inline void rocq__split_scales(const uint8_t *s, float d, float dmin, float *scale,
                                      float *min) {
    for (int32_t g = 0; g < 4; g++) {
        scale[g] = d * (float)(s[g] & 63);
        min[g] = dmin * (float)(s[4 + g] & 63);
        scale[4 + g] = d * (float)((s[8 + g] & 15) | s[g] >> 6 << 4);
        min[4 + g] = dmin * (float)(s[8 + g] >> 4 | s[4 + g] >> 6 << 4);
    }
}

static inline void rocq__join_scales(uint8_t *s, const int32_t *sc, const int32_t *mn) {
    for (int32_t g = 0; g < 4; g++) {
        s[g] = (uint8_t)(sc[g] | sc[4 + g] >> 4 << 6);
        s[4 + g] = (uint8_t)(mn[g] | mn[4 + g] >> 4 << 6);
        s[8 + g] = (uint8_t)((sc[4 + g] & 15) | (mn[4 + g] & 15) << 4);
    }
}

static void rocq__unpack_q4_K(const void *block, int8_t *code, float *scale, float *min) {
    const rocq_block_q4_K *b = (const rocq_block_q4_K *)block;
    rocq__split_scales(b->scales, rocq__f16_to_f32(b->d), rocq__f16_to_f32(b->dmin), scale, min);
    for (int32_t c = 0; c < 4; c++) rocq__split4(code + 64 * c, b->qs + 32 * c, 32);
}

static void rocq__pack_q4_K(void *block, const rocq__fields *f) {
    rocq_block_q4_K *b = (rocq_block_q4_K *)block;
    b->d = f->d;
    b->dmin = f->dmin;
    rocq__join_scales(b->scales, f->sc, f->mn);
    for (int32_t c = 0; c < 4; c++) rocq__join4(b->qs + 32 * c, f->q + 64 * c, 32);
}

static void rocq__unpack_q5_K(const void *block, int8_t *code, float *scale, float *min) {
    const rocq_block_q5_K *b = (const rocq_block_q5_K *)block;
    rocq__split_scales(b->scales, rocq__f16_to_f32(b->d), rocq__f16_to_f32(b->dmin), scale, min);
    for (int32_t c = 0; c < 4; c++) rocq__split4(code + 64 * c, b->qs + 32 * c, 32);
    for (int32_t g = 0; g < 8; g++) rocq__add_bit(code + 32 * g, b->qh, (uint8_t)(1 << g), 16);
}

static void rocq__pack_q5_K(void *block, const rocq__fields *f) {
    rocq_block_q5_K *b = (rocq_block_q5_K *)block;
    b->d = f->d;
    b->dmin = f->dmin;
    rocq__join_scales(b->scales, f->sc, f->mn);
    for (int32_t c = 0; c < 4; c++) rocq__join4(b->qs + 32 * c, f->q + 64 * c, 32);
    memset(b->qh, 0, sizeof b->qh);
    for (int32_t i = 0; i < 256; i++) {
        b->qh[i % 32] = (uint8_t)(b->qh[i % 32] | (f->q[i] >> 4) << i / 32);
    }
}

static void rocq__unpack_q6_K(const void *block, int8_t *code, float *scale, float *min) {
    const rocq_block_q6_K *b = (const rocq_block_q6_K *)block;
    const float d = rocq__f16_to_f32(b->d);
    for (int32_t g = 0; g < 16; g++) {
        scale[g] = d * (float)b->scales[g];
        min[g] = 0;
    }
    for (int32_t h = 0; h < 2; h++) rocq__split4(code + 128 * h, b->ql + 64 * h, 64);
    for (int32_t r = 0; r < 8; r++) {
        rocq__add_bit(code + 32 * r, b->qh + 32 * (r / 4), (uint8_t)(1 << 2 * (r % 4)), 16);
        rocq__add_bit(code + 32 * r, b->qh + 32 * (r / 4), (uint8_t)(2 << 2 * (r % 4)), 32);
    }
    rocq__shift_codes(code, 256, -32);
}

static void rocq__pack_q6_K(void *block, const rocq__fields *f) {
    rocq_block_q6_K *b = (rocq_block_q6_K *)block;
    uint8_t high[256];
    b->d = f->d;
    for (int32_t g = 0; g < 16; g++) b->scales[g] = (int8_t)f->sc[g];
    for (int32_t h = 0; h < 2; h++) rocq__join4(b->ql + 64 * h, f->q + 128 * h, 64);
    for (int32_t i = 0; i < 256; i++) high[i] = f->q[i] >> 4;
    rocq__join2(b->qh, high);
}

static void rocq__unpack_iq4_nl(const void *block, int8_t *code, float *scale, float *min) {
    const rocq_block_iq4_nl *b = (const rocq_block_iq4_nl *)block;
    scale[0] = rocq__f16_to_f32(b->d);
    min[0] = 0;
    rocq__split4(code, b->qs, 16);
    for (int32_t i = 0; i < 32; i++) code[i] = rocq__iq4_levels[code[i]];
}

static void rocq__pack_iq4_nl(void *block, const rocq__fields *f) {
    rocq_block_iq4_nl *b = (rocq_block_iq4_nl *)block;
    b->d = f->d;
    rocq__join4(b->qs, f->q, 16);
}

static void rocq__unpack_iq4_xs(const void *block, int8_t *code, float *scale, float *min) {
    const rocq_block_iq4_xs *b = (const rocq_block_iq4_xs *)block;
    const float d = rocq__f16_to_f32(b->d);
    for (int32_t g = 0; g < 8; g++) {
        const int32_t low = b->scales_l[g / 2] >> 4 * (g % 2) & 15, high = b->scales_h >> 2 * g & 3;
        scale[g] = d * (float)((low | high << 4) - 32);
        min[g] = 0;
        rocq__split4(code + 32 * g, b->qs + 16 * g, 16);
    }
    for (int32_t i = 0; i < 256; i++) code[i] = rocq__iq4_levels[code[i]];
}

static void rocq__pack_iq4_xs(void *block, const rocq__fields *f) {
    rocq_block_iq4_xs *b = (rocq_block_iq4_xs *)block;
    memset(b, 0, sizeof *b);
    b->d = f->d;
    for (int32_t g = 0; g < 8; g++) {
        const int32_t sc = f->sc[g] + 32;
        b->scales_l[g / 2] = (uint8_t)(b->scales_l[g / 2] | (sc & 15) << 4 * (g % 2));
        b->scales_h = (uint16_t)(b->scales_h | (sc >> 4) << 2 * g);
        rocq__join4(b->qs + 16 * g, f->q + 32 * g, 16);
    }
}

// 2^k for -149 <= k <= 127.
static inline float rocq__pow2(int32_t k) {
    return rocq__bits_f32(k >= -126 ? (uint32_t)(k + 127) << 23 : 1u << (k + 149));
}

static void rocq__unpack_mxfp4(const void *block, int8_t *code, float *scale, float *min) {
    const rocq_block_mxfp4 *b = (const rocq_block_mxfp4 *)block;
    scale[0] = rocq__pow2(b->e - 128);
    min[0] = 0;
    rocq__split4(code, b->qs, 16);
    for (int32_t i = 0; i < 32; i++) code[i] = rocq__mxfp4_levels[code[i]];
}

static void rocq__split6(uint8_t *q, const uint8_t *qs) {
    for (int32_t i = 0; i < 32; i += 4, qs += 3) {
        const uint32_t v = (uint32_t)qs[0] | (uint32_t)qs[1] << 8 | (uint32_t)qs[2] << 16;
        for (int32_t k = 0; k < 4; k++) q[i + k] = (uint8_t)(v >> 6 * k & 63u);
    }
}

static void rocq__join6(uint8_t *qs, const uint8_t *q) {
    for (int32_t i = 0; i < 32; i += 4, qs += 3) {
        const uint32_t v = (uint32_t)q[i] | (uint32_t)q[i + 1] << 6 | (uint32_t)q[i + 2] << 12 |
                           (uint32_t)q[i + 3] << 18;
        for (int32_t k = 0; k < 3; k++) qs[k] = (uint8_t)(v >> 8 * k & 255u);
    }
}

// An FP6 element with f_bits of mantissa as a multiple of the smallest subnormal.
static inline int32_t rocq__fp6(uint8_t q, int32_t f_bits) {
    const int32_t exponent = (q & 31) >> f_bits, f = q & ((1 << f_bits) - 1);
    const int32_t v = exponent ? (f | 1 << f_bits) << (exponent - 1) : f;
    return q & 32 ? -v : v;
}

static void rocq__unpack_mxfp6_e2m3(const void *block, int8_t *code, float *scale, float *min) {
    const rocq_block_mxfp6_e2m3 *b = (const rocq_block_mxfp6_e2m3 *)block;
    uint8_t q[32];
    scale[0] = b->e == 255 ? NAN : rocq__pow2(b->e - 127 - 3);
    min[0] = 0;
    rocq__split6(q, b->qs);
    for (int32_t i = 0; i < 32; i++) code[i] = (int8_t)rocq__fp6(q[i], 3);
}

// The one format whose codes do not fit int8: up to 448.
static void rocq__decode_mxfp6_e3m2(const void *block, float *dst) {
    const rocq_block_mxfp6_e3m2 *b = (const rocq_block_mxfp6_e3m2 *)block;
    const float scale = b->e == 255 ? NAN : rocq__pow2(b->e - 127 - 4);
    uint8_t q[32];
    rocq__split6(q, b->qs);
    for (int32_t i = 0; i < 32; i++) dst[i] = scale * (float)rocq__fp6(q[i], 2);
}

// The codecs: unpack, pack, group, has_min, mx_bits, grid.
#define ROCQ__PAIR(name) rocq__unpack_##name, rocq__pack_##name
#define ROCQ__NO_GRID {0, 0, 0, 0, NULL, 0, 0, 0, 0}
#define ROCQ__CODEC_F32 NULL, NULL, 1, false, 0, ROCQ__NO_GRID
#define ROCQ__CODEC_F16 NULL, NULL, 1, false, 0, ROCQ__NO_GRID
#define ROCQ__CODEC_BF16 NULL, NULL, 1, false, 0, ROCQ__NO_GRID
#define ROCQ__CODEC_Q4_0 ROCQ__PAIR(q4_0), 32, false, 0, {32, 32, -8, 7, NULL, 1, 1, 0, 0}
#define ROCQ__CODEC_Q4_1 ROCQ__PAIR(q4_1), 32, true, 0, {32, 32, 0, 15, NULL, 1, 1, -1, -1}
#define ROCQ__CODEC_Q5_0 ROCQ__PAIR(q5_0), 32, false, 0, {32, 32, -16, 15, NULL, 1, 1, 0, 0}
#define ROCQ__CODEC_Q5_1 ROCQ__PAIR(q5_1), 32, true, 0, {32, 32, 0, 31, NULL, 1, 1, -1, -1}
#define ROCQ__CODEC_Q8_0 ROCQ__PAIR(q8_0), 32, false, 0, {32, 32, -128, 127, NULL, 1, 1, 0, 0}
#define ROCQ__CODEC_Q2_K ROCQ__PAIR(q2_K), 16, true, 0, {256, 16, 0, 3, NULL, 0, 15, 0, 15}
#define ROCQ__CODEC_Q3_K ROCQ__PAIR(q3_K), 16, false, 0, {256, 16, -4, 3, NULL, -32, 31, 0, 0}
#define ROCQ__CODEC_Q4_K ROCQ__PAIR(q4_K), 32, true, 0, {256, 32, 0, 15, NULL, 0, 63, 0, 63}
#define ROCQ__CODEC_Q5_K ROCQ__PAIR(q5_K), 32, true, 0, {256, 32, 0, 31, NULL, 0, 63, 0, 63}
#define ROCQ__CODEC_Q6_K ROCQ__PAIR(q6_K), 16, false, 0, {256, 16, -32, 31, NULL, -128, 127, 0, 0}
#define ROCQ__CODEC_IQ4_NL \
    ROCQ__PAIR(iq4_nl), 32, false, 0, {32, 32, 0, 0, rocq__iq4_levels, 1, 1, 0, 0}
#define ROCQ__CODEC_IQ4_XS \
    ROCQ__PAIR(iq4_xs), 32, false, 0, {256, 32, 0, 0, rocq__iq4_levels, -32, 31, 0, 0}
#define ROCQ__CODEC_MXFP4 rocq__unpack_mxfp4, NULL, 32, false, 1, ROCQ__NO_GRID
#define ROCQ__CODEC_MXFP6_E2M3 rocq__unpack_mxfp6_e2m3, NULL, 32, false, 3, ROCQ__NO_GRID
#define ROCQ__CODEC_MXFP6_E3M2 NULL, NULL, 32, false, 2, ROCQ__NO_GRID

#define ROCQ_X(NAME, name, id, elems, bytes)                                      \
    static const rocq__codec rocq__codec_##name = {                               \
        {#NAME, elems, bytes, 8.0f * (bytes) / (elems)}, ROCQ__CODEC_##NAME};
ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
static const rocq__codec rocq__codec_i8 = {{"I8", 1, 1, 8.0f}, ROCQ__CODEC_F32};
static const rocq__codec rocq__codec_i32 = {{"I32", 1, 4, 32.0f}, ROCQ__CODEC_F32};

// Formats of whole numbers: indices and pixels, which are never decoded.
static inline bool rocq__is_integer(rocq_format format) {
    return format == ROCQ_I8 || format == ROCQ_I32;
}

// NULL for an unknown format.
static const rocq__codec *rocq__codec_of(rocq_format format) {
    switch (format) {
#define ROCQ_X(NAME, name, id, elems, bytes) \
    case ROCQ_##NAME: return &rocq__codec_##name;
        ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
    case ROCQ_I8: return &rocq__codec_i8;
    case ROCQ_I32: return &rocq__codec_i32;
    default: return NULL;
    }
}

// -- dequantize --

#if defined(__GNUC__) || defined(__clang__)
#define ROCQ__NOINLINE __attribute__((noinline)) static
#elif defined(_MSC_VER)
#define ROCQ__NOINLINE __declspec(noinline) static
#else
#define ROCQ__NOINLINE static
#endif

static void rocq__decode_block(const rocq__codec *codec, const void *block,
                               float *__restrict dst) {
    if (!codec->unpack) {
        rocq__decode_mxfp6_e3m2(block, dst);
        return;
    }
    int8_t code[256];
    float scale[16], min[16];
    codec->unpack(block, code, scale, min);
    for (int32_t i = 0; i < codec->info.block_elems; i += 16) {
        const float s = scale[i / codec->group], m = min[i / codec->group];
        for (int32_t k = 0; k < 16; k++) dst[i + k] = s * (float)code[i + k] - m;
    }
}

// Out of line: inlined, gcc forgets that dst and src do not overlap, and widens element by element.
ROCQ__NOINLINE void rocq__dequantize_row(rocq_format format, float *__restrict dst,
                                         const void *__restrict src, int64_t n) {
    const uint16_t *half = (const uint16_t *)src;
    const unsigned char *block = (const unsigned char *)src;
    const rocq__codec *codec = rocq__codec_of(format);
    switch (format) {
    case ROCQ_F32:
        if (n > 0) memcpy(dst, src, (size_t)n * sizeof(float));
        break;
    case ROCQ_F16:
        for (int64_t i = 0; i < n; i++) dst[i] = rocq__f16_to_f32(half[i]);
        break;
    case ROCQ_BF16:
        for (int64_t i = 0; i < n; i++) dst[i] = rocq__bf16_to_f32(half[i]);
        break;
    default:
        for (int64_t i = 0; i < n; i += codec->info.block_elems, block += codec->info.block_bytes) {
            rocq__decode_block(codec, block, dst + i);
        }
    }
}

// -- quantize: the formats with a fixed rule, which give ggml's reference bytes --

// (x - offset) factor, rounded to F32 before the caller adds to it. Out of line, because a call is
// the one barrier to fused multiply-add that every compiler and language mode respects.
ROCQ__NOINLINE void rocq__scaled(float *__restrict dst, const float *__restrict x,
                                 float offset, float factor, int32_t n) {
    for (int32_t i = 0; i < n; i++) dst[i] = (x[i] - offset) * factor;
}

// Importance as weights from 0 to 1, and never quite 0: unimportant values get sane levels too.
static void rocq__weights(float *__restrict dst, const float *__restrict w, int32_t n) {
    float top = 0;
    for (int32_t i = 0; i < n && w; i++) top = ROCQ__MAX(top, w[i]);
    for (int32_t i = 0; i < n; i++) dst[i] = top > 0 ? w[i] / top + 1e-7f : 1.0f;
}

// What a scale field can hold: a scale that F16 would round to infinity takes F16's largest value,
// so a block of huge values saturates.
static inline float rocq__f16_limit(float v) {
    return v >= 65520.0f ? 65504.0f : v <= -65520.0f ? -65504.0f : v;
}

// Q4_0 and Q5_0: the element of largest magnitude takes the lowest level. Q4_1 and Q5_1: levels
// from the smallest to the largest element. Q8_0: largest magnitude is 127, halves go away from 0.
static void rocq__encode_plain(const rocq__grid *grid, const float *x, rocq__fields *f) {
    float top = 0, low = x[0], high = x[0], offset = 0, d, v[32];
    for (int32_t i = 0; i < 32; i++) {
        if (fabsf(x[i]) > fabsf(top)) top = x[i];
        if (x[i] < low) low = x[i];
        if (x[i] > high) high = x[i];
    }
    if (grid->mn_lo) {
        d = (high - low) / (float)grid->q_hi;
        offset = rocq__f16_limit(low);
    } else {
        d = grid->q_hi == 127 ? fabsf(top) / 127 : top / (float)grid->q_lo;
    }
    d = rocq__f16_limit(d);
    f->d = rocq__f32_to_f16(d);
    f->dmin = rocq__f32_to_f16(offset);
    const float inverse = d != 0 ? 1 / d : 0;
    if (fabsf(inverse) > FLT_MAX) { // d is so small that it is stored as 0
        memset(f->q, grid->q_hi == 127 ? 128 : 0, 32);
        return;
    }
    rocq__scaled(v, x, offset, inverse, 32);
    const float q_lo = (float)grid->q_lo, q_hi = (float)grid->q_hi;
    for (int32_t i = 0; i < 32; i++) {
        const float t = v[i] > q_lo ? v[i] < q_hi ? v[i] : q_hi : q_lo; // q_lo for a NaN
        if (grid->q_hi == 127) {
            const int32_t whole = (int32_t)t;
            const float rest = t - (float)whole;
            f->q[i] = (uint8_t)(whole + 128 + (rest >= 0.5f) - (rest <= -0.5f));
        } else {
            f->q[i] = (uint8_t)(t + (0.5f - q_lo));
        }
    }
}

// The nearest level, of two equally near the smaller magnitude; never one beyond F32, or -0.
static void rocq__codes_mxfp4(uint8_t *q, const float *x, uint8_t e) {
    const float scale = rocq__pow2(e - 128);
    float magnitude[32];
    for (int32_t i = 0; i < 32; i++) magnitude[i] = 0;
    for (int32_t k = 1; k < 8; k++) {
        const float level = (float)rocq__mxfp4_levels[k], below = (float)rocq__mxfp4_levels[k - 1];
        const float middle = scale * level > FLT_MAX ? INFINITY : scale * (0.5f * (level + below));
        for (int32_t i = 0; i < 32; i++) magnitude[i] += fabsf(x[i]) > middle ? 1.0f : 0.0f;
    }
    for (int32_t i = 0; i < 32; i++) {
        q[i] = (uint8_t)((int32_t)magnitude[i] + (x[i] < 0 && magnitude[i] > 0 ? 8 : 0));
    }
}

// Nearest element, ties to even, too large ones to the largest.
static void rocq__codes_fp6(uint8_t *q, const float *x, uint8_t e, int32_t f_bits) {
    const double unit = ldexp(1.0, 127 - e + (f_bits == 3 ? 3 : 4)); // smallest subnormal to 1
    const double limit = rocq__fp6(31, f_bits);
    for (int32_t i = 0; i < 32; i++) {
        double v = fabs((double)x[i]) * unit; // exact
        v = v < limit ? v : limit;
        int32_t shift = 0; // exponent of the spacing around v
        while (v >= (double)(2 << f_bits << shift)) shift++;
        v = ldexp(v, -shift);
        const int32_t whole = (int32_t)v;
        const double rest = v - whole;
        const int32_t r = whole + (rest > 0.5 || (rest == 0.5 && (whole & 1)));
        const int32_t magnitude = (shift << f_bits) + r; // a carry moves on to the next exponent
        q[i] = (uint8_t)(magnitude | (x[i] < 0 ? 32 : 0));
    }
}

// The scale is the power of two of the OCP specification, or ggml's for MXFP4; with importance the
// best of that and its neighbours.
static void rocq__encode_mx(const rocq__codec *codec, void *dst, const float *x, const float *w) {
    const int32_t f_bits = codec->mx_bits;
    float amax = 0;
    for (int32_t i = 0; i < 32; i++) amax = ROCQ__MAX(amax, fabsf(x[i]));
    amax = ROCQ__MIN(amax, FLT_MAX);
    int32_t e = 0;
    if (f_bits == 1) {
        // ggml takes the floor of a logarithm rounded to F32, which just below a power of two is
        // that power's. Its byte wraps around for amax < 2^-125, where all codes are 0.
        if (amax > 0) e = (int32_t)floorf((float)log2((double)amax)) - 2 + 127;
    } else if (amax > 0) {
        e = ROCQ__MAX(ilogbf(amax) - (f_bits == 3 ? 2 : 4) + 127, 0);
    }
    const int32_t first = w ? ROCQ__MIN(ROCQ__MAX(e - 1, 0), 254) : e;
    const int32_t last = w ? ROCQ__MIN(ROCQ__MAX(e + 1, 0), 254) : e;
    double best = INFINITY;
    for (e = first; e <= last; e++) {
        uint8_t block[sizeof(rocq_block_mxfp6_e2m3)], q[32];
        block[0] = (uint8_t)e;
        if (f_bits == 1) {
            rocq__codes_mxfp4(q, x, block[0]);
            rocq__join4(block + 1, q, 16);
        } else {
            rocq__codes_fp6(q, x, block[0], f_bits);
            rocq__join6(block + 1, q);
        }
        if (first < last) {
            float y[32], weight[32];
            double error = 0;
            rocq__decode_block(codec, block, y);
            rocq__weights(weight, w, 32);
            for (int32_t i = 0; i < 32; i++) {
                const double r = (double)x[i] - (double)y[i];
                error += (double)weight[i] * r * r;
            }
            if (!(error < best) && e > first) continue;
            best = error;
        }
        memcpy(dst, block, (size_t)codec->info.block_bytes);
    }
}

// -- quantize: the searched formats --
// Minimized is the sum of w r^2, r = x - (d sc level - dmin mn), over what the format can store.
//   1. Each group is fitted by itself: scale s and min m by least squares, from a spread of starts.
//   2. Many d and dmin are tried with the levels of step 1, because how well they survive rounding
//      to F16, and sc and mn match the groups' s and m, changes erratically with d and dmin.
//   3. From the best of those, two steps alternate: groups choose sc, mn and levels anew, then
//      least squares over the block moves d and dmin. What has the smallest error is stored.

typedef struct rocq__search {
    const rocq__grid *grid;
    bool has_min;
    int32_t n_groups;
    int32_t exponent;   // x is the block's times 2^-exponent: no square overflows or vanishes
    float x[256], w[256];
    float s[16], m[16]; // each group's own fit
    float peak[16];     // its element of largest magnitude
    float weight[16];   // its sum of w
} rocq__search;

// Sums over a group at scale s and min m, with residual r = x + m - s level. They give the error at
// any other s and m with the same levels; built from r and not from x, so that little cancels.
typedef struct rocq__sums {
    float rr, rl, r1, ll, l1, w1; // of w r r, w r level, w r, w level level, w level, w
} rocq__sums;

// The error at s + a, m + b with the same levels.
static inline float rocq__error_at(const rocq__sums *k, float a, float b) {
    return k->rr - 2 * (a * k->rl - b * k->r1) + a * (a * k->ll - 2 * b * k->l1) + b * b * k->w1;
}

// The levels nearest to 16 values.
static inline void rocq__levels_16(const rocq__grid *grid, const float *v, float *level) {
    if (grid->table) {
        for (int32_t i = 0; i < 16; i++) level[i] = (float)grid->table[0];
        for (int32_t k = 1; k < 16; k++) {
            const float step = (float)(grid->table[k] - grid->table[k - 1]);
            const float middle = 0.5f * (float)(grid->table[k] + grid->table[k - 1]);
            for (int32_t i = 0; i < 16; i++) level[i] += v[i] > middle ? step : 0.0f;
        }
        return;
    }
    const float q_lo = (float)grid->q_lo, range = (float)(grid->q_hi - grid->q_lo);
    for (int32_t i = 0; i < 16; i++) {
        float t = v[i] - q_lo;
        t = t > 0.0f ? t : 0.0f; // also a NaN
        t = t < range ? t : range;
        level[i] = (float)(int32_t)(t + 0.5f) + q_lo;
    }
}

// The sums of group g with the nearest levels for s and m. Four partial sums each, for SIMD.
static rocq__sums rocq__assign(const rocq__search *search, int32_t g, float s, float m) {
    const int32_t group = search->grid->group;
    const float inverse = s != 0 ? 1 / s : 0;
    float rr[4] = {0, 0, 0, 0}, rl[4] = {0, 0, 0, 0}, r1[4] = {0, 0, 0, 0};
    float ll[4] = {0, 0, 0, 0}, l1[4] = {0, 0, 0, 0};
    for (int32_t j = g * group; j < (g + 1) * group; j += 16) {
        const float *x = search->x + j, *w = search->w + j;
        float v[16], level[16];
        for (int32_t i = 0; i < 16; i++) v[i] = (x[i] + m) * inverse;
        rocq__levels_16(search->grid, v, level);
        for (int32_t i = 0; i < 16; i += 4) {
            for (int32_t k = 0; k < 4; k++) {
                const float l = level[i + k], r = x[i + k] + m - s * l;
                const float wr = w[i + k] * r, wl = w[i + k] * l;
                rr[k] += wr * r;
                rl[k] += wr * l;
                r1[k] += wr;
                ll[k] += wl * l;
                l1[k] += wl;
            }
        }
    }
    const rocq__sums sums = {rr[0] + rr[1] + rr[2] + rr[3], rl[0] + rl[1] + rl[2] + rl[3],
                             r1[0] + r1[1] + r1[2] + r1[3], ll[0] + ll[1] + ll[2] + ll[3],
                             l1[0] + l1[1] + l1[2] + l1[3], search->weight[g]};
    return sums;
}

// Of the two values around v that an F16 field can hold: side 0 the nearer one, 1 the one of larger
// magnitude, 2 the farther one.
static float rocq__stored(const rocq__search *search, float v, int32_t side) {
    const float unit = rocq__pow2(search->exponent), inverse = rocq__pow2(-search->exponent);
    uint16_t bits = rocq__f32_to_f16(rocq__f16_limit(v * unit));
    const float first = rocq__f16_to_f32(bits) * inverse;
    const bool larger = fabsf(first) < fabsf(v); // the other one has the larger magnitude
    if (side == 0 || (side == 1 && !larger)) return first;
    if ((bits & 0x7fffu) == (larger ? 0x7bffu : 0u)) return first;
    bits = (uint16_t)(larger ? bits + 1 : bits - 1);
    return rocq__f16_to_f32(bits) * inverse;
}

// The steps from s, m to the least squares optimum for the levels that gave the sums.
static void rocq__refit(const rocq__search *search, const rocq__sums *k, float m, float *a,
                        float *b) {
    *a = k->ll > 0 ? k->rl / k->ll : 0;
    *b = 0;
    if (!search->has_min) return;
    const float det = k->ll * k->w1 - k->l1 * k->l1;
    if (det > 1e-5f * k->ll * k->w1) {
        *a = (k->rl * k->w1 - k->r1 * k->l1) / det;
        *b = (k->rl * k->l1 - k->r1 * k->ll) / det;
    } else { // all on one level: an offset does it
        *a = 0;
        *b = -k->r1 / k->w1;
    }
    if (search->grid->mn_lo == 0 && m + *b < 0) { // mins are not negative
        *b = -m;
        *a = k->ll > 0 ? (k->rl + *b * k->l1) / k->ll : 0;
    }
}

// Step 1 for a group. Starts move its largest value (without a min, its peak) from beyond the last
// level inwards, and with a min its smallest outwards. Of about equal fits the first is taken, so
// that groups that are alike end up alike. A single scale is rounded to F16 here, as it is stored.
static void rocq__fit(rocq__search *search, int32_t g) {
    const rocq__grid *grid = search->grid;
    const float *x = search->x + g * grid->group, *w = search->w + g * grid->group;
    const float bottom = (float)(grid->table ? grid->table[0] : grid->q_lo);
    const float top = (float)(grid->table ? grid->table[15] : grid->q_hi);
    const float unit = grid->table ? 14.0f : 1.0f, spacing = grid->table ? 4.2f : 0.35f;
    const bool single = grid->sc_lo == 1;
    float low = x[0], high = x[0], xx = 0, best = INFINITY, s_best = 0, m_best = 0;
    search->weight[g] = 0;
    for (int32_t i = 0; i < grid->group; i++) {
        low = ROCQ__MIN(low, x[i]);
        high = ROCQ__MAX(high, x[i]);
        xx += w[i] * x[i] * x[i];
        search->weight[g] += w[i];
    }
    const float peak = search->peak[g] = high > -low ? high : low;
    const float equal = single ? 0.0f : 3e-7f * xx;
    if (grid->mn_lo == 0) low = ROCQ__MIN(low, 0.0f);
    for (int32_t i = 0; i < (search->has_min ? 25 : grid->table ? 48 : 32); i++) {
        float s, m = 0, a, b;
        if (search->has_min) {
            const float below = 0.4f * (float)(i / 5 - 1), above = 0.5f * (float)(2 - i % 5);
            s = (high - low) / (top + below + above);
            m = -low - below * s;
            if (grid->mn_lo == 0) m = ROCQ__MAX(m, 0.0f);
        } else {
            const float outside = unit * 2.5f - spacing * (float)(i / 2);
            s = peak / (i % 2 ? top + outside : bottom - outside);
        }
        const rocq__sums sums = rocq__assign(search, g, s, m);
        rocq__refit(search, &sums, m, &a, &b);
        const float s_to = single ? rocq__stored(search, s + a, 0) : s + a;
        const float m_to = single ? rocq__stored(search, m + b, 0) : m + b;
        const float error = rocq__error_at(&sums, s_to - s, m_to - m);
        if (error + equal + 1e-6f * sums.rr < 0.995f * best) {
            best = error;
            s_best = s_to;
            m_best = m_to;
        }
    }
    best = INFINITY;
    search->s[g] = search->m[g] = 0;
    for (int32_t turn = 0; turn < 4; turn++) {
        float a, b;
        const rocq__sums sums = rocq__assign(search, g, s_best, m_best);
        if (!(sums.rr < best)) break;
        best = sums.rr;
        search->s[g] = s_best;
        search->m[g] = m_best;
        rocq__refit(search, &sums, m_best, &a, &b);
        s_best = single ? rocq__stored(search, s_best + a, 0) : s_best + a;
        m_best = single ? rocq__stored(search, m_best + b, 0) : m_best + b;
    }
}

// The integer of a range that is nearest to v / unit.
static inline int32_t rocq__code_for(float v, float unit, int32_t lo, int32_t hi) {
    float t = (unit != 0 ? v / unit : 0) - (float)lo;
    t = t > 0 ? t : 0;
    t = t < (float)(hi - lo) ? t : (float)(hi - lo);
    return (int32_t)(t + 0.5f) + lo;
}

typedef struct rocq__start {
    float error, d, dmin;
    float a[16], m[16]; // of each group: d sc - s, and the best min for the scale d sc
} rocq__start;

// Step 2. A candidate for d puts the largest s at the end of the range of sc, or up to half the
// range inside it, and is then moved by least squares for the sc that result. The best n are kept,
// and the best dmin is found for each from a like spread, without the least squares. With mins, d
// is also tried rounded up, because a min can make up for a scale that is too large.
static void rocq__find_starts(const rocq__search *search, rocq__start *starts, int32_t n) {
    const rocq__grid *grid = search->grid;
    const float end = (float)(grid->sc_lo < 0 ? grid->sc_lo : grid->sc_hi);
    const float step = (float)(grid->sc_hi + 1) / (end < 0 ? -64.0f : 64.0f);
    const int32_t sides = search->has_min ? 2 : 1;
    rocq__sums sums[16];
    float stiff[16], top = 0; // stiff: how fast the error grows with the square of a step of s
    for (int32_t g = 0; g < search->n_groups; g++) {
        const rocq__sums k = sums[g] = rocq__assign(search, g, search->s[g], search->m[g]);
        stiff[g] = search->m[g] > 0 ? ROCQ__MAX(k.ll - k.l1 * k.l1 / k.w1, 1e-6f * k.ll) : k.ll;
        if (fabsf(search->s[g]) > fabsf(top)) top = search->s[g];
    }
    memset(starts, 0, (size_t)n * sizeof *starts);
    for (int32_t i = 0; i < n; i++) starts[i].error = INFINITY;
    for (int32_t i = 0; i < 32 * sides; i++) {
        const float d = top / (end - step * (float)(i / sides));
        float sc[16], along = 0, square = 0;
        rocq__start start;
        memset(&start, 0, sizeof start);
        for (int32_t g = 0; g < search->n_groups; g++) {
            sc[g] = (float)rocq__code_for(search->s[g], d, grid->sc_lo, grid->sc_hi);
            along += stiff[g] * sc[g] * search->s[g];
            square += stiff[g] * sc[g] * sc[g];
        }
        start.d = rocq__stored(search, square > 0 ? along / square : 0, i % sides);
        for (int32_t g = 0; g < search->n_groups; g++) {
            const rocq__sums *k = &sums[g];
            const float a = start.d * sc[g] - search->s[g];
            const float m = search->has_min ? search->m[g] + (a * k->l1 - k->r1) / k->w1 : 0;
            start.a[g] = a;
            start.m[g] = ROCQ__MAX(m, 0.0f);
            start.error += rocq__error_at(k, a, start.m[g] - search->m[g]);
        }
        int32_t at = n;
        for (; at > 0 && start.error < starts[at - 1].error; at--) {
            if (at < n) starts[at] = starts[at - 1];
        }
        if (at < n) starts[at] = start;
    }
    for (int32_t i = 0; i < n && search->has_min; i++) {
        rocq__start *start = &starts[i];
        float m_top = 0;
        for (int32_t g = 0; g < search->n_groups; g++) m_top = ROCQ__MAX(m_top, start->m[g]);
        start->error = INFINITY;
        for (int32_t j = 0; j < 32; j++) {
            const float to = (float)grid->mn_hi - (float)(j * (grid->mn_hi + 1)) / 64;
            const float dmin = rocq__stored(search, m_top / to, 0);
            float error = 0;
            for (int32_t g = 0; g < search->n_groups; g++) {
                const int32_t mn = rocq__code_for(start->m[g], dmin, 0, grid->mn_hi);
                error += rocq__error_at(&sums[g], start->a[g], dmin * (float)mn - search->m[g]);
            }
            if (error < start->error) {
                start->error = error;
                start->dmin = dmin;
            }
        }
    }
}

// Step 3: chooses sc and mn of every group for the given d and dmin: those nearest to s and m, or
// their neighbours if they are better. Returns that error. Then moves d and dmin to the optimum of
// the block by least squares, as F16 can store it, and each s and m to that of its group.
static float rocq__choose(const rocq__search *search, float *d, float *dmin, float *s, float *m,
                          rocq__fields *f) {
    const rocq__grid *grid = search->grid;
    float total = 0, dd = 0, dm = 0, mm = 0, rd = 0, rm = 0;
    for (int32_t g = 0; g < search->n_groups; g++) {
        const int32_t sc = rocq__code_for(s[g], *d, grid->sc_lo, grid->sc_hi);
        const int32_t mn = rocq__code_for(m[g], *dmin, grid->mn_lo, grid->mn_hi);
        const rocq__sums nearest = rocq__assign(search, g, *d * (float)sc, *dmin * (float)mn);
        rocq__sums best = nearest;
        int32_t tries[10] = {sc, ROCQ__MAX(sc - 1, grid->sc_lo), ROCQ__MIN(sc + 1, grid->sc_hi)};
        int32_t n = 3;
        // Q3_K, of few levels and no min, may want quite another scale: the peak on another level.
        for (int32_t level = grid->q_lo; level <= grid->q_hi && grid->q_lo == -4; level++) {
            if (level == 0) continue;
            tries[n++] = rocq__code_for(search->peak[g], *d * (float)level, grid->sc_lo,
                                        grid->sc_hi);
        }
        f->sc[g] = sc;
        f->mn[g] = mn;
        for (int32_t i = 0; i < n; i++) {
            // The best mn depends on sc: least squares gives the m that goes with it.
            const float a = *d * (float)(tries[i] - sc);
            const float to = (a * nearest.l1 - nearest.r1) / nearest.w1;
            const int32_t mn_to = rocq__code_for(*dmin * (float)mn + to, *dmin, grid->mn_lo,
                                                 grid->mn_hi);
            if (tries[i] == sc && mn_to == mn) continue;
            const rocq__sums k =
                rocq__assign(search, g, *d * (float)tries[i], *dmin * (float)mn_to);
            if (k.rr < best.rr) {
                best = k;
                f->sc[g] = tries[i];
                f->mn[g] = mn_to;
            }
        }
        const float l = (float)f->sc[g], o = (float)f->mn[g];
        float a, b;
        rocq__refit(search, &best, *dmin * o, &a, &b);
        s[g] = *d * l + a;
        m[g] = *dmin * o + b;
        total += best.rr;
        dd += l * l * best.ll;
        dm += l * o * best.l1;
        mm += o * o * best.w1;
        rd += l * best.rl;
        rm += o * best.r1;
    }
    const float det = dd * mm - dm * dm, d_from = *d, dmin_from = *dmin;
    const float d_to = d_from + (det > 1e-5f * dd * mm ? (rd * mm - rm * dm) / det
                                 : dd > 0              ? rd / dd
                                                       : 0);
    float best = INFINITY;
    for (int32_t side = 0; side <= 2; side += 2) {
        // The best dmin for this d can make up for some of the rounding of d.
        const float d_try = rocq__stored(search, d_to, side), a = d_try - d_from;
        const float dmin_try =
            mm > 0 ? rocq__stored(search, dmin_from + (a * dm - rm) / mm, 0) : dmin_from;
        const float b = dmin_try - dmin_from;
        const float error = total - 2 * (a * rd - b * rm) + a * (a * dd - 2 * b * dm) + b * b * mm;
        if (error < best) {
            best = error;
            *d = d_try;
            *dmin = dmin_try;
        }
    }
    return total;
}

static void rocq__encode_searched(const rocq__grid *grid, const float *x, const float *w,
                                  rocq__fields *out) {
    rocq__search search;
    float amax = 0, d, dmin;
    for (int32_t i = 0; i < grid->n; i++) amax = ROCQ__MAX(amax, fabsf(x[i]));
    memset(out, 0, sizeof *out);
    if (!(amax > 1e-12f)) { // far below what F16 scales reach
        memset(out->q, grid->table ? 8 : -grid->q_lo, sizeof out->q);
        return;
    }
    search.grid = grid;
    search.has_min = grid->mn_lo != 0 || grid->mn_hi != 0;
    search.n_groups = grid->n / grid->group;
    search.exponent = ROCQ__MIN(ilogbf(amax), 126);
    for (int32_t i = 0; i < grid->n; i++) search.x[i] = x[i] * rocq__pow2(-search.exponent);
    rocq__weights(search.w, w, grid->n);
    for (int32_t g = 0; g < search.n_groups; g++) rocq__fit(&search, g);
    if (grid->sc_lo == 1) {
        d = search.s[0];
        dmin = -search.m[0];
        out->sc[0] = 1;
        out->mn[0] = grid->mn_lo;
    } else {
        rocq__start starts[2];
        float best = INFINITY;
        rocq__find_starts(&search, starts, 2);
        d = dmin = 0;
        for (int32_t i = 0; i < 2; i++) {
            float s[16], m[16], last = INFINITY;
            memcpy(s, search.s, sizeof s);
            memcpy(m, search.has_min ? starts[i].m : search.m, sizeof m);
            for (int32_t turn = 0; turn < 2; turn++) {
                rocq__fields f;
                const float d_at = starts[i].d, dmin_at = starts[i].dmin;
                const float error = rocq__choose(&search, &starts[i].d, &starts[i].dmin, s, m, &f);
                if (error < best) {
                    best = error;
                    d = d_at;
                    dmin = dmin_at;
                    memcpy(out->sc, f.sc, sizeof f.sc);
                    memcpy(out->mn, f.mn, sizeof f.mn);
                }
                if (!(error < last)) break;
                last = error;
            }
        }
    }
    out->d = rocq__f32_to_f16(d * rocq__pow2(search.exponent));
    out->dmin = rocq__f32_to_f16(dmin * rocq__pow2(search.exponent));
    for (int32_t j = 0; j < grid->n; j += 16) {
        const int32_t g = j / grid->group;
        const float s = d * (float)out->sc[g], m = dmin * (float)out->mn[g];
        const float inverse = s != 0 ? 1 / s : 0;
        float v[16], level[16];
        for (int32_t i = 0; i < 16; i++) v[i] = (search.x[j + i] + m) * inverse;
        rocq__levels_16(grid, v, level);
        for (int32_t i = 0; i < 16; i++) {
            int32_t q = (int32_t)level[i] - grid->q_lo;
            if (grid->table) {
                for (q = 0; q < 15 && grid->table[q] != (int32_t)level[i];) q++;
            }
            out->q[j + i] = (uint8_t)q;
        }
    }
}

// -- quantize: rows --

static void rocq__quantize_row(rocq_format format, void *dst, const float *src, int64_t n,
                               const float *importance) {
    uint16_t *half = (uint16_t *)dst;
    unsigned char *block = (unsigned char *)dst;
    const rocq__codec *codec = rocq__codec_of(format);
    switch (format) {
    case ROCQ_F32:
        if (n > 0) memcpy(dst, src, (size_t)n * sizeof(float));
        break;
    case ROCQ_F16:
        for (int64_t i = 0; i < n; i++) half[i] = rocq__f32_to_f16(src[i]);
        break;
    case ROCQ_BF16:
        for (int64_t i = 0; i < n; i++) half[i] = rocq__f32_to_bf16(src[i]);
        break;
    default:
        for (int64_t i = 0; i < n; i += codec->info.block_elems, block += codec->info.block_bytes) {
            const float *w = importance ? importance + i : NULL;
            rocq__fields fields;
            if (codec->mx_bits) {
                rocq__encode_mx(codec, block, src + i, w);
                continue;
            }
            if (!w && codec->grid.sc_lo == 1 && !codec->grid.table) {
                rocq__encode_plain(&codec->grid, src + i, &fields);
            } else {
                rocq__encode_searched(&codec->grid, src + i, w, &fields);
            }
            codec->pack(block, &fields);
        }
    }
}

// -- the public half --

ROCQ_DEF const rocq_format_info *rocq_get_format_info(rocq_format format) {
    const rocq__codec *codec = rocq__codec_of(format);
    return codec ? &codec->info : NULL;
}

ROCQ_DEF const char *rocq_format_name(rocq_format format) {
    const rocq_format_info *info = rocq_get_format_info(format);
    return info ? info->name : "?";
}

ROCQ_DEF rocq_result rocq_format_from_name(rocq_format *format, const char *name) {
    static const rocq_format all[] = {
#define ROCQ_X(NAME, name, id, elems, bytes) ROCQ_##NAME,
        ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
        ROCQ_I8, ROCQ_I32};
    if (!format || !name) return ROCQ_E_ARGUMENT;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        const char *a = rocq_format_name(all[i]), *b = name;
        while (*a && *a == (*b >= 'a' && *b <= 'z' ? *b - 'a' + 'A' : *b)) a++, b++;
        if (*a == 0 && *b == 0) {
            *format = all[i];
            return ROCQ_OK;
        }
    }
    return ROCQ_E_FORMAT;
}

ROCQ_DEF rocq_result rocq_row_size(rocq_format format, int64_t n, int64_t *bytes) {
    const rocq_format_info *info = rocq_get_format_info(format);
    if (!info) return ROCQ_E_FORMAT;
    if (!bytes || n < 0) return ROCQ_E_ARGUMENT;
    if (n % info->block_elems != 0) return ROCQ_E_SHAPE;
    return rocq__mul(n / info->block_elems, info->block_bytes, bytes) ? ROCQ_OK : ROCQ_E_OVERFLOW;
}

// A host address that a caller may pass for n elements of a format.
static rocq_result rocq__check_span(rocq_format format, const void *ptr, int64_t n) {
    if (n == 0) return ROCQ_OK;
    if (!ptr) return ROCQ_E_ARGUMENT;
    return (uintptr_t)ptr % (uintptr_t)rocq__alignment_of(format) == 0 ? ROCQ_OK : ROCQ_E_ALIGNMENT;
}

// Whether n_a elements of one format at a share a byte with n_b of another at b. The caller has
// checked that 4 bytes per element, the most of any format, fit an int64.
static bool rocq__spans_overlap(rocq_format a_format, const void *a, int64_t n_a,
                                rocq_format b_format, const void *b, int64_t n_b) {
    return n_a > 0 && n_b > 0 &&
           (uintptr_t)a < (uintptr_t)b + (uintptr_t)rocq__bytes(b_format, n_b) &&
           (uintptr_t)b < (uintptr_t)a + (uintptr_t)rocq__bytes(a_format, n_a);
}

ROCQ_DEF rocq_result rocq_quantize(rocq_format format, void *dst, const float *src, int64_t n_rows,
                                   int64_t n_per_row, const float *importance) {
    int64_t row_bytes, bytes, n;
    if (rocq__is_integer(format)) return ROCQ_E_FORMAT;
    ROCQ__TRY(rocq_row_size(format, n_per_row, &row_bytes));
    if (n_rows < 0) return ROCQ_E_ARGUMENT;
    if (!rocq__mul(n_rows, n_per_row, &n) || !rocq__mul(n, 4, &bytes)) return ROCQ_E_OVERFLOW;
    ROCQ__TRY(rocq__check_span(format, dst, n));
    ROCQ__TRY(rocq__check_span(ROCQ_F32, src, n));
    ROCQ__TRY(rocq__check_span(ROCQ_F32, importance ? importance : src, n));
    if (rocq__spans_overlap(format, dst, n, ROCQ_F32, src, n) ||
        (importance && rocq__spans_overlap(format, dst, n, ROCQ_F32, importance, n_per_row))) {
        return ROCQ_E_ARGUMENT;
    }
    for (int64_t i = 0; i < n; i++) {
        if (!(fabsf(src[i]) <= FLT_MAX)) return ROCQ_E_ARGUMENT;
    }
    for (int64_t i = 0; importance && n_rows > 0 && i < n_per_row; i++) {
        if (!(importance[i] >= 0 && importance[i] <= FLT_MAX)) return ROCQ_E_ARGUMENT;
    }
    for (int64_t row = 0; row < n_rows; row++) {
        rocq__quantize_row(format, (unsigned char *)dst + row * row_bytes, src + row * n_per_row,
                           n_per_row, importance);
    }
    return ROCQ_OK;
}

// ---------------------------------------------------------------------------------------------
// >>gguf: reader
// ---------------------------------------------------------------------------------------------
// Opening a file scans its header once and notes where each metadata value and each tensor record
// starts. Those two lists, and the header's bytes (head), are all that is kept. head is the whole
// file if that is mapped or is the caller's memory; else a block that grows during the scan.
// Each look-up decodes its record again and does not read past the start of the next one. So if
// another program writes to a mapped file, values may be wrong, but nothing outside is read. No
// check helps if a mapped file shrinks while it is in use: the system ends the program (SIGBUS).
// no_mmap is for where that may happen.

enum {
    ROCQ__GGUF_ALIGNMENT = 32,          // bytes, of tensor data, if the file does not set another
    ROCQ__GGUF_MAX_ALIGNMENT = 1 << 20, // as in ggml: more would only make small files huge
    ROCQ__GGUF_MAX_KEY = 65535,
    ROCQ__GGUF_MIN_VALUE = 14, // bytes of the smallest value record: key and scalar of 1 byte each
    ROCQ__GGUF_MIN_TENSOR = 24 // bytes of the smallest tensor record: no name, no dimensions
};

enum { // of loading
    ROCQ__LINE = 64,           // of a cache: source and copy have the same offset in a line
    ROCQ__GAP = 1 << 16,       // a gap between tensors of up to so many bytes is read, not skipped
    ROCQ__LEAST_PIECE = 512,   // bytes: holds a block of any format at any offset in a line
    ROCQ__MOST_PIECE = 1 << 28,// bytes: their elements can be counted in a kernel's int32
    ROCQ__MAX_PIECES = 64
};

#ifndef ROCQ__GGUF_WINDOW
#define ROCQ__GGUF_WINDOW 65536 // first size of a growing head; the fuzzer sets less
#endif

// Where bytes come from: memory, or a function.
typedef struct rocq__source {
    const unsigned char *data; // NULL: bytes come from read
    bool (*read)(void *dst, int64_t offset, int64_t size, void *user);
    void *user;
    bool shared; // several threads may call read at once
} rocq__source;

// All metadata values, or all tensors. A record begins with its name: 64-bit length, then bytes.
typedef struct rocq__gguf_index {
    const char *kind; // for messages
    int64_t count;
    int64_t *at;    // [count + 1] offset of each record, and of the end of the last
    int64_t *order; // [count] record numbers, sorted by name once the file is open
} rocq__gguf_index;

// The caller owns an open file. As with its context, one thread at a time may use it.
struct rocq_gguf {
    rocq_ctx *ctx;
    int64_t size; // of the file
    const unsigned char *head;
    int64_t head_size;
    bool whole;   // head has the whole file
    void *window; // equal to head if head is a block that we allocated, else NULL
    void *map;    // equal to head if head is our mapping, else NULL
    FILE *stream;
    rocq__source source; // for tensor data, and for header bytes that head does not have yet
    int32_t version;
    int64_t alignment;
    int64_t data_start; // offset in the file from which tensor offsets count
    rocq__gguf_index values, tensors;
};

static uint32_t rocq__gguf_u32(const void *src) {
    uint32_t value;
    memcpy(&value, src, sizeof value);
    return value;
}

static uint64_t rocq__gguf_u64(const void *src) {
    uint64_t value;
    memcpy(&value, src, sizeof value);
    return value;
}

// Bytes of an element. For a string, the 8 bytes of its length; for an unknown type, 0.
static int64_t rocq__gguf_type_size(uint32_t type) {
    static const unsigned char sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 8, 0, 8, 8, 8};
    return type < sizeof sizes ? sizes[type] : 0;
}

// The tensor types of GGUF that are not in ROCQ_FORMATS, so that messages can name what is not read
// here. Ids and names are those of enum ggml_type in ggml's ggml.h; some occur in old files only.
#define ROCQ__OTHER_TYPES(X)                                                                      \
    X(4, Q4_2) X(5, Q4_3) X(9, Q8_1) X(15, Q8_K) X(16, IQ2_XXS) X(17, IQ2_XS) X(18, IQ3_XXS)      \
    X(19, IQ1_S) X(21, IQ3_S) X(22, IQ2_S) X(24, I8) X(25, I16) X(27, I64) X(28, F64)             \
    X(29, IQ1_M) X(31, Q4_0_4_4) X(32, Q4_0_4_8) X(33, Q4_0_8_8) X(34, TQ1_0) X(35, TQ2_0)        \
    X(36, IQ4_NL_4_4) X(37, IQ4_NL_4_8) X(38, IQ4_NL_8_8) X(40, NVFP4) X(41, Q1_0)

static const char *rocq__gguf_type_name(uint32_t type_id) {
    // In C++ it is undefined to convert a number that does not fit the enum's bits.
    const rocq__codec *codec = type_id < 1024 ? rocq__codec_of((rocq_format)type_id) : NULL;
    if (codec) return codec->info.name;
    switch (type_id) {
#define ROCQ_X(id, name) \
    case id: return #name;
        ROCQ__OTHER_TYPES(ROCQ_X)
#undef ROCQ_X
    default: return "unknown";
    }
}

// The start of a name, for messages: bytes that are not printable ASCII are replaced by '?'.
typedef struct rocq__label {
    char text[65];
} rocq__label;

static rocq__label rocq__label_of(const char *name, int64_t length) {
    rocq__label label;
    int64_t n = 0;
    for (; n < length && n < (int64_t)sizeof label.text - 1; n++) {
        label.text[n] = name[n] >= 32 && name[n] < 127 ? name[n] : '?';
    }
    label.text[n] = 0;
    return label;
}

// Fails with a message that gives the file offset and, unless index is NULL, the record's name.
static rocq_result rocq__gguf_bad(const rocq_gguf *file, const rocq__gguf_index *index, int64_t i,
                                  int64_t at, rocq_result result, const char *why,
                                  uint64_t number) {
    if (!index) {
        return rocq__fail(file->ctx, result, "gguf: byte %lld: %s: %llu", (long long)at, why,
                          (unsigned long long)number);
    }
    const int64_t start = index->at[i];
    rocq__label name = rocq__label_of("", 0);
    if (file->head_size - start > 8) {
        const uint64_t length = rocq__gguf_u64(file->head + start);
        if (length <= (uint64_t)(file->head_size - start - 8)) {
            name = rocq__label_of((const char *)file->head + start + 8, (int64_t)length);
        }
    }
    return rocq__fail(file->ctx, result, "gguf: byte %lld, %s %lld '%s': %s: %llu", (long long)at,
                      index->kind, (long long)i, name.text, why, (unsigned long long)number);
}

// -- sources --

#if ROCQ__HAS_STDIO
#if defined(_WIN32)
// Converts a path from UTF-8. NULL, with errno, on failure. The caller frees it with rocq__free.
static wchar_t *rocq__wide(rocq_ctx *ctx, const char *path) {
    const int length = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, NULL, 0);
    errno = EINVAL;
    if (length <= 0) return NULL;
    wchar_t *wide = (wchar_t *)rocq__alloc(ctx, (int64_t)length * (int64_t)sizeof(wchar_t));
    errno = ENOMEM;
    if (wide) MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, wide, length);
    return wide;
}
#endif

typedef enum rocq__open_mode {
    ROCQ__READ,
    ROCQ__WRITE, // replaces the contents of a file that exists
    ROCQ__CREATE // fails with EEXIST if the name is taken, even by a dangling symbolic link
} rocq__open_mode;

// NULL, with errno, on failure.
static FILE *rocq__fopen(rocq_ctx *ctx, const char *path, rocq__open_mode mode) {
#if defined(_WIN32)
    wchar_t *wide = rocq__wide(ctx, path);
    FILE *stream = NULL;
    if (!wide) return NULL;
    if (mode == ROCQ__CREATE) { // older C libraries of Windows do not know "wbx"
        const int fd = _wopen(wide, _O_WRONLY | _O_BINARY | _O_CREAT | _O_EXCL | _O_NOINHERIT,
                              _S_IREAD | _S_IWRITE);
        stream = fd >= 0 ? _fdopen(fd, "wb") : NULL;
    } else {
        stream = _wfopen(wide, mode == ROCQ__WRITE ? L"wb" : L"rb");
    }
    const int error = errno;
    rocq__free(ctx, wide);
    errno = error;
    return stream;
#else
    static const char *const modes[] = {"rb", "wb", "wbx"};
    (void)ctx;
    return fopen(path, modes[mode]);
#endif
}

static bool rocq__fseek(FILE *stream, int64_t offset, int whence) {
#if defined(_WIN32)
    return _fseeki64(stream, offset, whence) == 0;
#else
    return offset <= LONG_MAX && fseek(stream, (long)offset, whence) == 0;
#endif
}

static int64_t rocq__ftell(FILE *stream) {
#if defined(_WIN32)
    return _ftelli64(stream);
#else
    return ftell(stream);
#endif
}

#if !defined(_WIN32) && !defined(__cplusplus)
// These are POSIX; the C library's headers hide them when the compiler is called with -std=c11.
extern int (fileno)(FILE *stream);
extern int (fsync)(int fd);
extern ssize_t pread(int fd, void *dst, size_t size, off_t offset);
#endif

// Does not use the stream's buffer and position, so that several threads can read at once.
static bool rocq__file_read(void *dst, int64_t offset, int64_t size, void *user) {
    FILE *stream = (FILE *)user;
    unsigned char *p = (unsigned char *)dst;
    while (size > 0) {
#if defined(_WIN32)
        const HANDLE handle = (HANDLE)_get_osfhandle(_fileno(stream));
        OVERLAPPED at;
        DWORD n = 0;
        memset(&at, 0, sizeof at);
        at.Offset = (DWORD)offset;
        at.OffsetHigh = (DWORD)(offset >> 32);
        if (!ReadFile(handle, p, (DWORD)ROCQ__MIN(size, (int64_t)1 << 30), &n, &at)) return false;
#else
        if ((int64_t)(off_t)offset != offset) return false;
        const ssize_t n = pread(fileno(stream), p, (size_t)size, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
#endif
        if (n <= 0) return false; // an error, or the file's end
        p += n;
        offset += (int64_t)n;
        size -= (int64_t)n;
    }
    return true;
}

#endif

#if ROCQ__HAS_MMAP
// Maps the file, if the system can. Tensors that have to be copied are still read from the file: a
// copy out of the mapping is no faster (bench/upload.c; H200 host, 16 threads: 77 against 79 GB/s),
// and would end the program if the file had shrunk.
static void rocq__gguf_map(rocq_gguf *file) {
#if defined(_WIN32)
    const HANDLE handle = (HANDLE)_get_osfhandle(_fileno(file->stream));
    const HANDLE mapping = CreateFileMappingW(handle, NULL, PAGE_READONLY, 0, 0, NULL);
    if (!mapping) return;
    file->map = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0);
    CloseHandle(mapping); // the view keeps it alive
#else
    struct stat info;
    const int fd = fileno(file->stream);
    if (fstat(fd, &info) == 0 && info.st_size > 0 && (uint64_t)info.st_size <= SIZE_MAX) {
        void *map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map != MAP_FAILED) {
            file->map = map;
            file->size = info.st_size;
        }
    }
#endif
    if (!file->map) return;
    file->head = (const unsigned char *)file->map;
    file->head_size = file->size;
    file->whole = true;
}
#endif

static rocq_result rocq__gguf_open_source(rocq_gguf *file, const rocq_gguf_desc *desc) {
    if (desc->data) {
        file->size = desc->size;
        file->head = (const unsigned char *)desc->data;
        file->head_size = desc->size;
        file->whole = true;
        file->source.data = file->head;
        return ROCQ_OK;
    }
    if (desc->read) {
        file->size = desc->size;
        file->source.read = desc->read;
        file->source.user = desc->user;
        return ROCQ_OK;
    }
#if ROCQ__HAS_STDIO
    file->stream = rocq__fopen(file->ctx, desc->path, ROCQ__READ);
    if (!file->stream) {
        const int error = errno;
        return rocq__fail(file->ctx, error == ENOMEM ? ROCQ_E_MEMORY : ROCQ_E_IO,
                          "gguf: cannot open '%s': %s", desc->path, strerror(error));
    }
    file->size = rocq__fseek(file->stream, 0, SEEK_END) ? rocq__ftell(file->stream) : -1;
    if (file->size < 0) {
        return rocq__fail(file->ctx, ROCQ_E_IO, "gguf: cannot find the size of '%s'", desc->path);
    }
    file->source.read = rocq__file_read;
    file->source.user = file->stream;
    file->source.shared = true;
#if ROCQ__HAS_MMAP
    if (!desc->no_mmap) rocq__gguf_map(file);
#endif
    return ROCQ_OK;
#else
    return rocq__fail(file->ctx, ROCQ_E_UNSUPPORTED, "gguf: built with ROCQ_NO_STDIO, no paths");
#endif
}

// -- scan: one pass over the header that finds where each record starts --

typedef struct rocq__gguf_scan {
    rocq_gguf *file;
    const rocq__gguf_index *index; // of the current record; NULL before the first
    int64_t record;
    int64_t at;
    rocq_result result; // the first failure, after which nothing more is read
} rocq__gguf_scan;

static void rocq__gguf_stop(rocq__gguf_scan *scan, rocq_result result, const char *why,
                            uint64_t number) {
    if (scan->result != ROCQ_OK) return;
    scan->result =
        rocq__gguf_bad(scan->file, scan->index, scan->record, scan->at, result, why, number);
}

// Makes the next n bytes readable at head + at, if need be by reading into a larger window.
static bool rocq__gguf_need(rocq__gguf_scan *scan, uint64_t n) {
    rocq_gguf *file = scan->file;
    if (scan->result != ROCQ_OK) return false;
    if (n > (uint64_t)(file->size - scan->at)) {
        rocq__gguf_stop(scan, ROCQ_E_TRUNCATED, "the file ends before this many more bytes", n);
        return false;
    }
    const int64_t end = scan->at + (int64_t)n;
    if (end <= file->head_size) return true;
    int64_t capacity = file->head_size <= file->size / 2 ? file->head_size * 2 : file->size;
    capacity = ROCQ__MIN(ROCQ__MAX(capacity, (int64_t)ROCQ__GGUF_WINDOW), file->size);
    capacity = ROCQ__MAX(capacity, end);
    unsigned char *window = (unsigned char *)rocq__alloc(file->ctx, capacity);
    if (!window) {
        rocq__gguf_stop(scan, ROCQ_E_MEMORY, "no memory for a header of this many bytes",
                        (uint64_t)capacity);
        return false;
    }
    if (file->head_size > 0) memcpy(window, file->head, (size_t)file->head_size);
    const bool ok = file->source.read(window + file->head_size, file->head_size,
                                      capacity - file->head_size, file->source.user);
    rocq__free(file->ctx, ok ? file->window : window);
    if (!ok) {
        rocq__gguf_stop(scan, ROCQ_E_IO, "cannot read this many bytes",
                        (uint64_t)(capacity - file->head_size));
        return false;
    }
    file->window = window;
    file->head = window;
    file->head_size = capacity;
    return true;
}

static void rocq__gguf_skip(rocq__gguf_scan *scan, uint64_t n) {
    if (rocq__gguf_need(scan, n)) scan->at += (int64_t)n;
}

// Reads n (up to 8) bytes as a number; 0 after a failure.
static uint64_t rocq__gguf_take(rocq__gguf_scan *scan, uint64_t n) {
    uint64_t value = 0;
    if (!rocq__gguf_need(scan, n)) return 0;
    memcpy(&value, scan->file->head + scan->at, (size_t)n);
    scan->at += (int64_t)n;
    return value;
}

static void rocq__gguf_scan_value(rocq__gguf_scan *scan) {
    const uint64_t key_length = rocq__gguf_take(scan, 8);
    rocq__gguf_skip(scan, key_length);
    if (scan->result == ROCQ_OK && (key_length < 1 || key_length > ROCQ__GGUF_MAX_KEY)) {
        rocq__gguf_stop(scan, ROCQ_E_CORRUPT, "length of the key is not 1 to 65535", key_length);
    }
    uint64_t count = 1, type = rocq__gguf_take(scan, 4);
    if (type == ROCQ_GGUF_ARRAY) {
        type = rocq__gguf_take(scan, 4);
        count = rocq__gguf_take(scan, 8);
        if (type == ROCQ_GGUF_ARRAY) {
            rocq__gguf_stop(scan, ROCQ_E_UNSUPPORTED, "an array of arrays, of length", count);
        }
    }
    const int64_t size = rocq__gguf_type_size((uint32_t)type);
    if (size == 0) rocq__gguf_stop(scan, ROCQ_E_CORRUPT, "unknown type of value", type);
    if (scan->result != ROCQ_OK) return;
    if (count > (uint64_t)(scan->file->size - scan->at) / (uint64_t)size) {
        rocq__gguf_stop(scan, ROCQ_E_TRUNCATED, "the file ends before an array of length", count);
    } else if (type == ROCQ_GGUF_STRING) {
        for (uint64_t i = 0; i < count && scan->result == ROCQ_OK; i++) {
            rocq__gguf_skip(scan, rocq__gguf_take(scan, 8));
        }
    } else if (rocq__gguf_need(scan, count * (uint64_t)size)) {
        for (; type == ROCQ_GGUF_BOOL && count > 0; count--, scan->at++) {
            const unsigned char byte = scan->file->head[scan->at];
            if (byte > 1) {
                rocq__gguf_stop(scan, ROCQ_E_CORRUPT, "a bool is neither 0 nor 1", byte);
                return;
            }
        }
        scan->at += (int64_t)count * size;
    }
}

static void rocq__gguf_scan_tensor(rocq__gguf_scan *scan) {
    rocq__gguf_skip(scan, rocq__gguf_take(scan, 8));
    const uint64_t n_dims = rocq__gguf_take(scan, 4);
    if (n_dims > 4) rocq__gguf_stop(scan, ROCQ_E_CORRUPT, "more than 4 dimensions", n_dims);
    rocq__gguf_skip(scan, n_dims * 8 + 4 + 8);
}

// The caller has checked count against the number of bytes that are left in the file.
static rocq_result rocq__gguf_index_alloc(rocq_gguf *file, rocq__gguf_index *index,
                                          const char *kind, int64_t count) {
    index->kind = kind;
    index->at = (int64_t *)rocq__alloc(file->ctx, (count + 1) * (int64_t)sizeof(int64_t));
    index->order = (int64_t *)rocq__alloc(file->ctx, (count + 1) * (int64_t)sizeof(int64_t));
    if (!index->at || !index->order) {
        return rocq__fail(file->ctx, ROCQ_E_MEMORY, "gguf: no memory for a list of %lld %ss",
                          (long long)count, kind);
    }
    index->count = count;
    return ROCQ_OK;
}

// -- records --

static rocq_str rocq__gguf_name(const rocq_gguf *file, const rocq__gguf_index *index, int64_t i) {
    const unsigned char *record = file->head + index->at[i];
    const int64_t room = index->at[i + 1] - index->at[i] - 8;
    const uint64_t length = rocq__gguf_u64(record);
    rocq_str name;
    name.data = (const char *)record + 8;
    name.length = length > (uint64_t)room ? room : (int64_t)length;
    return name;
}

// Any total order would do; this one compares lengths first, which decides most pairs.
static int rocq__gguf_compare(rocq_str a, rocq_str b) {
    if (a.length != b.length) return a.length < b.length ? -1 : 1;
    return memcmp(a.data, b.data, (size_t)a.length);
}

typedef struct rocq__gguf_list {
    const rocq_gguf *file;
    const rocq__gguf_index *index;
} rocq__gguf_list;

static int rocq__gguf_by_name(const void *a, const void *b, const void *list) {
    const rocq__gguf_list *l = (const rocq__gguf_list *)list;
    return rocq__gguf_compare(rocq__gguf_name(l->file, l->index, *(const int64_t *)a),
                              rocq__gguf_name(l->file, l->index, *(const int64_t *)b));
}

static int rocq__gguf_by_offset(const void *a, const void *b, const void *list) {
    const rocq__gguf_list *l = (const rocq__gguf_list *)list;
    const int64_t *at = l->index->at;
    const uint64_t offset_a = rocq__gguf_u64(l->file->head + at[*(const int64_t *)a + 1] - 8);
    const uint64_t offset_b = rocq__gguf_u64(l->file->head + at[*(const int64_t *)b + 1] - 8);
    return offset_a < offset_b ? -1 : offset_a > offset_b;
}

static void rocq__gguf_sort(const rocq_gguf *file, const rocq__gguf_index *index,
                            int (*compare)(const void *a, const void *b, const void *list)) {
    const rocq__gguf_list list = {file, index};
    for (int64_t i = 0; i < index->count; i++) index->order[i] = i;
    rocq__heapsort(index->order, index->count, (int64_t)sizeof *index->order, compare, &list);
}

static rocq_result rocq__gguf_sort_names(const rocq_gguf *file, const rocq__gguf_index *index) {
    rocq__gguf_sort(file, index, rocq__gguf_by_name);
    for (int64_t i = 1; i < index->count; i++) {
        const int64_t a = index->order[i - 1], b = index->order[i], later = ROCQ__MAX(a, b);
        if (rocq__gguf_compare(rocq__gguf_name(file, index, a),
                               rocq__gguf_name(file, index, b)) == 0) {
            return rocq__gguf_bad(file, index, later, index->at[later], ROCQ_E_CORRUPT,
                                  "the same name as number", (uint64_t)ROCQ__MIN(a, b));
        }
    }
    return ROCQ_OK;
}

// The number of the record with this name, or -1. index->order must be sorted by name.
static int64_t rocq__gguf_find(const rocq_gguf *file, const rocq__gguf_index *index,
                               const char *name) {
    rocq_str wanted;
    wanted.data = name;
    wanted.length = (int64_t)strlen(name);
    for (int64_t low = 0, high = index->count; low < high;) {
        const int64_t middle = low + (high - low) / 2, i = index->order[middle];
        const int order = rocq__gguf_compare(rocq__gguf_name(file, index, i), wanted);
        if (order == 0) return i;
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return -1;
}

static rocq_result rocq__gguf_value(const rocq_gguf *file, int64_t i, rocq_gguf_value *value) {
    const rocq__gguf_index *index = &file->values;
    const unsigned char *end = file->head + index->at[i + 1];
    rocq_gguf_value v;
    memset(&v, 0, sizeof v);
    v.key = rocq__gguf_name(file, index, i);
    const unsigned char *p = (const unsigned char *)v.key.data + v.key.length;
    uint32_t type = UINT32_MAX;
    uint64_t count = 1;
    if (end - p >= 4) {
        type = rocq__gguf_u32(p);
        p += 4;
    }
    if (type == ROCQ_GGUF_ARRAY && end - p >= 12) {
        v.is_array = true;
        type = rocq__gguf_u32(p);
        count = rocq__gguf_u64(p + 4);
        p += 12;
    }
    const int64_t size = rocq__gguf_type_size(type);
    if (size == 0 || count > (uint64_t)(end - p) / (uint64_t)size) {
        return rocq__gguf_bad(file, index, i, index->at[i], ROCQ_E_CORRUPT,
                              "the file has changed since it was opened, type is now", type);
    }
    v.type = (rocq_gguf_type)type;
    v.count = (int64_t)count;
    v.data = p;
    v.end = type == ROCQ_GGUF_STRING ? end : p + v.count * size;
    *value = v;
    return ROCQ_OK;
}

static rocq_result rocq__gguf_tensor(const rocq_gguf *file, int64_t i, rocq_gguf_tensor *tensor) {
    const rocq__gguf_index *index = &file->tensors;
    const int64_t at = index->at[i], end = index->at[i + 1];
    rocq_gguf_tensor t;
    memset(&t, 0, sizeof t);
    t.name = rocq__gguf_name(file, index, i);
    const unsigned char *p = (const unsigned char *)t.name.data + t.name.length;
    const int64_t left = end - at - 8 - t.name.length;
    const uint32_t n_dims = left >= 4 ? rocq__gguf_u32(p) : UINT32_MAX;
    if (n_dims > 4 || left != 4 + (int64_t)n_dims * 8 + 4 + 8) {
        return rocq__gguf_bad(file, index, i, at, ROCQ_E_CORRUPT,
                              "the file has changed since it was opened, dimensions are now",
                              n_dims);
    }
    int64_t count = 1, elems, bytes;
    t.n_dims = ROCQ__MAX((int32_t)n_dims, 1); // none is a single element, as in ggml
    for (uint32_t d = 0; d < 4; d++) {
        const uint64_t ne = d < n_dims ? rocq__gguf_u64(p + 4 + d * 8) : 1;
        if (ne < 1 || ne > INT64_MAX) {
            return rocq__gguf_bad(file, index, i, at, ROCQ_E_CORRUPT, "bad dimension", ne);
        }
        t.ne[d] = (int64_t)ne;
        if (!rocq__mul(count, t.ne[d], &count)) {
            return rocq__gguf_bad(file, index, i, at, ROCQ_E_OVERFLOW,
                                  "too many elements, with dimension", ne);
        }
    }
    p += 4 + n_dims * 8;
    t.type_id = rocq__gguf_u32(p);
    t.type_name = rocq__gguf_type_name(t.type_id);
    // In C++ it is undefined to convert a number that does not fit the enum's bits.
    t.known = t.type_id < 1024 && rocq__block_of((rocq_format)t.type_id, &elems, &bytes);
    if (t.known) {
        t.format = (rocq_format)t.type_id;
        if (t.ne[0] % elems != 0) {
            return rocq__gguf_bad(file, index, i, at, ROCQ_E_CORRUPT,
                                  "rows are not whole blocks, elements", (uint64_t)t.ne[0]);
        }
        if (!rocq__mul(count / elems, bytes, &t.size)) {
            return rocq__gguf_bad(file, index, i, at, ROCQ_E_OVERFLOW, "too many bytes, elements",
                                  (uint64_t)count);
        }
    }
    const uint64_t offset = rocq__gguf_u64(p + 4);
    if (offset % (uint64_t)file->alignment != 0) {
        return rocq__gguf_bad(file, index, i, at, ROCQ_E_ALIGNMENT,
                              "data offset is not a multiple of the file's alignment", offset);
    }
    // Data takes at least one byte, even if its type, and so its size, is unknown.
    int64_t last = 0;
    if (offset > INT64_MAX || !rocq__add(file->data_start, (int64_t)offset, &t.offset) ||
        !rocq__add(t.offset, ROCQ__MAX(t.size, 1), &last) || last > file->size) {
        return rocq__gguf_bad(file, index, i, at, ROCQ_E_TRUNCATED,
                              "the file ends before the data, at offset", offset);
    }
    *tensor = t;
    return ROCQ_OK;
}

// Decodes every tensor once, by rising offset, which leaves index->order sorted by offset.
static rocq_result rocq__gguf_check_tensors(const rocq_gguf *file) {
    const rocq__gguf_index *index = &file->tensors;
    int64_t end = 0;
    rocq__gguf_sort(file, index, rocq__gguf_by_offset);
    for (int64_t i = 0; i < index->count; i++) {
        const int64_t n = index->order[i];
        rocq_gguf_tensor t;
        ROCQ__TRY(rocq__gguf_tensor(file, n, &t));
        if (t.offset < end) {
            return rocq__gguf_bad(file, index, n, index->at[n], ROCQ_E_CORRUPT,
                                  "data overlaps that of number", (uint64_t)index->order[i - 1]);
        }
        end = t.offset + ROCQ__MAX(t.size, 1);
    }
    return ROCQ_OK;
}

static rocq_result rocq__gguf_parse(rocq_gguf *file) {
    rocq__gguf_scan scan;
    memset(&scan, 0, sizeof scan);
    scan.file = file;
    const uint64_t magic = rocq__gguf_take(&scan, 4);
    if (magic != 0x46554747u)
        rocq__gguf_stop(&scan, ROCQ_E_MAGIC, "not a GGUF file, it starts with", magic);
    const uint64_t version = rocq__gguf_take(&scan, 4);
    if (version != 0 && (version & 0xffffu) == 0) {
        rocq__gguf_stop(&scan, ROCQ_E_VERSION, "a big-endian file, its version reads", version);
    } else if (version != 2 && version != 3) {
        rocq__gguf_stop(&scan, ROCQ_E_VERSION, "the version is neither 2 nor 3", version);
    }
    file->version = (int32_t)(version & 3);
    const uint64_t n_tensors = rocq__gguf_take(&scan, 8);
    const uint64_t n_values = rocq__gguf_take(&scan, 8);
    const uint64_t left = (uint64_t)(file->size - scan.at);
    if (n_tensors > left / ROCQ__GGUF_MIN_TENSOR) {
        rocq__gguf_stop(&scan, ROCQ_E_TRUNCATED, "the file ends before this many tensors",
                        n_tensors);
    }
    if (n_values > left / ROCQ__GGUF_MIN_VALUE) {
        rocq__gguf_stop(&scan, ROCQ_E_TRUNCATED, "the file ends before this many values", n_values);
    }
    if (scan.result != ROCQ_OK) return scan.result;

    ROCQ__TRY(rocq__gguf_index_alloc(file, &file->values, "value", (int64_t)n_values));
    ROCQ__TRY(rocq__gguf_index_alloc(file, &file->tensors, "tensor", (int64_t)n_tensors));
    rocq__gguf_index *kinds[2] = {&file->values, &file->tensors};
    for (int k = 0; k < 2; k++) {
        scan.index = kinds[k];
        for (int64_t i = 0; i < kinds[k]->count; i++) {
            kinds[k]->at[i] = scan.at;
            scan.record = i;
            if (k == 0) rocq__gguf_scan_value(&scan);
            else rocq__gguf_scan_tensor(&scan);
            if (scan.result != ROCQ_OK) return scan.result;
        }
        kinds[k]->at[kinds[k]->count] = scan.at;
    }

    ROCQ__TRY(rocq__gguf_sort_names(file, &file->values));
    file->alignment = ROCQ__GGUF_ALIGNMENT;
    const int64_t i = rocq__gguf_find(file, &file->values, "general.alignment");
    if (i >= 0) {
        rocq_gguf_value value;
        uint64_t alignment = 0;
        ROCQ__TRY(rocq__gguf_value(file, i, &value));
        if (value.is_array || rocq_gguf_value_u64(&value, 0, &alignment) != ROCQ_OK ||
            alignment < 8 || alignment > ROCQ__GGUF_MAX_ALIGNMENT ||
            (alignment & (alignment - 1)) != 0) {
            return rocq__gguf_bad(file, &file->values, i, file->values.at[i], ROCQ_E_CORRUPT,
                                  "not a power of two from 8 to 1048576", alignment);
        }
        file->alignment = (int64_t)alignment;
    }
    // This cannot overflow, since all bytes before scan.at are in memory.
    file->data_start = (scan.at + file->alignment - 1) & -file->alignment;
    ROCQ__TRY(rocq__gguf_check_tensors(file));
    return rocq__gguf_sort_names(file, &file->tensors);
}

ROCQ_DEF rocq_result rocq_gguf_open(rocq_ctx *ctx, rocq_gguf **file, const rocq_gguf_desc *desc) {
    if (file) *file = NULL;
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!file || !desc) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "gguf_open: file or desc is NULL");
    if ((desc->path != NULL) + (desc->data != NULL) + (desc->read != NULL) != 1) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                          "gguf_open: set exactly one of path, data and read");
    }
    if (!desc->path && (desc->size < 0 || (desc->data && (uint64_t)desc->size > SIZE_MAX))) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "gguf_open: size is %lld", (long long)desc->size);
    }
    rocq_gguf *opened = (rocq_gguf *)rocq__alloc(ctx, (int64_t)sizeof *opened);
    if (!opened) return rocq__fail(ctx, ROCQ_E_MEMORY, "gguf_open: no memory");
    memset(opened, 0, sizeof *opened);
    opened->ctx = ctx;
    rocq_result result = rocq__gguf_open_source(opened, desc);
    if (result == ROCQ_OK) result = rocq__gguf_parse(opened);
    if (result != ROCQ_OK) rocq_gguf_close(&opened);
    *file = opened;
    return result;
}

ROCQ_DEF void rocq_gguf_close(rocq_gguf **file) {
    if (!file || !*file) return;
    rocq_gguf *closed = *file;
    rocq_ctx *ctx = closed->ctx;
#if ROCQ__HAS_MMAP
#if defined(_WIN32)
    if (closed->map) UnmapViewOfFile(closed->map);
#else
    if (closed->map) munmap(closed->map, (size_t)closed->size);
#endif
#endif
#if ROCQ__HAS_STDIO
    if (closed->stream) fclose(closed->stream);
#endif
    rocq__free(ctx, closed->window);
    rocq__free(ctx, closed->values.at);
    rocq__free(ctx, closed->values.order);
    rocq__free(ctx, closed->tensors.at);
    rocq__free(ctx, closed->tensors.order);
    rocq__free(ctx, closed);
    *file = NULL;
}

ROCQ_DEF int32_t rocq_gguf_version(const rocq_gguf *file) {
    return file ? file->version : 0;
}

ROCQ_DEF int64_t rocq_gguf_value_count(const rocq_gguf *file) {
    return file ? file->values.count : 0;
}

ROCQ_DEF int64_t rocq_gguf_tensor_count(const rocq_gguf *file) {
    return file ? file->tensors.count : 0;
}

ROCQ_DEF rocq_result rocq_gguf_value_at(const rocq_gguf *file, int64_t index,
                                        rocq_gguf_value *value) {
    if (!file || !value || index < 0 || index >= file->values.count) return ROCQ_E_ARGUMENT;
    return rocq__gguf_value(file, index, value);
}

ROCQ_DEF rocq_result rocq_gguf_find_value(const rocq_gguf *file, const char *key,
                                          rocq_gguf_value *value) {
    if (!file || !key || !value) return ROCQ_E_ARGUMENT;
    const int64_t i = rocq__gguf_find(file, &file->values, key);
    return i < 0 ? ROCQ_E_NOT_FOUND : rocq__gguf_value(file, i, value);
}

ROCQ_DEF rocq_result rocq_gguf_tensor_at(const rocq_gguf *file, int64_t index,
                                         rocq_gguf_tensor *tensor) {
    if (!file || !tensor || index < 0 || index >= file->tensors.count) return ROCQ_E_ARGUMENT;
    return rocq__gguf_tensor(file, index, tensor);
}

ROCQ_DEF rocq_result rocq_gguf_find_tensor(const rocq_gguf *file, const char *name,
                                           rocq_gguf_tensor *tensor) {
    if (!file || !name || !tensor) return ROCQ_E_ARGUMENT;
    const int64_t i = rocq__gguf_find(file, &file->tensors, name);
    return i < 0 ? ROCQ_E_NOT_FOUND : rocq__gguf_tensor(file, i, tensor);
}

// -- values --

// Element i of any integer type, sign-extended to 64 bits; *negative: it is below zero.
static rocq_result rocq__gguf_integer(const rocq_gguf_value *value, int64_t i, uint64_t *bits,
                                      bool *negative) {
    if (!value || i < 0 || i >= value->count) return ROCQ_E_ARGUMENT;
    const uint32_t type = (uint32_t)value->type;
    if (type > ROCQ_GGUF_I32 && type != ROCQ_GGUF_U64 && type != ROCQ_GGUF_I64) return ROCQ_E_TYPE;
    const int64_t size = rocq__gguf_type_size(type);
    *bits = 0;
    memcpy(bits, (const unsigned char *)value->data + i * size, (size_t)size);
    const uint64_t sign = (uint64_t)1 << (size * 8 - 1);
    *negative = type % 2 == 1 && (*bits & sign) != 0; // the signed types have the odd numbers
    if (*negative) *bits |= ~(sign - 1);
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_gguf_value_i64(const rocq_gguf_value *value, int64_t i, int64_t *out) {
    uint64_t bits;
    bool negative;
    if (!out) return ROCQ_E_ARGUMENT;
    ROCQ__TRY(rocq__gguf_integer(value, i, &bits, &negative));
    if (!negative && bits > INT64_MAX) return ROCQ_E_TYPE;
    *out = (int64_t)bits;
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_gguf_value_u64(const rocq_gguf_value *value, int64_t i, uint64_t *out) {
    uint64_t bits;
    bool negative;
    if (!out) return ROCQ_E_ARGUMENT;
    ROCQ__TRY(rocq__gguf_integer(value, i, &bits, &negative));
    if (negative) return ROCQ_E_TYPE;
    *out = bits;
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_gguf_value_f64(const rocq_gguf_value *value, int64_t i, double *out) {
    if (!value || !out || i < 0 || i >= value->count) return ROCQ_E_ARGUMENT;
    if (value->type == ROCQ_GGUF_F64) {
        memcpy(out, (const unsigned char *)value->data + i * 8, 8);
        return ROCQ_OK;
    }
    if (value->type != ROCQ_GGUF_F32) return ROCQ_E_TYPE;
    *out = (double)rocq__bits_f32(rocq__gguf_u32((const unsigned char *)value->data + i * 4));
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_gguf_value_bool(const rocq_gguf_value *value, int64_t i, bool *out) {
    if (!value || !out || i < 0 || i >= value->count) return ROCQ_E_ARGUMENT;
    if (value->type != ROCQ_GGUF_BOOL) return ROCQ_E_TYPE;
    *out = ((const unsigned char *)value->data)[i] != 0;
    return ROCQ_OK;
}

// Reads the string at *p and moves *p behind it; false if it would reach past the value's end.
static bool rocq__gguf_step(const rocq_gguf_value *value, const unsigned char **p,
                            rocq_str *out) {
    const unsigned char *end = (const unsigned char *)value->end;
    if (end - *p < 8) return false;
    const uint64_t length = rocq__gguf_u64(*p);
    if (length > (uint64_t)(end - *p - 8)) return false;
    out->data = (const char *)*p + 8;
    out->length = (int64_t)length;
    *p += 8 + length;
    return true;
}

ROCQ_DEF rocq_result rocq_gguf_value_str(const rocq_gguf_value *value, int64_t i, rocq_str *out) {
    if (!value || !out || i < 0 || i >= value->count) return ROCQ_E_ARGUMENT;
    if (value->type != ROCQ_GGUF_STRING) return ROCQ_E_TYPE;
    const unsigned char *p = (const unsigned char *)value->data;
    rocq_str text;
    for (int64_t k = 0; k <= i; k++) {
        if (!rocq__gguf_step(value, &p, &text))
            return ROCQ_E_CORRUPT; // the file has changed since it was opened
    }
    *out = text;
    return ROCQ_OK;
}

ROCQ_DEF bool rocq_str_equal(rocq_str s, const char *text) {
    if (!text || s.length < 0 || (uint64_t)s.length != strlen(text)) return false;
    return s.length == 0 || (s.data && memcmp(s.data, text, (size_t)s.length) == 0);
}

ROCQ_DEF rocq_result rocq_gguf_next_str(const rocq_gguf_value *value, const void **cursor,
                                        rocq_str *out) {
    if (!value || !cursor || !out) return ROCQ_E_ARGUMENT;
    if (value->type != ROCQ_GGUF_STRING) return ROCQ_E_TYPE;
    const unsigned char *p = (const unsigned char *)(*cursor ? *cursor : value->data);
    if (p == value->end) return ROCQ_E_NOT_FOUND;
    if (p < (const unsigned char *)value->data) return ROCQ_E_ARGUMENT;
    if (!rocq__gguf_step(value, &p, out)) return ROCQ_E_CORRUPT; // the file has changed
    *cursor = p;
    return ROCQ_OK;
}

#define ROCQ__GGUF_GET(name, type)                                                                 \
    ROCQ_DEF rocq_result rocq_gguf_get_##name(const rocq_gguf *file, const char *key, type *out) { \
        rocq_gguf_value value;                                                                     \
        if (!out) return ROCQ_E_ARGUMENT;                                                          \
        ROCQ__TRY(rocq_gguf_find_value(file, key, &value));                                        \
        const rocq_result result =                                                                 \
            value.is_array ? ROCQ_E_TYPE : rocq_gguf_value_##name(&value, 0, out);                 \
        if (result == ROCQ_OK) return result;                                                      \
        return rocq__fail(file->ctx, result, "gguf: '%s' does not read as " #name, key);           \
    }
ROCQ__GGUF_GET(i64, int64_t)
ROCQ__GGUF_GET(u64, uint64_t)
ROCQ__GGUF_GET(f64, double)
ROCQ__GGUF_GET(bool, bool)
ROCQ__GGUF_GET(str, rocq_str)
#undef ROCQ__GGUF_GET

// -- tensor data --

enum {
    ROCQ__SLICE = 1 << 16, // bytes; threads read whole slices, one or several at a time
    ROCQ__SLICES_ALONE = 4 // up to so many the calling thread reads alone, without waking others
};

// One read that threads share. Thread 0 is the calling one; only it uses meanwhile.
typedef struct rocq__reading {
    const rocq__source *source;
    unsigned char *dst;
    int64_t offset, size;
    void (*meanwhile)(void *arg); // NULL once it has been called
    void *arg;
    int32_t failed; // (atomic)
} rocq__reading;

static void rocq__read_meanwhile(rocq__reading *r) {
    if (r->meanwhile) r->meanwhile(r->arg);
    r->meanwhile = NULL;
}

static void rocq__read_slices(void *arg, int64_t begin, int64_t end, int32_t thread) {
    rocq__reading *r = (rocq__reading *)arg;
    const rocq__source *source = r->source;
    const int64_t at = begin * ROCQ__SLICE, size = ROCQ__MIN(end * ROCQ__SLICE, r->size) - at;
    if (thread == 0) rocq__read_meanwhile(r);
    if (source->data) {
        memcpy(r->dst + at, source->data + r->offset + at, (size_t)size);
    } else if (!source->read(r->dst + at, r->offset + at, size, source->user)) {
        rocq__store32(&r->failed, 1);
    }
}

// Reads bytes, which the caller knows to be within the source, with all threads of the context if
// the source allows that. The calling thread first calls meanwhile, unless that is NULL, while the
// others read. Returns false if a read failed.
static bool rocq__source_read(rocq_ctx *ctx, const rocq__source *source, int64_t offset,
                              int64_t size, void *dst, void (*meanwhile)(void *arg), void *arg) {
    rocq__reading r;
    const int64_t n = (size + ROCQ__SLICE - 1) / ROCQ__SLICE;
    r.source = source;
    r.dst = (unsigned char *)dst;
    r.offset = offset;
    r.size = size;
    r.meanwhile = meanwhile;
    r.arg = arg;
    r.failed = 0;
    if ((source->data || source->shared) && n > ROCQ__SLICES_ALONE) {
        if (ctx->desc.run_tasks) rocq__read_meanwhile(&r); // task 0 may be on any thread
        rocq__parallel(ctx, n, 1, rocq__read_slices, &r);
    } else {
        rocq__read_slices(&r, 0, n, 0);
    }
    rocq__read_meanwhile(&r); // if the others left no slice for the calling thread
    return r.failed == 0;
}

static rocq_result rocq__read_failed(rocq_ctx *ctx, rocq_str name, int64_t offset, int64_t size) {
    const rocq__label label = rocq__label_of(name.data, name.length);
    return rocq__fail(ctx, ROCQ_E_IO, "gguf: tensor '%s': cannot read %lld bytes at byte %lld",
                      label.text, (long long)size, (long long)offset);
}

static rocq_result rocq__gguf_unread(rocq_ctx *ctx, const char *op, const char *name,
                                     uint32_t type_id) {
    return rocq__fail(ctx, ROCQ_E_FORMAT, "%s: tensor '%s' has the type %s (id %lu), which rocq "
                      "does not read", op, name, rocq__gguf_type_name(type_id),
                      (unsigned long)type_id);
}

ROCQ_DEF rocq_result rocq_gguf_read(rocq_ctx *ctx, const rocq_gguf *file,
                                    const rocq_gguf_tensor *tensor, void *dst) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!file || !tensor || !dst) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "gguf_read: file, tensor or dst is NULL");
    }
    const rocq__label name = rocq__label_of(tensor->name.data, tensor->name.length);
    if (!tensor->known) return rocq__gguf_unread(ctx, "gguf_read", name.text, tensor->type_id);
    int64_t end;
    if (!rocq__add(tensor->offset, tensor->size, &end) || end > file->size) {
        return rocq__fail(ctx, ROCQ_E_BOUNDS, "gguf_read: tensor '%s' is not of this file",
                          name.text);
    }
    if (!rocq__source_read(ctx, &file->source, tensor->offset, tensor->size, dst, NULL, NULL)) {
        return rocq__read_failed(ctx, tensor->name, tensor->offset, tensor->size);
    }
    return ROCQ_OK;
}

// A tensor to load, and where its bytes are in a source.
typedef struct rocq__entry {
    rocq_tensor t;
    rocq_str name;  // for messages
    int64_t offset;
    int64_t size;   // bytes to copy; 0: the tensor is ready
    int64_t index;  // in the caller's list
} rocq__entry;

// Settings and progress of one rocq_gguf_load.
typedef struct rocq__loading {
    rocq_ctx *ctx;
    rocq_gguf_load_desc desc; // with defaults filled in
    int64_t done, total; // bytes
} rocq__loading;

// Counts bytes as done, tells the caller, and fails if the caller wants to stop.
static rocq_result rocq__load_step(rocq__loading *load, int64_t bytes) {
    load->done += bytes;
    if (rocq__load32(&load->ctx->cancelled)) {
        return rocq__fail(load->ctx, ROCQ_E_CANCELLED, "gguf_load: cancelled");
    }
    if (load->desc.progress && !load->desc.progress(load->done, load->total, load->desc.user)) {
        return rocq__fail(load->ctx, ROCQ_E_CANCELLED,
                          "gguf_load: stopped after %lld of %lld bytes", (long long)load->done,
                          (long long)load->total);
    }
    return ROCQ_OK;
}

// For a GPU context; defined at >>hip_memory.
static rocq_result rocq__upload_hip(rocq_ctx *ctx, const rocq__source *source,
                                    const rocq__entry *entry);
static rocq_result rocq__load_hip(rocq__loading *load, const rocq__source *source,
                                  const rocq__entry *entries, int64_t n_entries);

static rocq_result rocq__load_cpu(rocq__loading *load, const rocq__source *source,
                                  const rocq__entry *entries, int64_t n_entries) {
    for (int64_t k = 0; k < n_entries; k++) {
        const rocq__entry *p = &entries[k];
        for (int64_t at = 0, n; at < p->size; at += n) {
            char *dst = (char *)rocq_tensor_data(&p->t) + at;
            n = ROCQ__MIN(p->size - at, load->desc.piece_bytes);
            if (!rocq__source_read(load->ctx, source, p->offset + at, n, dst, NULL, NULL)) {
                return rocq__read_failed(load->ctx, p->name, p->offset + at, n);
            }
            ROCQ__TRY(rocq__load_step(load, n));
        }
    }
    return ROCQ_OK;
}

// Fills entry for a tensor of the file. On the CPU it is a view of the file, with size 0, if the
// whole file is in memory, the data aligned and copy not set. Else the caller takes memory for it.
static rocq_result rocq__entry_init(rocq_ctx *ctx, const char *op, const rocq_gguf *file,
                                    const rocq_gguf_tensor *found, bool copy, rocq__entry *entry) {
    const rocq__label name = rocq__label_of(found->name.data, found->name.length);
    memset(entry, 0, sizeof *entry);
    entry->name = found->name;
    entry->offset = found->offset;
    if (!found->known) return rocq__gguf_unread(ctx, op, name.text, found->type_id);
    if (file->whole && ctx->backend == ROCQ_BACKEND_CPU && !copy) {
        // The cast drops const, as rocq_buffer has none; ops do not write to their inputs.
        void *data = (void *)(uintptr_t)(file->head + found->offset);
        const rocq_buffer view = rocq_buffer_from_host(data, found->size);
        const rocq_result result =
            rocq_tensor_init(&entry->t, &view, 0, found->format, found->n_dims, found->ne);
        if (result != ROCQ_E_ALIGNMENT) return result;
    }
    if (ctx->recording) {
        return rocq__fail(ctx, ROCQ_E_STATE, "%s: a graph is being recorded", op);
    }
    entry->size = found->size;
    ROCQ__TRY(rocq_tensor_init(&entry->t, NULL, 0, found->format, found->n_dims, found->ne));
    if (rocq__on_gpu(ctx) && rocq_get_format_info(found->format)->block_elems > 1) {
        entry->t.layout = ROCQ_LAYOUT_PLANAR;
    }
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_gguf_upload(rocq_ctx *ctx, const rocq_gguf *file, const char *name,
                                      rocq_tensor *tensor, rocq_buffer *buffer) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!file || !name || !tensor || !buffer) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                          "gguf_upload: file, name, tensor or buffer is NULL");
    }
    rocq_gguf_tensor found;
    rocq__entry entry;
    rocq_buffer taken;
    memset(&taken, 0, sizeof taken);
    rocq_result result = rocq_gguf_find_tensor(file, name, &found);
    if (result != ROCQ_OK) {
        return rocq__fail(ctx, result, "gguf_upload: '%s': %s", name, rocq_result_message(result));
    }
    ROCQ__TRY(rocq__entry_init(ctx, "gguf_upload", file, &found, false, &entry));
    if (entry.size > 0) {
        ROCQ__TRY(rocq_buffer_alloc(ctx, &taken, entry.size));
        entry.t.buffer = taken;
        result = rocq__on_gpu(ctx) ? rocq__upload_hip(ctx, &file->source, &entry)
                                   : rocq_gguf_read(ctx, file, &found, taken.host);
        if (result != ROCQ_OK) {
            rocq_buffer_free(ctx, &taken);
            return result;
        }
    }
    *tensor = entry.t;
    *buffer = taken;
    return ROCQ_OK;
}

// Orders entries by offset in the file, and entries of the same offset by index.
static int rocq__entry_compare(const void *a, const void *b, const void *user) {
    (void)user;
    const rocq__entry *p = (const rocq__entry *)a, *q = (const rocq__entry *)b;
    if (p->offset != q->offset) return p->offset < q->offset ? -1 : 1;
    return p->index < q->index ? -1 : p->index > q->index;
}

// Looks the tensors up and sorts them by offset. Those that are views count as done.
static rocq_result rocq__load_find(rocq__loading *load, const rocq_gguf *file, rocq__entry *entries,
                                   int64_t n_entries) {
    rocq_ctx *ctx = load->ctx;
    for (int64_t i = 0; i < n_entries; i++) {
        const char *const *name = load->desc.names ? &load->desc.names[i] : NULL;
        rocq_gguf_tensor found;
        const rocq_result result =
            name ? rocq_gguf_find_tensor(file, *name, &found)
                 : rocq_gguf_tensor_at(file, i, &found);
        if (result != ROCQ_OK) {
            return rocq__fail(ctx, result, "gguf_load: tensor %lld '%s': %s", (long long)i,
                              name && *name ? *name : "", rocq_result_message(result));
        }
        ROCQ__TRY(rocq__entry_init(ctx, "gguf_load", file, &found, load->desc.copy, &entries[i]));
        entries[i].index = i;
        if (!rocq__add(load->total, found.size, &load->total)) {
            return rocq__fail(ctx, ROCQ_E_OVERFLOW, "gguf_load: more bytes than can be counted");
        }
        if (entries[i].size == 0) load->done += found.size;
    }
    rocq__heapsort(entries, n_entries, (int64_t)sizeof *entries, rocq__entry_compare, NULL);
    return ROCQ_OK;
}

// Takes one buffer for all that has to be copied, each tensor aligned to 256 bytes, as a buffer of
// its own would be. A tensor that is listed twice gets memory only once.
static rocq_result rocq__load_place(rocq__loading *load, rocq__entry *entries, int64_t n_entries,
                                    rocq_buffer *buffer) {
    int64_t size = 0;
    for (int64_t k = 0; k < n_entries; k++) {
        rocq__entry *p = &entries[k];
        if (p->size == 0) continue;
        if (k > 0 && p->offset == p[-1].offset) {
            p->t.offset = p[-1].t.offset;
            load->total -= p->size;
            p->size = 0;
            continue;
        }
        if (!rocq__round_up(size, 256, &p->t.offset) || !rocq__add(p->t.offset, p->size, &size)) {
            return rocq__fail(load->ctx, ROCQ_E_OVERFLOW, "gguf_load: too large for a buffer");
        }
    }
    if (size == 0) return ROCQ_OK;
    ROCQ__TRY(rocq_buffer_alloc(load->ctx, buffer, size));
    for (int64_t k = 0; k < n_entries; k++) {
        if (!entries[k].t.buffer.host) entries[k].t.buffer = *buffer;
    }
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_gguf_load(rocq_ctx *ctx, const rocq_gguf *file,
                                    const rocq_gguf_load_desc *desc, rocq_tensor *tensors,
                                    rocq_buffer *buffer) {
    rocq__loading load;
    rocq_buffer loaded;
    int64_t size;
    if (!ctx) return ROCQ_E_ARGUMENT;
    memset(&load, 0, sizeof load);
    memset(&loaded, 0, sizeof loaded);
    load.ctx = ctx;
    if (desc) load.desc = *desc;
    if (load.desc.piece_bytes == 0) load.desc.piece_bytes = 4 << 20;
    if (load.desc.n_pieces == 0) load.desc.n_pieces = 7;
    if (!file || !tensors || !buffer || load.desc.n_names < 0) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                          "gguf_load: file, tensors or buffer is NULL, or n_names %lld",
                          (long long)load.desc.n_names);
    }
    if (load.desc.piece_bytes < ROCQ__LEAST_PIECE || load.desc.piece_bytes > ROCQ__MOST_PIECE ||
        load.desc.n_pieces < 3 || load.desc.n_pieces > ROCQ__MAX_PIECES) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                          "gguf_load: n_pieces %d (3 to %d), piece_bytes %lld (%d to %d)",
                          (int)load.desc.n_pieces, (int)ROCQ__MAX_PIECES,
                          (long long)load.desc.piece_bytes, (int)ROCQ__LEAST_PIECE,
                          (int)ROCQ__MOST_PIECE);
    }
    const int64_t n = load.desc.names ? load.desc.n_names : file->tensors.count;
    rocq__entry *entries = NULL;
    if (rocq__mul(n, (int64_t)sizeof *entries, &size))
        entries = (rocq__entry *)rocq__alloc(ctx, size);
    if (!entries) return rocq__fail(ctx, ROCQ_E_MEMORY, "gguf_load: no memory for a list");
    rocq_result result = rocq__load_find(&load, file, entries, n);
    if (result == ROCQ_OK) result = rocq__load_place(&load, entries, n, &loaded);
    if (result == ROCQ_OK) result = rocq__load_step(&load, 0);
    if (result == ROCQ_OK && loaded.size > 0) {
        result = rocq__on_gpu(ctx) ? rocq__load_hip(&load, &file->source, entries, n)
                                   : rocq__load_cpu(&load, &file->source, entries, n);
    }
    for (int64_t k = 0; result == ROCQ_OK && k < n; k++) tensors[entries[k].index] = entries[k].t;
    if (result == ROCQ_OK) *buffer = loaded;
    else rocq_buffer_free(ctx, &loaded);
    rocq__free(ctx, entries);
    return result;
}

// ---------------------------------------------------------------------------------------------
// >>gguf: files written whole
// ---------------------------------------------------------------------------------------------
// A rocq_file is written under another name, the part, which replaces path when it is complete: at
// every moment path is the old file or all of the new one. First come the functions that depend on
// the system; those that return bool return false, with errno, on failure.

#if ROCQ__HAS_STDIO
typedef struct rocq__place {
    bool special;         // something other than a regular file: a pipe, a device
    uint32_t permissions; // of the file that exists, or 0; POSIX only
} rocq__place;

// Finds out what is at a path that is to be written. Returns false if it may not be written.
static bool rocq__file_place(rocq_ctx *ctx, const char *path, rocq__place *place) {
    memset(place, 0, sizeof *place);
    errno = ENOENT;
    if (!path[0]) return false;
#if defined(_WIN32)
    BY_HANDLE_FILE_INFORMATION info;
    wchar_t *wide = rocq__wide(ctx, path);
    if (!wide) return false;
    // No access (0) is asked for, so that this works on a file that others have open. The backup
    // flag is needed to open a directory.
    const HANDLE handle =
        CreateFileW(wide, 0, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL,
                    OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS, NULL);
    rocq__free(ctx, wide);
    if (handle == INVALID_HANDLE_VALUE) return true; // no such file
    place->special = GetFileType(handle) != FILE_TYPE_DISK;
    const bool known = !place->special && GetFileInformationByHandle(handle, &info);
    CloseHandle(handle);
    errno = EISDIR;
    if (known && (info.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY)) return false;
    errno = EACCES;
    return !known || !(info.dwFileAttributes & FILE_ATTRIBUTE_READONLY);
#else
    struct stat info;
    (void)ctx;
    if (stat(path, &info) != 0) return errno == ENOENT;
    errno = EISDIR;
    if (S_ISDIR(info.st_mode)) return false;
    place->special = !S_ISREG(info.st_mode);
    place->permissions = (uint32_t)info.st_mode & 0777u;
    return access(path, W_OK) == 0;
#endif
}

// Flushes the data to the disk. It must be there before the file gets its name, in case of a crash.
static bool rocq__file_sync(FILE *stream) {
    if (fflush(stream) != 0) return false;
#if defined(_WIN32)
    return _commit(_fileno(stream)) == 0;
#else
    return fsync(fileno(stream)) == 0 || errno == EINVAL; // EINVAL: it cannot be flushed
#endif
}

static bool rocq__file_replace(rocq_ctx *ctx, const char *from, const char *to) {
#if defined(_WIN32)
    wchar_t *source = rocq__wide(ctx, from), *target = rocq__wide(ctx, to);
    const bool moved = source && target &&
                       MoveFileExW(source, target, MOVEFILE_REPLACE_EXISTING);
    rocq__free(ctx, source);
    rocq__free(ctx, target);
    if (!moved) errno = EACCES; // the usual reason: the file is open
    return moved;
#else
    (void)ctx;
    return rename(from, to) == 0;
#endif
}

static void rocq__file_remove(rocq_ctx *ctx, const char *path) {
#if defined(_WIN32)
    wchar_t *wide = rocq__wide(ctx, path);
    if (wide) DeleteFileW(wide);
    rocq__free(ctx, wide);
#else
    (void)ctx;
    unlink(path);
#endif
}

struct rocq_file {
    rocq_ctx *ctx;
    FILE *stream;
    int error;         // errno of the first failure, or 0
    bool direct;       // path itself is written, because it is special; there is no part
    char *path, *part; // in memory behind the struct
};

static rocq_result rocq__file_failed(rocq_ctx *ctx, const char *path, int error) {
    return rocq__fail(ctx, error == ENOMEM ? ROCQ_E_MEMORY : ROCQ_E_IO, "cannot write '%s': %s",
                      path, strerror(error));
}

enum { ROCQ__PART = 24 }; // bytes that the part's name may add to the path

// Creates the part under the first name that is free: PATH.part, PATH.part1 to PATH.part99.
static bool rocq__file_open_part(rocq_file *file) {
    const size_t room = strlen(file->path) + ROCQ__PART;
    errno = EEXIST;
    for (int i = 0; !file->stream && errno == EEXIST && i < 100; i++) {
        char number[16] = "";
        if (i > 0) snprintf(number, sizeof number, "%d", i);
        snprintf(file->part, room, "%s.part%s", file->path, number);
        file->stream = rocq__fopen(file->ctx, file->part, ROCQ__CREATE);
    }
    return file->stream != NULL;
}

// Opens the stream, or sets error. Refuses descriptors 1 and 2, which a file gets if stdout or
// stderr is closed: what the program prints would go into the file.
static void rocq__file_open(rocq_file *file) {
    rocq__place place;
    bool good = rocq__file_place(file->ctx, file->path, &place);
    file->direct = place.special;
    if (good && file->direct) {
        file->stream = rocq__fopen(file->ctx, file->path, ROCQ__WRITE);
        good = file->stream != NULL;
    } else if (good) {
        good = rocq__file_open_part(file);
    }
#if !defined(_WIN32)
    if (good && (fileno(file->stream) == 1 || fileno(file->stream) == 2)) {
        errno = EBADF;
        good = false;
    } else if (good && !file->direct && place.permissions != 0) {
        good = chmod(file->part, (mode_t)place.permissions) == 0;
    }
#endif
    if (!good) file->error = errno;
}
#endif // ROCQ__HAS_STDIO

ROCQ_DEF rocq_result rocq_file_open(rocq_ctx *ctx, rocq_file **file, const char *path) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (file) *file = NULL;
    if (!file || !path) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "file_open: file or path is NULL");
    }
#if ROCQ__HAS_STDIO
    const int64_t length = (int64_t)strlen(path), size = (int64_t)sizeof(rocq_file);
    rocq_file *created = (rocq_file *)rocq__alloc(ctx, size + 2 * length + 1 + ROCQ__PART);
    if (!created) return rocq__fail(ctx, ROCQ_E_MEMORY, "file_open: no memory");
    memset(created, 0, sizeof *created);
    created->ctx = ctx;
    created->path = (char *)created + size;
    created->part = created->path + length + 1;
    memcpy(created->path, path, (size_t)length + 1);
    rocq__file_open(created);
    if (created->error != 0) {
        const int error = created->error;
        if (created->stream) rocq_file_close(&created, false);
        else rocq__free(ctx, created);
        return rocq__file_failed(ctx, path, error);
    }
    *file = created;
    return ROCQ_OK;
#else
    return rocq__fail(ctx, ROCQ_E_UNSUPPORTED, "'%s': built with ROCQ_NO_STDIO, no paths", path);
#endif
}

ROCQ_DEF bool rocq_file_write(const void *src, int64_t size, void *file) {
#if ROCQ__HAS_STDIO
    rocq_file *f = (rocq_file *)file;
    if (!f || f->error != 0) return false;
    errno = EINVAL;
    if (size == 0) return true;
    if (size > 0 && fwrite(src, 1, (size_t)size, f->stream) == (size_t)size) return true;
    f->error = errno;
#else
    (void)src;
    (void)size;
    (void)file;
#endif
    return false;
}

ROCQ_DEF rocq_result rocq_file_close(rocq_file **file, bool keep) {
    if (!file || !*file) return ROCQ_E_ARGUMENT;
    rocq_result result = ROCQ_OK;
#if ROCQ__HAS_STDIO
    rocq_file *f = *file;
    rocq_ctx *ctx = f->ctx;
    if (keep && f->error == 0 && !f->direct && !rocq__file_sync(f->stream)) f->error = errno;
    if (fclose(f->stream) != 0 && f->error == 0) f->error = errno;
    const bool whole = keep && f->error == 0;
    if (whole && !f->direct && !rocq__file_replace(ctx, f->part, f->path)) f->error = errno;
    if (!f->direct && (!whole || f->error != 0)) rocq__file_remove(ctx, f->part);
    if (keep && f->error != 0) result = rocq__file_failed(ctx, f->path, f->error);
    rocq__free(ctx, f);
    *file = NULL;
#else
    (void)keep;
#endif
    return result;
}

// ---------------------------------------------------------------------------------------------
// >>gguf: writer
// ---------------------------------------------------------------------------------------------
// The writer keeps each value and tensor as an encoded record, a block of memory each. The header
// starts with their numbers, so it is written only with the first tensor's data, or at the end if
// there is none. Tensor data is not kept: it goes straight to the file or to the callback.

typedef struct rocq__gguf_record {
    unsigned char *bytes; // name first, as in the file
    int64_t size;
    int64_t name_length;
    int64_t data_size; // of a tensor
} rocq__gguf_record;

typedef struct rocq__gguf_records {
    rocq__gguf_record *items;
    int64_t count;
    int32_t capacity;
} rocq__gguf_records;

struct rocq_gguf_writer {
    rocq_ctx *ctx;
    bool (*write)(const void *src, int64_t size, void *user);
    void *user;
    rocq_file *file; // NULL: the caller's callback writes
    int64_t alignment;
    rocq__gguf_records values, tensors;
    int64_t data_size; // of the tensors added, each padded to the alignment
    int64_t n_written; // tensors whose data is written
    bool header_written;
    bool lacks;         // a set or add_tensor failed, so the file would lack that value or tensor
    rocq_result failed; // the first write that failed; what was written is then useless
};

static rocq_result rocq__gguf_reserve(rocq_ctx *ctx, rocq__gguf_records *records, int64_t n) {
    int64_t count;
    if (n <= records->capacity - records->count) return ROCQ_OK;
    void *items = NULL;
    if (rocq__add(records->count, n, &count)) {
        items = rocq__array_grow(ctx, records->items, &records->capacity, count,
                                 (int64_t)sizeof *records->items);
    }
    if (!items) {
        return rocq__fail(ctx, ROCQ_E_MEMORY, "gguf: no memory for %lld records", (long long)n);
    }
    records->items = (rocq__gguf_record *)items;
    return ROCQ_OK;
}

// The number of the record with this name, or -1.
static int64_t rocq__gguf_record_of(const rocq__gguf_records *records, const void *name,
                                    int64_t length) {
    for (int64_t i = 0; i < records->count; i++) {
        const rocq__gguf_record *r = &records->items[i];
        if (r->name_length == length && memcmp(r->bytes + 8, name, (size_t)length) == 0) return i;
    }
    return -1;
}

// Adds a record, or replaces the one of the same name. The caller has made room.
static void rocq__gguf_put_record(rocq_ctx *ctx, rocq__gguf_records *records,
                                  rocq__gguf_record record) {
    int64_t i = rocq__gguf_record_of(records, record.bytes + 8, record.name_length);
    if (i < 0) i = records->count++;
    else rocq__free(ctx, records->items[i].bytes);
    records->items[i] = record;
}

static void rocq__gguf_free_records(rocq_ctx *ctx, rocq__gguf_records *records) {
    for (int64_t i = 0; i < records->count; i++) rocq__free(ctx, records->items[i].bytes);
    rocq__free(ctx, records->items);
}

static unsigned char *rocq__gguf_store(unsigned char *p, const void *src, int64_t size) {
    if (size > 0) memcpy(p, src, (size_t)size);
    return p + size;
}

static unsigned char *rocq__gguf_store_u32(unsigned char *p, uint32_t value) {
    return rocq__gguf_store(p, &value, 4);
}

static unsigned char *rocq__gguf_store_u64(unsigned char *p, uint64_t value) {
    return rocq__gguf_store(p, &value, 8);
}

// Allocates a record and writes its name. *p is where its other `size` bytes go.
static rocq_result rocq__gguf_new_record(rocq_ctx *ctx, rocq__gguf_record *record,
                                         const char *name, int64_t size, unsigned char **p) {
    memset(record, 0, sizeof *record);
    record->name_length = (int64_t)strlen(name);
    if (!rocq__add(8 + record->name_length, size, &record->size)) {
        return rocq__fail(ctx, ROCQ_E_OVERFLOW, "gguf: '%s' is too large", name);
    }
    record->bytes = (unsigned char *)rocq__alloc(ctx, record->size);
    if (!record->bytes) {
        return rocq__fail(ctx, ROCQ_E_MEMORY, "gguf: no memory for the %lld bytes of '%s'",
                          (long long)record->size, name);
    }
    *p = rocq__gguf_store_u64(record->bytes, (uint64_t)record->name_length);
    *p = rocq__gguf_store(*p, name, record->name_length);
    return ROCQ_OK;
}

// Fails if the header cannot be changed any more.
static rocq_result rocq__gguf_check_writer(const rocq_gguf_writer *writer) {
    if (!writer) return ROCQ_E_ARGUMENT;
    if (writer->header_written) {
        return rocq__fail(writer->ctx, ROCQ_E_STATE, "gguf: the header is written already");
    }
    return ROCQ_OK;
}

static rocq_result rocq__gguf_set(rocq_gguf_writer *writer, const char *key, rocq_gguf_type type,
                                  bool is_array, int64_t count, const void *data) {
    rocq_ctx *ctx = writer->ctx;
    const int64_t elem_size = rocq__gguf_type_size((uint32_t)type);
    if (!key || !key[0] || strlen(key) > ROCQ__GGUF_MAX_KEY) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                          "gguf_writer_set: length of the key is not 1 to 65535");
    }
    if (elem_size == 0 || count < 0 || (!is_array && count != 1) || (count > 0 && !data)) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                          "gguf_writer_set: '%s': type %d, count %lld, data %p", key, (int)type,
                          (long long)count, data);
    }
    const rocq_str *strings = (const rocq_str *)data;
    int64_t size;
    bool fits = rocq__mul(count, elem_size, &size);
    for (int64_t i = 0; fits && i < count; i++) {
        if (type == ROCQ_GGUF_BOOL && ((const unsigned char *)data)[i] > 1) {
            return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                              "gguf_writer_set: '%s': bool %lld is neither 0 nor 1", key,
                              (long long)i);
        }
        if (type != ROCQ_GGUF_STRING) continue;
        if (strings[i].length < 0 || (strings[i].length > 0 && !strings[i].data)) {
            return rocq__fail(
                ctx, ROCQ_E_ARGUMENT, "gguf_writer_set: '%s': string %lld has length %lld, data %p",
                key, (long long)i, (long long)strings[i].length, (const void *)strings[i].data);
        }
        fits = rocq__add(size, strings[i].length, &size);
    }
    if (!fits || !rocq__add(size, is_array ? 16 : 4, &size)) {
        return rocq__fail(ctx, ROCQ_E_OVERFLOW, "gguf_writer_set: '%s' is too large", key);
    }
    rocq__gguf_record record;
    unsigned char *p;
    ROCQ__TRY(rocq__gguf_reserve(ctx, &writer->values, 1));
    ROCQ__TRY(rocq__gguf_new_record(ctx, &record, key, size, &p));
    if (is_array) p = rocq__gguf_store_u32(p, ROCQ_GGUF_ARRAY);
    p = rocq__gguf_store_u32(p, (uint32_t)type);
    if (is_array) p = rocq__gguf_store_u64(p, (uint64_t)count);
    if (type != ROCQ_GGUF_STRING) {
        rocq__gguf_store(p, data, count * elem_size);
    } else {
        for (int64_t i = 0; i < count; i++) {
            p = rocq__gguf_store_u64(p, (uint64_t)strings[i].length);
            p = rocq__gguf_store(p, strings[i].data, strings[i].length);
        }
    }
    rocq__gguf_put_record(ctx, &writer->values, record);
    return ROCQ_OK;
}

static void rocq__gguf_writer_free(rocq_gguf_writer *writer) {
    rocq_ctx *ctx = writer->ctx;
    rocq__gguf_free_records(ctx, &writer->values);
    rocq__gguf_free_records(ctx, &writer->tensors);
    rocq__free(ctx, writer);
}

ROCQ_DEF rocq_result rocq_gguf_writer_open(rocq_ctx *ctx, rocq_gguf_writer **writer,
                                           const rocq_gguf_writer_desc *desc) {
    if (writer) *writer = NULL;
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!writer || !desc || !desc->path == !desc->write) {
        return rocq__fail(
            ctx, ROCQ_E_ARGUMENT,
            "gguf_writer_open: writer or desc is NULL, or not exactly one of path and write set");
    }
    const int32_t alignment = desc->alignment ? desc->alignment : ROCQ__GGUF_ALIGNMENT;
    if (alignment < 8 || alignment > ROCQ__GGUF_MAX_ALIGNMENT ||
        (alignment & (alignment - 1)) != 0) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                          "gguf_writer_open: alignment %d is not a power of two from 8 to 1048576",
                          (int)alignment);
    }
    rocq_gguf_writer *created = (rocq_gguf_writer *)rocq__alloc(ctx, (int64_t)sizeof *created);
    if (!created) return rocq__fail(ctx, ROCQ_E_MEMORY, "gguf_writer_open: no memory");
    memset(created, 0, sizeof *created);
    created->ctx = ctx;
    created->alignment = alignment;
    created->write = desc->write;
    created->user = desc->user;
    rocq_result result = ROCQ_OK;
    if (alignment != ROCQ__GGUF_ALIGNMENT) {
        const uint32_t value = (uint32_t)alignment;
        result = rocq__gguf_set(created, "general.alignment", ROCQ_GGUF_U32, false, 1, &value);
    }
    if (result == ROCQ_OK && desc->path) {
        result = rocq_file_open(ctx, &created->file, desc->path);
        created->write = rocq_file_write;
        created->user = created->file;
    }
    if (result != ROCQ_OK) rocq__gguf_writer_free(created);
    else *writer = created;
    return result;
}

// Sets writer->lacks if a call failed that should have put something into the header.
static rocq_result rocq__gguf_put(rocq_gguf_writer *writer, rocq_result result) {
    if (writer && result != ROCQ_OK) writer->lacks = true;
    return result;
}

static rocq_result rocq__gguf_set_checked(rocq_gguf_writer *writer, const char *key,
                                          rocq_gguf_type type, bool is_array, int64_t count,
                                          const void *data) {
    ROCQ__TRY(rocq__gguf_check_writer(writer));
    if (key && strcmp(key, "general.alignment") == 0) {
        return rocq__fail(writer->ctx, ROCQ_E_ARGUMENT,
                          "gguf_writer_set: '%s' is set by the writer's desc", key);
    }
    return rocq__gguf_set(writer, key, type, is_array, count, data);
}

ROCQ_DEF rocq_result rocq_gguf_writer_set(rocq_gguf_writer *writer, const char *key,
                                          rocq_gguf_type type, bool is_array, int64_t count,
                                          const void *data) {
    return rocq__gguf_put(
        writer, rocq__gguf_set_checked(writer, key, type, is_array, count, data));
}

ROCQ_DEF rocq_result rocq_gguf_writer_set_u32(rocq_gguf_writer *writer, const char *key,
                                              uint32_t value) {
    return rocq_gguf_writer_set(writer, key, ROCQ_GGUF_U32, false, 1, &value);
}

ROCQ_DEF rocq_result rocq_gguf_writer_set_f32(rocq_gguf_writer *writer, const char *key,
                                              float value) {
    return rocq_gguf_writer_set(writer, key, ROCQ_GGUF_F32, false, 1, &value);
}

ROCQ_DEF rocq_result rocq_gguf_writer_set_bool(rocq_gguf_writer *writer, const char *key,
                                               bool value) {
    const unsigned char byte = value;
    return rocq_gguf_writer_set(writer, key, ROCQ_GGUF_BOOL, false, 1, &byte);
}

ROCQ_DEF rocq_result rocq_gguf_writer_set_str(rocq_gguf_writer *writer, const char *key,
                                              const char *value) {
    rocq_str text;
    text.data = value;
    text.length = value ? (int64_t)strlen(value) : -1; // which rocq_gguf_writer_set refuses
    return rocq_gguf_writer_set(writer, key, ROCQ_GGUF_STRING, false, 1, &text);
}

static rocq_result rocq__gguf_set_from(rocq_gguf_writer *writer, const rocq_gguf *file) {
    ROCQ__TRY(rocq__gguf_check_writer(writer));
    rocq_ctx *ctx = writer->ctx;
    if (!file) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "gguf_writer_set_from: file is NULL");
    const rocq__gguf_index *index = &file->values;
    const int64_t skipped = rocq__gguf_find(file, index, "general.alignment");
    // All records are copied before the first is added, so that a failure changes nothing.
    rocq__gguf_records copies;
    memset(&copies, 0, sizeof copies);
    ROCQ__TRY(rocq__gguf_reserve(ctx, &writer->values, index->count));
    rocq_result result = rocq__gguf_reserve(ctx, &copies, index->count);
    for (int64_t i = 0; result == ROCQ_OK && i < index->count; i++) {
        if (i == skipped) continue;
        rocq__gguf_record record;
        memset(&record, 0, sizeof record);
        record.size = index->at[i + 1] - index->at[i];
        record.name_length = rocq__gguf_name(file, index, i).length;
        record.bytes = (unsigned char *)rocq__alloc(ctx, record.size);
        if (!record.bytes) {
            result =
                rocq__fail(ctx, ROCQ_E_MEMORY, "gguf_writer_set_from: no memory for %lld bytes",
                           (long long)record.size);
            break;
        }
        rocq__gguf_store(record.bytes, file->head + index->at[i], record.size);
        copies.items[copies.count++] = record;
    }
    if (result == ROCQ_OK) {
        for (int64_t i = 0; i < copies.count; i++) {
            rocq__gguf_put_record(ctx, &writer->values, copies.items[i]);
        }
        copies.count = 0;
    }
    rocq__gguf_free_records(ctx, &copies);
    return result;
}

ROCQ_DEF rocq_result rocq_gguf_writer_set_from(rocq_gguf_writer *writer, const rocq_gguf *file) {
    return rocq__gguf_put(writer, rocq__gguf_set_from(writer, file));
}

static rocq_result rocq__gguf_add_tensor(rocq_gguf_writer *writer, const char *name,
                                         rocq_format format, int32_t n_dims, const int64_t *ne) {
    ROCQ__TRY(rocq__gguf_check_writer(writer));
    rocq_ctx *ctx = writer->ctx;
    if (!name || strlen(name) > 63) { // what ggml's own reader takes
        return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                          "gguf_writer_add_tensor: name is NULL or longer than 63");
    }
    if (rocq__gguf_record_of(&writer->tensors, name, (int64_t)strlen(name)) >= 0) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "gguf_writer_add_tensor: '%s' was added before",
                          name);
    }
    rocq_tensor shape;
    const rocq_result result = rocq_tensor_init(&shape, NULL, 0, format, n_dims, ne);
    if (result != ROCQ_OK)
        return rocq__fail(ctx, result, "gguf_writer_add_tensor: '%s': bad shape or format", name);
    rocq__gguf_record record;
    unsigned char *p;
    int64_t data_size;
    if (!rocq__add(writer->data_size, rocq_tensor_size(&shape), &data_size) ||
        !rocq__round_up(data_size, writer->alignment, &data_size)) {
        return rocq__fail(ctx, ROCQ_E_OVERFLOW,
                          "gguf_writer_add_tensor: '%s' makes the file too large", name);
    }
    ROCQ__TRY(rocq__gguf_reserve(ctx, &writer->tensors, 1));
    ROCQ__TRY(rocq__gguf_new_record(ctx, &record, name, 4 + (int64_t)n_dims * 8 + 4 + 8, &p));
    record.data_size = rocq_tensor_size(&shape);
    p = rocq__gguf_store_u32(p, (uint32_t)n_dims);
    for (int32_t d = 0; d < n_dims; d++) p = rocq__gguf_store_u64(p, (uint64_t)ne[d]);
    p = rocq__gguf_store_u32(p, (uint32_t)format);
    rocq__gguf_store_u64(p, (uint64_t)writer->data_size);
    rocq__gguf_put_record(ctx, &writer->tensors, record);
    writer->data_size = data_size;
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_gguf_writer_add_tensor(rocq_gguf_writer *writer, const char *name,
                                                 rocq_format format, int32_t n_dims,
                                                 const int64_t *ne) {
    return rocq__gguf_put(writer, rocq__gguf_add_tensor(writer, name, format, n_dims, ne));
}

// Writes src, then as many zeros as are missing from `end` to the next multiple of the alignment.
static rocq_result rocq__gguf_emit(rocq_gguf_writer *writer, const void *src, int64_t size,
                                   int64_t end) {
    static const unsigned char zeros[256] = {0};
    bool ok = size == 0 || writer->write(src, size, writer->user);
    for (int64_t rest = (-end) & (writer->alignment - 1), n; ok && rest > 0; rest -= n) {
        n = ROCQ__MIN(rest, (int64_t)sizeof zeros);
        ok = writer->write(zeros, n, writer->user);
    }
    if (ok) return ROCQ_OK;
#if ROCQ__HAS_STDIO
    if (writer->file) {
        const rocq_file *file = writer->file;
        return writer->failed = rocq__file_failed(writer->ctx, file->path, file->error);
    }
#endif
    writer->failed = ROCQ_E_IO;
    return rocq__fail(writer->ctx, ROCQ_E_IO, "gguf: the caller's write failed");
}

static rocq_result rocq__gguf_emit_header(rocq_gguf_writer *writer) {
    unsigned char start[24], *p = start;
    p = rocq__gguf_store(p, "GGUF", 4);
    p = rocq__gguf_store_u32(p, 3);
    p = rocq__gguf_store_u64(p, (uint64_t)writer->tensors.count);
    rocq__gguf_store_u64(p, (uint64_t)writer->values.count);
    int64_t end = (int64_t)sizeof start;
    rocq_result result = rocq__gguf_emit(writer, start, end, 0);
    const rocq__gguf_records *const kinds[2] = {&writer->values, &writer->tensors};
    for (int k = 0; k < 2; k++) {
        for (int64_t i = 0; result == ROCQ_OK && i < kinds[k]->count; i++) {
            result = rocq__gguf_emit(writer, kinds[k]->items[i].bytes, kinds[k]->items[i].size, 0);
            end += kinds[k]->items[i].size; // cannot overflow: all records are in memory
        }
    }
    writer->header_written = true;
    return result == ROCQ_OK ? rocq__gguf_emit(writer, NULL, 0, end) : result;
}

ROCQ_DEF rocq_result rocq_gguf_writer_write(rocq_gguf_writer *writer, const void *data,
                                            int64_t size) {
    if (!writer) return ROCQ_E_ARGUMENT;
    rocq_ctx *ctx = writer->ctx;
    if (writer->failed != ROCQ_OK) {
        return rocq__fail(ctx, ROCQ_E_STATE, "gguf_writer_write: an earlier write failed");
    }
    if (writer->n_written >= writer->tensors.count) {
        return rocq__fail(ctx, ROCQ_E_STATE, "gguf_writer_write: all %lld tensors are written",
                          (long long)writer->n_written);
    }
    const rocq__gguf_record *tensor = &writer->tensors.items[writer->n_written];
    if (!data || size != tensor->data_size) {
        const char *name = (const char *)tensor->bytes + 8;
        return rocq__fail(
            ctx, ROCQ_E_ARGUMENT, "gguf_writer_write: '%.*s' has %lld bytes, not %lld, data %p",
            (int)tensor->name_length, name, (long long)tensor->data_size, (long long)size, data);
    }
    rocq_result result = writer->header_written ? ROCQ_OK : rocq__gguf_emit_header(writer);
    if (result == ROCQ_OK) result = rocq__gguf_emit(writer, data, size, size);
    if (result == ROCQ_OK) writer->n_written++;
    return result;
}

ROCQ_DEF rocq_result rocq_gguf_writer_close(rocq_gguf_writer **writer) {
    if (!writer || !*writer) return ROCQ_E_ARGUMENT;
    rocq_gguf_writer *w = *writer;
    rocq_result result = w->failed;
    if (result == ROCQ_OK && w->n_written < w->tensors.count) {
        result =
            rocq__fail(w->ctx, ROCQ_E_STATE, "gguf_writer_close: %lld of %lld tensors are missing",
                       (long long)(w->tensors.count - w->n_written), (long long)w->tensors.count);
    }
    if (result == ROCQ_OK && w->file && w->lacks) {
        result =
            rocq__fail(w->ctx, ROCQ_E_STATE,
                       "gguf_writer_close: a set or add_tensor failed: the path is left as it is");
    }
    if (result == ROCQ_OK && !w->header_written) result = rocq__gguf_emit_header(w);
    if (w->file) {
        const rocq_result placed = rocq_file_close(&w->file, result == ROCQ_OK);
        if (result == ROCQ_OK) result = placed;
    }
    rocq__gguf_writer_free(w);
    *writer = NULL;
    return result;
}

// ---------------------------------------------------------------------------------------------
// >>precision: what an op computes in
// ---------------------------------------------------------------------------------------------

typedef enum rocq__chip_kind { ROCQ__ANY_CHIP, ROCQ__AVX2, ROCQ__RDNA3 } rocq__chip_kind;
typedef enum rocq__w_kind { ROCQ__ANY_W, ROCQ__CODED_W, ROCQ__F32_W } rocq__w_kind;

// With AUTO an op computes in the precision of the first rule that fits, or in F32 if none does.
typedef struct rocq__precision_rule {
    rocq_op op;
    rocq_backend backend;
    rocq__chip_kind chips;
    int64_t columns; // the rule is for products of at most so many columns
    rocq__w_kind w;  // CODED: formats whose codes the backend multiplies as integers
    rocq_precision precision;
    const char *why;
} rocq__precision_rule;

static const rocq__precision_rule rocq__precision_rules[] = {
    // One thread, K = M = 2048, 1 and 64 columns of Q4_0 Q8_0 Q4_K Q6_K: with AVX2 INT8 is 1.4 to
    // 10 times as fast; as portable code F32 is 0.8 to 1.2 (clang) or 1.4 to 9 times (gcc) as fast.
    {ROCQ_OP_MATMUL, ROCQ_BACKEND_CPU, ROCQ__AVX2, INT64_MAX, ROCQ__CODED_W, ROCQ_PRECISION_INT8,
     "AVX2 multiplies w's codes as they are, several times as fast as decoded ones"},
    {ROCQ_OP_MATMUL, ROCQ_BACKEND_CPU, ROCQ__ANY_CHIP, INT64_MAX, ROCQ__CODED_W, ROCQ_PRECISION_F32,
     "without AVX2, integer products are no faster than those in F32"},
    {ROCQ_OP_MATMUL, ROCQ_BACKEND_CPU, ROCQ__ANY_CHIP, INT64_MAX, ROCQ__ANY_W, ROCQ_PRECISION_F32,
     "w has no integer codes"},
    {ROCQ_OP_MATMUL, ROCQ_BACKEND_GPU, ROCQ__ANY_CHIP, ROCQ_K_FEW, ROCQ__CODED_W,
     ROCQ_PRECISION_INT8,
     "few columns wait for w to be read, whose codes dot4 multiplies as they are"},
    {ROCQ_OP_MATMUL, ROCQ_BACKEND_GPU, ROCQ__ANY_CHIP, ROCQ_K_FEW, ROCQ__ANY_W, ROCQ_PRECISION_F32,
     "few columns wait for w to be read, and w has no integer codes"},
    {ROCQ_OP_MATMUL, ROCQ_BACKEND_GPU, ROCQ__ANY_CHIP, INT64_MAX, ROCQ__F32_W, ROCQ_PRECISION_F32,
     "weights of F32 are not rounded"},
    // WMMA: 512 operations a clock and compute unit in both (AMD matrix instruction calculator).
    {ROCQ_OP_MATMUL, ROCQ_BACKEND_GPU, ROCQ__RDNA3, INT64_MAX, ROCQ__ANY_W, ROCQ_PRECISION_F16,
     "RDNA3's matrix unit is as fast in F16 as in INT8, which has scales to apply besides"},
    // M = K = 4096, 32 to 4096 columns of Q4_0 Q8_0 Q4_K Q6_K: 1.3 to 1.9 times as fast as INT8.
    {ROCQ_OP_MATMUL, ROCQ_BACKEND_GPU, ROCQ__ANY_CHIP, INT64_MAX, ROCQ__ANY_W, ROCQ_PRECISION_F16,
     "the F16 kernels were the faster ones where both were measured, on an NVIDIA H200"},
    {ROCQ_OP_ATTENTION, ROCQ_BACKEND_GPU, ROCQ__ANY_CHIP, INT64_MAX, ROCQ__ANY_W,
     ROCQ_PRECISION_F16, "the matrix unit takes F16, and scores and values are sums in F32"},
    {ROCQ_OP_CONV, ROCQ_BACKEND_GPU, ROCQ__ANY_CHIP, INT64_MAX, ROCQ__ANY_W, ROCQ_PRECISION_F16,
     "the matrix unit takes F16, with sums in F32"},
};

typedef struct rocq__choice {
    rocq_precision precision;
    const char *why;
} rocq__choice;

static int32_t rocq__target_of(const rocq_ctx *ctx);
static int rocq__k_int8_format(rocq_format format);

// Whether the backend multiplies a format's codes as integers.
static bool rocq__is_coded(rocq_backend backend, rocq_format format) {
    if (backend == ROCQ_BACKEND_GPU) return rocq__k_int8_format(format) >= 0;
    return rocq__codec_of(format)->unpack != NULL;
}

static rocq__choice rocq__precision_rule_for(const rocq_ctx *ctx, rocq_backend backend,
                                             rocq_op op, rocq_format w, int64_t columns) {
    rocq__choice choice = {ROCQ_PRECISION_F32, "the op has no other form"};
    for (size_t i = 0; i < sizeof rocq__precision_rules / sizeof rocq__precision_rules[0]; i++) {
        const rocq__precision_rule *r = &rocq__precision_rules[i];
        if (r->op != op || r->backend != backend || columns > r->columns) continue;
        if (r->chips == ROCQ__AVX2 && !(ROCQ__HAS_AVX2 && ctx->has_simd)) continue;
        if (r->chips == ROCQ__RDNA3 && rocq__target_of(ctx) == 0) continue;
        if (r->w == ROCQ__CODED_W && !rocq__is_coded(backend, w)) continue;
        if (r->w == ROCQ__F32_W && w != ROCQ_F32) continue;
        choice.precision = r->precision;
        choice.why = r->why;
        break;
    }
    return choice;
}

// The precision asked for: by the params, else by the context; AUTO if by neither.
static rocq_precision rocq__asked(const rocq_ctx *ctx, rocq_precision of_params) {
    return of_params != ROCQ_PRECISION_AUTO ? of_params : ctx->desc.precision;
}

// The precision of a product of so many columns, and the reason. of_params is its params' field.
static rocq__choice rocq__columns_choice(const rocq_ctx *ctx, rocq_backend backend,
                                         rocq_precision of_params, rocq_format w,
                                         int64_t columns) {
    const rocq_precision asked = rocq__asked(ctx, of_params);
    rocq__choice choice;
    choice.precision = asked;
    choice.why = of_params ? "the params ask for it" : "the context asks for it";
    if (asked == ROCQ_PRECISION_AUTO) {
        return rocq__precision_rule_for(ctx, backend, ROCQ_OP_MATMUL, w, columns);
    }
    if (asked == ROCQ_PRECISION_F16 && backend == ROCQ_BACKEND_GPU && columns <= ROCQ_K_FEW) {
        choice.precision = ROCQ_PRECISION_F32;
        choice.why = "F16 is asked for, but few columns wait for w to be read: F32 costs no time";
    }
    return choice;
}

// The same for the product of x with w, which is p->w or p->w2.
static rocq__choice rocq__product_choice(const rocq_ctx *ctx, rocq_backend backend,
                                         const rocq_matmul_params *p, const rocq_tensor *w) {
    return rocq__columns_choice(ctx, backend, p->precision, w->format, p->x->ne[1]);
}

// The format in which a GPU's products of this precision read x.
static rocq_format rocq__operand_format(rocq_precision precision) {
    return precision == ROCQ_PRECISION_INT8  ? ROCQ_Q8_0
           : precision == ROCQ_PRECISION_F16 ? ROCQ_F16
                                             : ROCQ_F32;
}

ROCQ_DEF rocq_format rocq_operand_format(const rocq_ctx *ctx, rocq_format w, int64_t n,
                                         rocq_precision precision) {
    // The CPU encodes F32 itself while it packs x.
    if (!ctx || ctx->backend != ROCQ_BACKEND_GPU) return ROCQ_F32;
    const rocq__choice choice = rocq__columns_choice(ctx, ROCQ_BACKEND_GPU, precision, w, n);
    return rocq__operand_format(choice.precision);
}

static double rocq__nmse_bound(rocq_precision precision) {
    return precision == ROCQ_PRECISION_INT8 ? 5e-4 : precision == ROCQ_PRECISION_F16 ? 1e-5 : 1e-6;
}

// ---------------------------------------------------------------------------------------------
// >>cpu_vector: eight floats at once
// ---------------------------------------------------------------------------------------------
// What the CPU's floating-point kernels are written in: a rocq__v8 is eight floats, one register of
// AVX2 or two of NEON. A kernel stands first in plain C, as the reference and as what runs where
// there is neither; then with rocq__v8, under a name that ends in _simd. On x86-64 those are
// compiled for AVX2, whatever the file is compiled for, and run only where rocq_open has found it.
//   load store set1         eight floats at an address; one float in all lanes
//   set1_f16                one F16 at an address in all lanes
//   from_f16 from_bf16      eight numbers at an address, widened exactly
//   from_i8                 the same of int8
//   from_4bit               the lower or upper 4 bits of eight bytes at an address, less 8
//   round_f16 to_f16        to the nearest F16 and back; to eight F16 at an address
//   add sub mul div         lane by lane
//   fma fnma                a b + c and c - a b, rounded once
//   max min                 of a and b; b where either is NaN
//   swap                    of each two neighbours
//   round                   to the nearest integer, halves to even
//   pow2                    2^k for integers k from -126 to 127
//   zero_below              v, but 0 in the lanes where x < limit
//   sum                     of the lanes: ((0 + 4) + (1 + 5)) + ((2 + 6) + (3 + 7))
//   sum4                    of each of four: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), to out[4]
//   turn                    eight vectors, as rows of 8 x 8 floats, become its columns

#define ROCQ__HAS_V8 (ROCQ__HAS_AVX2 || ROCQ__HAS_NEON)

#if ROCQ__HAS_V8
#if defined(__clang__)
#if __has_feature(address_sanitizer) // whose checks, unrolled, double the time to compile
#define ROCQ__UNROLL
#else
#define ROCQ__UNROLL _Pragma("clang loop unroll(full)")
#endif
#else
#define ROCQ__UNROLL _Pragma("GCC unroll 16")
#endif
#endif

#if ROCQ__HAS_AVX2
#define ROCQ__SIMD ROCQ__TARGET_AVX2
#define ROCQ__V8 ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE
typedef __m256 rocq__v8;
ROCQ__V8 rocq__v8 rocq__v8_load(const float *p) { return _mm256_loadu_ps(p); }
ROCQ__V8 void rocq__v8_store(float *p, rocq__v8 v) { _mm256_storeu_ps(p, v); }
ROCQ__V8 rocq__v8 rocq__v8_set1(float x) { return _mm256_set1_ps(x); }
ROCQ__V8 rocq__v8 rocq__v8_set1_f16(const void *p) {
    uint16_t half;
    memcpy(&half, p, sizeof half);
    return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}
ROCQ__V8 rocq__v8 rocq__v8_from_f16(const void *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
ROCQ__V8 rocq__v8 rocq__v8_from_bf16(const void *p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
ROCQ__V8 rocq__v8 rocq__v8_from_i8(const void *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
ROCQ__V8 rocq__v8 rocq__v8_from_4bit(const void *p, const bool upper) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)p);
    const __m128i moved = upper ? _mm_srli_epi16(bytes, 4) : bytes;
    const __m128i code = _mm_sub_epi8(_mm_and_si128(moved, _mm_set1_epi8(15)), _mm_set1_epi8(8));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(code));
}
ROCQ__V8 rocq__v8 rocq__v8_round_f16(rocq__v8 v) {
    return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
ROCQ__V8 void rocq__v8_to_f16(void *p, rocq__v8 v) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
ROCQ__V8 rocq__v8 rocq__v8_add(rocq__v8 a, rocq__v8 b) { return _mm256_add_ps(a, b); }
ROCQ__V8 rocq__v8 rocq__v8_sub(rocq__v8 a, rocq__v8 b) { return _mm256_sub_ps(a, b); }
ROCQ__V8 rocq__v8 rocq__v8_mul(rocq__v8 a, rocq__v8 b) { return _mm256_mul_ps(a, b); }
ROCQ__V8 rocq__v8 rocq__v8_div(rocq__v8 a, rocq__v8 b) { return _mm256_div_ps(a, b); }
ROCQ__V8 rocq__v8 rocq__v8_max(rocq__v8 a, rocq__v8 b) { return _mm256_max_ps(a, b); }
ROCQ__V8 rocq__v8 rocq__v8_min(rocq__v8 a, rocq__v8 b) { return _mm256_min_ps(a, b); }
ROCQ__V8 rocq__v8 rocq__v8_fma(rocq__v8 a, rocq__v8 b, rocq__v8 c) {
    return _mm256_fmadd_ps(a, b, c);
}
ROCQ__V8 rocq__v8 rocq__v8_fnma(rocq__v8 a, rocq__v8 b, rocq__v8 c) {
    return _mm256_fnmadd_ps(a, b, c);
}
ROCQ__V8 rocq__v8 rocq__v8_swap(rocq__v8 v) { return _mm256_permute_ps(v, 0xb1); }
ROCQ__V8 rocq__v8 rocq__v8_round(rocq__v8 v) {
    return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
ROCQ__V8 rocq__v8 rocq__v8_pow2(rocq__v8 k) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(k), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
ROCQ__V8 rocq__v8 rocq__v8_zero_below(rocq__v8 v, rocq__v8 x, rocq__v8 limit) {
    return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), v);
}
ROCQ__V8 float rocq__v8_sum(rocq__v8 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehdup_ps(s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehl_ps(s, s)));
}
ROCQ__V8 void rocq__v8_sum4(float *out, rocq__v8 a, rocq__v8 b, rocq__v8 c, rocq__v8 d) {
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
ROCQ__V8 void rocq__v8_turn(rocq__v8 *v) {
    __m256 pair[8];
    ROCQ__UNROLL
    for (int i = 0; i < 4; i++) { // rows i and i + 4, their halves exchanged
        pair[i] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x20);
        pair[i + 4] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x31);
    }
    ROCQ__UNROLL
    for (int i = 0; i < 8; i += 4) { // four columns each
        const __m256 a = _mm256_unpacklo_ps(pair[i], pair[i + 1]);
        const __m256 b = _mm256_unpackhi_ps(pair[i], pair[i + 1]);
        const __m256 c = _mm256_unpacklo_ps(pair[i + 2], pair[i + 3]);
        const __m256 d = _mm256_unpackhi_ps(pair[i + 2], pair[i + 3]);
        v[i] = _mm256_shuffle_ps(a, c, 0x44);
        v[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
        v[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
        v[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
}
#elif ROCQ__HAS_NEON
#define ROCQ__SIMD
#define ROCQ__V8 ROCQ__ALWAYS_INLINE
typedef struct rocq__v8 {
    float32x4_t lo, hi;
} rocq__v8;
ROCQ__V8 rocq__v8 rocq__v8_of(float32x4_t lo, float32x4_t hi) {
    const rocq__v8 v = {lo, hi};
    return v;
}
ROCQ__V8 rocq__v8 rocq__v8_load(const float *p) {
    return rocq__v8_of(vld1q_f32(p), vld1q_f32(p + 4));
}
ROCQ__V8 void rocq__v8_store(float *p, rocq__v8 v) {
    vst1q_f32(p, v.lo);
    vst1q_f32(p + 4, v.hi);
}
ROCQ__V8 rocq__v8 rocq__v8_set1(float x) { return rocq__v8_of(vdupq_n_f32(x), vdupq_n_f32(x)); }
ROCQ__V8 rocq__v8 rocq__v8_set1_f16(const void *p) {
    uint16_t half;
    memcpy(&half, p, sizeof half);
    const float32x4_t all = vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half)));
    return rocq__v8_of(all, all);
}
ROCQ__V8 uint16x8_t rocq__v8_halves(const void *p) {
    return vreinterpretq_u16_u8(vld1q_u8((const uint8_t *)p));
}
ROCQ__V8 rocq__v8 rocq__v8_from_f16(const void *p) {
    const float16x8_t half = vreinterpretq_f16_u16(rocq__v8_halves(p));
    return rocq__v8_of(vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half));
}
ROCQ__V8 rocq__v8 rocq__v8_from_bf16(const void *p) {
    const uint16x8_t half = rocq__v8_halves(p);
    return rocq__v8_of(vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(half), 16)),
                       vreinterpretq_f32_u32(vshll_high_n_u16(half, 16)));
}
ROCQ__V8 rocq__v8 rocq__v8_widen_i8(int8x8_t code) {
    const int16x8_t wide = vmovl_s8(code);
    return rocq__v8_of(vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))),
                       vcvtq_f32_s32(vmovl_high_s16(wide)));
}
ROCQ__V8 rocq__v8 rocq__v8_from_i8(const void *p) {
    return rocq__v8_widen_i8(vld1_s8((const int8_t *)p));
}
ROCQ__V8 rocq__v8 rocq__v8_from_4bit(const void *p, const bool upper) {
    const uint8x8_t bytes = vld1_u8((const uint8_t *)p);
    const uint8x8_t code = upper ? vshr_n_u8(bytes, 4) : vand_u8(bytes, vdup_n_u8(15));
    return rocq__v8_widen_i8(vsub_s8(vreinterpret_s8_u8(code), vdup_n_s8(8)));
}
ROCQ__V8 rocq__v8 rocq__v8_round_f16(rocq__v8 v) {
    return rocq__v8_of(vcvt_f32_f16(vcvt_f16_f32(v.lo)), vcvt_f32_f16(vcvt_f16_f32(v.hi)));
}
ROCQ__V8 void rocq__v8_to_f16(void *p, rocq__v8 v) {
    const float16x8_t half = vcombine_f16(vcvt_f16_f32(v.lo), vcvt_f16_f32(v.hi));
    vst1q_u8((uint8_t *)p, vreinterpretq_u8_f16(half));
}
ROCQ__V8 rocq__v8 rocq__v8_add(rocq__v8 a, rocq__v8 b) {
    return rocq__v8_of(vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi));
}
ROCQ__V8 rocq__v8 rocq__v8_sub(rocq__v8 a, rocq__v8 b) {
    return rocq__v8_of(vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi));
}
ROCQ__V8 rocq__v8 rocq__v8_mul(rocq__v8 a, rocq__v8 b) {
    return rocq__v8_of(vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi));
}
ROCQ__V8 rocq__v8 rocq__v8_div(rocq__v8 a, rocq__v8 b) {
    return rocq__v8_of(vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi));
}
ROCQ__V8 rocq__v8 rocq__v8_max(rocq__v8 a, rocq__v8 b) {
    return rocq__v8_of(vbslq_f32(vcgtq_f32(a.lo, b.lo), a.lo, b.lo),
                       vbslq_f32(vcgtq_f32(a.hi, b.hi), a.hi, b.hi));
}
ROCQ__V8 rocq__v8 rocq__v8_min(rocq__v8 a, rocq__v8 b) {
    return rocq__v8_of(vbslq_f32(vcltq_f32(a.lo, b.lo), a.lo, b.lo),
                       vbslq_f32(vcltq_f32(a.hi, b.hi), a.hi, b.hi));
}
ROCQ__V8 rocq__v8 rocq__v8_fma(rocq__v8 a, rocq__v8 b, rocq__v8 c) {
    return rocq__v8_of(vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi));
}
ROCQ__V8 rocq__v8 rocq__v8_fnma(rocq__v8 a, rocq__v8 b, rocq__v8 c) {
    return rocq__v8_of(vfmsq_f32(c.lo, a.lo, b.lo), vfmsq_f32(c.hi, a.hi, b.hi));
}
ROCQ__V8 rocq__v8 rocq__v8_swap(rocq__v8 v) {
    return rocq__v8_of(vrev64q_f32(v.lo), vrev64q_f32(v.hi));
}
ROCQ__V8 rocq__v8 rocq__v8_round(rocq__v8 v) {
    return rocq__v8_of(vrndnq_f32(v.lo), vrndnq_f32(v.hi));
}
ROCQ__V8 float32x4_t rocq__v8_pow2_half(float32x4_t k) {
    const int32x4_t biased = vaddq_s32(vcvtnq_s32_f32(k), vdupq_n_s32(127));
    return vreinterpretq_f32_s32(vshlq_n_s32(biased, 23));
}
ROCQ__V8 rocq__v8 rocq__v8_pow2(rocq__v8 k) {
    return rocq__v8_of(rocq__v8_pow2_half(k.lo), rocq__v8_pow2_half(k.hi));
}
ROCQ__V8 float32x4_t rocq__v8_clear(float32x4_t v, uint32x4_t mask) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), mask));
}
ROCQ__V8 rocq__v8 rocq__v8_zero_below(rocq__v8 v, rocq__v8 x, rocq__v8 limit) {
    return rocq__v8_of(rocq__v8_clear(v.lo, vcltq_f32(x.lo, limit.lo)),
                       rocq__v8_clear(v.hi, vcltq_f32(x.hi, limit.hi)));
}
ROCQ__V8 float rocq__v8_sum(rocq__v8 v) { return vaddvq_f32(vaddq_f32(v.lo, v.hi)); }
ROCQ__V8 void rocq__v8_sum4(float *out, rocq__v8 a, rocq__v8 b, rocq__v8 c, rocq__v8 d) {
    const float32x4_t lo = vpaddq_f32(vpaddq_f32(a.lo, b.lo), vpaddq_f32(c.lo, d.lo));
    const float32x4_t hi = vpaddq_f32(vpaddq_f32(a.hi, b.hi), vpaddq_f32(c.hi, d.hi));
    vst1q_f32(out, vaddq_f32(lo, hi));
}
ROCQ__V8 void rocq__v8_turn_quarter(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d,
                                    float32x4_t *out) {
    out[0] = vzip1q_f32(vzip1q_f32(a, c), vzip1q_f32(b, d));
    out[1] = vzip2q_f32(vzip1q_f32(a, c), vzip1q_f32(b, d));
    out[2] = vzip1q_f32(vzip2q_f32(a, c), vzip2q_f32(b, d));
    out[3] = vzip2q_f32(vzip2q_f32(a, c), vzip2q_f32(b, d));
}
ROCQ__V8 void rocq__v8_turn(rocq__v8 *v) {
    float32x4_t q[4][4];
    rocq__v8_turn_quarter(v[0].lo, v[1].lo, v[2].lo, v[3].lo, q[0]);
    rocq__v8_turn_quarter(v[4].lo, v[5].lo, v[6].lo, v[7].lo, q[1]);
    rocq__v8_turn_quarter(v[0].hi, v[1].hi, v[2].hi, v[3].hi, q[2]);
    rocq__v8_turn_quarter(v[4].hi, v[5].hi, v[6].hi, v[7].hi, q[3]);
    ROCQ__UNROLL
    for (int i = 0; i < 8; i++) v[i] = rocq__v8_of(q[i / 4 * 2][i % 4], q[i / 4 * 2 + 1][i % 4]);
}
#endif

// Calls name_simd where it can run, else name_scalar.
#if ROCQ__HAS_V8
#define ROCQ__EITHER(simd, name, args) ((simd) ? name##_simd args : name##_scalar args)
#else
#define ROCQ__EITHER(simd, name, args) ((void)(simd), name##_scalar args)
#endif

// -- n elements of any format as floats --

static void rocq__decode_scalar(rocq_format format, float *dst, const void *src, int64_t n) {
    rocq__dequantize_row(format, dst, src, n);
}

static inline float rocq__f16_at(const void *p) {
    uint16_t half;
    memcpy(&half, p, sizeof half);
    return rocq__f16_to_f32(half);
}

#if ROCQ__HAS_V8
// 8 parts elements of a row from element i on, in one of the formats of KV caches. i is a multiple
// of that, and parts is 2 or 4.
ROCQ__V8 void rocq__v8_load_part(const rocq_format format, const int parts, rocq__v8 *v,
                                 const void *row, int64_t i) {
    const unsigned char *at = (const unsigned char *)row;
    rocq__v8 scale = rocq__v8_set1(0.0f);
    if (format == ROCQ_Q8_0) scale = rocq__v8_set1_f16(at += i / 32 * 34);
    if (format == ROCQ_Q4_0) scale = rocq__v8_set1_f16(at += i / 32 * 18);
    const bool upper = i % 32 >= 16;
    ROCQ__UNROLL
    for (int g = 0; g < parts; g++) {
        switch (format) {
        case ROCQ_F32: v[g] = rocq__v8_load((const float *)row + i + 8 * g); break;
        case ROCQ_F16: v[g] = rocq__v8_from_f16(at + 2 * (i + 8 * g)); break;
        case ROCQ_BF16: v[g] = rocq__v8_from_bf16(at + 2 * (i + 8 * g)); break;
        case ROCQ_Q8_0:
            v[g] = rocq__v8_mul(scale, rocq__v8_from_i8(at + 2 + i % 32 + 8 * g));
            break;
        default:
            v[g] = rocq__v8_mul(
                scale, rocq__v8_from_4bit(at + 2 + 8 * (g % 2), parts == 4 ? g > 1 : upper));
        }
    }
}

// Eight elements at a time: F16, BF16, Q8_0 and Q4_0, the formats of activations and KV caches, in
// one go, others from codes that their decoder leaves in L1. Compilers may fuse the multiplication
// and the subtraction, with the same result: where there is a min, products have at most 22 bits.
static ROCQ__SIMD void rocq__decode_simd(rocq_format format, float *dst, const void *src,
                                         int64_t n) {
    const unsigned char *bytes = (const unsigned char *)src;
    int64_t i = 0;
    if (format == ROCQ_F16) {
        for (; i + 8 <= n; i += 8) rocq__v8_store(dst + i, rocq__v8_from_f16(bytes + 2 * i));
    } else if (format == ROCQ_BF16) {
        for (; i + 8 <= n; i += 8) rocq__v8_store(dst + i, rocq__v8_from_bf16(bytes + 2 * i));
    } else if (format == ROCQ_Q8_0) {
        for (; i < n; i += 32, bytes += 34) {
            const rocq__v8 scale = rocq__v8_set1(rocq__f16_at(bytes));
            ROCQ__UNROLL
            for (int g = 0; g < 32; g += 8) {
                const rocq__v8 code = rocq__v8_from_i8(bytes + 2 + g);
                rocq__v8_store(dst + i + g, rocq__v8_mul(scale, code));
            }
        }
    } else if (format == ROCQ_Q4_0) {
        for (; i < n; i += 32, bytes += 18) {
            const rocq__v8 scale = rocq__v8_set1(rocq__f16_at(bytes));
            ROCQ__UNROLL
            for (int g = 0; g < 32; g += 8) {
                const rocq__v8 code = rocq__v8_from_4bit(bytes + 2 + g % 16, g >= 16);
                rocq__v8_store(dst + i + g, rocq__v8_mul(scale, code));
            }
        }
    } else if (rocq__codec_of(format)->unpack) {
        const rocq__codec *codec = rocq__codec_of(format);
        const int32_t elems = codec->info.block_elems, group = codec->group;
        for (int32_t some; i < n; i += some) { // up to 256 elements: one large block, or eight
            int8_t code[256];
            float scale[16], min[16];
            for (some = 0; some < 256 && i + some < n; some += elems) {
                codec->unpack(bytes, code + some, scale + some / group, min + some / group);
                bytes += codec->info.block_bytes;
            }
            for (int32_t k = 0; k < some;) {
                const rocq__v8 s = rocq__v8_set1(scale[k / group]);
                const rocq__v8 m = rocq__v8_set1(min[k / group]);
                for (const int32_t end = k + group; k < end; k += 8) {
                    const rocq__v8 product = rocq__v8_mul(s, rocq__v8_from_i8(code + k));
                    rocq__v8_store(dst + i + k, rocq__v8_sub(product, m));
                }
            }
        }
    }
    if (i < n) {
        rocq__dequantize_row(format, dst + i, (const char *)src + rocq__bytes(format, i), n - i);
    }
}
#endif

static inline void rocq__decode(bool simd, rocq_format format, float *dst, const void *src,
                                int64_t n) {
    ROCQ__EITHER(simd, rocq__decode, (format, dst, src, n));
}

// -- exp, tanh and what is made of them --
// The two forms below do the same operations in the same order, all of them rounded as IEEE 754
// says: they have the same bits, so that INT8 products keep theirs through the epilogue.

static const float rocq__exp_term[5] = {0.00139262131f, 0.00836320315f, 0.0416665561f, 0.166665763f,
                                        0.5f};
#define ROCQ__EXP_LEAST -87.33f // below it exp(x) is subnormal, and 0 here
#define ROCQ__EXP_MOST 88.8f    // exp(x) is infinity here from 88.38 on

static inline float rocq__clamp(float x, float least, float most) { // NaN stays
    return x < least ? least : x > most ? most : x;
}

// exp(x) = 2^k (1 + p): returns p = e^r - 1 of r = x - k ln(2), which is ln(2) / 2 at most, from a
// polynomial that is off by 1.1e-8 of e^r, and sets *power to 2^k. x in [LEAST, MOST], not NaN.
static float rocq__exp_parts(float x, float *power) {
    const float k = rintf(x * 1.44269504f);
    // ln(2) in two parts, the first short enough that its products with k are exact
    const float r = fmaf(-k, -2.12194440e-4f, fmaf(-k, 0.693359375f, x));
    float e = rocq__exp_term[0];
    for (int i = 1; i < 5; i++) e = fmaf(e, r, rocq__exp_term[i]);
    *power = rocq__bits_f32((uint32_t)((int32_t)k + 127) << 23);
    return fmaf(e, r * r, r);
}

// Within 1.1 ulp of exp(x) from LEAST on; NaN stays.
static float rocq__exp1(float x) {
    float power;
    if (!(x >= ROCQ__EXP_LEAST)) return x != x ? x : 0.0f;
    const float p = rocq__exp_parts(ROCQ__MIN(x, ROCQ__EXP_MOST), &power);
    return (1.0f + p) * power;
}

// Within 3 ulp. With e = exp(2 x) - 1 it is e / (e + 2), which does not cancel around 0.
static float rocq__tanh1(float x) {
    float power;
    if (x != x) return x;
    const float p = rocq__exp_parts(rocq__clamp(2.0f * x, -20.0f, 20.0f), &power);
    const float e = fmaf(power, p, power - 1.0f);
    return e / (e + 2.0f);
}

// SILU and the tanh form of GELU are x / (1 + exp(-(linear x + cubic x^3))): 1 + tanh(u), as
// 2 / (1 + exp(-2 u)), does not cancel for negative x.
static float rocq__gate1(float x, float linear, float cubic) {
    const float slope = fmaf(ROCQ__MIN(x * x, 1e30f), cubic, linear); // 0 inf is NaN
    return x / (1.0f + rocq__exp1(-(x * slope)));
}

#define ROCQ__GELU_LINEAR 1.59576912160573f // 2 sqrt(2 / pi)
#define ROCQ__GELU_CUBIC 0.0713548162726f   // the same times 0.044715

static float rocq__activation(rocq_activation activation, float x) {
    switch (activation) {
    case ROCQ_ACT_SILU: return rocq__gate1(x, 1.0f, 0.0f);
    case ROCQ_ACT_GELU: return rocq__gate1(x, ROCQ__GELU_LINEAR, ROCQ__GELU_CUBIC);
    case ROCQ_ACT_GELU_ERF: return 0.5f * x * erfcf(-0.707106781186548f * x);
    case ROCQ_ACT_RELU: return x > 0.0f ? x : 0.0f;
    case ROCQ_ACT_TANH: return rocq__tanh1(x);
    default: return x;
    }
}

#if ROCQ__HAS_V8

ROCQ__V8 rocq__v8 rocq__v8_exp_parts(rocq__v8 x, rocq__v8 *power) {
    const rocq__v8 k = rocq__v8_round(rocq__v8_mul(x, rocq__v8_set1(1.44269504f)));
    const rocq__v8 r = rocq__v8_fnma(k, rocq__v8_set1(-2.12194440e-4f),
                                     rocq__v8_fnma(k, rocq__v8_set1(0.693359375f), x));
    rocq__v8 e = rocq__v8_set1(rocq__exp_term[0]);
    ROCQ__UNROLL
    for (int i = 1; i < 5; i++) e = rocq__v8_fma(e, r, rocq__v8_set1(rocq__exp_term[i]));
    *power = rocq__v8_pow2(k);
    return rocq__v8_fma(e, rocq__v8_mul(r, r), r);
}

// Clamps as rocq__clamp does.
ROCQ__V8 rocq__v8 rocq__v8_clamp(rocq__v8 x, float least, float most) {
    return rocq__v8_min(rocq__v8_set1(most), rocq__v8_max(rocq__v8_set1(least), x));
}

ROCQ__V8 rocq__v8 rocq__v8_exp(rocq__v8 x) {
    rocq__v8 power;
    const rocq__v8 p =
        rocq__v8_exp_parts(rocq__v8_clamp(x, ROCQ__EXP_LEAST, ROCQ__EXP_MOST), &power);
    return rocq__v8_zero_below(rocq__v8_mul(rocq__v8_add(rocq__v8_set1(1.0f), p), power), x,
                               rocq__v8_set1(ROCQ__EXP_LEAST));
}

// x = bound tanh(x / bound); returns how many elements it has done.
static ROCQ__SIMD int64_t rocq__tanh_simd(float *x, float bound, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        rocq__v8 power, e = rocq__v8_div(rocq__v8_load(x + i), rocq__v8_set1(bound));
        e = rocq__v8_clamp(rocq__v8_add(e, e), -20.0f, 20.0f);
        const rocq__v8 p = rocq__v8_exp_parts(e, &power);
        e = rocq__v8_fma(power, p, rocq__v8_sub(power, rocq__v8_set1(1.0f)));
        e = rocq__v8_div(e, rocq__v8_add(e, rocq__v8_set1(2.0f)));
        rocq__v8_store(x + i, rocq__v8_mul(e, rocq__v8_set1(bound)));
    }
    return i;
}

static ROCQ__SIMD int64_t rocq__gate_simd(float *x, float linear, float cubic, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const rocq__v8 v = rocq__v8_load(x + i);
        const rocq__v8 square = rocq__v8_min(rocq__v8_mul(v, v), rocq__v8_set1(1e30f));
        const rocq__v8 slope =
            rocq__v8_fma(square, rocq__v8_set1(cubic), rocq__v8_set1(linear));
        const rocq__v8 e = rocq__v8_exp(rocq__v8_fnma(v, slope, rocq__v8_set1(0.0f)));
        rocq__v8_store(x + i, rocq__v8_div(v, rocq__v8_add(rocq__v8_set1(1.0f), e)));
    }
    return i;
}

#endif

// x = activation(x)
static void rocq__activate_row(bool simd, rocq_activation activation, float *x, int64_t n) {
    int64_t i = activation == ROCQ_ACT_IDENTITY ? n : 0;
#if ROCQ__HAS_V8
    if (simd && activation == ROCQ_ACT_SILU) i = rocq__gate_simd(x, 1.0f, 0.0f, n);
    if (simd && activation == ROCQ_ACT_GELU) {
        i = rocq__gate_simd(x, ROCQ__GELU_LINEAR, ROCQ__GELU_CUBIC, n);
    }
    if (simd && activation == ROCQ_ACT_TANH) i = rocq__tanh_simd(x, 1.0f, n);
#else
    (void)simd;
#endif
    for (; i < n; i++) x[i] = rocq__activation(activation, x[i]);
}

// x = cap tanh(x / cap)
static void rocq__softcap_row(bool simd, float cap, float *x, int64_t n) {
    int64_t i = 0;
#if ROCQ__HAS_V8
    if (simd) i = rocq__tanh_simd(x, cap, n);
#else
    (void)simd;
#endif
    for (; i < n; i++) x[i] = cap * rocq__tanh1(x[i] / cap);
}

// -- rows with rows --

// x += y, element by element
static void rocq__add_scalar(float *x, const float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] += y[i];
}

// y = factor x; y may be x
static void rocq__scale_scalar(float *y, const float *x, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = factor * x[i];
}

// x *= y
static void rocq__multiply_scalar(float *x, const float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= y[i];
}

#if ROCQ__HAS_V8
static ROCQ__SIMD void rocq__add_simd(float *x, const float *y, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        rocq__v8_store(x + i, rocq__v8_add(rocq__v8_load(x + i), rocq__v8_load(y + i)));
    }
    for (; i < n; i++) x[i] += y[i];
}

static ROCQ__SIMD void rocq__scale_simd(float *y, const float *x, float factor, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        rocq__v8_store(y + i, rocq__v8_mul(rocq__v8_set1(factor), rocq__v8_load(x + i)));
    }
    for (; i < n; i++) y[i] = factor * x[i];
}

static ROCQ__SIMD void rocq__multiply_simd(float *x, const float *y, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        rocq__v8_store(x + i, rocq__v8_mul(rocq__v8_load(x + i), rocq__v8_load(y + i)));
    }
    for (; i < n; i++) x[i] *= y[i];
}
#endif

// ---------------------------------------------------------------------------------------------
// >>cpu_matmul
// ---------------------------------------------------------------------------------------------
// The same three steps for every format, precision and n:
//   1. each column of x is converted once, into scratch memory: to F32, or to int8 blocks of 32;
//   2. w is decoded eight rows (a panel) and one segment of K at a time, into a buffer that stays
//      in L1, and multiplied there with every column of a tile, by INT8 two panels at once; a lone
//      INT8 column is multiplied while AVX2 decodes, without the buffer; float rows that few
//      columns read are used in place;
//   3. the sums of a tile go through the epilogue into y.
// A sum runs over K in one order, whatever n, the tile and the thread are, so those never change a
// bit of a result. INT8 gives the same bits with and without SIMD: the sum of a group is an exact
// integer, and one fused multiply-add per group, in K order, adds it up.

enum {
    ROCQ__MM_ROWS = 8,      // of a panel
    ROCQ__MM_PAIR = 2 * ROCQ__MM_ROWS,
    ROCQ__MM_PANELS = 8,    // of a tile
    ROCQ__MM_TILE_M = ROCQ__MM_ROWS * ROCQ__MM_PANELS,
    ROCQ__MM_TILE_N = 128,  // a multiple of 8
    ROCQ__MM_SEGMENT = 512, // of K; a multiple of every block
    ROCQ__MM_FEW = 16       // up to so many columns a tile is one panel or pair: w is read in order
};

// Every thread has one, 64-byte aligned. A pair of int8 panels lies as the dot instructions want
// it: codes[k / 4][row][k % 4], scale and min[k / group][row].
typedef struct rocq__mm_work {
    float sums[ROCQ__MM_TILE_N][ROCQ__MM_TILE_M];
    float rows[ROCQ__MM_ROWS][ROCQ__MM_SEGMENT]; // F32 panel
    float scale[ROCQ__MM_SEGMENT / 16][ROCQ__MM_PAIR];
    float min[ROCQ__MM_SEGMENT / 16][ROCQ__MM_PAIR];
    int8_t codes[ROCQ__MM_SEGMENT / 4][ROCQ__MM_PAIR][4];
} rocq__mm_work;

// A converted int8 column is K codes, then one of these per group of w.
typedef struct rocq__mm_group {
    float scale;
    union { // no format has both a min and an offset
        float sum;      // has_min: of the group's values: scale * sum of codes
        int32_t offset; // otherwise: sum of codes, times rocq__mm.offset
    };
} rocq__mm_group;

// What an int8 dot multiplies: the first groups of the pair in work with n columns.
typedef struct rocq__mm_tile {
    const rocq__mm_work *work;
    int64_t group, n_groups; // elements per group; groups
    bool has_min;
    const int8_t *x;         // codes of the first column
    int64_t groups_at;       // from there to its groups, in bytes
    int64_t column_bytes;    // to the next column
    int64_t n;
} rocq__mm_tile;

// Adds the products to sums[column][row].
typedef void (*rocq__mm_dot)(float (*sums)[ROCQ__MM_TILE_M], const rocq__mm_tile *tile);

// One segment of the eight rows of a panel, as w stores it.
typedef struct rocq__mm_rows {
    const unsigned char *at[ROCQ__MM_ROWS];
    int64_t ahead;            // bytes from at[r] to what is prefetched: the next segment or panel
    int64_t row_ahead;        // not 0: a pass prefetches so many bytes ahead in each row
    const rocq__codec *codec; // INT8 only: w's,
    int64_t n_blocks;         // and the segment's blocks per row
} rocq__mm_rows;

// Decodes the rows into rows first to first + 7 of work's int8 pair.
typedef void (*rocq__mm_pack)(rocq__mm_work *work, const rocq__mm_rows *rows, int first);

// Writes the sums of the rows, which are decoded and multiplied with a single column without a
// panel in between.
typedef void (*rocq__mm_pass)(float *sums, const rocq__mm_tile *tile, const rocq__mm_rows *rows);

// Adds k products per row and column of x; k is a multiple of 8.
typedef void (*rocq__mm_dot_float)(float (*sums)[ROCQ__MM_TILE_M], const rocq__mm_rows *rows,
                                   int64_t k, const float *x, int64_t column_floats, int64_t n);

typedef struct rocq__mm {
    const rocq_matmul_params *p;
    const rocq_tensor *other; // F32, y's shape: w2 x, or NULL
    rocq_precision precision; // resolved
    bool simd, avx512, avx_vnni;
    int64_t n;          // columns that share one matrix of w: those of all its batches of x
    int64_t n_matrices; // of w
    int64_t panel_rows; // that count as one when threads share: of a pair, but for a lone column
    int64_t n_panels, n_tiles;
    int64_t column_bytes;
    int64_t columns_at;     // in scratch memory
    unsigned char *columns; // there
    rocq__mm_work *work;
    int64_t group; // INT8: elements per group of w's format
    bool has_min;
    int32_t offset; // INT8: what the kernels add to w's codes; see rocq__dot_4
    rocq__mm_dot dot;
    rocq__mm_pack pack;
    rocq__mm_pass pass;           // or NULL
    bool interleaved;             // the F32 panel is one of rocq__dot_panel
    rocq__mm_dot_float dot_f32;   // of rows in F32
    rocq__mm_dot_float dot_as_is; // of rows in w's format, or NULL
} rocq__mm;

// -- step 1: columns --

// v rounded to F16.
static void rocq__round_f16_scalar(float *v, int64_t n) {
    for (int64_t i = 0; i < n; i++) v[i] = rocq__f16_to_f32(rocq__f32_to_f16(v[i]));
}

#if ROCQ__HAS_V8
ROCQ__SIMD static void rocq__round_f16_simd(float *v, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        rocq__v8_store(v + i, rocq__v8_round_f16(rocq__v8_load(v + i)));
    }
    rocq__round_f16_scalar(v + i, n - i);
}
#endif

// Codes -127 .. 127 of 32 values; the scale is returned. Blocks too small for 1 / scale are zero,
// and one infinity or NaN makes the scale NaN, so that it reaches y.
static float rocq__quantize_32(int8_t *code, const float *v) {
    uint32_t top = 0; // the bits of |v| order as |v| does, NaN on top
    for (int i = 0; i < 32; i++) top = ROCQ__MAX(top, rocq__f32_bits(v[i]) & 0x7fffffffu);
    const float amax = rocq__bits_f32(top);
    if (top >= 0x7f800000u || amax < 0x1p-100f) {
        memset(code, 0, 32);
        return top >= 0x7f800000u ? NAN : 0.0f;
    }
    const float inverse = 127.0f / amax;
    for (int i = 0; i < 32; i++) code[i] = (int8_t)lrintf(v[i] * inverse);
    return amax / 127.0f;
}

#if ROCQ__HAS_AVX2
ROCQ__TARGET_AVX2 static float rocq__quantize_32_avx2(int8_t *code, const float *v) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    const __m256 a = _mm256_loadu_ps(v), b = _mm256_loadu_ps(v + 8), c = _mm256_loadu_ps(v + 16),
                 d = _mm256_loadu_ps(v + 24);
    const __m256i ab = _mm256_max_epu32(_mm256_and_si256(_mm256_castps_si256(a), magnitude),
                                        _mm256_and_si256(_mm256_castps_si256(b), magnitude));
    const __m256i cd = _mm256_max_epu32(_mm256_and_si256(_mm256_castps_si256(c), magnitude),
                                        _mm256_and_si256(_mm256_castps_si256(d), magnitude));
    const __m256i abcd = _mm256_max_epu32(ab, cd);
    __m128i top4 = _mm_max_epu32(_mm256_castsi256_si128(abcd), _mm256_extracti128_si256(abcd, 1));
    top4 = _mm_max_epu32(top4, _mm_shuffle_epi32(top4, 0x4e));
    top4 = _mm_max_epu32(top4, _mm_shuffle_epi32(top4, 0xb1));
    const uint32_t top = (uint32_t)_mm_cvtsi128_si32(top4);
    const float amax = rocq__bits_f32(top);
    if (top >= 0x7f800000u || amax < 0x1p-100f) {
        memset(code, 0, 32);
        return top >= 0x7f800000u ? NAN : 0.0f;
    }
    const __m256 inverse = _mm256_set1_ps(127.0f / amax);
    const __m256i lo = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(a, inverse)),
                                          _mm256_cvtps_epi32(_mm256_mul_ps(b, inverse)));
    const __m256i hi = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(c, inverse)),
                                          _mm256_cvtps_epi32(_mm256_mul_ps(d, inverse)));
    // The packs work within halves; this puts their groups of four back in order.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(lo, hi), order);
    _mm256_storeu_si256((__m256i *)(void *)code, all);
    return amax / 127.0f;
}
#endif

// Of 16 codes each.
static void rocq__sum_halves(int32_t sums[2], const int8_t *code) {
    for (int h = 0; h < 2; h++) {
        sums[h] = 0;
        for (int i = 0; i < 16; i++) sums[h] += code[16 * h + i];
    }
}

#if ROCQ__HAS_AVX2
ROCQ__TARGET_AVX2 static void rocq__sum_halves_avx2(int32_t sums[2], const int8_t *code) {
    const __m256i all = _mm256_loadu_si256((const __m256i *)(const void *)code);
    const __m256i raised = _mm256_xor_si256(all, _mm256_set1_epi8(-128)); // the sum is of unsigned
    const __m256i eights = _mm256_sad_epu8(raised, _mm256_setzero_si256());
    const __m256i sum = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0x4e));
    sums[0] = _mm256_extract_epi32(sum, 0) - 16 * 128;
    sums[1] = _mm256_extract_epi32(sum, 4) - 16 * 128;
}
#endif

static void rocq__mm_column_int8(const rocq__mm *mm, unsigned char *dst,
                                 const unsigned char *src) {
    const rocq_format format = mm->p->x->format;
    const int64_t k = mm->p->x->ne[0], per_block = 32 / mm->group;
    int8_t *codes = (int8_t *)dst;
    rocq__mm_group *groups = (rocq__mm_group *)(void *)(dst + k);
    for (int64_t b = 0; b < k / 32; b++, codes += 32, src += rocq__bytes(format, 32)) {
        float v[32], scale;
        bool ready = false;
        if (format == ROCQ_Q8_0) { // copied, unless one is -128: the kernels negate codes of x
            memcpy(codes, src + 2, 32);
            scale = rocq__f16_at(src);
            ready = memchr(codes, 0x80, 32) == NULL;
        }
        if (!ready) {
            rocq__decode(mm->simd, format, v, src, 32);
#if ROCQ__HAS_AVX2
            scale = mm->simd ? rocq__quantize_32_avx2(codes, v) : rocq__quantize_32(codes, v);
#else
            scale = rocq__quantize_32(codes, v);
#endif
        }
        int32_t sums[2];
#if ROCQ__HAS_AVX2
        mm->simd ? rocq__sum_halves_avx2(sums, codes) : rocq__sum_halves(sums, codes);
#else
        rocq__sum_halves(sums, codes);
#endif
        for (int64_t g = 0; g < per_block; g++, groups++) {
            const int32_t sum = per_block == 2 ? sums[g] : sums[0] + sums[1];
            groups->scale = scale;
            if (mm->has_min) {
                groups->sum = scale * (float)sum;
            } else {
                groups->offset = mm->offset * sum;
            }
        }
    }
}

// Where a column of a matrix of w stands in the tensors that have x's rows and batches.
typedef struct rocq__mm_coord {
    int64_t i1, i2, i3;
} rocq__mm_coord;

static rocq__mm_coord rocq__mm_coord_of(const rocq__mm *mm, int64_t matrix, int64_t column) {
    const rocq_tensor *w = mm->p->w, *x = mm->p->x;
    rocq__mm_coord at = {column, 0, 0};
    if (mm->n == x->ne[1] && mm->n_matrices == 1) return at; // without the divisions below
    const int64_t batch = column / x->ne[1];
    const int64_t run2 = x->ne[2] / w->ne[2], run3 = x->ne[3] / w->ne[3];
    at.i1 = column % x->ne[1];
    at.i2 = matrix % w->ne[2] * run2 + batch % run2;
    at.i3 = matrix / w->ne[2] * run3 + batch / run2;
    return at;
}

static void rocq__mm_convert(void *arg, int64_t begin, int64_t end, int32_t thread) {
    const rocq__mm *mm = (const rocq__mm *)arg;
    const rocq_tensor *x = mm->p->x;
    const int64_t k = x->ne[0];
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        const rocq__mm_coord at = rocq__mm_coord_of(mm, i / mm->n, i % mm->n);
        const unsigned char *src = rocq__row(x, at.i1, at.i2, at.i3);
        unsigned char *dst = mm->columns + i * mm->column_bytes;
        if (mm->precision == ROCQ_PRECISION_INT8) {
            rocq__mm_column_int8(mm, dst, src);
            continue;
        }
        float *v = (float *)(void *)dst;
        rocq__decode(mm->simd, x->format, v, src, k);
        if (mm->precision == ROCQ_PRECISION_F16) {
            ROCQ__EITHER(mm->simd, rocq__round_f16, (v, k));
        }
        memset(v + k, 0, (size_t)(mm->column_bytes - k * 4));
    }
}

// -- step 2: dot products --

static inline const int8_t *rocq__tile_codes(const rocq__mm_tile *tile, int64_t column) {
    return tile->x + column * tile->column_bytes;
}

static inline const rocq__mm_group *rocq__tile_groups(const rocq__mm_tile *tile, int64_t column) {
    const void *groups = rocq__tile_codes(tile, column) + tile->groups_at;
    return (const rocq__mm_group *)groups;
}

// Scalar reference of the int8 dot, and of the layout it reads.
static void rocq__dot_int8(float (*sums)[ROCQ__MM_TILE_M], const rocq__mm_tile *tile) {
    const rocq__mm_work *work = tile->work;
    for (int64_t c = 0; c < tile->n; c++) {
        const int8_t *x = rocq__tile_codes(tile, c);
        const int8_t(*w)[ROCQ__MM_PAIR][4] = work->codes;
        const rocq__mm_group *groups = rocq__tile_groups(tile, c);
        for (int64_t g = 0; g < tile->n_groups; g++) {
            int32_t dot[ROCQ__MM_PAIR] = {0};
            for (int64_t k = 0; k < tile->group; k += 4, x += 4, w++) {
                for (int r = 0; r < ROCQ__MM_PAIR; r++) {
                    const int8_t *four = w[0][r];
                    dot[r] += four[0] * x[0] + four[1] * x[1] + four[2] * x[2] + four[3] * x[3];
                }
            }
            for (int r = 0; r < ROCQ__MM_PAIR; r++) {
                const float scale = work->scale[g][r] * groups[g].scale;
                sums[c][r] = fmaf(scale, (float)dot[r], sums[c][r]);
                if (tile->has_min) sums[c][r] = fmaf(-work->min[g][r], groups[g].sum, sums[c][r]);
            }
        }
    }
}

#if ROCQ__HAS_AVX2
#if defined(__clang__)
#define ROCQ__UNROLL_PARTS ROCQ__UNROLL // clang's code for them as loops is 5 to 10% slower
#else
#define ROCQ__UNROLL_PARTS
#endif
// Compilers regroup a chain of integer adds into a tree at its end, or move all loads to its start;
// the terms then wait in memory for want of registers, at half the speed.
#define ROCQ__KEEP_ORDER(v) __asm__("" : "+x"(v))

ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE __m256i rocq__four_codes(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}

// Adds the products of four codes of each row to a group's sums; q numbers the group's fours. The
// byte dot takes its first operand as unsigned. With depth > 0 the decoder has raised w's codes by
// the format's offset, so that none is negative (rocq__mm_group.offset undoes that), and depth pair
// sums fit one int16. With depth 0 the codes of w are signed, and their signs move over to x.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__dot_4_avx2(__m256i *dot, __m256i *pairs,
                                                            __m256i w, __m256i four, const int q,
                                                            const int depth) {
    const __m256i two = depth ? _mm256_maddubs_epi16(w, four)
                              : _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(four, w));
    *pairs = depth > 1 && q % depth ? _mm256_add_epi16(*pairs, two) : two;
    ROCQ__KEEP_ORDER(*pairs);
    if (depth > 1 && q % depth != depth - 1) return;
    const __m256i lanes = _mm256_madd_epi16(*pairs, _mm256_set1_epi16(1));
    *dot = q < ROCQ__MAX(depth, 1) ? lanes : _mm256_add_epi32(*dot, lanes);
    ROCQ__KEEP_ORDER(*dot);
}

// Adds a group's products: dot times both scales. A raise of the codes is taken back.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE __m256 rocq__add_group_avx2(__m256 sum, __m256i dot,
                                                                  const float *scale,
                                                                  const rocq__mm_group *group,
                                                                  const bool raised) {
    if (raised) dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(group->offset));
    const __m256 both = _mm256_mul_ps(_mm256_loadu_ps(scale), _mm256_set1_ps(group->scale));
    return _mm256_fmadd_ps(both, _mm256_cvtepi32_ps(dot), sum);
}

ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE __m256 rocq__add_min_avx2(__m256 sum, const float *min,
                                                                const rocq__mm_group *group) {
    return _mm256_fnmadd_ps(_mm256_loadu_ps(min), _mm256_set1_ps(group->sum), sum);
}

// A vector holds four codes of each row of a panel, so a lane of the sums is a row. Both panels of
// a pair by n_columns: the fewest loads that the registers allow. Columns past the last one are the
// last one again, and add to sums that nobody reads. n_columns, quads and depth are constants where
// this is inlined.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__dot_columns_avx2(
    float (*sums)[ROCQ__MM_TILE_M], const rocq__mm_tile *tile, int64_t first, const int n_columns,
    const int quads, const int depth) {
    const rocq__mm_work *work = tile->work;
    const __m256i *w = (const __m256i *)(const void *)work->codes;
    const int step = depth ? 2 : 1; // fours at once; signed ones need registers for their signs
    const int8_t *x[4];
    const rocq__mm_group *groups[4];
    __m256 sum[4][2];
    ROCQ__UNROLL
    for (int c = 0; c < n_columns; c++) {
        const int64_t column = ROCQ__MIN(first + c, tile->n - 1);
        x[c] = rocq__tile_codes(tile, column);
        groups[c] = rocq__tile_groups(tile, column);
        for (int p = 0; p < 2; p++) sum[c][p] = _mm256_loadu_ps(sums[first + c] + 8 * p);
    }
    for (int64_t g = 0; g < tile->n_groups; g++) {
        const float *scale = work->scale[g], *min = work->min[g];
        __m256i dot[4][2], pairs[4][2];
        ROCQ__UNROLL
        for (int q = 0; q < quads; q += step, w += 2 * step) {
            ROCQ__UNROLL
            for (int c = 0; c < n_columns; c++) {
                ROCQ__UNROLL
                for (int i = 0; i < 2 * step; i++) { // of four i / 2, panel i % 2
                    const __m256i four = rocq__four_codes(x[c] + (q + i / 2) * 4);
                    rocq__dot_4_avx2(&dot[c][i % 2], &pairs[c][i % 2], w[i], four, q + i / 2,
                                     depth);
                }
            }
        }
        ROCQ__UNROLL
        for (int i = 0; i < 2 * n_columns; i++) { // of column i / 2, panel i % 2
            const int c = i / 2, p = i % 2;
            const rocq__mm_group *group = groups[c] + g;
            if (tile->has_min) {
                sum[c][p] = rocq__add_group_avx2(sum[c][p], dot[c][p], scale + 8 * p, group, false);
                sum[c][p] = rocq__add_min_avx2(sum[c][p], min + 8 * p, group);
            } else {
                const bool raised = depth > 0;
                sum[c][p] =
                    rocq__add_group_avx2(sum[c][p], dot[c][p], scale + 8 * p, group, raised);
            }
            if (p == 1) x[c] += quads * 4;
        }
    }
    ROCQ__UNROLL
    for (int c = 0; c < n_columns; c++) {
        for (int p = 0; p < 2; p++) _mm256_storeu_ps(sums[first + c] + 8 * p, sum[c][p]);
    }
}

// The same with AVX-512 VNNI: a vector holds four codes of each row of the pair, and one
// instruction adds four products. Signed codes are raised by 128 on the way.
ROCQ__TARGET_AVX512 ROCQ__ALWAYS_INLINE void rocq__dot_columns_vnni(
    float (*sums)[ROCQ__MM_TILE_M], const rocq__mm_tile *tile, int64_t first, const int n_columns,
    const int quads, const bool is_signed) {
    const rocq__mm_work *work = tile->work;
    const int8_t *w = &work->codes[0][0][0], *x[8];
    const rocq__mm_group *groups[8];
    __m512 sum[8];
    ROCQ__UNROLL
    for (int c = 0; c < n_columns; c++) {
        const int64_t column = ROCQ__MIN(first + c, tile->n - 1);
        x[c] = rocq__tile_codes(tile, column);
        groups[c] = rocq__tile_groups(tile, column);
        sum[c] = _mm512_loadu_ps(sums[first + c]);
    }
    for (int64_t g = 0; g < tile->n_groups; g++) {
        const __m512 scale = _mm512_loadu_ps(work->scale[g]), min = _mm512_loadu_ps(work->min[g]);
        __m512i dot[8];
        ROCQ__UNROLL
        for (int c = 0; c < n_columns; c++) {
            dot[c] = _mm512_set1_epi32(tile->has_min ? 0 : -groups[c][g].offset);
        }
        ROCQ__UNROLL
        for (int q = 0; q < quads; q++, w += 64) {
            __m512i codes = _mm512_loadu_si512(w);
            if (is_signed) codes = _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
            ROCQ__UNROLL
            for (int c = 0; c < n_columns; c++) {
                int32_t four;
                memcpy(&four, x[c] + 4 * q, sizeof four);
                dot[c] = _mm512_dpbusd_epi32(dot[c], codes, _mm512_set1_epi32(four));
            }
        }
        ROCQ__UNROLL
        for (int c = 0; c < n_columns; c++) {
            const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(groups[c][g].scale));
            sum[c] = _mm512_fmadd_ps(both, _mm512_cvtepi32_ps(dot[c]), sum[c]);
            if (tile->has_min) {
                sum[c] = _mm512_fnmadd_ps(min, _mm512_set1_ps(groups[c][g].sum), sum[c]);
            }
            x[c] += quads * 4;
        }
    }
    ROCQ__UNROLL
    for (int c = 0; c < n_columns; c++) _mm512_storeu_ps(sums[first + c], sum[c]);
}

// `most` columns at a time; the last ones by four or two, but for one that is missing.
#define ROCQ__DOT_INT8(name, TARGET, columns, most, quads, depth)                                 \
    TARGET static void rocq__dot_int8_##name(float (*sums)[ROCQ__MM_TILE_M],                      \
                                             const rocq__mm_tile *tile) {                         \
        int64_t c = 0;                                                                            \
        for (; c + (most) / 2 < tile->n; c += most) columns(sums, tile, c, most, quads, depth);   \
        for (; c < tile->n; c += 2) columns(sums, tile, c, 2, quads, depth);                      \
    }
ROCQ__DOT_INT8(group32_depth0, ROCQ__TARGET_AVX2, rocq__dot_columns_avx2, 4, 8, 0)
ROCQ__DOT_INT8(group32_depth4, ROCQ__TARGET_AVX2, rocq__dot_columns_avx2, 4, 8, 4)
ROCQ__DOT_INT8(group32_depth8, ROCQ__TARGET_AVX2, rocq__dot_columns_avx2, 4, 8, 8)
ROCQ__DOT_INT8(group16_depth2, ROCQ__TARGET_AVX2, rocq__dot_columns_avx2, 4, 4, 2)
ROCQ__DOT_INT8(group16_depth4, ROCQ__TARGET_AVX2, rocq__dot_columns_avx2, 4, 4, 4)
ROCQ__DOT_INT8(group32_signed_vnni, ROCQ__TARGET_AVX512, rocq__dot_columns_vnni, 8, 8, true)
ROCQ__DOT_INT8(group32_vnni, ROCQ__TARGET_AVX512, rocq__dot_columns_vnni, 8, 8, false)
ROCQ__DOT_INT8(group16_vnni, ROCQ__TARGET_AVX512, rocq__dot_columns_vnni, 8, 4, false)
#undef ROCQ__DOT_INT8

// The dot for a format's group and depth.
static rocq__mm_dot rocq__dot_int8_for(int64_t group, int depth, bool vnni) {
    if (vnni && depth == 0) return rocq__dot_int8_group32_signed_vnni;
    if (vnni) return group == 32 ? rocq__dot_int8_group32_vnni : rocq__dot_int8_group16_vnni;
    if (group == 16) {
        return depth == 2 ? rocq__dot_int8_group16_depth2 : rocq__dot_int8_group16_depth4;
    }
    return depth == 0   ? rocq__dot_int8_group32_depth0
           : depth == 4 ? rocq__dot_int8_group32_depth4
                        : rocq__dot_int8_group32_depth8;
}
#endif

#if ROCQ__HAS_NEON
// Adds the products of four codes of four rows each; a lane is a row.
static inline int32x4_t rocq__dot_4_neon(int32x4_t dot, int8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(dot, w, x);
#else
    const int16x8_t two = vpaddq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x));
    return vpadalq_s16(dot, two);
#endif
}

static void rocq__dot_int8_neon(float (*sums)[ROCQ__MM_TILE_M], const rocq__mm_tile *tile) {
    const rocq__mm_work *work = tile->work;
    for (int64_t c = 0; c < tile->n; c++) {
        const rocq__mm_group *groups = rocq__tile_groups(tile, c);
        const int8_t *x = rocq__tile_codes(tile, c), *w = &work->codes[0][0][0];
        float32x4_t sum[4];
        for (int h = 0; h < 4; h++) sum[h] = vld1q_f32(sums[c] + 4 * h);
        for (int64_t g = 0; g < tile->n_groups; g++) {
            int32x4_t dot[4] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
            for (int64_t k = 0; k < tile->group; k += 4, x += 4, w += 64) {
                int32_t four;
                memcpy(&four, x, sizeof four);
                const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(four));
                for (int h = 0; h < 4; h++)
                    dot[h] = rocq__dot_4_neon(dot[h], vld1q_s8(w + 16 * h), v);
            }
            for (int h = 0; h < 4; h++) {
                const float32x4_t scale = vld1q_f32(work->scale[g] + 4 * h);
                const float32x4_t both = vmulq_n_f32(scale, groups[g].scale);
                sum[h] = vfmaq_f32(sum[h], both, vcvtq_f32_s32(dot[h]));
                if (tile->has_min) {
                    sum[h] = vfmsq_n_f32(sum[h], vld1q_f32(work->min[g] + 4 * h), groups[g].sum);
                }
            }
        }
        for (int h = 0; h < 4; h++) vst1q_f32(sums[c] + 4 * h, sum[h]);
    }
}
#endif

// Scalar reference of the F32 dot: eight partial sums, added as a tree. k is a multiple of 8.
static void rocq__dot_f32(float (*sums)[ROCQ__MM_TILE_M], const rocq__mm_rows *rows, int64_t k,
                          const float *x, int64_t column_floats, int64_t n) {
    for (int64_t c = 0; c < n; c++) {
        for (int r = 0; r < ROCQ__MM_ROWS; r++) {
            const float *w = (const float *)(const void *)rows->at[r];
            float s[8] = {0};
            for (int64_t i = 0; i < k; i += 8) {
                for (int j = 0; j < 8; j++) s[j] += w[i + j] * x[c * column_floats + i + j];
            }
            sums[c][r] += ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
        }
    }
}

// Prefetches what is read `ahead` bytes after `at`. With one column a core mostly waits for memory:
// on a Xeon it reads 14 GB/s with this, 10 without.
#define ROCQ__FETCH(at, ahead) \
    __builtin_prefetch((const void *)((uintptr_t)(at) + (uintptr_t)(ahead)))

#if ROCQ__HAS_V8
// Four rows by n_columns: as many sums as fit the registers, so that their independent chains hide
// the latency of the adds. format and n_columns are constants where this is inlined.
ROCQ__V8 void rocq__dot_float_4(float (*sums)[ROCQ__MM_TILE_M], const rocq__mm_rows *rows,
                                const rocq_format format, int64_t k, const float *x,
                                int64_t column_floats, int row, const int n_columns, bool fetch) {
    const int64_t bytes = format == ROCQ_F32 ? 4 : 2;
    const unsigned char *const *w = rows->at + row, *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
    rocq__v8 s[4][4];
    ROCQ__UNROLL
    for (int c = 0; c < n_columns; c++) {
        ROCQ__UNROLL
        for (int r = 0; r < 4; r++) s[c][r] = rocq__v8_set1(0.0f);
    }
    for (int64_t i = 0; i < k; i += 8) {
        const bool new_line = fetch && i * bytes % 64 == 0;
        rocq__v8 v[4];
        ROCQ__UNROLL
        for (int c = 0; c < n_columns; c++) v[c] = rocq__v8_load(x + c * column_floats + i);
        ROCQ__UNROLL
        for (int r = 0; r < 4; r++) {
            const unsigned char *at = (r == 0 ? w0 : r == 1 ? w1 : r == 2 ? w2 : w3) + i * bytes;
            const rocq__v8 a = format == ROCQ_F32   ? rocq__v8_load((const float *)(const void *)at)
                               : format == ROCQ_F16 ? rocq__v8_from_f16(at)
                                                    : rocq__v8_from_bf16(at);
            if (new_line) ROCQ__FETCH(at, rows->ahead);
            ROCQ__UNROLL
            for (int c = 0; c < n_columns; c++) s[c][r] = rocq__v8_fma(a, v[c], s[c][r]);
        }
    }
    ROCQ__UNROLL
    for (int c = 0; c < n_columns; c++) {
        float four[4];
        rocq__v8_sum4(four, s[c][0], s[c][1], s[c][2], s[c][3]);
        for (int r = 0; r < 4; r++) sums[c][row + r] += four[r];
    }
}

// At most `most` columns per pass, spread evenly: four columns are two and two, not three and one.
#define ROCQ__DOT_FLOAT(name, NAME, TARGET, most)                                                 \
    TARGET static void rocq__dot_##name(float (*sums)[ROCQ__MM_TILE_M],                           \
                                        const rocq__mm_rows *rows, int64_t k, const float *x,     \
                                        int64_t column_floats, int64_t n) {                       \
        const rocq_format f = ROCQ_##NAME;                                                        \
        const int64_t floats = column_floats;                                                     \
        for (int64_t c = 0, some; c < n; c += some, x += some * floats) {                         \
            const int64_t passes = (n - c + (most) - 1) / (most);                                 \
            some = (n - c + passes - 1) / passes;                                                 \
            for (int r = 0; r < ROCQ__MM_ROWS; r += 4) {                                          \
                float(*at)[ROCQ__MM_TILE_M] = sums + c;                                           \
                if (some == 1) rocq__dot_float_4(at, rows, f, k, x, floats, r, 1, c == 0);        \
                if (some == 2) rocq__dot_float_4(at, rows, f, k, x, floats, r, 2, c == 0);        \
                if (some == 3) rocq__dot_float_4(at, rows, f, k, x, floats, r, 3, c == 0);        \
                if ((most) > 3 && some == 4) {                                                    \
                    rocq__dot_float_4(at, rows, f, k, x, floats, r, 4, c == 0);                   \
                }                                                                                 \
            }                                                                                     \
        }                                                                                         \
    }
ROCQ__DOT_FLOAT(f32_simd, F32, ROCQ__SIMD, 3)
ROCQ__DOT_FLOAT(f16_simd, F16, ROCQ__SIMD, 3)
ROCQ__DOT_FLOAT(bf16_simd, BF16, ROCQ__SIMD, 3)
#if ROCQ__HAS_AVX2 // AVX-512 has twice the registers
ROCQ__DOT_FLOAT(f32_avx512, F32, ROCQ__TARGET_AVX512, 4)
ROCQ__DOT_FLOAT(f16_avx512, F16, ROCQ__TARGET_AVX512, 4)
ROCQ__DOT_FLOAT(bf16_avx512, BF16, ROCQ__TARGET_AVX512, 4)
#endif
#undef ROCQ__DOT_FLOAT
#endif

#if ROCQ__HAS_AVX2
// For many columns, vectors of 64 bytes: eight floats of two rows, by the same eight of a column
// twice. The sums are those of the forms above, with their bits. The panel is [k / 8][row][8]; out
// is [column][row].
ROCQ__TARGET_AVX512 ROCQ__ALWAYS_INLINE void rocq__dot_panel(float (*out)[ROCQ__MM_ROWS],
                                                             const float *panel, int64_t k,
                                                             const float *const *column,
                                                             const int n_columns) {
    const float *x[6];
    __m512 s[6][4]; // of rows 2 p and 2 p + 1
    ROCQ__UNROLL
    for (int c = 0; c < n_columns; c++) {
        x[c] = column[c];
        ROCQ__UNROLL
        for (int p = 0; p < 4; p++) s[c][p] = _mm512_setzero_ps();
    }
    for (int64_t i = 0; i < k; i += 8, panel += 8 * ROCQ__MM_ROWS) {
        __m512 w[4];
        ROCQ__UNROLL
        for (int p = 0; p < 4; p++) w[p] = _mm512_loadu_ps(panel + 16 * p);
        ROCQ__UNROLL
        for (int c = 0; c < n_columns; c++) {
            const __m512 v = _mm512_broadcast_f32x8(_mm256_loadu_ps(x[c] + i));
            ROCQ__UNROLL
            for (int p = 0; p < 4; p++) s[c][p] = _mm512_fmadd_ps(w[p], v, s[c][p]);
        }
    }
    ROCQ__UNROLL
    for (int i = 0; i < 2 * n_columns; i++) { // rows 0 to 3, and 4 to 7, of a column
        const __m512 a = s[i / 2][i % 2 * 2], b = s[i / 2][i % 2 * 2 + 1];
        rocq__v8_sum4(out[i / 2] + i % 2 * 4, _mm512_castps512_ps256(a),
                      _mm512_extractf32x8_ps(a, 1), _mm512_castps512_ps256(b),
                      _mm512_extractf32x8_ps(b, 1));
    }
}

// With 6 columns and 8 rows, 24 of 32 registers are sums, and ten loads feed 24 multiplications.
ROCQ__TARGET_AVX512 static void rocq__dot_panel_6(float (*out)[ROCQ__MM_ROWS], const float *panel,
                                                  int64_t k, const float *const *column) {
    rocq__dot_panel(out, panel, k, column, 6);
}

ROCQ__TARGET_AVX512 static void rocq__dot_panel_4(float (*out)[ROCQ__MM_ROWS], const float *panel,
                                                  int64_t k, const float *const *column) {
    rocq__dot_panel(out, panel, k, column, 4);
}

// Takes the next columns of `left`, and returns their number. column has six addresses.
static int64_t rocq__dot_panel_some(float (*out)[ROCQ__MM_ROWS], const float *panel, int64_t k,
                                    const float *const *column, int64_t left) {
    const bool six = left > 8 || left == 6 || left == 5; // 8 are four and four
    if (six) rocq__dot_panel_6(out, panel, k, column);
    else rocq__dot_panel_4(out, panel, k, column);
    return ROCQ__MIN(left, six ? 6 : 4);
}

static void rocq__dot_panel_avx512(float (*sums)[ROCQ__MM_TILE_M], const rocq__mm_rows *rows,
                                   int64_t k, const float *x, int64_t column_floats, int64_t n) {
    const float *panel = (const float *)(const void *)rows->at[0];
    for (int64_t c = 0, some; c < n; c += some) {
        const float *column[6]; // past the last one, the last one again
        float out[6][ROCQ__MM_ROWS];
        for (int64_t j = 0; j < 6; j++) column[j] = x + ROCQ__MIN(c + j, n - 1) * column_floats;
        some = rocq__dot_panel_some(out, panel, k, column, n - c);
        for (int64_t j = 0; j < some; j++) {
            for (int r = 0; r < ROCQ__MM_ROWS; r++) sums[c + j][r] += out[j][r];
        }
    }
}

// Decodes k elements of a row to dst, its place in such a panel, and pads them to a multiple of
// eight. ahead: as in rocq__mm_rows.
ROCQ__SIMD static void rocq__interleave_row(float *dst, rocq_format format,
                                            const unsigned char *src, int64_t k, int64_t ahead) {
    float strip[ROCQ__MM_SEGMENT];
    if (k % 8 != 0 || (format != ROCQ_F32 && format != ROCQ_F16 && format != ROCQ_BF16)) {
        rocq__decode(true, format, strip, src, k);
        for (; k % 8 != 0; k++) strip[k] = 0.0f;
        src = (const unsigned char *)strip;
        format = ROCQ_F32;
        ahead = 0;
    }
    const int64_t bytes = format == ROCQ_F32 ? 4 : 2;
    for (int64_t i = 0; i < k; i += 8, dst += 8 * ROCQ__MM_ROWS) {
        const unsigned char *at = src + i * bytes;
        if (ahead && i * bytes % 64 == 0) ROCQ__FETCH(at, ahead);
        rocq__v8_store(dst, format == ROCQ_F32   ? rocq__v8_load((const float *)(const void *)at)
                            : format == ROCQ_F16 ? rocq__v8_from_f16(at)
                                                 : rocq__v8_from_bf16(at));
    }
}
#endif

// -- panels --

// Any format with codes, through its decoder.
static void rocq__pack_int8(rocq__mm_work *work, const rocq__mm_rows *rows, int first) {
    const rocq__codec *codec = rows->codec;
    const int64_t elems = codec->info.block_elems, n_groups = elems / codec->group;
    for (int r = 0; r < ROCQ__MM_ROWS; r++) {
        for (int64_t b = 0; b < rows->n_blocks; b++) {
            int8_t code[256];
            float scale[16], min[16];
            codec->unpack(rows->at[r] + b * codec->info.block_bytes, code, scale, min);
            for (int64_t k = 0; k < elems; k += 4) {
                memcpy(work->codes[(b * elems + k) / 4][first + r], code + k, 4);
            }
            for (int64_t g = 0; g < n_groups; g++) {
                work->scale[b * n_groups + g][first + r] = scale[g];
                work->min[b * n_groups + g][first + r] = min[g];
            }
        }
    }
}

#if ROCQ__HAS_AVX2
// The same for AVX2, all rows at once: 16 bytes at the same place of each row turn into four
// vectors that have bytes 4 j to 4 j + 3 of every row, which is how the codes lie in a panel. The
// codes are then cut out of these, raised by what ROCQ__MM_AVX2 lists so that they are unsigned.

typedef const unsigned char *const *rocq__rows;

// 16 bytes of rows 0 to 3, beside those of rows 4 to 7.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__load_rows_avx2(__m256i v[4], rocq__rows row,
                                                                int64_t at) {
    ROCQ__UNROLL
    for (int r = 0; r < 4; r++) {
        const __m128i lo = _mm_loadu_si128((const __m128i *)(const void *)(row[r] + at));
        const __m128i hi = _mm_loadu_si128((const __m128i *)(const void *)(row[r + 4] + at));
        v[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(lo), hi, 1);
    }
}

ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__transpose_avx2(__m256i v[4]) {
    const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpacklo_epi32(v[2], v[3]);
    const __m256i c = _mm256_unpackhi_epi32(v[0], v[1]), d = _mm256_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm256_unpacklo_epi64(a, b);
    v[1] = _mm256_unpackhi_epi64(a, b);
    v[2] = _mm256_unpacklo_epi64(c, d);
    v[3] = _mm256_unpackhi_epi64(c, d);
}

ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__take_rows_avx2(__m256i v[4], rocq__rows row,
                                                                int64_t at) {
    rocq__load_rows_avx2(v, row, at);
    rocq__transpose_avx2(v);
}

// (v >> shift) & mask, per byte; no bit of the mask comes from the neighbour.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE __m256i rocq__bits_avx2(__m256i v, const int shift,
                                                              const int mask) {
    const __m256i moved = shift < 0 ? _mm256_slli_epi16(v, -shift) : _mm256_srli_epi16(v, shift);
    return _mm256_and_si256(moved, _mm256_set1_epi8((char)mask));
}

// Two bit fields of different bytes as one.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE __m256i rocq__join_avx2(__m256i a, const int shift_a,
                                                              const int mask_a, __m256i b,
                                                              const int shift_b, const int mask_b) {
    a = rocq__bits_avx2(a, shift_a, mask_a);
    b = rocq__bits_avx2(b, shift_b, mask_b);
    return _mm256_or_si256(a, b);
}

// The F16 in the lower half of each lane.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE __m256 rocq__halves_avx2(__m256i v) {
    const __m256i low = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
    const __m128i lo = _mm256_castsi256_si128(low), hi = _mm256_extracti128_si256(low, 1);
    return _mm256_cvtph_ps(_mm_packus_epi32(lo, hi));
}

// The F16 at the same place of each row.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE __m256 rocq__scales_of_rows_avx2(rocq__rows row,
                                                                            int64_t at) {
    uint16_t half[ROCQ__MM_ROWS];
    ROCQ__UNROLL
    for (int r = 0; r < ROCQ__MM_ROWS; r++) memcpy(&half[r], row[r] + at, sizeof half[r]);
    return _mm256_cvtph_ps(_mm_setr_epi16(
        (int16_t)half[0], (int16_t)half[1], (int16_t)half[2], (int16_t)half[3], (int16_t)half[4],
        (int16_t)half[5], (int16_t)half[6], (int16_t)half[7]));
}

// d times byte i of each lane, unsigned less offset.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__put_scale_avx2(float *dst, __m256 d, __m256i bytes,
                                                                const int i, const int offset) {
    const int zeros = (int)0x80808000u; // a zero in place of each of the upper three bytes
    const __m128i pick =
        _mm_add_epi32(_mm_setr_epi32(zeros, zeros + 4, zeros + 8, zeros + 12), _mm_set1_epi32(i));
    __m256i code = _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(pick));
    if (offset) code = _mm256_sub_epi32(code, _mm256_set1_epi32(offset));
    _mm256_storeu_ps(dst, _mm256_mul_ps(d, _mm256_cvtepi32_ps(code)));
}

// 2^k for -149 <= k <= 127.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE __m256 rocq__pow2_avx2(__m256i k) {
    const __m256i one = _mm256_set1_epi32(1), bias = _mm256_set1_epi32(127);
    const __m256i normal = _mm256_slli_epi32(_mm256_add_epi32(k, bias), 23);
    const __m256i tiny = _mm256_sllv_epi32(one, _mm256_add_epi32(k, _mm256_set1_epi32(149)));
    const __m256i is_tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(-126), k);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, is_tiny));
}

// Where a decoder puts one block of each of eight rows: into a panel, or into the dot products with
// a single column.
typedef struct rocq__sink {
    float (*scale)[ROCQ__MM_PAIR];  // of each group, as min is: the first eight
    float (*min)[ROCQ__MM_PAIR];
    __m256i *codes;                 // panel: every other 32 bytes, per four codes
    const int8_t *x;                // dot: codes of the column
    const rocq__mm_group *x_groups; // and its groups
    bool has_min, raised, is_signed; // of the format: see ROCQ__MM_AVX2
    __m256i pairs[8], dot[8];       // running sums of the groups being decoded
    __m256 sum;
} rocq__sink;

// In place of the depth of a dot. The byte dot instruction adds four products to 32 bits: that of
// AVX-512 VNNI, and that of AVX-VNNI, which has an encoding of its own.
enum { ROCQ__PANEL = -1, ROCQ__AVX512_VNNI = -2, ROCQ__AVX_VNNI = -3 };

// Adds the products of unsigned w and signed x. As assembly, because a function for AVX2 cannot
// call the intrinsic, and all decoders are such functions.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE __m256i rocq__dpbusd_avx2(const int depth, __m256i sum,
                                                                __m256i w, __m256i x) {
#if ROCQ__HAS_AVX_VNNI
    if (depth == ROCQ__AVX_VNNI) {
        __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
        return sum;
    }
#endif
    (void)depth;
    __asm__("vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
    return sum;
}

// Takes codes 4 q to 4 q + 3 of group first + i; a group has 4 * quads codes. A decoder works on at
// most eight groups side by side, from first on, and passes the codes of each in order.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__put_avx2(rocq__sink *to, const int depth,
                                                          int64_t first, const int i,
                                                          const int quads, const int q, __m256i v) {
    const int64_t at = (first + i) * quads + q;
    const __m256i four = depth == ROCQ__PANEL ? v : rocq__four_codes(to->x + 4 * at);
    if (depth == ROCQ__PANEL) {
        _mm256_store_si256(to->codes + 2 * at, v);
    } else if (depth < 0) {
        const __m256i zero = _mm256_setzero_si256();
        if (to->is_signed) v = _mm256_xor_si256(v, _mm256_set1_epi8(-128)); // raised by 128
        to->dot[i] = rocq__dpbusd_avx2(depth, q ? to->dot[i] : zero, v, four);
    } else {
        rocq__dot_4_avx2(&to->dot[i], &to->pairs[i], v, four, q, depth);
    }
}

// Ends n groups: their products are added in order.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__end_groups_avx2(rocq__sink *to, const int depth,
                                                                 int64_t first, const int n) {
    if (depth == ROCQ__PANEL) return;
    ROCQ__UNROLL
    for (int i = 0; i < n; i++) {
        const rocq__mm_group *group = to->x_groups + first + i;
        to->sum =
            rocq__add_group_avx2(to->sum, to->dot[i], to->scale[first + i], group, to->raised);
        if (to->has_min) to->sum = rocq__add_min_avx2(to->sum, to->min[first + i], group);
    }
}

enum { ROCQ__PLAIN4, ROCQ__IQ4, ROCQ__MX4 };

// 16 bytes of each row as 32 codes: the low halves of the bytes, then the high ones.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__take_halves_avx2(__m256i out[8], rocq__rows row,
                                                                  int64_t at, const int levels) {
    __m256i q[4];
    rocq__take_rows_avx2(q, row, at);
    const int8_t *table = levels == ROCQ__MX4 ? rocq__mxfp4_levels : rocq__iq4_levels;
    const __m128i sixteen = _mm_loadu_si128((const __m128i *)(const void *)table);
    const __m256i level = _mm256_broadcastsi128_si256(sixteen);
    ROCQ__UNROLL
    for (int j = 0; j < 8; j++) {
        __m256i v = rocq__bits_avx2(q[j % 4], j < 4 ? 0 : 4, 15);
        if (levels != ROCQ__PLAIN4) v = _mm256_shuffle_epi8(level, v);
        if (levels == ROCQ__MX4) v = _mm256_add_epi8(v, _mm256_set1_epi8(12));
        out[j] = v;
    }
}

// A group of 32.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__put_8_avx2(rocq__sink *to, const int depth,
                                                            int64_t group, const __m256i v[8]) {
    ROCQ__UNROLL
    for (int j = 0; j < 8; j++) rocq__put_avx2(to, depth, group, 0, 8, j, v[j]);
    rocq__end_groups_avx2(to, depth, group, 1);
}

// One block of each of the eight rows, `at` bytes into them. depth is that of the dot, or
// ROCQ__PANEL. With gcc, most loops over the parts of a large block stay loops: unrolled they run
// no faster and take a tenth of the file's compile time.
#define ROCQ__BLOCK_AVX2(name)                                             \
    ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__block_##name##_avx2( \
        rocq__sink *to, const int depth, rocq__rows row, int64_t at)

ROCQ__BLOCK_AVX2(q4_0) {
    __m256i q[8];
    _mm256_storeu_ps(to->scale[0], rocq__scales_of_rows_avx2(row, at));
    rocq__take_halves_avx2(q, row, at + 2, ROCQ__PLAIN4);
    rocq__put_8_avx2(to, depth, 0, q);
}

ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__put_scale_and_min_avx2(float *scale, float *min,
                                                                        __m256i head) {
    _mm256_storeu_ps(scale, rocq__halves_avx2(head));
    const __m256 m = rocq__halves_avx2(_mm256_srli_epi32(head, 16));
    _mm256_storeu_ps(min, _mm256_xor_ps(m, _mm256_set1_ps(-0.0f)));
}

ROCQ__BLOCK_AVX2(q4_1) {
    __m256i head[4], q[8];
    rocq__take_rows_avx2(head, row, at);
    rocq__put_scale_and_min_avx2(to->scale[0], to->min[0], head[0]);
    rocq__take_halves_avx2(q, row, at + 4, ROCQ__PLAIN4);
    rocq__put_8_avx2(to, depth, 0, q);
}

// Raises code i of a row by 16 where bit i of the row's lane in high is set.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__put_fifth_bits_avx2(__m256i out[8], __m256i high) {
    ROCQ__UNROLL
    for (int j = 0; j < 8; j++) {
        const int byte = j / 2 * 0x01010101;
        const __m128i lane = _mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c);
        const __m128i pick = _mm_add_epi8(lane, _mm_set1_epi32(byte));
        const __m256i all = _mm256_shuffle_epi8(high, _mm256_broadcastsi128_si256(pick));
        const __m256i bit = _mm256_set1_epi32(j % 2 ? (int)0x80402010u : 0x08040201);
        const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(all, bit), bit);
        out[j] = _mm256_or_si256(out[j], _mm256_and_si256(set, _mm256_set1_epi8(16)));
    }
}

ROCQ__BLOCK_AVX2(q5_0) {
    __m256i head[4], q[8];
    rocq__take_rows_avx2(head, row, at);
    _mm256_storeu_ps(to->scale[0], rocq__halves_avx2(head[0]));
    rocq__take_halves_avx2(q, row, at + 6, ROCQ__PLAIN4);
    const __m256i low = _mm256_srli_epi32(head[0], 16), top = _mm256_slli_epi32(head[1], 16);
    rocq__put_fifth_bits_avx2(q, _mm256_or_si256(low, top));
    rocq__put_8_avx2(to, depth, 0, q);
}

ROCQ__BLOCK_AVX2(q5_1) {
    __m256i head[4], q[8];
    rocq__take_rows_avx2(head, row, at);
    rocq__put_scale_and_min_avx2(to->scale[0], to->min[0], head[0]);
    rocq__take_halves_avx2(q, row, at + 8, ROCQ__PLAIN4);
    rocq__put_fifth_bits_avx2(q, head[1]);
    rocq__put_8_avx2(to, depth, 0, q);
}

// The products of 32 signed codes of each row with x: eight sums a row, added as a tree. For codes
// of a byte that takes fewer shuffles than to transpose them.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE __m256i rocq__dot_rows_avx2(const int depth, const int8_t *x,
                                                                  rocq__rows row, int64_t at) {
    const __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)x);
    __m256i s[ROCQ__MM_ROWS];
    ROCQ__UNROLL
    for (int r = 0; r < ROCQ__MM_ROWS; r++) {
        const __m256i w = _mm256_loadu_si256((const __m256i *)(const void *)(row[r] + at));
        if (depth < 0) {
            const __m256i zero = _mm256_setzero_si256(), raised = _mm256_set1_epi8(-128);
            s[r] = rocq__dpbusd_avx2(depth, zero, _mm256_xor_si256(w, raised), v);
        } else {
            s[r] = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(v, w));
            s[r] = _mm256_madd_epi16(s[r], _mm256_set1_epi16(1));
        }
    }
    ROCQ__UNROLL
    for (int r = 0; r < ROCQ__MM_ROWS; r += 2) {
        s[r] = _mm256_add_epi32(_mm256_unpacklo_epi32(s[r], s[r + 1]),
                                _mm256_unpackhi_epi32(s[r], s[r + 1]));
    }
    ROCQ__UNROLL
    for (int r = 0; r < ROCQ__MM_ROWS; r += 4) {
        s[r] = _mm256_add_epi32(_mm256_unpacklo_epi64(s[r], s[r + 2]),
                                _mm256_unpackhi_epi64(s[r], s[r + 2]));
    }
    return _mm256_add_epi32(_mm256_permute2x128_si256(s[0], s[4], 0x20),
                            _mm256_permute2x128_si256(s[0], s[4], 0x31));
}

ROCQ__BLOCK_AVX2(q8_0) {
    __m256i q[8];
    _mm256_storeu_ps(to->scale[0], rocq__scales_of_rows_avx2(row, at));
    if (depth != ROCQ__PANEL) {
        to->dot[0] = rocq__dot_rows_avx2(depth, to->x, row, at + 2);
        rocq__end_groups_avx2(to, depth, 0, 1);
        return;
    }
    rocq__take_rows_avx2(q, row, at + 2);
    rocq__take_rows_avx2(q + 4, row, at + 18);
    rocq__put_8_avx2(to, depth, 0, q);
}

ROCQ__BLOCK_AVX2(q2_K) {
    __m256i v[8];
    rocq__take_rows_avx2(v, row, at + 68); // the last 4 of these 16 bytes are d and dmin
    const __m256 d = rocq__halves_avx2(v[3]), dmin = rocq__halves_avx2(_mm256_srli_epi32(v[3], 16));
    rocq__take_rows_avx2(v, row, at);
    ROCQ__UNROLL
    for (int i = 0; i < 4; i++) {
        ROCQ__UNROLL
        for (int j = 0; j < 4; j++) {
            rocq__put_scale_avx2(to->scale[4 * i + j], d, rocq__bits_avx2(v[i], 0, 15), j, 0);
            rocq__put_scale_avx2(to->min[4 * i + j], dmin, rocq__bits_avx2(v[i], 4, 15), j, 0);
        }
    }
    ROCQ__UNROLL_PARTS
    for (int h = 0; h < 2; h++) {
        rocq__take_rows_avx2(v, row, at + 16 + 32 * h);
        rocq__take_rows_avx2(v + 4, row, at + 32 + 32 * h);
        ROCQ__UNROLL
        for (int g = 0; g < 8; g += 2) { // groups end two at a time: their chain of adds is slow
            ROCQ__UNROLL
            for (int j = 0; j < 8; j++) {
                const __m256i q = rocq__bits_avx2(v[j], g, 3);
                rocq__put_avx2(to, depth, 8 * h + g, j / 4, 4, j % 4, q);
            }
            rocq__end_groups_avx2(to, depth, 8 * h + g, 2);
        }
    }
}

ROCQ__BLOCK_AVX2(q3_K) {
    __m256i v[8], s[4], high[8];
    rocq__take_rows_avx2(v, row, at + 94); // bytes 2 to 13 of these are scales, then d
    ROCQ__UNROLL
    for (int i = 0; i < 3; i++) {
        s[i] = _mm256_or_si256(_mm256_srli_epi32(v[i], 16), _mm256_slli_epi32(v[i + 1], 16));
    }
    const __m256 d = rocq__halves_avx2(_mm256_srli_epi32(v[3], 16));
    ROCQ__UNROLL
    for (int i = 0; i < 4; i++) {
        const __m256i four = i < 2 ? s[i] : _mm256_srli_epi16(s[i - 2], 4);
        const __m256i code = rocq__join_avx2(four, 0, 15, s[2], -4, 48);
        s[2] = _mm256_srli_epi16(s[2], 2);
        ROCQ__UNROLL
        for (int j = 0; j < 4; j++) rocq__put_scale_avx2(to->scale[4 * i + j], d, code, j, 32);
    }
    rocq__take_rows_avx2(high, row, at);
    rocq__take_rows_avx2(high + 4, row, at + 16);
    ROCQ__UNROLL_PARTS
    for (int h = 0; h < 2; h++) {
        rocq__take_rows_avx2(v, row, at + 32 + 32 * h);
        rocq__take_rows_avx2(v + 4, row, at + 48 + 32 * h);
        ROCQ__UNROLL
        for (int g = 0; g < 8; g += 2) {
            ROCQ__UNROLL
            for (int j = 0; j < 8; j++) {
                const __m256i q = rocq__join_avx2(v[j], g, 3, high[j], g / 2 - 2, 4);
                rocq__put_avx2(to, depth, 8 * h + g, j / 4, 4, j % 4, q);
                if (g == 6) high[j] = _mm256_srli_epi16(high[j], 4);
            }
            rocq__end_groups_avx2(to, depth, 8 * h + g, 2);
        }
    }
}

// The scales and mins of Q4_K and Q5_K.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__put_k_scales_avx2(rocq__sink *to, rocq__rows row,
                                                                   int64_t at) {
    __m256i v[4];
    rocq__take_rows_avx2(v, row, at);
    const __m256 d = rocq__halves_avx2(v[0]), dmin = rocq__halves_avx2(_mm256_srli_epi32(v[0], 16));
    const __m256i sc = rocq__join_avx2(v[3], 0, 15, v[1], 2, 48); // of groups 4 to 7
    const __m256i mn = rocq__join_avx2(v[3], 4, 15, v[2], 2, 48);
    ROCQ__UNROLL
    for (int g = 0; g < 4; g++) {
        rocq__put_scale_avx2(to->scale[g], d, rocq__bits_avx2(v[1], 0, 63), g, 0);
        rocq__put_scale_avx2(to->min[g], dmin, rocq__bits_avx2(v[2], 0, 63), g, 0);
        rocq__put_scale_avx2(to->scale[4 + g], d, sc, g, 0);
        rocq__put_scale_avx2(to->min[4 + g], dmin, mn, g, 0);
    }
}

// 32 bytes hold a group in the low halves of the bytes, and the next in the high ones.
ROCQ__BLOCK_AVX2(q4_K) {
    rocq__put_k_scales_avx2(to, row, at);
    ROCQ__UNROLL_PARTS
    for (int c = 0; c < 4; c++) {
        ROCQ__UNROLL
        for (int i = 0; i < 2; i++) {
            __m256i q[8];
            rocq__take_halves_avx2(q, row, at + 16 + 32 * c + 16 * i, ROCQ__PLAIN4);
            ROCQ__UNROLL
            for (int j = 0; j < 8; j++) {
                rocq__put_avx2(to, depth, 2 * c, j / 4, 8, 4 * i + j % 4, q[j]);
            }
        }
        rocq__end_groups_avx2(to, depth, 2 * c, 2);
    }
}

ROCQ__BLOCK_AVX2(q5_K) {
    __m256i high[8];
    rocq__put_k_scales_avx2(to, row, at);
    rocq__take_rows_avx2(high, row, at + 16);
    rocq__take_rows_avx2(high + 4, row, at + 32);
    ROCQ__UNROLL
    for (int c = 0; c < 4; c++) {
        ROCQ__UNROLL
        for (int i = 0; i < 2; i++) {
            __m256i q[8];
            rocq__take_halves_avx2(q, row, at + 48 + 32 * c + 16 * i, ROCQ__PLAIN4);
            ROCQ__UNROLL
            for (int j = 0; j < 8; j++) {
                __m256i *top = high + 4 * i + j % 4;
                const __m256i bit = rocq__bits_avx2(*top, j < 4 ? -4 : -3, 16);
                rocq__put_avx2(to, depth, 2 * c, j / 4, 8, 4 * i + j % 4,
                               _mm256_or_si256(q[j], bit));
                if (j > 3) *top = _mm256_srli_epi16(*top, 2);
            }
        }
        rocq__end_groups_avx2(to, depth, 2 * c, 2);
    }
}

ROCQ__BLOCK_AVX2(q6_K) {
    __m256i a[4], b[4], high[4], s[4];
    rocq__take_rows_avx2(a, row, at + 194); // the last 2 of these 16 bytes are d
    const __m256 d = rocq__halves_avx2(_mm256_srli_epi32(a[3], 16));
    rocq__take_rows_avx2(s, row, at + 192);
    for (int i = 0; i < 4; i++) {
        const __m256i code = _mm256_xor_si256(s[i], _mm256_set1_epi8(-128));
        ROCQ__UNROLL
        for (int j = 0; j < 4; j++) rocq__put_scale_avx2(to->scale[4 * i + j], d, code, j, 128);
    }
    ROCQ__UNROLL_PARTS
    for (int h = 0; h < 2; h++) {
        ROCQ__UNROLL
        for (int i = 0; i < 2; i++) { // groups i, i + 2, i + 4 and i + 6 of the half
            rocq__take_rows_avx2(a, row, at + 64 * h + 16 * i);
            rocq__take_rows_avx2(b, row, at + 64 * h + 32 + 16 * i);
            rocq__take_rows_avx2(high, row, at + 128 + 32 * h + 16 * i);
            ROCQ__UNROLL
            for (int j = 0; j < 4; j++) {
                const __m256i q[4] = {rocq__join_avx2(a[j], 0, 15, high[j], -4, 48),
                                      rocq__join_avx2(b[j], 0, 15, high[j], -2, 48),
                                      rocq__join_avx2(a[j], 4, 15, high[j], 0, 48),
                                      rocq__join_avx2(b[j], 4, 15, high[j], 2, 48)};
                ROCQ__UNROLL
                for (int k = 0; k < 4; k++) rocq__put_avx2(to, depth, 8 * h, 2 * k + i, 4, j, q[k]);
            }
        }
        rocq__end_groups_avx2(to, depth, 8 * h, 8);
    }
}

ROCQ__BLOCK_AVX2(iq4_nl) {
    __m256i q[8];
    _mm256_storeu_ps(to->scale[0], rocq__scales_of_rows_avx2(row, at));
    rocq__take_halves_avx2(q, row, at + 2, ROCQ__IQ4);
    rocq__put_8_avx2(to, depth, 0, q);
}

ROCQ__BLOCK_AVX2(iq4_xs) {
    __m256i head[4], q[8];
    rocq__take_rows_avx2(head, row, at);
    const __m256 d = rocq__halves_avx2(head[0]);
    __m256i low = head[1], top = _mm256_srli_epi32(head[0], 16);
    ROCQ__UNROLL_PARTS
    for (int g = 0; g < 8; g++) {
        const __m256i code = rocq__join_avx2(low, 0, 15, top, -4, 48);
        rocq__put_scale_avx2(to->scale[g], d, code, 0, 32);
        low = _mm256_srli_epi32(low, 4);
        top = _mm256_srli_epi32(top, 2);
        rocq__take_halves_avx2(q, row, at + 8 + 16 * g, ROCQ__IQ4);
        rocq__put_8_avx2(to, depth, g, q);
    }
}

ROCQ__BLOCK_AVX2(mxfp4) {
    __m256i head[4], q[8];
    rocq__take_rows_avx2(head, row, at);
    const __m256i e = _mm256_and_si256(head[0], _mm256_set1_epi32(255));
    _mm256_storeu_ps(to->scale[0], rocq__pow2_avx2(_mm256_sub_epi32(e, _mm256_set1_epi32(128))));
    rocq__take_halves_avx2(q, row, at + 1, ROCQ__MX4);
    rocq__put_8_avx2(to, depth, 0, q);
}

ROCQ__BLOCK_AVX2(mxfp6_e2m3) {
    // Elements 0 to 15 stand for themselves, in units of the smallest, 16 to 31 for these.
    const __m128i upper =
        _mm_setr_epi8(16, 18, 20, 22, 24, 26, 28, 30, 32, 36, 40, 44, 48, 52, 56, 60);
    const __m128i three =
        _mm_setr_epi8(0, 1, 2, -128, 3, 4, 5, -128, 6, 7, 8, -128, 9, 10, 11, -128);
    const __m256i levels = _mm256_broadcastsi128_si256(upper);
    __m256i v[4], out[8];
    rocq__take_rows_avx2(v, row, at);
    const __m256i e = _mm256_and_si256(v[0], _mm256_set1_epi32(255));
    const __m256i is_nan = _mm256_cmpeq_epi32(e, _mm256_set1_epi32(255));
    const __m256 d = rocq__pow2_avx2(_mm256_sub_epi32(e, _mm256_set1_epi32(130)));
    _mm256_storeu_ps(to->scale[0], _mm256_or_ps(d, _mm256_castsi256_ps(is_nan)));
    ROCQ__UNROLL
    for (int i = 0; i < 2; i++) { // 12 bytes are 16 codes; a lane takes 3 of them, 4 codes
        const __m128i pick = _mm_add_epi8(three, _mm_set1_epi8((char)(4 * i)));
        rocq__load_rows_avx2(v, row, at + 1 + 8 * i);
        ROCQ__UNROLL
        for (int r = 0; r < 4; r++) {
            v[r] = _mm256_shuffle_epi8(v[r], _mm256_broadcastsi128_si256(pick));
        }
        rocq__transpose_avx2(v);
        ROCQ__UNROLL
        for (int j = 0; j < 4; j++) {
            __m256i q = _mm256_setzero_si256();
            ROCQ__UNROLL
            for (int c = 0; c < 4; c++) {
                const __m256i moved = _mm256_slli_epi32(v[j], 2 * c);
                q = _mm256_or_si256(q, _mm256_and_si256(moved, _mm256_set1_epi32(63 << 8 * c)));
            }
            const __m256i low = rocq__bits_avx2(q, 0, 15), high = _mm256_shuffle_epi8(levels, low);
            const __m256i size = _mm256_blendv_epi8(low, high, _mm256_slli_epi16(q, 3)); // by bit 4
            const __m256i sign = _mm256_sub_epi8(_mm256_set1_epi8(1), rocq__bits_avx2(q, 4, 2));
            out[4 * i + j] = _mm256_sign_epi8(size, sign);
        }
    }
    rocq__put_8_avx2(to, depth, 0, out);
}
#undef ROCQ__BLOCK_AVX2

// X(NAME, name, raise, depth): what the decoders above raise the codes by, and the depth that their
// range allows: 2 up to code 63, 4 up to 31, 8 up to 15, but at most the fours in a group.
#define ROCQ__MM_AVX2(X)    \
    X(Q4_0, q4_0, 8, 8)     \
    X(Q4_1, q4_1, 0, 8)     \
    X(Q5_0, q5_0, 16, 4)    \
    X(Q5_1, q5_1, 0, 4)     \
    X(Q8_0, q8_0, 0, 0)     \
    X(Q2_K, q2_K, 0, 4)     \
    X(Q3_K, q3_K, 4, 4)     \
    X(Q4_K, q4_K, 0, 8)     \
    X(Q5_K, q5_K, 0, 4)     \
    X(Q6_K, q6_K, 32, 2)    \
    X(IQ4_NL, iq4_nl, 0, 0) \
    X(IQ4_XS, iq4_xs, 0, 0) \
    X(MXFP4, mxfp4, 12, 4)  \
    X(MXFP6_E2M3, mxfp6_e2m3, 0, 0)

// Those whose pass has forms for the byte dot instruction: with 1024 rows of 1024 in cache they are
// 1.15 to 1.5 times as fast (Sapphire Rapids). Others gain 12% at most, and would take as much more
// time to compile.
#define ROCQ__MM_VNNI(X)    \
    X(Q8_0, q8_0, 0, 0)     \
    X(Q3_K, q3_K, 4, 4)     \
    X(Q5_K, q5_K, 0, 4)     \
    X(IQ4_NL, iq4_nl, 0, 0) \
    X(IQ4_XS, iq4_xs, 0, 0)

// Prefetches the block `at` bytes into each row, unless a small block before it has prefetched the
// same cache line.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__fetch_block_avx2(const rocq__mm_rows *rows,
                                                                  int64_t at, const int64_t bytes) {
    if (bytes <= 64 && (at & 63) >= bytes) return;
    ROCQ__UNROLL
    for (int r = 0; r < ROCQ__MM_ROWS; r++) {
        ROCQ__UNROLL
        for (int64_t i = 0; i < bytes; i += 64) ROCQ__FETCH(rows->at[r] + i, at);
    }
}

typedef void (*rocq__block_avx2)(rocq__sink *to, const int depth, rocq__rows row, int64_t at);

// block and all after it are constants where this is inlined.
ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__pass_avx2(
    float *sums, const rocq__mm_tile *tile, const rocq__mm_rows *rows, rocq__block_avx2 block,
    const rocq__codec *codec, const int raise, const bool is_signed, const int depth) {
    const int64_t bytes = codec->info.block_bytes;
    float scale[16][ROCQ__MM_PAIR], min[16][ROCQ__MM_PAIR];
    rocq__sink to;
    to.scale = scale;
    to.min = min;
    to.x = rocq__tile_codes(tile, 0);
    to.x_groups = rocq__tile_groups(tile, 0);
    to.has_min = codec->has_min;
    to.is_signed = is_signed;
    to.raised = raise > 0 || (is_signed && depth < 0);
    to.sum = _mm256_setzero_ps();
    // Where row_ahead is 0, the next panel is prefetched in the order of memory, whatever row it
    // is: the fewest lines. Else each row is, past its end at the start of the next panel's.
    const int64_t row_bytes = rows->n_blocks * bytes, row_ahead = rows->row_ahead;
    const int64_t next_row = row_ahead - row_bytes + rows->ahead; // of the next panel
    const unsigned char *next = rows->at[0] + rows->ahead;
    for (int64_t at = 0; at < row_bytes; at += bytes, next += ROCQ__MM_ROWS * bytes) {
        if (row_ahead) {
            rocq__fetch_block_avx2(rows, at + (at + row_ahead < row_bytes ? row_ahead : next_row),
                                   bytes);
        } else {
            ROCQ__UNROLL
            for (int i = 0; i < ROCQ__MM_ROWS * (int)bytes; i += 64) ROCQ__FETCH(next, i);
        }
        block(&to, depth, rows->at, at);
        to.x += codec->info.block_elems;
        to.x_groups += codec->info.block_elems / codec->group;
    }
    _mm256_storeu_ps(sums, to.sum);
}

ROCQ__TARGET_AVX2 ROCQ__ALWAYS_INLINE void rocq__pack_avx2(
    rocq__mm_work *work, const rocq__mm_rows *rows, int first, rocq__block_avx2 block,
    const rocq__codec *codec) {
    const int64_t bytes = codec->info.block_bytes;
    rocq__sink to;
    to.scale = (float(*)[ROCQ__MM_PAIR])(work->scale[0] + first);
    to.min = (float(*)[ROCQ__MM_PAIR])(work->min[0] + first);
    to.codes = (__m256i *)(void *)work->codes[0][first];
    for (int64_t at = 0; at < rows->n_blocks * bytes; at += bytes) {
        rocq__fetch_block_avx2(rows, at + rows->ahead, bytes);
        block(&to, ROCQ__PANEL, rows->at, at);
        to.codes += codec->info.block_elems / 2;
        to.scale += codec->info.block_elems / codec->group;
        to.min += codec->info.block_elems / codec->group;
    }
}

#define ROCQ__X(NAME, name, raise, depth)                                                         \
    ROCQ__TARGET_AVX2 static void rocq__pack_##name##_avx2(rocq__mm_work *work,                   \
                                                           const rocq__mm_rows *rows, int first) {\
        rocq__pack_avx2(work, rows, first, rocq__block_##name##_avx2, &rocq__codec_##name);       \
    }                                                                                             \
    ROCQ__PASS(name, avx2, raise, depth, depth)
#define ROCQ__PASS(name, tier, raise, depth_avx2, depth)                                          \
    ROCQ__TARGET_AVX2 static void rocq__pass_##name##_##tier(                                     \
        float *sums, const rocq__mm_tile *tile, const rocq__mm_rows *rows) {                      \
        rocq__pass_avx2(sums, tile, rows, rocq__block_##name##_avx2, &rocq__codec_##name, raise,  \
                        depth_avx2 == 0, depth);                                                  \
    }
ROCQ__MM_AVX2(ROCQ__X)
#undef ROCQ__X
#define ROCQ__X(NAME, name, raise, depth)                          \
    ROCQ__PASS(name, avx512_vnni, raise, depth, ROCQ__AVX512_VNNI) \
    ROCQ__PASS(name, avx_vnni, raise, depth, ROCQ__AVX_VNNI)
ROCQ__MM_VNNI(ROCQ__X)
#undef ROCQ__PASS
#undef ROCQ__X
#endif

// Chooses the kernels for INT8.
static void rocq__mm_choose_int8(rocq__mm *mm) {
    const rocq__codec *codec = rocq__codec_of(mm->p->w->format);
    mm->group = codec->group;
    mm->has_min = codec->has_min;
    mm->pack = rocq__pack_int8;
    mm->dot = rocq__dot_int8;
#if ROCQ__HAS_NEON
    if (mm->simd) mm->dot = rocq__dot_int8_neon;
#endif
#if ROCQ__HAS_AVX2
    if (!mm->simd) return;
    switch (mm->p->w->format) {
#define ROCQ__X(NAME, name, raise, depth)                              \
    case ROCQ_##NAME:                                                  \
        mm->offset = raise;                                            \
        mm->dot = rocq__dot_int8_for(mm->group, depth, mm->avx512);    \
        mm->pack = rocq__pack_##name##_avx2;                           \
        mm->pass = mm->n == 1 ? rocq__pass_##name##_avx2 : NULL;       \
        if (mm->avx512 && !mm->pass && (depth) == 0) mm->offset = 128; \
        break;
        ROCQ__MM_AVX2(ROCQ__X)
#undef ROCQ__X
    default: break;
    }
    if (!mm->pass || !(mm->avx512 || mm->avx_vnni)) return;
    switch (mm->p->w->format) {
#define ROCQ__X(NAME, name, raise, depth)                        \
    case ROCQ_##NAME:                                            \
        mm->offset = (depth) == 0 ? 128 : raise;                 \
        mm->pass = mm->avx512 ? rocq__pass_##name##_avx512_vnni  \
                              : rocq__pass_##name##_avx_vnni;    \
        break;
        ROCQ__MM_VNNI(ROCQ__X)
#undef ROCQ__X
    default: break;
    }
#endif
}

// Chooses the kernels that multiply floats.
static void rocq__mm_choose_float(rocq__mm *mm) {
    const rocq_format format = mm->p->w->format;
    mm->dot_f32 = rocq__dot_f32;
#if ROCQ__HAS_V8
    rocq__mm_dot_float f16 = rocq__dot_f16_simd, bf16 = rocq__dot_bf16_simd;
    const bool few = mm->n <= ROCQ__MM_FEW; // for more columns, rows are widened once into a panel
#if ROCQ__HAS_AVX2
    if (mm->avx512) {
        f16 = rocq__dot_f16_avx512;
        bf16 = rocq__dot_bf16_avx512;
    }
#endif
    if (mm->simd) mm->dot_f32 = rocq__dot_f32_simd;
#if ROCQ__HAS_AVX2
    if (mm->avx512) mm->dot_f32 = rocq__dot_f32_avx512;
#endif
    if (mm->dot_f32 != rocq__dot_f32 && few && format == ROCQ_F16) mm->dot_as_is = f16;
    if (mm->dot_f32 != rocq__dot_f32 && few && format == ROCQ_BF16) mm->dot_as_is = bf16;
#endif
    if (format == ROCQ_F32) mm->dot_as_is = mm->dot_f32;
#if ROCQ__HAS_AVX2
    if (mm->avx512 && !few) {
        mm->dot_f32 = rocq__dot_panel_avx512;
        mm->dot_as_is = NULL;
        mm->interleaved = true;
    }
#endif
}

// Adds to sums the products of a panel's rows, with INT8 a pair's, with n columns over elements
// first .. first + k of K.
static void rocq__mm_panel(const rocq__mm *mm, rocq__mm_work *work,
                           float (*sums)[ROCQ__MM_TILE_M], const unsigned char *const *row,
                           int64_t first, int64_t k, const unsigned char *columns, int64_t n) {
    const rocq_tensor *t = mm->p->w;
    const rocq_format format = t->format;
    const int64_t start = rocq__bytes(format, first);
    rocq__mm_rows rows;
    for (int r = 0; r < ROCQ__MM_ROWS; r++) rows.at[r] = row[r] + start;
    const int64_t rows_of = mm->precision == ROCQ_PRECISION_INT8 ? ROCQ__MM_PAIR : ROCQ__MM_ROWS;
    rows.ahead = first + k < t->ne[0] ? rocq__bytes(format, k) // then the next panel's rows
                                      : rows_of * rocq__bytes(format, t->stride[1]) - start;
    if (mm->precision == ROCQ_PRECISION_INT8) {
        rocq__mm_tile tile;
        rows.codec = rocq__codec_of(format);
        rows.n_blocks = k / rows.codec->info.block_elems;
        tile.work = work;
        tile.group = mm->group;
        tile.n_groups = k / mm->group;
        tile.has_min = mm->has_min;
        tile.x = (const int8_t *)columns + first;
        tile.groups_at = t->ne[0] - first;
        tile.groups_at += first / mm->group * (int64_t)sizeof(rocq__mm_group);
        tile.column_bytes = mm->column_bytes;
        tile.n = n;
        mm->pack(work, &rows, 0);
        for (int r = 0; r < ROCQ__MM_ROWS; r++) rows.at[r] = row[ROCQ__MM_ROWS + r] + start;
        mm->pack(work, &rows, ROCQ__MM_ROWS);
        mm->dot(sums, &tile);
        return;
    }
    const float *x = (const float *)(const void *)columns + first;
    const int64_t column_floats = mm->column_bytes / 4, padded = (k + 7) / 8 * 8;
    if (mm->dot_as_is && padded == k) {
        mm->dot_as_is(sums, &rows, k, x, column_floats, n);
        return;
    }
    rocq__mm_rows floats;
    floats.ahead = 0;
#if ROCQ__HAS_AVX2
    if (mm->interleaved) {
        const int64_t next = ROCQ__MM_ROWS * rocq__bytes(format, t->stride[1]); // the next panel
        for (int r = 0; r < ROCQ__MM_ROWS; r++) {
            rocq__interleave_row(work->rows[0] + 8 * r, format, rows.at[r], k, next);
        }
        floats.at[0] = (const unsigned char *)work->rows;
        mm->dot_f32(sums, &floats, padded, x, column_floats, n);
        return;
    }
#endif
    for (int r = 0; r < ROCQ__MM_ROWS; r++) {
        if (r > 0 && rows.at[r] == rows.at[r - 1]) {
            floats.at[r] = floats.at[r - 1];
            continue;
        }
        rocq__decode(mm->simd, format, work->rows[r], rows.at[r], k);
        for (int64_t i = k; i < padded; i++) work->rows[r][i] = 0.0f;
        floats.at[r] = (const unsigned char *)work->rows[r];
    }
    mm->dot_f32(sums, &floats, padded, x, column_floats, n);
}

// -- step 3: epilogue --

// Adds elements m to m + n of a row in F32 or F16 to t, or multiplies t with them.
static void rocq__mm_combine(const rocq__mm *mm, float *t, const rocq_tensor *operand,
                             rocq__mm_coord at, int64_t m, int64_t n, bool multiply) {
    const unsigned char *row = rocq__row(operand, at.i1, at.i2, at.i3);
    float strip[ROCQ__MM_TILE_M];
    for (int64_t i = 0, some; i < n; i += some) {
        const float *v = (const float *)(const void *)row + m + i;
        some = ROCQ__MIN(n - i, (int64_t)ROCQ__MM_TILE_M);
        if (operand->format != ROCQ_F32) {
            rocq__decode(mm->simd, operand->format, strip, row + (m + i) * 2, some);
            v = strip;
        }
        if (multiply) ROCQ__EITHER(mm->simd, rocq__multiply, (t + i, v, some));
        else ROCQ__EITHER(mm->simd, rocq__add, (t + i, v, some));
    }
}

// Turns n sums of one column, for rows m and up, into elements of y.
static void rocq__mm_finish(const rocq__mm *mm, int64_t matrix, int64_t column, int64_t m,
                            int64_t n, float *t) {
    const rocq_matmul_params *p = mm->p;
    const rocq__mm_coord at = rocq__mm_coord_of(mm, matrix, column), first = {0, 0, 0};
    if (p->bias) rocq__mm_combine(mm, t, p->bias, first, m, n, false);
    rocq__activate_row(mm->simd, p->activation, t, n);
    if (p->softcap > 0.0f) rocq__softcap_row(mm->simd, p->softcap, t, n);
    if (p->gate) rocq__mm_combine(mm, t, p->gate, at, m, n, true);
    if (mm->other) rocq__mm_combine(mm, t, mm->other, at, m, n, true);
    if (p->residual) rocq__mm_combine(mm, t, p->residual, at, m, n, false);
    unsigned char *y = rocq__row(p->y, at.i1, at.i2, at.i3);
    if (p->y->format == ROCQ_F32) {
        memcpy(y + m * 4, t, (size_t)n * sizeof *t);
    } else {
        for (int64_t i = 0; i < n; i++) ((uint16_t *)(void *)y)[m + i] = rocq__f32_to_f16(t[i]);
    }
}

// -- the whole --

// Panels begin .. end, counted through the panels of w, then tiles of columns, then matrices.
static void rocq__mm_run(void *arg, int64_t begin, int64_t end, int32_t thread) {
    const rocq__mm *mm = (const rocq__mm *)arg;
    const rocq_tensor *w = mm->p->w;
    rocq__mm_work *work = mm->work + thread;
    const bool few = mm->n <= ROCQ__MM_FEW;
    const int64_t most = few ? 1 : ROCQ__MM_TILE_M / mm->panel_rows;
    const bool pairs = mm->precision == ROCQ_PRECISION_INT8;
    const int64_t step = pairs ? ROCQ__MM_PAIR : ROCQ__MM_ROWS;
    for (int64_t i = begin, n_panels; i < end; i += n_panels) {
        const int64_t panel = i % mm->n_panels, tile = i / mm->n_panels % mm->n_tiles;
        const int64_t matrix = i / mm->n_panels / mm->n_tiles;
        const int64_t m = panel * mm->panel_rows, column = tile * ROCQ__MM_TILE_N;
        n_panels = ROCQ__MIN(ROCQ__MIN(most, end - i), mm->n_panels - panel);
        const int64_t n_rows = ROCQ__MIN(n_panels * mm->panel_rows, w->ne[1] - m);
        const int64_t n = ROCQ__MIN((int64_t)ROCQ__MM_TILE_N, mm->n - column);
        const unsigned char *columns = mm->columns + (matrix * mm->n + column) * mm->column_bytes;
        const unsigned char *row[ROCQ__MM_TILE_M]; // past the last row, the last row again
        for (int64_t r = 0; r < n_panels * mm->panel_rows; r++) {
            const int64_t i1 = m + ROCQ__MIN(r, n_rows - 1);
            row[r] = rocq__row(w, i1, matrix % w->ne[2], matrix / w->ne[2]);
        }
        memset(work->sums, 0, (size_t)((n + 7) / 8 * 8) * sizeof work->sums[0]);
        // Few columns meet all of K of a panel or pair before the next one.
        const int64_t n_padded = n_panels * mm->panel_rows, some = few ? step : n_padded;
        for (int64_t top = 0; top < n_padded; top += some) {
            for (int64_t first = 0; first < w->ne[0]; first += ROCQ__MM_SEGMENT) {
                const int64_t k = ROCQ__MIN((int64_t)ROCQ__MM_SEGMENT, w->ne[0] - first);
                for (int64_t r = top; r < top + some; r += step) {
                    float(*sums)[ROCQ__MM_TILE_M] = (float(*)[ROCQ__MM_TILE_M])(work->sums[0] + r);
                    rocq__mm_panel(mm, work, sums, row + r, first, k, columns, n);
                }
            }
        }
        for (int64_t c = 0; c < n; c++) {
            rocq__mm_finish(mm, matrix, column + c, m, n_rows, work->sums[c]);
        }
    }
}

// The same where a single column takes the pass: all of K at once, and the epilogue for as many
// rows as the F32 panel, idle here, has room for. Of a K of 256, addresses and epilogues of single
// panels cost as much as the products.
static void rocq__mm_run_column(void *arg, int64_t begin, int64_t end, int32_t thread) {
    const rocq__mm *mm = (const rocq__mm *)arg;
    const rocq_tensor *w = mm->p->w;
    const int64_t k = w->ne[0], stride = rocq__bytes(w->format, w->stride[1]);
    float *sums = mm->work[thread].rows[0];
    rocq__mm_rows rows;
    rows.codec = rocq__codec_of(w->format);
    rows.n_blocks = k / rows.codec->info.block_elems;
    rows.ahead = ROCQ__MM_ROWS * stride; // the next panel
    // A panel of long rows is most of L1 or more, and prefetched as a whole it is evicted before
    // its use: 2 KiB ahead in each row, Q8_0 of 4096 and Q4_0 of 14336 stream 1.14 to 1.18 times as
    // fast on Sapphire Rapids. Q4_0 of 4096 would lose 10% there, and of 8192 15% on Zen 3.
    rows.row_ahead = mm->avx512 && stride >= 4096 ? 2048 : 0;
    for (int64_t i = begin, n_panels; i < end; i += n_panels) {
        const int64_t matrix = i / mm->n_panels, m = i % mm->n_panels * ROCQ__MM_ROWS;
        n_panels = ROCQ__MIN(ROCQ__MIN((int64_t)ROCQ__MM_SEGMENT, end - i),
                             mm->n_panels - m / ROCQ__MM_ROWS);
        const int64_t n_rows = ROCQ__MIN(n_panels * ROCQ__MM_ROWS, w->ne[1] - m);
        const unsigned char *row = rocq__row(w, m, matrix % w->ne[2], matrix / w->ne[2]);
        rocq__mm_tile tile;
        memset(&tile, 0, sizeof tile);
        tile.x = (const int8_t *)mm->columns + matrix * mm->column_bytes;
        tile.groups_at = k;
        for (int64_t r = 0; r < n_rows; r += ROCQ__MM_ROWS) {
            for (int j = 0; j < ROCQ__MM_ROWS; j++) { // past the last row, the last row again
                rows.at[j] = row;
                if (r + j + 1 < n_rows) row += stride;
            }
            mm->pass(sums + r, &tile, &rows);
        }
        rocq__mm_finish(mm, matrix, 0, m, n_rows, sums);
    }
}

static void rocq__mm_panels(rocq__mm *mm, int64_t begin, int64_t end, int32_t thread) {
    if (mm->pass) rocq__mm_run_column(mm, begin, end, thread);
    else rocq__mm_run(mm, begin, end, thread);
}

// Everything that follows from the params alone, but addresses in scratch memory.
static void rocq__mm_plan(rocq__mm *mm, const rocq_ctx *ctx, const rocq_matmul_params *p) {
    const int64_t k = p->w->ne[0];
    memset(mm, 0, sizeof *mm);
    mm->p = p;
    mm->simd = ctx->has_simd;
    mm->avx512 = ctx->has_simd && ctx->has_avx512;
    mm->avx_vnni = ctx->has_simd && ctx->has_avx_vnni;
    mm->precision = rocq__product_choice(ctx, ROCQ_BACKEND_CPU, p, p->w).precision;
    mm->n_matrices = p->w->ne[2] * p->w->ne[3];
    mm->n = p->x->ne[1] * (p->x->ne[2] / p->w->ne[2]) * (p->x->ne[3] / p->w->ne[3]);
    mm->n_tiles = (mm->n + ROCQ__MM_TILE_N - 1) / ROCQ__MM_TILE_N;
    if (mm->precision == ROCQ_PRECISION_INT8) {
        rocq__mm_choose_int8(mm);
        mm->column_bytes = k + k / mm->group * (int64_t)sizeof(rocq__mm_group);
    } else {
        rocq__mm_choose_float(mm);
        mm->column_bytes = k * 4;
    }
    mm->column_bytes = (mm->column_bytes + 63) / 64 * 64;
    mm->panel_rows = ROCQ__HAS_AVX2 && mm->simd && mm->n == 1 ? ROCQ__MM_ROWS : ROCQ__MM_PAIR;
    mm->n_panels = (p->w->ne[1] + mm->panel_rows - 1) / mm->panel_rows;
}

// Whether both products read the same columns of their common x. A converted group holds a sum for
// mins or one for raised codes (rocq__mm_group), so products must agree on which.
static bool rocq__mm_same_columns(const rocq__mm *a, const rocq__mm *b) {
    const rocq_tensor *v = a->p->w, *w = b->p->w;
    return a->precision == b->precision && a->group == b->group && a->offset == b->offset &&
           a->has_min == b->has_min && v->ne[2] == w->ne[2] && v->ne[3] == w->ne[3];
}

// A product of a chain. With w2 it is two: `other` writes w2 x to scratch memory as F32, and `main`
// multiplies by that. Then every chunk of panels goes through both. y in Q8_0 is written in F32
// too, and cast afterwards.
typedef struct rocq__mm_product {
    rocq__mm main, other;
    rocq_matmul_params main_params, other_params;
    rocq_tensor other_y, main_y;
    bool has_other, has_cast;
    int64_t other_at, main_at; // of those tensors, in scratch memory
} rocq__mm_product;

// All products of a chain, whose x is the same; columns that several can read are converted once.
typedef struct rocq__mm_chain {
    int32_t n_products, n_columns;
    int64_t work_bytes;
    struct {
        const rocq__mm *mm; // converts them
        int64_t at;         // in scratch memory
    } columns[2 * ROCQ__MOST_PRODUCTS];
    rocq__mm_product *products;
} rocq__mm_chain;

// With a cast (rocq__map) for each product. Fails to compile if a plan has no room for that.
typedef char rocq__mm_chain_fits[
    sizeof(rocq__mm_chain) + ROCQ__MOST_PRODUCTS * (sizeof(rocq__mm_product) + 96) <=
            ROCQ__PLAN_BYTES ? 1 : -1];

// Adds n bytes of scratch memory; what does not fit an int64 cannot be allocated either.
static int64_t rocq__mm_room(int64_t *bytes, int64_t n) {
    const int64_t at = *bytes;
    if (!rocq__round_up(n, 64, &n) || !rocq__add(at, n, bytes)) *bytes = INT64_MAX;
    return at;
}

static void rocq__mm_columns(rocq__mm_chain *chain, rocq__mm *mm, int64_t *bytes) {
    int64_t n;
    for (int32_t i = 0; i < chain->n_columns; i++) {
        mm->columns_at = chain->columns[i].at;
        if (rocq__mm_same_columns(mm, chain->columns[i].mm)) return;
    }
    // A stride of 0 can repeat one row of x any number of times.
    if (!rocq__mul(mm->column_bytes, mm->n, &n) || !rocq__mul(n, mm->n_matrices, &n)) {
        n = INT64_MAX;
    }
    mm->columns_at = rocq__mm_room(bytes, n);
    chain->columns[chain->n_columns].mm = mm;
    chain->columns[chain->n_columns++].at = mm->columns_at;
}

// Fills in all but addresses in scratch memory, of which it returns the bytes. products has room
// for the chain.
static int64_t rocq__mm_lay(rocq__mm_chain *chain, rocq__mm_product *products, const rocq_ctx *ctx,
                            const rocq_matmul_params *p) {
    int64_t bytes = 0, floats;
    memset(chain, 0, sizeof *chain);
    chain->products = products;
    chain->work_bytes = ctx->desc.n_threads * (int64_t)sizeof(rocq__mm_work);
    rocq__mm_room(&bytes, chain->work_bytes);
    for (; p; p = p->next) {
        rocq__mm_product *product = &products[chain->n_products++];
        memset(product, 0, sizeof *product);
        product->has_other = p->w2 != NULL;
        product->has_cast = p->y->format == ROCQ_Q8_0;
        product->main_params = *p;
        product->main_params.w2 = NULL;
        product->main_params.next = NULL;
        rocq__mm_plan(&product->main, ctx, &product->main_params);
        rocq__mm_columns(chain, &product->main, &bytes);
        if (!rocq__mul(rocq_tensor_count(p->y), 4, &floats)) floats = INT64_MAX;
        if (product->has_other) {
            product->other_params.y = p->y;
            product->other_params.w = p->w2;
            product->other_params.x = p->x;
            product->other_params.precision = p->precision;
            rocq__mm_plan(&product->other, ctx, &product->other_params);
            rocq__mm_columns(chain, &product->other, &bytes);
            product->other_at = rocq__mm_room(&bytes, floats);
        }
        if (product->has_cast) product->main_at = rocq__mm_room(&bytes, floats);
    }
    return bytes;
}

static int64_t rocq__scratch_matmul_cpu(const rocq_ctx *ctx, const void *params) {
    rocq__mm_product products[ROCQ__MOST_PRODUCTS];
    rocq__mm_chain chain;
    return rocq__mm_lay(&chain, products, ctx, (const rocq_matmul_params *)params);
}

static int64_t rocq__mm_items(const rocq__mm *mm) {
    return mm->n_panels * mm->n_tiles * mm->n_matrices;
}

// Stage 1: all columns of the chain.
static void rocq__mm_convert_all(void *arg, int64_t begin, int64_t end, int32_t thread) {
    const rocq__mm_chain *chain = (const rocq__mm_chain *)arg;
    int64_t first = 0;
    for (int32_t i = 0; i < chain->n_columns; i++) {
        rocq__mm *mm = (rocq__mm *)chain->columns[i].mm;
        const int64_t n = mm->n * mm->n_matrices;
        const int64_t from = ROCQ__MAX(begin - first, 0), to = ROCQ__MIN(end - first, n);
        if (from < to) rocq__mm_convert(mm, from, to, thread);
        first += n;
    }
}

// Stage 2: all panels of the chain.
static void rocq__mm_run_all(void *arg, int64_t begin, int64_t end, int32_t thread) {
    const rocq__mm_chain *chain = (const rocq__mm_chain *)arg;
    int64_t first = 0;
    for (int32_t i = 0; i < chain->n_products; i++) {
        rocq__mm_product *product = &chain->products[i];
        const int64_t n = rocq__mm_items(&product->main);
        const int64_t from = ROCQ__MAX(begin - first, 0), to = ROCQ__MIN(end - first, n);
        if (from < to && product->has_other) rocq__mm_panels(&product->other, from, to, thread);
        if (from < to) rocq__mm_panels(&product->main, from, to, thread);
        first += n;
    }
}

static void rocq__plan_map_cpu(rocq__plan *plan, rocq_op op, const void *params);

static void rocq__mm_place(rocq__mm *mm, const rocq__plan *plan) {
    mm->work = (rocq__mm_work *)(void *)plan->scratch;
    mm->columns = (unsigned char *)plan->scratch + mm->columns_at;
}

static void rocq__plan_matmul_cpu(rocq__plan *plan, rocq_op op, const void *params) {
    const rocq_matmul_params *p = (const rocq_matmul_params *)params;
    const int64_t k = p->w->ne[0];
    size_t n_products = 0;
    int64_t n_columns = 0, n_items = 0, most = 1;
    (void)op;
    for (const rocq_matmul_params *q = p; q; q = q->next) n_products++;
    rocq__mm_chain *chain = (rocq__mm_chain *)rocq__plan_take(plan, sizeof *chain);
    rocq__mm_product *products =
        (rocq__mm_product *)rocq__plan_take(plan, n_products * sizeof *products);
    rocq__mm_lay(chain, products, plan->ctx, p);
    for (int32_t i = 0; i < chain->n_columns; i++) {
        const rocq__mm *mm = chain->columns[i].mm;
        n_columns += mm->n * mm->n_matrices;
    }
    for (int32_t i = 0; i < chain->n_products; i++) {
        rocq__mm_product *product = &products[i];
        const rocq_tensor *y = product->main_params.y;
        rocq__mm_place(&product->main, plan);
        rocq__mm_place(&product->other, plan);
        // Cannot fail: the sizes were planned.
        if (product->has_other) {
            rocq_tensor_from_host(&product->other_y, plan->scratch + product->other_at, ROCQ_F32, 4,
                                  y->ne);
            product->main.other = product->other_params.y = &product->other_y;
        }
        if (product->has_cast) {
            rocq_tensor_from_host(&product->main_y, plan->scratch + product->main_at, ROCQ_F32, 4,
                                  y->ne);
            product->main_params.y = &product->main_y;
        }
        n_items += rocq__mm_items(&product->main);
        most = ROCQ__MAX(most, ROCQ__MIN(product->main.n, (int64_t)ROCQ__MM_TILE_N));
    }
    rocq__plan_stage(plan, rocq__mm_convert_all, chain, n_columns, rocq__plan_grain(plan, 4 * k));
    const int64_t panel_work = k * products->main.panel_rows * most;
    rocq__plan_stage(plan, rocq__mm_run_all, chain, n_items, rocq__plan_grain(plan, panel_work));
    for (int32_t i = 0; p; p = p->next, i++) {
        if (!products[i].has_cast) continue;
        const rocq_cast_params cast = {p->y, &products[i].main_y};
        rocq__plan_map_cpu(plan, ROCQ_OP_CAST, &cast);
    }
}

#if ROCQ__HAS_AVX2
#undef ROCQ__UNROLL_PARTS
#undef ROCQ__KEEP_ORDER
#undef ROCQ__MM_VNNI
#undef ROCQ__MM_AVX2
#endif

// ---------------------------------------------------------------------------------------------
// >>cpu_rows: reading and writing rows as floats, and the vector arithmetic attention and ops share
// ---------------------------------------------------------------------------------------------

// Rows are worked on in strips of this many elements: whole blocks of every format, and small
// enough that the strips live on the stack and in L1.
enum { ROCQ__STRIP = 256 };

// Length of the strip that starts at element k of a row of n.
static inline int64_t rocq__strip(int64_t n, int64_t k) {
    const int64_t most = ROCQ__STRIP;
    return ROCQ__MIN(n - k, most);
}

#if defined(__GNUC__) || defined(__clang__)
#define ROCQ__PREFETCH(address) __builtin_prefetch(address, 0, 2)
#else
#define ROCQ__PREFETCH(address) ((void)(address))
#endif

// Elements [first, first + n) of a row as floats: where they stand for F32, else decoded into buf.
// first is a whole number of blocks.
static const float *rocq__load(bool simd, rocq_format format, const unsigned char *row,
                               int64_t first, int64_t n, float *buf) {
    const unsigned char *src = row + rocq__bytes(format, first);
    if (format == ROCQ_F32) return (const float *)(const void *)src;
    rocq__decode(simd, format, buf, src, n);
    return buf;
}

#if ROCQ__HAS_V8
// Returns how many elements it has done. A NaN keeps the upper bits of its payload.
static ROCQ__SIMD int64_t rocq__store_f16_simd(unsigned char *dst, const float *src, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) rocq__v8_to_f16(dst + 2 * i, rocq__v8_load(src + i));
    return i;
}
#endif

// Writes elements [first, first + n) of a row; src is not the row itself, but where format is F32.
static void rocq__store(bool simd, rocq_format format, unsigned char *row, int64_t first,
                        const float *src, int64_t n) {
    unsigned char *dst = row + rocq__bytes(format, first);
    int64_t i = 0;
    if (format == ROCQ_F32) {
        if (dst != (const unsigned char *)(const void *)src) {
            memcpy(dst, src, (size_t)n * sizeof(float));
        }
        return;
    }
#if ROCQ__HAS_V8
    if (simd && format == ROCQ_F16) i = rocq__store_f16_simd(dst, src, n);
#else
    (void)simd;
#endif
    if (i < n) rocq__quantize_row(format, dst + rocq__bytes(format, i), src + i, n - i, NULL);
}

// The row at (i1, i2, i3) of an operand that is repeated along its dimensions of size 1.
static inline unsigned char *rocq__row_repeated(const rocq_tensor *t, int64_t i1, int64_t i2,
                                                int64_t i3) {
    return rocq__row(t, t->ne[1] == 1 ? 0 : i1, t->ne[2] == 1 ? 0 : i2, t->ne[3] == 1 ? 0 : i3);
}

static inline const int32_t *rocq__row_i32(const rocq_tensor *t, int64_t i1) {
    return (const int32_t *)(const void *)rocq__row(t, i1, 0, 0);
}

static inline float *rocq__row_f32(const rocq_tensor *t, int64_t i1, int64_t i2, int64_t i3) {
    return (float *)(void *)rocq__row(t, i1, i2, i3);
}

// -- arithmetic over a strip --

static inline float rocq__sum8(const float *x) {
    return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
}

// moment[0] += sum of x - shift, moment[1] += sum of (x - shift)^2; each as 8 sums, as SIMD adds
static void rocq__moments_scalar(const float *x, float shift, int64_t n, double *moment) {
    float sum[8] = {0}, square[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; j++) {
            const float d = x[i + j] - shift;
            sum[j] += d;
            square[j] += d * d;
        }
    }
    for (; i < n; i++) {
        const float d = x[i] - shift;
        sum[i % 8] += d;
        square[i % 8] += d * d;
    }
    moment[0] += (double)rocq__sum8(sum);
    moment[1] += (double)rocq__sum8(square);
}

// x = exp(x - shift); returns the sum. -inf gives 0, NaN stays NaN.
static float rocq__exp_scalar(float *x, float shift, int64_t n) {
    float sum = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        x[i] = expf(x[i] - shift);
        sum += x[i];
    }
    return sum;
}

// largest of x that is not NaN, -inf when there is none
static float rocq__max_scalar(const float *x, int64_t n) {
    float largest = -INFINITY;
    for (int64_t i = 0; i < n; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

#if ROCQ__HAS_V8

#if ROCQ__HAS_AVX2
#define ROCQ__END_SIMD() _mm256_zeroupper() // gcc 12 leaves it out before a tail call, and SSE
#else                                       // code then crawls
#define ROCQ__END_SIMD() ((void)0)
#endif

static ROCQ__SIMD void rocq__moments_simd(const float *x, float shift, int64_t n,
                                          double *moment) {
    rocq__v8 sum = rocq__v8_set1(0.0f), square = sum;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const rocq__v8 d = rocq__v8_sub(rocq__v8_load(x + i), rocq__v8_set1(shift));
        sum = rocq__v8_add(sum, d);
        square = rocq__v8_fma(d, d, square);
    }
    moment[0] += (double)rocq__v8_sum(sum);
    moment[1] += (double)rocq__v8_sum(square);
    ROCQ__END_SIMD();
    rocq__moments_scalar(x + i, shift, n - i, moment);
}

static ROCQ__SIMD float rocq__exp_simd(float *x, float shift, int64_t n) {
    rocq__v8 lane = rocq__v8_set1(0.0f);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const rocq__v8 e =
            rocq__v8_exp(rocq__v8_sub(rocq__v8_load(x + i), rocq__v8_set1(shift)));
        rocq__v8_store(x + i, e);
        lane = rocq__v8_add(lane, e);
    }
    return rocq__v8_sum(lane) + rocq__exp_scalar(x + i, shift, n - i);
}

static ROCQ__SIMD float rocq__max_simd(const float *x, int64_t n) {
    rocq__v8 lane = rocq__v8_set1(-INFINITY);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) lane = rocq__v8_max(rocq__v8_load(x + i), lane); // NaN: keeps lane
    float part[8];
    rocq__v8_store(part, lane);
    ROCQ__END_SIMD();
    return ROCQ__MAX(rocq__max_scalar(part, 8), rocq__max_scalar(x + i, n - i));
}

#endif

static inline void rocq__moments(bool simd, const float *x, float shift, int64_t n,
                                 double *moment) {
    ROCQ__EITHER(simd, rocq__moments, (x, shift, n, moment));
}

static inline float rocq__exp(bool simd, float *x, float shift, int64_t n) {
    return ROCQ__EITHER(simd, rocq__exp, (x, shift, n));
}

static inline float rocq__max(bool simd, const float *x, int64_t n) {
    return ROCQ__EITHER(simd, rocq__max, (x, n));
}

// ---------------------------------------------------------------------------------------------
// >>cpu_attention
// ---------------------------------------------------------------------------------------------
// Flash attention: for a tile of query rows, K and V are read once, tile by tile. Each row keeps a
// running maximum m, sum l = sum of exp(s - m) and vector acc = sum of exp(s - m) v.
//
// The query rows of one KV head are its group's heads of every token, token after token, so that
// all of them share each decoded tile of K and V. One item of work is a tile of those rows. When
// all rows fit one tile (decoding), the KV positions are split instead; the splits' (m, l, acc) are
// merged in order afterwards. Tiles and splits start at fixed positions: results depend neither on
// the number of threads nor on how large the cache is.
//
// There are two ways through a tile. A few rows take a dot product with each key and add each value
// up, and K and V may stay as they are stored. Many rows are two matrix products over decoded K and
// V, with queries in the lanes of S^T = K Q^T, so that the softmax needs no sums across lanes, and
// elements of values in those of O += P V.

enum {
    ROCQ__ATTEND_ROWS = 48,   // query rows per tile, a multiple of LANES and SIX
    ROCQ__ATTEND_KEYS = 48,   // KV positions per tile, a multiple of SIX
    ROCQ__ATTEND_SPLIT = 192, // KV positions per split, a multiple of the tile
    ROCQ__ATTEND_FEW = 8,     // so many query rows are few
    ROCQ__ATTEND_LANES = 16,  // queries, or elements of values, that a product takes at once;
                              // with AVX-512 twice as many
    ROCQ__ATTEND_SIX = 6      // keys, or queries, that it takes
};

typedef struct rocq__attend {
    const rocq_attention_params *p;
    bool simd;
    int64_t head_dim, n_q, n_kv, n_heads, n_kv_heads, n_seqs;
    int64_t group;     // query heads per KV head
    int64_t n_rows;    // query rows per KV head: group n_q
    int64_t tile_rows; // rows in one item
    int64_t n_tiles;
    int64_t n_splits;  // of the longest sequence; at most
    int64_t most_splits;
    int64_t worth;     // rocq__plan.worth
    int64_t pitch;     // floats from row to row in scratch
    int64_t stride;    // floats from row to row of scores, and of q where they are columns
    int64_t local;     // floats of scratch per thread
    int64_t partial;   // floats per row of a split's result: m, l, acc
    float scale;
    bool as_is;        // k and v are not decoded first
    bool many;         // rows are many: lanes of vectors
    bool wide;         // of 64 bytes
    int64_t rows;      // that these two take at once:
    void (*dots)(const float *const *q, const void *const *k, int64_t n_keys, int64_t n,
                 float *const *score);
    void (*values)(float *const *acc, const float *keep, const void *const *v,
                   const float *const *weight, int64_t n_keys, int64_t n);
    float *scratch;    // [local, threads]
    float *partials;   // [partial, n_rows, n_splits, n_kv_heads, n_seqs]
} rocq__attend;

// One item of work: n query rows, from row0 on, of one KV head and sequence.
typedef struct rocq__attend_item {
    int64_t seq, kv_head, row0, n;
} rocq__attend_item;

// score[0][j] = q[0] . k[j] for one row; n is a multiple of 32, n_keys of 4.
static void rocq__dots_scalar(const float *const *q, const void *const *k, int64_t n_keys,
                              int64_t n, float *const *score) {
    for (int64_t j = 0; j < n_keys; j++) {
        const float *key = (const float *)k[j];
        float sum[8] = {0};
        for (int64_t i = 0; i < n; i += 8) {
            for (int l = 0; l < 8; l++) sum[l] += q[0][i + l] * key[i + l];
        }
        score[0][j] = rocq__sum8(sum);
    }
}

// acc[0] = keep[0] acc[0] + sum over j of weight[0][j] v[j] for one row; n is a multiple of 32.
static void rocq__values_scalar(float *const *acc, const float *keep, const void *const *v,
                                const float *const *weight, int64_t n_keys, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) {
        float a[8];
        for (int l = 0; l < 8; l++) a[l] = acc[0][i + l] * keep[0];
        for (int64_t j = 0; j < n_keys; j++) {
            const float *value = (const float *)v[j] + i;
            for (int l = 0; l < 8; l++) a[l] += weight[0][j] * value[l];
        }
        memcpy(acc[0] + i, a, sizeof a);
    }
}

#if ROCQ__HAS_V8

// The same for two or four rows, which share what it costs to widen a key, with 8 / rows keys at a
// time, so that all sums stay in registers. A row's bits are the same in both.
ROCQ__V8 void rocq__dots(const rocq_format format, const int rows, const float *const *q,
                         const void *const *k, int64_t n_keys, int64_t n, float *const *score) {
    const int step = 8 / rows;
    for (int64_t first = 0; first < n_keys; first += step) {
        rocq__v8 sum[8]; // [rows][step]
        float all[8];
        ROCQ__UNROLL
        for (int i = 0; i < 8; i++) sum[i] = rocq__v8_set1(0.0f);
        for (int64_t i = 0; i < n; i += 32) {
            ROCQ__UNROLL
            for (int j = 0; j < step; j++) {
                rocq__v8 key[4];
                rocq__v8_load_part(format, 4, key, k[first + j], i);
                ROCQ__UNROLL
                for (int r = 0; r < rows; r++) {
                    rocq__v8 one = sum[r * step + j];
                    ROCQ__UNROLL
                    for (int l = 0; l < 4; l++) {
                        one = rocq__v8_fma(rocq__v8_load(q[r] + i + 8 * l), key[l], one);
                    }
                    sum[r * step + j] = one;
                }
            }
        }
        rocq__v8_sum4(all, sum[0], sum[1], sum[2], sum[3]);
        rocq__v8_sum4(all + 4, sum[4], sum[5], sum[6], sum[7]);
        ROCQ__UNROLL
        for (int r = 0; r < rows; r++) {
            memcpy(score[r] + first, all + r * step, (size_t)step * sizeof *all);
        }
    }
}

// 64 / rows elements of each acc are in registers at a time.
ROCQ__V8 void rocq__values(const rocq_format format, const int rows, float *const *acc,
                           const float *keep, const void *const *v, const float *const *weight,
                           int64_t n_keys, int64_t n) {
    const int n_parts = 8 / rows;
    for (int64_t i = 0; i < n; i += 8 * n_parts) {
        rocq__v8 a[8]; // [rows][n_parts]
        ROCQ__UNROLL
        for (int l = 0; l < 8; l++) {
            const int r = l / n_parts, part = l % n_parts;
            a[l] = rocq__v8_mul(rocq__v8_set1(keep[r]), rocq__v8_load(acc[r] + i + 8 * part));
        }
        for (int64_t j = 0; j < n_keys; j++) {
            rocq__v8 value[4];
            rocq__v8_load_part(format, n_parts, value, v[j], i);
            ROCQ__UNROLL
            for (int r = 0; r < rows; r++) {
                const rocq__v8 w = rocq__v8_set1(weight[r][j]);
                ROCQ__UNROLL
                for (int l = 0; l < n_parts; l++) {
                    a[r * n_parts + l] = rocq__v8_fma(w, value[l], a[r * n_parts + l]);
                }
            }
        }
        ROCQ__UNROLL
        for (int l = 0; l < 8; l++) {
            rocq__v8_store(acc[l / n_parts] + i + 8 * (l % n_parts), a[l]);
        }
    }
}

#define ROCQ__ATTEND_FORMATS(X)                                                                    \
    X(f32, F32, 2) X(f16, F16, 2) X(bf16, BF16, 2) X(q8_0, Q8_0, 2) X(q4_0, Q4_0, 2)               \
    X(f32, F32, 4) X(f16, F16, 4) X(bf16, BF16, 4) X(q8_0, Q8_0, 4) X(q4_0, Q4_0, 4)
#define ROCQ__ATTEND_KERNELS(name, NAME, ROWS)                                                     \
    static ROCQ__SIMD void rocq__dots_##name##_##ROWS(                                             \
        const float *const *q, const void *const *k, int64_t n_keys, int64_t n,                    \
        float *const *score) {                                                                     \
        rocq__dots(ROCQ_##NAME, ROWS, q, k, n_keys, n, score);                                     \
    }                                                                                              \
    static ROCQ__SIMD void rocq__values_##name##_##ROWS(                                           \
        float *const *acc, const float *keep, const void *const *v, const float *const *weight,    \
        int64_t n_keys, int64_t n) {                                                               \
        rocq__values(ROCQ_##NAME, ROWS, acc, keep, v, weight, n_keys, n);                          \
    }
ROCQ__ATTEND_FORMATS(ROCQ__ATTEND_KERNELS)

#endif

// The kernels of few rows, for k and v as they are stored, where as_is, or decoded to F32.
static void rocq__attend_kernels(rocq__attend *a) {
    a->dots = rocq__dots_scalar;
    a->values = rocq__values_scalar;
    a->rows = 1;
#if ROCQ__HAS_V8
    if (!a->simd) return;
    const rocq_format k = a->as_is ? a->p->k->format : ROCQ_F32;
    const rocq_format v = a->as_is ? a->p->v->format : ROCQ_F32;
    a->rows = a->tile_rows <= 2 ? 2 : 4;
#define ROCQ__ATTEND_CASE(name, NAME, ROWS)                                              \
    if (k == ROCQ_##NAME && a->rows == ROWS) a->dots = rocq__dots_##name##_##ROWS;       \
    if (v == ROCQ_##NAME && a->rows == ROWS) a->values = rocq__values_##name##_##ROWS;
    ROCQ__ATTEND_FORMATS(ROCQ__ATTEND_CASE)
#undef ROCQ__ATTEND_CASE
#undef ROCQ__ATTEND_KERNELS
#undef ROCQ__ATTEND_FORMATS
#endif
}

static int64_t rocq__attend_len(const rocq__attend *a, int64_t seq) {
    return a->p->kv_len ? rocq__row_i32(a->p->kv_len, 0)[seq] : a->n_kv;
}

// The positions [lo, hi) that query i of a sequence of len positions sees, masks aside. Neither
// bound ever falls as i grows.
static void rocq__attend_range(const rocq__attend *a, int64_t len, int64_t i, int64_t *lo,
                               int64_t *hi) {
    const int64_t pos = len - a->n_q + i;
    *hi = a->p->causal ? ROCQ__MAX(pos + 1, 0) : len; // pos < len
    *lo = a->p->window > 0 ? ROCQ__MAX(pos - a->p->window + 1, 0) : 0;
}

// Row of position j in k and v. 32-bit division, since it runs for every row.
static inline int64_t rocq__attend_row(const rocq__attend *a, int64_t j, int64_t seq) {
    if (!a->p->page_table) return j;
    const uint32_t page_size = (uint32_t)a->p->page_size, page = (uint32_t)j / page_size;
    return (int64_t)rocq__row_i32(a->p->page_table, seq)[page] * page_size +
           (uint32_t)j % page_size;
}

// out row = acc / l, with the head's sink in the sum; 0 for a row that saw nothing.
static void rocq__attend_finish(const rocq__attend *a, int64_t seq, int64_t kv_head, int64_t row,
                                float m, float l, float *acc) {
    const int64_t head = kv_head * a->group + row % a->group;
    const rocq_tensor *out = a->p->out;
    float factor = 1.0f;
    if (l != 0.0f) { // else acc is 0 as it is
        if (a->p->sinks) {
            const float sink = rocq__row_f32(a->p->sinks, 0, 0, 0)[head], top = ROCQ__MAX(m, sink);
            factor = expf(m - top);
            l = l * factor + expf(sink - top);
        }
        factor /= l;
    }
    ROCQ__EITHER(a->simd, rocq__scale, (acc, acc, factor, a->head_dim));
    unsigned char *out_row = rocq__row(out, head, row / a->group, seq);
    rocq__store(a->simd, out->format, out_row, 0, acc, a->head_dim);
}

// The positions that row r sees of a tile, masks aside, counted from the tile's first.
static void rocq__attend_clip(const rocq__attend *a, const rocq__attend_item *item, int64_t r,
                              int64_t begin, int64_t n_keys, int64_t *lo, int64_t *hi) {
    const int64_t i = (item->row0 + r) / a->group;
    rocq__attend_range(a, rocq__attend_len(a, item->seq), i, lo, hi);
    *lo = ROCQ__MIN(ROCQ__MAX(*lo - begin, 0), n_keys);
    *hi = ROCQ__MAX(ROCQ__MIN(*hi - begin, n_keys), *lo);
}

// What a row sees of a tile: the positions of [lo, hi) whose mask value, if any, is not -inf.
typedef struct rocq__attend_view {
    int64_t lo, hi;
    const float *mask; // [KEYS] or NULL
    float decoded[ROCQ__ATTEND_KEYS];
} rocq__attend_view;

static void rocq__attend_look(const rocq__attend *a, const rocq__attend_item *item, int64_t r,
                              int64_t begin, int64_t n_keys, rocq__attend_view *view) {
    const rocq_tensor *mask = a->p->mask;
    const int64_t i = (item->row0 + r) / a->group;
    const int64_t head = item->kv_head * a->group + (item->row0 + r) % a->group;
    rocq__attend_clip(a, item, r, begin, n_keys, &view->lo, &view->hi);
    view->mask = NULL;
    if (mask) {
        view->mask =
            rocq__load(a->simd, mask->format, rocq__row_repeated(mask, i, head, item->seq), begin,
                       n_keys, view->decoded);
    }
}

static inline bool rocq__attend_sees(const rocq__attend_view *view, int64_t j) {
    return j >= view->lo && j < view->hi && !(view->mask && view->mask[j] == -INFINITY);
}

// The bias of every row for the positions of [begin, end) that some row sees: its mask value or 0,
// -inf where this row does not see it. Writes those positions to keys and returns their number.
static int64_t rocq__attend_bias(const rocq__attend *a, const rocq__attend_item *item,
                                 int64_t begin, int64_t end, float *bias, int64_t *keys) {
    bool seen[ROCQ__ATTEND_KEYS] = {false};
    for (int64_t r = 0; r < item->n; r++) {
        float *line = bias + r * ROCQ__ATTEND_KEYS;
        rocq__attend_view view;
        rocq__attend_look(a, item, r, begin, end - begin, &view);
        for (int64_t j = 0; j < end - begin; j++) {
            const bool sees = rocq__attend_sees(&view, j);
            line[j] = !sees ? -INFINITY : view.mask ? view.mask[j] : 0.0f;
            seen[j] |= sees;
        }
    }
    int64_t n_keys = 0;
    for (int64_t j = 0; j < end - begin; j++) {
        if (!seen[j]) continue;
        for (int64_t r = 0; r < item->n; r++) {
            bias[r * ROCQ__ATTEND_KEYS + n_keys] = bias[r * ROCQ__ATTEND_KEYS + j];
        }
        keys[n_keys++] = begin + j;
    }
    return n_keys;
}

// Scratch of one thread. Vectors are padded to a pitch that the arithmetic above takes; the padding
// of q, acc and tile is 0.
typedef struct rocq__attend_local {
    float *q;     // [pitch, stride], scaled; of many rows, turned: [stride, pitch]
    float *acc;   // [pitch, stride]
    float *tile;  // [pitch, KEYS]: decoded rows of K, then of V
    float *score; // [KEYS, stride]; of many rows [stride, KEYS]
    float *bias;  // [KEYS, stride], of few rows
    float *spare; // [pitch]
    float *m, *l; // [stride]
    float *keep;  // [stride]: the factor that a tile puts on acc, of many rows
} rocq__attend_local;

static rocq__attend_local rocq__attend_local_of(const rocq__attend *a, int32_t thread) {
    rocq__attend_local s;
    s.q = a->scratch + thread * a->local;
    s.acc = s.q + a->stride * a->pitch;
    s.tile = s.acc + a->stride * a->pitch;
    s.score = s.tile + ROCQ__ATTEND_KEYS * a->pitch;
    s.bias = s.score + a->stride * ROCQ__ATTEND_KEYS;
    s.spare = s.bias + a->stride * ROCQ__ATTEND_KEYS;
    s.m = s.spare + a->pitch;
    s.l = s.m + a->stride;
    s.keep = s.l + a->stride;
    return s;
}

// Turns row r's scores into weights, updates m and l, and sets *keep to the factor that this puts
// on acc. Only the keys that the row sees stay, since a hidden one must not count even where it
// holds NaN: their weights move up in score, their lines to seen. Returns their number.
static int64_t rocq__attend_weigh(const rocq__attend *a, const rocq__attend_local *local,
                                  int64_t r, const void *const *line, int64_t n_keys,
                                  bool all_visible, const void **seen, float *keep) {
    float *s = local->score + r * ROCQ__ATTEND_KEYS;
    const float *bias = local->bias + r * ROCQ__ATTEND_KEYS;
    int64_t n_seen = 0;
    if (a->p->softcap > 0.0f) rocq__softcap_row(a->simd, a->p->softcap, s, n_keys);
    if (all_visible) {
        n_seen = n_keys;
    } else {
        for (int64_t j = 0; j < n_keys; j++) {
            if (bias[j] == -INFINITY) continue;
            s[n_seen] = s[j] + bias[j];
            seen[n_seen++] = line[j];
        }
    }
    if (n_seen == 0) return 0;
    const float top = ROCQ__MAX(local->m[r], rocq__max(a->simd, s, n_seen));
    const float shift = top == -INFINITY ? 0.0f : top; // exp(-inf - -inf) would be NaN
    *keep = top == local->m[r] ? 1.0f : expf(local->m[r] - shift);
    local->l[r] = local->l[r] * *keep + rocq__exp(a->simd, s, shift, n_seen);
    local->m[r] = top;
    return n_seen;
}

// Rows of k or v of one KV head and sequence.
typedef struct rocq__attend_rows {
    rocq_format format;
    const unsigned char *base;
    int64_t step, bytes; // from row to row, of a row
} rocq__attend_rows;

static rocq__attend_rows rocq__attend_rows_of(const rocq__attend *a, const rocq_tensor *t,
                                              int64_t kv_head, int64_t seq) {
    rocq__attend_rows rows;
    rows.format = t->format;
    rows.base = rocq__row(t, kv_head, 0, a->p->page_table ? 0 : seq);
    rows.step = rocq__bytes(t->format, t->stride[2]);
    rows.bytes = rocq__bytes(t->format, a->head_dim);
    return rows;
}

// Where the kernels find a row: as it is stored for few query rows, else decoded to dst. F32 rows
// are copied too: a power of two apart, as in a KV cache, they map to the same sets of L1 and would
// evict each other.
static inline const void *rocq__attend_line(const rocq__attend *a, const rocq__attend_rows *rows,
                                            int64_t row, float *dst) {
    const unsigned char *from = rows->base + row * rows->step;
    if (a->as_is) return from;
    rocq__decode(a->simd, rows->format, dst, from, a->head_dim);
    return dst;
}

// A KV head's rows may be too far apart for the hardware to prefetch them, and V's are read across.
static inline void rocq__attend_prefetch(const rocq__attend_rows *rows, int64_t row) {
    for (int64_t i = 0; i < rows->bytes; i += 64) ROCQ__PREFETCH(rows->base + row * rows->step + i);
}

// score of n rows and the n_keys keys at line. Where rows or keys are fewer than a kernel takes,
// the last fills up the rest, and those results are not used.
static void rocq__attend_scores(const rocq__attend *a, int64_t n, const void **line,
                                int64_t n_keys, const rocq__attend_local *local) {
    for (; n_keys % 4 != 0; n_keys++) line[n_keys] = line[n_keys - 1];
    for (int64_t r = 0; r < n; r += a->rows) {
        const float *q[4];
        float *score[4];
        for (int64_t i = 0; i < a->rows; i++) {
            q[i] = local->q + ROCQ__MIN(r + i, n - 1) * a->pitch;
            score[i] = local->score + ROCQ__MIN(r + i, n - 1) * ROCQ__ATTEND_KEYS;
        }
        a->dots(q, line, n_keys, a->pitch, score);
    }
}

// Adds the values at line to acc, and their keys' scores to m and l. Rows that see all of them
// share the loads of V; else each goes alone, with spare rows that take part in nothing.
static void rocq__attend_sums(const rocq__attend *a, int64_t n, const void *const *line,
                              int64_t n_keys, bool all_visible, const rocq__attend_local *local) {
    static const float none[ROCQ__ATTEND_KEYS] = {0};
    for (int64_t r = 0; r < n; r += a->rows) {
        const void *seen[4][ROCQ__ATTEND_KEYS];
        const float *weight[4] = {none, none, none, none};
        float *acc[4] = {local->spare, local->spare, local->spare, local->spare}, keep[4] = {0};
        int64_t n_seen[4] = {0}, n_rows = ROCQ__MIN(a->rows, n - r);
        bool all = true;
        for (int64_t i = 0; i < n_rows; i++) {
            n_seen[i] = rocq__attend_weigh(a, local, r + i, line, n_keys, all_visible, seen[i],
                                           &keep[i]);
            all = all && n_seen[i] == n_keys;
        }
        for (int64_t i = 0; i < n_rows; i++) {
            acc[all ? i : 0] = local->acc + (r + i) * a->pitch;
            weight[all ? i : 0] = local->score + (r + i) * ROCQ__ATTEND_KEYS;
            if (all || n_seen[i] == 0) continue;
            const float keeps[4] = {keep[i]};
            a->values(acc, keeps, seen[i], weight, n_seen[i], a->pitch);
        }
        if (all) a->values(acc, keep, line, weight, n_keys, a->pitch);
    }
}

// Adds keys [begin, end) to m, l and acc of an item's rows; with all_visible every row sees them.
static void rocq__attend_tile(const rocq__attend *a, const rocq__attend_item *item, int64_t begin,
                              int64_t end, bool all_visible, const rocq__attend_local *local) {
    const int64_t pitch = a->pitch, seq = item->seq, kv_head = item->kv_head, n = item->n;
    const void *line[ROCQ__ATTEND_KEYS];
    int64_t keys[ROCQ__ATTEND_KEYS], row[ROCQ__ATTEND_KEYS], n_keys = end - begin;
    if (all_visible) {
        for (int64_t j = 0; j < n_keys; j++) keys[j] = begin + j;
    } else {
        n_keys = rocq__attend_bias(a, item, begin, end, local->bias, keys);
    }
    if (n_keys == 0) return;

    const rocq__attend_rows k = rocq__attend_rows_of(a, a->p->k, kv_head, seq);
    const rocq__attend_rows v = rocq__attend_rows_of(a, a->p->v, kv_head, seq);
    const int64_t len = rocq__attend_len(a, seq);
    for (int64_t j = 0; j < n_keys; j++) {
        row[j] = rocq__attend_row(a, keys[j], seq);
        rocq__attend_prefetch(&v, row[j]);
        line[j] = rocq__attend_line(a, &k, row[j], local->tile + j * pitch);
    }
    rocq__attend_scores(a, n, line, n_keys, local);
    for (int64_t j = 0; j < n_keys; j++) {
        const int64_t next = keys[j] + ROCQ__ATTEND_KEYS;
        if (next < len) rocq__attend_prefetch(&k, rocq__attend_row(a, next, seq));
        line[j] = rocq__attend_line(a, &v, row[j], local->tile + j * pitch);
    }
    rocq__attend_sums(a, n, line, n_keys, all_visible, local);
}

#if ROCQ__HAS_V8
// -- many rows --

// c[i] = keep[i] c[i] + sum over k of a[i a_row + k a_step] b[k b_step], for SIX rows c[i] and b[k]
// of LANES floats; keep may be NULL, which counts as 0. The twelve sums stay in registers: eight
// loads for twelve multiply-adds, where a core does two of each in a cycle.
typedef struct rocq__attend_product {
    const float *a, *b, *keep;
    float *c;
    int64_t a_row, a_step, b_step, c_row, n;
} rocq__attend_product;

static ROCQ__SIMD void rocq__attend_multiply(const rocq__attend_product *p) {
    const int64_t a_row = p->a_row, a_step = p->a_step, b_step = p->b_step;
    const float *a0 = p->a, *a3 = p->a + 3 * a_row, *b = p->b;
    rocq__v8 sum[12];
    ROCQ__UNROLL
    for (int i = 0; i < 12; i++) {
        sum[i] = rocq__v8_set1(0.0f);
        if (!p->keep) continue;
        sum[i] = rocq__v8_mul(rocq__v8_set1(p->keep[i / 2]),
                              rocq__v8_load(p->c + i / 2 * p->c_row + 8 * (i % 2)));
    }
    for (int64_t k = 0; k < p->n; k++, a0 += a_step, a3 += a_step, b += b_step) {
        const rocq__v8 b0 = rocq__v8_load(b), b1 = rocq__v8_load(b + 8);
        ROCQ__UNROLL
        for (int i = 0; i < 6; i++) {
            const rocq__v8 one = rocq__v8_set1(*(i < 3 ? a0 + i * a_row : a3 + (i - 3) * a_row));
            sum[2 * i] = rocq__v8_fma(one, b0, sum[2 * i]);
            sum[2 * i + 1] = rocq__v8_fma(one, b1, sum[2 * i + 1]);
        }
    }
    ROCQ__UNROLL
    for (int i = 0; i < 12; i++) rocq__v8_store(p->c + i / 2 * p->c_row + 8 * (i % 2), sum[i]);
}

#if ROCQ__HAS_AVX2
// The same with twice the lanes.
ROCQ__TARGET_AVX512 static void rocq__attend_multiply_avx512(const rocq__attend_product *p) {
    const int64_t a_row = p->a_row, a_step = p->a_step, b_step = p->b_step;
    const float *a0 = p->a, *a3 = p->a + 3 * a_row, *b = p->b;
    __m512 sum[12];
    ROCQ__UNROLL
    for (int i = 0; i < 12; i++) {
        sum[i] = _mm512_setzero_ps();
        if (!p->keep) continue;
        sum[i] = _mm512_mul_ps(_mm512_set1_ps(p->keep[i / 2]),
                               _mm512_loadu_ps(p->c + i / 2 * p->c_row + 16 * (i % 2)));
    }
    for (int64_t k = 0; k < p->n; k++, a0 += a_step, a3 += a_step, b += b_step) {
        const __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 16);
        ROCQ__UNROLL
        for (int i = 0; i < 6; i++) {
            const __m512 one = _mm512_set1_ps(*(i < 3 ? a0 + i * a_row : a3 + (i - 3) * a_row));
            sum[2 * i] = _mm512_fmadd_ps(one, b0, sum[2 * i]);
            sum[2 * i + 1] = _mm512_fmadd_ps(one, b1, sum[2 * i + 1]);
        }
    }
    ROCQ__UNROLL
    for (int i = 0; i < 12; i++) _mm512_storeu_ps(p->c + i / 2 * p->c_row + 16 * (i % 2), sum[i]);
}
#endif

// The lanes of a product where `left` queries or elements are left.
static int64_t rocq__attend_lanes(const rocq__attend *a, int64_t left) {
    return (a->wide && left > ROCQ__ATTEND_LANES ? 2 : 1) * (int64_t)ROCQ__ATTEND_LANES;
}

static void rocq__attend_multiply_lanes(const rocq__attend_product *p, int64_t lanes) {
#if ROCQ__HAS_AVX2
    if (lanes > ROCQ__ATTEND_LANES) {
        rocq__attend_multiply_avx512(p);
        return;
    }
#endif
    (void)lanes;
    rocq__attend_multiply(p);
}

// Turns keys [first, last) of the scores of LANES rows into weights, as rocq__attend_weigh does;
// all other keys of the tile get the weight 0.
static ROCQ__SIMD void rocq__attend_weigh_many(float *score, int64_t stride, int64_t first,
                                               int64_t last, float *m, float *l, float *keep) {
    const rocq__v8 none = rocq__v8_set1(0.0f), least = rocq__v8_set1(-FLT_MAX);
    for (int v = 0; v < ROCQ__ATTEND_LANES; v += 8) {
        rocq__v8 top = rocq__v8_load(m + v), sum = none;
        for (int64_t j = first; j < last; j++) { // NaN: keeps top
            top = rocq__v8_max(rocq__v8_load(score + j * stride + v), top);
        }
        const rocq__v8 shift = rocq__v8_zero_below(top, top, least); // as exp(-inf - -inf) is NaN
        const rocq__v8 kept = rocq__v8_exp(rocq__v8_sub(rocq__v8_load(m + v), shift));
        for (int64_t j = 0; j < first; j++) rocq__v8_store(score + j * stride + v, none);
        for (int64_t j = first; j < last; j++) {
            float *s = score + j * stride + v;
            const rocq__v8 e = rocq__v8_exp(rocq__v8_sub(rocq__v8_load(s), shift));
            rocq__v8_store(s, e);
            sum = rocq__v8_add(sum, e);
        }
        for (int64_t j = last; j < ROCQ__ATTEND_KEYS; j++) {
            rocq__v8_store(score + j * stride + v, none);
        }
        rocq__v8_store(l + v, rocq__v8_fma(rocq__v8_load(l + v), kept, sum));
        rocq__v8_store(keep + v, kept);
        rocq__v8_store(m + v, top);
    }
}

// x holds neither infinities nor NaN; n is a multiple of 8.
static ROCQ__SIMD bool rocq__attend_finite(const float *x, int64_t n) {
    const rocq__v8 zero = rocq__v8_set1(0.0f);
    rocq__v8 sum = zero;
    for (int64_t i = 0; i < n; i += 8) sum = rocq__v8_fma(rocq__v8_load(x + i), zero, sum);
    return rocq__v8_sum(sum) == 0.0f;
}

// acc = keep acc + sum of weight v over what each row sees. A product adds hidden V too, with the
// weight 0, which is wrong where V holds infinities or NaN.
static ROCQ__SIMD void rocq__attend_values_seen(const rocq__attend *a,
                                                const rocq__attend_item *item, int64_t begin,
                                                int64_t n_keys, const rocq__attend_local *local) {
    for (int64_t r = 0; r < item->n; r++) {
        float *acc = local->acc + r * a->pitch;
        rocq__attend_view view;
        rocq__attend_look(a, item, r, begin, n_keys, &view);
        for (int64_t d = 0; d < a->pitch; d++) acc[d] *= local->keep[r];
        for (int64_t j = 0; j < n_keys; j++) {
            if (!rocq__attend_sees(&view, j)) continue;
            const float weight = local->score[j * a->stride + r], *v = local->tile + j * a->pitch;
            for (int64_t d = 0; d < a->pitch; d++) acc[d] = fmaf(weight, v[d], acc[d]);
        }
    }
}

// Decodes the rows of k or v at positions [begin, begin + n_keys).
static void rocq__attend_decode(const rocq__attend *a, const rocq__attend_rows *rows, int64_t seq,
                                int64_t begin, int64_t n_keys, float *tile) {
    for (int64_t j = 0; j < n_keys; j++) {
        const unsigned char *from = rows->base + rocq__attend_row(a, begin + j, seq) * rows->step;
        rocq__decode(true, rows->format, tile + j * a->pitch, from, a->head_dim);
    }
}

// Of the scores of a product's rows, from row r on, for keys [first, last) of the tile: those of keys
// that a row does not see become -inf, and mask values are added to the others.
static void rocq__attend_hide(const rocq__attend *a, const rocq__attend_item *item, int64_t r,
                              int64_t begin, int64_t first, int64_t last, float *score) {
    const int64_t lanes = rocq__attend_lanes(a, item->n - r);
    for (int64_t lane = 0; lane < lanes && r + lane < item->n; lane++) {
        rocq__attend_view view;
        rocq__attend_look(a, item, r + lane, begin, last, &view);
        float *s = score + lane;
        for (int64_t j = first; j < view.lo; j++) s[j * a->stride] = -INFINITY;
        for (int64_t j = view.hi; j < last; j++) s[j * a->stride] = -INFINITY;
        for (int64_t j = view.lo; view.mask && j < view.hi; j++) {
            float *one = s + j * a->stride;
            *one = view.mask[j] == -INFINITY ? -INFINITY : *one + view.mask[j];
        }
    }
}

// Whether a mask hides all positions [begin, begin + n_keys) from all rows.
static bool rocq__attend_masked(const rocq__attend *a, const rocq__attend_item *item,
                                int64_t begin, int64_t n_keys) {
    for (int64_t r = 0; r < item->n; r++) {
        rocq__attend_view view;
        rocq__attend_look(a, item, r, begin, n_keys, &view);
        for (int64_t j = view.lo; j < view.hi; j++) {
            if (view.mask[j] != -INFINITY) return false;
        }
    }
    return true;
}

// As rocq__attend_tile, for many rows.
static void rocq__attend_tile_many(const rocq__attend *a, const rocq__attend_item *item,
                                   int64_t begin, int64_t end,
                                   const rocq__attend_local *local) {
    const int64_t pitch = a->pitch, stride = a->stride, n_keys = end - begin;
    const rocq__attend_rows k = rocq__attend_rows_of(a, a->p->k, item->kv_head, item->seq);
    const rocq__attend_rows v = rocq__attend_rows_of(a, a->p->v, item->kv_head, item->seq);
    int64_t first, last, unused;
    bool all_visible = !a->p->mask;
    if (a->p->mask && rocq__attend_masked(a, item, begin, n_keys)) return;

    rocq__attend_decode(a, &k, item->seq, begin, n_keys, local->tile);
    for (int64_t r = 0, lanes; r < item->n; r += lanes) {
        lanes = rocq__attend_lanes(a, item->n - r);
        const int64_t past = ROCQ__MIN(r + lanes, item->n);
        int64_t lo_last, hi_first; // [first, last): what some row sees; between these: what all see
        float *score = local->score + r;
        rocq__attend_clip(a, item, r, begin, n_keys, &first, &hi_first);
        rocq__attend_clip(a, item, past - 1, begin, n_keys, &lo_last, &last);
        for (int64_t j = first; j < last; j += ROCQ__ATTEND_SIX) {
            const rocq__attend_product dots = {
                local->tile + j * pitch, local->q + r, NULL, score + j * stride, pitch, 1, stride,
                stride, pitch};
            rocq__attend_multiply_lanes(&dots, lanes);
        }
        for (int64_t j = first; a->p->softcap > 0.0f && j < last; j++) {
            rocq__softcap_row(true, a->p->softcap, score + j * stride, lanes);
        }
        if (a->p->mask || first < lo_last || hi_first < last) {
            rocq__attend_hide(a, item, r, begin, first, last, score);
        }
        all_visible = all_visible && lo_last == 0 && hi_first == n_keys;
        for (int64_t i = r; i < r + lanes; i += ROCQ__ATTEND_LANES) {
            rocq__attend_weigh_many(local->score + i, stride, first, last, local->m + i,
                                    local->l + i, local->keep + i);
        }
    }

    rocq__attend_decode(a, &v, item->seq, begin, n_keys, local->tile);
    if (!all_visible && !rocq__attend_finite(local->tile, n_keys * pitch)) {
        rocq__attend_values_seen(a, item, begin, n_keys, local);
        return;
    }
    for (int64_t r = 0; r < item->n; r += ROCQ__ATTEND_SIX) {
        const int64_t past = ROCQ__MIN(r + ROCQ__ATTEND_SIX, item->n);
        rocq__attend_clip(a, item, r, begin, n_keys, &first, &unused);
        rocq__attend_clip(a, item, past - 1, begin, n_keys, &unused, &last);
        for (int64_t d = 0, lanes; first < last && d < a->head_dim; d += lanes) {
            lanes = rocq__attend_lanes(a, a->head_dim - d);
            const rocq__attend_product sums = {
                local->score + first * stride + r, local->tile + first * pitch + d,
                local->keep + r, local->acc + r * pitch + d, 1, stride, pitch, pitch,
                last - first};
            rocq__attend_multiply_lanes(&sums, lanes);
        }
    }
}

// to[column][row] = from[row][column]; n_rows and n_columns are multiples of 8.
static ROCQ__SIMD void rocq__attend_turn(float *to, const float *from, int64_t n_rows,
                                         int64_t n_columns) {
    for (int64_t r = 0; r < n_rows; r += 8) {
        for (int64_t d = 0; d < n_columns; d += 8) {
            rocq__v8 v[8];
            ROCQ__UNROLL
            for (int i = 0; i < 8; i++) v[i] = rocq__v8_load(from + (r + i) * n_columns + d);
            rocq__v8_turn(v);
            ROCQ__UNROLL
            for (int i = 0; i < 8; i++) rocq__v8_store(to + (d + i) * n_rows + r, v[i]);
        }
    }
}
#endif
// Rows of q, scaled, and nothing in m, l and acc yet.
static void rocq__attend_start(const rocq__attend *a, const rocq__attend_item *item,
                               const rocq__attend_local *local) {
    const int64_t pitch = a->pitch;
    float *rows = a->many ? local->acc : local->q; // many are turned into columns afterwards
    memset(rows, 0, (size_t)(a->stride * pitch) * sizeof(float));
    for (int64_t r = 0; r < item->n; r++) {
        const int64_t head = item->kv_head * a->group + (item->row0 + r) % a->group;
        const int64_t i = (item->row0 + r) / a->group;
        float *q = rows + r * pitch;
        const float *from = rocq__load(a->simd, a->p->q->format,
                                       rocq__row(a->p->q, head, i, item->seq), 0, a->head_dim, q);
        ROCQ__EITHER(a->simd, rocq__scale, (q, from, a->scale, a->head_dim));
    }
#if ROCQ__HAS_V8
    if (a->many) rocq__attend_turn(local->q, rows, a->stride, pitch);
#endif
    memset(local->acc, 0, (size_t)(a->stride * pitch) * sizeof(float));
    for (int64_t r = 0; r < a->stride; r++) {
        local->m[r] = -INFINITY;
        local->l[r] = 0.0f;
    }
}

static void rocq__attend_task(void *arg, int64_t item, int64_t item_end, int32_t thread) {
    const rocq__attend *a = (const rocq__attend *)arg;
    const int64_t dim = a->head_dim, pitch = a->pitch;
    const rocq__attend_local local = rocq__attend_local_of(a, thread);
    if (!a->as_is) memset(local.tile, 0, (size_t)(ROCQ__ATTEND_KEYS * pitch) * sizeof(float));
    for (; item < item_end; item++) {
        const int64_t split = item % a->n_splits, tile = item / a->n_splits % a->n_tiles;
        const int64_t head_seq = item / a->n_splits / a->n_tiles;
        const int64_t kv_head = head_seq % a->n_kv_heads, seq = head_seq / a->n_kv_heads;
        const int64_t row0 = tile * a->tile_rows, n = ROCQ__MIN(a->tile_rows, a->n_rows - row0);
        const rocq__attend_item rows = {seq, kv_head, row0, n};
        const int64_t len = rocq__attend_len(a, seq);
        int64_t lo_first, hi_first, lo_last, hi_last;
        rocq__attend_range(a, len, row0 / a->group, &lo_first, &hi_first);
        rocq__attend_range(a, len, (row0 + n - 1) / a->group, &lo_last, &hi_last);
        int64_t begin = lo_first, end = hi_last;
        if (a->n_splits > 1) {
            begin = ROCQ__MAX(begin, split * ROCQ__ATTEND_SPLIT);
            end = ROCQ__MIN(end, (split + 1) * ROCQ__ATTEND_SPLIT);
        }
        rocq__attend_start(a, &rows, &local);
        // [lo_last, hi_first) is what all rows see. Tiles of few rows end there too, so that most
        // need no bias.
        for (int64_t first = begin, last; first < end; first = last) {
            last = ROCQ__MIN(first - first % ROCQ__ATTEND_KEYS + ROCQ__ATTEND_KEYS, end);
#if ROCQ__HAS_V8
            if (a->many) {
                rocq__attend_tile_many(a, &rows, first, last, &local);
                continue;
            }
#endif
            if (first < lo_last) last = ROCQ__MIN(last, lo_last);
            if (first < hi_first) last = ROCQ__MIN(last, hi_first);
            const bool all_visible = !a->p->mask && first >= lo_last && last <= hi_first;
            rocq__attend_tile(a, &rows, first, last, all_visible, &local);
        }
        for (int64_t r = 0; r < n; r++) {
            float *acc = local.acc + r * pitch;
            if (a->n_splits == 1) {
                rocq__attend_finish(a, seq, kv_head, row0 + r, local.m[r], local.l[r], acc);
            } else {
                float *partial =
                    a->partials + ((head_seq * a->n_splits + split) * a->n_rows + r) * a->partial;
                partial[0] = local.m[r];
                partial[1] = local.l[r];
                memcpy(partial + 2, acc, (size_t)dim * sizeof(float));
            }
        }
    }
}

// Items are the rows of every KV head and sequence.
static void rocq__attend_merge_task(void *arg, int64_t item, int64_t item_end, int32_t thread) {
    const rocq__attend *a = (const rocq__attend *)arg;
    float *acc = a->scratch + thread * a->local;
    for (; item < item_end; item++) {
        const int64_t row = item % a->n_rows, head_seq = item / a->n_rows;
        const float *partial =
            a->partials + (head_seq * a->n_splits * a->n_rows + row) * a->partial;
        const int64_t step = a->n_rows * a->partial;
        float m = -INFINITY, l = 0.0f;
        for (int64_t split = 0; split < a->n_splits; split++)
            m = ROCQ__MAX(m, partial[split * step]);
        memset(acc, 0, (size_t)a->head_dim * sizeof(float));
        for (int64_t split = 0; split < a->n_splits; split++) {
            const float *one = partial + split * step;
            if (one[1] == 0.0f) continue; // saw nothing
            const float factor = expf(one[0] - m);
            l += one[1] * factor;
            for (int64_t d = 0; d < a->head_dim; d++) acc[d] += one[2 + d] * factor;
        }
        rocq__attend_finish(a, head_seq / a->n_kv_heads, head_seq % a->n_kv_heads, row, m, l, acc);
    }
}

// Fills in everything but scratch and partials; returns the bytes that these take together.
static int64_t rocq__attend_plan(const rocq_ctx *ctx, const rocq_attention_params *p,
                                 rocq__attend *a) {
    memset(a, 0, sizeof *a);
    a->p = p;
    a->simd = ctx->has_simd;
    a->head_dim = p->q->ne[0];
    a->n_heads = p->q->ne[1];
    a->n_q = p->q->ne[2];
    a->n_seqs = p->q->ne[3];
    a->n_kv_heads = p->k->ne[1];
    a->n_kv = p->page_table ? p->page_table->ne[0] * p->page_size : p->k->ne[2];
    a->group = a->n_heads / a->n_kv_heads;
    a->n_rows = a->group * a->n_q;
    a->tile_rows = ROCQ__MIN(a->n_rows, (int64_t)ROCQ__ATTEND_ROWS);
    a->n_tiles = (a->n_rows + a->tile_rows - 1) / a->tile_rows;
    a->n_splits = a->n_tiles > 1 ? 1 : (a->n_kv + ROCQ__ATTEND_SPLIT - 1) / ROCQ__ATTEND_SPLIT;
    a->most_splits = a->n_splits;
    a->pitch = (a->head_dim + 31) / 32 * 32;
    a->many = a->simd && a->tile_rows > ROCQ__ATTEND_FEW;
    a->wide = a->many && ctx->has_avx512;
    a->stride = a->tile_rows;
    if (a->many) { // an odd number of cache lines: a power of two would map rows to few sets of L1
        a->stride = ROCQ__ATTEND_ROWS;
        a->pitch = (a->head_dim + 15) / 16 * 16 | 16;
    }
    a->local = (2 * a->stride + ROCQ__ATTEND_KEYS + 1) * a->pitch +
               2 * a->stride * ROCQ__ATTEND_KEYS + (3 * a->stride + 15) / 16 * 16;
    a->partial = a->head_dim + 2;
    a->as_is = a->simd && a->tile_rows <= ROCQ__ATTEND_FEW && a->head_dim % 32 == 0;
    rocq__attend_kernels(a);
    a->scale = p->scale != 0.0f ? p->scale : 1.0f / sqrtf((float)a->head_dim);
    int64_t partials = 0, bytes;
    if (a->n_splits > 1) {
        partials = a->n_seqs * a->n_kv_heads * a->n_rows; // out's rows, in memory: no overflow
        if (!rocq__mul(partials, a->n_splits, &partials) ||
            !rocq__mul(partials, a->partial, &partials)) {
            return INT64_MAX;
        }
    }
    if (!rocq__add(partials, a->local * ctx->desc.n_threads, &bytes) ||
        !rocq__mul(bytes, (int64_t)sizeof(float), &bytes)) {
        return INT64_MAX;
    }
    return bytes;
}

// What depends on the contents of kv_len and page_table.
static rocq_result rocq__attend_check(rocq_ctx *ctx, const rocq__attend *a) {
    const rocq_attention_params *p = a->p;
    for (int64_t seq = 0; seq < a->n_seqs; seq++) {
        const int64_t len = rocq__attend_len(a, seq);
        if (len < 1 || len > a->n_kv) {
            return rocq__fail(ctx, ROCQ_E_BOUNDS,
                              "attention: kv_len of sequence %lld is %lld of %lld", (long long)seq,
                              (long long)len, (long long)a->n_kv);
        }
        if (!p->page_table) continue;
        for (int64_t j = 0; j < len; j += p->page_size) {
            const int64_t page = rocq__row_i32(p->page_table, seq)[j / p->page_size];
            if (page < 0 || page * p->page_size + ROCQ__MIN(p->page_size, len - j) > p->k->ne[2]) {
                return rocq__fail(ctx, ROCQ_E_BOUNDS,
                                  "attention: page %lld of sequence %lld is %lld, past %lld rows",
                                  (long long)(j / p->page_size), (long long)seq, (long long)page,
                                  (long long)p->k->ne[2]);
            }
        }
    }
    return ROCQ_OK;
}

static int64_t rocq__scratch_attention_cpu(const rocq_ctx *ctx, const void *params) {
    const rocq_attention_params *p = (const rocq_attention_params *)params;
    rocq__attend a;
    return rocq__attend_plan(ctx, p, &a);
}

// How many items there are follows from the lengths.
static rocq_result rocq__attend_begin(rocq_ctx *ctx, rocq__stage *stage) {
    rocq__attend *a = (rocq__attend *)stage->arg;
    int64_t longest = 0;
    ROCQ__TRY(rocq__attend_check(ctx, a));
    for (int64_t seq = 0; seq < a->n_seqs; seq++) {
        longest = ROCQ__MAX(longest, rocq__attend_len(a, seq));
    }
    const bool split = a->most_splits > 1;
    if (split) a->n_splits = (longest + ROCQ__ATTEND_SPLIT - 1) / ROCQ__ATTEND_SPLIT;
    const int64_t keys = split ? ROCQ__MIN(longest, (int64_t)ROCQ__ATTEND_SPLIT) : longest;
    stage->n = a->n_seqs * a->n_kv_heads * a->n_tiles * a->n_splits;
    stage->grain = 1 + a->worth / (2 * a->tile_rows * a->head_dim * keys);
    return ROCQ_OK;
}

static rocq_result rocq__attend_merge_begin(rocq_ctx *ctx, rocq__stage *stage) {
    const rocq__attend *a = (const rocq__attend *)stage->arg;
    (void)ctx;
    stage->n = a->n_splits > 1 ? a->n_seqs * a->n_kv_heads * a->n_rows : 0;
    stage->grain = 1 + a->worth / (a->head_dim * a->n_splits);
    return ROCQ_OK;
}

static void rocq__plan_attention_cpu(rocq__plan *plan, rocq_op op, const void *params) {
    rocq__attend *a = (rocq__attend *)rocq__plan_take(plan, sizeof *a);
    (void)op;
    rocq__attend_plan(plan->ctx, (const rocq_attention_params *)params, a);
    a->worth = plan->worth;
    a->scratch = (float *)(void *)plan->scratch;
    a->partials = a->scratch + a->local * plan->ctx->desc.n_threads;
    rocq__plan_stage(plan, rocq__attend_task, a, 0, 1)->begin = rocq__attend_begin;
    if (a->most_splits > 1) {
        rocq__plan_stage(plan, rocq__attend_merge_task, a, 0, 1)->begin = rocq__attend_merge_begin;
    }
}

// ---------------------------------------------------------------------------------------------
// >>cpu_ops: in the order of ROCQ_OPS
// ---------------------------------------------------------------------------------------------

// Indices in dimensions 1 to 3 of row number r, for ops that number all rows of a tensor.
typedef struct rocq__coord {
    int64_t i1, i2, i3;
} rocq__coord;

static inline rocq__coord rocq__coord_of(const rocq_tensor *t, int64_t r) {
    rocq__coord c;
    c.i1 = r % t->ne[1];
    c.i2 = r / t->ne[1] % t->ne[2];
    c.i3 = r / t->ne[1] / t->ne[2];
    return c;
}

static inline int64_t rocq__n_rows(const rocq_tensor *t) {
    return t->ne[1] * t->ne[2] * t->ne[3];
}

// The scratch bytes of an op that takes none.
static int64_t rocq__scratch_none_cpu(const rocq_ctx *ctx, const void *params) {
    (void)ctx;
    (void)params;
    return 0;
}

// -- rmsnorm, layernorm --

typedef struct rocq__norm {
    const rocq_norm_params *p;
    bool simd;
    bool center; // layernorm
    float eps;
} rocq__norm;

// y = ((x - mean) - rest) rstd weight + bias; either of the last two may be NULL. y may be x.
static void rocq__normalize_scalar(float *y, const float *x, const float *mean_rest_rstd,
                                   const float *weight, const float *bias, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        y[i] = ((x[i] - mean_rest_rstd[0]) - mean_rest_rstd[1]) * mean_rest_rstd[2];
        if (weight) y[i] *= weight[i];
        if (bias) y[i] += bias[i];
    }
}

#if ROCQ__HAS_V8
static ROCQ__SIMD void rocq__normalize_simd(float *y, const float *x, const float *mean_rest_rstd,
                                            const float *weight, const float *bias, int64_t n) {
    const rocq__v8 mean = rocq__v8_set1(mean_rest_rstd[0]), rest = rocq__v8_set1(mean_rest_rstd[1]);
    const rocq__v8 rstd = rocq__v8_set1(mean_rest_rstd[2]);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        rocq__v8 v = rocq__v8_sub(rocq__v8_sub(rocq__v8_load(x + i), mean), rest);
        v = rocq__v8_mul(v, rstd);
        if (weight) v = rocq__v8_mul(v, rocq__v8_load(weight + i));
        if (bias) v = rocq__v8_add(v, rocq__v8_load(bias + i));
        rocq__v8_store(y + i, v);
    }
    ROCQ__END_SIMD();
    rocq__normalize_scalar(y + i, x + i, mean_rest_rstd, weight ? weight + i : NULL,
                           bias ? bias + i : NULL, n - i);
}
#endif

static void rocq__norm_task(void *arg, int64_t r, int64_t r_end, int32_t thread) {
    const rocq__norm *a = (const rocq__norm *)arg;
    const rocq_norm_params *p = a->p;
    const int64_t n = p->x->ne[0];
    const float *weight = p->weight ? rocq__row_f32(p->weight, 0, 0, 0) : NULL;
    const float *bias = p->bias ? rocq__row_f32(p->bias, 0, 0, 0) : NULL;
    float buf[ROCQ__STRIP], out[ROCQ__STRIP];
    (void)thread;
    for (; r < r_end; r++) {
        const rocq__coord c = rocq__coord_of(p->x, r);
        const unsigned char *x_row = rocq__row(p->x, c.i1, c.i2, c.i3);
        unsigned char *y_row = rocq__row(p->y, c.i1, c.i2, c.i3);
        float mean = 0.0f, rest = 0.0f;
        double moment[2];
        for (int pass = a->center ? 0 : 1; pass < 2; pass++) {
            moment[0] = moment[1] = 0.0;
            for (int64_t k = 0; k < n; k += ROCQ__STRIP) {
                const int64_t m = rocq__strip(n, k);
                const float *x = rocq__load(a->simd, p->x->format, x_row, k, m, buf);
                rocq__moments(a->simd, x, mean, m, moment);
            }
            if (pass == 0) mean = (float)(moment[0] / (double)n);
        }
        // The mean was rounded to F32, which matters where it is large next to the spread of x; the
        // mean of the differences from it corrects that.
        if (a->center) rest = (float)(moment[0] / (double)n);
        const double variance = moment[1] / (double)n - (double)rest * (double)rest;
        const float rstd = (float)(1.0 / sqrt(variance + (double)a->eps));
        const float factors[3] = {mean, rest, rstd};
        for (int64_t k = 0; k < n; k += ROCQ__STRIP) {
            const int64_t m = rocq__strip(n, k);
            const float *x = rocq__load(a->simd, p->x->format, x_row, k, m, buf);
            float *to = p->y->format == ROCQ_F32 ? (float *)(void *)y_row + k : out;
            ROCQ__EITHER(a->simd, rocq__normalize,
                         (to, x, factors, weight ? weight + k : NULL, bias ? bias + k : NULL, m));
            rocq__store(a->simd, p->y->format, y_row, k, to, m);
        }
        if (p->mean) rocq__row_f32(p->mean, c.i2, c.i3, 0)[c.i1] = mean + rest;
        if (p->rstd) rocq__row_f32(p->rstd, c.i2, c.i3, 0)[c.i1] = rstd;
    }
}

static void rocq__plan_norm_cpu(rocq__plan *plan, rocq_op op, const void *params) {
    const rocq_norm_params *p = (const rocq_norm_params *)params;
    rocq__norm *a = (rocq__norm *)rocq__plan_take(plan, sizeof *a);
    a->p = p;
    a->simd = plan->ctx->has_simd;
    a->center = op == ROCQ_OP_LAYERNORM;
    a->eps = p->eps > 0.0f ? p->eps : 1e-5f;
    rocq__plan_stage(plan, rocq__norm_task, a, rocq__n_rows(p->x),
                     rocq__plan_grain(plan, 4 * p->x->ne[0]));
}

// -- rope, rope_append --

// Source rows [D, n_heads, n_tokens] and where they go; rotated unless plain. With cell, token t
// goes to row cell[t].
typedef struct rocq__rope_stream {
    const rocq_tensor *x, *y;
    const int32_t *cell;
    bool plain;
} rocq__rope_stream;

typedef struct rocq__rope {
    rocq__rope_stream streams[3];
    int n_streams;
    bool simd;
    bool neox;
    int64_t head_dim, n_dims;
    const rocq_rope_config *config;
    const int32_t *pos;
    const int32_t *cell; // rope_append: rows of a cache, which are checked; else NULL
    int64_t n_cells;
    float magnitude;
    double *turn;  // [n_dims / 2]: angle of a pair per position
    float *local;  // per thread: cos and sin by element, one head and its rotation
    int64_t pitch; // floats per thread
} rocq__rope;

static int64_t rocq__rope_turn_bytes(const rocq__rope *a) {
    return (a->n_dims / 2 * (int64_t)sizeof(double) + 63) / 64 * 64;
}

static int64_t rocq__rope_scratch(const rocq_ctx *ctx, const rocq_rope_config *p,
                                  int64_t head_dim, rocq__rope *a) {
    memset(a, 0, sizeof *a);
    a->simd = ctx->has_simd;
    a->neox = p->pairing == ROCQ_ROPE_NEOX;
    a->head_dim = head_dim;
    a->n_dims = p->n_dims > 0 ? p->n_dims : head_dim;
    a->pitch = (2 * a->n_dims + 2 * head_dim + 15) / 16 * 16;
    int64_t bytes;
    if (!rocq__mul(a->pitch * (int64_t)sizeof(float), ctx->desc.n_threads, &bytes) ||
        !rocq__add(bytes, rocq__rope_turn_bytes(a), &bytes)) {
        return INT64_MAX;
    }
    return bytes;
}

// A config with its defaults filled in; low and high bound YaRN's ramp, in pairs.
typedef struct rocq__rope_scaling {
    double n_dims, base, scale, ext_factor, low, high;
    float magnitude; // of cos and sin
} rocq__rope_scaling;

// The pair, as a fraction, that makes n_turns full turns over the original context.
static double rocq__rope_pair_of(const rocq__rope_scaling *s, double n_ctx, double n_turns) {
    return s->n_dims * log(n_ctx / (n_turns * 6.283185307179586)) / (2.0 * log(s->base));
}

static rocq__rope_scaling rocq__rope_scaling_of(const rocq_rope_config *p, int64_t n_dims) {
    rocq__rope_scaling s;
    memset(&s, 0, sizeof s);
    s.n_dims = (double)n_dims;
    s.base = p->freq_base > 0.0f ? (double)p->freq_base : 10000.0;
    s.scale = p->freq_scale > 0.0f ? (double)p->freq_scale : 1.0;
    s.ext_factor = (double)p->ext_factor;
    s.magnitude = p->attn_factor > 0.0f ? p->attn_factor : 1.0f;
    if (p->ext_factor > 0.0f) {
        const double fast = p->beta_fast > 0.0f ? (double)p->beta_fast : 32.0;
        const double slow = p->beta_slow > 0.0f ? (double)p->beta_slow : 1.0;
        s.low = ROCQ__MAX(0.0, floor(rocq__rope_pair_of(&s, (double)p->n_ctx_orig, fast)));
        s.high = ROCQ__MIN((double)n_dims - 1.0,
                           ceil(rocq__rope_pair_of(&s, (double)p->n_ctx_orig, slow)));
        s.magnitude *= (float)(1.0 + 0.1 * log(1.0 / s.scale));
    }
    return s;
}

// Angle of pair i per position: its frequency, base^(-2 i / n_dims) over a factor, as scaled.
static double rocq__rope_turn(const rocq__rope_scaling *s, int64_t i, double own) {
    double keep = 0.0; // share of the unscaled frequency
    if (s->ext_factor > 0.0) {
        const double ramp = ((double)i - s->low) / ROCQ__MAX(0.001, s->high - s->low);
        keep = (1.0 - ROCQ__MIN(1.0, ROCQ__MAX(0.0, ramp))) * s->ext_factor;
    }
    return own * s->scale * (1.0 - keep) + own * keep;
}

#define ROCQ__TURNS 0.15915494309189535 // 1 / (2 pi): turns per radian

// Angles go through double: at position 100,000 a float would be off by 0.004.
static void rocq__rope_turns(rocq__rope *a) {
    const rocq_rope_config *p = a->config;
    const rocq__rope_scaling scaling = rocq__rope_scaling_of(p, a->n_dims);
    const float *factors = p->freq_factors ? rocq__row_f32(p->freq_factors, 0, 0, 0) : NULL;
    // Powers by multiplication: the 128th is off by 3e-14 of itself, which at position 100,000
    // turns no pair by 1e-9.
    const double ratio = pow(scaling.base, -2.0 / scaling.n_dims);
    double power = 1.0;
    a->magnitude = scaling.magnitude;
    for (int64_t i = 0; i < a->n_dims / 2; i++, power *= ratio) {
        a->turn[i] = rocq__rope_turn(&scaling, i, factors ? power / (double)factors[i] : power);
    }
}

static rocq_result rocq__rope_begin(rocq_ctx *ctx, rocq__stage *stage) {
    rocq__rope *a = (rocq__rope *)stage->arg;
    for (int64_t t = 0; a->cell && t < stage->n; t++) {
        if (a->cell[t] < 0 || a->cell[t] >= a->n_cells) {
            return rocq__fail(ctx, ROCQ_E_BOUNDS, "rope_append: cell of token %lld is %d of %lld",
                              (long long)t, (int)a->cell[t], (long long)a->n_cells);
        }
    }
    rocq__rope_turns(a);
    return ROCQ_OK;
}

// y[i] = x[i] cosine[i] + x[the other of its pair] sine[i], with sine negative for the first of a
// pair. Pairs are neighbours, or with neox n / 2 apart.
static void rocq__rotate_scalar(float *y, const float *x, const float *cosine, const float *sine,
                                bool neox, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t other = !neox ? i ^ 1 : i < n / 2 ? i + n / 2 : i - n / 2;
        y[i] = x[i] * cosine[i] + x[other] * sine[i];
    }
}

#if ROCQ__HAS_V8
// n is a multiple of 16.
static ROCQ__SIMD void rocq__rotate_simd(float *y, const float *x, const float *cosine,
                                         const float *sine, bool neox, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) {
        const rocq__v8 own = rocq__v8_load(x + i);
        const rocq__v8 other = !neox ? rocq__v8_swap(own)
                                     : rocq__v8_load(x + (i < n / 2 ? i + n / 2 : i - n / 2));
        const rocq__v8 turned = rocq__v8_mul(own, rocq__v8_load(cosine + i));
        rocq__v8_store(y + i, rocq__v8_fma(other, rocq__v8_load(sine + i), turned));
    }
}
#endif

static void rocq__rope_task(void *arg, int64_t t, int64_t t_end, int32_t thread) {
    const rocq__rope *a = (const rocq__rope *)arg;
    const int64_t n = a->n_dims, half = n / 2;
    float *cosine = a->local + thread * a->pitch, *sine = cosine + n;
    float *head = sine + n, *rotated = head + a->head_dim;
    for (; t < t_end; t++) {
        for (int64_t i = 0; i < half; i++) {
            const double turns = (double)a->pos[t] * a->turn[i] * ROCQ__TURNS;
            const float angle = (float)((turns - floor(turns + 0.5)) * 6.283185307179586);
            const int64_t first = a->neox ? i : 2 * i, second = a->neox ? half + i : 2 * i + 1;
            cosine[first] = cosine[second] = cosf(angle) * a->magnitude;
            sine[second] = sinf(angle) * a->magnitude;
            sine[first] = -sine[second];
        }
        for (int s = 0; s < a->n_streams; s++) {
            const rocq__rope_stream *stream = &a->streams[s];
            const int64_t to = stream->cell ? stream->cell[t] : t;
            for (int64_t h = 0; h < stream->x->ne[1]; h++) {
                const unsigned char *x_row = rocq__row(stream->x, h, t, 0);
                const float *x =
                    rocq__load(a->simd, stream->x->format, x_row, 0, a->head_dim, head);
                if (!stream->plain) {
                    ROCQ__EITHER(a->simd && n % 16 == 0, rocq__rotate,
                                 (rotated, x, cosine, sine, a->neox, n));
                    memcpy(rotated + n, x + n, (size_t)(a->head_dim - n) * sizeof(float));
                    x = rotated;
                }
                rocq__store(a->simd, stream->y->format, rocq__row(stream->y, h, to, 0), 0, x,
                            a->head_dim);
            }
        }
    }
}

static int64_t rocq__scratch_rope_cpu(const rocq_ctx *ctx, const void *params) {
    const rocq_rope_params *p = (const rocq_rope_params *)params;
    rocq__rope a;
    return rocq__rope_scratch(ctx, &p->rope, p->x->ne[0], &a);
}

// The part of a plan that both ops have: for heads of head_dim elements at positions pos.
static rocq__rope *rocq__plan_rope(rocq__plan *plan, const rocq_rope_config *config,
                                   int64_t head_dim, const rocq_tensor *pos) {
    rocq__rope *a = (rocq__rope *)rocq__plan_take(plan, sizeof *a);
    rocq__rope_scratch(plan->ctx, config, head_dim, a);
    a->config = config;
    a->pos = rocq__row_i32(pos, 0);
    a->turn = (double *)(void *)plan->scratch;
    a->local = (float *)(void *)(plan->scratch + rocq__rope_turn_bytes(a));
    return a;
}

static void rocq__plan_rope_stage(rocq__plan *plan, rocq__rope *a, int64_t n_tokens) {
    int64_t n_heads = 0;
    for (int i = 0; i < a->n_streams; i++) n_heads += a->streams[i].x->ne[1];
    const int64_t grain = rocq__plan_grain(plan, 4 * a->head_dim * n_heads);
    rocq__plan_stage(plan, rocq__rope_task, a, n_tokens, grain)->begin = rocq__rope_begin;
}

static void rocq__plan_rope_cpu(rocq__plan *plan, rocq_op op, const void *params) {
    const rocq_rope_params *p = (const rocq_rope_params *)params;
    rocq__rope *a = rocq__plan_rope(plan, &p->rope, p->x->ne[0], p->pos);
    (void)op;
    a->streams[0].x = p->x;
    a->streams[0].y = p->y;
    a->n_streams = 1;
    rocq__plan_rope_stage(plan, a, p->x->ne[2]);
}

static int64_t rocq__scratch_rope_append_cpu(const rocq_ctx *ctx, const void *params) {
    const rocq_rope_append_params *p = (const rocq_rope_append_params *)params;
    rocq__rope a;
    return rocq__rope_scratch(ctx, &p->rope, p->k->ne[0], &a);
}

static void rocq__plan_rope_append_cpu(rocq__plan *plan, rocq_op op, const void *params) {
    const rocq_rope_append_params *p = (const rocq_rope_append_params *)params;
    rocq__rope *a = rocq__plan_rope(plan, &p->rope, p->k->ne[0], p->pos);
    (void)op;
    a->cell = rocq__row_i32(p->cell ? p->cell : p->pos, 0);
    a->n_cells = p->k_cache->ne[2];
    const rocq__rope_stream k = {p->k, p->k_cache, a->cell, false};
    const rocq__rope_stream v = {p->v, p->v_cache, a->cell, true};
    a->streams[a->n_streams++] = k;
    a->streams[a->n_streams++] = v;
    if (p->q) {
        const rocq__rope_stream q = {p->q, p->q, NULL, false};
        a->streams[a->n_streams++] = q;
    }
    rocq__plan_rope_stage(plan, a, p->k->ne[2]);
}

// -- activate, glu, add, mul, scale, cast: y from the same element of a and b --

// The params of these six ops in one form, for the CPU and the GPU.
typedef struct rocq__map {
    rocq_op op;
    bool simd;                    // on the CPU
    const rocq_tensor *y, *a, *b; // b may be NULL; each ne is y's or 1
    rocq_activation activation;
    float scale, bias;
} rocq__map;

static rocq__map rocq__map_of(rocq_op op, const void *params) {
    rocq__map map;
    memset(&map, 0, sizeof map);
    map.op = op;
    if (op == ROCQ_OP_ACTIVATE) {
        const rocq_activate_params *p = (const rocq_activate_params *)params;
        map.y = p->y;
        map.a = p->x;
        map.activation = p->activation;
    } else if (op == ROCQ_OP_GLU) {
        const rocq_glu_params *p = (const rocq_glu_params *)params;
        map.y = p->y;
        map.a = p->gate;
        map.b = p->up;
        map.activation = p->activation;
    } else if (op == ROCQ_OP_SCALE) {
        const rocq_scale_params *p = (const rocq_scale_params *)params;
        map.y = p->y;
        map.a = p->x;
        map.scale = p->scale;
        map.bias = p->bias;
    } else if (op == ROCQ_OP_CAST) {
        const rocq_cast_params *p = (const rocq_cast_params *)params;
        map.y = p->y;
        map.a = p->x;
    } else { // ADD, MUL
        const rocq_binary_params *p = (const rocq_binary_params *)params;
        map.y = p->y;
        map.a = p->a;
        map.b = p->b;
    }
    return map;
}

static void rocq__map_task(void *arg, int64_t r, int64_t r_end, int32_t thread) {
    const rocq__map *map = (const rocq__map *)arg;
    const rocq_tensor *y = map->y, *a = map->a, *b = map->b;
    float a_buf[ROCQ__STRIP], b_buf[ROCQ__STRIP], out[ROCQ__STRIP];
    (void)thread;
    for (; r < r_end; r++) {
        const rocq__coord c = rocq__coord_of(y, r);
        unsigned char *y_row = rocq__row(y, c.i1, c.i2, c.i3);
        const unsigned char *a_row = rocq__row(a, c.i1, c.i2, c.i3);
        const unsigned char *b_row = b ? rocq__row_repeated(b, c.i1, c.i2, c.i3) : NULL;
        if (map->op == ROCQ_OP_CAST && y->format == a->format) { // lossless, and I32
            memmove(y_row, a_row, (size_t)rocq__bytes(y->format, y->ne[0]));
            continue;
        }
        if (b && b->ne[0] == 1) {
            const float value = *rocq__load(map->simd, b->format, b_row, 0, 1, b_buf);
            for (int i = 0; i < ROCQ__STRIP; i++) b_buf[i] = value;
        }
        for (int64_t k = 0; k < y->ne[0]; k += ROCQ__STRIP) {
            const int64_t n = rocq__strip(y->ne[0], k);
            const float *u = rocq__load(map->simd, a->format, a_row, k, n, a_buf), *v = b_buf;
            if (b && b->ne[0] != 1) v = rocq__load(map->simd, b->format, b_row, k, n, b_buf);
            switch (map->op) {
            case ROCQ_OP_ACTIVATE:
            case ROCQ_OP_GLU:
                memcpy(out, u, (size_t)n * sizeof *out);
                rocq__activate_row(map->simd, map->activation, out, n);
                if (map->op == ROCQ_OP_ACTIVATE) break;
                for (int64_t i = 0; i < n; i++) out[i] *= v[i];
                break;
            case ROCQ_OP_ADD:
                for (int64_t i = 0; i < n; i++) out[i] = u[i] + v[i];
                break;
            case ROCQ_OP_MUL:
                for (int64_t i = 0; i < n; i++) out[i] = u[i] * v[i];
                break;
            case ROCQ_OP_SCALE:
                for (int64_t i = 0; i < n; i++) out[i] = u[i] * map->scale + map->bias;
                break;
            default: memcpy(out, u, (size_t)n * sizeof(float)); break;
            }
            rocq__store(map->simd, y->format, y_row, k, out, n);
        }
    }
}

static void rocq__plan_map_cpu(rocq__plan *plan, rocq_op op, const void *params) {
    rocq__map *map = (rocq__map *)rocq__plan_take(plan, sizeof *map);
    *map = rocq__map_of(op, params);
    map->simd = plan->ctx->has_simd;
    const int64_t work = op == ROCQ_OP_ACTIVATE || op == ROCQ_OP_GLU ? 16 : 4;
    rocq__plan_stage(plan, rocq__map_task, map, rocq__n_rows(map->y),
                     rocq__plan_grain(plan, work * map->y->ne[0]));
}

// -- softmax --

typedef struct rocq__softmax {
    const rocq_softmax_params *p;
    bool simd;
    float scale;
} rocq__softmax;

// A row that is -inf throughout becomes 0 throughout, as in attention.
static void rocq__softmax_task(void *arg, int64_t r, int64_t r_end, int32_t thread) {
    const rocq__softmax *a = (const rocq__softmax *)arg;
    const rocq_tensor *x = a->p->x, *mask = a->p->mask;
    const int64_t n = x->ne[0];
    float buf[ROCQ__STRIP];
    (void)thread;
    for (; r < r_end; r++) {
        const rocq__coord c = rocq__coord_of(x, r);
        const float *from = rocq__row_f32(x, c.i1, c.i2, c.i3);
        const unsigned char *mask_row = mask ? rocq__row_repeated(mask, c.i1, c.i2, c.i3) : NULL;
        float *y = rocq__row_f32(a->p->y, c.i1, c.i2, c.i3), top = -INFINITY;
        double sum = 0.0;
        for (int64_t k = 0; k < n; k += ROCQ__STRIP) {
            const int64_t m = rocq__strip(n, k);
            for (int64_t i = k; i < k + m; i++) y[i] = from[i] * a->scale;
            if (mask) {
                const float *add = rocq__load(a->simd, mask->format, mask_row, k, m, buf);
                for (int64_t i = 0; i < m; i++) {
                    y[k + i] = add[i] == -INFINITY ? -INFINITY : y[k + i] + add[i];
                }
            }
            top = ROCQ__MAX(top, rocq__max(a->simd, y + k, m));
        }
        const float shift = top == -INFINITY ? 0.0f : top; // exp(-inf - -inf) would be NaN
        for (int64_t k = 0; k < n; k += ROCQ__STRIP) {
            sum += (double)rocq__exp(a->simd, y + k, shift, rocq__strip(n, k));
        }
        const float factor = sum == 0.0 ? 0.0f : (float)(1.0 / sum);
        for (int64_t i = 0; i < n; i++) y[i] *= factor;
    }
}

static void rocq__plan_softmax_cpu(rocq__plan *plan, rocq_op op, const void *params) {
    const rocq_softmax_params *p = (const rocq_softmax_params *)params;
    rocq__softmax *a = (rocq__softmax *)rocq__plan_take(plan, sizeof *a);
    (void)op;
    a->p = p;
    a->simd = plan->ctx->has_simd;
    a->scale = p->scale != 0.0f ? p->scale : 1.0f;
    rocq__plan_stage(plan, rocq__softmax_task, a, rocq__n_rows(p->x),
                     rocq__plan_grain(plan, 8 * p->x->ne[0]));
}

// -- gather --

typedef struct rocq__gather {
    const rocq_gather_params *p;
    bool simd;
    float scale;
} rocq__gather;

static void rocq__gather_task(void *arg, int64_t r, int64_t r_end, int32_t thread) {
    const rocq__gather *a = (const rocq__gather *)arg;
    const rocq_tensor *table = a->p->table, *y = a->p->y;
    const int32_t *ids = rocq__row_i32(a->p->ids, 0);
    float buf[ROCQ__STRIP], out[ROCQ__STRIP];
    (void)thread;
    for (; r < r_end; r++) {
        for (int64_t k = 0; k < y->ne[0]; k += ROCQ__STRIP) {
            const int64_t n = rocq__strip(y->ne[0], k);
            const unsigned char *row = rocq__row(table, ids[r], 0, 0);
            const float *x = rocq__load(a->simd, table->format, row, k, n, buf);
            for (int64_t i = 0; i < n; i++) out[i] = x[i] * a->scale;
            rocq__store(a->simd, y->format, rocq__row(y, r, 0, 0), k, out, n);
        }
    }
}

static rocq_result rocq__gather_begin(rocq_ctx *ctx, rocq__stage *stage) {
    const rocq_gather_params *p = ((const rocq__gather *)stage->arg)->p;
    const int64_t n = p->ids->ne[0], n_rows = p->table->ne[1];
    const int32_t *ids = rocq__row_i32(p->ids, 0);
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= n_rows) {
            return rocq__fail(ctx, ROCQ_E_BOUNDS, "gather: ids[%lld] is %d of %lld rows",
                              (long long)i, (int)ids[i], (long long)n_rows);
        }
    }
    return ROCQ_OK;
}

static void rocq__plan_gather_cpu(rocq__plan *plan, rocq_op op, const void *params) {
    const rocq_gather_params *p = (const rocq_gather_params *)params;
    rocq__gather *a = (rocq__gather *)rocq__plan_take(plan, sizeof *a);
    (void)op;
    a->p = p;
    a->simd = plan->ctx->has_simd;
    a->scale = p->scale != 0.0f ? p->scale : 1.0f;
    const int64_t grain = rocq__plan_grain(plan, 4 * p->y->ne[0]);
    rocq__plan_stage(plan, rocq__gather_task, a, p->ids->ne[0], grain)->begin = rocq__gather_begin;
}

// -- argmax --

// The first of the largest of x. NaN never wins, except where there is nothing else.
static int64_t rocq__argmax_row(bool simd, const float *x, int64_t n) {
    float largest = -INFINITY;
    int64_t i = 0;
    for (int64_t k = 0; k < n; k += ROCQ__STRIP) {
        const float most = rocq__max(simd, x + k, rocq__strip(n, k));
        if (!(most > largest)) continue;
        largest = most;
        i = k;
    }
    while (i < n && x[i] != largest) i++;
    return i < n ? i : 0;
}

typedef struct rocq__argmax {
    const rocq_argmax_params *p;
    bool simd;
} rocq__argmax;

static void rocq__argmax_task(void *arg, int64_t r, int64_t r_end, int32_t thread) {
    const rocq__argmax *a = (const rocq__argmax *)arg;
    int32_t *index = (int32_t *)(void *)rocq__row(a->p->index, 0, 0, 0);
    (void)thread;
    for (; r < r_end; r++) {
        const float *x = rocq__row_f32(a->p->x, r, 0, 0);
        index[r] = (int32_t)rocq__argmax_row(a->simd, x, a->p->x->ne[0]);
    }
}

static void rocq__plan_argmax_cpu(rocq__plan *plan, rocq_op op, const void *params) {
    rocq__argmax *a = (rocq__argmax *)rocq__plan_take(plan, sizeof *a);
    (void)op;
    a->p = (const rocq_argmax_params *)params;
    a->simd = plan->ctx->has_simd;
    rocq__plan_stage(plan, rocq__argmax_task, a, a->p->x->ne[1],
                     rocq__plan_grain(plan, 2 * a->p->x->ne[0]));
}

// -- sample --
// Every filter keeps a prefix of the order "higher logit first, then lower token", so a candidate,
// the cut, tells what is left: it and all before it. The final distribution is summed and drawn
// from in token order, so that the draw does not depend on how the cut was found.
//
// Tokens are taken in strips. The largest logit of each is found first: most strips have none that
// top-k or min-p leave, and are not looked at again. 150,000 logits take 0.1 ms with top-k 40.

enum {
    ROCQ__DRAW = 64,       // tokens of a strip
    ROCQ__DRAW_BINS = 1024 // of top-p, for distances of a logit from the top: 32 for one of 1
};

typedef struct rocq__candidate {
    float logit;
    int32_t token;
} rocq__candidate;

static inline bool rocq__before(rocq__candidate a, rocq__candidate b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// exp((logit - top) / temperature), 1 for the top itself even where that is infinite.
static inline float rocq__weight(float logit, float top, float temperature) {
    return logit == top ? 1.0f : rocq__exp1((logit - top) / temperature);
}

// The strip's logits become weights, 0 for NaN and below least; returns their sum.
static float rocq__weigh_scalar(float *x, float top, float least, float temperature) {
    float sum[8] = {0};
    for (int i = 0; i < ROCQ__DRAW; i++) {
        x[i] = x[i] >= least ? rocq__weight(x[i], top, temperature) : 0.0f;
        sum[i % 8] += x[i];
    }
    return rocq__sum8(sum);
}

#if ROCQ__HAS_V8
// The same bits; top is finite.
static ROCQ__SIMD float rocq__weigh_simd(float *x, float top, float least, float temperature) {
    rocq__v8 sum = rocq__v8_set1(0.0f);
    for (int i = 0; i < ROCQ__DRAW; i += 8) {
        const rocq__v8 v = rocq__v8_max(rocq__v8_load(x + i), rocq__v8_set1(-INFINITY));
        const rocq__v8 below = rocq__v8_sub(v, rocq__v8_set1(top));
        rocq__v8 e = rocq__v8_exp(rocq__v8_div(below, rocq__v8_set1(temperature)));
        e = rocq__v8_zero_below(e, v, rocq__v8_set1(least));
        rocq__v8_store(x + i, e);
        sum = rocq__v8_add(sum, e);
    }
    return rocq__v8_sum(sum);
}
#endif

// Quickselect: the candidate at which the weights, summed in that order, reach target. A weight is
// exp(logit - top), or 1 with count. Reorders list; n > 0.
static rocq__candidate rocq__select(rocq__candidate *list, int64_t n, float top, bool count,
                                    double target) {
    double front = 0.0; // weight of what stands before list
    while (n > 1) {
        // All that comes before the pivot moves to the front of list.
        const rocq__candidate pivot = list[n / 2];
        int64_t m = 0;
        double sum = front;
        list[n / 2] = list[n - 1];
        list[n - 1] = pivot;
        for (int64_t i = 0; i < n - 1; i++) {
            if (!rocq__before(list[i], pivot)) continue;
            const rocq__candidate moved = list[i];
            list[i] = list[m];
            list[m++] = moved;
            sum += count ? 1.0 : (double)rocq__weight(moved.logit, top, 1.0f);
        }
        if (m > 0 && sum >= target) {
            n = m;
            continue;
        }
        sum += count ? 1.0 : (double)rocq__weight(pivot.logit, top, 1.0f);
        if (sum >= target || m == n - 1) return pivot;
        front = sum;
        list += m;
        n -= m + 1; // the pivot was the last one
    }
    return list[0];
}

static inline uint64_t rocq__mix(uint64_t z) { // splitmix64's finisher
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// Uniform in [0, 1), 53 bits, from seed and step alone.
static double rocq__uniform(uint64_t seed, uint64_t step) {
    const uint64_t z =
        rocq__mix(rocq__mix(seed + 0x9e3779b97f4a7c15u) + (step + 1) * 0x9e3779b97f4a7c15u);
    return (double)(z >> 11) * 0x1p-53;
}

typedef struct rocq__drawing {
    const rocq_sample_params *p;
    bool simd;
    const float *x;      // [n_vocab] logits after penalties and mask
    float *changed;      // [n_vocab] where these are written, if there are any
    float *most, *sum;   // [n_strips] the largest logit and the weight of each strip
    rocq__candidate *list; // [n_vocab]
    int32_t *count;      // [n_vocab] how often each token is in recent: in list's memory
    int64_t n_vocab, n_strips;
    float top;
} rocq__drawing;

static int64_t rocq__scratch_sample_cpu(const rocq_ctx *ctx, const void *params) {
    const int64_t n = ((const rocq_sample_params *)params)->logits->ne[0];
    const int64_t n_strips = (n + ROCQ__DRAW - 1) / ROCQ__DRAW;
    (void)ctx;
    return n * (int64_t)(sizeof(rocq__candidate) + sizeof(float)) +
           n_strips * (int64_t)(2 * sizeof(float));
}

// Sets x: the logits themselves, or a copy with penalties, and -inf for what is not allowed.
static rocq_result rocq__draw_logits(rocq_ctx *ctx, rocq__drawing *a) {
    const rocq_sample_params *p = a->p;
    const int64_t n_recent = p->recent ? p->recent->ne[0] : 0;
    const int32_t *recent = p->recent ? rocq__row_i32(p->recent, 0) : NULL;
    const int32_t *allowed = p->allowed ? rocq__row_i32(p->allowed, 0) : NULL;
    const float repeat = p->repeat_penalty > 0.0f ? p->repeat_penalty : 1.0f;
    a->x = rocq__row_f32(p->logits, 0, 0, 0);
    for (int64_t i = 0; i < n_recent; i++) {
        if (recent[i] < 0 || recent[i] >= a->n_vocab) {
            return rocq__fail(ctx, ROCQ_E_BOUNDS, "sample: recent[%lld] is %d of %lld tokens",
                              (long long)i, (int)recent[i], (long long)a->n_vocab);
        }
        a->count[recent[i]] = 0;
    }
    if (!recent && !allowed) return ROCQ_OK;
    memcpy(a->changed, a->x, (size_t)a->n_vocab * sizeof *a->x);
    a->x = a->changed;
    for (int64_t i = 0; i < n_recent; i++) a->count[recent[i]]++;
    for (int64_t i = 0; i < n_recent; i++) {
        int32_t *count = &a->count[recent[i]];
        float *x = &a->changed[recent[i]];
        if (*count == 0) continue; // done, where it came first
        *x = *x > 0.0f ? *x / repeat : *x * repeat;
        *x -= (float)*count * p->frequency_penalty + p->presence_penalty;
        *count = 0;
    }
    for (int64_t t = 0; allowed && t < a->n_vocab; t++) {
        if (!((uint32_t)allowed[t / 32] >> (t % 32) & 1u)) a->changed[t] = -INFINITY;
    }
    return ROCQ_OK;
}

// Lists the candidates up to the cut, in token order, and returns their number.
static int64_t rocq__draw_list(const rocq__drawing *a, rocq__candidate cut) {
    int64_t n = 0;
    for (int64_t s = 0; s < a->n_strips; s++) {
        if (!(a->most[s] >= cut.logit)) continue;
        const int64_t end = ROCQ__MIN(a->n_vocab, (s + 1) * ROCQ__DRAW);
        for (int64_t t = s * ROCQ__DRAW; t < end; t++) {
            const rocq__candidate c = {a->x[t], (int32_t)t};
            a->list[n] = c;
            n += c.logit > -INFINITY && c.logit >= cut.logit && !rocq__before(cut, c);
        }
    }
    return n;
}

// The weights of a strip, 0 behind the cut; returns their sum. Of tokens with the cut's logit,
// those behind it are in later strips or in its own.
static float rocq__draw_strip(const rocq__drawing *a, int64_t s, rocq__candidate cut,
                              float temperature, float *weight) {
    const int64_t first = s * ROCQ__DRAW, most = ROCQ__DRAW;
    const int64_t n = ROCQ__MIN(most, a->n_vocab - first);
    const float more = cut.logit < INFINITY ? nextafterf(cut.logit, INFINITY) : NAN;
    const float least = first <= cut.token ? cut.logit : more;
    memcpy(weight, a->x + first, (size_t)n * sizeof *weight);
    for (int64_t i = n; i < ROCQ__DRAW; i++) weight[i] = -INFINITY;
    const int64_t behind = ROCQ__MAX((int64_t)cut.token + 1 - first, 0);
    for (int64_t i = behind; first <= cut.token && i < n; i++) {
        if (weight[i] == cut.logit) weight[i] = -INFINITY;
    }
    return ROCQ__EITHER(a->simd && a->top < INFINITY, rocq__weigh,
                        (weight, a->top, least, temperature));
}

static inline int rocq__draw_bin(const rocq__drawing *a, float logit) {
    const float distance = (a->top - logit) * 32.0f;
    return distance < (float)ROCQ__DRAW_BINS - 1.0f ? (int)distance : ROCQ__DRAW_BINS - 1;
}

// The last of the k candidates that come first. They are in strips whose largest logit is no less
// than the k-th of those.
static rocq__candidate rocq__draw_top_k(const rocq__drawing *a, int64_t k) {
    rocq__candidate cut = {-INFINITY, INT32_MAX};
    if (k < a->n_strips) {
        for (int64_t s = 0; s < a->n_strips; s++) {
            const rocq__candidate c = {a->most[s], (int32_t)s};
            a->list[s] = c;
        }
        cut.logit = rocq__select(a->list, a->n_strips, a->top, true, (double)k).logit;
    }
    const int64_t n = rocq__draw_list(a, cut);
    return k < n ? rocq__select(a->list, n, a->top, true, (double)k) : cut;
}

// Of the candidates up to the cut, the one at which the weights reach their share p. Sums by
// distance tell in which bin that is; only that one is searched.
static rocq__candidate rocq__draw_top_p(const rocq__drawing *a, rocq__candidate cut, double p) {
    double sum[ROCQ__DRAW_BINS] = {0}, total = 0.0, front = 0.0;
    float weight[ROCQ__DRAW];
    for (int64_t s = 0; s < a->n_strips; s++) {
        if (!(a->most[s] > -INFINITY && a->most[s] >= cut.logit)) continue;
        const int64_t first = s * ROCQ__DRAW, end = ROCQ__MIN(a->n_vocab, first + ROCQ__DRAW);
        rocq__draw_strip(a, s, cut, 1.0f, weight);
        for (int64_t t = first; t < end; t++) {
            sum[rocq__draw_bin(a, a->x[t])] += (double)weight[t - first];
        }
    }
    int bin = 0, last = ROCQ__DRAW_BINS - 1;
    for (int b = 0; b < ROCQ__DRAW_BINS; b++) total += sum[b];
    while (last > 0 && sum[last] == 0.0) last--;
    for (; bin < last && front + sum[bin] < p * total; bin++) front += sum[bin];
    int64_t n = 0;
    for (int64_t s = 0; s < a->n_strips; s++) {
        if (!(a->most[s] >= cut.logit && rocq__draw_bin(a, a->most[s]) <= bin)) continue;
        const int64_t end = ROCQ__MIN(a->n_vocab, (s + 1) * ROCQ__DRAW);
        for (int64_t t = s * ROCQ__DRAW; t < end; t++) {
            const rocq__candidate c = {a->x[t], (int32_t)t};
            a->list[n] = c;
            n += rocq__draw_bin(a, c.logit) == bin && c.logit > -INFINITY && !rocq__before(cut, c);
        }
    }
    return rocq__select(a->list, n, a->top, false, p * total - front);
}

// Draws from the candidates up to the cut: the strip first, then the token.
static int64_t rocq__draw_token(const rocq__drawing *a, rocq__candidate cut, float *prob) {
    const rocq_sample_params *p = a->p;
    float weight[ROCQ__DRAW];
    double total = 0.0, front = 0.0, before = 0.0;
    for (int64_t s = 0; s < a->n_strips; s++) {
        const bool any = a->most[s] > -INFINITY && a->most[s] >= cut.logit;
        a->sum[s] = any ? rocq__draw_strip(a, s, cut, p->temperature, weight) : 0.0f;
        total += (double)a->sum[s];
    }
    // front repeats the additions of total, so it passes target; where the product was rounded up
    // to total, and where a strip's own sum was rounded, the last token with any weight is drawn.
    const double target = rocq__uniform(p->seed, p->step) * total;
    int64_t strip = 0, token = 0;
    for (int64_t s = 0; s < a->n_strips && front <= target; s++) {
        if (a->sum[s] == 0.0f) continue;
        strip = s;
        before = front;
        front += (double)a->sum[s];
    }
    rocq__draw_strip(a, strip, cut, p->temperature, weight);
    for (int64_t i = 0; i < ROCQ__DRAW && before <= target; i++) {
        if (weight[i] == 0.0f) continue;
        before += (double)weight[i];
        token = strip * ROCQ__DRAW + i;
        *prob = (float)((double)weight[i] / total);
    }
    return token;
}

static rocq_result rocq__sample_begin(rocq_ctx *ctx, rocq__stage *stage) {
    rocq__drawing *a = (rocq__drawing *)stage->arg;
    const rocq_sample_params *p = a->p;
    ROCQ__TRY(rocq__draw_logits(ctx, a));
    for (int64_t s = 0; s < a->n_strips; s++) {
        const int64_t first = s * ROCQ__DRAW, most = ROCQ__DRAW;
        a->most[s] = rocq__max(a->simd, a->x + first, ROCQ__MIN(most, a->n_vocab - first));
    }
    const int64_t best = rocq__argmax_row(a->simd, a->most, a->n_strips);
    a->top = a->most[best];
    if (!(a->top > -INFINITY)) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "sample: no token is allowed and has a logit");
    }
    float prob = 1.0f;
    int64_t token = best * ROCQ__DRAW;
    if (p->temperature > 0.0f) {
        rocq__candidate cut = {-INFINITY, INT32_MAX};
        if (p->top_k > 0) cut = rocq__draw_top_k(a, p->top_k);
        if (p->top_p > 0.0f && p->top_p < 1.0f) cut = rocq__draw_top_p(a, cut, (double)p->top_p);
        if (p->min_p > 0.0f) {
            const rocq__candidate least = {a->top + ROCQ__MIN(logf(p->min_p), 0.0f), INT32_MAX};
            if (rocq__before(least, cut)) cut = least;
        }
        token = rocq__draw_token(a, cut, &prob);
    } else {
        while (a->x[token] != a->top) token++;
    }
    *(int32_t *)(void *)rocq__row(p->token, 0, 0, 0) = (int32_t)token;
    if (p->prob) *rocq__row_f32(p->prob, 0, 0, 0) = prob;
    return ROCQ_OK;
}

static void rocq__plan_sample_cpu(rocq__plan *plan, rocq_op op, const void *params) {
    rocq__drawing *a = (rocq__drawing *)rocq__plan_take(plan, sizeof *a);
    (void)op;
    a->p = (const rocq_sample_params *)params;
    a->simd = plan->ctx->has_simd;
    a->n_vocab = a->p->logits->ne[0];
    a->n_strips = (a->n_vocab + ROCQ__DRAW - 1) / ROCQ__DRAW;
    a->list = (rocq__candidate *)plan->scratch;
    a->count = (int32_t *)plan->scratch;
    a->changed = (float *)(void *)(a->list + a->n_vocab);
    a->most = a->changed + a->n_vocab;
    a->sum = a->most + a->n_strips;
    rocq__plan_stage(plan, NULL, a, 0, 1)->begin = rocq__sample_begin;
}

// ---------------------------------------------------------------------------------------------
// >>cpu_pictures: conv, norm_stats, resize, pixels
// ---------------------------------------------------------------------------------------------

// -- conv --

// The params of a conv with their defaults filled in.
typedef struct rocq__conv_shape {
    int64_t c, k, m;       // channels of x, elements of a row of w, channels of y
    int64_t w, h;          // of z
    int32_t kw, kh, kt, stride, upsample, pad_x, pad_y;
    int32_t past;          // frames of x before y's first
} rocq__conv_shape;

static int32_t rocq__conv_pad(int32_t pad, int32_t taps) {
    return pad > 0 ? pad : pad < 0 ? 0 : (taps - 1) / 2;
}

static rocq__conv_shape rocq__conv_shape_of(const rocq_conv_params *p) {
    rocq__conv_shape s;
    s.c = p->x->ne[0];
    s.m = p->y->ne[0];
    s.kw = ROCQ__MAX(p->kw, 1);
    s.kh = ROCQ__MAX(p->kh, 1);
    s.kt = ROCQ__MAX(p->kt, 1);
    s.k = p->w->ne[0];
    s.stride = ROCQ__MAX(p->stride, 1);
    s.upsample = ROCQ__MAX(p->upsample, 1);
    s.pad_x = rocq__conv_pad(p->pad_x, s.kw);
    s.pad_y = rocq__conv_pad(p->pad_y, s.kh);
    s.w = p->x->ne[1] * s.upsample;
    s.h = p->x->ne[2] * s.upsample;
    s.past = (int32_t)(p->x->ne[3] - p->y->ne[3]);
    return s;
}

// A product of matrices whose columns are never written down (an implicit GEMM). A task has a tile
// of y's positions: it computes once the patch of z that the tile sees, and multiplies it with all
// of w, 16 channels of y (a panel) and a piece of K at a time. As c is innermost, what a row of the
// kernel sees from one position is contiguous in the patch, and so a run of K.
// A sum starts with the bias and takes its products in the order of K, one by one, with the zeros
// around z: so neither the tile nor the thread changes a bit of it.

enum {
    ROCQ__CONV_PANEL = 16,
    ROCQ__CONV_STRIP = 6,     // positions: with a panel, 12 of AVX2's 16 registers are sums
    ROCQ__CONV_PIECE = 256,   // of K: 16 KiB of a panel, half of L1
    ROCQ__CONV_TILE_W = 24,   // at most,
    ROCQ__CONV_TILE = 384,    // positions,
    ROCQ__CONV_PATCH = 65536  // and floats of the patch: 256 KiB, half of an L2
};

typedef struct rocq__conv_tiles {
    int64_t n_x, n_y;     // tiles of a row of y, rows of tiles of a frame
    int64_t w, h;         // positions of the largest tile
    int64_t patch_w, patch_h;
    int64_t pitch;        // floats from one row of the patch to the next
    int64_t n_panels;
    int64_t n_parts;      // tasks that share a tile: each has some of the panels
    int64_t patch, sums;  // floats
} rocq__conv_tiles;

static rocq__conv_tiles rocq__conv_tiles_of(const rocq_tensor *y, const rocq__conv_shape *s,
                                            int32_t n_threads) {
    rocq__conv_tiles t;
    const int64_t most_w = ROCQ__CONV_TILE_W, most = ROCQ__CONV_TILE;
    const double depth = (double)s->c * s->kt;
    t.w = ROCQ__MIN(y->ne[1], most_w);
    t.h = ROCQ__MIN(y->ne[2], most / t.w);
    for (;;) {
        t.n_x = (y->ne[1] + t.w - 1) / t.w;
        t.n_y = (y->ne[2] + t.h - 1) / t.h;
        t.w = (y->ne[1] + t.n_x - 1) / t.n_x; // tiles of the same size, as nearly as may be
        t.h = (y->ne[2] + t.n_y - 1) / t.n_y;
        t.patch_w = (t.w - 1) * s->stride + s->kw;
        t.patch_h = (t.h - 1) * s->stride + s->kh;
        const bool small = (double)(t.patch_w * t.patch_h) * depth <= (double)ROCQ__CONV_PATCH;
        if (small || t.w * t.h <= 4 * ROCQ__CONV_STRIP) break;
        if (t.w > t.h) t.w--;
        else t.h--;
    }
    t.n_panels = (s->m + ROCQ__CONV_PANEL - 1) / ROCQ__CONV_PANEL;
    const int64_t n_tiles = t.n_x * t.n_y * y->ne[3];
    t.n_parts = ROCQ__MIN(t.n_panels, (4 * n_threads + n_tiles - 1) / n_tiles);
    t.sums = (t.w * t.h + ROCQ__CONV_STRIP) * ROCQ__CONV_PANEL;
    if (s->c > INT64_MAX / 2 / (t.patch_w * t.patch_h * s->kt + 512)) {
        t.pitch = t.patch = INT64_MAX;
    } else {
        // An odd multiple of 256 bytes: six rows a multiple of 1 KiB apart, as those of the patch
        // often were, are read at two thirds of the speed (Zen 3).
        t.pitch = (t.patch_w * s->c + 63) / 128 * 128 + 64;
        t.patch = t.pitch * t.patch_h * s->kt;
    }
    return t;
}

typedef struct rocq__conv {
    const rocq_conv_params *p;
    rocq__conv_shape s;
    rocq__conv_tiles t;
    bool simd, avx512;
    float *weights; // [panels][K][16], decoded, 0 beyond M
    float *local;   // per thread: sums of a tile and two panels [positions][16], norm [3, C], patch
    int64_t pitch;  // floats per thread
} rocq__conv;

static int64_t rocq__scratch_conv_cpu(const rocq_ctx *ctx, const void *params) {
    const rocq_conv_params *p = (const rocq_conv_params *)params;
    const rocq__conv_shape s = rocq__conv_shape_of(p);
    const rocq__conv_tiles t = rocq__conv_tiles_of(p->y, &s, ctx->desc.n_threads);
    int64_t floats, all;
    if (!rocq__add(t.patch, 3 * s.c + 2 * t.sums + 15, &floats) ||
        !rocq__mul(floats, ctx->desc.n_threads, &floats) ||
        !rocq__mul(s.k, t.n_panels * ROCQ__CONV_PANEL, &all) || !rocq__add(all, floats, &all) ||
        !rocq__mul(all, (int64_t)sizeof(float), &all)) {
        return INT64_MAX;
    }
    return all;
}

static void rocq__conv_decode_task(void *arg, int64_t panel, int64_t panel_end, int32_t thread) {
    const rocq__conv *a = (const rocq__conv *)arg;
    const rocq_tensor *w = a->p->w;
    static const float zeros[ROCQ__STRIP] = {0};
    float buf[ROCQ__CONV_PANEL][ROCQ__STRIP];
    const float *row[ROCQ__CONV_PANEL];
    (void)thread;
    for (; panel < panel_end; panel++) {
        float *to = a->weights + panel * a->s.k * ROCQ__CONV_PANEL;
        for (int64_t k = 0; k < a->s.k; k += ROCQ__STRIP) {
            const int64_t n = rocq__strip(a->s.k, k);
            for (int64_t i = 0; i < ROCQ__CONV_PANEL; i++) {
                const int64_t m = panel * ROCQ__CONV_PANEL + i;
                row[i] = m < a->s.m ? rocq__load(a->simd, w->format, rocq__row(w, m, 0, 0), k, n,
                                                 buf[i])
                                    : zeros;
            }
            for (int64_t j = 0; j < n; j++) {
                for (int64_t i = 0; i < ROCQ__CONV_PANEL; i++) *to++ = row[i][j];
            }
        }
    }
}

// z = (z s - norm[0]) norm[1] + norm[2], channel by channel
static void rocq__conv_norm_scalar(float *z, const float *norm, float s, int64_t n) {
    for (int64_t c = 0; c < n; c++) {
        z[c] = (z[c] * s - norm[c]) * norm[n + c] + norm[2 * n + c];
    }
}

#if ROCQ__HAS_V8
static ROCQ__SIMD void rocq__conv_norm_simd(float *z, const float *norm, float s, int64_t n) {
    const rocq__v8 scale = rocq__v8_set1(s);
    int64_t c = 0;
    for (; c + 8 <= n; c += 8) {
        const rocq__v8 v = rocq__v8_sub(rocq__v8_mul(rocq__v8_load(z + c), scale),
                                        rocq__v8_load(norm + c));
        rocq__v8_store(z + c, rocq__v8_fma(v, rocq__v8_load(norm + n + c),
                                           rocq__v8_load(norm + 2 * n + c)));
    }
    for (; c < n; c++) z[c] = fmaf(z[c] * s - norm[c], norm[n + c], norm[2 * n + c]);
}
#endif

// The norm of x's frame it by channels: mean, rstd norm_weight, norm_bias. With statistics of
// positions, whose scale comes first, mean is 0 and rstd 1.
static void rocq__conv_norm_of(const rocq__conv *a, float *norm, int64_t it) {
    const rocq_conv_params *p = a->p;
    const int64_t n = a->s.c, n_groups = p->stats->ne[0] == 2 ? p->stats->ne[1] : 1;
    const float *weight = p->norm_weight ? rocq__row_f32(p->norm_weight, 0, 0, 0) : NULL;
    const float *bias = p->norm_bias ? rocq__row_f32(p->norm_bias, 0, 0, 0) : NULL;
    const float position[2] = {0.0f, 1.0f};
    for (int64_t c = 0; c < n; c++) {
        const float *stats = position;
        if (p->stats->ne[0] == 2) {
            stats = rocq__row_f32(p->stats, c / (n / n_groups), p->stats->ne[2] == 1 ? 0 : it, 0);
        }
        norm[c] = stats[0];
        norm[n + c] = weight ? stats[1] * weight[c] : stats[1];
        norm[2 * n + c] = bias ? bias[c] : 0.0f;
    }
}

// A row of the patch: z from column ix on, at row iy of x's frame it, which z has.
static void rocq__conv_load_row(const rocq__conv *a, float *z, const float *norm, int64_t ix,
                                int64_t iy, int64_t it) {
    const rocq_conv_params *p = a->p;
    const int64_t n = a->s.c, up = a->s.upsample, x2 = iy / up;
    const bool by_position = p->stats && p->stats->ne[0] == 1;
    int64_t last = -1; // column of x that stands just before z
    for (int64_t i = 0; i < a->t.patch_w; i++, ix++, z += n) {
        const int64_t x1 = ix / up;
        if (ix < 0 || ix >= a->s.w) {
            memset(z, 0, (size_t)n * sizeof *z);
        } else if (x1 == last) {
            memcpy(z, z - n, (size_t)n * sizeof *z);
        } else {
            const float s = by_position ? *rocq__row_f32(p->stats, x1, x2, it) : 1.0f;
            rocq__decode(a->simd, p->x->format, z, rocq__row(p->x, x1, x2, it), n);
            if (p->stats) ROCQ__EITHER(a->simd, rocq__conv_norm, (z, norm, s, n));
            rocq__activate_row(a->simd, p->x_activation, z, n);
            last = x1;
        }
    }
}

// The patch [C, patch_w, patch_h, kt] whose first position is z's (ix, iy), for frame ot of y.
static void rocq__conv_load_patch(const rocq__conv *a, float *patch, float *norm, int64_t ix,
                                  int64_t iy, int64_t ot) {
    const int64_t row = a->t.pitch;
    for (int32_t f = 0; f < a->s.kt; f++) {
        const int64_t it = ot + f + a->s.past - (a->s.kt - 1);
        int64_t last = -1; // row of x that stands just before
        if (a->p->stats && it >= 0) rocq__conv_norm_of(a, norm, it);
        for (int64_t j = 0; j < a->t.patch_h; j++, patch += row) {
            const int64_t z2 = iy + j, x2 = z2 / a->s.upsample;
            if (it < 0 || z2 < 0 || z2 >= a->s.h) {
                memset(patch, 0, (size_t)row * sizeof *patch);
            } else if (x2 == last) {
                memcpy(patch, patch - row, (size_t)row * sizeof *patch);
            } else {
                rocq__conv_load_row(a, patch, norm, ix, z2, it);
                last = x2;
            }
        }
    }
}

// A part of K: n_rows runs of n elements, which lie pitch floats apart in the patch.
typedef struct rocq__conv_runs {
    const float *w; // [n_rows n][16]
    const float *z; // for the position at 0
    int64_t n, n_rows, pitch;
    int64_t next_w, next_sums; // from a panel to the next, for AVX-512, which has two at once
} rocq__conv_runs;

// sums[position][channel] += the products of six positions, which are at[] floats from runs->z
static void rocq__conv_strip_scalar(float *sums, const rocq__conv_runs *runs, const int64_t *at) {
    for (int p = 0; p < ROCQ__CONV_STRIP; p++, sums += ROCQ__CONV_PANEL) {
        const float *w = runs->w, *z = runs->z + at[p];
        for (int64_t row = 0; row < runs->n_rows; row++, z += runs->pitch) {
            for (int64_t k = 0; k < runs->n; k++, w += ROCQ__CONV_PANEL) {
                for (int i = 0; i < ROCQ__CONV_PANEL; i++) sums[i] += w[i] * z[k];
            }
        }
    }
}

#if ROCQ__HAS_V8
static ROCQ__SIMD void rocq__conv_strip_simd(float *sums, const rocq__conv_runs *runs,
                                             const int64_t *at) {
    const float *w = runs->w, *z = runs->z;
    rocq__v8 s[ROCQ__CONV_STRIP][2];
    ROCQ__UNROLL
    for (int p = 0; p < ROCQ__CONV_STRIP; p++) {
        s[p][0] = rocq__v8_load(sums + p * ROCQ__CONV_PANEL);
        s[p][1] = rocq__v8_load(sums + p * ROCQ__CONV_PANEL + 8);
    }
    for (int64_t row = 0; row < runs->n_rows; row++, z += runs->pitch) {
        const float *z0 = z + at[0], *z1 = z + at[1], *z2 = z + at[2], *z3 = z + at[3],
                    *z4 = z + at[4], *z5 = z + at[5];
        for (int64_t k = 0; k < runs->n; k++, w += ROCQ__CONV_PANEL) {
            const rocq__v8 w0 = rocq__v8_load(w), w1 = rocq__v8_load(w + 8);
            ROCQ__UNROLL
            for (int p = 0; p < ROCQ__CONV_STRIP; p++) {
                const float *from = p == 0   ? z0
                                    : p == 1 ? z1
                                    : p == 2 ? z2
                                    : p == 3 ? z3
                                    : p == 4 ? z4
                                             : z5;
                const rocq__v8 v = rocq__v8_set1(from[k]);
                s[p][0] = rocq__v8_fma(v, w0, s[p][0]);
                s[p][1] = rocq__v8_fma(v, w1, s[p][1]);
            }
        }
    }
    ROCQ__UNROLL
    for (int p = 0; p < ROCQ__CONV_STRIP; p++) {
        rocq__v8_store(sums + p * ROCQ__CONV_PANEL, s[p][0]);
        rocq__v8_store(sums + p * ROCQ__CONV_PANEL + 8, s[p][1]);
    }
}
#endif

#if ROCQ__HAS_AVX2
// Two panels: with one there would be fewer chains of sums than two FMAs a clock need.
ROCQ__TARGET_AVX512 static void rocq__conv_strip_avx512(float *sums, const rocq__conv_runs *runs,
                                                        const int64_t *at) {
    const float *w = runs->w, *next_w = w + runs->next_w, *z = runs->z;
    float *next_sums = sums + runs->next_sums;
    __m512 s[ROCQ__CONV_STRIP][2];
    ROCQ__UNROLL
    for (int p = 0; p < ROCQ__CONV_STRIP; p++) {
        s[p][0] = _mm512_loadu_ps(sums + p * ROCQ__CONV_PANEL);
        s[p][1] = _mm512_loadu_ps(next_sums + p * ROCQ__CONV_PANEL);
    }
    for (int64_t row = 0; row < runs->n_rows; row++, z += runs->pitch) {
        const float *from[ROCQ__CONV_STRIP];
        ROCQ__UNROLL
        for (int p = 0; p < ROCQ__CONV_STRIP; p++) from[p] = z + at[p];
        for (int64_t k = 0; k < runs->n; k++) {
            const __m512 w0 = _mm512_loadu_ps(w), w1 = _mm512_loadu_ps(next_w);
            ROCQ__UNROLL
            for (int p = 0; p < ROCQ__CONV_STRIP; p++) {
                const __m512 v = _mm512_set1_ps(from[p][k]);
                s[p][0] = _mm512_fmadd_ps(v, w0, s[p][0]);
                s[p][1] = _mm512_fmadd_ps(v, w1, s[p][1]);
            }
            w += ROCQ__CONV_PANEL;
            next_w += ROCQ__CONV_PANEL;
        }
    }
    ROCQ__UNROLL
    for (int p = 0; p < ROCQ__CONV_STRIP; p++) {
        _mm512_storeu_ps(sums + p * ROCQ__CONV_PANEL, s[p][0]);
        _mm512_storeu_ps(next_sums + p * ROCQ__CONV_PANEL, s[p][1]);
    }
}
#endif

static void rocq__conv_strip(const rocq__conv *a, float *sums, const rocq__conv_runs *runs,
                             const int64_t *at, int64_t n_panels) {
#if ROCQ__HAS_AVX2
    if (n_panels == 2) {
        rocq__conv_strip_avx512(sums, runs, at);
        return;
    }
#endif
    (void)n_panels;
    ROCQ__EITHER(a->simd, rocq__conv_strip, (sums, runs, at));
}

// The positions of y that a task computes. Their sums are stored column by column, so that the six
// positions of a strip lie in six successive rows of the patch.
typedef struct rocq__conv_tile {
    int64_t x, y, w, h, frame;
    int64_t n_strips;
    int64_t at[ROCQ__CONV_TILE + ROCQ__CONV_STRIP]; // floats from the patch to each position's z
} rocq__conv_tile;

// Adds the products of n_panels panels, 1 or 2, with the patch. The rows of a kernel that are
// shorter than a piece go together, longer ones are cut in equal pieces.
static void rocq__conv_panels(const rocq__conv *a, const rocq__conv_tile *t, float *sums,
                              const float *w, const float *patch, int64_t n_panels) {
    const rocq__conv_shape *s = &a->s;
    const int64_t run = s->kw * s->c, most = ROCQ__CONV_PIECE;
    const int64_t n_pieces = (run + most - 1) / most, piece = (run + n_pieces - 1) / n_pieces;
    const int64_t together = ROCQ__MAX(most / run, 1);
    rocq__conv_runs runs;
    runs.w = w;
    runs.pitch = a->t.pitch;
    runs.next_w = s->k * ROCQ__CONV_PANEL;
    runs.next_sums = a->t.sums;
    for (int32_t f = 0; f < s->kt; f++) {
        for (int64_t j = 0; j < s->kh; j += runs.n_rows) {
            runs.n_rows = ROCQ__MIN(together, s->kh - j);
            for (int64_t k = 0; k < run; k += piece) {
                runs.n = ROCQ__MIN(piece, run - k);
                runs.z = patch + (f * a->t.patch_h + j) * runs.pitch + k;
                for (int64_t i = 0; i < t->n_strips; i++) {
                    rocq__conv_strip(a, sums + i * ROCQ__CONV_STRIP * ROCQ__CONV_PANEL, &runs,
                                     t->at + i * ROCQ__CONV_STRIP, n_panels);
                }
                runs.w += runs.n_rows * runs.n * ROCQ__CONV_PANEL;
            }
        }
    }
}

// What is left to do with the sums of a panel: residual, activation, cast.
static void rocq__conv_finish(const rocq__conv *a, float *sums, const rocq__conv_tile *t,
                              int64_t m) {
    const rocq_conv_params *p = a->p;
    const int64_t most = ROCQ__CONV_PANEL, n = ROCQ__MIN(most, a->s.m - m), count = t->w * t->h;
    for (int64_t i = 0; i < count && p->residual; i++) {
        float buf[ROCQ__CONV_PANEL], *sum = sums + i * ROCQ__CONV_PANEL;
        const float *residual = rocq__load(
            a->simd, p->residual->format,
            rocq__row(p->residual, t->x + i / t->h, t->y + i % t->h, t->frame), m, n, buf);
        for (int64_t c = 0; c < n; c++) sum[c] += residual[c];
    }
    rocq__activate_row(a->simd, p->activation, sums, count * ROCQ__CONV_PANEL);
    for (int64_t i = 0; i < count; i++) {
        rocq__store(a->simd, p->y->format,
                    rocq__row(p->y, t->x + i / t->h, t->y + i % t->h, t->frame), m,
                    sums + i * ROCQ__CONV_PANEL, n);
    }
}

// Bias, or 0, in the sums of a panel.
static void rocq__conv_begin(const rocq__conv *a, float *sums, const rocq__conv_tile *t,
                             int64_t m) {
    const float *bias = a->p->bias ? rocq__row_f32(a->p->bias, 0, 0, 0) : NULL;
    float first[ROCQ__CONV_PANEL] = {0};
    for (int64_t c = 0; bias && c < ROCQ__CONV_PANEL && m + c < a->s.m; c++) first[c] = bias[m + c];
    for (int64_t k = 0; k < t->n_strips * ROCQ__CONV_STRIP; k++) {
        memcpy(sums + k * ROCQ__CONV_PANEL, first, sizeof first);
    }
}

static void rocq__conv_tile_at(const rocq__conv *a, rocq__conv_tile *t, int64_t number) {
    const int64_t i = number % a->t.n_x, j = number / a->t.n_x % a->t.n_y;
    const int64_t *ne = a->p->y->ne;
    t->x = ne[1] * i / a->t.n_x;
    t->y = ne[2] * j / a->t.n_y;
    t->w = ne[1] * (i + 1) / a->t.n_x - t->x;
    t->h = ne[2] * (j + 1) / a->t.n_y - t->y;
    t->frame = number / a->t.n_x / a->t.n_y;
    // The last strip is filled up with copies of the last position, whose sums are not used.
    t->n_strips = (t->w * t->h + ROCQ__CONV_STRIP - 1) / ROCQ__CONV_STRIP;
    for (int64_t k = 0; k < t->n_strips * ROCQ__CONV_STRIP; k++) {
        const int64_t o = ROCQ__MIN(k, t->w * t->h - 1);
        t->at[k] = a->s.stride * (o / t->h * a->s.c + o % t->h * a->t.pitch);
    }
}

static void rocq__conv_task(void *arg, int64_t item, int64_t item_end, int32_t thread) {
    const rocq__conv *a = (const rocq__conv *)arg;
    float *sums = a->local + thread * a->pitch, *norm = sums + 2 * a->t.sums;
    float *patch = norm + 3 * a->s.c;
    int64_t loaded = -1;
    rocq__conv_tile t;
    for (; item < item_end; item++) {
        const int64_t number = item / a->t.n_parts, part = item % a->t.n_parts;
        const int64_t end = a->t.n_panels * (part + 1) / a->t.n_parts;
        if (number != loaded) {
            rocq__conv_tile_at(a, &t, number);
            rocq__conv_load_patch(a, patch, norm, t.x * a->s.stride - a->s.pad_x,
                                  t.y * a->s.stride - a->s.pad_y, t.frame);
            loaded = number;
        }
        for (int64_t panel = a->t.n_panels * part / a->t.n_parts, n; panel < end; panel += n) {
            const int64_t m = panel * ROCQ__CONV_PANEL;
            n = a->avx512 && panel + 1 < end ? 2 : 1;
            for (int64_t i = 0; i < n; i++) {
                rocq__conv_begin(a, sums + i * a->t.sums, &t, m + i * ROCQ__CONV_PANEL);
            }
            rocq__conv_panels(a, &t, sums, a->weights + m * a->s.k, patch, n);
            for (int64_t i = 0; i < n; i++) {
                rocq__conv_finish(a, sums + i * a->t.sums, &t, m + i * ROCQ__CONV_PANEL);
            }
        }
    }
}

static void rocq__plan_conv_cpu(rocq__plan *plan, rocq_op op, const void *params) {
    rocq__conv *a = (rocq__conv *)rocq__plan_take(plan, sizeof *a);
    (void)op;
    a->p = (const rocq_conv_params *)params;
    a->s = rocq__conv_shape_of(a->p);
    a->t = rocq__conv_tiles_of(a->p->y, &a->s, plan->ctx->desc.n_threads);
    a->simd = plan->ctx->has_simd;
    a->avx512 = a->simd && plan->ctx->has_avx512;
    a->weights = (float *)(void *)plan->scratch;
    a->local = a->weights + a->t.n_panels * ROCQ__CONV_PANEL * a->s.k;
    a->pitch = (2 * a->t.sums + 3 * a->s.c + a->t.patch + 15) / 16 * 16;
    rocq__plan_stage(plan, rocq__conv_decode_task, a, a->t.n_panels,
                     rocq__plan_grain(plan, ROCQ__CONV_PANEL * a->s.k));
    rocq__plan_stage(plan, rocq__conv_task, a,
                     a->t.n_x * a->t.n_y * a->p->y->ne[3] * a->t.n_parts,
                     rocq__plan_grain(plan, a->t.w * a->t.h * a->s.k * a->s.m / a->t.n_parts));
}

// -- norm_stats --

// Of one group: n elements, their mean, and the sum of squared differences from it.
typedef struct rocq__moments_of {
    double n, mean, sum;
} rocq__moments_of;

// A frame of x is cut into bands of rows, and a row into chunks that fit L1. A chunk is read twice:
// for the means of its groups, then for the sums of squared differences from these means. Chunks,
// and then bands, are merged in their order. So the bits depend on the shape of x alone, not on
// threads, and neither a mean far from 0 nor an outlier costs digits.
typedef struct rocq__norm_stats {
    const rocq_norm_stats_params *p;
    bool simd;
    float eps;
    int64_t n_groups, group; // channels of a group
    int64_t n_bands;         // of a frame
    int64_t chunk;           // positions
    int64_t pitch;           // floats per thread
    rocq__moments_of *bands; // [n_groups, n_bands, N]
    float *local;            // per thread: [3, C], and a chunk of x decoded
} rocq__norm_stats;

enum { ROCQ__STATS_CHUNK = 64, ROCQ__STATS_FLOATS = 4096, ROCQ__STATS_BAND = 65536 };

static rocq__norm_stats rocq__norm_stats_of(const rocq_norm_stats_params *p) {
    rocq__norm_stats a;
    const int64_t floats = ROCQ__STATS_FLOATS, most = ROCQ__STATS_CHUNK, n = p->x->ne[0];
    memset(&a, 0, sizeof a);
    a.p = p;
    a.eps = p->eps > 0.0f ? p->eps : 1e-6f;
    a.n_groups = (p->stats ? p->stats : p->moments)->ne[1];
    a.group = n / a.n_groups;
    // At most 256 bands, of so many floats at least that merging takes no time.
    const int64_t rows = 1 + ROCQ__STATS_BAND / ROCQ__MAX(n * p->x->ne[1], 1);
    a.n_bands = ROCQ__MIN((p->x->ne[2] + rows - 1) / rows, 256);
    a.chunk = ROCQ__MIN(ROCQ__MAX(floats / n, 1), most);
    a.pitch = (3 * n + a.chunk * n + 15) / 16 * 16;
    return a;
}

static bool rocq__norm_stats_by_position(const rocq_norm_stats_params *p) {
    return p->stats && p->stats->ne[0] == 1;
}

static int64_t rocq__scratch_norm_stats_cpu(const rocq_ctx *ctx, const void *params) {
    const rocq_norm_stats_params *p = (const rocq_norm_stats_params *)params;
    const rocq__norm_stats a = rocq__norm_stats_of(p);
    int64_t bands, local;
    if (rocq__norm_stats_by_position(p)) return 0;
    if (!rocq__mul(a.n_bands * a.n_groups, p->x->ne[3], &bands) ||
        !rocq__mul(bands, (int64_t)sizeof *a.bands, &bands) ||
        !rocq__mul(a.pitch, ctx->desc.n_threads * (int64_t)sizeof(float), &local) ||
        !rocq__add(bands, local, &bands)) {
        return INT64_MAX;
    }
    return bands;
}

// The moments of two sets together (Chan, Golub, LeVeque 1979).
static rocq__moments_of rocq__moments_merge(rocq__moments_of a, rocq__moments_of b) {
    const double n = a.n + b.n, d = b.mean - a.mean;
    rocq__moments_of both;
    if (b.n == 0.0) return a;
    both.n = n;
    both.mean = a.mean + d * b.n / n;
    both.sum = a.sum + b.sum + d * d * a.n * b.n / n;
    return both;
}

// sum += x - mean, square += (x - mean)^2, channel by channel
static void rocq__add_squares_scalar(float *sum, float *square, const float *x, const float *mean,
                                     int64_t n) {
    for (int64_t c = 0; c < n; c++) {
        const float d = x[c] - mean[c];
        sum[c] += d;
        square[c] += d * d;
    }
}

#if ROCQ__HAS_V8
static ROCQ__SIMD void rocq__add_squares_simd(float *sum, float *square, const float *x,
                                              const float *mean, int64_t n) {
    int64_t c = 0;
    for (; c + 8 <= n; c += 8) {
        const rocq__v8 d = rocq__v8_sub(rocq__v8_load(x + c), rocq__v8_load(mean + c));
        rocq__v8_store(sum + c, rocq__v8_add(d, rocq__v8_load(sum + c)));
        rocq__v8_store(square + c, rocq__v8_fma(d, d, rocq__v8_load(square + c)));
    }
    ROCQ__END_SIMD();
    rocq__add_squares_scalar(sum + c, square + c, x + c, mean + c, n - c);
}
#endif

// Merges n positions from (i1, i2) of frame i3 on into the moments of each group.
static void rocq__norm_stats_chunk(const rocq__norm_stats *a, rocq__moments_of *moments,
                                   float *local, rocq__coord at, int64_t n) {
    const rocq_tensor *x = a->p->x;
    const int64_t n_c = x->ne[0];
    float *mean = local, *sum = local + n_c, *square = local + 2 * n_c, *buf = local + 3 * n_c;
    const float *row[ROCQ__STATS_CHUNK];
    memset(local, 0, 3 * (size_t)n_c * sizeof *local);
    for (int64_t i = 0; i < n; i++) {
        row[i] = rocq__load(a->simd, x->format, rocq__row(x, at.i1 + i, at.i2, at.i3), 0, n_c,
                            buf + i * n_c);
        ROCQ__EITHER(a->simd, rocq__add, (mean, row[i], n_c));
    }
    for (int64_t g = 0; g < n_c; g += a->group) {
        double all = 0.0;
        for (int64_t c = g; c < g + a->group; c++) all += (double)mean[c];
        for (int64_t c = g; c < g + a->group; c++) mean[c] = (float)(all / (double)(n * a->group));
    }
    for (int64_t i = 0; i < n; i++) {
        ROCQ__EITHER(a->simd, rocq__add_squares, (sum, square, row[i], mean, n_c));
    }
    for (int64_t g = 0; g < a->n_groups; g++) {
        const int64_t first = g * a->group;
        rocq__moments_of chunk = {(double)(n * a->group), (double)mean[first], 0.0};
        double rest = 0.0; // what rounding the mean has left
        for (int64_t c = first; c < first + a->group; c++) {
            rest += (double)sum[c];
            chunk.sum += (double)square[c];
        }
        chunk.mean += rest / chunk.n;
        chunk.sum = ROCQ__MAX(chunk.sum - rest * rest / chunk.n, 0.0);
        moments[g] = rocq__moments_merge(moments[g], chunk);
    }
}

static void rocq__norm_stats_band_task(void *arg, int64_t item, int64_t item_end, int32_t thread) {
    const rocq__norm_stats *a = (const rocq__norm_stats *)arg;
    const rocq_tensor *x = a->p->x;
    for (; item < item_end; item++) {
        const int64_t band = item % a->n_bands;
        const int64_t end = x->ne[2] * (band + 1) / a->n_bands;
        rocq__moments_of *moments = a->bands + item * a->n_groups;
        rocq__coord at = {0, x->ne[2] * band / a->n_bands, item / a->n_bands};
        memset(moments, 0, (size_t)a->n_groups * sizeof *moments);
        for (; at.i2 < end; at.i2++) {
            for (at.i1 = 0; at.i1 < x->ne[1]; at.i1 += a->chunk) {
                rocq__norm_stats_chunk(a, moments, a->local + thread * a->pitch, at,
                                       ROCQ__MIN(a->chunk, x->ne[1] - at.i1));
            }
        }
    }
}

static void rocq__norm_stats_group_task(void *arg, int64_t i, int64_t i_end, int32_t thread) {
    const rocq__norm_stats *a = (const rocq__norm_stats *)arg;
    const rocq_norm_stats_params *p = a->p;
    (void)thread;
    for (; i < i_end; i++) {
        const int64_t g = i % a->n_groups, n = i / a->n_groups;
        rocq__moments_of all = {0.0, 0.0, 0.0};
        for (int64_t band = 0; band < a->n_bands; band++) {
            all = rocq__moments_merge(all, a->bands[(n * a->n_bands + band) * a->n_groups + g]);
        }
        if (p->moments) {
            float *had = rocq__row_f32(p->moments, g, n, 0);
            if (!p->first) {
                const rocq__moments_of before = {(double)had[0], (double)had[1], (double)had[2]};
                all = rocq__moments_merge(before, all);
            }
            had[0] = (float)all.n;
            had[1] = (float)all.mean;
            had[2] = (float)all.sum;
        }
        if (p->stats) {
            float *stats = rocq__row_f32(p->stats, g, n, 0);
            stats[0] = (float)all.mean;
            stats[1] = (float)(1.0 / sqrt(all.sum / all.n + (double)a->eps));
        }
    }
}

static void rocq__norm_stats_position_task(void *arg, int64_t r, int64_t r_end, int32_t thread) {
    const rocq__norm_stats *a = (const rocq__norm_stats *)arg;
    const rocq_norm_stats_params *p = a->p;
    const int64_t n = p->x->ne[0];
    (void)thread;
    for (; r < r_end; r++) {
        const int64_t i1 = r % p->x->ne[1], i2 = r / p->x->ne[1] % p->x->ne[2];
        const int64_t i3 = r / p->x->ne[1] / p->x->ne[2];
        double moment[2] = {0.0, 0.0};
        float buf[ROCQ__STRIP];
        for (int64_t k = 0; k < n; k += ROCQ__STRIP) {
            const int64_t m = rocq__strip(n, k);
            const float *x =
                rocq__load(a->simd, p->x->format, rocq__row(p->x, i1, i2, i3), k, m, buf);
            rocq__moments(a->simd, x, 0.0f, m, moment);
        }
        *rocq__row_f32(p->stats, i1, i2, i3) =
            (float)(1.0 / sqrt(moment[1] / (double)n + (double)a->eps));
    }
}

static void rocq__plan_norm_stats_cpu(rocq__plan *plan, rocq_op op, const void *params) {
    const rocq_norm_stats_params *p = (const rocq_norm_stats_params *)params;
    rocq__norm_stats *a = (rocq__norm_stats *)rocq__plan_take(plan, sizeof *a);
    (void)op;
    *a = rocq__norm_stats_of(p);
    a->simd = plan->ctx->has_simd;
    if (rocq__norm_stats_by_position(p)) {
        rocq__plan_stage(plan, rocq__norm_stats_position_task, a, rocq__n_rows(p->x),
                         rocq__plan_grain(plan, p->x->ne[0]));
        return;
    }
    const int64_t n_bands = a->n_bands * p->x->ne[3];
    a->bands = (rocq__moments_of *)(void *)plan->scratch;
    a->local = (float *)(void *)(a->bands + n_bands * a->n_groups);
    rocq__plan_stage(plan, rocq__norm_stats_band_task, a, n_bands,
                     rocq__plan_grain(plan, rocq_tensor_count(p->x) / n_bands));
    rocq__plan_stage(plan, rocq__norm_stats_group_task, a, a->n_groups * p->x->ne[3],
                     rocq__plan_grain(plan, 16 * a->n_bands));
}

// -- resize --

typedef struct rocq__resize {
    const rocq_resize_params *p;
    bool simd;
} rocq__resize;

// The two positions of x that position o of y lies between, and how far from the first.
typedef struct rocq__between {
    int64_t first, second;
    float share;
} rocq__between;

static rocq__between rocq__resize_at(rocq_resize_mode mode, int64_t o, int64_t n_y, int64_t n_x) {
    rocq__between b = {o * n_x / n_y, o * n_x / n_y, 0.0f};
    if (mode == ROCQ_RESIZE_BILINEAR) {
        const double at =
            ROCQ__MAX(((double)o + 0.5) * (double)n_x / (double)n_y - 0.5, 0.0);
        b.first = ROCQ__MIN((int64_t)at, n_x - 1);
        b.second = ROCQ__MIN(b.first + 1, n_x - 1);
        b.share = (float)(at - (double)b.first);
    }
    return b;
}

static void rocq__resize_task(void *arg, int64_t r, int64_t r_end, int32_t thread) {
    const rocq__resize *a = (const rocq__resize *)arg;
    const rocq_resize_params *p = a->p;
    const rocq_tensor *x = p->x;
    (void)thread;
    for (; r < r_end; r++) {
        const rocq__coord o = rocq__coord_of(p->y, r);
        const rocq__between w = rocq__resize_at(p->mode, o.i1, p->y->ne[1], x->ne[1]);
        const rocq__between h = rocq__resize_at(p->mode, o.i2, p->y->ne[2], x->ne[2]);
        for (int64_t k = 0; k < x->ne[0]; k += ROCQ__STRIP) {
            const int64_t m = rocq__strip(x->ne[0], k);
            float buf[4][ROCQ__STRIP], out[ROCQ__STRIP];
            const float *from[4];
            for (int i = 0; i < 4; i++) {
                const unsigned char *row = rocq__row(x, i % 2 ? w.second : w.first,
                                                     i / 2 ? h.second : h.first, o.i3);
                from[i] = rocq__load(a->simd, x->format, row, k, m, buf[i]);
            }
            for (int64_t c = 0; c < m; c++) {
                const float upper = from[0][c] + (from[1][c] - from[0][c]) * w.share;
                const float lower = from[2][c] + (from[3][c] - from[2][c]) * w.share;
                out[c] = upper + (lower - upper) * h.share;
            }
            rocq__store(a->simd, p->y->format, rocq__row(p->y, o.i1, o.i2, o.i3), k,
                        p->mode == ROCQ_RESIZE_NEAREST ? from[0] : out, m);
        }
    }
}

static void rocq__plan_resize_cpu(rocq__plan *plan, rocq_op op, const void *params) {
    rocq__resize *a = (rocq__resize *)rocq__plan_take(plan, sizeof *a);
    (void)op;
    a->p = (const rocq_resize_params *)params;
    a->simd = plan->ctx->has_simd;
    rocq__plan_stage(plan, rocq__resize_task, a, rocq__n_rows(a->p->y),
                     rocq__plan_grain(plan, 4 * a->p->y->ne[0]));
}

// -- pixels --

// The sRGB curve of linear light (IEC 61966-2-1).
static float rocq__srgb(float x) {
    return x <= 0.0031308f ? 12.92f * x : 1.055f * powf(x, 1.0f / 2.4f) - 0.055f;
}

static void rocq__pixels_task(void *arg, int64_t r, int64_t r_end, int32_t thread) {
    const rocq_pixels_params *p = (const rocq_pixels_params *)arg;
    const float scale = p->scale != 0.0f ? p->scale : 1.0f;
    (void)thread;
    for (; r < r_end; r++) {
        const rocq__coord o = rocq__coord_of(p->y, r);
        unsigned char *y = rocq__row(p->y, o.i1, o.i2, o.i3);
        float x[4];
        rocq__dequantize_row(p->x->format, x, rocq__row(p->x, o.i1, o.i2, o.i3), p->x->ne[0]);
        for (int64_t c = 0; c < p->y->ne[0]; c++) {
            float v = 1.0f;
            if (c < 3 || p->x->ne[0] == 4) {
                v = x[p->x->ne[0] == 1 ? 0 : c] * scale + p->bias;
                v = !(v > 0.0f) ? 0.0f : v > 1.0f ? 1.0f : v;
                if (p->srgb && c < 3) v = rocq__srgb(v);
            }
            y[c] = (unsigned char)lrintf(255.0f * v);
        }
    }
}

static void rocq__plan_pixels_cpu(rocq__plan *plan, rocq_op op, const void *params) {
    rocq_pixels_params *p = (rocq_pixels_params *)rocq__plan_take(plan, sizeof *p);
    (void)op;
    *p = *(const rocq_pixels_params *)params;
    rocq__plan_stage(plan, rocq__pixels_task, p, rocq__n_rows(p->y), rocq__plan_grain(plan, 16));
}

// ---------------------------------------------------------------------------------------------
// >>hip_api: the GPU runtime, its kernels, and the device
// ---------------------------------------------------------------------------------------------
// ctx->gpu has all that a GPU context has and a CPU context has not. Every call of the runtime
// returns an error number, from which rocq__hip_failed makes a result code. Out of memory leaves
// the context usable. While a device is tried or a graph captured, an error ends that attempt only.
// Any other error means that submitted work can no longer be trusted: the context is lost.

// Figures that the host needs to choose a kernel and its grid, and to estimate how long it runs.
typedef struct rocq__chip {
    int32_t target;       // 0x1100 for gfx1100 and so on; 0 for NVIDIA and the CPU stand-in
    int32_t n_units;      // compute units (multiprocessors)
    double bytes_per_us;  // of memory
    double flops_per_us;  // of the vector unit in F32
    double matrix_per_us; // of the matrix unit in F16
    bool guessed;         // bytes_per_us is a guess: the runtime has none, or unlisted is set
    bool unlisted;        // a gfx11 target that rocq__chips does not have
} rocq__chip;

enum {
    ROCQ__PIECES = 4,        // of the context's ring
    ROCQ__PIECE = 1 << 20,   // bytes: long enough that the copy engine runs at full speed
    ROCQ__COUNTERS = 65536,  // zeroed words: by them a kernel finds out which block is the last
    ROCQ__MAX_DEVICES = 64
};

// A ring buffer of pinned host memory that every copy passes through: the runtime never sees the
// caller's pages, which may be mapped from a file. Copies use one piece after the other. The event
// of a piece is recorded after its last copy and the kernels that read what was copied; when it has
// completed, the piece may be reused. The context has one ring, whose copies are in its stream;
// rocq_gguf_load makes a larger one for as long as it runs.
typedef struct rocq__ring {
    unsigned char *memory;  // n_pieces of piece_bytes; NULL before the first copy
    bool registered;        // memory is the allocator's, pinned afterwards; else the runtime's
    int64_t piece_bytes;    // a multiple of ROCQ__LINE
    int32_t n_pieces;
    int32_t piece;          // the one being filled
    int64_t used;           // bytes of it
    void *stream;           // where copies are submitted
    void *event[ROCQ__MAX_PIECES];
    bool pending[ROCQ__MAX_PIECES]; // the event is recorded and has not been waited for
    rocq__block *staging; // rocq_gguf_load: as much device memory, to repack blocks from
} rocq__ring;

// A runtime that was loaded from a library: its functions, and two that only the search calls.
typedef struct rocq__runtime {
    rocq_hip hip;
    int (*init)(unsigned flags);
    int (*version)(int *version);
} rocq__runtime;

typedef struct rocq__gpu {
    const rocq_hip *hip;
    rocq__runtime loaded;  // hip points in here if the runtime was loaded from a library
    char runtime[256];     // its name or path (the end, if that is longer), or "linked"
    char kernels[256];     // path (its end, if that is longer), "memory" or "linked"
    const void *image;     // code object; NULL where the kernels are linked
    void *image_memory;    // the block that image is in if it was read from a file, else NULL
    int32_t device;
    char name[64], pci[32];
    int64_t device_bytes;
    rocq__chip chip;
    void *module;
    void *function[ROCQ_K_COUNT];
    int64_t launches[ROCQ_K_COUNT]; // of each kernel, without replays; for tests
    bool *planned;         // [ROCQ_K_COUNT] or NULL: a plan marks the kernels that it would launch
    void *stream;          // the only queue: a second one would cost power even when idle
    uint32_t *status;      // [1], set by kernels that meet an index out of range
    uint32_t *counters;    // [ROCQ__COUNTERS]
    uint32_t *pinned;      // [64] host memory that status and self-test results are copied to
    rocq__ring ring;
    rocq__block *scratch;
    int64_t scratch_moves; // how often scratch has changed its address
    bool trial;            // an error ends an attempt, not the context
    bool lost;             // only rocq_close works
    char replay[320];      // how the last graph replay that failed its check differed, or ""
    rocq_priority priority; // of stream
    int32_t n_units;       // of the device; chip.n_units counts those that stream may use
    int32_t max_waves;     // of a matvec on a SIMD
    uint32_t matvec_lds;   // bytes that each block of a matvec reserves but does not use, so that
                           // fewer blocks fit: see rocq__limit_waves
    char ignored[400];     // rocq_info.ignored: settings for sharing that had no effect
} rocq__gpu;

static rocq_result rocq__hip_failed(rocq_ctx *ctx, const char *what, int error) {
    rocq__gpu *gpu = ctx->gpu;
    const char *name = gpu->hip->error_name ? gpu->hip->error_name(error) : NULL;
    if (!name) name = "error";
    if (error == ROCQ_HIP_OUT_OF_MEMORY) {
        return rocq__fail(ctx, ROCQ_E_MEMORY, "%s: no memory on the GPU (%s)", what, name);
    }
    if (gpu->trial) return rocq__fail(ctx, ROCQ_E_DEVICE, "%s: %s (%d)", what, name, error);
    gpu->lost = true;
    return rocq__fail(ctx, ROCQ_E_LOST, "%s: %s (%d); the GPU is lost, close the context", what,
                      name, error);
}

// Returns from the function that this stands in if a runtime call fails.
#define ROCQ__TRY_HIP(what, call)                                                     \
    do {                                                                              \
        const int rocq__error = (call);                                               \
        if (rocq__error != 0) return rocq__hip_failed(ctx, what, rocq__error);        \
    } while (0)

// Every public call that reaches the device begins here. The runtime keeps the current device per
// thread, and the caller may have changed it.
static rocq_result rocq__hip_enter(rocq_ctx *ctx, const char *op) {
    if (ctx->gpu->lost) {
        return rocq__fail(ctx, ROCQ_E_LOST, "%s: the GPU was lost earlier; close the context", op);
    }
    ROCQ__TRY_HIP(op, ctx->gpu->hip->set_device(ctx->gpu->device));
    return ROCQ_OK;
}

// -- the runtime --

#if ROCQ__HAS_HIP

// Only a program that is linked with rocq_kernels.hip has the function rocq_hip_linked. On ELF a
// weak reference finds out; elsewhere (Windows) the program says so with ROCQ_LINKED.
#if defined(ROCQ_LINKED)
#define ROCQ__HIP_LINKED() rocq_hip_linked()
#elif defined(__ELF__) && (defined(__GNUC__) || defined(__clang__))
#pragma weak rocq_hip_linked
#define ROCQ__HIP_LINKED() (rocq_hip_linked ? rocq_hip_linked() : NULL)
#else
#define ROCQ__HIP_LINKED() ((const rocq_hip *)NULL)
#endif

// Copies a string. If it is too long its beginning is left out: the end of a path tells most.
static void rocq__copy_end(char *to, size_t size, const char *from) {
    const size_t length = strlen(from), kept = ROCQ__MIN(length, size - 1);
    memcpy(to, from + length - kept, kept + 1);
}

typedef struct rocq__hip_symbol {
    const char *name;
    size_t offset; // of the pointer in the table that is filled
    bool required;
} rocq__hip_symbol;

static const rocq__hip_symbol rocq__hip_symbols[] = {
#define ROCQ__NEED_REQUIRED true
#define ROCQ__NEED_MODULE true
#define ROCQ__NEED_OPTIONAL false
#define ROCQ_X(need, field, symbol, parameters) \
    {"hip" #symbol, offsetof(rocq__runtime, hip) + offsetof(rocq_hip, field), ROCQ__NEED_##need},
    ROCQ_HIP_FUNCTIONS(ROCQ_X)
#undef ROCQ_X
    {"hipGetErrorName", offsetof(rocq__runtime, hip) + offsetof(rocq_hip, error_name), false},
    {"hipInit", offsetof(rocq__runtime, init), true},
    {"hipRuntimeGetVersion", offsetof(rocq__runtime, version), true}
};
#undef ROCQ__NEED_REQUIRED
#undef ROCQ__NEED_MODULE
#undef ROCQ__NEED_OPTIONAL

#if defined(_WIN32)
typedef HMODULE rocq__library;
#else
typedef void *rocq__library;
#endif

enum {
    ROCQ__LOADED,  // only if the process has loaded it already
    ROCQ__BY_NAME, // wherever the system looks for libraries; on Windows not in the working
                   // directory or PATH, where others may have put a file of that name
    ROCQ__BY_PATH  // this file; on Windows, libraries that it needs are also looked for beside it
};

#if defined(_WIN32)
// Whether the file exists; for a bare name, beside the program or in the folder that drivers use.
static bool rocq__library_there(const wchar_t *name, int how) {
    wchar_t path[2048];
    const DWORD room = 1024, length = (DWORD)wcslen(name);
    if (how == ROCQ__BY_PATH) return GetFileAttributesW(name) != INVALID_FILE_ATTRIBUTES;
    for (int i = 0; i < 2; i++) {
        DWORD end = i == 0 ? GetModuleFileNameW(NULL, path, room) : GetSystemDirectoryW(path, room);
        if (i == 1 && end < room) path[end++] = L'\\';
        if (end >= room || length >= room) continue;
        while (end > 0 && path[end - 1] != L'\\') end--;
        memcpy(path + end, name, (length + 1) * sizeof *path);
        if (GetFileAttributesW(path) != INVALID_FILE_ATTRIBUTES) return true;
    }
    return false;
}
#endif

// Opens a library, or returns NULL. Then why has the system's reason, "" if there is no such file.
static rocq__library rocq__library_open(const char *name, int how, char *why, size_t size) {
    why[0] = '\0';
#if defined(_WIN32)
    wchar_t wide[1024];
    HMODULE library = NULL;
    const DWORD flags = LOAD_LIBRARY_SEARCH_DEFAULT_DIRS |
                        (how == ROCQ__BY_PATH ? LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR : 0);
    if (!MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, name, -1, wide, 1024)) {
        snprintf(why, size, "not UTF-8, or too long");
        return NULL;
    }
    if (how == ROCQ__LOADED) return GetModuleHandleExW(0, wide, &library) ? library : NULL;
    library = LoadLibraryExW(wide, NULL, flags);
    if (library) return library;
    // ERROR_MOD_NOT_FOUND also means that this library exists but one that it depends on does not.
    const DWORD error = GetLastError();
    if (error != ERROR_MOD_NOT_FOUND) {
        snprintf(why, size, "error %lu of Windows", (unsigned long)error);
    } else if (rocq__library_there(wide, how)) {
        snprintf(why, size, "a library that it needs is not found");
    }
    return NULL;
#else
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL | (how == ROCQ__LOADED ? RTLD_NOLOAD : 0));
    if (library || how == ROCQ__LOADED) return library;
    // dlerror's text begins with the file at fault: with this very name if it was not found.
    const size_t length = strlen(name);
    const char *reason = dlerror();
    if (!reason) reason = "no reason given";
    const bool prefixed =
        strncmp(reason, name, length) == 0 && strncmp(reason + length, ": ", 2) == 0;
    const bool absent = how == ROCQ__BY_PATH ? access(name, F_OK) != 0 : prefixed;
    if (!absent) snprintf(why, size, "%s", prefixed ? reason + length + 2 : reason);
    return NULL;
#endif
}

static void rocq__library_close(rocq__library library) {
#if defined(_WIN32)
    FreeLibrary(library);
#else
    dlclose(library);
#endif
}

// Fills table with the addresses of symbols. Returns a required one that is missing, or NULL.
static const char *rocq__library_symbols(rocq__library library, const rocq__hip_symbol *symbols,
                                         size_t n_symbols, void *table) {
    for (size_t k = 0; k < n_symbols; k++) {
#if defined(_WIN32)
        const FARPROC address = GetProcAddress(library, symbols[k].name);
#else
        void *address = dlsym(library, symbols[k].name);
#endif
        if (!address && symbols[k].required) return symbols[k].name;
        memcpy((char *)table + symbols[k].offset, &address, sizeof address);
    }
    return NULL;
}

// Adds an entry "NAME: REASON" to rocq_info.runtimes_tried and logs it. A long name loses its
// beginning. The list never ends within an entry: instead of one that does not fit it has "...".
ROCQ__PRINTF(4, 5)
static void rocq__hip_tried(rocq_ctx *ctx, rocq_log_level level, const char *name,
                            const char *format, ...) {
    static const char more[] = "; ...";
    char entry[sizeof ctx->error];
    const size_t used = strlen(ctx->tried);
    va_list args;
    rocq__copy_end(entry, sizeof entry / 2, name);
    const size_t length = strlen(entry);
    memcpy(entry + length, ": ", 2);
    va_start(args, format);
    vsnprintf(entry + length + 2, sizeof entry - length - 2, format, args);
    va_end(args);
    rocq__log(ctx, level, "HIP runtime: %s", entry);
    if (ctx->tried_cut) return;
    ctx->tried_cut = used + 2 + strlen(entry) + sizeof more > sizeof ctx->tried;
    snprintf(ctx->tried + used, sizeof ctx->tried - used, "%s%s",
             used && !ctx->tried_cut ? "; " : "", ctx->tried_cut ? more : entry);
}

// HIP encodes a version as major 10^7 + minor 10^5 + patch. ROCQ__HIP_OLDEST is the first to load
// code objects of version 5, which examples/build-kernels makes.
enum { ROCQ__HIP_OLDEST = 50700000, ROCQ__HIP_NO_DEVICE = 100 };

// Tries one library as the runtime. *there tells whether it exists, taken or not.
static rocq_result rocq__hip_try(rocq_ctx *ctx, rocq__gpu *gpu, const char *name, int how,
                                 bool *there) {
    char why[256];
    const rocq__library library = rocq__library_open(name, how, why, sizeof why);
    *there = library || why[0];
    if (!library) {
        if (why[0]) rocq__hip_tried(ctx, ROCQ_LOG_WARN, name, "%s", why);
        return ROCQ_E_NO_RUNTIME;
    }
    const char *missing = rocq__library_symbols(
        library, rocq__hip_symbols, sizeof rocq__hip_symbols / sizeof rocq__hip_symbols[0],
        &gpu->loaded);
    if (missing) {
        rocq__library_close(library);
        rocq__hip_tried(ctx, ROCQ_LOG_WARN, name, "has no %s", missing);
        return ROCQ_E_NO_RUNTIME;
    }
    // From its first call on, a runtime may have threads that run its code and destructors that its
    // threads will call, so that it cannot be unloaded safely: it stays, used or not. hipInit comes
    // first: any other first call initialises as well, but AMD's hipRuntimeGetVersion drops the
    // error of that, and a later hipInit no longer reports it.
    int version = 0;
    const int error = gpu->loaded.init(0);
    const int no_version = gpu->loaded.version(&version);
    if (no_version == 0 && version < ROCQ__HIP_OLDEST) {
        rocq__hip_tried(ctx, ROCQ_LOG_WARN, name, "is HIP %d.%d, the oldest that works is %d.%d",
                        version / 10000000, version / 100000 % 100, ROCQ__HIP_OLDEST / 10000000,
                        ROCQ__HIP_OLDEST / 100000 % 100);
        return ROCQ_E_NO_RUNTIME;
    }
    if (error != 0 || no_version != 0) {
        const int code = error ? error : no_version;
        const char *text = gpu->loaded.hip.error_name ? gpu->loaded.hip.error_name(code) : NULL;
        rocq__hip_tried(ctx, ROCQ_LOG_WARN, name, "%s: %s (%d)",
                        error ? "hipInit" : "hipRuntimeGetVersion", text ? text : "error", code);
        return error == ROCQ__HIP_NO_DEVICE ? ROCQ_E_NO_DEVICE : ROCQ_E_NO_RUNTIME;
    }
    rocq__log(ctx, ROCQ_LOG_INFO, "HIP runtime: %s: HIP %d.%d, taken", name, version / 10000000,
              version / 100000 % 100);
    rocq__copy_end(gpu->runtime, sizeof gpu->runtime, name);
    gpu->hip = &gpu->loaded.hip;
    return ROCQ_OK;
}

static bool rocq__path_absolute(const char *path) {
#if defined(_WIN32)
    const char letter = (char)(path[0] | 32);
    const bool drive = letter >= 'a' && letter <= 'z' && path[1] == ':';
    const char *root = drive ? path + 2 : path;
    return (root[0] == '/' || root[0] == '\\') && (drive || root[1] == '/' || root[1] == '\\');
#else
    return path[0] == '/';
#endif
}

// Looks for a runtime that works, in the order that >>contexts tells. In each place newer versions
// are tried first, and last the name without a version, which may be any. Nothing is kept between
// calls: contexts in several threads may search at once, and a later rocq_open searches anew.
static rocq_result rocq__hip_load(rocq_ctx *ctx, rocq__gpu *gpu) {
#if defined(_WIN32)
    static const char *const names[] = {"amdhip64_7.dll", "amdhip64_6.dll", "amdhip64.dll"};
    static const char below[] = "\\bin", slash = '\\';
#else
    static const char *const names[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5",
                                        "libamdhip64.so"};
    static const char below[] = "/lib", slash = '/';
#endif
    const struct {
        int how;
        const char *folder; // of an installation, may be NULL; else the place's name in messages
    } places[] = {
        {ROCQ__LOADED, "already loaded"},
        {ROCQ__BY_NAME, "system's libraries"},
        {ROCQ__BY_PATH, ctx->desc.rocm_path},
        {ROCQ__BY_PATH, ctx->desc.hip_path},
#if !defined(_WIN32)
        {ROCQ__BY_PATH, "/opt/rocm"},
#endif
    };
    rocq_result result = ROCQ_E_NO_RUNTIME;
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        const int how = places[i].how;
        const char *folder = places[i].folder;
        bool any = false;
        if (!folder || !folder[0]) continue;
        if (how == ROCQ__BY_PATH && !rocq__path_absolute(folder)) {
            rocq__hip_tried(ctx, ROCQ_LOG_WARN, folder, "not an absolute path");
            continue;
        }
        char path[1024]; // longer ones are not tried
        for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
            bool there;
            const int length =
                how == ROCQ__BY_PATH
                    ? snprintf(path, sizeof path, "%s%s%c%s", folder, below, slash, names[k])
                    : snprintf(path, sizeof path, "%s", names[k]);
            if (length < 0 || length >= (int)sizeof path) continue;
#if defined(_WIN32)
            for (char *p = path; *p; p++) *p = *p == '/' ? '\\' : *p; // as LoadLibraryEx wants it
#endif
            const rocq_result tried = rocq__hip_try(ctx, gpu, path, how, &there);
            if (tried == ROCQ_OK) return ROCQ_OK;
            if (tried == ROCQ_E_NO_DEVICE) result = tried;
            any |= there;
        }
        if (!any) {
            snprintf(path, sizeof path, "%.1000s%s", folder, how == ROCQ__BY_PATH ? below : "");
            rocq__hip_tried(ctx, ROCQ_LOG_INFO, path, "none");
        }
    }
    // As many whole entries as the error message has room for.
    size_t length = strlen(ctx->tried);
    const size_t room = sizeof ctx->error - 64;
    const bool cut = length > room;
    if (cut) {
        for (length = room; length > 0 && strncmp(ctx->tried + length, "; ", 2) != 0;) length--;
    }
    return rocq__fail(ctx, result, "%s: %.*s%s",
                      result == ROCQ_E_NO_DEVICE ? "no GPU" : "no HIP runtime that works",
                      (int)length, ctx->tried, cut ? "; ..." : "");
}

// Takes the runtime and the kernels that are linked, unless they were compiled with another rocq.h.
static rocq_result rocq__hip_linked(rocq_ctx *ctx, rocq__gpu *gpu, const rocq_hip *linked) {
    if (linked->version != ROCQ_VERSION || linked->n_stubs != ROCQ_K_COUNT) {
        return rocq__fail(
            ctx, ROCQ_E_NO_KERNELS,
            "rocq_kernels.hip is version %d with %d kernels, rocq.h version %d with %d",
            linked->version, linked->n_stubs, (int)ROCQ_VERSION, (int)ROCQ_K_COUNT);
    }
    if (gpu->image && !linked->module_load) {
        return rocq__fail(ctx, ROCQ_E_NO_KERNELS,
                          "%s: this program only runs the kernels linked into it", gpu->kernels);
    }
    gpu->hip = linked;
    snprintf(gpu->runtime, sizeof gpu->runtime, "linked");
    return ROCQ_OK;
}

// -- the kernels --

static uint64_t rocq__read_u64(const unsigned char *p) {
    uint64_t v = 0;
    for (int i = 7; i >= 0; i--) v = v << 8 | p[i];
    return v;
}

// The runtime gets an image's address without a size and trusts the offsets in its headers. So this
// checks first that they stay within size, for a code object (ELF), a bundle, or a compressed one.
static bool rocq__image_whole(const unsigned char *p, int64_t size) {
    static const char bundle[] = "__CLANG_OFFLOAD_BUNDLE__";
    const uint64_t n = (uint64_t)size;
    if (size < 64) return false;
    if (memcmp(p, "\177ELF\2\1", 6) == 0) {
        const uint64_t at = rocq__read_u64(p + 40),
                       n_sections = rocq__read_u64(p + 56) >> 32 & 0xffff;
        if (at > n || n_sections > (n - at) / 64) return false;
        for (uint64_t i = 0; i < n_sections; i++) {
            const unsigned char *section = p + at + 64 * i;
            const uint64_t offset = rocq__read_u64(section + 24),
                           bytes = rocq__read_u64(section + 32);
            const bool in_file = (rocq__read_u64(section) >> 32) != 8; // SHT_NOBITS
            if (in_file && (offset > n || bytes > n - offset)) return false;
        }
        return true;
    }
    if (memcmp(p, bundle, 24) == 0) {
        uint64_t at = 32;
        for (uint64_t i = rocq__read_u64(p + 24); i > 0; i--) {
            if (n - at < 24) return false;
            const uint64_t offset = rocq__read_u64(p + at), bytes = rocq__read_u64(p + at + 8);
            const uint64_t label = rocq__read_u64(p + at + 16);
            if (offset > n || bytes > n - offset || label > n - at - 24) return false;
            at += 24 + label;
        }
        return true;
    }
    if (memcmp(p, "CCOB", 4) == 0) { // its size has 4 bytes in version 2, 8 in 3, none in 1
        const int version = p[4] | p[5] << 8;
        const uint64_t bytes = rocq__read_u64(p + 8);
        return version == 1 || (version == 2 ? (bytes & 0xffffffffu) : bytes) <= n;
    }
    return false;
}

// Reads a code object. It stays until rocq_close: the runtime may read a module's image any time.
static rocq_result rocq__image_read(rocq_ctx *ctx, rocq__gpu *gpu, const char *path,
                                    const void **image, int64_t *size) {
#if ROCQ__HAS_STDIO
    rocq_result result = ROCQ_E_NO_KERNELS;
    unsigned char *data = NULL;
    long length = -1;
    FILE *stream = rocq__fopen(ctx, path, ROCQ__READ);
    if (stream && fseek(stream, 0, SEEK_END) == 0) length = ftell(stream);
    if (length > 0 && fseek(stream, 0, SEEK_SET) == 0) {
        data = (unsigned char *)rocq__alloc_aligned(ctx, length, 4096);
        if (!data) result = ROCQ_E_MEMORY;
        else if (fread(data, 1, (size_t)length, stream) == (size_t)length) result = ROCQ_OK;
    }
    if (stream) fclose(stream);
    if (result == ROCQ_OK) {
        *image = gpu->image_memory = data;
        *size = length;
        return ROCQ_OK;
    }
    rocq__free(ctx, data);
    return rocq__fail(ctx, result, "cannot read the GPU kernels in '%s'", path);
#else
    (void)gpu;
    (void)image;
    (void)size;
    return rocq__fail(ctx, ROCQ_E_NO_KERNELS, "'%s': this program was built with ROCQ_NO_STDIO",
                      path);
#endif
}

// Whether there are kernels: the desc's go before linked ones, those before ROCQ_KERNELS_PATH.
static bool rocq__has_kernels(const rocq_ctx *ctx, const rocq_hip *linked) {
    bool built_in = linked && linked->stubs;
#if defined(ROCQ_KERNELS_PATH)
    built_in = true;
#endif
    return built_in || ctx->desc.kernels_path || ctx->desc.kernels_data;
}

static rocq_result rocq__hip_kernels(rocq_ctx *ctx, rocq__gpu *gpu, const rocq_hip *linked) {
    const char *path = ctx->desc.kernels_path;
    const void *image = ctx->desc.kernels_data;
    int64_t size = ctx->desc.kernels_size;
    if (!path && !image && linked && linked->stubs) {
        snprintf(gpu->kernels, sizeof gpu->kernels, "linked");
        return ROCQ_OK;
    }
#if defined(ROCQ_KERNELS_PATH)
    if (!path && !image) path = ROCQ_KERNELS_PATH;
#endif
    // A copy: the caller's string may be freed before the context.
    rocq__copy_end(gpu->kernels, sizeof gpu->kernels, path ? path : "memory");
    if (path) ROCQ__TRY(rocq__image_read(ctx, gpu, path, &image, &size));
    if (!rocq__image_whole((const unsigned char *)image, size)) {
        return rocq__fail(ctx, ROCQ_E_NO_KERNELS, "%s: not a whole code object (%lld bytes)",
                          gpu->kernels, (long long)size);
    }
    gpu->image = image;
    return ROCQ_OK;
}

#endif // ROCQ__HAS_HIP

// A kernel's name, the size of its args, and the most threads a block of it has.
typedef struct rocq__kernel {
    const char *name;
    int32_t args_size, threads;
} rocq__kernel;

static const rocq__kernel rocq__kernels[ROCQ_K_COUNT] = {
#define ROCQ_X(name, args, threads) {"rocq_k_" #name, (int32_t)sizeof(args), threads},
    ROCQ_KERNELS(ROCQ_X)
#undef ROCQ_X
};

static bool rocq__is_matvec(int kernel) {
    switch (kernel) {
#define ROCQ_X(name, args, threads) case ROCQ_K_##name:
        ROCQ_K_MATVECS(ROCQ_X)
#undef ROCQ_X
        return true;
    default: return false;
    }
}

// Submits one launch of the whole grid and returns HIP's error number.
static int rocq__hip_launch(rocq__gpu *gpu, int kernel, uint32_t grid_x, uint32_t grid_z,
                            uint32_t threads, void *args) {
    const uint32_t lds = rocq__is_matvec(kernel) ? gpu->matvec_lds : 0;
    if (!gpu->image) {
        return gpu->hip->launch(gpu->hip->stubs[kernel], grid_x, grid_z, threads, lds, args,
                                gpu->stream);
    }
    void *list[1];
    list[0] = args;
    return gpu->hip->module_launch(gpu->function[kernel], grid_x, 1, grid_z, threads, 1, 1, lds,
                                   gpu->stream, list, NULL);
}

// -- the device --

// A workgroup stays on one WGP: two CUs of two SIMDs each, or with cu_mode on one of its CUs. A
// SIMD has slots for 16 waves and a file of VGPRs that is handed out in 64ths of it, a wave of 64
// lanes taking two of each register that one of 32 takes (RDNA3.5 ISA, 3.3.2.1). LDS is handed out
// in blocks of 1024 bytes, and a CU has barriers for 16 workgroups; one of a single wave needs
// none. SGPRs and scratch limit nothing.
enum {
    ROCQ__SIMD_WAVES = 16,
    ROCQ__FILE_GRANULES = 64,
    ROCQ__CU_SIMDS = 2,
    ROCQ__CU_BARRIERS = 16,
    ROCQ__CU_LDS = 65536, // bytes, and the most a workgroup may have
    ROCQ__LDS_GRANULE = 1024
};

// What the fastest chip of a target has. HIP's memory clock is not that of the data, so the rate of
// memory stands here. HIP counts RDNA's compute units in pairs unless told otherwise, so its number
// is doubled, but not beyond max_units. Rates per unit are AMD's: 256 flops a clock on the vector
// unit (without dual issue), 512 on the matrix unit. Sources: AMD's specifications of the products
// that bench/targets.py names; AMD's ROCm compatibility matrix and the target list of AMD's TheRock
// for which product is which target; register files as LLVM has them, with which
// tests/test_occupancy.c compares. gfx1152 is the Radeon 860M of a Ryzen AI 7 350 (and the 840M),
// gfx1153 the 820M of a Ryzen AI 5 330.
typedef struct rocq__chip_facts {
    int32_t target, max_units;
    double bytes_per_us;
    int32_t vgprs; // of a SIMD, for waves of 32 lanes
} rocq__chip_facts;
static const rocq__chip_facts rocq__chips[] = {
    {0x1100, 96, 960e3, 1536}, {0x1101, 60, 624e3, 1536}, {0x1102, 32, 288e3, 1024},
    {0x1103, 12, 102.4e3, 1024}, {0x1150, 16, 120e3, 1024}, {0x1151, 40, 256e3, 1536},
    {0x1152, 8, 128e3, 1024}, {0x1153, 2, 128e3, 1024},
};

static int32_t rocq__target_of(const rocq_ctx *ctx) {
    return rocq__on_gpu(ctx) ? ctx->gpu->chip.target : 0;
}

#if ROCQ__HAS_HIP || ROCQ__HAS_OCCUPANCY
static const rocq__chip_facts *rocq__chip_find(int32_t target) { // NULL: another chip
    for (size_t i = 0; i < sizeof rocq__chips / sizeof rocq__chips[0]; i++) {
        if (rocq__chips[i].target == target) return &rocq__chips[i];
    }
    return NULL;
}
#endif

#if ROCQ__HAS_HIP

static int rocq__hip_attribute(const rocq__gpu *gpu, int attribute, int device) {
    int value = 0;
    return gpu->hip->device_attribute(&value, attribute, device) == 0 && value > 0 ? value : 0;
}

static void rocq__chip_init(rocq__gpu *gpu, int32_t target) {
    const int units = rocq__hip_attribute(gpu, ROCQ_HIP_UNITS, gpu->device);
    double mhz = rocq__hip_attribute(gpu, ROCQ_HIP_CLOCK_KHZ, gpu->device) * 1e-3;
    rocq__chip *chip = &gpu->chip;
    if (mhz <= 0.0) mhz = 1000.0;
    chip->target = target;
    chip->n_units = ROCQ__MAX(units, 1);
    chip->bytes_per_us = 2.0 * rocq__hip_attribute(gpu, ROCQ_HIP_MEMORY_KHZ, gpu->device) * 1e-3 *
                         rocq__hip_attribute(gpu, ROCQ_HIP_MEMORY_BITS, gpu->device) / 8.0;
    chip->guessed = chip->bytes_per_us <= 0.0;
    if (chip->guessed) chip->bytes_per_us = 50e3;
    const rocq__chip_facts *facts = rocq__chip_find(target);
    if (facts) {
        chip->n_units = ROCQ__MIN(2 * chip->n_units, facts->max_units);
        chip->bytes_per_us = facts->bytes_per_us;
        chip->guessed = false;
    }
    chip->unlisted = target != 0 && !facts;
    if (chip->unlisted) chip->guessed = true;
    chip->flops_per_us = 256.0 * mhz * chip->n_units;
    chip->matrix_per_us = 2.0 * chip->flops_per_us;
}

// Checks what the self-test kernel has found. It explains the sums (rocq_kernels.hip, >>entry).
static rocq_result rocq__selftest_check(rocq_ctx *ctx, const uint32_t *out) {
    uint32_t sizes = 0, squares = 0, dots = 0, products = 0;
#define ROCQ_X(name, args, threads) sizes += (uint32_t)sizeof(args);
    ROCQ_KERNELS(ROCQ_X)
#undef ROCQ_X
    for (int lane = 0; lane < ROCQ_K_WAVE; lane++) {
        squares += (uint32_t)((lane + 1) * (lane + 1));
        dots += (uint32_t)(1 * 3 + -1 * -5 + -128 * 7 + 127 * -9 + lane);
    }
    for (int m = 0; m < 16; m++) {
        for (int n = 0; n < 16; n++) {
            int c = 0;
            for (int k = 0; k < 16; k++) c += ((3 * m + 5 * k) % 7 - 3) * ((2 * n + 3 * k) % 5 - 2);
            products += (uint32_t)((16 * m + n + 1) * c);
        }
    }
    if (out[2] != (uint32_t)ROCQ_VERSION) {
        return rocq__fail(ctx, ROCQ_E_NO_KERNELS, "kernels of version %lu, rocq.h is version %lu",
                          (unsigned long)out[2], (unsigned long)ROCQ_VERSION);
    }
    if (out[3] != sizes) {
        return rocq__fail(ctx, ROCQ_E_NO_KERNELS,
                          "kernels of another rocq.h: their args structs have %lu bytes, here %lu",
                          (unsigned long)out[3], (unsigned long)sizes);
    }
    const struct {
        const char *what;
        uint32_t found, expected;
    } facts[] = {
        {"lanes of a wave", out[1], ROCQ_K_WAVE}, {"sum over a wave", out[4], squares},
        {"integer dot products", out[5], dots},   {"F16 matrix products", out[6], products},
        {"int8 matrix products", out[7], products},
    };
    for (size_t i = 0; i < sizeof facts / sizeof facts[0]; i++) {
        if (facts[i].found == facts[i].expected) continue;
        return rocq__fail(ctx, ROCQ_E_NO_DEVICE, "self-test failed: %s: %lu, expected %lu",
                          facts[i].what, (unsigned long)facts[i].found,
                          (unsigned long)facts[i].expected);
    }
    return ROCQ_OK;
}

#endif // ROCQ__HAS_HIP

// ---------------------------------------------------------------------------------------------
// >>hip_memory: device memory, scratch, copies
// ---------------------------------------------------------------------------------------------
// All work of a context runs in order on its one stream. So a copy needs no event to wait for the
// op before it, and an op may be given the scratch memory that the op before it still uses.

static rocq_result rocq__device_alloc(rocq_ctx *ctx, const char *what, int64_t size,
                                      rocq_memory memory, rocq__block **out) {
    const rocq_hip *hip = ctx->gpu->hip;
    void *data = rocq__alloc(ctx, 0), *address = NULL;
    if (!data) return rocq__fail(ctx, ROCQ_E_MEMORY, "%s: no host memory", what);
    int error = ROCQ_HIP_OUT_OF_MEMORY;
    if ((uint64_t)size <= SIZE_MAX) {
        error = memory == ROCQ_MEMORY_PINNED ? hip->host_alloc(&address, (size_t)size, 0)
                                             : hip->mem_alloc(&address, (size_t)size);
    }
    if (error != 0) {
        rocq__free(ctx, data);
        return rocq__hip_failed(ctx, what, error);
    }
    rocq__block *block = rocq__block_before(data);
    block->address = address;
    block->size = size;
    block->memory = memory;
    ctx->stats.live_bytes += size;
    ctx->stats.peak_bytes = ROCQ__MAX(ctx->stats.peak_bytes, ctx->stats.live_bytes);
    *out = block;
    return ROCQ_OK;
}

// The caller has waited for the work that uses the block.
static void rocq__device_free(rocq_ctx *ctx, rocq__block *block) {
    if (!block) return;
    if (block->memory == ROCQ_MEMORY_PINNED) ctx->gpu->hip->host_free(block->address);
    else ctx->gpu->hip->mem_free(block->address);
    rocq__free(ctx, block + 1);
}

// Waits for all submitted work, unless the device is lost: then waiting would only fail.
static rocq_result rocq__hip_idle(rocq_ctx *ctx, const char *op) {
    rocq__gpu *gpu = ctx->gpu;
    if (gpu->lost) return ROCQ_OK;
    ROCQ__TRY(rocq__hip_enter(ctx, op));
    ROCQ__TRY_HIP(op, gpu->hip->stream_wait(gpu->stream));
    return ROCQ_OK;
}

// As rocq__reserve_cpu, but waits for the work that uses the old block. Graphs that were captured
// with its address see by scratch_moves that they must be captured again before they are launched.
static rocq_result rocq__reserve_hip(rocq_ctx *ctx, int64_t bytes) {
    rocq__gpu *gpu = ctx->gpu;
    const int64_t old = gpu->scratch ? gpu->scratch->size : 0;
    if (bytes <= old) return ROCQ_OK;
    ROCQ__TRY(rocq__take_budget(ctx, bytes - old));
    if (gpu->scratch) {
        const int error = gpu->hip->stream_wait(gpu->stream);
        if (error != 0) {
            ctx->budget_used -= bytes - old;
            return rocq__hip_failed(ctx, "scratch", error);
        }
        rocq__device_free(ctx, gpu->scratch);
        gpu->scratch = NULL;
        gpu->scratch_moves++;
    }
    const rocq_result result =
        rocq__device_alloc(ctx, "scratch", bytes, ROCQ_MEMORY_DEVICE, &gpu->scratch);
    if (result != ROCQ_OK) ctx->budget_used -= bytes;
    ctx->stats.scratch_bytes = result == ROCQ_OK ? bytes : 0;
    return result;
}

static rocq_result rocq__scratch_hip(rocq_ctx *ctx, int64_t bytes, void **out) {
    *out = NULL;
    if (bytes == 0) return ROCQ_OK;
    ROCQ__TRY(rocq__reserve_hip(ctx, bytes));
    ctx->stats.scratch_peak = ROCQ__MAX(ctx->stats.scratch_peak, bytes);
    *out = ctx->gpu->scratch->address;
    return ROCQ_OK;
}

static rocq_result rocq__fill_hip(rocq_ctx *ctx, void *dst, int byte, int64_t size) {
    ROCQ__TRY_HIP("fill", ctx->gpu->hip->fill(dst, byte, (size_t)size, ctx->gpu->stream));
    return ROCQ_OK;
}

// -- the ring --

// Takes the ring's pinned memory. A runtime allocates it page by page, on one thread; pages that
// all threads touched before it only has to pin. For 28 MiB (a load) that saves 3 ms of 11 (H200).
static rocq_result rocq__ring_memory(rocq_ctx *ctx, rocq__ring *ring, int64_t size) {
    const rocq_hip *hip = ctx->gpu->hip;
    void *memory = NULL;
    if (hip->host_register && hip->host_unregister) {
        memory = rocq__alloc_aligned(ctx, size, ROCQ__PAGE);
    }
    if (memory) {
        rocq__pages pages = {(unsigned char *)memory, size, true};
        rocq__parallel(ctx, (size + ROCQ__PAGE - 1) / ROCQ__PAGE, 64, rocq__touch_task, &pages);
        ring->registered = hip->host_register(memory, (size_t)size, 0) == 0;
        if (!ring->registered) rocq__free(ctx, memory);
    }
    if (!ring->registered) {
        ROCQ__TRY_HIP("pinned memory", hip->host_alloc(&memory, (size_t)size, 0));
        ctx->stats.n_allocs++;
        ctx->stats.live_bytes += size;
        ctx->stats.peak_bytes = ROCQ__MAX(ctx->stats.peak_bytes, ctx->stats.live_bytes);
    }
    ring->memory = (unsigned char *)memory;
    return ROCQ_OK;
}

static rocq_result rocq__ring_init(rocq_ctx *ctx, rocq__ring *ring, int64_t piece_bytes,
                                   int32_t n_pieces) {
    const rocq_hip *hip = ctx->gpu->hip;
    if (ring->memory) return ROCQ_OK;
    ring->piece_bytes = piece_bytes;
    ring->n_pieces = n_pieces;
    if (!ring->stream) ring->stream = ctx->gpu->stream;
    for (int32_t i = 0; i < n_pieces; i++) {
        if (ring->event[i]) continue;
        ROCQ__TRY_HIP("event", hip->event_create(&ring->event[i], ROCQ_HIP_NO_TIMING));
    }
    return rocq__ring_memory(ctx, ring, n_pieces * piece_bytes);
}

// Waits for the copies, and for the kernels that read staging. A second call does nothing.
static void rocq__ring_free(rocq_ctx *ctx, rocq__ring *ring) {
    const rocq_hip *hip = ctx->gpu->hip;
    const bool own_stream = ring->stream && ring->stream != ctx->gpu->stream;
    if (own_stream) {
        hip->stream_wait(ring->stream);
        hip->stream_destroy(ring->stream);
    }
    if (ring->memory) hip->stream_wait(ctx->gpu->stream);
    for (int32_t i = 0; i < ring->n_pieces; i++) {
        if (ring->event[i]) hip->event_destroy(ring->event[i]);
    }
    if (ring->registered) {
        hip->host_unregister(ring->memory);
        rocq__free(ctx, ring->memory);
    } else if (ring->memory) {
        hip->host_free(ring->memory);
        ctx->stats.live_bytes -= ring->n_pieces * ring->piece_bytes;
    }
    if (ring->staging) ctx->budget_used -= ring->staging->size;
    rocq__device_free(ctx, ring->staging);
    memset(ring, 0, sizeof *ring);
}

// Records the piece's event behind all work in the context's stream.
static rocq_result rocq__ring_mark(rocq_ctx *ctx, rocq__ring *ring, int32_t piece) {
    ROCQ__TRY_HIP("event", ctx->gpu->hip->event_record(ring->event[piece], ctx->gpu->stream));
    ring->pending[piece] = true;
    return ROCQ_OK;
}

static rocq_result rocq__ring_wait(rocq_ctx *ctx, rocq__ring *ring, int32_t piece) {
    if (!ring->pending[piece]) return ROCQ_OK;
    ROCQ__TRY_HIP("copy", ctx->gpu->hip->event_wait(ring->event[piece]));
    ring->pending[piece] = false;
    return ROCQ_OK;
}

// Gives size bytes of the ring, at most a piece, that no copy uses any more. If they begin the next
// piece, the one before it is marked. A caller who has not submitted the last copy of that piece
// yet passes unsent: then *unsent is set instead, and the caller marks the piece after the copy.
static rocq_result rocq__ring_take(rocq_ctx *ctx, rocq__ring *ring, int64_t size, bool *unsent,
                                   unsigned char **out) {
    if (ring->used + size > ring->piece_bytes) {
        if (unsent) *unsent = true;
        else ROCQ__TRY(rocq__ring_mark(ctx, ring, ring->piece));
        ring->piece = (ring->piece + 1) % ring->n_pieces;
        ring->used = 0;
        ROCQ__TRY(rocq__ring_wait(ctx, ring, ring->piece));
    }
    *out = ring->memory + ring->piece * ring->piece_bytes + ring->used;
    ring->used += (size + ROCQ__LINE - 1) / ROCQ__LINE * ROCQ__LINE;
    return ROCQ_OK;
}

static void *rocq__device_data(const rocq_tensor *t) {
    if (!t) return NULL;
    return (void *)(uintptr_t)(t->buffer.device.address + (uint64_t)t->offset);
}

// -- uploads: read into the ring, copied to the device, repacked there --
// An upload is a list of entries (tensors), sorted by their offsets in the source. It is cut into
// stretches, ranges of the source that fit a piece of the ring. A stretch may hold many entries, so
// that small tensors cost no more than their bytes, or a portion of one. While the threads read a
// stretch, the calling thread first submits the one before it.

static rocq_result rocq__repack_hip(rocq_ctx *ctx, const rocq_tensor *dst, void *raw,
                                    int64_t unit0, int64_t n_units);

typedef struct rocq__stretch {
    int64_t start, end;    // in the source
    int64_t entry, at;      // it begins with byte `at` of this entry
    int64_t bytes;         // without the gaps between entries; 0: there is no stretch
    unsigned char *memory; // start in the ring, at the same offset from a multiple of ROCQ__LINE
    int32_t piece;
    bool last;             // the last stretch in its piece, which it must mark
} rocq__stretch;

typedef struct rocq__upload {
    rocq_ctx *ctx;
    rocq__ring *ring;
    const rocq__entry *entries;
    int64_t n_entries;
    rocq__stretch unsent; // read into the ring but not yet submitted
    rocq_result result;   // of the last submission
} rocq__upload;

// An entry may be cut at multiples of so many bytes: a planar tensor is repacked by whole blocks.
static int64_t rocq__entry_grain(const rocq__entry *p) {
    int64_t elems, bytes;
    rocq__block_of(p->t.format, &elems, &bytes);
    return p->t.layout == ROCQ_LAYOUT_PLANAR ? bytes : 1;
}

// The next stretch, which begins with byte *at of entry *entry; moves both to where it ends.
static rocq__stretch rocq__stretch_next(const rocq__upload *u, int64_t *entry, int64_t *at) {
    rocq__stretch s;
    int64_t most = 0; // where in the source a piece that holds the stretch would end
    memset(&s, 0, sizeof s);
    for (; *entry < u->n_entries; (*entry)++, *at = 0) {
        const rocq__entry *p = &u->entries[*entry];
        const int64_t begin = p->offset + *at, left = p->size - *at;
        if (left == 0) continue;
        if (s.bytes == 0) {
            s.start = s.end = begin;
            s.entry = *entry;
            s.at = *at;
            most = begin / ROCQ__LINE * ROCQ__LINE + u->ring->piece_bytes;
        }
        if (begin - s.end > ROCQ__GAP || begin >= most) break;
        const int64_t grain = rocq__entry_grain(p);
        const int64_t n = left <= most - begin ? left : (most - begin) / grain * grain;
        if (n == 0) break;
        s.end = begin + n;
        s.bytes += n;
        *at += n;
        if (n < left) break;
    }
    return s;
}

// Submits the copies of u->unsent and the repacking after them. What becomes planar goes to staging
// memory, in one copy from the first to the last byte of it; other tensors go to their place.
static rocq_result rocq__stretch_send(rocq__upload *u) {
    rocq_ctx *ctx = u->ctx;
    rocq__gpu *gpu = ctx->gpu;
    const rocq_hip *hip = gpu->hip;
    rocq__ring *ring = u->ring;
    const rocq__stretch *s = &u->unsent;
    const bool overlapped = ring->stream != gpu->stream;
    int64_t first = s->end, last = s->start; // the range that goes to staging memory
    for (int64_t k = s->entry, at = s->at; k < u->n_entries; k++, at = 0) {
        const rocq__entry *p = &u->entries[k];
        const int64_t begin = p->offset + at, n = ROCQ__MIN(p->size - at, s->end - begin);
        if (begin >= s->end) break;
        if (n > 0 && p->t.layout == ROCQ_LAYOUT_PLANAR) {
            first = ROCQ__MIN(first, begin);
            last = begin + n;
        } else if (n > 0) {
            ROCQ__TRY_HIP("upload", hip->copy((char *)rocq__device_data(&p->t) + at,
                                              s->memory + (begin - s->start), (size_t)n,
                                              ROCQ_HIP_TO_DEVICE, ring->stream));
        }
    }
    unsigned char *staging = NULL; // where s->start would be in staging memory
    if (first < last) {
        staging = ring->staging
                      ? (unsigned char *)ring->staging->address + (s->memory - ring->memory)
                      : (unsigned char *)gpu->scratch->address + s->start % ROCQ__LINE;
        ROCQ__TRY_HIP("upload",
                      hip->copy(staging + (first - s->start), s->memory + (first - s->start),
                                (size_t)(last - first), ROCQ_HIP_TO_DEVICE, ring->stream));
    }
    if (overlapped) { // what the context's stream gets from here on runs after the copies
        ROCQ__TRY_HIP("upload", hip->event_record(ring->event[s->piece], ring->stream));
        ROCQ__TRY_HIP("upload", hip->stream_wait_event(gpu->stream, ring->event[s->piece], 0));
    }
    for (int64_t k = s->entry, at = s->at; staging && k < u->n_entries; k++, at = 0) {
        const rocq__entry *p = &u->entries[k];
        const int64_t begin = p->offset + at, n = ROCQ__MIN(p->size - at, s->end - begin);
        int64_t elems, bytes;
        if (begin >= s->end) break;
        if (n <= 0 || p->t.layout != ROCQ_LAYOUT_PLANAR) continue;
        rocq__block_of(p->t.format, &elems, &bytes);
        ROCQ__TRY(rocq__repack_hip(ctx, &p->t, staging + (begin - s->start),
                                   at / bytes * (elems / 32), n / bytes * (elems / 32)));
    }
    return overlapped || s->last ? rocq__ring_mark(ctx, ring, s->piece) : ROCQ_OK;
}

static void rocq__upload_send(void *arg) {
    rocq__upload *u = (rocq__upload *)arg;
    if (u->unsent.bytes > 0) u->result = rocq__stretch_send(u);
    u->unsent.bytes = 0;
}

// Returns when all is submitted. load, which may be NULL, is told of all stretches but the last.
static rocq_result rocq__upload_entries(rocq_ctx *ctx, rocq__ring *ring,
                                        const rocq__source *source, const rocq__entry *entries,
                                        int64_t n_entries, rocq__loading *load) {
    rocq__upload u;
    int64_t entry = 0, at = 0;
    memset(&u, 0, sizeof u);
    u.ctx = ctx;
    u.ring = ring;
    u.entries = entries;
    u.n_entries = n_entries;
    for (;;) {
        rocq__stretch next = rocq__stretch_next(&u, &entry, &at);
        if (next.bytes == 0) break;
        const int64_t size = next.end - next.start, skew = next.start % ROCQ__LINE;
        const int64_t unsent = u.unsent.bytes;
        ROCQ__TRY(rocq__ring_take(ctx, ring, skew + size, unsent > 0 ? &u.unsent.last : NULL,
                                  &next.memory));
        next.memory += skew;
        next.piece = ring->piece;
        const bool ok = rocq__source_read(ctx, source, next.start, size, next.memory,
                                          rocq__upload_send, &u);
        ROCQ__TRY(u.result);
        if (!ok) return rocq__read_failed(ctx, entries[next.entry].name, next.start, size);
        u.unsent = next;
        if (load && unsent > 0) ROCQ__TRY(rocq__load_step(load, unsent));
    }
    rocq__upload_send(&u);
    return u.result;
}

// Uploads one tensor through the context's ring; if it is planar, scratch is the staging memory.
static rocq_result rocq__upload_hip(rocq_ctx *ctx, const rocq__source *source,
                                    const rocq__entry *entry) {
    rocq__ring *ring = &ctx->gpu->ring;
    void *staging;
    ROCQ__TRY(rocq__ring_init(ctx, ring, ROCQ__PIECE, ROCQ__PIECES));
    if (entry->t.layout == ROCQ_LAYOUT_PLANAR) {
        const int64_t most = ROCQ__PIECE, size = entry->size + ROCQ__LINE;
        ROCQ__TRY(rocq__scratch_hip(ctx, ROCQ__MIN(most, size), &staging));
    }
    return rocq__upload_entries(ctx, ring, source, entry, 1, NULL);
}

static rocq_result rocq__upload_memory(rocq_ctx *ctx, const rocq_tensor *dst, const void *src,
                                       int64_t size) {
    rocq__source source;
    rocq__entry entry;
    memset(&source, 0, sizeof source);
    memset(&entry, 0, sizeof entry);
    source.data = (const unsigned char *)src;
    entry.t = *dst;
    entry.size = size;
    return rocq__upload_hip(ctx, &source, &entry);
}

// Makes the ring of a load. Its copies have a stream of their own, so that the context's stream
// repacks meanwhile, unless the runtime's streams cannot wait for each other.
static rocq_result rocq__load_ring(rocq__loading *load, const rocq__entry *entries,
                                   int64_t n_entries, rocq__ring *ring) {
    rocq_ctx *ctx = load->ctx;
    const rocq_hip *hip = ctx->gpu->hip;
    const int32_t n_pieces = load->desc.n_pieces;
    int64_t piece_bytes = 0, k = 0;
    rocq__round_up(load->desc.piece_bytes, ROCQ__LINE, &piece_bytes);
    if (hip->stream_wait_event) {
        ROCQ__TRY_HIP("stream", hip->stream_create(&ring->stream, ROCQ_HIP_NON_BLOCKING));
    }
    ROCQ__TRY(rocq__ring_init(ctx, ring, piece_bytes, n_pieces));
    while (k < n_entries && entries[k].t.layout != ROCQ_LAYOUT_PLANAR) k++;
    if (k == n_entries) return ROCQ_OK;
    const int64_t size = n_pieces * piece_bytes;
    ROCQ__TRY(rocq__take_budget(ctx, size));
    const rocq_result result =
        rocq__device_alloc(ctx, "gguf_load", size, ROCQ_MEMORY_DEVICE, &ring->staging);
    if (result != ROCQ_OK) ctx->budget_used -= size;
    return result;
}

static rocq_result rocq__load_hip(rocq__loading *load, const rocq__source *source,
                                  const rocq__entry *entries, int64_t n_entries) {
    rocq_ctx *ctx = load->ctx;
    rocq__gpu *gpu = ctx->gpu;
    rocq__ring ring;
    memset(&ring, 0, sizeof ring);
    rocq_result result = rocq__load_ring(load, entries, n_entries, &ring);
    if (result == ROCQ_OK) {
        result = rocq__upload_entries(ctx, &ring, source, entries, n_entries, load);
    }
    if (result == ROCQ_OK) {
        const int error = gpu->hip->stream_wait(gpu->stream);
        if (error != 0) result = rocq__hip_failed(ctx, "gguf_load", error);
    }
    rocq__ring_free(ctx, &ring);
    return result == ROCQ_OK ? rocq__load_step(load, load->total - load->done) : result;
}

// Copies size bytes of device memory to the host and waits for them, three pieces in flight.
static rocq_result rocq__download_hip(rocq_ctx *ctx, void *dst, const void *src, int64_t size) {
    rocq__gpu *gpu = ctx->gpu;
    struct {
        const unsigned char *from;
        int32_t piece;
    } flight[ROCQ__PIECES - 1];
    rocq__ring *ring = &gpu->ring;
    const int64_t most = ROCQ__PIECE, in_flight = ROCQ__PIECES - 1;
    const int64_t n = (size + most - 1) / most;
    ROCQ__TRY(rocq__ring_init(ctx, ring, ROCQ__PIECE, ROCQ__PIECES));
    for (int64_t i = 0; i < n + in_flight - 1; i++) {
        const int64_t k =
            i - (in_flight - 1); // the piece to take out while those after it are copied
        if (i < n) {
            unsigned char *piece;
            const int64_t bytes = ROCQ__MIN(most, size - i * most);
            const void *from = (const char *)src + i * most;
            ROCQ__TRY(rocq__ring_take(ctx, ring, bytes, NULL, &piece));
            ROCQ__TRY_HIP("download", gpu->hip->copy(piece, from, (size_t)bytes, ROCQ_HIP_TO_HOST,
                                                     gpu->stream));
            ROCQ__TRY(rocq__ring_mark(ctx, ring, ring->piece));
            flight[i % in_flight].from = piece;
            flight[i % in_flight].piece = ring->piece;
        }
        if (k >= 0) {
            const int64_t bytes = ROCQ__MIN(most, size - k * most);
            ROCQ__TRY(rocq__ring_wait(ctx, ring, flight[k % in_flight].piece));
            memcpy((char *)dst + k * most, flight[k % in_flight].from, (size_t)bytes);
        }
    }
    return ROCQ_OK;
}

// ---------------------------------------------------------------------------------------------
// >>hip_launch: from params to launches
// ---------------------------------------------------------------------------------------------
// Every op has one body, rocq__job_NAME. rocq__plan_hip runs it to learn whether the GPU can do the
// op and with how much scratch memory; rocq__run_hip runs it again, with that memory, to launch.

// -- launch core --

// What an op moves and computes. Flops on the matrix unit are among the flops.
typedef struct rocq__cost {
    double bytes, flops, matrix;
} rocq__cost;

static rocq__cost rocq__cost_of(const rocq_ctx *ctx, rocq_op op, const void *params);

static const rocq__chip *rocq__chip_of(const rocq_ctx *ctx) {
    return &ctx->gpu->chip;
}

// A kernel over grid_x by grid_z blocks. args is the kernel's args struct, which begins with
// rocq_k_common. Where the estimate is over the time cap, grid_x is cut into launches of equal
// size, each still large enough to fill the chip; the estimate assumes half of each peak rate.
static rocq_result rocq__launch(rocq_ctx *ctx, int kernel, int64_t grid_x, int64_t grid_z,
                                int threads, void *args, rocq__cost cost) {
    rocq__gpu *gpu = ctx->gpu;
    rocq_k_common *common = (rocq_k_common *)args;
    if (grid_x <= 0 || grid_z <= 0) return ROCQ_OK;
    const int64_t most = ROCQ__MIN((int64_t)INT32_MAX, (int64_t)UINT32_MAX / threads);
    int64_t step = grid_x;
    if (ctx->desc.dispatch_us > 0) {
        const double work = (cost.flops - cost.matrix) / gpu->chip.flops_per_us +
                            cost.matrix / gpu->chip.matrix_per_us;
        const double us = 2.0 * ROCQ__MAX(cost.bytes / gpu->chip.bytes_per_us, work);
        const double launches = ceil(us / ctx->desc.dispatch_us);
        const int64_t full = (2 * (int64_t)gpu->chip.n_units + grid_z - 1) / grid_z;
        if (launches > 1.0) step = (int64_t)ceil((double)grid_x / launches);
        step = ROCQ__MIN(ROCQ__MAX(step, full), grid_x);
    }
    step = ROCQ__MIN(step, most);
    common->status = gpu->status;
    for (int64_t x = 0; x < grid_x; x += step) {
        const int64_t n = ROCQ__MIN(step, grid_x - x);
        common->block0 = (uint32_t)x;
        ROCQ__TRY_HIP(
            rocq__kernels[kernel].name,
            rocq__hip_launch(gpu, kernel, (uint32_t)n, (uint32_t)grid_z, (uint32_t)threads, args));
        gpu->launches[kernel]++;
        ctx->stats.n_launches++;
    }
    return ROCQ_OK;
}

// A tensor as kernels take it. Its sizes have been checked to fit; without a tensor data is NULL.
static rocq_k_tensor rocq__k_tensor(const rocq_tensor *t) {
    rocq_k_tensor k;
    int64_t elems, bytes;
    memset(&k, 0, sizeof k);
    if (!t) return k;
    rocq__block_of(t->format, &elems, &bytes);
    k.data = rocq__device_data(t);
    for (int d = 0; d < 4; d++) k.ne[d] = (int32_t)t->ne[d];
    for (int d = 1; d < 4; d++) k.stride[d - 1] = t->stride[d] / elems * bytes;
    k.format = (int32_t)t->format;
    k.layout = (int32_t)t->layout;
    return k;
}

// Gives n words that are 0. The kernel must leave them 0: all launches use the same ones.
static rocq_result rocq__counters_hip(rocq_ctx *ctx, int64_t n, uint32_t **out) {
    if (n > ROCQ__COUNTERS) {
        return rocq__fail(ctx, ROCQ_E_UNSUPPORTED, "%lld counters, there are %d", (long long)n,
                          (int)ROCQ__COUNTERS);
    }
    *out = ctx->gpu->counters;
    return ROCQ_OK;
}

// Repacks n_units units of raw blocks, which become the units unit0 and up of planar dst.
static rocq_result rocq__repack_hip(rocq_ctx *ctx, const rocq_tensor *dst, void *raw,
                                    int64_t unit0, int64_t n_units) {
    rocq_k_repack_args a;
    const rocq__cost cost = {2.0 * (double)rocq__bytes(dst->format, 32 * n_units), 0.0, 0.0};
    memset(&a, 0, sizeof a);
    a.src.data = raw;
    a.src.ne[0] = (int32_t)(32 * n_units);
    a.src.ne[1] = a.src.ne[2] = a.src.ne[3] = 1;
    for (int d = 0; d < 3; d++) a.src.stride[d] = rocq__bytes(dst->format, 32 * n_units);
    a.src.format = (int32_t)dst->format;
    a.src.layout = (int32_t)ROCQ_LAYOUT_GGUF;
    a.dst = rocq__device_data(dst);
    a.unit0 = unit0;
    a.n_units = rocq_tensor_count(dst) / 32;
    return rocq__launch(ctx, ROCQ_K_repack, (n_units + 255) / 256, 1, 256, &a, cost);
}

// -- choices --
// A matvec, a grid of tiles and an attention can be launched in several ways. An op's body
// describes what it launches as a site and asks rocq__config_for, which applies the rule of the
// site's kind, unless rocq_tune has found something faster for the site's class.

enum { ROCQ__KIND_MATVEC, ROCQ__KIND_TILES, ROCQ__KIND_ATTENTION, ROCQ__KINDS };

// All that a rule looks at besides the chip. Each kind uses some of the fields; the
// others are 0, so that memcmp compares sites.
typedef struct rocq__site {
    int32_t kind;
    int32_t format, format2; // of w, -1 if there are several; attention: of k and of v
    int32_t int8;            // matvec: integer products
    int32_t pair;            // matvec: with w2
    int32_t m, k, n;         // attention: columns of a KV head, head size, positions
    int32_t batch;           // tiles: matrices; attention: KV heads of all sequences
    int32_t row_bytes;       // matvec: weights of a row, with those of w2
} rocq__site;

// The sites that a plan meets, one of each class.
enum { ROCQ__SURVEY = 32 }; // a chain of 16 products, each with a w2 of another format
typedef struct rocq__survey {
    rocq__site site[ROCQ__SURVEY];
    rocq_launch_config config; // of the first site
    int32_t n;
} rocq__survey;

static rocq_launch_config rocq__config_for(rocq_ctx *ctx, const rocq__site *site);

static int32_t rocq__clamp32(int64_t n) {
    return (int32_t)ROCQ__MIN(n, (int64_t)INT32_MAX);
}

// -- ops, in the order of ROCQ_OPS --

// One run of an op's body. A plan has no address for scratch memory and launches nothing; all else
// is the same, so it is never wrong. After the first failure the rest of the body has no effect.
typedef struct rocq__job {
    rocq_ctx *ctx;
    rocq_op op;
    const char *name;   // of the op
    bool planning;
    uintptr_t scratch;  // device address, 256-byte aligned; 0 while planning
    int64_t used, most; // bytes of it in use, and the most so far
    rocq_result result;
    rocq__cost cost;    // of the next launch, for the time cap; products and attention, which
                        // launch parts of themselves, set it; else it is that of the op
} rocq__job;

// The cost of an op that a job launches; nobody asks for it while planning or without a time cap.
static rocq__cost rocq__job_cost(const rocq__job *job, rocq_op op, const void *params) {
    const rocq__cost none = {0.0, 0.0, 0.0};
    if (job->planning || job->ctx->desc.dispatch_us <= 0) return none;
    return rocq__cost_of(job->ctx, op, params);
}

// The cost of an op whose launches are alike. matmul and attention set it themselves.
static void rocq__job_begin(rocq__job *job, const void *params) {
    if (job->op == ROCQ_OP_MATMUL || job->op == ROCQ_OP_ATTENTION) return;
    job->cost = rocq__job_cost(job, job->op, params);
}

// The one place that checks whether a grid is too large. Launches without a job have few blocks.
static void rocq__job_launch(rocq__job *job, int kernel, int64_t grid_x, int64_t grid_z,
                             int threads, void *args) {
    if (job->result != ROCQ_OK) return;
    if (grid_x > INT32_MAX || grid_z > 65535) {
        job->result = rocq__fail(job->ctx, ROCQ_E_UNSUPPORTED, "%s: a grid of %lld x %lld blocks",
                                 job->name, (long long)grid_x, (long long)grid_z);
    } else if (job->planning) {
        if (job->ctx->gpu->planned && grid_x > 0) job->ctx->gpu->planned[kernel] = true;
    } else {
        job->result = rocq__launch(job->ctx, kernel, grid_x, grid_z, threads, args, job->cost);
    }
}

// A tensor in scratch memory, rows pitch elements apart.
static rocq_tensor rocq__job_tensor(rocq__job *job, rocq_format format, rocq_layout layout,
                                    const int64_t ne[4], int64_t pitch) {
    int64_t end = 0;
    rocq_tensor t;
    memset(&t, 0, sizeof t);
    t.format = format;
    t.layout = layout;
    t.n_dims = 4;
    t.stride[0] = 1;
    t.stride[1] = pitch;
    bool fits = true;
    for (int d = 0; d < 4; d++) {
        t.ne[d] = ne[d];
        if (d > 1) fits = fits && rocq__mul(t.stride[d - 1], ne[d - 1], &t.stride[d]);
    }
    fits = fits && rocq__mul(t.stride[3], ne[3], &end) && end < INT64_MAX / 64; // sums fit, too
    if (job->result != ROCQ_OK) return t;
    if (!fits) {
        job->result =
            rocq__fail(job->ctx, ROCQ_E_OVERFLOW, "%s: scratch memory overflows", job->name);
        return t;
    }
    t.buffer.size = rocq__bytes(format, end);
    t.buffer.device.address = (uint64_t)job->scratch + (uint64_t)job->used;
    job->used = (job->used + t.buffer.size + 255) / 256 * 256;
    job->most = ROCQ__MAX(job->most, job->used);
    return t;
}

// Kernels count the elements of a row, and some beyond its end, in 32 bits.
enum { ROCQ__ROW_ELEMS = 1 << 30 };

static void rocq__job_row(rocq__job *job, int64_t ne0) {
    if (job->result != ROCQ_OK || ne0 <= ROCQ__ROW_ELEMS) return;
    job->result = rocq__fail(job->ctx, ROCQ_E_UNSUPPORTED, "%s: rows of %lld elements, over %d",
                             job->name, (long long)ne0, (int)ROCQ__ROW_ELEMS);
}

static bool rocq__is_plain(rocq_format format) {
    return format == ROCQ_F32 || format == ROCQ_F16 || format == ROCQ_BF16;
}

// How many blocks of 256 threads a kernel needs that gives each thread `piece` of the row_size
// elements or bytes of a row of t. The kernel counts these pieces in 32 bits.
static int64_t rocq__item_blocks(rocq__job *job, const rocq_tensor *t, int64_t row_size,
                                 int64_t piece) {
    int64_t n;
    if (!rocq__mul(rocq__n_rows(t), (row_size + piece - 1) / piece, &n) || n > UINT32_MAX - 256) {
        if (job->result == ROCQ_OK) {
            job->result = rocq__fail(job->ctx, ROCQ_E_UNSUPPORTED,
                                     "%s: too many elements for one launch", job->name);
        }
        return 0;
    }
    return (n + 255) / 256;
}

// Threads of a block that works on one row: one for four elements, from a wave up to 256.
static int rocq__row_threads(int64_t ne0) {
    int threads = ROCQ_K_WAVE;
    while (threads < ROCQ_K_ROW_THREADS && 4 * threads < ne0) threads *= 2;
    return threads;
}

static void rocq__job_map_launch(rocq__job *job, rocq_op op, const void *params) {
    const rocq__map map = rocq__map_of(op, params);
    const rocq_tensor *y = map.y, *a = map.a, *b = map.b;
    rocq_k_map_args args;
    memset(&args, 0, sizeof args);
    args.y = rocq__k_tensor(y);
    args.a = rocq__k_tensor(a);
    args.b = rocq__k_tensor(b);
    args.op = (int32_t)op;
    args.activation = (int32_t)map.activation;
    args.scale = map.scale;
    args.bias = map.bias;
    const bool copy = op == ROCQ_OP_CAST && y->format == a->format; // of bytes
    rocq__job_row(job, y->ne[0]);
    const int64_t blocks = copy ? rocq__item_blocks(job, y, rocq__bytes(y->format, y->ne[0]), 16)
                                : rocq__item_blocks(job, y, y->ne[0], 4);
    rocq__job_launch(job, ROCQ_K_map, blocks, 1, 256, &args);
}

// y = x, both of formats that the map kernel reads and writes.
static void rocq__job_cast_map(rocq__job *job, const rocq_tensor *y, const rocq_tensor *x) {
    const rocq_cast_params cast = {y, x};
    rocq__job_map_launch(job, ROCQ_OP_CAST, &cast);
}

static void rocq__job_decode(rocq__job *job, const rocq_tensor *y, const rocq_tensor *x,
                             const rocq_tensor *ids, float scale) {
    rocq_k_decode_args args;
    memset(&args, 0, sizeof args);
    args.y = rocq__k_tensor(y);
    args.x = rocq__k_tensor(x);
    args.ids = (const int32_t *)rocq__device_data(ids);
    args.scale = scale;
    rocq__job_row(job, y->ne[0]);
    rocq__job_launch(job, ROCQ_K_decode, rocq__item_blocks(job, y, y->ne[0], 4), 1, 256, &args);
}

static void rocq__job_repack(rocq__job *job, const rocq_tensor *planar, const rocq_tensor *x) {
    rocq_k_repack_args args;
    memset(&args, 0, sizeof args);
    args.src = rocq__k_tensor(x);
    args.dst = rocq__device_data(planar);
    args.n_units = rocq_tensor_count(x) / 32;
    rocq__job_launch(job, ROCQ_K_repack, rocq__item_blocks(job, x, x->ne[0], 32), 1, 256, &args);
}

// y = x in y's format and layout: copied, repacked, decoded, encoded, or decoded and then encoded.
static void rocq__job_convert(rocq__job *job, const rocq_tensor *y, const rocq_tensor *x) {
    const rocq_cast_params cast = {y, x};
    const rocq__cost cost = job->cost;
    const bool planar_y = y->layout == ROCQ_LAYOUT_PLANAR,
               planar_x = x->layout == ROCQ_LAYOUT_PLANAR;
    const bool encodes = rocq__is_plain(y->format) || y->format == ROCQ_Q8_0 ||
                         (y->format == ROCQ_Q4_0 && !planar_y);
    if (job->result != ROCQ_OK) return;
    job->cost = rocq__job_cost(job, ROCQ_OP_CAST, &cast);
    if (y->format == x->format && planar_y == planar_x) {
        rocq__job_cast_map(job, y, x);
    } else if (y->format == x->format && planar_y) {
        rocq__job_repack(job, y, x);
    } else if (!encodes || (y->format == x->format && planar_x)) {
        job->result =
            rocq__fail(job->ctx, ROCQ_E_UNSUPPORTED, "%s: no GPU kernel makes %s%s from %s%s",
                       job->name, planar_y ? "planar " : "", rocq_format_name(y->format),
                       planar_x ? "planar " : "", rocq_format_name(x->format));
    } else if (rocq__is_plain(x->format)) {
        rocq__job_cast_map(job, y, x);
    } else if (rocq__is_plain(y->format)) {
        rocq__job_decode(job, y, x, NULL, 1.0f);
    } else {
        const rocq_tensor floats =
            rocq__job_tensor(job, ROCQ_F32, ROCQ_LAYOUT_GGUF, x->ne, x->ne[0]);
        rocq__job_convert(job, &floats, x);
        rocq__job_convert(job, y, &floats);
    }
    job->cost = cost;
}

// -- matmul --
// A chain of products of one x. With up to ROCQ_K_FEW columns each is a matvec, and neighbours in
// the chain share a launch; with more, each is a grid of tiles. First, operands that do not have
// the form that the kernels read are converted to it:
//   x    INT8: planar Q8_0; else F16 or F32, 16-byte aligned rows at one distance throughout
//   w    planar blocks; F32 F16 BF16 contiguous, 16-byte aligned

enum {
    ROCQ__MATMUL_K = 1 << 24,     // largest K: 32 bits address the rows of a tile
    ROCQ__MATMUL_BATCHES = 65535  // most matrices: a matvec launches each, tiles have them in z
};

// Index of a format in ROCQ_K_ALL_FORMATS, in whose order the kernels of a family stand.
static int rocq__k_format(rocq_format format) {
    switch (format) {
#define ROCQ_X(NAME, name, id, elems, bytes) \
    case ROCQ_##NAME: return (ROCQ_K_matvec_f32_##name##_n1 - ROCQ_K_matvec_f32_f32_n1) / 2;
        ROCQ_FORMATS(ROCQ_X)
#undef ROCQ_X
    default: return -1;
    }
}

// The same for ROCQ_K_INT8_FORMATS; -1 for a format that has no integer path.
static int rocq__k_int8_format(rocq_format format) {
    const int i = rocq__k_format(format) - rocq__k_format(ROCQ_Q4_0);
    return i <= rocq__k_format(ROCQ_MXFP4) - rocq__k_format(ROCQ_Q4_0) ? ROCQ__MAX(i, -1) : -1;
}

static rocq_precision rocq__product_path(const rocq_ctx *ctx, const rocq_matmul_params *p,
                                         const rocq_tensor *w) {
    return rocq__product_choice(ctx, ROCQ_BACKEND_GPU, p, w).precision;
}

static bool rocq__aligned16(const rocq_tensor *t) {
    return (uintptr_t)rocq__device_data(t) % 16 == 0;
}

// Whether the rows of a float tensor are at one distance throughout and readable 16 bytes at a
// time.
static bool rocq__wide_rows(const rocq_tensor *t) {
    const int64_t wide = t->format == ROCQ_F32 ? 4 : 8;
    if (t->stride[1] > ROCQ__MATMUL_K) return false; // so that the products below fit
    int64_t step = t->stride[1] * t->ne[1];
    for (int d = 2; d < 4; d++) {
        if (t->ne[d] != 1 && t->stride[d] != step) return false;
        if (!rocq__mul(step, t->ne[d], &step)) return false;
    }
    return rocq__aligned16(t) && t->ne[0] % wide == 0 && t->stride[1] % wide == 0;
}

static rocq_tensor rocq__product_x(rocq__job *job, const rocq_tensor *x, rocq_precision path) {
    const rocq_format to = rocq__operand_format(path);
    const rocq_layout layout = to == ROCQ_Q8_0 ? ROCQ_LAYOUT_PLANAR : ROCQ_LAYOUT_GGUF;
    if (x->format == to && x->layout == layout && (to == ROCQ_Q8_0 || rocq__wide_rows(x))) {
        return *x;
    }
    const rocq_tensor t = rocq__job_tensor(job, to, layout, x->ne, (x->ne[0] + 7) / 8 * 8);
    rocq__job_convert(job, &t, x);
    return t;
}

static rocq_tensor rocq__product_w(rocq__job *job, const rocq_tensor *w) {
    const bool plain = rocq__is_plain(w->format);
    if (plain ? rocq_tensor_contiguous(w) && rocq__aligned16(w) : w->layout == ROCQ_LAYOUT_PLANAR) {
        return *w;
    }
    const rocq_layout layout = plain ? ROCQ_LAYOUT_GGUF : ROCQ_LAYOUT_PLANAR;
    const rocq_tensor t = rocq__job_tensor(job, w->format, layout, w->ne, w->ne[0]);
    rocq__job_convert(job, &t, w);
    return t;
}

// A product whose operands have the form that its kernel reads and writes.
typedef struct rocq__product {
    const rocq_matmul_params *p;
    rocq_precision path;
    rocq_tensor w, w2; // w2.n_dims 0: none
    rocq_tensor y;     // p->y, or F32 in scratch memory where the kernel cannot write p->y
    rocq_tensor gate;  // p->gate, or w2 x where no kernel computes it together with w x
    bool has_gate;
} rocq__product;

static rocq_k_epilogue rocq__k_epilogue(const rocq__product *g) {
    rocq_k_epilogue e;
    memset(&e, 0, sizeof e);
    e.y = rocq__k_tensor(&g->y);
    if (g->has_gate) e.gate = rocq__k_tensor(&g->gate);
    e.residual = rocq__k_tensor(g->p->residual);
    e.bias = (const float *)rocq__device_data(g->p->bias);
    e.activation = (int32_t)g->p->activation;
    e.softcap = g->p->softcap;
    return e;
}

static void rocq__k_move(rocq_k_tensor *t, int64_t i2, int64_t i3) {
    const int64_t bytes = i2 * t->stride[1] + i3 * t->stride[2];
    if (t->data) t->data = (void *)((uintptr_t)t->data + (uintptr_t)bytes);
}

// The rule for a matvec chooses k_waves, the number of waves that divide the K of a row among them.
// Memory works at full rate while latency x bandwidth bytes are in flight. A wave has one step of
// its four rows in flight: for each lane a unit of each row, or 16 bytes of plain formats. So K is
// divided until all waves together reach that, but never so far that a step is not full. On an H200
// with this latency the rule takes the fastest of 1, 2, 4 and 8, or one at most 4% behind, for
// Q4_0, Q8_0, Q4_K, Q5_K, Q6_K and F16 of 4096 x 4096, 14336 x 4096 and 4096 x 14336, n = 1.
enum { ROCQ__LATENCY_NS = 950 }; // of a load from busy memory; 240 from idle memory on a 7900 XTX

// Elements of a row that a wave takes in one step.
static int32_t rocq__matvec_step(const rocq__site *s) {
    const rocq_format format = (rocq_format)s->format;
    const bool plain = s->format >= 0 && rocq__is_plain(format);
    return ROCQ_K_WAVE * (plain ? (int32_t)(16 / rocq__bytes(format, 1)) : 32);
}

// Bytes that all waves together have in flight when k_waves is 1.
static double rocq__matvec_flight(const rocq__site *s) {
    const int32_t step = rocq__matvec_step(s);
    return (double)s->m * s->row_bytes * ROCQ__MIN(s->k, step) / s->k;
}

static rocq_launch_config rocq__rule_matvec(const rocq__chip *chip, const rocq__site *s) {
    const double enough = chip->bytes_per_us * (double)ROCQ__LATENCY_NS / 1000.0;
    const double each = rocq__matvec_flight(s);
    const int32_t step = rocq__matvec_step(s);
    rocq_launch_config config = {1, 0, 0};
    while (config.k_waves < ROCQ_K_MATVEC_WAVES && each * config.k_waves < enough &&
           s->k >= step * config.k_waves * 2) {
        config.k_waves *= 2;
    }
    return config;
}

// Launches products of one x and path, with at most ROCQ_K_FEW columns, once for each matrix.
static void rocq__product_few(rocq__job *job, const rocq__product *g, int32_t n_products,
                              const rocq_tensor *x) {
    const int64_t n = x->ne[1], k = x->ne[0];
    const bool int8 = g->path == ROCQ_PRECISION_INT8;
    rocq_k_matvec_args args;
    int64_t rows = 0, blocks = 0;
    double bytes = 0.0; // of weights
    bool mixed = false, groups = false; // groups: a block has to own whole blocks of a Q8_0 y
    memset(&args, 0, sizeof args);
    args.k = (int32_t)k;
    args.n = (int32_t)n;
    args.x = rocq__device_data(x);
    args.x_units = rocq_tensor_count(x) / 32;
    args.x_stride = x->stride[1];
    for (int32_t i = 0; i < n_products; i++) {
        rocq_k_matvec_weights *product = &args.product[i].weights;
        const rocq_tensor *w = &g[i].w;
        const double pair = g[i].w2.n_dims > 0 ? 2.0 : 1.0;
        product->w = rocq__device_data(w);
        if (g[i].w2.n_dims > 0) product->w2 = rocq__device_data(&g[i].w2);
        product->n_units = rocq_tensor_count(w) / 32;
        product->m = (int32_t)w->ne[1];
        product->format = (int32_t)w->format;
        rows += w->ne[1];
        bytes += pair * (double)(w->ne[1] * rocq__bytes(w->format, k));
        mixed = mixed || w->format != g[0].w.format;
        groups = groups || g[i].y.format == ROCQ_Q8_0;
    }
    int32_t k_waves = 1;
    if (!groups) {
        rocq__site site;
        memset(&site, 0, sizeof site);
        site.kind = ROCQ__KIND_MATVEC;
        site.format = mixed ? -1 : (int32_t)g->w.format;
        site.int8 = int8;
        site.pair = g->w2.n_dims > 0;
        site.m = rocq__clamp32(rows);
        site.k = (int32_t)k;
        site.n = (int32_t)n;
        site.row_bytes = (int32_t)(bytes / (double)rows);
        k_waves = rocq__config_for(job->ctx, &site).k_waves;
    }
    while (1 << args.k_shift < k_waves) args.k_shift++;
    args.k_step = ROCQ_K_WAVE << args.k_shift;
    const int64_t block_rows = ROCQ_K_MATVEC_ROWS * ROCQ_K_MATVEC_WAVES / k_waves;
    for (int32_t i = 0; i < ROCQ_K_MATVEC_PRODUCTS; i++) {
        args.block_begin[i] = i < n_products ? (uint32_t)blocks : UINT32_MAX;
        if (i < n_products) blocks += (g[i].w.ne[1] + block_rows - 1) / block_rows;
    }
    const int columns = n > 4 ? 3 : n > 2 ? 2 : n > 1 ? 1 : 0; // 1, 2, 4, 8
    int kernel = ROCQ_K_matvec_f32_f32_n1 + 2 * rocq__k_format(g->w.format) + (n > 1);
    if (rocq__is_plain(g->w.format) && (columns == 1 || columns == 2)) {
        kernel = ROCQ_K_matvec_f32_f32_n2 + 2 * rocq__k_format(g->w.format) + columns - 1;
    }
    if (int8) {
        kernel = ROCQ_K_matvec_int8_q4_0_n1 + 4 * rocq__k_int8_format(g->w.format) + columns;
    }
    if (mixed) kernel = ROCQ_K_matvec_int8_mixed_n1;
    for (int64_t i3 = 0; i3 < x->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < x->ne[2]; i2++) {
            args.x_column0 = (i3 * x->ne[2] + i2) * n;
            for (int32_t i = 0; i < n_products; i++) {
                const rocq_tensor *w = &g[i].w;
                const int64_t w2 = i2 / (x->ne[2] / w->ne[2]), w3 = i3 / (x->ne[3] / w->ne[3]);
                rocq_k_matvec_product *product = &args.product[i];
                rocq_k_epilogue e = rocq__k_epilogue(&g[i]);
                const bool planar = g[i].y.layout == ROCQ_LAYOUT_PLANAR;
                if (!planar) rocq__k_move(&e.y, i2, i3);
                rocq__k_move(&e.gate, i2, i3);
                rocq__k_move(&e.residual, i2, i3);
                product->weights.row0 = (w3 * w->ne[2] + w2) * w->ne[1];
                product->y = e.y.data;
                product->gate = e.gate.data;
                product->residual = e.residual.data;
                product->bias = e.bias;
                product->y_stride = planar ? rocq_tensor_count(&g[i].y) / 32 : e.y.stride[0];
                product->gate_stride = e.gate.stride[0];
                product->residual_stride = e.residual.stride[0];
                product->y_format = e.y.format;
                product->gate_format = e.gate.format;
                product->residual_format = e.residual.format;
                product->y_layout = e.y.layout;
                product->activation = e.activation;
                product->softcap = e.softcap;
            }
            rocq__job_launch(job, kernel, blocks, 1, 256, &args);
        }
    }
}

// Into how many parts n elements may be split: 1, 2, 3, 4, 6, 8, 12 and so on up to most, as long
// as a part has least elements.
enum { ROCQ__SPLITS = 17 }; // up to 384
static int32_t rocq__splits_of(int32_t n, int32_t least, int32_t most, int32_t *out) {
    int32_t count = 0, v = 1;
    while (v <= most && (v == 1 || n / v >= least)) {
        out[count++] = v;
        if (v == 1) v = 2;
        else v = v % 3 == 0 ? v / 3 * 4 : v / 2 * 3;
    }
    return count;
}

// Of K for a grid of tiles: each part has at least four steps of 64.
static int32_t rocq__tile_splits(const rocq__site *s, int32_t *out) {
    return rocq__splits_of(s->k, 256, 16, out);
}

// How fast a compute unit computes tiles. For RDNA3, decode comes from the machine code
// (bench/gfx1100.md), held from LDS and registers; for other chips, all is fitted to an H200.
typedef struct rocq__tile_pace {
    double rate;    // of the unit that multiplies, relative to chip->matrix_per_us
    double decode;  // columns whose products take as long as fetching and decoding w
    double held[2]; // blocks resident on a compute unit: of the narrow tile, of the others
} rocq__tile_pace;

static const rocq__tile_pace rocq__tile_rdna3 = {1.0, 16.0, {2.5, 1.5}},
                             rocq__tile_other = {4.0, 50.0, {4.0, 2.0}};

// Estimates the nanoseconds of a grid of tiles. For each 64 of K, a block waits for its loads, then
// computes; blocks resident on one unit wait at the same time. The partial sums of a split K are
// written, then read and added by a second launch. On an H200 the fastest by this estimate is the
// fastest of all or at most 7% behind, 0.7% on average: 41 shapes of five formats, n 16 to 2048.
static double rocq__tiles_ns(const rocq__chip *chip, const rocq__site *s,
                             const rocq_launch_config *c) {
    const rocq__tile_pace *p = chip->target ? &rocq__tile_rdna3 : &rocq__tile_other;
    const double units = chip->n_units, splits = c->n_splits, tile_m = ROCQ_K_MATMUL_M;
    const double blocks = ceil(s->m / tile_m) * ceil((double)s->n / c->tile_n) * s->batch * splits;
    const double rate = chip->matrix_per_us * p->rate / units; // of a unit
    const double work = 128.0 * tile_m * (c->tile_n + p->decode) * 1e3 / rate;
    const double held = p->held[c->tile_n != ROCQ_K_MATMUL_F16_N_FEW];
    const double each = ceil(blocks / units), rounds = ceil(blocks / (held * units));
    const double steps = ceil(ceil(s->k / 64.0) / splits);
    const double latency = ROCQ__LATENCY_NS;
    const double tiles = steps * ROCQ__MAX(each * work, rounds * (latency + work));
    const double w_bytes = (double)rocq__bytes((rocq_format)s->format, s->k) * s->m;
    const double y_bytes = 4.0 * s->m * s->n * s->batch;
    const double bytes = (w_bytes + 2.0 * s->k * s->n) * s->batch + y_bytes;
    const double partials =
        splits > 1.0 ? 4.0 * y_bytes * splits : 0.0; // 2 passes at half the rate
    return ROCQ__MAX(tiles, bytes * 1e3 / chip->bytes_per_us) +
           partials * 1e3 / chip->bytes_per_us + (rounds + 1.0) * latency;
}

// The tile of tile_n[n_tiles] and the number of splits with the least estimated time.
static rocq_launch_config rocq__tiles_best(const rocq__chip *chip, const rocq__site *s,
                                           const int32_t *tile_n, int32_t n_tiles) {
    rocq_launch_config best = {0, tile_n[0], 1};
    double best_ns = rocq__tiles_ns(chip, s, &best);
    int32_t splits[ROCQ__SPLITS];
    const int32_t n = rocq__tile_splits(s, splits);
    for (int32_t i = 1; i < n * n_tiles; i++) {
        const rocq_launch_config c = {0, tile_n[i / n], splits[i % n]};
        const double ns = rocq__tiles_ns(chip, s, &c);
        if (ns < best_ns) {
            best = c;
            best_ns = ns;
        }
    }
    return best;
}

static rocq_launch_config rocq__rule_tiles(const rocq__chip *chip, const rocq__site *s) {
    static const int32_t tile_n[] = {ROCQ_K_MATMUL_F16_N, ROCQ_K_MATMUL_F16_N_FEW};
    return rocq__tiles_best(chip, s, tile_n, 2);
}

// Launches a product as a grid of tiles, in which z counts the matrices.
static void rocq__product_tiles(rocq__job *job, const rocq__product *g, const rocq_tensor *x) {
    const rocq_tensor *w = &g->w;
    const int64_t m = w->ne[1], n = x->ne[1], k = x->ne[0], n_matrices = x->ne[2] * x->ne[3];
    const int64_t tile_m = ROCQ_K_MATMUL_M;
    int kernel = ROCQ_K_matmul_f32, threads = 256;
    rocq_k_matmul_args args;
    rocq_launch_config config;
    rocq__site site;
    memset(&site, 0, sizeof site);
    site.kind = ROCQ__KIND_TILES;
    site.format = (int32_t)w->format;
    site.m = rocq__clamp32(m);
    site.k = (int32_t)k;
    site.n = rocq__clamp32(n);
    site.batch = rocq__clamp32(n_matrices);
    if (g->path == ROCQ_PRECISION_F16) {
        config = rocq__config_for(job->ctx, &site);
        kernel = ROCQ_K_matmul_f16_f32_128 + 2 * rocq__k_format(w->format) +
                 (config.tile_n != ROCQ_K_MATMUL_F16_N);
        threads = 128;
    } else { // there is only one tile; the splits are chosen by the same rule
        const bool int8 = g->path == ROCQ_PRECISION_INT8;
        const int32_t only = int8 ? ROCQ_K_MATMUL_INT8_N : ROCQ_K_MATMUL_F32_N;
        config = rocq__tiles_best(rocq__chip_of(job->ctx), &site, &only, 1);
        if (int8) {
            kernel = ROCQ_K_matmul_int8_q4_0 + rocq__k_int8_format(w->format);
            threads = 128;
        }
    }
    const int64_t tile_n = config.tile_n, n_splits = config.n_splits;
    memset(&args, 0, sizeof args);
    args.w = rocq__device_data(w);
    args.w_units = rocq_tensor_count(w) / 32;
    args.x = rocq__device_data(x);
    args.x_units = rocq_tensor_count(x) / 32;
    args.x_stride = x->stride[1];
    args.epilogue = rocq__k_epilogue(g);
    args.m = m;
    args.n = n;
    args.k = k;
    args.tiles_m = (int32_t)((m + tile_m - 1) / tile_m);
    args.tiles_n = (int32_t)((n + tile_n - 1) / tile_n);
    args.n_splits = (int32_t)n_splits;
    args.format = (int32_t)w->format;
    args.batch2 = (int32_t)x->ne[2];
    args.run2 = (int32_t)(x->ne[2] / w->ne[2]);
    args.run3 = (int32_t)(x->ne[3] / w->ne[3]);
    args.w_batch2 = (int32_t)w->ne[2];
    const int64_t work_ne[4] = {m, n_splits, n, n_matrices}, mark = job->used;
    if (n_splits > 1) {
        const rocq_tensor work = rocq__job_tensor(job, ROCQ_F32, ROCQ_LAYOUT_GGUF, work_ne, m);
        args.work = (float *)rocq__device_data(&work);
        job->used = mark; // matmul_merge has read it before anything else is written there
    }
    rocq__job_launch(job, kernel, args.tiles_m * n_splits * args.tiles_n, n_matrices, threads,
                     &args);
    if (n_splits == 1) return;
    const double partials = (double)(m * n * n_splits) * (double)n_matrices;
    const rocq__cost merge = {4.0 * partials, partials, 0.0};
    job->cost = merge;
    args.tiles_m = (int32_t)((m + ROCQ_K_MERGE_M - 1) / ROCQ_K_MERGE_M);
    args.tiles_n = (int32_t)((n + ROCQ_K_MERGE_N - 1) / ROCQ_K_MERGE_N);
    rocq__job_launch(job, ROCQ_K_matmul_merge, (int64_t)args.tiles_m * args.tiles_n, n_matrices,
                     256, &args);
}

// What one launch of n products costs. A matvec launches each matrix of a batch on its own.
static rocq__cost rocq__gemm_cost(const rocq__job *job, const rocq__product *g, int32_t n) {
    const bool few = g->p->x->ne[1] <= ROCQ_K_FEW;
    const double launches = few ? (double)(g->w.ne[2] * g->w.ne[3]) : 1.0;
    rocq__cost sum = {0.0, 0.0, 0.0};
    for (int32_t i = 0; i < n; i++) {
        rocq_matmul_params alone = *g[i].p;
        alone.next = NULL;
        if (g[i].w2.n_dims == 0) alone.w2 = NULL; // the product with it has a launch of its own
        const rocq__cost cost = rocq__job_cost(job, ROCQ_OP_MATMUL, &alone);
        sum.bytes += cost.bytes / launches;
        sum.flops += cost.flops / launches;
        sum.matrix += cost.matrix / launches;
    }
    return sum;
}

static void rocq__product_launch(rocq__job *job, const rocq__product *g, int32_t n,
                                 const rocq_tensor *x) {
    job->cost = rocq__gemm_cost(job, g, n);
    if (x->ne[1] <= ROCQ_K_FEW) rocq__product_few(job, g, n, x);
    else rocq__product_tiles(job, g, x);
    for (int32_t i = 0; i < n; i++) {
        if (g[i].y.format != g[i].p->y->format) rocq__job_convert(job, g[i].p->y, &g[i].y);
    }
}

// Prepares *g for p. x[path] is x as the kernels of that path read it.
static void rocq__product_prepare(rocq__job *job, const rocq_matmul_params *p, const rocq_tensor *x,
                                  rocq__product *g) {
    const bool few = p->x->ne[1] <= ROCQ_K_FEW;
    memset(g, 0, sizeof *g);
    g->p = p;
    g->path = rocq__product_path(job->ctx, p, p->w);
    g->w = rocq__product_w(job, p->w);
    g->y = *p->y;
    // A block of a matvec computes whole blocks of a Q8_0 y, but a tile does not.
    if (p->y->format == ROCQ_Q8_0 && !few) {
        g->y = rocq__job_tensor(job, ROCQ_F32, ROCQ_LAYOUT_GGUF, p->y->ne, p->y->ne[0]);
    }
    g->has_gate = p->gate != NULL;
    if (p->gate) g->gate = *p->gate;
    if (!p->w2) return;
    if (few && p->w2->format == p->w->format) {
        g->w2 = rocq__product_w(job, p->w2);
        return;
    }
    // w2 x becomes a product of its own, whose result is the gate of w x.
    const rocq_tensor made =
        rocq__job_tensor(job, ROCQ_F32, ROCQ_LAYOUT_GGUF, p->y->ne, p->y->ne[0]);
    rocq_matmul_params other;
    rocq__product second;
    memset(&other, 0, sizeof other);
    other.y = &made;
    other.w = p->w2;
    other.x = p->x;
    other.gate = p->gate;
    other.precision = p->precision;
    rocq__product_prepare(job, &other, x, &second);
    rocq__product_launch(job, &second, 1, &x[second.path]);
    g->gate = made;
    g->has_gate = true;
}

// How many products from first on share a launch: as many as fit, of one path, and of one format
// but for INT8 with one column. That is safe, since none of a chain reads what another one writes.
static int32_t rocq__product_run(const rocq_ctx *ctx, const rocq_matmul_params *first) {
    const rocq_precision path = rocq__product_path(ctx, first, first->w);
    const bool any_format = path == ROCQ_PRECISION_INT8 && first->x->ne[1] == 1;
    int32_t n = 1;
    if (first->x->ne[1] > ROCQ_K_FEW) return 1;
    for (const rocq_matmul_params *p = first->next; p && n < ROCQ_K_MATVEC_PRODUCTS;
         p = p->next, n++) {
        if (rocq__product_path(ctx, p, p->w) != path) return n;
        if (p->w->format != first->w->format && !any_format) return n;
    }
    return n;
}

static void rocq__job_matmul(rocq__job *job, const void *params) {
    const rocq_matmul_params *p = (const rocq_matmul_params *)params;
    rocq__product g[ROCQ_K_MATVEC_PRODUCTS];
    rocq_tensor x[ROCQ_PRECISION_INT8 + 1];
    bool have[ROCQ_PRECISION_INT8 + 1] = {false, false, false, false};
    if (p->x->ne[0] > ROCQ__MATMUL_K) {
        job->result =
            rocq__fail(job->ctx, ROCQ_E_UNSUPPORTED, "matmul: K %lld is over %d on the GPU",
                       (long long)p->x->ne[0], (int)ROCQ__MATMUL_K);
        return;
    }
    if (p->x->ne[2] * p->x->ne[3] > ROCQ__MATMUL_BATCHES) {
        job->result =
            rocq__fail(job->ctx, ROCQ_E_UNSUPPORTED, "matmul: %lld x %lld batches on the GPU",
                       (long long)p->x->ne[2], (long long)p->x->ne[3]);
        return;
    }
    for (const rocq_matmul_params *q = p; q; q = q->next) {
        for (int i = 0; i < 2; i++) {
            const rocq_tensor *w = i == 0 ? q->w : q->w2;
            if (!w) continue;
            const rocq_precision path = rocq__product_path(job->ctx, q, w);
            if (path == ROCQ_PRECISION_INT8 && rocq__k_int8_format(w->format) < 0) {
                job->result = rocq__fail(job->ctx, ROCQ_E_UNSUPPORTED,
                                         "matmul: format %s has no INT8 path on the GPU",
                                         rocq_format_name(w->format));
                return;
            }
            if (!have[path]) x[path] = rocq__product_x(job, p->x, path);
            have[path] = true;
        }
    }
    const int64_t mark = job->used;
    while (p) {
        const int32_t n = rocq__product_run(job->ctx, p);
        for (int32_t i = 0; i < n; i++, p = p->next) rocq__product_prepare(job, p, x, &g[i]);
        rocq__product_launch(job, g, n, &x[g[0].path]);
        job->used = mark; // launches run in order, so the next may use the same scratch memory
    }
}

// -- attention --

enum {
    ROCQ__ATTENTION_BLOCKS = 2,      // blocks resident on a compute unit
    ROCQ__ATTENTION_FLIGHT = 16384,  // bytes of K and V that a block has in flight
    ROCQ__ATTENTION_MERGE = 8192 // bytes of parts that a block has in flight while it merges them
};

#define ROCQ_X(X, d) d,
static const int32_t rocq__head_dims[] = {ROCQ_K_HEAD_DIMS(ROCQ_X, )};
#undef ROCQ_X

// How long a block takes for a row of K or V, in bytes that it could read meanwhile. A row of a
// block format takes 1.5 times as long as one of F16, because its codes have to be unpacked.
static double rocq__attention_row_bytes(int32_t format, int32_t head_dim) {
    const bool plain = rocq__is_plain((rocq_format)format);
    return plain ? (double)rocq__bytes((rocq_format)format, head_dim) : 3.0 * head_dim;
}

// The same for all of K and V of a KV head.
static double rocq__attention_kv_bytes(const rocq__site *s) {
    return s->n * (rocq__attention_row_bytes(s->format, s->k) +
                   rocq__attention_row_bytes(s->format2, s->k));
}

// Bytes of the part of a result that one block makes: O, m and l of each of its columns.
static double rocq__attention_partial_bytes(const rocq__site *s, int32_t tile_n) {
    return 4.0 * ROCQ__MIN(s->m, tile_n) * (s->k + 2);
}

// The rule for attention looks at shapes alone, never at kv_len: a recorded launch is replayed
// while that grows. A prefill block reads K and V for up to 64 columns at once, which pays where
// over half of those columns exist and there is a block for every compute unit; else decode is
// taken. A split has whole runs of ROCQ_K_ATTEND_RUN positions, and there are no more splits than
// fill the chip. In decode, a split also has so many runs that reading it (kv / splits) takes about
// as long as merging all of them (part * splits), which one block does alone. Their number is
// rounded by ratio, but down if rounding up would leave over a quarter of the compute units without
// a block. On an H200 the rule takes the fastest of 16, 22, 32 and 64 splits of 8192 positions for
// D 64 (4 KV heads) and 128 (8); for D 256 (4) 64 splits take 0.91 of the time of its 32.
static rocq_launch_config rocq__rule_attention(const rocq__chip *chip, const rocq__site *s) {
    const int32_t few = ROCQ_K_DECODE_COLUMNS, many = ROCQ_K_PREFILL_COLUMNS(s->k);
    const bool fills = (int64_t)((s->m + many - 1) / many) * s->batch >= chip->n_units;
    rocq_launch_config config = {0, fills && s->m > ROCQ__MAX(few, many / 2) ? many : few, 1};
    const double all = (double)s->n / (double)ROCQ_K_ATTEND_RUN; // runs
    const double blocks = ceil((double)s->m / config.tile_n) * s->batch;
    const double fill = floor((double)ROCQ__ATTENTION_BLOCKS * chip->n_units / blocks);
    double runs = ceil(all / ROCQ__MAX(fill, 1.0)); // of a split
    if (config.tile_n == few && (few < many || s->m <= few)) { // decode
        const double even =
            all / sqrt(rocq__attention_kv_bytes(s) / (double)ROCQ__ATTENTION_FLIGHT *
                       (double)ROCQ__ATTENTION_MERGE / rocq__attention_partial_bytes(s, few));
        const bool idle = blocks * ceil(all / ceil(even)) < 0.75 * chip->n_units;
        const bool up = even * even > floor(even) * ceil(even) && !idle;
        runs = ROCQ__MAX(runs, floor(even) + (up ? 1.0 : 0.0));
    }
    config.n_splits = (int32_t)ceil(all / ROCQ__MAX(runs, 1.0));
    return config;
}

static void rocq__job_attention(rocq__job *job, const void *params) {
    const rocq_attention_params *p = (const rocq_attention_params *)params;
    const int64_t n_heads = p->q->ne[1], n_kv_heads = p->k->ne[1], n_q = p->q->ne[2];
    const int64_t n_seqs = p->q->ne[3], columns = n_heads / n_kv_heads * n_q;
    const int64_t n_kv = p->page_table ? p->page_table->ne[0] * p->page_size : p->k->ne[2];
    int size = 0; // index of the least head size with kernels that is large enough
    while (rocq__head_dims[size] < p->q->ne[0]) size++;
    const int64_t head_dim = rocq__head_dims[size];
    if (job->ctx->desc.precision == ROCQ_PRECISION_F32) {
        job->result = rocq__fail(job->ctx, ROCQ_E_UNSUPPORTED,
                                 "attention: the context is to compute in F32, the GPU has F16");
        return;
    }
    rocq__site site;
    memset(&site, 0, sizeof site);
    site.kind = ROCQ__KIND_ATTENTION;
    site.format = (int32_t)p->k->format;
    site.format2 = (int32_t)p->v->format;
    site.m = rocq__clamp32(columns);
    site.k = (int32_t)head_dim;
    site.n = rocq__clamp32(n_kv);
    site.batch = rocq__clamp32(n_kv_heads * n_seqs);
    const rocq_launch_config config = rocq__config_for(job->ctx, &site);
    const int64_t tile = config.tile_n;
    const int64_t few = ROCQ_K_DECODE_COLUMNS, many = ROCQ_K_PREFILL_COLUMNS(head_dim);
    const bool decode = tile < many || (many == few && columns <= few);
    const int64_t n_tiles = (columns + tile - 1) / tile, blocks = n_tiles * n_kv_heads * n_seqs;
    const int64_t n_splits = blocks <= ROCQ__COUNTERS ? config.n_splits : 1;
    const int64_t group = n_heads / n_kv_heads;
    if (columns > INT32_MAX / 2 || columns * group > UINT32_MAX) {
        job->result =
            rocq__fail(job->ctx, ROCQ_E_UNSUPPORTED,
                       "attention: %lld queries in a group on the GPU", (long long)columns);
        return;
    }

    rocq_k_attention_args args;
    memset(&args, 0, sizeof args);
    args.out = rocq__k_tensor(p->out);
    args.q = rocq__k_tensor(p->q);
    args.k = rocq__k_tensor(p->k);
    args.v = rocq__k_tensor(p->v);
    args.mask = rocq__k_tensor(p->mask);
    args.sinks = (const float *)rocq__device_data(p->sinks);
    args.kv_len = (const int32_t *)rocq__device_data(p->kv_len);
    args.page_table = (const int32_t *)rocq__device_data(p->page_table);
    args.n_kv = (int32_t)n_kv;
    args.page_size = p->page_size;
    args.n_pages = p->page_table ? (int32_t)p->page_table->ne[0] : 0;
    args.head_dim = (int32_t)p->q->ne[0];
    args.n_heads = (int32_t)n_heads;
    args.n_kv_heads = (int32_t)n_kv_heads;
    args.n_q = (int32_t)n_q;
    args.n_seqs = (int32_t)n_seqs;
    args.group = (int32_t)group;
    args.group_inverse = (uint32_t)(UINT32_MAX / group);
    args.scale = p->scale != 0.0f ? p->scale : 1.0f / sqrtf((float)p->q->ne[0]);
    args.softcap = p->softcap;
    args.window = p->window;
    args.causal = p->causal;
    args.n_splits = (int32_t)n_splits;
    args.n_tiles = (int32_t)n_tiles;
    if (args.k.stride[1] > UINT32_MAX || args.v.stride[1] > UINT32_MAX) {
        job->result =
            rocq__fail(job->ctx, ROCQ_E_UNSUPPORTED, "attention: KV rows 4 GiB apart on the GPU");
        return;
    }
    if (n_splits > 1) {
        const int64_t part[4] = {head_dim + 2, tile, blocks, n_splits}; // O, m and l of a column
        const rocq_tensor work = rocq__job_tensor(job, ROCQ_F32, ROCQ_LAYOUT_GGUF, part, part[0]);
        args.work = (float *)rocq__device_data(&work);
        if (!job->planning && job->result == ROCQ_OK) {
            job->result = rocq__counters_hip(job->ctx, blocks, &args.counter);
        }
    }
    // The time cap must not be too late: as if every query saw all that is there, and with K and V
    // read anew for each tile of queries.
    rocq_attention_params all = *p;
    all.kv_len = NULL;
    all.causal = false;
    all.window = 0;
    all.mask = NULL;
    job->cost = rocq__job_cost(job, ROCQ_OP_ATTENTION, &all);
    const double once = 8.0 * (double)rocq_tensor_count(p->q); // bytes of q and out
    job->cost.bytes = once + (job->cost.bytes - once) * (double)n_tiles;
    rocq__job_launch(job,
                     (decode ? ROCQ_K_attention_decode_64 : ROCQ_K_attention_prefill_64) + 2 * size,
                     blocks * n_splits, 1, 128, &args);
}

// -- rmsnorm, layernorm --

static void rocq__job_norm(rocq__job *job, const void *params) {
    const rocq_norm_params *p = (const rocq_norm_params *)params;
    rocq_k_norm_args args;
    memset(&args, 0, sizeof args);
    args.y = rocq__k_tensor(p->y);
    args.x = rocq__k_tensor(p->x);
    args.mean = rocq__k_tensor(p->mean);
    args.rstd = rocq__k_tensor(p->rstd);
    args.weight = (const float *)rocq__device_data(p->weight);
    args.bias = (const float *)rocq__device_data(p->bias);
    args.eps = p->eps > 0.0f ? p->eps : 1e-5f;
    args.center = job->op == ROCQ_OP_LAYERNORM;
    rocq__job_row(job, p->x->ne[0]);
    // A row of up to 16 elements a thread stays in registers.
    int threads = rocq__row_threads(p->x->ne[0]);
    while (threads < ROCQ_K_NORM_THREADS && 16 * threads < p->x->ne[0]) threads *= 2;
    rocq__job_launch(job, ROCQ_K_norm, rocq__n_rows(p->x), 1, threads, &args);
}

// -- rope, rope_append --

enum { ROCQ__ROPE_DIMS = 512 }; // largest n_dims: the 8 bits of power[] number 256 pairs

static void rocq__job_turn(rocq__job *job, const rocq_rope_config *p, const rocq_tensor *pos,
                           int64_t head_dim, rocq_k_rope_args *args) {
    const int64_t n_dims = p->n_dims > 0 ? p->n_dims : head_dim;
    if (n_dims > ROCQ__ROPE_DIMS) {
        job->result =
            rocq__fail(job->ctx, ROCQ_E_UNSUPPORTED, "%s: n_dims %lld is over %d on the GPU",
                       job->name, (long long)n_dims, (int)ROCQ__ROPE_DIMS);
        return;
    }
    rocq__job_row(job, head_dim);
    const rocq__rope_scaling scaling = rocq__rope_scaling_of(p, n_dims);
    for (int b = 0; b < 8; b++)
        args->power[b] = pow(scaling.base, -2.0 * (1 << b) / scaling.n_dims);
    args->scale = scaling.scale;
    args->ext_factor = scaling.ext_factor;
    args->low = scaling.low;
    args->per_pair = 1.0 / ROCQ__MAX(0.001, scaling.high - scaling.low);
    args->magnitude = scaling.magnitude;
    args->pos = (const int32_t *)rocq__device_data(pos);
    args->freq_factors = (const float *)rocq__device_data(p->freq_factors);
    args->head_dim = (int32_t)head_dim;
    args->n_dims = (int32_t)n_dims;
    args->neox = p->pairing == ROCQ_ROPE_NEOX;
}

static void rocq__k_stream(rocq_k_rope_args *args, const rocq_tensor *y, const rocq_tensor *x,
                           bool plain, bool to_cell) {
    rocq_k_rope_stream *stream = &args->stream[args->n_streams++];
    stream->y = rocq__k_tensor(y);
    stream->x = rocq__k_tensor(x);
    stream->plain = plain;
    stream->to_cell = to_cell;
}

// A block takes as many heads of a token as its 256 threads can with four elements each.
static void rocq__job_rope_launch(rocq__job *job, rocq_k_rope_args *args) {
    if (job->result != ROCQ_OK) return;
    const int32_t quads = (args->head_dim + 3) / 4;
    const int64_t n_tokens = args->stream[0].x.ne[2];
    int64_t blocks = 0;
    args->heads = quads < 256 ? 256 / quads : 1;
    for (int i = 0; i < args->n_streams; i++) {
        rocq_k_rope_stream *stream = &args->stream[i];
        stream->slices = (uint32_t)((stream->x.ne[1] + (int64_t)args->heads - 1) / args->heads);
        blocks += stream->slices;
    }
    if (blocks > UINT32_MAX) blocks = UINT32_MAX; // more than a launch can have
    args->slices = (uint32_t)blocks;
    rocq__job_launch(job, ROCQ_K_rope, n_tokens * blocks, 1, 256, args);
}

static void rocq__job_rope(rocq__job *job, const void *params) {
    const rocq_rope_params *p = (const rocq_rope_params *)params;
    rocq_k_rope_args args;
    memset(&args, 0, sizeof args);
    rocq__job_turn(job, &p->rope, p->pos, p->x->ne[0], &args);
    rocq__k_stream(&args, p->y, p->x, false, false);
    rocq__job_rope_launch(job, &args);
}

static void rocq__job_rope_append(rocq__job *job, const void *params) {
    const rocq_rope_append_params *p = (const rocq_rope_append_params *)params;
    rocq_k_rope_args args;
    memset(&args, 0, sizeof args);
    rocq__job_turn(job, &p->rope, p->pos, p->k->ne[0], &args);
    rocq__k_stream(&args, p->k_cache, p->k, false, true);
    rocq__k_stream(&args, p->v_cache, p->v, true, true);
    if (p->q) rocq__k_stream(&args, p->q, p->q, false, false);
    args.cell = (const int32_t *)rocq__device_data(p->cell ? p->cell : p->pos);
    args.n_cells = (int32_t)p->k_cache->ne[2];
    rocq__job_rope_launch(job, &args);
}

// -- activate, glu, add, mul, scale, cast --

static void rocq__job_map(rocq__job *job, const void *params) {
    rocq__job_map_launch(job, job->op, params);
}

static void rocq__job_cast(rocq__job *job, const void *params) {
    const rocq_cast_params *p = (const rocq_cast_params *)params;
    rocq__job_convert(job, p->y, p->x);
}

// -- softmax, gather, argmax, sample --

static void rocq__job_softmax(rocq__job *job, const void *params) {
    const rocq_softmax_params *p = (const rocq_softmax_params *)params;
    rocq_k_softmax_args args;
    memset(&args, 0, sizeof args);
    args.y = rocq__k_tensor(p->y);
    args.x = rocq__k_tensor(p->x);
    args.mask = rocq__k_tensor(p->mask);
    args.scale = p->scale != 0.0f ? p->scale : 1.0f;
    rocq__job_row(job, p->x->ne[0]);
    job->cost.bytes += 4.0 * (double)rocq_tensor_count(p->x); // read once for the sum as well
    rocq__job_launch(job, ROCQ_K_softmax, rocq__n_rows(p->x), 1, rocq__row_threads(p->x->ne[0]),
                     &args);
}

static void rocq__job_gather(rocq__job *job, const void *params) {
    const rocq_gather_params *p = (const rocq_gather_params *)params;
    rocq__job_decode(job, p->y, p->table, p->ids, p->scale != 0.0f ? p->scale : 1.0f);
}

static void rocq__job_argmax(rocq__job *job, const void *params) {
    const rocq_argmax_params *p = (const rocq_argmax_params *)params;
    rocq_k_argmax_args args;
    memset(&args, 0, sizeof args);
    args.index = (int32_t *)rocq__device_data(p->index);
    args.x = rocq__k_tensor(p->x);
    rocq__job_row(job, p->x->ne[0]);
    const int threads = p->x->ne[0] > 8192 ? 1024 : rocq__row_threads(p->x->ne[0]);
    rocq__job_launch(job, ROCQ_K_argmax, p->x->ne[1], 1, threads, &args);
}

static void rocq__job_sample(rocq__job *job, const void *params) {
    const rocq_sample_params *p = (const rocq_sample_params *)params;
    const int64_t n = p->logits->ne[0];
    const rocq_tensor work = rocq__job_tensor(job, ROCQ_F32, ROCQ_LAYOUT_GGUF, p->logits->ne, n);
    const double draw = rocq__uniform(p->seed, p->step);
    rocq_k_sample_args args;
    rocq__job_row(job, n);
    memset(&args, 0, sizeof args);
    args.token = (int32_t *)rocq__device_data(p->token);
    args.prob = (float *)rocq__device_data(p->prob);
    args.logits = (const float *)rocq__device_data(p->logits);
    args.recent = (const int32_t *)rocq__device_data(p->recent);
    args.allowed = (const int32_t *)rocq__device_data(p->allowed);
    args.work = (float *)rocq__device_data(&work);
    args.n_vocab = (int32_t)n;
    args.n_recent = p->recent ? (int32_t)p->recent->ne[0] : 0;
    args.temperature = p->temperature;
    args.top_k = p->top_k;
    args.top_p = p->top_p;
    args.min_p = p->min_p;
    args.repeat_penalty = p->repeat_penalty > 0.0f ? p->repeat_penalty : 1.0f;
    args.frequency_penalty = p->frequency_penalty;
    args.presence_penalty = p->presence_penalty;
    args.uniform_hi = (float)draw;
    args.uniform_lo = (float)(draw - (double)args.uniform_hi);
    rocq__job_launch(job, ROCQ_K_sample, 1, 1, 1024, &args);
}

// -- conv, norm_stats, resize, pixels --

// Whether eight neighbouring elements of any row of t can be read at once; t may be NULL.
static bool rocq__k_wide(const rocq_tensor *t) {
    if (!t) return true;
    const int64_t elem = rocq__bytes(t->format, 1);
    int64_t all = (int64_t)(uintptr_t)rocq__device_data(t);
    for (int d = 1; d < 4; d++) all |= t->ne[d] > 1 ? t->stride[d] * elem : 0;
    return t->ne[0] % 8 == 0 && all % 16 == 0;
}

// w as the kernels read it: F16 without gaps, 16-byte aligned.
static rocq_tensor rocq__conv_w(rocq__job *job, const rocq_tensor *w) {
    if (w->format == ROCQ_F16 && rocq_tensor_contiguous(w) &&
        (uintptr_t)rocq__device_data(w) % 16 == 0) {
        return *w;
    }
    const rocq_tensor halves = rocq__job_tensor(job, ROCQ_F16, ROCQ_LAYOUT_GGUF, w->ne, w->ne[0]);
    rocq__job_convert(job, &halves, w);
    return halves;
}

// Into how many splits K is divided, each a whole number of its `patches` (64 channels of a frame
// with all taps). Blocks run in rounds of as many as the chip holds, two a compute unit, and a round
// takes as long as one block needs for its patches. So splits help where the tiles of y alone would
// leave units idle. They cost a second launch and the merge of their sums, estimated as the time of
// one patch and of a quarter of one for each split, for every round of tiles.
static int32_t rocq__conv_splits(const rocq__chip *chip, int64_t tiles, int64_t patches) {
    const double full = (double)tiles / (2.0 * chip->n_units); // rounds of blocks without splits
    int32_t best = 1;
    double best_time = 0.0;
    for (int32_t n = 1; n <= 16 && n <= patches; n++) {
        const double rounds = ceil(full * n);
        const double merge = n > 1 ? (1.0 + 0.25 * n) * ROCQ__MAX(full, 1.0) : 0.0;
        const double time = rounds * ceil((double)patches / n) + merge;
        if (n > 1 && time >= best_time) continue;
        best = n;
        best_time = time;
    }
    return best;
}

static void rocq__conv_shape_args(rocq_k_conv_args *args, const rocq__conv_shape *s) {
    args->m = (int32_t)s->m;
    args->c = (int32_t)s->c;
    args->slices = (int32_t)((s->c + 63) / 64);
    args->kw = s->kw;
    args->kh = s->kh;
    args->kt = s->kt;
    args->stride = s->stride;
    args->pad_x = s->pad_x;
    args->pad_y = s->pad_y;
    args->past = s->past;
    args->upsample = s->upsample - 1;
    args->z_w = (int32_t)s->w;
    args->z_h = (int32_t)s->h;
    args->patch_w = ROCQ_K_CONV_W + s->kw - 1;
    args->patch_n = args->patch_w * (ROCQ_K_CONV_H + s->kh - 1);
    args->halo = s->stride == 1 && args->patch_n <= ROCQ_K_CONV_PATCH;
    if (!args->halo) {
        args->patch_w = ROCQ_K_CONV_W;
        args->patch_n = ROCQ_K_CONV_W * ROCQ_K_CONV_H;
    }
    args->patch_w_inverse = 65536 / args->patch_w + 1;
}

// Whether x is normalised and activated once, by a launch of conv_input, and not by every block of
// conv while it loads x. The launch costs the bytes of reading x and writing the result in F16. The
// blocks spend about 13 instructions on each element that they load, and load an element several
// times: patches overlap (by 1.4 with a halo), and each tile of output channels has its own.
static bool rocq__conv_pass(const rocq__chip *chip, const rocq_conv_params *p,
                            const rocq_k_conv_args *args) {
    const bool common = p->x_activation == ROCQ_ACT_IDENTITY || p->x_activation == ROCQ_ACT_SILU ||
                        p->x_activation == ROCQ_ACT_RELU;
    if (!args->x_wide || !common) return false;
    if (!p->stats && p->x_activation == ROCQ_ACT_IDENTITY) return false;
    const double patches = (args->halo ? 1.4 : (double)args->kw * args->kh) * args->tiles_m *
                           (1 << 2 * args->upsample) * args->kt / (args->stride * args->stride);
    const double loading = 13.0 * patches / (0.5 * chip->flops_per_us);
    return (double)rocq__bytes(p->x->format, 1) + 2.0 < loading * chip->bytes_per_us;
}

// x after the pass, F16 without gaps; args are then those of a conv of that.
static void rocq__job_conv_input(rocq__job *job, const rocq_conv_params *p,
                                 rocq_k_conv_args *args) {
    const rocq_tensor z = rocq__job_tensor(job, ROCQ_F16, ROCQ_LAYOUT_GGUF, p->x->ne, p->x->ne[0]);
    rocq_k_conv_args pass = *args;
    pass.y = rocq__k_tensor(&z);
    const int64_t fours = (p->x->ne[1] * p->x->ne[2] + 3) / 4, threads = p->x->ne[0] / 8 * fours;
    rocq__job_launch(job, ROCQ_K_conv_input, (threads + 255) / 256, p->x->ne[3], 256, &pass);
    args->x = pass.y;
    args->stats = rocq__k_tensor(NULL);
    args->norm_weight = args->norm_bias = NULL;
    args->x_activation = ROCQ_ACT_IDENTITY;
    args->x_scale = 1.0f;
}

static void rocq__job_conv(rocq__job *job, const void *params) {
    const rocq_conv_params *p = (const rocq_conv_params *)params;
    const rocq__conv_shape s = rocq__conv_shape_of(p);
    const rocq_precision asked = rocq__asked(job->ctx, p->precision);
    if (asked == ROCQ_PRECISION_F32 || asked == ROCQ_PRECISION_INT8) {
        job->result = rocq__fail(job->ctx, ROCQ_E_UNSUPPORTED,
                                 "conv: %s is asked for, the GPU computes in F16",
                                 asked == ROCQ_PRECISION_F32 ? "F32" : "INT8");
        return;
    }
    if (s.k > ROCQ__MATMUL_K || s.m > INT32_MAX / 2 || s.w > INT32_MAX / 4 || s.h > INT32_MAX / 4) {
        job->result =
            rocq__fail(job->ctx, ROCQ_E_UNSUPPORTED, "conv: a shape too large for the GPU");
        return;
    }
    const rocq__cost cost = job->cost;
    const rocq_tensor w = rocq__conv_w(job, p->w);
    rocq_k_conv_args args;
    memset(&args, 0, sizeof args);
    rocq__conv_shape_args(&args, &s);
    args.w = rocq__device_data(&w);
    args.y = rocq__k_tensor(p->y);
    args.x = rocq__k_tensor(p->x);
    args.residual = rocq__k_tensor(p->residual);
    args.stats = rocq__k_tensor(p->stats);
    args.bias = (const float *)rocq__device_data(p->bias);
    args.norm_weight = (const float *)rocq__device_data(p->norm_weight);
    args.norm_bias = (const float *)rocq__device_data(p->norm_bias);
    args.group = p->stats && p->stats->ne[0] == 2 ? (int32_t)(s.c / p->stats->ne[1]) : 1;
    args.x_wide = rocq__k_wide(p->x);
    args.w_wide = s.c % 8 == 0;
    args.y_wide = rocq__k_wide(p->y) && rocq__k_wide(p->residual) && rocq__k_wide(p->bias);
    args.x_activation = (int32_t)p->x_activation;
    args.activation = (int32_t)p->activation;
    args.x_scale = p->x_scale > 0.0f ? p->x_scale : 1.0f;
    args.y_scale = 1.0f / args.x_scale;
    const int64_t tile_m = s.m > 64 ? 128 : s.m > 16 ? 64 : 16;
    const int64_t frames = p->y->ne[3];
    args.tiles_m = (int32_t)((s.m + tile_m - 1) / tile_m);
    args.tiles_x = (int32_t)((p->y->ne[1] + ROCQ_K_CONV_W - 1) / ROCQ_K_CONV_W);
    args.tiles_y = (int32_t)((p->y->ne[2] + ROCQ_K_CONV_H - 1) / ROCQ_K_CONV_H);
    const double all = (double)args.tiles_m * args.tiles_x * args.tiles_y * 16.0;
    if (all > INT32_MAX) {
        job->result =
            rocq__fail(job->ctx, ROCQ_E_UNSUPPORTED, "conv: a shape too large for the GPU");
        return;
    }
    const bool pass = rocq__conv_pass(rocq__chip_of(job->ctx), p, &args);
    if (pass) rocq__job_conv_input(job, p, &args);
    const int64_t tiles = (int64_t)args.tiles_m * args.tiles_x * args.tiles_y;
    // By the tiles of one frame: a video's chunks then have the bits of the whole.
    args.n_splits =
        rocq__conv_splits(rocq__chip_of(job->ctx), tiles, (int64_t)args.kt * args.slices);
    if (args.n_splits > 1) {
        const int64_t ne[4] = {s.m, args.n_splits, p->y->ne[1] * p->y->ne[2], frames};
        const rocq_tensor work = rocq__job_tensor(job, ROCQ_F32, ROCQ_LAYOUT_GGUF, ne, s.m);
        args.work = (float *)rocq__device_data(&work);
    }
    job->cost = cost;
    const int kernel = (tile_m == 128  ? ROCQ_K_conv_f32_128
                        : tile_m == 64 ? ROCQ_K_conv_f32_64
                                       : ROCQ_K_conv_f32_16) +
                       (pass || p->x->format != ROCQ_F32);
    rocq__job_launch(job, kernel, tiles * args.n_splits, frames, 128, &args);
    if (args.n_splits == 1) return;
    const double sums = (double)rocq_tensor_count(p->y) * args.n_splits;
    const rocq__cost merge = {4.0 * sums, sums, 0.0};
    job->cost = merge;
    rocq__job_launch(job, ROCQ_K_conv_merge, rocq__item_blocks(job, p->y, s.m, 8), 1, 256, &args);
}

static void rocq__job_norm_stats(rocq__job *job, const void *params) {
    const rocq_norm_stats_params *p = (const rocq_norm_stats_params *)params;
    const rocq_tensor *x = p->x;
    rocq_k_norm_stats_args args;
    memset(&args, 0, sizeof args);
    args.x = rocq__k_tensor(x);
    args.stats = rocq__k_tensor(p->stats);
    args.moments = rocq__k_tensor(p->moments);
    args.first = p->first;
    args.eps = p->eps > 0.0f ? p->eps : 1e-6f;
    rocq__job_row(job, x->ne[0]);
    if (p->stats && p->stats->ne[0] == 1) {
        const int64_t eights = (rocq__n_rows(x) + 7) / 8;
        rocq__job_launch(job, ROCQ_K_norm_stats_positions, eights, 1, 256, &args);
        return;
    }
    const int64_t groups = (p->stats ? p->stats : p->moments)->ne[1];
    const int64_t positions = x->ne[1] * x->ne[2], blocks = (x->ne[0] + 255) / 256;
    const int64_t at_once = 256 / ((ROCQ__MIN(x->ne[0], (int64_t)256) + 7) / 8); // positions
    const int64_t units = rocq__chip_of(job->ctx)->n_units;
    if (positions > INT32_MAX) {
        job->result = rocq__fail(job->ctx, ROCQ_E_UNSUPPORTED,
                                 "norm_stats: a frame of %lld positions", (long long)positions);
        return;
    }
    // Enough to fill the chip if a thread then has 16 elements, and no more than it may add up.
    int64_t shares = ROCQ__MIN(4 * units, (positions + 16 * at_once - 1) / (16 * at_once));
    shares = ROCQ__MAX(shares, (positions + ROCQ_K_STATS_RUN * at_once - 1) /
                                   (ROCQ_K_STATS_RUN * at_once));
    args.n_shares = (int32_t)ROCQ__MAX(shares, (int64_t)1);
    args.group = (int32_t)(x->ne[0] / groups);
    args.packed = x->ne[2] == 1 || x->stride[2] == x->ne[1] * x->stride[1];
    args.wide = rocq__k_wide(x);
    const int64_t ne[4] = {2 * x->ne[0], args.n_shares, x->ne[3], 1};
    const rocq_tensor work = rocq__job_tensor(job, ROCQ_F32, ROCQ_LAYOUT_GGUF, ne, ne[0]);
    args.work = (float *)rocq__device_data(&work);
    rocq__job_launch(job, ROCQ_K_norm_stats, blocks * args.n_shares, x->ne[3], 256, &args);
    rocq__job_launch(job, ROCQ_K_norm_stats_merge, groups, x->ne[3], 256, &args);
}

static void rocq__job_resize(rocq__job *job, const void *params) {
    const rocq_resize_params *p = (const rocq_resize_params *)params;
    rocq_k_resize_args args;
    memset(&args, 0, sizeof args);
    args.y = rocq__k_tensor(p->y);
    args.x = rocq__k_tensor(p->x);
    args.bilinear = p->mode == ROCQ_RESIZE_BILINEAR;
    rocq__job_row(job, p->y->ne[0]);
    rocq__job_launch(job, ROCQ_K_resize, rocq__item_blocks(job, p->y, p->y->ne[0], 4), 1, 256,
                     &args);
}

static void rocq__job_pixels(rocq__job *job, const void *params) {
    const rocq_pixels_params *p = (const rocq_pixels_params *)params;
    rocq_k_pixels_args args;
    memset(&args, 0, sizeof args);
    args.y = rocq__k_tensor(p->y);
    args.x = rocq__k_tensor(p->x);
    args.scale = p->scale != 0.0f ? p->scale : 1.0f;
    args.bias = p->bias;
    args.srgb = p->srgb;
    rocq__job_launch(job, ROCQ_K_pixels, rocq__item_blocks(job, p->y, 1, 1), 1, 256, &args);
}

// -- choices: by rule, or what was found --

static rocq_launch_config rocq__rule_of(const rocq__chip *chip, const rocq__site *s) {
    return s->kind == ROCQ__KIND_MATVEC  ? rocq__rule_matvec(chip, s)
           : s->kind == ROCQ__KIND_TILES ? rocq__rule_tiles(chip, s)
                                    : rocq__rule_attention(chip, s);
}

// What rocq_tune found for a class of sites; config is all 0 where nothing beats the rule.
typedef struct rocq__tuned {
    rocq__site site;
    rocq_launch_config config;
    int32_t zero; // in place of padding: a list of these is written to files as it is
    int64_t default_ns, best_ns;
} rocq__tuned;

// The class of a site: all sites of a class share one tuned configuration. It is the site with its
// n rounded up, but for a matvec: up to 1024 columns of tiles to a multiple of the narrow tile's,
// more columns and attention's positions to a power of two.
static rocq__site rocq__site_class(const rocq__site *site) {
    rocq__site s = *site;
    int64_t n = ROCQ_K_MATMUL_F16_N_FEW;
    if (s.kind == ROCQ__KIND_TILES && s.n <= 1024) {
        n = ((int64_t)s.n + n - 1) / n * n;
        s.n = (int32_t)n;
    } else if (s.kind != ROCQ__KIND_MATVEC) {
        while (n < s.n) n *= 2;
        s.n = rocq__clamp32(n);
    }
    return s;
}

// Index of the class in the sorted list, or where it would be inserted.
static int32_t rocq__tuned_place(const rocq_ctx *ctx, const rocq__site *site, bool *found) {
    int32_t begin = 0, end = ctx->n_tuned;
    *found = false;
    while (begin < end) {
        const int32_t middle = begin + (end - begin) / 2;
        const int order = memcmp(&ctx->tuned[middle].site, site, sizeof *site);
        if (order < 0) begin = middle + 1;
        else end = middle;
        if (order == 0) *found = true;
    }
    return begin;
}

static bool rocq__is_rule(const rocq_launch_config *config) {
    return config->k_waves == 0 && config->tile_n == 0 && config->n_splits == 0;
}

static void rocq__survey_add(rocq__survey *survey, const rocq__site *site,
                             const rocq_launch_config *config) {
    const rocq__site own = rocq__site_class(site);
    for (int32_t i = 0; i < survey->n; i++) {
        const rocq__site other = rocq__site_class(&survey->site[i]);
        if (memcmp(&own, &other, sizeof own) == 0) return;
    }
    if (survey->n == 0) survey->config = *config;
    if (survey->n < ROCQ__SURVEY) survey->site[survey->n++] = *site;
}

static rocq_launch_config rocq__config_for(rocq_ctx *ctx, const rocq__site *site) {
    rocq_launch_config config = rocq__rule_of(rocq__chip_of(ctx), site);
    if (ctx->n_tuned > 0) {
        bool found;
        const rocq__site own = rocq__site_class(site);
        const int32_t place = rocq__tuned_place(ctx, &own, &found);
        if (found && !rocq__is_rule(&ctx->tuned[place].config)) config = ctx->tuned[place].config;
    }
    if (ctx->survey) rocq__survey_add(ctx->survey, site, &config);
    return config;
}

// ---------------------------------------------------------------------------------------------
// >>check: what every op demands of its params, on any backend
// ---------------------------------------------------------------------------------------------
// An op's params are checked before it runs or is recorded, in every build: no argument can make it
// reach outside a tensor. In order: formats and single operands, the table of all operands, each
// op's own rules, overlap, and what an op costs.

// Flags that say what an operand may be.
enum {
    ROCQ__BIT_F32 = 1,
    ROCQ__BIT_F16 = 2,
    ROCQ__BIT_BF16 = 4,
    ROCQ__BIT_Q8_0 = 8,
    ROCQ__BIT_Q4_0 = 16,
    ROCQ__BIT_I32 = 32,
    ROCQ__ANY = 64, // all of ROCQ_FORMATS
    ROCQ__OPTIONAL = 128, ROCQ__OUTPUT = 256,
    ROCQ__PLANAR = 512, // on a GPU, block formats may also be in the planar layout
    ROCQ__BIT_I8 = 1024,
    ROCQ__FLOAT = ROCQ__BIT_F32 | ROCQ__BIT_F16,
    ROCQ__PLAIN = ROCQ__BIT_F32 | ROCQ__BIT_F16 | ROCQ__BIT_BF16,
    ROCQ__KV = ROCQ__BIT_F32 | ROCQ__BIT_F16 | ROCQ__BIT_BF16 | ROCQ__BIT_Q8_0 | ROCQ__BIT_Q4_0
};

static bool rocq__accepts(int accept, rocq_format format) {
    switch (format) {
    case ROCQ_F32: return (accept & (ROCQ__BIT_F32 | ROCQ__ANY)) != 0;
    case ROCQ_F16: return (accept & (ROCQ__BIT_F16 | ROCQ__ANY)) != 0;
    case ROCQ_BF16: return (accept & (ROCQ__BIT_BF16 | ROCQ__ANY)) != 0;
    case ROCQ_Q8_0: return (accept & (ROCQ__BIT_Q8_0 | ROCQ__ANY)) != 0;
    case ROCQ_Q4_0: return (accept & (ROCQ__BIT_Q4_0 | ROCQ__ANY)) != 0;
    case ROCQ_I8: return (accept & ROCQ__BIT_I8) != 0;
    case ROCQ_I32: return (accept & ROCQ__BIT_I32) != 0;
    default: return (accept & ROCQ__ANY) != 0;
    }
}

// Fails unless the format is known and accepted; gives the elements and bytes of its blocks.
static rocq_result rocq__check_format(rocq_ctx *ctx, const char *op, const char *name, int accept,
                                      rocq_format format, int64_t *elems, int64_t *bytes) {
    if (rocq__block_of(format, elems, bytes) && rocq__accepts(accept, format)) return ROCQ_OK;
    const rocq_format_info *info = rocq_get_format_info(format);
    return rocq__fail(ctx, ROCQ_E_FORMAT, "%s: %s cannot be in format %s (%d)", op, name,
                      info ? info->name : "unknown", (int)format);
}

// Whether elements of a tensor may share memory, as those of an output must not. They do not if,
// going through the dimensions by rising stride, each stride steps over all that lies before it.
static bool rocq__self_overlap(const rocq_tensor *t) {
    int64_t reach = t->ne[0];
    bool used[4] = {true, false, false, false};
    for (int round = 1; round < 4; round++) {
        int next = 0;
        for (int d = 1; d < 4; d++) {
            if (!used[d] && (next == 0 || t->stride[d] < t->stride[next])) next = d;
        }
        used[next] = true;
        if (t->ne[next] == 1) continue;
        if (t->stride[next] < reach) return true;
        reach += (t->ne[next] - 1) * t->stride[next];
    }
    return false;
}

// Address of element 0, on the host or the device.
static uint64_t rocq__address(const rocq_tensor *t) {
    return (t->buffer.host ? (uint64_t)(uintptr_t)t->buffer.host : t->buffer.device.address) +
           (uint64_t)t->offset;
}

// Checks one operand: that it is present (unless optional), of an accepted format, of whole blocks,
// inside its buffer, and aligned. Without a context (rocq_kv_size) any kind of memory is accepted.
static rocq_result rocq__check_tensor(rocq_ctx *ctx, const char *op, const char *name,
                                      const rocq_tensor *t, int accept) {
    int64_t elems, bytes, extent;
    if (!t) {
        if (accept & ROCQ__OPTIONAL) return ROCQ_OK;
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "%s: %s is NULL", op, name);
    }
    const bool on_gpu = ctx ? rocq__on_gpu(ctx) : !t->buffer.host;
    ROCQ__TRY(rocq__check_format(ctx, op, name, accept, t->format, &elems, &bytes));
    if (t->layout != ROCQ_LAYOUT_GGUF && t->layout != ROCQ_LAYOUT_PLANAR) {
        return rocq__fail(ctx, ROCQ_E_FORMAT, "%s: %s has unknown layout %d", op, name,
                          (int)t->layout);
    }
    for (int d = 0; d < 4; d++) {
        if (t->ne[d] < 1 || t->stride[d] < 0 || (d > 0 && t->stride[d] % elems != 0)) {
            return rocq__fail(ctx, ROCQ_E_SHAPE,
                              "%s: %s has %lld elements, stride %lld in dimension %d", op, name,
                              (long long)t->ne[d], (long long)t->stride[d], d);
        }
    }
    if (t->stride[0] != 1 || t->ne[0] % elems != 0) {
        return rocq__fail(ctx, ROCQ_E_SHAPE,
                          "%s: rows of %s must be whole blocks of %d adjacent elements", op, name,
                          (int)elems);
    }
    // The extent leaves out the stride of a dimension of size 1, but ops turn that into bytes as
    // well, of up to 8 rows at once, and must not overflow.
    bool fits = rocq__extent(t, &extent);
    for (int d = 1; d < 4; d++) fits = fits && t->stride[d] <= INT64_MAX / 64;
    if (!fits) return rocq__fail(ctx, ROCQ_E_OVERFLOW, "%s: size of %s overflows", op, name);
    if (on_gpu ? t->buffer.host || !t->buffer.device.address
               : !t->buffer.host || t->buffer.device.address) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "%s: %s has no memory on the %s", op, name,
                          on_gpu ? "GPU" : "CPU");
    }
    if (t->offset < 0 || t->offset > t->buffer.size || extent > t->buffer.size - t->offset) {
        return rocq__fail(ctx, ROCQ_E_BOUNDS,
                          "%s: %s needs %lld bytes at %lld, its buffer has %lld", op, name,
                          (long long)extent, (long long)t->offset, (long long)t->buffer.size);
    }
    int64_t align = rocq__alignment_of(t->format);
    if (on_gpu) {
        if (t->buffer.device.address > UINT64_MAX - (uint64_t)t->buffer.size) {
            return rocq__fail(ctx, ROCQ_E_OVERFLOW, "%s: buffer of %s ends past the address space",
                              op, name);
        }
        for (int d = 0; d < 4; d++) {
            if (t->ne[d] > INT32_MAX) {
                return rocq__fail(ctx, ROCQ_E_UNSUPPORTED,
                                  "%s: %s has %lld elements in dimension %d", op, name,
                                  (long long)t->ne[d], d);
            }
        }
    }
    if (t->layout == ROCQ_LAYOUT_PLANAR) {
        if (!on_gpu || !(accept & ROCQ__PLANAR) || elems == 1) {
            return rocq__fail(ctx, ROCQ_E_UNSUPPORTED, "%s: %s cannot be planar%s", op, name,
                              on_gpu ? "" : " on the CPU");
        }
        if (!rocq_tensor_contiguous(t)) {
            return rocq__fail(ctx, ROCQ_E_SHAPE, "%s: %s is planar and has gaps", op, name);
        }
        align = 16;
    }
    if ((rocq__address(t) & (uint64_t)(align - 1)) != 0) {
        return rocq__fail(ctx, ROCQ_E_ALIGNMENT, "%s: %s must start at a multiple of %d bytes", op,
                          name, (int)align);
    }
    if ((accept & ROCQ__OUTPUT) && rocq__self_overlap(t)) {
        return rocq__fail(ctx, ROCQ_E_SHAPE, "%s: rows of %s overlap", op, name);
    }
    return ROCQ_OK;
}

// -- operands --

// The table of all tensors in the params of all ops, in the order of ROCQ_OPS. It says which
// formats an operand may have, which tensors a copy of the params has to copy, and, by the role,
// what may overlap (rocq__check_overlap). An IN_PLACE operand may be the op's first output itself.
// An INDEX operand holds integers that say where the op reads or writes. A KEPT operand is an input
// that is too large to be saved, or does not change from step to step: weights, tables, and the
// cache that attention reads. The check of a replay leaves it as it is.
enum { ROCQ__IN, ROCQ__IN_PLACE, ROCQ__INDEX, ROCQ__KEPT, ROCQ__OUT };
enum { ROCQ__MAX_OPERANDS = 7 * ROCQ__MOST_PRODUCTS }; // of one op; the most a matmul chain has

typedef struct rocq__operand {
    int32_t op, role, accept;
    size_t offset; // of the pointer in the params
    const char *name;
} rocq__operand;

static const rocq__operand rocq__operands[] = {
#define ROCQ_X(NAME, params, role, field, accept) \
    {ROCQ_OP_##NAME, ROCQ__##role, accept, offsetof(params, field), #field},
    ROCQ_X(MATMUL, rocq_matmul_params, OUT, y, ROCQ__FLOAT | ROCQ__BIT_Q8_0 | ROCQ__PLANAR)
    ROCQ_X(MATMUL, rocq_matmul_params, KEPT, w, ROCQ__ANY | ROCQ__PLANAR)
    ROCQ_X(MATMUL, rocq_matmul_params, KEPT, w2, ROCQ__ANY | ROCQ__PLANAR | ROCQ__OPTIONAL)
    ROCQ_X(MATMUL, rocq_matmul_params, IN, x, ROCQ__FLOAT | ROCQ__BIT_Q8_0 | ROCQ__PLANAR)
    ROCQ_X(MATMUL, rocq_matmul_params, KEPT, bias, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(MATMUL, rocq_matmul_params, IN_PLACE, gate, ROCQ__FLOAT | ROCQ__OPTIONAL)
    ROCQ_X(MATMUL, rocq_matmul_params, IN_PLACE, residual, ROCQ__FLOAT | ROCQ__OPTIONAL)
    ROCQ_X(ATTENTION, rocq_attention_params, OUT, out, ROCQ__FLOAT | ROCQ__BIT_Q8_0 | ROCQ__PLANAR)
    ROCQ_X(ATTENTION, rocq_attention_params, IN_PLACE, q, ROCQ__FLOAT)
    ROCQ_X(ATTENTION, rocq_attention_params, KEPT, k, ROCQ__KV)
    ROCQ_X(ATTENTION, rocq_attention_params, KEPT, v, ROCQ__KV)
    ROCQ_X(ATTENTION, rocq_attention_params, IN, mask, ROCQ__FLOAT | ROCQ__OPTIONAL)
    ROCQ_X(ATTENTION, rocq_attention_params, KEPT, sinks, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(ATTENTION, rocq_attention_params, INDEX, kv_len, ROCQ__BIT_I32 | ROCQ__OPTIONAL)
    ROCQ_X(ATTENTION, rocq_attention_params, INDEX, page_table, ROCQ__BIT_I32 | ROCQ__OPTIONAL)
    ROCQ_X(RMSNORM, rocq_norm_params, OUT, y, ROCQ__FLOAT | ROCQ__BIT_Q8_0 | ROCQ__PLANAR)
    ROCQ_X(RMSNORM, rocq_norm_params, IN_PLACE, x, ROCQ__FLOAT)
    ROCQ_X(RMSNORM, rocq_norm_params, KEPT, weight, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(RMSNORM, rocq_norm_params, OUT, rstd, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(LAYERNORM, rocq_norm_params, OUT, y, ROCQ__FLOAT | ROCQ__BIT_Q8_0 | ROCQ__PLANAR)
    ROCQ_X(LAYERNORM, rocq_norm_params, IN_PLACE, x, ROCQ__FLOAT)
    ROCQ_X(LAYERNORM, rocq_norm_params, KEPT, weight, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(LAYERNORM, rocq_norm_params, KEPT, bias, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(LAYERNORM, rocq_norm_params, OUT, mean, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(LAYERNORM, rocq_norm_params, OUT, rstd, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(ROPE, rocq_rope_params, OUT, y, ROCQ__FLOAT)
    ROCQ_X(ROPE, rocq_rope_params, IN_PLACE, x, ROCQ__FLOAT)
    ROCQ_X(ROPE, rocq_rope_params, INDEX, pos, ROCQ__BIT_I32)
    ROCQ_X(ROPE, rocq_rope_params, KEPT, rope.freq_factors, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(ROPE_APPEND, rocq_rope_append_params, OUT, q, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(ROPE_APPEND, rocq_rope_append_params, OUT, k_cache, ROCQ__KV)
    ROCQ_X(ROPE_APPEND, rocq_rope_append_params, OUT, v_cache, ROCQ__KV)
    ROCQ_X(ROPE_APPEND, rocq_rope_append_params, IN, k, ROCQ__BIT_F32)
    ROCQ_X(ROPE_APPEND, rocq_rope_append_params, IN, v, ROCQ__BIT_F32)
    ROCQ_X(ROPE_APPEND, rocq_rope_append_params, INDEX, pos, ROCQ__BIT_I32)
    ROCQ_X(ROPE_APPEND, rocq_rope_append_params, INDEX, cell, ROCQ__BIT_I32 | ROCQ__OPTIONAL)
    ROCQ_X(ROPE_APPEND, rocq_rope_append_params, KEPT, rope.freq_factors,
           ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(ACTIVATE, rocq_activate_params, OUT, y, ROCQ__FLOAT)
    ROCQ_X(ACTIVATE, rocq_activate_params, IN_PLACE, x, ROCQ__FLOAT)
    ROCQ_X(GLU, rocq_glu_params, OUT, y, ROCQ__FLOAT | ROCQ__BIT_Q8_0 | ROCQ__PLANAR)
    ROCQ_X(GLU, rocq_glu_params, IN_PLACE, gate, ROCQ__FLOAT)
    ROCQ_X(GLU, rocq_glu_params, IN_PLACE, up, ROCQ__FLOAT)
    ROCQ_X(ADD, rocq_binary_params, OUT, y, ROCQ__FLOAT)
    ROCQ_X(ADD, rocq_binary_params, IN_PLACE, a, ROCQ__FLOAT)
    ROCQ_X(ADD, rocq_binary_params, IN_PLACE, b, ROCQ__FLOAT)
    ROCQ_X(MUL, rocq_binary_params, OUT, y, ROCQ__FLOAT)
    ROCQ_X(MUL, rocq_binary_params, IN_PLACE, a, ROCQ__FLOAT)
    ROCQ_X(MUL, rocq_binary_params, IN_PLACE, b, ROCQ__FLOAT)
    ROCQ_X(SCALE, rocq_scale_params, OUT, y, ROCQ__FLOAT)
    ROCQ_X(SCALE, rocq_scale_params, IN_PLACE, x, ROCQ__FLOAT)
    ROCQ_X(CAST, rocq_cast_params, OUT, y, ROCQ__ANY | ROCQ__BIT_I32 | ROCQ__PLANAR)
    ROCQ_X(CAST, rocq_cast_params, IN_PLACE, x, ROCQ__ANY | ROCQ__BIT_I32 | ROCQ__PLANAR)
    ROCQ_X(SOFTMAX, rocq_softmax_params, OUT, y, ROCQ__BIT_F32)
    ROCQ_X(SOFTMAX, rocq_softmax_params, IN_PLACE, x, ROCQ__BIT_F32)
    ROCQ_X(SOFTMAX, rocq_softmax_params, IN, mask, ROCQ__FLOAT | ROCQ__OPTIONAL)
    ROCQ_X(GATHER, rocq_gather_params, OUT, y, ROCQ__FLOAT)
    ROCQ_X(GATHER, rocq_gather_params, KEPT, table, ROCQ__ANY | ROCQ__PLANAR)
    ROCQ_X(GATHER, rocq_gather_params, INDEX, ids, ROCQ__BIT_I32)
    ROCQ_X(ARGMAX, rocq_argmax_params, OUT, index, ROCQ__BIT_I32)
    ROCQ_X(ARGMAX, rocq_argmax_params, IN, x, ROCQ__BIT_F32)
    ROCQ_X(SAMPLE, rocq_sample_params, OUT, token, ROCQ__BIT_I32)
    ROCQ_X(SAMPLE, rocq_sample_params, OUT, prob, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(SAMPLE, rocq_sample_params, IN, logits, ROCQ__BIT_F32)
    ROCQ_X(SAMPLE, rocq_sample_params, INDEX, recent, ROCQ__BIT_I32 | ROCQ__OPTIONAL)
    ROCQ_X(SAMPLE, rocq_sample_params, INDEX, allowed, ROCQ__BIT_I32 | ROCQ__OPTIONAL)
    ROCQ_X(CONV, rocq_conv_params, OUT, y, ROCQ__PLAIN)
    ROCQ_X(CONV, rocq_conv_params, KEPT, w, ROCQ__ANY | ROCQ__PLANAR)
    ROCQ_X(CONV, rocq_conv_params, IN, x, ROCQ__PLAIN)
    ROCQ_X(CONV, rocq_conv_params, KEPT, bias, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(CONV, rocq_conv_params, IN_PLACE, residual, ROCQ__PLAIN | ROCQ__OPTIONAL)
    ROCQ_X(CONV, rocq_conv_params, IN, stats, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(CONV, rocq_conv_params, KEPT, norm_weight, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(CONV, rocq_conv_params, KEPT, norm_bias, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(NORM_STATS, rocq_norm_stats_params, OUT, stats, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(NORM_STATS, rocq_norm_stats_params, OUT, moments, ROCQ__BIT_F32 | ROCQ__OPTIONAL)
    ROCQ_X(NORM_STATS, rocq_norm_stats_params, IN, x, ROCQ__PLAIN)
    ROCQ_X(RESIZE, rocq_resize_params, OUT, y, ROCQ__PLAIN)
    ROCQ_X(RESIZE, rocq_resize_params, IN, x, ROCQ__PLAIN)
    ROCQ_X(PIXELS, rocq_pixels_params, OUT, y, ROCQ__BIT_I8)
    ROCQ_X(PIXELS, rocq_pixels_params, IN, x, ROCQ__PLAIN)
#undef ROCQ_X
};
enum { ROCQ__N_OPERANDS = (int)(sizeof rocq__operands / sizeof rocq__operands[0]) };

static const rocq_tensor *rocq__operand_of(const void *params, const rocq__operand *operand) {
    const rocq_tensor *t;
    memcpy(&t, (const char *)params + operand->offset, sizeof t);
    return t;
}

// The index of op's first operand; *end is one past its last.
static int32_t rocq__operands_begin(rocq_op op, int32_t *end) {
    int32_t i = 0;
    while (rocq__operands[i].op != (int32_t)op) i++;
    for (*end = i; *end < ROCQ__N_OPERANDS && rocq__operands[*end].op == (int32_t)op;) ++*end;
    return i;
}

// The next params of a chain, or NULL. Only matmul has chains.
static const void *rocq__next_params(rocq_op op, const void *params) {
    return op == ROCQ_OP_MATMUL ? ((const rocq_matmul_params *)params)->next : NULL;
}

// Checks each operand of one params struct by itself.
static rocq_result rocq__check_operands(rocq_ctx *ctx, const char *op_name, rocq_op op,
                                        const void *params) {
    int32_t end;
    for (int32_t i = rocq__operands_begin(op, &end); i < end; i++) {
        const rocq__operand *o = &rocq__operands[i];
        const int accept = o->accept | (o->role == ROCQ__OUT ? ROCQ__OUTPUT : 0);
        ROCQ__TRY(rocq__check_tensor(ctx, op_name, o->name, rocq__operand_of(params, o), accept));
    }
    return ROCQ_OK;
}

// -- ops --
// The table rocq__ops has the function for each op, and op, its name in messages.

// Checks the sizes of an operand, unless it is NULL. -1: any size.
static rocq_result rocq__check_shape(rocq_ctx *ctx, const char *op, const char *name,
                                     const rocq_tensor *t, int64_t ne0, int64_t ne1, int64_t ne2,
                                     int64_t ne3) {
    const int64_t want[4] = {ne0, ne1, ne2, ne3};
    if (!t) return ROCQ_OK;
    for (int d = 0; d < 4; d++) {
        if (want[d] >= 0 && t->ne[d] != want[d]) {
            return rocq__fail(ctx, ROCQ_E_SHAPE,
                              "%s: %s has %lld elements in dimension %d, expected %lld", op, name,
                              (long long)t->ne[d], d, (long long)want[d]);
        }
    }
    return ROCQ_OK;
}

static rocq_result rocq__check_same(rocq_ctx *ctx, const char *op, const char *name,
                                    const rocq_tensor *t, const rocq_tensor *like) {
    return rocq__check_shape(ctx, op, name, t, like->ne[0], like->ne[1], like->ne[2], like->ne[3]);
}

// Checks the sizes of an operand that is repeated along dimensions in which it has size 1.
static rocq_result rocq__check_repeat(rocq_ctx *ctx, const char *op, const char *name,
                                      const rocq_tensor *t, const rocq_tensor *like) {
    if (!t) return ROCQ_OK;
    return rocq__check_shape(ctx, op, name, t, t->ne[0] == 1 ? 1 : like->ne[0],
                             t->ne[1] == 1 ? 1 : like->ne[1], t->ne[2] == 1 ? 1 : like->ne[2],
                             t->ne[3] == 1 ? 1 : like->ne[3]);
}

// Checks that a float option lies in a range; NaN does not.
static rocq_result rocq__check_range(rocq_ctx *ctx, const char *op, const char *name, float value,
                                     float low, float high) {
    if (value >= low && value <= high) return ROCQ_OK;
    return rocq__fail(ctx, ROCQ_E_ARGUMENT, "%s: %s is %g, expected %g to %g", op, name,
                      (double)value, (double)low, (double)high);
}

static rocq_result rocq__check_activation(rocq_ctx *ctx, const char *op,
                                          rocq_activation activation) {
    if ((int)activation >= (int)ROCQ_ACT_IDENTITY && activation <= ROCQ_ACT_TANH) return ROCQ_OK;
    return rocq__fail(ctx, ROCQ_E_ARGUMENT, "%s: unknown activation %d", op, (int)activation);
}

static rocq_result rocq__check_precision(rocq_ctx *ctx, const char *op, rocq_precision precision) {
    if ((int)precision >= 0 && precision <= ROCQ_PRECISION_INT8) return ROCQ_OK;
    return rocq__fail(ctx, ROCQ_E_ARGUMENT, "%s: unknown precision %d", op, (int)precision);
}

// The functions below check what an op demands beyond rocq__check_operands, which has run before.
// Each macro checks one field of p and gives a rocq_result.
#define ROCQ__SHAPE(name, ne0, ne1, ne2, ne3) \
    rocq__check_shape(ctx, op, #name, p->name, ne0, ne1, ne2, ne3)
#define ROCQ__SAME(name, like) rocq__check_same(ctx, op, #name, p->name, p->like)
#define ROCQ__REPEAT(name, like) rocq__check_repeat(ctx, op, #name, p->name, p->like)
#define ROCQ__RANGE(name, low, high) rocq__check_range(ctx, op, #name, p->name, low, high)

static rocq_result rocq__check_product(rocq_ctx *ctx, const char *op,
                                       const rocq_matmul_params *p) {
    ROCQ__TRY(rocq__check_operands(ctx, op, ROCQ_OP_MATMUL, p));
    ROCQ__TRY(ROCQ__SHAPE(x, p->w->ne[0], -1, -1, -1));
    ROCQ__TRY(ROCQ__SHAPE(y, p->w->ne[1], p->x->ne[1], p->x->ne[2], p->x->ne[3]));
    for (int d = 2; d < 4; d++) {
        if (p->x->ne[d] % p->w->ne[d] != 0) {
            return rocq__fail(ctx, ROCQ_E_SHAPE,
                              "matmul: batch %lld of w does not divide %lld of x",
                              (long long)p->w->ne[d], (long long)p->x->ne[d]);
        }
    }
    ROCQ__TRY(ROCQ__SAME(w2, w));
    ROCQ__TRY(ROCQ__SHAPE(bias, p->w->ne[1], 1, 1, 1));
    ROCQ__TRY(ROCQ__SAME(gate, y));
    ROCQ__TRY(ROCQ__SAME(residual, y));
    ROCQ__TRY(rocq__check_activation(ctx, op, p->activation));
    ROCQ__TRY(ROCQ__RANGE(softcap, 0.0f, FLT_MAX));
    ROCQ__TRY(rocq__check_precision(ctx, op, p->precision));
    for (int i = 0; i < 2; i++) {
        const rocq_tensor *w = i == 0 ? p->w : p->w2;
        if (!w || rocq__asked(ctx, p->precision) != ROCQ_PRECISION_INT8 ||
            rocq__is_coded(ROCQ_BACKEND_CPU, w->format)) {
            continue;
        }
        return rocq__fail(ctx, ROCQ_E_UNSUPPORTED, "matmul: format %s has no INT8 path",
                          rocq_format_name(w->format));
    }
    return ROCQ_OK;
}

// Whether both tensors have the same address, format, layout, sizes and strides.
static bool rocq__same_tensor(const rocq_tensor *a, const rocq_tensor *b) {
    if (rocq__address(a) != rocq__address(b) || a->format != b->format || a->layout != b->layout) {
        return false;
    }
    for (int d = 0; d < 4; d++) {
        if (a->ne[d] != b->ne[d] || (a->ne[d] > 1 && a->stride[d] != b->stride[d])) return false;
    }
    return true;
}

static rocq_result rocq__check_matmul(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_matmul_params *p = (const rocq_matmul_params *)params;
    int n = 0;
    for (const rocq_matmul_params *q = p; q; q = q->next) {
        if (++n > ROCQ__MOST_PRODUCTS) {
            return rocq__fail(ctx, ROCQ_E_ARGUMENT, "matmul: next chains more than %d products",
                              (int)ROCQ__MOST_PRODUCTS);
        }
        ROCQ__TRY(rocq__check_product(ctx, op, q));
        if (!rocq__same_tensor(q->x, p->x)) {
            return rocq__fail(ctx, ROCQ_E_ARGUMENT, "matmul: next product %d has another x", n - 1);
        }
    }
    return ROCQ_OK;
}

static rocq_result rocq__check_attention(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_attention_params *p = (const rocq_attention_params *)params;
    const int64_t head_dim = p->q->ne[0], n_heads = p->q->ne[1];
    const int64_t n_q = p->q->ne[2], n_seqs = p->q->ne[3];
    int64_t n_kv = p->k->ne[2];
    if (head_dim > 512) {
        return rocq__fail(ctx, ROCQ_E_UNSUPPORTED, "attention: head size %lld is over 512",
                          (long long)head_dim);
    }
    ROCQ__TRY(ROCQ__SAME(out, q));
    ROCQ__TRY(ROCQ__SHAPE(k, head_dim, -1, -1, p->page_table ? 1 : n_seqs));
    ROCQ__TRY(ROCQ__SAME(v, k));
    if (n_heads % p->k->ne[1] != 0) {
        return rocq__fail(ctx, ROCQ_E_SHAPE,
                          "attention: %lld heads are not a multiple of %lld KV heads",
                          (long long)n_heads, (long long)p->k->ne[1]);
    }
    if (p->page_table) {
        ROCQ__TRY(ROCQ__SHAPE(page_table, -1, n_seqs, 1, 1));
        if (p->page_size < 1 || !rocq__mul(p->page_table->ne[0], p->page_size, &n_kv)) {
            return rocq__fail(ctx, ROCQ_E_ARGUMENT, "attention: page_size is %d",
                              (int)p->page_size);
        }
    }
    if (n_kv > INT32_MAX) {
        return rocq__fail(ctx, ROCQ_E_OVERFLOW, "attention: %lld KV positions", (long long)n_kv);
    }
    ROCQ__TRY(ROCQ__SHAPE(kv_len, n_seqs, 1, 1, 1));
    ROCQ__TRY(ROCQ__SHAPE(sinks, n_heads, 1, 1, 1));
    if (p->mask) {
        ROCQ__TRY(ROCQ__SHAPE(mask, n_kv, n_q, p->mask->ne[2] == 1 ? 1 : n_heads,
                              p->mask->ne[3] == 1 ? 1 : n_seqs));
    }
    ROCQ__TRY(ROCQ__RANGE(scale, -FLT_MAX, FLT_MAX));
    ROCQ__TRY(ROCQ__RANGE(softcap, 0.0f, FLT_MAX));
    if (p->window < 0 || (p->window > 0 && !p->causal)) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                          "attention: window %d needs causal and cannot be negative",
                          (int)p->window);
    }
    return ROCQ_OK;
}

static rocq_result rocq__check_norm(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_norm_params *p = (const rocq_norm_params *)params;
    ROCQ__TRY(ROCQ__SAME(y, x));
    ROCQ__TRY(ROCQ__SHAPE(weight, p->x->ne[0], 1, 1, 1));
    ROCQ__TRY(ROCQ__SHAPE(bias, p->x->ne[0], 1, 1, 1));
    ROCQ__TRY(ROCQ__SHAPE(mean, p->x->ne[1], p->x->ne[2], p->x->ne[3], 1));
    ROCQ__TRY(ROCQ__SHAPE(rstd, p->x->ne[1], p->x->ne[2], p->x->ne[3], 1));
    return ROCQ__RANGE(eps, 0.0f, FLT_MAX);
}

static rocq_result rocq__check_rmsnorm(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_norm_params *p = (const rocq_norm_params *)params;
    if (p->bias || p->mean) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "rmsnorm: has no %s", p->bias ? "bias" : "mean");
    }
    return rocq__check_norm(ctx, op, p);
}

// head_dim is what n_dims = 0 stands for.
static rocq_result rocq__check_rope_config(rocq_ctx *ctx, const char *op,
                                           const rocq_rope_config *p, int64_t head_dim) {
    const int64_t n_dims = p->n_dims == 0 ? head_dim : p->n_dims;
    if (p->pairing != ROCQ_ROPE_NORM && p->pairing != ROCQ_ROPE_NEOX) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "%s: unknown pairing %d", op, (int)p->pairing);
    }
    if (n_dims < 0 || n_dims > head_dim || n_dims % 2 != 0) {
        return rocq__fail(ctx, ROCQ_E_SHAPE, "%s: n_dims %lld must be even and at most %lld", op,
                          (long long)n_dims, (long long)head_dim);
    }
    ROCQ__TRY(ROCQ__RANGE(freq_base, 0.0f, FLT_MAX));
    ROCQ__TRY(ROCQ__RANGE(freq_scale, 0.0f, FLT_MAX));
    ROCQ__TRY(ROCQ__RANGE(ext_factor, 0.0f, FLT_MAX));
    ROCQ__TRY(ROCQ__RANGE(attn_factor, 0.0f, FLT_MAX));
    ROCQ__TRY(ROCQ__RANGE(beta_fast, 0.0f, FLT_MAX));
    ROCQ__TRY(ROCQ__RANGE(beta_slow, 0.0f, FLT_MAX));
    if (p->n_ctx_orig < 0 || (p->ext_factor > 0.0f && p->n_ctx_orig == 0)) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "%s: YaRN needs n_ctx_orig", op);
    }
    return ROCQ__SHAPE(freq_factors, n_dims / 2, 1, 1, 1);
}

static rocq_result rocq__check_rope(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_rope_params *p = (const rocq_rope_params *)params;
    ROCQ__TRY(ROCQ__SHAPE(x, -1, -1, -1, 1));
    ROCQ__TRY(ROCQ__SAME(y, x));
    ROCQ__TRY(ROCQ__SHAPE(pos, p->x->ne[2], 1, 1, 1));
    return rocq__check_rope_config(ctx, op, &p->rope, p->x->ne[0]);
}

static rocq_result rocq__check_rope_append(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_rope_append_params *p = (const rocq_rope_append_params *)params;
    const int64_t head_dim = p->k->ne[0], n_kv_heads = p->k->ne[1], n_tokens = p->k->ne[2];
    ROCQ__TRY(ROCQ__SHAPE(k, -1, -1, -1, 1));
    ROCQ__TRY(ROCQ__SAME(v, k));
    ROCQ__TRY(ROCQ__SHAPE(q, head_dim, -1, n_tokens, 1));
    ROCQ__TRY(ROCQ__SHAPE(k_cache, head_dim, n_kv_heads, -1, 1));
    ROCQ__TRY(ROCQ__SAME(v_cache, k_cache));
    ROCQ__TRY(ROCQ__SHAPE(pos, n_tokens, 1, 1, 1));
    ROCQ__TRY(ROCQ__SHAPE(cell, n_tokens, 1, 1, 1));
    return rocq__check_rope_config(ctx, op, &p->rope, head_dim);
}

static rocq_result rocq__check_activate(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_activate_params *p = (const rocq_activate_params *)params;
    ROCQ__TRY(ROCQ__SAME(y, x));
    return rocq__check_activation(ctx, op, p->activation);
}

static rocq_result rocq__check_glu(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_glu_params *p = (const rocq_glu_params *)params;
    ROCQ__TRY(ROCQ__SAME(up, gate));
    ROCQ__TRY(ROCQ__SAME(y, gate));
    return rocq__check_activation(ctx, op, p->activation);
}

static rocq_result rocq__check_binary(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_binary_params *p = (const rocq_binary_params *)params;
    ROCQ__TRY(ROCQ__SAME(y, a));
    return ROCQ__REPEAT(b, a);
}

static rocq_result rocq__check_scale(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_scale_params *p = (const rocq_scale_params *)params;
    return ROCQ__SAME(y, x);
}

static rocq_result rocq__check_cast(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_cast_params *p = (const rocq_cast_params *)params;
    const bool i32 = p->x->format == ROCQ_I32;
    int64_t elems, bytes;
    ROCQ__TRY(rocq__check_format(ctx, op, "y", i32 ? ROCQ__BIT_I32 : ROCQ__ANY, p->y->format,
                                 &elems, &bytes));
    return ROCQ__SAME(y, x);
}

static rocq_result rocq__check_softmax(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_softmax_params *p = (const rocq_softmax_params *)params;
    ROCQ__TRY(ROCQ__SAME(y, x));
    ROCQ__TRY(ROCQ__SHAPE(mask, p->x->ne[0], -1, -1, -1));
    ROCQ__TRY(ROCQ__REPEAT(mask, x));
    return ROCQ__RANGE(scale, -FLT_MAX, FLT_MAX);
}

static rocq_result rocq__check_gather(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_gather_params *p = (const rocq_gather_params *)params;
    ROCQ__TRY(ROCQ__SHAPE(table, -1, -1, 1, 1));
    ROCQ__TRY(ROCQ__SHAPE(ids, -1, 1, 1, 1));
    ROCQ__TRY(ROCQ__SHAPE(y, p->table->ne[0], p->ids->ne[0], 1, 1));
    return ROCQ__RANGE(scale, -FLT_MAX, FLT_MAX);
}

static rocq_result rocq__check_argmax(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_argmax_params *p = (const rocq_argmax_params *)params;
    ROCQ__TRY(ROCQ__SHAPE(x, -1, -1, 1, 1));
    ROCQ__TRY(ROCQ__SHAPE(index, p->x->ne[1], 1, 1, 1));
    if (p->x->ne[0] > INT32_MAX) {
        return rocq__fail(ctx, ROCQ_E_OVERFLOW, "argmax: rows of %lld elements",
                          (long long)p->x->ne[0]);
    }
    return ROCQ_OK;
}

static rocq_result rocq__check_sample(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_sample_params *p = (const rocq_sample_params *)params;
    ROCQ__TRY(ROCQ__SHAPE(logits, -1, 1, 1, 1));
    ROCQ__TRY(ROCQ__SHAPE(token, 1, 1, 1, 1));
    ROCQ__TRY(ROCQ__SHAPE(prob, 1, 1, 1, 1));
    ROCQ__TRY(ROCQ__SHAPE(recent, -1, 1, 1, 1));
    ROCQ__TRY(ROCQ__SHAPE(allowed, (p->logits->ne[0] + 31) / 32, 1, 1, 1));
    if (p->logits->ne[0] > INT32_MAX) {
        return rocq__fail(ctx, ROCQ_E_OVERFLOW, "sample: %lld logits", (long long)p->logits->ne[0]);
    }
    ROCQ__TRY(ROCQ__RANGE(temperature, 0.0f, FLT_MAX));
    ROCQ__TRY(ROCQ__RANGE(top_p, 0.0f, FLT_MAX));
    ROCQ__TRY(ROCQ__RANGE(min_p, 0.0f, 1.0f));
    ROCQ__TRY(ROCQ__RANGE(repeat_penalty, 0.0f, FLT_MAX));
    ROCQ__TRY(ROCQ__RANGE(frequency_penalty, -FLT_MAX, FLT_MAX));
    ROCQ__TRY(ROCQ__RANGE(presence_penalty, -FLT_MAX, FLT_MAX));
    if (p->top_k < 0) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "sample: top_k is %d", (int)p->top_k);
    }
    return ROCQ_OK;
}

static rocq_result rocq__check_conv(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_conv_params *p = (const rocq_conv_params *)params;
    const struct {
        const char *name;
        int32_t value, low, high;
        bool odd;
    } ints[] = {{"kw", p->kw, 0, 7, true},         {"kh", p->kh, 0, 7, true},
                {"kt", p->kt, 0, 7, false},        {"stride", p->stride, 0, 2, false},
                {"upsample", p->upsample, 0, 2, false},
                {"pad_x", p->pad_x, -1, ROCQ__MAX(p->kw, 1) - 1, false},
                {"pad_y", p->pad_y, -1, ROCQ__MAX(p->kh, 1) - 1, false}};
    for (size_t i = 0; i < sizeof ints / sizeof ints[0]; i++) {
        const int32_t v = ints[i].value;
        if (v >= ints[i].low && v <= ints[i].high && !(ints[i].odd && v > 0 && v % 2 == 0)) {
            continue;
        }
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "conv: %s is %d, expected %d to %d%s", ints[i].name,
                          (int)v, (int)ints[i].low, (int)ints[i].high, ints[i].odd ? ", odd" : "");
    }
    int64_t k;
    const int64_t taps = (int64_t)ROCQ__MAX(p->kw, 1) * ROCQ__MAX(p->kh, 1) * ROCQ__MAX(p->kt, 1);
    if (!rocq__mul(p->x->ne[0], taps, &k) || p->x->ne[1] > INT32_MAX || p->x->ne[2] > INT32_MAX ||
        p->y->ne[1] > INT32_MAX || p->y->ne[2] > INT32_MAX) {
        return rocq__fail(ctx, ROCQ_E_OVERFLOW, "conv: sizes of x or y overflow");
    }
    ROCQ__TRY(ROCQ__SHAPE(w, k, p->y->ne[0], 1, 1));
    ROCQ__TRY(ROCQ__SHAPE(bias, p->y->ne[0], 1, 1, 1));
    ROCQ__TRY(ROCQ__SAME(residual, y));
    const rocq__conv_shape s = rocq__conv_shape_of(p);
    // Each row, column and frame of y has at least one tap inside z.
    if ((p->y->ne[1] - 1) * s.stride - s.pad_x >= s.w ||
        (p->y->ne[2] - 1) * s.stride - s.pad_y >= s.h || s.past < 0 || s.past >= s.kt) {
        return rocq__fail(ctx, ROCQ_E_SHAPE,
                          "conv: y of %lld x %lld, %lld frames, from x of %lld x %lld, %lld frames",
                          (long long)p->y->ne[1], (long long)p->y->ne[2], (long long)p->y->ne[3],
                          (long long)p->x->ne[1], (long long)p->x->ne[2], (long long)p->x->ne[3]);
    }
    if (!p->stats && (p->norm_weight || p->norm_bias)) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "conv: norm_weight or norm_bias without stats");
    }
    if (p->stats && p->stats->ne[0] == 2) {
        ROCQ__TRY(ROCQ__SHAPE(stats, 2, -1, p->stats->ne[2] == 1 ? 1 : p->x->ne[3], 1));
        if (p->x->ne[0] % p->stats->ne[1] != 0) {
            return rocq__fail(ctx, ROCQ_E_SHAPE, "conv: %lld groups of %lld channels",
                              (long long)p->stats->ne[1], (long long)p->x->ne[0]);
        }
    } else if (p->stats) {
        ROCQ__TRY(ROCQ__SHAPE(stats, 1, p->x->ne[1], p->x->ne[2], p->x->ne[3]));
    }
    ROCQ__TRY(ROCQ__SHAPE(norm_weight, p->x->ne[0], 1, 1, 1));
    ROCQ__TRY(ROCQ__SHAPE(norm_bias, p->x->ne[0], 1, 1, 1));
    ROCQ__TRY(rocq__check_activation(ctx, op, p->x_activation));
    ROCQ__TRY(rocq__check_activation(ctx, op, p->activation));
    int exponent;
    if (p->x_scale != 0.0f && !(p->x_scale > 0.0f && p->x_scale <= FLT_MAX &&
                                frexpf(p->x_scale, &exponent) == 0.5f)) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "conv: x_scale is %g, expected a power of two",
                          (double)p->x_scale);
    }
    return rocq__check_precision(ctx, op, p->precision);
}

static rocq_result rocq__check_norm_stats(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_norm_stats_params *p = (const rocq_norm_stats_params *)params;
    const rocq_tensor *like = p->stats ? p->stats : p->moments;
    if (!like) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "norm_stats: stats and moments are NULL");
    }
    ROCQ__TRY(ROCQ__RANGE(eps, 0.0f, FLT_MAX));
    if (p->stats && p->stats->ne[0] == 1) {
        if (p->moments) {
            return rocq__fail(ctx, ROCQ_E_ARGUMENT, "norm_stats: no moments of single positions");
        }
        return ROCQ__SHAPE(stats, 1, p->x->ne[1], p->x->ne[2], p->x->ne[3]);
    }
    ROCQ__TRY(ROCQ__SHAPE(stats, 2, like->ne[1], p->x->ne[3], 1));
    ROCQ__TRY(ROCQ__SHAPE(moments, 3, like->ne[1], p->x->ne[3], 1));
    if (p->x->ne[0] % like->ne[1] != 0) {
        return rocq__fail(ctx, ROCQ_E_SHAPE, "norm_stats: %lld groups of %lld channels",
                          (long long)like->ne[1], (long long)p->x->ne[0]);
    }
    return ROCQ_OK;
}

static rocq_result rocq__check_resize(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_resize_params *p = (const rocq_resize_params *)params;
    if ((int)p->mode < 0 || p->mode > ROCQ_RESIZE_BILINEAR) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "resize: unknown mode %d", (int)p->mode);
    }
    for (int d = 1; d < 3; d++) {
        if (p->x->ne[d] <= INT32_MAX && p->y->ne[d] <= INT32_MAX) continue;
        return rocq__fail(ctx, ROCQ_E_OVERFLOW, "resize: sizes of x or y overflow");
    }
    return ROCQ__SHAPE(y, p->x->ne[0], -1, -1, p->x->ne[3]);
}

static rocq_result rocq__check_pixels(rocq_ctx *ctx, const char *op, const void *params) {
    const rocq_pixels_params *p = (const rocq_pixels_params *)params;
    const int64_t c = p->x->ne[0];
    if ((p->y->ne[0] != 3 && p->y->ne[0] != 4) || (c != 1 && c != 3 && c != 4)) {
        return rocq__fail(ctx, ROCQ_E_SHAPE, "pixels: %lld channels of x, %lld of y",
                          (long long)c, (long long)p->y->ne[0]);
    }
    ROCQ__TRY(ROCQ__RANGE(scale, -FLT_MAX, FLT_MAX));
    ROCQ__TRY(ROCQ__RANGE(bias, -FLT_MAX, FLT_MAX));
    return ROCQ__SHAPE(y, -1, p->x->ne[1], p->x->ne[2], p->x->ne[3]);
}

#undef ROCQ__SHAPE
#undef ROCQ__SAME
#undef ROCQ__REPEAT
#undef ROCQ__RANGE

// -- overlap --

static const rocq_tensor *rocq__planar_operand(rocq_op op, const void *params) {
    int32_t end, begin = rocq__operands_begin(op, &end);
    for (; params; params = rocq__next_params(op, params)) {
        for (int32_t i = begin; i < end; i++) {
            const rocq_tensor *t = rocq__operand_of(params, &rocq__operands[i]);
            if (t && t->layout == ROCQ_LAYOUT_PLANAR) return t;
        }
    }
    return NULL;
}

// All addresses from a tensor's first byte to its last, gaps included.
typedef struct rocq__range {
    uint64_t begin, end;
} rocq__range;

static rocq__range rocq__range_of(const rocq_tensor *t) {
    int64_t extent = 0;
    rocq__extent(t, &extent); // cannot fail: rocq__check_tensor has called it
    const rocq__range range = {rocq__address(t), rocq__address(t) + (uint64_t)extent};
    return range;
}

static int64_t rocq__range_size(rocq__range range) { return (int64_t)(range.end - range.begin); }

static bool rocq__ranges_cross(rocq__range a, rocq__range b) {
    return a.begin < b.end && b.begin < a.end;
}

// A dimension of one of two tensors: an element lies 0 to most times step bytes from the first.
typedef struct rocq__step {
    int64_t step, most;
    int64_t reach;   // largest sum that this dimension and those with smaller steps give
    int64_t divisor; // greatest common divisor of this step and the smaller ones
} rocq__step;

// Inserts dimension d of t into the list, which is sorted by step.
static void rocq__add_step(rocq__step *list, int *n, const rocq_tensor *t, int d) {
    if (t->ne[d] == 1 || t->stride[d] == 0) return; // a dimension of 1 may have any stride
    const int64_t step = rocq__bytes(t->format, t->stride[d]);
    int i = (*n)++;
    for (; i > 0 && list[i - 1].step > step; i--) list[i] = list[i - 1];
    list[i].step = step;
    list[i].most = t->ne[d] - 1;
}

// Whether a sum of the first n steps of list, each taken 0 to most times, lies in [low, high]. For
// the largest step, only those counts are tried whose rest is within reach of the smaller steps:
// one or two if each step is a multiple of the smaller ones. Other steps may need many more, so
// *tries bounds the search; when it is used up the answer is true, which is the safe one.
static bool rocq__sum_within(const rocq__step *list, int n, int64_t low, int64_t high,
                             int32_t *tries) {
    if (--*tries < 0) return true;
    if (high < 0) return false;
    if (low <= 0) return true; // every step taken 0 times
    if (n == 0) return false;
    const rocq__step *s = &list[n - 1];
    if (s->reach < low || high - high % s->divisor < low) return false;
    const int64_t rest = s->reach - s->step * s->most;
    const int64_t first = low > rest ? (low - rest - 1) / s->step + 1 : 0;
    const int64_t last = ROCQ__MIN(s->most, high / s->step);
    for (int64_t k = first; k <= last; k++) {
        const int64_t taken = k * s->step;
        if (rocq__sum_within(list, n - 1, low - taken, high - taken, tries)) return true;
    }
    return false;
}

enum { ROCQ__OVERLAP_TRIES = 4000 }; // some 20 microseconds

// Whether two tensors share a byte. They may not, although their ranges cross: rows of one lie in
// the gaps of the other if q, k and v are columns of one product, or if the planes of two caches
// alternate. Here both have two rows of 8 bytes, 24 bytes apart:
//
//     byte   0       8       16      24      32      40
//     a      aaaaaaaa                aaaaaaaa
//     b              bbbbbbbb                bbbbbbbb
//
// A row of a lies 0 or 24 bytes above its first row, a row of b 0 or 24 bytes below its last. The
// two rows share a byte exactly if the sum of both distances is 25 to 39 (low and high below). The
// possible sums are 0, 24 and 48, so no rows meet. If b lay 4 bytes lower, low and high would be 21
// and 35, and 24 would be a hit. So one search over the sums of all strides decides, without a look
// at every pair of rows.
static bool rocq__meet(const rocq_tensor *a, const rocq_tensor *b) {
    const rocq__range of_a = rocq__range_of(a), of_b = rocq__range_of(b);
    const uint64_t limit = (uint64_t)INT64_MAX / 8; // below it nothing here overflows
    if (!rocq__ranges_cross(of_a, of_b)) return false;
    if (of_a.end - of_a.begin > limit || of_b.end - of_b.begin > limit) return true;
    rocq__step list[6];
    int n_all = 0, n = 0;
    for (int d = 1; d < 4; d++) {
        rocq__add_step(list, &n_all, a, d);
        rocq__add_step(list, &n_all, b, d);
    }
    const int64_t runs = rocq__bytes(a->format, a->ne[0]) + rocq__bytes(b->format, b->ne[0]);
    const int64_t high = (int64_t)(of_b.end - of_a.begin) - 1;
    int64_t low = high - (runs - 2);
    for (int i = 0; i < n_all; i++) {
        const rocq__step s = list[i];
        rocq__step *last = n > 0 ? &list[n - 1] : NULL;
        if (!last && s.step <= high - low + 1) {
            low -= s.step * s.most; // steps no wider than the range extend it without a hole
        } else if (last && s.step % last->step == 0 && s.step / last->step <= last->most + 1) {
            last->most += s.step / last->step * s.most; // together: all multiples of last->step
        } else {
            list[n++] = s;
        }
    }
    for (int i = 0; i < n; i++) {
        int64_t x = list[i].step, y = i > 0 ? list[i - 1].divisor : 0;
        list[i].reach = list[i].step * list[i].most + (i > 0 ? list[i - 1].reach : 0);
        while (y != 0) { // Euclid
            const int64_t rest = x % y;
            x = y;
            y = rest;
        }
        list[i].divisor = x;
    }
    int32_t tries = ROCQ__OVERLAP_TRIES;
    return rocq__sum_within(list, n, low, high, &tries);
}

// Fails if an output shares a byte with another operand, unless that is IN_PLACE and is exactly the
// first output. With an INDEX operand not even the ranges may cross. The CPU checks indices once
// and reads them again while it writes: an index that an output has changed could point anywhere.
// A GPU's kernels check an index each time they load it, but blocks that load different values
// would disagree about how the work is shared.
static rocq_result rocq__check_overlap(rocq_ctx *ctx, const char *op_name, rocq_op op,
                                       const void *params) {
    struct {
        const rocq_tensor *t;
        const rocq__operand *operand;
        const void *params; // the product of a chain that it belongs to
        rocq__range range;
    } list[ROCQ__MAX_OPERANDS];
    int32_t end, n = 0;
    const int32_t begin = rocq__operands_begin(op, &end);
    for (const void *p = params; p; p = rocq__next_params(op, p)) {
        for (int32_t i = begin; i < end; i++) {
            const rocq_tensor *t = rocq__operand_of(p, &rocq__operands[i]);
            if (!t) continue;
            list[n].t = t;
            list[n].operand = &rocq__operands[i];
            list[n].params = p;
            list[n++].range = rocq__range_of(t);
        }
    }
    for (int32_t o = 0; o < n; o++) {
        if (list[o].operand->role != ROCQ__OUT) continue;
        for (int32_t i = 0; i < n; i++) {
            const int32_t role = list[i].operand->role;
            if (i == o || !rocq__ranges_cross(list[o].range, list[i].range)) continue;
            const bool in_place = role == ROCQ__IN_PLACE && list[i].params == list[o].params &&
                                  list[o].operand == &rocq__operands[begin];
            if (in_place && rocq__same_tensor(list[o].t, list[i].t)) continue;
            if (role != ROCQ__INDEX && !rocq__meet(list[o].t, list[i].t)) continue;
            return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                              role == ROCQ__INDEX ? "%s: the extents of %s and %s overlap"
                                                  : "%s: %s lies on %s",
                              op_name, list[o].operand->name, list[i].operand->name);
        }
    }
    return ROCQ_OK;
}

// -- what an op moves and computes: for the time cap, the profile and the tuner --

// Pairs of a query and a position that attention computes, and positions of K and V that it reads,
// summed over sequences. Returns false if only the GPU knows kv_len.
static bool rocq__attention_reach(const rocq_ctx *ctx, const rocq_attention_params *p,
                                  double *pairs, double *positions) {
    const int64_t n_q = p->q->ne[2];
    const int32_t *kv_len = NULL;
    *pairs = *positions = 0.0;
    if (p->kv_len && rocq__on_gpu(ctx)) return false;
    if (p->kv_len) kv_len = (const int32_t *)rocq_tensor_data(p->kv_len);
    for (int64_t s = 0; s < p->q->ne[3]; s++) {
        const int64_t n_kv = p->page_table ? p->page_table->ne[0] * p->page_size : p->k->ne[2];
        const int64_t length = kv_len ? kv_len[s] : n_kv;
        const int64_t window = p->window > 0 ? p->window : length;
        // If causal, only the last length queries see anything: of these, query i sees least + i
        // positions, or the window if that is less.
        const int64_t n = p->causal ? ROCQ__MIN(n_q, length) : n_q;
        const int64_t least = p->causal ? length - n + 1 : length;
        const int64_t rising = p->causal ? ROCQ__MIN(ROCQ__MAX(window - least, 0), n) : 0;
        *pairs += (double)(rising * least + rising * (rising - 1) / 2 + (n - rising) * window);
        *positions += (double)ROCQ__MIN(length, window + n_q - 1);
    }
    return true;
}

// Cheaper than rocq_tensor_count: these sizes have been checked.
static inline double rocq__elems(const rocq_tensor *t) {
    return (double)t->ne[0] * (double)t->ne[1] * (double)t->ne[2] * (double)t->ne[3];
}

// Elements of operand t that the op reads or writes: of a table only the rows that are gathered, of
// a cache only the positions in use, of other operands all.
static double rocq__elems_moved(rocq_op op, const void *params, const rocq_tensor *t,
                                double positions) {
    if (op == ROCQ_OP_GATHER) {
        const rocq_gather_params *p = (const rocq_gather_params *)params;
        if (t == p->table) t = p->y;
    } else if (op == ROCQ_OP_ATTENTION) {
        const rocq_attention_params *p = (const rocq_attention_params *)params;
        if (t == p->k || t == p->v) return positions * (double)(t->ne[0] * t->ne[1]);
    } else if (op == ROCQ_OP_ROPE_APPEND) {
        const rocq_rope_append_params *p = (const rocq_rope_append_params *)params;
        if (t == p->q) return 2.0 * rocq__elems(t); // in place
        if (t == p->k_cache) t = p->k;
        if (t == p->v_cache) t = p->v;
    }
    return rocq__elems(t);
}

// Bytes: every operand moved once. Flops: two for each weight and column of a product; four for
// each element of q and position it meets in attention; else one for each element of the output,
// or of the input where the output is an index. All 0 where only the GPU knows the lengths.
static rocq__cost rocq__cost_of(const rocq_ctx *ctx, rocq_op op, const void *params) {
    rocq__cost cost = {0.0, 0.0, 0.0};
    int32_t end;
    const int32_t begin = rocq__operands_begin(op, &end);
    double pairs, positions = 0.0;
    if (op == ROCQ_OP_MATMUL) {
        const rocq_matmul_params *first = (const rocq_matmul_params *)params;
        for (const rocq_matmul_params *p = first; p; p = p->next) {
            const double flops = 2.0 * rocq__elems(p->y) * (double)p->w->ne[0];
            cost.flops += p->w2 ? 2.0 * flops : flops;
        }
        if (rocq__on_gpu(ctx) && first->x->ne[1] > ROCQ_K_FEW &&
            rocq__product_path(ctx, first, first->w) != ROCQ_PRECISION_F32) {
            cost.matrix = cost.flops;
        }
    } else if (op == ROCQ_OP_ATTENTION) {
        const rocq_attention_params *p = (const rocq_attention_params *)params;
        if (!rocq__attention_reach(ctx, p, &pairs, &positions)) return cost;
        cost.flops = 4.0 * pairs * (double)(p->q->ne[0] * p->q->ne[1]);
        if (rocq__on_gpu(ctx)) cost.matrix = cost.flops;
    } else if (op == ROCQ_OP_CONV) {
        const rocq_conv_params *p = (const rocq_conv_params *)params;
        cost.flops = 2.0 * rocq__elems(p->y) * (double)p->w->ne[0];
        if (rocq__on_gpu(ctx)) cost.matrix = cost.flops;
    } else if (op == ROCQ_OP_NORM_STATS) {
        cost.flops = rocq__elems(((const rocq_norm_stats_params *)params)->x);
    } else if (op == ROCQ_OP_ARGMAX) {
        cost.flops = rocq__elems(((const rocq_argmax_params *)params)->x);
    } else if (op == ROCQ_OP_SAMPLE) {
        cost.flops = rocq__elems(((const rocq_sample_params *)params)->logits);
    } else if (op == ROCQ_OP_ROPE_APPEND) {
        const rocq_rope_append_params *p = (const rocq_rope_append_params *)params;
        cost.flops = rocq__elems(p->q ? p->q : p->k);
    } else {
        cost.flops = rocq__elems(rocq__operand_of(params, &rocq__operands[begin]));
    }
    for (const void *p = params; p; p = rocq__next_params(op, p)) {
        for (int32_t i = begin; i < end; i++) {
            const rocq_tensor *t = rocq__operand_of(p, &rocq__operands[i]);
            int64_t elems, bytes;
            if (!t) continue;
            if (op == ROCQ_OP_MATMUL && p != params && t == ((const rocq_matmul_params *)p)->x) {
                continue; // the first product has read it
            }
            rocq__block_of(t->format, &elems, &bytes);
            cost.bytes += rocq__elems_moved(op, p, t, positions) * (double)bytes / (double)elems;
        }
    }
    return cost;
}

// ---------------------------------------------------------------------------------------------
// >>dispatch: the one place that picks a backend
// ---------------------------------------------------------------------------------------------
// rocq__run_op checks an op's params, then runs the op or adds it, as a node with a copy of its
// params, to the graph being recorded.

// -- nodes: copies of params, and the graphs that they make --

// A copy of an op's params and tensors, all in one block of memory.
typedef struct rocq__node {
    struct rocq__node *next;
    rocq_op op;
    void *params;         // the first of a chain
    rocq_tensor *tensors; // [n_tensors]
    int32_t n_tensors;
    bool output[ROCQ__MAX_OPERANDS]; // tensor i is written
    bool kept[ROCQ__MAX_OPERANDS];   // tensor i is a KEPT operand
} rocq__node;

// What an op, a graph or a copy does, for the profile (>>profile). Flops on the matrix unit are
// among the flops.
typedef struct rocq__work {
    const void *params;        // of an op whose work is not counted yet, else NULL
    rocq_op op;
    const char *name, *detail; // of its region: "matvec", and a format or NULL
    double bytes, flops, matrix;
    rocq_access access;
    bool copy; // between host and device: not the memory's peak bounds it
} rocq__work;

// A recorded graph. ctx->graphs lists it, so that rocq_close can free what the caller has left.
struct rocq_graph {
    rocq_graph *next; // in ctx->graphs
    rocq__node *first, *last;
    int64_t scratch;  // bytes, of the op that needs most
    bool on_cpu;      // some op of a GPU context falls back to the CPU: it cannot be captured
    rocq__stage *stages; // [n_stages] on the CPU: of all ops. NULL: the ops are run one by one
    int32_t n_stages;
    const void *planned; // the scratch memory whose addresses the stages have
    void *exec;       // the runtime's captured graph; NULL: the ops are run one by one
    bool refused;     // do not capture again: the runtime could not, or its replay was wrong
    bool checked;     // exec has been compared with the ops (rocq__replay_check)
    // scratch_moves: the GPU's count when exec was captured; exec is stale once the GPU's differs,
    // as the address of scratch memory is part of it. n_launches: kernels that exec launches.
    int64_t scratch_moves, n_launches;
#if ROCQ__HAS_PROFILE
    rocq__work work;  // of all ops, when captured
#endif
};

static rocq_result rocq__node_copy(rocq_ctx *ctx, rocq_op op, const void *params,
                                   int64_t params_size, rocq__node **out) {
    int32_t end, n_params = 0, n_tensors = 0;
    const int32_t begin = rocq__operands_begin(op, &end);
    for (const void *p = params; p; p = rocq__next_params(op, p), n_params++) {
        for (int32_t i = begin; i < end; i++) {
            n_tensors += rocq__operand_of(p, &rocq__operands[i]) != NULL;
        }
    }
    const int64_t node_size = (int64_t)sizeof(rocq__node),
                  tensor_size = (int64_t)sizeof(rocq_tensor);
    char *memory =
        (char *)rocq__alloc(ctx, node_size + n_tensors * tensor_size + n_params * params_size);
    if (!memory) return rocq__fail(ctx, ROCQ_E_MEMORY, "no memory for a copy of an op's params");
    rocq__node *node = (rocq__node *)(void *)memory;
    memset(node, 0, sizeof *node);
    node->op = op;
    node->tensors = (rocq_tensor *)(void *)(memory + node_size);
    node->params = memory + node_size + n_tensors * tensor_size;
    char *copy = (char *)node->params;
    for (const void *p = params; p; p = rocq__next_params(op, p), copy += params_size) {
        memcpy(copy, p, (size_t)params_size);
        for (int32_t i = begin; i < end; i++) {
            const rocq_tensor *t = rocq__operand_of(p, &rocq__operands[i]);
            if (!t) continue;
            rocq_tensor *own = &node->tensors[node->n_tensors];
            *own = *t;
            memcpy(copy + rocq__operands[i].offset, &own, sizeof own);
            node->kept[node->n_tensors] = rocq__operands[i].role == ROCQ__KEPT;
            node->output[node->n_tensors++] = rocq__operands[i].role == ROCQ__OUT;
        }
        if (rocq__next_params(op, p)) {
            ((rocq_matmul_params *)(void *)copy)->next =
                (const rocq_matmul_params *)(void *)(copy + params_size);
        }
    }
    *out = node;
    return ROCQ_OK;
}

// -- ops --

// The functions of an op. Each casts params to the type in ROCQ_OPS: one table can hold all ops.
typedef struct rocq__op_entry {
    const char *name;
    int64_t params_size;
    rocq_result (*check)(rocq_ctx *ctx, const char *op, const void *params);
    int64_t (*scratch_cpu)(const rocq_ctx *ctx, const void *params);
    void (*plan_cpu)(rocq__plan *plan, rocq_op op, const void *params);
    void (*job)(rocq__job *job, const void *params); // on a GPU
} rocq__op_entry;

static const rocq__op_entry rocq__ops[ROCQ_OP_COUNT] = { // in the order of ROCQ_OPS
#define ROCQ_X(name, params, check, scratch, cpu, job)                                   \
    {#name, (int64_t)sizeof(params), rocq__check_##check, rocq__scratch_##scratch##_cpu, \
     rocq__plan_##cpu##_cpu, rocq__job_##job},
    ROCQ_X(matmul, rocq_matmul_params, matmul, matmul, matmul, matmul)
    ROCQ_X(attention, rocq_attention_params, attention, attention, attention, attention)
    ROCQ_X(rmsnorm, rocq_norm_params, rmsnorm, none, norm, norm)
    ROCQ_X(layernorm, rocq_norm_params, norm, none, norm, norm)
    ROCQ_X(rope, rocq_rope_params, rope, rope, rope, rope)
    ROCQ_X(rope_append, rocq_rope_append_params, rope_append, rope_append, rope_append, rope_append)
    ROCQ_X(activate, rocq_activate_params, activate, none, map, map)
    ROCQ_X(glu, rocq_glu_params, glu, none, map, map)
    ROCQ_X(add, rocq_binary_params, binary, none, map, map)
    ROCQ_X(mul, rocq_binary_params, binary, none, map, map)
    ROCQ_X(scale, rocq_scale_params, scale, none, map, map)
    ROCQ_X(cast, rocq_cast_params, cast, none, map, cast)
    ROCQ_X(softmax, rocq_softmax_params, softmax, none, softmax, softmax)
    ROCQ_X(gather, rocq_gather_params, gather, none, gather, gather)
    ROCQ_X(argmax, rocq_argmax_params, argmax, none, argmax, argmax)
    ROCQ_X(sample, rocq_sample_params, sample, sample, sample, sample)
    ROCQ_X(conv, rocq_conv_params, conv, conv, conv, conv)
    ROCQ_X(norm_stats, rocq_norm_stats_params, norm_stats, norm_stats, norm_stats, norm_stats)
    ROCQ_X(resize, rocq_resize_params, resize, none, resize, resize)
    ROCQ_X(pixels, rocq_pixels_params, pixels, none, pixels, pixels)
#undef ROCQ_X
};

static rocq_result rocq__check_op(rocq_ctx *ctx, rocq_op op, const void *params) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    if ((int)op < 0 || op >= ROCQ_OP_COUNT) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "unknown op %d", (int)op);
    }
    if (!params) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "%s: params is NULL", rocq__ops[op].name);
    if (op != ROCQ_OP_MATMUL) { // rocq__check_matmul does so for each product of the chain
        ROCQ__TRY(rocq__check_operands(ctx, rocq__ops[op].name, op, params));
    }
    ROCQ__TRY(rocq__ops[op].check(ctx, rocq__ops[op].name, params));
    return rocq__check_overlap(ctx, rocq__ops[op].name, op, params);
}

// Room for the plan of any one op.
typedef struct rocq__plan_room {
    rocq__stage stages[ROCQ__PLAN_STAGES];
    ROCQ__ALIGNAS(16) char memory[ROCQ__PLAN_BYTES];
} rocq__plan_room;

// Plans an op that has passed its checks, whose scratch memory there is.
static rocq__plan rocq__plan_cpu(const rocq_ctx *ctx, rocq_op op, const void *params,
                                 int64_t worth, rocq__plan_room *room) {
    rocq__plan plan = {ctx, (char *)ctx->scratch, worth, room->stages, 0, room->memory, 0};
    rocq__ops[op].plan_cpu(&plan, op, params);
    return plan;
}

static rocq_result rocq__run_cpu(rocq_ctx *ctx, rocq_op op, const void *params) {
    rocq__plan_room room;
    void *scratch;
    ROCQ__TRY(rocq__scratch(ctx, rocq__ops[op].scratch_cpu(ctx, params), &scratch));
    const rocq__plan plan = rocq__plan_cpu(ctx, op, params, ROCQ__WORTH_OP, &room);
    return rocq__team_run(ctx, rocq__ops[op].name, plan.stages, plan.n_stages);
}

static rocq_result rocq__plan_hip(rocq_ctx *ctx, rocq_op op, const void *params,
                                  int64_t *scratch) {
    rocq__job job = {ctx, op, rocq__ops[op].name, true, 0, 0, 0, ROCQ_OK, {0.0, 0.0, 0.0}};
    rocq__ops[op].job(&job, params);
    *scratch = job.most;
    return job.result;
}

static rocq_result rocq__run_hip(rocq_ctx *ctx, rocq_op op, const void *params, void *scratch) {
    rocq__job job = {ctx,     op, rocq__ops[op].name, false, (uintptr_t)scratch, 0, 0,
                     ROCQ_OK, {0.0, 0.0, 0.0}};
    rocq__job_begin(&job, params);
    rocq__ops[op].job(&job, params);
    return job.result;
}

// Finds out whether the context can run an op that has passed its checks, and the scratch memory
// for it. *on_cpu: no kernel does it, but the CPU may and can (allow_fallback).
static rocq_result rocq__plan_op(rocq_ctx *ctx, rocq_op op, const void *params, int64_t *scratch,
                                 bool *on_cpu) {
    *on_cpu = false;
    *scratch = 0;
    if (!rocq__on_gpu(ctx)) {
        *scratch = rocq__ops[op].scratch_cpu(ctx, params);
        return ROCQ_OK;
    }
    if (!ctx->desc.allow_fallback) return rocq__plan_hip(ctx, op, params, scratch);
    rocq__attempt attempt;
    rocq__attempt_begin(ctx, &attempt);
    const rocq_result result = rocq__plan_hip(ctx, op, params, scratch);
    const bool other_way = result == ROCQ_E_UNSUPPORTED;
    rocq__attempt_end(ctx, &attempt, result == ROCQ_OK || other_way);
    if (!other_way) return result;
    const rocq_tensor *planar = rocq__planar_operand(op, params);
    if (planar) {
        return rocq__fail(ctx, ROCQ_E_UNSUPPORTED,
                          "%s: not on the GPU, and the CPU has no planar %s", rocq__ops[op].name,
                          rocq_format_name(planar->format));
    }
    *scratch = 0;
    *on_cpu = true;
    return ROCQ_OK;
}

// -- an op of a GPU context on the CPU --

// A range of device memory with one or more operands in it, and its copy on the host.
typedef struct rocq__touched {
    rocq__range range;
    unsigned char *host;
    bool written;
} rocq__touched;

// Adds a tensor's range to a list of disjoint touched, merged with all touched that it overlaps.
static void rocq__touched_add(rocq__touched *touched, int32_t *n_touched, const rocq_tensor *t,
                              bool written) {
    rocq__touched r = {rocq__range_of(t), NULL, written};
    for (int32_t k = 0; k < *n_touched;) {
        const rocq__range other = touched[k].range;
        if (rocq__ranges_cross(other, r.range)) {
            r.range.begin = ROCQ__MIN(r.range.begin, other.begin);
            r.range.end = ROCQ__MAX(r.range.end, other.end);
            r.written = r.written || touched[k].written;
            touched[k] = touched[--*n_touched];
            k = 0;
        } else {
            k++;
        }
    }
    touched[(*n_touched)++] = r;
}

// Copies operands to the host, runs the op there, and copies outputs back. What overlaps on the
// device must overlap on the host too, so each region is copied once and whole, gaps included.
static rocq_result rocq__run_fallback(rocq_ctx *ctx, rocq_op op, const void *params) {
    rocq__node *node;
    rocq__touched touched[ROCQ__MAX_OPERANDS];
    int32_t n_touched = 0;
    ROCQ__TRY(rocq__node_copy(ctx, op, params, rocq__ops[op].params_size, &node));
    for (int32_t i = 0; i < node->n_tensors; i++) {
        rocq__touched_add(touched, &n_touched, &node->tensors[i], node->output[i]);
    }
    rocq_result result = ROCQ_OK;
    for (int32_t k = 0; k < n_touched && result == ROCQ_OK; k++) {
        rocq__touched *r = &touched[k];
        const int64_t size = rocq__range_size(r->range);
        const void *there = (const void *)(uintptr_t)r->range.begin;
        r->host = (unsigned char *)rocq__alloc(ctx, size);
        result = r->host ? rocq__download_hip(ctx, r->host, there, size)
                         : rocq__fail(ctx, ROCQ_E_MEMORY, "%s: no host memory for %lld bytes",
                                      rocq__ops[op].name, (long long)size);
    }
    for (int32_t i = 0; i < node->n_tensors && result == ROCQ_OK; i++) {
        rocq_tensor *t = &node->tensors[i];
        const uint64_t begin = rocq__address(t);
        for (int32_t k = 0; k < n_touched; k++) {
            const rocq__range range = touched[k].range;
            if (begin < range.begin || begin >= range.end) continue;
            t->buffer = rocq_buffer_from_host(touched[k].host, rocq__range_size(range));
            t->offset = (int64_t)(begin - range.begin);
        }
    }
    if (result == ROCQ_OK) result = rocq__run_cpu(ctx, op, node->params);
    for (int32_t k = 0; k < n_touched && result == ROCQ_OK; k++) {
        const rocq__touched *r = &touched[k];
        const int64_t size = rocq__range_size(r->range);
        rocq_tensor bytes; // of no particular shape
        memset(&bytes, 0, sizeof bytes);
        bytes.buffer = rocq_buffer_from_device(r->range.begin, size);
        if (r->written) result = rocq__upload_memory(ctx, &bytes, r->host, size);
    }
    for (int32_t k = 0; k < n_touched; k++) rocq__free(ctx, touched[k].host);
    rocq__free(ctx, node);
    if (result == ROCQ_OK) ctx->stats.n_fallbacks++;
    return result;
}

// -- running --

// While a profile is on, each op, graph and copy is a region (>>profile), but not the ops that a
// graph captures. These are all its hooks; they are empty without ROCQ__HAS_PROFILE.
#if ROCQ__HAS_PROFILE
static rocq__work rocq__work_of(const rocq_ctx *ctx, rocq_op op, const void *params);
static rocq_result rocq__region_op(rocq_ctx *ctx, rocq_op op, const void *params);
static rocq_result rocq__region_graph(rocq_ctx *ctx, rocq_graph *graph);
static rocq_result rocq__region_enter(rocq_ctx *ctx, const char *name, const char *detail,
                                      bool piece);
static rocq_result rocq__region_leave_copy(rocq_ctx *ctx, rocq_result result, int64_t bytes);

static inline bool rocq__profiling(const rocq_ctx *ctx) {
    return ctx->profiling && !(rocq__on_gpu(ctx) && ctx->gpu->trial);
}

#endif

// These two stand before and after a copy or a wait, to make it a region of the profile. The second
// takes the copy's result, and returns it unless the profile itself fails.
static rocq_result rocq__copy_begin(rocq_ctx *ctx, const char *name) {
#if ROCQ__HAS_PROFILE
    if (rocq__profiling(ctx)) return rocq__region_enter(ctx, name, NULL, false);
#endif
    (void)ctx;
    (void)name;
    return ROCQ_OK;
}

static rocq_result rocq__copy_done(rocq_ctx *ctx, rocq_result result, int64_t bytes) {
#if ROCQ__HAS_PROFILE
    if (rocq__profiling(ctx)) return rocq__region_leave_copy(ctx, result, bytes);
#endif
    (void)ctx;
    (void)bytes;
    return result;
}

static rocq_result rocq__run_here(rocq_ctx *ctx, rocq_op op, const void *params) {
    int64_t bytes;
    bool on_cpu;
    void *scratch;
    if (!rocq__on_gpu(ctx)) return rocq__run_cpu(ctx, op, params);
    ROCQ__TRY(rocq__plan_op(ctx, op, params, &bytes, &on_cpu));
    if (on_cpu) return rocq__run_fallback(ctx, op, params);
    ROCQ__TRY(rocq__scratch_hip(ctx, bytes, &scratch));
    return rocq__run_hip(ctx, op, params, scratch);
}

// Runs an op with valid params, as a region of the profile if that is on.
static rocq_result rocq__run_on_device(rocq_ctx *ctx, rocq_op op, const void *params) {
#if ROCQ__HAS_PROFILE
    if (rocq__profiling(ctx)) return rocq__region_op(ctx, op, params);
#endif
    return rocq__run_here(ctx, op, params);
}

// Fails if no op may run now, whatever its params: the GPU is lost, or rocq_cancel was called.
static rocq_result rocq__begin_op(rocq_ctx *ctx, const char *name) {
    if (rocq__on_gpu(ctx)) ROCQ__TRY(rocq__hip_enter(ctx, name));
    if (rocq__load32(&ctx->cancelled)) {
        return rocq__fail(ctx, ROCQ_E_CANCELLED,
                          "%s: rocq_cancel was called; rocq_sync takes it back", name);
    }
    return ROCQ_OK;
}

static rocq_result rocq__run_op(rocq_ctx *ctx, rocq_op op, const void *params) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    ROCQ__TRY(rocq__begin_op(ctx, rocq__ops[op].name));
    ROCQ__TRY(rocq__check_op(ctx, op, params));
    if (!ctx->recording) return rocq__run_on_device(ctx, op, params);
    // Planned now, so that an op that cannot run fails here and not when the graph is launched.
    rocq_graph *graph = ctx->recording;
    rocq__node *node = NULL;
    int64_t scratch;
    bool on_cpu;
    ROCQ__TRY(rocq__plan_op(ctx, op, params, &scratch, &on_cpu));
    ROCQ__TRY(rocq__node_copy(ctx, op, params, rocq__ops[op].params_size, &node));
    if (graph->last) graph->last->next = node;
    else graph->first = node;
    graph->last = node;
    graph->scratch = ROCQ__MAX(graph->scratch, scratch);
    graph->on_cpu = graph->on_cpu || on_cpu;
    return ROCQ_OK;
}

// -- graphs --

// For calls that are not recorded: they would run now, but the ops around them later.
static rocq_result rocq__not_recording(rocq_ctx *ctx, const char *call) {
    if (!ctx->recording) return ROCQ_OK;
    return rocq__fail(ctx, ROCQ_E_STATE, "%s: a graph is being recorded", call);
}

static rocq_result rocq__graph_run(rocq_ctx *ctx, const rocq_graph *graph) {
    for (const rocq__node *node = graph->first; node; node = node->next) {
        ROCQ__TRY(rocq__run_on_device(ctx, node->op, node->params));
    }
    return ROCQ_OK;
}

// Waits for replays that may still run, and destroys the captured graph even if that fails.
static rocq_result rocq__graph_forget(rocq_ctx *ctx, rocq_graph *graph) {
    rocq__gpu *gpu = ctx->gpu;
    if (!graph->exec) return ROCQ_OK;
    const int error = gpu->hip->stream_wait(gpu->stream);
    gpu->hip->graph_exec_destroy(graph->exec);
    graph->exec = NULL;
    return error == 0 || gpu->lost ? ROCQ_OK : rocq__hip_failed(ctx, "graph", error);
}

// Captures the ops, so that one submission replays them (graph->exec). Scratch memory gets its full
// size first, since nothing may be allocated during a capture. E_DEVICE means that the runtime
// cannot capture them; nothing is lost, and the ops can run one by one.
static rocq_result rocq__graph_capture(rocq_ctx *ctx, rocq_graph *graph) {
    rocq__gpu *gpu = ctx->gpu;
    const rocq_hip *hip = gpu->hip;
    void *captured = NULL;
    ROCQ__TRY(rocq__graph_forget(ctx, graph));
    graph->checked = false;
    for (const rocq__node *node = graph->first; node; node = node->next) {
        int64_t scratch; // an op may have been tuned since it was recorded
        bool on_cpu;
        ROCQ__TRY(rocq__plan_op(ctx, node->op, node->params, &scratch, &on_cpu));
        graph->scratch = ROCQ__MAX(graph->scratch, scratch);
    }
    ROCQ__TRY(rocq__reserve_hip(ctx, graph->scratch));
    const int64_t n_launches = ctx->stats.n_launches;
    gpu->trial = true;
    int error = hip->capture_begin(gpu->stream, ROCQ_HIP_THREAD_LOCAL);
    rocq_result result = ROCQ_OK;
    if (error == 0) {
        result = rocq__graph_run(ctx, graph);
        error = hip->capture_end(gpu->stream, &captured);
    }
    if (error == 0 && result == ROCQ_OK) {
        error = hip->graph_instantiate(&graph->exec, captured, NULL, NULL, 0);
        if (error != 0) graph->exec = NULL;
    }
    if (captured) hip->graph_destroy(captured);
    if (error != 0 && result == ROCQ_OK) result = rocq__hip_failed(ctx, "graph", error);
    gpu->trial = false;
    graph->n_launches = ctx->stats.n_launches - n_launches;
    graph->scratch_moves = gpu->scratch_moves;
#if ROCQ__HAS_PROFILE
    memset(&graph->work, 0, sizeof graph->work);
    for (const rocq__node *node = graph->first; node; node = node->next) {
        const rocq__work work = rocq__work_of(ctx, node->op, node->params);
        graph->work.bytes += work.bytes;
        graph->work.flops += work.flops;
        graph->work.matrix += work.matrix;
    }
#endif
    ctx->stats.n_launches = n_launches;
    return result;
}

// The stages of all ops, with what their args point to behind them.
static rocq_result rocq__graph_plan(rocq_ctx *ctx, rocq_graph *graph) {
    rocq__plan_room room;
    int64_t n_stages = 0, size = 0;
    void *scratch;
    ROCQ__TRY(rocq__scratch(ctx, graph->scratch, &scratch));
    if (graph->stages && graph->planned == scratch) return ROCQ_OK;
    rocq__free(ctx, graph->stages);
    graph->stages = NULL;
    for (const rocq__node *node = graph->first; node; node = node->next) {
        const rocq__plan plan =
            rocq__plan_cpu(ctx, node->op, node->params, ROCQ__WORTH_STEP, &room);
        n_stages += plan.n_stages;
        size += plan.used;
    }
    const int64_t stages_size = (n_stages * (int64_t)sizeof(rocq__stage) + 15) / 16 * 16;
    char *memory = (char *)rocq__alloc(ctx, stages_size + size);
    if (!memory) return rocq__fail(ctx, ROCQ_E_MEMORY, "graph: no memory for a plan");
    graph->stages = (rocq__stage *)(void *)memory;
    graph->planned = scratch;
    rocq__plan plan = {ctx, (char *)scratch, ROCQ__WORTH_STEP, graph->stages, 0,
                       memory + stages_size, 0};
    for (const rocq__node *node = graph->first; node; node = node->next) {
        rocq__ops[node->op].plan_cpu(&plan, node->op, node->params);
    }
    graph->n_stages = plan.n_stages;
    return ROCQ_OK;
}

// Plans or captures the graph before its launch, unless that is still valid or there cannot be one.
static rocq_result rocq__graph_prepare(rocq_ctx *ctx, rocq_graph *graph) {
    if (ctx->desc.no_graphs || graph->on_cpu || !graph->first) return ROCQ_OK;
    if (!rocq__on_gpu(ctx)) return rocq__graph_plan(ctx, graph);
    const rocq_hip *hip = ctx->gpu->hip;
    if (!hip->capture_begin || !hip->capture_end || !hip->graph_instantiate ||
        !hip->graph_destroy || !hip->graph_launch || !hip->graph_exec_destroy || graph->refused) {
        return ROCQ_OK;
    }
    if (graph->exec && graph->scratch_moves == ctx->gpu->scratch_moves) return ROCQ_OK;
    rocq__attempt attempt;
    rocq__attempt_begin(ctx, &attempt);
    const rocq_result result = rocq__graph_capture(ctx, graph);
    const bool refused = result == ROCQ_E_DEVICE;
    if (refused) rocq__log(ctx, ROCQ_LOG_WARN, "graph: ops run one by one: %s", ctx->error);
    rocq__attempt_end(ctx, &attempt, result == ROCQ_OK || refused);
    graph->refused = refused;
    return refused ? ROCQ_OK : result;
}

static rocq_result rocq__check_graph(rocq_ctx *ctx, const char *call, const rocq_graph *graph) {
    for (const rocq_graph *g = ctx->graphs; g; g = g->next) {
        if (g == graph && g != ctx->recording) return ROCQ_OK;
    }
    return rocq__fail(ctx, ROCQ_E_ARGUMENT, "%s: not a graph of this context", call);
}

static rocq_result rocq__graph_submit(rocq_ctx *ctx, rocq_graph *graph) {
    bool measured = false; // op by op
#if ROCQ__HAS_PROFILE
    measured = rocq__profiling(ctx);
#endif
    if (graph->stages && !measured) {
        return rocq__team_run(ctx, "graph_launch", graph->stages, graph->n_stages);
    }
    if (!graph->exec) return rocq__graph_run(ctx, graph);
    ROCQ__TRY_HIP("graph_launch", ctx->gpu->hip->graph_launch(graph->exec, ctx->gpu->stream));
    ctx->stats.n_launches += graph->n_launches;
    return ROCQ_OK;
}

static void rocq__graph_delete(rocq_ctx *ctx, rocq_graph *graph) {
    rocq__graph_forget(ctx, graph);
    for (rocq__node *node = graph->first, *next; node; node = next) {
        next = node->next;
        rocq__free(ctx, node);
    }
    rocq_graph **link = &ctx->graphs;
    while (*link && *link != graph) link = &(*link)->next;
    if (*link) *link = graph->next;
    rocq__free(ctx, graph->stages);
    rocq__free(ctx, graph);
}

// ---------------------------------------------------------------------------------------------
// >>pool: blocks of a few sizes, kept for the next request
// ---------------------------------------------------------------------------------------------
// A pool takes slabs from its context, cuts each into blocks of one size class, and keeps the free
// blocks of a class in a list; a large block is a slab of its own. Blocks have descriptors in host
// memory (pool->blocks), because the host cannot write into device memory; those of a slab that is
// given back serve another. The ticket of a buffer is the index of its block's descriptor and, in
// the high half, the block's generation, which alloc and free each increment: it is odd while the
// block is handed out. So free finds the block without a search, and refuses a copy of a buffer
// that has been freed, until after 2^31 uses of the block the generation comes round.

enum {
    ROCQ__SLAB_FIRST = 65536, // bytes of a class's first slab
    ROCQ__CLASSES = 296       // default classes; the largest is 128 TiB
};

typedef struct rocq__pool_block {
    void *memory;        // device address or host pointer
    int64_t size;        // as requested; 0: free; -1: overrun, never handed out again
    uint32_t generation;
    int32_t size_class;
    int32_t next;        // the next free block of the class or spare descriptor; -1 = none
    int32_t slab;        // index; -1 = a spare descriptor
} rocq__pool_block;

typedef struct rocq__slab {
    rocq__block *memory;
    int64_t size;
    int32_t size_class;
    int32_t index; // used by trim: its new index, -1 = it is given back
} rocq__slab;

typedef struct rocq__size_class {
    int64_t block_size;
    int32_t free; // first free block, -1 = none
    // Counters that are updated together are not neighbours: a compiler would load two neighbours
    // with one 16-byte load, which stalls because two 8-byte stores cannot be forwarded to it.
    int64_t n_requests;
    int64_t n_misses;  // requests for which a slab was taken
    int64_t live_bytes;
    int64_t n_blocks;  // in slabs
    int64_t n_frees;
    int64_t n_overrun; // blocks that were overrun and are never handed out again
    int64_t peak_bytes;
    int64_t peak_blocks, n_reserves, n_trims;
} rocq__size_class;

// The caller owns a pool. If it is thread-safe, lock guards all that changes.
struct rocq_pool {
    rocq_ctx *ctx;
    rocq_memory memory; // HOST, PINNED (of a GPU context only) or DEVICE
    bool by_formula;    // all classes are the default ones, so no search is needed
    bool exact, thread_safe;
    const bool *lost;   // the GPU's flag; &never for host memory and for a thread-safe pool
    bool never;
    int64_t most;       // largest request
    int64_t quick_most; // largest request that needs neither lock nor search for its class, or 0
    int64_t live_bytes, peak_bytes;
    rocq__size_class *classes;
    rocq__pool_block *blocks;
    rocq__slab *slabs;  // oldest first
    int32_t n_classes, n_blocks, n_slabs;
    int32_t blocks_capacity, slabs_capacity;
    int32_t spare, n_spare; // spare descriptors: the first (-1 = none), and how many
    int64_t slab_size, budget;
    int64_t reserved_bytes, reserved_peak;
    int32_t lock; // of a thread-safe pool
};

static inline void rocq__pool_lock(rocq_pool *pool) {
    if (pool->thread_safe) rocq__spin_lock(&pool->lock);
}

static inline void rocq__pool_unlock(rocq_pool *pool) {
    if (pool->thread_safe) rocq__spin_unlock(&pool->lock);
}

// Fails. A thread-safe pool only logs the message: another thread may be using the context.
ROCQ__PRINTF(3, 4)
static rocq_result rocq__pool_fail(rocq_pool *pool, rocq_result result, const char *format, ...) {
    char message[256];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    if (!pool->thread_safe) return rocq__fail(pool->ctx, result, "%s", message);
    rocq__log(pool->ctx, ROCQ_LOG_ERROR, "%s", message);
    return result;
}

// -- classes --

// The number of the highest bit of n that is set. n is not 0.
static inline int32_t rocq__highest_bit(uint64_t n) {
#if defined(__GNUC__) || defined(__clang__)
    return 63 - __builtin_clzll(n);
#else
    int32_t bit = 0;
    while (n >>= 1) bit++;
    return bit;
#endif
}

// Default block sizes are the multiples of 256 up to 4 KiB, then of 512 up to 8 KiB, and so on.
static inline int32_t rocq__default_class(int64_t size) {
    const uint64_t units = (uint64_t)(size - 1) >> 8;
    const int32_t shift = rocq__highest_bit(units | 8) - 3;
    return 8 * shift + (int32_t)(units >> shift);
}

static int64_t rocq__default_size(int32_t c) {
    const int32_t shift = ROCQ__MAX(c / 8 - 1, 0);
    return (int64_t)(c - 8 * shift + 1) << (shift + 8);
}

// Guard bytes behind a request. Testing ROCQ__GUARD lets compilers drop the code where it is 0.
static inline int64_t rocq__pool_guard(const rocq_pool *pool) {
    return ROCQ__GUARD > 0 && pool->memory != ROCQ_MEMORY_DEVICE ? ROCQ__GUARD : 0;
}

// The smallest class that holds size bytes, 1 to pool->most.
static inline int32_t rocq__pool_class(const rocq_pool *pool, int64_t size) {
    size += rocq__pool_guard(pool);
    if (pool->by_formula) return rocq__default_class(size);
    int32_t low = 0, high = pool->n_classes - 1;
    while (low < high) {
        const int32_t middle = (low + high) / 2;
        if (pool->classes[middle].block_size < size) low = middle + 1;
        else high = middle;
    }
    return low;
}

// -- slabs --

static void rocq__slab_free(rocq_pool *pool, rocq__slab *slab) {
    pool->ctx->budget_used -= slab->size;
    rocq__block_free(pool->ctx, slab->memory);
}

static rocq_result rocq__pool_fits(rocq_pool *pool, int64_t bytes) {
    if (pool->budget <= 0 || bytes <= pool->budget - pool->reserved_bytes) return ROCQ_OK;
    return rocq__fail(pool->ctx, ROCQ_E_BUDGET,
                      "%lld more bytes do not fit the pool's budget: %lld of %lld used",
                      (long long)bytes, (long long)pool->reserved_bytes, (long long)pool->budget);
}

// Takes a slab of n blocks and adds them to the free list of class c.
static rocq_result rocq__slab_take(rocq_pool *pool, int32_t c, int64_t n) {
    rocq_ctx *ctx = pool->ctx;
    rocq__size_class *cls = &pool->classes[c];
    const int64_t bytes = n * cls->block_size;
    rocq__slab slab;
    memset(&slab, 0, sizeof slab);
    slab.size = bytes;
    slab.size_class = c;
    ROCQ__TRY(rocq__pool_fits(pool, bytes));

    void *slabs = rocq__array_grow(ctx, pool->slabs, &pool->slabs_capacity,
                                   (int64_t)pool->n_slabs + 1, (int64_t)sizeof slab);
    if (slabs) pool->slabs = (rocq__slab *)slabs;
    void *blocks = rocq__array_grow(ctx, pool->blocks, &pool->blocks_capacity,
                                    pool->n_blocks + ROCQ__MAX(n - pool->n_spare, 0),
                                    (int64_t)sizeof *pool->blocks);
    if (blocks) pool->blocks = (rocq__pool_block *)blocks;
    if (!slabs || !blocks) return rocq__fail(ctx, ROCQ_E_MEMORY, "pool: no host memory");

    ROCQ__TRY(rocq__take_budget(ctx, bytes));
    rocq_result result =
        pool->memory == ROCQ_MEMORY_HOST ? ROCQ_OK : rocq__hip_enter(ctx, "pool");
    if (result == ROCQ_OK) {
        result = rocq__block_alloc(ctx, "pool", bytes, pool->memory, &slab.memory);
    }
    if (result != ROCQ_OK) {
        ctx->budget_used -= bytes;
        return result;
    }

    char *memory = (char *)slab.memory->address;
    for (int64_t k = n - 1; k >= 0; k--) { // the first block is the first to be handed out
        int32_t i = pool->spare;
        if (i >= 0) {
            pool->spare = pool->blocks[i].next;
            pool->n_spare--;
        } else {
            i = pool->n_blocks++;
            memset(&pool->blocks[i], 0, sizeof pool->blocks[i]);
        }
        rocq__pool_block *block = &pool->blocks[i];
        block->memory = memory + k * cls->block_size;
        block->next = cls->free;
        block->size_class = c;
        block->slab = pool->n_slabs;
        cls->free = i;
    }
    pool->slabs[pool->n_slabs++] = slab;
    cls->n_blocks += n;
    cls->peak_blocks = ROCQ__MAX(cls->peak_blocks, cls->n_blocks);
    cls->n_reserves++;
    pool->reserved_bytes += bytes;
    pool->reserved_peak = ROCQ__MAX(pool->reserved_peak, pool->reserved_bytes);
    return ROCQ_OK;
}

// Gives back slabs that have no live block, oldest first, until at most keep bytes are reserved.
static rocq_result rocq__pool_trim(rocq_pool *pool, int64_t keep) {
    rocq_ctx *ctx = pool->ctx;
    int64_t left = pool->reserved_bytes;
    int32_t n = 0;
    for (int32_t s = 0; s < pool->n_slabs; s++) pool->slabs[s].index = -1;
    for (int32_t i = 0; i < pool->n_blocks; i++) {
        const rocq__pool_block *block = &pool->blocks[i];
        if (block->slab >= 0 && block->size != 0) pool->slabs[block->slab].index = 0;
    }
    for (int32_t s = 0; s < pool->n_slabs; s++) {
        rocq__slab *slab = &pool->slabs[s];
        if (slab->index < 0 && left > keep) left -= slab->size;
        else slab->index = n++;
    }
    if (n == pool->n_slabs) return ROCQ_OK;
    if (pool->memory != ROCQ_MEMORY_HOST) {
        ROCQ__TRY(rocq__hip_enter(ctx, "pool_trim"));
        ROCQ__TRY_HIP("pool_trim", ctx->gpu->hip->stream_wait(ctx->gpu->stream));
    }

    for (int32_t c = 0; c < pool->n_classes; c++) {
        int32_t *link = &pool->classes[c].free;
        while (*link >= 0) {
            const int32_t i = *link;
            rocq__pool_block *block = &pool->blocks[i];
            if (pool->slabs[block->slab].index >= 0) {
                link = &block->next;
                continue;
            }
            *link = block->next;
            block->slab = -1;
            block->next = pool->spare;
            pool->spare = i;
            pool->n_spare++;
        }
    }
    for (int32_t i = 0; i < pool->n_blocks; i++) {
        rocq__pool_block *block = &pool->blocks[i];
        if (block->slab >= 0) block->slab = pool->slabs[block->slab].index;
    }
    for (int32_t s = 0; s < pool->n_slabs; s++) {
        rocq__slab *slab = &pool->slabs[s];
        if (slab->index >= 0) {
            pool->slabs[slab->index] = *slab;
            continue;
        }
        rocq__size_class *cls = &pool->classes[slab->size_class];
        cls->n_blocks -= slab->size / cls->block_size;
        cls->n_trims++;
        rocq__slab_free(pool, slab);
    }
    pool->n_slabs = n;
    pool->reserved_bytes = left;
    return ROCQ_OK;
}

// Takes a slab for class c. If there is no room, gives back free slabs of as many bytes (not just
// of one block, which repeated would fragment memory) and takes a slab of one block; if there is
// still no room, gives back all free slabs first. Only the last failure is reported.
static rocq_result rocq__pool_grow(rocq_pool *pool, int32_t c) {
    rocq_ctx *ctx = pool->ctx;
    const rocq__size_class *cls = &pool->classes[c];
    rocq__attempt slab;
    int64_t n = 1;
    if (cls->block_size <= pool->slab_size / 4) {
        n = ROCQ__MAX(cls->n_blocks, ROCQ__SLAB_FIRST / cls->block_size);
        n = ROCQ__MAX(ROCQ__MIN(n, pool->slab_size / cls->block_size), 1);
    }
    for (int attempt = 0; attempt < 2; attempt++) {
        const int64_t keep = ROCQ__MAX(pool->reserved_bytes - n * cls->block_size, 0);
        rocq__attempt_begin(ctx, &slab);
        const rocq_result result = rocq__slab_take(pool, c, attempt == 0 ? n : 1);
        const bool no_memory = result == ROCQ_E_BUDGET || result == ROCQ_E_MEMORY;
        rocq__attempt_end(ctx, &slab, result == ROCQ_OK || no_memory);
        if (!no_memory) return result;
        ROCQ__TRY(rocq__pool_trim(pool, attempt == 0 ? keep : 0));
    }
    return rocq__slab_take(pool, c, 1);
}

// -- calls --

ROCQ_DEF void rocq_pool_destroy(rocq_pool **pool_at) {
    rocq_pool *pool = pool_at ? *pool_at : NULL;
    if (!pool) return;
    rocq_ctx *ctx = pool->ctx;
    // A GPU that is lost has no work left that could use the memory.
    if (pool->memory != ROCQ_MEMORY_HOST && pool->n_slabs > 0 && !ctx->gpu->lost &&
        rocq__hip_enter(ctx, "pool_destroy") == ROCQ_OK) {
        const int error = ctx->gpu->hip->stream_wait(ctx->gpu->stream);
        if (error != 0) rocq__hip_failed(ctx, "pool_destroy", error);
    }
    for (int32_t s = 0; s < pool->n_slabs; s++) rocq__slab_free(pool, &pool->slabs[s]);
    rocq__free(ctx, pool->blocks);
    rocq__free(ctx, pool->slabs);
    rocq__free(ctx, pool->classes);
    rocq__free(ctx, pool);
    *pool_at = NULL;
}

ROCQ_DEF rocq_result rocq_pool_create(rocq_ctx *ctx, rocq_pool **pool_at,
                                      const rocq_pool_desc *desc) {
    rocq_pool_desc d;
    if (pool_at) *pool_at = NULL;
    if (!ctx) return ROCQ_E_ARGUMENT;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!pool_at || d.slab_size < 0 || d.budget < -1 || d.n_classes < 0 ||
        (d.n_classes > 0 && !d.classes)) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                          "pool_create: pool or classes is NULL, or a number is out of range");
    }
    if (d.memory < ROCQ_MEMORY_DEFAULT || d.memory > ROCQ_MEMORY_DEVICE) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "pool_create: no memory %d", (int)d.memory);
    }
    if (d.memory == ROCQ_MEMORY_DEVICE && !rocq__on_gpu(ctx)) {
        return rocq__fail(ctx, ROCQ_E_UNSUPPORTED,
                          "pool_create: a CPU context has no device memory");
    }
    const int64_t most = rocq__default_size(ROCQ__CLASSES - 1);
    int64_t last = 0;
    for (int32_t c = 0; c < d.n_classes; c++) {
        if (d.classes[c] <= last || d.classes[c] % 256 != 0 || d.classes[c] > most) {
            return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                              "pool_create: class %d, %lld bytes, is no multiple of 256 above %lld",
                              (int)c, (long long)d.classes[c], (long long)last);
        }
        last = d.classes[c];
    }
    const int32_t first = last > 0 ? rocq__default_class(last + 1) : 0; // default class after it
    const int64_t n_classes = (int64_t)d.n_classes + ROCQ__CLASSES - first;

    const int64_t bytes = n_classes * (int64_t)sizeof(rocq__size_class);
    rocq_pool *pool = (rocq_pool *)rocq__alloc(ctx, (int64_t)sizeof *pool);
    rocq__size_class *classes = (rocq__size_class *)rocq__alloc(ctx, bytes);
    if (!pool || !classes || n_classes > INT32_MAX) {
        rocq__free(ctx, pool);
        rocq__free(ctx, classes);
        return rocq__fail(ctx, ROCQ_E_MEMORY, "pool_create: no host memory");
    }
    memset(pool, 0, sizeof *pool);
    memset(classes, 0, (size_t)bytes);
    for (int32_t c = 0; c < (int32_t)n_classes; c++) {
        const int32_t above = c - d.n_classes;
        classes[c].block_size = above < 0 ? d.classes[c] : rocq__default_size(first + above);
        classes[c].free = -1;
    }
    pool->ctx = ctx;
    pool->memory = d.memory != ROCQ_MEMORY_DEFAULT ? d.memory
                   : rocq__on_gpu(ctx)             ? ROCQ_MEMORY_DEVICE
                                                   : ROCQ_MEMORY_HOST;
    if (!rocq__on_gpu(ctx)) pool->memory = ROCQ_MEMORY_HOST;
    pool->by_formula = d.n_classes == 0;
    pool->exact = d.exact;
    pool->thread_safe = d.thread_safe;
    pool->lost = &pool->never;
    if (pool->memory != ROCQ_MEMORY_HOST && !d.thread_safe) pool->lost = &ctx->gpu->lost;
    pool->most = most - rocq__pool_guard(pool);
    if (pool->by_formula && !d.thread_safe) pool->quick_most = pool->most;
    pool->classes = classes;
    pool->n_classes = (int32_t)n_classes;
    pool->spare = -1;
    pool->slab_size = d.slab_size > 0 ? d.slab_size : 8 << 20;
    pool->budget = d.budget;
    *pool_at = pool;
    return ROCQ_OK;
}

static inline void rocq__guard_set(const rocq__pool_block *block) {
    unsigned char *guard = (unsigned char *)block->memory + block->size;
    for (int k = 0; k < ROCQ__GUARD; k++) guard[k] = 0xa5;
}

static inline bool rocq__guard_broken(const rocq__pool_block *block) {
    const unsigned char *guard = (const unsigned char *)block->memory + block->size;
    for (int k = 0; k < ROCQ__GUARD; k++) {
        if (guard[k] != 0xa5) return true;
    }
    return false;
}

// Alloc and free have a short inlined function each for the common case, which returns false in any
// other case, and a slow one for the rest.

// Hands out the first free block of the class; false if there is none.

ROCQ__ALWAYS_INLINE bool rocq__class_serves(rocq_pool *pool, rocq__size_class *cls,
                                            rocq_buffer *buffer, int64_t size) {
    const int32_t i = cls->free;
    if (i < 0) return false;
    rocq__pool_block *block = &pool->blocks[i];
    cls->free = block->next;
    cls->n_requests++;
    cls->live_bytes += size;
    if (cls->live_bytes > cls->peak_bytes) cls->peak_bytes = cls->live_bytes;
    pool->live_bytes += size;
    if (pool->live_bytes > pool->peak_bytes) pool->peak_bytes = pool->live_bytes;
    block->size = size;
    block->generation++;
    buffer->size = size;
    buffer->ticket = (uint64_t)block->generation << 32 | (uint32_t)i;
    if (pool->memory == ROCQ_MEMORY_DEVICE) {
        buffer->host = NULL;
        buffer->device.address = (uint64_t)(uintptr_t)block->memory;
    } else {
        buffer->host = block->memory;
        buffer->device.address = 0;
        rocq__guard_set(block);
    }
    return true;
}

ROCQ__NOINLINE rocq_result rocq__pool_search(rocq_pool *pool, rocq_buffer *buffer, int64_t size) {
    if (!buffer || size < 1 || size > pool->most) {
        return rocq__pool_fail(pool, ROCQ_E_ARGUMENT,
                               "pool_alloc: buffer is NULL, or %lld bytes are not 1 to %lld",
                               (long long)size, (long long)pool->most);
    }
    if (*pool->lost) return rocq__hip_enter(pool->ctx, "pool_alloc");
    const int32_t c = rocq__pool_class(pool, size);
    rocq__size_class *cls = &pool->classes[c];
    const int64_t largest = pool->exact ? cls->block_size : 2 * cls->block_size;
    for (int32_t k = c; k < pool->n_classes && pool->classes[k].block_size <= largest; k++) {
        if (rocq__class_serves(pool, &pool->classes[k], buffer, size)) return ROCQ_OK;
    }
    if (pool->budget < 0) {
        return rocq__pool_fail(
            pool, ROCQ_E_BUDGET,
            "pool_alloc: no free block of %lld bytes, and the pool does not grow",
            (long long)cls->block_size);
    }
    ROCQ__TRY(rocq__pool_grow(pool, c));
    cls->n_misses++;
    rocq__class_serves(pool, cls, buffer, size);
    return ROCQ_OK;
}

ROCQ__NOINLINE rocq_result rocq__pool_alloc_slow(rocq_pool *pool, rocq_buffer *buffer,
                                                 int64_t size) {
    rocq__pool_lock(pool);
    const rocq_result result = rocq__pool_search(pool, buffer, size);
    rocq__pool_unlock(pool);
    return result;
}

ROCQ_DEF rocq_result rocq_pool_alloc(rocq_pool *pool, rocq_buffer *buffer, int64_t size) {
    if (!pool) return ROCQ_E_ARGUMENT;
    if (buffer && (uint64_t)size - 1 < (uint64_t)pool->quick_most && !*pool->lost) {
        const int32_t c = rocq__default_class(size + rocq__pool_guard(pool));
        if (rocq__class_serves(pool, &pool->classes[c], buffer, size)) return ROCQ_OK;
    }
    return rocq__pool_alloc_slow(pool, buffer, size);
}

// The block that was handed out as this buffer and is still live, or NULL.
ROCQ__ALWAYS_INLINE rocq__pool_block *rocq__pool_find(rocq_pool *pool, const rocq_buffer *buffer) {
    const uint32_t i = (uint32_t)buffer->ticket, generation = (uint32_t)(buffer->ticket >> 32);
    if (i >= (uint32_t)pool->n_blocks || !(generation & 1)) return NULL;
    rocq__pool_block *block = &pool->blocks[i];
    const void *memory = pool->memory == ROCQ_MEMORY_DEVICE
                             ? (const void *)(uintptr_t)buffer->device.address
                             : buffer->host;
    const bool found = block->generation == generation && block->memory == memory &&
                       block->size == buffer->size;
    return found ? block : NULL;
}

// Counts the block as freed. size is its new one: 0, or -1 if it must not be used again.
ROCQ__ALWAYS_INLINE rocq__size_class *rocq__pool_return(rocq_pool *pool, rocq__pool_block *block,
                                                        int64_t size) {
    rocq__size_class *cls = &pool->classes[block->size_class];
    cls->n_frees++;
    cls->live_bytes -= block->size;
    pool->live_bytes -= block->size;
    block->generation++;
    block->size = size;
    return cls;
}

ROCQ__ALWAYS_INLINE bool rocq__pool_put(rocq_pool *pool, rocq_buffer *buffer) {
    rocq__pool_block *block = buffer ? rocq__pool_find(pool, buffer) : NULL;
    if (!block || (pool->memory != ROCQ_MEMORY_DEVICE && rocq__guard_broken(block))) return false;
    rocq__size_class *cls = rocq__pool_return(pool, block, 0);
    block->next = cls->free;
    cls->free = (int32_t)(uint32_t)buffer->ticket;
    memset(buffer, 0, sizeof *buffer);
    return true;
}

ROCQ__NOINLINE rocq_result rocq__pool_refuse(rocq_pool *pool, const rocq_buffer *buffer) {
    if (!buffer) return rocq__pool_fail(pool, ROCQ_E_ARGUMENT, "pool_free: buffer is NULL");
    if (!buffer->host && !buffer->device.address) return ROCQ_OK;
    rocq__pool_block *block = rocq__pool_find(pool, buffer);
    if (!block) {
        return rocq__pool_fail(pool, ROCQ_E_ARGUMENT, "pool_free: no live block of this pool: "
                               "freed before, foreign, or a piece of one");
    }
    rocq__pool_return(pool, block, -1)->n_overrun++;
    return rocq__pool_fail(pool, ROCQ_E_CORRUPT,
                           "pool_free: something has written behind a block of %lld bytes",
                           (long long)buffer->size);
}

ROCQ__NOINLINE rocq_result rocq__pool_free_slow(rocq_pool *pool, rocq_buffer *buffer) {
    rocq__pool_lock(pool);
    const bool put = pool->thread_safe && rocq__pool_put(pool, buffer);
    const rocq_result result = put ? ROCQ_OK : rocq__pool_refuse(pool, buffer);
    rocq__pool_unlock(pool);
    return result;
}

ROCQ_DEF rocq_result rocq_pool_free(rocq_pool *pool, rocq_buffer *buffer) {
    if (!pool) return ROCQ_E_ARGUMENT;
    if (!pool->thread_safe && rocq__pool_put(pool, buffer)) return ROCQ_OK;
    return rocq__pool_free_slow(pool, buffer);
}

static inline int64_t rocq__size_class_free(const rocq__size_class *cls) {
    return cls->n_blocks - cls->n_overrun - (cls->n_requests - cls->n_frees);
}

// Fails if n more blocks would overflow a count or exceed a budget, before any slab is taken.
static rocq_result rocq__pool_can_hold(rocq_pool *pool, const rocq__size_class *cls, int64_t n) {
    int64_t bytes, all;
    if (n <= 0) return ROCQ_OK;
    if (!rocq__mul(n, cls->block_size, &bytes) || !rocq__add(bytes, pool->reserved_bytes, &all) ||
        n > (int64_t)INT32_MAX - pool->n_blocks + pool->n_spare) {
        return rocq__fail(pool->ctx, ROCQ_E_OVERFLOW,
                          "pool_reserve: %lld more blocks of %lld bytes cannot be counted",
                          (long long)n, (long long)cls->block_size);
    }
    ROCQ__TRY(rocq__pool_fits(pool, bytes));
    ROCQ__TRY(rocq__take_budget(pool->ctx, bytes));
    pool->ctx->budget_used -= bytes; // each slab takes its own part
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_pool_reserve(rocq_pool *pool, int64_t size, int64_t n) {
    rocq_result result = ROCQ_OK;
    if (!pool) return ROCQ_E_ARGUMENT;
    rocq__pool_lock(pool);
    if (n < 0 || (uint64_t)size - 1 >= (uint64_t)pool->most) {
        result = rocq__pool_fail(pool, ROCQ_E_ARGUMENT, "pool_reserve: %lld blocks of %lld bytes",
                                 (long long)n, (long long)size);
    } else {
        const int32_t c = rocq__pool_class(pool, size);
        const rocq__size_class *cls = &pool->classes[c];
        const bool large = cls->block_size > pool->slab_size / 4;
        const int64_t most = large ? 1 : pool->slab_size / cls->block_size;
        result = rocq__pool_can_hold(pool, cls, n - rocq__size_class_free(cls));
        while (result == ROCQ_OK && rocq__size_class_free(cls) < n) {
            result = rocq__slab_take(pool, c, ROCQ__MIN(n - rocq__size_class_free(cls), most));
        }
    }
    rocq__pool_unlock(pool);
    return result;
}

ROCQ_DEF rocq_result rocq_pool_trim(rocq_pool *pool, int64_t keep) {
    if (!pool) return ROCQ_E_ARGUMENT;
    rocq__pool_lock(pool);
    const rocq_result result =
        keep < 0 ? rocq__pool_fail(pool, ROCQ_E_ARGUMENT, "pool_trim: keep is negative")
                 : rocq__pool_trim(pool, keep);
    rocq__pool_unlock(pool);
    return result;
}

// -- statistics --

static void rocq__pool_rates(rocq_pool_stats *s) {
    if (s->n_requests > 0) s->hit_rate = (double)s->n_hits / (double)s->n_requests;
    if (s->block_bytes > 0) s->internal = 1.0 - (double)s->live_bytes / (double)s->block_bytes;
    if (s->reserved_bytes > 0) {
        s->external = 1.0 - (double)s->block_bytes / (double)s->reserved_bytes;
    }
}

static rocq_pool_stats rocq__size_class_stats(const rocq__size_class *cls) {
    rocq_pool_stats s;
    memset(&s, 0, sizeof s);
    s.block_size = cls->block_size;
    s.n_requests = cls->n_requests;
    s.n_hits = cls->n_requests - cls->n_misses;
    s.n_frees = cls->n_frees;
    s.n_live = cls->n_requests - cls->n_frees;
    s.n_free = rocq__size_class_free(cls);
    s.live_bytes = cls->live_bytes;
    s.peak_bytes = cls->peak_bytes;
    s.block_bytes = s.n_live * s.block_size;
    s.reserved_bytes = cls->n_blocks * s.block_size;
    s.reserved_peak = cls->peak_blocks * s.block_size;
    s.n_reserves = cls->n_reserves;
    s.n_trims = cls->n_trims;
    rocq__pool_rates(&s);
    return s;
}

static rocq_pool_stats rocq__pool_total(const rocq_pool *pool) {
    rocq_pool_stats total;
    memset(&total, 0, sizeof total);
    for (int32_t c = 0; c < pool->n_classes; c++) {
        const rocq_pool_stats s = rocq__size_class_stats(&pool->classes[c]);
        total.n_requests += s.n_requests;
        total.n_hits += s.n_hits;
        total.n_frees += s.n_frees;
        total.n_live += s.n_live;
        total.n_free += s.n_free;
        total.block_bytes += s.block_bytes;
        total.n_reserves += s.n_reserves;
        total.n_trims += s.n_trims;
    }
    total.live_bytes = pool->live_bytes;
    total.peak_bytes = pool->peak_bytes;
    total.reserved_bytes = pool->reserved_bytes;
    total.reserved_peak = pool->reserved_peak;
    rocq__pool_rates(&total);
    return total;
}

ROCQ_DEF rocq_result rocq_pool_get_stats(rocq_pool *pool, int32_t size_class,
                                         rocq_pool_stats *stats) {
    rocq_result result = ROCQ_OK;
    if (!pool) return ROCQ_E_ARGUMENT;
    rocq__pool_lock(pool);
    if (!stats || size_class < -1 || size_class >= pool->n_classes) {
        result = rocq__pool_fail(pool, ROCQ_E_ARGUMENT,
                                 "pool_get_stats: stats is NULL or class %d is not -1 to %d",
                                 (int)size_class, (int)pool->n_classes - 1);
    } else if (size_class < 0) {
        *stats = rocq__pool_total(pool);
    } else {
        *stats = rocq__size_class_stats(&pool->classes[size_class]);
    }
    rocq__pool_unlock(pool);
    return result;
}

static void rocq__pool_print_text(rocq__output *out, const char *name, const rocq_pool_stats *s) {
    rocq__print(out, "%12s %10lld ", name, (long long)s->n_requests);
    rocq__print_number(out, 100.0 * s->hit_rate, 7, 2);
    rocq__print(out, " %8lld %8lld %14lld %14lld ", (long long)s->n_live, (long long)s->n_free,
                (long long)s->peak_bytes, (long long)s->reserved_bytes);
    rocq__print_number(out, 100.0 * s->internal, 8, 2);
    rocq__print_number(out, 100.0 * s->external, 10, 2);
    rocq__print(out, "\n");
}

static const rocq__number rocq__pool_fields[] = {
#define ROCQ_X(name, digits) {#name, offsetof(rocq_pool_stats, name), digits}
    ROCQ_X(block_size, -1), ROCQ_X(n_requests, -1), ROCQ_X(n_hits, -1), ROCQ_X(n_frees, -1),
    ROCQ_X(n_live, -1), ROCQ_X(n_free, -1), ROCQ_X(live_bytes, -1), ROCQ_X(peak_bytes, -1),
    ROCQ_X(block_bytes, -1), ROCQ_X(reserved_bytes, -1), ROCQ_X(reserved_peak, -1),
    ROCQ_X(n_reserves, -1), ROCQ_X(n_trims, -1), ROCQ_X(hit_rate, 6), ROCQ_X(internal, 6),
    ROCQ_X(external, 6)
#undef ROCQ_X
};

static void rocq__pool_print_json(rocq__output *out, const rocq_pool_stats *s) {
    rocq__print(out, "{");
    ROCQ__PRINT_FIELDS(out, rocq__pool_fields, s);
    rocq__print(out, "}");
}

ROCQ_DEF rocq_result rocq_pool_report(rocq_pool *pool, rocq_report kind, rocq_write_fn write,
                                      void *user) {
    rocq__output out = {write, user, false};
    if (!pool) return ROCQ_E_ARGUMENT;
    const bool json = kind == ROCQ_REPORT_JSON;
    rocq__pool_lock(pool);
    rocq_result result = ROCQ_OK;
    if (!write || (!json && kind != ROCQ_REPORT_TEXT)) {
        result = rocq__pool_fail(pool, ROCQ_E_ARGUMENT,
                                 "pool_report: write is NULL or there is no report %d", (int)kind);
    } else {
        const rocq_pool_stats total = rocq__pool_total(pool);
        bool comma = false;
        rocq__print(&out, json ? "{\"total\": "
                               : "       class   requests  hits %%     live     free     peak bytes"
                                 " reserved bytes  inside %% outside %%\n");
        if (json) rocq__pool_print_json(&out, &total);
        if (json) rocq__print(&out, ", \"classes\": [");
        for (int32_t c = 0; c < pool->n_classes; c++) {
            const rocq_pool_stats s = rocq__size_class_stats(&pool->classes[c]);
            char name[24];
            if (s.n_reserves == 0) continue;
            snprintf(name, sizeof name, "%lld", (long long)s.block_size);
            if (!json) rocq__pool_print_text(&out, name, &s);
            if (json && comma) rocq__print(&out, ",\n");
            if (json) rocq__pool_print_json(&out, &s);
            comma = true;
        }
        if (json) rocq__print(&out, "]}\n");
        else rocq__pool_print_text(&out, "total", &total);
        if (out.failed) result = rocq__pool_fail(pool, ROCQ_E_IO, "pool_report: write failed");
    }
    rocq__pool_unlock(pool);
    return result;
}

// ---------------------------------------------------------------------------------------------
// >>kv: keys and values of sequences, contiguous or paged
// ---------------------------------------------------------------------------------------------
// A cell holds the keys and values of one position, in all layers. Each head of each layer (a
// plane) is [D, n_cells] memory with cell c in row c, so that attention reads the rows of a head
// one after the other. Contiguous, sequence s has cells s n_ctx and up. Paged, page p is cells p
// page_size and up, and a table lists the pages of each sequence. Rows are moved by casts over all
// planes at once, in stream order, so the host never waits for a GPU. The host decides everything
// beforehand: once the casts begin, only a lost device stops them.

enum {
    ROCQ__KV_STAGE = 4 << 20, // most bytes of the stage, unless one position takes more
    ROCQ__KV_CHUNK = 16       // positions that it has room for at least, if those bytes suffice
};

struct rocq_kv {
    rocq_ctx *ctx;
    rocq_kv_desc desc; // with defaults filled in; rope is for keys that move (rocq__kv_rope)
    rocq_tensor freq_factors;
    int64_t n_cells, n_planes; // planes: heads of all layers
    int64_t seq_pages;         // of a sequence of n_ctx positions; 0 = contiguous
    int64_t chunk;             // positions that the stage has room for
    int64_t scratch;           // bytes of scratch memory that rotating keys takes
    rocq_buffer memory;
    rocq_tensor k, v;          // [D, n_cells, n_planes]
    rocq_tensor stage;         // F32 [D, n_planes, chunk]: rows between two cells, or cell and host
    rocq_tensor words;         // I32: the device's copy of length, table and turn
    int32_t *length;           // [n_seqs]
    int32_t *table;            // [seq_pages, n_seqs]
    int32_t *turn;             // [chunk] positions by which keys are rotated, all equal
    int32_t *refs;             // [n_pages] number of sequences that have the page
    int32_t *free_pages;       // [n_free] a stack
    int32_t *fill;             // [n_pages] for rocq_kv_get_stats
    int32_t n_free;
    int64_t dirty, dirty_end;  // range of the words that rocq_kv_flush has to copy
    int64_t n_page_copies;
};

static int64_t rocq__kv_n_words(const rocq_kv *kv) {
    return kv->desc.n_seqs * (1 + kv->seq_pages) + kv->chunk;
}

// Cuts the tensors from an arena: first from a measuring one, then from memory.
static rocq_result rocq__kv_cut(rocq_kv *kv, rocq_arena *arena) {
    const rocq_kv_desc *d = &kv->desc;
    const int64_t n = d->head_dim, planes = kv->n_planes;
    ROCQ__TRY(rocq_tensor_3d(arena, &kv->k, d->k_format, n, kv->n_cells, planes));
    ROCQ__TRY(rocq_tensor_3d(arena, &kv->v, d->v_format, n, kv->n_cells, planes));
    ROCQ__TRY(rocq_tensor_3d(arena, &kv->stage, ROCQ_F32, n, planes, kv->chunk));
    return rocq_tensor_1d(arena, &kv->words, ROCQ_I32, rocq__kv_n_words(kv));
}

// Checks desc.rope, by which keys that move are rotated again. They have YaRN's magnitude already:
// attn_factor is set to undo a second scaling.
static rocq_result rocq__kv_rope(rocq_kv *kv) {
    rocq_rope_config *rope = &kv->desc.rope;
    ROCQ__TRY(rocq__check_tensor(kv->ctx, "kv", "rope.freq_factors", rope->freq_factors,
                                 ROCQ__BIT_F32 | ROCQ__OPTIONAL));
    ROCQ__TRY(rocq__check_rope_config(kv->ctx, "kv", rope, kv->desc.head_dim));
    rope->attn_factor = 1.0f;
    const int64_t n_dims = rope->n_dims > 0 ? rope->n_dims : kv->desc.head_dim;
    rope->attn_factor = 1.0f / rocq__rope_scaling_of(rope, n_dims).magnitude;
    return rocq__check_range(kv->ctx, "kv", "YaRN's factor", rope->attn_factor, FLT_MIN, FLT_MAX);
}

// Prepares *kv but for its memory, and gives the bytes of that. rocq_kv_size and rocq_kv_create
// share it, so that both refuse the same; for rocq_kv_size ctx is NULL.
static rocq_result rocq__kv_plan(rocq_ctx *ctx, const rocq_kv_desc *desc, rocq_kv *kv,
                                 int64_t *bytes) {
    int64_t elems, block, position;
    rocq_arena arena;
    if (!desc) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "kv: desc is NULL");
    memset(kv, 0, sizeof *kv);
    kv->ctx = ctx;
    kv->desc = *desc;
    rocq_kv_desc *d = &kv->desc;
    if (d->n_seqs == 0) d->n_seqs = 1;
    if (d->n_layers < 1 || d->n_kv_heads < 1 || d->head_dim < 1 || d->n_ctx < 1 || d->n_seqs < 1) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                          "kv: %d layers of %d heads of %d elements, %d sequences of %d positions",
                          (int)d->n_layers, (int)d->n_kv_heads, (int)d->head_dim, (int)d->n_seqs,
                          (int)d->n_ctx);
    }
    if (d->page_size < 0 || d->n_pages < 0 || (d->n_pages > 0 && d->page_size == 0)) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "kv: %d pages of %d positions", (int)d->n_pages,
                          (int)d->page_size);
    }
    for (int i = 0; i < 2; i++) {
        const rocq_format format = i == 0 ? d->k_format : d->v_format;
        ROCQ__TRY(rocq__check_format(ctx, "kv", i == 0 ? "K" : "V", ROCQ__KV, format, &elems,
                                     &block));
        if (d->head_dim % elems != 0) {
            return rocq__fail(ctx, ROCQ_E_SHAPE,
                              "kv: heads of %d elements are no whole blocks of %d",
                              (int)d->head_dim, (int)elems);
        }
    }
    ROCQ__TRY(rocq__kv_rope(kv));
    kv->n_planes = (int64_t)d->n_layers * d->n_kv_heads;
    kv->n_cells = (int64_t)d->n_seqs * d->n_ctx;
    if (d->page_size > 0) {
        kv->seq_pages = ((int64_t)d->n_ctx + d->page_size - 1) / d->page_size;
        const int64_t n_pages = d->n_pages > 0 ? d->n_pages : d->n_seqs * kv->seq_pages;
        d->n_pages = (int32_t)ROCQ__MIN(n_pages, (int64_t)INT32_MAX);
        kv->n_cells = n_pages * d->page_size;
    }
    if (kv->n_cells > INT32_MAX || kv->n_planes > INT32_MAX ||
        d->n_seqs * (1 + kv->seq_pages) > INT32_MAX || // entries of tables
        !rocq__mul(kv->n_planes, d->head_dim * (int64_t)sizeof(float), &position)) {
        return rocq__fail(ctx, ROCQ_E_OVERFLOW, "kv: %lld cells of %lld heads",
                          (long long)kv->n_cells, (long long)kv->n_planes);
    }
    // 1/32 of the positions of a sequence: with F16 keys and values also 1/32 of its memory.
    kv->chunk = ROCQ__MAX(d->n_ctx / 32, (int32_t)ROCQ__KV_CHUNK);
    kv->chunk = ROCQ__MIN(kv->chunk, ROCQ__MAX(ROCQ__KV_STAGE / position, 1));
    kv->chunk = ROCQ__MIN(kv->chunk, (int64_t)d->n_ctx);
    rocq_arena_init(&arena, NULL);
    const rocq_result result = rocq__kv_cut(kv, &arena);
    if (result != ROCQ_OK) return rocq__fail(ctx, result, "kv: the cache's size overflows");
    *bytes = arena.used; // without slack, since rocq_buffer_alloc's memory is aligned
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_kv_size(const rocq_kv_desc *desc, int64_t *bytes) {
    rocq_kv kv;
    return bytes ? rocq__kv_plan(NULL, desc, &kv, bytes) : ROCQ_E_ARGUMENT;
}

// The params that rotate keys in the stage, in place, by turn. *pos becomes their tensor of turn.
static rocq_rope_params rocq__kv_turn(const rocq_kv *kv, const rocq_tensor *keys,
                                      rocq_tensor *pos) {
    rocq_rope_params p;
    // There are chunk of them at the end of the words.
    *pos = rocq_tensor_slice(&kv->words, 0, rocq__kv_n_words(kv) - kv->chunk, keys->ne[2]);
    p.x = p.y = keys;
    p.pos = pos;
    p.rope = kv->desc.rope;
    return p;
}

// The part of rocq_kv_create that takes device memory. If it fails, rocq_kv_destroy frees that.
static rocq_result rocq__kv_make(rocq_kv *kv, int64_t bytes) {
    rocq_arena arena;
    rocq_tensor pos;
    if (kv->desc.rope.freq_factors) { // the cache's own copy of the tensor
        kv->freq_factors = *kv->desc.rope.freq_factors;
        kv->desc.rope.freq_factors = &kv->freq_factors;
    }
    ROCQ__TRY(rocq_buffer_alloc(kv->ctx, &kv->memory, bytes));
    rocq_arena_init(&arena, &kv->memory);
    ROCQ__TRY(rocq__kv_cut(kv, &arena));
    const rocq_rope_params turn = rocq__kv_turn(kv, &kv->stage, &pos);
    ROCQ__TRY(rocq_scratch_size(kv->ctx, ROCQ_OP_ROPE, &turn, &kv->scratch));
    ROCQ__TRY(rocq_reserve(kv->ctx, kv->scratch));
    kv->dirty_end = rocq__kv_n_words(kv);
    return rocq_kv_flush(kv); // also takes the pinned memory that copies go through
}

ROCQ_DEF rocq_result rocq_kv_create(rocq_ctx *ctx, rocq_kv **out, const rocq_kv_desc *desc) {
    rocq_kv plan;
    int64_t bytes;
    if (out) *out = NULL;
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!out) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "kv_create: kv is NULL");
    ROCQ__TRY(rocq__not_recording(ctx, "kv_create"));
    ROCQ__TRY(rocq__kv_plan(ctx, desc, &plan, &bytes));
    const int64_t n_words = rocq__kv_n_words(&plan), n_pages = plan.desc.n_pages;
    const int64_t host = (n_words + 3 * n_pages) * (int64_t)sizeof(int32_t);
    rocq_kv *kv = (rocq_kv *)rocq__alloc(ctx, (int64_t)sizeof *kv + host);
    if (!kv) {
        return rocq__fail(ctx, ROCQ_E_MEMORY, "kv_create: no memory for %lld bytes",
                          (long long)host);
    }
    *kv = plan;
    kv->length = (int32_t *)(void *)(kv + 1);
    kv->table = kv->length + kv->desc.n_seqs;
    kv->turn = kv->length + n_words - kv->chunk;
    kv->refs = kv->length + n_words;
    kv->free_pages = kv->refs + n_pages;
    kv->fill = kv->free_pages + n_pages;
    memset(kv->length, 0, (size_t)host);
    for (int32_t i = 0; i < n_pages; i++) kv->free_pages[i] = (int32_t)n_pages - 1 - i;
    kv->n_free = (int32_t)n_pages;
    const rocq_result result = rocq__kv_make(kv, bytes);
    if (result != ROCQ_OK) rocq_kv_destroy(&kv);
    *out = kv;
    return result;
}

ROCQ_DEF void rocq_kv_destroy(rocq_kv **kv_ptr) {
    if (!kv_ptr || !*kv_ptr) return;
    rocq_kv *kv = *kv_ptr;
    *kv_ptr = NULL;
    rocq_buffer_free(kv->ctx, &kv->memory);
    rocq__free(kv->ctx, kv);
}

// -- bookkeeping --

static rocq_result rocq__kv_check(const rocq_kv *kv, const char *call, int32_t seq) {
    if (!kv) return ROCQ_E_ARGUMENT;
    if (seq >= 0 && seq < kv->desc.n_seqs) return ROCQ_OK;
    return rocq__fail(kv->ctx, ROCQ_E_ARGUMENT, "%s: sequence %d of %d", call, (int)seq,
                      (int)kv->desc.n_seqs);
}

// The same for calls that may run ops. They can be cancelled here, but not between their ops: a
// move that stops halfway would leave neither the old sequence nor the new one.
static rocq_result rocq__kv_begin(const rocq_kv *kv, const char *call, int32_t seq) {
    ROCQ__TRY(rocq__kv_check(kv, call, seq));
    ROCQ__TRY(rocq__not_recording(kv->ctx, call));
    return rocq__begin_op(kv->ctx, call);
}

static void rocq__kv_set(rocq_kv *kv, int32_t *word, int32_t value) {
    const int64_t i = word - kv->length;
    kv->dirty = ROCQ__MIN(kv->dirty, i);
    kv->dirty_end = ROCQ__MAX(kv->dirty_end, i + 1);
    *word = value;
}

static int32_t *rocq__kv_table(const rocq_kv *kv, int32_t seq) {
    return kv->table + seq * kv->seq_pages;
}

// Pages of a sequence of so many positions; none when contiguous.
static int32_t rocq__kv_pages(const rocq_kv *kv, int64_t length) {
    const int64_t size = kv->desc.page_size;
    return size > 0 ? (int32_t)((length + size - 1) / size) : 0;
}

static int32_t rocq__kv_take(rocq_kv *kv) {
    const int32_t page = kv->free_pages[--kv->n_free];
    kv->refs[page] = 1;
    return page;
}

static void rocq__kv_drop(rocq_kv *kv, int32_t page) {
    if (--kv->refs[page] == 0) kv->free_pages[kv->n_free++] = page;
}

// Also takes the pages for the new length, of which enough must be free, or gives some back.
static void rocq__kv_set_length(rocq_kv *kv, int32_t seq, int32_t length) {
    int32_t *table = rocq__kv_table(kv, seq);
    int32_t held = rocq__kv_pages(kv, kv->length[seq]);
    const int32_t pages = rocq__kv_pages(kv, length);
    for (; held < pages; held++) rocq__kv_set(kv, &table[held], rocq__kv_take(kv));
    for (; held > pages; held--) rocq__kv_drop(kv, table[held - 1]);
    rocq__kv_set(kv, &kv->length[seq], length);
}

// How many of a sequence's pages [begin, end) other sequences have too.
static int32_t rocq__kv_shared(const rocq_kv *kv, int32_t seq, int32_t begin, int32_t end) {
    const int32_t *table = rocq__kv_table(kv, seq);
    int32_t n = 0;
    for (int32_t i = begin; i < end; i++) n += kv->refs[table[i]] > 1;
    return n;
}

static rocq_result rocq__kv_want_pages(const rocq_kv *kv, const char *call, int32_t want,
                                       int32_t have) {
    if (want <= have) return ROCQ_OK;
    return rocq__fail(kv->ctx, ROCQ_E_MEMORY, "%s: needs %d pages, %d of %d are free", call,
                      (int)want, (int)have, (int)kv->desc.n_pages);
}

// Gives the cell of pos; returns how many of the n positions from pos on are in successive cells.
static int32_t rocq__kv_run(const rocq_kv *kv, int32_t seq, int32_t pos, int32_t n,
                            int32_t *cell) {
    const int32_t size = kv->desc.page_size, *table = rocq__kv_table(kv, seq);
    if (size == 0) {
        *cell = seq * kv->desc.n_ctx + pos;
        return n;
    }
    int32_t page = pos / size, run = size - pos % size;
    *cell = table[page] * size + pos % size;
    for (; run < n && table[page + 1] == table[page] + 1; page++) run += size;
    return ROCQ__MIN(run, n);
}

// -- moving rows --

static rocq_result rocq__kv_cast(rocq_kv *kv, const rocq_tensor *y, const rocq_tensor *x) {
    rocq_cast_params p;
    p.y = y;
    p.x = x;
    return rocq__run_on_device(kv->ctx, ROCQ_OP_CAST, &p);
}

// Cells [cell, cell + n) of k or v: [D, n, n_planes].
static rocq_tensor rocq__kv_cells(const rocq_tensor *rows, int64_t cell, int64_t n) {
    return rocq_tensor_slice(rows, 1, cell, n);
}

// Copies n cells to others that do not overlap them.
static rocq_result rocq__kv_copy(rocq_kv *kv, int64_t to, int64_t from, int64_t n) {
    for (int i = 0; i < 2; i++) {
        const rocq_tensor *rows = i == 0 ? &kv->k : &kv->v;
        const rocq_tensor y = rocq__kv_cells(rows, to, n), x = rocq__kv_cells(rows, from, n);
        ROCQ__TRY(rocq__kv_cast(kv, &y, &x));
    }
    return ROCQ_OK;
}

// Replaces the shared ones of a sequence's pages [begin, end) by copies. Enough pages must be free.
static rocq_result rocq__kv_own(rocq_kv *kv, int32_t seq, int32_t begin, int32_t end) {
    const int32_t size = kv->desc.page_size;
    int32_t *table = rocq__kv_table(kv, seq);
    for (int32_t i = begin; i < end; i++) {
        const int32_t old = table[i], held = ROCQ__MIN(size, kv->length[seq] - i * size);
        if (kv->refs[old] == 1) continue;
        const int32_t page = rocq__kv_take(kv);
        rocq__kv_drop(kv, old);
        rocq__kv_set(kv, &table[i], page);
        kv->n_page_copies++;
        ROCQ__TRY(rocq__kv_copy(kv, (int64_t)page * size, (int64_t)old * size, held));
    }
    return ROCQ_OK;
}

// A tensor in the stage for n <= chunk positions: [D, n_planes, n].
static rocq_tensor rocq__kv_stage(const rocq_kv *kv, rocq_format format, int64_t n) {
    const int64_t ne[3] = {kv->desc.head_dim, kv->n_planes, n};
    rocq_tensor t = kv->stage;
    // cannot fail: no format is wider than the stage's
    rocq_tensor_init(&t, &kv->stage.buffer, kv->stage.offset, format, 3, ne);
    return t;
}

// Copies as many positions of a sequence as stage has, from pos on: to stage, or from it if out.
static rocq_result rocq__kv_move(rocq_kv *kv, const rocq_tensor *rows, int32_t seq, int32_t pos,
                                 const rocq_tensor *stage, bool out) {
    const int32_t n = (int32_t)stage->ne[2], swap[4] = {0, 2, 1, 3};
    for (int32_t done = 0, run; done < n; done += run) {
        int32_t cell;
        run = rocq__kv_run(kv, seq, pos + done, n - done, &cell);
        const rocq_tensor cells = rocq__kv_cells(rows, cell, run);
        rocq_tensor slice = rocq_tensor_slice(stage, 2, done, run);
        rocq_tensor_permute(&slice, &slice, swap); // cannot fail
        ROCQ__TRY(out ? rocq__kv_cast(kv, &cells, &slice) : rocq__kv_cast(kv, &slice, &cells));
    }
    return ROCQ_OK;
}

// -- calls --

ROCQ_DEF rocq_result rocq_kv_layer(rocq_kv *kv, int32_t layer, int32_t seq0, int32_t n_seqs,
                                   rocq_kv_view *out) {
    ROCQ__TRY(rocq__kv_check(kv, "kv_layer", seq0));
    const rocq_kv_desc *d = &kv->desc;
    if (!out || layer < 0 || layer >= d->n_layers || n_seqs < 1 || n_seqs > d->n_seqs - seq0) {
        return rocq__fail(kv->ctx, ROCQ_E_ARGUMENT, "kv_layer: layer %d of %d, sequences %d + %d "
                          "of %d, or view is NULL", (int)layer, (int)d->n_layers, (int)seq0,
                          (int)n_seqs, (int)d->n_seqs);
    }
    const int64_t plane = (int64_t)layer * d->n_kv_heads, own = (int64_t)seq0 * d->n_ctx;
    const int64_t tables = d->n_seqs + seq0 * kv->seq_pages;
    const int64_t pages[2] = {kv->seq_pages, n_seqs};
    const int32_t swap[4] = {0, 2, 1, 3};
    rocq_kv_view view; // nothing below can fail: it is all inside
    memset(&view, 0, sizeof view);
    for (int i = 0; i < 2; i++) {
        rocq_tensor *cache = i == 0 ? &view.k_cache : &view.v_cache;
        rocq_tensor *attended = i == 0 ? &view.k : &view.v;
        *cache = rocq_tensor_slice(i == 0 ? &kv->k : &kv->v, 2, plane, d->n_kv_heads);
        rocq_tensor_permute(cache, cache, swap);
        *attended = *cache;
        if (d->page_size > 0) continue;
        *attended = rocq_tensor_slice(cache, 2, own, d->n_ctx);
        attended->n_dims = 4;
        attended->ne[3] = n_seqs;
        attended->stride[3] = d->n_ctx * attended->stride[2];
    }
    view.kv_len = rocq_tensor_slice(&kv->words, 0, seq0, n_seqs);
    view.page_size = d->page_size;
    if (d->page_size > 0) {
        view.page_table = rocq_tensor_slice(&kv->words, 0, tables, n_seqs * kv->seq_pages);
        rocq_tensor_reshape(&view.page_table, &view.page_table, 2, pages);
    }
    *out = view;
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_kv_append(rocq_kv *kv, int32_t seq, int32_t n, int32_t *cells) {
    ROCQ__TRY(rocq__kv_begin(kv, "kv_append", seq));
    const int32_t length = kv->length[seq], size = kv->desc.page_size;
    if (n < 0) return rocq__fail(kv->ctx, ROCQ_E_ARGUMENT, "kv_append: %d positions", (int)n);
    if (n > kv->desc.n_ctx - length) {
        return rocq__fail(kv->ctx, ROCQ_E_BOUNDS, "kv_append: %d more positions with %d of %d",
                          (int)n, (int)length, (int)kv->desc.n_ctx);
    }
    const int32_t held = rocq__kv_pages(kv, length), pages = rocq__kv_pages(kv, length + n);
    const int32_t written = n > 0 && size > 0 ? length / size : held; // first page, may be shared
    const int32_t shared = rocq__kv_shared(kv, seq, written, held);
    ROCQ__TRY(rocq__kv_want_pages(kv, "kv_append", shared + pages - held, kv->n_free));
    ROCQ__TRY(rocq__kv_own(kv, seq, written, held));
    rocq__kv_set_length(kv, seq, length + n);
    for (int32_t done = 0, run; cells && done < n; done += run) {
        int32_t cell;
        run = rocq__kv_run(kv, seq, length + done, n - done, &cell);
        for (int32_t i = 0; i < run; i++) cells[done + i] = cell + i;
    }
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_kv_flush(rocq_kv *kv) {
    ROCQ__TRY(rocq__kv_check(kv, "kv_flush", 0));
    ROCQ__TRY(rocq__not_recording(kv->ctx, "kv_flush"));
    if (kv->dirty >= kv->dirty_end) return ROCQ_OK;
    const rocq_tensor words =
        rocq_tensor_slice(&kv->words, 0, kv->dirty, kv->dirty_end - kv->dirty);
    ROCQ__TRY(rocq_upload(kv->ctx, &words, kv->length + kv->dirty, rocq_tensor_size(&words)));
    kv->dirty = INT64_MAX;
    kv->dirty_end = 0;
    return ROCQ_OK;
}

ROCQ_DEF int32_t rocq_kv_length(const rocq_kv *kv, int32_t seq) {
    return kv && seq >= 0 && seq < kv->desc.n_seqs ? kv->length[seq] : -1;
}

ROCQ_DEF rocq_result rocq_kv_truncate(rocq_kv *kv, int32_t seq, int32_t length) {
    ROCQ__TRY(rocq__kv_check(kv, "kv_truncate", seq));
    if (length < 0 || length > kv->length[seq]) {
        return rocq__fail(kv->ctx, ROCQ_E_ARGUMENT, "kv_truncate: to %d positions of %d",
                          (int)length, (int)kv->length[seq]);
    }
    if (length < kv->length[seq]) rocq__kv_set_length(kv, seq, length);
    return ROCQ_OK;
}

// If first and n are whole pages, the dropped pages leave the table and no row moves. Otherwise
// rows move down, front to back, so that none is overwritten before it is read. Keys are rotated.
ROCQ_DEF rocq_result rocq_kv_shift(rocq_kv *kv, int32_t seq, int32_t first, int32_t n) {
    ROCQ__TRY(rocq__kv_begin(kv, "kv_shift", seq));
    const int32_t length = kv->length[seq], size = kv->desc.page_size;
    if (first < 0 || n < 0 || first > length || n > length - first) {
        return rocq__fail(kv->ctx, ROCQ_E_ARGUMENT, "kv_shift: positions %d + %d of %d", (int)first,
                          (int)n, (int)length);
    }
    if (n == 0) return ROCQ_OK;
    const bool whole = size > 0 && first % size == 0 && n % size == 0;
    const int32_t left = length - n, end = rocq__kv_pages(kv, left);
    const int32_t begin = size > 0 ? ROCQ__MIN(first / size, end) : 0; // written are [begin, end)
    const int32_t out = whole ? n / size : 0; // pages that are dropped
    int32_t *table = rocq__kv_table(kv, seq);
    // Shared pages come before own ones: if one is copied, dropping those before it frees no page.
    const int32_t want = first < left ? rocq__kv_shared(kv, seq, begin + out, end + out) : 0;
    ROCQ__TRY(rocq__kv_want_pages(kv, "kv_shift", want, kv->n_free));
    // rocq_kv_create has reserved it, but a larger rocq_reserve that failed may have freed it.
    ROCQ__TRY(rocq_reserve(kv->ctx, kv->scratch));
    if (whole) {
        for (int32_t i = begin; i < begin + out; i++) rocq__kv_drop(kv, table[i]);
        for (int32_t i = begin; i < end; i++) rocq__kv_set(kv, &table[i], table[i + out]);
        rocq__kv_set(kv, &kv->length[seq], left);
    }
    if (first < left) {
        for (int64_t i = 0; i < kv->chunk; i++) rocq__kv_set(kv, &kv->turn[i], -n);
        ROCQ__TRY(rocq_kv_flush(kv));
        ROCQ__TRY(rocq__kv_own(kv, seq, begin, end));
    }
    for (int32_t to = first, m; to < left; to += m) {
        m = ROCQ__MIN((int32_t)kv->chunk, left - to);
        const int32_t from = whole ? to : to + n;
        const rocq_tensor keys = rocq__kv_stage(kv, ROCQ_F32, m);
        const rocq_tensor values = rocq__kv_stage(kv, kv->desc.v_format, m);
        rocq_tensor pos;
        const rocq_rope_params turn = rocq__kv_turn(kv, &keys, &pos);
        ROCQ__TRY(rocq__kv_move(kv, &kv->k, seq, from, &keys, false));
        ROCQ__TRY(rocq__run_on_device(kv->ctx, ROCQ_OP_ROPE, &turn));
        ROCQ__TRY(rocq__kv_move(kv, &kv->k, seq, to, &keys, true));
        if (whole) continue;
        ROCQ__TRY(rocq__kv_move(kv, &kv->v, seq, from, &values, false));
        ROCQ__TRY(rocq__kv_move(kv, &kv->v, seq, to, &values, true));
    }
    if (!whole) rocq__kv_set_length(kv, seq, left);
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_kv_fork(rocq_kv *kv, int32_t src, int32_t dst) {
    ROCQ__TRY(rocq__kv_begin(kv, "kv_fork", src));
    ROCQ__TRY(rocq__kv_check(kv, "kv_fork", dst));
    const int32_t length = kv->length[src], n_ctx = kv->desc.n_ctx;
    if (src == dst) return ROCQ_OK;
    rocq__kv_set_length(kv, dst, 0);
    for (int32_t i = 0; i < rocq__kv_pages(kv, length); i++) {
        const int32_t page = rocq__kv_table(kv, src)[i];
        kv->refs[page]++;
        rocq__kv_set(kv, &rocq__kv_table(kv, dst)[i], page);
    }
    if (kv->desc.page_size == 0 && length > 0) {
        ROCQ__TRY(rocq__kv_copy(kv, (int64_t)dst * n_ctx, (int64_t)src * n_ctx, length));
    }
    rocq__kv_set(kv, &kv->length[dst], length);
    return ROCQ_OK;
}

// A snapshot is this header, then the keys of all positions, then their values, each a
// [D, n_planes, length] tensor of the cache's format.
typedef struct rocq__kv_header {
    char magic[8];
    int32_t version, n_layers, n_kv_heads, head_dim, k_format, v_format, length, zero;
    uint64_t checksum; // of the whole snapshot with 0 in this field
} rocq__kv_header;

enum { ROCQ__KV_VERSION = 1 };

// The checksum of a snapshot with h as its header, in which the checksum is 0.
static uint64_t rocq__kv_checksum(const rocq__kv_header *h, const void *snapshot, int64_t size) {
    const int64_t head = (int64_t)sizeof *h;
    return rocq__checksum(rocq__checksum(0, h, head), (const unsigned char *)snapshot + head,
                          size - head);
}

static rocq__kv_header rocq__kv_header_of(const rocq_kv *kv, int32_t length) {
    const rocq_kv_desc *d = &kv->desc;
    rocq__kv_header h;
    memset(&h, 0, sizeof h);
    memcpy(h.magic, "rocq kv", 8);
    h.version = ROCQ__KV_VERSION;
    h.n_layers = d->n_layers;
    h.n_kv_heads = d->n_kv_heads;
    h.head_dim = d->head_dim;
    h.k_format = (int32_t)d->k_format;
    h.v_format = (int32_t)d->v_format;
    h.length = length;
    return h;
}

// Bytes of a snapshot: no more than the cache's own, which are known to fit.
static int64_t rocq__kv_snapshot_size(const rocq_kv *kv, int32_t length) {
    const int64_t elems = kv->desc.head_dim * kv->n_planes * length;
    return (int64_t)sizeof(rocq__kv_header) + rocq__bytes(kv->desc.k_format, elems) +
           rocq__bytes(kv->desc.v_format, elems);
}

// Copies a sequence's keys and values to save or from restore, behind a header; one is NULL.
static rocq_result rocq__kv_transfer(rocq_kv *kv, int32_t seq, int32_t length,
                                     unsigned char *save, const unsigned char *restore) {
    int64_t at = (int64_t)sizeof(rocq__kv_header);
    for (int i = 0; i < 2; i++) {
        const rocq_tensor *rows = i == 0 ? &kv->k : &kv->v;
        for (int32_t pos = 0, n; pos < length; pos += n) {
            n = ROCQ__MIN((int32_t)kv->chunk, length - pos);
            const rocq_tensor stage = rocq__kv_stage(kv, rows->format, n);
            const int64_t size = rocq_tensor_size(&stage);
            if (save) {
                ROCQ__TRY(rocq__kv_move(kv, rows, seq, pos, &stage, false));
                ROCQ__TRY(rocq_download(kv->ctx, save + at, &stage, size));
            } else {
                ROCQ__TRY(rocq_upload(kv->ctx, &stage, restore + at, size));
                ROCQ__TRY(rocq__kv_move(kv, rows, seq, pos, &stage, true));
            }
            at += size;
        }
    }
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_kv_save(rocq_kv *kv, int32_t seq, void *dst, int64_t size,
                                  int64_t *needed) {
    ROCQ__TRY(rocq__kv_begin(kv, "kv_save", seq));
    const int64_t bytes = rocq__kv_snapshot_size(kv, kv->length[seq]);
    if (dst ? size < bytes : !needed) {
        return rocq__fail(kv->ctx, ROCQ_E_ARGUMENT, "kv_save: %lld bytes of room for %lld",
                          (long long)size, (long long)bytes);
    }
    if (dst) {
        rocq__kv_header h = rocq__kv_header_of(kv, kv->length[seq]);
        ROCQ__TRY(rocq__kv_transfer(kv, seq, h.length, (unsigned char *)dst, NULL));
        h.checksum = rocq__kv_checksum(&h, dst, bytes);
        memcpy(dst, &h, sizeof h);
    }
    if (needed) *needed = bytes;
    return ROCQ_OK;
}

static rocq_result rocq__kv_check_snapshot(const rocq_kv *kv, const void *src, int64_t size,
                                           rocq__kv_header *h) {
    const int64_t head = (int64_t)sizeof *h;
    rocq_ctx *ctx = kv->ctx;
    if (!src) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "kv_restore: src is NULL");
    if (size < head) {
        return rocq__fail(ctx, ROCQ_E_TRUNCATED, "kv_restore: %lld bytes are no snapshot",
                          (long long)size);
    }
    memcpy(h, src, sizeof *h);
    rocq__kv_header own = rocq__kv_header_of(kv, h->length);
    if (memcmp(h->magic, own.magic, sizeof own.magic) != 0) {
        return rocq__fail(ctx, ROCQ_E_CORRUPT, "kv_restore: not a snapshot");
    }
    if (h->version != own.version) {
        return rocq__fail(ctx, ROCQ_E_FOREIGN, "kv_restore: version %d, this is %d",
                          (int)h->version, (int)own.version);
    }
    own.checksum = h->checksum;
    if (memcmp(h, &own, sizeof own) != 0) {
        return rocq__fail(ctx, ROCQ_E_SHAPE,
                          "kv_restore: %d layers of %d heads of %d elements in formats %d and %d",
                          (int)h->n_layers, (int)h->n_kv_heads, (int)h->head_dim, (int)h->k_format,
                          (int)h->v_format);
    }
    if (h->length < 0 || h->length > kv->desc.n_ctx) {
        return rocq__fail(ctx, ROCQ_E_BOUNDS, "kv_restore: %d positions, there is room for %d",
                          (int)h->length, (int)kv->desc.n_ctx);
    }
    const int64_t bytes = rocq__kv_snapshot_size(kv, h->length);
    if (size != bytes) {
        return rocq__fail(ctx, size < bytes ? ROCQ_E_TRUNCATED : ROCQ_E_CORRUPT,
                          "kv_restore: %lld bytes, %d positions are %lld", (long long)size,
                          (int)h->length, (long long)bytes);
    }
    own.checksum = 0;
    if (rocq__kv_checksum(&own, src, bytes) == h->checksum) return ROCQ_OK;
    return rocq__fail(ctx, ROCQ_E_CORRUPT, "kv_restore: the checksum is wrong");
}

ROCQ_DEF rocq_result rocq_kv_restore(rocq_kv *kv, int32_t seq, const void *src, int64_t size) {
    rocq__kv_header h;
    ROCQ__TRY(rocq__kv_begin(kv, "kv_restore", seq));
    ROCQ__TRY(rocq__kv_check_snapshot(kv, src, size, &h));
    const int32_t held = rocq__kv_pages(kv, kv->length[seq]), pages = rocq__kv_pages(kv, h.length);
    const int32_t freed = held - rocq__kv_shared(kv, seq, 0, held);
    ROCQ__TRY(rocq__kv_want_pages(kv, "kv_restore", pages, kv->n_free + freed));
    rocq__kv_set_length(kv, seq, 0);
    rocq__kv_set_length(kv, seq, h.length);
    return rocq__kv_transfer(kv, seq, h.length, NULL, (const unsigned char *)src);
}

ROCQ_DEF rocq_result rocq_kv_get_stats(const rocq_kv *kv, rocq_kv_stats *stats) {
    if (!kv) return ROCQ_E_ARGUMENT;
    if (!stats) return rocq__fail(kv->ctx, ROCQ_E_ARGUMENT, "kv_get_stats: stats is NULL");
    const rocq_kv_desc *d = &kv->desc;
    const int64_t elems = d->head_dim * kv->n_planes; // of a position
    const int64_t position = rocq__bytes(d->k_format, elems) + rocq__bytes(d->v_format, elems);
    int64_t used = 0, capacity = 0; // positions, those of a shared page once
    memset(stats, 0, sizeof *stats);
    if (d->page_size > 0) memset(kv->fill, 0, (size_t)d->n_pages * sizeof(int32_t));
    for (int32_t seq = 0; seq < d->n_seqs; seq++) {
        const int32_t length = kv->length[seq], *table = rocq__kv_table(kv, seq);
        stats->n_positions += length;
        if (d->page_size == 0) {
            used += length;
            capacity += length > 0 ? d->n_ctx : 0;
        }
        for (int32_t i = 0; i < rocq__kv_pages(kv, length); i++) {
            int32_t *fill = &kv->fill[table[i]];
            *fill = ROCQ__MAX(*fill, ROCQ__MIN(d->page_size, length - i * d->page_size));
        }
    }
    for (int32_t page = 0; page < d->n_pages; page++) {
        used += kv->fill[page];
        capacity += kv->refs[page] > 0 ? d->page_size : 0;
        stats->n_shared_pages += kv->refs[page] > 1;
    }
    stats->reserved_bytes = kv->n_cells * position;
    stats->used_bytes = used * position;
    stats->n_pages = d->n_pages;
    stats->n_free_pages = kv->n_free;
    stats->n_page_copies = kv->n_page_copies;
    stats->internal = capacity > 0 ? 1.0 - (double)used / (double)capacity : 0.0;
    stats->unused = 1.0 - (double)used / (double)kv->n_cells;
    return ROCQ_OK;
}

// ---------------------------------------------------------------------------------------------
// >>public: context, introspection, and the ops' thin bodies
// ---------------------------------------------------------------------------------------------
// Contexts: choosing a device and sharing it with a renderer. Then what no other section has.

#if defined(__linux__) && ROCQ__HAS_STDIO
enum { ROCQ__MOST_CPUS = 1024 };

// Reads a list such as "0-3,8" from the line of a file that begins with key. Returns the first
// number that `among` has (NULL: any), or -1, and adds all numbers to set, unless that is NULL.
static long rocq__cpu_list(const char *path, const char *key, const bool *among, bool *set) {
    char line[4096];
    long found = -1;
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, key, strlen(key)) != 0) continue;
        char *at = line + strlen(key);
        do {
            const long first = strtol(at, &at, 10);
            const long last = *at == '-' ? strtol(at + 1, &at, 10) : first;
            for (long i = ROCQ__MAX(first, 0); i <= last && i < ROCQ__MOST_CPUS; i++) {
                if (found < 0 && (!among || among[i])) found = i;
                if (set) set[i] = true;
            }
        } while (*at++ == ',');
        break;
    }
    if (file) fclose(file);
    return found;
}
#endif

// Cores that this process may use, each once: a second hyperthread of a core adds little to what
// one thread gets out of it here. Where that cannot be found out, what the system calls processors.
static int32_t rocq__core_count(void) {
    long n = 0;
#if defined(_WIN32)
    SYSTEM_LOGICAL_PROCESSOR_INFORMATION list[512];
    DWORD size = sizeof list;
    DWORD_PTR own, all;
    if (GetProcessAffinityMask(GetCurrentProcess(), &own, &all) &&
        GetLogicalProcessorInformation(list, &size)) {
        for (size_t i = 0; i < size / sizeof *list; i++) {
            const bool core = list[i].Relationship == RelationProcessorCore;
            n += core && (list[i].ProcessorMask & own) != 0;
        }
    }
    if (n == 0) {
        SYSTEM_INFO system;
        GetSystemInfo(&system);
        n = (long)system.dwNumberOfProcessors;
    }
#else
#if defined(__linux__) && ROCQ__HAS_STDIO
    bool own[ROCQ__MOST_CPUS] = {false};
    char path[96];
    rocq__cpu_list("/proc/self/status", "Cpus_allowed_list:", NULL, own);
    for (long i = 0; i < ROCQ__MOST_CPUS && n < ROCQ__MAX_THREADS; i++) {
        if (!own[i]) continue;
        snprintf(path, sizeof path,
                 "/sys/devices/system/cpu/cpu%ld/topology/thread_siblings_list", i);
        const long first = rocq__cpu_list(path, "", own, NULL);
        n += first < 0 || first == i; // the others are counted with the first
    }
#endif
    if (n == 0) n = sysconf(_SC_NPROCESSORS_ONLN);
#endif
    return (int32_t)ROCQ__MIN(ROCQ__MAX(n, 1), (long)ROCQ__MAX_THREADS);
}

#if ROCQ__HAS_AVX2
static bool rocq__cpu_has_avx2(void) {
    unsigned a, b, c, d;
    // The builtin also checks that the system saves the wide registers. It does not know F16C.
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29) != 0;
}

static bool rocq__cpu_has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

static bool rocq__cpu_has_avx_vnni(void) {
    unsigned a, b, c, d;
    return ROCQ__HAS_AVX_VNNI && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4) != 0;
}
#endif

static rocq_cpu_tier rocq__cpu_best(void) {
#if ROCQ__HAS_AVX2
    if (!rocq__cpu_has_avx2()) return ROCQ_CPU_PLAIN;
    return rocq__cpu_has_avx512()     ? ROCQ_CPU_AVX512
           : rocq__cpu_has_avx_vnni() ? ROCQ_CPU_AVX_VNNI
                                      : ROCQ_CPU_SIMD;
#else
    return ROCQ__HAS_NEON ? ROCQ_CPU_SIMD : ROCQ_CPU_PLAIN;
#endif
}

static bool rocq__cpu_has(rocq_cpu_tier tier) {
#if ROCQ__HAS_AVX2
    if (tier == ROCQ_CPU_AVX_VNNI) return rocq__cpu_has_avx2() && rocq__cpu_has_avx_vnni();
#endif
    return tier <= rocq__cpu_best();
}

static const char *rocq__cpu_tier_name(rocq_cpu_tier tier) {
    return tier == ROCQ_CPU_AVX512     ? "AVX-512"
           : tier == ROCQ_CPU_AVX_VNNI ? "AVX-VNNI"
           : tier == ROCQ_CPU_PLAIN    ? "scalar"
           : ROCQ__HAS_NEON            ? "NEON"
                                       : "AVX2";
}

// -- the device --

#if ROCQ__HAS_HIP

// Gives back all that rocq__device_try has taken. Errors, as of a lost device, are ignored.
static void rocq__device_leave(rocq_ctx *ctx) {
    rocq__gpu *gpu = ctx->gpu;
    const rocq_hip *hip = gpu->hip;
    hip->set_device(gpu->device);
    // Wait first and free pinned memory last: a copy that still runs would write into it.
    if (gpu->stream) hip->stream_wait(gpu->stream);
    for (rocq__block *block = ctx->blocks.next, *next; block != &ctx->blocks; block = next) {
        next = block->next;
        if (block->memory != ROCQ_MEMORY_HOST) rocq__device_free(ctx, block);
    }
    gpu->scratch = NULL;
    rocq__ring_free(ctx, &gpu->ring);
    if (gpu->pinned) hip->host_free(gpu->pinned);
    gpu->pinned = NULL;
    if (gpu->stream) hip->stream_destroy(gpu->stream);
    gpu->stream = NULL;
    if (gpu->module) hip->module_unload(gpu->module);
    gpu->module = NULL;
}

// -- beside a renderer --

// Adds a sentence to rocq_info.ignored: which field of the desc has no effect, and why.
ROCQ__PRINTF(2, 3)
static void rocq__ignored(rocq__gpu *gpu, const char *format, ...) {
    const size_t used = strlen(gpu->ignored), room = sizeof gpu->ignored - used;
    va_list args;
    va_start(args, format);
    const int n = snprintf(gpu->ignored + used, room, "%s", used > 0 ? "; " : "");
    if (n >= 0 && (size_t)n < room) {
        vsnprintf(gpu->ignored + used + n, room - (size_t)n, format, args);
    }
    va_end(args);
}

// Makes a queue whose kernels run on the first compute units only. Each bit of the mask is a
// compute unit. The two of a WGP are set together, because a workgroup may use both. HIP gives such
// a queue normal priority and default flags, so its work and any work that the program itself
// submits to the NULL stream wait for each other.
static void rocq__stream_on_units(rocq__gpu *gpu, int32_t most, void **stream) {
    enum { WORDS = 32 };
    uint32_t mask[WORDS];
    const int32_t n = ROCQ__MAX(most / 2 * 2, 2), n_words = (gpu->n_units + 31) / 32;
    if (n >= gpu->n_units) return;
    if (!gpu->hip->stream_create_units || n_words > (int32_t)WORDS) {
        rocq__ignored(gpu, "max_units %d: the runtime has no hipExtStreamCreateWithCUMask",
                      (int)most);
        return;
    }
    memset(mask, 0, sizeof mask);
    for (int32_t i = 0; i < n; i++) mask[i / 32] |= 1u << i % 32;
    const int error = gpu->hip->stream_create_units(stream, (uint32_t)n_words, mask);
    if (error != 0) {
        *stream = NULL;
        rocq__ignored(gpu, "max_units %d: hipExtStreamCreateWithCUMask failed (%d)", (int)most,
                      error);
        return;
    }
    const double share = (double)n / gpu->n_units;
    gpu->chip.n_units = n;
    gpu->chip.flops_per_us *= share;
    gpu->chip.matrix_per_us *= share;
}

// Makes a queue of low or high priority. In HIP a smaller number is a higher priority: the greatest
// is negative, the least positive or 0, and a plain queue has 0, which is normal.
static void rocq__stream_of_priority(rocq__gpu *gpu, rocq_priority wanted, void **stream) {
    const rocq_hip *hip = gpu->hip;
    const bool low = wanted == ROCQ_PRIORITY_LOW;
    const char *name = low ? "low" : "high";
    int least = 0, greatest = 0;
    if (*stream) {
        rocq__ignored(gpu, "priority %s: with max_units it is normal", name);
        return;
    }
    if (!hip->priority_range || !hip->stream_create_priority) {
        rocq__ignored(gpu, "priority %s: the runtime has no %s", name,
                      hip->priority_range ? "hipStreamCreateWithPriority"
                                          : "hipDeviceGetStreamPriorityRange");
        return;
    }
    int error = hip->priority_range(&least, &greatest);
    if (error != 0) {
        rocq__ignored(gpu, "priority %s: hipDeviceGetStreamPriorityRange failed (%d)", name, error);
        return;
    }
    if (low ? least <= 0 : greatest >= 0) {
        rocq__ignored(gpu, "priority %s: the runtime has none %s normal", name,
                      low ? "below" : "above");
        return;
    }
    error = hip->stream_create_priority(stream, ROCQ_HIP_NON_BLOCKING, low ? least : greatest);
    if (error != 0) {
        *stream = NULL;
        rocq__ignored(gpu, "priority %s: hipStreamCreateWithPriority failed (%d)", name, error);
        return;
    }
    gpu->priority = wanted;
}

// Limits how many waves of matvecs a SIMD has at a time: each block asks for so much LDS, which it
// does not use, that only the wanted number of blocks fits on a WGP. The 8 waves of a block are
// spread evenly over the WGP's 4 SIMDs, so each block is 2 waves on a SIMD. Two blocks with the
// most LDS that a block may have still fit on a WGP, so the lowest limit is 4 waves.
static void rocq__limit_waves(rocq__gpu *gpu, int32_t most) {
    enum {
        SIMDS = 2 * ROCQ__CU_SIMDS,
        BLOCK_WAVES = ROCQ_K_MATVEC_WAVES / SIMDS, // on a SIMD
        LEAST = 2,     // blocks
        OWN_LDS = 2048 // bytes; the kernels' own LDS is at most that (tests/gfx11/kernels.tsv)
    };
    if (most >= ROCQ__SIMD_WAVES) return;
    if (!rocq__chip_find(gpu->chip.target)) {
        rocq__ignored(gpu, "max_waves %d: not known how many waves this chip has room for",
                      (int)most);
        return;
    }
    const int32_t blocks = ROCQ__MAX(most / (int32_t)BLOCK_WAVES, (int32_t)LEAST);
    const int32_t granules = 2 * ROCQ__CU_LDS / ROCQ__LDS_GRANULE / blocks;
    gpu->matvec_lds = (uint32_t)(granules * ROCQ__LDS_GRANULE - OWN_LDS);
    gpu->max_waves = blocks * BLOCK_WAVES;
}

// Applies what the desc says of sharing the device, as far as the runtime supports it. A queue made
// here takes the place of the plain one: a second hardware queue beside it would cost power when
// idle.
static rocq_result rocq__share(rocq_ctx *ctx) {
    rocq__gpu *gpu = ctx->gpu;
    const rocq_desc *desc = &ctx->desc;
    void *stream = NULL;
    gpu->ignored[0] = '\0';
    gpu->priority = ROCQ_PRIORITY_NORMAL;
    gpu->n_units = gpu->chip.n_units;
    gpu->max_waves = ROCQ__SIMD_WAVES;
    gpu->matvec_lds = 0;
    if (desc->max_units > 0) rocq__stream_on_units(gpu, desc->max_units, &stream);
    if (desc->priority != ROCQ_PRIORITY_NORMAL) {
        rocq__stream_of_priority(gpu, desc->priority, &stream);
    }
    if (desc->max_waves > 0) rocq__limit_waves(gpu, desc->max_waves);
    if (stream) {
        void *plain = gpu->stream;
        gpu->stream = stream;
        ROCQ__TRY_HIP("stream", gpu->hip->stream_destroy(plain));
    }
    if (gpu->ignored[0]) rocq__log(ctx, ROCQ_LOG_WARN, "ignored: %s", gpu->ignored);
    return ROCQ_OK;
}

// Loads the kernels on gpu->device and runs a self-test. On failure call rocq__device_leave.
static rocq_result rocq__device_try(rocq_ctx *ctx) {
    rocq__gpu *gpu = ctx->gpu;
    const rocq_hip *hip = gpu->hip;
    const int64_t line = 256; // bytes: status, then self-test results, then counters
    const int64_t size = 2 * line + (int64_t)ROCQ__COUNTERS * 4;
    size_t device_bytes = 0;
    void *pinned = NULL;
    rocq__block *block;
    rocq_k_selftest_args args;
    ROCQ__TRY_HIP("set device", hip->set_device(gpu->device));
    if (gpu->image) {
        const int error = hip->module_load(&gpu->module, gpu->image);
        if (error != 0) {
            gpu->module = NULL;
            rocq__hip_failed(ctx, gpu->kernels, error);
            return error == ROCQ_HIP_OUT_OF_MEMORY ? ROCQ_E_MEMORY : ROCQ_E_NO_KERNELS;
        }
        for (int k = 0; k < ROCQ_K_COUNT; k++) {
            if (hip->module_function(&gpu->function[k], gpu->module, rocq__kernels[k].name) != 0) {
                return rocq__fail(ctx, ROCQ_E_NO_KERNELS,
                                  "%s has no kernel %s: it is of another rocq.h", gpu->kernels,
                                  rocq__kernels[k].name);
            }
        }
    }
    ROCQ__TRY_HIP("stream", hip->stream_create(&gpu->stream, ROCQ_HIP_NON_BLOCKING));
    ROCQ__TRY_HIP("pinned memory", hip->host_alloc(&pinned, (size_t)line, 0));
    gpu->pinned = (uint32_t *)pinned;
    ROCQ__TRY(rocq__device_alloc(ctx, "device memory", size, ROCQ_MEMORY_DEVICE, &block));
    gpu->status = (uint32_t *)block->address;
    gpu->counters = gpu->status + 2 * line / 4;
    args.out = gpu->status + line / 4;
    ROCQ__TRY(rocq__fill_hip(ctx, block->address, 0, size));
    ROCQ__TRY_HIP("self-test", rocq__hip_launch(gpu, ROCQ_K_selftest, 1, 1, ROCQ_K_WAVE, &args));
    memset(gpu->pinned, 0, (size_t)line);
    ROCQ__TRY_HIP("self-test",
                  hip->copy(pinned, args.out, (size_t)line, ROCQ_HIP_TO_HOST, gpu->stream));
    ROCQ__TRY_HIP("self-test", hip->stream_wait(gpu->stream));
    ROCQ__TRY(rocq__selftest_check(ctx, gpu->pinned));
    rocq__chip_init(gpu, (int32_t)gpu->pinned[0]);
    ROCQ__TRY(rocq__share(ctx));
    if (hip->device_memory(&device_bytes, gpu->device) == 0)
        gpu->device_bytes = (int64_t)device_bytes;
    return ROCQ_OK;
}

// "03:00.0" and "0000:03:00.0" name the same device; letters of either case.
static bool rocq__same_pci(const char *wanted, const char *pci) {
    const size_t n = strlen(wanted), skip = strlen(pci) > n ? strlen(pci) - n : 0;
    if (n == 0 || (skip > 0 && pci[skip - 1] != ':') || strlen(pci) < n) return false;
    for (size_t i = 0; i < n; i++) {
        const char a = wanted[i], b = pci[skip + i];
        if ((a >= 'A' && a <= 'F' ? a + 32 : a) != (b >= 'A' && b <= 'F' ? b + 32 : b)) {
            return false;
        }
    }
    return true;
}

typedef struct rocq__device_rank {
    int32_t device, units;
    bool integrated;
} rocq__device_rank;

// Tries the devices that the desc allows: discrete ones first, then those with more compute units;
// free memory does not count. The first that works is taken, and those after it are not touched. If
// none works, the message says why the first one did not.
static rocq_result rocq__device_choose(rocq_ctx *ctx) {
    rocq__gpu *gpu = ctx->gpu;
    const rocq_hip *hip = gpu->hip;
    rocq__device_rank list[ROCQ__MAX_DEVICES];
    char why[sizeof ctx->error];
    int n_devices = 0, n = 0;
    rocq_result result = ROCQ_E_NO_DEVICE;
    const int error = hip->device_count(&n_devices);
    if (error != 0) n_devices = 0;
    for (int device = 0; device < n_devices && n < ROCQ__MAX_DEVICES; device++) {
        char pci[32] = "";
        if (ctx->desc.device > 0 && ctx->desc.device != device + 1) continue;
        hip->device_pci(pci, (int)sizeof pci, device);
        if (ctx->desc.pci && !rocq__same_pci(ctx->desc.pci, pci)) continue;
        rocq__device_rank c;
        c.device = device;
        c.units = rocq__hip_attribute(gpu, ROCQ_HIP_UNITS, device);
        c.integrated = rocq__hip_attribute(gpu, ROCQ_HIP_INTEGRATED, device) != 0;
        int at = n++;
        for (; at > 0; at--) {
            const rocq__device_rank *before = &list[at - 1];
            if (before->integrated == c.integrated ? before->units >= c.units : c.integrated) break;
            list[at] = *before;
        }
        list[at] = c;
    }
    if (n == 0) {
        return rocq__fail(ctx, ROCQ_E_NO_DEVICE, "no GPU%s%s: HIP lists %d (%s)",
                          ctx->desc.pci ? " at " : ctx->desc.device > 0 ? " of that number" : "",
                          ctx->desc.pci ? ctx->desc.pci : "", n_devices,
                          error == 0 || !hip->error_name ? "no error" : hip->error_name(error));
    }
    for (int i = 0; i < n; i++) {
        gpu->device = list[i].device;
        gpu->name[0] = gpu->pci[0] = '\0';
        hip->device_name(gpu->name, (int)sizeof gpu->name, gpu->device);
        hip->device_pci(gpu->pci, (int)sizeof gpu->pci, gpu->device);
        gpu->name[sizeof gpu->name - 1] = gpu->pci[sizeof gpu->pci - 1] = '\0';
        const rocq_result tried = rocq__device_try(ctx);
        if (tried == ROCQ_OK) {
            ctx->desc.device = gpu->device + 1;
            return ROCQ_OK;
        }
        rocq__device_leave(ctx);
        if (i == 0) {
            result = tried == ROCQ_E_DEVICE ? ROCQ_E_NO_DEVICE : tried;
            memcpy(why, ctx->error, sizeof why);
        }
    }
    gpu->device = list[0].device;
    hip->device_name(gpu->name, (int)sizeof gpu->name, gpu->device);
    return rocq__fail(ctx, result, "GPU %d of %d (%.63s): %.380s", (int)gpu->device + 1, n_devices,
                      gpu->name, why);
}

#endif // ROCQ__HAS_HIP

static void rocq__gpu_close(rocq_ctx *ctx) {
#if ROCQ__HAS_HIP
    rocq__gpu *gpu = ctx->gpu;
    if (!gpu) return;
    if (gpu->hip) rocq__device_leave(ctx);
    rocq__free(ctx, gpu->image_memory);
    rocq__free(ctx, gpu);
    ctx->gpu = NULL;
#else
    (void)ctx;
#endif
}

// Makes ctx a GPU context. On failure ctx is still a CPU context.
static rocq_result rocq__gpu_open(rocq_ctx *ctx) {
#if ROCQ__HAS_HIP
    const rocq_hip *linked = ROCQ__HIP_LINKED();
    // Checked first, so that a program without kernels allocates and loads nothing.
    if (!rocq__has_kernels(ctx, linked)) {
        return rocq__fail(ctx, ROCQ_E_NO_KERNELS,
                          "no GPU kernels: none are linked, and desc names no code object");
    }
    rocq__gpu *gpu = (rocq__gpu *)rocq__alloc(ctx, (int64_t)sizeof *gpu);
    if (!gpu) return rocq__fail(ctx, ROCQ_E_MEMORY, "no memory for a GPU context");
    memset(gpu, 0, sizeof *gpu);
    gpu->trial = true;
    ctx->gpu = gpu;
    rocq_result result = rocq__hip_kernels(ctx, gpu, linked);
    if (result == ROCQ_OK) {
        result = linked ? rocq__hip_linked(ctx, gpu, linked) : rocq__hip_load(ctx, gpu);
    }
    if (result == ROCQ_OK) result = rocq__device_choose(ctx);
    if (result != ROCQ_OK) {
        rocq__gpu_close(ctx);
        return result;
    }
    gpu->trial = false;
    ctx->backend = ROCQ_BACKEND_GPU;
    char target[32] = "";
    if (gpu->chip.target) {
        snprintf(target, sizeof target, " gfx%x%s,", (unsigned)gpu->chip.target & 0xffff,
                 gpu->chip.unlisted ? " (unlisted)" : "");
    }
    snprintf(ctx->device, sizeof ctx->device, "%.55s,%s %d compute units", gpu->name, target,
             (int)gpu->n_units);
    if (gpu->chip.unlisted) {
        rocq__log(ctx, ROCQ_LOG_WARN,
                  "%s: rocq has no figures of this chip and uses what the runtime says of it",
                  ctx->device);
    }
    return ROCQ_OK;
#else
    return rocq__fail(ctx, ROCQ_E_NO_KERNELS, "no GPU: this program was built with ROCQ_NO_HIP");
#endif
}

// In the order of rocq_sharing. A renderer's work can begin when a launch ends: with launches of at
// most 1 ms it can do so several times in a frame of 6.9 ms (144 Hz). 8 waves on a SIMD still hide
// the latency of memory and leave a renderer half of the registers. No preset limits the compute
// units, because how many a renderer needs depends on the renderer alone.
typedef struct rocq__preset {
    rocq_priority priority;
    int32_t max_units, max_waves, dispatch_us;
    int32_t spare_cores;
} rocq__preset;
static const rocq__preset rocq__presets[] = {
    {ROCQ_PRIORITY_NORMAL, -1, -1, 1000, 0},
    {ROCQ_PRIORITY_LOW, -1, 8, 500, 1},
    {ROCQ_PRIORITY_HIGH, -1, -1, 5000, 0},
};

ROCQ_DEF rocq_result rocq_open(rocq_ctx **out, const rocq_desc *desc) {
    // A bad desc is reported by its log: there is no context yet that could hold the message.
    rocq_desc resolved;
    const char *bad = NULL;
    if (!out) return ROCQ_E_ARGUMENT;
    *out = NULL;
    memset(&resolved, 0, sizeof resolved);
    if (desc) resolved = *desc;
    if (!resolved.allocator.alloc != !resolved.allocator.free) {
        bad = "one of allocator.alloc and free is NULL";
    }
    if ((int)resolved.prefer < 0 || resolved.prefer > ROCQ_BACKEND_GPU) {
        bad = "unknown backend in prefer";
    }
    if (resolved.n_threads < 0) bad = "n_threads is negative";
    if (resolved.memory_budget < 0 || resolved.scratch_bytes < 0) bad = "a size is negative";
    if (resolved.device < 0) bad = "device is negative";
    if ((int)resolved.precision < 0 || resolved.precision > ROCQ_PRECISION_INT8) {
        bad = "unknown precision";
    }
    if (resolved.dispatch_us < -1) bad = "dispatch_us is less than -1";
    if ((int)resolved.sharing < 0 || resolved.sharing > ROCQ_SHARING_COMPUTE_FIRST) {
        bad = "unknown preset in sharing";
    }
    if ((int)resolved.cpu_tier < 0 || resolved.cpu_tier > ROCQ_CPU_AVX512) bad = "unknown cpu_tier";
    if ((int)resolved.priority < 0 || resolved.priority > ROCQ_PRIORITY_HIGH) {
        bad = "unknown priority";
    }
    if (resolved.max_units < -1 || resolved.max_waves < -1) {
        bad = "max_units or max_waves is less than -1";
    }
    if (resolved.kernels_data && (resolved.kernels_path || resolved.kernels_size < 1)) {
        bad = "kernels_data needs kernels_size, and no kernels_path beside it";
    }
    if (bad) {
        if (resolved.log) resolved.log(ROCQ_LOG_ERROR, bad, resolved.log_user);
        return ROCQ_E_ARGUMENT;
    }
    if (resolved.cpu_tier == ROCQ_CPU_BEST) resolved.cpu_tier = rocq__cpu_best();
    if (!rocq__cpu_has(resolved.cpu_tier)) {
        if (resolved.log) {
            resolved.log(ROCQ_LOG_ERROR, "the processor or the build lacks desc.cpu_tier",
                         resolved.log_user);
        }
        return ROCQ_E_UNSUPPORTED;
    }
    if (!resolved.allocator.alloc) {
        resolved.allocator.alloc = rocq__default_alloc;
        resolved.allocator.free = rocq__default_free;
    }
    const rocq__preset *preset = &rocq__presets[resolved.sharing];
    if (resolved.priority == ROCQ_PRIORITY_DEFAULT) resolved.priority = preset->priority;
    if (resolved.max_units == 0) resolved.max_units = preset->max_units;
    if (resolved.max_waves == 0) resolved.max_waves = preset->max_waves;
    if (resolved.dispatch_us == 0) resolved.dispatch_us = preset->dispatch_us;
    if (resolved.n_threads == 0) {
        resolved.n_threads = ROCQ__MAX(rocq__core_count() - preset->spare_cores, 1);
    }
    if (resolved.n_threads > ROCQ__MAX_THREADS) resolved.n_threads = ROCQ__MAX_THREADS;
    if (!ROCQ__HAS_THREADS && !resolved.run_tasks) resolved.n_threads = 1;

    rocq_ctx *ctx = (rocq_ctx *)resolved.allocator.alloc(sizeof(rocq_ctx), resolved.allocator.user);
    if (!ctx) {
        if (resolved.log)
            resolved.log(ROCQ_LOG_ERROR, "no memory for a context", resolved.log_user);
        return ROCQ_E_MEMORY;
    }
    memset(ctx, 0, sizeof *ctx);
    ctx->desc = resolved;
    ctx->backend = ROCQ_BACKEND_CPU;
    ctx->team.ctx = ctx;
    ctx->blocks.prev = ctx->blocks.next = &ctx->blocks;
    ctx->stats.n_allocs = 1;
    ctx->stats.live_bytes = ctx->stats.peak_bytes = (int64_t)sizeof *ctx;
    ctx->has_simd = resolved.cpu_tier >= ROCQ_CPU_SIMD;
    ctx->has_avx_vnni = resolved.cpu_tier >= ROCQ_CPU_AVX_VNNI && rocq__cpu_has(ROCQ_CPU_AVX_VNNI);
    ctx->has_avx512 = resolved.cpu_tier == ROCQ_CPU_AVX512;
    snprintf(ctx->device, sizeof ctx->device, "CPU, %s, %d thread%s",
             rocq__cpu_tier_name(resolved.cpu_tier), (int)resolved.n_threads,
             resolved.n_threads == 1 ? "" : "s");

    rocq_result result = ROCQ_OK;
    if (resolved.prefer != ROCQ_BACKEND_CPU) {
        const bool fallback = resolved.prefer == ROCQ_BACKEND_AUTO || resolved.allow_fallback;
        rocq__attempt attempt;
        rocq__attempt_begin(ctx, &attempt);
        result = rocq__gpu_open(ctx);
        ctx->gpu_result = result;
        if (result != ROCQ_OK) memcpy(ctx->gpu_message, ctx->error, sizeof ctx->gpu_message);
        rocq__attempt_end(ctx, &attempt, result == ROCQ_OK || fallback);
        if (result != ROCQ_OK && fallback) {
            rocq__log(ctx, resolved.prefer == ROCQ_BACKEND_GPU ? ROCQ_LOG_WARN : ROCQ_LOG_INFO,
                      "on the CPU: %s", ctx->gpu_message);
            result = ROCQ_OK;
        }
    }
    // Strings of the caller's may not live as long as the context.
    ctx->desc.rocm_path = ctx->desc.hip_path = NULL;
    ctx->desc.pci = rocq__on_gpu(ctx) ? ctx->gpu->pci : NULL;
    ctx->desc.kernels_path = ctx->gpu && ctx->desc.kernels_path ? ctx->gpu->kernels : NULL;
    if (result == ROCQ_OK) result = rocq_reserve(ctx, resolved.scratch_bytes);
    if (result != ROCQ_OK) {
        rocq_close(&ctx);
        return result;
    }
    *out = ctx;
    return ROCQ_OK;
}

ROCQ_DEF void rocq_close(rocq_ctx **ctx_ptr) {
    if (!ctx_ptr || !*ctx_ptr) return;
    rocq_ctx *ctx = *ctx_ptr;
    *ctx_ptr = NULL;
#if ROCQ__HAS_THREADS
    rocq__team_stop(&ctx->team);
#endif
    if (rocq__on_gpu(ctx)) ctx->gpu->hip->set_device(ctx->gpu->device);
    rocq_profile_clear(ctx);
    while (ctx->graphs) rocq__graph_delete(ctx, ctx->graphs);
    rocq__gpu_close(ctx);
    while (ctx->blocks.next != &ctx->blocks) rocq__free(ctx, ctx->blocks.next + 1);
    const rocq_allocator allocator = ctx->desc.allocator;
    allocator.free(ctx, sizeof *ctx, allocator.user);
}

ROCQ_DEF rocq_result rocq_get_info(const rocq_ctx *ctx, rocq_info *info) {
    if (!ctx || !info) return ROCQ_E_ARGUMENT;
    memset(info, 0, sizeof *info);
    info->backend = ctx->backend;
    info->device = ctx->device;
    info->gpu_result = ctx->gpu_result;
    info->gpu_message = ctx->gpu_message;
    info->runtime = info->kernels = info->pci = "";
    info->replay = info->ignored = "";
    info->runtimes_tried = ctx->tried;
    if (rocq__on_gpu(ctx)) {
        info->runtime = ctx->gpu->runtime;
        info->kernels = ctx->gpu->kernels;
        info->pci = ctx->gpu->pci;
        info->target = ctx->gpu->chip.target;
        info->target_unlisted = ctx->gpu->chip.unlisted;
        info->n_units = ctx->gpu->n_units;
        info->device_bytes = ctx->gpu->device_bytes;
        info->replay = ctx->gpu->replay;
        info->priority = ctx->gpu->priority;
        info->max_units = ctx->gpu->chip.n_units;
        info->max_waves = ctx->gpu->max_waves;
        info->ignored = ctx->gpu->ignored;
    }
    info->desc = ctx->desc;
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_get_stats(const rocq_ctx *ctx, rocq_stats *stats) {
    if (!ctx || !stats) return ROCQ_E_ARGUMENT;
    *stats = ctx->stats;
    return ROCQ_OK;
}

static rocq_result rocq__sync_hip(rocq_ctx *ctx) {
    rocq__gpu *gpu = ctx->gpu;
    ROCQ__TRY_HIP("sync",
                  gpu->hip->copy(gpu->pinned, gpu->status, 4, ROCQ_HIP_TO_HOST, gpu->stream));
    ROCQ__TRY_HIP("sync", gpu->hip->stream_wait(gpu->stream));
    rocq__store32(&ctx->cancelled, 0);
    const uint32_t status = gpu->pinned[0];
    if (status == 0) return ROCQ_OK;
    ROCQ__TRY(rocq__fill_hip(ctx, gpu->status, 0, 4));
    return rocq__fail(ctx, ROCQ_E_BOUNDS, "an op since the last sync has met bad values%s%s%s%s%s",
                      status & ROCQ_K_BAD_ID ? ", an id past its table" : "",
                      status & ROCQ_K_BAD_CELL ? ", a cell past its cache" : "",
                      status & ROCQ_K_BAD_LENGTH ? ", a kv_len out of range" : "",
                      status & ROCQ_K_BAD_PAGE ? ", a page past its pool" : "",
                      status & ROCQ_K_NO_TOKEN ? ", a mask that allows no token" : "");
}

ROCQ_DEF rocq_result rocq_sync(rocq_ctx *ctx) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    ROCQ__TRY(rocq__not_recording(ctx, "sync"));
    if (!rocq__on_gpu(ctx)) { // ops on the CPU have finished when their call returns
        rocq__store32(&ctx->cancelled, 0);
        return ROCQ_OK;
    }
    ROCQ__TRY(rocq__hip_enter(ctx, "sync"));
    ROCQ__TRY(rocq__copy_begin(ctx, "sync"));
    return rocq__copy_done(ctx, rocq__sync_hip(ctx), 0);
}

ROCQ_DEF void rocq_cancel(rocq_ctx *ctx) {
    if (ctx) rocq__store32(&ctx->cancelled, 1);
}

ROCQ_DEF rocq_result rocq_graph_begin(rocq_ctx *ctx) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    ROCQ__TRY(rocq__not_recording(ctx, "graph_begin"));
    if (rocq__on_gpu(ctx)) ROCQ__TRY(rocq__hip_enter(ctx, "graph_begin"));
    rocq_graph *graph = (rocq_graph *)rocq__alloc(ctx, (int64_t)sizeof *graph);
    if (!graph) return rocq__fail(ctx, ROCQ_E_MEMORY, "graph_begin: no memory");
    memset(graph, 0, sizeof *graph);
    graph->next = ctx->graphs;
    ctx->graphs = ctx->recording = graph;
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_graph_end(rocq_ctx *ctx, rocq_graph **out) {
    if (out) *out = NULL;
    if (!ctx) return ROCQ_E_ARGUMENT;
    rocq_graph *graph = ctx->recording;
    if (!graph) return rocq__fail(ctx, ROCQ_E_STATE, "graph_end: no graph is being recorded");
    ctx->recording = NULL;
    rocq_result result =
        out ? ROCQ_OK : rocq__fail(ctx, ROCQ_E_ARGUMENT, "graph_end: graph is NULL");
    if (result == ROCQ_OK && rocq__on_gpu(ctx)) result = rocq__hip_enter(ctx, "graph_end");
    if (result == ROCQ_OK) result = rocq__graph_prepare(ctx, graph);
    if (result == ROCQ_OK) *out = graph;
    else rocq__graph_delete(ctx, graph);
    return result;
}

ROCQ_DEF rocq_result rocq_graph_launch(rocq_ctx *ctx, rocq_graph *graph) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    ROCQ__TRY(rocq__not_recording(ctx, "graph_launch"));
    ROCQ__TRY(rocq__check_graph(ctx, "graph_launch", graph));
    ROCQ__TRY(rocq__begin_op(ctx, "graph_launch"));
    ROCQ__TRY(rocq__graph_prepare(ctx, graph));
#if ROCQ__HAS_PROFILE
    if (rocq__profiling(ctx)) return rocq__region_graph(ctx, graph);
#endif
    return rocq__graph_submit(ctx, graph);
}

ROCQ_DEF void rocq_graph_destroy(rocq_ctx *ctx, rocq_graph **graph) {
    if (!ctx || !graph || !*graph || rocq__check_graph(ctx, "graph_destroy", *graph) != ROCQ_OK) {
        return;
    }
    // Not rocq__hip_enter, whose message on a lost GPU would replace the one that has the cause.
    if ((*graph)->exec) ctx->gpu->hip->set_device(ctx->gpu->device);
    rocq__graph_delete(ctx, *graph);
    *graph = NULL;
}

ROCQ_DEF rocq_result rocq_supports(rocq_ctx *ctx, rocq_op op, const void *params,
                                   const char **why) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    int64_t scratch;
    bool on_cpu;
    const bool quiet = ctx->quiet;
    ctx->quiet = true;
    rocq_result result = rocq__check_op(ctx, op, params);
    if (result == ROCQ_OK) result = rocq__plan_op(ctx, op, params, &scratch, &on_cpu);
    ctx->quiet = quiet;
    if (why) *why = result == ROCQ_OK ? "" : ctx->error;
    return result;
}

ROCQ_DEF rocq_result rocq_scratch_size(rocq_ctx *ctx, rocq_op op, const void *params,
                                       int64_t *bytes) {
    ROCQ__TRY(rocq__check_op(ctx, op, params));
    if (!bytes) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "scratch_size: bytes is NULL");
    int64_t scratch;
    bool on_cpu;
    ROCQ__TRY(rocq__plan_op(ctx, op, params, &scratch, &on_cpu));
    *bytes = scratch;
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_get_precision(rocq_ctx *ctx, rocq_op op, const void *params,
                                        rocq_precision_info *info) {
    int64_t scratch;
    bool on_cpu;
    ROCQ__TRY(rocq__check_op(ctx, op, params));
    if (!info) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "get_precision: info is NULL");
    ROCQ__TRY(rocq__plan_op(ctx, op, params, &scratch, &on_cpu));
    const rocq_backend backend = rocq__on_gpu(ctx) && !on_cpu ? ROCQ_BACKEND_GPU : ROCQ_BACKEND_CPU;
    const rocq_matmul_params *p = op == ROCQ_OP_MATMUL ? (const rocq_matmul_params *)params : NULL;
    rocq__choice choice, second;
    if (p) choice = rocq__product_choice(ctx, backend, p, p->w);
    else choice = rocq__precision_rule_for(ctx, backend, op, ROCQ_F32, 0);
    const rocq_conv_params *conv =
        op == ROCQ_OP_CONV ? (const rocq_conv_params *)params : NULL;
    info->asked = rocq__asked(ctx, p      ? p->precision
                                   : conv ? conv->precision
                                          : ROCQ_PRECISION_AUTO);
    info->nmse = rocq__nmse_bound(choice.precision);
    if (p && p->w2) { // y is a product of two sums and has the errors of both
        second = rocq__product_choice(ctx, backend, p, p->w2);
        info->nmse += rocq__nmse_bound(second.precision);
        if (second.precision > choice.precision) choice = second;
    }
    info->precision = choice.precision;
    info->why = choice.why;
    return ROCQ_OK;
}

// Checks a copy to or from a tensor, which must be contiguous and copied whole.
static rocq_result rocq__check_copy(rocq_ctx *ctx, const char *op, const rocq_tensor *t,
                                    const void *host, int64_t size, int accept) {
    ROCQ__TRY(rocq__not_recording(ctx, op));
    if (rocq__on_gpu(ctx)) ROCQ__TRY(rocq__hip_enter(ctx, op));
    ROCQ__TRY(rocq__check_tensor(ctx, op, "tensor", t,
                                 ROCQ__ANY | ROCQ__BIT_I8 | ROCQ__BIT_I32 | accept));
    if (!host) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "%s: host pointer is NULL", op);
    if (!rocq_tensor_contiguous(t) || size != rocq_tensor_size(t)) {
        return rocq__fail(ctx, ROCQ_E_SHAPE, "%s: %lld bytes for a tensor of %lld%s", op,
                          (long long)size, (long long)rocq_tensor_size(t),
                          rocq_tensor_contiguous(t) ? "" : ", strided");
    }
    return ROCQ_OK;
}

static rocq_result rocq__upload_tensor(rocq_ctx *ctx, const rocq_tensor *dst, const void *src,
                                       int64_t size) {
    if (rocq__on_gpu(ctx)) return rocq__upload_memory(ctx, dst, src, size);
    memmove(rocq_tensor_data(dst), src, (size_t)size);
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_upload(rocq_ctx *ctx, const rocq_tensor *dst, const void *src,
                                 int64_t size) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    ROCQ__TRY(rocq__check_copy(ctx, "upload", dst, src, size, ROCQ__PLANAR));
    ROCQ__TRY(rocq__copy_begin(ctx, "upload"));
    return rocq__copy_done(ctx, rocq__upload_tensor(ctx, dst, src, size), size);
}

static rocq_result rocq__download_tensor(rocq_ctx *ctx, void *dst, const rocq_tensor *src,
                                         int64_t size) {
    if (rocq__on_gpu(ctx)) return rocq__download_hip(ctx, dst, rocq__device_data(src), size);
    memmove(dst, rocq_tensor_data(src), (size_t)size);
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_download(rocq_ctx *ctx, void *dst, const rocq_tensor *src, int64_t size) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    ROCQ__TRY(rocq__check_copy(ctx, "download", src, dst, size, 0));
    ROCQ__TRY(rocq__copy_begin(ctx, "download"));
    return rocq__copy_done(ctx, rocq__download_tensor(ctx, dst, src, size), size);
}

ROCQ_DEF rocq_result rocq_dequantize(rocq_format format, float *dst, const void *src, int64_t n) {
    int64_t bytes;
#if ROCQ__HAS_AVX2
    // No context tells. To ask for F16C takes a cpuid, which costs 14 us in a virtual machine.
    const bool simd = format == ROCQ_F16
                          ? n >= 65536 && rocq__cpu_has_avx2()
                          : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    const bool simd = ROCQ__HAS_NEON;
#endif
    if (rocq__is_integer(format)) return ROCQ_E_FORMAT;
    ROCQ__TRY(rocq_row_size(format, n, &bytes));
    ROCQ__TRY(rocq__check_span(ROCQ_F32, dst, n));
    ROCQ__TRY(rocq__check_span(format, src, n));
    if (!rocq__mul(n, 4, &bytes)) return ROCQ_E_OVERFLOW;
    if (rocq__spans_overlap(ROCQ_F32, dst, n, format, src, n)) return ROCQ_E_ARGUMENT;
    rocq__decode(simd, format, dst, src, n);
    return ROCQ_OK;
}

ROCQ_DEF float rocq_f16_to_f32(uint16_t half) { return rocq__f16_to_f32(half); }
ROCQ_DEF uint16_t rocq_f32_to_f16(float value) { return rocq__f32_to_f16(value); }

// Element (c, i, j, s) of a row, kernel column i, row j and frame s, goes from i + kw (j + kh (s +
// kt c)) to c + C (i + kw (j + kh s)): from channels outermost to channels innermost.
ROCQ_DEF rocq_result rocq_conv_weights(rocq_ctx *ctx, const rocq_conv_weights_params *p) {
    const char *op = "conv_weights";
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!p) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "%s: params is NULL", op);
    ROCQ__TRY(rocq__not_recording(ctx, op));
    ROCQ__TRY(rocq__check_tensor(ctx, op, "w", p->w, ROCQ__ANY | ROCQ__PLANAR | ROCQ__OUTPUT));
    const int32_t sizes[3] = {p->kw, p->kh, p->kt};
    int64_t taps = 1, bytes, float_bytes, row_bytes = 0, elems, src_elem;
    for (int i = 0; i < 3; i++) {
        if (sizes[i] < 0 || sizes[i] > 7) {
            return rocq__fail(ctx, ROCQ_E_ARGUMENT, "%s: %d taps, expected 0 to 7", op,
                              (int)sizes[i]);
        }
        taps *= ROCQ__MAX(sizes[i], 1);
    }
    const int64_t k = p->w->ne[0], m = p->w->ne[1];
    ROCQ__TRY(rocq__check_format(ctx, op, "src", ROCQ__PLAIN, p->src_format, &elems, &src_elem));
    if (k % taps != 0 || p->w->ne[2] != 1 || p->w->ne[3] != 1 || !rocq_tensor_contiguous(p->w)) {
        return rocq__fail(ctx, ROCQ_E_SHAPE, "%s: w of %lld x %lld for %lld taps", op, (long long)k,
                          (long long)m, (long long)taps);
    }
    if (!p->src || (uintptr_t)p->src % (uintptr_t)rocq__alignment_of(p->src_format) != 0 ||
        p->src_size != rocq_tensor_count(p->w) * src_elem) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "%s: src of %lld bytes for %lld weights", op,
                          (long long)p->src_size, (long long)rocq_tensor_count(p->w));
    }
    row_bytes = rocq__bytes(p->w->format, k);
    bytes = rocq_tensor_size(p->w);
    if (!rocq__mul(2 * k, (int64_t)sizeof(float), &float_bytes) ||
        !rocq__add(bytes, float_bytes, &float_bytes)) {
        return rocq__fail(ctx, ROCQ_E_OVERFLOW, "%s: size of w overflows", op);
    }
    float *row = (float *)rocq__alloc(ctx, float_bytes), *turned = row + k;
    if (!row) return rocq__fail(ctx, ROCQ_E_MEMORY, "%s: no memory for %lld bytes", op,
                                (long long)float_bytes);
    unsigned char *encoded = (unsigned char *)(turned + k);
    for (int64_t r = 0; r < m; r++) {
        rocq__dequantize_row(p->src_format, row, (const char *)p->src + r * k * src_elem, k);
        for (int64_t i = 0; i < k; i++) turned[i % taps * (k / taps) + i / taps] = row[i];
        rocq__quantize_row(p->w->format, encoded + r * row_bytes, turned, k, NULL);
    }
    rocq_result result = rocq_upload(ctx, p->w, encoded, bytes);
    if (result == ROCQ_OK) result = rocq_sync(ctx);
    rocq__free(ctx, row);
    return result;
}

#define ROCQ_X(NAME, name, params)                                            \
    ROCQ_DEF rocq_result rocq_##name(rocq_ctx *ctx, const params *p) {        \
        return rocq__run_op(ctx, ROCQ_OP_##NAME, p);                          \
    }
ROCQ_OPS(ROCQ_X)
#undef ROCQ_X

// ---------------------------------------------------------------------------------------------
// >>timers: the clock, statistics, stopwatches, what a launch costs
// ---------------------------------------------------------------------------------------------

#if defined(__linux__) && !defined(CLOCK_MONOTONIC) // hidden by -std=c11
#define CLOCK_MONOTONIC 1
extern int clock_gettime(int clock, struct timespec *time);
#endif

ROCQ_DEF int64_t rocq_time_ns(void) {
#if defined(_WIN32)
    LARGE_INTEGER count, rate;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&rate);
    // Whole seconds apart, so that the product does not overflow.
    return count.QuadPart / rate.QuadPart * 1000000000 +
           count.QuadPart % rate.QuadPart * 1000000000 / rate.QuadPart;
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
#endif
}

static int rocq__by_value(const void *a, const void *b, const void *user) {
    const double x = *(const double *)a, y = *(const double *)b;
    (void)user;
    return x < y ? -1 : x > y;
}

ROCQ_DEF void rocq_summarize(rocq_summary *summary, double *samples, int64_t n) {
    if (!summary) return;
    memset(summary, 0, sizeof *summary);
    if (!samples || n < 1) return;
    double sum = 0.0, squares = 0.0;
    rocq__heapsort(samples, n, (int64_t)sizeof *samples, rocq__by_value, NULL);
    for (int64_t i = 0; i < n; i++) sum += samples[i];
    const double mean = sum / (double)n;
    for (int64_t i = 0; i < n; i++) squares += (samples[i] - mean) * (samples[i] - mean);
    summary->count = n;
    summary->min = samples[0];
    summary->max = samples[n - 1];
    summary->median = 0.5 * (samples[(n - 1) / 2] + samples[n / 2]);
    summary->mean = mean;
    summary->p95 = samples[n - 1 - n * 5 / 100]; // the rank is n - floor(0.05 n)
    summary->p99 = samples[n - 1 - n / 100];
    summary->deviation = n > 1 ? sqrt(squares / (double)(n - 1)) : 0.0;
}

// -- stopwatches --

static bool rocq__gpu_timed(const rocq_ctx *ctx) {
    return rocq__on_gpu(ctx) && ctx->gpu->hip->event_elapsed;
}

ROCQ_DEF void rocq_timer_free(rocq_ctx *ctx, rocq_timer *timer) {
    if (!timer) return;
    if (ctx && rocq__on_gpu(ctx)) {
        ctx->gpu->hip->set_device(ctx->gpu->device);
        if (timer->start_event) ctx->gpu->hip->event_destroy(timer->start_event);
        if (timer->stop_event) ctx->gpu->hip->event_destroy(timer->stop_event);
    }
    memset(timer, 0, sizeof *timer);
}

ROCQ_DEF rocq_result rocq_timer_init(rocq_ctx *ctx, rocq_timer *timer, rocq_timer_kind kind) {
    rocq_timer t;
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!timer || (kind != ROCQ_TIMER_HOST && kind != ROCQ_TIMER_GPU)) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "timer_init: timer is NULL, or kind %d is none",
                          (int)kind);
    }
    memset(&t, 0, sizeof t);
    t.kind = kind;
    if (kind == ROCQ_TIMER_GPU && rocq__gpu_timed(ctx)) {
        ROCQ__TRY(rocq__hip_enter(ctx, "timer_init"));
        ROCQ__TRY_HIP("timer_init", ctx->gpu->hip->event_create(&t.start_event, 0));
        const int error = ctx->gpu->hip->event_create(&t.stop_event, 0);
        if (error != 0) {
            t.stop_event = NULL;
            rocq_timer_free(ctx, &t);
            return rocq__hip_failed(ctx, "timer_init", error);
        }
    }
    *timer = t;
    return ROCQ_OK;
}

static rocq_result rocq__timer_mark(rocq_ctx *ctx, const char *call, void *event, int64_t *ns) {
    if (event) {
        ROCQ__TRY(rocq__hip_enter(ctx, call));
        ROCQ__TRY_HIP(call, ctx->gpu->hip->event_record(event, ctx->gpu->stream));
    }
    *ns = rocq_time_ns();
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_timer_start(rocq_ctx *ctx, rocq_timer *timer) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!timer) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "timer_start: timer is NULL");
    timer->stop_ns = 0;
    return rocq__timer_mark(ctx, "timer_start", timer->start_event, &timer->start_ns);
}

ROCQ_DEF rocq_result rocq_timer_stop(rocq_ctx *ctx, rocq_timer *timer) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!timer) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "timer_stop: timer is NULL");
    if (timer->start_ns == 0) return rocq__fail(ctx, ROCQ_E_STATE, "timer_stop: not started");
    return rocq__timer_mark(ctx, "timer_stop", timer->stop_event, &timer->stop_ns);
}

ROCQ_DEF rocq_result rocq_timer_read(rocq_ctx *ctx, rocq_timer *timer, double *ns) {
    float ms = 0.0f;
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!timer || !ns) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "timer_read: an argument is NULL");
    if (timer->stop_ns == 0) return rocq__fail(ctx, ROCQ_E_STATE, "timer_read: not stopped");
    if (!timer->stop_event) {
        *ns = (double)(timer->stop_ns - timer->start_ns);
        return ROCQ_OK;
    }
    const rocq_hip *hip = ctx->gpu->hip;
    ROCQ__TRY(rocq__hip_enter(ctx, "timer_read"));
    ROCQ__TRY_HIP("timer_read", hip->event_wait(timer->stop_event));
    ROCQ__TRY_HIP("timer_read", hip->event_elapsed(&ms, timer->start_event, timer->stop_event));
    *ns = 1e6 * (double)ms;
    return ROCQ_OK;
}

// -- what a launch costs --

static void rocq__task_nothing(void *arg, int64_t begin, int64_t end, int32_t thread) {
    (void)arg;
    (void)begin;
    (void)end;
    (void)thread;
}

static rocq_result rocq__launch_nothing(rocq_ctx *ctx) {
    if (!rocq__on_gpu(ctx)) {
        rocq__parallel(ctx, ctx->desc.n_threads, 1, rocq__task_nothing, NULL);
        return ROCQ_OK;
    }
    rocq_k_map_args none;
    memset(&none, 0, sizeof none); // tensors without elements
    const int error = rocq__hip_launch(ctx->gpu, ROCQ_K_map, 1, 1, ROCQ_K_WAVE, &none);
    return error == 0 ? ROCQ_OK : rocq__hip_failed(ctx, "measure_launch", error);
}

static rocq_result rocq__launch_wait(rocq_ctx *ctx) {
    if (!rocq__on_gpu(ctx)) return ROCQ_OK;
    ROCQ__TRY_HIP("measure_launch", ctx->gpu->hip->stream_wait(ctx->gpu->stream));
    return ROCQ_OK;
}

enum { ROCQ__LAUNCH_ROW = 32, ROCQ__LAUNCH_WARM = 16 };

static rocq_result rocq__launch_times(rocq_ctx *ctx, int32_t n, double *submit, double *complete,
                                      double *row) {
    if (rocq__on_gpu(ctx)) ROCQ__TRY(rocq__hip_enter(ctx, "measure_launch"));
    for (int32_t i = -ROCQ__LAUNCH_WARM; i < n; i++) {
        const int64_t start = rocq_time_ns();
        ROCQ__TRY(rocq__launch_nothing(ctx));
        const int64_t submitted = rocq_time_ns();
        ROCQ__TRY(rocq__launch_wait(ctx));
        if (i < 0) continue;
        submit[i] = (double)(submitted - start);
        complete[i] = (double)(rocq_time_ns() - start);
    }
    for (int32_t i = 0; i < n; i++) {
        const int64_t start = rocq_time_ns();
        for (int k = 0; k < ROCQ__LAUNCH_ROW; k++) ROCQ__TRY(rocq__launch_nothing(ctx));
        ROCQ__TRY(rocq__launch_wait(ctx));
        row[i] = (double)(rocq_time_ns() - start) / (double)ROCQ__LAUNCH_ROW;
    }
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_measure_launch(rocq_ctx *ctx, int32_t n, rocq_launch_cost *cost) {
    int64_t bytes;
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!cost || n < 1 || !rocq__mul(n, 3 * (int64_t)sizeof(double), &bytes)) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "measure_launch: cost is NULL, or %ld launches",
                          (long)n);
    }
    double *samples = (double *)rocq__alloc(ctx, bytes);
    if (!samples) return rocq__fail(ctx, ROCQ_E_MEMORY, "measure_launch: no memory");
    const rocq_result result =
        rocq__launch_times(ctx, n, samples, samples + n, samples + 2 * (int64_t)n);
    if (result == ROCQ_OK) {
        rocq_summarize(&cost->submit_ns, samples, n);
        rocq_summarize(&cost->complete_ns, samples + n, n);
        rocq_summarize(&cost->row_ns, samples + 2 * (int64_t)n, n);
    }
    rocq__free(ctx, samples);
    return result;
}

// ---------------------------------------------------------------------------------------------
// >>profile: regions, the log of their calls, reports. Not needed to run a model (ROCQ_NO_PROFILE)
// ---------------------------------------------------------------------------------------------

// -- what a region does --

#if ROCQ__HAS_PROFILE

// The op's name, format and access, which are cheap to know; rocq__work_count does the rest.
static rocq__work rocq__work_named(rocq_op op, const void *params) {
    const rocq_tensor *kind = NULL;
    bool mixed = false;
    rocq__work work;
    memset(&work, 0, sizeof work);
    work.op = op;
    work.params = params;
    work.name = rocq__ops[op].name;
    if (op == ROCQ_OP_MATMUL) {
        const rocq_matmul_params *first = (const rocq_matmul_params *)params;
        const bool few = first->x->ne[1] <= ROCQ_K_FEW;
        work.name = few ? "matvec" : "matmul";
        work.access = few ? ROCQ_ACCESS_STREAM : ROCQ_ACCESS_TILED;
        kind = first->w;
        for (const rocq_matmul_params *p = first->next; p; p = p->next) {
            mixed = mixed || p->w->format != kind->format;
        }
    } else if (op == ROCQ_OP_ATTENTION) {
        const rocq_attention_params *p = (const rocq_attention_params *)params;
        kind = p->k;
        work.access = p->q->ne[2] <= ROCQ_K_FEW ? ROCQ_ACCESS_STREAM : ROCQ_ACCESS_TILED;
    } else if (op == ROCQ_OP_GATHER) {
        kind = ((const rocq_gather_params *)params)->table;
        work.access = ROCQ_ACCESS_GATHER;
    } else if (op == ROCQ_OP_CAST) {
        kind = ((const rocq_cast_params *)params)->y;
    }
    if (kind) work.detail = mixed ? "mixed" : rocq_format_name(kind->format);
    return work;
}

static void rocq__work_count(const rocq_ctx *ctx, rocq__work *work) {
    const rocq__cost cost = rocq__cost_of(ctx, work->op, work->params);
    work->params = NULL;
    work->bytes = cost.bytes;
    work->flops = cost.flops;
    work->matrix = cost.matrix;
}

static rocq__work rocq__work_of(const rocq_ctx *ctx, rocq_op op, const void *params) {
    rocq__work work = rocq__work_named(op, params);
    rocq__work_count(ctx, &work);
    return work;
}

// -- regions --
// While a profile is on, every call of a region becomes one event: its region (a name under a
// parent), its times on the host, the pair of GPU marks around what it submitted, and the bytes and
// flops of its own. rocq__region_enter opens the event on a stack; rocq__region_leave closes it and
// appends it to the log. So the log is in the order in which events end, and those inside a region
// come before the region's own.
//
// All results are folded from the log, the oldest event first: samples, sums, the trace, and what
// regions inside add to the one around them. That happens when results are asked for, and when the
// log is full, which then folds its oldest events to make room.
//
// A mark is an event of the HIP runtime in the stream. Only a piece, which is submitted as a whole
// (an op, a captured graph), has marks; a region around pieces lasts on the GPU from the start of
// its first piece to the end of its last, so the program's regions cost the GPU nothing. Nobody
// waits for a mark before its event is folded. A full log waits for its oldest events alone, and
// the GPU has work queued meanwhile.
//
// Sampling bounds what all this costs. An outermost region is measured or skipped together with all
// that is inside it; one that is long, or is called for the first time, is always measured, and the
// regions directly inside it are treated as outermost. A region is measured every k-th time on
// average, where k follows from what measuring every call would cost. The distance to the next time
// is random, so that a rhythm of the program (every other step is short, say) does not distort the
// results. An event's weight is the number of calls since the last that was measured; sums count
// the event that many times.

enum {
    ROCQ__DEPTH = 64,          // most regions that are open at once
    ROCQ__LOG = 512,           // most events that are open or in the log
    ROCQ__BATCH = 64,          // events that a full log folds
    ROCQ__PATH = 128,
    ROCQ__VERDICT = 96,
    ROCQ__FILL_NS = 2000,      // work that takes less than this at the peaks does not fill a chip
    ROCQ__LONG_NS = 50000000,  // a region that lasts longer is long
    ROCQ__WINDOW_NS = 1 << 28, // after so long, half of the costs that were counted are forgotten
    ROCQ__PAUSE_NS = 100000    // most that one event is taken to cost: more is preemption
};

// The newest times of a region; and of all that were measured their number, the calls that they
// stand for, and their weighted sum.
typedef struct rocq__times {
    double *ns;   // [max_samples]
    int32_t next; // index of the next one
    int64_t count, weight;
    double sum;
} rocq__times;

typedef struct rocq__amount {
    double bytes, flops, matrix; // matrix: flops on the matrix unit, which are among the flops
} rocq__amount;

typedef struct rocq__region {
    int32_t parent, depth;     // parent -1: outermost
    int32_t next;              // in its bucket: index + 1, or 0
    const char *name, *detail; // detail: the format in an op's name, or NULL
    const char *label;         // name and detail
    bool submits, copy;        // an op, graph or copy; a copy between host and device
    rocq_access access;
    bool brief;                // not long, the last time that it was measured
    int32_t skip;              // calls to skip until the next is measured
    int64_t skipped;           // calls since the last that was measured
    rocq__times host, gpu;
    rocq__amount sum;          // weighted, with the regions inside
    char text[48];             // of a label with a detail
    char path[ROCQ__PATH];
    char verdict[ROCQ__VERDICT];
} rocq__region;

typedef struct rocq__event {
    int32_t region; // -1: no room for its name
    int32_t pair;   // of marks, -1: none
    int32_t span;   // of the trace, -1: no room
    int8_t depth;
    int8_t access;  // a rocq_access, -1: none was given
    bool submits, copy, failed;
    int64_t weight; // calls that it stands for
    int64_t enter_ns; // when begin was called; the profile's own work lies between it and start_ns
    int64_t start_ns, stop_ns;
    rocq__amount own; // without the regions inside
} rocq__event;

// At each depth, what the folded events add to the region around them, which is folded later.
typedef struct rocq__inside {
    rocq__amount sum;         // weighted
    bool timed;               // the GPU's times are known:
    double first_ns, last_ns; // start of the first piece, end of the last
} rocq__inside;

typedef struct rocq__span { // a bar of the trace
    int64_t start_ns, stop_ns; // since the start of the profile; stop -1: open, or failed
    int32_t region;
    bool gpu;
} rocq__span;

struct rocq__profile {
    rocq_profile_desc desc; // resolved, peaks too: 0 where none is known
    int64_t start_ns;
    bool gpu;               // regions have times on the GPU
    bool timed;             // marks are there; they go when the device is lost, or at the end
    int32_t depth;          // of open regions, which may be more than ROCQ__DEPTH
    rocq__event open[ROCQ__DEPTH];
    rocq__event log[ROCQ__LOG]; // a ring
    uint32_t log_begin, n_log;
    rocq__inside inside[ROCQ__DEPTH];
    int64_t dropped, dropped_gpu, dropped_spans;

    // Sampling. Inside a region that decides for all that is inside it, root is its depth + 1, else
    // 0. weight: that of the events that begin now, or 0 while such a region is skipped.
    bool limited;     // calls may be skipped, as desc.cost is less than 1
    int32_t root;
    int64_t weight;
    double full_ns;   // what measuring every call would have cost since since_ns
    int64_t since_ns;
    double marks_ns;  // what a pair of marks costs
    uint64_t random;

    // Marks. Pairs are taken in turn. There are as many as events in the log, so that the next pair
    // always belongs to an event that has been folded.
    void *marks[ROCQ__LOG][2];
    uint32_t n_pairs; // taken so far
    void *anchor;     // the last mark whose time is known
    double anchor_ns; // that time, since the start of the profile

    // Behind the struct, in the same block of memory.
    double *samples; // [max_regions][1, or 2 with the GPU's][max_samples]
    double *sorted;  // [max_samples]
    rocq__region *regions;
    int32_t n_regions;
    int32_t buckets[256]; // by a hash of parent and name: index + 1 of the newest region, or 0
    rocq__span *spans;
    int64_t n_spans;
    int (*range_push)(const char *); // roctx, or NULL
    int (*range_pop)(void);
};

// above/label; of a path that is too long, dots and its end, cut between characters of UTF-8.
static void rocq__path_join(char path[ROCQ__PATH], const char *above, const char *label) {
    const size_t length = above ? strlen(above) + 1 : 0, total = length + strlen(label);
    size_t from = total < ROCQ__PATH ? 0 : total - ROCQ__PATH + 4, to = 0;
    if (from > 0) to = (size_t)snprintf(path, ROCQ__PATH, "...");
    for (bool inside = from > 0; from < total; from++) {
        const char c = from + 1 < length ? above[from] : from < length ? '/' : label[from - length];
        inside = inside && ((unsigned char)c & 0xc0) == 0x80;
        if (!inside) path[to++] = c;
    }
    path[to] = '\0';
}

// The region of this name under parent, a new one at its first call; -1: no room.
static int32_t rocq__region_find(rocq__profile *p, int32_t parent, const char *name,
                                 const char *detail) {
    uint32_t hash = (uint32_t)parent;
    for (const char *c = name; *c; c++) hash = 9 * hash + (unsigned char)*c;
    int32_t *bucket = &p->buckets[(hash ^ hash >> 8) & 255];
    for (int32_t i = *bucket; i > 0; i = p->regions[i - 1].next) {
        const rocq__region *r = &p->regions[i - 1];
        const bool same = r->name == name || strcmp(r->name, name) == 0;
        if (same && r->parent == parent && r->detail == detail) return i - 1;
    }
    if (p->n_regions == p->desc.max_regions) return -1;
    const int32_t index = p->n_regions++;
    rocq__region *r = &p->regions[index];
    r->next = *bucket;
    *bucket = index + 1;
    r->parent = parent;
    r->label = r->name = name;
    r->detail = detail;
    if (detail) {
        snprintf(r->text, sizeof r->text, "%s %s", name, detail);
        r->label = r->text;
    }
    if (parent >= 0) r->depth = p->regions[parent].depth + 1;
    rocq__path_join(r->path, parent >= 0 ? p->regions[parent].path : NULL, r->label);
    r->host.ns = p->samples + (int64_t)index * (p->gpu ? 2 : 1) * p->desc.max_samples;
    r->gpu.ns = r->host.ns + (p->gpu ? p->desc.max_samples : 0);
    return index;
}

static int32_t rocq__span_add(rocq__profile *p, int32_t region, bool gpu, int64_t start_ns,
                              int64_t stop_ns) {
    if (p->n_spans == p->desc.max_events) {
        p->dropped_spans++;
        return -1;
    }
    const rocq__span span = {start_ns, stop_ns, region, gpu};
    p->spans[p->n_spans] = span;
    return (int32_t)p->n_spans++;
}

static void rocq__times_add(const rocq__profile *p, rocq__times *times, double ns,
                            int64_t weight) {
    times->ns[times->next] = ns;
    if (++times->next == p->desc.max_samples) times->next = 0;
    times->count++;
    times->weight += weight;
    times->sum += (double)weight * ns;
}

// -- folding the log --

// Destroys the marks: from here on all is timed on the host alone.
static void rocq__marks_end(rocq_ctx *ctx, rocq__profile *p) {
    for (int32_t i = 0; i < 2 * ROCQ__LOG + 1; i++) {
        void **mark = i < 2 * ROCQ__LOG ? &p->marks[i / 2][i % 2] : &p->anchor;
        if (*mark) ctx->gpu->hip->event_destroy(*mark);
        *mark = NULL;
    }
    p->timed = false;
}

// When the GPU began and ended a piece that it has run. Pieces are folded in the order of the
// stream, and each is measured from the end of the one before it: the runtime returns intervals as
// floats, in which long ones are not exact to the nanosecond.
static rocq_result rocq__piece_times(rocq_ctx *ctx, rocq__profile *p, void **mark,
                                     rocq__inside *inside) {
    const rocq_hip *hip = ctx->gpu->hip;
    float before = 0.0f, during = 0.0f;
    ROCQ__TRY_HIP("profile", hip->event_elapsed(&before, p->anchor, mark[0]));
    ROCQ__TRY_HIP("profile", hip->event_elapsed(&during, mark[0], mark[1]));
    inside->timed = true;
    inside->first_ns = p->anchor_ns + 1e6 * (double)before;
    inside->last_ns = p->anchor_ns = inside->first_ns + 1e6 * (double)during;
    void *anchor = mark[1];
    mark[1] = p->anchor; // to be recorded again
    p->anchor = anchor;
    return ROCQ_OK;
}

static inline void rocq__amount_add(rocq__amount *to, double times, const rocq__amount *from) {
    to->bytes += times * from->bytes;
    to->flops += times * from->flops;
    to->matrix += times * from->matrix;
}

// A call that failed is no sample. One without room for its name still counts for those around it.
static void rocq__event_fold(rocq__profile *p, const rocq__event *e) {
    rocq__inside call = p->inside[e->depth];
    memset(&p->inside[e->depth], 0, sizeof call);
    if (e->failed) return;
    rocq__amount_add(&call.sum, (double)e->weight, &e->own);
    if (e->depth > 0 && !e->copy) { // a copy's bytes are not the memory's traffic
        rocq__inside *around = &p->inside[e->depth - 1];
        rocq__amount_add(&around->sum, 1.0, &call.sum);
        if (call.timed) {
            if (!around->timed) around->first_ns = call.first_ns;
            around->last_ns = call.last_ns;
            around->timed = true;
        }
    }
    if (e->region < 0) return;
    rocq__region *r = &p->regions[e->region];
    rocq__amount_add(&r->sum, 1.0, &call.sum);
    r->submits = e->submits;
    r->copy = e->copy;
    if (e->access >= 0) r->access = (rocq_access)e->access;
    rocq__times_add(p, &r->host, (double)(e->stop_ns - e->start_ns), e->weight);
    if (e->span >= 0) p->spans[e->span].stop_ns = e->stop_ns - p->start_ns;
    if (call.timed) {
        rocq__times_add(p, &r->gpu, call.last_ns - call.first_ns, e->weight);
        rocq__span_add(p, e->region, true, (int64_t)call.first_ns, (int64_t)call.last_ns);
    }
}

// Folds the n oldest events, waiting until the GPU has run the last piece among them. Without the
// device, or after a failure, times on the GPU are missing and counted.
static rocq_result rocq__log_fold(rocq_ctx *ctx, rocq__profile *p, uint32_t n, const char *call) {
    rocq_result result = ROCQ_OK;
    void *last = NULL;
    for (uint32_t i = 0; p->timed && i < n; i++) {
        const rocq__event *e = &p->log[(p->log_begin + i) % ROCQ__LOG];
        if (e->pair >= 0 && !e->failed) last = p->marks[e->pair][1];
    }
    if (last) {
        result = rocq__hip_enter(ctx, call);
        const int error = result == ROCQ_OK ? ctx->gpu->hip->event_wait(last) : 0;
        if (error != 0) result = rocq__hip_failed(ctx, call, error);
    }
    for (; n > 0; n--, p->n_log--) {
        const rocq__event *e = &p->log[p->log_begin];
        p->log_begin = (p->log_begin + 1) % ROCQ__LOG;
        if (e->pair >= 0 && !e->failed) {
            if (p->timed && result == ROCQ_OK) {
                result = rocq__piece_times(ctx, p, p->marks[e->pair], &p->inside[e->depth]);
            }
            p->dropped_gpu += !p->timed || result != ROCQ_OK;
        }
        rocq__event_fold(p, e);
    }
    if (result != ROCQ_OK) rocq__marks_end(ctx, p);
    return result;
}

// Folds the whole log. With a lost GPU the results are those that came in time.
static rocq_result rocq__log_finish(rocq_ctx *ctx, const char *call) {
    const rocq_result result = rocq__log_fold(ctx, ctx->profile, ctx->profile->n_log, call);
    return result == ROCQ_E_LOST ? ROCQ_OK : result;
}

// -- begin and end --

static inline bool rocq__skipping(const rocq__profile *p) { return p->root > 0 && p->weight == 0; }

static rocq_result rocq__mark(rocq_ctx *ctx, void *mark) {
    ROCQ__TRY_HIP("profile", ctx->gpu->hip->event_record(mark, ctx->gpu->stream));
    return ROCQ_OK;
}

// piece: all that is submitted until the region ends is one piece, and has marks.
static rocq_result rocq__region_enter(rocq_ctx *ctx, const char *name, const char *detail,
                                      bool piece) {
    rocq__profile *p = ctx->profiling;
    const int32_t depth = p->depth;
    if (rocq__skipping(p)) {
        p->depth++;
        return ROCQ_OK;
    }
    if (depth >= ROCQ__DEPTH) {
        p->dropped++;
        p->depth++;
        if (p->range_push) p->range_push(name);
        return ROCQ_OK;
    }
    rocq__event *e = &p->open[depth];
    const int32_t parent = depth > 0 ? e[-1].region : -1;
    const bool named = depth == 0 || parent >= 0;
    const int32_t region = named ? rocq__region_find(p, parent, name, detail) : -1;
    rocq__region *r = region >= 0 ? &p->regions[region] : NULL;
    const bool decides = p->limited && p->root == 0 && r;
    if (decides && r->skip > 0) {
        r->skip--;
        r->skipped++;
        p->weight = 0;
        p->root = ++p->depth;
        return ROCQ_OK;
    }
    memset(e, 0, sizeof *e);
    if (p->limited) e->enter_ns = rocq_time_ns();
    if (p->n_log + (uint32_t)depth >= ROCQ__LOG) {
        const rocq_result folded = rocq__log_fold(ctx, p, ROCQ__BATCH, "profile");
        if (piece) ROCQ__TRY(folded); // else the next piece finds that the device is lost
    }
    e->region = region;
    e->depth = (int8_t)depth;
    e->pair = e->span = e->access = -1;
    if (piece && p->timed) {
        const int32_t pair = (int32_t)(p->n_pairs % ROCQ__LOG);
        ROCQ__TRY(rocq__mark(ctx, p->marks[pair][0]));
        p->n_pairs++;
        e->pair = pair;
    }
    if (decides) {
        if (r->brief) p->root = depth + 1;
        p->weight = r->skipped + 1;
        r->skipped = 0;
    }
    e->weight = p->weight;
    p->dropped += !r;
    p->depth++;
    if (p->range_push) p->range_push(r ? r->label : name);
    e->start_ns = rocq_time_ns();
    if (r) e->span = rocq__span_add(p, region, false, e->start_ns - p->start_ns, -1);
    return ROCQ_OK;
}

// Counts what measuring has cost, and decides how many calls of a region are skipped from now on.
static void rocq__sample(rocq__profile *p, const rocq__event *e) {
    const int64_t now = rocq_time_ns(), past = now - p->since_ns;
    const double host = (double)(e->start_ns - e->enter_ns + now - e->stop_ns);
    p->full_ns += (double)e->weight * (ROCQ__MIN(host, (double)ROCQ__PAUSE_NS) +
                                       (e->pair >= 0 ? p->marks_ns : 0.0));
    if (e->region < 0 || (p->root > 0 && p->root != e->depth + 1)) return;
    rocq__region *r = &p->regions[e->region];
    const double k = ROCQ__MIN(p->full_ns / (p->desc.cost * (double)past), 1e9);
    p->random = p->random * 6364136223846793005u + 1442695040888963407u;
    const double random = (double)(p->random >> 40) * 0x1p-24; // below 1
    r->brief = e->stop_ns - e->start_ns < ROCQ__LONG_NS;
    r->skip = r->brief && k > 1.0 ? (int32_t)(random * (2.0 * k - 1.0)) : 0;
    p->root = 0;
    p->weight = 1;
    if (past > ROCQ__WINDOW_NS) {
        p->since_ns += past / 2;
        p->full_ns *= 0.5;
    }
}

// work: of an op, a graph or a copy, else NULL.
static rocq_result rocq__region_leave(rocq_ctx *ctx, rocq_result result, rocq__work *work) {
    rocq__profile *p = ctx->profiling;
    p->depth--;
    if (rocq__skipping(p)) {
        if (p->depth < p->root) {
            p->root = 0;
            p->weight = 1;
        }
        return result;
    }
    const int64_t now = rocq_time_ns();
    if (p->range_pop) p->range_pop();
    if (p->depth >= ROCQ__DEPTH) return result;
    rocq__event *e = &p->log[(p->log_begin + p->n_log++) % ROCQ__LOG];
    *e = p->open[p->depth];
    e->stop_ns = now;
    if (e->pair >= 0 && p->timed) {
        const rocq_result marked = rocq__mark(ctx, p->marks[e->pair][1]);
        if (result == ROCQ_OK) result = marked;
    }
    e->failed = result != ROCQ_OK;
    if (work && !e->failed) {
        if (work->params) rocq__work_count(ctx, work);
        const rocq__amount own = {work->bytes, work->flops, work->matrix};
        e->own = own;
        e->access = (int8_t)work->access;
        e->copy = work->copy;
        e->submits = true;
    }
    if (p->limited) rocq__sample(p, e);
    return result;
}

static rocq_result rocq__region_op(rocq_ctx *ctx, rocq_op op, const void *params) {
    if (rocq__skipping(ctx->profiling)) return rocq__run_here(ctx, op, params);
    rocq__work work = rocq__work_named(op, params);
    ROCQ__TRY(rocq__region_enter(ctx, work.name, work.detail, true));
    return rocq__region_leave(ctx, rocq__run_here(ctx, op, params), &work);
}

// A captured graph is one piece with the work of all its ops; else each op is a region inside.
static rocq_result rocq__region_graph(rocq_ctx *ctx, rocq_graph *graph) {
    rocq__work none, *work = graph->exec ? &graph->work : &none;
    memset(&none, 0, sizeof none);
    ROCQ__TRY(rocq__region_enter(ctx, "graph", NULL, graph->exec != NULL));
    return rocq__region_leave(ctx, rocq__graph_submit(ctx, graph), work);
}

static rocq_result rocq__region_leave_copy(rocq_ctx *ctx, rocq_result result, int64_t bytes) {
    rocq__work work;
    memset(&work, 0, sizeof work);
    work.bytes = (double)bytes;
    work.copy = true;
    return rocq__region_leave(ctx, result, &work);
}

// -- start and stop --

static void rocq__profile_free(rocq_ctx *ctx, rocq__profile *p) {
    if (p && p->gpu) rocq__marks_end(ctx, p);
    rocq__free(ctx, p);
}

// The chip's peaks where the desc has none. The matrix unit's is only known of AMD's chips.
static void rocq__profile_peaks(const rocq_ctx *ctx, rocq_profile_desc *desc) {
    if (!rocq__on_gpu(ctx)) return;
    const rocq__chip *chip = rocq__chip_of(ctx);
    if (chip->guessed) return;
    if (desc->bytes_per_s == 0.0) desc->bytes_per_s = 1e6 * chip->bytes_per_us;
    if (desc->flops_per_s == 0.0) desc->flops_per_s = 1e6 * chip->flops_per_us;
    if (desc->matrix_per_s == 0.0 && chip->target != 0) {
        desc->matrix_per_s = 1e6 * chip->matrix_per_us;
    }
}

static void rocq__roctx_load(rocq__profile *p) {
#if ROCQ__HAS_HIP
#if defined(_WIN32)
    static const char *const names[] = {"roctx64.dll", "libroctx64.dll"};
#else
    static const char *const names[] = {"libroctx64.so.4", "libroctx64.so"};
#endif
    static const rocq__hip_symbol symbols[] = {
        {"roctxRangePushA", offsetof(rocq__profile, range_push), true},
        {"roctxRangePop", offsetof(rocq__profile, range_pop), true}};
    for (size_t i = 0; i < 2; i++) {
        char why[256];
        const rocq__library library = rocq__library_open(names[i], ROCQ__BY_NAME, why, sizeof why);
        if (!library) continue;
        if (!rocq__library_symbols(library, symbols, 2, p)) return;
        rocq__library_close(library);
    }
    p->range_push = NULL;
    p->range_pop = NULL;
#else
    (void)p;
#endif
}

// Creates the marks, and measures what a pair costs: launches that are waited for, in turn without
// and with one. The last mark is the first anchor, where the GPU's clock and the host's meet.
static rocq_result rocq__marks_begin(rocq_ctx *ctx, rocq__profile *p) {
    enum { TURNS = 16 };
    const rocq_hip *hip = ctx->gpu->hip;
    ROCQ__TRY(rocq__hip_enter(ctx, "profile_start"));
    for (int32_t i = 0; i < 2 * ROCQ__LOG; i++) {
        ROCQ__TRY_HIP("profile_start", hip->event_create(&p->marks[i / 2][i % 2], 0));
    }
    ROCQ__TRY_HIP("profile_start", hip->event_create(&p->anchor, 0));
    for (int i = -2; i < 2 * TURNS; i++) { // the first two warm up
        const bool marked = i % 2 != 0;
        const int64_t start = rocq_time_ns();
        if (marked) ROCQ__TRY(rocq__mark(ctx, p->anchor));
        ROCQ__TRY(rocq__launch_nothing(ctx));
        if (marked) ROCQ__TRY(rocq__mark(ctx, p->anchor));
        ROCQ__TRY_HIP("profile_start", hip->stream_wait(ctx->gpu->stream));
        const int64_t now = rocq_time_ns();
        if (i >= 0) p->marks_ns += (double)(marked ? now - start : start - now) / (double)TURNS;
        p->anchor_ns = (double)(now - p->start_ns);
    }
    p->marks_ns = ROCQ__MAX(p->marks_ns, 0.0);
    p->timed = true;
    return ROCQ_OK;
}

// The profile and its arrays are one block, cleared, so that its pages are there when regions run.
static rocq_result rocq__profile_make(rocq_ctx *ctx, const rocq_profile_desc *desc,
                                      rocq__profile **out) {
    const bool gpu = rocq__gpu_timed(ctx) && !desc->host_only;
    const int64_t sample = (int64_t)sizeof(double) * desc->max_samples,
                  sorted = (int64_t)sizeof(rocq__profile),
                  samples = sorted + sample,
                  regions = samples + desc->max_regions * (gpu ? 2 : 1) * sample,
                  spans = regions + desc->max_regions * (int64_t)sizeof(rocq__region),
                  bytes = spans + desc->max_events * (int64_t)sizeof(rocq__span);
    char *memory = (char *)rocq__alloc(ctx, bytes);
    if (!memory) {
        return rocq__fail(ctx, ROCQ_E_MEMORY, "profile_start: no memory for %ld regions of %ld "
                          "samples and %ld events", (long)desc->max_regions,
                          (long)desc->max_samples, (long)desc->max_events);
    }
    memset(memory, 0, (size_t)bytes);
    rocq__profile *p = *out = (rocq__profile *)(void *)memory;
    p->sorted = (double *)(void *)(memory + sorted);
    p->samples = (double *)(void *)(memory + samples);
    p->regions = (rocq__region *)(void *)(memory + regions);
    p->spans = (rocq__span *)(void *)(memory + spans);
    p->desc = *desc;
    p->gpu = gpu;
    p->weight = 1;
    p->limited = desc->cost < 1.0 && !desc->roctx;
    if (desc->roctx) rocq__roctx_load(p);
    p->start_ns = rocq_time_ns();
    if (gpu) ROCQ__TRY(rocq__marks_begin(ctx, p));
    p->since_ns = rocq_time_ns() - 1000000; // lets the first calls cost 1 ms * desc.cost
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_profile_start(rocq_ctx *ctx, const rocq_profile_desc *desc) {
    enum { MOST = 1 << 24 };
    rocq_profile_desc d;
    rocq__profile *p = NULL;
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (ctx->profiling) return rocq__fail(ctx, ROCQ_E_STATE, "profile_start: it is on");
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (d.max_regions == 0) d.max_regions = 256;
    if (d.max_samples == 0) d.max_samples = 1024;
    if (d.max_events == 0) d.max_events = 65536;
    if (d.cost == 0.0) d.cost = 0.005;
    if (ROCQ__MIN(d.max_regions, ROCQ__MIN(d.max_samples, d.max_events)) < 0 ||
        ROCQ__MAX(d.max_regions, ROCQ__MAX(d.max_samples, d.max_events)) > MOST ||
        !(d.bytes_per_s >= 0.0 && d.flops_per_s >= 0.0 && d.matrix_per_s >= 0.0 && d.cost > 0.0)) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "profile_start: a field of desc is negative, no "
                          "number, or over %ld", (long)MOST);
    }
    rocq__profile_peaks(ctx, &d);
    const rocq_result result = rocq__profile_make(ctx, &d, &p);
    if (result != ROCQ_OK) {
        rocq__profile_free(ctx, p);
        return result;
    }
    rocq__profile_free(ctx, ctx->profile);
    ctx->profile = ctx->profiling = p;
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_profile_stop(rocq_ctx *ctx) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    rocq__profile *p = ctx->profiling;
    if (!p) return ROCQ_OK;
    const rocq_result result = rocq__log_finish(ctx, "profile_stop");
    if (p->gpu) rocq__marks_end(ctx, p);
    for (; p->range_pop && p->depth > 0; p->depth--) p->range_pop();
    ctx->profiling = NULL;
    return result;
}

ROCQ_DEF rocq_result rocq_profile_clear(rocq_ctx *ctx) {
    const rocq_result result = rocq_profile_stop(ctx);
    if (ctx) {
        rocq__profile_free(ctx, ctx->profile);
        ctx->profile = NULL;
    }
    return result;
}

ROCQ_DEF rocq_result rocq_region_begin(rocq_ctx *ctx, const char *name) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!ctx->profiling) return ROCQ_OK;
    if (!name) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "region_begin: name is NULL");
    return rocq__region_enter(ctx, name, NULL, false);
}

ROCQ_DEF rocq_result rocq_region_work(rocq_ctx *ctx, double bytes, double flops,
                                      rocq_access access) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    rocq__profile *p = ctx->profiling;
    if (!p) return ROCQ_OK;
    if (!(bytes >= 0.0 && flops >= 0.0) || bytes + flops > DBL_MAX || (int)access < 0 ||
        access > ROCQ_ACCESS_LATENCY) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                          "region_work: a number or access %d is out of range", (int)access);
    }
    if (p->depth == 0) return rocq__fail(ctx, ROCQ_E_STATE, "region_work: no region is open");
    if (rocq__skipping(p) || p->depth > ROCQ__DEPTH) return ROCQ_OK;
    rocq__event *e = &p->open[p->depth - 1];
    e->own.bytes += bytes;
    e->own.flops += flops;
    e->access = (int8_t)access;
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_region_end(rocq_ctx *ctx) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!ctx->profiling) return ROCQ_OK;
    if (ctx->profiling->depth == 0) {
        return rocq__fail(ctx, ROCQ_E_STATE, "region_end: no region is open");
    }
    return rocq__region_leave(ctx, ROCQ_OK, NULL);
}

// -- results --

// What a kind of access can reach, at best, of the peak that bounds it.
static const struct {
    const char *name, *reach;
} rocq__accesses[] = { // in the order of rocq_access
    {"stream", "a stream can reach 90%"},
    {"tiled", "tiles can reach 85%"},
    {"gather", "gathered rows can reach 60%"},
    {"latency", "too little work to fill the chip"},
};

// Fills in share, memory_bound and the verdict of stats that have calls, time and work; access
// becomes LATENCY for too little work. matrix: the flops on the matrix unit among them.
static void rocq__judge(const rocq_profile_desc *peak, double matrix, rocq_region_stats *stats,
                        char verdict[ROCQ__VERDICT]) {
    const double vector = stats->flops - matrix;
    const bool computes = (vector <= 0.0 || peak->flops_per_s > 0.0) &&
                          (matrix <= 0.0 || peak->matrix_per_s > 0.0);
    double memory_s = 0.0, compute_s = 0.0; // at the peaks
    if (stats->access == ROCQ_ACCESS_TILED ? !computes : peak->bytes_per_s <= 0.0) return;
    if (peak->bytes_per_s > 0.0) memory_s = stats->bytes / peak->bytes_per_s;
    if (peak->flops_per_s > 0.0) compute_s += vector / peak->flops_per_s;
    if (peak->matrix_per_s > 0.0) compute_s += matrix / peak->matrix_per_s;
    const double least = ROCQ__MAX(memory_s, compute_s);
    if (least <= 0.0 || stats->total_ns <= 0.0) return;
    if (1e9 * least < (double)ROCQ__FILL_NS * (double)stats->calls) {
        stats->access = ROCQ_ACCESS_LATENCY;
    }
    stats->memory_bound = memory_s >= compute_s;
    stats->share = least / (1e-9 * stats->total_ns);
    const char *bound = stats->memory_bound ? "memory-bound" : "compute-bound";
    double rate = 1e-9 * (stats->memory_bound ? peak->bytes_per_s : stats->flops / compute_s);
    const bool tera = !stats->memory_bound && rate >= 1e4;
    const char *unit = stats->memory_bound ? "GB/s" : tera ? "TFLOP/s" : "GFLOP/s";
    if (tera) rate *= 1e-3;
    const char *word = rocq__accesses[stats->access].reach;
    if (stats->share > 1.0) word = "more than the peak, from caches";
    else if (stats->share > 0.8) word = "excellent";
    else if (stats->share > 0.6) word = "good";
    else if (stats->access == ROCQ_ACCESS_LATENCY) bound = "latency-bound";
    snprintf(verdict, ROCQ__VERDICT, "%s, %s%.0f%% of %.0f %s: %s", bound,
             stats->share < 0.01 ? "under " : "", ROCQ__MAX(100.0 * stats->share, 1.0), rate, unit,
             word);
}

static void rocq__times_summarize(const rocq__profile *p, const rocq__times *times,
                                  rocq_summary *summary) {
    const int64_t kept = ROCQ__MIN(times->count, (int64_t)p->desc.max_samples);
    if (kept > 0) memcpy(p->sorted, times->ns, (size_t)kept * sizeof(double));
    rocq_summarize(summary, p->sorted, kept);
    summary->count = times->count;
}

// What counts as a region's time: for what the library submits, the GPU's; for a region around
// that, the longer of host and GPU, since its end need not wait for the GPU.
static const rocq__times *rocq__times_of(const rocq__region *r) {
    const bool gpu = r->submits ? r->gpu.count > 0 : r->gpu.sum > r->host.sum;
    return gpu ? &r->gpu : &r->host;
}

static void rocq__region_stats(const rocq__profile *p, int32_t index, rocq_region_stats *stats) {
    rocq__region *r = &p->regions[index];
    const rocq__times *times = rocq__times_of(r);
    double matrix = 0.0;
    memset(stats, 0, sizeof *stats);
    stats->name = r->label;
    stats->path = r->path;
    stats->verdict = r->verdict;
    stats->depth = r->depth;
    stats->access = r->access;
    rocq__times_summarize(p, &r->host, &stats->host_ns);
    rocq__times_summarize(p, &r->gpu, &stats->gpu_ns);
    stats->calls = r->host.weight + r->skipped;
    if (r->host.weight > 0) { // the GPU may have fewer times than there were calls
        const double scale = (double)stats->calls / (double)r->host.weight;
        stats->total_ns = (double)stats->calls / (double)times->weight * times->sum;
        stats->bytes = scale * r->sum.bytes;
        stats->flops = scale * r->sum.flops;
        matrix = scale * r->sum.matrix;
    }
    if (stats->total_ns > 0.0) {
        stats->bytes_per_s = stats->bytes / (1e-9 * stats->total_ns);
        stats->flops_per_s = stats->flops / (1e-9 * stats->total_ns);
    }
    r->verdict[0] = '\0';
    if (!r->copy) rocq__judge(&p->desc, matrix, stats, r->verdict);
}

ROCQ_DEF int32_t rocq_profile_count(rocq_ctx *ctx) {
    if (!ctx || !ctx->profile) return 0;
    rocq__log_finish(ctx, "profile_count");
    return ctx->profile->n_regions;
}

ROCQ_DEF rocq_result rocq_profile_region(rocq_ctx *ctx, int32_t index, rocq_region_stats *stats) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    const int32_t n = ctx->profile ? ctx->profile->n_regions : 0;
    if (!stats || index < 0 || index >= n) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "profile_region: stats is NULL, or %ld is none of "
                          "%ld", (long)index, (long)n);
    }
    ROCQ__TRY(rocq__log_finish(ctx, "profile_region"));
    rocq__region_stats(ctx->profile, index, stats);
    return ROCQ_OK;
}

// -- reports --

enum { ROCQ__NAME_WIDTH = 44 };

// Characters of UTF-8 text.
static int rocq__text_width(const char *text) {
    int n = 0;
    for (; *text; text++) n += ((unsigned char)*text & 0xc0) != 0x80;
    return n;
}

// Prints the regions directly inside parent (-1: the outermost ones), each followed by those inside
// it. A region's index is larger than its parent's.
static void rocq__report_rows(rocq__output *out, const rocq__profile *p, int32_t parent,
                              int width) {
    const double around = parent < 0 ? 0.0 : rocq__times_of(&p->regions[parent])->sum;
    for (int32_t i = ROCQ__MAX(parent, -1) + 1; i < p->n_regions; i++) {
        rocq_region_stats s;
        if (p->regions[i].parent != parent) continue;
        rocq__region_stats(p, i, &s);
        const bool gpu = rocq__times_of(&p->regions[i]) == &p->regions[i].gpu;
        const rocq_summary *times = gpu ? &s.gpu_ns : &s.host_ns;
        const int indent = 2 * s.depth, pad = width - indent - rocq__text_width(s.name);
        rocq__print(out, "%*s", indent, "");
        rocq__print_bytes(out, s.name, (int64_t)strlen(s.name));
        rocq__print(out, "%*s %8lld %7lld", ROCQ__MAX(pad, 0), "", (long long)s.calls,
                    (long long)s.host_ns.count);
        rocq__print_number(out, 1e-6 * s.total_ns, 11, 3);
        if (around > 0.0) rocq__print_number(out, 100.0 * s.total_ns / around, 7, 1);
        else rocq__print(out, "%7s", "");
        rocq__print_number(out, 1e-3 * times->median, 12, 2);
        rocq__print_number(out, 1e-3 * times->p95, 12, 2);
        rocq__print_number(out, 1e-3 * times->p99, 12, 2);
        if (p->gpu) rocq__print_number(out, 1e-3 * s.host_ns.median, 12, 2);
        if (s.bytes > 0.0 || s.flops > 0.0) {
            rocq__print_number(out, 1e-9 * s.bytes_per_s, 9, 2);
            rocq__print_number(out, 1e-9 * s.flops_per_s, 10, 1);
        }
        rocq__print(out, "%s%s\n", *s.verdict ? "  " : "", s.verdict);
        rocq__report_rows(out, p, i, width);
    }
}

static void rocq__report_table(rocq__output *out, const rocq__profile *p) {
    int width = 6;
    for (int32_t i = 0; i < p->n_regions; i++) {
        const rocq__region *r = &p->regions[i];
        width = ROCQ__MAX(width, 2 * r->depth + rocq__text_width(r->label));
    }
    width = ROCQ__MIN(width, ROCQ__NAME_WIDTH);
    rocq__print(out, "%-*s %8s %7s%11s%7s%12s%12s%12s", width, "region", "calls", "timed",
                "total ms", "%", "median us", "p95 us", "p99 us");
    rocq__print(out, "%s%9s%10s\n", p->gpu ? "     host us" : "", "GB/s", "GFLOP/s");
    rocq__report_rows(out, p, -1, width);
    if (p->dropped + p->dropped_gpu + p->dropped_spans > 0) {
        rocq__print(out, "no room for: %lld calls, %lld GPU times, %lld trace events\n",
                    (long long)p->dropped, (long long)p->dropped_gpu, (long long)p->dropped_spans);
    }
}

static const rocq__number rocq__summary_fields[] = {
#define ROCQ_X(name, digits) {#name, offsetof(rocq_summary, name), digits}
    ROCQ_X(count, -1), ROCQ_X(min, 1), ROCQ_X(median, 1), ROCQ_X(mean, 1), ROCQ_X(p95, 1),
    ROCQ_X(p99, 1), ROCQ_X(max, 1), ROCQ_X(deviation, 1)
#undef ROCQ_X
}, rocq__region_fields[] = {
#define ROCQ_X(name, digits) {#name, offsetof(rocq_region_stats, name), digits}
    ROCQ_X(calls, -1), ROCQ_X(total_ns, 1), ROCQ_X(bytes, 0), ROCQ_X(flops, 0),
    ROCQ_X(bytes_per_s, 0), ROCQ_X(flops_per_s, 0), ROCQ_X(share, 4)
#undef ROCQ_X
}, rocq__profile_fields[] = {
#define ROCQ_X(name, of, digits) {name, offsetof(rocq__profile, of), digits}
    ROCQ_X("peak_bytes_per_s", desc.bytes_per_s, 0),
    ROCQ_X("peak_flops_per_s", desc.flops_per_s, 0),
    ROCQ_X("peak_matrix_per_s", desc.matrix_per_s, 0), ROCQ_X("dropped", dropped, -1),
    ROCQ_X("dropped_gpu", dropped_gpu, -1), ROCQ_X("dropped_events", dropped_spans, -1)
#undef ROCQ_X
}, rocq__span_fields[] = {
    {"ts", 0, 3}, {"dur", sizeof(double), 3}
};

// Prints "name": "text", then `then`.
static void rocq__json_string(rocq__output *out, const char *name, const char *text,
                              const char *then) {
    rocq__print(out, "\"%s\": ", name);
    rocq__print_string(out, text);
    rocq__print(out, "%s", then);
}

static void rocq__report_json(rocq__output *out, const rocq_ctx *ctx, const rocq__profile *p) {
    rocq__print(out, "{");
    rocq__json_string(out, "device", ctx->device, ", ");
    ROCQ__PRINT_FIELDS(out, rocq__profile_fields, p);
    rocq__print(out, ",\n \"regions\": [");
    for (int32_t i = 0; i < p->n_regions; i++) {
        rocq_region_stats s;
        rocq__region_stats(p, i, &s);
        rocq__print(out, "%s\n    {", i > 0 ? "," : "");
        rocq__json_string(out, "name", s.name, ", ");
        rocq__json_string(out, "path", s.path, ", ");
        rocq__print(out, "\"depth\": %d,\n     \"host_ns\": {", (int)s.depth);
        ROCQ__PRINT_FIELDS(out, rocq__summary_fields, &s.host_ns);
        rocq__print(out, "},\n     \"gpu_ns\": {");
        ROCQ__PRINT_FIELDS(out, rocq__summary_fields, &s.gpu_ns);
        rocq__print(out, "},\n     \"access\": \"%s\", \"memory_bound\": %s, ",
                    rocq__accesses[s.access].name, s.memory_bound ? "true" : "false");
        ROCQ__PRINT_FIELDS(out, rocq__region_fields, &s);
        rocq__print(out, ", ");
        rocq__json_string(out, "verdict", s.verdict, "}");
    }
    rocq__print(out, "\n ]}\n");
}

static void rocq__report_trace(rocq__output *out, const rocq_ctx *ctx, const rocq__profile *p) {
    const char *const names[3] = {ctx->device, "host", "GPU"};
    rocq__print(out, "{\"displayTimeUnit\": \"ns\", ");
    ROCQ__PRINT_FIELDS(out, rocq__profile_fields, p);
    rocq__print(out, ", \"traceEvents\": [");
    for (int i = 0; i < (p->gpu ? 3 : 2); i++) { // what the process and its threads are called
        rocq__print(out, "%s\n{\"ph\": \"M\", \"pid\": 1, \"tid\": %d, \"name\": \"%s\", "
                    "\"args\": {", i > 0 ? "," : "", ROCQ__MAX(i, 1),
                    i > 0 ? "thread_name" : "process_name");
        rocq__json_string(out, "name", names[i], "}}");
    }
    for (int64_t i = 0; i < p->n_spans && !out->failed; i++) {
        const rocq__span *span = &p->spans[i];
        const double us[2] = {1e-3 * (double)span->start_ns,
                              1e-3 * (double)(span->stop_ns - span->start_ns)};
        if (span->stop_ns < 0) continue;
        rocq__print(out, ",\n{\"ph\": \"X\", \"pid\": 1, \"tid\": %d, ", span->gpu ? 2 : 1);
        rocq__json_string(out, "name", p->regions[span->region].label, ", ");
        ROCQ__PRINT_FIELDS(out, rocq__span_fields, us);
        rocq__print(out, "}");
    }
    rocq__print(out, "\n]}\n");
}

ROCQ_DEF rocq_result rocq_profile_report(rocq_ctx *ctx, rocq_report kind, rocq_write_fn write,
                                         void *user) {
    rocq__output out;
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!write || (int)kind < 0 || kind > ROCQ_REPORT_TRACE) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "profile_report: write is NULL, or kind %d is none",
                          (int)kind);
    }
    const rocq__profile *p = ctx->profile;
    if (!p) return rocq__fail(ctx, ROCQ_E_STATE, "profile_report: no profile has been started");
    ROCQ__TRY(rocq__log_finish(ctx, "profile_report"));
    out.write = write;
    out.user = user;
    out.failed = false;
    if (kind == ROCQ_REPORT_TEXT) rocq__report_table(&out, p);
    else if (kind == ROCQ_REPORT_JSON) rocq__report_json(&out, ctx, p);
    else rocq__report_trace(&out, ctx, p);
    return out.failed ? rocq__fail(ctx, ROCQ_E_IO, "profile_report: the report cannot be written")
                      : ROCQ_OK;
}

#else // compiled out: there is never a profile

#define ROCQ__NOTHING(ctx) (ctx) ? ROCQ_OK : ROCQ_E_ARGUMENT
ROCQ_DEF rocq_result rocq_profile_start(rocq_ctx *ctx, const rocq_profile_desc *desc) {
    return (void)desc, ROCQ__NOTHING(ctx);
}
ROCQ_DEF rocq_result rocq_profile_stop(rocq_ctx *ctx) { return ROCQ__NOTHING(ctx); }
ROCQ_DEF rocq_result rocq_profile_clear(rocq_ctx *ctx) { return ROCQ__NOTHING(ctx); }
ROCQ_DEF rocq_result rocq_region_begin(rocq_ctx *ctx, const char *name) {
    return (void)name, ROCQ__NOTHING(ctx);
}
ROCQ_DEF rocq_result rocq_region_work(rocq_ctx *ctx, double bytes, double flops,
                                      rocq_access access) {
    return (void)bytes, (void)flops, (void)access, ROCQ__NOTHING(ctx);
}
ROCQ_DEF rocq_result rocq_region_end(rocq_ctx *ctx) { return ROCQ__NOTHING(ctx); }
ROCQ_DEF int32_t rocq_profile_count(rocq_ctx *ctx) { return (void)ctx, 0; }
ROCQ_DEF rocq_result rocq_profile_region(rocq_ctx *ctx, int32_t index, rocq_region_stats *stats) {
    (void)stats;
    return rocq__fail(ctx, ROCQ_E_ARGUMENT, "profile_region: %ld is none of 0", (long)index);
}
ROCQ_DEF rocq_result rocq_profile_report(rocq_ctx *ctx, rocq_report kind, rocq_write_fn write,
                                         void *user) {
    return (void)kind, (void)write, (void)user, ROCQ__NOTHING(ctx);
}
#undef ROCQ__NOTHING

#endif // ROCQ__HAS_PROFILE

// ---------------------------------------------------------------------------------------------
// >>occupancy: waves of a kernel that fit a chip. Not needed to run a model.
// ---------------------------------------------------------------------------------------------

#if ROCQ__HAS_OCCUPANCY

// How many workgroups fit a CU or, without CU mode, a WGP: all waves of a workgroup stay in one.
typedef struct rocq__residency {
    int32_t size;  // waves of a workgroup
    int32_t simds; // of the CU or WGP
    int32_t waves; // that the VGPRs of a SIMD allow
    int32_t by_vgprs, by_threads, by_lds; // workgroups that each resource allows
    int32_t compiler_lds; // by_lds as clang counts it
} rocq__residency;

static rocq__residency rocq__residency_of(const rocq_occupancy_params *p, int32_t vgprs) {
    const int32_t cus = p->cu_mode ? 1 : 2, wave = p->wave ? p->wave : 32;
    const int32_t file = rocq__chip_find(p->target)->vgprs * 32 / wave;
    const int32_t granule = file / ROCQ__FILE_GRANULES;
    rocq__residency limits;
    limits.size = (p->threads + wave - 1) / wave;
    limits.simds = ROCQ__CU_SIMDS * cus;
    limits.waves = ROCQ__MIN(file / ((vgprs + granule - 1) / granule * granule), ROCQ__SIMD_WAVES);
    limits.by_vgprs = limits.waves * limits.simds / limits.size;
    limits.by_threads = ROCQ__SIMD_WAVES * limits.simds / limits.size;
    if (limits.size > 1) limits.by_threads = ROCQ__MIN(limits.by_threads, ROCQ__CU_BARRIERS * cus);
    limits.by_lds = p->lds_bytes > ROCQ__CU_LDS ? 0 : limits.by_threads;
    if (p->lds_bytes > 0 && p->lds_bytes <= ROCQ__CU_LDS) {
        const int32_t blocks = (p->lds_bytes + ROCQ__LDS_GRANULE - 1) / ROCQ__LDS_GRANULE;
        limits.by_lds = ROCQ__CU_LDS * cus / (blocks * ROCQ__LDS_GRANULE);
    }
    limits.compiler_lds = ROCQ__CU_LDS * cus / ROCQ__MAX(p->lds_bytes, 1);
    return limits;
}

static int32_t rocq__residency_groups(const rocq__residency *limits) {
    return ROCQ__MIN(ROCQ__MIN(limits->by_vgprs, limits->by_threads), limits->by_lds);
}

ROCQ_DEF rocq_result rocq_get_occupancy(const rocq_occupancy_params *params,
                                        rocq_occupancy *result) {
    if (!params || !result || !rocq__chip_find(params->target)) return ROCQ_E_ARGUMENT;
    if (params->vgprs < 1 || params->vgprs > 256 || params->lds_bytes < 0 || params->threads < 1 ||
        params->threads > 1024 || (params->wave != 0 && params->wave != 32 && params->wave != 64)) {
        return ROCQ_E_ARGUMENT;
    }
    const rocq__residency limits = rocq__residency_of(params, params->vgprs);
    const int32_t groups = rocq__residency_groups(&limits);
    rocq_occupancy o;
    memset(&o, 0, sizeof o);

    // As LLVM counts (AMDGPUSubtarget, getOccupancyWithLocalMemSize): the lesser of the waves that
    // VGPRs allow and those of as many workgroups as slots and LDS allow, rounded up, at least one.
    const int32_t allowed = ROCQ__MIN(limits.by_threads, limits.compiler_lds);
    const int32_t waves = (allowed * limits.size + limits.simds - 1) / limits.simds;
    o.compiler_waves = ROCQ__MIN(limits.waves, ROCQ__MAX(ROCQ__MIN(waves, ROCQ__SIMD_WAVES), 1));

    o.groups = groups;
    o.waves = (double)(groups * limits.size) / limits.simds;
    o.max_waves = ROCQ__SIMD_WAVES;
    if (groups * limits.size < ROCQ__SIMD_WAVES * limits.simds) {
        o.limit = groups == limits.by_threads ? ROCQ_LIMIT_THREADS
                  : groups == limits.by_lds   ? ROCQ_LIMIT_LDS
                                            : ROCQ_LIMIT_VGPRS;
    }
    for (int32_t v = params->vgprs - 1; v > 0 && o.next_vgprs == 0; v--) {
        const rocq__residency less = rocq__residency_of(params, v);
        if (rocq__residency_groups(&less) > groups) o.next_vgprs = v;
    }
    *result = o;
    return ROCQ_OK;
}

ROCQ_DEF int32_t rocq_recommend_threads(const rocq_occupancy_params *params, double lds_per_thread,
                                        int32_t *threads, int32_t n) {
    enum { MOST = 1024 / 32 };
    int32_t sizes[MOST], count = 0;
    double waves[MOST];
    if (!params || params->lds_bytes < 0 || !(lds_per_thread >= 0.0)) return 0;
    rocq_occupancy_params p = *params;
    const int32_t wave = p.wave == 64 ? 64 : 32;
    for (p.threads = wave; p.threads <= 1024; p.threads += wave) {
        const double lds = ceil((double)params->lds_bytes + lds_per_thread * p.threads);
        rocq_occupancy o;
        if (!(lds <= (double)ROCQ__CU_LDS)) continue;
        p.lds_bytes = (int32_t)lds;
        if (rocq_get_occupancy(&p, &o) != ROCQ_OK) return 0;
        if (o.waves <= 0.5 * o.max_waves) continue;
        int32_t at = count++;
        for (; at > 0 && waves[at - 1] < o.waves; at--) {
            sizes[at] = sizes[at - 1];
            waves[at] = waves[at - 1];
        }
        sizes[at] = p.threads;
        waves[at] = o.waves;
    }
    for (int32_t i = 0; threads && i < ROCQ__MIN(n, count); i++) threads[i] = sizes[i];
    return count;
}

#else // compiled out

ROCQ_DEF rocq_result rocq_get_occupancy(const rocq_occupancy_params *params,
                                        rocq_occupancy *result) {
    return (void)params, (void)result, ROCQ_E_UNSUPPORTED;
}
ROCQ_DEF int32_t rocq_recommend_threads(const rocq_occupancy_params *params, double lds_per_thread,
                                        int32_t *threads, int32_t n) {
    return (void)params, (void)lds_per_thread, (void)threads, (void)n, 0;
}

#endif // ROCQ__HAS_OCCUPANCY

// ---------------------------------------------------------------------------------------------
// >>tuner: trials, and the file of their results. Not needed to run a model.
// ---------------------------------------------------------------------------------------------
// rocq_tune puts what it tries into ctx->tuned, where its result will be, so that trials run
// through the same code as later launches. A row is a graph of the op, or of several ops of one
// class in turn, recorded many times over. Its replay is timed.

ROCQ_DEF void rocq_tuning_clear(rocq_ctx *ctx) {
    if (!ctx) return;
    rocq__free(ctx, ctx->tuned);
    ctx->tuned = NULL;
    ctx->n_tuned = ctx->tuned_capacity = 0;
}

#if ROCQ__HAS_TUNER

enum {
    ROCQ__TUNED = 4096,                 // results that a context keeps
    ROCQ__GRID = 2 * (int)ROCQ__SPLITS, // most configurations of a site
    ROCQ__TUNE_PARAMS = 64,             // ops of a graph that take turns
    ROCQ__TUNE_RUNS = 256,              // most ops in a row, but no more than take
    ROCQ__TUNE_ROW_NS = 500000,         // this long, which hides what its launch costs
    ROCQ__TUNE_TRIAL = 3,               // samples of a trial, and of the default in turn with it
    ROCQ__TUNE_PROOF = 15               // the same for what is to replace the default
};

// -- the list --

static rocq_result rocq__tuned_full(rocq_ctx *ctx) {
    return rocq__fail(ctx, ROCQ_E_STATE,
                      "tune: the list of %d results is full; rocq_tuning_clear empties it",
                      (int)ROCQ__TUNED);
}

static rocq_result rocq__tuned_insert(rocq_ctx *ctx, int32_t place, const rocq__tuned *entry) {
    if (ctx->n_tuned == ROCQ__TUNED) return rocq__tuned_full(ctx);
    void *list = rocq__array_grow(ctx, ctx->tuned, &ctx->tuned_capacity, (int64_t)ctx->n_tuned + 1,
                                  (int64_t)sizeof *entry);
    if (!list) {
        return rocq__fail(ctx, ROCQ_E_MEMORY, "tune: no memory for %d results",
                          (int)ctx->n_tuned + 1);
    }
    ctx->tuned = (rocq__tuned *)list;
    rocq__tuned *at = ctx->tuned + place;
    memmove(at + 1, at, (size_t)(ctx->n_tuned++ - place) * sizeof *at);
    *at = *entry;
    return ROCQ_OK;
}

static void rocq__tuned_remove(rocq_ctx *ctx, const rocq__site *site) {
    bool found;
    const int32_t place = rocq__tuned_place(ctx, site, &found);
    if (!found) return;
    rocq__tuned *at = ctx->tuned + place;
    memmove(at, at + 1, (size_t)(--ctx->n_tuned - place) * sizeof *at);
}

// -- the grid --

// All configurations of a site; returns how many.
static int32_t rocq__grid_of(const rocq__site *s, rocq_launch_config *grid) {
    const bool tiles = s->kind == ROCQ__KIND_TILES;
    const int32_t few = tiles ? ROCQ_K_MATMUL_F16_N_FEW : ROCQ_K_DECODE_COLUMNS;
    const int32_t many = tiles ? ROCQ_K_MATMUL_F16_N : ROCQ_K_PREFILL_COLUMNS(s->k);
    int32_t n = 0, splits[ROCQ__SPLITS];
    memset(grid, 0, ROCQ__GRID * sizeof *grid);
    if (s->kind == ROCQ__KIND_MATVEC) {
        for (int32_t v = 1; v <= ROCQ_K_MATVEC_WAVES; v *= 2) {
            if (v == 1 || s->k / v >= rocq__matvec_step(s)) grid[n++].k_waves = v; // a full step
        }
        return n;
    }
    const int32_t n_splits = tiles ? rocq__tile_splits(s, splits)
                                   : rocq__splits_of(s->n, ROCQ_K_ATTEND_RUN, 384, splits);
    for (int32_t i = 0; i < (few == many ? 1 : 2) * n_splits; i++) {
        grid[n].tile_n = i < n_splits ? few : many;
        grid[n++].n_splits = splits[i % n_splits];
    }
    return n;
}

static bool rocq__same_config(const rocq_launch_config *a, const rocq_launch_config *b) {
    return memcmp(a, b, sizeof *a) == 0;
}

static bool rocq__grid_has(const rocq__site *site, const rocq_launch_config *config) {
    rocq_launch_config grid[ROCQ__GRID];
    const int32_t n = rocq__grid_of(site, grid);
    int32_t i = 0;
    while (i < n && !rocq__same_config(&grid[i], config)) i++;
    return i < n;
}

// -- trials --

typedef struct rocq__tuning {
    rocq_ctx *ctx;
    rocq_tune_desc desc; // resolved
    rocq_op op;
    const void *params[ROCQ__TUNE_PARAMS]; // run in turn
    int32_t n_params, n_runs;              // n_runs: ops in a row
    rocq__site own;                        // the class
    rocq_launch_config rule;               // the default
    rocq_graph *rule_row;                  // a row under the default
    rocq_timer timer;
} rocq__tuning;

static void rocq__tune_use(rocq__tuning *t, const rocq_launch_config *config) {
    bool found;
    const int32_t place = rocq__tuned_place(t->ctx, &t->own, &found);
    t->ctx->tuned[place].config = *config;
}

static rocq_result rocq__tune_record(rocq__tuning *t, const rocq_launch_config *config,
                                     rocq_graph **row) {
    rocq_result result = ROCQ_OK;
    rocq__tune_use(t, config);
    ROCQ__TRY(rocq_graph_begin(t->ctx));
    for (int32_t i = 0; i < t->n_runs && result == ROCQ_OK; i++) {
        result = rocq__run_op(t->ctx, t->op, t->params[i % t->n_params]);
    }
    if (result == ROCQ_OK) return rocq_graph_end(t->ctx, row);
    rocq__graph_delete(t->ctx, t->ctx->recording);
    t->ctx->recording = NULL;
    return result;
}

// One sample of a configuration: nanoseconds of an op.
static rocq_result rocq__tune_sample(rocq__tuning *t, const rocq_launch_config *config,
                                     rocq_graph *row, double *ns) {
    rocq_ctx *ctx = t->ctx;
    rocq__tune_use(t, config); // where the ops run one by one, or are captured again
    ROCQ__TRY(rocq_timer_start(ctx, &t->timer));
    ROCQ__TRY(rocq_graph_launch(ctx, row));
    if (!t->timer.stop_event) ROCQ__TRY_HIP("tune", ctx->gpu->hip->stream_wait(ctx->gpu->stream));
    ROCQ__TRY(rocq_timer_stop(ctx, &t->timer));
    ROCQ__TRY(rocq_timer_read(ctx, &t->timer, ns));
    *ns = ROCQ__MAX(*ns, 1.0) / t->n_runs;
    return ROCQ_OK;
}

// Medians of the default and of a configuration, sampled in turn, so that a change of the clock
// affects both. *ns is infinite where there is no memory to run the configuration. A trial of one
// that takes over twice as long ends after its first sample.
static rocq_result rocq__tune_compare(rocq__tuning *t, const rocq_launch_config *config,
                                      int32_t n, double *rule_ns, double *ns) {
    double a[ROCQ__TUNE_PROOF], b[ROCQ__TUNE_PROOF];
    rocq_graph *row = NULL;
    rocq_summary summary;
    rocq__attempt trial;
    rocq__attempt_begin(t->ctx, &trial);
    rocq_result result = rocq__tune_record(t, config, &row);
    if (result == ROCQ_OK) result = rocq__tune_sample(t, config, row, b); // not counted
    const bool no_room = result == ROCQ_E_MEMORY || result == ROCQ_E_BUDGET;
    rocq__attempt_end(t->ctx, &trial, result == ROCQ_OK || no_room);
    for (int32_t i = 0; i < n && result == ROCQ_OK; i++) {
        result = rocq__tune_sample(t, &t->rule, t->rule_row, &a[i]);
        if (result == ROCQ_OK) result = rocq__tune_sample(t, config, row, &b[i]);
        if (n == ROCQ__TUNE_TRIAL && b[0] > 2.0 * a[0]) n = 1;
    }
    rocq_graph_destroy(t->ctx, &row);
    *rule_ns = 1.0;
    *ns = (double)INFINITY;
    if (result != ROCQ_OK) return no_room ? ROCQ_OK : result;
    rocq_summarize(&summary, a, n);
    *rule_ns = summary.median;
    rocq_summarize(&summary, b, n);
    *ns = summary.median;
    return ROCQ_OK;
}

// Records a row of the default. The time of a single op tells how many make a row.
static rocq_result rocq__tune_rule(rocq__tuning *t, double *ns) {
    t->n_runs = 1;
    ROCQ__TRY(rocq__tune_record(t, &t->rule, &t->rule_row));
    for (int32_t i = 0; i < 2; i++) { // the first also warms up
        ROCQ__TRY(rocq__tune_sample(t, &t->rule, t->rule_row, ns));
    }
    rocq_graph_destroy(t->ctx, &t->rule_row);
    const double most = ROCQ__TUNE_RUNS, fit = (double)ROCQ__TUNE_ROW_NS / *ns;
    const int32_t n = (int32_t)ROCQ__MAX(ROCQ__MIN(fit, most), 1.0);
    t->n_params = ROCQ__MIN(t->n_params, n);
    t->n_runs = n / t->n_params * t->n_params;
    ROCQ__TRY(rocq__tune_record(t, &t->rule, &t->rule_row));
    for (int32_t i = 0; i < 2; i++) {
        ROCQ__TRY(rocq__tune_sample(t, &t->rule, t->rule_row, ns));
    }
    return ROCQ_OK;
}

// Whether to try a configuration: not the default again, and of the caller's list only the grid's.
static bool rocq__tune_wants(const rocq__tuning *t, const rocq_launch_config *config) {
    return !rocq__same_config(config, &t->rule) &&
           (!t->desc.configs || rocq__grid_has(&t->own, config));
}

static int64_t rocq__whole_ns(double ns) {
    return (int64_t)ceil(ROCQ__MIN(ns, 1e15));
}

// Tries them all, and the best of them once more against the default.
static rocq_result rocq__tune_trials(rocq__tuning *t, rocq_tune_result *result,
                                     rocq__tuned *out) {
    const int64_t end_ns = rocq_time_ns() + t->desc.max_ms * (int64_t)1000000;
    const double gain = 1.0 + t->desc.min_gain;
    rocq_launch_config grid[ROCQ__GRID], best = t->rule;
    double rule_ns, ns, least = 1.0; // of the default's time
    int32_t n = rocq__grid_of(&t->own, grid);
    const rocq_launch_config *list = t->desc.configs ? t->desc.configs : grid;
    if (t->desc.configs) n = t->desc.n_configs;
    ROCQ__TRY(rocq__tune_rule(t, &rule_ns));
    memset(&out->config, 0, sizeof out->config);
    out->default_ns = out->best_ns = rocq__whole_ns(rule_ns);
    result->n_space++;
    result->n_tried++;
    for (int32_t i = 0; i < n; i++) {
        if (!rocq__tune_wants(t, &list[i])) continue;
        result->n_space++;
        if (rocq_time_ns() >= end_ns) continue;
        result->n_tried++;
        ROCQ__TRY(rocq__tune_compare(t, &list[i], ROCQ__TUNE_TRIAL, &rule_ns, &ns));
        if (ns / rule_ns >= least) continue;
        least = ns / rule_ns;
        best = list[i];
    }
    if (least * gain > 1.0) return ROCQ_OK;
    ROCQ__TRY(rocq__tune_compare(t, &best, ROCQ__TUNE_PROOF, &rule_ns, &ns));
    if (ns * gain > rule_ns) return ROCQ_OK;
    out->config = best;
    out->default_ns = rocq__whole_ns(rule_ns);
    out->best_ns = rocq__whole_ns(ns);
    return ROCQ_OK;
}

// Finds what is best for a class, unless it is known. The list is as before on failure.
static rocq_result rocq__tune_class(rocq__tuning *t, rocq_tune_result *result,
                                    rocq__tuned *out) {
    rocq_ctx *ctx = t->ctx;
    bool found;
    int32_t place = rocq__tuned_place(ctx, &t->own, &found);
    if (found) {
        *out = ctx->tuned[place];
        return ROCQ_OK;
    }
    memset(out, 0, sizeof *out);
    out->site = t->own;
    t->rule_row = NULL;
    ROCQ__TRY(rocq__tuned_insert(ctx, place, out));
    rocq_result r = rocq_timer_init(ctx, &t->timer, ROCQ_TIMER_GPU);
    if (r == ROCQ_OK) {
        r = rocq__tune_trials(t, result, out);
        rocq_timer_free(ctx, &t->timer);
    }
    rocq_graph_destroy(ctx, &t->rule_row);
    if (r == ROCQ_OK) {
        place = rocq__tuned_place(ctx, &t->own, &found);
        ctx->tuned[place] = *out;
        result->cached = false;
    } else {
        rocq__tuned_remove(ctx, &t->own);
    }
    return r;
}

// -- ops and graphs --

static rocq_result rocq__survey_op(rocq_ctx *ctx, rocq_op op, const void *params,
                                   rocq__survey *survey) {
    int64_t scratch;
    bool on_cpu;
    memset(survey, 0, sizeof *survey);
    ctx->survey = survey;
    const rocq_result result = rocq__plan_op(ctx, op, params, &scratch, &on_cpu);
    ctx->survey = NULL;
    if (on_cpu) survey->n = 0; // which may show only after sites were added
    return result;
}

// A site of an op, and the fraction of the op that it stands for.
typedef struct rocq__tune_site {
    rocq__site site, own;
    rocq_op op;
    const void *params;
    double part;
} rocq__tune_site;

typedef struct rocq__tune_sites {
    rocq__tune_site *list; // [n], with room for more
    int32_t n, capacity;
    double bytes, flops;   // of their ops
} rocq__tune_sites;

static rocq_result rocq__tune_collect(rocq_ctx *ctx, const rocq__node *first,
                                      rocq__tune_sites *sites) {
    rocq__survey survey;
    for (const rocq__node *node = first; node; node = node->next) {
        ROCQ__TRY(rocq__survey_op(ctx, node->op, node->params, &survey));
        if (survey.n == 0) continue;
        const rocq__cost cost = rocq__cost_of(ctx, node->op, node->params);
        void *list = rocq__array_grow(ctx, sites->list, &sites->capacity,
                                      (int64_t)sites->n + survey.n, (int64_t)sizeof *sites->list);
        if (!list) return rocq__fail(ctx, ROCQ_E_MEMORY, "tune: no host memory for a list");
        sites->list = (rocq__tune_site *)list;
        sites->bytes += cost.bytes;
        sites->flops += cost.flops;
        for (int32_t i = 0; i < survey.n; i++) {
            rocq__tune_site *s = &sites->list[sites->n++];
            s->site = survey.site[i];
            s->own = rocq__site_class(&s->site);
            s->op = node->op;
            s->params = node->params;
            s->part = 1.0 / survey.n;
        }
    }
    return ROCQ_OK;
}

// Tunes the class of site i, unless an earlier site has it, and adds up what the result counts.
static rocq_result rocq__tune_one(rocq__tuning *t, const rocq__tune_sites *sites, int32_t i,
                                  rocq_tune_result *result) {
    const rocq__tune_site *first = &sites->list[i];
    rocq__tuned found;
    double n_ops = 0.0;
    t->op = first->op;
    t->own = first->own;
    t->rule = rocq__rule_of(rocq__chip_of(t->ctx), &first->site);
    t->n_params = 0;
    for (int32_t k = 0; k < sites->n; k++) {
        const rocq__tune_site *s = &sites->list[k];
        if (memcmp(&s->own, &first->own, sizeof s->own) != 0) continue;
        if (k < i) return ROCQ_OK;
        if (t->n_params < ROCQ__TUNE_PARAMS) t->params[t->n_params++] = s->params;
        n_ops += s->part;
    }
    ROCQ__TRY(rocq__tune_class(t, result, &found));
    if (i == 0) result->config = found.config;
    result->default_ns += (double)found.default_ns * n_ops;
    result->best_ns += (double)found.best_ns * n_ops;
    return ROCQ_OK;
}

static rocq_result rocq__tune_nodes(rocq__tuning *t, const rocq__node *first,
                                    rocq_tune_result *result) {
    const int64_t start_ns = rocq_time_ns();
    rocq__tune_sites sites = {NULL, 0, 0, 0.0, 0.0};
    rocq_result done = rocq__tune_collect(t->ctx, first, &sites);
    for (int32_t i = 0; i < sites.n && done == ROCQ_OK; i++) {
        done = rocq__tune_one(t, &sites, i, result);
    }
    rocq__free(t->ctx, sites.list);
    ROCQ__TRY(done);
    const double s = result->best_ns * 1e-9;
    result->spent_ms = (double)(rocq_time_ns() - start_ns) * 1e-6;
    result->speedup = s > 0.0 ? ROCQ__MAX(result->default_ns / result->best_ns, 1.0) : 1.0;
    result->bytes_per_s = s > 0.0 ? sites.bytes / s : 0.0;
    result->flops_per_s = s > 0.0 ? sites.flops / s : 0.0;
    return ROCQ_OK;
}

static rocq_result rocq__tune_begin(rocq_ctx *ctx, const rocq_tune_desc *desc, rocq__tuning *t,
                                    rocq_tune_result *result) {
    ROCQ__TRY(rocq__not_recording(ctx, "tune"));
    if (!rocq__on_gpu(ctx)) {
        return rocq__fail(ctx, ROCQ_E_UNSUPPORTED, "tune: there is nothing to tune on the CPU");
    }
    ROCQ__TRY(rocq__begin_op(ctx, "tune"));
    memset(t, 0, sizeof *t);
    memset(result, 0, sizeof *result);
    result->cached = true;
    t->ctx = ctx;
    if (desc) t->desc = *desc;
    rocq_tune_desc *d = &t->desc;
    if (d->n_configs < 0 || (d->configs == NULL) != (d->n_configs == 0) || d->max_ms < 0 ||
        !(d->min_gain >= 0.0 && d->min_gain < 1e6)) {
        return rocq__fail(ctx, ROCQ_E_ARGUMENT,
                          "tune: n_configs %d with configs%s, max_ms %d or min_gain %g is no good",
                          (int)d->n_configs, d->configs ? "" : " NULL", (int)d->max_ms,
                          d->min_gain);
    }
    if (d->max_ms == 0) d->max_ms = 1000;
    if (d->min_gain == 0.0) d->min_gain = 0.03;
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_tune(rocq_ctx *ctx, rocq_op op, const void *params,
                               const rocq_tune_desc *desc, rocq_tune_result *result) {
    rocq__tuning t;
    rocq__node *node;
    rocq_tune_result r;
    if (!ctx) return ROCQ_E_ARGUMENT;
    ROCQ__TRY(rocq__tune_begin(ctx, desc, &t, &r));
    ROCQ__TRY(rocq__check_op(ctx, op, params));
    ROCQ__TRY(rocq__node_copy(ctx, op, params, rocq__ops[op].params_size, &node));
    const rocq_result done = rocq__tune_nodes(&t, node, &r);
    rocq__free(ctx, node);
    if (done == ROCQ_OK && result) *result = r;
    return done;
}

ROCQ_DEF rocq_result rocq_tune_graph(rocq_ctx *ctx, rocq_graph *graph, const rocq_tune_desc *desc,
                                     rocq_tune_result *result) {
    rocq__tuning t;
    rocq_tune_result r;
    if (!ctx) return ROCQ_E_ARGUMENT;
    ROCQ__TRY(rocq__tune_begin(ctx, desc, &t, &r));
    ROCQ__TRY(rocq__check_graph(ctx, "tune_graph", graph));
    ROCQ__TRY(rocq__tune_nodes(&t, graph->first, &r));
    ROCQ__TRY(rocq__graph_forget(ctx, graph)); // it is made again, with what was found
    ROCQ__TRY(rocq__graph_prepare(ctx, graph));
    if (result) *result = r;
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_get_launch_config(rocq_ctx *ctx, rocq_op op, const void *params,
                                            rocq_launch_config *config) {
    rocq__survey survey;
    ROCQ__TRY(rocq__check_op(ctx, op, params));
    if (!config) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "get_launch_config: config is NULL");
    ROCQ__TRY(rocq__survey_op(ctx, op, params, &survey));
    *config = survey.config;
    return ROCQ_OK;
}

// -- the file: this header, then the list as it is --

typedef struct rocq__tuning_header {
    char magic[8];
    int32_t version;
    int32_t rocq, driver, target, n_units; // what the results are good for,
    int32_t n_results;
    char device[64];                       // and its name
    uint64_t checksum;                     // of the whole file, with 0 here
} rocq__tuning_header;

enum { ROCQ__TUNING_VERSION = 2 }; // 1 was text

static rocq__tuning_header rocq__tuning_header_of(const rocq_ctx *ctx, int32_t n_results) {
    const rocq__gpu *gpu = ctx->gpu;
    rocq__tuning_header h;
    int driver = 0;
    if (gpu->hip->driver_version && gpu->hip->driver_version(&driver) != 0) driver = 0;
    memset(&h, 0, sizeof h);
    memcpy(h.magic, "rocqtune", sizeof h.magic);
    h.version = ROCQ__TUNING_VERSION;
    h.rocq = ROCQ_VERSION;
    h.driver = driver;
    h.target = gpu->chip.target;
    h.n_units = gpu->chip.n_units;
    h.n_results = n_results;
    snprintf(h.device, sizeof h.device, "%s", gpu->name);
    return h;
}

// Of a header whose checksum is 0, and the list behind it.
static uint64_t rocq__tuning_checksum(const rocq__tuning_header *h, const void *list) {
    const uint64_t sum = rocq__checksum(0, h, (int64_t)sizeof *h);
    return rocq__checksum(sum, list, h->n_results * (int64_t)sizeof(rocq__tuned));
}

ROCQ_DEF rocq_result rocq_tuning_save(rocq_ctx *ctx, rocq_write_fn write, void *user) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!write) return rocq__fail(ctx, ROCQ_E_ARGUMENT, "tuning_save: write is NULL");
    if (!rocq__on_gpu(ctx)) {
        return rocq__fail(ctx, ROCQ_E_UNSUPPORTED,
                          "tuning_save: there is nothing to tune on the CPU");
    }
    const int64_t size = ctx->n_tuned * (int64_t)sizeof *ctx->tuned;
    rocq__tuning_header h = rocq__tuning_header_of(ctx, ctx->n_tuned);
    h.checksum = rocq__tuning_checksum(&h, size > 0 ? (const void *)ctx->tuned : "");
    if (!write(&h, (int64_t)sizeof h, user) || (size > 0 && !write(ctx->tuned, size, user))) {
        return rocq__fail(ctx, ROCQ_E_IO, "tuning_save: write failed");
    }
    return ROCQ_OK;
}

// Whether data is a file of rocq_tuning_save for this device; own is the header that it would write
// here. rocq__tuning_merge checks the entries.
static rocq_result rocq__tuning_check(rocq_ctx *ctx, rocq__tuning_header own,
                                      const unsigned char *data, int64_t size) {
    const int64_t head = (int64_t)sizeof own, magic = (int64_t)sizeof own.magic;
    rocq__tuning_header h;
    if (memcmp(data, own.magic, (size_t)ROCQ__MIN(size, magic)) != 0) {
        return rocq__fail(ctx, ROCQ_E_MAGIC, "tuning_load: not written by rocq_tuning_save");
    }
    memset(&h, 0, sizeof h);
    memcpy(&h, data, (size_t)ROCQ__MIN(size, head));
    if (size >= magic + (int64_t)sizeof h.version && h.version != own.version) {
        return rocq__fail(ctx, ROCQ_E_FOREIGN, "tuning_load: format %d, this is %d",
                          (int)h.version, (int)own.version);
    }
    if (size < head) {
        return rocq__fail(ctx, ROCQ_E_TRUNCATED, "tuning_load: cut short after %lld bytes",
                          (long long)size);
    }
    if (h.n_results < 0 || h.n_results > ROCQ__TUNED) {
        return rocq__fail(ctx, ROCQ_E_CORRUPT, "tuning_load: %d results, %d at most",
                          (int)h.n_results, (int)ROCQ__TUNED);
    }
    const int64_t whole = head + h.n_results * (int64_t)sizeof(rocq__tuned);
    if (size != whole) {
        return rocq__fail(ctx, size < whole ? ROCQ_E_TRUNCATED : ROCQ_E_CORRUPT,
                          "tuning_load: %lld bytes, not %lld", (long long)size, (long long)whole);
    }
    const uint64_t checksum = h.checksum;
    h.checksum = 0;
    if (rocq__tuning_checksum(&h, data + head) != checksum) {
        return rocq__fail(ctx, ROCQ_E_CORRUPT, "tuning_load: damaged: the checksum is another");
    }
    own.n_results = h.n_results;
    if (memcmp(&h, &own, sizeof h) == 0) return ROCQ_OK;
    return rocq__fail(ctx, ROCQ_E_FOREIGN,
                      "tuning_load: for rocq %d on gfx%x with %d units, driver %d; this is rocq %d "
                      "on gfx%x with %d units, driver %d, %s",
                      (int)h.rocq, (unsigned)h.target, (int)h.n_units, (int)h.driver,
                      (int)own.rocq, (unsigned)own.target, (int)own.n_units, (int)own.driver,
                      own.device);
}

// Whether an entry is something that could have been tuned: only then may it decide a launch.
static bool rocq__tuned_valid(const rocq__tuned *entry) {
    const rocq__site *s = &entry->site;
    if (s->kind < 0 || s->kind >= ROCQ__KINDS || s->m < 1 || s->k < 1 || s->n < 1) return false;
    const rocq__site own = rocq__site_class(s);
    return memcmp(&own, s, sizeof own) == 0 && entry->zero == 0 && entry->default_ns >= 0 &&
           entry->best_ns >= 0 &&
           (rocq__is_rule(&entry->config) || rocq__grid_has(s, &entry->config));
}

// Merges n entries, in their order, with the list, which changes only when all are good.
static rocq_result rocq__tuning_merge(rocq_ctx *ctx, const unsigned char *entries, int32_t n) {
    const int32_t n_old = ctx->n_tuned, room = n_old + n;
    int32_t i = 0, count = 0;
    rocq__tuned entry, before;
    if (n == 0) return ROCQ_OK;
    rocq__tuned *list = (rocq__tuned *)rocq__alloc(ctx, room * (int64_t)sizeof *list);
    if (!list) return rocq__fail(ctx, ROCQ_E_MEMORY, "tuning_load: no memory for a list");
    for (int32_t k = 0; k < n; k++, before = entry) {
        memcpy(&entry, entries + k * (int64_t)sizeof entry, sizeof entry);
        if (!rocq__tuned_valid(&entry) ||
            (k > 0 && memcmp(&before.site, &entry.site, sizeof entry.site) >= 0)) {
            rocq__free(ctx, list);
            return rocq__fail(ctx, ROCQ_E_CORRUPT, "tuning_load: result %d is none", (int)k);
        }
        while (i < n_old && memcmp(&ctx->tuned[i].site, &entry.site, sizeof entry.site) < 0) {
            list[count++] = ctx->tuned[i++];
        }
        i += i < n_old && memcmp(&ctx->tuned[i].site, &entry.site, sizeof entry.site) == 0;
        list[count++] = entry;
    }
    while (i < n_old) list[count++] = ctx->tuned[i++];
    if (count > ROCQ__TUNED) {
        rocq__free(ctx, list);
        return rocq__tuned_full(ctx);
    }
    rocq__free(ctx, ctx->tuned);
    ctx->tuned = list;
    ctx->n_tuned = count;
    ctx->tuned_capacity = room;
    return ROCQ_OK;
}

// Checks and merges a file for the device that own names.
static rocq_result rocq__tuning_read(rocq_ctx *ctx, const rocq__tuning_header *own,
                                     const void *data, int64_t size) {
    const unsigned char *bytes = (const unsigned char *)data;
    ROCQ__TRY(rocq__tuning_check(ctx, *own, bytes, size));
    const int64_t n = (size - (int64_t)sizeof *own) / (int64_t)sizeof(rocq__tuned);
    return rocq__tuning_merge(ctx, bytes + sizeof *own, (int32_t)n);
}

ROCQ_DEF rocq_result rocq_tuning_load(rocq_ctx *ctx, const void *data, int64_t size) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    if (!data || size < 0)
        return rocq__fail(ctx, ROCQ_E_ARGUMENT, "tuning_load: data is NULL or size negative");
    if (!rocq__on_gpu(ctx)) {
        return rocq__fail(ctx, ROCQ_E_UNSUPPORTED,
                          "tuning_load: there is nothing to tune on the CPU");
    }
    const rocq__tuning_header own = rocq__tuning_header_of(ctx, 0);
    return rocq__tuning_read(ctx, &own, data, size);
}

#else // compiled out: launches go by rule

static rocq_result rocq__no_tuner(rocq_ctx *ctx) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    return rocq__fail(ctx, ROCQ_E_UNSUPPORTED, "compiled with ROCQ_NO_TUNER");
}
ROCQ_DEF rocq_result rocq_tune(rocq_ctx *ctx, rocq_op op, const void *params,
                               const rocq_tune_desc *desc, rocq_tune_result *result) {
    return (void)op, (void)params, (void)desc, (void)result, rocq__no_tuner(ctx);
}
ROCQ_DEF rocq_result rocq_tune_graph(rocq_ctx *ctx, rocq_graph *graph, const rocq_tune_desc *desc,
                                     rocq_tune_result *result) {
    return (void)graph, (void)desc, (void)result, rocq__no_tuner(ctx);
}
ROCQ_DEF rocq_result rocq_get_launch_config(rocq_ctx *ctx, rocq_op op, const void *params,
                                            rocq_launch_config *config) {
    return (void)op, (void)params, (void)config, rocq__no_tuner(ctx);
}
ROCQ_DEF rocq_result rocq_tuning_save(rocq_ctx *ctx, rocq_write_fn write, void *user) {
    return (void)write, (void)user, rocq__no_tuner(ctx);
}
ROCQ_DEF rocq_result rocq_tuning_load(rocq_ctx *ctx, const void *data, int64_t size) {
    return (void)data, (void)size, rocq__no_tuner(ctx);
}

#endif // ROCQ__HAS_TUNER

// ---------------------------------------------------------------------------------------------
// >>warm: before the first token. Not needed to run a model, only to have no slow first steps.
// ---------------------------------------------------------------------------------------------

// On the CPU ops are rehearsed with their own weights and scratch memory. All else may have no
// contents yet: activations, caches, masks, and weights that an op of the graph makes. Stand-ins
// take their place: floats are 0, and integers are 1, which is a valid index and length.

// Whether an op of the graph may write to t.
static bool rocq__graph_writes(const rocq_graph *graph, const rocq_tensor *t) {
    const rocq__range range = rocq__range_of(t);
    for (const rocq__node *node = graph->first; node; node = node->next) {
        for (int32_t i = 0; i < node->n_tensors; i++) {
            if (node->output[i] && rocq__ranges_cross(rocq__range_of(&node->tensors[i]), range)) {
                return true;
            }
        }
    }
    return false;
}

// Prepares a copy of an op of the graph: afterwards, operand i gets a stand-in unless kept[i].
static void rocq__stand_in_plan(const rocq_graph *graph, rocq__node *copy) {
    for (int32_t i = 0; i < copy->n_tensors; i++) {
        rocq_tensor *t = &copy->tensors[i];
        copy->kept[i] = copy->kept[i] && !rocq__graph_writes(graph, t);
        if (copy->op != ROCQ_OP_ATTENTION) continue;
        const rocq_attention_params *p = (const rocq_attention_params *)copy->params;
        if (t != p->k && t != p->v) continue;
        copy->kept[i] = false; // a cache may be empty, whoever fills it
        // A stand-in for the whole cache would be large. As kv_len and page tables hold 1, only its
        // first position is read or, if it is paged, the first position of page 1.
        const int64_t rows = p->page_table ? 2 * (int64_t)p->page_size : 1;
        if (p->kv_len) t->ne[2] = ROCQ__MIN(t->ne[2], rows);
    }
}

// Returns the bytes that the stand-ins take, and makes them in memory if that is not NULL.
static int64_t rocq__stand_in(rocq__node *node, unsigned char *memory) {
    int64_t used = 0;
    for (int32_t i = 0; i < node->n_tensors; i++) {
        rocq_tensor *t = &node->tensors[i];
        const int64_t begin = used;
        int64_t extent = 0;
        rocq__extent(t, &extent);
        if (node->kept[i]) continue;
        used += (extent + 255) / 256 * 256;
        if (!memory) continue;
        t->buffer = rocq_buffer_from_host(memory + begin, extent);
        t->offset = 0;
        if (node->output[i]) continue;
        memset(memory + begin, 0, (size_t)extent);
        for (int64_t k = 0; t->format == ROCQ_I32 && k < extent; k += 4) memory[begin + k] = 1;
    }
    return used;
}

enum {
    ROCQ__STAND_INS = 8 << 20,   // bytes: an op that needs more (a large cache) is left out
    ROCQ__REHEARSAL_NS = 2000000 // repeated for so long: of the shipped model a second pass takes
};                               // two thirds of the first, and 20 ms leave no faster first step

// Runs copies of the graph's ops with their stand-ins, in order, again and again.
static rocq_result rocq__rehearse(rocq_ctx *ctx, const rocq_graph *graph) {
    const int64_t start = rocq_time_ns();
    rocq__attempt attempt;
    rocq_result result = ROCQ_OK;
    rocq__node *list = NULL, **end = &list;
    unsigned char *memory = NULL;
    int64_t most = 1;
    for (rocq__node *node = graph->first; node && result == ROCQ_OK; node = node->next) {
        result = rocq__node_copy(ctx, node->op, node->params, rocq__ops[node->op].params_size, end);
        if (result != ROCQ_OK) break;
        rocq__stand_in_plan(graph, *end);
        const int64_t size = rocq__stand_in(*end, NULL);
        if (size > ROCQ__STAND_INS) {
            rocq__free(ctx, *end);
            *end = NULL;
            continue;
        }
        most = ROCQ__MAX(most, size);
        end = &(*end)->next;
    }
    if (result == ROCQ_OK) {
        memory = (unsigned char *)rocq__alloc_aligned(ctx, most, 256);
        if (!memory) result = rocq__fail(ctx, ROCQ_E_MEMORY, "warm: no memory to rehearse ops in");
    }
    while (result == ROCQ_OK) {
        for (rocq__node *node = list; node && result == ROCQ_OK; node = node->next) {
            result = rocq__begin_op(ctx, "warm");
            if (result != ROCQ_OK) break;
            rocq__stand_in(node, memory);
            rocq__attempt_begin(ctx, &attempt);
            rocq__run_cpu(ctx, node->op, node->params);
            rocq__attempt_end(ctx, &attempt, true); // it may fail: 1 may be too large an index
        }
        if (rocq_time_ns() - start >= ROCQ__REHEARSAL_NS) break;
    }
    rocq__free(ctx, memory);
    while (list) {
        rocq__node *next = list->next;
        rocq__free(ctx, list);
        list = next;
    }
    return result;
}

// Touches the pages of scratch memory, which starts the threads, and of operands; rehearses ops.
static rocq_result rocq__warm_cpu(rocq_ctx *ctx, const rocq_graph *graph) {
    rocq__pages pages = {(unsigned char *)ctx->scratch, ctx->scratch_size, true};
    rocq__parallel(ctx, ROCQ__MAX(ctx->desc.n_threads, ctx->scratch_size / ROCQ__PAGE + 1), 1,
                   rocq__touch_task, &pages);
    for (const rocq__node *node = graph ? graph->first : NULL; node; node = node->next) {
        for (int32_t i = 0; i < node->n_tensors; i++) {
            if (!rocq__extent(&node->tensors[i], &pages.size)) continue;
            pages.data = (unsigned char *)rocq_tensor_data(&node->tensors[i]);
            pages.written = node->output[i];
            rocq__parallel(ctx, (pages.size + ROCQ__PAGE - 1) / ROCQ__PAGE, 64, rocq__touch_task,
                           &pages);
        }
    }
    return graph ? rocq__rehearse(ctx, graph) : ROCQ_OK;
}

typedef union rocq__any_args {
#define ROCQ_X(name, args, threads) args name;
    ROCQ_KERNELS(ROCQ_X)
#undef ROCQ_X
} rocq__any_args;

// Launches the kernels of the graph (without one, all) with zeroed args, so that the runtime loads
// them.
static rocq_result rocq__warm_kernels(rocq_ctx *ctx, const rocq_graph *graph) {
    rocq__gpu *gpu = ctx->gpu;
    rocq_result result = ROCQ_OK;
    bool planned[ROCQ_K_COUNT];
    rocq__any_args none;
    memset(planned, graph ? 0 : 1, sizeof planned);
    memset(&none, 0, sizeof none);
    gpu->planned = planned;
    for (const rocq__node *node = graph ? graph->first : NULL; node && result == ROCQ_OK;
         node = node->next) {
        int64_t scratch;
        bool on_cpu;
        result = rocq__plan_op(ctx, node->op, node->params, &scratch, &on_cpu);
    }
    gpu->planned = NULL;
    ROCQ__TRY(result);
    for (int k = 0; k < ROCQ_K_COUNT; k++) {
        if (!planned[k]) continue;
        ROCQ__TRY_HIP(rocq__kernels[k].name,
                      rocq__hip_launch(gpu, k, 1, 1, (uint32_t)rocq__kernels[k].threads, &none));
    }
    return ROCQ_OK;
}

// -- a replay against the ops --
// A runtime may replay a graph wrongly: with arguments or input data of an earlier time, or without
// one of its nodes. To find out, the graph runs three times: replayed over inputs A, replayed over
// inputs B, and its ops one by one over inputs B; the last two must write the same bits. The replay
// over A comes first, so that stale data in the second replay differs from B. Before each run,
// outputs are filled with a byte, so that an output that is never written shows. What the runs
// overwrite is put aside (copied) first and restored in the end; one launch copies, fills or
// compares all of it. So inputs must be such that no op writes anywhere else. The only operand that
// decides where an op writes is the cell of rocq_rope_append. Its values are i or i + 1 for token
// i, so the first cells of a cache suffice; where ops of the graph compute the cells, all cells are
// put aside. Kernels catch any other index that is out of range.

typedef struct rocq__feed { // an input of the graph, and the values that it is given
    rocq_tensor t;
    bool is_index;              // I32: element i is first + i step, and shift more for inputs B;
    int64_t first, step, shift; // else random bytes that make sense in any format
    bool is_cell;               // decides which rows of a cache are written
} rocq__feed;

enum { ROCQ__REPLAY_FILL = 0x3a }; // a byte, which makes sense in any format

typedef struct rocq__replay {
    rocq_ctx *ctx;
    rocq_graph *graph;
    rocq__touched *regions; // what ops read or write, but for weights and caches
    int32_t n_regions;
    rocq__feed *feeds;
    int32_t n_feeds;
    int64_t n_cells;        // rows of each cache that may be written
    rocq_k_range *ranges;   // what is put aside: the status word, regions, rows of caches
    int64_t n_ranges, size; // and the bytes of all copies
    unsigned char *image;   // a region as it is uploaded
    rocq__block *aside;     // [size] the contents before, [size] after the replay over inputs B,
                            // the ranges, a rocq_k_difference
} rocq__replay;

// Adds input t of an op to the feeds, with values that the op accepts.
static void rocq__feed_add(rocq__replay *r, const rocq__operand *o, const void *params,
                           const rocq_tensor *t) {
    rocq__feed f;
    memset(&f, 0, sizeof f);
    f.t = *t;
    f.is_index = t->format == ROCQ_I32;
    f.step = f.shift = 1;
    if (o->op == ROCQ_OP_ATTENTION) {
        const rocq_attention_params *p = (const rocq_attention_params *)params;
        if (t == p->page_table) f.shift = 0; // so that attention reads the cells that are written
        if (t == p->kv_len) {                // the number of queries; for B 1 more if that fits
            f.first = p->q->ne[2];
            f.step = 0;
            f.shift = p->page_table || p->k->ne[2] > f.first;
        }
    } else if (o->op == ROCQ_OP_ROPE_APPEND) {
        const rocq_rope_append_params *p = (const rocq_rope_append_params *)params;
        f.is_cell = t == (p->cell ? p->cell : p->pos);
    } else if (o->op == ROCQ_OP_SAMPLE) {
        if (t == ((const rocq_sample_params *)params)->allowed) { // all bits; for B not the first
            f.first = f.shift = -1;
            f.step = 0;
        }
    }
    for (int32_t k = 0; k < r->n_feeds; k++) { // most are shared by all layers: add each once
        const rocq__feed *had = &r->feeds[k];
        if (rocq__same_tensor(&had->t, t) && had->first == f.first && had->step == f.step &&
            had->shift == f.shift && had->is_cell == f.is_cell) {
            return;
        }
    }
    r->feeds[r->n_feeds++] = f;
}

// Whether the tensor lies in one of the regions.
static bool rocq__touched_hold(const rocq__touched *list, int32_t n, const rocq_tensor *t) {
    const rocq__range range = rocq__range_of(t);
    for (int32_t k = 0; k < n; k++) {
        if (list[k].range.begin <= range.begin && range.end <= list[k].range.end) return true;
    }
    return false;
}

// Finds the regions that ops read or write, and the feeds: what is read before an op of the graph
// has written it. Inputs that touch become one region, so that they are uploaded at once, as a
// program does it. Caches are left to rocq__replay_rows. written is a work area like regions.
static void rocq__replay_operands(rocq__replay *r, rocq__touched *written) {
    int32_t n_written = 0, end;
    for (const rocq__node *node = r->graph->first; node; node = node->next) {
        const int32_t begin = rocq__operands_begin(node->op, &end);
        for (int pass = 0; pass < 2; pass++) { // what the op reads, then what it writes
            for (const void *p = node->params; p; p = rocq__next_params(node->op, p)) {
                for (int32_t i = begin; i < end; i++) {
                    const rocq__operand *o = &rocq__operands[i];
                    const rocq_tensor *t = rocq__operand_of(p, o);
                    const bool out = o->role == ROCQ__OUT;
                    if (!t || o->role == ROCQ__KEPT || out != (pass == 1)) continue;
                    if (out && o->op == ROCQ_OP_ROPE_APPEND &&
                        o->offset != offsetof(rocq_rope_append_params, q)) {
                        continue;
                    }
                    if (rocq__touched_hold(written, n_written, t)) continue;
                    rocq__touched_add(r->regions, &r->n_regions, t, out);
                    if (out) rocq__touched_add(written, &n_written, t, true);
                    else rocq__feed_add(r, o, p, t);
                }
            }
        }
    }
    for (int32_t i = 0; i < r->n_regions; i++) {
        for (int32_t k = 0; k < r->n_regions; k++) {
            rocq__touched *a = &r->regions[i], *next = &r->regions[k];
            if (a->written || next->written || a->range.end != next->range.begin) continue;
            a->range.end = next->range.end;
            *next = r->regions[--r->n_regions];
            i = -1; // the last one has moved: from the beginning
            break;
        }
    }
}

// The rows of a cache that may be written, as ne[1] ne[2] pieces of ne[0] elements without gaps.
static rocq_tensor rocq__replay_rows(const rocq__replay *r, const rocq_tensor *cache) {
    static const int32_t swap[4] = {0, 2, 1, 3};
    rocq_tensor rows = *cache;
    rows.ne[2] = ROCQ__MIN(rows.ne[2], r->n_cells);
    if (rows.stride[1] > rows.stride[2]) rocq_tensor_permute(&rows, &rows, swap); // cannot fail
    for (int d = 1; d < 3 && (rows.ne[d] == 1 || rows.stride[d] == rows.ne[0]); d++) {
        rows.ne[0] *= rows.ne[d];
        rows.ne[d] = 1;
    }
    return rows;
}

// Of caches: one row more than the most tokens of an append, but all if an op of the graph computes
// the cells, since the feeds do not decide them then.
static void rocq__replay_cells(rocq__replay *r) {
    const rocq_tensor *known = NULL;
    for (const rocq__node *node = r->graph->first; node; node = node->next) {
        if (node->op != ROCQ_OP_ROPE_APPEND) continue;
        const rocq_rope_append_params *p = (const rocq_rope_append_params *)node->params;
        const rocq_tensor *cell = p->cell ? p->cell : p->pos;
        r->n_cells = ROCQ__MAX(r->n_cells, p->k->ne[2] + 1);
        if (known && rocq__same_tensor(known, cell)) continue; // those of the layer before
        known = cell;
        if (rocq__graph_writes(r->graph, cell)) r->n_cells = INT64_MAX;
    }
}

static void rocq__replay_range(rocq__replay *r, uint64_t address, int64_t size, bool filled,
                               uint32_t fill) {
    if (r->ranges) {
        rocq_k_range *range = &r->ranges[r->n_ranges];
        range->address = address;
        range->size = size;
        range->copy = r->size;
        range->filled = filled;
        range->fill = fill;
    }
    r->n_ranges++;
    r->size += (size + 255) / 256 * 256;
}

// Lists what has to be put aside; while there is no memory for the list, only counts.
static void rocq__replay_ranges(rocq__replay *r) {
    const uint32_t fill = 0x01010101u * ROCQ__REPLAY_FILL;
    r->n_ranges = r->size = 0;
    rocq__replay_range(r, (uint64_t)(uintptr_t)r->ctx->gpu->status, 4, true, 0);
    for (int32_t k = 0; k < r->n_regions; k++) {
        const rocq__range range = r->regions[k].range;
        rocq__replay_range(r, range.begin, rocq__range_size(range), r->regions[k].written, fill);
    }
    for (const rocq__node *node = r->graph->first; node; node = node->next) {
        if (node->op != ROCQ_OP_ROPE_APPEND) continue;
        const rocq_rope_append_params *p = (const rocq_rope_append_params *)node->params;
        for (int v = 0; v < 2; v++) {
            const rocq_tensor t = rocq__replay_rows(r, v ? p->v_cache : p->k_cache);
            for (int64_t i = 0; i < t.ne[1] * t.ne[2]; i++) {
                const int64_t at = i % t.ne[1] * t.stride[1] + i / t.ne[1] * t.stride[2];
                rocq__replay_range(r, rocq__address(&t) + (uint64_t)rocq__bytes(t.format, at),
                                   rocq__bytes(t.format, t.ne[0]), true, fill);
            }
        }
    }
}

// Makes the image of a region before a run: a byte everywhere, and the values A or B of the feeds
// in it, cells last, so that their values count where operands share memory. While there is no
// memory for it, only says whether there are feeds in the region.
static bool rocq__replay_image(const rocq__replay *r, rocq__range region, int b) {
    bool fed = false;
    for (int cells = 0; cells < 2; cells++) {
        for (int32_t k = 0; k < r->n_feeds; k++) {
            const rocq__feed *f = &r->feeds[k];
            const rocq__range range = rocq__range_of(&f->t);
            const int64_t size = rocq__range_size(range);
            uint32_t random = (uint32_t)(2 * k + b);
            if (f->is_cell != (cells == 1) || !rocq__ranges_cross(range, region)) continue;
            if (!r->image) return true;
            if (!fed) memset(r->image, ROCQ__REPLAY_FILL, (size_t)rocq__range_size(region));
            fed = true;
            for (int64_t i = 0; i < size; i += 4) {
                int32_t word = (int32_t)(f->first + i / 4 * f->step + b * f->shift);
                if (!f->is_index) { // 4e-5 to 0.75 in F32, 0.5 to 2 in F16
                    random = random * 1664525u + 1013904223u;
                    word = (int32_t)(0x38383838u | (random >> 4 & 0x07070707u));
                }
                memcpy(r->image + (range.begin - region.begin) + i, &word,
                       (size_t)ROCQ__MIN(4, size - i));
            }
        }
    }
    return fed;
}

static rocq_result rocq__replay_upload(rocq_ctx *ctx, uint64_t address, const void *data,
                                       int64_t size) {
    rocq_tensor bytes; // of no particular shape
    memset(&bytes, 0, sizeof bytes);
    bytes.buffer = rocq_buffer_from_device(address, size);
    return rocq__upload_memory(ctx, &bytes, data, size);
}

// Takes memory: on the host for the list of ranges and an image, on the device for the copies.
static rocq_result rocq__replay_memory(rocq__replay *r) {
    rocq_ctx *ctx = r->ctx;
    int64_t image_size = 0;
    for (int32_t k = 0; k < r->n_regions; k++) {
        const rocq__range region = r->regions[k].range;
        if (!rocq__replay_image(r, region, 0)) continue;
        image_size = ROCQ__MAX(image_size, rocq__range_size(region));
    }
    rocq__replay_ranges(r);
    const int64_t table = r->n_ranges * (int64_t)sizeof(rocq_k_range);
    const int64_t host = table + ROCQ__LINE + image_size;
    const int64_t device = 2 * r->size + table + ROCQ__LINE;
    char *memory = r->n_ranges <= INT32_MAX ? (char *)rocq__alloc(ctx, host) : NULL;
    if (!memory) return rocq__fail(ctx, ROCQ_E_MEMORY, "no host memory for %lld bytes",
                                   (long long)host);
    r->ranges = (rocq_k_range *)(void *)memory;
    r->image = (unsigned char *)memory + table + ROCQ__LINE;
    rocq__replay_ranges(r);
    ROCQ__TRY(rocq__take_budget(ctx, device));
    const rocq_result result =
        rocq__device_alloc(ctx, "warm", device, ROCQ_MEMORY_DEVICE, &r->aside);
    if (result != ROCQ_OK) {
        ctx->budget_used -= device;
        return result;
    }
    memset(memory + table, 0, ROCQ__LINE); // the difference
    const uint64_t to = (uint64_t)(uintptr_t)r->aside->address + (uint64_t)(2 * r->size);
    return rocq__replay_upload(ctx, to, memory, table + ROCQ__LINE);
}

// Finds out what has to be put aside, and takes the memory for it. The caller frees *lists.
static rocq_result rocq__replay_begin(rocq__replay *r, void **lists) {
    rocq_ctx *ctx = r->ctx;
    int64_t n = 0;
    for (const rocq__node *node = r->graph->first; node; node = node->next) n += node->n_tensors;
    const int64_t item = 2 * (int64_t)sizeof(rocq__touched) + (int64_t)sizeof(rocq__feed);
    char *memory = n <= INT32_MAX ? (char *)rocq__alloc(ctx, n * item) : NULL;
    if (!memory) return rocq__fail(ctx, ROCQ_E_MEMORY, "no host memory for %lld operands",
                                   (long long)n);
    *lists = memory;
    r->feeds = (rocq__feed *)(void *)memory;
    r->regions = (rocq__touched *)(void *)(r->feeds + n);
    rocq__replay_operands(r, r->regions + n);
    rocq__replay_cells(r);
    return rocq__replay_memory(r);
}

// One launch over all ranges; copies is where their copies are, and not used to fill.
static rocq_result rocq__replay_launch(rocq__replay *r, int32_t task, int64_t copies) {
    unsigned char *aside = (unsigned char *)r->aside->address;
    const rocq__cost cost = {2.0 * (double)r->size, 0.0, 0.0};
    rocq_k_ranges_args a;
    memset(&a, 0, sizeof a);
    a.ranges = (const rocq_k_range *)(void *)(aside + 2 * r->size);
    a.copies = aside + copies;
    a.size = r->size;
    a.difference = (rocq_k_difference *)(void *)(a.ranges + r->n_ranges);
    a.n = (int32_t)r->n_ranges;
    a.task = task;
    return rocq__launch(r->ctx, ROCQ_K_ranges, (r->size + 4095) / 4096, 1, 256, &a, cost);
}

// Fills the outputs with a byte and uploads the inputs with values A or B.
static rocq_result rocq__replay_feed(rocq__replay *r, int b) {
    ROCQ__TRY(rocq__replay_launch(r, ROCQ_K_FILL, 0));
    for (int32_t k = 0; k < r->n_regions; k++) {
        const rocq__range region = r->regions[k].range;
        if (!rocq__replay_image(r, region, b)) continue;
        ROCQ__TRY(rocq__replay_upload(r->ctx, region.begin, r->image, rocq__range_size(region)));
    }
    return ROCQ_OK;
}

// Submits the three runs, and compares what the last two wrote. The host waits for none of them,
// unless the ring is full. Inputs A are uploaded twice, the second time just before the replay: if
// that does not see the last copy, it still has indices with which it writes to nothing else. The
// kernels are launched without work in between, so that a runtime that replays with the arguments
// of the last launch does not replay with the right ones.
static rocq_result rocq__replay_runs(rocq__replay *r) {
    rocq_ctx *ctx = r->ctx;
    for (int i = 0; i < 2; i++) ROCQ__TRY(rocq__replay_feed(r, 0));
    ROCQ__TRY(rocq__graph_submit(ctx, r->graph));
    ROCQ__TRY(rocq__warm_kernels(ctx, r->graph));
    ROCQ__TRY(rocq__replay_feed(r, 1));
    ROCQ__TRY(rocq__graph_submit(ctx, r->graph));
    ROCQ__TRY(rocq__replay_launch(r, ROCQ_K_SAVE, r->size));
    ROCQ__TRY(rocq__replay_feed(r, 1));
    ROCQ__TRY(rocq__graph_run(ctx, r->graph));
    return rocq__replay_launch(r, ROCQ_K_COMPARE, r->size);
}

// The last op that writes what has its copy there; NULL for the status word.
static const rocq__node *rocq__replay_find(const rocq__replay *r, int64_t copy) {
    const rocq__node *found = NULL;
    int64_t k = r->n_ranges - 1;
    while (r->ranges[k].copy > copy) k--;
    const uint64_t address = r->ranges[k].address + (uint64_t)(copy - r->ranges[k].copy);
    for (const rocq__node *node = r->graph->first; node; node = node->next) {
        for (int32_t i = 0; i < node->n_tensors; i++) {
            const rocq__range range = rocq__range_of(&node->tensors[i]);
            if (node->output[i] && range.begin <= address && address < range.end) found = node;
        }
    }
    return found;
}

static rocq_result rocq__replay_refuse(rocq__replay *r, int64_t copy) {
    rocq_ctx *ctx = r->ctx;
    const rocq__node *found = rocq__replay_find(r, copy);
    int32_t number = 0, n = 0;
    for (const rocq__node *node = r->graph->first; node; node = node->next) {
        n++;
        if (node == found) number = n;
    }
    snprintf(ctx->gpu->replay, sizeof ctx->gpu->replay,
             "graph: a replay of its %d ops does not write what they write, seen in the output of "
             "op %d, %s: from now on they run one by one",
             (int)n, (int)number, found ? rocq__ops[found->op].name : "the status word");
    rocq__log(ctx, ROCQ_LOG_WARN, "%s", ctx->gpu->replay);
    r->graph->refused = true;
    ctx->stats.n_replays_refused++;
    return rocq__graph_forget(ctx, r->graph);
}

// Checks that a replay of the captured graph writes what its ops write; if not, the graph is run op
// by op from then on. Without enough memory nothing is checked, and that is no failure.
static rocq_result rocq__replay_check(rocq_ctx *ctx, rocq_graph *graph) {
    rocq__gpu *gpu = ctx->gpu;
    const int64_t n_launches = ctx->stats.n_launches;
    rocq__attempt attempt;
    rocq__replay r;
    void *lists = NULL;
    rocq_k_difference difference = {0, 0, 0};
    memset(&r, 0, sizeof r);
    r.ctx = ctx;
    r.graph = graph;
    rocq__attempt_begin(ctx, &attempt);
    rocq_result result = rocq__replay_begin(&r, &lists);
    const bool unchecked = result == ROCQ_E_MEMORY || result == ROCQ_E_BUDGET;
    if (unchecked) {
        rocq__log(ctx, ROCQ_LOG_WARN, "graph: its replay is not checked: %s", ctx->error);
    }
    rocq__attempt_end(ctx, &attempt, result == ROCQ_OK || unchecked);
    if (unchecked) {
        result = ROCQ_OK;
    } else if (result == ROCQ_OK) {
#if ROCQ__HAS_PROFILE
        rocq__profile *profiling = ctx->profiling; // the program's profile leaves out these runs
        ctx->profiling = NULL;
#endif
        result = rocq__replay_launch(&r, ROCQ_K_SAVE, 0);
        if (result == ROCQ_OK) {
            result = rocq__replay_runs(&r);
            if (!gpu->lost && rocq__replay_launch(&r, ROCQ_K_RESTORE, 0) != ROCQ_OK) {
                gpu->lost = true; // tensors do not have their contents any more
                result = rocq__fail(ctx, ROCQ_E_LOST, "warm: tensors could not be restored; the "
                                    "GPU is lost, close the context");
            }
        }
        if (result == ROCQ_OK) {
            const char *end = (const char *)r.aside->address + r.aside->size;
            result = rocq__download_hip(ctx, &difference, end - ROCQ__LINE, sizeof difference);
        }
#if ROCQ__HAS_PROFILE
        ctx->profiling = profiling;
#endif
        ctx->stats.n_launches = n_launches;
    }
    if (result == ROCQ_OK && !unchecked) {
        graph->checked = true;
        ctx->stats.n_replays_checked++;
        if (difference.n > 0) result = rocq__replay_refuse(&r, difference.copy);
    }
    if (r.aside) {
        const int error = gpu->hip->stream_wait(gpu->stream);
        if (error != 0 && result == ROCQ_OK) result = rocq__hip_failed(ctx, "warm", error);
        ctx->budget_used -= r.aside->size;
        rocq__device_free(ctx, r.aside);
    }
    rocq__free(ctx, r.ranges);
    rocq__free(ctx, lists);
    return result;
}

// Takes the ring's memory, captures the graph and checks its replay. If there is no check, which
// runs all of them, launches the kernels and uploads the graph.
static rocq_result rocq__warm_hip(rocq_ctx *ctx, rocq_graph *graph) {
    rocq__gpu *gpu = ctx->gpu;
    ROCQ__TRY(rocq__ring_init(ctx, &gpu->ring, ROCQ__PIECE, ROCQ__PIECES));
    if (graph) ROCQ__TRY(rocq__graph_prepare(ctx, graph));
    const bool due = graph && graph->exec && !graph->checked;
    if (due) ROCQ__TRY(rocq__replay_check(ctx, graph));
    if (!due || !graph->checked) {
        ROCQ__TRY(rocq__warm_kernels(ctx, graph));
        if (graph && graph->exec && gpu->hip->graph_upload) {
            ROCQ__TRY_HIP("graph", gpu->hip->graph_upload(graph->exec, gpu->stream));
        }
    }
    ROCQ__TRY_HIP("warm", gpu->hip->stream_wait(gpu->stream));
    return ROCQ_OK;
}

ROCQ_DEF rocq_result rocq_warm(rocq_ctx *ctx, rocq_graph *graph) {
    if (!ctx) return ROCQ_E_ARGUMENT;
    ROCQ__TRY(rocq__not_recording(ctx, "warm"));
    if (graph) ROCQ__TRY(rocq__check_graph(ctx, "warm", graph));
    ROCQ__TRY(rocq__begin_op(ctx, "warm"));
    if (graph) ROCQ__TRY(rocq_reserve(ctx, graph->scratch));
    return rocq__on_gpu(ctx) ? rocq__warm_hip(ctx, graph) : rocq__warm_cpu(ctx, graph);
}

// Private macros end here.
#undef ROCQ__ALIGNAS
#undef ROCQ__ALWAYS_INLINE
#undef ROCQ__CODEC_BF16
#undef ROCQ__CODEC_F16
#undef ROCQ__CODEC_F32
#undef ROCQ__CODEC_IQ4_NL
#undef ROCQ__CODEC_IQ4_XS
#undef ROCQ__CODEC_MXFP4
#undef ROCQ__CODEC_MXFP6_E2M3
#undef ROCQ__CODEC_MXFP6_E3M2
#undef ROCQ__CODEC_Q2_K
#undef ROCQ__CODEC_Q3_K
#undef ROCQ__CODEC_Q4_0
#undef ROCQ__CODEC_Q4_1
#undef ROCQ__CODEC_Q4_K
#undef ROCQ__CODEC_Q5_0
#undef ROCQ__CODEC_Q5_1
#undef ROCQ__CODEC_Q5_K
#undef ROCQ__CODEC_Q6_K
#undef ROCQ__CODEC_Q8_0
#undef ROCQ__EITHER
#undef ROCQ__END_SIMD
#undef ROCQ__EXP_LEAST
#undef ROCQ__EXP_MOST
#undef ROCQ__FETCH
#undef ROCQ__GELU_CUBIC
#undef ROCQ__GELU_LINEAR
#undef ROCQ__GGUF_WINDOW
#undef ROCQ__HAS_AVX_VNNI
#undef ROCQ__HAS_AVX2
#undef ROCQ__HAS_HIP
#undef ROCQ__HAS_MMAP
#undef ROCQ__HAS_NEON
#undef ROCQ__HAS_OCCUPANCY
#undef ROCQ__HAS_PROFILE
#undef ROCQ__HAS_STDIO
#undef ROCQ__HAS_THREADS
#undef ROCQ__HAS_TUNER
#undef ROCQ__HAS_V8
#undef ROCQ__TRY_HIP
#undef ROCQ__HIP_LINKED
#undef ROCQ__LOCK
#undef ROCQ__MAX
#undef ROCQ__MIN
#undef ROCQ__NOINLINE
#undef ROCQ__NO_GRID
#undef ROCQ__OTHER_TYPES
#undef ROCQ__PAIR
#undef ROCQ__PREFETCH
#undef ROCQ__PRINTF
#undef ROCQ__PRINT_FIELDS
#undef ROCQ__SIMD
#undef ROCQ__TARGET_AVX2
#undef ROCQ__TARGET_AVX512
#undef ROCQ__TRY
#undef ROCQ__TURNS
#undef ROCQ__UNLOCK
#undef ROCQ__UNROLL
#undef ROCQ__V8
#undef ROCQ__WAIT
#undef ROCQ__WAKE
#undef ROCQ__WAKE_ALL
#undef ROCQ__YIELD

#endif // ROCQ_IMPLEMENTATION

/*
---------------------------------------------------------------------------------------------
>>licence
---------------------------------------------------------------------------------------------
rocq is available under two licences: choose whichever you prefer.

------------------------------------------------------------------------------
ALTERNATIVE A - MIT License

Copyright (c) 2026 The rocq authors

Permission is hereby granted, free of charge, to any person obtaining a copy of
this software and associated documentation files (the "Software"), to deal in
the Software without restriction, including without limitation the rights to
use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies
of the Software, and to permit persons to whom the Software is furnished to do
so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.

------------------------------------------------------------------------------
ALTERNATIVE B - Public Domain (www.unlicense.org)

This is free and unencumbered software released into the public domain.

Anyone is free to copy, modify, publish, use, compile, sell, or distribute this
software, either in source code form or as a compiled binary, for any purpose,
commercial or non-commercial, and by any means.

In jurisdictions that recognize copyright laws, the author or authors of this
software dedicate any and all copyright interest in the software to the public
domain. We make this dedication for the benefit of the public at large and to
the detriment of our heirs and successors. We intend this dedication to be an
overt act of relinquishment in perpetuity of all present and future rights to
this software under copyright law.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN
ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION
WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.

------------------------------------------------------------------------------
NOTICE FOR THE QUANTIZED BLOCK LAYOUTS AND CODEBOOK TABLES

The byte layouts of the GGUF block formats and the codebook tables of IQ4_NL,
IQ4_XS and MXFP4 in rocq.h follow ggml (https://github.com/ggml-org/ggml), whose
licence asks that this notice stays with them, whichever alternative you choose:

MIT License

Copyright (c) 2023-2026 The ggml authors

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
*/
