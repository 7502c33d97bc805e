"""Access control: API keys with their classes and limits, checked before a request is routed."""

import math
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from ipaddress import ip_network
from typing import NoReturn

from starlette.types import Scope

from batching.errors import InvalidInput
from batching.fair_share import Priority
from batching.token_bucket import EXCHANGE_S, TokenBucket
from server.core.api_keys import NO_KEY, PRIORITIES, ApiKey, Keyring
from server.core.request_context import RequestContext
from server.http.cross_site import CrossSiteRules, parse_address
from server.http.errors import HttpError
from server.http.json import Header
from server.http.paths import route_path

# No key is needed here: probes of a load balancer and a browser's request for an icon have none.
OPEN_PATHS = {"/health", "/ready", "/ping", "/metrics", "/version", "/favicon.ico"}


# Headers that name a flow of a client's requests; the first that is there holds. A client has this
# many flows at most: values with the same hash share one.
FLOW_HEADERS = (
    b"x-llm-d-inference-fairness-id",
    b"x-claude-code-session-id",
    b"session-id",
    b"x-session-id",
)
MAX_FLOWS = 256


def identify(scope: Scope, keyring: Keyring, rules: CrossSiteRules) -> None:
    """Set the request's context, and count it. HttpError or InvalidInput if it is refused."""
    key = key_from_headers(scope, keyring)
    if not keyring.required:
        rules.check(scope)
    client, id, flow = client_of(key, address_of(scope)), scope["record"].request_id, flow_of(scope)
    scope["context"] = RequestContext(client, id, flow, key.share, key.priority, key=key)
    if scope["method"] == "POST":
        if (priority := priority_of(scope, key)) != key.priority:
            scope["context"] = replace(scope["context"], priority=priority)
        count_request(key)
        scope["parallel"] = key.parallel


def key_from_headers(scope: Scope, keyring: Keyring) -> ApiKey:
    """Return the request's API key, NO_KEY where none is needed. HttpError (401) if invalid."""
    path = route_path(scope)
    if path == "/metrics" and not any(map(keyring.may_read_metrics, keys_in(scope))):
        raise unauthorized("a key of METRICS_KEYS is needed: Authorization: Bearer KEY")
    if not keyring.required or scope["method"] == "OPTIONS" or is_open(scope["method"], path):
        return NO_KEY
    if (key := next(filter(None, map(keyring.find, keys_in(scope))), None)) is None:
        raise unauthorized(
            "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
        )
    return key


def unauthorized(message: str) -> HttpError:
    return HttpError(401, message, headers=[(b"www-authenticate", b"Bearer")])


def keys_in(scope: Scope) -> list[bytes]:
    """Return the keys of both headers: clients send a login of another server beside theirs."""
    headers = dict(reversed(scope["headers"]))  # the first of repeated headers
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    bearer = key.strip() if scheme.lower() == b"bearer" else b""
    return [bearer, headers.get(b"x-api-key", b"").strip()]


def count_request(key: ApiKey) -> None:
    """Count a request against the limits of its key; HttpError (429) if one is used up. It runs
    until its response has ended."""
    check_tokens(key)
    if key.requests:
        _check_limit(key, key.requests, "requests")
    if key.parallel and not key.parallel.start():
        _refuse(key, f"{key.parallel.limit} parallel requests", EXCHANGE_S, "requests")
    if key.requests:
        key.requests.take(1, time.monotonic())


def check_tokens(key: ApiKey) -> None:
    """Raise HttpError (429) if the tokens of a key are used up."""
    if key.tokens:
        _check_limit(key, key.tokens, "tokens")


def _check_limit(key: ApiKey, bucket: TokenBucket, unit: str) -> None:
    if wait_s := bucket.wait_s(1, time.monotonic()):
        _refuse(key, f"{bucket.per_minute} {unit} per minute", wait_s, unit)


def _refuse(key: ApiKey, limit: str, wait_s: float, unit: str) -> NoReturn:
    seconds = math.ceil(wait_s)
    message = f"the limit of {limit} of the key {key.name!r} is reached; try again in {seconds} s"
    raise HttpError(429, message, headers=[(b"retry-after", b"%d" % seconds)], type=unit)


def limit_headers(key: ApiKey) -> Iterator[Header]:
    """Yield OpenAI's x-ratelimit headers: the limits of a key and the remaining units."""
    now = time.monotonic()
    for unit, bucket in ((b"requests", key.requests), (b"tokens", key.tokens)):
        if bucket:
            yield b"x-ratelimit-limit-" + unit, b"%d" % bucket.per_minute
            yield b"x-ratelimit-remaining-" + unit, b"%d" % max(0, bucket.left(now))
            yield b"x-ratelimit-reset-" + unit, b"%.3fs" % bucket.wait_s(bucket.per_minute, now)


def priority_of(scope: Scope, key: ApiKey) -> Priority:
    """Return the class of a request: that of X-Priority, else the highest that its key may use.
    InvalidInput for an unknown one, HttpError (403) for one that the key may not use."""
    allowed = key.priority
    for name, value in scope["headers"]:
        if name != b"x-priority":
            continue
        text = value[:20].decode("latin-1").strip().lower()
        if (priority := PRIORITIES.get(text)) is None:
            accepted = f"must be one of {', '.join(PRIORITIES)}, not {text!r}"
            raise InvalidInput.at("X-Priority", accepted)
        if priority < allowed:
            message = f"this key may use {allowed.name.lower()} and lower classes, not {text}"
            raise HttpError(403, message, "X-Priority", code="priority_not_allowed")
        return priority
    return allowed


def flow_of(scope: Scope) -> int:
    """Return the number of a request's flow, by the first of FLOW_HEADERS; 0 if it has none."""
    headers = dict(scope["headers"])
    for name in FLOW_HEADERS:
        if value := headers.get(name):
            return 1 + zlib.crc32(value) % (MAX_FLOWS - 1)
    return 0


def check_admin(scope: Scope) -> None:
    """Raise HttpError (403) unless the request may change which models and prefixes are loaded."""
    keyring: Keyring = scope["app"].keyring
    if keyring.has_admins:
        if any(key and key.admin for key in map(keyring.find, keys_in(scope))):
            return
        reason = "an admin key is needed, of ADMIN_KEYS or API_KEYS_FILE"
    elif keyring.required:
        reason = "an admin key is needed, of ADMIN_KEYS or API_KEYS_FILE, and there is none"
    elif scope["app"].settings.model_control:
        return
    else:
        reason = "the server has neither ADMIN_KEYS nor MODEL_CONTROL=1"
    message = f"this request may not load or unload models, or reset caches: {reason}"
    raise HttpError(403, message, code="admin_key_needed")


def client_of(key: ApiKey, address: str) -> bytes:
    """Return whose share a request counts for: its API key or, without keys, its address. An IPv6
    client has a network of addresses."""
    return key.id or network_of(address)


def address_of(scope: Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else ""


@lru_cache(maxsize=1024)
def network_of(address: str) -> bytes:
    if (parsed := parse_address(address)) is None:  # such as that of a Unix socket
        return address.encode()
    bits = 64 if parsed.version == 6 else 32
    return ip_network((parsed, bits), strict=False).network_address.packed


def is_open(method: str, path: str) -> bool:
    """Return whether no key is needed: for probes, and for the pages, which ask for one."""
    is_page = path in ("/", "/docs") and method in ("GET", "HEAD")
    return is_page or path in OPEN_PATHS or path.startswith("/assets/")
