"""A gfx11 code object: its kernels, their registers and instructions, and what limits their waves.

    code = CodeObject(open("gfx1100.co", "rb").read())
    code.kernels["rocq_k_norm"][".vgpr_count"]
    code.instructions()["rocq_k_norm"][0].name
"""
import ctypes
import functools
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile

# Processors by the machine number in the ELF header's flags (AMDGPU backend guide of LLVM).
MACHINES = {0x41: "gfx1100", 0x46: "gfx1101", 0x47: "gfx1102", 0x44: "gfx1103", 0x43: "gfx1150",
            0x4A: "gfx1151", 0x55: "gfx1152", 0x58: "gfx1153"}
TARGETS = sorted(MACHINES.values())
VGPR_FILES = 1536, 1024  # of a SIMD, in waves of 32 lanes


# rocq.h's own occupancy, for Python to call, compiled without what it does not need.
WITHOUT = "-DROCQ_NO_HIP", "-DROCQ_NO_SIMD", "-DROCQ_NO_THREADS", "-DROCQ_NO_STDIO"
_OCCUPANCY = """
#define ROCQ_IMPLEMENTATION
#define ROCQ_STATIC
#include "rocq.h"
int vgpr_file(int target) { return rocq__chip_find(target)->vgprs; }
int waves(int target, int vgprs, int lds, int threads, int wave, int cu_mode) {
    const rocq_occupancy_params p = {target, vgprs, lds, threads, wave, cu_mode != 0};
    rocq_occupancy o;
    return rocq_get_occupancy(&p, &o) == ROCQ_OK ? o.compiler_waves : -1;
}
"""


@functools.cache
def _occupancy():
    top = pathlib.Path(__file__).parent.parent.parent
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/occupancy.so"
        subprocess.run(["cc", "-O0", "-w", "-shared", "-fPIC", *WITHOUT, f"-I{top}", "-xc", "-",
                        "-o", library, "-lm"], input=_OCCUPANCY.encode(), check=True)
        return ctypes.CDLL(library)


def vgpr_file(target):
    return _occupancy().vgpr_file(int(target.removeprefix("gfx"), 16))


def waves_per_simd(target, vgprs, lds, threads, wave, cu_mode):
    """The compiler's occupancy: waves that a SIMD holds of this kernel alone."""
    return _occupancy().waves(int(target.removeprefix("gfx"), 16), max(vgprs, 1), lds, threads,
                              wave, cu_mode)


# ---------------------------------------------------------------------------------------------
# ELF and its metadata
# ---------------------------------------------------------------------------------------------

_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
            0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_SIZES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I",
          0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}


def message_pack(data, at=0):
    """The value at `at` in MessagePack, and where it ends."""
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 256, at
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    if tag in _NUMBERS:
        form = _NUMBERS[tag]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if tag < 0xC0:
        n = tag & (31 if tag >= 0xA0 else 15)
    else:
        n, = struct.unpack_from(_SIZES[tag], data, at)
        at += struct.calcsize(_SIZES[tag])
    if 0xA0 <= tag < 0xC0 or 0xC4 <= tag <= 0xDB:
        text = data[at:at + n]
        return text if tag in (0xC4, 0xC5, 0xC6) else text.decode(), at + n
    is_map = tag < 0x90 or tag in (0xDE, 0xDF)
    values = []
    for _ in range(2 * n if is_map else n):
        value, at = message_pack(data, at)
        values.append(value)
    return (dict(zip(values[::2], values[1::2])) if is_map else values), at


