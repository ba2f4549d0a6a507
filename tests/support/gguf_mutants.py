"""Harmed GGUF files for fuzzing: each has one or two harms of a kind, chosen by a number."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf

from dynatree.engine.model.gguf_header import BLOCKS
from tests.support.gguf_files import FLOATS, HALVES, written_gguf

_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16}
_EXPERTS = {"head_dim": 16, "moe_intermediate_size": 32}
FAMILIES: tuple[tuple[str, tuple[str, ...], bool, tuple[int, int, int], int, dict[str, Any]], ...] = (
    # the family, types of the weights, whether the output layer is tied, sizes, words, and more of the configuration
    ("llama", ("Q8_0", "Q4_0", "Q4_1", "F16", "Q5_0"), False, (64, 96, 2), 300, {}),
    ("llama", ("Q5_1", "BF16", "F32", "Q8_0"), True, (64, 96, 1), 280, {}),
    ("llama", ("Q4_K", "Q5_K", "Q6_K"), False, (256, 256, 1), 270, {}),
    ("gemma3", ("Q8_0", "Q4_0", "F16", "Q5_1"), True, (64, 96, 6), 290, _GEMMA),
    ("qwen3moe", ("Q8_0", "Q4_1", "Q5_0", "Q4_0", "F16"), False, (64, 96, 2), 260, _EXPERTS),
)
_EXTREMES = (0, 1, 2, 3, 5, 127, 255, 2**15, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1)
_STRING, _ARRAY, _U32 = 8, 9, 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BAD_HALVES = (0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFE00, 0x7BFF, 0xFBFF, 0x8000, 0x0001)  # infinite, NaN, largest, tiny


@dataclass
class Pair:
    """A key, the code of its value's type, and the value's bytes."""

    key: bytes
    code: int
    value: bytes

    def written(self) -> bytes:
        """The pair as it is in a file."""
        return _text(self.key) + struct.pack("<I", self.code & 0xFFFFFFFF) + self.value


@dataclass
class Info:
    """An entry of the list of tensors; the sizes are the fastest first."""

    name: bytes
    sizes: list[int]
    code: int
    offset: int

    def written(self) -> bytes:
        """The entry as it is in a file."""
        sizes = b"".join(map(_word, self.sizes))
        code = struct.pack("<I", self.code & 0xFFFFFFFF)
        return _text(self.name) + struct.pack("<I", len(self.sizes)) + sizes + code + _word(self.offset)


@dataclass
class Parts:
    """A GGUF file in parts; `more` is added to the counts of tensors and pairs."""

    pairs: list[Pair]
    infos: list[Info]
    data: bytearray
    version: int = 3
    alignment: int = 32
    more: list[int] = field(default_factory=lambda: [0, 0])

    @classmethod
    def of(cls, path: Path) -> Parts:
        """Read a valid file."""
        reader = gguf.GGUFReader(path)
        pairs = []
        for each in reader.fields.values():
            if not each.name.startswith("GGUF."):
                code, *value = each.parts[2:]
                pairs.append(Pair(each.name.encode(), int(code[0]), b"".join(part.tobytes() for part in value)))
        infos = []
        for tensor in reader.tensors:
            *_, sizes, code, offset = tensor.field.parts
            infos.append(Info(tensor.name.encode(), [int(size) for size in sizes], int(code[0]), int(offset[0])))
        return cls(pairs, infos, bytearray(path.read_bytes()[reader.data_offset :]))

    def written(self) -> tuple[bytearray, list[int]]:
        """Return the file, and where its header, pairs, list of tensors and data begin and end."""
        raw = bytearray(b"GGUF" + struct.pack("<I", self.version))
        raw += _word(len(self.infos) + self.more[0]) + _word(len(self.pairs) + self.more[1])
        ends = [0, len(raw)]
        for parts in (self.pairs, self.infos):
            for each in parts:
                raw += each.written()
            ends.append(len(raw))
        raw += bytes(-len(raw) % self.alignment) + self.data
        return raw, [*ends, len(raw)]


def _word(number: int) -> bytes:
    return struct.pack("<Q", number % 2**64)


def _text(text: bytes) -> bytes:
    return _word(len(text)) + text


def _near(chooser: random.Random, number: int) -> int:
    """Return an extreme number, or one near a number."""
    near = (number - 1, number + 1, number * 2, number // 2, -number, number + 32, chooser.randrange(2**16))
    return chooser.choice(_EXTREMES if chooser.random() < 0.5 else near)


def _counts(parts: Parts, chooser: random.Random) -> None:
    which = chooser.randrange(2)
    count = len((parts.infos, parts.pairs)[which])
    parts.more[which] = _near(chooser, count) - count


def _lengths(parts: Parts, chooser: random.Random) -> None:
    """Change the length of a string or an array, or the type of an array."""
    pair = chooser.choice([each for each in parts.pairs if each.code in (_STRING, _ARRAY)])
    if pair.code == _STRING:
        pair.value = _word(_near(chooser, len(pair.value) - 8)) + pair.value[8:]
    elif chooser.random() < 0.3:
        pair.value = struct.pack("<I", chooser.randrange(14)) + pair.value[4:]
    else:
        length = int.from_bytes(pair.value[4:12], "little")
        pair.value = pair.value[:4] + _word(_near(chooser, length)) + pair.value[12:]


def _codes(parts: Parts, chooser: random.Random) -> None:
    if chooser.random() < 0.5:
        chooser.choice(parts.pairs).code = chooser.choice((*range(14), 2**31, 2**32 - 1))
    else:
        chooser.choice(parts.infos).code = chooser.choice((*range(42), 2**31, 2**32 - 1))


def _sizes(parts: Parts, chooser: random.Random) -> None:
    info = chooser.choice(parts.infos)
    match chooser.randrange(5):
        case 0:
            info.sizes.reverse()
        case 1:
            info.sizes += [chooser.choice((1, 2))] * chooser.choice((1, 2, 3))
        case 2:
            info.sizes.pop()
        case 3:
            info.sizes = [info.sizes[0] * 2, *(size // 2 for size in info.sizes[1:2])]
        case _:
            at = chooser.randrange(len(info.sizes))
            info.sizes[at] = _near(chooser, info.sizes[at])


def _offsets(parts: Parts, chooser: random.Random) -> None:
    info, other = chooser.choice(parts.infos), chooser.choice(parts.infos)
    beyond = len(parts.data) - chooser.randrange(-1, 3) * 32
    info.offset = chooser.choice((other.offset, info.offset + 32, info.offset + 1, beyond, _near(chooser, info.offset)))


def _alignments(parts: Parts, chooser: random.Random) -> None:
    """Name an alignment; the data lie by it in half of the files, with tensors where they were."""
    alignment = chooser.choice((0, 1, 8, 16, 24, 64, 128, 4096, 2**31))
    pair = Pair(b"general.alignment", _U32, struct.pack("<I", alignment))
    if chooser.random() < 0.2:
        pair = Pair(pair.key, *chooser.choice(((5, pair.value), (_STRING, _text(b"32")), (6, b"\0\0\0B"))))
    parts.pairs.insert(chooser.randrange(len(parts.pairs)), pair)
    if chooser.random() < 0.5 and 0 < alignment < 2**16:
        parts.alignment = alignment


def _duplicates(parts: Parts, chooser: random.Random) -> None:
    chosen: list = chooser.choice((parts.pairs, parts.infos))
    chosen.insert(chooser.randrange(len(chosen)), deepcopy(chooser.choice(chosen)))


def _drops(parts: Parts, chooser: random.Random) -> None:
    chosen: list = chooser.choice((parts.pairs, parts.infos))
    chosen.pop(chooser.randrange(len(chosen)))


def _orders(parts: Parts, chooser: random.Random) -> None:
    """A valid file: no order is required."""
    chooser.shuffle(chooser.choice((parts.pairs, parts.infos)))


def _names(parts: Parts, chooser: random.Random) -> None:
    """Exchange two names, or change a character, or empty a name."""
    if chooser.random() < 0.5:
        one, other = chooser.choice(parts.pairs), chooser.choice(parts.pairs)
        one.key, other.key = other.key, one.key
        return
    info, other = chooser.choice(parts.infos), chooser.choice(parts.infos)
    match chooser.randrange(3):
        case 0:
            info.name, other.name = other.name, info.name
        case 1:
            at = chooser.randrange(len(info.name))
            info.name = info.name[:at] + bytes([chooser.randrange(256)]) + info.name[at + 1 :]
        case _:
            info.name = chooser.choice((b"", b"a" * 70000, b"output.weight", b"rope_freqs.weight", b"output.bias"))


def _value(chooser: random.Random) -> tuple[int, bytes]:
    """Return a random value of any type."""
    code = chooser.choice((*_SCALARS, _STRING, _ARRAY))
    if code == _STRING:
        return code, _text(chooser.choice((b"", b"3", b"llama", b"\xff\xfe", b"{{ a", b"x" * 5000)))
    if code == _ARRAY:
        inner = chooser.choice((*_SCALARS, _STRING))
        count = chooser.randrange(4)
        items = b"".join(_text(b"a") if inner == _STRING else _scalar(inner, chooser) for _ in range(count))
        return code, struct.pack("<I", inner) + _word(count) + items
    return code, _scalar(code, chooser)


def _scalar(code: int, chooser: random.Random) -> bytes:
    size = struct.calcsize(_SCALARS[code])
    special = {6: (0.0, -1.0, 1e38, float("nan"), float("inf")), 12: (0.5, -1e300, float("nan"))}
    if code in special:
        return struct.pack(f"<{_SCALARS[code]}", chooser.choice(special[code]))
    return _word(_near(chooser, 4))[:size]


def _types(parts: Parts, chooser: random.Random) -> None:
    pair = chooser.choice(parts.pairs)
    pair.code, pair.value = _value(chooser)


def _numbers(parts: Parts, chooser: random.Random) -> None:
    """Change a number of the metadata within its type."""
    pair = chooser.choice([each for each in parts.pairs if each.code in _SCALARS])
    if pair.code in (6, 12):
        pair.value = _scalar(pair.code, chooser)
    else:
        pair.value = _word(_near(chooser, int.from_bytes(pair.value, "little")))[: len(pair.value)]


def _tokenizers(parts: Parts, chooser: random.Random) -> None:
    """Change the tokenizer's arrays, its name or its special tokens."""
    pair = chooser.choice([each for each in parts.pairs if each.key.startswith(b"tokenizer.")])
    if pair.code == _STRING:
        pair.value = _text(chooser.choice((b"llama", b"bert", b"t5", b"gpt2", b"no", b"", b"qwen2", b"\xff")))
    elif pair.code != _ARRAY:
        pair.value = _word(_near(chooser, 300))[: len(pair.value)]
    elif pair.value[0] != _STRING:
        kept = chooser.randrange(len(pair.value[12:]) // 4 + 1) * 4
        pair.value = pair.value[:4] + _word(kept // 4) + pair.value[12 : 12 + kept]
    else:
        items = _items(pair.value)
        match chooser.randrange(5):
            case 0:
                del items[chooser.randrange(len(items)) :]
            case 1:
                items += [b"more %d" % each for each in range(chooser.choice((1, 5, 500)))]
            case 2:
                items[chooser.randrange(len(items))] = chooser.choice(items)
            case 3:
                chooser.shuffle(items)
            case _:
                other = (b"", b"\xff\xff", b"a b c", b"a", b"\0", b"x" * 70000)
                items[chooser.randrange(len(items))] = chooser.choice(other)
        pair.value = struct.pack("<I", _STRING) + _word(len(items)) + b"".join(map(_text, items))


def _items(value: bytes) -> list[bytes]:
    items, at = [], 12
    while at < len(value):
        length = int.from_bytes(value[at : at + 8], "little")
        items.append(value[at + 8 : at + 8 + length])
        at += 8 + length
    return items


def _scales(parts: Parts, chooser: random.Random) -> None:
    """Put NaN, infinity or another special number into a block's scale, or into a tensor of floating-point numbers."""
    info = chooser.choice(parts.infos)
    kind = gguf.GGMLQuantizationType(info.code).name
    values, size = BLOCKS[kind]
    count = 1
    for each in info.sizes:
        count *= each
    at = info.offset + chooser.randrange(count // values) * size + chooser.choice(HALVES.get(kind, [0]))
    half = struct.pack("<H", chooser.choice(_BAD_HALVES))
    if kind in FLOATS and kind != "F16":
        half = struct.pack("<f", chooser.choice((float("nan"), float("inf"), -float("inf"), 3e38, 1e-45, -0.0)))[-size:]
    parts.data[at : at + len(half)] = half


def _flips(raw: bytearray, begin: int, end: int, chooser: random.Random) -> None:
    for _ in range(chooser.choice((1, 1, 2, 8))):
        at = chooser.randrange(begin, end)
        raw[at] = chooser.choice((0, 1, 127, 128, 255, raw[at] ^ (1 << chooser.randrange(8)), chooser.randrange(256)))


# In the order in which two of them are applied: a harm expects parts that only those before it have harmed.
HARMS: dict[str, Callable[[Parts, random.Random], None]] = {
    "scales": _scales,
    "tokenizers": _tokenizers,
    "numbers": _numbers,
    "orders": _orders,
    "alignments": _alignments,
    "offsets": _offsets,
    "sizes": _sizes,
    "names": _names,
    "duplicates": _duplicates,
    "drops": _drops,
    "values of other types": _types,
    "lengths": _lengths,
    "codes of types": _codes,
    "counts": _counts,
}
_REGIONS = ("header", "metadata", "list of tensors", "data")
_FLIPPED = tuple(f"bytes of the {region}" for region in _REGIONS)
KINDS = (*HARMS, *_FLIPPED, "cut short", "bytes moved", "two harms")


def families(folder: Path) -> list[Parts]:
    """Make the valid files that are harmed."""
    valid = []
    for number, (family, kinds, tied, (hidden, middle, layers), words, more) in enumerate(FAMILIES):
        path = folder / f"{number}.gguf"
        sizes = {"hidden_size": hidden, "intermediate_size": middle, "num_hidden_layers": layers}
        written_gguf(path, kinds, number, 64, tied, family, words=words, **sizes, **more)
        valid.append(Parts.of(path))
    return valid


def mutant(valid: list[Parts], number: int, seed: int = 0) -> tuple[str, bytes]:
    """Return the kind of a file's harm, and the file; the kinds and the valid files take turns."""
    chooser = random.Random(f"{seed} {number}")
    kind = KINDS[number % len(KINDS)]
    parts = deepcopy(valid[number // len(KINDS) % len(valid)])
    chosen = chooser.sample(list(HARMS), 2) if kind == "two harms" else [kind]
    for name, harm in HARMS.items():
        if name in chosen:
            harm(parts, chooser)
    raw, ends = parts.written()
    if kind in _FLIPPED:
        region = _FLIPPED.index(kind)
        _flips(raw, ends[region], ends[region + 1], chooser)
    elif kind == "cut short":
        begin, end = chooser.choice(list(pairwise(ends)))
        del raw[chooser.choice((begin, end - 1, chooser.randrange(begin, end))) :]
    elif kind == "bytes moved":
        at, count = chooser.randrange(ends[3]), chooser.choice((1, 4, 8, 32))
        if chooser.random() < 0.5:
            del raw[at : at + count]
        else:
            raw[at:at] = chooser.choice((bytes(count), raw[at : at + count]))
    return kind, bytes(raw)
