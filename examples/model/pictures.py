#!/usr/bin/env python3
# Draws the pictures that the shipped picture model was trained on: things from the world of
# corpus.py (shields, rings, potions, towers ...) as a game would show them in an inventory.
# Deterministic: picture i of a split depends on nothing else.
#
#   python3 pictures.py heldout 0 8 OUT      writes OUT/heldout-0.png to OUT/heldout-7.png
#   python3 pictures.py sheet 64 FILE.png    a contact sheet of the first 64 training pictures
#   python3 pictures.py compare OUT [FILE.png]   PSNR of what decode.c wrote to OUT from
#                                                latents.gguf,
#                                            and a sheet: the originals above what is there
#
# Every picture is flat geometry with relief: a part is a signed distance (its edge, anti-aliased)
# and a height (its normals, by differences), shaded with one light, a sky and a material. The same
# code draws with numpy here and, many pictures at once, with PyTorch on a GPU (see use_torch).
# A kind, a shape, a ground, a light and two materials make a combination; a twelfth of all
# combinations never occurs in training.
import hashlib
import math
import random
import struct
import sys
import zlib
from collections import namedtuple

import numpy as np

SIZE = 256
M = np  # numpy or torch: whatever the arrays belong to
DEVICE = None


def use_torch(device):
    """From now on arrays are tensors of this device."""
    global M, DEVICE
    import torch
    M, DEVICE = torch, device


def array(values):
    a = np.asarray(values, dtype=np.float32)
    return a if DEVICE is None else M.from_numpy(a).to(DEVICE)


# ---- what a picture is of ---------------------------------------------------------------------

# kind: shapes, ground families it can stand or lie on
KINDS = {
    "shield": (("round", "heater", "kite"), "flat"),
    "ring": (("brilliant", "emerald", "drop"), "flat"),
    "potion": (("round", "cone", "tall"), "still"),
    "tower": (("crenellated", "pointed"), "land"),
    "sword": (("sword", "dagger", "axe"), "flat"),
    "lantern": (("lantern", "candle"), "still"),
    "coin": (("sun", "moon", "star"), "flat"),
    "cottage": (("cottage", "chapel"), "land"),
    "gem": (("brilliant", "hexagon", "drop"), "flat"),
    "chalice": (("chalice", "vase", "chess queen"), "still"),
    "book": (("jewelled", "star", "clasped"), "flat"),
    "crown": (("three-pointed", "five-pointed"), "still"),
    "key": (("ring", "trefoil", "diamond"), "flat"),
    "windmill": (("windmill",), "land"),
    "chest": (("flat", "arched"), "still"),
    "bell": (("bell",), "still"),
}
GROUNDS = {"flat": ("parchment", "velvet", "slate", "planks"),
           "still": ("studio", "table", "velvet wall"),
           "land": ("meadow", "hills", "snow")}
METALS = {"gold": (1.0, .71, .26), "silver": (.91, .92, .95), "bronze": (.80, .50, .26),
          "copper": (.93, .48, .32), "iron": (.45, .47, .52), "blued steel": (.33, .42, .60)}
COLOURS = {"crimson": (.72, .06, .10), "orange": (.92, .38, .06), "amber": (.95, .68, .12),
           "moss": (.32, .50, .12), "green": (.06, .50, .25), "teal": (.05, .50, .52),
           "sky": (.28, .60, .90), "blue": (.10, .22, .72), "violet": (.40, .16, .66),
           "rose": (.88, .36, .52), "ivory": (.90, .86, .74), "charcoal": (.16, .17, .20)}
# light, sky, reflected light from below
LIGHTS = {"noon": ((1.0, .97, .90), (.62, .72, .85), (.40, .36, .30)),
          "evening": ((1.0, .74, .46), (.60, .55, .68), (.42, .30, .26)),
          "moon": ((.66, .78, 1.0), (.32, .40, .60), (.20, .22, .30)),
          "candle": ((1.0, .80, .52), (.48, .42, .42), (.44, .30, .20))}
SHOWN = (0, 33, 50, 19, 21, 43, 26, 7)  # held-out pictures that are shipped as latents
Spec = namedtuple("Spec", "kind shape ground light metal colour second numbers")


def held_out(combination):
    return hashlib.sha256("/".join(combination).encode()).digest()[0] % 12 == 0


def spec(split, i):
    """What picture i shows; the kinds take turns. numbers: 48 in [0, 1) for everything else."""
    draw = random.Random("%s %d" % (split, i))
    kind = list(KINDS)[i % len(KINDS)]
    shapes, family = KINDS[kind]
    while True:
        colour, second = draw.sample(list(COLOURS), 2)
        c = (kind, draw.choice(shapes), draw.choice(GROUNDS[family]), draw.choice(list(LIGHTS)),
             draw.choice(list(METALS)), colour, second)
        if held_out(c) == (split == "heldout"):
            return Spec(*c, [draw.random() for _ in range(48)])


def title(s):
    """A picture in a few words."""
    named = ("sword", "dagger", "axe", "lantern", "candle", "cottage", "chapel", "chalice", "vase",
             "chess queen", "windmill", "bell")
    name = s.shape if s.shape in named else s.shape + " " + s.kind
    if KINDS[s.kind][1] == "land":
        return "%s, %s, %s, %s" % (name, s.colour, s.ground, s.light)
    return "%s, %s and %s, %s, %s" % (name, s.metal, s.colour, s.ground, s.light)


# ---- geometry: signed distances, negative inside; x grows to the right, y down ------------------


def low(a, b):
    return a.clip(max=b) if isinstance(b, (int, float)) else M.minimum(a, b)


def high(a, b):
    return a.clip(min=b) if isinstance(b, (int, float)) else M.maximum(a, b)


def length(x, y):
    return (x * x + y * y + 1e-9) ** 0.5


def mix(a, b, t):
    return a + (b - a) * t


def smooth(a, b, x):
    t = ((x - a) / (b - a)).clip(0, 1)
    return t * t * (3 - 2 * t)


def frac(x):
    return x - M.floor(x)


def box(x, y, w, h, r=0.0):
    qx, qy = abs(x) - w + r, abs(y) - h + r
    return length(high(qx, 0), high(qy, 0)) + low(high(qx, qy), 0) - r


