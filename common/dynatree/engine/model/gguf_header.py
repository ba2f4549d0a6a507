"""Reads the header of a GGUF file and checks it against the file, without torch and in time bounded by the file's size.

Format: version 2 and 3 of llama.cpp's GGUF, little-endian. A file is a list of key-value pairs, a list of tensors with
types, shapes and offsets, and the tensors' data.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynatree.common.errors import StartupError

# Values and bytes of one block, for the types that can be served; the names are llama.cpp's.
BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K"}
_TYPES |= {14: "Q6_K", 30: "BF16"}
# Types of llama.cpp that are not served, for their names in messages.
_OTHERS = {9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
_OTHERS |= {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_OTHERS |= {29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_LONGEST_NAME = 256  # characters of a key or of a tensor's name
_ALIGNMENT = 32  # bytes, where the file names no other
_TABLE = "token_embd.weight"
# Sizes of a model; none is larger than every side of its tensors. transformers makes modules of these sizes.
_SIZES = (
    *("embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv", "expert_count"),
    *("expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
    *("attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size"),
)
_REQUIRED = ("block_count", "embedding_length", "attention.head_count")  # transformers has defaults of other models
_SPECIAL = ("bos", "eos", "unknown", "padding")


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies in a file.

    Attributes:
        name: Name in llama.cpp's convention.
        kind: Name of its type, a key of `BLOCKS`.
        shape: Sizes, the slowest first: a weight is `(features, inputs)`.
        start: First byte of its data in the file.
        bytes: Number of bytes of its data.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a GGUF file; `values` holds the scalars and strings, and the lengths of arrays."""

    values: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]


class _MalformedError(ValueError):
    """A file is not as the format has it; the message says where."""


class Length(int):
    """The length of an array, in place of the array."""


