#!/usr/bin/env python3
# Small autoencoders with random weights, what PyTorch makes of them in float64, and files for
# tests/test_vae.c to compare with:
#
#     python3 tests/vae.py FOLDER
#
# NAME.safetensors has the weights under ldm's names (TAESD and Wan: their own),
# NAME-diffusers.safetensors under diffusers', and NAME-io.safetensors latents, pictures, and what
# becomes of them.
import json
import os
import re
import struct
import sys

import torch
import torch.nn.functional as F

torch.manual_seed(1)
torch.set_num_threads(1)
GROUPS = 4


def save(path, tensors, dtypes=None, metadata=None):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, t in tensors.items():
        kind = (dtypes or {}).get(name, "F32")
        t = t.detach().contiguous()
        if kind == "F32":
            raw = t.to(torch.float32).numpy().tobytes()
        elif kind == "F16":
            raw = t.to(torch.float16).numpy().tobytes()
        else:
            raw = t.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
        header[name] = {"dtype": kind, "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    # Under its name a file is whole at any time: another test may be reading one of an earlier run.
    part = f"{path}.{os.getpid()}"
    with open(part, "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head + data)
    os.replace(part, path)


class Weights(dict):
    """Drawn as they are asked for, and rounded to F32, so that the file has the same."""

    def conv(self, name, c, m, k=3, kt=None, bias=True, gain=1.0):
        shape = (m, c, k, k) if kt is None else (m, c, kt, k, k)
        fan = c * k * k * (kt or 1)
        self[name + ".weight"] = (torch.randn(shape) * gain / fan ** .5).double()
        if bias:
            self[name + ".bias"] = (torch.randn(m) * .1).double()

    def norm(self, name, c, bias=True, shape=None):
        self[name + ".weight" if bias else name + ".gamma"] = (1 + .2 * torch.randn(shape or (c,))).double()
        if bias:
            self[name + ".bias"] = (torch.randn(c) * .2).double()


# ---- AutoencoderKL ------------------------------------------------------------------------------


def kl_resnet(w, name, c, m):
    w.norm(name + ".norm1", c)
    w.conv(name + ".conv1", c, m)
    w.norm(name + ".norm2", m)
    w.conv(name + ".conv2", m, m)
    if c != m:
        w.conv(name + ".nin_shortcut", c, m, 1)


def kl_middle(w, half, c):
    kl_resnet(w, half + ".mid.block_1", c, c)
    w.norm(half + ".mid.attn_1.norm", c)
    for part in "q", "k", "v", "proj_out":
        w.conv(half + ".mid.attn_1." + part, c, c, 1)
    kl_resnet(w, half + ".mid.block_2", c, c)


def kl_weights(base, mults, blocks, z, quant, encoder):
    w, top = Weights(), base * mults[-1]
    if quant:
        w.conv("post_quant_conv", z, z, 1)
    w.conv("decoder.conv_in", z, top)
    kl_middle(w, "decoder", top)
    c = top
    for level in reversed(range(len(mults))):
        for i in range(blocks + 1):
            kl_resnet(w, "decoder.up.%d.block.%d" % (level, i), c, base * mults[level])
            c = base * mults[level]
        if level > 0:
            w.conv("decoder.up.%d.upsample.conv" % level, c, c)
    w.norm("decoder.norm_out", c)
    w.conv("decoder.conv_out", c, 3)
    if not encoder:
        return w
    w.conv("encoder.conv_in", 3, base)
    c = base
    for level in range(len(mults)):
        for i in range(blocks):
            kl_resnet(w, "encoder.down.%d.block.%d" % (level, i), c, base * mults[level])
            c = base * mults[level]
        if level < len(mults) - 1:
            w.conv("encoder.down.%d.downsample.conv" % level, c, c)
    kl_middle(w, "encoder", c)
    w.norm("encoder.norm_out", c)
    w.conv("encoder.conv_out", c, 2 * z)
    if quant:
        w.conv("quant_conv", 2 * z, 2 * z, 1)
    return w


class Kl:
    def __init__(self, w, groups=GROUPS):
        self.w, self.groups = w, groups

    def conv(self, name, x, **how):
        weight = self.w[name + ".weight"]
        how.setdefault("padding", weight.shape[-1] // 2)
        return F.conv2d(x, weight, self.w.get(name + ".bias"), **how)

    def norm(self, name, x):
        return F.group_norm(x, self.groups, self.w[name + ".weight"], self.w[name + ".bias"], 1e-6)

    def resnet(self, name, x):
        h = self.conv(name + ".conv1", F.silu(self.norm(name + ".norm1", x)))
        h = self.conv(name + ".conv2", F.silu(self.norm(name + ".norm2", h)))
        return h + (self.conv(name + ".nin_shortcut", x) if name + ".nin_shortcut.weight" in self.w else x)

    def attention(self, name, x):
        h = self.norm(name + ".norm", x)
        q, k, v = [self.conv(name + "." + p, h).flatten(2).transpose(1, 2) for p in "qkv"]
        p = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** .5, -1)
        return x + self.conv(name + ".proj_out", (p @ v).transpose(1, 2).reshape(x.shape))

    def middle(self, half, x):
        x = self.resnet(half + ".mid.block_1", x)
        return self.resnet(half + ".mid.block_2", self.attention(half + ".mid.attn_1", x))

    def decode(self, z):
        if "post_quant_conv.weight" in self.w:
            z = self.conv("post_quant_conv", z)
        x = self.middle("decoder", self.conv("decoder.conv_in", z))
        levels = 1 + max(int(n.split(".")[2]) for n in self.w if n.startswith("decoder.up."))
        for level in reversed(range(levels)):
            i = 0
            while "decoder.up.%d.block.%d.conv1.weight" % (level, i) in self.w:
                x = self.resnet("decoder.up.%d.block.%d" % (level, i), x)
                i += 1
            if level > 0:
                x = self.conv("decoder.up.%d.upsample.conv" % level, F.interpolate(x, scale_factor=2.0))
        return self.conv("decoder.conv_out", F.silu(self.norm("decoder.norm_out", x)))

    def encode(self, x):
        x = self.conv("encoder.conv_in", x)
        level = 0
        while "encoder.down.%d.block.0.conv1.weight" % level in self.w:
            i = 0
            while "encoder.down.%d.block.%d.conv1.weight" % (level, i) in self.w:
                x = self.resnet("encoder.down.%d.block.%d" % (level, i), x)
                i += 1
            if "encoder.down.%d.downsample.conv.weight" % level in self.w:
                x = self.conv("encoder.down.%d.downsample.conv" % level, F.pad(x, (0, 1, 0, 1)),
                              stride=2, padding=0)
            level += 1
        x = self.middle("encoder", x)
        x = self.conv("encoder.conv_out", F.silu(self.norm("encoder.norm_out", x)))
        if "quant_conv.weight" in self.w:
            x = self.conv("quant_conv", x)
        return x[:, :x.shape[1] // 2]


def kl_diffusers(w):
    levels = 1 + max(int(n.split(".")[2]) for n in w if n.startswith("decoder.up."))
    out = {}
    for name, t in w.items():
        def up(match):
            return "decoder.up_blocks.%d.%s" % (levels - 1 - int(match[1]), match[2])
        new = re.sub(r"^decoder\.up\.(\d+)\.(.*)", up, name)
        new = re.sub(r"^encoder\.down\.", "encoder.down_blocks.", new)
        new = new.replace(".block.", ".resnets.").replace(".upsample.", ".upsamplers.0.")
        new = new.replace(".downsample.", ".downsamplers.0.").replace(".mid.block_1.", ".mid_block.resnets.0.")
        new = new.replace(".mid.block_2.", ".mid_block.resnets.1.")
        new = new.replace(".mid.attn_1.norm.", ".mid_block.attentions.0.group_norm.")
        new = re.sub(r"\.mid\.attn_1\.([qkv])\.", r".mid_block.attentions.0.to_\1.", new)
        new = new.replace(".mid.attn_1.proj_out.", ".mid_block.attentions.0.to_out.0.")
        new = new.replace("nin_shortcut", "conv_shortcut").replace("norm_out", "conv_norm_out")
        if "attentions" in new and t.dim() == 4:
            t = t[:, :, 0, 0]  # linear layers
        out[new] = t
    return out


# ---- TAESD --------------------------------------------------------------------------------------


def taesd_weights(width, z, blocks=2):
    w = Weights()

    def block(name):
        for i in 0, 2, 4:
            w.conv("%s.conv.%d" % (name, i), width, width, gain=.8 if i == 4 else 1.4)

    w.conv("decoder.layers.0", z, width)
    n = 2
    for _ in range(3):
        for _ in range(blocks):
            block("decoder.layers.%d" % n)
            n += 1
        w.conv("decoder.layers.%d" % (n + 1), width, width, bias=False)
        n += 2
    block("decoder.layers.%d" % n)
    w.conv("decoder.layers.%d" % (n + 1), width, 3)
    w.conv("encoder.layers.0", 3, width)
    block("encoder.layers.1")
    n = 2
    for _ in range(3):
        w.conv("encoder.layers.%d" % n, width, width, bias=False)
        block("encoder.layers.%d" % (n + 1))
        n += 2
    w.conv("encoder.layers.%d" % n, width, z)
    return w


def taesd_run(w, half, x):
    decoder = half == "decoder"
    if decoder:
        x = 3 * torch.tanh(x / 3)
    last = max(int(n.split(".")[2]) for n in w if n.startswith(half))
    for i in range(last + 1):
        name = "%s.layers.%d" % (half, i)
        if name + ".weight" in w:
            resample = name + ".bias" not in w
            if resample and decoder:
                x = F.interpolate(x, scale_factor=2.0)
            x = F.conv2d(x, w[name + ".weight"], w.get(name + ".bias"), padding=1,
                         stride=2 if resample and not decoder else 1)
            x = torch.relu(x) if decoder and i == 0 else x
        elif name + ".conv.0.weight" in w:
            h = x
            for j in 0, 2, 4:
                h = F.conv2d(h, w["%s.conv.%d.weight" % (name, j)], w["%s.conv.%d.bias" % (name, j)], padding=1)
                h = torch.relu(h) if j < 4 else h
            x = torch.relu(h + x)
    return x


def taesd_own(w):
    """TAESD's own files count the clamp in front of the decoder's first convolution."""
    return {re.sub(r"^(\w+)\.layers\.(\d+)",
                   lambda k: "%s.%d" % (k[1], int(k[2]) + (k[1] == "decoder")), name): t
            for name, t in w.items()}


# ---- Wan 2.1 ------------------------------------------------------------------------------------


def wan_weights(dim, mults, blocks, z, time_up):
    """Under Wan's own names."""
    w = Weights()

    def resnet(name, c, m):
        w.norm(name + ".residual.0", c, False, (c, 1, 1, 1))
        w.conv(name + ".residual.2", c, m, 3, 3)
        w.norm(name + ".residual.3", m, False, (m, 1, 1, 1))
        w.conv(name + ".residual.6", m, m, 3, 3)
        if c != m:
            w.conv(name + ".shortcut", c, m, 1, 1)

    dims = [dim * m for m in [mults[-1]] + mults[::-1]]
    w.conv("conv2", z, z, 1, 1)
    w.conv("decoder.conv1", z, dims[0], 3, 3)
    resnet("decoder.middle.0", dims[0], dims[0])
    w.norm("decoder.middle.1.norm", dims[0], False, (dims[0], 1, 1))
    w.conv("decoder.middle.1.to_qkv", dims[0], 3 * dims[0], 1)
    w.conv("decoder.middle.1.proj", dims[0], dims[0], 1)
    resnet("decoder.middle.2", dims[0], dims[0])
    n = 0
    for level, (c, m) in enumerate(zip(dims[:-1], dims[1:])):
        c = c // 2 if level > 0 else c
        for _ in range(blocks + 1):
            resnet("decoder.upsamples.%d" % n, c, m)
            c, n = m, n + 1
        if level < len(mults) - 1:
            w.conv("decoder.upsamples.%d.resample.1" % n, m, m // 2)
            if time_up[level]:
                w.conv("decoder.upsamples.%d.time_conv" % n, m, 2 * m, 1, 3)
            n += 1
    w.norm("decoder.head.0", dims[-1], False, (dims[-1], 1, 1, 1))
    w.conv("decoder.head.2", dims[-1], 3, 3, 3)
    return w


class Wan:
    """Latent frame by latent frame, as Wan's own code goes: each convolution in time keeps its last inputs."""

    def __init__(self, w):
        self.w, self.cache = w, {}

    def conv3(self, name, x):
        weight = self.w[name + ".weight"]
        kt, k = weight.shape[2], weight.shape[-1]
        x = torch.cat([self.cache[name], x], 2) if name in self.cache else x
        if kt > 1:
            self.cache[name] = x[:, :, -(kt - 1):]
        missing = kt - 1 - (x.shape[2] - self.new)
        return F.conv3d(F.pad(x, (k // 2, k // 2, k // 2, k // 2, missing, 0)), weight, self.w[name + ".bias"])

    def conv2(self, name, x):
        weight = self.w[name + ".weight"]
        frames = [F.conv2d(x[:, :, i], weight, self.w[name + ".bias"], padding=weight.shape[-1] // 2)
                  for i in range(x.shape[2])]
        return torch.stack(frames, 2)

    def norm(self, name, x):
        gamma = self.w[name + ".gamma"].reshape(1, -1, 1, 1, 1)
        return F.normalize(x, dim=1) * x.shape[1] ** .5 * gamma

    def resnet(self, name, x):
        h = self.conv3(name + ".shortcut", x) if name + ".shortcut.weight" in self.w else x
        x = self.conv3(name + ".residual.2", F.silu(self.norm(name + ".residual.0", x)))
        return h + self.conv3(name + ".residual.6", F.silu(self.norm(name + ".residual.3", x)))

    def attention(self, name, x):
        qkv = self.conv2(name + ".to_qkv", self.norm(name + ".norm", x))
        out = []
        for i in range(x.shape[2]):
            q, k, v = qkv[:, :, i].flatten(2).transpose(1, 2).chunk(3, -1)
            p = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** .5, -1)
            out.append((p @ v).transpose(1, 2).reshape(x[:, :, i].shape))
        return x + self.conv2(name + ".proj", torch.stack(out, 2))

    def frame(self, z, first):
        self.new = 1
        x = self.conv3("decoder.conv1", z)
        x = self.resnet("decoder.middle.0", x)
        x = self.resnet("decoder.middle.2", self.attention("decoder.middle.1", x))
        for n in range(1 + max(int(k.split(".")[2]) for k in self.w if ".upsamples." in k)):
            name = "decoder.upsamples.%d" % n
            if name + ".residual.2.weight" in self.w:
                x = self.resnet(name, x)
                continue
            if name + ".time_conv.weight" in self.w and not first:
                y = self.conv3(name + ".time_conv", x)
                b, c, t, h, wd = y.shape
                x = torch.stack((y[:, :c // 2], y[:, c // 2:]), 3).reshape(b, c // 2, 2 * t, h, wd)
                self.new = 2 * self.new
            x = F.interpolate(x, scale_factor=(1, 2, 2))
            x = self.conv2(name + ".resample.1", x)
        return self.conv3("decoder.head.2", F.silu(self.norm("decoder.head.0", x)))

    def decode(self, z):
        self.new = z.shape[2]
        z = self.conv3("conv2", z)
        self.cache = {}
        return torch.cat([self.frame(z[:, :, i:i + 1], i == 0) for i in range(z.shape[2])], 2)


def wan_diffusers(w, blocks):
    out = {}
    for name, t in w.items():
        new = re.sub(r"^conv2\.", "post_quant_conv.", name)
        new = new.replace("decoder.conv1.", "decoder.conv_in.")
        for old, to in (("middle.0", "mid_block.resnets.0"), ("middle.1", "mid_block.attentions.0"),
                        ("middle.2", "mid_block.resnets.1"), ("head.0", "norm_out"), ("head.2", "conv_out")):
            new = new.replace("decoder.%s." % old, "decoder.%s." % to)
        match = re.match(r"decoder\.upsamples\.(\d+)\.(.*)", new)
        if match:
            level, i = divmod(int(match[1]), blocks + 2)
            part = "upsamplers.0" if i == blocks + 1 else "resnets.%d" % i
            new = "decoder.up_blocks.%d.%s.%s" % (level, part, match[2])
        for old, to in (("residual.0", "norm1"), ("residual.2", "conv1"), ("residual.3", "norm2"),
                        ("residual.6", "conv2"), ("shortcut", "conv_shortcut")):
            new = new.replace(".%s." % old, ".%s." % to)
        out[new] = t
    return out


# -------------------------------------------------------------------------------------------------


def main(folder):
    def path(name):
        return os.path.join(folder, name + ".safetensors")

    def picture(n, h, w):
        return torch.rand(n, 3, h, w).double()

    with torch.no_grad():
        for name, base, mults, blocks, z, quant, groups, size, n in (
                ("sd", 8, (1, 2, 4, 4), 2, 4, True, GROUPS, (7, 5), 2),
                ("flux", 8, (1, 2, 2), 1, 16, False, GROUPS, (5, 9), 1),
                ("wide", 32, (1, 1), 1, 4, True, 32, (5, 3), 1),
                ("large", 8, (1, 2), 1, 4, False, GROUPS, (33, 45), 1)):
            w = kl_weights(base, mults, blocks, z, quant, True)
            model = Kl(w, groups)
            latents = torch.randn(n, z, *size).double()
            scale, shift = {4: (0.18215, 0), 16: (0.3611, 0.1159)}[z]
            factor = 2 ** (len(mults) - 1)
            pictures = picture(n, size[0] * factor, size[1] * factor)
            io = {"latents": latents, "out": model.decode(latents / scale + shift) * .5 + .5,
                  "picture": pictures.permute(0, 2, 3, 1), "mean": (model.encode(pictures * 2 - 1) - shift) * scale}
            io["out"] = io["out"].permute(0, 2, 3, 1)
            save(path(name), {"first_stage_model." + k if name == "sd" else k: v for k, v in w.items()})
            save(path(name + "-diffusers"), kl_diffusers(w), metadata={"format": "pt"})
            save(path(name + "-io"), io)
            if name == "sd":  # 16 bits, and rounded weights for the reference too
                for kind, dtype in ("F16", torch.float16), ("BF16", torch.bfloat16):
                    r = Weights({k: v.to(dtype).double() if v.dim() > 1 else v for k, v in w.items()})
                    save(path("sd-" + kind), r, {k: kind for k in r if r[k].dim() > 1})
                    save(path("sd-%s-io" % kind), {"latents": latents, "out": (
                        Kl(r).decode(latents / scale) * .5 + .5).permute(0, 2, 3, 1)})
                # what the blocks add up leaves F16, as SDXL's does, and the norms bring it back
                r = Weights(w)
                for k in r:
                    if re.match(r"decoder\.(up|mid).*(conv2|nin_shortcut|proj_out)\.", k) or "decoder.conv_in" in k:
                        r[k] = (r[k] * 2e4 if "nin_shortcut.weight" not in k else r[k]).float().double()
                save(path("sdxl"), r)
                save(path("sdxl-io"), {"latents": latents, "out": (
                    Kl(r).decode(latents / 0.13025) * .5 + .5).permute(0, 2, 3, 1)})
        w = taesd_weights(12, 4)
        latents, pictures = 2 * torch.randn(2, 4, 6, 9).double(), picture(2, 48, 72)
        save(path("taesd"), taesd_own(w))
        save(path("taesd-diffusers"), w)
        save(path("taesd-io"), {"latents": latents, "out": taesd_run(w, "decoder", latents).permute(0, 2, 3, 1),
                                "picture": pictures.permute(0, 2, 3, 1), "mean": taesd_run(w, "encoder", pictures)})
        w = wan_weights(4, [1, 2, 4, 4], 1, 16, [True, True, False])
        mean = [-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
                0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921]
        std = [2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
               3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160]
        mean, std = [torch.tensor(v).double().reshape(1, 16, 1, 1, 1) for v in (mean, std)]
        latents = torch.randn(2, 16, 5, 4, 3).double()
        out = torch.cat([Wan(w).decode(latents[i:i + 1] * std + mean) for i in range(2)])
        save(path("wan"), w)
        save(path("wan-diffusers"), wan_diffusers(w, 1))
        save(path("wan-io"), {"latents": latents, "out": (out * .5 + .5).permute(0, 2, 3, 4, 1)})


if __name__ == "__main__":
    main(sys.argv[1])
