// hello.c - a matrix-vector product on quantized weights: how small, how close, how fast.
//
//     cc -O2 examples/hello.c -o hello -lm -ldl -lpthread && ./hello

#define ROCQ_IMPLEMENTATION
#define ROCQ_STATIC // ops that are not called are not compiled
#include "../rocq.h"
#include <math.h>
#include <stdio.h>
#include <time.h>

#if defined(__cplusplus) && defined(__GNUC__) // g++ counts fields that are left zero as forgotten
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#endif

enum { K = 2048, M = 2048, REPEATS = 50 }; // the weights: M rows of K

static float weights[M * K], input[K], exact[M], output[M];
static unsigned char blocks[M * K * sizeof(float)]; // the weights in the format at hand

static float noise(void) { // in [-1, 1)
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) * 0x1p-23f - 1.0f;
}

int main(void) {
    const rocq_format formats[] = {ROCQ_F32, ROCQ_F16, ROCQ_Q8_0, ROCQ_Q6_K, ROCQ_Q4_K, ROCQ_Q2_K};
    const int64_t w_shape[2] = {K, M}, x_shape[1] = {K}, y_shape[1] = {M};
    const rocq_desc desc = {.prefer = ROCQ_BACKEND_CPU, .n_threads = 1};
    rocq_ctx *ctx = NULL;
    rocq_tensor w, x, y;
    rocq_result result = rocq_open(&ctx, &desc);
    for (int i = 0; i < M * K; i++) weights[i] = noise();
    for (int k = 0; k < K; k++) input[k] = noise();

    printf("y = W x, W %d x %d\nformat   bits per weight   relative error   microseconds\n", M, K);
    for (int f = 0; f < 6 && result == ROCQ_OK; f++) {
        double error = 0, power = 0;
        rocq_tensor_from_host(&w, blocks, formats[f], 2, w_shape);
        rocq_tensor_from_host(&x, input, ROCQ_F32, 1, x_shape);
        rocq_tensor_from_host(&y, f ? output : exact, ROCQ_F32, 1, y_shape);
        const rocq_matmul_params product = {.y = &y, .w = &w, .x = &x};
        result = rocq_quantize(formats[f], blocks, weights, M, K, NULL);
        const clock_t start = clock();
        for (int i = 0; i < REPEATS && result == ROCQ_OK; i++) result = rocq_matmul(ctx, &product);
        const double time = (double)(clock() - start) / CLOCKS_PER_SEC / REPEATS;
        for (int m = 0; f && m < M; m++) {
            error += (output[m] - exact[m]) * (output[m] - exact[m]);
            power += exact[m] * exact[m];
        }
        const rocq_format_info *info = rocq_get_format_info(formats[f]);
        printf("%-6s %17.2f %16.5f %14.0f\n", info->name, (double)info->bits_per_weight,
               f ? sqrt(error / power) : 0, 1e6 * time);
    }
    if (ferror(stdout) || fclose(stdout) != 0) result = ROCQ_E_IO; // a full disk, a closed stdout
    if (result != ROCQ_OK) fprintf(stderr, "hello: %s\n", rocq_result_message(result));
    rocq_close(&ctx);
    return result == ROCQ_OK ? 0 : 1;
}
