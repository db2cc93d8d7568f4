"""What a compute process tells of its loading."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.worker import outside
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import ConfigError
from unfuse.core.messages import StorageLocations
from unfuse.core.plan import StageSelector, StageSpec
from unfuse.worker.compute import LoadProgress, _load_stages
from unfuse.worker.compute_messages import ComponentLoaded, LoadingStage, LoadModels


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


def test_out_of_memory_in_a_warm_up_names_the_stage_that_is_warmed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stages are loaded before the first one is warmed up."""
    outside.install(monkeypatch)
    source = str(outside.model(tmp_path / "model"))

    def warm_up(stage: object) -> None:
        raise MemoryError("std::bad_alloc")

    family = importlib.import_module("outside_family")
    monkeypatch.setattr(family, "no_torch", lambda: None)  # other tests of this process import torch
    monkeypatch.setattr(family.Turn, "warm_up", warm_up)
    load = LoadModels(
        ((source, source, "auto"),), StageSelector(), ComputeOptions("cpu"), "w", "n", "", b"", StorageLocations("")
    )
    sent = list[Any]()
    channel: Any = SimpleNamespace(send=sent.append)
    with pytest.raises(ConfigError, match=r"^out of memory while warming up stage denoise of .*/model: .* of cpu are"):
        _load_stages(load, channel, None)
    assert [message.stage for message in sent if isinstance(message, LoadingStage)][-1] != "denoise"
