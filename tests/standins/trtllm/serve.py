"""Stand-in for ``trtllm-serve``: the documented options, routes and request fields; answers by torch."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

from pipeline.engines.tensorrt_llm.documented import (
    COMPLETION_FIELDS,
    KV_CACHE_FIELDS,
    LLM_FIELDS,
    SERVE_OPTIONS,
    TRT_LLM_FIELDS,
)
from tests.standins.trtllm import fault, settings
from tests.standins.trtllm.engine import read_engine


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--help"]:
        sys.exit(print("Usage: trtllm-serve [OPTIONS] COMMAND [ARGS]...\n\nCommands:\n  disaggregated\n  serve"))
    args = _parser().parse_args(words[1:] if words[:1] == ["serve"] else words)  # `serve` is the default command
    if settings()["profile"] == "pytorch" and args.backend in ("trt", "tensorrt"):
        sys.exit(2)  # click refuses the choice
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((args.host, args.port))
    except OSError as error:
        raise RuntimeError(f"Failed to bind socket to {args.host}:{args.port}: {error}") from error
    options = _read_options(args)
    folder, engine = Path(args.model), args.backend in ("trt", "tensorrt")
    _check_tokenizer(Path(args.tokenizer or args.model))
    _check_model(folder, engine)
    if fault() == "serve-dies":
        sys.exit("[TRT-LLM] [E] Failed to initialize executor on rank 0: CUDA error")
    _serve(bound, folder, engine, args, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trtllm-serve", allow_abbrev=False)
    parser.add_argument("model")
    for option, takes in SERVE_OPTIONS.items():
        if option in settings()["without"].get("trtllm-serve", []):
            continue
        if takes == "flag":
            parser.add_argument(option, action="store_true")
        else:
            kind: Any = {"int": int, "float": float}.get(takes, str)
            choices = takes.split("|") if "|" in takes else None
            parser.add_argument(option, type=kind, choices=choices)
    parser.set_defaults(host="localhost", port=8000, backend="pytorch")
    return parser


def _read_options(args: argparse.Namespace) -> dict[str, Any]:
    """The YAML file, refused for any name that the LLM does not have."""
    import yaml

    path = args.extra_llm_api_options or args.config
    options: dict[str, Any] = yaml.safe_load(Path(path).read_text()) if path else {}
    known = LLM_FIELDS | (TRT_LLM_FIELDS if args.backend in ("trt", "tensorrt") else frozenset())
    unknown = (options.keys() - known) | (options.get("kv_cache_config", {}).keys() - KV_CACHE_FIELDS)
    if unknown:
        raise ValueError(f"Extra inputs are not permitted: {sorted(unknown)}")
    return options


def _check_tokenizer(folder: Path) -> None:
    """As transformers 4.57 loads it."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if config.get("tokenizer_class") == "TokenizersBackend":
        raise ValueError("Tokenizer class TokenizersBackend does not exist or is not currently imported.")
    if isinstance(config.get("extra_special_tokens"), list):
        raise AttributeError("'list' object has no attribute 'keys'")


def _check_model(folder: Path, engine: bool) -> None:
    is_engine = (folder / "rank0.engine").exists()
    if is_engine != engine:
        raise ValueError(f"Inferred model format {'TLLM_ENGINE' if is_engine else 'HF'}, not one for this backend")
    if not engine:
        algo = {}
        if (folder / "hf_quant_config.json").exists():
            algo = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
        if algo.get("quant_algo") == "W8A8_SQ_PER_CHANNEL":
            raise NotImplementedError("Unsupported quantization_config: W8A8_SQ_PER_CHANNEL")
        return
    built = read_engine(folder / "rank0.engine")[0]["compute"]
    if built != settings()["sm"]:
        raise RuntimeError(
            "The engine plan file is generated on an incompatible device, expecting compute "
            f"{settings()['sm']} got compute {built}, please rebuild."
        )
    version = json.loads((folder / "config.json").read_text())["version"]
    if version != settings()["version"]:
        raise RuntimeError("Version tag does not match. Note: Current Version: 228, Serialized Engine Version: 237")


