"""An OpenAI-compatible HTTP server before a Triton server: ``python -m pocket_client.gateway``.

It is a client of Triton over gRPC, so models are never loaded twice. A request goes through

    middleware.py   request id, Host check, API key, body limit, counters
    routes.py       one function an endpoint
    schema.py       the documented fields; what is not supported is refused by name
    translate.py    OpenAI fields to the wire's, one upstream request for each choice
    generation.py   runs the choices, watches for the client's disconnect, sends JSON or events
    render.py       the objects and chunks that go back
    responses*.py   the same for /v1/responses: fields, objects and events
    upstreams.py    the servers as one client: retries, health; uses affinity.py (which server),
                    breaker.py (which not), discovery.py (where they are)
    fair_queue.py   who runs next; rate_limit.py: who may send at all
    errors.py       every failure as OpenAI's error object

Needs the ``gateway`` extra. Imports of this package's modules may use the library beside it; the
library never imports the gateway.
"""
