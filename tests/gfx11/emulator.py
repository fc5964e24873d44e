"""Runs gfx1100 machine code on the host, and counts what it executes.

    program = Program(open("gfx1100.co", "rb").read())
    program.memory.add(address, size)          # what kernels may touch: host memory, as it lies
    counts = program.launch("rocq_k_norm", grid_x, grid_z, threads, args)

Vector, scalar and matrix arithmetic and atomics are those of tinygrad's RDNA3 emulator (a checkout
in TINYGRAD). Memory accesses are done here, so that every lane's address is checked against the
blocks of memory; so are lane crossings (DPP, permlane, bpermute) and the matrix forms which that
emulator gets wrong where a register is source and destination; a lane that reads one which is
switched off is a Fault, and so is a matrix product with lanes off. Registers and LDS begin as
garbage. Workgroups run one after the other, the waves of one from barrier to barrier. Caches and
time are not modelled.
"""
import array
import bisect
import collections
import ctypes
import os
import re
import struct
import sys

from code_object import VECTOR_CYCLES, CodeObject

GARBAGE = 0xDEADBEEF
ALL = 0xFFFFFFFF
VCC, M0, EXEC, SCC = 106, 125, 126, 253  # as numbered in operands; SCC as the emulator keeps it
PC = 256
NULL = 124  # the operand that is no register


class Fault(RuntimeError):
    pass


def tinygrad():
    """The emulator module, two defects of its instruction table mended."""
    checkout = os.environ["TINYGRAD"]
    if checkout not in sys.path:
        sys.path.insert(0, checkout)
        os.environ.setdefault("DEV", "CPU")
    from test.mockgpu.amd import emu
    for op, code in list(emu.PCODE_RDNA3.items()):
        if "24" in op.name and op.name.startswith("V_M"):  # 24-bit operands were not cut
            code = re.sub(r"S(\d)\.u24", r"(S\1.u32 & 16777215U)", code)
            emu.PCODE_RDNA3[op] = re.sub(r"S(\d)\.i24", r"(32'I(S\1.u32 << 8U) >> 8U)", code)
        elif "CVT_OFF_F32_I4" in op.name:  # had no table
            emu.PCODE_RDNA3[op] = "D0.f32 = i32_to_f32(32'I(S0.u32 << 28U) >> 28U) * 0.0625F"
    return emu


class Memory:
    """Blocks of host memory. A range outside of them is a Fault."""

    def __init__(self):
        self.starts, self.blocks = [], []

    def add(self, address, size):
        view = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
        at = bisect.bisect(self.starts, address)
        self.starts.insert(at, address)
        self.blocks.insert(at, (address, address + size, view))

    def remove(self, address):
        at = self.starts.index(address)
        del self.starts[at], self.blocks[at]

    def find(self, low, high):
        """(start, view) of the block that holds [low, high), or None."""
        at = bisect.bisect(self.starts, low) - 1
        if at >= 0 and high <= self.blocks[at][1]:
            return self.blocks[at][0], self.blocks[at][2]
        return None

    def get(self, low, high, what):
        found = self.find(low, high)
        if not found:
            at = max(0, bisect.bisect(self.starts, low) - 1)
            near = f"; {low - self.starts[at]} bytes into a block of " \
                f"{self.blocks[at][1] - self.starts[at]}" if self.blocks else ""
            raise Fault(f"{what}: {high - low} bytes at {low:#x} are in no block{near}")
        return found


class Wave:
    __slots__ = ("scalar", "vector", "buffers", "bases", "arguments", "pc", "done", "group")


class Group:
    """A workgroup's LDS."""

    def __init__(self, size):
        self.words = (ctypes.c_uint32 * 16400)()
        self.view = memoryview(self.words).cast("B")
        self.size = size


class Counts:
    """What one launch executed. Cycles are of the vector unit of a SIMD, see VECTOR_CYCLES."""

    def __init__(self, groups, waves, share):
        self.groups, self.waves = groups, waves
        self.share = share              # of the grid that ran
        self.kinds = collections.Counter()
        self.cycles = self.wmma = 0     # vector cycles; of which in WMMA
        self.loaded = self.stored = 0   # bytes requested of global memory, summed over lanes
        self.lds, self.lds_ideal = 0, 0  # LDS cycles with bank conflicts, and without

    @property
    def executed(self):
        return sum(self.kinds.values())


