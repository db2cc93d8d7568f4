"""The rows and columns of docs/reference/matrix.md, and the tests that prove its cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: The kind that stands for the built-in model. The other kinds are those of the tiny models in `tools/tiny*.py`.
SHAPES = "shapes"

#: Model families for pictures and videos, by their kinds of tiny models.
MEDIA = {
    "FLUX.1": ("flux", "flux-schnell"),
    "FLUX.1 Kontext": ("kontext",),
    "FLUX.2 klein": ("klein", "klein-distilled"),
    "HunyuanVideo": ("hunyuan-video",),
    "Krea 2": ("krea", "krea-distilled"),
    "LTX-Video": ("ltx", "ltx-timed"),
    "Qwen-Image": ("qwen-image",),
    "Stable Diffusion 3": ("sd3", "sd3-medium"),
    "Stable Diffusion XL": ("sdxl",),
    "Wan 2.1 T2V": ("wan", "wan-euler"),
    "Wan 2.1 I2V": ("wan-image", "wan-image-euler", "wan-image-last"),
    "Wan 2.2 T2V A14B": ("wan-2.2",),
    "Wan 2.2 I2V A14B": ("wan-2.2-image",),
    "Wan 2.2 5B, T2V": ("wan-2.2-5b",),
    "Wan 2.2 5B, I2V": ("wan-2.2-5b-image",),
    "Z-Image": ("z-image",),
    "`unfuse/shapes`": (SHAPES,),
    "Other pipelines": (
        "sd",
        "sd-image",
        "auraflow",
        "cogvideox",
        "klein-kv",
        "ltx-image",
        "lumina2",
        "pixart-alpha",
        "pixart-sigma",
        "sana",
    ),
}

#: Model families for texts.
TEXT = {
    "Llama": ("LlamaForCausalLM",),
    "Qwen2": ("Qwen2ForCausalLM",),
    "Qwen3": ("Qwen3ForCausalLM",),
    "Qwen3 MoE": ("Qwen3MoeForCausalLM",),
    "Qwen2.5-VL": ("Qwen2_5_VL",),
    "Qwen3-VL": ("Qwen3VL",),
    "Qwen3-VL MoE": ("Qwen3VLMoe",),
}
ROWS = MEDIA | TEXT

#: Tiny models that are another one's with other weight files.
COPIES = {
    "wan-single": "wan",
    "wan-even": "wan",
    "wan-gguf": "wan",
    "wan-int8": "wan",
    "wan-float8": "wan",
    "flux-int8": "flux",
}

#: What the source of a test says where it uses a kind without naming it.
BY_ANOTHER_NAME = {
    SHAPES: ("SHAPES", "unfuse/shapes", "serving(", "server: Server"),
    "LlamaForCausalLM": ("make_language_model(", "serve_arguments(", "scripted: Server", "KINDS[0]"),
    "Qwen3MoeForCausalLM": ("KINDS[3]",),
    "Qwen2_5_VL": ("KINDS[0]",),
}


@dataclass(frozen=True)
class Proof:
    """A test that runs a feature with the real classes of some families, and checks what they make."""

    #: File and function.
    test: str
    #: The kinds that the test goes through by itself. Without them, the test's parameters name kinds or jobs.
    kinds: tuple[str, ...] = ()
    #: The jobs of tests/models/conftest.py that the test goes through by itself.
    jobs: str = ""
    #: Ranks: a pattern of the spreads in tests/parallel/test_spreads.py.
    spread: str = ""
    #: A pattern of the parameters that count.
    only: str = ""
    #: Parameters that a job must have, or with "!" must not.
    where: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The path of the test's file."""
        return self.test.partition("::")[0]

    @property
    def function(self) -> str:
        """The name of the test function."""
        return self.test.rpartition("::")[2]


