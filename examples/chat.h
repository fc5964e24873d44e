// chat.h - a message to an instructed model, in the form that it was trained on.
//
//     const chat_form *form = chat_find(text);         // of tokenizer.chat_template; NULL: unknown
//     chat_text turn = {NULL, NULL};
//     chat_ask(&turn, form, "Answer in one word.", chat_str("What is the capital of France?"));
//     if (!chat_encode(&turn, form, &tokenizer, &ids, why, sizeof why)) puts(why);
//     chat_clear(&turn);
//     ...                                              // the answer, until chat_end_token
//     chat_close(&turn, form);                         // then the next question
//
// A GGUF file's template is a program in a language of its own, Jinja. This knows a few forms by
// what their templates contain, and refuses the others. To add one: a row of chat_forms.

#ifndef CHAT_H
#define CHAT_H

#include "tokenizer.h"

// Special tokens stand between \1 and \1. Whatever else of a text looks like one of them, in a
// question or a system message, is text.
typedef struct chat_form {
    const char *name;
    const char *has[2], *lacks[2]; // what a template of this form contains, and what not
    const char *system[2];         // around a system message; NULL: it begins the first question
    const char *user[2];           // around a question
    const char *reply, *end;       // around an answer; end begins with the token that ends it
    bool trims;                    // white space around messages is dropped
    const char *others;            // special tokens that are not in the above
} chat_form;

static const chat_form chat_forms[] = {
    {"ChatML", {"<|im_start|>", ""}, {"<|im_sep|>", "<end_of_utterance>"},
     {"\1<|im_start|>\1system\n", "\1<|im_end|>\1\n"},
     {"\1<|im_start|>\1user\n", "\1<|im_end|>\1\n"},
     "\1<|im_start|>\1assistant\n", "\1<|im_end|>\1\n", false, ""},
    {"Llama 3", {"<|start_header_id|>", "<|end_header_id|>"}, {NULL, NULL},
     {"\1<|start_header_id|>\1system\1<|end_header_id|>\1\n\n", "\1<|eot_id|>\1"},
     {"\1<|start_header_id|>\1user\1<|end_header_id|>\1\n\n", "\1<|eot_id|>\1"},
     "\1<|start_header_id|>\1assistant\1<|end_header_id|>\1\n\n", "\1<|eot_id|>\1", true, ""},
    // Mistral's versions differ in spaces.
    {"Mistral", {"[INST]", "[SYSTEM_PROMPT] "}, {NULL, NULL},
     {"\1[SYSTEM_PROMPT]\1 ", "\1[/SYSTEM_PROMPT]\1"}, {"\1[INST]\1 ", "\1[/INST]\1"},
     "", "\1</s>\1", false, ""},
    {"Mistral", {"[INST]", "[SYSTEM_PROMPT]"}, {NULL, NULL},
     {"\1[SYSTEM_PROMPT]\1", "\1[/SYSTEM_PROMPT]\1"}, {"\1[INST]\1", "\1[/INST]\1"},
     "", "\1</s>\1", false, ""},
    {"Mistral", {"[INST]", "' [INST] ' + system_message"}, {NULL, NULL},
     {NULL, NULL}, {" [INST] ", " [/INST]"}, "", "\1</s>\1", false, ""},
    {"Mistral", {"\"[INST]\"", "[AVAILABLE_TOOLS]"}, {" [INST]", NULL},
     {NULL, NULL}, {"\1[INST]\1", "\1[/INST]\1"}, "", "\1</s>\1", false, ""},
    {"Mistral", {"[INST]", "[AVAILABLE_TOOLS]"}, {" [INST]", NULL},
     {NULL, NULL}, {"\1[INST]\1 ", "\1[/INST]\1"}, "", "\1</s>\1", false, ""},
    {"Gemma", {"<start_of_turn>", ""}, {NULL, NULL},
     {NULL, NULL}, {"\1<start_of_turn>\1user\n", "\1<end_of_turn>\1\n"},
     "\1<start_of_turn>\1model\n", "\1<end_of_turn>\1\n", true, ""},
    {"Gemma 4", {"<|turn>", "<turn|>"}, {NULL, NULL},
     {"\1<|turn>\1system\n", "\1<turn|>\1\n"}, {"\1<|turn>\1user\n", "\1<turn|>\1\n"},
     "\1<|turn>\1model\n", "\1<turn|>\1\n", true, "\1<|channel>\1\1<channel|>\1\1<|think|>\1"},
    {"harmony (gpt-oss)", {"<|start|>", "<|channel|>"}, {NULL, NULL},
     {"\1<|start|>\1system\1<|message|>\1", "\1<|end|>\1"},
     {"\1<|start|>\1user\1<|message|>\1", "\1<|end|>\1"},
     "\1<|start|>\1assistant", "\1<|return|>\1", false,
     "\1<|channel|>\1\1<|constrain|>\1\1<|call|>\1"},
    {"Granite", {"<|start_of_role|>", ""}, {NULL, NULL},
     {"\1<|start_of_role|>\1system\1<|end_of_role|>\1", "\1<|end_of_text|>\1\n"},
     {"\1<|start_of_role|>\1user\1<|end_of_role|>\1", "\1<|end_of_text|>\1\n"},
     "\1<|start_of_role|>\1assistant\1<|end_of_role|>\1", "\1<|end_of_text|>\1\n", false, ""},
};

enum { CHAT_N_FORMS = sizeof chat_forms / sizeof chat_forms[0] };

