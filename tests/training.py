#!/usr/bin/env python3
# Small models of every family with random weights, and what twenty steps of PyTorch in float64 make
# of them, for tests/test_train.c to compare with:
#
#     python3 tests/training.py FOLDER
#
# NAME.gguf is the model. NAME-after.gguf has the options of the run as metadata and, as tensors,
# ids, targets and their weights of all steps, their losses and gradients' norms, and under its name
# everything that was trained, as it is at the end.
import math
import os
import struct
import sys

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../examples/model"))
import gguf

torch.set_num_threads(1)
STEPS = 20
I32 = 26

# Everything about a model that is no weight. window: what layers 0, 2 ... see; 0 = all.
BASE = dict(arch="llama", vocab=97, context=64, embd=32, heads=4, kv=2, dim=8, ff=56, layers=2,
            window=0, eps=1e-5, base=10000.0, tied=False, cap=0.0, final=0.0)
CASES = {
    "gpt2": (dict(arch="gpt2", kv=4, ff=128, tied=True, layers=3), dict(seqs=2, tokens=13)),
    "llama": (dict(heads=6, kv=2, dim=8, embd=48, ff=40), dict(seqs=3, tokens=11, accumulate=3)),
    "qwen2": (dict(arch="qwen2", base=1e6), dict(seqs=2, tokens=9, accumulate=2)),
    "qwen3": (dict(arch="qwen3", dim=12, tied=True), dict(seqs=2, tokens=16, decay=0.0)),
    "gemma2": (dict(arch="gemma2", dim=16, tied=True, cap=3.0, final=4.0, window=5),
               dict(seqs=2, tokens=17, clip=-1.0)),
    "wide": (dict(embd=256, heads=4, dim=64, ff=256, layers=1),
             dict(seqs=1, tokens=12, rank=4, alpha=8.0)),
    "lora": (dict(), dict(seqs=2, tokens=10, rank=4, alpha=12.0, seed=7)),
    "lora-gpt2": (dict(arch="gpt2", kv=4, ff=128, tied=True),
                  dict(seqs=1, tokens=14, rank=3, alpha=3.0, targets="qkv,down", seed=8,
                       accumulate=2)),
    "lora-gemma2": (dict(arch="gemma2", dim=16, tied=True, cap=3.0, final=4.0, window=5),
                    dict(seqs=2, tokens=9, rank=2, alpha=4.0, targets="v,output,gate,down",
                         seed=9)),
}
RUN = dict(seqs=1, tokens=8, accumulate=1, rank=0, alpha=0.0, targets="", seed=0, decay=0.1,
           clip=1.0, lr=2e-3)


def shapes(c):
    """Names and sizes, innermost dimension first, in file order."""
    e, q, kv, ff = c["embd"], c["heads"] * c["dim"], c["kv"] * c["dim"], c["ff"]
    gpt2, gemma = c["arch"] == "gpt2", c["arch"] == "gemma2"
    out = [("token_embd.weight", (e, c["vocab"]))]
    if gpt2:
        out += [("position_embd.weight", (e, c["context"]))]
    for i in range(c["layers"]):
        layer = [("attn_norm.weight", (e,))]
        if gpt2:
            layer += [("attn_norm.bias", (e,)), ("attn_qkv.weight", (e, q + 2 * kv)),
                      ("attn_qkv.bias", (q + 2 * kv,))]
        else:
            layer += [("attn_q.weight", (e, q)), ("attn_k.weight", (e, kv)),
                      ("attn_v.weight", (e, kv))]
        if c["arch"] == "qwen2":
            layer += [("attn_q.bias", (q,)), ("attn_k.bias", (kv,)), ("attn_v.bias", (kv,))]
        if c["arch"] == "qwen3":
            layer += [("attn_q_norm.weight", (c["dim"],)), ("attn_k_norm.weight", (c["dim"],))]
        layer += [("attn_output.weight", (q, e)), ("ffn_norm.weight", (e,))]
        if gemma:
            layer += [("post_attention_norm.weight", (e,)), ("post_ffw_norm.weight", (e,))]
        if gpt2:
            layer += [("attn_output.bias", (e,)), ("ffn_norm.bias", (e,)),
                      ("ffn_up.weight", (e, ff)),
                      ("ffn_up.bias", (ff,)), ("ffn_down.weight", (ff, e)), ("ffn_down.bias", (e,))]
        else:
            layer += [("ffn_gate.weight", (e, ff)), ("ffn_up.weight", (e, ff)),
                      ("ffn_down.weight", (ff, e))]
        out += [("blk.%d.%s" % (i, n), s) for n, s in layer]
    out += [("output_norm.weight", (e,))]
    if gpt2:
        out += [("output_norm.bias", (e,))]
    if not c["tied"]:
        out += [("output.weight", (e, c["vocab"]))]
    return out


