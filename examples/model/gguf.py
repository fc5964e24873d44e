# Writes GGUF files (version 3): the language model's, with F32 tensors, and any others through
# save(); plain Python.
import math
import struct

ALIGN = 32
U32, F32, BOOL, STRING, ARRAY, I32 = 4, 6, 7, 8, 9, 5


def text(s):
    raw = s.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind, v):
    if kind == STRING:
        return text(v)
    return struct.pack({U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}[kind], v)


def entry(key, kind, v, of=None):
    out = text(key) + struct.pack("<I", kind)
    if kind != ARRAY:
        return out + value(kind, v)
    return out + struct.pack("<IQ", of, len(v)) + b"".join(value(of, x) for x in v)


def metadata(cfg, tokens):
    rows = [
        ("general.architecture", STRING, "llama"), ("general.name", STRING, cfg["name"]),
        ("general.file_type", U32, 0), ("general.alignment", U32, ALIGN),
        ("llama.vocab_size", U32, cfg["vocab"]), ("llama.context_length", U32, cfg["context"]),
        ("llama.embedding_length", U32, cfg["width"]), ("llama.block_count", U32, cfg["layers"]),
        ("llama.feed_forward_length", U32, cfg["ffn"]),
        ("llama.attention.head_count", U32, cfg["heads"]),
        ("llama.attention.head_count_kv", U32, cfg["kv_heads"]),
        ("llama.attention.layer_norm_rms_epsilon", F32, cfg["eps"]),
        ("llama.rope.dimension_count", U32, cfg["width"] // cfg["heads"]),
        ("llama.rope.freq_base", F32, cfg["rope_base"]),
        ("tokenizer.ggml.model", STRING, "llama"), ("tokenizer.ggml.pre", STRING, "default"),
        ("tokenizer.ggml.tokens", ARRAY, [t[0] for t in tokens], STRING),
        ("tokenizer.ggml.scores", ARRAY, [t[1] for t in tokens], F32),
        ("tokenizer.ggml.token_type", ARRAY, [t[2] for t in tokens], I32),
        ("tokenizer.ggml.unknown_token_id", U32, 0), ("tokenizer.ggml.bos_token_id", U32, 1),
        ("tokenizer.ggml.eos_token_id", U32, 2),
        ("tokenizer.ggml.add_bos_token", BOOL, True), ("tokenizer.ggml.add_eos_token", BOOL, False),
        ("tokenizer.ggml.add_space_prefix", BOOL, True)]
    return rows


def shapes(cfg):
    """Tensor names and sizes, innermost dimension first, in file order."""
    d, kv = cfg["width"], cfg["width"] // cfg["heads"] * cfg["kv_heads"]
    out = [("token_embd.weight", (d, cfg["vocab"]))]
    for i in range(cfg["layers"]):
        b = "blk.%d." % i
        out += [(b + "attn_norm.weight", (d,)), (b + "attn_q.weight", (d, d)),
                (b + "attn_k.weight", (d, kv)), (b + "attn_v.weight", (d, kv)),
                (b + "attn_output.weight", (d, d)),
                (b + "ffn_norm.weight", (d,)), (b + "ffn_gate.weight", (d, cfg["ffn"])),
                (b + "ffn_up.weight", (d, cfg["ffn"])), (b + "ffn_down.weight", (cfg["ffn"], d))]
    return out + [("output_norm.weight", (d,))]


def save(path, rows, tensors):
    """rows: arguments of entry(). tensors: (name, dims innermost first, GGUF type, bytes)."""
    infos, at = b"", 0
    for name, dims, kind, raw in tensors:
        infos += text(name) + struct.pack("<I", len(dims)) + struct.pack("<%dQ" % len(dims), *dims)
        infos += struct.pack("<IQ", kind, at)
        at += (len(raw) + ALIGN - 1) // ALIGN * ALIGN
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(rows))
    head += b"".join(entry(*r) for r in rows) + infos
    with open(path, "wb") as f:
        f.write(head + bytes(-len(head) % ALIGN))
        for _, _, _, raw in tensors:
            f.write(raw + bytes(-len(raw) % ALIGN))


def write(path, cfg, tokens, data):
    """data(name) gives a tensor's little-endian floats. The output is tied to the embedding."""
    tensors = [(name, dims, 0, data(name)) for name, dims in shapes(cfg)]
    for name, dims, _, raw in tensors:
        assert len(raw) == 4 * math.prod(dims), name
    save(path, metadata(cfg, tokens), tensors)
