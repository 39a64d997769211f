"""Settings of a `ShrinkTrainer`, and its loss: as the Trainer evaluates it, or on its last training batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from transformers.trainer_pt_utils import find_batch_size

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.evaluate import Reading
from shrinkpoint.schemes.fisher.scheme import Fisher
from shrinkpoint.schemes.registry import lacks_evaluation, scheme_factory
from shrinkpoint.store import Keep
from shrinkpoint.store.retention import check_keep
from shrinkpoint.store.save_settings import OnSave, SaveSettings
from shrinkpoint.train.checkpointer import Checkpointer
from shrinkpoint.train.default_evaluation import AttributeSnapshot, DefaultEvaluation, LossSource
from shrinkpoint.train.gradients import GradientRecorder
from shrinkpoint.train.recent_batches import DEFAULT_BATCHES, BatchRing
from shrinkpoint.train.save_decision import SaveDecisionPolicy, check_policy
from shrinkpoint.validate import check_bool, check_optional_int, check_str

_TENSOR_ATTRIBUTES = ("_parameters", "_buffers", "_modules")
"""Not saved here: the caller of an Evaluation restores tensors and modules itself."""


@dataclass(frozen=True)
class ShrinkConfig:
    """Settings of a `ShrinkTrainer`; the defaults are lossless.

    Attributes:
        scheme, keyframe_every, background, threads, max_bytes, on_save: see `SaveSettings`. The scheme may also be a
            factory of schemes, such as `sp.Fisher` or `functools.partial(sp.Fisher, budget="1%")`. With `background`,
            older checkpoints are deleted only once the new one is complete.
        evaluate: metric of the Trainer's own evaluation, such as "eval_loss", that the scheme evaluates trial values
            with. None: for a `Fisher` whose budget is a share of the loss, such as "fisher", the loss on the evaluation
            dataset, or without one on the last training batches. Whether higher is better follows
            `greater_is_better` if it is `metric_for_best_model`, else its name.
        batches: number of batches for one evaluation; None: all of the evaluation dataset, or 8 of training.
        gradients: record gradients for the scheme, over the steps before each save.
        log_saves: send the numbers of every checkpoint to the Trainer's loggers (`report_to`), as "checkpoint/bytes"
            and so on; with `background`, when the Trainer next waits for it.
        keep: rules by which checkpoints are deleted, in place of `save_total_limit`; `metric` is a name of the
            Trainer's evaluation, such as "eval_loss". The best model that the Trainer knows is kept as well.
        save_decision_policy: when to save, besides `save_strategy`; after SIGTERM, where it watches for that, the run
            saves and ends.

    Raises:
        PolicyError: an argument is out of range, or `evaluate` or `gradients` is given with a finished scheme.
    """

    scheme: str | Scheme | Callable[..., Scheme] = "lossless"
    evaluate: str | None = None
    batches: int | None = 8
    gradients: bool = False
    keyframe_every: int | None = 20
    background: bool = False
    threads: int | None = None
    max_bytes: int | None = None
    on_save: OnSave | None = None
    log_saves: bool = False
    keep: Keep | None = None
    save_decision_policy: SaveDecisionPolicy | None = None

    def __post_init__(self) -> None:
        check_keep(self.keep)
        if self.save_decision_policy is not None:
            check_policy(self.save_decision_policy)
        is_instance = not isinstance(self.scheme, str) and not callable(self.scheme)
        if isinstance(self.scheme, str):
            scheme_factory(self.scheme)
        self._save_settings(self.scheme if is_instance else "lossless")
        if self.evaluate is not None:
            check_str("evaluate", self.evaluate, do='pass a metric of the evaluation, such as "eval_loss"')
        check_optional_int("batches", self.batches, none_meaning="for all")
        for name in ("gradients", "log_saves"):
            check_bool(name, getattr(self, name))
        if is_instance and (self.evaluate is not None or self.gradients):
            found, expected = f"{self.scheme!r}, which is made already", "a factory that takes evaluate= or gradients="
            do = "pass its class, or a functools.partial of it"
            raise PolicyError("ShrinkConfig, scheme", found=found, expected=expected, do=do)

    @property
    def measures_by_default(self) -> bool:
        """True if the scheme measures the loss, and nothing says with what."""
        factory = scheme_factory(self.scheme) if isinstance(self.scheme, str) else self.scheme
        return self.evaluate is None and callable(factory) and lacks_evaluation(factory)

    def make_recorder(self, model: nn.Module, save_interval: int | None) -> GradientRecorder | None:
        """Return a recorder of the model's gradients, or None unless `gradients` is set.

        Args:
            save_interval: number of optimizer steps between two saves; None: not fixed.
        """
        if not self.gradients:
            return None
        factory = scheme_factory(self.scheme) if isinstance(self.scheme, str) else self.scheme
        scheme_class = factory.func if isinstance(factory, partial) else factory
        squares = not isinstance(scheme_class, type) or issubclass(scheme_class, Fisher)
        return GradientRecorder(model, save_interval=save_interval, squares=squares)

    def make_checkpointer(
        self, evaluate: Callable[[Any], Any] | None, higher_is_better: bool, recorder: GradientRecorder | None
    ) -> Checkpointer:
        """Return a checkpointer with a new scheme.

        Args:
            evaluate: passed to the scheme, unless None.
            higher_is_better: True if `evaluate` returns a score rather than a loss.
            recorder: passed to the scheme, unless None.

        Raises:
            PolicyError: the scheme does not take `evaluate` or `gradients`, or needs one that is missing.
        """
        options: dict[str, Any] = {}
        if evaluate is not None:
            options |= {"evaluate": evaluate, "higher_is_better": higher_is_better}
        if recorder is not None:
            options["gradients"] = recorder
        factory = scheme_factory(self.scheme) if isinstance(self.scheme, str) else self.scheme
        try:
            scheme = factory(**options) if callable(factory) else factory
        except TypeError as error:
            names = " and ".join(sorted({"evaluate", "gradients"} & options.keys())) or "no arguments"
            found, do = f"one that does not take {names} ({error})", f"choose another one, or leave {names} out"
            raise PolicyError("ShrinkConfig, scheme", found=found, expected="a factory of schemes", do=do) from error
        return Checkpointer(**vars(self._save_settings(scheme)))

    def _save_settings(self, scheme: Any) -> SaveSettings:
        return SaveSettings(scheme, self.keyframe_every, self.background, self.threads, self.max_bytes, self.on_save)


class Evaluation:
    """Computes one metric of a Trainer's evaluation loop for the current values of its model.

    Nothing is logged, no callback is called, and the Trainer's attributes are restored afterwards. The batches are
    always the first ones of the evaluation dataset.

    Args:
        trainer: a Trainer with an evaluation dataset.
        metric: the name that is logged: "eval_loss", or "eval_NAME_loss" if there are several datasets.
        batches: number of batches; None: all.

    Raises:
        PolicyError: there is no such dataset, or there is more than one process.
    """

    def __init__(self, trainer: Any, metric: str, batches: int | None) -> None:
        if trainer.args.world_size > 1:
            found, expected = f"{trainer.args.world_size} processes", "one process, where the Trainer evaluates"
            do = "pass the scheme a function that needs one process"
            raise PolicyError("ShrinkConfig, evaluate", found=found, expected=expected, do=do)
        self._trainer, self._metric = trainer, metric if metric.startswith("eval_") else f"eval_{metric}"
        self._prefix, self._dataset = _find_dataset(trainer.eval_dataset, self._metric)
        self._batches, self._loader = batches, None

    @property
    def higher_is_better(self) -> bool:
        """True if a higher value of the metric is better."""
        args = self._trainer.args
        best_metric = args.metric_for_best_model
        is_best_metric = best_metric is not None and f"eval_{best_metric.removeprefix('eval_')}" == self._metric
        if is_best_metric and args.greater_is_better is not None:
            return bool(args.greater_is_better)
        return not self._metric.endswith("loss")

    def describe(self) -> str:
        """Description of the examples that are measured."""
        loader = self._get_loader()
        return f"{len(loader) if hasattr(loader, '__len__') else 'all'} batches of the evaluation dataset"

    def __call__(self, model: Any = None) -> float:
        """Return the metric. `model` is ignored: it is the Trainer's own, with the values of the trial."""
        return self.reading(model).value

    def reading(self, model: Any = None) -> Reading:
        """Return the metric, and the loss of each batch if the metric is their mean, to estimate its confidence."""
        losses: list[tuple[float, int | None]] = []
        loss_only = self._metric == f"{self._prefix}_loss" or self._trainer.compute_metrics is None
        with _isolate(self._trainer), _record_batch_losses(self._trainer, losses):
            metrics = self._trainer.evaluation_loop(
                self._get_loader(),
                description="Measurement",
                prediction_loss_only=True if loss_only else None,
                metric_key_prefix=self._prefix,
            ).metrics
        if self._metric not in metrics:
            found, do = f"no {self._metric!r}, only " + ", ".join(map(repr, metrics)), "pass one"
            raise PolicyError("ShrinkConfig, evaluate", found=found, expected="a metric of the evaluation", do=do)
        value = float(metrics[self._metric])
        batch_losses = torch.tensor([loss for loss, _ in losses], dtype=torch.float64, device="cpu")
        has_equal_batches = len({batch_size for _, batch_size in losses}) == 1
        is_mean = has_equal_batches and math.isclose(float(batch_losses.mean()), value, rel_tol=1e-5)
        return Reading(value, batch_losses if len(losses) > 1 and is_mean else None, unit="batches")

    def _get_loader(self) -> Any:
        if self._loader is None:
            prepared = self._trainer.accelerator._dataloaders
            num_prepared = len(prepared)
            self._loader = self._trainer.get_test_dataloader(self._subset())
            del prepared[num_prepared:]
        return self._loader

    def _subset(self) -> Any:
        if self._batches is None:
            return self._dataset
        count = self._batches * self._trainer.args.eval_batch_size
        if not hasattr(self._dataset, "__len__"):
            return [*islice(iter(self._dataset), count)]
        indices = range(min(count, len(self._dataset)))
        return self._dataset.select(indices) if hasattr(self._dataset, "select") else Subset(self._dataset, indices)


