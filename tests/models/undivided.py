"""What diffusers makes undivided: run as a script, in a process that cannot import unfuse.

    python -I undivided.py FOLDER < jobs.json

Builds the tiny models under FOLDER, where they are not yet, then runs each job {name, model, dtype, params} through the
pipeline that the model names and writes FOLDER/NAME.npz: `latents` (as float32; their `dtype` beside) and `pixels`
(frames, height, width, 3; uint8). An `image` among the parameters is a file under FOLDER, a `last_frame` and `mask` are
others, which is transparent where the picture is to change, a `lora` one or several of the adapters under FOLDER/loras,
each with a scale or with `lora_scale`. A job that asks for `blocks` gets, under that name, also the pixels that
diffusers' modular pipeline makes of it.
"""

import inspect
import json
import sys
from pathlib import Path


class NoUnfuse:
    """An import hook: the reference owes nothing to what it is compared with."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "unfuse":
            raise ImportError("the reference must not import unfuse")


sys.meta_path.insert(0, NoUnfuse())
try:
    import unfuse
except ImportError:
    pass
else:
    raise SystemExit(f"unfuse could be imported from {unfuse.__file__}")

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import numpy as np  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402
from diffusers import (  # noqa: E402
    AutoPipelineForImage2Image,
    AutoPipelineForInpainting,
    DiffusionPipeline,
    FirstBlockCacheConfig,
    GGUFQuantizationConfig,
    ModularPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.utils import load_image  # noqa: E402
from PIL import Image, ImageOps  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402


def on_white(picture: Image.Image) -> Image.Image:
    """What is transparent is white, as transformers' processors have it; diffusers would show what is hidden there."""
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")


def pipeline(folder: Path, dtype: str) -> DiffusionPipeline:
    """All in one dtype, but for a VAE that is named."""
    whole, _, vae = dtype.partition(",vae=")
    dtypes = {"default": getattr(torch, whole), "vae": getattr(torch, vae or whole)}
    if files := [*folder.glob("transformer/tuned*")]:
        transformer = single(*files, dtypes["default"])
        pipe = WanPipeline.from_pretrained(folder, torch_dtype=dtypes, transformer=transformer)
    else:
        pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=dtypes)
    pipe.set_progress_bar_config(disable=True)
    decode = pipe.vae.decode  # FluxPipeline does not cast for a VAE of another dtype
    pipe.vae.decode = lambda latents, *given, **options: decode(latents.to(pipe.vae.dtype), *given, **options)
    return pipe


def redrawing(pipe: DiffusionPipeline, masked: bool) -> DiffusionPipeline:
    """The pipeline for image to image or inpainting with the same components.

    It rounds pixels to the dtype of the transformer; a VAE of another dtype is shown those it was given.
    """
    kind = AutoPipelineForInpainting if masked else AutoPipelineForImage2Image
    redraws, given = kind.from_pipe(pipe), []
    redraws.set_progress_bar_config(disable=True)
    if pipe.vae.dtype != (pipe.unet if hasattr(pipe, "unet") else pipe.transformer).dtype:
        pipe.vae.register_to_config(force_upcast=False)  # it would leave the VAE in the dtype of the transformer
    prepare, encode = redraws.image_processor.preprocess, pipe.vae.encode

    def prepared(*arguments, **named):
        given[:] = [prepare(*arguments, **named)]
        return given[0]

    def encoded(pixels):
        shown = given[0] if pixels.dim() == 4 else given[0].unsqueeze(2)
        made = encode(shown.to(pipe.vae.dtype) if pipe.vae.dtype != pixels.dtype else pixels)
        sample = made.latent_dist.sample
        made.latent_dist.sample = lambda generator: sample(generator).to(pixels.dtype)
        return made

    redraws.image_processor.preprocess, redraws.vae.encode = prepared, encoded
    return redraws


def single(file: Path, dtype: torch.dtype) -> WanTransformer3DModel:
    """The transformer, as diffusers loads it from the one file of another tool that a folder has for it."""
    how = {"quantization_config": GGUFQuantizationConfig(compute_dtype=dtype)} if file.suffix == ".gguf" else {}
    return WanTransformer3DModel.from_single_file(str(file), config=str(file.parent), torch_dtype=dtype, **how)


