"""The settings of ``quire serve`` besides the engine's."""

from typing import Annotated

import msgspec

from quire.protocol.settings import Setting

SERVER = "Server"


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the front end as a user gives them."""

    host: Annotated[str, Setting(SERVER, "address to listen on", metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, Setting(SERVER, "port to listen on; 0: any free one", range=(0, 65535), metavar="PORT")] = 8000
    served_model_name: Annotated[
        list[str] | None,
        Setting(SERVER, "one or more names that clients may use", metavar="NAME", default="the folder's name"),
    ] = None
    api_key: Annotated[
        list[str] | None,
        Setting(
            SERVER, "one or more API keys accepted by the server", metavar="KEY", default="the variable QUIRE_API_KEY"
        ),
    ] = None
    max_num_queued_reqs_per_key: Annotated[
        int,
        Setting(
            SERVER,
            "most answers of one API key that wait for their first token; further requests get 429; 0: no limit. "
            "The 429 has `Retry-After`",
            range=(0, 2**31 - 1),
        ),
    ] = 0
    api_server_count: Annotated[
        int,
        Setting(
            SERVER,
            "front-end processes that share the port. When one dies, streams of the others continue. Metrics of "
            "requests, and limits per key and on connections, hold in each process separately",
            range=(1, 64),
        ),
    ] = 1
    standby_workers: Annotated[
        bool,
        Setting(
            SERVER,
            "keep a started process per worker, to take over when one dies. Its imports are done; it needs some 200 MB",
        ),
    ] = True
    health_timeout: Annotated[
        float,
        Setting(
            SERVER,
            "seconds without a token although a request waits for one, after which /health is 503. A recovery may "
            "take as long; `/ready` becomes 503, too",
            range=(0.1, 86400),
            metavar="SECONDS",
        ),
    ] = 60.0
    shutdown_timeout: Annotated[
        float,
        Setting(
            SERVER,
            "seconds that running requests may take after SIGTERM. A second signal stops at once",
            range=(0, 86400),
            metavar="SECONDS",
        ),
    ] = 30.0
    simulate: Annotated[
        str | None,
        Setting(
            SERVER,
            "run no model: steps take as long as table:DIR, roofline:CONFIG,CHIP, fitted:FILE or constant:MS "
            "says. Answers are nonsense, and MODEL needs no weights: [traces](traces.md)",
            metavar="COST",
        ),
    ] = None
