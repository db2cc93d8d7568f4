"""What diffusers makes undivided: run as a script, in a process that cannot import unfuse.

    python -I undivided.py FOLDER < jobs.json

Builds tiny models of random weights under FOLDER, then runs each job {name, model, dtype, params} through WanPipeline
and writes FOLDER/NAME.npz: `latents` (as float32; their `dtype` beside) and `pixels` (frames, height, width, 3; uint8).
"""

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

import numpy as np  # noqa: E402
import torch  # noqa: E402
from diffusers import (  # noqa: E402
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel  # noqa: E402

TEXT_DIM = 32
CHANNELS = 4
SCHEDULERS = {
    "unipc": lambda: UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    "euler": lambda: FlowMatchEulerDiscreteScheduler(shift=5.0),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that any two texts differ."""
    words = ["<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    found = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [], unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def build(root: Path) -> None:
    """Two models with the same weights and different noise schedulers. Scale factors are not the usual 8 and 4."""
    torch.manual_seed(0)
    words = tokenizer()
    encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=len(words), d_model=TEXT_DIM, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    )
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=32,
    )
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, False],
        latents_mean=[0.1, -0.3, 0.7, 0.0],
        latents_std=[1.7, 2.3, 0.9, 3.1],
        scale_factor_spatial=4,
        scale_factor_temporal=2,
    )
    with torch.no_grad():  # random weights hardly listen to the text
        transformer.condition_embedder.text_embedder.linear_2.weight.mul_(20)
        for block in transformer.blocks:
            block.attn2.to_out[0].weight.mul_(5)
        transformer.proj_out.weight.mul_(5)
    for name, scheduler in SCHEDULERS.items():
        pipe = WanPipeline(words, encoder.eval(), vae.eval(), scheduler(), transformer.eval())
        pipe.save_pretrained(root / name)


def pipeline(folder: Path, dtype: str) -> WanPipeline:
    vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae", torch_dtype=torch.float32)
    pipe = WanPipeline.from_pretrained(folder, vae=vae, torch_dtype=getattr(torch, dtype))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(pipe: WanPipeline, params: dict) -> dict[str, np.ndarray]:
    kept = {}

    def keep(_pipe, _step, _timestep, tensors):
        kept.update(tensors)
        return {}

    arguments = {name: value for name, value in params.items() if name != "seed"}
    generator = torch.Generator("cpu").manual_seed(params["seed"])
    frames = pipe(**arguments, generator=generator, callback_on_step_end=keep, output_type="pil").frames[0]
    latents = kept["latents"]
    return {
        "latents": latents.float().numpy(),
        "dtype": np.array(str(latents.dtype)),
        "pixels": np.stack([np.asarray(frame) for frame in frames]),
    }


def main() -> None:
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    build(root)
    pipes = {}
    for job in json.load(sys.stdin):
        key = job["model"], job["dtype"]
        pipes[key] = pipes.get(key) or pipeline(root / job["model"], job["dtype"])
        np.savez(root / f"{job['name']}.npz", **run(pipes[key], job["params"]))
    if "unfuse" in sys.modules:
        raise SystemExit("something imported unfuse")


if __name__ == "__main__":
    main()
