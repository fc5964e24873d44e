// Whole models: examples/llama.h against llama.cpp. Random-weight models of every family, in every
// kind of format, are written by models.h and read by both; logits must agree at every position of a
// prompt and of a generated run, and so must every token of that run.

#define _POSIX_C_SOURCE 200809L // setenv, mkdir

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define ROCQ_IMPLEMENTATION
#include "../rocq.h"

#include "../examples/llama.h"

#include "llama_cpp.h"
#include "models.h"

enum { N_PROMPT = 61, N_GREEDY = 12, N_CTX = 128 };

#define DEMO "examples/model/rocq-demo.gguf"

static const rocq_format f32[] = {ROCQ_F32, ROCQ_I32}, f16[] = {ROCQ_F16, ROCQ_I32},
    q8_0[] = {ROCQ_Q8_0, ROCQ_I32}, q4_0[] = {ROCQ_Q4_0, ROCQ_I32}, q6_K[] = {ROCQ_Q6_K, ROCQ_I32},
    // embedding and ffn_down in Q6_K, attn_v too, the rest in Q4_K
    q4_K[] = {ROCQ_Q6_K, ROCQ_Q4_K, ROCQ_Q4_K, ROCQ_Q6_K, ROCQ_Q4_K, ROCQ_Q4_K, ROCQ_Q4_K, ROCQ_I32},
    others[] = {ROCQ_Q5_K, ROCQ_Q2_K, ROCQ_Q3_K, ROCQ_Q5_0, ROCQ_IQ4_NL, ROCQ_IQ4_XS, ROCQ_MXFP4,
                ROCQ_Q4_1, ROCQ_Q5_1, ROCQ_BF16, ROCQ_F16, ROCQ_I32};

#define SIZES(embd, heads, kv_heads, dim, ff, vocab)                                            \
    .n_embd = embd, .n_heads = heads, .n_kv_heads = kv_heads, .head_dim = dim, .n_ff = ff,      \
    .n_vocab = vocab
#define GEMMA .n_layers = 3, .tied = true, .window = 16, .attention_cap = 1, .final_cap = 30

