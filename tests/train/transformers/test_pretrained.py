"""A model comes straight out of a compressed checkpoint, and an export is what every `from_pretrained` reads."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.huggingface import gpt2, lay, made
from helpers.strategies import difference
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
)
from typer.testing import CliRunner

import shrinkpoint as sp
from shrinkpoint.cli.app import app
from shrinkpoint.errors import CorruptError, MismatchError, MissingExtraError, NotFoundError, PolicyError
from shrinkpoint.storage import LocalStorage, MemoryStorage
from shrinkpoint.store import decode
from shrinkpoint.store.chain import read_header
from shrinkpoint.store.listing import list_steps
from shrinkpoint.train import Checkpointer
from shrinkpoint.train.dcp import Writer
from shrinkpoint.train.transformers import ShrinkCallback, ShrinkTrainer, export_pretrained, from_pretrained


def weights(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def moved(model: Any, seed: int = 1) -> Any:
    """The model with other weights and buffers than its initialization."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += torch.randn_like(tensor)
    return model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The output folder of a ShrinkTrainer, with checkpoints of steps 2 to 8."""
    return lay(tmp_path / "run", ShrinkTrainer)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with two checkpoints of a GPT-2 and its optimizer, and the configuration beside them."""
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    with sp.CheckpointManager(tmp_path / "store") as manager:
        for step in (1, 2):
            model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
            optimizer.step()
            manager.save(step, model=model, optimizer=optimizer)
    model.config.save_pretrained(tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.parametrize("model_class", [GPT2LMHeadModel, AutoModelForCausalLM])
@pytest.mark.parametrize("step", [None, 4])
def test_a_model_comes_from_the_output_folder_of_a_trainer(run, model_class, step):
    model = from_pretrained(model_class, run, step=step)
    saved = Checkpointer().load(run / f"checkpoint-{step or 8}").state["model"]
    assert type(model) is GPT2LMHeadModel and not model.training
    assert difference(weights(model), dict(saved)) is None
    assert model.lm_head.weight is model.transformer.wte.weight
    named = from_pretrained(model_class, run / f"checkpoint-{step or 8}")
    assert difference(weights(named), weights(model)) is None
    assert model.config.name_or_path == str(run)


def test_a_model_comes_from_a_store_and_from_a_file(store, tmp_path):
    states = [sp.load(store, step=step)["model"] for step in (1, 2)]
    for step, state in ((1, states[0]), (2, states[1]), (None, states[1])):
        assert difference(weights(from_pretrained(AutoModelForCausalLM, store, step=step)), dict(state)) is None
    for state in (states[0], {"model": states[0], "other": [1]}, {"nets": [{"ema": states[0]}]}):
        sp.save(state, tmp_path / "file.safetensors")
        key = ("nets", 0, "ema") if "nets" in state else None
        model = from_pretrained(GPT2LMHeadModel, tmp_path / "file.safetensors", key=key, config=gpt2().config)
        assert difference(weights(model), dict(states[0])) is None


def test_a_fine_tune_takes_the_configuration_beside_its_base(tmp_path):
    base, tuned = gpt2(), moved(gpt2())
    (tmp_path / "tuned").mkdir()
    base.config.save_pretrained(tmp_path / "base")
    sp.save(base.state_dict(), tmp_path / "base" / "base.safetensors")
    place = tmp_path / "tuned" / "tuned.safetensors"
    sp.save(tuned.state_dict(), place, base=tmp_path / "base" / "base.safetensors")
    assert not difference(weights(from_pretrained(AutoModelForCausalLM, place)), weights(tuned))
    assert (export_pretrained(place, tmp_path / "out", model_class=GPT2LMHeadModel).path / "config.json").is_file()
    assert not difference(weights(GPT2LMHeadModel.from_pretrained(tmp_path / "out")), weights(tuned))


def test_a_model_that_was_saved_in_wrappers_is_loaded_without_them(store, tmp_path):
    model = from_pretrained(GPT2LMHeadModel, store)
    wrapped = torch.nn.DataParallel(torch.compile(model, backend="eager"))
    sp.CheckpointManager(tmp_path / "wrapped").save(1, model=wrapped)
    loaded = from_pretrained(GPT2LMHeadModel, tmp_path / "wrapped", config=model.config)
    assert not difference(weights(model), weights(loaded))


def test_only_weights_are_decoded_and_nothing_is_written(store, monkeypatch):
    decoded: set[str] = set()
    original = decode.decode_records

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        decoded.update(result.reference.tensors)
        return result

    monkeypatch.setattr("shrinkpoint.store.decode.decode_records", noted)
    before = sorted(store.rglob("*"))
    from_pretrained(AutoModelForCausalLM, store, step=1)
    # lossless weights are coded in the context of their moments
    assert {name.rpartition("/")[2] for name in decoded if not name.startswith("model/")} <= {"exp_avg", "exp_avg_sq"}
    assert sorted(store.rglob("*")) == before


def test_damage_elsewhere_does_not_concern_a_model(store):
    whole = weights(from_pretrained(AutoModelForCausalLM, store, step=1))
    (path,) = (store / "step-000000001").glob("rank*")
    place = {
        head.infos[0].name: next(iter(head.parts.values())).offset for head in read_header(path).records if head.parts
    }
    data = bytearray(path.read_bytes())
    data[place["rng/torch"]] ^= 1
    path.write_bytes(data)
    assert difference(weights(from_pretrained(AutoModelForCausalLM, store, step=1)), whole) is None
    data[place["model/transformer.wte.weight"]] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError):
        from_pretrained(AutoModelForCausalLM, store, step=1)


