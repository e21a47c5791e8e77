"""Which addresses a webhook may have."""

from ipaddress import ip_address

import pytest

from service.control import webhooks
from service.errors import OptionRefused
from service.settings import Settings

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


def test_only_public_addresses_are_called() -> None:
    settings = Settings(_env_file=None)
    for text in PRIVATE:
        with pytest.raises(OptionRefused):
            webhooks._check_address(ip_address(text), "somewhere.example", settings)
    for text in PUBLIC:
        webhooks._check_address(ip_address(text), "somewhere.example", settings)
