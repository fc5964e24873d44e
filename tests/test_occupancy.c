// Occupancy: known values, a simulation that places workgroups, and clang's remarks on kernels of
// every size for all eight chips.
#define _POSIX_C_SOURCE 200809L // popen
#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "ops.h"

static const int32_t chips[] = {0x1100, 0x1101, 0x1102, 0x1103, 0x1150, 0x1151,
                                0x1152, 0x1153};
enum { N_CHIPS = sizeof chips / sizeof chips[0] };

static bool large_file(int32_t chip) { // 1536 VGPRs; the others have 1024
    return chip == 0x1100 || chip == 0x1101 || chip == 0x1151;
}

static rocq_occupancy occupancy(const rocq_occupancy_params *p) {
    rocq_occupancy o;
    memset(&o, 0xff, sizeof o);
    assert_int_equal(rocq_get_occupancy(p, &o), ROCQ_OK);
    return o;
}

// What compilers and hardware are known to do: waves of a SIMD by the VGPRs of a lane.
static void known_values(void **state) {
    (void)state;
    static const struct { int32_t vgprs, waves; } large[] = {
        {1, 16}, {31, 16}, {91, 16}, {96, 16}, {97, 12}, {115, 12}, {120, 12}, {121, 10}, {144, 10},
        {145, 9}, {168, 9}, {171, 8}, {192, 8}, {211, 7}, {216, 7}, {240, 6}, {241, 5}, {256, 5}},
      small[] = {
        {1, 16}, {60, 16}, {64, 16}, {65, 12}, {73, 12}, {80, 12}, {89, 10}, {96, 10}, {112, 9},
        {115, 8}, {128, 8}, {144, 7}, {145, 6}, {160, 6}, {171, 5}, {192, 5}, {211, 4}, {256, 4}};
    for (int c = 0; c < N_CHIPS; c++) {
        for (size_t i = 0; i < sizeof large / sizeof large[0]; i++) {
            const int32_t vgprs = large_file(chips[c]) ? large[i].vgprs : small[i].vgprs;
            const int32_t waves = large_file(chips[c]) ? large[i].waves : small[i].waves;
            const rocq_occupancy_params p = {.target = chips[c], .vgprs = vgprs, .threads = 32};
            const rocq_occupancy o = occupancy(&p);
            assert_int_equal(o.compiler_waves, waves);
            assert_true(o.waves == waves);
            assert_int_equal(o.groups, waves * 4);
            assert_int_equal(o.max_waves, 16);
            assert_int_equal(o.limit, waves == 16 ? ROCQ_LIMIT_NONE : ROCQ_LIMIT_VGPRS);
        }
    }

    // where what the hardware can hold is not what the compiler says, on a chip of 1536
    static const struct {
        rocq_occupancy_params p;
        rocq_occupancy o;
    } apart[] = {
        {{0x1100, 121, 0, 1024, 0, false}, {10, 8, 1, 16, ROCQ_LIMIT_VGPRS, 96}},
        {{0x1100, 32, 4100, 64, 0, false}, {16, 12.5, 25, 16, ROCQ_LIMIT_LDS, 0}},
        {{0x1100, 192, 32768, 128, 0, false}, {4, 4, 4, 16, ROCQ_LIMIT_LDS, 0}},
        {{0x1100, 192, 32768, 128, 0, true}, {4, 4, 2, 16, ROCQ_LIMIT_LDS, 0}},
        {{0x1100, 32, 0, 96, 0, false}, {16, 15.75, 21, 16, ROCQ_LIMIT_THREADS, 0}},
        {{0x1100, 32, 0, 96, 0, true}, {15, 15, 10, 16, ROCQ_LIMIT_THREADS, 0}},
        {{0x1100, 32, 70000, 256, 0, false}, {2, 0, 0, 16, ROCQ_LIMIT_LDS, 0}},
        {{0x1102, 256, 0, 1024, 0, false}, {4, 0, 0, 16, ROCQ_LIMIT_VGPRS, 128}},
        // waves of 64 lanes: two of each register, half the waves
        {{0x1100, 96, 0, 64, 64, false}, {8, 8, 32, 16, ROCQ_LIMIT_VGPRS, 84}},
        {{0x1100, 48, 0, 64, 64, false}, {16, 16, 64, 16, ROCQ_LIMIT_NONE, 0}},
        {{0x1102, 200, 0, 256, 64, false}, {2, 2, 2, 16, ROCQ_LIMIT_VGPRS, 168}}};
    for (size_t i = 0; i < sizeof apart / sizeof apart[0]; i++) {
        const rocq_occupancy o = occupancy(&apart[i].p), *want = &apart[i].o;
        if (o.compiler_waves != want->compiler_waves || o.waves != want->waves ||
            o.groups != want->groups || o.max_waves != want->max_waves || o.limit != want->limit ||
            o.next_vgprs != want->next_vgprs) {
            fail_msg("case %d: %d waves, %g, %d groups, limit %d, next %d", (int)i,
                     (int)o.compiler_waves, o.waves, (int)o.groups, (int)o.limit,
                     (int)o.next_vgprs);
        }
    }
}

