"""Reads job, fleet and policy files.

An invalid file raises `ConfigError` with a sentence that names file, line, value and what is
expected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from relaunch.cli import clients
from relaunch.config import ConfigError
from relaunch.evidence.causes import Cause
from relaunch.spec.annotations import GRACE_PERIOD, apply_annotations, apply_grace_period
from relaunch.spec.fleet import FleetSpec
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy, preset, preset_names, resolve
from relaunch.text import printable

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from relaunch.cli.documents import Document

Model = TypeVar("Model", bound=BaseModel)
Where = tuple[str | int, ...]

AS_WRITTEN: tuple[Where, ...] = (("command",), ("env",), ("metadata", "annotations"))
"""Parts of a job file whose values are text, however they look: an argument `60`, a variable
`on`."""
TOO_COMMON = ("catalog", "secrets")
"""Parts whose keys (`file`, `env`, `code`, `reason`) are no sign of a wrong level elsewhere."""
EXPECTED = {
    "string_type": "expected text: write it in quotes",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "dict_type": "expected keys and values, `key: value`",
    "model_type": "expected keys and values, `key: value`",
    "model_attributes_type": "expected keys and values, `key: value`",
    "tuple_type": "expected a list, such as [a, b]",
    "list_type": "expected a list, such as [a, b]",
    "time_delta_type": "expected a duration, such as 30s, 5m or 1h30m",
}
"""What people call the types of pydantic's errors."""


def _read(path: Path, as_written: tuple[Where, ...] = ()) -> Document:
    from relaunch.cli.documents import read_document  # PyYAML, which `run` does not need

    return read_document(path, as_written)


def read_job(path: Path, overrides: Mapping[str, Any]) -> tuple[JobSpec, Policy]:
    """Read a job file; values from flags (`overrides`) take precedence.

    Raises:
        ConfigError: The file or a flag cannot be used.
    """
    document = _read(path, AS_WRITTEN)
    spec = _validate(JobSpec, {**document.content, **overrides}, document, tuple(overrides))
    if (refusal := clients.find_refusal(spec.command)) is not None:
        line = document.line(("command",))
        raise ConfigError(printable(f"{path}:{line}: command: {refusal}"))
    is_typed = "policy" in overrides  # then below the current folder, as every file of a flag
    policy = (
        read_policy(spec.policy) if is_typed else read_policy(spec.policy, path.parent, document)
    )
    try:
        policy = apply_annotations(policy, spec.metadata.annotations)
    except ValueError as error:
        line = document.line(("metadata", "annotations"))
        raise ConfigError(printable(f"{path}:{line}: {error}")) from None
    try:
        return spec, apply_grace_period(policy, spec.env)
    except ValueError as error:
        line = document.line(("env", GRACE_PERIOD))
        raise ConfigError(printable(f"{path}:{line}: env: {error}")) from None


def job_from_flags(values: Mapping[str, Any]) -> tuple[JobSpec, Policy]:
    spec = _validate(JobSpec, values, None, tuple(values))
    if (refusal := clients.find_refusal(spec.command)) is not None:
        raise ConfigError(printable(refusal))
    return spec, read_policy(spec.policy, Path(), None)


def read_fleet(path: Path) -> FleetSpec:
    document = _read(path)
    return _validate(FleetSpec, document.content, document, ())


def read_policy(
    source: str | dict[str, Any], folder: Path = Path(), document: Document | None = None
) -> Policy:
    """Resolve a policy as a job names it.

    `source` is a preset, a file relative to `folder`, or a mapping that is part of `document`.
    """
    if isinstance(source, dict):
        return _resolve(source, document, ("policy",))
    if source in preset_names():
        return preset(source)
    path = find_file(source, folder)
    if path is not None:
        inner = _read(path)
        return _resolve(inner.content, inner, ())
    where = f"{document.place}:{document.line(('policy',))}: policy" if document else "--policy"
    raise ConfigError(
        printable(
            f"{where}: {source[:100]!r} is neither a preset ({', '.join(preset_names())}) nor a "
            "file"
        )
    )