def segment(x, y, ax, ay, bx, by, r):
    dx, dy = bx - ax, by - ay
    t = (((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy)).clip(0, 1)
    return length(x - ax - dx * t, y - ay - dy * t) - r


def trapezoid(x, y, top, bottom, h):
    """Upright, from y = -h, half as wide as top, to y = h."""
    lean = (bottom - top) / (2 * h)
    side = (abs(x) - top - lean * (y + h)) / (1 + lean * lean) ** .5
    return high(side, abs(y) - h)


def polygon(x, y, n, r, turn=0.0):
    """Regular, r is the distance of its sides."""
    d = None
    for j in range(n):
        a = 2 * math.pi * (j + turn) / n
        side = x * math.sin(a) - y * math.cos(a)
        d = side if d is None else high(d, side)
    return d - r


def star(x, y, n, outer, inner):
    """n spikes: what is inside both edges of a tip, from there to beyond the middle."""
    d = None
    for j in range(n):
        a = 2 * math.pi * j / n
        along, across = x * math.sin(a) - y * math.cos(a), abs(x * math.cos(a) + y * math.sin(a))
        # The edge runs from the tip (outer, 0) to the notch, inner from the middle.
        ex, ey = outer - inner * math.cos(math.pi / n), inner * math.sin(math.pi / n)
        edge = ((along - outer) * ey + across * ex) / math.hypot(ex, ey)
        spike = high(edge, -along - inner * .4)
        d = spike if d is None else low(d, spike)
    return high(d, length(x, y) - outer)


def drop(x, y, r, tip):
    """A circle of radius r around (0, 0) and its tangents to (0, -tip)."""
    sine = r / tip
    side = abs(x) * (1 - sine * sine) ** .5 - (y + tip) * sine
    return M.where(y < -r * sine, side, length(x, y) - r)


def dome(d, r):
    """The height of an edge rounded with radius r; flat further inside."""
    t = (-d / r).clip(0, 1)
    return r * (1 - (1 - t) ** 2 + 1e-6) ** .5


def tube(x, w):
    """The height of an upright cylinder's front."""
    return (w * w - x * x).clip(1e-6, 9) ** .5


def chamfer(d, w, h):
    return h * (-d / w).clip(0, 1)


def lathe(x, y, profile):
    """A solid of revolution: (distance, height); profile: (y, half width), from top to bottom."""
    w = 0 * y + profile[0][1]
    for (y0, w0), (y1, w1) in zip(profile, profile[1:]):
        w = w + (w1 - w0) * smooth(y0, y1, y)
    d = high(high((abs(x) - w) * .9, profile[0][0] - y), y - profile[-1][0])
    return d, (w * w - x * x).clip(1e-6, 9) ** .5


LATTICE = np.random.RandomState(7).rand(64, 64).astype(np.float32)


def noise(s, x, y, k):
    """Smooth noise in [0, 1] with lattice spacing 1; k chooses one of several fields."""
    x, y = x + s.u(40 + k) * 50 + 100, y + s.u(44 + k) * 50 + 100
    ix, iy = M.floor(x), M.floor(y)
    fx, fy = smooth(0, 1, x - ix), smooth(0, 1, y - iy)
    if DEVICE is None:
        ix, iy = ix.astype(np.int64), iy.astype(np.int64)
    else:
        ix, iy = ix.long(), iy.long()
    t, x0, x1, y0, y1 = s.lattice, ix % 64, (ix + 1) % 64, iy % 64, (iy + 1) % 64
    return mix(mix(t[y0, x0], t[y0, x1], fx), mix(t[y1, x0], t[y1, x1], fx), fy)


# ---- shading -----------------------------------------------------------------------------------

# rgb: three arrays or numbers, linear; glass lets the light gather on the far side
Mat = namedtuple("Mat", "rgb metal gloss spec glow glass", defaults=(0.0, 30.0, 0.25, 0.0, 0.0))


def tint(mat, f):
    return mat._replace(rgb=[c * f for c in mat.rgb])


def blend(a, b, t):
    """Material a, but with colour b where t is 1."""
    return a._replace(rgb=[mix(p, q, t) for p, q in zip(a.rgb, b.rgb)])


def jewel(mat):
    return tint(mat, 1.2)._replace(glass=.8, spec=.9)


WOOD, DARK_WOOD = Mat((.36, .19, .08)), Mat((.17, .085, .04))
STONE, PLASTER = Mat((.42, .40, .37), spec=.05), Mat((.80, .74, .60), spec=.03)
LEATHER, PAPER = Mat((.22, .10, .05), gloss=14.0), Mat((.82, .74, .56), spec=.03)
FLAME, SNOW = Mat((1.0, .62, .16), glow=1.6), Mat((.83, .87, .94))


class Scene:
    """One or more pictures of the same kind, shape and ground. Arrays are [pictures, SIZE, SIZE],
    numbers of a picture [pictures, 1, 1]."""

    def __init__(self, specs):
        self.specs, self.spec = specs, specs[0]
        self.numbers = array([s.numbers for s in specs])
        self.lattice = array(LATTICE)
        self.light, self.sky, self.below = (self.three([LIGHTS[s.light][k] for s in specs])
                                            for k in range(3))
        self.metal = Mat(self.three([METALS[s.metal] for s in specs], 2.1), 1.0, 40.0, 1.0)
        self.main = Mat(self.three([COLOURS[s.colour] for s in specs], 1.8))
        self.second = Mat(self.three([COLOURS[s.second] for s in specs], 1.8))
        at = (array(range(SIZE)) + .5) * (2 / SIZE) - 1
        self.sx = at[None, None, :] + 0 * at[None, :, None] + 0 * self.u(0)
        self.sy = at[None, :, None] + 0 * self.sx
        # The light comes from above, left or right.
        side = mix(.35, .75, self.u(0)) * (1 - 2 * (self.u(1) < .35) * 1.0)
        lx, ly, lz = -side, -mix(.45, .75, self.u(2)), .75
        size = (lx * lx + ly * ly + lz * lz) ** .5
        self.l = (lx / size, ly / size, lz / size)
        self.shadow = None
        self.img = [0 * self.sx for _ in range(3)]
        self.solid = 0 * self.sx

    def three(self, rgb, power=1.0):
        a = array(rgb) ** power
        return [a[:, k][:, None, None] for k in range(3)]

    def u(self, k):
        return self.numbers[:, k][:, None, None]

    def pick(self, k, n):
        return M.floor(self.u(k) * n)

    def slope(self, h):
        """Differences of h over two pixels, per unit of length, both ways."""
        gx, gy, k = 0 * h, 0 * h, .5 / self.px
        gx[:, :, 1:-1] = (h[:, :, 2:] - h[:, :, :-2]) * k
        gy[:, 1:-1] = (h[:, 2:] - h[:, :-2]) * k
        return gx, gy

    def shade(self, mat, h):
        if h is None:
            nx, ny, nz = 0 * self.sx, 0 * self.sx, 1 + 0 * self.sx
        else:
            gx, gy = self.slope(h)
            size = (1 + gx * gx + gy * gy) ** .5
            nx, ny, nz = -gx / size, -gy / size, 1 / size
        lx, ly, lz = self.l
        size = (lx * lx + ly * ly + (lz + 1) ** 2) ** .5
        half = ((nx * lx + ny * ly + nz * (lz + 1)) / size).clip(0, 1)
        diffuse = (nx * lx + ny * ly + nz * lz).clip(0, 1)
        up = .5 - .5 * ny
        shine = half ** mat.gloss * mat.spec
        wide = half ** 8
        rim = (1 - nz) ** 3 * .5
        # A metal mirrors a sky above, a dark ground below and a bright line between them; a flat
        # one shows a part of that which depends on the place.
        ry = -2 * nz * ny - .45 * (self.sx * lx + self.sy * ly) - .15
        line = M.exp(-((ry + .12) * 5) ** 2)
        sky = smooth(-.35, .25, ry)
        inner = (.30 + 1.1 * (.5 - .8 * (nx * lx + ny * ly)).clip(0, 1) ** 2)
        out = []
        for k in range(3):
            c, light, above, under = mat.rgb[k], self.light[k], self.sky[k], self.below[k]
            ambient = mix(under, above, up)
            dull = c * (light * diffuse * 1.5 + ambient * .46) + light * shine + above * rim * .25
            if mat.metal:
                mirror = mix(under * .30, above * .95, sky) + line * above * .40
                mirror = mirror + light * wide * 1.1
                dull = mix(dull, c * mirror * 1.1 + light * half ** 60 * .6, mat.metal)
            if mat.glass:
                through = c * (inner * (light + above) * .8) + light * shine + above * rim * .4
                dull = mix(dull, through, mat.glass)
            out.append(dull + c * mat.glow)
        return out

    def part(self, d, h, mat, alpha=1.0):
        """Paints one part over what is there; mat may be a function, called if it is needed."""
        if self.shadow is not None:
            self.shadow = low(self.shadow, d)
            return
        if callable(mat):
            mat = mat()
        cover = (.5 - d / self.px).clip(0, 1) * alpha
        near = self.solid * (1 - d / .07).clip(0, 1) ** 2 * (d > 0) * alpha
        rgb = self.shade(mat, h)
        for k in range(3):
            self.img[k] = mix(self.img[k] * (1 - .45 * near), rgb[k], cover)
        self.solid = high(self.solid, cover)

    def round(self, d, r, mat, alpha=1.0):
        """A part with an edge of radius r."""
        self.part(d, dome(d, r), mat, alpha)

    def light_up(self, x, y, r, rgb, power=1.0):
        """A halo around something that glows."""
        if self.shadow is None:
            g = M.exp(-((self.x - x) ** 2 + (self.y - y) ** 2) / (r * r)) * power
            self.img = [i + g * c for i, c in zip(self.img, rgb)]

    def line(self, d, w):
        """1 where |d| < w, anti-aliased."""
        return (.5 + (w - abs(d)) / self.px).clip(0, 1)

    def side(self, d):
        return (.5 - d / self.px).clip(0, 1)

    # ---- grounds

    def wood(self, x, y, base, k=0):
        """Grain along x."""
        wave = noise(self, x * 1.5, y * 9, k)
        ring = M.sin((y * 9 + wave * 5 + noise(self, x * .8, y * 2, k + 1) * 4) * 3)
        return tint(base, .80 + .28 * wave + .10 * ring)

    def lit_ground(self, mat, h=None):
        rgb = self.shade(mat, h)
        x, y = self.sx + self.l[0] * -.55, self.sy + self.l[1] * -.55
        fall = 1.12 - .42 * (x * x + y * y)
        self.img = [c * fall.clip(.2, 2) for c in rgb]

    def planks(self, x, y, base, n):
        row = M.floor(y * n)
        joint = self.line(abs(frac(y * n) - .5) / n - .5 / n, .006)
        wood = self.wood(x + row * 2.7 + self.u(30) * 3, y + row * .37, base)
        tone = .88 + .24 * frac(row * .618 + self.u(31) * 9)
        return tint(wood, tone * (1 - .6 * joint))

    def draw_ground(self):
        x, y, name = self.sx, self.sy, self.spec.ground
        self.px = 2 / SIZE
        drift = noise(self, x * 1.5, y * 1.5, 0) - .5
        if name == "parchment":
            stain = noise(self, x * 4, y * 4, 1) - .5
            frame = self.line(box(x, y, .93, .93, .05), .006) * .5
            edge = smooth(.62, 1.25, length(x, y))
            mat = Mat([c * (1 + drift * .22 + stain * .12) * (1 - .45 * edge) * (1 - frame)
                       for c in (.72, .60, .40)], spec=.02)
            self.lit_ground(mat)
        elif name == "velvet":
            fold = M.sin((x * mix(-.6, .6, self.u(32)) + y * .5) * 5 + drift * 5 + self.u(33) * 6)
            self.lit_ground(tint(self.second, .42)._replace(gloss=6.0, spec=.05), fold * .04)
        elif name == "slate":
            rough = noise(self, x * 3, y * 3, 1) + .5 * noise(self, x * 7, y * 7, 2)
            tile = low(abs(frac(x * 1.1 + self.u(32)) - .5), abs(frac(y * 1.1 + self.u(33)) - .5))
            crack = smooth(.0, .022, tile)
            tone = (.75 + .3 * rough) * mix(.35, 1, crack)
            mat = Mat([c * tone for c in (.20, .22, .26)], spec=.06)
            self.lit_ground(mat, rough * .025 + crack * .02)
        elif name == "planks":
            self.lit_ground(self.planks(x, y, WOOD._replace(spec=.06), 2.5))
        elif name in ("studio", "velvet wall", "table"):
            base = .52
            wall = self.second if name != "table" else blend(tint(STONE, .55), self.second, .40)
            depth = ((y - base) / (1 - base)).clip(0, 1)
            if name == "velvet wall":
                fold = M.sin(x * 9 + drift * 3 + self.u(33) * 6) * .03
                back = self.shade(tint(wall, .30)._replace(spec=.03), fold)
            else:
                back = self.shade(tint(wall, .34)._replace(spec=.0), None)
            spot = M.exp(-((x + self.l[0] * -.4) ** 2 + (y + .15) ** 2) * 1.1)
            back = [c * (.45 + .95 * spot) * (1 + .12 * drift) for c in back]
            if name == "table":
                px = x / (.75 + depth * .8)
                floor = self.shade(self.planks(px + .5, depth ** .8 * .8 + .01, WOOD, 3.0), None)
            else:
                floor = self.shade(tint(self.main if name == "velvet wall" else wall, .42), None)
            floor = [c * (.75 + .45 * M.exp(-x * x * 1.5)) for c in floor]
            soft = .012 if name != "studio" else .20
            t = smooth(base - soft, base + soft, y)
            self.img = [mix(a, b, t) for a, b in zip(back, floor)]
        else:
            self.draw_land(name)

    def draw_land(self, name):
        x, y = self.sx, self.sy
        t = smooth(-1.1, .45, y)
        cloud = noise(self, x * 1.6, y * 4.2, 0) * .65 + noise(self, x * 3.6, y * 8, 1) * .35
        cloud = smooth(.48, .80, cloud) * .75 * smooth(.5, -.3, y)
        disc = length(x + self.l[0] * 1.25, y + .62)
        self.night = array([s.light == "moon" for s in self.specs])[:, None, None]
        sky = []
        for k in range(3):
            top = self.sky[k] * (.16, .32, .80)[k]
            bottom = mix(self.light[k], self.sky[k], .45) * .75
            c = mix(top, bottom, t) * (1 - .55 * self.night)
            c = mix(c, self.light[k] * (.95 - .6 * self.night), cloud)
            sky.append(c + self.light[k] * (M.exp(-disc * disc * 14) * .30
                                            + self.side(disc - .11) * .55))
        self.img = sky
        grass = {"meadow": (.16, .32, .07), "hills": (.34, .34, .10), "snow": (.72, .78, .88)}[name]
        far = .30 + .10 * M.sin(x * 2.3 + self.u(32) * 6) + .05 * M.sin(x * 5.1 + self.u(33) * 6)
        mid = .42 + .06 * M.sin(x * 3.1 + self.u(34) * 6)
        near = .58 + .03 * M.sin(x * 2 + self.u(35) * 6)
        for edge, haze, mul in ((far, .55, .8), (mid, .28, .85), (near, 0.0, 1.0)):
            fade = .80 + .30 * noise(self, x * 3, y * 7, 2) - .25 * smooth(.5, 1.0, y)
            tone = [mix(c * mul * fade * (self.light[k] + .4 * self.sky[k]) * .9,
                        mix(self.light[k], self.sky[k], .6) * (.6 - .35 * self.night), haze)
                    for k, c in enumerate(grass)]
            cover = self.side(edge - y)
            self.img = [mix(a, b * (1 - .35 * self.night), cover) for a, b in zip(self.img, tone)]

    # ---- the whole picture

    def cast(self, thing, x, y, spread):
        """The distance of the thing's outline at other coordinates."""
        keep = self.x, self.y
        self.x, self.y, self.shadow = x, y, 9 + 0 * x
        thing(self)
        d, self.shadow = self.shadow, None
        self.x, self.y = keep
        return smooth(spread, -spread, d)

    def draw(self):
        thing, family = THINGS[self.spec.kind], KINDS[self.spec.kind][1]
        self.draw_ground()
        scale = mix(.82, 1.02, self.u(3)) * (.84 if family == "land" else 1.0)
        turn = (self.u(4) - .5) * (1.3 if family == "flat" else .0)
        if self.spec.kind in ("sword", "key"):
            turn = turn * .5 + .7
        cx, cy = (self.u(5) - .5) * .22, (self.u(6) - .5) * .14
        cy = cy + {"flat": .02, "still": -.02, "land": .12}[family]
        c, sn = M.cos(turn), M.sin(turn)

        def place(x, y):
            x, y = (x - cx) / scale, (y - cy) / scale
            return x * c + y * sn, y * c - x * sn

        self.x, self.y = place(self.sx, self.sy)
        self.px = 2 / SIZE / scale
        lx, ly, _ = self.l
        if family == "flat":
            dark = .62 * self.cast(thing, *place(self.sx + lx * .11, self.sy + ly * .11), .07)
        else:
            # The outline laid down on the ground, away from the light; softer the further it falls.
            foot = (FOOT - .05) * scale + cy
            fall = (self.sy - foot) / .42
            sx = self.sx + lx * fall * .9
            dark = .60 * self.cast(thing, *place(sx, foot - fall * .9), .03 + .16 * fall.clip(0, 1))
            dark = dark * (fall > 0) * (1 - fall.clip(0, 1)) ** .6
            under = length((self.sx - cx) / (.42 * scale), (self.sy - foot) / .045)
            under = M.exp(-under * under * 1.5)
            dark = high(dark, under * .62)
        self.img = [i * (1 - dark * (.92, .90, .84)[k]) for k, i in enumerate(self.img)]
        thing(self)
        # Vignette, soft shoulder, display curve.
        v = 1 - .20 * smooth(.7, 1.5, length(self.sx, self.sy))
        return [(1 - M.exp(-1.45 * (i * v).clip(0, 9))) ** (1 / 2.2) for i in self.img]


FOOT = .68  # the lowest edge of standing things, which touch the ground a little further back


# ---- things --------------------------------------------------------------------------------------


def facets(x, y, n, r, table):
    """A cut stone, (distance, height): a flat table and two rows of sloping sides."""
    d = polygon(x, y, n, r)
    return d, low(low(-d * 1.1, -polygon(x, y, n, r * .93, .5) * .8 + .02), table)


def cut_stone(s, x, y, r, shape, mat):
    mat = tint(mat, 1.25)._replace(glass=.8, spec=.9, gloss=40.0)
    if shape in ("brilliant", "hexagon"):
        n = 8 if shape == "brilliant" else 6
        d, h = facets(x, y, n, r, r * .45)
        inner = polygon(x, y, n, r * .52, .5)
    elif shape == "emerald":
        d = high(box(x, y, r * .8, r), (abs(x) + abs(y) - r * 1.5) * .707)
        h = low(low(-d * 1.2, -d * .6 + r * .1), r * .34)
        inner = high(box(x, y, r * .42, r * .62), (abs(x) + abs(y) - r * .92) * .707)
    else:
        yy = y - r * .22
        d = drop(x, yy, r * .78, r * 1.45)
        h = low(low(-d * 1.2, -polygon(x, yy, 6, r * .74) * .7 + r * .05), r * .34)
        inner = drop(x, yy, r * .42, r * .8)
    s.part(d, h * 1.3, mat)
    s.part(inner, 0 * x + .15 * (x * s.l[0] + y * s.l[1]), mat._replace(glow=.10), .55)
    return d


def shield(s):
    x, y, shape = s.x, s.y, s.spec.shape
    if shape == "round":
        d = length(x, y) - .66
    else:
        w, r, y0 = (.56, 1.12, -.15) if shape == "heater" else (.48, 1.75, -.18)
        if shape == "kite":
            y = y + .08
        side = M.where(y > y0, length(abs(x) + r - w, y - y0) - r, abs(x) - w)
        top = -.60 - y if shape == "heater" else length(x, y + .12) - .77 - 2 * high(y, -.12)
        d = high(side, top)
    s.part(d, dome(d, .05) * 1.2, s.metal)
    f = d + .075
    which = s.pick(10, 7)
    signs = [x, low(high(x, y), high(-x, -y)), low(abs(x), abs(y + .08)) - .10,
             abs(x + y * .8) * .78 - .13, abs(y - abs(x) * .7 + .12) * .8 - .12,
             abs(frac(x * 2.2 + .25) - .5) / 2.2 - .11, y - .02]
    sign = signs[0]
    for k, other in enumerate(signs[1:], 1):
        sign = M.where(which == k, other, sign)
    h = dome(f, .9) * .55 + 0 * x

    def paint():
        grain = .92 + .16 * noise(s, x * 3, y * 14, 3)
        return tint(blend(s.main, s.second, s.side(sign)), grain)._replace(gloss=18.0, spec=.3)

    s.part(f, h, paint)
    s.round(length(x, y) - .15 if shape == "round" else length(x, y + .08) - .10, .14, s.metal)
    if shape == "round":
        for k in range(8):
            a = k * math.pi / 4
            s.round(length(x - .625 * math.cos(a), y - .625 * math.sin(a)) - .027, .027, s.metal)
    else:
        heater, kite = ((.36, -.54), (.12, -.54), (.40, .12)), ((.42, -.1), (.30, .42))
        for nx, ny in heater if shape == "heater" else kite:
            s.round(length(abs(x) - nx, y - ny) - .024, .024, s.metal)


def ring(s):
    x, y = s.x, s.y
    r, w = .44, mix(.055, .085, s.u(10))
    s.round(abs(length(x, (y - .16) * 1.06) - r) - w, .075, s.metal)
    groove = abs(length(x, (y - .16) * 1.06) - r) - .012
    s.part(high(groove, .15 - y), None, tint(s.main, .8), .55)
    s.round(trapezoid(x, y + .30, .20, .10, .10) - .02, .05, s.metal)
    size = mix(.19, .25, s.u(11))
    s.round(length(x, y + .42) - size - .035, .05, s.metal)
    cut_stone(s, x, y + .42, size, s.spec.shape, s.main)
    for k in range(4):
        a = (k + .5) * math.pi / 2
        s.round(length(x - math.cos(a) * size * 1.02, y + .42 - math.sin(a) * size * 1.02) - .032,
                .03, s.metal)


def gem(s):
    x, y = s.x, s.y
    r = .50
    shape = s.spec.shape
    mat = tint(s.main, 1.2)._replace(glass=.75, spec=1.0, gloss=50.0)
    if shape == "drop":
        cut_stone(s, x, y, .58, shape, s.main)
        claw = trapezoid(x, y + .68, .05, .10, .06) - .02
        loop = abs(length(x, y + .80) - .07) - .024
        s.part(claw, dome(claw, .05), s.metal)
        s.part(loop, dome(loop, .02), s.metal)
        return
    n = 8 if shape == "brilliant" else 6
    setting = polygon(x, y, n, r + .07) if shape == "hexagon" else length(x, y) - r * 1.08 - .05
    s.part(setting, dome(setting, .06), s.metal)
    d, h = facets(x, y, n, r, .20)
    s.part(d, h * 1.5, mat)
    # The facets of the far side shine through the table.
    table = polygon(x, y, n, r * .56, .5)
    back = None
    for j in range(n):
        a = 2 * math.pi * (j + .25) / n
        p = abs(x * math.cos(a) + y * math.sin(a))
        back = p if back is None else low(back, p)
    s.part(table, back * 1.1 + .2 * (x * s.l[0] + y * s.l[1]),
           mat._replace(glow=.12, spec=.4, gloss=20.0), .8)


def glass_body(s, d, h, level):
    """A vessel of clear glass with a coloured liquid, bubbles, and the window's reflection."""
    x, y = s.x, s.y
    pale = Mat((.62, .72, .76), gloss=60.0, spec=1.0, glass=.5)
    s.part(d, h, pale, .45)
    q = high(d + .035, level - y + .008 * M.sin(x * 9))
    glow = s.main._replace(glass=.85, spec=.2)
    s.part(q, h * .8, lambda: tint(glow, 1.15 + .35 * smooth(.65, -.1, y))._replace(glow=.18))
    top = length(x / 3, (y - level)) - .016
    s.part(high(top, d + .03), None, tint(s.main, 1.6), .55)
    for k in range(5):
        bx, by = (s.u(12 + k) - .5) * .44, mix(.58, level + .08, s.u(17 + k))
        b = length(x - bx, y - by) - (.014 + .022 * s.u(22 + k))
        s.part(high(b, d + .06), dome(b, .04), tint(glow, 1.8)._replace(spec=.8), .55)
    if s.shadow is None:
        shine = abs(d + .085) - .020
        mask = smooth(.02, .35, x * s.l[0] + (y - .2) * s.l[1] - .05)
        s.part(shine, None, Mat((1.0, 1.0, 1.0), spec=0.0), mask * .55)


def potion(s):
    x, y, shape = s.x, s.y, s.spec.shape
    if shape == "round":
        d = length(x, y - .22) - .46
        h = (.46 ** 2 - x * x - (y - .22) ** 2).clip(1e-6, 9) ** .5
        level, neck, top = mix(-.05, .22, s.u(10)), .13, -.36
    elif shape == "cone":
        _, h = lathe(x, y, [(-.30, .12), (-.22, .12), (.55, .50), (.68, .44)])
        d = trapezoid(x, y - .19, .13, .47, .49) + .02 * smooth(.1, 0, abs(y - .68))
        level, neck, top = mix(.05, .30, s.u(10)), .12, -.36
    else:
        d = box(x, y - .17, .29, .51, .10)
        h = tube(x, .29)
        level, neck, top = mix(-.18, .15, s.u(10)), .11, -.40
    cork = box(x, y - top + .17, neck * .82, .09, .02)
    s.part(cork, tube(x, neck), lambda: s.wood(x * 2, y * 2, tint(WOOD, 1.3), 2))
    stem = box(x, y - top - .05, neck, .18, .01)
    both = low(stem, d)
    h = high(h, tube(x, neck) * (y < .0))
    glass_body(s, both, h, level)
    s.round(box(x, y - top + .10, neck + .035, .032, .03), .05,
            Mat((.70, .78, .80), gloss=60.0, spec=1.0, glass=.5), .85)
    s.round(box(x, y - top - .16, neck + .018, .028, .02), .04, s.metal)
    tag = box(x, y - .36, .17, .12, .02)
    s.part(tag, .3 * (.5 - x * x).clip(0, 1) ** .5, PAPER)
    sign = star(x, y - .36, 5, .075, .032)
    s.part(sign, None, tint(s.main, .7), .9)


def emblem(s, x, y, shape, r):
    if shape == "star":
        return star(x, y, 5, r, r * .42)
    if shape == "moon":
        return high(length(x, y) - r * .85, r * .72 - length(x - r * .38, y + r * .1))
    return low(length(x, y) - r * .48, star(x, y, 8, r, r * .55))


def coin(s):
    x, y = s.x, s.y
    for ox, oy in ((.30, .34), (-.34, .22)):
        d = length(x - ox, y - oy) - .44
        s.part(d, dome(d, .04), tint(s.metal, .85))
        s.part(d + .06, -dome(d + .06, .02) * .5, tint(s.metal, .8))
    y = y + .10
    d = length(x, y) - .56
    s.part(d, dome(d, .045), s.metal)
    f = d + .075
    e = emblem(s, x, y, s.spec.shape, .34)
    s.part(f, dome(e, .07) * .9 - dome(f, .03) * .7,
           lambda: tint(s.metal, mix(.82, 1.05, s.side(e))))
    inner = abs(length(x, y) - .43) - .012
    s.part(inner, dome(inner, .012), s.metal)


def sword(s):
    x, y, shape = s.x, s.y, s.spec.shape
    steel = Mat(s.three([METALS["silver"]], 1.8), 1.0, 40.0, 1.0)
    if shape == "axe":
        d = box(x, y - .06, .045, .78, .04)
        s.part(d, tube(x, .05), lambda: s.wood(y, x * 2, WOOD, 2))
        head = high(high(length(x - .10, y + .42) - .44, .30 - length(x - .22, y + .98)),
                    .30 - length(x - .22, y - .14))
        head = high(head, -.10 - x)
        s.part(head, chamfer(head, .13, .07), steel)
        s.round(length(x - .20, y + .42) - .065, .065, s.metal)
        for k in range(3):
            s.round(box(x, y - .50 - .1 * k, .055, .026, .02), .04, tint(s.main, .8))
        return
    wide, tip, guard = (.085, -.98, .30) if shape == "sword" else (.13, -.72, .24)
    point = smooth(tip, tip + .28, y) ** .6 if shape == "sword" else ((y - tip) / .9).clip(0,
                                                                                           1) ** .55
    w = wide * point
    d = high(high((abs(x) - w) * .9, y - .36), tip + .02 - y)
    s.part(d, (w - abs(x)).clip(0, 1) * .55, steel)
    fuller = box(x, y + .12, .016, .42, .01)
    s.part(fuller, None, tint(steel, .5), .6)
    grip = box(x, y - .58, .052, .20, .02)
    s.part(grip, tube(x, .055) + .012 * M.sin((y + x * .5) * 75), tint(s.main, .75))
    s.round(low(box(x, y - .37, guard, .036, .03), length(abs(x) - guard, y - .37) - .055), .05,
            s.metal)
    s.round(length(x, y - .82) - .085, .08, s.metal)
    s.round(length(x, y - .82) - .042, .04, jewel(s.second))
    s.round(length(x, y - .37) - .045, .045, jewel(s.main))


def key(s):
    x, y, shape = s.x, s.y, s.spec.shape
    shaft = box(x, y - .22, .052, .56, .03)
    teeth = None
    for k in range(3):
        t = box(x - .14, y - .48 - .12 * k, .10 + 0 * x, .038, .01)
        t = t + (s.u(12 + k) < .3) * .02 - s.u(15 + k) * .03
        teeth = t if teeth is None else low(teeth, t)
    s.part(teeth, dome(teeth, .03), s.metal)
    s.part(shaft, dome(shaft, .055), s.metal)
    yy = y + .54
    if shape == "ring":
        d = abs(length(x, yy) - .24) - .065
    elif shape == "trefoil":
        d = low(abs(length(x, yy + .16) - .14), abs(length(abs(x) - .16, yy - .06) - .14)) - .05
    else:
        d = abs((abs(x) + abs(yy)) * .707 - .20) - .055
    s.part(d, dome(d, .06), s.metal)
    if shape != "trefoil":
        cut_stone(s, x, yy, .12, "brilliant", s.main)
    else:
        s.round(length(x, yy) - .08, .08, jewel(s.main))
    for at, r in ((-.26, .095), (-.12, .075), (.30, .075)):
        s.round(box(x, y - at, r, .034, .03), .045, s.metal)


def book(s):
    x, y, shape = s.x, s.y, s.spec.shape
    back = box(x - .03, y - .04, .52, .68, .04)
    s.part(back, dome(back, .03), tint(s.main, .5))
    pages = box(x - .05, y - .02, .47, .64, .01)
    s.part(pages, None, lambda: tint(PAPER, .75 + .2 * frac((x + y) * 22)))
    d = box(x + .03, y + .02, .50, .66, .04)
    leather = s.main._replace(gloss=16.0, spec=.25)
    s.part(d, dome(d, .03), lambda: tint(leather, .78 + .3 * noise(s, x * 6, y * 6, 3)))
    spine = high(d, x + .38)
    s.part(spine, .15 * (1 - ((x + .46) / .09) ** 2).clip(0, 1) ** .5, tint(leather, .8))
    for k in range(4):
        s.round(box(x + .455, y + .42 - .26 * k, .085, .026, .01), .03, s.metal)
    frame = abs(box(x - .05, y + .02, .35, .56, .03)) - .012
    s.part(frame, dome(frame, .012), s.metal)
    for sy in (-1, 1):
        s.round(high(abs(x - .39) + abs(y + .02 - .60 * sy) - .17, d), .03, s.metal)
    ex, ey = x - .05, y + .02
    if shape == "jewelled":
        s.round(abs(ex) * .8 + abs(ey) * .6 - .20, .05, s.metal)
        cut_stone(s, ex, ey, .13, "brilliant", s.second)
    elif shape == "star":
        s.round(abs(length(ex, ey) - .26) - .016, .016, s.metal)
        e = star(ex, ey, 6, .22, .11)
        s.part(e, chamfer(e, .05, .04), s.metal)
    else:
        for oy in (-.30, .26):
            s.round(box(x - .36, y - oy, .17, .055, .02), .04, s.metal)
            s.round(length(x - .26, y - oy) - .03, .03, tint(s.metal, .6))
        e = star(ex + .05, ey, 4, .20, .07)
        s.part(e, chamfer(e, .04, .03), tint(s.second, .9))


def chest(s):
    x, y = s.x, s.y
    iron = s.metal
    body = box(x, y - .38, .62, .30, .02)
    s.part(body, dome(body, .03), lambda: s.planks(x, y * .5 + .2, tint(WOOD, 1.1), 12.0))
    if s.spec.shape == "arched":
        lid = high(length(x, (y - .10) * 1.5) - .66, y - .09)
        lid = high(lid, abs(x) - .64)
        h = .5 * (.25 - (y + .10) ** 2).clip(1e-6, 9) ** .5
    else:
        lid = box(x, y + .06, .65, .15, .05)
        h = dome(lid, .1)
    s.part(lid, h, lambda: s.planks(x, y * .5 + .3, tint(WOOD, 1.25), 12.0))
    for at in (-.46, 0, .46):
        b = high(low(body, lid), abs(x - at) - .055)
        s.part(b, h * .6 + .7 * dome(abs(x - at) - .055, .03), iron)
        for yy in (-.05, .20, .40, .58):
            s.round(length(x - at, y - yy) - .02, .02, iron)
    s.round(box(x, y - .10, .645, .035, .02), .04, iron)
    s.round(box(x, y - .655, .645, .03, .02), .04, iron)
    lock = box(x, y - .17, .115, .14, .04)
    s.part(lock, dome(lock, .04), tint(s.metal, 1.1))
    hole = low(length(x, y - .14) - .032, box(x, y - .20, .014, .06))
    s.part(hole, None, Mat((.01, .01, .01), spec=0.0))
    for side in (-1, 1):
        s.round(length(x - .23 * side, y - .38) - .055, .055, jewel(s.main))


def crown(s):
    x, y = s.x, s.y - .05
    n = 3 if s.spec.shape == "three-pointed" else 5
    w = .60
    # The front of a cylinder seen a little from above.
    bend = .06 * (x / w) ** 2
    velvet = high(length(x, (y + .02) * 1.5) - .50, y - .2)
    s.part(velvet, .5 * dome(velvet, .5), tint(s.main, .8)._replace(gloss=8.0, spec=.1))
    t = (x / (w * 2) + .5) * n
    f = abs(frac(t) - .5) * 2
    reach = mix(.62, .36, f ** .7) if n == 3 else mix(.55, .30, f ** .8)
    up = .52 - reach * 1.25
    d = high(high(abs(x) - w, (up - y) * .55), y - .62 + bend * .8)
    curve = (w * w * 1.02 - x * x).clip(1e-6, 9) ** .5 * .75
    s.part(d, curve + dome(d, .03), s.metal)
    for at in (.22, .56):
        b = high(abs(y - at + bend * .8) - .035, abs(x) - w - .02)
        s.part(b, curve + dome(abs(y - at + bend * .8) - .035, .035), s.metal)
    for k in range(n):
        px = ((k + .5) / n - .5) * 2 * w
        tip = .52 - (.62 if n == 3 else .55) * 1.25 - .03
        s.round(length(x - px, y - tip) - .062, .062, s.metal)
        if n == 3 or k % 2 == 0:
            s.round(length((x - px) * (1.0 + .5 * abs(px)), y - .39 + .06 * (px / w) ** 2) - .075,
                    .07, jewel(s.second if k % 2 else s.main))


def bell(s):
    x, y = s.x, s.y
    s.round(box(x, y + .66, .20, .07, .03), .06, lambda: s.wood(x, y, DARK_WOOD, 2))
    s.round(abs(length(x, y + .52) - .09) - .03, .03, s.metal)
    s.round(length(x, y - .56) - .12, .12, tint(s.metal, .6))
    d, h = lathe(x, y, [(-.46, .08), (-.36, .26), (-.05, .33), (.30, .40), (.50, .58), (.55, .60)])
    s.part(d, h, s.metal)
    for at, w in ((-.24, .30), (.24, .40), (.47, .60)):
        b = high(abs(y - at) - .020, abs(x) - w)
        b = high(b, d - .012)
        s.part(b, h + dome(abs(y - at) - .020, .02), s.metal)
    e = star(x, y - .03, 5, .13, .055)
    s.part(e, h + dome(e, .03), tint(s.main, 1.0)._replace(spec=.7))
    s.round(low(length(abs(x) - .10, (y + .62) * 1.3) - .10, length(x, y + .62) - .055), .05,
            tint(s.main, .9)._replace(gloss=12.0))


def chalice(s):
    x, y, shape = s.x, s.y, s.spec.shape
    if shape == "chalice":
        d, h = lathe(x, y,
                     [(-.55, .40), (-.30, .39), (.02, .07), (.12, .06), (.50, .08), (.62, .34),
                            (.68, .36)])
        s.part(d, h, s.metal)
        mouth = length(x, (y + .54) * 4.5) - .39
        s.part(mouth, None, tint(s.metal, .35))
        wine = length(x, (y + .525) * 5.5) - .34
        s.part(wine, None, tint(s.main, .7))
        s.round(abs(mouth) - .014, .014, s.metal)
        s.round(length(x, (y - .10) * 1.4) - .115, .115, s.metal)
        for px in (-.24, 0, .24):
            s.round(length((x - px) * (1 + abs(px)), y + .30) - .062, .06, jewel(s.main))
        band = high(abs(y + .43) - .018, d - .01)
        s.part(band, h + dome(abs(y + .43) - .018, .018), s.metal)
    elif shape == "vase":
        for side in (-1, 1):
            s.round(abs(length(x - .36 * side, (y + .10) * .9) - .17) - .035, .035,
                    tint(s.main, .9)._replace(spec=.6, gloss=40.0))
        d, h = lathe(x, y,
                     [(-.60, .22), (-.50, .15), (-.36, .15), (.05, .46), (.20, .46), (.60, .20),
                            (.68, .26)])

        def glaze():
            m = s.main._replace(spec=.9, gloss=45.0)
            zig = abs(y - .10 - (abs(frac(x * 4 / (1.1 - x * x)) - .5) - .25) * .24)
            m = blend(m, s.second, s.side(zig - .035))
            for at in (-.14, .34):
                m = blend(m, s.second, s.line(y - at, .025))
            return m
        s.part(d, h, glaze)
        s.round(box(x, y + .60, .24, .03, .03), .05, s.metal)
    else:
        stone = s.main._replace(spec=.6, gloss=30.0)
        d, h = lathe(x, y,
                     [(-.48, .24), (-.40, .10), (-.25, .12), (.30, .20), (.44, .20), (.52, .38),
                            (.68, .42)])
        s.part(d, h, stone)
        for at, r in ((.46, .27), (.60, .40), (-.28, .20), (-.36, .15)):
            b = box(x, y - at, r, .032, .03)
            s.part(b, tube(x, r) * .7 + dome(b, .03), tint(stone, 1.05))
        up = abs(frac(x / .16 + .5) - .5) * .2
        c = high(high(abs(x) - .26 + (y + .50) * .25, -.68 + up - y), y + .46)
        s.part(c, tube(x, .30), s.metal)
        s.round(length(x, y + .70) - .07, .07, s.metal)


def flame(s, x, y, r):
    """A candle's flame with its foot at (0, 0)."""
    yy = y + r * 1.1
    w = x * (1 + .6 * smooth(0, -r * 2, yy))
    d = low(length(w / .6, yy) - r * .8, segment(w, yy, 0, 0, 0, -r * 1.1, r * .18))
    s.part(d, None, FLAME)
    e = length(w / .5, yy - r * .15) - r * .5
    s.part(e, None, Mat((1.0, .9, .55), glow=2.0))


def lantern(s):
    x, y = s.x, s.y
    warm = (1.0, .55, .18)
    if s.spec.shape == "candle":
        s.light_up(0, -.32, .75, warm, .38)
        dish, hd = lathe(x, y, [(.50, .42), (.58, .40), (.62, .20), (.68, .30)])
        s.round(abs(length(x - .48, y - .50) - .11) - .03, .03, s.metal)
        s.part(dish, hd, s.metal)
        wax = box(x, y - .17, .15, .36, .04)
        wax = low(wax, segment(x, y, .10, -.1, .10, .16 + .2 * s.u(12), .05))
        wax = low(wax, segment(x, y, -.12, -.1, -.12, .02 + .2 * s.u(13), .045))
        lit = smooth(.5, -.25, y)
        s.part(wax, tube(x, .16),
               lambda: tint(s.main, .8 + .5 * lit)._replace(spec=.2, glow=.12))
        wick = segment(x, y, 0, -.18, .01, -.26, .012)
        s.part(wick, None, Mat((.02, .02, .02)))
        flame(s, x, y + .24, mix(.13, .17, s.u(10)))
        s.light_up(0, -.40, .22, warm, .8)
        return
    s.light_up(0, .12, .8, warm, .42)
    hoop = abs(length(x, y + .62) - .17) - .025
    s.part(hoop, dome(hoop, .025), s.metal)
    glass = box(x, y - .14, .32, .36, .04)
    amber = Mat((.9, .42, .10), glow=.35, spec=.5)
    s.part(glass, None, lambda: tint(amber, .5 + 1.3 * M.exp(-(x * x * 5 + (y - .15) ** 2 * 6))))
    wax = box(x, y - .42, .09, .10, .02)
    s.part(wax, tube(x, .1), Mat((.9, .8, .6), glow=.3))
    flame(s, x, y - .30, .13)
    s.light_up(0, .16, .28, warm, .7)
    pane = Mat((1.0, 1.0, 1.0), spec=0.0)
    s.part(segment(x, y, -.22, .32, -.12, -.12, .016), None, pane, .22)
    for at in (-.31, -.105, .105, .31):
        s.round(box(x - at, y - .14, .024 if abs(at) > .2 else .013, .38, .01), .024, s.metal)
    roof, h = lathe(x, y, [(-.52, .07), (-.44, .10), (-.26, .36), (-.19, .40)])
    s.part(roof, h, s.metal)
    s.round(length(x, y + .50) - .07, .07, s.metal)
    for at, r in ((-.20, .40), (.52, .39), (.62, .44)):
        b = box(x, y - at, r, .048, .03)
        s.part(b, tube(x, r) * .6 + dome(b, .04), s.metal)


def masonry(s, x, y, base, rows):
    """Courses of stone; every other row is moved by half a stone."""
    row = M.floor(y * rows)
    u = x * rows * .55 + .5 * frac(row * .5) * 2
    joint = low(abs(frac(y * rows) - .5) * -1 + .5, (abs(frac(u) - .5) * -1 + .5) * 1.8)
    tone = .85 + .3 * frac(M.floor(u) * .618 + row * .382 + s.u(33))
    return tint(base, tone * mix(.68, 1.0, smooth(.03, .12, joint)))


def window(s, x, y, w, h, bars=True):
    arch = low(box(x, y, w, h), length(x, y + h) - w)
    frame = arch - .022
    s.part(frame, dome(frame, .02), tint(STONE, .75))
    lit = Mat((1.0, .66, .24), glow=.9, spec=0.0)
    s.part(arch, None, lambda: blend(Mat((.10, .14, .22), spec=.3), lit, 1.0 * (s.u(14) < .6)))
    if bars:
        s.part(low(abs(x) - .008, abs(y) - .008) + high(arch, 0), None, DARK_WOOD)


def door(s, x, y, w, h):
    arch = low(box(x, y, w, h), length(x, y + h) - w)
    frame = arch - .03
    s.part(high(frame, y - h), dome(frame, .03), tint(STONE, .7))
    s.part(arch, None, lambda: s.planks(y, x, tint(WOOD, .8), 14.0))
    s.round(length(x - w * .6, y) - .018, .018, s.metal)


def shingles(s, x, y, mat, rows):
    row = M.floor(y * rows)
    u = frac(x * rows * .8 + .5 * frac(row * .5) * 2) - .5
    v = frac(y * rows)
    edge = smooth(.0, .25, 1 - v + .25 - u * u * 1.6)
    tone = .85 + .25 * frac(M.floor(x * rows * .8) * .618 + row * .27)
    return tint(mat, tone * (.60 + .45 * v) * (.7 + .3 * edge))._replace(spec=.08)


def bush(s, x, y, r, mat):
    d = low(length(x - r * .8, y - r * .35) - r * .65, length(x + r * .8, y - r * .3) - r * .7)
    d = low(d, length(x, y) - r)
    s.part(d, dome(d, r * .9) + .25 * r * noise(s, x * 9 / r * .2, y * 9 / r * .2, 2), mat)


def tree(s, x, y, r):
    leaf = Mat((.10, .25, .06), spec=.04)
    if s.spec.ground == "snow":
        leaf = Mat((.10, .20, .14), spec=.04)
        trunk = box(x, y - .10 * r, .04 * r, .2 * r)
        s.part(trunk, None, DARK_WOOD)
        for k in range(3):
            yy = y + (.10 + .28 * k) * r
            t = trapezoid(x, yy, 0, (.40 - .08 * k) * r, .22 * r)
            s.part(t, (.45 * r - abs(x)) * .6, blend(leaf, SNOW, smooth(.1 * r, -.25 * r, yy)))
        return
    trunk = box(x, y - .10 * r, .05 * r, .3 * r)
    s.part(trunk, None, DARK_WOOD)
    bush(s, x, y + .45 * r, .32 * r, leaf)


def tower(s):
    x, y = s.x, s.y
    side = 1 - 2 * (s.u(20) < .5) * 1.0
    tree(s, x + side * .70, y - .50, mix(.55, .85, s.u(21)))
    w = mix(.27, .34, s.u(10))
    stone = tint(STONE, mix(.8, 1.25, s.u(11)))
    d = trapezoid(x, y - .14, w, w * 1.12, .54)
    h = (w * w * 1.2 - x * x).clip(1e-6, 9) ** .5
    s.part(d, h, lambda: masonry(s, x * (1 + x * x * 2), y, stone, 11.0))
    cloth = .05 * M.sin(x * 22)
    if s.spec.shape == "crenellated":
        s.part(box(x, y + .75, .012, .22), None, DARK_WOOD)
        s.part(high(high(abs(y + .86 + .02 * M.sin(x * 20)) - .085, -x), x - .30), cloth, s.main)
        c = trapezoid(x, y + .46, w * 1.28, w * 1.05, .10)
        step = w * .62
        teeth = high(box(x, y + .60, w * 1.28, .09), (abs(frac(x / step + .5) - .5) - .31) * step)
        top = low(c, teeth)
        s.part(top, h, lambda: masonry(s, x * (1 + x * x * 2), y, tint(stone, 1.08), 11.0))
    else:
        c = trapezoid(x, y + .40, w * 1.15, w * 1.0, .05)
        s.part(c, h, tint(stone, 1.1))
        s.part(box(x, y + .88, .012, .16), None, DARK_WOOD)
        s.part(high(high(abs(y + .97 + .02 * M.sin(x * 20)) - .06, -x), x - .24), cloth, s.second)
        roof = trapezoid(x, y + .64, .0, w * 1.38, .25)
        hw = w * 1.38 * ((y + .89) / .5).clip(.02, 1)
        s.part(roof, tube(x, hw), lambda: shingles(s, x / (hw + .15) * .5, y, s.main, 13.0))
    window(s, x, y + .14, .065, .09)
    window(s, x - .10, y - .20, .05, .07)
    door(s, x, y - .54, .11, .14)
    bush(s, x - side * .42, y - .64, .09, Mat((.10, .24, .06), spec=.03))


def cottage(s):
    x, y, chapel = s.x, s.y, s.spec.shape == "chapel"
    side = 1 - 2 * (s.u(20) < .5) * 1.0
    tree(s, x + side * .74, y - .46, mix(.65, 1.0, s.u(21)))
    x = x * side
    wall = tint(PLASTER, .9) if not chapel else tint(STONE, 1.35)
    if chapel:
        d = box(x + .36, y - .02, .17, .66)
        s.part(d, None, lambda: masonry(s, x, y, tint(wall, .95 - .25 * (x + .36)), 10.0))
        spire = trapezoid(x + .36, y + .86, .0, .23, .24)
        s.part(spire, (.23 - abs(x + .36)).clip(0, 1) * .7, lambda: shingles(s, x, y, s.main, 13.0))
        bar = low(box(x + .36, y + 1.10, .010, .07), box(x + .36, y + 1.12, .035, .010))
        s.part(bar, None, s.metal)
        window(s, x + .36, y + .42, .07, .10, False)
        s.round(length(x + .36, (y + .40)) - .05, .05, s.metal)
    else:
        c = box(x - .34, y + .44, .065, .22)
        s.part(c, None, lambda: masonry(s, x, y, Mat((.40, .16, .10), spec=.03), 16.0))
        s.round(box(x - .34, y + .65, .085, .025), .02, STONE)
        if s.shadow is None:
            for k in range(4):
                puff = length(x - .36 - .06 * k * k * .5, y + .76 + .10 * k) - (.05 + .025 * k)
                s.part(puff + .02, dome(puff, .2), Mat((.75, .75, .78), spec=0.0), .34 - .07 * k)
    left, right = (-.52, .60) if not chapel else (-.20, .62)
    mid, half = (left + right) / 2, (right - left) / 2
    d = box(x - mid, y - .35, half, .33)
    if chapel:
        s.part(d, None, lambda: masonry(s, x, y, tint(wall, 1.05), 10.0))
    else:
        shade = .2 * smooth(.3, .0, y)
        s.part(d, None, lambda: tint(wall, .9 + .15 * noise(s, x * 4, y * 4, 3) - shade))
        for at in (-.50, -.12, .24, .58):
            s.part(box(x - at, y - .35, .022, .33), None, lambda: s.wood(y, x, DARK_WOOD, 2))
        s.part(box(x - mid, y - .34, half, .020), None, lambda: s.wood(x, y, DARK_WOOD, 2))
        for at, to in ((-.48, -.14), (.56, .26)):
            s.part(segment(x, y, at, .64, to, .36, .018), None, DARK_WOOD)
    roof = trapezoid(x - mid, y + .14, half * .80, half * 1.14, .20)
    colour = s.main
    if s.spec.ground == "snow":
        colour = blend(s.main, SNOW, smooth(-.02, -.20, y))
    s.part(roof, .5 * y, lambda: shingles(s, x, y, colour, 11.0))
    s.round(box(x - mid, y - .055, half * 1.14, .018, .01), .02, DARK_WOOD)
    if chapel:
        for at in (.02, .24, .46):
            window(s, x - at, y - .32, .055, .10)
        door(s, x + .36, y - .54, .085, .14)
    else:
        window(s, x + .31, y - .24, .075, .055)
        window(s, x - .42, y - .24, .075, .055)
        door(s, x - .06, y - .53, .10, .15)
    bush(s, x - .74, y - .62, .10, Mat((.10, .24, .06), spec=.03))
    bush(s, x + .60, y - .64, .08, Mat((.14, .28, .07), spec=.03))


def windmill(s):
    x, y = s.x, s.y
    d = trapezoid(x, y - .20, .22, .38, .48)
    hw = mix(.22, .38, ((y + .28) / .96).clip(0, 1))
    h = (hw * hw * 1.1 - x * x).clip(1e-6, 9) ** .5
    s.part(d, h,
           lambda: blend(tint(PLASTER, .92 + .14 * noise(s, x * 4, y * 4, 3)), tint(STONE, .8),
                         smooth(.42, .46, y)))
    for at in (-.10, .44):
        b = high(abs(y - at) - .018, d - .012)
        s.part(b, h + .02, DARK_WOOD)
    s.round(high(length(x, (y + .26) * .95) - .30, y + .24), .30,
            lambda: shingles(s, x, y, s.main, 14.0))
    s.round(box(x, y + .25, .31, .03, .02), .03, DARK_WOOD)
    door(s, x, y - .54, .095, .14)
    window(s, x, y - .14, .06, .07)
    bush(s, x - .52, y - .63, .10, Mat((.10, .24, .06), spec=.03))
    hx, hy = 0.0, -.36
    turn = s.u(12) * 1.57
    c, sn = M.cos(turn), M.sin(turn)
    px, py = x - hx, y - hy
    for k in range(4):
        u, v = px * c + py * sn, py * c - px * sn
        arm = box(u - .34, v, .34, .018)
        sail = box(u - .40, v - .075, .26, .062)
        cloth = lambda: tint(blend(s.second, PLASTER, .35), .75 + .35 * smooth(.0, .12, v))
        s.part(sail, .1 * v, cloth)
        grid = high(sail, low(abs(frac(u * 9) - .5) / 9 - .008, abs(v - .075) - .008))
        s.part(grid, None, tint(WOOD, .7), .8)
        s.part(arm, dome(arm, .02), WOOD)
        px, py = py, -px
    s.round(length(x - hx, y - hy) - .055, .055, s.metal)


THINGS = {"shield": shield, "ring": ring, "potion": potion, "tower": tower, "sword": sword,
          "lantern": lantern, "coin": coin, "cottage": cottage, "gem": gem, "chalice": chalice,
          "book": book, "crown": crown, "key": key, "windmill": windmill, "chest": chest,
          "bell": bell}


def draw(specs):
    """Pictures of one kind, shape and ground: [pictures, 3, SIZE, SIZE], 8 bits."""
    img = Scene(specs).draw()
    a = M.stack([i + 0 * img[0] for i in img], 1) * 255 + .5
    a = a.clip(0, 255)
    return a.astype(np.uint8) if DEVICE is None else a.to(M.uint8)


def picture(split, i):
    return draw([spec(split, i)])[0]


def png(path, rgb):
    """rgb: [height, width, 3], 8 bits."""
    h, w, _ = rgb.shape
    a = rgb.astype(np.int16)
    left = np.concatenate([np.zeros_like(a[:, :1]), a[:, :-1]], 1)
    up = np.concatenate([np.zeros_like(a[:1]), a[:-1]], 0)
    corner = np.concatenate([np.zeros_like(up[:, :1]), up[:, :-1]], 1)
    p = left + up - corner
    pl, pu, pc = abs(p - left), abs(p - up), abs(p - corner)
    paeth = np.where((pl <= pu) & (pl <= pc), left, np.where(pu <= pc, up, corner))
    tries = np.stack([a, a - left, a - up, a - (left + up) // 2, a - paeth]).astype(np.uint8)
    best = abs(tries.astype(np.int8).astype(np.int32)).sum((2, 3)).argmin(0)
    raw = b"".join(bytes([f]) + tries[f, r].tobytes() for r, f in enumerate(best))

    def chunk(kind, data):
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    with open(path, "wb") as f:
        f.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, 8, 2, 0, 0, 0))
                + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b""))