def draw(c):
    """Rounded to F32, so that the file has the same."""
    w = {}
    for name, s in shapes(c):
        if len(s) == 1:
            t = torch.randn(s) * .2 + (0 if name.endswith("bias") else 1)
        else:
            scale = .5 if name == "token_embd.weight" else .1 if "position" in name else s[0] ** -.5
            if name == "token_embd.weight" and c["arch"] == "gemma2":
                scale /= c["embd"] ** .5
            t = torch.randn(s[1], s[0]) * scale
        w[name] = t.float().double()
    return w


def metadata(c, name):
    a = c["arch"] + "."
    norm = "layer_norm_epsilon" if c["arch"] == "gpt2" else "layer_norm_rms_epsilon"
    rows = [("general.architecture", gguf.STRING, c["arch"]), ("general.name", gguf.STRING, name),
            (a + "vocab_size", gguf.U32, c["vocab"]),
            (a + "context_length", gguf.U32, c["context"]),
            (a + "embedding_length", gguf.U32, c["embd"]),
            (a + "block_count", gguf.U32, c["layers"]),
            (a + "feed_forward_length", gguf.U32, c["ff"]),
            (a + "attention.head_count", gguf.U32, c["heads"]),
            (a + "attention.head_count_kv", gguf.U32, c["kv"]),
            (a + "attention." + norm, gguf.F32, c["eps"])]
    if c["dim"] * c["heads"] != c["embd"]:
        rows += [(a + "attention.key_length", gguf.U32, c["dim"]),
                 (a + "attention.value_length", gguf.U32, c["dim"])]
    if c["arch"] != "gpt2":
        rows += [(a + "rope.freq_base", gguf.F32, c["base"])]
    if c["arch"] == "gemma2":
        rows += [(a + "attn_logit_softcapping", gguf.F32, c["cap"]),
                 (a + "final_logit_softcapping", gguf.F32, c["final"]),
                 (a + "attention.sliding_window", gguf.U32, c["window"])]
    return rows


# ---- the models --------------------------------------------------------------------------------


