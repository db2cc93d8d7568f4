"""What was renamed, removed or added since the recording in recorded_before.json: any other difference is a defect.

A name that a client sees and that changes has one line here. Old names are on the left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Names = Mapping[str, str]


class Renames(NamedTuple):
    """The new name by the old one, of each kind; what is gone or new by kind and name, with the reason."""

    fields: Names
    """Keys of JSON: of answers, events, requests, models, workers and pools."""
    metrics: Names
    """As /metrics has them, those of counters with `_total`."""
    labels: Names
    settings: Names
    """As variables: UNFUSE_SERVE__PORT."""
    flags: Names
    """With their hyphens: --port."""
    values: Names
    """Whole texts: of fields, of labels of metrics, what metrics say of themselves."""
    removed: Mapping[str, Names]
    """Fields by their path within a layout, without the numbers of lists: "requests.*.stages.vae". `*` is any text."""
    added: Mapping[str, Names]


HALVES = "what was the default happens always"
MEASURED = "layouts and ranks are measured by bench/layouts.py and bench/degrees.py"
COUNTED = "one plan says how many workers there are of each role: --workers encoder=1,denoiser=2,decoder=1"
SETTLED = "a pool stops to compare batches after three differences"
FLOAT32 = "float32 is computed in float32 on CUDA devices, unless this allows TF32"
ATTENTION = "the kernels of a denoiser's attention can be chosen"
GATHERED = "texts of a decode step may attend in one call"
BATCHES = "compares batches with requests alone, in place of a search in the worker"
HELP = "expert settings are in this help only"
TILED = "stages say whether the VAE used tiles for lack of memory, which --exact-only refuses"
PLANNED = "activations are predicted, and sizes for which GPUs have no memory are refused"
NAMED = "a device that fails is named by index and UUID, and its worker says why it is unhealthy"
FAILS = "errors of a device are counted, so that one that fails now and then is seen before it is unhealthy"
LOADED = "--max-loaded-models, of all verbs that start workers, is what --hold was"
TOKENS = (
    "Tokens of accepted prompts (prompt), those of them whose keys and values were there (cached), and tokens that "
    "were made (completion)"
)

KINDS = (
    "text_encode",
    "text_encode_2",
    "image_encode",
    "redraw_encode",
    "vision_encode",
    "denoise",
    "vae_decode",
    "prefill",
    "decode",
)
POOLS = {
    f"{kind}:<hex>:float32{numerics}": f"{kind.replace('_', '-')}-<class>-f32-<hex>"
    for kind in KINDS
    for numerics in ("", "@<hex>")
}
"""Names of pools, as recordings have them."""

RENAMES = Renames(
    fields={
        "medium": "modality",
        "outcome": "numerics",
        "room": "arena_bytes",
        "holds": "loaded_model",
        "shares": "batch_invariance",
        "blame": "differences",
    },
    metrics={"unfuse_pool_asleep": "unfuse_pool_scaled_to_zero"},
    labels={"outcome": "numerics"},
    settings={
        "UNFUSE_WORKER__HOLD": "UNFUSE_WORKER__MAX_LOADED_MODELS",
        "UNFUSE_SERVE__ASLEEP": "UNFUSE_SERVE__SCALE_TO_ZERO",
        "UNFUSE_SERVE__WAKE_LIMIT": "UNFUSE_SERVE__COLD_START_TIMEOUT",
    },
    flags={"--asleep": "--scale-to-zero", "--wake-limit": "--cold-start-timeout"},
    values={
        '[{"shown":"<hex>","upload":"shown-<hex>","frames":1,"rows":10,"columns":6,"tokens":15,"images":0,"picked":"",'
        '"seconds":0.0}]': (
            '[{"content_hash":"<hex>","upload":"shown-<hex>","frames":1,"rows":10,"columns":6,"tokens":15,"images":0,'
            '"frame_indexes":"","seconds":0.0}]'
        ),
        "manned": "live",
        "asleep": "scaled_to_zero",
        "missing": "unavailable",
        "waking": "cold_start",
        "heard": "delivered",
        TOKENS: (
            "Tokens of accepted prompts (prompt), prompt tokens whose KV was in the prefix cache (cached), and "
            "generated tokens (completion)"
        ),
        "Seconds between tokens of a choice, as they are recorded; those that are recorded together share them": (
            "Seconds between two tokens of a choice; tokens that are recorded together share the time"
        ),
        "How often texts gave up their keys and values for others": (
            "Retractions: how often a text lost its KV blocks because the KV cache was full"
        ),
        "Blocks of keys and values on live workers": "Blocks in the KV caches of live workers",
        "Prompts whose keys and values are not there yet: they wait for a worker, or it computes them": (
            "Prompts whose KV is not complete: they wait for a worker, or are in prefill"
        ),
        "Texts that wait until their grammar is compiled: before they are accepted, or at a worker": (
            "Text requests that wait for the compilation of their grammar, before they are accepted or in a worker"
        ),
        "Texts that no decoder has taken yet: there is no room for their keys and values, or no free slot": (
            "Text requests that wait for a decode worker with room in its KV cache and a free slot"
        ),
        "Texts for which a decoder keeps room, and whose keys and values are not all there yet": (
            "Text requests with reserved room in the KV cache of a decode worker, whose KV has not arrived completely"
        ),
        "Share of the last 15 s in which a worker had something to compute, as a mean of healthy ones": (
            "Share of the last 15 s in which a worker had tasks to compute, as the mean of the pool's healthy workers"
        ),
        "The same of the busiest worker on such a device": (
            "Share of the last 15 s in which the busiest healthy worker on this device had tasks to compute"
        ),
        "Tasks that the healthy workers of a node hold": "Tasks leased by the healthy workers of a node",
        "Ranks of the healthy workers of a node: compute processes, with a device each": (
            "Ranks of the healthy workers of a node: compute processes, each with its own device"
        ),
        "Bytes that compute processes hold: of a GPU what torch has reserved, of host memory what is resident": (
            "Memory of compute processes: GPU memory reserved by PyTorch, without a GPU their resident host memory"
        ),
        "Times that a worker loaded a set of weights in the place of another": (
            "Times that a worker loaded a set of weights in place of another"
        ),
        "Seconds that it took": "Seconds that workers took to load a set of weights in place of another",
        "Bytes that leaked, as workers without tasks found them: of keys and values (kv) or in arenas (arena)": (
            "Leaked bytes that workers found while they had no task: in the KV cache (kv) or in the arena (arena)"
        ),
        "Requests that ended without result, or too late": "Requests that failed or expired",
        "Requests refused because too much was waiting": "Requests refused by admission control",
        "Seconds a stage read, ran and wrote, in requests that succeeded": (
            "Seconds in which a stage read inputs, ran and wrote outputs, of requests that succeeded"
        ),
        "Seconds of a step, as the mean of a stage's, in requests that succeeded": (
            "Seconds of a step: the mean over a stage's steps, observed when the request succeeds"
        ),
        "Tasks that were given to workers": "Tasks leased to workers",
        "Leases that ran out": "Leases that expired",
        "Outputs of encoders that were in the cache": "Encoder outputs found in the encoder cache",
        "Those that were not, and could be": (
            "Encoder outputs that may be cached and were not found in the encoder cache"
        ),
        "Seconds that they took": "Seconds that workers took to pull bytes from other nodes",
        "Pulls that broke, and were tried again or given up": (
            "Transfers from other nodes that failed, including those that were retried"
        ),
        "Seconds of devices that requests used, as on their bills": "Device seconds used by requests, as billed",
        "What requests cost, by --price": "Cost of requests at the prices of --price",
        "Seconds of devices that attempts used which failed or were lost; nobody is billed for them": (
            "Device seconds of attempts that failed or were lost, which are not billed"
        ),
        "Calls of webhooks": "Attempts of webhook deliveries",
        "Requests that are not over": "Active requests",
        "Bytes that live workers hold for requests": "Bytes of stage outputs in the stores of live workers",
        "Share of the arena that is taken, in the fullest healthy worker": (
            "Used share of the arena, in the fullest healthy worker"
        ),
        "Share of an arena's free bytes that no one object can have, at the worst": (
            "Share of an arena's free bytes that one object cannot use, in the worst healthy worker"
        ),
        "Share of the arena that ever was taken, at the most": (
            "Highest share of the arena that was ever used, in any healthy worker"
        ),
        "Seconds that ranks computed steps, and waited for others of their worker": (
            "Seconds that ranks computed steps (compute), and waited for other ranks of their worker (exchange)"
        ),
        "Bytes of encoder outputs that later requests may read": "Bytes of encoder outputs in the encoder cache",
        "Predicted seconds of all stages of accepted requests that are not done": (
            "Predicted seconds of the pool's stages that are not done, of all active requests"
        ),
        "Predicted seconds of all stages of accepted requests that are not done and that such workers run": (
            "Predicted seconds of the stages of this role and component that are not done, of all active requests"
        ),
        "Tasks that wait for such workers": "Tasks that wait for workers of this role and component",
        "Whether results can be kept now, 0 or 1": "Whether results can be stored now, 0 or 1",
        "Tasks that wait until they can be": "Tasks that wait because their results cannot be stored",
        "Tasks that wait": "Tasks that wait in the pool's queue",
        "Longest wait of the first few tasks in line": (
            "Longest wait in seconds of the first few tasks in the pool's queue"
        ),
        "Healthy workers that hold a task": "Healthy workers with a leased task",
        "Healthy workers that hold none": "Healthy workers without a leased task",
        "Whether it has no worker, as it may, 0 or 1": "Whether the pool is scaled to zero, 0 or 1",
        "model chat makes no image: ask it for texts": "model chat does not generate pictures: request texts instead",
        "no model 'nobody' is served: one of chat, edit, redraw, seeing, unfuse/shapes": (
            "model 'nobody' is not served: send one of chat, edit, redraw, seeing, unfuse/shapes"
        ),
        "no request req_none is known (any more)": "request req_none does not exist, or was deleted",
        "Tasks in a forward, as the mean of a stage's steps, in requests that succeeded": (
            "Requests in a forward: the mean over a stage's steps, observed when the request succeeds"
        ),
        **POOLS,
        "size 33x33 cannot be made: each side must be a multiple of 32 from 32 to 256, with at most 65536 pixels in all"
        "; the nearest is 32x32": (
            "size 33x33 is not supported: each side must be a multiple of 32 from 32 to 256, with at most 65536 pixels "
            "in all; the nearest is 32x32"
        ),
    },
    removed={
        "fields": {"gateways./v1/workers.body.data.outcome.guidance-halves": HALVES},
        "metrics": {},
        "labels": {},
        "settings": {
            "UNFUSE_COMPUTE__GUIDANCE_HALVES": HALVES,
            "UNFUSE_SERVE__ENCODERS": COUNTED,
            "UNFUSE_SERVE__DENOISERS": COUNTED,
            "UNFUSE_SERVE__DECODERS": COUNTED,
        },
        "flags": {
            "--guidance-halves": HALVES,
            "--layouts": MEASURED,
            "--no-workers": "it is --workers none",
            "--encoders": COUNTED,
            "--denoisers": COUNTED,
            "--decoders": COUNTED,
            "--hold": LOADED,
        },
    },
    added={
        "fields": {
            "requests.*.stages.vae": TILED,
            "requests.*.stages.device_failures": NAMED,
            "gateways./v1/workers.body.data.device_health": NAMED,
            "gateways./v1/workers.body.data.unhealthy_reason": NAMED,
            "gateways./v1/models*.max_video_pixels": PLANNED,
            "gateways./v1/models*.activations": PLANNED,
            "gateways./v1/pools.body.data.batch_invariance.mode": SETTLED,
        },
        "metrics": {"unfuse_pool_not_batch_invariant": SETTLED, "unfuse_device_healthy": NAMED}
        | dict.fromkeys(("unfuse_device_errors_total", "unfuse_memory_retries_total"), FAILS),
        "labels": dict.fromkeys(("index", "uuid", "worker"), NAMED) | {"retry": FAILS},
        "settings": {
            "UNFUSE_COMPUTE__EXACT_ONLY": TILED,
            "UNFUSE_COMPUTE__FP32_PRECISION": FLOAT32,
            "UNFUSE_COMPUTE__ATTENTION": ATTENTION,
            "UNFUSE_COMPUTE__DECODE_ATTENTION": GATHERED,
        },
        "flags": {
            "--max-loaded-models": LOADED,
            "--help-all": HELP,
            "--exact-only": TILED,
            "--no-exact-only": TILED,
            "--fp32-precision": FLOAT32,
            "--attention": ATTENTION,
            "--decode-attention": GATHERED,
            "--batches": BATCHES,
        },
    },
)
