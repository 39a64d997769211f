"""Reads and writes a model in several files, with an index that maps each tensor to its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shrinkpoint.container.strict_json import load_json
from shrinkpoint.convert import safetensors_file, torch_file
from shrinkpoint.convert.part import Part, read_bytes, safe_join
from shrinkpoint.errors import CorruptError, NotFoundError, StateError

INDEX_SUFFIX = ".index.json"
_MAX_INDEX_BYTES = 64 << 20


def is_index(path: Path) -> bool:
    """True if a file is an index by its name: `model.safetensors.index.json`, `pytorch_model.bin.index.json`."""
    return path.name.endswith((".safetensors" + INDEX_SUFFIX, ".bin" + INDEX_SUFFIX))


def shard_files(path: Path) -> list[Path]:
    """The files that an index names, sorted by name.

    Raises:
        CorruptError: the file is no index, or names a file outside its directory.
    """
    return [safe_join(path.parent, name, str(path)) for name in sorted(set(_weight_map(path).values()))]


def read(path: Path) -> Part:
    """Reads the tensors of all shards by name.

    Args:
        path: the index.

    Raises:
        NotFoundError: a shard is missing.
        CorruptError: index and shards contradict each other.
        StateError, FormatError: a shard cannot be read.
    """
    weight_map = _weight_map(path)
    content: dict[str, Any] = {}
    files: dict[str, Any] = {}
    unchecked = [path.name]
    form = "safetensors" if path.name.endswith(".safetensors" + INDEX_SUFFIX) else "torch"
    for shard in shard_files(path):
        part = _read_shard(path, shard, form)
        for name in part.content:
            if name in content:
                raise _index_error(path, f"the tensor {name!r:.120} in two shards", "each in one")
        content.update(part.content)
        file = shard.relative_to(path.parent).as_posix()
        files[file] = {**part.info, "names": list(part.content)}
        unchecked += [file] if part.unchecked else []
    names = {file: set(info["names"]) for file, info in files.items()}
    for name, shard_name in weight_map.items():
        if name not in names[shard_name]:
            raise _index_error(path, f"no tensor {name!r:.120} in {shard_name}", "what the index says")
    info = {"of": form, "files": files, "index": read_bytes(path)}
    return Part("sharded", content, info, unchecked=tuple(unchecked))


def write(path: Path, content: dict[str, Any], info: dict[str, Any]) -> None:
    """Writes the shards, and the index at `path`, as they were read."""
    for name, shard in info["files"].items():
        target = safe_join(path.parent, name, str(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        tensors = {key: content[key] for key in shard["names"]}
        if info["of"] == "safetensors":
            safetensors_file.write(target, tensors, shard)
        else:
            torch_file.write(target, tensors)
    path.write_bytes(info["index"])


def _read_shard(path: Path, shard: Path, form: str) -> Part:
    if not shard.is_file():
        do = "fetch the missing shard"
        raise NotFoundError(str(shard), found="no such file", expected=f"a shard that {path.name} names", do=do)
    if form == "safetensors":
        return safetensors_file.read(shard)
    part = torch_file.read(shard)
    if type(part.content) is not dict or not all(type(name) is str for name in part.content):
        found = f"a shard that holds {type(part.content).__name__}"
        raise StateError(str(shard), found=found, expected="a dict of tensors by name", do="convert each shard alone")
    return part


def _weight_map(path: Path) -> dict[str, str]:
    if path.stat().st_size > _MAX_INDEX_BYTES:
        raise _index_error(path, f"{path.stat().st_size} bytes", f"an index of at most {_MAX_INDEX_BYTES}")
    document = load_json(read_bytes(path), str(path), "an index")
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    is_map = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    if not weight_map or not is_map:
        raise _index_error(path, "no weight_map", "the file of each tensor, by its name")
    return weight_map  # type: ignore[no-any-return]


def _index_error(path: Path, found: str, expected: str) -> CorruptError:
    return CorruptError(str(path), found=found, expected=expected, do="fetch the directory again")
