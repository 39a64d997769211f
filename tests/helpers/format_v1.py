"""Writes files of format 1, as docs/format.md describes it: no release writes them any more, and all read them."""

from __future__ import annotations

import json

from helpers.malformed import sealed

from shrinkpoint._native import xxh3_128
from shrinkpoint.container.metadata import filler_size, is_standard_entry


def file_v1(records, *, tree=None, parent=None, report=None):
    """The bytes of a file of format 1."""
    recipes, rows, entries, payload = [], [], {}, b""
    for record in records:
        if record.recipe not in recipes:
            recipes.append(record.recipe)
        parts = {}
        for part, data in record.parts.items():
            (info, *_) = record.infos
            is_open = is_standard_entry(record.recipe, record.infos)
            name, dtype, shape = (
                (info.name, info.dtype, info.shape) if is_open else (f"{record.name}/{part}", "U8", (len(data),))
            )
            if pad := filler_size(dtype, len(data), len(payload)):
                entries[f"~pad/{len(entries)}"] = _entry("U8", (pad,), len(payload))
                payload += bytes(pad)
            name = f"~entry/{len(entries)}" if name in entries or name == "__metadata__" else name
            entries[name] = _entry(dtype, shape, len(payload), len(data))
            payload += data
            digest = xxh3_128(data)
            parts[part] = None if digest == record.digest else digest
        members = [
            [info.name, info.dtype, info.shape, info.role.value, *([] if info.offsets is None else [info.offsets])]
            for info in record.infos
        ]
        name = None if record.name == members[0][0] else record.name
        rows.append([name, recipes.index(record.recipe), record.digest, record.base, members, parts])
    document = {"format": 1, "writer": "shrinkpoint 0", "scheme": "lossless", "parent": parent, "tree": tree}
    document |= {"recipes": recipes, "records": rows, "report": report}
    metadata = {"format": "pt", "shrinkpoint.digest": "0" * 32, "shrinkpoint": json.dumps(document)}
    return sealed(json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode(), payload)


def _entry(dtype, shape, begin, size=None):
    return {"dtype": dtype, "shape": shape, "data_offsets": (begin, begin + (shape[0] if size is None else size))}
