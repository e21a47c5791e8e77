"""Which addresses a webhook may have."""

from pathlib import Path

import pytest

from schemas.request import ExtractRequest
from schemas.webhook import Webhook
from service.control.webhooks import check_webhook
from service.errors import OptionRefused
from service.settings import Settings
from tests.support.store_cases import a_request

PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
    *("224.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1", "240.0.0.1"),
    *("::1", "::", "fe80::1", "fd00::1", "ff02::1", "2001:db8::1"),
    *(
        "fec0::1",
        "64:ff9b:1::7f00:1",
        "::127.0.0.1",
        "::ffff:0:127.0.0.1",
        "3fff::1",
        "5f00::1",
        "168.63.129.16",
    ),
    *(
        "192.0.0.192",
        "192.88.99.1",
        "::ffff:168.63.129.16",
        "::ffff:224.0.0.1",
        "2001:0:1::1",
        "64:ff9b::224.0.0.1",
    ),
    *("::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::10.0.0.1", "64:ff9b::7f00:1", "2002:a00:1::1"),
]
PUBLIC = ["93.184.215.14", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::1.1.1.1", "::ffff:1.1.1.1"]


@pytest.fixture
def signed(tmp_path: Path) -> Settings:
    (tmp_path / "secret").write_text("s" * 32)
    return Settings(webhook_secret_file=tmp_path / "secret")


def reported_to(address: str) -> ExtractRequest:
    host = f"[{address}]" if ":" in address else address
    return a_request().model_copy(update={"webhook": Webhook(url=f"https://{host}/")})


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_refused(address: str, signed: Settings) -> None:
    with pytest.raises(OptionRefused, match="an address that is not public"):
        check_webhook(reported_to(address), signed)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_may_be_called(address: str, signed: Settings) -> None:
    check_webhook(reported_to(address), signed)