def test_arguments_are_passed_on(store):
    for model_class in (GPT2LMHeadModel, AutoModelForCausalLM):
        model, info = from_pretrained(
            model_class,
            store,
            dtype=torch.bfloat16,
            device_map="cpu",
            attn_implementation="eager",
            resid_pdrop=0.5,
            output_loading_info=True,
        )
        assert (model.dtype, model.config.resid_pdrop) == (torch.bfloat16, 0.5)
        assert model.config._attn_implementation == "eager" and not info["missing_keys"]
        exact = sp.load(store, only="model")["model"]["transformer.wte.weight"]
        assert torch.equal(model.transformer.wte.weight, exact.bfloat16())
    quiet = from_pretrained(AutoModelForCausalLM, store, config=GPT2Config.from_pretrained(store, attn_pdrop=0.25))
    assert quiet.config.attn_pdrop == 0.25
    renamed = {f"net.{name}": tensor for name, tensor in sp.load(store, only="model")["model"].items()}
    sp.save({"state_dict": renamed}, store.parent / "lightning")
    model = from_pretrained(GPT2LMHeadModel, store.parent / "lightning", config=str(store), key_mapping={r"^net\.": ""})
    assert torch.equal(model.transformer.wte.weight, exact)


def test_parameters_that_the_model_does_not_tie_have_memory_of_their_own(tmp_path):
    tied = gpt2()
    sp.save(tied.state_dict(), tmp_path / "a")
    config = GPT2Config.from_dict(tied.config.to_dict() | {"tie_word_embeddings": False})
    model = from_pretrained(GPT2LMHeadModel, tmp_path / "a", config=config)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(model.transformer.wte.weight, tied.transformer.wte.weight)


def test_the_body_of_a_model_is_loaded_where_nothing_is_lost(store):
    assert type(from_pretrained(AutoModel, store)) is GPT2Model  # `lm_head` is tied: no values are lost
    with pytest.raises(MismatchError, match=r"1 that it needs and the checkpoint lacks \(score.weight\)") as caught:
        from_pretrained(AutoModelForSequenceClassification, store)
    assert "strict=False" in caught.value.do
    model = from_pretrained(AutoModelForSequenceClassification, store, strict=False)
    assert torch.equal(model.transformer.wte.weight, sp.load(store, only="model")["model"]["transformer.wte.weight"])


