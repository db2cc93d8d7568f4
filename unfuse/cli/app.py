"""All verbs. They are light to import: what a verb needs, it imports when it runs."""

from __future__ import annotations

from unfuse.cli import (
    chat,
    compare,
    config,
    dead,
    disk,
    doctor,
    generate,
    keys,
    models,
    pull,
    requests,
    serve,
    version,
    worker,
    workers,
)
from unfuse.cli.verbs import Verbs

app = Verbs("Serve a generative model as stages, each from its own pool of workers.", add_completion=True)
app.verb()(generate.generate)
app.verb()(chat.chat)
app.verb("info")(serve.serve)
app.verb("info")(worker.worker)
app.verb()(pull.pull)
app.verb()(models.models)
app.add_typer(requests.app, name="requests")
app.add_typer(dead.app, name="dead")
app.verb()(workers.workers)
app.verb()(workers.pools)
app.verb()(doctor.doctor)
app.verb()(compare.compare)
app.verb()(disk.disk)
app.add_typer(keys.app, name="keys")
app.add_typer(config.app, name="config")
app.verb()(version.version)
