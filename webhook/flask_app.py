"""The Flask application: the two admission routes and `/decisions`.

It serves what the short path does not; both use the same `Responder`, so a review gets the same answer either way.
"""

from collections.abc import Callable

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from webhook.decisions import MAX_DECISIONS, PATH
from webhook.responding import MUTATE, TEXT, VALIDATE, HttpReply, Responder

MAX_PATH_IN_MESSAGE = 100

# Authorization header, namespace ("" for all) and limit to the reply.
ListDecisions = Callable[[str, str, int], HttpReply]


def create_app(responder: Responder, max_body: int, list_decisions: ListDecisions | None = None) -> Flask:
    """Build the application. `list_decisions` also checks that the caller may see them; None: no decision log."""
    app = Flask("quotient", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = max_body

    @app.post(f"/{MUTATE}")
    def mutate() -> Response:
        return respond(responder, MUTATE)

    @app.post(f"/{VALIDATE}")
    def validate() -> Response:
        return respond(responder, VALIDATE)

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
        message = f"{request.method} {request.path[:MAX_PATH_IN_MESSAGE]}: {status} {error.name}\n"
        return to_flask(HttpReply(status, message.encode(errors="replace"), TEXT))

    return app


def respond(responder: Responder, route: str) -> Response:
    """Answer the current request of Flask's context."""
    body = request.get_data(cache=False)
    query = request.query_string.decode("latin-1")
    return to_flask(responder.reply(route, request.headers.get("Content-Type", ""), query, body))


def to_flask(reply: HttpReply) -> Response:
    return Response(reply.body, status=reply.status, content_type=reply.content_type)
