"""What others read about a registered engine: where it comes from, and what is in it.

``provenance``: an in-toto statement (v1) with a SLSA provenance predicate (v1). ``bill_of_materials``: a CycloneDX 1.6
ML-BOM whose model card carries the gate's intervals. Both are made of the manifest alone, hold no time and are
equal for equal manifests.
"""

from __future__ import annotations

import uuid
from typing import Any

from pipeline import __version__
from pipeline.errors import PromotionError
from pipeline.files import canonical_json

BUILD_TYPE = "urn:enginegate:dvc-repro:1"  # dvc.yaml and dvc.lock of the commit say what was run
WORKSTATION = "urn:enginegate:workstation"  # no CI vouches for the run
_SPEC = "1.6"


def provenance(manifest: dict[str, Any]) -> dict[str, Any]:
    """The in-toto statement about every file of the engine.

    Format: https://in-toto.io/Statement/v1 and https://slsa.dev/provenance/v1.
    """
    from google.protobuf.json_format import MessageToDict, ParseDict
    from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
    from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
    from in_toto_attestation.v1.statement import Statement

    predicate = _predicate(manifest)
    ParseDict(predicate, Provenance())  # refuses a field that SLSA does not have
    subjects = [
        ResourceDescriptor(name=name, digest={"sha256": _hex(digest)}).pb for name, digest in manifest["files"].items()
    ]
    statement = Statement(subjects, "https://slsa.dev/provenance/v1", predicate)
    statement.validate()
    plain: dict[str, Any] = MessageToDict(statement.pb)
    return plain


def _predicate(manifest: dict[str, Any]) -> dict[str, Any]:
    source, gate = manifest["provenance"], manifest["gate"]
    dependencies = [
        {"uri": f"git+{source['repository'] or 'local'}", "digest": {"gitCommit": source["commit"]}},
        {"name": "dvc.lock", "digest": {"sha256": _hex(source["dvc_lock"])}},
    ]
    dependencies += [{"name": name, "digest": {"sha256": _hex(value)}} for name, value in _digests(manifest["sources"])]
    run: dict[str, Any] = {"builder": {"id": WORKSTATION, "version": {"enginegate": __version__}}}
    if source["ci_run"]:
        run["builder"]["id"] = "/".join(source["ci_run"].split("/")[:3])  # the CI server
        run["metadata"] = {"invocationId": source["ci_run"]}
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "recipe": manifest["recipe"],
                "backend": manifest["backend"],
                "limits": manifest["limits"],
                "policyDigest": gate["policy_digest"],
            },
            "internalParameters": {"engineDigest": manifest["digest"], "platform": manifest["platform"]},
            "resolvedDependencies": dependencies,
        },
        "runDetails": run,
    }


def _digests(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Every digest in nested sources, by its dotted name."""
    if isinstance(value, dict):
        return [
            found for key, child in sorted(value.items()) for found in _digests(child, f"{name}.{key}" if name else key)
        ]
    return [(name, value)] if isinstance(value, str) and value.startswith("sha256:") else []


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def bill_of_materials(manifest: dict[str, Any]) -> dict[str, Any]:
    """The CycloneDX ML-BOM. Raises PromotionError when it breaks the published schema.

    The library's classes have no model card (version 11), so the document is written by hand and checked with the
    library's validator. Format: https://cyclonedx.org/docs/1.6/json/.
    """
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": _SPEC,
        # The same engine has the same number: its digest, as a UUID.
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, manifest['digest'])}",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "enginegate", "version": __version__}]},
            "component": _model(manifest),
        },
        "components": [_library(name, version) for name, version in _versions(manifest)],
    }
    _validate(bom)
    return bom


def _model(manifest: dict[str, Any]) -> dict[str, Any]:
    registration = manifest["registration"]
    return {
        "type": "machine-learning-model",
        "bom-ref": manifest["digest"],
        "name": registration["artifact"],
        "version": registration["version"],
        "hashes": [{"alg": "SHA-256", "content": _hex(manifest["digest"])}],
        "components": [
            {"type": "file", "name": name, "hashes": [{"alg": "SHA-256", "content": _hex(digest)}]}
            for name, digest in sorted(manifest["files"].items())
        ],
        "modelCard": {
            "modelParameters": {
                "task": "text-generation",
                "datasets": [
                    {"type": "dataset", "name": name, "contents": {"properties": [{"name": "digest", "value": value}]}}
                    for name, value in _digests(manifest["sources"])
                    if name == "calibration"
                ],
            },
            "quantitativeAnalysis": {"performanceMetrics": [_metric(row) for row in manifest["gate"]["metrics"]]},
            "properties": [
                {"name": "enginegate:verdict", "value": manifest["gate"]["verdict"]},
                {"name": "enginegate:policy", "value": manifest["gate"]["policy_digest"]},
                {"name": "enginegate:recipe", "value": manifest["recipe"]},
                {"name": "enginegate:backend", "value": manifest["backend"]},
                {"name": "enginegate:dtype", "value": manifest["dtype"]},
            ],
        },
    }


def _metric(row: dict[str, Any]) -> dict[str, Any]:
    """What the gate compared: the gain over the FP16 baseline, in points, with its one-sided bounds."""
    kind = f"{row['name']}: difference to the baseline in points, one-sided {100 * row['confidence']:g} % bounds"
    entry: dict[str, Any] = {"type": kind, "slice": row["slice"]}
    if row["difference"] is not None:
        entry["value"] = repr(row["difference"])
        entry["confidenceInterval"] = {"lowerBound": repr(row["lower"]), "upperBound": repr(row["upper"])}
    return entry


def _versions(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    return sorted((name, value) for name, value in manifest["build"].get("versions", {}).items() if value)


def _library(name: str, version: str) -> dict[str, Any]:
    package = name.replace("_", "-")
    return {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{package}@{version}"}


def _validate(bom: dict[str, Any]) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    found = JsonStrictValidator(SchemaVersion.V1_6).validate_str(canonical_json(bom).decode())
    if found is not None:
        raise PromotionError(
            f"the bill of materials breaks CycloneDX {_SPEC}: {found}", "report this with the manifest"
        )
