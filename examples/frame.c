// frame.c - a render loop in which a character speaks: a model's text, a slice of it in each frame,
// and a histogram of frame times.
//
//     cc -O2 examples/frame.c -o frame -lSDL2 -lm -ldl -lpthread    # with libsdl2-dev, libstb-dev
//     ./frame --hz 144 --seconds 10 --stats
//     ./frame --hz 144 --seconds 10 --stats --no-speech             # what speaking costs
//
// SDL's software renderer draws, without a display where nobody sees it. A frame draws its scene,
// lets the model go on for --budget microseconds, and waits until its picture is due. The frame
// time is what a player sees: from one picture to the next. What is said goes to stdout, everything
// else to stderr. Exit status 1, after one line that says why, on any failure.

#define ROCQ_IMPLEMENTATION
#define ROCQ_STATIC // ops that are not called are not compiled
#define PROGRAM "frame"
#include "../rocq.h"

#include "program.h"

#include "llama.h"
#include "tokenizer.h"

#include <SDL2/SDL.h>

#include <stb/stb_easy_font.h>
#define STB_IMAGE_WRITE_IMPLEMENTATION
#define STB_IMAGE_WRITE_STATIC
#include <stb/stb_image_write.h>

static const char usage[] =
    "usage: frame [options]\n"
    "    --help           print this\n"
    "    -m FILE          model (the one in examples/model)\n"
    "    --hz N           frames a second: 60, 144, 240 (60)\n"
    "    --seconds X      how long (10)\n"
    "    --budget N       microseconds of a frame for the model (1000)\n"
    "    --no-speech      the model is loaded, and says nothing\n"
    "    -n N             tokens of a text at most (256)\n"
    "    --texts N        texts to say at most, one after the other (1000)\n"
    "    --seed N         of the draw (1)\n"
    "    --threads N      CPU threads of the model (one per core)\n"
    "    --device NAME    auto, cpu or gpu (auto)\n"
    "    --kernels FILE   code object of rocq_kernels.hip ($ROCQ_KERNELS)\n"
    "    --stats          print frame times and tokens a second\n"
    "    --csv FILE       write each frame: milliseconds, of which the model's, tokens\n"
    "    --picture FILE   write the last frame as PNG\n";

// Who speaks, and about what: the model's own kind of prompt.
static const char *const prompts[] = {
    "role: blacksmith | mood: weary | topic: the broken windmill | name: Hugo\n",
    "role: innkeeper | mood: cheerful | topic: the missing ferry | name: Marna\n",
    "role: guard | mood: suspicious | topic: the old bridge | name: Bertil\n"};

enum { WIDTH = 640, HEIGHT = 360, SCALE = 2, LINES = 9, COLUMNS = 48, BINS = 60, QUADS = 4096,
       PROMPT = 256, MOST = 1 << 18 };

typedef struct frame {
    float ms, speech_ms;
    int32_t tokens;
} frame;

typedef struct game {
    const char *model_path, *kernels, *csv, *picture;
    bool help, silent, stats;
    int32_t hz, budget, n, n_threads, device, n_texts;
    float seconds;
    rocq_sample_params sample;
    rocq_ctx *ctx;
    rocq_gguf *file;
    llama_model model;
    tokenizer tok;
    SDL_Window *window;
    SDL_Renderer *renderer;
    // what is being said
    int32_t ids[PROMPT], n_ids, token, said, text; // said: tokens of this text
    int64_t done;                                  // of the prompt, or of the token
    bool drawn;                                    // token has been drawn, and is to be evaluated
    tokenizer_stream stream;
    char lines[LINES][COLUMNS + 1];
    int32_t line, column, talking; // talking: frames since the last token
    // what it took
    frame *frames;
    int32_t n_frames, bins[BINS];
    int64_t n_tokens;
} game;

// ---------------------------------------------------------------------------------------------
// Speech
// ---------------------------------------------------------------------------------------------

