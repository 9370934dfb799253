"""The prefix of all paths behind a reverse proxy that does not remove it."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """The outermost middleware: removes ``prefix``, so that all others see one path. Paths without it are kept."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith(f"{self._prefix}/"):
            scope = {**scope, "path": path.removeprefix(self._prefix)}
        await self._app(scope, receive, send)