class _Cursor:
    """Reads from a file's start on; every read is checked against the file's end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def skip(self, count: int) -> int:
        """Move past `count` bytes; return where they begin."""
        begin = self.at
        if count > len(self.data) - begin:
            raise _MalformedError("it ends within its header")
        self.at += count
        return begin

    def number(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack_from(f"<{code}", self.data, self.skip(size))[0]

    def text(self) -> str:
        length = self.number("Q")
        begin = self.skip(length)
        try:
            return self.data[begin : begin + length].decode()
        except UnicodeDecodeError:
            raise _MalformedError("it has a string that is not UTF-8") from None

    def name(self) -> str:
        name = self.text()
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise _MalformedError(f"it has a name that is no printable text of at most {_LONGEST_NAME} characters")
        return name

    def value(self, kind: int) -> Any:
        """Read a value; of an array, return its length."""
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise _MalformedError(f"it has a value of the unknown type {kind}")
        inner, length = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            self.skip(length * struct.calcsize(f"<{_SCALARS[inner]}"))
        elif inner == _STRING:
            for _ in range(length):  # ends at the file's end, since each string takes 8 bytes
                self.text()
        else:
            raise _MalformedError(f"it has an array of the unsupported type {inner}")
        return Length(length)


def read_header(path: Path) -> GGUFHeader:
    """Read the header of a file, and check that the file holds all tensors that it names.

    Raises:
        StartupError: The file cannot be read, is no GGUF file, is cut short, or has a type that is not served.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise _MalformedError("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _header(_Cursor(data))
    except OSError as error:
        raise StartupError(f"model {path.name} cannot be read: {error.strerror}") from None
    except _MalformedError as error:
        raise StartupError(f"model {path.name} cannot be read as GGUF: {error}") from None


def _header(cursor: _Cursor) -> GGUFHeader:
    if cursor.data[:4] != b"GGUF":
        raise _MalformedError("it does not begin with the letters GGUF; expected such a file or a checkpoint's folder")
    cursor.skip(4)
    version = cursor.number("I")
    if version not in (2, 3):
        raise _MalformedError(f"its version is {version}, expected 2 or 3, little-endian")
    tensors, pairs = cursor.number("Q"), cursor.number("Q")
    values: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.name()
        if key in values:
            raise _MalformedError(f"it has two values of {key}")
        kind = cursor.number("I")
        values[key] = cursor.value(kind)
        if key == "general.alignment" and _SCALARS.get(kind) != "I":
            raise _MalformedError(f"its {key} is of type {kind}, expected 4, a number of 32 bits")
    if not isinstance(values.get("general.architecture"), str):
        raise _MalformedError("it names no general.architecture")
    alignment = values.get("general.alignment", _ALIGNMENT)
    if alignment < 8 or alignment & (alignment - 1):
        raise _MalformedError(f"its general.alignment is {alignment}, expected a power of two from 8 on")
    found = [_tensor(cursor) for _ in range(tensors)]
    begin = -(-cursor.at // alignment) * alignment
    placed = [GGUFTensor(each.name, each.kind, each.shape, begin + each.start, each.bytes) for each in found]
    for each in placed:
        if each.start % alignment:
            raise _MalformedError(f"its tensor {each.name} begins at no multiple of {alignment} bytes")
        if each.start + each.bytes > len(cursor.data):
            raise _MalformedError(f"it ends within its tensor {each.name}; download it again")
    if len({each.name for each in placed}) < len(placed):
        raise _MalformedError("it has two tensors of one name")
    _check_sizes(values, placed)
    _check_tokens(values, placed)
    return GGUFHeader(values, tuple(placed))


def _check_sizes(values: Mapping[str, Any], tensors: Sequence[GGUFTensor]) -> None:
    """Bound the model's sizes by those of the file's tensors, before transformers spends time and memory by them."""
    architecture = values["general.architecture"]
    for name in _REQUIRED:
        if f"{architecture}.{name}" not in values:
            raise _MalformedError(f"it has no {architecture}.{name}")
    largest = max((max(each.shape) for each in tensors), default=0)
    for name, most in (("block_count", len(tensors)), *((each, largest) for each in _SIZES)):
        size, least = values.get(f"{architecture}.{name}", 0), int(name in _REQUIRED)
        if isinstance(size, Length) and size == 1:  # transformers would take the one number in it, whatever it is
            raise _MalformedError(f"its {architecture}.{name} is an array of one number, expected a number")
        if not isinstance(size, int) or not least <= size <= most:
            expected = f"{least} to {most} by its tensors"
            raise _MalformedError(f"its {architecture}.{name} is {size!r:.40}, expected {expected}")
    experts, used = values.get(f"{architecture}.expert_count", 0), values.get(f"{architecture}.expert_used_count")
    if experts and used is not None and not 1 <= used <= experts:
        raise _MalformedError(f"its {architecture}.expert_used_count is {used}, expected 1 to {experts}")


def _check_tokens(values: Mapping[str, Any], tensors: Sequence[GGUFTensor]) -> None:
    """Compare the tokenizer's arrays with each other, with the special tokens and with the embedding table."""
    tokens = values.get("tokenizer.ggml.tokens", 0)
    if not isinstance(tokens, int):
        raise _MalformedError(f"its tokenizer.ggml.tokens are {tokens!r:.40}, expected an array")
    for name in ("scores", "token_type"):
        count = values.get(f"tokenizer.ggml.{name}", tokens)
        if count != tokens:
            raise _MalformedError(f"its tokenizer.ggml.tokens are {tokens}, but its tokenizer.ggml.{name} {count}")
    for name in _SPECIAL:
        token = values.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and not (isinstance(token, int) and 0 <= token < tokens):
            raise _MalformedError(f"its tokenizer.ggml.{name}_token_id is {token!r:.40}, but its tokens are {tokens}")
    rows = next((each.shape[0] for each in tensors if each.name == _TABLE), tokens)
    if tokens > rows:
        raise _MalformedError(f"its tokenizer.ggml.tokens are {tokens}, but its {_TABLE} has {rows} rows")


def _tensor(cursor: _Cursor) -> GGUFTensor:
    """Read one entry of the tensors' list; its start is relative to the data's."""
    name = cursor.name()
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise _MalformedError(f"its tensor {name} has {dimensions} dimensions")
    sizes = [cursor.number("Q") for _ in range(dimensions)]  # the fastest first
    code, start = cursor.number("I"), cursor.number("Q")
    kind = _TYPES.get(code)
    if kind is None:
        raise _MalformedError(f"its tensor {name} is of type {_OTHERS.get(code, code)}, expected {', '.join(BLOCKS)}")
    values, block = BLOCKS[kind]
    count = 1
    for size in sizes:
        count *= size
    if count == 0 or sizes[0] % values:
        raise _MalformedError(f"its tensor {name} of type {kind} has the shape {sizes[::-1]}")
    return GGUFTensor(name, kind, tuple(sizes[::-1]), start, count // values * block)