def find_file(name: str, folder: Path = Path()) -> Path | None:
    """Return the path of a file that people name; None: there is no such file."""
    try:
        path = folder / Path(name).expanduser()
        # Also what is no regular file: `<(command)` of a shell is a pipe.
        return path if path.exists() and not path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long, an unknown user's home, a NUL
        return None


def _resolve(source: dict[str, Any], document: Document | None, below: Where) -> Policy:
    try:
        return resolve(source)
    except ValidationError as error:
        raise ConfigError(_describe(Policy, error, document, below, ())) from None
    except ValueError as error:
        line = document.line((*below, "extends")) if document else 0
        raise ConfigError(
            printable(f"{document.place}:{line}: {error}" if document else str(error))
        ) from None


def _validate(
    model: type[Model], values: Mapping[str, Any], document: Document | None, flags: tuple[str, ...]
) -> Model:
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(_describe(model, error, document, (), flags)) from None


def _describe(
    model: type[BaseModel],
    error: ValidationError,
    document: Document | None,
    below: Where,
    flags: tuple[str, ...],
) -> str:
    """Return one sentence about the first error; `below` is where the model stands in the file."""
    errors = [(_locate(each, document, below, flags), each) for each in error.errors()]
    # A misspelt key causes two errors, unknown and missing: report the unknown key, which is the
    # one to fix. Of a value that may have one of two types, report the part that is wrong.
    where, first = min(errors, key=lambda one: one[1]["type"] != "extra_forbidden")
    where, first = max(
        (one for one in errors if one[1] is first or one[0][: len(where)] == where),
        key=lambda one: (one[1]["type"] == first["type"] == "extra_forbidden", len(one[0])),
    )
    location = tuple(first["loc"])
    is_flag = bool(location) and location[0] in flags
    if is_flag:
        place = {"name": "--name", "command": "the command"}.get(
            str(location[0]), f"--{str(location[0]).split('_')[0]}"
        )
    elif document is not None:
        # An error about several keys has no location; its message begins with the key it is about.
        about = tuple(_explain(first).partition(":")[0].partition(" ")[0].split("."))
        place = f"{document.place}:{document.line(where if location else (*below, *about))}"
    else:
        place = "the job"
    if first["type"] == "extra_forbidden":
        return printable(f"{place}: {_describe_unknown_key(model, where, len(below))}")
    if first["type"] == "missing":
        return printable(f"{place}: {_format(where)}: missing, and there is no default")
    # A value that may have one of two types has an error for each: say what both expect.
    here = [each for each_where, each in errors if each_where == where]
    what = _join(sorted({_explain(each): each["type"] for each in here}.items(), key=_rank))
    is_said = {"value_error", "too_short"} & {each["type"] for each in here}
    if not is_said and not _is_secret(where):
        from relaunch.cli.documents import shorten

        what += f" (got {shorten(first['input'])})"
    path = "" if is_flag or not location else _format(where)
    return printable(f"{place}: {path}: {what}" if path else f"{place}: {what}")


def _format(where: Where) -> str:
    return ".".join(str(part) for part in where)


def _locate(
    error: ErrorDetails, document: Document | None, below: Where, flags: tuple[str, ...]
) -> Where:
    """Return the keys above an error as the file has them.

    Where a value may have one of two types, pydantic adds the type's name to the location.
    """
    location = tuple(error["loc"])
    if document is None or (location and location[0] in flags):
        return (*below, *location)
    where = below
    for part in location:
        if (*where, part) in document.lines:
            where = (*where, part)
    return (*where, location[-1]) if error["type"] == "missing" else where


def _rank(one: tuple[str, str]) -> bool:
    """Order a value error, which says what the value is, before what else could stand there."""
    return one[1] != "value_error"


def _join(sentences: list[tuple[str, str]]) -> str:
    first, *others = (text for text, _ in sentences)
    sign = " or " if first.startswith("expected ") else "; or "
    return sign.join([first, *(other.removeprefix("expected ") for other in others)])