class CodeObject:
    def __init__(self, data):
        machine, = struct.unpack_from("<H", data, 18)
        if data[:4] != b"\x7fELF" or machine != 224:
            raise ValueError("not an AMDGPU code object")
        self.data = data
        self.version = data[8] + 2  # of the code object: the ELF's ABI version counts from 2
        flags, = struct.unpack_from("<I", data, 48)
        self.target = MACHINES.get(flags & 0xFF, f"machine {flags & 0xff:#x}")
        segments_at, sections_at = struct.unpack_from("<QQ", data, 32)
        segment_size, n_segments, section_size, n_sections = struct.unpack_from("<HHHH", data, 54)
        # segment: type flags offset address . file_size memory_size .
        self.segments = [struct.unpack_from("<IIQQQQQQ", data, segments_at + i * segment_size)
                         for i in range(n_segments)]
        # section: name type flags address offset size link info . .
        self.sections = [struct.unpack_from("<IIQQQQIIQQ", data, sections_at + i * section_size)
                         for i in range(n_sections)]
        self.symbols = {}   # every name: (address, section)
        self.sizes = {}     # and its bytes
        self.exported = []  # names in the dynamic symbol table
        metadata = {}
        for _, kind, _, _, at, size, link, *_ in self.sections:
            if kind in (2, 11):  # symbol tables, full and dynamic
                names = self.sections[link][4]
                for entry in range(at, at + size, 24):
                    name, _, _, section, address, n = struct.unpack_from("<IBBHQQ", data, entry)
                    if name:
                        name = self._string(names + name)
                        self.symbols[name] = (address, section)
                        self.sizes[name] = n
                        if kind == 11 and section:
                            self.exported.append(name)
            elif kind == 7:  # notes
                end = at + size
                while at + 12 <= end:
                    name_size, value_size, note = struct.unpack_from("<III", data, at)
                    name = data[at + 12:at + 12 + name_size]
                    at += 12 + (name_size + 3 & ~3)
                    if name == b"AMDGPU\0" and note == 32:
                        metadata, _ = message_pack(data[at:at + value_size])
                    at += value_size + 3 & ~3
        self.kernels = {k[".name"]: k for k in metadata.get("amdhsa.kernels", [])}

    def _string(self, at):
        return self.data[at:self.data.index(b"\0", at)].decode()

    def place(self, symbol):
        """Where in the file the bytes of a symbol are."""
        address, section = self.symbols[symbol]
        return self.sections[section][4] + address - self.sections[section][3]

    def machine_code(self, function):
        at = self.place(function)
        return self.data[at:at + self.sizes[function]]

    def descriptor(self, kernel):
        """The 64 bytes that the hardware is set up from (AMDGPU backend guide)."""
        symbol = self.kernels[kernel][".symbol"]
        address, at = self.symbols[symbol][0], self.place(symbol)
        lds, private, arguments, _, entry = struct.unpack_from("<IIIIq", self.data, at)
        resources1, resources2, properties = struct.unpack_from("<IIH", self.data, at + 48)
        return {"lds": lds, "private": private, "arguments": arguments, "entry": address + entry,
                "wgp": bool(resources1 >> 29 & 1), "denormals": resources1 >> 16 & 3 == 3,
                "resources2": resources2, "properties": properties,
                "wave32": bool(properties >> 10 & 1)}

    def waves(self, kernel):
        k = self.kernels[kernel]
        return waves_per_simd(self.target, k[".vgpr_count"], k[".group_segment_fixed_size"],
                              k[".max_flat_workgroup_size"], k[".wavefront_size"],
                              not self.descriptor(kernel)["wgp"])

    def instructions(self, only=()):
        """Every function's instructions in order, by the disassembler; or of these functions."""
        # Into a file, since the disassembler fills a pipe in pieces of 500 bytes.
        with tempfile.NamedTemporaryFile(suffix=".co") as file, tempfile.TemporaryFile("w+") as out:
            file.write(self.data)
            file.flush()
            some = [f"--disassemble-symbols={','.join(only)}"] if only else ["-d"]
            subprocess.run([disassembler(), *some, f"--mcpu={self.target}", file.name],
                           stdout=out, check=True)
            out.seek(0)
            text = out.read()
        functions, function = {}, None
        for line in text.split("\n"):
            if match := _INSTRUCTION.match(line):
                name, operands, address, code = match.groups()
                function.append(Instruction(int(address, 16), name, operands, code.split()))
            elif match := _FUNCTION.match(line):
                function = functions.setdefault(match[1], [])
        return functions


def compiler(path):
    """Name and version of the compiler that a code object was made by."""
    match = re.search(rb"clang version [^\0]*", path.read_bytes())
    return match[0].decode() if match else "unknown"