static void write_char(game *g, char c) {
    if (c == '\n' || g->column == COLUMNS || (c == ' ' && g->column > COLUMNS - 9)) {
        if (++g->line == LINES) { // a line up
            memmove(g->lines[0], g->lines[1], (LINES - 1) * sizeof g->lines[0]);
            g->line--;
        }
        memset(g->lines[g->line], 0, sizeof g->lines[0]);
        g->column = 0;
        if (c == '\n' || c == ' ') return;
    }
    g->lines[g->line][g->column++] = c;
}

static void say(game *g, rocq_str text) {
    fwrite(text.data, 1, (size_t)text.length, stdout);
    for (int64_t i = 0; i < text.length; i++) {
        if ((unsigned char)text.data[i] < 128) write_char(g, text.data[i]); // all that the font has
    }
}

// The prompt of the next text, which is the first thing said.
static bool next_text(game *g) {
    const char *prompt = prompts[g->text % 3];
    const rocq_str all = {prompt, (int64_t)strlen(prompt)};
    int32_t *ids = NULL;
    if (tokenizer_encode(&g->tok, &ids, all.data, all.length, true, true) != ROCQ_OK ||
        arrlen(ids) > PROMPT) {
        arrfree(ids);
        return fail("prompt", g->tok.error);
    }
    g->n_ids = (int32_t)arrlen(ids);
    memcpy(g->ids, ids, (size_t)g->n_ids * sizeof *ids);
    arrfree(ids);
    memset(&g->stream, 0, sizeof g->stream);
    memset(g->lines, 0, sizeof g->lines);
    g->model.n_past = g->said = g->line = g->column = 0;
    g->done = 0;
    g->drawn = false;
    say(g, all);
    return true;
}

// Lets the model go on until `end`: through the prompt, then token by token.
static bool speak(game *g, int64_t end) {
    for (;;) {
        const int64_t left = (end - rocq_time_ns()) / 1000;
        if (left <= 0 || g->text >= g->n_texts) return true;
        const int32_t *tokens = g->drawn ? &g->token : g->ids;
        const int64_t n = g->drawn ? 1 : g->n_ids, had = g->done;
        if (llama_eval_for(&g->model, tokens, n, (int32_t)left, &g->done) != ROCQ_OK) {
            return fail(g->model_path, g->model.error);
        }
        g->n_tokens += g->done - had;
        if (g->done < n) return true;
        if (llama_sample(&g->model, &g->sample, &g->token) != ROCQ_OK) {
            return fail(g->model_path, g->model.error);
        }
        g->done = 0;
        g->drawn = true;
        g->talking = 0;
        const bool last = ++g->said == g->n || tokenizer_is_end(&g->tok, g->token) ||
                          g->model.n_past == g->model.n_ctx;
        if (!tokenizer_is_end(&g->tok, g->token)) {
            say(g, tokenizer_next(&g->tok, &g->stream, g->token, false));
        }
        if (!last) continue;
        say(g, tokenizer_next(&g->tok, &g->stream, -1, false));
        printf("\n");
        g->text++;
        g->sample.seed++;
        if (g->text < g->n_texts && !next_text(g)) return false;
    }
}

// ---------------------------------------------------------------------------------------------
// Picture
// ---------------------------------------------------------------------------------------------

static void fill(game *g, uint32_t rgb, int x, int y, int w, int h) {
    const SDL_Rect r = {x, y, w, h};
    SDL_SetRenderDrawColor(g->renderer, (Uint8)(rgb >> 16), (Uint8)(rgb >> 8), (Uint8)rgb, 255);
    SDL_RenderFillRect(g->renderer, &r);
}

static void disc(game *g, uint32_t rgb, int x, int y, int radius) {
    for (int i = -radius; i <= radius; i++) {
        const int half = (int)sqrtf((float)(radius * radius - i * i));
        fill(g, rgb, x - half, y + i, 2 * half, 1);
    }
}

static void print(game *g, uint32_t rgb, int x, int y, int scale, char *text) {
    static struct {
        float x, y, z;
        unsigned char color[4];
    } corners[4 * QUADS];
    static SDL_Rect rects[QUADS];
    const int n = stb_easy_font_print(0, 0, text, NULL, corners, (int)sizeof corners);
    for (int i = 0; i < n; i++) {
        rects[i].x = x + scale * (int)corners[4 * i].x;
        rects[i].y = y + scale * (int)corners[4 * i].y;
        rects[i].w = scale * (int)(corners[4 * i + 2].x - corners[4 * i].x);
        rects[i].h = scale * (int)(corners[4 * i + 2].y - corners[4 * i].y);
    }
    SDL_SetRenderDrawColor(g->renderer, (Uint8)(rgb >> 16), (Uint8)(rgb >> 8), (Uint8)rgb, 255);
    SDL_RenderFillRects(g->renderer, rects, n);
}