def run(pipe: DiffusionPipeline, params: dict, root: Path) -> dict[str, np.ndarray]:
    kept = {}

    def keep(_pipe, _step, _timestep, tensors):
        kept.update(tensors)
        return {}

    known = inspect.signature(pipe.__call__).parameters
    arguments = {name: value for name, value in params.items() if name in known}
    if "image" in arguments:
        arguments["image"] = load_image(str(root / arguments["image"]), on_white)
    if "image_2" in params:
        names = [name for name in params if name.startswith("image")]
        arguments["image"] = [load_image(str(root / params[name]), on_white) for name in names]
    if "last_frame" in params:
        arguments["last_image"] = load_image(str(root / params["last_frame"]), on_white)
    if "strength" in params:  # some do not stretch a picture
        arguments["image"] = arguments["image"].resize((params["width"], params["height"]), Image.Resampling.LANCZOS)
    if "mask" in params:
        alpha = Image.open(root / params["mask"]).convert("RGBA").getchannel("A")
        arguments["mask_image"] = ImageOps.invert(alpha)

    def make(kind):
        generator = torch.Generator("cpu").manual_seed(params["seed"])
        output = pipe(**arguments, generator=generator, callback_on_step_end=keep, output_type=kind)
        return output.frames if hasattr(output, "frames") else output.images

    if threshold := params.get("feature_cache"):
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    first_given = "image" in arguments and pipe.config.get("expand_timesteps")
    frames = make("pil")[0] if "num_frames" in known else make("pil")
    latents = make("latent") if first_given else kept["latents"]  # a first frame is put in after the last step
    if threshold:
        pipe.transformer.disable_cache()
    return {
        "latents": latents.float().numpy(),
        "dtype": np.array(str(latents.dtype)),
        "pixels": np.stack([np.asarray(frame) for frame in frames]),
    }


def by_blocks(folder: Path, params: dict) -> np.ndarray:
    pipe = ModularPipeline.from_pretrained(str(folder))
    pipe.load_components(torch_dtype=torch.float32)
    scale = params["guidance_scale"]
    if "true_cfg_scale" in params:
        scale = 1.0 if params["negative_prompt"] is None else params["true_cfg_scale"]
    scales = {"guider": scale, "guider_2": params.get("guidance_scale_2") or scale}
    guiders = {name: scales[name] for name in pipe.component_names if name in scales}
    specs = {name: pipe.get_component_spec(name) for name in guiders}
    pipe.update_components(**{name: specs[name].create(guidance_scale=scale) for name, scale in guiders.items()})
    known = {declared.name for declared in pipe.blocks.inputs}
    arguments = {name: value for name, value in params.items() if name in known and value is not None}
    generator = torch.Generator("cpu").manual_seed(params["seed"])
    state = pipe(**arguments, generator=generator, output_type="pil")
    return np.stack([np.asarray(frame) for frame in state.values.get("images") or state.values["videos"][0]])


def adapters(root: Path) -> None:
    """Two a family, as diffusers saves them: one rank, no alpha; several ranks, an alpha. And others."""
    loras, whole = root / "loras", {}
    for kind in ("wan", "flux"):
        tiny.adapter(root / kind, loras, f"{kind}-plain", 1)
        tiny.adapter(root / kind, loras, f"{kind}-alpha", 2, 3, 6.0, to_k=5)
        whole[kind] = load_file(loras / f"{kind}-plain.safetensors")
    tiny.adapter(root / "wan", loras, "wan-small", 3, 1)
    for kind in ("sdxl", "sd3", "z-image", "ltx"):
        tiny.adapter(root / kind, loras, f"{kind}-plain", 4)
    save_file(kohya_xl(load_file(loras / "sdxl-plain.safetensors")), loras / "sdxl-kohya.safetensors")
    words = {"transformer.": "diffusion_model.", "attn1": "self_attn", "attn2": "cross_attn", "to_out.0": "o"}
    words |= {"to_q": "q", "to_k": "k", "to_v": "v", "lora_A": "lora_down", "lora_B": "lora_up"}
    original = {replaced(key, words): tensor for key, tensor in whole["wan"].items()}
    alphas = {key.replace("lora_up.weight", "alpha"): torch.tensor(2.0) for key in original if "lora_up" in key}
    save_file(original | alphas, loras / "wan-original.safetensors")
    layers = sorted({key.partition(".lora_")[0] for key in whole["flux"]})
    alphas = {f"{layer}.alpha": torch.tensor(float(2 + number % 2)) for number, layer in enumerate(layers)}
    save_file(whole["flux"] | alphas, loras / "flux-alphas.safetensors")
    save_file(kohya(whole["flux"]), loras / "flux-kohya.safetensors")