@contextmanager
def _record_batch_losses(trainer: Any, losses: list[tuple[float, int | None]]) -> Iterator[None]:
    step = trainer.prediction_step

    def prediction_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = step(model, inputs, *args, **kwargs)
        loss = outputs[0] if isinstance(outputs, tuple) else None
        if isinstance(loss, Tensor) and loss.numel() == 1:
            losses.append((float(loss), find_batch_size(inputs)))
        return outputs

    trainer.prediction_step = prediction_step
    try:
        yield
    finally:
        del trainer.prediction_step


def _find_dataset(datasets: Any, metric: str) -> tuple[str, Any]:
    """The prefix of a metric's name, and the dataset that it is evaluated on."""
    if isinstance(datasets, dict):
        matches = [name for name in datasets if metric.startswith(f"eval_{name}_")]
        if matches:
            name = max(matches, key=len)
            return f"eval_{name}", datasets[name]
        expected = " or ".join(f"'eval_{name}_loss'" for name in datasets)
        raise PolicyError("ShrinkConfig, evaluate", found=f"{metric!r}", expected=expected, do="name the dataset, too")
    if datasets is None:
        found = "no evaluation dataset"
        raise PolicyError("ShrinkConfig, evaluate", found=found, expected="one", do="pass eval_dataset= to the Trainer")
    return "eval", datasets