static void bad_arguments(void **state) {
    (void)state;
    const rocq_occupancy_params good = {.target = 0x1100, .vgprs = 64, .threads = 256};
    rocq_occupancy_params bad[15];
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) bad[i] = good;
    bad[0].target = 0;
    bad[1].target = 0x1200;
    bad[2].target = -1;
    bad[3].vgprs = 0;
    bad[4].vgprs = -1;
    bad[5].vgprs = 257;
    bad[6].vgprs = INT32_MAX;
    bad[7].lds_bytes = -1;
    bad[8].lds_bytes = INT32_MIN;
    bad[9].threads = 0;
    bad[10].threads = 1025;
    bad[11].threads = INT32_MIN;
    bad[12].wave = 16;
    bad[13].wave = -32;
    bad[14].wave = 128;
    rocq_occupancy o, untouched;
    memset(&o, 0xa5, sizeof o);
    untouched = o;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(rocq_get_occupancy(&bad[i], &o), ROCQ_E_ARGUMENT);
        if (bad[i].threads == good.threads) {
            assert_int_equal(rocq_recommend_threads(&bad[i], 0.0, NULL, 0), 0);
        }
    }
    assert_int_equal(rocq_get_occupancy(NULL, &o), ROCQ_E_ARGUMENT);
    assert_int_equal(rocq_get_occupancy(&good, NULL), ROCQ_E_ARGUMENT);
    assert_memory_equal(&o, &untouched, sizeof o);

    const rocq_occupancy_params huge = {0x1100, 256, INT32_MAX, 1024, 64, false};
    assert_int_equal(occupancy(&huge).groups, 0);
    assert_int_equal(rocq_recommend_threads(NULL, 0.0, NULL, 0), 0);
    assert_int_equal(rocq_recommend_threads(&good, -1.0, NULL, 0), 0);
    assert_int_equal(rocq_recommend_threads(&good, (double)NAN, NULL, 0), 0);
    assert_int_equal(rocq_recommend_threads(&good, (double)INFINITY, NULL, 0), 0);
}

// Anything a kernel can be, half of the time at or beside a limit.
static int32_t around(int32_t low, int32_t high, int32_t step) {
    int64_t x = low + random_below(high - low + 1);
    if (random_below(2)) x = (x + step / 2) / step * step + random_below(3) - 1;
    return (int32_t)(x < low ? low : x > high ? high : x);
}

static rocq_occupancy_params random_params(int32_t chip) {
    rocq_occupancy_params p;
    p.target = chip;
    p.vgprs = around(1, 256, large_file(chip) ? 24 : 16);
    p.threads = around(1, random_below(2) ? 1024 : 128, 32);
    p.lds_bytes = random_below(3) ? around(0, random_below(2) ? 65536 : 8192, 1024) : 0;
    p.wave = random_below(2) ? 64 : 32;
    p.cu_mode = random_below(2) != 0;
    return p;
}

// Workgroups placed one after the other, wave by wave where most registers are free.
static int32_t placed(const rocq_occupancy_params *p) {
    const int32_t n_simds = p->cu_mode ? 2 : 4, size = (p->threads + p->wave - 1) / p->wave;
    const int32_t bytes = large_file(p->target) ? 1536 * 128 : 1024 * 128; // of a SIMD's file
    const int32_t granule = bytes / 64;
    int32_t need = 0, lds = 0, n;
    while (need < p->vgprs * 4 * p->wave) need += granule;
    while (lds < p->lds_bytes) lds += 1024;
    int32_t free_bytes[4], slots[4], pool = p->cu_mode ? 65536 : 131072;
    int32_t barriers = p->cu_mode ? 16 : 32;
    for (int i = 0; i < n_simds; i++) {
        free_bytes[i] = bytes;
        slots[i] = 16;
    }
    for (n = 0;; n++) {
        if (lds > pool || (size > 1 && barriers == 0)) return n;
        for (int w = 0; w < size; w++) {
            int best = -1;
            for (int i = 0; i < n_simds; i++) {
                if (slots[i] == 0 || free_bytes[i] < need) continue;
                if (best < 0 || free_bytes[i] > free_bytes[best]) best = i;
            }
            if (best < 0) return n;
            slots[best]--;
            free_bytes[best] -= need;
        }
        pool -= lds;
        barriers -= size > 1;
    }
}

