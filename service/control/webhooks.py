"""Reports a job's end to the URL in its request, signed according to Standard Webhooks.

The URL is untrusted: its host name is resolved here, private addresses are refused, and the connection is
made to the checked address, since the name may resolve to another one a moment later.
"""

import asyncio
import base64
import hashlib
import hmac
import socket
import ssl
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

import httpx2
from anyio import to_thread

from schemas.request import ExtractRequest
from schemas.webhook import WebhookBody
from service.errors import OptionRefused, WebhookFailed
from service.report.wording import short
from service.retry_after import asked_wait_s
from service.settings import Settings
from service.store import WebhookLease, webhooks
from service.work.keeper import Kept
from service.work.runner import LoopContext, attempt, run_next

DEADLINE_S = 20.0
"""Time limit for name resolution, connection and the answer's head together; its body is not read."""
LONGEST_WAIT_S = 86_400.0
"""The longest wait that a receiver may ask for."""
SHORTEST_SECRET = 32
HOLD_IPV4 = IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96")
"""IPv6 networks whose addresses hold an IPv4 address in the last 32 bits: mapped, and NAT64."""
NOT_PUBLIC = [
    ip_network(one)
    for one in ("2002::/16", "3fff::/20", "fec0::/10", "192.0.0.0/24", "192.88.99.0/24", "168.63.129.16")
]
"""Networks that `ipaddress` considers public, some only in some versions of Python: 6to4, documentation,
site-local, protocol assignments, 6to4 relay anycast, and Azure's virtual host address.
"""


def check_webhook(request: ExtractRequest, settings: Settings) -> None:
    """Refuse a webhook that could not be signed, or whose address is private. Raises OptionRefused."""
    if request.webhook is None:
        return
    secret(None, settings)
    host = urlsplit(request.webhook.url).hostname or ""
    with suppress(ValueError):  # of a host name, which is resolved at delivery
        _check_address(ip_address(host), host, settings)


def secret(owner: str | None, settings: Settings) -> str:
    """Return the secret that signs an owner's webhooks; each owner has a different one.

    Raises OptionRefused.
    """
    cure = f"set QUARRY_WEBHOOK_SECRET_FILE to a file that holds {SHORTEST_SECRET} random characters or more"
    file = settings.webhook_secret_file
    try:
        root = b"" if file is None else file.read_bytes().strip()
    except OSError as error:
        detail = f"the secret of webhooks cannot be read: {error.strerror}"
        raise OptionRefused(detail, field="webhook", cure=cure) from error
    if len(root) < SHORTEST_SECRET:
        raise OptionRefused("this service has no secret to sign webhooks with", field="webhook", cure=cure)
    of_owner = hmac.new(root, f"quarry webhooks of {owner or ''}".encode(), hashlib.sha256)
    return f"whsec_{base64.b64encode(of_owner.digest()).decode()}"


def run_webhooks(context: LoopContext) -> bool:
    """Deliver one report; return whether there was one. A report that is not accepted is retried for days."""
    store, settings = context.store, context.settings

    def work(lease: WebhookLease, _: Kept) -> None:
        status: int | None = None
        with attempt(f"the report of job {lease.job_id}") as end:
            status = _delivered(lease, settings)
        if status is not None:
            store.write(webhooks.delivered, lease, status)
        elif end.error is not None:
            store.write(webhooks.undelivered, lease, end.error.problem(), end.error.wait_s)

    take = partial(webhooks.lease, store, context.owner, settings.lease_s)
    return run_next(context, take, work, max_attempts=1)


def _delivered(lease: WebhookLease, settings: Settings) -> int:
    """Send a report; return the answer's status if no further attempt is needed: success, or 410.

    Raises WebhookFailed, OptionRefused.
    """
    host = urlsplit(lease.url).hostname
    cure = f"it is tried again for three days; 'quarry jobs redeliver {lease.job_id}' tries at once"
    try:
        answer = asyncio.run(_answer(lease, settings))
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
        why = ": " + short(f"{type(error).__name__}: {error}")
        why = " in time" if isinstance(error, TimeoutError) else why
        raise WebhookFailed(f"{host} did not answer{why}", field="webhook.url", cure=cure) from error
    if answer.is_success or answer.status_code == httpx2.codes.GONE:
        return answer.status_code
    failed = WebhookFailed(f"{host} answered {answer.status_code}", field="webhook.url", cure=cure)
    failed.wait_s = asked_wait_s(answer.headers.get("Retry-After", ""), LONGEST_WAIT_S) or 0.0
    raise failed


async def _answer(lease: WebhookLease, settings: Settings) -> httpx2.Response:
    """Send a report to one of the host's addresses, another at each attempt; return the answer's head.

    Raises TimeoutError, HTTPError, OSError, ValueError, OptionRefused.
    """
    from standardwebhooks import Webhook as Signature

    parts = urlsplit(lease.url)
    host = parts.hostname or ""
    job, number, now = lease.job, f"{lease.job_id}-{lease.item}", datetime.now(UTC)
    told = {"type": f"job.{job.state}", "timestamp": job.updated_at, "data": job}
    body = WebhookBody.model_validate(told).model_dump_json()
    headers = {
        "Host": parts.netloc,
        "Content-Type": "application/json",
        "User-Agent": "quarry",
        "webhook-id": number,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Signature(secret(job.owner, settings)).sign(number, now, body),
    }
    trusted = ssl.create_default_context()
    async with (
        asyncio.timeout(DEADLINE_S),
        httpx2.AsyncClient(verify=trusted, trust_env=False, timeout=None) as client,
    ):
        # A resolver that takes longer is abandoned; it ends by its own time limit.
        addresses = await to_thread.run_sync(
            _addresses, host, parts.port or 443, settings, abandon_on_cancel=True
        )
        sent = client.build_request(
            "POST",
            httpx2.URL(lease.url).copy_with(host=addresses[(lease.attempts - 1) % len(addresses)]),
            content=body,
            headers=headers,
            extensions={"sni_hostname": host},
        )
        answer = await client.send(sent, stream=True)
        await answer.aclose()
    return answer


def _addresses(host: str, port: int, settings: Settings) -> list[str]:
    """Return a host's addresses, each checked to be allowed. Raises OSError, ValueError, OptionRefused."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
    for address in addresses:
        _check_address(ip_address(address), host, settings)
    return addresses


def _check_address(address: IPv4Address | IPv6Address, host: str, settings: Settings) -> None:
    """Raise OptionRefused for an address that is not public, unless the operator has allowed its host."""
    if host in {named.lower() for named in settings.webhook_hosts}:
        return
    real = IPv4Address(int(address) & 0xFFFFFFFF) if any(address in net for net in HOLD_IPV4) else address
    is_other = real.is_multicast or real.is_reserved or any(real in net for net in NOT_PUBLIC)
    if is_other or not real.is_global:
        # Without the address: whoever submits jobs is not to learn where names of this network are.
        raise OptionRefused(
            f"{host} has an address that is not public",
            field="webhook.url",
            cure="name a public host, or ask the operator to put it into QUARRY_WEBHOOK_HOSTS",
        )