// A text and, for each of its bytes, whether it is part of a special token: 2 where one begins, 1
// inside of it, 0 outside. Arrays of stb_ds's.
typedef struct chat_text {
    char *text;
    unsigned char *special;
} chat_text;

static inline void chat_clear(chat_text *c) {
    arrsetlen(c->text, 0);
    arrsetlen(c->special, 0);
}

static inline void chat_free(chat_text *c) {
    arrfree(c->text);
    arrfree(c->special);
}

static bool chat__contains(rocq_str text, const char *part) {
    const int64_t n = (int64_t)strlen(part);
    for (int64_t i = 0; i + n <= text.length; i++) {
        if (memcmp(text.data + i, part, (size_t)n) == 0) return true;
    }
    return false;
}

// The form of a template, or NULL: of those that fit the first.
static inline const chat_form *chat_find(rocq_str text) {
    for (int i = 0; i < CHAT_N_FORMS; i++) {
        const chat_form *f = &chat_forms[i];
        bool fits = true;
        for (int k = 0; k < 2; k++) {
            fits = fits && chat__contains(text, f->has[k]) &&
                   !(f->lacks[k] && chat__contains(text, f->lacks[k]));
        }
        if (fits) return f;
    }
    return NULL;
}

// What the form writes: special tokens between \1 and \1.
static void chat__write(chat_text *c, const char *piece) {
    unsigned char inside = 0;
    for (; *piece; piece++) {
        if (*piece == '\1') {
            inside = inside ? 0 : 2;
            continue;
        }
        arrput(c->text, *piece);
        arrput(c->special, inside);
        if (inside) inside = 1;
    }
}

static inline rocq_str chat_str(const char *text) {
    const rocq_str s = {text, (int64_t)strlen(text)};
    return s;
}

// What the user writes.
static void chat__quote(chat_text *c, const chat_form *f, rocq_str message) {
    static const char white[] = {' ', '\t', '\n', '\v', '\f', '\r'};
    int64_t first = 0, n = message.length;
    while (f->trims && first < n && memchr(white, message.data[first], sizeof white)) first++;
    while (f->trims && n > first && memchr(white, message.data[n - 1], sizeof white)) n--;
    for (; first < n; first++) {
        arrput(c->text, message.data[first]);
        arrput(c->special, 0);
    }
}

// Appends a question, and what an answer begins with. system: NULL or a message before it.
static inline void chat_ask(chat_text *c, const chat_form *f, const char *system,
                            rocq_str message) {
    const bool apart = f->system[0] != NULL;
    if (system && apart) {
        chat__write(c, f->system[0]);
        chat__quote(c, f, chat_str(system));
        chat__write(c, f->system[1]);
    }
    chat__write(c, f->user[0]);
    if (system && !apart) {
        chat__quote(c, f, chat_str(system));
        chat__write(c, "\n\n");
    }
    chat__quote(c, f, message);
    chat__write(c, f->user[1]);
    chat__write(c, f->reply);
}

// Appends what an answer ends with.
static inline void chat_close(chat_text *c, const chat_form *f) { chat__write(c, f->end); }

// The next special token of a piece, from *piece on, which moves behind it; length 0: no more.
static rocq_str chat__next(const char **piece) {
    const char *first = strchr(*piece, '\1'), *last = first ? strchr(first + 1, '\1') : NULL;
    rocq_str token = {first, 0};
    if (!last) return token;
    token.data = first + 1;
    token.length = last - token.data;
    *piece = last + 1;
    return token;
}

// Whether one of the form's special tokens begins at text.
static bool chat__is_token(const chat_form *f, const char *text, int64_t n) {
    const char *const pieces[] = {f->system[0], f->system[1], f->user[0], f->user[1],
                                  f->reply,     f->end,       f->others};
    for (size_t i = 0; i < sizeof pieces / sizeof pieces[0]; i++) {
        const char *at = pieces[i];
        for (rocq_str token; at && (token = chat__next(&at)).length > 0;) {
            if (token.length <= n && memcmp(text, token.data, (size_t)token.length) == 0) {
                return true;
            }
        }
    }
    return false;
}

// Appends the tokens of a text to *ids. Text that looks like a special token is cut behind its
// first byte, since some vocabularies find such tokens in any text. false: why says what is
// missing.
static inline bool chat_encode(const chat_text *c, const chat_form *f, tokenizer *t, int32_t **ids,
                               char *why, size_t size) {
    const int64_t n = arrlen(c->text);
    for (int64_t at = 0, stop; at < n; at = stop) {
        const bool special = c->special[at] == 2;
        for (stop = at + 1; stop < n && c->special[stop] == (special ? 1 : 0); stop++) {
            if (!special && chat__is_token(f, c->text + stop - 1, n - stop + 1)) break;
        }
        if (!special) {
            const char *part = c->text + at;
            if (tokenizer_encode(t, ids, part, stop - at, false, false) == ROCQ_OK) continue;
            snprintf(why, size, "%s", t->error);
            return false;
        }
        const int32_t id = tok__find(&t->vocab, c->text + at, stop - at, NULL, 0);
        if (id < 0) {
            snprintf(why, size, "the template is %s's, but the vocabulary has no token %.*s",
                     f->name, (int)(stop - at), c->text + at);
            return false;
        }
        arrput(*ids, id);
    }
    return true;
}

// The token that ends an answer, or -1.
static inline int32_t chat_end_token(const chat_form *f, const tokenizer *t) {
    const char *at = f->end;
    const rocq_str token = chat__next(&at);
    return token.length > 0 ? tok__find(&t->vocab, token.data, token.length, NULL, 0) : -1;
}

#endif // CHAT_H
