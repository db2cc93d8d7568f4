"""How one forward spreads over the ranks of a worker: a kind a file, over torch.distributed."""
