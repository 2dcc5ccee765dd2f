"""Read GGUF files: header, tensors as fp32 NumPy arrays, and the byte-level tokenizer inside.

Reads what small Llama files use (F32, F16, Q4_0, Q4_1, Q8_0) with NumPy alone; https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
defines the format. Anything else is refused by name.
"""

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from funcspec.errors import ModelError, refuse

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BLOCKS: Mapping[int, tuple[str, int, int]] = MappingProxyType(
    {0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}
)
"""Tensor types that can be read: number in the file to (name, values in a block, bytes in a block)."""

_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_CONTROL_TOKEN = 3


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies.

    Attributes:
        shape: outermost dimension first.
        kind: number of its type, a key of `BLOCKS`.
        offset: first byte in the file.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GGUF:
    """An opened file: metadata and a directory of tensors, which are read when asked for."""

    path: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def array(self, name: str) -> np.ndarray:
        """Read one tensor.

        Args:
            name: its name in the file.

        Returns:
            fp32 array of the tensor's shape.

        Raises:
            ModelError: the file has no such tensor, or one of a type that cannot be read, or it ends early.
        """
        if name not in self.tensors:
            refuse("name", "a tensor of the file", repr(name), f"look at the names in {self.path}", ModelError)
        tensor = self.tensors[name]
        if tensor.kind not in BLOCKS:
            kinds = ", ".join(kind for kind, _, _ in BLOCKS.values())
            refuse(
                "path", f"tensors of types {kinds}", f"type number {tensor.kind} for {name}", "convert the file to Q8_0 or F16", ModelError
            )
        _, values, size = BLOCKS[tensor.kind]
        count = int(np.prod(tensor.shape)) // values * size
        if tensor.offset + count > os.path.getsize(self.path):
            refuse(
                "path",
                f"a whole file, with {tensor.offset + count} bytes for {name}",
                os.path.getsize(self.path),
                "fetch the file again",
                ModelError,
            )
        raw = np.memmap(self.path, np.uint8, "r", tensor.offset, (count,))
        return dequantise(raw, tensor.kind).reshape(tensor.shape)


def dequantise(raw: np.ndarray, kind: int) -> np.ndarray:
    """Turn the bytes of a tensor into numbers.

    Args:
        raw: flat uint8 array of whole blocks.
        kind: number of the type, a key of `BLOCKS`.

    Returns:
        flat fp32 array.
    """
    name, values, size = BLOCKS[kind]
    if name == "F32":
        return raw.view("<f4").astype(np.float32)
    if name == "F16":
        return raw.view("<f2").astype(np.float32)
    blocks = raw.reshape(-1, size)
    scale = blocks[:, 0:2].copy().view("<f2").astype(np.float32)
    if name == "Q8_0":
        return (blocks[:, 2:].view(np.int8) * scale).reshape(-1)
    # Four bits a value: the low halves of 16 bytes are the first 16 values of a block, the high halves the others.
    packed = blocks[:, -16:]
    numbers = np.empty((len(blocks), values), np.float32)
    numbers[:, :16] = packed & 15
    numbers[:, 16:] = packed >> 4
    if name == "Q4_0":
        numbers -= 8
        numbers *= scale
    else:
        numbers *= scale
        numbers += blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    return numbers.reshape(-1)


class _Header:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.place = 0

    def number(self, kind: str) -> Any:
        size = int(kind[-1]) if kind != "?" else 1
        code = {
            "<u1": "<B",
            "<i1": "<b",
            "<u2": "<H",
            "<i2": "<h",
            "<u4": "<I",
            "<i4": "<i",
            "<f4": "<f",
            "<u8": "<Q",
            "<i8": "<q",
            "<f8": "<d",
        }
        (value,) = struct.unpack_from(code.get(kind, kind), self.data, self.place)
        self.place += size
        return value

    def text(self) -> str:
        length = self.number("<u8")
        raw = self.data[self.place : self.place + length]
        self.place += length
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        inner, count = self.number("<u4"), self.number("<u8")
        if inner in (_STRING, _ARRAY):
            return tuple(self.value(inner) for _ in range(count))
        array = np.frombuffer(self.data, np.dtype(_SCALARS[inner]), count, self.place).copy()
        self.place += array.nbytes
        return array


def read_gguf(path: str | os.PathLike[str]) -> GGUF:
    """Read the header of a GGUF file, version 2 or 3.

    Args:
        path: the file.

    Returns:
        metadata and a directory of tensors.

    Raises:
        ModelError: not a GGUF file, another version, or a header that ends early.
    """
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            refuse("path", "a GGUF file", str(path), "check what was downloaded", ModelError)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _Header(data)
            try:
                return _read_header(header, str(path))
            except (struct.error, KeyError, ValueError) as error:
                if isinstance(error, ModelError):
                    raise
                raise ModelError(
                    f"path: expected a whole GGUF header, got one that breaks off in {path}. Fix: fetch the file again."
                ) from error


def _read_header(header: _Header, path: str) -> GGUF:
    header.place = 4
    version = header.number("<u4")
    if version not in (2, 3):
        refuse("path", "GGUF version 2 or 3", version, "convert the file with a current tool", ModelError)
    num_tensors, num_values = header.number("<u8"), header.number("<u8")
    metadata = {}
    for _ in range(num_values):
        key = header.text()
        metadata[key] = header.value(header.number("<u4"))
    found = []
    for _ in range(num_tensors):
        name, rank = header.text(), header.number("<u4")
        shape = tuple(header.number("<u8") for _ in range(rank))[::-1]
        found.append((name, shape, header.number("<u4"), header.number("<u8")))
    alignment = int(metadata.get("general.alignment", 32))
    base = -(-header.place // alignment) * alignment
    tensors = {name: GGUFTensor(shape, kind, base + offset) for name, shape, kind, offset in found}
    return GGUF(path, MappingProxyType(metadata), MappingProxyType(tensors))


def gguf_tokenizer(gguf: GGUF) -> "Tokenizer":
    """Build the tokenizer that a file describes. Needs the `tokenizers` package.

    Digits are split one by one before the byte-level split, as this vocabulary was made; leaving that out gives other ids
    where a digit follows a run of blanks.

    Args:
        gguf: an opened file with a "smollm" byte-level BPE.

    Raises:
        ModelError: the file has another kind of tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    metadata = gguf.metadata
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        refuse("gguf", "the 'gpt2' tokenizer with the 'smollm' split", kind, "bring a tokenizer of your own", ModelError)
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [
        AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens(special)
    return tokenizer
