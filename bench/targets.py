"""What rocq is to reach on RDNA3, and what is expected there: the block "targets" of bench/report.

No AMD GPU was measured. An expectation is made of three things, each with an interval that says
how far it is known, and the table gives the slowest and the fastest of all combinations:

    step    = bytes / (bandwidth * reach * stream) with lane-cycles / lanes + launches * fixed
    prompt  = flops / (peak of the matrix unit * share) + launches * fixed
    used    = of the time of one product, what bytes / (bandwidth * reach) is

- stream, fixed: of the same kernels on the GPU that was measured. The time of a decode product of
  two sizes gives both: what it takes whatever its size (fixed), and the share of the measured
  bandwidth at which the rest goes by (stream). Slowest and fastest of the formats; on RDNA3 fixed
  may be twice as much.
- reach: of the specified bandwidth, what any kernel reads.
- lane-cycles of a weight and share of the matrix unit: counted on gfx1100 machine code
  (gfx1100.md). Slowest: nothing overlaps with memory, and the matrix unit is used as on the
  measured GPU. Fastest: all of it does, and nothing but the counted instructions takes its time.

Pictures and steps of training, which chains of launches are made of too, in the same way:

    picture  = flops / (peak of the matrix unit * share) + launches * cost
    training = bytes of weights / (bandwidth * reach * stream) + flops / (peak * share)
               + launches * cost

with the cost of a launch as reported for HIP graphs on RDNA3 chips (LAUNCH_NS).
"""

import itertools
import os
import re

# Product, target, compute units, GHz (boost), GB/s: as specified by AMD or the memory's maker.
CHIPS = (
    ("RX 7900 XTX", "gfx1100", 96, 2.50, 960.0),
    ("RX 7900 XT", "gfx1100", 84, 2.40, 800.0),
    ("RX 7900 GRE", "gfx1100", 80, 2.245, 576.0),
    ("RX 7800 XT", "gfx1101", 60, 2.43, 624.0),
    ("RX 7700 XT", "gfx1101", 54, 2.544, 432.0),
    ("RX 7600, 7600 XT", "gfx1102", 32, 2.655, 288.0),
    ("780M, LPDDR5-6400", "gfx1103", 12, 2.70, 102.4),
    ("890M, LPDDR5X-7500", "gfx1150", 16, 2.90, 120.0),
    ("8060S, LPDDR5X-8000", "gfx1151", 40, 2.90, 256.0),
    ("860M, LPDDR5X-8000", "gfx1152", 8, 3.00, 128.0),
    ("820M, LPDDR5X-8000", "gfx1153", 2, 2.80, 128.0),
)
# Of the specified bandwidth: 212 of 256 GB/s on a 8060S (rocm_bandwidth_test, in
# lhl/strix-halo-testing), 4,476 of 4,800 on an H200 (this project's probe).
REACH = (0.83, 0.93)

# llama.cpp's figures, tokens a second: chip, backend, model, prompt of 512 and decode (least, most;
# None: not given), where.
# "quoted": the page could not be read here; other public documents give the figure as from there.
PUBLISHED = (
    ("RX 7900 XTX", "ROCm", "Qwen2.5-Coder 7B Q4_K_M", (3800, 4000), (110, 114),
     "https://github.com/ggml-org/llama.cpp/issues/20934"),
    ("RX 7900 XTX", "ROCm", "Llama 3 8B Q4_K_M", None, (105.8, 105.8),
     "https://github.com/ggml-org/llama.cpp/pull/26284"),
    ("RX 7900 XTX", "ROCm", "Llama 2 7B Q4_0", (3552, 3552), (167.1, 167.1),
     "https://github.com/ggml-org/llama.cpp/discussions/15021 (quoted)"),
    ("RX 7900 XTX", "Vulkan", "Llama 2 7B Q4_0", (3727, 3727), (182.6, 182.6),
     "https://github.com/ggml-org/llama.cpp/discussions/10879 (quoted)"),
    ("RX 7900 XT", "ROCm", "Llama 2 7B Q4_0", (3098, 3098), (116.2, 116.2),
     "https://github.com/ggml-org/llama.cpp/discussions/15021 (quoted)"),
    ("780M, LPDDR5-6400", "ROCm", "Llama 2 7B Q4_0, DDR5-5600", (263, 263), (19.6, 19.6),
     "https://llm-tracker.info/howto/AMD-GPUs (quoted)"),
    ("8060S, LPDDR5X-8000", "ROCm", "Llama 2 7B Q4_K_M", (906, 906), (40.8, 40.8),
     "https://github.com/lhl/strix-halo-testing, llm-bench/llama-2-7b.Q4_K_M"),
    ("8060S, LPDDR5X-8000", "Vulkan", "Llama 2 7B Q4_K_M", (609, 609), (48.5, 48.5),
     "https://github.com/lhl/strix-halo-testing, llm-bench/llama-2-7b.Q4_K_M"),
)

