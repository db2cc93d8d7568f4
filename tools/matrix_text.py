"""The texts of docs/reference/matrix.md, which `tools/matrix.py` writes."""

HEAD = """\
# Supported features

This page shows which features work with which model family, and which test proves it. Read it before you combine
a family with a feature. The page is written by `python -m tools.matrix` from the code and the tests.

| cell | meaning |
|---|---|
| ✓ 3 | A test runs the family's real classes with this feature and checks the result. The table below the \
features has the test of each number. |
| ✓ 3* | The test runs nightly only. |
| ✓ 3† | The test needs a GPU. It ran on the H100 (`bench/results/gpu-h100.json`), and is in no regular run. |
| never ran | The code accepts the combination, but no test runs it. It may work. |
| no | The model or unfuse does not have the feature. |

The tests ran on CPUs, with tiny models of random weights. Only `unfuse/shapes` has trained weights, and
SmolLM2, a Llama, in the nightly tests of `tests/integration/test_smollm2.py`. A test proves that the numbers agree
with diffusers or transformers. It does not prove that a model of full size fits a GPU or is fast. One H100 ran
for some minutes ([on a GPU](performance/gpu.md)). A name in brackets, such as `[flux-wide]`, is one run of a test
with these parameters."""

INTRODUCTIONS = {
    "Inputs": """\
What a request can have besides its parameters ([input pictures](../guides/input-pictures.md)). A start picture
begins a result, redrawing changes a picture, and a reference picture only guides. "Other pipelines" are served
[undivided](../guides/other-pipelines.md). Their cells hold for the classes in brackets, which
`tools/tiny_whole.py` builds. An input that a model does not have is refused with an error.""",
    "Outputs": """\
All models for pictures return PNG, JPEG and WebP. A video can be read [while it is decoded](../guides/videos.md)
if the VAE decodes one latent frame after the other. Other videos can be read when they are complete.""",
    "Execution": """\
"Stage by stage" means that each stage was loaded alone, and that all stages together make what the undivided
pipeline makes. "Served" means the same through `unfuse serve`. "A worker for each stage" means that stages of one
request ran in different workers. In continuous batching, requests start and end between the steps of others.
FLUX.2 klein and Krea 2 denoise in one step, so they have no checkpoints: an interrupted request starts again. So
does one of another pipeline.""",
    "Weight files": """\
"Single file" and GGUF mean a denoiser in the layout of another tool ([model files](../guides/model-files.md)).
torchao means weights that [torchao](../guides/quantization.md) has quantized. "LoRA" means
[adapters](../guides/adapters.md) in the layout of diffusers, and "LoRA of other tools" those of kohya, ComfyUI or
the model's makers.""",
    "Memory and acceleration": """\
[Offload](../guides/devices.md) needs a GPU. The tests of offload compare with a CPU in its place, or on a pretended
GPU, which computes on the CPU. On the H100, offload ran with FLUX of real width and few blocks. The
[feature cache](../guides/caches.md) needs
`--batching batched`. In Stable Diffusion 3 and XL and Z-Image the transformer does not support it, and such a
request fails.
FLUX.2 klein, Krea 2 and other pipelines do not read the parameter.""",
    "Several devices": """\
Kinds of [parallelism](../guides/parallelism.md). All tests ran with two processes on CPUs, never with several
GPUs. `ulysses` and `ring` are for Stable Diffusion 3, but not for 3.5 medium. `tensor` splits the denoiser, and
`tensor` of encoders the text encoders. A kind that a model does not have is refused at the start.""",
    "Language models: execution": """\
How chats run ([chats](../guides/chats.md)). The tests compare tokens with those of `generate` of transformers.
"Prefill and decode apart" names the test with workers for each if there is one, and else a test of both stages in
one process.""",
    "Language models: features": """\
Parameters and inputs of chats. Structured outputs, tool calls and reasoning do not depend on the family. They ran
with a Llama. Quantized weights of torchao are refused for language models.""",
}

PARSERS = """\
Parsers of [tool calls and reasoning](../guides/tool-calls.md). "Served" means that a small Llama wrote such text
and a client got the parsed answer. "Read alone" means that the parser read the text in a test
(`tests/language/test_tool_calls.py`). "Required calls" means that a grammar enforced calls in this format, and
the parser read them (`tests/language/test_grammars.py`). Served tool calls are in
`tests/answers/test_tool_calls.py`, and reasoning in `tests/answers/test_reasoning.py`. All of them run by day."""

HARDWARE = """\
Every ✓ above ran on CPUs, except those with †. The column of the GPU names the tiny models that ran on one NVIDIA
H100. There, all stages were compared with the CPU (`bench/results/gpu-h100.json`). Pictures and videos had the
same bytes in a second run. A served model with exact batches ran there for FLUX.1, Wan 2.1, HunyuanVideo and
Qwen-Image. Nothing ran on several GPUs, AMD, Intel or Apple devices."""
