"""Description of the server's HTTP API, as an OpenAPI 3.1 document and as an HTML page."""

import html
import json
from importlib.metadata import version as version_of
from typing import Any

from meshrec.serve.models import Repository
from meshrec.serve.requests import RequestError, Signature

# Error responses by status code, for every operation with a request body.
_ERRORS = {
    "400": "What is wrong with the request: feature, sample and id.",
    "404": "No such model or version.",
    "413": "The body is too large.",
    "503": "Too many requests wait, or the model is not ready; see Retry-After.",
    "504": "The deadline passed before anything was computed.",
}


def schema(repository: Repository) -> dict[str, Any]:
    """Return the OpenAPI document, which has the JSON schema of samples for every ready model."""
    paths: dict[str, Any] = {
        "/v2": {"get": _operation("Name, version and extensions of the server.")},
        "/v2/health/live": {"get": _operation("Whether the server answers.")},
        "/v2/health/ready": {"get": _operation("Whether every model is ready.")},
        "/v2/repository/index": {"post": _operation("All models, their versions and states.")},
        "/metrics": {"get": _operation("Metrics for Prometheus.")},
    }
    for name in sorted(repository.folders):
        model = f"/v2/models/{name}"
        paths[model] = {"get": _operation("Inputs and outputs.")}
        paths[f"{model}/ready"] = {"get": _operation("Whether the model is ready.")}
        paths[f"{model}/infer"] = {
            "post": _operation("Scores, by the Open Inference Protocol v2.", {"type": "object"})
        }
        paths[f"{model}/freshness"] = {"get": _operation("The last delta in the model's weights.")}
        paths[f"/v2/repository/models/{name}/rollback/{{delta}}"] = {
            "post": _operation("Roll back to a delta, and stay there until the next load.")
        }
        for action in ("load", "unload"):
            paths[f"/v2/repository/models/{name}/{action}"] = {"post": _operation(f"{action}s the model.")}
        try:
            served = repository.get(name)
        except RequestError:
            continue  # not ready: the sample format is unknown
        signature = served.signature
        sample = _sample(signature)
        # A value may be in either object, so neither schema requires any.
        parts = {key: {**part, "required": []} for key, part in (("shared", sample), ("sample", sample))}
        common = {
            "type": "object",
            "properties": {"shared": parts["shared"], "samples": {"type": "array", "items": parts["sample"]}},
            "required": ["samples"],
        }
        several = {"oneOf": [sample, {"type": "array", "items": sample}, common]}
        verb = "predict" if signature.outputs == "scores" else "embed"
        summary = f"{signature.outputs.capitalize()} for a sample, a list, or samples with shared values."
        paths[f"/{verb}/{name}"] = {"post": _operation(summary, several)}
        if served.recommends:
            summary = (
                "Best items for a history, or for a list. ?k=20: 20 items; &keep_seen=1: with seen items; "
                "&keep_seen=0: without; default: as the recipe ranks."
            )
            paths[f"/recommend/{name}"] = {"post": _operation(summary, several)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "MeshRec", "version": version_of("meshrec")},
        "paths": paths,
    }


def page(document: dict[str, Any]) -> str:
    """Render an OpenAPI document from `schema` as an HTML page."""
    rows = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody")
            shown = ""
            if body is not None:
                text = html.escape(json.dumps(body["content"]["application/json"]["schema"], indent=1))
                shown = f"<details><summary>body</summary><pre>{text}</pre></details>"
            rows.append(
                f"<tr><td>{method.upper()}</td><td><code>{html.escape(path)}</code></td>"
                f"<td>{html.escape(operation['summary'])}{shown}</td></tr>"
            )
    errors = "".join(f"<li>{status}: {html.escape(text)}</li>" for status, text in _ERRORS.items())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>MeshRec</title>"
        "<style>body{font:16px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "td{padding:.3em 1em .3em 0;vertical-align:top}</style>"
        "<h1>MeshRec</h1><p>The same for programs: <a href=openapi.json>openapi.json</a>.</p>"
        f"<table>{''.join(rows)}</table><h2>Refusals</h2><ul>{errors}</ul></html>"
    )


def _operation(summary: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return an OpenAPI operation. ``body`` is the JSON schema of the request body; None: it has no body."""
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "The answer."}}}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        operation["responses"] |= {status: {"description": text} for status, text in _ERRORS.items()}
    return operation


def _sample(signature: Signature) -> dict[str, Any]:
    """Return the JSON schema of a sample: an object with a value per feature or column."""
    properties: dict[str, Any] = {}
    optional = {} if signature.raw is None else signature.raw.optional
    if signature.raw is not None:
        types = signature.raw.columns
        properties = {
            name: _value(kind, str(types[name]) == "bool") for name, kind in signature.raw.kinds.items()
        }
    elif signature.num_dense:
        size = signature.num_dense
        properties["dense"] = {
            "type": "array",
            "items": {"type": "number"},
            "minItems": size,
            "maxItems": size,
        }
    # A model that takes raw values computes the IDs itself.
    for feature in signature.features if signature.raw is None else ():
        one: dict[str, Any] = {"type": "integer"}
        if feature not in signature.any_ids:
            one["minimum"] = 0
        if feature in signature.rows:
            one["exclusiveMaximum"] = signature.rows[feature]
        properties[feature] = {"oneOf": [one, {"type": "array", "items": one}]}
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def _value(kind: str, is_boolean: bool) -> dict[str, Any]:
    """Return the JSON schema for values in a raw data column.

    Args:
        kind: kind of values, such as ``integer`` or ``list of string``; see `RawValues.kinds`.
    """
    if kind.startswith("list of "):
        return {"type": ["array", "null"], "items": _value(kind.removeprefix("list of "), is_boolean)}
    names = {"integer": "boolean" if is_boolean else "integer", "number": "number"}
    return {"type": [names.get(kind, "string"), "null"]}