# ---------------------------------------------------------------------------------------------
# Instructions
# ---------------------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"^\t(\S+)\s*(.*?)\s*//\s*([0-9A-F]+): ((?:[0-9A-F]{8} ?)+)")
_FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")


def disassembler():
    names = [*(f"llvm-objdump-{v}" for v in range(23, 16, -1)), "llvm-objdump"]
    for name in [os.environ.get("LLVM_OBJDUMP", ""), *names]:
        if name and shutil.which(name):
            return name
    sys.exit("llvm-objdump is needed, from LLVM 17 or newer (20 for gfx1153): put it in PATH or set "
             "LLVM_OBJDUMP")


class Instruction:
    __slots__ = ("address", "name", "operands", "size", "target", "kind", "bits")

    def __init__(self, address, name, operands, code):
        self.address, self.name, self.operands, self.size = address, name, operands, 4 * len(code)
        self.kind = kind_of(name)
        self.bits = width(name) if self.kind in MEMORY else 0
        self.target = None  # of a branch
        if self.kind == "branch":
            offset = int(code[0], 16) & 0xFFFF
            self.target = address + 4 + 4 * (offset - 0x10000 if offset & 0x8000 else offset)


MEMORY = ("load", "store", "scratch load", "scratch store", "lds load", "lds store")
# No work on the execution units.
_HINTS = ("s_delay_alu", "s_clause", "s_nop", "s_sleep", "s_set_inst_prefetch", "s_setprio",
          "s_sendmsg",
          "s_inst_prefetch", "s_icache_inv", "s_code_end", "s_version", "s_wait", "s_dcache",
          "s_round_mode", "s_denorm_mode", "s_ttrace", "s_gl1_inv", "buffer_gl")
_KINDS = [(re.compile(pattern), kind) for pattern, kind in (
    (r"v_dual_", "dual"),
    (r"v_wmma_", "wmma"),
    (r"v_dot[248]_|v_dot[24]c_|v_dot2acc_", "dot"),
    (r"v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_f(16|32)", "transcendental"),
    (r"v_(mul_lo_u32|mul_hi_u32|mul_hi_i32|mad_u64_u32|mad_i64_i32)", "wide multiply"),
    (r"v_\w*f64", "f64"),
    (r"v_", "vector"),
    ("|".join(_HINTS), "hint"),
    (r"(global|flat|buffer)_atomic", "atomic"),
    (r"(global|flat|buffer|tbuffer|image)_\w*load", "load"),
    (r"(global|flat|buffer|tbuffer|image)_\w*store", "store"),
    (r"scratch_load", "scratch load"),
    (r"scratch_store", "scratch store"),
    (r"ds_load", "lds load"),
    (r"ds_store", "lds store"),
    (r"ds_", "lds other"),
    (r"s_c?branch", "branch"),
    (r"s_barrier", "barrier"),
    (r"s_(buffer_)?load", "scalar load"),
    (r"s_endpgm|s_trap", "end"),
    (r"s_", "scalar"))]

# Cycles that one instruction of a wave takes of its SIMD's vector unit. WMMA: AMD's matrix
# instruction calculator; 32-bit integer multiplies run at a quarter of the rate, F64 at 1/32;
# transcendentals have a unit of their own and take one issue.
VECTOR_CYCLES = {"vector": 1, "dual": 1, "dot": 1, "transcendental": 1, "wide multiply": 4,
                 "f64": 32, "wmma": 32}


@functools.cache
def kind_of(name):
    return next((kind for pattern, kind in _KINDS if pattern.match(name)), "other")


@functools.cache
def width(name):
    """Bits a lane that a memory instruction moves."""
    pairs = 2 if "2addr" in name else 1
    if match := re.search(r"_b(\d+)", name) or re.search(r"_[uif](8|16|32|64)(?:_|$)", name):
        return pairs * int(match[1])
    return 32 * pairs