static void hardware_is_what_can_be_placed(void **state) {
    (void)state;
    for (int i = 0; i < 60000; i++) {
        const rocq_occupancy_params p = random_params(chips[i % N_CHIPS]);
        const rocq_occupancy o = occupancy(&p);
        const int32_t n = placed(&p), size = (p.threads + p.wave - 1) / p.wave;
        if (o.groups != n || o.waves != (double)(n * size) / (p.cu_mode ? 2 : 4)) {
            fail_msg("gfx%x, %d VGPRs, %d bytes of LDS, %d threads in waves of %d, %s mode: %d "
                     "groups, %g waves, placed %d", (unsigned)p.target, (int)p.vgprs,
                     (int)p.lds_bytes, (int)p.threads, (int)p.wave, p.cu_mode ? "CU" : "WGP",
                     (int)o.groups, o.waves, (int)n);
        }
    }
}

// More of anything never fits more often, and what limits is what it is said to be.
static void properties(void **state) {
    (void)state;
    for (int i = 0; i < 6000; i++) {
        const rocq_occupancy_params p = random_params(chips[i % N_CHIPS]);
        const rocq_occupancy o = occupancy(&p);
        rocq_occupancy_params q = p;
        assert_true(o.waves <= o.compiler_waves && o.compiler_waves >= 1 && o.compiler_waves <= 16);
        for (q.vgprs = p.vgprs; q.vgprs <= 256; q.vgprs += 7) {
            const rocq_occupancy more = occupancy(&q);
            assert_true(more.waves <= o.waves && more.compiler_waves <= o.compiler_waves);
        }
        q = p;
        for (q.lds_bytes = p.lds_bytes; q.lds_bytes <= 70000; q.lds_bytes += 997) {
            const rocq_occupancy more = occupancy(&q);
            assert_true(more.waves <= o.waves && more.compiler_waves <= o.compiler_waves);
        }
        q = p;
        if (o.next_vgprs > 0) {
            q.vgprs = o.next_vgprs;
            assert_true(q.vgprs < p.vgprs && occupancy(&q).groups > o.groups);
            q.vgprs++;
            assert_int_equal(occupancy(&q).groups, o.groups);
        } else {
            q.vgprs = 1;
            assert_int_equal(occupancy(&q).groups, o.groups);
        }
        assert_int_equal(o.limit == ROCQ_LIMIT_NONE, o.waves == 16.0);
        assert_int_equal(o.limit == ROCQ_LIMIT_VGPRS, o.next_vgprs > 0);
        if (o.limit == ROCQ_LIMIT_LDS) assert_true(p.lds_bytes > 0);
        if (o.limit == ROCQ_LIMIT_THREADS) {
            q.vgprs = 1;
            q.lds_bytes = 0;
            assert_int_equal(occupancy(&q).groups, o.groups);
        }
    }
}

// Every size that is recommended reaches over half of the waves, every other size does not.
static void recommendations(void **state) {
    (void)state;
    int most = 0;
    for (int i = 0; i < 3000; i++) {
        rocq_occupancy_params p = random_params(chips[i % N_CHIPS]);
        if (i % 2) p.lds_bytes = 0;
        const double each = i % 3 ? 0.0 : random_in(0.0f, 40.0f);
        const int32_t fixed = p.lds_bytes;
        int32_t threads[33], n_good = 0;
        memset(threads, 0xff, sizeof threads);
        const int32_t n = rocq_recommend_threads(&p, each, threads, 32);
        assert_int_equal(rocq_recommend_threads(&p, each, NULL, 0), n);
        if (n > most) most = n;
        double previous = 17.0;
        for (int32_t j = 0; j < n; j++) {
            p.threads = threads[j];
            p.lds_bytes = (int32_t)ceil(fixed + each * threads[j]);
            const double waves = occupancy(&p).waves;
            assert_true(threads[j] % p.wave == 0 && waves > 8.0 && waves <= previous);
            if (waves == previous) assert_true(threads[j] > threads[j - 1]);
            previous = waves;
        }
        for (p.threads = p.wave; p.threads <= 1024; p.threads += p.wave) {
            p.lds_bytes = (int32_t)ceil(fixed + each * p.threads);
            n_good += occupancy(&p).waves > 8.0;
        }
        assert_int_equal(n_good, n);
        for (int32_t j = n; j < 33; j++) assert_int_equal(threads[j], -1);

        int32_t first[3] = {-1, -1, -1}; // no more are written than there is room for
        rocq_occupancy_params again = p;
        again.lds_bytes = fixed;
        assert_int_equal(rocq_recommend_threads(&again, each, first, 2), n);
        assert_int_equal(first[2], -1);
        for (int32_t j = 0; j < 2 && j < n; j++) assert_int_equal(first[j], threads[j]);
    }
    assert_true(most == 32);
}

