"""Handwritten digits on several ranks: ``main.py`` with ``DistributedDataParallel``.

``torchrun --standalone --nproc-per-node=2 main_ddp.py`` trains on two GPUs, or on the CPU where there is none.
``main_ddp.py`` is without checkflow, and ``main_ddp_checkflow.py`` the same with it: compare the two.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DistributedSampler

from main import Digits, Net, test


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    step_size = args.batch_size * dist.get_world_size()  # images that all ranks take together
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0 and dist.get_rank() == 0:
            done, share = batch_idx * step_size, 100.0 * batch_idx / len(train_loader)
            of = len(train_loader.dataset)
            print(f"Train Epoch: {epoch} [{done}/{of} ({share:.0f}%)]\tLoss: {loss.item():.6f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Handwritten digits on several ranks")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="images a rank and batch (default: 32)")
    parser.add_argument("--epochs", type=int, default=14, metavar="N", help="epochs to train (default: 14)")
    parser.add_argument("--lr", type=float, default=1.0, metavar="LR", help="learning rate (default: 1.0)")
    parser.add_argument("--gamma", type=float, default=0.7, metavar="M", help="its factor an epoch (default: 0.7)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of all random numbers (default: 1)")
    parser.add_argument("--log-interval", type=int, default=10, metavar="N", help="batches from one line to the next")
    parser.add_argument("--save-model", action="store_true", help="write the trained model to mnist_cnn.pt")
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")

    train_set = Digits(train=True)
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = torch.utils.data.DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    test_loader = torch.utils.data.DataLoader(Digits(train=False), batch_size=1000)

    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Net().to(device))
    torch.manual_seed(args.seed + dist.get_rank())  # each rank drops other activations
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        train(args, model, device, train_loader, optimizer, epoch)
        if dist.get_rank() == 0:
            test(model.module, device, test_loader)
        scheduler.step()

    if args.save_model and dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "mnist_cnn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