static int bin_of(const game *g, double ms) { // of 1/40 of a period
    const int bin = (int)(ms * g->hz / 1000 * 40) - 10;
    return bin < 0 ? 0 : bin < BINS ? bin : BINS - 1;
}

static void draw(game *g, double time) {
    char text[96];
    int most = 1;
    for (int y = 0; y < HEIGHT; y += 6) { // night
        fill(g, 0x0c1430u + (uint32_t)(y / 12) * 0x010101u, 0, y, WIDTH, 6);
    }
    for (uint32_t i = 0; i < 120; i++) { // stars, which drift
        const uint32_t at = i * 2654435761u;
        const uint32_t x = ((at >> 12) + (uint32_t)(time * (4 + i % 5))) % WIDTH;
        fill(g, at >> 8 & 0x3f ? 0x8890b0 : 0xffffff, (int)x, (int)(at >> 3 & 0xff), 2, 2);
    }
    disc(g, 0xf0e8c0, 540, 60, 28);
    for (int i = 0; i < 9; i++) { // houses
        fill(g, 0x080c18, i * 74, 270 - i * 37 % 50, 66, 90);
        fill(g, i % 3 ? 0x302818 : 0xe0b050, i * 74 + 24, 290 - i * 37 % 50, 12, 14);
    }
    fill(g, 0x060810, 0, 330, WIDTH, 30);
    const int breath = (int)(2 * sin(2 * time)); // who speaks
    const bool open = g->talking < g->hz / 4 && (int)(time * 12) % 2;
    fill(g, 0x6a3a2a, 52, 286 + breath, 76, 60);
    disc(g, 0xd8a880, 90, 256 + breath, 32);
    disc(g, 0x202020, 79, 250 + breath, 4);
    disc(g, 0x202020, 101, 250 + breath, 4);
    fill(g, 0x702020, 80, 268 + breath, 20, open ? 10 : 3);
    fill(g, 0xf4f0e4, 20, 14, COLUMNS * 12 + 16, LINES * 22 + 12); // what is said
    for (int i = 0; i < 12; i++) fill(g, 0xf4f0e4, 96 + i, 14 + LINES * 22 + 12 + i, 24 - 2 * i, 1);
    for (int i = 0; i < LINES; i++) print(g, 0x282018, 30, 24 + i * 22, SCALE, g->lines[i]);
    for (int i = 0; i < BINS; i++) most = g->bins[i] > most ? g->bins[i] : most;
    fill(g, 0x0c1020, 400, 256, BINS * 4, 72); // frame times
    for (int i = 0; i < BINS; i++) { // by the root, so that a single late frame is seen
        const int h = (int)(60 * sqrt((double)g->bins[i] / most));
        fill(g, i <= bin_of(g, 1050.0 / g->hz) ? 0x60c080 : 0xe06040, 400 + i * 4, 328 - h, 3, h);
    }
    snprintf(text, sizeof text, "frame times: 0.25 to 1.75 of %.2f ms", 1000.0 / g->hz);
    print(g, 0xa0a8c0, 402, 334, 1, text);
    snprintf(text, sizeof text, "%d Hz   %.0f tokens/s", (int)g->hz,
             time > 0 ? (double)g->n_tokens / time : 0.0);
    print(g, 0xa0a8c0, 402, 345, 1, text);
}

static bool write_picture(game *g) {
    static unsigned char pixels[3 * WIDTH * HEIGHT];
    if (SDL_RenderReadPixels(g->renderer, NULL, SDL_PIXELFORMAT_RGB24, pixels, 3 * WIDTH) != 0) {
        return fail(g->picture, SDL_GetError());
    }
    return stbi_write_png(g->picture, WIDTH, HEIGHT, 3, pixels, 3 * WIDTH) ||
           fail(g->picture, "cannot be written");
}

