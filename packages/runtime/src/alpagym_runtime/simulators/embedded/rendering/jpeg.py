"""JPEG there and back in one pass: the file of a picture, and the pixels that who decodes it sees.

An observation shows what a file decodes to. A library has to read the file that it has just written to say so, and
spends half of the time on parsing bits; here the quantized waves go both ways. Every number is libjpeg's: its fast
transform forwards (what simplejpeg uses), its exact one backwards, its smooth upsampling. So files and pixels are
simplejpeg's, bit for bit. `Coder` makes sure of that, and leaves the work to simplejpeg where it is not so.

Blocks are handled `LANES` beside each other, number k of each in one vector. A file's head, and with it the steps and
Huffman codes, come from a file of simplejpeg's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.rendering.compiled import inlined, picture_kernel
from alpagym_runtime.simulators.embedded.rendering.memory import get, put

QUALITY = 95
LANES = 16
BLOCKS = 64 * LANES
"""Numbers of so many blocks."""
UNIT = 16
"""Pictures are made of squares of so many pixels: four blocks of brightness, one each of blue and red."""
CODES = 256

ZIGZAG = np.array(sorted(range(64), key=lambda i: (i // 8 + i % 8, (i // 8, i % 8)[(i // 8 + i % 8) % 2 == 0])))
"""Places within a block in the order of a file."""


class Tables(NamedTuple):
    """What a file's head says; the first axis is brightness, colour; numbers of a block in the file's order."""

    steps: NDArray[np.int32]  # [2,64] what a number counts
    halves: NDArray[np.int32]  # [2,64] half of what a wave is divided by, rounded down
    shares: NDArray[np.float32]  # [2,64] one over it
    codes: NDArray[np.uint64]  # [2*2*256] by the first number or the others, and symbol: code and room << 8 | bits
    sizes: NDArray[np.uint8]  # [4096] bits of a number
    places: NDArray[np.int64]  # [64] `ZIGZAG`
    order: NDArray[np.int64]  # [64] its inverse


class Room(NamedTuple):
    """Working memory for a picture's size."""

    planes: NDArray[np.uint8]  # brightness [h,w], then blue and red [h/2,w/2]
    blue: NDArray[np.uint8]  # two rows [2,w]
    red: NDArray[np.uint8]
    one: NDArray[np.int16]  # [64,LANES]
    other: NDArray[np.int16]
    coded: NDArray[np.uint16]  # [*,64,LANES] the first number; of the others their bits and, above, how many
    some: NDArray[np.uint32]  # [*,2,LANES] which numbers are not 0
    sums: NDArray[np.int16]  # [w/2+2]
    fine: NDArray[np.int16]  # [2,w] blue and red of a row
    words: NDArray[np.uint64]  # what follows the head, before its 0xFF are marked


