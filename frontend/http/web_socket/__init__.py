"""WebSocket connections (RFC 6455), on the connections and behind the checks of HTTP."""
