"""Frozen, strict configuration models, and how a component reads its own.

Every process is started as ``python -m <component> --plan FILE``: FILE is the JSON of one model
derived from `Config`. Nothing else configures a component: no hidden environment, no defaults
file. Every field carries its unit and reason in `Field(description=...)`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from components.common.errors import DynamoBlobError, nearest


class Config(BaseModel):
    """Base of every configuration model: frozen; unknown keys and wrong types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, validate_default=True)

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """The model stored at `path` as JSON. Raises CONFIG-UNREADABLE or CONFIG-INVALID."""
        try:
            raw = json.loads(Path(path).read_text())
        except (OSError, ValueError) as e:
            raise DynamoBlobError(
                "CONFIG-UNREADABLE",
                "the component's plan file cannot be read",
                where=str(path),
                why=str(e),
                do="pass --plan FILE as `dynamo serve --dry-run` prints it",
            ) from None
        return cls.parse(raw, where=str(path))

    @classmethod
    def parse(cls, raw: object, where: str = "") -> Self:
        try:
            return cls.model_validate(raw)
        except ValidationError as e:
            raise DynamoBlobError(
                "CONFIG-INVALID",
                f"{cls.__name__} is not valid",
                where=where,
                why="; ".join(_explain(cls, e)),
                do="correct the keys named above",
            ) from None


def _explain(cls: type[BaseModel], error: ValidationError) -> list[str]:
    out = []
    for item in error.errors():
        path = ".".join(str(p) for p in item["loc"])
        if item["type"] == "extra_forbidden":
            out.append(f"unknown key '{path}' ({nearest(str(item['loc'][-1]), fields_at(cls, item['loc'][:-1]))})")
        else:
            said = item["msg"].removeprefix("Value error, ")
            if item["type"] in (
                "float_parsing",
                "int_parsing",
                "int_from_float",
                "float_type",
                "int_type",
                "bool_parsing",
            ):
                said += f", found {str(item['input'])[:40]!r}"  # where a number belongs, no secret stands
            out.append(f"{path}: {said}" if path else said)
    return out


def fields_at(cls: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Field names valid at `loc` inside `cls`; empty when `loc` passes through a plain mapping."""
    model: type[BaseModel] | None = cls
    for part in loc:
        if model is None or isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        if field is None:
            continue
        model = _model_in(field.annotation)
    return list(model.model_fields) if model else []


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for arg in getattr(annotation, "__args__", ()):
        found = _model_in(arg)
        if found:
            return found
    return None
