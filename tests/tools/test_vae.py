"""What the autoencoder of the built-in model is trained on."""

import numpy as np
import pytest

from tools.shapes import scenes
from tools.shapes.vae import MIX, MIX_OF_DECODER, batch_of

IMAGES, CLIPS = scenes.pictures("single", 3, seed=1)[0], scenes.clips(2, seed=2)[0]


@pytest.mark.parametrize(
    ("kind", "count", "frames", "side"),
    [
        ("crops", 32, 1, 64),
        ("pictures", 8, 1, 128),
        ("short crops of clips", 4, 5, 64),
        ("crops of clips", 4, 9, 64),
        ("clips", 1, 9, 128),
    ],
)
def test_vae_training_batch_has_the_shape_of_its_kind(kind: str, count: int, frames: int, side: int) -> None:
    assert batch_of(np.random.default_rng(0), {kind: 1}, IMAGES, CLIPS).shape == (count, 3, frames, side, side)


def test_vae_training_batches_are_drawn_by_weight() -> None:
    for mix in (MIX, MIX_OF_DECODER):
        rng = np.random.default_rng(3)
        clips = sum(batch_of(rng, mix, IMAGES, CLIPS).shape[2] > 1 for _ in range(120))
        expected = sum(weight for kind, weight in mix.items() if "clips" in kind) / sum(mix.values())
        assert abs(clips / 120 - expected) < 0.1