# Between dependent kernels of a HIP graph, ns: reports of a 8060S (1750), 7900 XTX (2800) and W7900
# (3850); not measured by this project.
LAUNCH_NS = (1750, 3850)

# AutoencoderKL decoders of SDXL's widths: pixels, operations (vae_plan.whole_flops), ops, each
# about one launch. Share of the F16 ceiling: on the H200, 10.7 and 47.0 ms of 639 TFLOPS
# (PERFORMANCE.md, "Pictures"), to conv_f16_128's with norm and SiLU in gfx1100.md.
PICTURES = ((512, 2.515e12, 85), (1024, 10.47e12, 85))
PICTURE_SHARE = (0.35, 0.88)

# DistilGPT-2 in mixed precision: texts, tokens of each. Bytes of a weight: 8 to 14 by forward and
# backward (in F16 read twice, its F32 gradient written, or also read), 34 by the gradient's norm
# and AdamW (w, m, v read and written, g read twice, w in F16 written).
STEPS = ((1, 31), (1, 512), (8, 512))
TRAINED, WIDTH, LAYERS = 81.9e6, 768, 6
STEP_BYTES = (34 + 8, 34 + 14)
STEP_LAUNCHES = 130  # the most of three shapes that were measured, the H200 at ddd9c3f: 118 to 130
SEED_MS = (272, 115)  # of 1 x 31: the seed's, on a V100 through WebGPU, and its target

MODEL = "inference/7B-Q4_K"
FORMATS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")
SMALL, LARGE = "4096x4096", "14336x4096"
KV_BYTES = 2 * 2 * 32 * 4096 * 128  # keys and values, F16, 32 layers of 4096, 128 positions


def counts():
    """Rows of gfx1100.md by kernel: columns by their heads."""
    rows, head = {}, None
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gfx1100.md")
    with open(path, encoding="utf-8") as f:
        for line in f:
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if cells[0] == "kernel":
                head = cells
            elif head and len(cells) == len(head):
                rows.setdefault(cells[0], dict(zip(head, cells)))
    return rows


def fit(small, large):
    """From (bytes, ns) of two sizes: ns whatever the size, bytes a ns beyond.

    >>> fixed, rate = fit((1000, 150), (3000, 250))
    >>> round(fixed), round(rate)
    (100, 20)
    """
    rate = (large[0] - small[0]) / (large[1] - small[1])
    return small[1] - small[0] / rate, rate


def corners(f, *intervals):
    """Least and most of f over all combinations of the ends of the intervals.

    >>> corners(lambda a, b: a / b, (1, 2), (4, 8))
    (0.125, 0.5)
    """
    values = [f(*ends) for ends in itertools.product(*intervals)]
    return min(values), max(values)


def step_ns(size, work, rate, overlapped, launches, fixed):
    """A decode step: bytes at a rate, lane-cycles' ns beside or before, and what launches cost.

    >>> step_ns(1000, 10, 2, True, 3, 5), step_ns(1000, 10, 2, False, 3, 5)
    (515.0, 525.0)
    """
    moved = size / rate
    return (max(moved, work) if overlapped else moved + work) + launches * fixed


def prompt_ns(flops, peak, share, launches, fixed):
    """A prompt: operations at a share of the matrix unit's operations a ns, and launches.

    >>> prompt_ns(1000, 20, 0.5, 2, 25)
    150.0
    """
    return flops / (peak * share) + launches * fixed


def training_flops(texts, tokens):
    """6 for each weight and token, and the scores of causal attention.

    >>> round(training_flops(1, 31) * 1e-9, 1), round(training_flops(1, 512) * 1e-9)
    (15.3, 259)
    """
    return 6 * texts * tokens * (TRAINED + LAYERS * WIDTH * tokens)


def verdict(slow, fast, met):
    """
    >>> verdict(30, 50, lambda x: x > 40), verdict(50, 60, lambda x: x > 40)
    ('open', 'met')
    """
    return "met" if met(slow) else "open" if met(fast) else "missed"


def span(low, high, digits=0):
    low, high = f"{low:,.{digits}f}", f"{high:,.{digits}f}"
    return low if low == high else f"{low} to {high}"


