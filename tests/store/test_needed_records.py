"""A chain is decoded as far as its last file needs; where that fails, the error names the file at fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.strategies import difference
from torch import nn

from shrinkpoint import Fisher, Store
from shrinkpoint.codec import record
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.storage import LocalStorage, MemoryStorage
from shrinkpoint.store import decode
from shrinkpoint.store.chain import store_chain
from shrinkpoint.tensors.dtypes import tensor_bytes
from shrinkpoint.tensors.flat_state import flatten


def trained_chain(storage: Any, saves: int = 5, scheme: Any = None) -> list[dict[str, Any]]:
    """Saves a run of Adam; the states as a reader of each file alone decodes them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    store, scheme = Store(storage), scheme or Fisher(relative_error=0.3)
    with store:
        for step in range(saves):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(16, 40)).square().mean().backward()
                optimizer.step()
            store.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, scheme=scheme)
    manifest = store.manifest()
    contents = decode.iter_chain(store_chain(storage, manifest))
    return [
        dict(sorted((name, tensor.clone()) for name, tensor in file.reference.tensors.items())) for _, file in contents
    ]


def loaded(storage: Any, step: int | None = None) -> dict[str, torch.Tensor]:
    return dict(sorted(flatten(Store(storage).load(step, keep=False)).tensors.items()))


@pytest.mark.parametrize("scheme", ["fisher(relative_error=.3)", "lossless", "excp", "lc-checkpoint"])
def test_a_chain_decodes_to_what_its_files_decode_to_one_by_one(scheme: str) -> None:
    storage = MemoryStorage()
    for step, expected in enumerate(trained_chain(storage, scheme=scheme)):
        assert difference(loaded(storage, step), expected) is None


def test_tensors_that_are_coded_anew_in_every_file_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, counts = MemoryStorage(), dict[str, int]()
    trained_chain(storage)
    original = record.decode

    def counted(encoded: Any, *args: Any, **kwargs: Any) -> Any:
        for info in encoded.infos:
            counts[info.name] = counts.get(info.name, 0) + 1
        return original(encoded, *args, **kwargs)

    monkeypatch.setattr("shrinkpoint.codec.parallel.decode", counted)
    loaded(storage)
    firsts = [count for name, count in counts.items() if name.endswith("exp_avg")]
    weights = [count for name, count in counts.items() if name.startswith("model/")]
    assert firsts and set(firsts) == {1}
    assert max(weights) == 5


def payloads(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*/rank-*.safetensors"))


def test_damage_of_any_file_is_found_also_where_no_record_is_needed(tmp_path: Path) -> None:
    trained_chain(LocalStorage(tmp_path), saves=4)
    for path in payloads(tmp_path):
        data = path.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        for place in range(header, len(data), max(1, (len(data) - header) // 10)):
            damaged = bytearray(data)
            damaged[place] ^= 1
            with path.open("r+b") as file:  # of all its hard links
                file.write(damaged)
            with pytest.raises(ShrinkpointError) as error:
                loaded(LocalStorage(tmp_path), 3)
            assert path.parent.name in str(error.value) or path.name in str(error.value) or "bases" in str(error.value)
        with path.open("r+b") as file:
            file.write(data)
    loaded(LocalStorage(tmp_path), 3)


@pytest.mark.parametrize("scheme", ["fisher(relative_error=.3)", "lossless", "excp"])
def test_a_parent_of_other_values_shows_in_the_last_file_and_is_named(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last file's values are compared with digests at first; where they differ, all files' are."""
    storage = MemoryStorage()
    trained_chain(storage, saves=3, scheme=scheme)
    files, original = [file.keys for file in store_chain(storage, Store(storage).manifest())], decode.decode_records

    def wrong_keyframe(reader: Any, reference: Any, **kwargs: Any) -> Any:
        decoded = original(reader, reference, **kwargs)
        if reader.parent is None:
            codes = [tensor.codes for tensor in decoded.reference.quantized.values()]
            for tensor in (*decoded.reference.tensors.held_tensors().values(), *codes):
                values = tensor_bytes(tensor)  # in its own memory
                values ^= 1
        return decoded

    monkeypatch.setattr(decode, "decode_records", wrong_keyframe)
    with pytest.raises(ShrinkpointError) as error:
        loaded(storage)
    assert any(key in str(error.value) for key in files[1])