// -- clang --

enum { KERNELS = 100 }; // a compilation; 24 of them

static const char folder_of_source[] = "/tmp/rocq_occupancy_XXXXXX";

// Compiles kernels that use what params say, and has `waves` be clang's remarks.
static void remarks(const rocq_occupancy_params *params, int32_t *waves) {
    char path[sizeof folder_of_source], command[512], line[512];
    memcpy(path, folder_of_source, sizeof path);
    const int handle = mkstemp(path);
    assert_true(handle >= 0);
    FILE *source = fdopen(handle, "w");
    assert_non_null(source);
    for (int i = 0; i < KERNELS; i++) {
        const rocq_occupancy_params *p = &params[i];
        fprintf(source,
                "__attribute__((amdgpu_flat_work_group_size(%d, %d)))\nkernel void k%d() {\n",
                (int)p->threads, (int)p->threads, i);
        if (p->lds_bytes > 0) {
            fprintf(source, "local char lds[%d]; __asm__ volatile(\"\" :: \"v\"(lds));\n",
                    (int)p->lds_bytes);
        }
        fprintf(source, "__asm__ volatile(\"\" ::: \"v%d\"); }\n", (int)p->vgprs - 1);
    }
    assert_int_equal(fclose(source), 0);
    snprintf(command, sizeof command,
             "clang-22 --target=amdgcn-amd-amdhsa -mcpu=gfx%x -nogpulib -O1 %s %s -x cl -S "
             "-Rpass-analysis=kernel-resource-usage -o /dev/null %s 2>&1", (unsigned)params->target,
             params->wave == 64 ? "-mwavefrontsize64" : "", params->cu_mode ? "-mcumode" : "",
             path);
    FILE *said = popen(command, "r");
    assert_non_null(said);
    int kernel = -1, vgprs = -1, lds = -1, found = -1;
    while (fgets(line, (int)sizeof line, said)) {
        const char *remark = strstr(line, "remark: ");
        if (strstr(line, "error: ")) fail_msg("%s", line);
        if (!remark) continue;
        sscanf(remark, "remark: Function Name: k%d", &kernel);
        sscanf(remark, "remark: VGPRs: %d", &vgprs);
        sscanf(remark, "remark: Occupancy [waves/SIMD]: %d", &found);
        if (sscanf(remark, "remark: LDS Size [bytes/block]: %d", &lds) != 1) continue;
        assert_in_range(kernel, 0, KERNELS - 1); // the last line of a kernel
        assert_int_equal(vgprs, params[kernel].vgprs);
        assert_int_equal(lds, params[kernel].lds_bytes);
        waves[kernel] = found;
    }
    assert_int_equal(pclose(said), 0);
    assert_int_equal(remove(path), 0);
}

static void clang_says_the_same_of_3200_kernels(void **state) {
    (void)state;
    if (system("clang-22 --version >/dev/null 2>&1") != 0) skip();
    int n = 0;
    for (int run = 0; run < 4 * N_CHIPS; run++) {
        rocq_occupancy_params p[KERNELS];
        int32_t waves[KERNELS];
        for (int i = 0; i < KERNELS; i++) {
            p[i] = random_params(chips[run / 4]);
            p[i].wave = run & 1 ? 64 : 32;
            p[i].cu_mode = (run & 2) != 0;
            waves[i] = -1;
        }
        remarks(p, waves);
        for (int i = 0; i < KERNELS; i++, n++) {
            const rocq_occupancy o = occupancy(&p[i]);
            if (o.compiler_waves == waves[i]) continue;
            fail_msg("gfx%x, %d VGPRs, %d bytes of LDS, %d threads in waves of %d, %s mode: %d, "
                     "clang says %d", (unsigned)p[i].target, (int)p[i].vgprs, (int)p[i].lds_bytes,
                     (int)p[i].threads, (int)p[i].wave, p[i].cu_mode ? "CU" : "WGP",
                     (int)o.compiler_waves, (int)waves[i]);
        }
    }
    assert_int_equal(n, 3200);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_values),
        cmocka_unit_test(bad_arguments),
        cmocka_unit_test(hardware_is_what_can_be_placed),
        cmocka_unit_test(properties),
        cmocka_unit_test(recommendations),
        cmocka_unit_test(clang_says_the_same_of_3200_kernels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