// ---------------------------------------------------------------------------------------------
// The job
// ---------------------------------------------------------------------------------------------

static bool open_all(game *g) {
    const rocq_desc desc = {.prefer = (rocq_backend)g->device, .n_threads = g->n_threads,
                            .kernels_path = g->kernels, .slice_us = 300};
    const rocq_gguf_desc source = {.path = g->model_path};
    if (!open_device(&g->ctx, desc)) return false;
    if (rocq_gguf_open(g->ctx, &g->file, &source) != ROCQ_OK) {
        return fail(g->model_path, rocq_error(g->ctx));
    }
    if (tokenizer_open(&g->tok, g->file) != ROCQ_OK) return fail(g->model_path, g->tok.error);
    if (llama_open(&g->model, g->ctx, g->file, NULL) != ROCQ_OK ||
        llama_warm(&g->model) != ROCQ_OK) {
        return fail(g->model_path, g->model.error);
    }
#if !defined(_WIN32) && !defined(__APPLE__)
    if (!getenv("DISPLAY") && !getenv("WAYLAND_DISPLAY")) SDL_setenv("SDL_VIDEODRIVER", "dummy", 0);
#endif
    g->frames = (frame *)calloc(MOST, sizeof *g->frames);
    if (!g->frames) return fail("frames", "no memory");
    memset(g->frames, 1, MOST * sizeof *g->frames); // so that the system maps the pages now
    if (SDL_Init(SDL_INIT_VIDEO) != 0) return fail("SDL", SDL_GetError());
    g->window = SDL_CreateWindow("rocq", SDL_WINDOWPOS_CENTERED, SDL_WINDOWPOS_CENTERED, WIDTH,
                                 HEIGHT, 0);
    if (g->window) g->renderer = SDL_CreateRenderer(g->window, -1, SDL_RENDERER_SOFTWARE);
    return g->renderer || fail("SDL", SDL_GetError());
}

// Sleeps, then looks at the clock: a sleep may be half a millisecond late.
static void wait_until(int64_t ns) {
    const int64_t left = ns - rocq_time_ns();
    if (left > 2000000) SDL_Delay((Uint32)(left / 1000000 - 1));
    while (rocq_time_ns() < ns) continue;
}

static bool play(game *g) {
    const int64_t period = 1000000000 / g->hz, begin = rocq_time_ns();
    int64_t due = begin + period, last = begin;
    SDL_Event event;
    const double end = 1e9 * (double)g->seconds;
    while (!stopped && g->text < g->n_texts && (double)(last - begin) < end &&
           g->n_frames < MOST) {
        const int64_t tokens = g->n_tokens;
        while (SDL_PollEvent(&event)) stopped = stopped || event.type == SDL_QUIT ? SIGINT : 0;
        draw(g, 1e-9 * (double)(last - begin));
        const int64_t drawn = rocq_time_ns();
        if (!g->silent && !speak(g, drawn + 1000 * (int64_t)g->budget)) return false;
        const int64_t spoken = rocq_time_ns();
        wait_until(due);
        SDL_RenderPresent(g->renderer);
        const int64_t now = rocq_time_ns();
        due = due + period > now ? due + period : now; // what is missed is not made up for
        frame *f = &g->frames[g->n_frames++];
        f->ms = 1e-6f * (float)(now - last);
        f->speech_ms = 1e-6f * (float)(spoken - drawn);
        f->tokens = (int32_t)(g->n_tokens - tokens);
        g->bins[bin_of(g, (double)f->ms)]++;
        g->talking++;
        last = now;
    }
    printf("\n");
    return true;
}

static void summarize(const game *g, const char *what, bool speech) {
    double *values = (double *)malloc((size_t)g->n_frames * sizeof *values + 1);
    rocq_summary s;
    memset(&s, 0, sizeof s);
    for (int32_t i = 0; values && i < g->n_frames; i++) {
        values[i] = (double)(speech ? g->frames[i].speech_ms : g->frames[i].ms);
    }
    if (values) rocq_summarize(&s, values, g->n_frames);
    free(values);
    fprintf(stderr, "%-12s median %.3f ms, p95 %.3f, p99 %.3f, worst %.3f\n", what, s.median, s.p95,
            s.p99, s.max);
}