def _explain(error: ErrorDetails) -> str:
    if error["type"] == "string_type" and isinstance(error["input"], list | dict):
        return "expected text"
    limits = error.get("ctx", {})
    match error["type"]:
        case "greater_than_equal":
            return f"expected {limits['ge']} or more"
        case "less_than_equal":
            return f"expected {limits['le']} or less"
        case "too_short":
            return "it is empty, expected at least one item"
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
    return EXPECTED.get(error["type"], message)


def _is_secret(where: Where) -> bool:
    """Return whether a value may be a secret that was written where its source belongs."""
    return bool({"secrets", "agent_key", "secret", "webhook", "apprise", "redact"} & set(where))


# --- unknown keys


def _describe_unknown_key(model: type[BaseModel], where: Where, depth: int) -> str:
    """Return what is wrong with a key that its mapping does not have, and where it belongs.

    The first `depth` parts of `where` are above the model.
    """
    word, path = str(where[-1]), _format(where)
    root: type[BaseModel] = JobSpec if depth else model
    places = list(_list_keys(root))
    elsewhere = [place for place in places if place[-1] == word]
    if not elsewhere and word.upper() in Cause.__members__ and root in (JobSpec, Policy):
        outer = ("policy", "causes") if root is JobSpec else ("causes",)
        elsewhere.append((*outer, word.upper()))
    if elsewhere:
        return f"{path} belongs {_describe_level(word, elsewhere)}"
    import difflib

    known = _keys_beside(model, where[depth:])
    near = difflib.get_close_matches(word, known, n=1) or [
        key for key in known if len(word) > 2 and key.startswith(word)
    ]
    if near:
        return f"{path}: unknown key, did you mean {near[0]}?"
    similar = difflib.get_close_matches(word, [place[-1] for place in places], n=1, cutoff=0.8)
    for place in places:
        if similar and place[-1] == similar[0]:
            meant = _format(place).replace("[]", "")
            return f"{path}: unknown key, did you mean {meant}?"
    return f"{path}: unknown key" + (f": expected one of {', '.join(known)}" if known else "")


def _describe_level(word: str, places: list[tuple[str, ...]]) -> str:
    """Return where a key belongs that stands at the wrong level, and what to write."""
    outer = places[0][:-1]
    if not outer:
        return f"at the top of the file: write `{word}: …` without indent"
    names = " or ".join(
        f"each of {_format(place[:-1])[:-2]}" if place[-2].endswith("[]") else _format(place[:-1])
        for place in places[:2]
        if len(place) > 1
    )
    example = f"{places[0][-1]}: …"
    for part in reversed(outer):
        example = (
            f"{part[:-2]}: [{{{example}}}]" if part.endswith("[]") else f"{part}: {{{example}}}"
        )
    return f"under {names}: write `{example}`"


def _list_keys(model: type[BaseModel], outer: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every key of a file, below the keys that contain it; a list's name ends with `[]`."""
    inner: list[tuple[tuple[str, ...], type[BaseModel]]] = []
    for key, field in model.model_fields.items():
        yield (*outer, key)
        if key in TOO_COMMON:
            continue
        if model is JobSpec and key == "policy":
            inner.append(((*outer, key), Policy))
        for kind, mark in _find_models(field.annotation):
            inner.append(((*outer, *f"{key}{mark}".split(".")), kind))
    for deeper, kind in inner:
        yield from _list_keys(kind, deeper)


def _find_models(annotation: Any, mark: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the models that a value may be, or that its items may be, and how to reach those."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, mark
    origin = getattr(annotation, "__origin__", None)
    step = ".CAUSE" if origin is dict else "[]" if origin is tuple else ""
    for inner in getattr(annotation, "__args__", ()):
        yield from _find_models(inner, f"{mark}{step}")


def _keys_beside(model: type[BaseModel], location: Where) -> list[str]:
    """Return the keys that the mapping of a misspelt key may have."""
    here = model
    for part in location[:-1]:
        field = here.model_fields.get(part) if isinstance(part, str) else None
        if field is not None:
            here = next((kind for kind, _ in _find_models(field.annotation)), here)
    return list(here.model_fields)
