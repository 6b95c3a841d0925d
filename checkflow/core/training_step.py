"""TrainingStep: what a user's ``build`` function returns, and what the planner traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from checkflow.core.errors import ModelError
from checkflow.core.state import as_models, as_optimizers


class TrainingStep:
    """One training iteration: models, optimizers, an example batch, and the function that runs it.

    The short form takes a loss; an iteration is ``zero_grad``, loss and ``backward`` (once per micro-batch), ``step``::

        TrainingStep(model, optimizer, loss=lambda model, x, y: F.cross_entropy(model(x), y), batch=(x, y))

    The general form takes the iteration itself; ``step(batch)`` is called as the user's own loop would::

        TrainingStep(step=iteration, models={"generator": g, "critic": c}, optimizers={"g": og, "c": oc}, batch=images)

    ``micro_batches`` is how often the short form runs loss and backward, each on ``batch``, before the optimizer steps;
    the general form only notes it in the plan's fingerprint.

    Raises:
        ModelError: neither or both forms are given, or an argument is missing or of the wrong kind.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        *,
        loss: Callable[..., torch.Tensor] | None = None,
        step: Callable[[Any], Any] | None = None,
        models: Mapping[str, nn.Module] | None = None,
        optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
        batch: Any,
        micro_batches: int = 1,
    ) -> None:
        if (loss is None) == (step is None):
            raise ModelError("TrainingStep takes either loss= (short form) or step= (general form), one of the two")
        if (model is not None and models is not None) or (optimizer is not None and optimizers is not None):
            raise ModelError("TrainingStep takes model or models=, optimizer or optimizers=, not both")
        chosen = models if models is not None else model
        if chosen is None:
            raise ModelError("TrainingStep needs a model: pass model= or models=")
        if not isinstance(micro_batches, int) or micro_batches < 1:
            raise ModelError(f"micro_batches must be a whole number of at least 1, not {micro_batches!r}")
        self.models: dict[str, nn.Module] = as_models(chosen)
        self.optimizers: dict[str, torch.optim.Optimizer] = as_optimizers(
            optimizers if optimizers is not None else optimizer, self.models
        )
        for name, module in self.models.items():
            if not isinstance(module, nn.Module):
                raise ModelError(f"model {name!r} is a {type(module).__name__}, not an nn.Module")
        for name, one in self.optimizers.items():
            if not isinstance(one, torch.optim.Optimizer):
                raise ModelError(f"optimizer {name!r} is a {type(one).__name__}, not a torch.optim.Optimizer")
        if loss is not None and not self.optimizers:
            raise ModelError(
                "loss= (short form) ends in an optimizer's step: pass optimizer=, or write the iteration as step="
            )
        if loss is not None and len(self.models) != 1:
            raise ModelError("loss= takes one model; write several models' iteration as step=")
        self.batch = batch
        self.micro_batches = micro_batches
        self.loss = loss
        self._step = step

    @property
    def function(self) -> Callable[..., Any]:
        """The user's own function: ``step`` or ``loss``, as given."""
        function = self._step if self._step is not None else self.loss
        assert function is not None
        return function

    def run(self, batch: Any) -> Any:
        """Run one whole iteration; return what the user's step returns (the last loss in the short form)."""
        if self._step is not None:
            return self._step(batch)
        assert self.loss is not None
        (model,) = self.models.values()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        arguments = batch if isinstance(batch, Sequence) and not isinstance(batch, torch.Tensor) else (batch,)
        for _ in range(self.micro_batches):
            loss = self.loss(model, *arguments)
            if not hasattr(loss, "backward"):
                raise ModelError(
                    f"loss= returned a {type(loss).__name__}, not a tensor: return the loss itself, without .item()"
                )
            if self.micro_batches > 1:
                loss = loss / self.micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers.values():
            optimizer.step()
        return loss
