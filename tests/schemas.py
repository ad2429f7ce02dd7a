"""The JSON schemas of docs/schema, which refer to each other by their file names."""

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

FOLDER = Path(__file__).parent.parent / "docs" / "schema"
SCHEMAS: dict[str, Any] = {
    path.name.removesuffix(".schema.json"): json.loads(path.read_text()) for path in sorted(FOLDER.iterdir())
}


def validator(name: str) -> Draft202012Validator:
    resources = [(f"{other}.schema.json", Resource.from_contents(schema)) for other, schema in SCHEMAS.items()]
    return Draft202012Validator(SCHEMAS[name], registry=Registry().with_resources(resources))


def answer_schema(line: dict[str, Any]) -> str:
    """Which schema is that of an output line."""
    return "openai-batch-answer" if "response" in line else "answer"
