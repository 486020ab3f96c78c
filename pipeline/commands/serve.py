"""``enginegate serve ENGINE``: an engine behind an OpenAI-compatible server.

ENGINE is a folder, or a registered version (NAME[@vX.Y.Z|#STAGE]), which is pulled and verified first.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pipeline.commands._registry import add_offline, add_remote, add_verifier, verifier_of
from pipeline.errors import InputError

EPILOG = """\
examples:
  enginegate serve engines/int8_mixed --port 8000
  enginegate serve shop-int8_mixed#production --key release.pub
"""


def register(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve an engine over HTTP (OpenAI-compatible)",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("engine", metavar="DIR|NAME[@vX.Y.Z|#STAGE]", help="a folder, or a registered version")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="0: any free one (default: %(default)s)")
    add_remote(parser)
    add_offline(parser)
    add_verifier(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C; running requests are finished first."""
    folder = engine_folder(args)
    if not (folder / "manifest.json").is_file():
        raise InputError(f"{folder}: no manifest.json, so this is no engine", "build one: dvc repro build")

    from aiohttp import web
    from transformers import AutoTokenizer

    from pipeline.engines import load_executor
    from pipeline.engines.scheduler import Scheduler
    from pipeline.engines.server import build_app
    from pipeline.serving.process import choose_port

    port = choose_port(args.port, args.host)  # before the engine is loaded: a port in use is told at once
    name = folder.resolve().name
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    print(f"loading {folder}", flush=True)
    app = build_app(Scheduler(load_executor(folder)), tokenizer, name, eos_token_ids(folder / "tokenizer", tokenizer))
    print(f"{name}: http://{args.host}:{port}/v1/completions", flush=True)
    web.run_app(
        app,
        host=args.host,
        port=port,
        print=None,
        access_log=None,
        shutdown_timeout=10.0,  # less than what `process.started` waits before SIGKILL
        handler_cancellation=True,
    )
    return 0


def engine_folder(args: argparse.Namespace) -> Path:
    """The folder to serve. A name that is no folder here and no path is a registered version: pulled, verified."""
    folder, verifier = Path(args.engine), verifier_of(args)
    if folder.exists() or "/" in args.engine:
        if verifier is not None and folder.is_dir():
            from pipeline.registry.verify import verify_folder

            verify_folder(folder, verifier)
        return folder
    from pipeline.registry.pull import pull

    found = pull(Path(), args.engine, remote=args.remote, verifier=verifier, offline=args.offline)
    for warning in found.warnings:
        print(f"warning: {warning}", flush=True)
    return found.folder


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)


def eos_token_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: generation config, config and tokenizer may each know some."""
    from pipeline.files import read_json

    paths = [folder / "generation_config.json", folder / "config.json"]
    known = [read_json(path).get("eos_token_id") for path in paths if path.is_file()]
    found: set[int] = set()
    for value in [*known, tokenizer.eos_token_id]:
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
