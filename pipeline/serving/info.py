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
    names = [str(entry["id"]) for entry in _get(server, "/v1/models").get("data", [])]
    if len(names) != 1:
        raise ServerError(f"{server.url} serves {names or 'no model'}", "serve exactly one model, without adapters")
    return names[0]


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
