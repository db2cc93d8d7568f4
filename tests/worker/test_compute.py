"""What a compute process tells of its loading."""

from __future__ import annotations

from pathlib import Path

from unfuse.core.plan import StageSpec
from unfuse.worker.compute import LoadProgress
from unfuse.worker.compute_messages import ComponentLoaded, LoadingStage


def test_load_progress_counts_each_component_once_and_ends_at_total(tmp_path: Path) -> None:
    for name, size in (("tokenizer", 10), ("text_encoder", 100), ("vae", 1000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x" * size)
    encode = StageSpec("encode", "text_encode", ("text_encoder", "tokenizer"))
    decode = StageSpec("decode", "vae_decode", ("vae", "tokenizer", "absent"))
    told: list[LoadingStage | ComponentLoaded] = []
    progress = LoadProgress([(encode, tmp_path), (decode, tmp_path)], told.append)

    progress.start_stage("m", encode, tmp_path)
    progress.loaded("tokenizer", 0.5, 7)
    progress.loaded("text_encoder", 1.0, 200)
    progress.start_stage("m", decode, tmp_path)
    progress.loaded("tokenizer", 0.1, 7)
    progress.loaded("vae", 2.0, 2000)
    progress.loaded("never heard of", 2.0, 1)

    assert [message.done for message in told] == [0, 10, 110, 110, 110, 1110, 1110]
    assert {message.total for message in told} == {1110}
    assert told[2] == ComponentLoaded("text_encoder", 1.0, 200, 110, 1110)