static const model_spec specs[] = {
    {"llama-F32", "llama", SIZES(256, 4, 4, 64, 256, 517), .formats = f32},
    {"llama-F16", "llama", SIZES(256, 8, 4, 32, 320, 771), .formats = f16, .tied = true},
    {"llama-Q8_0", "llama", SIZES(224, 7, 1, 32, 320, 301), .formats = q8_0},
    {"llama-Q4_0", "llama", SIZES(256, 8, 2, 32, 256, 513), .formats = q4_0, .tied = true},
    {"llama-Q4_K", "llama", SIZES(256, 8, 4, 64, 512, 1021), .formats = q4_K},
    {"llama-Q6_K", "llama", SIZES(256, 7, 1, 64, 256, 601), .formats = q6_K, .tied = true},
    {"llama-others", "llama", SIZES(256, 8, 2, 32, 512, 555), .formats = others},
    {"llama-factors", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = f32,
     .rope_base = 5e5f, .rope_freqs = true},
    {"llama-linear", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = f32,
     .rope_scaling = "linear", .rope_factor = 4},
    {"llama-yarn", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = f32,
     .rope_scaling = "yarn", .rope_factor = 4, .n_ctx_orig = 32},
    {"llama-yarn-Q8_0", "llama", SIZES(256, 2, 1, 128, 256, 517), .formats = q8_0,
     .rope_base = 1e6f, .rope_scaling = "yarn", .rope_factor = 8, .n_ctx_orig = 64,
     .rope_attention = 0.9f},
    {"llama-unscaled", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = f32,
     .rope_scaling = "none", .rope_factor = 4},
    {"llama-biases", "llama", SIZES(256, 4, 2, 64, 256, 517), .formats = f32, .biases = true},

    {"mistral-F32", "llama", SIZES(256, 8, 2, 64, 256, 769), .formats = f32, .rope_base = 1e6f},
    {"mistral-F16", "llama", SIZES(256, 8, 2, 64, 256, 769), .formats = f16, .rope_base = 1e6f},
    {"mistral-Q8_0", "llama", SIZES(256, 8, 2, 64, 288, 769), .formats = q8_0, .rope_base = 1e6f},
    {"mistral-Q4_0", "llama", SIZES(256, 8, 2, 64, 288, 769), .formats = q4_0, .rope_base = 1e6f},
    {"mistral-Q4_K", "llama", SIZES(256, 4, 1, 64, 512, 769), .formats = q4_K, .rope_base = 1e6f},
    {"mistral-Q6_K", "llama", SIZES(256, 8, 2, 64, 256, 769), .formats = q6_K, .rope_base = 1e6f},

    {"qwen2-F32", "qwen2", SIZES(224, 7, 1, 32, 320, 533), .formats = f32, .rope_base = 1e6f},
    {"qwen2-F16", "qwen2", SIZES(256, 4, 4, 64, 256, 401), .formats = f16, .tied = true},
    {"qwen2-Q8_0", "qwen2", SIZES(448, 14, 2, 32, 352, 707), .formats = q8_0, .tied = true},
    {"qwen2-Q4_0", "qwen2", SIZES(256, 8, 4, 32, 256, 909), .formats = q4_0, .rope_base = 1e6f},
    {"qwen2-Q4_K", "qwen2", SIZES(256, 4, 1, 64, 512, 611), .formats = q4_K, .rope_base = 1e6f},
    {"qwen2-Q6_K", "qwen2", SIZES(448, 14, 2, 32, 256, 499), .formats = q6_K, .tied = true},

    {"qwen3-F32", "qwen3", SIZES(256, 4, 2, 128, 320, 533), .formats = f32, .rope_base = 1e6f},
    {"qwen3-F16", "qwen3", SIZES(256, 4, 4, 64, 256, 401), .formats = f16, .tied = true},
    {"qwen3-Q8_0", "qwen3", SIZES(256, 7, 1, 64, 352, 707), .formats = q8_0, .tied = true},
    {"qwen3-Q4_0", "qwen3", SIZES(256, 8, 2, 64, 256, 909), .formats = q4_0, .rope_base = 1e6f},
    {"qwen3-Q4_K", "qwen3", SIZES(256, 4, 2, 128, 512, 611), .formats = q4_K, .tied = true},
    {"qwen3-Q6_K", "qwen3", SIZES(256, 8, 2, 128, 256, 499), .formats = q6_K, .rope_base = 1e6f},

    {"gemma2-F32", "gemma2", SIZES(256, 4, 2, 64, 256, 517), .formats = f32, GEMMA},
    {"gemma2-F16", "gemma2", SIZES(256, 4, 4, 64, 320, 733), .formats = f16, GEMMA},
    {"gemma2-Q8_0", "gemma2", SIZES(256, 8, 2, 64, 320, 419), .formats = q8_0, GEMMA},
    {"gemma2-Q4_0", "gemma2", SIZES(256, 4, 2, 32, 256, 517), .formats = q4_0, GEMMA},
    {"gemma2-Q4_K", "gemma2", SIZES(256, 8, 4, 64, 256, 651), .formats = q4_K, GEMMA},
    {"gemma2-Q6_K", "gemma2", SIZES(256, 7, 1, 64, 256, 517), .formats = q6_K, GEMMA},
    // The 27B model is known by its 46 layers and scales scores differently.
    {"gemma2-46-layers", "gemma2", SIZES(64, 2, 1, 64, 64, 301), .formats = f32, .n_layers = 46,
     .tied = true, .window = 16, .attention_cap = 1, .final_cap = 30},
};

enum { N_SPECS = sizeof specs / sizeof *specs };

