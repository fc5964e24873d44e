#!/usr/bin/env python3
# Trains the shipped model with PyTorch on one GPU and writes an F32 GGUF.
#
#   python3 corpus.py heldout 360 > OUT/heldout.txt
#   python3 train.py OUT
#
# The corpus is made here, in parallel, from corpus.py: nothing is read but this folder. In the last
# part of the run the matrices pass through a 4-bit rounding like that of Q4_K (the embedding
# through a 6-bit one like Q6_K), so that the weights end up where quantization costs little.
import argparse
import json
import math
import multiprocessing
import os
import time

import numpy as np
import torch
import torch.nn.functional as F

import corpus
import gguf
import tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
CFG = {"name": "rocq lines", "vocab": tokenizer.SIZE, "context": 512, "width": 256, "layers": 7,
       "heads": 4, "kv_heads": 2, "ffn": 768, "eps": 1e-5, "rope_base": 10000.0}
TOK = tokenizer.load(os.path.join(HERE, "vocab.txt"))


def encode_range(job):
    split, first, last = job
    ids, sizes = [], []
    for i in range(first, last):
        doc = [tokenizer.BOS] + TOK.encode(corpus.document(split, i)[:-1]) + [tokenizer.EOS]
        ids += doc
        sizes.append(len(doc))
    return np.array(ids, dtype=np.int16), np.array(sizes, dtype=np.int64)


