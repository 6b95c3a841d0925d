"""Training scripts as people write them, small: the loops of PyTorch's own examples and of minGPT's trainer, with
checkflow's lines in them. Each trains on what it makes up, and returns all that its training decided."""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

import checkflow
from checkflow import Checkpointer
from tests.support.waiting import wait_for


@dataclass
class Life:
    """One life of a script, in its folder; it ends by SIGKILL after so many iterations, when anything is durable."""

    directory: Path
    killed_after: int | None = None
    iterations: int = 0

    def iterated(self, checkpointer: Checkpointer) -> None:
        self.iterations += 1
        if self.iterations == self.killed_after:
            wait_for(lambda: checkpointer.durable_step is not None)
            os.kill(os.getpid(), signal.SIGKILL)


Script = Callable[[Life], Any]


def saved_model(path: str, like: nn.Module) -> nn.Module:
    """A model that was saved whole, of the same modules as this one."""
    with torch.serialization.safe_globals([*{type(module) for module in like.modules()}]):
        model: nn.Module = torch.load(path, weights_only=True)
    return model


def images(count: int, size: int = 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.rand(count, 1, size, size, generator=generator), torch.randint(0, 4, (count,), generator=generator)
    )


# With a loop of batches


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(9, 6)
        self.rnn, self.decoder = nn.LSTM(6, 6, 2, dropout=0.2), nn.Linear(6, 9)

    def forward(self, x: torch.Tensor, hidden: Any) -> Any:
        output, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return self.decoder(self.drop(output)).view(-1, 9), hidden


def word_language_model(life: Life) -> Any:
    """No optimizer but a loop over parameters, a hidden state that goes on, a rate that validation anneals, the best
    model saved whole."""
    torch.manual_seed(1)
    model, batches, bptt = Words(), 6, 5
    words = torch.randint(0, 9, (batches * bptt + 1, 3))
    kept = checkflow.Variables(hidden=None, lr=2.0, best=math.inf, losses=[])
    with Checkpointer(model, directory="checkpoints", state={"kept": kept}) as checkpointer:
        for turn in checkpointer.steps(8 * batches):
            i = turn % batches * bptt
            if i == 0:
                model.train()
                kept.hidden = (torch.zeros(2, 3, 6), torch.zeros(2, 3, 6))
            model.zero_grad()
            hidden = tuple(part.detach() for part in kept.hidden)
            output, kept.hidden = model(words[i : i + bptt], hidden)
            loss = F.cross_entropy(output, words[i + 1 : i + 1 + bptt].view(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-kept.lr)
            kept.losses.append(loss.item())
            if turn % batches == batches - 1:
                model.eval()
                with torch.no_grad():
                    worth = F.cross_entropy(model(words[:-1], None)[0], words[1:].view(-1)).item()
                if worth < kept.best:
                    torch.save(model, "best.pt")
                    kept.best = worth
                else:
                    kept.lr /= 4
            life.iterated(checkpointer)
    best = saved_model("best.pt", model)
    return model.state_dict(), best.state_dict(), kept.state_dict()


def super_resolution(life: Life) -> Any:
    """The model is saved whole after each epoch."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.PixelShuffle(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = checkflow.resumable(DataLoader(images(24), batch_size=4, shuffle=True))
    saved = []
    with Checkpointer(model, optimizer, loader, directory="checkpoints") as checkpointer:
        for epoch in checkpointer.epochs(8):
            for x, _ in checkpointer.loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), F.interpolate(x, scale_factor=2)).backward()
                optimizer.step()
                life.iterated(checkpointer)
            torch.save(model, f"model_epoch_{epoch}.pth")
    saved = [saved_model(f"model_epoch_{epoch}.pth", model).state_dict() for epoch in range(8)]
    return saved, optimizer.state_dict()["state"]


def dcgan(life: Life) -> Any:
    """Two models of the same names as their optimizers, noise from the process's generator."""
    torch.manual_seed(3)
    generator = nn.Sequential(nn.ConvTranspose2d(5, 4, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 1, 5))
    judge = nn.Sequential(nn.Conv2d(1, 4, 5), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 4), nn.Flatten(0))
    models = {"G": generator, "D": judge}
    optimizers = {name: torch.optim.Adam(one.parameters(), lr=0.002, betas=(0.5, 0.9)) for name, one in models.items()}
    fixed = torch.randn(3, 5, 1, 1)
    loader = checkflow.resumable(DataLoader(images(20), batch_size=4, shuffle=True))
    with Checkpointer(models, optimizers, loader, directory="checkpoints") as checkpointer:
        for _ in checkpointer.epochs(8):
            for x, _ in checkpointer.loader:
                judge.zero_grad()
                F.binary_cross_entropy_with_logits(judge(x), torch.ones(len(x))).backward()
                fake = generator(torch.randn(len(x), 5, 1, 1))
                F.binary_cross_entropy_with_logits(judge(fake.detach()), torch.zeros(len(x))).backward()
                optimizers["D"].step()
                generator.zero_grad()
                F.binary_cross_entropy_with_logits(judge(fake), torch.ones(len(x))).backward()
                optimizers["G"].step()
                life.iterated(checkpointer)
    with torch.no_grad():
        return generator(fixed), judge.state_dict(), generator.state_dict()


