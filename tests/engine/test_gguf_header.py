"""Tests the reading of GGUF headers, and the refusal of broken ones."""

import random
import struct

import gguf
import numpy as np
import pytest

from dynatree.common.errors import StartupError
from dynatree.engine.model.files import check_model
from dynatree.engine.model.gguf_header import BLOCKS, read_header

VALUES = {"llama.block_count": 1, "llama.embedding_length": 4, "llama.attention.head_count": 1, "numbers": [1.0, 2.0]}
VALUES["tokenizer.ggml.tokens"] = ["a", "b", "<unk>"]


def save(path, values=VALUES):
    writer = gguf.GGUFWriter(str(path), "llama")
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    add |= {np.int32: writer.add_int32, np.uint64: writer.add_uint64}
    for key, value in values.items():
        add[type(value)](key, value)
    writer.add_tensor("token_embd.weight", np.zeros((3, 4), dtype=np.float32))
    writer.add_tensor("float", np.arange(6, dtype=np.float32).reshape(2, 3))
    for kind in ("Q8_0", "Q4_K", "Q6_K"):
        values, size = BLOCKS[kind]
        raw = np.zeros((4, 512 // values * size), dtype=np.uint8)
        writer.add_tensor(kind, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(name="path", scope="module")
def path_fixture(tmp_path_factory):
    return save(tmp_path_factory.mktemp("gguf") / "model.gguf")


def changed(path, tmp_path, at, data):
    raw = bytearray(path.read_bytes())
    raw[at : at + len(data)] = data
    other = tmp_path / "other.gguf"
    other.write_bytes(raw)
    return other


def test_the_header_is_as_it_was_written(path):
    header = read_header(path)
    assert header.values["general.architecture"] == "llama"
    assert header.values["llama.block_count"] == 1
    assert header.values["tokenizer.ggml.tokens"] == 3
    theirs = {each.name: each for each in gguf.GGUFReader(path).tensors}
    for tensor in header.tensors:
        assert tensor.start == theirs[tensor.name].data_offset
        assert tensor.bytes == theirs[tensor.name].n_bytes
        assert list(tensor.shape) == [int(size) for size in theirs[tensor.name].shape][::-1]
        assert tensor.kind == theirs[tensor.name].tensor_type.name
    check_model(str(path))


@pytest.mark.parametrize(
    ("at", "data", "reason"),
    [
        (0, b"GGML", "does not begin with the letters GGUF"),
        (4, struct.pack("<I", 1), "its version is 1"),
        (4, struct.pack(">I", 3), "its version is"),
        (8, struct.pack("<Q", 2**60), "cannot be read as GGUF"),
        (16, struct.pack("<Q", 2**63), "cannot be read as GGUF"),
        (24, struct.pack("<Q", 2**64 - 1), "it ends within its header"),
    ],
)
def test_a_broken_header_is_refused(path, tmp_path, at, data, reason):
    with pytest.raises(StartupError, match=reason):
        check_model(str(changed(path, tmp_path, at, data)))


def test_a_type_that_is_not_served_is_refused_by_its_name(path, tmp_path):
    name = struct.pack("<Q", 4) + b"Q4_K"
    at = path.read_bytes().index(name) + len(name) + 4 + 16
    with pytest.raises(StartupError, match="its tensor Q4_K is of type IQ4_XS, expected F32"):
        check_model(str(changed(path, tmp_path, at, struct.pack("<I", 23))))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("llama.block_count", 2**31, "block_count is 2147483648, expected 1 to 5 by its tensors"),
        ("llama.block_count", "one", "block_count is 'one', expected 1 to 5"),
        ("llama.embedding_length", 2**30, "embedding_length is 1073741824, expected 1 to 512"),
        ("llama.attention.head_count", 1.5, "head_count is 1.5, expected 1 to 512"),
        ("llama.rope.dimension_count", 513, "dimension_count is 513, expected 0 to 512"),
        ("llama.block_count", [2**31 - 1], "block_count is an array of one number"),
        ("llama.attention.head_count", 0, "head_count is 0, expected 1 to 512"),
        ("llama.vocab_size", "x" * 5000, "vocab_size is '[x]{39}, expected 0 to 512"),
        ("llama.new\nline", 1, "a name that is no printable text"),
        ("l" * 300, 1, "a name that is no printable text of at most 256 characters"),
        ("general.alignment", 24, "general.alignment is 24, expected a power of two"),
        ("general.alignment", "32", "general.alignment is of type 8, expected 4"),
        ("general.alignment", 32.0, "general.alignment is of type 6, expected 4"),
        ("general.alignment", np.int32(32), "general.alignment is of type 5, expected 4"),
        ("general.alignment", np.uint64(32), "general.alignment is of type 10, expected 4"),
        ("tokenizer.ggml.tokens", "abc", "tokens are 'abc', expected an array"),
        ("tokenizer.ggml.tokens", ["a", "b", "c", "d"], r"tokens are 4, but its token_embd\.weight has 3 rows"),
        ("tokenizer.ggml.scores", [1.0, 2.0], r"tokens are 3, but its tokenizer\.ggml\.scores 2"),
        ("tokenizer.ggml.token_type", [1, 1, 1, 1], r"tokens are 3, but its tokenizer\.ggml\.token_type 4"),
        ("tokenizer.ggml.bos_token_id", 3, "bos_token_id is 3, but its tokens are 3"),
        ("tokenizer.ggml.padding_token_id", "a", "padding_token_id is 'a', but its tokens are 3"),
    ],
)
def test_metadata_that_its_tensors_or_tokens_contradict_are_refused(tmp_path, key, value, reason):
    """By it, transformers would spend time and memory by such numbers, or fail without a cause."""
    with pytest.raises(StartupError, match=reason):
        check_model(str(save(tmp_path / "model.gguf", VALUES | {key: value})))


@pytest.mark.parametrize("key", ["llama.block_count", "llama.embedding_length", "llama.attention.head_count"])
def test_a_file_without_a_size_is_refused(tmp_path, key):
    """By it, transformers would take the size of another model."""
    with pytest.raises(StartupError, match=f"it has no {key}"):
        check_model(str(save(tmp_path / "model.gguf", {name: VALUES[name] for name in VALUES if name != key})))


def test_a_token_that_is_not_utf8_is_refused(path, tmp_path):
    at = path.read_bytes().index(b"<unk>")
    with pytest.raises(StartupError, match="a string that is not UTF-8"):
        check_model(str(changed(path, tmp_path, at, b"\xff")))


def test_a_file_that_is_cut_short_is_refused_at_every_length(path, tmp_path):
    raw = path.read_bytes()
    other = tmp_path / "cut.gguf"
    last = max(each.start + each.bytes for each in read_header(path).tensors)
    for length in (*range(0, 600, 7), len(raw) // 2, last - 1):
        other.write_bytes(raw[:length])
        with pytest.raises(StartupError, match=r"cut\.gguf"):
            check_model(str(other))


def test_mutated_files_are_read_or_refused_and_never_crash(path, tmp_path):
    chooser = random.Random(0)
    raw = path.read_bytes()
    for _ in range(1000):
        other = bytearray(raw)
        for _ in range(chooser.choice((1, 2, 8))):
            at = chooser.randrange(min(len(other), 700))
            other[at] = chooser.choice((0, 1, 127, 128, 255, chooser.randrange(256)))
        file = tmp_path / "mutant.gguf"
        file.write_bytes(other[: chooser.choice((len(other), chooser.randrange(len(other))))])
        try:
            header = read_header(file)
        except StartupError:
            continue
        assert all(each.start + each.bytes <= file.stat().st_size for each in header.tensors)