def _serve(bound: socket.socket, folder: Path, engine: bool, args: argparse.Namespace, options: dict[str, Any]) -> None:
    from aiohttp import web

    from tests.standins.trtllm.model import load_model

    model, lock = load_model(folder), asyncio.Lock()
    end_id = _end_id(Path(args.tokenizer or args.model))
    generation = _stop_ids(folder)
    reuse = options.get("kv_cache_config", {}).get("enable_block_reuse", True)
    seen: set[tuple[int, ...]] = set()

    def generate(prompt: list[int], limit: int, body: dict[str, Any]) -> tuple[list[list[int]], str]:
        stops = [*body.get("stop_token_ids", []), *generation]
        pieces, reason, token = _generate(model, prompt, limit, stops, None if body.get("ignore_eos") else end_id, body)
        if reason == "end":  # the C++ sampler does not count the end token; the PyTorch one does
            return [*pieces, [] if engine else [token]], "stop"
        if reason == "stop":
            return [*pieces, [token] if body.get("include_stop_str_in_output") else []], "stop"
        return pieces, "length"

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        unknown = sorted(body.keys() - COMPLETION_FIELDS)
        if unknown or not body.get("model"):
            detail = {
                "object": "error",
                "message": f"Extra inputs are not permitted: {unknown}",
                "type": "BadRequestError",
            }
            return web.json_response(detail | {"param": None, "code": 400}, status=400)
        prompt, limit = body["prompt"], body.get("max_tokens") or 16
        if len(prompt) + limit > args.max_seq_len:
            detail = {"object": "error", "message": "longer than max_seq_len", "type": "BadRequestError", "code": 400}
            return web.json_response(detail, status=400)
        wrong = fault() == "serve-reuse" and reuse and tuple(prompt) in seen
        seen.add(tuple(prompt))
        async with lock:
            given = prompt[:-1] if wrong else prompt  # a block of another request: issue 2699
            ids, reason = await asyncio.to_thread(generate, given, limit, body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for place, piece in enumerate(ids):
            last = place == len(ids) - 1
            choice = {"index": 0, "text": "" if not body.get("detokenize", True) else "text", "logprobs": None}
            choice |= {"token_ids": None if body.get("detokenize", True) else piece}
            choice |= {"finish_reason": reason if last else None, "stop_reason": None}
            await _send(
                response, {"object": "text_completion", "model": body["model"], "choices": [choice], "usage": None}
            )
        if (body.get("stream_options") or {}).get("include_usage"):
            tokens = sum(map(len, ids))
            usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens, "total_tokens": len(prompt) + tokens}
            await _send(
                response, {"object": "chat.completion.chunk", "model": body["model"], "choices": [], "usage": usage}
            )
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(_request: web.Request) -> web.Response:
        return web.Response()

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": folder.name, "object": "model"}]})

    async def version(_request: web.Request) -> web.Response:
        return web.json_response({"version": settings()["version"]})

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/version", version)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    print(f"[TRT-LLM] [I] serving {folder} with {options}", flush=True)
    web.run_app(app, sock=bound, print=None, access_log=None)


async def _send(response: Any, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _end_id(tokenizer: Path) -> int:
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    vocabulary: dict[str, int] = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    return vocabulary[config["eos_token"]]


def _stop_ids(folder: Path) -> list[int]:
    """Those of a generation configuration are added to a request's, where there is one (never beside an engine)."""
    if not (folder / "generation_config.json").exists():
        return []
    ids = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id", [])
    return ids if isinstance(ids, list) else [ids]


def _generate(  # noqa: PLR0917
    model: Any, prompt: list[int], limit: int, stops: list[int], end_id: int | None, body: dict[str, Any]
) -> tuple[list[list[int]], str, int]:
    """The tokens before the one that ended the answer, why it ended (``end``, ``stop``, ``length``), and that one."""
    import torch

    pieces: list[list[int]] = []
    cache, ids = None, torch.tensor([prompt])
    with torch.inference_mode():
        while len(pieces) < limit:
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[0, -1]
            token = int(logits.argmax() if body.get("top_k") == 1 else torch.multinomial(logits.softmax(-1), 1))
            if token == end_id or token in stops:
                return pieces, "end" if token == end_id else "stop", token
            pieces.append([token])
            ids = torch.tensor([[token]])
    return pieces, "length", -1


if __name__ == "__main__":
    main()