def _in_cycles(after):
    """The nodes of a graph that reach themselves: {node: [the nodes after it]}.

    Tarjan's strongly connected components, with a stack of its own instead of recursion."""
    order, low, on_path, path, cyclic = {}, {}, set(), [], set()
    for root in after:
        if root in order:
            continue
        todo = [(root, iter(after[root]))]
        order[root] = low[root] = len(order)
        path.append(root)
        on_path.add(root)
        while todo:
            node, rest = todo[-1]
            for to in rest:
                if to not in order:
                    order[to] = low[to] = len(order)
                    path.append(to)
                    on_path.add(to)
                    todo.append((to, iter(after[to])))
                    break
                if to in on_path:
                    low[node] = min(low[node], order[to])
            else:
                todo.pop()
                if todo:
                    low[todo[-1][0]] = min(low[todo[-1][0]], low[node])
                if low[node] == order[node]:  # the first of its component, the others lie behind
                    component = [path.pop()]
                    while component[-1] != node:
                        component.append(path.pop())
                    on_path.difference_update(component)
                    if len(component) > 1 or node in after[node]:
                        cyclic.update(component)
    return cyclic


def _flow(instructions):
    """Basic blocks and the control flow: {address: instructions}, {address: [those after it]}."""
    index = {i.address: n for n, i in enumerate(instructions)}
    starts = {0} | {n + 1 for n, i in enumerate(instructions) if i.kind in ("branch", "end")}
    starts = sorted(starts | {index[i.target] for i in instructions if i.target in index})
    blocks = [instructions[a:b] for a, b in zip(starts, starts[1:] + [len(instructions)])]
    blocks = {block[0].address: block for block in blocks if block}
    after = {}
    for at, block in blocks.items():
        last = block[-1]
        falls = last.kind != "end" and last.name != "s_branch"
        after[at] = [to for to in (last.target, last.address + last.size if falls else None)
                     if to in blocks]
    return blocks, after


def in_loops(instructions):
    """The instructions that can follow themselves, in order: those in a cycle of the control flow."""
    blocks, after = _flow(instructions)
    cyclic = _in_cycles(after)
    return [i for at, block in blocks.items() if at in cyclic for i in block]


_OPERAND = re.compile(r"s\[\d+:\d+\]|\bs\d+\b|\bvcc(?:_lo|_hi)?\b")
_VCC = {"vcc": range(106, 108), "vcc_lo": range(106, 107), "vcc_hi": range(107, 108)}


def _scalars(operand):
    """The numbers of the scalar registers that an operand is."""
    if operand in _VCC:
        return _VCC[operand]
    first, _, last = operand.strip("s[]").partition(":")
    return range(int(first), int(last or first) + 1)


def pointer_loads(instructions, behind):
    """Scalar loads that can follow the addresses `behind` and are not of the kernel's arguments.

    s[0:1] has the arguments' address. An address made of it and of anything else is one of the
    arguments; one that was itself loaded, or came from the vector unit, is not."""
    blocks, after = _flow(instructions)
    entry = instructions[0].address
    known, todo = {entry: frozenset((0, 1))}, [entry]  # registers that have arguments' addresses
    others = {}
    while todo:
        at = todo.pop()
        held = set(known[at])
        for i in blocks[at]:
            if i.name.startswith(("v_dual", "global_", "ds_", "buffer_")) or not i.operands:
                continue
            operands = [_scalars(o) for o in _OPERAND.findall(i.operands)]
            first = _OPERAND.match(i.operands)
            if i.kind == "scalar load":
                others[i.address] = not held.issuperset(operands[1])
                held.difference_update(operands[0])
            elif first and not i.name.startswith(("s_cmp", "s_bitcmp", "s_cbranch")):
                to, sources = operands[0], operands[1:]
                made = i.kind == "scalar" and any(held.intersection(r) for r in sources)
                (held.update if made else held.difference_update)(to)
        for to in after[at]:
            both = frozenset(held) if to not in known else known[to] & held
            if known.get(to) != both:
                known[to] = both
                todo.append(to)
    reached, todo = set(), []
    for at, block in blocks.items():
        if any(i.address in behind for i in block):
            todo += after[at]
            last = max(i.address for i in block if i.address in behind)
            reached.update(i.address for i in block if i.address > last)
    seen = set()
    while todo:
        at = todo.pop()
        if at not in seen:
            seen.add(at)
            todo += after[at]
            reached.update(i.address for i in blocks[at])
    return sorted(at for at, other in others.items() if other and at in reached)