class Step:
    """One instruction, ready to run."""
    __slots__ = ("instruction", "next", "count", "kind", "run", "function", "globals")


class Program:
    def __init__(self, data):
        self.code = CodeObject(data)
        if self.code.target != "gfx1100":
            raise Fault(f"{self.code.target}: the emulator is one of gfx1100")
        self.emulator = tinygrad()
        self.memory = Memory()
        size = max(address + memory for kind, _, _, address, _, _, memory, _ in self.code.segments
                   if kind == 1)
        self.image = (ctypes.c_ubyte * (size + 4096))()
        self.base = ctypes.addressof(self.image)
        self.bytes = memoryview(self.image).cast("B")
        for kind, _, offset, address, _, stored, _, _ in self.code.segments:
            if kind == 1:
                self.bytes[address:address + stored] = data[offset:offset + stored]
        self.memory.add(self.base, size)
        self.functions = self.code.instructions()
        self.instructions = {i.address: i for body in self.functions.values() for i in body}
        self.decoded = collections.defaultdict(dict)  # the steps of each kernel

    # -- launch --

    def launch(self, kernel, grid_x, grid_z, threads, arguments, sample=None, limit=10_000_000):
        """sample: how many workgroups to run, evenly spread over the grid; None is all."""
        k, d = self.code.kernels[kernel], self.code.descriptor(kernel)
        if not d["wave32"] or not d["denormals"] or d["private"]:
            raise Fault(f"{kernel}: waves of 64, flushed denormals and scratch are not emulated")
        if threads > k[".max_flat_workgroup_size"]:
            raise Fault(f"{kernel}: {threads} threads, {k['.max_flat_workgroup_size']} are the most")
        block = self._arguments(k, d, grid_x, grid_z, threads, arguments)
        total = grid_x * grid_z
        n = min(sample or total, total)
        ids = [total * i // n for i in range(n)]
        self.limit, self.steps = limit, self.decoded[kernel]
        self.counts = Counts(n, n * -(-threads // 32), n / total)
        for step in self.steps.values():
            step.count = 0
        self.memory.add(ctypes.addressof(block), len(block))
        group = Group(d["lds"])
        try:
            for i in ids:
                self._group(group, d, block, (i % grid_x, 0, i // grid_x), threads)
        finally:
            self.memory.remove(ctypes.addressof(block))
        for step in self.steps.values():
            if step.count:
                kind = step.instruction.kind
                self.counts.kinds[kind] += step.count
                self.counts.cycles += step.count * VECTOR_CYCLES.get(kind, 0)
                self.counts.wmma += step.count * VECTOR_CYCLES["wmma"] if kind == "wmma" else 0
        return self.counts

    def _arguments(self, k, d, grid_x, grid_z, threads, arguments):
        """The block of kernel arguments: the struct, then what the compiler passes unseen."""
        block = (ctypes.c_ubyte * max(d["arguments"], 8))()
        grid = {"x": grid_x, "y": 1, "z": grid_z}
        for argument in k[".args"]:
            at, size, kind = argument[".offset"], argument[".size"], argument[".value_kind"]
            axis = kind[-1]
            if not kind.startswith("hidden_"):
                if size != len(arguments):
                    raise Fault(f"the argument has {size} bytes, given are {len(arguments)}")
                value = arguments
            elif kind.startswith("hidden_block_count_"):
                value = grid[axis].to_bytes(size, "little")
            elif kind.startswith("hidden_group_size_"):
                value = (threads if axis == "x" else 1).to_bytes(size, "little")
            elif kind == "hidden_grid_dims":
                value = (3 if grid_z > 1 else 1).to_bytes(size, "little")
            else:
                value = bytes(size)
            block[at:at + size] = value
        return block

    def _group(self, group, d, block, ids, threads):
        group.words[:] = array.array("I", [GARBAGE]) * len(group.words)
        waves = [self._wave(group, d, block, ids, first, threads)
                 for first in range(0, threads, 32)]
        while any(not wave.done for wave in waves):
            for wave in waves:
                if not wave.done:
                    self._run(wave)

    def _wave(self, group, d, block, ids, first, threads):
        w = Wave()
        w.buffers = (ctypes.c_uint32 * 320)(), (ctypes.c_uint32 * 8192)()
        w.scalar, w.vector = (memoryview(b).cast("B").cast("I") for b in w.buffers)
        w.scalar[0:106] = array.array("I", [GARBAGE]) * 106
        w.vector[:] = array.array("I", [GARBAGE]) * 8192
        for i in range(65):  # inline constants are operands 128 and up
            w.scalar[128 + i] = i
        for i in range(16):
            w.scalar[193 + i] = -(i + 1) & ALL
        for operand, value in self.emulator.F32_INLINE.items():
            w.scalar[operand] = value
        lanes = min(32, threads - first)
        w.scalar[EXEC] = (1 << lanes) - 1
        pointer, at = ctypes.addressof(block), 0
        for bit, n in enumerate((4, 2, 2, 2, 2, 2, 1)):  # user SGPRs: 3 is the arguments' address
            if d["properties"] >> bit & 1:
                if bit != 3:
                    raise Fault(f"user SGPRs of kind {bit} are not emulated")
                w.scalar[at], w.scalar[at + 1] = pointer & ALL, pointer >> 32
                at += n
        at = d["resources2"] >> 1 & 31
        for axis in range(3):
            if d["resources2"] >> 7 + axis & 1:
                w.scalar[at] = ids[axis]
                at += 1
        for lane in range(lanes):
            w.vector[lane] = first + lane
        sgprs, vgprs = (ctypes.c_uint64(ctypes.addressof(b)) for b in w.buffers)
        zero = ctypes.c_uint64(0)
        w.bases = sgprs, vgprs, zero, ctypes.c_uint64(ctypes.addressof(group.words)), zero, vgprs
        w.arguments, w.done, w.group = {}, False, group
        w.pc = self.base + d["entry"]
        return w

    def _run(self, w):
        """One wave, to its next barrier or its end."""
        scalar, steps, pc, left = w.scalar, self.steps, w.pc, self.limit
        scalar[PC], scalar[PC + 1] = pc & ALL, pc >> 32
        while True:
            step = steps.get(pc) or self._step(pc)
            step.count += 1
            kind = step.kind
            if kind == "emulated":
                arguments = w.arguments.get(step.globals)
                if arguments is None:
                    arguments = w.arguments[step.globals] = [w.bases[i] for i in step.globals]
                step.function(*arguments)
                pc = step.next
                continue
            if kind == "own":
                step.run(w)
                pc = step.next
            elif kind == "hint":
                pc = step.next
            elif kind == "branch":
                pc = self.base + step.instruction.target if self._taken(step, scalar) else step.next
                left -= 1
                if left < 0:
                    raise Fault("a wave does not come to its end")
            else:
                w.done, w.pc = kind == "end", step.next
                return
            scalar[PC], scalar[PC + 1] = pc & ALL, pc >> 32

    @staticmethod
    def _taken(step, scalar):
        condition = step.instruction.name.removeprefix("s_cbranch_")
        return {"s_branch": 1, "scc0": not scalar[SCC], "scc1": scalar[SCC],
                "vccz": not scalar[VCC],
                "vccnz": scalar[VCC], "execz": not scalar[EXEC], "execnz": scalar[EXEC]}[condition]

    def _step(self, pc):
        i = self.instructions.get(pc - self.base)
        if i is None:
            raise Fault(f"jump to {pc - self.base:#x}, where no instruction is")
        step = Step()
        step.instruction, step.next, step.count, step.run = i, pc + i.size, 0, None
        own = {"load": self._global, "store": self._global, "lds load": self._lds,
               "lds store": self._lds,
               "scalar load": self._scalar_load, "wmma": self._wmma, "atomic": self._atomic,
               "lds other": self._lds_atomic}.get(i.kind)
        if "_dpp" in i.name or "dpp8:" in i.operands:
            own = self._dpp
        elif i.name.startswith("v_permlane"):
            own = self._permlane
        elif i.name.startswith(("ds_bpermute", "ds_swizzle")):
            own = self._lds_permute
        elif i.name == "s_getpc_b64":
            own = self._getpc
        step.kind = i.kind if i.kind in ("hint", "branch", "barrier", "end") else "emulated"
        if i.name.startswith(("scratch_", "flat_", "buffer_l", "buffer_s", "buffer_a", "s_trap",
                              "s_setpc", "s_swappc")):
            raise Fault(f"{i.name} is not emulated")
        if own and (run := own(i, self._words(i))):
            step.kind, step.run = "own", run
        elif step.kind == "emulated":
            step.function, step.globals = self._decode(pc, i)
        if i.kind == "wmma":
            step.kind, step.run = "own", self._whole(i, step)
        self.steps[pc] = step
        return step

    def _words(self, i):
        return struct.unpack(f"<{i.size // 4}I", self.bytes[i.address:i.address + i.size])

    def _decode(self, pc, i):
        try:
            (program, runner), _ = self.emulator._decode_at(pc, "rdna3")
        except Exception as error:
            raise Fault(f"tinygrad cannot run {i.name} {i.operands}: {error}") from error
        return runner.fxn, tuple(program.arg.globals)

    # -- memory --

    @staticmethod
    def _lanes(w):
        mask = w.scalar[EXEC]
        return range(32) if mask == ALL else [lane for lane in range(32) if mask >> lane & 1]

    @staticmethod
    def _move(w, i, view, offsets, register, lanes, bits):
        """Between a lane's registers from `register` on and the bytes at its offset."""
        vector, at, size = w.vector, 32 * register, bits // 8
        if "_store" in i.name:
            shift = 16 if "d16_hi" in i.name else 0
            if size < 4:
                for offset, lane in zip(offsets, lanes):
                    value = vector[at + lane] >> shift & (1 << bits) - 1
                    view[offset:offset + size] = value.to_bytes(size, "little")
                return
            pack = struct.Struct(f"<{bits // 32}I").pack_into
            for offset, lane in zip(offsets, lanes):
                pack(view, offset, *vector[at + lane:at + lane + 8 * size:32])
        elif size < 4:
            signed, half = "_i8" in i.name or "_i16" in i.name, "d16" in i.name
            for offset, lane in zip(offsets, lanes):
                value = int.from_bytes(view[offset:offset + size], "little", signed=signed) & ALL
                if half:
                    old = vector[at + lane]
                    value = (old & 0xFFFF | (value & 0xFFFF) << 16 if "d16_hi" in i.name
                             else old & 0xFFFF0000 | value & 0xFFFF)
                vector[at + lane] = value
        else:
            unpack = struct.Struct(f"<{bits // 32}I").unpack_from
            for word, values in enumerate(zip(*[unpack(view, offset) for offset in offsets])):
                if len(lanes) == 32:
                    first = at + 32 * word
                    vector[first:first + 32] = array.array("I", values)
                else:
                    for lane, value in zip(lanes, values):
                        vector[at + 32 * word + lane] = value

    @staticmethod
    def _addresses(w, words, lanes):
        """Of a global access: VGPR pair, or SGPR pair and a 32-bit VGPR offset, and a constant."""
        low, high = words[:2]
        offset = (low & 0x1FFF) - (0x2000 if low & 0x1000 else 0)
        vgpr, sgpr = 32 * (high & 0xFF), high >> 16 & 0x7F
        vector, scalar = w.vector, w.scalar
        if sgpr < NULL:
            base = (scalar[sgpr] | scalar[sgpr + 1] << 32) + offset
            return [base + vector[vgpr + lane] for lane in lanes]
        return [(vector[vgpr + lane] | vector[vgpr + 32 + lane] << 32) + offset for lane in lanes]

    def _global(self, i, words):
        register = words[1] >> 8 & 0xFF if i.kind == "store" else words[1] >> 24
        size, what = i.bits // 8, f"{i.name} at {i.address:#x}"

        def run(w):
            lanes = self._lanes(w)
            if not lanes:
                return
            addresses = self._addresses(w, words, lanes)
            if i.kind == "load":
                self.counts.loaded += size * len(lanes)
            else:
                self.counts.stored += size * len(lanes)
            low = min(addresses)
            found = self.memory.find(low, max(addresses) + size)
            if found:
                base, view = found
                self._move(w, i, view, [a - base for a in addresses], register, lanes, i.bits)
                return
            for address, lane in zip(addresses, lanes):
                base, view = self.memory.get(address, address + size, f"{what}, lane {lane}")
                self._move(w, i, view, [address - base], register, [lane], i.bits)
        return run

    def _checked(self, i, register, n, check):
        """The emulator's own memory instruction, which touches memory for lanes that are off too:
        those borrow the address, of n registers, of a lane that is on."""
        function, arguments = self._decode(self.base + i.address, i)

        def run(w):
            lanes = self._lanes(w)
            if not lanes:
                return
            check(w, lanes)
            cells = [32 * r + lane for r in range(register, register + n)
                     for lane in range(32) if lane not in lanes]
            saved = [w.vector[cell] for cell in cells]
            for cell in cells:
                w.vector[cell] = w.vector[cell // 32 * 32 + lanes[0]]
            function(*[w.bases[g] for g in arguments])
            for cell, value in zip(cells, saved):
                w.vector[cell] = value
        return run

    def _atomic(self, i, words):
        size = 8 if re.search(r"64$", i.name) else 4

        def check(w, lanes):
            for address in self._addresses(w, words, lanes):
                self.memory.get(address, address + size, i.name)
        return self._checked(i, words[1] & 0xFF, 1 if words[1] >> 16 & 0x7F < NULL else 2, check)

    def _lds_atomic(self, i, words):
        size, register = 8 if re.search(r"64$", i.name) else 4, words[1] & 0xFF

        def check(w, lanes):
            last = max(w.vector[32 * register + lane] for lane in lanes) + (words[0] & 0xFFFF)
            if last + size > w.group.size:
                raise Fault(f"{i.name} at {i.address:#x}: {last} and {size} more in LDS")
        return self._checked(i, register, 1, check)

    def _lds(self, i, words):
        low, high = words
        two, store = "2addr" in i.name, i.kind == "lds store"
        bits = i.bits // 2 if two else i.bits
        size, address = bits // 8, high & 0xFF
        data0, data1, target = high >> 8 & 0xFF, high >> 16 & 0xFF, high >> 24
        if two:
            step = size * (64 if "stride64" in i.name else 1)
            parts = [((low & 0xFF) * step, data0 if store else target),
                     ((low >> 8 & 0xFF) * step, data1 if store else target + size // 4)]
        else:
            parts = [(low & 0xFFFF, data0 if store else target)]

        def run(w):
            lanes = self._lanes(w)
            if not lanes:
                return
            addresses = [w.vector[32 * address + lane] for lane in lanes]
            for offset, register in parts:
                offsets = [a + offset & ALL for a in addresses]
                if max(offsets) + size > w.group.size:
                    raise Fault(f"{i.name} at {i.address:#x}: LDS has {w.group.size} bytes, "
                                f"{max(offsets)} and {size} more are asked for")
                self._count_lds(offsets, size)
                self._move(w, i, w.group.view, offsets, register, lanes, bits)
        return run

    def _count_lds(self, offsets, size):
        """32 banks of 4 bytes a cycle; wide accesses go in groups of lanes that fill them."""
        lanes = 32 if size <= 4 else 128 // size
        for first in range(0, len(offsets), lanes):
            banks = collections.defaultdict(set)
            for offset in offsets[first:first + lanes]:
                for word in range(offset >> 2, offset + size + 3 >> 2):
                    banks[word & 31].add(word)
            self.counts.lds += max(map(len, banks.values()))
        self.counts.lds_ideal += -(-len(offsets) * max(size, 4) // 128)

    def _scalar_load(self, i, words):
        low, high = words
        base, target, register = 2 * (low & 0x3F), low >> 6 & 0x7F, high >> 25
        offset = (high & 0x1FFFFF) - (1 << 21 if high & 0x100000 else 0)
        n = int(re.search(r"_b(\d+)", i.name)[1]) // 32
        what = f"{i.name} at {i.address:#x}"

        def run(w):
            scalar = w.scalar
            address = (scalar[base] | scalar[base + 1] << 32) + offset
            address = address + (0 if register == NULL else scalar[register]) & ~3
            start, view = self.memory.get(address, address + 4 * n, what)
            for k, value in enumerate(struct.unpack_from(f"<{n}I", view, address - start)):
                scalar[target + k] = value
        return run

    def _getpc(self, i, words):
        """The address of the next instruction, from which that of a table is found."""
        target, value = words[0] >> 16 & 0x7F, self.base + i.address + i.size

        def run(w):
            w.scalar[target], w.scalar[target + 1] = value & ALL, value >> 32
        return run

    # -- lanes --

    @staticmethod
    def _reads(i, mask, lane):
        if not mask >> lane & 1:
            raise Fault(f"{i.name} at {i.address:#x} reads lane {lane}, which is off")

    @staticmethod
    def _dpp_source(lane, control, row_mask, bank_mask, zero):
        """The lane read, -1 for a zero, None where the lane is not written."""
        row, k, n = lane & 16, lane & 15, control & 15
        if not (row_mask >> (lane >> 4) & 1 and bank_mask >> (k >> 2) & 1):
            return None
        if control < 0x100:
            return (lane & 28) + (control >> 2 * (lane & 3) & 3)
        shift = control >> 4
        if shift == 0x10:
            k += n
        elif shift == 0x11:
            k -= n
        elif shift == 0x12:
            k = k - n & 15
        elif control in (0x140, 0x141):
            k ^= 15 if control == 0x140 else 7
        elif shift == 0x15:
            k = n
        elif shift == 0x16:
            k ^= n
        else:
            raise Fault(f"DPP control {control:#x} is not emulated")
        return row + k if 0 <= k < 16 else -1 if zero else None

    def _dpp(self, i, words):
        """The instruction without DPP runs on a register that the lanes were moved to."""
        words = list(words)
        control = words.pop()
        source = words[1] & 0x1FF if len(words) == 2 else words[0] & 0x1FF
        if source == 0xFA:  # DPP16
            zero = control >> 19 & 1
            if len(words) == 1 and control >> 20 & 15:
                raise Fault(f"{i.name}: DPP with modifiers is not emulated")
            origin = [self._dpp_source(lane, control >> 8 & 0x1FF, control >> 28,
                                       control >> 24 & 15, zero) for lane in range(32)]
        else:  # DPP8
            origin = [(lane & 24) + (control >> 8 + 3 * (lane & 7) & 7) for lane in range(32)]
        used = {int(r) for r in re.findall(r"\bv(\d+)", i.operands)}
        for first, last in re.findall(r"v\[(\d+):(\d+)\]", i.operands):
            used |= set(range(int(first), int(last) + 1))
        spare = next(r for r in range(255, -1, -1) if r not in used)
        words[-1 if len(words) == 2 else 0] += 256 + spare - source
        code = (ctypes.c_ubyte * 32)()
        struct.pack_into(f"<{len(words)}I", code, 0, *words)
        pc = ctypes.addressof(code)
        function, arguments = self._decode(pc, i)
        register = 32 * (control & 0xFF)

        def run(w, keep=code):
            scalar, vector, mask = w.scalar, w.vector, w.scalar[EXEC]
            values, moved, written = vector[register:register + 32].tolist(), [0] * 32, 0
            for lane, lane_from in enumerate(origin):
                if lane_from is not None and lane_from >= 0 and mask >> lane & 1:
                    self._reads(i, mask, lane_from)
                if lane_from is not None:
                    written |= 1 << lane
                    moved[lane] = values[lane_from] if lane_from >= 0 else 0
            saved = vector[32 * spare:32 * spare + 32].tolist()
            vector[32 * spare:32 * spare + 32] = array.array("I", moved)
            scalar[EXEC], scalar[PC], scalar[PC + 1] = mask & written, pc & ALL, pc >> 32
            function(*[w.bases[g] for g in arguments])
            if not i.name.startswith("v_cmpx"):
                scalar[EXEC] = mask
            vector[32 * spare:32 * spare + 32] = array.array("I", saved)
        return run

    def _permlane(self, i, words):
        code = words[0] | words[1] << 32
        target = 32 * (code & 0xFF)
        source = 32 * ((code >> 32 & 0x1FF) - 256)
        select0, select1 = code >> 41 & 0x1FF, code >> 50 & 0x1FF
        other_row = 16 if "permlanex16" in i.name else 0

        def run(w):
            scalar, vector, mask = w.scalar, w.vector, w.scalar[EXEC]
            select = words[2] if select0 == 255 else scalar[select0]
            select |= (words[2] if select1 == 255 else scalar[select1]) << 32
            values = vector[source:source + 32].tolist()
            for lane in self._lanes(w):
                lane_from = (lane & 16 ^ other_row) + (select >> 4 * (lane & 15) & 15)
                self._reads(i, mask, lane_from)
                vector[target + lane] = values[lane_from]
        return run

    def _lds_permute(self, i, words):
        low, high = words
        offset, swizzle = low & 0xFFFF, "swizzle" in i.name
        address, target = high & 0xFF, 32 * (high >> 24)
        data = 32 * (address if swizzle else high >> 8 & 0xFF)
        if swizzle and offset & 0x8000:
            raise Fault("this form of ds_swizzle is not emulated")

        def run(w):
            vector, mask = w.vector, w.scalar[EXEC]
            addresses = vector[32 * address:32 * address + 32].tolist()
            values = vector[data:data + 32].tolist()
            for lane in self._lanes(w):
                lane_from = ((lane & offset & 31 | offset >> 5 & 31) ^ offset >> 10 & 31 if swizzle
                             else addresses[lane] + offset >> 2 & 31)
                self._reads(i, mask, lane_from)
                vector[target + lane] = values[lane_from]
        return run

    # -- matrices --

    @staticmethod
    def _whole(i, step):
        """A matrix product wants all lanes: what it does to those that are off is not promised."""
        run = step.run

        def checked(w):
            if w.scalar[EXEC] != ALL:
                raise Fault(f"{i.name} at {i.address:#x} runs with lanes off")
            if run:
                run(w)
            else:
                step.function(*[w.bases[g] for g in step.globals])
        return checked

    def _wmma(self, i, words):
        """Forms the emulator gets wrong: C an inline constant, unsigned or clamped integers. None:
        it can run this one."""
        low, high = words
        target, clamp, neg = 32 * (low & 0xFF), low >> 15 & 1, high >> 29
        a_at, b_at = 32 * ((high & 0x1FF) - 256), 32 * ((high >> 9 & 0x1FF) - 256)
        c = high >> 18 & 0x1FF
        form = re.match(r"v_wmma_(f32|i32)_16x16x16_(f16|bf16|iu8)", i.name)
        if not form or form[1] == "f32" and (neg or low >> 8 & 7):
            raise Fault(f"{i.name} {i.operands} is not emulated")
        kind = form[2]
        if c >= 256 and (kind != "iu8" or neg & 3 == 3 and not clamp):
            return None
        n = 4 if kind == "iu8" else 8

        def row(vector, at, lane, signed):
            data = struct.pack(f"<{n}I", *(vector[at + 32 * k + lane] for k in range(n)))
            if kind == "bf16":
                return [struct.unpack("<f", bytes(2) + data[k:k + 2])[0] for k in range(0, 32, 2)]
            return struct.unpack("<16e" if kind == "f16" else "<16b" if signed else "<16B", data)

        def run(w):
            vector = w.vector
            a = [row(vector, a_at, lane, neg & 1) for lane in range(16)]
            b = [row(vector, b_at, lane, neg >> 1 & 1) for lane in range(16)]
            code = "f" if n == 8 else "i"
            out = []
            for register in range(8):
                for lane in range(32):
                    word = vector[32 * (c - 256 + register) + lane] if c >= 256 else w.scalar[c]
                    x = sum(p * q for p, q in zip(a[2 * register + (lane >> 4)], b[lane & 15]))
                    x += struct.unpack("<" + code, struct.pack("<I", word))[0]
                    if code == "i":
                        x = max(-(1 << 31), min((1 << 31) - 1, x)) if clamp else x
                        out.append(x & ALL)
                    else:
                        out.append(struct.unpack("<I", struct.pack("<f", x))[0])
            vector[target:target + 256] = array.array("I", out)
        return run
