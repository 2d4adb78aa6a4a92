"""The Flask application: the two admission routes, over the same functions as the short path before it."""

from collections.abc import Callable

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from webhook.decisions import PATH, REMEMBERED
from webhook.responding import MUTATE, TEXT, VALIDATE, HttpReply, Responder

# What to answer to whoever presents an authorization, asks for a namespace, and for how many.
Shown = Callable[[str, str, int], HttpReply]


def create_app(responder: Responder, max_body: int, decisions: Shown | None = None) -> Flask:
    """Build the application; `decisions` shows what was decided to those who may see it."""
    app = Flask("quotient", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = max_body

    @app.post(f"/{MUTATE}")
    def mutate() -> Response:
        return respond(responder, MUTATE)

    @app.post(f"/{VALIDATE}")
    def validate() -> Response:
        return respond(responder, VALIDATE)

    @app.get(PATH)
    def shown() -> Response:
        if decisions is None:
            return written(HttpReply(404, b"no decisions are kept here\n", TEXT))
        limit = request.args.get("limit", default=REMEMBERED, type=int)
        namespace = request.args.get("namespace", default="")
        return written(decisions(request.headers.get("Authorization", ""), namespace, limit))

    @app.errorhandler(HTTPException)
    def told(wrong: HTTPException) -> Response:
        status = wrong.code or 500
        return written(HttpReply(status, f"{wrong.description}\n".encode(), TEXT))

    return app


def respond(responder: Responder, route: str) -> Response:
    """Answer the request at hand."""
    body = request.get_data(cache=False)
    query = request.query_string.decode("latin-1")
    return written(responder.reply(route, request.headers.get("Content-Type", ""), query, body))


def written(reply: HttpReply) -> Response:
    """Write a reply as Flask wants it."""
    return Response(reply.body, status=reply.status, content_type=reply.content_type)