EXACT = "tests/models/test_exact.py::"
SPREADS = "tests/parallel/test_spreads.py::"
FAMILIES = "tests/integration/test_families.py::"
CHAT = "tests/integration/test_chat.py::"
VISION = "tests/integration/test_vision.py::"
LANGUAGE = "tests/models/test_language.py::"
SEEING = "tests/models/test_vision_language.py::"
WHOLE = "tests/integration/test_whole.py::"

#: The same latents and pixels as the undivided pipeline, for each job.
LATENTS = EXACT + "test_latents_and_pixels_equal_the_undivided_diffusers_pipeline"
PIPELINES = Proof(WHOLE + "test_undivided_pipelines_match_diffusers_pixels", kinds=("sd", "auraflow", "cogvideox"))
SEVERAL = "tests/integration/test_pictures_in.py::test_edits_of_several_images_match_diffusers"
FAR = "tests/integration/test_far_pictures.py::test_image_inputs_across_hosts_match_one_host_also_after_crashes"
GPU = "tests/integration/test_gpu.py::test_batched_images_are_byte_identical_also_after_compute_crashes"
OLD_KEYS = "tests/answers/test_adapters.py::test_other_families_load_old_lora_key_names_and_reject_dora"
SLICED = "tests/models/test_loader.py::test_sliced_vae_is_exact_and_tiled_vae_is_approximate"
PRETENDED = "tests/pretend/test_offload.py::test_offloaded_model_on_second_gpu_has_bytes_of_cpu"
OFFLOADED = "tests/weights/test_offload.py::test_offloaded_model_computes_identical_outputs"
RESUMED = "tests/integration/test_resume.py::test_video_resumes_from_checkpoint_on_other_node_after_worker_kill"
SINGLE = "tests/weights/test_single.py::test_single_file_latents_are_identical_to_diffusers"
TILED_IMAGES = "tests/integration/test_tiles.py::test_tile_parallel_images_match_single_rank_vae_tiling"
TILES = "tests/parallel/test_tiles.py::test_two_ranks_share_vae_tiles_and_match_the_undivided_pipeline"
DISCONNECTS = "tests/answers/test_disconnects.py::test_a_request_is_cancelled_when_its_client_disconnects"
RAGGED = LANGUAGE + "test_ragged_prompts_get_the_same_tokens_as_transformers_generate"
IMAGE_CHAT = Proof(SEEING + "test_image_chat_tokens_and_logits_equal_the_undivided_model")
FAR_VISION = "tests/integration/test_far_vision.py::test_vision_chat_across_hosts_matches_the_undivided_model"
RANKS_OF_TEXT = "tests/parallel/test_texts.py::test_two_ranks_generate_the_same_text_and_kv_as_one"


def spread(kind: str) -> tuple[Proof, ...]:
    """The proofs of a kind of parallelism of the denoiser."""
    pattern = rf"{kind}:2"
    return (
        Proof(SPREADS + "test_two_ranks_match_the_undivided_pipeline", spread=pattern),
        Proof(SPREADS + "test_two_ranks_match_the_undivided_pipeline_for_each_parallelism", spread=pattern),
        Proof(SPREADS + "test_two_tensor_parallel_ranks_match_the_undivided_pipeline", spread=pattern),
        Proof(SPREADS + "test_two_ranks_match_the_undivided_pipeline_for_every_job", spread=pattern),
    )


Columns = dict[str, Sequence[Proof]]

INPUTS: Columns = {
    "text": [Proof(LATENTS), PIPELINES],
    "start picture": [
        Proof(LATENTS, where=("image", "!strength", "!last_frame", "!image_2")),
    ],
    "redraw (`strength`)": [
        Proof(LATENTS, where=("strength", "!mask")),
        Proof(WHOLE + "test_undivided_image_to_image_matches_diffusers", kinds=("sd-image",)),
    ],
    "mask": [Proof(LATENTS, where=("mask",))],
    "reference pictures": [
        Proof(LATENTS, where=("image_2",)),
        Proof(SEVERAL, kinds=("klein-kv",)),
    ],
    "last frame": [Proof(LATENTS, where=("last_frame",))],
}

