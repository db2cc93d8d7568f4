"""The text encoder of the built-in model, which learns to read before the transformer learns to draw."""

import logging
from pathlib import Path

import numpy as np
import torch
from transformers import UMT5Config, UMT5EncoderModel

from tools.shapes import scenes
from tools.shapes.checkpoint import Progress, Run, train
from tools.shapes.fast import make_optimizers
from tools.shapes.layout import WordHead, layout
from tools.shapes.words import Wordings, make_tokenizer, things_named

log = logging.getLogger(__name__)

WIDTH = 96
BATCH = {"single": 24, "relation": 80, "motion": 24}
CAPTIONS = 12000  # of each kind
REWORDED = 0.25  # share of captions worded another way
DECAY = 0.4  # share of the budget in which the rate falls


def make_text_encoder() -> UMT5EncoderModel:
    """An untrained one."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(make_tokenizer()),
            d_model=WIDTH,
            d_kv=24,
            d_ff=192,
            num_layers=3,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def read(encoder: UMT5EncoderModel, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, N, 96) embeddings of (B, N) tokens, zero beyond a prompt's end, as the pipeline attends to them."""
    words: torch.Tensor = encoder(tokens, mask).last_hidden_state * mask.unsqueeze(-1)
    return words


def train_text_encoder(path: Path, budget_s: float, seed: int) -> UMT5EncoderModel:
    """Train for `budget_s` seconds of stepping to read layouts, resuming from `path` when it exists."""
    torch.manual_seed(seed)
    encoder, head = make_text_encoder(), WordHead(WIDTH)
    reader = torch.nn.ModuleDict({"encoder": encoder, "head": head})
    optimizers = make_optimizers(reader, encoder.encoder.block)
    progress = Progress(budget_s, decay=DECAY)
    tokenizer = make_tokenizer()
    drawn = {kind: scenes.scenes(kind, CAPTIONS, seed + 40) for kind in BATCH}
    said = {kind: Wordings(tokenizer, shown) for kind, shown in drawn.items()}
    things = {kind: things_named(wordings.tokens) for kind, wordings in said.items()}
    layouts = {kind: torch.tensor([layout(scene) for scene in shown]) for kind, shown in drawn.items()}

    def step(index: int) -> None:
        rng = np.random.default_rng((seed, 40, index))
        progress.set_rates(*optimizers)
        reader.zero_grad()
        loss = torch.zeros(())
        for kind, count in BATCH.items():
            which = rng.integers(len(layouts[kind]), size=count)
            rows = said[kind].vary(which, rng, REWORDED, dropped=0.0)
            words = read(encoder, said[kind].tokens[rows], said[kind].mask[rows])
            loss = loss + head.loss(words, things[kind][rows], layouts[kind][which])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if index % 100 == 0:
            log.info("text encoder step %d, %.0f s, loss %.4f", index, progress.spent_s, loss.item())

    train(Run(path, {"reader": reader}, optimizers), progress, step)
    return encoder.eval().requires_grad_(False)
