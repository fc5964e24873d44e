"""PyTorch as the peer of bench/training.c: trains a GPT-2 of the same weights on the same texts.

Started by bench/torch.h with --device cpu|cuda --threads N --folder DIR. Reads a line, does what it
says, and answers with a line: a number, or "no" and the reason.

    losses MODEL B T STEPS LR    STEPS steps in F32 from the weights of DIR/MODEL.gguf; step i reads
                                 B x (T + 1) ids of DIR/ids.i32, its losses go to DIR/losses.f32.
                                 Answers with the last
    step MODEL B T MODE RUNS     ns of a step, of RUNS in a row: forward, backward, clipping, AdamW
                                 (fused on a GPU), the loss on the host. On a GPU in BF16 by
                                 autocast, on a CPU in F32. MODE: eager or compiled
    peak                         bytes of GPU memory at once since the last MODE began, its model's
                                 included, other models' not

A CPU's products are those of the BLAS that PyTorch finds: Debian's is the reference one, of a 25th
of the speed, unless libopenblas0 is installed.
"""
import argparse
import gc
import os
import struct
import sys
import time

import numpy
import torch
import torch.nn as nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--device", default="cpu")
p.add_argument("--threads", type=int, default=0)
p.add_argument("--folder", default="/tmp")
o = p.parse_args()
gpu = o.device == "cuda"
if o.threads:
    torch.set_num_threads(o.threads)


def read_gguf(path):
    """Numbers of the metadata, and tensors, which are all in F32."""
    raw, at, numbers, infos, tensors = memoryview(open(path, "rb").read()), 8, {}, [], {}

    def take(form):
        nonlocal at
        value, = struct.unpack_from("<" + form, raw, at)
        at += struct.calcsize("<" + form)
        return value

    def text():
        nonlocal at
        size = take("Q")
        at += size
        return bytes(raw[at - size:at]).decode()

    def value(kind):
        if kind == 8:
            return text()
        if kind == 9:
            of = take("I")
            return [value(of) for _ in range(take("Q"))]
        return take("BbHhIif?"[kind] if kind < 8 else "QQqd"[kind - 9])

    n_tensors, n_keys = take("Q"), take("Q")
    for _ in range(n_keys):
        key = text()
        numbers[key.partition(".")[2]] = value(take("I"))
    for _ in range(n_tensors):
        infos.append((text(), [take("Q") for _ in range(take("I"))], take("I"), take("Q")))
    align = numbers.get("alignment", 32)
    first = (at + align - 1) // align * align
    for name, ne, kind, offset in infos:
        assert kind == 0, name
        array = numpy.frombuffer(raw, numpy.float32, int(numpy.prod(ne)), first + offset)
        tensors[name] = torch.from_numpy(array.reshape(ne[::-1]).copy())
    return numbers, tensors


def attention(q, k, v):
    if hasattr(F, "scaled_dot_product_attention"):  # PyTorch 2
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    future = torch.full((q.shape[-2],) * 2, float("-inf"), device=q.device).triu(1)
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + future, -1) @ v


class Gpt2(nn.Module):
    def __init__(self, numbers, tensors):
        super().__init__()
        self.heads, self.layers = numbers["attention.head_count"], numbers["block_count"]
        self.eps = numbers["attention.layer_norm_epsilon"]
        self.w = nn.ParameterDict()
        for name, t in tensors.items():
            self.w[name.replace(".", "_")] = nn.Parameter(t)

    def norm(self, name, x):
        w, b = self.w[name + "_weight"], self.w[name + "_bias"]
        return F.layer_norm(x, x.shape[-1:], w, b, self.eps)

    def linear(self, name, x):
        return F.linear(x, self.w[name + "_weight"], self.w[name + "_bias"])

    def forward(self, ids, targets):
        b, t = ids.shape
        x = F.embedding(ids, self.w["token_embd_weight"]) + self.w["position_embd_weight"][:t]
        for i in range(self.layers):
            n = "blk_%d_" % i
            qkv = self.linear(n + "attn_qkv", self.norm(n + "attn_norm", x))
            y = attention(*qkv.view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0))
            x = x + self.linear(n + "attn_output", y.transpose(1, 2).reshape(b, t, -1))
            h = F.gelu(self.linear(n + "ffn_up", self.norm(n + "ffn_norm", x)), approximate="tanh")
            x = x + self.linear(n + "ffn_down", h)
        logits = F.linear(self.norm("output_norm", x), self.w["token_embd_weight"])
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Training:
    def __init__(self, name, b, t, half, mode, lr):
        torch.set_float32_matmul_precision("high" if half else "highest")
        if gpu:
            torch.cuda.reset_peak_memory_stats()
            self.others = torch.cuda.memory_allocated()
        self.model = Gpt2(*read_gguf(os.path.join(o.folder, name + ".gguf"))).to(o.device)
        compiled = mode == "compiled"
        self.run = torch.compile(self.model, dynamic=False) if compiled else self.model
        groups = [{"params": [w for w in self.model.parameters() if w.dim() == n],
                   "weight_decay": 0.01 * (n - 1)} for n in (2, 1)]
        self.opt = torch.optim.AdamW(groups, lr=lr, **({"fused": True} if gpu else {}))
        ids = numpy.fromfile(os.path.join(o.folder, "ids.i32"), numpy.int32)
        self.ids, self.half = torch.from_numpy(ids).long().view(-1, b, t + 1).to(o.device), half

    def step(self, i):
        ids = self.ids[i % len(self.ids)]
        with torch.autocast("cuda" if gpu else "cpu", torch.bfloat16, enabled=self.half):
            loss = self.run(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad(set_to_none=False)
        return loss.item()


kept = {}  # of one shape, by mode
newest = None


def losses(name, b, t, steps, lr):
    kept.clear()
    run = Training(name, int(b), int(t), False, "eager", float(lr))
    found = [run.step(i) for i in range(int(steps))]
    numpy.array(found, numpy.float32).tofile(os.path.join(o.folder, "losses.f32"))
    return found[-1]


def step(name, b, t, mode, runs):
    global newest
    key = name, int(b), int(t), gpu, mode
    if key not in kept:
        newest = None  # what is freed later would be missing from the new one's peak
        for other in [k for k in kept if k[:3] != key[:3]]:
            del kept[other]
        gc.collect()
        newest = kept[key] = Training(*key, 1e-4)
    run = kept[key]
    begin = time.perf_counter()
    for i in range(int(runs)):
        run.step(i)
    return (time.perf_counter() - begin) / int(runs) * 1e9


def peak():
    return torch.cuda.max_memory_allocated() - newest.others


print(torch.__version__, torch.cuda.get_device_name() if gpu else "CPU", flush=True)
for line in sys.stdin:
    what, *rest = line.split()
    try:
        print("%.9g" % {"losses": losses, "step": step, "peak": peak}[what](*rest), flush=True)
    except Exception as e:
        print("no", str(e).replace("\n", " ")[:200], flush=True)
