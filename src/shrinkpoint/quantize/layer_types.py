"""Infers the layer type of a weight from its module or its name.

Layer types differ in how much quantization error they tolerate (arXiv 2306.11800, partitioning)."""

from __future__ import annotations

import re

from torch import Tensor, nn

EMBEDDING, CONVOLUTION, ATTENTION, LINEAR, HEAD = "embedding", "convolution", "attention", "linear", "head"

_NAME_PATTERNS = [
    (EMBEDDING, re.compile(r"embed|(^|[^a-z])(wte|wpe|emb|token|tokens|position|positions)([^a-z]|$)")),
    (HEAD, re.compile(r"(^|[^a-z])(head|lm_head|classifier|score|logits|fc_out)([^a-z]|$)")),
    (
        ATTENTION,
        re.compile(r"attn|attention|qkv|(^|[^a-z])([qkvo]_proj|wq|wk|wv|wo|in_proj|query|key|value)([^a-z]|$)"),
    ),
]


def layer_type_from_name(name: str, dims: int) -> str:
    """Return the likely layer type of a weight with `dims` axes.

    >>> layer_type_from_name("model/blocks.0.qkv.weight", 2), layer_type_from_name("model/wte.weight", 2)
    ('attention', 'embedding')
    """
    if dims > 2:
        return CONVOLUTION
    lower = name.lower()
    return next((kind for kind, words in _NAME_PATTERNS if words.search(lower)), LINEAR)


def layer_types_of_model(model: nn.Module) -> dict[str, str]:
    """Return the layer type of each parameter whose module determines it, by its name in the model.

    A tied parameter is an embedding if it is one anywhere. A linear layer is never an embedding, whatever its name.
    """
    out: dict[str, str] = {}
    embeddings: set[Tensor] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(path, recurse=isinstance(module, nn.MultiheadAttention)):
            kind = _layer_type_of(module, name, parameter)
            if kind is not None:
                out.setdefault(name, kind)  # the outer module decides
            if kind == EMBEDDING:
                embeddings.add(parameter)
    tied = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter in embeddings]
    return out | dict.fromkeys(tied, EMBEDDING)


def _layer_type_of(module: nn.Module, name: str, parameter: Tensor) -> str | None:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return EMBEDDING
    if isinstance(module, nn.MultiheadAttention):
        return ATTENTION
    if isinstance(module, nn.modules.conv._ConvNd):
        return CONVOLUTION
    if isinstance(module, nn.Linear):
        kind = layer_type_from_name(name, parameter.dim())
        return LINEAR if kind == EMBEDDING else kind
    return None
