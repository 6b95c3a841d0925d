"""A small GPT on several ranks: ``train.py`` with ``fully_shard`` (FSDP2).

``torchrun --standalone --nproc-per-node=2 train_fsdp.py`` trains on two GPUs, or on the CPU where there is none.
``train_fsdp.py`` is without checkflow, and ``train_fsdp_checkflow.py`` the same with it: compare the two.
"""

import argparse
import math
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from model import GPT, GPTConfig
from prepare import prepare

# Each of these is an option of the command line too: --max_iters 1000.
# I/O
out_dir = "out-nanogpt-fsdp"
eval_interval = 50
log_interval = 10
eval_iters = 10
always_save_checkpoint = False  # otherwise where the validation loss has become better
# data
text = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "LICENSE")
gradient_accumulation_steps = 2
batch_size = 6  # of one micro-step of one rank
block_size = 64
# model
n_layer = 4
n_head = 4
n_embd = 64
dropout = 0.1
bias = False
# AdamW
learning_rate = 1e-3
max_iters = 200
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.99
grad_clip = 1.0  # 0.0: gradients are not clipped
# learning rate
decay_lr = True
warmup_iters = 20
lr_decay_iters = 200
min_lr = 1e-4
# system
device_type = "cuda" if torch.cuda.is_available() else "cpu"
dtype = "float32" if device_type == "cpu" else "bfloat16"
seed = 1337

config = {name: value for name, value in globals().items() if name[0] != "_" and isinstance(value, int | float | str)}
parser = argparse.ArgumentParser(description="A small GPT, after nanoGPT's training loop")
for name, value in config.items():
    kind = {"action": argparse.BooleanOptionalAction} if isinstance(value, bool) else {"type": type(value)}
    parser.add_argument(f"--{name}", default=value, **kind)
config = vars(parser.parse_args())
globals().update(config)

device = f"cuda:{os.environ['LOCAL_RANK']}" if device_type == "cuda" else "cpu"
if device_type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
if rank:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - rank 0 prints for all
print(f"tokens per iteration will be: {world_size * gradient_accumulation_steps * batch_size * block_size:,}")
vocab_size = prepare(text, out_dir)  # each rank writes the same
dist.barrier()


def get_batch(split):
    # A memmap that lives on would keep all pages that were ever read.
    data = np.memmap(os.path.join(out_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    if device_type == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)


model_args = {name: config[name] for name in ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")}
model_args["vocab_size"] = vocab_size
torch.manual_seed(seed)  # each rank makes the same model, and keeps its part of it
model = GPT(GPTConfig(**model_args)).to(device)
policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
for block in model.h:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device_type)
torch.manual_seed(seed + rank)  # each rank draws batches of its own


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            _, loss = model(X, Y)
            losses[k] = loss.item()
        mean = losses.mean().to(device)
        dist.all_reduce(mean)
        out[split] = mean.item() / world_size
    model.train()
    return out


def get_lr(it):
    """Linear warm-up, then half a cosine down to ``min_lr``."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


iter_num = 0
best_val_loss = 1e9
X, Y = get_batch("train")  # the very first batch
t0 = time.time()
local_iter_num = 0  # of this process
running_mfu = -1.0
while True:
    lr = get_lr(iter_num) if decay_lr else learning_rate
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = losses["val"]
            if iter_num > 0:
                whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
                model_state, optimizer_state = get_state_dict(model, optimizer, options=whole)
                checkpoint = {
                    "model": model_state,
                    "optimizer": optimizer_state,
                    "model_args": model_args,
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                    "config": config,
                }
                print(f"saving checkpoint to {out_dir}")
                if rank == 0:
                    torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))

    for _ in range(gradient_accumulation_steps):
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")  # while a GPU still computes
        loss.backward()
    if grad_clip != 0.0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    t1 = time.time()
    dt = t1 - t0
    t0 = t1
    if iter_num % log_interval == 0:
        lossf = loss.item() * gradient_accumulation_steps
        if local_iter_num >= 5:  # the first ones are slower
            mfu = model.estimate_mfu(batch_size * gradient_accumulation_steps, dt)
            running_mfu = mfu if running_mfu == -1.0 else 0.9 * running_mfu + 0.1 * mfu
        print(f"iter {iter_num}: loss {lossf:.4f}, time {dt * 1000:.2f}ms, mfu {running_mfu * 100:.2f}%", flush=True)
    local_iter_num += 1
    iter_num += 1

    if iter_num > max_iters:
        break

dist.destroy_process_group()
