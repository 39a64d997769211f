"""The kind of a layer comes from its module, and where there is none, from its name."""

from __future__ import annotations

import pytest
from torch import nn

from shrinkpoint.quantize.layer_types import (
    ATTENTION,
    CONVOLUTION,
    EMBEDDING,
    HEAD,
    LINEAR,
    layer_type_from_name,
    layer_types_of_model,
)


def test_a_name_tells_the_kind():
    for name, dims, kind in [
        ("transformer.wte.weight", 2, EMBEDDING),
        ("bert.embeddings.word_embeddings.weight", 2, EMBEDDING),
        ("model/embed_tokens.weight", 2, EMBEDDING),
        ("wpe.weight", 2, EMBEDDING),
        ("h.0.attn.c_attn.weight", 2, ATTENTION),
        ("layers.3.self_attn.q_proj.weight", 2, ATTENTION),
        ("encoder.layer.0.attention.self.query.weight", 2, ATTENTION),
        ("blocks.1.wq.weight", 2, ATTENTION),
        ("h.0.mlp.c_fc.weight", 2, LINEAR),
        ("fc1.weight", 2, LINEAR),
        ("keyboard.weight", 2, LINEAR),
        ("lm_head.weight", 2, HEAD),
        ("classifier.weight", 2, HEAD),
        ("ahead.weight", 2, LINEAR),
        ("layer1.0.conv1.weight", 4, CONVOLUTION),
        ("attn.conv.weight", 3, CONVOLUTION),
    ]:
        assert layer_type_from_name(name, dims) == kind


class Model(nn.Module):
    def __init__(self, *, head_first: bool) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(8, 16, bias=False)
        self.words = nn.Embedding(16, 8)
        if not head_first:
            self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight
        self.mixer = nn.MultiheadAttention(8, 2)
        self.conv = nn.Conv1d(8, 8, 3)
        self.token_embedder = nn.Linear(8, 8)
        self.q_proj = nn.Linear(8, 8)
        self.free = nn.Parameter(nn.Linear(8, 8).weight.detach())


@pytest.mark.parametrize("head_first", [False, True])
def test_a_module_tells_it_better_than_a_name(head_first):
    kinds = layer_types_of_model(Model(head_first=head_first))
    assert kinds["words.weight"] == kinds["head.weight"] == EMBEDDING
    assert kinds["mixer.in_proj_weight"] == kinds["mixer.out_proj.weight"] == ATTENTION
    assert kinds["conv.weight"] == CONVOLUTION
    assert kinds["token_embedder.weight"] == LINEAR
    assert kinds["q_proj.weight"] == ATTENTION
    assert "free" not in kinds


def test_a_layer_alone_is_known():
    assert layer_types_of_model(nn.Embedding(4, 4)) == {"weight": EMBEDDING}