def sheet(pictures, columns):
    """[3, SIZE, SIZE] pictures side by side, as [height, width, 3]."""
    rows = [np.concatenate(pictures[i:i + columns], 2) for i in range(0, len(pictures), columns)]
    return np.concatenate(rows, 1).transpose(1, 2, 0)


def read_png(path):
    """[3, height, width] of an 8-bit RGB file without interlace."""
    with open(path, "rb") as f:
        file = f.read()
    at, raw = 8, b""
    while at < len(file):
        size, kind = struct.unpack(">I4s", file[at:at + 8])
        if kind == b"IHDR":
            w, h, *form = struct.unpack(">IIBBBBB", file[at + 8:at + 21])
            assert form == [8, 2, 0, 0, 0], "%s is no plain 8-bit RGB" % path
        if kind == b"IDAT":
            raw += file[at + 8:at + 8 + size]
        at += 12 + size
    raw, up = zlib.decompress(raw), [0] * (3 * w)
    rows = []
    for y in range(h):
        kind, *line = raw[y * (3 * w + 1):(y + 1) * (3 * w + 1)]
        for x in range(3 * w):
            a, b, c = (line[x - 3], up[x], up[x - 3]) if x > 2 else (0, up[x], 0)
            nearest = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]
            line[x] = (line[x] + (0, a, b, (a + b) // 2, nearest)[kind]) & 255
        rows.append(line)
        up = line
    return np.array(rows, np.uint8).reshape(h, w, 3).transpose(2, 0, 1)


def compare(folder, path=None):
    """Of those of the shown pictures that are there."""
    originals, decoded = [], []
    for i in SHOWN:
        name = title(spec("heldout", i)).replace(", ", "-").replace(" ", "-")
        try:
            y = read_png("%s/%s.png" % (folder, name))
        except FileNotFoundError:
            continue
        x = picture("heldout", i)
        error = ((x.astype(np.float64) - y) ** 2).mean()
        print("%s: %.3f dB" % (name, 10 * math.log10(255 ** 2 / max(error, 1e-3))))
        originals.append(x)
        decoded.append(y)
    if path:
        png(path, sheet(originals + decoded, len(originals)))


def main():
    if sys.argv[1] == "compare":
        compare(*sys.argv[2:])
        return
    if sys.argv[1] == "sheet":
        n = int(sys.argv[2])
        png(sys.argv[3], sheet([picture("train", i) for i in range(n)], 8))
        return
    split, first, count, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    for i in range(first, first + count):
        png("%s/%s-%d.png" % (out, split, i), picture(split, i).transpose(1, 2, 0))


if __name__ == "__main__":
    main()
