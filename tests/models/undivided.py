"""What diffusers makes undivided: run as a script, in a process that cannot import unfuse.

    python -I undivided.py FOLDER < jobs.json

Builds the tiny models under FOLDER, then runs each job {name, model, dtype, params} through the pipeline that the model
names and writes FOLDER/NAME.npz: `latents` (as float32; their `dtype` beside) and `pixels` (frames, height, width, 3;
uint8). An `image` among the parameters is a file under FOLDER. A job that asks for `blocks` gets, under that name, also
the pixels that diffusers' modular pipeline makes of it: a second opinion.
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

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402
from diffusers import DiffusionPipeline, FirstBlockCacheConfig, ModularPipeline  # noqa: E402
from diffusers.utils import load_image  # noqa: E402


def pipeline(folder: Path, dtype: str) -> DiffusionPipeline:
    """All in one dtype but the VAE, which is float32 unless named: as its makers advise, and as unfuse has it."""
    whole, _, vae = dtype.partition(",vae=")
    dtypes = {"default": getattr(torch, whole), "vae": getattr(torch, vae or "float32")}
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=dtypes)
    pipe.set_progress_bar_config(disable=True)
    decode = pipe.vae.decode  # FluxPipeline does not cast for a VAE of another dtype
    pipe.vae.decode = lambda latents, **options: decode(latents.to(pipe.vae.dtype), **options)
    return pipe


def run(pipe: DiffusionPipeline, params: dict, root: Path) -> dict[str, np.ndarray]:
    kept = {}

    def keep(_pipe, _step, _timestep, tensors):
        kept.update(tensors)
        return {}

    known = inspect.signature(pipe.__call__).parameters
    arguments = {name: value for name, value in params.items() if name in known}
    if "image" in arguments:
        arguments["image"] = load_image(str(root / arguments["image"]))

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


def main() -> None:
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    for kind in tiny.KINDS:
        tiny.build(kind, root / kind, serving=False)
    pipes = {}
    for job in json.load(sys.stdin):
        key = job["model"], job["dtype"]
        pipes[key] = pipes.get(key) or pipeline(root / job["model"], job["dtype"])
        made = run(pipes[key], job["params"], root)
        if job["blocks"]:
            made["blocks"] = by_blocks(root / job["model"], job["params"])
        np.savez(root / f"{job['name']}.npz", **made)
    if "unfuse" in sys.modules:
        raise SystemExit("something imported unfuse")


if __name__ == "__main__":
    main()