class Pairs(Dataset[Any]):
    """Its samples are drawn from all three generators."""

    def __init__(self) -> None:
        self.images = images(24)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        x, y = self.images[index]
        same = random.random() < 0.5
        other, label = self.images[int(numpy.random.randint(len(self)))]
        return x, other if not same else x + 0.01 * torch.randn(()), torch.tensor(float(same or y == label))


def siamese_network(life: Life) -> Any:
    """Pairs that the data set draws in worker processes, Adadelta, a schedule by epochs."""
    torch.manual_seed(4)
    body, head = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU()), nn.Linear(16, 1)
    model = nn.ModuleDict({"body": body, "head": head})
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    # Forked workers end when their parent is killed; a fork server of their own would keep them waiting.
    own = DataLoader(Pairs(), batch_size=4, shuffle=True, num_workers=1, multiprocessing_context="fork")
    loader, state = checkflow.resumable(own), {"scheduler": scheduler}
    with Checkpointer(model, optimizer, loader, directory="checkpoints", state=state) as checkpointer:
        for _ in checkpointer.epochs(8):
            model.train()
            for one, other, target in checkpointer.loader:
                optimizer.zero_grad()
                both = torch.cat((body(one), body(other)), 1)
                F.binary_cross_entropy_with_logits(head(both).squeeze(1), target).backward()
                optimizer.step()
                life.iterated(checkpointer)
            scheduler.step()
    return model.state_dict(), scheduler.state_dict()


def mnist_rnn(life: Life) -> Any:
    """A recurrent net over the rows of images, batch norm and dropout."""
    torch.manual_seed(5)
    model = nn.ModuleDict({"rnn": nn.LSTM(8, 6, batch_first=True), "norm": nn.BatchNorm1d(6), "head": nn.Linear(6, 4)})
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    loader = checkflow.DataLoader(images(24), batch_size=5, shuffle=True)
    losses = []
    state = {"scheduler": scheduler}
    with Checkpointer(model, optimizer, loader, directory="checkpoints", state=state) as checkpointer:
        for _ in checkpointer.epochs(8):
            model.train()
            for x, y in checkpointer.loader:
                optimizer.zero_grad()
                rows = model["rnn"](x.squeeze(1))[0][:, -1]
                loss = F.cross_entropy(model["head"](F.dropout(model["norm"](rows), 0.3)), y)
                loss.backward()
                optimizer.step()
                life.iterated(checkpointer)
            scheduler.step()
            losses.append(loss.item())
    return model.state_dict(), losses[-1]


