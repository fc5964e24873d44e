"""PyTorch as the peer of bench/vae.c: makes random weights, decodes with them, and times single
convolutions.

Started by bench/vae.c with --device cpu|cuda --threads N --folder DIR. Reads a line, does what it
says, and answers with a line: nanoseconds of one run, or "no" and the reason. Models and weights
are those that tests/vae.py checks examples/vae.h with, at their published widths.

    make MODEL                                 DIR/MODEL.safetensors: random weights, in F16
    decode MODEL W H T N MODE RUNS             DIR/latents.f32 [N, z, T, H, W] to bytes on the host,
                                               RUNS times; 0: once in F32, with the same weights,
                                               and its values go to DIR/values.f32. MODE: eager or
                                               compiled
    conv C M K SIZE UP MODE RUNS               GroupNorm, SiLU, convolution over SIZE x SIZE after
                                               UP times
"""
import argparse
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests"))
import numpy  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import vae  # noqa: E402

p = argparse.ArgumentParser()
p.add_argument("--device", default="cpu")
p.add_argument("--threads", type=int, default=0)
p.add_argument("--folder", default="/tmp")
o = p.parse_args()
gpu = o.device == "cuda"
if o.threads:
    torch.set_num_threads(o.threads)
torch.backends.cudnn.benchmark = True
torch.backends.cudnn.allow_tf32 = False  # what is computed in F32 is a reference
torch.backends.cuda.matmul.allow_tf32 = False
dtype = torch.float16 if gpu else torch.float32
weights, models, compiled, convs = {}, {}, {}, {}


def wait():
    if gpu:
        torch.cuda.synchronize()


def here(t):
    t = t.to(o.device, dtype)
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


class Kl(vae.Kl):
    def attention(self, name, x):  # by PyTorch's fused kernel, as diffusers calls it
        h = self.norm(name + ".norm", x)
        q, k, v = [self.conv(name + "." + p, h).flatten(2).transpose(1, 2)[:, None] for p in "qkv"]
        y = F.scaled_dot_product_attention(q, k, v)[:, 0]
        return x + self.conv(name + ".proj_out", y.transpose(1, 2).reshape(x.shape))


def make(name):
    torch.manual_seed(1)  # the same weights whatever else is measured
    made = {"sdxl": lambda: vae.kl_weights(128, (1, 2, 4, 4), 2, 4, True, False),
            "taesd": lambda: {k: t for k, t in vae.taesd_weights(64, 4, 3).items()
                              if "decoder" in k},
            "wan": lambda: vae.wan_weights(96, [1, 2, 4, 4], 2, 16, (True, True, False))}[name]()
    vae.save(os.path.join(o.folder, name + ".safetensors"), made, {k: "F16" for k in made})
    weights[name] = {k: here(t.half()) for k, t in made.items()}
    models[name] = network(name, weights[name])
    return 0


def network(name, w):
    return {"sdxl": lambda: Kl(w, 32).decode,
            "taesd": lambda: lambda z: vae.taesd_run(w, "decoder", z),
            "wan": lambda: lambda z: vae.Wan(w).decode(z)}[name]()


def decoder(name, mode):
    if mode == "eager":
        return models[name]
    if name not in compiled:
        compiled[name] = torch.compile(models[name])
    return compiled[name]


def decode(name, w, h, t, n, mode, runs):
    w, h, t, n = int(w), int(h), int(t), int(n)
    z = torch.from_numpy(numpy.fromfile(os.path.join(o.folder, "latents.f32"), numpy.float32))
    z = z.reshape(n, -1, t, h, w) if name == "wan" else z.reshape(n, -1, h, w)
    run = decoder(name, mode)
    scale, bias = (1, 0) if name == "taesd" else (0.5, 0.5)

    def once():
        y = run(here(z)).float() * scale + bias
        return (y.clamp(0, 1) * 255).round().to(torch.uint8).cpu()

    with torch.no_grad():
        if int(runs) == 0:
            exact = network(name, {k: t.float() for k, t in weights[name].items()})
            y = exact(z.to(o.device)) * scale + bias
            y.cpu().contiguous().numpy().tofile(os.path.join(o.folder, "values.f32"))
            return 0
        wait()
        begin = time.perf_counter()
        for _ in range(int(runs)):
            once()
        wait()
    return (time.perf_counter() - begin) / int(runs)


def conv(c, m, k, size, up, mode, runs):
    c, m, k, size, up = int(c), int(m), int(k), int(size), int(up)
    key = (c, m, k, size, up)
    if key not in convs:
        convs.clear()
        convs[key] = (here(torch.randn(1, c, size, size)),
                      here(torch.randn(m, c, k, k) / (c * k * k) ** .5),
                      here(torch.randn(m)), here(torch.randn(c)), here(torch.randn(c)))
    x, w, b, g, s = convs[key]

    def once():
        z = F.silu(F.group_norm(x, 32, g, s, 1e-6)) if c % 32 == 0 and not up > 1 else x
        return F.conv2d(F.interpolate(z, scale_factor=up) if up > 1 else z, w, b, padding=k // 2)

    with torch.no_grad():
        wait()
        begin = time.perf_counter()
        for _ in range(int(runs)):
            once()
        wait()
    return (time.perf_counter() - begin) / int(runs)


print(torch.__version__, torch.cuda.get_device_name() if gpu else "CPU", flush=True)
for line in sys.stdin:
    what, *rest = line.split()
    try:
        print("%.1f" % ({"make": make, "decode": decode, "conv": conv}[what](*rest) * 1e9),
              flush=True)
    except Exception as e:
        print("no", str(e).replace("\n", " ")[:200], flush=True)
