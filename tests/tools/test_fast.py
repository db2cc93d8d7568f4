"""Faster steps are the same steps: the library's own optimizer and attention judge them."""

import torch
import torch.nn.functional as F

from tools.shapes.fast import StackedMuon, half_precision

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


def test_matrices_stacked_by_shape_go_where_each_alone_goes() -> None:
    (stacked, kept), (alone, theirs) = after_steps(StackedMuon), after_steps(torch.optim.Muon)
    for ours, judged in zip(stacked, alone, strict=True):
        torch.testing.assert_close(ours, judged, atol=2e-3, rtol=0)
    assert kept.keys() == theirs.keys()
    for index, state in theirs.items():
        torch.testing.assert_close(kept[index], state)


def test_half_precision_attends_as_the_library_does_and_leaves_it_in_place() -> None:
    fused = F.scaled_dot_product_attention
    query, key, value = torch.randn(3, 2, 4, 16, 8, generator=torch.Generator().manual_seed(0))
    with half_precision():
        near = F.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=None)
    assert F.scaled_dot_product_attention is fused
    torch.testing.assert_close(near.float(), fused(query, key, value), atol=0.03, rtol=0)