def test_names_and_shapes_that_do_not_fit_are_named(store):
    for changed, text in (
        ({"n_layer": 3}, r"24 that it needs and the checkpoint lacks \(transformer.h.1.attn.c_attn.bias, .*\.\.\.\)"),
        ({"n_layer": 0}, r"11 that it does not have \(transformer.h.0"),
        ({"n_positions": 8}, r"1 of another shape \(transformer.wpe.weight \[16, 32\] for \[8, 32\]\)"),
    ):
        config = GPT2Config.from_pretrained(store, **changed)
        for options in ({}, {"strict": False}):
            if options and "shape" not in text:
                from_pretrained(GPT2LMHeadModel, store, config=config, **options)
                continue
            with pytest.raises(MismatchError, match=text) as caught:
                from_pretrained(GPT2LMHeadModel, store, config=config, **options)
            assert caught.value.do
    from_pretrained(GPT2LMHeadModel, store, config=config, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}])
def test_tied_weights_of_another_size_are_named_or_initialized(store, options):
    config = GPT2Config.from_pretrained(store)
    config.vocab_size += 40
    if not options:
        with pytest.raises(MismatchError, match=r"of another shape \(transformer.wte.weight"):
            from_pretrained(GPT2LMHeadModel, store, config=config)
        return
    model = from_pretrained(GPT2LMHeadModel, store, config=config, **options)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert len(model.lm_head.weight) == config.vocab_size and model.lm_head.weight.isfinite().all()
    saved = sp.load(store, only="model")["model"]["transformer.wpe.weight"]
    assert torch.equal(model.transformer.wpe.weight, saved)


def test_what_is_missing_is_said(store, run, tmp_path):
    (store / "config.json").unlink()
    sp.save({"optimizer": {"m": torch.ones(3)}, "step": 3}, tmp_path / "other" / "file")
    config = gpt2().config
    for where, options, error, text in (
        (store, {}, NotFoundError, "no configuration; expected config.json in .*save_pretrained"),
        (store, {"step": 9, "config": config}, NotFoundError, "one of 1, 2"),
        (run, {"step": 3}, NotFoundError, "one of 2, 4, 6, 8"),
        (tmp_path / "nothing", {}, NotFoundError, "no such file"),
        (tmp_path / "other" / "file", {"config": config}, NotFoundError, "no weights, but optimizer/m, step.*key="),
        (store, {"config": config, "key": "ema"}, NotFoundError, "no weights, but .*model/transformer"),
        (store, {"config": config, "key": "optimizer"}, MismatchError, "dict of tensors by name"),
        (store, {"config": str(tmp_path / "nowhere")}, PolicyError, "nowhere.*a configuration of transformers"),
        (store, {"config": config, "key": 3}, PolicyError, "key"),
        (store, {"config": config, "state_dict": {}}, PolicyError, "state_dict="),
        (store, {"config": config, "device_map": {"": "disk"}}, PolicyError, "disk"),
    ):
        with pytest.raises(error, match=text):
            from_pretrained(GPT2LMHeadModel, where, **options)
    with pytest.raises(PolicyError, match="Auto class"):
        from_pretrained(dict, run)


def test_stock_weights_beside_a_callbacks_checkpoint_are_named(tmp_path):
    trainer = made(Trainer, tmp_path, max_steps=2, save_only_model=True, trainer_callbacks=[ShrinkCallback()])
    trainer.train()
    with pytest.raises(NotFoundError, match="weights beside it are plain"):
        from_pretrained(GPT2LMHeadModel, tmp_path / "checkpoint-2")


