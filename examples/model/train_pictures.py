#!/usr/bin/env python3
# Trains the shipped picture model, an autoencoder of TAESD's shape, with PyTorch on one GPU.
#
#   python3 train_pictures.py OUT
#
# The pictures are drawn on the GPU by pictures.py: nothing is read but this folder. Writes
# OUT/rocq-pictures.gguf (the decoder), OUT/latents.gguf (eight held-out pictures, encoded),
# OUT/sheet.png (those eight above what the written file makes of them) and OUT/pictures.pt.
import argparse
import copy
import json
import math
import os
import time

import numpy as np
import torch
import torch.nn.functional as F

import gguf
import pictures

Z, WIDTH = 4, 64
F32, F16, Q8_0 = 0, 1, 8  # tensor types in GGUF


# ---- model --------------------------------------------------------------------------------------


def conv(inputs, outputs, **options):
    return torch.nn.Conv2d(inputs, outputs, 3, padding=1, **options)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Sequential(conv(WIDTH, WIDTH), torch.nn.ReLU(), conv(WIDTH, WIDTH),
                                        torch.nn.ReLU(), conv(WIDTH, WIDTH))

    def forward(self, x):
        return torch.relu(self.conv(x) + x)


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = [conv(3, WIDTH), Block()]
        for _ in range(3):
            layers += [conv(WIDTH, WIDTH, stride=2, bias=False), Block(), Block(), Block()]
        self.layers = torch.nn.Sequential(*layers, conv(WIDTH, Z))

    def forward(self, x):
        return self.layers(x)


class Decoder(torch.nn.Module):
    """Latents near unit scale to RGB in [0, 1]. Names as in diffusers' AutoencoderTiny."""

    def __init__(self):
        super().__init__()
        layers = [conv(Z, WIDTH), torch.nn.ReLU()]
        for _ in range(3):
            layers += [Block(), Block(), Block(), torch.nn.Upsample(scale_factor=2),
                       conv(WIDTH, WIDTH, bias=False)]
        self.layers = torch.nn.Sequential(*layers, Block(), conv(WIDTH, 3))

    def forward(self, z):
        return self.layers(torch.tanh(z / 3) * 3)


