"""Lightning's Trainer with checkflow: ``Trainer(callbacks=[CheckflowCallback(directory="checkpoints")])``.

A boundary is where Lightning asks the training loader for the next batch, or begins the next epoch: schedulers,
validation and logging belong to the iteration before it. A resumed fit goes on from there, with all of its counters.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from checkflow.api import Checkpointer
from checkflow.core.errors import Preempted, UnsupportedError
from checkflow.core.paths import refuse_url
from checkflow.integrations.missing import missing
from checkflow.integrations.numbered import numbered
from checkflow.runtime.arguments import read_signals
from checkflow.runtime.data.adapters.base import iterates_as_torch
from checkflow.runtime.data.adapters.resumable import resumable
from checkflow.runtime.data.adapters.stateful import StatefulLoader
from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.data.loader import DataLoader
from checkflow.runtime.data.order import Share
from checkflow.runtime.state.collect import Stateful

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        EarlyStopping,
        GradientAccumulationScheduler,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
    from lightning.pytorch.loops import _Loop
    from lightning.pytorch.loops.fit_loop import RestartStage
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
    from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
except ImportError as error:
    raise missing("lightning", error) from None

# They change the model, its optimizer or the loop in ways that no state has.
_CHANGING = (BaseFinetuning, GradientAccumulationScheduler, StochasticWeightAveraging, WeightAveraging)
logger = logging.getLogger("checkflow")
_OPTIONS = frozenset(inspect.signature(Checkpointer).parameters) - {"model", "optimizer", "loader"}


class CheckflowCallback(Callback):  # type: ignore[misc]
    """Checkpoints of a ``fit`` by checkflow, and its resume: start the same script again.

    The training loader may be any that ``checkflow.resumable`` takes, torch's among them; it becomes resumable, and
    under several devices it deals the samples to them.

    Args:
        directory: where checkpoints go, on storage that all devices' processes see.
        options: of :class:`checkflow.Checkpointer`, such as ``every``; ``state`` for further objects to save.

    Attributes:
        checkpointer: of the ``fit`` that goes on, or of the last one; None before.

    Raises:
        TypeError: an option that a Checkpointer has not.
        UnsupportedError: at the start of ``fit``: what cannot resume exactly; the message says what to change.
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        if unknown := options.keys() - _OPTIONS:
            raise TypeError(f"CheckflowCallback has no option {', '.join(sorted(unknown))}; Checkpointer's are its own")
        refuse_url(directory)
        self._options = {**options, "directory": directory}
        self.checkpointer: Checkpointer | None = None
        self._epochs: Iterator[int] = iter(())
        self._open = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.fast_dev_run:
            return
        _refuse(trainer)
        # First: what other callbacks do as training and epochs begin follows the restored state, as it did before.
        trainer.callbacks = [self, *(one for one in trainer.callbacks if one is not self)]
        source = trainer.fit_loop._data_source
        if not isinstance(source.dataloader, _ResumableSource):
            source.dataloader = _ResumableSource(source.dataloader, trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path:
            raise UnsupportedError(
                f"fit(ckpt_path={str(trainer.ckpt_path)!r}) and CheckflowCallback would both restore the job: leave "
                "ckpt_path out; to begin from such a file, load its weights into the model before fit"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:
            return
        progress = _Progress(trainer)
        _release_signals(trainer, read_signals(self._options.get("signals", ("SIGTERM", "SIGUSR1"))))
        state: dict[str, Stateful] = {"trainer": progress, "precision": trainer.precision_plugin}
        state |= numbered("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs])
        state |= self._options.get("state") or {}
        self.checkpointer = Checkpointer(
            trainer.model, numbered("optimizer", trainer.optimizers), _training_loader(trainer),
            **{**self._options, "state": state},
        )  # fmt: skip
        self._open = True
        endless = trainer.max_epochs is None or trainer.max_epochs < 0
        self._epochs = self.checkpointer.epochs(sys.maxsize if endless else trainer.max_epochs)
        if self.checkpointer.resumed_from is not None and progress.go_on():
            next(self._epochs, None)  # within an epoch, whose begin Lightning does not report again

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._open:
            next(self._epochs, None)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        monitor = self._options.get("monitor")
        if not self._open or monitor is None:
            return
        assert self.checkpointer is not None
        logged = trainer._logger_connector.metrics["callback"]  # by this validation alone
        if (value := trainer.strategy.broadcast(logged.get(monitor))) is not None:  # all ranks are to rank alike
            self.checkpointer.metric(monitor, value)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._open:
            return
        if not _is_within_epoch(trainer):
            next(self._epochs, None)
        self._close(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(sys.exception())

    def _close(self, error: BaseException | None) -> None:
        if not self._open:
            return
        self._open = False
        assert self.checkpointer is not None
        if error is None:
            self._epochs.close()  # type: ignore[attr-defined]  # a generator's: as ``break`` does
        self.checkpointer.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


class _Progress:
    """Where a ``fit`` is: all that its Trainer, its callbacks and its module save, but weights and optimizers."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        loop, datamodule = trainer.fit_loop, trainer.datamodule
        loops = loop.state_dict()
        loops["state_dict"] = {}  # the loader's place, which the Checkpointer saves
        current = loop.epoch_progress.current
        if current.ready == current.started == current.processed and _is_within_epoch(trainer):
            # Training has ended within an epoch, and Lightning counts it as a whole one: more steps are to go on in it.
            for counts in (loops["epoch_progress"]["total"], loops["epoch_progress"]["current"]):
                counts["processed"] -= 1
                counts["completed"] -= 1
        return {
            "loops": loops,
            # Of an end that only this run's limits have caused, nothing: the next run may have others.
            "should_stop": trainer.should_stop and (not loop._can_stop_early or _stopped_early(trainer)),
            "callbacks": {one.state_key: state for one in trainer.callbacks if (state := one.state_dict())},
            "metrics": dict(trainer._logger_connector._callback_metrics),
            "sums": _sums(loop.epoch_loop._results),
            "hooks": _saved_by_hooks(trainer),
            "datamodule": datamodule.state_dict() if datamodule else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer, loop = self._trainer, self._trainer.fit_loop
        loop.load_state_dict(state["loops"])
        # Lightning guesses from its counters what a restart must repeat. Nothing: a boundary is no place within a step.
        for one in (loop, loop.epoch_loop, *vars(loop.epoch_loop).values()):
            if isinstance(one, _Loop):
                one._restarting = one._loaded_from_state_dict = one._resuming_from_checkpoint = False
        trainer.should_stop = state["should_stop"]
        for callback in trainer.callbacks:
            if found := state["callbacks"].get(callback.state_key):
                callback.load_state_dict(found)
        trainer._logger_connector._callback_metrics.update(state["metrics"])
        loop.epoch_loop._results = _Continued(state["sums"])
        if hooks := state["hooks"]:
            checkpoint = {**_given(trainer), **hooks}
            for callback in trainer.callbacks:
                callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
            trainer.lightning_module.on_load_checkpoint(checkpoint)
        if trainer.datamodule and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])

    def go_on(self) -> bool:
        """After a resume: let Lightning go on at the boundary. Returns whether that is within an epoch."""
        loop = self._trainer.fit_loop
        current = loop.epoch_progress.current
        if within := current.processed < current.started:
            loop._restart_stage = RestartStage.RESTARTED_MID_EPOCH  # its begin is not reported again
            epoch_loop = loop.epoch_loop
            epoch_loop.reset = lambda: vars(epoch_loop).pop("reset")  # once: the counters go on from where they are
        elif current.started < current.ready:
            loop._restart_stage = RestartStage.RESTARTED_ON_EPOCH_START
        return bool(within)


class _Continued(_ResultCollection):  # type: ignore[misc]
    """What ``log`` has added up in this epoch before a resume, to which each value is added when it comes again."""

    def __init__(self, sums: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        super().__init__(training=True)
        self.waiting = dict(sums)

    def __setitem__(self, key: str, metric: _ResultMetric) -> None:
        super().__setitem__(key, metric)
        for name, value in self.waiting.pop(key, {}).items():
            setattr(metric, name, value)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        super().reset(metrics, fx)
        if metrics is None:  # the epoch is over
            self.waiting = {}


def _sums(results: _ResultCollection) -> dict[str, Mapping[str, torch.Tensor]]:
    waiting = results.waiting if isinstance(results, _Continued) else {}
    added = {key: one for key, one in results.items() if one.is_tensor and one.meta.on_epoch}
    return {**waiting, **{key: {name: getattr(one, name) for name in one._defaults} for key, one in added.items()}}


def _saved_by_hooks(trainer: Trainer) -> dict[str, Any]:
    """What ``on_save_checkpoint`` of the module and of callbacks adds to a checkpoint of Lightning's."""
    module = trainer.lightning_module
    callbacks = [one for one in trainer.callbacks if type(one).on_save_checkpoint is not Callback.on_save_checkpoint]
    overridden = type(module).on_save_checkpoint is not LightningModule.on_save_checkpoint
    if not (callbacks or overridden):
        return {}
    given = _given(trainer)
    checkpoint = dict(given)
    for callback in callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)
    return {name: value for name, value in checkpoint.items() if name not in given or value is not given[name]}


def _given(trainer: Trainer) -> dict[str, Any]:
    """Of what a checkpoint of Lightning's has, what its hooks read."""
    weights = trainer.lightning_module.state_dict()
    return {"state_dict": weights, "epoch": trainer.current_epoch, "global_step": trainer.global_step}


def _stopped_early(trainer: Trainer) -> bool:
    ones = (one for one in trainer.callbacks if isinstance(one, EarlyStopping))
    return any(one.stopping_reason != EarlyStoppingReason.NOT_STOPPED for one in ones)


def _is_within_epoch(trainer: Trainer) -> bool:
    """Whether the epoch has more batches than were used."""
    return not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def _refuse(trainer: Trainer) -> None:
    """Refuse what cannot resume exactly."""
    if not isinstance(trainer, Trainer):
        raise UnsupportedError(
            f"the Trainer is one of {type(trainer).__module__.partition('.')[0]}, another package: import "
            "lightning.pytorch in its place"
        )
    if sum(isinstance(one, CheckflowCallback) for one in trainer.callbacks) > 1:
        raise UnsupportedError("the Trainer has several CheckflowCallbacks, of which one alone can go on: leave one")
    for callback in trainer.callbacks:
        if isinstance(callback, _CHANGING):
            raise UnsupportedError(
                f"checkflow does not save what the callback {type(callback).__name__} changes as training goes on: "
                "leave it out"
            )
    strategy = trainer.strategy
    known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy)
    if not known or isinstance(strategy, DeepSpeedStrategy):
        raise UnsupportedError(
            f"checkflow does not save what {type(strategy).__name__} holds: use one device, DDPStrategy, or "
            "ModelParallelStrategy with fully_shard"
        )
    for option in ("reload_dataloaders_every_n_epochs", "overfit_batches"):
        if getattr(trainer, option):
            raise UnsupportedError(
                f"Trainer({option}=…) replaces the loader that CheckflowCallback saves: leave it out"
            )
    if "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters:
        raise UnsupportedError(
            "training_step takes dataloader_iter, so nothing says which batches it has used: let it take batch"
        )


class _ResumableSource:
    """Where Lightning takes its training loader from: the user's, made resumable."""

    def __init__(self, source: Callable[[], Any], trainer: Trainer) -> None:
        self._source, self._trainer = source, trainer

    def __call__(self) -> ResumableLoader:
        loader = self._source()
        if isinstance(loader, CombinedLoader | list | tuple | Mapping):
            raise UnsupportedError(
                f"there are several training loaders, in a {type(loader).__name__}, and CheckflowCallback saves the "
                "place of one: make one loader of them"
            )
        loader = _dealt(loader, self._trainer)
        if loader.batches is None:
            raise UnsupportedError(
                "the training loader has no length, so Lightning fetches ahead of what it uses: give its data "
                "set __len__"
            )
        return loader


def _dealt(loader: Any, trainer: Trainer) -> ResumableLoader:
    """Resumable; it deals to the ranks as Lightning would."""
    if trainer.world_size == 1:
        return resumable(loader)
    ranks = trainer.strategy.distributed_sampler_kwargs  # of tensor-parallel ones, all have the same samples
    share = Share(ranks["rank"], ranks["num_replicas"])
    deals = trainer._accelerator_connector.use_distributed_sampler
    if isinstance(loader, DataLoader) and deals and loader.share != share:
        raise UnsupportedError(
            f"the training loader deals to {loader.share.world_size} ranks, and Lightning has {share.world_size} that "
            "get samples of their own: give it rank and world_size, or pass a loader of torch's"
        )
    if not isinstance(loader, TorchDataLoader) or isinstance(loader.dataset, IterableDataset):
        return resumable(loader)
    if isinstance(loader, StatefulLoader) or not iterates_as_torch(loader):
        return resumable(loader)
    if not deals:  # the user's own sampler does
        share = Share(0, 1)
    return resumable(loader, rank=share.rank, world_size=share.world_size)


def _training_loader(trainer: Trainer) -> ResumableLoader:
    (loader,) = trainer.fit_loop._combined_loader.flattened
    return loader  # type: ignore[no-any-return]


def _release_signals(trainer: Trainer, numbers: Iterable[signal.Signals]) -> None:
    """Take Lightning's handlers away of signals that checkflow handles: they would end training before its boundary."""
    if threading.current_thread() is not threading.main_thread():
        return
    connector = trainer._signal_connector
    handlers = connector._original_handlers
    for number in numbers:
        now = signal.getsignal(number)
        if isinstance(now, _HandlersCompose) and handlers.get(number) is not None:
            if connector._slurm_sigusr_handler_fn in now.signal_handlers:
                logger.warning(
                    "Lightning does not requeue this SLURM job: checkflow handles %s; requeue it where it ends with "
                    "exit code %d, or leave the signal out of signals=", number.name, Preempted.EXIT_CODE,
                )  # fmt: skip
            signal.signal(number, handlers[number])
