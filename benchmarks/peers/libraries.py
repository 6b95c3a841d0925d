"""torch.save, DCP, torchsnapshot and torch_checkpointing, each used as its documentation recommends for this machine.

Every restore reads all bytes into memory: a file that is only mapped would be read later, while training goes on.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.peers.files import Files, Wait, flush
from benchmarks.peers.job import Job


class TorchSave(Files):
    """To a file beside its place, flushed, then renamed: what a careful script does."""

    def begin(self, path: Path) -> None:
        beside = path.with_suffix(".partial")
        torch.save(self.job.state(), beside)
        flush(beside)
        beside.rename(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.job.model.load_state_dict(state["model"])
        self.job.optimizer.load_state_dict(state["optimizer"])


class TorchSaveInPlace(TorchSave):
    """Straight to its place, as most scripts do."""

    def begin(self, path: Path) -> None:
        torch.save(self.job.state(), path)


class DcpSave(Files):
    """``dcp.save``, which flushes its files."""

    def begin(self, path: Path) -> Wait | None:
        dcp.save(self.job.state(), checkpoint_id=path)
        return None

    def load(self, path: Path) -> None:
        state = self.job.state()
        dcp.load(state, checkpoint_id=path)  # into the live tensors
        self.job.optimizer.load_state_dict(state["optimizer"])


class DcpThread(DcpSave):
    """``dcp.async_save``: a stager that is kept copies the state beside forward and backward; a thread writes."""

    kind, shared = AsyncCheckpointerType.THREAD, False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        pinned = self.job.on_gpu  # and copies into pinned memory do not block
        self._stager = DefaultStager(StagingOptions(pinned, self.shared, True, pinned))
        self._staging: Future[Any] | None = None

    def begin(self, path: Path) -> Wait | None:
        response = dcp.async_save(
            self.job.state(), checkpoint_id=path, async_checkpointer_type=self.kind, async_stager=self._stager
        )
        self._staging = response.staging_completion
        self._staging.add_done_callback(self.note_copied)
        return response.upload_completion.result

    def before_step(self) -> None:
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def stop(self) -> None:
        self._stager.close()


class DcpProcess(DcpThread):
    """The same; a process writes, which reads the copy in shared memory."""

    kind, shared = AsyncCheckpointerType.PROCESS, True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # where that process finds its own group
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        super().__init__(*arguments, **options)

    def stop(self) -> None:
        super().stop()
        dist.destroy_process_group()


class Torchsnapshot(Files):
    """``Snapshot.take``. It flushes nothing."""

    def __init__(self, job: Job, *arguments: Any, **options: Any) -> None:
        from torchsnapshot import Snapshot

        super().__init__(job, *arguments, **options)
        self._snapshot = Snapshot
        self._state = {"model": job.model, "optimizer": job.optimizer}

    def begin(self, path: Path) -> Wait | None:
        self._snapshot.take(str(path), self._state)
        return None

    def load(self, path: Path) -> None:
        self._snapshot(str(path)).restore(self._state)


class TorchsnapshotAsync(Torchsnapshot):
    """``Snapshot.async_take``: training goes on when the state is staged."""

    def begin(self, path: Path) -> Wait | None:
        wait: Wait = self._snapshot.async_take(str(path), self._state).wait
        self.note_copied()
        return wait


class TorchCheckpointing(Files):
    """``CheckpointManager`` with its asynchronous saver; for a CPU set up as its troubleshooting page says.

    A process writes. The optimizer steps under the manager's lock. It flushes nothing, and O_DIRECT, its default, fails
    on ext4. It refuses to save over a version.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig, CheckpointLoaderConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(*arguments, **options)
        pinned = self.job.on_gpu
        staging = CheckpointStagerConfig(use_pinned_memory=pinned, use_non_blocking_copy=pinned)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(
                    staging_config=staging,
                    # Its 30 seconds are too few on a busy machine.
                    process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=300),
                ),
                load=CheckpointLoaderConfig(use_mmap=False),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self._lock = self._manager.lock()

    def begin(self, path: Path) -> Wait | None:
        wait: Wait = self._manager.save(str(path), self.job.state()).result
        return wait

    def before_step(self) -> None:
        self._lock.__enter__()

    def after_step(self) -> None:
        self._lock.__exit__(None, None, None)

    def load(self, path: Path) -> None:
        into = {"model": self.job.model.state_dict(), "optimizer": None}  # None: all of it
        self.job.optimizer.load_state_dict(self._manager.load(str(path), into=into)["optimizer"])

    def stop(self) -> None:
        self._manager.close()