def vae(life: Life) -> Any:
    """Noise within the model; samples drawn between epochs."""
    torch.manual_seed(6)
    encoder, decoder = nn.Linear(64, 6), nn.Linear(3, 64)
    model = nn.ModuleList((encoder, decoder))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = checkflow.DataLoader(images(24), batch_size=5, shuffle=True)
    samples = torch.empty(0)
    with Checkpointer(model, optimizer, loader, directory="checkpoints") as checkpointer:
        for _ in checkpointer.epochs(8):
            for x, _ in checkpointer.loader:
                flat = x.flatten(1)
                mean, log_variance = encoder(flat).chunk(2, 1)
                z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
                loss = F.binary_cross_entropy_with_logits(decoder(z), flat, reduction="sum")
                loss = loss - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                life.iterated(checkpointer)
            with torch.no_grad():
                samples = decoder(torch.randn(2, 3))
    return model.state_dict(), samples


def mingpt(life: Life) -> Any:
    """A trainer with callbacks, an endless iterator over samples drawn with replacement, groups of parameters."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 9))
    decay = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    data = torch.randint(0, 9, (30, 7), generator=torch.Generator().manual_seed(1))
    sampler = RandomSampler(data, replacement=True, num_samples=int(1e10))  # type: ignore[arg-type]
    own = DataLoader(data, sampler=sampler, batch_size=4)  # type: ignore[arg-type]
    losses = checkflow.Variables(all=[])
    with Checkpointer(
        model, optimizer, checkflow.resumable(own), directory="checkpoints", state={"losses": losses}
    ) as checkpointer:

        def on_batch_end(loss: torch.Tensor) -> None:
            losses.all.append(loss.item())

        batches = iter(checkpointer.loader)
        while checkpointer.iteration < 48:
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(checkpointer.loader)
                batch = next(batches)
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            model.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            on_batch_end(loss)
            checkpointer.step()
            life.iterated(checkpointer)
    return model.state_dict(), losses.all


# Without batches


def gcn(life: Life) -> Any:
    """The whole graph in each iteration, evaluated after each."""
    torch.manual_seed(8)
    adjacency, features = torch.rand(12, 12).softmax(1), torch.rand(12, 5)
    labels = torch.randint(0, 3, (12,))
    model = nn.ModuleList((nn.Linear(5, 6), nn.Linear(6, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    worth = []

    def forward() -> torch.Tensor:
        hidden = F.dropout(F.relu(adjacency @ model[0](features)), 0.5, model.training)
        result: torch.Tensor = adjacency @ model[1](hidden)
        return result

    with Checkpointer(model, optimizer, directory="checkpoints") as checkpointer:
        for _ in checkpointer.steps(48):
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(forward(), labels).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                worth.append(F.cross_entropy(forward(), labels).item())
            life.iterated(checkpointer)
    return model.state_dict(), worth[-1]


class Pole:
    """An environment with a generator of its own."""

    def __init__(self) -> None:
        self.rng, self.place = numpy.random.default_rng(9), 0.0

    def reset(self) -> float:
        self.place = float(self.rng.uniform(-1, 1))
        return self.place

    def step(self, action: int) -> tuple[float, bool]:
        self.place += 0.3 * (2 * action - 1) + float(self.rng.normal(0, 0.1))
        return self.place, abs(self.place) > 2


def _episodes(life: Life, seed: int, *, critic: bool) -> Any:
    torch.manual_seed(seed)
    body, act, value = nn.Linear(1, 6), nn.Linear(6, 2), nn.Linear(6, 1)
    model = nn.ModuleList((body, act, value) if critic else (body, act))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    pole, kept = Pole(), checkflow.Variables(running_reward=10.0)
    state = {"pole": checkflow.Variables(vars(pole), "rng"), "kept": kept}
    with Checkpointer(model, optimizer, directory="checkpoints", state=state) as checkpointer:
        for _ in checkpointer.steps(48):
            place, chosen, worths, rewards = pole.reset(), [], [], []
            for _ in range(12):
                hidden = F.relu(body(torch.tensor([place])))
                policy = torch.distributions.Categorical(logits=act(hidden))
                action = policy.sample()
                chosen.append(policy.log_prob(action))
                worths.append(value(hidden).squeeze() if critic else torch.zeros(()))
                place, done = pole.step(int(action))
                rewards.append(1.0)
                if done:
                    break
            kept.running_reward = 0.05 * sum(rewards) + 0.95 * kept.running_reward
            returns = torch.tensor(list(itertools.accumulate(rewards, lambda total, r: r + 0.9 * total))[::-1])
            advantage = returns - torch.stack(worths)
            loss = -(torch.stack(chosen) * advantage.detach()).sum() + (advantage.square().sum() if critic else 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            life.iterated(checkpointer)
    return model.state_dict(), kept.running_reward, pole.rng.random()


def reinforce(life: Life) -> Any:
    """Episodes of changing length, an average of rewards, an environment that draws."""
    return _episodes(life, 10, critic=False)


def actor_critic(life: Life) -> Any:
    return _episodes(life, 11, critic=True)


def time_sequence_prediction(life: Life) -> Any:
    """LBFGS: a closure that runs several times in each step; in double precision."""
    torch.manual_seed(12)
    waves = torch.sin(torch.arange(30, dtype=torch.float64) / 3 + torch.rand(4, 1, dtype=torch.float64) * 6)
    rnn, head = nn.LSTM(1, 5, batch_first=True).double(), nn.Linear(5, 1).double()
    model = nn.ModuleList((rnn, head))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    losses = checkflow.Variables(all=[])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(head(rnn(waves[:, :-1, None])[0]).squeeze(2), waves[:, 1:])
        loss.backward()
        return loss

    with Checkpointer(model, optimizer, directory="checkpoints", state={"losses": losses}) as checkpointer:
        for _ in checkpointer.steps(40):
            losses.all.append(optimizer.step(closure).item())
            life.iterated(checkpointer)
    return model.state_dict(), losses.all


def regression(life: Life) -> Any:
    """No optimizer, batches drawn in the loop, which ends when the loss is small."""
    torch.manual_seed(13)
    model, weight = nn.Linear(3, 1), torch.randn(3, 1)
    loss = torch.ones(())
    with Checkpointer(model, directory="checkpoints") as checkpointer:
        for _ in checkpointer.steps(10_000):
            x = torch.randn(16, 3)
            model.zero_grad()
            loss = F.mse_loss(model(x), x @ weight)
            loss.backward()
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.05)
            life.iterated(checkpointer)
            if loss.item() < 1e-3:
                break
        return model.state_dict(), loss.item(), checkpointer.iteration


# README's own


def readme(life: Life) -> Any:
    """The first training script of README, word for word; only its dots are filled in."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "epochs(90)" in block)
    dots = "...  # your own iteration, unchanged"
    assert dots in code
    torch.manual_seed(14)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)

    def iterate(checkpointer: Checkpointer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        life.iterated(checkpointer)

    names = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataset": images(160), "iterate": iterate}
    exec(code.replace(dots, "iterate(checkpointer, x, y)").replace("epochs(90)", "epochs(9)"), names)
    return model.state_dict(), copy.deepcopy(optimizer).state_dict()["state"]


SCRIPTS: dict[str, Script] = {
    script.__name__: script
    for script in (
        *(word_language_model, super_resolution, dcgan, siamese_network, mnist_rnn, vae, mingpt),
        *(gcn, reinforce, actor_critic, time_sequence_prediction, regression, readme),
    )
}


def run(name: str, life: Life) -> None:
    """In a process of its own."""
    life.directory.mkdir(parents=True, exist_ok=True)
    os.chdir(life.directory)
    torch.set_num_threads(1)
    torch.save(SCRIPTS[name](life), "result.pt")
