"""The lossless compressors one can install today, each behind the same few methods.

Every rival is called the way its own documentation asks for, told the data type where it has such an option, and given
the values of all tensors of a stream in one piece: the form in which it compresses best, and none of its bytes for
names, shapes or digests count. Where a rival has a delta of its own, that one is used; where it has none, it is given
the XOR with the base, which is what the rivals' own deltas are.

Arrays are float32, or uint16 that holds the bits of bfloat16.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]


def xor(array: Array, base: Array) -> Array:
    """Bitwise difference of two arrays of one dtype, in that dtype again."""
    bits = np.dtype(f"u{array.itemsize}")
    return (array.view(bits) ^ base.view(bits)).view(array.dtype)


class Rival(ABC):
    """One compressor. `prepare` and `finish` are outside every timing, `pack` and `unpack` are what is timed.

    Args:
        threads: how many it may use, where it can be told.
    """

    package: str
    name: str
    own_delta = False
    threaded = False

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.package)

    @abstractmethod
    def prepare(self, array: Array) -> Any:
        """A fresh copy of the input in the form that `pack` wants."""

    @abstractmethod
    def pack(self, prepared: Any) -> bytes: ...

    @abstractmethod
    def unpack(self, packed: bytes) -> Any: ...

    def finish(self, unpacked: Any, dtype: np.dtype[Any]) -> Array:
        return np.frombuffer(unpacked, dtype=dtype)

    def compress(self, array: Array, base: Array | None = None) -> bytes:
        return self.pack(self.prepare(array if base is None else xor(array, base)))

    def decompress(self, packed: bytes, dtype: np.dtype[Any], base: Array | None = None) -> Array:
        array = self.finish(self.unpack(packed), dtype)
        return array if base is None else xor(array, base)

    def checked(self, array: Array, base: Array | None = None) -> int:
        """Bytes that `array` takes, after it has come back bit by bit."""
        packed = self.compress(array, base)
        back = self.decompress(packed, array.dtype, base)
        if back.tobytes() != array.tobytes():
            raise AssertionError(f"{self.name} {self.version} is not lossless on {array.dtype}[{array.size}]")
        return len(packed)


class ZipNN(Rival):
    """IBM's ZipNN. It rotates the bits of its input in place, so it always gets a copy."""

    package = name = "zipnn"
    own_delta = True
    threaded = True

    def prepare(self, array: Array) -> Any:
        self._dtype = "float32" if array.itemsize == 4 else "bfloat16"
        return bytearray(array.tobytes())

    def _coder(self, **more: Any) -> Any:
        import zipnn

        return zipnn.ZipNN(input_format="byte", bytearray_dtype=self._dtype, threads=self.threads, **more)

    def pack(self, prepared: Any) -> bytes:
        return self._coder().compress(prepared)

    def unpack(self, packed: bytes) -> Any:
        return self._coder().decompress(packed)

    def compress(self, array: Array, base: Array | None = None) -> bytes:
        prepared = self.prepare(array)
        if base is None:
            return self.pack(prepared)
        return self._coder(delta_compressed_type="byte").compress(prepared, delta_second_data=base.tobytes())

    def decompress(self, packed: bytes, dtype: np.dtype[Any], base: Array | None = None) -> Array:
        if base is None:
            return self.finish(self.unpack(packed), dtype)
        coder = self._coder(delta_compressed_type="byte")
        return self.finish(coder.decompress(packed, delta_second_data=base.tobytes()), dtype)


class Z4AI(Rival):
    package = name = "z4ai"
    own_delta = True
    threaded = True

    def prepare(self, array: Array) -> Any:
        self._dtype = "fp32" if array.itemsize == 4 else "bf16"
        return array.tobytes()

    def pack(self, prepared: Any) -> bytes:
        import z4ai

        return z4ai.compress(prepared, dtype=self._dtype, threads=self.threads)

    def unpack(self, packed: bytes) -> Any:
        import z4ai

        return z4ai.decompress(packed)

    def compress(self, array: Array, base: Array | None = None) -> bytes:
        import z4ai

        prepared = self.prepare(array)
        if base is None:
            return self.pack(prepared)
        return z4ai.compress_delta(prepared, base.tobytes(), dtype=self._dtype, threads=self.threads)

    def decompress(self, packed: bytes, dtype: np.dtype[Any], base: Array | None = None) -> Array:
        import z4ai

        if base is None:
            return self.finish(self.unpack(packed), dtype)
        return self.finish(z4ai.decompress_delta(packed, base.tobytes()), dtype)


class Pcodec(Rival):
    """pcodec, level 8 (its default). It has no bfloat16, which it sees as 16-bit integers; so it does any XOR, which is
    where it compresses that a little better."""

    package = name = "pcodec"

    def prepare(self, array: Array) -> Any:
        return array.copy()

    def compress(self, array: Array, base: Array | None = None) -> bytes:
        difference = array if base is None else xor(array, base).view(f"u{array.itemsize}")
        return self.pack(self.prepare(difference))

    def pack(self, prepared: Any) -> bytes:
        from pcodec import ChunkConfig, standalone

        return standalone.simple_compress(prepared, ChunkConfig())

    def unpack(self, packed: bytes) -> Any:
        from pcodec import standalone

        return standalone.simple_decompress(packed)

    def finish(self, unpacked: Any, dtype: np.dtype[Any]) -> Array:
        return np.asarray(unpacked).view(dtype)


class Zstd(Rival):
    package, name = "zstandard", "zstd-3"
    threaded = True

    def prepare(self, array: Array) -> Any:
        return array.tobytes()

    def pack(self, prepared: Any) -> bytes:
        import zstandard

        return zstandard.ZstdCompressor(level=3, threads=self.threads if self.threads > 1 else 0).compress(prepared)

    def unpack(self, packed: bytes) -> Any:
        import zstandard

        return zstandard.ZstdDecompressor().decompress(packed)


