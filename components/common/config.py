"""Frozen, strict configuration models, and how a component reads its own.

Every process is started as ``python -m <component> --plan FILE``: FILE is the JSON of one model
derived from `Config`. Nothing else configures a component: no hidden environment, no defaults
file. Every field carries its unit and reason in `Field(description=...)`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from components.common.errors import DynamoBlobError, nearest
from components.common.places import Place


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
    def parse(cls, raw: object, where: str = "", place: Place | None = None) -> Self:
        """`place`: where a value stands in the file `where`; the first fault's place is named with the file, the others' with them."""
        try:
            return cls.model_validate(raw)
        except ValidationError as e:
            first = place(_loc(e.errors()[0])) if place else ""
            raise DynamoBlobError(
                "CONFIG-INVALID",
                f"{cls.__name__} is not valid",
                where=f"{where}:{first}" if first else where,
                why="; ".join(_explain(cls, e, place)),
                do="correct the keys named above",
            ) from None


def _loc(item: Any) -> tuple[str | int, ...]:
    """Keys of the value; of a check over several values those that its message begins with ("tenants.a.class: ...")."""
    return tuple(item["loc"]) or tuple(item["msg"].removeprefix("Value error, ").partition(":")[0].split("."))


def _explain(cls: type[BaseModel], error: ValidationError, place: Place | None = None) -> list[str]:
    out: list[str] = []
    for item in error.errors():
        at = f"line {place(_loc(item))}: " if place and out and place(_loc(item)) else ""
        path = ".".join(str(p) for p in item["loc"])
        if item["type"] == "extra_forbidden":
            out.append(f"{at}unknown key '{path}' ({nearest(str(item['loc'][-1]), fields_at(cls, item['loc'][:-1]))})")
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
            out.append(at + (f"{path}: {said}" if path else said))
    return out


def fields_at(cls: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Field names, as a file writes them, valid at `loc` inside `cls`; empty when `loc` passes through a plain mapping."""
    model: type[BaseModel] | None = cls
    for part in loc:
        if model is None or isinstance(part, int):
            continue
        field = next((f for name, f in model.model_fields.items() if part in (name, f.alias)), None)
        if field is None:
            continue
        model = _model_in(field.annotation)
    return [f.alias or name for name, f in model.model_fields.items()] if model else []


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for arg in getattr(annotation, "__args__", ()):
        found = _model_in(arg)
        if found:
            return found
    return None
