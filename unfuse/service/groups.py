"""All settings, in small groups, each field with its description. `settings` loads them.

The descriptions are shown in `--help` and, with the docstrings of the groups, in docs/settings.md.
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


def says(text: str, *, flag: str = "", unit: str = "", secret: bool = False, **limits: Any) -> Meta:
    """Return the metadata of a setting.

    `text`: its description for `--help`.
    `flag`: its flag; by default it is derived from the field's name.
    `unit`: "byte" or "second" for a number that may be written with a unit.
    `secret`: whether its value is never shown.
    `limits`: bounds of msgspec.Meta, such as `ge`.
    """
    return Meta(description=text, extra={"flag": flag, "unit": unit, "secret": secret}, **limits)


def says_bytes(text: str, *, flag: str = "") -> Meta:
    """Return the metadata of a number of bytes, which may be written with a unit."""
    return says(text, flag=flag, unit="byte", ge=0, le=2**63 - 1)


class ServeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The server: gateway, scheduler and the workers it starts."""

    host: Annotated[str, says("Address to listen on; anything but loopback needs an API key.")] = "127.0.0.1"
    port: Annotated[int, says("Port of the HTTP API; 0 takes a free one.", ge=0, le=65535)] = 8000
    models: Annotated[tuple[str, ...], says("Models to serve: names, folders or hub ids.")] = ("unfuse/shapes",)
    revision: Annotated[str, says("Branch, tag or commit of the models that come from the hub.")] = ""
    component_source: Annotated[
        tuple[str, ...],
        says(
            "COMPONENT=FOLDER or COMPONENT=HUB_NAME: the weights of one component from elsewhere, like "
            "text_encoder_2=/weights/t5. Only where one model is served; the component has to fit the rest of it."
        ),
    ] = ()
    served_model_name: Annotated[
        tuple[str, ...], says("Names clients use: any number for one model, else one for each model in order.")
    ] = ()
    api_key: Annotated[
        tuple[str, ...],
        says(
            "A key that clients may send, of at least 16 characters. A sole key is an admin's; for several use "
            "--api-keys.",
            secret=True,
        ),
    ] = ()
    api_keys: Annotated[
        tuple[str, ...],
        says(
            "A file of keys, as `unfuse keys add NAME` writes it; lines with admin=yes are admins'. Read again when it "
            "changes."
        ),
    ] = ()
    open_metrics: Annotated[
        bool,
        says(
            "Show everybody all of /metrics. Without it, a client without a key sees no tenant, money or model there."
        ),
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        says(
            "Without keys: names that clients may reach it by, beside localhost; .domain for all below it; * for any."
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...], says("Websites that may use it from a browser, like https://example.com; * for any.")
    ] = ()
    trusted_proxies: Annotated[
        tuple[str, ...], says("Addresses or networks of proxies that say what host and scheme they were asked for.")
    ] = ()
    public_url: Annotated[
        str,
        says(
            "Base address of links in responses, like https://example.com/pictures; without it, the address a client "
            "used."
        ),
    ] = ""
    max_connections: Annotated[int, says("Connections that may be open; more are told 503.", ge=1)] = 8192
    max_connections_per_address: Annotated[
        int, says("Connections that may be open from one address, no proxy's; more are told 429.", ge=1)
    ] = 2048
    image_hosts: Annotated[
        tuple[str, ...],
        says(
            "Hosts that pictures of chats are fetched from, where messages name their addresses: names, networks and * "
            "as for --webhook-hosts."
        ),
    ] = ()
    webhook_hosts: Annotated[
        tuple[str, ...],
        says(
            "Hosts that requests may name as webhooks, which are told of their ends: names like hooks.example, "
            ".example for all below it, * for any of the internet; and networks like 10.0.0.0/8, to which names may "
            "lead too."
        ),
    ] = ()
    webhook_secret: Annotated[
        tuple[str, ...],
        says("What webhooks are signed with, as `openssl rand -base64 32` makes it, or a file of it.", secret=True),
    ] = ()
    queue: Annotated[
        str,
        says(
            "Where tasks wait and requests live: sqlite:PATH, redis://HOST:PORT/DATABASE, "
            "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, redis+cluster://HOST:PORT, each with ?shards=N spread over "
            "what is named, or memory, which keeps none."
        ),
    ] = "sqlite:DATA_DIR/queue.db"
    queue_wait: Annotated[
        float,
        says(
            "Seconds that a start waits for a queue that is away, loads its data, or has a full disk, before it gives "
            "up; 0 does not wait.",
            ge=0,
        ),
    ] = math.inf
    results: Annotated[
        str,
        says("Where results are kept: disk:PATH (DATA_DIR: the data folder), s3://BUCKET/PREFIX or redis://HOST:PORT."),
    ] = "disk:DATA_DIR"
    store: Annotated[
        str,
        says(
            "Where the tensors lie that stages hand on. shared_memory: in the workers' arenas, where others map or "
            "pull them. spill:shared_memory+disk:PATH: there, and what nobody reads goes to a disk when one fills. "
            "disk:PATH, redis://… or s3://…: in that place, where every worker must reach it."
        ),
    ] = "shared_memory"
    durable: Annotated[
        str,
        says(
            "Where workers also copy what --durable-stages make, so that a request whose worker dies goes on from it "
            "instead of being computed again: disk:PATH, redis://… or s3://…. With none, copies are made only when "
            "workers stop, beside the results, if these are on a disk or in S3."
        ),
    ] = "none"
    durable_stages: Annotated[
        tuple[str, ...], says("Kinds of stages whose outputs --durable copies, such as text_encode.")
    ] = ("denoise",)
    checkpoint: Annotated[
        str,
        says(
            "When a running denoiser's state is saved, for another worker to go on from: every so many steps (10) or "
            "seconds (30s); auto weighs what saving costs against what would be lost. Each of these also saves when a "
            "worker stops; none never saves."
        ),
    ] = "auto"
    encode: Annotated[
        tuple[str, ...],
        says(
            "Hand on what a kind of stage makes in fewer bytes: text_encode=bf16 or denoise=fp16 stores its 32-bit "
            "floats as 16, text_encode=int4 all of its floats in four bits, in blocks that share a scale. Results are "
            "no longer those of the undivided pipeline, bit for bit."
        ),
    ] = ()
    loras: Annotated[str, says("Folder of adapters (LoRA): a request may name one, NAME.safetensors as NAME.")] = ""
    listen: Annotated[
        tuple[str, ...],
        says(
            "More addresses for workers than the unix socket that is in the run folder anyway: tcp://HOST:PORT, with "
            "keys that are made if there are none; or another unix:PATH in its place."
        ),
    ] = ()
    workers: Annotated[
        str,
        says(
            "Workers to start here. auto: all stages of all models in each worker if they fit, else a worker for each "
            "role, else one model at a time. split: a worker for each role. none: `unfuse worker` starts them. Or a "
            "plan, like all=2 or encoder=1,denoiser=2,decoder=1; + joins roles in one worker."
        ),
    ] = "auto"
    device_memory: Annotated[
        tuple[str, ...],
        says(
            "DEVICE=SIZE: what is planned for on a device at most, like cuda:0=20GiB or cpu=4GiB; else what is free. "
            "`doctor` also plans for devices that are not here."
        ),
    ] = ()
    launcher: Annotated[str, says("Where workers run: local, ray:HOST:PORT, or ray, a Ray of its own.")] = "local"
    place: Annotated[
        str, says("Devices by role: encoder=cpu,denoiser=cuda:0,denoiser=cuda:1; a worker for each device named.")
    ] = ""
    slots: Annotated[tuple[str, ...], says("ROLE=N: tasks that a worker of a role holds; else as its stages say.")] = ()
    asleep: Annotated[tuple[str, ...], says("ROLE=N: its workers may be away; they would have N slots in all.")] = ()
    wake_limit: Annotated[float, says("Most seconds that deadlines move while a pool wakes.", ge=0)] = 600.0
    image_timeout: Annotated[
        float,
        says(
            "Seconds that a picture's stages may run, queues not counted; at least 5 times what was predicted, and "
            "any number where nothing was measured. 0 sets no limit.",
            ge=0,
        ),
    ] = 300.0
    video_timeout: Annotated[float, says("The same of a video.", ge=0)] = 600.0
    max_active: Annotated[int, says("Requests accepted and not over; the next is refused with 429.", ge=1)] = (
        QueueLimits().max_active
    )
    max_queue: Annotated[int, says("Tasks that may wait in one pool before requests are refused.", ge=1)] = (
        QueueLimits().max_queue
    )
    max_cost: Annotated[float, says("Predicted seconds of compute accepted and not over; 0 is any number.", ge=0)] = 0.0
    order: Annotated[
        Order,
        says("Who goes first: fifo by arrival, edf by deadline, shortest the short, fair each API key its share."),
    ] = "fifo"
    dispatch: Annotated[
        Dispatch,
        says("Who gets a task: locality, who has its inputs or runs what goes with it; round_robin; max_free_slots."),
    ] = "locality"
    encoder_cache: Annotated[
        int,
        says_bytes("Memory for encoder outputs that later requests may read, of all workers together; 0 keeps none."),
    ] = 256 << 20
    retention_s: Annotated[
        float,
        says(
            "How long a request and its results are kept once over, like 90min, 24h or 7d.",
            flag="--retention",
            unit="second",
            gt=0,
        ),
    ] = 86400.0
    results_limit: Annotated[
        int, says_bytes("Bytes of results above which the oldest requests that are over go earlier; 0 sets no limit.")
    ] = 0
    price: Annotated[
        tuple[str, ...],
        says("KIND=AMOUNT/h: what an hour of a device costs, like cuda=1.20/h; of the kinds cpu, cuda, xpu and mps."),
    ] = ()
    strict_params: Annotated[bool, says("Refuse what a client asks for in vain, such as a quality no model knows.")] = (
        False
    )
    on_disconnect: Annotated[
        Literal["cancel", "continue"],
        says(
            "Whether to cancel a picture or chat at its next step when the client that waits for it disconnects. Calls "
            "with an Idempotency-Key, a webhook or Prefer: respond-async always continue."
        ),
    ] = "cancel"
    reuse_results: Annotated[
        bool,
        says(
            "Answer a request with the results of an equal one of the same API key, with a seed, that exact workers "
            "made and that are still kept."
        ),
    ] = False
    feature_cache: Annotated[
        float,
        says(
            "Where pools batch: skip a transformer's other blocks while what its first one adds differs from last "
            "time by less than this share; requests may say otherwise. 0 skips nothing.",
            ge=0,
            le=1,
        ),
    ] = 0.0
    tool_call_parser: Annotated[
        str, says("Parser of tool calls, by vLLM's names; auto selects it by the chat template.")
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        says(
            "Parser of reasoning, by vLLM's names; auto selects it by the chat template, none keeps it in the content."
        ),
    ] = "auto"
    drain_timeout: Annotated[
        float,
        says(
            "Seconds that a whole stop may take after SIGTERM. What runs is saved at its next step, where results are "
            "on a disk or in S3, and goes on after the next start; what cannot be saved gets this time to finish.",
            ge=0,
        ),
    ] = 20.0


class WorkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker."""

    workers: Annotated[
        str,
        says(
            "Start, place and restart all workers of this machine, as `serve` does: auto, split, or a plan like "
            "encoder=1,denoiser=2. Without it, this is one worker."
        ),
    ] = ""
    role: Annotated[
        str,
        says(
            "Roles to serve: one, such as denoiser; several at once as encoder+decoder; all; or one at a time, chosen "
            "by the tasks that wait, as encoder,decoder."
        ),
    ] = "all"
    max_loaded_models: Annotated[
        MaxLoadedModels,
        says(
            "Models that a worker has loaded at a time: all, or 1, chosen by the requests that wait. `--workers auto` "
            "chooses 1 where models only fit alone."
        ),
    ] = "all"
    component: Annotated[
        tuple[str, ...], says("Of these stages only those of one component: --role encoder --component text_encoder_2.")
    ] = ()
    scheduler: Annotated[
        tuple[str, ...],
        says(
            "Scheduler to work for: the HTTP port of a server of this machine, tcp://HOST:PORT or unix:PATH; when one "
            "is gone, the worker goes to the next. Without any it is the server that runs here."
        ),
    ] = ()
    model: Annotated[tuple[str, ...], says("Models to load; without one the scheduler says which.")] = ()
    slots: Annotated[
        int, says("Tasks that a worker holds: running, or waiting for inputs. More than --max-batch. 0: by role.", ge=0)
    ] = 0
    resources: Annotated[
        tuple[str, ...],
        says("NAME=N: what it has of a resource that tasks of its stages need, beside slots and room in its arena."),
    ] = ()
    node: Annotated[
        str,
        says("Name of this node: work goes first to nodes that have its inputs; by default an id of the run folder."),
    ] = ""
    listen: Annotated[
        str, says("Host that other nodes pull tensors from; by default the address that the scheduler sees.")
    ] = ""
    health: Annotated[
        str, says("HOST:PORT where probes ask one worker, by HTTP, for /health and /ready, such as 0.0.0.0:8002.")
    ] = ""
    memory_limit: Annotated[
        int, says_bytes("Memory of its own that a compute process may take before it is killed as crashed; 0 is any.")
    ] = 0


#: Default arena bytes of each worker that `serve` starts. These workers share their machine.
SHARED_ARENA = 512 << 20

#: Default arena bytes of a worker that is started by itself.
OWN_ARENA = 2 << 30


class ArenaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's tensor memory."""

    bytes: Annotated[
        int,
        says_bytes(
            "Most memory for stage outputs, taken from the machine as they come; 0 is 512 MiB for each worker that "
            "`serve` starts, and 2 GiB for one that is started by itself.",
            flag="--arena",
        ),
    ] = 0


class KvSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's memory for the keys and values of texts."""

    bytes: Annotated[
        int,
        says_bytes(
            "Memory of each worker for the keys and values of tokens; 0 is a quarter of what is free on the device.",
            flag="--kv",
        ),
    ] = 0


class BufferSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where tensors from other nodes arrive that are longer than it."""

    tokens: Annotated[
        int,
        says(
            "Tokens of which a worker receives what a prompt reads at a time; longer ones arrive in pieces. 0 is any "
            "length at once.",
            ge=0,
        ),
    ] = 8192


class StoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where workers keep objects."""

    orphan_s: Annotated[
        float, says("Seconds without any scheduler after which a worker gives up the objects it keeps.", gt=0)
    ] = 900.0


class SpillSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A store that moves unused objects from a fast place to a slow one."""

    threshold: Annotated[float, says("Share of the arena above which it does.", gt=0, le=1)] = 0.8
    capacity: Annotated[int, says_bytes("Bytes of a worker that the slow place keeps.")] = 16 << 30


class Transfer(TransferSettings, frozen=True, forbid_unknown_fields=True):
    """How tensors move between nodes."""

    engine: Annotated[
        tuple[str, ...],
        says(
            "Ways to move tensors between machines, the best that both have: tcp, zmq, gloo, mooncake, nccl, nixl, "
            "module:attr.",
            min_length=1,
        ),
    ] = ("tcp", "zmq")


class LeaseSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Timed claims on tasks."""

    ttl_s: Annotated[float, says("Seconds of silence after which a worker's tasks go to another.", ge=2)] = 15.0
    stall_s: Annotated[
        float, says("Seconds without progress after which a compute process is killed as crashed.", gt=0)
    ] = 600.0


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The log on standard error."""

    level: Annotated[
        Literal["auto", "error", "warning", "info", "debug"],
        says(
            "Log lines of this level and above; auto is info for serve and worker, warning for other verbs. With "
            "debug, serve also logs the device and dtype of each component, and when it was loaded.",
            flag="--log-level",
        ),
    ] = "auto"
    format: Annotated[
        Literal["auto", "text", "json"],
        says("How log lines are written; auto is text on a terminal, else JSON.", flag="--log-format"),
    ] = "auto"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be set, by group."""

    data_dir: Annotated[str, says("Folder for results and whatever else outlives a process.")] = ""
    run_dir: Annotated[
        str, says("Folder of this user alone, in which the processes of one machine meet; by default one is made.")
    ] = ""
    server: Annotated[str, says("Server that the client verbs talk to.")] = "http://127.0.0.1:8000"
    api_key: Annotated[str, says("Key that the client verbs send, and that `serve` accepts.", secret=True)] = ""
    keys: Annotated[
        str,
        says(
            "Folder of the keys, made by `unfuse keys new`, that schedulers and workers know each other by over TCP; "
            "by default those in the data folder."
        ),
    ] = ""
    insecure_listen: Annotated[
        bool, says("Have workers over TCP without keys: whoever reaches the port sees prompts and forges results.")
    ] = False
    serve: ServeSettings = ServeSettings()
    worker: WorkerSettings = WorkerSettings()
    compute: ComputeOptions = ComputeOptions()
    arena: ArenaSettings = ArenaSettings()
    kv: KvSettings = KvSettings()
    buffer: BufferSettings = BufferSettings()
    lease: LeaseSettings = LeaseSettings()
    store: StoreSettings = StoreSettings()
    spill: SpillSettings = SpillSettings()
    transfer: Transfer = Transfer()
    log: LogSettings = LogSettings()
