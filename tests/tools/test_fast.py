"""Faster steps are the same steps: the library's own optimizer and attention judge them."""

import pytest
import torch
import torch.nn.functional as F

from tools.shapes.dit import Denoiser
from tools.shapes.fast import StackedMuon, half_precision
from tools.shapes.words import make_tokenizer

SHAPES = ((12, 12), (24, 12), (12, 24), (12, 12))


def after_steps(kind: type[torch.optim.Muon]) -> tuple[list[torch.Tensor], dict[int, dict[str, torch.Tensor]]]:
    """Matrices after three steps with the same gradients, one matrix without any; and the optimizer's state."""
    drawn = torch.Generator().manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(shape, generator=drawn)) for shape in (*SHAPES, (8, 8))]
    optimizer = kind(matrices, lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for matrix in matrices[:-1]:
            matrix.grad = torch.randn(matrix.shape, generator=drawn)
        optimizer.step()
    return [matrix.detach() for matrix in matrices], optimizer.state_dict()["state"]


def test_stacked_muon_equals_torch_muon() -> None:
    (stacked, kept), (alone, theirs) = after_steps(StackedMuon), after_steps(torch.optim.Muon)
    for ours, judged in zip(stacked, alone, strict=True):
        torch.testing.assert_close(ours, judged, atol=2e-3, rtol=0)
    assert kept.keys() == theirs.keys()
    for index, state in theirs.items():
        torch.testing.assert_close(kept[index], state)


@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("biased", [False, True])
def test_half_precision_attention_is_close_to_fused_and_restored(biased: bool, scale: float | None) -> None:
    fused = F.scaled_dot_product_attention
    drawn = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 16, 8, generator=drawn)
    bias = 3 * torch.randn(2, 1, 16, 16, generator=drawn) if biased else None
    with half_precision():
        near = F.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=bias, scale=scale)
    assert F.scaled_dot_product_attention is fused
    torch.testing.assert_close(near.float(), fused(query, key, value, bias, scale=scale), atol=0.05, rtol=0)


@pytest.mark.parametrize("asked", [{"is_causal": True}, {"dropout_p": 0.1}, {"attn_mask": torch.ones(16, 16).bool()}])
def test_half_precision_attention_rejects_unknown_arguments(asked: dict[str, object]) -> None:
    with half_precision(), pytest.raises(NotImplementedError, match="fused"):
        F.scaled_dot_product_attention(*torch.randn(3, 2, 4, 16, 8), **asked)


def test_half_precision_text_encoding_is_close_to_full_precision() -> None:
    torch.manual_seed(0)
    encoder, tokenizer = Denoiser().text_encoder, make_tokenizer()
    said = tokenizer(["a red ring left of a blue star", "a blue ring left of a red star"], return_tensors="pt")
    with torch.no_grad():
        exact = encoder(**said).last_hidden_state
        with half_precision():
            near = encoder(**said).last_hidden_state
    torch.testing.assert_close(near, exact, atol=0.05, rtol=0)
