"""Base64 in requests, with a limit before it is decoded."""

from binascii import a2b_base64

from quire.frontend.images.refused import Refused


def decode_base64(text: str, max_bytes: int) -> bytes:
    """Return the bytes of standard base64. Raises Refused: anything else, or too many of them."""
    if len(text) > (max_bytes + 2) // 3 * 4:
        raise Refused(f"must have at most {max_bytes} bytes (got about {len(text) * 3 // 4})")
    try:
        return a2b_base64(text, strict_mode=True)
    except ValueError:
        raise Refused("must have standard base64 with padding") from None