class Blosc2(Rival):
    """Blosc2 with byte shuffle and zstd level 5."""

    package = name = "blosc2"
    threaded = True

    def prepare(self, array: Array) -> Any:
        return array.copy()

    def pack(self, prepared: Any) -> bytes:
        import blosc2

        parameters = blosc2.CParams(
            typesize=prepared.itemsize,
            codec=blosc2.Codec.ZSTD,
            clevel=5,
            nthreads=self.threads,
            filters=[blosc2.Filter.NOFILTER] * 5 + [blosc2.Filter.SHUFFLE],
            filters_meta=[0] * 6,
        )
        return blosc2.compress2(prepared, cparams=parameters)

    def unpack(self, packed: bytes) -> Any:
        import blosc2

        return blosc2.decompress2(packed, dparams=blosc2.DParams(nthreads=self.threads))


class OpenZL(Rival):
    """Meta's OpenZL with the smallest of three graphs: the float graph with plain or transposed mantissas, and
    transposition alone. Its `Compress` successor, which chooses by itself, came out larger than these on W and m."""

    package = name = "openzl"

    def _graphs(self) -> dict[int, list[Callable[[Any], Any]]]:
        import openzl.ext as zl

        entropy, store = zl.graphs.Entropy, zl.graphs.Store
        nodes = zl.nodes

        def transposed(k: Any) -> Any:
            return nodes.ConvertNumToStructLE()(k, nodes.TransposeSplit()(k, entropy()))

        return {
            4: [
                lambda k: nodes.Float32Deconstruct()(k, store(), entropy()),
                lambda k: nodes.Float32Deconstruct()(k, nodes.TransposeSplit()(k, entropy()), entropy()),
                transposed,
            ],
            2: [
                lambda k: nodes.BFloat16Deconstruct()(k, entropy(), entropy()),
                lambda k: nodes.BFloat16Deconstruct()(k, zl.graphs.Compress(), entropy()),
                transposed,
            ],
        }

    def prepare(self, array: Array) -> Any:
        bits = array.view(np.dtype(f"u{array.itemsize}")).copy()
        sizes = [len(self._run(graph, bits)) for graph in self._graphs()[array.itemsize]]
        # the earlier ones are faster: a later one must be smaller by more than a thousandth
        chosen = next(i for i, size in enumerate(sizes) if size <= min(sizes) * 1.001)
        return self._graphs()[array.itemsize][chosen], bits

    def _run(self, graph: Callable[[Any], Any], bits: Array) -> bytes:
        import openzl.ext as zl

        compressor = zl.Compressor()
        start = graph(compressor)
        compressor.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
        compressor.select_starting_graph(start)
        context = zl.CCtx()
        context.ref_compressor(compressor)
        context.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
        return context.compress([zl.Input(zl.Type.Numeric, bits)])

    def pack(self, prepared: Any) -> bytes:
        return self._run(*prepared)

    def unpack(self, packed: bytes) -> Any:
        import openzl.ext as zl

        return zl.DCtx().decompress(packed)[0].content.as_nparray()

    def finish(self, unpacked: Any, dtype: np.dtype[Any]) -> Array:
        return np.asarray(unpacked).view(dtype)


class TorchDCP(Rival):
    """torch.distributed.checkpoint with its ZStandard extension; only the payload files count, not `.metadata`."""

    package, name = "torch", "dcp-zstd"

    def prepare(self, array: Array) -> Any:
        bits = torch.from_numpy(array.view(np.dtype(f"i{array.itemsize}")).copy())
        return {"values": bits.view(torch.float32 if array.itemsize == 4 else torch.bfloat16)}

    def pack(self, prepared: Any) -> bytes:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._extension import ZStandard

        with tempfile.TemporaryDirectory(dir=_memory()) as folder, _quiet():
            writer = dcp.FileSystemWriter(folder, _extensions=[ZStandard()], sync_files=False)
            dcp.save(prepared, storage_writer=writer, no_dist=True)
            payload = [file.read_bytes() for file in sorted(Path(folder).glob("*.distcp"))]
            assert len(payload) == 1
            self._metadata = (Path(folder) / ".metadata").read_bytes()
            self._empty_tensors = {name: torch.empty_like(t) for name, t in prepared.items()}
            return payload[0]

    def unpack(self, packed: bytes) -> Any:
        import torch.distributed.checkpoint as dcp

        with tempfile.TemporaryDirectory(dir=_memory()) as folder, _quiet():
            (Path(folder) / "__0_0.distcp").write_bytes(packed)
            (Path(folder) / ".metadata").write_bytes(self._metadata)
            dcp.load(self._empty_tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        return self._empty_tensors["values"]

    def finish(self, unpacked: Any, dtype: np.dtype[Any]) -> Array:
        return unpacked.view(torch.int32 if dtype.itemsize == 4 else torch.int16).numpy().view(dtype)


def _memory() -> str | None:
    """A directory in memory where there is one, so that the disk is not what is timed."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


RIVALS: tuple[type[Rival], ...] = (ZipNN, Z4AI, Pcodec, OpenZL, Blosc2, Zstd, TorchDCP)


def installed(threads: int = 1) -> list[Rival]:
    """The rivals of this environment; those that are missing are named on standard output."""
    found: list[Rival] = []
    for kind in RIVALS:
        try:
            rival = kind(threads)
            rival.checked(np.zeros(4096, dtype=np.float32))
        except (ImportError, ValueError) as missing:  # DCP raises the latter without zstandard
            print(f"{kind.name} is not installed ({missing}): pip install 'shrinkpoint[bench]'")
        else:
            found.append(rival)
    return found