static double nmse(const float *x, const float *reference, int32_t n) {
    double error = 0, power = 0;
    for (int32_t i = 0; i < n; i++) {
        error += ((double)x[i] - reference[i]) * ((double)x[i] - reference[i]);
        power += (double)reference[i] * reference[i];
    }
    return error / power;
}

static int32_t best_of(const float *x, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

// How far the best leads the second, in units of the values' root mean square.
static double lead_of(const float *x, int32_t n) {
    int32_t best = best_of(x, n);
    double second = -1e30, power = 0;
    for (int32_t i = 0; i < n; i++) {
        if (i != best && x[i] > second) second = x[i];
        power += (double)x[i] * x[i];
    }
    return (x[best] - second) / sqrt(power / n);
}

// A lead that no two results can disagree about while both are within the tolerance of llama.cpp's:
// five standard errors.
static double clear_lead(double tolerance) { return 5 * sqrt(tolerance); }

static float *floats(int64_t n) {
    float *p = (float *)malloc((size_t)n * sizeof *p);
    assert_non_null(p);
    for (int64_t i = 0; i < n; i++) p[i] = NAN;
    return p;
}

typedef struct ours {
    rocq_ctx *ctx;
    rocq_gguf *file;
    llama_model m;
} ours;

static void ours_open(ours *o, const char *path, int32_t n_threads, const llama_options *options) {
    rocq_desc desc = {.prefer = ROCQ_CPU, .n_threads = n_threads};
    rocq_gguf_desc from = {.path = path};
    memset(o, 0, sizeof *o);
    assert_int_equal(rocq_open(&o->ctx, &desc), ROCQ_OK);
    if (rocq_gguf_open(o->ctx, &o->file, &from) != ROCQ_OK) fail_msg("%s", rocq_error(o->ctx));
    if (llama_open(&o->m, o->ctx, o->file, options) != ROCQ_OK) fail_msg("%s", o->m.error);
}

static void ours_close(ours *o) {
    llama_close(&o->m);
    rocq_gguf_close(&o->file);
    rocq_close(&o->ctx);
}

static void ours_eval(ours *o, const int32_t *tokens, int32_t n, float *logits) {
    if (llama_eval(&o->m, tokens, n, logits) != ROCQ_OK) fail_msg("%s", o->m.error);
}

static int32_t ours_best(ours *o) {
    rocq_sample_params greedy = {.temperature = 0};
    int32_t token = -1;
    if (llama_sample(&o->m, &greedy, &token) != ROCQ_OK) fail_msg("%s", o->m.error);
    return token;
}

static void random_prompt(int32_t *tokens, int32_t n_vocab, uint64_t seed) {
    model_random r = {seed};
    for (int32_t i = 0; i < N_PROMPT; i++)
        tokens[i] = (int32_t)(model_u64(&r) % (uint64_t)n_vocab);
}

// llama.cpp's greedy run: logits of the prompt and of every token of the run, and the run's tokens.
// Prompts are tried until each token leads clearly and the run is no mere repetition, which random
// weights do not always grant.
static void peer_run(const char *path, int32_t kv_type, double lead, int32_t *prompt, float *logits,
                     int32_t *run, int32_t *n_vocab) {
    bool fine = false;
    peer_model p;
    peer_load(&p, path, N_CTX, kv_type);
    *n_vocab = p.n_vocab;
    for (uint64_t seed = 1; seed <= 1000 && !fine; seed++) {
        peer_forget(&p);
        random_prompt(prompt, p.n_vocab, seed);
        peer_decode(&p, prompt, N_PROMPT, logits);
        fine = true;
        int32_t n_distinct = 0;
        for (int32_t i = 0; i < N_GREEDY && fine; i++) {
            const float *last = logits + (int64_t)(N_PROMPT - 1 + i) * p.n_vocab;
            fine = lead_of(last, p.n_vocab) > lead;
            run[i] = best_of(last, p.n_vocab);
            bool seen = false;
            for (int32_t k = 0; k < i; k++) seen = seen || run[k] == run[i];
            n_distinct += !seen;
            peer_decode(&p, &run[i], 1, logits + (int64_t)(N_PROMPT + i) * p.n_vocab);
        }
        fine = fine && n_distinct >= 4;
    }
    peer_close(&p);
    if (!fine) fail_msg("no prompt gives llama.cpp a run without near-ties");
}

static void write_model(const model_spec *s, model_quantize_fn quantize) {
    rocq_ctx *ctx = NULL;
    assert_int_equal(rocq_open(&ctx, NULL), ROCQ_OK);
    model_write(ctx, s, model_path(s->name), quantize);
    rocq_close(&ctx);
}

// One model in both programs, with a KV cache of one format.
static void compare(const model_spec *s, const char *kv_format, int32_t kv_type, double tolerance) {
    int32_t prompt[N_PROMPT], run[N_GREEDY], n_vocab = 0;
    int64_t n = (int64_t)(N_PROMPT + N_GREEDY) * s->n_vocab;
    float *expected = floats(n), *logits = floats(n);
    double worst = 0;
    write_model(s, peer.quantize);
    peer_run(model_path(s->name), kv_type, clear_lead(tolerance), prompt, expected, run, &n_vocab);
    assert_int_equal(n_vocab, s->n_vocab);

    // A batch that the prompt is no multiple of, so that batches and the cache meet.
    ours o;
    llama_options options = {.n_ctx = N_CTX, .n_batch = 16, .n_logits = 5, .kv_format = kv_format};
    ours_open(&o, model_path(s->name), 2, &options);
    assert_int_equal(o.m.n_vocab, n_vocab);
    ours_eval(&o, prompt, N_PROMPT, logits);
    for (int32_t i = 0; i < N_GREEDY; i++) {
        int32_t token = ours_best(&o);
        if (token != run[i]) fail_msg("token %d of the run is %d, not %d", i, token, run[i]);
        ours_eval(&o, &token, 1, logits + (int64_t)(N_PROMPT + i) * n_vocab);
    }
    for (int32_t i = 0; i < N_PROMPT + N_GREEDY; i++) {
        double e = nmse(logits + (int64_t)i * n_vocab, expected + (int64_t)i * n_vocab, n_vocab);
        if (!(e <= tolerance)) fail_msg("position %d: NMSE %g", i, e);
        if (e > worst) worst = e;
    }
    printf("# %s, KV in %s: NMSE at most %.2g\n", s->name, kv_format, worst);
    ours_close(&o);
    free(logits);
    free(expected);
}

static void test_model(void **state) {
    const model_spec *s = (const model_spec *)*state;
    if (!peer_open()) skip();
    bool exact = s->formats[0] == ROCQ_F32;
    compare(s, exact ? "f32" : "f16", exact ? 0 : 1, exact || s->formats[0] == ROCQ_F16 ? 1e-5 : 1e-3);
}

typedef struct cache {
    const char *name, *format;
    int32_t type;     // ggml's
    double tolerance; // llama.cpp rounds queries to the format of the keys
    model_spec spec;
} cache;

static const cache caches[] = {
    {"cache in F16", "f16", 1, 1e-5,
     {"cache-F16", "llama", SIZES(256, 8, 4, 32, 256, 517), .formats = f32}},
    {"cache in BF16", "bf16", 30, 1e-4,
     {"cache-BF16", "qwen3", SIZES(256, 8, 4, 64, 256, 517), .formats = f32}},
    {"cache in Q8_0", "q8_0", 8, 1e-4,
     {"cache-Q8_0", "llama", SIZES(256, 8, 2, 32, 256, 517), .formats = f32}},
    {"cache in Q4_0", "q4_0", 2, 1e-3,
     {"cache-Q4_0", "gemma2", SIZES(256, 4, 2, 64, 256, 517), .formats = f32, GEMMA}},
};

enum { N_CACHES = sizeof caches / sizeof *caches };

static void test_cache(void **state) {
    const cache *c = (const cache *)*state;
    if (!peer_open()) skip();
    compare(&c->spec, c->format, c->type, c->tolerance);
}

// Without llama.cpp: a prompt gives the same logits in one batch, in several, token by token, and
// after the cache was wound back; and a call that fails changes nothing.
static void test_batches(void **state) {
    model_spec s = *(const model_spec *)*state;
    char name[64];
    snprintf(name, sizeof name, "batches-%s", s.name);
    s.name = name;
    write_model(&s, NULL);
    const char *path = model_path(name);
    int32_t prompt[N_PROMPT];
    int64_t n = (int64_t)N_PROMPT * s.n_vocab;
    float *whole = floats(n), *other = floats(n), *last = floats(s.n_vocab);
    random_prompt(prompt, s.n_vocab, 5);

    ours o;
    llama_options options = {.n_ctx = N_PROMPT, .n_batch = N_PROMPT, .n_logits = N_PROMPT,
                             .kv_format = "f32"};
    ours_open(&o, path, 1, &options);
    ours_eval(&o, prompt, N_PROMPT, whole);
    ours_close(&o);

    // The number of threads changes no bit.
    ours_open(&o, path, 3, &options);
    ours_eval(&o, prompt, N_PROMPT, other);
    assert_memory_equal(whole, other, (size_t)n * sizeof *whole);
    ours_close(&o);

    options.n_batch = 7;
    options.n_logits = 3;
    ours_open(&o, path, 2, &options);
    ours_eval(&o, prompt, N_PROMPT, other);
    for (int32_t i = 0; i < N_PROMPT; i++)
        assert_true(nmse(other + (int64_t)i * s.n_vocab, whole + (int64_t)i * s.n_vocab, s.n_vocab) < 1e-10);

    // Full: one more token must fail, and so must a token that is none, and leave all as it was.
    assert_int_equal(o.m.n_past, N_PROMPT);
    assert_int_equal(llama_eval(&o.m, prompt, 1, NULL), ROCQ_E_BOUNDS);
    assert_true(strlen(o.m.error) > 0);
    o.m.n_past = 20;
    int32_t bad[2] = {3, s.n_vocab};
    assert_int_equal(llama_eval(&o.m, bad, 2, other), ROCQ_E_BOUNDS);
    bad[1] = -1;
    assert_int_equal(llama_eval(&o.m, bad, 2, other), ROCQ_E_BOUNDS);
    assert_int_equal(o.m.n_past, 20);

    // From position 20 again, one by one.
    for (int32_t i = 20; i < N_PROMPT; i++) {
        ours_eval(&o, &prompt[i], 1, last);
        assert_true(nmse(last, whole + (int64_t)i * s.n_vocab, s.n_vocab) < 1e-10);
        assert_int_equal(ours_best(&o), best_of(last, s.n_vocab));
    }
    ours_close(&o);
    free(last);
    free(other);
    free(whole);
}


static double kl(const float*a,const float*b,int n){ double ma=-1e30,mb=-1e30,sa=0,sb=0,k=0; for(int i=0;i<n;i++){if(a[i]>ma)ma=a[i]; if(b[i]>mb)mb=b[i];} for(int i=0;i<n;i++){sa+=exp(a[i]-ma);sb+=exp(b[i]-mb);} for(int i=0;i<n;i++){double pa=exp(a[i]-ma)/sa,pb=exp(b[i]-mb)/sb; k+=pb*log(pb/(pa+1e-30)+1e-30);} return k;}
static double cnmse(const float*x,const float*r,int n){double mx=0,mr=0,e=0,p=0; for(int i=0;i<n;i++){mx+=x[i];mr+=r[i];} mx/=n;mr/=n; for(int i=0;i<n;i++){double d=(x[i]-mx)-(r[i]-mr); e+=d*d;p+=(r[i]-mr)*(r[i]-mr);} return e/p;}
static double pnmse(const float*a,const float*b,int n){ double ma=-1e30,mb=-1e30,sa=0,sb=0,e=0,p=0; for(int i=0;i<n;i++){if(a[i]>ma)ma=a[i]; if(b[i]>mb)mb=b[i];} for(int i=0;i<n;i++){sa+=exp(a[i]-ma);sb+=exp(b[i]-mb);} for(int i=0;i<n;i++){double pa=exp(a[i]-ma)/sa,pb=exp(b[i]-mb)/sb; e+=(pa-pb)*(pa-pb);p+=pb*pb;} return e/p;}
static void t(void**st){(void)st; assert_true(peer_open());
 FILE*f=fopen("examples/model/heldout.txt","r"); static char text[3000]; size_t len=fread(text,1,700,f); fclose(f);
 peer_model p; int32_t tok[1000]; peer_load(&p,DEMO,512,1); int n=peer.llama_tokenize(p.vocab,text,(int)len,tok,1000,true,true); printf("%d tokens\n",n);
 int V=p.n_vocab; float*L[6]; const char*names[]={"exact: llama.cpp f32","llama.cpp","rocq f32 file","rocq"}; for(int i=0;i<6;i++)L[i]=floats((int64_t)n*V);
 peer_decode(&p,tok,n,L[1]); peer_close(&p);
 peer_load(&p,"/tmp/wt/demo-f32.gguf",512,0); peer_decode(&p,tok,n,L[0]); peer_close(&p);
 llama_options o32={.n_ctx=512,.kv_format="f32"},o16={.n_ctx=512};
 ours o; ours_open(&o,"/tmp/wt/demo-f32.gguf",2,&o32); ours_eval(&o,tok,n,L[2]); ours_close(&o);
 ours_open(&o,DEMO,2,&o16); ours_eval(&o,tok,n,L[3]); ours_close(&o);
 for(int k=1;k<4;k++){ double s=0,m=0,c=0,q=0,kk=0,pn=0,pm=0; for(int i=0;i<n;i++){double e=nmse(L[k]+(int64_t)i*V,L[0]+(int64_t)i*V,V); s+=e; if(e>m)m=e; e=cnmse(L[k]+(int64_t)i*V,L[0]+(int64_t)i*V,V); c+=e; if(e>q)q=e; kk+=kl(L[k]+(int64_t)i*V,L[0]+(int64_t)i*V,V); e=pnmse(L[k]+(int64_t)i*V,L[0]+(int64_t)i*V,V); pn+=e; if(e>pm)pm=e;} printf("%-22s NMSE mean %.2g max %.2g  centred mean %.2g max %.2g KL mean %.2g prob NMSE mean %.2g max %.2g\n",names[k],s/n,m,c/n,q,kk/n,pn/n,pm); }
 double s=0,m=0,pn=0,pm=0; for(int i=0;i<n;i++){double e=nmse(L[3]+(int64_t)i*V,L[1]+(int64_t)i*V,V); s+=e; if(e>m)m=e; e=pnmse(L[3]+(int64_t)i*V,L[1]+(int64_t)i*V,V); pn+=e; if(e>pm)pm=e;} printf("pair NMSE mean %.2g max %.2g prob mean %.2g max %.2g\n",s/n,m,pn/n,pm);
 for(int i=0;i<12;i++){ double rm=0; for(int k=0;k<V;k++)rm+=L[0][(int64_t)i*V+k]; rm/=V; double pw=0; for(int k=0;k<V;k++)pw+=L[0][(int64_t)i*V+k]*L[0][(int64_t)i*V+k]; printf("pos %d ours %.2g theirs %.2g mean %.2f rms %.2f\n",i,nmse(L[3]+(int64_t)i*V,L[0]+(int64_t)i*V,V),nmse(L[1]+(int64_t)i*V,L[0]+(int64_t)i*V,V),rm,sqrt(pw/V)); }
}
int main(void){const struct CMUnitTest ts[]={cmocka_unit_test(t)}; return cmocka_run_group_tests(ts,NULL,NULL);}
