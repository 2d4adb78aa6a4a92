"""A webhook whose event loop hangs as soon as it is ready: the process of `standalone`, and its arguments."""

import time

from tests.webhook import standalone
from webhook import gunicorn_server
from webhook.gunicorn_server import WebhookWorker

TICKS = 8

if __name__ == "__main__":
    gunicorn_server.HANG_TIMEOUT_S = 1
    tick, count = WebhookWorker._tick, 0

    async def hang(worker: WebhookWorker) -> None:
        global count  # noqa: PLW0603 - of a script
        count += 1
        await tick(worker)
        if count > TICKS:
            time.sleep(60)  # noqa: ASYNC251 - that is what is wrong with it

    WebhookWorker._tick = hang  # type: ignore[method-assign, assignment]
    standalone.main()