def start(model):
    """Weights for a network without norms: He's, and residual branches that begin small."""
    for name, m in model.named_modules():
        if isinstance(m, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
            if m.bias is not None:
                torch.nn.init.zeros_(m.bias)
            if name.endswith("conv.4"):
                m.weight.data *= .2
    return model


# ---- files --------------------------------------------------------------------------------------


def pack(w):
    """(dims, type, bytes) of a parameter. Rows of whole blocks become Q8_0, channels last."""
    w = w.detach().float().cpu().contiguous()
    if w.ndim == 1:
        return w.shape, F32, w.numpy().astype("<f4").tobytes()
    outputs, inputs, kh, kw = w.shape
    if inputs * kh * kw % 32:
        return (kw, kh, inputs, outputs), F16, w.numpy().astype("<f2").tobytes()
    rows = w.permute(0, 2, 3, 1).reshape(-1, 32).numpy()
    scale = abs(rows).max(1, keepdims=True) / 127
    codes = np.rint(rows / np.maximum(scale, 1e-30)).astype("i1")
    blocks = np.concatenate([scale.astype("<f2").view("i1"), codes], 1)
    return (inputs * kh * kw, outputs), Q8_0, blocks.tobytes()


def unpack(shape, kind, raw):
    """What a reader gets back, as a tensor of that shape."""
    if kind != Q8_0:
        return torch.from_numpy(np.frombuffer(raw, "<f4" if kind == F32 else "<f2")
                                .astype(np.float32).reshape(shape))
    blocks = np.frombuffer(raw, "i1").reshape(-1, 34)
    rows = blocks[:, :2].copy().view("<f2").astype(np.float32) * blocks[:, 2:]
    outputs, inputs, kh, kw = shape
    return torch.from_numpy(rows.reshape(outputs, kh, kw, inputs)).permute(0, 3, 1, 2).contiguous()


def write_decoder(path, decoder, psnr):
    """Writes the file and returns the decoder that it holds."""
    told = ("Autoencoder of TAESD's shape: latents near unit scale to RGB in [0, 1]. Convolutions "
            "in block formats are [C * kw * kh, M], rows with channels innermost, then kw, then "
            "kh; others are [kw, kh, C, M].")
    rows = [("general.architecture", gguf.STRING, "taesd"),
            ("general.name", gguf.STRING, "rocq pictures"),
            ("general.description", gguf.STRING, told),
            ("general.file_type", gguf.U32, 7), ("general.alignment", gguf.U32, gguf.ALIGN),
            ("taesd.latent_channels", gguf.U32, Z), ("taesd.channels", gguf.U32, WIDTH),
            ("taesd.block_count", gguf.U32, 3), ("taesd.scale", gguf.U32, 8),
            ("taesd.image_size", gguf.U32, pictures.SIZE),
            ("taesd.block_layout", gguf.STRING, "channels-last"),
            ("taesd.heldout_psnr", gguf.F32, psnr)]
    tensors, read = [], copy.deepcopy(decoder).cpu().float()
    for name, w in read.state_dict().items():
        dims, kind, raw = pack(w)
        tensors.append(("decoder." + name, dims, kind, raw))
        w.copy_(unpack(w.shape, kind, raw))
    gguf.save(path, rows, tensors)
    return read


def write_latents(path, specs, z, psnr):
    titles = [pictures.title(s) for s in specs]
    rows = [("general.architecture", gguf.STRING, "latents"),
            ("general.name", gguf.STRING, "rocq pictures, held out"),
            ("general.alignment", gguf.U32, gguf.ALIGN),
            ("latents.count", gguf.U32, len(specs)),
            ("latents.index", gguf.ARRAY, list(pictures.SHOWN), gguf.U32),
            ("latents.title", gguf.ARRAY, titles, gguf.STRING),
            ("latents.psnr", gguf.ARRAY, psnr, gguf.F32)]
    gguf.save(path, rows, [("latent.%d" % k, (w.shape[2], w.shape[1], Z), F16,
                            w.cpu().contiguous().numpy().astype("<f2").tobytes())
                           for k, w in enumerate(z)])


# ---- pictures -----------------------------------------------------------------------------------


def draw_all(split, numbers, chunk):
    """[pictures, 3, size, size] on the device, 8 bits; those of the same parts together."""
    specs = [pictures.spec(split, i) for i in numbers]
    groups = {}
    for at, s in enumerate(specs):
        groups.setdefault((s.kind, s.shape, s.ground), []).append(at)
    out = None
    for which in groups.values():
        for k in range(0, len(which), chunk):
            some = which[k:k + chunk]
            drawn = pictures.draw([specs[at] for at in some])
            if out is None:
                out = drawn.new_empty((len(specs),) + tuple(drawn.shape[1:]))
            out[torch.tensor(some, device=out.device)] = drawn
    return out


def psnr(a, b):
    """Of 8-bit pictures against decoded ones (floats), each."""
    b = (b.float().clip(0, 1) * 255).round()
    return 10 * torch.log10(255 ** 2 / ((a.float() - b) ** 2).mean((1, 2, 3)).clip(min=1e-3))


@torch.no_grad()
def measure(encoder, decoder, held):
    return torch.cat([psnr(x, decoder(encoder(x.float() / 255))) for x in held.split(16)])


# ---- training -----------------------------------------------------------------------------------


def loss_of(encoder, decoder, x, half):
    """x: RGB in [0, 1]. L1 and MSE weigh about the same near the end; the differences of
    neighbouring pixels keep edges sharp; the last term keeps the latents near unit scale."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
        z = encoder(x)
        y = decoder(z)
    e, z = y.float() - x, z.float()
    loss = e.abs().mean() + 20 * (e * e).mean()
    loss = loss + .25 * (e.diff(dim=2).abs().mean() + e.diff(dim=3).abs().mean())
    mean, var = z.mean((0, 2, 3)), z.var((0, 2, 3))
    return loss + .01 * (mean ** 2 + var.clip(min=1e-6).log() ** 2).mean(), (e * e).mean()


class Trainer:
    """One optimizer step for a fixed shape of input, as a CUDA graph if there is a GPU."""

    def __init__(self, models, average, opt, batch, graph):
        self.models, self.average, self.opt = models, average, opt
        self.params = [p for m in models for p in m.parameters()]
        self.shadow = [p for m in average for p in m.parameters()]
        self.x = batch.contiguous(memory_format=torch.channels_last)
        self.half = batch.device.type == "cuda"
        self.mse, self.graph = None, None
        if graph:
            # Three real steps first: cuDNN chooses its kernels, the optimizer makes its state.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.run()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            self.opt.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run()

    def run(self):
        loss, mse = loss_of(*self.models, self.x, self.half)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.params, .5)
        self.opt.step()
        with torch.no_grad():
            torch._foreach_mul_(self.shadow, .998)
            torch._foreach_add_(self.shadow, self.params, alpha=.002)
        self.mse = mse.detach()

    def step(self, batch):
        self.x.copy_(batch)
        self.graph.replay() if self.graph else self.run()


def crops(data, count, size):
    """Random crops, half of them mirrored, as floats."""
    device = data.device
    which = torch.randint(len(data), (count, 1, 1), device=device)
    y, x = torch.randint(data.shape[2] - size + 1, (2, count, 1), device=device)
    span = torch.arange(size, device=device)
    x = x + torch.where(torch.rand(count, 1, device=device) < .5, span, size - 1 - span)
    rgb = data.permute(0, 2, 3, 1)[which, (y + span)[:, :, None], x[:, None, :]]
    return rgb.permute(0, 3, 1, 2).float() / 255


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("out")
    ap.add_argument("--pictures", type=int, default=24576)
    ap.add_argument("--batch", type=int, default=32, help="crops; a fourth as many pictures")
    ap.add_argument("--crop", type=int, default=128)
    ap.add_argument("--whole-from", type=float, default=.75, help="then whole pictures, not crops")
    ap.add_argument("--lr", type=float, default=7e-4)
    ap.add_argument("--warm", type=int, default=300, help="steps until the full rate")
    ap.add_argument("--limit", type=float, default=280, help="seconds in all")
    ap.add_argument("--held", type=int, default=64)
    ap.add_argument("--eager", action="store_true", help="no CUDA graph")
    args = ap.parse_args()
    began = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    pictures.use_torch(device)
    chunk = 128 if device == "cuda" else 8
    data = draw_all("train", range(args.pictures), chunk)
    held = draw_all("heldout", range(args.held), chunk)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    print("drawn: %d pictures, %.1f s" % (len(data) + len(held), time.time() - began), flush=True)

    models = [start(Encoder()), start(Decoder())]
    models[1].layers[-1].bias.data.fill_(.4)
    models = [m.to(device, memory_format=torch.channels_last) for m in models]
    average = [copy.deepcopy(m).requires_grad_(False) for m in models]
    rate = torch.tensor(0.0, device=device) if device == "cuda" else 0.0
    options = {"fused": True, "capturable": True} if device == "cuda" else {}
    opt = torch.optim.Adam([p for m in models for p in m.parameters()], lr=rate, betas=(.9, .98),
                           eps=1e-8, **options)
    graph = device == "cuda" and not args.eager
    count, size = args.batch, args.crop
    trainer = Trainer(models, average, opt, crops(data, count, size), graph)
    reserve = 6 if device == "cuda" else 3  # for the last measurements and the files
    first, whole, step, mean, log, told = time.time(), False, 0, None, [], 0.0
    limit = began + args.limit - reserve
    while True:
        if step % (20 if device == "cuda" else 2) == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            now = time.time()
            if now >= limit:
                break
            done = (now - first) / (limit - first)
            lr = args.lr * (.4975 * (1 + math.cos(math.pi * done)) + .005)
            lr *= min(1.0, step / args.warm + .02)
            for g in opt.param_groups:
                if torch.is_tensor(g["lr"]):
                    g["lr"].fill_(lr)
                else:
                    g["lr"] = lr
            if done >= args.whole_from and not whole:
                whole = True
                count, size = max(args.batch // 4, 1), pictures.SIZE
                trainer = Trainer(models, average, opt, crops(data, count, size), graph)
            if now - told > (15 if device == "cuda" else 60):
                told = now
                if mean is not None and not math.isfinite(float(mean)):
                    raise SystemExit("the loss is no number any more")
                p = measure(*average, held)
                log.append((step, round(now - began, 1), round(p.mean().item(), 3)))
                print("step %d  %.0f s  held out %.2f dB (worst %.2f)  training %.2f dB  lr %.1e" %
                      (step, now - began, p.mean(), p.min(),
                       -10 * math.log10(max(float(mean), 1e-9)) if mean is not None else 0, lr),
                      flush=True)
        trainer.step(crops(data, count, size))
        mean = trainer.mse.clone() if mean is None else mean * .98 + trainer.mse * .02
        step += 1
    trained = time.time() - first

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    encoder, decoder = average
    final = measure(encoder, decoder, held)
    path = os.path.join(args.out, "rocq-pictures.gguf")
    read = write_decoder(path, decoder, final.mean().item()).to(device)
    packed = measure(encoder, read, held)
    specs = [pictures.spec("heldout", i) for i in pictures.SHOWN]
    shown = draw_all("heldout", pictures.SHOWN, chunk)
    with torch.no_grad():
        z = encoder(shown.float() / 255).half().float()
        decoded = read(z)
    each = psnr(shown, decoded).tolist()
    write_latents(os.path.join(args.out, "latents.gguf"), specs, z, each)
    bytes_ = (decoded.clip(0, 1) * 255).round().to(torch.uint8)
    both = list(shown.cpu().numpy()) + list(bytes_.cpu().numpy())
    pictures.png(os.path.join(args.out, "sheet.png"), pictures.sheet(both, len(specs)))
    torch.save({"encoder": encoder.state_dict(), "decoder": decoder.state_dict()},
               os.path.join(args.out, "pictures.pt"))
    kinds = {}
    for i, p in enumerate(packed.tolist()):
        kinds.setdefault(pictures.spec("heldout", i).kind, []).append(p)
    result = {"steps": step, "train_seconds": trained, "pictures": len(data), "log": log,
              "parameters": [sum(p.numel() for p in m.parameters()) for m in average],
              "heldout_psnr_f32": final.mean().item(), "heldout_psnr_file": packed.mean().item(),
              "worst": packed.min().item(), "shown": dict(zip(map(pictures.title, specs), each)),
              "kinds": {k: sum(v) / len(v) for k, v in kinds.items()},
              "latent_mean": z.mean((0, 2, 3)).tolist(), "latent_std": z.std((0, 2, 3)).tolist(),
              "latent_largest": z.abs().max().item(), "bytes": os.path.getsize(path),
              "seconds": time.time() - began}
    with open(os.path.join(args.out, "pictures.json"), "w") as f:
        json.dump(result, f, indent=1)
    print(json.dumps(result, indent=1), flush=True)


if __name__ == "__main__":
    main()
