"""Bytes and loss of fine-tunes that are stored as deltas against their base.

`python -m lab.studies.transfer.fine_tunes` pre-trains one language model of 1.6 M parameters here (kept beside the
ledger), fine-tunes all its weights to three tasks, and stores each fine-tune in several ways. Losses are those of
held-out examples that no scheme has seen. A finished run is a line of results/fine_tunes.jsonl.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import shrinkpoint as sp
from lab.studies import workloads
from lab.studies.harness import columns, default_data
from lab.studies.harness.ledger import Ledger, version
from lab.studies.workloads import sentence

State = dict[str, Tensor]
FILES = ("workloads/sentence.py", "transfer/fine_tunes.py")
BATCH = 24
PEAK = {"base": 2e-3, "tuned": 1e-4}
STEPS = {"base": 600, "sst2": 400, "shakespeare": 300, "wikipedia": 300}
WORDS = 4096  # the most frequent ones of `sentence`
IGNORED = -100
EMBEDDING, HEAD = "llama.model.embed_tokens.weight", "llama.lm_head.weight"  # one tensor
SYSTEMS = ("full", "lossless", "signs", "distilled signs", "fisher", "fisher feedback")
BUDGET = "0.1%"


@dataclass(frozen=True)
class Job:
    """One fine-tune, stored by one system."""

    task: str
    system: str
    seed: int = 0
    quick: bool = False


@dataclass(frozen=True)
class Examples:
    """Word numbers, and what each position has to predict; both int64 (n, length)."""

    words: Tensor
    targets: Tensor

    def __getitem__(self, chosen: Tensor | slice) -> Examples:
        return Examples(self.words[chosen], self.targets[chosen])

    def __len__(self) -> int:
        return len(self.words)


@dataclass(frozen=True)
class Task:
    """What a base is fine-tuned to: examples to train on, for a scheme to look at, and to measure a result on.

    Attributes:
        first: number of the first word that may be a target.
    """

    train: Examples
    seen: Examples
    unseen: Examples
    first: int = 0


class Losses(nn.Module):
    """A small Llama; the loss of each target, in nats, and True where the target is the likeliest word.

    Args:
        first: number of the first word that may be a target.
    """

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self._first = first
        shape = {"hidden_size": 160, "intermediate_size": 448, "num_hidden_layers": 3, "num_attention_heads": 5}
        config = LlamaConfig(vocab_size=WORDS, **shape, max_position_embeddings=64, tie_word_embeddings=True)
        self.llama = LlamaForCausalLM(config)

    def logits(self, words: Tensor, targets: Tensor) -> Tensor:
        """Logits of the words that may be targets, where there is one."""
        hidden = self.llama.model(input_ids=words, attention_mask=words != sentence.PAD).last_hidden_state
        return self.llama.lm_head(hidden[targets != IGNORED])[:, self._first :]

    def forward(self, words: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits, right = self.logits(words, targets), targets[targets != IGNORED] - self._first
        return F.cross_entropy(logits, right, reduction="none"), logits.argmax(1) == right


def tasks(data: Path) -> dict[str, Task]:
    """SST-2 with its label as the last word, and two texts."""
    texts = sentence.corpus(data)
    train, dev = _labelled(texts.sentences, texts.labels), _labelled(texts.dev_sentences, texts.dev_labels)
    shakespeare = sentence.text_windows(data / "tinyshakespeare" / "input.txt.gz", texts.known)
    return {
        "sst2": Task(train[:-512], train[-512:], dev, WORDS - 2),
        "shakespeare": _split(shakespeare),
        "wikipedia": _split(texts.held),
    }


def _labelled(sentences: Tensor, labels: Tensor) -> Examples:
    """Sentences whose label is the word behind them, one of the two rarest; the loss is that of the label."""
    sentences = _frequent(sentences)
    ends = (sentences != sentence.PAD).sum(1)
    words = F.pad(sentences, (0, 1), value=sentence.PAD)
    words.scatter_(1, ends[:, None], sentence.END)
    targets = torch.full_like(words, IGNORED).scatter_(1, ends[:, None], (WORDS - 2 + labels)[:, None])
    return Examples(words, targets)


def _frequent(words: Tensor) -> Tensor:
    return words.where(words < WORDS, sentence.UNKNOWN)


def prose(windows: Tensor) -> Examples:
    """Windows of a text, in which each word is predicted from those before."""
    windows = _frequent(windows)
    return Examples(windows[:, :-1], windows[:, 1:])


def _split(windows: Tensor) -> Task:
    """The last tenth of a text is held out; every other window of it is for the scheme."""
    examples = prose(windows)
    cut = len(windows) * 9 // 10
    held = examples[cut:]
    return Task(examples[:cut], held[::2], held[1::2])


def measured(model: Losses, examples: Examples) -> tuple[Tensor, float]:
    """The loss of each target of all examples, and the share of targets that are the likeliest word, in per cent."""
    with workloads.evaluating(model):
        parts = [model(part.words, part.targets) for part in _batches(examples, 64)]
    values, right = (torch.cat(column) for column in zip(*parts, strict=True))
    return values, 100 * right.float().mean().item()


def _batches(examples: Examples, size: int) -> Iterator[Examples]:
    return (examples[slice(first, first + size)] for first in range(0, len(examples), size))


def train(model: Losses, examples: Examples, steps: int, peak: float, seed: int) -> Losses:
    """AdamW 0.9/0.95, decay 0.1, clip 1, a tenth of the steps to warm up, and a cosine to 0."""
    workloads.seed_everything(seed, torch.get_num_threads())
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    factor = workloads.cosine(max(1, steps // 10), steps, 0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model.train()
    for step in range(steps):
        part = examples[workloads.shuffled(len(examples), BATCH, step, seed)]
        loss = model(part.words, part.targets)[0].mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"          step {step + 1} of {steps}, loss {loss.item():.3f}", flush=True)
    return model.eval()


def trained(path: Path, start: Callable[[], Losses], *arguments: Any) -> Losses:
    """A model from `path`, or trained now and kept there."""
    model = start()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        sp.save(train(model, *arguments).state_dict(), path)
    model.load_state_dict(sp.load(path))
    return model.eval()


class Shelf:
    """A fine-tune and its base in one folder: what each system writes, and what a reader gets.

    Args:
        base: state of the base.
        tuned: state of the fine-tune; `model` has it.
    """

    def __init__(self, folder: Path, base: State, tuned: State, model: Losses, task: Task) -> None:
        self._folder, self._base, self._tuned, self._model, self._task = folder, base, tuned, model, task
        sp.save(base, folder / "base.safetensors")

    def full(self) -> tuple[int, State]:
        """A copy as `save_pretrained` writes it: tied weights once."""
        path = self._folder / "full.safetensors"
        save_file({name: tensor for name, tensor in self._tuned.items() if name != HEAD}, path)
        return path.stat().st_size, self._tuned

    def lossless(self) -> tuple[int, State]:
        return self._save("lossless", "lossless")

    def fisher(self, *, feedback: bool) -> tuple[int, State]:
        """A budget of 0.1%, measured on the examples of the scheme; weights alone, without an optimizer."""
        calibrate = self._calibrate if feedback else None
        scheme = sp.Fisher(budget=BUDGET, evaluate=self._evaluate, calibrate=calibrate)
        return self._save("fisher", scheme)

    def signs(self, *, distilled: bool) -> tuple[int, State]:
        """Signs of a matrix's differences in a bit each, times their mean magnitude (BitDelta, arXiv 2402.10193).

        Vectors are whole. Distilled scales are trained towards the fine-tune's losses: 200 steps of AdamW at 1e-4, as
        there, on batches of 4.
        """
        differences = {name: self._tuned[name] - self._base[name] for name in self._tuned if name != HEAD}
        matrices = {name: d for name, d in differences.items() if d.dim() > 1}
        signs = {name: torch.where(d >= 0, 1.0, -1.0) for name, d in matrices.items()}
        scales = {name: d.abs().mean() for name, d in matrices.items()}
        if distilled:
            scales = self._distill(signs, scales)
        packed = {name: torch.from_numpy(np.packbits(sign.numpy() > 0)) for name, sign in signs.items()}
        vectors = {name: self._tuned[name] for name in differences if name not in matrices}
        stored = {f"{name}.scale": scale.reshape(1) for name, scale in scales.items()}
        path = self._folder / "signs.safetensors"
        save_file({**packed, **vectors, **stored}, path)
        return path.stat().st_size, self._from_signs(signs, scales)

    def _save(self, name: str, scheme: sp.schemes.Scheme | str) -> tuple[int, State]:
        path = self._folder / f"{name}.safetensors"
        report = sp.save(self._tuned, path, base=self._folder / "base.safetensors", scheme=scheme)
        return report.stored_bytes, sp.load(path)

    def _evaluate(self, state: State) -> Tensor:
        self._model.load_state_dict(state)
        return measured(self._model, self._task.seen)[0]

    def _calibrate(self, state: State) -> Iterator[Tensor]:
        self._model.load_state_dict(state)
        self._model.eval()
        return (self._model(part.words, part.targets)[0].mean() for part in _batches(self._task.train[:512], 64))

    def _from_signs(self, signs: State, scales: State) -> State:
        state = {n: self._base[n] + scales[n] * signs[n] if n in signs else self._tuned[n] for n in self._tuned}
        return {**state, HEAD: state[EMBEDDING]}

    def _distill(self, signs: State, scales: State) -> State:
        trained = {name: scale.clone().requires_grad_() for name, scale in scales.items()}
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-4, weight_decay=0.0)
        examples, model = self._task.train, self._model.eval()
        model.load_state_dict(self._tuned)
        for step in range(200):
            part = examples[workloads.shuffled(len(examples), 4, step, 0)]
            with torch.no_grad():
                right = model.logits(part.words, part.targets)
            names = {f"model.{name}": tensor for name, tensor in self._from_signs(signs, trained).items()}
            logits = functional_call(_Logits(model), names, (part.words, part.targets))
            (logits - right).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: scale.detach() for name, scale in trained.items()}


class _Logits(nn.Module):
    def __init__(self, model: Losses) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        return self.model.logits(words, targets)


def stored(shelf: Shelf, system: str) -> tuple[int, State]:
    """Bytes of a fine-tune beside its base, and what a reader gets."""
    if "signs" in system:
        return shelf.signs(distilled=system != "signs")
    if "fisher" in system:
        return shelf.fisher(feedback=system != "fisher")
    return shelf.full() if system == "full" else shelf.lossless()


class Bench:
    """Trains what is not trained yet, and measures one job after the other."""

    def __init__(self, data: Path, cache: Path, *, quick: bool) -> None:
        self._tasks, self._cache, self._quick = tasks(data), cache / ("quick" if quick else "whole"), quick
        texts = sentence.corpus(data).prose
        steps = self._steps("base")
        self._base = trained(self._cache / "base.safetensors", Losses, prose(texts), steps, PEAK["base"], 0)

    def run(self, job: Job) -> dict[str, Any]:
        """Bytes, and losses and accuracy on unseen examples."""
        task, base = self._tasks[job.task], self._base.state_dict()
        task = task if not self._quick else Task(task.train, task.seen[:64], task.unseen[:64], task.first)

        def start() -> Losses:
            model = Losses(task.first)
            model.load_state_dict(base)
            return model.eval()

        path = self._cache / f"{job.task}-{job.seed}.safetensors"
        model = trained(path, start, task.train, self._steps(job.task), PEAK["tuned"], job.seed)
        tuned = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        tuned[HEAD] = tuned[EMBEDDING]  # a copy of it would be a weight that nothing measures
        before, _ = measured(start(), task.unseen)
        right, accuracy = measured(model, task.unseen)
        with tempfile.TemporaryDirectory(prefix="shrinkpoint-fine-tunes-") as folder:
            began = time.perf_counter()
            size, state = stored(Shelf(Path(folder), base, tuned, model, task), job.system)
            seconds = time.perf_counter() - began
        model.load_state_dict(state)
        found, found_accuracy = measured(model, task.unseen)
        numbers = sum(tensor.numel() for name, tensor in tuned.items() if name != HEAD)
        errors = (found - right).std() / len(right) ** 0.5
        return {
            "bytes": size,
            "ratio": 4 * numbers / size,
            "base loss": before.mean().item(),
            "tuned loss": right.mean().item(),
            "rise": (found.mean() / right.mean() - 1).item(),
            "rise error": (errors / right.mean()).item(),
            "tuned accuracy": accuracy,
            "accuracy": found_accuracy,
            "seconds": seconds,
        }

    def _steps(self, name: str) -> int:
        return 4 if self._quick else STEPS[name]


def show(records: list[dict[str, Any]]) -> None:
    """Print a line for each task and system, over its seeds."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["settings"]["task"], record["settings"]["system"]), []).append(record)
    head = ["task, system", "seeds", "bytes", "x", "rise %", "deviation", "error", "accuracy", "before", "seconds"]
    rows = []
    for (task, system), found in groups.items():
        rises = [100 * record["rise"] for record in found]
        means = {key: fmean(record[key] for record in found) for key in found[0] if isinstance(found[0][key], float)}
        cells = [means["ratio"], fmean(rises), stdev(rises) if len(rises) > 1 else 0.0, 100 * means["rise error"]]
        cells += [means["accuracy"], means["tuned accuracy"], means["seconds"]]
        size = f"{fmean(record['bytes'] for record in found):.0f}"
        rows.append([f"{task}, {system}", str(len(found)), size, *(f"{cell:.3g}" for cell in cells)])
    print(f"\n{columns(head, rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--out", type=Path, help="ledger; default results/fine_tunes.jsonl")
    parser.add_argument("--tasks", nargs="*", default=["sst2", "shakespeare", "wikipedia"])
    parser.add_argument("--systems", nargs="*", default=[*SYSTEMS], choices=SYSTEMS)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few steps: does it all run?")
    parser.add_argument("--any-version", action="store_true", help="runs of older code count as done")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    code = version(*FILES)  # before anybody edits
    ledger = Ledger(args.out or Path(f"results/fine_tunes{'-quick' if args.quick else ''}.jsonl"), args.any_version)
    bench = Bench(args.data, ledger.path.parent / "fine_tunes", quick=args.quick)
    jobs = [Job(t, system, s, args.quick) for s in args.seeds for t in args.tasks for system in args.systems]
    records = []
    for job in jobs:
        record = ledger.find(asdict(job), code)
        if record is None:
            record = ledger.add(asdict(job), code, bench.run(job))
        print(f"{job}: {record['ratio']:.1f}x, {100 * record['rise']:+.3f} %", flush=True)
        records.append(record)
    show(records)


if __name__ == "__main__":
    main()
