"""Writes operands and PyTorch's results for tests/test_pictures.c: pictures.py FILE.

Of each case 16 int32 (kind, taps w h t, stride, upsample, pads, groups, activations), then the
tensors in channels-last order with four sizes before each, but the weights as PyTorch has them.
"""
import struct
import sys

import torch
from torch.nn import functional as F

ACTIVATIONS = [lambda x: x, F.silu, lambda x: F.gelu(x, approximate="tanh"), F.gelu, F.relu,
               torch.tanh]


def write_tensor(out, t):
    """t: [N, H, W, C], or [C]"""
    t = t.reshape((1,) * (4 - t.dim()) + tuple(t.shape))
    out.write(struct.pack("4i", *t.shape) + t.contiguous().numpy().tobytes())


def channels_last(t):
    """[N, C, H, W], or a video [1, C, T, H, W]"""
    return t[0].permute(1, 2, 3, 0) if t.dim() == 5 else t.permute(0, 2, 3, 1)


def conv(out, c, m, size, taps, stride=1, upsample=1, down=False, groups=0, x_act=0, act=0):
    kw, kh, kt = taps
    w, h, n = size
    video = kt > 1
    x = torch.randn((1, c, n, h, w) if video else (n, c, h, w)) + (0.5 if groups else 0)
    weights = torch.randn((m, c, kt, kh, kw) if video else (m, c, kh, kw))
    weights /= (c * kw * kh * kt) ** 0.5
    bias, gain, shift = torch.randn(m), torch.randn(c), torch.randn(c)
    z = x
    if groups:
        frames = z[0].permute(1, 0, 2, 3) if video else z
        frames = F.group_norm(frames, groups, gain, shift, 1e-5)
        z = frames.permute(1, 0, 2, 3)[None] if video else frames
    z = ACTIVATIONS[x_act](z)
    if upsample == 2:
        z = F.interpolate(z, scale_factor=(1, 2, 2) if video else 2, mode="nearest")
    pads = (0, 1, 0, 1) if down else (kw // 2, kw // 2, kh // 2, kh // 2)
    if video:
        y = F.conv3d(F.pad(z, pads + (kt - 1, 0)), weights, bias, (1, stride, stride))
    else:
        y = F.conv2d(F.pad(z, pads), weights, bias, stride)
    y = ACTIVATIONS[act](y)
    pad = -1 if down else 0
    out.write(struct.pack("16i", 0, kw, kh, kt, stride, upsample, pad, pad, groups, x_act, act,
                          0, 0, 0, 0, 0))
    write_tensor(out, channels_last(x))
    write_tensor(out, channels_last(y))
    out.write(weights.contiguous().numpy().tobytes())
    for t in (bias, gain, shift):
        write_tensor(out, t)


def resize(out, c, size, new_size, mode):
    x = torch.randn(2, c, size[1], size[0])
    options = {"align_corners": False} if mode == "bilinear" else {}
    y = F.interpolate(x, (new_size[1], new_size[0]), mode=mode, **options)
    out.write(struct.pack("16i", 1, int(mode == "bilinear"), *[0] * 14))
    write_tensor(out, channels_last(x))
    write_tensor(out, channels_last(y))


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    with open(sys.argv[1], "wb") as out:
        for taps in ((1, 1, 1), (3, 3, 1), (5, 5, 1), (7, 7, 1), (1, 7, 1), (7, 1, 1), (3, 5, 1),
                     (3, 3, 3), (1, 1, 3)):
            conv(out, 24, 20, (19, 13, 3), taps)
            conv(out, 8, 3, (21, 10, 2), taps, groups=4, x_act=1, act=4)
        conv(out, 16, 32, (23, 18, 2), (3, 3, 1), stride=2, down=True)
        conv(out, 16, 17, (24, 17, 2), (3, 3, 1), stride=2)
        conv(out, 32, 16, (15, 9, 2), (3, 3, 1), upsample=2, groups=32, x_act=1)
        conv(out, 12, 6, (9, 8, 5), (3, 3, 3), upsample=2, groups=3, x_act=1)
        conv(out, 4, 64, (31, 30, 1), (3, 3, 1))
        for act in range(6):
            conv(out, 10, 33, (11, 12, 1), (3, 3, 1), x_act=act, act=5 - act)
        for new_size in ((38, 22), (40, 9), (13, 30), (10, 6)):
            resize(out, 5, (19, 11), new_size, "nearest")
            resize(out, 5, (19, 11), new_size, "bilinear")


main()
