"""Reports a job's end to the address in its request, signed as Standard Webhooks say.

The address is a stranger's choice: its name is resolved here, private addresses are refused, and the
connection goes to the address that was checked, since the name may be another's a moment later.
"""

import asyncio
import base64
import hashlib
import hmac
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import httpx2

from schemas.request import ExtractRequest
from schemas.webhook import Webhook, WebhookBody
from service.errors import OptionRefused, WebhookFailed
from service.settings import Settings
from service.store import Store, WebhookLease, webhooks
from service.work.keeper import Keeper, Kept
from service.work.runner import run_next

DEADLINE_S = 20.0
"""For the name, the connection and the answer's head together; its body is not read."""
SHORTEST_SECRET = 32
NAT64 = IPv6Network("64:ff9b::/96")


def check_webhook(request: ExtractRequest, settings: Settings) -> None:
    """Refuse a webhook that could not be signed, or whose address is private. Raises OptionRefused."""
    if request.webhook is not None:
        secret(None, settings)
        if request.webhook.names_address:
            _check_address(ip_address(str(request.webhook.parts.hostname)), request.webhook, settings)


def secret(owner: str | None, settings: Settings) -> str:
    """Return what the webhooks of an owner are signed with, so that no owner can sign for another.

    Raises OptionRefused.
    """
    cure = f"let QUARRY_WEBHOOK_SECRET_FILE name a file of {SHORTEST_SECRET} random characters or more"
    if settings.webhook_secret_file is None:
        raise OptionRefused("this service signs no webhooks", field="webhook", cure=cure)
    try:
        root = settings.webhook_secret_file.read_bytes().strip()
    except OSError as error:
        detail = f"the secret of webhooks cannot be read: {error.strerror}"
        raise OptionRefused(detail, field="webhook", cure=cure) from error
    if len(root) < SHORTEST_SECRET:
        raise OptionRefused("the secret of webhooks is too short", field="webhook", cure=cure)
    of_owner = hmac.new(root, f"quarry webhooks of {owner or ''}".encode(), hashlib.sha256)
    return f"whsec_{base64.b64encode(of_owner.digest()).decode()}"


def run_webhooks(
    store: Store, settings: Settings, owner: str, stopped: Callable[[], bool], keeper: Keeper
) -> bool:
    """Deliver one report; return whether there was one. One that is not taken is tried again for days."""

    def work(lease: WebhookLease, _: Kept) -> None:
        try:
            status = asyncio.run(_delivered(lease, settings))
        except (WebhookFailed, OptionRefused) as error:
            store.write(webhooks.undelivered, lease, error.problem())
        else:
            store.write(webhooks.delivered, lease, status)

    return run_next(
        store,
        keeper,
        take=lambda: webhooks.lease(store, owner, settings.lease_s),
        work=work,
        stopped=stopped,
        max_attempts=1,
    )


async def _delivered(lease: WebhookLease, settings: Settings) -> int:
    """Send a report and return the status of a good answer. Raises WebhookFailed, OptionRefused."""
    from standardwebhooks import Webhook as Signature

    job, parts = lease.job, lease.webhook.parts
    body = WebhookBody.model_validate(
        {"type": f"job.{job.state}", "timestamp": job.updated_at, "data": job}
    ).model_dump_json()
    number, now = f"{job.id}-{lease.item}", datetime.now(UTC)
    headers = {
        "Host": parts.netloc,
        "Content-Type": "application/json",
        "User-Agent": "quarry",
        "webhook-id": number,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Signature(secret(job.owner, settings)).sign(number, now, body),
    }
    error: Exception | None = None
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            httpx2.AsyncClient(verify=ssl.create_default_context(), trust_env=False, timeout=None) as client,
        ):
            for address in await _addresses(lease.webhook, settings):
                url = httpx2.URL(lease.webhook.url).copy_with(host=address)
                named = {"sni_hostname": parts.hostname}
                try:
                    async with client.stream(
                        "POST", url, content=body, headers=headers, extensions=named
                    ) as response:
                        if response.is_success:
                            return response.status_code
                        raise _failed(lease, f"answered {response.status_code}")
                except httpx2.ConnectError as refused:
                    error = refused
    except (TimeoutError, httpx2.TransportError, OSError) as raised:
        error = raised
    raise _failed(lease, f"did not answer: {str(error) or type(error).__name__}") from error


async def _addresses(webhook: Webhook, settings: Settings) -> list[str]:
    """Return the addresses of a host, all of which may be called. Raises OSError, OptionRefused."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(webhook.parts.hostname, webhook.parts.port or 443, type=1)
    addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
    for address in addresses:
        _check_address(ip_address(address), webhook, settings)
    return addresses


def _check_address(address: IPv4Address | IPv6Address, webhook: Webhook, settings: Settings) -> None:
    """Raise OptionRefused for one that is not public, unless the operator named its host."""
    if webhook.parts.hostname in settings.webhook_hosts:
        return
    inner = address
    if isinstance(address, IPv6Address):
        embedded = IPv4Address(int(address) & 0xFFFFFFFF) if address in NAT64 else None
        inner = address.ipv4_mapped or address.sixtofour or embedded or address
    if not (inner.is_global and address.is_global) or inner.is_multicast:
        raise OptionRefused(
            f"{webhook.parts.hostname} is at {address}, which is not a public address",
            field="webhook.url",
            cure="name a public host, or ask the operator to put it into QUARRY_WEBHOOK_HOSTS",
        )


def _failed(lease: WebhookLease, what: str) -> WebhookFailed:
    cure = f"it is tried again for three days; 'quarry jobs redeliver {lease.job_id}' tries at once"
    return WebhookFailed(f"{lease.webhook.parts.hostname} {what}", field="webhook.url", cure=cure)