def published(chip, column, convert):
    """Least to most of llama.cpp's figures of a chip, or nothing."""
    ends = [convert(end) for row in PUBLISHED if row[0] == chip and row[column]
            for end in row[column]]
    return span(min(ends), max(ends)) if ends else ""


class Basis:
    """What the measured GPU and the counts of gfx1100.md give; None-like (false) without them."""

    def __init__(self, run):
        self.run, cases = run, run.cases
        need = [f"{MODEL}/decode/128", f"{MODEL}/ttft/512"]
        need += [f"matmul/{f}/{s}/n1" for f in FORMATS for s in (SMALL, LARGE)]
        self.figures = {v["name"]: v["value"] for v in run.result["values"]}
        self.read = run.ceiling("read") * 1e-9
        self.launches = self.figures.get(f"{MODEL}/launches_per_token")
        self.known = bool(run.gpu and self.read and self.launches and
                          all(name in cases for name in need))
        if not self.known:
            return
        self.step, self.prompt = cases[need[0]], cases[need[1]]
        fits = [fit(*((c["bytes"], c["median"]) for c in (cases[f"matmul/{f}/{s}/n1"]
                                                          for s in (SMALL, LARGE))))
                for f in FORMATS]
        self.fixed = (min(f for f, _ in fits), max(f for f, _ in fits))
        self.stream = tuple(min(1.0, e(r for _, r in fits) / self.read) for e in (min, max))
        self.size = self.step["bytes"] + KV_BYTES
        self.flops = self.prompt["flops"]
        self.product = cases[f"matmul/Q4_K/{LARGE}/n1"]
        rows = counts()
        self.lane_cycles = max(float(rows[f"matvec_int8_{f}_n1"]["VALU cycles/unit"])
                               for f in ("q4_K", "q6_K"))
        steady = [re.search(r"\((\d+)%\)", rows[f"matmul_f16_{f}_128"]["WMMA share"])[1]
                  for f in ("q4_K", "q6_K")]
        self.share = (self.prompt["share"], min(map(int, steady)) / 100)

    def __bool__(self):
        return self.known

    def expect(self, units, ghz, bandwidth):
        """Of a chip, slow and fast: tokens/s; ms to the first token; share of memory's rate."""
        work = self.step["flops"] / 2 * self.lane_cycles / (64 * units * ghz)
        fixed = (self.fixed[0], 2 * self.fixed[1])
        rate = lambda reach, stream: bandwidth * reach * stream
        low, high = corners(lambda r, s, o, f: step_ns(self.size, work, rate(r, s), o,
                                                       self.launches, f),
                            REACH, self.stream, (True, False), fixed)
        least, most = corners(lambda s, f: prompt_ns(self.flops, 512 * units * ghz, s,
                                                     self.launches, f), self.share, fixed)
        used = corners(lambda r, s, f: self.product["bytes"] / (bandwidth * r) /
                       step_ns(self.product["bytes"], 0, rate(r, s), True, 1, f),
                       REACH, self.stream, fixed)
        return (1e9 / high, 1e9 / low), (most * 1e-6, least * 1e-6), used


def chains(basis, table):
    """Pictures and steps of training: times expected of each chip."""
    rows = []
    for name, target, units, ghz, bandwidth in CHIPS:
        peak, row = 512 * units * ghz, [name, target]
        for _, flops, launches in PICTURES:
            row.append(span(*(1e-6 * ns for ns in corners(
                lambda s, c: prompt_ns(flops, peak, s, launches, c), PICTURE_SHARE, LAUNCH_NS))))
        for texts, tokens in STEPS:
            low, high = corners(
                lambda b, r, m, s, c: TRAINED * b / (bandwidth * r * m) + prompt_ns(
                    training_flops(texts, tokens), peak, s, STEP_LAUNCHES, c),
                STEP_BYTES, REACH, basis.stream, basis.share, LAUNCH_NS)
            row.append(span(low * 1e-6, high * 1e-6, 1 if high < 1e8 else 0))
        rows.append(row)
    share = span(*(100 * end for end in basis.share))
    return (
        "\n**Pictures and training, expected on RDNA3 (a prediction, nothing of it is measured)**, ms: a "
        "picture decoded by SDXL's AutoencoderKL, and a step of DistilGPT-2 (texts x tokens). A launch costs "
        f"{span(*(1e-3 * end for end in LAUNCH_NS), 2)} us; the matrix unit is in use "
        f"{span(*(100 * end for end in PICTURE_SHARE))}% of a picture's convolutions, {share}% of a "
        f"step's products; a step launches {STEP_LAUNCHES} kernels, and its weights, gradients and moments are "
        f"{span(*(TRAINED * 1e-9 * end for end in STEP_BYTES), 1)} GB to move. The seed of this project took "
        f"{SEED_MS[0]} ms for 1 x 31 on a V100 through WebGPU, its target was {SEED_MS[1]} ms.\n\n" +
        table(("chip", "target", *(f"{p[0]} x {p[0]} pixels" for p in PICTURES),
               *(f"step {b} x {t}" for b, t in STEPS)), rows))


