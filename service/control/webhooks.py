"""Reports a job's end to the address in its request, signed as Standard Webhooks say.

The address is a stranger's choice: its name is resolved here, private addresses are refused, and the
connection goes to the address that was checked, since the name may be another's a moment later.
"""

import asyncio
import base64
import hashlib
import hmac
import socket
import ssl
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from queue import Empty, Queue
from urllib.parse import SplitResult, urlsplit

import httpx2

from schemas.request import ExtractRequest
from schemas.webhook import WebhookBody
from service.errors import OptionRefused, WebhookFailed
from service.report.wording import short
from service.settings import Settings
from service.store import Store, WebhookLease, webhooks
from service.work.keeper import Keeper, Kept
from service.work.runner import attempt, run_next

DEADLINE_S = 20.0
"""For the name, and as much for the connection and the answer's head together; its body is not read."""
SHORTEST_SECRET = 32
MOST_SAID = 200
"""Characters of an error: it may quote what a receiver sent."""
PUBLIC, NAT64 = IPv6Network("2000::/3"), IPv6Network("64:ff9b::/96")
NOT_PUBLIC = [IPv6Network(one) for one in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")]
"""Of `PUBLIC`: protocols, documentation, and what stands for an address of IPv4."""
OF_A_CLOUD = IPv4Address("168.63.129.16")
"""Public by its number, and Azure's own to each of its machines."""


def check_webhook(request: ExtractRequest, settings: Settings) -> None:
    """Refuse a webhook that could not be signed, or whose address is private. Raises OptionRefused."""
    if request.webhook is None:
        return
    secret(None, settings)
    parts = urlsplit(request.webhook.url)
    try:
        address = ip_address(str(parts.hostname))
    except ValueError:
        return  # a name, which is resolved when it is called
    _check_address(address, parts, settings)


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
        with attempt(f"the report of job {lease.job_id}") as end:
            store.write(webhooks.delivered, lease, _delivered(lease, settings))
        if end.error is not None:
            store.write(webhooks.undelivered, lease, end.error.problem())

    return run_next(
        store,
        keeper,
        take=lambda: webhooks.lease(store, owner, settings.lease_s),
        work=work,
        stopped=stopped,
        max_attempts=1,
    )


def _delivered(lease: WebhookLease, settings: Settings) -> int:
    """Send a report and return the status of a good answer. Raises WebhookFailed, OptionRefused."""
    parts = urlsplit(lease.url)
    cure = f"it is tried again for three days; 'quarry jobs redeliver {lease.job_id}' tries at once"
    try:
        addresses = _addresses(parts, settings)
        status = asyncio.run(_answered(lease, parts, addresses, settings))
    except TimeoutError as error:
        raise WebhookFailed(
            f"{parts.hostname} did not answer in time", field="webhook.url", cure=cure
        ) from error
    except (httpx2.HTTPError, OSError, ValueError) as error:
        said = short(f"{type(error).__name__}: {error}", MOST_SAID)
        detail = f"{parts.hostname} did not answer: {said}"
        raise WebhookFailed(detail, field="webhook.url", cure=cure) from error
    if not 200 <= status < 300:
        raise WebhookFailed(f"{parts.hostname} answered {status}", field="webhook.url", cure=cure)
    return status


async def _answered(lease: WebhookLease, parts: SplitResult, addresses: list[str], settings: Settings) -> int:
    """Send a report to the first address that takes a connection; return the status of the answer.

    Raises TimeoutError, HTTPError, OSError, OptionRefused.
    """
    from standardwebhooks import Webhook as Signature

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
    error: Exception = OSError("its name has no address")
    async with (
        asyncio.timeout(DEADLINE_S),
        httpx2.AsyncClient(verify=trusted, trust_env=False, timeout=None) as client,
    ):
        for address in addresses:
            sent = client.build_request(
                "POST",
                httpx2.URL(lease.url).copy_with(host=address),
                content=body,
                headers=headers,
                extensions={"sni_hostname": parts.hostname},
            )
            try:
                response = await client.send(sent, stream=True)
            except httpx2.ConnectError as refused:
                error = refused
                continue
            await response.aclose()
            return response.status_code
    raise error


def _addresses(parts: SplitResult, settings: Settings) -> list[str]:
    """Return the addresses of a host, all of which may be called.

    Raises TimeoutError, OSError, ValueError, OptionRefused.
    """
    answers: Queue[list[str] | Exception] = Queue(1)

    def resolve() -> None:  # in a thread that is left alone if it takes too long
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            answers.put(error)
        else:
            answers.put(list(dict.fromkeys(str(one[4][0]) for one in found)))

    threading.Thread(target=resolve, daemon=True).start()
    try:
        answer = answers.get(timeout=DEADLINE_S)
    except Empty:
        raise TimeoutError("the name was not resolved") from None
    if isinstance(answer, Exception):
        raise answer
    for address in answer:
        _check_address(ip_address(address), parts, settings)
    return answer


def _check_address(address: IPv4Address | IPv6Address, parts: SplitResult, settings: Settings) -> None:
    """Raise OptionRefused for one that is not public, unless the operator named its host."""
    if parts.hostname in {host.lower() for host in settings.webhook_hosts}:
        return
    inner: IPv4Address | None = address if isinstance(address, IPv4Address) else address.ipv4_mapped
    if isinstance(address, IPv6Address) and address in NAT64:
        inner = IPv4Address(int(address) & 0xFFFFFFFF)
    if inner is not None:
        is_public = inner.is_global and not inner.is_multicast and inner != OF_A_CLOUD
    else:
        is_public = address in PUBLIC and not any(address in other for other in NOT_PUBLIC)
    if not is_public:
        raise OptionRefused(
            f"{parts.hostname} is at {address}, which is not a public address",
            field="webhook.url",
            cure="name a public host, or ask the operator to put it into QUARRY_WEBHOOK_HOSTS",
        )
