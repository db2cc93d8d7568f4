"""Models that exist by their cards alone."""

from msgspec import structs

from unfuse.core.modalities import MediaLimits
from unfuse.core.model_spec import START_IMAGE, ModelSpec
from unfuse.core.plan import Pipeline
from unfuse.stages.specs import DENOISE, TEXT_ENCODE, VAE_DECODE

PIPELINE = Pipeline(
    (
        structs.replace(TEXT_ENCODE, components=("text_encoder",), outputs=("embeds",), depends_on_params=("prompt",)),
        structs.replace(DENOISE, components=("transformer",), inputs=("embeds",)),
        VAE_DECODE,
    )
)
DEFAULTS = {
    "width": 64,
    "height": 64,
    "num_inference_steps": 4,
    "guidance_scale": 3.0,
    "max_sequence_length": 16,
    "fps": 8,
}
LIMITS = MediaLimits(min_size=32, max_size=128, max_frames=17, max_steps=100, max_prompt_chars=2000)


def card(name: str, *, takes_image: bool = False, limits: MediaLimits = LIMITS) -> ModelSpec:
    """A model of that name, with weights of its own."""
    weights = {part: f"{name.replace('/', '')}{part}"[-32:] for part in ("text_encoder", "transformer", "vae")}
    dtypes = dict.fromkeys(weights, "float32")
    accepts = (START_IMAGE,) if takes_image else ()
    return ModelSpec(
        name, "/nowhere", "test", PIPELINE, structs.asdict(limits), DEFAULTS, weights, dtypes, 7, accepts=accepts
    )


PICTURES, IDLE = card("test/pictures"), card("test/idle")
"""One model with a worker, and one without: what is asked of it stays queued."""

MOVING, STILL = card("test/moving", takes_image=True), card("test/still", limits=MediaLimits(max_size=128))
"""One model that starts from a picture, and makes it the first frame; one that makes no video."""
