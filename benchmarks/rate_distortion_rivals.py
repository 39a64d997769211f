"""Rivals that want packages of their own: what `rate_distortion.py` runs with the Python that has them (`rivals.txt`).

    python benchmarks/rate_distortion_rivals.py FOLDER

FOLDER has `job.json` (the rival, its settings, names of the tensors) and the weights of each checkpoint, `0.npz`,
`1.npz`, ...; what is decoded is written beside them as `decoded-0.npz`, ..., and a line of JSON is printed for each
checkpoint: its bytes, and the seconds of encoding and decoding. Nothing of shrinkpoint is needed. Each rival gets the
chain in a closed loop: a delta is to what was decoded last.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np

Weights = dict[str, np.ndarray]
Coded = tuple[int, Weights, float, float]
"""Bytes, what is decoded, seconds to encode, seconds to decode."""
RAW_BYTES = 4
"""Of a value that a rival does not code."""


class NNCodec:
    """ISO/IEC 15938-17 by its reference software: DeepCABAC under dependent quantization, all tensors in one bitstream.

    Args:
        qp, nonweight_qp: the step is `2^(qp / 4)`, up to a factor; of matrices and of vectors.
        key_qp: of the first checkpoint; None: `qp`.
        differences: code the difference to what was decoded last, not the weights.
        tca, hdsp: contexts of the last checkpoint's codes; of the history of each weight (differences only).
        others: of `nncodec.nnc.compress`: use_dq, opt_qp, lambda_scale, param_opt.
    """

    def __init__(
        self,
        qp: int,
        nonweight_qp: int = -75,
        key_qp: int | None = None,
        differences: bool = True,
        tca: bool = False,
        hdsp: bool = False,
        **others: Any,
    ) -> None:
        for name in ("", ".transforms", ".transforms.functional", ".datasets", ".models"):
            sys.modules.setdefault(f"torchvision{name}", MagicMock())  # imported for its data sets, and fails to import
        from nncodec import nnc
        from nncodec.nnc_core.hdsp.hdsp_tool import HdspTool

        self._codec, self._differences, self._tca = nnc, differences, tca
        self._history = [HdspTool(True) if hdsp else None for _ in range(2)]
        self._qp, self._key_qp, self._asked = (
            qp,
            qp if key_qp is None else key_qp,
            {"nonweight_qp": nonweight_qp, **others},
        )
        self._bases = [{"parameters": {}, "put_node_depth": {}, "device_id": 0, "parameter_id": {}} for _ in range(2)]

    def code(self, weights: Weights, parent: Weights | None) -> Coded:
        delta = parent if self._differences else None
        given = {name: np.array(x if delta is None else x - delta[name]) for name, x in weights.items()}
        linked = delta is not None or (self._tca and not self._differences)
        settings = {"approx_param_base": self._bases[0], "update_base_param": True} if linked else {}
        began = time.perf_counter()
        stream = self._codec.compress(
            given,
            bitstream_path=None,
            qp=self._key_qp if parent is None else self._qp,
            row_skipping=True,
            tca=self._tca and linked,
            hdsp_tool=self._history[0] if delta is not None else None,
            compress_differences=delta is not None,
            return_bitstream=True,
            **self._asked,
            **settings,
        )
        middle = time.perf_counter()
        settings = {"approx_param_base": self._bases[1], "update_base_param": True} if linked else {}
        tool = self._history[1] if delta is not None else None
        found = self._codec.decompress(stream, hdsp_tool=tool, return_hls=tool is not None, **settings)
        found = found[0] if tool is not None else found
        seconds = time.perf_counter() - middle
        zero = {name: np.zeros_like(x) for name, x in given.items()}  # a tensor without a change is not in the stream
        decoded = {name: found.get(name, zero[name]) + (0 if delta is None else delta[name]) for name in given}
        return len(stream), decoded, middle - began, seconds


class EntroPack:
    """E8 lattice and rANS to a rate that is asked for, in torch's operations on the CPU.

    Matrices of two axes or more, as rows; the rest stays raw.

    Args:
        bits: `target_bpp`.
        key_bits: of the first checkpoint; None: `bits`.
        residuals: of differences to what was decoded last, which is our addition: the package has no deltas.
        others: of `EntroPackLossyConfig`.
    """

    def __init__(self, bits: float, key_bits: float | None = None, residuals: bool = False, **others: Any) -> None:
        import entropack

        self._package, self._residuals = entropack, residuals
        self._configs = [entropack.EntroPackLossyConfig(target_bpp=x, **others) for x in (key_bits or bits, bits)]

    def code(self, weights: Weights, parent: Weights | None) -> Coded:
        import torch

        config, size, seconds, decoded = self._configs[parent is not None], 0, [0.0, 0.0], {}
        for name, value in weights.items():
            base = parent[name] if self._residuals and parent is not None else np.float32(0)
            if value.ndim < 2:
                decoded[name], size = value, size + RAW_BYTES * value.size
                continue
            matrix = torch.from_numpy(value - base).flatten(1)
            began = time.perf_counter()
            coded = self._package.compress(matrix, config)
            middle = time.perf_counter()
            decoded[name] = self._package.decompress(coded, config).view(value.shape).numpy() + base
            seconds = [seconds[0] + middle - began, seconds[1] + time.perf_counter() - middle]
            size += -int(-coded.actual_bpp * value.size // 8)
        return size, decoded, *seconds


class DeltaTensors:
    """deltatensors' files of differences, against what was decoded last; the first checkpoint is raw.

    Args:
        settings: of `save_delta`: strategy and its own.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        import deltatensors

        self._package, self._path, self._settings = deltatensors, folder / "delta.wdelta", settings

    def code(self, weights: Weights, parent: Weights | None) -> Coded:
        if parent is None:
            return RAW_BYTES * sum(x.size for x in weights.values()), weights, 0.0, 0.0
        began = time.perf_counter()
        self._package.save_delta(self._path, weights, parent, **self._settings)
        middle = time.perf_counter()
        decoded = {name: np.asarray(x) for name, x in self._package.load_delta(self._path, parent).items()}
        return self._path.stat().st_size, decoded, middle - began, time.perf_counter() - middle


RIVALS: dict[str, Callable[..., Any]] = {
    "nncodec": lambda folder, **settings: NNCodec(**settings),
    "entropack": lambda folder, **settings: EntroPack(**settings),
    "deltatensors": DeltaTensors,
}


def run(folder: Path) -> Iterator[dict[str, Any]]:
    """All checkpoints of the folder, one after the other."""
    job = json.loads((folder / "job.json").read_text())
    version = importlib.metadata.version(job["rival"])
    rival, parent = RIVALS[job["rival"]](folder, **job["settings"]), None
    for number in range(job["checkpoints"]):
        with np.load(folder / f"{number}.npz") as file:
            weights = {name: file[f"x{place}"] for place, name in enumerate(job["names"])}
        size, parent, encode, decode = rival.code(weights, parent)
        np.savez(folder / f"decoded-{number}.npz", **{f"x{n}": parent[name] for n, name in enumerate(job["names"])})
        yield {"bytes": size, "encode": encode, "decode": decode, "version": version}


def main() -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()):  # what packages print
        rows = list(run(Path(sys.argv[1])))
    print("\n".join(map(json.dumps, rows)))


if __name__ == "__main__":
    main()
