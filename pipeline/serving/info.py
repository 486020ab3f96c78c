"""What a server says about itself."""

from __future__ import annotations

import json
import urllib.request
from http.client import HTTPException
from typing import Any

from pipeline.errors import ServerError
from pipeline.serving.process import Server


def served_model(server: Server) -> str:
    """The name of the one model that is served. Raises ServerError for none or several."""
    return str(_model(server)["id"])


def served_limit(server: Server) -> int:
    """The most tokens of a request, prompt and answer together. Raises ServerError when it is not told."""
    limit = _model(server).get("max_model_len")
    if not isinstance(limit, int):
        raise ServerError(f"{server.url} tells no max_model_len", "use vLLM or `enginegate serve`")
    return limit


def _model(server: Server) -> dict[str, Any]:
    entries: list[dict[str, Any]] = _get(server, "/v1/models").get("data", [])
    if len(entries) != 1:
        names = [entry["id"] for entry in entries]
        raise ServerError(f"{server.url} serves {names or 'no model'}", "serve exactly one model, without adapters")
    return entries[0]


def server_version(server: Server) -> str:
    """The version in ``/version``, which vLLM and our own server have."""
    return str(_get(server, "/version").get("version", "unknown"))


def _get(server: Server, path: str) -> dict[str, Any]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(server.url + path, timeout=30) as response:
            content: dict[str, Any] = json.load(response)
            return content
    except (OSError, HTTPException, ValueError) as error:
        raise ServerError(
            f"{server.name}: {server.url}{path}: {error}", "is this an OpenAI-compatible server (vLLM)?"
        ) from error