def test_a_converted_directory_brings_its_configuration(tmp_path):
    model = moved(gpt2())
    model.generation_config.temperature = 0.25
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path / "stock")
    (tmp_path / "stock" / "tokenizer.json").write_text("{}")
    assert CliRunner().invoke(app, ["convert", str(tmp_path / "stock"), str(tmp_path / "small")]).exit_code == 0
    assert list_steps(LocalStorage(tmp_path / "small"))
    again = from_pretrained(AutoModelForCausalLM, tmp_path / "small")
    assert difference(weights(again), weights(model)) is None
    assert again.generation_config.temperature == 0.25
    export_pretrained(tmp_path / "small", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    stock, out = (tmp_path / name / "model.safetensors" for name in ("stock", "out"))
    assert out.read_bytes() == stock.read_bytes()


@pytest.mark.parametrize("shard", [None, "20KB"])
def test_an_export_is_what_save_pretrained_writes(run, tmp_path, shard):
    directory = run / "checkpoint-8"
    (directory / "tokenizer_config.json").write_text('{"a": 1}')
    (directory / "vocab.txt").write_text("a\n")
    report = export_pretrained(run, tmp_path / "out", max_shard_size=shard)
    model = from_pretrained(GPT2LMHeadModel, run)
    model.save_pretrained(tmp_path / "stock", **({} if shard is None else {"max_shard_size": shard}))
    for path in (tmp_path / "stock").iterdir():
        other = tmp_path / "out" / path.name
        if path.suffix == ".json":
            ours, theirs = json.loads(other.read_text()), json.loads(path.read_text())
            if shard is not None and "weight_map" in ours:  # which tensor is in which file may differ
                ours["weight_map"], theirs["weight_map"] = ([*sorted(index["weight_map"])] for index in (ours, theirs))
            assert {**ours, "_name_or_path": ""} == {**theirs, "_name_or_path": ""}
        elif shard is None:
            assert other.read_bytes() == path.read_bytes()
    extra = {"tokenizer_config.json", "vocab.txt"}
    assert {*report.files} == {path.name for path in (tmp_path / "stock").iterdir()} | extra
    assert report.nbytes == sum((tmp_path / "out" / name).stat().st_size for name in report.files)
    assert ("model.safetensors.index.json" in report.files) == (shard is not None)
    for model_class in (GPT2LMHeadModel, AutoModelForCausalLM):
        assert difference(weights(model_class.from_pretrained(tmp_path / "out")), weights(model)) is None
    name = "model.safetensors" if shard is None else "model-00001-of-00003.safetensors"
    for path in (tmp_path / "out").glob(name):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_an_export_keeps_the_dtype_of_every_tensor(tmp_path):
    model = moved(gpt2()).to(torch.bfloat16)
    model.transformer.ln_f.to(torch.float32)
    sp.save(model.state_dict(), tmp_path / "a")
    model.config.architectures = ["GPT2LMHeadModel"]
    export_pretrained(tmp_path / "a", tmp_path / "out", config=model.config)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            assert difference(file.get_tensor(name), model.state_dict()[name].detach()) is None
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_weights_that_the_model_holds_merged_are_exported_under_their_public_names(tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    model = moved(MixtralForCausalLM(MixtralConfig(vocab_size=64, **shape, **heads)))
    sp.save({"model": model.state_dict()}, tmp_path / "a")
    model.save_pretrained(tmp_path / "stock")
    again = from_pretrained(MixtralForCausalLM, tmp_path / "a", config=str(tmp_path / "stock"))
    assert difference(weights(again), weights(model)) is None
    export_pretrained(tmp_path / "a", tmp_path / "out", config=str(tmp_path / "stock"))
    stock, out = (tmp_path / name / "model.safetensors" for name in ("stock", "out"))
    assert out.read_bytes() == stock.read_bytes()


def test_an_export_replaces_nothing_that_it_does_not_write(store, tmp_path, caplog):
    with pytest.raises(PolicyError, match="without architectures"):
        (store / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        export_pretrained(store, tmp_path / "out")
    gpt2().save_pretrained(tmp_path / "stock")
    (tmp_path / "stock" / "config.json").replace(store / "config.json")
    with pytest.raises(PolicyError, match="max_shard_size"):
        export_pretrained(store, tmp_path / "out", max_shard_size="much")
    assert not (tmp_path / "out").exists()
    export_pretrained(store, tmp_path / "out", step=1)
    with pytest.raises(PolicyError, match="force"):
        export_pretrained(store, tmp_path / "out")
    export_pretrained(store, tmp_path / "out", force=True)
    (tmp_path / "out" / "mine.txt").touch()
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(PolicyError, match=r"mine\.txt"):
        export_pretrained(store, tmp_path / "out", step=1, force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert logging.getLogger("shrinkpoint").level == logging.NOTSET


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_model_comes_from_a_checkpoint_of_many_ranks(tmp_path):
    model = moved(gpt2())
    state = {"model": model.state_dict(), "optimizer": {"m": torch.randn(500, 20)}}
    for name, saved in (("nested", state), ("flat", model.state_dict())):
        dcp.save(dict(saved), storage_writer=Writer(tmp_path / "checkpoint-5" / name))
    model.config.save_pretrained(tmp_path / "checkpoint-5")  # beside the directory, as the Trainer does with FSDP
    for name in ("nested", "flat"):
        again = from_pretrained(AutoModelForCausalLM, tmp_path / "checkpoint-5" / name)
        assert difference(weights(again), weights(model)) is None
    with pytest.raises(NotFoundError, match="no weights"):
        from_pretrained(AutoModelForCausalLM, tmp_path / "checkpoint-5" / "nested", key="ema")


def test_a_model_comes_from_a_storage_that_is_no_directory(tmp_path):
    model, storage = moved(gpt2()), MemoryStorage()
    model.save_pretrained(tmp_path / "stock")
    with sp.Store(storage) as store:
        store.save(3, {"model": model.state_dict(), "optimizer": {"m": torch.ones(9)}})
    with pytest.raises(NotFoundError, match=r"config.json in it"):
        from_pretrained(AutoModelForCausalLM, storage)
    storage.put("config.json", (tmp_path / "stock" / "config.json").read_bytes())
    again = from_pretrained(AutoModelForCausalLM, storage, step=3)
    assert difference(weights(again), weights(model)) is None
    export_pretrained(storage, tmp_path / "out")
    stock, out = (tmp_path / name / "model.safetensors" for name in ("stock", "out"))
    assert out.read_bytes() == stock.read_bytes()


of_peft = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
"""PEFT asks transformers for what it has under a new name."""


@pytest.fixture
def adapters(tmp_path: Path) -> tuple[Path, Any]:
    """The output folder of a ShrinkTrainer that trains an adapter, and its model."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    gpt2().save_pretrained(tmp_path / "base")
    base = GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    trainer = made(ShrinkTrainer, tmp_path / "run", trainer_model=peft.get_peft_model(base, lora))
    trainer.train()
    return tmp_path / "run", trainer.model.eval()


@of_peft
def test_a_run_of_an_adapter_loads_its_base_with_it(adapters, monkeypatch):
    run, trained = adapters
    words = torch.arange(8)[None]
    expected = trained(input_ids=words).logits
    for model_class in (AutoModelForCausalLM, GPT2LMHeadModel):
        model = from_pretrained(model_class, run)
        assert not model.training and torch.equal(model(input_ids=words).logits, expected)
    assert not torch.equal(from_pretrained(AutoModelForCausalLM, run, step=2)(input_ids=words).logits, expected)
    (run / "checkpoint-2" / "adapter_model.safetensors").unlink()
    with pytest.raises(NotFoundError, match=r"no adapter_model.safetensors"):
        from_pretrained(AutoModelForCausalLM, run, step=2)
    config = run / "checkpoint-8" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}))
    with pytest.raises(NotFoundError, match=r"a base without a name.* Build the base, and call PeftModel"):
        from_pretrained(AutoModelForCausalLM, run, step=8)
    monkeypatch.setattr("shrinkpoint.train.transformers.pretrained.is_peft_available", lambda: False)
    with pytest.raises(MissingExtraError, match="Run pip install peft"):
        from_pretrained(AutoModelForCausalLM, run)


@of_peft
def test_an_adapter_is_exported_for_peft(adapters, tmp_path):
    from peft import PeftModel

    run, trained = adapters
    report = export_pretrained(run, tmp_path / "out")
    assert report.files == ("adapter_config.json", "adapter_model.safetensors") and report.tensors == 2
    model = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(tmp_path / "base"), tmp_path / "out")
    words = torch.arange(8)[None]
    assert torch.equal(model(input_ids=words).logits, trained(input_ids=words).logits)
