"""Tensors to a safetensors file and back, with a checksum of every byte.

Format: safetensors (Hugging Face): 8 bytes of header length, a JSON header, then the data. Files are read by that
library. They are written here because it copies each tensor first, holding the interpreter's lock: with layers of
gigabytes, training would stand still. Here bytes go from the arena to the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from megatrain.checkpoint.direct import DirectFile

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHUNK_BYTES = 16 << 20
FILE_MODE = 0o600


@dataclass(frozen=True)
class FileNote:
    """What a file must be: its length and the XXH3 checksum (128 bits) of its bytes."""

    nbytes: int
    checksum: str


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> FileNote:
    """Write contiguous CPU tensors; returns once the bytes are on the disk."""
    return write_file(path, _chunks(tensors, metadata))


def write_file(path: Path, chunks: Iterable[memoryview]) -> FileNote:
    """Write a new file; returns once the bytes are on the disk."""
    digest, nbytes = _digest(), 0
    with DirectFile(path, FILE_MODE) as file:
        for chunk in chunks:
            digest.update(chunk)
            nbytes += len(chunk)
            file.write(chunk)
        file.finish()
    return FileNote(nbytes, digest.hexdigest())


def read_shard(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def note_of(path: Path) -> FileNote:
    """Read a file through, to compare it with what it must be."""
    digest, nbytes = _digest(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            nbytes += len(chunk)
    return FileNote(nbytes, digest.hexdigest())


def _digest() -> xxhash.xxh3_128:
    """Against disks and cables, not against forgers: at memory speed, or it would take training's cores."""
    return xxhash.xxh3_128()


def _chunks(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]
