"""Images of URLs: hosts and addresses that are allowed, redirects, limits, and what a client learns of failures."""

import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_files import image_file
from image_hosts import WORLD, Resolver, world

from quire.frontend.images.addresses import is_public, resolve_public
from quire.frontend.images.fetch import Fetcher
from quire.frontend.images.refused import Refused
from quire.frontend.network_options import check_network
from quire.frontend.serve_options import ServeOptions
from quire.protocol.errors import ConfigError

HOST = "http://cdn.example.com"
TLS = ssl.create_default_context()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with world() as server:
        yield server.server_port


def fetched(url: str, port: int, seconds: float = 20.0, max_bytes: int = 10_000) -> bytes | str:
    """Return what is fetched, or why it is refused."""
    resolver = Resolver(port)
    try:
        domains = ["cdn.example.com", "*.cdn.example.com", "other.example.com:8443"]
        return Fetcher(domains, max_bytes, seconds, resolver, TLS).fetch(url)
    except Refused as refused:
        assert not any(word in refused.text for word in ("secret", *WORLD.values()) if word not in url)
        return refused.text


@pytest.mark.parametrize("url", [f"{HOST}/image", "HTTP://A.CDN.example.com:80/image?x#y", f"{HOST}/hops/2"])
def test_allowed_hosts(url: str, port: int) -> None:
    assert fetched(url, port) == image_file()


NOT_ALLOWED = "must name a host that --allowed-media-domains allows"
FORM = "must be http(s)://HOST/PATH"
NO_ADDRESS = "names a host without a public address"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        *((url, NOT_ALLOWED) for url in ("http://evil.example.com/", "http://xcdn.example.com/", "http://127.0.0.1/")),
        *((f"http://{host}/image", NOT_ALLOWED) for host in ("2130706433", "0x7f.1", "0177.0.0.1", "127.1")),
        ("http://localhost/image", NOT_ALLOWED),
        *((url, NOT_ALLOWED) for url in (f"{HOST}:81/", "https://cdn.example.com:80/", f"{HOST}./", "http://-/", "http://./")),
        ("http://other.example.com/image", NOT_ALLOWED),
        *((f"http://{host}/image", FORM) for host in ("[::1]", "[::ffff:127.0.0.1]", "u:p@cdn.example.com")),
        *((f"http://{letter}.cdn.example.com/image", FORM) for letter in ("ｃ", "\u017f", "\u212a")),
        *((url, FORM) for url in ("http:/cdn.example.com", "http://", f"{HOST}\\@x/", f"{HOST}/ \n", "ftp://cdn.example.com/")),
        *((url, FORM) for url in (f" {HOST}/", f"{HOST}/\r\nX: y", f"{HOST}:99999999/", f"{HOST}/{'x' * 9000}", "file:///etc")),
        *((f"http://{name}.cdn.example.com/image", NO_ADDRESS) for name in ("inside", "loop", "link", "mapped")),
        *((f"http://{name}.cdn.example.com/image", NO_ADDRESS) for name in ("six", "none")),
        *((f"{HOST}/to/{url}", f"redirects to a URL that {NOT_ALLOWED}") for url in ("http://127.0.0.1/", "//x/")),
        *((f"{HOST}/to/{url}", f"redirects to a URL that {FORM}") for url in ("file:///etc/passwd", "http://[::1]/", "gopher://x")),
        *((f"{HOST}/to/http://{name}.cdn.example.com/", NO_ADDRESS) for name in ("inside", "loop", "link", "mapped")),
        (f"{HOST}/hops/3", "has more than 3 redirects"),
        (f"{HOST}/missing", "could not be fetched: its host answered with status 404"),
        (f"{HOST}/bytes/10001", "must be a file of at most 10000 bytes"),
        (f"{HOST}/chunked", "must be a file of at most 10000 bytes"),
        (f"{HOST}/raw", "could not be fetched"),
        ("https://cdn.example.com/image", "could not be fetched"),  # no TLS there
    ],
)  # fmt: skip
def test_refusals(url: str, reason: str, port: int) -> None:
    found = fetched(url, port)
    assert isinstance(found, str) and found.startswith(reason)


@pytest.mark.parametrize("path", ["drip", "drip-head"])
def test_slow_hosts_do_not_extend_the_time(path: str, port: int) -> None:
    assert fetched(f"{HOST}/{path}/", port, seconds=0.3) == "could not be fetched within 0.3 s"


def test_each_name_is_resolved_once_per_request(port: int) -> None:
    resolver = Resolver(port)
    Fetcher(["cdn.example.com", "a.cdn.example.com"], 10_000, resolve=resolver).fetch(
        f"{HOST}/to/http://a.cdn.example.com/image"
    )
    assert resolver.resolved == ["cdn.example.com", "a.cdn.example.com"]


def test_request_tells_nothing_of_the_server(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # an environment's proxy is not used
    found = fetched(f"{HOST}/echo", port)
    assert found == b"accept accept-encoding connection host user-agent"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *((address, True) for address in ("93.184.216.34", "8.8.8.8", "2606:4700::1111")),
        *((address, False) for address in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254")),
        *((address, False) for address in ("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1")),
        *((address, False) for address in ("::1", "::", "fe80::1%lo", "fc00::1", "ff02::1", "::ffff:8.8.8.8")),
        *((address, False) for address in ("::8.8.8.8", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:db8::1")),
        *((address, False) for address in ("2001:0:7f00:1::", "168.63.129.16", "192.0.0.192")),
    ],
)  # fmt: skip
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(address) == expected


@pytest.mark.parametrize("found", [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], [], None])
def test_all_addresses_of_a_name_must_be_public(found: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, port: int, type: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if found is None:
            raise socket.gaierror
        return [(socket.AF_INET, type, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(Refused, match=NO_ADDRESS):
        resolve_public("cdn.example.com", 443)


def test_public_addresses_are_resolved() -> None:
    assert resolve_public("8.8.8.8", 443) == [("8.8.8.8", 443)]


@pytest.mark.full
def test_certificates_are_checked(tmp_path: Path) -> None:
    """By name, and by an authority that this machine trusts."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=cdn.example.com"
    names = ["-addext", "subjectAltName=DNS:cdn.example.com"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with world(serving) as server:
        for name, tls, expected in (
            ("cdn.example.com", trusting, image_file()),
            ("a.cdn.example.com", trusting, "could not be fetched: the certificate is not valid"),
            ("cdn.example.com", TLS, "could not be fetched: the certificate is not valid"),
        ):
            fetcher = Fetcher(
                ["cdn.example.com", "a.cdn.example.com"], 10_000, resolve=Resolver(server.server_port), tls=tls
            )
            try:
                found: bytes | str = fetcher.fetch(f"https://{name}/image")
            except Refused as refused:
                found = refused.text
            assert found == expected
        with pytest.raises(Refused, match="redirects from https to http"):
            Fetcher(["cdn.example.com"], 10_000, resolve=Resolver(server.server_port), tls=trusting).fetch(
                "https://cdn.example.com/to/http://cdn.example.com/"
            )


@pytest.mark.parametrize("domain", ["", "*", "http://x", "x/", "*.", "X.com", "a b", "[::1]", "*.*.x", "x:"])
def test_domains(domain: str) -> None:
    check_network(ServeOptions(allowed_media_domains=["x", "*.x.com", "x.com:8443", "93.184.216.34"]))
    with pytest.raises(ConfigError, match="--allowed-media-domains must be host names"):
        check_network(ServeOptions(allowed_media_domains=[domain]))