def kohya(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """These of FLUX as kohya's scripts and ComfyUI name them, where queries, keys and values are one layer."""
    made = {}
    for block in {key.split(".")[2] for key in tensors if ".transformer_blocks." in key}:
        layers = f"transformer.transformer_blocks.{block}.attn.to_", f"lora_unet_double_blocks_{block}_img_attn_"
        ups = [tensors[f"{layers[0]}{part}.lora_B.weight"] for part in "qkv"]
        made |= {f"{layers[1]}qkv.lora_down.weight": tensors[f"{layers[0]}q.lora_A.weight"]}
        made |= {f"{layers[1]}qkv.lora_up.weight": torch.cat(ups), f"{layers[1]}qkv.alpha": torch.tensor(3.0)}
        made |= {f"{layers[1]}proj.lora_down.weight": tensors[f"{layers[0]}out.0.lora_A.weight"].clone()}
        made |= {f"{layers[1]}proj.lora_up.weight": tensors[f"{layers[0]}out.0.lora_B.weight"]}
    return made


def kohya_xl(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """These of SDXL as kohya's scripts name them, with an alpha."""
    made = {}
    for key, tensor in tensors.items():
        layer, _, half = key.removesuffix(".weight").rpartition(".")
        name = layer.replace("unet.", "lora_unet_").replace(".", "_")
        made[f"{name}.lora_{'down' if half == 'lora_A' else 'up'}.weight"] = tensor
        made[f"{name}.alpha"] = torch.tensor(2.0)
    return made


def replaced(text: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def build(root: Path) -> None:
    """The tiny models, and adapters for them."""
    for kind in tiny.KINDS:
        tiny.build(kind, root / kind, serving=False)
    adapters(root)
    tiny.tuned(root / "wan", root / "wan-single", original=True)
    tiny.build("wan-even", root / "wan-even", serving=False)
    tiny.tuned(root / "wan-even", root / "wan-gguf", original=True, quantized=True)
    tiny.adapter(root / "wan-even", root / "loras", "even-plain", 1)
    tiny.quantized(root / "wan", root / "wan-int8", "Int8WeightOnlyConfig")
    tiny.quantized(root / "wan", root / "wan-float8", "Float8WeightOnlyConfig", "bfloat16")
    tiny.quantized(root / "flux", root / "flux-int8", "Int8DynamicActivationInt8WeightConfig")


def main() -> None:
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    if not (root / "loras").exists():
        build(root)
    pipes = {}
    for job in json.load(sys.stdin):
        lora, scale = job["params"].get("lora"), job["params"].get("lora_scale")
        key = job["model"], job["dtype"], lora, scale
        if key not in pipes:
            pipes[key] = pipeline(root / job["model"], job["dtype"])
            if lora:
                named = [one.split(":") for one in lora.split(",")]
                for name, *_ in named:
                    pipes[key].load_lora_weights(root / "loras" / f"{name}.safetensors", adapter_name=name)
                scales = [float(own[0]) if own else scale for _, *own in named]
                pipes[key].set_adapters([name for name, *_ in named], scales)
        pipes[key].vae.use_tiling = job["tiled"]
        pipe, encode = pipes[key], pipes[key].vae.encode
        if "strength" in job["params"]:
            pipe = redrawing(pipe, "mask" in job["params"])
        made = run(pipe, job["params"], root)
        pipe.vae.encode = encode
        if job["blocks"]:
            made["blocks"] = by_blocks(root / job["model"], job["params"])
        np.savez(root / f"{job['name']}.npz", **made)
    if "unfuse" in sys.modules:
        raise SystemExit("something imported unfuse")


if __name__ == "__main__":
    main()
