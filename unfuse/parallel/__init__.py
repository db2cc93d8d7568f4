"""Parallelism within one forward: tensor, sequence, pipeline, tile and CFG parallel ranks, over torch.distributed."""
