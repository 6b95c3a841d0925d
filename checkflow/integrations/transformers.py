"""transformers' Trainer with checkflow: ``attach(trainer, directory="checkpoints")`` before ``trainer.train()``.

A boundary is where the next iteration begins, or an epoch's evaluation has ended: logging and evaluation belong to the
iteration before it. Trainer skips the batches that were used, as it does for its own checkpoints, and loads nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset
from torch.utils.data import DataLoader as TorchDataLoader

from checkflow.api import Checkpointer
from checkflow.core.errors import UnsupportedError
from checkflow.core.paths import refuse_url
from checkflow.integrations.accelerate import refuse_parallelism
from checkflow.integrations.missing import missing
from checkflow.integrations.torch_order import TorchOrderLoader
from checkflow.runtime.data.adapters.base import iterates_as_torch
from checkflow.runtime.data.adapters.resumable import of_map_style, resumable
from checkflow.runtime.data.adapters.stateful import StatefulLoader
from checkflow.runtime.data.base import ResumableLoader
from checkflow.runtime.state.collect import Stateful

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise missing("transformers", error) from None

logger = logging.getLogger("checkflow")

# Of TrainerState: what training has come to. The rest follows from this run's arguments.
_PROGRESS = (
    "epoch", "global_step", "log_history", "total_flos", "num_input_tokens_seen", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip
# Of Trainer: of the losses since they were last logged, and where that was.
_LOSSES = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")


def attach(trainer: Trainer, directory: str | os.PathLike[str], **options: Any) -> Attached:
    """Have each ``trainer.train()`` checkpointed by checkflow, and go on where the last run stopped.

    Args:
        trainer: with its own loader, optimizer and scheduler, or with yours; of a subclass, if it has not replaced
            ``train``, ``get_train_dataloader`` or the inner loops by ones of another kind.
        directory: where checkpoints go, on storage that all processes see.
        options: of :class:`checkflow.Checkpointer`, such as ``every``; ``state`` for further objects to save.

    Returns:
        The callback that it added, whose ``checkpointer`` is that of the training that goes on.

    Raises:
        UnsupportedError: what cannot resume exactly; the message says what to change.
    """
    refuse_url(directory)
    _refuse(trainer)
    attached = Attached(trainer, {**options, "directory": directory})
    for name in ("train", "get_train_dataloader", "get_batch_samples", "_run_epoch", "_finalize_training"):
        setattr(trainer, name, attached.around(name))
    trainer._load_rng_state = lambda checkpoint: None  # the Checkpointer puts them back
    trainer.callback_handler.callbacks.insert(0, attached)
    return attached


class Attached(TrainerCallback):  # type: ignore[misc]
    """What checkflow does around a Trainer's own methods, and in its callbacks."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Any]) -> None:
        self._trainer, self._options = trainer, options
        self.checkpointer: Checkpointer | None = None
        self._loader: ResumableLoader | None = None
        self._resumed = self._open = False
        self._marked = self._batches = 0  # the last step that was marked, and batches since

    def around(self, name: str) -> Callable[..., Any]:
        inner, outer = getattr(self._trainer, name), getattr(self, name)

        def method(*arguments: Any, **keywords: Any) -> Any:
            return outer(inner, *arguments, **keywords)

        return method

    # Around Trainer's methods

    def train(self, inner: Callable[..., Any], resume_from_checkpoint: Any = None, *rest: Any, **keywords: Any) -> Any:
        if (rest[0] if rest else keywords.get("trial")) is not None:
            raise UnsupportedError(
                "hyperparameter_search trains many models, and checkflow's directory has one: attach to the Trainer "
                "that trains with what was found"
            )
        if resume_from_checkpoint:
            raise UnsupportedError(
                "train(resume_from_checkpoint=…) and checkflow would both restore the job: leave it out; checkflow "
                "goes on from its own directory"
            )
        try:
            result = inner(None, *rest, **keywords)
            self._close()  # where a subclass has a loop of its own
        except BaseException as error:
            self._close(error)
            raise
        finally:
            self._loader = None
        return result

    def get_train_dataloader(self, inner: Callable[[], Any]) -> Any:
        """The loader as Trainer makes it, with the sampler that Accelerate gives it; checkflow deals to the ranks."""
        accelerator = self._trainer.accelerator
        prepare, seen = accelerator.prepare, list[tuple[Any, Any, ResumableLoader | None]]()

        def note(*objects: Any, **keywords: Any) -> Any:
            before = resumable(objects[0]) if _is_map_style(objects[0]) else None  # Accelerate replaces its sampler
            prepared = prepare(*objects, **keywords)
            seen.append((prepared, objects[0], before))
            return prepared

        accelerator.prepare = note
        try:
            loader = inner()
        finally:
            del accelerator.prepare
        raw, before = next(((raw, before) for prepared, raw, before in seen if prepared is loader), (loader, None))
        several = accelerator.num_processes > 1
        if several and isinstance(getattr(raw, "dataset", None), IterableDataset):
            raise UnsupportedError(
                "iterable-style data is not dealt to several processes: make it map-style (with __len__ and "
                "__getitem__), or train in one process"
            )
        if _is_map_style(raw):
            dropped = getattr(raw.batch_sampler, "drop_last", False)
            prepared = several and raw is not loader and type(raw.batch_sampler) is BatchSampler
            evened = prepared and accelerator.even_batches  # by the epoch's first samples
            order = of_map_style(raw, TorchOrderLoader, tail="drop" if dropped else "pad" if evened else None)
            order.before = before or resumable(raw)
            self._loader = order
        else:
            self._loader = resumable(raw)
        return self._loader.as_torch()

    def get_batch_samples(self, inner: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """The next iteration begins: what Trainer makes of its batches belongs to it."""
        assert self._loader is not None
        if self._loader.batches is not None:  # else there may be none: an evaluation belongs to the last one then
            self._mark()
        return inner(*arguments, **keywords)

    def _run_epoch(self, inner: Callable[..., Any], **keywords: Any) -> None:
        trainer = self._trainer
        if trainer.control.should_training_stop:
            return
        if self._resumed:
            assert self._loader is not None
            epoch, batches = self._first_place(keywords["num_update_steps_per_epoch"])
            if keywords["epoch"] < epoch:
                return
            self._resumed = False
            keywords |= {"epochs_trained": epoch, "steps_trained_in_current_epoch": batches}
            keywords["resume_from_checkpoint"] = self._options["directory"]
        inner(**keywords)
        self._mark()
        if trainer.control.should_epoch_stop and not trainer.control.should_training_stop:
            raise UnsupportedError(
                "should_epoch_stop leaves an epoch, of which some batches were fetched already: a resume would not "
                "find its place; leave it out, or set should_training_stop"
            )

    def _first_place(self, steps_per_epoch: int) -> tuple[int, int]:
        """The epoch and its used batches, where the loader goes on."""
        loader, state = self._loader, self._trainer.state
        accumulated = self._trainer.args.gradient_accumulation_steps
        assert loader is not None
        epoch, batches = loader.epoch, loader.used_batches()
        if loader.exhausted or batches == loader.batches:
            epoch, batches = epoch + 1, 0
        steps = epoch * steps_per_epoch + batches // accumulated
        if batches % accumulated or (loader.batches is not None and steps != state.global_step):
            raise UnsupportedError(
                f"the checkpoint is of step {state.global_step}, {batches} batches into epoch {epoch}, where these "
                "arguments make other steps: keep batch size, gradient_accumulation_steps and the number of processes"
            )
        return epoch, batches

    def _finalize_training(self, inner: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Before it adds up the losses, and loads the best model: that is no state to go on from."""
        self._close()
        return inner(*arguments, **keywords)

    def _close(self, error: BaseException | None = None) -> None:
        if self._open:
            self._open = False
            assert self.checkpointer is not None
            self.checkpointer.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    # Callbacks, before all others

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        trainer = self._trainer
        objects: dict[str, Stateful] = {"trainer": _Progress(trainer)}
        if trainer.lr_scheduler is not None:
            objects["scheduler"] = trainer.lr_scheduler
        if trainer.accelerator.scaler is not None:
            objects["scaler"] = trainer.accelerator.scaler
        options = {**self._options, "state": objects | dict(self._options.get("state") or {})}
        self.checkpointer = Checkpointer(trainer.model_wrapped, trainer.optimizer, self._loader, **options)
        self._open = True
        self.checkpointer.step(0)
        self._resumed = self.checkpointer.resumed_from is not None
        self._marked, self._batches = trainer.state.global_step, 0
        if trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
            logger.info(
                "nothing is left to do: %d steps were asked for, and earlier runs did %d; ask for more to go on, or "
                "begin anew in another directory", trainer.state.max_steps, trainer.state.global_step,
            )  # fmt: skip
        return trainer.control

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._mark()
        self._batches += self._trainer.current_gradient_accumulation_steps

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        monitor = self._options.get("monitor", "")
        if self._open and monitor in (metrics or {}):
            assert self.checkpointer is not None
            self.checkpointer.metric(monitor, metrics[monitor])

    def _mark(self) -> None:
        """The step that goes on is over, if it was taken."""
        assert self.checkpointer is not None
        if self._trainer.state.global_step != self._marked:
            self._marked = self._trainer.state.global_step
            self.checkpointer.step(self._batches)
            self._batches = 0


def _is_map_style(loader: Any) -> bool:
    """Whether it is torch's over map-style data, and iterates as torch's do."""
    return (
        isinstance(loader, TorchDataLoader)
        and not isinstance(loader, StatefulLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and iterates_as_torch(loader)
    )


class _Progress:
    """How far a Trainer and its callbacks are."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def _callbacks(self) -> dict[str, list[Any]]:
        """By class, those that have a state."""
        found: dict[str, list[Any]] = {}
        for one in (*self._trainer.callback_handler.callbacks, self._trainer.control):
            if isinstance(one, ExportableState):
                found.setdefault(type(one).__name__, []).append(one)
        return found

    def state_dict(self) -> dict[str, Any]:
        state = dataclasses.asdict(self._trainer.state)
        stops = self._trainer.control.should_training_stop
        return {
            "stopped": stops and state["global_step"] < state["max_steps"],  # early; a later run may have more steps
            "state": {name: state[name] for name in _PROGRESS},
            "losses": {name: getattr(self._trainer, name) for name in _LOSSES},
            "flos": self._trainer.current_flos,
            "callbacks": {
                name: [one.state()["attributes"] for one in all_] for name, all_ in self._callbacks().items()
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        trainer = self._trainer
        for name in _PROGRESS:
            setattr(trainer.state, name, saved["state"][name])
        for name, value in saved["losses"].items():
            setattr(trainer, name, value.to(trainer.args.device) if name == "_tr_loss" else value)
        trainer.current_flos = saved["flos"]
        trainer.control.should_training_stop = saved["stopped"]
        for name, ones in self._callbacks().items():
            for one, attributes in zip(ones, saved["callbacks"].get(name, ()), strict=False):
                vars(one).update(attributes)


def _refuse(trainer: Trainer) -> None:
    arguments = trainer.args
    if any(isinstance(one, Attached) for one in trainer.callback_handler.callbacks):
        raise UnsupportedError("this Trainer is attached already: call attach once")
    if arguments.auto_find_batch_size:
        raise UnsupportedError("auto_find_batch_size changes what a saved place means: leave it out")
    if arguments.ignore_data_skip:
        raise UnsupportedError("ignore_data_skip=True would use samples again after a resume: leave it out")
    if arguments.eval_on_start:
        raise UnsupportedError("eval_on_start=True would evaluate at each resume: leave it out")
    if trainer.is_deepspeed_enabled:
        raise UnsupportedError("checkflow does not save what DeepSpeed's engine holds: use DDP or fully_shard (FSDP 2)")
    refuse_parallelism(trainer.accelerator)
    for option in ("split_batches", "dispatch_batches"):
        if getattr(trainer.accelerator, option):
            raise UnsupportedError(f"accelerator_config has {option}: leave it out; checkflow deals the samples itself")
    if arguments.train_sampling_strategy == "batch_rebalance" and trainer.accelerator.num_processes > 1:
        raise UnsupportedError(
            "train_sampling_strategy='batch_rebalance' deals to the processes, as checkflow does: choose another"
        )
    if arguments.parallel_mode.value == "not_distributed":
        raise UnsupportedError("several GPUs in one process (DataParallel): start one process a GPU with torchrun")
