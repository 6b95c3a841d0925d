"""Handwritten digits, after PyTorch's own MNIST example.

The shape is that of https://github.com/pytorch/examples/blob/main/mnist/main.py (BSD 3-Clause, PyTorch contributors);
the digits are UCI's 1,797 of 8 by 8 pixels, which lie beside checkflow's demo. ``main.py`` is without checkflow, and
``main_checkflow.py`` the same with it: compare the two.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR

DIGITS = Path(__file__).parents[2] / "checkflow" / "demo" / "digits.npz"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(256, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = F.relu(self.fc1(x))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)


class Digits(torch.utils.data.Dataset):
    """The first four fifths of the digits for training, the others for testing."""

    def __init__(self, train):
        with np.load(DIGITS) as data:
            images, labels = data["images"], data["labels"]
        border = len(labels) * 4 // 5
        chosen = slice(0, border) if train else slice(border, None)
        images = torch.tensor(images[chosen], dtype=torch.float32).unsqueeze(1) / 16
        self.images = (images - 0.3053) / 0.3763  # mean and standard deviation of all pixels
        self.targets = torch.tensor(labels[chosen], dtype=torch.int64)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            done, share = batch_idx * args.batch_size, 100.0 * batch_idx / len(train_loader)
            of = len(train_loader.dataset)
            print(f"Train Epoch: {epoch} [{done}/{of} ({share:.0f}%)]\tLoss: {loss.item():.6f}")
            if args.dry_run:
                break


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    size = len(test_loader.dataset)
    share = 100.0 * correct / size
    print(f"\nTest set: Average loss: {test_loss / size:.4f}, Accuracy: {correct}/{size} ({share:.0f}%)\n")


def main():
    parser = argparse.ArgumentParser(description="Handwritten digits, after PyTorch's MNIST example")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="images in a batch (default: 64)")
    parser.add_argument("--test-batch-size", type=int, default=1000, metavar="N", help="in testing (default: 1000)")
    parser.add_argument("--epochs", type=int, default=14, metavar="N", help="epochs to train (default: 14)")
    parser.add_argument("--lr", type=float, default=1.0, metavar="LR", help="learning rate (default: 1.0)")
    parser.add_argument("--gamma", type=float, default=0.7, metavar="M", help="its factor an epoch (default: 0.7)")
    parser.add_argument("--no-accel", action="store_true", help="train on the CPU even where there is a GPU")
    parser.add_argument("--dry-run", action="store_true", help="one batch an epoch, to see whether all of it runs")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of all random numbers (default: 1)")
    parser.add_argument("--log-interval", type=int, default=10, metavar="N", help="batches from one line to the next")
    parser.add_argument("--save-model", action="store_true", help="write the trained model to mnist_cnn.pt")
    args = parser.parse_args()

    use_accel = not args.no_accel and torch.accelerator.is_available()
    torch.manual_seed(args.seed)
    device = torch.accelerator.current_accelerator() if use_accel else torch.device("cpu")

    train_kwargs = {"batch_size": args.batch_size}
    test_kwargs = {"batch_size": args.test_batch_size}
    if use_accel:
        accel_kwargs = {"num_workers": 1, "persistent_workers": True, "pin_memory": True, "shuffle": True}
        train_kwargs.update(accel_kwargs)
        test_kwargs.update(accel_kwargs)
    train_loader = torch.utils.data.DataLoader(Digits(train=True), **train_kwargs)
    test_loader = torch.utils.data.DataLoader(Digits(train=False), **test_kwargs)

    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()

    if args.save_model:
        torch.save(model.state_dict(), "mnist_cnn.pt")


if __name__ == "__main__":
    main()
