"""Errors of four-bit messages of values far from mean zero, and of activations and gradients of a model.

    python benchmarks/wire_means.py     # half a minute on one core

Each tensor is encoded by `q4:64`, by `n4:64`, whose levels lie around zero, and by `n4:64` around a bfloat16 mean of
each group, which takes as many bits as `q4:64`. Errors are relative to the root mean square of the tensor, and to the
deviation of its values from the means of groups of 64. Normal values have deviation 1. The model is a transformer of
two layers, trained for 200 steps on text (SHRINKPOINT_DATA/tinyshakespeare). Results: results/wire_means.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shrinkpoint.comm import parse

GROUP, WIDTH, LENGTH, BATCH, STEPS = 64, 128, 64, 16, 200
MEANS = (0.0, 0.5, 1.0, 2.0, 3.0, 10.0, 100.0)


class Block(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), activation, nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.inner(self.norms[1](x))


def normal_tensors() -> dict[str, Tensor]:
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    return {f"normal, mean {mean:g}": values + mean for mean in MEANS}


def model_tensors(text: bytes) -> dict[str, Tensor]:
    """Activations of the first and second block, and gradients, after a training."""
    torch.manual_seed(0)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    blocks = nn.Sequential(Block(nn.ReLU()), Block(nn.GELU()))
    model = nn.Sequential(nn.Embedding(256, WIDTH), blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    kept: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module) -> None:
        def hook(_module: nn.Module, _inputs: object, out: Tensor) -> None:
            kept[name] = out.detach()
            if out.requires_grad:
                out.register_hook(lambda gradient: kept.__setitem__(f"gradient of {name}", gradient))

        module.register_forward_hook(hook)

    named = {"ReLU": blocks[0].inner[1], "GELU": blocks[1].inner[1], "LayerNorm": blocks[1].norms[1]}
    for name, module in {**named, "block": blocks[0]}.items():
        keep(name, module)
    for _ in range(STEPS):
        starts = torch.randint(len(tokens) - LENGTH - 1, (BATCH,))
        rows = torch.stack([tokens[start : start + LENGTH + 1] for start in starts])
        optimizer.zero_grad()
        F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
    gradients = {
        f"gradient of {name}": parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and parameter.grad is not None and ("inner.0" in name or "in_proj" in name)
    }
    return kept | gradients


def around_mean(tensor: Tensor) -> Tensor:
    """What `n4:64` around the bfloat16 mean of each group makes of a tensor."""
    groups = tensor.float().reshape(-1, GROUP)
    means = groups.mean(1, keepdim=True).bfloat16().float()
    compressor, rest = parse(f"n4:{GROUP}"), groups - means
    return (compressor.decode(compressor.encode(rest), torch.empty_like(rest)) + means).view(tensor.shape)


def errors(tensor: Tensor) -> dict[str, dict[str, float]]:
    groups = tensor.float().reshape(-1, GROUP)
    sizes = {"rms": groups.square().mean().sqrt()}
    sizes["deviation"] = (groups - groups.mean(1, keepdim=True)).square().mean().sqrt()
    found = {}
    for spec in (f"q4:{GROUP}", f"n4:{GROUP}"):
        compressor = parse(spec)
        found[spec] = compressor.decode(compressor.encode(tensor), torch.empty_like(tensor))
    found[f"n4:{GROUP} around means"] = around_mean(tensor)
    return {
        name: {of: float((decoded - tensor).square().mean().sqrt() / size) for of, size in sizes.items()}
        for name, decoded in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/wire_means.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = gzip.decompress(Path(os.environ["SHRINKPOINT_DATA"], "tinyshakespeare", "input.txt.gz").read_bytes())
    tensors = normal_tensors() | model_tensors(data)
    rows = {name: errors(tensor.contiguous()) for name, tensor in tensors.items()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"torch": torch.__version__, "group": GROUP, "errors": rows}, indent=1))
    for name, row in rows.items():
        print(f"{name:44}" + "".join(f"  {each['rms']:.3f} ({each['deviation']:.3f})" for each in row.values()))


if __name__ == "__main__":
    main()
