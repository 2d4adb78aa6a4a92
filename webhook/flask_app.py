"""The Flask application: the two admission routes and `/decisions`.

It serves what the short path does not; both use the same `Responder`, so a review gets the same answer either way.
"""

from collections.abc import Callable

from flask import Flask, Response, abort, request
from werkzeug.exceptions import HTTPException

from vcuda.webhook_paths import MUTATE, PLAIN, VALIDATE, parse_path
from webhook.callers import Caller, CallerPaths
from webhook.decisions import MAX_DECISIONS, PATH
from webhook.responding import TEXT, HttpReply, Responder

MAX_PATH_IN_MESSAGE = 100

# Authorization header, namespace ("" for all) and limit to the reply.
ListDecisions = Callable[[str, str, int], HttpReply]


def create_app(
    responder: Responder,
    max_body: int,
    list_decisions: ListDecisions | None = None,
    paths: CallerPaths | None = None,
) -> Flask:
    """Build the application. `list_decisions` also checks that the caller may see them; None: no decision log.

    Without `paths`, the plain ones are served.
    """
    app = Flask("quotient", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = max_body
    accepted = paths or CallerPaths()

    route = f"<any({MUTATE}, {VALIDATE}):route>"

    @app.post(f"/{route}")
    @app.post(f"/{route}/<secret>")
    def review(route: str, secret: str = PLAIN) -> Response:
        if parse_path(request.path) is None or (caller := accepted.identify(secret)) is Caller.REFUSED:
            abort(404)
        return respond(responder, route, is_known=caller is Caller.KNOWN)

    @app.get(PATH)
    def decisions() -> Response:
        if list_decisions is None:
            return to_flask(HttpReply(404, b"this server has no decision log\n", TEXT))
        limit = request.args.get("limit", default=MAX_DECISIONS, type=int)
        namespace = request.args.get("namespace", default="")
        return to_flask(list_decisions(request.headers.get("Authorization", ""), namespace, limit))

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> Response:
        # Not `error.description`: that is HTML prose for browsers ("check your spelling and try again").
        status = error.code or 500
        # Without the rest of the path, which may be a secret.
        path = "/".join(request.path.split("/", 2)[:2])
        message = f"{request.method} {path[:MAX_PATH_IN_MESSAGE]}: {status} {error.name}\n"
        return to_flask(HttpReply(status, message.encode(errors="replace"), TEXT))

    return app


def respond(responder: Responder, route: str, *, is_known: bool) -> Response:
    """Answer the current request of Flask's context."""
    body = request.get_data(cache=False)
    query = request.query_string.decode("latin-1")
    content_type = request.headers.get("Content-Type", "")
    return to_flask(responder.reply(route, content_type, query, body, is_known=is_known))


def to_flask(reply: HttpReply) -> Response:
    return Response(reply.body, status=reply.status, content_type=reply.content_type)