OUTPUTS: Columns = {
    "video": [Proof(LATENTS, where=("frames",)), PIPELINES],
    "video while it is decoded": [
        Proof(
            "tests/integration/test_stream.py::test_frames_are_streamed_before_video_completes_and_match_file",
            kinds=("wan",),
        ),
        Proof("tests/integration/test_carried.py::test_streamed_video_of_two_ranks_matches_one_rank", kinds=(SHAPES,)),
        Proof("tests/models/test_pieces.py::test_interleaved_fragment_decoding_equals_decoding_each_video_whole"),
    ],
    "previews": [
        Proof(EXACT + "test_preview_is_a_jpeg_with_the_requested_width_and_height"),
        Proof("tests/integration/test_carried.py::test_previews_are_emitted_by_ulysses_ranks", kinds=(SHAPES,)),
    ],
}

EXECUTION: Columns = {
    "stage by stage": [Proof(LATENTS)],
    "served": [
        Proof(FAMILIES + "test_images_match_the_undivided_diffusers_pipeline"),
        Proof(FAMILIES + "test_video_frames_match_the_undivided_diffusers_pipeline"),
        Proof(FAMILIES + "test_image_edits_match_the_undivided_diffusers_pipeline", kinds=("kontext",)),
        Proof("tests/integration/test_video.py::test_video_frames_match_undivided_pipeline", kinds=(SHAPES,)),
        PIPELINES,
    ],
    "a worker for each stage": [
        Proof(RESUMED, kinds=(SHAPES,)),
        Proof(FAR, kinds=("flux", "klein", "wan-image-last", "wan-2.2-image")),
        Proof(GPU, only="^split-"),
    ],
    "continuous batching": [
        Proof(EXACT + "test_requests_sharing_a_step_loop_do_not_affect_each_other"),
        Proof(WHOLE + "test_urgent_undivided_request_preempts_and_both_match_solo_runs", kinds=("sd",)),
        Proof(
            "tests/integration/test_step_loop.py::test_urgent_request_preempts_and_preempted_result_is_identical",
            kinds=(SHAPES,),
        ),
    ],
    "exact batches": [
        Proof("tests/models/test_shared_forwards.py::test_exact_batches_are_bitwise_equal_to_single_requests"),
        Proof("tests/models/test_shared_forwards.py::test_exact_batches_are_bitwise_equal_for_every_family"),
    ],
    "batched": [
        Proof(EXACT + "test_batched_results_match_unbatched_within_tolerance"),
        Proof("tests/integration/test_carried.py::test_batched_pool_on_two_ranks_shares_forwards", kinds=(SHAPES,)),
    ],
    "resume from a checkpoint": [
        Proof("tests/models/test_resume.py::test_resume_from_a_checkpoint_after_every_step_is_bit_exact")
    ],
    "cancel": [
        Proof(
            "tests/integration/test_step_loop.py::test_cancelled_request_stops_early_and_frees_memory", kinds=(SHAPES,)
        ),
        Proof(
            "tests/integration/test_stream.py::test_cancel_aborts_video_stream_and_deletes_fragments", kinds=("wan",)
        ),
        Proof("tests/integration/test_redraw.py::test_image_edits_are_streamed_and_can_be_cancelled", kinds=("flux",)),
        Proof(WHOLE + "test_running_undivided_request_is_cancelled_and_others_continue", kinds=("auraflow",)),
    ],
}