@contextmanager
def _isolate(trainer: Any) -> Iterator[None]:
    """Restore the attributes of the Trainer and its modules afterwards, and call no callbacks meanwhile."""
    attributes = AttributeSnapshot([trainer, *trainer.model.modules()], exclude=_TENSOR_ATTRIBUTES)
    handler = trainer.callback_handler
    trainer.callback_handler = CallbackHandler(
        [DefaultFlowCallback], handler.model, handler.processing_class, None, None
    )
    # The optimizer is hidden: schedule-free ones change the weights when an evaluation starts.
    trainer.optimizer, trainer.is_in_train = None, True
    try:
        yield
    finally:
        attributes.restore()


class TrainingLoss(DefaultEvaluation):
    """Measures a Trainer's loss, without a callback or a logger that hears of it.

    With an evaluation dataset and one process: on its first batches, by the Trainer's own evaluation. Else by
    `compute_loss` on the last training batches of the process that saves.

    Args:
        trainer: the Trainer.
        batches: how many; None: all of the evaluation dataset.
    """

    def __init__(self, trainer: Any, batches: int | None) -> None:
        self._trainer, self._ring = trainer, BatchRing(DEFAULT_BATCHES if batches is None else batches)
        datasets = trainer.eval_dataset
        self._evaluates = bool(datasets) if isinstance(datasets, dict) else datasets is not None
        self._evaluates = self._evaluates and trainer.args.world_size == 1
        if self._evaluates:
            metric = f"eval_{next(iter(datasets))}_loss" if isinstance(datasets, dict) else "eval_loss"
            evaluation = Evaluation(trainer, metric, batches)
            source = LossSource(evaluation.reading, evaluation.describe)
        else:
            source = LossSource(self._measure_ring, self._ring.describe)
        super().__init__([source])

    def add(self, batches: Sequence[Any]) -> None:
        """Keep the batches of an optimizer step, if they will be measured."""
        for batch in () if self._evaluates else batches:
            self._ring.add(batch)

    def _measure_ring(self, model: Any) -> Reading:
        with _isolate(self._trainer):
            return self._ring.measure(self._loss_of_batch, model)

    def _loss_of_batch(self, model: Any, batch: Any) -> Any:
        with self._trainer.compute_loss_context_manager():
            return self._trainer.compute_loss(model, self._trainer._prepare_inputs(batch))
