"""What a run starts from: the model and the data, resolved and fingerprinted.

``dvc repro`` must notice a new fine-tune whether it is a folder, a hub id that moved or the demo's adapter, so
the stage ``sources`` always runs and writes what it found; the stages behind it run only when that changed.
Files up to 64 MiB count by content, larger ones (weights) by size and modification time, because hashing
140 GB on each ``dvc repro`` would take minutes; ``checkpoint`` reads every byte anyway when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.files import digest_file
from pipeline.params import DEMO, Data, Model, Params

DEMO_ADAPTER = Path("demo/adapter")
LOCAL_DATA = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
_BY_CONTENT = 64 * 2**20


def resolve_sources(params: Params) -> dict[str, Any]:
    """The sources of a run as JSON. Raises InputError naming what is missing."""
    return {"model": _model(params.model), "data": _data(params.data)}


def _model(model: Model) -> dict[str, Any]:
    adapter = {"adapter": _listing(Path(model.adapter))} if model.adapter else {}
    if model.checkpoint == DEMO:
        from pipeline.checkpoint.demo import BASE

        return {"kind": DEMO, "base": BASE.digest, "adapter": _listing(DEMO_ADAPTER)}
    folder = Path(model.checkpoint)
    if folder.is_dir():
        return {"kind": "folder", "path": model.checkpoint, "files": _listing(folder), **adapter}
    if folder.exists() or model.checkpoint.startswith((".", "/")) or model.checkpoint.count("/") != 1:
        raise InputError(
            f"model.checkpoint: {model.checkpoint} is not a folder",
            "give the folder of a Hugging Face checkpoint, `demo`, or a hub id such as org/name",
        )
    commit = _hub_commit(model.checkpoint, model.revision, "model")
    return {"kind": "hub", "id": model.checkpoint, "commit": commit, **adapter}


def _data(data: Data) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if data.calib_log:
        found["log"] = {"pattern": data.calib_log, "files": _log(data.calib_log)}
    if data.profile_log:
        found["profile_log"] = {"pattern": data.profile_log, "files": _log(data.profile_log)}
    if data.redact:
        from pipeline.data.redact import redactor_digest

        found["redact"] = {name: redactor_digest(name) for name in data.redact}
    return _sets(data) | found


def _sets(data: Data) -> dict[str, Any]:
    """Where both sets come from: files of their own, and ``data.source`` for the rest."""
    if data.calib_file and data.calib_log:
        raise InputError("data: calib_file and calib_log are both given", "keep one of the two")
    own = {name: _file(Path(name)) for name in (data.calib_file, data.eval_file) if name}
    if data.eval_file and (data.calib_file or data.calib_log):
        return {"kind": "files", "loader": data.source, "files": own}
    if own and data.source in LOCAL_DATA.values():
        raise InputError(
            "data: only one of calib_file and eval_file is given",
            "give both, or calib_log, or a data.source for the other set",
        )
    found = _source(data)
    return found | {"files": found.get("files", {}) | own} if own else found


def _source(data: Data) -> dict[str, Any]:
    if data.source == DEMO:
        from pipeline.data.demo import CORPUS

        return {"kind": DEMO, "corpus": CORPUS.digest}
    path = Path(data.source)
    if path.suffix in LOCAL_DATA or path.exists():
        if not path.is_file() or path.suffix not in LOCAL_DATA:
            raise InputError(
                f"data.source: {data.source} is not a {', '.join(LOCAL_DATA)} file",
                "give one file (it is then split by data.columns.group or id), or calib_file and eval_file",
            )
        return {"kind": "file", "files": {data.source: _file(path)}}
    return {"kind": "hub", "id": data.source, "commit": _hub_commit(data.source, data.revision, "dataset")}


def _log(pattern: str) -> dict[str, str]:
    from pipeline.data.promptlog import log_files

    return {path.as_posix(): _file(path) for path in log_files(pattern)}


def _listing(folder: Path) -> dict[str, str]:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder", "check model.checkpoint and model.adapter in params.yaml")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _file(path) for path in files}


def _file(path: Path) -> str:
    if not path.is_file():
        raise InputError(f"{path}: no such file", "check the section `data` of params.yaml")
    stat = path.stat()
    return digest_file(path) if stat.st_size <= _BY_CONTENT else f"{stat.st_size} bytes, {stat.st_mtime_ns}"


def _hub_commit(name: str, revision: str | None, kind: str) -> str:
    """The commit that a hub id stands for now; a pinned full commit needs no network."""
    if revision is not None and len(revision) == 40:
        return revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        info = HfApi().repo_info(name, revision=revision, repo_type=kind)
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise InputError(
            f"the hub did not resolve the {kind} {name}@{revision or 'main'}: {error}",
            "check the name, log in with `hf auth login`, or pin `revision` to a full commit that is cached",
        ) from error
    return str(info.sha)