WEIGHTS: Columns = {
    "single file": [Proof(SINGLE, only="^single$")],
    "GGUF": [Proof(SINGLE, only="^quantized$")],
    "torchao": [Proof("tests/weights/test_quantized.py::test_torchao_model_outputs_are_identical_to_diffusers")],
    "LoRA": [
        Proof(
            "tests/models/test_lora.py::test_lora_latents_equal_the_undivided_pipeline",
            only="^lora-(plain|alpha|euler|picture|flux|schnell|xl|three|z|ltx|kontext)$",
        ),
        Proof("tests/integration/test_lora.py::test_mixed_lora_load_matches_undivided_diffusers_runs", kinds=(SHAPES,)),
        Proof(WHOLE + "test_lora_applies_only_to_its_own_undivided_request", kinds=("auraflow",)),
    ],
    "LoRA of other tools": [
        Proof(
            "tests/models/test_lora.py::test_lora_latents_equal_the_undivided_pipeline",
            only="^lora-(original|flux-kohya|xl-kohya)$",
        ),
        Proof(OLD_KEYS, kinds=("sdxl", "sd3", "z-image", "flux")),
    ],
    "`--component-source`": [
        Proof(
            "tests/integration/test_component_source.py::test_all_workers_load_a_component_from_component_source",
            kinds=(SHAPES,),
        )
    ],
}

MEMORY: Columns = {
    "`--offload model`": [Proof(OFFLOADED, kinds=(SHAPES,), only="^model$"), Proof(PRETENDED, only="-model$")],
    "`--offload sequential`": [
        Proof(OFFLOADED, kinds=(SHAPES,), only="^sequential$"),
        Proof(PRETENDED, only="-sequential$"),
    ],
    "`--vae sliced`": [Proof(SLICED)],
    "`--vae tiled`": [Proof(SLICED), Proof(TILED_IMAGES, kinds=(SHAPES,))],
    "feature cache": [Proof("tests/models/test_feature_cache.py::test_feature_cache_latents_equal_those_of_diffusers")],
}

RANKS: Columns = {
    "`ulysses`": spread("ulysses"),
    "`ring`": spread("ring"),
    "`cfg`": spread("cfg"),
    "`layers`": spread("layers"),
    "`shard`": spread("shard"),
    "`tensor`": spread("^tensor"),
    "`tensor` of encoders": spread("encoder=tensor"),
    "`tiles`": [
        Proof(TILES, jobs="TILED"),
        Proof(TILED_IMAGES, kinds=(SHAPES,)),
    ],
}

CHATS: Columns = {
    "text": [Proof(RAGGED), IMAGE_CHAT],
    "served": [
        Proof(CHAT + "test_greedy_chat_matches_transformers_generate", kinds=("LlamaForCausalLM",)),
        Proof(CHAT + "test_mixture_of_experts_chat_matches_transformers_generate", kinds=("Qwen3MoeForCausalLM",)),
        Proof(VISION + "test_chats_with_and_without_images_match_undivided_model", kinds=("Qwen2_5_VL",)),
        Proof(FAR_VISION),
    ],
    "prefill and decode apart": [
        Proof(CHAT + "test_greedy_chat_matches_transformers_generate", kinds=("LlamaForCausalLM",), only="^prefill=1"),
        Proof(CHAT + "test_mixture_of_experts_chat_matches_transformers_generate", kinds=("Qwen3MoeForCausalLM",)),
        Proof(
            VISION + "test_chats_with_and_without_images_match_undivided_model", kinds=("Qwen2_5_VL",), only="^split$"
        ),
        Proof(FAR_VISION),
        Proof(RAGGED),
        IMAGE_CHAT,
    ],
    "batched": [Proof(RAGGED, only="-batched$"), IMAGE_CHAT],
    "exact": [
        Proof(LANGUAGE + "test_retry_in_an_exact_pool_has_bitwise_equal_deltas_and_logprobs"),
        IMAGE_CHAT,
    ],
    "chunked prefill": [Proof(RAGGED), IMAGE_CHAT],
    "prefix caching": [
        Proof(
            "tests/integration/test_prefixes.py::test_common_prefix_is_reused_and_the_text_is_unchanged",
            kinds=("LlamaForCausalLM",),
        ),
        Proof(SEEING + "test_prefix_blocks_with_images_are_shared_only_if_images_are_equal"),
    ],
    "resume": [
        Proof(LANGUAGE + "test_new_attempt_resumes_from_recorded_token_deltas"),
        Proof(SEEING + "test_new_attempt_resumes_an_image_chat_from_recorded_deltas"),
    ],
    "cancel": [Proof(DISCONNECTS, kinds=("LlamaForCausalLM",), only="^chat-")],
}

