"""The page docs/reference/events.md, from the class `Event` and what emits events."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from tools.reference_tables import ROOT, WRITTEN, code, comments, next_step, table
from unfuse.core.request import Event, EventType
from unfuse.queues.index import DROPPABLE_EVENTS, MAX_EVENTS

#: A stream that a server sent for a picture of unfuse/shapes; events in the middle are left out.
EXAMPLE = ROOT / "tools" / "events.txt"

HEAD = f"""# Events of a request

Look up here what the event stream of a request contains. Read it to show the progress of a request, or to learn of
its end without polling. The first table has the types of events, the second the fields that each event has. {WRITTEN}

```bash
curl -N http://127.0.0.1:8000/v1/requests/REQUEST/events
```

In Python, `request.events()` yields `Event` objects ([Python API](python.md)). The stream ends after
`completed`, `failed` or `cancelled`. To resume it, send the `seq` of the last event as `Last-Event-ID`: clients of
server-sent events do so by themselves, since `seq` is also the id of the event.

A server stores at most {MAX_EVENTS} events of a request. Above that, it drops the oldest {{droppable}} events first,
and then any.

## Types

"""

WHEN = {
    "queued": "The request is accepted. It is the first event.",
    "stage_started": "A worker has leased the stage. `attempt` counts from 1, and `worker` is the id of the worker.",
    "progress": "The stage has computed `step` of `steps` steps. Several steps may be reported at once.",
    "preview": (
        "A preview of the picture after `step` exists, for requests with `preview_every` or `partial_images`. "
        "`GET /v1/requests/{id}/preview/{index}/{step}` has it."
    ),
    "appended": (
        "More output of the stage is recorded, as for the tokens of a chat. `step` is the number of recorded chunks. "
        "Only the last such event of each stage is stored."
    ),
    "stage_completed": "The stage is done. With the message `cached`, its output is from the encoder cache.",
    "retrying": (
        "An attempt at the stage has ended without an output, and the stage will run again. `message` has the error."
    ),
    "completed": (
        "The request is over, and its results can be read. With the message `reused`, they are those of an earlier "
        "request."
    ),
    "failed": "The request is over without a result: it failed, or it expired. `message` has the reason.",
    "cancelled": "The request is over, because it was cancelled.",
}
"""When each type of event is sent."""

UNITS = {"at": "Unix seconds", "attempt": "count", "step": "steps", "steps": "steps", "seq": "count"}
"""The units of numbers."""

OTHERS = """
## Other event streams

These streams are the responses of calls with `"stream": true`, and not those of `/v1/requests/{id}/events`.

| call | event | data |
|---|---|---|
| `POST /v1/images/generations` | `image_generation.partial_image` | preview as `b64_json`, with `partial_image_index` |
| `POST /v1/images/generations` | `image_generation.completed` | picture as `b64_json`, with `seed` and `usage` |
| `POST /v1/images/edits` | `image_edit.partial_image`, `image_edit.completed` | as for generations |
| `POST /v1/chat/completions` | without a type | a chunk of the answer; the last data is `[DONE]` |
| all streams | `error` | an [error](errors.md), such as that of a key that was removed meanwhile |

Events with a picture also have `type`, `output_format`, `size`, `quality`, `background` and `created_at`.
"""


def page() -> str:
    """Return the whole page."""
    head = HEAD.replace("{droppable}", " and ".join(map(code, DROPPABLE_EVENTS)))
    types = table("type | when", ([code(name), WHEN[name]] for name in get_args(EventType)))
    fields = table("field | type | unit | default | meaning", map(list, field_rows()))
    example = f"""
## Example

The request is `{{"prompt": "a red circle on white", "seed": 7, "preview_every": 2}}`, sent to `unfuse/shapes` with
`Prefer: respond-async`. The events with the ids 9 to 48 are left out.

```text
{EXAMPLE.read_text().strip()}
```
"""
    end = next_step("[Errors](errors.md)", "[Request pictures asynchronously](../guides/asynchronous-pictures.md)")
    about = "\nEach event has all fields, as JSON. A field that does not apply has its default.\n\n"
    return "".join([head, types, "\n## Fields\n", about, fields, example, OTHERS, end])


def field_rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the row of each field of `Event`; its comment in the source is its meaning."""
    source = inspect.getsource(Event)
    for name, kind, default in re.findall(r"^    (\w+): (\w+)(?: = (.*))?$", source, re.MULTILINE):
        about = comments(Event).get(name, "")
        types = {"EventType": "string", "str": "string", "int": "integer", "float": "number"}
        yield code(name), types[kind], UNITS.get(name, ""), code(default), about


def emitted() -> dict[str, tuple[Path, int]]:
    """Return the types of events that the sources emit, each with a file and a line.

    These are the texts in the calls of `Event` and `publish`, and in values that are annotated with `EventType`.
    """
    found: dict[str, tuple[Path, int]] = {}
    for path in sorted(path for path in (ROOT / "unfuse").rglob("*.py") if "testing" not in path.parts):
        for node in ast.walk(ast.parse(path.read_text())):
            texts: list[ast.AST] = []
            match node:
                case ast.Call(func=ast.Name("Event"), args=[kind, *_]):
                    texts = [kind]
                case ast.Call(func=ast.Attribute(attr="publish"), args=[kind, *_]):
                    texts = [kind]
                case ast.AnnAssign(value=ast.AST() as value) if "EventType" in ast.unparse(node.annotation):
                    texts = [*getattr(value, "values", [value])]
            for text in texts:
                for one in ast.walk(text):
                    if isinstance(one, ast.Constant) and isinstance(one.value, str):
                        found.setdefault(one.value, (path, one.lineno))
    return found


def example_events() -> list[Event]:
    """Return the events of the example."""
    data = re.findall(r"^data: (.*)$", EXAMPLE.read_text(), re.MULTILINE)
    return [Event(**json.loads(line)) for line in data]