def load_corpus(pool, split, docs):
    step = 2000
    jobs = [(split, i, min(i + step, docs)) for i in range(0, docs, step)]
    parts = pool.map(encode_range, jobs, chunksize=1)
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def fake_quant(w, group, levels, symmetric):
    """w rounded in groups along the input dimension, the scales of each 256 kept in 6 bits."""
    rows, cols = w.shape
    g = w.view(rows, cols // group, group)
    low = -g.abs().amax(-1, keepdim=True) if symmetric else g.amin(-1, keepdim=True).clamp(max=0.0)
    high = g.abs().amax(-1, keepdim=True) if symmetric else g.amax(-1, keepdim=True)

    def coarse(x, bits):
        top = x.view(rows, cols // 256, 256 // group, 1).amax(2, keepdim=True).clamp(min=1e-12)
        n = 2 ** bits - 1
        return ((x.view(rows, cols // 256, 256 // group, 1) / top * n).round() * top / n).view_as(x)

    scale = coarse((high - low) / levels, 6).clamp(min=1e-9)
    low = -scale * (levels // 2) if symmetric else -coarse(-low, 6)
    return (((g - low) / scale).round().clamp(0, levels) * scale + low).view(rows, cols)


class Model(torch.nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        d, f, n = cfg["width"], cfg["ffn"], cfg["layers"]
        self.hd = d // cfg["heads"]
        kv = self.hd * cfg["kv_heads"]

        def mat(rows, cols, std):
            return torch.nn.Parameter(torch.randn(rows, cols) * std)

        self.embd = mat(cfg["vocab"], d, 0.02)
        std, out = d ** -0.5 * 0.6, 0.02 / math.sqrt(2 * n)
        self.mats = torch.nn.ParameterDict()
        self.norms = torch.nn.ParameterDict()
        for i in range(n):
            for name, rows, cols, s in (("attn_q", d, d, std), ("attn_k", kv, d, std),
                                        ("attn_v", kv, d, std), ("attn_output", d, d, out),
                                        ("ffn_gate", f, d, std),
                                        ("ffn_up", f, d, std), ("ffn_down", d, f, out)):
                self.mats["%d_%s" % (i, name)] = mat(rows, cols, s)
            self.norms["%d_attn_norm" % i] = torch.nn.Parameter(torch.ones(d))
            self.norms["%d_ffn_norm" % i] = torch.nn.Parameter(torch.ones(d))
        self.norms["output_norm"] = torch.nn.Parameter(torch.ones(d))
        turn = cfg["rope_base"] ** (-torch.arange(0, self.hd, 2) / self.hd)
        angle = torch.arange(cfg["context"])[:, None] * turn
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def rope(self, x):
        """Rotates neighbouring pairs (2i, 2i + 1); x is (batch, heads, time, head_dim)."""
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        c, s = self.cos[:x.shape[2]], self.sin[:x.shape[2]]
        return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(x.dtype)

    def norm(self, x, name):
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.cfg["eps"]) * self.norms[name]

    def weight(self, w, quant, embd=False):
        rounded = fake_quant(w, 16, 62, True) if embd else fake_quant(w, 32, 15, False)
        return w + quant * (rounded - w).detach()

    def forward(self, ids, quant):
        """Logits for every position; quant is 0 (exact) or 1 (rounded weights)."""
        cfg = self.cfg
        batch, time_ = ids.shape
        table = self.weight(self.embd, quant, True)
        x = F.embedding(ids, table)
        for i in range(cfg["layers"]):
            def lin(y, name):
                return F.linear(y, self.weight(self.mats["%d_%s" % (i, name)], quant))

            def split(y):
                return y.view(batch, time_, -1, self.hd).transpose(1, 2)

            h = self.norm(x, "%d_attn_norm" % i)
            q, k = self.rope(split(lin(h, "attn_q"))), self.rope(split(lin(h, "attn_k")))
            v = split(lin(h, "attn_v"))
            share = cfg["heads"] // cfg["kv_heads"]
            k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + lin(y.transpose(1, 2).reshape(batch, time_, -1), "attn_output")
            h = self.norm(x, "%d_ffn_norm" % i)
            x = x + lin(F.silu(lin(h, "ffn_gate")) * lin(h, "ffn_up"), "ffn_down")
        return F.linear(self.norm(x, "output_norm"), table)

    def tensor(self, name):
        if name == "token_embd.weight":
            w = self.embd
        elif name == "output_norm.weight":
            w = self.norms["output_norm"]
        else:
            _, i, part, _ = name.split(".")
            key = i + "_" + part
            w = self.mats[key] if key in self.mats else self.norms[key]
        return w.detach().float().cpu().contiguous().numpy().astype("<f4").tobytes()


@torch.no_grad()
def evaluate(model, docs, quant, device):
    """Sums over documents without EOS, in F32: nats and counts, of all text and the spoken part."""
    total = {"all": 0.0, "spoken": 0.0, "n": 0, "spoken_n": 0}
    for at in range(0, len(docs), 50):
        part = docs[at:at + 50]
        width = max(len(d) for d in part)
        ids = torch.full((len(part), width), tokenizer.EOS, dtype=torch.long)
        for r, d in enumerate(part):
            ids[r, :len(d)] = torch.tensor(d)
        ids = ids.to(device)
        logp = F.log_softmax(model(ids[:, :-1], quant).float(), -1)
        nll = -logp.gather(-1, ids[:, 1:, None])[..., 0].double().cpu()
        for r, d in enumerate(part):
            head = d.index(tokenizer.BYTE0 + 10)
            total["all"] += nll[r, :len(d) - 1].sum().item()
            total["spoken"] += nll[r, head - 1:len(d) - 1].sum().item()
            total["n"] += len(d) - 1
            total["spoken_n"] += len(d) - head
    return total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("out")
    ap.add_argument("--docs", type=int, default=1500000)
    ap.add_argument("--steps", type=int, default=12367)
    ap.add_argument("--batch", type=int, default=256)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--quant-from", type=float, default=0.7)
    ap.add_argument("--limit", type=float, default=1e9, help="seconds; shortens the schedule")
    args = ap.parse_args()
    start = time.time()
    pool = multiprocessing.Pool()  # forked before the GPU is touched
    data, sizes = load_corpus(pool, "train", args.docs)
    with open(os.path.join(args.out, "heldout.txt"), encoding="utf-8") as f:
        held = [[tokenizer.BOS] + TOK.encode(d) for d in f.read().rstrip("\n").split("\n\n")]
    held = [h for h in held if len(h) <= CFG["context"]]
    pool.close()
    print("corpus: %d documents, %d tokens, %.0f s" % (len(sizes), len(data), time.time() - start),
          flush=True)

    device = "cuda"
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    width = CFG["context"] + 1
    stream = torch.from_numpy(data).to(device)
    begins = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)[:-1]])).to(device)
    begins = begins[begins < len(data) - width]
    span = torch.arange(width, device=device)
    model = Model(CFG).to(device)
    decay = [p for p in model.parameters() if p.ndim == 2]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-9, fused=True)
    print("parameters:", sum(p.numel() for p in model.parameters()), flush=True)

    def loss_of(rows, quant):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(rows[:, :-1], quant)
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    fast = torch.compile(loss_of)
    quant = torch.zeros((), device=device)
    began, mean, log = time.time(), None, []
    slow, step, steps = 0.0, 0, args.steps
    while step < steps:
        if step == 20:
            torch.cuda.synchronize()
            slow = time.time() - began
        if step == 120:
            # The schedule shrinks to fit the time limit, if there is one.
            torch.cuda.synchronize()
            each = (time.time() - began - slow) / 100
            steps = min(steps, int((args.limit - slow) / each))
            print("compile %.0f s, %.1f ms a step, %.2f M tokens/s, %d steps" %
                  (slow, each * 1e3, args.batch * CFG["context"] / each / 1e6, steps), flush=True)
        done = step / steps
        rate = min(1.0, (step + 1) / 200) * (0.5 * (1 + math.cos(math.pi * done)) * 0.99 + 0.01)
        for g in opt.param_groups:
            g["lr"] = args.lr * rate
        quant.fill_(1.0 if done >= args.quant_from else 0.0)
        first = begins[torch.randint(len(begins), (args.batch,), device=device)]
        rows = stream[first[:, None] + span].long()
        loss = fast(rows, quant)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        opt.step()
        opt.zero_grad(set_to_none=True)
        mean = loss.detach() if mean is None else mean * 0.98 + loss.detach() * 0.02
        step += 1
        if step % 250 == 0 or step == steps:
            log.append((step, round(float(mean), 4)))
            print("step %d  loss %.4f  %.0f s" % (*log[-1], time.time() - began), flush=True)
    trained = time.time() - began

    torch.set_float32_matmul_precision("highest")
    result = {"parameters": sum(p.numel() for p in model.parameters()), "steps": steps, "log": log,
              "tokens_seen": steps * args.batch * CFG["context"], "corpus_tokens": len(data),
              "corpus_documents": len(sizes), "train_seconds": trained}
    texts = [TOK.decode(h[1:]) for h in held]
    heads = [t.index("\n") for t in texts]
    size, spoken = sum(map(len, texts)), sum(len(t) - h for t, h in zip(texts, heads))
    ends = np.cumsum(sizes)
    inside = [data[e - n:e - 1].astype(int).tolist() for e, n in zip(ends[:300], sizes[:300])
              if n <= CFG["context"]]
    for name, docs, q in (("heldout_f32", held, 0.0), ("heldout_4bit_rounded", held, 1.0),
                          ("train_f32", inside, 0.0)):
        sums = evaluate(model, docs, torch.tensor(q, device=device), device)
        result[name] = {"nats_per_token": sums["all"] / sums["n"],
                        "spoken_nats_per_token": sums["spoken"] / sums["spoken_n"]}
        if docs is held:
            result[name]["bits_per_byte"] = sums["all"] / math.log(2) / size
            result[name]["spoken_bits_per_byte"] = sums["spoken"] / math.log(2) / spoken
        print(name, result[name], flush=True)
    result["largest"] = {n: float(p.detach().abs().max()) for n, p in model.named_parameters()}

    gguf.write(os.path.join(args.out, "demo-f32.gguf"), CFG, TOK.table(), model.tensor)
    check = [tokenizer.BOS] + TOK.encode(texts[0])[:60]
    zero = torch.zeros((), device=device)
    with torch.no_grad():
        logits = model(torch.tensor([check], device=device), zero)[0, -1].float().cpu()
    with open(os.path.join(args.out, "check.json"), "w") as f:
        json.dump({"ids": check, "logits": logits.tolist()}, f)
    with open(os.path.join(args.out, "result.json"), "w") as f:
        json.dump(result, f, indent=1)
    print("all done, %.0f s" % (time.time() - start), flush=True)


if __name__ == "__main__":
    main()