CHAT_FEATURES: Columns = {
    "structured outputs": [
        Proof(
            "tests/integration/test_formats.py::test_json_schema_output_is_valid_greedy_sampled_and_streamed",
            kinds=("LlamaForCausalLM",),
        ),
    ],
    "tool calls": [
        Proof(
            "tests/answers/test_tool_calls.py::test_tool_calls_are_parsed_in_the_format_of_each_model",
            kinds=("LlamaForCausalLM",),
        ),
    ],
    "reasoning": [
        Proof(
            "tests/answers/test_reasoning.py::test_reasoning_content_is_separated_from_content",
            kinds=("LlamaForCausalLM",),
        ),
    ],
    "pictures": [IMAGE_CHAT],
    "videos": [Proof(SEEING + "test_video_chat_tokens_and_logits_equal_the_undivided_model")],
    "GGUF": [
        Proof("tests/weights/test_gguf_model.py::test_unquantized_gguf_has_the_weights_and_logits_of_its_source_model")
    ],
    "`tensor`": [
        Proof(
            RANKS_OF_TEXT,
            only="^float32$",
            kinds=tuple(kind for kinds in TEXT.values() for kind in kinds),
        )
    ],
}

#: Parsers: the values of `--tool-call-parser` and `--reasoning-parser`, by a served model and by the parser alone.
SERVED_CALLS = Proof("tests/answers/test_tool_calls.py::test_tool_calls_are_parsed_in_the_format_of_each_model")
READ_CALLS = Proof("tests/language/test_tool_calls.py::test_tool_calls_are_extracted_from_text")
REQUIRED_CALLS = Proof("tests/language/test_grammars.py::test_required_calls_are_generated_and_parsed_in_each_format")
SERVED_REASONING = Proof("tests/answers/test_reasoning.py::test_reasoning_content_is_separated_from_content")

#: The scripted model of each tool-call parser, and of each reasoning parser (tests/answers/scripts.py).
SCRIPTED_CALLS = {
    "hermes": "pq",
    "llama3_json": "pl",
    "qwen3_coder": "coder",
    "deepseek_v3": "deep",
    "mistral": "mistral",
    "pythonic": "py",
}
SCRIPTED_REASONING = {"qwen3": "think"}

#: The tests that select a reasoning parser by its flag.
SELECTED_REASONING = {
    "deepseek_r1": Proof("tests/answers/test_tool_calls.py::test_parser_flags_select_tool_call_and_reasoning_parsers")
}

#: The tables of pages, by title.
TABLES: dict[str, tuple[dict[str, tuple[str, ...]], Columns]] = {
    "Inputs": (MEDIA, INPUTS),
    "Outputs": (MEDIA, OUTPUTS),
    "Execution": (MEDIA, EXECUTION),
    "Weight files": (MEDIA, WEIGHTS),
    "Memory and acceleration": (MEDIA, MEMORY),
    "Several devices": (MEDIA, RANKS),
    "Language models: execution": (TEXT, CHATS),
    "Language models: features": (TEXT, CHAT_FEATURES),
}


def all_proofs() -> list[Proof]:
    """Return every proof of every table."""
    cells = [proof for _, columns in TABLES.values() for proofs in columns.values() for proof in proofs]
    return [*cells, SERVED_CALLS, READ_CALLS, REQUIRED_CALLS, SERVED_REASONING, *SELECTED_REASONING.values()]
