#!/usr/bin/env python3
# The SentencePiece-style vocabulary: byte-pair training over the corpus, and the encoder.
# Encoding is defined by the scores alone: of all neighbouring pieces whose concatenation is in the
# vocabulary, join the one with the highest score (the leftmost of equals), until none is left;
# characters still unknown become byte tokens. Pieces never span a space, a line end or (except 's)
# a border between letters and punctuation.
#
#   python3 tokenizer.py 30000 > vocab.txt           train on that many training documents
import re
import sys

import corpus

SIZE = 2048
SPACE = "\u2581"
UNK, BOS, EOS, BYTE0 = 0, 1, 2, 3
FIRST = BYTE0 + 256
CHUNK = re.compile(SPACE + r"?[A-Za-z]+|'s|" + SPACE + r"?[^A-Za-z" + SPACE + r"]|" + SPACE)


def marked(text):
    """Text as the vocabulary sees it: a space in front, every space visible."""
    return SPACE + text.replace(" ", SPACE)


def train(texts):
    """Pieces in rank order: merged pieces as they were found, then the single characters."""
    counts = {}
    for text in texts:
        for line in marked(text).split("\n"):
            for word in CHUNK.findall(line):
                counts[word] = counts.get(word, 0) + 1
    words = [(list(w), n) for w, n in sorted(counts.items())]
    chars = {c for w, _ in words for c in w} | {chr(c) for c in range(33, 127)} | {SPACE}
    pieces, have = [], set(chars)
    pairs, where = {}, {}
    for i, (w, n) in enumerate(words):
        for a, b in zip(w, w[1:]):
            pairs[a, b] = pairs.get((a, b), 0) + n
            where.setdefault((a, b), set()).add(i)
    while len(pieces) + len(chars) < SIZE - FIRST:
        best = max(pairs.items(), key=lambda kv: (kv[1], kv[0]))[0]
        joined = best[0] + best[1]
        if joined not in have:
            pieces.append(joined)
            have.add(joined)
        for i in sorted(where.pop(best)):
            w, n = words[i]
            for a, b in zip(w, w[1:]):
                pairs[a, b] -= n
            k, out = 0, []
            while k < len(w):
                if k + 1 < len(w) and w[k] == best[0] and w[k + 1] == best[1]:
                    out.append(joined)
                    k += 2
                else:
                    out.append(w[k])
                    k += 1
            w[:] = out
            for a, b in zip(w, w[1:]):
                pairs[a, b] = pairs.get((a, b), 0) + n
                where.setdefault((a, b), set()).add(i)
        del pairs[best]
    return pieces + sorted(chars)


class Tokenizer:
    def __init__(self, pieces):
        self.pieces = pieces
        self.ids = {p: FIRST + i for i, p in enumerate(pieces)}
        self.words = {}
        # No piece holds a line end, nor a space anywhere but in front: words encode independently.
        self.breaks = re.compile(r"\n|" + SPACE + r"?[^\n" + SPACE + r"]+|" + SPACE)

    def word(self, chunk):
        if chunk not in self.words:
            parts = list(chunk)
            while True:
                known = [(self.ids[a + b], k) for k, (a, b) in enumerate(zip(parts, parts[1:]))
                         if a + b in self.ids]
                if not known:
                    break
                k = min(known)[1]
                parts[k:k + 2] = [parts[k] + parts[k + 1]]
            out = []
            for p in parts:
                out += [self.ids[p]] if p in self.ids else [BYTE0 + b for b in p.encode()]
            self.words[chunk] = out
        return self.words[chunk]

    def encode(self, text):
        out = []
        for chunk in self.breaks.findall(marked(text) if text else ""):
            out += self.word(chunk)
        return out

    def decode(self, ids):
        raw = b""
        for i in ids:
            if BYTE0 <= i < FIRST:
                raw += bytes([i - BYTE0])
            elif i >= FIRST:
                raw += self.pieces[i - FIRST].replace(SPACE, " ").encode()
        text = raw.decode("utf-8", "replace")
        return text[1:] if text.startswith(" ") else text

    def table(self):
        """(text, score, type) of every token, as GGUF stores them."""
        rows = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
        rows += [("<0x%02X>" % b, 0.0, 6) for b in range(256)]
        return rows + [(p, float(-i), 1) for i, p in enumerate(self.pieces)]


def load(path):
    with open(path, encoding="utf-8") as f:
        return Tokenizer(f.read().split("\n")[:-1])


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: tokenizer.py documents > vocab.txt")
    pieces = train(corpus.document("train", i)[:-1] for i in range(int(sys.argv[1])))
    sys.stdout.reconfigure(encoding="utf-8")
    sys.stdout.write("\n".join(pieces) + "\n")


if __name__ == "__main__":
    main()