static bool report(game *g, int64_t n_allocs) {
    if (g->stats) {
        double time = 0;
        fflush(stdout); // the text ends before the figures begin
        for (int32_t i = 0; i < g->n_frames; i++) time += 1e-3 * (double)g->frames[i].ms;
        summarize(g, "frame", false);
        if (!g->silent) summarize(g, "slice", true);
        fprintf(stderr, "%-12s %.1f tokens/s, %d frames, budget %d us\n", "speech",
                time > 0 ? (double)g->n_tokens / time : 0.0, (int)g->n_frames, (int)g->budget);
        fprintf(stderr, "%-12s %d after set-up\n", "allocations",
                (int)(get_stats(g->ctx).n_allocs - n_allocs));
    }
    if (g->csv) {
        rocq_file *out = NULL;
        bool good = create_file(g->ctx, &out, g->csv);
        char row[96];
        snprintf(row, sizeof row, "ms,speech_ms,tokens\n");
        if (!good) return false;
        for (int32_t i = 0; good && i <= g->n_frames; i++) {
            good = rocq_file_write(row, (int64_t)strlen(row), out);
            snprintf(row, sizeof row, "%.4f,%.4f,%d\n", (double)g->frames[i].ms,
                     (double)g->frames[i].speech_ms, (int)g->frames[i].tokens);
        }
        if (!finish_file(g->ctx, &out, g->csv, good ? ROCQ_OK : ROCQ_E_IO)) return false;
    }
    return !g->picture || write_picture(g);
}

static bool run(game *g, int argc, char **argv) {
    const option table[] = {
        {"--help", FLAG, 0, 0, &g->help},
        {"-m", TEXT, 0, 0, &g->model_path},
        {"--hz", INTEGER, 1, 1000, &g->hz},
        {"--seconds", NUMBER, 0, 3600, &g->seconds},
        {"--budget", INTEGER, 0, 1e6, &g->budget},
        {"--no-speech", FLAG, 0, 0, &g->silent},
        {"-n", INTEGER, 1, 1e9, &g->n},
        {"--texts", INTEGER, 1, 1e9, &g->n_texts},
        {"--seed", SEED, 0, 9e15, &g->sample.seed},
        {"--threads", INTEGER, 1, 64, &g->n_threads},
        {"--device", DEVICE, 0, 0, &g->device},
        {"--kernels", TEXT, 0, 0, &g->kernels},
        {"--stats", FLAG, 0, 0, &g->stats},
        {"--csv", TEXT, 0, 0, &g->csv},
        {"--picture", TEXT, 0, 0, &g->picture},
    };
    if (!parse_options(table, sizeof table / sizeof table[0], argc, argv)) return false;
    if (g->help) {
        fputs(usage, stdout);
        return true;
    }
    if (!open_all(g) || (!g->silent && !next_text(g))) return false;
    const int64_t n_allocs = get_stats(g->ctx).n_allocs;
    return play(g) && report(g, n_allocs);
}

int main(int argc, char **argv) {
    static char model[1024];
    static game g; // zeroed
    g.model_path = beside_source("model/rocq-demo.gguf", model, sizeof model);
    g.kernels = getenv("ROCQ_KERNELS");
    g.hz = 60;
    g.seconds = 10;
    g.budget = 1000;
    g.n = 256;
    g.n_texts = 1000;
    g.sample.temperature = 0.8f;
    g.sample.top_k = 40;
    g.sample.top_p = 0.95f;
    g.sample.min_p = 0.05f;
    g.sample.repeat_penalty = 1;
    g.sample.seed = 1;
    catch_signals();
    const bool good = run(&g, argc, argv) && close_streams();
    tokenizer_close(&g.tok);
    llama_close(&g.model);
    rocq_gguf_close(&g.file);
    rocq_close(&g.ctx);
    if (g.renderer) SDL_DestroyRenderer(g.renderer);
    if (g.window) SDL_DestroyWindow(g.window);
    SDL_Quit();
    free(g.frames);
    return good ? 0 : 1;
}