@intrinsic  # type: ignore[untyped-decorator]
def zeros_below(typing: Any, value: Any) -> Any:
    """How many zeros lie below the lowest one of a u64 that is not 0."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), code


# ------------------------------------------------------------ colours


@inlined
def to_planes(picture, planes, blue, red, y, height, width):
    """Two rows from y on: brightness, and the mean blue and red of four pixels."""
    for k in range(2):
        first = (y + k) * width
        for x in range(width):
            o = 3 * (first + x)
            r, g, b = (
                np.int32(get(picture, np.uintp(o), "out")),
                np.int32(get(picture, np.uintp(o + 1), "out")),
                np.int32(get(picture, np.uintp(o + 2), "out")),
            )
            light = np.int32(np.int32(r * np.int32(19595)) + np.int32(g * np.int32(38470)))
            light = np.int32(np.int32(light + np.int32(b * np.int32(7471))) + np.int32(32768))
            cb = np.int32(np.int32(b * np.int32(32768)) - np.int32(r * np.int32(11059)))
            cb = np.int32(np.int32(cb - np.int32(g * np.int32(21709))) + np.int32(8421375))
            cr = np.int32(np.int32(r * np.int32(32768)) - np.int32(g * np.int32(27439)))
            cr = np.int32(np.int32(cr - np.int32(b * np.int32(5329))) + np.int32(8421375))
            put(planes, np.uintp(first + x), np.uint8(np.int32(light >> np.int32(16))), "plane")
            put(blue, np.uintp(k * width + x), np.uint8(np.int32(cb >> np.int32(16))), "blue")
            put(red, np.uintp(k * width + x), np.uint8(np.int32(cr >> np.int32(16))), "red")
    half = width // 2
    first = height * width + y // 2 * half
    second = first + height // 2 * half
    for x in range(half):
        o, below = 2 * x, width + 2 * x
        # Rounded up and down in turn.
        total = np.int32(np.int32(1) + np.int32(np.int32(x) & np.int32(1)))
        total = np.int32(total + np.int32(get(blue, np.uintp(o), "blue")))
        total = np.int32(total + np.int32(get(blue, np.uintp(o + 1), "blue")))
        total = np.int32(total + np.int32(get(blue, np.uintp(below), "blue")))
        total = np.int32(total + np.int32(get(blue, np.uintp(below + 1), "blue")))
        put(planes, np.uintp(first + x), np.uint8(np.int32(total >> np.int32(2))), "plane")
    for x in range(half):
        o, below = 2 * x, width + 2 * x
        total = np.int32(np.int32(1) + np.int32(np.int32(x) & np.int32(1)))
        total = np.int32(total + np.int32(get(red, np.uintp(o), "red")))
        total = np.int32(total + np.int32(get(red, np.uintp(o + 1), "red")))
        total = np.int32(total + np.int32(get(red, np.uintp(below), "red")))
        total = np.int32(total + np.int32(get(red, np.uintp(below + 1), "red")))
        put(planes, np.uintp(second + x), np.uint8(np.int32(total >> np.int32(2))), "plane")


@inlined
def finer(planes, near, far, half, sums, fine, at):
    """A row of blue or red for every pixel, less 128: three parts of the nearer row, one of the other; so by column."""
    three, four, seven, eight, middle = np.int16(3), np.int16(4), np.int16(7), np.int16(8), np.int16(128)
    for x in range(half):
        value = np.int16(np.int16(get(planes, np.uintp(near + x), "plane")) * three)
        put(sums, np.uintp(x + 1), np.int16(value + np.int16(get(planes, np.uintp(far + x), "plane"))), "sums")
    sums[0], sums[half + 1] = sums[1], sums[half]
    for x in range(half):
        value = np.int16(get(sums, np.uintp(x + 1), "sums") * three)
        left = np.int16(np.int16(value + get(sums, np.uintp(x), "sums")) + eight)
        right = np.int16(np.int16(value + get(sums, np.uintp(x + 2), "sums")) + seven)
        put(fine, np.uintp(at + 2 * x), np.int16(np.int16(left >> four) - middle), "fine")
        put(fine, np.uintp(at + 2 * x + 1), np.int16(np.int16(right >> four) - middle), "fine")


@inlined
def part(value, share):
    """A share, in 2^-16, of a value of at most 128 in size; rounded."""
    twice = np.int16(np.int32(np.int32(np.int16(value + value)) * np.int32(share)) >> np.int32(16))
    return np.int16(np.int16(twice + np.int16(1)) >> np.int16(1))


@inlined
def byte(value):
    """Cut to 0..255."""
    return np.uint8(min(max(value, np.int16(0)), np.int16(255)))


@inlined
def to_picture(picture, planes, sums, fine, height, width):
    """Planes as a picture."""
    half = width // 2
    blues, reds = height * width, height * width + height // 2 * half
    for y in range(height):
        near = y // 2
        far = min(max(near - 1 if y % 2 == 0 else near + 1, 0), height // 2 - 1)
        finer(planes, blues + near * half, blues + far * half, half, sums, fine, 0)
        finer(planes, reds + near * half, reds + far * half, half, sums, fine, width)
        for x in range(width):
            light = np.int16(get(planes, np.uintp(y * width + x), "plane"))
            cb, cr = get(fine, np.uintp(x), "fine"), get(fine, np.uintp(width + x), "fine")
            # 1.402 cr, -0.344 cb - 0.714 cr, 1.772 cb: what is left beside whole ones fits 16 bits.
            r = np.int16(np.int16(light + cr) + part(cr, 26345))
            rest = np.int32(np.int32(32768) - np.int32(np.int32(cb) * np.int32(22554)))
            rest = np.int32(rest + np.int32(np.int32(cr) * np.int32(18734)))
            g = np.int16(np.int16(light - cr) + np.int16(np.int32(rest >> np.int32(16))))
            b = np.int16(np.int16(light + np.int16(cb + cb)) + part(cb, -14942))
            o = 3 * (y * width + x)
            put(picture, np.uintp(o), byte(r), "out")
            put(picture, np.uintp(o + 1), byte(g), "out")
            put(picture, np.uintp(o + 2), byte(b), "out")


# ------------------------------------------------------------ waves


@inlined
def times(value, factor):
    """Multiply by a factor in 2^-8, rounded down."""
    return np.int32(np.int32(value * factor) >> np.int32(8))


@inlined
def forwards(d0, d1, d2, d3, d4, d5, d6, d7):
    """Eight values as waves, each times a scale of its own that the quantization takes back (`jfdctfst.c`)."""
    t0, t7, t1, t6 = np.int32(d0 + d7), np.int32(d0 - d7), np.int32(d1 + d6), np.int32(d1 - d6)
    t2, t5, t3, t4 = np.int32(d2 + d5), np.int32(d2 - d5), np.int32(d3 + d4), np.int32(d3 - d4)
    e0, e3, e1, e2 = np.int32(t0 + t3), np.int32(t0 - t3), np.int32(t1 + t2), np.int32(t1 - t2)
    z1 = times(np.int32(e2 + e3), np.int32(181))
    o0, o1, o2 = np.int32(t4 + t5), np.int32(t5 + t6), np.int32(t6 + t7)
    z5 = times(np.int32(o0 - o2), np.int32(98))
    z2, z3 = np.int32(times(o0, np.int32(139)) + z5), times(o1, np.int32(181))
    z4 = np.int32(times(o2, np.int32(334)) + z5)
    more, less = np.int32(t7 + z3), np.int32(t7 - z3)
    return (
        np.int32(e0 + e1), np.int32(more + z4), np.int32(e3 + z1), np.int32(less - z2),
        np.int32(e0 - e1), np.int32(less + z2), np.int32(e3 - z1), np.int32(more - z4),
    )  # fmt: skip


@inlined
def scaled(value, bits):
    """Divide by 2^bits, rounded."""
    return np.int32(np.int32(value + np.int32(np.int32(1) << np.int32(bits - np.int32(1)))) >> bits)


@inlined
def backwards(bits, c0, c1, c2, c3, c4, c5, c6, c7):
    """Eight values of waves, over 2^(bits - 13) (`jidctint.c`)."""
    z1 = np.int32(np.int32(c2 + c6) * np.int32(4433))
    t2, t3 = np.int32(z1 - np.int32(c6 * np.int32(15137))), np.int32(z1 + np.int32(c2 * np.int32(6270)))
    t0, t1 = np.int32(np.int32(c0 + c4) << np.int32(13)), np.int32(np.int32(c0 - c4) << np.int32(13))
    e0, e3, e1, e2 = np.int32(t0 + t3), np.int32(t0 - t3), np.int32(t1 + t2), np.int32(t1 - t2)
    z5 = np.int32(np.int32(np.int32(c7 + c3) + np.int32(c5 + c1)) * np.int32(9633))
    z1, z2 = np.int32(np.int32(c7 + c1) * np.int32(7373)), np.int32(np.int32(c5 + c3) * np.int32(20995))
    z3 = np.int32(z5 - np.int32(np.int32(c7 + c3) * np.int32(16069)))
    z4 = np.int32(z5 - np.int32(np.int32(c5 + c1) * np.int32(3196)))
    o0, o1 = (
        np.int32(np.int32(c7 * np.int32(2446)) + np.int32(z3 - z1)),
        np.int32(np.int32(c5 * np.int32(16819)) + np.int32(z4 - z2)),
    )
    o2, o3 = (
        np.int32(np.int32(c3 * np.int32(25172)) + np.int32(z3 - z2)),
        np.int32(np.int32(c1 * np.int32(12299)) + np.int32(z4 - z1)),
    )
    return (
        scaled(np.int32(e0 + o3), bits), scaled(np.int32(e1 + o2), bits), scaled(np.int32(e2 + o1), bits),
        scaled(np.int32(e3 + o0), bits), scaled(np.int32(e3 - o0), bits), scaled(np.int32(e2 - o1), bits),
        scaled(np.int32(e1 - o2), bits), scaled(np.int32(e0 - o3), bits),
    )  # fmt: skip


@inlined
def quantized(value, half, share):
    """A wave in its steps, and as a file has it: its bits and, above 12 of them, how many they are."""
    # The half keeps exact quotients from ending below a whole number; they are less than 2^13, the divisors than 2^8.
    size = np.int32((np.float32(np.int32(abs(value) + half)) + np.float32(0.5)) * share)
    # A float's exponent is the logarithm's whole part.
    bits = np.int32(np.int32(np.float32(size).view(np.int32) >> np.int32(23)) - np.int32(126))
    bits = np.int32(max(bits, np.int32(0)))
    whole = np.int32(-size) if value < 0 else size
    low = np.int32(whole + np.int32(np.int32(np.int32(1) << bits) - np.int32(1))) if value < 0 else whole
    return whole, np.uint16(np.int32(low | np.int32(bits << np.int32(12))))


def _eight(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Read and write eight numbers of an array of that name in `memory`, `step` apart."""

    @inlined
    def read(array, first, step):
        return (
            np.int32(get(array, np.uintp(first), name)),
            np.int32(get(array, np.uintp(first + step), name)),
            np.int32(get(array, np.uintp(first + 2 * step), name)),
            np.int32(get(array, np.uintp(first + 3 * step), name)),
            np.int32(get(array, np.uintp(first + 4 * step), name)),
            np.int32(get(array, np.uintp(first + 5 * step), name)),
            np.int32(get(array, np.uintp(first + 6 * step), name)),
            np.int32(get(array, np.uintp(first + 7 * step), name)),
        )

    @inlined
    def write(array, first, step, values):
        v0, v1, v2, v3, v4, v5, v6, v7 = values
        put(array, np.uintp(first), np.int16(v0), name)
        put(array, np.uintp(first + step), np.int16(v1), name)
        put(array, np.uintp(first + 2 * step), np.int16(v2), name)
        put(array, np.uintp(first + 3 * step), np.int16(v3), name)
        put(array, np.uintp(first + 4 * step), np.int16(v4), name)
        put(array, np.uintp(first + 5 * step), np.int16(v5), name)
        put(array, np.uintp(first + 6 * step), np.int16(v6), name)
        put(array, np.uintp(first + 7 * step), np.int16(v7), name)

    return read, write


