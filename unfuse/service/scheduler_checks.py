"""Whether workers of this machine could work for a scheduler: what is in the way, and what to do about it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec

from unfuse import __version__
from unfuse.core.card import ModelCard
from unfuse.core.errors import ConfigError
from unfuse.core.messages import Refused, Welcome
from unfuse.models import card_of
from unfuse.service.addresses import schedulers, worker_trust
from unfuse.service.groups import Settings
from unfuse.service.machine_workers import STRANGER
from unfuse.service.plan import roles_apart
from unfuse.stores.results import sees
from unfuse.weights.source import is_local, resolve_source
from unfuse.wire.address import Trust, unix_path
from unfuse.wire.dealer import Dealer

ANSWER_S = 6.0  # the longest that a scheduler may take to answer
CLOCKS_S = 5.0  # seconds by which two clocks may differ


class Check(msgspec.Struct, frozen=True):
    """What was looked at, whether it is as it should be, and a sentence: if it is not, what to do."""

    what: str
    ok: bool
    says: str


async def checks(settings: Settings) -> list[Check]:
    """Port, key, version, clock, models and results of each scheduler that is named; later ones need the earlier."""
    found: list[Check] = []
    for address in schedulers(settings):
        port = await _port(address)
        found.append(port)
        if not port.ok:
            continue
        began = time.time()
        try:
            welcome = await _welcome(address, worker_trust(settings, [address]))
        except (ConfigError, ConnectionError) as error:
            found.append(Check("key", False, str(error)))
            continue
        if isinstance(welcome, str):
            found.append(Check("version", False, welcome))
            continue
        found.append(Check("key", True, f"{address} and this machine know each other"))
        found += [_version(welcome), _clock(welcome, (began + time.time()) / 2), *_models(welcome), _results(welcome)]
    return found


async def _port(address: str) -> Check:
    if path := unix_path(address):
        there = path.exists()
        return Check("port", there, f"{path} is there" if there else f"{path} is not there: start `unfuse serve` here")
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or 0
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        advice = f"start it there by `unfuse serve --listen {address}`, or correct the port"
        return Check("port", False, f"{host} answers, and nobody listens at its port {port}: {advice}")
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        advice = f"correct the address, or have firewalls and networks between let TCP to port {port} through"
        return Check("port", False, f"{host} cannot be reached ({reason}): {advice}")
    writer.close()
    return Check("port", True, f"{host}:{port} can be reached")


async def _welcome(address: str, trusted: Trust) -> Welcome | str:
    """The answer to a worker that comes, or why a version cannot be understood. Raises ConnectionError."""
    dealer = Dealer(address, trusted)
    try:
        answer = await dealer.call(STRANGER, ANSWER_S)
    except (TimeoutError, ConnectionError) as error:
        raise ConnectionError(
            f"{address} does not accept this machine's key ({str(error) or 'no answer'}): copy worker.key again from "
            "the folder that the scheduler has as --keys, or says when it starts"
        ) from error
    finally:
        await dealer.close()
    if isinstance(answer, Welcome):
        return answer
    why = answer.message if isinstance(answer, Refused) else type(answer).__name__
    return f"{address} does not understand this version, {__version__} ({why}): install the same one on both machines"


def _version(welcome: Welcome) -> Check:
    there = welcome.version
    if there == __version__:
        return Check("version", True, f"both have {__version__}")
    advice = f"install the same one here: pip install 'unfuse[serve]=={there}'"
    return Check("version", False, f"this machine has unfuse {__version__}, the scheduler {there}: {advice}")


def _clock(welcome: Welcome, now: float) -> Check:
    if not welcome.now:
        return Check("clock", True, "the scheduler does not tell its time")
    ahead = now - welcome.now
    if abs(ahead) <= CLOCKS_S:
        return Check("clock", True, f"both agree within {CLOCKS_S:g} s")
    way = "ahead of" if ahead > 0 else "behind"
    advice = "have both set by NTP (timedatectl set-ntp true); until then logs and times of files mislead"
    return Check("clock", False, f"the clock here is {abs(ahead):.0f} s {way} the scheduler's: {advice}")


def _models(welcome: Welcome) -> Iterator[Check]:
    for name, source, _ in welcome.models:
        try:
            resolve_source(source, None, ())
        except ConfigError as error:
            if source.startswith("/"):
                advice = "copy that folder here to the same path, or serve it there by its hub name"
                yield Check("models", False, f"{name} is in {source} on the scheduler's machine and not here: {advice}")
            else:
                yield Check("models", False, str(error))
        else:
            weights = "is here" if is_local(source) else f"comes when a worker starts, or now by `unfuse pull {name}`"
            yield Check("models", True, f"{name} {weights}")
    if not welcome.models:
        yield Check("models", False, "the scheduler serves no model yet: start it with one")


def _results(welcome: Welcome) -> Check:
    places, cards = welcome.places, list[ModelCard]()
    if sees(places.results, places.mark):
        return Check("results", True, "this machine can run all stages")
    for _, source, _ in welcome.models:
        with suppress(ConfigError):  # which the check of models says
            cards.append(card_of(source, resolve_source(source, None, ())))
    apart = roles_apart(cards)
    advice = "a shared folder at the same path, or --results s3://BUCKET/PREFIX there, would let this one run them"
    if cards and not apart:
        says = f"{places.results} is not seen here, and every stage of these models needs it: {advice}"
        return Check("results", False, says)
    runs = f" of the roles {', '.join(apart)} run here, the others" if apart else " that need it"
    return Check(
        "results", True,
        f"{places.results} is not seen here: stages{runs} stay on the scheduler's machine, which has to have workers "
        f"for them; {advice} too",
    )  # fmt: skip
