"""Attention and RotaryEmbedding of ONNX files: values and gradients are PyTorch's, in every cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import helper

from tests.kit import lowered
from tests.kit.one_node import OneNode, check

RANDOM = np.random.default_rng(0)
Q, K, V = (RANDOM.normal(size=(2, heads, length, 4)) for heads, length in ((4, 5), (2, 6), (2, 6)))
FLAT = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(2, x.shape[2], -1) for x in (Q, K, V)]
BIAS = RANDOM.normal(size=(4, 5, 6))
SEEN = RANDOM.uniform(size=(2, 1, 5, 6)) > 0.4
SEEN[0, 0, 1] = False
CAUSAL = torch.ones(5, 6, dtype=torch.bool).tril()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
    """PyTorch's; where a query sees no key, the result is 0."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **more)


def flat(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same for heads that lie side by side."""
    q, k, v = (x.unflatten(2, (heads, 4)).transpose(1, 2) for x, heads in ((q, 4), (k, 2), (v, 2)))
    return attention(q, k, v, attn_mask=CAUSAL).transpose(1, 2).flatten(2)


def capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = 0.3 * q @ k.repeat_interleave(2, 1).transpose(2, 3)
    return (2 * torch.tanh(scores / 2)).softmax(3) @ v.repeat_interleave(2, 1)


def turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Pairs as complex numbers, times those of the angles."""
    pairs = torch.view_as_complex(x.unflatten(3, (2, 2)).transpose(3, 4).contiguous())
    made = pairs * torch.complex(cosine, sine)[:, None]
    return torch.view_as_real(made).transpose(3, 4).flatten(3)


ANGLES = RANDOM.normal(size=(2, 5, 2))
CASES = [
    OneNode("Attention", attention, [Q, K, V]),
    OneNode("Attention", lambda q, k, v: attention(q, k, v, attn_mask=CAUSAL), [Q, K, V], {"is_causal": 1}),
    OneNode("Attention", lambda q, k, v, m: attention(q, k, v, attn_mask=m), [Q, K, V, BIAS]),
    OneNode("Attention", lambda q, k, v: attention(q, k, v, attn_mask=torch.tensor(SEEN)), [Q, K, V, SEEN]),
    OneNode("Attention", capped, [Q, K, V], {"softcap": 2.0, "scale": 0.3}),
    OneNode("Attention", flat, FLAT, {"is_causal": 1, "q_num_heads": 4, "kv_num_heads": 2}),
    OneNode("RotaryEmbedding", turned, [Q, np.cos(ANGLES), np.sin(ANGLES)]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_pytorchs_in_every_cut(case: OneNode, tmp_path: Path) -> None:
    check(case, tmp_path)


def test_queries_of_an_image_are_counted_row_by_row(tmp_path: Path) -> None:
    """A band counts along the axis of queries, so that this is not cut as rows and columns are."""
    inputs = {"x": RANDOM.normal(size=(1, 3, 4, 2))}
    nodes = [
        helper.make_node("Tanh", ["x"], ["image"], name="tanh"),
        helper.make_node("Reshape", ["image", "flat"], ["q"], name="flatten"),
        helper.make_node("Attention", ["q", "q", "q"], ["made"], name="attend", is_causal=1),
        helper.make_node("Reshape", ["made", "square"], ["back"], name="square_again"),
        helper.make_node("Add", ["image", "back"], ["y"], name="add"),
    ]
    sizes = {"flat": np.array([1, 1, 12, 2]), "square": np.array([1, 3, 4, 2])}

    def formula(x: torch.Tensor) -> torch.Tensor:
        image = torch.tanh(x)
        q = image.reshape(1, 1, 12, 2)
        return image + F.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(image.shape)

    lowered.check(lowered.model_of(nodes, inputs, ["y"], sizes, opset=23), inputs, formula, tmp_path)