def block(runs, table):
    """Text and tables for the document."""
    basis = next((b for b in map(Basis, runs) if b), None)
    if basis is None:
        return ("No stored result has what this needs: a GPU's products at one column and the 7B "
                "model.\n")
    step, prompt, product = basis.step, basis.prompt, basis.product
    shares = sorted(basis.run.cases[f"matmul/{f}/{LARGE}/n1"]["share"] for f in FORMATS)
    check = step_ns(basis.size, 0, basis.read * sum(basis.stream) / 2, True, basis.launches,
                    sum(basis.fixed) / 2)
    text = f"**Measured on the {basis.run.short()}** with the same kernels, 7B Q4_K with Q6_K:\n\n"
    text += table(("target", "measured"), [
        ("over 40 tokens a second", f"{1e9 / step['median']:,.0f} tokens/s"),
        ("first token of 512 under 200 ms", f"{prompt['median'] * 1e-6:.1f} ms"),
        ("over 80% of the bandwidth", f"{shares[0]:.0%} to {shares[-1]:.0%} of the measured one in "
         f"decode products of {LARGE}, {step['share']:.0%} in the whole step"),
    ])
    fixed, stream, reach, share = (
        span(*(scale * end for end in ends), digits) for ends, scale, digits in
        ((basis.fixed, 1e-3, 1), (basis.stream, 100, 0), (REACH, 100, 0), (basis.share, 100, 0)))
    text += (
        "\n**Expected on RDNA3 (a prediction, nothing of it is measured)**, by `targets.py`, which "
        "explains the formula:\n\n"
        f"- a step moves {basis.size * 1e-9:.2f} GB and launches {basis.launches:.0f} kernels, a "
        f"prompt of 512 takes {basis.flops * 1e-12:.2f} T operations;\n"
        f"- a decode product on the {basis.run.short()} takes {fixed} us whatever its size, and "
        f"moves the rest at {stream}% of the measured bandwidth;\n"
        f"- memory gives {reach}% of what is specified; the vector unit works "
        f"{basis.lane_cycles:g} lane-cycles a weight; the matrix unit is in use {share}% of a "
        "prompt's time.\n\n"
        f"The same formula gives {check * 1e-6:.2f} ms for a step on the {basis.run.short()} "
        f"itself, where {step['median'] * 1e-6:.2f} ms are measured. \"met\" holds at the slow end "
        "of the interval, \"missed\" at the fast end too, \"open\" is between.\n\n")
    rows = []
    for name, target, units, ghz, bandwidth in CHIPS:
        (slow, fast), (late, early), used = basis.expect(units, ghz, bandwidth)
        rows.append((name, target, f"{bandwidth:g}", f"{bandwidth / basis.size * 1e9:,.0f}",
                     f"{span(slow, fast)}, {verdict(slow, fast, lambda x: x > 40)}",
                     published(name, 4, lambda x: x),
                     f"{span(early, late)}, {verdict(late, early, lambda x: x < 200)}",
                     published(name, 3, lambda x: 512e3 / x),
                     f"{span(100 * used[0], 100 * used[1])}, "
                     f"{verdict(used[0], used[1], lambda x: x > 0.8)}"))
    text += table(("chip", "target", "GB/s", "tokens/s at most", "tokens/s expected", "llama.cpp",
                   "ms to the first token of 512 expected", "llama.cpp",
                   "% of memory's rate expected, Q4_K " + LARGE), rows)
    text += chains(basis, table)
    text += "\n**Published figures of llama.cpp**, those of the table above, tokens a second:\n\n"
    named = {row[0] for row in PUBLISHED}
    found = [(*row[:3], *(span(*ends, digits) if ends else "" for ends, digits in
                          ((row[3], 0), (row[4], 1))), row[5]) for row in PUBLISHED]
    none = [(chip[0], "", "", "", "", "none found") for chip in CHIPS if chip[0] not in named]
    text += table(("chip", "backend", "model", "prompt of 512", "decode", "source"), found + none)
    return text