def rms(x, weight, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def cap(x, c):
    return c * torch.tanh(x / c) if c > 0 else x


def rope(x, c):
    """x: [seqs, tokens, heads, dim]."""
    d = x.shape[-1]
    rates = c["base"] ** (-torch.arange(0, d, 2).double() / d)
    angle = torch.arange(x.shape[1]).double()[:, None] * rates
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
    if c["arch"] == "llama":  # pairs of neighbours
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    a, b = x[..., :d // 2], x[..., d // 2:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def logits_of(c, w, lora, scale, ids):
    seqs, tokens = ids.shape
    heads, kv, dim, eps = c["heads"], c["kv"], c["dim"], c["eps"]
    gpt2, gemma = c["arch"] == "gpt2", c["arch"] == "gemma2"

    def linear(x, name):
        y = x @ w[name + ".weight"].T
        if name + ".weight.lora_a" in lora:
            y = y + scale * (x @ lora[name + ".weight.lora_a"].T @ lora[name + ".weight.lora_b"].T)
        return y + w[name + ".bias"] if name + ".bias" in w else y

    def norm(x, name):
        if gpt2:
            return F.layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"], eps)
        return rms(x, w[name + ".weight"], eps)

    x = w["token_embd.weight"][ids]
    if gpt2:
        x = x + w["position_embd.weight"][:tokens]
    if gemma:
        x = x * c["embd"] ** .5
    for i in range(c["layers"]):
        b = "blk.%d." % i
        h = norm(x, b + "attn_norm")
        if gpt2:
            q, k, v = linear(h, b + "attn_qkv").split([heads * dim, kv * dim, kv * dim], -1)
        else:
            q, k, v = (linear(h, b + "attn_" + n) for n in "qkv")
        q, k, v = (t.reshape(seqs, tokens, -1, dim) for t in (q, k, v))
        if c["arch"] == "qwen3":
            q = rms(q, w[b + "attn_q_norm.weight"], eps)
            k = rms(k, w[b + "attn_k_norm.weight"], eps)
        if not gpt2:
            q, k = rope(q, c), rope(k, c)
        k, v = (t.repeat_interleave(heads // kv, 2) for t in (k, v))
        s = cap(torch.einsum("bihd,bjhd->bhij", q, k) / dim ** .5, c["cap"])
        far = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
        window = c["window"] if c["window"] > 0 and i % 2 == 0 else tokens
        s = s.masked_fill((far < 0) | (far >= window), -math.inf).softmax(-1)
        o = linear(torch.einsum("bhij,bjhd->bihd", s, v).flatten(2), b + "attn_output")
        x = x + (norm(o, b + "post_attention_norm") if gemma else o)
        h = norm(x, b + "ffn_norm")
        if gpt2:
            o = F.gelu(linear(h, b + "ffn_up"), approximate="tanh")
        else:
            gate = linear(h, b + "ffn_gate")
            gate = F.gelu(gate, approximate="tanh") if gemma else F.silu(gate)
            o = gate * linear(h, b + "ffn_up")
        o = linear(o, b + "ffn_down")
        x = x + (norm(o, b + "post_ffw_norm") if gemma else o)
    x = norm(x, "output_norm")
    return cap(x @ w["token_embd.weight" if c["tied"] else "output.weight"].T, c["final"])


# ---- training ----------------------------------------------------------------------------------


def splitmix(state):
    while True:
        state = state + 0x9e3779b97f4a7c15 & 0xffffffffffffffff
        z = (state ^ state >> 30) * 0xbf58476d1ce4e5b9 & 0xffffffffffffffff
        z = (z ^ z >> 27) * 0x94d049bb133111eb & 0xffffffffffffffff
        yield z ^ z >> 31


def adapters(c, r):
    """A as train.h draws it, B zero."""
    out, random = {}, splitmix(r["seed"])
    for name, s in shapes(c):
        bare = name.split(".")[2] if name.startswith("blk") else "none"
        chosen = not r["targets"] or bare.split("_", 1)[-1] in r["targets"].split(",")
        if len(s) == 1 or bare == "none" or not chosen:
            continue
        a = torch.tensor([(next(random) >> 40) * 2.0 ** -23 - 1 for _ in range(s[0] * r["rank"])])
        a = a.float().double() / s[0] ** .5
        out[name + ".lora_a"] = a.float().double().reshape(r["rank"], s[0])
        out[name + ".lora_b"] = torch.zeros(s[1], r["rank"]).double()
    return out


def run(name, c, r, folder):
    torch.manual_seed(len(name))
    w = draw(c)
    gguf.save(os.path.join(folder, name + ".gguf"), metadata(c, name),
              [(n, s, 0, w[n].float().numpy().tobytes()) for n, s in shapes(c)])
    lora = adapters(c, r) if r["rank"] > 0 else {}
    trained = lora or w
    for t in trained.values():
        t.requires_grad_(True)
    matrices = [t for t in trained.values() if t.dim() > 1]
    vectors = [t for t in trained.values() if t.dim() == 1]
    groups = [dict(params=matrices, weight_decay=r["decay"])] + ([dict(params=vectors,
                                                                       weight_decay=0.0)]
                                                                 if vectors else [])
    # eps: the gradient of gpt2's k bias is 0, and in F32 noise, of which AdamW would make steps.
    adam = torch.optim.AdamW(groups, lr=r["lr"], betas=(.9, .95), eps=1e-6)
    shape = (STEPS, r["accumulate"], r["seqs"], r["tokens"])
    ids = torch.randint(0, c["vocab"], shape)
    ids = torch.where(torch.rand(shape) < .5, ids % 7, ids)  # something to learn, and repeated ids
    targets = torch.roll(ids, -1, -1)
    targets[..., -1] = -1
    targets[torch.rand(shape) < .1] = -1
    weights = (torch.rand(shape) * 2).float().double()
    losses, norms = [], []
    for step in range(STEPS):
        adam.zero_grad()
        total = (weights[step] * (targets[step] >= 0)).sum()
        loss = 0
        for k in range(r["accumulate"]):
            y = logits_of(c, w, lora, r["alpha"] / max(r["rank"], 1), ids[step, k])
            each = F.cross_entropy(y.flatten(0, 1), targets[step, k].flatten(), ignore_index=-1,
                                   reduction="none")
            loss = loss + (each * weights[step, k].flatten()).sum() / total
        loss.backward()
        norm = torch.sqrt(sum((t.grad * t.grad).sum() for t in trained.values()))
        if r["clip"] > 0 and norm > r["clip"]:
            for t in trained.values():
                t.grad *= r["clip"] / norm
        adam.step()
        losses.append(loss.item())
        norms.append(norm.item())
    rows = [("general.architecture", gguf.STRING, c["arch"]),
            ("run.targets", gguf.STRING, r["targets"])]
    rows += [("run." + k, gguf.U32, r[k]) for k in ("seqs", "tokens", "accumulate", "rank", "seed")]
    rows += [("run." + k, gguf.F32, r[k]) for k in ("alpha", "decay", "clip", "lr")]
    n = ids.numel()
    tensors = [("ids", (n,), I32, ids.int().numpy().tobytes()),
               ("targets", (n,), I32, targets.int().numpy().tobytes()),
               ("target_weights", (n,), 0, weights.float().numpy().tobytes()),
               ("losses", (STEPS,), 0, struct.pack("<%df" % STEPS, *losses)),
               ("norms", (STEPS,), 0, struct.pack("<%df" % STEPS, *norms))]
    tensors += [(k, tuple(reversed(t.shape)), 0, t.detach().float().contiguous().numpy().tobytes())
                for k, t in trained.items()]
    gguf.save(os.path.join(folder, name + "-after.gguf"), rows, tensors)


def main():
    os.makedirs(sys.argv[1], exist_ok=True)
    for name, (model, how) in CASES.items():
        run(name, {**BASE, **model}, {**RUN, **how}, sys.argv[1])


main()
