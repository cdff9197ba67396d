"""Reads job, fleet and policy files.

An invalid file raises `ConfigError` with a sentence that names file, line, value and what is
expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from relaunch.config import ConfigError
from relaunch.spec.annotations import apply_annotations
from relaunch.spec.fleet import FleetSpec
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy, preset, preset_names, resolve

if TYPE_CHECKING:
    import yaml

Model = TypeVar("Model", bound=BaseModel)
Where = tuple[str | int, ...]


class Document:
    """The content of a YAML file, and the line number of each part of it."""

    def __init__(self, path: Path) -> None:
        import yaml

        self.path = path
        self.lines: dict[Where, int] = {(): 1}
        try:
            text = path.read_text()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not a text file: expected YAML in UTF-8") from None
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                raise ConfigError(f"{path}:1: the file is empty: expected keys and values")
            self._visit(root, ())
            content = loader.construct_document(root)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError(f"{path}:{line}: not YAML: {error.problem}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not YAML: {error}") from None
        finally:
            loader.dispose()
        if not isinstance(content, dict):
            raise ConfigError(
                f"{path}:1: the file is a {type(content).__name__}: expected keys and values"
            )
        self.content: dict[str, Any] = content

    def _visit(self, node: yaml.Node, where: Where) -> None:
        import yaml

        self.lines.setdefault(where, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._visit(item, (*where, index))
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                line = key.start_mark.line + 1
                if not isinstance(key, yaml.ScalarNode):
                    raise ConfigError(f"{self.path}:{line}: a key is a {key.id}: expected a string")
                inner = (*where, key.value)
                if inner in self.lines:
                    raise ConfigError(
                        f"{self.path}:{line}: {key.value}: given twice, first on line "
                        f"{self.lines[inner]}"
                    )
                self.lines[inner] = line
                self._visit(value, inner)

    def line(self, where: Where) -> int:
        while where not in self.lines:
            where = where[:-1]
        return self.lines[where]


def read_job(path: Path, overrides: Mapping[str, Any]) -> tuple[JobSpec, Policy]:
    """Read a job file; values from flags (`overrides`) take precedence.

    Raises:
        ConfigError: The file or a flag cannot be used.
    """
    document = Document(path)
    spec = _validate(JobSpec, {**document.content, **overrides}, document, tuple(overrides))
    policy = read_policy(spec.policy, path.parent, None if "policy" in overrides else document)
    try:
        return spec, apply_annotations(policy, spec.metadata.annotations)
    except ValueError as error:
        raise ConfigError(f"{path}:{document.line(('metadata', 'annotations'))}: {error}") from None


def job_from_flags(values: Mapping[str, Any]) -> tuple[JobSpec, Policy]:
    spec = _validate(JobSpec, values, None, tuple(values))
    return spec, read_policy(spec.policy, Path(), None)


def read_fleet(path: Path) -> FleetSpec:
    document = Document(path)
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
    path = folder / Path(source).expanduser()
    if path.is_file():
        inner = Document(path)
        return _resolve(inner.content, inner, ())
    where = f"{document.path}:{document.line(('policy',))}: policy" if document else "--policy"
    raise ConfigError(
        f"{where}: {source!r} is neither a preset ({', '.join(preset_names())}) nor a file"
    )


def _resolve(source: dict[str, Any], document: Document | None, below: Where) -> Policy:
    try:
        return resolve(source)
    except ValidationError as error:
        raise ConfigError(_sentence(Policy, error, document, below, ())) from None
    except ValueError as error:
        raise ConfigError(
            f"{document.path}:{document.line((*below, 'extends'))}: {error}"
            if document
            else str(error)
        ) from None


def _validate(
    model: type[Model], values: Mapping[str, Any], document: Document | None, flags: tuple[str, ...]
) -> Model:
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(_sentence(model, error, document, (), flags)) from None


def _sentence(
    model: type[BaseModel],
    error: ValidationError,
    document: Document | None,
    below: Where,
    flags: tuple[str, ...],
) -> str:
    # A misspelt key causes two errors, unknown and missing: report the unknown key, which is the
    # one to fix.
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    location = tuple(first["loc"])
    kind, what = first["type"], first["msg"].removeprefix("Value error, ")
    if location and location[0] in flags:
        place = (
            "--name"
            if location[0] == "name"
            else "the command"
            if location[0] == "command"
            else f"--{str(location[0]).split('_')[0]}"
        )
    elif document is not None:
        # An error about several keys has no location; its message begins with the key it is about.
        about = location or tuple(what.partition(":")[0].partition(" ")[0].split("."))
        place = f"{document.path}:{document.line((*below, *about))}"
    else:
        place = "the job"
    # Where a value may have one of two types, pydantic adds the type's name to the location; drop
    # the parts that are not in the file.
    written = [
        part
        for end, part in enumerate(location, 1)
        if document is None or (*below, *location[:end]) in document.lines
    ]
    path = ".".join(
        str(part)
        for part in (*below, *(location if kind in ("missing", "extra_forbidden") else written))
    )
    if kind == "missing":
        return f"{place}: {path}: missing, and there is no default"
    if kind == "extra_forbidden":
        known = _keys_beside(model, location)
        import difflib

        word = str(location[-1])
        near = difflib.get_close_matches(word, known, n=1) or [
            key for key in known if len(word) > 2 and key.startswith(word)
        ]
        hint = (
            f", did you mean {near[0]}?"
            if near
            else f": expected one of {', '.join(known)}"
            if known
            else ""
        )
        return f"{place}: {path}: unknown key{hint}"
    if path and location and location[0] not in flags:
        what = f"{path}: {what}"
    return (
        f"{place}: {what}" if kind == "value_error" else f"{place}: {what} (got {first['input']!r})"
    )


def _keys_beside(model: type[BaseModel], location: Where) -> list[str]:
    """Return the keys allowed in the mapping that contains a misspelt key."""
    here: Any = model
    for part in location[:-1]:
        field = here.model_fields.get(part) if isinstance(part, str) else None
        if isinstance(part, int):
            continue
        if field is None:
            return []
        inner = [field.annotation, *getattr(field.annotation, "__args__", ())]
        here = next(
            (kind for kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel)), None
        )
        if here is None:
            return []
    return list(here.model_fields)
