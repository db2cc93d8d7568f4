"""All settings, in small groups, each field with its description. `settings` loads them.

The descriptions are shown in `--help` and, with the docstrings of the groups, in docs/reference/settings.md.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from unfuse.core.compute_options import ComputeOptions, MaxLoadedModels
from unfuse.queues.base import QueueLimits
from unfuse.scheduler.admission import Order
from unfuse.scheduler.backpressure import Dispatch
from unfuse.transfer.base import TransferSettings

#: Who sets it: every operator, some, or none with a normal server, as for timers of protocols and sizes of internals.
Level = Literal["need", "may", "expert"]


def setting(
    text: str, *, level: Level = "may", flag: str = "", unit: str = "", secret: bool = False, **limits: Any
) -> Meta:
    """Return the metadata of a setting.

    `text`: its description for `--help`.
    `level`: who sets it.
    `flag`: its flag; "" derives the flag from the field's name.
    `unit`: "byte" or "second" for a number that may be written with a unit, else "".
    `secret`: whether its value is hidden in all output.
    `limits`: bounds of msgspec.Meta, such as `ge`.
    """
    return Meta(description=text, extra={"level": level, "flag": flag, "unit": unit, "secret": secret}, **limits)


def bytes_setting(text: str, *, flag: str = "") -> Meta:
    """Return the metadata of a number of bytes, which may be written with a unit."""
    return setting(text, flag=flag, unit="byte", ge=0, le=2**63 - 1)


class ServeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The server: gateway, scheduler and the workers it starts."""

    host: Annotated[str, setting("Address to listen on; anything but loopback needs an API key.", level="need")] = (
        "127.0.0.1"
    )
    port: Annotated[int, setting("Port of the HTTP API; 0 takes a free one.", ge=0, le=65535, level="need")] = 8000
    models: Annotated[tuple[str, ...], setting("Models to serve: names, folders or hub ids.", level="need")] = (
        "unfuse/shapes",
    )
    revision: Annotated[str, setting("Branch, tag or commit of the models that come from the hub.")] = ""
    component_source: Annotated[
        tuple[str, ...],
        setting(
            "COMPONENT=FOLDER or COMPONENT=HUB_NAME: load the weights of one component from another folder or hub "
            "repository, like text_encoder_2=/weights/t5. Only with a single model, whose other components it must "
            "fit."
        ),
    ] = ()
    served_model_name: Annotated[
        tuple[str, ...],
        setting("Model names for clients: any number for a single model, or one for each model in order."),
    ] = ()
    api_key: Annotated[
        tuple[str, ...],
        setting(
            "API key that clients may send, of at least 16 characters. It has admin rights if it is the only key; for "
            "several keys use --api-keys.",
            secret=True,
        ),
    ] = ()
    api_keys: Annotated[
        tuple[str, ...],
        setting(
            "File of API keys, as `unfuse keys add NAME` writes it. Keys with admin=yes have admin rights. The file "
            "is reloaded when it changes.",
            level="need",
        ),
    ] = ()
    open_metrics: Annotated[
        bool,
        setting(
            "Return all of /metrics to clients without a key. By default, they get no metrics that name a tenant, "
            "money or model."
        ),
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        setting(
            "Host names for the server besides localhost, checked if no API keys are configured: a name, .domain for "
            "all names below it, or * for any."
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        setting("Origins of websites that may call the server from a browser, like https://example.com; * for any."),
    ] = ()
    trusted_proxies: Annotated[
        tuple[str, ...],
        setting("Addresses or networks of proxies whose X-Forwarded-Host and X-Forwarded-Proto headers are trusted."),
    ] = ()
    public_url: Annotated[
        str,
        setting(
            "Base URL of links in responses, like https://example.com/pictures; by default the address that the "
            "client used."
        ),
    ] = ""
    max_connections: Annotated[
        int, setting("Maximum number of open connections; further ones are refused with 503.", ge=1, level="expert")
    ] = 8192
    max_connections_per_address: Annotated[
        int,
        setting(
            "Maximum number of open connections from one address; further ones are refused with 429. Trusted proxies "
            "have no such limit.",
            ge=1,
            level="expert",
        ),
    ] = 2048
    image_hosts: Annotated[
        tuple[str, ...],
        setting(
            "Hosts from which pictures in chat messages are fetched by URL: names, networks and * as for "
            "--webhook-hosts."
        ),
    ] = ()
    webhook_hosts: Annotated[
        tuple[str, ...],
        setting(
            "Hosts that requests may name as webhooks, which are called when the request ends: names like "
            "hooks.example, .example for all names below it, * for any public host; and networks like 10.0.0.0/8, to "
            "which names may also resolve."
        ),
    ] = ()
    webhook_secret: Annotated[
        tuple[str, ...],
        setting("Secret that signs webhooks, as `openssl rand -base64 32` creates it, or a file with it.", secret=True),
    ] = ()
    queue: Annotated[
        str,
        setting(
            "Queue backend, which stores requests and tasks: sqlite:PATH, redis://HOST:PORT/DATABASE, "
            "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, redis+cluster://HOST:PORT, each with ?shards=N to spread N "
            "shards over the named servers, or memory, which loses all requests when the server stops.",
            level="need",
        ),
    ] = "sqlite:DATA_DIR/queue.db"
    queue_wait: Annotated[
        float,
        setting(
            "Seconds to wait at the start for a queue that is unreachable, loads its data, or has a full disk, before "
            "the start fails; 0 does not wait.",
            ge=0,
            level="expert",
        ),
    ] = math.inf
    results: Annotated[
        str,
        setting(
            "Result store: disk:PATH (DATA_DIR: the data folder), s3://BUCKET/PREFIX or redis://HOST:PORT.",
            level="need",
        ),
    ] = "disk:DATA_DIR"
    store: Annotated[
        str,
        setting(
            "Tensor store for stage outputs. shared_memory: the arenas of the workers, where other workers map or "
            "pull them. spill:shared_memory+disk:PATH: the same, and unused objects are moved to a disk when an arena "
            "fills. disk:PATH, redis://… or s3://…: a store that every worker must reach."
        ),
    ] = "shared_memory"
    durable: Annotated[
        str,
        setting(
            "Store for copies of the outputs of --durable-stages, from which a request resumes if its worker dies: "
            "disk:PATH, redis://… or s3://…. With none, outputs are copied only when workers stop, into the result "
            "store, if that is on a disk or in S3."
        ),
    ] = "none"
    durable_stages: Annotated[
        tuple[str, ...], setting("Kinds of stages whose outputs --durable copies, such as text_encode.")
    ] = ("denoise",)
    checkpoint: Annotated[
        str,
        setting(
            "When to save the state of a running denoiser, so that another worker can resume it: every N steps (10) "
            "or seconds (30s), or auto, which weighs the cost of saving against the work that would be lost. All of "
            "these also save when a worker stops; none never saves.",
            level="expert",
        ),
    ] = "auto"
    encode: Annotated[
        tuple[str, ...],
        setting(
            "Store the outputs of a stage kind in fewer bytes: text_encode=bf16 or denoise=fp16 converts 32-bit "
            "floats to 16 bits; text_encode=int4 quantizes all floats to 4 bits, in blocks that share a scale. "
            "Results are then not bit-identical to those of the undivided pipeline."
        ),
    ] = ()
    loras: Annotated[str, setting("Folder of LoRA adapters. Requests select NAME.safetensors as NAME.")] = ""
    listen: Annotated[
        tuple[str, ...],
        setting(
            "Further addresses for workers, besides the unix socket in the run folder: tcp://HOST:PORT, for which "
            "keys are created if there are none; or unix:PATH, which replaces that socket."
        ),
    ] = ()
    workers: Annotated[
        str,
        setting(
            "Workers to start on this machine. auto: all stages of all models in each worker if they fit, else a "
            "worker for each role, else one model at a time. split: a worker for each role. none: no workers; start "
            "them by `unfuse worker`. Or a plan, like all=2 or encoder=1,denoiser=2,decoder=1; + combines roles in "
            "one worker.",
            level="need",
        ),
    ] = "auto"
    device_memory: Annotated[
        tuple[str, ...],
        setting(
            "DEVICE=SIZE: maximum memory to plan for on a device, like cuda:0=20GiB or cpu=4GiB; by default its free "
            "memory. `doctor` also plans for devices that this machine does not have."
        ),
    ] = ()
    launcher: Annotated[
        str, setting("Where workers run: local, ray:HOST:PORT, or ray, which starts a new Ray instance.")
    ] = "local"
    place: Annotated[
        str,
        setting(
            "Devices by role, like encoder=cpu,denoiser=cuda:0,denoiser=cuda:1; one worker starts for each device."
        ),
    ] = ""
    slots: Annotated[
        tuple[str, ...],
        setting(
            "ROLE=N: slots of each worker of the role, one for each task; by default as its stages define.",
            level="expert",
        ),
    ] = ()
    scale_to_zero: Annotated[
        tuple[str, ...],
        setting("ROLE=N: the role's pools may be scaled to zero; their workers would have N slots in total."),
    ] = ()
    cold_start_timeout: Annotated[
        float,
        setting("Maximum seconds by which the cold start of a pool that was scaled to zero moves deadlines.", ge=0),
    ] = 600.0
    image_timeout: Annotated[
        float,
        setting(
            "Maximum seconds that the stages of an image request may run, without the time in queues. It is raised to "
            "5 times the predicted time; without a prediction there is no limit. 0 disables the limit.",
            ge=0,
        ),
    ] = 300.0
    video_timeout: Annotated[
        float, setting("Maximum seconds that the stages of a video request may run, as for --image-timeout.", ge=0)
    ] = 600.0
    max_active: Annotated[
        int, setting("Maximum number of active requests; further ones are refused with 429.", ge=1)
    ] = QueueLimits().max_active
    max_queue: Annotated[
        int, setting("Maximum number of tasks that wait in one pool; then requests are refused with 429.", ge=1)
    ] = QueueLimits().max_queue
    max_cost: Annotated[
        float, setting("Maximum predicted seconds of compute of all active requests; 0 sets no limit.", ge=0)
    ] = 0.0
    order: Annotated[
        Order,
        setting(
            "Order of requests: fifo by arrival, edf by deadline, shortest by predicted time, fair by equal shares of "
            "the tenants."
        ),
    ] = "fifo"
    dispatch: Annotated[
        Dispatch,
        setting(
            "Choice of the worker for a task: locality prefers workers that have its inputs or run tasks that fit "
            "into a batch with it; round_robin the worker that has waited longest; max_free_slots the worker with the "
            "most free slots.",
            level="expert",
        ),
    ] = "locality"
    encoder_cache: Annotated[
        int,
        bytes_setting(
            "Maximum memory of all workers for the encoder cache, whose outputs later requests reuse; 0 disables it."
        ),
    ] = 256 << 20
    retention_s: Annotated[
        float,
        setting(
            "How long to keep a request and its results after its end, like 90min, 24h or 7d.",
            flag="--retention",
            unit="second",
            gt=0,
            level="need",
        ),
    ] = 86400.0
    results_limit: Annotated[
        int,
        bytes_setting(
            "Maximum bytes of results. Above it, the oldest ended requests are deleted early; 0 sets no limit."
        ),
    ] = 0
    price: Annotated[
        tuple[str, ...],
        setting("KIND=AMOUNT/h: price of an hour of a device, like cuda=1.20/h; kinds are cpu, cuda, xpu and mps."),
    ] = ()
    strict_params: Annotated[
        bool, setting("Refuse parameters that would have no effect, such as a quality that the model does not define.")
    ] = False
    on_disconnect: Annotated[
        Literal["cancel", "continue"],
        setting(
            "Whether to cancel a picture or chat at its next step when the client that waits for it disconnects. Calls "
            "with an Idempotency-Key, a webhook or Prefer: respond-async always continue."
        ),
    ] = "cancel"
    reuse_results: Annotated[
        bool,
        setting(
            "Answer a request with the stored results of an equal earlier request of the same tenant, if it has a "
            "seed and its pools are exact."
        ),
    ] = False
    feature_cache: Annotated[
        float,
        setting(
            "In batched pools, skip the other blocks of a transformer while the output of its first block differs "
            "from that of the last computed step by less than this share; requests may set another value. 0 skips "
            "nothing.",
            ge=0,
            le=1,
        ),
    ] = 0.0
    tool_call_parser: Annotated[
        str, setting("Parser of tool calls, by vLLM's names; auto selects it by the chat template.")
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        setting(
            "Parser of reasoning, by vLLM's names; auto selects it by the chat template, none keeps it in the content."
        ),
    ] = "auto"
    drain_timeout: Annotated[
        float,
        setting(
            "Maximum seconds of a stop after SIGTERM. Running tasks are saved at their next step, if results are on a "
            "disk or in S3, and resume after the next start; tasks that cannot be saved have this time to finish.",
            ge=0,
        ),
    ] = 20.0


class WorkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker."""

    workers: Annotated[
        str,
        setting(
            "Start, place and restart all workers of this machine, as `serve` does: auto, split, or a plan like "
            "encoder=1,denoiser=2. By default, a single worker runs."
        ),
    ] = ""
    role: Annotated[
        str,
        setting(
            "Roles to serve: one, such as denoiser; several at once as encoder+decoder; all; or one at a time, chosen "
            "by the tasks that wait, as encoder,decoder."
        ),
    ] = "all"
    max_loaded_models: Annotated[
        MaxLoadedModels,
        setting(
            "Models that a worker has loaded at a time: all, or 1, which is chosen by the waiting requests. "
            "`--workers auto` chooses 1 if the models do not fit together."
        ),
    ] = "all"
    component: Annotated[
        tuple[str, ...],
        setting("Serve only the stages of this component, as in --role encoder --component text_encoder_2."),
    ] = ()
    scheduler: Annotated[
        tuple[str, ...],
        setting(
            "Scheduler to register with: the HTTP port of a server on this machine, tcp://HOST:PORT or unix:PATH; if "
            "one is unreachable, the worker uses the next. By default, the server that runs on this machine."
        ),
    ] = ()
    model: Annotated[tuple[str, ...], setting("Models to load; by default those that the scheduler names.")] = ()
    slots: Annotated[
        int,
        setting(
            "Slots of a worker: its tasks that run or wait for inputs. At least one more than the batch size is used. "
            "0 is the role's default.",
            ge=0,
            level="expert",
        ),
    ] = 0
    resources: Annotated[
        tuple[str, ...],
        setting(
            "NAME=N: amount of a resource that tasks of the worker's stages need, besides slots and room in its arena.",
            level="expert",
        ),
    ] = ()
    node: Annotated[
        str,
        setting(
            "Name of this node. Tasks run preferably on nodes that have their inputs. By default, an ID of the run "
            "folder.",
            level="expert",
        ),
    ] = ""
    listen: Annotated[
        str, setting("Host that other nodes pull tensors from; by default the address that the scheduler sees.")
    ] = ""
    health: Annotated[
        str,
        setting("HOST:PORT at which a single worker answers HTTP probes of /health and /ready, such as 0.0.0.0:8002."),
    ] = ""
    memory_limit: Annotated[
        int,
        bytes_setting(
            "Maximum private memory of a compute process, which is killed as crashed above it; 0 sets no limit."
        ),
    ] = 0


#: Default arena bytes of each worker that `serve` starts. Several such workers share a machine.
SHARED_ARENA = 512 << 20

#: Default arena bytes of a worker that `unfuse worker` starts.
STANDALONE_ARENA = 2 << 30


class ArenaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's tensor memory."""

    bytes: Annotated[
        int,
        bytes_setting(
            "Maximum memory for stage outputs, allocated as they arrive; 0 is 512 MiB for each worker that `serve` "
            "starts, and 2 GiB for one that is started by itself.",
            flag="--arena",
        ),
    ] = 0


class KvSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV cache of a worker."""

    bytes: Annotated[
        int,
        bytes_setting(
            "Memory of each worker for its KV cache. 0: on GPUs 90 % of what weights and activations leave, on CPUs, "
            "and for a worker that is started by itself, a quarter of the free memory.",
            flag="--kv",
        ),
    ] = 0


class BufferSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The receive buffer of a worker for tensors from other nodes."""

    tokens: Annotated[
        int,
        setting(
            "Tokens of a longer prompt whose inputs a worker receives from another node at a time; the rest follows "
            "in pieces. 0 receives prompts of any length at once.",
            ge=0,
            level="expert",
        ),
    ] = 8192


class StoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tensor store of a worker."""

    orphan_s: Annotated[
        float,
        setting(
            "Seconds without an answer from any scheduler after which a worker frees its objects.", gt=0, level="expert"
        ),
    ] = 900.0


class SpillSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor store that moves unused objects to a slower store."""

    threshold: Annotated[
        float, setting("Share of the arena above which unused objects are moved.", gt=0, le=1, level="expert")
    ] = 0.8
    capacity: Annotated[int, bytes_setting("Maximum bytes of each worker in the slow store.")] = 16 << 30


class Transfer(TransferSettings, frozen=True, forbid_unknown_fields=True):
    """How tensors move between nodes."""

    engine: Annotated[
        tuple[str, ...],
        setting(
            "Transfer engines between machines; the best one that both machines have is used: tcp, zmq, gloo, "
            "mooncake, nccl, nixl, module:attr.",
            min_length=1,
        ),
    ] = ("tcp", "zmq")


class LeaseSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Timed claims on tasks."""

    ttl_s: Annotated[
        float,
        setting(
            "Seconds without a heartbeat after which the leases of a worker expire and its tasks go to others.",
            ge=2,
            level="expert",
        ),
    ] = 15.0
    stall_s: Annotated[
        float,
        setting("Seconds without progress after which a compute process is killed as crashed.", gt=0, level="expert"),
    ] = 600.0


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The log on standard error."""

    level: Annotated[
        Literal["auto", "error", "warning", "info", "debug"],
        setting(
            "Log lines of this level and above; auto is info for serve and worker, warning for other verbs. With "
            "debug, serve also logs the device and dtype of each component, and when it was loaded.",
            flag="--log-level",
        ),
    ] = "auto"
    format: Annotated[
        Literal["auto", "text", "json"],
        setting("How log lines are written; auto is text on a terminal, else JSON.", flag="--log-format"),
    ] = "auto"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be set, by group."""

    data_dir: Annotated[str, setting("Folder for results and other persistent data.", level="need")] = ""
    run_dir: Annotated[
        str,
        setting(
            "Private folder of this user for the sockets between processes of one machine; by default one is created."
        ),
    ] = ""
    server: Annotated[str, setting("URL of the server that client commands use.", level="need")] = (
        "http://127.0.0.1:8000"
    )
    api_key: Annotated[str, setting("API key that client commands send, and that `serve` accepts.", secret=True)] = ""
    keys: Annotated[
        str,
        setting(
            "Folder of the keys by which schedulers and workers authenticate each other over TCP, created by `unfuse "
            "keys new`; by default the keys in the data folder."
        ),
    ] = ""
    insecure_listen: Annotated[
        bool,
        setting(
            "Accept workers over TCP without keys: anyone who can connect can read prompts and forge results.",
            level="expert",
        ),
    ] = False

    #: Settings of `unfuse serve`. Some also apply to workers, such as `drain_timeout`.
    serve: ServeSettings = ServeSettings()
    #: Settings of `unfuse worker`. `unfuse serve` passes some of them to the workers that it starts.
    worker: WorkerSettings = WorkerSettings()
    #: Settings of the compute processes of workers.
    compute: ComputeOptions = ComputeOptions()
    #: Settings of the arena of a worker.
    arena: ArenaSettings = ArenaSettings()
    #: Settings of the KV cache of a worker.
    kv: KvSettings = KvSettings()
    #: Settings of the receive buffer of a worker.
    buffer: BufferSettings = BufferSettings()
    #: Settings of leases, by which the scheduler and workers agree on who runs a task.
    lease: LeaseSettings = LeaseSettings()
    #: Settings of the objects of a worker in the tensor store. `serve.store` names the store.
    store: StoreSettings = StoreSettings()
    #: Settings of a tensor store `spill:…`; unused with any other one.
    spill: SpillSettings = SpillSettings()
    #: Settings of transfers between nodes.
    transfer: Transfer = Transfer()
    #: Settings of the log on standard error.
    log: LogSettings = LogSettings()