read_one, write_one = _eight("one")
read_other, write_other = _eight("other")


@inlined
def transform(planes, top, wide, count, steps, halves, shares, places, order, one, other, coded, some, at):
    """Blocks beside each other, the first at `top` of `planes`: their numbers to place `at`, and back to the planes."""
    low, high, middle = np.int32(0), np.int32(255), np.int32(128)
    for r in range(8):
        line = top + r * wide
        for j in range(count):
            for i in range(8):
                value = np.int32(np.int32(get(planes, np.uintp(line + 8 * j + i), "plane")) - middle)
                put(one, np.uintp((8 * r + i) * LANES + j), np.int16(value), "one")
    for r in range(8):
        for j in range(LANES):
            write_other(other, 8 * r * LANES + j, LANES, forwards(*read_one(one, 8 * r * LANES + j, LANES)))
    for i in range(8):
        for j in range(LANES):
            write_one(one, i * LANES + j, 8 * LANES, forwards(*read_other(other, i * LANES + j, 8 * LANES)))
    for j in range(2 * LANES):
        put(some, np.uintp(2 * at * LANES + j), np.uint32(0), "some")
    for k in range(64):
        place, step, half, share = places[k] * LANES, steps[k], halves[k], shares[k]
        row, bit = (2 * at + k // 32) * LANES, np.uint32(np.uint32(1) << np.uint32(k & 31))
        for j in range(LANES):
            whole, bits = quantized(np.int32(get(one, np.uintp(place + j), "one")), half, share)
            put(coded, np.uintp(at * BLOCKS + k * LANES + j), bits, "coded")
            put(other, np.uintp(k * LANES + j), np.int16(np.int32(whole * step)), "other")
            found = get(some, np.uintp(row + j), "some")
            put(some, np.uintp(row + j), np.uint32(found | (bit if whole != 0 else np.uint32(0))), "some")
    for j in range(LANES):
        whole, _ = quantized(np.int32(get(one, np.uintp(j), "one")), halves[0], shares[0])
        put(coded, np.uintp(at * BLOCKS + j), np.uint16(whole), "coded")
    for i in range(8):
        k0, k1, k2, k3 = order[i] * LANES, order[8 + i] * LANES, order[16 + i] * LANES, order[24 + i] * LANES
        k4, k5, k6, k7 = order[32 + i] * LANES, order[40 + i] * LANES, order[48 + i] * LANES, order[56 + i] * LANES
        for j in range(LANES):
            values = backwards(
                np.int32(11),
                np.int32(get(other, np.uintp(k0 + j), "other")),
                np.int32(get(other, np.uintp(k1 + j), "other")),
                np.int32(get(other, np.uintp(k2 + j), "other")),
                np.int32(get(other, np.uintp(k3 + j), "other")),
                np.int32(get(other, np.uintp(k4 + j), "other")),
                np.int32(get(other, np.uintp(k5 + j), "other")),
                np.int32(get(other, np.uintp(k6 + j), "other")),
                np.int32(get(other, np.uintp(k7 + j), "other")),
            )
            write_one(one, i * LANES + j, 8 * LANES, values)
    for r in range(8):
        for j in range(LANES):
            values = backwards(np.int32(18), *read_one(one, 8 * r * LANES + j, LANES))
            write_other(other, 8 * r * LANES + j, LANES, values)
    for r in range(8):
        line = top + r * wide
        for j in range(count):
            for i in range(8):
                value = np.int32(np.int32(get(other, np.uintp((8 * r + i) * LANES + j), "other")) + middle)
                put(planes, np.uintp(line + 8 * j + i), np.uint8(min(max(value, low), high)), "plane")


# ------------------------------------------------------------ bits


@inlined
def swapped(word):
    """Eight bytes in the other order: a file has the highest first."""
    bytes_, pairs = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
    word = ((word >> np.uint64(8)) & bytes_) | ((word & bytes_) << np.uint64(8))
    word = ((word >> np.uint64(16)) & pairs) | ((word & pairs) << np.uint64(16))
    return (word >> np.uint64(32)) | (word << np.uint64(32))


@inlined
def append(words, n, held, free, value, size):
    """`size` bits more: words written, bits in hand, and how many these still take."""
    free -= size
    if free < 0:
        words[np.uintp(n)] = swapped((held << np.uint64(size + free)) | (value >> np.uint64(-free)))
        return n + 1, value, free + 64
    return n, (held << np.uint64(size)) | value, free


@inlined
def write_block(coded, base, found, last, codes, sizes, words, n, held, free):
    """A block's bits: the first number as the difference to the last block's, of the others those that are not 0."""
    whole = np.int64(np.int16(coded[np.uintp(base)]))
    change = whole - last
    bits = np.int64(sizes[np.uintp(abs(change))])
    low = np.uint64((change if change >= 0 else change - 1) & ((1 << bits) - 1))
    code = codes[np.uintp(bits)]
    n, held, free = append(words, n, held, free, (code >> np.uint64(8)) | low, np.int64(code & np.uint64(255)))
    found >>= np.uint64(1)
    at = base
    while found != np.uint64(0):
        run = zeros_below(found)
        found = (found >> run) >> np.uint64(1)
        at += (np.int64(run) + 1) * LANES
        while run > np.uint64(15):
            code = codes[np.uintp(CODES + 0xF0)]
            n, held, free = append(words, n, held, free, code >> np.uint64(8), np.int64(code & np.uint64(255)))
            run -= np.uint64(16)
        value = np.uint64(coded[np.uintp(at)])
        code = codes[np.uintp(CODES + np.int64((run << np.uint64(4)) | (value >> np.uint64(12))))]
        low = value & np.uint64(0xFFF)
        n, held, free = append(words, n, held, free, (code >> np.uint64(8)) | low, np.int64(code & np.uint64(255)))
    if at < base + 63 * LANES:
        code = codes[np.uintp(CODES)]
        n, held, free = append(words, n, held, free, code >> np.uint64(8), np.int64(code & np.uint64(255)))
    return whole, n, held, free


@picture_kernel
def round_trip(picture, height, width, tables, room):
    """Turn a picture [h*w*3] into what its file shows; returns how many bytes of `room.words` follow the head."""
    steps, halves, shares, codes, sizes, places, order = tables
    planes, blue, red, one, other, coded, some, sums, fine, words = room
    half = width // 2
    # So many groups of blocks has a row of brightness, and of a colour.
    full, less = (width // 8 + LANES - 1) // LANES, (half // 8 + LANES - 1) // LANES
    last = np.zeros(3, np.int64)
    n, held, free = 0, np.uint64(0), np.int64(64)
    for y in range(0, height, UNIT):
        for k in range(0, UNIT, 2):
            to_planes(picture, planes, blue, red, y + k, height, width)
        for group in range(2 * full + 2 * less):
            if group < 2 * full:
                kind, wide, begin, top = 0, width, group % full, (y + 8 * (group // full)) * width
            else:
                kind, wide, begin, top = 1, half, (group - 2 * full) % less, height * width + y // 2 * half
                if group >= 2 * full + less:
                    top += height // 2 * half
            begin *= LANES
            transform(planes, top + 8 * begin, wide, min(LANES, wide // 8 - begin), steps[kind], halves[kind],
                      shares[kind], places, order, one, other, coded, some, group)  # fmt: skip
        for unit in range(width // UNIT):
            for b in range(6):
                # Four of brightness, blue, red.
                if b < 4:
                    lane, kind, group = 2 * unit + (b & 1), 0, (b >> 1) * full
                else:
                    lane, kind, group = unit, b - 3, 2 * full + (b - 4) * less
                group += lane // LANES
                lane %= LANES
                found = np.uint64(some[np.uintp(2 * group * LANES + lane)])
                found |= np.uint64(some[np.uintp((2 * group + 1) * LANES + lane)]) << np.uint64(32)
                last[kind], n, held, free = write_block(
                    coded, group * BLOCKS + lane, found, last[kind], codes[0 if kind == 0 else 1], sizes, words,
                    n, held, free,
                )  # fmt: skip
    to_picture(picture, planes, sums, fine, height, width)
    count = 8 * n + (64 - free + 7) // 8
    if free < 64:
        # Ones fill the last byte.
        words[np.uintp(n)] = swapped((held << np.uint64(free)) | ((np.uint64(1) << np.uint64(free)) - np.uint64(1)))
    return count


# ------------------------------------------------------------ in Python


def read_head(file: bytes) -> tuple[bytes, Tables]:
    """A file up to its bits, and what that says of them."""
    steps, codes = np.zeros((2, 64), np.int64), np.zeros((2, 2 * CODES), np.uint64)
    at, kind = 2, 0
    while kind != 0xDA:
        kind, end = file[at + 1], at + 2 + int.from_bytes(file[at + 2 : at + 4], "big")
        part, at = file[at + 4 : end], end
        while part and kind == 0xDB:
            steps[part[0]], part = list(part[1:65]), part[65:]
        while part and kind == 0xC4:
            which, counts, symbols, part = part[0], part[1:17], part[17:], part[17 + sum(part[1:17]) :]
            code = taken = 0
            for length, count in enumerate(counts, 1):
                for symbol in symbols[taken : taken + count]:
                    bits = symbol & 15
                    codes[which & 15, (which >> 4) * CODES + symbol] = (code << bits) << 8 | (length + bits)
                    code += 1
                code, taken = code << 1, taken + count
    # What each wave of the fast transform is times too large, in 2^-14.
    scale = np.sqrt([1.0, *[2.0] * 7]) * np.cos(np.arange(8) * np.pi / 16.0)
    scale = np.round(16384.0 * np.outer(scale, scale)).astype(np.int64).ravel()
    divisors = (steps * scale[ZIGZAG] + 1024) >> 11
    sizes = np.array([number.bit_length() for number in range(4096)], np.uint8)
    return file[:at], Tables(
        steps.astype(np.int32), (divisors >> 1).astype(np.int32), np.float32(1.0) / divisors.astype(np.float32), codes,
        sizes, ZIGZAG, np.argsort(ZIGZAG),
    )  # fmt: skip


class Coder:
    """Codes pictures of one size; not for several threads at a time.

    `own` is whether it does so itself: whole units, and a libjpeg that computes as we do, which a picture of noise and
    slopes shows when a coder is made (1 ms).
    """

    def __init__(self, height: int, width: int) -> None:
        self.own = height % UNIT == 0 and width % UNIT == 0
        if not self.own:
            return
        self._size = height, width
        noise = np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8)
        noise[: height // 2] = noise[: height // 2] // 32 + np.arange(width, dtype=np.uint8)[:, None]
        file = simplejpeg.encode_jpeg(noise, QUALITY, "RGB", "420")
        self._head, self._tables = read_head(file)
        groups = 2 * -(-width // 8 // LANES) + 2 * -(-width // 16 // LANES)
        self._room = Room(
            planes=np.zeros(height * width * 3 // 2, np.uint8),
            blue=np.zeros(2 * width, np.uint8),
            red=np.zeros(2 * width, np.uint8),
            one=np.zeros(BLOCKS, np.int16),
            other=np.zeros(BLOCKS, np.int16),
            coded=np.zeros(groups * BLOCKS, np.uint16),
            some=np.zeros(groups * 2 * LANES, np.uint32),
            sums=np.zeros(width // 2 + 2, np.int16),
            fine=np.zeros(2 * width, np.int16),
            # At most 27 bits a number; pages that are never written take no memory.
            words=np.zeros(height * width * 3 // 2 * 27 // 64 + 1, np.uint64),
        )
        self._bytes = self._room.words.view(np.uint8)
        shown = simplejpeg.decode_jpeg(file, "RGB")
        self.own = self.code(noise) == file and np.array_equal(noise, shown)

    def code(self, picture: NDArray[np.uint8]) -> bytes:
        """The JPEG file of a picture [h,w,3] RGB, contiguous, which becomes what the file shows."""
        if not self.own:
            file: bytes = simplejpeg.encode_jpeg(picture, QUALITY, "RGB", "420")
            simplejpeg.decode_jpeg(file, "RGB", buffer=picture)
            return file
        count = round_trip(picture.reshape(-1), *self._size, self._tables, self._room)
        bits = self._bytes[:count].tobytes().replace(b"\xff", b"\xff\x00")
        return b"".join((self._head, bits, b"\xff\xd9"))
