"""What a model may be called, and what a folder is called without saying where it lies."""

from __future__ import annotations

import pytest

from unfuse.core.model_spec import MAX_CHARS, MAX_NAME, PromptVocabulary, is_name, is_path, name_of, without_source


@pytest.mark.parametrize(
    "name", ["flux", "owner/flux", "FLUX.1-dev", "a/b@v1", "_x", "7b", "q:4+1", "a..b", "x" * MAX_NAME]
)
def test_hub_style_model_names_are_valid(name: str) -> None:
    assert is_name(name) and not is_path(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "/models/flux",
        "./flux",
        "../flux",
        "~/flux",
        "~root",
        "a/b/c",
        "a//b",
        "a/",
        "/a",
        "a/../b",
        "a/./b",
        "-x",
        "a b",
        "a\nb",
        "a\n",
        "a\x00",
        "a\\b",
        "C:\\m",
        "a#b=c",
        "é",
        "x" * (MAX_NAME + 1),
        "a/-b",
        "a/.b",
        "%2e",
    ],
)
def test_paths_are_not_valid_model_names(name: str) -> None:
    assert not is_name(name)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("owner/model", "owner/model"),
        ("smollm2", "smollm2"),
        ("owner/model@v1", "owner/model@v1"),
        ("/models/flux", "flux"),
        ("/models/flux/", "flux"),
        ("./flux", "flux"),
        ("../a/flux", "flux"),
        ("~/flux", "flux"),
        ("/models/q.gguf", "q.gguf"),
        ("a/b/c", "c"),
        ("/", "model"),
        ("..", "model"),
        ("~", "model"),
        (".", "model"),
        ("/m/flux#vae=/other/vae", "flux"),
        ("a/b#vae=/other/vae", "a/b"),
        ("/m/a#b", "a#b"),
    ],
)
def test_model_name_is_the_last_part_of_its_path(source: str, name: str) -> None:
    assert name_of(source) == name


def test_model_paths_are_removed_from_client_messages() -> None:
    said = "model /srv/my models/flux: vae is damaged, see '/etc/x/y' and /srv/other/z"
    assert without_source(said, "/srv/my models/flux", "flux") == ("model flux: vae is damaged, see '…/y' and …/z")
    assert without_source("model '/m/flux': see /m/flux/vae", "/m/flux", "flux") == "model 'flux': see flux/vae"
    said = "model /srv/work: model_index.json cannot be read"
    for source in (".", "..", "/"):
        assert without_source(said, source, "mine") == "model …/work: model_index.json cannot be read"
    assert without_source("a model a/b is gated", "a", "x") == "a model a/b is gated", "a hub name is no secret"


FEW = PromptVocabulary(("a", "Red", "circle", "café"), "circles")


@pytest.mark.parametrize("prompt", ["a red circle", "A RED, circle!", "", "  \n", "red_circle", "a cafe\u0301"])
def test_prompt_of_known_words_has_no_hint(prompt: str) -> None:
    assert FEW.hint("me/shapes", prompt) == ""


def test_hint_lists_each_unknown_word_once_and_the_model_subject() -> None:
    said = FEW.hint("me/shapes", "a spaceship over a red city, a Spaceship")
    assert said == "me/shapes was not trained on spaceship, over, city: it generates circles"


def test_hint_is_short_and_has_no_control_characters() -> None:
    long = "\x1b[2J " + "x" * 1000 + " " + " ".join(f"w{number}" for number in range(20)) + "\n\r\u202e"
    said = FEW.hint("me/shapes", long)
    assert said.endswith(" and 17 more: it generates circles")
    assert "x" * MAX_CHARS in said and "x" * (MAX_CHARS + 1) not in said
    assert said.isprintable()
